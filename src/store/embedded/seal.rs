//! Encryption of values: AES-256-GCM with a key per opening of the file.
//!
//! A sealed value is `MAGIC · key id · salt · nonce · ciphertext and tag`. Each opening draws a random salt and derives its
//! own key from it, so that random nonces never run out under one key. Key and sequence number of the entry are
//! authenticated: a value copied to another entry, or an older value of the same entry, is refused.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce};
use ring::hkdf::{HKDF_SHA256, Salt};
use ring::rand::{SecureRandom, SystemRandom};

use super::file::DatabaseFileError;
use crate::store::Error;
use crate::store::key_file::{KeyId, KeyRing, KeySource, StoreKey};

/// No JSON and no text of a store starts with these bytes.
const MAGIC: [u8; 4] = *b"\0as1";
const ID: usize = MAGIC.len();
const SALT: usize = ID + 8;
const NONCE: usize = SALT + 16;
const TEXT: usize = NONCE + NONCE_LEN;
/// Bytes of a value that name its key.
pub(super) const HEAD: usize = SALT;
/// Bytes that a sealed value has in addition to its text.
const OVERHEAD: usize = TEXT + 16;
/// Maximum derived keys in memory. Each opening of the file added one.
const MAX_DERIVED: usize = 4096;

type SaltBytes = [u8; NONCE - SALT];

/// Seals and opens the values of one file.
pub(super) struct Sealer {
    ring: KeyRing,
    /// Origin of the keys, for messages.
    source: KeySource,
    /// Whether values of the file may be sealed. Otherwise values are taken as they are, whatever their first bytes.
    is_sealed: bool,
    /// Key of this opening; `None`: values are written in plain text.
    own: Option<(KeyId, SaltBytes, Arc<LessSafeKey>)>,
    derived: Mutex<HashMap<(KeyId, SaltBytes), Arc<LessSafeKey>>>,
    random: SystemRandom,
}

impl Sealer {
    /// The sealer of a file. `has_sealed`: the file has sealed values. `may_create`: a missing key file is created.
    pub(super) fn of_file(
        file: &Path,
        source: &KeySource,
        has_sealed: bool,
        may_create: bool,
    ) -> Result<Sealer, Error> {
        let unusable = |error| Error::KeyFile(Arc::new(error));
        let missing = || Error::KeyMissing { file: file.display().to_string(), keys: shown(source, None) };
        let ring = match source {
            KeySource::None if has_sealed => return Err(missing()),
            KeySource::None => KeyRing::default(),
            KeySource::File(path) | KeySource::Default(path) => {
                match KeyRing::read(path).map_err(unusable)? {
                    Some(ring) => ring,
                    // A new key would open none of the values.
                    None if has_sealed => return Err(missing()),
                    None if !may_create => KeyRing::default(),
                    None => match (KeyRing::create(path), source) {
                        (Ok(ring), _) => ring,
                        (Err(error), KeySource::Default(_)) => {
                            let error = crate::error_chain::chain(&error);
                            tracing::warn!(store = %file.display(), %error, "stored values are not encrypted: pass --key-file FILE");
                            KeyRing::default()
                        }
                        (Err(error), _) => return Err(unusable(error)),
                    },
                }
            }
        };
        Sealer::new(ring, source.clone(), has_sealed)
    }

    fn new(ring: KeyRing, source: KeySource, is_sealed: bool) -> Result<Sealer, Error> {
        let random = SystemRandom::new();
        let own = match &ring.current {
            None => None,
            Some(key) => {
                let mut salt: SaltBytes = Default::default();
                random.fill(&mut salt).map_err(|_| no_random())?;
                Some((key.id, salt, derive(key, &salt).ok_or_else(no_random)?))
            }
        };
        Ok(Sealer { ring, source, is_sealed, own, derived: Mutex::default(), random })
    }

    /// The key that seals; `None`: values are written in plain text.
    pub(super) fn current(&self) -> Option<KeyId> {
        self.own.as_ref().map(|(id, ..)| *id)
    }

    /// Records that values of the file are sealed or not, after all of them were rewritten.
    pub(super) fn set_sealed(&mut self, is_sealed: bool) {
        self.is_sealed = is_sealed;
    }

    /// The key of a stored value. `None`: the value is plain text.
    pub(super) fn key_of(&self, stored: &[u8]) -> Option<KeyId> {
        let head = stored.get(..HEAD).filter(|head| self.is_sealed && head.starts_with(&MAGIC))?;
        head[ID..].try_into().ok().map(KeyId)
    }

    /// Size of the text of a stored value, from its first bytes and its size.
    pub(super) fn text_size(&self, head: &[u8], size: usize) -> usize {
        match self.key_of(head) {
            Some(_) => size.saturating_sub(OVERHEAD),
            None => size,
        }
    }

    /// Refuses a key that is not in the key file.
    pub(super) fn require(&self, id: KeyId) -> Result<(), DatabaseFileError> {
        match self.ring.find(id) {
            Some(_) => Ok(()),
            None => Err(DatabaseFileError::Key(shown(&self.source, Some(id)))),
        }
    }

    /// The bytes to store for a value.
    pub(super) fn seal(&self, key: &str, changed: i64, value: &[u8]) -> Result<Vec<u8>, DatabaseFileError> {
        let Some((id, salt, sealing)) = &self.own else { return Ok(value.to_vec()) };
        let mut nonce = [0; NONCE_LEN];
        let failed = || DatabaseFileError::Entry(format!("the entry {key:?} cannot be encrypted"));
        self.random.fill(&mut nonce).map_err(|_| failed())?;
        let mut sealed = Vec::with_capacity(TEXT + value.len() + AES_256_GCM.tag_len());
        for part in [&MAGIC[..], &id.0, salt, &nonce, value] {
            sealed.extend_from_slice(part);
        }
        let nonce = Nonce::assume_unique_for_key(nonce);
        let tag = sealing.seal_in_place_separate_tag(nonce, authenticated(key, changed), &mut sealed[TEXT..]);
        sealed.extend_from_slice(tag.map_err(|_| failed())?.as_ref());
        Ok(sealed)
    }

    /// The value of stored bytes.
    pub(super) fn open(
        &self,
        key: &str,
        changed: i64,
        mut stored: Vec<u8>,
    ) -> Result<Vec<u8>, DatabaseFileError> {
        let Some(id) = self.key_of(&stored) else { return Ok(stored) };
        let damaged = || DatabaseFileError::Entry(format!("the entry {key:?} cannot be decrypted"));
        let (head, text) = stored.split_at_mut_checked(TEXT).ok_or_else(damaged)?;
        let salt: SaltBytes = head[SALT..NONCE].try_into().map_err(|_| damaged())?;
        let nonce = Nonce::try_assume_unique_for_key(&head[NONCE..]).map_err(|_| damaged())?;
        let opening = self.opening_key(id, salt)?;
        let length =
            opening.open_in_place(nonce, authenticated(key, changed), text).map_err(|_| damaged())?.len();
        stored.drain(..TEXT);
        stored.truncate(length);
        Ok(stored)
    }

    fn opening_key(&self, id: KeyId, salt: SaltBytes) -> Result<Arc<LessSafeKey>, DatabaseFileError> {
        let mut derived = self.derived.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(known) = derived.get(&(id, salt)) {
            return Ok(Arc::clone(known));
        }
        let unknown = || DatabaseFileError::Key(shown(&self.source, Some(id)));
        let opening = self.ring.find(id).and_then(|key| derive(key, &salt)).ok_or_else(unknown)?;
        if derived.len() >= MAX_DERIVED {
            derived.clear();
        }
        derived.insert((id, salt), Arc::clone(&opening));
        Ok(opening)
    }
}

/// The entry that a value belongs to.
fn authenticated(key: &str, changed: i64) -> Aad<Vec<u8>> {
    Aad::from([key.as_bytes(), &changed.to_le_bytes()].concat())
}

fn derive(key: &StoreKey, salt: &SaltBytes) -> Option<Arc<LessSafeKey>> {
    let derived = Salt::new(HKDF_SHA256, salt).extract(&key.bytes);
    let unbound = derived.expand(&[b"abide store value"], &AES_256_GCM).ok()?.into();
    Some(Arc::new(LessSafeKey::new(unbound)))
}

fn no_random() -> Error {
    Error::io("cannot read random bytes", std::io::ErrorKind::Other.into())
}

/// The key that is missing, and where it was searched.
fn shown(source: &KeySource, id: Option<KeyId>) -> String {
    match (source.path(), id) {
        (None, _) => {
            "no key file is given (default: /etc/abide/secret.key for root, else ~/.config/abide/secret.key)"
                .to_owned()
        }
        (Some(path), None) => format!("the key file {} does not exist", path.display()),
        (Some(path), Some(id)) => format!("the key file {} does not have key {id}", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sealer(folder: &Path, name: &str) -> Sealer {
        let source = KeySource::File(folder.join(name));
        let mut sealer = Sealer::of_file(&folder.join("store.db"), &source, false, true).expect("a key");
        sealer.set_sealed(true);
        sealer
    }

    #[test]
    fn a_value_opens_only_at_its_entry_and_with_its_key() {
        let folder = tempfile::tempdir().expect("a folder");
        let (one, next) = (sealer(folder.path(), "k"), sealer(folder.path(), "k"));
        let sealed = one.seal("reg/a", 7, b"secret text").unwrap_or_default();
        assert!(!sealed.windows(6).any(|part| part == b"secret"));
        assert_eq!(one.text_size(&sealed[..HEAD], sealed.len()), b"secret text".len());
        assert_ne!(sealed, one.seal("reg/a", 7, b"secret text").unwrap_or_default(), "nonces differ");
        assert_eq!(next.open("reg/a", 7, sealed.clone()).unwrap_or_default(), b"secret text", "next opening");
        let is_refused =
            |key, changed, bytes| matches!(one.open(key, changed, bytes), Err(DatabaseFileError::Entry(_)));
        assert!(is_refused("reg/b", 7, sealed.clone()) && is_refused("reg/a", 8, sealed.clone()));
        for at in [SALT, NONCE, TEXT, sealed.len() - 1] {
            let mut changed = sealed.clone();
            changed[at] ^= 1;
            assert!(is_refused("reg/a", 7, changed), "byte {at}");
        }
        assert!(
            is_refused("reg/a", 7, sealed[..TEXT].to_vec())
                && is_refused("reg/a", 7, sealed[..HEAD].to_vec())
        );
        let other = sealer(folder.path(), "other");
        assert!(matches!(other.open("reg/a", 7, sealed), Err(DatabaseFileError::Key(_))));
        // Values of a store without encryption are never interpreted.
        let plain = Sealer::new(KeyRing::default(), KeySource::None, false).expect("no key");
        let forged = [&MAGIC[..], b"whatever an app wrote"].concat();
        assert_eq!(plain.open("a", 1, forged.clone()).unwrap_or_default(), forged);
    }
}
