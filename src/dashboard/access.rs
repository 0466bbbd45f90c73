//! Who is let in: by the name he calls us, by a token, by a signature.

use std::net::{IpAddr, SocketAddr};

use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};

use super::redact::View;
use super::{ErrorResponse, error_response};
use crate::http::{CredentialCheck, Reloadable, Revocation, base64, constant_time_eq};

/// What a caller that is let in has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AuthMethod {
    /// The token, or a signature.
    Shown,
    NotNeeded,
}

/// Marks a refusal of credentials that were shown and are wrong.
#[derive(Clone, Copy)]
pub(super) struct WrongCredentials;

pub(super) fn mark_wrong_credentials(mut response: ErrorResponse, shown: bool) -> ErrorResponse {
    if shown {
        response.extensions_mut().insert(WrongCredentials);
    }
    response
}

pub struct AccessControl {
    /// Where we listen.
    pub listen: SocketAddr,
    /// Reading needs the token, too.
    pub token_required: bool,
    /// `None`: nobody may change anything.
    pub token: Option<Reloadable<String>>,
}

impl AccessControl {
    /// A name in the Host header that leads here only by a trick would let any web page read us through its visitor's
    /// browser. Where a token is asked for, a page cannot have it.
    pub(super) fn check_host_header(&self, parts: &Parts) -> Result<(), ErrorResponse> {
        let host = text(&parts.headers, "host").or_else(|| parts.uri.authority().map(|name| name.as_str()));
        match host {
            Some(host) if self.token_required || self.is_own_address(host) => Ok(()),
            None if self.token_required => Ok(()),
            _ => Err(error_response(
                StatusCode::FORBIDDEN,
                "this name is not ours: call the listener by its address, or as localhost",
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

    /// Resolves when the token that a reader came with is replaced. `None`: the reader came without the token.
    pub(super) fn reader_revocation(&self, parts: &Parts) -> Option<Revocation> {
        let said = bearer(&parts.headers).or_else(|| password(&parts.headers))?;
        let token = self.token.as_ref().filter(|_| self.view(parts) == View::Full)?;
        Some(token.revocation(move |token| !token.is_empty() && constant_time_eq(&said, token)))
    }

    /// Whether the token that a request came with stays the same.
    pub(super) fn credential_check(&self, parts: &Parts) -> CredentialCheck {
        let said = bearer(&parts.headers).or_else(|| password(&parts.headers)).unwrap_or_default();
        let token = self.token.clone();
        Box::new(move || {
            token
                .as_ref()
                .map(Reloadable::get)
                .is_some_and(|token| !token.is_empty() && constant_time_eq(&said, &token))
        })
    }

    /// The token as a browser sends a password is good for reading: it is sent by itself, so never for more.
    pub(super) fn may_read(&self, parts: &Parts) -> Result<AuthMethod, ErrorResponse> {
        let said = bearer(&parts.headers).or_else(|| password(&parts.headers));
        // Where there is no token, no credentials are wrong.
        let shown = said.is_some() && self.token.is_some();
        match self.is_valid_token(said) {
            true => Ok(AuthMethod::Shown),
            // An answer at once to a wrong token would let every user of the machine guess it, unlogged.
            false if shown || self.token_required => Err(mark_wrong_credentials(token_required(), shown)),
            false => Ok(AuthMethod::NotNeeded),
        }
    }

    /// A browser's user asks to see everything.
    pub(super) fn may_log_in(&self, parts: &Parts) -> Result<AuthMethod, ErrorResponse> {
        let said = bearer(&parts.headers).or_else(|| password(&parts.headers));
        let shown = said.is_some();
        match self.is_valid_token(said) {
            true => Ok(AuthMethod::Shown),
            false => Err(mark_wrong_credentials(token_required(), shown)),
        }
    }

    /// Commands and values of the environment are for those who know the token.
    pub(super) fn view(&self, parts: &Parts) -> View {
        match self.is_valid_token(bearer(&parts.headers).or_else(|| password(&parts.headers))) {
            true => View::Full,
            false => View::Redacted,
        }
    }

    pub(super) fn may_change(&self, parts: &Parts) -> Result<AuthMethod, ErrorResponse> {
        let said = bearer(&parts.headers);
        let shown = said.is_some();
        match (&self.token, self.is_valid_token(said)) {
            (_, true) => Ok(AuthMethod::Shown),
            (Some(_), false) => {
                let mut response = error_response(
                    StatusCode::UNAUTHORIZED,
                    "changes need the token: Authorization: Bearer TOKEN",
                );
                response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
                Err(mark_wrong_credentials(response, shown))
            }
            (None, false) => Err(error_response(
                StatusCode::FORBIDDEN,
                "there is no token, so nothing can be changed here",
            )),
        }
    }

    fn is_valid_token(&self, said: Option<String>) -> bool {
        let token = self.token.as_ref().map(Reloadable::get);
        said.zip(token).is_some_and(|(said, token)| !token.is_empty() && constant_time_eq(&said, &token))
    }
}

fn token_required() -> ErrorResponse {
    let mut response = error_response(
        StatusCode::UNAUTHORIZED,
        "a token is needed: Authorization: Bearer, or as the password of any user in a browser",
    );
    response
        .headers_mut()
        .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Basic realm=\"abide\", Bearer"));
    response
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// What comes after a scheme's name, in whatever case that is written.
fn scheme_credentials<'a>(headers: &'a HeaderMap, scheme: &str) -> Option<&'a str> {
    let (said, rest) = text(headers, "authorization")?.trim_start().split_once(' ')?;
    said.eq_ignore_ascii_case(scheme).then(|| rest.trim())
}

fn bearer(headers: &HeaderMap) -> Option<String> {
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
    fn names_that_lead_here_honestly() {
        let access = AccessControl {
            listen: SocketAddr::from(([127, 0, 0, 1], 7466)),
            token_required: false,
            token: None,
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
