//! The gateway: GSE's and JOB's process API over a store, and the agents that carry it out.
//!
//! # Theory of operation
//! A request goes through three rooms. [`middleware`] finds out which call it is ([`routes`]: the same call has several
//! addresses), who asks ([`auth`]), and reads its body. The call itself is a method of [`Gateway`]: [`registry`] keeps
//! what is registered, [`status`] tells of it, [`operate`] makes tasks. What a call answers is an envelope, and HTTP
//! says 200, also for a failure ([`handlers`]).
//!
//! A task is in the store before its number is told; then its orders go to the sessions of their hosts' agents
//! ([`hosts`], [`channel`]). What an agent tells (results, reports) is written in one commit, and only then
//! acknowledged: an agent repeats what was not. A row without a result ends in 117 when its host's agent has been gone
//! for as long as one may need to reconnect ([`tasks`], [`missing_agents`]), and in 1900504 when a connected agent gives no result
//! before the row's deadline ([`deadlines`]). Operations have sequence numbers, and agents forget what they ran when all
//! numbers up to a floor are final ([`floor`]).
//!
//! Beyond GSE there are `/api/abide/v1/processes` with everything that is known ([`processes`]) and the store itself
//! for controllers ([`state`]). Which process has an identity on a host: [`identity`]. Readers get digests in place of secrets ([`secrets`]).
//!
//! Invariants: what was acknowledged is on disk; a row of a task stands for itself; the same `X-Abide-Op` is carried
//! out once; a generation counts only if the writer lease of its owner holds it.

pub mod auth;
mod channel;
mod deadlines;
mod decode;
mod floor;
mod handlers;
mod hosts;
mod identity;
mod metrics;
pub mod middleware;
mod missing_agents;
mod openapi;
mod operate;
mod processes;
mod registry;
mod report_limits;
mod results;
pub mod routes;
mod secrets;
mod state;
mod status;
mod tasks;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::store::{Store, Txn};

pub use registry::RegistryRecord;

/// How long an operation waits for a host's agent: its row is to be final within ten seconds.
const AGENT_TIMEOUT: Duration = Duration::from_secs(9);

/// How long an agent may take for an operation, beyond the timeouts and checks of its spec: a slow disk, a busy host.
const ALLOWANCE: Duration = Duration::from_secs(60);

/// Everything that the calls work with. One a process; handlers share it.
pub struct Gateway<S> {
    store: Arc<S>,
    /// How long an operation waits for a host's agent to come back.
    agent_timeout: Duration,
    /// How long an agent may take for an operation, beyond what its spec allows for.
    allowance: Duration,
    tasks: tasks::Tasks,
    numbers: floor::TaskNumbers,
    /// Every operation with a sequence number up to this one is final.
    floor: AtomicU64,
    hosts: hosts::AgentSessions,
    pub(crate) metrics: metrics::Metrics,
    /// The last write failed: reads go on, and nothing that must survive can be taken on.
    cannot_write: AtomicBool,
}

impl<S: Store> Gateway<S> {
    pub fn new(store: S) -> Gateway<S> {
        Gateway {
            store: Arc::new(store),
            agent_timeout: AGENT_TIMEOUT,
            allowance: ALLOWANCE,
            tasks: tasks::Tasks::default(),
            numbers: floor::TaskNumbers::default(),
            floor: AtomicU64::new(0),
            hosts: hosts::AgentSessions::default(),
            metrics: metrics::Metrics::default(),
            cannot_write: AtomicBool::new(false),
        }
    }

    /// For tests: an agent that is not there is given up sooner.
    pub fn with_agent_timeout(mut self, patience: Duration) -> Gateway<S> {
        self.agent_timeout = patience;
        self
    }

    /// For tests: an agent that gives no result is given up sooner.
    pub fn with_allowance(mut self, allowance: Duration) -> Gateway<S> {
        self.allowance = allowance;
        self
    }
}

impl<S: Store> Gateway<S> {
    /// What a gateway does by itself: takes up what a former one left, gives up on agents that are gone, forgets what is
    /// old. Returns when the store can no longer be read.
    pub async fn run_maintenance(&self) -> ApiError {
        const MAINTENANCE_INTERVAL: Duration = Duration::from_millis(250);
        const GC_INTERVAL: Duration = Duration::from_secs(600);
        if let Err(refusal) = self.load_tasks().await {
            return refusal;
        }
        let mut forgotten: Option<std::time::Instant> = None;
        loop {
            tokio::time::sleep(MAINTENANCE_INTERVAL.min(self.agent_timeout)).await;
            // A disk that is full now may not be later: what failed is tried again.
            if self.cannot_write.load(Ordering::Acquire) {
                self.record_write_result(
                    self.store.txn(Txn::put("probe", now_ms().to_string())).await.is_ok(),
                );
            }
            if let Err(refusal) = self.expire_items().await {
                tracing::warn!(?refusal, "rows without an agent cannot be ended");
            }
            if let Err(refusal) = self.expire_rows().await {
                tracing::warn!(?refusal, "rows past their deadline cannot be ended");
            }
            self.raise_floor();
            if forgotten.is_none_or(|last| last.elapsed() > GC_INTERVAL) {
                forgotten = Some(std::time::Instant::now());
                if let Err(refusal) = self.gc_tasks().await {
                    tracing::warn!(?refusal, "old tasks cannot be forgotten");
                }
            }
        }
    }

    /// Why it cannot do all of its work.
    pub fn not_ready(&self) -> Option<&'static str> {
        match self.is_ready() {
            false => Some("not ready: still reading what a former gateway left"),
            true if self.cannot_write.load(Ordering::Acquire) => {
                Some("not ready: nothing can be written; reads go on")
            }
            true => None,
        }
    }

    fn record_write_result(&self, well: bool) {
        self.cannot_write.store(!well, Ordering::Release);
    }

    /// Ends all streams, so that whoever reads them goes elsewhere.
    pub fn close(&self) {
        self.hosts.expire(Duration::ZERO);
    }
}

/// Who makes a call that changes something, and what Abide's own clients say with it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    pub app: String,
    pub owner: Option<String>,
    /// Of the owner's writer lease.
    pub generation: Option<u64>,
    /// The same for the same call, however often it is sent.
    pub op: Option<String>,
    /// Patterns of the namespaces that the app may see.
    pub sees: Vec<String>,
}

impl Caller {
    fn may_see(&self, namespace: &str) -> bool {
        self.sees.iter().any(|pattern| crate::model::glob(pattern, namespace))
    }
}

/// Why a call as a whole cannot be carried out.
#[derive(Clone, Debug, PartialEq)]
pub enum ApiError {
    /// The request says too little, or something wrong; the message names the field.
    BadRequest(String),
    UnknownTask(String),
    /// Not yet: ask again.
    NotQueued,
    /// These credentials are not for that namespace.
    NotAllowed(String),
    /// Another has it: an agent's host, say.
    Conflict(String),
    /// What was asked for is no longer kept.
    Gone(String),
    Store(crate::store::Error),
}

impl From<crate::gse::request::RequestError> for ApiError {
    fn from(wrong: crate::gse::request::RequestError) -> ApiError {
        ApiError::BadRequest(wrong.to_string())
    }
}

impl From<crate::store::Error> for ApiError {
    fn from(error: crate::store::Error) -> ApiError {
        match error {
            crate::store::Error::Compacted => ApiError::Gone(error.to_string()),
            error => ApiError::Store(error),
        }
    }
}

impl From<serde_json::Error> for ApiError {
    fn from(error: serde_json::Error) -> ApiError {
        ApiError::BadRequest(error.to_string())
    }
}

/// Milliseconds since 1970.
fn now_ms() -> i64 {
    crate::clock::now().0
}

/// Seconds since 1970, as rows tell times.
fn now_secs() -> i64 {
    now_ms() / 1000
}

/// A name that nobody else has.
fn fresh_id() -> String {
    use std::hash::{BuildHasher, RandomState};
    let (one, other) =
        (RandomState::new().hash_one(now_ms()), RandomState::new().hash_one(std::process::id()));
    format!("{one:016x}{other:016x}")
}
