//! Credential keys: the credential of a known caller, as a unit of limits on connections and requests.

/// Share of all connections available to one credential of clients.
const CLIENT_SHARE: usize = 2;
/// Minimum connections of clients, regardless of their share.
const MIN_PER_CLIENT: usize = 64;
/// Maximum connections of the token of one host. Its agent uses a few.
const MAX_PER_HOST_TOKEN: usize = 64;

/// The credential of a known caller, as a unit of limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CredentialKey {
    scope: CredentialScope,
    digest: u64,
}

/// How many callers share a credential.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CredentialScope {
    /// An app, or the token of a controller.
    Clients,
    /// An agent token of one host.
    OneHost,
    /// An agent token of all hosts.
    AllHosts,
}

impl CredentialKey {
    /// `name`: an app's code, or a token. Only its digest is kept.
    pub fn new(scope: CredentialScope, name: &str) -> CredentialKey {
        let [a, b, c, d, e, f, g, h, ..] = *blake3::hash(name.as_bytes()).as_bytes();
        CredentialKey { scope, digest: u64::from_le_bytes([a, b, c, d, e, f, g, h]) }
    }

    /// The share of this credential in a number of connections.
    pub(super) fn share(self, connections: usize) -> usize {
        match self.scope {
            CredentialScope::Clients => (connections / CLIENT_SHARE).max(MIN_PER_CLIENT),
            CredentialScope::OneHost => MAX_PER_HOST_TOKEN,
            CredentialScope::AllHosts => connections,
        }
    }

    /// Whether requests with this credential are limited to a share. Callers that share a credential by design are not.
    pub(super) fn has_request_share(self) -> bool {
        match self.scope {
            CredentialScope::Clients | CredentialScope::OneHost => true,
            CredentialScope::AllHosts => false,
        }
    }
}

/// The credential has its full share of connections, and all are in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareExceeded;
