//! `abide unprotect`: ends the protection of processes that no manifest declares any more.

use std::collections::BTreeSet;

use crate::cli::commands::manual::{InstanceArgs, observe_all};
use crate::cli::declared_names::{DeclaredNames, KnownNames};
use crate::cli::output::print::{BOLD, Printer, count, visible};
use crate::cli::target::runtime;
use crate::cli::{Exit, Failure};
use crate::clock;
use crate::contract::HistoryEntry;
use crate::engine::{history, protections};
use crate::model::InstanceKey;
use crate::observe::Target;

/// End the protection of processes, so that --prune can remove them
///
/// `protect` in a manifest outlasts its file: a protected process whose manifest was deleted is held. A process that a
/// manifest still declares is protected again by the next apply.
#[derive(Debug, clap::Args)]
pub struct UnprotectArgs {
    #[command(flatten)]
    pub instances: InstanceArgs,
    /// Reason to record in the history
    #[arg(long, value_name = "TEXT", env = "ABIDE_REASON")]
    pub reason: String,
}

pub fn run(args: &UnprotectArgs, printer: &Printer) -> Result<Exit, Failure> {
    let live = args.instances.target.connect_or_start(printer)?;
    runtime()?.block_on(async {
        let broken = |error: crate::store::Error| live.failure(&error);
        let protected = protections::read(&live.state).await.map_err(broken)?;
        let observed = observe_all(&live).await?.remembered();
        let declared = DeclaredNames::read(&live).await;
        let labelled = observed.instances.iter().filter(|(_, seen)| !seen.specs.protections.is_empty());
        // A record without protections has ended those of the label.
        let is_ended = |key: &InstanceKey| protected.get(key).is_some_and(Vec::is_empty);
        let protected: BTreeSet<&InstanceKey> =
            protected.keys().chain(labelled.map(|(key, _)| key)).filter(|key| !is_ended(key)).collect();
        let recorded = protected.iter().copied().collect();
        let known = KnownNames { declared: &declared, observed: &observed, recorded };
        if let Some(one) = args.instances.processes.iter().find(|one| !known.has(one)) {
            return Err(known.unknown(one, &live.name));
        }
        let selection = args.instances.select.selection();
        let none = Default::default();
        let is_meant = |key: &&InstanceKey| {
            let labels = observed.instances.get(*key).map_or(&none, |seen| &seen.labels);
            declared.selects(&args.instances, &selection, key, labels)
        };
        let ended: Vec<InstanceKey> = protected.into_iter().filter(is_meant).cloned().collect();
        // Elsewhere a label may protect the process, also one that the last list did not show.
        let by_label = |key: &InstanceKey| {
            let owner = observed.instances.get(key).and_then(|seen| seen.owner.as_deref());
            (!live.caps().reads_specs).then(|| owner.unwrap_or_default().to_owned())
        };
        let with_labels: Vec<_> = ended.iter().map(|key| (key.clone(), by_label(key))).collect();
        protections::end(&live.state, &with_labels).await.map_err(broken)?;
        let still: BTreeSet<String> =
            ended.iter().filter_map(|key| declared.of(key)).map(ToString::to_string).collect();
        if !still.is_empty() {
            let names = still.into_iter().map(|name| visible(&name)).collect::<Vec<_>>().join(", ");
            printer.warning(&format!(
                "manifests still declare {names}: their `protect` applies again with them"
            ));
        }
        let owners: BTreeSet<String> = ended
            .iter()
            .filter_map(|key| observed.instances.get(key)?.owner.as_deref().map(str::to_owned))
            .collect();
        for owner in owners {
            let names: BTreeSet<String> = ended.iter().map(|key| key.process().to_string()).collect();
            let names = names.into_iter().collect::<Vec<_>>().join(" ");
            let entry = HistoryEntry {
                source: format!("unprotect {names}: {}", args.reason),
                at: clock::now().to_string(),
                by: history::user_at_host(),
                exit: Some(0),
                ..HistoryEntry::default()
            };
            history::add(&live.state, &owner, clock::now(), &entry).await.map_err(broken)?;
        }
        printer.styled(&format!("{BOLD}unprotected{BOLD:#}: {}\n", count(ended.len(), "instance")));
        Ok(Exit::Done)
    })
}
