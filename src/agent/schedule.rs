//! Schedule of periodic processes: computes the next run; pure functions with time as a value.
//!
//! `crontab_rule` uses the wall clock in `crontab_zone`, by default this host's time zone, `cycle_time` a monotonic clock. If the time of a run passed
//! while it could not start (the clock jumped ahead, the host was suspended), one run starts at once, and the next run is
//! computed from then. After a jump back the next run starts when the clock shows its time, so the same time may run twice.
//! A run that is due while the previous one is in progress is skipped.

use crate::clock::next_run;
use crate::model::{Spec, Time};

/// A reading of the wall clock and of a monotonic clock, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockReading {
    pub wall: i64,
    pub passed: i64,
}

/// Smaller differences between the clocks count as drift, not as a jump.
const JUMP_MS: i64 = 2_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// By the wall clock, at `at`; computed at `planned_at`.
    Cron { at: i64, planned_at: ClockReading },
    /// By the monotonic clock.
    Cycle { at: i64 },
}

impl Schedule {
    /// The next run after `now`. `began_ago`: time since the start of the last run.
    pub fn of(spec: &Spec, now: ClockReading, began_ago: Option<i64>) -> Option<Schedule> {
        if let Some(rule) = &spec.monitor.crontab_rule {
            let at = next_run(rule, spec.monitor.crontab_zone.as_deref(), Time(now.wall))?.0;
            return Some(Schedule::Cron { at, planned_at: now });
        }
        let cycle = i64::from(spec.job.cycle_time.filter(|secs| *secs > 0)?) * 1000;
        let left = began_ago.map_or(0, |ago| cycle.saturating_sub(ago).clamp(0, cycle));
        Some(Schedule::Cycle { at: now.passed.saturating_add(left) })
    }

    pub fn is_due(&self, now: ClockReading) -> bool {
        match self {
            Schedule::Cron { at, .. } => now.wall >= *at,
            Schedule::Cycle { at } => now.passed >= *at,
        }
    }

    /// Whether the wall clock jumped back since the schedule was computed, so that it must be recomputed.
    pub fn is_stale(&self, now: ClockReading) -> bool {
        match self {
            Schedule::Cron { planned_at, .. } => {
                (now.passed - planned_at.passed) - (now.wall - planned_at.wall) > JUMP_MS
            }
            Schedule::Cycle { .. } => false,
        }
    }

    /// Wall-clock time of the run, unless the clock jumps.
    pub fn wall_time(&self, now: ClockReading) -> i64 {
        match self {
            Schedule::Cron { at, .. } => *at,
            Schedule::Cycle { at } => now.wall.saturating_add(at - now.passed),
        }
    }

    /// Wall-clock times of this run and the following ones, unless the clock jumps or a run is skipped.
    pub fn upcoming(&self, spec: &Spec, now: ClockReading, count: usize) -> Vec<i64> {
        let first = self.wall_time(now);
        let following = |at: &i64| match (&spec.monitor.crontab_rule, spec.job.cycle_time) {
            (Some(rule), _) => Some(next_run(rule, spec.monitor.crontab_zone.as_deref(), Time(*at))?.0),
            (None, Some(secs)) => Some(at.saturating_add(i64::from(secs) * 1000)),
            (None, None) => None,
        };
        std::iter::successors(Some(first), following).take(count).collect()
    }

    /// Wait before the next check of the clock. Bounded, so that jumps are noticed.
    pub fn wait_ms(&self, now: ClockReading) -> i64 {
        const MAX_WAIT_MS: i64 = 15_000;
        match self {
            Schedule::Cron { at, .. } => (at - now.wall).clamp(0, MAX_WAIT_MS),
            Schedule::Cycle { at } => (at - now.passed).max(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = 3_600_000;

    fn at(wall: &str, passed: i64) -> ClockReading {
        ClockReading { wall: crate::clock::read(wall).expect("a time").0, passed }
    }

    fn hourly() -> Spec {
        let mut spec = Spec::default();
        spec.monitor.crontab_rule = Some("0 * * * *".to_owned());
        spec
    }

    /// Wall-clock times of the runs, if the schedule is checked at these moments.
    fn runs(spec: &Spec, moments: &[ClockReading]) -> Vec<i64> {
        let mut next = Schedule::of(spec, moments[0], None);
        let mut runs = Vec::new();
        for now in &moments[1..] {
            if next.is_some_and(|next| next.is_stale(*now)) {
                next = Schedule::of(spec, *now, None);
            }
            if next.is_some_and(|next| next.is_due(*now)) {
                runs.push(now.wall);
                next = Schedule::of(spec, *now, Some(0));
            }
        }
        runs
    }

    #[test]
    fn clocks_that_jump_ahead_run_what_was_missed_once() {
        let before = at("2026-11-16T04:30:00Z", 0);
        let after = ClockReading { wall: before.wall + 5 * HOUR, passed: 1000 };
        let later = ClockReading { wall: after.wall + HOUR / 3, passed: 1000 + HOUR / 3 };
        let due = ClockReading { wall: after.wall + HOUR / 2, passed: 1000 + HOUR / 2 };
        assert_eq!(runs(&hourly(), &[before, after, later, due]), [after.wall, due.wall]);
    }

    #[test]
    fn clocks_that_jump_back_do_not_make_it_wait_for_what_they_showed_before() {
        let before = at("2026-11-16T04:30:00Z", 0);
        let back = ClockReading { wall: before.wall - 3 * HOUR, passed: 1000 };
        let due = ClockReading { wall: before.wall - 3 * HOUR + HOUR / 2, passed: 1000 + HOUR / 2 };
        assert_eq!(runs(&hourly(), &[before, back, due]), [due.wall], "at 02:00, not at 05:00");
        let slow = ClockReading { wall: before.wall + HOUR / 2 - 1500, passed: HOUR / 2 };
        let next = Schedule::of(&hourly(), before, None).expect("a next run");
        assert!(!next.is_stale(slow), "drift does not count as a jump");
        assert!(!next.is_due(slow) && next.wait_ms(slow) == 1500);
    }

    #[test]
    fn the_next_runs_follow_the_zone_and_its_daylight_saving_time() {
        let mut spec = Spec::default();
        spec.monitor.crontab_rule = Some("30 2 * * *".to_owned());
        spec.monitor.crontab_zone = Some("Europe/Berlin".to_owned());
        let upcoming = |now: &str| {
            let now = at(now, 0);
            let next = Schedule::of(&spec, now, None).expect("a next run");
            next.upcoming(&spec, now, 3).into_iter().map(|at| Time(at).to_string()).collect::<Vec<_>>()
        };
        // 02:30 does not exist on 29 March 2026: the run is right after the gap.
        let spring = ["2026-03-28T01:30:00Z", "2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"];
        assert_eq!(upcoming("2026-03-27T12:00:00Z"), spring);
        // 02:30 exists twice on 25 October 2026, and runs once.
        let autumn = ["2026-10-24T00:30:00Z", "2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"];
        assert_eq!(upcoming("2026-10-23T12:00:00Z"), autumn);
        let mut cycle = Spec::default();
        cycle.job.cycle_time = Some(60);
        let now = at("2026-11-16T04:30:00Z", 0);
        let next = Schedule::of(&cycle, now, None).expect("a next run");
        assert_eq!(next.upcoming(&cycle, now, 3), [now.wall, now.wall + 60_000, now.wall + 120_000]);
    }

    #[test]
    fn a_cycle_counts_what_passes_and_no_clock_moves_it() {
        let mut spec = Spec::default();
        spec.job.cycle_time = Some(60);
        let now = at("2026-11-16T04:30:00Z", 7_000);
        let next = Schedule::of(&spec, now, Some(10_000)).expect("a next run");
        assert_eq!(next, Schedule::Cycle { at: 57_000 });
        for wall in [now.wall - 9 * HOUR, now.wall + 9 * HOUR] {
            assert!(
                !next.is_due(ClockReading { wall, passed: 56_999 })
                    && next.is_due(ClockReading { wall, passed: 57_000 })
            );
            assert!(!next.is_stale(ClockReading { wall, passed: 8_000 }));
        }
        assert_eq!(next.wall_time(now), now.wall + 50_000);
        // A process that never ran runs now. A start in the future (the clock jumped) waits at most one cycle.
        assert_eq!(Schedule::of(&spec, now, None), Some(Schedule::Cycle { at: 7_000 }));
        assert_eq!(Schedule::of(&spec, now, Some(-HOUR)), Some(Schedule::Cycle { at: 67_000 }));
        assert_eq!(Schedule::of(&Spec::default(), now, None), None);
    }
}
