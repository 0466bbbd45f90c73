//! Writer: the writer lease, the generation of the last write, and the queue of the executor.

use tokio::sync::mpsc;

use super::context::PassContext;
use crate::clock;
use crate::control::Target;
use crate::control::executor::WorkItem;
use crate::ids;
use crate::store::lease::LEASE_TTL;
use crate::store::{Error, Holder, Lease, LeaseAttempt, Store, keys};

pub struct LeasedQueue {
    work_items: mpsc::UnboundedSender<WorkItem>,
    /// Number of the last work item.
    last_number: u64,
    /// The writer lease, while work is in flight.
    lease: Option<Lease>,
    /// The generation of our last write.
    last_generation: Option<u64>,
    /// The leader lease.
    leader: Option<Lease>,
}

impl LeasedQueue {
    pub fn new(work_items: mpsc::UnboundedSender<WorkItem>) -> LeasedQueue {
        LeasedQueue { work_items, last_number: 0, lease: None, last_generation: None, leader: None }
    }

    pub fn set_leader(&mut self, leader: Lease) {
        self.leader = Some(leader);
    }

    /// The writer lease: the current one while work is in flight, otherwise a new one. `None`: another writer holds it.
    pub async fn acquire<T: Target>(&mut self, context: PassContext<'_, T>) -> Result<Option<Lease>, Error> {
        let state = context.state();
        if let Some(lease) = &self.lease
            && state.renew_lease(lease, LEASE_TTL).await?
        {
            return Ok(Some(lease.clone()));
        }
        let holder = Holder::this(ids::holder_id("watch", clock::now()));
        let name = keys::writer_lease_name(context.owner());
        self.lease = match state.take_lease(&name, &holder, LEASE_TTL).await? {
            LeaseAttempt::Acquired(lease) => Some(lease),
            LeaseAttempt::HeldByOther { .. } => None,
        };
        Ok(self.lease.clone())
    }

    /// Releases the writer lease, if nothing is in flight.
    pub async fn release_when<T: Target>(&mut self, context: PassContext<'_, T>, is_idle: bool) {
        if let Some(lease) = self.lease.take_if(|_| is_idle) {
            let _ = context.state().release_lease(&lease).await;
        }
    }

    /// Whether this controller still leads: after a long suspension another one may.
    pub fn is_leading<'c, T: Target>(
        &self,
        context: PassContext<'c, T>,
    ) -> impl Future<Output = bool> + use<'c, T> {
        let leader = self.leader.clone();
        async move {
            match leader {
                Some(leader) => context.state().renew_lease(&leader, LEASE_TTL).await.unwrap_or(false),
                None => true,
            }
        }
    }

    /// Records the generation of the next write. Returns whether no other writer was active since our last one.
    pub fn begin_generation(&mut self, generation: u64) -> bool {
        is_next_write(self.last_generation.replace(generation), generation)
    }

    pub fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    pub fn send(&self, item: WorkItem) {
        // The executor outlives this sender.
        let _ = self.work_items.send(item);
    }
}

/// Each holder of the lease gets the next generation: a gap is another writer.
fn is_next_write(last: Option<u64>, generation: u64) -> bool {
    last.is_some_and(|last| last == generation || last.checked_add(1) == Some(generation))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_between_generations_is_another_writer() {
        assert!(is_next_write(Some(3), 3) && is_next_write(Some(3), 4));
        assert!(!is_next_write(Some(3), 5) && !is_next_write(Some(3), 2));
        assert!(!is_next_write(None, 1), "nothing is known about earlier writers");
        assert!(is_next_write(Some(u64::MAX), u64::MAX) && !is_next_write(Some(u64::MAX), 0));
    }
}
