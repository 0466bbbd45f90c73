//! Plans in flight, as the reconciler tracks them.
//!
//! A pass skips instances in flight and everything in their component. Plans for outdated manifests stop at the next
//! safe point.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::sync::watch;

use crate::model::{Desired, DesiredInstance, HostKey, InstanceKey, Op, Plan, ProcessKey, State};
use crate::reconcile::DisruptionSet;

/// All work items that have not finished.
#[derive(Debug, Default)]
pub struct InFlightPlans {
    orders: BTreeMap<u64, InFlightPlan>,
}

/// One of them.
#[derive(Debug)]
pub struct InFlightPlan {
    /// The id of its run.
    pub run: String,
    plan: Arc<Plan>,
    desired: Arc<Desired>,
    /// Instances with steps that are pending or unconfirmed.
    instances: BTreeSet<InstanceKey>,
    /// The plan has barriers: until its end, none of these processes is released.
    processes: BTreeSet<ProcessKey>,
    ends: watch::Sender<bool>,
    /// The manifests have changed since.
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

    /// The plan, and the declarations it was made from.
    pub fn plan_and_desired(&self) -> (Arc<Plan>, Arc<Desired>) {
        (Arc::clone(&self.plan), Arc::clone(&self.desired))
    }

    /// Instances of the same process, by the declarations of that time.
    fn affected_instances(&self) -> impl Iterator<Item = &InstanceKey> {
        let is_of_it = |want: &DesiredInstance| self.processes.contains(&want.origin.declared);
        let all = self.desired.instances.iter().filter(|_| !self.processes.is_empty());
        all.filter(move |(_, want)| is_of_it(want)).map(|(key, _)| key)
    }
}

/// Whether steps of a plan wait for other steps of it. If not, each instance is released after its own steps.
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

    /// Releases an instance.
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

    /// Instances that passes must skip.
    pub fn instances(&self, desired: &Desired) -> BTreeSet<InstanceKey> {
        let mut all: BTreeSet<InstanceKey> =
            self.orders.values().flat_map(|going| &going.instances).cloned().collect();
        let processes: BTreeSet<&ProcessKey> =
            self.orders.values().flat_map(|going| &going.processes).collect();
        if !processes.is_empty() {
            let of_them =
                |(_, want): &(&InstanceKey, &DesiredInstance)| processes.contains(&want.origin.declared);
            all.extend(desired.instances.iter().filter(of_them).map(|(key, _)| key.clone()));
            // Also instances that are no longer declared: a failed rollout may still roll them back.
            all.extend(self.orders.values().flat_map(InFlightPlan::affected_instances).cloned());
        }
        all.extend(self.identity_conflicts(desired));
        all
    }

    /// Instances whose identity is in flight under another name: the observation does not show yet that it is taken.
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

    /// Disruptions in flight, for the budgets.
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

    /// Stops plans that do not match these declarations.
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
