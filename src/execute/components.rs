//! Which parts of a plan have nothing to do with each other, so that one's soak does not hold up another.
//!
//! Waves are counted through the whole plan, though most of it does not wait for most of it. Whatever hangs together, by a
//! process, a dependency, a move or a place that one leaves and another takes, stays together. Each of those that soak is a
//! part of its own, all others are one part, so that they go out in as few calls as they can. For somebody who stands for
//! long, each of those that wait for something of their own is a part as well, unless there are very many.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};

use super::ExecutionContext;
use crate::model::{HostKey, InstanceKey, Op, Plan, ProcessKey, Step, Wave};

/// So many that wait for something go out by themselves; more would be too many calls.
const APART: usize = 32;

/// What is a part of its own.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum SplitBy {
    Soaking,
    Waiting,
}

/// The parts; most often there is one.
pub fn components<'p>(plan: &'p Plan, terms: &ExecutionContext, which: SplitBy) -> Vec<Cow<'p, [Wave]>> {
    let soaks = |wave: &Wave| wave.gates.iter().any(|gate| gate.soak_secs > 0);
    let waits = plan.waves.len() > 1 && which == SplitBy::Waiting;
    if !waits && !plan.waves.iter().any(soaks) {
        return vec![Cow::Borrowed(&plan.waves)];
    }
    let mut knots = UnionFind::tied(plan, terms);
    let apart = knots.apart(plan, terms, which);
    let place = |root: usize| if apart.contains(&root) { root + 1 } else { 0 };
    let mut parts: BTreeMap<usize, Vec<Wave>> = BTreeMap::new();
    for wave in &plan.waves {
        let mut pieces: BTreeMap<usize, Wave> = BTreeMap::new();
        for step in &wave.steps {
            let root = knots.root_of(&name(&step.instance, terms));
            pieces.entry(place(root)).or_default().steps.push(step.clone());
        }
        for gate in &wave.gates {
            let root = knots.root_of(&gate.process);
            pieces.entry(place(root)).or_default().gates.push(gate.clone());
        }
        pieces.into_iter().for_each(|(at, piece)| parts.entry(at).or_default().push(piece));
    }
    match parts.len() {
        0 | 1 => vec![Cow::Borrowed(&plan.waves)],
        _ => parts.into_values().map(Cow::Owned).collect(),
    }
}

/// The name that an instance is declared under; what is not wanted any more has only its own.
fn name(instance: &InstanceKey, terms: &ExecutionContext) -> ProcessKey {
    terms.declared.get(instance).cloned().unwrap_or_else(|| instance.process())
}

/// Names, and which of them hang together.
#[derive(Default)]
struct UnionFind {
    numbers: HashMap<ProcessKey, usize>,
    /// Of each: another of the same knot, and at its end itself.
    next: Vec<usize>,
}

impl UnionFind {
    fn tied(plan: &Plan, terms: &ExecutionContext) -> UnionFind {
        let mut knots = UnionFind::default();
        for step in plan.steps() {
            let own = knots.number(&name(&step.instance, terms));
            let process = knots.number(&step.instance.process());
            knots.tie(own, process);
            if let Some(from) = &step.from {
                let from = knots.number(&name(from, terms));
                knots.tie(own, from);
            }
        }
        // What is not in the plan ties nothing: nobody waits for it.
        for (name, needs) in &terms.depends {
            for need in needs {
                if let (Some(name), Some(need)) = (knots.known(name), knots.known(need)) {
                    knots.tie(name, need);
                }
            }
        }
        knots.tie_places(plan, terms);
        knots
    }

    /// Those that go out by themselves.
    fn apart(&mut self, plan: &Plan, terms: &ExecutionContext, which: SplitBy) -> HashSet<usize> {
        let (mut soaking, mut waiting) = (HashSet::new(), HashSet::new());
        let mut first: HashMap<usize, usize> = HashMap::new();
        for (nth, wave) in plan.waves.iter().enumerate() {
            for step in &wave.steps {
                let root = self.root_of(&name(&step.instance, terms));
                if *first.entry(root).or_insert(nth) != nth {
                    waiting.insert(root);
                }
            }
            for gate in wave.gates.iter().filter(|gate| gate.soak_secs > 0) {
                soaking.insert(self.root_of(&gate.process));
            }
        }
        if which == SplitBy::Waiting && waiting.len() <= APART {
            soaking.extend(waiting);
        }
        soaking
    }

    /// What starts on a host where something else left in an earlier wave may take its place.
    fn tie_places(&mut self, plan: &Plan, terms: &ExecutionContext) {
        let leaves = |step: &&Step| matches!(step.op, Op::Stop | Op::Kill | Op::Unsupervise | Op::Unregister);
        let mut left: HashMap<&HostKey, Vec<usize>> = HashMap::new();
        for wave in &plan.waves {
            for step in
                wave.steps.iter().filter(|step| matches!(step.op, Op::Start | Op::Supervise | Op::Register))
            {
                let Some(left) = left.get_mut(&step.instance.host) else { continue };
                let own = self.number(&name(&step.instance, terms));
                left.drain(..).for_each(|other| self.tie(own, other));
                left.push(own);
            }
            for step in wave.steps.iter().filter(leaves) {
                let own = self.number(&name(&step.instance, terms));
                left.entry(&step.instance.host).or_default().push(own);
            }
        }
    }

    fn number(&mut self, name: &ProcessKey) -> usize {
        if let Some(number) = self.known(name) {
            return number;
        }
        let number = self.next.len();
        self.numbers.insert(name.clone(), number);
        self.next.push(number);
        number
    }

    fn known(&self, name: &ProcessKey) -> Option<usize> {
        self.numbers.get(name).copied()
    }

    fn root(&mut self, mut at: usize) -> usize {
        while self.next[at] != at {
            self.next[at] = self.next[self.next[at]];
            at = self.next[at];
        }
        at
    }

    fn root_of(&mut self, name: &ProcessKey) -> usize {
        let number = self.number(name);
        self.root(number)
    }

    fn tie(&mut self, one: usize, other: usize) {
        let (one, other) = (self.root(one), self.root(other));
        self.next[one] = other;
    }
}
