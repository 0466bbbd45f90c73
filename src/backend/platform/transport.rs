//! Transport to a platform: URLs, credentials and rate limits.
//!
//! A rate-limited call did nothing: it is retried with increasing delays, and the rate of later calls is reduced. Any
//! other failure is returned and never retried here: the call may have been executed.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use super::super::{BackendError, Refusal, RefusalReason};
use crate::gse::codes::EnvelopeCode;
use crate::http::{ApiClient, ApiCredentials, ApiEndpoint, CallError, ClientError};
use crate::model::Dialect;
use crate::retry_delay::RetryDelay;

/// Rate limits of a platform.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// Calls per second.
    pub qps: Option<f64>,
    /// Maximum calls in flight.
    pub at_once: usize,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace { qps: None, at_once: 8 }
    }
}

pub struct Transport {
    calls: ApiClient,
    dialect: Dialect,
    /// JOB calls with a scope use API version 3.
    is_jobv3: bool,
    /// Credentials that the ESB expects in the body.
    credentials: Map<String, Value>,
    turns: Mutex<AdaptiveRate>,
}

struct AdaptiveRate {
    next: Instant,
    gap: Duration,
    least: Duration,
}

/// Timeout of one call.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum retries of a rate-limited call.
const MAX_RETRIES: u32 = 10;
const GAPS: RetryDelay = RetryDelay::doubling(Duration::from_millis(100), Duration::from_secs(5));

impl Transport {
    pub fn new(
        access: &ApiEndpoint,
        dialect: Dialect,
        is_third: bool,
        pace: Pace,
    ) -> Result<Transport, ClientError> {
        let mut credentials = Map::new();
        let in_body = match dialect {
            Dialect::GseV1 | Dialect::GseV2 | Dialect::Job => true,
            Dialect::GseApigw | Dialect::Abide => false,
        };
        // The config file refuses tokens of people for platforms.
        if in_body && let ApiCredentials::App { code, secret, username } = &access.credentials {
            credentials.insert("bk_app_code".to_owned(), code.clone().into());
            credentials.insert("bk_app_secret".to_owned(), secret.clone().into());
            let name = username.clone().unwrap_or_else(|| "admin".to_owned());
            credentials.insert("bk_username".to_owned(), name.into());
        }
        let least = pace.qps.filter(|qps| *qps > 0.0).map_or(Duration::ZERO, |qps| {
            Duration::try_from_secs_f64(1.0 / qps).unwrap_or(GAPS.max()).min(GAPS.max())
        });
        let turns = AdaptiveRate { next: Instant::now(), gap: least, least };
        Ok(Transport {
            calls: ApiClient::new(access)?,
            dialect,
            is_jobv3: is_third,
            credentials,
            turns: Mutex::new(turns),
        })
    }

    pub fn url(&self) -> &str {
        self.calls.url()
    }

    /// Sends a call, and returns the text of its `data`.
    pub async fn ask(&self, name: &str, mut body: Value) -> Result<String, CallError> {
        if let Value::Object(fields) = &mut body {
            fields.extend(self.credentials.clone());
        }
        let body = body.to_string().into_bytes();
        let path = self.path(name);
        let mut tries = 0;
        loop {
            tokio::time::sleep(self.turn()).await;
            let result = self.calls.call(reqwest::Method::POST, &path, body.clone(), &[], CALL_TIMEOUT).await;
            match result {
                Err(broken) if is_busy(&broken) && tries < MAX_RETRIES => {
                    tries += 1;
                    self.slower();
                    tracing::info!(%name, tries, "rate-limited; retrying");
                }
                result => {
                    self.faster();
                    return result;
                }
            }
        }
    }

    fn path(&self, name: &str) -> String {
        match (self.dialect, name) {
            (Dialect::GseApigw, "list_agent_state") => format!("/api/v2/cluster/{name}"),
            (Dialect::GseApigw, _) => format!("/api/v2/proc/{name}"),
            (Dialect::Job, _) if self.is_jobv3 => format!("/api/c/compapi/v2/jobv3/{name}/"),
            (Dialect::Job, _) => format!("/api/c/compapi/v2/job/{name}/"),
            (Dialect::GseV1 | Dialect::GseV2 | Dialect::Abide, _) => {
                format!("/api/c/compapi/v2/gse/{name}/")
            }
        }
    }

    fn turns(&self) -> std::sync::MutexGuard<'_, AdaptiveRate> {
        self.turns.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Reserves the next slot, and returns the delay until it.
    fn turn(&self) -> Duration {
        let now = Instant::now();
        let mut turns = self.turns();
        let at = turns.next.max(now);
        turns.next = at + turns.gap;
        at - now
    }

    fn slower(&self) {
        let mut turns = self.turns();
        turns.gap = GAPS.next(turns.gap);
        turns.next = turns.next.max(Instant::now() + turns.gap);
    }

    fn faster(&self) {
        let mut turns = self.turns();
        let gap = turns.gap.mul_f64(0.8);
        turns.gap = if gap < Duration::from_millis(5) { turns.least } else { gap.max(turns.least) };
    }
}

/// Whether a call was rate-limited, and did nothing.
fn is_busy(broken: &CallError) -> bool {
    let codes = [EnvelopeCode::RATE_LIMITED.0, EnvelopeCode::CONCURRENCY_LIMITED.0];
    matches!(broken, CallError::Refused { status, code, .. } if *status == 429 || codes.contains(code))
}

/// Error of a read-only call, which changes nothing whether it was executed or not.
pub fn error_of_query(broken: CallError) -> BackendError {
    match broken {
        CallError::Redirected { why, .. } => BackendError::Unreachable(why.into()),
        broken => error_of_write(broken),
    }
}

/// Error of a mutating call. It may have been executed if the server closed the connection or the platform lost GSE.
pub fn error_of_write(broken: CallError) -> BackendError {
    match &broken {
        CallError::Unreachable(why) => BackendError::Unreachable(why.clone()),
        CallError::NoAnswer(_) | CallError::Redirected { may_have_run: true, .. } => BackendError::NoAnswer,
        CallError::Unreadable(response) => BackendError::unreadable(response),
        CallError::Redirected { why, may_have_run: false } => BackendError::Unreachable(why.as_str().into()),
        CallError::Refused { .. } if is_busy(&broken) => BackendError::Busy(broken.to_string()),
        CallError::Refused { status, code, message } if *status >= 500 || *code == EnvelopeCode::NO_GSE.0 => {
            let what = format!("the target failed: {message} (HTTP {status}, code {code})");
            BackendError::Inconclusive(what)
        }
        CallError::Refused { code: 0, message, status } => BackendError::Refused(Refusal::new(
            RefusalReason::of(&broken),
            format!("{message} (HTTP {status})"),
        )),
        CallError::Refused { code, message, .. } => BackendError::Refused(Refusal::new(
            RefusalReason::of(&broken),
            format!("{message} (code {code})"),
        )),
    }
}
