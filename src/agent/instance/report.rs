//! Reports of an instance: sent to the gateway on every change, and the live status check (operation 2).

use std::time::Duration;

use serde_json::{Value, json};

use super::adoption::not_owned;
use super::{InstanceTask, read_clocks};
use crate::agent::error::AgentError;
use crate::agent::health::HealthSettings;
use crate::agent::meter::Meter;
use crate::agent::process::cmdline;
use crate::agent::restart_policy::{Completion, Phase};
use crate::agent::state::ProcessRun;
use crate::agent_protocol::{AgentMessage, OwnedSpec, Report, ReportedRun};
use crate::clock;
use crate::gse::response::{LiveFigures, LiveInstance, LiveProcess, LiveStatus};
use crate::model::{AutoType, Time};
use crate::proc::ProcStat;

/// Maximum wait for a pid file before a report: a report with the last known value is better than a late one.
const OBSERVE_TIMEOUT: Duration = Duration::from_secs(1);

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
        let failed = matches!(self.launches.series.phase, Phase::Failed { .. });
        let now = read_clocks();
        let next = match self.launches.series.phase {
            Phase::Idle => self.launches.next.filter(|_| state.hosted).map(|next| next.wall_time(now)),
            Phase::Waiting { until } | Phase::Failed { until } => {
                Some(now.wall.saturating_add(until.saturating_sub(now.passed)))
            }
        };
        let kind = state.given.as_ref().map(|given| given.spec.monitor.auto_type);
        let (once, ends) =
            (kind == Some(AutoType::OneShot), kind.is_some_and(|kind| kind != AutoType::Resident));
        let live = state.run.as_ref().map(|run| &run.live.spec);
        let has_health_check = live.is_some_and(|spec| HealthSettings::of(spec).is_some());
        let mut message = state.message.clone();
        if let Some(failed) = state.history.failed_start.as_ref().filter(|_| !self.is_running()) {
            message.clone_from(&failed.message);
        }
        let health = match (self.is_running(), state.exit) {
            (true, _) if !has_health_check => "Healthy",
            (true, _) => {
                if let Some(Err(why)) = &self.monitors.health.last {
                    let is_command = live.is_some_and(|spec| spec.control.health_cmd.is_some());
                    let check = if is_command { "health_cmd" } else { "health check" };
                    message = format!("{check}: {why}");
                }
                self.monitors.health.health.word()
            }
            _ if state.completed == Some(Completion::Success) => "Healthy",
            _ if state.completed == Some(Completion::Failure) || failed => "Failed",
            (false, Some(code)) if ends && code != 0 => "Failed",
            (false, Some(_)) if ends => "Healthy",
            (false, None) if ends => "NotReported",
            (false, _) if state.hosted => "Degraded",
            (false, _) => "NotReported",
        };
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
            cpu: self.monitors.share.map_or(0.0, |share| share.cpu),
            mem: self.monitors.share.map_or(0.0, |share| share.mem),
            config: self.monitors.config.clone(),
            stranger: foreign_pid,
            history: state.history.clone(),
        };
        let _ = self.shared.up.send(AgentMessage::Report(Box::new(report)));
    }

    /// The live status check, in the format of operation 2.
    pub(super) async fn live_status(&self, owned: &OwnedSpec) -> Result<Value, AgentError> {
        let foreign_pid = self.foreign_pid(owned).await?;
        let pid = self.handle.as_ref().map(|handle| handle.identity.pid).or(foreign_pid);
        let group = self.state.run.as_ref().and_then(ProcessRun::group);
        let share = pid
            .map(|pid| Meter::average_since_start(pid, group.as_ref(), self.state.started))
            .unwrap_or_default();
        let instance = LiveInstance {
            pid: pid.map_or(-1, i64::from),
            is_auto: self.state.hosted && foreign_pid.is_none(),
            process_name: owned.spec.identity.proc_name.clone(),
            cmdline: pid.map(|pid| cmdline(pid).join(" ")).unwrap_or_default(),
            start_time: pid
                .filter(|_| foreign_pid.is_none())
                .map(|_| Time(self.state.started).to_string())
                .unwrap_or_default(),
            // 0 for a process that this agent did not start, and for none.
            elapsed_time: json!(match pid.filter(|_| foreign_pid.is_none()) {
                Some(_) => clock::now().0.saturating_sub(self.state.started).max(0) / 1000,
                None => 0,
            }),
            cpu_usage: share.cpu,
            phy_mem_usage: share.mem,
            figures: Box::new(self.live_figures(pid, foreign_pid.is_some(), share.cpu)),
            not_owned: foreign_pid.is_some(),
        };
        let ip = match &self.key.host {
            crate::model::HostKey::Address { ip, .. } => ip.to_string(),
            crate::model::HostKey::Agent(id) => id.to_string(),
        };
        let utctime = Time(clock::now().0).to_string();
        let process =
            LiveProcess { procname: owned.spec.identity.proc_name.clone(), instance: vec![instance] };
        Ok(json!(LiveStatus {
            ip,
            utctime: utctime.clone(),
            utctime2: utctime.replace('T', " ").trim_end_matches('Z').to_owned(),
            timezone: 0,
            process: vec![process]
        }))
    }

    /// What /proc has of a process. The health of one that is not owned is unknown.
    fn live_figures(&self, pid: Option<u32>, is_foreign: bool, cpu_usage_ave: f64) -> LiveFigures {
        let Some(stat) = pid.and_then(ProcStat::of) else { return LiveFigures::default() };
        let live = self.state.run.as_ref().map(|run| &run.live.spec);
        let health = match live.is_some_and(|spec| HealthSettings::of(spec).is_some()) {
            _ if is_foreign => "",
            true => self.monitors.health.health.word(),
            false => "Healthy",
        };
        let resident = stat.resident_pages.saturating_mul(rustix::param::page_size() as u64);
        LiveFigures {
            version: if is_foreign { String::new() } else { self.monitors.version.clone() },
            health: health.to_owned(),
            cpu_usage_ave,
            use_phy_mem: resident / 1024,
            free_v_mem: (stat.virtual_bytes.saturating_sub(resident) / 1024).to_string(),
            thread_count: stat.threads,
            disk_size: -1,
            stat: stat.state.to_string(),
            utime: stat.user_ticks.to_string(),
            stime: stat.cpu_ticks.saturating_sub(stat.user_ticks).to_string(),
        }
    }
}
