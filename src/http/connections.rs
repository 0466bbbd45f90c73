//! Listener connections: limits, authentication state, and eviction when the listener is full.
//!
//! A connection is unauthenticated until a request on it shows valid credentials. Unauthenticated connections are
//! limited per peer, and a new one evicts the oldest silent one. A peer that opens thousands of silent connections
//! therefore loses only its own; it never evicts a known caller's connection.
//!
//! The connections of known callers are limited per credential. Beyond its share, a credential's new connection evicts
//! its oldest silent one, and is refused if all have a request in flight. A part of all connections is reserved for new
//! callers, which includes health checks. When known callers hold all others, a new one evicts a connection of the
//! credential with the most, so one app or one stolen token cannot lock out the others.
//!
//! A new connection is accepted even when its peer has used its share, because it may carry the credentials of another
//! caller at the same address. It gets the time to send a header, and only that header decides.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::http::Extensions;
use tokio::sync::Notify;

use super::credential_key::{CredentialKey, ShareExceeded};
use super::failed_logins::{FailedLogins, LoginFailureAction};
use super::overload::{LimitedResource, Overload};
use super::peers::{Entry, PeerKey, Peers, Position, Stage};
use crate::metrics::MetricsText;

/// Age from which a silent connection may be evicted by its peer's next one. Younger ones are a burst, and stay while
/// the listener has room.
const EVICTABLE_AGE: Duration = Duration::from_secs(1);
/// Share of the unauthenticated connections available to one peer.
const PEER_SHARE: usize = 8;
/// Minimum connections of a peer, regardless of its share.
const MIN_PER_PEER: usize = 64;
/// Part of a peer's share reserved for new connections that have not sent their first header.
const ARRIVING_SHARE: usize = 4;

/// Part of all connections that known callers do not get: it is for new callers and health checks.
const RESERVED_SHARE: usize = 16;

/// All connections of one listener.
pub struct Connections {
    most: usize,
    most_per_peer: usize,
    table: Mutex<ConnectionTable>,
    evicted: AtomicU64,
    /// Requests refused because their credential has its full share.
    over_share: AtomicU64,
    pub(super) overload: Overload,
    logins: FailedLogins,
}

#[derive(Default)]
struct ConnectionTable {
    unknown: Peers,
    known: Peers<CredentialKey>,
}

impl Connections {
    pub fn new(most: usize) -> Arc<Connections> {
        Arc::new(Connections {
            most,
            most_per_peer: (most / PEER_SHARE).max(MIN_PER_PEER).min(most),
            table: Mutex::default(),
            evicted: AtomicU64::new(0),
            over_share: AtomicU64::new(0),
            overload: Overload::default(),
            logins: FailedLogins::default(),
        })
    }

    fn table(&self) -> MutexGuard<'_, ConnectionTable> {
        self.table.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Admits a connection, and evicts an unauthenticated one if necessary. `None`: known callers hold all connections.
    pub(super) fn admit(self: &Arc<Connections>, peer: SocketAddr) -> Option<Connection> {
        let key = PeerKey::from(peer.ip());
        let mut table = self.table();
        while table.unknown.of(key) >= self.most_per_peer {
            match self.displaced(&table, key) {
                Some((position, entry)) if entry.since.elapsed() >= EVICTABLE_AGE => {
                    self.evict(&mut table, key, position);
                }
                _ => break,
            }
        }
        if table.unknown.len() + table.known.len() >= self.most && !self.evict_fullest(&mut table) {
            drop(table);
            self.overload.refused(LimitedResource::Connections);
            return None;
        }
        let evicted: Arc<Notify> = Arc::default();
        let position = table.unknown.insert(key, Stage::Silent, 0, Arc::clone(&evicted));
        drop(table);
        let slot = Mutex::new(Slot::Unknown(position));
        let held = ConnectionState {
            listener: Arc::clone(self),
            peer,
            key,
            slot,
            credential_check: Mutex::default(),
            evicted,
            begun: AtomicBool::new(false),
        };
        Some(Connection(Arc::new(held)))
    }

    /// Evicts one unauthenticated connection to free a descriptor. `false`: none exists.
    pub(super) fn evict_one(&self) -> bool {
        let mut table = self.table();
        self.evict_fullest(&mut table)
    }

    fn evict_fullest(&self, table: &mut ConnectionTable) -> bool {
        let Some(peer) = table.unknown.fullest() else { return false };
        let Some((position, _)) = self.displaced(table, peer) else { return false };
        self.evict(table, peer, position);
        true
    }

    fn displaced<'a>(&self, table: &'a ConnectionTable, peer: PeerKey) -> Option<(Position, &'a Entry)> {
        table.unknown.displaced(peer, self.most_per_peer / ARRIVING_SHARE, EVICTABLE_AGE)
    }

    fn evict(&self, table: &mut ConnectionTable, peer: PeerKey, position: Position) {
        if table.unknown.evict(peer, position).is_some() {
            self.evicted.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Maximum connections of all known callers.
    fn most_known(&self) -> usize {
        self.most - self.most / RESERVED_SHARE
    }

    fn most_of(&self, credential: CredentialKey) -> usize {
        credential.share(self.most).min(self.most_known())
    }

    /// Makes room for one more connection of a credential.
    fn make_room(&self, table: &mut ConnectionTable, credential: CredentialKey) -> Result<(), ShareExceeded> {
        let own = table.known.of(credential);
        if own < self.most_of(credential) && table.known.len() < self.most_known() {
            return Ok(());
        }
        let fullest = table.known.fullest().filter(|fullest| {
            // Requests in flight end only for a credential that has far less.
            own < self.most_of(credential) && table.known.of(*fullest) > 2 * own + 1
        });
        let victim =
            match fullest.and_then(|fullest| table.known.oldest(fullest).map(|(at, _)| (fullest, at))) {
                Some(victim) => Some(victim),
                None => table.known.oldest(credential).map(|(position, _)| (credential, position)),
            };
        let victim = victim.filter(|(key, position)| *key != credential || position.stage == Stage::Silent);
        let Some((key, position)) = victim else { return Err(ShareExceeded) };
        if table.known.evict(key, position).is_some() {
            self.evicted.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Metrics of the listener in the Prometheus text format.
    pub fn metrics_text(&self) -> String {
        let (known, unknown) = {
            let table = self.table();
            (table.known.len(), table.unknown.len())
        };
        let mut page = MetricsText::default();
        let help = "Open connections by whether their caller is known.";
        page.head("abide_connections", "gauge", help);
        for (caller, many) in [("known", known), ("unknown", unknown)] {
            page.line("abide_connections", &[("caller", caller)], many);
        }
        let evicted = self.evicted.load(Ordering::Relaxed);
        let help = "Connections closed to make room for others.";
        page.single("abide_connections_evicted_total", "counter", help, evicted);
        let over_share = self.over_share.load(Ordering::Relaxed);
        let help = "Requests refused because their credential has its full share of connections.";
        page.single("abide_connections_over_share_total", "counter", help, over_share);
        let help = "Connections and requests refused, by the exhausted resource.";
        page.head("abide_refused_total", "counter", help);
        for (resource, n) in self.overload.counts() {
            page.line("abide_refused_total", &[("resource", resource)], n);
        }
        let help = "Requests with wrong credentials.";
        page.single("abide_logins_failed_total", "counter", help, self.logins.failures());
        page.into_text()
    }
}

/// Returns whether a credential is still valid.
pub type CredentialCheck = Box<dyn Fn() -> bool + Send + Sync>;

/// One connection: every request carries a handle to it.
#[derive(Clone)]
pub struct Connection(Arc<ConnectionState>);

struct ConnectionState {
    listener: Arc<Connections>,
    peer: SocketAddr,
    key: PeerKey,
    slot: Mutex<Slot>,
    /// Check of the credential that authenticated the connection.
    credential_check: Mutex<Option<CredentialCheck>>,
    evicted: Arc<Notify>,
    /// A whole header has arrived.
    begun: AtomicBool,
}

#[derive(Clone, Copy)]
enum Slot {
    Unknown(Position),
    Known(CredentialKey, Position),
}

impl Connection {
    /// The connection that a request came on.
    pub fn of(extensions: &Extensions) -> Option<&Connection> {
        extensions.get::<Connection>()
    }

    pub fn peer(&self) -> SocketAddr {
        self.0.peer
    }

    pub fn listener(&self) -> &Connections {
        &self.0.listener
    }

    pub(super) async fn evicted(&self) {
        self.0.evicted.notified().await;
    }

    pub(super) fn has_begun(&self) -> bool {
        self.0.begun.load(Ordering::Relaxed)
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.0.slot.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Marks a request as in flight until the guard is dropped.
    pub(super) fn begin_request(&self) -> RequestGuard {
        self.0.begun.store(true, Ordering::Relaxed);
        // Checked for health checks too: they need no credentials and would keep the connection open.
        if self.credential_check().as_ref().is_some_and(|in_force| !in_force()) {
            self.demote();
        }
        self.move_to(Stage::Busy);
        RequestGuard(self.clone())
    }

    fn move_to(&self, stage: Stage) {
        let mut slot = self.slot();
        let mut table = self.0.listener.table();
        let evicted = || Arc::clone(&self.0.evicted);
        // An evicted connection has no entry: its task is about to end.
        match *slot {
            Slot::Unknown(position) => {
                if table.unknown.remove(self.0.key, position).is_some() {
                    *slot = Slot::Unknown(table.unknown.insert(self.0.key, stage, 0, evicted()));
                }
            }
            Slot::Known(credential, position) => {
                if table.known.remove(credential, position).is_some() {
                    *slot = Slot::Known(credential, table.known.insert(credential, stage, 0, evicted()));
                }
            }
        }
    }

    #[cfg(test)]
    fn is_known(&self) -> bool {
        matches!(*self.slot(), Slot::Known(..))
    }

    fn credential_check(&self) -> MutexGuard<'_, Option<CredentialCheck>> {
        self.0.credential_check.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Records valid credentials: the connection counts for its credential while that is valid and each request shows
    /// it. An error: the credential has its full share, and the request must be refused.
    pub fn authenticated(
        &self,
        credential: CredentialKey,
        in_force: CredentialCheck,
    ) -> Result<(), ShareExceeded> {
        let mut slot = self.slot();
        if !matches!(*slot, Slot::Known(current, _) if current == credential) {
            let mut table = self.0.listener.table();
            if let Err(exceeded) = self.0.listener.make_room(&mut table, credential) {
                drop((table, slot));
                self.demote();
                self.0.listener.over_share.fetch_add(1, Ordering::Relaxed);
                return Err(exceeded);
            }
            let entry = match *slot {
                Slot::Unknown(position) => table.unknown.remove(self.0.key, position),
                Slot::Known(former, position) => table.known.remove(former, position),
            };
            if entry.is_some() {
                let position = table.known.insert(credential, Stage::Busy, 0, Arc::clone(&self.0.evicted));
                *slot = Slot::Known(credential, position);
            }
        }
        drop(slot);
        *self.credential_check() = Some(in_force);
        Ok(())
    }

    /// Records wrong credentials: logs the failure, marks the connection as unauthenticated, and waits for the delay
    /// of the peer's failures. `who` is the claimed name, never the secret.
    pub async fn login_failed(&self, who: &str) -> LoginFailureAction {
        self.demote();
        self.0.listener.logins.failed(self.0.peer, self.0.key, who).await
    }

    /// Marks the connection as unauthenticated: a request ended without valid credentials.
    pub fn demote(&self) {
        let mut slot = self.slot();
        if let Slot::Known(credential, position) = *slot {
            let mut table = self.0.listener.table();
            if table.known.remove(credential, position).is_some() {
                let evicted = Arc::clone(&self.0.evicted);
                *slot = Slot::Unknown(table.unknown.insert(self.0.key, Stage::Busy, 0, evicted));
            }
        }
    }

    /// Counts a request refused because a resource is exhausted.
    pub fn refused(&self, resource: LimitedResource) {
        self.0.listener.overload.refused(resource);
    }

    /// The resource whose exhaustion currently causes refusals.
    pub fn exhausted(&self) -> Option<LimitedResource> {
        self.0.listener.overload.exhausted()
    }
}

impl Drop for ConnectionState {
    fn drop(&mut self) {
        let slot = *self.slot.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut table = self.listener.table();
        match slot {
            Slot::Known(credential, position) => drop(table.known.remove(credential, position)),
            Slot::Unknown(position) => drop(table.unknown.remove(self.key, position)),
        }
    }
}

/// A request in flight, until its response is sent or dropped.
pub(super) struct RequestGuard(Connection);

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.move_to(Stage::Silent);
    }
}

#[cfg(test)]
mod tests {
    use super::super::credential_key::CredentialScope;
    use super::*;

    fn peer(last: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, last], 1000))
    }

    fn app(name: &str) -> CredentialKey {
        CredentialKey::new(CredentialScope::Clients, name)
    }

    fn prove(connection: &Connection, name: &str) {
        connection.authenticated(app(name), Box::new(|| true)).expect("room");
    }

    async fn is_evicted(connection: &Connection) -> bool {
        tokio::time::timeout(Duration::ZERO, connection.evicted()).await.is_ok()
    }

    #[tokio::test]
    async fn a_full_listener_evicts_the_fullest_peers_oldest_and_never_a_known_caller() {
        let listener = Connections::new(4);
        let known = listener.admit(peer(1)).expect("room");
        prove(&known, "a");
        let honest = listener.admit(peer(2)).expect("room");
        let silent: Vec<_> = (0..5).map(|_| listener.admit(peer(3)).expect("one goes")).collect();
        for (nth, connection) in silent.iter().enumerate() {
            assert_eq!(is_evicted(connection).await, nth < 3, "{nth}");
        }
        assert!(!is_evicted(&honest).await && !is_evicted(&known).await);
        assert_eq!(listener.overload.exhausted(), None, "no caller was refused");
        let text = listener.metrics_text();
        assert!(text.contains("abide_connections_evicted_total 3\n"), "{text}");
        assert!(text.contains("abide_connections{caller=\"known\"} 1\n"), "{text}");
    }

    #[tokio::test]
    async fn when_known_callers_have_all_connections_a_new_one_is_refused_and_that_shows() {
        let listener = Connections::new(2);
        let held: Vec<_> = (0..2).map(|_| listener.admit(peer(1)).expect("room")).collect();
        held.iter().for_each(|one| prove(one, "a"));
        assert!(listener.admit(peer(2)).is_none());
        assert_eq!(listener.overload.exhausted(), Some(LimitedResource::Connections));
        held[0].demote();
        assert!(listener.admit(peer(2)).is_some(), "a caller whose credentials failed makes room");
        drop(held);
        assert_eq!(listener.table().known.len(), 0);
        assert_eq!(listener.table().unknown.len(), 0);
    }

    #[tokio::test]
    async fn a_connection_is_known_while_its_credential_is_in_force() {
        let listener = Connections::new(2);
        let connection = listener.admit(peer(1)).expect("room");
        let valid = Arc::new(AtomicBool::new(true));
        let shared = Arc::clone(&valid);
        let check = Box::new(move || shared.load(Ordering::Relaxed));
        connection.authenticated(app("a"), check).expect("room");
        drop(connection.begin_request());
        assert!(connection.is_known());
        valid.store(false, Ordering::Relaxed);
        drop(connection.begin_request());
        assert!(!connection.is_known(), "its credential was replaced");
        prove(&connection, "a");
        assert!(connection.is_known());
    }

    #[tokio::test]
    async fn one_credential_cannot_hold_the_connections_of_others() {
        let listener = Connections::new(160);
        let open = |name: &str| {
            let connection = listener.admit(peer(1)).expect("the reserve has room");
            let request = connection.begin_request();
            connection.authenticated(app(name), Box::new(|| true)).map(|()| (connection, request))
        };
        // Two apps with requests in flight: each gets its share, and both leave the reserve.
        let mut busy: Vec<_> = (0..80).map(|_| open("a").expect("its share")).collect();
        assert_eq!(open("a").err(), Some(ShareExceeded));
        busy.extend((0..70).map(|_| open("b").expect("its share")));
        assert_eq!(open("b").err(), Some(ShareExceeded), "the reserve is for new callers");
        assert!(listener.metrics_text().contains("abide_connections_over_share_total 2\n"));
        assert_eq!(
            listener.overload.exhausted(),
            None,
            "a caller beyond its share does not make the gateway unready"
        );
        // Another caller gets a connection of the fullest.
        let other = open("c").expect("room");
        assert!(
            is_evicted(&busy[0].0).await && !is_evicted(&busy[80].0).await && !is_evicted(&other.0).await
        );
        // Silent connections of a credential make room for its own.
        drop(busy.remove(1).1);
        let (host, one) =
            (CredentialKey::new(CredentialScope::OneHost, "t"), listener.admit(peer(2)).expect("room"));
        assert_eq!(listener.most_of(host), 64);
        one.authenticated(host, Box::new(|| true)).expect("room");
        assert!(listener.admit(peer(3)).is_some(), "health checks always have room");
    }

    #[tokio::test]
    async fn silent_connections_go_before_those_with_a_request() {
        let listener = Connections::new(2);
        let busy = listener.admit(peer(1)).expect("room");
        let request = busy.begin_request();
        let silent = listener.admit(peer(1)).expect("room");
        let _third = listener.admit(peer(1)).expect("one goes");
        assert!(is_evicted(&silent).await && !is_evicted(&busy).await);
        drop(request);
        let _fourth = listener.admit(peer(1)).expect("one goes");
        assert!(!is_evicted(&busy).await, "it was the last to speak");
    }

    #[tokio::test]
    async fn a_new_connection_has_time_for_its_header_though_requests_hold_its_peers_share() {
        let listener = Connections::new(MIN_PER_PEER);
        let busy: Vec<_> = (0..MIN_PER_PEER).map(|_| listener.admit(peer(1)).expect("room")).collect();
        let requests: Vec<_> = busy.iter().map(Connection::begin_request).collect();
        std::thread::sleep(EVICTABLE_AGE);
        let honest = listener.admit(peer(1)).expect("one goes");
        let arriving = MIN_PER_PEER / ARRIVING_SHARE;
        let mut more: Vec<_> = (1..arriving).map(|_| listener.admit(peer(1)).expect("one goes")).collect();
        assert!(!is_evicted(&honest).await, "old requests make room");
        for (nth, connection) in busy.iter().enumerate() {
            assert_eq!(is_evicted(connection).await, nth < arriving, "{nth}");
        }
        more.push(listener.admit(peer(1)).expect("one goes"));
        more.push(listener.admit(peer(1)).expect("one goes"));
        assert!(is_evicted(&honest).await, "silent connections do not displace all requests");
        drop((requests, more));
    }
}
