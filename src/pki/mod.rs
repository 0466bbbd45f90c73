//! Fleet certificates: client certificates of agents, the CA that signs them, and join tokens.
//!
//! An agent makes its key ([`AgentKey`]) and sends a signing request with a one-time [`JoinToken`]. The gateway's
//! [`Authority`] signs a certificate with one URI name per host: `abide:host:CLOUD:IP`. Of a request only the public
//! key is used; names, usage and validity are the gateway's decision.

mod agent_key;
mod authority;
mod certificate;
mod files;
mod join_token;

pub use agent_key::{AgentKey, AgentKeyError};
pub use authority::{Authority, AuthorityError, AuthorityFiles, CertificateSubject, IssuedPem, SigningError};
pub use certificate::{AgentCertificate, CertificateError, MAX_HOSTS};
pub use files::write_private;
pub use join_token::JoinToken;

/// Tolerated difference between the clocks of gateways, in seconds: a certificate is valid from this long before its
/// issue.
pub const CLOCK_SKEW_SECS: u64 = 300;
