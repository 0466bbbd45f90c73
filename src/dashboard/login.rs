//! Login of people in a browser: the form, sessions and their cookies, logout.
//!
//! The form has a token of its own, which a cookie repeats: a page of another site cannot log a visitor in as someone
//! else. Wrong tokens are delayed and logged like every wrong credential.

use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use tracing::info;

use super::access::{WrongCredentials, mark_wrong_credentials};
use super::caller::{RequestCaller, accepts_html, admit_person, check_credentials, delay_wrong_credentials};
use super::page::{self, PageAccount};
use super::people::{PeopleAccess, PersonCaller, cookie, csrf_header};
use super::reply::{ErrorResponse, error_response, json_response, redirect_to};
use super::sessions::{NewSession, SessionKey};
use super::{Dashboard, DashboardState, peer_of, read_whole_body};
use crate::clock;
use crate::contract::SessionInfo;
use crate::http::{Connection, constant_time_eq};
use crate::ids::fresh_secret;

/// Maximum bytes of the login form.
const MAX_FORM_BYTES: usize = 8 << 10;

/// `GET /login`: the form, or without a users file the token as the password of a browser.
pub(super) async fn page<S>(dashboard: &Dashboard<S>, parts: &Parts) -> Result<Response, ErrorResponse> {
    let access = &dashboard.access;
    let Some(people) = access.people.as_ref().filter(|_| !parts.headers.contains_key(header::AUTHORIZATION))
    else {
        check_credentials(dashboard, parts, access.may_log_in(parts), "a reader").await?;
        return Ok(redirect_to("/"));
    };
    // A person with a session, or of a proxy, needs no form.
    match admit_person(dashboard, parts).await? {
        Some(_) => Ok(redirect_to("/")),
        None => Ok(form(people, parts, access.listen.port(), StatusCode::OK, None)),
    }
}

/// The form, with a new token in it and in a cookie.
fn form(
    people: &PeopleAccess,
    parts: &Parts,
    port: u16,
    status: StatusCode,
    message: Option<&str>,
) -> Response {
    let token = fresh_secret();
    let mut response = page::login_page(&token, message);
    *response.status_mut() = status;
    add_cookie(&mut response, people.set_cookie(parts, &people.login_cookie(parts, port), Some(&token)));
    response
}

fn add_cookie(response: &mut Response, cookie: Option<HeaderValue>) {
    if let Some(cookie) = cookie {
        response.headers_mut().append(header::SET_COOKIE, cookie);
    }
}

/// `POST /api/v1/login`: opens a session.
pub(super) async fn submit<S>(
    shared: &DashboardState<S>,
    parts: &Parts,
    body: Body,
) -> Result<Response, ErrorResponse> {
    let access = &shared.dashboard.access;
    let (port, connection) = (access.listen.port(), Connection::of(&parts.extensions));
    let Some(people) = &access.people else {
        return Err(error_response(StatusCode::NOT_FOUND, "path not found"));
    };
    let mut admitted = shared.unknown.admit(peer_of(parts));
    let bytes = read_whole_body(body, &mut admitted, connection).await?;
    if bytes.len() > MAX_FORM_BYTES {
        return Err(error_response(StatusCode::PAYLOAD_TOO_LARGE, "the form is larger than 8 KiB"));
    }
    let (token, csrf) = (form_field(&bytes, "token"), form_field(&bytes, "csrf"));
    // A delayed response holds neither a permit nor memory.
    drop((admitted, bytes));
    let expected = cookie(parts, &people.login_cookie(parts, port));
    let is_own_form = csrf
        .zip(expected)
        .is_some_and(|(csrf, expected)| !csrf.is_empty() && constant_time_eq(&csrf, expected));
    if !is_own_form {
        let message = "the login form has expired: try again";
        return Err(Box::new(form(people, parts, port, StatusCode::FORBIDDEN, Some(message))));
    }
    match people.log_in(token.unwrap_or_default().trim()) {
        Ok((person, new)) => {
            audit(parts, &person, "login");
            let mut response = redirect_to("/");
            add_session(&mut response, people, parts, port, &new);
            add_cookie(&mut response, people.set_cookie(parts, &people.login_cookie(parts, port), None));
            Ok(response)
        }
        Err(refused) => {
            let is_guess = refused.extensions().get::<WrongCredentials>().is_some();
            let message = if is_guess { "unknown token" } else { "this token has expired" };
            let again = form(people, parts, port, StatusCode::UNAUTHORIZED, Some(message));
            let refused = mark_wrong_credentials(Box::new(again), is_guess);
            Err(delay_wrong_credentials(refused, connection, "a person").await)
        }
    }
}

fn add_session(response: &mut Response, people: &PeopleAccess, parts: &Parts, port: u16, new: &NewSession) {
    add_cookie(response, people.set_cookie(parts, &people.session_cookie(parts, port), Some(&new.id)));
}

/// `GET /`, with the account of its reader. A browser of a person that a proxy authenticated gets a session.
pub(super) fn with_session<S>(
    dashboard: &Dashboard<S>,
    parts: &Parts,
    caller: &mut RequestCaller,
    page: impl FnOnce(&PageAccount) -> Response,
) -> Response {
    let access = &dashboard.access;
    let (RequestCaller::Person(person), Some(people)) = (caller, &access.people) else {
        return page(if access.token.is_some() { &PageAccount::CanLogIn } else { &PageAccount::Nothing });
    };
    let new = if accepts_html(parts) { people.open_proxied(person) } else { None };
    let account = PageAccount::Person {
        name: person.name().to_owned(),
        role: person.grant.role,
        csrf: person.session.as_ref().map(|(_, session)| session.csrf.clone()),
    };
    let mut response = page(&account);
    if let Some(new) = new {
        audit(parts, person, "login by a proxy");
        add_session(&mut response, people, parts, access.listen.port(), &new);
    }
    response
}

/// `POST /api/v1/logout`: ends the session of the request. The form of the page sends the CSRF token in the body.
pub(super) fn log_out<S>(
    dashboard: &Dashboard<S>,
    parts: &Parts,
    caller: &RequestCaller,
    body: &[u8],
) -> Result<Response, ErrorResponse> {
    let (Some(person), Some(people)) = (caller.person(), &dashboard.access.people) else {
        return Err(error_response(StatusCode::UNAUTHORIZED, "no session is open"));
    };
    let Some((key, _)) = &person.session else {
        return Err(error_response(StatusCode::UNAUTHORIZED, "no session is open"));
    };
    let in_form = form_field(body, "csrf");
    person.check_csrf(csrf_header(parts).or(in_form.as_deref()))?;
    let key: SessionKey = *key;
    people.sessions.close(key);
    audit(parts, person, "logout");
    let mut response = redirect_to("/login");
    let port = dashboard.access.listen.port();
    add_cookie(&mut response, people.set_cookie(parts, &people.session_cookie(parts, port), None));
    Ok(response)
}

/// `GET /api/v1/session`: the caller, what it may do, and the CSRF token of its session.
pub(super) fn session(caller: &RequestCaller) -> Response {
    let info = match caller.person() {
        None => SessionInfo::of_token(),
        Some(person) => {
            let session = person.session.as_ref().map(|(_, session)| session);
            SessionInfo {
                access: person.info.clone(),
                csrf: session.map(|session| session.csrf.clone()),
                session_ends: session.map(|session| session.ends().to_string()),
            }
        }
    };
    json_response(StatusCode::OK, &info)
}

fn audit(parts: &Parts, person: &PersonCaller, what: &str) {
    let from = Connection::of(&parts.extensions).map_or_else(String::new, |one| one.peer().to_string());
    info!(target: "audit", who = ?person.code(), %from, at = %clock::now(), what);
}

/// A field of a form, as browsers encode it.
fn form_field(body: &[u8], name: &str) -> Option<String> {
    let text = std::str::from_utf8(body).ok()?;
    let pairs = text.split('&').filter_map(|pair| pair.split_once('='));
    let value = pairs.into_iter().find(|(known, _)| *known == name).map(|(_, value)| value)?;
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let [first, more @ ..] = rest {
        rest = more;
        match (first, more) {
            (b'+', _) => bytes.push(b' '),
            (b'%', [high, low, after @ ..]) => {
                let digit = |byte: u8| char::from(byte).to_digit(16);
                bytes.push(u8::try_from(digit(*high)? * 16 + digit(*low)?).ok()?);
                rest = after;
            }
            (b'%', _) => return None,
            (byte, _) => bytes.push(*byte),
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::form_field;

    #[test]
    fn a_form_is_decoded_as_browsers_encode_it() {
        let field = |body: &str, name: &str| form_field(body.as_bytes(), name);
        assert_eq!(field("csrf=1&token=a%2Bb+c%C3%A9", "token").as_deref(), Some("a+b cé"));
        assert_eq!(field("token=&csrf=x", "token").as_deref(), Some(""));
        for wrong in ["tokens=a", "token", "token=%", "token=%2", "token=%zz", "token=%ff", ""] {
            assert_eq!(field(wrong, "token"), None, "{wrong}");
        }
    }
}
