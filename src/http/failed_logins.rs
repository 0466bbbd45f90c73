//! Failed logins: wrong credentials are logged per peer and answered with a growing delay.
//!
//! Callers compare credentials first and report only wrong ones here: a peer's failures neither refuse nor delay
//! valid credentials, which may belong to another caller at the same address. Delayed answers are bounded per peer
//! and in total; beyond the bound wrong credentials get 429 immediately. The bound protects memory and connections.
//! Only the length of a secret protects it against guessing: at least 16 random characters.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tracing::warn;

use super::peers::PeerKey;
use crate::retry_delay::RetryDelay;

/// Failures without a delay: typing errors.
const FREE_FAILURES: u32 = 3;
/// Delay of the first failure beyond these; each further failure doubles it.
const DELAYS: RetryDelay = RetryDelay::doubling(Duration::from_millis(100), Duration::from_secs(2));
/// Time after which one failure expires.
const FAILURE_DECAY: Duration = Duration::from_secs(5);
/// Maximum counted failures: more would take too long to expire.
const MAX_FAILURES: u32 = 24;
/// Maximum concurrent delayed answers, per peer and in total.
const MAX_DELAYED_PER_PEER: usize = 16;
const MAX_DELAYED: usize = 512;
/// Minimum interval between log lines about one peer.
const LOG_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum recorded peers; a removed peer starts over.
const MAX_PEERS: usize = 10_000;
/// Maximum characters of a claimed name in the log.
const MAX_LOGGED_CHARS: usize = 64;

/// Answer to wrong credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoginFailureAction {
    /// Answer now: the delay has passed.
    Refuse,
    /// Too many of this peer's failed logins are waiting for their answer.
    TooMany,
}

#[derive(Default)]
pub struct FailedLogins {
    peers: Mutex<Failures>,
    failures: AtomicU64,
}

#[derive(Default)]
struct Failures {
    by_peer: HashMap<PeerKey, PeerFailures>,
    delayed: usize,
}

struct PeerFailures {
    failures: u32,
    last: Instant,
    logged: Option<Instant>,
    /// Failures since the last log line.
    unlogged: u32,
    delayed: usize,
}

impl FailedLogins {
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    pub async fn failed(&self, peer: SocketAddr, key: PeerKey, who: &str) -> LoginFailureAction {
        self.failures.fetch_add(1, Ordering::Relaxed);
        let delay = match self.count(peer, key, who) {
            None => return LoginFailureAction::TooMany,
            Some(Duration::ZERO) => return LoginFailureAction::Refuse,
            Some(delay) => delay,
        };
        let _waiting = DelayedReply { logins: self, key };
        tokio::time::sleep(delay).await;
        LoginFailureAction::Refuse
    }

    fn peers(&self) -> MutexGuard<'_, Failures> {
        self.peers.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Delay of this failure's answer; a delayed answer counts toward the bounds.
    fn count(&self, peer: SocketAddr, key: PeerKey, who: &str) -> Option<Duration> {
        let mut all = self.peers();
        let Failures { by_peer, delayed } = &mut *all;
        evict_record(by_peer, key);
        let now = Instant::now();
        let record = by_peer.entry(key).or_insert(PeerFailures {
            failures: 0,
            last: now,
            logged: None,
            unlogged: 0,
            delayed: 0,
        });
        record.fail(now);
        record.log(now, peer, who);
        let delay = delay(record.failures);
        if delay.is_zero() {
            return Some(delay);
        }
        if record.delayed >= MAX_DELAYED_PER_PEER || *delayed >= MAX_DELAYED {
            return None;
        }
        record.delayed += 1;
        *delayed += 1;
        Some(delay)
    }
}

impl PeerFailures {
    fn fail(&mut self, now: Instant) {
        let forgiven = now.duration_since(self.last).as_secs() / FAILURE_DECAY.as_secs();
        let left = self.failures.saturating_sub(u32::try_from(forgiven).unwrap_or(u32::MAX));
        self.failures = (left + 1).min(MAX_FAILURES);
        self.last = now;
    }

    fn log(&mut self, now: Instant, peer: SocketAddr, who: &str) {
        if self.logged.is_some_and(|at| now.duration_since(at) < LOG_INTERVAL) {
            self.unlogged += 1;
            return;
        }
        let more = std::mem::take(&mut self.unlogged);
        self.logged = Some(now);
        let who: String = who.chars().take(MAX_LOGGED_CHARS).collect();
        // Quoted: a claimed name must not be able to forge a log line.
        warn!(target: "audit", %peer, ?who, since_last_line = more, "wrong credentials");
    }

    fn is_expired(&self, now: Instant) -> bool {
        let forgiven = FAILURE_DECAY.saturating_mul(self.failures);
        self.delayed == 0 && now.duration_since(self.last) > forgiven
    }
}

/// Removes expired records first, then all records without a delayed answer.
fn evict_record(by_peer: &mut HashMap<PeerKey, PeerFailures>, key: PeerKey) {
    if by_peer.len() < MAX_PEERS || by_peer.contains_key(&key) {
        return;
    }
    let now = Instant::now();
    by_peer.retain(|_, record| !record.is_expired(now));
    if by_peer.len() >= MAX_PEERS {
        by_peer.retain(|_, record| record.delayed > 0);
    }
}

fn delay(failures: u32) -> Duration {
    match failures.saturating_sub(FREE_FAILURES) {
        0 => Duration::ZERO,
        more => DELAYS.after(more),
    }
}

/// A delayed answer; the caller may disconnect before the delay has passed.
struct DelayedReply<'a> {
    logins: &'a FailedLogins,
    key: PeerKey,
}

impl Drop for DelayedReply<'_> {
    fn drop(&mut self) {
        let mut all = self.logins.peers();
        all.delayed = all.delayed.saturating_sub(1);
        if let Some(record) = all.by_peer.get_mut(&self.key) {
            record.delayed = record.delayed.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn the_delay_grows_to_its_bound() {
        let secs: Vec<u128> = (1..12).map(|failures| delay(failures).as_millis()).collect();
        assert_eq!(secs, [0, 0, 0, 100, 200, 400, 800, 1600, 2000, 2000, 2000]);
        assert_eq!(delay(u32::MAX), DELAYS.max());
    }

    #[tokio::test(start_paused = true)]
    async fn delayed_answers_are_bounded_and_peers_do_not_affect_each_other() {
        let logins = FailedLogins::default();
        let peer = |last: u8| SocketAddr::from(([10, 0, 0, last], 1));
        let key = |last: u8| PeerKey::from(peer(last).ip());
        for _ in 0..FREE_FAILURES {
            assert_eq!(logins.failed(peer(1), key(1), "a").await, LoginFailureAction::Refuse);
        }
        let mut waiting: Vec<_> =
            (0..MAX_DELAYED_PER_PEER).map(|_| Box::pin(logins.failed(peer(1), key(1), "a"))).collect();
        let mut context = Context::from_waker(Waker::noop());
        for one in &mut waiting {
            assert!(one.as_mut().poll(&mut context).is_pending());
        }
        assert_eq!(logins.failed(peer(1), key(1), "a").await, LoginFailureAction::TooMany);
        assert_eq!(logins.failed(peer(2), key(2), "a").await, LoginFailureAction::Refuse);
        drop(waiting.pop());
        assert!(Box::pin(logins.failed(peer(1), key(1), "a")).as_mut().poll(&mut context).is_pending());
        for one in waiting {
            assert_eq!(one.await, LoginFailureAction::Refuse);
        }
        assert_eq!((logins.peers().delayed, logins.failures()), (0, 22));
    }

    #[test]
    fn remembered_peers_are_bounded() {
        let logins = FailedLogins::default();
        for nth in 0..(MAX_PEERS as u32 + 10) {
            let peer = SocketAddr::from((std::net::Ipv4Addr::from_bits(nth), 1));
            logins.count(peer, PeerKey::from(peer.ip()), "a");
        }
        assert!(logins.peers().by_peer.len() <= MAX_PEERS);
    }
}
