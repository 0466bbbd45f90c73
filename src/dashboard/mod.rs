//! Controller dashboard: page, JSON API, event stream and metrics; webhooks, pauses and observation requests.
//!
//! # Theory of operation
//! Every response is built from the [`StatusBoard`] that the control loop writes: no request can block the loop. Only the
//! details of process rows are read from the target ([`process_details`]), bounded in time and rate. [`api`] is the JSON API that [`openapi`] describes, [`page`] the page, [`events`] the event stream, [`metrics`] the
//! metrics, and [`notify`] sends notifications.
//!
//! [`access`] admits requests. On a loopback address reading needs no token unless the listener requires one; changes
//! always need it. Without the token, command lines and environment values are hidden ([`redact`]); `/login` asks a
//! browser for it. Requests with a foreign Host header are refused (DNS rebinding), and other sites cannot read
//! responses.

mod access;
mod api;
mod events;
mod metrics;
pub mod notify;
mod openapi;
mod page;
mod process_details;
mod redact;
mod webhook;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::Response;
use axum::routing::any;
use serde::Serialize;
use tokio::sync::{Notify, Semaphore};

pub use self::access::AccessControl;
use self::access::{AuthMethod, WrongCredentials, mark_wrong_credentials};
pub use self::process_details::{DetailCache, DetailSource};
use self::redact::View;
use self::webhook::Delivery;
pub use self::webhook::Webhook;
use crate::contract::{self, Accepted, ErrorBody, PlanDocument};
use crate::control::PassResult;
use crate::control::status::StatusBoard;
use crate::http::{
    AdmittedRequest, BodyError, Budget, Connection, CredentialCheck, CredentialKey, CredentialScope,
    LimitedResource, LoginFailureAction, Reloadable, ShareExceeded, UnknownCallers, admit_known,
    end_on_revocation, read_body,
};
use crate::store::Store;

/// Maximum bytes of a body.
const MAX_BODY_BYTES: usize = 1 << 20;
/// Timeout of reading a body, and of a state store call.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum event streams of readers with the token, and as many of others.
const MAX_READERS: usize = 64;
/// Maximum concurrent bodies of callers with the token, and as many of others; and the memory of each group.
const MAX_BODIES: usize = 64;
const MAX_BODIES_BYTES: usize = 32 << 20;

/// Metrics text added by another component.
pub type ExtraMetrics = Box<dyn Fn() -> Pin<Box<dyn Future<Output = String> + Send>> + Send + Sync>;

/// Dependencies of the routes.
pub struct Dashboard<S> {
    pub board: Arc<StatusBoard>,
    /// The state store, with history and pauses.
    pub state: Reloadable<S>,
    pub trigger: Arc<Notify>,
    /// Renders a plan as `abide plan -o json` does.
    pub plan: Box<dyn Fn(&PassResult) -> PlanDocument + Send + Sync>,
    pub access: AccessControl,
    /// Webhook verification; `None`: webhooks are disabled.
    pub webhook: Option<Webhook>,
    pub extra_metrics: Option<ExtraMetrics>,
    pub details: DetailCache,
}

struct DashboardState<S> {
    dashboard: Dashboard<S>,
    readers: Readers,
    known: Budget,
    unknown: UnknownCallers,
}

/// Permits of event streams. Readers without the token cannot exhaust those of readers with it.
struct Readers {
    known: Arc<Semaphore>,
    unknown: Arc<Semaphore>,
}

impl Readers {
    fn new() -> Readers {
        Readers {
            known: Arc::new(Semaphore::new(MAX_READERS)),
            unknown: Arc::new(Semaphore::new(MAX_READERS)),
        }
    }

    fn of(&self, view: View) -> &Arc<Semaphore> {
        match view {
            View::Full => &self.known,
            View::Redacted => &self.unknown,
        }
    }

    fn open(&self) -> usize {
        2 * MAX_READERS - self.known.available_permits() - self.unknown.available_permits()
    }
}

/// Router of a separate listener.
pub fn router<S: Store>(dashboard: Dashboard<S>) -> Router {
    Router::new().fallback(serve::<S>).with_state(share(dashboard))
}

/// Routes to merge into another router, without the health routes.
pub fn routes<S: Store>(dashboard: Dashboard<S>) -> Router {
    let paths = ["/", "/login", "/metrics", "/api/v1/{*rest}"];
    let add = |router: Router<Arc<DashboardState<S>>>, path: &str| router.route(path, any(serve::<S>));
    paths.into_iter().fold(Router::new(), add).with_state(share(dashboard))
}

fn share<S>(dashboard: Dashboard<S>) -> Arc<DashboardState<S>> {
    Arc::new(DashboardState {
        dashboard,
        readers: Readers::new(),
        known: Budget::new(LimitedResource::KnownCallers, MAX_BODIES, MAX_BODIES_BYTES),
        unknown: UnknownCallers::new(MAX_BODIES, MAX_BODIES_BYTES),
    })
}

/// Every method and path.
pub fn route_table() -> impl Iterator<Item = (&'static str, &'static str)> {
    Route::ALL.into_iter().map(|(path, route)| (route.method(), path))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    Page,
    Login,
    Status,
    Processes,
    Events,
    Plan,
    History,
    Metrics,
    Health,
    Ready,
    Pause,
    Resume,
    Trigger,
    Webhook,
    Description,
}

/// Permission that a route requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Permission {
    Nothing,
    Reading,
    Changing,
    /// A signature of the body.
    Signed,
}

impl Route {
    const ALL: [(&str, Route); 15] = [
        ("/", Route::Page),
        ("/login", Route::Login),
        ("/metrics", Route::Metrics),
        ("/healthz", Route::Health),
        ("/readyz", Route::Ready),
        ("/api/v1/status", Route::Status),
        ("/api/v1/processes", Route::Processes),
        ("/api/v1/events", Route::Events),
        ("/api/v1/plan", Route::Plan),
        ("/api/v1/history", Route::History),
        ("/api/v1/pause", Route::Pause),
        ("/api/v1/resume", Route::Resume),
        ("/api/v1/look", Route::Trigger),
        ("/api/v1/webhook", Route::Webhook),
        ("/api/v1/openapi.json", Route::Description),
    ];

    fn find(path: &str) -> Option<Route> {
        let path = if path.starts_with("/api/v1/") { path.trim_end_matches('/') } else { path };
        Route::ALL.into_iter().find(|(known, _)| *known == path).map(|(_, route)| route)
    }

    fn method(self) -> &'static str {
        match self.permission() {
            Permission::Nothing | Permission::Reading => "GET",
            Permission::Changing | Permission::Signed => "POST",
        }
    }

    fn permission(self) -> Permission {
        match self {
            Route::Health | Route::Ready | Route::Login => Permission::Nothing,
            Route::Page | Route::Status | Route::Processes | Route::Events => Permission::Reading,
            Route::Plan | Route::History | Route::Metrics | Route::Description => Permission::Reading,
            Route::Pause | Route::Resume | Route::Trigger => Permission::Changing,
            Route::Webhook => Permission::Signed,
        }
    }
}

async fn serve<S: Store>(State(shared): State<Arc<DashboardState<S>>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let mut response = match respond(&shared, &parts, body).await {
        Ok(response) => response,
        Err(refused) => *refused,
    };
    // Other sites must not read, frame or sniff responses.
    for (name, value) in [
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::X_FRAME_OPTIONS, "DENY"),
        (header::REFERRER_POLICY, "no-referrer"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

async fn respond<S: Store>(
    shared: &Arc<DashboardState<S>>,
    parts: &Parts,
    body: Body,
) -> Result<Response, ErrorResponse> {
    let DashboardState { dashboard, readers, .. } = &**shared;
    let connection = Connection::of(&parts.extensions);
    let board = &dashboard.board;
    dashboard.access.check_host_header(parts)?;
    let unknown = || error_response(StatusCode::NOT_FOUND, "path not found");
    let route = Route::find(parts.uri.path()).ok_or_else(unknown)?;
    if route == Route::Webhook && dashboard.webhook.is_none() {
        return Err(unknown());
    }
    authorize(dashboard, parts, route).await?;
    // After the header checks: the body of a caller without the token is not read.
    let admit = || admit_known(&shared.known, None).map_err(|resource| overloaded(connection, resource));
    let view = dashboard.access.view(parts);
    Ok(match route {
        Route::Page => page::page(board, view, dashboard.access.token.is_some()),
        Route::Login => {
            check_credentials(dashboard, parts, dashboard.access.may_log_in(parts), "a reader").await?;
            redirect_to_page()
        }
        Route::Status => json_response(StatusCode::OK, &api::status(board, view)),
        Route::Processes => {
            let details = dashboard.details.get().await;
            json_response(StatusCode::OK, &api::processes(&board.status(), &details, view))
        }
        Route::Events => {
            let response = events::stream(board, readers.of(view), parts, view)?;
            match dashboard.access.reader_revocation(parts) {
                Some(revoked) => response.map(|body| end_on_revocation(body, revoked, "")),
                None => response,
            }
        }
        Route::Plan => api::plan(dashboard, view)?,
        Route::History => json_response(StatusCode::OK, &api::history(dashboard, parts, view).await?),
        Route::Metrics => {
            let mut text = metrics::text(board, readers.open());
            if let Some(more) = &dashboard.extra_metrics {
                text.push_str(&more().await);
            }
            if let Some(connection) = connection {
                text.push_str(&connection.listener().metrics_text());
            }
            typed_response(Body::from(text), "text/plain; version=0.0.4; charset=utf-8")
        }
        Route::Description => json_response(StatusCode::OK, openapi::description()),
        Route::Health => api::health(board),
        Route::Ready => api::ready(board, connection.and_then(Connection::exhausted)),
        Route::Pause => {
            api::pause(dashboard, parts, &read_whole_body(body, &mut admit()?, connection).await?).await?
        }
        Route::Resume => {
            api::resume(dashboard, parts, &read_whole_body(body, &mut admit()?, connection).await?).await?
        }
        Route::Trigger => {
            read_whole_body(body, &mut admit()?, connection).await?;
            api::trigger(dashboard, parts, "observation requested")
        }
        Route::Webhook => match verify_webhook(shared, parts, body).await? {
            Delivery::First => api::trigger(dashboard, parts, "webhook received: observation requested"),
            // The sender did not receive the first response. Its request had its effect.
            Delivery::Repeated => json_response(StatusCode::ACCEPTED, &Accepted::Repeated(true)),
        },
    })
}

/// Checks the method and the credentials of a request by its header alone.
async fn authorize<S>(dashboard: &Dashboard<S>, parts: &Parts, route: Route) -> Result<(), ErrorResponse> {
    let allowed = route.method();
    // HEAD is answered like GET; hyper omits the body.
    let method = if parts.method == Method::HEAD { "GET" } else { parts.method.as_str() };
    if method != allowed {
        let message = "method not allowed";
        let mut response = error_response(StatusCode::METHOD_NOT_ALLOWED, message);
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
        return Err(response);
    }
    match route.permission() {
        Permission::Nothing | Permission::Signed => Ok(()),
        Permission::Reading => {
            check_credentials(dashboard, parts, dashboard.access.may_read(parts), "a reader").await
        }
        Permission::Changing => {
            check_credentials(dashboard, parts, dashboard.access.may_change(parts), "the token's holder")
                .await
        }
    }
}

/// Redirects a browser to the page after its login; it sends the token from then on.
fn redirect_to_page() -> Response {
    let mut response = typed_response(Body::empty(), "text/plain; charset=utf-8");
    *response.status_mut() = StatusCode::SEE_OTHER;
    response.headers_mut().insert(header::LOCATION, HeaderValue::from_static("/"));
    response
}

/// Reads a webhook's body in the pool of unknown callers, and verifies its signature.
async fn verify_webhook<S>(
    shared: &DashboardState<S>,
    parts: &Parts,
    body: Body,
) -> Result<Delivery, ErrorResponse> {
    let connection = Connection::of(&parts.extensions);
    let mut admitted = shared.unknown.admit(peer_of(parts));
    let bytes = read_whole_body(body, &mut admitted, connection).await?;
    let now = crate::clock::now().0.div_euclid(1000);
    let accepted = match &shared.dashboard.webhook {
        Some(webhook) => webhook.accept(parts, &bytes, now),
        None => Err(error_response(StatusCode::NOT_FOUND, "path not found")),
    };
    // A delayed response holds neither a permit nor memory.
    drop((admitted, bytes));
    let accepted = accepted.map_err(|refused| {
        let wrong = refused.status() == StatusCode::UNAUTHORIZED && webhook::has_signature(parts);
        mark_wrong_credentials(refused, wrong)
    });
    match accepted {
        Ok(delivery) => {
            if let (Some(connection), Some(webhook)) = (connection, &shared.dashboard.webhook) {
                count_connection(connection, "webhook", webhook.credential_check())?;
            }
            Ok(delivery)
        }
        Err(refused) => Err(delay_wrong_credentials(refused, connection, "a webhook").await),
    }
}

/// Counts the connection for its credential.
fn count_connection(
    connection: &Connection,
    name: &str,
    in_force: CredentialCheck,
) -> Result<(), ErrorResponse> {
    let credential = CredentialKey::new(CredentialScope::Clients, name);
    connection.authenticated(credential, in_force).map_err(|ShareExceeded| {
        let message = "too many connections with these credentials: try again";
        error_response(StatusCode::SERVICE_UNAVAILABLE, message)
    })
}

/// Applies the result of a credential check: success authenticates the connection, wrong credentials are logged and
/// answered with a growing delay.
async fn check_credentials<S>(
    dashboard: &Dashboard<S>,
    parts: &Parts,
    checked: Result<AuthMethod, ErrorResponse>,
    who: &str,
) -> Result<(), ErrorResponse> {
    match (checked, Connection::of(&parts.extensions)) {
        (Ok(AuthMethod::Shown), Some(connection)) => {
            count_connection(connection, "token", dashboard.access.credential_check(parts))
        }
        (Ok(AuthMethod::NotNeeded), Some(connection)) => {
            connection.demote();
            Ok(())
        }
        (Ok(AuthMethod::Shown | AuthMethod::NotNeeded), None) => Ok(()),
        (Err(refused), connection) => Err(delay_wrong_credentials(refused, connection, who).await),
    }
}

/// Delays the response to wrong credentials; other responses are immediate.
async fn delay_wrong_credentials(
    refused: ErrorResponse,
    connection: Option<&Connection>,
    who: &str,
) -> ErrorResponse {
    if let Some(connection) = connection {
        connection.demote();
    }
    let wrong = refused.extensions().get::<WrongCredentials>().is_some();
    let Some(connection) = connection.filter(|_| wrong) else { return refused };
    match connection.login_failed(who).await {
        LoginFailureAction::Refuse => refused,
        LoginFailureAction::TooMany => too_many_failed_logins(),
    }
}

fn too_many_failed_logins() -> ErrorResponse {
    let message = "too many requests with wrong credentials from this address";
    let mut response = busy(StatusCode::TOO_MANY_REQUESTS, message);
    // An immediate answer closes the connection, so the next guess needs a new one.
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

fn peer_of(parts: &Parts) -> std::net::IpAddr {
    // Every request of a listener has a peer; a request without one shares the limits of loopback.
    let loopback = std::net::IpAddr::from([127, 0, 0, 1]);
    Connection::of(&parts.extensions).map_or(loopback, |connection| connection.peer().ip())
}

async fn read_whole_body(
    body: Body,
    admitted: &mut AdmittedRequest<'_>,
    connection: Option<&Connection>,
) -> Result<Bytes, ErrorResponse> {
    read_body(body, MAX_BODY_BYTES, RESPONSE_TIMEOUT, admitted).await.map_err(|error| match error {
        BodyError::TooLarge | BodyError::Broken => {
            error_response(StatusCode::PAYLOAD_TOO_LARGE, "the body is larger than 1 MiB or incomplete")
        }
        BodyError::TooSlow => error_response(StatusCode::REQUEST_TIMEOUT, "reading the body timed out"),
        BodyError::Exhausted(resource) => overloaded(connection, resource),
        BodyError::Evicted => busy(
            StatusCode::SERVICE_UNAVAILABLE,
            "too many concurrent requests of unauthenticated callers: try again",
        ),
    })
}

/// Refuses a known caller, which makes the listener unready.
fn overloaded(connection: Option<&Connection>, resource: LimitedResource) -> ErrorResponse {
    if let Some(connection) = connection {
        connection.refused(resource);
    }
    busy(StatusCode::SERVICE_UNAVAILABLE, "too many concurrent requests: try again")
}

/// An error response with `Retry-After`.
fn busy(status: StatusCode, message: &str) -> ErrorResponse {
    let mut response = error_response(status, message);
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

/// A JSON error response.
type ErrorResponse = Box<Response>;

fn error_response(status: StatusCode, message: &str) -> ErrorResponse {
    Box::new(json_response(status, &ErrorBody { error: message.to_owned() }))
}

fn json_response(status: StatusCode, document: &impl Serialize) -> Response {
    let mut response = typed_response(Body::from(contract::compact(document)), "application/json");
    *response.status_mut() = status;
    response
}

fn typed_response(body: Body, kind: &'static str) -> Response {
    let mut response = Response::new(body);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

/// A query parameter, without percent-decoding: no route needs it.
fn parameter<'a>(parts: &'a Parts, name: &str) -> Option<&'a str> {
    let pairs = parts.uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
    pairs.into_iter().find(|(known, _)| *known == name).map(|(_, value)| value)
}
