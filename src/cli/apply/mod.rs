//! `abide apply`: plan, ask, do it, and look again.

mod progress;
mod report;
mod said;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

use self::progress::Progress;
use self::report::{Before, Report, reasons, show};
use self::said::Said;
use super::args::switch;
use super::plan::args::{Input as InputArgs, PlanForm, duration};
use super::plan::input::{Early, Input, Wanted};
use super::plan::{self, json as plan_json};
use super::print::{BOLD, Printer, count};
use super::serve::Signals;
use super::target::{Live, Start, runtime};
use super::watch_source::short;
use super::{Exit, Failure};
use crate::clock::{self, moment};
use crate::control::pin::Pin;
use crate::control::{self, history, rollback::as_before};
use crate::execute::{self, Ended, Executed, Outcome, Terms, Told, Unsettled, journal};
use crate::model::{Health, InstanceKey, Observed, Op, Plan, ProcessKey, Step, Time};
use crate::reconcile::{Rules, reconcile};
use crate::store::{Holder, Lease, Store, Taken, Txn};

/// Make the manifests true: plan, ask, carry it out, and look again
///
/// Takes manifests, or a plan that `abide plan --out` wrote, which is carried out only if it is still what would be planned.
/// Exits with 0 when everything is as wanted, 3 when something failed or is unknown, 4 when a guard said no, 5 when time ran
/// out, 6 when another holds the lease.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  abide apply manifests\n  abide apply manifests --yes --prune --owner web-team\n  abide plan manifests --out plan.json && abide apply plan.json --yes"
)]
pub struct Apply {
    #[command(flatten)]
    pub input: InputArgs,
    /// Do not ask
    #[arg(short, long, env = "ABIDE_YES", value_parser = switch)]
    pub yes: bool,
    /// Do not look again after everything was carried out
    #[arg(long, env = "ABIDE_NO_WAIT", value_parser = switch)]
    pub no_wait: bool,
    /// The longest that it may take
    #[arg(long, value_name = "TIME", env = "ABIDE_TIMEOUT", default_value = "10m", value_parser = duration)]
    pub timeout: u64,
    /// Most steps under way at once
    #[arg(long, value_name = "N", env = "ABIDE_MAX_PARALLEL", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_parallel: u32,
    /// How long to wait for another who is applying
    #[arg(long, value_name = "TIME", env = "ABIDE_LOCK_TIMEOUT", default_value = "10s", value_parser = duration)]
    pub lock_timeout: u64,
    /// Also write the outcomes as JUnit XML, for CI systems
    #[arg(long, value_name = "FILE", env = "ABIDE_JUNIT")]
    pub junit: Option<PathBuf>,
    /// Form of the report
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_APPLY_OUTPUT", value_name = "FORM")]
    pub output: PlanForm,
}

pub fn run(args: &mut Apply, printer: &Printer) -> Result<Exit, Failure> {
    let in_json = args.output == PlanForm::Json;
    let done = (|| {
        let saved = saved_plan(args)?;
        let runtime = runtime()?;
        runtime.block_on(apply(args, saved.as_ref(), printer))
    })();
    done.inspect_err(|failure| {
        if in_json {
            printer.data(&plan_json::refusal(failure.exit, failure.reason));
        }
    })
}

/// A plan in a file names its manifests and flags; this run is made with them.
fn saved_plan(args: &mut Apply) -> Result<Option<Value>, Failure> {
    let [file] = args.input.paths.as_slice() else { return Ok(None) };
    if file.extension().is_none_or(|extension| extension != "json") && !file.is_file() {
        return Ok(None);
    }
    let Some(plan) =
        std::fs::read_to_string(file).ok().and_then(|text| serde_json::from_str::<Value>(&text).ok())
    else {
        return Ok(None);
    };
    if plan["inputs"]["paths"].as_array().is_none() || plan["fingerprint"].as_str().is_none() {
        return Ok(None);
    }
    let shown = file.display().to_string();
    let wrong = |what: &str| Failure::new(Exit::Usage, format!("{shown}: {what}"));
    if !plan["inputs"]["offline"].is_null() {
        return Err(wrong("this plan is a rehearsal (--observed): there is nothing to carry out"));
    }
    let typed = std::mem::replace(&mut args.input.target.target, "local".to_owned());
    args.input.saved(&plan["inputs"]).map_err(|what| wrong(&what))?;
    if typed != "local" && typed != args.input.target.target {
        let what = format!("this plan is for target {}, not {typed}", args.input.target.target);
        return Err(wrong(&what));
    }
    Ok(Some(plan))
}

async fn apply(args: &Apply, saved: Option<&Value>, printer: &Printer) -> Result<Exit, Failure> {
    let deadline = Instant::now() + Duration::from_secs(args.timeout);
    if args.input.offline.observed.is_some() {
        return Err(Failure::new(Exit::Usage, "apply needs a target: --observed is for plan and diff"));
    }
    let early = Early::begin(&args.input);
    let wanted = Wanted::read(&args.input, printer)?;
    let live = match early {
        Some(early) => Some(early.end()),
        None => args.input.target.connect(Start::OnDemand)?.map(Arc::new),
    };
    let live = live.ok_or_else(|| Failure::new(Exit::Unreachable, "there is no local system"))?;
    reach(args, saved, wanted, &live, &Said::New, deadline, printer).await
}

/// An earlier revision, like any other, and then it is pinned.
pub async fn go_back(
    args: &Apply,
    wanted: Wanted,
    live: &Live,
    pin: Pin,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let deadline = Instant::now() + Duration::from_secs(args.timeout);
    reach(args, None, wanted, live, &Said::Before(pin), deadline, printer).await
}

async fn reach(
    args: &Apply,
    saved: Option<&Value>,
    wanted: Wanted,
    live: &Live,
    said: &Said,
    deadline: Instant,
    printer: &Printer,
) -> Result<Exit, Failure> {
    settle(live, wanted.owner(), deadline, printer).await?;
    let mut input = wanted.beside(&args.input, Some(live), printer).await?;
    if let Said::Before(pin) = said {
        input.paths = format!("rollback to {}", short(&pin.revision));
    }
    let mut planned = input.plan();
    plan::locate(&mut planned, &input, &args.input.limits.limits());
    if let Some(saved) = saved {
        same_as(saved, &input, &planned)?;
    }
    over_budget(&planned)?;
    if planned.steps().next().is_none() {
        let exit = if planned.held.is_empty() { Exit::Done } else { Exit::Incomplete };
        if let Said::Before(_) = said {
            approve(args, saved.is_some(), &input, &planned, printer)?;
        }
        said.unless_so(args, live, &input, printer).await?;
        let mut ill = ill(&input);
        reasons(live, &mut ill).await;
        let exit = if ill.is_empty() { exit } else { Exit::Incomplete };
        let report =
            Report { ended: Vec::new(), converged: Some(exit == Exit::Done), exit, reason: None, ill };
        return show(args, &planned, &Before::of(&input, &planned)?, &report, printer);
    }
    approve(args, saved.is_some(), &input, &planned, printer)?;
    let lease = take_lease(live, &input.rules.owner, args.lock_timeout).await?;
    let (keeping, lost) = keep(live, &lease);
    live.act_as(lease.generation);
    // Somebody may have been at work until a moment ago, or died in it: what is done is what is needed now.
    let ready = async {
        settle_held(live, &input.rules.owner, deadline).await?;
        plan_anew(args, saved.is_some(), live, &mut input, &mut planned).await?;
        said.in_force(args, live, &input, printer).await
    };
    if let Err(failure) = ready.await {
        keeping.abort();
        let _ = live.state.release_lease(&lease).await;
        return Err(failure);
    }
    let before = Before::of(&input, &planned)?;
    let report = carry_out(args, live, &mut input, &planned, deadline, lost, printer).await;
    keeping.abort();
    let _ = live.state.release_lease(&lease).await;
    remember(live, &input, &planned, &before, &report, said.commit()).await;
    show(args, &planned, &before, &report, printer)
}

/// The same plan for the world as it is now. One that a person approved must not have become another.
async fn plan_anew(
    args: &Apply,
    saved: bool,
    live: &Live,
    input: &mut Input,
    planned: &mut Plan,
) -> Result<(), Failure> {
    let steps = |plan: &Plan| -> Vec<String> {
        plan.steps().map(|step| format!("{} {} {}", step.instance, step.op, step.which.word())).collect()
    };
    let approved = steps(planned);
    input.look_again(live).await?;
    let mut anew = input.plan();
    plan::locate(&mut anew, input, &args.input.limits.limits());
    if steps(&anew) != approved && (saved || !args.yes) {
        let message = "what is there has changed since the plan was shown: nothing was done";
        return Err(Failure::refused("StalePlan", message).hint("apply again, and look at the new plan"));
    }
    over_budget(&anew)?;
    *planned = anew;
    Ok(())
}

/// What a run that died had begun is waited for, not done again.
async fn settle(live: &Live, owner: &str, deadline: Instant, printer: &Printer) -> Result<(), Failure> {
    let unreadable = |error: crate::store::Error| {
        Failure::new(Exit::Unreachable, format!("target {}: {error}", live.name))
    };
    if journal::left(&live.state, owner).await.map_err(unreadable)?.is_empty() {
        return Ok(());
    }
    // Whoever is at work now settles his own: these are his.
    let lease = match take_lease(live, owner, 0).await {
        Err(failure) if failure.exit == Exit::Locked => return Ok(()),
        lease => lease?,
    };
    let (keeping, _) = keep(live, &lease);
    live.act_as(lease.generation);
    printer.remark("a run was interrupted: finding out what became of what it had begun");
    if let Ok(abide) = live.abide() {
        abide.look_anew();
    }
    let settled = settle_held(live, owner, deadline).await;
    keeping.abort();
    let _ = live.state.release_lease(&lease).await;
    settled
}

/// The same for whoever holds the lease.
async fn settle_held(live: &Live, owner: &str, deadline: Instant) -> Result<(), Failure> {
    let whom = (live.name.as_str(), &live.caps());
    let settled = execute::settle(&live.backend, &live.state, whom, owner, deadline).await;
    settled.map_err(|why| match why {
        Unsettled::Target(fault) => live.failure(&fault),
        Unsettled::State(error) => Failure::new(Exit::Unreachable, format!("target {}: {error}", live.name)),
        Unsettled::UnderWay(_) => Failure::new(Exit::TimedOut, why.to_string()),
    })
}

/// A saved plan is carried out only if it is still what would be done.
fn same_as(saved: &Value, input: &Input, planned: &Plan) -> Result<(), Failure> {
    let now = Before::of(input, planned)?;
    let steps = |plan: &Value| -> Vec<String> {
        let waves = plan["waves"].as_array().into_iter().flatten();
        let steps = waves.flat_map(|wave| wave.as_array().into_iter().flatten());
        steps.map(|step| format!("{} {} {}", step["instance"], step["op"], step["spec"])).collect()
    };
    if saved["fingerprint"] == now.digests.all.as_str() && steps(saved) == steps(&now.json) {
        return Ok(());
    }
    let message = "the plan is stale: manifests, flags or what is there have changed since it was made";
    Err(Failure::refused("StalePlan", message).hint("plan again, and look at it again"))
}

/// Over a budget nothing at all is done.
fn over_budget(planned: &Plan) -> Result<(), Failure> {
    use crate::model::Reason;
    for (reason, flag) in [(Reason::DeleteBudget, "--max-delete"), (Reason::RestartBudget, "--max-restart")] {
        let held = planned.held.iter().filter(|held| held.reason == reason).count();
        if held > 0 {
            let detail = planned
                .held
                .iter()
                .find(|held| held.reason == reason)
                .map_or("", |held| held.detail.as_str());
            let message = format!("{} over a budget: {detail}; nothing was done", count(held, "instance"));
            let hint = format!("`abide plan` shows them; {flag} allows more");
            return Err(Failure::refused(reason.word(), message).hint(hint));
        }
    }
    Ok(())
}

fn approve(
    args: &Apply,
    saved: bool,
    input: &Input,
    planned: &Plan,
    printer: &Printer,
) -> Result<(), Failure> {
    if args.output == PlanForm::Text {
        printer.styled(&plan::text::text(input, planned, 0));
    }
    if args.yes || saved {
        return Ok(());
    }
    if !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        let message = "nobody is here to approve this";
        // What is gone back to has no paths, and no saved plans.
        let hint = match args.input.paths.is_empty() {
            true => "pass --yes",
            false => "pass --yes, or approve a saved plan: apply FILE",
        };
        return Err(Failure::refused("NoApproval", message).hint(hint));
    }
    printer.to_stderr(&format!("{BOLD}Do this?{BOLD:#} [y/N] "));
    let _ = std::io::stderr().flush();
    let mut answer = String::new();
    let _ = std::io::stdin().lock().read_line(&mut answer);
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => Err(Failure::refused("NoApproval", "not approved: nothing was done")),
    }
}

/// How long the look at the end may take, though the time is over.
const LAST_LOOK: Duration = Duration::from_secs(5);
/// How long a rollback may take.
const BACK: Duration = Duration::from_secs(600);
/// How long a lease lives, and how often it is renewed.
const LEASE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_millis(1500));

async fn take_lease(live: &Live, owner: &str, patience: u64) -> Result<Lease, Failure> {
    let holder = Holder::this(format!("apply-{}-{}", std::process::id(), moment().0));
    let begin = Instant::now();
    loop {
        let taken = live.state.take_lease(&format!("writer/{owner}"), &holder, LEASE.0).await;
        let taken = taken
            .map_err(|error| Failure::new(Exit::Unreachable, format!("target {}: {error}", live.name)))?;
        match taken {
            Taken::Ours(lease) => return Ok(lease),
            Taken::Theirs { holder, .. } if begin.elapsed() >= Duration::from_secs(patience) => {
                let message = format!(
                    "{} (process {}) has been changing this owner's processes since {}",
                    holder.host,
                    holder.pid,
                    Time(holder.since)
                );
                return Err(
                    Failure::new(Exit::Locked, message).hint("wait for it, or give --lock-timeout more time")
                );
            }
            Taken::Theirs { .. } => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Renews a lease until it is told not to; says when it was lost.
fn keep(live: &Live, lease: &Lease) -> (tokio::task::JoinHandle<()>, watch::Receiver<bool>) {
    let (state, lease) = (live.state.clone(), lease.clone());
    let (lost, is_lost) = watch::channel(false);
    let keeping = tokio::spawn(async move {
        loop {
            tokio::time::sleep(LEASE.1).await;
            if matches!(state.renew_lease(&lease, LEASE.0).await, Ok(false)) {
                let _ = lost.send(true);
                return std::future::pending().await;
            }
        }
    });
    (keeping, is_lost)
}

async fn carry_out(
    args: &Apply,
    live: &Live,
    input: &mut Input,
    planned: &Plan,
    deadline: Instant,
    mut lost: watch::Receiver<bool>,
    printer: &Printer,
) -> Report {
    let (stop, stopped) = watch::channel(false);
    let terms = terms(input, planned, args, deadline, stopped);
    let before = input.observed.clone();
    let mut progress = Progress::new(planned.steps().count(), args.output, printer);
    let mut told = |told: Told<'_>| progress.told(&told);
    let interrupted = {
        let executing = execute::execute(planned, &live.backend, &live.state, &terms, &mut told);
        tokio::pin!(executing);
        let mut signals = Signals::listen().ok();
        let mut asked: Option<Exit> = None;
        loop {
            let signalled = async {
                match &mut signals {
                    Some(signals) if asked.is_none() => signals.asked_by().await,
                    _ => std::future::pending().await,
                }
            };
            tokio::select! {
                ended = &mut executing => break (ended, asked),
                exit = signalled => {
                    asked = Some(exit);
                    let _ = stop.send(true);
                }
                // Somebody else is at work now: nothing more is begun.
                Ok(_) = lost.wait_for(|lost| *lost), if asked.is_none() => {
                    asked = Some(Exit::Locked);
                    let _ = stop.send(true);
                }
            }
        }
    };
    let (Executed { mut ended, to_roll_back }, asked) = interrupted;
    progress.clear();
    if !to_roll_back.is_empty() {
        roll_back(live, input, &terms, &to_roll_back, &mut ended, printer).await;
    }
    let mut report = report(args, live, input, ended, asked, deadline).await;
    if report.converged.is_some() {
        pids_stayed(planned, &before, &input.observed, &mut report.ended);
        if report.exit == Exit::Done && report.ended.iter().any(|ended| !ended.outcome.is_well()) {
            report.exit = Exit::Incomplete;
        }
    }
    if !to_roll_back.is_empty() {
        report.exit = Exit::RolledBack;
    }
    report
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
        max_parallel: args.max_parallel as usize,
        check,
        ..control::terms(&input.loaded.desired, &input.observed, planned, stop)
    }
}

/// Puts processes whose rollout failed back as they were. What is done for that stands behind what was done before.
async fn roll_back(
    live: &Live,
    input: &Input,
    terms: &Terms,
    processes: &BTreeSet<ProcessKey>,
    ended: &mut Vec<Ended>,
    printer: &Printer,
) {
    let names: Vec<String> = processes.iter().map(ToString::to_string).collect();
    printer.remark(&format!("too many of {} failed: putting it back as it was", names.join(", ")));
    let back = as_before(&input.loaded.desired, &terms.before, processes);
    let Ok(world) = live.world(&back, None).await else { return };
    let rules = Rules { prune: false, max_restart: None, ..input.rules.clone() };
    let plan = reconcile(&back, &world.observed, &rules, &clock::now(&back));
    let again = Terms {
        owner: terms.owner.clone(),
        target: terms.target.clone(),
        caps: terms.caps,
        run: format!("{}-back", terms.run),
        // It has a time of its own: half-way would be worse than late.
        deadline: Instant::now() + BACK,
        max_parallel: terms.max_parallel,
        ..control::terms(&back, &world.observed, &plan, terms.stop.clone())
    };
    let done = execute::execute(&plan, &live.backend, &live.state, &again, &mut |_| {}).await;
    let first = ended.iter().map(|ended| ended.step).max().unwrap_or(0);
    ended.extend(done.ended.into_iter().map(|one| Ended { step: first + one.step, ..one }));
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
    let for_a_file =
        |why: &crate::model::Why| why.field.as_deref().is_some_and(|field| field.starts_with("configmap"));
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
    if !args.no_wait && interrupted.is_none() {
        // What was just started may need a moment to be well.
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).max(LAST_LOOK);
            let looked = tokio::time::timeout(left, input.look_again(live)).await;
            if !looked.is_ok_and(|looked| looked.is_ok()) {
                break;
            }
            not_well = ill(input);
            converged = Some(input.plan().is_empty() && not_well.is_empty());
            let wanted = |key: &crate::model::InstanceKey| input.loaded.desired.instances.contains_key(key);
            let mut seen = input.observed.instances.iter();
            let starting = seen.any(|(key, seen)| wanted(key) && seen.health == Health::Starting);
            if !starting || Instant::now() >= deadline {
                break;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
    reasons(live, &mut not_well).await;
    let (exit, reason) = match () {
        () if let Some(exit) = interrupted => (exit, None),
        () if failed => (Exit::Incomplete, None),
        () if any(Outcome::TimedOut) || Instant::now() >= deadline => (Exit::TimedOut, None),
        () if any(Outcome::Skipped) || converged == Some(false) => (Exit::Incomplete, None),
        () => (Exit::Done, None),
    };
    Report { ended, converged, exit, reason, ill: not_well }
}

/// Wanted, there, and not well.
fn ill(input: &Input) -> Vec<(String, Health, String)> {
    let meant = |key: &crate::model::InstanceKey, want: &crate::model::Want| {
        want.origin.state.needs_start()
            && input.rules.selection.means(key, Some(&want.origin.declared), &want.spec.labels)
    };
    let wanted = input.loaded.desired.instances.iter().filter(|(key, want)| meant(key, want));
    let seen = wanted.filter_map(|(key, _)| Some((key, input.observed.instances.get(key)?)));
    seen.filter(|(_, seen)| matches!(seen.health, Health::Degraded | Health::Failed))
        .map(|(key, seen)| (key.to_string(), seen.health, String::new()))
        .collect()
}

/// A line in the history of this owner.
async fn remember(
    live: &Live,
    input: &Input,
    planned: &Plan,
    before: &Before,
    report: &Report,
    commit: Option<&str>,
) {
    let digests = &before.digests;
    let mut entry = json!({
        "at": moment().to_string(), "revision": digests.wanted, "source": input.paths, "plan": digests.id,
        "summary": plan_json::summary(planned), "exit": report.exit as u8, "converged": report.converged,
        "failed": report.ended.iter().filter(|ended| !ended.outcome.is_well()).count(),
        "by": history::whoever(), "steps": history::steps(&report.ended),
    });
    if let Some(commit) = commit {
        entry["commit"] = commit.into();
    }
    let key = format!("history/{}/{:013}", input.rules.owner, moment().0);
    let _ = live.state.txn(Txn::put(key, entry.to_string())).await;
}
