//! The store in a file: SQLite, written to by one thread, read from memory.
//!
//! # Theory of operation
//! A transaction is handed to the writer's thread. The thread takes everything that waits, puts it into one SQLite
//! transaction, commits (WAL, synchronous FULL: the commit is on disk), and only then answers; so many small writes
//! share one wait for the disk. Readers look at a copy in memory. Another process may write to the same file: before
//! an answer the copy asks SQLite whether anybody did, and if so takes over the changes since its last one from the
//! log. The log keeps the last 100,000 changes; whoever asks for older ones is told to look at everything anew.
//!
//! A commit that fails changes nothing: those who waited for it are told, the copy stays as it was, and the next
//! transaction tries again.

mod cache;
mod file;
mod high_water_mark;
mod writer;

use std::ops::Bound;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, mpsc};
use std::time::Duration;

use rusqlite::Connection;
use tokio::sync::{oneshot, watch};

use self::cache::{Cache, beginning_with};
use self::file::{connect, data_version, logged, prepare, understand};
use self::high_water_mark::HighWaterMark;
use self::writer::{Ask, Granted, Job, Writer};
use super::lease::{Holder, Lease, LeaseAttempt, Reset};
use super::{Change, Entry, Error, Outcome, Page, Seq, Store, Txn};

/// How often a waiting reader asks whether another process wrote.
const OTHERS: Duration = Duration::from_millis(200);

/// How long whoever wants a file for himself waits for it.
const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Clone)]
pub struct Embedded {
    shared: Arc<Shared>,
}

struct Shared {
    file: PathBuf,
    copy: RwLock<Cache>,
    /// Asks whether another process wrote, and what.
    reader: Mutex<Connection>,
    writer: mpsc::Sender<Job>,
    /// The last number: who waits for changes waits for this.
    last: watch::Sender<Seq>,
    /// Held while nobody else may open the file: then nobody else writes, and nobody need be asked.
    alone: Option<std::fs::File>,
}

impl Embedded {
    /// Opens the file, or makes it. A file that is damaged, or from a newer Abide, is refused.
    pub fn open(file: &Path) -> Result<Embedded, Error> {
        Embedded::open_as(file, None)
    }

    /// The same for one who will be the only one: others are refused as long as it is open, and reads need no look at the
    /// file.
    pub fn open_alone(file: &Path) -> Result<Embedded, Error> {
        use rustix::fs::{FlockOperation, flock};
        let mut name = file.as_os_str().to_owned();
        name.push(".lock");
        let path = PathBuf::from(name);
        let shown = path.display();
        let lock = std::fs::File::options().create(true).append(true).open(&path);
        let lock = lock.map_err(|error| Error::Disk(format!("{shown}: {error}")))?;
        // A process that was just being launched by one that died holds it for another moment.
        let begin = std::time::Instant::now();
        while flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            if begin.elapsed() > PATIENCE {
                return Err(Error::InUse { file: file.display().to_string() });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Embedded::open_as(file, Some(lock))
    }

    fn open_as(file: &Path, alone: Option<std::fs::File>) -> Result<Embedded, Error> {
        let (mark, marked) = HighWaterMark::open(file);
        let connection = connect(file)?;
        prepare(&connection, file)?;
        let reader = connect(file)?;
        let mut copy = Cache::default();
        copy.load(&reader).map_err(|fault| fault.understand(file))?;
        high_water_mark::check(file, marked, copy.last)?;
        let (writer, jobs) = mpsc::channel();
        let (last, _) = watch::channel(copy.last);
        let shared = Arc::new(Shared {
            file: file.to_owned(),
            copy: RwLock::new(copy),
            reader: Mutex::new(reader),
            writer,
            last,
            alone,
        });
        let weak = Arc::downgrade(&shared);
        let own = file.to_owned();
        std::thread::Builder::new()
            .name("store".to_owned())
            .spawn(move || {
                Writer { connection, file: own, mark, commits: 0, shared: weak }.run(&jobs);
            })
            .map_err(|error| Error::Disk(format!("cannot start the store's thread: {error}")))?;
        Ok(Embedded { shared })
    }

    /// Puts everything into the one file, so that a copy of it is whole. For the end, and for a backup.
    pub async fn settle(&self) -> Result<(), Error> {
        let (answer, asked) = oneshot::channel();
        self.shared.writer.send(Job::Settle(answer)).map_err(|_| Error::Closed)?;
        asked.await.map_err(|_| Error::Closed)?
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
        if self.alone.is_some() {
            return Ok(());
        }
        let reader = lock(&self.reader);
        let version = data_version(&reader).map_err(|error| understand(&error, &self.file))?;
        if read(&self.copy).data_version == version {
            return Ok(());
        }
        let mut copy = self.copy.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        copy.catch_up(&reader).map_err(|fault| fault.understand(&self.file))?;
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
        let within = beginning_with(prefix);
        let (first, end) = within.as_range();
        let from = match after.filter(|after| *after >= prefix) {
            // A range that ends before it begins would be a mistake to BTreeMap.
            Some(after) if matches!(end, Bound::Excluded(end) if after >= end) => {
                return Ok(Page { entries: Vec::new(), more: None, as_of: copy.last });
            }
            Some(after) => Bound::Excluded(after),
            None => first,
        };
        let mut inside = copy.entries.range::<str, _>((from, end)).map(|(_, entry)| entry);
        let entries: Vec<Entry> = inside.by_ref().take(limit).cloned().collect();
        let more = inside.next().and(entries.last()).map(|entry| entry.key.clone());
        Ok(Page { entries, more, as_of: copy.last })
    }

    async fn slice(&self, prefix: &str, skip: usize, limit: usize) -> Result<(Vec<Entry>, usize), Error> {
        self.shared.refresh()?;
        let copy = read(&self.shared.copy);
        // Stepping from entry to entry does not look at their keys; the way is walked from its nearer end.
        let inside = copy.entries.range::<str, _>(beginning_with(prefix).as_range()).map(|(_, entry)| entry);
        let count = copy.count(prefix).unwrap_or_else(|| inside.clone().count());
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

    async fn txn(&self, txn: Txn) -> Result<Outcome, Error> {
        let (answer, asked) = oneshot::channel();
        self.shared.writer.send(Job::Txn(txn, answer)).map_err(|_| Error::Closed)?;
        asked.await.map_err(|_| Error::Closed)?
    }

    async fn changes(&self, prefix: &str, after: Seq) -> Result<Vec<Change>, Error> {
        let mut last = self.shared.last.subscribe();
        loop {
            self.shared.refresh()?;
            let found = {
                let reader = lock(&self.shared.reader);
                logged(&reader, prefix, after).map_err(|fault| fault.understand(&self.shared.file))?
            };
            match found {
                None => return Err(Error::Compacted),
                Some(changes) if !changes.is_empty() => return Ok(changes),
                Some(_) => {}
            }
            // Another process's writes wake nobody here: it is asked now and then.
            let woken = match self.shared.alone {
                Some(_) => last.changed().await,
                None => tokio::time::timeout(OTHERS, last.changed()).await.unwrap_or(Ok(())),
            };
            if woken.is_err() {
                return Err(Error::Closed);
            }
        }
    }

    async fn take_lease(&self, name: &str, holder: &Holder, lives: Duration) -> Result<LeaseAttempt, Error> {
        match self.ask(name, Ask::Take(holder.clone(), lives)).await? {
            Granted::Taken(taken) => Ok(taken),
            Granted::Kept(_) | Granted::Reset(_) => Err(Error::Closed),
        }
    }

    async fn renew_lease(&self, lease: &Lease, lives: Duration) -> Result<bool, Error> {
        Ok(matches!(self.ask(&lease.name, Ask::Renew(lease.clone(), lives)).await?, Granted::Kept(true)))
    }

    async fn release_lease(&self, lease: &Lease) -> Result<(), Error> {
        self.ask(&lease.name, Ask::Release(lease.clone())).await.map(|_| ())
    }

    async fn reset_lease(&self, name: &str, above: u64, force: bool) -> Result<Reset, Error> {
        match self.ask(name, Ask::Reset { above, force }).await? {
            Granted::Reset(reset) => Ok(reset),
            Granted::Kept(_) | Granted::Taken(_) => Err(Error::Closed),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn read<T>(copy: &RwLock<T>) -> std::sync::RwLockReadGuard<'_, T> {
    copy.read().unwrap_or_else(|poisoned| poisoned.into_inner())
}
