//! Row deadlines: a row becomes final though its agent is connected and never gives a result.
//!
//! The deadline is a duration from the moment that the task was accepted, or loaded by a restarted gateway: the wait for the
//! agent, what the spec allows its commands and checks to take, the operations ahead of it, and an allowance. The agent may
//! still carry the operation out. A late result replaces the row, as for 117.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::tasks::{GatewayTask, ItemResult, TaskItem, done_key};
use super::{ApiError, Gateway};
use crate::gse::agent_protocol::AgentOp;
use crate::gse::codes::RowCode;
use crate::model::{HostKey, InstanceKey, Monitor};
use crate::store::{Outcome, Store};

/// Commands that an agent runs at once: operations on different instances of a host wait for each other beyond that.
const MAX_CONCURRENT_COMMANDS: u32 = 64;

/// How long the operations take that are open at some moment.
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
            let order = &task.orders[nth];
            let takes = max_operation_time(order);
            *ahead.by_host.entry(order.instance.host.clone()).or_default() += takes;
            *ahead.by_instance.entry(order.instance.clone()).or_default() += takes;
        }
        ahead
    }

    /// Operations on one instance run one after the other.
    fn delay_of(&self, order: &TaskItem) -> Duration {
        let host =
            self.by_host.get(&order.instance.host).copied().unwrap_or_default() / MAX_CONCURRENT_COMMANDS;
        host + self
            .by_instance
            .get(&order.instance)
            .copied()
            .unwrap_or_default()
            .max(max_operation_time(order))
    }
}

/// The longest that an operation takes by its spec.
fn max_operation_time(order: &TaskItem) -> Duration {
    let monitor = order.held.as_ref().map(|held| &held.spec.monitor);
    let timeout = monitor.and_then(|monitor| monitor.op_timeout).unwrap_or(Monitor::OP_TIMEOUT);
    let start = monitor.and_then(|monitor| monitor.start_check_secs).unwrap_or(Monitor::START_CHECK_SECS);
    let stop = monitor.and_then(|monitor| monitor.stop_check_secs).unwrap_or(Monitor::STOP_CHECK_SECS);
    let (commands, checks) = match &order.op {
        Some(AgentOp::Start) => (1, start),
        Some(AgentOp::Stop | AgentOp::Kill) => (1, stop),
        Some(AgentOp::Restart) => (2, start.saturating_add(stop)),
        Some(AgentOp::Reload) => (1, 0),
        Some(AgentOp::Status | AgentOp::Host | AgentOp::Unhost | AgentOp::Rename { .. }) | None => (0, 0),
    };
    Duration::from_secs(u64::from(timeout) * commands + u64::from(checks))
}

impl<S: Store> Gateway<S> {
    /// Rows past their deadline end with 1900504. How many.
    pub async fn expire_rows(&self) -> Result<usize, ApiError> {
        let open = self.tasks.unfinished();
        // Counted once for a task, when it is new: the operations that are ahead of it now are all that it waits for.
        if open.iter().any(|task| task.deadlines.get().is_none()) {
            let ahead = QueuedWork::of(&open);
            for task in open.iter().filter(|task| task.deadlines.get().is_none()) {
                let of = |order: &TaskItem| self.agent_timeout + self.allowance + ahead.delay_of(order);
                let _ = task.deadlines.set(task.orders.iter().map(of).collect());
            }
        }
        let mut expired = 0;
        for task in open {
            let Some(deadlines) = task.deadlines.get() else { continue };
            let age = task.accepted.elapsed();
            if age <= self.agent_timeout + self.allowance {
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
            // A result that is being written right now is not overwritten: the next pass sees the row as it is then.
            let txn = match task.is_live_check() {
                true => txn,
                false => late.iter().fold(txn, |txn, (nth, _)| txn.only_if(done_key(&task.id, *nth), 0)),
            };
            if !txn.writes.is_empty() && matches!(self.store.txn(txn).await?, Outcome::Conflict(_)) {
                continue;
            }
            expired += late.len();
            for (nth, _) in &late {
                let order = &task.orders[*nth];
                tracing::warn!(task = %task.id, instance = %order.instance, op = ?order.op, "the agent gave no result before the deadline");
            }
            // A result that came meanwhile stands.
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
        "the agent is connected and gave no result within {} s: the operation may have been carried out, or may still be",
        deadline.as_secs()
    );
    ItemResult { given_up: true, ..ItemResult::new(RowCode::NO_RESULT, message) }
}
