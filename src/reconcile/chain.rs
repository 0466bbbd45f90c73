//! A chain: the steps of one instance, from how it is to how it should be; and everything that was found on the way.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use crate::model::{
    Field, Held, InstanceKey, Op, Place, ProcessKey, Reason, Revision, Stamped, State, Want, Which, Why,
};

/// The steps of one instance, from how it is to how it should be.
#[derive(Clone, Debug)]
pub struct Chain<'a> {
    pub key: &'a InstanceKey,
    /// `None`: an orphan.
    pub want: Option<&'a Want>,
    /// The name that it moved from, and what has to be done under that name first.
    pub from: Option<&'a InstanceKey>,
    pub before: Vec<Draft>,
    pub steps: Vec<Draft>,
}

/// A step that has no place in an order yet.
#[derive(Clone, Debug)]
pub struct Draft {
    pub op: Op,
    pub which: Which,
    pub spec: Option<Arc<Stamped>>,
    pub revision: Option<Revision>,
    /// Of a reload: what takes effect by it.
    pub takes: Vec<Field>,
    pub looks_first: bool,
    pub why: Vec<Why>,
}

impl Chain<'_> {
    pub fn ops(&self) -> impl Iterator<Item = Op> + '_ {
        self.before.iter().chain(&self.steps).map(|draft| draft.op)
    }

    pub fn state(&self) -> State {
        self.want.map_or(State::Absent, |want| want.origin.state)
    }

    pub fn place(&self) -> Option<&Place> {
        self.want.map(|want| &want.origin.place)
    }

    pub fn held(&self, reason: Reason, detail: String) -> Held {
        let mut why: Vec<Why> = Vec::new();
        for one in self.before.iter().chain(&self.steps).flat_map(|draft| &draft.why) {
            if !why.contains(one) {
                why.push(one.clone());
            }
        }
        let (instance, at) = (self.key.clone(), self.place().cloned());
        Held { instance, reason, detail, steps: self.ops().collect(), why, at }
    }
}

/// Everything that was found on the way.
#[derive(Debug, Default)]
pub struct Found<'a> {
    /// Sorted by instance, orphans last.
    pub chains: Vec<Chain<'a>>,
    pub held: Vec<Held>,
    pub settled: usize,
    /// What is ours, in scope: budgets are shares of it.
    pub owned: Vec<(&'a InstanceKey, Option<&'a Want>)>,
    /// Ours, wanted by no manifest, and left alone because nobody asked for its removal.
    pub spared: BTreeMap<ProcessKey, usize>,
    /// What was seen of some instances stands under the name that they had before.
    pub seen_as: HashMap<&'a InstanceKey, &'a InstanceKey>,
    /// Fields that were left out because the target has no place for them.
    pub unsaid: BTreeSet<Field>,
    /// Instances that are named by the new spec because the old one is lost.
    pub lost: usize,
    /// Adopted as they run, though they are to run otherwise.
    pub deferred: usize,
}

/// Is one of these operations in it?
pub fn has(chain: &Chain<'_>, ops: &[Op]) -> bool {
    chain.ops().any(|op| ops.contains(&op))
}
