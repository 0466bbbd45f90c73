//! Rows without an agent: they end with 117, and a late result replaces them.
//!
//! A call may name a hundred thousand hosts without an agent. Their rows are one store entry, as ranges of row numbers.

use std::collections::BTreeSet;

use super::tasks::{GatewayTask, ItemResult, ItemState};
use super::{ApiError, Gateway};
use crate::gse::codes::RowCode;
use crate::model::HostKey;
use crate::store::{Store, Txn, keys};

fn agent_missing() -> ItemResult {
    ItemResult {
        given_up: true,
        ..ItemResult::new(RowCode::AGENT_MISSING, "the host's agent is not connected")
    }
}

impl<S: Store> Gateway<S> {
    pub(super) async fn load_missing(&self, task: &GatewayTask) -> Result<(), ApiError> {
        let Some(entry) = self.store.get(&keys::missing_rows(&task.id)).await? else { return Ok(()) };
        let rows: Vec<(usize, usize)> = entry.decode()?;
        for nth in rows.into_iter().flat_map(|(first, last)| first..=last).take(task.items.len()) {
            // A late result replaces the missing mark.
            if task.is_unfinished(nth) {
                task.finish(nth, agent_missing());
            }
        }
        Ok(())
    }

    /// The writes that mark rows of a task as missing their agent.
    fn mark_missing(&self, task: &GatewayTask, rows: &BTreeSet<usize>) -> Result<Txn, ApiError> {
        if task.is_live_check() {
            return Ok(Txn::default());
        }
        let before = task
            .rows()
            .iter()
            .enumerate()
            .filter_map(|(nth, row)| match row {
                ItemState::Done(done) if done.given_up => Some(nth),
                ItemState::Done(_) | ItemState::Waiting | ItemState::Sent => None,
            })
            .collect::<BTreeSet<usize>>();
        let all = serde_json::to_vec(&ranges(rows.union(&before).copied()))?;
        let txn = Txn::put(keys::missing_rows(&task.id), all);
        Ok(txn.and(task.closed(|nth| rows.contains(&nth))))
    }

    /// Ends rows whose host has had no agent for the timeout with 117. Returns their number.
    pub async fn expire_items(&self) -> Result<usize, ApiError> {
        if !self.hosts.expire(self.timeouts.agent).is_empty() {
            self.report_usage.forget_idle();
        }
        let mut given_up = 0;
        for task in self.tasks.unfinished() {
            // By the monotonic clock: a step of the wall clock expires no agent.
            let waited = task.accepted.elapsed();
            if waited < self.timeouts.agent {
                continue;
            }
            let gone = |host: &HostKey| {
                let silent = self.hosts.silent_for(host).map_or(waited, |silent| silent.min(waited));
                self.hosts.agent_version(host).is_none() && silent >= self.timeouts.agent
            };
            let rows: BTreeSet<usize> =
                task.open_rows().into_iter().filter(|nth| gone(&task.items[*nth].instance.host)).collect();
            if rows.is_empty() {
                continue;
            }
            let txn = self.mark_missing(&task, &rows)?;
            if !txn.writes.is_empty() {
                self.store.txn(txn).await?;
            }
            given_up += rows.len();
            // A result that arrived during the commit is kept.
            rows.into_iter()
                .filter(|nth| task.is_unfinished(*nth))
                .for_each(|nth| task.finish(nth, agent_missing()));
        }
        self.metrics.count_expired(given_up);
        Ok(given_up)
    }
}

/// Compresses consecutive numbers to ranges (first, last).
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
