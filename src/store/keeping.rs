//! A lease is kept by saying again and again that one is there.

use std::time::Duration;

use tokio::time::Instant;

use super::{Lease, Store};

/// How long a lease lives.
pub const LEASE_TTL: Duration = Duration::from_secs(5);
/// How often it is renewed.
pub const RENEW_INTERVAL: Duration = Duration::from_millis(1500);

/// How a lease is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseLost {
    /// It could not be renewed for as long as it lives: it may be another's by now.
    RanOut,
    Theirs,
}

/// Renews a lease until it is lost.
pub async fn renew_until_lost<S: Store>(state: &S, lease: &Lease) -> LeaseLost {
    let mut until = Instant::now() + LEASE_TTL;
    loop {
        tokio::time::sleep_until((Instant::now() + RENEW_INTERVAL).min(until)).await;
        let asked = Instant::now();
        match tokio::time::timeout_at(until, state.renew_lease(lease, LEASE_TTL)).await {
            Ok(Ok(true)) => until = asked + LEASE_TTL,
            Ok(Ok(false)) => return LeaseLost::Theirs,
            Ok(Err(_)) | Err(_) if Instant::now() < until => {}
            Ok(Err(_)) | Err(_) => return LeaseLost::RanOut,
        }
    }
}
