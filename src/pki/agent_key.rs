//! Agent key: the private key of an agent, and its signing request.

use rcgen::{CertificateParams, DnType, KeyPair};

/// Reason why a key cannot be made or used.
#[derive(Debug, thiserror::Error)]
pub enum AgentKeyError {
    #[error("cannot make a key")]
    Generate(#[source] rcgen::Error),
    /// The cause could quote the key.
    #[error("the key is not valid PEM of a supported kind")]
    Invalid,
    #[error("cannot sign a certificate request")]
    Request(#[source] rcgen::Error),
}

/// The key pair of an agent: ECDSA on P-256.
pub struct AgentKey(KeyPair);

impl AgentKey {
    pub fn generate() -> Result<AgentKey, AgentKeyError> {
        KeyPair::generate().map(AgentKey).map_err(AgentKeyError::Generate)
    }

    /// Parses the PEM of a private key. Text before it is ignored.
    pub fn parse(pem: &str) -> Result<AgentKey, AgentKeyError> {
        KeyPair::from_pem(pem).map(AgentKey).map_err(|_| AgentKeyError::Invalid)
    }

    /// The private key in PEM. It is a secret.
    pub fn reveal(&self) -> String {
        self.0.serialize_pem()
    }

    /// The signing request in PEM.
    pub fn request(&self, agent: &str) -> Result<String, AgentKeyError> {
        let mut params = CertificateParams::default();
        params.distinguished_name.remove(DnType::CommonName);
        params.distinguished_name.push(DnType::CommonName, agent);
        let request = params.serialize_request(&self.0).map_err(AgentKeyError::Request)?;
        request.pem().map_err(AgentKeyError::Request)
    }
}
