//! Plan draft: chains of steps per instance before ordering, held changes, and counters for notes and budgets.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::model::{
    DesiredInstance, Field, HashedSpec, HeldChange, HoldReason, InstanceKey, Op, ProcessKey, Reason,
    SourceLocation, SpecRevision, SpecSide, State,
};

/// The steps of one instance, from its observed to its desired state.
#[derive(Clone, Debug)]
pub struct Chain<'a> {
    pub key: &'a InstanceKey,
    /// `None`: an orphan.
    pub want: Option<&'a DesiredInstance>,
    /// The name that it moved from. `before`: the steps under that name, which run first.
    pub from: Option<&'a InstanceKey>,
    pub before: Vec<StepDraft>,
    pub steps: Vec<StepDraft>,
}

/// A step that is not assigned to a wave yet.
#[derive(Clone, Debug)]
pub struct StepDraft {
    pub op: Op,
    pub spec_side: SpecSide,
    pub spec: Option<Arc<HashedSpec>>,
    pub revision: Option<SpecRevision>,
    /// The fields that take effect with a reload.
    pub reloaded_fields: Vec<Field>,
    pub needs_live_check: bool,
    pub why: Vec<Reason>,
}

impl Chain<'_> {
    pub fn ops(&self) -> impl Iterator<Item = Op> + '_ {
        self.before.iter().chain(&self.steps).map(|draft| draft.op)
    }

    pub fn state(&self) -> State {
        self.want.map_or(State::Absent, |want| want.origin.state)
    }

    pub fn location(&self) -> Option<&SourceLocation> {
        self.want.map(|want| &want.origin.place)
    }

    pub fn held(&self, reason: HoldReason, detail: String) -> HeldChange {
        let mut why: Vec<Reason> = Vec::new();
        for one in self.before.iter().chain(&self.steps).flat_map(|draft| &draft.why) {
            if !why.contains(one) {
                why.push(one.clone());
            }
        }
        let (instance, at) = (self.key.clone(), self.location().cloned());
        HeldChange { instance, reason, detail, steps: self.ops().collect(), why, at }
    }
}

/// The result of planning each instance.
#[derive(Debug, Default)]
pub struct PlanDraft<'a> {
    /// Sorted by instance, orphans last.
    pub chains: Vec<Chain<'a>>,
    pub held: Vec<HeldChange>,
    pub in_sync: usize,
    /// Owned instances in the selection: the base of percentage budgets.
    pub owned: Vec<(&'a InstanceKey, Option<&'a DesiredInstance>)>,
    /// Orphans that are kept because `--prune` is not set, counted per process.
    pub spared: BTreeMap<ProcessKey, usize>,
    /// Moved instances, with the name under which they were observed.
    pub seen_as: HashMap<&'a InstanceKey, &'a InstanceKey>,
    /// Fields that the target does not support.
    pub unsupported_fields: BTreeSet<Field>,
    /// Files on hosts that differ from the configmap, by process and path: the number of instances.
    pub drifted: BTreeMap<(ProcessKey, String), usize>,
    /// Number of instances identified by the new spec because the old one is unknown.
    pub lost: usize,
    /// Number of instances adopted with a live spec that differs from the wanted one.
    pub deferred: usize,
    /// Moved instances whose supervision ends under the old name before it starts under the new one, per process.
    pub rehosted: BTreeMap<ProcessKey, usize>,
    /// Adopted instances that were not restarted since, counted per process.
    pub assumed: BTreeMap<ProcessKey, usize>,
}

/// Whether a chain contains one of these operations.
pub fn has(chain: &Chain<'_>, ops: &[Op]) -> bool {
    chain.ops().any(|op| ops.contains(&op))
}
