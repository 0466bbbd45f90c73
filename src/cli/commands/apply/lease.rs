//! The right to change an owner's processes: one at a time has it, for as long as he says that he is there.

use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::GRACE;
use crate::cli::target::ConnectedTarget;
use crate::cli::{Exit, Failure};
use crate::clock::now;
use crate::model::Time;
use crate::store::keeping::{self, LEASE_TTL, LeaseLost};
use crate::store::{Holder, Lease, LeaseAttempt, Store};

/// Whoever has the right.
pub struct WriterLease {
    lease: Lease,
    keeping: JoinHandle<()>,
    lost: watch::Receiver<Option<LeaseLost>>,
}

impl WriterLease {
    /// Waits for another who has it, so long; from here on calls carry the lease's number.
    pub async fn acquire(
        live: &ConnectedTarget,
        owner: &str,
        patience: Duration,
    ) -> Result<WriterLease, Failure> {
        let lease = take_lease(live, owner, patience).await?;
        let (keeping, lost) = spawn_renewal(live, &lease);
        live.act_as(lease.generation);
        Ok(WriterLease { lease, keeping, lost })
    }

    /// Says when it is lost.
    pub fn lost(&self) -> watch::Receiver<Option<LeaseLost>> {
        self.lost.clone()
    }

    pub async fn release(self, live: &ConnectedTarget) {
        self.keeping.abort();
        let _ = tokio::time::timeout(GRACE, live.state.release_lease(&self.lease)).await;
    }
}

async fn take_lease(live: &ConnectedTarget, owner: &str, patience: Duration) -> Result<Lease, Failure> {
    let holder = Holder::this(format!("apply-{}-{}", std::process::id(), now().0));
    let begin = Instant::now();
    loop {
        let taken = live.state.take_lease(&format!("writer/{owner}"), &holder, LEASE_TTL).await;
        match taken.map_err(|error| live.failure(&error))? {
            LeaseAttempt::Ours(lease) => return Ok(lease),
            LeaseAttempt::Theirs { holder, .. } if begin.elapsed() >= patience => {
                let message = format!(
                    "{} (process {}) has been changing this owner's processes since {}",
                    holder.host,
                    holder.pid,
                    Time(holder.since)
                );
                return Err(
                    Failure::new(Exit::Locked, message).hint("wait for it, or give --lock-timeout more time")
                );
            }
            LeaseAttempt::Theirs { .. } => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Renews a lease until it is told not to; says when it was lost.
fn spawn_renewal(
    live: &ConnectedTarget,
    lease: &Lease,
) -> (JoinHandle<()>, watch::Receiver<Option<LeaseLost>>) {
    let (state, lease) = (live.state.clone(), lease.clone());
    let (tell, lost) = watch::channel(None);
    let keeping = tokio::spawn(async move {
        let how = keeping::renew_until_lost(&state, &lease).await;
        tell.send_replace(Some(how));
    });
    (keeping, lost)
}
