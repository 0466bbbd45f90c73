//! A spec that changes no more, with what is asked of it again and again.
//!
//! A fleet is compared with what is there at every pass, and most of it is as it was. Digests are made once, when a
//! spec is read, so that the comparison touches two lines of memory instead of every text of two specs.

use std::ops::Deref;

use super::{EffectTable, Field, OnChange, Spec, SpecRevision};

#[derive(Clone, Debug)]
pub struct HashedSpec {
    sum: [u8; 16],
    revision: SpecRevision,
    /// A bit for each field that was given a value.
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

    /// A spec with secrets of which only digests are known, and what was made of it where they are known.
    pub fn redacted(spec: Spec, revision: SpecRevision, sum: [u8; 16]) -> HashedSpec {
        let set = HashedSpec::mask(Field::ALL.iter().copied().filter(|field| spec.is_set(*field)));
        HashedSpec { sum, revision, set, spec }
    }

    pub fn sum(&self) -> [u8; 16] {
        self.sum
    }

    /// The digests on a target that can say everything, for a process without a word of its own on its fields.
    pub fn revision(&self) -> &SpecRevision {
        &self.revision
    }

    /// Do these two wish for the same? A default that is written out is no difference.
    pub fn is_equivalent(&self, other: &HashedSpec) -> bool {
        self.sum == other.sum
    }

    /// Two that have the same are the same, word for word.
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
