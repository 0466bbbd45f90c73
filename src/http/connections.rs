//! Listener connections: limits, authentication state, and eviction when the listener is full.
//!
//! A connection is unauthenticated until a request on it shows valid credentials. Unauthenticated connections are
//! limited per peer, and a new one evicts the oldest silent one; a known caller's connection is never evicted. A peer
//! that opens thousands of silent connections therefore loses only its own.
//!
//! A new connection is accepted even when its peer has used its share, because it may carry the credentials of another
//! caller at the same address. It gets the time to send a header, and only that header decides.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use axum::http::Extensions;
use tokio::sync::Notify;

use super::logins::{LoginFailureAction, Logins};
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

/// All connections of one listener.
pub struct Connections {
    most: usize,
    most_per_peer: usize,
    table: Mutex<ConnectionTable>,
    evicted: AtomicU64,
    pub(super) overload: Overload,
    logins: Logins,
}

#[derive(Default)]
struct ConnectionTable {
    unknown: Peers,
    known: usize,
}

impl Connections {
    pub fn new(most: usize) -> Arc<Connections> {
        Arc::new(Connections {
            most,
            most_per_peer: (most / PEER_SHARE).max(MIN_PER_PEER).min(most),
            table: Mutex::default(),
            evicted: AtomicU64::new(0),
            overload: Overload::default(),
            logins: Logins::default(),
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
        if table.unknown.len() + table.known >= self.most && !self.evict_fullest(&mut table) {
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

    /// Metrics of the listener in the Prometheus text format.
    pub fn metrics_text(&self) -> String {
        let (known, unknown) = {
            let table = self.table();
            (table.known, table.unknown.len())
        };
        let mut page = MetricsText::default();
        let help = "Open connections by whether their caller is known.";
        page.head("abide_connections", "gauge", help);
        for (caller, many) in [("known", known), ("unknown", unknown)] {
            page.line("abide_connections", &[("caller", caller)], many);
        }
        let evicted = self.evicted.load(Ordering::Relaxed);
        let help = "Unauthenticated connections closed to make room for others.";
        page.single("abide_connections_evicted_total", "counter", help, evicted);
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
    Known,
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
        let Slot::Unknown(position) = *slot else { return };
        let mut table = self.0.listener.table();
        // An evicted connection has no entry: its task is about to end.
        if table.unknown.remove(self.0.key, position).is_some() {
            *slot = Slot::Unknown(table.unknown.insert(self.0.key, stage, 0, Arc::clone(&self.0.evicted)));
        }
    }

    #[cfg(test)]
    fn is_known(&self) -> bool {
        matches!(*self.slot(), Slot::Known)
    }

    fn credential_check(&self) -> MutexGuard<'_, Option<CredentialCheck>> {
        self.0.credential_check.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Records valid credentials: the connection stops counting as unauthenticated while the credential is valid and
    /// each request shows it.
    pub fn authenticated(&self, in_force: CredentialCheck) {
        *self.credential_check() = Some(in_force);
        let mut slot = self.slot();
        let Slot::Unknown(position) = *slot else { return };
        let mut table = self.0.listener.table();
        if table.unknown.remove(self.0.key, position).is_some() {
            table.known += 1;
            *slot = Slot::Known;
        }
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
        if matches!(*slot, Slot::Known) {
            let mut table = self.0.listener.table();
            table.known -= 1;
            *slot =
                Slot::Unknown(table.unknown.insert(self.0.key, Stage::Busy, 0, Arc::clone(&self.0.evicted)));
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
            Slot::Known => table.known -= 1,
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
    use super::*;

    fn peer(last: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, last], 1000))
    }

    async fn is_evicted(connection: &Connection) -> bool {
        tokio::time::timeout(Duration::ZERO, connection.evicted()).await.is_ok()
    }

    #[tokio::test]
    async fn a_full_listener_evicts_the_fullest_peers_oldest_and_never_a_known_caller() {
        let listener = Connections::new(4);
        let known = listener.admit(peer(1)).expect("room");
        known.authenticated(Box::new(|| true));
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
        held.iter().for_each(|one| one.authenticated(Box::new(|| true)));
        assert!(listener.admit(peer(2)).is_none());
        assert_eq!(listener.overload.exhausted(), Some(LimitedResource::Connections));
        held[0].demote();
        assert!(listener.admit(peer(2)).is_some(), "a caller whose credentials failed makes room");
        drop(held);
        assert_eq!(listener.table().known, 0);
        assert_eq!(listener.table().unknown.len(), 0);
    }

    #[tokio::test]
    async fn a_connection_is_known_while_its_credential_is_in_force() {
        let listener = Connections::new(2);
        let connection = listener.admit(peer(1)).expect("room");
        let valid = Arc::new(AtomicBool::new(true));
        let shared = Arc::clone(&valid);
        connection.authenticated(Box::new(move || shared.load(Ordering::Relaxed)));
        drop(connection.begin_request());
        assert!(connection.is_known());
        valid.store(false, Ordering::Relaxed);
        drop(connection.begin_request());
        assert!(!connection.is_known(), "its credential was replaced");
        connection.authenticated(Box::new(|| true));
        assert!(connection.is_known());
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
