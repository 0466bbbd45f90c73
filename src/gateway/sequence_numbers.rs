//! Operation sequence numbers: above every number that an agent has seen, and the floor up to which all are final.
//!
//! Agents delete records of operations up to the floor. The floor is below every row that is not final, and below every
//! task that is being written and not in memory yet.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use tracing::warn;

use super::tasks::MAX_ROWS;
use super::{ApiError, Gateway};
use crate::agent_protocol::Join;
use crate::clock;
use crate::ids::fresh_id;
use crate::store::{Store, Txn, TxnOutcome, keys};

/// Numbers follow the clock in milliseconds. A number more than a week ahead comes from a broken clock or a forged
/// agent.
const MAX_AHEAD_MS: u64 = 7 * 86_400_000;

/// Task numbers that bound the floor, and the floor.
#[derive(Default)]
pub struct TaskNumbers {
    inner: Mutex<Inner>,
    /// All operations with a sequence number up to this one are final.
    floor: AtomicU64,
}

#[derive(Default)]
struct Inner {
    /// The largest number assigned to a task.
    last: u64,
    /// Tasks being written, each with a lower bound of its number.
    creating: BTreeMap<u64, u64>,
    next: u64,
}

/// A task being written. It is dropped once the task is in memory, or was not created.
pub struct TaskCreation<'a> {
    numbers: &'a TaskNumbers,
    id: u64,
}

impl TaskNumbers {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn floor(&self) -> u64 {
        self.floor.load(Ordering::Acquire)
    }

    /// Must be called before a number is allocated in the store.
    pub fn begin_creation(&self) -> TaskCreation<'_> {
        let mut inner = self.inner();
        inner.next += 1;
        let (id, last) = (inner.next, inner.last);
        inner.creating.insert(id, last);
        TaskCreation { numbers: self, id }
    }

    pub fn record_allocated(&self, number: u64) {
        let mut inner = self.inner();
        inner.last = inner.last.max(number);
    }

    /// The largest sequence number below every current or future write of a task.
    fn bound(&self) -> u64 {
        let inner = self.inner();
        let last = inner.creating.values().copied().fold(inner.last, u64::min);
        last.saturating_add(1).saturating_mul(MAX_ROWS)
    }
}

impl Drop for TaskCreation<'_> {
    fn drop(&mut self) {
        self.numbers.inner().creating.remove(&self.id);
    }
}

impl<S: Store> Gateway<S> {
    /// Computes the floor for the heartbeats of all streams.
    pub(super) fn raise_floor(&self) {
        if !self.is_ready() {
            return;
        }
        // The bound is read first: a task that enters memory later is above it.
        let bound = self.numbers.bound();
        let open = self.tasks.unfinished().iter().filter_map(|task| task.first_open_seq()).min();
        let floor = open.map_or(bound, |open| bound.min(open.saturating_sub(1)));
        self.numbers.floor.fetch_max(floor, Ordering::AcqRel);
    }

    /// Raises the task number above an agent's last one, which another gateway or a lost store may have assigned.
    pub(super) async fn raise_task_number(&self, join: &Join) -> Result<(), ApiError> {
        let known = join.last_seq / MAX_ROWS;
        let now = u64::try_from(clock::now().0).unwrap_or(0);
        if known < now {
            return Ok(());
        }
        if known - now > MAX_AHEAD_MS {
            warn!(agent = %join.agent, last_seq = join.last_seq, "ignored: the agent reports a sequence number more than a week ahead");
            return Ok(());
        }
        loop {
            let entry = self.store.get(keys::TASK_NUMBER).await?;
            let text = entry.as_ref().and_then(|entry| std::str::from_utf8(&entry.value).ok());
            if text.and_then(|text| text.parse::<u64>().ok()).unwrap_or(0) >= known {
                return Ok(());
            }
            let txn = Txn::put(keys::TASK_NUMBER, known.to_string())
                .only_if(keys::TASK_NUMBER, entry.map_or(0, |entry| entry.mod_seq));
            if let TxnOutcome::Written(_) = self.store.txn(txn).await? {
                warn!(agent = %join.agent, last_seq = join.last_seq, "the agent reports a larger sequence number than the store: was the store restored from a backup?");
                return Ok(());
            }
        }
    }

    /// Identity of this store, created once and lost with the store.
    pub(super) async fn store_id(&self) -> Result<String, ApiError> {
        loop {
            if let Some(entry) = self.store.get(keys::STORE_ID).await? {
                return Ok(String::from_utf8_lossy(&entry.value).into_owned());
            }
            self.store.txn(Txn::put(keys::STORE_ID, fresh_id()).only_if(keys::STORE_ID, 0)).await?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_is_below_every_task_that_is_being_written() {
        let numbers = TaskNumbers::default();
        numbers.record_allocated(10);
        assert_eq!(numbers.bound(), 11 * MAX_ROWS);
        let first = numbers.begin_creation();
        let second = numbers.begin_creation();
        numbers.record_allocated(12);
        assert_eq!(numbers.bound(), 11 * MAX_ROWS, "the first may have got 11");
        drop(second);
        assert_eq!(numbers.bound(), 11 * MAX_ROWS);
        drop(first);
        assert_eq!(numbers.bound(), 13 * MAX_ROWS);
    }
}
