//! Parameters of an execution: what the caller sets, and what the plan's inputs determine.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::sync::watch;
use tokio::time::Instant;

use super::ActiveHolds;
use crate::backend::ChangeOrigin;
use crate::clock;
use crate::ids;
use crate::model::{
    Desired, DesiredInstance, HostKey, InstanceKey, Observed, ObservedInstance, Plan, ProcessKey, Protection,
    Step,
};
use crate::reconcile::Caps;

/// Precondition of a step: `Some` is the reason why it is not met.
pub type Precheck = fn(&Step) -> Option<String>;

/// Parameters that the caller of an execution sets.
#[derive(Clone)]
pub struct ExecutionSettings {
    /// Owner of the changed instances; empty: they stay without an owner.
    pub owner: String,
    /// The target's name, and its capabilities.
    pub target: String,
    pub caps: Caps,
    /// Id of this run, unique.
    pub run: String,
    pub deadline: Instant,
    /// Maximum number of steps in flight.
    pub max_parallel: usize,
    /// Check before a step is sent.
    pub check: Precheck,
    /// Holds, pauses and aborted rollouts as of now.
    pub active_holds: watch::Receiver<ActiveHolds>,
    /// Execution stops at the next safe point.
    pub stop: watch::Receiver<bool>,
    /// The plan and revision that the steps belong to, for the audit log of the target.
    pub origin: Option<Arc<ChangeOrigin>>,
}

/// Parameters of an execution.
pub struct ExecutionContext {
    pub settings: ExecutionSettings,
    pub dependencies: Dependencies,
    /// Observed state of the instances before the plan.
    pub before: BTreeMap<InstanceKey, ObservedInstance>,
    /// Protections of the instances with steps: as declared, else as observed. Operations carry them as a label.
    pub protections: BTreeMap<InstanceKey, Vec<Protection>>,
    /// The execution returns instances to their previous version. The abort of a rollout does not stop it.
    pub is_rollback: bool,
}

/// Declared names and dependencies of the instances of a plan.
#[derive(Clone, Debug, Default)]
pub struct Dependencies {
    /// Dependencies of each process, by declared names.
    pub depends: BTreeMap<ProcessKey, Vec<ProcessKey>>,
    /// The declared name of each instance.
    pub declared: BTreeMap<InstanceKey, ProcessKey>,
    /// Hosts with instances of a name that something depends on: a dependent waits for those on its own host or, if
    /// there are none, for all.
    pub hosts: HostsByName,
}

/// The hosts of the instances of each name. An instance counts under its declared name and under its own.
#[derive(Clone, Debug, Default)]
pub struct HostsByName(BTreeMap<ProcessKey, BTreeSet<HostKey>>);

impl HostsByName {
    pub fn insert(&mut self, name: ProcessKey, host: &HostKey) {
        self.0.entry(name).or_default().insert(host.clone());
    }

    fn contains(&self, name: &ProcessKey, host: &HostKey) -> bool {
        self.0.get(name).is_some_and(|hosts| hosts.contains(host))
    }
}

impl Dependencies {
    /// Of the instances with steps.
    pub fn of(desired: &Desired, plan: &Plan) -> Dependencies {
        let mut all = Dependencies::default();
        for key in plan.steps().map(|step| &step.instance) {
            let Some(want) = desired.instances.get(key) else { continue };
            all.declared.insert(key.clone(), want.origin.declared.clone());
            let depends_on = || want.origin.depends_on.clone();
            all.depends.entry(want.origin.declared.clone()).or_insert_with(depends_on);
        }
        let names: BTreeSet<&ProcessKey> = all.depends.values().flatten().collect();
        for (key, want) in desired.instances.iter().filter(|_| !names.is_empty()) {
            let own = key.process();
            for name in [&want.origin.declared, &own].into_iter().filter(|name| names.contains(name)) {
                all.hosts.insert(name.clone(), &key.host);
            }
        }
        all
    }

    /// Adds an instance under its names.
    pub fn name_instance(&self, instance: &InstanceKey, names: &mut HostsByName) {
        names.insert(instance.process(), &instance.host);
        if let Some(declared) = self.declared.get(instance) {
            names.insert(declared.clone(), &instance.host);
        }
    }

    /// The dependency of a process on a host that is among these instances.
    pub fn find_among(
        &self,
        process: &ProcessKey,
        host: &HostKey,
        names: &HostsByName,
    ) -> Option<&ProcessKey> {
        self.depends.get(process)?.iter().find(|name| match self.hosts.contains(name, host) {
            true => names.contains(name, host),
            false => names.0.contains_key(*name),
        })
    }
}

impl ExecutionContext {
    pub fn new(
        settings: ExecutionSettings,
        desired: &Desired,
        observed: &Observed,
        plan: &Plan,
    ) -> ExecutionContext {
        let mut dependencies = Dependencies::of(desired, plan);
        let row =
            |step: &Step| Some((step.instance.clone(), observed.instances.get(&step.instance)?.clone()));
        let mut before: BTreeMap<_, _> = plan.steps().filter_map(row).collect();
        // A rollback affects all instances of a process.
        let rolled: BTreeSet<&ProcessKey> =
            plan.waves.iter().flat_map(|wave| &wave.gates).map(|gate| &gate.process).collect();
        let is_rolled = |want: &DesiredInstance| rolled.contains(&want.origin.declared);
        let all = desired.instances.iter().filter(|_| !rolled.is_empty());
        for (key, want) in all.filter(|(_, want)| is_rolled(want)) {
            if let (false, Some(seen)) = (want.origin.rollout.is_none(), observed.instances.get(key)) {
                before.entry(key.clone()).or_insert_with(|| seen.clone());
                let declared = || want.origin.declared.clone();
                dependencies.declared.entry(key.clone()).or_insert_with(declared);
            }
        }
        let protections_of = |key: &InstanceKey| match desired.instances.get(key) {
            Some(want) => Some(want.origin.protect.clone()),
            None => observed.instances.get(key).map(|seen| seen.specs.protections.clone()),
        };
        let protections = plan
            .steps()
            .filter_map(|step| Some((step.instance.clone(), protections_of(&step.instance)?)))
            .filter(|(_, protections)| !protections.is_empty())
            .collect();
        ExecutionContext { settings, dependencies, before, protections, is_rollback: false }
    }

    /// The same for a rollback.
    pub fn rollback(self) -> ExecutionContext {
        ExecutionContext { is_rollback: true, ..self }
    }

    /// Reason why no further step of an instance's rollout is sent.
    pub fn aborted(&self, instance: &InstanceKey) -> Option<String> {
        let declared = self.dependencies.declared.get(instance).filter(|_| !self.is_rollback)?;
        self.settings.active_holds.borrow().stops_rollout(declared)
    }
}

/// A unique run id.
pub fn new_run_id() -> String {
    ids::ordered_id(clock::now())
}
