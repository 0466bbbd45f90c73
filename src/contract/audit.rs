//! Audit entries of a gateway, as its files and its API have them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One line of an audit file. Times and numbers are those of the gateway; `who.user` and `for` are claims of the caller.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AuditEntry {
    /// Increases by one per entry, across files.
    pub seq: u64,
    pub time: String,
    pub event: AuditEvent,
    pub who: AuditCaller,
    pub what: AuditAction,
    /// The plan, revision and commit on whose behalf the call was made.
    #[serde(rename = "for", default, skip_serializing_if = "AuditPurpose::is_empty")]
    pub purpose: AuditPurpose,
    pub result: AuditOutcome,
    /// Digest of this entry and of the one before it, in hexadecimal.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub hash: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AuditEvent {
    /// A call that changes something.
    #[default]
    Change,
    /// A read of something that may contain secrets: a log, a stored spec or manifest, the audit itself.
    Read,
    /// A call that was refused for its credentials, a missing grant or a limit.
    Refused,
    /// The first call of an app or a person from an address within an hour.
    Login,
    /// The end of a task.
    Task,
    /// The gateway itself: its start and stop, entries that it could not write.
    Gateway,
}

/// The caller of a request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AuditCaller {
    /// `app`, `person`, `agent`, `token` (a join token), `gateway`, or `unknown`: wrong or no credentials.
    pub kind: String,
    /// Of a person: `person:NAME`. Of an unknown caller: the name that it claimed.
    pub name: String,
    /// The user on whose behalf an app calls, as the app claims.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub user: String,
    /// Address and port.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub peer: String,
}

/// Action of a call, and its instances.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AuditAction {
    /// The call, as metrics name it.
    pub call: String,
    /// Every instance, grouped by process and operation.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub instances: Vec<AuditInstances>,
    /// Hosts of a call about agents.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<String>,
    /// Keys that a controller wrote or read, without their values.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<String>,
    /// The task that the call created, or that ended.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub task: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

/// Instances of one process with the same operation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AuditInstances {
    /// `NAMESPACE/NAME`; `NAMESPACE/*`: the whole namespace.
    pub process: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub op: String,
    /// `CLOUD:IP` or `@AGENT_ID`.
    pub hosts: Vec<String>,
}

/// The purpose of a call, as its caller claims. Abide's own commands and controllers send it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AuditPurpose {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub owner: String,
    /// Generation of the owner's writer lease.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// Idempotency key of the call: it names the run of an execution.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub op: String,
    /// Plan id.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub plan: String,
    /// Revision of the manifests.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub revision: String,
    /// Commit of the manifests.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub commit: String,
    /// Reason of a change outside of a maintenance window.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub break_glass: String,
}

impl AuditPurpose {
    pub fn is_empty(&self) -> bool {
        *self == AuditPurpose::default()
    }
}

/// The result of a call or a task.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AuditOutcome {
    /// `ok`, `refused`, or `failed`.
    pub status: String,
    /// Code of the answer; 0: success.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<i64>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    /// Rows that are not done: instance and code.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed: Vec<AuditFailedRow>,
    /// Similar events since the last entry of this caller that have no entry of their own.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub suppressed: u64,
}

/// A row of a task or a registration that is not done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AuditFailedRow {
    /// HOST:NAMESPACE:NAME.
    pub instance: String,
    pub code: i64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// Entries in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AuditPage {
    pub entries: Vec<AuditEntry>,
    /// More entries may follow: `after` of the next request.
    pub more: Option<u64>,
}

/// Result of a verification of the whole chain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AuditVerification {
    pub intact: bool,
    pub files: usize,
    /// Verified entries.
    pub entries: u64,
    /// Numbers of the first and last verified entry; 0: none.
    pub first: u64,
    pub last: u64,
    /// The last entry that the store has a digest of; `null`: the store was not read.
    pub anchored: Option<u64>,
    /// Bytes of an unfinished entry at the end.
    pub unfinished_bytes: u64,
    /// The first problem.
    pub problem: Option<AuditProblem>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AuditProblem {
    pub file: String,
    /// From 1.
    pub line: u64,
    pub message: String,
}
