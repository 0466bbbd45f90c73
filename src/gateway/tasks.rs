//! Operations on their way: a task has a row for each instance asked for, and each row stands for itself.
//!
//! In the store a task is `task/ID`, with its orders, and `done/ID/N` for each row that is final, `done/ID/lost` for those
//! whose agent was not there; `open/ID` stands beside it as long as some row is not, so that after a restart only those are looked at. What is asked for often is in
//! memory too. A mere look (operation 2) changes nothing, and its task is in memory alone.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ApiError, Gateway, now_ms};
use crate::gse::agent_protocol::{AgentOp, OpRequest, OwnedSpec, ToAgent};
use crate::gse::codes::RowCode;
use crate::gse::response::Row;
use crate::model::{HostKey, InstanceKey, ProcessKey, Spec};
use crate::store::{Outcome, Store, Txn};

/// The most looks that are remembered.
const MAX_LIVE_CHECKS: u64 = 10_000;
/// A task's number and a row's make one number that grows: no task has more rows than this.
pub const MAX_ROWS: u64 = 1 << 20;

/// Which namespaces a caller may see.
pub type NamespaceFilter<'a> = &'a (dyn Fn(&str) -> bool + Send + Sync);

/// What else is written with a task, given its number.
pub type TaskTxn<'a> = &'a (dyn Fn(&str) -> Result<Txn, ApiError> + Send + Sync);

/// Which form of key a caller asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyForm {
    V1,
    V2,
}

/// The tasks in memory.
#[derive(Default)]
pub struct Tasks {
    in_memory: Mutex<BTreeMap<String, Arc<GatewayTask>>>,
    live_checks: AtomicU64,
    loaded: AtomicBool,
}

#[derive(Debug)]
pub struct GatewayTask {
    pub id: String,
    /// 0: a look.
    number: u64,
    pub(super) begun: i64,
    /// Since when its rows wait for an agent, by the monotonic clock, and how long after it each row becomes final without a
    /// result. After a restart agents have their time again.
    pub(super) accepted: std::time::Instant,
    pub(super) deadlines: OnceLock<Vec<Duration>>,
    /// Its orders are with the agents, or known to have none.
    pub(super) queued: AtomicBool,
    pub orders: Vec<TaskItem>,
    rows: Mutex<Vec<ItemState>>,
    /// How many rows are not final.
    left: AtomicUsize,
}

/// One operation on one instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskItem {
    /// `None`: the caller's number means nothing.
    pub op: Option<AgentOp>,
    pub instance: InstanceKey,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub supplier: Option<u64>,
    /// How its host's address was written, if not as we write it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written: Option<String>,
    /// Of a reload: the fields that take effect by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub takes: Option<Vec<String>>,
    /// Which of the task's specs it comes with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec: Option<usize>,
    #[serde(skip)]
    pub held: Option<OwnedSpec>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// What its row says from the beginning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<ItemResult>,
}

/// How a row stands.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ItemState {
    Waiting,
    Sent,
    Done(ItemResult),
}

/// A row that is final. One that we gave up is final until its result comes after all.
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

/// A task as it is kept.
#[derive(Serialize, Deserialize)]
struct StoredTask {
    begun: i64,
    number: u64,
    orders: Vec<TaskItem>,
    specs: Vec<OwnedSpec>,
}

impl StoredTask {
    /// Instances mostly share a spec: each is written once.
    fn of(mut orders: Vec<TaskItem>) -> StoredTask {
        let mut specs = Vec::new();
        let mut at: HashMap<*const Spec, usize> = HashMap::new();
        for order in &mut orders {
            let Some(held) = &order.held else { continue };
            let next = specs.len();
            let nth = *at.entry(Arc::as_ptr(&held.spec)).or_insert(next);
            if nth == next {
                specs.push(held.clone());
            }
            order.spec = Some(nth);
        }
        StoredTask { begun: now_ms(), number: 0, orders, specs }
    }
}

impl GatewayTask {
    fn new(id: String, number: u64, begun: i64, orders: Vec<TaskItem>) -> GatewayTask {
        let stand = |order: &TaskItem| order.refused.clone().map_or(ItemState::Waiting, ItemState::Done);
        let rows: Vec<ItemState> = orders.iter().map(stand).collect();
        let left = AtomicUsize::new(rows.iter().filter(|row| **row == ItemState::Waiting).count());
        let (queued, rows) = (AtomicBool::new(false), Mutex::new(rows));
        let (accepted, deadlines) = (std::time::Instant::now(), OnceLock::new());
        GatewayTask { id, number, begun, accepted, deadlines, queued, orders, rows, left }
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

    /// Can this row's result still be taken?
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
        let order = self.orders.get(nth)?;
        Some(OpRequest {
            seq: self.seq(nth),
            op_id: format!("{}/{nth}", self.id),
            task: self.id.clone(),
            instance: order.instance.clone(),
            op: order.op.clone()?,
            spec: order.held.clone(),
            takes: order.takes.clone(),
            owner: order.owner.clone(),
            generation: order.generation,
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
            Some(ItemState::Sent) => Row::new(RowCode::RUNNING, "it is being carried out"),
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
    /// Tasks that a former gateway left open. Their agents have their time to reconnect.
    pub async fn load_tasks(&self) -> Result<(), ApiError> {
        for open in self.store.range("open/", None, usize::MAX).await?.entries {
            let id = open.key.trim_start_matches("open/");
            if let Some(task) = self.load(id).await? {
                task.queued.store(true, Ordering::Release);
                self.tasks.in_memory().insert(id.to_owned(), task);
            }
        }
        let last = self.store.get("task-number").await?;
        let last = last.as_ref().and_then(|entry| std::str::from_utf8(&entry.value).ok());
        self.numbers.record_allocated(last.and_then(|text| text.parse().ok()).unwrap_or(0));
        self.tasks.loaded.store(true, Ordering::Release);
        Ok(())
    }

    pub fn is_ready(&self) -> bool {
        self.tasks.loaded.load(Ordering::Acquire)
    }

    pub(super) async fn load(&self, id: &str) -> Result<Option<Arc<GatewayTask>>, ApiError> {
        let Some(entry) = self.store.get(&format!("task/{id}")).await? else { return Ok(None) };
        let Ok(StoredTask { begun, number, mut orders, specs }) = serde_json::from_slice(&entry.value) else {
            return Ok(None);
        };
        for order in &mut orders {
            order.held = order.spec.and_then(|at| specs.get(at)).cloned();
        }
        let task = GatewayTask::new(id.to_owned(), number, begun, orders);
        let prefix = format!("done/{id}/");
        for entry in self.store.range(&prefix, None, usize::MAX).await?.entries {
            if let (Ok(nth), Ok(done)) =
                (entry.key[prefix.len()..].parse(), serde_json::from_slice(&entry.value))
            {
                task.finish(nth, done);
            }
        }
        self.load_missing(&task).await?;
        task.queued.store(true, Ordering::Release);
        Ok(Some(Arc::new(task)))
    }

    /// Makes a task of orders: in the store first, then on its way to the agents. `with`: what is written in the same
    /// commit, given the task's number. `None`: something that it compares was no longer so.
    pub(super) async fn begin(
        &self,
        orders: &[TaskItem],
        with: TaskTxn<'_>,
    ) -> Result<Option<String>, ApiError> {
        let creating = self.numbers.begin_creation();
        let only_looks = orders.iter().all(|order| order.op.as_ref().is_some_and(AgentOp::is_read_only));
        let task = match only_looks {
            true => self.add_live_check(orders.to_vec()),
            false => match self.store_task(orders.to_vec(), with).await? {
                Some(task) => task,
                None => return Ok(None),
            },
        };
        self.tasks.in_memory().insert(task.id.clone(), Arc::clone(&task));
        drop(creating);
        for nth in 0..task.orders.len() {
            self.dispatch(&task, nth);
        }
        task.queued.store(true, Ordering::Release);
        Ok(Some(task.id.clone()))
    }

    fn add_live_check(&self, orders: Vec<TaskItem>) -> Arc<GatewayTask> {
        // As with operations: what an agent is still looking at for a former gateway has another number.
        let now = u64::try_from(now_ms()).unwrap_or(0);
        let _ = self.tasks.live_checks.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        let number = self.tasks.live_checks.fetch_add(1, Ordering::Relaxed) + 1;
        let id = |number: u64| format!("GSETASK:LOOK:{number:012}");
        self.tasks.in_memory().remove(&id(number.saturating_sub(MAX_LIVE_CHECKS)));
        Arc::new(GatewayTask::new(id(number), 0, now_ms(), orders))
    }

    /// A number that was never given before, and the task under it, in one commit.
    async fn store_task(
        &self,
        orders: Vec<TaskItem>,
        with: TaskTxn<'_>,
    ) -> Result<Option<Arc<GatewayTask>>, ApiError> {
        let mut kept = StoredTask::of(orders);
        loop {
            let last = self.store.get("task-number").await?;
            let text = last.as_ref().and_then(|entry| std::str::from_utf8(&entry.value).ok());
            // Never one that was given before, though the store be an older copy: agents remember what they did.
            let now = u64::try_from(now_ms()).unwrap_or(0);
            kept.number = (text.and_then(|text| text.parse::<u64>().ok()).unwrap_or(0) + 1).max(now);
            let id = format!("GSETASK:{:012}", kept.number);
            let value = serde_json::to_vec(&kept)?;
            let mut txn = Txn::put("task-number", kept.number.to_string())
                .only_if("task-number", last.map_or(0, |entry| entry.mod_seq))
                .and(Txn::put(format!("task/{id}"), value))
                .and(with(&id)?);
            if kept.orders.iter().any(|order| order.refused.is_none()) {
                txn = txn.and(Txn::put(format!("open/{id}"), ""));
            }
            match self.store.txn(txn).await? {
                Outcome::Written(_) => {
                    self.numbers.record_allocated(kept.number);
                    return Ok(Some(Arc::new(GatewayTask::new(id, kept.number, kept.begun, kept.orders))));
                }
                Outcome::Conflict(key) if key == "task-number" => {}
                Outcome::Conflict(_) => return Ok(None),
            }
        }
    }

    /// Hands an order to its host's agent, if there is one.
    fn dispatch(&self, task: &GatewayTask, nth: usize) {
        let patience = i64::try_from(self.agent_timeout.as_millis()).unwrap_or(i64::MAX);
        let deadline = now_ms().saturating_add(patience);
        let request = || task.request(nth, deadline, patience.unsigned_abs());
        // Locked until it is in the queue: a row that becomes final meanwhile must neither be queued nor be open again.
        let mut rows = task.rows();
        let Some(row @ ItemState::Waiting) = rows.get_mut(nth) else { return };
        let Some(request) = request() else { return };
        let host = request.instance.host.clone();
        if self.hosts.send(&host, ToAgent::Op(Box::new(request))) {
            *row = ItemState::Sent;
        }
    }

    /// An agent is back, and has everything up to a number: the rest is sent, looks anew.
    pub(super) fn dispatch_after(&self, hosts: &[HostKey], after: u64) {
        for task in self.tasks.unfinished() {
            for (nth, order) in
                task.orders.iter().enumerate().filter(|(_, order)| hosts.contains(&order.instance.host))
            {
                let had = order.op.as_ref().is_some_and(|op| !op.is_read_only()) && task.seq(nth) <= after;
                if let Some(row) = task.rows().get_mut(nth).filter(|row| !matches!(row, ItemState::Done(_))) {
                    *row = if had { ItemState::Sent } else { ItemState::Waiting };
                }
                self.dispatch(&task, nth);
            }
        }
    }

    /// The task and row that an operation's name stands for.
    pub(super) async fn find_row(&self, op_id: &str) -> Result<Option<(Arc<GatewayTask>, usize)>, ApiError> {
        let Some((id, nth)) = op_id.rsplit_once('/') else { return Ok(None) };
        let Ok(nth) = nth.parse::<usize>() else { return Ok(None) };
        let known = self.tasks.in_memory().get(id).cloned();
        let task = match known {
            Some(task) => Some(task),
            None => self.load(id).await?,
        };
        Ok(task.filter(|task| nth < task.orders.len()).map(|task| (task, nth)))
    }

    /// What is written when some rows of a task are final.
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
            txn = txn.and(Txn::put(done_key(&task.id, *nth), serde_json::to_vec(done)?));
        }
        Ok(txn.and(task.closed(|nth| rows.iter().any(|(finished, _)| *finished == nth))))
    }
}

impl GatewayTask {
    /// Not final yet.
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

    /// With these rows, is every one final? Then the task is no longer open.
    pub(super) fn closed(&self, finished: impl Fn(usize) -> bool) -> Txn {
        let open = |(nth, row): (usize, &ItemState)| matches!(row, ItemState::Done(_)) || finished(nth);
        match self.rows().iter().enumerate().all(open) {
            true => Txn::delete(format!("open/{}", self.id)),
            false => Txn::default(),
        }
    }
}

/// Where a row that is final is kept.
pub(super) fn done_key(task: &str, nth: usize) -> String {
    format!("done/{task}/{nth}")
}

/// An instance of a process on a host.
pub fn instance(process: &ProcessKey, host: &HostKey) -> InstanceKey {
    InstanceKey { host: host.clone(), namespace: process.namespace.clone(), name: process.name.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Embedded;

    /// The moment between a task's commit and its last order on the way is too short to be met from outside.
    #[tokio::test]
    async fn a_task_is_not_told_of_before_its_orders_are_on_their_way() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Embedded::open(&folder.path().join("store.db")).expect("it opens");
        let gateway = Gateway::new(store);
        let task = Arc::new(GatewayTask::new("GSETASK:1".to_owned(), 1, now_ms(), Vec::new()));
        gateway.tasks.in_memory().insert(task.id.clone(), Arc::clone(&task));
        let asked = || gateway.results("GSETASK:1", KeyForm::V1, &|_| true);
        assert_eq!(asked().await.err(), Some(ApiError::NotQueued));
        task.queued.store(true, Ordering::Release);
        assert!(asked().await.is_ok());
    }
}
