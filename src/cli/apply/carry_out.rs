//! A plan is carried out, put back where its rollout failed, and looked at again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::Apply;
use super::progress::Progress;
use super::report::{Report, reasons, sole_reason};
use crate::cli::Exit;
use crate::cli::plan::input::Input;
use crate::cli::print::{Printer, count};
use crate::cli::serve::Signals;
use crate::cli::target::Live;
use crate::clock;
use crate::control;
use crate::control::rollback::{as_before, plan_back};
use crate::execute::restraints::{Restraints, heeding};
use crate::execute::{self, Ended, Executed, Outcome, Terms, Told};
use crate::model::{Health, InstanceKey, Observed, Op, Plan, ProcessKey, Reason, Step, Want, Why};
use crate::store::keeping::Lost;

/// How long the look at the end may take, though the time is over.
const LAST_LOOK: Duration = Duration::from_secs(5);
/// How long a rollback may take.
const BACK: Duration = Duration::from_secs(600);

pub async fn carry_out(
    args: &Apply,
    live: &Live,
    input: &mut Input,
    planned: &Plan,
    deadline: Instant,
    lost: watch::Receiver<Option<Lost>>,
    printer: &Printer,
) -> Report {
    let (stop, stopped) = watch::channel(false);
    let mut ends = Ends { stop, lost, signals: Signals::listen().ok(), asked: None };
    let asked = (input.rules.holds.clone(), input.rules.pauses.clone());
    let (tell, restraints) = watch::channel(Restraints::of(asked, &input.rules));
    let terms = Terms { restraints, ..terms(input, planned, args, deadline, stopped) };
    let before = input.observed.clone();
    let mut progress = Progress::new(planned.steps().count(), args.output, printer);
    let mut told = |told: Told<'_>| progress.told(&told);
    let executing = execute::execute(planned, &live.backend, &live.state, &terms, &mut told);
    let executing = heeding(&tell, &input.rules, || live.restraints(), executing);
    let Executed { mut ended, to_roll_back } = ends.heeded_by(executing).await;
    progress.clear();
    let is_back = match to_roll_back.is_empty() {
        true => None,
        false => Some(roll_back(live, input, &terms, &to_roll_back, &mut ends, &mut ended, printer).await),
    };
    let mut report = report(args, live, input, ended, ends.asked, deadline).await;
    if report.converged.is_some() {
        pids_stayed(planned, &before, &input.observed, &mut report.ended);
        if report.exit == Exit::Done && report.ended.iter().any(|ended| !ended.outcome.is_well()) {
            report.exit = Exit::Incomplete;
        }
    }
    match is_back {
        Some(true) => report.exit = Exit::RolledBack,
        Some(false) => report.exit = ends.asked.unwrap_or(Exit::Incomplete),
        None => {}
    }
    report.agreed()
}

/// Who can end it before its time.
struct Ends {
    stop: watch::Sender<bool>,
    /// How the right to do it was lost.
    lost: watch::Receiver<Option<Lost>>,
    signals: Option<Signals>,
    /// Somebody has, and this is what it exits with.
    asked: Option<Exit>,
}

impl Ends {
    /// Carries on, and tells it to end at the next safe point when somebody wants that.
    async fn heeded_by(&mut self, executing: impl Future<Output = Executed>) -> Executed {
        tokio::pin!(executing);
        loop {
            let signalled = async {
                match &mut self.signals {
                    Some(signals) if self.asked.is_none() => signals.asked_by().await,
                    _ => std::future::pending().await,
                }
            };
            let is_on = !*self.stop.borrow();
            tokio::select! {
                executed = &mut executing => return executed,
                exit = signalled => self.asked = Some(exit),
                // Somebody else is at work now, or may be: nothing more is begun.
                Ok(lost) = self.lost.wait_for(Option::is_some), if is_on => {
                    if *lost == Some(Lost::Theirs) {
                        self.asked = self.asked.or(Some(Exit::Locked));
                    }
                }
            }
            let _ = self.stop.send(true);
        }
    }
}

fn terms(
    input: &Input,
    planned: &Plan,
    args: &Apply,
    deadline: Instant,
    stop: watch::Receiver<bool>,
) -> Terms {
    let check: execute::Check = if input.target == "local" { config_is_there } else { |_| None };
    Terms {
        owner: input.rules.owner.clone(),
        target: input.target.clone(),
        caps: input.rules.caps,
        deadline,
        max_parallel: args.going.max_parallel as usize,
        check,
        ..control::terms(&input.loaded.desired, &input.observed, planned, stop)
    }
}

/// Puts processes whose rollout failed back as they were, and says whether they are. What is done for that stands behind
/// what was done before.
async fn roll_back(
    live: &Live,
    input: &Input,
    terms: &Terms,
    processes: &BTreeSet<ProcessKey>,
    ends: &mut Ends,
    ended: &mut Vec<Ended>,
    printer: &Printer,
) -> bool {
    let names: Vec<String> = processes.iter().map(ToString::to_string).collect();
    let names = names.join(", ");
    printer.remark(&format!("too many of {names} failed: putting it back as it was"));
    let back = as_before(&input.loaded.desired, &terms.before, processes);
    let mut observed = match tokio::time::timeout(BACK, live.world(&back, None)).await {
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
    let plan = plan_back(&back, &mut observed, &input.rules, &clock::now(&back));
    let again = Terms {
        owner: terms.owner.clone(),
        target: terms.target.clone(),
        caps: terms.caps,
        run: format!("{}-back", terms.run),
        // It has a time of its own: half-way would be worse than late.
        deadline: Instant::now() + BACK,
        max_parallel: terms.max_parallel,
        restraints: terms.restraints.clone(),
        ..control::terms(&back, &observed, &plan, terms.stop.clone())
    };
    let mut nobody = |_: Told<'_>| {};
    let executing = execute::execute(&plan, &live.backend, &live.state, &again, &mut nobody);
    let done = ends.heeded_by(executing).await;
    let left = done.ended.iter().filter(|one| !one.outcome.is_well()).count() + plan.held.len();
    if left > 0 {
        printer.warning(&format!("{names} is not back as it was: {} not done", count(left, "step")));
    }
    let first = ended.iter().map(|ended| ended.step).max().unwrap_or(0);
    ended.extend(done.ended.into_iter().map(|one| Ended { step: first + one.step, ..one }));
    left == 0
}

/// Where the plan says that a process stays the same, it must have.
fn pids_stayed(planned: &Plan, before: &Observed, after: &Observed, ended: &mut [Ended]) {
    let mut stays: BTreeMap<&InstanceKey, bool> = BTreeMap::new();
    for step in planned.steps() {
        *stays.entry(&step.instance).or_insert(true) &= step.pid_stays;
    }
    let pid = |look: &Observed, key: &InstanceKey| look.instances.get(key).and_then(|seen| seen.pid);
    for (key, _) in stays.into_iter().filter(|(_, stays)| *stays) {
        let (Some(then), Some(now)) = (pid(before, key), pid(after, key)) else { continue };
        let last = ended.iter_mut().rev().find(|ended| ended.instance == *key && ended.outcome.is_well());
        if let (true, Some(last)) = (then != now, last) {
            last.outcome = Outcome::Failed;
            last.message = format!("PidChanged: process {then} was to stay, and it is {now} now");
        }
    }
}

/// A reload or restart for a file that is not there yet would read the old one.
pub fn config_is_there(step: &Step) -> Option<String> {
    let for_a_file = |why: &Why| why.field.as_deref().is_some_and(|field| field.starts_with("configmap"));
    let matters = matches!(step.op, Op::Reload | Op::Restart) && step.why.iter().any(for_a_file);
    let spec = step.spec.as_ref().filter(|_| matters)?;
    crate::agent::not_there(&spec.configmap).map(|what| format!("ConfigNotThere: {what}"))
}

async fn report(
    args: &Apply,
    live: &Live,
    input: &mut Input,
    ended: Vec<Ended>,
    interrupted: Option<Exit>,
    deadline: Instant,
) -> Report {
    let any = |outcome: Outcome| ended.iter().any(|ended| ended.outcome == outcome);
    let failed = any(Outcome::Failed) || any(Outcome::Unknown);
    let mut converged = None;
    let mut not_well = Vec::new();
    let (mut held, mut is_left) = (Vec::new(), false);
    if !args.going.no_wait && interrupted.is_none() {
        let patience = Instant::now() + LAST_LOOK;
        // What was just started may need a moment to be well.
        loop {
            let looked = tokio::time::timeout_at(deadline.max(patience), input.look_again(live)).await;
            if !looked.is_ok_and(|looked| looked.is_ok()) {
                // What was seen before says nothing of how it is now.
                converged = None;
                if Instant::now() >= patience {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            }
            not_well = ill(input);
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
    let _ = tokio::time::timeout(LAST_LOOK, reasons(live, &mut not_well)).await;
    // Nobody could look: then nobody knows, unless nobody was to look.
    let is_so = converged.unwrap_or(args.going.no_wait);
    let exit = match () {
        () if let Some(exit) = interrupted => exit,
        () if failed => Exit::Incomplete,
        () if any(Outcome::TimedOut) => Exit::TimedOut,
        // What came about is so, however late.
        () if is_so && !any(Outcome::Skipped) => Exit::Done,
        () if Instant::now() >= deadline => Exit::TimedOut,
        () => Exit::Incomplete,
    };
    let reasons = ended.iter().filter(|one| !one.outcome.is_well() && one.outcome != Outcome::Skipped);
    let reasons = reasons.map(|one| one.reason).chain(held.into_iter().map(Some));
    // What is still to be done has its own reasons, unless all of it was refused.
    let is_refused = ended.iter().any(|one| one.reason == Some(Reason::NotOwned));
    let reason = sole_reason(reasons).filter(|_| not_well.is_empty() && (!is_left || is_refused));
    Report { ended, converged, exit, reason, ill: not_well }
}

/// Wanted, there, and not well.
pub fn ill(input: &Input) -> Vec<(String, Health, String)> {
    let meant = |key: &InstanceKey, want: &Want| {
        want.origin.state.needs_start()
            && input.rules.selection.means(key, Some(&want.origin.declared), &want.spec.labels)
    };
    let wanted = input.loaded.desired.instances.iter().filter(|(key, want)| meant(key, want));
    let seen = wanted.filter_map(|(key, _)| Some((key, input.observed.instances.get(key)?)));
    seen.filter(|(_, seen)| matches!(seen.health, Health::Degraded | Health::Failed))
        .map(|(key, seen)| (key.to_string(), seen.health, String::new()))
        .collect()
}
