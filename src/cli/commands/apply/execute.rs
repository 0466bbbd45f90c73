//! Execution of an approved plan: steps, rollback of failed rollouts, and verification.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::ApplyArgs;
use super::progress::Progress;
use super::report::{Report, explain_unhealthy, sole_reason};
use crate::cli::Exit;
use crate::cli::commands::plan::input::PlanInput;
use crate::cli::commands::serve::Signals;
use crate::cli::output::print::{Printer, count};
use crate::cli::target::ConnectedTarget;
use crate::clock;
use crate::control;
use crate::control::rollback::{plan_rollback, previous_desired};
use crate::execute::active_holds::{ActiveHolds, with_hold_refresh};
use crate::execute::{self, ExecutionContext, ExecutionEvent, ExecutionResult, StepOutcome, StepResult};
use crate::model::{
    DesiredInstance, Health, HoldReason, InstanceKey, Observed, Op, Plan, ProcessKey, Step, Why,
};
use crate::store::lease::LeaseLost;

/// Time limit for the verification, also after the deadline.
const FINAL_OBSERVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for a rollback.
const ROLLBACK_TIMEOUT: Duration = Duration::from_secs(600);

pub async fn execute_plan(
    args: &ApplyArgs,
    live: &ConnectedTarget,
    input: &mut PlanInput,
    planned: &Plan,
    deadline: Instant,
    lost: watch::Receiver<Option<LeaseLost>>,
    printer: &Printer,
) -> Report {
    let (stop, stopped) = watch::channel(false);
    let mut cancellation = Cancellation { stop, lost, signals: Signals::listen().ok(), requested_exit: None };
    let holds = (input.rules.holds.clone(), input.rules.pauses.clone());
    let (sender, restraints) = watch::channel(ActiveHolds::of(holds, &input.rules));
    let context =
        ExecutionContext { restraints, ..execution_context(input, planned, args, deadline, stopped) };
    let before = input.observed.clone();
    let mut progress = Progress::new(planned.steps().count(), args.output, printer);
    let mut on_event = |event: ExecutionEvent<'_>| progress.on_event(&event);
    let executing = execute::execute(planned, &live.backend, &live.state, &context, &mut on_event);
    let executing = with_hold_refresh(&sender, &input.rules, || live.restraints(), executing);
    let ExecutionResult { mut ended, to_roll_back } = cancellation.with_cancellation(executing).await;
    progress.clear();
    let is_rolled_back = match to_roll_back.is_empty() {
        true => None,
        false => Some(
            roll_back(live, input, &context, &to_roll_back, &mut cancellation, &mut ended, printer).await,
        ),
    };
    let mut report = report(args, live, input, ended, cancellation.requested_exit, deadline).await;
    if report.converged.is_some() {
        check_pids(planned, &before, &input.observed, &mut report.ended);
        if report.exit == Exit::Done && report.ended.iter().any(|ended| !ended.outcome.is_well()) {
            report.exit = Exit::Incomplete;
        }
    }
    match is_rolled_back {
        Some(true) => report.exit = Exit::RolledBack,
        Some(false) => report.exit = cancellation.requested_exit.unwrap_or(Exit::Incomplete),
        None => {}
    }
    report.with_consistent_exit()
}

/// Early end of an execution: by a signal, or by the loss of the lease.
struct Cancellation {
    stop: watch::Sender<bool>,
    /// How the lease was lost.
    lost: watch::Receiver<Option<LeaseLost>>,
    signals: Option<Signals>,
    /// The exit code, once a signal or the loss of the lease ended the execution.
    requested_exit: Option<Exit>,
}

impl Cancellation {
    /// Runs the execution, and stops it at the next safe point on a signal or when the lease is lost.
    async fn with_cancellation(
        &mut self,
        executing: impl Future<Output = ExecutionResult>,
    ) -> ExecutionResult {
        tokio::pin!(executing);
        loop {
            let signalled = async {
                match &mut self.signals {
                    Some(signals) if self.requested_exit.is_none() => signals.stop_signal().await,
                    _ => std::future::pending().await,
                }
            };
            let is_on = !*self.stop.borrow();
            tokio::select! {
                executed = &mut executing => return executed,
                exit = signalled => self.requested_exit = Some(exit),
                // Another process holds the lease or may take it: no further step starts.
                Ok(lost) = self.lost.wait_for(Option::is_some), if is_on => {
                    if *lost == Some(LeaseLost::Theirs) {
                        self.requested_exit = self.requested_exit.or(Some(Exit::Locked));
                    }
                }
            }
            let _ = self.stop.send(true);
        }
    }
}

fn execution_context(
    input: &PlanInput,
    planned: &Plan,
    args: &ApplyArgs,
    deadline: Instant,
    stop: watch::Receiver<bool>,
) -> ExecutionContext {
    let check: execute::Precheck = if input.target == "local" { check_config_files } else { |_| None };
    ExecutionContext {
        owner: input.rules.owner.clone(),
        target: input.target.clone(),
        caps: input.rules.caps,
        deadline,
        max_parallel: args.going.max_parallel as usize,
        check,
        ..control::execution_context(&input.loaded.desired, &input.observed, planned, stop)
    }
}

/// Rolls back processes whose rollout failed, and returns whether that succeeded. The results of its steps are appended.
async fn roll_back(
    live: &ConnectedTarget,
    input: &PlanInput,
    context: &ExecutionContext,
    processes: &BTreeSet<ProcessKey>,
    cancellation: &mut Cancellation,
    ended: &mut Vec<StepResult>,
    printer: &Printer,
) -> bool {
    let names: Vec<String> = processes.iter().map(ToString::to_string).collect();
    let names = names.join(", ");
    printer.info(&format!("rolling back {names}: too many instances failed"));
    let previous = previous_desired(&input.loaded.desired, &context.before, processes);
    let mut observed = match tokio::time::timeout(ROLLBACK_TIMEOUT, live.observe_for(&previous, None)).await {
        Ok(Ok(world)) => world.observed,
        Ok(Err(failure)) => {
            printer.warning(&format!("cannot roll back {names}: {}", failure.message));
            return false;
        }
        Err(_) => {
            printer.warning(&format!("cannot roll back {names}: the target does not answer"));
            return false;
        }
    };
    let plan = plan_rollback(&previous, &mut observed, &input.rules, &clock::with_zones(&previous));
    let context = ExecutionContext {
        owner: context.owner.clone(),
        target: context.target.clone(),
        caps: context.caps,
        run: format!("{}-back", context.run),
        // The rollback has its own deadline: a partial rollback would be worse than a late one.
        deadline: Instant::now() + ROLLBACK_TIMEOUT,
        max_parallel: context.max_parallel,
        restraints: context.restraints.clone(),
        ..control::execution_context(&previous, &observed, &plan, context.stop.clone())
    };
    let mut ignore = |_: ExecutionEvent<'_>| {};
    let executing = execute::execute(&plan, &live.backend, &live.state, &context, &mut ignore);
    let done = cancellation.with_cancellation(executing).await;
    let remaining = done.ended.iter().filter(|one| !one.outcome.is_well()).count() + plan.held.len();
    if remaining > 0 {
        printer.warning(&format!("rollback of {names} is incomplete: {} not done", count(remaining, "step")));
    }
    let first = ended.iter().map(|ended| ended.step).max().unwrap_or(0);
    ended.extend(done.ended.into_iter().map(|one| StepResult { step: first + one.step, ..one }));
    remaining == 0
}

/// Fails steps after which the pid changed although the plan says that it stays.
fn check_pids(planned: &Plan, before: &Observed, after: &Observed, ended: &mut [StepResult]) {
    let mut stays: BTreeMap<&InstanceKey, bool> = BTreeMap::new();
    for step in planned.steps() {
        *stays.entry(&step.instance).or_insert(true) &= step.pid_stays;
    }
    let pid = |observed: &Observed, key: &InstanceKey| observed.instances.get(key)?.pid;
    for (key, _) in stays.into_iter().filter(|(_, stays)| *stays) {
        let (Some(then), Some(now)) = (pid(before, key), pid(after, key)) else { continue };
        let last = ended.iter_mut().rev().find(|ended| ended.instance == *key && ended.outcome.is_well());
        if let (true, Some(last)) = (then != now, last) {
            last.outcome = StepOutcome::Failed;
            last.message = format!("PidChanged: the pid should have stayed {then}, and is {now}");
        }
    }
}

/// Refuses a reload or restart for a configuration file that is not delivered yet: the process would read the old one.
pub fn check_config_files(step: &Step) -> Option<String> {
    let for_a_file = |why: &Why| why.field.as_deref().is_some_and(|field| field.starts_with("configmap"));
    let matters = matches!(step.op, Op::Reload | Op::Restart) && step.why.iter().any(for_a_file);
    let spec = step.spec.as_ref().filter(|_| matters)?;
    crate::agent::first_mismatch(&spec.configmap).map(|what| format!("ConfigNotThere: {what}"))
}

async fn report(
    args: &ApplyArgs,
    live: &ConnectedTarget,
    input: &mut PlanInput,
    ended: Vec<StepResult>,
    interrupted: Option<Exit>,
    deadline: Instant,
) -> Report {
    let any = |outcome: StepOutcome| ended.iter().any(|ended| ended.outcome == outcome);
    let failed = any(StepOutcome::Failed) || any(StepOutcome::Unknown);
    let mut converged = None;
    let mut not_well = Vec::new();
    let (mut held, mut has_steps) = (Vec::new(), false);
    if !args.going.no_wait && interrupted.is_none() {
        let give_up_at = Instant::now() + FINAL_OBSERVE_TIMEOUT;
        // A process that has just started may need time to become healthy.
        loop {
            let observed = tokio::time::timeout_at(deadline.max(give_up_at), input.observe_again(live)).await;
            if !observed.is_ok_and(|observed| observed.is_ok()) {
                // An earlier observation does not show the current state.
                converged = None;
                if Instant::now() >= give_up_at {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
            not_well = unhealthy(input);
            let remaining = input.plan();
            converged = Some(remaining.is_empty() && not_well.is_empty());
            held = remaining.held.iter().map(|held| held.reason).collect();
            has_steps = remaining.steps().next().is_some();
            let wanted = |key: &InstanceKey| input.loaded.desired.instances.contains_key(key);
            let mut seen = input.observed.instances.iter();
            let starting = seen.any(|(key, seen)| wanted(key) && seen.health == Health::Starting);
            if !starting || Instant::now() >= deadline {
                break;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
    let _ = tokio::time::timeout(FINAL_OBSERVE_TIMEOUT, explain_unhealthy(live, &mut not_well)).await;
    // Without an observation the result is not verified; with --no-wait none is needed.
    let is_converged = converged.unwrap_or(args.going.no_wait);
    let exit = match () {
        () if let Some(exit) = interrupted => exit,
        () if failed => Exit::Incomplete,
        () if any(StepOutcome::TimedOut) => Exit::TimedOut,
        // Converged after the deadline is still converged.
        () if is_converged && !any(StepOutcome::Skipped) => Exit::Done,
        () if Instant::now() >= deadline => Exit::TimedOut,
        () => Exit::Incomplete,
    };
    let reasons = ended.iter().filter(|one| !one.outcome.is_well() && one.outcome != StepOutcome::Skipped);
    let reasons = reasons.map(|one| one.reason).chain(held.into_iter().map(Some));
    // Remaining steps have their own reasons, unless ownership refused them.
    let is_refused = ended.iter().any(|one| one.reason == Some(HoldReason::NotOwned));
    let reason = sole_reason(reasons).filter(|_| not_well.is_empty() && (!has_steps || is_refused));
    Report { ended, converged, exit, reason, unhealthy: not_well }
}

/// Declared instances that are degraded or failed.
pub fn unhealthy(input: &PlanInput) -> Vec<(String, Health, String)> {
    let meant = |key: &InstanceKey, want: &DesiredInstance| {
        want.origin.state.needs_start()
            && input.rules.selection.means(key, Some(&want.origin.declared), &want.spec.labels)
    };
    let wanted = input.loaded.desired.instances.iter().filter(|(key, want)| meant(key, want));
    let seen = wanted.filter_map(|(key, _)| Some((key, input.observed.instances.get(key)?)));
    seen.filter(|(_, seen)| matches!(seen.health, Health::Degraded | Health::Failed))
        .map(|(key, seen)| (key.to_string(), seen.health, String::new()))
        .collect()
}
