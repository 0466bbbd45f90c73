//! The right to change an owner's processes: one at a time has it, for as long as he says that he is there.

use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::GRACE;
use crate::cli::target::Live;
use crate::cli::{Exit, Failure};
use crate::clock::moment;
use crate::model::Time;
use crate::store::keeping::{self, LIVES, Lost};
use crate::store::{Holder, Lease, Store, Taken};

/// Whoever has the right.
pub struct Writer {
    lease: Lease,
    keeping: JoinHandle<()>,
    lost: watch::Receiver<Option<Lost>>,
}

impl Writer {
    /// Waits for another who has it, so long; from here on calls carry the lease's number.
    pub async fn begin(live: &Live, owner: &str, patience: Duration) -> Result<Writer, Failure> {
        let lease = take_lease(live, owner, patience).await?;
        let (keeping, lost) = keep(live, &lease);
        live.act_as(lease.generation);
        Ok(Writer { lease, keeping, lost })
    }

    /// Says when it is lost.
    pub fn lost(&self) -> watch::Receiver<Option<Lost>> {
        self.lost.clone()
    }

    pub async fn end(self, live: &Live) {
        self.keeping.abort();
        let _ = tokio::time::timeout(GRACE, live.state.release_lease(&self.lease)).await;
    }
}

async fn take_lease(live: &Live, owner: &str, patience: Duration) -> Result<Lease, Failure> {
    let holder = Holder::this(format!("apply-{}-{}", std::process::id(), moment().0));
    let begin = Instant::now();
    loop {
        let taken = live.state.take_lease(&format!("writer/{owner}"), &holder, LIVES).await;
        match taken.map_err(|error| live.failure(&error))? {
            Taken::Ours(lease) => return Ok(lease),
            Taken::Theirs { holder, .. } if begin.elapsed() >= patience => {
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
            Taken::Theirs { .. } => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Renews a lease until it is told not to; says when it was lost.
fn keep(live: &Live, lease: &Lease) -> (JoinHandle<()>, watch::Receiver<Option<Lost>>) {
    let (state, lease) = (live.state.clone(), lease.clone());
    let (tell, lost) = watch::channel(None);
    let keeping = tokio::spawn(async move {
        let how = keeping::keep(&state, &lease).await;
        tell.send_replace(Some(how));
    });
    (keeping, lost)
}
