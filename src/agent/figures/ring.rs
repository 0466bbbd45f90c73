//! Ring buffer of samples: the last hour of one instance, in less than a kilobyte.

use std::collections::VecDeque;

use crate::agent_protocol::{FigurePoint, TreeFigures};

/// Samples of one ring: one per minute, for an hour.
pub const MAX_POINTS: usize = 60;

/// A sample in 12 bytes. Larger values are cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PackedPoint {
    mem_kb: u32,
    /// Hundredths of a core.
    cpu: u16,
    fds: u16,
    threads: u16,
    /// Seconds since the previous point.
    after_secs: u16,
}

impl PackedPoint {
    /// The number of processes is not kept.
    fn figures(self) -> TreeFigures {
        TreeFigures {
            cpu_milli: u32::from(self.cpu) * 10,
            mem_kb: self.mem_kb.into(),
            fds: self.fds.into(),
            threads: self.threads.into(),
            processes: 0,
        }
    }
}

/// The last samples of one instance.
#[derive(Debug, Default)]
pub struct FigureRing {
    points: VecDeque<PackedPoint>,
    /// Time of the newest point, in milliseconds since 1970.
    newest: i64,
}

impl FigureRing {
    /// Adds a sample, and drops the oldest one above [`MAX_POINTS`].
    pub fn add(&mut self, at: i64, figures: TreeFigures) {
        let small = |number: u32| u16::try_from(number).unwrap_or(u16::MAX);
        // Whole seconds since the previous point, not since its sample: errors do not add up.
        let mut after = at.saturating_sub(self.newest).max(0).saturating_add(500) / 1000;
        // A longer gap than this one is not shown: the points before it are older than an hour.
        if after >= i64::from(u16::MAX) {
            self.points.clear();
        }
        // Rounding alone does not look like a clock that was set back.
        if self.points.is_empty() || at.saturating_add(1000) < self.newest {
            (after, self.newest) = (0, at);
        }
        while self.points.len() >= MAX_POINTS {
            self.points.pop_front();
        }
        self.points.push_back(PackedPoint {
            mem_kb: u32::try_from(figures.mem_kb).unwrap_or(u32::MAX),
            cpu: small(figures.cpu_milli.saturating_add(5) / 10),
            fds: small(figures.fds),
            threads: small(figures.threads),
            after_secs: u16::try_from(after).unwrap_or(0),
        });
        self.newest = self.newest.saturating_add(after.saturating_mul(1000));
    }

    /// The samples, oldest first.
    pub fn points(&self) -> Vec<FigurePoint> {
        let mut at = self.newest;
        let mut points = Vec::with_capacity(self.points.len());
        for packed in self.points.iter().rev() {
            points.push(FigurePoint(at, packed.figures()));
            at = at.saturating_sub(i64::from(packed.after_secs) * 1000);
        }
        points.reverse();
        points
    }

    /// The newest sample.
    pub fn newest(&self) -> Option<FigurePoint> {
        Some(FigurePoint(self.newest, self.points.back()?.figures()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_keeps_an_hour_in_less_than_a_kilobyte() {
        let mut ring = FigureRing::default();
        assert!(ring.points().is_empty());
        let figures = |number: u32| TreeFigures {
            cpu_milli: number * 10,
            mem_kb: u64::from(number) * 1000,
            fds: number,
            threads: number,
            processes: 0,
        };
        for minute in 1..=200 {
            ring.add(i64::from(minute) * 60_000, figures(minute));
        }
        let points = ring.points();
        assert_eq!(points.len(), MAX_POINTS);
        assert_eq!(points.first(), Some(&FigurePoint(141 * 60_000, figures(141))));
        assert_eq!(points.last(), Some(&FigurePoint(200 * 60_000, figures(200))));
        assert!(std::mem::size_of::<PackedPoint>() * MAX_POINTS < 1000);
        // A clock that jumps back moves no later point, and values are cut off.
        ring.add(199 * 60_000, TreeFigures { cpu_milli: u32::MAX, fds: 100_000, ..figures(1) });
        let last = *ring.points().last().expect("a point");
        assert_eq!((last.0, last.1.cpu_milli, last.1.fds), (199 * 60_000, 655_350, 65_535));
        ring.add(400 * 86_400_000, figures(1));
        assert_eq!(ring.points().len(), 1, "older than an hour");
        // Samples between two seconds: the time of a point never moves, and stays close to its sample.
        let mut ring = FigureRing::default();
        let mut before: Vec<FigurePoint> = Vec::new();
        for nth in 0..50 {
            let at = 5_000_123 + nth * 1_040;
            ring.add(at, figures(1));
            let points = ring.points();
            assert!(points.starts_with(&before) && (points.last().expect("a point").0 - at).abs() <= 500);
            before = points;
        }
    }
}
