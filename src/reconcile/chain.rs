//! A chain: the steps of one instance, from how it is to how it should be; and everything that was found on the way.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::model::{
    DesiredInstance, Field, HashedSpec, HeldChange, HoldReason, InstanceKey, Op, ProcessKey, SourceLocation,
    SpecRevision, SpecSide, State, Why,
};

/// The steps of one instance, from how it is to how it should be.
#[derive(Clone, Debug)]
pub struct Chain<'a> {
    pub key: &'a InstanceKey,
    /// `None`: an orphan.
    pub want: Option<&'a DesiredInstance>,
    /// The name that it moved from, and what has to be done under that name first.
    pub from: Option<&'a InstanceKey>,
    pub before: Vec<StepDraft>,
    pub steps: Vec<StepDraft>,
}

/// A step that has no place in an order yet.
#[derive(Clone, Debug)]
pub struct StepDraft {
    pub op: Op,
    pub spec_side: SpecSide,
    pub spec: Option<Arc<HashedSpec>>,
    pub revision: Option<SpecRevision>,
    /// Of a reload: what takes effect by it.
    pub reloaded_fields: Vec<Field>,
    pub needs_live_check: bool,
    pub why: Vec<Why>,
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
        let mut why: Vec<Why> = Vec::new();
        for one in self.before.iter().chain(&self.steps).flat_map(|draft| &draft.why) {
            if !why.contains(one) {
                why.push(one.clone());
            }
        }
        let (instance, at) = (self.key.clone(), self.location().cloned());
        HeldChange { instance, reason, detail, steps: self.ops().collect(), why, at }
    }
}

/// Everything that was found on the way.
#[derive(Debug, Default)]
pub struct PlanDraft<'a> {
    /// Sorted by instance, orphans last.
    pub chains: Vec<Chain<'a>>,
    pub held: Vec<HeldChange>,
    pub in_sync: usize,
    /// What is ours, in scope: budgets are shares of it.
    pub owned: Vec<(&'a InstanceKey, Option<&'a DesiredInstance>)>,
    /// Ours, wanted by no manifest, and left alone because nobody asked for its removal.
    pub spared: BTreeMap<ProcessKey, usize>,
    /// What was seen of some instances stands under the name that they had before.
    pub seen_as: HashMap<&'a InstanceKey, &'a InstanceKey>,
    /// Fields that were left out because the target has no place for them.
    pub unsupported_fields: BTreeSet<Field>,
    /// Instances that are named by the new spec because the old one is lost.
    pub lost: usize,
    /// Adopted as they run, though they are to run otherwise.
    pub deferred: usize,
}

/// Is one of these operations in it?
pub fn has(chain: &Chain<'_>, ops: &[Op]) -> bool {
    chain.ops().any(|op| ops.contains(&op))
}
