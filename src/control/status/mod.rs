//! Status board: the controller's current state, derived from its events.
//!
//! One lock, held briefly; readers cannot block the control loop. The newest thousand log entries are kept, with
//! sequence numbers. A follower asks for the entries after its last number, and learns if it missed some. Numbers
//! continue above those of an earlier run.

mod log;
mod reduce;
mod row;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::watch;

pub use self::log::{HIDDEN, Kind, LogEntry, LogLevel, is_private, may_quote};
pub use self::row::{Row, SyncStatus};
use super::{ControllerEvent, PassResult};
use crate::clock;
use crate::contract::EventDetails;
use crate::engine::pin::Pin;
use crate::manifest::Problem;
pub use crate::manifest::Severity;
use crate::model::{InstanceKey, ManifestRevision, Time};
use crate::source::SourceState;

/// Maximum number of log entries.
pub const MAX_ENTRIES: usize = 1000;
/// Upper bounds of the duration buckets, in seconds.
pub const BUCKETS: [f64; 10] = [0.005, 0.02, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0];
/// A loop without a tick for this long hangs: a target may be that slow to reply.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Margin over the longest pass.
const MAX_PASS_DURATION: Duration = Duration::from_secs(900);

/// Configuration of the controller at its start.
#[derive(Clone, Debug, Default)]
pub struct ControllerInfo {
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
    /// Leadership was not requested yet.
    #[default]
    Starting,
    /// Another controller leads: its host and process.
    Waiting {
        host: String,
        pid: u32,
    },
    Leading {
        generation: u64,
    },
}

/// The state at one moment.
#[derive(Clone, Debug)]
pub struct ControllerStatus {
    pub role: Role,
    pub source: SourceStatus,
    pub pass: PassStatus,
    pub work: WorkStatus,
    /// The current failure.
    pub trouble: Option<String>,
    pub last_tick: Instant,
    /// Number of the newest entry.
    pub number: u64,
}

/// The manifests that were read last.
#[derive(Clone, Debug, Default)]
pub struct SourceStatus {
    pub revision: ManifestRevision,
    /// The commit of the revision, where it has one.
    pub commit: Option<String>,
    /// The active pin.
    pub pin: Option<Pin>,
    /// Reason why the source is not followed: the active revision stays.
    pub not_followed: Option<String>,
    /// Following is switched off, which is not a fault of the source.
    pub is_follow_off: bool,
    pub files: usize,
    /// Last good versions replace broken files.
    pub is_incomplete: bool,
    pub problems: Arc<[Problem]>,
}

/// Passes so far, and the last result.
#[derive(Clone, Debug, Default)]
pub struct PassStatus {
    pub last: Option<Arc<PassResult>>,
    pub observations: u64,
    pub failed_observations: u64,
    /// Duration of the last pass.
    pub duration: Option<Duration>,
    /// Start of the current pass.
    pub started: Option<Instant>,
    pub durations: DurationHistogram,
}

/// Plans in flight, and finished operations.
#[derive(Clone, Debug, Default)]
pub struct WorkStatus {
    /// Steps in flight or queued.
    pub queue: usize,
    /// Plans, or components of plans, in flight.
    pub in_flight: usize,
    /// By operation and outcome.
    pub operations: BTreeMap<(&'static str, &'static str), u64>,
    /// Durations of executions.
    pub durations: DurationHistogram,
}

impl ControllerStatus {
    /// Every instance of the last pass that is wanted or ours.
    pub fn rows(&self) -> &[Row] {
        self.pass.last.as_ref().map_or(&[], |pass| pass.rows.get_or_init(|| row::rows(pass)))
    }
}

/// Histogram of durations.
#[derive(Clone, Debug, Default)]
pub struct DurationHistogram {
    pub buckets: [u64; BUCKETS.len()],
    pub seconds: f64,
    pub all: u64,
}

impl DurationHistogram {
    fn observe(&mut self, took: Duration) {
        let seconds = took.as_secs_f64();
        if let Some(bucket) = BUCKETS.iter().position(|most| seconds <= *most) {
            self.buckets[bucket] += 1;
        }
        self.seconds += seconds;
        self.all += 1;
    }
}

/// The board itself; one per controller, shared.
pub struct StatusBoard {
    pub subject: ControllerInfo,
    pub began: Time,
    inner: Mutex<Inner>,
    /// The newest number, for followers to wait on. `None`: there will be no more.
    newest: watch::Sender<Option<u64>>,
}

struct Inner {
    known: ControllerStatus,
    notes: VecDeque<Arc<LogEntry>>,
    /// Something happened since everything was as wanted.
    has_changed: bool,
    not_converging: BTreeSet<InstanceKey>,
}

/// Entries after a number.
#[derive(Clone, Debug, Default)]
pub struct EntriesAfter {
    pub notes: Vec<Arc<LogEntry>>,
    /// Some entries after that number are no longer kept.
    pub missed: bool,
}

impl StatusBoard {
    pub fn new(subject: ControllerInfo) -> StatusBoard {
        let began = clock::now();
        // Far above the numbers of an earlier run.
        let number = u64::try_from(began.0).unwrap_or(0);
        let known = ControllerStatus {
            role: Role::Starting,
            source: SourceStatus::default(),
            pass: PassStatus::default(),
            work: WorkStatus::default(),
            trouble: None,
            last_tick: Instant::now(),
            number,
        };
        let inner =
            Inner { known, notes: VecDeque::new(), has_changed: true, not_converging: BTreeSet::new() };
        StatusBoard { subject, began, inner: Mutex::new(inner), newest: watch::Sender::new(Some(number)) }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn status(&self) -> ControllerStatus {
        self.inner().known.clone()
    }

    pub fn is_alive(&self) -> bool {
        self.is_ticking(STALL_TIMEOUT, MAX_PASS_DURATION)
    }

    /// Whether the control loop iterates. A pass may take up to its timeout.
    fn is_ticking(&self, within: Duration, longest_pass: Duration) -> bool {
        let known = &self.inner().known;
        match known.pass.started {
            Some(since) => since.elapsed() < longest_pass,
            None => known.last_tick.elapsed() < within,
        }
    }

    /// At most `most` entries after a number.
    pub fn entries_after(&self, number: u64, most: usize) -> EntriesAfter {
        let inner = self.inner();
        let first = inner.notes.front().map_or(inner.known.number, |note| note.number - 1);
        let skipped = usize::try_from(number.saturating_sub(first)).unwrap_or(usize::MAX);
        EntriesAfter {
            notes: inner.notes.iter().skip(skipped).take(most).cloned().collect(),
            missed: number < first,
        }
    }

    /// Receiver to wait for entries.
    pub fn subscribe(&self) -> watch::Receiver<Option<u64>> {
        self.newest.subscribe()
    }

    /// Ends all followers.
    pub fn close(&self) {
        self.newest.send_replace(None);
    }

    /// Logs a request.
    pub fn log_request(&self, title: String) {
        self.update(|inner| {
            inner.log(Kind::Requested, LogLevel::Info, title, String::new(), EventDetails::Nothing {})
        });
    }

    /// Applies an event.
    pub fn record(&self, event: &ControllerEvent<'_>) {
        // Expensive work happens before the lock is taken.
        let changed = match event {
            ControllerEvent::Planned { result } => {
                let before = self.inner().known.pass.last.clone();
                before.map_or(0, |before| row::count_changes(&before.observed, &result.observed))
            }
            _ => 0,
        };
        self.update(|inner| inner.apply(event, changed));
    }

    fn update(&self, change: impl FnOnce(&mut Inner)) {
        let number = {
            let mut inner = self.inner();
            change(&mut inner);
            inner.known.number
        };
        self.newest.send_if_modified(|last| match last {
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
    fn entries_are_numbered_and_a_slow_reader_gets_a_gap() {
        let board = StatusBoard::new(ControllerInfo::default());
        let begin = board.status().number;
        assert!(board.entries_after(begin, 10).notes.is_empty() && !board.entries_after(begin, 10).missed);
        let mut newest = board.subscribe();
        for nth in 0..MAX_ENTRIES + 5 {
            board.record(&ControllerEvent::Failure { why: &format!("trouble {nth}") });
        }
        assert!(newest.has_changed().is_ok_and(|changed| changed));
        assert_eq!(*newest.borrow_and_update(), Some(begin + MAX_ENTRIES as u64 + 5));
        let all = board.entries_after(begin, usize::MAX);
        assert!(all.missed && all.notes.len() == MAX_ENTRIES);
        let last = board.entries_after(begin + MAX_ENTRIES as u64 + 3, usize::MAX);
        assert!(!last.missed);
        let titles: Vec<&str> = last.notes.iter().map(|note| note.title.as_str()).collect();
        assert_eq!(titles, ["trouble 1003", "trouble 1004"]);
        assert!(board.entries_after(u64::MAX, 10).notes.is_empty(), "numbers of another run");
        board.record(&ControllerEvent::Failure { why: "trouble 1004" });
        assert!(!newest.has_changed().is_ok_and(|changed| changed), "a repeated failure is not logged");
    }

    #[test]
    fn a_stuck_loop_is_detected() {
        let board = StatusBoard::new(ControllerInfo::default());
        let (short, long) = (Duration::from_secs(5), Duration::from_secs(600));
        assert!(board.is_ticking(short, long));
        assert!(!board.is_ticking(Duration::ZERO, long));
        board.record(&ControllerEvent::PassStarted);
        assert!(board.is_ticking(Duration::ZERO, long), "a pass is running");
        assert!(!board.is_ticking(short, Duration::ZERO), "but not longer than its timeout");
        board.record(&ControllerEvent::PassFinished { took: Duration::from_millis(7) });
        assert_eq!(board.status().pass.durations.buckets[1], 1);
    }
}
