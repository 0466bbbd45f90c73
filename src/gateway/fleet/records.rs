//! Stored records of join tokens, pinned hosts and revoked certificates.

use serde::{Deserialize, Serialize};

use crate::model::{HostKey, Time};

/// A join token without its secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinTokenRecord {
    /// SHA-256 of the secret in hex.
    pub digest: String,
    pub hosts: Vec<HostKey>,
    /// Times are in milliseconds since 1970.
    pub created: i64,
    pub expires: i64,
    /// App that created it, and the user that it named.
    pub by: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used: Option<TokenUse>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<RevocationMark>,
}

/// The exchange of a join token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenUse {
    pub at: i64,
    pub agent: String,
    pub hosts: Vec<HostKey>,
    /// SHA-256 of the agent's public key in hex.
    pub key: String,
    /// The certificate in PEM: a repeated exchange gets it again.
    pub certificate: String,
    pub not_after: i64,
    /// Life of the certificate in seconds.
    pub life_secs: u64,
}

/// When and by whom a record was revoked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevocationMark {
    pub at: i64,
    pub by: String,
}

/// The certificate of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificatePin {
    /// SHA-256 of the agent's public key in hex.
    pub key: String,
    /// Id of the agent.
    pub agent: String,
    /// Serial number of the newest certificate in hex.
    pub serial: String,
    /// The newest certificate in PEM; empty if an external CA signed it.
    #[serde(default)]
    pub certificate: String,
    pub issued: i64,
    pub not_after: i64,
    /// Join token that the key was exchanged for; `None`: an external CA signed it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    /// Certificates of this key that have not expired, oldest first.
    #[serde(default)]
    pub live: Vec<LiveCertificate>,
    /// With an external CA: certificates issued before this time are refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked: Option<RevocationMark>,
}

/// A certificate that has not expired.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LiveCertificate {
    pub serial: String,
    pub not_after: i64,
}

/// A revoked certificate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevokedCertificate {
    pub at: i64,
    pub by: String,
    /// The record is removed after this time.
    pub not_after: i64,
}

impl JoinTokenRecord {
    /// `open`, `used`, `expired` or `revoked`.
    pub fn state(&self, now: Time) -> &'static str {
        match self {
            JoinTokenRecord { revoked: Some(_), .. } => "revoked",
            JoinTokenRecord { used: Some(_), .. } => "used",
            JoinTokenRecord { expires, .. } if *expires <= now.0 => "expired",
            JoinTokenRecord { .. } => "open",
        }
    }
}

impl CertificatePin {
    /// Whether the newest certificate is refused.
    pub fn is_revoked(&self) -> bool {
        self.revoked.as_ref().is_some_and(|mark| self.token.is_some() || self.issued <= mark.at)
    }
}
