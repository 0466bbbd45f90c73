//! Join tokens and certificates: `abide token` and `abide host` as JSON, and the calls of the gateway behind them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::HostKey;

/// `POST /api/abide/v1/tokens`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct JoinTokenRequest {
    /// Hosts that an agent with this token may serve.
    pub hosts: Vec<HostKey>,
    /// Seconds until the token expires; absent: one hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_secs: Option<u64>,
}

/// A new join token. Only this answer contains its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CreatedJoinToken {
    pub id: String,
    /// The token, for the file of `abide agent --token-file`.
    pub token: String,
    pub hosts: Vec<HostKey>,
    pub expires: String,
}

/// A join token without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct JoinTokenRow {
    pub id: String,
    /// `open`, `used`, `expired` or `revoked`.
    pub state: String,
    pub hosts: Vec<HostKey>,
    pub created: String,
    pub expires: String,
    /// App that created it, and the user that it named.
    pub by: String,
    /// Id of the agent that used it.
    pub agent: Option<String>,
    pub used: Option<String>,
}

/// `POST /api/abide/v1/tokens/revoke`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TokenRevocation {
    pub id: String,
}

/// `POST /api/abide/v1/hosts/revoke`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HostRevocation {
    pub host: HostKey,
    /// Also accept static tokens for the host again.
    #[serde(default)]
    pub forget: bool,
}

/// Effect of a revocation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Revoked {
    /// Hosts whose certificate is no longer accepted.
    pub hosts: Vec<HostKey>,
    /// Join tokens that are no longer accepted.
    pub tokens: Vec<String>,
}

/// Certificate of a host's agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HostCertificate {
    /// Expiry of the newest certificate.
    pub expires: String,
    /// Its serial number in hex.
    pub serial: String,
    /// SHA-256 of the pinned public key in hex.
    pub key: String,
    /// `true`: refused until the host joins with a new token.
    pub revoked: bool,
}
