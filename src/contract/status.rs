//! Status: `GET /api/v1/status` of the controller, and `abide status -o json` of a target.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Number;

use super::alert::AlertRouteStatus;
use super::controller_status::PublishedStatus;
use super::event::EventEntry;
use super::hold::{HoldEntry, PauseEntry};
use super::plan::HeldRow;
use super::problem::ManifestProblem;
use crate::model::InstanceKey;

/// Overview of the controller, version 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ControllerReport {
    pub version: u32,
    /// Version of the program.
    pub abide: String,
    pub target: String,
    pub owner: String,
    pub source: SourceReport,
    pub pin: Option<PinDetails>,
    pub follow: bool,
    pub heal: bool,
    pub prune: bool,
    pub interval_secs: Number,
    pub started: String,
    /// `starting`, `waiting` or `leader`.
    pub role: String,
    /// The controller that leads, while this one waits.
    pub leader: Option<LeaderHost>,
    /// Generation of the leader lease.
    pub generation: Option<u64>,
    /// Time of the last observation.
    pub looked_at: Option<String>,
    pub look_age_secs: Option<u64>,
    /// Number of observations.
    pub looks: u64,
    pub failed_looks: u64,
    /// Duration of the last pass.
    pub pass_ms: Option<u64>,
    /// A pass is running.
    pub passing: bool,
    /// Steps in flight or queued.
    pub queue: usize,
    /// Plans in flight.
    pub under_way: usize,
    pub converged: bool,
    /// The current failure.
    pub trouble: Option<String>,
    /// Steps of the last plan.
    pub to_do: Option<usize>,
    pub instances: InstanceCounts,
    pub held: Vec<HeldRow>,
    pub held_total: usize,
    /// Instances that are retried later, or no longer.
    pub backing_off: Vec<HoldEntry>,
    pub holds: Vec<HoldEntry>,
    pub pauses: Vec<PauseEntry>,
    pub notes: Vec<String>,
    pub problems: Vec<ManifestProblem>,
    /// Routes of `notify`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notify: Vec<AlertRouteStatus>,
    /// Command lines and environment values are hidden: the reader showed no token.
    pub redacted: bool,
    /// Number of the newest event.
    pub last_event: u64,
    pub events: Vec<EventEntry>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SourceReport {
    pub paths: Vec<String>,
    /// The active revision.
    pub revision: String,
    pub commit: Option<String>,
    /// Reason why the source is not followed.
    pub not_followed: Option<String>,
    pub files: usize,
    /// Last good versions replace broken files.
    pub incomplete: bool,
}

/// The pinned revision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PinDetails {
    pub revision: String,
    pub by: String,
    pub reason: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LeaderHost {
    pub host: String,
    pub pid: u32,
}

/// Instance counts per word, including zero counts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct InstanceCounts {
    pub total: usize,
    pub sync: BTreeMap<String, usize>,
    pub health: BTreeMap<String, usize>,
    pub hosting: BTreeMap<String, usize>,
}

/// Overview of a target, in `abide status -o json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct TargetReport {
    /// Always true.
    pub running: bool,
    pub url: String,
    pub hosts: usize,
    pub hosts_without_agent: usize,
    pub processes: usize,
    pub processes_running: usize,
    /// Processes that are out of sync or unhealthy.
    pub not_as_told: Vec<OutOfSyncInstance>,
    /// Processes that were adopted and not restarted since: the spec that they run with is unknown.
    #[serde(default)]
    pub unknown_specs: Vec<InstanceKey>,
    /// Processes with files on the host that differ from the configmap.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drifted_files: Vec<DriftedFile>,
    pub holds: usize,
    pub pauses: usize,
    pub pins: Vec<PinnedOwner>,
    pub sources: Vec<ActiveSource>,
    /// Controllers, as they last published themselves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub controllers: Vec<PublishedStatus>,
}

/// A file on a host that differs from the configmap of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct DriftedFile {
    pub instance: InstanceKey,
    pub path: String,
}

/// The local system is not running.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TargetDown {
    /// Always false.
    pub running: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OutOfSyncInstance {
    pub instance: InstanceKey,
    pub why: String,
}

/// The pinned revision of an owner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PinnedOwner {
    pub owner: String,
    pub revision: String,
    pub commit: Option<String>,
    pub since: String,
    pub by: String,
    pub reason: Option<String>,
}

/// The active revision of an owner.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ActiveSource {
    pub owner: String,
    pub revision: String,
    pub commit: Option<String>,
    pub source: String,
    pub since: String,
}
