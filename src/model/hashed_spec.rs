//! Immutable spec with its precomputed digests.
//!
//! Every pass compares the whole fleet, and most instances have not changed. The digests are computed once, when a spec
//! is read, so that a comparison touches two cache lines instead of every text of two specs.

use std::ops::Deref;

use super::{EffectTable, Field, OnChange, Spec, SpecRevision};

#[derive(Clone, Debug)]
pub struct HashedSpec {
    sum: [u8; 16],
    revision: SpecRevision,
    /// One bit per field that is set.
    set: u64,
    spec: Spec,
}

const _: () = assert!(Field::COUNT <= 64);

impl HashedSpec {
    pub fn new(spec: Spec) -> HashedSpec {
        let (revision, sum) = EffectTable::of(&spec, &OnChange::new()).digests(&spec);
        let set = HashedSpec::mask(Field::ALL.iter().copied().filter(|field| spec.is_set(*field)));
        HashedSpec { sum, revision, set, spec }
    }

    /// A spec in which secrets are digests, with the revision and sum computed where the secrets are known.
    pub fn redacted(spec: Spec, revision: SpecRevision, sum: [u8; 16]) -> HashedSpec {
        let set = HashedSpec::mask(Field::ALL.iter().copied().filter(|field| spec.is_set(*field)));
        HashedSpec { sum, revision, set, spec }
    }

    pub fn sum(&self) -> [u8; 16] {
        self.sum
    }

    /// The digests on a target that supports every field, for a process without `on_change`.
    pub fn revision(&self) -> &SpecRevision {
        &self.revision
    }

    /// Whether both specs request the same. An explicit default equals an unset field.
    pub fn is_equivalent(&self, other: &HashedSpec) -> bool {
        self.sum == other.sum
    }

    /// Two specs with the same digest are identical, including which fields are set.
    pub fn digest(&self) -> ([u8; 16], u64) {
        (self.sum, self.set)
    }

    pub fn sets_any(&self, mask: u64) -> bool {
        self.set & mask != 0
    }

    pub fn mask(fields: impl IntoIterator<Item = Field>) -> u64 {
        fields.into_iter().fold(0, |mask, field| mask | 1 << field as u64)
    }
}

impl Deref for HashedSpec {
    type Target = Spec;

    fn deref(&self) -> &Spec {
        &self.spec
    }
}

impl From<Spec> for HashedSpec {
    fn from(spec: Spec) -> HashedSpec {
        HashedSpec::new(spec)
    }
}

impl Default for HashedSpec {
    fn default() -> HashedSpec {
        HashedSpec::new(Spec::default())
    }
}

impl PartialEq for HashedSpec {
    fn eq(&self, other: &HashedSpec) -> bool {
        self.sum == other.sum && self.spec == other.spec
    }
}

impl Eq for HashedSpec {}
