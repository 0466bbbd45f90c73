//! `abide inventory`: lists the inventories of the config file, shows the hosts of one, and accepts a loss of hosts.

use std::collections::BTreeSet;

use clap::{Subcommand, ValueEnum};

use crate::cli::args::{PlainForm, parse_switch};
use crate::cli::output::print::{Printer, count, visible};
use crate::cli::output::table::{Align, Table};
use crate::cli::target::{ConnectedTarget, LocalStart, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::clock;
use crate::contract::{self, AcceptedInventory, InventoryHostRow, InventoryRow};
use crate::inventory::{
    InventoryError, InventorySnapshot, InventorySource, LastGoodSnapshot, changed_hosts, read_last_good,
    store_last_good,
};
use crate::manifest::check::GroupMember;
use crate::manifest::inventory::parse;
use crate::model::{Selector, span};

/// Show the inventories of the config file, and their hosts
///
/// A HostGroup with `from` gets its hosts from an inventory.
#[derive(Debug, clap::Args)]
pub struct InventoryVerbArgs {
    #[command(subcommand)]
    pub verb: InventoryVerb,
}

#[derive(Debug, Subcommand)]
pub enum InventoryVerb {
    List(InventoryListArgs),
    Show(InventoryShowArgs),
    Accept(InventoryAcceptArgs),
}

/// List inventories: name, source, number and age of the last good hosts
#[derive(Debug, clap::Args)]
pub struct InventoryListArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// Owner of the last good hosts [default: the config file's, else `default`]
    #[arg(long, value_name = "NAME", env = "ABIDE_OWNER")]
    pub owner: Option<String>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_INVENTORY_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

/// Read an inventory, and print its hosts with labels and names of variables
///
/// Exits with 1 if the inventory cannot be read or has no hosts.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  abide inventory show cmdb -l 'set=eu,module in (api,worker)'")]
pub struct InventoryShowArgs {
    /// Name of the inventory
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Print only hosts with these labels, such as set=eu,module in (api,worker)
    #[arg(short = 'l', long, value_name = "SELECTOR", env = "ABIDE_INVENTORY_SELECTOR")]
    pub selector: Option<Selector>,
    /// Print the stored last good hosts instead of reading the inventory
    #[arg(long, env = "ABIDE_LAST_GOOD", value_parser = parse_switch)]
    pub last_good: bool,
    #[command(flatten)]
    pub target: TargetArgs,
    /// Owner of the last good hosts [default: the config file's, else `default`]
    #[arg(long, value_name = "NAME", env = "ABIDE_OWNER")]
    pub owner: Option<String>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_INVENTORY_OUTPUT", value_name = "FORMAT")]
    pub output: InventoryForm,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum InventoryForm {
    #[default]
    Text,
    Json,
    /// One host per line
    Name,
}

/// Read an inventory, and make its hosts the last good ones although it lost many
///
/// A running `watch` uses them at its next read.
#[derive(Debug, clap::Args)]
pub struct InventoryAcceptArgs {
    /// Name of the inventory
    #[arg(value_name = "NAME")]
    pub name: String,
    #[command(flatten)]
    pub target: TargetArgs,
    /// Owner of the last good hosts [default: the config file's, else `default`]
    #[arg(long, value_name = "NAME", env = "ABIDE_OWNER")]
    pub owner: Option<String>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_INVENTORY_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

pub fn run(args: &InventoryVerbArgs, printer: &Printer) -> Result<Exit, Failure> {
    match &args.verb {
        InventoryVerb::List(args) => list(args, printer),
        InventoryVerb::Show(args) => show(args, printer),
        InventoryVerb::Accept(args) => accept(args, printer),
    }
}

fn owner(typed: Option<&str>, target: &TargetArgs) -> Result<String, Failure> {
    match typed {
        Some(owner) => Ok(owner.to_owned()),
        None => Ok(target.owner()?.unwrap_or_else(|| "default".to_owned())),
    }
}

fn defined(name: &str, target: &TargetArgs) -> Result<InventorySource, Failure> {
    if let Some(source) = target.config()?.inventory(name)? {
        return Ok(source);
    }
    let names: Vec<String> = target.config()?.inventory_names().into_iter().collect();
    let known = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    let message =
        format!("no config file defines inventory {:?} (inventories: {})", visible(name), visible(&known));
    Err(Failure::new(Exit::Usage, message).hint("add it to `inventories` in the config file"))
}

fn unread(name: &str, error: &InventoryError) -> Failure {
    Failure::new(Exit::Failed, format!("inventory {name:?}: {}", visible(&error.to_string())))
}

fn read_now(source: &InventorySource) -> Result<InventorySnapshot, Failure> {
    runtime()?.block_on(source.read()).map_err(|error| unread(&source.name, &error))
}

/// The stored hosts of an inventory.
fn stored(live: &ConnectedTarget, owner: &str, name: &str) -> Result<Option<LastGoodSnapshot>, Failure> {
    let found = runtime()?.block_on(read_last_good(&live.state, owner, name));
    found.map_err(|error| live.failure(&error))
}

fn list(args: &InventoryListArgs, printer: &Printer) -> Result<Exit, Failure> {
    let (config, owner) = (args.target.config()?, owner(args.owner.as_deref(), &args.target)?);
    let live = args.target.connect(LocalStart::Never)?;
    let mut rows = Vec::new();
    for name in config.inventory_names() {
        let source = match config.inventory(&name) {
            Ok(Some(source)) => source.kind.describe(),
            Ok(None) => continue,
            Err(failure) => format!("invalid: {}", failure.message),
        };
        let last = live.as_ref().map(|live| stored(live, &owner, &name)).transpose()?.flatten();
        rows.push((name, source, last));
    }
    if args.output == PlainForm::Json {
        let row = |(name, source, last): &(String, String, Option<LastGoodSnapshot>)| InventoryRow {
            name: name.clone(),
            source: source.clone(),
            hosts: last.as_ref().map(|last| last.hosts),
            since: last.as_ref().map(|last| last.at.to_string()),
        };
        printer.data(&contract::compact(&rows.iter().map(row).collect::<Vec<_>>()));
        return Ok(Exit::Done);
    }
    if rows.is_empty() {
        printer.info("no config file defines an inventory");
        return Ok(Exit::Done);
    }
    let columns = ["INVENTORY", "HOSTS", "SINCE", "SOURCE"];
    let mut table =
        Table::new(columns.map(|name| (name, if name == "HOSTS" { Align::Right } else { Align::Left })));
    for (name, source, last) in rows {
        let hosts = last.as_ref().map_or("-".to_owned(), |last| last.hosts.to_string());
        let age = |last: &LastGoodSnapshot| {
            format!("{} ago", span(clock::now().0.saturating_sub(last.at.0).unsigned_abs() / 1000))
        };
        let read = last.as_ref().map_or("never".to_owned(), age);
        table.row(vec![visible(&name), hosts, read, visible(&source)]);
    }
    printer.styled(&table.text());
    Ok(Exit::Done)
}

fn show(args: &InventoryShowArgs, printer: &Printer) -> Result<Exit, Failure> {
    let name = &args.name;
    let text = if args.last_good {
        let owner = owner(args.owner.as_deref(), &args.target)?;
        let live = args.target.connect(LocalStart::Never)?;
        let last = live.map(|live| stored(&live, &owner, name)).transpose()?.flatten();
        let none =
            || Failure::new(Exit::Failed, format!("inventory {:?} has no last good hosts", visible(name)));
        last.ok_or_else(none)?.text
    } else {
        let snapshot = read_now(&defined(name, &args.target)?)?;
        snapshot
            .notes
            .iter()
            .for_each(|note| printer.warning(&format!("inventory {name:?}: {}", visible(note))));
        snapshot.text
    };
    let hosts = parse(&text).map_err(|(line, why)| {
        Failure::new(
            Exit::Failed,
            format!("the stored hosts of inventory {name:?} are damaged: line {line}: {why}"),
        )
    })?;
    let all = hosts.len();
    let is_meant = |member: &GroupMember| {
        args.selector.as_ref().is_none_or(|selector| member.labels.is_selected(selector))
    };
    let hosts: Vec<GroupMember> = hosts.into_iter().filter(is_meant).collect();
    match args.output {
        InventoryForm::Json => {
            let rows: Vec<InventoryHostRow> = hosts.iter().map(row).collect();
            printer.data(&contract::compact(&rows));
        }
        InventoryForm::Name => {
            printer.data(&hosts.iter().map(|host| format!("{}\n", host.host.key)).collect::<String>());
        }
        InventoryForm::Text => {
            let mut table = Table::new(["HOST", "LABELS", "VARS"].map(|name| (name, Align::Left)));
            for InventoryHostRow { host, labels, vars } in hosts.iter().map(row) {
                let labels: Vec<String> =
                    labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
                table.row(vec![host.to_string(), visible(&labels.join(",")), visible(&vars.join(","))]);
            }
            if !hosts.is_empty() {
                printer.styled(&table.text());
            }
        }
    }
    if args.selector.is_some() {
        printer.info(&format!("{} of {} selected", hosts.len(), count(all, "host")));
    }
    Ok(Exit::Done)
}

fn row(member: &GroupMember) -> InventoryHostRow {
    let vars: BTreeSet<String> = member.vars.iter().flat_map(|vars| vars.keys().cloned()).collect();
    InventoryHostRow {
        host: member.host.key.clone(),
        labels: member.labels.iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        vars: vars.into_iter().collect(),
    }
}

fn accept(args: &InventoryAcceptArgs, printer: &Printer) -> Result<Exit, Failure> {
    let (name, owner) = (&args.name, owner(args.owner.as_deref(), &args.target)?);
    let source = defined(name, &args.target)?;
    let live = args.target.connect(LocalStart::Never)?;
    let live = live.ok_or_else(|| Failure::new(Exit::Unreachable, "the local system is not running"))?;
    let snapshot = read_now(&source)?;
    let last = stored(&live, &owner, name)?;
    let (added, lost) = last.map_or((snapshot.hosts, 0), |last| changed_hosts(&last.text, &snapshot.text));
    let written = runtime()?.block_on(store_last_good(&live.state, &owner, name, &snapshot));
    written.map_err(|error| live.failure(&error))?;
    match args.output {
        PlainForm::Json => {
            let accepted = AcceptedInventory { name: name.clone(), hosts: snapshot.hosts, added, lost };
            printer.data(&contract::compact(&accepted));
        }
        PlainForm::Text => printer.data(&format!(
            "accepted inventory {}: {} ({added} added, {lost} lost)\n",
            visible(name),
            count(snapshot.hosts, "host")
        )),
    }
    Ok(Exit::Done)
}
