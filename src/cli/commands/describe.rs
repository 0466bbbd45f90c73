//! `abide describe`: specs, facts, hold, changes and next action of one process.

use serde_json::{Value, json};

use crate::cli::args::PlainForm;
use crate::cli::commands::manual::InstanceSelector;
use crate::cli::output::print::{BOLD, DIM, Printer, visible};
use crate::cli::sync_status::statuses;
use crate::cli::target::{LocalStart, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::control::history::changes;
use crate::model::InstanceKey;
use crate::store::{Store, keys};

/// Show all details of one process or instance
#[derive(Debug, clap::Args)]
pub struct DescribeArgs {
    /// Process to show, or one of its instances
    #[arg(value_name = "NS/NAME[@HOST]")]
    pub process: InstanceSelector,
    #[command(flatten)]
    pub target: TargetArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_DESCRIBE_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

pub fn run(args: &DescribeArgs, printer: &Printer) -> Result<Exit, Failure> {
    let unknown = || {
        let message = format!("target {} has no process {}", args.target.target, args.process);
        Failure::new(Exit::Failed, message).hint("`abide get processes` lists them")
    };
    let live = args.target.connect(LocalStart::Never)?.ok_or_else(unknown)?;
    let (rows, holds, statuses, history) = runtime()?.block_on(async {
        let rows = live.rows("").await?;
        let history = live.state.range(keys::HISTORY_PREFIX, None, usize::MAX).await.map(|page| page.entries);
        let history: Vec<Value> = history
            .unwrap_or_default()
            .iter()
            .filter_map(|entry| serde_json::from_slice(&entry.value).ok())
            .collect();
        Ok::<_, Failure>((rows, live.restraints().await?.0, statuses(&live).await?, history))
    })?;
    let key = |row: &Value| row["instance"].as_str().and_then(|text| text.parse::<InstanceKey>().ok());
    let rows: Vec<Value> =
        rows.into_iter().filter(|row| key(row).is_some_and(|key| args.process.matches(&key))).collect();
    if rows.is_empty() {
        return Err(unknown());
    }
    let rows: Vec<Value> = rows
        .into_iter()
        .map(|mut row| {
            let hold = key(&row).and_then(|key| holds.iter().find(|hold| hold.instance == key));
            row["hold"] = hold.map_or(Value::Null, |hold| json!({"by": hold.by, "reason": hold.reason, "until": hold.until.map(|time| time.to_string())}));
            if let Some(status) = key(&row).and_then(|key| statuses.get(&key)) {
                row["sync"] = json!(status.sync.word());
                row["next_action"] = json!(status.next);
            }
            let instance = row["instance"].as_str().unwrap_or_default().to_owned();
            row["changes"] = json!(changes(&history, &instance));
            redact_secrets(&mut row);
            row
        })
        .collect();
    match args.output {
        PlainForm::Json => printer.data(&format!("{:#}\n", Value::Array(rows))),
        PlainForm::Text => printer.styled(&rows.iter().map(render).collect::<String>()),
    }
    Ok(Exit::Done)
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
