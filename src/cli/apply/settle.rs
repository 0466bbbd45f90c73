//! What a run that died had begun is waited for, not done again.

use std::time::Duration;

use tokio::time::Instant;

use super::lease::Writer;
use crate::cli::print::Printer;
use crate::cli::target::Live;
use crate::cli::{Exit, Failure};
use crate::execute::{self, Unsettled, journal};

/// Before anything is planned.
pub async fn settle(live: &Live, owner: &str, deadline: Instant, printer: &Printer) -> Result<(), Failure> {
    let left = journal::left(&live.state, owner).await;
    if left.map_err(|error| live.failure(&error))?.is_empty() {
        return Ok(());
    }
    // Whoever is at work now settles his own: these are his.
    let writer = match Writer::begin(live, owner, Duration::ZERO).await {
        Err(failure) if failure.exit == Exit::Locked => return Ok(()),
        writer => writer?,
    };
    printer.remark("a run was interrupted: finding out what became of what it had begun");
    if let Ok(abide) = live.abide() {
        abide.look_anew();
    }
    let settled = settle_held(live, owner, deadline).await;
    writer.end(live).await;
    settled
}

/// The same for whoever holds the lease.
pub async fn settle_held(live: &Live, owner: &str, deadline: Instant) -> Result<(), Failure> {
    let whom = (live.name.as_str(), &live.caps());
    let left = journal::left(&live.state, owner).await.map_err(|error| live.failure(&error))?;
    let settled = execute::settle(&live.backend, &live.state, whom, owner, left, deadline).await;
    settled.map_err(|why| match why {
        Unsettled::Target(fault) => live.failure(&fault),
        Unsettled::State(error) => live.failure(&error),
        Unsettled::UnderWay(_) => Failure::new(Exit::TimedOut, why.to_string()),
    })
}
