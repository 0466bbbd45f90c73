//! Old specs out of the history of manifests: for targets that tell digests at best, and a disk that knows nothing.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::info;

use super::source::git::work_tree;
use crate::manifest::Limits;
use crate::model::{InstanceKey, Revision};
use crate::reconcile::Caps;
use crate::reconcile::old::{OldSpecs, is_of};

/// The longest that it may take: what is not found by then is planned without.
const TIME: Duration = Duration::from_secs(10);

/// Looks through the commits that touched these paths, the newest first, until everything that is missing is found.
pub fn search(
    paths: &[PathBuf],
    limits: &Limits,
    mut missing: BTreeSet<(InstanceKey, Revision)>,
    caps: &Caps,
) -> OldSpecs {
    let (begin, mut found, mut commits) = (Instant::now(), OldSpecs::new(), 0);
    let many = missing.len();
    for inside in paths.iter().filter_map(|path| work_tree::find(path)) {
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
