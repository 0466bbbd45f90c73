//! Gateway: the GSE and JOB process API over a store, with agents that run the operations.
//!
//! # Theory of operation
//! [`middleware`] resolves a request to a call ([`routes`]: one call has several paths), authenticates the caller
//! ([`auth`], [`apps`]), checks its role and reads the body. [`handlers`] runs the call as a method of [`Gateway`]:
//! [`registry`] stores registrations, [`status`] reads them, [`operate`] creates tasks. A response is an envelope with
//! HTTP 200, also for a failure. [`access`] decides every request; [`process_owners`] looks up the owners that it compares.
//!
//! A task is in the store before its id is returned; then its items are sent to the agent sessions of their hosts
//! ([`hosts`], [`channel`]). An agent's results and reports are written in one commit and acknowledged after it; the
//! agent resends unacknowledged messages. A row without a result ends with 117 when its host has had no agent for the
//! agent timeout ([`tasks`], [`missing_agents`]), and with 1900504 when a connected agent returns no result before
//! the row's deadline ([`deadlines`]). Operations have sequence numbers; agents delete records up to a floor below
//! which all operations are final ([`floor`]).
//!
//! Agents authenticate by a static token, or by a client certificate that [`fleet`] issues for a join token.
//!
//! In addition to GSE, `/api/abide/v1/processes` returns all facts about processes ([`processes`]), also in a
//! compact form ([`process_digests`]), and controllers use the store through [`state`]. [`failed_starts`] are listed on request. [`logs`] streams
//! logs from the agents; [`figures`] are in memory only. [`identity`] enforces one owner per process identity and host. Readers get
//! digests in place of secrets ([`secrets`], [`row_digests`]). [`audit`] records who did what, in files with a hash chain.
//!
//! Invariants: acknowledged messages are on disk; the rows of a task are independent; one `X-Abide-Op` runs once; a
//! generation is valid only while the writer lease of its owner holds it.

mod agent_calls;
mod agent_sessions;
mod app_limits;
pub mod audit;
pub mod auth;
mod batch;
mod channel;
mod deadlines;
mod decode;
mod failed_starts;
mod figures;
mod fleet;
mod handlers;
mod identity;
mod instance_history;
mod logs;
mod metrics;
pub mod middleware;
mod missing_agents;
mod namespace_limits;
mod openapi;
mod operate;
mod process_digests;
mod process_owners;
mod processes;
mod registry;
mod reply;
mod report_limits;
mod report_usage;
mod results;
pub mod routes;
mod row_digests;
mod secrets;
mod sequence_numbers;
mod state;
mod state_scope;
mod state_secrets;
mod status;
mod store_trim;
mod tasks;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::access;
use crate::clock;
use crate::store::{Store, Txn, keys};

pub use fleet::{FleetMembership, FleetTrust};
pub use registry::RegistryRecord;
pub use reply::overload_body;
pub use state::StoreRequest;
pub use store_trim::excess_entries;

/// Maximum wait of an operation for a host's agent; its row is final within ten seconds.
const AGENT_TIMEOUT: Duration = Duration::from_secs(9);

/// Time for an operation beyond the timeouts and checks of its spec, for a slow disk or a busy host.
const ALLOWANCE: Duration = Duration::from_secs(60);

const AUDIT_NOT_READY: &str = "not ready: the audit log cannot be written; changes are refused";

/// State of the gateway, shared by all handlers. One per process.
pub struct Gateway<S> {
    store: Arc<S>,
    timeouts: OperationTimeouts,
    tasks: tasks::Tasks,
    numbers: sequence_numbers::TaskNumbers,
    hosts: agent_sessions::AgentSessions,
    log_streams: logs::LogStreams,
    report_usage: report_usage::ReportUsage,
    figures: figures::FigureQueries,
    digests: process_digests::DigestCache,
    pub(crate) metrics: metrics::Metrics,
    /// The last write failed: reads continue, and changes are refused.
    cannot_write: AtomicBool,
    audit: Option<audit::AuditLog>,
}

#[derive(Clone, Copy)]
struct OperationTimeouts {
    /// Maximum wait of an operation for a host's agent to reconnect.
    agent: Duration,
    /// Time for an operation beyond the timeouts of its spec.
    allowance: Duration,
}

impl<S: Store> Gateway<S> {
    pub fn new(store: S) -> Gateway<S> {
        Gateway {
            store: Arc::new(store),
            timeouts: OperationTimeouts { agent: AGENT_TIMEOUT, allowance: ALLOWANCE },
            tasks: tasks::Tasks::default(),
            numbers: sequence_numbers::TaskNumbers::default(),
            hosts: agent_sessions::AgentSessions::default(),
            log_streams: logs::LogStreams::default(),
            report_usage: report_usage::ReportUsage::default(),
            figures: figures::FigureQueries::default(),
            digests: process_digests::DigestCache::default(),
            metrics: metrics::Metrics::default(),
            cannot_write: AtomicBool::new(false),
            audit: None,
        }
    }

    /// Records calls in an audit log.
    pub fn with_audit(mut self, audit: audit::AuditLog) -> Gateway<S> {
        self.audit = Some(audit);
        self
    }

    /// The store, for the records of the fleet.
    pub(crate) fn store(&self) -> Arc<S> {
        Arc::clone(&self.store)
    }

    /// For tests: a shorter agent timeout.
    pub fn with_agent_timeout(mut self, timeout: Duration) -> Gateway<S> {
        self.timeouts.agent = timeout;
        self
    }

    /// For tests: a shorter allowance.
    pub fn with_allowance(mut self, allowance: Duration) -> Gateway<S> {
        self.timeouts.allowance = allowance;
        self
    }
}

impl<S: Store> Gateway<S> {
    /// Background work: loads open tasks, ends rows without an agent or past their deadline, and removes old tasks.
    /// Returns when the store cannot be read at the start.
    pub async fn run_maintenance(&self) -> ApiError {
        const MAINTENANCE_INTERVAL: Duration = Duration::from_millis(250);
        const GC_INTERVAL: Duration = Duration::from_secs(600);
        if let Err(refusal) = self.load_tasks().await {
            return refusal;
        }
        let mut last_gc: Option<std::time::Instant> = None;
        loop {
            tokio::time::sleep(MAINTENANCE_INTERVAL.min(self.timeouts.agent)).await;
            // A full disk may have space again: the write is retried.
            if self.cannot_write.load(Ordering::Acquire) {
                self.record_write_result(
                    self.store.txn(Txn::put(keys::PROBE, clock::now().0.to_string())).await.is_ok(),
                );
            }
            if let Err(refusal) = self.expire_items().await {
                tracing::warn!(?refusal, "cannot end rows without an agent");
            }
            if let Err(refusal) = self.expire_rows().await {
                tracing::warn!(?refusal, "cannot end rows past their deadline");
            }
            self.raise_floor();
            self.record_ended_tasks();
            if last_gc.is_none_or(|last| last.elapsed() > GC_INTERVAL) {
                last_gc = Some(std::time::Instant::now());
                if let Err(refusal) = self.gc_tasks().await {
                    tracing::warn!(?refusal, "cannot remove old tasks");
                }
                if let Err(refusal) = self.gc_failed_starts().await {
                    tracing::warn!(?refusal, "cannot remove old failed starts");
                }
            }
        }
    }

    /// Reason why the gateway is not ready.
    pub fn not_ready(&self) -> Option<&'static str> {
        match self.is_ready() {
            false => Some("not ready: loading open tasks from the store"),
            true if self.cannot_write.load(Ordering::Acquire) => {
                Some("not ready: the store cannot be written; reads continue")
            }
            true if self.audit.as_ref().is_some_and(audit::AuditLog::is_failing) => Some(AUDIT_NOT_READY),
            true => None,
        }
    }

    fn record_write_result(&self, succeeded: bool) {
        self.cannot_write.store(!succeeded, Ordering::Release);
    }

    /// Ends all agent streams, so that agents reconnect elsewhere.
    pub fn close(&self) {
        self.hosts.expire(Duration::ZERO);
    }
}

/// Caller of a change, with the headers of Abide's own clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    pub app: String,
    pub owner: Option<String>,
    /// Generation of the owner's writer lease.
    pub generation: Option<u64>,
    /// Idempotency key of the call.
    pub op: Option<String>,
    pub grant: Arc<access::Grant>,
    pub limits: access::AppLimits,
}

impl Caller {
    /// Whether the call is from one of Abide's own clients, which send these headers with every change.
    fn is_abide(&self) -> bool {
        self.op.is_some() || self.generation.is_some()
    }
}

/// Error of a whole call.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ApiError {
    /// The request is incomplete or invalid; the message names the field.
    #[error("{0}")]
    BadRequest(String),
    #[error("{0}")]
    UnknownTask(String),
    /// The task is not queued yet; the caller polls again.
    #[error("the task is not queued yet")]
    NotQueued,
    /// The credentials do not permit the call.
    #[error("{0}")]
    NotAllowed(String),
    /// Another caller owns the resource, such as an agent's host.
    #[error("{0}")]
    Conflict(String),
    /// The requested data is no longer stored.
    #[error("{0}")]
    Gone(String),
    /// A limit is reached; the caller tries again later.
    #[error("{0}")]
    Busy(String),
    /// The audit log cannot be written or read.
    #[error("the audit log: {0}")]
    AuditFailed(String),
    #[error(transparent)]
    Store(crate::store::Error),
}

impl From<crate::gse::request::RequestError> for ApiError {
    fn from(wrong: crate::gse::request::RequestError) -> ApiError {
        ApiError::BadRequest(wrong.to_string())
    }
}

impl From<access::MissingGrant> for ApiError {
    fn from(missing: access::MissingGrant) -> ApiError {
        ApiError::NotAllowed(missing.to_string())
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

/// A stored value, for callers that continue without it. An error is logged with its key.
fn readable<T>(value: Result<T, crate::store::Error>) -> Option<T> {
    value.inspect_err(|error| tracing::error!(%error, "cannot read a stored value")).ok()
}

/// Seconds since 1970, the unit of times in rows.
fn now_secs() -> i64 {
    clock::now().0 / 1000
}
