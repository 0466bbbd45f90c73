//! Overload of a listener: which resource is exhausted while callers are refused, for readiness and metrics.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A refusal shows in readiness for this long: longer than the usual interval of health checks would hide a recovery.
const RECENT: Duration = Duration::from_secs(3);

/// What callers are refused for lack of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    Connections,
    KnownCallers,
    Agents,
    BodyMemory,
}

impl Resource {
    pub const ALL: [Resource; 4] =
        [Resource::Connections, Resource::KnownCallers, Resource::Agents, Resource::BodyMemory];

    pub fn word(self) -> &'static str {
        match self {
            Resource::Connections => "connections",
            Resource::KnownCallers => "known_callers",
            Resource::Agents => "agents",
            Resource::BodyMemory => "body_memory",
        }
    }

    /// The reason that readiness gives.
    pub fn reason(self) -> &'static str {
        match self {
            Resource::Connections => "callers are refused: all connections are in use",
            Resource::KnownCallers => "callers are refused: all request permits of known callers are in use",
            Resource::Agents => "agents are refused: all request permits of agents are in use",
            Resource::BodyMemory => "callers are refused: the memory for request bodies is in use",
        }
    }
}

#[derive(Default)]
pub struct Overload {
    counts: [AtomicU64; Resource::ALL.len()],
    last: Mutex<Option<(Instant, Resource)>>,
}

impl Overload {
    pub fn refused(&self, resource: Resource) {
        for (count, one) in self.counts.iter().zip(Resource::ALL) {
            if one == resource {
                count.fetch_add(1, Ordering::Relaxed);
            }
        }
        *self.last.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some((Instant::now(), resource));
    }

    /// The resource for which a caller was refused last, if that was a moment ago.
    pub fn exhausted(&self) -> Option<Resource> {
        let last = *self.last.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        last.filter(|(at, _)| at.elapsed() < RECENT).map(|(_, resource)| resource)
    }

    pub fn counts(&self) -> [(&'static str, u64); Resource::ALL.len()] {
        std::array::from_fn(|nth| (Resource::ALL[nth].word(), self.counts[nth].load(Ordering::Relaxed)))
    }
}
