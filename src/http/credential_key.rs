//! Credential keys: the credential of a known caller, as a unit of limits on connections, requests and sessions.
//!
//! Many agents share a token of all hosts, so its unit is the token at one peer: one holder of the token takes nothing
//! from holders at other addresses. All holders together are limited too ([`CredentialKey::group_share`]).

use std::net::IpAddr;

use super::peers::PeerKey;

/// Share of all connections available to one credential of clients.
const CLIENT_SHARE: usize = 2;
/// Minimum connections of clients, regardless of their share.
const MIN_PER_CLIENT: usize = 64;
/// Maximum connections of the token of one host. Its agent uses a few.
const MAX_PER_HOST_TOKEN: usize = 64;
/// Part of a budget that tokens of all hosts do not get: it is for agents with credentials of their own.
const ALL_HOSTS_RESERVE: usize = 4;

/// The credential of a known caller, as a unit of limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CredentialKey {
    scope: CredentialScope,
    digest: u64,
}

/// Number of callers that share a credential.
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
        CredentialKey { scope, digest: digest(&[name]) }
    }

    /// The key of a token of all hosts, as used by one peer.
    pub fn of_all_hosts(token: &str, peer: IpAddr) -> CredentialKey {
        let scope = CredentialScope::AllHosts;
        CredentialKey { scope, digest: digest(&[&PeerKey::from(peer).to_string(), token]) }
    }

    pub fn is_of_all_hosts(self) -> bool {
        self.scope == CredentialScope::AllHosts
    }

    /// The share of this credential in a number of connections.
    pub(super) fn share(self, connections: usize) -> usize {
        match self.scope {
            CredentialScope::Clients => (connections / CLIENT_SHARE).max(MIN_PER_CLIENT),
            CredentialScope::OneHost => MAX_PER_HOST_TOKEN,
            CredentialScope::AllHosts => connections,
        }
    }

    /// The part of a budget for all credentials of this scope together. `None`: the whole budget.
    pub(super) fn group_share(self, most: usize) -> Option<usize> {
        match self.scope {
            CredentialScope::Clients | CredentialScope::OneHost => None,
            CredentialScope::AllHosts => Some(most - most / ALL_HOSTS_RESERVE),
        }
    }
}

fn digest(parts: &[&str]) -> u64 {
    let mut hasher = blake3::Hasher::new();
    for (nth, part) in parts.iter().enumerate() {
        if nth > 0 {
            hasher.update(b"\0");
        }
        hasher.update(part.as_bytes());
    }
    let [a, b, c, d, e, f, g, h, ..] = *hasher.finalize().as_bytes();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// The credential has its full share of connections, and all are in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareExceeded;
