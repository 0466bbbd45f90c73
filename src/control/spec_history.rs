//! Old specs from the git history of manifests: for targets that read back digests at most, and without a ledger.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::info;

use crate::manifest::Limits;
use crate::model::{InstanceKey, SpecRevision};
use crate::reconcile::Caps;
use crate::reconcile::spec_recovery::{OldSpecs, matches};
use crate::source::git::GitConfig;
use crate::source::git::work_tree::{self, RepositoryPath};

/// Time limit of a search: specs that are not found by then stay unknown.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(10);

/// Where older manifests are found.
#[derive(Clone, Debug)]
pub enum ManifestHistory {
    /// In the repositories of these paths.
    Paths(Vec<PathBuf>),
    /// In the mirror of the git source.
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

/// Earlier queries and their results, for repeated lookups.
#[derive(Default)]
pub struct SearchCache {
    sought: BTreeSet<(InstanceKey, SpecRevision)>,
    found: OldSpecs,
}

impl SearchCache {
    /// Known specs for the missing ones. Only new queries search the history, on a blocking thread.
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

/// Searches the commits that touched these paths, newest first, until every missing spec is found.
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
    info!(missing = many, found = found.len(), commits, took = ?begin.elapsed(), "searched git history for old specs");
    found
}
