//! Old specs out of the history of manifests: for targets that tell digests at best, and a disk that knows nothing.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::info;

use super::source::git::Setting;
use super::source::git::work_tree::{self, Inside};
use crate::manifest::Limits;
use crate::model::{InstanceKey, Revision};
use crate::reconcile::Caps;
use crate::reconcile::old::{OldSpecs, is_of};

/// The longest that it may take: what is not found by then is planned without.
const TIME: Duration = Duration::from_secs(10);

/// Where older manifests are.
#[derive(Clone, Debug)]
pub enum Past {
    /// In the repositories that these lie in.
    Paths(Vec<PathBuf>),
    /// In the mirror of what is followed.
    Git(Box<Setting>),
}

impl Past {
    fn places(&self, commit: Option<&str>) -> Vec<Inside> {
        match self {
            Past::Paths(paths) => paths.iter().filter_map(|path| work_tree::find(path)).collect(),
            Past::Git(setting) => {
                commit.map(|commit| work_tree::in_mirror(setting, commit)).into_iter().collect()
            }
        }
    }
}

/// What was asked for before, and what was found, for somebody who asks again and again.
#[derive(Default)]
pub struct Known {
    sought: BTreeSet<(InstanceKey, Revision)>,
    found: OldSpecs,
}

impl Known {
    /// What is known of what is missing. Only what was never sought is looked for, on a thread: it may take a while.
    pub async fn of(
        &mut self,
        past: &Past,
        commit: Option<&str>,
        limits: &Limits,
        missing: BTreeSet<(InstanceKey, Revision)>,
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
    past: &Past,
    commit: Option<&str>,
    limits: &Limits,
    mut missing: BTreeSet<(InstanceKey, Revision)>,
    caps: &Caps,
) -> OldSpecs {
    let (begin, mut found, mut commits) = (Instant::now(), OldSpecs::new(), 0);
    let many = missing.len();
    for inside in past.places(commit) {
        inside.history(limits, begin + TIME, |loaded| {
            commits += 1;
            missing.retain(|(key, revision)| {
                let want = loaded.desired.instances.get(key).filter(|want| is_of(want, revision, caps));
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
