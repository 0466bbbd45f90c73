//! Authentication: apps by code and secret, people by token or by a trusted proxy, agents by token, with their hosts.
//!
//! Secrets are stored as digests and compared in constant time. Only health routes need no credentials. Both lists are
//! files that reload on change. [`crate::access::apps`] reads the apps, [`crate::access`] decides what each may do.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, header};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tracing::warn;

use super::fleet::AgentGuard;
use super::routes::{ApiCall, RouteRule};
pub use crate::access::apps::Apps;
use crate::access::apps::{App, AppLogin, LoginError, SecretValidity, from_hex};
pub use crate::access::{CredentialsError, CredentialsFileError};
use crate::access::{Grant, read_list};
use crate::clock;
use crate::http::{
    CredentialCheck, CredentialKey, CredentialScope, Peer, Reloadable, Revocation, TrustedProxy, base64,
    is_weak,
};
use crate::model::HostKey;

/// Agent tokens and the hosts that each may represent.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Tokens(Vec<(Option<HostKey>, [u8; 32])>);

impl fmt::Debug for Tokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokens({})", self.0.len())
    }
}

impl Tokens {
    pub fn read(file: &Path) -> Result<Tokens, CredentialsFileError> {
        let (tokens, short) = read_list(file, Tokens::parse_with_warnings)?;
        for line in short {
            warn!(file = %file.display(), line, "weak token: the token has fewer than 16 characters");
        }
        Ok(tokens)
    }

    /// Parses lines `CLOUD:IP TOKEN`, or `* TOKEN` for any host. `sha256:HEX` is the digest of a token.
    pub fn parse(text: &str) -> Result<Tokens, CredentialsError> {
        Tokens::parse_with_warnings(text).map(|(tokens, _)| tokens)
    }

    /// Also returns the numbers of lines with a short token.
    fn parse_with_warnings(text: &str) -> Result<(Tokens, Vec<usize>), CredentialsError> {
        let (mut tokens, mut short) = (Vec::new(), Vec::new());
        for (nth, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let number = nth + 1;
            let (host, token) =
                line.split_once(char::is_whitespace).ok_or(CredentialsError::TokenLine { line: number })?;
            let host = match host {
                "*" => None,
                host => Some(host.parse().map_err(|_| CredentialsError::TokenHost { line: number })?),
            };
            if token.trim().contains(char::is_whitespace) {
                return Err(CredentialsError::ExtraFields { line: number });
            }
            let digest = match token.trim().strip_prefix("sha256:") {
                Some(hex) => from_hex(hex).ok_or(CredentialsError::TokenDigest { line: number })?,
                None => Sha256::digest(token.trim().as_bytes()).into(),
            };
            if is_weak(token.trim()) {
                short.push(number);
            }
            tokens.push((host, digest));
        }
        Ok((Tokens(tokens), short))
    }

    pub fn allow(&self, token: &str, host: &HostKey) -> bool {
        let for_host = |known: &Option<HostKey>| known.as_ref().is_none_or(|known| known == host);
        self.compare(token, for_host)
    }

    pub fn is_known(&self, token: &str) -> bool {
        self.compare(token, |_| true)
    }

    /// The token of a peer as a unit of limits.
    pub fn credential_key(&self, token: &str, peer: IpAddr) -> CredentialKey {
        match self.compare(token, Option::is_none) {
            true => CredentialKey::of_all_hosts(token, peer),
            false => CredentialKey::new(CredentialScope::OneHost, token),
        }
    }

    /// Compares every token, so that the duration reveals nothing.
    fn compare(&self, token: &str, counts: impl Fn(&Option<HostKey>) -> bool) -> bool {
        let digest: [u8; 32] = Sha256::digest(token.as_bytes()).into();
        let same =
            |(host, known): &(Option<HostKey>, [u8; 32])| bool::from(known.ct_eq(&digest)) & counts(host);
        self.0.iter().fold(false, |found, one| found | same(one))
    }
}

/// Longest wait for a time of the wall clock.
const MAX_CLOCK_WAIT: Duration = Duration::from_secs(30);

/// Known apps and tokens, and the request rate of each app.
pub struct Authenticator {
    apps: Reloadable<Apps>,
    tokens: Reloadable<Tokens>,
    /// Proxies that authenticate people.
    proxy: Option<Arc<TrustedProxy>>,
    /// Token bucket per app: remaining requests and time of the last update.
    rates: Mutex<HashMap<String, (f64, Instant)>>,
}

impl Authenticator {
    pub fn new(apps: Reloadable<Apps>, tokens: Reloadable<Tokens>) -> Authenticator {
        Authenticator { apps, tokens, proxy: None, rates: Mutex::default() }
    }

    /// Accepts people that these proxies authenticated.
    pub fn with_proxy(self, proxy: Option<Arc<TrustedProxy>>) -> Authenticator {
        Authenticator { proxy, ..self }
    }

    pub fn apps(&self) -> Arc<Apps> {
        self.apps.get()
    }

    pub fn tokens(&self) -> Arc<Tokens> {
        self.tokens.get()
    }

    /// Checks whether the secret of a login is still valid.
    pub fn app_credential_check(self: &Arc<Authenticator>, login: &AppLogin<'_>) -> CredentialCheck {
        let (authenticator, code, secret) = (Arc::clone(self), login.app.code.clone(), login.secret);
        Box::new(move || authenticator.apps().validity(&code, secret.as_ref(), clock::now()).is_some())
    }

    /// Checks whether a token of `tokens` is still listed.
    pub fn token_credential_check(
        self: &Arc<Authenticator>,
        tokens: &Arc<Tokens>,
        token: &str,
    ) -> CredentialCheck {
        let (authenticator, seen, token) = (Arc::clone(self), Arc::clone(tokens), token.to_owned());
        Box::new(move || {
            let tokens = authenticator.tokens();
            Arc::ptr_eq(&tokens, &seen) || tokens.is_known(&token)
        })
    }

    /// Resolves when the secret of a login is removed or expires, or when the app may no longer do what `needs` checks.
    pub fn app_revocation(
        &self,
        login: &AppLogin<'_>,
        needs: impl Fn(&Grant) -> bool + Send + Sync + 'static,
    ) -> Revocation {
        let (code, secret) = (login.app.code.clone(), login.secret);
        let mut apps = self.apps.subscribe();
        Box::pin(async move {
            loop {
                let current = Arc::clone(&apps.borrow_and_update());
                let may = current.find(&code).is_some_and(|app| needs(app.grant()));
                let wait = match current.validity(&code, secret.as_ref(), clock::now()).filter(|_| may) {
                    None => return,
                    Some(SecretValidity::Unlimited) => None,
                    // The wall clock may be set: it is read again after a while.
                    Some(SecretValidity::Until(at)) => {
                        let left = u64::try_from(at.0.saturating_sub(clock::now().0)).unwrap_or(0);
                        Some(Duration::from_millis(left).min(MAX_CLOCK_WAIT))
                    }
                };
                let changed = async {
                    // Without a sender the apps never change.
                    if apps.changed().await.is_err() {
                        std::future::pending::<()>().await;
                    }
                };
                match wait {
                    Some(wait) => drop(tokio::time::timeout(wait, changed).await),
                    None => changed.await,
                }
            }
        })
    }

    /// Resolves when a token may no longer represent these hosts.
    pub fn token_revocation(&self, token: &str, hosts: Vec<HostKey>) -> Revocation {
        let token = token.to_owned();
        self.tokens.revocation(move |tokens| hosts.iter().all(|host| tokens.allow(&token, host)))
    }

    /// Token bucket: refills `rate` requests per second and holds as many.
    pub fn within_rate(&self, app: &str, rate: u32) -> bool {
        let mut rates = self.rates.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let (now, rate) = (Instant::now(), f64::from(rate));
        let (left, last) = match rates.get_mut(app) {
            Some(bucket) => bucket,
            None => rates.entry(app.to_owned()).or_insert((rate, now)),
        };
        *left = (*left + now.duration_since(*last).as_secs_f64() * rate).min(rate);
        *last = now;
        let may = *left >= 1.0;
        if may {
            *left -= 1.0;
        }
        may
    }
}

/// App credentials in a body or a header.
#[derive(Deserialize)]
pub struct Credentials {
    bk_app_code: Option<String>,
    bk_app_secret: Option<String>,
    bk_username: Option<String>,
}

impl Credentials {
    /// The user on whose behalf an app calls, as claimed by the app.
    pub fn user(&self) -> Option<String> {
        self.bk_username.clone()
    }
}

/// Code and secret in a header: `X-Bkapi-Authorization` or HTTP Basic.
pub fn header_credentials(headers: &HeaderMap) -> Option<(String, String)> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let header: Option<Credentials> =
        text("x-bkapi-authorization").and_then(|text| serde_json::from_str(text).ok());
    let basic = || {
        let encoded = text(header::AUTHORIZATION.as_str())?.strip_prefix("Basic ")?;
        let decoded = String::from_utf8(base64(encoded)?).ok()?;
        decoded.split_once(':').map(|(code, secret)| (code.to_owned(), secret.to_owned()))
    };
    header.as_ref().and_then(body_credentials).or_else(basic)
}

/// The user that an app claims in its header.
pub(super) fn header_user(headers: &HeaderMap) -> Option<String> {
    let text = headers.get("x-bkapi-authorization")?.to_str().ok()?;
    serde_json::from_str::<Credentials>(text).ok()?.bk_username
}

/// Code and secret in a body, as ESB callers send them. Used if the header has none.
pub fn body_credentials(body: &Credentials) -> Option<(String, String)> {
    Some((body.bk_app_code.clone()?, body.bk_app_secret.clone()?))
}

/// The token of an agent or a person.
pub fn bearer(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::AUTHORIZATION)?.to_str().ok()?.strip_prefix("Bearer ")
}

/// The caller as identified by the header.
pub(super) enum CallerIdentity<'a> {
    App(AppLogin<'a>),
    Agent(&'a AgentGuard),
    /// The header has no credentials; the body may have them.
    Unknown,
    /// An agent call without a token or certificate.
    Missing,
    /// Wrong credentials, with the claimed name.
    Wrong(String, LoginError),
}

impl<'a> CallerIdentity<'a> {
    pub(super) fn app(&self) -> Option<&'a App> {
        match self {
            CallerIdentity::App(login) => Some(login.app),
            CallerIdentity::Agent(_) | CallerIdentity::Unknown => None,
            CallerIdentity::Missing | CallerIdentity::Wrong(..) => None,
        }
    }
}
/// Header of a change by a person that a proxy authenticated. A browser does not send it for a page of another site.
const REQUESTED_WITH: &str = "x-requested-with";

/// Compares the header's credentials regardless of the peer's failures: one caller's failures do not refuse another
/// caller at the same address.
pub(super) fn identify<'a>(
    authenticator: &Authenticator,
    apps: &'a Apps,
    agent: Option<&'a AgentGuard>,
    call: ApiCall,
    parts: &Parts,
) -> CallerIdentity<'a> {
    if call.rule() == RouteRule::Agent {
        return match agent {
            None => CallerIdentity::Missing,
            Some(guard) if guard.is_known() => CallerIdentity::Agent(guard),
            Some(guard) => CallerIdentity::Wrong(guard.claimed_name(), LoginError::Unknown),
        };
    }
    let Some((code, secret)) = header_credentials(&parts.headers) else {
        return identify_person(authenticator, apps, parts);
    };
    match apps.authenticate(&code, &secret, clock::now()) {
        Ok(login) => CallerIdentity::App(login),
        Err(error) => CallerIdentity::Wrong(code, error),
    }
}

/// A person by the header of a trusted proxy, or by a token. Without a users file neither is compared.
fn identify_person<'a>(authenticator: &Authenticator, apps: &'a Apps, parts: &Parts) -> CallerIdentity<'a> {
    let peer = parts.extensions.get::<Peer>().map(|Peer(peer)| peer.ip());
    let proxied = authenticator.proxy.as_ref().zip(peer);
    if let Some(user) = proxied.and_then(|(proxy, peer)| proxy.user(peer, &parts.headers)) {
        let is_read = matches!(parts.method, Method::GET | Method::HEAD);
        let login = match user {
            Err(ambiguous) => Err(LoginError::from(ambiguous)),
            Ok(_) if !is_read && !parts.headers.contains_key(REQUESTED_WITH) => Err(LoginError::OtherSite),
            Ok(name) => apps.authenticate_proxied(name, clock::now()),
        };
        return match login {
            Ok(login) => CallerIdentity::App(login),
            Err(error) => CallerIdentity::Wrong(user.unwrap_or_default().to_owned(), error),
        };
    }
    let Some(token) = bearer(&parts.headers).filter(|_| apps.has_people()) else {
        return CallerIdentity::Unknown;
    };
    match apps.authenticate_token(token.trim(), clock::now()) {
        Ok(login) => CallerIdentity::App(login),
        Err(error) => CallerIdentity::Wrong("a person".to_owned(), error),
    }
}

/// The first eight hex digits of a text's SHA-256.
pub fn short_digest(text: &str) -> String {
    hex::encode(&Sha256::digest(text.as_bytes())[..4])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_come_in_two_places() {
        let parsed = |text: &str| serde_json::from_str::<Credentials>(text).expect("JSON");
        let body = parsed(r#"{"bk_app_code": "a", "bk_app_secret": "s", "bk_username": "admin"}"#);
        let headers = |name: &'static str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().expect("a value"));
            headers
        };
        let is = |code: &str, secret: &str| Some((code.to_owned(), secret.to_owned()));
        let credentials = |headers: &HeaderMap, body: &Credentials| {
            header_credentials(headers).or_else(|| body_credentials(body))
        };
        assert_eq!(credentials(&HeaderMap::new(), &body), is("a", "s"));
        let header = headers("x-bkapi-authorization", r#"{"bk_app_code": "b", "bk_app_secret": "t"}"#);
        assert_eq!(credentials(&header, &body), is("b", "t"), "the header goes first");
        assert_eq!(
            credentials(&headers("authorization", "Basic YzpvcGVuIHNlc2FtZSE="), &body),
            is("c", "open sesame!")
        );
        for nonsense in ["nonsense", "Basic ", "Basic ????", "Basic YQ=="] {
            assert_eq!(credentials(&headers("authorization", nonsense), &parsed("{}")), None);
        }
    }

    #[test]
    fn a_token_speaks_for_its_hosts_and_an_app_has_its_rate() {
        let tokens = Tokens::parse("# ours\n0:10.0.0.1 one\n\n* all-of-them\n").expect("a file");
        let host = |text: &str| text.parse::<HostKey>().expect("a host");
        assert!(tokens.allow("one", &host("0:10.0.0.1")) && !tokens.allow("one", &host("0:10.0.0.2")));
        assert!(tokens.allow("all-of-them", &host("7:10.0.0.2")));
        assert!(!tokens.allow("", &host("0:10.0.0.1")) && !tokens.is_known("One") && tokens.is_known("one"));
        let digest = hex::encode(Sha256::digest(b"one"));
        let hashed = Tokens::parse(&format!("0:10.0.0.1 sha256:{digest}\n")).expect("a file");
        assert!(hashed.allow("one", &host("0:10.0.0.1")) && !hashed.is_known(&format!("sha256:{digest}")));
        for bad in ["hush", "nowhere hush", "* sha256:hush"] {
            let error = Tokens::parse(bad).expect_err(bad).to_string();
            assert!(error.contains("line 1") && !error.contains("hush"), "{error}");
        }
        let authenticator = Authenticator::new(Reloadable::fixed(Apps::default()), Reloadable::fixed(tokens));
        let passed = (0..1000).filter(|_| authenticator.within_rate("a", 10)).count();
        assert!((10..20).contains(&passed), "{passed} of a burst");
        assert!(authenticator.within_rate("b", 10), "others have their own");
    }
}
