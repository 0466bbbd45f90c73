//! Agent protocol: messages between a gateway and its agents. GSE's own protocol is not public.
//!
//! The agent opens the connection. It joins with its hosts and a token, then keeps one stream open, on which
//! [`ToAgent`] messages arrive, one JSON object per line; [`FromAgent`] messages are sent in batches. Both directions
//! are numbered and resumable: a request is repeated until its number was seen, a result until it was acknowledged. An
//! empty line is a heartbeat.

mod enrollment;
mod figures;
mod history;

use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use self::enrollment::{CertificateLife, EnrollmentRequest, IssuedCertificate};
pub use self::figures::{FigurePoint, FigureRow, FiguresAnswer, FiguresUpdate, TreeFigures, rounded_percent};
pub use self::history::{ExitReason, FailedStart, InstanceHistory, ProcessExit, ScheduledRun};
use crate::gse::codes::GseOp;
use crate::model::{HostKey, InstanceKey, Spec, SpecRevision};

/// Interval between two heartbeats of each side.
pub const HEARTBEAT_SECS: u64 = 3;

/// Request of an agent to serve some hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Join {
    /// Stable for a data folder: the agent may take over its own session, but no other.
    pub agent: String,
    pub hosts: Vec<HostKey>,
    #[serde(default)]
    pub version: String,
    /// The agent's wall clock when it sent this, in milliseconds since 1970. Only shown and warned about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock: Option<i64>,
    /// The agent understands [`ToAgent::Heartbeat`].
    #[serde(default)]
    pub floors: bool,
    /// The agent sends figures and answers [`ToAgent::Measure`].
    #[serde(default)]
    pub figures: bool,
    /// The largest sequence number this agent knows. The gateway numbers new operations above it, also after its store
    /// was lost or restored from a copy.
    #[serde(default)]
    pub last_seq: u64,
    /// The agent understands [`ToAgent::ReadLog`].
    #[serde(default)]
    pub logs: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Joined {
    pub session: String,
    /// The last message number of this agent that the gateway has stored.
    pub acked: u64,
    /// Identity of the gateway's store: sequence numbers and floors of two stores do not compare. Empty: an older gateway.
    #[serde(default)]
    pub store: String,
    /// The gateway takes figures.
    #[serde(default)]
    pub figures: bool,
    /// Remaining life of the certificate that the agent joined with, if the gateway's CA signed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<CertificateLife>,
}

/// From the gateway to the agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToAgent {
    /// The registered spec of an instance, as of a change of the store; `None`: not registered. The agent relaunches with
    /// it. The message with the larger number wins, whatever the order of arrival.
    #[serde(rename = "give")]
    SetSpec {
        instance: InstanceKey,
        given: Option<OwnedSpec>,
        changed: u64,
    },
    /// All registrations of a host as of that change have been sent: any other spec of the agent is no longer registered.
    Synced {
        as_of: u64,
        /// Missing from older gateways.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        host: Option<HostKey>,
    },
    Op(Box<OpRequest>),
    /// Sent when the stream is idle and when the floor rose, to agents that announce [`Join::floors`]. Every operation
    /// with a sequence number up to `floor` is final, and the gateway never sends it again. `sent_ms` as in [`OpRequest`].
    Heartbeat {
        floor: u64,
        #[serde(default)]
        sent_ms: u64,
    },
    /// Requests fresh figures of an instance, to agents that announce [`Join::figures`]. The answer is a [`FiguresAnswer`].
    Measure {
        id: String,
        instance: InstanceKey,
    },
    /// The resource pools of a namespace on a host, as the caller sent them.
    Groups {
        host: HostKey,
        namespace: String,
        groups: serde_json::Value,
    },
    /// Reads a part of an instance's log. Sent to agents that announce [`Join::logs`]; the answer is one [`LogChunk`].
    ReadLog(Box<LogRead>),
    /// The caller of a read is gone: the agent stops it without an answer.
    CancelLog {
        id: String,
    },
}

/// One read of an instance's log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogRead {
    /// Names the answer.
    pub id: String,
    pub instance: InstanceKey,
    pub from: LogReadFrom,
    /// Maximum bytes of the answer.
    pub max_bytes: usize,
    /// Time for which the agent may wait for new lines, in milliseconds. 0: it answers at once, also with nothing.
    #[serde(default)]
    pub wait_ms: u64,
}

/// The first line of a read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LogReadFrom {
    /// The last lines, and those since a time in milliseconds since 1970. Neither: the whole log.
    Tail { lines: Option<u64>, since: Option<i64> },
    /// After the end of an earlier chunk: its [`LogChunk::cursor`].
    Cursor(String),
}

/// A part of an instance's log: whole lines.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LogChunk {
    /// Of the [`LogRead`].
    pub id: String,
    #[serde(default)]
    pub text: String,
    /// Start of the next read. Only the agent interprets it.
    #[serde(default)]
    pub cursor: String,
    /// The log has no more lines at present.
    #[serde(default)]
    pub end: bool,
    /// The run whose stored output the text is; `None`: the text is from the log file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub run: Option<LoggedRun>,
    /// Reason why the log cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<LogError>,
}

/// A run whose output the agent stores.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LoggedRun {
    /// Milliseconds since 1970.
    pub started: i64,
    /// The text begins with the first stored byte of the run.
    pub first: bool,
}

/// Reason why a log cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LogError {
    pub reason: LogErrorReason,
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LogErrorReason {
    /// The agent never had this instance.
    UnknownProcess,
    /// The instance has neither a log file nor stored output.
    NoLog,
    /// The file cannot be read with the rights of the spec's user.
    Unreadable,
    /// Too many concurrent reads.
    Busy,
    #[serde(other)]
    Other,
}

/// One operation on one instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpRequest {
    /// Increases with every operation that must not be lost; 0: a status query, which may be lost.
    pub seq: u64,
    /// Idempotency key: the same for every repetition of an operation.
    pub op_id: String,
    pub task: String,
    pub instance: InstanceKey,
    pub op: AgentOp,
    pub spec: Option<OwnedSpec>,
    /// The fields that take effect with a reload; `None`: the fields with effect Reload.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub takes: Option<Vec<String>>,
    /// The operation repairs drift: `before_stop` and `after_start` run only if they ask for that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub repairs: bool,
    /// Restart only, set for callers other than Abide's planner: a stopped process is started as well, and the process is
    /// supervised afterwards.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub supervises: bool,
    pub owner: Option<String>,
    /// The app that requested the operation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub app: Option<String>,
    pub generation: Option<u64>,
    /// For older agents, which compare it with their own wall clock: milliseconds since 1970 by the gateway's.
    pub deadline: i64,
    /// Time after `sent_ms` within which the agent may begin it; its caller may have been answered 117 after that. Absent: no
    /// limit, by an older gateway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_ms: Option<u64>,
    /// Milliseconds between the opening of this stream and the sending, by the gateway's monotonic clock.
    #[serde(default)]
    pub sent_ms: u64,
}

/// An operation of an agent: those of GSE, and rename.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentOp {
    Start,
    Stop,
    Status,
    Host,
    Unhost,
    Restart,
    Reload,
    Kill,
    /// Renames the instance; its process keeps running.
    Rename {
        from: InstanceKey,
    },
}

impl From<GseOp> for AgentOp {
    fn from(op: GseOp) -> AgentOp {
        match op {
            GseOp::Start => AgentOp::Start,
            GseOp::Stop => AgentOp::Stop,
            GseOp::Status => AgentOp::Status,
            GseOp::Host => AgentOp::Host,
            GseOp::Unhost => AgentOp::Unhost,
            GseOp::Restart => AgentOp::Restart,
            GseOp::Reload => AgentOp::Reload,
            GseOp::Kill => AgentOp::Kill,
        }
    }
}

impl AgentOp {
    /// Whether the spec of the operation becomes the registered one on success.
    pub fn registers_spec(&self) -> bool {
        match self {
            AgentOp::Start | AgentOp::Host | AgentOp::Restart | AgentOp::Reload | AgentOp::Rename { .. } => {
                true
            }
            AgentOp::Stop | AgentOp::Status | AgentOp::Unhost | AgentOp::Kill => false,
        }
    }

    pub fn word(&self) -> &'static str {
        match self {
            AgentOp::Start => "start",
            AgentOp::Stop => "stop",
            AgentOp::Status => "status",
            AgentOp::Host => "host",
            AgentOp::Unhost => "unhost",
            AgentOp::Restart => "restart",
            AgentOp::Reload => "reload",
            AgentOp::Kill => "kill",
            AgentOp::Rename { .. } => "rename",
        }
    }

    /// Whether the operation changes nothing.
    pub fn is_read_only(&self) -> bool {
        *self == AgentOp::Status
    }
}

/// A spec with its owner and revision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OwnedSpec {
    #[schemars(with = "serde_json::Map<String, serde_json::Value>")]
    pub spec: Arc<Spec>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<SpecRevision>,
}

/// From the agent to the gateway, numbered by the agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FromAgent {
    pub seq: u64,
    #[serde(flatten)]
    pub what: AgentMessage,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AgentMessage {
    Result(OpResult),
    Report(Box<Report>),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OpResult {
    pub op_id: String,
    /// Sequence number of the operation; 0: a status query, or a result that an older agent stored.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub seq: u64,
    pub code: i64,
    #[serde(default)]
    pub message: String,
    /// Result of a status query.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<serde_json::Value>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// State of one instance on its host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    pub instance: InstanceKey,
    /// Milliseconds since 1970.
    pub at: i64,
    pub hosted: bool,
    /// The spec that the agent relaunches with; restores the registration at a gateway that lost its store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given: Option<OwnedSpec>,
    /// The process ended as its restart policy allows: nothing relaunches it until its spec changes or it is started.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub completed: bool,
    pub pid: Option<u32>,
    /// The spec in effect in the running process; `None`: not running.
    pub live: Option<OwnedSpec>,
    /// The process was adopted and not restarted since: `live` is the spec of its adoption, not known to be in effect.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub live_spec_unknown: bool,
    /// The last run of a one-shot process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ran: Option<ReportedRun>,
    /// One of the words of `get processes`.
    #[serde(default)]
    pub health: String,
    /// Time of the last state change and of the last start: milliseconds since 1970.
    #[serde(default)]
    pub since: i64,
    #[serde(default)]
    pub started: i64,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// Exit code of the last run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<i32>,
    /// Next action of the agent (retry or scheduled run): milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<i64>,
    #[serde(default)]
    pub cpu: f64,
    #[serde(default)]
    pub mem: f64,
    /// State of each file in the configmap.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub config: Vec<(String, ConfigState)>,
    /// Pid of a process with this identity that the agent neither launched nor adopted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stranger: Option<u32>,
    /// Restarts, exits, scheduled runs and the last failed start.
    #[serde(default, skip_serializing_if = "InstanceHistory::is_empty")]
    pub history: InstanceHistory,
    /// The next scheduled runs: milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub next_runs: Vec<i64>,
    /// The last health probe of the running process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<ReportedProbe>,
    /// Pid file and log in the agent's folder, of a process that names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub files: Option<AgentFiles>,
}

/// A health probe that has ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ReportedProbe {
    /// Milliseconds since 1970.
    pub at: i64,
    pub success: bool,
    /// Its output with secrets masked, or the reason of its failure.
    pub output: String,
}

/// Paths in the agent's folder, of a process whose spec names none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AgentFiles {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid_path: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log_path: Option<String>,
}

/// State of a configuration file relative to the digest in the spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ConfigState {
    AsStated,
    Differs,
    /// Missing or unreadable.
    Missing,
}

/// The last run of a one-shot process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReportedRun {
    /// With this spec.
    With(OwnedSpec),
    Never,
    Unknown,
}

/// The last message number that the gateway has stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Acked {
    pub acked: u64,
}
