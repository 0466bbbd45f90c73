//! The order of an apply: recover, plan, confirm, lease, plan again, activate, execute, verify, record.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tracing::warn;

use super::activate::{Activation, ManifestSource, RevisionRecord, history_result};
use super::error::ApplyError;
use super::history;
use super::input::{PlanDigests, PlanInput, SpecLookup, step_lines};
use super::lease::{GRACE, WriterLease};
use super::recover::{recover, recover_with_lease};
use super::report::{Conclusion, Report, Results, sole_reason};
use super::request::{ApplyEvent, ApplyHandler, ApplyRequest, ExecutionLimits, SavedPlan};
use super::rollouts;
use super::verify::{awaits_promotion, unhealthy};
use crate::backend::ChangeOrigin;
use crate::execute::Precheck;
use crate::model::{HoldReason, Plan};
use crate::observe::{SpecSearch, Target, TargetError};
use crate::store::Error;

/// Applies a desired state. An error means that no step was sent; failed steps are in the report.
pub async fn apply<T, S, H>(
    request: ApplyRequest<S>,
    target: &T,
    handler: &mut H,
) -> Result<Report, ApplyError>
where
    T: Target<State: Clone + 'static>,
    S: SpecSearch,
    H: ApplyHandler,
{
    let ApplyRequest { plan: request, activation, saved, accept_changed_plan, limits, check, stop } = request;
    let deadline = limits.deadline;
    within(deadline, recover(target, &request.rules.owner, deadline, handler)).await?;
    let (source, accepts_source) = (request.source.clone().unwrap_or_default(), request.accept_source);
    let (input, mut plan, lookup) = within(deadline, request.plan(target)).await?;
    input.locate(&mut plan, &lookup.limits);
    if let Some(saved) = &saved {
        check_saved(saved, &input, &plan)?;
    }
    check_budget(&plan)?;
    // An approved plan must not change.
    let must_match = saved.is_some() || !accept_changed_plan;
    let apply = Apply {
        target,
        handler,
        activation,
        source,
        accepts_source,
        limits,
        must_match,
        check,
        stop,
        input,
        lookup,
    };
    let has_steps = plan.steps().next().is_some();
    match has_steps {
        false => apply.without_steps(plan).await,
        true => apply.with_steps(plan).await,
    }
}

/// An apply after its first plan.
pub(super) struct Apply<'a, T, S, H> {
    pub target: &'a T,
    pub handler: &'a mut H,
    activation: Activation,
    source: String,
    accepts_source: bool,
    pub limits: ExecutionLimits,
    must_match: bool,
    pub check: Precheck,
    pub stop: watch::Receiver<Option<u8>>,
    pub input: PlanInput,
    pub lookup: SpecLookup<S>,
}

impl<T, S, H> Apply<'_, T, S, H>
where
    T: Target<State: Clone + 'static>,
    S: SpecSearch,
    H: ApplyHandler,
{
    /// Activates the revision: there is nothing to execute.
    async fn without_steps(mut self, plan: Plan) -> Result<Report, ApplyError> {
        if let Activation::Pinned(_) = self.activation {
            self.confirm(&plan)?;
        }
        within(self.limits.deadline, self.activate_if_needed()).await?;
        let digests = self.announce(&plan);
        let unhealthy = unhealthy(&self.input);
        let waits = unhealthy.is_empty() && awaits_promotion(plan.held.iter().map(|held| held.reason));
        let conclusion = match plan.held.is_empty() && unhealthy.is_empty() {
            true => Conclusion::Done,
            false if waits => Conclusion::AwaitingPromotion,
            false => Conclusion::Incomplete,
        };
        let recording =
            rollouts::record_pauses(self.target.state(), &self.input.rules.owner, &plan.pauses).await;
        recording.map_err(|error| self.state_error(error))?;
        let reason = sole_reason(plan.held.iter().map(|held| Some(held.reason)));
        let reason = reason.filter(|_| unhealthy.is_empty());
        let converged = Some(conclusion == Conclusion::Done);
        let (ended, rolled_back, pauses) = (Vec::new(), BTreeMap::new(), plan.pauses.clone());
        let results = Results { ended, converged, conclusion, reason, unhealthy, rolled_back, pauses };
        Ok(results.report(plan, digests))
    }

    async fn with_steps(mut self, plan: Plan) -> Result<Report, ApplyError> {
        self.confirm(&plan)?;
        let (target, owner, deadline) = (self.target, self.input.rules.owner.clone(), self.limits.deadline);
        let left = deadline.saturating_duration_since(Instant::now());
        let lock_timeout: Duration = left.min(self.limits.lock_timeout);
        let acquiring = WriterLease::acquire(target, &owner, lock_timeout);
        let writer = within(deadline + GRACE, acquiring).await?;
        let plan = match within(deadline, self.prepare(&plan)).await {
            Ok(plan) => plan,
            Err(error) => {
                writer.release(target).await;
                return Err(error);
            }
        };
        let digests = self.announce(&plan);
        let begun = self.activation.history_entry(&self.input, &plan, &digests);
        let revision = Some(begun.revision.clone());
        let origin = ChangeOrigin { plan: begun.plan.clone(), revision, commit: begun.commit.clone() };
        let working = async {
            let results = self.run(&plan, origin, writer.lost()).await;
            if let Err(error) = rollouts::record_pauses(target.state(), &owner, &results.pauses).await {
                // The next apply or watch reaches the same pause.
                warn!(%error, "cannot record the pause of a rollout");
            }
            let report = results.report(plan, digests);
            let end = history_result(&report);
            writer.release(target).await;
            (report, end)
        };
        Ok(history::record_run(target.state(), &owner, begun, working).await)
    }

    fn confirm(&mut self, plan: &Plan) -> Result<(), ApplyError> {
        match self.handler.confirm(&self.input, plan) {
            true => Ok(()),
            false => Err(ApplyError::NotApproved),
        }
    }

    /// Recovers and plans again under the lease: the previous holder may have changed processes, or crashed. Then
    /// activates the revision.
    async fn prepare(&mut self, confirmed: &Plan) -> Result<Plan, ApplyError> {
        recover_with_lease(self.target, &self.input.rules.owner, self.limits.deadline).await?;
        self.input.refresh_holds(self.target).await?;
        let mut plan = self.input.plan_again(self.target, &mut self.lookup).await?;
        self.input.locate(&mut plan, &self.lookup.limits);
        if self.must_match && step_lines(&plan) != step_lines(confirmed) {
            return Err(ApplyError::PlanChanged);
        }
        check_budget(&plan)?;
        self.activate().await?;
        Ok(plan)
    }

    async fn activate_if_needed(&mut self) -> Result<(), ApplyError> {
        let (state, source) = (self.target.state(), self.manifest_source());
        let record = self.activation.record_without_steps(state, &self.input, source).await;
        match record.map_err(|error| self.state_error(error))? {
            RevisionRecord::Keep => Ok(()),
            RevisionRecord::Store => {
                let stored = Activation::store(state, &self.input, self.manifest_source()).await;
                stored.map_err(|error| self.state_error(error))
            }
            RevisionRecord::Activate => self.activate().await,
        }
    }

    async fn activate(&mut self) -> Result<(), ApplyError> {
        let activated =
            self.activation.activate(self.target.state(), &self.input, self.manifest_source()).await;
        if let Some(pin) = activated.map_err(|error| self.state_error(error))? {
            self.handler.on_event(ApplyEvent::PinEnded(&pin));
        }
        Ok(())
    }

    /// Reports the plan that is executed.
    fn announce(&mut self, plan: &Plan) -> PlanDigests {
        let digests = self.input.digests(plan);
        self.handler.on_event(ApplyEvent::Planned { input: &self.input, plan, digests: &digests });
        digests
    }

    fn manifest_source(&self) -> ManifestSource<'_> {
        ManifestSource { name: &self.source, accepted: self.accepts_source }
    }

    fn state_error(&self, error: Error) -> ApplyError {
        TargetError::state(self.target.name(), error).into()
    }
}

/// Fails if the target does not answer before the deadline. No step has started then.
async fn within<T>(
    deadline: Instant,
    asked: impl Future<Output = Result<T, ApplyError>>,
) -> Result<T, ApplyError> {
    tokio::time::timeout_at(deadline, asked).await.unwrap_or(Err(ApplyError::TimedOut))
}

/// Refuses a saved plan unless a new plan has the same fingerprint and steps.
fn check_saved(saved: &SavedPlan, input: &PlanInput, plan: &Plan) -> Result<(), ApplyError> {
    match saved.fingerprint == input.digests(plan).all && saved.steps == step_lines(plan) {
        true => Ok(()),
        false => Err(ApplyError::SavedPlanStale),
    }
}

/// Refuses the whole plan if it exceeds a budget.
fn check_budget(plan: &Plan) -> Result<(), ApplyError> {
    for reason in [HoldReason::DeleteBudget, HoldReason::RestartBudget] {
        let mut held = plan.held.iter().filter(|held| held.reason == reason);
        if let Some(first) = held.next() {
            let (instances, detail) = (held.count() + 1, first.detail.clone());
            return Err(ApplyError::OverBudget { reason, instances, detail });
        }
    }
    Ok(())
}
