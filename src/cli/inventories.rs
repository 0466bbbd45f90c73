//! Inventories of a run: reads those that the manifests name, and reports the ones that are not used.

use std::collections::BTreeSet;
use std::path::PathBuf;

use crate::cli::output::print::{Printer, visible};
use crate::cli::target::{ConnectedTarget, LocalStart, TargetArgs};
use crate::cli::{Exit, Failure};
use crate::clock;
use crate::inventory::{ResolvedInventories, UnresolvedInventory, resolve};
use crate::manifest::{self, Limits, Loaded};
use crate::model::{Desired, span};

/// Word of the refusal.
pub const INVENTORY_UNKNOWN: &str = "InventoryUnknown";

/// Inventories that lost hosts.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct InventoryArgs {
    /// Accept that this inventory lost any number of hosts (repeatable)
    #[arg(long = "accept-shrink", value_name = "NAME", env = "ABIDE_ACCEPT_SHRINK", value_delimiter = ',')]
    pub accept_shrink: Vec<String>,
}

/// Manifests with the hosts of their inventories.
pub struct LoadedManifests {
    pub loaded: Loaded,
    pub inventories: ResolvedInventories,
}

/// Loads manifests, and reads the inventories that they name. `owner`: of the last good hosts, from the policies.
/// `is_offline`: without a target, so without last good hosts.
pub fn load(
    paths: &[PathBuf],
    limits: &Limits,
    (target, args): (&TargetArgs, &InventoryArgs),
    owner: impl FnOnce(&Desired) -> Result<String, Failure>,
    is_offline: bool,
    printer: &Printer,
) -> Result<LoadedManifests, Failure> {
    let loaded = manifest::load(paths, limits);
    let names = loaded.unread_inventories();
    if names.is_empty() {
        return Ok(LoadedManifests { loaded, inventories: ResolvedInventories::default() });
    }
    let owner = owner(&loaded.desired)?;
    let inventories = read(&names, target, args, &owner, is_offline, printer)?;
    let loaded = manifest::load_with(paths, limits, &inventories.stand_ins());
    Ok(LoadedManifests { loaded, inventories })
}

/// Loads manifests without a target. The inventories that they name are read, without last good hosts.
pub fn load_offline(
    paths: &[PathBuf],
    limits: &Limits,
    config: Option<&PathBuf>,
    printer: &Printer,
) -> Result<Loaded, Failure> {
    let loaded = manifest::load(paths, limits);
    let names = loaded.unread_inventories();
    if names.is_empty() {
        return Ok(loaded);
    }
    let target = TargetArgs { config: config.cloned(), ..TargetArgs::local() };
    let inventories = read_without_state(&names, &target, printer)?;
    Ok(manifest::load_with(paths, limits, &inventories.stand_ins()))
}

/// Reads the inventories, with the last good hosts of the target's state.
fn read(
    names: &BTreeSet<String>,
    target: &TargetArgs,
    args: &InventoryArgs,
    owner: &str,
    is_offline: bool,
    printer: &Printer,
) -> Result<ResolvedInventories, Failure> {
    let live = if is_offline { None } else { target.connect(LocalStart::Never)? };
    let accepted = args.accept_shrink.iter().cloned().collect();
    run(names, target, live.as_ref().map(|live| (live, owner)), &accepted, printer)
}

/// Reads the inventories without last good hosts.
pub fn read_without_state(
    names: &BTreeSet<String>,
    target: &TargetArgs,
    printer: &Printer,
) -> Result<ResolvedInventories, Failure> {
    run(names, target, None, &BTreeSet::new(), printer)
}

fn run(
    names: &BTreeSet<String>,
    target: &TargetArgs,
    live: Option<(&ConnectedTarget, &str)>,
    accepted: &BTreeSet<String>,
    printer: &Printer,
) -> Result<ResolvedInventories, Failure> {
    let sources = target.inventories(names)?;
    let state = live.map(|(live, owner)| (&live.state, owner));
    // The caller may be inside of a runtime.
    let done = std::thread::scope(|scope| {
        let work = || {
            let runtime = crate::cli::target::runtime()?;
            Ok::<_, Failure>(runtime.block_on(resolve(names, &sources, state, accepted)))
        };
        scope.spawn(work).join().unwrap_or_else(|_| Err(Failure::new(Exit::Failed, "a thread ended early")))
    })?;
    let resolved = done.map_err(|error| match live {
        Some((live, _)) => live.failure(&error),
        None => Failure::new(Exit::Failed, error.to_string()),
    })?;
    let resolved = resolved.map_err(|unresolved| refusal(&unresolved))?;
    for (name, one) in &resolved.0 {
        one.notes.iter().for_each(|note| printer.warning(&format!("inventory {name:?}: {}", visible(note))));
        if let Some(fault) = &one.fault {
            let age = span(clock::now().0.saturating_sub(one.at.0).unsigned_abs() / 1000);
            let fault = visible(&fault.to_string());
            printer.warning(&format!(
                "inventory {name:?}: {fault}; its {} last good hosts are used, from {age} ago",
                one.hosts
            ));
        }
    }
    Ok(resolved)
}

fn refusal(unresolved: &[UnresolvedInventory]) -> Failure {
    let line =
        |one: &UnresolvedInventory| format!("inventory {:?}: {}", one.name, visible(&one.why.to_string()));
    let lines: Vec<String> = unresolved.iter().map(line).collect();
    let message = format!("{}; it has no last good hosts, so nothing was planned", lines.join("; "));
    Failure::refused(INVENTORY_UNKNOWN, message)
        .hint("`inventories` in the config file defines inventories; `abide inventory show NAME` reads one")
}
