//! What a request meets before it is a call: how many there are, size, time, form, credentials, rate. And what it leaves
//! behind: a count, and for every change a line that says who did what from where.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::Semaphore;
use tracing::info;

use super::auth::{Keepers, Said, credentials};
use super::calls::carry_out;
use super::routes::{Access, Call, Found, find};
use super::{Gateway, Refusal};
use crate::gse::answer::Envelope;
use crate::gse::channel::{Join, Up};
use crate::gse::codes::EnvelopeCode;
use crate::http::Peer;
use crate::store::Store;

/// What a request may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The largest body; 100,000 hosts fit into the usual one.
    pub body_bytes: usize,
    /// How long a body may take to arrive.
    pub body_time: Duration,
    /// Requests at once; more are turned away.
    pub at_once: usize,
    /// Requests a second of one app; more are told to slow down.
    pub rate: u32,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { body_bytes: 16 << 20, body_time: Duration::from_secs(30), at_once: 512, rate: 50_000 }
    }
}

pub(super) struct Shared<S> {
    pub(super) gateway: Arc<Gateway<S>>,
    pub(super) keepers: Arc<Keepers>,
    limits: Limits,
    room: Semaphore,
    /// In chunks.
    memory: Semaphore,
}

/// Memory of bodies is counted so.
const CHUNK: usize = 64 << 10;
/// What all bodies together may take.
const BODIES: usize = 256 << 20;

/// The whole API. Health answers anybody; everything else wants credentials.
pub fn router<S: Store>(gateway: Arc<Gateway<S>>, keepers: Arc<Keepers>, limits: Limits) -> Router {
    let room = Semaphore::new(limits.at_once);
    let memory = Semaphore::new(BODIES.max(limits.body_bytes) / CHUNK + 1);
    Router::new().fallback(serve::<S>).with_state(Arc::new(Shared { gateway, keepers, limits, room, memory }))
}

/// A request on its way: what its line will say.
pub(super) struct Asked {
    pub(super) call: Call,
    pub(super) changes: bool,
    who: String,
    /// The person on whose behalf an app calls, as it says.
    as_user: String,
    pub(super) what: String,
    /// Rows that did not do what was asked.
    pub(super) refused: usize,
}

impl Asked {
    fn of(call: Call) -> Asked {
        let (who, as_user, what) = (String::new(), String::new(), String::new());
        Asked { call, changes: call.changes(), who, as_user, what, refused: 0 }
    }
}

async fn serve<S: Store>(State(shared): State<Arc<Shared<S>>>, request: Request) -> Response {
    // A question for the head alone is answered like one for all of it; hyper leaves the body out.
    let is_head = request.method() == axum::http::Method::HEAD;
    let method = if is_head { "GET" } else { request.method().as_str() };
    let call = match find(method, request.uri().path()) {
        Found::Call(call) => call,
        Found::OtherMethod => {
            let message = "this path is there, but not for this method";
            return failed(StatusCode::METHOD_NOT_ALLOWED, EnvelopeCode::NO_SUCH_PATH, message);
        }
        Found::Nothing => {
            return failed(StatusCode::NOT_FOUND, EnvelopeCode::NO_SUCH_PATH, "there is no such path");
        }
    };
    if call.access() == Access::Anybody {
        return health(&shared.gateway, call);
    }
    if !call.changes() && call != Call::Tell {
        return serve_call(shared, call, request).await;
    }
    // What was begun comes to its end though its caller be gone: a task that is kept is on its way to its agent, too.
    tokio::spawn(serve_call(shared, call, request)).await.unwrap_or_else(|_| {
        let message = "it failed for a reason that is not yours";
        failed(StatusCode::INTERNAL_SERVER_ERROR, EnvelopeCode::NO_GSE, message)
    })
}

async fn serve_call<S: Store>(shared: Arc<Shared<S>>, call: Call, request: Request) -> Response {
    let begin = Instant::now();
    let (parts, body) = request.into_parts();
    let Ok(_room) = shared.room.try_acquire() else {
        shared.gateway.metrics.shed();
        let message = "too many requests at once: try again in a moment";
        let mut response =
            failed(StatusCode::SERVICE_UNAVAILABLE, EnvelopeCode::CONCURRENCY_LIMITED, message);
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        return response;
    };
    let mut asked = Asked { call, changes: call.changes(), ..Asked::of(call) };
    let (response, result) = match answer(&shared, &mut asked, &parts, body).await {
        Ok(response) if asked.refused > 0 => (response, format!("{} rows refused", asked.refused)),
        Ok(response) => (response, "ok".to_owned()),
        Err((response, result)) => (*response, result),
    };
    let counted = if result == "ok" { "ok" } else { "refused" };
    shared.gateway.metrics.request(call.word(), counted, begin.elapsed());
    if asked.changes {
        let from =
            parts.extensions.get::<Peer>().map_or_else(String::new, |Peer(peer)| SocketAddr::to_string(peer));
        let Asked { who, what, as_user, .. } = asked;
        // Quoted: what callers send must not be able to look like a line of its own.
        info!(target: "audit", ?who, ?as_user, call = call.word(), ?what, %from, ?result, "change");
    }
    response
}

type Refused = (Box<Response>, String);

async fn answer<S: Store>(
    shared: &Shared<S>,
    asked: &mut Asked,
    parts: &Parts,
    body: Body,
) -> Result<Response, Refused> {
    let call = asked.call;
    let refuse =
        |status, code, message: &str| (Box::new(refusal_of(call, status, code, message)), message.to_owned());
    let length =
        parts.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    let most = shared.limits.body_bytes;
    if length.is_some_and(|length: usize| length > most) {
        let message = format!("the body is larger than {most} bytes");
        return Err(refuse(StatusCode::PAYLOAD_TOO_LARGE, EnvelopeCode::TOO_LARGE, &message));
    }
    // Bodies that are on their way share a fixed amount of memory, whoever sends them.
    let chunks = u32::try_from(length.unwrap_or(most).div_ceil(CHUNK)).unwrap_or(u32::MAX);
    let Ok(_memory) = shared.memory.try_acquire_many(chunks) else {
        shared.gateway.metrics.shed();
        let message = "too many large requests at once: try again in a moment";
        return Err(refuse(StatusCode::SERVICE_UNAVAILABLE, EnvelopeCode::CONCURRENCY_LIMITED, message));
    };
    let bytes = match tokio::time::timeout(shared.limits.body_time, to_bytes(body, most)).await {
        Ok(Ok(bytes)) => bytes,
        Ok(Err(_)) => {
            let message = format!("the body is larger than {most} bytes, or broke off");
            return Err(refuse(StatusCode::PAYLOAD_TOO_LARGE, EnvelopeCode::TOO_LARGE, &message));
        }
        Err(_) => {
            let message = "the body took too long to arrive";
            return Err(refuse(StatusCode::REQUEST_TIMEOUT, EnvelopeCode::BAD_REQUEST, message));
        }
    };
    if asked.call.access() == Access::Agent {
        return agent(shared, asked, parts, &bytes).await;
    }
    let said: Said = read(&bytes).map_err(|refusal| refused(call, &refusal))?;
    let apps = shared.keepers.apps();
    let Some(app) = credentials(&parts.headers, &said).and_then(|(code, secret)| apps.known(&code, &secret))
    else {
        let message = "no app is known by these credentials";
        return Err(refuse(StatusCode::UNAUTHORIZED, EnvelopeCode::NOT_ALLOWED, message));
    };
    asked.who.clone_from(&app.code);
    asked.as_user = said.user().unwrap_or_default();
    if !shared.keepers.may_ask(&app.code, shared.limits.rate) {
        shared.gateway.metrics.shed();
        let message = format!("more than {} requests a second", shared.limits.rate);
        let (mut response, text) =
            refuse(StatusCode::TOO_MANY_REQUESTS, EnvelopeCode::RATE_LIMITED, &message);
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        return Err((response, text));
    }
    if asked.call.access() == Access::Everywhere && !app.may_touch_all() {
        let message = format!("app {:?} may not touch every namespace, which this call needs", app.code);
        return Err(refuse(StatusCode::OK, EnvelopeCode::NOT_ALLOWED, &message));
    }
    let carried = carry_out(shared, app, asked, parts, &bytes).await;
    if asked.changes {
        shared.gateway.wrote(!matches!(carried, Err(Refusal::Store(_))));
    }
    carried.map_err(|refusal| refused(call, &refusal))
}

fn health<S: Store>(gateway: &Gateway<S>, call: Call) -> Response {
    let wrong = match call == Call::Ready {
        true => gateway.not_ready(),
        false => None,
    };
    match wrong {
        Some(why) => json(StatusCode::SERVICE_UNAVAILABLE, &serde_json::json!({"status": why})),
        None => json(StatusCode::OK, &serde_json::json!({"status": "ok"})),
    }
}

/// The body as JSON, whatever its Content-Type says. An empty one is an empty object.
pub(super) fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Refusal> {
    let bytes = if bytes.iter().all(u8::is_ascii_whitespace) { b"{}" } else { bytes };
    let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
    serde_json::from_slice(bytes).map_err(|error| {
        if !error.is_data() {
            let (line, column) = (error.line(), error.column());
            return Refusal::Wrong(format!("the body is no JSON: line {line}, column {column}"));
        }
        if first != Some(&b'{') {
            return Refusal::Wrong("the body is no JSON object".to_owned());
        }
        Refusal::Wrong(in_words(&error))
    })
}

/// What is wrong with a field, and where. What was found there may be a secret: only what was expected is told.
fn in_words(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let text = text.split(" at line ").next().unwrap_or_default();
    let at = match error.line() {
        0 => String::new(),
        line => format!(" (line {line}, column {})", error.column()),
    };
    for said in ["missing field ", "duplicate field "] {
        if let Some(field) = text.strip_prefix(said) {
            let is = if said.starts_with("missing") { "is missing" } else { "is there twice" };
            return format!("{} {is}{at}", field.replace('`', ""));
        }
    }
    if let Some((field, _)) = text.strip_prefix("unknown field `").and_then(|rest| rest.split_once('`')) {
        return format!("there is no field {field:?}{at}");
    }
    let expected = text.rsplit_once("expected ").map(|(_, expected)| expected);
    let kind = match expected {
        Some(kind) if kind.starts_with("struct") || kind.starts_with("a map") || kind.contains("variant") => {
            "an object"
        }
        Some(kind) if kind.contains("sequence") => "a list",
        Some(kind) if kind.contains("string") || kind.contains("str") => "a text",
        Some("u64" | "i64" | "u32" | "usize" | "i32" | "u16") => "a whole number",
        Some("f64") => "a number",
        Some("a boolean") => "true or false",
        Some(_) | None => return format!("a field cannot be used as it is{at}"),
    };
    format!("a field has the wrong type: {kind} was expected{at}")
}

/// The agents' own calls: a token for all of their hosts.
async fn agent<S: Store>(
    shared: &Shared<S>,
    asked: &mut Asked,
    parts: &Parts,
    bytes: &Bytes,
) -> Result<Response, Refused> {
    let gateway = &shared.gateway;
    let token = parts.headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let token = token.and_then(|text| text.strip_prefix("Bearer ")).unwrap_or_default();
    let tokens = shared.keepers.tokens();
    let unknown = || {
        let message = "this token is not for these hosts";
        let response = failed(StatusCode::UNAUTHORIZED, EnvelopeCode::NOT_ALLOWED, message);
        (Box::new(response), message.to_owned())
    };
    let call = asked.call;
    let refuse = |refusal: Refusal| refused(call, &refusal);
    if !tokens.is_known(token) {
        return Err(unknown());
    }
    if asked.call == Call::Join {
        let join: Join = read(bytes).map_err(refuse)?;
        asked.who = format!("agent {}", join.agent);
        asked.what = format!("{} hosts", join.hosts.len());
        if !join.hosts.iter().all(|host| tokens.allow(token, host)) {
            return Err(unknown());
        }
        let joined = gateway.join(&join).await.map_err(refuse)?;
        return Ok(json(StatusCode::OK, &Envelope::ok(joined)));
    }
    let session = parameter(parts, "session").unwrap_or_default();
    let hosts = gateway.session_hosts(&session).map_err(refuse)?;
    if !hosts.iter().all(|host| tokens.allow(token, host)) {
        return Err(unknown());
    }
    if asked.call == Call::Stream {
        let after = number(parts, "after").map_err(refuse)?;
        let (keepers, token) = (Arc::clone(&shared.keepers), token.to_owned());
        let may = Arc::new(move || {
            let tokens = keepers.tokens();
            hosts.iter().all(|host| tokens.allow(&token, host))
        });
        return Ok(lines(gateway.stream(&session, after, may).await.map_err(refuse)?));
    }
    let told: Vec<Up> =
        serde_json::from_slice(bytes).map_err(|error| refuse(Refusal::Wrong(in_words(&error))))?;
    let clock = parameter(parts, "clock").and_then(|text| text.parse().ok());
    let acked = gateway.tell(&session, told, clock).await.map_err(refuse)?;
    Ok(json(StatusCode::OK, &Envelope::ok(acked)))
}

pub(super) fn parameter(parts: &Parts, name: &str) -> Option<String> {
    let pairs = parts.uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
    pairs.into_iter().find(|(known, _)| *known == name).map(|(_, value)| decoded(value))
}

/// `%41` is `A`.
fn decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let hex = after.get(..2).and_then(|pair| std::str::from_utf8(pair).ok());
        let byte = hex.filter(|_| *first == b'%').and_then(|pair| u8::from_str_radix(pair, 16).ok());
        bytes.push(byte.unwrap_or(if *first == b'+' { b' ' } else { *first }));
        rest = if byte.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

pub(super) fn number(parts: &Parts, name: &str) -> Result<u64, Refusal> {
    match parameter(parts, name) {
        None => Ok(0),
        Some(text) => text.parse().map_err(|_| Refusal::Wrong(format!("{name} is {text:?}: no number"))),
    }
}

fn refused(call: Call, refusal: &Refusal) -> Refused {
    let (status, code, message) = match refusal {
        Refusal::Wrong(message) => (StatusCode::OK, EnvelopeCode::BAD_REQUEST, message.clone()),
        Refusal::UnknownTask(message) => (StatusCode::OK, EnvelopeCode::UNKNOWN_TASK, message.clone()),
        Refusal::NotQueued => {
            (StatusCode::OK, EnvelopeCode::NOT_QUEUED, "not queued yet: ask again".to_owned())
        }
        Refusal::NotAllowed(message) => (StatusCode::OK, EnvelopeCode::NOT_ALLOWED, message.clone()),
        // Only our own calls end so, and our own clients read the status.
        Refusal::Taken(message) => (StatusCode::CONFLICT, EnvelopeCode::TAKEN, message.clone()),
        Refusal::Gone(message) => (StatusCode::GONE, EnvelopeCode::GONE, message.clone()),
        Refusal::Store(error) => (StatusCode::OK, EnvelopeCode::STORE_FAILED, error.to_string()),
    };
    (Box::new(refusal_of(call, status, code, &message)), message)
}

/// A failure in the words of whoever answers the call.
fn refusal_of(call: Call, status: StatusCode, code: EnvelopeCode, message: &str) -> Response {
    let envelope = Envelope::<Value>::failed(code, message);
    json(status, &if call.is_job() { envelope.as_job() } else { envelope })
}

fn failed(status: StatusCode, code: EnvelopeCode, message: &str) -> Response {
    json(status, &Envelope::<Value>::failed(code, message))
}

pub(super) fn json(status: StatusCode, value: &impl serde::Serialize) -> Response {
    let mut response = Response::new(Body::from(serde_json::to_vec(value).unwrap_or_default()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// A stream of lines.
pub(super) fn lines(body: Body) -> Response {
    let mut response = Response::new(body);
    let kind = HeaderValue::from_static("application/x-ndjson");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_that_is_not_queued_yet_is_1000115() {
        let (response, _) = refused(Call::Sync, &Refusal::NotQueued);
        assert_eq!(response.status(), StatusCode::OK);
        let body = to_bytes(response.into_body(), 1000).await.expect("a body");
        let envelope: Value = serde_json::from_slice(&body).expect("an envelope");
        assert_eq!((&envelope["code"], &envelope["result"]), (&1_000_115.into(), &false.into()));
    }
}
