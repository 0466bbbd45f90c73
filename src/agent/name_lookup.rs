//! Name lookups of health probes: on threads of their own, bounded per user.
//!
//! A lookup cannot be canceled: it goes on after the timeout of its probe. It keeps the permit of its user until it ends,
//! so that slow names of one user occupy a few threads, and never those of another user or of the agent's own lookups.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::LazyLock;

use tokio::sync::oneshot;

use super::permits::Permits;
use super::worker_threads;

/// Maximum concurrent lookups of one user.
const MAX_PER_USER: usize = 4;

static LOOKUPS: LazyLock<Permits> = LazyLock::new(|| Permits::new(MAX_PER_USER));

/// The addresses of `HOST:PORT`, for a user. An address in digits needs no lookup.
pub async fn resolve(uid: u32, address: &str) -> io::Result<Vec<SocketAddr>> {
    if let Ok(address) = address.parse() {
        return Ok(vec![address]);
    }
    let permit = LOOKUPS.acquire(uid).await;
    let (send, found) = oneshot::channel();
    let address = address.to_owned();
    worker_threads::run(move || {
        let found = address.to_socket_addrs().map(Iterator::collect);
        // The permit is free before the result is seen.
        drop(permit);
        let _ = send.send(found);
    })?;
    found.await.unwrap_or_else(|_| Err(io::Error::other("the lookup failed")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn digits_need_no_lookup_and_names_are_resolved() {
        let mut held = Vec::new();
        for _ in 0..MAX_PER_USER {
            held.push(LOOKUPS.acquire(4_000_000_002).await);
        }
        let addresses = resolve(4_000_000_002, "127.0.0.1:80").await.expect("an address");
        assert_eq!(addresses, ["127.0.0.1:80".parse().expect("an address")]);
        let waits = resolve(4_000_000_002, "localhost:80");
        assert!(tokio::time::timeout(std::time::Duration::from_millis(20), waits).await.is_err());
        assert!(!resolve(4_000_000_003, "localhost:80").await.expect("addresses").is_empty(), "another user");
    }
}
