//! Operations on their way: a task has a row for each instance asked for, and each row stands for itself.
//!
//! A task is in the store before its number is told, so it survives a restart; it is kept for a day. A mere look
//! (operation 2) changes nothing, and its task is kept in memory alone.

use std::collections::{BTreeMap, HashSet};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Gateway, Refusal, now_secs};
use crate::gse::answer::{Row, Rows};
use crate::gse::codes::{GseOp, ManageOp, RowCode};
use crate::gse::keys;
use crate::gse::request::ProcRequest;
use crate::gse::{JobApi, JobBody, Subject};
use crate::model::{Host, ProcessKey, Spec};
use crate::store::{Outcome, Store, Txn};

const A_DAY: i64 = 86_400;
/// The most looks that are remembered.
const LOOKS: usize = 10_000;

/// Looks that are on their way or done: they need not survive.
#[derive(Default)]
pub struct Looks(Mutex<BTreeMap<u64, (Instant, Task)>>);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Task {
    /// Milliseconds since 1970.
    begun: i64,
    orders: Vec<Ordered>,
}

/// One operation on one instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Ordered {
    op: i64,
    process: ProcessKey,
    host: String,
    supplier: Option<u64>,
    spec: Option<Spec>,
    /// What the row says already; `None`: it is still running.
    done: Option<(i64, String)>,
}

/// Which namespaces a caller may see.
pub type Allowed<'a> = &'a (dyn Fn(&str) -> bool + Send + Sync);

/// Which form of key a caller asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyForm {
    First,
    Second,
}

impl<S: Store> Gateway<S> {
    /// operate_proc in all its shapes. The number of the task.
    pub async fn operate(&self, requests: &[ProcRequest]) -> Result<String, Refusal> {
        if requests.is_empty() {
            return Err(Refusal::Wrong("proc_operate_req is missing".to_owned()));
        }
        let mut orders = Vec::new();
        let mut only_looks = true;
        for request in requests {
            let (process, hosts) = (request.process()?, request.targets()?);
            let code = request.op_type.ok_or_else(|| Refusal::Wrong("op_type is missing".to_owned()))?;
            let op = GseOp::from_code(code);
            only_looks &= op == Some(GseOp::Status);
            let sent = request.spec()?;
            let records = self.records(&process, &hosts).await?;
            for host in hosts {
                let known = records
                    .iter()
                    .find(|(key, _)| key.host == host.key)
                    .map(|(_, record)| record.spec.clone());
                let spec = sent.clone().or(known);
                let done = match op {
                    None => Some((RowCode::BAD_OP_TYPE.0, format!("op_type {code} is unknown"))),
                    Some(_) if spec.is_none() => {
                        let message = "it is not registered, and no spec was sent".to_owned();
                        Some((RowCode::COMMAND_FAILED.0, message))
                    }
                    Some(_) => None,
                };
                let (supplier, host) = (host.supplier, host.key.to_string());
                orders.push(Ordered { op: code, process: process.clone(), host, supplier, spec, done });
            }
        }
        let task = Task { begun: now_ms(), orders };
        if only_looks { Ok(self.looks.keep(task)) } else { self.keep(&task).await }
    }

    /// manage_proc and operate_process. A process with a registered identity is that instance, whatever it is called.
    pub async fn operate_job(&self, body: &JobBody, api: JobApi) -> Result<String, Refusal> {
        let code = body.op_type.ok_or_else(|| Refusal::Wrong("op_type is missing".to_owned()))?;
        let op = match api {
            JobApi::ManageProc => ManageOp::from_code(code).map(ManageOp::to_gse),
            JobApi::OperateProcess => GseOp::from_code(code),
        };
        let (subjects, notes) = body.subjects(api);
        if subjects.is_empty() {
            let why = notes.first().map_or(String::new(), |note| format!(": {note}"));
            return Err(Refusal::Wrong(format!("process_infos names no process{why}")));
        }
        let mut orders = Vec::new();
        let mut taken = HashSet::new();
        for Subject { key, hosts, spec, .. } in subjects {
            if hosts.is_empty() {
                return Err(Refusal::Wrong(format!("ip_list of {} is missing", spec.identity.proc_name)));
            }
            for host in hosts {
                if !taken.insert(keys::job(&host.key, &spec)) {
                    let twice = keys::job(&host.key, &spec);
                    return Err(Refusal::Wrong(format!(
                        "two processes would have the result key {twice:?}: call twice"
                    )));
                }
                let process = self.named(&host, &spec).await?.unwrap_or_else(|| key.clone());
                let done = match op {
                    None => Some((RowCode::BAD_OP_TYPE.0, format!("op_type {code} is unknown"))),
                    Some(_) => None,
                };
                let (supplier, host) = (host.supplier, host.key.to_string());
                let op = op.map_or(code, GseOp::code);
                orders.push(Ordered { op, process, host, supplier, spec: Some(spec.clone()), done });
            }
        }
        let task = Task { begun: now_ms(), orders };
        if op == Some(GseOp::Status) { Ok(self.looks.keep(task)) } else { self.keep(&task).await }
    }

    /// get_proc_result: the same rows by JOB's key, with their content as it is.
    pub async fn job_results(&self, id: &str, may: Allowed<'_>) -> Result<Value, Refusal> {
        let task = self.task(id, may).await?;
        let mut rows = Rows::new();
        for order in &task.orders {
            let (Ok(host), Some(spec)) = (order.host.parse(), &order.spec) else { continue };
            let mut row = self.row(&task, order);
            if let Value::String(text) = &row.content {
                row.content = serde_json::from_str(text).unwrap_or(Value::Null);
            }
            rows.insert(keys::job(&host, spec), row);
        }
        let running = rows.values().any(|row| row.code() == RowCode::RUNNING);
        // 0: something is still running; 1: all rows are final.
        Ok(json!({"status": u8::from(!running), "result": rows}))
    }

    /// A number that was never given before, and the task under it, in one commit.
    async fn keep(&self, task: &Task) -> Result<String, Refusal> {
        let value = serde_json::to_vec(task).map_err(|error| Refusal::Wrong(error.to_string()))?;
        loop {
            let last = self.store.get("task-number").await?;
            let number: u64 = last
                .as_ref()
                .and_then(|entry| std::str::from_utf8(&entry.value).ok()?.parse().ok())
                .unwrap_or(0)
                + 1;
            let id = format!("GSETASK:{number:012}");
            let txn = Txn::put("task-number", number.to_string())
                .only_if("task-number", last.map_or(0, |entry| entry.changed))
                .and(Txn::put(format!("task/{id}"), value.clone()));
            if let Outcome::Written(_) = self.store.txn(txn).await? {
                return Ok(id);
            }
        }
    }

    /// get_proc_operate_result: a row for every instance asked for.
    pub async fn results(&self, id: &str, form: KeyForm, may: Allowed<'_>) -> Result<Rows, Refusal> {
        let task = self.task(id, may).await?;
        let mut rows = Rows::new();
        for order in &task.orders {
            let Ok(key) = order.host.parse() else { continue };
            let host = Host { key, supplier: order.supplier, agent_id: None };
            let second = keys::v2(&host.key, &order.process);
            let key = match form {
                KeyForm::First => keys::v1(&host, &order.process).unwrap_or(second),
                KeyForm::Second => second,
            };
            rows.insert(key, self.row(&task, order));
        }
        Ok(rows)
    }

    /// A task that this caller may see. One of other namespaces is not there.
    async fn task(&self, id: &str, may: Allowed<'_>) -> Result<Task, Refusal> {
        let unknown = || Refusal::UnknownTask(format!("there is no task {id:?}"));
        let task: Task = match self.looks.find(id) {
            Some(task) => task,
            None => {
                let entry = self.store.get(&format!("task/{id}")).await?.ok_or_else(unknown)?;
                serde_json::from_slice(&entry.value).map_err(|_| unknown())?
            }
        };
        let all = task.orders.iter().all(|order| may(order.process.namespace.as_str()));
        if all { Ok(task) } else { Err(unknown()) }
    }

    /// How one operation of a task stands.
    fn row(&self, task: &Task, order: &Ordered) -> Row {
        let waited = u128::try_from(now_ms() - task.begun).unwrap_or(0) >= self.patience.as_millis();
        match &order.done {
            Some((code, message)) => Row::new(RowCode(*code), message.clone()),
            None if waited => Row::new(RowCode::AGENT_MISSING, "no agent of this host has been seen"),
            None => Row::new(RowCode::RUNNING, "waiting for the host's agent"),
        }
    }

    /// Forgets tasks of the day before yesterday.
    pub async fn forget_old_tasks(&self) -> Result<usize, Refusal> {
        let tasks = self.store.range("task/", None, usize::MAX).await?;
        let oldest = (now_secs() - A_DAY) * 1000;
        let old = tasks.entries.iter().filter(|entry| {
            serde_json::from_slice::<Task>(&entry.value).map_or(true, |task| task.begun < oldest)
        });
        let txn = old.fold(Txn::default(), |txn, entry| txn.and(Txn::delete(entry.key.to_string())));
        let count = txn.writes.len();
        if count > 0 {
            self.store.txn(txn).await?;
        }
        Ok(count)
    }
}

impl Looks {
    fn keep(&self, task: Task) -> String {
        let mut looks = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let number = looks.keys().next_back().map_or(1, |last| last + 1);
        looks.insert(number, (Instant::now(), task));
        while looks.len() > LOOKS {
            looks.pop_first();
        }
        let old = Duration::from_secs(3600);
        looks.retain(|_, (begun, _)| begun.elapsed() < old);
        format!("GSETASK:LOOK:{number}")
    }

    fn find(&self, id: &str) -> Option<Task> {
        let number = id.strip_prefix("GSETASK:LOOK:")?.parse().ok()?;
        let looks = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        looks.get(&number).map(|(_, task)| task.clone())
    }
}

fn now_ms() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::SystemTime::UNIX_EPOCH);
    i64::try_from(since.unwrap_or_default().as_millis()).unwrap_or(i64::MAX)
}
