//! Repeated events: whether an event had its audit entry recently, without a lock and without an allocation.
//!
//! An event has one slot, by a hash with random keys. A slot has the tag of the last event with an entry, and the time until
//! which it has no other. Two events of one slot replace each other: the buckets of the throttle decide then.

use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

const SLOTS: usize = 4096;

#[derive(Default)]
struct RepeatSlot {
    /// Upper half: tag of the event. Lower half: seconds since the start, until which the event is repeated.
    mark: AtomicU64,
    /// Repeated events since the last entry.
    suppressed: AtomicU64,
}

pub struct RepeatedEvents {
    keys: RandomState,
    start: Instant,
    slots: Box<[RepeatSlot]>,
}

impl Default for RepeatedEvents {
    fn default() -> RepeatedEvents {
        let slots = (0..SLOTS).map(|_| RepeatSlot::default()).collect();
        RepeatedEvents { keys: RandomState::new(), start: Instant::now(), slots }
    }
}

impl RepeatedEvents {
    /// The slot and the tag of an event.
    fn slot(&self, event: &impl Hash) -> Option<(&RepeatSlot, u64)> {
        let hash = self.keys.hash_one(event);
        let nth = usize::try_from(hash).unwrap_or(usize::MAX) % SLOTS;
        Some((self.slots.get(nth)?, hash >> 32))
    }

    fn seconds(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.start).as_secs().min(u64::from(u32::MAX))
    }

    /// Whether the event had its entry recently; counts it.
    pub fn is_repeated(&self, event: &impl Hash, now: Instant) -> bool {
        let Some((slot, tag)) = self.slot(event) else { return false };
        let mark = slot.mark.load(Ordering::Relaxed);
        let is_repeated = mark >> 32 == tag && self.seconds(now) < mark & u64::from(u32::MAX);
        if is_repeated {
            slot.suppressed.fetch_add(1, Ordering::Relaxed);
        }
        is_repeated
    }

    /// The number of repeated events since the last entry, which starts over.
    pub fn take_count(&self, event: &impl Hash) -> u64 {
        match self.slot(event) {
            Some((slot, tag)) if slot.mark.load(Ordering::Relaxed) >> 32 == tag => {
                slot.suppressed.swap(0, Ordering::Relaxed)
            }
            _ => 0,
        }
    }

    /// Remembers that the event has no other entry until a time. Another event of the slot loses its count.
    pub fn remember(&self, event: &impl Hash, until: Instant) {
        let Some((slot, tag)) = self.slot(event) else { return };
        let before = slot.mark.swap(tag << 32 | self.seconds(until), Ordering::Relaxed);
        if before >> 32 != tag {
            slot.suppressed.store(0, Ordering::Relaxed);
        }
    }
}
