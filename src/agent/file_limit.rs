//! Descriptor limit: the agent uses its hard limit of open files; the processes that it starts get its original limit.
//!
//! Programs that use `select` fail with more than 1024 descriptors, and some close every possible one at their start. A
//! process therefore starts with the soft limit that the agent was started with.

use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Soft and hard limit that the agent was started with.
static ORIGINAL: OnceLock<(u64, u64)> = OnceLock::new();

/// Raises the soft limit to the hard one. Launches restore the original limit.
pub fn raise() {
    let limit = getrlimit(Resource::Nofile);
    let number = |limit: Option<u64>| limit.unwrap_or(libc::RLIM_INFINITY);
    if limit.current == limit.maximum {
        return;
    }
    ORIGINAL.get_or_init(|| (number(limit.current), number(limit.maximum)));
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::debug!(%error, "cannot raise the limit of open files");
    }
}

/// The limit of a started process; `None`: the agent's own.
pub fn original() -> Option<(u64, u64)> {
    ORIGINAL.get().copied()
}
