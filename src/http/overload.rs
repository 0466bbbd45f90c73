//! Listener overload: the exhausted resource while callers are refused, for readiness and metrics.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time for which a refusal affects readiness: longer than a usual health-check interval would hide a recovery.
const OVERLOAD_WINDOW: Duration = Duration::from_secs(3);

/// A resource whose exhaustion causes refusals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitedResource {
    Connections,
    KnownCallers,
    Agents,
    BodyMemory,
    /// The share of one credential: other callers are served.
    CredentialShare,
    /// The configured limit of one credential.
    CredentialRequests,
    CredentialBytes,
}

impl LimitedResource {
    pub const ALL: [LimitedResource; 7] = [
        LimitedResource::Connections,
        LimitedResource::KnownCallers,
        LimitedResource::Agents,
        LimitedResource::BodyMemory,
        LimitedResource::CredentialShare,
        LimitedResource::CredentialRequests,
        LimitedResource::CredentialBytes,
    ];

    pub fn word(self) -> &'static str {
        match self {
            LimitedResource::Connections => "connections",
            LimitedResource::KnownCallers => "known_callers",
            LimitedResource::Agents => "agents",
            LimitedResource::BodyMemory => "body_memory",
            LimitedResource::CredentialShare => "credential_share",
            LimitedResource::CredentialRequests => "credential_requests",
            LimitedResource::CredentialBytes => "credential_bytes",
        }
    }

    /// Whether only one credential is refused.
    fn is_of_credential(self) -> bool {
        match self {
            LimitedResource::CredentialShare
            | LimitedResource::CredentialRequests
            | LimitedResource::CredentialBytes => true,
            LimitedResource::Connections
            | LimitedResource::KnownCallers
            | LimitedResource::Agents
            | LimitedResource::BodyMemory => false,
        }
    }

    /// The reason in a readiness response.
    pub fn reason(self) -> &'static str {
        match self {
            LimitedResource::Connections => "refusing callers: all connections are in use",
            LimitedResource::KnownCallers => {
                "refusing callers: all request permits of known callers are in use"
            }
            LimitedResource::Agents => "refusing agents: all request permits of agents are in use",
            LimitedResource::BodyMemory => "refusing callers: the memory for request bodies is in use",
            LimitedResource::CredentialShare => "refusing one credential: its share is in use",
            LimitedResource::CredentialRequests | LimitedResource::CredentialBytes => {
                "refusing one credential: its limit is reached"
            }
        }
    }
}

#[derive(Default)]
pub struct Overload {
    counts: [AtomicU64; LimitedResource::ALL.len()],
    last: Mutex<Option<(Instant, LimitedResource)>>,
}

impl Overload {
    pub fn refused(&self, resource: LimitedResource) {
        for (count, one) in self.counts.iter().zip(LimitedResource::ALL) {
            if one == resource {
                count.fetch_add(1, Ordering::Relaxed);
            }
        }
        // One greedy credential must not take the listener out of service.
        if resource.is_of_credential() {
            return;
        }
        *self.last.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some((Instant::now(), resource));
    }

    /// The resource of the latest refusal, if that is recent.
    pub fn exhausted(&self) -> Option<LimitedResource> {
        let last = *self.last.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        last.filter(|(at, _)| at.elapsed() < OVERLOAD_WINDOW).map(|(_, resource)| resource)
    }

    pub fn counts(&self) -> [(&'static str, u64); LimitedResource::ALL.len()] {
        std::array::from_fn(|nth| {
            (LimitedResource::ALL[nth].word(), self.counts[nth].load(Ordering::Relaxed))
        })
    }
}
