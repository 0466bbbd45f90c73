//! Reports of an instance: sent to the gateway on every change.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::adoption::not_owned;
use super::{InstanceTask, read_clocks};
use crate::agent::restart_policy::Phase;
use crate::agent::schedule::ClockReading;
use crate::agent::state::ProcessRun;
use crate::agent_protocol::{AgentFiles, AgentMessage, Report, ReportedRun, rounded_percent};
use crate::clock;
use crate::model::AutoType;

/// Number of next runs in a report.
const REPORTED_RUNS: usize = 3;
/// Maximum wait for a pid file before a report: a report with the last known value is better than a late one.
const OBSERVE_TIMEOUT: Duration = Duration::from_secs(1);
/// Message of an adopted process that has no other message.
const SPEC_UNKNOWN: &str = "runs with an unknown spec: adopted, and not restarted since";

impl InstanceTask {
    /// Observes for the next report whether a foreign process runs under this identity.
    pub(super) async fn observe_foreign_process(&mut self) {
        let observed = match &self.state.given {
            Some(given) => tokio::time::timeout(OBSERVE_TIMEOUT, self.foreign_pid(given)).await,
            None => Ok(Ok(None)),
        };
        if let Ok(Ok(pid)) = observed {
            self.pid_file.foreign_pid = pid;
        }
    }

    /// Sends the current state to the gateway.
    pub(super) fn report(&mut self) {
        self.expire_failed_start();
        let state = &self.state;
        let now = read_clocks();
        let next = match self.launches.series.phase {
            Phase::Idle => self.launches.next.filter(|_| state.hosted).map(|next| next.wall_time(now)),
            Phase::Waiting { until } | Phase::Failed { until } => {
                Some(now.wall.saturating_add(until.saturating_sub(now.passed)))
            }
        };
        let kind = state.given.as_ref().map(|given| given.spec.monitor.auto_type);
        let once = kind == Some(AutoType::OneShot);
        let mut message = self.health_message().unwrap_or_else(|| state.message.clone());
        if let Some(failed) = state.history.failed_start.as_ref().filter(|_| !self.is_running()) {
            message.clone_from(&failed.message);
        }
        let live_spec_unknown = state.run.as_ref().is_some_and(ProcessRun::is_spec_unknown);
        if live_spec_unknown && message.is_empty() {
            SPEC_UNKNOWN.clone_into(&mut message);
        }
        let health = self.health();
        let pid = self.handle.as_ref().map(|handle| handle.identity.pid);
        let foreign_pid = self.pid_file.foreign_pid.filter(|_| !self.is_running() && state.given.is_some());
        if let Some(pid) = foreign_pid {
            message = not_owned(pid);
        }
        let report = Report {
            instance: self.key.clone(),
            at: clock::now().0,
            hosted: state.hosted,
            given: state.given.clone().filter(|_| state.hosted || state.run.is_some()),
            completed: state.completed.is_some() && !self.is_running(),
            pid,
            live: state.run.as_ref().map(|run| run.live.clone()),
            live_spec_unknown,
            ran: once.then(|| match &state.unknown_run {
                Some(_) => ReportedRun::Unknown,
                None => state.ran.clone().map_or(ReportedRun::Never, ReportedRun::With),
            }),
            health: health.to_owned(),
            since: state.since,
            started: state.started,
            message,
            version: self.monitors.version.clone(),
            exit: state.exit,
            next,
            cpu: self.monitors.share.map_or(0.0, |share| rounded_percent(share.cpu)),
            mem: self.monitors.share.map_or(0.0, |share| rounded_percent(share.mem)),
            config: self.monitors.config.clone(),
            stranger: foreign_pid,
            history: state.history.clone(),
            next_runs: self.next_runs(now),
            probe: self.monitors.probe.last.clone().filter(|_| self.is_running()),
            files: self.agent_files(),
        };
        self.monitors.probe.reported = Some(Instant::now());
        let _ = self.shared.up.send(AgentMessage::Report(Box::new(report)));
    }

    /// The files that the agent keeps for the process.
    fn agent_files(&self) -> Option<AgentFiles> {
        let spec = &self.state.given.as_ref()?.spec;
        let files = self.shared.logs.files();
        let text = |path: Option<PathBuf>| path.map(|path| path.display().to_string());
        let (pid_path, log_path) = (text(files.pid_file(&self.key, spec)), text(files.log(&self.key, spec)));
        (pid_path.is_some() || log_path.is_some()).then_some(AgentFiles { pid_path, log_path })
    }

    /// The next runs of a scheduled process.
    fn next_runs(&self, now: ClockReading) -> Vec<i64> {
        let given = self.state.given.as_ref().filter(|_| self.state.hosted);
        let (Some(given), Some(next)) = (given, self.launches.next) else { return Vec::new() };
        next.upcoming(&given.spec, now, REPORTED_RUNS)
    }
}
