//! Instances that another source of the same owner declares: they are not orphans of this one.
//!
//! Each stored revision has its source. An instance belongs to the source whose stored revision declared it last. A directory
//! contains the directories in it: their instances belong to it as well. If a stored revision cannot be read, it is unknown
//! which instances it declares: nothing is pruned.

use std::collections::{BTreeMap, BTreeSet};

use tracing::warn;

use super::stored_revisions::{self, Snapshot};
use crate::manifest::{self, Limits};
use crate::model::{DesiredInstance, InstanceKey};
use crate::store::{Error, Store};

/// Whether a source is another one, or a directory in it.
pub fn contains(parent: &str, child: &str) -> bool {
    let rest = child.strip_prefix(parent.trim_end_matches('/')).filter(|_| !parent.is_empty());
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The declarations of other sources.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeclaredElsewhere {
    pub instances: BTreeSet<InstanceKey>,
    /// A revision of another source cannot be read, or only in part.
    pub is_incomplete: bool,
}

/// The instances that other sources declare, by the stored revisions, newest first.
pub async fn declared_elsewhere<S: Store>(
    state: &S,
    owner: &str,
    source: &str,
    (stored, are_all_read): (&[Snapshot], bool),
    limits: &Limits,
) -> Result<DeclaredElsewhere, Error> {
    let (desired, is_whole) = desired_elsewhere(state, owner, source, stored, limits).await?;
    let instances = desired.into_keys().collect();
    Ok(DeclaredElsewhere { instances, is_incomplete: !(are_all_read && is_whole) })
}

/// The same with their desired state, and whether all of these revisions can be read.
pub async fn desired_elsewhere<S: Store>(
    state: &S,
    owner: &str,
    source: &str,
    stored: &[Snapshot],
    limits: &Limits,
) -> Result<(BTreeMap<InstanceKey, DesiredInstance>, bool), Error> {
    let (mut elsewhere, mut are_whole) = (BTreeMap::new(), true);
    let is_other = |snapshot: &&Snapshot| !contains(source, &snapshot.source);
    let Some(oldest) = stored.iter().filter(is_other).map(|snapshot| snapshot.at).min() else {
        return Ok((elsewhere, are_whole));
    };
    // Instances of a newer revision belong to its source, whatever older ones declare.
    let mut assigned: BTreeSet<InstanceKey> = BTreeSet::new();
    let mut sources: BTreeSet<&str> = BTreeSet::new();
    for snapshot in stored.iter().filter(|snapshot| snapshot.at >= oldest) {
        let is_ours = contains(source, &snapshot.source);
        // Of another source, only the newest revision declares something.
        if !is_ours && !sources.insert(&snapshot.source) {
            continue;
        }
        let (declared, is_whole) = instances(state, owner, snapshot, limits).await?;
        are_whole &= is_whole || is_ours;
        for (key, want) in declared {
            if assigned.insert(key.clone()) && !is_ours {
                elsewhere.insert(key, want);
            }
        }
    }
    Ok((elsewhere, are_whole))
}

/// The instances of a stored revision, and whether all of it can be read.
async fn instances<S: Store>(
    state: &S,
    owner: &str,
    snapshot: &Snapshot,
    limits: &Limits,
) -> Result<(BTreeMap<InstanceKey, DesiredInstance>, bool), Error> {
    let texts = match stored_revisions::texts(state, owner, snapshot).await {
        Ok(texts) => texts,
        // A caller with role `read` gets no manifests with secrets.
        Err(error @ (Error::Corrupt { .. } | Error::Refused { .. })) => {
            warn!(%error, source = %snapshot.source, revision = %snapshot.revision, "cannot read a stored revision");
            return Ok((BTreeMap::new(), false));
        }
        Err(error) => return Err(error),
    };
    let loaded = manifest::load_files(texts, Vec::new(), limits, &BTreeMap::new());
    let errors = loaded.errors();
    if errors > 0 {
        let (source, revision) = (&snapshot.source, &snapshot.revision);
        warn!(%source, %revision, errors, "a stored revision of the owner has errors: nothing is pruned");
    }
    Ok((loaded.desired.instances, errors == 0))
}

#[cfg(test)]
mod tests {
    use super::contains;

    #[test]
    fn a_directory_contains_its_children() {
        for (parent, child, expected) in [
            ("/srv/m", "/srv/m", true),
            ("/srv/m", "/srv/m/web", true),
            ("/srv/m/web", "/srv/m", false),
            ("/srv/m", "/srv/m2", false),
            ("https://h/r", "https://h/r//web", true),
            ("https://h/r//web", "https://h/r//web/a", true),
            ("", "/srv/b", false),
        ] {
            assert_eq!(contains(parent, child), expected, "{parent} {child}");
        }
    }
}
