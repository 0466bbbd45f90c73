//! Writer thread: commits all queued jobs together, updates the cache, then replies.

use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, params};
use tokio::sync::oneshot;

use super::Shared;
use super::file::{compact, gone, last_number, number, signed, sum, understand};
use super::high_water_mark::HighWaterMark;
use crate::clock;
use crate::store::lease::{Holder, Lease, LeaseAttempt, Record, Reset};
use crate::store::{Change, Compare, Error, Outcome, Seq, Txn, Write, decode, keys};

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
    Txn(Txn, oneshot::Sender<Result<Outcome, Error>>),
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
                let settled = settled.map_err(|error| understand(error, &self.file));
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
                let error = understand(error, &self.file);
                queued.into_iter().for_each(|job| job.reply(Err(error.clone())));
            }
        }
    }

    fn commit(&mut self, queued: &[Job]) -> rusqlite::Result<(Vec<Reply>, Vec<Change>)> {
        let file = self.connection.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
        let mut last = last_number(&file)?;
        let first = last;
        let mut changes = Vec::new();
        let mut replies = Vec::new();
        for job in queued {
            let reply = match job {
                Job::Txn(txn, _) => Reply::Txn(apply(&file, txn, &mut last, &mut changes)?),
                Job::Settle(_) => continue,
                Job::Lease { name, request, .. } => {
                    Reply::Lease(lease(&file, name, request, &mut last, &mut changes)?)
                }
            };
            replies.push(reply);
        }
        let written: usize = changes
            .iter()
            .map(|(change, _)| change.key.len() + change.value.as_ref().map_or(0, |value| value.len()))
            .sum();
        let uncompacted = self.uncompacted_bytes + written;
        let is_due = first / COMPACT_EVERY != last / COMPACT_EVERY || uncompacted >= COMPACT_BYTES;
        if self.is_logged {
            log(&file, &changes)?;
            if is_due {
                compact(&file, last)?;
            }
        } else if let Some((change, _)) = changes.last() {
            replace_log(&file, change)?;
        }
        file.commit()?;
        self.uncompacted_bytes = if is_due { 0 } else { uncompacted };
        // Entry and log.
        self.wal_bytes += 2 * written;
        self.commits += 1;
        self.mark.set(last);
        Ok((replies, changes.into_iter().map(|(change, _)| change).collect()))
    }

    /// Updates the cache before the replies, so that a writer can read its own write.
    fn publish(&self, changes: Vec<Change>) {
        let Some(shared) = self.shared.upgrade().filter(|_| !changes.is_empty()) else { return };
        let mut cache = shared.cache.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        // Another process may have written between two commits: its changes come first.
        let follows = changes.first().is_some_and(|change| change.number == cache.last + 1);
        if follows {
            changes.into_iter().for_each(|change| cache.apply(change));
        } else if cache.catch_up(&self.connection).is_err() {
            // Forces the next reader to catch up.
            cache.data_version = -1;
        }
        let last = cache.last;
        drop(cache);
        shared.last.send_if_modified(|known| std::mem::replace(known, last) != last);
    }
}

enum Reply {
    Txn(Outcome),
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

/// Adds changes, each with its checksum, to the log.
pub(super) fn log(file: &Connection, changes: &[(Change, i64)]) -> rusqlite::Result<()> {
    let mut row = file.prepare_cached("INSERT INTO log (number, key, value, sum) VALUES (?1, ?2, ?3, ?4)")?;
    for (Change { number, key, value }, sum) in changes {
        row.execute(params![signed(*number), key, value, sum])?;
    }
    Ok(())
}

/// Makes a change the only one of the log, without its value. Readers of earlier changes load all entries.
fn replace_log(file: &Connection, Change { number, key, .. }: &Change) -> rusqlite::Result<()> {
    let number = signed(*number);
    let replaced = file
        .prepare_cached("UPDATE log SET number = ?1, key = ?2, value = NULL, sum = ?3")?
        .execute(params![number, key, gone(key, number)])?;
    match replaced {
        1 => return Ok(()),
        // The log of an earlier version.
        2.. => drop(file.prepare_cached("DELETE FROM log")?.execute([])?),
        0 => {}
    }
    file.prepare_cached("INSERT INTO log (number, key, value, sum) VALUES (?1, ?2, NULL, ?3)")?
        .execute(params![number, key, gone(key, number)])
        .map(drop)
}

/// One transaction within a commit.
pub(super) fn apply(
    file: &Connection,
    txn: &Txn,
    last: &mut Seq,
    changes: &mut Vec<(Change, i64)>,
) -> rusqlite::Result<Outcome> {
    for Compare { key, mod_seq } in &txn.compares {
        let mut row = file.prepare_cached("SELECT changed FROM entry WHERE key = ?1")?;
        let now: Option<i64> = row.query_row([key], |row| row.get(0)).optional()?;
        if now.map_or(0, number) != *mod_seq {
            return Ok(Outcome::Conflict(key.clone()));
        }
    }
    if txn.writes.is_empty() {
        return Ok(Outcome::Written(*last));
    }
    *last += 1;
    for write in &txn.writes {
        let (key, value, sum) = match write {
            Write::Put(key, value) => {
                let put = "INSERT INTO entry (key, value, changed, sum) VALUES (?1, ?2, ?3, ?4)
                           ON CONFLICT (key) DO UPDATE SET value = ?2, changed = ?3, sum = ?4";
                let sum = sum(key, value, signed(*last));
                file.prepare_cached(put)?.execute(params![key, value, signed(*last), sum])?;
                (key, Some(value), sum)
            }
            Write::Delete(key) => {
                file.prepare_cached("DELETE FROM entry WHERE key = ?1")?.execute([key])?;
                (key, None, gone(key, signed(*last)))
            }
        };
        let value = value.map(|value| value.as_slice().into());
        changes.push((Change { number: *last, key: key.as_str().into(), value }, sum));
    }
    Ok(Outcome::Written(*last))
}

/// Applies a lease request. A lease is an entry; the decision is made inside the write transaction.
fn lease(
    file: &Connection,
    key: &str,
    request: &LeaseRequest,
    last: &mut Seq,
    changes: &mut Vec<(Change, i64)>,
) -> rusqlite::Result<Result<LeaseReply, Error>> {
    let mut row = file.prepare_cached("SELECT value FROM entry WHERE key = ?1")?;
    let value: Option<Vec<u8>> = row.query_row([key], |row| row.get(0)).optional()?;
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
                (Some(next), LeaseReply::Taken(LeaseAttempt::Ours(lease)))
            }
            Err(theirs) => {
                let Record { generation, holder, expires, .. } = *theirs;
                let left_ms = u64::try_from(expires - now).unwrap_or(0);
                let holder = holder.unwrap_or_else(|| Holder::this("unknown"));
                (None, LeaseReply::Taken(LeaseAttempt::Theirs { holder, generation, left_ms }))
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
        apply(file, &Txn::put(key, value), last, changes)?;
    }
    Ok(Ok(reply))
}
