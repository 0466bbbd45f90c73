//! History of an instance: its exits with their reasons, restarts, and the last failed start.

use std::time::Instant;

use super::InstanceTask;
use crate::agent_protocol::{AgentOp, ExitReason, FailedStart, OpRequest, ProcessExit};
use crate::clock;
use crate::gse::codes::RowCode;

/// Time for which a failed start of an instance that is not registered stays visible, in milliseconds.
pub const FAILED_START_MS: i64 = 24 * 3_600_000;

/// Cause of the end of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ExitCause {
    /// The process itself, or a signal of another program.
    Itself,
    /// It ended by itself during its start check.
    StartCheck,
    /// The agent, because of a limit.
    Limit(String),
    /// The operation in progress.
    Operation,
    /// It ended while no agent ran.
    Unobserved,
}

impl InstanceTask {
    /// Records the end of the process, whose handle is still open.
    pub(super) fn add_exit(&mut self, pid: u32, code: Option<i32>, cause: ExitCause) {
        let is_signalled = self.handle.as_ref().is_some_and(|handle| handle.was_signalled());
        let (code, signal) = match code {
            Some(code) if is_signalled => (None, Some(code - 128)),
            code => (code, None),
        };
        let (reason, detail) = match cause {
            ExitCause::Limit(detail) => (ExitReason::Limit, detail),
            ExitCause::Operation => (ExitReason::Stopped, self.operation_detail()),
            ExitCause::Unobserved if code.is_none() => {
                (ExitReason::Unknown, "ended while no agent ran".to_owned())
            }
            ExitCause::StartCheck => (self.own_reason(code), "during its start check".to_owned()),
            ExitCause::Itself | ExitCause::Unobserved => (self.own_reason(code), String::new()),
        };
        let is_observed = self.handle.is_some();
        self.state.history.end_run(is_observed.then(|| clock::now().0), code, signal);
        self.state.history.add_exit(ProcessExit { at: clock::now().0, pid, code, signal, reason, detail });
    }

    /// The reason of a process that ended by itself. `code`: without a signal.
    fn own_reason(&self, code: Option<i32>) -> ExitReason {
        let live = self.state.run.as_ref().map(|run| &run.live.spec.restart);
        let is_success = |code: i32| {
            code == 0 || live.is_some_and(|rule| rule.success_codes.iter().any(|one| i32::from(*one) == code))
        };
        match code {
            Some(code) if is_success(code) => ExitReason::Ended,
            Some(_) | None => ExitReason::Crashed,
        }
    }

    /// The operation in progress, its owner and its app.
    fn operation_detail(&self) -> String {
        let Some(request) = self.progress.operation.as_ref().map(|operation| &operation.0.request) else {
            return String::new();
        };
        let mut detail = format!("operation {}", request.op.word());
        if let Some(owner) = &request.owner {
            detail.push_str(&format!(" of owner {owner}"));
        }
        if let Some(app) = &request.app {
            detail.push_str(&format!(" by app {app}"));
        }
        detail
    }

    /// Records a start or restart that failed, so that its instance is visible although it was never registered.
    pub(super) fn record_failed_start(&mut self, request: &OpRequest, code: RowCode, message: &str) {
        let starts = matches!(request.op, AgentOp::Start | AgentOp::Restart);
        let is_failure =
            code != RowCode::DONE && code != RowCode::ALREADY_RUNNING && code != RowCode::NOT_RUNNING;
        if !starts || !is_failure || self.is_running() {
            return;
        }
        let spec = request.spec.clone().or_else(|| self.state.given.clone());
        if let Some(spec) = spec {
            let failed = FailedStart { at: clock::now().0, message: message.to_owned(), spec };
            self.state.history.set_failed_start(failed);
        }
    }

    /// Drops a failed start of an instance that is not registered, once it is old.
    pub(super) fn expire_failed_start(&mut self) {
        let is_old = |failed: &FailedStart| clock::now().0.saturating_sub(failed.at) >= FAILED_START_MS;
        let history = &mut self.state.history;
        if self.state.given.is_none() && history.failed_start.as_deref().is_some_and(is_old) {
            history.failed_start = None;
            // Written by the next timer.
            self.unwritten.retry_at = Some(Instant::now());
            self.forget_unregistered();
        }
    }

    /// Forgets a registration that ended while no agent was connected. An instance that runs or is supervised keeps its
    /// spec: a gateway that lost its store registers it again. So does one that is not registered yet.
    pub(super) async fn unregister_unlisted(&mut self, as_of: u64) {
        let is_idle = self.handle.is_none() && self.state.run.is_none() && !self.state.hosted;
        let is_older = (1..=as_of).contains(&self.state.changed);
        if is_idle && is_older && self.state.given.is_some() {
            self.register_given(None);
            self.state.changed = as_of;
            self.write(None).await;
            self.forget_unregistered();
        }
    }

    /// Removes the stored outputs of an instance that is not registered and that no row of the gateway shows.
    pub(super) fn forget_unregistered(&mut self) {
        if !self.state.is_shown() {
            self.shared.logs.forget(&self.key);
        }
    }
}
