//! Pools: limits that all supervised processes of a namespace on a host share.
//!
//! Instance tasks of such a namespace report their usage. When a pool is exceeded in enough consecutive samples, it selects
//! a victim: the largest user, or the process most over its own share, by the weight of the pool. The victim's task learns
//! this from its next report.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use serde_json::Value;

use super::meter::{ExceededCounts, Excess, HostShare, SAMPLE_INTERVAL, check_limits, victim};
use crate::model::{HostKey, InstanceKey, Name};

/// The limits of one pool, and whether the victim is selected by its own share.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Limits {
    cpu: Option<f64>,
    mem: Option<f64>,
    cpu_by_share: bool,
    mem_by_share: bool,
}

#[derive(Debug, Default)]
struct Pool {
    limits: Vec<(Limits, ExceededCounts)>,
    /// Last usage and own limits of each process.
    members: HashMap<InstanceKey, Member>,
    checked_at: Option<Instant>,
    victims: HashMap<InstanceKey, String>,
}

#[derive(Debug, Default)]
pub struct Pools(Mutex<HashMap<(HostKey, Name), Pool>>);

impl Pools {
    fn pools(&self) -> MutexGuard<'_, HashMap<(HostKey, Name), Pool>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Sets the pools of a namespace on a host, in the format of the gateway.
    pub fn set(&self, host: HostKey, namespace: Name, groups: &Value) {
        let limits: Vec<(Limits, ExceededCounts)> =
            groups.as_array().into_iter().flatten().filter_map(parse_limits).collect();
        let mut pools = self.pools();
        match limits.is_empty() {
            true => drop(pools.remove(&(host, namespace))),
            false => pools.entry((host, namespace)).or_default().limits = limits,
        }
    }

    pub fn has(&self, key: &InstanceKey) -> bool {
        self.pools().contains_key(&(key.host.clone(), key.namespace.clone()))
    }

    /// Reports the usage of a process. Returns the reason if the process has to be stopped.
    pub fn report_usage(&self, key: &InstanceKey, used: Member, now: Instant) -> Option<String> {
        let mut pools = self.pools();
        let pool = pools.get_mut(&(key.host.clone(), key.namespace.clone()))?;
        pool.members.insert(key.clone(), used);
        // Once per interval, for any number of reports.
        if pool.checked_at.is_none_or(|last| now.saturating_duration_since(last) >= SAMPLE_INTERVAL) {
            pool.checked_at = Some(now);
            pool.check_limits(&key.namespace);
        }
        pool.victims.remove(key)
    }

    pub fn forget(&self, key: &InstanceKey) {
        if let Some(pool) = self.pools().get_mut(&(key.host.clone(), key.namespace.clone())) {
            pool.members.remove(key);
            pool.victims.remove(key);
        }
    }
}

impl Pool {
    fn check_limits(&mut self, namespace: &Name) {
        let Pool { limits, members, victims, .. } = self;
        let sum = members.values().fold(HostShare::default(), |sum, (share, _, _)| HostShare {
            cpu: sum.cpu + share.cpu,
            mem: sum.mem + share.mem,
        });
        for (limit, counts) in limits {
            let excess;
            (*counts, excess) = check_limits(*counts, sum, limit.cpu, limit.mem);
            let chosen = match excess {
                None => continue,
                Some(Excess::Cpu { .. }) => {
                    choose_victim(members, limit.cpu_by_share, |(share, cpu, _)| (share.cpu, *cpu))
                }
                Some(Excess::Mem { .. }) => {
                    choose_victim(members, limit.mem_by_share, |(share, _, mem)| (share.mem, *mem))
                }
            };
            if let (Some(key), Some(excess)) = (chosen, excess) {
                *counts = ExceededCounts::default();
                members.remove(&key);
                victims.insert(key, format!("the pool of namespace {namespace} is {excess}"));
            }
        }
    }
}

/// Usage of a process, and its own CPU and memory limits.
pub type Member = (HostShare, Option<f64>, Option<f64>);

fn choose_victim(
    members: &HashMap<InstanceKey, Member>,
    by_share: bool,
    of: impl Fn(&Member) -> (f64, Option<f64>),
) -> Option<InstanceKey> {
    let all: Vec<(&InstanceKey, f64, Option<f64>)> = members
        .iter()
        .map(|(key, member)| {
            let (used, limit) = of(member);
            (key, used, limit)
        })
        .collect();
    victim(&all, by_share).cloned()
}

fn parse_limits(group: &Value) -> Option<(Limits, ExceededCounts)> {
    let resource = group.get("resource")?;
    let number = |name: &str| resource.get(name).and_then(Value::as_f64);
    // 0 means unlimited: no process could run in such a pool.
    let limit = |name: &str| number(name).filter(|limit| *limit > 0.0);
    let limits = Limits {
        cpu: limit("cpu_pool_limit"),
        mem: limit("mem_pool_limit"),
        cpu_by_share: number("cpu_pool_weight") == Some(1.0),
        mem_by_share: number("mem_pool_weight") == Some(1.0),
    };
    (limits.cpu.is_some() || limits.mem.is_some()).then_some((limits, ExceededCounts::default()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_pool_that_is_exceeded_for_long_enough_loses_one_process() {
        let key = |name: &str| format!("0:127.0.0.1:web:{name}").parse::<InstanceKey>().expect("a key");
        let (host, namespace) = (key("a").host, key("a").namespace);
        let group = |weight: u8| json!([{"id": 1, "resource": {"cpu_pool_limit": 40.0, "mem_pool_limit": 0, "cpu_pool_weight": weight}}]);
        for (weight, expected) in [(0, "big"), (1, "greedy")] {
            let pools = Pools::default();
            pools.set(host.clone(), namespace.clone(), &group(weight));
            let begin = Instant::now();
            let report = |round: u32| {
                let now = begin + SAMPLE_INTERVAL * round;
                let big = pools.report_usage(
                    &key("big"),
                    (HostShare { cpu: 30.0, mem: 1.0 }, Some(35.0), None),
                    now,
                );
                let greedy = pools.report_usage(
                    &key("greedy"),
                    (HostShare { cpu: 20.0, mem: 1.0 }, Some(5.0), None),
                    now,
                );
                [("big", big), ("greedy", greedy)].into_iter().filter_map(|(name, why)| Some((name, why?)))
            };
            let mut stopped = Vec::new();
            // The first round has only the first report.
            for round in 0..4 {
                assert!(stopped.is_empty(), "a single peak is not enough: {stopped:?}");
                stopped.extend(report(round));
            }
            stopped.extend(report(4));
            assert_eq!(stopped.len(), 1, "{stopped:?}");
            assert!(stopped[0].0 == expected && stopped[0].1.contains("50.0 %"), "{stopped:?}");
            assert!(pools.has(&key("x")));
            pools.set(host.clone(), namespace.clone(), &json!([]));
            assert!(!pools.has(&key("x")));
        }
    }
}
