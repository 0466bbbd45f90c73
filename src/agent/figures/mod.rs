//! Figures of running instances: cpu, memory, descriptors and threads of each process tree.
//!
//! One task samples all instances: each once per interval, spread over it. An instance task registers its tree in a
//! [`FigureSlot`]; sampling needs nothing from the task. The newest sample is sent to the gateway with the next batch if it
//! differs noticeably, the last hour is in a ring ([`ring`]) for queries and in a file ([`file`]) for the next agent. The first
//! sample of a process brings the next batch forward. A figure alone changes no state and causes no report.

pub mod file;
pub mod ring;
pub mod timer;
pub mod tree_usage;

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use self::file::FigureFile;
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
/// Interval between two passes: while there are new processes, and otherwise. Fewer passes wake the agent less.
const PASS_INTERVALS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));
/// Minimum number of samples per pass.
const MIN_PER_PASS: usize = 20;

/// The instances of an agent.
#[derive(Default)]
pub struct FigureTable {
    slots: Mutex<FigureSlots>,
    /// Locked by the pass that samples them.
    file: Mutex<FigureFile>,
    /// Processes have a first sample that no update had.
    has_first_samples: AtomicBool,
    first_sampled: Notify,
    /// Processes have no sample yet.
    has_new: Arc<AtomicBool>,
}

#[derive(Default)]
struct FigureSlots {
    /// The slots with their ids.
    all: Vec<(u32, Weak<FigureSlot>)>,
    last_id: u32,
    /// Ids of slots that are gone, which the file does not know yet.
    gone: Vec<u32>,
}

/// The figures of one instance.
pub struct FigureSlot(Mutex<SlotState>);

struct SlotState {
    /// Number of the slot in the file.
    id: u32,
    /// The last file that has the name of the slot.
    named_in: u32,
    key: InstanceKey,
    tree: Option<MeasuredTree>,
    due: Instant,
    /// Time and CPU ticks of the last sample.
    last: Option<(Instant, u64)>,
    now: Option<TreeFigures>,
    /// Figures that the gateway has.
    sent: Option<TreeFigures>,
    ring: FigureRing,
    /// That of the table.
    has_new: Arc<AtomicBool>,
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
        if state.key != *key {
            (state.key, state.named_in) = (key.clone(), 0);
        }
        state.has_new.fetch_or(tree.is_some(), Ordering::AcqRel);
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

    /// Takes a sample. `None`: there is none. True: the first one of this process.
    fn sample(&self, now: Instant, interval: Duration, table: Option<&HostProcesses>) -> Option<bool> {
        let tree = {
            let mut state = locked(&self.0);
            state.due = now + interval;
            state.tree.clone()
        };
        // Unlocked: the task of the instance must not wait for the measurement.
        let tree = tree?;
        let usage = tree.usage(table)?;
        let mut state = locked(&self.0);
        if state.tree.as_ref() != Some(&tree) {
            return None;
        }
        let is_first = state.now.is_none();
        let sampled = figures(&tree, &usage, state.last, now);
        (state.last, state.now) = (Some((now, usage.cpu_ticks)), Some(sampled));
        state.ring.add(clock::now().0, sampled);
        Some(is_first)
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
    /// Writes samples to a file of this folder. The first pass reads those of an earlier agent back.
    pub fn keep_in(&self, folder: &Path) {
        *locked(&self.file) = FigureFile::in_folder(folder);
    }

    /// Adds the slot of an instance. It is removed when the instance drops it.
    pub fn add(&self, key: &InstanceKey) -> Arc<FigureSlot> {
        let mut slots = locked(&self.slots);
        slots.last_id = slots.last_id.wrapping_add(1);
        let id = slots.last_id;
        let slot = Arc::new(FigureSlot(Mutex::new(SlotState {
            id,
            named_in: 0,
            key: key.clone(),
            tree: None,
            due: Instant::now(),
            last: None,
            now: None,
            sent: None,
            ring: FigureRing::default(),
            has_new: Arc::clone(&self.has_new),
        })));
        slots.all.push((id, Arc::downgrade(&slot)));
        slot
    }

    fn slots(&self) -> Vec<Arc<FigureSlot>> {
        let FigureSlots { all, gone, .. } = &mut *locked(&self.slots);
        all.retain(|(id, slot)| {
            let is_alive = slot.strong_count() > 0;
            if !is_alive {
                gone.push(*id);
            }
            is_alive
        });
        all.iter().filter_map(|(_, slot)| slot.upgrade()).collect()
    }

    /// Ids of the slots that are gone since the last call.
    fn take_gone(&self) -> Vec<u32> {
        std::mem::take(&mut locked(&self.slots).gone)
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
        let Ok(mut file) = self.file.try_lock() else { return };
        let slots = self.slots();
        file.restore(&slots);
        let is_due = |state: &SlotState| state.tree.is_some() && state.due <= now;
        let (mut grouped, mut others) = (Vec::new(), Vec::new());
        let (mut is_table_due, mut has_new) = (false, false);
        self.has_new.store(false, Ordering::Release);
        for slot in &slots {
            let state = locked(&slot.0);
            has_new |= state.tree.is_some() && state.now.is_none();
            match &state.tree {
                Some(tree) if tree.has_group() && is_due(&state) => grouped.push((state.due, slot)),
                Some(tree) if !tree.has_group() => {
                    is_table_due |= is_due(&state);
                    others.push(slot);
                }
                Some(_) | None => {}
            }
        }
        self.has_new.fetch_or(has_new, Ordering::AcqRel);
        let passes = usize::try_from(interval.as_secs() / PASS_INTERVALS.1.as_secs()).unwrap_or(usize::MAX);
        let passes = passes.max(1);
        let most = (2 * slots.len().div_ceil(passes)).max(MIN_PER_PASS);
        if grouped.len() > most {
            grouped.sort_by_key(|(due, _)| *due);
        }
        let mut sampled: Vec<&Arc<FigureSlot>> =
            grouped.into_iter().take(most).map(|(_, slot)| slot).collect();
        let table = is_table_due.then(HostProcesses::read);
        if table.is_some() {
            sampled.extend(others);
        }
        let mut has_first = false;
        sampled.retain(|slot| {
            let sample = slot.sample(now, interval, table.as_ref());
            has_first |= sample == Some(true);
            sample.is_some()
        });
        if has_first {
            self.has_first_samples.store(true, Ordering::Release);
            self.first_sampled.notify_waiters();
        }
        file.append(&sampled, &self.take_gone(), &slots);
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
    let mut ticks = tokio::time::interval(PASS_INTERVALS.0.min(interval));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut last: Option<Instant> = None;
    loop {
        ticks.tick().await;
        let Some(table) = table.upgrade() else { return };
        // A tick may be a moment early.
        let elapsed = |last: Instant| last.elapsed() + PASS_INTERVALS.0.min(interval) / 2;
        let is_due = last.is_none_or(|last| elapsed(last) >= PASS_INTERVALS.1.min(interval));
        if !is_due && !table.has_new.load(Ordering::Acquire) {
            continue;
        }
        last = Some(Instant::now());
        // A pass that exceeds the time limit goes on. The next tick skips its work until then.
        let _ = proc_scan::run(move || table.pass(Instant::now(), interval)).await;
    }
}
