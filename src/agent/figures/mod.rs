//! Figures of running instances: cpu, memory, descriptors and threads of each process tree.
//!
//! One task samples all instances: each once per interval, spread over it. An instance task registers its tree in a
//! [`FigureSlot`]; sampling needs nothing from the task. Samples stay in memory: the newest is sent to the gateway with the
//! next batch if it differs noticeably, the last hour is in a ring ([`ring`]) for queries. The first sample of a process
//! brings the next batch forward. A figure alone changes no state and causes no report.

pub mod ring;
pub mod timer;
pub mod tree_usage;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use self::ring::FigureRing;
use self::timer::FiguresTimer;
use self::tree_usage::{HostProcesses, MeasuredTree, TreeUsage};
use super::Supervisor;
use super::meter::{memory, processors};
use super::proc_scan;
use crate::agent_protocol::{FigureRow, FiguresAnswer, FiguresUpdate, TreeFigures};
use crate::clock;
use crate::model::InstanceKey;

/// Default interval between two samples of an instance.
pub const SAMPLE_INTERVAL: Duration = Duration::from_secs(60);
/// Delay of the first sample after a launch.
const FIRST_SAMPLE: Duration = Duration::from_secs(2);
/// Interval between two passes, and minimum number of samples per pass.
const PASS_INTERVAL: Duration = Duration::from_secs(1);
const MIN_PER_PASS: usize = 20;

/// The instances of an agent.
#[derive(Default)]
pub struct FigureTable {
    slots: Mutex<Vec<Weak<FigureSlot>>>,
    /// Locked by the pass that samples them.
    pass: Mutex<()>,
    /// Processes have a first sample that no update had.
    has_first_samples: AtomicBool,
    first_sampled: Notify,
}

/// The figures of one instance.
pub struct FigureSlot(Mutex<SlotState>);

struct SlotState {
    key: InstanceKey,
    tree: Option<MeasuredTree>,
    due: Instant,
    /// Time and CPU ticks of the last sample.
    last: Option<(Instant, u64)>,
    now: Option<TreeFigures>,
    /// Figures that the gateway has.
    sent: Option<TreeFigures>,
    ring: FigureRing,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl FigureSlot {
    /// Whether the slot has this process of this instance.
    pub fn has(&self, key: &InstanceKey, process: Option<(u32, u64)>) -> bool {
        let state = locked(&self.0);
        state.key == *key && state.tree.as_ref().map(|tree| (tree.pid, tree.started)) == process
    }

    /// Replaces the tree; `None`: the instance does not run. The ring stays.
    pub fn set(&self, key: &InstanceKey, tree: Option<MeasuredTree>) {
        let mut state = locked(&self.0);
        state.key = key.clone();
        (state.tree, state.last, state.now) = (tree, None, None);
        state.due = Instant::now() + FIRST_SAMPLE;
    }

    /// Measures the tree now, since the last sample. Adds nothing to the ring.
    pub async fn measure(&self) -> Option<TreeFigures> {
        let (tree, last) = {
            let state = locked(&self.0);
            (state.tree.clone()?, state.last)
        };
        let usage = tree.current_usage().await.ok()??;
        Some(figures(&tree, &usage, last, Instant::now()))
    }

    /// Takes a sample. True: the first one of this process.
    fn sample(&self, now: Instant, interval: Duration, table: Option<&HostProcesses>) -> bool {
        let tree = {
            let mut state = locked(&self.0);
            state.due = now + interval;
            state.tree.clone()
        };
        // Unlocked: the task of the instance must not wait for the measurement.
        let Some((tree, usage)) = tree.and_then(|tree| tree.usage(table).map(|usage| (tree, usage))) else {
            return false;
        };
        let mut state = locked(&self.0);
        if state.tree.as_ref() != Some(&tree) {
            return false;
        }
        let is_first = state.now.is_none();
        let sampled = figures(&tree, &usage, state.last, now);
        (state.last, state.now) = (Some((now, usage.cpu_ticks)), Some(sampled));
        state.ring.add(clock::now().0, sampled);
        is_first
    }

    /// The row for the gateway. `all`: also if it has these figures.
    fn row(&self, all: bool) -> Option<FigureRow> {
        let mut state = locked(&self.0);
        let is_new = match (state.sent, state.now) {
            (None, None) => false,
            (Some(sent), Some(now)) => differs(sent, now),
            (None, Some(_)) | (Some(_), None) => true,
        };
        let is_wanted = is_new || all && state.now.is_some();
        if !is_wanted {
            return None;
        }
        state.sent = state.now;
        Some(FigureRow(state.key.clone(), state.now))
    }
}

/// Whether figures differ enough for another row: by a hundredth of a core, two percent of the memory, or any count.
fn differs(sent: TreeFigures, now: TreeFigures) -> bool {
    sent.cpu_milli.abs_diff(now.cpu_milli) >= 10
        || sent.mem_kb.abs_diff(now.mem_kb) > (sent.mem_kb / 50).max(256)
        || (sent.fds, sent.threads, sent.processes) != (now.fds, now.threads, now.processes)
}

/// Figures of a usage since the last sample, or since the start.
fn figures(
    tree: &MeasuredTree,
    usage: &TreeUsage,
    last: Option<(Instant, u64)>,
    now: Instant,
) -> TreeFigures {
    let (secs, ticks) = match last {
        Some((then, ticks)) => {
            (now.saturating_duration_since(then).as_secs_f64(), usage.cpu_ticks.saturating_sub(ticks))
        }
        None => (tree.age_secs(), usage.cpu_ticks),
    };
    let cores = TreeUsage { cpu_ticks: ticks, ..*usage }.cpu_secs() / secs.max(0.1);
    TreeFigures {
        cpu_milli: (cores * 1000.0).round() as u32,
        mem_kb: usage.bytes / 1024,
        fds: usage.fds,
        threads: usage.threads,
        processes: usage.processes,
    }
}

impl FigureTable {
    /// Adds the slot of an instance. It is removed when the instance drops it.
    pub fn add(&self, key: &InstanceKey) -> Arc<FigureSlot> {
        let slot = Arc::new(FigureSlot(Mutex::new(SlotState {
            key: key.clone(),
            tree: None,
            due: Instant::now(),
            last: None,
            now: None,
            sent: None,
            ring: FigureRing::default(),
        })));
        locked(&self.slots).push(Arc::downgrade(&slot));
        slot
    }

    fn slots(&self) -> Vec<Arc<FigureSlot>> {
        let mut slots = locked(&self.slots);
        slots.retain(|slot| slot.strong_count() > 0);
        slots.iter().filter_map(Weak::upgrade).collect()
    }

    /// The figures for the gateway: all, or those that changed since the last call.
    pub fn update(&self, complete: bool) -> FiguresUpdate {
        self.has_first_samples.store(false, Ordering::Release);
        let rows: Vec<FigureRow> = self.slots().iter().filter_map(|slot| slot.row(complete)).collect();
        FiguresUpdate {
            cores: processors() as u32,
            mem_kb: memory() / 1024,
            complete,
            rows,
            answers: Vec::new(),
        }
    }

    /// The answer to a query: fresh figures and the last hour.
    pub async fn answer(&self, id: String, key: &InstanceKey) -> FiguresAnswer {
        let slot = self.slots().into_iter().find(|slot| locked(&slot.0).key == *key);
        let points = slot.as_ref().map(|slot| locked(&slot.0).ring.points()).unwrap_or_default();
        let now = match slot {
            Some(slot) => slot.measure().await,
            None => None,
        };
        FiguresAnswer { id, now, points }
    }

    /// Samples the slots that are due: a bounded number with control groups, and all others at once, since they share a
    /// table of all processes. Nothing, if another pass is sampling.
    fn pass(&self, now: Instant, interval: Duration) {
        let Ok(_pass) = self.pass.try_lock() else { return };
        let slots = self.slots();
        let is_due = |state: &SlotState| state.tree.is_some() && state.due <= now;
        let (mut grouped, mut others) = (Vec::new(), Vec::new());
        let mut is_table_due = false;
        for slot in &slots {
            let state = locked(&slot.0);
            match &state.tree {
                Some(tree) if tree.has_group() && is_due(&state) => grouped.push((state.due, slot)),
                Some(tree) if !tree.has_group() => {
                    is_table_due |= is_due(&state);
                    others.push(slot);
                }
                Some(_) | None => {}
            }
        }
        let passes = usize::try_from(interval.as_secs()).unwrap_or(usize::MAX).max(1);
        let most = (2 * slots.len().div_ceil(passes)).max(MIN_PER_PASS);
        if grouped.len() > most {
            grouped.sort_by_key(|(due, _)| *due);
        }
        let mut first = 0;
        for (_, slot) in grouped.iter().take(most) {
            first += usize::from(slot.sample(now, interval, None));
        }
        if is_table_due {
            let table = HostProcesses::read();
            first += others.iter().filter(|slot| slot.sample(now, interval, Some(&table))).count();
        }
        if first > 0 {
            self.has_first_samples.store(true, Ordering::Release);
            self.first_sampled.notify_waiters();
        }
    }

    /// Waits until processes have a first sample that no update had. Cancelling loses nothing.
    async fn wait_for_first_samples(&self) {
        loop {
            let mut notified = std::pin::pin!(self.first_sampled.notified());
            notified.as_mut().enable();
            if self.has_first_samples.load(Ordering::Acquire) {
                return;
            }
            notified.await;
        }
    }
}

impl Supervisor {
    /// The times of the figure updates of a session.
    pub fn figures_timer(&self) -> FiguresTimer {
        FiguresTimer::new(self.sample_interval, Arc::clone(&self.shared.resources.figures))
    }

    /// The figures of all instances, or those that changed since the last call.
    pub fn figures(&self, complete: bool) -> FiguresUpdate {
        self.shared.resources.figures.update(complete)
    }

    /// Answers to figure queries, each returned once.
    pub fn take_figure_answers(&mut self) -> Vec<FiguresAnswer> {
        std::mem::take(&mut self.figure_answers)
    }
}

/// Samples all instances until the agent ends.
pub async fn run(table: Weak<FigureTable>, interval: Duration) {
    let mut ticks = tokio::time::interval(PASS_INTERVAL.min(interval));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(table) = table.upgrade() else { return };
        // A pass that exceeds the time limit goes on. The next tick skips its work until then.
        let _ = proc_scan::run(move || table.pass(Instant::now(), interval)).await;
    }
}
