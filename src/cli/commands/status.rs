//! Looking without changing: `status`, `describe`, `history`, `export`.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::{Value, json};

use crate::cli::args::{PlainForm, parse_switch};
use crate::cli::commands::manual::InstanceSelector;
use crate::cli::commands::plan::args::SelectArgs;
use crate::cli::commands::rollback::describe_pin;
use crate::cli::commands::watch::source::short_id;
use crate::cli::local::Home;
use crate::cli::output::print::{BOLD, DIM, Printer, WARNING, count, visible};
use crate::cli::sync_status::{ProcessStatus, statuses};
use crate::cli::target::{ConnectedTarget, LocalStart, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::control::history::{self, changes};
use crate::control::pin::{self, Pin};
use crate::control::revisions::{self, ActiveRevision};
use crate::manifest::print as manifests;
use crate::model::{
    Desired, EnvValue, Health, HoldReason, Host, HostKey, InstanceKey, ObservedInstance, ProcessKey, Spec,
    State,
};
use crate::reconcile::SyncStatus;
use crate::store::{Error, Store};

/// Show how everything stands on one screen
#[derive(Debug, clap::Args)]
pub struct StatusArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// Exit with 3 when anything is not as it was told to be, or not as its owner's manifests want it; what is held or paused is left alone on purpose, and is not counted; what `watch` gave up on is
    #[arg(long, env = "ABIDE_CHECK", value_parser = parse_switch)]
    pub check: bool,
    /// Form of the answer
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_STATUS_OUTPUT", value_name = "FORM")]
    pub output: PlainForm,
}

/// Show everything that is known of a process
#[derive(Debug, clap::Args)]
pub struct DescribeArgs {
    /// The process, or one of its instances
    #[arg(value_name = "NS/NAME[@HOST]")]
    pub process: InstanceSelector,
    #[command(flatten)]
    pub target: TargetArgs,
    /// Form of the answer
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_DESCRIBE_OUTPUT", value_name = "FORM")]
    pub output: PlainForm,
}

/// Show what was applied when, and how it ended
#[derive(Debug, clap::Args)]
pub struct HistoryArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// Whose
    #[arg(long, value_name = "NAME", env = "ABIDE_OWNER", default_value = "default")]
    pub owner: String,
    /// Form of the answer
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_HISTORY_OUTPUT", value_name = "FORM")]
    pub output: PlainForm,
}

/// Print manifests of what is there: planning them gives nothing to do
#[derive(Debug, clap::Args)]
pub struct ExportArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    #[command(flatten)]
    pub select: SelectArgs,
}

fn connect(target: &TargetArgs) -> Result<Option<ConnectedTarget>, Failure> {
    target.connect(LocalStart::Never)
}

pub fn status(args: &StatusArgs, printer: &Printer) -> Result<Exit, Failure> {
    let Some(live) = connect(&args.target)? else {
        match args.output {
            PlainForm::Text => printer.styled("the local system is not running: nothing is guarded\n"),
            PlainForm::Json => printer.data("{\"running\":false}\n"),
        }
        // One that was there once left something behind, which nobody guards now.
        let left = args.target.target == "local" && Home::find()?.path("gateway/store.db").exists();
        return Ok(if args.check && left { Exit::Incomplete } else { Exit::Done });
    };
    let (observed, hosts, (holds, pauses), pins, stands, taken) = runtime()?.block_on(async {
        let observed = live.observe_all().await?;
        let hosts = live.hosts(&observed).await?;
        let stands = statuses(&live).await?;
        let taken = active_revisions(&live).await?;
        Ok::<_, Failure>((observed, hosts, live.restraints().await?, live.pins().await?, stands, taken))
    })?;
    // What its engine says of it comes before what its manifest says.
    let mut wrong: BTreeMap<&InstanceKey, String> =
        stands.iter().filter_map(|(key, stand)| Some((key, out_of_sync_reason(stand)?))).collect();
    let off = |(key, seen)| Some((key, unhealthy_reason(key, seen, &observed.gaps)?));
    wrong.extend(observed.instances.iter().filter_map(off));
    let running = observed.instances.values().filter(|seen| seen.running == Some(true)).count();
    let dead = hosts.iter().filter(|host| !host.agent).count();
    let exit = if args.check && !wrong.is_empty() { Exit::Incomplete } else { Exit::Done };
    if args.output == PlainForm::Json {
        let wrong: Vec<Value> = wrong.iter().map(|(key, why)| json!({"instance": key, "why": why})).collect();
        let whole = json!({"running": true, "url": live.backend.url(), "hosts": hosts.len(), "hosts_without_agent": dead,
                           "processes": observed.instances.len(), "processes_running": running, "not_as_told": wrong,
                           "holds": holds.len(), "pauses": pauses.len(), "pins": pins.iter().map(pin_json).collect::<Vec<_>>(),
                           "sources": taken.iter().map(source_json).collect::<Vec<_>>()});
        printer.data(&format!("{whole:#}\n"));
        return Ok(exit);
    }
    let mut text = format!("{BOLD}{}{BOLD:#} at {}\n", live.name, live.backend.url());
    text.push_str(&format!("{}, {dead} without an agent\n", count(hosts.len(), "host")));
    text.push_str(&format!("{}, {running} running", count(observed.instances.len(), "process")));
    let restraints = [(holds.len(), "hold"), (pauses.len(), "pause")];
    text.extend(
        restraints.into_iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!(", {}", count(n, what))),
    );
    text.push('\n');
    for (owner, taken) in &taken {
        let commit =
            taken.commit.as_deref().map(|id| format!(", commit {}", short_id(id))).unwrap_or_default();
        let (owner, revision, source) = (visible(owner), short_id(&taken.revision), visible(&taken.source));
        text.push_str(&format!("{owner:?}: revision {revision}{commit}, from {source}\n"));
    }
    for (owner, pin) in &pins {
        text.push_str(&format!(
            "{:?} is {WARNING}pinned{WARNING:#} to {}\n",
            visible(owner),
            describe_pin(pin)
        ));
    }
    for (key, why) in &wrong {
        text.push_str(&format!("  {WARNING}!{WARNING:#} {}  {}\n", visible(&key.to_string()), visible(why)));
    }
    if wrong.is_empty() {
        text.push_str("everything is as it was told to be\n");
    }
    printer.styled(&text);
    Ok(exit)
}

/// What was last taken of whose manifests.
async fn active_revisions(live: &ConnectedTarget) -> Result<Vec<(String, ActiveRevision)>, Failure> {
    let broken = |error: Error| live.failure(&error);
    let mut all = Vec::new();
    for owner in revisions::owners(&live.state).await.map_err(broken)? {
        let taken = revisions::active(&live.state, &owner).await.map_err(broken)?.0;
        all.extend(taken.map(|taken| (owner, taken)));
    }
    Ok(all)
}

fn source_json((owner, taken): &(String, ActiveRevision)) -> Value {
    json!({"owner": owner, "revision": taken.revision, "commit": taken.commit, "source": taken.source,
           "since": taken.at.to_string()})
}

fn pin_json((owner, pin): &(String, Pin)) -> Value {
    json!({"owner": owner, "revision": pin.revision, "commit": pin.commit, "since": pin.since.to_string(),
           "by": pin.by, "reason": pin.reason})
}

/// What would be done to make an instance as its owner wants it. What is left alone on purpose is as it should be; what
/// `watch` gave up on is not.
fn out_of_sync_reason(stand: &ProcessStatus) -> Option<String> {
    let given_up = [HoldReason::NotConverging, HoldReason::RolledBack].map(HoldReason::word);
    match stand.sync {
        SyncStatus::Held
            if let Some(held) = stand.next.iter().find_map(|next| next["held"].as_str())
                && given_up.contains(&held) =>
        {
            return Some(format!("not as it is wanted, and given up: {held}"));
        }
        SyncStatus::OutOfSync => {}
        SyncStatus::InSync
        | SyncStatus::Unknown
        | SyncStatus::Held
        | SyncStatus::Paused
        | SyncStatus::Orphan => return None,
    }
    let ops: Vec<&str> = stand.next.iter().filter_map(|next| next["op"].as_str()).collect();
    Some(format!("not as it is wanted: {}", ops.join(", ")))
}

/// Why an instance is not as its engine was told.
fn unhealthy_reason(
    key: &InstanceKey,
    seen: &ObservedInstance,
    gaps: &BTreeMap<HostKey, String>,
) -> Option<String> {
    use crate::model::{AutoType, KnownSpec};
    if let Some(why) = gaps.get(&key.host) {
        return Some(why.clone());
    }
    let kind = seen.registered_spec.spec().map(|spec| spec.monitor.auto_type);
    match (seen.health, seen.running, &seen.registered_spec, &seen.live) {
        (health @ (Health::Failed | Health::Degraded), _, _, _) => Some(health.word().to_owned()),
        (_, Some(false), _, _) if seen.hosted == Some(true) && kind == Some(AutoType::Resident) => {
            Some("guarded, and not running".to_owned())
        }
        (_, Some(true), KnownSpec::Full(given), KnownSpec::Full(live)) if !given.is_equivalent(live) => {
            Some("it runs with another spec than it was given".to_owned())
        }
        _ => None,
    }
}

pub fn describe(args: &DescribeArgs, printer: &Printer) -> Result<Exit, Failure> {
    let unknown =
        || Failure::new(Exit::Failed, "there is no such process").hint("`abide get processes` lists them");
    let live = connect(&args.target)?.ok_or_else(unknown)?;
    let (rows, holds, stands, history) = runtime()?.block_on(async {
        let rows = live.rows("").await?;
        let history = live.state.range("history/", None, usize::MAX).await.map(|page| page.entries);
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
            if let Some(stand) = key(&row).and_then(|key| stands.get(&key)) {
                row["sync"] = json!(stand.sync.word());
                row["next_action"] = json!(stand.next);
            }
            let instance = row["instance"].as_str().unwrap_or_default().to_owned();
            row["changes"] = json!(changes(&history, &instance));
            redact_secrets(&mut row);
            row
        })
        .collect();
    match args.output {
        PlainForm::Json => printer.data(&format!("{:#}\n", Value::Array(rows))),
        PlainForm::Text => {
            for row in rows {
                printer.styled(&format!(
                    "{BOLD}{}{BOLD:#}\n",
                    visible(row["instance"].as_str().unwrap_or_default())
                ));
                for (name, value) in
                    row.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null())
                {
                    let text = match value {
                        Value::String(text) if text.is_empty() => continue,
                        Value::String(text) => visible(text),
                        Value::Object(map) if map.is_empty() => continue,
                        Value::Object(_) | Value::Array(_) => {
                            let yaml = serde_yaml::to_string(value).unwrap_or_default();
                            format!(
                                "\n{}",
                                yaml.lines()
                                    .map(|line| format!("    {}", visible(line)))
                                    .collect::<Vec<_>>()
                                    .join("\n")
                            )
                        }
                        other => other.to_string(),
                    };
                    printer.styled(&format!("  {DIM}{name:<14}{DIM:#} {text}\n"));
                }
            }
        }
    }
    Ok(Exit::Done)
}

/// Secrets are shown as such.
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

pub fn history(args: &HistoryArgs, printer: &Printer) -> Result<Exit, Failure> {
    let owner = args.target.owner_or(&args.owner)?;
    let (mut entries, pinned) = match connect(&args.target)? {
        None => (Vec::new(), None),
        Some(live) => {
            let read = runtime()?.block_on(async {
                let newest = history::newest(&live.state, &owner, history::MAX_ENTRIES).await?;
                Ok((newest, pin::read(&live.state, &owner).await?))
            });
            let (newest, pinned) =
                read.map_err(|error: Error| Failure::new(Exit::Unreachable, error.to_string()))?;
            (newest, pinned.map(|(pin, _)| pin))
        }
    };
    for entry in entries.iter_mut() {
        if pinned.as_ref().is_some_and(|pin| entry["revision"] == pin.revision.as_str()) {
            entry["pinned"] = true.into();
        }
    }
    if args.output == PlainForm::Json {
        printer.data(&format!("{:#}\n", Value::Array(entries)));
        return Ok(Exit::Done);
    }
    if entries.is_empty() {
        printer.styled(&format!("nothing was applied as {owner:?} yet\n"));
    }
    if let Some(pin) = &pinned {
        printer.styled(&format!(
            "{WARNING}pinned{WARNING:#} to {}; `abide rollback --unpin` ends it\n",
            describe_pin(pin)
        ));
    }
    for entry in &entries {
        let summary = entry["summary"].as_object().into_iter().flatten();
        let did: Vec<String> = summary
            .filter(|(name, many)| {
                many.as_u64().unwrap_or(0) > 0 && !["instances", "held", "unknown"].contains(&name.as_str())
            })
            .map(|(name, many)| format!("{many} {name}"))
            .collect();
        let end = match entry["exit"].as_u64() {
            Some(0) => "converged".to_owned(),
            Some(code) => format!("exit {code}"),
            None => "under way, or interrupted".to_owned(),
        };
        let text = |name: &str| visible(entry[name].as_str().unwrap_or("-"));
        let revision: String = text("revision").chars().take(12).collect();
        let commit =
            entry["commit"].as_str().map(|commit| format!(" {}", short_id(commit))).unwrap_or_default();
        printer.styled(&format!(
            "{}  {DIM}{revision}{DIM:#}  {}{commit}  {}  {end}\n",
            text("at"),
            text("source"),
            did.join(", ")
        ));
    }
    Ok(Exit::Done)
}

pub fn export(args: &ExportArgs, printer: &Printer) -> Result<Exit, Failure> {
    let Some(live) = connect(&args.target)? else { return Ok(Exit::Done) };
    let world = runtime()?.block_on(live.observe_for(&Desired::default(), Some(BTreeSet::new())))?;
    let observed = &world.observed;
    let selection = args.select.selection();
    let mut kinds: Vec<(ProcessKey, State, &Spec, Vec<Host>)> = Vec::new();
    // Where the one of each kind is.
    let mut places: HashMap<(ProcessKey, &str, _), usize> = HashMap::new();
    let mut unknown = 0;
    for (key, seen) in &observed.instances {
        if !selection.means(key, None, &seen.labels) {
            continue;
        }
        let Some(spec) = seen.registered_spec.spec() else {
            unknown += 1;
            continue;
        };
        let ends = spec.monitor.auto_type != crate::model::AutoType::Resident;
        let state = match (seen.running == Some(true) || ends, seen.hosted == Some(true)) {
            (_, true) => State::Running,
            (true, false) if !ends => State::Unhosted,
            _ => State::Stopped,
        };
        let host = world.host(key);
        let next = kinds.len();
        match *places.entry((key.process(), state.word(), spec.digest())).or_insert(next) {
            at if at == next => kinds.push((key.process(), state, spec, vec![host])),
            at => kinds[at].3.push(host),
        }
    }
    if unknown > 0 {
        printer
            .warning(&format!("{} left out: nobody knows what they were given", count(unknown, "instance")));
    }
    let is =
        |secret: fn(&EnvValue) -> bool| kinds.iter().any(|(_, _, spec, _)| spec.env.values().any(secret));
    if is(|value| matches!(value, EnvValue::Secret(_))) {
        printer.warning(
            "secret values of env are in this output as they are: keep it private, or use {file: PATH}",
        );
    }
    for (key, _, spec, _) in &kinds {
        let names = spec.env.iter().filter(|(_, value)| matches!(value, EnvValue::Digest(_)));
        let names: Vec<String> = names.map(|(name, _)| visible(name)).collect();
        if !names.is_empty() {
            let names = names.join(", ");
            printer.warning(&format!(
                "{}: secret values of env are not exported ({names}): fill in value, or use {{file: PATH}}",
                visible(&key.to_string())
            ));
        }
    }
    let documents: Vec<_> =
        kinds.iter().map(|(key, state, spec, hosts)| manifests::process(key, hosts, *state, spec)).collect();
    printer.data(&manifests::yaml(&documents));
    Ok(Exit::Done)
}
