//! Execution of a confirmed plan: steps, early end, rollback of failed rollouts, and verification.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::apply::Apply;
use super::report::{Conclusion, Results};
use super::request::{ApplyEvent, ApplyHandler, stop_request};
use super::rollback::{PreviousState, names_of, reasons_of};
use super::rollout_records;
use super::verify::{Executed, verify};
use crate::backend::ChangeOrigin;
use crate::clock;
use crate::execute::active_holds::{ActiveHolds, with_hold_refresh};
use crate::execute::{
    self, ExecutionContext, ExecutionEvent, ExecutionResult, ExecutionSettings, StepOutcome, StepResult,
    new_run_id,
};
use crate::model::{InstanceKey, Observed, Plan, ProcessKey};
use crate::observe::{SpecSearch, Target};
use crate::store::lease::LeaseLost;

/// Time limit for a rollback.
const ROLLBACK_TIMEOUT: Duration = Duration::from_secs(600);

impl<T: Target, S: SpecSearch, H: ApplyHandler> Apply<'_, T, S, H> {
    /// Executes the plan, rolls failed rollouts back, and verifies.
    pub(super) async fn run(
        &mut self,
        plan: &Plan,
        origin: ChangeOrigin,
        lost: watch::Receiver<Option<LeaseLost>>,
    ) -> Results {
        let target = self.target;
        let (stop, stopped) = watch::channel(false);
        let mut cancellation = Cancellation { stop, lost, requested: self.stop.clone(), conclusion: None };
        let rules = &self.input.rules;
        let (sender, active_holds) =
            watch::channel(ActiveHolds::of((rules.holds.manual.clone(), rules.holds.pauses.clone()), rules));
        let settings = ExecutionSettings {
            owner: rules.owner.clone(),
            target: target.name().to_owned(),
            caps: rules.caps,
            run: new_run_id(),
            deadline: self.limits.deadline,
            max_parallel: self.limits.max_parallel,
            check: self.check,
            active_holds,
            stop: stopped,
            origin: Some(Arc::new(origin)),
        };
        let context = ExecutionContext::new(settings, &self.input.loaded.desired, &self.input.observed, plan);
        let before = pids_that_stay(plan, &self.input.observed);
        self.handler.on_event(ApplyEvent::Executing { steps: plan.steps().count() });
        let handler = &mut *self.handler;
        let mut on_event = |event: ExecutionEvent<'_>| handler.on_event(ApplyEvent::Execution(event));
        let executing = execute::execute(plan, target.backend(), target.state(), &context, &mut on_event);
        let desired = &self.input.loaded.desired;
        let executing = with_hold_refresh(
            &sender,
            || rollout_records::active_holds(target, rules, desired, plan),
            executing,
        );
        let ExecutionResult { mut ended, to_roll_back } = cancellation.watch(executing).await;
        self.handler.on_event(ApplyEvent::Executed);
        let is_rolled_back = match to_roll_back.is_empty() {
            true => None,
            false => Some(self.roll_back(&context, plan, &to_roll_back, &mut cancellation, &mut ended).await),
        };
        let stopped = cancellation.conclusion;
        let (requested, aborted_before) = (self.stop.clone(), plan.aborted.clone());
        let executed = Executed { ended, stopped, requested, aborted_before };
        let mut results = verify(target, &mut self.input, &mut self.facts, &self.limits, executed).await;
        if results.converged.is_some() {
            check_pids(&before, &self.input.observed, &mut results.ended);
            if results.conclusion == Conclusion::Done
                && results.ended.iter().any(|ended| !ended.outcome.is_well())
            {
                results.conclusion = Conclusion::Incomplete;
            }
        }
        results.rolled_back = to_roll_back;
        match is_rolled_back {
            Some(true) => results.conclusion = Conclusion::RolledBack,
            Some(false) => results.conclusion = stopped.unwrap_or(Conclusion::Incomplete),
            None => {}
        }
        results
    }

    /// Rolls back processes whose rollout failed, and returns whether that succeeded. The results of its steps are
    /// appended.
    async fn roll_back(
        &mut self,
        context: &ExecutionContext,
        plan: &Plan,
        processes: &BTreeMap<ProcessKey, String>,
        cancellation: &mut Cancellation,
        ended: &mut Vec<StepResult>,
    ) -> bool {
        let target = self.target;
        let names = &names_of(processes);
        let why = &reasons_of(processes);
        self.handler.on_event(ApplyEvent::RollingBack { processes: names, why });
        let (desired, caps) = (&self.input.loaded.desired, &self.input.rules.caps);
        let previous = PreviousState::of(desired, &context.before, (plan, ended), processes, caps);
        let observing = tokio::time::timeout(ROLLBACK_TIMEOUT, target.observe(&previous.desired, false));
        let why = match observing.await {
            Ok(Ok(observation)) => Ok(observation.observed),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("the target does not answer".to_owned()),
        };
        let mut observed = match why {
            Ok(observed) => observed,
            Err(why) => {
                self.handler.on_event(ApplyEvent::RollbackFailed { processes: names, why: &why });
                return false;
            }
        };
        let now = clock::with_zones(&previous.desired);
        let plan = previous.plan(&mut observed, &self.input.rules, &now);
        let settings = ExecutionSettings {
            run: format!("{}-back", context.settings.run),
            // The rollback has its own deadline: a partial rollback would be worse than a late one.
            deadline: Instant::now() + ROLLBACK_TIMEOUT,
            check: |_| None,
            ..context.settings.clone()
        };
        let context = ExecutionContext::new(settings, &previous.desired, &observed, &plan).rollback();
        let mut ignore = |_: ExecutionEvent<'_>| {};
        let executing = execute::execute(&plan, target.backend(), target.state(), &context, &mut ignore);
        let done = cancellation.watch(executing).await;
        let remaining = done.ended.iter().filter(|one| !one.outcome.is_well()).count();
        let remaining = remaining + plan.held.len() + previous.lost.len();
        if remaining > 0 {
            self.handler.on_event(ApplyEvent::RollbackIncomplete { processes: names, steps: remaining });
        }
        let first = ended.iter().map(|ended| ended.step).max().unwrap_or(0);
        ended.extend(done.ended.into_iter().map(|one| StepResult { step: first + one.step, ..one }));
        remaining == 0
    }
}

/// Early end of an execution: by its caller, or by the loss of the lease.
struct Cancellation {
    stop: watch::Sender<bool>,
    /// Cause of a lost lease.
    lost: watch::Receiver<Option<LeaseLost>>,
    /// The caller's request to stop.
    requested: watch::Receiver<Option<u8>>,
    /// Set once the caller or the loss of the lease ended the execution.
    conclusion: Option<Conclusion>,
}

impl Cancellation {
    /// Runs the execution, and stops it at the next safe point on request or when the lease is lost.
    async fn watch(&mut self, executing: impl Future<Output = ExecutionResult>) -> ExecutionResult {
        tokio::pin!(executing);
        loop {
            let (is_on, is_open) = (!*self.stop.borrow(), self.conclusion.is_none());
            tokio::select! {
                executed = &mut executing => return executed,
                code = stop_request(&mut self.requested), if is_open => {
                    self.conclusion = Some(Conclusion::Stopped(code));
                }
                // Another process holds the lease or may take it: no further step starts.
                Ok(lost) = self.lost.wait_for(Option::is_some), if is_on => {
                    if *lost == Some(LeaseLost::TakenOver) {
                        self.conclusion = self.conclusion.or(Some(Conclusion::LeaseLost));
                    }
                }
            }
            let _ = self.stop.send(true);
        }
    }
}

/// The pids of instances whose steps all keep the process.
fn pids_that_stay(plan: &Plan, observed: &Observed) -> BTreeMap<InstanceKey, u32> {
    let mut stays: BTreeMap<&InstanceKey, bool> = BTreeMap::new();
    for step in plan.steps() {
        *stays.entry(&step.instance).or_insert(true) &= step.pid_stays;
    }
    let stays = stays.into_iter().filter(|(_, stays)| *stays);
    stays.filter_map(|(key, _)| Some((key.clone(), observed.instances.get(key)?.process.pid?))).collect()
}

/// Fails steps after which the pid changed although the plan says that it stays.
fn check_pids(before: &BTreeMap<InstanceKey, u32>, after: &Observed, ended: &mut [StepResult]) {
    for (key, then) in before {
        let Some(now) = after.instances.get(key).and_then(|seen| seen.process.pid) else { continue };
        let last = ended.iter_mut().rev().find(|ended| ended.instance == *key && ended.outcome.is_well());
        if let (true, Some(last)) = (*then != now, last) {
            last.outcome = StepOutcome::Failed;
            last.message = format!("PidChanged: the pid should have stayed {then}, and is {now}");
        }
    }
}
