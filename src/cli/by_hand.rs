//! What a person does by hand: `start stop restart reload kill`, each recorded as a hold before it is sent, so that nothing
//! undoes it; `release`, which ends a hold; `pause` and `resume`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use super::args::switch;
use super::plan::args::Select;
use super::print::{BOLD, ERROR, Printer, count, visible};
use super::target::{Live, TargetArgs, runtime};
use super::{Exit, Failure};
use crate::clock::{self, moment};
use crate::control::history;
use crate::execute::by_hand::{by_hand, step};
use crate::execute::world::World;
use crate::execute::{Ended, Outcome};
use crate::model::{
    Desired, Hold, HostKey, InstanceKey, Name, Observed, Op, Pause, ProcessKey, Reason, Seen, Step, Time,
    glob, seconds,
};
use crate::store::{Store, Txn};

/// How long what was sent may take.
const TIME: Duration = Duration::from_secs(600);

/// Which instances are meant.
#[derive(Debug, clap::Args)]
pub struct Whom {
    /// The process, or one of its instances: NS/NAME or NS/NAME@HOST (repeatable)
    // A namespace or a host alone, from a variable perhaps, names nobody.
    #[arg(value_name = "NS/NAME[@HOST]", required_unless_present_any = ["selector", "include"])]
    pub processes: Vec<Meant>,
    #[command(flatten)]
    pub select: Select,
    #[command(flatten)]
    pub target: TargetArgs,
}

impl Whom {
    /// By its name, where names were typed.
    fn names(&self, key: &InstanceKey) -> bool {
        self.processes.is_empty() || self.processes.iter().any(|one| one.is(key))
    }
}

/// `web/api`, or `web/api@0:10.0.0.1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meant {
    process: ProcessKey,
    host: Option<String>,
}

impl std::str::FromStr for Meant {
    type Err = String;

    fn from_str(text: &str) -> Result<Meant, String> {
        let (process, host) = match text.split_once('@') {
            Some((process, host)) => (process, Some(host.to_owned()).filter(|host| !host.is_empty())),
            None => (text, None),
        };
        let process = process.parse().map_err(|error| format!("{error}"))?;
        Ok(Meant { process, host })
    }
}

impl Meant {
    pub fn is(&self, key: &InstanceKey) -> bool {
        let on = |pattern: &String| {
            let host = key.host.to_string();
            glob(pattern, &host) || host.split_once(':').is_some_and(|(_, address)| glob(pattern, address))
        };
        key.process() == self.process && self.host.as_ref().is_none_or(on)
    }
}

/// How long, and why.
#[derive(Debug, clap::Args)]
pub struct Terms {
    /// Until when: a duration such as 2h, or a time; left out: until it is released
    #[arg(long, value_name = "TIME", env = "ABIDE_UNTIL", value_parser = until)]
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

fn until(text: &str) -> Result<Until, String> {
    match (seconds(text), clock::read(text)) {
        (Some(secs), _) => Ok(Until::After(secs)),
        (None, Some(time)) if time <= moment() => Err("that is over already".to_owned()),
        (None, Some(time)) => Ok(Until::At(time)),
        (None, None) => Err("a duration such as 2h, or a time such as 2026-11-16T08:00:00Z".to_owned()),
    }
}

impl Until {
    fn time(self) -> Time {
        match self {
            Until::After(secs) => moment().after_secs(secs),
            Until::At(time) => time,
        }
    }
}

/// Do it now, and leave it so: `watch` and `apply` do not undo it until it is released
#[derive(Debug, clap::Args)]
pub struct ByHand {
    #[command(flatten)]
    pub whom: Whom,
    #[command(flatten)]
    pub terms: Terms,
}

/// End holds: manifests decide again
#[derive(Debug, clap::Args)]
pub struct Release {
    #[command(flatten)]
    pub whom: Whom,
}

/// Leave a namespace, or everything, alone until it is resumed
#[derive(Debug, clap::Args)]
pub struct Stay {
    /// The namespace
    #[arg(value_name = "NAMESPACE", required_unless_present = "all")]
    pub namespace: Option<Name>,
    /// Everything
    #[arg(long, env = "ABIDE_ALL", value_parser = switch, conflicts_with = "namespace")]
    pub all: bool,
    #[command(flatten)]
    pub terms: Terms,
    #[command(flatten)]
    pub target: TargetArgs,
}

/// End a pause
#[derive(Debug, clap::Args)]
pub struct Resume {
    /// The namespace; left out: the pause of everything
    #[arg(value_name = "NAMESPACE")]
    pub namespace: Option<Name>,
    /// The pause of everything
    #[arg(long, env = "ABIDE_ALL", value_parser = switch, conflicts_with = "namespace")]
    pub all: bool,
    #[command(flatten)]
    pub target: TargetArgs,
}

pub fn operate(op: Op, args: &ByHand, printer: &Printer) -> Result<Exit, Failure> {
    let live = args.whom.target.reach()?;
    runtime()?.block_on(act(op, args, &live, printer))
}

/// Everything that is there, and what is known of it beside.
async fn look(live: &Live) -> Result<World, Failure> {
    live.world(&Desired::default(), Some(BTreeSet::new())).await
}

/// The instances that are meant; a name that means nothing is a mistake.
fn meant<'a>(whom: &Whom, observed: &'a Observed) -> Result<Vec<(&'a InstanceKey, &'a Seen)>, Failure> {
    let selection = whom.select.selection();
    let is = |key: &InstanceKey, seen: &Seen| whom.names(key) && selection.means(key, None, &seen.labels);
    for one in &whom.processes {
        if !observed.instances.keys().any(|key| one.is(key)) {
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

async fn act(op: Op, args: &ByHand, live: &Live, printer: &Printer) -> Result<Exit, Failure> {
    let (world, caps) = (look(live).await?, live.caps());
    let observed = world.remembered();
    let instances = meant(&args.whom, &observed)?;
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
        return Err(Failure::refused(Reason::NotOwned.word(), message)
            .hint("`abide apply --adopt` takes it over without a restart"));
    }
    let steps: Vec<Step> = instances.iter().map(|(key, seen)| step(op, key, seen, &world, &caps)).collect();
    // Whoever neither keeps specs nor is sent one knows nothing of the process.
    let keeps = caps.reads_specs || caps.uses_given;
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
    let failed = carry_out(steps, live, &observed, TIME, printer).await;
    let held = count(many, "instance");
    let processes: BTreeSet<ProcessKey> = instances.iter().map(|(key, _)| key.process()).collect();
    let release = release_command(&processes);
    if failed > 0 {
        printer.styled(&format!("{BOLD}{op}{BOLD:#}: {} of {held}\n", many - failed));
        printer.remark(&format!("the hold stays: run {op} again, or end the hold with `{release}`"));
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
    const MOST: usize = 3;
    let names: Vec<String> = processes.iter().take(MOST).map(ProcessKey::to_string).collect();
    let more = if processes.len() > MOST { " …" } else { "" };
    format!("abide release {}{more}", names.join(" "))
}

/// Does it, and tells what did not end well: of how many that is so.
pub(super) async fn carry_out(
    steps: Vec<Step>,
    live: &Live,
    observed: &Observed,
    time: Duration,
    printer: &Printer,
) -> usize {
    let (whom, deadline) = ((live.name.as_str(), live.caps()), Instant::now() + time);
    let all = by_hand(steps, &live.backend, &live.state, whom, observed, deadline).await;
    let mut failed = 0;
    for Ended { instance, op, outcome, code, message, .. } in &all {
        let message = message.lines().map(visible).collect::<Vec<_>>().join("\n    ");
        match (outcome, code) {
            (Outcome::Done, _) => {}
            // Somebody who starts what runs has what he wants, whatever it runs with.
            (Outcome::AlreadySo, _) | (Outcome::Failed, 828) => {
                printer.remark(&format!("{instance}: {message}"));
            }
            (Outcome::Failed | Outcome::Skipped, _) => {
                failed += 1;
                printer
                    .to_stderr(&format!("{ERROR}failed{ERROR:#} {op} {instance}: {message} (code {code})\n"));
            }
            (Outcome::TimedOut | Outcome::Unknown, _) => {
                failed += 1;
                printer.to_stderr(&format!("{ERROR}unknown{ERROR:#} {op} {instance}: {message}\n"));
            }
        }
    }
    failed
}

pub fn release(args: &Release, printer: &Printer) -> Result<Exit, Failure> {
    let live = args.whom.target.reach()?;
    runtime()?.block_on(async {
        let (holds, _) = live.restraints().await?;
        let observed = look(&live).await?.remembered();
        let (selection, none) = (args.whom.select.selection(), BTreeMap::new());
        let is = |hold: &&Hold| {
            // What is gone has no labels.
            let labels = observed.instances.get(&hold.instance).map_or(&none, |seen| &seen.labels);
            args.whom.names(&hold.instance) && selection.means(&hold.instance, None, labels)
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

pub fn pause(args: &Stay, printer: &Printer) -> Result<Exit, Failure> {
    let live = args.target.reach()?;
    let pause = Pause {
        namespace: args.namespace.clone(),
        by: history::user(),
        reason: args.terms.reason.clone(),
        until: args.terms.until.map(Until::time),
    };
    let key = Pause::place(args.namespace.as_ref());
    let value = serde_json::to_vec(&pause).unwrap_or_default();
    let written = runtime()?.block_on(live.state.txn(Txn::put(key, value)));
    written.map_err(|error| Failure::new(Exit::Unreachable, error.to_string()))?;
    let what = args.namespace.as_ref().map_or("everything".to_owned(), |name| format!("namespace {name}"));
    let until = pause.until.map_or("until it is resumed".to_owned(), |time| format!("until {time}"));
    printer.styled(&format!("{BOLD}paused{BOLD:#}: {what}, {until}\n"));
    Ok(Exit::Done)
}

pub fn resume(args: &Resume, printer: &Printer) -> Result<Exit, Failure> {
    let live = args.target.reach()?;
    let paused = runtime()?.block_on(async {
        let (_, pauses) = live.restraints().await?;
        let deleted = live.state.txn(Txn::delete(Pause::place(args.namespace.as_ref()))).await;
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
