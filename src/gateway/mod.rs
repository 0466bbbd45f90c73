//! The gateway: GSE's and JOB's process API over a store.
//!
//! # Theory of operation
//! A request goes through three rooms. [`http`] finds out which call it is (the same call has several addresses), who
//! asks ([`auth`]), and reads its body. The call itself is a method of [`Gateway`]: [`registry`] keeps what is
//! registered, [`status`] tells of it, [`tasks`] carries operations to the hosts and collects their results. What a call
//! answers is an envelope, and HTTP says 200, also for a failure.
//!
//! Everything that was acknowledged is in the store. Registry calls need no agent; an operation on a host without one
//! ends with 117. No agents can join yet, so every operation ends so.

pub mod auth;
pub mod http;
mod registry;
mod status;
mod tasks;

use std::sync::Arc;
use std::time::Duration;

use crate::store::Store;

pub use registry::Record;

pub struct Gateway<S> {
    store: Arc<S>,
    /// How long an operation waits for a host's agent to come back.
    patience: Duration,
    looks: tasks::Looks,
}

impl<S: Store> Gateway<S> {
    pub fn new(store: S) -> Gateway<S> {
        Gateway { store: Arc::new(store), patience: Duration::from_secs(10), looks: tasks::Looks::default() }
    }

    /// For tests: an agent that is not there is given up sooner.
    pub fn with_patience(mut self, patience: Duration) -> Gateway<S> {
        self.patience = patience;
        self
    }
}

/// Why a call as a whole cannot be carried out.
#[derive(Clone, Debug, PartialEq)]
pub enum Refusal {
    /// The request says too little, or something wrong; the message names the field.
    Wrong(String),
    UnknownTask(String),
    /// Not yet: ask again.
    NotQueued,
    /// These credentials are not for that namespace.
    NotAllowed(String),
    Store(crate::store::Error),
}

impl From<crate::gse::request::Wrong> for Refusal {
    fn from(wrong: crate::gse::request::Wrong) -> Refusal {
        Refusal::Wrong(wrong.to_string())
    }
}

impl From<crate::store::Error> for Refusal {
    fn from(error: crate::store::Error) -> Refusal {
        Refusal::Store(error)
    }
}

/// Seconds since 1970, as rows tell times.
fn now_secs() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::SystemTime::UNIX_EPOCH);
    i64::try_from(since.unwrap_or_default().as_secs()).unwrap_or(i64::MAX)
}
