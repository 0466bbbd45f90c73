//! `abide lease`: `list` prints holders and generations of leases, `reset` frees a stuck lease.

use clap::{Subcommand, ValueEnum};

use crate::cli::args::{PlainForm, parse_switch};
use crate::cli::output::print::{Printer, visible};
use crate::cli::output::table::{Align, Table};
use crate::cli::target::{ConnectedTarget, LocalStart, TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::clock::now;
use crate::contract::{self, LeaseHolderRow, LeaseReset, LeaseRow};
use crate::model::Time;
use crate::store::lease::{Holder, MAX_RESET, Record};
use crate::store::{Reset, Store, keys};

/// List leases, and free a stuck one
///
/// Each owner has two leases per target. The holder of the writer lease may change the owner's processes; every change
/// carries its generation, and gateway and agents refuse an older one. The holder of the leader lease is the active
/// `watch`.
#[derive(Debug, clap::Args)]
pub struct LeaseArgs {
    #[command(subcommand)]
    pub verb: LeaseVerb,
}

#[derive(Debug, Subcommand)]
pub enum LeaseVerb {
    List(ListArgs),
    Reset(ResetArgs),
}

/// List leases: owner, kind, generation, holder, time to expiry
#[derive(Debug, clap::Args)]
pub struct ListArgs {
    #[command(flatten)]
    pub target: TargetArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_LEASE_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

/// Free a lease and raise its generation
///
/// The next holder gets a generation above every earlier one and above those that agents reported. A lease that is
/// being renewed is not freed (exit 6) without --force.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  abide lease reset default --generation 1200")]
pub struct ResetArgs {
    /// Owner of the lease
    #[arg(value_name = "OWNER")]
    pub owner: String,
    /// Kind of the lease
    #[arg(long, value_enum, default_value_t, env = "ABIDE_LEASE_KIND", value_name = "KIND")]
    pub kind: Kind,
    /// Give the next holder a generation above N, for agents that know a higher one than the store
    #[arg(long, value_name = "N", env = "ABIDE_LEASE_GENERATION", default_value_t = 0,
          value_parser = clap::value_parser!(u64).range(..=MAX_RESET))]
    pub generation: u64,
    /// Free the lease even if its holder renews it: the holder's next change is refused
    #[arg(long, env = "ABIDE_LEASE_FORCE", value_parser = parse_switch)]
    pub force: bool,
    #[command(flatten)]
    pub target: TargetArgs,
    /// Output format
    #[arg(short, long, value_enum, default_value_t, env = "ABIDE_LEASE_OUTPUT", value_name = "FORMAT")]
    pub output: PlainForm,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    #[default]
    Writer,
    Leader,
}

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Kind::Writer => "writer",
            Kind::Leader => "leader",
        }
    }
}

pub fn run(args: &LeaseArgs, printer: &Printer) -> Result<Exit, Failure> {
    match &args.verb {
        LeaseVerb::List(args) => list(args, printer),
        LeaseVerb::Reset(args) => reset(args, printer),
    }
}

/// The local system need not run to answer with no lease; a reset needs it.
fn connect(target: &TargetArgs) -> Result<ConnectedTarget, Failure> {
    let absent = || {
        Failure::new(Exit::Unreachable, "target local: the local system is not running")
            .hint("`abide up` starts it")
    };
    target.connect(LocalStart::Never)?.ok_or_else(absent)
}

fn list(args: &ListArgs, printer: &Printer) -> Result<Exit, Failure> {
    let live = connect(&args.target)?;
    let leases = runtime()?.block_on(live.state.leases()).map_err(|error| live.failure(&error))?;
    if args.output == PlainForm::Json {
        let rows: Vec<LeaseRow> = leases.iter().map(|(name, record)| row(name, record)).collect();
        printer.data(&contract::pretty(&rows));
        return Ok(Exit::Done);
    }
    let mut table = Table::new([
        ("OWNER", Align::Left),
        ("KIND", Align::Left),
        ("GENERATION", Align::Right),
        ("EXPIRES IN", Align::Left),
        ("HOLDER", Align::Left),
    ]);
    for (name, record) in &leases {
        let (kind, owner) = keys::lease_name_parts(name);
        let left = remaining_ms(record).map_or("-".to_owned(), |ms| format!("{:.1}s", ms as f64 / 1000.0));
        let who = record.holder.as_ref().map_or("free".to_owned(), describe_holder);
        table.row(vec![visible(owner), visible(kind), record.generation.to_string(), left, visible(&who)]);
    }
    printer.styled(&table.text());
    Ok(Exit::Done)
}

fn reset(args: &ResetArgs, printer: &Printer) -> Result<Exit, Failure> {
    let live = connect(&args.target)?;
    let (owner, kind) = (&args.owner, args.kind.word());
    let name = format!("{kind}/{owner}");
    let reset = runtime()?.block_on(async {
        let known = live.state.has_lease(&name).await?;
        // A mistyped owner must not leave a lease behind.
        match known || args.generation > 0 {
            true => live.state.reset_lease(&name, args.generation, args.force).await.map(Some),
            false => Ok(None),
        }
    });
    match reset.map_err(|error| live.failure(&error))? {
        None => {
            let message = format!("owner {owner:?} has no {kind} lease at target {}", live.name);
            Err(Failure::new(Exit::Failed, message).hint("`abide lease list` shows them"))
        }
        Some(Reset::Renewed { holder, left_ms }) => {
            let message = format!(
                "{} holds the {kind} lease of owner {owner:?} and renews it ({left_ms} ms left)",
                describe_holder(&holder)
            );
            Err(Failure::new(Exit::Locked, message).hint("stop that process, or pass --force"))
        }
        Some(Reset::Free { generation }) => {
            match args.output {
                PlainForm::Text => printer.styled(&format!(
                    "{kind} lease of owner {:?} is free; the next generation is above {generation}\n",
                    visible(owner)
                )),
                PlainForm::Json => {
                    let (owner, kind) = (owner.clone(), kind.to_owned());
                    printer.data(&contract::pretty(&LeaseReset { owner, kind, generation }));
                }
            }
            Ok(Exit::Done)
        }
    }
}

fn row(name: &str, record: &Record) -> LeaseRow {
    let (kind, owner) = keys::lease_name_parts(name);
    let holder = record.holder.as_ref().map(|holder| LeaseHolderRow {
        host: holder.host.clone(),
        pid: holder.pid,
        since: (holder.since > 0).then(|| Time(holder.since).to_string()),
        id: holder.id.clone(),
        dead: holder.is_dead(),
    });
    LeaseRow {
        owner: owner.to_owned(),
        kind: kind.to_owned(),
        generation: record.generation,
        holder,
        expires_in_ms: remaining_ms(record),
        reported_generation: (record.floor > 0).then_some(record.floor),
    }
}

/// `None`: the lease is free or has expired.
fn remaining_ms(record: &Record) -> Option<i64> {
    let left = record.expires.saturating_sub(now().0);
    (record.holder.is_some() && left > 0).then_some(left)
}

fn describe_holder(holder: &Holder) -> String {
    let since = if holder.since > 0 { format!(" since {}", Time(holder.since)) } else { String::new() };
    format!("{} (process {}{since})", holder.host, holder.pid)
}
