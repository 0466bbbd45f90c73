//! End of an idle task: nothing of its instance is left in memory. A later task continues from the store.

use tracing::warn;

use super::{InstanceTask, QueueState, WRITE_RETRY_INTERVAL};
use crate::agent::restart_policy::Phase;
use crate::agent::state::{InstanceState, state_key};
use crate::store::{Store, decode};

impl InstanceTask {
    /// Whether nothing is left that needs the task: the gateway shows no row of the instance, and nothing runs or is due.
    pub(super) fn is_idle(&self) -> bool {
        let (progress, output, unwritten) = (&self.progress, &self.process_output, &self.unwritten);
        let has_operation =
            progress.operation.is_some() || progress.resumption.is_some() || progress.interrupted.is_some();
        let has_process = self.handle.is_some() || self.monitors.check_task.is_some() || output.is_active();
        let has_writes = !unwritten.results.is_empty()
            || !unwritten.exit_records.is_empty()
            || unwritten.retry_at.is_some();
        let is_due = self.launches.next.is_some() || self.launches.series.phase != Phase::Idle;
        !self.state.is_shown()
            && self.state.unended.is_none()
            && self.pid_file.old.is_none()
            && !(has_operation || has_process || has_writes || is_due)
    }

    /// Whether the store keeps the state of this idle task.
    pub(super) fn stored_state(&self) -> QueueState {
        match self.state.is_empty() {
            true => QueueState::Ended,
            false => QueueState::EndedWithState,
        }
    }

    /// Reads the state that an earlier task of this agent left in the store. Nothing happens before it is read.
    pub(super) async fn load_state(&mut self) {
        while std::mem::take(&mut self.progress.is_stored) {
            let key = state_key(&self.key);
            match self.shared.store.get(&key).await {
                Ok(entry) => {
                    let state = entry.map(|entry| decode::<InstanceState>(&key, &entry.value)).transpose();
                    match state {
                        Ok(state) => self.state = state.unwrap_or_default(),
                        Err(error) => warn!(instance = %self.key, %error, "cannot read a stored value"),
                    }
                }
                Err(error) => {
                    warn!(instance = %self.key, %error, "cannot read the agent's store");
                    self.progress.is_stored = true;
                    tokio::time::sleep(WRITE_RETRY_INTERVAL).await;
                }
            }
        }
    }

    /// Time until a failed start of an instance that is not registered is forgotten.
    pub(super) fn failed_start_left_ms(&self, wall: i64) -> Option<i64> {
        let failed = self.state.history.failed_start.as_ref().filter(|_| self.state.given.is_none())?;
        let left = super::history::FAILED_START_MS.saturating_sub(wall.saturating_sub(failed.at));
        // Not at once: the write may have failed.
        Some(left.max(WRITE_RETRY_INTERVAL.as_millis() as i64))
    }
}
