//! Spec revision: one digest per effect of a spec.
//!
//! Two revisions show the *effect* of a difference even when the older spec is lost. Format:
//! `v1.<register>.<reload>.<restart>.<replace>.<run>`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::Effect;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpecRevision {
    pub register: u32,
    pub reload: u32,
    pub restart: u32,
    pub replace: u32,
    /// Run digest, over all fields with effect Reload, Restart or Replace: a one-shot runs once per run digest.
    pub run: u32,
}

impl SpecRevision {
    pub fn to_bytes(&self) -> [u8; 20] {
        let SpecRevision { register, reload, restart, replace, run } = self;
        let mut bytes = [0; 20];
        let parts = [register, reload, restart, replace, run];
        bytes.chunks_exact_mut(4).zip(parts).for_each(|(to, part)| to.copy_from_slice(&part.to_be_bytes()));
        bytes
    }

    pub fn from_bytes(bytes: [u8; 20]) -> SpecRevision {
        let part = |n: usize| {
            u32::from_be_bytes([bytes[4 * n], bytes[4 * n + 1], bytes[4 * n + 2], bytes[4 * n + 3]])
        };
        SpecRevision { register: part(0), reload: part(1), restart: part(2), replace: part(3), run: part(4) }
    }

    /// The strongest effect in which two revisions differ; `None`: they are equal.
    pub fn differs_from(&self, other: &SpecRevision) -> Effect {
        [
            (self.replace != other.replace, Effect::Replace),
            (self.restart != other.restart, Effect::Restart),
            (self.reload != other.reload, Effect::Reload),
            (self.register != other.register, Effect::Register),
        ]
        .into_iter()
        .find_map(|(differs, effect)| differs.then_some(effect))
        .unwrap_or(Effect::None)
    }
}

impl fmt::Display for SpecRevision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SpecRevision { register, reload, restart, replace, run } = self;
        write!(f, "v1.{register:08x}.{reload:08x}.{restart:08x}.{replace:08x}.{run:08x}")
    }
}

impl fmt::Debug for SpecRevision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseSpecRevisionError(String);

impl fmt::Display for ParseSpecRevisionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is not a revision of the form v1 and five groups of 8 hex digits", self.0)
    }
}

impl std::error::Error for ParseSpecRevisionError {}

impl FromStr for SpecRevision {
    type Err = ParseSpecRevisionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseSpecRevisionError(text.to_owned());
        let mut parts = text.strip_prefix("v1.").ok_or_else(error)?.split('.');
        let mut digest = || {
            let part = parts.next().filter(|part| part.len() == 8).ok_or_else(error)?;
            if !part.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) {
                return Err(error());
            }
            u32::from_str_radix(part, 16).map_err(|_| error())
        };
        let revision = SpecRevision {
            register: digest()?,
            reload: digest()?,
            restart: digest()?,
            replace: digest()?,
            run: digest()?,
        };
        if parts.next().is_some() { Err(error()) } else { Ok(revision) }
    }
}

impl Serialize for SpecRevision {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for SpecRevision {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn revisions_read_back_and_name_the_strongest_difference() {
        let a = SpecRevision { register: 1, reload: 0xabcdef01, restart: 3, replace: 4, run: 5 };
        assert_eq!(a.to_string(), "v1.00000001.abcdef01.00000003.00000004.00000005");
        assert_eq!(a.to_string().parse(), Ok(a));
        assert_eq!(a.differs_from(&a), Effect::None);
        assert_eq!(a.differs_from(&SpecRevision { register: 9, reload: 9, ..a }), Effect::Reload);
        assert_eq!(a.differs_from(&SpecRevision { register: 9, replace: 9, ..a }), Effect::Replace);
        for bad in ["", "v1", "v2.00000001.00000001.00000001.00000001.00000001", "v1.1.2.3.4.5"] {
            assert!(bad.parse::<SpecRevision>().is_err(), "{bad}");
        }
        assert!(format!("{a}.00000000").parse::<SpecRevision>().is_err());
    }
}
