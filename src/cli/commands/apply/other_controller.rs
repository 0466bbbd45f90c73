//! Other-controller check: finds a running controller of the same owner that would undo an apply.
//!
//! A controller that follows the same source only warns if it is behind. One that follows another source, or a commit that
//! these manifests do not contain, refuses the apply without --force. A controller with `--follow no` or a pin does not
//! follow its source, and does not count.

use std::path::PathBuf;

use crate::cli::Failure;
use crate::cli::commands::watch::source::short_id;
use crate::cli::output::print::{Printer, visible};
use crate::cli::target::ConnectedTarget;
use crate::contract::PublishedStatus;
use crate::engine::other_sources::contains as is_within;
use crate::engine::published_status;
use crate::source::git::work_tree::{self, Containment};

/// Relation of a running controller to an apply.
#[derive(Debug, PartialEq, Eq)]
enum Relation {
    /// It has the same manifests, or reads them soon.
    Same,
    /// It follows an earlier commit of the same source.
    Behind,
    OtherSource,
    /// It follows a commit that the applied manifests do not contain.
    OtherCommit,
}

/// Refuses an apply that a running controller would undo, unless it is forced.
pub async fn check(
    live: &ConnectedTarget,
    owner: &str,
    paths: &[PathBuf],
    force: bool,
    printer: &Printer,
) -> Result<(), Failure> {
    // An unreadable status decides nothing: without it, an apply works as before.
    let Ok(leases) = live.state.leases().await else { return Ok(()) };
    let Ok(all) = published_status::read(&live.state, &leases).await else { return Ok(()) };
    let is_following = |status: &&PublishedStatus| {
        status.running && status.owner == owner && status.follow && status.pinned.is_none()
    };
    let Some(other) = all.iter().find(is_following) else { return Ok(()) };
    let source = work_tree::of_paths(paths);
    let contains = |commit: &str| paths.first().and_then(|path| work_tree::find(path)?.contains(commit));
    let relation = relation(other, &source, contains);
    let who = format!(
        "a controller on {} (process {}) follows {}{} for owner {owner:?}",
        visible(&other.host),
        other.pid,
        visible(&other.source),
        other.commit.as_deref().map(|id| format!(" at commit {}", short_id(id))).unwrap_or_default(),
    );
    let message = match relation {
        Relation::Same => return Ok(()),
        Relation::Behind => {
            printer.warning(&format!("{who}: it undoes this apply until its source has these manifests"));
            return Ok(());
        }
        Relation::OtherSource => format!("{who}: it would undo an apply from {}", visible(&source)),
        Relation::OtherCommit => {
            format!("{who}, which these manifests do not contain: it would undo an apply")
        }
    };
    if force {
        printer.warning(&message);
        return Ok(());
    }
    Err(Failure::refused("OtherController", message)
        .hint("change its source, stop it, or use --owner; --force applies anyway"))
}

/// `contains`: whether the applied work tree contains a commit; `None`: it is not in a work tree.
fn relation(
    other: &PublishedStatus,
    source: &str,
    contains: impl Fn(&str) -> Option<Containment>,
) -> Relation {
    // A directory and a directory in it declare the same processes.
    if !is_within(&other.source, source) && !is_within(source, &other.source) {
        return Relation::OtherSource;
    }
    match other.commit.as_deref().and_then(contains) {
        Some(Containment::Head) | None => Relation::Same,
        Some(Containment::Earlier) => Relation::Behind,
        Some(Containment::No) => Relation::OtherCommit,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_controller_of_another_source_or_commit_is_in_the_way() {
        let status = |source: &str, commit: Option<&str>| PublishedStatus {
            source: source.to_owned(),
            commit: commit.map(str::to_owned),
            ..PublishedStatus::default()
        };
        let is = |source: &str, commit: Option<&str>, known: Option<Containment>| {
            relation(&status(source, commit), "/srv/m", |_| known)
        };
        assert_eq!(is("/srv/m", None, None), Relation::Same);
        assert_eq!(is("/srv/other", None, None), Relation::OtherSource);
        assert_eq!(is("/srv/m", Some("a"), Some(Containment::Head)), Relation::Same);
        assert_eq!(is("/srv/m", Some("a"), Some(Containment::Earlier)), Relation::Behind);
        assert_eq!(is("/srv/m", Some("a"), Some(Containment::No)), Relation::OtherCommit);
    }
}
