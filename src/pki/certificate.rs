//! Agent certificate: the facts that decide for which hosts an agent speaks.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use sha2::{Digest, Sha256};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::model::{HostKey, Time};

/// Start of the URI name of a host.
const HOST_URI: &str = "abide:host:";
/// Characters of a host that its URI contains as they are.
const PLAIN: &AsciiSet = &NON_ALPHANUMERIC.remove(b'.').remove(b':').remove(b'-').remove(b'_').remove(b'~');
/// Maximum hosts of one certificate.
pub const MAX_HOSTS: usize = 1_000;

/// Reason why a certificate cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    #[error("the certificate is not valid DER")]
    Invalid,
    #[error("the certificate names more than {MAX_HOSTS} hosts")]
    TooManyHosts,
}

/// A client certificate of an agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentCertificate {
    /// Serial number in hex.
    pub serial: String,
    /// SHA-256 of the public key with its algorithm, in hex.
    pub key: String,
    /// The agent's id: the common name.
    pub agent: String,
    /// Hosts of its URI names. Other names are ignored.
    pub hosts: Vec<HostKey>,
    pub not_before: Time,
    pub not_after: Time,
    /// The public key with its algorithm, in DER.
    pub(super) public_key: Vec<u8>,
}

impl AgentCertificate {
    pub fn parse(der: &[u8]) -> Result<AgentCertificate, CertificateError> {
        let (_, parsed) = X509Certificate::from_der(der).map_err(|_| CertificateError::Invalid)?;
        let names = parsed.subject_alternative_name().map_err(|_| CertificateError::Invalid)?;
        let names = names.map(|names| names.value.general_names.as_slice()).unwrap_or_default();
        let uris = names.iter().filter_map(|name| match name {
            GeneralName::URI(uri) => host_of_uri(uri),
            _ => None,
        });
        let hosts: Vec<HostKey> = uris.take(MAX_HOSTS + 1).collect();
        if hosts.len() > MAX_HOSTS {
            return Err(CertificateError::TooManyHosts);
        }
        let agent = parsed.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
        let public_key = parsed.public_key().raw.to_vec();
        let time = |at: x509_parser::time::ASN1Time| Time(at.timestamp().saturating_mul(1000));
        Ok(AgentCertificate {
            serial: hex::encode(parsed.raw_serial()),
            key: hex::encode(Sha256::digest(&public_key)),
            agent: agent.unwrap_or_default().to_owned(),
            hosts,
            not_before: time(parsed.validity().not_before),
            not_after: time(parsed.validity().not_after),
            public_key,
        })
    }

    pub fn is_valid_at(&self, now: Time) -> bool {
        self.not_before <= now && now <= self.not_after
    }
}

/// The URI name of a host.
pub(super) fn uri_of_host(host: &HostKey) -> String {
    format!("{HOST_URI}{}", utf8_percent_encode(&host.to_string(), PLAIN))
}

/// The host of a URI name. Only the canonical form counts, so that one host has one name.
fn host_of_uri(uri: &str) -> Option<HostKey> {
    let text = percent_decode_str(uri.strip_prefix(HOST_URI)?).decode_utf8().ok()?;
    let host: HostKey = text.parse().ok()?;
    (uri_of_host(&host) == uri).then_some(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_has_one_uri() {
        for (host, uri) in [
            ("0:10.0.0.7", "abide:host:0:10.0.0.7"),
            ("3:fe80::1", "abide:host:3:fe80::1"),
            ("@0200:a/b", "abide:host:%400200:a%2Fb"),
        ] {
            let host: HostKey = host.parse().expect("a host");
            assert_eq!(uri_of_host(&host), uri);
            assert_eq!(host_of_uri(uri), Some(host));
        }
        for other in
            ["", "abide:host:", "abide:host:10.0.0.7", "ABIDE:host:0:10.0.0.7", "abide:host:0:10.0.0%2E7"]
        {
            assert_eq!(host_of_uri(other), None, "{other}");
        }
    }
}
