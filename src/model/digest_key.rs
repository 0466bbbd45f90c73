//! Keyed digests: digests of secrets, which only a holder of the key can compare with a value.
//!
//! A reader of a plain digest can test guesses of the secret. A keyed digest is the digest under a permutation that the key
//! selects: a Feistel network with keyed BLAKE3 as its round function. Equal secrets of an owner have equal keyed digests.
//! A holder of the key gets the digest back, and compares specs with it.
//!
//! A gateway has one root key per store; the key of an owner is derived from it. No stored value depends on a key: a
//! replaced key changes what readers get, and nothing else.

use std::fmt;
use std::sync::Arc;

use super::SpecRevision;

const ROUNDS: u8 = 8;
/// Bytes of half a revision, the longest digest.
const MAX_HALF: usize = 10;

/// Content of a digest. The number is an input of the permutation.
#[derive(Clone, Copy)]
enum DigestKind {
    Secret = 1,
    Sum = 2,
    Revision = 3,
}

/// The key of the digests of an owner's secrets.
#[derive(Clone, PartialEq, Eq)]
pub struct DigestKey {
    id: Arc<str>,
    bytes: [u8; 32],
}

impl DigestKey {
    pub fn new(bytes: [u8; 32]) -> DigestKey {
        let hash = blake3::derive_key("abide v1 id of a key for digests of secrets", &bytes);
        let id = hash[..4].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        DigestKey { id: id.into(), bytes }
    }

    /// The key of an owner. Processes without an owner have the key of the empty name.
    pub fn of_owner(root: &[u8; 32], owner: &str) -> DigestKey {
        DigestKey::new(*blake3::keyed_hash(root, owner.as_bytes()).as_bytes())
    }

    /// 8 hex digits, which identify the key and do not disclose it.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// For a client that may have the key; never for a message.
    pub fn expose(&self) -> &[u8; 32] {
        &self.bytes
    }

    /// The keyed digest of a plain one, as 32 hex digits. A text of another form has no digest.
    pub fn keyed_digest(&self, plain: &str) -> Option<String> {
        Some(hex(&self.permute(DigestKind::Secret, from_hex(plain)?)))
    }

    pub fn plain_digest(&self, keyed: &str) -> Option<String> {
        Some(hex(&self.invert(DigestKind::Secret, from_hex(keyed)?)))
    }

    pub fn keyed_sum(&self, plain: [u8; 16]) -> [u8; 16] {
        self.permute(DigestKind::Sum, plain)
    }

    pub fn plain_sum(&self, keyed: [u8; 16]) -> [u8; 16] {
        self.invert(DigestKind::Sum, keyed)
    }

    pub fn keyed_revision(&self, plain: &SpecRevision) -> SpecRevision {
        SpecRevision::from_bytes(self.permute(DigestKind::Revision, plain.to_bytes()))
    }

    pub fn plain_revision(&self, keyed: &SpecRevision) -> SpecRevision {
        SpecRevision::from_bytes(self.invert(DigestKind::Revision, keyed.to_bytes()))
    }

    fn permute<const N: usize>(&self, kind: DigestKind, mut bytes: [u8; N]) -> [u8; N] {
        (0..ROUNDS).for_each(|round| self.mix(kind, round, &mut bytes));
        bytes
    }

    fn invert<const N: usize>(&self, kind: DigestKind, mut bytes: [u8; N]) -> [u8; N] {
        (0..ROUNDS).rev().for_each(|round| self.mix(kind, round, &mut bytes));
        bytes
    }

    /// Changes one half by a hash of the other. The same call again restores it.
    fn mix(&self, kind: DigestKind, round: u8, bytes: &mut [u8]) {
        let (left, right) = bytes.split_at_mut(bytes.len() / 2);
        let (changed, other) = if round.is_multiple_of(2) { (left, right) } else { (right, left) };
        let mut input = [0; 2 + MAX_HALF];
        (input[0], input[1]) = (kind as u8, round);
        input[2..2 + other.len()].copy_from_slice(other);
        let hash = blake3::keyed_hash(&self.bytes, &input[..2 + other.len()]);
        changed.iter_mut().zip(hash.as_bytes()).for_each(|(byte, mask)| *byte ^= mask);
    }
}

impl fmt::Debug for DigestKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DigestKey({})", self.id)
    }
}

/// The key of the digests in a row of a process with secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DigestKeyRef {
    Known(Arc<DigestKey>),
    /// The id of a key that this client does not have: the secrets cannot be compared.
    Unknown(Arc<str>),
}

impl DigestKeyRef {
    pub fn known(&self) -> Option<&DigestKey> {
        match self {
            DigestKeyRef::Known(key) => Some(key),
            DigestKeyRef::Unknown(_) => None,
        }
    }
}

fn hex(bytes: &[u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(*bytes))
}

fn from_hex(text: &str) -> Option<[u8; 16]> {
    let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let number = u128::from_str_radix(text, 16).ok().filter(|_| is_hex)?;
    Some(number.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::secret_digest;

    #[test]
    fn only_the_holder_of_the_key_gets_the_plain_digest_back() {
        let key = DigestKey::of_owner(&[7; 32], "shop");
        let others = [DigestKey::of_owner(&[7; 32], "shop2"), DigestKey::of_owner(&[8; 32], "shop")];
        let plain = secret_digest("hunter2");
        let keyed = key.keyed_digest(&plain).expect("a digest");
        assert_ne!(keyed, plain);
        assert_eq!(key.keyed_digest(&plain).as_deref(), Some(&*keyed), "equal secrets have equal digests");
        assert_eq!(key.plain_digest(&keyed), Some(plain.clone()));
        for other in &others {
            assert_ne!(other.id(), key.id());
            assert_ne!(other.plain_digest(&keyed), Some(plain.clone()));
        }
        let sum = [9; 16];
        assert_eq!(key.plain_sum(key.keyed_sum(sum)), sum);
        assert_ne!(key.keyed_sum(sum), sum);
        let revision = SpecRevision { register: 1, reload: 0xabcd_ef01, restart: 3, replace: 4, run: 5 };
        assert_eq!(key.plain_revision(&key.keyed_revision(&revision)), revision);
        assert_ne!(key.keyed_revision(&revision), revision);
    }

    #[test]
    fn one_changed_part_changes_the_whole_keyed_revision() {
        let key = DigestKey::new([1; 32]);
        let revision = SpecRevision { register: 1, reload: 2, restart: 3, replace: 4, run: 5 };
        let other = SpecRevision { run: 6, ..revision };
        let (one, other) = (key.keyed_revision(&revision), key.keyed_revision(&other));
        let parts = |r: &SpecRevision| [r.register, r.reload, r.restart, r.replace, r.run];
        assert!(parts(&one).iter().zip(parts(&other)).all(|(one, other)| *one != other), "{one} {other}");
    }

    #[test]
    fn a_key_is_not_printed_and_texts_of_another_form_have_no_digest() {
        let key = DigestKey::new([0xab; 32]);
        assert_eq!(format!("{key:?}"), format!("DigestKey({})", key.id()));
        assert_eq!(key.id().len(), 8);
        for text in ["", "ab", "+0000000000000000000000000000000", "zz000000000000000000000000000000"] {
            assert_eq!((key.keyed_digest(text), key.plain_digest(text)), (None, None), "{text}");
        }
    }
}
