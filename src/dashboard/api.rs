//! JSON API: status, processes, plan and history; pause, resume and observation requests.
//!
//! Fields may be added, and are never renamed or removed.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Value, json};
use tracing::info;

use super::redact::{self, View};
use super::{Dashboard, ErrorResponse, RESPONSE_TIMEOUT, error_response, json_response, parameter};
use crate::clock;
use crate::control;
use crate::control::status::{ControllerStatus, Role, Row, StatusBoard, SyncStatus};
use crate::http::{LimitedResource, Peer};
use crate::model::{Health, Hold, KnownSpec, Name, ObservedInstance, Pause, seconds};
use crate::store::{Error, Store, Txn, keys};

/// Maximum listed held instances, and maximum listed events.
const MAX_LISTED: usize = 1000;
const MAX_RECENT: u64 = 50;

/// Seconds without a fraction where it is zero.
fn whole_seconds(seconds: f64) -> Value {
    if seconds.fract() == 0.0 { json!(seconds as u64) } else { json!(seconds) }
}

pub fn status(board: &StatusBoard, view: View) -> Value {
    let status = board.status();
    let subject = &board.subject;
    let (role, leader, generation) = match &status.role {
        Role::Starting => ("starting", Value::Null, Value::Null),
        Role::Waiting { host, pid } => ("waiting", json!({"host": host, "pid": pid}), Value::Null),
        Role::Leading { generation } => ("leader", Value::Null, json!(generation)),
    };
    let pass = status.pass.last.as_deref();
    let observed_at = pass.map(|pass| pass.observed.at);
    let now = clock::now();
    let held = pass.map(|pass| pass.plan.held.as_slice()).unwrap_or_default();
    let held_rows: Vec<Value> = held
        .iter()
        .take(MAX_LISTED)
        .map(|held| json!({"instance": held.instance, "reason": held.reason.word(), "detail": held.detail}))
        .collect();
    let events: Vec<Value> = board
        .entries_after(status.number.saturating_sub(MAX_RECENT), usize::MAX)
        .notes
        .iter()
        .map(|entry| match view {
            View::Full => entry.json(),
            View::Redacted => entry.redacted().json(),
        })
        .collect();
    let problems = match view {
        View::Full => json!(&*status.source.problems),
        View::Redacted => redact::problems(json!(&*status.source.problems)),
    };
    json!({
        "version": 1,
        "abide": env!("CARGO_PKG_VERSION"),
        "target": subject.target,
        "owner": subject.owner,
        "source": {"paths": subject.sources, "revision": status.source.revision, "commit": status.source.commit, "not_followed": status.source.not_followed, "files": status.source.files,
                   "incomplete": status.source.is_incomplete},
        "pin": status.source.pin.as_ref().map(|pin| json!({"revision": pin.revision, "by": pin.by, "reason": pin.reason})),
        "follow": subject.follow,
        "heal": subject.heal,
        "prune": subject.prune,
        "interval_secs": whole_seconds(subject.interval.as_secs_f64()),
        "started": board.began.to_string(),
        "role": role,
        "leader": leader,
        "generation": generation,
        "looked_at": observed_at.map(|at| at.to_string()),
        "look_age_secs": observed_at.map(|at| now.secs_since(at)),
        "looks": status.pass.observations,
        "failed_looks": status.pass.failed_observations,
        "pass_ms": status.pass.duration.map(|took| u64::try_from(took.as_millis()).unwrap_or(u64::MAX)),
        "passing": status.pass.started.is_some(),
        "queue": status.work.queue,
        "under_way": status.work.in_flight,
        "converged": converged(&status),
        "trouble": status.trouble,
        "to_do": pass.map(|pass| pass.plan.steps().count()),
        "instances": counts(status.rows()),
        "held": held_rows,
        "held_total": held.len(),
        "backing_off": pass.map(|pass| pass.backing_off.iter().map(hold).collect::<Vec<_>>()).unwrap_or_default(),
        "holds": pass.map(|pass| pass.rules.holds.iter().filter(|hold| hold.by != "watch").map(hold).collect::<Vec<_>>()).unwrap_or_default(),
        "pauses": pass.map(|pass| pass.rules.pauses.iter().map(pause_json).collect::<Vec<_>>()).unwrap_or_default(),
        "notes": pass.map(|pass| pass.plan.notes.clone()).unwrap_or_default(),
        "problems": problems,
        "redacted": view == View::Redacted,
        "last_event": status.number,
        "events": events,
    })
}

/// The last pass succeeded, no plan is in flight, and nothing is to do or held.
pub fn converged(status: &ControllerStatus) -> bool {
    status.trouble.is_none()
        && status.work.in_flight == 0
        && status.pass.last.as_ref().is_some_and(|pass| pass.plan.is_empty())
}

fn hold(hold: &Hold) -> Value {
    json!({"instance": hold.instance, "by": hold.by, "reason": hold.reason,
           "until": hold.until.map(|time| time.to_string())})
}

fn pause_json(pause: &Pause) -> Value {
    json!({"namespace": pause.namespace, "by": pause.by, "reason": pause.reason,
           "until": pause.until.map(|time| time.to_string())})
}

/// Instance counts per value of each axis, including zero counts.
fn counts(rows: &[Row]) -> Value {
    let mut sync: BTreeMap<&str, usize> = SyncStatus::ALL.iter().map(|sync| (sync.word(), 0)).collect();
    let mut health: BTreeMap<&str, usize> = Health::ALL.iter().map(|health| (health.word(), 0)).collect();
    let mut hosting: BTreeMap<&str, usize> = HOSTING.iter().map(|word| (*word, 0)).collect();
    for row in rows {
        *sync.entry(row.sync.word()).or_default() += 1;
        *health.entry(health_of(row).word()).or_default() += 1;
        *hosting.entry(hosting_of(row)).or_default() += 1;
    }
    json!({"total": rows.len(), "sync": sync, "health": health, "hosting": hosting})
}

pub const HOSTING: [&str; 3] = ["Hosted", "NotHosted", "Unknown"];

pub fn health_of(row: &Row) -> Health {
    match (&row.gap, &row.seen) {
        (Some(_), _) => Health::Unknown,
        (None, Some(seen)) => seen.health,
        (None, None) => Health::NotReported,
    }
}

pub fn hosting_of(row: &Row) -> &'static str {
    match (&row.gap, &row.seen) {
        (Some(_), _) => "Unknown",
        (None, None) => "NotHosted",
        (None, Some(seen)) => match seen.hosted {
            Some(true) => "Hosted",
            Some(false) => "NotHosted",
            None => "Unknown",
        },
    }
}

/// Process rows as in `get processes -o json`, with the hold reason.
pub fn processes(status: &ControllerStatus) -> Value {
    status.rows().iter().map(process).collect()
}

fn process(row: &Row) -> Value {
    let nothing = ObservedInstance {
        registered: Some(false),
        hosted: Some(false),
        running: Some(false),
        ..ObservedInstance::default()
    };
    let seen = row.seen.as_ref().unwrap_or(&nothing);
    // Without a live agent the last report is not current.
    let fact = |fact: Option<bool>| fact.filter(|_| row.gap.is_none());
    let revision = |version: &KnownSpec| match version {
        KnownSpec::Unknown => None,
        KnownSpec::Digests(revision) => Some(*revision),
        KnownSpec::Full(spec) => Some(*spec.revision()),
    };
    let there = row.seen.is_some();
    json!({
        "instance": row.key,
        "namespace": row.key.namespace,
        "name": row.key.name,
        "host": row.key.host,
        "labels": seen.labels,
        "registered": seen.registered,
        "hosted": fact(seen.hosted),
        "running": fact(seen.running),
        "pid": seen.pid.filter(|_| row.gap.is_none()),
        "owner": seen.owner,
        "revision": revision(&seen.registered_spec).filter(|_| there).map(|revision| revision.to_string()),
        "live_revision": revision(&seen.live).filter(|_| there).map(|revision| revision.to_string()),
        "sync": row.sync.word(),
        "health": health_of(row).word(),
        "hosting": hosting_of(row),
        "since": seen.since.map(|time| time.to_string()),
        "report_time": seen.report_time.map(|time| time.to_string()),
        "held": row.held.as_ref().map(|(reason, detail)| json!({"reason": reason.word(), "detail": detail})),
        "declared": row.declared,
    })
}

/// The plan of the last pass.
pub fn plan<S>(dashboard: &Dashboard<S>, view: View) -> Result<Response, ErrorResponse> {
    let status = dashboard.board.status();
    let none = || error_response(StatusCode::SERVICE_UNAVAILABLE, "the target was not observed yet");
    let pass = status.pass.last.ok_or_else(none)?;
    let plan = (dashboard.plan)(&pass);
    Ok(match view {
        View::Full => json_response(StatusCode::OK, &plan),
        View::Redacted => json_response(StatusCode::OK, &redact::plan(plan)),
    })
}

/// Applied revisions, newest first.
pub async fn history<S: Store>(dashboard: &Dashboard<S>, parts: &Parts) -> Result<Value, ErrorResponse> {
    let limit = match parameter(parts, "limit") {
        None => 100,
        Some(text) => text.parse().ok().filter(|limit| (1..=10_000).contains(limit)).ok_or_else(|| {
            error_response(StatusCode::BAD_REQUEST, "limit must be a number from 1 to 10000")
        })?,
    };
    let state = dashboard.state.get();
    let newest = control::history::newest(&*state, &dashboard.board.subject.owner, limit);
    match tokio::time::timeout(RESPONSE_TIMEOUT, newest).await {
        Ok(Ok(newest)) => Ok(newest.into()),
        Ok(Err(error)) => Err(error_response(StatusCode::SERVICE_UNAVAILABLE, &error.to_string())),
        Err(_) => Err(error_response(StatusCode::SERVICE_UNAVAILABLE, "the state store timed out")),
    }
}

/// Liveness: the control loop makes progress.
pub fn health(board: &StatusBoard) -> Response {
    match board.is_alive() {
        true => json_response(StatusCode::OK, &json!({"status": "ok"})),
        false => {
            json_response(StatusCode::SERVICE_UNAVAILABLE, &json!({"status": "the control loop is stuck"}))
        }
    }
}

/// Readiness: the last pass observed the target, or this controller waits for the lease.
pub fn ready(board: &StatusBoard, exhausted: Option<LimitedResource>) -> Response {
    let status = board.status();
    let overload = exhausted.map(|resource| resource.reason().to_owned());
    let why = match (&status.role, &status.trouble, &status.pass.last) {
        (_, Some(trouble), _) => Some(trouble.clone()),
        (Role::Waiting { .. }, None, _) | (Role::Leading { .. }, None, Some(_)) => None,
        (Role::Starting, None, _) => Some("starting".to_owned()),
        (Role::Leading { .. }, None, None) => Some("the target was not observed yet".to_owned()),
    };
    match why.or(overload) {
        None => json_response(StatusCode::OK, &json!({"status": "ok"})),
        Some(why) => {
            json_response(StatusCode::SERVICE_UNAVAILABLE, &json!({"status": format!("not ready: {why}")}))
        }
    }
}

/// Triggers a pass.
pub fn trigger<S>(dashboard: &Dashboard<S>, parts: &Parts, why: &str) -> Response {
    audit(parts, why);
    dashboard.board.log_request(why.to_owned());
    dashboard.trigger.notify_one();
    json_response(StatusCode::ACCEPTED, &json!({"accepted": true}))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PauseRequest {
    namespace: Option<Name>,
    #[serde(default)]
    all: bool,
    /// A duration or a time.
    until: Option<String>,
    reason: Option<String>,
    by: Option<String>,
}

fn parse_pause_request(bytes: &[u8]) -> Result<PauseRequest, ErrorResponse> {
    let wrong = |message: &str| error_response(StatusCode::BAD_REQUEST, message);
    let request: PauseRequest = serde_json::from_slice(bytes).map_err(|error| {
        wrong(&format!("invalid body: {error}; send {{\"namespace\": NAME}} or {{\"all\": true}}"))
    })?;
    match request.namespace.is_some() != request.all {
        true => Ok(request),
        false => Err(wrong("the body needs either {\"namespace\": NAME} or {\"all\": true}")),
    }
}

pub async fn pause<S: Store>(
    dashboard: &Dashboard<S>,
    parts: &Parts,
    bytes: &[u8],
) -> Result<Response, ErrorResponse> {
    let request = parse_pause_request(bytes)?;
    let until = match request.until.as_deref() {
        None => None,
        Some(text) => {
            let time = seconds(text).map(|secs| clock::now().after_secs(secs)).or_else(|| clock::read(text));
            Some(time.filter(|time| *time > clock::now()).ok_or_else(|| {
                error_response(
                    StatusCode::BAD_REQUEST,
                    "until must be a duration such as 2h or a future time such as 2026-11-16T08:00:00Z",
                )
            })?)
        }
    };
    let pause = Pause {
        namespace: request.namespace,
        by: request.by.unwrap_or_else(|| "the listener".to_owned()),
        reason: request.reason,
        until,
    };
    let value = serde_json::to_vec(&pause).unwrap_or_default();
    write(dashboard, Txn::put(keys::pause(pause.namespace.as_ref()), value)).await?;
    let reason = pause.reason.as_deref().map(|why| format!(": {why}")).unwrap_or_default();
    trigger(
        dashboard,
        parts,
        &format!("paused {} by {}{reason}", pause_scope(pause.namespace.as_ref()), pause.by),
    );
    Ok(json_response(StatusCode::OK, &json!({"paused": pause_json(&pause)})))
}

pub async fn resume<S: Store>(
    dashboard: &Dashboard<S>,
    parts: &Parts,
    bytes: &[u8],
) -> Result<Response, ErrorResponse> {
    let request = parse_pause_request(bytes)?;
    let key = keys::pause(request.namespace.as_ref());
    let state = dashboard.state.get();
    let found = with_timeout(state.get(&key)).await?;
    write(dashboard, Txn::delete(key)).await?;
    // An expired pause was not in effect; one that cannot be read was.
    let now = clock::now();
    let is_active = |pause: Pause| pause.until.is_none_or(|until| until > now);
    let was_paused = found.is_some_and(|entry| serde_json::from_slice(&entry.value).map_or(true, is_active));
    if !was_paused {
        let message = format!("nothing was paused: {}", pause_scope(request.namespace.as_ref()));
        return Ok(json_response(StatusCode::OK, &json!({"resumed": null, "message": message})));
    }
    trigger(dashboard, parts, &format!("resumed {}", pause_scope(request.namespace.as_ref())));
    Ok(json_response(StatusCode::OK, &json!({"resumed": {"namespace": request.namespace}})))
}

fn pause_scope(namespace: Option<&Name>) -> String {
    namespace.map_or("everything".to_owned(), |name| format!("namespace {name}"))
}

async fn write<S: Store>(dashboard: &Dashboard<S>, txn: Txn) -> Result<(), ErrorResponse> {
    let state = dashboard.state.get();
    with_timeout(state.txn(txn)).await.map(drop)
}

/// Runs a store call with a timeout.
async fn with_timeout<T>(call: impl Future<Output = Result<T, Error>>) -> Result<T, ErrorResponse> {
    match tokio::time::timeout(RESPONSE_TIMEOUT, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(error_response(StatusCode::SERVICE_UNAVAILABLE, &error.to_string())),
        Err(_) => Err(error_response(StatusCode::SERVICE_UNAVAILABLE, "the state store timed out")),
    }
}

/// Logs a change with the caller's address.
fn audit(parts: &Parts, what: &str) {
    let from = parts.extensions.get::<Peer>().map_or_else(String::new, |Peer(peer)| peer.to_string());
    // Quoted: text from callers must not be able to forge a log line.
    info!(target: "audit", ?what, %from, "change");
}
