//! Database file: schema, queries, checksums, and the mapping of SQLite errors.

use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::types::ValueRef;
use rusqlite::{Connection, ErrorCode, OpenFlags, Row};

use super::seal::Sealer;
use crate::store::{Change, DiskError, Entry, Error, Seq};

/// Number of changes that the log keeps.
pub(super) const KEPT: u64 = 100_000;
/// Maximum bytes of the changes that the log keeps.
const KEPT_BYTES: u64 = 128 << 20;
/// Maximum bytes of a WAL that was checkpointed.
const WAL_BYTES: i64 = 16 << 20;
/// Format of a file: values in plain text.
pub(super) const VERSION_PLAIN: i64 = 1;
/// Format of a file: values are encrypted, and its free pages may hold older bytes.
pub(super) const VERSION_UNSWEPT: i64 = 2;
/// Format of a file: values are encrypted.
pub(super) const VERSION_SEALED: i64 = 3;
/// Key of a logged row for changes that the log does not keep: its number and all earlier ones.
pub(super) const COMPACTED_KEY: &str = "";
/// Maximum wait of a writer for the write of another process.
const BUSY: Duration = Duration::from_secs(10);

pub(super) fn connect(file: &Path) -> Result<Connection, Error> {
    let flags =
        OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    // Specs contain secrets, and names are not encrypted. The -wal and -shm files get the same mode.
    let mut private = std::fs::File::options();
    let _ = private.write(true).create_new(true).mode(0o600).open(file);
    let open = || {
        let connection = Connection::open_with_flags(file, flags)?;
        connection.busy_timeout(BUSY)?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "FULL")?;
        // The writer thread checkpoints when it is idle.
        connection.pragma_update(None, "wal_autocheckpoint", 0)?;
        connection.set_prepared_statement_cache_capacity(32);
        connection.pragma_update(None, "journal_size_limit", WAL_BYTES)?;
        // All entries are in memory already.
        connection.pragma_update(None, "cache_size", -512)?;
        Ok(connection)
    };
    open().map_err(|error| store_error(error, file))
}

/// A connection that changes nothing.
pub(super) fn connect_to_read(file: &Path) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(file, flags)?;
    connection.busy_timeout(BUSY)?;
    Ok(connection)
}

/// One entry.
pub(super) fn read_entry(
    connection: &Connection,
    sealer: &Sealer,
    key: &str,
) -> Result<Option<Entry>, DatabaseFileError> {
    let mut rows = connection.prepare_cached("SELECT key, value, changed, sum FROM entry WHERE key = ?1")?;
    let mut rows = rows.query([key])?;
    rows.next()?.map(|row| entry_of(row, sealer)).transpose()
}

/// Calls `each` with the entries from a key on, in order, until it returns false.
pub(super) fn read_entries(
    connection: &Connection,
    sealer: &Sealer,
    first: &str,
    mut each: impl FnMut(Entry) -> bool,
) -> Result<(), DatabaseFileError> {
    let mut rows = connection
        .prepare_cached("SELECT key, value, changed, sum FROM entry WHERE key >= ?1 ORDER BY key")?;
    let mut rows = rows.query([first])?;
    while let Some(row) = rows.next()? {
        if !each(entry_of(row, sealer)?) {
            return Ok(());
        }
    }
    Ok(())
}

/// The entry of a row, whose checksum must be right.
fn entry_of(row: &Row<'_>, sealer: &Sealer) -> Result<Entry, DatabaseFileError> {
    let key: Arc<str> = row.get::<_, String>(0)?.into();
    let (stored, changed): (Vec<u8>, i64) = (row.get(1)?, row.get(2)?);
    if sum(&key, &stored, changed) != row.get::<_, i64>(3)? {
        return Err(DatabaseFileError::Entry(format!("the entry {key:?} has a wrong checksum")));
    }
    let value = sealer.open(&key, changed, stored)?.into();
    Ok(Entry { key, value, mod_seq: number(changed) })
}

/// Creates the tables, or verifies an existing file.
pub(super) fn prepare(connection: &Connection, file: &Path) -> Result<(), Error> {
    let shown = || file.display().to_string();
    let damaged = |what: String| Error::Corrupt { file: shown(), what };
    let failed = |error: rusqlite::Error| store_error(error, file);
    let check: String =
        connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(failed)?;
    if check != "ok" {
        return Err(damaged(check));
    }
    let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(failed)?;
    let foreign: i64 = connection
        .query_row(
            "SELECT count(*) FROM sqlite_schema WHERE name NOT IN ('entry', 'log', 'log_number')",
            [],
            |row| row.get(0),
        )
        .map_err(failed)?;
    match version {
        VERSION_PLAIN | VERSION_UNSWEPT | VERSION_SEALED => Ok(()),
        0 if foreign == 0 => connection
            .execute_batch(&format!(
                "BEGIN IMMEDIATE;
                 CREATE TABLE IF NOT EXISTS entry
                     (key TEXT PRIMARY KEY, value BLOB NOT NULL, changed INTEGER NOT NULL, sum INTEGER NOT NULL)
                     WITHOUT ROWID;
                 CREATE TABLE IF NOT EXISTS log (number INTEGER NOT NULL, key TEXT NOT NULL, value BLOB, sum INTEGER NOT NULL);
                 CREATE INDEX IF NOT EXISTS log_number ON log (number);
                 PRAGMA user_version = {VERSION_PLAIN};
                 COMMIT;"
            ))
            .map_err(failed),
        0 => Err(damaged("the database belongs to another program".to_owned())),
        version => Err(Error::TooNew { file: shown(), version }),
    }
}

/// Changes after a number, in order; `None`: some of them are compacted.
pub(super) fn logged(
    connection: &Connection,
    sealer: &Sealer,
    prefix: &str,
    after: Seq,
) -> Result<Option<Vec<Change>>, DatabaseFileError> {
    let mut oldest = connection.prepare_cached("SELECT min(number) FROM log")?;
    let oldest: Option<i64> = oldest.query_row([], |row| row.get(0))?;
    if oldest.is_some_and(|oldest| number(oldest) > after + 1) {
        return Ok(None);
    }
    let mut rows = connection
        .prepare_cached("SELECT number, key, value, sum FROM log WHERE number > ?1 ORDER BY number, rowid")?;
    let mut rows = rows.query([signed(after)])?;
    let mut changes = Vec::new();
    while let Some(row) = rows.next()? {
        let key: String = row.get(1)?;
        if key == COMPACTED_KEY && row.get_ref(2)? == ValueRef::Null {
            return Ok(None);
        }
        if key.starts_with(prefix) {
            let (at, value) = (row.get(0)?, row.get::<_, Option<Vec<u8>>>(2)?);
            let written = value.as_deref().map_or_else(|| gone(&key, at), |value| sum(&key, value, at));
            if written != row.get::<_, i64>(3)? {
                return Err(DatabaseFileError::Entry(format!("change {at} of {key:?} has a wrong checksum")));
            }
            let value = match value.map(|value| sealer.open(&key, at, value)).transpose() {
                Ok(value) => value,
                // A change from before a change of keys: the reader reads all entries again.
                Err(DatabaseFileError::Key(_)) => return Ok(None),
                Err(fault) => return Err(fault),
            };
            changes.push(Change { number: number(at), key: key.into(), value: value.map(Arc::from) });
        }
    }
    Ok(Some(changes))
}

/// Deletes the oldest changes beyond the count and the bytes that the log keeps. The last change always stays: it has
/// the store's last number.
pub(super) fn compact(connection: &Connection, last: Seq) -> rusqlite::Result<()> {
    let mut oldest = last.saturating_sub(KEPT);
    let mut sizes = connection.prepare_cached(
        "SELECT number, sum(length(key) + coalesce(length(value), 0)) FROM log WHERE number < ?1
         GROUP BY number ORDER BY number DESC",
    )?;
    let mut sizes = sizes.query([signed(last)])?;
    let mut bytes = 0;
    while let Some(row) = sizes.next()? {
        bytes += number(row.get(1)?);
        if bytes > KEPT_BYTES {
            oldest = oldest.max(number(row.get(0)?));
            break;
        }
    }
    drop(sizes);
    connection.prepare_cached("DELETE FROM log WHERE number <= ?1")?.execute([signed(oldest)])?;
    Ok(())
}

pub(super) fn last_number(connection: &Connection) -> rusqlite::Result<Seq> {
    let mut row = connection.prepare_cached("SELECT max(number) FROM log")?;
    let last: Option<i64> = row.query_row([], |row| row.get(0))?;
    Ok(last.map_or(0, number))
}

pub(super) fn data_version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.prepare_cached("PRAGMA data_version")?.query_row([], |row| row.get(0))
}

/// Reason why the file cannot be read.
pub(super) enum DatabaseFileError {
    Sqlite(rusqlite::Error),
    /// An entry is damaged.
    Entry(String),
    /// The key of an entry is missing.
    Key(String),
}

impl From<rusqlite::Error> for DatabaseFileError {
    fn from(error: rusqlite::Error) -> DatabaseFileError {
        match error {
            // A value of a type that is never written: the file is damaged.
            rusqlite::Error::InvalidColumnType(..) | rusqlite::Error::FromSqlConversionFailure(..) => {
                DatabaseFileError::Entry(error.to_string())
            }
            error => DatabaseFileError::Sqlite(error),
        }
    }
}

impl DatabaseFileError {
    pub(super) fn into_store_error(self, file: &Path) -> Error {
        match self {
            DatabaseFileError::Sqlite(error) => store_error(error, file),
            DatabaseFileError::Entry(what) => Error::Corrupt { file: file.display().to_string(), what },
            DatabaseFileError::Key(keys) => Error::KeyMissing { file: file.display().to_string(), keys },
        }
    }
}

/// Maps an SQLite error.
pub(super) fn store_error(error: rusqlite::Error, file: &Path) -> Error {
    let shown = file.display().to_string();
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => Error::Full,
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            Error::Corrupt { file: shown, what: error.to_string() }
        }
        _ => Error::Disk { what: shown, source: DiskError::Sqlite(Arc::new(error)) },
    }
}

/// Checksum of an entry. SQLite checks the structure of its pages, not their content.
pub(super) fn sum(key: &str, value: &[u8], changed: i64) -> i64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(key.len() as u64).to_le_bytes()).update(key.as_bytes()).update(value);
    let hash = hasher.update(&changed.to_le_bytes()).finalize();
    let [a, b, c, d, e, f, g, h, ..] = *hash.as_bytes();
    i64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// Checksum of a deletion.
pub(super) fn gone(key: &str, changed: i64) -> i64 {
    !sum(key, &[], changed)
}

/// SQLite integers are signed; sequence numbers never reach the sign bit.
pub(super) fn signed(number: Seq) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(super) fn number(signed: i64) -> Seq {
    Seq::try_from(signed).unwrap_or(0)
}
