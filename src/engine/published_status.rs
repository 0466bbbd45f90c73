//! Published status: status of controllers in the store, read by `status` and `apply`.
//!
//! `controller/OWNER` is written when the status changes, at most once per [`MIN_INTERVAL`]. The leader lease is the
//! heartbeat: a status without a current lease belongs to a controller that no longer runs.

use std::time::Duration;

use tokio::time::Instant;

use crate::clock;
use crate::contract::PublishedStatus;
use crate::store::lease::Record;
use crate::store::{Error, Store, Txn, keys};

/// Minimum interval between two writes.
const MIN_INTERVAL: Duration = Duration::from_secs(2);
/// Timeout of a write: it must not delay the control loop.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);

/// Writes the status of one controller.
#[derive(Default)]
pub struct Publisher {
    written: Option<PublishedStatus>,
    attempted: Option<Instant>,
}

impl Publisher {
    /// Writes the status if it changed. A failed write is repeated later: publication never stops the controller.
    pub async fn publish<S: Store>(&mut self, state: &S, status: PublishedStatus) {
        let is_early = self.attempted.is_some_and(|then| then.elapsed() < MIN_INTERVAL);
        if is_early || self.written.as_ref() == Some(&status) {
            return;
        }
        self.attempted = Some(Instant::now());
        let stored = PublishedStatus { at: clock::now().to_string(), ..status.clone() };
        let put = Txn::put(keys::controller(&status.owner), serde_json::to_vec(&stored).unwrap_or_default());
        if matches!(tokio::time::timeout(WRITE_TIMEOUT, state.txn(put)).await, Ok(Ok(_))) {
            self.written = Some(status);
        }
    }

    /// Another controller may have written since.
    pub fn reset(&mut self) {
        self.written = None;
    }
}

/// The published status of every owner. `leases`: all leases of the target.
pub async fn read<S: Store>(state: &S, leases: &[(String, Record)]) -> Result<Vec<PublishedStatus>, Error> {
    let page = state.range(keys::CONTROLLER_STATUS_PREFIX, None, usize::MAX).await?;
    // A status of another version is left out: it informs, and decides nothing alone.
    let all = page.entries.iter().filter_map(|entry| serde_json::from_slice(&entry.value).ok());
    let with_lease = |status: PublishedStatus| {
        let running = leads(&status, leases);
        PublishedStatus { running, ..status }
    };
    Ok(all.map(with_lease).collect())
}

/// Whether the controller holds the leader lease of its owner now.
fn leads(status: &PublishedStatus, leases: &[(String, Record)]) -> bool {
    let name = keys::leader_lease_name(&status.owner);
    leases.iter().filter(|(lease, _)| *lease == name).any(|(_, record)| {
        let is_current = record.expires > clock::now().0;
        is_current
            && record.holder.as_ref().is_some_and(|holder| {
                holder.host == status.host && holder.pid == status.pid && !holder.is_dead()
            })
    })
}
