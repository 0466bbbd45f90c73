//! Key file of the stores of this host: flag, default path, and location outside of the data folder.

use std::path::{Path, PathBuf};

use super::{Exit, Failure};
use crate::store::KeySource;

/// Value of --key-file that stores values without encryption.
const NONE: &str = "none";

/// The key file of a store.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct KeyFileArgs {
    /// File with the keys that encrypt stored values, created if it does not exist; `none`: no encryption [default:
    /// /etc/abide/secret.key for root, else ~/.config/abide/secret.key]
    #[arg(long, env = "ABIDE_KEY_FILE", value_name = "FILE")]
    pub key_file: Option<PathBuf>,
}

impl KeyFileArgs {
    /// The key file that the environment names, for commands without the flag.
    pub fn from_env() -> KeyFileArgs {
        let named = std::env::var_os("ABIDE_KEY_FILE").filter(|file| !file.is_empty());
        KeyFileArgs { key_file: named.map(PathBuf::from) }
    }

    /// The key file for a program that starts in another folder.
    pub fn absolute(&self) -> Option<PathBuf> {
        let file = self.key_file.as_ref()?;
        match file.as_os_str() == NONE {
            true => Some(file.clone()),
            false => Some(std::path::absolute(file).unwrap_or_else(|_| file.clone())),
        }
    }

    /// The keys of the stores in a data folder.
    pub fn source(&self, data: &Path) -> Result<KeySource, Failure> {
        match &self.key_file {
            Some(none) if none.as_os_str() == NONE => Ok(KeySource::None),
            Some(file) if is_within(file, data) => {
                let (file, data) = (file.display(), data.display());
                let message = format!("--key-file {file} is in the data folder {data}");
                let hint = "a copy of the folder must not contain the key: choose a file outside of it";
                Err(Failure::new(Exit::Usage, message).hint(hint))
            }
            Some(file) => Ok(KeySource::File(file.clone())),
            None => Ok(default_file().filter(|file| !is_within(file, data)).map_or_else(
                || {
                    tracing::warn!(
                        "stored values are not encrypted: no folder for a key, pass --key-file FILE"
                    );
                    KeySource::None
                },
                KeySource::Default,
            )),
        }
    }
}

fn default_file() -> Option<PathBuf> {
    let folder = match crate::permissions::own_uid() {
        0 => PathBuf::from("/etc"),
        _ => {
            let set =
                |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
            set("XDG_CONFIG_HOME").or_else(|| Some(set("HOME")?.join(".config")))?
        }
    };
    Some(folder.join("abide/secret.key"))
}

fn is_within(file: &Path, folder: &Path) -> bool {
    // Either may not exist yet; links of the existing part are resolved.
    let resolved = |path: &Path| {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let known = path.ancestors().find_map(|part| Some((part.canonicalize().ok()?, part)));
        match known {
            Some((known, part)) => known.join(path.strip_prefix(part).unwrap_or(Path::new(""))),
            None => path,
        }
    };
    resolved(file).starts_with(resolved(folder))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_in_the_data_folder_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let data = folder.path().join("data");
        let source = |file: &Path| KeyFileArgs { key_file: Some(file.to_owned()) }.source(&data);
        std::os::unix::fs::symlink(&data, folder.path().join("link")).expect("a link");
        assert!(source(&data.join("key")).is_err(), "before the folder exists");
        std::fs::create_dir(&data).expect("a folder");
        for inside in ["data/key", "data/keys/key", "link/key"] {
            assert!(source(&folder.path().join(inside)).is_err(), "{inside}");
        }
        let outside = folder.path().join("data.key");
        assert_eq!(source(&outside).ok(), Some(KeySource::File(outside)));
        assert_eq!(source(Path::new("none")).ok(), Some(KeySource::None));
    }
}
