//! Simulated backend: a fleet in memory with injected faults, for property tests and rehearsals.
//!
//! # Theory of operation
//! A [`Fleet`] holds the instances and executes one operation at a time, by the rules of real targets: preconditions,
//! effects, which pid stays. It has no faults. [`Sim`] implements [`Backend`] on top: calls take time, lists lag, replies
//! are lost or duplicated, hosts die, rows are missing or stay in progress, effects occur after the last deadline,
//! processes die. Foreign processes may have wanted identities ([`Fleet::place_stranger`]). Time is virtual and advances
//! only by [`Sim::advance`]; randomness is seeded. The same seed and the same calls give the same history.

mod fleet;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};

pub use fleet::{Fleet, Proc, SimulatedSpec};

use tokio::sync::mpsc::Sender;

use super::{
    Backend, BackendError, ChangeEvent, ChangeStream, Operation, OperationState, OperationStatus, Refusal,
    RefusalReason, RowState, Scope, Task, Watermark,
};
use crate::model::{Dialect, HostKey, InstanceKey, Observed, ObservedInstance, RunningProcess, Time};

/// Probability of each fault (0.0 never, 1.0 always).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Faults {
    /// Age of an observation in seconds.
    pub lag_secs: u64,
    /// A call is executed, and its response lost.
    pub lost_replies: f64,
    /// A call is executed twice.
    pub doubled_calls: f64,
    /// A row is missing from the results.
    pub missing_rows: f64,
    /// A row stays in progress although the operation was executed.
    pub endless_rows: f64,
    /// An operation takes effect only after [`LATE_SECS`].
    pub late_effects: f64,
    /// A running process dies within a second.
    pub deaths: f64,
}

/// Duration of an operation.
pub const TAKES_SECS: u64 = 1;
/// Duration of a late operation.
pub const LATE_SECS: u64 = 900;

pub struct Sim {
    inner: Mutex<Inner>,
}

struct Inner {
    fleet: Fleet,
    faults: Faults,
    chance: Chance,
    now: Time,
    dead: BTreeSet<HostKey>,
    /// States with their start times; the last is the current one.
    history: Vec<(Time, BTreeMap<InstanceKey, ObservedInstance>)>,
    /// Operations in flight, by the time of their effect; the last flag: no caller waits.
    pending: Vec<(Time, u64, Operation, bool)>,
    /// Number of repeated or late effects.
    extra_effects: BTreeMap<InstanceKey, usize>,
    tasks: BTreeMap<u64, Vec<Row>>,
    stream: SimStream,
    /// Start time of each process, by pid.
    started: BTreeMap<u32, Time>,
}

/// The change stream.
struct SimStream {
    followers: Vec<Sender<ChangeEvent>>,
    /// Number of changes so far.
    number: u64,
    /// Whether the target streams changes.
    is_offered: bool,
}

struct Row {
    order: Operation,
    result: OperationState,
    missing: bool,
    endless: bool,
}

impl Sim {
    pub fn new(dialect: Dialect, seed: u64) -> Sim {
        Sim::over(Fleet::new(dialect), Faults::default(), seed)
    }

    pub fn over(fleet: Fleet, faults: Faults, seed: u64) -> Sim {
        let history = vec![(Time(i64::MIN), fleet.rows())];
        let inner = Inner {
            fleet,
            faults,
            chance: Chance(seed),
            now: Time(0),
            dead: BTreeSet::new(),
            history,
            pending: Vec::new(),
            extra_effects: BTreeMap::new(),
            tasks: BTreeMap::new(),
            stream: SimStream { followers: Vec::new(), number: 0, is_offered: false },
            started: BTreeMap::new(),
        };
        Sim { inner: Mutex::new(inner) }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // A panic elsewhere leaves the fleet consistent: it changes one operation at a time.
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Streams changes from now on, as the Abide gateway does.
    pub fn tell_changes(self) -> Sim {
        self.inner().stream.is_offered = true;
        self
    }

    /// Ends all change streams, as a broken connection would.
    pub fn break_off(&self) {
        self.inner().stream.followers.clear();
    }

    pub fn now(&self) -> Time {
        self.inner().now
    }

    /// Advances time second by second, and applies all events.
    pub fn advance(&self, seconds: u64) {
        let mut inner = self.inner();
        for _ in 0..seconds {
            inner.tick();
        }
    }

    /// The actual state of the fleet.
    pub fn fleet(&self) -> Fleet {
        self.inner().fleet.clone()
    }

    /// A live status check of one instance: the current facts, and the start time of its process.
    pub fn check(&self, key: &InstanceKey) -> ObservedInstance {
        let inner = self.inner();
        let fleet = &inner.fleet;
        let proc = fleet.procs().get(key);
        let found = fleet.pid_of(key);
        let pid = found.map(|(pid, _)| pid);
        let hosted = proc.is_some_and(|proc| proc.hosted);
        ObservedInstance {
            registered: Some(proc.is_some_and(|proc| proc.given.is_some())),
            hosted: Some(hosted),
            running: Some(pid.is_some()),
            report_time: Some(inner.now),
            process: RunningProcess {
                pid,
                started: pid.map(|pid| inner.started.get(&pid).copied().unwrap_or(Time(i64::MIN))),
                // Only the Abide agent reports it.
                not_owned: fleet.dialect() == Dialect::Abide && found.is_some_and(|(_, stranger)| stranger),
            },
            ..ObservedInstance::default()
        }
    }

    /// Number of accepted calls.
    pub fn calls(&self) -> usize {
        self.inner().tasks.len()
    }

    /// Number of repeated or late effects, which no earlier observation could show.
    pub fn extra_effects(&self) -> BTreeMap<InstanceKey, usize> {
        self.inner().extra_effects.clone()
    }

    pub fn set_faults(&self, faults: Faults) {
        self.inner().faults = faults;
    }

    /// A dead host does not respond; its processes keep running.
    pub fn set_dead(&self, host: HostKey, dead: bool) {
        let mut inner = self.inner();
        match dead {
            true => inner.dead.insert(host),
            false => inner.dead.remove(&host),
        };
    }

    /// Changes the fleet without an operation.
    pub fn meddle(&self, with: impl FnOnce(&mut Fleet)) {
        let mut inner = self.inner();
        with(&mut inner.fleet);
        inner.remember();
    }

    /// Ends a process as if it had crashed.
    pub fn kill(&self, key: &InstanceKey) {
        let mut inner = self.inner();
        inner.fleet.dies(key);
        inner.remember();
    }
}

impl Inner {
    fn tick(&mut self) {
        self.now = self.now.after_secs(1);
        let mut happened = self.fleet.runs_end();
        let (due, later): (Vec<_>, Vec<_>) = self.pending.drain(..).partition(|(at, ..)| *at <= self.now);
        self.pending = later;
        for (_, task, order, extra_effects) in due {
            happened = true;
            let result = self.carry_out(&order);
            if extra_effects && matches!(result, OperationState::Done { .. }) {
                *self.extra_effects.entry(order.instance.clone()).or_default() += 1;
            }
            let rows = self.tasks.get_mut(&task).into_iter().flatten();
            // The first result of a repeated call counts.
            let open = rows.filter(|row| row.order == order && row.result == OperationState::InProgress);
            open.for_each(|row| row.result = result.clone());
        }
        if self.faults.deaths > 0.0 {
            let running: Vec<InstanceKey> = self.fleet.running().cloned().collect();
            for key in running {
                if self.chance.hits(self.faults.deaths) {
                    self.fleet.dies(&key);
                    happened = true;
                }
            }
        }
        if happened {
            self.remember();
        }
    }

    fn carry_out(&mut self, order: &Operation) -> OperationState {
        if self.dead.contains(&order.instance.host) {
            return OperationState::Failed {
                state: RowState::AgentMissing,
                message: "the agent does not respond".to_owned(),
            };
        }
        if let Some((state, message)) = self.fleet.answer_of_others(order) {
            return OperationState::Failed { state, message: message.to_owned() };
        }
        match self.fleet.carry_out(order) {
            Ok(()) => OperationState::Done { note: String::new() },
            Err(error) => {
                OperationState::Failed { state: RowState::CommandFailed, message: error.to_string() }
            }
        }
    }

    fn remember(&mut self) {
        let rows = self.fleet.rows();
        let pids =
            rows.values().filter_map(|row| row.process.pid).chain(self.fleet.strangers().values().copied());
        for pid in pids {
            self.started.entry(pid).or_insert(self.now);
        }
        let Some((_, last)) = self.history.last() else { return self.history.push((self.now, rows)) };
        if *last == rows {
            return;
        }
        if self.stream.is_offered {
            self.stream.number += 1;
            let keys: BTreeSet<&InstanceKey> = rows.keys().chain(last.keys()).collect();
            let other = keys.into_iter().filter(|key| rows.get(key) != last.get(key));
            let other =
                other.map(|key| (key.clone(), rows.get(key).map(|seen| reported(seen.clone(), self.now))));
            let reported = ChangeEvent::Rows { number: self.stream.number, rows: other.collect() };
            // A subscriber with a full queue is not waited for.
            self.stream.followers.retain(|follower| follower.try_send(reported.clone()).is_ok());
            // A change stream shows the current state, without lag.
            self.history.clear();
        }
        self.history.push((self.now, rows));
    }

    fn silent(&self) -> BTreeMap<HostKey, String> {
        self.dead.iter().map(|host| (host.clone(), "the agent does not respond".to_owned())).collect()
    }

    fn list(&mut self) -> Observed {
        let as_of = self.now.before_secs(self.faults.lag_secs);
        let (_, rows) = self
            .history
            .iter()
            .rev()
            .find(|(since, _)| *since <= as_of)
            .or(self.history.first())
            .cloned()
            .unwrap_or_default();
        let seen =
            rows.into_iter().filter(|(key, _)| !self.dead.contains(&key.host) || self.stream.is_offered);
        let instances = seen.map(|(key, seen)| (key, reported(seen, as_of))).collect();
        Observed { instances, gaps: self.silent(), at: self.now }
    }

    fn submit(&mut self, orders: &[Operation]) -> Result<Task, BackendError> {
        let task = self.tasks.len() as u64 + 1;
        let mut rows = Vec::new();
        for order in orders {
            let late = self.chance.hits(self.faults.late_effects);
            let due = self.now.after_secs(if late { LATE_SECS } else { TAKES_SECS });
            let times = if self.chance.hits(self.faults.doubled_calls) { 2 } else { 1 };
            self.pending.extend((0..times).map(|nth| (due, task, order.clone(), late || nth > 0)));
            let missing = self.chance.hits(self.faults.missing_rows);
            let endless = self.chance.hits(self.faults.endless_rows);
            rows.push(Row { order: order.clone(), result: OperationState::InProgress, missing, endless });
        }
        self.tasks.insert(task, rows);
        if self.chance.hits(self.faults.lost_replies) {
            Err(BackendError::NoAnswer)
        } else {
            Ok(Task { ids: vec![task.to_string()], ..Task::default() })
        }
    }

    fn poll(&mut self, task: u64) -> Result<Vec<OperationStatus>, BackendError> {
        if self.chance.hits(self.faults.lost_replies) {
            return Err(BackendError::NoAnswer);
        }
        let rows = self.tasks.get(&task).ok_or_else(|| {
            BackendError::Refused(Refusal::new(RefusalReason::Other, format!("unknown task {task}")))
        })?;
        let reported = rows.iter().filter(|row| !row.missing).map(|row| OperationStatus {
            order: row.order.id.clone(),
            instance: row.order.instance.clone(),
            result: if row.endless { OperationState::InProgress } else { row.result.clone() },
        });
        Ok(reported.collect())
    }
}

fn reported(seen: ObservedInstance, at: Time) -> ObservedInstance {
    ObservedInstance { report_time: Some(at), ..seen }
}

impl Backend for Sim {
    fn dialect(&self) -> Dialect {
        self.inner().fleet.dialect()
    }

    fn now(&self) -> Time {
        Sim::now(self)
    }

    async fn observe(&self, _scope: &Scope) -> Result<Observed, BackendError> {
        Ok(self.inner().list())
    }

    async fn follow(&self, _scope: &Scope) -> Result<(Observed, Option<ChangeStream>), BackendError> {
        let mut inner = self.inner();
        let observed = inner.list();
        if !inner.stream.is_offered {
            return Ok((observed, None));
        }
        let (tell, changes) = ChangeStream::new(inner.stream.number);
        inner.stream.followers.push(tell);
        Ok((observed, Some(changes)))
    }

    async fn watermark(&self, hosts: &BTreeSet<HostKey>) -> Result<Watermark, BackendError> {
        let inner = self.inner();
        let mut gaps = inner.silent();
        gaps.retain(|host, _| hosts.contains(host));
        Ok(Watermark { number: inner.stream.number, gaps })
    }

    async fn submit(&self, _call: &str, orders: &[Operation]) -> Result<Task, BackendError> {
        self.inner().submit(orders)
    }

    async fn poll(&self, task: &Task) -> Result<Vec<OperationStatus>, BackendError> {
        let id = task.ids.first().and_then(|id| id.parse().ok()).unwrap_or(0);
        self.inner().poll(id)
    }
}

/// Seeded, and reproducible on every machine (splitmix64).
struct Chance(u64);

impl Chance {
    fn hits(&mut self, probability: f64) -> bool {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        ((mixed >> 11) as f64 / (1u64 << 53) as f64) < probability
    }
}
