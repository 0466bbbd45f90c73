//! Git source: each accepted commit of a branch is the complete desired state until the next.
//!
//! # Theory of operation
//! ```text
//! interval, trigger ─→ fetch into a bare mirror ─→ verify the tip ─→ read its files ─→ SourceState{commit}
//!                                                  follows? signed?  objects, no work tree
//! ```
//! A poll ([`poll`]) runs on a thread, one at a time, while the control loop keeps the last commit applied. The last
//! accepted commit is stored (`source/<owner>/git`) before it is applied, so that the next leader detects a rewound
//! branch, on any machine. [`command`] runs `git`.

mod address;
mod command;
mod commit_files;
mod commit_overlays;
mod config;
pub mod error;
pub mod poll;
mod signature;
mod tree;
pub mod version;
pub mod work_tree;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

pub use self::config::{ConfigError, FetchLimits, GitConfig, Signatures};
use self::poll::{LastCommit, PollResult, Poller};
use super::last_good::LastGood;
use super::{ChangeSignal, PostProcess, SourceError, SourceState};
use crate::clock;
use crate::inventory::InventoryFeed;
use crate::store::{Error, Store, Txn, keys};

/// Delay while another step has to finish first.
const IDLE: Duration = Duration::from_secs(1);

pub struct Git {
    config: Arc<GitConfig>,
    /// Used by one poll at a time.
    looker: Arc<Mutex<Poller>>,
    polling: Option<PollTask>,
    seen: Arc<ChangeSignal>,
    stop: Arc<AtomicBool>,
    /// When the next fetch is due.
    due: Instant,
    accepted: AcceptedCommit,
    reading: Option<SourceState>,
    /// The new state was not returned yet.
    fresh: bool,
    errors: ErrorReports,
}

/// The last accepted commit, and its entry in the store.
#[derive(Default)]
struct AcceptedCommit {
    last: Option<LastCommit>,
    /// The stored commit was read.
    is_recalled: bool,
    /// The accepted commit is not stored yet.
    is_unstored: bool,
}

/// The error of the last poll, and the one that was reported last.
#[derive(Default)]
struct ErrorReports {
    current: Option<SourceError>,
    reported: Option<SourceError>,
}

impl ErrorReports {
    /// Whether the error differs from the last reported one.
    fn is_changed(&self) -> bool {
        match (&self.reported, &self.current) {
            (Some(reported), Some(now)) => !reported.is_same_report(now),
            (reported, now) => reported.is_some() != now.is_some(),
        }
    }

    fn take_change(&mut self) -> Option<Option<&SourceError>> {
        if !self.is_changed() {
            return None;
        }
        self.reported.clone_from(&self.current);
        Some(self.current.as_ref())
    }
}

struct PollTask {
    /// `None`: the result was received, and maintenance runs.
    answer: Option<oneshot::Receiver<PollResult>>,
    thread: JoinHandle<()>,
}

impl Git {
    pub fn new(config: GitConfig, finish: PostProcess) -> Git {
        let config = Arc::new(config);
        let stop = Arc::new(AtomicBool::new(false));
        let looker = Poller::new(Arc::clone(&config), finish, Arc::clone(&stop));
        Git {
            config,
            looker: Arc::new(Mutex::new(looker)),
            polling: None,
            seen: Arc::new(ChangeSignal::default()),
            stop,
            due: Instant::now(),
            accepted: AcceptedCommit::default(),
            reading: None,
            fresh: false,
            errors: ErrorReports::default(),
        }
    }

    pub(super) fn use_inventories(&self, feed: Arc<InventoryFeed>) {
        self.looker.lock().unwrap_or_else(PoisonError::into_inner).use_inventories(feed);
    }

    pub(super) fn last(&self) -> Option<&SourceState> {
        self.reading.as_ref()
    }

    pub(super) fn change_signal(&self) -> &Arc<ChangeSignal> {
        &self.seen
    }

    /// Starts a due poll and receives the result of the last one. Returns whether there is something new.
    pub fn changed(&mut self) -> bool {
        let result = match &mut self.polling {
            Some(PollTask { answer: Some(answer), .. }) => match answer.try_recv() {
                Ok(result) => Some(result),
                Err(oneshot::error::TryRecvError::Empty) => return false,
                Err(oneshot::error::TryRecvError::Closed) => None,
            },
            Some(PollTask { answer: None, thread }) if !thread.is_finished() => return false,
            Some(PollTask { answer: None, .. }) | None => {
                self.polling = None;
                self.poll_if_due();
                return false;
            }
        };
        if let Some(polling) = &mut self.polling {
            polling.answer = None;
        }
        self.due = Instant::now() + self.next_poll_delay();
        result.is_some_and(|result| self.handle_poll_result(result))
    }

    fn poll_if_due(&mut self) {
        // A request that arrives before the stored commit is known stays pending.
        if !self.accepted.is_recalled {
            return;
        }
        let asked = self.seen.asked.swap(false, Ordering::SeqCst);
        if !asked && Instant::now() < self.due {
            return;
        }
        let (to, answer) = oneshot::channel();
        let (looker, seen) = (Arc::clone(&self.looker), Arc::clone(&self.seen));
        let pin = self.accepted.last.clone();
        let have = self.reading.as_ref().and_then(|reading| reading.commit.clone());
        let poll = move || {
            let mut looker = looker.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = to.send(looker.poll(pin.as_ref(), have.as_deref()));
            seen.wake.notify_one();
            looker.gc();
            seen.wake.notify_one();
        };
        self.polling = match std::thread::Builder::new().name("git".to_owned()).spawn(poll) {
            Ok(thread) => Some(PollTask { answer: Some(answer), thread }),
            Err(_) => {
                self.due = Instant::now() + IDLE;
                None
            }
        };
    }

    /// Jitter: many watchers of one repository must not fetch at the same moment.
    fn next_poll_delay(&self) -> Duration {
        let any = RandomState::new().build_hasher().finish() % 1000;
        self.config.interval.mul_f64(0.9 + 0.2 * any as f64 / 1000.0)
    }

    fn handle_poll_result(&mut self, result: PollResult) -> bool {
        // Another controller led: the result may be outdated.
        if !self.accepted.is_recalled {
            self.due = Instant::now();
            return false;
        }
        self.errors.current = result.trouble;
        if let Some((reading, pin)) = result.taken {
            let mut last = self.reading.take().unwrap_or_default();
            self.reading = Some(LastGood::reject_empty(reading, &mut last));
            self.accepted.is_unstored |= self.accepted.last.as_ref() != Some(&pin);
            self.accepted.last = Some(pin);
            self.fresh = true;
        }
        self.fresh || self.errors.is_changed()
    }

    pub fn wait(&self) -> Duration {
        match (&self.polling, self.accepted.is_recalled) {
            (Some(PollTask { answer, thread }), _) if answer.is_some() || !thread.is_finished() => IDLE,
            (_, false) => IDLE,
            (Some(_) | None, true) => self.due.saturating_duration_since(Instant::now()),
        }
    }

    /// The last accepted commit.
    pub async fn read<S: Store>(&mut self, state: &S) -> Result<Option<&SourceState>, Error> {
        if !self.accepted.is_recalled {
            let pin = self.load_last_commit(state).await?;
            // Another controller accepted another commit: ours is no longer active.
            if self.accepted.last.as_ref().map(|pin| &pin.commit) != pin.as_ref().map(|pin| &pin.commit) {
                (self.reading, self.fresh) = (None, false);
            }
            self.accepted = AcceptedCommit { last: pin, is_recalled: true, is_unstored: false };
            self.due = Instant::now();
        }
        if self.accepted.is_unstored {
            self.store_last_commit(state).await?;
            self.accepted.is_unstored = false;
        }
        let fresh = std::mem::take(&mut self.fresh);
        Ok(self.reading.as_mut().map(|reading| {
            reading.changed_since_last = fresh;
            &*reading
        }))
    }

    pub fn take_error_change(&mut self) -> Option<Option<&SourceError>> {
        self.errors.take_change()
    }

    pub fn reset(&mut self) {
        self.accepted.is_recalled = false;
    }

    fn key(&self) -> String {
        keys::last_commit(&self.config.owner)
    }

    /// The last accepted commit of this branch, by any leader.
    async fn load_last_commit<S: Store>(&self, state: &S) -> Result<Option<LastCommit>, Error> {
        let key = self.key();
        let Some(entry) = state.get(&key).await? else { return Ok(None) };
        let damaged = |what: String| Error::Corrupt { file: key.clone(), what };
        let kept: serde_json::Value =
            serde_json::from_slice(&entry.value).map_err(|error| damaged(error.to_string()))?;
        // Another repository or branch is a choice of the user, not a rewind. Older versions masked less.
        let url = kept["url"].as_str().map(address::masked);
        if (url, kept["ref"].as_str()) != (Some(self.config.shown_url()), Some(&self.config.reference)) {
            return Ok(None);
        }
        serde_json::from_value(kept).map(Some).map_err(|error| damaged(error.to_string()))
    }

    async fn store_last_commit<S: Store>(&self, state: &S) -> Result<(), Error> {
        let Some(pin) = &self.accepted.last else { return Ok(()) };
        let value = serde_json::json!({
            "url": self.config.shown_url(), "ref": self.config.reference,
            "path": self.config.path.to_string_lossy(), "commit": pin.commit, "good": pin.good,
            "at": clock::now().to_string(),
        });
        state.txn(Txn::put(self.key(), value.to_string())).await.map(|_| ())
    }
}

impl Drop for Git {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        if let Some(polling) = self.polling.take() {
            let _ = polling.thread.join();
        }
    }
}
