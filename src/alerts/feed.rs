//! Alert feed: facts from the controller's events that its status does not show.
//!
//! Drift, relaunches and rollouts pass between two readings of the status. The control loop records them here: briefly,
//! and bounded in memory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::clock;
use crate::control::{ControllerEvent, PassResult};
use crate::model::{Desired, HashedSpec, Health, InstanceKey, ProcessKey, Time};

/// This many relaunches within the window are a crash loop.
pub const MAX_RELAUNCHES: usize = 3;
pub const RELAUNCH_WINDOW_SECS: u64 = 600;
/// Maximum recorded instances of each fact. Of more, the first ones are kept.
const MAX_RECORDED: usize = 100_000;

/// Shared by the control loop, which writes, and the alerts, which read.
#[derive(Default)]
pub struct AlertFeed(Mutex<FeedState>);

/// The recorded facts.
#[derive(Default)]
pub struct FeedState {
    latest: Option<Arc<PassResult>>,
    applied: Option<AppliedState>,
    /// Instances that differ from applied manifests, and the operations that repair them.
    pub drifted: BTreeMap<InstanceKey, BTreeSet<&'static str>>,
    relaunched: BTreeMap<InstanceKey, Relaunches>,
    /// Processes whose rollout is in progress.
    pub rolling: BTreeSet<ProcessKey>,
    /// Processes that were rolled back since the last reading.
    pub rolled_back: BTreeSet<ProcessKey>,
}

/// The last relaunches of an instance.
#[derive(Default)]
struct Relaunches {
    times: VecDeque<Time>,
    /// Three were within the window, or the agent gave up, and no window without a relaunch followed.
    is_looping: bool,
    /// The last observed exit, by the time of its row.
    exit: Option<Time>,
    /// The exit is counted, and its relaunch was not observed yet.
    is_down: bool,
    /// The wanted spec at the first relaunch.
    version: Option<Arc<HashedSpec>>,
}

impl Relaunches {
    fn add(&mut self, now: Time) {
        self.times.push_back(now);
        if self.times.len() > MAX_RELAUNCHES {
            self.times.pop_front();
        }
    }
}

/// Manifests that all instances converged to, except those that were held at that time.
struct AppliedState {
    desired: Arc<Desired>,
    held: BTreeSet<InstanceKey>,
}

impl AppliedState {
    /// Whether a difference of this instance is drift: its declaration was applied, and is the same.
    fn covers(&self, desired: &Desired, key: &InstanceKey) -> bool {
        !self.held.contains(key) && self.desired.is_same_request(desired, key)
    }
}

impl AlertFeed {
    pub fn lock(&self) -> MutexGuard<'_, FeedState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an event of the control loop.
    pub fn record(&self, event: &ControllerEvent<'_>) {
        match event {
            ControllerEvent::Planned { result } => self.lock().on_planned(result),
            ControllerEvent::Idle { .. } => self.lock().on_idle(),
            ControllerEvent::Relaunched { instance, .. } => self.lock().on_relaunched(instance, clock::now()),
            ControllerEvent::RolledBack { processes, .. } => self.lock().on_rolled_back(processes),
            ControllerEvent::Read { .. }
            | ControllerEvent::Problems { .. }
            | ControllerEvent::RevisionNotFollowed { .. }
            | ControllerEvent::Source { .. }
            | ControllerEvent::Pinned { .. }
            | ControllerEvent::Unpinned { .. }
            | ControllerEvent::Waiting { .. }
            | ControllerEvent::Leading { .. }
            | ControllerEvent::ExecutionStarted { .. }
            | ControllerEvent::StepFinished { .. }
            | ControllerEvent::Soaking { .. }
            | ControllerEvent::ExecutionFinished { .. }
            | ControllerEvent::Failure { .. }
            | ControllerEvent::PassStarted
            | ControllerEvent::PassFinished { .. }
            | ControllerEvent::Tick => {}
        }
    }
}

impl FeedState {
    fn on_planned(&mut self, result: &Arc<PassResult>) {
        let PassResult { desired, observed, plan, .. } = &**result;
        for step in plan.steps() {
            let key = &step.instance;
            if self.applied.as_ref().is_some_and(|applied| applied.covers(desired, key)) {
                // A process that its agent has given up on is a crash loop, not drift.
                let crashed = observed.instances.get(key).is_some_and(|seen| seen.health == Health::Failed);
                if !crashed && (self.drifted.len() < MAX_RECORDED || self.drifted.contains_key(key)) {
                    self.drifted.entry(key.clone()).or_default().insert(step.op.word());
                }
                continue;
            }
            // Relaunches of another version do not count for this one.
            let version = desired.instances.get(key).map(|want| &want.spec);
            if self.relaunched.get(key).is_some_and(|one| one.version.as_ref() != version) {
                // The last exit was one of the other version.
                let exit = observed.instances.get(key).and_then(|seen| seen.since);
                let version = version.cloned();
                self.relaunched.insert(key.clone(), Relaunches { exit, version, ..Relaunches::default() });
            }
            if let Some(want) = desired.instances.get(key).filter(|want| want.origin.rollout.is_some())
                && self.rolling.len() < MAX_RECORDED
            {
                self.rolling.insert(want.origin.declared.clone());
            }
        }
        self.count_exits(result, clock::now());
        self.latest = Some(Arc::clone(result));
    }

    /// Counts the exits of services that their agent relaunches, or has given up on. A process that ends at once may
    /// never be observed while it runs.
    fn count_exits(&mut self, result: &PassResult, now: Time) {
        let PassResult { desired, observed, rules, .. } = result;
        for (key, seen) in &observed.instances {
            if seen.running == Some(true) {
                if let Some(one) = self.relaunched.get_mut(key) {
                    one.is_down = false;
                }
                continue;
            }
            let has_ended = seen.running == Some(false)
                && !seen.unknown
                && seen.since.is_some()
                && matches!(seen.health, Health::Degraded | Health::Failed);
            let is_foreign = seen.owner.as_deref().is_some_and(|owner| owner != rules.owner.as_str());
            if !has_ended || is_foreign {
                continue;
            }
            let Some(want) = desired.instances.get(key).filter(|want| want.spec.monitor.is_resident()) else {
                continue;
            };
            if self.relaunched.len() >= MAX_RECORDED && !self.relaunched.contains_key(key) {
                continue;
            }
            let one = self.relaunched.entry(key.clone()).or_default();
            one.version.get_or_insert_with(|| Arc::clone(&want.spec));
            if one.exit != seen.since {
                one.exit = seen.since;
                one.is_down = true;
                one.add(now);
            }
            one.is_looping |= seen.health == Health::Failed && !one.times.is_empty();
        }
    }

    fn on_idle(&mut self) {
        if let Some(latest) = &self.latest {
            let held = latest.plan.held.iter().map(|held| held.instance.clone()).collect();
            self.applied = Some(AppliedState { desired: Arc::clone(&latest.desired), held });
        }
    }

    fn on_relaunched(&mut self, instance: &InstanceKey, now: Time) {
        if self.relaunched.len() >= MAX_RECORDED && !self.relaunched.contains_key(instance) {
            return;
        }
        let want = self.latest.as_ref().and_then(|latest| latest.desired.instances.get(instance));
        let seen = self.latest.as_ref().and_then(|latest| latest.observed.instances.get(instance));
        let ours = self.latest.as_ref().map(|latest| latest.rules.owner.as_str());
        // Processes of other owners have their own alerts.
        if ours.is_some() && seen.is_some_and(|seen| seen.owner.is_some() && seen.owner.as_deref() != ours) {
            return;
        }
        let version = want.map(|want| Arc::clone(&want.spec));
        let one = self.relaunched.entry(instance.clone()).or_default();
        one.version = one.version.take().or(version);
        // Its exit was counted.
        if !std::mem::take(&mut one.is_down) {
            one.add(now);
        }
    }

    /// Forgets instances that are no longer declared.
    pub fn retain_declared(&mut self, desired: &Desired) {
        self.relaunched.retain(|key, _| desired.instances.contains_key(key));
    }

    fn on_rolled_back(&mut self, processes: &str) {
        for process in processes.split(", ").filter_map(|name| name.parse::<ProcessKey>().ok()) {
            self.rolling.remove(&process);
            if self.rolled_back.len() < MAX_RECORDED {
                self.rolled_back.insert(process);
            }
        }
    }

    /// Whether an instance is in a crash loop by its relaunches. Forgets relaunches before the window.
    pub fn is_crash_looping(&mut self, instance: &InstanceKey, now: Time) -> bool {
        let Some(one) = self.relaunched.get_mut(instance) else { return false };
        one.times.retain(|time| now.secs_since(*time) < RELAUNCH_WINDOW_SECS);
        one.is_looping |= one.times.len() >= MAX_RELAUNCHES;
        one.is_looping &= !one.times.is_empty();
        let is_looping = one.is_looping;
        // A counted exit is remembered: its row may be observed again.
        if one.times.is_empty() && one.exit.is_none() {
            self.relaunched.remove(instance);
        }
        is_looping
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::testing::{pass_result, process};

    #[test]
    fn three_relaunches_within_the_window_are_a_crash_loop() {
        let mut state = FeedState::default();
        let key: InstanceKey = "0:10.0.0.1:web:api".parse().expect("a key");
        let at = |secs: i64| Time(secs * 1000);
        for secs in [0, 100] {
            state.on_relaunched(&key, at(secs));
        }
        assert!(!state.is_crash_looping(&key, at(101)));
        state.on_relaunched(&key, at(200));
        assert!(state.is_crash_looping(&key, at(201)) && state.is_crash_looping(&key, at(599)));
        assert!(state.is_crash_looping(&key, at(799)), "the last one was less than 10 min ago");
        state.on_relaunched(&key, at(799));
        assert!(state.is_crash_looping(&key, at(1_398)));
        assert!(!state.is_crash_looping(&key, at(2_000)) && state.relaunched.is_empty());
    }

    #[test]
    fn exits_count_without_observed_relaunches() {
        let mut state = FeedState::default();
        let key: InstanceKey = "0:10.1.0.0:web:api".parse().expect("a key");
        let exited = |since: i64, health: Health| {
            pass_result(&process("api", 1), |observed| {
                for seen in observed.instances.values_mut() {
                    (seen.running, seen.health, seen.since) = (Some(false), health, Some(Time(since)));
                }
            })
        };
        let now = |secs: i64| Time(secs * 1000);
        for (secs, since) in [(1, 10), (2, 10), (3, 20), (4, 20)] {
            state.count_exits(&exited(since, Health::Degraded), now(secs));
        }
        assert!(!state.is_crash_looping(&key, now(5)), "two exits");
        // The relaunch after a counted exit does not count again.
        state.on_relaunched(&key, now(5));
        assert!(!state.is_crash_looping(&key, now(6)));
        state.count_exits(&exited(30, Health::Degraded), now(7));
        assert!(state.is_crash_looping(&key, now(8)));
        state.count_exits(&pass_result(&process("api", 1), |_| {}), now(9));
        assert!(state.is_crash_looping(&key, now(606)) && !state.is_crash_looping(&key, now(607)));
        // One that its agent gave up on.
        state.count_exits(&exited(40, Health::Failed), now(700));
        assert!(state.is_crash_looping(&key, now(701)));
    }

    #[test]
    fn relaunches_of_other_owners_do_not_count() {
        let mut state = FeedState::default();
        let key: InstanceKey = "0:10.1.0.0:web:api".parse().expect("a key");
        state.latest = Some(pass_result(&process("api", 1), |observed| {
            observed.instances.values_mut().for_each(|seen| seen.owner = Some("other-team".into()));
        }));
        for secs in 0..3 {
            state.on_relaunched(&key, Time(secs * 1000));
        }
        assert!(state.relaunched.is_empty());
    }

    #[test]
    fn a_rollback_ends_the_rollouts_of_its_processes() {
        let mut state = FeedState::default();
        let [api, db]: [ProcessKey; 2] = ["web/api", "web/db"].map(|name| name.parse().expect("a name"));
        state.rolling = [api.clone(), db.clone()].into();
        state.on_rolled_back("web/api, web/other");
        assert_eq!(state.rolling, [db].into());
        assert_eq!(state.rolled_back, [api, "web/other".parse().expect("a name")].into());
    }
}
