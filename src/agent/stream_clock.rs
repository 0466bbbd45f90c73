//! Age of stream messages: the delay between gateway and agent, without a wall clock.
//!
//! The gateway stamps a message with the time since it opened the stream, and the agent compares with the time since it
//! requested the stream. Both clocks are monotonic and count suspend. They drift apart on a stream that stays open for
//! days, so the message with the smallest delay so far sets the base, and the base follows drift up to 500 ppm.

use crate::clock::BootInstant;

/// Maximum drift that is followed: 1 ms per this many ms.
const DRIFT: u64 = 2_000;

pub struct StreamClock {
    opened: BootInstant,
    /// Smallest difference of the two clocks, and its time. Negative if the gateway's clock is faster.
    base_ms: i64,
    base_at: u64,
}

impl StreamClock {
    /// Must be called before the stream is requested, so that no delay is underestimated.
    pub fn start() -> StreamClock {
        StreamClock { opened: BootInstant::now(), base_ms: 0, base_at: 0 }
    }

    /// The age of a message that the gateway stamped with `sent_ms`.
    pub fn age_ms(&mut self, sent_ms: u64) -> u64 {
        self.age_at(self.opened.elapsed_ms(), sent_ms)
    }

    fn age_at(&mut self, now: u64, sent_ms: u64) -> u64 {
        let signed = |ms: u64| i64::try_from(ms).unwrap_or(i64::MAX);
        let differ = signed(now).saturating_sub(signed(sent_ms));
        let drift = signed(now.saturating_sub(self.base_at) / DRIFT);
        let base = self.base_ms.saturating_add(drift);
        if differ <= base {
            (self.base_ms, self.base_at) = (differ, now);
        }
        u64::try_from(differ.saturating_sub(base)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: u64 = 86_400_000;

    /// Heartbeats every 3 s for a week, with an agent clock that is `ppm` faster than the gateway's.
    fn after_a_week(ppm: i64) -> (StreamClock, u64) {
        let mut clock = StreamClock::start();
        let here = |there: u64| there.saturating_add_signed((there as i64) * ppm / 1_000_000);
        for there in (0..7 * DAY).step_by(3_000) {
            let age = clock.age_at(here(there) + 20, there);
            assert!(age <= 25, "{ppm} ppm: {age} ms after {there} ms");
        }
        (clock, here(7 * DAY))
    }

    #[test]
    fn drift_does_not_count_as_delay_and_does_not_hide_one() {
        for ppm in [-400, -100, 0, 100, 400] {
            let (mut clock, now) = after_a_week(ppm);
            let age = clock.age_at(now + 12_000, 7 * DAY);
            assert!((11_900..=12_100).contains(&age), "{ppm} ppm: {age}");
        }
    }

    #[test]
    fn a_message_that_waited_in_a_buffer_has_its_age() {
        let mut clock = StreamClock::start();
        assert_eq!(clock.age_at(30, 10), 20);
        assert_eq!(clock.age_at(10_030, 30), 10_000 - 5);
        assert_eq!(clock.age_at(10_040, 10_040), 0);
    }
}
