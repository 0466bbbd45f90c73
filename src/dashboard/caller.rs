//! Caller of a request: checks of the method and the credentials by the header alone, and delays of wrong credentials.

use axum::http::request::Parts;
use axum::http::{HeaderValue, Method, StatusCode, header};

use super::Dashboard;
use super::access::{AuthMethod, WrongCredentials};
use super::people::{PersonCaller, csrf_header};
use super::redact::View;
use super::reply::{ErrorResponse, busy, error_response, redirect_to};
use super::routes::{Permission, Route};
use super::viewer::Viewer;
use crate::access::{AccessRequest, AccessRole};
use crate::http::{
    Connection, CredentialCheck, CredentialKey, CredentialScope, LoginFailureAction, ShareExceeded,
};

/// Caller of a request.
pub(super) enum RequestCaller {
    /// No credentials: on loopback, or where none are needed.
    Anonymous,
    /// The token of the listener.
    Token,
    Person(Box<PersonCaller>),
}

impl RequestCaller {
    pub(super) fn person(&self) -> Option<&PersonCaller> {
        match self {
            RequestCaller::Anonymous | RequestCaller::Token => None,
            RequestCaller::Person(person) => Some(person),
        }
    }

    pub(super) fn viewer(&self, owner: &str) -> Viewer {
        match self {
            RequestCaller::Anonymous => Viewer::new(View::Redacted, owner),
            RequestCaller::Token => Viewer::new(View::Full, owner),
            RequestCaller::Person(person) => Viewer::of_grant(&person.grant, owner),
        }
    }

    /// Compares what a request concerns with the grant of a person. The listener's token has no limits.
    pub(super) fn authorize(&self, request: &AccessRequest<'_>) -> Result<(), ErrorResponse> {
        self.person().map_or(Ok(()), |person| person.authorize(request))
    }
}

/// Checks the method and the credentials of a request by its header alone.
pub(super) async fn admit<S>(
    dashboard: &Dashboard<S>,
    parts: &Parts,
    route: Route,
) -> Result<RequestCaller, ErrorResponse> {
    let allowed = route.method();
    // HEAD is answered like GET; hyper omits the body.
    let method = if parts.method == Method::HEAD { "GET" } else { parts.method.as_str() };
    if method != allowed {
        let mut response = error_response(StatusCode::METHOD_NOT_ALLOWED, "method not allowed");
        response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allowed));
        return Err(response);
    }
    let access = &dashboard.access;
    if route.is_of_people() && access.people.is_none() {
        return Err(error_response(StatusCode::NOT_FOUND, "path not found"));
    }
    let (role, checked, who) = match route.permission() {
        Permission::Nothing | Permission::Signed | Permission::LoggingIn => {
            return Ok(RequestCaller::Anonymous);
        }
        Permission::Reading => (AccessRole::Read, access.may_read(parts), "a reader"),
        Permission::Changing => (AccessRole::Operate, access.may_change(parts), "the token's holder"),
        Permission::LoggingOut => {
            let not_logged_in = error_response(StatusCode::UNAUTHORIZED, "no session is open");
            (AccessRole::Read, Err(not_logged_in), "a person")
        }
    };
    if let Some(person) = admit_person(dashboard, parts).await? {
        person.authorize(&AccessRequest { role: Some(role), ..AccessRequest::default() })?;
        if route.permission() == Permission::Changing {
            person.check_csrf(csrf_header(parts))?;
        }
        return Ok(RequestCaller::Person(Box::new(person)));
    }
    let checked = check_credentials(dashboard, parts, checked, who).await;
    checked.map_err(|refused| match route == Route::Page && is_browser_without_login(dashboard, parts) {
        true => Box::new(redirect_to("/login")),
        false => refused,
    })
}

/// A browser that has to show the login form.
fn is_browser_without_login<S>(dashboard: &Dashboard<S>, parts: &Parts) -> bool {
    dashboard.access.people.is_some()
        && !parts.headers.contains_key(header::AUTHORIZATION)
        && accepts_html(parts)
}

pub(super) fn accepts_html(parts: &Parts) -> bool {
    let accepted = parts.headers.get(header::ACCEPT).and_then(|value| value.to_str().ok());
    accepted.is_some_and(|accepted| accepted.contains("text/html"))
}

/// The person of a request, counted for its connection.
pub(super) async fn admit_person<S>(
    dashboard: &Dashboard<S>,
    parts: &Parts,
) -> Result<Option<PersonCaller>, ErrorResponse> {
    let Some(people) = &dashboard.access.people else { return Ok(None) };
    let connection = Connection::of(&parts.extensions);
    match people.identify(parts, dashboard.access.listen.port()) {
        Ok(Some(person)) => {
            if let Some(connection) = connection {
                count_connection(connection, person.code(), people.credential_check(&person))?;
            }
            Ok(Some(person))
        }
        Ok(None) => Ok(None),
        Err(refused) => Err(delay_wrong_credentials(refused, connection, "a person").await),
    }
}

/// Counts the connection for its credential.
pub(super) fn count_connection(
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
pub(super) async fn check_credentials<S>(
    dashboard: &Dashboard<S>,
    parts: &Parts,
    checked: Result<AuthMethod, ErrorResponse>,
    who: &str,
) -> Result<RequestCaller, ErrorResponse> {
    match (checked, Connection::of(&parts.extensions)) {
        (Ok(AuthMethod::Shown), Some(connection)) => {
            count_connection(connection, "token", dashboard.access.credential_check(parts))?;
            Ok(RequestCaller::Token)
        }
        (Ok(AuthMethod::NotNeeded), Some(connection)) => {
            connection.demote();
            Ok(RequestCaller::Anonymous)
        }
        (Ok(AuthMethod::Shown), None) => Ok(RequestCaller::Token),
        (Ok(AuthMethod::NotNeeded), None) => Ok(RequestCaller::Anonymous),
        (Err(refused), connection) => Err(delay_wrong_credentials(refused, connection, who).await),
    }
}

/// Delays the response to wrong credentials; other responses are immediate.
pub(super) async fn delay_wrong_credentials(
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
