//! The writer lease: at most one process changes an owner's processes; it is renewed while held.

use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::GRACE;
use crate::cli::target::ConnectedTarget;
use crate::cli::{Exit, Failure};
use crate::clock::now;
use crate::ids;
use crate::model::Time;
use crate::store::lease::{LEASE_TTL, LeaseLost, renew_until_lost};
use crate::store::{Holder, Lease, LeaseAttempt, Store, keys};

/// A held writer lease.
pub struct WriterLease {
    lease: Lease,
    renewal: JoinHandle<()>,
    lost: watch::Receiver<Option<LeaseLost>>,
}

impl WriterLease {
    /// Waits up to `timeout` for another holder. Later calls carry the lease's generation.
    pub async fn acquire(
        live: &ConnectedTarget,
        owner: &str,
        timeout: Duration,
    ) -> Result<WriterLease, Failure> {
        let lease = take_lease(live, owner, timeout).await?;
        let (renewal, lost) = spawn_renewal(live, &lease);
        live.act_as(lease.generation);
        Ok(WriterLease { lease, renewal, lost })
    }

    /// Becomes `Some` when the lease is lost.
    pub fn lost(&self) -> watch::Receiver<Option<LeaseLost>> {
        self.lost.clone()
    }

    pub async fn release(self, live: &ConnectedTarget) {
        self.renewal.abort();
        let _ = tokio::time::timeout(GRACE, live.state.release_lease(&self.lease)).await;
    }
}

async fn take_lease(live: &ConnectedTarget, owner: &str, timeout: Duration) -> Result<Lease, Failure> {
    let holder = Holder::this(ids::holder_id("apply", now()));
    let begin = Instant::now();
    loop {
        let taken = live.state.take_lease(&keys::writer_lease_name(owner), &holder, LEASE_TTL).await;
        match taken.map_err(|error| live.failure(&error))? {
            LeaseAttempt::Ours(lease) => return Ok(lease),
            LeaseAttempt::Theirs { holder, .. } if begin.elapsed() >= timeout => {
                let message = format!(
                    "{} (process {}) holds the writer lease of owner {owner:?} since {}",
                    holder.host,
                    holder.pid,
                    Time(holder.since)
                );
                return Err(
                    Failure::new(Exit::Locked, message).hint("wait for it, or pass a longer --lock-timeout")
                );
            }
            LeaseAttempt::Theirs { .. } => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Renews a lease in the background. The receiver becomes `Some` when the lease is lost.
fn spawn_renewal(
    live: &ConnectedTarget,
    lease: &Lease,
) -> (JoinHandle<()>, watch::Receiver<Option<LeaseLost>>) {
    let (state, lease) = (live.state.clone(), lease.clone());
    let (sender, lost) = watch::channel(None);
    let renewal = tokio::spawn(async move {
        let how = renew_until_lost(&state, &lease).await;
        sender.send_replace(Some(how));
    });
    (renewal, lost)
}
