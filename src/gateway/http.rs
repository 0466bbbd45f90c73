//! What a request meets before it is a call: credentials, permits, size, time, form, rate. And what it leaves behind: a
//! count, and for every change a line that says who did what from where.
//!
//! Credentials in a header are checked before a byte of the body is read. A body with credentials in it (ESB's form) is
//! read in the pool of unknown callers, whose permits and memory are apart from those of known callers and of agents.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use serde_json::Value;
use tracing::info;

use super::auth::{App, Identity, Keepers, Said, bearer, body_credentials, identify};
use super::calls::carry_out;
use super::form::{in_words, number, parameter, read};
use super::routes::{Access, Call, Found, find};
use super::{Gateway, Refusal};
use crate::gse::answer::Envelope;
use crate::gse::channel::{Join, Up};
use crate::gse::codes::EnvelopeCode;
use crate::http::{
    Admitted, BodyError, Budget, Connection, Peer, Resource, UnknownCallers, Verdict, read_body, readmit,
    until_revoked,
};
use crate::store::Store;

/// What a request may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The largest body; 100,000 hosts fit into the usual one.
    pub body_bytes: usize,
    /// How long a body may take to arrive.
    pub body_time: Duration,
    /// Requests at once of known callers, and as many of agents; more are refused.
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
    known: Budget,
    agents: Budget,
    unknown: UnknownCallers,
}

/// The memory of all bodies that are being read or carried out: of known callers, of agents, of unknown callers. The
/// largest body always fits.
const KNOWN_BYTES: usize = 128 << 20;
const AGENT_BYTES: usize = 64 << 20;
const UNKNOWN_BYTES: usize = 64 << 20;

/// The whole API. Health answers anybody; everything else wants credentials.
pub fn router<S: Store>(gateway: Arc<Gateway<S>>, keepers: Arc<Keepers>, limits: Limits) -> Router {
    let Limits { body_bytes, at_once, .. } = limits;
    let shared = Shared {
        gateway,
        keepers,
        limits,
        known: Budget::new(Resource::KnownCallers, at_once, KNOWN_BYTES.max(body_bytes)),
        agents: Budget::new(Resource::Agents, at_once, AGENT_BYTES.max(body_bytes)),
        // A peer may have half of it.
        unknown: UnknownCallers::new(at_once, UNKNOWN_BYTES.max(2 * body_bytes)),
    };
    Router::new().fallback(serve::<S>).with_state(Arc::new(shared))
}

/// A request on its way: what its line will say.
pub(super) struct Asked {
    pub(super) call: Call,
    pub(super) changes: bool,
    who: String,
    /// The person on whose behalf an app calls, as it says.
    as_user: String,
    pub(super) what: String,
    /// The request showed valid credentials.
    proved: bool,
    /// Rows that did not do what was asked.
    pub(super) refused: usize,
}

impl Asked {
    fn of(call: Call) -> Asked {
        let (who, as_user, what) = (String::new(), String::new(), String::new());
        Asked { call, changes: call.changes(), who, as_user, what, proved: false, refused: 0 }
    }
}

async fn serve<S: Store>(State(shared): State<Arc<Shared<S>>>, request: Request) -> Response {
    // A question for the head alone is answered like one for all of it; hyper leaves the body out.
    let is_head = request.method() == axum::http::Method::HEAD;
    let method = if is_head { "GET" } else { request.method().as_str() };
    let found = find(method, request.uri().path());
    if let (Found::OtherMethod | Found::Nothing, Some(connection)) =
        (&found, Connection::of(request.extensions()))
    {
        connection.demote();
    }
    let call = match found {
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
        return health(&shared.gateway, call, Connection::of(request.extensions()));
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
    let mut asked = Asked::of(call);
    let (response, result) = match answer(&shared, &mut asked, &parts, body).await {
        Ok(response) if asked.refused > 0 => (response, format!("{} rows refused", asked.refused)),
        Ok(response) => (response, "ok".to_owned()),
        Err((response, result)) => (*response, result),
    };
    if let Some(connection) = Connection::of(&parts.extensions).filter(|_| !asked.proved) {
        connection.demote();
    }
    let counted = if result == "ok" { "ok" } else { "refused" };
    shared.gateway.metrics.request(call.word(), counted, begin.elapsed());
    // Unknown callers change nothing, and must not be able to fill the log.
    if asked.changes && !asked.who.is_empty() {
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
    within_size(shared.limits.body_bytes, call, parts)?;
    let connection = Connection::of(&parts.extensions);
    let (apps, tokens) = (shared.keepers.apps(), shared.keepers.tokens());
    let identity = identify(&apps, &tokens, call, parts);
    let token = bearer(&parts.headers).unwrap_or_default();
    let in_force = match &identity {
        Identity::App(app) => Some(shared.keepers.app_in_force(app)),
        Identity::Agent => Some(shared.keepers.token_in_force(&tokens, token)),
        Identity::Unknown | Identity::Missing | Identity::Wrong(_) | Identity::Unchecked => None,
    };
    if let Some(in_force) = in_force {
        asked.proved = true;
        connection.inspect(|connection| connection.authenticated(in_force));
    }
    let mut admitted = admit(shared, call, &identity, parts).await?;
    let read_in = shared.limits.body_time;
    let bytes = read_body(body, shared.limits.body_bytes, read_in, &mut admitted).await;
    let bytes = bytes.map_err(|error| unread(shared, call, connection, error))?;
    if matches!(identity, Identity::Agent) {
        asked.who = "agent".to_owned();
        return agent(shared, asked, parts, &bytes).await;
    }
    let said: Said = read(&bytes).map_err(|refusal| refused(call, &refusal))?;
    let app = match identity {
        Identity::App(app) => app,
        Identity::Unknown
        | Identity::Agent
        | Identity::Missing
        | Identity::Wrong(_)
        | Identity::Unchecked => {
            let Some((code, secret)) = body_credentials(&said) else {
                return Err(not_known(call, NO_APP));
            };
            if !connection.is_none_or(Connection::may_try) {
                return Err(too_many_guesses(call));
            }
            let Some(app) = apps.known(&code, &secret) else {
                // Neither a permit nor memory is held while the answer waits.
                drop((admitted, bytes));
                return Err(wrong_credentials(call, connection, &code).await);
            };
            asked.proved = true;
            connection.inspect(|connection| connection.authenticated(shared.keepers.app_in_force(app)));
            app
        }
    };
    asked.who.clone_from(&app.code);
    asked.as_user = said.user().unwrap_or_default();
    let _admitted = match admitted.is_unknown() {
        true => readmit(&shared.known, &bytes)
            .map_err(|resource| overloaded(shared, call, connection, resource))?,
        false => admitted,
    };
    within_limits(shared, call, app)?;
    let carried = carry_out(shared, app, asked, parts, &bytes).await;
    if asked.changes {
        shared.gateway.wrote(!matches!(carried, Err(Refusal::Store(_))));
    }
    carried.map_err(|refusal| refused(call, &refusal))
}

fn within_size(most: usize, call: Call, parts: &Parts) -> Result<(), Refused> {
    let length =
        parts.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    match length.is_some_and(|length: usize| length > most) {
        true => {
            let message = format!("the body is larger than {most} bytes");
            Err(refuse(call, StatusCode::PAYLOAD_TOO_LARGE, EnvelopeCode::TOO_LARGE, &message))
        }
        false => Ok(()),
    }
}

/// A permit of the class that the header's credentials are of.
async fn admit<'a, S: Store>(
    shared: &'a Shared<S>,
    call: Call,
    identity: &Identity<'_>,
    parts: &Parts,
) -> Result<Admitted<'a>, Refused> {
    let connection = Connection::of(&parts.extensions);
    let budget = match identity {
        Identity::App(_) => &shared.known,
        Identity::Agent => &shared.agents,
        // Also on a known connection: an earlier request's proof is not this one's.
        Identity::Unknown => return Ok(shared.unknown.admit(peer_of(parts))),
        Identity::Missing => return Err(not_known(call, NOT_FOR_HOSTS)),
        Identity::Wrong(who) => return Err(wrong_credentials(call, connection, who).await),
        Identity::Unchecked => return Err(too_many_guesses(call)),
    };
    budget.admit().map_err(|resource| overloaded(shared, call, connection, resource))
}

/// The app's rate, and whether it may make this call at all.
fn within_limits<S: Store>(shared: &Shared<S>, call: Call, app: &App) -> Result<(), Refused> {
    if !shared.keepers.may_ask(&app.code, shared.limits.rate) {
        shared.gateway.metrics.shed();
        let message = format!("more than {} requests a second", shared.limits.rate);
        return Err(busy(call, StatusCode::TOO_MANY_REQUESTS, EnvelopeCode::RATE_LIMITED, &message));
    }
    if call.access() == Access::Everywhere && !app.may_touch_all() {
        let message = format!("app {:?} may not touch every namespace, which this call needs", app.code);
        return Err(refuse(call, StatusCode::OK, EnvelopeCode::NOT_ALLOWED, &message));
    }
    Ok(())
}

const NO_APP: &str = "no app is known by these credentials";
const NOT_FOR_HOSTS: &str = "this token is not for these hosts";

fn peer_of(parts: &Parts) -> std::net::IpAddr {
    // Every request of a listener has a peer; without one it shares the limits of loopback.
    let loopback = std::net::IpAddr::from([127, 0, 0, 1]);
    parts.extensions.get::<Peer>().map_or(loopback, |Peer(peer)| peer.ip())
}

fn refuse(call: Call, status: StatusCode, code: EnvelopeCode, message: &str) -> Refused {
    (Box::new(refusal_of(call, status, code, message)), message.to_owned())
}

fn not_known(call: Call, message: &str) -> Refused {
    refuse(call, StatusCode::UNAUTHORIZED, EnvelopeCode::NOT_ALLOWED, message)
}

/// Wrong credentials are logged, and answered later the more of them a peer sends.
async fn wrong_credentials(call: Call, connection: Option<&Connection>, who: &str) -> Refused {
    let verdict = match connection {
        Some(connection) => connection.login_failed(who).await,
        None => Verdict::Refuse,
    };
    match (verdict, call.access()) {
        (Verdict::Refuse, Access::Agent) => not_known(call, NOT_FOR_HOSTS),
        (Verdict::Refuse, Access::Anybody | Access::App | Access::Everywhere) => not_known(call, NO_APP),
        (Verdict::TooMany, _) => too_many_guesses(call),
    }
}

fn too_many_guesses(call: Call) -> Refused {
    let message = "too many requests with wrong credentials from this address";
    busy(call, StatusCode::TOO_MANY_REQUESTS, EnvelopeCode::RATE_LIMITED, message)
}

/// A refusal after which the caller may try again.
fn busy(call: Call, status: StatusCode, code: EnvelopeCode, message: &str) -> Refused {
    let (mut response, message) = refuse(call, status, code, message);
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    (response, message)
}

/// A known caller is refused: that shows in readiness.
fn overloaded<S: Store>(
    shared: &Shared<S>,
    call: Call,
    connection: Option<&Connection>,
    resource: Resource,
) -> Refused {
    shared.gateway.metrics.shed();
    if let Some(connection) = connection {
        connection.refused(resource);
    }
    let message = match resource {
        Resource::BodyMemory => "too many large requests at once: try again in a moment",
        Resource::Connections | Resource::KnownCallers | Resource::Agents => {
            "too many requests at once: try again in a moment"
        }
    };
    busy(call, StatusCode::SERVICE_UNAVAILABLE, EnvelopeCode::CONCURRENCY_LIMITED, message)
}

/// The answer to a body that was not read.
fn unread<S: Store>(
    shared: &Shared<S>,
    call: Call,
    connection: Option<&Connection>,
    error: BodyError,
) -> Refused {
    let most = shared.limits.body_bytes;
    match error {
        BodyError::TooLarge | BodyError::Broken => {
            let message = format!("the body is larger than {most} bytes, or broke off");
            refuse(call, StatusCode::PAYLOAD_TOO_LARGE, EnvelopeCode::TOO_LARGE, &message)
        }
        BodyError::TooSlow => {
            let message = "the body took too long to arrive";
            refuse(call, StatusCode::REQUEST_TIMEOUT, EnvelopeCode::BAD_REQUEST, message)
        }
        BodyError::NoMemory => overloaded(shared, call, connection, Resource::BodyMemory),
        BodyError::Evicted => {
            shared.gateway.metrics.shed();
            let message =
                "too many requests of unknown callers at once: send credentials in a header, or try again";
            busy(call, StatusCode::SERVICE_UNAVAILABLE, EnvelopeCode::CONCURRENCY_LIMITED, message)
        }
    }
}

fn health<S: Store>(gateway: &Gateway<S>, call: Call, connection: Option<&Connection>) -> Response {
    let exhausted = || connection.and_then(Connection::exhausted).map(Resource::reason);
    let wrong = match call == Call::Ready {
        true => {
            gateway.not_ready().map(str::to_owned).or_else(|| Some(format!("not ready: {}", exhausted()?)))
        }
        false => None,
    };
    match wrong {
        Some(why) => json(StatusCode::SERVICE_UNAVAILABLE, &serde_json::json!({"status": why})),
        None => json(StatusCode::OK, &serde_json::json!({"status": "ok"})),
    }
}

/// The agents' own calls: a token for all of their hosts.
async fn agent<S: Store>(
    shared: &Shared<S>,
    asked: &mut Asked,
    parts: &Parts,
    bytes: &Bytes,
) -> Result<Response, Refused> {
    let gateway = &shared.gateway;
    let token = bearer(&parts.headers).unwrap_or_default();
    let tokens = shared.keepers.tokens();
    let call = asked.call;
    let unknown = || not_known(call, NOT_FOR_HOSTS);
    let refuse = |refusal: Refusal| refused(call, &refusal);
    // It may have been taken out while the body came.
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
        let (keepers, owned) = (Arc::clone(&shared.keepers), token.to_owned());
        let hosts_of_stream = hosts.clone();
        let may = Arc::new(move || {
            let tokens = keepers.tokens();
            hosts.iter().all(|host| tokens.allow(&owned, host))
        });
        let revoked = shared.keepers.token_revoked(token, hosts_of_stream);
        let body = gateway.stream(&session, after, may).await.map_err(refuse)?;
        return Ok(lines(until_revoked(body, revoked, "")));
    }
    let told: Vec<Up> =
        serde_json::from_slice(bytes).map_err(|error| refuse(Refusal::Wrong(in_words(&error))))?;
    let clock = parameter(parts, "clock").and_then(|text| text.parse().ok());
    let acked = gateway.tell(&session, told, clock).await.map_err(refuse)?;
    Ok(json(StatusCode::OK, &Envelope::ok(acked)))
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
    refuse(call, status, code, &message)
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
    use axum::body::to_bytes;

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
