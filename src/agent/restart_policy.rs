//! Restart policy of supervised processes: pure functions with time as a value.
//!
//! [`completion`] decides whether a process that ended is relaunched at all. If it is, it is relaunched at once, then
//! `start_interval` apart, up to `start_retries` times. Then it has failed:
//! that is reported, and relaunches back off exponentially, up to five minutes. A process that stays up long enough starts a
//! new series. So a missing program cannot cause a busy loop, and a process that crashes rarely is relaunched at once.

use std::time::Duration;

use crate::retry_delay::RetryDelay;
use serde::{Deserialize, Serialize};

use crate::model::{Monitor, RestartPolicy, RestartWhen, Spec};

/// End of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessEnd {
    Exited(i32),
    /// Killed by a signal; the code is 128 + its number.
    Signalled(i32),
    /// The agent is not the parent of the process, so the kernel does not return its code.
    Unknown,
}

/// The outcome of a process that its restart policy does not restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Completion {
    Success,
    Failure,
}

/// Whether a process that ended stays stopped. An unknown end counts as a failure.
pub fn completion(rule: &RestartPolicy, end: ProcessEnd) -> Option<Completion> {
    let is_success = match end {
        ProcessEnd::Exited(code) => {
            code == 0 || rule.success_codes.iter().any(|success| i32::from(*success) == code)
        }
        ProcessEnd::Signalled(_) | ProcessEnd::Unknown => false,
    };
    match (rule.policy, is_success) {
        (RestartWhen::Always, _) | (RestartWhen::OnFailure, false) => None,
        (RestartWhen::OnFailure | RestartWhen::Never, true) => Some(Completion::Success),
        (RestartWhen::Never, false) => Some(Completion::Failure),
    }
}

/// The parameters of the policy, from the spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelaunchLimits {
    pub retries: u32,
    pub interval_ms: i64,
    /// A process that stays up this long ends the series of relaunches.
    pub settled_ms: i64,
}

/// A process that stays up less than this never ends a series.
const MIN_SETTLED_MS: i64 = 10_000;

impl RelaunchLimits {
    pub fn of(spec: &Spec) -> RelaunchLimits {
        let ms = |secs: u32| i64::from(secs) * 1000;
        let monitor = &spec.monitor;
        let interval_ms = ms(monitor.start_interval.unwrap_or(Monitor::START_INTERVAL));
        let check_ms = ms(monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS));
        RelaunchLimits {
            retries: spec.restart.attempts.or(monitor.start_retries).unwrap_or(Monitor::START_RETRIES),
            interval_ms,
            settled_ms: interval_ms.max(check_ms).max(MIN_SETTLED_MS),
        }
    }
}

/// Maximum wait between two launches.
pub const MAX_BACKOFF_MS: i64 = 300_000;

/// A series of relaunches. An explicit start or stop begins a new one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestartSeries {
    /// Relaunches in this series.
    pub tries: u32,
    pub phase: Phase,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// No relaunch is scheduled.
    #[default]
    Idle,
    /// The next relaunch is at this time.
    Waiting { until: i64 },
    /// All retries are used up. The next relaunch is at this time.
    Failed { until: i64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestartEvent {
    /// The process ended after `up_ms`, or could not be launched (0).
    Ended { up_ms: i64 },
    /// The timer of a wait fired.
    TimerFired,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestartAction {
    Nothing,
    Launch,
    WakeAt(i64),
    /// Report the failure, and wait until this time.
    GiveUpUntil(i64),
}

/// The next state and action after an event.
pub fn step(
    series: RestartSeries,
    event: RestartEvent,
    now: i64,
    policy: &RelaunchLimits,
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
            // At least one second: an interval of 0 must not cause a busy loop.
            let base = policy.interval_ms.max(1000);
            if tries < policy.retries {
                let until = now.saturating_add(base);
                return (
                    RestartSeries { tries: next, phase: Phase::Waiting { until } },
                    RestartAction::WakeAt(until),
                );
            }
            let over = tries - policy.retries;
            let millis = |ms: i64| Duration::from_millis(ms.unsigned_abs());
            let backoff = RetryDelay::doubling(millis(base), millis(MAX_BACKOFF_MS));
            let wait = backoff.after(over.saturating_add(2)).as_millis();
            let until = now.saturating_add(i64::try_from(wait).unwrap_or(MAX_BACKOFF_MS));
            (RestartSeries { tries: next, phase: Phase::Failed { until } }, RestartAction::GiveUpUntil(until))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: RelaunchLimits = RelaunchLimits { retries: 3, interval_ms: 10_000, settled_ms: 10_000 };

    /// Launch times of a process that always ends after `up_ms`.
    fn launches(policy: &RelaunchLimits, up_ms: i64, until: i64) -> Vec<i64> {
        let (mut now, mut series, mut all) = (0, RestartSeries::default(), Vec::new());
        while now < until {
            let effect;
            (series, effect) = step(series, RestartEvent::Ended { up_ms }, now, policy);
            if let RestartAction::WakeAt(at) | RestartAction::GiveUpUntil(at) = effect {
                assert!(at > now);
                assert_eq!(
                    step(series, RestartEvent::TimerFired, at - 1, policy).1,
                    RestartAction::WakeAt(at),
                    "not before the timer"
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
    fn a_rule_decides_which_ends_are_final() {
        let outcomes = |policy: RestartWhen| {
            let rule = RestartPolicy { policy, attempts: None, success_codes: vec![3, 143] };
            use ProcessEnd::{Exited, Signalled, Unknown};
            [Exited(0), Exited(3), Exited(1), Exited(143), Signalled(143), Unknown]
                .map(|end| completion(&rule, end))
        };
        let (success, failure) = (Some(Completion::Success), Some(Completion::Failure));
        assert_eq!(outcomes(RestartWhen::Always), [None; 6]);
        assert_eq!(outcomes(RestartWhen::OnFailure), [success, success, None, success, None, None]);
        assert_eq!(outcomes(RestartWhen::Never), [success, success, failure, success, failure, failure]);
    }

    #[test]
    fn relaunches_are_immediate_then_spaced_then_backed_off() {
        let seconds: Vec<i64> = launches(&POLICY, 0, 1_000_000).iter().map(|ms| ms / 1000).collect();
        assert_eq!(seconds[..9], [0, 10, 20, 40, 80, 160, 320, 620, 920]);
    }

    #[test]
    fn a_process_that_stays_up_starts_a_new_series() {
        let every = launches(&POLICY, 60_000, 600_000);
        assert!(every.windows(2).all(|pair| pair[1] - pair[0] == 60_000), "{every:?}");
        let failed = RestartSeries { tries: 9, phase: Phase::Idle };
        assert_eq!(step(failed, RestartEvent::Ended { up_ms: 10_000 }, 5, &POLICY).1, RestartAction::Launch);
    }

    #[test]
    fn no_policy_causes_a_busy_loop() {
        for policy in [
            RelaunchLimits { retries: 0, interval_ms: 0, settled_ms: 10_000 },
            RelaunchLimits { retries: 4, interval_ms: 0, settled_ms: 10_000 },
            RelaunchLimits { retries: u32::MAX, interval_ms: 0, settled_ms: i64::MAX },
        ] {
            let launches = launches(&policy, 1, 60_000).len();
            assert!(launches < 70, "{policy:?}: {launches} a minute");
        }
    }
}
