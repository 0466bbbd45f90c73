//! Pinned revision: it overrides the source until the source has a newer one.
//!
//! `rollback` writes `pin/OWNER`. It is deleted by `apply`, by `rollback --unpin`, or by a source with a good
//! revision other than the pinned one and the one that was active when it was pinned.

use serde::{Deserialize, Serialize};

use crate::model::{ManifestRevision, Time};
use crate::store::{Error, Seq, Store, Txn, keys};

/// The pinned revision, and who pinned it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pin {
    pub revision: ManifestRevision,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    pub since: Time,
    pub by: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The revision that was active then: it does not end the pin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over: Option<ManifestRevision>,
    /// Another revision that does not end it: that of the source while it was partly broken.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<ManifestRevision>,
}

impl Pin {
    /// Whether this revision of the source is newer than the pin.
    pub fn is_older_than(&self, revision: &ManifestRevision) -> bool {
        let is_left_behind = |over: &ManifestRevision| revision == over || self.also.contains(revision);
        *revision != self.revision && self.over.as_ref().is_some_and(|over| !is_left_behind(over))
    }
}

/// The pin of an owner, and its sequence number.
pub async fn read<S: Store>(state: &S, owner: &str) -> Result<Option<(Pin, Seq)>, Error> {
    let key = keys::pin(owner);
    let Some(entry) = state.get(&key).await? else { return Ok(None) };
    let pin = serde_json::from_slice(&entry.value);
    let pin = pin.map_err(|error| Error::Corrupt { file: key, what: error.to_string() })?;
    Ok(Some((pin, entry.mod_seq)))
}

pub fn put(owner: &str, pin: &Pin) -> Txn {
    Txn::put(keys::pin(owner), serde_json::to_vec(pin).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_neither_pinned_nor_left_behind_is_newer() {
        let mut pin = Pin {
            revision: ManifestRevision::from_text("1"),
            commit: None,
            since: Time(0),
            by: "ann".to_owned(),
            reason: None,
            over: Some(ManifestRevision::from_text("2")),
            also: vec![ManifestRevision::from_text("4")],
        };
        let newer =
            ["1", "2", "3", "4"].map(|revision| pin.is_older_than(&ManifestRevision::from_text(revision)));
        assert_eq!(newer, [false, false, true, false]);
        // The active revision was unknown: the pin stays until a person ends it.
        pin.over = None;
        assert!(!pin.is_older_than(&ManifestRevision::from_text("3")));
    }
}
