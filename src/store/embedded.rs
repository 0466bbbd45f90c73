//! The store in a file: SQLite, written to by one thread, read from memory.
//!
//! # Theory of operation
//! A transaction is handed to the writer's thread. The thread takes everything that waits, puts it into one SQLite
//! transaction, commits (WAL, synchronous FULL: the commit is on disk), and only then answers; so many small writes
//! share one wait for the disk. Readers look at a copy in memory. Another process may write to the same file: before
//! an answer the copy asks SQLite whether anybody did, and if so takes over the changes since its last one from the
//! log. The log keeps the last [`KEPT`] changes; whoever asks for older ones is told to look at everything anew.
//!
//! A commit that fails changes nothing: those who waited for it are told, the copy stays as it was, and the next
//! transaction tries again.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, mpsc};
use std::time::{Duration, SystemTime};

use rusqlite::{Connection, ErrorCode, OpenFlags, OptionalExtension, params};
use tokio::sync::{oneshot, watch};

use super::lease::{Holder, Lease, Record, Taken};
use super::{Change, Compare, Entry, Error, Number, Outcome, Page, Store, Txn, Write};

/// How many changes are known one by one.
pub const KEPT: u64 = 100_000;
/// The format of the file.
const VERSION: i64 = 1;
/// How long a writer waits for another process's write.
const BUSY: Duration = Duration::from_secs(10);
/// The most transactions that share a commit: more would only make the first of them wait.
const HANDFUL: usize = 1024;
/// Changes are forgotten in bulk: doing so with each write would cost as much as the write.
const FORGET_EVERY: u64 = 1_000;

#[derive(Clone)]
pub struct Embedded {
    shared: Arc<Shared>,
}

struct Shared {
    file: PathBuf,
    copy: RwLock<Copy>,
    /// Asks whether another process wrote, and what.
    reader: Mutex<Connection>,
    writer: mpsc::Sender<Job>,
    /// The last number: who waits for changes waits for this.
    last: watch::Sender<Number>,
}

/// Everything, in memory.
#[derive(Default)]
struct Copy {
    entries: BTreeMap<Arc<str>, Entry>,
    last: Number,
    /// SQLite's word on whether somebody else wrote.
    data_version: i64,
}

enum Job {
    Txn(Txn, oneshot::Sender<Result<Outcome, Error>>),
    Lease { name: String, ask: Ask, answer: oneshot::Sender<Result<Granted, Error>> },
}

enum Ask {
    Take(Holder, Duration),
    Renew(Lease, Duration),
    Release(Lease),
}

enum Granted {
    Taken(Taken),
    Kept(bool),
}

impl Embedded {
    /// Opens the file, or makes it. A file that is damaged, or from a newer Abide, is refused.
    pub fn open(file: &Path) -> Result<Embedded, Error> {
        let connection = connect(file)?;
        prepare(&connection, file)?;
        let reader = connect(file)?;
        let mut copy = Copy::default();
        copy.load(&reader).map_err(|error| understand(&error, file))?;
        let (writer, jobs) = mpsc::channel();
        let (last, _) = watch::channel(copy.last);
        let shared = Arc::new(Shared {
            file: file.to_owned(),
            copy: RwLock::new(copy),
            reader: Mutex::new(reader),
            writer,
            last,
        });
        let weak = Arc::downgrade(&shared);
        let own = file.to_owned();
        std::thread::Builder::new()
            .name("store".to_owned())
            .spawn(move || {
                Writer { connection, file: own, shared: weak }.run(&jobs);
            })
            .map_err(|error| Error::Disk(format!("cannot start the store's thread: {error}")))?;
        Ok(Embedded { shared })
    }

    async fn ask(&self, name: &str, ask: Ask) -> Result<Granted, Error> {
        let (answer, asked) = oneshot::channel();
        let job = Job::Lease { name: format!("lease/{name}"), ask, answer };
        self.shared.writer.send(job).map_err(|_| Error::Closed)?;
        asked.await.map_err(|_| Error::Closed)?
    }
}

impl Shared {
    /// The copy, with what other processes wrote since.
    fn refresh(&self) -> Result<(), Error> {
        let reader = lock(&self.reader);
        let version = data_version(&reader).map_err(|error| understand(&error, &self.file))?;
        if read(&self.copy).data_version == version {
            return Ok(());
        }
        let mut copy = self.copy.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        copy.catch_up(&reader).map_err(|error| understand(&error, &self.file))?;
        copy.data_version = version;
        self.last.send_if_modified(|last| std::mem::replace(last, copy.last) != copy.last);
        Ok(())
    }
}

impl Store for Embedded {
    async fn get(&self, key: &str) -> Result<Option<Entry>, Error> {
        self.shared.refresh()?;
        Ok(read(&self.shared.copy).entries.get(key).cloned())
    }

    async fn range(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Page, Error> {
        self.shared.refresh()?;
        let copy = read(&self.shared.copy);
        let from = match after.filter(|after| *after >= prefix) {
            Some(after) => Bound::Excluded(after),
            None => Bound::Included(prefix),
        };
        let mut inside = copy
            .entries
            .range::<str, _>((from, Bound::Unbounded))
            .map(|(_, entry)| entry)
            .take_while(|entry| entry.key.starts_with(prefix));
        let entries: Vec<Entry> = inside.by_ref().take(limit).cloned().collect();
        let more = inside.next().and(entries.last()).map(|entry| entry.key.clone());
        Ok(Page { entries, more, as_of: copy.last })
    }

    async fn slice(&self, prefix: &str, skip: usize, limit: usize) -> Result<(Vec<Entry>, usize), Error> {
        self.shared.refresh()?;
        let copy = read(&self.shared.copy);
        let mut entries = Vec::new();
        let mut count = 0;
        let from = (Bound::Included(prefix), Bound::Unbounded);
        for (key, entry) in copy.entries.range::<str, _>(from) {
            if !key.starts_with(prefix) {
                break;
            }
            if count >= skip && entries.len() < limit {
                entries.push(entry.clone());
            }
            count += 1;
        }
        Ok((entries, count))
    }

    async fn txn(&self, txn: Txn) -> Result<Outcome, Error> {
        let (answer, asked) = oneshot::channel();
        self.shared.writer.send(Job::Txn(txn, answer)).map_err(|_| Error::Closed)?;
        asked.await.map_err(|_| Error::Closed)?
    }

    async fn changes(&self, prefix: &str, after: Number) -> Result<Vec<Change>, Error> {
        let mut last = self.shared.last.subscribe();
        loop {
            self.shared.refresh()?;
            let found = {
                let reader = lock(&self.shared.reader);
                logged(&reader, prefix, after).map_err(|error| understand(&error, &self.shared.file))?
            };
            match found {
                None => return Err(Error::Forgotten),
                Some(changes) if !changes.is_empty() => return Ok(changes),
                Some(_) => {}
            }
            // Another process's writes wake nobody here: it is asked now and then.
            let woken = tokio::time::timeout(OTHERS, last.changed()).await;
            if let Ok(Err(_)) = woken {
                return Err(Error::Closed);
            }
        }
    }

    async fn take_lease(&self, name: &str, holder: &Holder, lives: Duration) -> Result<Taken, Error> {
        match self.ask(name, Ask::Take(holder.clone(), lives)).await? {
            Granted::Taken(taken) => Ok(taken),
            Granted::Kept(_) => Err(Error::Closed),
        }
    }

    async fn renew_lease(&self, lease: &Lease, lives: Duration) -> Result<bool, Error> {
        Ok(matches!(self.ask(&lease.name, Ask::Renew(lease.clone(), lives)).await?, Granted::Kept(true)))
    }

    async fn release_lease(&self, lease: &Lease) -> Result<(), Error> {
        self.ask(&lease.name, Ask::Release(lease.clone())).await.map(|_| ())
    }
}

/// How often a waiting reader asks whether another process wrote.
const OTHERS: Duration = Duration::from_millis(200);

impl Copy {
    fn load(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        self.data_version = data_version(connection)?;
        self.last = last_number(connection)?;
        let mut rows = connection.prepare("SELECT key, value, changed FROM entry")?;
        let mut rows = rows.query([])?;
        self.entries.clear();
        while let Some(row) = rows.next()? {
            let key: Arc<str> = row.get::<_, String>(0)?.into();
            let value: Arc<[u8]> = row.get::<_, Vec<u8>>(1)?.into();
            let changed = number(row.get(2)?);
            self.entries.insert(Arc::clone(&key), Entry { key, value, changed });
        }
        Ok(())
    }

    /// Takes over what was changed since, or everything, if that is no longer known one by one.
    fn catch_up(&mut self, connection: &Connection) -> rusqlite::Result<()> {
        match logged(connection, "", self.last)? {
            Some(changes) => changes.into_iter().for_each(|change| self.take(change)),
            None => self.load(connection)?,
        }
        Ok(())
    }

    fn take(&mut self, Change { number, key, value }: Change) {
        match value {
            Some(value) => {
                self.entries.insert(Arc::clone(&key), Entry { key, value, changed: number });
            }
            None => {
                self.entries.remove(&key);
            }
        }
        self.last = self.last.max(number);
    }
}

/// The thread that writes.
struct Writer {
    connection: Connection,
    file: PathBuf,
    shared: std::sync::Weak<Shared>,
}

impl Writer {
    fn run(mut self, jobs: &mpsc::Receiver<Job>) {
        // It ends when the last handle is gone.
        while let Ok(first) = jobs.recv() {
            let mut waiting = vec![first];
            waiting.extend(jobs.try_iter().take(HANDFUL - 1));
            self.serve(waiting);
        }
    }

    /// All that waits in one commit; everybody is answered after it.
    fn serve(&mut self, waiting: Vec<Job>) {
        match self.commit(&waiting) {
            Ok((answers, changes)) => {
                self.publish(changes);
                for (job, answer) in waiting.into_iter().zip(answers) {
                    job.answer(Ok(answer));
                }
            }
            Err(error) => {
                let error = understand(&error, &self.file);
                waiting.into_iter().for_each(|job| job.answer(Err(error.clone())));
            }
        }
    }

    fn commit(&mut self, waiting: &[Job]) -> rusqlite::Result<(Vec<Answer>, Vec<Change>)> {
        let file = self.connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        let mut last = last_number(&file)?;
        let first = last;
        let mut changes = Vec::new();
        let mut answers = Vec::new();
        for job in waiting {
            let answer = match job {
                Job::Txn(txn, _) => Answer::Txn(apply(&file, txn, &mut last, &mut changes)?),
                Job::Lease { name, ask, .. } => {
                    Answer::Lease(lease(&file, name, ask, &mut last, &mut changes)?)
                }
            };
            answers.push(answer);
        }
        if first / FORGET_EVERY != last / FORGET_EVERY {
            let oldest = last.saturating_sub(KEPT);
            file.prepare_cached("DELETE FROM log WHERE number <= ?1")?.execute([signed(oldest)])?;
        }
        file.commit()?;
        Ok((answers, changes))
    }

    /// The copy follows, before anybody is told: who wrote can read what was written.
    fn publish(&self, changes: Vec<Change>) {
        let Some(shared) = self.shared.upgrade().filter(|_| !changes.is_empty()) else { return };
        let mut copy = shared.copy.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        // Between two of our commits another process may have written: those changes come first.
        let follows = changes.first().is_some_and(|change| change.number == copy.last + 1);
        if follows {
            changes.into_iter().for_each(|change| copy.take(change));
        } else if copy.catch_up(&self.connection).is_err() {
            // The next reader finds that the copy is behind, and tries again.
            copy.data_version = -1;
        }
        let last = copy.last;
        drop(copy);
        shared.last.send_if_modified(|known| std::mem::replace(known, last) != last);
    }
}

enum Answer {
    Txn(Outcome),
    Lease(Granted),
}

impl Job {
    fn answer(self, with: Result<Answer, Error>) {
        // Who no longer waits is not told.
        match (self, with) {
            (Job::Txn(_, to), Ok(Answer::Txn(outcome))) => drop(to.send(Ok(outcome))),
            (Job::Lease { answer, .. }, Ok(Answer::Lease(granted))) => drop(answer.send(Ok(granted))),
            (Job::Txn(_, to), Err(error)) => drop(to.send(Err(error))),
            (Job::Lease { answer, .. }, Err(error)) => drop(answer.send(Err(error))),
            (Job::Txn(..), Ok(Answer::Lease(_))) | (Job::Lease { .. }, Ok(Answer::Txn(_))) => {}
        }
    }
}

/// One transaction within a commit.
fn apply(
    file: &Connection,
    txn: &Txn,
    last: &mut Number,
    changes: &mut Vec<Change>,
) -> rusqlite::Result<Outcome> {
    for Compare { key, changed } in &txn.compares {
        let mut row = file.prepare_cached("SELECT changed FROM entry WHERE key = ?1")?;
        let now: Option<i64> = row.query_row([key], |row| row.get(0)).optional()?;
        if now.map_or(0, number) != *changed {
            return Ok(Outcome::Conflict(key.clone()));
        }
    }
    if txn.writes.is_empty() {
        return Ok(Outcome::Written(*last));
    }
    *last += 1;
    for write in &txn.writes {
        let (key, value) = match write {
            Write::Put(key, value) => {
                let put = "INSERT INTO entry (key, value, changed) VALUES (?1, ?2, ?3)
                           ON CONFLICT (key) DO UPDATE SET value = ?2, changed = ?3";
                file.prepare_cached(put)?.execute(params![key, value, signed(*last)])?;
                (key, Some(value))
            }
            Write::Delete(key) => {
                file.prepare_cached("DELETE FROM entry WHERE key = ?1")?.execute([key])?;
                (key, None)
            }
        };
        file.prepare_cached("INSERT INTO log (number, key, value) VALUES (?1, ?2, ?3)")?.execute(params![
            signed(*last),
            key,
            value
        ])?;
        let value = value.map(|value| value.as_slice().into());
        changes.push(Change { number: *last, key: key.as_str().into(), value });
    }
    Ok(Outcome::Written(*last))
}

/// A lease is a key like any other; who has it is decided here, where nobody else writes meanwhile.
fn lease(
    file: &Connection,
    key: &str,
    ask: &Ask,
    last: &mut Number,
    changes: &mut Vec<Change>,
) -> rusqlite::Result<Granted> {
    let mut row = file.prepare_cached("SELECT value FROM entry WHERE key = ?1")?;
    let value: Option<Vec<u8>> = row.query_row([key], |row| row.get(0)).optional()?;
    let record: Option<Record> = value.and_then(|value| serde_json::from_slice(&value).ok());
    let now = now_ms();
    let ms = |lives: &Duration| i64::try_from(lives.as_millis()).unwrap_or(i64::MAX);
    let ours = |lease: &Lease| {
        record.clone().filter(|record| {
            let holds = record.holder.as_ref().is_some_and(|holder| holder.id == lease.holder);
            holds && record.generation == lease.generation && record.expires > now
        })
    };
    let name = key.trim_start_matches("lease/").to_owned();
    let (next, granted) = match ask {
        Ask::Take(holder, lives) => match Record::taken_by(record, holder, ms(lives), now) {
            Ok(next) => {
                let lease = Lease { name, holder: holder.id.clone(), generation: next.generation };
                (Some(next), Granted::Taken(Taken::Ours(lease)))
            }
            Err(Record { generation, holder, expires }) => {
                let left_ms = u64::try_from(expires - now).unwrap_or(0);
                let holder = holder.unwrap_or_else(|| Holder::this("nobody"));
                (None, Granted::Taken(Taken::Theirs { holder, generation, left_ms }))
            }
        },
        Ask::Renew(lease, lives) => match ours(lease) {
            Some(record) => (Some(Record { expires: now + ms(lives), ..record }), Granted::Kept(true)),
            None => (None, Granted::Kept(false)),
        },
        Ask::Release(lease) => {
            let next = ours(lease).map(|record| Record { holder: None, expires: now, ..record });
            (next, Granted::Kept(true))
        }
    };
    if let Some(next) = next {
        let value = serde_json::to_vec(&next).unwrap_or_default();
        apply(file, &Txn::put(key, value), last, changes)?;
    }
    Ok(granted)
}

fn connect(file: &Path) -> Result<Connection, Error> {
    let flags =
        OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let open = || {
        let connection = Connection::open_with_flags(file, flags)?;
        connection.busy_timeout(BUSY)?;
        connection.pragma_update(None, "journal_mode", "WAL")?;
        connection.pragma_update(None, "synchronous", "FULL")?;
        connection.set_prepared_statement_cache_capacity(32);
        Ok(connection)
    };
    open().map_err(|error| understand(&error, file))
}

/// Makes the tables, or makes sure that they are what they should be.
fn prepare(connection: &Connection, file: &Path) -> Result<(), Error> {
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
                     (key TEXT PRIMARY KEY, value BLOB NOT NULL, changed INTEGER NOT NULL) WITHOUT ROWID;
                 CREATE TABLE IF NOT EXISTS log (number INTEGER NOT NULL, key TEXT NOT NULL, value BLOB);
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
fn logged(connection: &Connection, prefix: &str, after: Number) -> rusqlite::Result<Option<Vec<Change>>> {
    let mut oldest = connection.prepare_cached("SELECT min(number) FROM log")?;
    let oldest: Option<i64> = oldest.query_row([], |row| row.get(0))?;
    if oldest.is_some_and(|oldest| number(oldest) > after + 1) {
        return Ok(None);
    }
    let mut rows = connection
        .prepare_cached("SELECT number, key, value FROM log WHERE number > ?1 ORDER BY number, rowid")?;
    let mut rows = rows.query([signed(after)])?;
    let mut changes = Vec::new();
    while let Some(row) = rows.next()? {
        let key: String = row.get(1)?;
        if key.starts_with(prefix) {
            let value = row.get::<_, Option<Vec<u8>>>(2)?.map(Arc::from);
            changes.push(Change { number: number(row.get(0)?), key: key.into(), value });
        }
    }
    Ok(Some(changes))
}

fn last_number(connection: &Connection) -> rusqlite::Result<Number> {
    let mut row = connection.prepare_cached("SELECT max(number) FROM log")?;
    let last: Option<i64> = row.query_row([], |row| row.get(0))?;
    Ok(last.map_or(0, number))
}

fn data_version(connection: &Connection) -> rusqlite::Result<i64> {
    connection.prepare_cached("PRAGMA data_version")?.query_row([], |row| row.get(0))
}

/// SQLite's errors in our words.
fn understand(error: &rusqlite::Error, file: &Path) -> Error {
    let shown = file.display().to_string();
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => Error::Full,
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            Error::Corrupt { file: shown, what: error.to_string() }
        }
        _ => Error::Disk(format!("{shown}: {error}")),
    }
}

/// SQLite's numbers are signed; ours never come near the sign.
fn signed(number: Number) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn number(signed: i64) -> Number {
    Number::try_from(signed).unwrap_or(0)
}

fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn read<T>(copy: &RwLock<T>) -> std::sync::RwLockReadGuard<'_, T> {
    copy.read().unwrap_or_else(|poisoned| poisoned.into_inner())
}
