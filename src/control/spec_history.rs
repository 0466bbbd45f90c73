//! Old specs from the git history of manifests: for targets that read back digests at most, and without a ledger.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::info;

use crate::manifest::Limits;
use crate::model::{InstanceKey, SpecRevision};
use crate::observe::SpecSearch;
use crate::reconcile::Caps;
use crate::reconcile::spec_recovery::{OldSpecs, matches};
use crate::source::git::GitConfig;
use crate::source::git::work_tree::{self, RepositoryPath};

/// Time limit of a search: specs that are not found by then stay unknown.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(10);

/// Location of older manifests.
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

/// The search of the manifests' history: from the commit of the revision, where the source is a git branch.
#[derive(Clone, Debug)]
pub struct HistorySearch {
    pub past: ManifestHistory,
    pub commit: Option<String>,
    pub limits: Limits,
}

impl SpecSearch for HistorySearch {
    fn search(&self, missing: BTreeSet<(InstanceKey, SpecRevision)>, caps: &Caps) -> OldSpecs {
        search(&self.past, self.commit.as_deref(), &self.limits, missing, caps)
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
