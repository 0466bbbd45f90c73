//! When a process with a schedule runs next: pure, with time as a value.
//!
//! `crontab_rule` goes by the clocks of this host's zone, `cycle_time` by seconds that pass, whatever the clocks do. A run
//! whose time passed while nobody could run it (the clocks jumped ahead, the host slept) takes place once, at once, and
//! the next one counts from then; clocks that jump back make the next run come when they show its time, so the same time
//! may be run twice. A run that would begin while the last one is under way is left out.

use crate::clock::next_run;
use crate::model::{Spec, Time};

/// The two clocks, in milliseconds: what they show, and what passed since some beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClockReading {
    pub wall: i64,
    pub passed: i64,
}

/// Jumps smaller than this are no jumps.
const JUMP_MS: i64 = 2_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// By what the clocks show: at that time, as of that look at both.
    Cron { at: i64, looked: ClockReading },
    /// By what passed.
    Cycle { at: i64 },
}

impl Schedule {
    /// The next run after a moment; `began_ago`: how long ago the last one began, if there was one.
    pub fn of(spec: &Spec, now: ClockReading, began_ago: Option<i64>) -> Option<Schedule> {
        if let Some(rule) = &spec.monitor.crontab_rule {
            let at = next_run(rule, Time(now.wall))?.0;
            return Some(Schedule::Cron { at, looked: now });
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

    /// Did the clocks jump back since it was made? Then it is to be made anew.
    pub fn is_stale(&self, now: ClockReading) -> bool {
        match self {
            Schedule::Cron { looked, .. } => {
                (now.passed - looked.passed) - (now.wall - looked.wall) > JUMP_MS
            }
            Schedule::Cycle { .. } => false,
        }
    }

    /// What the clocks show when it runs, if they do not jump.
    pub fn wall_time(&self, now: ClockReading) -> i64 {
        match self {
            Schedule::Cron { at, .. } => *at,
            Schedule::Cycle { at } => now.wall.saturating_add(at - now.passed),
        }
    }

    /// How long to wait before looking again: jumps are noticed within this.
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

    /// Whoever keeps a schedule does this after every wait; the runs that take place, as the clocks show them.
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
        assert!(!next.is_stale(slow), "clocks that drift are no clocks that jump");
        assert!(!next.is_due(slow) && next.wait_ms(slow) == 1500);
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
        // What never ran, runs now; what began in the future (the clocks jumped) waits a cycle at most.
        assert_eq!(Schedule::of(&spec, now, None), Some(Schedule::Cycle { at: 7_000 }));
        assert_eq!(Schedule::of(&spec, now, Some(-HOUR)), Some(Schedule::Cycle { at: 67_000 }));
        assert_eq!(Schedule::of(&Spec::default(), now, None), None);
    }
}
