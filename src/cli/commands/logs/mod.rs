//! `abide logs`: logs of processes on a target, of several at once with prefixes.
//!
//! The agents read the logs, and the gateway streams them. [`reader`] reads one log, [`output`] prints lines.

mod output;
mod reader;

use std::collections::BTreeSet;

use tokio::sync::mpsc;

use self::output::LogPrinter;
use self::reader::{LogEvent, LogReader, LogUpdate};
use super::manual::{InstanceArgs, InstanceSelector};
use crate::backend::{Abide, AnyBackend, Backend};
use crate::cli::args::{InvalidValue, parse_switch};
use crate::cli::commands::status::warn_not_running;
use crate::cli::declared_names::DeclaredNames;
use crate::cli::output::print::{Printer, count};
use crate::cli::target::access::forbidden;
use crate::cli::target::{ConnectedTarget, LocalStart, runtime};
use crate::cli::{Exit, Failure};
use crate::clock::{self, now};
use crate::contract::TargetProcess;
use crate::model::{InstanceKey, ProcessKey, Time, seconds};

/// Print the logs of processes
///
/// The log of a process is the file at its log_path with its rotated files, and the output that the agent stores: of
/// failed starts, one-shots and scheduled runs. The agent reads it with the rights of the process's user.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  abide logs sample/hello -f --tail 20\n  abide logs web/api@0:10.0.0.7 --since 1h --target prod\n  abide logs -l tier=front -f --target prod"
)]
pub struct LogsArgs {
    #[command(flatten)]
    pub instances: InstanceArgs,
    /// Follow the logs until Ctrl-C, across restarts and rotation
    #[arg(short, long, env = "ABIDE_FOLLOW", value_parser = parse_switch)]
    pub follow: bool,
    /// Start with the last N lines
    #[arg(long, value_name = "N", env = "ABIDE_TAIL")]
    pub tail: Option<u64>,
    /// Start with lines since a time: a duration such as 10m, or a time such as 2026-11-16T08:00:00Z
    ///
    /// A line that begins with a date and time is compared by it. A file or run without such lines is printed whole if it
    /// was written since.
    #[arg(long, value_name = "TIME", env = "ABIDE_SINCE", value_parser = parse_since)]
    pub since: Option<Time>,
}

/// Maximum logs that are followed at once.
const MAX_LOGS: usize = 100;
/// Updates that wait for the terminal. Readers wait above it.
const MAX_QUEUED: usize = 64;

fn parse_since(text: &str) -> Result<Time, InvalidValue> {
    match (seconds(text), clock::read(text)) {
        (Some(secs), _) => {
            Ok(Time(now().0.saturating_sub(i64::try_from(secs).unwrap_or(i64::MAX).saturating_mul(1000))))
        }
        (None, Some(time)) => Ok(time),
        (None, None) => Err(InvalidValue("a duration such as 10m, or a time such as 2026-11-16T08:00:00Z")),
    }
}

pub fn run(args: &LogsArgs, printer: &Printer) -> Result<Exit, Failure> {
    let Some(live) = args.instances.target.connect(LocalStart::Never)? else {
        warn_not_running(&args.instances.target, printer)?;
        printer.info(&unknown(args));
        return Ok(Exit::Done);
    };
    let AnyBackend::Abide(abide) = &live.backend else {
        let (name, dialect) = (&live.name, live.backend.dialect().name());
        let message = format!(
            "target {name} has dialect {dialect}, which has no logs: `abide logs` needs dialect abide"
        );
        return Err(Failure::new(Exit::Usage, message));
    };
    runtime()?.block_on(async {
        tokio::select! {
            printed = print_logs(args, &live, abide, printer) => printed,
            _ = tokio::signal::ctrl_c() => Ok(Exit::Interrupted),
        }
    })
}

async fn print_logs(
    args: &LogsArgs,
    live: &ConnectedTarget,
    abide: &Abide,
    printer: &Printer,
) -> Result<Exit, Failure> {
    let keys = select(args, live, printer).await?;
    if keys.is_empty() {
        printer.info(&unknown(args));
        return Ok(Exit::Done);
    }
    let mut out = LogPrinter::new(printer, &keys);
    let mut failures: Vec<Failure> = Vec::new();
    let readers = keys.iter().enumerate().map(|(nth, key)| LogReader::new(abide, nth, key, args));
    // Followed logs are printed as they grow, others one after the other.
    let groups: Vec<Vec<LogReader>> = match args.follow {
        true => vec![readers.collect()],
        false => readers.map(|reader| vec![reader]).collect(),
    };
    for group in groups {
        let (send, mut updates) = mpsc::channel(MAX_QUEUED);
        group.into_iter().for_each(|reader| drop(tokio::spawn(reader.run(send.clone()))));
        drop(send);
        while let Some(LogUpdate { nth, event }) = updates.recv().await {
            match event {
                LogEvent::Failed { exit, message } => {
                    let message = format!("{}: {message}", shown(&keys[nth]));
                    failures.push(match exit {
                        Exit::Forbidden => forbidden(message),
                        exit => Failure::new(exit, message),
                    });
                }
                event => out.print(nth, &event),
            }
            if printer.is_closed() || printer.failed() {
                return Ok(Exit::Done);
            }
        }
    }
    let Some(last) = failures.pop() else { return Ok(Exit::Done) };
    failures.iter().for_each(|failure| printer.failure(failure));
    Err(last)
}

/// Selects instances from the rows of the target, also those whose first start failed.
async fn select(
    args: &LogsArgs,
    live: &ConnectedTarget,
    printer: &Printer,
) -> Result<Vec<InstanceKey>, Failure> {
    let selection = args.instances.select.selection();
    let rows = live.rows("&brief=1&attempts=1", BTreeSet::new()).await?;
    let is_instance = |name: &ProcessKey| rows.iter().any(|row| row.instance().process() == *name);
    let declared = match args.instances.names().all(is_instance) {
        true => DeclaredNames::default(),
        false => DeclaredNames::read(live).await,
    };
    let is_meant =
        |row: &&TargetProcess| declared.selects(&args.instances, &selection, row.instance(), row.labels());
    let keys: BTreeSet<InstanceKey> =
        rows.iter().filter(is_meant).map(|row| row.instance().clone()).collect();
    if keys.is_empty() {
        live.check_namespaces(args.instances.processes.iter().map(InstanceSelector::namespace)).await?;
    } else if let Some(unknown) = declared.unknown_message(&args.instances, &keys.iter().collect::<Vec<_>>())
    {
        printer.info(&unknown);
    }
    if args.follow && keys.len() > MAX_LOGS {
        let selected = count(keys.len(), "instance");
        let message = format!("{selected} selected: at most {MAX_LOGS} logs can be followed at once");
        return Err(Failure::new(Exit::Usage, message).hint("select fewer, for example with --host or -l"));
    }
    Ok(keys.into_iter().collect())
}

fn unknown(args: &LogsArgs) -> String {
    let names: Vec<String> = args.instances.processes.iter().map(ToString::to_string).collect();
    let target = &args.instances.target.target;
    match names.is_empty() {
        true => format!("target {target} has no process that matches the selection"),
        false => format!("target {target} has no process {}", names.join(", ")),
    }
}

/// An instance as its selector.
fn shown(key: &InstanceKey) -> String {
    format!("{}@{}", key.process(), key.host)
}
