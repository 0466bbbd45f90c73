//! The order of an apply: recover, plan, confirm, lease, plan again, activate, execute, verify, record.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tracing::warn;

use super::activate::{Activation, ManifestSource, RevisionRecord, history_result};
use super::error::ApplyError;
use super::history;
use super::input::{FactSources, PlanDigests, PlanInput, step_lines};
use super::recover::{recover, recover_with_lease};
use super::report::{Conclusion, Report, Results, sole_reason};
use super::request::{ApplyEvent, ApplyHandler, ApplyRequest, ExecutionLimits, SavedPlan};
use super::rollout_records;
use super::selection_check::check_selection;
use super::verify::{OBSERVE_INTERVAL, awaits_dependency, awaits_promotion, unhealthy};
use super::writer_lease::{GRACE, WriterLease};
use crate::backend::ChangeOrigin;
use crate::contract::HistoryEntry;
use crate::execute::Precheck;
use crate::model::{HeldChange, HoldReason, Plan};
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
    let (input, mut plan, facts) = within(deadline, request.plan(target)).await?;
    within(deadline, check_selection(target, &input)).await?;
    input.locate(&mut plan, &facts.limits);
    if let Some(saved) = &saved {
        check_saved(saved, &input, &plan)?;
        if !handler.accept_saved(&input, &plan) {
            return Err(ApplyError::NotApproved);
        }
        if let Some(digest) = &saved.signed_plan {
            within(deadline, check_first_apply(target, &input.rules.owner, digest)).await?;
        }
    }
    check_budget(&plan)?;
    // An approved plan must not change.
    let must_match = saved.is_some() || !accept_changed_plan;
    let is_saved = saved.is_some();
    let signatures =
        saved.map(|saved| SavedSignatures { persons: saved.signed_by, digest: saved.signed_plan });
    let mut apply = Apply {
        target,
        handler,
        activation,
        source,
        accepts_source,
        limits,
        must_match,
        signatures: signatures.unwrap_or_default(),
        check,
        stop,
        input,
        facts,
    };
    // An approved plan without steps stays one.
    if !is_saved {
        plan = apply.await_dependencies(plan).await?;
    }
    let has_steps = plan.steps().next().is_some();
    match has_steps {
        false => apply.without_steps(plan).await,
        true => apply.with_steps(plan).await,
    }
}

/// Frees the manifests and the observation of a fleet on another thread: the caller does not wait for it.
fn free_later(input: PlanInput) {
    // Without a thread, they are freed here.
    let _ = std::thread::Builder::new().name("free".to_owned()).spawn(move || drop(input));
}

/// The signatures of a saved plan, for the history.
#[derive(Default)]
struct SavedSignatures {
    persons: Vec<String>,
    /// Digest of what they signed.
    digest: Option<String>,
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
    signatures: SavedSignatures,
    pub check: Precheck,
    pub stop: watch::Receiver<Option<u8>>,
    pub input: PlanInput,
    pub facts: FactSources<S>,
}

impl<T, S, H> Apply<'_, T, S, H>
where
    T: Target<State: Clone + 'static>,
    S: SpecSearch,
    H: ApplyHandler,
{
    /// Waits while every remaining change depends on a run or a start in progress, such as one of an interrupted
    /// apply.
    async fn await_dependencies(&mut self, mut plan: Plan) -> Result<Plan, ApplyError> {
        let until =
            self.limits.deadline - GRACE.min(self.limits.deadline.saturating_duration_since(Instant::now()));
        let mut is_announced = false;
        while self.limits.verify && awaits_dependency(&self.input, &plan) && Instant::now() < until {
            if !std::mem::replace(&mut is_announced, true) {
                let waiting = |held: &&HeldChange| held.reason == HoldReason::WaitingForDependency;
                let held = plan.held.iter().filter(waiting).count();
                self.handler.on_event(ApplyEvent::AwaitingDependency { held });
            }
            tokio::time::sleep(OBSERVE_INTERVAL).await;
            plan = within(self.limits.deadline, self.input.plan_again(self.target, &mut self.facts)).await?;
            self.input.locate(&mut plan, &self.facts.limits);
            check_budget(&plan)?;
        }
        Ok(plan)
    }

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
            rollout_records::record_pauses(self.target.state(), &self.input.rules.owner, &plan.pauses).await;
        recording.map_err(|error| self.state_error(error))?;
        let reason = sole_reason(plan.held.iter().map(|held| Some(held.reason)));
        let reason = reason.filter(|_| unhealthy.is_empty());
        let converged = Some(conclusion == Conclusion::Done);
        let (ended, rolled_back, pauses) = (Vec::new(), BTreeMap::new(), plan.pauses.clone());
        let results = Results { ended, converged, conclusion, reason, unhealthy, rolled_back, pauses };
        free_later(self.input);
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
        let SavedSignatures { persons: signed_by, digest: signed_plan } =
            std::mem::take(&mut self.signatures);
        let begun = self.activation.history_entry(&self.input, &plan, &digests);
        let begun = HistoryEntry { signed_by, signed_plan, ..begun };
        let revision = Some(begun.revision.clone());
        let origin = ChangeOrigin {
            plan: begun.plan.clone(),
            revision,
            commit: begun.commit.clone(),
            break_glass: begun.break_glass.clone(),
            ..ChangeOrigin::default()
        };
        let working = async {
            let results = self.run(&plan, origin, writer.lost()).await;
            if let Err(error) = rollout_records::record_pauses(target.state(), &owner, &results.pauses).await
            {
                // The next apply or watch reaches the same pause.
                warn!(%error, "cannot record the pause of a rollout");
            }
            let report = results.report(plan, digests);
            let end = history_result(&report);
            writer.release(target).await;
            (report, end)
        };
        let report = history::record_run(target.state(), &owner, begun, working).await;
        free_later(self.input);
        Ok(report)
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
        let mut plan = self.input.plan_again(self.target, &mut self.facts).await?;
        self.input.locate(&mut plan, &self.facts.limits);
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
    let digests = input.digests(plan);
    if saved.fingerprint == digests.all && saved.steps == step_lines(plan) {
        return Ok(());
    }
    let is_known = !saved.revision.is_empty() && saved.revision != digests.wanted.as_str();
    Err(ApplyError::SavedPlanStale {
        what: match is_known {
            true => "the manifests",
            false => "the observed state or the flags",
        },
    })
}

/// Refuses a signed plan that was applied before: after a rollback its inputs are the same again.
async fn check_first_apply<T: Target>(target: &T, owner: &str, digest: &str) -> Result<(), ApplyError> {
    let entries = history::newest(target.state(), owner, history::MAX_ENTRIES).await;
    let entries = entries.map_err(|error| TargetError::state(target.name(), error))?;
    let is_same =
        |entry: &HistoryEntry| entry.exit == Some(0) && entry.signed_plan.as_deref() == Some(digest);
    match entries.into_iter().find(is_same) {
        Some(entry) => Err(ApplyError::AlreadyApplied { at: entry.at }),
        None => Ok(()),
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
