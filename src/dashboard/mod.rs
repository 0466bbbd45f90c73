//! Controller dashboard: page, JSON API, event stream and metrics; webhooks, pauses and observation requests.
//!
//! # Theory of operation
//! Every response is built from the [`StatusBoard`] that the control loop writes: no request can block the loop. Only the
//! details of process rows are read from the target ([`process_details`]), bounded in time and rate. [`api`] is the JSON API that [`openapi`] describes, [`page`] the page, [`events`] the event stream, [`metrics`] the
//! metrics, and [`notify`] sends notifications.
//!
//! [`caller`] admits requests. With a users file, people log in ([`login`], [`people`]) and have [`sessions`]; a person's
//! grant decides what is shown ([`viewer`]) and changed. [`access`] compares the listener's token. On a loopback address reading needs no token unless the listener requires one; changes
//! always need it. Without the token, command lines and environment values are hidden ([`redact`]); `/login` asks a
//! browser for it. Requests with a foreign Host header are refused (DNS rebinding), and other sites cannot read
//! responses.

mod access;
mod api;
mod caller;
mod events;
mod login;
mod metrics;
pub mod notify;
mod openapi;
mod page;
mod people;
mod process_details;
mod redact;
mod reply;
mod routes;
mod sessions;
mod viewer;
mod webhook;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use axum::routing::any;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

pub use self::access::AccessControl;
use self::access::mark_wrong_credentials;
use self::caller::{RequestCaller, admit, count_connection, delay_wrong_credentials};
pub use self::people::PeopleAccess;
use self::people::PersonCaller;
pub use self::process_details::{DetailCache, DetailSource};
use self::redact::View;
pub use self::reply::overload_body;
use self::reply::{ErrorResponse, busy, error_response, json_response, typed_response};
use self::routes::Route;
pub use self::routes::route_table;
use self::webhook::Delivery;
pub use self::webhook::Webhook;
use crate::alerts::DeliveryBoard;
use crate::contract::{Accepted, PlanDocument};
use crate::control::PassResult;
use crate::control::status::StatusBoard;
use crate::http::{
    AdmittedRequest, BodyError, Budget, Connection, LimitedResource, Reloadable, UnknownCallers, admit_known,
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
    /// Delivery of alerts.
    pub deliveries: Arc<DeliveryBoard>,
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

    /// Permits of one stream: of its group, and of its person.
    fn permits(
        &self,
        access: &AccessControl,
        caller: &RequestCaller,
        view: View,
    ) -> Result<Vec<OwnedSemaphorePermit>, ErrorResponse> {
        let too_many =
            || error_response(StatusCode::SERVICE_UNAVAILABLE, "too many event streams: try again later");
        let mut permits = Vec::new();
        if let (Some(person), Some(people)) = (caller.person(), &access.people) {
            permits.push(people.stream_permit(person).ok_or_else(too_many)?);
        }
        permits.push(Arc::clone(self.of(view)).try_acquire_owned().map_err(|_| too_many())?);
        Ok(permits)
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
    let mut caller = admit(dashboard, parts, route).await?;
    // After the header checks: the body of a caller without credentials is not read.
    let credential = caller.person().map(PersonCaller::credential_key);
    let admit =
        || admit_known(&shared.known, credential).map_err(|resource| overloaded(connection, resource));
    let viewer = &caller.viewer(&board.subject.owner);
    Ok(match route {
        Route::Page => login::with_session(dashboard, parts, &mut caller, |account| {
            // The page replaces its main element with a new one.
            match people::is_background(parts) {
                true => page::main_element(board, viewer),
                false => page::page(board, viewer, account),
            }
        }),
        Route::Login => login::page(dashboard, parts).await?,
        Route::LogIn => login::submit(shared, parts, body).await?,
        Route::LogOut => login::log_out(
            dashboard,
            parts,
            &caller,
            &read_whole_body(body, &mut admit()?, connection).await?,
        )?,
        Route::Session => login::session(&caller),
        Route::Status => json_response(StatusCode::OK, &api::status(board, &dashboard.deliveries, viewer)),
        Route::Processes => {
            let details = dashboard.details.get().await;
            json_response(StatusCode::OK, &api::processes(&board.status(), &details, viewer))
        }
        Route::Events => {
            let permits = readers.permits(&dashboard.access, &caller, viewer.view)?;
            let response = events::stream(board, permits, parts, viewer)?;
            match dashboard.access.reader_revocation(parts, &caller) {
                Some(revoked) => response.map(|body| end_on_revocation(body, revoked, "")),
                None => response,
            }
        }
        Route::Plan => api::plan(dashboard, viewer)?,
        Route::History => {
            json_response(StatusCode::OK, &api::history(dashboard, parts, &caller, viewer).await?)
        }
        Route::Metrics => metrics_page(shared, connection).await,
        Route::Description => json_response(StatusCode::OK, openapi::description()),
        Route::Health => api::health(board),
        Route::Ready => api::ready(board, connection.and_then(Connection::exhausted)),
        Route::Pause => {
            api::pause(dashboard, parts, &caller, &read_whole_body(body, &mut admit()?, connection).await?)
                .await?
        }
        Route::Resume => {
            api::resume(dashboard, parts, &caller, &read_whole_body(body, &mut admit()?, connection).await?)
                .await?
        }
        Route::Trigger => {
            read_whole_body(body, &mut admit()?, connection).await?;
            api::observe(dashboard, parts, &caller)
        }
        Route::Webhook => match verify_webhook(shared, parts, body).await? {
            Delivery::First => {
                api::trigger(dashboard, parts, &caller, "webhook received: observation requested")
            }
            // The sender did not receive the first response. Its request had its effect.
            Delivery::Repeated => json_response(StatusCode::ACCEPTED, &Accepted::Repeated(true)),
        },
    })
}

async fn metrics_page<S>(shared: &DashboardState<S>, connection: Option<&Connection>) -> Response {
    let DashboardState { dashboard, readers, .. } = shared;
    let mut text = metrics::text(&dashboard.board, readers.open());
    text.push_str(&dashboard.deliveries.metrics_text());
    if let Some(more) = &dashboard.extra_metrics {
        text.push_str(&more().await);
    }
    if let Some(connection) = connection {
        text.push_str(&connection.listener().metrics_text());
    }
    typed_response(Body::from(text), "text/plain; version=0.0.4; charset=utf-8")
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

/// A query parameter, without percent-decoding: no route needs it.
fn parameter<'a>(parts: &'a Parts, name: &str) -> Option<&'a str> {
    let pairs = parts.uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
    pairs.into_iter().find(|(known, _)| *known == name).map(|(_, value)| value)
}
