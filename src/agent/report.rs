//! What a keeper tells of its instance: a report whenever something changed, and a live look.

use std::time::Duration;

use serde_json::{Value, json};

use super::adoption::not_owned;
use super::instance::{InstanceTask, read_clocks};
use super::meter::Meter;
use super::now_ms;
use super::process::cmdline;
use super::restart_policy::Phase;
use super::state::ProcessRun;
use crate::gse::agent_protocol::{AgentMessage, OwnedSpec, Report, ReportedRun};
use crate::gse::response::{LiveInstance, LiveProcess, LiveStatus};
use crate::model::{AutoType, Time};

/// Maximum wait for a pid file before a report: a report with the last known value is better than a late one.
const OBSERVE_TIMEOUT: Duration = Duration::from_secs(1);

impl InstanceTask {
    /// Observes whether a process runs under this identity that is not the agent's, for the next report.
    pub(super) async fn observe_foreign_process(&mut self) {
        let observed = match &self.state.given {
            Some(given) => tokio::time::timeout(OBSERVE_TIMEOUT, self.foreign_pid(given)).await,
            None => Ok(Ok(None)),
        };
        if let Ok(Ok(pid)) = observed {
            self.stranger_pid = pid;
        }
    }

    pub(super) fn report(&self) {
        let row = &self.state;
        let failed = matches!(self.series.phase, Phase::Failed { .. });
        let now = read_clocks();
        let next = match self.series.phase {
            Phase::Idle => self.next.filter(|_| row.hosted).map(|next| next.wall_time(now)),
            Phase::Waiting { until } | Phase::Failed { until } => {
                Some(now.wall.saturating_add(until.saturating_sub(now.passed)))
            }
        };
        let kind = row.given.as_ref().map(|given| given.spec.monitor.auto_type);
        let (once, ends) =
            (kind == Some(AutoType::OneShot), kind.is_some_and(|kind| kind != AutoType::Resident));
        let asks = row.run.as_ref().is_some_and(|run| run.live.spec.control.health_cmd.is_some());
        let mut message = row.message.clone();
        let health = match (self.is_running(), row.exit) {
            (true, _) if !asks => "Healthy",
            (true, _) => match &self.monitors.health {
                None => "Starting",
                Some(Ok(())) => "Healthy",
                Some(Err(why)) => {
                    message = format!("health_cmd: {why}");
                    "Degraded"
                }
            },
            _ if failed => "Failed",
            (false, Some(code)) if ends && code != 0 => "Failed",
            (false, Some(_)) if ends => "Healthy",
            (false, None) if ends => "NotReported",
            (false, _) if row.hosted => "Degraded",
            (false, _) => "NotReported",
        };
        let pid = self.hold.as_ref().map(|hold| hold.identity.pid);
        let stranger = self.stranger_pid.filter(|_| !self.is_running() && row.given.is_some());
        if let Some(pid) = stranger {
            message = not_owned(pid);
        }
        let report = Report {
            instance: self.key.clone(),
            at: now_ms(),
            hosted: row.hosted,
            given: row.given.clone().filter(|_| row.hosted || row.run.is_some()),
            pid,
            live: row.run.as_ref().map(|run| run.live.clone()),
            ran: once.then(|| match &row.unknown_run {
                Some(_) => ReportedRun::Unknown,
                None => row.ran.clone().map_or(ReportedRun::Never, ReportedRun::With),
            }),
            health: health.to_owned(),
            since: row.since,
            started: row.started,
            message,
            version: self.monitors.version.clone(),
            exit: row.exit,
            next,
            cpu: self.monitors.share.map_or(0.0, |share| share.cpu),
            mem: self.monitors.share.map_or(0.0, |share| share.mem),
            config: self.monitors.config.clone(),
            stranger,
        };
        let _ = self.shared.up.send(AgentMessage::Report(Box::new(report)));
    }

    /// A live look, as operation 2 tells it.
    pub(super) async fn live_status(&self, held: &OwnedSpec) -> Result<Value, String> {
        let stranger = self.foreign_pid(held).await?;
        let pid = self.hold.as_ref().map(|hold| hold.identity.pid).or(stranger);
        let group = self.state.run.as_ref().and_then(ProcessRun::group);
        let share = pid
            .map(|pid| Meter::average_since_start(pid, group.as_ref(), self.state.started))
            .unwrap_or_default();
        let instance = LiveInstance {
            pid: pid.map_or(-1, i64::from),
            is_auto: self.state.hosted && stranger.is_none(),
            process_name: held.spec.identity.proc_name.clone(),
            cmdline: pid.map(|pid| cmdline(pid).join(" ")).unwrap_or_default(),
            start_time: pid
                .filter(|_| stranger.is_none())
                .map(|_| Time(self.state.started).to_string())
                .unwrap_or_default(),
            elapsed_time: Value::Null,
            cpu_usage: share.cpu,
            phy_mem_usage: share.mem,
            not_owned: stranger.is_some(),
        };
        let ip = match &self.key.host {
            crate::model::HostKey::Address { ip, .. } => ip.to_string(),
            crate::model::HostKey::Agent(id) => id.to_string(),
        };
        let process =
            LiveProcess { procname: held.spec.identity.proc_name.clone(), instance: vec![instance] };
        Ok(json!(LiveStatus { ip, utctime: Time(now_ms()).to_string(), timezone: 0, process: vec![process] }))
    }
}
