//! What is being carried out, as passes know of it.
//!
//! A pass leaves alone what is under way, and everything that hangs together with it. What the manifests ask for otherwise
//! by now is to come to its end at the next safe point.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::sync::watch;

use crate::model::{Desired, DesiredInstance, HostKey, InstanceKey, Op, Plan, ProcessKey, State};
use crate::reconcile::DisruptionSet;

/// Every order that is not over.
#[derive(Debug, Default)]
pub struct InFlightPlans {
    orders: BTreeMap<u64, InFlightPlan>,
}

/// One of them.
#[derive(Debug)]
pub struct InFlightPlan {
    /// The name of its run.
    pub run: String,
    plan: Arc<Plan>,
    desired: Arc<Desired>,
    /// Of which something is still to be done, or to be seen.
    instances: BTreeSet<InstanceKey>,
    /// It waits in between: until its end, nothing of these processes is free.
    processes: BTreeSet<ProcessKey>,
    ends: watch::Sender<bool>,
    /// The manifests ask for something else by now.
    is_outdated: bool,
}

impl InFlightPlan {
    pub fn new(
        run: String,
        plan: Arc<Plan>,
        desired: Arc<Desired>,
        ends: watch::Sender<bool>,
    ) -> InFlightPlan {
        let mut instances = BTreeSet::new();
        for step in plan.steps() {
            instances.insert(step.instance.clone());
            instances.extend(step.from.clone());
        }
        let declared = |key: &InstanceKey| match desired.instances.get(key) {
            Some(want) => want.origin.declared.clone(),
            None => key.process(),
        };
        let processes = match has_barriers(&plan) {
            true => instances.iter().map(declared).collect(),
            false => BTreeSet::new(),
        };
        InFlightPlan { run, plan, desired, instances, processes, ends, is_outdated: false }
    }

    pub fn instances(&self) -> impl Iterator<Item = &InstanceKey> {
        self.instances.iter()
    }

    /// What is done, and what was asked for then.
    pub fn plan_and_desired(&self) -> (Arc<Plan>, Arc<Desired>) {
        (Arc::clone(&self.plan), Arc::clone(&self.desired))
    }

    /// What hangs together with it by its process, as it was asked for then.
    fn affected_instances(&self) -> impl Iterator<Item = &InstanceKey> {
        let is_of_it = |want: &DesiredInstance| self.processes.contains(&want.origin.declared);
        let all = self.desired.instances.iter().filter(|_| !self.processes.is_empty());
        all.filter(move |(_, want)| is_of_it(want)).map(|(key, _)| key)
    }
}

/// Does something of it wait for something else of it? If not, each of its instances is free as soon as its own steps ended.
pub fn has_barriers(plan: &Plan) -> bool {
    plan.waves.len() > 1 || plan.waves.iter().any(|wave| !wave.gates.is_empty())
}

impl InFlightPlans {
    pub fn is_empty(&self) -> bool {
        self.orders.is_empty()
    }

    pub fn add(&mut self, number: u64, going: InFlightPlan) {
        self.orders.insert(number, going);
    }

    pub fn get(&self, number: u64) -> Option<&InFlightPlan> {
        self.orders.get(&number)
    }

    /// Nothing more is done to this one.
    pub fn release(&mut self, number: u64, instance: &InstanceKey) {
        if let Some(going) = self.orders.get_mut(&number) {
            going.instances.remove(instance);
        }
    }

    pub fn finish(&mut self, number: u64) -> Option<InFlightPlan> {
        self.orders.remove(&number)
    }

    pub fn run_ids(&self) -> impl Iterator<Item = &str> {
        self.orders.values().map(|going| going.run.as_str())
    }

    /// What is to be left alone.
    pub fn instances(&self, desired: &Desired) -> BTreeSet<InstanceKey> {
        let mut all: BTreeSet<InstanceKey> =
            self.orders.values().flat_map(|going| &going.instances).cloned().collect();
        let processes: BTreeSet<&ProcessKey> =
            self.orders.values().flat_map(|going| &going.processes).collect();
        if !processes.is_empty() {
            let of_them =
                |(_, want): &(&InstanceKey, &DesiredInstance)| processes.contains(&want.origin.declared);
            all.extend(desired.instances.iter().filter(of_them).map(|(key, _)| key.clone()));
            // Also what is not wanted any more by now: a rollout that fails may still put it back.
            all.extend(self.orders.values().flat_map(InFlightPlan::affected_instances).cloned());
        }
        all.extend(self.identity_conflicts(desired));
        all
    }

    /// Whoever is to be where something under way is, by another name: nobody sees yet that the place is taken.
    fn identity_conflicts(&self, desired: &Desired) -> Vec<InstanceKey> {
        let steps = self.orders.values().flat_map(|going| going.plan.steps());
        let places: BTreeMap<(&HostKey, String), &InstanceKey> = steps
            .filter_map(|step| {
                let spec = step.spec.as_ref()?;
                Some(((&step.instance.host, spec.identity.index_key()), &step.instance))
            })
            .collect();
        if places.is_empty() {
            return Vec::new();
        }
        let hosts: BTreeSet<&HostKey> = places.keys().map(|(host, _)| *host).collect();
        let is_there = |(key, want): &(&InstanceKey, &DesiredInstance)| {
            hosts.contains(&key.host)
                && places.get(&(&key.host, want.spec.identity.index_key())).is_some_and(|who| *who != *key)
        };
        desired.instances.iter().filter(is_there).map(|(key, _)| key.clone()).collect()
    }

    /// What it costs, for the budgets.
    pub fn disruptions(&self) -> BTreeMap<InstanceKey, DisruptionSet> {
        let mut all = BTreeMap::new();
        for going in self.orders.values() {
            let mut ops: BTreeMap<&InstanceKey, Vec<Op>> = BTreeMap::new();
            for step in going.plan.steps() {
                ops.entry(&step.instance).or_default().push(step.op);
            }
            all.extend(ops.into_iter().map(|(key, ops)| {
                let want = going.desired.instances.get(key);
                let state = want.map_or(State::Absent, |want| want.origin.state);
                (key.clone(), DisruptionSet::of_ops(&ops, state))
            }));
        }
        all
    }

    /// The manifests ask for this now: whatever is under way for something else is to come to its end.
    pub fn cancel_outdated(&mut self, desired: &Desired) {
        for going in self.orders.values_mut().filter(|going| !going.is_outdated) {
            let mut touched = going.plan.steps().map(|step| &step.instance).chain(going.affected_instances());
            let is_as_before = touched.all(|key| going.desired.is_same_request(desired, key));
            drop(touched);
            if !is_as_before {
                going.is_outdated = true;
                going.ends.send_replace(true);
            }
        }
    }
}
