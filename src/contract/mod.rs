//! Public JSON: one type per document that commands print, servers answer and files contain.
//!
//! Writers serialize these types, and readers parse them. The OpenAPI documents of the gateway and of the controller
//! are derived from them. Fields are only added: a name, its position, its type, and the choice between `null` and
//! absence do not change.
//!
//! A time is a text in RFC 3339. An `Option` is `null` when unset, unless the field is skipped.

mod access;
mod alert;
mod apply_report;
mod audit;
mod controller_status;
mod event;
mod figures;
mod fleet;
mod gateway_process;
mod history;
mod hold;
mod host;
mod instance_history;
mod inventory;
mod lease;
mod log;
mod plan;
mod problem;
mod process_digest;
mod process_row;
mod rollout;
mod schema;
mod server;
mod state;
mod status;
mod task;
mod words;

pub use access::{AccessInfo, SessionInfo, TokenHash};
pub use alert::{AlertIncident, AlertKind, AlertMessage, AlertPhase, AlertRouteStatus};
pub use apply_report::{
    ApplyReport, ExitReport, RefusalReport, RolledBackProcess, StepReport, UnhealthyInstance,
};
pub use audit::{
    AuditAction, AuditCaller, AuditEntry, AuditEvent, AuditFailedRow, AuditInstances, AuditOutcome,
    AuditPage, AuditProblem, AuditPurpose, AuditVerification,
};
pub use controller_status::PublishedStatus;
pub use event::{EventDetails, EventEntry, EventKind, EventLevel};
pub use figures::{FigureDetails, FigureSample, FigureSeries};
pub use fleet::{
    CreatedJoinToken, HostCertificate, HostRevocation, JoinTokenRequest, JoinTokenRow, Revoked,
    TokenRevocation,
};
pub use gateway_process::{
    AgentFilePaths, GatewayProcess, ProcessChange, ProcessPage, ReportedSpec, RunReport,
};
pub use history::{HistoryEntry, HistoryStep, InstanceChange, OperationCounts, StepSummary};
pub use hold::{HoldDetails, HoldEntry, HoldRow, PauseEntry, PauseRequest, Paused, Resumed, ResumedScope};
pub use host::HostEntry;
pub use instance_history::{ExitDetails, ProbeDetails, RunDetails};
pub use inventory::{AcceptedInventory, InventoryHostRow, InventoryRow};
pub use lease::{LeaseHolderRow, LeaseReset, LeaseRow};
pub use log::LogLine;
pub use plan::{
    HeldRow, HeldStep, OfflineInputs, PlanDocument, PlanFlags, PlanGate, PlanInputs, PlanSource, PlanStep,
    StepReason,
};
pub use problem::{
    Difference, FieldDifference, ManifestProblem, RefusedLaunch, RefusedLaunches, Severity, Sides,
};
pub use process_digest::{ProcessDigest, ProcessDigestPage};
pub use process_row::{
    ControllerProcess, HeldDetail, Hosting, InstanceTimeline, ListedProcess, NextAction, OfflineRow,
    PlatformProcess, ProcessDetails, ProcessRow, ROW_FIELDS, ReportedDetails, TargetProcess, TimelineEvent,
    is_row_field, row_fields,
};
pub use rollout::RolloutRow;
pub use schema::SchemaSet;
pub use server::{Accepted, ConfigFileRow, ConfigOrigin, ErrorBody, ServerHealth, VersionInfo};
pub use state::{
    CompareItem, Holder, LeaseAnswer, ResetAnswer, StateChange, StateChanges, StateEntry, StateKept,
    StatePage, StateReleased, StateSlice, StoreAnswer, StoreRequest, TxnAnswer, WriteItem,
};
pub use status::{
    ActiveSource, ControllerReport, DriftedFile, InstanceCounts, LeaderHost, OutOfSyncInstance, PinDetails,
    PinnedOwner, SourceReport, TargetDown, TargetReport,
};
pub use task::{FoundTask, RenameRequest, TaskAnswer, TaskEntry};

/// A document on one line, as servers answer it.
pub fn compact(document: &impl serde::Serialize) -> String {
    serde_json::to_string(document).unwrap_or_default() + "\n"
}

/// A document for people and files, as commands print it.
pub fn pretty(document: &impl serde::Serialize) -> String {
    serde_json::to_string_pretty(document).unwrap_or_default() + "\n"
}

/// Deserializes a field whose absence and whose `null` differ.
fn present<'de, T: serde::Deserialize<'de>, D: serde::Deserializer<'de>>(
    from: D,
) -> Result<Option<T>, D::Error> {
    T::deserialize(from).map(Some)
}

/// Deserializes a field that is required even where it is `null`.
fn required<'de, T: serde::Deserialize<'de>, D: serde::Deserializer<'de>>(
    from: D,
) -> Result<Option<T>, D::Error> {
    serde::Deserialize::deserialize(from)
}
