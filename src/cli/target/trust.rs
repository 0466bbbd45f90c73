//! Trust in config files that were found in the current directory: one digest per path, recorded by `abide config trust`.
//!
//! The record is `$ABIDE_HOME/trusted`, for this user alone. A file that changes is not trusted any more.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::cli::local::Home;
use crate::cli::{Exit, Failure};

const RECORD: &str = "trusted";

/// How far a config file is trusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trust {
    /// The user named it, wrote it in the user's own place, or trusted this very content.
    Full,
    #[default]
    None,
    /// Another content of it was trusted.
    Changed,
}

impl Trust {
    pub fn describe(self) -> &'static str {
        match self {
            Trust::Full => "trusted",
            Trust::None => "not trusted: run `abide config trust`",
            Trust::Changed => "not trusted: changed since it was; run `abide config trust`",
        }
    }
}

/// Digests by canonical path.
type Records = BTreeMap<String, String>;

/// How far a file with this content is trusted.
pub fn check_trust(file: &Path, content: &[u8]) -> Result<Trust, Failure> {
    // Without a folder of ours nothing was ever recorded.
    let Ok(home) = Home::find() else { return Ok(Trust::None) };
    Ok(match read(&home)?.get(&canonical(file)?) {
        Some(recorded) if *recorded == digest(content) => Trust::Full,
        Some(_) => Trust::Changed,
        None => Trust::None,
    })
}

/// Records the digest of a file's content; the canonical path and the digest.
pub fn record(file: &Path, content: &[u8]) -> Result<(String, String), Failure> {
    let (path, digest) = (canonical(file)?, digest(content));
    change(|records| {
        records.insert(path.clone(), digest.clone());
    })?;
    Ok((path, digest))
}

/// Removes the record of a file, which may be gone; whether there was one.
pub fn remove(file: &Path) -> Result<bool, Failure> {
    let path = canonical(file).or_else(|failure| {
        let whole = std::path::absolute(file).map_err(|_| failure)?;
        Ok::<_, Failure>(whole.to_string_lossy().into_owned())
    })?;
    let mut was_there = false;
    change(|records| was_there = records.remove(&path).is_some())?;
    Ok(was_there)
}

fn change(how: impl FnOnce(&mut Records)) -> Result<(), Failure> {
    let home = Home::find()?;
    home.create()?;
    let _lock = home.lock("trusted.lock")?;
    let mut records = read(&home)?;
    how(&mut records);
    home.write(RECORD, &serde_json::json!(records).to_string())
}

/// What was recorded. A record that others could have written is an error, not trust.
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
        let why = "it is not a file that only this user can write".to_owned();
        return Err(
            failed(why).hint(format!("remove it, and trust again what should be: rm {}", path.display()))
        );
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
