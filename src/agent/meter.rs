//! Resource metering: CPU and memory of a process tree as shares of the host, and detection of exceeded limits.
//!
//! Only processes with a limit are sampled. A limit counts as exceeded after several consecutive samples above it. The meter
//! samples the tree of a process that the agent holds by a pidfd, never of a process that reuses its pid.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use super::cgroup::Cgroup;
use super::figures::tree_usage::MeasuredTree;
use super::proc_scan::ScanError;
use crate::model::{Percent, Spec};

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
        let (Excess::Cpu { used, limit } | Excess::Mem { used, limit }) = self;
        let what = self.resource();
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

fn smaller(one: Option<f64>, other: Option<f64>) -> Option<f64> {
    one.into_iter().chain(other).min_by(f64::total_cmp)
}

/// The CPU limit of a spec in percent of the host: the smaller one of `resource.cpu` and `limits.cpu`.
pub fn cpu_limit(spec: &Spec) -> Option<f64> {
    smaller(limit(spec.resource.cpu), spec.limits.cpu.map(|cores| cores.get() / processors() * 100.0))
}

/// The memory limit of a spec in percent of the host: the smaller one of `resource.mem` and `limits.memory`.
pub fn mem_limit(spec: &Spec) -> Option<f64> {
    let bytes = spec.limits.memory.filter(|bytes| *bytes > 0);
    smaller(limit(spec.resource.mem), bytes.map(|bytes| bytes as f64 / memory() as f64 * 100.0))
}

/// Whether the spec has a limit that needs samples.
pub fn is_limited(spec: &Spec) -> bool {
    cpu_limit(spec).is_some() || mem_limit(spec).is_some()
}

/// Bytes as megabytes.
pub fn megabytes(bytes: f64) -> String {
    format!("{:.0} MB", bytes / 1e6)
}

impl Excess {
    pub fn resource(&self) -> &'static str {
        match self {
            Excess::Cpu { .. } => "cpu",
            Excess::Mem { .. } => "memory",
        }
    }

    /// The usage and the limit, in the unit of the spec: `memory 812 MB of 512 MB`.
    pub fn detail(&self, spec: &Spec) -> String {
        match *self {
            Excess::Cpu { used, limit } => {
                match spec.limits.cpu.filter(|_| Some(limit) < percent(spec.resource.cpu)) {
                    Some(cores) => format!("cpu {:.2} cores of {}", used / 100.0 * processors(), cores.get()),
                    None => format!("cpu {used:.1} % of {limit} % of the host"),
                }
            }
            Excess::Mem { used, limit } => {
                match spec.limits.memory.filter(|_| Some(limit) < percent(spec.resource.mem)) {
                    Some(bytes) => {
                        let used = megabytes(used / 100.0 * memory() as f64);
                        format!("memory {used} of {}", megabytes(bytes as f64))
                    }
                    None => format!("memory {used:.1} % of {limit} % of the host"),
                }
            }
        }
    }
}

/// A limit in percent; above every other one if it is unset.
fn percent(share: Option<Percent>) -> Option<f64> {
    Some(limit(share).unwrap_or(f64::INFINITY))
}

/// The meter of one process. CPU usage is the difference between two samples.
#[derive(Debug, Default)]
pub struct Meter {
    last: Option<(Instant, f64)>,
    pub counts: ExceededCounts,
}

impl Meter {
    /// Takes a sample: CPU share since the last sample (0 for the first one), and the current memory share. An error: the
    /// usage is unknown, and no sample was taken.
    pub async fn sample(&mut self, tree: &MeasuredTree) -> Result<HostShare, ScanError> {
        let usage = tree.current_usage().await?.unwrap_or_default();
        // The group also counts members that ended.
        let secs = tree.group().and_then(Cgroup::cpu_secs).unwrap_or(usage.cpu_secs());
        let mem = usage.bytes as f64 / memory() as f64 * 100.0;
        let now = Instant::now();
        let cpu = match self.last.replace((now, secs)) {
            Some((then, before)) if secs >= before => {
                (secs - before) / now.duration_since(then).as_secs_f64().max(0.001) / processors() * 100.0
            }
            Some(_) | None => 0.0,
        };
        Ok(HostShare { cpu, mem })
    }
}

/// Number of processors of this host.
pub fn processors() -> f64 {
    static COUNT: LazyLock<f64> =
        LazyLock::new(|| std::thread::available_parallelism().map_or(1.0, |count| count.get() as f64));
    *COUNT
}

/// Memory of this host in bytes.
pub fn memory() -> u64 {
    static BYTES: LazyLock<u64> = LazyLock::new(|| memory_info("MemTotal:").unwrap_or(1 << 40));
    *BYTES
}

fn memory_info(name: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kb: u64 =
        text.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next()?.parse().ok())?;
    kb.checked_mul(1024)
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
    fn the_smaller_limit_counts_and_is_named_in_its_unit() {
        use crate::model::Cores;
        let mut spec = Spec::default();
        assert!(!is_limited(&spec));
        spec.limits.memory = Some(512_000_000);
        let mem = 512e6 / memory() as f64 * 100.0;
        assert!(is_limited(&spec) && mem_limit(&spec) == Some(mem) && cpu_limit(&spec).is_none());
        let used = 812e6 / memory() as f64 * 100.0;
        assert_eq!(Excess::Mem { used, limit: mem }.detail(&spec), "memory 812 MB of 512 MB");
        spec.resource.mem = Percent::new(0.01);
        assert_eq!(mem_limit(&spec), Some(0.01), "the smaller one");
        assert_eq!(
            Excess::Mem { used, limit: 0.01 }.detail(&spec),
            format!("memory {used:.1} % of 0.01 % of the host")
        );
        spec.limits.cpu = Cores::new(0.5);
        let limit = 50.0 / processors();
        assert_eq!(cpu_limit(&spec), Some(limit));
        assert_eq!(Excess::Cpu { used: 2.0 * limit, limit }.detail(&spec), "cpu 1.00 cores of 0.5");
    }

    #[test]
    fn a_pools_victim_is_the_biggest_or_the_one_most_over_its_share() {
        let members = [("big", 50.0, Some(60.0)), ("greedy", 30.0, Some(5.0)), ("small", 1.0, Some(1.0))];
        assert_eq!(victim(&members, false), Some("big"));
        assert_eq!(victim(&members, true), Some("greedy"));
        assert_eq!(victim::<u8>(&[], true), None);
    }

    #[tokio::test]
    async fn the_tests_own_tree_is_measured() {
        let mut meter = Meter::default();
        let tree = MeasuredTree::of_pid(std::process::id()).expect("this process");
        let first = meter.sample(&tree).await.expect("a scan");
        assert!(first.mem > 0.0 && first.cpu == 0.0, "{first:?}");
        let begin = Instant::now();
        let mut sum = 0u64;
        while begin.elapsed() < Duration::from_millis(60) {
            sum = std::hint::black_box(sum.wrapping_add(1));
        }
        let second = meter.sample(&tree).await.expect("a scan");
        assert!(second.cpu > 0.0 && second.cpu < 200.0, "{second:?}");
    }
}
