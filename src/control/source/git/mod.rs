//! A branch of a git repository: each commit that may be taken is what is wanted, whole, until the next.
//!
//! # Theory of operation
//! ```text
//! interval, nudge ─→ fetch into a bare mirror ─→ judge the tip ─→ read its files ─→ Reading{commit}
//!                                                follows? signed?   objects, no work tree
//! ```
//! A look ([`look`]) happens on a thread, one at a time, while the loop goes on keeping the last commit true. The commit
//! taken last is in the store (`source/<owner>/git`) before it is acted on, so that a branch that was rewound is known to
//! be so by whoever leads next, wherever. `git` itself is run by [`program`].

mod address;
mod command;
mod config;
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

pub use self::config::{GitConfig, Signatures};
use self::poll::{LastCommit, PollResult, Poller};
use super::last_good::LastGood;
use super::{ChangeSignal, PostProcess, SourceError, SourceState};
use crate::clock;
use crate::store::{Error, Store, Txn};

/// How long to wait where something else must happen first.
const IDLE: Duration = Duration::from_secs(1);

pub struct Git {
    config: Arc<GitConfig>,
    /// Used by one look at a time.
    looker: Arc<Mutex<Poller>>,
    looking: Option<PollTask>,
    seen: Arc<ChangeSignal>,
    stop: Arc<AtomicBool>,
    /// When to fetch next.
    due: Instant,
    /// The store was asked for the pin.
    recalled: bool,
    pin: Option<LastCommit>,
    /// The pin is not in the store yet.
    unkept: bool,
    reading: Option<SourceState>,
    /// The reading was not given to anybody yet.
    fresh: bool,
    trouble: Option<SourceError>,
    told: Option<SourceError>,
}

struct PollTask {
    /// `None`: it was heard, and things are put in order.
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
            looking: None,
            seen: Arc::new(ChangeSignal::default()),
            stop,
            due: Instant::now(),
            recalled: false,
            pin: None,
            unkept: false,
            reading: None,
            fresh: false,
            trouble: None,
            told: None,
        }
    }

    pub(super) fn last(&self) -> Option<&SourceState> {
        self.reading.as_ref()
    }

    pub(super) fn change_signal(&self) -> &Arc<ChangeSignal> {
        &self.seen
    }

    /// Begins a look when it is time, and hears what came of the last one: is there anything new?
    pub fn changed(&mut self) -> bool {
        let looked = match &mut self.looking {
            Some(PollTask { answer: Some(answer), .. }) => match answer.try_recv() {
                Ok(looked) => Some(looked),
                Err(oneshot::error::TryRecvError::Empty) => return false,
                Err(oneshot::error::TryRecvError::Closed) => None,
            },
            Some(PollTask { answer: None, thread }) if !thread.is_finished() => return false,
            Some(PollTask { answer: None, .. }) | None => {
                self.looking = None;
                self.poll_if_due();
                return false;
            }
        };
        if let Some(looking) = &mut self.looking {
            looking.answer = None;
        }
        self.due = Instant::now() + self.next_poll_delay();
        looked.is_some_and(|looked| self.handle_poll_result(looked))
    }

    fn poll_if_due(&mut self) {
        // What somebody asked for before we know where we stand is asked for still.
        if !self.recalled {
            return;
        }
        let asked = self.seen.asked.swap(false, Ordering::SeqCst);
        if !asked && Instant::now() < self.due {
            return;
        }
        let (to, answer) = oneshot::channel();
        let (looker, seen) = (Arc::clone(&self.looker), Arc::clone(&self.seen));
        let pin = self.pin.clone();
        let have = self.reading.as_ref().and_then(|reading| reading.commit.clone());
        let look = move || {
            let mut looker = looker.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = to.send(looker.poll(pin.as_ref(), have.as_deref()));
            seen.wake.notify_one();
            looker.gc();
            seen.wake.notify_one();
        };
        self.looking = match std::thread::Builder::new().name("git".to_owned()).spawn(look) {
            Ok(thread) => Some(PollTask { answer: Some(answer), thread }),
            Err(_) => {
                self.due = Instant::now() + IDLE;
                None
            }
        };
    }

    /// Not all at the same moment, where many watch one repository.
    fn next_poll_delay(&self) -> Duration {
        let any = RandomState::new().build_hasher().finish() % 1000;
        self.config.interval.mul_f64(0.9 + 0.2 * any as f64 / 1000.0)
    }

    fn handle_poll_result(&mut self, looked: PollResult) -> bool {
        // Somebody else led meanwhile: what was found then may no longer be right.
        if !self.recalled {
            self.due = Instant::now();
            return false;
        }
        self.trouble = looked.trouble;
        if let Some((reading, pin)) = looked.taken {
            let mut last = self.reading.take().unwrap_or_default();
            self.reading = Some(LastGood::reject_empty(reading, &mut last));
            self.unkept |= self.pin.as_ref() != Some(&pin);
            self.pin = Some(pin);
            self.fresh = true;
        }
        self.fresh || self.error_changed()
    }

    /// Is what is wrong something else than what was last told?
    fn error_changed(&self) -> bool {
        match (&self.told, &self.trouble) {
            (Some(told), Some(now)) => !told.is_same_failure(now),
            (told, now) => told.is_some() != now.is_some(),
        }
    }

    pub fn wait(&self) -> Duration {
        match (&self.looking, self.recalled) {
            (Some(PollTask { answer, thread }), _) if answer.is_some() || !thread.is_finished() => IDLE,
            (_, false) => IDLE,
            (Some(_) | None, true) => self.due.saturating_duration_since(Instant::now()),
        }
    }

    /// The last commit that was taken.
    pub async fn read<S: Store>(&mut self, state: &S) -> Result<Option<&SourceState>, Error> {
        if !self.recalled {
            let pin = self.load_last_commit(state).await?;
            // Somebody else took another commit: ours is not in force any more.
            if self.pin.as_ref().map(|pin| &pin.commit) != pin.as_ref().map(|pin| &pin.commit) {
                (self.reading, self.fresh) = (None, false);
            }
            (self.pin, self.unkept, self.recalled) = (pin, false, true);
            self.due = Instant::now();
        }
        if self.unkept {
            self.store_last_commit(state).await?;
            self.unkept = false;
        }
        let fresh = std::mem::take(&mut self.fresh);
        Ok(self.reading.as_mut().map(|reading| {
            reading.changed_since_last = fresh;
            &*reading
        }))
    }

    pub fn take_error_change(&mut self) -> Option<Option<&SourceError>> {
        if !self.error_changed() {
            return None;
        }
        self.told.clone_from(&self.trouble);
        Some(self.trouble.as_ref())
    }

    pub fn reset(&mut self) {
        self.recalled = false;
    }

    fn key(&self) -> String {
        format!("source/{}/git", self.config.owner)
    }

    /// The commit that was taken last from this branch, by whoever led.
    async fn load_last_commit<S: Store>(&self, state: &S) -> Result<Option<LastCommit>, Error> {
        let key = self.key();
        let Some(entry) = state.get(&key).await? else { return Ok(None) };
        let damaged = |what: String| Error::Corrupt { file: key.clone(), what };
        let kept: serde_json::Value =
            serde_json::from_slice(&entry.value).map_err(|error| damaged(error.to_string()))?;
        // Another repository or branch was followed: that is a choice of the user, not a rewind.
        // Older versions masked less.
        let url = kept["url"].as_str().map(address::masked);
        if (url, kept["ref"].as_str()) != (Some(self.config.shown_url()), Some(&self.config.reference)) {
            return Ok(None);
        }
        serde_json::from_value(kept).map(Some).map_err(|error| damaged(error.to_string()))
    }

    async fn store_last_commit<S: Store>(&self, state: &S) -> Result<(), Error> {
        let Some(pin) = &self.pin else { return Ok(()) };
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
        if let Some(looking) = self.looking.take() {
            let _ = looking.thread.join();
        }
    }
}
