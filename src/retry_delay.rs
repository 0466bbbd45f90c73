//! Retry delays: growth by a factor, a cap and jitter. Pure: the caller counts, waits and supplies chance.

use std::time::Duration;

/// Delays between attempts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RetryDelay {
    first: Duration,
    max: Duration,
    factor: u32,
    /// Share of a delay that chance may remove.
    jitter: f64,
}

impl RetryDelay {
    /// Each delay is twice the previous one, up to `max`.
    pub const fn doubling(first: Duration, max: Duration) -> RetryDelay {
        RetryDelay { first, max, factor: 2, jitter: 0.0 }
    }

    pub const fn with_factor(self, factor: u32) -> RetryDelay {
        RetryDelay { factor, ..self }
    }

    /// `share`: 0 to 1.
    pub const fn with_jitter(self, share: f64) -> RetryDelay {
        RetryDelay { jitter: share, ..self }
    }

    pub const fn first(self) -> Duration {
        self.first
    }

    pub const fn max(self) -> Duration {
        self.max
    }

    /// The delay after `failures` attempts that failed, at least one.
    pub fn after(self, failures: u32) -> Duration {
        self.first.saturating_mul(self.factor.saturating_pow(failures.saturating_sub(1))).min(self.max)
    }

    /// The delay that follows `previous`.
    pub fn next(self, previous: Duration) -> Duration {
        previous.saturating_mul(self.factor).clamp(self.first, self.max)
    }

    /// A delay with jitter, so that many clients do not retry at once. `chance`: 0 to 1.
    pub fn jittered(self, delay: Duration, chance: f64) -> Duration {
        delay.mul_f64(1.0 - self.jitter + self.jitter * chance.clamp(0.0, 1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_grow_up_to_their_cap() {
        let secs = Duration::from_secs;
        let policy = RetryDelay::doubling(secs(1), secs(300));
        let delays = [1, 2, 3, 9, 10, u32::MAX].map(|failures| policy.after(failures));
        assert_eq!(delays, [secs(1), secs(2), secs(4), secs(256), secs(300), secs(300)]);
        assert_eq!(
            [Duration::ZERO, secs(1), secs(200)].map(|delay| policy.next(delay)),
            [1, 2, 300].map(secs)
        );
        assert_eq!(policy.with_factor(4).after(3), secs(16));
        assert_eq!(RetryDelay::doubling(secs(u64::MAX), secs(5)).after(7), secs(5));
    }

    #[test]
    fn jitter_only_shortens_a_delay() {
        let policy = RetryDelay::doubling(Duration::from_secs(1), Duration::from_secs(2)).with_jitter(0.2);
        let jittered = [0.0, 1.0, 7.0].map(|chance| policy.jittered(Duration::from_secs(10), chance));
        assert_eq!(jittered, [8, 10, 10].map(Duration::from_secs));
    }
}
