//! `abide apply`: plan, ask, do it, and look again.

use std::collections::BTreeMap;
use std::io::{BufRead, IsTerminal, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::watch;

use super::args::switch;
use super::plan::args::{Input as InputArgs, PlanForm, duration};
use super::plan::input::{Digests, Input, Wanted};
use super::plan::{self, json as plan_json};
use super::print::{BOLD, DIM, ERROR, HINT, Printer, WARNING, count, visible};
use super::serve::Signals;
use super::target::{Live, Start, runtime};
use super::{Exit, Failure};
use crate::backend::{Backend, Order};
use crate::execute::{self, Ended, Outcome, Terms, Told, journal};
use crate::model::{Health, Op, Plan, Step, Time};
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

/// What an apply came to.
struct Report {
    ended: Vec<Ended>,
    /// Planning again gives nothing; `None`: nobody looked.
    converged: Option<bool>,
    exit: Exit,
    reason: Option<&'static str>,
    /// What is not well though it is as it was told to be.
    ill: Vec<(String, Health, String)>,
}

pub fn run(args: &mut Apply, printer: &Printer) -> Result<Exit, Failure> {
    let in_json = args.output == PlanForm::Json;
    let done = (|| {
        let saved = saved_plan(args)?;
        let runtime = runtime()?;
        runtime.block_on(apply(args, saved.as_ref(), printer))
    })();
    done.inspect_err(|failure| {
        if let (true, Some(reason)) = (in_json, failure.reason) {
            printer.data(&plan_json::refusal(failure.exit, reason));
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
    args.input.saved(&plan["inputs"]).map_err(|what| wrong(&what))?;
    Ok(Some(plan))
}

async fn apply(args: &Apply, saved: Option<&Value>, printer: &Printer) -> Result<Exit, Failure> {
    let deadline = Instant::now() + Duration::from_secs(args.timeout);
    if args.input.offline.observed.is_some() {
        return Err(Failure::new(Exit::Usage, "apply needs a target: --observed is for plan and diff"));
    }
    let wanted = Wanted::read(&args.input, printer)?;
    let live = args.input.target.connect(wanted.owner(), Start::OnDemand)?;
    let live = live.ok_or_else(|| Failure::new(Exit::Unreachable, "there is no local system"))?;
    settle(&live, wanted.owner(), args, deadline, printer).await?;
    let mut input = wanted.beside(&args.input, Some(&live), printer).await?;
    let mut planned = input.plan();
    plan::locate(&mut planned, &input, &args.input.limits.limits());
    if let Some(saved) = saved {
        same_as(saved, &input, &planned)?;
    }
    over_budget(&planned)?;
    if planned.steps().next().is_none() {
        let exit = if planned.held.is_empty() { Exit::Done } else { Exit::Incomplete };
        let ill = ill(&input);
        let exit = if ill.is_empty() { exit } else { Exit::Incomplete };
        let report =
            Report { ended: Vec::new(), converged: Some(exit == Exit::Done), exit, reason: None, ill };
        return show(args, &planned, &Before::of(&input, &planned)?, &report, printer);
    }
    approve(args, saved.is_some(), &input, &planned, printer)?;
    let lease = take_lease(&live, &input.rules.owner, args.lock_timeout).await?;
    let keeping = keep(&live, &lease);
    live.backend.act_as(lease.generation);
    // Somebody may have been at work until a moment ago: what is done is what is needed now.
    if let Err(failure) = plan_anew(args, saved.is_some(), &live, &mut input, &mut planned).await {
        keeping.abort();
        let _ = live.state.release_lease(&lease).await;
        return Err(failure);
    }
    let before = Before::of(&input, &planned)?;
    let report = carry_out(args, &live, &mut input, &planned, deadline, printer).await;
    keeping.abort();
    let _ = live.state.release_lease(&lease).await;
    remember(&live, &input, &planned, &before, &report).await;
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

/// The plan as it was made, before anything was done.
struct Before {
    digests: Digests,
    json: Value,
}

impl Before {
    fn of(input: &Input, planned: &Plan) -> Result<Before, Failure> {
        let digests = input.digests(planned);
        let json = serde_json::from_str(&plan_json::plan(input, planned, &digests)?).unwrap_or_default();
        Ok(Before { digests, json })
    }
}

/// What a run that died had begun is waited for, not done again.
async fn settle(
    live: &Live,
    owner: &str,
    args: &Apply,
    deadline: Instant,
    printer: &Printer,
) -> Result<(), Failure> {
    let unreadable = |error: crate::store::Error| {
        Failure::new(Exit::Unreachable, format!("target {}: {error}", live.name))
    };
    let left = journal::left(&live.state, owner).await.map_err(unreadable)?;
    if left.is_empty() {
        return Ok(());
    }
    // Whoever is at work now settles his own.
    let lease = take_lease(live, owner, args.lock_timeout).await?;
    live.backend.act_as(lease.generation);
    let left = journal::left(&live.state, owner).await.map_err(unreadable)?;
    if !left.is_empty() {
        printer.remark(&format!(
            "{} of an interrupted run: waiting for what was begun",
            count(left.len(), "call")
        ));
    }
    for (key, call) in left {
        let found = live.backend.find(&journal::name_of(&key), &call.steps).await;
        let Some(task) = found.map_err(|fault| live.failure(&fault))? else {
            // It was never taken on, and with our generation it never will be.
            journal::settle(&live.state, &key).await.map_err(unreadable)?;
            continue;
        };
        loop {
            let answers = live.backend.poll(&task).await.map_err(|fault| live.failure(&fault))?;
            let open =
                answers.iter().filter(|answer| answer.result == crate::backend::Outcome::InProgress).count();
            if open == 0 {
                break;
            }
            if Instant::now() >= deadline {
                let message = format!("{} of an interrupted run are still under way", count(open, "step"));
                return Err(Failure::new(Exit::TimedOut, message));
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        journal::settle(&live.state, &key).await.map_err(unreadable)?;
    }
    let _ = live.state.release_lease(&lease).await;
    Ok(())
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
        return Err(
            Failure::refused("NoApproval", message).hint("pass --yes, or approve a saved plan: apply FILE")
        );
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

/// How long a lease lives, and how often it is renewed.
const LEASE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_millis(1500));

async fn take_lease(live: &Live, owner: &str, patience: u64) -> Result<Lease, Failure> {
    let holder = Holder::this(format!("apply-{}-{}", std::process::id(), now().0));
    let begin = Instant::now();
    loop {
        let taken = live.state.take_lease(&format!("writer/{owner}"), &holder, LEASE.0).await;
        let taken = taken
            .map_err(|error| Failure::new(Exit::Unreachable, format!("target {}: {error}", live.name)))?;
        match taken {
            Taken::Ours(lease) => return Ok(lease),
            Taken::Theirs { holder, .. } if begin.elapsed() >= Duration::from_secs(patience) => {
                let message =
                    format!("{} (process {}) is changing this owner's processes", holder.host, holder.pid);
                return Err(
                    Failure::new(Exit::Locked, message).hint("wait for it, or give --lock-timeout more time")
                );
            }
            Taken::Theirs { .. } => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

fn keep(live: &Live, lease: &Lease) -> tokio::task::JoinHandle<()> {
    let (state, lease) = (live.state.clone(), lease.clone());
    tokio::spawn(async move {
        loop {
            tokio::time::sleep(LEASE.1).await;
            let _ = state.renew_lease(&lease, LEASE.0).await;
        }
    })
}

async fn carry_out(
    args: &Apply,
    live: &Live,
    input: &mut Input,
    planned: &Plan,
    deadline: Instant,
    printer: &Printer,
) -> Report {
    let (stop, stopped) = watch::channel(false);
    let terms = terms(input, args, deadline, stopped);
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
            }
        }
    };
    let (ended, asked) = interrupted;
    progress.clear();
    report(args, live, input, ended, asked, deadline).await
}

fn terms(input: &Input, args: &Apply, deadline: Instant, stop: watch::Receiver<bool>) -> Terms {
    let instances = &input.loaded.desired.instances;
    let mut depends = BTreeMap::new();
    let mut declared = BTreeMap::new();
    for (key, want) in instances {
        declared.insert(key.clone(), want.origin.declared.clone());
        depends.entry(want.origin.declared.clone()).or_insert_with(|| want.origin.depends_on.clone());
    }
    Terms {
        owner: input.rules.owner.clone(),
        run: format!("{:013}-{}", now().0, std::process::id()),
        deadline,
        max_parallel: args.max_parallel as usize,
        depends,
        declared,
        check: if input.target == "local" { config_is_there } else { |_| None },
        stop,
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
        while input.look_again(live).await.is_ok() {
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
async fn remember(live: &Live, input: &Input, planned: &Plan, before: &Before, report: &Report) {
    let digests = &before.digests;
    let entry = json!({
        "at": now().to_string(), "revision": digests.wanted, "source": input.paths, "plan": digests.id,
        "summary": plan_json::summary(planned), "exit": report.exit as u8, "converged": report.converged,
        "failed": report.ended.iter().filter(|ended| !ended.outcome.is_well()).count(),
    });
    let key = format!("history/{}/{:013}", input.rules.owner, now().0);
    let _ = live.state.txn(Txn::put(key, entry.to_string())).await;
}

fn show(
    args: &Apply,
    planned: &Plan,
    before: &Before,
    report: &Report,
    printer: &Printer,
) -> Result<Exit, Failure> {
    if let Some(file) = &args.junit {
        std::fs::write(file, junit(report)).map_err(|error| {
            Failure::new(Exit::Failed, format!("cannot write {}: {error}", file.display()))
        })?;
    }
    match args.output {
        PlanForm::Json => printer.data(&in_json(before, report)?),
        PlanForm::Markdown => printer.data(&in_markdown(report)),
        PlanForm::Text => printer.styled(&in_text(planned, report)),
    }
    Ok(report.exit)
}

fn in_json(before: &Before, report: &Report) -> Result<String, Failure> {
    let plan = &before.json;
    let outcomes: Vec<Value> = report
        .ended
        .iter()
        .map(|ended| {
            json!({"step": ended.step.to_string(), "instance": ended.instance, "op": ended.op.word(),
                   "outcome": ended.outcome.word(), "code": ended.code, "message": ended.message, "took_ms": ended.took_ms})
        })
        .collect();
    let whole = json!({"version": 1, "plan": plan, "outcomes": outcomes, "converged": report.converged.unwrap_or(false),
                       "exit": {"code": report.exit as u8, "reason": report.reason}});
    let text = serde_json::to_string_pretty(&whole);
    text.map(|text| text + "\n")
        .map_err(|error| Failure::new(Exit::Failed, format!("cannot write JSON: {error}")))
}

/// Failures that say the same, together.
fn grouped(report: &Report) -> Vec<(Outcome, Op, String, Vec<String>)> {
    let mut groups: Vec<(Outcome, Op, String, Vec<String>)> = Vec::new();
    for ended in report.ended.iter().filter(|ended| !ended.outcome.is_well()) {
        let same = |group: &&mut (Outcome, Op, String, Vec<String>)| {
            (group.0, group.1, group.2.as_str()) == (ended.outcome, ended.op, ended.message.as_str())
        };
        match groups.iter_mut().find(same) {
            Some(group) => group.3.push(ended.instance.to_string()),
            None => groups.push((
                ended.outcome,
                ended.op,
                ended.message.clone(),
                vec![ended.instance.to_string()],
            )),
        }
    }
    groups
}

fn in_text(planned: &Plan, report: &Report) -> String {
    const SHOWN: usize = 5;
    let mut text = String::new();
    for (outcome, op, message, instances) in grouped(report) {
        let more = instances.len().saturating_sub(SHOWN);
        let names = instances.iter().take(SHOWN).map(|name| visible(name)).collect::<Vec<_>>().join(", ");
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        text.push_str(&format!("{ERROR}{}{ERROR:#} {op} {names}{more}\n", outcome.word()));
        text.extend(message.lines().map(|line| format!("    {}\n", visible(line))));
    }
    for (instance, health, _) in &report.ill {
        text.push_str(&format!("{WARNING}{}{WARNING:#} {}\n", health.word(), visible(instance)));
    }
    if report.ended.is_empty() {
        let held = planned.held.len();
        let rest = if held > 0 { format!("; {} held", count(held, "instance")) } else { String::new() };
        text.push_str(&format!("{BOLD}Nothing to do{BOLD:#}: {} as wanted{rest}\n", is_are(planned.settled)));
        return text;
    }
    let mut words: Vec<String> = Vec::new();
    for outcome in Outcome::ALL {
        let many = report.ended.iter().filter(|ended| ended.outcome == outcome).count();
        if many > 0 {
            words.push(format!("{many} {}", outcome.word()));
        }
    }
    let slowest =
        report.ended.iter().filter(|ended| ended.outcome.is_well()).max_by_key(|ended| ended.took_ms);
    let slowest = slowest.map(|ended| {
        format!(
            "  {DIM}slowest: {} {} ({} ms){DIM:#}",
            ended.op,
            visible(&ended.instance.to_string()),
            ended.took_ms
        )
    });
    let end = match report.converged {
        Some(true) => format!("{HINT}converged{HINT:#}"),
        Some(false) => format!("{WARNING}not converged{WARNING:#}"),
        None => "not looked at again".to_owned(),
    };
    text.push_str(&format!("{BOLD}{}{BOLD:#}: {end}{}\n", words.join(", "), slowest.unwrap_or_default()));
    text
}

fn is_are(n: usize) -> String {
    format!("{} {}", count(n, "instance"), if n == 1 { "is" } else { "are" })
}

fn in_markdown(report: &Report) -> String {
    let well = report.ended.iter().filter(|ended| ended.outcome.is_well()).count();
    let end = match report.converged {
        Some(true) => "converged",
        Some(false) => "**not converged**",
        None => "not looked at again",
    };
    let mut text = format!("### abide apply: {well} of {} steps done, {end}\n\n", report.ended.len());
    for (outcome, op, message, instances) in grouped(report) {
        text.push_str(&format!(
            "- **{}** `{op}` on {}\n",
            outcome.word(),
            count(instances.len(), "instance")
        ));
        text.push_str(&format!(
            "  ```text\n  {}\n  ```\n",
            message.replace('\n', "\n  ").replace("```", "'''")
        ));
    }
    text
}

fn junit(report: &Report) -> String {
    let escape = |text: &str| {
        text.replace('&', "&amp;")
            .replace('<', "&lt;")
            .replace('>', "&gt;")
            .replace('"', "&quot;")
            .chars()
            .filter(|c| !c.is_control() || *c == '\n')
            .collect::<String>()
    };
    let failures = report
        .ended
        .iter()
        .filter(|ended| matches!(ended.outcome, Outcome::Failed | Outcome::TimedOut | Outcome::Unknown))
        .count();
    let skipped = report.ended.iter().filter(|ended| ended.outcome == Outcome::Skipped).count();
    let mut text = format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"abide apply\" tests=\"{}\" failures=\"{failures}\" skipped=\"{skipped}\">\n",
        report.ended.len()
    );
    for ended in &report.ended {
        let secs = ended.took_ms as f64 / 1000.0;
        let name = format!("{} {}", ended.op, ended.instance);
        text.push_str(&format!(
            "  <testcase classname=\"{}\" name=\"{}\" time=\"{secs:.3}\"",
            ended.instance.process(),
            escape(&name)
        ));
        let message = escape(&ended.message);
        match ended.outcome {
            Outcome::Done | Outcome::AlreadySo => text.push_str("/>\n"),
            Outcome::Skipped => text.push_str(&format!("><skipped message=\"{message}\"/></testcase>\n")),
            outcome => text.push_str(&format!(
                "><failure type=\"{}\" message=\"{message}\"/></testcase>\n",
                outcome.word()
            )),
        }
    }
    text + "</testsuite>\n"
}

/// What people see while they wait: a line that is written over at a terminal, and a line now and then otherwise.
struct Progress<'a> {
    all: usize,
    done: usize,
    bad: usize,
    shows: bool,
    over: bool,
    last: Instant,
    printer: &'a Printer,
}

impl<'a> Progress<'a> {
    fn new(all: usize, output: PlanForm, printer: &'a Printer) -> Progress<'a> {
        let over = std::io::stderr().is_terminal();
        let shows = !printer.is_quiet() && (over || output == PlanForm::Text);
        Progress { all, done: 0, bad: 0, shows, over, last: Instant::now(), printer }
    }

    fn told(&mut self, told: &Told<'_>) {
        let mut waits_for = None;
        match told {
            Told::Ended(ended) => {
                self.done += 1;
                self.bad += usize::from(!ended.outcome.is_well());
            }
            Told::Soaking { process, secs } => {
                self.line(&format!("{process}: watching for {secs} s before the rest"))
            }
            Told::Waiting { longest, .. } => waits_for = *longest,
            Told::Wave { .. } | Told::Sent { .. } => {}
        }
        let (often, seldom) = (Duration::from_millis(80), Duration::from_secs(5));
        if self.shows && self.last.elapsed() >= if self.over { often } else { seldom } {
            self.last = Instant::now();
            let bad = if self.bad > 0 { format!(", {} failed", self.bad) } else { String::new() };
            let longest = waits_for.map(|key| format!("  waiting for {key}")).unwrap_or_default();
            let text = format!("{} of {} steps{bad}{longest}", self.done, self.all);
            match self.over {
                true => self.printer.to_stderr(&format!("\r\u{1b}[2K{text}")),
                false => self.printer.remark(&text),
            }
        }
    }

    fn line(&mut self, text: &str) {
        if self.shows {
            self.clear();
            self.printer.remark(text);
        }
    }

    fn clear(&mut self) {
        if self.shows && self.over {
            self.printer.to_stderr("\r\u{1b}[2K");
        }
    }
}

/// For `up`: the manifests are made true once, and what went wrong is said.
pub async fn once(paths: &[PathBuf], printer: &Printer) {
    let parsed = <super::args::Args as clap::Parser>::try_parse_from(
        ["abide", "apply", "--yes"]
            .into_iter()
            .map(std::ffi::OsString::from)
            .chain(paths.iter().map(|path| path.clone().into())),
    );
    let Ok(super::args::Args { verb: super::args::Verb::Apply(args), .. }) = parsed else { return };
    if let Err(failure) = apply(&args, None, printer).await {
        printer.failure(&failure);
    }
}

/// Stops everything that runs. How many still do.
pub async fn stop_all(live: &Live, printer: &Printer) -> Result<usize, Failure> {
    let observed = live.backend.observe().await.map_err(|fault| live.failure(&fault))?;
    let there =
        observed.instances.iter().filter(|(_, seen)| seen.running == Some(true) || seen.hosted == Some(true));
    let orders: Vec<Order> = there
        .enumerate()
        .map(|(nth, (key, seen))| {
            let runs = seen.running == Some(true);
            let spec = if runs { seen.live.spec() } else { seen.given.spec() };
            Order {
                id: nth.to_string(),
                owner: seen.owner.as_deref().unwrap_or("default").to_owned(),
                instance: key.clone(),
                host: crate::model::Host { key: key.host.clone(), supplier: None, agent_id: None },
                op: if runs { Op::Stop } else { Op::Unhost },
                spec: spec.cloned(),
                revision: None,
                takes: Vec::new(),
                from: None,
            }
        })
        .collect();
    if orders.is_empty() {
        return Ok(0);
    }
    printer.remark(&format!("stopping {}", count(orders.len(), "process")));
    let call = format!("down-{}-{}", std::process::id(), now().0);
    let task = live.backend.submit(&call, &orders).await.map_err(|fault| live.failure(&fault))?;
    let begin = Instant::now();
    loop {
        let answers = live.backend.poll(&task).await.map_err(|fault| live.failure(&fault))?;
        let open =
            answers.iter().filter(|answer| answer.result == crate::backend::Outcome::InProgress).count();
        if open == 0 || begin.elapsed() > Duration::from_secs(120) {
            for answer in &answers {
                if let crate::backend::Outcome::Failed { code, message } = &answer.result
                    && *code != 829
                {
                    let message = message.lines().map(visible).collect::<Vec<_>>().join("\n    ");
                    printer
                        .to_stderr(&format!("{ERROR}failed{ERROR:#} stop {}: {message}\n", answer.instance));
                }
            }
            let well = |answer: &&crate::backend::Answer| {
                !matches!(
                    &answer.result,
                    crate::backend::Outcome::Done | crate::backend::Outcome::Failed { code: 829, .. }
                )
            };
            return Ok(answers.iter().filter(well).count());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn now() -> Time {
    let since = std::time::SystemTime::now().duration_since(std::time::SystemTime::UNIX_EPOCH);
    Time(i64::try_from(since.unwrap_or_default().as_millis()).unwrap_or(0))
}
