//! `abide get`: processes, hosts, tasks, holds and orphans of a target, as tables or for scripts.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde_json::Value;

use crate::cli::args::parse_switch;
use crate::cli::commands::plan::args::SelectArgs;
use crate::cli::commands::status::warn_not_running;
use crate::cli::declared_names::DeclaredNames;
use crate::cli::inventories::{self, InventoryArgs, LoadedManifests};
use crate::cli::output::print::{Printer, problem, visible};
use crate::cli::output::table::{Align, Table};
use crate::cli::process_listing::{self, SortKey, TableForm};
use crate::cli::sync_status::{ProcessStatus, statuses};
use crate::cli::target::{ConnectedTarget, LocalStart, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::clock::now;
use crate::contract::{HoldRow, HostCertificate, HostEntry, ListedProcess, TargetProcess};
use crate::control::suspended;
use crate::engine::other_sources::desired_elsewhere;
use crate::engine::stored_revisions;
use crate::manifest::Limits;
use crate::model::{DEFAULT_OWNER, Desired, Hold, InstanceKey, Pause, ProcessKey, Selection, Time};
use crate::reconcile::SyncStatus;
use crate::source::git::work_tree;

/// List processes, hosts, tasks, holds or orphans
///
/// `-o json` prints rows that `plan --observed` reads. Orphans are processes without an owner; with PATH also processes
/// of the owner that its manifests no longer declare.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  abide get processes\n  abide get hosts -o json\n  abide get processes -n web --watch\n  abide get processes --sort health --expand\n  abide get orphans manifests --owner web-team"
)]
pub struct GetArgs {
    /// Kind of objects to list
    #[arg(value_enum, value_name = "KIND")]
    pub kind: Kind,
    /// With `orphans`: manifests of the owner, as files or directories, or - for standard input
    #[arg(value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    #[command(flatten)]
    pub target: TargetArgs,
    /// With `orphans PATH…`: owner of the manifests [default: the owner in a Policy, else `default`]
    #[arg(long, value_name = "NAME", env = "ABIDE_OWNER")]
    pub owner: Option<String>,
    #[command(flatten)]
    pub select: SelectArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_GET_OUTPUT", value_name = "FORMAT")]
    pub output: Form,
    /// With `processes`: order of the rows
    #[arg(long, value_enum, default_value_t, env = "ABIDE_SORT", value_name = "COLUMN")]
    pub sort: SortKey,
    /// With `processes`: one line per instance, also for instances of one process that are alike
    #[arg(long, env = "ABIDE_EXPAND", value_parser = parse_switch)]
    pub expand: bool,
    /// Print again after every change, until Ctrl-C
    #[arg(long, env = "ABIDE_WATCH", value_parser = parse_switch)]
    pub watch: bool,
}

impl GetArgs {
    fn lists_processes(&self) -> bool {
        matches!(self.kind, Kind::Processes | Kind::Orphans | Kind::Hosts)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    #[value(alias = "process")]
    Processes,
    #[value(alias = "host")]
    Hosts,
    /// Recent operations
    #[value(alias = "task")]
    Tasks,
    /// Holds, pauses, and instances that `watch` has given up on
    #[value(alias = "hold")]
    Holds,
    /// Processes without an owner, and those that the manifests no longer declare
    #[value(alias = "orphan")]
    Orphans,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Form {
    #[default]
    Text,
    Wide,
    Json,
    Yaml,
    Name,
}

/// Clocks that differ by more than this are reported.
pub const SKEW_MS: i64 = 2_000;

pub fn run(args: &GetArgs, printer: &Printer) -> Result<Exit, Failure> {
    let mut declared = DeclaredProcesses::read(args, printer)?;
    let runtime = runtime()?;
    let live = args.target.connect(LocalStart::Never)?;
    if let Some(note) = live.as_ref().and_then(ConnectedTarget::list_note).filter(|_| args.lists_processes())
    {
        printer.info(&note);
    }
    if live.is_none() {
        warn_not_running(&args.target, printer)?;
    }
    if let Some(live) = &live {
        runtime.block_on(declared.add_other_sources(args, live));
    }
    let mut last = None;
    loop {
        let listing = match &live {
            // The local system was never started, or does not run.
            None => Listing::default(),
            Some(live) => runtime.block_on(rows(args, &declared, live))?,
        };
        // Figures and ages alone are not a change.
        let shown = without_figures(&listing.rows);
        if last.as_ref() != Some(&shown) {
            let text = render(args, &listing)?;
            match args.output {
                Form::Text | Form::Wide => printer.styled(&text),
                Form::Json | Form::Yaml | Form::Name => printer.data(&text),
            }
            last = Some(shown);
        }
        if !args.watch {
            return Ok(Exit::Done);
        }
        std::thread::sleep(std::time::Duration::from_millis(500));
    }
}

/// Rows of any kind as JSON, and the typed rows of processes for their table.
#[derive(Default)]
struct Listing {
    rows: Vec<Value>,
    processes: Vec<ListedProcess>,
    /// The declared name of each instance.
    declared: BTreeMap<InstanceKey, ProcessKey>,
}

impl From<Vec<Value>> for Listing {
    fn from(rows: Vec<Value>) -> Listing {
        Listing { rows, ..Listing::default() }
    }
}

impl Listing {
    fn of_processes(
        processes: Vec<ListedProcess>,
        statuses: &BTreeMap<InstanceKey, ProcessStatus>,
    ) -> Listing {
        let name = |(key, status): (&InstanceKey, &ProcessStatus)| {
            Some((key.clone(), status.declared_name.clone()?))
        };
        let rows = processes.iter().map(value).collect();
        Listing { rows, processes, declared: statuses.iter().filter_map(name).collect() }
    }
}

/// The rows without their figures, which change all the time.
fn without_figures(rows: &[Value]) -> Vec<Value> {
    let mut rows = rows.to_vec();
    for row in rows.iter_mut().filter_map(Value::as_object_mut) {
        row.retain(|name, _| !["cpu", "mem", "fds", "threads", "cores", "memory"].contains(&name.as_str()));
    }
    rows
}

async fn rows(
    args: &GetArgs,
    declared: &DeclaredProcesses,
    live: &ConnectedTarget,
) -> Result<Listing, Failure> {
    let selection = args.select.selection();
    let namespaces = selection.named_namespaces();
    // Only a name may be that of several instances.
    let names = match selection.include.is_empty() && selection.exclude.is_empty() {
        true => DeclaredNames::default(),
        false => DeclaredNames::read(live).await,
    };
    let is_meant = |row: &TargetProcess| {
        let key = row.instance();
        selection.is_everything() || selection.selects(key, names.of(key), row.labels())
    };
    let rows: Vec<Value> = match args.kind {
        Kind::Processes | Kind::Orphans => {
            // An instance whose first start failed is not registered: it is not an orphan.
            let attempts = if args.kind == Kind::Processes { "&attempts=1" } else { "" };
            let all = live.rows(&format!("&brief=1{attempts}"), namespaces).await?;
            let meant = all.into_iter().filter(is_meant);
            match args.kind {
                Kind::Orphans => meant.filter_map(|row| declared.orphan(row)).map(value).collect(),
                _ => {
                    let statuses = statuses(live).await?;
                    // Without an active revision to compare with, the sync status is unknown.
                    let listed = |row: TargetProcess| match statuses.get(row.instance()) {
                        None => row.listed(SyncStatus::Unknown),
                        Some(one) => {
                            let source = one.declared.clone();
                            ListedProcess { source, why: one.held(), ..row.listed(one.sync) }
                        }
                    };
                    let mut listed: Vec<ListedProcess> = meant.map(listed).collect();
                    process_listing::sort(&mut listed, args.sort);
                    return Ok(Listing::of_processes(listed, &statuses));
                }
            }
        }
        Kind::Hosts => {
            let all = live.hosts(&live.observe_with(namespaces).await?).await?;
            let meant = all.into_iter().filter(|row| selection.selects_host(&row.host));
            // A gateway of another version may omit the number.
            let counted = |row: HostEntry| HostEntry { processes: Some(row.processes.unwrap_or(0)), ..row };
            meant.map(counted).map(value).collect()
        }
        Kind::Tasks => {
            let tasks = live.abide()?.tasks().await.map_err(|fault| live.failure(&fault))?;
            tasks.into_iter().map(value).collect()
        }
        Kind::Holds => holds(live, &selection, &names).await?,
    };
    Ok(rows.into())
}

/// The holds, pauses and suspended instances of a selection.
async fn holds(
    live: &ConnectedTarget,
    selection: &Selection,
    names: &DeclaredNames,
) -> Result<Vec<Value>, Failure> {
    let (holds, pauses) = live.holds_and_pauses().await?;
    // A hold has no labels: those of its instance are compared.
    let seen = match &selection.labels {
        Some(_) => live.observe_with(selection.named_namespaces()).await?.instances,
        None => BTreeMap::new(),
    };
    let labels = |key: &InstanceKey| seen.get(key).map(|seen| seen.labels.clone()).unwrap_or_default();
    let is_selected = |key: &InstanceKey| selection.selects(key, names.of(key), &labels(key));
    let meant = |hold: &Hold| is_selected(&hold.instance);
    let holds = holds.iter().filter(|hold| meant(hold)).map(HoldRow::from);
    // A pause of the whole target applies to every selected namespace.
    let of = |pause: &Pause| {
        let all = &selection.namespaces;
        all.is_empty() || pause.namespace.as_ref().is_none_or(|name| all.contains(name))
    };
    let pauses = pauses.iter().filter(|pause| of(pause)).map(HoldRow::from);
    let suspended = suspended::read_all_owners(&live.state).await;
    let suspended = suspended.map_err(|error| live.failure(&error))?.into_iter();
    let suspended = suspended.filter(|(key, _)| is_selected(key));
    let suspended = suspended.map(|(key, suspended)| HoldRow {
        what: key.to_string(),
        by: "watch".to_owned(),
        reason: Some(format!("{}: {}", suspended.reason, suspended.why)),
        until: None,
    });
    Ok(holds.chain(pauses).chain(suspended).map(value).collect())
}

/// Owner and instances of the manifests in PATH.
#[derive(Default)]
struct DeclaredProcesses {
    /// `None` without PATH.
    owner: Option<String>,
    instances: BTreeSet<InstanceKey>,
}

impl DeclaredProcesses {
    /// Refuses a tree with errors: the processes of an invalid file would be listed as orphans.
    fn read(args: &GetArgs, printer: &Printer) -> Result<DeclaredProcesses, Failure> {
        if args.paths.is_empty() {
            return Ok(DeclaredProcesses::default());
        }
        if args.kind != Kind::Orphans {
            return Err(Failure::new(Exit::Usage, "only `get orphans` takes manifests"));
        }
        let owner_of = |desired: &Desired| {
            let named = desired.policies.iter().find_map(|policy| policy.owner.as_deref());
            args.owner.as_deref().or(named).unwrap_or(DEFAULT_OWNER).to_owned()
        };
        let sources = (&args.target, &InventoryArgs::default());
        let owner = |desired: &Desired| Ok(owner_of(desired));
        let LoadedManifests { loaded, .. } =
            inventories::load(&args.paths, &Limits::default(), sources, owner, false, printer)?;
        if loaded.errors() > 0 {
            printer.to_stderr(&loaded.problems.iter().map(|one| problem(one) + "\n").collect::<String>());
            let message = "cannot list orphans: the manifests have errors";
            return Err(Failure::new(Exit::InvalidManifest, message));
        }
        let instances = loaded.desired.instances.keys().cloned().collect();
        Ok(DeclaredProcesses { owner: Some(owner_of(&loaded.desired)), instances })
    }

    /// Adds the instances that other sources of the owner declare: they are not orphans of these manifests.
    async fn add_other_sources(&mut self, args: &GetArgs, live: &ConnectedTarget) {
        let Some(owner) = &self.owner else { return };
        let (source, limits) = (work_tree::of_paths(&args.paths), Limits::default());
        let stored = stored_revisions::list(&live.state, owner).await.unwrap_or_default();
        let elsewhere = desired_elsewhere(&live.state, owner, &source, &stored, &limits).await;
        self.instances.extend(elsewhere.unwrap_or_default().0.into_keys());
    }

    /// The row of an orphan, with the reason. `None`: the process has an owner or a manifest.
    fn orphan(&self, row: TargetProcess) -> Option<ListedProcess> {
        if self.instances.contains(row.instance()) {
            return None;
        }
        let row = row.listed(SyncStatus::Orphan);
        let why = match (row.row.owner.as_deref().filter(|owner| !owner.is_empty()), &self.owner) {
            (None, _) => "no owner".to_owned(),
            (Some(owner), Some(ours)) if owner == ours => format!("declared by no manifest of {ours}"),
            (Some(_), _) => return None,
        };
        Some(ListedProcess { why: Some(why), ..row })
    }
}

/// A row of any kind, for the table and the other formats.
fn value(row: impl serde::Serialize) -> Value {
    serde_json::to_value(row).unwrap_or_default()
}

fn render(args: &GetArgs, listing: &Listing) -> Result<String, Failure> {
    let rows = &listing.rows;
    let failed = |error: &dyn std::fmt::Display| {
        Failure::new(Exit::Failed, format!("cannot format the rows: {error}"))
    };
    match args.output {
        Form::Json => {
            serde_json::to_string_pretty(rows).map(|text| text + "\n").map_err(|error| failed(&error))
        }
        Form::Yaml => serde_yaml::to_string(rows).map_err(|error| failed(&error)),
        Form::Name => Ok(rows.iter().map(|row| format!("{}\n", name(args.kind, row))).collect()),
        Form::Text | Form::Wide if rows.is_empty() => Ok(format!("no {}\n", kind_word(args.kind))),
        Form::Text | Form::Wide if args.kind == Kind::Processes => {
            let form = TableForm { wide: args.output == Form::Wide, expand: args.expand };
            Ok(process_listing::table(&listing.processes, &listing.declared, form, now()))
        }
        Form::Text | Form::Wide => Ok(table(args.kind, rows)),
    }
}

/// The difference between an agent's clock and its gateway's, as text.
pub fn describe_clock_skew(skew_ms: Option<i64>) -> String {
    match skew_ms {
        None => "-".to_owned(),
        Some(skew_ms) if skew_ms.saturating_abs() <= SKEW_MS => "ok".to_owned(),
        Some(skew_ms) if skew_ms > 0 => format!("{} s ahead", skew_ms / 1000),
        Some(skew_ms) => format!("{} s behind", skew_ms.saturating_abs() / 1000),
    }
}

fn name(kind: Kind, row: &Value) -> String {
    let field = match kind {
        Kind::Processes | Kind::Orphans => "instance",
        Kind::Hosts => "host",
        Kind::Tasks => "id",
        Kind::Holds => "what",
    };
    row[field].as_str().unwrap_or_default().to_owned()
}

fn kind_word(kind: Kind) -> &'static str {
    match kind {
        Kind::Processes => "processes",
        Kind::Hosts => "hosts",
        Kind::Tasks => "tasks",
        Kind::Holds => "holds",
        Kind::Orphans => "orphans",
    }
}

/// A table of another kind than processes.
fn table(kind: Kind, rows: &[Value]) -> String {
    let fields: &[&str] = match kind {
        Kind::Hosts => &["host", "agent", "version", "processes", "clock", "certificate", "heard"],
        Kind::Tasks => &["id", "begun", "rows", "done", "failed"],
        Kind::Processes | Kind::Orphans => {
            &["namespace", "name", "host", "running", "hosting", "pid", "owner", "why"]
        }
        Kind::Holds => &["what", "by", "until", "reason"],
    };
    let cell = |value: &Value| match value {
        Value::Null => "-".to_owned(),
        Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
        Value::String(text) if text.is_empty() => "-".to_owned(),
        Value::String(text) => visible(text.lines().next().unwrap_or_default()),
        other => other.to_string(),
    };
    let shown = |row: &Value, field: &str| match (kind, field) {
        (Kind::Hosts, "certificate") => describe_certificate(&row[field]),
        (Kind::Hosts, "clock") => describe_clock_skew(row["clock_skew_ms"].as_i64()),
        // Milliseconds in JSON, a time for people.
        (Kind::Tasks, "begun") if let Some(millis) = row[field].as_i64() => Time(millis).to_string(),
        _ => cell(&row[field]),
    };
    let mut table = Table::new(fields.iter().map(|field| (field.to_uppercase(), Align::Left)));
    for row in rows {
        table.row(fields.iter().map(|field| shown(row, field)).collect());
    }
    table.text()
}

/// Expiry of a host's certificate.
fn describe_certificate(certificate: &Value) -> String {
    match serde_json::from_value::<HostCertificate>(certificate.clone()) {
        Ok(certificate) if certificate.revoked => "revoked".to_owned(),
        Ok(certificate) => format!("until {}", visible(&certificate.expires)),
        Err(_) => "-".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;

    #[derive(Parser)]
    struct Get {
        #[command(flatten)]
        args: GetArgs,
    }

    #[test]
    fn a_task_is_shown_with_a_time() {
        let rows = [json!({"id": "t1", "begun": 1_763_424_000_000_i64, "rows": 2, "done": 1, "failed": 0})];
        let render = |form: &str| {
            let Get { args } = Get::try_parse_from(["get", "tasks", "-o", form]).expect("arguments");
            render(&args, &rows.to_vec().into()).expect("text")
        };
        let text = render("text");
        assert!(text.contains("2025-11-18T00:00:00Z") && !text.contains("1763424000000"), "{text}");
        assert!(render("json").contains("\"begun\": 1763424000000"), "{}", render("json"));
    }
}
