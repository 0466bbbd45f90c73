//! The wire between a gateway and its agents, which GSE keeps to itself.
//!
//! An agent connects out. It joins with its hosts and a token, then holds one stream open, on which requests come
//! [`Down`], a JSON object a line; what happened goes [`Up`] in batches. Both directions are numbered and resume: a
//! request is sent again until its number was seen, a result until it was taken. An empty line says that somebody is
//! still there.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::codes::GseOp;
use crate::model::{HostKey, InstanceKey, Spec, SpecRevision};

/// How often each side says something, however little.
pub const HEARTBEAT_SECS: u64 = 3;

/// Who asks to be the agent of some hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// The same as long as the agent keeps its folder: it may take over its own session, and nobody else's.
    pub agent: String,
    pub hosts: Vec<HostKey>,
    #[serde(default)]
    pub version: String,
    /// The agent's wall clock when it sent this, in milliseconds since 1970. Only shown and warned about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clock: Option<i64>,
    /// The agent understands [`Down::Heartbeat`].
    #[serde(default)]
    pub floors: bool,
    /// The largest sequence number this agent knows. The gateway numbers new operations above it, also after its store
    /// was lost or restored from a copy.
    #[serde(default)]
    pub last_seq: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joined {
    pub session: String,
    /// The last number of this agent's that was taken.
    pub acked: u64,
    /// Identity of the gateway's store: sequence numbers and floors of two stores do not compare. Empty: an older gateway.
    #[serde(default)]
    pub store: String,
}

/// From the gateway to the agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToAgent {
    /// What is registered for an instance since some change of the store; without a spec: nothing is. The agent
    /// relaunches with it. Of two, the one with the larger number is right, whichever comes last.
    #[serde(rename = "give")]
    SetSpec {
        instance: InstanceKey,
        given: Option<OwnedSpec>,
        changed: u64,
    },
    /// All that was registered at that change has been given: whatever else the agent holds is registered no more.
    Synced {
        as_of: u64,
    },
    Op(Box<OpRequest>),
    /// Sent when the stream is idle and when the floor rose, to agents that announce [`Join::floors`]. Every operation
    /// with a sequence number up to `floor` is final, and the gateway never sends it again. `sent_ms` as in [`OpRequest`].
    Heartbeat {
        floor: u64,
        #[serde(default)]
        sent_ms: u64,
    },
    /// The pools of a namespace on a host, as they were sent.
    Groups {
        host: HostKey,
        namespace: String,
        groups: serde_json::Value,
    },
}

/// One operation on one instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpRequest {
    /// Grows with every operation that must not be lost; 0: a mere look, which may be.
    pub seq: u64,
    /// The same for the same operation, however often it comes.
    pub op_id: String,
    pub task: String,
    pub instance: InstanceKey,
    pub op: AgentOp,
    pub spec: Option<OwnedSpec>,
    /// Of a reload: the fields that take effect by it; `None`: those that a reload reads by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub takes: Option<Vec<String>>,
    pub owner: Option<String>,
    pub generation: Option<u64>,
    /// For older agents, which compare it with their own wall clock: milliseconds since 1970 by the gateway's.
    pub deadline: i64,
    /// How long after `sent_ms` the agent may begin it; its caller may have been answered 117 after that. Absent: an older
    /// gateway, no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_ms: Option<u64>,
    /// Milliseconds between the opening of this stream and the sending, by the gateway's monotonic clock.
    #[serde(default)]
    pub sent_ms: u64,
}

/// What is to be done: GSE's operations, and one of our own.
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
    /// The instance is known by another name from now on; it goes on running.
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
    /// Does the spec that came with it become the given one when it succeeds?
    pub fn registers_spec(&self) -> bool {
        match self {
            AgentOp::Start | AgentOp::Host | AgentOp::Restart | AgentOp::Reload | AgentOp::Rename { .. } => {
                true
            }
            AgentOp::Stop | AgentOp::Status | AgentOp::Unhost | AgentOp::Kill => false,
        }
    }

    /// Does it only look?
    pub fn is_read_only(&self) -> bool {
        *self == AgentOp::Status
    }
}

/// A spec, with what came with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OwnedSpec {
    pub spec: Arc<Spec>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<SpecRevision>,
}

/// From the agent to the gateway, in its own order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FromAgent {
    pub seq: u64,
    #[serde(flatten)]
    pub what: AgentMessage,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentMessage {
    Result(OpResult),
    Report(Box<Report>),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OpResult {
    pub op_id: String,
    /// Sequence number of the operation; 0: a look, or a result that an older agent stored.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub seq: u64,
    pub code: i64,
    #[serde(default)]
    pub message: String,
    /// Of a look: what was seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<serde_json::Value>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// How one instance stands on its host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub instance: InstanceKey,
    /// Milliseconds since 1970.
    pub at: i64,
    pub hosted: bool,
    /// What the agent relaunches it with: a gateway that lost its store learns it again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given: Option<OwnedSpec>,
    pub pid: Option<u32>,
    /// The spec in effect in the running process; `None`: it does not run.
    pub live: Option<OwnedSpec>,
    /// The run part of the last run's revision, of a process that runs once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ran: Option<ReportedRun>,
    /// One of the words of `get processes`.
    #[serde(default)]
    pub health: String,
    /// Since when it is as it is, and when it was last started: milliseconds since 1970.
    #[serde(default)]
    pub since: i64,
    #[serde(default)]
    pub started: i64,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// What the last run ended with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit: Option<i32>,
    /// When the agent does something about it next: milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<i64>,
    #[serde(default)]
    pub cpu: f64,
    #[serde(default)]
    pub mem: f64,
    /// Of each file in its configmap, whether it is what it is said to be.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub config: Vec<(String, ConfigState)>,
    /// The pid of a process that runs under this identity, and that the agent neither launched nor adopted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stranger: Option<u32>,
}

/// How a configuration file stands to the sum that its spec states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConfigState {
    AsStated,
    Differs,
    /// Or it cannot be read.
    Missing,
}

/// What is known of the last run of a process that runs once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReportedRun {
    /// With this spec.
    With(OwnedSpec),
    Never,
    Unknown,
}

/// How far the gateway has taken what was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Acked {
    pub acked: u64,
}
