//! Rollout settings of a process, and the progress of a rollout that waits for promotions.

use std::collections::BTreeSet;
use std::fmt;

use super::{Amount, HostKey, ProcessKey};

/// Rollout settings. Unset: all instances at once, within the budgets.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Rollout {
    pub batch: Option<Amount>,
    pub canary: Option<Amount>,
    pub soak_secs: Option<u64>,
    pub max_failures: Option<u64>,
    pub auto_rollback: Option<bool>,
    /// Host groups in the order of the rollout. Hosts of none of them come last.
    pub groups: Vec<RolloutGroup>,
    /// Maximum unavailable instances per group.
    pub max_unavailable: Option<Amount>,
    /// The rollout waits for a promotion after the canaries and after each group.
    pub pauses: bool,
}

/// A host group of a rollout.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct RolloutGroup {
    pub name: String,
    pub hosts: BTreeSet<HostKey>,
}

impl Rollout {
    /// The index of the first group that contains a host; the number of groups for a host in none.
    pub fn group_of(&self, host: &HostKey) -> usize {
        self.groups.iter().position(|group| group.hosts.contains(host)).unwrap_or(self.groups.len())
    }
}

/// The digest of a manifest revision contains this text: it must not change for settings without groups.
impl fmt::Debug for Rollout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rollout {
            batch,
            canary,
            soak_secs,
            max_failures,
            auto_rollback,
            groups,
            max_unavailable,
            pauses,
        } = self;
        let mut text = f.debug_struct("Rollout");
        text.field("batch", batch).field("canary", canary).field("soak_secs", soak_secs);
        text.field("max_failures", max_failures).field("auto_rollback", auto_rollback);
        if !groups.is_empty() {
            text.field("groups", groups);
        }
        if max_unavailable.is_some() {
            text.field("max_unavailable", max_unavailable);
        }
        if *pauses {
            text.field("pauses", pauses);
        }
        text.finish()
    }
}

impl fmt::Debug for RolloutGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.name, f)
    }
}

/// Decisions of persons on the rollout of one version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RolloutProgress {
    /// Id of the version: see `reconcile::rollout_id`.
    pub id: String,
    /// Number of promoted stages.
    pub promoted: usize,
    pub is_aborted: bool,
}

/// A rollout that waits for a promotion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RolloutPause {
    pub process: ProcessKey,
    pub id: String,
    /// Index of the stage after which it waits.
    pub stage: usize,
    pub stages: Vec<String>,
    /// That stage is done: every instance of it runs the new version and is healthy.
    pub is_reached: bool,
}
