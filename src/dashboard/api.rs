//! The JSON: how everything stands, every process, the plan, the past; and what can be asked for. Fields are only added.

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
use crate::store::{Error, Store, Txn};

/// So many of what is held are listed, and so many of the newest events.
const MAX_LISTED: usize = 1000;
const MAX_RECENT: u64 = 50;

/// A number as people write it: without a fraction where it has none.
fn whole_seconds(seconds: f64) -> Value {
    if seconds.fract() == 0.0 { json!(seconds as u64) } else { json!(seconds) }
}

pub fn status(board: &StatusBoard, view: View) -> Value {
    let known = board.status();
    let subject = &board.subject;
    let (role, leader, generation) = match &known.role {
        Role::Starting => ("starting", Value::Null, Value::Null),
        Role::Waiting { host, pid } => ("waiting", json!({"host": host, "pid": pid}), Value::Null),
        Role::Leading { generation } => ("leader", Value::Null, json!(generation)),
    };
    let look = known.last_pass.as_deref();
    let looked = look.map(|look| look.observed.at);
    let now = clock::now();
    let held = look.map(|look| look.plan.held.as_slice()).unwrap_or_default();
    let held_rows: Vec<Value> = held
        .iter()
        .take(MAX_LISTED)
        .map(|held| json!({"instance": held.instance, "reason": held.reason.word(), "detail": held.detail}))
        .collect();
    let events: Vec<Value> = board
        .entries_after(known.number.saturating_sub(MAX_RECENT), usize::MAX)
        .notes
        .iter()
        .map(|note| match view {
            View::Full => note.json(),
            View::Redacted => note.redacted().json(),
        })
        .collect();
    let problems = match view {
        View::Full => json!(&*known.problems),
        View::Redacted => redact::problems(json!(&*known.problems)),
    };
    json!({
        "version": 1,
        "abide": env!("CARGO_PKG_VERSION"),
        "target": subject.target,
        "owner": subject.owner,
        "source": {"paths": subject.sources, "revision": known.revision, "commit": known.commit, "not_followed": known.not_followed, "files": known.files,
                   "incomplete": known.is_incomplete},
        "pin": known.pin.as_ref().map(|pin| json!({"revision": pin.revision, "by": pin.by, "reason": pin.reason})),
        "follow": subject.follow,
        "heal": subject.heal,
        "prune": subject.prune,
        "interval_secs": whole_seconds(subject.interval.as_secs_f64()),
        "started": board.began.to_string(),
        "role": role,
        "leader": leader,
        "generation": generation,
        "looked_at": looked.map(|at| at.to_string()),
        "look_age_secs": looked.map(|at| now.secs_since(at)),
        "looks": known.observations,
        "failed_looks": known.failed_observations,
        "pass_ms": known.pass_duration.map(|took| u64::try_from(took.as_millis()).unwrap_or(u64::MAX)),
        "passing": known.pass_started.is_some(),
        "queue": known.queue,
        "under_way": known.in_flight,
        "converged": converged(&known),
        "trouble": known.trouble,
        "to_do": look.map(|look| look.plan.steps().count()),
        "instances": counts(known.rows()),
        "held": held_rows,
        "held_total": held.len(),
        "backing_off": look.map(|look| look.backing_off.iter().map(hold).collect::<Vec<_>>()).unwrap_or_default(),
        "holds": look.map(|look| look.rules.holds.iter().filter(|hold| hold.by != "watch").map(hold).collect::<Vec<_>>()).unwrap_or_default(),
        "pauses": look.map(|look| look.rules.pauses.iter().map(pause_json).collect::<Vec<_>>()).unwrap_or_default(),
        "notes": look.map(|look| look.plan.notes.clone()).unwrap_or_default(),
        "problems": problems,
        "redacted": view == View::Redacted,
        "last_event": known.number,
        "events": events,
    })
}

/// Everything was seen lately, and there is neither something to do nor under way nor left alone.
pub fn converged(known: &ControllerStatus) -> bool {
    known.trouble.is_none()
        && known.in_flight == 0
        && known.last_pass.as_ref().is_some_and(|look| look.plan.is_empty())
}

fn hold(hold: &Hold) -> Value {
    json!({"instance": hold.instance, "by": hold.by, "reason": hold.reason,
           "until": hold.until.map(|time| time.to_string())})
}

fn pause_json(pause: &Pause) -> Value {
    json!({"namespace": pause.namespace, "by": pause.by, "reason": pause.reason,
           "until": pause.until.map(|time| time.to_string())})
}

/// How many stand how, by each axis; every word is there.
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

/// Rows of the contract: those of `get processes -o json`, and why one is held.
pub fn processes(known: &ControllerStatus) -> Value {
    known.rows().iter().map(process).collect()
}

fn process(row: &Row) -> Value {
    let nothing = ObservedInstance {
        registered: Some(false),
        hosted: Some(false),
        running: Some(false),
        ..ObservedInstance::default()
    };
    let seen = row.seen.as_ref().unwrap_or(&nothing);
    // A host that nobody speaks for: what it last told is no fact.
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

/// What would be done now, as of the last look.
pub fn plan<S>(dashboard: &Dashboard<S>, view: View) -> Result<Response, ErrorResponse> {
    let known = dashboard.board.status();
    let none = || error_response(StatusCode::SERVICE_UNAVAILABLE, "nothing was looked at yet");
    let look = known.last_pass.ok_or_else(none)?;
    let plan = (dashboard.plan)(&look);
    Ok(match view {
        View::Full => json_response(StatusCode::OK, &plan),
        View::Redacted => json_response(StatusCode::OK, &redact::plan(plan)),
    })
}

/// What was applied, the newest first.
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
        Err(_) => Err(error_response(StatusCode::SERVICE_UNAVAILABLE, "the state did not answer in time")),
    }
}

/// The process is there and its loop goes round.
pub fn health(board: &StatusBoard) -> Response {
    match board.is_alive() {
        true => json_response(StatusCode::OK, &json!({"status": "ok"})),
        false => json_response(StatusCode::SERVICE_UNAVAILABLE, &json!({"status": "the loop stands still"})),
    }
}

/// It does its work: it has looked and could, or it waits for its turn.
pub fn ready(board: &StatusBoard, exhausted: Option<LimitedResource>) -> Response {
    let known = board.status();
    let overload = exhausted.map(|resource| resource.reason().to_owned());
    let why = match (&known.role, &known.trouble, &known.last_pass) {
        (_, Some(trouble), _) => Some(trouble.clone()),
        (Role::Waiting { .. }, None, _) | (Role::Leading { .. }, None, Some(_)) => None,
        (Role::Starting, None, _) => Some("starting".to_owned()),
        (Role::Leading { .. }, None, None) => Some("nothing was looked at yet".to_owned()),
    };
    match why.or(overload) {
        None => json_response(StatusCode::OK, &json!({"status": "ok"})),
        Some(why) => {
            json_response(StatusCode::SERVICE_UNAVAILABLE, &json!({"status": format!("not ready: {why}")}))
        }
    }
}

/// The loop looks at once.
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
    /// A duration, or a time.
    until: Option<String>,
    reason: Option<String>,
    by: Option<String>,
}

fn parse_pause_request(bytes: &[u8]) -> Result<PauseRequest, ErrorResponse> {
    let wrong = |message: &str| error_response(StatusCode::BAD_REQUEST, message);
    let wish: PauseRequest = serde_json::from_slice(bytes).map_err(|error| {
        wrong(&format!("{error}: such as {{\"namespace\": \"web\"}} or {{\"all\": true}}"))
    })?;
    match wish.namespace.is_some() != wish.all {
        true => Ok(wish),
        false => Err(wrong("say either {\"namespace\": NAME} or {\"all\": true}")),
    }
}

pub async fn pause<S: Store>(
    dashboard: &Dashboard<S>,
    parts: &Parts,
    bytes: &[u8],
) -> Result<Response, ErrorResponse> {
    let wish = parse_pause_request(bytes)?;
    let until = match wish.until.as_deref() {
        None => None,
        Some(text) => {
            let time = seconds(text).map(|secs| clock::now().after_secs(secs)).or_else(|| clock::read(text));
            Some(time.filter(|time| *time > clock::now()).ok_or_else(|| {
                error_response(
                    StatusCode::BAD_REQUEST,
                    "until is a duration such as 2h, or a time to come such as 2026-11-16T08:00:00Z",
                )
            })?)
        }
    };
    let pause = Pause {
        namespace: wish.namespace,
        by: wish.by.unwrap_or_else(|| "the listener".to_owned()),
        reason: wish.reason,
        until,
    };
    let value = serde_json::to_vec(&pause).unwrap_or_default();
    write(dashboard, Txn::put(Pause::store_key(pause.namespace.as_ref()), value)).await?;
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
    let wish = parse_pause_request(bytes)?;
    let place = Pause::store_key(wish.namespace.as_ref());
    let state = dashboard.state.get();
    let found = with_timeout(state.get(&place)).await?;
    let pause = found.and_then(|entry| serde_json::from_slice::<Pause>(&entry.value).ok());
    write(dashboard, Txn::delete(place)).await?;
    // One that is over by itself is none any more.
    let now = clock::now();
    if pause.is_none_or(|pause| pause.until.is_some_and(|until| until <= now)) {
        let message = format!("nothing was paused: {}", pause_scope(wish.namespace.as_ref()));
        return Ok(json_response(StatusCode::OK, &json!({"resumed": null, "message": message})));
    }
    trigger(dashboard, parts, &format!("resumed {}", pause_scope(wish.namespace.as_ref())));
    Ok(json_response(StatusCode::OK, &json!({"resumed": {"namespace": wish.namespace}})))
}

fn pause_scope(namespace: Option<&Name>) -> String {
    namespace.map_or("everything".to_owned(), |name| format!("namespace {name}"))
}

async fn write<S: Store>(dashboard: &Dashboard<S>, txn: Txn) -> Result<(), ErrorResponse> {
    let state = dashboard.state.get();
    with_timeout(state.txn(txn)).await.map(drop)
}

/// What the state answers, if it does in time.
async fn with_timeout<T>(asked: impl Future<Output = Result<T, Error>>) -> Result<T, ErrorResponse> {
    match tokio::time::timeout(RESPONSE_TIMEOUT, asked).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(error_response(StatusCode::SERVICE_UNAVAILABLE, &error.to_string())),
        Err(_) => Err(error_response(StatusCode::SERVICE_UNAVAILABLE, "the state did not answer in time")),
    }
}

/// Who changed what leaves a line.
fn audit(parts: &Parts, what: &str) {
    let from = parts.extensions.get::<Peer>().map_or_else(String::new, |Peer(peer)| peer.to_string());
    // Quoted: what callers send must not be able to look like a line of its own.
    info!(target: "audit", ?what, %from, "change");
}
