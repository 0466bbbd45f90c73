//! What a person does by hand: `start stop restart reload kill`, each recorded as a hold before it is sent, so that nothing
//! undoes it; `release`, which ends a hold; `pause` and `resume`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use crate::cli::args::parse_switch;
use crate::cli::commands::plan::args::SelectArgs;
use crate::cli::output::print::{BOLD, ERROR, Printer, count, visible};
use crate::cli::target::{ConnectedTarget, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::clock::{self, now};
use crate::control::history;
use crate::execute::manual::{execute_manual, step};
use crate::execute::world::Observation;
use crate::execute::{StepOutcome, StepResult};
use crate::model::{
    Desired, Hold, HoldReason, HostKey, InstanceKey, Name, Observed, ObservedInstance, Op, Pause, ProcessKey,
    Step, Time, glob, seconds,
};
use crate::store::{Store, Txn};

/// How long what was sent may take.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(600);

/// Which instances are meant.
#[derive(Debug, clap::Args)]
pub struct InstanceArgs {
    /// The process, or one of its instances: NS/NAME or NS/NAME@HOST (repeatable)
    // A namespace or a host alone, from a variable perhaps, names nobody.
    #[arg(value_name = "NS/NAME[@HOST]", required_unless_present_any = ["selector", "include"])]
    pub processes: Vec<InstanceSelector>,
    #[command(flatten)]
    pub select: SelectArgs,
    #[command(flatten)]
    pub target: TargetArgs,
}

impl InstanceArgs {
    /// By its name, where names were typed.
    fn matches(&self, key: &InstanceKey) -> bool {
        self.processes.is_empty() || self.processes.iter().any(|one| one.matches(key))
    }
}

/// `web/api`, or `web/api@0:10.0.0.1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceSelector {
    process: ProcessKey,
    host: Option<String>,
}

impl std::str::FromStr for InstanceSelector {
    type Err = String;

    fn from_str(text: &str) -> Result<InstanceSelector, String> {
        let (process, host) = match text.split_once('@') {
            Some((process, host)) => (process, Some(host.to_owned()).filter(|host| !host.is_empty())),
            None => (text, None),
        };
        let process = process.parse().map_err(|error| format!("{error}"))?;
        Ok(InstanceSelector { process, host })
    }
}

impl InstanceSelector {
    pub fn matches(&self, key: &InstanceKey) -> bool {
        let on = |pattern: &String| {
            let host = key.host.to_string();
            glob(pattern, &host) || host.split_once(':').is_some_and(|(_, address)| glob(pattern, address))
        };
        key.process() == self.process && self.host.as_ref().is_none_or(on)
    }
}

/// How long, and why.
#[derive(Debug, clap::Args)]
pub struct HoldArgs {
    /// Until when: a duration such as 2h, or a time; left out: until it is released
    #[arg(long, value_name = "TIME", env = "ABIDE_UNTIL", value_parser = parse_until)]
    pub until: Option<Until>,
    /// Why, for whoever finds it
    #[arg(long, value_name = "TEXT", env = "ABIDE_REASON")]
    pub reason: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Until {
    After(u64),
    At(Time),
}

fn parse_until(text: &str) -> Result<Until, String> {
    match (seconds(text), clock::read(text)) {
        (Some(secs), _) => Ok(Until::After(secs)),
        (None, Some(time)) if time <= now() => Err("that is over already".to_owned()),
        (None, Some(time)) => Ok(Until::At(time)),
        (None, None) => Err("a duration such as 2h, or a time such as 2026-11-16T08:00:00Z".to_owned()),
    }
}

impl Until {
    fn time(self) -> Time {
        match self {
            Until::After(secs) => now().after_secs(secs),
            Until::At(time) => time,
        }
    }
}

/// Do it now, and leave it so: `watch` and `apply` do not undo it until it is released
#[derive(Debug, clap::Args)]
pub struct OperateArgs {
    #[command(flatten)]
    pub whom: InstanceArgs,
    #[command(flatten)]
    pub terms: HoldArgs,
}

/// End holds: manifests decide again
#[derive(Debug, clap::Args)]
pub struct ReleaseArgs {
    #[command(flatten)]
    pub whom: InstanceArgs,
}

/// Leave a namespace, or everything, alone until it is resumed
#[derive(Debug, clap::Args)]
pub struct PauseArgs {
    /// The namespace
    #[arg(value_name = "NAMESPACE", required_unless_present = "all")]
    pub namespace: Option<Name>,
    /// Everything
    #[arg(long, env = "ABIDE_ALL", value_parser = parse_switch, conflicts_with = "namespace")]
    pub all: bool,
    #[command(flatten)]
    pub terms: HoldArgs,
    #[command(flatten)]
    pub target: TargetArgs,
}

/// End a pause
#[derive(Debug, clap::Args)]
pub struct ResumeArgs {
    /// The namespace; left out: the pause of everything
    #[arg(value_name = "NAMESPACE")]
    pub namespace: Option<Name>,
    /// The pause of everything
    #[arg(long, env = "ABIDE_ALL", value_parser = parse_switch, conflicts_with = "namespace")]
    pub all: bool,
    #[command(flatten)]
    pub target: TargetArgs,
}

pub fn operate(op: Op, args: &OperateArgs, printer: &Printer) -> Result<Exit, Failure> {
    let live = args.whom.target.connect_or_start()?;
    runtime()?.block_on(operate_and_hold(op, args, &live, printer))
}

/// Everything that is there, and what is known of it beside.
async fn observe_all(live: &ConnectedTarget) -> Result<Observation, Failure> {
    live.observe_for(&Desired::default(), Some(BTreeSet::new())).await
}

/// The instances that are meant; a name that means nothing is a mistake.
fn select_instances<'a>(
    whom: &InstanceArgs,
    observed: &'a Observed,
) -> Result<Vec<(&'a InstanceKey, &'a ObservedInstance)>, Failure> {
    let selection = whom.select.selection();
    let is = |key: &InstanceKey, seen: &ObservedInstance| {
        whom.matches(key) && selection.means(key, None, &seen.labels)
    };
    for one in &whom.processes {
        if !observed.instances.keys().any(|key| one.matches(key)) {
            let host = one.host.as_ref().map(|host| format!(" on {host}")).unwrap_or_default();
            let message = format!("there is no process {}{host}", one.process);
            return Err(Failure::new(Exit::Failed, message).hint("`abide get processes` lists them"));
        }
    }
    let found: Vec<_> = observed.instances.iter().filter(|(key, seen)| is(key, seen)).collect();
    if found.is_empty() {
        return Err(Failure::new(Exit::Failed, "no instance is in this selection"));
    }
    Ok(found)
}

async fn operate_and_hold(
    op: Op,
    args: &OperateArgs,
    live: &ConnectedTarget,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let (world, caps) = (observe_all(live).await?, live.caps());
    let observed = world.remembered();
    let instances = select_instances(&args.whom, &observed)?;
    let unknown: BTreeSet<&HostKey> =
        instances.iter().map(|(key, _)| &key.host).filter(|host| observed.gaps.contains_key(host)).collect();
    if let Some(host) = unknown.first() {
        return Err(Failure::new(
            Exit::Unreachable,
            format!("host {host}: no agent is connected; nothing was done"),
        ));
    }
    if let Some((key, seen)) = instances.iter().find(|(key, _)| world.is_foreign(key)) {
        let pid = seen.pid.map(|pid| format!(" (pid {pid})")).unwrap_or_default();
        let message =
            format!("{key}: process{pid} was not started by Abide and has no owner; nothing was done");
        return Err(Failure::refused(HoldReason::NotOwned.word(), message)
            .hint("`abide apply --adopt` takes it over without a restart"));
    }
    let steps: Vec<Step> = instances.iter().map(|(key, seen)| step(op, key, seen, &world, &caps)).collect();
    // Whoever neither keeps specs nor is sent one knows nothing of the process.
    let keeps = caps.reads_specs || caps.operates_on_registered_spec;
    if let Some(step) = steps.iter().find(|step| !keeps && step.spec.is_none()) {
        let message = format!("nobody knows what {} was given; nothing was done", step.instance);
        return Err(Failure::new(Exit::Failed, message).hint("`abide apply` its manifest once"));
    }
    // The hold stands before the operation is sent: nobody undoes it in between.
    let by = history::user();
    let until = args.terms.until.map(Until::time);
    let mut txn = Txn::default();
    for (key, _) in &instances {
        let hold = Hold {
            instance: (*key).clone(),
            by: by.clone(),
            reason: Some(args.terms.reason.clone().unwrap_or_else(|| format!("{op} by hand"))),
            until,
        };
        txn = txn.and(Txn::put(format!("hold/{key}"), serde_json::to_vec(&hold).unwrap_or_default()));
    }
    live.state.txn(txn).await.map_err(|error| Failure::new(Exit::Unreachable, error.to_string()))?;
    let many = steps.len();
    let failed = execute_steps(steps, live, &observed, OPERATION_TIMEOUT, printer).await;
    let held = count(many, "instance");
    let processes: BTreeSet<ProcessKey> = instances.iter().map(|(key, _)| key.process()).collect();
    let release = release_command(&processes);
    if failed > 0 {
        printer.styled(&format!("{BOLD}{op}{BOLD:#}: {} of {held}\n", many - failed));
        printer.info(&format!("the hold stays: run {op} again, or end the hold with `{release}`"));
        return Ok(Exit::Incomplete);
    }
    let until = match until {
        Some(time) => format!("until {time}"),
        None => format!("until it is released: `{release}`"),
    };
    printer.styled(&format!("{BOLD}{op}{BOLD:#}: {many} of {held}; held {until}\n"));
    Ok(Exit::Done)
}

/// The command that ends the holds of these processes.
fn release_command(processes: &BTreeSet<ProcessKey>) -> String {
    const MAX_LISTED: usize = 3;
    let names: Vec<String> = processes.iter().take(MAX_LISTED).map(ProcessKey::to_string).collect();
    let more = if processes.len() > MAX_LISTED { " …" } else { "" };
    format!("abide release {}{more}", names.join(" "))
}

/// Does it, and tells what did not end well: of how many that is so.
pub(super) async fn execute_steps(
    steps: Vec<Step>,
    live: &ConnectedTarget,
    observed: &Observed,
    time: Duration,
    printer: &Printer,
) -> usize {
    let (whom, deadline) = ((live.name.as_str(), live.caps()), Instant::now() + time);
    let all = execute_manual(steps, &live.backend, &live.state, whom, observed, deadline).await;
    let mut failed = 0;
    for StepResult { instance, op, outcome, code, message, .. } in &all {
        let message = message.lines().map(visible).collect::<Vec<_>>().join("\n    ");
        match (outcome, code) {
            (StepOutcome::Done, _) => {}
            // Somebody who starts what runs has what he wants, whatever it runs with.
            (StepOutcome::AlreadySo, _) | (StepOutcome::Failed, 828) => {
                printer.info(&format!("{instance}: {message}"));
            }
            (StepOutcome::Failed | StepOutcome::Skipped, _) => {
                failed += 1;
                printer
                    .to_stderr(&format!("{ERROR}failed{ERROR:#} {op} {instance}: {message} (code {code})\n"));
            }
            (StepOutcome::TimedOut | StepOutcome::Unknown, _) => {
                failed += 1;
                printer.to_stderr(&format!("{ERROR}unknown{ERROR:#} {op} {instance}: {message}\n"));
            }
        }
    }
    failed
}

pub fn release(args: &ReleaseArgs, printer: &Printer) -> Result<Exit, Failure> {
    let live = args.whom.target.connect_or_start()?;
    runtime()?.block_on(async {
        let (holds, _) = live.restraints().await?;
        let observed = observe_all(&live).await?.remembered();
        let (selection, none) = (args.whom.select.selection(), BTreeMap::new());
        let is = |hold: &&Hold| {
            // What is gone has no labels.
            let labels = observed.instances.get(&hold.instance).map_or(&none, |seen| &seen.labels);
            args.whom.matches(&hold.instance) && selection.means(&hold.instance, None, labels)
        };
        let released: Vec<&Hold> = holds.iter().filter(is).collect();
        let txn = released
            .iter()
            .fold(Txn::default(), |txn, hold| txn.and(Txn::delete(format!("hold/{}", hold.instance))));
        if !txn.writes.is_empty() {
            live.state.txn(txn).await.map_err(|error| Failure::new(Exit::Unreachable, error.to_string()))?;
        }
        printer.styled(&format!("{BOLD}released{BOLD:#}: {}\n", count(released.len(), "hold")));
        Ok(Exit::Done)
    })
}

pub fn pause(args: &PauseArgs, printer: &Printer) -> Result<Exit, Failure> {
    let live = args.target.connect_or_start()?;
    let pause = Pause {
        namespace: args.namespace.clone(),
        by: history::user(),
        reason: args.terms.reason.clone(),
        until: args.terms.until.map(Until::time),
    };
    let key = Pause::store_key(args.namespace.as_ref());
    let value = serde_json::to_vec(&pause).unwrap_or_default();
    let written = runtime()?.block_on(live.state.txn(Txn::put(key, value)));
    written.map_err(|error| Failure::new(Exit::Unreachable, error.to_string()))?;
    let what = args.namespace.as_ref().map_or("everything".to_owned(), |name| format!("namespace {name}"));
    let until = pause.until.map_or("until it is resumed".to_owned(), |time| format!("until {time}"));
    printer.styled(&format!("{BOLD}paused{BOLD:#}: {what}, {until}\n"));
    Ok(Exit::Done)
}

pub fn resume(args: &ResumeArgs, printer: &Printer) -> Result<Exit, Failure> {
    let live = args.target.connect_or_start()?;
    let paused = runtime()?.block_on(async {
        let (_, pauses) = live.restraints().await?;
        let deleted = live.state.txn(Txn::delete(Pause::store_key(args.namespace.as_ref()))).await;
        deleted.map_err(|error| Failure::new(Exit::Unreachable, error.to_string()))?;
        Ok::<_, Failure>(pauses.iter().any(|pause| pause.namespace == args.namespace))
    })?;
    let what = args.namespace.as_ref().map_or("everything".to_owned(), |name| format!("namespace {name}"));
    printer.styled(&match paused {
        true => format!("{BOLD}resumed{BOLD:#}: {what}\n"),
        false => format!("nothing was paused: {what}\n"),
    });
    Ok(Exit::Done)
}
