//! Drift repair: operations of a plan that repair drift, for which hooks do not run.
//!
//! An operation repairs drift if its instance was in sync with the same declaration before, seen by this controller. A
//! hold of a person ends that: the operation after its release is a change.

use std::collections::{BTreeMap, BTreeSet};

use crate::model::{Desired, DesiredInstance, HoldReason, InstanceKey, Plan};

/// Instances with hooks around operations, with the declaration that they were last in sync with.
#[derive(Default)]
pub struct RepairTracker(BTreeMap<InstanceKey, DesiredInstance>);

impl RepairTracker {
    /// Records the plan of a pass. An instance without steps and without a held change is in sync.
    pub fn record(&mut self, desired: &Desired, plan: &Plan) {
        let hooked = |want: &DesiredInstance| {
            let hooks = &want.spec.hooks;
            hooks.before_stop.is_some() || hooks.after_start.is_some()
        };
        let mut hooked = desired.instances.iter().filter(|(_, want)| hooked(want)).peekable();
        if self.0.is_empty() && hooked.peek().is_none() {
            return;
        }
        let changing: BTreeSet<&InstanceKey> = plan.steps().map(|step| &step.instance).collect();
        let held: BTreeMap<&InstanceKey, HoldReason> =
            plan.held.iter().map(|held| (&held.instance, held.reason)).collect();
        self.0.retain(|key, known| {
            let is_same = desired.instances.get(key).is_some_and(|want| want.is_same_request(known));
            is_same && held.get(key) != Some(&HoldReason::Hold)
        });
        for (key, want) in hooked.filter(|(key, _)| !changing.contains(key) && !held.contains_key(key)) {
            self.0.entry(key.clone()).or_insert_with(|| want.clone());
        }
    }

    /// The instances of a plan whose operations repair drift.
    pub fn of(&self, plan: &Plan, desired: &Desired) -> BTreeSet<InstanceKey> {
        let is_repair = |key: &&InstanceKey| match (self.0.get(key), desired.instances.get(key)) {
            (Some(known), Some(want)) => want.is_same_request(known),
            (Some(_) | None, None) | (None, Some(_)) => false,
        };
        plan.steps().map(|step| &step.instance).filter(is_repair).cloned().collect()
    }
}
