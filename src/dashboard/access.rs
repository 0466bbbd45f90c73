//! Access control: checks of the Host header and of the token.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};

use super::caller::RequestCaller;
use super::people::PeopleAccess;
use super::reply::{ErrorResponse, error_response};
use crate::http::{CredentialCheck, Reloadable, Revocation, base64, constant_time_eq};

/// Authentication of an admitted caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AuthMethod {
    /// With the token or a signature.
    Shown,
    NotNeeded,
}

/// Marks a response to a request that showed wrong credentials.
#[derive(Clone, Copy)]
pub(super) struct WrongCredentials;

pub(super) fn mark_wrong_credentials(mut response: ErrorResponse, shown: bool) -> ErrorResponse {
    if shown {
        response.extensions_mut().insert(WrongCredentials);
    }
    response
}

pub struct AccessControl {
    /// Address of the listener.
    pub listen: SocketAddr,
    /// Read requests need the token too.
    pub token_required: bool,
    /// `None`: all changes are refused.
    pub token: Option<Reloadable<String>>,
    /// People of a users file. `token_required` is set with them.
    pub people: Option<Arc<PeopleAccess>>,
}

impl AccessControl {
    /// Refuses foreign names in the Host header (DNS rebinding): through them any web page could read the listener
    /// with its visitor's browser. A listener that requires the token is not affected, since the page does not have
    /// it.
    pub(super) fn check_host_header(&self, parts: &Parts) -> Result<(), ErrorResponse> {
        let host = text(&parts.headers, "host").or_else(|| parts.uri.authority().map(|name| name.as_str()));
        match host {
            Some(host) if self.token_required || self.is_own_address(host) => Ok(()),
            None if self.token_required => Ok(()),
            _ => Err(error_response(
                StatusCode::FORBIDDEN,
                "unknown name in the Host header: use the listener's address or localhost",
            )),
        }
    }

    fn is_own_address(&self, host: &str) -> bool {
        let name = match host.strip_prefix('[') {
            Some(rest) => rest.split(']').next().unwrap_or_default(),
            None => host.split(':').next().unwrap_or_default(),
        };
        let name = name.trim_end_matches('.');
        let address = |ip: IpAddr| ip.is_loopback() || ip == self.listen.ip();
        name.eq_ignore_ascii_case("localhost") || name.parse().is_ok_and(address)
    }

    /// Resolves when the credentials of a reader end. `None`: the request has none.
    pub(super) fn reader_revocation(&self, parts: &Parts, caller: &RequestCaller) -> Option<Revocation> {
        if let (Some(person), Some(people)) = (caller.person(), &self.people) {
            return Some(people.revocation(person));
        }
        let presented = bearer(&parts.headers).or_else(|| password(&parts.headers))?;
        let token = self.token.as_ref().filter(|_| matches!(caller, RequestCaller::Token))?;
        Some(token.revocation(move |token| !token.is_empty() && constant_time_eq(&presented, token)))
    }

    /// Checks whether the token of a request is still valid.
    pub(super) fn credential_check(&self, parts: &Parts) -> CredentialCheck {
        let presented = bearer(&parts.headers).or_else(|| password(&parts.headers)).unwrap_or_default();
        let token = self.token.clone();
        Box::new(move || {
            token
                .as_ref()
                .map(Reloadable::get)
                .is_some_and(|token| !token.is_empty() && constant_time_eq(&presented, &token))
        })
    }

    /// Reading accepts the token as a Basic password too. Browsers attach that without the user's action, so changes
    /// do not accept it.
    pub(super) fn may_read(&self, parts: &Parts) -> Result<AuthMethod, ErrorResponse> {
        let presented = bearer(&parts.headers).or_else(|| password(&parts.headers));
        // Without a configured token no credentials are wrong.
        let shown = presented.is_some() && self.token.is_some();
        match self.is_valid_token(presented) {
            true => Ok(AuthMethod::Shown),
            // An immediate answer to a wrong token would let every user of the machine guess it without a log line.
            false if shown || self.token_required => {
                Err(mark_wrong_credentials(self.token_required(), shown))
            }
            false => Ok(AuthMethod::NotNeeded),
        }
    }

    /// Login of a browser for the full view.
    pub(super) fn may_log_in(&self, parts: &Parts) -> Result<AuthMethod, ErrorResponse> {
        let presented = bearer(&parts.headers).or_else(|| password(&parts.headers));
        let shown = presented.is_some();
        match self.is_valid_token(presented) {
            true => Ok(AuthMethod::Shown),
            false => Err(mark_wrong_credentials(self.token_required(), shown)),
        }
    }

    pub(super) fn may_change(&self, parts: &Parts) -> Result<AuthMethod, ErrorResponse> {
        let presented = bearer(&parts.headers);
        let shown = presented.is_some();
        match (&self.token, self.is_valid_token(presented)) {
            (_, true) => Ok(AuthMethod::Shown),
            (Some(_), false) => {
                let mut response = error_response(
                    StatusCode::UNAUTHORIZED,
                    "changes require the token: send Authorization: Bearer TOKEN",
                );
                response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
                Err(mark_wrong_credentials(response, shown))
            }
            (None, false) => Err(error_response(
                StatusCode::FORBIDDEN,
                "no token is configured, so this listener accepts no changes",
            )),
        }
    }

    fn token_required(&self) -> ErrorResponse {
        // People log in with a form. A challenge for a password would open a dialog of the browser.
        let (message, challenge) = match self.people {
            Some(_) => {
                ("a token is required: send Authorization: Bearer TOKEN, or log in at /login", "Bearer")
            }
            None => (
                "the token is required: send Authorization: Bearer TOKEN, or log in with it as the password of any user",
                "Basic realm=\"abide\", Bearer",
            ),
        };
        let mut response = error_response(StatusCode::UNAUTHORIZED, message);
        response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
        response
    }

    fn is_valid_token(&self, presented: Option<String>) -> bool {
        let token = self.token.as_ref().map(Reloadable::get);
        presented
            .zip(token)
            .is_some_and(|(presented, token)| !token.is_empty() && constant_time_eq(&presented, &token))
    }
}

pub(super) fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// The credentials of an authorization scheme, whose name is case-insensitive.
fn scheme_credentials<'a>(headers: &'a HeaderMap, scheme: &str) -> Option<&'a str> {
    let (found, rest) = text(headers, "authorization")?.trim_start().split_once(' ')?;
    found.eq_ignore_ascii_case(scheme).then(|| rest.trim())
}

pub(super) fn bearer(headers: &HeaderMap) -> Option<String> {
    scheme_credentials(headers, "Bearer").map(str::to_owned)
}

fn password(headers: &HeaderMap) -> Option<String> {
    let decoded = String::from_utf8(base64(scheme_credentials(headers, "Basic")?)?).ok()?;
    decoded.split_once(':').map(|(_, password)| password.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_addresses_are_accepted_and_foreign_names_refused() {
        let access = AccessControl {
            listen: SocketAddr::from(([127, 0, 0, 1], 7466)),
            token_required: false,
            token: None,
            people: None,
        };
        for good in ["localhost", "LocalHost:7466", "127.0.0.1:7466", "127.0.0.2", "[::1]:7466", "localhost."]
        {
            assert!(access.is_own_address(good), "{good}");
        }
        for bad in [
            "evil.example",
            "evil.example:7466",
            "127.0.0.1.evil.example",
            "10.0.0.1",
            "",
            "[evil]",
            "localhost.evil",
        ] {
            assert!(!access.is_own_address(bad), "{bad}");
        }
    }
}
