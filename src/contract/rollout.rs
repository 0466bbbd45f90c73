//! Rollout of a process, as `abide rollout status` prints it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The last decision on a rollout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RolloutRow {
    /// `NAMESPACE/NAME`.
    pub process: String,
    pub owner: String,
    /// Id of the version.
    pub version: String,
    /// `paused`, `promoted`, `aborted` or `undone`.
    pub state: String,
    /// Number of promoted stages.
    pub promoted: usize,
    pub stages: Vec<String>,
    /// The stage that is in progress, or after which the rollout waits.
    pub stage: Option<String>,
    pub at: String,
    pub by: Option<String>,
    pub reason: Option<String>,
}
