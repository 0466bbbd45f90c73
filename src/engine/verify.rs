//! Verification: observes after the last step until the instances converge, and concludes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::input::{FactSources, PlanInput};
use super::report::{Conclusion, Results, Unhealthy, sole_reason};
use super::request::{ExecutionLimits, stop_request};
use super::rollout_records;
use crate::execute::{StepOutcome, StepResult};
use crate::model::{
    AutoType, DesiredInstance, Health, HoldReason, InstanceKey, Plan, ProcessKey, RolloutPause,
};
use crate::observe::{SpecSearch, Target};

/// Time limit for the verification, also after the deadline.
const FINAL_OBSERVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval between two observations of an instance that is starting.
pub(super) const OBSERVE_INTERVAL: Duration = Duration::from_millis(200);

/// The last observation.
#[derive(Default)]
struct Verified {
    converged: Option<bool>,
    unhealthy: Vec<Unhealthy>,
    held: Vec<HoldReason>,
    has_steps: bool,
    pauses: Vec<RolloutPause>,
}

/// An execution that has ended, and the requests that end its verification.
pub(super) struct Executed {
    pub ended: Vec<StepResult>,
    /// Early end of the execution.
    pub stopped: Option<Conclusion>,
    /// The caller's request to stop.
    pub requested: watch::Receiver<Option<u8>>,
    /// Versions whose rollout was aborted before the plan was made.
    pub aborted_before: BTreeMap<ProcessKey, String>,
}

/// Observes until the instances converge, unless the apply was stopped or does not wait.
pub(super) async fn verify<T: Target, S: SpecSearch>(
    target: &T,
    input: &mut PlanInput,
    facts: &mut FactSources<S>,
    limits: &ExecutionLimits,
    executed: Executed,
) -> Results {
    let Executed { ended, mut stopped, mut requested, aborted_before } = executed;
    let mut verified = Verified::default();
    if limits.verify && stopped.is_none() {
        tokio::select! {
            last = observe_until_started(target, input, facts, limits, &aborted_before) => verified = last,
            code = stop_request(&mut requested) => stopped = Some(Conclusion::Stopped(code)),
        }
    }
    // Without an observation the result is not verified; without a wait none is needed.
    let is_converged = verified.converged.unwrap_or(!limits.verify);
    let is_late = Instant::now() >= limits.deadline;
    let mut conclusion = stopped.unwrap_or_else(|| conclude(&ended, is_converged, is_late));
    let is_well = ended.iter().all(|one| one.outcome.is_well());
    if conclusion == Conclusion::Incomplete && is_well && verified.awaits_promotion() {
        // A person may have aborted the rollout since the plan under the lease.
        if input.refresh_holds(target).await.is_ok() {
            verified = Verified::of(input, &input.plan());
        }
        if verified.awaits_promotion() {
            conclusion = Conclusion::AwaitingPromotion;
        }
    }
    let reason = verified.reason(&ended);
    let Verified { converged, unhealthy, pauses, .. } = verified;
    Results { ended, converged, conclusion, reason, unhealthy, rolled_back: BTreeMap::new(), pauses }
}

/// Observes until no instance is starting: a process that has just started may need time to become healthy.
async fn observe_until_started<T: Target, S: SpecSearch>(
    target: &T,
    input: &mut PlanInput,
    facts: &mut FactSources<S>,
    limits: &ExecutionLimits,
    aborted_before: &BTreeMap<ProcessKey, String>,
) -> Verified {
    let mut verified = Verified::default();
    let give_up_at = Instant::now() + FINAL_OBSERVE_TIMEOUT;
    loop {
        let planning = input.plan_again(target, facts);
        match tokio::time::timeout_at(limits.deadline.max(give_up_at), planning).await {
            Ok(Ok(remaining)) => {
                verified = Verified::of(input, &remaining);
                if Instant::now() >= limits.deadline || !is_starting(input, aborted_before) {
                    return verified;
                }
                // A rollout that a person aborts meanwhile is not waited for. A failed read changes nothing.
                let _ = tokio::time::timeout_at(limits.deadline, input.refresh_holds(target)).await;
            }
            Ok(Err(_)) | Err(_) => {
                // An earlier observation does not show the current state.
                verified.converged = None;
                if Instant::now() >= give_up_at {
                    return verified;
                }
            }
        }
        tokio::time::sleep(OBSERVE_INTERVAL).await;
    }
}

impl Verified {
    fn of(input: &PlanInput, remaining: &Plan) -> Verified {
        let unhealthy = unhealthy(input);
        Verified {
            converged: Some(remaining.is_empty() && unhealthy.is_empty()),
            unhealthy,
            held: remaining.held.iter().map(|held| held.reason).collect(),
            has_steps: remaining.steps().next().is_some(),
            pauses: remaining.pauses.clone(),
        }
    }

    fn awaits_promotion(&self) -> bool {
        !self.has_steps && self.unhealthy.is_empty() && awaits_promotion(self.held.iter().copied())
    }

    fn reason(&self, ended: &[StepResult]) -> Option<HoldReason> {
        let failed = ended.iter().filter(|one| !one.outcome.is_well() && one.outcome != StepOutcome::Skipped);
        let reasons = failed.map(|one| one.reason).chain(self.held.iter().copied().map(Some));
        // Remaining steps have their own reasons, unless ownership refused them.
        let is_refused = ended.iter().any(|one| one.reason == Some(HoldReason::NotOwned));
        sole_reason(reasons).filter(|_| self.unhealthy.is_empty() && (!self.has_steps || is_refused))
    }
}

fn conclude(ended: &[StepResult], is_converged: bool, is_late: bool) -> Conclusion {
    let any = |outcome: StepOutcome| ended.iter().any(|ended| ended.outcome == outcome);
    match () {
        () if any(StepOutcome::Failed) || any(StepOutcome::Unknown) => Conclusion::Incomplete,
        () if any(StepOutcome::TimedOut) => Conclusion::TimedOut,
        // Converged after the deadline is still converged.
        () if is_converged && !any(StepOutcome::Skipped) => Conclusion::Done,
        () if is_late => Conclusion::TimedOut,
        () => Conclusion::Incomplete,
    }
}

/// Whether promotions are all that a plan without steps waits for.
pub(super) fn awaits_promotion(held: impl Iterator<Item = HoldReason>) -> bool {
    let mut held = held.peekable();
    held.peek().is_some() && held.all(|reason| reason == HoldReason::AwaitingPromotion)
}

/// Whether a plan has no steps, and instances that wait for a run in progress or for a process that is starting.
pub(super) fn awaits_dependency(input: &PlanInput, plan: &Plan) -> bool {
    let desired = &input.loaded.desired.instances;
    let waiting = plan.held.iter().filter(|held| held.reason == HoldReason::WaitingForDependency);
    let dependencies: BTreeSet<&ProcessKey> = waiting
        .filter_map(|held| desired.get(&held.instance))
        .flat_map(|waiting| &waiting.origin.depends_on)
        .collect();
    let is_in_progress =
        |(key, want): (&InstanceKey, &DesiredInstance)| {
            let is_run = want.spec.monitor.auto_type == AutoType::OneShot;
            dependencies.contains(&want.origin.declared)
                && input.observed.instances.get(key).is_some_and(|seen| {
                    seen.health == Health::Starting || (is_run && seen.running == Some(true))
                })
        };
    plan.steps().next().is_none() && desired.iter().any(is_in_progress)
}

/// Whether a declared instance is starting. Those of a rollout that was aborted since the plan do not count.
fn is_starting(input: &PlanInput, aborted_before: &BTreeMap<ProcessKey, String>) -> bool {
    let desired = &input.loaded.desired;
    let seen = input.observed.instances.iter().filter(|(_, seen)| seen.health == Health::Starting);
    let mut processes = seen.filter_map(|(key, _)| Some(&desired.instances.get(key)?.origin.declared));
    let is_aborted = |process: &ProcessKey| {
        let progress = input.rules.rollouts.get(process).filter(|progress| progress.is_aborted);
        progress.is_some_and(|progress| {
            aborted_before.get(process) != Some(&progress.id)
                && rollout_records::version_of(desired, process).as_ref() == Some(&progress.id)
        })
    };
    processes.any(|process| !is_aborted(process))
}

/// Declared instances that are degraded or failed.
pub(super) fn unhealthy(input: &PlanInput) -> Vec<Unhealthy> {
    let meant = |key: &InstanceKey, want: &DesiredInstance| {
        want.origin.state.needs_start()
            && input.rules.selection.selects(key, Some(&want.origin.declared), &want.spec.labels)
    };
    let wanted = input.loaded.desired.instances.iter().filter(|(key, want)| meant(key, want));
    let seen = wanted.filter_map(|(key, _)| Some((key, input.observed.instances.get(key)?)));
    seen.filter(|(_, seen)| matches!(seen.health, Health::Degraded | Health::Failed))
        .map(|(key, seen)| Unhealthy { instance: key.clone(), health: seen.health })
        .collect()
}
