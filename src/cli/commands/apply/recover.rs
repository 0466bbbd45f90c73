//! What a run that died had begun is waited for, not done again.

use std::time::Duration;

use tokio::time::Instant;

use super::lease::WriterLease;
use crate::cli::output::print::Printer;
use crate::cli::target::ConnectedTarget;
use crate::cli::{Exit, Failure};
use crate::execute::{self, RecoveryError, journal};

/// Before anything is planned.
pub async fn recover(
    live: &ConnectedTarget,
    owner: &str,
    deadline: Instant,
    printer: &Printer,
) -> Result<(), Failure> {
    let left = journal::unfinished(&live.state, owner).await;
    if left.map_err(|error| live.failure(&error))?.is_empty() {
        return Ok(());
    }
    // Whoever is at work now settles his own: these are his.
    let writer = match WriterLease::acquire(live, owner, Duration::ZERO).await {
        Err(failure) if failure.exit == Exit::Locked => return Ok(()),
        writer => writer?,
    };
    printer.info("a run was interrupted: finding out what became of what it had begun");
    if let Ok(abide) = live.abide() {
        abide.discard_prefetched();
    }
    let settled = recover_with_lease(live, owner, deadline).await;
    writer.release(live).await;
    settled
}

/// The same for whoever holds the lease.
pub async fn recover_with_lease(
    live: &ConnectedTarget,
    owner: &str,
    deadline: Instant,
) -> Result<(), Failure> {
    let whom = (live.name.as_str(), &live.caps());
    let left = journal::unfinished(&live.state, owner).await.map_err(|error| live.failure(&error))?;
    let settled = execute::recover(&live.backend, &live.state, whom, owner, left, deadline).await;
    settled.map_err(|why| match why {
        RecoveryError::Target(fault) => live.failure(&fault),
        RecoveryError::State(error) => live.failure(&error),
        RecoveryError::UnderWay(_) => Failure::new(Exit::TimedOut, why.to_string()),
    })
}
