//! What is looked at while a process runs: how much it uses, its health, its version, its files.
//!
//! Only what somebody asked for is looked at; who sets none of it costs nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tracing::warn;

use super::InstanceTask;
use crate::agent::checks::{self, CheckResult};
use crate::agent::meter::{SAMPLE_INTERVAL, check_limits, is_limited, limit};
use crate::agent::restart_policy::RestartEvent;
use crate::gse::codes::RowCode;

/// How often what such a daemon wrote is forgotten.
const TRIM_INTERVAL: Duration = Duration::from_secs(2);

impl InstanceTask {
    /// Only what somebody asked for is looked at.
    pub(super) fn schedule_checks(&mut self) {
        let now = Instant::now();
        let live = self.state.run.as_ref().filter(|_| self.hold.is_some()).map(|run| &run.live.spec);
        let limited = live.is_some_and(|spec| is_limited(&spec.resource));
        let pooled = live.is_some() && self.state.hosted && self.shared.pools.has(&self.key);
        let looked_at = live.is_some_and(|spec| checks::has_any(spec));
        let tended = &mut *self.monitors;
        let plan = |at: &mut Option<Instant>, wanted: bool, after: Duration| match wanted {
            true => drop(at.get_or_insert(now + after)),
            false => *at = None,
        };
        plan(&mut tended.sample_at, limited && self.state.hosted || pooled, SAMPLE_INTERVAL);
        let after =
            if tended.check_count == 0 { checks::FIRST_CHECK_DELAY } else { self.shared.check_interval };
        plan(&mut tended.check_at, looked_at && tended.check_task.is_none(), after);
        plan(&mut tended.trim_at, self.output.is_some(), TRIM_INTERVAL);
    }

    /// How much it uses, and whether that is too much.
    pub(super) async fn sample(&mut self) {
        self.monitors.sample_at = None;
        let (Some(hold), Some(run)) = (&self.hold, &self.state.run) else { return };
        let (limits, live) = (run.live.spec.resource.clone(), run.live.clone());
        let share = self.monitors.meter.sample(hold.identity.pid, run.group().as_ref());
        self.monitors.share = Some(share);
        let (cpu, mem) = (limit(limits.cpu), limit(limits.mem));
        let excess;
        (self.monitors.meter.counts, excess) = check_limits(self.monitors.meter.counts, share, cpu, mem);
        let pooled = self.shared.pools.report_usage(&self.key, (share, cpu, mem), Instant::now());
        let Some(why) = excess.map(|excess| format!("it was {excess}")).or(pooled) else { return };
        warn!(instance = %self.key, %why, "stopped for its limit");
        let said = self.stop_process(&live, live.spec.control.stop_cmd.as_deref(), Signal::TERM, None).await;
        if said.0 != RowCode::DONE && self.is_running() {
            // A command that does not stop it is no way to keep what it uses.
            let _ = self.stop_process(&live, None, Signal::KILL, None).await;
        }
        self.state.message = why;
        if !self.is_running() {
            self.apply_restart_policy(RestartEvent::Ended { up_ms: 0 }).await;
        }
    }

    /// Begins a look at its health, version and files.
    pub(super) fn start_checks(&mut self) {
        self.monitors.check_at = None;
        let (Some(hold), Some(run)) = (&self.hold, &self.state.run) else { return };
        let with_version = self.monitors.check_count.is_multiple_of(checks::CHECKS_PER_VERSION);
        self.monitors.check_count = self.monitors.check_count.saturating_add(1);
        let files = std::mem::take(&mut self.monitors.files);
        let (key, live, pid) = (self.key.clone(), run.live.clone(), hold.identity.pid);
        let shared = Arc::clone(&self.shared);
        self.monitors.check_task = Some(tokio::spawn(async move {
            let rights = match shared.rights_of(&live.spec) {
                Ok(rights) => rights,
                Err(why) => return CheckResult { health: Some(Err(why)), files, ..CheckResult::default() },
            };
            let _permit = shared.check_permits.acquire(rights.account().uid()).await;
            checks::run_checks(key, live, rights, pid, with_version, files).await
        }));
    }

    pub(super) fn apply_check_result(&mut self, note: CheckResult) {
        let tended = &mut *self.monitors;
        tended.check_task = None;
        let CheckResult { health, version, config, files } = note;
        let version = version.unwrap_or_else(|| tended.version.clone());
        let changed = (&tended.health, &tended.version, &tended.config) != (&health, &version, &config);
        (tended.health, tended.version, tended.config, tended.files) = (health, version, config, files);
        if changed {
            if let Some(Err(why)) = &self.monitors.health {
                warn!(instance = %self.key, %why, "not well");
            }
            self.report();
        }
    }
}
