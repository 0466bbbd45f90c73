//! Recovery of an interrupted run: its steps in flight are waited for, not repeated.

use std::time::Duration;

use tokio::time::Instant;

use super::lease::WriterLease;
use crate::cli::output::print::Printer;
use crate::cli::target::ConnectedTarget;
use crate::cli::{Exit, Failure};
use crate::execute::{self, RecoveryError, journal};

/// Recovers unfinished steps of an earlier run, before the plan is made.
pub async fn recover(
    live: &ConnectedTarget,
    owner: &str,
    deadline: Instant,
    printer: &Printer,
) -> Result<(), Failure> {
    let unfinished = journal::unfinished(&live.state, owner).await;
    if unfinished.map_err(|error| live.failure(&error))?.is_empty() {
        return Ok(());
    }
    // The steps of a lease holder that still runs are in flight, not interrupted.
    let writer = match WriterLease::acquire(live, owner, Duration::ZERO).await {
        Err(failure) if failure.exit == Exit::Locked => return Ok(()),
        writer => writer?,
    };
    printer.info("an earlier run was interrupted: recovering its steps");
    if let Ok(abide) = live.abide() {
        abide.discard_prefetched();
    }
    let recovered = recover_with_lease(live, owner, deadline).await;
    writer.release(live).await;
    recovered
}

/// Like [`recover`], for a caller that holds the writer lease.
pub async fn recover_with_lease(
    live: &ConnectedTarget,
    owner: &str,
    deadline: Instant,
) -> Result<(), Failure> {
    let target = (live.name.as_str(), &live.caps());
    let unfinished = journal::unfinished(&live.state, owner).await.map_err(|error| live.failure(&error))?;
    let recovered = execute::recover(&live.backend, &live.state, target, owner, unfinished, deadline).await;
    recovered.map_err(|why| match why {
        RecoveryError::Target(fault) => live.failure(&fault),
        RecoveryError::State(error) => live.failure(&error),
        RecoveryError::UnderWay(_) => Failure::new(Exit::TimedOut, why.to_string()),
    })
}
