//! Rollback of a failed rollout: the state of its instances before the plan, and the plan to restore it.
//!
//! An instance that did not exist is removed again. Instances that the plan did not change are left alone.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::execute::StepResult;
use crate::model::{
    Amount, AutoType, DeclaredProcess, Desired, HashedSpec, InstanceKey, Now, Observed, ObservedInstance,
    Plan, ProcessKey, State, StepOutcome,
};
use crate::reconcile::{Caps, Rules, reconcile};

/// The state to restore.
#[derive(Debug, Default)]
pub struct PreviousState {
    pub desired: Desired,
    /// Changed instances that cannot be restored: their old spec is unknown, or they moved from another name.
    pub lost: BTreeSet<InstanceKey>,
}

impl PreviousState {
    /// The changed instances of these processes as they were before the plan: `before` has no entry for an instance that
    /// did not exist.
    pub fn of(
        desired: &Desired,
        before: &BTreeMap<InstanceKey, ObservedInstance>,
        (plan, ended): (&Plan, &[StepResult]),
        processes: &BTreeMap<ProcessKey, String>,
        caps: &Caps,
    ) -> PreviousState {
        let moved: BTreeSet<&InstanceKey> =
            plan.steps().filter(|step| step.from.is_some()).map(|step| &step.instance).collect();
        let changed = ended.iter().filter(|one| one.outcome != StepOutcome::Skipped);
        let changed: BTreeSet<&InstanceKey> = changed.map(|one| &one.instance).collect();
        let mut previous = PreviousState::default();
        for key in changed {
            let Some(want) = desired.instances.get(key) else { continue };
            if !processes.contains_key(&want.origin.declared) {
                continue;
            }
            let Some((state, spec)) =
                previous_of(before.get(key), &want.spec, caps).filter(|_| !moved.contains(key))
            else {
                previous.lost.insert(key.clone());
                continue;
            };
            let mut want = want.clone();
            want.spec = spec;
            // In one wave, and without the policies of the rollout.
            want.origin = Arc::new(DeclaredProcess {
                state,
                rollout: None,
                depends_on: Vec::new(),
                moved_from: Vec::new(),
                adopt: false,
                ..(*want.origin).clone()
            });
            previous.desired.instances.insert(key.clone(), want);
        }
        previous
    }

    /// The plan that restores this state. It does not wait for agents to relaunch failed processes, and it has no budget.
    pub fn plan(&self, observed: &mut Observed, rules: &Rules, now: &Now) -> Plan {
        observed
            .instances
            .values_mut()
            .filter(|seen| seen.running == Some(false))
            .for_each(|seen| seen.since = None);
        let mut rules = rules.clone();
        // A process that the plan found and does not own stays as it is.
        (rules.prune, rules.adopt) = (false, false);
        (rules.budgets.restart, rules.budgets.delete) = (None, Some(Amount::Count(u64::MAX)));
        reconcile(&self.desired, observed, &rules, now)
    }
}

/// The earlier state and spec of an instance. `None`: they are unknown.
fn previous_of(
    seen: Option<&ObservedInstance>,
    wanted: &Arc<HashedSpec>,
    caps: &Caps,
) -> Option<(State, Arc<HashedSpec>)> {
    let absent = || Some((State::Absent, Arc::clone(wanted)));
    let Some(seen) = seen else { return absent() };
    let [registered, hosted, running] =
        [seen.registered, seen.hosted, seen.running].map(|is| is == Some(true));
    let is_there = hosted || running || (registered && caps.registry);
    if !is_there {
        return absent();
    }
    let known = match running {
        true => seen.specs.live.spec().or(seen.specs.registered.spec()),
        false => seen.specs.registered.spec(),
    };
    let spec = Arc::clone(known?);
    let state = match spec.monitor.auto_type {
        // A run that took place is not repeated.
        AutoType::OneShot => State::Stopped,
        AutoType::Periodic if hosted => State::Running,
        AutoType::Periodic => State::Stopped,
        AutoType::Resident if seen.completed => State::Stopped,
        AutoType::Resident if running && !hosted => State::Unhosted,
        AutoType::Resident if running || hosted => State::Running,
        AutoType::Resident => State::Stopped,
    };
    Some((state, spec))
}

/// The names of processes that are rolled back, for a message.
pub fn names_of(processes: &BTreeMap<ProcessKey, String>) -> String {
    processes.keys().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Reason why processes are rolled back, one line per process.
pub fn reasons_of(processes: &BTreeMap<ProcessKey, String>) -> String {
    processes.values().filter(|why| !why.is_empty()).cloned().collect::<Vec<_>>().join("\n")
}
