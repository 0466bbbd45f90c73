//! Embedded store: SQLite in a file, one writer thread, reads from memory.
//!
//! # Theory of operation
//! Transactions are sent to the writer thread. The thread puts all queued transactions into one SQLite transaction,
//! commits (WAL, synchronous FULL: the commit is on disk), and only then replies; many small writes share one fsync.
//! Readers use an in-memory cache. Another process may write to the same file: before each read the cache checks
//! SQLite's `data_version`, and applies the new changes from the log. The log keeps the last 100,000 changes, up to
//! 128 MiB; a request for older ones returns [`Error::Compacted`]. The most recent ones are in memory as well, and a waiting
//! follower searches each change once. A store without followers keeps no log, and one that is hardly read no cache.
//!
//! A failed commit changes nothing: its callers get the error, the cache stays unchanged, and the next transaction
//! starts over.

mod cache;
mod file;
mod high_water_mark;
mod rewrite;
mod seal;
mod trim;
mod writer;

use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, mpsc};
use std::time::Duration;

use rusqlite::Connection;
use tokio::sync::{oneshot, watch};

use self::cache::{Cache, RecentChanges, beginning_with};
use self::file::{
    DatabaseFileError, connect, connect_to_read, data_version, logged, prepare, read_entries, read_entry,
    store_error,
};
use self::high_water_mark::HighWaterMark;
use self::rewrite::FileFormat;
pub use self::rewrite::is_encrypted;
use self::seal::Sealer;
pub use self::trim::{Trim, TrimChoice, print_set_aside};
use self::writer::{Job, LeaseReply, LeaseRequest, Writer};
use super::lease::{Holder, Lease, LeaseAttempt, Reset};
use super::{Change, Entry, Error, KeySource, Page, Seq, Store, Txn, TxnOutcome, keys};

/// Interval at which a waiting reader checks for writes of other processes.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Maximum wait of an exclusive open for the lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Extent of the log of changes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ChangeLog {
    /// The last changes, for readers that follow them.
    Kept,
    LastNumber,
}

#[derive(Clone)]
pub struct Embedded {
    shared: Arc<Shared>,
}

struct Shared {
    file: PathBuf,
    cache: RwLock<Cache>,
    sealer: Arc<Sealer>,
    /// Connection that reads the writes of other processes, and the entries that are not in memory.
    reader: Mutex<Connection>,
    writer: mpsc::Sender<Job>,
    /// The last number; watchers wait for it to change.
    last: watch::Sender<Seq>,
    /// Lock of an exclusive open: no other process writes, so reads need no check.
    exclusive_lock: Option<std::fs::File>,
}

impl Embedded {
    /// Opens or creates a file without encryption. A damaged file, an encrypted one, or one of a newer Abide, is refused.
    pub fn open(file: &Path) -> Result<Embedded, Error> {
        Embedded::open_keyed(file, &KeySource::None)
    }

    /// Opens or creates the file, and encrypts its values if they are not.
    pub fn open_keyed(file: &Path, keys: &KeySource) -> Result<Embedded, Error> {
        Embedded::open_as(file, OpenMode { rewrite: true, ..OpenMode::of(keys) })
    }

    /// Opens the file and leaves its format as it is: another process may have it open.
    pub fn open_as_found(file: &Path, keys: &KeySource) -> Result<Embedded, Error> {
        Embedded::open_as(file, OpenMode::of(keys))
    }

    /// Opens the file exclusively: other processes are refused while it is open, and reads do not access the file.
    pub fn open_alone(file: &Path, keys: &KeySource) -> Result<Embedded, Error> {
        Embedded::open_as(file, OpenMode::alone(file, keys)?)
    }

    /// Opens the file exclusively, logs no change and has no entry in memory: for a store without followers that is hardly
    /// read. A write costs half.
    pub fn open_alone_unlogged(file: &Path, keys: &KeySource) -> Result<Embedded, Error> {
        let alone = OpenMode::alone(file, keys)?;
        Embedded::open_as(file, OpenMode { log: ChangeLog::LastNumber, has_cache: false, ..alone })
    }

    /// Opens the file exclusively, and removes the entries that `trim` chooses before the values are in memory.
    pub fn open_alone_trimmed(file: &Path, keys: &KeySource, trim: Trim<'_>) -> Result<Embedded, Error> {
        Embedded::open_as(file, OpenMode { trim: Some(trim), ..OpenMode::alone(file, keys)? })
    }

    /// One value of a file that another process may have open exclusively. The file is not changed.
    pub fn read_value(file: &Path, keys: &KeySource, key: &str) -> Result<Option<Vec<u8>>, Error> {
        let connection = connect_to_read(file).map_err(|error| store_error(error, file))?;
        let format = FileFormat::read(&connection, file, keys, false)?;
        let entry =
            read_entry(&connection, &format.sealer, key).map_err(|fault| fault.into_store_error(file))?;
        Ok(entry.map(|entry| entry.value.to_vec()))
    }

    fn open_as(file: &Path, mode: OpenMode<'_>) -> Result<Embedded, Error> {
        let (mark, marked) = HighWaterMark::open(file);
        let mut connection = connect(file)?;
        prepare(&connection, file)?;
        let format = FileFormat::read(&connection, file, mode.keys, mode.rewrite)?;
        if let Some(trim) = mode.trim {
            trim::trim_file(&mut connection, file, &format.sealer, trim)?;
        }
        let sealer = Arc::new(match mode.rewrite {
            true => format.rewritten(&mut connection, file)?,
            false => format.sealer,
        });
        let reader = connect(file)?;
        let mut cache = Cache::default();
        cache.has_entries = mode.has_cache;
        cache.recent = (mode.log == ChangeLog::Kept).then(RecentChanges::default);
        cache.load(&reader, &sealer).map_err(|fault| fault.into_store_error(file))?;
        if !mode.has_cache {
            // The load has read every page of the file.
            reader.release_memory().map_err(|error| store_error(error, file))?;
        }
        high_water_mark::check(file, marked, cache.last)?;
        let (writer, jobs) = mpsc::channel();
        let (last, _) = watch::channel(cache.last);
        let shared = Arc::new(Shared {
            file: file.to_owned(),
            cache: RwLock::new(cache),
            sealer: Arc::clone(&sealer),
            reader: Mutex::new(reader),
            writer,
            last,
            exclusive_lock: mode.exclusive_lock,
        });
        let weak = Arc::downgrade(&shared);
        let own = file.to_owned();
        std::thread::Builder::new()
            .name("store".to_owned())
            .spawn(move || {
                Writer {
                    connection,
                    file: own,
                    sealer,
                    mark,
                    commits: 0,
                    uncompacted_bytes: 0,
                    wal_bytes: 0,
                    is_logged: mode.log == ChangeLog::Kept,
                    shared: weak,
                }
                .run(&jobs);
            })
            .map_err(|error| Error::io("cannot start the store thread", error))?;
        Ok(Embedded { shared })
    }

    /// Checkpoints the WAL into the database file, so that a copy of it is complete. For shutdown and backups.
    pub async fn settle(&self) -> Result<(), Error> {
        let (reply, result) = oneshot::channel();
        self.shared.writer.send(Job::Settle(reply)).map_err(|_| Error::Closed)?;
        result.await.map_err(|_| Error::Closed)?
    }

    async fn lease(&self, name: &str, request: LeaseRequest) -> Result<LeaseReply, Error> {
        let (reply, result) = oneshot::channel();
        let job = Job::Lease { name: keys::lease(name), request, reply };
        self.shared.writer.send(job).map_err(|_| Error::Closed)?;
        result.await.map_err(|_| Error::Closed)?
    }
}

/// Options of an open.
struct OpenMode<'a> {
    keys: &'a KeySource,
    /// Whether values are rewritten as the keys want them.
    rewrite: bool,
    exclusive_lock: Option<std::fs::File>,
    trim: Option<Trim<'a>>,
    log: ChangeLog,
    /// Whether all entries are in memory.
    has_cache: bool,
}

impl<'a> OpenMode<'a> {
    fn of(keys: &'a KeySource) -> OpenMode<'a> {
        let log = ChangeLog::Kept;
        OpenMode { keys, rewrite: false, exclusive_lock: None, trim: None, log, has_cache: true }
    }

    fn alone(file: &Path, keys: &'a KeySource) -> Result<OpenMode<'a>, Error> {
        Ok(OpenMode { rewrite: true, exclusive_lock: Some(exclusive_lock(file)?), ..OpenMode::of(keys) })
    }
}

/// Locks the file against other processes.
fn exclusive_lock(file: &Path) -> Result<std::fs::File, Error> {
    use rustix::fs::{FlockOperation, flock};
    let mut name = file.as_os_str().to_owned();
    name.push(".lock");
    let path = PathBuf::from(name);
    let shown = path.display();
    let lock = std::fs::File::options().create(true).append(true).open(&path);
    let lock = lock.map_err(|error| Error::io(shown, error))?;
    // A child that a dead agent was launching holds the inherited lock for a moment.
    let begin = std::time::Instant::now();
    while flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        if begin.elapsed() > LOCK_TIMEOUT {
            return Err(Error::InUse { file: file.display().to_string() });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(lock)
}

impl Shared {
    /// Applies the writes of other processes to the cache.
    fn refresh(&self) -> Result<(), Error> {
        if self.exclusive_lock.is_some() {
            return Ok(());
        }
        let reader = lock(&self.reader);
        let version = data_version(&reader).map_err(|error| store_error(error, &self.file))?;
        if read(&self.cache).data_version == version {
            return Ok(());
        }
        let mut cache = self.cache.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        cache.catch_up(&reader, &self.sealer).map_err(|fault| fault.into_store_error(&self.file))?;
        cache.data_version = version;
        self.last.send_if_modified(|last| std::mem::replace(last, cache.last) != cache.last);
        Ok(())
    }
}

impl Shared {
    /// Reads the file, if the entries are not in memory.
    fn read_file<T>(
        &self,
        read_with: impl FnOnce(&Connection, &Sealer) -> Result<T, DatabaseFileError>,
    ) -> Option<Result<T, Error>> {
        if read(&self.cache).has_entries {
            return None;
        }
        let found = read_with(&lock(&self.reader), &self.sealer);
        Some(found.map_err(|fault| fault.into_store_error(&self.file)))
    }

    /// A page of the file.
    fn read_page(&self, prefix: &str, after: Option<&str>, limit: usize) -> Option<Result<Page, Error>> {
        // Before the read: a change in between is also after this number.
        let as_of = read(&self.cache).last;
        self.read_file(|connection, sealer| {
            let (mut entries, mut has_more) = (Vec::new(), false);
            let first = after.filter(|after| *after >= prefix).unwrap_or(prefix);
            read_entries(connection, sealer, first, |entry| {
                if Some(&*entry.key) == after {
                    return true;
                }
                let is_inside = entry.key.starts_with(prefix);
                has_more = is_inside && entries.len() >= limit;
                if is_inside && !has_more {
                    entries.push(entry);
                }
                is_inside && !has_more
            })?;
            let more = entries.last().filter(|_| has_more).map(|entry: &Entry| entry.key.clone());
            Ok(Page { entries, more, as_of })
        })
    }
}

impl Store for Embedded {
    async fn get(&self, key: &str) -> Result<Option<Entry>, Error> {
        self.shared.refresh()?;
        if let Some(found) = self.shared.read_file(|file, sealer| read_entry(file, sealer, key)) {
            return found;
        }
        Ok(read(&self.shared.cache).entries.get(key).cloned())
    }

    async fn range(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Page, Error> {
        self.shared.refresh()?;
        if let Some(page) = self.shared.read_page(prefix, after, limit) {
            return page;
        }
        let cache = read(&self.shared.cache);
        let within = beginning_with(prefix);
        let (first, end) = within.as_range();
        let from = match after.filter(|after| *after >= prefix) {
            // BTreeMap panics on a range that ends before it starts.
            Some(after) if matches!(end, Bound::Excluded(end) if after >= end) => {
                return Ok(Page { entries: Vec::new(), more: None, as_of: cache.last });
            }
            Some(after) => Bound::Excluded(after),
            None => first,
        };
        let mut inside = cache.entries.range::<str, _>((from, end)).map(|(_, entry)| entry);
        let entries: Vec<Entry> = inside.by_ref().take(limit).cloned().collect();
        let more = inside.next().and(entries.last()).map(|entry| entry.key.clone());
        Ok(Page { entries, more, as_of: cache.last })
    }

    async fn slice(&self, prefix: &str, skip: usize, limit: usize) -> Result<(Vec<Entry>, usize), Error> {
        self.shared.refresh()?;
        if let Some(page) = self.shared.read_page(prefix, None, usize::MAX) {
            let entries = page?.entries;
            let count = entries.len();
            return Ok((entries.into_iter().skip(skip).take(limit).collect(), count));
        }
        let cache = read(&self.shared.cache);
        // Iteration compares no keys; it starts at the nearer end.
        let inside = cache.entries.range::<str, _>(beginning_with(prefix).as_range()).map(|(_, entry)| entry);
        let count = cache.count(prefix).unwrap_or_else(|| inside.clone().count());
        let taken = count.saturating_sub(skip).min(limit);
        let entries = match skip <= count / 2 {
            true => inside.skip(skip).take(taken).cloned().collect(),
            false => {
                let behind = inside.rev().skip(count.saturating_sub(skip.saturating_add(taken)));
                let mut entries: Vec<Entry> = behind.take(taken).cloned().collect();
                entries.reverse();
                entries
            }
        };
        Ok((entries, count))
    }

    async fn txn(&self, txn: Txn) -> Result<TxnOutcome, Error> {
        let (reply, result) = oneshot::channel();
        self.shared.writer.send(Job::Txn(txn, reply)).map_err(|_| Error::Closed)?;
        result.await.map_err(|_| Error::Closed)?
    }

    async fn changes(&self, prefix: &str, mut after: Seq) -> Result<Vec<Change>, Error> {
        let mut last = self.shared.last.subscribe();
        loop {
            self.shared.refresh()?;
            let (searched, recent) = {
                let cache = read(&self.shared.cache);
                (cache.last, cache.recent.as_ref().and_then(|recent| recent.after(prefix, after)))
            };
            let found = match recent {
                Some(changes) => Some(changes),
                None => {
                    let reader = lock(&self.shared.reader);
                    logged(&reader, &self.shared.sealer, prefix, after)
                        .map_err(|fault| fault.into_store_error(&self.shared.file))?
                }
            };
            match found {
                None => return Err(Error::Compacted),
                Some(changes) if !changes.is_empty() => return Ok(changes),
                // No change is searched twice: a prefix that rarely changes would be searched in the whole log at each write.
                Some(_) => after = after.max(searched),
            }
            // Writes of other processes do not wake this one: poll for them.
            let woken = match self.shared.exclusive_lock {
                Some(_) => last.changed().await,
                None => tokio::time::timeout(POLL_INTERVAL, last.changed()).await.unwrap_or(Ok(())),
            };
            if woken.is_err() {
                return Err(Error::Closed);
            }
        }
    }

    async fn take_lease(&self, name: &str, holder: &Holder, lives: Duration) -> Result<LeaseAttempt, Error> {
        match self.lease(name, LeaseRequest::Take(holder.clone(), lives)).await? {
            LeaseReply::Taken(attempt) => Ok(attempt),
            LeaseReply::Renewed(_) | LeaseReply::Reset(_) => Err(Error::Closed),
        }
    }

    async fn renew_lease(&self, lease: &Lease, lives: Duration) -> Result<bool, Error> {
        Ok(matches!(
            self.lease(&lease.name, LeaseRequest::Renew(lease.clone(), lives)).await?,
            LeaseReply::Renewed(true)
        ))
    }

    async fn release_lease(&self, lease: &Lease) -> Result<(), Error> {
        self.lease(&lease.name, LeaseRequest::Release(lease.clone())).await.map(|_| ())
    }

    async fn reset_lease(&self, name: &str, above: u64, force: bool) -> Result<Reset, Error> {
        match self.lease(name, LeaseRequest::Reset { above, force }).await? {
            LeaseReply::Reset(reset) => Ok(reset),
            LeaseReply::Renewed(_) | LeaseReply::Taken(_) => Err(Error::Closed),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn read<T>(cache: &RwLock<T>) -> std::sync::RwLockReadGuard<'_, T> {
    cache.read().unwrap_or_else(|poisoned| poisoned.into_inner())
}
