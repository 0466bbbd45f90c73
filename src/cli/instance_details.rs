//! Details of instances for `describe` and `why`: rows with fresh figures, holds, sync status and history.

use std::collections::{BTreeMap, BTreeSet};

use super::Failure;
use super::commands::manual::InstanceArgs;
use super::declared_names::DeclaredNames;
use super::sync_status::{ProcessStatus, statuses};
use super::target::ConnectedTarget;
use crate::contract::{HistoryEntry, TargetProcess};
use crate::model::{Hold, InstanceKey, ProcessKey};
use crate::store::{Store, keys};

/// Maximum instances whose figures are measured; the others have those of the last sample.
const MAX_MEASURED: usize = 10;

/// Facts of a target about the selected instances.
pub struct InstanceFacts {
    pub rows: Vec<TargetProcess>,
    pub holds: Vec<Hold>,
    pub statuses: BTreeMap<InstanceKey, ProcessStatus>,
    /// The runs of all owners, oldest first.
    pub history: Vec<HistoryEntry>,
    /// The message for named processes that the target lacks, if it has others.
    pub missing: Option<String>,
}

impl InstanceFacts {
    pub async fn read(live: &ConnectedTarget, args: &InstanceArgs) -> Result<InstanceFacts, Failure> {
        let selection = args.select.selection();
        let named = args.names().map(|name| name.namespace.clone());
        let namespaces: BTreeSet<_> = named.chain(selection.named_namespaces()).collect();
        let mut rows = live.rows("&attempts=1", namespaces).await?;
        let is_instance = |name: &ProcessKey| rows.iter().any(|row| row.instance().process() == *name);
        let declared = match args.names().all(is_instance) {
            true => DeclaredNames::default(),
            false => DeclaredNames::read(live).await,
        };
        rows.retain(|row| declared.selects(args, &selection, row.instance(), row.labels()));
        let keys: Vec<&InstanceKey> = rows.iter().map(TargetProcess::instance).collect();
        let missing = declared.unknown_message(args, &keys).filter(|_| !rows.is_empty());
        for row in rows.iter_mut().take(MAX_MEASURED) {
            measure(live, row).await;
        }
        let history = live.state.range(keys::HISTORY_PREFIX, None, usize::MAX).await.map(|page| page.entries);
        let history = history
            .unwrap_or_default()
            .iter()
            .filter_map(|entry| serde_json::from_slice(&entry.value).ok())
            .collect();
        let (holds, statuses) = (live.holds_and_pauses().await?.0, statuses(live).await?);
        Ok(InstanceFacts { rows, holds, statuses, history, missing })
    }

    pub fn hold(&self, instance: &InstanceKey) -> Option<&Hold> {
        self.holds.iter().find(|hold| hold.instance == *instance)
    }
}

/// Replaces the figures of a running process by fresh ones, where the agent answers.
async fn measure(live: &ConnectedTarget, row: &mut TargetProcess) {
    let (Ok(abide), TargetProcess::Gateway(process)) = (live.abide(), row) else { return };
    if process.running
        && let Ok(series) = abide.figures(&process.instance).await
    {
        process.figures = series.now.or(process.figures.take());
    }
}

/// Message and hint of a reading verb if no process matches.
pub fn no_match(args: &InstanceArgs, note: Option<String>) -> [String; 2] {
    let names: Vec<String> = args.processes.iter().map(ToString::to_string).collect();
    let target = &args.target.target;
    let message = match names.is_empty() {
        true => format!("target {target} has no process that matches the selection"),
        false => format!("target {target} has no process {}", names.join(", ")),
    };
    [message, note.unwrap_or_else(|| "`abide get processes` lists them".to_owned())]
}
