//! Rewriting of a file after a change of its keys: values of an older Abide, a new key, or no encryption any more.
//!
//! All values are rewritten in one transaction. Free pages and the write-ahead log still hold the old bytes then, so the
//! file is vacuumed and the log truncated. The format version records that this is due, and a later opening repeats it.

use std::path::Path;

use rusqlite::{Connection, OpenFlags, OptionalExtension, TransactionBehavior, params};

use super::file::{
    COMPACTED_KEY, DatabaseFileError, VERSION_PLAIN, VERSION_SEALED, VERSION_UNSWEPT, gone, last_number,
    store_error, sum,
};
use super::seal::{HEAD, Sealer};
use crate::store::{Error, KeySource};

/// Form of the stored values of a file, and the form that its keys require.
pub(super) struct FileFormat {
    pub(super) sealer: Sealer,
    version: i64,
    /// The current key seals every value.
    is_current: bool,
}

impl FileFormat {
    /// Reads the keys, and changes nothing: a file whose key is missing stays as it is.
    pub(super) fn read(
        connection: &Connection,
        file: &Path,
        source: &KeySource,
        may_create: bool,
    ) -> Result<FileFormat, Error> {
        let version = version(connection).map_err(|error| store_error(error, file))?;
        let sealer = Sealer::of_file(file, source, version != VERSION_PLAIN, may_create)?;
        let is_current = check_keys(connection, &sealer).map_err(|fault| fault.into_store_error(file))?;
        Ok(FileFormat { sealer, version, is_current })
    }

    /// Rewrites the values that are not as the keys want them.
    pub(super) fn rewritten(mut self, connection: &mut Connection, file: &Path) -> Result<Sealer, Error> {
        let target = if self.sealer.current().is_some() { VERSION_SEALED } else { VERSION_PLAIN };
        if self.is_current && self.version == target {
            return Ok(self.sealer);
        }
        let changes = last_number(connection).map_err(|error| store_error(error, file))?;
        if changes == 0 && target == VERSION_SEALED {
            let marked = connection.pragma_update(None, "user_version", VERSION_SEALED);
            marked.map_err(|error| store_error(error, file))?;
        } else {
            if !self.is_current || self.version == VERSION_PLAIN || target == VERSION_PLAIN {
                let encrypted = target == VERSION_SEALED;
                tracing::info!(file = %file.display(), encrypted, "rewriting all stored values");
                rewrite_all(connection, &mut self.sealer, target)
                    .map_err(|fault| fault.into_store_error(file))?;
            }
            if target == VERSION_SEALED {
                remove_old_bytes(connection, file);
            }
        }
        self.sealer.set_sealed(target == VERSION_SEALED);
        Ok(self.sealer)
    }
}

/// A failure is logged, and the next opening tries again: all values are readable.
fn remove_old_bytes(connection: &Connection, file: &Path) {
    let file = file.display();
    match vacuum(connection) {
        Ok(true) => {}
        Ok(false) => {
            tracing::warn!(%file, "free pages still hold old values: another process has the file open");
        }
        Err(error) => tracing::warn!(%file, %error, "free pages still hold old values"),
    }
}

pub(super) fn version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.query_row("PRAGMA user_version", [], |row| row.get(0))
}

/// Whether the values of a file are encrypted. Neither needs a key nor changes the file.
pub fn is_encrypted(file: &Path) -> Result<bool, Error> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let version = Connection::open_with_flags(file, flags).and_then(|connection| version(&connection));
    version.map(|version| version > VERSION_PLAIN).map_err(|error| store_error(error, file))
}

/// Whether the current key seals every value. Refuses a file with a value whose key is unknown.
fn check_keys(connection: &Connection, sealer: &Sealer) -> Result<bool, DatabaseFileError> {
    let mut heads = connection.prepare(&format!("SELECT DISTINCT substr(value, 1, {HEAD}) FROM entry"))?;
    let mut heads = heads.query([])?;
    let mut is_current = true;
    while let Some(row) = heads.next()? {
        // SQLite has no part of an empty value.
        let key = sealer.key_of(&row.get::<_, Option<Vec<u8>>>(0)?.unwrap_or_default());
        key.map_or(Ok(()), |key| sealer.require(key))?;
        is_current &= key == sealer.current();
    }
    Ok(is_current)
}

/// Rewrites every entry and every logged change. Their numbers stay, so other readers of the file keep their caches.
fn rewrite_all(
    connection: &mut Connection,
    sealer: &mut Sealer,
    target: i64,
) -> Result<(), DatabaseFileError> {
    // Bytes of rewritten cells do not stay on their pages.
    connection.pragma_update(None, "secure_delete", "ON")?;
    let file = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    // Another process may have rewritten the file since.
    sealer.set_sealed(version(&file)? != VERSION_PLAIN);
    let mut next = "SELECT key, value, changed FROM entry WHERE key >= ?1 ORDER BY key LIMIT 1";
    let mut after = String::new();
    // One value at a time: all of them may be larger than the memory.
    loop {
        let row: Option<(String, Vec<u8>, i64)> = file
            .prepare_cached(next)?
            .query_row([&after], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
            .optional()?;
        let Some((key, value, changed)) = row else { break };
        let stored = sealer.seal(&key, changed, &sealer.open(&key, changed, value)?)?;
        file.prepare_cached("UPDATE entry SET value = ?2, sum = ?3 WHERE key = ?1")?.execute(params![
            key,
            stored,
            sum(&key, &stored, changed)
        ])?;
        after = key;
        next = "SELECT key, value, changed FROM entry WHERE key > ?1 ORDER BY key LIMIT 1";
    }
    rewrite_log(&file, sealer)?;
    let version = if target == VERSION_PLAIN { VERSION_PLAIN } else { VERSION_UNSWEPT };
    file.pragma_update(None, "user_version", version)?;
    Ok(file.commit()?)
}

fn rewrite_log(file: &Connection, sealer: &Sealer) -> Result<(), DatabaseFileError> {
    let next = "SELECT rowid, number, key, value FROM log WHERE rowid > ?1 AND value IS NOT NULL ORDER BY rowid LIMIT 1";
    let mut after = i64::MIN;
    loop {
        let row: Option<(i64, i64, String, Vec<u8>)> = file
            .prepare_cached(next)?
            .query_row([after], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))
            .optional()?;
        let Some((row, number, key, value)) = row else { return Ok(()) };
        after = row;
        match sealer.open(&key, number, value) {
            Ok(value) => {
                let stored = sealer.seal(&key, number, &value)?;
                file.prepare_cached("UPDATE log SET value = ?2, sum = ?3 WHERE rowid = ?1")?
                    .execute(params![row, stored, sum(&key, &stored, number)])?;
            }
            // Readers of an old change read all entries again.
            Err(DatabaseFileError::Key(_)) => forget(file, number)?,
            Err(fault) => return Err(fault),
        }
    }
}

/// Deletes a change that no key opens, and all earlier ones: to readers they are compacted. The last number stays.
fn forget(file: &Connection, number: i64) -> Result<(), DatabaseFileError> {
    file.execute("DELETE FROM log WHERE number <= ?1", [number])?;
    let left: i64 = file.query_row("SELECT count(*) FROM log", [], |row| row.get(0))?;
    if left == 0 {
        file.execute(
            "INSERT INTO log (number, key, value, sum) VALUES (?1, ?2, NULL, ?3)",
            params![number, COMPACTED_KEY, gone(COMPACTED_KEY, number)],
        )?;
    }
    Ok(())
}

/// Rebuilds the file without free pages. `false`: another process reads the file, and its log cannot be truncated.
fn vacuum(connection: &Connection) -> rusqlite::Result<bool> {
    let truncate = || -> rusqlite::Result<bool> {
        connection
            .query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get::<_, i64>(0))
            .map(|busy| busy == 0)
    };
    connection.execute_batch("VACUUM")?;
    if !truncate()? {
        return Ok(false);
    }
    connection.pragma_update(None, "user_version", VERSION_SEALED)?;
    connection.pragma_update(None, "secure_delete", "OFF")?;
    truncate()
}
