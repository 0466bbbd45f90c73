//! Per-peer queues of unauthenticated entries, bounded: a full queue evicts its own oldest entry.
//!
//! A peer is an IPv4 address or an IPv6 /64 network. Eviction starts with the fullest peer, so one peer's entries never
//! evict those of a peer with fewer.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;

/// The unit of limits and failure counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerKey(IpAddr);

impl std::fmt::Display for PeerKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl From<IpAddr> for PeerKey {
    fn from(address: IpAddr) -> PeerKey {
        PeerKey(match address.to_canonical() {
            IpAddr::V4(address) => IpAddr::V4(address),
            // A host chooses its addresses freely within its network.
            IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        })
    }
}

/// Eviction order: entries of the lower stage first, then by age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    pub stage: Stage,
    nth: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// No request yet, or the last request is answered.
    Silent,
    /// A request is in flight.
    Busy,
}

pub struct Entry {
    pub since: Instant,
    /// Received bytes held in memory.
    pub bytes: usize,
    pub evicted: Arc<Notify>,
}

/// Queues of entries by key: a peer, or a credential.
pub struct Peers<K = PeerKey> {
    entries: HashMap<K, BTreeMap<Position, Entry>>,
    count: usize,
    next: u64,
}

impl<K> Default for Peers<K> {
    fn default() -> Peers<K> {
        Peers { entries: HashMap::new(), count: 0, next: 0 }
    }
}

impl<K: Copy + Eq + Hash> Peers<K> {
    pub fn len(&self) -> usize {
        self.count
    }

    pub fn of(&self, peer: K) -> usize {
        self.entries.get(&peer).map_or(0, BTreeMap::len)
    }

    pub fn insert(&mut self, peer: K, stage: Stage, bytes: usize, evicted: Arc<Notify>) -> Position {
        self.next += 1;
        let position = Position { stage, nth: self.next };
        let entry = Entry { since: Instant::now(), bytes, evicted };
        self.entries.entry(peer).or_default().insert(position, entry);
        self.count += 1;
        position
    }

    pub fn remove(&mut self, peer: K, position: Position) -> Option<Entry> {
        let entries = self.entries.get_mut(&peer)?;
        let entry = entries.remove(&position)?;
        if entries.is_empty() {
            self.entries.remove(&peer);
        }
        self.count -= 1;
        Some(entry)
    }

    pub fn get_mut(&mut self, peer: K, position: Position) -> Option<&mut Entry> {
        self.entries.get_mut(&peer)?.get_mut(&position)
    }

    /// The entry of a peer that is evicted first.
    pub fn oldest(&self, peer: K) -> Option<(Position, &Entry)> {
        self.entries.get(&peer)?.first_key_value().map(|(position, entry)| (*position, entry))
    }

    /// The entry of a peer that is evicted first when up to `arriving` young silent entries have precedence over
    /// requests older than `settled`: a new connection can show its credentials even if requests in flight hold its
    /// peer's share.
    pub fn displaced(&self, peer: K, arriving: usize, settled: Duration) -> Option<(Position, &Entry)> {
        let entries = self.entries.get(&peer)?;
        let (first, entry) = entries.first_key_value()?;
        let silent = entries.keys().take_while(|position| position.stage == Stage::Silent);
        if entry.since.elapsed() < settled && silent.take(arriving + 1).count() <= arriving {
            let busy = entries.range(Position { stage: Stage::Busy, nth: 0 }..).next();
            if let Some((position, entry)) = busy.filter(|(_, entry)| entry.since.elapsed() >= settled) {
                return Some((*position, entry));
            }
        }
        Some((*first, entry))
    }

    /// The peer with the most entries; ties go to the peer whose entry is evicted first.
    pub fn fullest(&self) -> Option<K> {
        self.first_by(BTreeMap::len)
    }

    /// The peer whose entries hold the most bytes; ties go to the peer whose entry is evicted first.
    pub fn heaviest(&self) -> Option<K> {
        self.first_by(|entries| entries.values().map(|entry| entry.bytes).sum())
    }

    fn first_by(&self, weight: impl Fn(&BTreeMap<Position, Entry>) -> usize) -> Option<K> {
        let first = |entries: &BTreeMap<Position, Entry>| entries.keys().next().copied();
        let rank = |entries: &BTreeMap<Position, Entry>| (weight(entries), Reverse(first(entries)));
        self.entries.iter().max_by_key(|(_, entries)| rank(entries)).map(|(peer, _)| *peer)
    }

    pub fn bytes_of(&self, peer: K) -> usize {
        self.entries.get(&peer).map_or(0, |entries| entries.values().map(|entry| entry.bytes).sum())
    }

    /// The entry of a peer that holds the most bytes; ties go to the oldest.
    pub fn largest(&self, peer: K) -> Option<Position> {
        let entries = self.entries.get(&peer)?;
        entries
            .iter()
            .max_by_key(|(position, entry)| (entry.bytes, Reverse(**position)))
            .map(|(position, _)| *position)
    }

    /// Removes an entry and notifies its holder.
    pub fn evict(&mut self, peer: K, position: Position) -> Option<Entry> {
        let entry = self.remove(peer, position)?;
        entry.evicted.notify_one();
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> PeerKey {
        text.parse::<IpAddr>().expect("an address").into()
    }

    #[test]
    fn an_ipv6_network_is_one_peer_and_a_mapped_address_is_its_ipv4_peer() {
        assert_eq!(key("2001:db8::1"), key("2001:db8::ffff:2"));
        assert_ne!(key("2001:db8::1"), key("2001:db8:0:1::1"));
        assert_eq!(key("::ffff:10.0.0.1"), key("10.0.0.1"));
        assert_ne!(key("10.0.0.1"), key("10.0.0.2"));
    }

    #[test]
    fn the_fullest_peers_oldest_silent_entry_is_evicted_first() {
        let mut peers = Peers::default();
        let mut add = |peer: &str, stage, bytes| peers.insert(key(peer), stage, bytes, Arc::default());
        let honest = add("10.0.0.1", Stage::Silent, 1);
        let busy = add("10.0.0.2", Stage::Busy, 9);
        let silent = add("10.0.0.2", Stage::Silent, 5);
        assert_eq!((peers.len(), peers.fullest()), (3, Some(key("10.0.0.2"))));
        assert_eq!(peers.oldest(key("10.0.0.2")).map(|(position, _)| position), Some(silent));
        assert_eq!((peers.largest(key("10.0.0.2")), peers.heaviest()), (Some(busy), Some(key("10.0.0.2"))));
        assert!(
            peers.evict(key("10.0.0.2"), silent).is_some() && peers.evict(key("10.0.0.2"), silent).is_none()
        );
        assert_eq!(peers.fullest(), Some(key("10.0.0.1")), "of equals the oldest");
        assert!(peers.remove(key("10.0.0.1"), honest).is_some());
        assert_eq!((peers.of(key("10.0.0.1")), peers.len()), (0, 1));
    }
}
