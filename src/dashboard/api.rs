//! JSON API: status, processes, plan and history; pause, resume and observation requests.
//!
//! Fields may be added, and are never renamed or removed.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use serde_json::Number;
use tracing::info;

use super::caller::RequestCaller;
use super::people::PersonCaller;
use super::redact::{self, View};
use super::reply::{ErrorResponse, error_response, json_response};
use super::viewer::Viewer;
use super::{Dashboard, RESPONSE_TIMEOUT, parameter};
use crate::access::AccessRequest;
use crate::alerts::DeliveryBoard;
use crate::clock;
use crate::contract::{
    Accepted, ControllerProcess, ControllerReport, EventEntry, HeldDetail, HeldRow, HistoryEntry, HoldEntry,
    Hosting, InstanceCounts, LeaderHost, ManifestProblem, PauseEntry, PauseRequest, Paused, PinDetails,
    ProcessRow, ReportedDetails, Resumed, ResumedScope, ServerHealth, SourceReport,
};
use crate::control::PassResult;
use crate::control::status::{ControllerStatus, Role, Row, StatusBoard, SyncStatus};
use crate::engine::pin::Pin;
use crate::http::{LimitedResource, Peer};
use crate::model::{
    DigestKeyRef, Health, HeldChange, InstanceKey, KnownSpec, Name, ObservedInstance, Pause, seconds,
};
use crate::store::{Error, Store, Txn, keys};

/// Maximum listed held instances, and maximum listed events.
const MAX_LISTED: usize = 1000;
const MAX_RECENT: u64 = 50;

/// Seconds without a fraction where it is zero.
fn whole_seconds(seconds: f64) -> Number {
    let whole = || Number::from(seconds as u64);
    if seconds.fract() == 0.0 { whole() } else { Number::from_f64(seconds).unwrap_or_else(whole) }
}

pub fn status(board: &StatusBoard, deliveries: &DeliveryBoard, viewer: &Viewer) -> ControllerReport {
    let status = board.status();
    let subject = &board.subject;
    let (role, leader, generation) = match status.role.clone() {
        Role::Starting => ("starting", None, None),
        Role::Waiting { host, pid } => ("waiting", Some(LeaderHost { host, pid }), None),
        Role::Leading { generation } => ("leader", None, Some(generation)),
    };
    let pass = status.pass.last.as_deref();
    let observed_at = pass.map(|pass| pass.observed.at);
    let held = pass.map(|pass| pass.plan.held.as_slice()).unwrap_or_default();
    let held: Vec<&HeldChange> = held.iter().filter(|held| viewer.sees(&held.instance)).collect();
    let steps = |pass: &PassResult| pass.plan.steps().filter(|step| viewer.sees(&step.instance)).count();
    let (holds, pauses) = pass
        .map(|pass| (pass.rules.holds.manual.as_slice(), pass.rules.holds.pauses.as_slice()))
        .unwrap_or_default();
    ControllerReport {
        version: 1,
        abide: env!("CARGO_PKG_VERSION").to_owned(),
        target: subject.target.clone(),
        owner: subject.owner.clone(),
        source: source(board, &status),
        pin: status.source.pin.clone().map(pin_details),
        follow: subject.follow,
        heal: subject.heal,
        prune: subject.prune,
        interval_secs: whole_seconds(subject.interval.as_secs_f64()),
        started: board.began.to_string(),
        role: role.to_owned(),
        leader,
        generation,
        looked_at: observed_at.map(|at| at.to_string()),
        look_age_secs: observed_at.map(|at| clock::now().secs_since(at)),
        looks: status.pass.observations,
        failed_looks: status.pass.failed_observations,
        pass_ms: status.pass.duration.map(|took| u64::try_from(took.as_millis()).unwrap_or(u64::MAX)),
        passing: status.pass.started.is_some(),
        queue: status.work.queue,
        under_way: status.work.in_flight,
        converged: converged(&status),
        trouble: status.trouble.clone(),
        to_do: pass.map(steps),
        instances: counts(viewer.rows(&status)),
        held: held.iter().take(MAX_LISTED).map(|held| held_row(held, viewer)).collect(),
        held_total: held.len(),
        backing_off: pass
            .map(|pass| {
                pass.backing_off
                    .iter()
                    .filter(|hold| viewer.sees(&hold.instance))
                    .map(HoldEntry::from)
                    .collect()
            })
            .unwrap_or_default(),
        holds: holds
            .iter()
            .filter(|hold| hold.by != "watch" && viewer.sees(&hold.instance))
            .map(HoldEntry::from)
            .collect(),
        pauses: pauses
            .iter()
            .filter(|pause| viewer.sees_pause(pause.namespace.as_ref()))
            .map(PauseEntry::from)
            .collect(),
        notes: pass
            .filter(|_| viewer.sees_everything())
            .map(|pass| pass.plan.notes.clone())
            .unwrap_or_default(),
        problems: problems(&status, viewer),
        notify: if viewer.sees_everything() { deliveries.list() } else { Vec::new() },
        redacted: viewer.view == View::Redacted,
        last_event: status.number,
        events: recent_events(board, &status, viewer),
    }
}

fn source(board: &StatusBoard, status: &ControllerStatus) -> SourceReport {
    SourceReport {
        paths: board.subject.sources.clone(),
        revision: status.source.revision.to_string(),
        commit: status.source.commit.clone(),
        not_followed: status.source.not_followed.clone(),
        files: status.source.files,
        incomplete: status.source.is_incomplete,
    }
}

fn pin_details(pin: Pin) -> PinDetails {
    PinDetails { revision: pin.revision.to_string(), by: pin.by, reason: pin.reason }
}

fn held_row(held: &HeldChange, viewer: &Viewer) -> HeldRow {
    let detail = viewer.detail(held.reason, &held.detail);
    HeldRow { instance: held.instance.clone(), reason: held.reason, detail }
}

fn problems(status: &ControllerStatus, viewer: &Viewer) -> Vec<ManifestProblem> {
    if !viewer.sees_everything() {
        return Vec::new();
    }
    let problems = status.source.problems.iter().map(ManifestProblem::from).collect();
    match viewer.view {
        View::Full => problems,
        View::Redacted => redact::problems(problems),
    }
}

fn recent_events(board: &StatusBoard, status: &ControllerStatus, viewer: &Viewer) -> Vec<EventEntry> {
    let recent = board.entries_after(status.number.saturating_sub(MAX_RECENT), usize::MAX);
    recent.notes.iter().filter_map(|entry| viewer.event(entry)).collect()
}

/// The last pass succeeded, no plan is in flight, and nothing is to do or held.
pub fn converged(status: &ControllerStatus) -> bool {
    status.trouble.is_none()
        && status.work.in_flight == 0
        && status.pass.last.as_ref().is_some_and(|pass| pass.plan.is_empty())
}

/// Instance counts per value of each axis, including zero counts.
fn counts<'a>(rows: impl Iterator<Item = &'a Row>) -> InstanceCounts {
    fn zeros<'a>(words: impl Iterator<Item = &'a str>) -> BTreeMap<String, usize> {
        words.map(|word| (word.to_owned(), 0)).collect()
    }
    let mut counts = InstanceCounts {
        total: 0,
        sync: zeros(SyncStatus::ALL.iter().map(|sync| sync.word())),
        health: zeros(Health::ALL.iter().map(|health| health.word())),
        hosting: zeros(Hosting::ALL.iter().map(|hosting| hosting.word())),
    };
    for row in rows {
        counts.total += 1;
        let words = [row.sync.word(), health_of(row).word(), hosting_of(row).word()];
        for (axis, word) in [&mut counts.sync, &mut counts.health, &mut counts.hosting].into_iter().zip(words)
        {
            if let Some(count) = axis.get_mut(word) {
                *count += 1;
            }
        }
    }
    counts
}

pub fn health_of(row: &Row) -> Health {
    match (&row.gap, &row.seen) {
        (Some(_), _) => Health::Unknown,
        (None, Some(seen)) => seen.health,
        (None, None) => Health::NotReported,
    }
}

pub fn hosting_of(row: &Row) -> Hosting {
    match (&row.gap, &row.seen) {
        (Some(_), _) => Hosting::Unknown,
        (None, None) => Hosting::NotHosted,
        (None, Some(seen)) => Hosting::from(seen.hosted),
    }
}

/// Process rows as in `get processes -o json`, with the hold reason.
pub fn processes(
    status: &ControllerStatus,
    details: &BTreeMap<InstanceKey, ReportedDetails>,
    viewer: &Viewer,
) -> Vec<ControllerProcess> {
    let process = |row: &Row| {
        let details = details.get(&row.key).filter(|_| row.gap.is_none()).cloned().unwrap_or_default();
        ControllerProcess { details: redact::details(details, viewer.view), ..process(row, viewer) }
    };
    viewer.rows(status).map(process).collect()
}

fn process(row: &Row, viewer: &Viewer) -> ControllerProcess {
    let nothing = ObservedInstance {
        registered: Some(false),
        hosted: Some(false),
        running: Some(false),
        ..ObservedInstance::default()
    };
    let seen = row.seen.as_ref().unwrap_or(&nothing);
    // Without a live agent the last report is not current.
    let fact = |fact: Option<bool>| fact.filter(|_| row.gap.is_none());
    let key = seen.specs.digest_key.as_ref().and_then(DigestKeyRef::known);
    let revision = |version: &KnownSpec| {
        let plain = match version {
            KnownSpec::Unknown => None,
            KnownSpec::Digests(revision) => Some(*revision),
            KnownSpec::Full(spec) => Some(*spec.revision()),
        }?;
        Some(key.map_or(plain, |key| key.keyed_revision(&plain)))
    };
    let there = row.seen.is_some();
    let held = row
        .held
        .as_ref()
        .map(|(reason, detail)| HeldDetail { reason: *reason, detail: viewer.detail(*reason, detail) });
    let declared = row.declared.clone();
    let row = ProcessRow {
        instance: row.key.clone(),
        namespace: row.key.namespace.clone(),
        name: row.key.name.clone(),
        host: row.key.host.clone(),
        labels: seen.labels.clone(),
        registered: seen.registered,
        hosted: fact(seen.hosted),
        running: fact(seen.running),
        pid: seen.process.pid.filter(|_| row.gap.is_none()),
        owner: seen.owner.as_deref().map(str::to_owned),
        revision: revision(&seen.specs.registered).filter(|_| there),
        live_revision: revision(&seen.specs.live).filter(|_| there),
        secret_key: key.map(|key| key.id().to_owned()),
        live_spec_unknown: seen.specs.is_live_assumed,
        sync: row.sync,
        health: health_of(row).word().to_owned(),
        hosting: hosting_of(row),
        since: seen.since.map(|time| time.to_string()),
        report_time: seen.report_time.map(|time| time.to_string()),
    };
    let (source, details) = (declared.clone(), ReportedDetails::default());
    ControllerProcess { row, held, declared, source, details }
}

/// The plan of the last pass.
pub fn plan<S>(dashboard: &Dashboard<S>, viewer: &Viewer) -> Result<Response, ErrorResponse> {
    let status = dashboard.board.status();
    let none = || error_response(StatusCode::SERVICE_UNAVAILABLE, "the target was not observed yet");
    let pass = status.pass.last.ok_or_else(none)?;
    Ok(json_response(StatusCode::OK, &viewer.plan((dashboard.plan)(&pass))))
}

/// Applied revisions, newest first.
pub async fn history<S: Store>(
    dashboard: &Dashboard<S>,
    parts: &Parts,
    caller: &RequestCaller,
    viewer: &Viewer,
) -> Result<Vec<HistoryEntry>, ErrorResponse> {
    let limit = match parameter(parts, "limit") {
        None => 100,
        Some(text) => text.parse().ok().filter(|limit| (1..=10_000).contains(limit)).ok_or_else(|| {
            error_response(StatusCode::BAD_REQUEST, "limit must be a number from 1 to 10000")
        })?,
    };
    let owner = dashboard.board.subject.owner.as_str();
    caller.authorize(&AccessRequest { state_owner: Some(owner), ..AccessRequest::default() })?;
    let state = dashboard.state.get();
    let newest = crate::engine::history::newest(&*state, owner, limit);
    match tokio::time::timeout(RESPONSE_TIMEOUT, newest).await {
        Ok(Ok(newest)) => Ok(viewer.history(newest)),
        Ok(Err(error)) => Err(error_response(StatusCode::SERVICE_UNAVAILABLE, &error.to_string())),
        Err(_) => Err(error_response(StatusCode::SERVICE_UNAVAILABLE, "the state store timed out")),
    }
}

/// Liveness: the control loop makes progress.
pub fn health(board: &StatusBoard) -> Response {
    match board.is_alive() {
        true => json_response(StatusCode::OK, &ServerHealth::ok()),
        false => {
            let status = "the control loop is stuck".to_owned();
            json_response(StatusCode::SERVICE_UNAVAILABLE, &ServerHealth { status })
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
        None => json_response(StatusCode::OK, &ServerHealth::ok()),
        Some(why) => {
            let status = format!("not ready: {why}");
            json_response(StatusCode::SERVICE_UNAVAILABLE, &ServerHealth { status })
        }
    }
}

/// Triggers a pass for a caller.
pub fn observe<S>(dashboard: &Dashboard<S>, parts: &Parts, caller: &RequestCaller) -> Response {
    trigger(dashboard, parts, caller, &format!("observation requested{}", by(caller)))
}

/// The person of a request, at the end of a sentence.
fn by(caller: &RequestCaller) -> String {
    caller.person().map(|person| format!(" by {}", person.name())).unwrap_or_default()
}

/// Triggers a pass.
pub fn trigger<S>(dashboard: &Dashboard<S>, parts: &Parts, caller: &RequestCaller, why: &str) -> Response {
    audit(parts, caller, why);
    dashboard.board.log_request(why.to_owned());
    dashboard.trigger.notify_one();
    json_response(StatusCode::ACCEPTED, &Accepted::Accepted(true))
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
    caller: &RequestCaller,
    bytes: &[u8],
) -> Result<Response, ErrorResponse> {
    let request = parse_pause_request(bytes)?;
    check_pause(caller, request.namespace.as_ref())?;
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
        // A person acts in the own name.
        by: match caller.person() {
            Some(person) => person.name().to_owned(),
            None => request.by.unwrap_or_else(|| "the listener".to_owned()),
        },
        reason: request.reason,
        until,
    };
    let value = serde_json::to_vec(&pause).unwrap_or_default();
    write(dashboard, Txn::put(keys::pause(pause.namespace.as_ref()), value)).await?;
    let reason = pause.reason.as_deref().map(|why| format!(": {why}")).unwrap_or_default();
    trigger(
        dashboard,
        parts,
        caller,
        &format!("paused {} by {}{reason}", pause_scope(pause.namespace.as_ref()), pause.by),
    );
    Ok(json_response(StatusCode::OK, &Paused { paused: PauseEntry::from(&pause) }))
}

pub async fn resume<S: Store>(
    dashboard: &Dashboard<S>,
    parts: &Parts,
    caller: &RequestCaller,
    bytes: &[u8],
) -> Result<Response, ErrorResponse> {
    let request = parse_pause_request(bytes)?;
    check_pause(caller, request.namespace.as_ref())?;
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
        return Ok(json_response(StatusCode::OK, &Resumed { resumed: None, message: Some(message) }));
    }
    trigger(
        dashboard,
        parts,
        caller,
        &format!("resumed {}{}", pause_scope(request.namespace.as_ref()), by(caller)),
    );
    let resumed = Some(ResumedScope { namespace: request.namespace });
    Ok(json_response(StatusCode::OK, &Resumed { resumed, message: None }))
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

/// Checks the namespace of a pause; a pause of everything needs every namespace.
fn check_pause(caller: &RequestCaller, namespace: Option<&Name>) -> Result<(), ErrorResponse> {
    let namespace = Some(namespace.map_or("*", Name::as_str));
    caller.authorize(&AccessRequest { namespace, ..AccessRequest::default() })
}

/// Logs a change with the caller and its address.
fn audit(parts: &Parts, caller: &RequestCaller, what: &str) {
    let who = caller.person().map_or("token", PersonCaller::code);
    let from = parts.extensions.get::<Peer>().map_or_else(String::new, |Peer(peer)| peer.to_string());
    // Quoted: text from callers must not be able to forge a log line.
    info!(target: "audit", ?who, ?what, %from, "change");
}
