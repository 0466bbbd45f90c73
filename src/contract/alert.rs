//! Alert: the JSON that the routes of `notify` deliver, and the state of each route.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::event::EventLevel;

/// Kind of an incident. The words are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AlertKind {
    /// Processes run, and their health check fails.
    Unhealthy,
    /// Processes end again and again.
    CrashLoop,
    /// An operation failed, or a one-shot process ended without success.
    Failed,
    /// Changes exceed a delete or restart budget.
    HeldByBudget,
    /// Instances are retried no longer.
    Suspended,
    /// Instances differ although no manifest changed. Its recovery is the repair.
    Drift,
    /// Hosts cannot be observed.
    HostUnknown,
    /// The manifests have errors.
    ManifestErrors,
    /// The content of the source is not applied, such as of an unreachable remote or a rewind.
    SourceNotFollowed,
    /// The target or its state cannot be read.
    TargetUnreachable,
    /// A rollout waits for its promotion.
    RolloutPaused,
    /// Event: a rollout reached all its instances.
    RolloutFinished,
    /// Event: a rollout failed and was rolled back.
    RolledBack,
}

impl AlertKind {
    pub const ALL: [AlertKind; 13] = [
        AlertKind::Unhealthy,
        AlertKind::CrashLoop,
        AlertKind::Failed,
        AlertKind::HeldByBudget,
        AlertKind::Suspended,
        AlertKind::Drift,
        AlertKind::HostUnknown,
        AlertKind::ManifestErrors,
        AlertKind::SourceNotFollowed,
        AlertKind::TargetUnreachable,
        AlertKind::RolloutPaused,
        AlertKind::RolloutFinished,
        AlertKind::RolledBack,
    ];

    pub fn word(self) -> &'static str {
        match self {
            AlertKind::Unhealthy => "unhealthy",
            AlertKind::CrashLoop => "crash_loop",
            AlertKind::Failed => "failed",
            AlertKind::HeldByBudget => "held_by_budget",
            AlertKind::Suspended => "suspended",
            AlertKind::Drift => "drift",
            AlertKind::HostUnknown => "host_unknown",
            AlertKind::ManifestErrors => "manifest_errors",
            AlertKind::SourceNotFollowed => "source_not_followed",
            AlertKind::TargetUnreachable => "target_unreachable",
            AlertKind::RolloutPaused => "rollout_paused",
            AlertKind::RolloutFinished => "rollout_finished",
            AlertKind::RolledBack => "rolled_back",
        }
    }

    pub fn severity(self) -> EventLevel {
        match self {
            AlertKind::Unhealthy
            | AlertKind::CrashLoop
            | AlertKind::Failed
            | AlertKind::Suspended
            | AlertKind::ManifestErrors
            | AlertKind::SourceNotFollowed
            | AlertKind::TargetUnreachable
            | AlertKind::RolledBack => EventLevel::Error,
            AlertKind::HeldByBudget | AlertKind::Drift | AlertKind::HostUnknown => EventLevel::Warning,
            AlertKind::RolloutPaused | AlertKind::RolloutFinished => EventLevel::Info,
        }
    }

    /// Whether it has no duration, and therefore no recovery.
    pub fn is_event(self) -> bool {
        matches!(self, AlertKind::RolloutFinished | AlertKind::RolledBack)
    }
}

/// Whether incidents began or ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AlertPhase {
    Firing,
    Resolved,
}

impl AlertPhase {
    pub fn word(self) -> &'static str {
        match self {
            AlertPhase::Firing => "firing",
            AlertPhase::Resolved => "resolved",
        }
    }
}

/// One message of a route: incidents of one kind that began, continue or ended. Version 1.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AlertMessage {
    pub version: u32,
    pub status: AlertPhase,
    pub kind: AlertKind,
    pub severity: EventLevel,
    /// One line.
    pub title: String,
    /// One line per incident, for the first ones.
    pub text: String,
    pub owner: String,
    pub target: String,
    pub route: String,
    /// The active revision, and its commit.
    pub revision: String,
    pub commit: Option<String>,
    pub at: String,
    /// Number of incidents and of their instances.
    pub total: usize,
    pub instances: usize,
    /// The first incidents.
    pub incidents: Vec<AlertIncident>,
}

/// One incident: a process, a host, or the controller itself, with one cause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AlertIncident {
    /// `NAMESPACE/NAME` of a process, `CLOUD:IP` of a host, else empty.
    pub subject: String,
    pub namespace: Option<String>,
    pub since: String,
    /// `null`: it continues.
    pub ended: Option<String>,
    pub instances: usize,
    /// Some of the instances.
    pub first_instances: Vec<String>,
    pub detail: String,
}

/// Delivery state of a route, since the controller started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AlertRouteStatus {
    pub route: String,
    /// Receiver, without its secrets.
    pub to: String,
    /// Incidents that the receiver knows and that have not ended.
    pub open: usize,
    pub sent: u64,
    pub failed: u64,
    /// Error of the last attempt; `null`: it succeeded.
    pub error: Option<String>,
    pub failing_since: Option<String>,
    /// Events that were dropped because too many waited.
    pub dropped: u64,
}
