//! `abide describe`: a summary of a process in sentences, then its facts, specs, hold, changes and next action.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use crate::cli::args::PlainForm;
use crate::cli::commands::manual::InstanceArgs;
use crate::cli::commands::status::warn_not_running;
use crate::cli::instance_details::{InstanceFacts, no_match};
use crate::cli::output::age::age_of;
use crate::cli::output::print::{BOLD, DIM, Printer, visible};
use crate::cli::process_listing;
use crate::cli::sync_status::ProcessStatus;
use crate::cli::target::{LocalStart, runtime};
use crate::cli::{Exit, Failure};
use crate::clock::now;
use crate::contract::{
    HoldDetails, InstanceChange, ListedProcess, NextAction, ProcessDetails, TargetProcess,
};
use crate::engine::history::changes;
use crate::model::{SyncStatus, Time};

/// Show all details of one process or instance
#[derive(Debug, clap::Args)]
pub struct DescribeArgs {
    #[command(flatten)]
    pub instances: InstanceArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_DESCRIBE_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

pub fn run(args: &DescribeArgs, printer: &Printer) -> Result<Exit, Failure> {
    let Some(live) = args.instances.target.connect(LocalStart::Never)? else {
        warn_not_running(&args.instances.target, printer)?;
        return Ok(nothing(args, None, printer));
    };
    let facts = runtime()?.block_on(InstanceFacts::read(&live, &args.instances))?;
    if facts.rows.is_empty() {
        let named: Vec<_> = args.instances.names().map(|name| name.namespace.clone()).collect();
        runtime()?.block_on(live.check_namespaces(&named))?;
        return Ok(nothing(args, live.list_note(), printer));
    }
    facts.missing.iter().for_each(|message| printer.info(message));
    let described = |row: &TargetProcess| {
        let instance = row.instance();
        let hold = facts.hold(instance).map(HoldDetails::from);
        let changes = changes(&facts.history, instance);
        let status = facts.statuses.get(instance);
        let mut value = serde_json::to_value(details(row.clone(), hold, status, changes)).unwrap_or_default();
        redact_secrets(&mut value);
        (Summary::of(row.clone(), status), value)
    };
    let rows: Vec<(Summary, Value)> = facts.rows.iter().map(described).collect();
    match args.output {
        PlainForm::Json => {
            let rows = rows.into_iter().map(|(_, row)| row).collect();
            printer.data(&format!("{:#}\n", Value::Array(rows)));
        }
        PlainForm::Text => {
            let now = now();
            printer.styled(&rows.iter().map(|(summary, row)| render(summary, row, now)).collect::<String>());
        }
    }
    Ok(Exit::Done)
}

/// Reports that the target has no such process. A reading verb exits with 0 then.
fn nothing(args: &DescribeArgs, note: Option<String>, printer: &Printer) -> Exit {
    no_match(&args.instances, note).iter().for_each(|line| printer.info(line));
    if args.output == PlainForm::Json {
        printer.data("[]\n");
    }
    Exit::Done
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

/// A summary, then one line per field, nested values as YAML.
fn render(summary: &Summary, row: &Value, now: Time) -> String {
    let mut text = format!("{BOLD}{}{BOLD:#}\n", visible(row["instance"].as_str().unwrap_or_default()));
    for line in summary.lines(now) {
        text.push_str(&format!("  {line}\n"));
    }
    let same_specs = row["spec"] == row["live_spec"];
    for (name, value) in row.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null()) {
        let shown = match value {
            Value::String(text) if text.is_empty() => continue,
            Value::String(text) => visible(text),
            Value::Object(_) if is_blank(value) => continue,
            Value::Array(items) if items.is_empty() => "none".to_owned(),
            Value::Object(_) if name == "live_spec" && same_specs => "as registered (spec)".to_owned(),
            Value::Object(_) if name == "live_spec" => differences(&row["spec"], value),
            Value::Object(_) | Value::Array(_) => yaml(value),
            other => other.to_string(),
        };
        text.push_str(&format!("  {DIM}{name:<14}{DIM:#} {shown}\n"));
    }
    text
}

/// Whether a value has no leaf, such as the spec in effect of a process that is not registered.
fn is_blank(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Object(fields) => fields.values().all(is_blank),
        Value::Array(_) | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

fn yaml(value: &Value) -> String {
    let yaml = serde_yaml::to_string(value).unwrap_or_default();
    let lines: Vec<String> = yaml.lines().map(|line| format!("    {}", visible(line))).collect();
    format!("\n{}", lines.join("\n"))
}

/// The fields in which the spec in effect differs from the registered one.
fn differences(registered: &Value, live: &Value) -> String {
    let (mut old, mut new) = (BTreeMap::new(), BTreeMap::new());
    flatten(registered, String::new(), &mut new);
    flatten(live, String::new(), &mut old);
    let paths: BTreeSet<&String> =
        old.keys().chain(new.keys()).filter(|path| old.get(*path) != new.get(*path)).collect();
    let shown =
        |value: Option<&&Value>| value.map_or("unset".to_owned(), |value| visible(&value.to_string()));
    let line = |path: &String| {
        format!("\n    {}: {} (registered: {})", visible(path), shown(old.get(path)), shown(new.get(path)))
    };
    paths.into_iter().map(line).collect()
}

/// The leaves of a value by path.
fn flatten<'a>(value: &'a Value, path: String, into: &mut BTreeMap<String, &'a Value>) {
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                let dot = if path.is_empty() { "" } else { "." };
                flatten(value, format!("{path}{dot}{name}"), into);
            }
        }
        Value::Null => {}
        _ => drop(into.insert(path, value)),
    }
}

/// The first lines of a description: the state in a sentence, the reason, and the next action.
struct Summary {
    process: ListedProcess,
    status: Option<(SyncStatus, Vec<NextAction>)>,
}

impl Summary {
    fn of(row: TargetProcess, status: Option<&ProcessStatus>) -> Summary {
        let status = status.map(|status| (status.sync, status.next.clone()));
        let sync = status.as_ref().map_or(SyncStatus::Unknown, |(sync, _)| *sync);
        Summary { process: row.listed(sync), status }
    }

    fn lines(&self, now: Time) -> Vec<String> {
        let mut lines = vec![process_listing::state_sentence(&self.process, now)];
        if let Some(exit) = &self.process.last_exit {
            let age = age_of(&exit.time, now).map(|age| format!(" ({age} ago)")).unwrap_or_default();
            lines.push(format!("last exit: {}{age}", visible(&exit.to_string())));
        }
        if let Some((_, next)) = &self.status {
            lines.push(format!("next: {}", next_text(next)));
        }
        lines
    }
}

/// Next action of the controller: the operations with their reasons, or why the instance is held.
pub fn next_text(next: &[NextAction]) -> String {
    let one = |action: &NextAction| match action {
        NextAction::Step { op, why } if why.is_empty() => op.to_string(),
        NextAction::Step { op, why } => format!("{op} ({})", visible(&why.join(", "))),
        NextAction::Held { held, detail } if detail.is_empty() => format!("held: {}", held.word()),
        NextAction::Held { held, detail } => format!("held: {}: {}", held.word(), visible(detail)),
    };
    match next.is_empty() {
        true => "nothing to do".to_owned(),
        false => next.iter().map(one).collect::<Vec<_>>().join("; "),
    }
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
