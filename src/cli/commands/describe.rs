//! `abide describe`: specs, facts, hold, changes and next action of one process.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::cli::args::PlainForm;
use crate::cli::commands::manual::InstanceArgs;
use crate::cli::declared_names::DeclaredNames;
use crate::cli::output::print::{BOLD, DIM, Printer, visible};
use crate::cli::sync_status::{ProcessStatus, statuses};
use crate::cli::target::{ConnectedTarget, LocalStart, runtime};
use crate::cli::{Exit, Failure};
use crate::contract::{HistoryEntry, HoldDetails, InstanceChange, ProcessDetails, TargetProcess};
use crate::control::history::changes;
use crate::model::ProcessKey;
use crate::store::{Store, keys};

/// Show all details of one process or instance
#[derive(Debug, clap::Args)]
pub struct DescribeArgs {
    #[command(flatten)]
    pub whom: InstanceArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_DESCRIBE_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

pub fn run(args: &DescribeArgs, printer: &Printer) -> Result<Exit, Failure> {
    let Some(live) = args.whom.target.connect(LocalStart::Never)? else {
        return Ok(nothing(args, None, printer));
    };
    let (rows, holds, statuses, history) = runtime()?.block_on(async {
        let selection = args.whom.select.selection();
        let named = args.whom.names().map(|name| name.namespace.clone());
        let namespaces: BTreeSet<_> = named.chain(selection.named_namespaces()).collect();
        let mut rows = live.rows("&attempts=1", namespaces).await?;
        let is_instance = |name: &ProcessKey| rows.iter().any(|row| row.instance().process() == *name);
        let declared = match args.whom.names().all(is_instance) {
            true => DeclaredNames::default(),
            false => DeclaredNames::read(&live).await,
        };
        rows.retain(|row| declared.means(&args.whom, &selection, row.instance(), row.labels()));
        for row in rows.iter_mut().take(MAX_MEASURED) {
            measure(&live, row).await;
        }
        let history = live.state.range(keys::HISTORY_PREFIX, None, usize::MAX).await.map(|page| page.entries);
        let history: Vec<HistoryEntry> = history
            .unwrap_or_default()
            .iter()
            .filter_map(|entry| serde_json::from_slice(&entry.value).ok())
            .collect();
        Ok::<_, Failure>((rows, live.restraints().await?.0, statuses(&live).await?, history))
    })?;
    let rows: Vec<Value> = rows
        .into_iter()
        .map(|row| {
            let hold = holds.iter().find(|hold| hold.instance == *row.instance()).map(HoldDetails::from);
            let changes = changes(&history, row.instance());
            let status = statuses.get(row.instance());
            let mut row = serde_json::to_value(details(row, hold, status, changes)).unwrap_or_default();
            redact_secrets(&mut row);
            row
        })
        .collect();
    if rows.is_empty() {
        let named: Vec<_> = args.whom.names().map(|name| name.namespace.clone()).collect();
        runtime()?.block_on(live.check_namespaces(&named))?;
        return Ok(nothing(args, live.list_note(), printer));
    }
    match args.output {
        PlainForm::Json => printer.data(&format!("{:#}\n", Value::Array(rows))),
        PlainForm::Text => printer.styled(&rows.iter().map(render).collect::<String>()),
    }
    Ok(Exit::Done)
}

/// Reports that the target has no such process. A reading verb exits with 0 then.
fn nothing(args: &DescribeArgs, note: Option<String>, printer: &Printer) -> Exit {
    let names: Vec<String> = args.whom.processes.iter().map(ToString::to_string).collect();
    let target = &args.whom.target.target;
    printer.info(&match names.is_empty() {
        true => format!("target {target} has no process that matches the selection"),
        false => format!("target {target} has no process {}", names.join(", ")),
    });
    printer.info(&note.unwrap_or_else(|| "`abide get processes` lists them".to_owned()));
    if args.output == PlainForm::Json {
        printer.data("[]\n");
    }
    Exit::Done
}

/// Maximum instances whose figures are measured; the others have those of the last sample.
const MAX_MEASURED: usize = 10;

/// Replaces the figures of a running process by fresh ones, where the agent answers.
async fn measure(live: &ConnectedTarget, row: &mut TargetProcess) {
    let (Ok(abide), TargetProcess::Gateway(process)) = (live.abide(), row) else { return };
    if process.running
        && let Ok(series) = abide.figures(&process.instance).await
    {
        process.figures = series.now.or(process.figures.take());
    }
}

fn details(
    mut process: TargetProcess,
    hold: Option<HoldDetails>,
    status: Option<&ProcessStatus>,
    changes: Vec<InstanceChange>,
) -> ProcessDetails {
    let mut sync = status.map(|status| status.sync);
    // The row of another platform has the field already.
    if let TargetProcess::Observed(process) = &mut process
        && let Some(sync) = sync.take()
    {
        process.row.sync = sync;
    }
    let next_action = status.map(|status| status.next.clone());
    ProcessDetails { process, hold, sync, next_action, changes }
}

/// A row as text: one line per field, nested values as YAML.
fn render(row: &Value) -> String {
    let mut text = format!("{BOLD}{}{BOLD:#}\n", visible(row["instance"].as_str().unwrap_or_default()));
    for (name, value) in row.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        let shown = match value {
            Value::String(text) if text.is_empty() => continue,
            Value::String(text) => visible(text),
            Value::Object(map) if map.is_empty() => continue,
            Value::Object(_) | Value::Array(_) => {
                let yaml = serde_yaml::to_string(value).unwrap_or_default();
                let lines: Vec<String> = yaml.lines().map(|line| format!("    {}", visible(line))).collect();
                format!("\n{}", lines.join("\n"))
            }
            other => other.to_string(),
        };
        text.push_str(&format!("  {DIM}{name:<14}{DIM:#} {shown}\n"));
    }
    text
}

/// Replaces secret values of `env` with a marker.
fn redact_secrets(row: &mut Value) {
    for spec in ["spec", "live_spec"] {
        for value in row[spec]["env"].as_object_mut().into_iter().flat_map(|env| env.values_mut()) {
            if value["secret"] == true {
                *value = json!({"secret": true});
            }
        }
    }
    if let Some(ran) = row.get_mut("ran").and_then(Value::as_object_mut) {
        ran.remove("spec");
    }
}
