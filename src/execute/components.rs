//! Components of a plan: groups of steps that do not depend on each other.
//!
//! The soak of one component does not delay another.
//!
//! Waves are numbered across the whole plan. Steps belong to one component if they share a process, a dependency, a
//! move, or an identity that one instance frees and another takes. Each component that soaks or waits for the run of a
//! one-shot process is split off; the others stay together, so that they need as few calls as possible. For a
//! controller, each component with several waves is split off as well, up to [`MAX_COMPONENTS`].

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};

use super::Dependencies;
use crate::model::{AutoType, HostKey, InstanceKey, Op, Plan, ProcessKey, Step, Wave};

/// Maximum number of components with several waves that are split off: each costs calls of its own.
const MAX_COMPONENTS: usize = 32;

/// Components that are split off.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum SplitBy {
    Soaking,
    Waiting,
}

/// The components of a plan, usually one.
pub fn components<'p>(plan: &'p Plan, dependencies: &Dependencies, which: SplitBy) -> Vec<Cow<'p, [Wave]>> {
    let soaks = |wave: &Wave| wave.gates.iter().any(|gate| gate.soak_secs > 0);
    let waits = plan.waves.len() > 1 && which == SplitBy::Waiting;
    let waits_for_job = plan.waves.len() > 1 && plan.steps().any(is_job);
    if !waits && !waits_for_job && !plan.waves.iter().any(soaks) {
        return vec![Cow::Borrowed(&plan.waves)];
    }
    let mut sets = UnionFind::of_plan(plan, dependencies);
    let split_off = sets.split_off(plan, dependencies, which);
    let group = |root: usize| if split_off.contains(&root) { root + 1 } else { 0 };
    let mut parts: BTreeMap<usize, Vec<Wave>> = BTreeMap::new();
    for wave in &plan.waves {
        let mut pieces: BTreeMap<usize, Wave> = BTreeMap::new();
        for step in &wave.steps {
            let root = sets.root_of(&name(&step.instance, dependencies));
            pieces.entry(group(root)).or_default().steps.push(step.clone());
        }
        for gate in &wave.gates {
            let root = sets.root_of(&gate.process);
            pieces.entry(group(root)).or_default().gates.push(gate.clone());
        }
        pieces.into_iter().for_each(|(at, piece)| parts.entry(at).or_default().push(piece));
    }
    match parts.len() {
        0 | 1 => vec![Cow::Borrowed(&plan.waves)],
        _ => parts.into_values().map(Cow::Owned).collect(),
    }
}

/// Whether the step starts a one-shot process.
fn is_job(step: &Step) -> bool {
    step.op == Op::Start && step.spec.as_ref().is_some_and(|spec| spec.monitor.auto_type == AutoType::OneShot)
}

/// The declared name of an instance; an instance that is no longer wanted has only its own name.
fn name(instance: &InstanceKey, dependencies: &Dependencies) -> ProcessKey {
    dependencies.declared.get(instance).cloned().unwrap_or_else(|| instance.process())
}

/// Disjoint sets of process names.
#[derive(Default)]
struct UnionFind {
    numbers: HashMap<ProcessKey, usize>,
    /// Parent of each name; a root is its own parent.
    next: Vec<usize>,
}

impl UnionFind {
    fn of_plan(plan: &Plan, dependencies: &Dependencies) -> UnionFind {
        let mut sets = UnionFind::default();
        for step in plan.steps() {
            let own = sets.number(&name(&step.instance, dependencies));
            let process = sets.number(&step.instance.process());
            sets.union(own, process);
            if let Some(from) = &step.from {
                let from = sets.number(&name(from, dependencies));
                sets.union(own, from);
            }
        }
        // A dependency outside of the plan connects nothing: no step waits for it.
        for (name, needs) in &dependencies.depends {
            for need in needs {
                if let (Some(name), Some(need)) = (sets.known(name), sets.known(need)) {
                    sets.union(name, need);
                }
            }
        }
        sets.union_by_host(plan, dependencies);
        sets
    }

    /// Roots of the components that are split off.
    fn split_off(&mut self, plan: &Plan, dependencies: &Dependencies, which: SplitBy) -> HashSet<usize> {
        let (mut soaking, mut waiting, mut running_jobs) = (HashSet::new(), HashSet::new(), HashSet::new());
        let mut first: HashMap<usize, usize> = HashMap::new();
        for (nth, wave) in plan.waves.iter().enumerate() {
            for step in &wave.steps {
                let root = self.root_of(&name(&step.instance, dependencies));
                if *first.entry(root).or_insert(nth) != nth {
                    waiting.insert(root);
                }
                if is_job(step) {
                    running_jobs.insert(root);
                }
            }
            for gate in wave.gates.iter().filter(|gate| gate.soak_secs > 0) {
                soaking.insert(self.root_of(&gate.process));
            }
        }
        // The next wave of these waits for the end of a run.
        soaking.extend(running_jobs.intersection(&waiting));
        if which == SplitBy::Waiting && waiting.len() <= MAX_COMPONENTS {
            soaking.extend(waiting);
        }
        soaking
    }

    /// Connects a start with earlier stops on the same host: it may take over their identity.
    fn union_by_host(&mut self, plan: &Plan, dependencies: &Dependencies) {
        let leaves = |step: &&Step| matches!(step.op, Op::Stop | Op::Kill | Op::Unsupervise | Op::Unregister);
        let mut left: HashMap<&HostKey, Vec<usize>> = HashMap::new();
        for wave in &plan.waves {
            for step in
                wave.steps.iter().filter(|step| matches!(step.op, Op::Start | Op::Supervise | Op::Register))
            {
                let Some(left) = left.get_mut(&step.instance.host) else { continue };
                let own = self.number(&name(&step.instance, dependencies));
                left.drain(..).for_each(|other| self.union(own, other));
                left.push(own);
            }
            for step in wave.steps.iter().filter(leaves) {
                let own = self.number(&name(&step.instance, dependencies));
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

    fn union(&mut self, one: usize, other: usize) {
        let (one, other) = (self.root(one), self.root(other));
        self.next[one] = other;
    }
}
