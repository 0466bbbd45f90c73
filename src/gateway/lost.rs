//! Rows whose host's agent is not there end in 117, and take their result if it comes after all.
//!
//! A call may name a hundred thousand hosts that nobody answers for: their rows are one entry of the store, as ranges of
//! numbers.

use std::collections::BTreeSet;

use super::tasks::{Done, Stand, Task};
use super::{Gateway, Refusal};
use crate::gse::codes::RowCode;
use crate::model::HostKey;
use crate::store::{Store, Txn};

fn lost() -> Done {
    Done { given_up: true, ..Done::new(RowCode::AGENT_MISSING, "the host's agent is not there") }
}

fn entry(task: &Task) -> String {
    format!("done/{}/lost", task.id)
}

impl<S: Store> Gateway<S> {
    pub(super) async fn load_lost(&self, task: &Task) -> Result<(), Refusal> {
        let Some(entry) = self.store.get(&entry(task)).await? else { return Ok(()) };
        let rows: Vec<(usize, usize)> = serde_json::from_slice(&entry.value).unwrap_or_default();
        for nth in rows.into_iter().flat_map(|(first, last)| first..=last).take(task.orders.len()) {
            // A late result stands on its own.
            if task.awaits_first(nth) {
                task.finish(nth, lost());
            }
        }
        Ok(())
    }

    /// What is written when some rows of a task are given up.
    fn lose(&self, task: &Task, rows: &BTreeSet<usize>) -> Result<Txn, Refusal> {
        if task.is_a_look() {
            return Ok(Txn::default());
        }
        let before = task
            .rows()
            .iter()
            .enumerate()
            .filter_map(|(nth, row)| match row {
                Stand::Done(done) if done.given_up => Some(nth),
                Stand::Done(_) | Stand::Waiting | Stand::Sent => None,
            })
            .collect::<BTreeSet<usize>>();
        let all = serde_json::to_vec(&ranges(rows.union(&before).copied()))?;
        let txn = Txn::put(entry(task), all);
        Ok(txn.and(task.closed(|nth| rows.contains(&nth))))
    }

    /// Rows whose host's agent has been gone for too long end with 117. How many.
    pub async fn give_up(&self) -> Result<usize, Refusal> {
        self.hosts.expire(self.patience);
        let mut given_up = 0;
        for task in self.tasks.unfinished() {
            // By the monotonic clock: a step of the wall clock declares no agent lost.
            let waited = task.accepted.elapsed();
            if waited < self.patience {
                continue;
            }
            let gone = |host: &HostKey| {
                let silent = self.hosts.silent_for(host).map_or(waited, |silent| silent.min(waited));
                self.hosts.alive(host).is_none() && silent >= self.patience
            };
            let rows: BTreeSet<usize> =
                task.open_rows().into_iter().filter(|nth| gone(&task.orders[*nth].instance.host)).collect();
            if rows.is_empty() {
                continue;
            }
            let txn = self.lose(&task, &rows)?;
            if !txn.writes.is_empty() {
                self.store.txn(txn).await?;
            }
            given_up += rows.len();
            // A result that came meanwhile stands.
            rows.into_iter().filter(|nth| task.awaits_first(*nth)).for_each(|nth| task.finish(nth, lost()));
        }
        self.metrics.given_up(given_up);
        Ok(given_up)
    }
}

/// Numbers that follow each other, as the first and the last of them.
fn ranges(numbers: impl Iterator<Item = usize>) -> Vec<(usize, usize)> {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for number in numbers {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => ranges.push((number, number)),
        }
    }
    ranges
}
