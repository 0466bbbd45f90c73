//! `abide start`, `stop`, `restart`, `reload` and `kill`: one operation on selected instances.
//!
//! `start`, `stop` and `kill` are recorded as holds.

use std::collections::BTreeSet;
use std::time::Duration;

use tokio::time::Instant;

use super::{HoldArgs, InstanceArgs, InstanceSelector, Until, observe_all};
use crate::backend::RowState;
use crate::cli::declared_names::{DeclaredNames, KnownNames};
use crate::cli::output::print::{BOLD, ERROR, Printer, count, visible};
use crate::cli::target::access::forbidden;
use crate::cli::target::{ConnectedTarget, TargetCause, runtime};
use crate::cli::{Exit, Failure};
use crate::engine::history;
use crate::engine::manual::{self, HoldTerms, OperateError};
use crate::execute::{StepOutcome, StepResult};
use crate::model::{HoldReason, InstanceKey, Observed, ObservedInstance, Op, ProcessKey};

/// Time limit for the operations of one command.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(600);

/// Operate on processes now
#[derive(Debug, clap::Args)]
pub struct OperateArgs {
    #[command(flatten)]
    pub instances: InstanceArgs,
    #[command(flatten)]
    pub terms: HoldArgs,
}

pub fn run(op: Op, args: &OperateArgs, printer: &Printer) -> Result<Exit, Failure> {
    let live = args.instances.target.connect_or_start(printer)?;
    runtime()?.block_on(operate(op, args, &live, printer))
}

/// The selected instances. A name that matches no instance is an error.
pub async fn select_instances<'a>(
    args: &InstanceArgs,
    observed: &'a Observed,
    live: &ConnectedTarget,
) -> Result<Vec<(&'a InstanceKey, &'a ObservedInstance)>, Failure> {
    // Always: a name may be that of an instance, and of a process with several instances.
    let declared = DeclaredNames::read(live).await;
    let known = KnownNames { declared: &declared, observed, recorded: Vec::new() };
    for one in &args.processes {
        if !known.has(one) {
            return Err(known.unknown(one, &live.name));
        }
        if !observed.instances.keys().any(|key| one.matches(key, declared.of(key))) {
            let message = format!("process {one} is declared and does not exist yet");
            return Err(Failure::new(Exit::Failed, message).hint("`abide apply` creates it"));
        }
    }
    let selection = args.select.selection();
    let is =
        |key: &InstanceKey, seen: &ObservedInstance| declared.selects(args, &selection, key, &seen.labels);
    let found: Vec<_> = observed.instances.iter().filter(|(key, seen)| is(key, seen)).collect();
    match found.is_empty() {
        true => Err(known.nothing_selected(&selection)),
        false => Ok(found),
    }
}

async fn operate(
    op: Op,
    args: &OperateArgs,
    live: &ConnectedTarget,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let observation = observe_all(live).await?;
    let observed = observation.remembered();
    let instances = match select_instances(&args.instances, &observed, live).await {
        Ok(instances) => instances,
        Err(failure) => {
            let named = args.instances.processes.iter().map(InstanceSelector::namespace);
            return Err(live.not_found(named, failure).await);
        }
    };
    live.check_operation(&instances).await?;
    let until = args.terms.until.map(Until::time);
    let is_held = manual::is_recorded_as_hold(op);
    if !is_held && (until.is_some() || args.terms.reason.is_some()) {
        printer.warning(&format!("{op} leaves no hold: --until and --reason have no effect"));
    }
    let terms = HoldTerms { by: history::user(), reason: args.terms.reason.clone(), until };
    let deadline = Instant::now() + OPERATION_TIMEOUT;
    let operating = manual::operate(op, &instances, (&observation, &observed), &terms, live, deadline);
    let results = operating.await.map_err(|error| failure(&error, live))?;
    let (many, failed) = (instances.len(), print_results(&results, printer));
    let all = count(many, "instance");
    let processes: BTreeSet<ProcessKey> = instances.iter().map(|(key, _)| key.process()).collect();
    let release = release_command(&processes);
    let done = format!("{BOLD}{op}{BOLD:#}: {} of {all}", many - failed);
    let hold = match until {
        _ if !is_held || failed > 0 => String::new(),
        Some(time) => format!("; held until {time}, or until it is released: `{release}`"),
        None => format!("; held until it is released: `{release}`"),
    };
    printer.styled(&format!("{done}{hold}\n"));
    if failed > 0 && is_held {
        printer.info(&format!("the hold stays: run {op} again, or end the hold with `{release}`"));
    }
    if results.iter().any(|result| result.state == RowState::Forbidden) {
        return Err(forbidden(format!("target {}: the app may not {op} every instance", live.name)));
    }
    if failed > 0 {
        return Ok(Exit::Incomplete);
    }
    Ok(Exit::Done)
}

/// The command that ends the holds of these processes.
fn release_command(processes: &BTreeSet<ProcessKey>) -> String {
    const MAX_LISTED: usize = 3;
    let names: Vec<String> = processes.iter().take(MAX_LISTED).map(ProcessKey::to_string).collect();
    let more = if processes.len() > MAX_LISTED { " …" } else { "" };
    format!("abide release {}{more}", names.join(" "))
}

fn failure(error: &OperateError, live: &ConnectedTarget) -> Failure {
    let message = error.to_string();
    match error {
        OperateError::Hold(cause) if cause.is_forbidden() => live.failure(cause),
        OperateError::NoAgent(_) | OperateError::Hold(_) => Failure::new(Exit::Unreachable, message),
        OperateError::NotOwned { .. } => Failure::refused(HoldReason::NotOwned.word(), message)
            .hint("`abide apply --adopt` takes it over without a restart"),
        OperateError::UnknownSpec(_) => {
            Failure::new(Exit::Failed, message).hint("run `abide apply` with its manifest once")
        }
    }
}

/// Prints the failures of manual operations. Returns their number.
pub fn print_results(results: &[StepResult], printer: &Printer) -> usize {
    let mut failed = 0;
    for StepResult { instance, op, outcome, state, code, message, .. } in results {
        let message = message.lines().map(visible).collect::<Vec<_>>().join("\n    ");
        match (outcome, state) {
            (StepOutcome::Done, _) => {}
            // The process runs already, which is the result that was requested.
            (StepOutcome::AlreadySo, _) | (StepOutcome::Failed, RowState::AlreadyRunning) => {
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
