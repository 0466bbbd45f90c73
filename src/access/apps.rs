//! Callers: their secrets, grants and limits, and the apps file.
//!
//! A caller has one secret, or two during a rotation. A secret is stored as a digest and compared in constant time. An
//! expired secret, and every secret of an expired caller, is refused. [`super::people`] reads the users file.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tracing::warn;

use super::error::{CredentialsError, CredentialsFileError, read_list};
use super::grant::{AccessRole, Grant, Principal};
use super::limits::{AppLimits, LimitsEntry, NamespaceLimitTable};
use crate::clock;
use crate::contract::AccessInfo;
use crate::escape::visible;
use crate::http::{AmbiguousUser, CredentialKey, CredentialScope, is_weak};
use crate::model::Time;

/// Secrets of one caller: two during a rotation.
const MAX_SECRETS: usize = 2;

/// Known callers: the apps of an apps file, and the people of a users file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Apps {
    pub(super) callers: Vec<App>,
    pub(super) namespaces: Arc<NamespaceLimitTable>,
}

/// An app or a person.
#[derive(Clone, PartialEq, Eq)]
pub struct App {
    /// Unique among all callers; see [`Principal::code`].
    pub code: String,
    pub(super) secrets: Vec<AppSecret>,
    grant: Arc<Grant>,
    limits: AppLimits,
    expires: Option<Time>,
}

/// Digest of a secret.
pub(crate) type SecretDigest = [u8; 32];

#[derive(Clone, PartialEq, Eq)]
pub(super) struct AppSecret {
    pub(super) digest: SecretDigest,
    /// The earlier of the secret's and the caller's.
    pub(super) expires: Option<Time>,
}

/// An authenticated caller.
#[derive(Clone, Copy, Debug)]
pub struct AppLogin<'a> {
    pub app: &'a App,
    /// The secret that it used: it may be revoked alone. `None`: a trusted proxy authenticated the person.
    pub(crate) secret: Option<SecretDigest>,
    expires: Option<Time>,
}

/// Reason why credentials are refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoginError {
    #[error("no app is known by these credentials")]
    Unknown,
    #[error("no person is known by this token")]
    UnknownToken,
    #[error("person {} is not in the users file", visible(.name))]
    UnknownPerson { name: String },
    #[error(transparent)]
    AmbiguousUser(#[from] AmbiguousUser),
    /// The request may be of a page of another site, in a browser that is logged in at the proxy.
    #[error("changes of a person behind a proxy need the header X-Requested-With")]
    OtherSite,
    /// The caller knows the secret, so the answer may say this.
    #[error("the secret of {of} expired at {at}")]
    Expired { of: Principal, at: String },
}

impl fmt::Debug for App {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "App({})", self.code)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AppsFile {
    apps: Vec<AppEntry>,
    /// Of each app without limits of its own.
    #[serde(default)]
    limits: LimitsEntry,
    /// Limits of namespaces.
    #[serde(default)]
    namespaces: NamespaceLimitTable,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AppEntry {
    code: String,
    secret: Option<String>,
    secret_sha256: Option<String>,
    secrets: Option<Vec<SecretEntry>>,
    role: Option<String>,
    #[serde(default = "everything")]
    namespaces: Vec<String>,
    #[serde(default = "everything")]
    hosts: Vec<String>,
    users: Option<Vec<String>>,
    owners: Option<Vec<String>>,
    expires: Option<String>,
    limits: Option<LimitsEntry>,
}

#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum SecretEntry {
    Text(String),
    Fields(SecretFields),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SecretFields {
    pub(super) secret: Option<String>,
    pub(super) secret_sha256: Option<String>,
    pub(super) expires: Option<String>,
}

/// An entry of either file.
pub(super) struct CallerEntry {
    pub(super) principal: Principal,
    pub(super) secrets: Vec<SecretFields>,
    pub(super) role: Option<String>,
    pub(super) default_role: AccessRole,
    pub(super) namespaces: Vec<String>,
    pub(super) hosts: Vec<String>,
    pub(super) users: Option<Vec<String>>,
    pub(super) owners: Option<Vec<String>>,
    pub(super) expires: Option<String>,
    pub(super) limits: AppLimits,
}

pub(super) fn everything() -> Vec<String> {
    vec!["*".to_owned()]
}

impl Apps {
    pub fn read(file: &Path) -> Result<Apps, CredentialsFileError> {
        let (apps, short) = read_list(file, Apps::parse_with_warnings)?;
        for app in short {
            warn!(file = %file.display(), ?app, "weak secret: the app's secret has fewer than 16 characters");
        }
        Ok(apps)
    }

    pub fn parse(text: &str) -> Result<Apps, CredentialsError> {
        Apps::parse_with_warnings(text).map(|(apps, _)| apps)
    }

    /// Also returns the codes of apps with a short secret.
    fn parse_with_warnings(text: &str) -> Result<(Apps, Vec<String>), CredentialsError> {
        // The text of the parser's error may quote a secret.
        let file: AppsFile = serde_yaml::from_str(text)
            .map_err(|error| CredentialsError::Yaml { line: error.location().map(|at| at.line()) })?;
        let (mut apps, mut short) = (Vec::new(), Vec::new());
        for entry in file.apps {
            let (app, is_weak) = App::read_app(entry, file.limits)?;
            if apps.iter().any(|other: &App| other.code == app.code) {
                return Err(CredentialsError::ListedTwice { of: Principal::App(app.code) });
            }
            if is_weak {
                short.push(app.code.clone());
            }
            apps.push(app);
        }
        Ok((Apps { callers: apps, namespaces: Arc::new(file.namespaces) }, short))
    }

    pub fn find(&self, code: &str) -> Option<&App> {
        self.callers.iter().find(|app| app.code == code)
    }

    pub(crate) fn namespace_limits(&self) -> &Arc<NamespaceLimitTable> {
        &self.namespaces
    }

    pub fn principals(&self) -> impl Iterator<Item = &Principal> {
        self.callers.iter().map(|app| &app.grant.principal)
    }

    /// The app with these credentials.
    pub fn authenticate(&self, code: &str, secret: &str, now: Time) -> Result<AppLogin<'_>, LoginError> {
        let is_meant = |app: &App| !app.is_person() & bool::from(app.code.as_bytes().ct_eq(code.as_bytes()));
        self.find_secret(secret, is_meant).ok_or(LoginError::Unknown)?.at(now)
    }

    /// The caller with this secret. Compares every secret, so that the duration reveals nothing.
    pub(super) fn find_secret(&self, secret: &str, is_meant: impl Fn(&App) -> bool) -> Option<AppLogin<'_>> {
        let digest: SecretDigest = Sha256::digest(secret.as_bytes()).into();
        let mut found = None;
        for app in &self.callers {
            let is_meant = is_meant(app);
            for secret in &app.secrets {
                if is_meant & bool::from(secret.digest.ct_eq(&digest)) {
                    found = Some(AppLogin { app, secret: Some(digest), expires: secret.expires });
                }
            }
        }
        found
    }

    /// The time until which a login that was valid stays valid. `None`: its secret is no longer known or has expired.
    pub(crate) fn validity(
        &self,
        code: &str,
        secret: Option<&SecretDigest>,
        now: Time,
    ) -> Option<SecretValidity> {
        let app = self.find(code)?;
        let expires = match secret {
            None => app.expires,
            Some(secret) => app.secrets.iter().find(|known| bool::from(known.digest.ct_eq(secret)))?.expires,
        };
        match expires {
            Some(expires) if expires <= now => None,
            Some(expires) => Some(SecretValidity::Until(expires)),
            None => Some(SecretValidity::Unlimited),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SecretValidity {
    Unlimited,
    Until(Time),
}

impl App {
    /// Also whether one of its secrets is short.
    fn read_app(entry: AppEntry, default_limits: LimitsEntry) -> Result<(App, bool), CredentialsError> {
        let principal = Principal::App(entry.code);
        let own = SecretFields { secret: entry.secret, secret_sha256: entry.secret_sha256, expires: None };
        let written: Vec<SecretFields> = match entry.secrets {
            None => vec![own],
            Some(_) if own.secret.is_some() || own.secret_sha256.is_some() => {
                return Err(CredentialsError::NoSecret { of: principal });
            }
            Some(many) if many.is_empty() => return Err(CredentialsError::SecretCount { of: principal }),
            Some(many) => many.into_iter().map(SecretEntry::fields).collect(),
        };
        let is_short = written.iter().any(|one| one.secret.as_deref().is_some_and(is_weak));
        let app = App::read(CallerEntry {
            principal,
            secrets: written,
            role: entry.role,
            default_role: AccessRole::default(),
            namespaces: entry.namespaces,
            hosts: entry.hosts,
            users: entry.users,
            owners: entry.owners,
            expires: entry.expires,
            limits: AppLimits::of(entry.limits.unwrap_or_default(), default_limits),
        })?;
        Ok((app, is_short))
    }

    pub(super) fn read(entry: CallerEntry) -> Result<App, CredentialsError> {
        let of = || entry.principal.clone();
        let time = |text: &Option<String>| match text {
            Some(text) => read_time(text).map(Some).ok_or_else(|| CredentialsError::Expiry { of: of() }),
            None => Ok(None),
        };
        if entry.secrets.len() > MAX_SECRETS {
            return Err(CredentialsError::SecretCount { of: of() });
        }
        let own_expires = time(&entry.expires)?;
        let mut secrets = Vec::new();
        for one in entry.secrets {
            let expires = [own_expires, time(&one.expires)?].into_iter().flatten().min();
            secrets.push(AppSecret { digest: one.digest(&entry.principal)?, expires });
        }
        let role = match entry.role.as_deref().map(str::parse) {
            None => entry.default_role,
            Some(Ok(role)) => role,
            Some(Err(_)) => return Err(CredentialsError::Role { of: of() }),
        };
        let code = entry.principal.code();
        let grant = Grant {
            principal: entry.principal,
            role,
            namespaces: entry.namespaces,
            hosts: entry.hosts,
            users: entry.users,
            owners: entry.owners,
        };
        Ok(App { code, secrets, grant: Arc::new(grant), limits: entry.limits, expires: own_expires })
    }

    pub fn is_person(&self) -> bool {
        matches!(self.grant.principal, Principal::Person(_))
    }

    pub fn grant(&self) -> &Arc<Grant> {
        &self.grant
    }

    pub fn limits(&self) -> AppLimits {
        self.limits
    }

    /// The time at which it or its last secret expired, if that has passed.
    pub fn expired(&self, now: Time) -> Option<Time> {
        if let Some(at) = self.expires.filter(|at| *at <= now) {
            return Some(at);
        }
        let ends = self.secrets.iter().map(|secret| secret.expires.filter(|at| *at <= now));
        ends.collect::<Option<Vec<Time>>>()?.into_iter().max()
    }

    /// The caller as a unit of connection limits.
    pub fn credential_key(&self) -> CredentialKey {
        CredentialKey::new(CredentialScope::Clients, &self.code)
    }
}

impl<'a> AppLogin<'a> {
    /// A login that was proved before, or without a secret by a trusted proxy.
    pub(super) fn resumed(person: &'a App, secret: Option<SecretDigest>) -> AppLogin<'a> {
        let known = |digest| person.secrets.iter().find(|known| known.digest == digest);
        let expires = secret.and_then(known).map_or(person.expires, |known| known.expires);
        AppLogin { app: person, secret, expires }
    }

    /// The login, unless its secret or the caller has expired.
    pub(super) fn at(self, now: Time) -> Result<AppLogin<'a>, LoginError> {
        match self.expires.filter(|expires| *expires <= now) {
            Some(at) => {
                let of = self.app.grant.principal.clone();
                Err(LoginError::Expired { of, at: at.to_string() })
            }
            None => Ok(self),
        }
    }

    pub fn info(&self) -> AccessInfo {
        let Grant { principal, role, namespaces, hosts, users, owners } = (**self.app.grant()).clone();
        let (role, expires) = (role.word().to_owned(), self.expires.map(|at| at.to_string()));
        let person = match principal {
            Principal::App(_) => None,
            Principal::Person(name) => Some(name),
        };
        AccessInfo { app: self.app.code.clone(), person, role, namespaces, hosts, users, owners, expires }
    }
}

impl SecretEntry {
    fn fields(self) -> SecretFields {
        match self {
            SecretEntry::Text(secret) => {
                SecretFields { secret: Some(secret), secret_sha256: None, expires: None }
            }
            SecretEntry::Fields(fields) => fields,
        }
    }
}

impl SecretFields {
    fn digest(self, of: &Principal) -> Result<SecretDigest, CredentialsError> {
        match (self.secret, self.secret_sha256) {
            (Some(secret), None) if !secret.is_empty() => Ok(Sha256::digest(secret.as_bytes()).into()),
            (None, Some(hex)) => from_hex(&hex).ok_or_else(|| CredentialsError::Digest { of: of.clone() }),
            _ => Err(CredentialsError::NoSecret { of: of.clone() }),
        }
    }
}

/// A time in RFC 3339, or the begin of a day in UTC.
fn read_time(text: &str) -> Option<Time> {
    clock::read(text).or_else(|| clock::read(&format!("{text}T00:00:00Z")))
}

pub(crate) fn from_hex(text: &str) -> Option<SecretDigest> {
    let mut bytes = [0; 32];
    hex::decode_to_slice(text, &mut bytes).ok().map(|()| bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "apps:\n  - {code: shop, secret: hush, namespaces: [web, 'web-*']}\n  - {code: all, secret_sha256: \
                        9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08}\n";

    #[test]
    fn apps_authenticate_within_their_namespaces() {
        let apps = Apps::parse(FILE).expect("a file");
        let may = |code: &str, secret: &str, namespace: &str| {
            let login = apps.authenticate(code, secret, Time(0)).expect("known");
            login.app.grant().check_namespace(namespace).is_ok()
        };
        assert!(may("shop", "hush", "web") && may("shop", "hush", "web-2") && !may("shop", "hush", "db"));
        assert!(may("all", "test", "anything"));
        for (code, secret) in
            [("shop", "Hush"), ("shop", ""), ("", "hush"), ("all", "hush"), ("unknown", "hush")]
        {
            let refused = apps.authenticate(code, secret, Time(0)).expect_err("refused");
            assert_eq!(refused, LoginError::Unknown, "{code} {secret}");
        }
        assert!(!format!("{apps:?}").contains("hush"));
    }

    #[test]
    fn two_secrets_are_valid_at_a_time_and_each_until_it_expires() {
        let file = "apps:\n  - {code: a, secrets: [{secret: old-one, expires: 2030-01-01}, new-one], \
                    expires: '2031-01-01T00:00:00Z', role: read}\n";
        let apps = Apps::parse(file).expect("a file");
        let at = |text: &str| clock::read(text).expect("a time");
        let login = |secret: &str, now: &str| apps.authenticate("a", secret, at(now));
        assert!(login("old-one", "2029-12-31T23:59:59Z").is_ok());
        assert!(login("new-one", "2030-06-01T00:00:00Z").is_ok());
        let expired = login("old-one", "2030-01-01T00:00:00Z").expect_err("expired").to_string();
        assert_eq!(expired, "the secret of app a expired at 2030-01-01T00:00:00Z");
        assert!(login("new-one", "2031-01-01T00:00:00Z").is_err(), "the app has expired");
        let info = login("new-one", "2030-06-01T00:00:00Z").expect("known").info();
        assert_eq!((info.role.as_str(), info.expires.as_deref()), ("read", Some("2031-01-01T00:00:00Z")));
    }

    #[test]
    fn an_invalid_file_is_refused_without_its_secrets() {
        for text in [
            "apps: [{code: a}]",
            "apps: [{code: a, secret: x, secret_sha256: y}]",
            "apps: [{code: a, secret_sha256: hush}]",
            "apps: [{code: a, secret: hush}, {code: a, secret: x}]",
            "apps: [{code: a, secret: [hush]}]",
            "apps: [{code: a, secret: hush, role: root}]",
            "apps: [{code: a, secret: hush, expires: soon}]",
            "apps: [{code: a, secrets: []}]",
            "apps: [{code: a, secrets: [hush, x, y]}]",
            "apps: [{code: a, secret: hush, secrets: [x]}]",
            "apps: [{code: a, secret: hush, scopes: [x]}]",
            "apps: [{code: a, secret: hush, limits: {processes: 1}}]",
            "nothing",
        ] {
            let error = Apps::parse(text).expect_err(text).to_string();
            assert!(!error.contains("hush"), "{error}");
        }
    }
}
