//! What is being carried out, as passes know of it.
//!
//! A pass leaves alone what is under way, and everything that hangs together with it. What the manifests ask for otherwise
//! by now is to come to its end at the next safe point.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::sync::watch;

use crate::model::{Desired, InstanceKey, Op, Plan, ProcessKey, State, Want};
use crate::reconcile::Kinds;

/// Every order that is not over.
#[derive(Debug, Default)]
pub struct UnderWay {
    orders: BTreeMap<u64, Going>,
}

/// One of them.
#[derive(Debug)]
pub struct Going {
    /// The name of its run.
    pub run: String,
    pub plan: Arc<Plan>,
    pub desired: Arc<Desired>,
    /// Of which something is still to be done, or to be seen.
    instances: BTreeSet<InstanceKey>,
    /// It waits in between: until its end, nothing of these processes is free.
    processes: BTreeSet<ProcessKey>,
    ends: watch::Sender<bool>,
    /// The manifests ask for something else by now.
    pub is_outdated: bool,
}

impl Going {
    pub fn new(run: String, plan: Arc<Plan>, desired: Arc<Desired>, ends: watch::Sender<bool>) -> Going {
        let mut instances = BTreeSet::new();
        for step in plan.steps() {
            instances.insert(step.instance.clone());
            instances.extend(step.from.clone());
        }
        let declared = |key: &InstanceKey| match desired.instances.get(key) {
            Some(want) => want.origin.declared.clone(),
            None => key.process(),
        };
        let processes = match waits(&plan) {
            true => instances.iter().map(declared).collect(),
            false => BTreeSet::new(),
        };
        Going { run, plan, desired, instances, processes, ends, is_outdated: false }
    }

    pub fn instances(&self) -> impl Iterator<Item = &InstanceKey> {
        self.instances.iter()
    }
}

/// Does something of it wait for something else of it? If not, each of its instances is free as soon as its own steps ended.
pub fn waits(plan: &Plan) -> bool {
    plan.waves.len() > 1 || plan.waves.iter().any(|wave| !wave.gates.is_empty())
}

impl UnderWay {
    pub fn is_empty(&self) -> bool {
        self.orders.is_empty()
    }

    pub fn add(&mut self, number: u64, going: Going) {
        self.orders.insert(number, going);
    }

    pub fn get(&self, number: u64) -> Option<&Going> {
        self.orders.get(&number)
    }

    /// Nothing more is done to this one.
    pub fn free(&mut self, number: u64, instance: &InstanceKey) {
        if let Some(going) = self.orders.get_mut(&number) {
            going.instances.remove(instance);
        }
    }

    pub fn over(&mut self, number: u64) -> Option<Going> {
        self.orders.remove(&number)
    }

    pub fn runs(&self) -> impl Iterator<Item = &str> {
        self.orders.values().map(|going| going.run.as_str())
    }

    /// What is to be left alone.
    pub fn instances(&self, desired: &Desired) -> BTreeSet<InstanceKey> {
        let mut all: BTreeSet<InstanceKey> =
            self.orders.values().flat_map(|going| &going.instances).cloned().collect();
        let processes: BTreeSet<&ProcessKey> =
            self.orders.values().flat_map(|going| &going.processes).collect();
        if !processes.is_empty() {
            let of_them = |(_, want): &(&InstanceKey, &Want)| processes.contains(&want.origin.declared);
            all.extend(desired.instances.iter().filter(of_them).map(|(key, _)| key.clone()));
        }
        all
    }

    /// What it costs, for the budgets.
    pub fn kinds(&self) -> BTreeMap<InstanceKey, Kinds> {
        let mut all = BTreeMap::new();
        for going in self.orders.values() {
            let mut ops: BTreeMap<&InstanceKey, Vec<Op>> = BTreeMap::new();
            for step in going.plan.steps() {
                ops.entry(&step.instance).or_default().push(step.op);
            }
            all.extend(ops.into_iter().map(|(key, ops)| {
                let want = going.desired.instances.get(key);
                let state = want.map_or(State::Absent, |want| want.origin.state);
                (key.clone(), Kinds::of_ops(&ops, state))
            }));
        }
        all
    }

    /// The manifests ask for this now: whatever is under way for something else is to come to its end.
    pub fn heed(&mut self, desired: &Desired) {
        for going in self.orders.values_mut().filter(|going| !going.is_outdated) {
            if !going.plan.steps().all(|step| going.desired.asks_as(desired, &step.instance)) {
                going.is_outdated = true;
                going.ends.send_replace(true);
            }
        }
    }
}
