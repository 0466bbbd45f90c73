//! Old specs out of the history of manifests: for targets that tell digests at best, and a disk that knows nothing.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::info;

use super::source::git::GitConfig;
use super::source::git::work_tree::{self, RepositoryPath};
use crate::manifest::Limits;
use crate::model::{InstanceKey, SpecRevision};
use crate::reconcile::Caps;
use crate::reconcile::spec_recovery::{OldSpecs, matches};

/// The longest that it may take: what is not found by then is planned without.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(10);

/// Where older manifests are.
#[derive(Clone, Debug)]
pub enum ManifestHistory {
    /// In the repositories that these lie in.
    Paths(Vec<PathBuf>),
    /// In the mirror of what is followed.
    Git(Box<GitConfig>),
}

impl ManifestHistory {
    fn repositories(&self, commit: Option<&str>) -> Vec<RepositoryPath> {
        match self {
            ManifestHistory::Paths(paths) => paths.iter().filter_map(|path| work_tree::find(path)).collect(),
            ManifestHistory::Git(config) => {
                commit.map(|commit| work_tree::in_mirror(config, commit)).into_iter().collect()
            }
        }
    }
}

/// What was asked for before, and what was found, for somebody who asks again and again.
#[derive(Default)]
pub struct SearchCache {
    sought: BTreeSet<(InstanceKey, SpecRevision)>,
    found: OldSpecs,
}

impl SearchCache {
    /// What is known of what is missing. Only what was never sought is looked for, on a thread: it may take a while.
    pub async fn lookup(
        &mut self,
        past: &ManifestHistory,
        commit: Option<&str>,
        limits: &Limits,
        missing: BTreeSet<(InstanceKey, SpecRevision)>,
        caps: &Caps,
    ) -> OldSpecs {
        let new: BTreeSet<_> = missing.difference(&self.sought).cloned().collect();
        if !new.is_empty() {
            let (past, commit, limits, caps) =
                (past.clone(), commit.map(str::to_owned), limits.clone(), *caps);
            let look = move || search(&past, commit.as_deref(), &limits, new, &caps);
            self.found.extend(tokio::task::spawn_blocking(look).await.unwrap_or_default());
        }
        self.found.retain(|key, _| missing.contains(key));
        self.sought = missing;
        self.found.clone()
    }
}

/// Looks through the commits that touched these paths, the newest first, until everything that is missing is found.
fn search(
    past: &ManifestHistory,
    commit: Option<&str>,
    limits: &Limits,
    mut missing: BTreeSet<(InstanceKey, SpecRevision)>,
    caps: &Caps,
) -> OldSpecs {
    let (begin, mut found, mut commits) = (Instant::now(), OldSpecs::new(), 0);
    let many = missing.len();
    for inside in past.repositories(commit) {
        inside.history(limits, begin + SEARCH_TIMEOUT, |loaded| {
            commits += 1;
            missing.retain(|(key, revision)| {
                let want = loaded.desired.instances.get(key).filter(|want| matches(want, revision, caps));
                if let Some(want) = want {
                    found.insert((key.clone(), *revision), Arc::clone(&want.spec));
                }
                want.is_none()
            });
            missing.is_empty()
        });
    }
    info!(missing = many, found = found.len(), commits, took = ?begin.elapsed(), "old specs looked for in git");
    found
}
