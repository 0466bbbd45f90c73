//! Parameters of an execution: what the caller sets, and what the plan's inputs determine.

use std::collections::{BTreeMap, BTreeSet};

use tokio::sync::watch;
use tokio::time::Instant;

use super::ActiveHolds;
use crate::clock;
use crate::ids;
use crate::model::{
    Desired, DesiredInstance, InstanceKey, Observed, ObservedInstance, Plan, ProcessKey, Step,
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
    /// Holds and pauses as of now.
    pub restraints: watch::Receiver<ActiveHolds>,
    /// Execution stops at the next safe point.
    pub stop: watch::Receiver<bool>,
}

/// Parameters of an execution.
pub struct ExecutionContext {
    pub settings: ExecutionSettings,
    pub dependencies: Dependencies,
    /// Observed state of the instances before the plan.
    pub before: BTreeMap<InstanceKey, ObservedInstance>,
}

/// Declared names and dependencies of the instances of a plan.
#[derive(Clone, Debug, Default)]
pub struct Dependencies {
    /// Dependencies of each process, by declared names.
    pub depends: BTreeMap<ProcessKey, Vec<ProcessKey>>,
    /// The declared name of each instance.
    pub declared: BTreeMap<InstanceKey, ProcessKey>,
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
        all
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
        ExecutionContext { settings, dependencies, before }
    }
}

/// A unique run id.
pub fn new_run_id() -> String {
    ids::ordered_id(clock::now())
}
