//! `abide history`: applied revisions of an owner, with plan and outcome.

use crate::cli::args::PlainForm;
use crate::cli::commands::rollback::describe_pin;
use crate::cli::commands::watch::source::short_id;
use crate::cli::output::age::local_and_age;
use crate::cli::output::print::{Printer, WARNING, visible};
use crate::cli::output::table::{Align, Table};
use crate::cli::target::{LocalStart, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::clock::now;
use crate::contract::{self, HistoryEntry};
use crate::engine::{history, pin};
use crate::model::Time;
use crate::store::Error;

/// Show applied revisions and their outcomes
#[derive(Debug, clap::Args)]
pub struct HistoryArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// Owner to show the history of [default: the config file's owner, else `default`]
    #[arg(long, value_name = "NAME", env = "ABIDE_OWNER")]
    pub owner: Option<String>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_HISTORY_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

pub fn run(args: &HistoryArgs, printer: &Printer) -> Result<Exit, Failure> {
    let owner = args.target.owner_or_default(args.owner.as_deref())?;
    let (mut entries, pinned) = match args.target.connect(LocalStart::Never)? {
        None => (Vec::new(), None),
        Some(live) => {
            let read = runtime()?.block_on(async {
                let newest = history::newest(&live.state, &owner, history::MAX_ENTRIES).await?;
                Ok((newest, pin::read(&live.state, &owner).await?))
            });
            let (newest, pinned) = read.map_err(|error: Error| live.failure(&error))?;
            (newest, pinned.map(|(pin, _)| pin))
        }
    };
    for entry in entries.iter_mut() {
        if pinned.as_ref().is_some_and(|pin| entry.revision == pin.revision.as_str()) {
            entry.pinned = Some(true);
        }
    }
    if args.output == PlainForm::Json {
        printer.data(&contract::pretty(&entries));
        return Ok(Exit::Done);
    }
    if entries.is_empty() {
        printer.styled(&format!("owner {owner:?} has no applied revisions\n"));
    }
    if let Some(pin) = &pinned {
        printer.styled(&format!(
            "{WARNING}pinned{WARNING:#} to {}; `abide rollback --unpin` ends it\n",
            describe_pin(pin)
        ));
    }
    if !entries.is_empty() {
        printer.styled(&table(&entries, now()));
    }
    Ok(Exit::Done)
}

/// One line per applied revision, the newest first. Times are in the host's zone.
fn table(entries: &[HistoryEntry], now: Time) -> String {
    let columns = ["WHEN", "REVISION", "COMMIT", "SOURCE", "BY", "OPERATIONS", "OUTCOME"];
    let mut table = Table::new(columns.map(|name| (name, Align::Left)));
    for entry in entries {
        let operations: Vec<String> =
            entry.summary.operations().map(|(op, many)| format!("{many} {op}")).collect();
        let or_none = |text: String| if text.is_empty() { "-".to_owned() } else { text };
        table.row(vec![
            visible(&local_and_age(&entry.at, now).unwrap_or_else(|| entry.at.clone())),
            visible(&entry.revision).chars().take(12).collect(),
            entry.commit.as_deref().map_or("-".to_owned(), short_id),
            visible(&entry.source),
            visible(&entry.by),
            or_none(operations.join(", ")),
            outcome(entry),
        ]);
    }
    table.text()
}

/// End of the run, and the message of its first failure: it is usually the cause of the others.
fn outcome(entry: &HistoryEntry) -> String {
    let end = match entry.exit {
        Some(0) => "converged".to_owned(),
        Some(code) if code == Exit::Incomplete as u8 => format!("not converged (exit {code})"),
        Some(code) => format!("exit {code}"),
        None => "in flight, or interrupted".to_owned(),
    };
    let mut parts = vec![end];
    parts.extend((entry.pinned == Some(true)).then(|| "pinned".to_owned()));
    parts.extend(
        entry
            .break_glass
            .iter()
            .map(|reason| format!("break-glass by {}: {}", visible(&entry.by), visible(reason))),
    );
    if !entry.signed_by.is_empty() {
        let persons: Vec<String> = entry.signed_by.iter().map(|person| visible(person)).collect();
        parts.push(format!("signed by {}", persons.join(", ")));
    }
    if let Some(step) = entry.steps.iter().find(|step| !step.message.is_empty()) {
        let message = step.message.lines().map(visible).collect::<Vec<_>>().join(" ");
        parts.push(format!("{} {}: {message}", step.op, visible(&step.instance.to_string())));
    }
    parts.join("; ")
}
