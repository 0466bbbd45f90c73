//! Trim of a file before its values are in memory: entries are deleted, or moved to a file next to it.
//!
//! The choice is made from keys and sizes alone. An entry that is moved is on disk in its new file before it is deleted:
//! a crash in between repeats the trim, and loses nothing.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OptionalExtension, Transaction};

use super::file::{compact, last_number, understand};
use super::writer::{apply, log};
use crate::clock;
use crate::store::{Error, Txn, Write};

/// Chooses entries from the keys and sizes of all.
pub type Trim<'a> = &'a dyn Fn(&mut dyn Iterator<Item = (String, usize)>) -> TrimChoice;

/// Entries that a store does not keep.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrimChoice {
    /// Keys to delete.
    pub deleted: Vec<String>,
    /// Keys to move to a file next to the store.
    pub set_aside: Vec<String>,
    /// Index entries to delete: those with a key prefix and one of these values.
    pub index_entries: Vec<(String, Vec<String>)>,
}

/// Deletes or moves the entries that `trim` chooses, as a logged change. Reads one value at a time.
pub(super) fn trim_file(connection: &mut Connection, file: &Path, trim: Trim<'_>) -> Result<(), Error> {
    let failed = |error| understand(error, file);
    let mode = rusqlite::TransactionBehavior::Immediate;
    let transaction = connection.transaction_with_behavior(mode).map_err(failed)?;
    let choice = choose(&transaction, trim).map_err(failed)?;
    if choice.deleted.is_empty() && choice.set_aside.is_empty() {
        return Ok(());
    }
    if !choice.set_aside.is_empty() {
        set_aside(&transaction, file, &choice.set_aside)?;
    }
    delete(transaction, choice).map_err(failed)
}

fn choose(file: &Connection, trim: Trim<'_>) -> rusqlite::Result<TrimChoice> {
    let mut sizes = file.prepare("SELECT key, length(value) FROM entry")?;
    let sizes = sizes.query_map([], |row| Ok((row.get(0)?, row.get::<_, i64>(1)?)))?;
    let sizes: Vec<(String, i64)> = sizes.collect::<Result<_, _>>()?;
    Ok(trim(&mut sizes.into_iter().map(|(key, size)| (key, usize::try_from(size).unwrap_or(0)))))
}

/// Writes entries to a new file, one JSON document per line, that only its owner can read.
fn set_aside(store: &Connection, file: &Path, keys: &[String]) -> Result<(), Error> {
    let mut name = file.as_os_str().to_owned();
    name.push(format!(".set-aside-{}", clock::now().0));
    let path = PathBuf::from(name);
    let shown = path.display().to_string();
    let failed = |error| Error::io(&shown, error);
    let created = File::options().write(true).create_new(true).mode(0o600).open(&path).map_err(failed)?;
    let mut lines = BufWriter::new(created);
    let understood = |error| understand(error, file);
    let mut select = store.prepare("SELECT value FROM entry WHERE key = ?1").map_err(understood)?;
    for key in keys {
        let value: Option<Vec<u8>> =
            select.query_row([key], |row| row.get(0)).optional().map_err(understood)?;
        let Some(value) = value else { continue };
        let value = serde_json::from_slice::<serde_json::Value>(&value)
            .unwrap_or_else(|_| String::from_utf8_lossy(&value).into());
        serde_json::to_writer(&mut lines, &serde_json::json!({"key": key, "value": value}))
            .map_err(|error| failed(error.into()))?;
        lines.write_all(b"\n").map_err(failed)?;
    }
    let written = lines.into_inner().map_err(|error| failed(error.into_error()))?;
    written.sync_all().map_err(failed)?;
    tracing::warn!(entries = keys.len(), file = %shown, "entries of an overfilled store are set aside");
    Ok(())
}

fn delete(file: Transaction<'_>, choice: TrimChoice) -> rusqlite::Result<()> {
    let mut keys = choice.deleted;
    keys.extend(choice.set_aside);
    for (prefix, values) in choice.index_entries {
        let values: std::collections::HashSet<String> = values.into_iter().collect();
        let mut select = file.prepare_cached(
            "SELECT key, value FROM entry WHERE key >= ?1 AND substr(key, 1, length(?1)) = ?1 AND length(value) < 1024",
        )?;
        let entries =
            select.query_map([&prefix], |row| Ok((row.get::<_, String>(0)?, row.get::<_, Vec<u8>>(1)?)))?;
        for entry in entries {
            let (key, value) = entry?;
            if std::str::from_utf8(&value).is_ok_and(|value| values.contains(value)) {
                keys.push(key);
            }
        }
    }
    let writes = keys.into_iter().map(Write::Delete).collect();
    let (mut last, mut changes) = (last_number(&file)?, Vec::new());
    apply(&file, &Txn { compares: Vec::new(), writes }, &mut last, &mut changes)?;
    log(&file, &changes)?;
    compact(&file, last)?;
    file.commit()
}
