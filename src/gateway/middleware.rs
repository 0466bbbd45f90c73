//! Request middleware: credentials, permits, body limits and rate before a call; metrics and the audit log after it.
//!
//! Credentials in a header are checked before any byte of the body is read. A body that carries credentials (ESB
//! style) is read in the pool of unknown callers, whose permits and memory are separate from those of known callers
//! and agents.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use tracing::info;

use super::agent_calls::agent;
use super::audit::{AnswerCodes, RequestLog};
use super::auth::{Authenticator, CallerIdentity, Credentials, body_credentials, identify};
use super::decode::{parse_body, with_query};
use super::fleet::{self, AgentGuard, FleetMembership, FleetTrust, TOKEN_HOST_MISMATCH, WRONG_JOIN_TOKEN};
use super::handlers::handle;
use super::namespace_limits::{NamespaceGate, NamespaceShares};
use super::reply::{ErrorReply, api_error_reply, busy, envelope_response, error_reply, json, unauthorized};
use super::routes::{ApiCall, RouteMatch, RouteRule, RouteScope, find};
use super::{ApiError, Gateway};
use crate::access::apps::{App, AppLogin, LoginError};
use crate::clock;
use crate::contract::ServerHealth;
use crate::gse::codes::EnvelopeCode;
use crate::http::{
    AdmittedRequest, BodyError, Budget, Connection, CredentialCheck, CredentialKey, CredentialLimits,
    LimitedResource, LoginFailureAction, Peer, ShareExceeded, UnknownCallers, admit_limited, read_body,
    readmit,
};
use crate::store::Store;

/// Limits of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum bytes of a body; the default fits 100,000 hosts.
    pub body_bytes: usize,
    /// Timeout of reading a body.
    pub body_time: Duration,
    /// Maximum concurrent requests of known callers, and as many of agents.
    pub at_once: usize,
    /// Maximum requests per second of one app; further ones get 429.
    pub rate: u32,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { body_bytes: 16 << 20, body_time: Duration::from_secs(30), at_once: 512, rate: 50_000 }
    }
}

pub(super) struct MiddlewareState<S> {
    pub(super) gateway: Arc<Gateway<S>>,
    pub(super) authenticator: Arc<Authenticator>,
    pub(super) fleet: Arc<FleetMembership<S>>,
    pub(super) limits: Limits,
    known: Budget,
    pub(super) agents: Budget,
    unknown: UnknownCallers,
    namespaces: NamespaceShares,
}

/// Memory of all request bodies in flight, for each of known callers, agents and unknown callers. At least two bodies of
/// maximum size: one credential, or one peer, gets half of it.
const KNOWN_BYTES: usize = 128 << 20;
const AGENT_BYTES: usize = 64 << 20;
const UNKNOWN_BYTES: usize = 64 << 20;

/// Router of the whole API, for agents with static tokens. All routes except health need credentials.
pub fn router<S: Store>(
    gateway: Arc<Gateway<S>>,
    authenticator: Arc<Authenticator>,
    limits: Limits,
) -> Router {
    let fleet = Arc::new(FleetMembership::new(gateway.store(), FleetTrust::Disabled));
    router_with_fleet(gateway, authenticator, fleet, limits)
}

/// The same, for agents with certificates. The pins of the fleet must be loaded.
pub fn router_with_fleet<S: Store>(
    gateway: Arc<Gateway<S>>,
    authenticator: Arc<Authenticator>,
    fleet: Arc<FleetMembership<S>>,
    limits: Limits,
) -> Router {
    let Limits { body_bytes, at_once, .. } = limits;
    let shared = MiddlewareState {
        gateway,
        authenticator,
        fleet,
        limits,
        known: Budget::new(LimitedResource::KnownCallers, at_once, KNOWN_BYTES.max(2 * body_bytes)),
        agents: Budget::new(LimitedResource::Agents, at_once, AGENT_BYTES.max(2 * body_bytes)),
        unknown: UnknownCallers::new(at_once, UNKNOWN_BYTES.max(2 * body_bytes)),
        namespaces: NamespaceShares::default(),
    };
    Router::new().fallback(serve::<S>).with_state(Arc::new(shared))
}

async fn serve<S: Store>(State(shared): State<Arc<MiddlewareState<S>>>, request: Request) -> Response {
    // HEAD is answered like GET; hyper omits the body.
    let is_head = request.method() == axum::http::Method::HEAD;
    let method = if is_head { "GET" } else { request.method().as_str() };
    let found = find(method, request.uri().path());
    if let (RouteMatch::OtherMethod | RouteMatch::Nothing, Some(connection)) =
        (&found, Connection::of(request.extensions()))
    {
        connection.demote();
    }
    let call = match found {
        RouteMatch::Call(call) => call,
        RouteMatch::OtherMethod => {
            let message = "method not allowed";
            return envelope_response(StatusCode::METHOD_NOT_ALLOWED, EnvelopeCode::NO_SUCH_PATH, message);
        }
        RouteMatch::Nothing => {
            return envelope_response(StatusCode::NOT_FOUND, EnvelopeCode::NO_SUCH_PATH, "path not found");
        }
    };
    if call.rule() == RouteRule::Public {
        return health(&shared.gateway, call, Connection::of(request.extensions()));
    }
    if !call.changes() && call != ApiCall::AgentMessages {
        return serve_call(shared, call, request).await;
    }
    // Changes run in a task of their own, so that they complete even if the caller disconnects: a stored task must be
    // dispatched.
    tokio::spawn(serve_call(shared, call, request)).await.unwrap_or_else(|_| {
        let message = "internal error; see the gateway log";
        envelope_response(StatusCode::INTERNAL_SERVER_ERROR, EnvelopeCode::NO_GSE, message)
    })
}

async fn serve_call<S: Store>(shared: Arc<MiddlewareState<S>>, call: ApiCall, request: Request) -> Response {
    let begin = Instant::now();
    let (parts, body) = request.into_parts();
    let mut log = RequestLog::of(call);
    let (response, result) = match respond(&shared, &mut log, &parts, body).await {
        Ok(response) if log.refused.count > 0 => (response, format!("{} rows refused", log.refused.count)),
        Ok(response) => (response, "ok".to_owned()),
        Err((response, result)) => (*response, result),
    };
    if let Some(connection) = Connection::of(&parts.extensions).filter(|_| !log.proved) {
        connection.demote();
    }
    let counted = if result == "ok" { "ok" } else { "refused" };
    shared.gateway.metrics.request(call.word(), counted, begin.elapsed());
    // Unauthenticated callers change nothing, and must not be able to fill the log.
    if log.changes && !log.who.is_empty() {
        log.read_user(&parts.headers);
        let from =
            parts.extensions.get::<Peer>().map_or_else(String::new, |Peer(peer)| SocketAddr::to_string(peer));
        let (what, RequestLog { who, as_user, .. }) = (log.summary(), &log);
        // Quoted: text from callers must not be able to forge a log line.
        info!(target: "audit", ?who, ?as_user, call = call.word(), ?what, %from, ?result, "change");
    }
    if let Some(audit) = shared.gateway.audit() {
        let answer = AnswerCodes::of(&response);
        if !log.is_without_entry(audit, &parts, answer) {
            log.write(audit, &parts, answer, &result).await;
        }
    }
    response
}

async fn respond<S: Store>(
    shared: &MiddlewareState<S>,
    log: &mut RequestLog,
    parts: &Parts,
    body: Body,
) -> Result<Response, ErrorReply> {
    let call = log.call;
    check_size(shared.limits.body_bytes, call, parts)?;
    if call.rule() == RouteRule::JoinToken {
        return fleet::enroll(shared, log, parts, body).await;
    }
    let connection = Connection::of(&parts.extensions);
    let apps = shared.authenticator.apps();
    let is_agent_call = call.rule() == RouteRule::Agent;
    let guard =
        is_agent_call.then(|| AgentGuard::of(&shared.authenticator, shared.fleet.pins(), parts)).flatten();
    let identity = identify(&shared.authenticator, &apps, guard.as_ref(), call, parts);
    let proof = match &identity {
        CallerIdentity::App(login) => {
            log.set_caller(login.app);
            Some((login.app.credential_key(), shared.authenticator.app_credential_check(login)))
        }
        CallerIdentity::Agent(guard) => Some((guard.credential_key(), guard.credential_check())),
        CallerIdentity::Unknown | CallerIdentity::Missing => None,
        CallerIdentity::Wrong(claimed, _) => {
            log.claimed.clone_from(claimed);
            None
        }
    };
    let mut key = None;
    if let Some((credential, in_force)) = proof {
        count_connection(call, connection, credential, in_force)?;
        log.proved = true;
        key = Some(credential);
    }
    let mut admitted = admit(shared, call, (&identity, key), parts).await?;
    let read_in = shared.limits.body_time;
    let bytes = read_body(body, shared.limits.body_bytes, read_in, &mut admitted).await;
    let bytes = bytes.map_err(|error| match (error, identity.app()) {
        (BodyError::Exhausted(resource), Some(app)) => app_overloaded(shared, parts, call, app, resource),
        (error, _) => body_error_reply(shared, call, connection, error),
    })?;
    if let CallerIdentity::Agent(guard) = identity {
        (log.who, log.kind) = ("agent".to_owned(), "agent");
        return agent(shared, guard, log, parts, &bytes).await;
    }
    let bytes = with_query(call, parts, bytes).map_err(|refusal| api_error_reply(call, &refusal))?;
    let credentials: Credentials = parse_body(&bytes).map_err(|refusal| api_error_reply(call, &refusal))?;
    let login = match identity {
        CallerIdentity::App(login) => login,
        CallerIdentity::Unknown
        | CallerIdentity::Agent(_)
        | CallerIdentity::Missing
        | CallerIdentity::Wrong(..) => {
            let Some((code, secret)) = body_credentials(&credentials) else {
                return Err(unauthorized(call, UNKNOWN_APP));
            };
            log.claimed.clone_from(&code);
            let login = match apps.authenticate(&code, &secret, clock::now()) {
                Ok(login) => login,
                Err(error) => {
                    // A delayed response holds neither a permit nor memory.
                    drop((admitted, bytes));
                    return Err(wrong_credentials(call, connection, &code, &error).await);
                }
            };
            let in_force = shared.authenticator.app_credential_check(&login);
            count_connection(call, connection, login.app.credential_key(), in_force)?;
            log.proved = true;
            login
        }
    };
    // A person acts for no other user.
    log.as_user = credentials.user().filter(|_| !login.app.is_person()).unwrap_or_default();
    log.namespaces = NamespaceGate::new(apps.namespace_limits(), &shared.namespaces, bytes.len());
    respond_to_app(shared, &login, log, parts, (admitted, bytes)).await
}

/// Responds to an app or a person whose credentials and body were read.
async fn respond_to_app<S: Store>(
    shared: &MiddlewareState<S>,
    login: &AppLogin<'_>,
    log: &mut RequestLog,
    parts: &Parts,
    (admitted, bytes): (AdmittedRequest<'_>, Bytes),
) -> Result<Response, ErrorReply> {
    let (call, app) = (log.call, login.app);
    log.set_caller(app);
    // A read without an entry has no use for these.
    if call.changes() || call == ApiCall::State {
        log.read_purpose(&parts.headers);
    }
    let _admitted = match admitted.is_unknown() {
        true => readmit(&shared.known, (app.credential_key(), app.limits().in_flight), &bytes)
            .map_err(|resource| app_overloaded(shared, parts, call, app, resource))?,
        false => admitted,
    };
    check_limits(shared, call, login)?;
    let result = handle(shared, login, log, parts, &bytes).await;
    if log.changes {
        shared.gateway.record_write_result(!matches!(result, Err(ApiError::Store(_))));
    }
    result.map_err(|refusal| api_error_reply(call, &refusal))
}

/// Counts the connection for its credential. A credential with its full share of connections gets 503.
fn count_connection(
    call: ApiCall,
    connection: Option<&Connection>,
    credential: CredentialKey,
    in_force: CredentialCheck,
) -> Result<(), ErrorReply> {
    let Some(connection) = connection else { return Ok(()) };
    connection.authenticated(credential, in_force).map_err(|ShareExceeded| {
        let message = "too many connections with these credentials: try again";
        let code = EnvelopeCode::CONCURRENCY_LIMITED;
        let (mut response, message) = busy(call, StatusCode::SERVICE_UNAVAILABLE, code, message);
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        (response, message)
    })
}

fn check_size(most: usize, call: ApiCall, parts: &Parts) -> Result<(), ErrorReply> {
    let length =
        parts.headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    match length.is_some_and(|length: usize| length > most) {
        true => {
            let message = format!("the body is larger than {most} bytes");
            Err(error_reply(call, StatusCode::PAYLOAD_TOO_LARGE, EnvelopeCode::TOO_LARGE, &message))
        }
        false => Ok(()),
    }
}

/// Acquires a permit from the budget of the caller's class.
async fn admit<'a, S: Store>(
    shared: &'a MiddlewareState<S>,
    call: ApiCall,
    (identity, credential): (&CallerIdentity<'_>, Option<CredentialKey>),
    parts: &Parts,
) -> Result<AdmittedRequest<'a>, ErrorReply> {
    let connection = Connection::of(&parts.extensions);
    let budget = match identity {
        CallerIdentity::App(_) => &shared.known,
        CallerIdentity::Agent(_) => &shared.agents,
        // Even on an authenticated connection: credentials of an earlier request do not count for this one.
        CallerIdentity::Unknown => return Ok(shared.unknown.admit(peer_of(parts))),
        CallerIdentity::Missing => return Err(unauthorized(call, TOKEN_HOST_MISMATCH)),
        CallerIdentity::Wrong(who, error) => {
            return Err(wrong_credentials(call, connection, who, error).await);
        }
    };
    let limits = identity.app().map_or_else(CredentialLimits::default, |app| app.limits().in_flight);
    admit_limited(budget, credential, limits).map_err(|resource| match identity.app() {
        Some(app) => app_overloaded(shared, parts, call, app, resource),
        None => overloaded(shared, call, connection, resource),
    })
}

/// Checks the app's rate, and the role that the route requires, with the whole grant where the route concerns everything.
fn check_limits<S: Store>(
    shared: &MiddlewareState<S>,
    call: ApiCall,
    login: &AppLogin<'_>,
) -> Result<(), ErrorReply> {
    if !shared.authenticator.within_rate(&login.app.code, shared.limits.rate) {
        shared.gateway.metrics.count_shed();
        let message = format!("rate limit exceeded: at most {} per second", shared.limits.rate);
        return Err(busy(call, StatusCode::TOO_MANY_REQUESTS, EnvelopeCode::RATE_LIMITED, &message));
    }
    match call.rule() {
        RouteRule::App(role, scope) => {
            let grant = login.app.grant();
            let checked = grant.check_role(role).and_then(|()| match scope {
                RouteScope::Everything => grant.check_everything(),
                RouteScope::Nothing | RouteScope::Named | RouteScope::Operations => Ok(()),
                RouteScope::Listed | RouteScope::Keys => Ok(()),
            });
            checked.map_err(|missing| api_error_reply(call, &ApiError::from(missing)))?;
            // Operations and writes of the state store are checked when the request is read.
            match call.changes() && scope != RouteScope::Operations {
                true => shared.gateway.check_audited().map_err(|refusal| api_error_reply(call, &refusal)),
                false => Ok(()),
            }
        }
        // The credentials of an app are not those of an agent.
        RouteRule::Public | RouteRule::Agent | RouteRule::JoinToken => Err(unauthorized(call, UNKNOWN_APP)),
    }
}

const UNKNOWN_APP: &str = "no app is known by these credentials";

pub(super) fn peer_of(parts: &Parts) -> std::net::IpAddr {
    // Every request of a listener has a peer; a request without one shares the limits of loopback.
    let loopback = std::net::IpAddr::from([127, 0, 0, 1]);
    parts.extensions.get::<Peer>().map_or(loopback, |Peer(peer)| peer.ip())
}

/// Logs wrong credentials, and delays the response by the peer's failures.
pub(super) async fn wrong_credentials(
    call: ApiCall,
    connection: Option<&Connection>,
    who: &str,
    error: &LoginError,
) -> ErrorReply {
    let verdict = match connection {
        Some(connection) => connection.login_failed(who).await,
        None => LoginFailureAction::Refuse,
    };
    match (verdict, call.rule()) {
        (LoginFailureAction::Refuse, RouteRule::Agent) => unauthorized(call, TOKEN_HOST_MISMATCH),
        (LoginFailureAction::Refuse, RouteRule::JoinToken) => unauthorized(call, WRONG_JOIN_TOKEN),
        (LoginFailureAction::Refuse, RouteRule::Public | RouteRule::App(..)) => {
            unauthorized(call, &error.to_string())
        }
        (LoginFailureAction::TooMany, _) => too_many_failed_logins(call),
    }
}

fn too_many_failed_logins(call: ApiCall) -> ErrorReply {
    let message = "too many requests with wrong credentials from this address";
    let (mut response, message) =
        busy(call, StatusCode::TOO_MANY_REQUESTS, EnvelopeCode::RATE_LIMITED, message);
    // An immediate answer closes the connection, so the next guess needs a new one.
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    (response, message)
}

/// Refuses an app. A limit of its own is named.
fn app_overloaded<S: Store>(
    shared: &MiddlewareState<S>,
    parts: &Parts,
    call: ApiCall,
    app: &App,
    resource: LimitedResource,
) -> ErrorReply {
    let connection = Connection::of(&parts.extensions);
    let Some(message) = app.limits().refusal(&app.grant().principal, resource) else {
        return overloaded(shared, call, connection, resource);
    };
    shared.gateway.metrics.count_shed();
    if let Some(connection) = connection {
        connection.refused(resource);
    }
    busy(call, StatusCode::TOO_MANY_REQUESTS, EnvelopeCode::CONCURRENCY_LIMITED, &message)
}

/// Refuses a known caller. This makes the gateway unready, unless only the caller's own share is in use.
pub(super) fn overloaded<S: Store>(
    shared: &MiddlewareState<S>,
    call: ApiCall,
    connection: Option<&Connection>,
    resource: LimitedResource,
) -> ErrorReply {
    shared.gateway.metrics.count_shed();
    if let Some(connection) = connection {
        connection.refused(resource);
    }
    let message = match resource {
        LimitedResource::CredentialShare
        | LimitedResource::CredentialRequests
        | LimitedResource::CredentialBytes => {
            let message = "too many concurrent requests with these credentials: try again";
            return busy(call, StatusCode::TOO_MANY_REQUESTS, EnvelopeCode::CONCURRENCY_LIMITED, message);
        }
        LimitedResource::BodyMemory => "too many large concurrent requests: try again",
        LimitedResource::Connections | LimitedResource::KnownCallers | LimitedResource::Agents => {
            "too many concurrent requests: try again"
        }
    };
    busy(call, StatusCode::SERVICE_UNAVAILABLE, EnvelopeCode::CONCURRENCY_LIMITED, message)
}

/// The reply to a body that could not be read.
pub(super) fn body_error_reply<S: Store>(
    shared: &MiddlewareState<S>,
    call: ApiCall,
    connection: Option<&Connection>,
    error: BodyError,
) -> ErrorReply {
    let most = shared.limits.body_bytes;
    match error {
        BodyError::TooLarge | BodyError::Broken => {
            let message = format!("the body is larger than {most} bytes or incomplete");
            error_reply(call, StatusCode::PAYLOAD_TOO_LARGE, EnvelopeCode::TOO_LARGE, &message)
        }
        BodyError::TooSlow => {
            let message = "reading the body timed out";
            error_reply(call, StatusCode::REQUEST_TIMEOUT, EnvelopeCode::BAD_REQUEST, message)
        }
        BodyError::Exhausted(resource) => overloaded(shared, call, connection, resource),
        BodyError::Evicted => {
            shared.gateway.metrics.count_shed();
            let message = "too many concurrent requests of unauthenticated callers: send credentials in a header, or try again";
            busy(call, StatusCode::SERVICE_UNAVAILABLE, EnvelopeCode::CONCURRENCY_LIMITED, message)
        }
    }
}

fn health<S: Store>(gateway: &Gateway<S>, call: ApiCall, connection: Option<&Connection>) -> Response {
    let exhausted = || connection.and_then(Connection::exhausted).map(LimitedResource::reason);
    let wrong = match call == ApiCall::Ready {
        true => {
            gateway.not_ready().map(str::to_owned).or_else(|| Some(format!("not ready: {}", exhausted()?)))
        }
        false => None,
    };
    match wrong {
        Some(why) => json(StatusCode::SERVICE_UNAVAILABLE, &ServerHealth { status: why }),
        None => json(StatusCode::OK, &ServerHealth::ok()),
    }
}
