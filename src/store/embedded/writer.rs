//! The one who writes: everything that waits in one commit, then the copy, then the answers.

use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, params};
use tokio::sync::oneshot;

use super::Shared;
use super::file::{KEPT, gone, last_number, number, signed, sum, understand};
use super::high_water_mark::HighWaterMark;
use crate::store::lease::{Holder, Lease, LeaseAttempt, Record, Reset, now_ms};
use crate::store::{Change, Compare, Error, Outcome, Seq, Txn, Write};

/// The most transactions that share a commit: more would only make the first of them wait.
const HANDFUL: usize = 1024;
/// Changes are forgotten in bulk: doing so with each write would cost as much as the write.
const FORGET_EVERY: u64 = 1_000;
/// Silence for this long is a good moment for putting the log into the file.
const QUIET: Duration = Duration::from_millis(200);
/// Fewer commits are not worth it: the log that begins anew waits for the disk twice.
const FEW_COMMITS: u32 = 256;
/// After so many commits it is put there, silence or not.
const MOST_COMMITS: u32 = 5_000;

pub(super) enum Job {
    Txn(Txn, oneshot::Sender<Result<Outcome, Error>>),
    /// Everything goes from the log into the file.
    Settle(oneshot::Sender<Result<(), Error>>),
    Lease {
        name: String,
        ask: Ask,
        answer: oneshot::Sender<Result<Granted, Error>>,
    },
}

pub(super) enum Ask {
    Take(Holder, Duration),
    Renew(Lease, Duration),
    Release(Lease),
    Reset { above: u64, force: bool },
}

pub(super) enum Granted {
    Taken(LeaseAttempt),
    Kept(bool),
    Reset(Reset),
}

/// The thread that writes.
pub(super) struct Writer {
    pub(super) connection: Connection,
    pub(super) file: PathBuf,
    pub(super) mark: HighWaterMark,
    /// Since the log was last put into the file.
    pub(super) commits: u32,
    pub(super) shared: std::sync::Weak<Shared>,
}

impl Writer {
    pub(super) fn run(mut self, jobs: &mpsc::Receiver<Job>) {
        // It ends when the last handle is gone.
        while let Some(first) = self.next(jobs) {
            let mut waiting = vec![first];
            waiting.extend(jobs.try_iter().take(HANDFUL - 1));
            let is_settle = |job: &Job| matches!(job, Job::Settle(_));
            let (settles, waiting): (Vec<Job>, Vec<Job>) = waiting.into_iter().partition(is_settle);
            if !waiting.is_empty() {
                self.serve(waiting);
            }
            for job in settles {
                let settled = self.connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
                let settled = settled.map_err(|error| understand(&error, &self.file));
                if let Job::Settle(answer) = job {
                    let _ = answer.send(settled);
                }
            }
        }
    }

    /// What comes next; while nothing does, the log goes into the file, so that nobody waits for that.
    fn next(&mut self, jobs: &mpsc::Receiver<Job>) -> Option<Job> {
        if self.commits >= FEW_COMMITS {
            match jobs.recv_timeout(QUIET) {
                Ok(job) if self.commits < MOST_COMMITS => return Some(job),
                Err(mpsc::RecvTimeoutError::Disconnected) => return None,
                other => {
                    self.commits = 0;
                    // Readers of old pages, or a full disk: then it is tried again after the next commit.
                    let _ = self.connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
                    if let Ok(job) = other {
                        return Some(job);
                    }
                }
            }
        }
        jobs.recv().ok()
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
                Job::Settle(_) => continue,
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
        self.commits += 1;
        self.mark.set(last);
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
            (Job::Settle(_), _) => {}
            (Job::Txn(..), Ok(Answer::Lease(_))) | (Job::Lease { .. }, Ok(Answer::Txn(_))) => {}
        }
    }
}

/// One transaction within a commit.
fn apply(
    file: &Connection,
    txn: &Txn,
    last: &mut Seq,
    changes: &mut Vec<Change>,
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
        file.prepare_cached("INSERT INTO log (number, key, value, sum) VALUES (?1, ?2, ?3, ?4)")?
            .execute(params![signed(*last), key, value, sum])?;
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
    last: &mut Seq,
    changes: &mut Vec<Change>,
) -> rusqlite::Result<Granted> {
    let mut row = file.prepare_cached("SELECT value FROM entry WHERE key = ?1")?;
    let value: Option<Vec<u8>> = row.query_row([key], |row| row.get(0)).optional()?;
    let record: Option<Record> = value.and_then(|value| serde_json::from_slice(&value).ok());
    let now = now_ms();
    let ours = |lease: &Lease| {
        record.clone().filter(|record| {
            let holds = record.holder.as_ref().is_some_and(|holder| holder.id == lease.holder);
            holds && record.generation == lease.generation && record.expires > now
        })
    };
    let name = key.trim_start_matches("lease/").to_owned();
    let (next, granted) = match ask {
        Ask::Take(holder, lives) => match Record::taken_by(record, holder, *lives, now) {
            Ok(next) => {
                let lease = Lease { name, holder: holder.id.clone(), generation: next.generation };
                (Some(next), Granted::Taken(LeaseAttempt::Ours(lease)))
            }
            Err(theirs) => {
                let Record { generation, holder, expires, .. } = *theirs;
                let left_ms = u64::try_from(expires - now).unwrap_or(0);
                let holder = holder.unwrap_or_else(|| Holder::this("nobody"));
                (None, Granted::Taken(LeaseAttempt::Theirs { holder, generation, left_ms }))
            }
        },
        Ask::Renew(lease, lives) => match ours(lease) {
            Some(record) => {
                (Some(Record { expires: Record::ends(now, *lives), ..record }), Granted::Kept(true))
            }
            None => (None, Granted::Kept(false)),
        },
        Ask::Release(lease) => {
            let next = ours(lease).map(|record| Record { holder: None, expires: now, ..record });
            (next, Granted::Kept(true))
        }
        Ask::Reset { above, force } => match Record::reset(record, *above, *force, now) {
            Ok(next) => {
                let generation = next.generation;
                (Some(next), Granted::Reset(Reset::Free { generation }))
            }
            Err(record) => {
                let left_ms = u64::try_from(record.expires - now).unwrap_or(0);
                let holder = record.holder.unwrap_or_else(|| Holder::this("unknown"));
                (None, Granted::Reset(Reset::Renewed { holder, left_ms }))
            }
        },
    };
    if let Some(next) = next {
        let value = serde_json::to_vec(&next).unwrap_or_default();
        apply(file, &Txn::put(key, value), last, changes)?;
    }
    Ok(granted)
}
