//! Health of an instance: from its health check, its exit, its restarts and its supervision.

use super::InstanceTask;
use crate::agent::health::HealthSettings;
use crate::agent::restart_policy::{Completion, Phase};
use crate::model::AutoType;

impl InstanceTask {
    /// The health of the instance, as a word of `get processes`.
    pub(super) fn health(&self) -> &'static str {
        let state = &self.state;
        let failed = matches!(self.launches.series.phase, Phase::Failed { .. });
        let kind = state.given.as_ref().map(|given| given.spec.monitor.auto_type);
        let ends = kind.is_some_and(|kind| kind != AutoType::Resident);
        let live = state.run.as_ref().map(|run| &run.live.spec);
        let has_health_check = live.is_some_and(|spec| HealthSettings::of(spec).is_some());
        match (self.is_running(), state.exit) {
            (true, _) if !has_health_check => "Healthy",
            (true, _) => self.monitors.health.health.word(),
            _ if state.completed == Some(Completion::Success) => "Healthy",
            _ if state.completed == Some(Completion::Failure) || failed => "Failed",
            (false, Some(code)) if ends && code != 0 => "Failed",
            (false, Some(_)) if ends => "Healthy",
            (false, None) if ends => "NotReported",
            (false, _) if state.hosted => "Degraded",
            (false, _) => "NotReported",
        }
    }

    /// Reason why the last health check of the running process failed.
    pub(super) fn health_message(&self) -> Option<String> {
        let live = &self.state.run.as_ref().filter(|_| self.is_running())?.live.spec;
        HealthSettings::of(live)?;
        let Some(Err(why)) = &self.monitors.health.last else { return None };
        let check = if live.control.health_cmd.is_some() { "health_cmd" } else { "health check" };
        Some(format!("{check}: {why}"))
    }
}
