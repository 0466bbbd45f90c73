//! Monitoring of a running process: resource usage, health, version and configuration files.
//!
//! Each monitor runs only if the spec or a pool asks for it. A process without monitors causes no wake-ups.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tracing::warn;

use super::InstanceTask;
use super::ending::stop_signal;
use crate::agent::checks::{self, CheckResult, CheckTask, CheckedProcess, FileSums};
use crate::agent::figures::tree_usage::MeasuredTree;
use crate::agent::health::{HealthFailure, HealthSettings, HealthState, ProbeResult};
use crate::agent::meter::{
    HostShare, Meter, SAMPLE_INTERVAL, check_limits, cpu_limit, is_limited, megabytes, mem_limit, memory,
};
use crate::agent::restart_policy::RestartEvent;
use crate::agent::state::LIMIT_STOP;
use crate::agent_protocol::{ConfigState, ReportedProbe};
use crate::clock;
use crate::gse::codes::RowCode;
use crate::model::StartMode;

/// Interval between two trims of the captured output of a daemon, and of a foreground process, which is also bounded while it
/// writes.
const TRIM_INTERVALS: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(60));

/// Minimum interval between reports whose only news is the output of a successful probe.
const OUTPUT_INTERVAL: Duration = Duration::from_secs(60);
/// Bytes of a probe's output that are kept: its end.
const OUTPUT_BYTES: usize = 1024;

/// First and longest interval between two observations of the descendants of a process without a control group.
const OBSERVE_INTERVALS: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

/// The last results of the monitors of a running process, and their next times.
#[derive(Default)]
pub(super) struct Monitors {
    pub(super) meter: Meter,
    pub(super) share: Option<HostShare>,
    /// The health by the probes so far.
    pub(super) health: HealthState,
    pub(super) probe: ProbeMonitor,
    pub(super) version: String,
    pub(super) config: Vec<(String, ConfigState)>,
    files: FileSums,
    check_count: u32,
    pub(super) check_task: Option<CheckTask>,
    pub(super) due: MonitorTimes,
    pub(super) descent: DescentMonitor,
}

/// Times of the next measurements; `None`: not planned.
#[derive(Default)]
pub(super) struct MonitorTimes {
    pub(super) sample: Option<Instant>,
    pub(super) check: Option<Instant>,
    pub(super) trim: Option<Instant>,
}

/// The last probe, for reports.
#[derive(Default)]
pub(super) struct ProbeMonitor {
    pub(super) last: Option<ReportedProbe>,
    /// Time of the last report.
    pub(super) reported: Option<Instant>,
}

impl ProbeMonitor {
    /// Replaces the last probe. True: its output is to be reported. Output that differs each time, such as a time, must
    /// not cause a report per probe.
    fn replace(&mut self, result: &ProbeResult) -> bool {
        let (success, output) = match result {
            Ok(output) => (true, output.clone()),
            Err(failure) => (false, failure.to_string()),
        };
        let output = output.trim_end();
        let output =
            output[output.ceil_char_boundary(output.len().saturating_sub(OUTPUT_BYTES))..].to_owned();
        let is_new = self.last.as_ref().is_none_or(|last| (last.success, &last.output) != (success, &output));
        self.last = Some(ReportedProbe { at: clock::now().0, success, output });
        let is_due = self.reported.is_none_or(|at| at.elapsed() >= OUTPUT_INTERVAL);
        is_new && (!success || is_due)
    }
}

/// Observation of the descendants of a process without a control group.
#[derive(Default)]
pub(super) struct DescentMonitor {
    pub(super) at: Option<Instant>,
    /// Observations so far.
    count: u32,
}

impl InstanceTask {
    /// Schedules the monitors that the spec or a pool asks for, and cancels the others.
    pub(super) fn schedule_checks(&mut self) {
        let now = Instant::now();
        let live = self.state.run.as_ref().filter(|_| self.handle.is_some()).map(|run| &run.live.spec);
        let limited = live.is_some_and(|spec| is_limited(spec));
        let pooled = live.is_some() && self.state.hosted && self.shared.resources.pools.has(&self.key);
        let has_checks = live.is_some_and(|spec| checks::has_any(spec));
        let is_daemon =
            live.is_none_or(|spec| spec.control.start_mode.unwrap_or_default() == StartMode::Daemon);
        let is_ungrouped = live.is_some() && self.state.run.as_ref().is_some_and(|run| run.group.is_none());
        let interval =
            live.and_then(|spec| HealthSettings::of(spec)).map_or(self.shared.check_interval, |settings| {
                settings.next_interval(&self.monitors.health, self.shared.check_interval)
            });
        let monitors = &mut *self.monitors;
        let plan = |at: &mut Option<Instant>, wanted: bool, after: Duration| match wanted {
            true => drop(at.get_or_insert(now + after)),
            false => *at = None,
        };
        plan(&mut monitors.due.sample, limited && self.state.hosted || pooled, SAMPLE_INTERVAL);
        let after = if monitors.check_count == 0 { checks::FIRST_CHECK_DELAY } else { interval };
        plan(&mut monitors.due.check, has_checks && monitors.check_task.is_none(), after);
        let trim_interval = if is_daemon { TRIM_INTERVALS.0 } else { TRIM_INTERVALS.1 };
        plan(&mut monitors.due.trim, self.output.is_some(), trim_interval);
        let after = OBSERVE_INTERVALS.0.saturating_mul(1 << monitors.descent.count.min(16));
        plan(&mut monitors.descent.at, is_ungrouped, after.min(OBSERVE_INTERVALS.1));
    }

    /// Records descendants that have left the session of the process: without a control group, nothing else proves later
    /// that they belong to it.
    pub(super) async fn observe_descendants(&mut self) {
        let descent = &mut self.monitors.descent;
        (descent.at, descent.count) = (None, descent.count.saturating_add(1));
        let (Some(handle), Some(run)) = (&self.handle, &mut self.state.run) else { return };
        if run.traces.observe(handle) {
            self.write(None).await;
        }
    }

    /// Registers the process for the sampling of its figures.
    pub(super) fn register_figures(&self) {
        let process = self.handle.as_ref().map(|handle| (handle.identity.pid, handle.identity.started));
        if !self.figures.has(&self.key, process) {
            self.figures.set(&self.key, self.measured_tree());
        }
    }

    /// The tree of the process, for measurements.
    pub(super) fn measured_tree(&self) -> Option<MeasuredTree> {
        let (Some(handle), Some(run)) = (&self.handle, &self.state.run) else { return None };
        Some(MeasuredTree::of(handle, run))
    }

    /// The exceeded memory limit of a process that the kernel killed for it.
    pub(super) fn kernel_limit(&self) -> Option<String> {
        let run = self.state.run.as_ref()?;
        let limit = mem_limit(&run.live.spec)? / 100.0 * memory() as f64;
        let is_killed = run.group()?.has_oom_kill();
        is_killed.then(|| format!("memory limit of {}: killed by the kernel", megabytes(limit)))
    }

    /// Samples the resource usage, and stops the process if it exceeds a limit.
    pub(super) async fn sample(&mut self) {
        self.monitors.due.sample = None;
        let (Some(tree), Some(run)) = (self.measured_tree(), &self.state.run) else { return };
        let live = run.live.clone();
        let Ok(share) = self.monitors.meter.sample(&tree).await else { return };
        self.monitors.share = Some(share);
        let (cpu, mem) = (cpu_limit(&live.spec), mem_limit(&live.spec));
        let excess;
        (self.monitors.meter.counts, excess) = check_limits(self.monitors.meter.counts, share, cpu, mem);
        let pooled = self.shared.resources.pools.report_usage(&self.key, (share, cpu, mem), Instant::now());
        let (detail, why) = match (excess, pooled) {
            (Some(excess), _) => {
                let detail = excess.detail(&live.spec);
                (detail.clone(), format!("process was over its {} limit: {detail}", excess.resource()))
            }
            (None, Some(why)) => (why.clone(), why),
            (None, None) => return,
        };
        warn!(instance = %self.key, %why, "stopping process: resource limit exceeded");
        // Written before the signal: an agent that is killed in between leaves stopped processes (SIGSTOP), which the next
        // one ends.
        self.state.ending = Some(format!("{LIMIT_STOP}{detail}"));
        self.write(None).await;
        let signal = stop_signal(&live.spec);
        let reply =
            self.stop_process(&live, live.spec.control.stop_cmd.as_deref(), signal, Err(&detail)).await;
        if reply.0 != RowCode::DONE && self.is_running() {
            // A stop_cmd that fails must not let the process keep its resources.
            let _ = self.stop_process(&live, None, Signal::KILL, Err(&detail)).await;
        }
        (self.state.message, self.state.ending) = (why, None);
        if !self.is_running() {
            self.apply_restart_policy(RestartEvent::Ended { up_ms: 0 }).await;
        }
    }

    /// Completes a stop by a limit that an earlier agent began.
    pub(super) async fn finish_limit_stop(&mut self) {
        let ending = self.state.ending.take_if(|ending| ending.starts_with(LIMIT_STOP));
        let Some(detail) = ending.as_deref().and_then(|ending| ending.strip_prefix(LIMIT_STOP)) else {
            return;
        };
        let (true, Some(run)) = (self.handle.is_some(), &self.state.run) else { return };
        let live = run.live.clone();
        warn!(instance = %self.key, detail, "stopping process: an earlier agent began it at a resource limit");
        let _ = self.stop_process(&live, None, Signal::KILL, Err(detail)).await;
        self.state.message = format!("process was over a limit: {detail}");
        if !self.is_running() {
            self.apply_restart_policy(RestartEvent::Ended { up_ms: 0 }).await;
        }
    }

    /// Starts a check of health, version and files.
    pub(super) fn start_checks(&mut self) {
        self.monitors.due.check = None;
        let (Some(handle), Some(run)) = (&self.handle, &self.state.run) else { return };
        let with_version = self.monitors.check_count.is_multiple_of(checks::CHECKS_PER_VERSION);
        self.monitors.check_count = self.monitors.check_count.saturating_add(1);
        let files = std::mem::take(&mut self.monitors.files);
        let (key, live, main) = (self.key.clone(), run.live.clone(), handle.identity.clone());
        let shared = Arc::clone(&self.shared);
        self.monitors.check_task = Some(CheckTask::spawn(async move {
            let rights = match shared.rights_of(&live.spec) {
                Ok(rights) => rights,
                Err(error) => {
                    let health = Some(Err(HealthFailure::of(&error)));
                    return CheckResult { health, files, ..CheckResult::default() };
                }
            };
            let _permit = shared.check_permits.acquire(rights.account().uid()).await;
            let process = CheckedProcess { shared: &shared, key: &key, spec: &live.spec, rights, main };
            process.check(with_version, files).await
        }));
    }

    pub(super) fn apply_check_result(&mut self, result: CheckResult) {
        let uptime = self.uptime();
        let live = self.state.run.as_ref().map(|run| &run.live.spec);
        let monitors = &mut *self.monitors;
        monitors.check_task = None;
        let CheckResult { health, version, config, files } = result;
        let settings = live.and_then(|spec| HealthSettings::of(spec));
        let health = match (health, settings) {
            (Some(result), Some(settings)) => monitors.health.after(result, uptime, &settings),
            _ => HealthState::default(),
        };
        let version = version.unwrap_or_else(|| monitors.version.clone());
        let is_new_output = match &health.last {
            Some(result) => monitors.probe.replace(result),
            None => std::mem::take(&mut monitors.probe.last).is_some(),
        };
        let old = (monitors.health.health, &monitors.version, &monitors.config);
        let changed = is_new_output || old != (health.health, &version, &config);
        (monitors.health, monitors.version, monitors.config, monitors.files) =
            (health, version, config, files);
        if changed {
            if let Some(Err(why)) = &self.monitors.health.last {
                warn!(instance = %self.key, %why, health = self.monitors.health.health.word(), "health check failed");
            }
            self.report();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_successful_probes_is_reported_at_most_once_per_interval() {
        let mut monitor = ProbeMonitor::default();
        assert!(monitor.replace(&Ok("1\n".to_owned())), "never reported");
        monitor.reported = Some(Instant::now());
        for second in 2..100 {
            assert!(!monitor.replace(&Ok(format!("{second}\n"))));
        }
        let last = monitor.last.as_ref().expect("a probe");
        assert_eq!((last.success, last.output.as_str()), (true, "99"), "the last one is kept");
        monitor.reported = Instant::now().checked_sub(OUTPUT_INTERVAL);
        assert!(!monitor.replace(&Ok("99".to_owned())), "nothing is new");
        assert!(monitor.replace(&Ok("100".to_owned())));
        monitor.reported = Some(Instant::now());
        let failure = HealthFailure::of(&std::io::Error::other("é".repeat(OUTPUT_BYTES)));
        assert!(monitor.replace(&Err(failure)), "a failure is reported at once");
        let last = monitor.last.as_ref().expect("a probe");
        assert_eq!((last.success, last.output.len()), (false, OUTPUT_BYTES));
    }
}
