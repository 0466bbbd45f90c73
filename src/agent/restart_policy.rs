//! When a guarded process that ended is launched again: pure, with time as a value.
//!
//! At once the first time, then `start_interval` apart up to `start_retries` times; then it has failed, which is told, and
//! is tried at intervals that double, up to five minutes. One that stayed up long enough begins anew. So a program that is
//! missing cannot spin, and one that crashes now and then is back at once.

/// How patient a process is treated, from its spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestartPolicy {
    pub retries: u32,
    pub interval_ms: i64,
    /// Having stayed up for this long, it is taken to be well.
    pub settled_ms: i64,
}

/// The longest wait between two tries.
pub const MAX_BACKOFF_MS: i64 = 300_000;

/// Where a guarded process stands in its series of tries. When somebody starts or stops it, a new one begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestartSeries {
    /// Launches since it was last well, the first one not counted.
    pub tries: u32,
    pub phase: Phase,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Nothing is to be done about it.
    #[default]
    Idle,
    /// It is launched again then.
    Waiting { until: i64 },
    /// The same, after its tries were used up.
    Failed { until: i64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestartEvent {
    /// It ended, or could not be launched; `up_ms`: after so long.
    Ended { up_ms: i64 },
    /// Its time may have come.
    TimerFired,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestartAction {
    Nothing,
    Launch,
    WakeAt(i64),
    /// And tell that it failed.
    GiveUpUntil(i64),
}

pub fn step(
    series: RestartSeries,
    event: RestartEvent,
    now: i64,
    policy: &RestartPolicy,
) -> (RestartSeries, RestartAction) {
    match event {
        RestartEvent::TimerFired => match series.phase {
            Phase::Idle => (series, RestartAction::Nothing),
            Phase::Waiting { until } | Phase::Failed { until } if until > now => {
                (series, RestartAction::WakeAt(until))
            }
            Phase::Waiting { .. } | Phase::Failed { .. } => {
                (RestartSeries { phase: Phase::Idle, ..series }, RestartAction::Launch)
            }
        },
        RestartEvent::Ended { up_ms } => {
            let tries = if up_ms >= policy.settled_ms { 0 } else { series.tries };
            let next = tries.saturating_add(1);
            if tries == 0 && policy.retries > 0 {
                return (RestartSeries { tries: next, phase: Phase::Idle }, RestartAction::Launch);
            }
            // At least a second: an interval of 0 is no leave to spin.
            let base = policy.interval_ms.max(1000);
            if tries < policy.retries {
                let until = now.saturating_add(base);
                return (
                    RestartSeries { tries: next, phase: Phase::Waiting { until } },
                    RestartAction::WakeAt(until),
                );
            }
            let over = tries - policy.retries;
            let wait = base.saturating_mul(2i64.saturating_pow(over + 1)).min(MAX_BACKOFF_MS);
            let until = now.saturating_add(wait);
            (RestartSeries { tries: next, phase: Phase::Failed { until } }, RestartAction::GiveUpUntil(until))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: RestartPolicy = RestartPolicy { retries: 3, interval_ms: 10_000, settled_ms: 10_000 };

    /// A process that always ends after `up_ms`: when it is launched.
    fn launches(policy: &RestartPolicy, up_ms: i64, until: i64) -> Vec<i64> {
        let (mut now, mut series, mut all) = (0, RestartSeries::default(), Vec::new());
        while now < until {
            let effect;
            (series, effect) = step(series, RestartEvent::Ended { up_ms }, now, policy);
            if let RestartAction::WakeAt(at) | RestartAction::GiveUpUntil(at) = effect {
                assert!(at > now);
                assert_eq!(
                    step(series, RestartEvent::TimerFired, at - 1, policy).1,
                    RestartAction::WakeAt(at),
                    "not before its time"
                );
                now = at;
                let woken;
                (series, woken) = step(series, RestartEvent::TimerFired, now, policy);
                assert_eq!(woken, RestartAction::Launch);
            }
            all.push(now);
            now += up_ms;
        }
        all
    }

    #[test]
    fn at_once_then_at_intervals_then_at_doubling_ones() {
        let seconds: Vec<i64> = launches(&POLICY, 0, 1_000_000).iter().map(|ms| ms / 1000).collect();
        assert_eq!(seconds[..9], [0, 10, 20, 40, 80, 160, 320, 620, 920]);
    }

    #[test]
    fn one_that_stayed_up_begins_anew() {
        let every = launches(&POLICY, 60_000, 600_000);
        assert!(every.windows(2).all(|pair| pair[1] - pair[0] == 60_000), "{every:?}");
        let failed = RestartSeries { tries: 9, phase: Phase::Idle };
        assert_eq!(step(failed, RestartEvent::Ended { up_ms: 10_000 }, 5, &POLICY).1, RestartAction::Launch);
    }

    #[test]
    fn no_policy_lets_it_spin() {
        for policy in [
            RestartPolicy { retries: 0, interval_ms: 0, settled_ms: 10_000 },
            RestartPolicy { retries: 4, interval_ms: 0, settled_ms: 10_000 },
            RestartPolicy { retries: u32::MAX, interval_ms: 0, settled_ms: i64::MAX },
        ] {
            let launches = launches(&policy, 1, 60_000).len();
            assert!(launches < 70, "{policy:?}: {launches} a minute");
        }
    }
}
