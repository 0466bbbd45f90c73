//! Manual operations (`start`, `stop`, …) outside of a plan, executed and recorded like steps of a plan.
//!
//! They need no lease: the hold that is written before a start, stop or kill keeps controllers away. A restart and a
//! reload change nothing that a controller would undo, and leave no hold. An instance without an owner stays without
//! one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::watch;
use tokio::time::Instant;

use super::protections;
use crate::backend::RowState;
use crate::clock;
use crate::execute::{ActiveHolds, ExecutionContext, ExecutionSettings, StepOutcome, StepResult, execute};
use crate::model::{
    Desired, HashedSpec, Hold, HostKey, InstanceKey, Observed, ObservedInstance, Op, Plan, SpecSide, Step,
    Time, Wave,
};
use crate::observe::{Observation, Target, TargetError, observe_target};
use crate::reconcile::Caps;
use crate::store::{self, Store, Txn, keys};

/// Caller and reason of a manual operation, and the expiry of its hold.
pub struct HoldTerms {
    pub by: String,
    pub reason: Option<String>,
    pub until: Option<Time>,
}

/// Reason why a manual operation did nothing.
#[derive(Debug, thiserror::Error)]
pub enum OperateError {
    #[error("host {0}: no agent is connected; nothing was done")]
    NoAgent(HostKey),
    #[error("{instance}: process{} was not started by Abide and has no owner; nothing was done", shown_pid(*.pid))]
    NotOwned { instance: InstanceKey, pid: Option<u32> },
    #[error("the spec of {0} is unknown; nothing was done")]
    UnknownSpec(InstanceKey),
    /// The hold could not be written.
    #[error(transparent)]
    Hold(store::Error),
}

fn shown_pid(pid: Option<u32>) -> String {
    pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default()
}

/// Observes every instance of the target, with recorded specs.
pub async fn observe_all<T: Target>(target: &T) -> Result<Observation, TargetError> {
    observe_target(target, &Desired::default(), Some(BTreeSet::new())).await
}

/// Whether a manual operation is recorded as a hold: without one, a controller would undo it.
pub fn is_recorded_as_hold(op: Op) -> bool {
    match op {
        Op::Start | Op::Stop | Op::Kill | Op::Supervise | Op::Unsupervise | Op::Register | Op::Unregister => {
            true
        }
        Op::Restart | Op::Reload => false,
    }
}

/// Holds these instances where the operation [needs it](is_recorded_as_hold), and performs it on each. `observed` is what the observation
/// [remembers](Observation::remembered).
pub async fn operate<T: Target>(
    op: Op,
    instances: &[(&InstanceKey, &ObservedInstance)],
    (observation, observed): (&Observation, &Observed),
    terms: &HoldTerms,
    target: &T,
    deadline: Instant,
) -> Result<Vec<StepResult>, OperateError> {
    let steps = steps(op, instances, observation, &target.caps())?;
    // The hold is recorded before the operation is sent: a controller cannot undo it in between.
    if is_recorded_as_hold(op) {
        target.state().txn(holds(op, instances, terms)).await.map_err(OperateError::Hold)?;
    }
    let mut results = execute_steps(steps, target, observed, deadline).await;
    if matches!(op, Op::Stop | Op::Kill) {
        let waiting = waiting_steps(&results, instances, observation);
        let ended = execute_steps(waiting, target, observed, deadline).await;
        ended.into_iter().for_each(|ended| record_supervision_end(&mut results, ended));
    }
    Ok(results)
}

/// Steps that end the supervision of processes that did not run when they were stopped. Supervision would launch them later:
/// after a wait between two tries, or at the next time of their schedule.
fn waiting_steps(
    results: &[StepResult],
    instances: &[(&InstanceKey, &ObservedInstance)],
    observation: &Observation,
) -> Vec<Step> {
    let did_not_run = |key: &InstanceKey| {
        results.iter().any(|result| result.instance == *key && result.state == RowState::NotRunning)
    };
    let waiting = instances.iter().filter(|(key, seen)| seen.hosted == Some(true) && did_not_run(key));
    waiting.map(|(key, seen)| step(Op::Unsupervise, key, seen, observation)).collect()
}

/// Adds the end of supervision to the result of a stop.
fn record_supervision_end(results: &mut [StepResult], ended: StepResult) {
    let Some(result) = results.iter_mut().find(|result| result.instance == ended.instance) else { return };
    match ended.outcome {
        StepOutcome::Done | StepOutcome::AlreadySo => {
            result.message.push_str("; it is not supervised any more");
        }
        StepOutcome::Failed | StepOutcome::Skipped | StepOutcome::TimedOut | StepOutcome::Unknown => {
            *result = ended;
        }
    }
}

/// The steps of an operation, unless an instance cannot be operated on.
fn steps(
    op: Op,
    instances: &[(&InstanceKey, &ObservedInstance)],
    observation: &Observation,
    caps: &Caps,
) -> Result<Vec<Step>, OperateError> {
    let gaps = &observation.observed.gaps;
    let unknown = instances.iter().map(|(key, _)| &key.host).filter(|host| gaps.contains_key(host)).min();
    if let Some(host) = unknown {
        return Err(OperateError::NoAgent(host.clone()));
    }
    if let Some((key, seen)) = instances.iter().find(|(key, _)| observation.is_foreign(key)) {
        return Err(OperateError::NotOwned { instance: (*key).clone(), pid: seen.process.pid });
    }
    let steps: Vec<Step> = instances.iter().map(|(key, seen)| step(op, key, seen, observation)).collect();
    // A target that stores no specs needs one with each operation.
    let stores_specs = caps.reads_specs || caps.operates_on_registered_spec;
    match steps.iter().find(|step| !stores_specs && step.spec.is_none()) {
        Some(step) => Err(OperateError::UnknownSpec(step.instance.clone())),
        None => Ok(steps),
    }
}

fn holds(op: Op, instances: &[(&InstanceKey, &ObservedInstance)], terms: &HoldTerms) -> Txn {
    let mut txn = Txn::default();
    for (key, _) in instances {
        let hold = Hold {
            instance: (*key).clone(),
            by: terms.by.clone(),
            reason: Some(terms.reason.clone().unwrap_or_else(|| format!("manual {op}"))),
            until: terms.until,
        };
        txn = txn.and(Txn::put(keys::hold(key), serde_json::to_vec(&hold).unwrap_or_default()));
    }
    txn
}

/// An operation on an observed instance, with its registered or live spec.
pub fn step(op: Op, instance: &InstanceKey, seen: &ObservedInstance, world: &Observation) -> Step {
    let known = world.entry(instance);
    let spec = match op {
        // A process is stopped with the spec that it was started with.
        Op::Stop | Op::Kill => seen.specs.live.spec().or(seen.specs.registered.spec()),
        Op::Start
        | Op::Restart
        | Op::Reload
        | Op::Supervise
        | Op::Unsupervise
        | Op::Register
        | Op::Unregister => seen.specs.registered.spec(),
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
        revision: spec.as_ref().map(under),
        spec,
        reloaded_fields: Vec::new(),
        pid_stays: op.pid_stays(),
        needs_live_check: false,
        from: None,
        why: Vec::new(),
    }
}

/// The number of a run in this process: two runs in the same millisecond are different.
fn next_run() -> usize {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    RUNS.fetch_add(1, Ordering::Relaxed)
}

/// Executes the steps, grouped by owner. The result has every step.
pub async fn execute_steps<T: Target>(
    steps: Vec<Step>,
    target: &T,
    before: &Observed,
    deadline: Instant,
) -> Vec<StepResult> {
    let mut owners: BTreeMap<Option<&str>, Vec<Step>> = BTreeMap::new();
    for (id, step) in steps.into_iter().enumerate() {
        let owner = before.instances.get(&step.instance).and_then(|seen| seen.owner.as_deref());
        owners.entry(owner).or_default().push(Step { id, ..step });
    }
    let protected = match target.caps().reads_specs {
        true => protections::Protections::new(),
        false => protections::read(target.state()).await.unwrap_or_default(),
    };
    let mut all = Vec::new();
    for (owner, steps) in owners {
        let (_going_on, stop) = watch::channel(false);
        // Manual operations are not subject to holds: they create one.
        let (_free, active_holds) = watch::channel(ActiveHolds::default());
        let settings = ExecutionSettings {
            owner: owner.unwrap_or_default().to_owned(),
            target: target.name().to_owned(),
            caps: target.caps(),
            run: format!("by-hand-{:013}-{}-{}", clock::now().0, std::process::id(), next_run()),
            deadline,
            max_parallel: usize::MAX,
            check: |_| None,
            active_holds,
            stop,
            origin: None,
        };
        let plan = Plan { waves: vec![Wave { steps, ..Wave::default() }], ..Plan::default() };
        // No manifest is involved: nothing depends on anything.
        let mut context = ExecutionContext::new(settings, &Desired::default(), before, &plan);
        // An operation sends the labels again: it must not end a protection.
        for step in plan.steps() {
            let recorded = protected.get(&step.instance).filter(|recorded| !recorded.is_empty());
            if let Some(recorded) = recorded {
                context.protections.entry(step.instance.clone()).or_insert_with(|| recorded.clone());
            }
        }
        all.extend(execute(&plan, target.backend(), target.state(), &context, &mut |_| {}).await.ended);
    }
    all.sort_by_key(|ended| ended.step);
    all
}
