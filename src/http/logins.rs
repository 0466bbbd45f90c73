//! Failed logins: each peer's wrong credentials are logged, and answered later each time.
//!
//! Right credentials are never delayed. The number of delayed answers is bounded by peer and in all. Beyond it the answer
//! is 429 at once and the credentials are not compared, so that parallel guesses learn nothing sooner.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tracing::warn;

use super::peers::PeerKey;

/// A typing error or two cost nothing.
const FREE: u32 = 3;
/// The delay of the first failure beyond that; each further one doubles it.
const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(2);
/// One failure is forgiven in this time.
const FORGIVEN: Duration = Duration::from_secs(5);
/// Failures that count: more would take too long to be forgiven.
const MOST: u32 = 24;
/// Delayed answers at once: of a peer, and of all.
const DELAYED_PER_PEER: usize = 16;
const DELAYED: usize = 512;
/// A peer's failures are logged this often.
const LOGGED: Duration = Duration::from_secs(5);
/// Peers that are remembered; a peer that is forgotten starts over.
const PEERS: usize = 10_000;
/// Characters of a claimed name in the log.
const SHOWN: usize = 64;

/// How to answer wrong credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The delay is over.
    Refuse,
    /// Too many of this peer's wrong credentials wait for their answer.
    TooMany,
}

#[derive(Default)]
pub struct Logins {
    peers: Mutex<Failures>,
    failures: AtomicU64,
}

#[derive(Default)]
struct Failures {
    by_peer: HashMap<PeerKey, Record>,
    delayed: usize,
}

struct Record {
    failures: u32,
    last: Instant,
    logged: Option<Instant>,
    /// Since the last log line.
    unlogged: u32,
    delayed: usize,
}

impl Logins {
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// May credentials of this peer be compared? While as many answers are delayed as may be, they are refused unread: an
    /// answer at once would confirm that a guess is wrong.
    pub fn may_try(&self, key: PeerKey) -> bool {
        let all = self.peers();
        let Some(record) = all.by_peer.get(&key).filter(|record| record.delayed > 0) else { return true };
        record.delayed < DELAYED_PER_PEER && all.delayed < DELAYED
    }

    pub async fn failed(&self, peer: SocketAddr, key: PeerKey, who: &str) -> Verdict {
        self.failures.fetch_add(1, Ordering::Relaxed);
        let delay = match self.count(peer, key, who) {
            None => return Verdict::TooMany,
            Some(Duration::ZERO) => return Verdict::Refuse,
            Some(delay) => delay,
        };
        let _waiting = Waiting { logins: self, key };
        tokio::time::sleep(delay).await;
        Verdict::Refuse
    }

    fn peers(&self) -> MutexGuard<'_, Failures> {
        self.peers.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// How long this failure's answer waits; if it does, it is counted among those that wait.
    fn count(&self, peer: SocketAddr, key: PeerKey, who: &str) -> Option<Duration> {
        let mut all = self.peers();
        let Failures { by_peer, delayed } = &mut *all;
        make_room(by_peer, key);
        let now = Instant::now();
        let record = by_peer.entry(key).or_insert(Record {
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
        if record.delayed >= DELAYED_PER_PEER || *delayed >= DELAYED {
            return None;
        }
        record.delayed += 1;
        *delayed += 1;
        Some(delay)
    }
}

impl Record {
    fn fail(&mut self, now: Instant) {
        let forgiven = now.duration_since(self.last).as_secs() / FORGIVEN.as_secs();
        let left = self.failures.saturating_sub(u32::try_from(forgiven).unwrap_or(u32::MAX));
        self.failures = (left + 1).min(MOST);
        self.last = now;
    }

    fn log(&mut self, now: Instant, peer: SocketAddr, who: &str) {
        if self.logged.is_some_and(|at| now.duration_since(at) < LOGGED) {
            self.unlogged += 1;
            return;
        }
        let more = std::mem::take(&mut self.unlogged);
        self.logged = Some(now);
        let who: String = who.chars().take(SHOWN).collect();
        // Quoted: a claimed name must not be able to look like a line of its own.
        warn!(target: "audit", %peer, ?who, since_last_line = more, "wrong credentials");
    }

    fn is_over(&self, now: Instant) -> bool {
        let forgiven = FORGIVEN.saturating_mul(self.failures);
        self.delayed == 0 && now.duration_since(self.last) > forgiven
    }
}

/// Old records go first; then all records without a delayed answer.
fn make_room(by_peer: &mut HashMap<PeerKey, Record>, key: PeerKey) {
    if by_peer.len() < PEERS || by_peer.contains_key(&key) {
        return;
    }
    let now = Instant::now();
    by_peer.retain(|_, record| !record.is_over(now));
    if by_peer.len() >= PEERS {
        by_peer.retain(|_, record| record.delayed > 0);
    }
}

fn delay(failures: u32) -> Duration {
    match failures.saturating_sub(FREE) {
        0 => Duration::ZERO,
        more => FIRST.saturating_mul(1 << (more - 1).min(10)).min(LONGEST),
    }
}

/// An answer that is delayed; it may be given up before the delay is over.
struct Waiting<'a> {
    logins: &'a Logins,
    key: PeerKey,
}

impl Drop for Waiting<'_> {
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
        assert_eq!(delay(u32::MAX), LONGEST);
    }

    #[tokio::test(start_paused = true)]
    async fn delayed_answers_are_bounded_and_peers_do_not_affect_each_other() {
        let logins = Logins::default();
        let peer = |last: u8| SocketAddr::from(([10, 0, 0, last], 1));
        let key = |last: u8| PeerKey::from(peer(last).ip());
        for _ in 0..FREE {
            assert_eq!(logins.failed(peer(1), key(1), "a").await, Verdict::Refuse);
        }
        let mut waiting: Vec<_> =
            (0..DELAYED_PER_PEER).map(|_| Box::pin(logins.failed(peer(1), key(1), "a"))).collect();
        let mut context = Context::from_waker(Waker::noop());
        for one in &mut waiting {
            assert!(one.as_mut().poll(&mut context).is_pending());
        }
        assert!(!logins.may_try(key(1)) && logins.may_try(key(2)));
        assert_eq!(logins.failed(peer(1), key(1), "a").await, Verdict::TooMany);
        assert_eq!(logins.failed(peer(2), key(2), "a").await, Verdict::Refuse);
        drop(waiting.pop());
        assert!(logins.may_try(key(1)));
        assert!(Box::pin(logins.failed(peer(1), key(1), "a")).as_mut().poll(&mut context).is_pending());
        for one in waiting {
            assert_eq!(one.await, Verdict::Refuse);
        }
        assert_eq!((logins.peers().delayed, logins.failures()), (0, 22));
    }

    #[test]
    fn remembered_peers_are_bounded() {
        let logins = Logins::default();
        for nth in 0..(PEERS as u32 + 10) {
            let peer = SocketAddr::from((std::net::Ipv4Addr::from_bits(nth), 1));
            logins.count(peer, PeerKey::from(peer.ip()), "a");
        }
        assert!(logins.peers().by_peer.len() <= PEERS);
    }
}
