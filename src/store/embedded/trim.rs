//! Trim of a file before its values are in memory: entries are deleted, or moved to a file next to it.
//!
//! The choice is made from keys and sizes alone. An entry that is moved is on disk in its new file before it is deleted:
//! a crash in between repeats the trim, and loses nothing. The new file is encrypted if the store is.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use rusqlite::{Connection, OptionalExtension, Transaction};
use serde_json::{Value, json};

use super::file::{DatabaseFileError, compact, last_number, store_error};
use super::seal::{HEAD, Sealer};
use super::writer::{apply, log};
use crate::clock;
use crate::store::{Error, KeySource, Txn, Write};

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
pub(super) fn trim_file(
    connection: &mut Connection,
    file: &Path,
    sealer: &Sealer,
    trim: Trim<'_>,
) -> Result<(), Error> {
    let failed = |error| store_error(error, file);
    let mode = rusqlite::TransactionBehavior::Immediate;
    let transaction = connection.transaction_with_behavior(mode).map_err(failed)?;
    let choice = choose(&transaction, sealer, trim).map_err(failed)?;
    if choice.deleted.is_empty() && choice.set_aside.is_empty() {
        return Ok(());
    }
    if !choice.set_aside.is_empty() {
        set_aside(&transaction, file, sealer, &choice.set_aside)?;
    }
    delete(transaction, sealer, choice).map_err(|fault| fault.into_store_error(file))
}

fn choose(file: &Connection, sealer: &Sealer, trim: Trim<'_>) -> rusqlite::Result<TrimChoice> {
    let mut sizes =
        file.prepare(&format!("SELECT key, length(value), substr(value, 1, {HEAD}) FROM entry"))?;
    let sizes = sizes.query_map([], |row| {
        // SQLite has no part of an empty value.
        let head = row.get::<_, Option<Vec<u8>>>(2)?.unwrap_or_default();
        let size = usize::try_from(row.get::<_, i64>(1)?).unwrap_or(0);
        Ok((row.get(0)?, sealer.text_size(&head, size)))
    })?;
    let sizes: Vec<(String, usize)> = sizes.collect::<Result<_, _>>()?;
    Ok(trim(&mut sizes.into_iter()))
}

/// Writes entries to a new file, one JSON document per line, that only its owner can read.
fn set_aside(store: &Connection, file: &Path, sealer: &Sealer, keys: &[String]) -> Result<(), Error> {
    let mut name = file.as_os_str().to_owned();
    name.push(format!(".set-aside-{}", clock::now().0));
    let path = PathBuf::from(name);
    let shown = path.display().to_string();
    let failed = |error| Error::io(&shown, error);
    let created = File::options().write(true).create_new(true).mode(0o600).open(&path).map_err(failed)?;
    let mut lines = BufWriter::new(created);
    let mut select = store
        .prepare("SELECT value, changed FROM entry WHERE key = ?1")
        .map_err(|error| store_error(error, file))?;
    for key in keys {
        let entry = select.query_row([key], |row| Ok((row.get(0)?, row.get(1)?))).optional();
        let Some((stored, changed)) = entry.map_err(|error| store_error(error, file))? else { continue };
        let line =
            set_aside_line(sealer, key, changed, stored).map_err(|fault| fault.into_store_error(file))?;
        serde_json::to_writer(&mut lines, &line).map_err(|error| failed(error.into()))?;
        lines.write_all(b"\n").map_err(failed)?;
    }
    let written = lines.into_inner().map_err(|error| failed(error.into_error()))?;
    written.sync_all().map_err(failed)?;
    tracing::warn!(entries = keys.len(), file = %shown, "entries of an overfilled store are set aside");
    Ok(())
}

/// An entry for a file of entries. With a key its value is sealed, also if the store is not rewritten yet.
fn set_aside_line(
    sealer: &Sealer,
    key: &str,
    changed: i64,
    stored: Vec<u8>,
) -> Result<Value, DatabaseFileError> {
    let value = sealer.open(key, changed, stored)?;
    Ok(match sealer.current() {
        Some(_) => {
            let sealed = BASE64.encode(sealer.seal(key, changed, &value)?);
            json!({"key": key, "changed": changed, "sealed": sealed})
        }
        None => json!({"key": key, "value": readable(&value)}),
    })
}

fn readable(value: &[u8]) -> Value {
    serde_json::from_slice(value).unwrap_or_else(|_| String::from_utf8_lossy(value).into())
}

/// Passes the entries of a file of set-aside entries to `print`, decrypted: one JSON document with `key` and `value` each.
pub fn print_set_aside(file: &Path, keys: &KeySource, print: &mut dyn FnMut(&Value)) -> Result<(), Error> {
    let shown = file.display().to_string();
    let damaged = |at: usize| Error::InvalidLine { file: shown.clone(), line: at + 1 };
    let lines = BufReader::new(File::open(file).map_err(|error| Error::io(&shown, error))?).lines();
    let mut sealer = None;
    for (at, line) in lines.enumerate() {
        let line = line.map_err(|error| Error::io(&shown, error))?;
        let entry: Value = serde_json::from_str(&line).map_err(|_| damaged(at))?;
        let (Some(key), Some(sealed)) = (entry["key"].as_str(), entry["sealed"].as_str()) else {
            print(&entry);
            continue;
        };
        let sealer = match &mut sealer {
            Some(sealer) => sealer,
            none => none.insert(Sealer::of_file(file, keys, true, false)?),
        };
        let stored = BASE64.decode(sealed).map_err(|_| damaged(at))?;
        let changed = entry["changed"].as_i64().ok_or_else(|| damaged(at))?;
        let value = sealer.open(key, changed, stored).map_err(|fault| match fault {
            DatabaseFileError::Entry(_) => damaged(at),
            fault => fault.into_store_error(file),
        })?;
        print(&json!({"key": key, "value": readable(&value)}));
    }
    Ok(())
}

fn delete(file: Transaction<'_>, sealer: &Sealer, choice: TrimChoice) -> Result<(), DatabaseFileError> {
    let mut keys = choice.deleted;
    keys.extend(choice.set_aside);
    for (prefix, values) in choice.index_entries {
        let values: std::collections::HashSet<String> = values.into_iter().collect();
        let mut select = file.prepare_cached(
            "SELECT key, value, changed FROM entry
             WHERE key >= ?1 AND substr(key, 1, length(?1)) = ?1 AND length(value) < 1024",
        )?;
        let mut entries = select.query([&prefix])?;
        while let Some(row) = entries.next()? {
            let key: String = row.get(0)?;
            let value = sealer.open(&key, row.get(2)?, row.get(1)?)?;
            if std::str::from_utf8(&value).is_ok_and(|value| values.contains(value)) {
                keys.push(key);
            }
        }
    }
    let writes = keys.into_iter().map(Write::Delete).collect();
    let (mut last, mut changes) = (last_number(&file)?, Vec::new());
    apply(&file, sealer, &Txn { compares: Vec::new(), writes }, &mut last, &mut changes)?;
    log(&file, &changes)?;
    compact(&file, last)?;
    Ok(file.commit()?)
}
