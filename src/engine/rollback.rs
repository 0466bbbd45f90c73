//! Rollback of a failed rollout: the previous desired state, and the plan to restore it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::model::{
    DeclaredProcess, Desired, InstanceKey, Now, Observed, ObservedInstance, Plan, ProcessKey,
};
use crate::reconcile::{Rules, reconcile};

/// These processes as they were before: each instance with the spec that it ran with, or that was registered.
/// Instances that did not exist, or whose spec is unknown, are left out.
pub fn previous_desired(
    desired: &Desired,
    before: &BTreeMap<InstanceKey, ObservedInstance>,
    processes: &BTreeSet<ProcessKey>,
) -> Desired {
    let mut back = Desired::default();
    for (key, want) in desired.instances.iter().filter(|(_, want)| processes.contains(&want.origin.declared))
    {
        let seen = before.get(key);
        let old = seen.and_then(|seen| match seen.running {
            Some(true) => seen.specs.live.spec().or(seen.specs.registered.spec()),
            Some(false) | None => None,
        });
        let Some(old) = old else { continue };
        let mut want = want.clone();
        want.spec = Arc::clone(old);
        // In one wave, and without the policies of the rollout.
        want.origin =
            Arc::new(DeclaredProcess { rollout: None, depends_on: Vec::new(), ..(*want.origin).clone() });
        back.instances.insert(key.clone(), want);
    }
    back
}

/// The plan that restores the previous state. It does not wait for agents to relaunch failed processes, and it has no
/// budget.
pub fn plan_rollback(back: &Desired, observed: &mut Observed, rules: &Rules, now: &Now) -> Plan {
    observed
        .instances
        .values_mut()
        .filter(|seen| seen.running == Some(false))
        .for_each(|seen| seen.since = None);
    let mut rules = rules.clone();
    (rules.prune, rules.budgets.restart) = (false, None);
    reconcile(back, observed, &rules, now)
}
