//! What is known now: fed with the loop's events, read by whoever is asked.
//!
//! One lock, held for short moments only; nobody who reads can make the loop wait. What happened is kept as numbered
//! notes, the newest thousand: whoever follows them asks for what came after the number that he knows, and who is too slow
//! is told that he missed some. The numbers go on where those of an earlier run ended.

mod note;
mod row;
mod taking;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::sync::watch;

pub use self::note::{HIDDEN, Kind, Level, Note, is_private, may_quote};
pub use self::row::{Row, Sync};
use super::pin::Pin;
use super::source::Reading;
use super::{Event, Look};
use crate::clock;
use crate::manifest::Problem;
pub use crate::manifest::Severity;
use crate::model::{InstanceKey, Time};

/// So many notes are kept.
pub const KEPT: usize = 1000;
/// Upper bounds of the buckets of durations, in seconds.
pub const BUCKETS: [f64; 10] = [0.005, 0.02, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0];
/// A loop that was not heard of for this long stands still: a target may be that slow to answer.
const STILL: Duration = Duration::from_secs(60);
/// The longest pass, and then some.
const LONGEST: Duration = Duration::from_secs(900);

/// What is watched over, as it was said at the start.
#[derive(Clone, Debug, Default)]
pub struct Subject {
    pub target: String,
    pub owner: String,
    pub sources: Vec<String>,
    pub follow: bool,
    pub heal: bool,
    pub prune: bool,
    pub interval: Duration,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// Nobody was asked yet.
    #[default]
    Starting,
    /// Somebody else leads: his host and process.
    Waiting {
        host: String,
        pid: u32,
    },
    Leading {
        generation: u64,
    },
}

/// Everything that is known at one moment.
#[derive(Clone, Debug)]
pub struct Known {
    pub role: Role,
    pub revision: String,
    /// The commit that it is, where it is one.
    pub commit: Option<String>,
    /// A person's word that stands against the source.
    pub pin: Option<Pin>,
    /// Why the source is not followed: what was last taken stays in force.
    pub not_followed: Option<String>,
    pub files: usize,
    /// Something is broken, and in force as it last was.
    pub is_incomplete: bool,
    pub problems: Arc<[Problem]>,
    pub look: Option<Arc<Look>>,
    pub looks: u64,
    pub failed_looks: u64,
    /// How long the last pass took.
    pub passed: Option<Duration>,
    /// Since when one is under way.
    pub passing: Option<Instant>,
    pub turned: Instant,
    /// What went wrong, as long as it does.
    pub trouble: Option<String>,
    /// Steps that are under way or wait for their turn.
    pub queue: usize,
    /// Plans, or parts of plans, that are being carried out.
    pub under_way: usize,
    /// By operation and outcome.
    pub operations: BTreeMap<(&'static str, &'static str), u64>,
    pub passes: Times,
    /// The same of what was carried out.
    pub runs: Times,
    /// Of the newest note.
    pub number: u64,
}

impl Known {
    /// Every instance of the last look that is wanted, or is ours.
    pub fn rows(&self) -> &[Row] {
        self.look.as_ref().map_or(&[], |look| look.rows.get_or_init(|| row::rows(look)))
    }
}

/// How long something took, each time.
#[derive(Clone, Debug, Default)]
pub struct Times {
    pub buckets: [u64; BUCKETS.len()],
    pub seconds: f64,
    pub all: u64,
}

impl Times {
    fn take(&mut self, took: Duration) {
        let seconds = took.as_secs_f64();
        if let Some(bucket) = BUCKETS.iter().position(|most| seconds <= *most) {
            self.buckets[bucket] += 1;
        }
        self.seconds += seconds;
        self.all += 1;
    }
}

/// The board itself; one a loop, shared.
pub struct Board {
    pub subject: Subject,
    pub began: Time,
    inner: Mutex<Inner>,
    /// The newest number; who waits for notes waits here. `None`: there will be no more.
    news: watch::Sender<Option<u64>>,
}

struct Inner {
    known: Known,
    notes: VecDeque<Arc<Note>>,
    /// Something happened since everything was as wanted.
    news: bool,
    not_converging: BTreeSet<InstanceKey>,
}

/// Notes after a number.
#[derive(Clone, Debug, Default)]
pub struct Later {
    pub notes: Vec<Arc<Note>>,
    /// Some that came after that number are no longer kept.
    pub missed: bool,
}

impl Board {
    pub fn new(subject: Subject) -> Board {
        let began = clock::moment();
        // Far above what an earlier run can have counted to.
        let number = u64::try_from(began.0).unwrap_or(0);
        let known = Known {
            role: Role::Starting,
            revision: String::new(),
            commit: None,
            pin: None,
            not_followed: None,
            files: 0,
            is_incomplete: false,
            problems: Arc::new([]),
            look: None,
            looks: 0,
            failed_looks: 0,
            passed: None,
            passing: None,
            turned: Instant::now(),
            trouble: None,
            queue: 0,
            under_way: 0,
            operations: BTreeMap::new(),
            passes: Times::default(),
            runs: Times::default(),
            number,
        };
        let inner = Inner { known, notes: VecDeque::new(), news: true, not_converging: BTreeSet::new() };
        Board { subject, began, inner: Mutex::new(inner), news: watch::Sender::new(Some(number)) }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn known(&self) -> Known {
        self.inner().known.clone()
    }

    pub fn is_alive(&self) -> bool {
        self.is_turning(STILL, LONGEST)
    }

    /// Does the loop go round? A pass may take as long as it was given.
    fn is_turning(&self, within: Duration, longest_pass: Duration) -> bool {
        let known = &self.inner().known;
        match known.passing {
            Some(since) => since.elapsed() < longest_pass,
            None => known.turned.elapsed() < within,
        }
    }

    /// At most `most` notes that came after a number.
    pub fn after(&self, number: u64, most: usize) -> Later {
        let inner = self.inner();
        let first = inner.notes.front().map_or(inner.known.number, |note| note.number - 1);
        let skipped = usize::try_from(number.saturating_sub(first)).unwrap_or(usize::MAX);
        Later {
            notes: inner.notes.iter().skip(skipped).take(most).cloned().collect(),
            missed: number < first,
        }
    }

    /// Where to wait for notes.
    pub fn news(&self) -> watch::Receiver<Option<u64>> {
        self.news.subscribe()
    }

    /// There will be no more: whoever waits ends.
    pub fn close(&self) {
        self.news.send_replace(None);
    }

    /// Somebody asked for something.
    pub fn asked(&self, title: String) {
        self.put(|inner| inner.note(Kind::Asked, Level::Info, title, String::new(), json!({})));
    }

    /// Takes in what happened.
    pub fn note(&self, event: &Event<'_>) {
        // What takes time is done before the lock is taken.
        let changed = match event {
            Event::Planned { look } => {
                let before = self.inner().known.look.clone();
                before.map_or(0, |before| row::changes(&before.observed, &look.observed))
            }
            _ => 0,
        };
        self.put(|inner| inner.take(event, changed));
    }

    fn put(&self, change: impl FnOnce(&mut Inner)) {
        let number = {
            let mut inner = self.inner();
            change(&mut inner);
            inner.known.number
        };
        self.news.send_if_modified(|last| match last {
            Some(last) if *last != number => {
                *last = number;
                true
            }
            Some(_) | None => false,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_numbered_and_who_is_too_slow_is_told() {
        let board = Board::new(Subject::default());
        let begin = board.known().number;
        assert!(board.after(begin, 10).notes.is_empty() && !board.after(begin, 10).missed);
        let mut news = board.news();
        for nth in 0..KEPT + 5 {
            board.note(&Event::Trouble { why: &format!("trouble {nth}") });
        }
        assert!(news.has_changed().is_ok_and(|changed| changed));
        assert_eq!(*news.borrow_and_update(), Some(begin + KEPT as u64 + 5));
        let all = board.after(begin, usize::MAX);
        assert!(all.missed && all.notes.len() == KEPT);
        let last = board.after(begin + KEPT as u64 + 3, usize::MAX);
        assert!(!last.missed);
        let titles: Vec<&str> = last.notes.iter().map(|note| note.title.as_str()).collect();
        assert_eq!(titles, ["trouble 1003", "trouble 1004"]);
        assert!(board.after(u64::MAX, 10).notes.is_empty(), "of another run");
        board.note(&Event::Trouble { why: "trouble 1004" });
        assert!(!news.has_changed().is_ok_and(|changed| changed), "the same again is no news");
    }

    #[test]
    fn a_loop_that_stands_still_is_noticed() {
        let board = Board::new(Subject::default());
        let (short, long) = (Duration::from_secs(5), Duration::from_secs(600));
        assert!(board.is_turning(short, long));
        assert!(!board.is_turning(Duration::ZERO, long));
        board.note(&Event::Passing);
        assert!(board.is_turning(Duration::ZERO, long), "a pass takes its time");
        assert!(!board.is_turning(short, Duration::ZERO), "and not for ever");
        board.note(&Event::Passed { took: Duration::from_millis(7) });
        assert_eq!(board.known().passes.buckets[1], 1);
    }
}
