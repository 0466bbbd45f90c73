//! Manual operations (`start`, `stop`, …) outside of a plan, executed and recorded like steps of a plan.
//!
//! They need no lease: the hold that was written before keeps controllers away. An instance without an owner stays
//! without one.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::time::Instant;

use super::world::Observation;
use super::{ActiveHolds, ExecutionContext, StepResult, execute};
use crate::backend::Backend;
use crate::clock;
use crate::model::{HashedSpec, InstanceKey, Observed, ObservedInstance, Op, Plan, SpecSide, Step, Wave};
use crate::reconcile::Caps;
use crate::store::Store;

/// An operation on an observed instance, with its registered or live spec.
pub fn step(
    op: Op,
    instance: &InstanceKey,
    seen: &ObservedInstance,
    world: &Observation,
    caps: &Caps,
) -> Step {
    let known = world.entry(instance);
    let spec = match op {
        // A process is stopped with the spec that it was started with.
        Op::Stop | Op::Kill => seen.live.spec().or(seen.registered_spec.spec()),
        Op::Start
        | Op::Restart
        | Op::Reload
        | Op::Supervise
        | Op::Unsupervise
        | Op::Register
        | Op::Unregister => seen.registered_spec.spec(),
    };
    let spec = spec.cloned().or_else(|| known?.spec());
    let under =
        |spec: &Arc<HashedSpec>| known.and_then(|entry| entry.revision_of(spec)).unwrap_or(*spec.revision());
    Step {
        id: 0,
        instance: instance.clone(),
        host: world.host(instance),
        op,
        spec_side: SpecSide::Old,
        revision: spec.as_ref().filter(|_| !caps.reads_specs).map(under),
        spec,
        reloaded_fields: Vec::new(),
        pid_stays: op.pid_stays(),
        needs_live_check: false,
        from: None,
        why: Vec::new(),
    }
}

/// Executes the steps, grouped by owner. The result has every step.
pub async fn execute_manual<B: Backend, S: Store>(
    steps: Vec<Step>,
    backend: &B,
    store: &S,
    (target, caps): (&str, Caps),
    before: &Observed,
    deadline: Instant,
) -> Vec<StepResult> {
    let mut owners: BTreeMap<Option<&str>, Vec<Step>> = BTreeMap::new();
    for (id, step) in steps.into_iter().enumerate() {
        let owner = before.instances.get(&step.instance).and_then(|seen| seen.owner.as_deref());
        owners.entry(owner).or_default().push(Step { id, ..step });
    }
    let mut all = Vec::new();
    for (nth, (owner, steps)) in owners.into_iter().enumerate() {
        let row = |step: &Step| Some((step.instance.clone(), before.instances.get(&step.instance)?.clone()));
        let (_going_on, stop) = watch::channel(false);
        // Manual operations are not subject to holds: they create one.
        let (_free, restraints) = watch::channel(ActiveHolds::default());
        let terms = ExecutionContext {
            owner: owner.unwrap_or_default().to_owned(),
            target: target.to_owned(),
            caps,
            run: format!("by-hand-{:013}-{}-{nth}", clock::now().0, std::process::id()),
            deadline,
            max_parallel: usize::MAX,
            depends: BTreeMap::new(),
            declared: BTreeMap::new(),
            before: steps.iter().filter_map(row).collect(),
            check: |_| None,
            stop,
            restraints,
        };
        let plan = Plan { waves: vec![Wave { steps, ..Wave::default() }], ..Plan::default() };
        all.extend(execute(&plan, backend, store, &terms, &mut |_| {}).await.ended);
    }
    all.sort_by_key(|ended| ended.step);
    all
}
