//! Recovery of an interrupted run: its steps in flight are waited for, not repeated.

use std::time::Duration;

use tokio::time::Instant;

use super::error::ApplyError;
use super::request::{ApplyEvent, ApplyHandler};
use super::writer_lease::WriterLease;
use crate::execute::{self, RecoveryError, journal};
use crate::observe::{Target, TargetError};

/// Recovers unfinished steps of an earlier run, before the plan is made.
pub(super) async fn recover<T>(
    target: &T,
    owner: &str,
    deadline: Instant,
    handler: &mut impl ApplyHandler,
) -> Result<(), ApplyError>
where
    T: Target<State: Clone + 'static>,
{
    let unfinished = journal::unfinished(target.state(), owner).await;
    if unfinished.map_err(|error| TargetError::state(target.name(), error))?.is_empty() {
        return Ok(());
    }
    // The steps of a lease holder that still runs are in flight, not interrupted.
    let writer = match WriterLease::acquire(target, owner, Duration::ZERO).await {
        Err(ApplyError::Locked { .. }) => return Ok(()),
        writer => writer?,
    };
    handler.on_event(ApplyEvent::Recovering);
    target.discard_prefetched();
    let recovered = recover_with_lease(target, owner, deadline).await;
    writer.release(target).await;
    recovered
}

/// Like [`recover`], for a caller that holds the writer lease.
pub(super) async fn recover_with_lease<T: Target>(
    target: &T,
    owner: &str,
    deadline: Instant,
) -> Result<(), ApplyError> {
    let (backend, state, name) = (target.backend(), target.state(), target.name());
    let unfinished = journal::unfinished(state, owner).await;
    let unfinished = unfinished.map_err(|error| TargetError::state(name, error))?;
    let recovered =
        execute::recover(backend, state, (name, &target.caps()), owner, unfinished, deadline).await;
    recovered.map_err(|why| match why {
        RecoveryError::Target(fault) => TargetError::backend(name, fault).into(),
        RecoveryError::State(error) => TargetError::state(name, error).into(),
        RecoveryError::UnderWay(_) => ApplyError::Unfinished(why),
    })
}
