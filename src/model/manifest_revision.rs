//! Manifest revision: the digest of a manifest set. `rollback`, pins and the history refer to a set by it.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::text_digest::TextDigest;
use super::{DeclaredProcess, Desired, Policy};

/// Two manifest sets with the same revision declare the same. The default value means that none was read yet.
///
/// Not to be confused with a [`SpecRevision`](super::SpecRevision), the digests of one spec.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ManifestRevision(String);

impl ManifestRevision {
    /// The revision of a desired state. Source locations are not part of it.
    pub fn of(desired: &Desired) -> ManifestRevision {
        let mut digest = TextDigest::default();
        put_desired(&mut digest, desired);
        ManifestRevision(digest.hex())
    }

    /// A revision from a store, an argument or a message.
    pub fn from_text(text: impl Into<String>) -> ManifestRevision {
        ManifestRevision(text.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether no revision was read yet.
    pub fn is_none(&self) -> bool {
        self.0.is_empty()
    }

    /// The first 12 characters, for people.
    pub fn short(&self) -> String {
        self.0.chars().take(12).collect()
    }
}

impl fmt::Display for ManifestRevision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn put_desired(digest: &mut TextDigest, desired: &Desired) {
    // Many instances share a spec and a declaration: each pair is written once, then by its index.
    let mut known: HashMap<(usize, usize), usize> = HashMap::new();
    for (key, want) in &desired.instances {
        digest.put_display(key);
        let address = (Arc::as_ptr(&want.spec) as usize, Arc::as_ptr(&want.origin) as usize);
        let next = known.len();
        let number = *known.entry(address).or_insert(next);
        digest.put_number(number as u64);
        if number == next {
            digest.put_display(want.spec.revision());
            put_declaration(digest, &want.origin);
        }
    }
    for policy in &desired.policies {
        let Policy { name, place: _, reach: _, owner, allow, budgets, windows } = policy;
        digest.put(&format!("{:?}", (name, owner, allow, budgets, windows)));
    }
}

fn put_declaration(digest: &mut TextDigest, origin: &DeclaredProcess) {
    let DeclaredProcess { place: _, declared, state, adopt, depends_on, moved_from, .. } = origin;
    digest.put_display(declared);
    digest.put_bytes([*state as u8, u8::from(*adopt)]);
    for names in [depends_on, moved_from] {
        digest.put_number(names.len() as u64);
        names.iter().for_each(|name| digest.put_display(name));
    }
    let DeclaredProcess { protect, on_change, rollout, policies, .. } = origin;
    if !protect.is_empty() || !on_change.is_empty() || rollout.is_some() || !policies.is_empty() {
        digest.put(&format!("{:?}", (protect, on_change, rollout, policies)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_revision_is_stored_as_plain_text() {
        let revision = ManifestRevision::of(&Desired::default());
        assert_eq!(revision.as_str(), "af1349b9f5f9a1a6a0404dea36dcc949", "the digest of nothing");
        let json = serde_json::to_string(&revision).expect("a text");
        assert_eq!(json, "\"af1349b9f5f9a1a6a0404dea36dcc949\"");
        assert_eq!(serde_json::from_str::<ManifestRevision>(&json).expect("a text"), revision);
        assert_eq!(revision.short(), "af1349b9f5f9");
        assert!(ManifestRevision::default().is_none() && !revision.is_none());
    }
}
