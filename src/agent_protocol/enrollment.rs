//! Enrollment: the exchange of a join token for a certificate, and the renewal of a certificate.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::HostKey;

/// Request of an agent for a certificate. The join token is in the `Authorization` header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct EnrollmentRequest {
    /// Id of the agent. The gateway pins it to the key.
    pub agent: String,
    /// Hosts of the agent. The join token must cover all of them.
    pub hosts: Vec<HostKey>,
    /// Signing request in PEM. Only its key counts.
    pub csr: String,
}

/// A certificate for the agent's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct IssuedCertificate {
    /// The certificate in PEM.
    pub certificate: String,
    pub life: CertificateLife,
}

/// Life of a certificate by the gateway's clock: the agent's clock may differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CertificateLife {
    /// Seconds from its issue to its expiry.
    pub total_secs: u64,
    /// Seconds until its expiry.
    pub remaining_secs: u64,
}

impl CertificateLife {
    /// Seconds until the renewal is due: at two thirds of the life.
    pub fn renewal_in_secs(self) -> u64 {
        self.remaining_secs.saturating_sub(self.total_secs / 3)
    }
}
