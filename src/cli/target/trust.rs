//! Trust in config files of the current directory: one digest per path, recorded by `abide config trust`.
//!
//! The record is `$ABIDE_HOME/trusted`, readable only by this user. A changed file is no longer trusted.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::cli::local::Home;
use crate::cli::{Exit, Failure};

const RECORD: &str = "trusted";

/// Trust in a config file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trust {
    /// Named by the user, in the user's config folder, or trusted with this content.
    Full,
    #[default]
    None,
    /// Trusted with another content.
    Changed,
}

impl Trust {
    pub fn describe(self) -> &'static str {
        match self {
            Trust::Full => "trusted",
            Trust::None => "not trusted: run `abide config trust`",
            Trust::Changed => "not trusted: changed since it was trusted; run `abide config trust`",
        }
    }
}

/// Digests by canonical path.
type Records = BTreeMap<String, String>;

/// Trust in a file with this content.
pub fn check_trust(file: &Path, content: &[u8]) -> Result<Trust, Failure> {
    // Without a home folder there is no record.
    let Ok(home) = Home::find() else { return Ok(Trust::None) };
    Ok(match read(&home)?.get(&canonical(file)?) {
        Some(recorded) if *recorded == digest(content) => Trust::Full,
        Some(_) => Trust::Changed,
        None => Trust::None,
    })
}

/// Records the digest of a file's content, and returns the canonical path and the digest.
pub fn record(file: &Path, content: &[u8]) -> Result<(String, String), Failure> {
    let (path, digest) = (canonical(file)?, digest(content));
    change(|records| {
        records.insert(path.clone(), digest.clone());
    })?;
    Ok((path, digest))
}

/// Removes the record of a file, which may no longer exist. Returns whether there was one.
pub fn remove(file: &Path) -> Result<bool, Failure> {
    let path = canonical(file).or_else(|failure| {
        let whole = std::path::absolute(file).map_err(|_| failure)?;
        Ok::<_, Failure>(whole.to_string_lossy().into_owned())
    })?;
    let mut was_trusted = false;
    change(|records| was_trusted = records.remove(&path).is_some())?;
    Ok(was_trusted)
}

fn change(how: impl FnOnce(&mut Records)) -> Result<(), Failure> {
    let home = Home::find()?;
    home.create()?;
    let _lock = home.lock("trusted.lock")?;
    let mut records = read(&home)?;
    how(&mut records);
    home.write(RECORD, &serde_json::json!(records).to_string())
}

/// Reads the record. A record that other users could have written is an error.
fn read(home: &Home) -> Result<Records, Failure> {
    let path = home.path(RECORD);
    let failed = |why: String| Failure::new(Exit::Failed, format!("cannot use {}: {why}", path.display()));
    let meta = match std::fs::symlink_metadata(&path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Records::new()),
        Err(error) => return Err(failed(error.to_string())),
    };
    let me = nix::unistd::geteuid().as_raw();
    if !meta.is_file() || ![me, 0].contains(&meta.uid()) || meta.mode() & 0o022 != 0 {
        let why = "the file is writable by other users, or not a regular file".to_owned();
        return Err(failed(why)
            .hint(format!("remove it, then run `abide config trust` again: rm {}", path.display())));
    }
    let text = std::fs::read_to_string(&path).map_err(|error| failed(error.to_string()))?;
    serde_json::from_str(&text).map_err(|error| failed(error.to_string()))
}

fn canonical(file: &Path) -> Result<String, Failure> {
    let whole: std::io::Result<PathBuf> = file.canonicalize();
    let whole = whole.map_err(|error| Failure::new(Exit::Usage, format!("{}: {error}", file.display())))?;
    Ok(whole.to_string_lossy().into_owned())
}

fn digest(content: &[u8]) -> String {
    blake3::hash(content).to_hex().to_string()
}
