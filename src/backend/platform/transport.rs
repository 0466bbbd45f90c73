//! The line to a platform: where each call goes, as whom, and how fast.
//!
//! A call that the platform turns away because there are too many is made again, later each time, and the ones after it
//! come slower; it did nothing. Whatever else goes wrong is told, never repeated here: it may have been carried out.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

use super::super::BackendError;
use crate::gse::codes::EnvelopeCode;
use crate::http::{ApiClient, ApiEndpoint, CallError};
use crate::model::Dialect;

/// How fast a platform may be called.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// Calls in a second.
    pub qps: Option<f64>,
    /// Calls under way at once.
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
    /// JOB by scope is another version of its calls.
    is_jobv3: bool,
    /// What the bus takes inside a body.
    credentials: Map<String, Value>,
    turns: Mutex<AdaptiveRate>,
}

struct AdaptiveRate {
    next: Instant,
    gap: Duration,
    least: Duration,
}

/// How long one call may take.
const TIME: Duration = Duration::from_secs(30);
/// How often a call that was turned away is made again.
const TRIES: u32 = 10;
const FIRST_GAP: Duration = Duration::from_millis(100);
const LONGEST_GAP: Duration = Duration::from_secs(5);

impl Transport {
    pub fn new(
        access: &ApiEndpoint,
        dialect: Dialect,
        is_third: bool,
        pace: Pace,
    ) -> Result<Transport, String> {
        let mut credentials = Map::new();
        let in_body = match dialect {
            Dialect::GseV1 | Dialect::GseV2 | Dialect::Job => true,
            Dialect::GseApigw | Dialect::Abide => false,
        };
        if in_body {
            credentials.insert("bk_app_code".to_owned(), access.code.clone().into());
            credentials.insert("bk_app_secret".to_owned(), access.secret.clone().into());
            let name = access.username.clone().unwrap_or_else(|| "admin".to_owned());
            credentials.insert("bk_username".to_owned(), name.into());
        }
        let least = pace.qps.filter(|qps| *qps > 0.0).map_or(Duration::ZERO, |qps| {
            Duration::try_from_secs_f64(1.0 / qps).unwrap_or(LONGEST_GAP).min(LONGEST_GAP)
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

    /// The text of a call's `data`.
    pub async fn ask(&self, name: &str, mut body: Value) -> Result<String, CallError> {
        if let Value::Object(fields) = &mut body {
            fields.extend(self.credentials.clone());
        }
        let body = body.to_string().into_bytes();
        let path = self.path(name);
        let mut tries = 0;
        loop {
            tokio::time::sleep(self.turn()).await;
            let asked = self.calls.call(reqwest::Method::POST, &path, body.clone(), &[], TIME).await;
            match asked {
                Err(broken) if is_busy(&broken) && tries < TRIES => {
                    tries += 1;
                    self.slower();
                    tracing::info!(%name, tries, "turned away");
                }
                asked => {
                    self.faster();
                    return asked;
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

    /// How long to wait for the next turn, which is taken by that.
    fn turn(&self) -> Duration {
        let now = Instant::now();
        let mut turns = self.turns();
        let at = turns.next.max(now);
        turns.next = at + turns.gap;
        at - now
    }

    fn slower(&self) {
        let mut turns = self.turns();
        turns.gap = (turns.gap * 2).clamp(FIRST_GAP, LONGEST_GAP);
        turns.next = turns.next.max(Instant::now() + turns.gap);
    }

    fn faster(&self) {
        let mut turns = self.turns();
        let gap = turns.gap.mul_f64(0.8);
        turns.gap = if gap < Duration::from_millis(5) { turns.least } else { gap.max(turns.least) };
    }
}

/// Too many calls: this one did nothing.
fn is_busy(broken: &CallError) -> bool {
    let codes = [EnvelopeCode::RATE_LIMITED.0, EnvelopeCode::CONCURRENCY_LIMITED.0];
    matches!(broken, CallError::Refused { status, code, .. } if *status == 429 || codes.contains(code))
}

/// A question that came to nothing: it changes nothing, whether it was carried out or not.
pub fn error_of_query(broken: CallError) -> BackendError {
    match broken {
        CallError::Redirected { why, .. } => BackendError::Unreachable(why),
        broken => error_of_write(broken),
    }
}

/// A call that came to nothing. What a server broke off, or a platform that lost GSE on the way, may have been done.
pub fn error_of_write(broken: CallError) -> BackendError {
    match &broken {
        CallError::Unreachable(why) => BackendError::Unreachable(why.clone()),
        CallError::NoAnswer(_) | CallError::Redirected { may_have_run: true, .. } => BackendError::NoAnswer,
        CallError::Redirected { why, may_have_run: false } => BackendError::Unreachable(why.clone()),
        CallError::Refused { .. } if is_busy(&broken) => BackendError::Busy(broken.to_string()),
        CallError::Refused { status, code, .. } if *status >= 500 || *code == EnvelopeCode::NO_GSE.0 => {
            BackendError::NoAnswer
        }
        CallError::Refused { code: 0, message, status } => {
            BackendError::Refused(format!("{message} (HTTP {status})"))
        }
        CallError::Refused { code, message, .. } => BackendError::Refused(format!("{message} (code {code})")),
    }
}
