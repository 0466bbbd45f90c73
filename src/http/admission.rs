//! Request admission: permits and body memory, with separate budgets for known callers, agents and unknown callers.
//!
//! Known callers and agents share a [`Budget`] by credential. Unknown callers, whose credentials may be in their body,
//! share a pool with a limit per peer. A full pool evicts the peer's oldest request; exhausted memory evicts its
//! largest. Memory is charged as bytes arrive.

use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures_util::StreamExt;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::budget::{Budget, Charge, CredentialLimits};
use super::credential_key::CredentialKey;
use super::overload::LimitedResource;
use super::peers::{PeerKey, Peers, Position, Stage};

/// Minimum average rate of a body after the grace period, in bytes per second.
const MIN_RATE: u64 = 1024;
const GRACE: Duration = Duration::from_secs(5);

/// Requests of callers that cannot be authenticated until their body is read.
pub struct UnknownCallers {
    requests: usize,
    requests_per_peer: usize,
    bytes: usize,
    bytes_per_peer: usize,
    state: Mutex<Peers>,
    total_bytes: AtomicUsize,
}

impl UnknownCallers {
    /// One peer gets at most an eighth of the requests and half of the memory.
    pub fn new(requests: usize, bytes: usize) -> UnknownCallers {
        let requests = requests.max(16);
        UnknownCallers {
            requests,
            requests_per_peer: (requests / 8).max(16),
            bytes,
            bytes_per_peer: bytes / 2,
            state: Mutex::default(),
            total_bytes: AtomicUsize::new(0),
        }
    }

    fn state(&self) -> MutexGuard<'_, Peers> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Always admits: a full pool evicts the oldest request of this peer or of the fullest peer.
    pub fn admit(&self, peer: IpAddr) -> AdmittedRequest<'_> {
        let key = PeerKey::from(peer);
        let mut state = self.state();
        let full = match () {
            () if state.of(key) >= self.requests_per_peer => Some(key),
            () if state.len() >= self.requests => state.fullest(),
            () => None,
        };
        if let Some(peer) = full
            && let Some((position, _)) = state.oldest(peer)
        {
            self.evict(&mut state, peer, position);
        }
        let evicted: Arc<Notify> = Arc::default();
        let position = state.insert(key, Stage::Busy, 0, Arc::clone(&evicted));
        AdmittedRequest::Unknown(UnknownRequest { callers: self, key, position, evicted })
    }

    fn evict(&self, state: &mut Peers, peer: PeerKey, position: Position) {
        if let Some(entry) = state.evict(peer, position) {
            self.total_bytes.fetch_sub(entry.bytes, Ordering::Relaxed);
        }
    }
}

/// A request of an unknown caller.
pub struct UnknownRequest<'a> {
    callers: &'a UnknownCallers,
    key: PeerKey,
    position: Position,
    evicted: Arc<Notify>,
}

impl UnknownRequest<'_> {
    /// Charges received bytes. `false`: this request is evicted.
    fn add(&mut self, more: usize) -> bool {
        let callers = self.callers;
        let mut state = callers.state();
        let Some(entry) = state.get_mut(self.key, self.position) else { return false };
        entry.bytes += more;
        callers.total_bytes.fetch_add(more, Ordering::Relaxed);
        loop {
            let heaviest = match () {
                () if state.bytes_of(self.key) > callers.bytes_per_peer => Some(self.key),
                () if callers.total_bytes.load(Ordering::Relaxed) > callers.bytes => state.heaviest(),
                () => None,
            };
            let Some(peer) = heaviest else { return true };
            let Some(position) = state.largest(peer) else { return true };
            callers.evict(&mut state, peer, position);
            if (peer, position) == (self.key, self.position) {
                return false;
            }
        }
    }
}

impl Drop for UnknownRequest<'_> {
    fn drop(&mut self) {
        if let Some(entry) = self.callers.state().remove(self.key, self.position) {
            self.callers.total_bytes.fetch_sub(entry.bytes, Ordering::Relaxed);
        }
    }
}

/// A request that may be read.
pub enum AdmittedRequest<'a> {
    Known(Charge<'a>),
    Unknown(UnknownRequest<'a>),
}

impl AdmittedRequest<'_> {
    fn add(&mut self, more: usize) -> Result<(), BodyError> {
        match self {
            AdmittedRequest::Known(charge) => charge.add(more).map_err(BodyError::Exhausted),
            AdmittedRequest::Unknown(unknown) => unknown.add(more).then_some(()).ok_or(BodyError::Evicted),
        }
    }

    async fn evicted(&self) {
        match self {
            AdmittedRequest::Known(_) => std::future::pending().await,
            AdmittedRequest::Unknown(unknown) => unknown.evicted.notified().await,
        }
    }

    pub fn is_unknown(&self) -> bool {
        matches!(self, AdmittedRequest::Unknown(_))
    }
}

/// Admits a request of a known caller. `None`: the listener has a single credential.
pub fn admit_known(
    budget: &Budget,
    credential: Option<CredentialKey>,
) -> Result<AdmittedRequest<'_>, LimitedResource> {
    admit_limited(budget, credential, CredentialLimits::default())
}

/// The same for a credential with limits of its own.
pub fn admit_limited(
    budget: &Budget,
    credential: Option<CredentialKey>,
    limits: CredentialLimits,
) -> Result<AdmittedRequest<'_>, LimitedResource> {
    budget.charge(credential, limits).map(AdmittedRequest::Known)
}

/// Moves a request, with its body's bytes, to the budget of another class.
pub fn readmit<'a>(
    budget: &'a Budget,
    (credential, limits): (CredentialKey, CredentialLimits),
    body: &Bytes,
) -> Result<AdmittedRequest<'a>, LimitedResource> {
    let mut charge = budget.charge(Some(credential), limits)?;
    charge.add(body.len())?;
    Ok(AdmittedRequest::Known(charge))
}

/// Reason why a body was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyError {
    TooLarge,
    /// The connection ended, or its framing is wrong.
    Broken,
    TooSlow,
    /// A known caller's body exceeds the remaining memory, or the share of its credential.
    Exhausted(LimitedResource),
    /// An unknown caller's request was evicted in favor of another.
    Evicted,
}

/// Reads a whole body, enforcing the minimum rate and the total `time`.
pub async fn read_body(
    body: Body,
    most: usize,
    time: Duration,
    admitted: &mut AdmittedRequest<'_>,
) -> Result<Bytes, BodyError> {
    let begin = Instant::now();
    let grace = GRACE.min(time);
    let mut stream = body.into_data_stream();
    let (mut first, mut rest, mut length) = (Bytes::new(), Vec::new(), 0usize);
    loop {
        let at_rate = grace + Duration::from_secs(length as u64 / MIN_RATE);
        let next = tokio::select! {
            biased;
            next = stream.next() => next,
            () = admitted.evicted() => return Err(BodyError::Evicted),
            () = tokio::time::sleep_until(begin + at_rate.min(time)) => return Err(BodyError::TooSlow),
        };
        let piece = match next {
            None => break,
            Some(Err(_)) => return Err(BodyError::Broken),
            Some(Ok(piece)) => piece,
        };
        length = length.saturating_add(piece.len());
        if length > most {
            return Err(BodyError::TooLarge);
        }
        admitted.add(piece.len())?;
        match first.is_empty() {
            true => first = piece,
            false => {
                if rest.is_empty() {
                    rest.extend_from_slice(&first);
                }
                rest.extend_from_slice(&piece);
            }
        }
    }
    Ok(if rest.is_empty() { first } else { rest.into() })
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::super::credential_key::CredentialScope;
    use super::*;

    const TIME: Duration = Duration::from_secs(30);
    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn other(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    /// A body that yields one chunk per `wait`, then stalls.
    fn stalling_body(pieces: usize, size: usize, wait: Duration) -> Body {
        Body::from_stream(stream::unfold(0, move |nth| async move {
            if nth == pieces {
                std::future::pending::<()>().await;
            }
            tokio::time::sleep(wait).await;
            Some((Ok::<_, std::convert::Infallible>(Bytes::from(vec![b' '; size])), nth + 1))
        }))
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_keeps_its_minimum_rate() {
        let callers = UnknownCallers::new(16, 1 << 20);
        let begin = Instant::now();
        let second = Duration::from_secs(1);
        let slow = read_body(stalling_body(1000, 1, second), 5000, TIME, &mut callers.admit(HERE)).await;
        assert_eq!((slow, begin.elapsed()), (Err(BodyError::TooSlow), GRACE));
        let begin = Instant::now();
        let quick =
            read_body(stalling_body(100, 2048, second), 1 << 20, TIME, &mut callers.admit(HERE)).await;
        assert_eq!((quick, begin.elapsed()), (Err(BodyError::TooSlow), TIME), "the time of all bodies");
        let whole = Body::from_stream(stream::iter(["ab", "cd", "e"].map(Ok::<_, std::convert::Infallible>)));
        let read = read_body(whole, 5, TIME, &mut callers.admit(HERE)).await;
        assert_eq!(read.as_deref(), Ok(b"abcde".as_slice()));
        let read = read_body(Body::from("abcdef"), 5, TIME, &mut callers.admit(HERE)).await;
        assert_eq!(read, Err(BodyError::TooLarge));
        assert_eq!(callers.total_bytes.load(Ordering::Relaxed), 0, "all bytes are released");
    }

    #[tokio::test(start_paused = true)]
    async fn a_peers_oldest_unknown_request_is_evicted_and_other_peers_stay() {
        let callers = UnknownCallers::new(128, 1 << 20);
        let silent = || Body::from_stream(stream::pending::<Result<Bytes, std::convert::Infallible>>());
        let mut honest = callers.admit(other(1));
        let mut held: Vec<_> = (0..17).map(|_| callers.admit(HERE)).collect();
        let read = read_body(silent(), 10, TIME, &mut held[0]).await;
        assert_eq!(read, Err(BodyError::Evicted), "the first of 17");
        assert_eq!(read_body(silent(), 10, TIME, &mut held[1]).await, Err(BodyError::TooSlow));
        let read = read_body(Body::from("x"), 10, TIME, &mut honest).await;
        assert_eq!(read.as_deref(), Ok(b"x".as_slice()));
    }

    #[test]
    fn exhausted_memory_evicts_the_largest_unknown_body() {
        let callers = UnknownCallers::new(128, 1000);
        let mut honest = callers.admit(other(1));
        let mut large = callers.admit(HERE);
        assert!(large.add(450).is_ok() && honest.add(10).is_ok());
        let mut small = callers.admit(HERE);
        assert!(small.add(100).is_ok(), "another of the same peer");
        assert!(large.add(1).is_err(), "the large request was evicted");
        let mut huge = callers.admit(HERE);
        assert!(huge.add(501).is_err(), "more than a peer's share");
        let mut many: Vec<_> = (2..5).map(|last| callers.admit(other(last))).collect();
        assert!(many.iter_mut().all(|one| one.add(400).is_ok()), "the heaviest peer pays");
        assert!(honest.add(10).is_ok() && small.add(10).is_ok());
        drop((honest, large, small, huge, many));
        assert_eq!((callers.total_bytes.load(Ordering::Relaxed), callers.state().len()), (0, 0));
    }

    #[test]
    fn a_known_callers_body_is_charged_to_its_credential() {
        let budget = Budget::new(LimitedResource::KnownCallers, 4, 100);
        let app = CredentialKey::new(CredentialScope::Clients, "app");
        let body = |length| Bytes::from(vec![0; length]);
        let over = readmit(&budget, (app, CredentialLimits::default()), &body(51)).err();
        assert_eq!(over, Some(LimitedResource::CredentialShare), "more than half");
        assert_eq!(
            readmit(&budget, (app, CredentialLimits::default()), &body(101)).err(),
            Some(LimitedResource::BodyMemory)
        );
        let mut held =
            readmit(&budget, (app, CredentialLimits::default()), &body(50)).expect("half of the memory");
        assert_eq!(held.add(1), Err(BodyError::Exhausted(LimitedResource::CredentialShare)));
        let single = admit_known(&budget, None).expect("a permit").add(50);
        assert_eq!(single, Ok(()), "no share where the listener has a single credential");
    }
}
