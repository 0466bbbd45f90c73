//! A plan is carried out, put back where its rollout failed, and looked at again.

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
use crate::store::keeping::LeaseLost;

/// How long the look at the end may take, though the time is over.
const FINAL_OBSERVE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a rollback may take.
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
    let mut ends = Cancellation { stop, lost, signals: Signals::listen().ok(), asked: None };
    let asked = (input.rules.holds.clone(), input.rules.pauses.clone());
    let (tell, restraints) = watch::channel(ActiveHolds::of(asked, &input.rules));
    let terms = ExecutionContext { restraints, ..execution_context(input, planned, args, deadline, stopped) };
    let before = input.observed.clone();
    let mut progress = Progress::new(planned.steps().count(), args.output, printer);
    let mut told = |told: ExecutionEvent<'_>| progress.on_event(&told);
    let executing = execute::execute(planned, &live.backend, &live.state, &terms, &mut told);
    let executing = with_hold_refresh(&tell, &input.rules, || live.restraints(), executing);
    let ExecutionResult { mut ended, to_roll_back } = ends.with_cancellation(executing).await;
    progress.clear();
    let is_back = match to_roll_back.is_empty() {
        true => None,
        false => Some(roll_back(live, input, &terms, &to_roll_back, &mut ends, &mut ended, printer).await),
    };
    let mut report = report(args, live, input, ended, ends.asked, deadline).await;
    if report.converged.is_some() {
        check_pids(planned, &before, &input.observed, &mut report.ended);
        if report.exit == Exit::Done && report.ended.iter().any(|ended| !ended.outcome.is_well()) {
            report.exit = Exit::Incomplete;
        }
    }
    match is_back {
        Some(true) => report.exit = Exit::RolledBack,
        Some(false) => report.exit = ends.asked.unwrap_or(Exit::Incomplete),
        None => {}
    }
    report.with_consistent_exit()
}

/// Who can end it before its time.
struct Cancellation {
    stop: watch::Sender<bool>,
    /// How the right to do it was lost.
    lost: watch::Receiver<Option<LeaseLost>>,
    signals: Option<Signals>,
    /// Somebody has, and this is what it exits with.
    asked: Option<Exit>,
}

impl Cancellation {
    /// Carries on, and tells it to end at the next safe point when somebody wants that.
    async fn with_cancellation(
        &mut self,
        executing: impl Future<Output = ExecutionResult>,
    ) -> ExecutionResult {
        tokio::pin!(executing);
        loop {
            let signalled = async {
                match &mut self.signals {
                    Some(signals) if self.asked.is_none() => signals.stop_signal().await,
                    _ => std::future::pending().await,
                }
            };
            let is_on = !*self.stop.borrow();
            tokio::select! {
                executed = &mut executing => return executed,
                exit = signalled => self.asked = Some(exit),
                // Somebody else is at work now, or may be: nothing more is begun.
                Ok(lost) = self.lost.wait_for(Option::is_some), if is_on => {
                    if *lost == Some(LeaseLost::Theirs) {
                        self.asked = self.asked.or(Some(Exit::Locked));
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

/// Puts processes whose rollout failed back as they were, and says whether they are. What is done for that stands behind
/// what was done before.
async fn roll_back(
    live: &ConnectedTarget,
    input: &PlanInput,
    terms: &ExecutionContext,
    processes: &BTreeSet<ProcessKey>,
    ends: &mut Cancellation,
    ended: &mut Vec<StepResult>,
    printer: &Printer,
) -> bool {
    let names: Vec<String> = processes.iter().map(ToString::to_string).collect();
    let names = names.join(", ");
    printer.info(&format!("too many of {names} failed: putting it back as it was"));
    let back = previous_desired(&input.loaded.desired, &terms.before, processes);
    let mut observed = match tokio::time::timeout(ROLLBACK_TIMEOUT, live.observe_for(&back, None)).await {
        Ok(Ok(world)) => world.observed,
        Ok(Err(failure)) => {
            printer.warning(&format!("{names} is not back as it was: {}", failure.message));
            return false;
        }
        Err(_) => {
            printer.warning(&format!("{names} is not back as it was: the target does not answer"));
            return false;
        }
    };
    let plan = plan_rollback(&back, &mut observed, &input.rules, &clock::with_zones(&back));
    let again = ExecutionContext {
        owner: terms.owner.clone(),
        target: terms.target.clone(),
        caps: terms.caps,
        run: format!("{}-back", terms.run),
        // It has a time of its own: half-way would be worse than late.
        deadline: Instant::now() + ROLLBACK_TIMEOUT,
        max_parallel: terms.max_parallel,
        restraints: terms.restraints.clone(),
        ..control::execution_context(&back, &observed, &plan, terms.stop.clone())
    };
    let mut nobody = |_: ExecutionEvent<'_>| {};
    let executing = execute::execute(&plan, &live.backend, &live.state, &again, &mut nobody);
    let done = ends.with_cancellation(executing).await;
    let left = done.ended.iter().filter(|one| !one.outcome.is_well()).count() + plan.held.len();
    if left > 0 {
        printer.warning(&format!("{names} is not back as it was: {} not done", count(left, "step")));
    }
    let first = ended.iter().map(|ended| ended.step).max().unwrap_or(0);
    ended.extend(done.ended.into_iter().map(|one| StepResult { step: first + one.step, ..one }));
    left == 0
}

/// Where the plan says that a process stays the same, it must have.
fn check_pids(planned: &Plan, before: &Observed, after: &Observed, ended: &mut [StepResult]) {
    let mut stays: BTreeMap<&InstanceKey, bool> = BTreeMap::new();
    for step in planned.steps() {
        *stays.entry(&step.instance).or_insert(true) &= step.pid_stays;
    }
    let pid = |look: &Observed, key: &InstanceKey| look.instances.get(key).and_then(|seen| seen.pid);
    for (key, _) in stays.into_iter().filter(|(_, stays)| *stays) {
        let (Some(then), Some(now)) = (pid(before, key), pid(after, key)) else { continue };
        let last = ended.iter_mut().rev().find(|ended| ended.instance == *key && ended.outcome.is_well());
        if let (true, Some(last)) = (then != now, last) {
            last.outcome = StepOutcome::Failed;
            last.message = format!("PidChanged: process {then} was to stay, and it is {now} now");
        }
    }
}

/// A reload or restart for a file that is not there yet would read the old one.
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
    let (mut held, mut is_left) = (Vec::new(), false);
    if !args.going.no_wait && interrupted.is_none() {
        let patience = Instant::now() + FINAL_OBSERVE_TIMEOUT;
        // What was just started may need a moment to be well.
        loop {
            let looked = tokio::time::timeout_at(deadline.max(patience), input.observe_again(live)).await;
            if !looked.is_ok_and(|looked| looked.is_ok()) {
                // What was seen before says nothing of how it is now.
                converged = None;
                if Instant::now() >= patience {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
            not_well = unhealthy(input);
            let left = input.plan();
            converged = Some(left.is_empty() && not_well.is_empty());
            held = left.held.iter().map(|held| held.reason).collect();
            is_left = left.steps().next().is_some();
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
    // Nobody could look: then nobody knows, unless nobody was to look.
    let is_so = converged.unwrap_or(args.going.no_wait);
    let exit = match () {
        () if let Some(exit) = interrupted => exit,
        () if failed => Exit::Incomplete,
        () if any(StepOutcome::TimedOut) => Exit::TimedOut,
        // What came about is so, however late.
        () if is_so && !any(StepOutcome::Skipped) => Exit::Done,
        () if Instant::now() >= deadline => Exit::TimedOut,
        () => Exit::Incomplete,
    };
    let reasons = ended.iter().filter(|one| !one.outcome.is_well() && one.outcome != StepOutcome::Skipped);
    let reasons = reasons.map(|one| one.reason).chain(held.into_iter().map(Some));
    // What is still to be done has its own reasons, unless all of it was refused.
    let is_refused = ended.iter().any(|one| one.reason == Some(HoldReason::NotOwned));
    let reason = sole_reason(reasons).filter(|_| not_well.is_empty() && (!is_left || is_refused));
    Report { ended, converged, exit, reason, unhealthy: not_well }
}

/// Wanted, there, and not well.
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
