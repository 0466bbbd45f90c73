//! Row deadlines: a row becomes final even if its connected agent never returns a result.
//!
//! The deadline is a duration from the time a gateway accepted or loaded the task. It is the sum of the agent
//! timeout, the spec's timeouts for commands and checks, the operations queued before it, and an allowance. The agent
//! may still run the operation. A late result replaces the row, as for 117.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::tasks::{GatewayTask, ItemResult, TaskItem};
use super::{ApiError, Gateway};
use crate::agent_protocol::AgentOp;
use crate::gse::codes::RowCode;
use crate::model::{HostKey, InstanceKey, Monitor};
use crate::store::{Store, TxnOutcome, keys};

/// Commands that an agent runs concurrently; further operations on a host queue.
const MAX_CONCURRENT_COMMANDS: u32 = 64;

/// Time that the currently open operations may take, per host and instance.
#[derive(Default)]
struct QueuedWork {
    by_host: HashMap<HostKey, Duration>,
    by_instance: HashMap<InstanceKey, Duration>,
}

impl QueuedWork {
    fn of(tasks: &[Arc<GatewayTask>]) -> QueuedWork {
        let mut ahead = QueuedWork::default();
        for (task, nth) in
            tasks.iter().flat_map(|task| task.open_rows().into_iter().map(move |nth| (task, nth)))
        {
            let item = &task.items[nth];
            let takes = max_operation_time(item);
            *ahead.by_host.entry(item.instance.host.clone()).or_default() += takes;
            *ahead.by_instance.entry(item.instance.clone()).or_default() += takes;
        }
        ahead
    }

    /// Operations on one instance run sequentially.
    fn delay_of(&self, item: &TaskItem) -> Duration {
        let host =
            self.by_host.get(&item.instance.host).copied().unwrap_or_default() / MAX_CONCURRENT_COMMANDS;
        host + self.by_instance.get(&item.instance).copied().unwrap_or_default().max(max_operation_time(item))
    }
}

/// Maximum duration of an operation by its spec.
fn max_operation_time(item: &TaskItem) -> Duration {
    let monitor = item.held.as_ref().map(|held| &held.spec.monitor);
    let timeout = monitor.and_then(|monitor| monitor.op_timeout).unwrap_or(Monitor::OP_TIMEOUT);
    let start = monitor.and_then(|monitor| monitor.start_check_secs).unwrap_or(Monitor::START_CHECK_SECS);
    let stop = monitor.and_then(|monitor| monitor.stop_check_secs).unwrap_or(Monitor::STOP_CHECK_SECS);
    let spec = item.held.as_ref().map(|held| &held.spec);
    let launch_hooks = spec.map_or(0, |spec| spec.hooks.launch_seconds(&spec.monitor));
    let stop_hook = spec.map_or(0, |spec| spec.hooks.stop_seconds(&spec.monitor));
    let (starting, stopping) = (start.saturating_add(launch_hooks), stop.saturating_add(stop_hook));
    let (commands, checks) = match &item.op {
        Some(AgentOp::Start) => (1, starting),
        Some(AgentOp::Stop) => (1, stopping),
        Some(AgentOp::Kill) => (1, stop),
        Some(AgentOp::Restart) => (2, starting.saturating_add(stopping)),
        Some(AgentOp::Reload) => (1, 0),
        Some(AgentOp::Status | AgentOp::Host | AgentOp::Unhost | AgentOp::Rename { .. }) | None => (0, 0),
    };
    Duration::from_secs(u64::from(timeout) * commands + u64::from(checks))
}

impl<S: Store> Gateway<S> {
    /// Ends rows past their deadline with 1900504. Returns their number.
    pub async fn expire_rows(&self) -> Result<usize, ApiError> {
        let open = self.tasks.unfinished();
        // Computed once per task, when it is new: it waits only for operations queued before it.
        if open.iter().any(|task| task.deadlines.get().is_none()) {
            let ahead = QueuedWork::of(&open);
            for task in open.iter().filter(|task| task.deadlines.get().is_none()) {
                let of =
                    |item: &TaskItem| self.timeouts.agent + self.timeouts.allowance + ahead.delay_of(item);
                let _ = task.deadlines.set(task.items.iter().map(of).collect());
            }
        }
        let mut expired = 0;
        for task in open {
            let Some(deadlines) = task.deadlines.get() else { continue };
            let age = task.accepted.elapsed();
            if age <= self.timeouts.agent + self.timeouts.allowance {
                continue;
            }
            let is_late = |nth: &usize| deadlines.get(*nth).is_some_and(|deadline| age > *deadline);
            let late: Vec<(usize, ItemResult)> = task
                .open_rows()
                .into_iter()
                .filter(is_late)
                .map(|nth| (nth, no_result(deadlines[nth])))
                .collect();
            if late.is_empty() {
                continue;
            }
            let rows: Vec<(usize, &ItemResult)> = late.iter().map(|(nth, done)| (*nth, done)).collect();
            let txn = self.finished(&task, &rows)?;
            // A concurrent write of a result wins: the next pass evaluates the row again.
            let txn = match task.is_live_check() {
                true => txn,
                false => {
                    late.iter().fold(txn, |txn, (nth, _)| txn.only_if(keys::row_result(&task.id, *nth), 0))
                }
            };
            if !txn.writes.is_empty() && matches!(self.store.txn(txn).await?, TxnOutcome::Conflict(_)) {
                continue;
            }
            expired += late.len();
            for (nth, _) in &late {
                let item = &task.items[*nth];
                tracing::warn!(task = %task.id, instance = %item.instance, op = ?item.op, "the agent returned no result before the deadline");
            }
            // A result that arrived during the commit is kept.
            for (nth, done) in late.into_iter().filter(|(nth, _)| task.is_unfinished(*nth)) {
                task.finish(nth, done);
            }
        }
        self.metrics.count_expired(expired);
        Ok(expired)
    }
}

fn no_result(deadline: Duration) -> ItemResult {
    let message = format!(
        "the agent is connected and gave no result within {} s: the operation may have run, or may still run",
        deadline.as_secs()
    );
    ItemResult { given_up: true, ..ItemResult::new(RowCode::NO_RESULT, message) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent_protocol::OwnedSpec;
    use crate::model::{Hook, Hooks, Spec};

    #[test]
    fn the_time_of_a_hook_is_part_of_the_deadline_of_a_launch() {
        let item = |op: AgentOp, hooks: Hooks| TaskItem {
            op: Some(op),
            instance: "0:10.0.0.1:web:api".parse().expect("a key"),
            supplier: None,
            written: None,
            job_key: None,
            takes: None,
            repairs: false,
            supervises: false,
            spec: None,
            held: Some(OwnedSpec {
                spec: Arc::new(Spec { hooks, ..Spec::default() }),
                owner: None,
                revision: None,
            }),
            owner: None,
            app: None,
            generation: None,
            refused: None,
        };
        let hook = |timeout| Some(Hook { run: "./work".to_owned(), timeout, ..Hook::default() });
        let added = |op: AgentOp, hooks: Hooks| {
            max_operation_time(&item(op.clone(), hooks)) - max_operation_time(&item(op, Hooks::default()))
        };
        let before = |timeout| Hooks { before_start: hook(timeout), ..Hooks::default() };
        assert_eq!(added(AgentOp::Start, before(Some(300))), Duration::from_secs(300));
        assert_eq!(added(AgentOp::Restart, before(None)), Duration::from_secs(Monitor::OP_TIMEOUT.into()));
        assert_eq!(added(AgentOp::Stop, before(Some(300))), Duration::ZERO);
        let all =
            Hooks { before_start: hook(Some(1)), before_stop: hook(Some(20)), after_start: hook(Some(300)) };
        for (op, secs) in [
            (AgentOp::Start, 301),
            (AgentOp::Stop, 20),
            (AgentOp::Restart, 321),
            (AgentOp::Kill, 0),
            (AgentOp::Reload, 0),
        ] {
            assert_eq!(added(op.clone(), all.clone()), Duration::from_secs(secs), "{op:?}");
        }
    }
}
