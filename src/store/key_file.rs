//! Key file of an embedded store: the keys that encrypt its values.
//!
//! The file has one key per line: 64 hexadecimal digits. The first key encrypts; all of them decrypt, so that a new key
//! can be put before an old one. The line `plain` in the first position stores values without encryption, for a
//! downgrade. The file lies outside of the data folder: a copy of the folder alone reveals no value.

use std::fmt;
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use ring::hkdf::{HKDF_SHA256, Salt};
use ring::rand::{SecureRandom, SystemRandom};

use crate::permissions::{PermissionError, check_private};

pub(super) const KEY_BYTES: usize = 32;
const ID_BYTES: usize = 8;
/// First line of a file that stores values without encryption.
const PLAIN: &str = "plain";

/// Origin of the keys of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum KeySource {
    /// Values are not encrypted.
    #[default]
    None,
    /// A file, created with a new key if the store has no encrypted value.
    File(PathBuf),
    /// The same. If it cannot be created, a warning is logged, and values are not encrypted.
    Default(PathBuf),
}

impl KeySource {
    pub fn path(&self) -> Option<&Path> {
        match self {
            KeySource::None => None,
            KeySource::File(path) | KeySource::Default(path) => Some(path),
        }
    }
}

/// Name of a key, derived from it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyId(pub(super) [u8; ID_BYTES]);

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[derive(Clone)]
pub(super) struct StoreKey {
    pub(super) id: KeyId,
    pub(super) bytes: [u8; KEY_BYTES],
}

impl StoreKey {
    fn new(bytes: [u8; KEY_BYTES]) -> StoreKey {
        let mut id = [0; ID_BYTES];
        // The length is valid for HKDF, so neither step fails.
        let _ = Salt::new(HKDF_SHA256, b"abide key id")
            .extract(&bytes)
            .expand(&[b"id"], IdLength)
            .and_then(|derived| derived.fill(&mut id));
        StoreKey { id: KeyId(id), bytes }
    }
}

struct IdLength;

impl ring::hkdf::KeyType for IdLength {
    fn len(&self) -> usize {
        ID_BYTES
    }
}

/// The keys of a file.
#[derive(Clone, Default)]
pub(super) struct KeyRing {
    /// The key that encrypts; `None`: values are stored in plain text.
    pub(super) current: Option<StoreKey>,
    /// Keys that only decrypt.
    pub(super) others: Vec<StoreKey>,
}

impl KeyRing {
    fn parse(text: &str, file: &Path) -> Result<KeyRing, KeyFileError> {
        let mut ring = KeyRing::default();
        let lines = text.lines().enumerate().map(|(at, line)| (at + 1, line.trim()));
        let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        for (nth, (at, line)) in lines.enumerate() {
            if nth == 0 && line == PLAIN {
                continue;
            }
            let mut bytes = [0; KEY_BYTES];
            hex::decode_to_slice(line, &mut bytes)
                .map_err(|_| KeyFileError::Invalid { file: file.to_owned(), line: at })?;
            let key = StoreKey::new(bytes);
            match nth {
                0 => ring.current = Some(key),
                _ => ring.others.push(key),
            }
        }
        match text.lines().any(|line| line.trim() == PLAIN) || ring.current.is_some() {
            true => Ok(ring),
            false => Err(KeyFileError::Empty { file: file.to_owned() }),
        }
    }

    /// `None`: the file does not exist.
    pub(super) fn read(file: &Path) -> Result<Option<KeyRing>, KeyFileError> {
        let text = match std::fs::read_to_string(file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(KeyFileError::Read { file: file.to_owned(), source }),
        };
        if let Some(readable) = check_private(file)? {
            return Err(KeyFileError::Readable { readable });
        }
        KeyRing::parse(&text, file).map(Some)
    }

    /// Creates a file with a new key. If another process creates the file at the same time, both use its key.
    pub(super) fn create(file: &Path) -> Result<KeyRing, KeyFileError> {
        let failed = |source| KeyFileError::Create { file: file.to_owned(), source };
        let mut bytes = [0; KEY_BYTES];
        SystemRandom::new().fill(&mut bytes).map_err(|_| failed(std::io::Error::other("no random bytes")))?;
        if let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            // Others may enter it: /etc/abide has the host policy too, which an agent without root rights reads.
            std::fs::DirBuilder::new().recursive(true).mode(0o755).create(folder).map_err(failed)?;
        }
        let mut temporary = file.as_os_str().to_owned();
        temporary.push(format!(".{}", crate::ids::fresh_id()));
        let temporary = PathBuf::from(temporary);
        let written =
            std::fs::File::options().write(true).create_new(true).mode(0o600).open(&temporary).and_then(
                |mut to| {
                    writeln!(to, "{}", hex::encode(bytes))?;
                    to.sync_all()?;
                    // Unlike a rename, a link never replaces the key of another process.
                    std::fs::hard_link(&temporary, file)?;
                    std::fs::File::open(
                        file.parent().filter(|at| !at.as_os_str().is_empty()).unwrap_or(Path::new(".")),
                    )?
                    .sync_all()
                },
            );
        let _ = std::fs::remove_file(&temporary);
        match written {
            Ok(()) => tracing::info!(
                file = %file.display(),
                "created a key for stored values: back it up, they cannot be read without it"
            ),
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed(error)),
        }
        KeyRing::read(file)?.ok_or_else(|| failed(std::io::ErrorKind::NotFound.into()))
    }

    pub(super) fn find(&self, id: KeyId) -> Option<&StoreKey> {
        self.current.iter().chain(&self.others).find(|key| key.id == id)
    }
}

/// Reason why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyFileError {
    #[error("cannot read the key file {}", file.display())]
    Read { file: PathBuf, source: std::io::Error },
    #[error("cannot create the key file {}", file.display())]
    Create { file: PathBuf, source: std::io::Error },
    /// The text of the line may be a key.
    #[error("key file {}, line {line}: not 64 hexadecimal digits", file.display())]
    Invalid { file: PathBuf, line: usize },
    #[error("key file {} has no key", file.display())]
    Empty { file: PathBuf },
    #[error("{readable}")]
    Readable { readable: String },
    #[error(transparent)]
    Unsafe(#[from] PermissionError),
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_key_file_is_created_once_and_private() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("keys/secret.key");
        assert!(KeyRing::read(&file).expect("it is missing").is_none());
        let created = KeyRing::create(&file).expect("a key").current.expect("a key").id;
        let again = KeyRing::create(&file).expect("the same").current.expect("a key").id;
        assert_eq!(created, again);
        let mode = |file: &Path| std::fs::metadata(file).expect("it exists").permissions().mode() & 0o777;
        assert_eq!((mode(&file), mode(file.parent().expect("a folder"))), (0o600, 0o755));
        assert_eq!(std::fs::read_dir(folder.path().join("keys")).expect("a folder").count(), 1);
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).expect("a mode");
        let readable = KeyRing::read(&file).err().map(|error| error.to_string()).unwrap_or_default();
        let private = readable.is_empty() || readable.contains("is readable by");
        assert!(private, "{readable}");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).expect("a mode");
        let readable = KeyRing::read(&file).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(readable.contains("readable by every user"), "{readable}");
    }

    #[test]
    fn the_first_key_encrypts_and_errors_quote_no_key() {
        let file = Path::new("k");
        let (one, other) = ("1".repeat(64), "2".repeat(64));
        let ids = |text: &str| {
            let ring = KeyRing::parse(text, file).expect("keys");
            (ring.current.map(|key| key.id), ring.others.iter().map(|key| key.id).collect::<Vec<_>>())
        };
        let (first, rest) = ids(&format!("# comment\n{one}\n\n{other}\n"));
        let (swapped, _) = ids(&format!("{other}\n{one}\n"));
        assert_eq!((rest.as_slice(), first == swapped), (&[swapped.expect("a key")][..], false));
        assert_eq!(ids(&format!("plain\n{one}\n")), (None, vec![first.expect("a key")]));
        for (text, expected) in [
            (format!("{one}\n{}\n", &one[1..]), "key file k, line 2: not 64 hexadecimal digits"),
            (format!("{one}\nplain\n"), "key file k, line 2: not 64 hexadecimal digits"),
            ("# nothing\n".to_owned(), "key file k has no key"),
        ] {
            let error = KeyRing::parse(&text, file).err().map(|error| error.to_string());
            assert_eq!(error.as_deref(), Some(expected));
        }
    }
}
