//! Audit log of a gateway: who did what to which instances, on whose behalf, and with which result.
//!
//! # Theory of operation
//! [`record`] turns a request into an entry. [`writer`] appends entries in batches to the current file ([`append`]), as
//! lines of a hash chain ([`chain`]). The answer of a change waits for its line, not for the disk. Every few seconds, and
//! at shutdown, the file is synced and the head of the chain is written to the store ([`anchor`]). [`verify`] compares the
//! files with it, and [`query`] reads them. Files are rotated by size, and the oldest are deleted.
//!
//! Lost in a power cut: entries after the last anchor. Lost by a kill of the gateway: no entry of an answered change.
//!
//! Invariants: no entry has a secret, a command line or an environment; a file that cannot be written refuses changes.

mod anchor;
mod append;
mod chain;
mod files;
mod query;
mod record;
mod repeats;
mod scope;
mod tasks;
mod throttle;
mod verify;
mod writer;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tracing::warn;

pub use anchor::AuditAnchor;
use append::AuditAppender;
pub use chain::ChainHash;
pub use query::{AuditQuery, read_page};
pub(super) use record::{AnswerCodes, RequestLog};
use throttle::AuditThrottle;
pub(super) use throttle::{RepeatedEvent, ThrottledEvent};
pub use verify::verify;
use writer::{AuditWriter, SyncedChain, WriterMessage, WriterState};

use super::{ApiError, Gateway};
use crate::clock;
use crate::contract::{AuditEntry, AuditEvent};
use crate::error_chain::chain;
use crate::store::{Entry, Error, Store, Txn, keys};

/// Interval of anchors. Entries of this time may be lost in a power cut.
const ANCHOR_INTERVAL: Duration = Duration::from_secs(5);

/// Size and number of audit files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuditSettings {
    /// A file of at least this size is followed by a new one.
    pub max_bytes: u64,
    /// Maximum number of files.
    pub keep: usize,
}

impl Default for AuditSettings {
    fn default() -> AuditSettings {
        AuditSettings { max_bytes: 64 << 20, keep: 16 }
    }
}

/// Reason why the audit log cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    #[error("cannot read {}", file.display())]
    Read { file: PathBuf, source: std::io::Error },
    #[error("cannot write {}", file.display())]
    Write { file: PathBuf, source: std::io::Error },
    #[error("cannot write the head of the audit log to the store")]
    Anchor(#[from] Error),
    #[error("cannot start the audit thread")]
    Thread(#[source] std::io::Error),
    #[error("the audit thread has ended")]
    Ended,
}

/// Handle of the log.
pub struct AuditLog {
    folder: PathBuf,
    queue: mpsc::Sender<WriterMessage>,
    state: Arc<WriterState>,
    throttle: AuditThrottle,
    /// The anchor in the store. Locked while a new one is written.
    anchored: tokio::sync::Mutex<Option<AuditAnchor>>,
    /// Limits concurrent reads.
    readers: tokio::sync::Semaphore,
}

impl AuditLog {
    /// Opens the log in a folder, which is created for the owner alone, and continues its chain.
    pub async fn open<S: Store>(
        folder: &Path,
        settings: AuditSettings,
        store: &S,
    ) -> Result<AuditLog, AuditError> {
        let entry = store.get(keys::AUDIT_ANCHOR).await?;
        let anchor: Option<AuditAnchor> = entry.as_ref().map(Entry::decode).transpose()?;
        create_folder(folder).map_err(|source| AuditError::Write { file: folder.to_owned(), source })?;
        let (appender, note) = AuditAppender::open(folder, settings, anchor.as_ref())?;
        let state: Arc<WriterState> = Arc::default();
        let waiting = VecDeque::from([gateway_entry("start", &note.unwrap_or_default())]);
        let writer = AuditWriter { appender, state: Arc::clone(&state), waiting };
        let (queue, messages) = mpsc::channel();
        std::thread::Builder::new()
            .name("audit".to_owned())
            .spawn(move || writer.run(&messages))
            .map_err(AuditError::Thread)?;
        let log = AuditLog {
            folder: folder.to_owned(),
            queue,
            state,
            throttle: AuditThrottle::default(),
            anchored: tokio::sync::Mutex::new(anchor),
            readers: tokio::sync::Semaphore::new(MAX_READERS),
        };
        // The first entry is written before the first request.
        log.anchor(store).await?;
        Ok(log)
    }

    /// Queues an entry.
    pub fn record(&self, entry: AuditEntry) {
        let _ = self.queue.send(WriterMessage::Append(Box::new(entry), None));
    }

    /// Queues an entry, and waits until it is written or that failed.
    pub async fn record_and_wait(&self, entry: AuditEntry) {
        let (reply, written) = oneshot::channel();
        let _ = self.queue.send(WriterMessage::Append(Box::new(entry), Some(reply)));
        let _ = written.await;
    }

    /// Whether an event gets an entry: the number of similar ones without an entry.
    pub(super) fn admit(&self, event: ThrottledEvent) -> Option<u64> {
        self.throttle.admit(event, Instant::now())
    }

    /// The same for an event that is mostly repeated.
    pub(super) fn admit_repeated(&self, event: RepeatedEvent<'_>) -> Option<u64> {
        self.throttle.admit_repeated(event, Instant::now())
    }

    /// Whether an event had its entry recently. Takes no lock.
    pub(super) fn is_repeated(&self, event: RepeatedEvent<'_>) -> bool {
        self.throttle.is_repeated(event, Instant::now())
    }

    /// Whether entries cannot be written.
    pub fn is_failing(&self) -> bool {
        self.state.failing.load(Ordering::Acquire)
    }

    /// Entries written since the start.
    pub fn written(&self) -> u64 {
        self.state.written.load(Ordering::Relaxed)
    }

    /// Syncs the file, writes the head of the chain to the store, and deletes files beyond the number to keep.
    pub async fn anchor<S: Store>(&self, store: &S) -> Result<(), AuditError> {
        let mut anchored = self.anchored.lock().await;
        let (reply, synced) = oneshot::channel();
        self.queue.send(WriterMessage::Sync(reply)).map_err(|_| AuditError::Ended)?;
        let SyncedChain { head, oldest, excess } = synced.await.map_err(|_| AuditError::Ended)??;
        // Only a deletion by this gateway changes the oldest entry: other deletions are found.
        let first = match (&excess, &*anchored) {
            (Some((first, _)), _) => *first,
            (None, Some(anchor)) => anchor.first,
            (None, None) => oldest,
        };
        let anchor = AuditAnchor::of(&head, first);
        if anchored.as_ref() != Some(&anchor) {
            let value = serde_json::to_vec(&anchor).unwrap_or_default();
            store.txn(Txn::put(keys::AUDIT_ANCHOR, value)).await?;
            *anchored = Some(anchor);
        }
        for file in excess.map(|(_, files)| files).unwrap_or_default() {
            if let Err(error) = std::fs::remove_file(&file.path) {
                warn!(file = %file.path.display(), %error, "cannot delete an old audit file");
            }
        }
        Ok(())
    }

    /// The anchor in the store.
    async fn last_anchor(&self) -> Option<AuditAnchor> {
        self.anchored.lock().await.clone()
    }
}

/// Maximum concurrent reads of the files.
const MAX_READERS: usize = 2;

fn create_folder(folder: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o700))
}

/// An entry of the gateway itself.
fn gateway_entry(call: &str, detail: &str) -> AuditEntry {
    let mut entry = AuditEntry { time: timestamp(), event: AuditEvent::Gateway, ..AuditEntry::default() };
    (entry.who.kind, entry.who.name) = ("gateway".to_owned(), "gateway".to_owned());
    (entry.what.call, entry.what.detail) = (call.to_owned(), detail.to_owned());
    entry.result.status = "ok".to_owned();
    entry
}

/// The current time, in RFC 3339.
fn timestamp() -> String {
    clock::now().to_string()
}

impl<S: Store> Gateway<S> {
    pub(super) fn audit(&self) -> Option<&AuditLog> {
        self.audit.as_ref()
    }

    /// Refuses a change while its entry could not be written.
    pub(super) fn check_audited(&self) -> Result<(), ApiError> {
        match self.audit().is_some_and(AuditLog::is_failing) {
            true => Err(ApiError::AuditFailed("entries cannot be written: changes are refused".to_owned())),
            false => Ok(()),
        }
    }

    /// Anchors the audit log regularly, for as long as the gateway runs.
    pub async fn run_audit(&self) {
        let Some(audit) = self.audit() else { return };
        let mut is_failing = false;
        loop {
            tokio::time::sleep(ANCHOR_INTERVAL).await;
            let anchored = audit.anchor(&*self.store).await;
            if let (Err(error), false) = (&anchored, is_failing) {
                warn!(error = %chain(error), "cannot anchor the audit log");
            }
            is_failing = anchored.is_err();
        }
    }

    /// Records the end of the gateway, and anchors the audit log.
    pub async fn close_audit(&self) {
        let Some(audit) = self.audit() else { return };
        audit.record_and_wait(gateway_entry("stop", "")).await;
        if let Err(error) = audit.anchor(&*self.store).await {
            warn!(error = %chain(&error), "cannot anchor the audit log");
        }
    }
}
