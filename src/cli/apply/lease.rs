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
use crate::store::{Holder, Lease, Store, Taken};

/// How long a lease lives, and how often it is renewed.
const LEASE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_millis(1500));

/// How it stands with a lease that somebody believes to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    Ours,
    /// It could not be renewed for as long as it lives: it may be another's by now.
    RanOut,
    Theirs,
}

/// Whoever has the right.
pub struct Writer {
    lease: Lease,
    keeping: JoinHandle<()>,
    standing: watch::Receiver<Standing>,
}

impl Writer {
    /// Waits for another who has it, so long; from here on calls carry the lease's number.
    pub async fn begin(live: &Live, owner: &str, patience: Duration) -> Result<Writer, Failure> {
        let lease = take_lease(live, owner, patience).await?;
        let (keeping, standing) = keep(live, &lease);
        live.act_as(lease.generation);
        Ok(Writer { lease, keeping, standing })
    }

    /// Says when it is lost.
    pub fn standing(&self) -> watch::Receiver<Standing> {
        self.standing.clone()
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
        let taken = live.state.take_lease(&format!("writer/{owner}"), &holder, LEASE.0).await;
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
fn keep(live: &Live, lease: &Lease) -> (JoinHandle<()>, watch::Receiver<Standing>) {
    let (state, lease) = (live.state.clone(), lease.clone());
    let (tell, standing) = watch::channel(Standing::Ours);
    let keeping = tokio::spawn(async move {
        let mut until = Instant::now() + LEASE.0;
        let _ = loop {
            tokio::time::sleep_until((Instant::now() + LEASE.1).min(until)).await;
            let asked = Instant::now();
            match tokio::time::timeout_at(until, state.renew_lease(&lease, LEASE.0)).await {
                Ok(Ok(true)) => until = asked + LEASE.0,
                Ok(Ok(false)) => break tell.send_replace(Standing::Theirs),
                Ok(Err(_)) | Err(_) if Instant::now() < until => {}
                Ok(Err(_)) | Err(_) => break tell.send_replace(Standing::RanOut),
            }
        };
    });
    (keeping, standing)
}
