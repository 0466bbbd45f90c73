//! Ends of tasks: an entry when the last row of a task is final, with the rows that are not done.

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard};

use super::timestamp;
use crate::agent_protocol::AgentOp;
use crate::contract::{AuditEntry, AuditEvent, AuditFailedRow, AuditInstances};
use crate::gateway::Gateway;
use crate::gateway::tasks::{GatewayTask, ItemState, Tasks};
use crate::gse::codes::RowCode;
use crate::store::Store;

impl<S: Store> Gateway<S> {
    /// Records the tasks that ended since the last call.
    pub(in crate::gateway) fn record_ended_tasks(&self) {
        let Some(audit) = self.audit() else { return };
        for task in self.tasks.take_ended() {
            audit.record(entry_of(&task));
        }
    }

    /// Remembers a task until its end is recorded.
    pub(in crate::gateway) fn await_task_end(&self, task: &Arc<GatewayTask>) {
        if self.audit().is_some() && !task.is_live_check() {
            self.tasks.unrecorded().push(Arc::clone(task));
        }
    }

    /// The instances of a task in memory.
    pub(in crate::gateway) fn task_instances(&self, id: &str) -> Option<Vec<AuditInstances>> {
        let task = self.tasks.in_memory().get(id).cloned();
        task.map(|task| instances_of(&task))
    }
}

impl Tasks {
    fn unrecorded(&self) -> MutexGuard<'_, Vec<Arc<GatewayTask>>> {
        self.unrecorded.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn take_ended(&self) -> Vec<Arc<GatewayTask>> {
        let mut all = self.unrecorded();
        let (ended, open) = std::mem::take(&mut *all).into_iter().partition(|task| task.is_done());
        *all = open;
        ended
    }
}

/// Every instance of a task, grouped by process and operation.
fn instances_of(task: &GatewayTask) -> Vec<AuditInstances> {
    let mut groups: BTreeMap<(String, &str), Vec<String>> = BTreeMap::new();
    for item in &task.items {
        let op = item.op.as_ref().map_or("", AgentOp::word);
        let hosts = groups.entry((item.instance.process().to_string(), op)).or_default();
        hosts.push(item.instance.host.to_string());
    }
    let group =
        |((process, op), hosts): ((String, &str), _)| AuditInstances { process, op: op.to_owned(), hosts };
    groups.into_iter().map(group).collect()
}

fn entry_of(task: &GatewayTask) -> AuditEntry {
    let mut entry = AuditEntry { time: timestamp(), event: AuditEvent::Task, ..AuditEntry::default() };
    let first = task.items.first();
    let text = |value: Option<&String>| value.cloned().unwrap_or_default();
    entry.who.kind = "app".to_owned();
    entry.who.name = text(first.and_then(|item| item.app.as_ref()));
    entry.purpose.owner = text(first.and_then(|item| item.owner.as_ref()));
    entry.purpose.generation = first.and_then(|item| item.generation);
    (entry.what.call, entry.what.task) = ("task".to_owned(), task.id.clone());
    let rows = task.rows();
    for (item, row) in task.items.iter().zip(rows.iter()) {
        let code = match row {
            ItemState::Done(done) => done.code,
            ItemState::Waiting | ItemState::Sent => RowCode::RUNNING.0,
        };
        if code != RowCode::DONE.0 {
            let instance = item.instance.to_string();
            entry.result.failed.push(AuditFailedRow { instance, code });
        }
    }
    entry.what.instances = instances_of(task);
    let failed = entry.result.failed.len() + task.rejected.len();
    let is_ok = failed == 0;
    entry.result.status = if is_ok { "ok" } else { "failed" }.to_owned();
    if !is_ok {
        entry.result.message = format!("failed rows: {failed} of {}", rows.len() + task.rejected.len());
    }
    entry
}
