//! Configuration of a git source: addresses and names that git could misinterpret are refused.

use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use super::address::{self, Address, masked};
use super::command::PROTOCOLS;
use super::error::RepositoryError;
use super::signature;
use crate::manifest::Limits;

/// Commits that must be signed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Signatures {
    /// Only the tip: its signer vouches for everything that it contains.
    #[default]
    Tip,
    /// Each commit that is reachable from the tip and not from the last accepted commit.
    All,
}

/// A branch of a repository, and how to follow it.
#[derive(Clone)]
pub struct GitConfig {
    pub url: String,
    /// A branch, a tag, or `HEAD`: the server's default branch.
    pub reference: String,
    /// Inside the repository; empty for all of it.
    pub path: PathBuf,
    /// Only commits with a signature by a key in this file.
    pub signers: Option<PathBuf>,
    /// Commits that must be signed.
    pub signatures: Signatures,
    /// Accept this commit though it does not descend from the last one.
    pub accept_rewind: Option<String>,
    /// Accept a connection that is neither encrypted nor authenticated.
    pub insecure: bool,
    /// Fetch interval.
    pub interval: Duration,
    pub fetch: FetchLimits,
    /// Directory of the mirrors.
    pub folder: PathBuf,
    /// Owner of the manifests.
    pub owner: String,
    pub limits: Limits,
}

/// Limits of one fetch.
#[derive(Clone, Copy, Debug)]
pub struct FetchLimits {
    pub timeout: Duration,
    /// Maximum size of the pack in bytes.
    pub max_pack: u64,
}

impl std::fmt::Debug for GitConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Setting")
            .field("url", &self.shown_url())
            .field("reference", &self.reference)
            .finish_non_exhaustive()
    }
}

/// A setting that is refused, and what to write instead.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ConfigError {
    pub message: String,
    pub hint: &'static str,
}

impl GitConfig {
    pub fn validated(mut self) -> Result<GitConfig, ConfigError> {
        self.url = url(&self.url)?;
        if let Some((scheme, host)) = address::plain(&self.url).filter(|_| !self.insecure) {
            let message = format!("--git: refusing plain {scheme} to {host} (not a loopback address)");
            let hint = "use https or ssh, or pass --insecure-git to accept manifests that anyone on the network path can forge";
            return Err(ConfigError { message, hint });
        }
        check_reference(&self.reference)?;
        self.path = path(&self.path)?;
        if let Some(signers) = &self.signers {
            let whole = std::path::absolute(signers).unwrap_or_else(|_| signers.clone());
            let hint = "FILE is an ssh allowed-signers file, or what `gpg --export` writes";
            signature::keys(&whole)
                .map_err(|error| ConfigError { message: format!("--verify-signatures: {error}"), hint })?;
            self.signers = Some(whole);
        }
        if let Some(commit) = &mut self.accept_rewind {
            *commit = commit.to_ascii_lowercase();
            if !(12..=64).contains(&commit.len()) || !commit.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                let message = format!("--accept-rewind: {commit:?} is not a commit id");
                return Err(ConfigError { message, hint: "pass the whole id that the error shows" });
            }
        }
        Ok(self)
    }

    /// The address for git.
    pub fn address(&self) -> Result<Address, RepositoryError> {
        address::parse(&self.url).map_err(|source| RepositoryError::Address { url: self.shown_url(), source })
    }

    /// The address for display.
    pub fn shown_url(&self) -> String {
        masked(&self.url)
    }
}

fn url(url: &str) -> Result<String, ConfigError> {
    let refused = |why: &str, hint: &'static str| {
        Err(ConfigError { message: format!("--git: {:?} {why}", masked(url)), hint })
    };
    let usual = "pass https://HOST/PATH, ssh://USER@HOST/PATH, USER@HOST:PATH, file:///PATH or a path";
    if url.is_empty() {
        return refused("is not a URL", usual);
    }
    if url.starts_with('-') {
        return refused("begins with a dash: git would parse it as an option", usual);
    }
    if url.chars().any(char::is_control) {
        return refused("contains a control character", usual);
    }
    if let Err(error) = address::parse(url) {
        return refused(
            &error.to_string(),
            "write such characters as %2F, %3F, %23 and %40; or use a credential helper of git",
        );
    }
    // `ext::sh -c …` and the like name a program.
    let scheme = url.split("://").next().filter(|scheme| scheme.len() < url.len());
    let helper = url.split_once("::").map(|(name, _)| name).filter(|name| is_word(name));
    match (helper, scheme) {
        (Some(_), _) => refused("names a program to run, not a repository", usual),
        (None, Some(scheme)) if PROTOCOLS.contains(&scheme) => Ok(url.to_owned()),
        (None, Some(scheme)) if is_word(scheme) => refused("uses a protocol that is not allowed", usual),
        // HOST:PATH is ssh, as in git: a colon before the first slash.
        (None, _) if url.split('/').next().is_some_and(|first| first.contains(':')) => Ok(url.to_owned()),
        (None, _) => {
            let whole = std::path::absolute(url).unwrap_or_else(|_| PathBuf::from(url));
            Ok(whole.to_string_lossy().into_owned())
        }
    }
}

fn is_word(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte))
}

/// The rules of `git check-ref-format`, without refspec syntax.
fn check_reference(name: &str) -> Result<(), ConfigError> {
    let hint = "pass a branch, a tag or HEAD";
    let refused = |why: &str| Err(ConfigError { message: format!("--ref: {name:?} {why}"), hint });
    if name.is_empty() {
        return refused("is not a name");
    }
    if name.starts_with('-') {
        return refused("begins with a dash: git would parse it as an option");
    }
    let strange = |c: char| c.is_control() || c.is_whitespace() || "~^:?*[\\".contains(c);
    let bad_part = |part: &str| part.is_empty() || part.starts_with('.') || part.ends_with(".lock");
    if name.starts_with('+')
        || name.chars().any(strange)
        || name.split('/').any(bad_part)
        || name.contains("..")
        || name.contains("@{")
        || name.ends_with('.')
        || name == "@"
    {
        return refused("is not a valid branch or tag name");
    }
    Ok(())
}

fn path(path: &Path) -> Result<PathBuf, ConfigError> {
    let refused = |why: &str| {
        let hint = "pass a directory or file inside the repository, relative to its root";
        Err(ConfigError { message: format!("--path: {:?} {why}", path.display().to_string()), hint })
    };
    if path.as_os_str().as_encoded_bytes().starts_with(b"-") {
        return refused("begins with a dash: git would parse it as an option");
    }
    let mut inside = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::Normal(name) => inside.push(name),
            Component::ParentDir | Component::RootDir | Component::Prefix(_) => {
                return refused("is outside of the repository");
            }
        }
    }
    Ok(inside)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_or_name_that_git_could_misinterpret_is_refused() {
        for good in ["https://h/x", "ssh://git@h/x", "git@h:x.git", "h:x", "file:///x", "/x", "git://h/x"] {
            assert_eq!(url(good).as_deref(), Ok(good), "{good}");
        }
        assert!(url("some/where").is_ok_and(|url| url.starts_with('/')));
        for bad in ["", "-x", "--upload-pack=x", "ext::sh -c x", "fd::3", "a\nb", "ftp://h/x", "hg::x"] {
            assert!(url(bad).is_err(), "{bad}");
        }
        for good in ["main", "HEAD", "refs/heads/a/b", "v1.2", "0123456789abcdef0123456789abcdef01234567"] {
            assert!(check_reference(good).is_ok(), "{good}");
        }
        for bad in
            ["", "-x", "+x", "a:b", "a..b", "a b", "a*", "x.lock", "/x", "a//b", "@", "@{u}", "x^", ".x"]
        {
            assert!(check_reference(bad).is_err(), "{bad}");
        }
        assert_eq!(path(Path::new("./a//b/")), Ok(PathBuf::from("a/b")));
        assert_eq!(path(Path::new(".")), Ok(PathBuf::new()));
        for bad in ["-x", "/x", "../x", "a/../../x"] {
            assert!(path(Path::new(bad)).is_err(), "{bad}");
        }
    }
}
