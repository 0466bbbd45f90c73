//! `abide release`: ends holds, so that manifests apply again.

use std::collections::BTreeMap;

use super::{InstanceArgs, observe_all};
use crate::cli::declared_names::{DeclaredNames, KnownNames};
use crate::cli::output::print::{BOLD, Printer, count};
use crate::cli::target::runtime;
use crate::cli::{Exit, Failure};
use crate::model::Hold;
use crate::store::{Store, Txn, keys};

/// Release holds: manifests apply again
#[derive(Debug, clap::Args)]
pub struct ReleaseArgs {
    #[command(flatten)]
    pub instances: InstanceArgs,
}

pub fn run(args: &ReleaseArgs, printer: &Printer) -> Result<Exit, Failure> {
    let live = args.instances.target.connect_or_start(printer)?;
    runtime()?.block_on(async {
        let (holds, _) = live.holds_and_pauses().await?;
        let observed = observe_all(&live).await?.remembered();
        let (selection, none) = (args.instances.select.selection(), BTreeMap::new());
        let declared = DeclaredNames::read(&live).await;
        let recorded = holds.iter().map(|hold| &hold.instance).collect();
        let known = KnownNames { declared: &declared, observed: &observed, recorded };
        // A known name without a hold is fine: there is nothing to release.
        if let Some(one) = args.instances.processes.iter().find(|one| !known.has(one)) {
            return Err(known.unknown(one, &live.name));
        }
        let is = |hold: &&Hold| {
            // An instance that no longer exists has no labels.
            let labels = observed.instances.get(&hold.instance).map_or(&none, |seen| &seen.labels);
            declared.selects(&args.instances, &selection, &hold.instance, labels)
        };
        let released: Vec<&Hold> = holds.iter().filter(is).collect();
        let txn = released
            .iter()
            .fold(Txn::default(), |txn, hold| txn.and(Txn::delete(keys::hold(&hold.instance))));
        if !txn.writes.is_empty() {
            live.state.txn(txn).await.map_err(|error| live.failure(&error))?;
        }
        printer.styled(&format!("{BOLD}released{BOLD:#}: {}\n", count(released.len(), "hold")));
        Ok(Exit::Done)
    })
}
