//! Errors of a git source: why its repository cannot be used, and why a commit is not accepted.

use std::io;
use std::path::PathBuf;

use super::address::GitAddressError;
use super::command::CommandError;
use super::signature::SignatureError;
use super::tree::ListingError;

/// Reason why the repository could not be fetched or read.
#[derive(Debug, thiserror::Error)]
pub enum RepositoryError {
    #[error("cannot use {}: {source}", path.display())]
    Folder { path: PathBuf, source: io::Error },
    #[error("another process has locked {}", mirror.display())]
    InUse { mirror: PathBuf },
    #[error("{url} {source}")]
    Address { url: String, source: GitAddressError },
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error("cannot create the mirror {}: {stderr}", mirror.display())]
    Init { mirror: PathBuf, stderr: String },
    #[error("cannot fetch {reference} from {url}: {source}")]
    Fetch { reference: String, url: String, source: FetchError },
    #[error(
        "cannot read commit {commit}: {source}; the mirror {} can be deleted: it is fetched again",
        mirror.display()
    )]
    Read { commit: String, mirror: PathBuf, source: ReadError },
    #[error("cannot store commit {commit}: {stderr}")]
    Keep { commit: String, stderr: String },
}

#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error("{stderr}")]
    Git { stderr: String },
    #[error("the server declares a shallow history, and --signatures all needs every commit")]
    Shallow,
}

#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error("{stderr}")]
    Git { stderr: String },
    #[error(transparent)]
    Listing(#[from] ListingError),
    #[error("object {0} is missing or damaged")]
    Object(String),
}

/// Reason why a commit does not count as signed.
#[derive(Debug, thiserror::Error)]
pub enum SignatureRefusal {
    #[error("the mirror {} is shallow, so not every commit can be verified; delete it", mirror.display())]
    Shallow { mirror: PathBuf },
    #[error("cannot list the commits since {last}: {stderr}")]
    List { last: String, stderr: String },
    #[error("its history since the last accepted commit has more than {most} commits, too many to verify")]
    TooMany { most: usize },
    #[error("its history contains commit {commit}: {source}")]
    Contains { commit: String, source: SignatureError },
    #[error(transparent)]
    Tip(#[from] SignatureError),
}

/// Reason why a commit declares nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EmptyCommit {
    #[error("the commit has no files")]
    NoFiles,
    #[error("the commit has no path {0}")]
    NoPath(String),
    /// Location in the repository: "in it", or "below PATH".
    #[error("there is no *.yaml, *.yml or *.json {0}")]
    NoManifests(String),
    #[error("no process is declared {0}")]
    NoProcesses(String),
}
