//! What a keeper tells of its instance: a report whenever something changed, and a live look.

use serde_json::{Value, json};

use super::keeper::Keeper;
use super::kernel::{cmdline, usage};
use super::life::Phase;
use super::now_ms;
use crate::gse::answer::{LiveInstance, LiveLook, LiveProcess};
use crate::gse::channel::{Held, Ran, Report, Told};
use crate::model::{AutoType, Time};

impl Keeper {
    pub(super) fn report(&self) {
        let row = &self.row;
        let failed = matches!(self.series.phase, Phase::Failed { .. });
        let next = match self.series.phase {
            Phase::Calm => self.next.filter(|_| row.hosted),
            Phase::Waiting { until } | Phase::Failed { until } => Some(until),
        };
        let kind = row.given.as_ref().map(|given| given.spec.monitor.auto_type);
        let (once, ends) =
            (kind == Some(AutoType::OneShot), kind.is_some_and(|kind| kind != AutoType::Resident));
        let health = match (self.is_running(), row.exit) {
            (true, _) => "Healthy",
            _ if failed => "Failed",
            (false, Some(code)) if ends && code != 0 => "Failed",
            (false, Some(_)) if ends => "Healthy",
            (false, None) if ends => "NotReported",
            (false, _) if row.hosted => "Degraded",
            (false, _) => "NotReported",
        };
        let pid = self.hold.as_ref().map(|hold| hold.identity.pid);
        let report = Report {
            instance: self.key.clone(),
            at: now_ms(),
            hosted: row.hosted,
            given: row.given.clone().filter(|_| row.hosted || row.run.is_some()),
            pid,
            live: row.run.as_ref().map(|run| run.live.clone()),
            ran: once.then(|| row.ran.clone().map_or(Ran::Never, Ran::With)),
            health: health.to_owned(),
            since: row.since,
            started: row.started,
            message: row.message.clone(),
            version: String::new(),
            exit: row.exit,
            next,
            cpu: 0.0,
            mem: 0.0,
        };
        let _ = self.shared.up.send(Told::Report(Box::new(report)));
    }

    /// A live look, as operation 2 tells it.
    pub(super) fn look(&self, held: &Held) -> Value {
        let pid = self.hold.as_ref().map(|hold| hold.identity.pid);
        let memory = pid.and_then(usage).map_or(0.0, |(bytes, _)| bytes as f64);
        let instance = LiveInstance {
            pid: pid.map_or(-1, i64::from),
            is_auto: self.row.hosted,
            process_name: held.spec.identity.proc_name.clone(),
            cmdline: pid.map(|pid| cmdline(pid).join(" ")).unwrap_or_default(),
            start_time: pid.map(|_| Time(self.row.started).to_string()).unwrap_or_default(),
            cpu_usage: 0.0,
            phy_mem_usage: memory,
        };
        let ip = match &self.key.host {
            crate::model::HostKey::Address { ip, .. } => ip.to_string(),
            crate::model::HostKey::Agent(id) => id.to_string(),
        };
        let process =
            LiveProcess { procname: held.spec.identity.proc_name.clone(), instance: vec![instance] };
        json!(LiveLook { ip, utctime: Time(now_ms()).to_string(), timezone: 0, process: vec![process] })
    }
}
