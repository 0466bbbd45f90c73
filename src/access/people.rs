//! Users file: people with digests of their tokens, grants and limits.
//!
//! A person has the same scopes as an app, and role `read` unless the file names another. The file has digests only: a
//! person without one can only log in through a trusted proxy. Tokens are found by their digest, without a name.

use std::path::Path;

use serde::Deserialize;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::apps::{App, AppLogin, Apps, CallerEntry, LoginError, SecretDigest, SecretFields, everything};
use super::error::{CredentialsError, CredentialsFileError, read_list};
use super::grant::{AccessRole, Principal};
use super::limits::{AppLimits, LimitsEntry};
use crate::model::Time;

/// Minimum characters of a token that is hashed for the users file. SHA-256 is fast, and a digest does not show a short token.
pub const MIN_TOKEN_CHARS: usize = 16;

/// Maximum characters of a name.
const MAX_NAME_CHARS: usize = 128;

/// The digest of a token, as the users file has it.
pub fn token_digest(token: &str) -> String {
    hex::encode(Sha256::digest(token.as_bytes()))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UsersFile {
    users: Vec<UserEntry>,
    /// Of each person without limits of their own.
    #[serde(default)]
    limits: LimitsEntry,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UserEntry {
    name: String,
    token_sha256: Option<String>,
    tokens: Option<Vec<TokenFields>>,
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
#[serde(deny_unknown_fields)]
struct TokenFields {
    token_sha256: String,
    expires: Option<String>,
}

impl Apps {
    pub fn read_people(file: &Path) -> Result<Apps, CredentialsFileError> {
        read_list(file, Apps::parse_people)
    }

    pub fn parse_people(text: &str) -> Result<Apps, CredentialsError> {
        let file: UsersFile = serde_yaml::from_str(text)
            .map_err(|error| CredentialsError::UsersYaml { line: error.location().map(|at| at.line()) })?;
        let mut people: Vec<App> = Vec::new();
        for (nth, entry) in file.users.into_iter().enumerate() {
            if !is_name(&entry.name) {
                return Err(CredentialsError::PersonName { nth: nth + 1 });
            }
            let person = read_person(entry, file.limits)?;
            let of = || person.grant().principal.clone();
            if people.iter().any(|other| other.code == person.code) {
                return Err(CredentialsError::ListedTwice { of: of() });
            }
            // A token names its person.
            let has_same = |other: &&App| {
                let mut digests = other.secrets.iter().map(|secret| secret.digest);
                digests.any(|digest| person.secrets.iter().any(|own| bool::from(own.digest.ct_eq(&digest))))
            };
            if let Some(other) = people.iter().find(has_same) {
                let other = other.grant().principal.clone();
                return Err(CredentialsError::SameToken { of: of(), other });
            }
            people.push(person);
        }
        Ok(Apps { callers: people, ..Apps::default() })
    }

    /// These callers and the people of a users file.
    pub fn with_people(mut self, people: Apps) -> Apps {
        self.callers.extend(people.callers);
        self
    }

    pub fn has_people(&self) -> bool {
        self.callers.iter().any(App::is_person)
    }

    pub fn find_person(&self, name: &str) -> Option<&App> {
        self.find(&Principal::Person(name.to_owned()).code()).filter(|person| person.is_person())
    }

    /// The person with this token.
    pub fn authenticate_token(&self, token: &str, now: Time) -> Result<AppLogin<'_>, LoginError> {
        self.find_secret(token, App::is_person).ok_or(LoginError::UnknownToken)?.at(now)
    }

    /// A login that was valid before. `None`: its person or token is no longer known, or has expired.
    pub(crate) fn resume(
        &self,
        code: &str,
        secret: Option<&SecretDigest>,
        now: Time,
    ) -> Option<AppLogin<'_>> {
        self.validity(code, secret, now)?;
        Some(AppLogin::resumed(self.find(code)?, secret.copied()))
    }

    /// The person that a trusted proxy named.
    pub fn authenticate_proxied(&self, name: &str, now: Time) -> Result<AppLogin<'_>, LoginError> {
        let unknown = || LoginError::UnknownPerson { name: name.to_owned() };
        AppLogin::resumed(self.find_person(name).ok_or_else(unknown)?, None).at(now)
    }
}

fn is_name(name: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._@+-".contains(c);
    !name.is_empty() && name.len() <= MAX_NAME_CHARS && name.chars().all(is_allowed)
}

fn read_person(entry: UserEntry, default_limits: LimitsEntry) -> Result<App, CredentialsError> {
    let principal = Principal::Person(entry.name);
    let secret = |digest: String, expires: Option<String>| SecretFields {
        secret: None,
        secret_sha256: Some(digest),
        expires,
    };
    let secrets = match (entry.token_sha256, entry.tokens) {
        (Some(_), Some(_)) => return Err(CredentialsError::NoTokenDigest { of: principal }),
        (one, None) => one.into_iter().map(|digest| secret(digest, None)).collect(),
        (None, Some(many)) => many.into_iter().map(|one| secret(one.token_sha256, one.expires)).collect(),
    };
    App::read(CallerEntry {
        principal,
        secrets,
        role: entry.role,
        // A person who is only listed changes nothing.
        default_role: AccessRole::Read,
        namespaces: entry.namespaces,
        hosts: entry.hosts,
        users: entry.users,
        owners: entry.owners,
        expires: entry.expires,
        limits: AppLimits::of(entry.limits.unwrap_or_default(), default_limits),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;

    fn at(text: &str) -> Time {
        clock::read(text).expect("a time")
    }

    #[test]
    fn a_token_names_its_person_until_it_expires() {
        let file = format!(
            "users:\n  - {{name: ann, token_sha256: {}, role: operate, namespaces: [web]}}\n  - {{name: bob@example.org, \
             tokens: [{{token_sha256: {}, expires: 2030-01-01}}, {{token_sha256: {}}}], expires: 2031-01-01}}\n  - {{name: eve}}\n",
            token_digest("token of ann"),
            token_digest("old token of bob"),
            token_digest("new token of bob"),
        );
        let people = Apps::parse_people(&file).expect("a file");
        let login =
            |token: &str, now: &str| people.authenticate_token(token, at(now)).map(|login| login.info());
        let ann = login("token of ann", "2029-01-01T00:00:00Z").expect("known");
        assert_eq!(
            (ann.person.as_deref(), ann.app.as_str(), ann.role.as_str()),
            (Some("ann"), "person:ann", "operate")
        );
        let bob = login("old token of bob", "2029-01-01T00:00:00Z").expect("known");
        assert_eq!(
            (bob.person.as_deref(), bob.role.as_str()),
            (Some("bob@example.org"), "read"),
            "the default role"
        );
        let expired = login("old token of bob", "2030-01-01T00:00:00Z").expect_err("expired").to_string();
        assert_eq!(expired, "the secret of person bob@example.org expired at 2030-01-01T00:00:00Z");
        assert!(login("new token of bob", "2030-06-01T00:00:00Z").is_ok());
        assert!(login("new token of bob", "2031-01-01T00:00:00Z").is_err(), "the person has expired");
        for wrong in ["", "Token of ann", &token_digest("token of ann")] {
            assert_eq!(login(wrong, "2029-01-01T00:00:00Z"), Err(LoginError::UnknownToken), "{wrong}");
        }
    }

    #[test]
    fn people_and_apps_are_two_kinds_of_callers() {
        let apps = Apps::parse("apps: [{code: ann, secret: of the app}]").expect("a file");
        let digest = token_digest("of the person");
        let people =
            format!("users: [{{name: ann, token_sha256: {digest}}}, {{name: sso, expires: 2030-01-01}}]");
        let all = apps.with_people(Apps::parse_people(&people).expect("a file"));
        let now = at("2029-01-01T00:00:00Z");
        assert!(all.authenticate("ann", "of the app", now).is_ok());
        for code in ["ann", "person:ann"] {
            assert!(all.authenticate(code, "of the person", now).is_err(), "{code}");
        }
        assert!(
            all.authenticate_token("of the person", now).is_ok()
                && all.authenticate_token("of the app", now).is_err()
        );
        assert!(all.authenticate_proxied("sso", now).is_ok() && all.authenticate_proxied("ann", now).is_ok());
        assert!(
            all.authenticate_proxied("sso", at("2030-01-01T00:00:00Z")).is_err(),
            "the person has expired"
        );
        for name in ["Ann", "an", "ann2", "", "person:ann"] {
            assert!(all.authenticate_proxied(name, now).is_err(), "{name}");
        }
        let missing = all.find_person("ann").expect("a person").grant().check_role(AccessRole::Operate);
        assert_eq!(missing.expect_err("refused").to_string(), "person ann lacks role operate");
    }

    #[test]
    fn an_invalid_file_is_refused_and_never_has_a_token() {
        let digest = token_digest("a");
        for text in [
            "users: [{name: ann, token: hush}]".to_owned(),
            "users: [{name: ann, token_sha256: hush}]".to_owned(),
            "users: [{name: ann, tokens: [hush]}]".to_owned(),
            "users: [{name: 'person:hush'}]".to_owned(),
            "users: [{name: ''}]".to_owned(),
            "users: [{name: ann}, {name: ann}]".to_owned(),
            format!("users: [{{name: ann, token_sha256: {digest}}}, {{name: bob, token_sha256: {digest}}}]"),
            format!("users: [{{name: ann, token_sha256: {digest}, tokens: [{{token_sha256: {digest}}}]}}]"),
            "users: [{name: ann, role: root}]".to_owned(),
            "users: [{name: ann, expires: soon}]".to_owned(),
            "apps: [{code: ann, secret: hush}]".to_owned(),
        ] {
            let error = Apps::parse_people(&text).expect_err(&text).to_string();
            assert!(!error.contains("hush"), "{error}");
        }
    }
}
