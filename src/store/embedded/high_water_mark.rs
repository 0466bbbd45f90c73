//! High-water mark: the number of the last commit, in a file next to the database.
//!
//! SQLite treats a truncated, damaged or missing WAL as one that ends there: acknowledged changes would be lost silently.
//! The mark is written after each commit. It may be behind (power failure), never ahead: a database with a smaller number
//! has lost changes.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::file::sum;
use crate::store::{Error, Seq};

pub(super) struct HighWaterMark(Option<File>);

impl HighWaterMark {
    /// Read before the database is opened: other processes may be writing.
    pub(super) fn open(database: &Path) -> (HighWaterMark, Seq) {
        let file =
            File::options().create(true).truncate(false).read(true).write(true).open(path(database)).ok();
        let number = file.as_ref().and_then(read).unwrap_or(0);
        (HighWaterMark(file), number)
    }

    /// A failed write only weakens the check; nothing else depends on the mark.
    pub(super) fn set(&self, number: Seq) {
        if let Some(file) = &self.0 {
            let _ = file.write_all_at(&bytes(number), 0);
        }
    }
}

pub(super) fn check(database: &Path, marked: Seq, last: Seq) -> Result<(), Error> {
    if last >= marked {
        return Ok(());
    }
    let mark = path(database);
    let what = format!(
        "the last change is {last}, but {marked} were acknowledged; if an older copy was restored on purpose, \
         remove {}",
        mark.display()
    );
    Err(Error::Corrupt { file: database.display().to_string(), what })
}

fn path(database: &Path) -> PathBuf {
    let mut name = database.as_os_str().to_owned();
    name.push("-mark");
    PathBuf::from(name)
}

fn bytes(number: Seq) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes[8..].copy_from_slice(&sum("mark", &number.to_le_bytes(), 0).to_le_bytes());
    bytes
}

/// `None`: the file does not contain a valid mark.
fn read(file: &File) -> Option<Seq> {
    let mut found = [0; 16];
    file.read_exact_at(&mut found, 0).ok()?;
    let number = Seq::from_le_bytes(found[..8].try_into().ok()?);
    (bytes(number) == found).then_some(number)
}
