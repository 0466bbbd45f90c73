//! The file: its tables, what is read from it, and SQLite's errors in our words.

use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, OpenFlags};

use crate::store::{Change, Error, Seq};

/// How many changes are known one by one.
pub(super) const KEPT: u64 = 100_000;
/// The format of the file.
const VERSION: i64 = 1;
/// How long a writer waits for another process's write.
const BUSY: Duration = Duration::from_secs(10);
pub(super) fn connect(file: &Path) -> Result<Connection, Error> {
    let flags =
        OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    // It holds what processes are given, secrets too. Its companions take its mode.
    let mut private = std::fs::File::options();
    let _ = private.write(true).create_new(true).mode(0o600).open(file);
    let open = || {
        let connection = Connection::open_with_flags(file, flags)?;
        connection.busy_timeout(BUSY)?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "FULL")?;
        // The writer's thread does that in quiet moments.
        connection.pragma_update(None, "wal_autocheckpoint", 0)?;
        connection.set_prepared_statement_cache_capacity(32);
        // Everything is in memory anyway.
        connection.pragma_update(None, "cache_size", -512)?;
        Ok(connection)
    };
    open().map_err(|error| understand(&error, file))
}

/// Makes the tables, or makes sure that they are what they should be.
pub(super) fn prepare(connection: &Connection, file: &Path) -> Result<(), Error> {
    let shown = || file.display().to_string();
    let damaged = |what: String| Error::Corrupt { file: shown(), what };
    let understood = |error: rusqlite::Error| understand(&error, file);
    let check: String =
        connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0)).map_err(understood)?;
    if check != "ok" {
        return Err(damaged(check));
    }
    let version: i64 =
        connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(understood)?;
    let foreign: i64 = connection
        .query_row(
            "SELECT count(*) FROM sqlite_schema WHERE name NOT IN ('entry', 'log', 'log_number')",
            [],
            |row| row.get(0),
        )
        .map_err(understood)?;
    match version {
        VERSION => Ok(()),
        0 if foreign == 0 => connection
            .execute_batch(&format!(
                "BEGIN IMMEDIATE;
                 CREATE TABLE IF NOT EXISTS entry
                     (key TEXT PRIMARY KEY, value BLOB NOT NULL, changed INTEGER NOT NULL, sum INTEGER NOT NULL)
                     WITHOUT ROWID;
                 CREATE TABLE IF NOT EXISTS log (number INTEGER NOT NULL, key TEXT NOT NULL, value BLOB, sum INTEGER NOT NULL);
                 CREATE INDEX IF NOT EXISTS log_number ON log (number);
                 PRAGMA user_version = {VERSION};
                 COMMIT;"
            ))
            .map_err(understood),
        0 => Err(damaged("it is some other program's database".to_owned())),
        version => Err(Error::TooNew { file: shown(), version }),
    }
}

/// Changes after a number, in order; `None`: some of them are forgotten.
pub(super) fn logged(
    connection: &Connection,
    prefix: &str,
    after: Seq,
) -> Result<Option<Vec<Change>>, Fault> {
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
        if key.starts_with(prefix) {
            let (at, value) = (row.get(0)?, row.get::<_, Option<Vec<u8>>>(2)?);
            let written = value.as_deref().map_or_else(|| gone(&key, at), |value| sum(&key, value, at));
            if written != row.get::<_, i64>(3)? {
                return Err(Fault::Entry(format!("the change {at} of {key:?} is not what was written")));
            }
            changes.push(Change { number: number(at), key: key.into(), value: value.map(Arc::from) });
        }
    }
    Ok(Some(changes))
}

pub(super) fn last_number(connection: &Connection) -> rusqlite::Result<Seq> {
    let mut row = connection.prepare_cached("SELECT max(number) FROM log")?;
    let last: Option<i64> = row.query_row([], |row| row.get(0))?;
    Ok(last.map_or(0, number))
}

pub(super) fn data_version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.prepare_cached("PRAGMA data_version")?.query_row([], |row| row.get(0))
}

/// Why not everything can be read.
pub(super) enum Fault {
    Sqlite(rusqlite::Error),
    /// An entry is not what was written.
    Entry(String),
}

impl From<rusqlite::Error> for Fault {
    fn from(error: rusqlite::Error) -> Fault {
        match error {
            // A text that is none, say: nobody wrote that.
            rusqlite::Error::InvalidColumnType(..) | rusqlite::Error::FromSqlConversionFailure(..) => {
                Fault::Entry(error.to_string())
            }
            error => Fault::Sqlite(error),
        }
    }
}

impl Fault {
    pub(super) fn understand(&self, file: &Path) -> Error {
        match self {
            Fault::Sqlite(error) => understand(error, file),
            Fault::Entry(what) => Error::Corrupt { file: file.display().to_string(), what: what.clone() },
        }
    }
}

/// SQLite's errors in our words.
pub(super) fn understand(error: &rusqlite::Error, file: &Path) -> Error {
    let shown = file.display().to_string();
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => Error::Full,
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            Error::Corrupt { file: shown, what: error.to_string() }
        }
        _ => Error::Disk(format!("{shown}: {error}")),
    }
}

/// What an entry must add up to. SQLite checks its pages' structure, not what stands in them.
pub(super) fn sum(key: &str, value: &[u8], changed: i64) -> i64 {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(key.len() as u64).to_le_bytes()).update(key.as_bytes()).update(value);
    let hash = hasher.update(&changed.to_le_bytes()).finalize();
    let [a, b, c, d, e, f, g, h, ..] = *hash.as_bytes();
    i64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// The same for an entry's end.
pub(super) fn gone(key: &str, changed: i64) -> i64 {
    !sum(key, &[], changed)
}

/// SQLite's numbers are signed; ours never come near the sign.
pub(super) fn signed(number: Seq) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(super) fn number(signed: i64) -> Seq {
    Seq::try_from(signed).unwrap_or(0)
}
