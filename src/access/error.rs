//! Errors of files of credentials: apps, people and agent tokens. The texts contain no secret.

use std::path::{Path, PathBuf};

use super::grant::Principal;
use crate::permissions::PermissionError;

/// Reason why a file of apps or tokens cannot be used. The texts contain no secret.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsFileError {
    #[error("cannot read {}", file.display())]
    Read { file: PathBuf, source: std::io::Error },
    #[error("{}", file.display())]
    Invalid { file: PathBuf, source: CredentialsError },
    #[error(transparent)]
    Unsafe(#[from] PermissionError),
}

/// Reason why a list of apps or tokens is not valid. The texts contain no secret.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CredentialsError {
    #[error("the app list is not valid YAML of the expected form{}", line_shown(*.line))]
    Yaml { line: Option<usize> },
    #[error("the list of users is not valid YAML of the expected form{}", line_shown(*.line))]
    UsersYaml { line: Option<usize> },
    #[error("{}: {} must be 64 hex digits", quoted(.of), digest_field(.of))]
    Digest { of: Principal },
    #[error("{} needs one of secret, secret_sha256 and a list `secrets` of them", quoted(.of))]
    NoSecret { of: Principal },
    #[error("{} needs one of token_sha256 and a list `tokens` with token_sha256 in each entry", quoted(.of))]
    NoTokenDigest { of: Principal },
    #[error("{}: {} must have one entry, or two during a rotation", quoted(.of), secrets_field(.of))]
    SecretCount { of: Principal },
    #[error("{}: role must be read, operate or admin", quoted(.of))]
    Role { of: Principal },
    #[error("{}: expires must be a time in RFC 3339, or a date", quoted(.of))]
    Expiry { of: Principal },
    #[error("{} is listed twice", quoted(.of))]
    ListedTwice { of: Principal },
    #[error("user {nth} of the list: a name must have 1 to 128 letters, digits and . _ @ + -")]
    PersonName { nth: usize },
    #[error("{} and {} have the same token_sha256", quoted(.of), quoted(.other))]
    SameToken { of: Principal, other: Principal },
    #[error("line {line} must have the form CLOUD:IP TOKEN or * TOKEN")]
    TokenLine { line: usize },
    #[error("line {line}: sha256: must be followed by 64 hex digits")]
    TokenDigest { line: usize },
    #[error("line {line} must begin with CLOUD:IP or *")]
    TokenHost { line: usize },
    #[error("line {line} has extra fields after the token")]
    ExtraFields { line: usize },
}

fn line_shown(line: Option<usize>) -> String {
    line.map_or_else(String::new, |line| format!(" (line {line})"))
}

/// Reads a file of credentials. `parse` also returns warnings.
pub(crate) fn read_list<T>(
    file: &Path,
    parse: impl FnOnce(&str) -> Result<T, CredentialsError>,
) -> Result<T, CredentialsFileError> {
    let text = std::fs::read_to_string(file)
        .map_err(|source| CredentialsFileError::Read { file: file.to_owned(), source })?;
    parse(&text).map_err(|source| CredentialsFileError::Invalid { file: file.to_owned(), source })
}

fn quoted(of: &Principal) -> String {
    match of {
        Principal::App(code) => format!("app {code:?}"),
        Principal::Person(name) => format!("person {name:?}"),
    }
}

fn digest_field(of: &Principal) -> &'static str {
    match of {
        Principal::App(_) => "secret_sha256",
        Principal::Person(_) => "token_sha256",
    }
}

fn secrets_field(of: &Principal) -> &'static str {
    match of {
        Principal::App(_) => "secrets",
        Principal::Person(_) => "tokens",
    }
}
