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
pub mod look;
mod program;
mod setting;
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

use self::look::{Looked, Looker, Pin};
pub use self::setting::{Setting, Signatures};
use super::kept::Kept;
use super::{Finish, Reading, Seen, Trouble};
use crate::clock;
use crate::store::{Error, Store, Txn};

/// How long to wait where something else must happen first.
const IDLE: Duration = Duration::from_secs(1);

pub struct Git {
    setting: Arc<Setting>,
    /// Used by one look at a time.
    looker: Arc<Mutex<Looker>>,
    looking: Option<Looking>,
    seen: Arc<Seen>,
    stop: Arc<AtomicBool>,
    /// When to fetch next.
    due: Instant,
    /// The store was asked for the pin.
    recalled: bool,
    pin: Option<Pin>,
    /// The pin is not in the store yet.
    unkept: bool,
    reading: Option<Reading>,
    /// The reading was not given to anybody yet.
    fresh: bool,
    trouble: Option<Trouble>,
    told: Option<Trouble>,
}

struct Looking {
    /// `None`: it was heard, and things are put in order.
    answer: Option<oneshot::Receiver<Looked>>,
    thread: JoinHandle<()>,
}

impl Git {
    pub fn new(setting: Setting, finish: Finish) -> Git {
        let setting = Arc::new(setting);
        let stop = Arc::new(AtomicBool::new(false));
        let looker = Looker::new(Arc::clone(&setting), finish, Arc::clone(&stop));
        Git {
            setting,
            looker: Arc::new(Mutex::new(looker)),
            looking: None,
            seen: Arc::new(Seen::default()),
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

    pub(super) fn last(&self) -> Option<&Reading> {
        self.reading.as_ref()
    }

    pub(super) fn seen(&self) -> &Arc<Seen> {
        &self.seen
    }

    /// Begins a look when it is time, and hears what came of the last one: is there anything new?
    pub fn changed(&mut self) -> bool {
        let looked = match &mut self.looking {
            Some(Looking { answer: Some(answer), .. }) => match answer.try_recv() {
                Ok(looked) => Some(looked),
                Err(oneshot::error::TryRecvError::Empty) => return false,
                Err(oneshot::error::TryRecvError::Closed) => None,
            },
            Some(Looking { answer: None, thread }) if !thread.is_finished() => return false,
            Some(Looking { answer: None, .. }) | None => {
                self.looking = None;
                self.begin_if_due();
                return false;
            }
        };
        if let Some(looking) = &mut self.looking {
            looking.answer = None;
        }
        self.due = Instant::now() + self.next();
        looked.is_some_and(|looked| self.hear(looked))
    }

    fn begin_if_due(&mut self) {
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
            let _ = to.send(looker.look(pin.as_ref(), have.as_deref()));
            seen.wake.notify_one();
            looker.tidy();
            seen.wake.notify_one();
        };
        self.looking = match std::thread::Builder::new().name("git".to_owned()).spawn(look) {
            Ok(thread) => Some(Looking { answer: Some(answer), thread }),
            Err(_) => {
                self.due = Instant::now() + IDLE;
                None
            }
        };
    }

    /// Not all at the same moment, where many watch one repository.
    fn next(&self) -> Duration {
        let any = RandomState::new().build_hasher().finish() % 1000;
        self.setting.interval.mul_f64(0.9 + 0.2 * any as f64 / 1000.0)
    }

    fn hear(&mut self, looked: Looked) -> bool {
        // Somebody else led meanwhile: what was found then may no longer be right.
        if !self.recalled {
            self.due = Instant::now();
            return false;
        }
        self.trouble = looked.trouble;
        if let Some((reading, pin)) = looked.taken {
            let mut last = self.reading.take().unwrap_or_default();
            self.reading = Some(Kept::unless_gone(reading, &mut last));
            self.unkept |= self.pin.as_ref() != Some(&pin);
            self.pin = Some(pin);
            self.fresh = true;
        }
        self.fresh || self.is_told_otherwise()
    }

    /// Is what is wrong something else than what was last told?
    fn is_told_otherwise(&self) -> bool {
        match (&self.told, &self.trouble) {
            (Some(told), Some(now)) => !told.is_as(now),
            (told, now) => told.is_some() != now.is_some(),
        }
    }

    pub fn wait(&self) -> Duration {
        match (&self.looking, self.recalled) {
            (Some(Looking { answer, thread }), _) if answer.is_some() || !thread.is_finished() => IDLE,
            (_, false) => IDLE,
            (Some(_) | None, true) => self.due.saturating_duration_since(Instant::now()),
        }
    }

    /// The last commit that was taken.
    pub async fn read<S: Store>(&mut self, state: &S) -> Result<Option<&Reading>, Error> {
        if !self.recalled {
            let pin = self.recall(state).await?;
            // Somebody else took another commit: ours is not in force any more.
            if self.pin.as_ref().map(|pin| &pin.commit) != pin.as_ref().map(|pin| &pin.commit) {
                (self.reading, self.fresh) = (None, false);
            }
            (self.pin, self.unkept, self.recalled) = (pin, false, true);
            self.due = Instant::now();
        }
        if self.unkept {
            self.keep(state).await?;
            self.unkept = false;
        }
        let fresh = std::mem::take(&mut self.fresh);
        Ok(self.reading.as_mut().map(|reading| {
            reading.is_news = fresh;
            &*reading
        }))
    }

    pub fn news(&mut self) -> Option<Option<&Trouble>> {
        if !self.is_told_otherwise() {
            return None;
        }
        self.told.clone_from(&self.trouble);
        Some(self.trouble.as_ref())
    }

    pub fn forget(&mut self) {
        self.recalled = false;
    }

    fn key(&self) -> String {
        format!("source/{}/git", self.setting.owner)
    }

    /// The commit that was taken last from this branch, by whoever led.
    async fn recall<S: Store>(&self, state: &S) -> Result<Option<Pin>, Error> {
        let key = self.key();
        let Some(entry) = state.get(&key).await? else { return Ok(None) };
        let damaged = |what: String| Error::Corrupt { file: key.clone(), what };
        let kept: serde_json::Value =
            serde_json::from_slice(&entry.value).map_err(|error| damaged(error.to_string()))?;
        // Another repository or branch was followed: that is a choice of the user, not a rewind.
        // Older versions masked less.
        let url = kept["url"].as_str().map(address::masked);
        if (url, kept["ref"].as_str()) != (Some(self.setting.shown_url()), Some(&self.setting.reference)) {
            return Ok(None);
        }
        serde_json::from_value(kept).map(Some).map_err(|error| damaged(error.to_string()))
    }

    async fn keep<S: Store>(&self, state: &S) -> Result<(), Error> {
        let Some(pin) = &self.pin else { return Ok(()) };
        let value = serde_json::json!({
            "url": self.setting.shown_url(), "ref": self.setting.reference,
            "path": self.setting.path.to_string_lossy(), "commit": pin.commit, "good": pin.good,
            "at": clock::moment().to_string(),
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
