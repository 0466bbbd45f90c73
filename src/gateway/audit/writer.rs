//! Audit writer: a thread that appends queued entries in batches, away from the threads of requests.
//!
//! Entries that cannot be written wait, up to a limit of bytes, and are retried. The log counts as failing until then:
//! the gateway refuses changes. Entries beyond the limit are counted, and an entry reports their number.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use tokio::sync::oneshot;
use tracing::{error, info};

use super::AuditError;
use super::append::AuditAppender;
use super::chain::ChainHead;
use super::files::AuditFile;
use super::gateway_entry;
use crate::contract::AuditEntry;
use crate::error_chain::chain;
use crate::model::count;

/// Maximum entries per write.
const MAX_BATCH: usize = 1024;
/// Interval between attempts to write after a failure.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum entries that wait while the file cannot be written.
const MAX_WAITING: usize = 10_000;

/// State of the writer that requests read.
#[derive(Default)]
pub struct WriterState {
    /// The last write failed.
    pub failing: AtomicBool,
    pub written: AtomicU64,
    pub lost: AtomicU64,
}

pub enum WriterMessage {
    /// An entry. The sender is answered when it is written, or when that failed.
    Append(Box<AuditEntry>, Option<oneshot::Sender<()>>),
    /// Write everything to disk.
    Sync(oneshot::Sender<Result<SyncedChain, AuditError>>),
}

/// The chain on disk.
pub struct SyncedChain {
    pub head: ChainHead,
    /// The first entry in the oldest file.
    pub oldest: u64,
    /// Files to delete, and the oldest entry without them.
    pub excess: Option<(u64, Vec<AuditFile>)>,
}

pub struct AuditWriter {
    pub appender: AuditAppender,
    pub state: Arc<WriterState>,
    pub waiting: VecDeque<AuditEntry>,
}

impl AuditWriter {
    /// Runs until every handle of the log is dropped.
    pub fn run(mut self, messages: &Receiver<WriterMessage>) {
        loop {
            let first = match self.waiting.is_empty() {
                true => messages.recv().map_err(|_| RecvTimeoutError::Disconnected),
                false => messages.recv_timeout(RETRY_INTERVAL),
            };
            match first {
                Ok(message) => self.take(message, messages),
                Err(RecvTimeoutError::Timeout) => self.write(),
                Err(RecvTimeoutError::Disconnected) => {
                    self.write();
                    let _ = self.appender.sync();
                    return;
                }
            }
        }
    }

    /// Takes a message and those behind it, and writes their entries at once.
    fn take(&mut self, first: WriterMessage, messages: &Receiver<WriterMessage>) {
        let (mut written, mut syncs) = (Vec::new(), Vec::new());
        let mut next = Some(first);
        while let Some(message) = next {
            match message {
                WriterMessage::Append(entry, reply) => {
                    self.queue(*entry);
                    written.extend(reply);
                }
                WriterMessage::Sync(reply) => syncs.push(reply),
            }
            next = match self.waiting.len() < MAX_BATCH {
                true => messages.try_recv().ok(),
                false => None,
            };
        }
        self.write();
        for reply in written {
            let _ = reply.send(());
        }
        for reply in syncs {
            let _ = reply.send(self.sync());
        }
    }

    fn queue(&mut self, entry: AuditEntry) {
        if self.waiting.len() < MAX_WAITING {
            self.waiting.push_back(entry);
        } else {
            self.state.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Writes all waiting entries, in batches.
    fn write(&mut self) {
        while !self.waiting.is_empty() {
            let lost = self.state.lost.load(Ordering::Relaxed);
            if lost > 0 {
                let message = format!("dropped {}: the log could not be written", count(lost, "entry"));
                self.waiting.push_back(gateway_entry("audit", &message));
            }
            let batch = self.waiting.len().min(MAX_BATCH);
            let written = self.appender.append(&mut self.waiting.make_contiguous()[..batch]);
            if let Err(error) = written {
                if lost > 0 {
                    self.waiting.pop_back();
                }
                self.failed(&error);
                return;
            }
            self.state.lost.fetch_sub(lost, Ordering::Relaxed);
            self.state.written.fetch_add(batch as u64, Ordering::Relaxed);
            self.waiting.drain(..batch);
            if self.state.failing.swap(false, Ordering::AcqRel) {
                info!("the audit log is written again: changes are accepted");
            }
        }
    }

    fn failed(&self, error: &AuditError) {
        if !self.state.failing.swap(true, Ordering::AcqRel) {
            error!(error = %chain(error), "cannot write the audit log: changes are refused until it is written");
        }
    }

    fn sync(&mut self) -> Result<SyncedChain, AuditError> {
        let synced = self.appender.sync();
        if let Err(error) = &synced {
            self.failed(error);
        }
        synced?;
        let (head, oldest) = (self.appender.head().clone(), self.appender.oldest()?);
        Ok(SyncedChain { head, oldest, excess: self.appender.excess()? })
    }
}
