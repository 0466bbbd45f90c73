//! Task results: rows in each key form, the task list, and removal of tasks after a day.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::Deserialize;
use serde_json::Value;

use super::tasks::{GatewayTask, ItemState, KeyForm};
use super::{ApiError, Gateway};
use crate::access::Grant;
use crate::clock;
use crate::contract::TaskEntry;
use crate::gse::codes::RowCode;
use crate::gse::keys as result_keys;
use crate::gse::response::{JobResult, Rows};
use crate::model::Host;
use crate::store::{Store, Txn, keys};

const TASK_RETENTION_MS: i64 = 86_400_000;
/// Time for which a finished task stays in memory for polling callers.
const MEMORY_RETENTION_MS: i64 = 600_000;

impl<S: Store> Gateway<S> {
    /// get_proc_operate_result: one row per instance of the task.
    pub async fn results(&self, id: &str, form: KeyForm, grant: &Grant) -> Result<Rows, ApiError> {
        let task = self.task(id, grant).await?;
        let mut rows = Rows::new();
        for (nth, item) in task.items.iter().enumerate() {
            let host = Host { key: item.instance.host.clone(), supplier: item.supplier, agent_id: None };
            let process = item.instance.process();
            let second = result_keys::v2(&host.key, &process);
            let key = match form {
                KeyForm::V1 => result_keys::v1(&host, &process).unwrap_or(second),
                KeyForm::V2 => second,
            };
            rows.insert(result_keys::as_written(key, &host.key, item.written.as_ref()), task.row(nth));
        }
        for rejected in &task.rejected {
            let key = match form {
                KeyForm::V1 => &rejected.v1,
                KeyForm::V2 => &rejected.v2,
            };
            rows.entry(key.clone()).or_insert_with(|| rejected.row());
        }
        Ok(rows)
    }

    /// get_proc_result: the same rows by JOB's key, with structured content.
    pub async fn job_results(&self, id: &str, grant: &Grant) -> Result<JobResult, ApiError> {
        let task = self.task(id, grant).await?;
        let mut rows = Rows::new();
        for (nth, item) in task.items.iter().enumerate() {
            let held = || item.held.as_ref().map(|held| result_keys::job(&item.instance.host, &held.spec));
            let Some(key) = item.job_key.clone().or_else(held) else { continue };
            let mut row = task.row(nth);
            if let Value::String(text) = &row.content {
                row.content = serde_json::from_str(text).unwrap_or(Value::Null);
            }
            rows.insert(key, row);
        }
        for rejected in &task.rejected {
            rows.entry(rejected.key().to_owned()).or_insert_with(|| rejected.row());
        }
        let running = rows.values().any(|row| row.code() == RowCode::RUNNING);
        // 0: something is still running; 1: all rows are final.
        Ok(JobResult { status: i64::from(!running), result: rows })
    }

    /// A task whose rows the caller may see; every other task counts as unknown.
    async fn task(&self, id: &str, grant: &Grant) -> Result<Arc<GatewayTask>, ApiError> {
        let unknown = || ApiError::UnknownTask(format!("there is no task {id:?}"));
        let known = self.tasks.in_memory().get(id).cloned();
        let task = match known {
            Some(task) => task,
            None => self.load(id).await?.ok_or_else(unknown)?,
        };
        let mut rejected = task.rejected.iter().map(|rejected| rejected.namespace.as_str());
        let is_visible = task.items.iter().all(|item| grant.may_see(&item.instance, item.owner.as_deref()))
            && rejected.all(|name| name.is_empty() || grant.check_namespace(name).is_ok());
        if !is_visible {
            return Err(unknown());
        }
        if task.queued.load(Ordering::Acquire) { Ok(task) } else { Err(ApiError::NotQueued) }
    }

    /// The latest tasks: id, start time, and numbers of rows, final rows and failed rows.
    pub async fn list_tasks(&self, grant: &Grant) -> Result<Vec<TaskEntry>, ApiError> {
        const MAX_LISTED: usize = 1000;
        let mut ids: Vec<String> = self
            .store
            .range(keys::TASK_PREFIX, None, usize::MAX)
            .await?
            .entries
            .iter()
            .filter_map(|entry| keys::task_of(&entry.key).map(str::to_owned))
            .collect();
        ids.reverse();
        let mut tasks = Vec::new();
        for id in ids.into_iter().take(MAX_LISTED) {
            let Ok(task) = self.task(&id, grant).await else { continue };
            let rows = task.rows().clone();
            let done = rows.iter().filter_map(|row| match row {
                ItemState::Done(done) => Some(done.code),
                ItemState::Waiting | ItemState::Sent => None,
            });
            let codes: Vec<i64> = done.collect();
            let rejected = task.rejected.len();
            let failed = codes.iter().filter(|code| **code != 0).count() + rejected;
            tasks.push(TaskEntry {
                id: task.id.clone(),
                begun: task.begun,
                rows: rows.len() + rejected,
                done: codes.len() + rejected,
                failed,
            });
        }
        Ok(tasks)
    }

    /// Removes tasks and stored responses older than a day.
    pub async fn gc_tasks(&self) -> Result<usize, ApiError> {
        #[derive(Deserialize)]
        struct TaskStart {
            begun: i64,
        }
        let now = clock::now().0;
        let is_old = |value: &[u8]| {
            serde_json::from_slice::<TaskStart>(value)
                .map_or(true, |when| when.begun < now - TASK_RETENTION_MS)
        };
        let mut txn = Txn::default();
        for prefix in [keys::TASK_PREFIX, keys::RESPONSE_PREFIX] {
            for entry in self.store.range(prefix, None, usize::MAX).await?.entries {
                if !is_old(&entry.value) {
                    continue;
                }
                if let Some(id) = keys::task_of(&entry.key) {
                    let rows =
                        self.store.range(&keys::row_results_prefix(id), None, usize::MAX).await?.entries;
                    txn = rows.iter().fold(txn, |txn, row| txn.and(Txn::delete(row.key.to_string())));
                    txn = txn.and(Txn::delete(keys::open_task(id)));
                }
                txn = txn.and(Txn::delete(entry.key.to_string()));
            }
        }
        let count = txn.writes.len();
        if count > 0 {
            self.store.txn(txn).await?;
        }
        self.tasks.in_memory().retain(|_, task| !task.is_done() || task.begun > now - MEMORY_RETENTION_MS);
        Ok(count)
    }
}
