//! Published status of a controller: stored by `watch` and `up`, read by `status` and `apply`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The controller of an owner, as it last published itself. The lease of the leader shows whether it still runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PublishedStatus {
    pub owner: String,
    /// Host and process of the controller.
    pub host: String,
    pub pid: u32,
    /// The source, as it is recorded with a revision.
    pub source: String,
    pub revision: String,
    pub commit: Option<String>,
    pub follow: bool,
    pub heal: bool,
    pub prune: bool,
    /// The pinned revision, which overrides the source.
    pub pinned: Option<String>,
    /// Reason why the source cannot be followed, such as an unreachable remote or a rewind.
    pub source_error: Option<String>,
    /// Number of errors in the manifests, and the first ones.
    pub errors: usize,
    pub first_errors: Vec<String>,
    /// Number of instances that are retried no longer.
    pub suspended: usize,
    /// Processes whose rollout is in flight.
    pub rollouts: Vec<String>,
    /// The current failure of the controller.
    pub failure: Option<String>,
    /// Routes of `notify` whose last delivery failed, with the error.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notify_failures: Vec<String>,
    /// Time of the last change.
    pub at: String,
    /// Whether the controller leads now. Not stored: the reader sets it from the lease.
    pub running: bool,
}
