//! `abide history`: applied revisions of an owner, with plan and outcome.

use crate::cli::args::PlainForm;
use crate::cli::commands::rollback::describe_pin;
use crate::cli::commands::watch::source::short_id;
use crate::cli::output::print::{DIM, Printer, WARNING, visible};
use crate::cli::target::{LocalStart, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::contract;
use crate::control::{history, pin};
use crate::store::Error;

/// Show applied revisions and their outcomes
#[derive(Debug, clap::Args)]
pub struct HistoryArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// Owner to show the history of
    #[arg(long, value_name = "NAME", env = "ABIDE_OWNER", default_value = "default")]
    pub owner: String,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_HISTORY_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

pub fn run(args: &HistoryArgs, printer: &Printer) -> Result<Exit, Failure> {
    let owner = args.target.owner_or(&args.owner)?;
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
    for entry in &entries {
        let operations: Vec<String> =
            entry.summary.operations().map(|(op, many)| format!("{many} {op}")).collect();
        let end = match entry.exit {
            Some(0) => "converged".to_owned(),
            Some(code) => format!("exit {code}"),
            None => "in flight, or interrupted".to_owned(),
        };
        let revision: String = visible(&entry.revision).chars().take(12).collect();
        let commit =
            entry.commit.as_deref().map(|commit| format!(" {}", short_id(commit))).unwrap_or_default();
        printer.styled(&format!(
            "{}  {DIM}{revision}{DIM:#}  {}{commit}  {}  {end}\n",
            visible(&entry.at),
            visible(&entry.source),
            operations.join(", ")
        ));
        // The first failure is usually the cause of the others.
        if let Some(step) = entry.steps.iter().find(|step| !step.message.is_empty()) {
            let message = step.message.lines().map(visible).collect::<Vec<_>>().join(" ");
            printer.styled(&format!("    {} {}: {message}\n", step.op, visible(&step.instance.to_string())));
        }
    }
    Ok(Exit::Done)
}
