//! `abide own`: transfers processes to another owner.

use std::time::Duration;

use tokio::time::Instant;

use crate::cli::commands::manual::operate::{print_results, select_instances};
use crate::cli::commands::manual::{InstanceArgs, observe_all};
use crate::cli::output::print::{BOLD, Printer, count};
use crate::cli::target::{ConnectedTarget, runtime};
use crate::cli::{Exit, Failure};
use crate::clock;
use crate::contract::HistoryEntry;
use crate::engine::history;
use crate::engine::transfer::{Transfer, TransferError};
use crate::model::{HoldReason, InstanceKey};

/// Time limit for the transfer, and for the leases of both owners.
const TRANSFER_TIMEOUT: Duration = Duration::from_secs(600);
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// Transfer processes to another owner, without a restart
///
/// The manifests of the new owner should declare them, and those of the old owner no longer.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  abide own web/api --from default --to web-team")]
pub struct OwnArgs {
    #[command(flatten)]
    pub instances: InstanceArgs,
    /// Current owner
    #[arg(long, value_name = "NAME", env = "ABIDE_OWN_FROM")]
    pub from: String,
    /// New owner
    #[arg(long, value_name = "NAME", env = "ABIDE_OWN_TO")]
    pub to: String,
}

pub fn run(args: &OwnArgs, printer: &Printer) -> Result<Exit, Failure> {
    if args.from == args.to || args.to.is_empty() {
        return Err(Failure::new(Exit::Usage, "--from and --to must be two owners"));
    }
    let live = args.instances.target.connect_or_start(printer)?;
    runtime()?.block_on(own(args, &live, printer))
}

async fn own(args: &OwnArgs, live: &ConnectedTarget, printer: &Printer) -> Result<Exit, Failure> {
    let observed = observe_all(live).await?.remembered();
    let selected = select_instances(&args.instances, &observed, live).await?;
    let selected: Vec<&InstanceKey> = selected.into_iter().map(|(key, _)| key).collect();
    let transfer = Transfer {
        from: &args.from,
        to: &args.to,
        lock_timeout: LOCK_TIMEOUT,
        deadline: Instant::now() + TRANSFER_TIMEOUT,
    };
    let transferring = transfer.run(live, |key, _| selected.contains(&key));
    let results = transferring.await.map_err(|error| failure(&error, live))?;
    let failed = print_results(&results, printer);
    let done = results.len() - failed;
    let entry = HistoryEntry {
        source: format!("own --from {} --to {}", args.from, args.to),
        steps: history::steps(&results),
        at: clock::now().to_string(),
        by: history::user_at_host(),
        exit: Some(if failed == 0 { 0 } else { 3 }),
        failed: Some(failed),
        ..HistoryEntry::default()
    };
    let recorded = history::add(&live.state, &args.to, clock::now(), &entry).await;
    recorded.map_err(|error| live.failure(&error))?;
    let all = count(results.len(), "instance");
    printer.styled(&format!("{BOLD}owned by {:?}{BOLD:#}: {done} of {all}\n", args.to));
    Ok(if failed == 0 { Exit::Done } else { Exit::Incomplete })
}

fn failure(error: &TransferError, live: &ConnectedTarget) -> Failure {
    let message = error.to_string();
    match error {
        TransferError::NotOwned { .. } | TransferError::NotSupervised(_) => {
            Failure::refused(HoldReason::NotOwned.word(), message)
        }
        TransferError::NoAgent(_) => Failure::new(Exit::Unreachable, message),
        TransferError::UnknownSpec(_) => Failure::new(Exit::Failed, message),
        TransferError::Lease(error) => live.apply_failure(error),
    }
}
