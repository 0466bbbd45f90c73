//! BlueKing GSE and JOB as targets, in four dialects.
//!
//! # Theory of operation
//! [`wire`] has the names and bodies of each dialect, [`transport`] sends calls; the rest is common to all. An
//! observation ([`observe`]) is a list, by namespace or by name, which may be old and incomplete: hosts without a live
//! agent are gaps, and incomplete parts are unknown. A live check is operation 2, which changes nothing; it is the only
//! live source. JOB has no lists, so every observation there is a live check.
//!
//! A mutating call is never repeated here. Results are looked up by their documented key, never by position.

mod observe;
mod transport;
mod wire;

pub use transport::Pace;
pub use wire::Business;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::json;

use self::transport::{Transport, error_of_query, error_of_write};
use self::wire::{Item, PlatformRequest, ResponseKind};
use super::{
    Backend, BackendError, InstanceQuery, Operation, OperationState, OperationStatus, RowState, Scope, Task,
};
use crate::gse::codes::{EnvelopeCode, RowCode};
use crate::gse::response::{JobResult, JobTaskData, Row, Rows, TaskData};
use crate::http::{ApiEndpoint, CallError, ClientError, UnreadableResponse};
use crate::model::{Dialect, InstanceKey, Observed, ObservedInstance};
use crate::retry_delay::RetryDelay;

/// Attempts of a read-only call, and the first delay between them.
const QUESTIONS: u32 = 4;
const RETRIES: RetryDelay =
    RetryDelay::doubling(Duration::from_millis(100), Duration::from_secs(5)).with_factor(3);

pub struct Platform {
    line: Transport,
    wire: wire::Wire,
    pace: Pace,
}

impl Platform {
    /// `business`: for JOB. `supplier`: default for hosts without one.
    pub fn new(
        access: &ApiEndpoint,
        dialect: Dialect,
        business: Option<Business>,
        supplier: Option<u64>,
        pace: Pace,
    ) -> Result<Platform, ClientError> {
        let is_third = matches!(business, Some(Business::Scope { .. }));
        let line = Transport::new(access, dialect, is_third, pace)?;
        Ok(Platform { line, wire: wire::Wire { dialect, business, supplier }, pace })
    }

    /// Checks that the target is reachable and accepts the credentials, by a read-only call for a name that does not exist.
    pub async fn answers(&self) -> Result<(), BackendError> {
        let nothing = "abide-doctor";
        let result: Result<serde_json::Value, CallError> = match self.wire.dialect {
            Dialect::Job => {
                let body = self.wire.with_business(json!({"bk_gse_taskid": nothing}));
                self.ask("get_proc_result", body).await
            }
            Dialect::GseV1 | Dialect::GseV2 | Dialect::GseApigw | Dialect::Abide => {
                let page = json!({"start": 0, "limit": 1});
                self.ask("sync_proc_status", json!({"meta": {"namespace": nothing}, "page": page})).await
            }
        };
        match result {
            // Unknown task: the call was accepted.
            Err(CallError::Refused { status: 200, code, .. })
                if self.wire.dialect == Dialect::Job && code != EnvelopeCode::NOT_ALLOWED.0 =>
            {
                Ok(())
            }
            result => result.map(|_| ()).map_err(error_of_query),
        }
    }

    pub fn url(&self) -> &str {
        self.line.url()
    }

    async fn ask<T: serde::de::DeserializeOwned>(
        &self,
        name: &str,
        body: serde_json::Value,
    ) -> Result<T, CallError> {
        let text = self.line.ask(name, body).await?;
        // The call may have been executed although its response is invalid.
        serde_json::from_str(&text).map_err(|error| {
            let why = format!("`data` of {name}: {error}");
            CallError::Unreadable(UnreadableResponse::new(200, &why, text.as_bytes()))
        })
    }

    /// A read-only call, retried if no response was received.
    async fn question<T: serde::de::DeserializeOwned>(
        &self,
        name: &str,
        body: serde_json::Value,
    ) -> Result<T, CallError> {
        for nth in 1..QUESTIONS {
            match self.ask(name, body.clone()).await {
                Err(broken) if is_worth_a_retry(&error_of_write(broken.clone())) => {
                    tracing::info!(%name, %broken, "retrying");
                    tokio::time::sleep(RETRIES.after(nth)).await;
                }
                result => return result,
            }
        }
        self.ask(name, body).await
    }

    /// Sends a call, and returns the keys of its results.
    async fn send(&self, ask: PlatformRequest) -> Result<CallAnswer, CallError> {
        match ask.response {
            ResponseKind::Registry(_) => Ok(CallAnswer::Rows(self.ask(ask.name, ask.body).await?)),
            ResponseKind::Task => {
                Ok(CallAnswer::Task(self.ask::<TaskData>(ask.name, ask.body).await?.task_id))
            }
            ResponseKind::JobTask => {
                Ok(CallAnswer::Task(self.ask::<JobTaskData>(ask.name, ask.body).await?.bk_gse_taskid))
            }
        }
    }

    /// The registrations that belong to their owner: by the ledger, else by the current label.
    async fn ours(&self, there: &[(&Operation, &Item)]) -> BTreeSet<InstanceKey> {
        let (owned, rest): (Vec<_>, Vec<_>) =
            there.iter().copied().partition(|(order, _)| order.before.owned);
        let mut ours: BTreeSet<InstanceKey> =
            owned.into_iter().map(|(order, _)| order.instance.clone()).collect();
        if rest.is_empty() {
            return ours;
        }
        let subject = |order: &Operation| InstanceQuery {
            instance: order.instance.clone(),
            host: order.host.clone(),
            spec: order.spec.clone(),
        };
        let scope = Scope::of(rest.iter().map(|(order, _)| subject(order)).collect());
        match self.labels(&scope).await {
            Ok(rows) => ours.extend(rest.into_iter().map(|(order, _)| order).filter_map(|order| {
                let label = rows.get(&order.instance)?.owner.as_deref();
                (label.is_some() && label == order.owner.as_deref()).then(|| order.instance.clone())
            })),
            // Without a label, ownership is not proven.
            Err(fault) => tracing::warn!(%fault, "cannot read the labels of existing registrations"),
        }
        ours
    }

    /// The rows of a task so far; a task that is not queued yet has none.
    async fn results(&self, id: &str) -> Result<Rows, CallError> {
        let result = match self.wire.dialect {
            Dialect::Job => {
                let body = self.wire.with_business(json!({"bk_gse_taskid": id}));
                self.ask::<JobResult>("get_proc_result", body).await.map(|answer| answer.result)
            }
            Dialect::GseV1 => self.ask("get_proc_operate_result", json!({"task_id": id})).await,
            Dialect::GseV2 | Dialect::GseApigw | Dialect::Abide => {
                self.ask("get_proc_operate_result_v2", json!({"task_id": id})).await
            }
        };
        match result {
            Err(CallError::Refused { code, .. }) if code == EnvelopeCode::NOT_QUEUED.0 => Ok(Rows::new()),
            result => result,
        }
    }
}

fn is_worth_a_retry(error: &BackendError) -> bool {
    error.may_have_run() || matches!(error, BackendError::Unreachable(_))
}

/// Response of a call.
enum CallAnswer {
    Rows(Rows),
    Task(String),
}

fn outcome(row: &Row) -> OperationState {
    match row.code() {
        RowCode::DONE => OperationState::Done { note: String::new() },
        RowCode::RUNNING | RowCode::STOPPING => OperationState::InProgress,
        code => OperationState::Failed { state: RowState::of(code), message: row.error_msg.clone() },
    }
}

impl Backend for Platform {
    fn dialect(&self) -> Dialect {
        self.wire.dialect
    }

    async fn observe(&self, scope: &Scope) -> Result<Observed, BackendError> {
        match self.wire.dialect {
            // JOB has no lists.
            Dialect::Job => {
                let mut observed = self.observe_live_once(&scope.subjects).await?;
                let is_there = |seen: &ObservedInstance| {
                    seen.unknown || seen.running != Some(false) || seen.hosted != Some(false)
                };
                observed.instances.retain(|_, seen| is_there(seen));
                Ok(observed)
            }
            Dialect::GseV1 | Dialect::GseV2 | Dialect::GseApigw | Dialect::Abide => {
                self.observe_scope(scope).await
            }
        }
    }

    async fn observe_live(&self, subjects: &[InstanceQuery]) -> Result<Observed, BackendError> {
        self.observe_live_once(subjects).await
    }

    fn batches(&self, orders: Vec<Operation>) -> Vec<Vec<Operation>> {
        let items: Vec<Item> = orders.iter().map(Item::of).collect();
        let calls = self.wire.calls(&items);
        let mut orders: Vec<Option<Operation>> = orders.into_iter().map(Some).collect();
        let call = |places: Vec<usize>| places.into_iter().filter_map(|at| orders[at].take()).collect();
        calls.into_iter().map(call).collect()
    }

    fn poll_interval(&self) -> (Duration, Duration) {
        (Duration::from_millis(200), Duration::from_millis(1500))
    }

    fn max_concurrent_calls(&self) -> usize {
        self.pace.at_once.max(1)
    }

    async fn submit(&self, _call: &str, orders: &[Operation]) -> Result<Task, BackendError> {
        let items: Vec<Item> = orders.iter().map(Item::of).collect();
        let keys: BTreeMap<InstanceKey, String> =
            items.iter().map(|item| (item.instance.clone(), self.wire.key(item))).collect();
        let mut task = Task::default();
        let ask = self.wire.ask(&items);
        match self.send(ask).await.map_err(error_of_write)? {
            CallAnswer::Task(id) => {
                task.ids.push(id);
                task.rows = orders.iter().map(|order| (order.instance.clone(), order.id.clone())).collect();
                task.keys = keys;
            }
            CallAnswer::Rows(rows) => {
                let found = |item: &Item| rows.get(&keys[&item.instance]);
                let exists = |item: &Item| found(item).is_some_and(|row| row.code() == RowCode::EXISTS);
                // Only an owned registration is updated; any other keeps the result 850.
                let there: Vec<(&Operation, &Item)> =
                    orders.iter().zip(&items).filter(|(_, item)| exists(item)).collect();
                let ours = self.ours(&there).await;
                let exists = |item: &Item| exists(item) && ours.contains(&item.instance);
                let known: Vec<Item> = items.iter().filter(|item| exists(item)).map(Item::as_known).collect();
                let updated = match known.is_empty() {
                    true => Rows::new(),
                    false => match self.send(self.wire.ask(&known)).await.map_err(error_of_write)? {
                        CallAnswer::Rows(rows) => rows,
                        CallAnswer::Task(_) => Rows::new(),
                    },
                };
                for (order, item) in orders.iter().zip(&items) {
                    let row = match exists(item) {
                        true => updated.get(&keys[&item.instance]),
                        false => found(item),
                    };
                    // A missing row has no result: the caller falls back to observation.
                    let result = row.map_or(OperationState::InProgress, outcome);
                    let (order, instance) = (order.id.clone(), order.instance.clone());
                    task.answered.push(OperationStatus { order, instance, result });
                }
            }
        }
        Ok(task)
    }

    async fn poll(&self, task: &Task) -> Result<Vec<OperationStatus>, BackendError> {
        let mut all = task.answered.clone();
        for id in &task.ids {
            let rows = self.results(id).await.map_err(error_of_query)?;
            for (instance, order) in &task.rows {
                let row = task.keys.get(instance).and_then(|key| rows.get(key));
                let result = row.map_or(OperationState::InProgress, outcome);
                all.push(OperationStatus { order: order.clone(), instance: instance.clone(), result });
            }
        }
        Ok(all)
    }
}
