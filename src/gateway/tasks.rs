//! Tasks: operations in flight, with one independent row per instance.
//!
//! In the store, `task/ID` holds a task's items, `done/ID/N` each final row, and `done/ID/lost` the rows without an
//! agent. `open/ID` exists until all rows are final, so that a restart loads only open tasks. Recent tasks are also
//! in memory. A live check (operation 2) changes nothing, and its task is only in memory.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tracing::error;

use super::batch::RejectedItem;
use super::{ApiError, Gateway};
use crate::agent_protocol::{AgentOp, OpRequest, OwnedSpec, ToAgent};
use crate::clock;
use crate::gse::codes::RowCode;
use crate::gse::response::Row;
use crate::model::{HostKey, InstanceKey, ProcessKey, Spec};
use crate::store::{Entry, Error, Store, Txn, TxnOutcome, keys};

/// Maximum live checks in memory.
const MAX_LIVE_CHECKS: u64 = 10_000;
/// Maximum rows of a task: task number and row number form one increasing sequence number.
pub const MAX_ROWS: u64 = 1 << 20;

/// Additional writes in the commit of a task, given its id.
pub type TaskTxn<'a> = &'a (dyn Fn(&str) -> Result<Txn, ApiError> + Send + Sync);

/// Form of result keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyForm {
    V1,
    V2,
}

/// Tasks in memory.
#[derive(Default)]
pub struct Tasks {
    in_memory: Mutex<BTreeMap<String, Arc<GatewayTask>>>,
    live_checks: AtomicU64,
    loaded: AtomicBool,
    /// Tasks whose end is not in the audit log yet.
    pub(super) unrecorded: Mutex<Vec<Arc<GatewayTask>>>,
}

#[derive(Debug)]
pub struct GatewayTask {
    pub id: String,
    /// 0 for a live check.
    number: u64,
    pub(super) begun: i64,
    /// Start of the wait for agents, by the monotonic clock, and the deadline of each row after it. Both start over
    /// when a gateway restarts.
    pub(super) accepted: std::time::Instant,
    pub(super) deadlines: OnceLock<Vec<Duration>>,
    /// All items were dispatched, or have no agent.
    pub(super) queued: AtomicBool,
    pub items: Vec<TaskItem>,
    /// Items of the call that are not carried out.
    pub rejected: Vec<RejectedItem>,
    rows: Mutex<Vec<ItemState>>,
    /// Number of rows that are not final.
    left: AtomicUsize,
}

/// One operation on one instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskItem {
    /// `None`: the caller's operation code is unknown.
    pub op: Option<AgentOp>,
    pub instance: InstanceKey,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub supplier: Option<u64>,
    /// The host's address as the caller wrote it, if that differs from the canonical form.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written: Option<String>,
    /// Reload only: the fields that take effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub takes: Option<Vec<String>>,
    /// The operation repairs drift.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub repairs: bool,
    /// Result key of JOB, if the call does not contain the whole identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job_key: Option<String>,
    /// Restart: starts a stopped process as well, and supervises it. Rename: supervises the process.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub supervises: bool,
    /// Index of its spec in the stored task.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec: Option<usize>,
    #[serde(skip)]
    pub held: Option<OwnedSpec>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The app of the caller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub app: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// Result of an item that was refused at creation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<ItemResult>,
}

/// The content of a call: items to carry out, and rows of items that are not.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Submission {
    pub items: Vec<TaskItem>,
    pub rejected: Vec<RejectedItem>,
}

/// State of a row.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ItemState {
    Waiting,
    Sent,
    Done(ItemResult),
}

/// Result of a final row. A late result replaces one with `given_up`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ItemResult {
    pub code: i64,
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<Value>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub given_up: bool,
}

impl ItemResult {
    pub fn new(code: RowCode, message: impl Into<String>) -> ItemResult {
        ItemResult { code: code.0, message: message.into(), content: None, given_up: false }
    }
}

/// A task in the store.
#[derive(Serialize, Deserialize)]
struct StoredTask {
    begun: i64,
    number: u64,
    orders: Vec<TaskItem>,
    specs: Vec<OwnedSpec>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    rejected: Vec<RejectedItem>,
}

impl StoredTask {
    /// Stores each shared spec once.
    fn of(Submission { mut items, rejected }: Submission) -> StoredTask {
        let mut specs = Vec::new();
        let mut at: HashMap<*const Spec, usize> = HashMap::new();
        for item in &mut items {
            let Some(held) = &item.held else { continue };
            let next = specs.len();
            let nth = *at.entry(Arc::as_ptr(&held.spec)).or_insert(next);
            if nth == next {
                specs.push(held.clone());
            }
            item.spec = Some(nth);
        }
        StoredTask { begun: clock::now().0, number: 0, orders: items, specs, rejected }
    }
}

impl GatewayTask {
    fn new(id: String, number: u64, begun: i64, submission: Submission) -> GatewayTask {
        let Submission { items, rejected } = submission;
        let initial = |item: &TaskItem| item.refused.clone().map_or(ItemState::Waiting, ItemState::Done);
        let rows: Vec<ItemState> = items.iter().map(initial).collect();
        let left = AtomicUsize::new(rows.iter().filter(|row| **row == ItemState::Waiting).count());
        let (queued, rows) = (AtomicBool::new(false), Mutex::new(rows));
        let (accepted, deadlines) = (std::time::Instant::now(), OnceLock::new());
        GatewayTask { id, number, begun, accepted, deadlines, queued, items, rejected, rows, left }
    }

    pub(super) fn rows(&self) -> MutexGuard<'_, Vec<ItemState>> {
        self.rows.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn is_live_check(&self) -> bool {
        self.number == 0
    }

    pub(super) fn is_done(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }

    /// Whether a result for this row is still accepted.
    pub fn is_awaited(&self, nth: usize) -> bool {
        match self.rows().get(nth) {
            Some(ItemState::Waiting | ItemState::Sent) => true,
            Some(ItemState::Done(done)) => done.given_up,
            None => false,
        }
    }

    pub fn finish(&self, nth: usize, done: ItemResult) {
        if let Some(row) = self.rows().get_mut(nth)
            && !matches!(std::mem::replace(row, ItemState::Done(done)), ItemState::Done(_))
        {
            self.left.fetch_sub(1, Ordering::AcqRel);
        }
    }

    fn request(&self, nth: usize, deadline: i64, ttl_ms: u64) -> Option<OpRequest> {
        let item = self.items.get(nth)?;
        Some(OpRequest {
            seq: self.seq(nth),
            op_id: format!("{}/{nth}", self.id),
            task: self.id.clone(),
            instance: item.instance.clone(),
            op: item.op.clone()?,
            spec: item.held.clone(),
            takes: item.takes.clone(),
            repairs: item.repairs,
            supervises: item.supervises,
            owner: item.owner.clone(),
            app: item.app.clone(),
            generation: item.generation,
            deadline,
            ttl_ms: Some(ttl_ms),
            sent_ms: 0,
        })
    }

    fn seq(&self, nth: usize) -> u64 {
        self.number.saturating_mul(MAX_ROWS).saturating_add(if self.number == 0 { 0 } else { nth as u64 + 1 })
    }

    pub(super) fn row(&self, nth: usize) -> Row {
        match self.rows().get(nth) {
            Some(ItemState::Done(done)) => {
                let mut row = Row::new(RowCode(done.code), done.message.clone());
                if let Some(content) = &done.content {
                    row.content = Value::String(content.to_string());
                }
                row
            }
            Some(ItemState::Sent) => Row::new(RowCode::RUNNING, "in progress"),
            Some(ItemState::Waiting) | None => Row::new(RowCode::RUNNING, "waiting for the host's agent"),
        }
    }
}

impl Tasks {
    pub(super) fn in_memory(&self) -> MutexGuard<'_, BTreeMap<String, Arc<GatewayTask>>> {
        self.in_memory.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(super) fn unfinished(&self) -> Vec<Arc<GatewayTask>> {
        let known: Vec<Arc<GatewayTask>> = self.in_memory().values().cloned().collect();
        known.into_iter().filter(|task| !task.is_done()).collect()
    }

    pub fn open(&self) -> usize {
        self.unfinished().len()
    }
}

impl<S: Store> Gateway<S> {
    /// Loads open tasks of a previous gateway. Their agents get the full timeout to reconnect.
    pub async fn load_tasks(&self) -> Result<(), ApiError> {
        for open in self.store.range(keys::OPEN_TASK_PREFIX, None, usize::MAX).await?.entries {
            let Some(id) = keys::open_task_of(&open.key) else { continue };
            match self.load(id).await {
                Ok(Some(task)) => {
                    task.queued.store(true, Ordering::Release);
                    self.await_task_end(&task);
                    self.tasks.in_memory().insert(id.to_owned(), task);
                }
                Ok(None) => {}
                // The other tasks continue; a request for this one returns the error.
                Err(ApiError::Store(error @ Error::InvalidValue { .. })) => {
                    error!(%error, task = id, "cannot load an open task");
                }
                Err(error) => return Err(error),
            }
        }
        let last = self.store.get(keys::TASK_NUMBER).await?;
        self.numbers.record_allocated(last.as_ref().map(Entry::parse).transpose()?.unwrap_or(0));
        self.tasks.loaded.store(true, Ordering::Release);
        Ok(())
    }

    pub fn is_ready(&self) -> bool {
        self.tasks.loaded.load(Ordering::Acquire)
    }

    pub(super) async fn load(&self, id: &str) -> Result<Option<Arc<GatewayTask>>, ApiError> {
        let Some(entry) = self.store.get(&keys::task(id)).await? else { return Ok(None) };
        let StoredTask { begun, number, orders: mut items, specs, rejected } = entry.decode()?;
        for item in &mut items {
            item.held = item.spec.and_then(|at| specs.get(at)).cloned();
        }
        let task = GatewayTask::new(id.to_owned(), number, begun, Submission { items, rejected });
        for entry in self.store.range(&keys::row_results_prefix(id), None, usize::MAX).await?.entries {
            // Other keys are not those of single rows.
            if let Some(nth) = keys::row_of(&entry.key, id) {
                task.finish(nth, entry.decode()?);
            }
        }
        self.load_missing(&task).await?;
        task.queued.store(true, Ordering::Release);
        Ok(Some(Arc::new(task)))
    }

    /// Creates a task: stores it, then dispatches its items. `with`: writes of the same commit, given the task's id.
    /// `None`: a comparison of `with` failed.
    pub(super) async fn begin(
        &self,
        submission: &Submission,
        with: TaskTxn<'_>,
    ) -> Result<Option<String>, ApiError> {
        let creating = self.numbers.begin_creation();
        let items = &submission.items;
        let is_read_only = |item: &TaskItem| item.op.as_ref().is_some_and(AgentOp::is_read_only);
        let task = match !items.is_empty() && items.iter().all(is_read_only) {
            true => self.add_live_check(submission.clone()),
            false => match self.store_task(submission.clone(), with).await? {
                Some(task) => task,
                None => return Ok(None),
            },
        };
        self.tasks.in_memory().insert(task.id.clone(), Arc::clone(&task));
        self.await_task_end(&task);
        drop(creating);
        for nth in 0..task.items.len() {
            self.dispatch(&task, nth);
        }
        task.queued.store(true, Ordering::Release);
        Ok(Some(task.id.clone()))
    }

    fn add_live_check(&self, submission: Submission) -> Arc<GatewayTask> {
        // Starts at the clock: live checks in flight for a previous gateway have other numbers.
        let now = u64::try_from(clock::now().0).unwrap_or(0);
        let _ = self.tasks.live_checks.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        let number = self.tasks.live_checks.fetch_add(1, Ordering::Relaxed) + 1;
        let id = |number: u64| format!("GSETASK:LOOK:{number:012}");
        self.tasks.in_memory().remove(&id(number.saturating_sub(MAX_LIVE_CHECKS)));
        Arc::new(GatewayTask::new(id(number), 0, clock::now().0, submission))
    }

    /// Allocates a new number and stores the task under it, in one commit.
    async fn store_task(
        &self,
        submission: Submission,
        with: TaskTxn<'_>,
    ) -> Result<Option<Arc<GatewayTask>>, ApiError> {
        let mut stored = StoredTask::of(submission);
        loop {
            let last = self.store.get(keys::TASK_NUMBER).await?;
            let text = last.as_ref().and_then(|entry| std::str::from_utf8(&entry.value).ok());
            // Follows the clock, so that a restored store assigns no number twice: agents record the numbers they ran.
            let now = u64::try_from(clock::now().0).unwrap_or(0);
            stored.number = (text.and_then(|text| text.parse::<u64>().ok()).unwrap_or(0) + 1).max(now);
            let id = format!("GSETASK:{:012}", stored.number);
            let value = serde_json::to_vec(&stored)?;
            let mut txn = Txn::put(keys::TASK_NUMBER, stored.number.to_string())
                .only_if(keys::TASK_NUMBER, last.map_or(0, |entry| entry.mod_seq))
                .and(Txn::put(keys::task(&id), value))
                .and(with(&id)?);
            if stored.orders.iter().any(|item| item.refused.is_none()) {
                txn = txn.and(Txn::put(keys::open_task(&id), ""));
            }
            match self.store.txn(txn).await? {
                TxnOutcome::Written(_) => {
                    self.numbers.record_allocated(stored.number);
                    let StoredTask { number, begun, orders: items, rejected, .. } = stored;
                    let submission = Submission { items, rejected };
                    return Ok(Some(Arc::new(GatewayTask::new(id, number, begun, submission))));
                }
                TxnOutcome::Conflict(key) if key == keys::TASK_NUMBER => {}
                TxnOutcome::Conflict(_) => return Ok(None),
            }
        }
    }

    /// Sends an item to its host's agent if that is connected.
    fn dispatch(&self, task: &GatewayTask, nth: usize) {
        let timeout = i64::try_from(self.timeouts.agent.as_millis()).unwrap_or(i64::MAX);
        let deadline = clock::now().0.saturating_add(timeout);
        let request = || task.request(nth, deadline, timeout.unsigned_abs());
        // Locked until the item is queued: a row that becomes final must be neither queued nor reopened.
        let mut rows = task.rows();
        let Some(row @ ItemState::Waiting) = rows.get_mut(nth) else { return };
        let Some(request) = request() else { return };
        let host = request.instance.host.clone();
        if self.hosts.send(&host, ToAgent::Op(Box::new(request))) {
            *row = ItemState::Sent;
        }
    }

    /// Sends an agent that reconnected all items after the last number it received, and live checks again.
    pub(super) fn dispatch_after(&self, hosts: &[HostKey], after: u64) {
        for task in self.tasks.unfinished() {
            for (nth, item) in
                task.items.iter().enumerate().filter(|(_, item)| hosts.contains(&item.instance.host))
            {
                let had = item.op.as_ref().is_some_and(|op| !op.is_read_only()) && task.seq(nth) <= after;
                if let Some(row) = task.rows().get_mut(nth).filter(|row| !matches!(row, ItemState::Done(_))) {
                    *row = if had { ItemState::Sent } else { ItemState::Waiting };
                }
                self.dispatch(&task, nth);
            }
        }
    }

    /// The task and row of an operation id.
    pub(super) async fn find_row(&self, op_id: &str) -> Result<Option<(Arc<GatewayTask>, usize)>, ApiError> {
        let Some((id, nth)) = op_id.rsplit_once('/') else { return Ok(None) };
        let Ok(nth) = nth.parse::<usize>() else { return Ok(None) };
        let known = self.tasks.in_memory().get(id).cloned();
        let task = match known {
            Some(task) => Some(task),
            None => self.load(id).await?,
        };
        Ok(task.filter(|task| nth < task.items.len()).map(|task| (task, nth)))
    }

    /// The writes for final rows of a task.
    pub(super) fn finished(
        &self,
        task: &GatewayTask,
        rows: &[(usize, &ItemResult)],
    ) -> Result<Txn, ApiError> {
        if task.is_live_check() {
            return Ok(Txn::default());
        }
        let mut txn = Txn::default();
        for (nth, done) in rows {
            txn = txn.and(Txn::put(keys::row_result(&task.id, *nth), serde_json::to_vec(done)?));
        }
        Ok(txn.and(task.closed(|nth| rows.iter().any(|(finished, _)| *finished == nth))))
    }
}

impl GatewayTask {
    /// Whether a row is not final yet.
    pub(super) fn is_unfinished(&self, nth: usize) -> bool {
        matches!(self.rows().get(nth), Some(ItemState::Waiting | ItemState::Sent))
    }

    pub(super) fn open_rows(&self) -> Vec<usize> {
        let rows = self.rows();
        let open = rows.iter().enumerate().filter(|(_, row)| !matches!(row, ItemState::Done(_)));
        open.map(|(nth, _)| nth).collect()
    }

    /// The smallest sequence number of a row that is not final.
    pub(super) fn first_open_seq(&self) -> Option<u64> {
        if self.is_live_check() {
            return None;
        }
        let first = self.rows().iter().position(|row| !matches!(row, ItemState::Done(_)));
        first.map(|nth| self.seq(nth))
    }

    /// Closes the task if all rows are final together with the given ones.
    pub(super) fn closed(&self, finished: impl Fn(usize) -> bool) -> Txn {
        let open = |(nth, row): (usize, &ItemState)| matches!(row, ItemState::Done(_)) || finished(nth);
        match self.rows().iter().enumerate().all(open) {
            true => Txn::delete(keys::open_task(&self.id)),
            false => Txn::default(),
        }
    }
}

/// An instance of a process on a host.
pub fn instance(process: &ProcessKey, host: &HostKey) -> InstanceKey {
    InstanceKey { host: host.clone(), namespace: process.namespace.clone(), name: process.name.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Embedded;

    /// The time between a task's commit and its last dispatch is too short for a test over HTTP.
    #[tokio::test]
    async fn a_task_has_no_results_before_its_items_are_dispatched() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Embedded::open(&folder.path().join("store.db")).expect("it opens");
        let gateway = Gateway::new(store);
        let empty = Submission::default();
        let task = Arc::new(GatewayTask::new("GSETASK:1".to_owned(), 1, clock::now().0, empty));
        gateway.tasks.in_memory().insert(task.id.clone(), Arc::clone(&task));
        let grant = crate::access::Grant::everything("all");
        let results = || gateway.results("GSETASK:1", KeyForm::V1, &grant);
        assert!(matches!(results().await, Err(ApiError::NotQueued)));
        task.queued.store(true, Ordering::Release);
        assert!(results().await.is_ok());
    }
}
