//! A lease is kept by saying again and again that one is there.

use std::time::Duration;

use tokio::time::Instant;

use super::{Lease, Store};

/// How long a lease lives.
pub const LIVES: Duration = Duration::from_secs(5);
/// How often it is renewed.
pub const RENEWED: Duration = Duration::from_millis(1500);

/// How a lease is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// It could not be renewed for as long as it lives: it may be another's by now.
    RanOut,
    Theirs,
}

/// Renews a lease until it is lost.
pub async fn keep<S: Store>(state: &S, lease: &Lease) -> Lost {
    let mut until = Instant::now() + LIVES;
    loop {
        tokio::time::sleep_until((Instant::now() + RENEWED).min(until)).await;
        let asked = Instant::now();
        match tokio::time::timeout_at(until, state.renew_lease(lease, LIVES)).await {
            Ok(Ok(true)) => until = asked + LIVES,
            Ok(Ok(false)) => return Lost::Theirs,
            Ok(Err(_)) | Err(_) if Instant::now() < until => {}
            Ok(Err(_)) | Err(_) => return Lost::RanOut,
        }
    }
}
