//! Host: `get hosts -o json`, and `GET /api/abide/v1/hosts` of the gateway.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::fleet::HostCertificate;
use crate::model::HostKey;

/// One host with an agent session, or with observed processes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HostEntry {
    pub host: HostKey,
    /// Whether its agent is connected.
    pub agent: bool,
    /// Version of the agent.
    pub version: Option<String>,
    /// Time of the last contact; without a session, the issue of its certificate.
    pub heard: String,
    /// Time by which the agent's clock is ahead of the gateway's, in milliseconds; `null`: unknown.
    #[serde(default)]
    pub clock_skew_ms: Option<i64>,
    /// Certificate of its agent; absent for a host that joins with a static token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub certificate: Option<HostCertificate>,
    /// Number of processes; absent in a brief list.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processes: Option<u64>,
}
