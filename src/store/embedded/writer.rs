//! Writer thread: commits all queued jobs together, updates the cache, then replies.

use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, params};
use tokio::sync::oneshot;

use super::Shared;
use super::file::{
    COMPACTED_KEY, DatabaseFileError, compact, gone, last_number, number, signed, store_error, sum,
};
use super::high_water_mark::HighWaterMark;
use super::seal::Sealer;
use crate::clock;
use crate::store::lease::{Holder, Lease, LeaseAttempt, Record, Reset};
use crate::store::{Change, Compare, Error, Seq, Txn, TxnOutcome, Write, decode, keys};

/// Maximum jobs per commit: more would only delay the first of them.
const MAX_BATCH: usize = 1024;
/// The log is compacted in bulk: compaction with each write would cost as much as the write.
const COMPACT_EVERY: u64 = 1_000;
/// Written bytes after which the log is compacted and the WAL is checkpointed, whatever their count.
const COMPACT_BYTES: usize = 32 << 20;
/// Idle time after which the WAL is checkpointed.
const IDLE: Duration = Duration::from_millis(200);
/// Minimum commits before an idle checkpoint: a WAL that starts over waits for the disk twice.
const MIN_COMMITS: u32 = 256;
/// Maximum commits between two checkpoints, idle or not.
const MAX_COMMITS: u32 = 5_000;

pub(super) enum Job {
    Txn(Txn, oneshot::Sender<Result<TxnOutcome, Error>>),
    /// Checkpoints the WAL into the database file.
    Settle(oneshot::Sender<Result<(), Error>>),
    Lease {
        name: String,
        request: LeaseRequest,
        reply: oneshot::Sender<Result<LeaseReply, Error>>,
    },
}

pub(super) enum LeaseRequest {
    Take(Holder, Duration),
    Renew(Lease, Duration),
    Release(Lease),
    Reset { above: u64, force: bool },
}

pub(super) enum LeaseReply {
    Taken(LeaseAttempt),
    Renewed(bool),
    Reset(Reset),
}

/// State of the writer thread.
pub(super) struct Writer {
    pub(super) connection: Connection,
    pub(super) file: PathBuf,
    pub(super) sealer: Arc<Sealer>,
    pub(super) mark: HighWaterMark,
    /// Commits since the last checkpoint.
    pub(super) commits: u32,
    /// Bytes written since the last compaction of the log, and since the last checkpoint.
    pub(super) uncompacted_bytes: usize,
    pub(super) wal_bytes: usize,
    /// Each change is logged. Otherwise the log has the last number only.
    pub(super) is_logged: bool,
    pub(super) shared: std::sync::Weak<Shared>,
}

impl Writer {
    pub(super) fn run(mut self, jobs: &mpsc::Receiver<Job>) {
        // Ends when the last handle is dropped.
        while let Some(first) = self.next(jobs) {
            let mut queued = vec![first];
            queued.extend(jobs.try_iter().take(MAX_BATCH - 1));
            let is_settle = |job: &Job| matches!(job, Job::Settle(_));
            let (settles, queued): (Vec<Job>, Vec<Job>) = queued.into_iter().partition(is_settle);
            if !queued.is_empty() {
                self.serve(queued);
            }
            for job in settles {
                let settled = self.connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
                let settled = settled.map_err(|error| store_error(error, &self.file));
                if let Job::Settle(reply) = job {
                    let _ = reply.send(settled);
                }
            }
        }
    }

    /// The next job. The WAL is checkpointed while the queue is empty, so that no job waits for it.
    fn next(&mut self, jobs: &mpsc::Receiver<Job>) -> Option<Job> {
        if self.wal_bytes >= COMPACT_BYTES {
            self.checkpoint();
        }
        if self.commits >= MIN_COMMITS {
            match jobs.recv_timeout(IDLE) {
                Ok(job) if self.commits < MAX_COMMITS => return Some(job),
                Err(mpsc::RecvTimeoutError::Disconnected) => return None,
                other => {
                    self.checkpoint();
                    if let Ok(job) = other {
                        return Some(job);
                    }
                }
            }
        }
        jobs.recv().ok()
    }

    fn checkpoint(&mut self) {
        (self.commits, self.wal_bytes) = (0, 0);
        // On failure (readers of old pages, a full disk) the next idle time retries.
        let _ = self.connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
    }

    /// Commits all queued jobs, then replies to each.
    fn serve(&mut self, queued: Vec<Job>) {
        match self.commit(&queued) {
            Ok((replies, changes)) => {
                self.publish(changes);
                for (job, reply) in queued.into_iter().zip(replies) {
                    job.reply(Ok(reply));
                }
            }
            Err(error) => {
                let error = error.into_store_error(&self.file);
                queued.into_iter().for_each(|job| job.reply(Err(error.clone())));
            }
        }
    }

    fn commit(&mut self, queued: &[Job]) -> Result<(Vec<Reply>, Vec<Change>), DatabaseFileError> {
        let file = self.connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        let mut last = last_number(&file)?;
        let first = last;
        let mut changes: Vec<WrittenChange> = Vec::new();
        let sealer = &self.sealer;
        let mut replies = Vec::new();
        for job in queued {
            let reply = match job {
                Job::Txn(txn, _) => Reply::Txn(apply(&file, sealer, txn, &mut last, &mut changes)?),
                Job::Settle(_) => continue,
                Job::Lease { name, request, .. } => {
                    Reply::Lease(lease(&file, sealer, name, request, &mut last, &mut changes)?)
                }
            };
            replies.push(reply);
        }
        let written: usize = changes
            .iter()
            .map(|WrittenChange { change, .. }| {
                change.key.len() + change.value.as_ref().map_or(0, |value| value.len())
            })
            .sum();
        let uncompacted = self.uncompacted_bytes + written;
        let is_due = first / COMPACT_EVERY != last / COMPACT_EVERY || uncompacted >= COMPACT_BYTES;
        if self.is_logged {
            log(&file, &changes)?;
            if is_due {
                compact(&file, last)?;
            }
        } else if !changes.is_empty() {
            replace_log(&file, last)?;
        }
        file.commit()?;
        self.uncompacted_bytes = if is_due { 0 } else { uncompacted };
        // Entry and log.
        self.wal_bytes += 2 * written;
        self.commits += 1;
        self.mark.set(last);
        Ok((replies, changes.into_iter().map(|written| written.change).collect()))
    }

    /// Updates the cache before the replies, so that a writer can read its own write.
    fn publish(&self, changes: Vec<Change>) {
        let Some(shared) = self.shared.upgrade().filter(|_| !changes.is_empty()) else { return };
        let mut cache = shared.cache.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        // Another process may have written between two commits: its changes come first.
        let follows = changes.first().is_some_and(|change| change.number == cache.last + 1);
        if follows {
            changes.into_iter().for_each(|change| cache.apply(change));
        } else if cache.catch_up(&self.connection, &self.sealer).is_err() {
            // Forces the next reader to catch up.
            cache.data_version = -1;
        }
        let last = cache.last;
        drop(cache);
        shared.last.send_if_modified(|known| std::mem::replace(known, last) != last);
    }
}

enum Reply {
    Txn(TxnOutcome),
    Lease(Result<LeaseReply, Error>),
}

impl Job {
    fn reply(self, with: Result<Reply, Error>) {
        // A caller that no longer waits is ignored.
        match (self, with) {
            (Job::Txn(_, to), Ok(Reply::Txn(outcome))) => drop(to.send(Ok(outcome))),
            (Job::Lease { reply, .. }, Ok(Reply::Lease(lease))) => drop(reply.send(lease)),
            (Job::Txn(_, to), Err(error)) => drop(to.send(Err(error))),
            (Job::Lease { reply, .. }, Err(error)) => drop(reply.send(Err(error))),
            (Job::Settle(_), _) => {}
            (Job::Txn(..), Ok(Reply::Lease(_))) | (Job::Lease { .. }, Ok(Reply::Txn(_))) => {}
        }
    }
}

/// A change, and the bytes and the checksum of its row.
pub(super) struct WrittenChange {
    change: Change,
    stored: Option<Vec<u8>>,
    sum: i64,
}

/// Adds changes to the log.
pub(super) fn log(file: &Connection, changes: &[WrittenChange]) -> rusqlite::Result<()> {
    let mut row = file.prepare_cached("INSERT INTO log (number, key, value, sum) VALUES (?1, ?2, ?3, ?4)")?;
    for WrittenChange { change, stored, sum } in changes {
        row.execute(params![signed(change.number), change.key, stored, sum])?;
    }
    Ok(())
}

/// Makes a number the only row of the log, without key and value. Readers of earlier changes load all entries.
fn replace_log(file: &Connection, last: Seq) -> rusqlite::Result<()> {
    let (number, sum) = (signed(last), gone(COMPACTED_KEY, signed(last)));
    let replaced = file
        .prepare_cached("UPDATE log SET number = ?1, key = ?2, value = NULL, sum = ?3")?
        .execute(params![number, COMPACTED_KEY, sum])?;
    match replaced {
        1 => return Ok(()),
        // The log of an earlier version.
        2.. => drop(file.prepare_cached("DELETE FROM log")?.execute([])?),
        0 => {}
    }
    file.prepare_cached("INSERT INTO log (number, key, value, sum) VALUES (?1, ?2, NULL, ?3)")?
        .execute(params![number, COMPACTED_KEY, sum])
        .map(drop)
}

/// One transaction within a commit.
pub(super) fn apply(
    file: &Connection,
    sealer: &Sealer,
    txn: &Txn,
    last: &mut Seq,
    changes: &mut Vec<WrittenChange>,
) -> Result<TxnOutcome, DatabaseFileError> {
    for Compare { key, mod_seq } in &txn.compares {
        let mut row = file.prepare_cached("SELECT changed FROM entry WHERE key = ?1")?;
        let now: Option<i64> = row.query_row([key], |row| row.get(0)).optional()?;
        if now.map_or(0, number) != *mod_seq {
            return Ok(TxnOutcome::Conflict(key.clone()));
        }
    }
    if txn.writes.is_empty() {
        return Ok(TxnOutcome::Written(*last));
    }
    *last += 1;
    for write in &txn.writes {
        let (key, value, stored, sum) = match write {
            Write::Put(key, value) => {
                let put = "INSERT INTO entry (key, value, changed, sum) VALUES (?1, ?2, ?3, ?4)
                           ON CONFLICT (key) DO UPDATE SET value = ?2, changed = ?3, sum = ?4";
                let stored = sealer.seal(key, signed(*last), value)?;
                let sum = sum(key, &stored, signed(*last));
                file.prepare_cached(put)?.execute(params![key, stored, signed(*last), sum])?;
                (key, Some(value), Some(stored), sum)
            }
            Write::Delete(key) => {
                file.prepare_cached("DELETE FROM entry WHERE key = ?1")?.execute([key])?;
                (key, None, None, gone(key, signed(*last)))
            }
        };
        let value = value.map(|value| value.as_slice().into());
        let change = Change { number: *last, key: key.as_str().into(), value };
        changes.push(WrittenChange { change, stored, sum });
    }
    Ok(TxnOutcome::Written(*last))
}

/// Applies a lease request. A lease is an entry; the decision is made inside the write transaction.
fn lease(
    file: &Connection,
    sealer: &Sealer,
    key: &str,
    request: &LeaseRequest,
    last: &mut Seq,
    changes: &mut Vec<WrittenChange>,
) -> Result<Result<LeaseReply, Error>, DatabaseFileError> {
    let mut row = file.prepare_cached("SELECT value, changed FROM entry WHERE key = ?1")?;
    let stored = row.query_row([key], |row| Ok((row.get(0)?, row.get(1)?))).optional()?;
    let value = match stored.map(|(stored, changed)| sealer.open(key, changed, stored)).transpose() {
        // Jobs of other callers are in the same commit.
        Err(DatabaseFileError::Entry(_) | DatabaseFileError::Key(_)) => Some(Vec::new()),
        opened => opened?,
    };
    let record: Option<Record> = match value.map(|value| decode(key, &value)).transpose() {
        Ok(record) => record,
        // An administrator may replace a record that cannot be read.
        Err(_) if matches!(request, LeaseRequest::Reset { force: true, .. }) => None,
        Err(error) => return Ok(Err(error)),
    };
    let now = clock::now().0;
    let ours = |lease: &Lease| {
        record.clone().filter(|record| {
            let holds = record.holder.as_ref().is_some_and(|holder| holder.id == lease.holder);
            holds && record.generation == lease.generation && record.expires > now
        })
    };
    let name = keys::lease_of(key).unwrap_or(key).to_owned();
    let (next, reply) = match request {
        LeaseRequest::Take(holder, lives) => match Record::taken_by(record, holder, *lives, now) {
            Ok(next) => {
                let lease = Lease { name, holder: holder.id.clone(), generation: next.generation };
                (Some(next), LeaseReply::Taken(LeaseAttempt::Acquired(lease)))
            }
            Err(theirs) => {
                let Record { generation, holder, expires, .. } = *theirs;
                let left_ms = u64::try_from(expires - now).unwrap_or(0);
                let holder = holder.unwrap_or_else(|| Holder::this("unknown"));
                (None, LeaseReply::Taken(LeaseAttempt::HeldByOther { holder, generation, left_ms }))
            }
        },
        LeaseRequest::Renew(lease, lives) => match ours(lease) {
            Some(record) => {
                (Some(Record { expires: Record::ends(now, *lives), ..record }), LeaseReply::Renewed(true))
            }
            None => (None, LeaseReply::Renewed(false)),
        },
        LeaseRequest::Release(lease) => {
            let next = ours(lease).map(|record| Record { holder: None, expires: now, ..record });
            (next, LeaseReply::Renewed(true))
        }
        LeaseRequest::Reset { above, force } => match Record::reset(record, *above, *force, now) {
            Ok(next) => {
                let generation = next.generation;
                (Some(next), LeaseReply::Reset(Reset::Free { generation }))
            }
            Err(record) => {
                let left_ms = u64::try_from(record.expires - now).unwrap_or(0);
                let holder = record.holder.unwrap_or_else(|| Holder::this("unknown"));
                (None, LeaseReply::Reset(Reset::Renewed { holder, left_ms }))
            }
        },
    };
    if let Some(next) = next {
        let value = serde_json::to_vec(&next).unwrap_or_default();
        apply(file, sealer, &Txn::put(key, value), last, changes)?;
    }
    Ok(Ok(reply))
}
