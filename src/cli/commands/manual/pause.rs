//! `abide pause` and `abide resume`: suspend reconciliation of a namespace or of the whole target.

use super::{HoldArgs, Until};
use crate::cli::args::parse_switch;
use crate::cli::output::print::{BOLD, Printer};
use crate::cli::target::{TargetArgs, runtime};
use crate::cli::{Exit, Failure};
use crate::engine::history;
use crate::model::{Name, Pause};
use crate::store::{Store, Txn, keys};

/// Pause reconciliation of a namespace or of the target
#[derive(Debug, clap::Args)]
pub struct PauseArgs {
    /// Namespace to pause
    #[arg(value_name = "NAMESPACE", required_unless_present = "all")]
    pub namespace: Option<Name>,
    /// Pause every namespace
    #[arg(long, env = "ABIDE_ALL", value_parser = parse_switch, conflicts_with = "namespace")]
    pub all: bool,
    #[command(flatten)]
    pub terms: HoldArgs,
    #[command(flatten)]
    pub target: TargetArgs,
}

/// Resume reconciliation
#[derive(Debug, clap::Args)]
pub struct ResumeArgs {
    /// Namespace to resume [default: the pause of the whole target]
    #[arg(value_name = "NAMESPACE")]
    pub namespace: Option<Name>,
    /// End the pause of the whole target
    #[arg(long, env = "ABIDE_ALL", value_parser = parse_switch, conflicts_with = "namespace")]
    pub all: bool,
    #[command(flatten)]
    pub target: TargetArgs,
}

pub fn pause(args: &PauseArgs, printer: &Printer) -> Result<Exit, Failure> {
    let live = args.target.connect_or_start(printer)?;
    let pause = Pause {
        namespace: args.namespace.clone(),
        by: history::user(),
        reason: args.terms.reason.clone(),
        until: args.terms.until.map(Until::time),
    };
    let key = keys::pause(args.namespace.as_ref());
    let value = serde_json::to_vec(&pause).unwrap_or_default();
    let written = runtime()?.block_on(live.state.txn(Txn::put(key, value)));
    written.map_err(|error| live.failure(&error))?;
    let what = args.namespace.as_ref().map_or("everything".to_owned(), |name| format!("namespace {name}"));
    let until = pause.until.map_or("until it is resumed".to_owned(), |time| format!("until {time}"));
    printer.styled(&format!("{BOLD}paused{BOLD:#}: {what}, {until}\n"));
    Ok(Exit::Done)
}

pub fn resume(args: &ResumeArgs, printer: &Printer) -> Result<Exit, Failure> {
    let live = args.target.connect_or_start(printer)?;
    let paused = runtime()?.block_on(async {
        let (_, pauses) = live.holds_and_pauses().await?;
        let deleted = live.state.txn(Txn::delete(keys::pause(args.namespace.as_ref()))).await;
        deleted.map_err(|error| live.failure(&error))?;
        Ok::<_, Failure>(pauses.iter().any(|pause| pause.namespace == args.namespace))
    })?;
    let what = args.namespace.as_ref().map_or("everything".to_owned(), |name| format!("namespace {name}"));
    printer.styled(&match paused {
        true => format!("{BOLD}resumed{BOLD:#}: {what}\n"),
        false => format!("nothing was paused: {what}\n"),
    });
    Ok(Exit::Done)
}
