//! Resource metering: CPU and memory of a process tree as shares of the host, and detection of exceeded limits.
//!
//! Only processes with a limit are sampled. A limit counts as exceeded after several consecutive samples above it. The meter
//! samples the tree of a process that the agent holds by a pidfd, never of a process that reuses its pid.

use std::collections::HashMap;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use super::cgroup::Cgroup;
use crate::clock;
use crate::model::{Percent, Resource};

/// Interval between two samples.
pub const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// Consecutive samples above a limit that count as exceeded.
pub const EXCEEDED_SAMPLES: u32 = 3;

/// Percent of the whole host.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HostShare {
    pub cpu: f64,
    pub mem: f64,
}

/// A limit that is exceeded, and the usage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Excess {
    Cpu { used: f64, limit: f64 },
    Mem { used: f64, limit: f64 },
}

impl std::fmt::Display for Excess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (what, used, limit) = match self {
            Excess::Cpu { used, limit } => ("cpu", used, limit),
            Excess::Mem { used, limit } => ("memory", used, limit),
        };
        write!(f, "over its {what} limit: {used:.1} % of the host used, {limit} % allowed")
    }
}

/// Consecutive samples above each limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExceededCounts {
    cpu: u32,
    mem: u32,
}

/// Adds a sample. Returns the new counts, and the limit that is now exceeded.
pub fn check_limits(
    counts: ExceededCounts,
    share: HostShare,
    cpu: Option<f64>,
    mem: Option<f64>,
) -> (ExceededCounts, Option<Excess>) {
    let over = |used: f64, limit: Option<f64>| limit.filter(|limit| used > *limit);
    let (cpu, mem) = (over(share.cpu, cpu), over(share.mem, mem));
    let count = |before: u32, over: bool| if over { before.saturating_add(1) } else { 0 };
    let counts =
        ExceededCounts { cpu: count(counts.cpu, cpu.is_some()), mem: count(counts.mem, mem.is_some()) };
    let proven = |count: u32| count >= EXCEEDED_SAMPLES;
    let excess = match (mem, cpu) {
        (Some(limit), _) if proven(counts.mem) => Some(Excess::Mem { used: share.mem, limit }),
        (_, Some(limit)) if proven(counts.cpu) => Some(Excess::Cpu { used: share.cpu, limit }),
        _ => None,
    };
    (counts, excess)
}

/// The limit in percent. 0 means unlimited: no process could run within it.
pub fn limit(share: Option<Percent>) -> Option<f64> {
    share.map(Percent::get).filter(|limit| *limit > 0.0)
}

/// Whether the spec has a limit that needs samples.
pub fn is_limited(resource: &Resource) -> bool {
    limit(resource.cpu).is_some() || limit(resource.mem).is_some()
}

/// The meter of one process. CPU usage is the difference between two samples.
#[derive(Debug, Default)]
pub struct Meter {
    last: Option<(Instant, f64)>,
    pub counts: ExceededCounts,
}

impl Meter {
    /// Average CPU share since the start, and the current memory share.
    pub fn average_since_start(pid: u32, group: Option<&Cgroup>, started_ms: i64) -> HostShare {
        let (secs, mem) = used(pid, group);
        let up = (clock::now().0.saturating_sub(started_ms).max(1000)) as f64 / 1000.0;
        HostShare { cpu: secs / up / processors() * 100.0, mem }
    }

    /// Takes a sample: CPU share since the last sample (0 for the first one), and the current memory share.
    pub fn sample(&mut self, pid: u32, group: Option<&Cgroup>) -> HostShare {
        let (secs, mem) = used(pid, group);
        let now = Instant::now();
        let cpu = match self.last.replace((now, secs)) {
            Some((then, before)) if secs >= before => {
                (secs - before) / now.duration_since(then).as_secs_f64().max(0.001) / processors() * 100.0
            }
            Some(_) | None => 0.0,
        };
        HostShare { cpu, mem }
    }
}

/// CPU seconds, and percent of the host's memory, of a process tree.
fn used(pid: u32, group: Option<&Cgroup>) -> (f64, f64) {
    let members = match group.map(Cgroup::processes).filter(|pids| !pids.is_empty()) {
        Some(pids) => pids,
        None => tree(pid),
    };
    let usage: Vec<(u64, u64)> = members.iter().filter_map(|pid| super::process::usage(*pid)).collect();
    let bytes: u64 = usage.iter().map(|(bytes, _)| bytes).sum();
    let ticks: u64 = usage.iter().map(|(_, ticks)| ticks).sum();
    let secs = group.and_then(Cgroup::cpu_secs).unwrap_or(ticks as f64 / ticks_per_second());
    (secs, bytes as f64 / memory() as f64 * 100.0)
}

/// A process and all its descendants.
fn tree(root: u32) -> Vec<u32> {
    let Ok(folder) = std::fs::read_dir("/proc") else { return vec![root] };
    let pids = folder.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    for pid in pids {
        if let Some(parent) = super::process::parent(pid) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut all = vec![root];
    let mut next = 0;
    while next < all.len() {
        all.extend(children.remove(&all[next]).unwrap_or_default());
        next += 1;
    }
    all
}

/// Number of processors of this host.
pub fn processors() -> f64 {
    static COUNT: LazyLock<f64> =
        LazyLock::new(|| std::thread::available_parallelism().map_or(1.0, |count| count.get() as f64));
    *COUNT
}

/// Memory of this host in bytes.
pub fn memory() -> u64 {
    static BYTES: LazyLock<u64> = LazyLock::new(|| {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let kb = text
            .lines()
            .find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse().ok());
        kb.unwrap_or(1 << 30) * 1024
    });
    *BYTES
}

fn ticks_per_second() -> f64 {
    rustix::param::clock_ticks_per_second() as f64
}

/// The member of a pool to stop: the largest user (weight 0), or the one most over its own share (weight 1).
pub fn victim<T: Copy>(members: &[(T, f64, Option<f64>)], by_own_share: bool) -> Option<T> {
    let even = 100.0 / members.len().max(1) as f64;
    let score = |(_, used, limit): &(T, f64, Option<f64>)| match by_own_share {
        true => used - limit.unwrap_or(even),
        false => *used,
    };
    members.iter().max_by(|a, b| score(a).total_cmp(&score(b))).map(|(which, _, _)| *which)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_exceeded_after_consecutive_samples() {
        let (high, low) = (HostShare { cpu: 90.0, mem: 1.0 }, HostShare { cpu: 10.0, mem: 1.0 });
        let mut counts = ExceededCounts::default();
        let mut exceeded = Vec::new();
        for share in [high, high, low, high, high, high, high] {
            let excess;
            (counts, excess) = check_limits(counts, share, Some(50.0), Some(20.0));
            exceeded.push(excess.is_some());
        }
        assert_eq!(exceeded, [false, false, false, false, false, true, true]);
        let (_, nothing) = check_limits(ExceededCounts { cpu: 9, mem: 9 }, high, None, None);
        assert_eq!(nothing, None, "without a limit nothing is exceeded");
        let (_, both) = check_limits(
            ExceededCounts { cpu: 9, mem: 9 },
            HostShare { cpu: 90.0, mem: 30.0 },
            Some(50.0),
            Some(20.0),
        );
        assert_eq!(both, Some(Excess::Mem { used: 30.0, limit: 20.0 }));
    }

    #[test]
    fn a_pools_victim_is_the_biggest_or_the_one_most_over_its_share() {
        let members = [("big", 50.0, Some(60.0)), ("greedy", 30.0, Some(5.0)), ("small", 1.0, Some(1.0))];
        assert_eq!(victim(&members, false), Some("big"));
        assert_eq!(victim(&members, true), Some("greedy"));
        assert_eq!(victim::<u8>(&[], true), None);
    }

    #[test]
    fn the_tests_own_tree_is_measured() {
        let mut meter = Meter::default();
        let first = meter.sample(std::process::id(), None);
        assert!(first.mem > 0.0 && first.cpu == 0.0, "{first:?}");
        let begin = Instant::now();
        let mut sum = 0u64;
        while begin.elapsed() < Duration::from_millis(60) {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        let second = meter.sample(std::process::id(), None);
        assert!(second.cpu > 0.0 && second.cpu < 200.0, "{second:?}");
    }
}
