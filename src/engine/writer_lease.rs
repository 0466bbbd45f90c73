//! The writer lease: at most one process changes an owner's processes; it is renewed while held.

use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::error::ApplyError;
use crate::clock::now;
use crate::ids;
use crate::observe::{Target, TargetError};
use crate::store::lease::{LEASE_TTL, LeaseLost, renew_until_lost};
use crate::store::{Holder, Lease, LeaseAttempt, Store, keys};

/// Extra time after the deadline for the last writes.
pub(super) const GRACE: Duration = Duration::from_secs(2);

/// Interval between two attempts to take a lease that another process holds.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// A held writer lease.
pub(super) struct WriterLease {
    lease: Lease,
    renewal: JoinHandle<()>,
    lost: watch::Receiver<Option<LeaseLost>>,
}

impl WriterLease {
    /// Waits up to `timeout` for another holder. Later calls carry the lease's generation.
    pub async fn acquire<T>(target: &T, owner: &str, timeout: Duration) -> Result<WriterLease, ApplyError>
    where
        T: Target<State: Clone + 'static>,
    {
        let lease = take_lease(target, owner, timeout).await?;
        let (renewal, lost) = spawn_renewal(target.state(), &lease);
        target.set_generation(lease.generation);
        Ok(WriterLease { lease, renewal, lost })
    }

    /// Becomes `Some` when the lease is lost.
    pub fn lost(&self) -> watch::Receiver<Option<LeaseLost>> {
        self.lost.clone()
    }

    pub async fn release<T: Target>(self, target: &T) {
        self.renewal.abort();
        let _ = tokio::time::timeout(GRACE, target.state().release_lease(&self.lease)).await;
    }
}

async fn take_lease<T: Target>(target: &T, owner: &str, timeout: Duration) -> Result<Lease, ApplyError> {
    let holder = Holder::this(ids::holder_id("apply", now()));
    let begin = Instant::now();
    loop {
        let taken = target.state().take_lease(&keys::writer_lease_name(owner), &holder, LEASE_TTL).await;
        match taken.map_err(|error| TargetError::state(target.name(), error))? {
            LeaseAttempt::Acquired(lease) => return Ok(lease),
            LeaseAttempt::HeldByOther { holder, .. } if begin.elapsed() >= timeout => {
                return Err(ApplyError::Locked { owner: owner.to_owned(), holder: Box::new(holder) });
            }
            LeaseAttempt::HeldByOther { .. } => tokio::time::sleep(RETRY_INTERVAL).await,
        }
    }
}

/// Renews a lease in the background. The receiver becomes `Some` when the lease is lost.
fn spawn_renewal<S>(state: &S, lease: &Lease) -> (JoinHandle<()>, watch::Receiver<Option<LeaseLost>>)
where
    S: Store + Clone + 'static,
{
    let (state, lease) = (state.clone(), lease.clone());
    let (sender, lost) = watch::channel(None);
    let renewal = tokio::spawn(async move {
        let how = renew_until_lost(&state, &lease).await;
        sender.send_replace(Some(how));
    });
    (renewal, lost)
}
