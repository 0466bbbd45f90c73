//! People at the status server: tokens, sessions and trusted proxies.
//!
//! A request of a trusted proxy with a user header is the request of that person. Else a bearer token names its person,
//! else the cookie of a session. A browser sends a cookie, and the login at a proxy, with requests of other sites'
//! pages, too: with these, a change needs the CSRF token of the session.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::http::request::Parts;
use axum::http::{HeaderValue, StatusCode, header};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::access::{bearer, mark_wrong_credentials, text};
use super::reply::{ErrorResponse, error_response};
use super::sessions::{MAX_AGE_MS, NewSession, Session, SessionKey, Sessions};
use crate::access::apps::{AppLogin, Apps, LoginError, SecretDigest};
use crate::access::{AccessRequest, Grant, authorize};
use crate::clock;
use crate::contract::AccessInfo;
use crate::http::{
    Connection, CredentialCheck, CredentialKey, CredentialScope, Reloadable, Revocation, TransportSecurity,
    TrustedProxy, constant_time_eq,
};
use crate::model::Time;

/// Header with the CSRF token of a session.
pub const CSRF_HEADER: &str = "x-abide-csrf";
/// Header of requests that the page makes without an action of the person.
const BACKGROUND_HEADER: &str = "x-abide-background";
/// Interval of checks whether the credentials of a stream are in force.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum event streams of one person.
const MAX_STREAMS: usize = 16;

/// The people of a users file, and how they log in.
pub struct PeopleAccess {
    people: Reloadable<Apps>,
    proxy: Option<Arc<TrustedProxy>>,
    pub(super) sessions: Sessions,
    /// Permits of event streams by person: one person cannot take those of all.
    streams: Mutex<HashMap<String, Arc<Semaphore>>>,
}

/// Authentication of a person.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PersonAuth {
    Token,
    Session,
    Proxy,
}

/// A person who makes a request.
pub(super) struct PersonCaller {
    pub(super) info: AccessInfo,
    pub(super) grant: Arc<Grant>,
    code: String,
    secret: Option<SecretDigest>,
    auth: PersonAuth,
    pub(super) session: Option<(SessionKey, Session)>,
}

impl PersonCaller {
    fn of(login: &AppLogin<'_>, auth: PersonAuth, session: Option<(SessionKey, Session)>) -> PersonCaller {
        let (code, secret) = (login.app.code.clone(), login.secret);
        PersonCaller { info: login.info(), grant: Arc::clone(login.app.grant()), code, secret, auth, session }
    }

    pub(super) fn name(&self) -> &str {
        self.info.person.as_deref().unwrap_or_default()
    }

    /// The code of the person among all callers.
    pub(super) fn code(&self) -> &str {
        &self.code
    }

    /// The person as a unit of limits.
    pub(super) fn credential_key(&self) -> CredentialKey {
        CredentialKey::new(CredentialScope::Clients, &self.code)
    }

    pub(super) fn authorize(&self, request: &AccessRequest<'_>) -> Result<(), ErrorResponse> {
        authorize(&self.grant, request)
            .map_err(|missing| error_response(StatusCode::FORBIDDEN, &missing.to_string()))
    }

    /// Refuses a change that a page of another site may have caused.
    pub(super) fn check_csrf(&self, presented: Option<&str>) -> Result<(), ErrorResponse> {
        let is_valid = match (self.auth, &self.session) {
            // A browser does not send a bearer token for another site's page.
            (PersonAuth::Token, _) => true,
            (PersonAuth::Session | PersonAuth::Proxy, Some((_, session))) => {
                presented.is_some_and(|presented| constant_time_eq(presented, &session.csrf))
            }
            (PersonAuth::Session | PersonAuth::Proxy, None) => false,
        };
        let message =
            "the CSRF token is missing or wrong: send X-Abide-Csrf with the `csrf` of GET /api/v1/session";
        if is_valid { Ok(()) } else { Err(error_response(StatusCode::FORBIDDEN, message)) }
    }
}

/// Whether the page makes the request, without an action of the person.
pub(super) fn is_background(parts: &Parts) -> bool {
    parts.headers.contains_key(BACKGROUND_HEADER)
}

impl PeopleAccess {
    /// Ends sessions when a new users file no longer has their person or token.
    pub fn start(people: Reloadable<Apps>, proxy: Option<Arc<TrustedProxy>>) -> Arc<PeopleAccess> {
        let mut files = people.subscribe();
        let access = Arc::new(PeopleAccess {
            people,
            proxy,
            sessions: Sessions::default(),
            streams: Mutex::default(),
        });
        let weak = Arc::downgrade(&access);
        tokio::spawn(async move {
            while files.changed().await.is_ok() {
                let Some(access) = weak.upgrade() else { return };
                let (people, now) = (Arc::clone(&files.borrow_and_update()), clock::now());
                access
                    .sessions
                    .retain(|session| people.validity(&session.code, session.secret.as_ref(), now).is_some());
            }
        });
        access
    }

    /// The person of a request. `None`: it has no credentials of a person.
    pub(super) fn identify(&self, parts: &Parts, port: u16) -> Result<Option<PersonCaller>, ErrorResponse> {
        let (people, now) = (self.people.get(), clock::now());
        if let Some(user) = self.proxied_user(parts) {
            return self.identify_proxied(&people, user?, parts, port, now).map(Some);
        }
        if let Some(token) = bearer(&parts.headers) {
            return match people.authenticate_token(&token, now) {
                Ok(login) => Ok(Some(PersonCaller::of(&login, PersonAuth::Token, None))),
                Err(expired @ LoginError::Expired { .. }) => {
                    Err(error_response(StatusCode::UNAUTHORIZED, &expired.to_string()))
                }
                // The token of the listener is compared next.
                Err(_) => Ok(None),
            };
        }
        if parts.headers.contains_key(header::AUTHORIZATION) {
            return Ok(None);
        }
        // A session of a proxy counts only with the proxy's header: a logout at the proxy ends it, too.
        let found = self.cookie_session(parts, port, now).filter(|(_, session)| session.secret.is_some());
        let Some((key, session)) = found else { return Ok(None) };
        match people.resume(&session.code, session.secret.as_ref(), now) {
            Some(login) => Ok(Some(PersonCaller::of(&login, PersonAuth::Session, Some((key, session))))),
            None => {
                self.sessions.close(key);
                Ok(None)
            }
        }
    }

    fn proxied_user<'a>(&self, parts: &'a Parts) -> Option<Result<&'a str, ErrorResponse>> {
        let user = self.proxy.as_ref()?.user(peer_ip(parts)?, &parts.headers)?;
        Some(user.map_err(|ambiguous| error_response(StatusCode::BAD_REQUEST, &ambiguous.to_string())))
    }

    fn identify_proxied(
        &self,
        people: &Apps,
        name: &str,
        parts: &Parts,
        port: u16,
        now: Time,
    ) -> Result<PersonCaller, ErrorResponse> {
        let login = people.authenticate_proxied(name, now).map_err(|error| {
            // The proxy authenticated the person: this is not a wrong credential.
            tracing::warn!(target: "audit", person = ?name, why = %error, "login by a proxy refused");
            error_response(StatusCode::FORBIDDEN, &error.to_string())
        })?;
        let session = self.cookie_session(parts, port, now).filter(|(key, session)| {
            let is_own = session.code == login.app.code && session.secret.is_none();
            if !is_own {
                self.sessions.close(*key);
            }
            is_own
        });
        Ok(PersonCaller::of(&login, PersonAuth::Proxy, session))
    }

    fn cookie_session(&self, parts: &Parts, port: u16, now: Time) -> Option<(SessionKey, Session)> {
        let key = SessionKey::of_id(cookie(parts, &self.session_cookie(parts, port))?);
        let is_background = is_background(parts) || parts.uri.path() == "/api/v1/events";
        Some((key, self.sessions.find(key, now, !is_background)?))
    }

    /// The person of a token in the login form.
    pub(super) fn log_in(&self, token: &str) -> Result<(PersonCaller, NewSession), ErrorResponse> {
        let (people, now) = (self.people.get(), clock::now());
        match people.authenticate_token(token, now) {
            Ok(login) => {
                let new = self.sessions.open(&login.app.code, login.secret, now);
                Ok((PersonCaller::of(&login, PersonAuth::Session, None), new))
            }
            Err(error) => {
                let is_guess = error == LoginError::UnknownToken;
                let response = error_response(StatusCode::UNAUTHORIZED, &error.to_string());
                Err(mark_wrong_credentials(response, is_guess))
            }
        }
    }

    /// Opens a session for a person of a proxy, if the request has none.
    pub(super) fn open_proxied(&self, person: &mut PersonCaller) -> Option<NewSession> {
        if person.auth != PersonAuth::Proxy || person.session.is_some() {
            return None;
        }
        let now = clock::now();
        let new = self.sessions.open(&person.code, None, now);
        person.session = self.sessions.find(new.key, now, true).map(|session| (new.key, session));
        Some(new)
    }

    fn is_in_force(
        &self,
        login: (&str, Option<&SecretDigest>),
        grant: &Grant,
        key: Option<SessionKey>,
    ) -> bool {
        let (people, now, (code, secret)) = (self.people.get(), clock::now(), login);
        people.validity(code, secret, now).is_some()
            && people.find(code).is_some_and(|person| **person.grant() == *grant)
            && key.is_none_or(|key| self.sessions.is_open(key, now))
    }

    /// Checks whether the credentials of a person are still valid, with the same grant.
    pub(super) fn credential_check(self: &Arc<PeopleAccess>, person: &PersonCaller) -> CredentialCheck {
        let access = Arc::clone(self);
        let (code, secret, grant) = (person.code.clone(), person.secret, Arc::clone(&person.grant));
        let key = person.session.as_ref().map(|(key, _)| *key);
        Box::new(move || access.is_in_force((&code, secret.as_ref()), &grant, key))
    }

    /// Resolves when the credentials of a person end, or the grant changes.
    pub(super) fn revocation(self: &Arc<PeopleAccess>, person: &PersonCaller) -> Revocation {
        let is_in_force = self.credential_check(person);
        Box::pin(async move {
            while is_in_force() {
                tokio::time::sleep(CHECK_INTERVAL).await;
            }
        })
    }

    /// A permit for an event stream of a person. `None`: all are in use.
    pub(super) fn stream_permit(&self, person: &PersonCaller) -> Option<OwnedSemaphorePermit> {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let permits =
            streams.entry(person.code.clone()).or_insert_with(|| Arc::new(Semaphore::new(MAX_STREAMS)));
        Arc::clone(permits).try_acquire_owned().ok()
    }

    /// Whether the browser's connection uses TLS, here or at a trusted proxy.
    fn is_https(&self, parts: &Parts) -> bool {
        let own = parts.extensions.get::<TransportSecurity>().is_some_and(|security| security.tls);
        let proxied = || self.proxy.as_ref()?.is_https(peer_ip(parts)?, &parts.headers).then_some(());
        own || proxied().is_some()
    }

    /// Cookies do not separate ports: each listener has a name of its own. The prefix makes browsers refuse a cookie of
    /// another host of the domain.
    fn cookie_name(&self, parts: &Parts, name: &str, port: u16) -> String {
        let prefix = if self.is_https(parts) { "__Host-" } else { "" };
        format!("{prefix}{name}_{port}")
    }

    pub(super) fn session_cookie(&self, parts: &Parts, port: u16) -> String {
        self.cookie_name(parts, "abide_session", port)
    }

    pub(super) fn login_cookie(&self, parts: &Parts, port: u16) -> String {
        self.cookie_name(parts, "abide_login", port)
    }

    /// A `Set-Cookie` header. Without a value it removes the cookie.
    pub(super) fn set_cookie(&self, parts: &Parts, name: &str, value: Option<&str>) -> Option<HeaderValue> {
        let secure = if self.is_https(parts) { "; Secure" } else { "" };
        let age = if value.is_some() { MAX_AGE_MS / 1000 } else { 0 };
        let value = value.unwrap_or_default();
        let text = format!("{name}={value}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict{secure}");
        HeaderValue::from_str(&text).ok()
    }
}

fn peer_ip(parts: &Parts) -> Option<IpAddr> {
    Connection::of(&parts.extensions).map(|connection| connection.peer().ip())
}

/// The value of a cookie. A name that occurs twice counts as absent: one of the two may be of another site.
pub(super) fn cookie<'a>(parts: &'a Parts, name: &str) -> Option<&'a str> {
    let all = parts.headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let pairs = all.flat_map(|line| line.split(';')).filter_map(|pair| pair.trim().split_once('='));
    let mut values = pairs.filter(|(known, _)| *known == name).map(|(_, value)| value);
    let first = values.next()?;
    values.next().is_none().then_some(first)
}

/// The CSRF token in the header of a request.
pub(super) fn csrf_header(parts: &Parts) -> Option<&str> {
    text(&parts.headers, CSRF_HEADER)
}
