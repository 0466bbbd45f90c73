//! Report usage per host: bytes and instances in the store, the rate of writes, and deferred reports.
//!
//! The usage is counted from the store once, then updated with each commit. Other callers delete rows too, so it is
//! counted again before a report is ignored, at most once per [`RECOUNT_INTERVAL`].
//!
//! Deferred reports are in memory only. An agent reports all its instances when it joins, so a crash of the gateway
//! loses none; each call of the agent, heartbeats included, stores the deferred reports that the rate allows.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::report_limits::MAX_HOST_BYTES;
use super::{ApiError, Gateway};
use crate::agent_protocol::Report;
use crate::model::{HostKey, InstanceKey};
use crate::store::{Store, keys};

/// Bytes of reports that a host may write per second.
const BYTES_PER_SECOND: usize = 512 << 10;
/// Bytes that a host may write at once: all its instances, after a reconnect.
const BURST: usize = MAX_HOST_BYTES;
/// Minimum interval between two counts of the store.
const RECOUNT_INTERVAL: Duration = Duration::from_secs(10);
/// Minimum interval between two log lines about a host.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Entries read from the store at once.
const PAGE: usize = 10_000;

/// Usage of all hosts.
#[derive(Default)]
pub struct ReportUsage {
    hosts: Mutex<HashMap<HostKey, HostState>>,
    /// Time of the last count of the store.
    counted: Mutex<Option<Instant>>,
    ignored: AtomicU64,
}

/// Usage of one host.
pub struct HostState {
    pub bytes: usize,
    pub instances: usize,
    allowance: usize,
    refilled: Instant,
    deferred: BTreeMap<InstanceKey, Vec<u8>>,
    deferred_bytes: usize,
    /// Reports ignored and deferred since the last log line.
    unlogged: (usize, usize),
    logged: Option<Instant>,
}

/// Usage of one host at this time.
#[derive(Clone, Copy, Debug)]
pub struct HostUsage {
    pub bytes: usize,
    pub instances: usize,
    /// Bytes that the host may write now.
    pub allowance: usize,
    pub deferred_bytes: usize,
}

impl Default for HostState {
    fn default() -> HostState {
        HostState {
            bytes: 0,
            instances: 0,
            allowance: BURST,
            refilled: Instant::now(),
            deferred: BTreeMap::new(),
            deferred_bytes: 0,
            unlogged: (0, 0),
            logged: None,
        }
    }
}

impl HostState {
    fn refill(&mut self) {
        let millis = usize::try_from(self.refilled.elapsed().as_millis()).unwrap_or(usize::MAX);
        let gained = millis.saturating_mul(BYTES_PER_SECOND) / 1000;
        if gained > 0 {
            self.allowance = self.allowance.saturating_add(gained).min(BURST);
            self.refilled = Instant::now();
        }
    }

    /// Whether the state of the host is that of an unknown one.
    fn is_idle(&self) -> bool {
        let is_used = self.bytes > 0 || self.instances > 0 || self.allowance < BURST;
        !is_used && self.deferred.is_empty() && self.unlogged == (0, 0)
    }

    pub fn spend(&mut self, bytes: usize) {
        self.refill();
        self.allowance = self.allowance.saturating_sub(bytes);
    }

    /// Keeps the newest report of an instance for later.
    pub fn defer(&mut self, instance: InstanceKey, value: Vec<u8>) {
        self.settle(&instance);
        self.deferred_bytes += value.len();
        self.deferred.insert(instance, value);
    }

    /// Drops the deferred report of an instance.
    pub fn settle(&mut self, instance: &InstanceKey) {
        if let Some(value) = self.deferred.remove(instance) {
            self.deferred_bytes -= value.len();
        }
    }

    /// Counts ignored and deferred reports. Returns the counts to log, if it is time.
    pub fn count(&mut self, ignored: usize, deferred: usize) -> Option<(usize, usize)> {
        self.unlogged.0 += ignored;
        self.unlogged.1 += deferred;
        if self.unlogged == (0, 0) || self.logged.is_some_and(|at| at.elapsed() < LOG_INTERVAL) {
            return None;
        }
        self.logged = Some(Instant::now());
        Some(std::mem::take(&mut self.unlogged))
    }
}

impl ReportUsage {
    fn hosts(&self) -> MutexGuard<'_, HashMap<HostKey, HostState>> {
        self.hosts.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn counted(&self) -> MutexGuard<'_, Option<Instant>> {
        self.counted.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn of(&self, host: &HostKey) -> HostUsage {
        self.change(host, |state| {
            state.refill();
            let HostState { bytes, instances, allowance, deferred_bytes, .. } = *state;
            HostUsage { bytes, instances, allowance, deferred_bytes }
        })
    }

    pub fn change<T>(&self, host: &HostKey, change: impl FnOnce(&mut HostState) -> T) -> T {
        change(self.hosts().entry(host.clone()).or_default())
    }

    /// Deferred reports of these hosts that the rate allows now. They stay deferred until their commit.
    pub fn due(&self, hosts: &[HostKey]) -> Vec<Report> {
        let mut all = self.hosts();
        let mut due = Vec::new();
        for host in hosts {
            let Some(state) = all.get_mut(host).filter(|state| !state.deferred.is_empty()) else { continue };
            state.refill();
            let mut left = state.allowance;
            for value in state.deferred.values() {
                // A new instance is written up to three times.
                let Some(rest) = left.checked_sub(3 * value.len()) else { break };
                left = rest;
                due.extend(serde_json::from_slice::<Report>(value).ok());
            }
        }
        due
    }

    /// Forgets the deferred reports of these hosts: their agent reports all instances.
    pub fn forget_deferred(&self, hosts: &[HostKey]) {
        let mut all = self.hosts();
        for host in hosts {
            if let Some(state) = all.get_mut(host) {
                state.deferred.clear();
                state.deferred_bytes = 0;
            }
        }
    }

    /// Forgets hosts without reports and without a used allowance: a host's name is the choice of its agent.
    pub fn forget_idle(&self) {
        self.hosts().retain(|_, state| {
            state.refill();
            !state.is_idle()
        });
    }

    pub fn count(&self, ignored: usize) {
        self.ignored.fetch_add(ignored as u64, Ordering::Relaxed);
    }

    /// Reports ignored since the start.
    pub fn ignored(&self) -> u64 {
        self.ignored.load(Ordering::Relaxed)
    }
}

impl<S: Store> Gateway<S> {
    /// Counts the rows of all hosts, unless they were counted.
    pub(super) async fn count_reports(&self) -> Result<(), ApiError> {
        if self.report_usage.counted().is_none() {
            self.recount_reports().await?;
        }
        Ok(())
    }

    /// Counts the rows of all hosts again. `false`: they were counted a moment ago.
    pub(super) async fn recount_reports(&self) -> Result<bool, ApiError> {
        {
            let mut counted = self.report_usage.counted();
            if counted.is_some_and(|at| at.elapsed() < RECOUNT_INTERVAL) {
                return Ok(false);
            }
            *counted = Some(Instant::now());
        }
        let mut found: HashMap<HostKey, (usize, usize)> = HashMap::new();
        for prefix in [keys::REPORT_PREFIX, keys::FAILED_START_PREFIX, keys::REGISTRATION_PREFIX] {
            let mut after: Option<std::sync::Arc<str>> = None;
            loop {
                let page = self.store.range(prefix, after.as_deref(), PAGE).await?;
                for entry in &page.entries {
                    let host = entry.key.splitn(4, '/').nth(3);
                    let Some(host) = host.and_then(|host| host.parse().ok()) else { continue };
                    let (bytes, instances) = found.entry(host).or_default();
                    *bytes += entry.value.len();
                    *instances += usize::from(prefix != keys::REGISTRATION_PREFIX);
                }
                after = page.more;
                if after.is_none() {
                    break;
                }
            }
        }
        let mut hosts = self.report_usage.hosts();
        for (host, state) in hosts.iter_mut() {
            (state.bytes, state.instances) = found.remove(host).unwrap_or_default();
        }
        for (host, (bytes, instances)) in found {
            hosts.insert(host, HostState { bytes, instances, ..HostState::default() });
        }
        Ok(true)
    }
}
