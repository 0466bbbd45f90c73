//! Instances that another source of the same owner declares: they are not orphans of this one.
//!
//! Each stored revision has its source. An instance belongs to the source whose stored revision declared it last. A directory
//! contains the directories in it: their instances belong to it as well.

use std::collections::{BTreeMap, BTreeSet};

use super::stored_revisions::{self, Snapshot};
use crate::manifest::{self, Limits};
use crate::model::InstanceKey;
use crate::store::{Error, Store};

/// Whether a source is another one, or a directory in it.
pub fn contains(parent: &str, child: &str) -> bool {
    let rest = child.strip_prefix(parent.trim_end_matches('/')).filter(|_| !parent.is_empty());
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// The instances that other sources declare, by the stored revisions, newest first.
pub async fn declared_elsewhere<S: Store>(
    state: &S,
    owner: &str,
    source: &str,
    stored: &[Snapshot],
    limits: &Limits,
) -> Result<BTreeSet<InstanceKey>, Error> {
    let is_other = |snapshot: &&Snapshot| !contains(source, &snapshot.source);
    let Some(oldest) = stored.iter().filter(is_other).map(|snapshot| snapshot.at).min() else {
        return Ok(BTreeSet::new());
    };
    let mut elsewhere = BTreeSet::new();
    // Instances of a newer revision belong to its source, whatever older ones declare.
    let mut assigned: BTreeSet<InstanceKey> = BTreeSet::new();
    let mut sources: BTreeSet<&str> = BTreeSet::new();
    for snapshot in stored.iter().filter(|snapshot| snapshot.at >= oldest) {
        let is_ours = contains(source, &snapshot.source);
        // Of another source, only the newest revision declares something.
        if !is_ours && !sources.insert(&snapshot.source) {
            continue;
        }
        for key in instances(state, owner, snapshot, limits).await? {
            if assigned.insert(key.clone()) && !is_ours {
                elsewhere.insert(key);
            }
        }
    }
    Ok(elsewhere)
}

async fn instances<S: Store>(
    state: &S,
    owner: &str,
    snapshot: &Snapshot,
    limits: &Limits,
) -> Result<Vec<InstanceKey>, Error> {
    let texts = stored_revisions::texts(state, owner, snapshot).await?;
    let loaded = manifest::load_files(texts, Vec::new(), limits, &BTreeMap::new());
    Ok(loaded.desired.instances.into_keys().collect())
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
