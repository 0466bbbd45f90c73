//! Limits of audit entries that callers can cause without an effect: refusals, failed logins, repeated reads.
//!
//! A bucket holds some entries and refills over time. An event without a place is counted, and the next entry of its
//! bucket has the count. Callers without credentials share one bucket in addition: they cannot rotate the log away.
//! Events that are mostly repeated are found in [`RepeatedEvents`] first, without a lock.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::repeats::RepeatedEvents;

/// Maximum buckets in memory. A removed bucket starts over.
const MAX_BUCKETS: usize = 10_000;

/// Events that share a limit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ThrottledEvent {
    /// Wrong or no credentials, from one address.
    Unknown(IpAddr),
    /// The same from all addresses.
    AllUnknown,
    /// A refused call of an app or a person.
    Refused(String),
    /// A read of one kind by a caller from an address.
    Read(String, IpAddr, String),
    /// A call of an app or a person from an address.
    Login(String, IpAddr),
}

/// A read or a login, with borrowed names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RepeatedEvent<'a> {
    Read(&'a str, IpAddr, &'a str),
    Login(&'a str, IpAddr),
}

impl From<RepeatedEvent<'_>> for ThrottledEvent {
    fn from(event: RepeatedEvent<'_>) -> ThrottledEvent {
        match event {
            RepeatedEvent::Read(who, ip, what) => ThrottledEvent::Read(who.to_owned(), ip, what.to_owned()),
            RepeatedEvent::Login(who, ip) => ThrottledEvent::Login(who.to_owned(), ip),
        }
    }
}

impl ThrottledEvent {
    /// Entries at once, and the time after which one more is recorded.
    fn limit(&self) -> (u32, Duration) {
        match self {
            ThrottledEvent::Unknown(_) => (3, Duration::from_secs(5)),
            ThrottledEvent::AllUnknown => (60, Duration::from_secs(1)),
            ThrottledEvent::Refused(_) => (100, Duration::from_millis(100)),
            ThrottledEvent::Read(..) => (1, Duration::from_secs(600)),
            ThrottledEvent::Login(..) => (1, Duration::from_secs(3600)),
        }
    }
}

struct Bucket {
    left: u32,
    refilled: Instant,
    suppressed: u64,
}

impl Bucket {
    fn refill(&mut self, (most, interval): (u32, Duration), now: Instant) {
        let passed = now.duration_since(self.refilled).as_millis() / interval.as_millis().max(1);
        let passed = u32::try_from(passed).unwrap_or(u32::MAX);
        if passed > 0 {
            self.left = self.left.saturating_add(passed).min(most);
            self.refilled = match self.left == most {
                true => now,
                false => self.refilled + interval * passed,
            };
        }
    }
}

#[derive(Default)]
pub struct AuditThrottle {
    buckets: Mutex<HashMap<ThrottledEvent, Bucket>>,
    repeats: RepeatedEvents,
}

impl AuditThrottle {
    fn buckets(&self) -> MutexGuard<'_, HashMap<ThrottledEvent, Bucket>> {
        self.buckets.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Whether an event gets an entry: the number of similar events without one since the last.
    pub fn admit(&self, event: ThrottledEvent, now: Instant) -> Option<u64> {
        self.take(event, now).0
    }

    /// The same, for an event whose bucket holds one entry. A repeated event neither locks nor allocates.
    pub fn admit_repeated(&self, event: RepeatedEvent<'_>, now: Instant) -> Option<u64> {
        if self.repeats.is_repeated(&event, now) {
            return None;
        }
        let (admitted, refill) = self.take(event.into(), now);
        let before = admitted.map(|suppressed| suppressed + self.repeats.take_count(&event));
        self.repeats.remember(&event, refill);
        before
    }

    /// Whether the event had its entry recently; counts it.
    pub fn is_repeated(&self, event: RepeatedEvent<'_>, now: Instant) -> bool {
        self.repeats.is_repeated(&event, now)
    }

    /// Takes an entry from the bucket of an event. Also the time of the bucket's next refill.
    fn take(&self, event: ThrottledEvent, now: Instant) -> (Option<u64>, Instant) {
        let mut buckets = self.buckets();
        if buckets.len() >= MAX_BUCKETS && !buckets.contains_key(&event) {
            make_space(&mut buckets, now);
        }
        let limit = event.limit();
        let bucket = buckets.entry(event).or_insert(Bucket { left: limit.0, refilled: now, suppressed: 0 });
        bucket.refill(limit, now);
        let admitted = match bucket.left.checked_sub(1) {
            Some(left) => {
                bucket.left = left;
                Some(std::mem::take(&mut bucket.suppressed))
            }
            None => {
                bucket.suppressed += 1;
                None
            }
        };
        (admitted, bucket.refilled + limit.1)
    }
}

/// Removes full buckets, or all if none is full.
fn make_space(buckets: &mut HashMap<ThrottledEvent, Bucket>, now: Instant) {
    buckets.retain(|event, bucket| {
        let limit = event.limit();
        bucket.refill(limit, now);
        bucket.left < limit.0 || *event == ThrottledEvent::AllUnknown
    });
    if buckets.len() >= MAX_BUCKETS {
        buckets.retain(|event, _| *event == ThrottledEvent::AllUnknown);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_events_are_counted_and_the_next_entry_has_the_count() {
        let (throttle, begin) = (AuditThrottle::default(), Instant::now());
        let peer = |n: u32| ThrottledEvent::Unknown(IpAddr::from(n.to_be_bytes()));
        let admitted: Vec<_> = (0..5).map(|_| throttle.admit(peer(1), begin)).collect();
        assert_eq!(admitted, [Some(0), Some(0), Some(0), None, None]);
        assert_eq!(throttle.admit(peer(2), begin), Some(0), "another address");
        let later = begin + Duration::from_secs(6);
        assert_eq!((throttle.admit(peer(1), later), throttle.admit(peer(1), later)), (Some(2), None));
    }

    #[test]
    fn repeated_logins_take_no_bucket_and_the_next_entry_has_their_number() {
        let (throttle, begin) = (AuditThrottle::default(), Instant::now());
        let ann = RepeatedEvent::Login("person:ann", IpAddr::from([10, 0, 0, 1]));
        assert!(!throttle.is_repeated(ann, begin));
        assert_eq!(throttle.admit_repeated(ann, begin), Some(0));
        throttle.buckets().clear();
        assert!(throttle.is_repeated(ann, begin + Duration::from_secs(5)));
        assert_eq!(throttle.admit_repeated(ann, begin + Duration::from_secs(3598)), None);
        assert!(throttle.buckets().is_empty(), "no bucket is read");
        for other in [
            RepeatedEvent::Login("ann", IpAddr::from([10, 0, 0, 1])),
            RepeatedEvent::Login("person:ann", IpAddr::from([10, 0, 0, 2])),
            RepeatedEvent::Read("person:ann", IpAddr::from([10, 0, 0, 1]), "journal/"),
        ] {
            assert_eq!(throttle.admit_repeated(other, begin), Some(0), "{other:?}");
        }
        assert_eq!(throttle.admit_repeated(ann, begin + Duration::from_secs(3601)), Some(2));
    }

    #[test]
    fn many_logins_share_slots_and_each_gets_one_entry() {
        let (throttle, now) = (AuditThrottle::default(), Instant::now());
        let names: Vec<String> = (0..9_000).map(|n| format!("app-{n}")).collect();
        let login = |name: &String| {
            throttle.admit_repeated(RepeatedEvent::Login(name, IpAddr::from([10, 0, 0, 1])), now)
        };
        assert_eq!(names.iter().filter_map(login).count(), 9_000);
        assert_eq!(names.iter().filter_map(login).count(), 0, "an evicted slot is no new login");
    }

    #[test]
    fn many_addresses_neither_fill_the_memory_nor_reset_the_limit_of_all() {
        let (throttle, now) = (AuditThrottle::default(), Instant::now());
        let mut all = 0;
        for n in 0..30_000u32 {
            throttle.admit(ThrottledEvent::Unknown(IpAddr::from(n.to_be_bytes())), now);
            all += usize::from(throttle.admit(ThrottledEvent::AllUnknown, now).is_some());
        }
        assert_eq!(all, 60);
        assert!(throttle.buckets().len() <= MAX_BUCKETS + 1);
    }
}
