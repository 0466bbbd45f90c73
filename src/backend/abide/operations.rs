//! Operations on the gateway: request bodies and results.

use std::collections::{BTreeMap, HashMap};

use serde::Deserialize;
use serde_json::{Value, json};

use super::{Abide, read};
use crate::backend::{BackendError, Operation, OperationState, OperationStatus, RowState};
use crate::gse::codes::{GseOp, RowCode};
use crate::gse::{keys, spec_body};
use crate::model::{Dialect, Host, HostKey, Op};

/// Digest of a spec; `None`: no spec.
type Digest = Option<([u8; 16], u64)>;

impl Abide {
    /// Operations with equal process, op, spec and revision become one item with all of their hosts.
    pub(super) fn items(&self, orders: &[&Operation]) -> Vec<Value> {
        /// Process, operation, spec, revision, and whether drift is repaired.
        type Kind = (String, i64, Digest, String, bool);
        let mut items: BTreeMap<Kind, (Value, Vec<Value>)> = BTreeMap::new();
        for order in orders {
            let op = op_code(order.op);
            let spec = order.spec.as_ref().map(|spec| spec.digest());
            let rev = order.revision.map(|revision| revision.to_string()).unwrap_or_default();
            let process = order.instance.process().to_string();
            let repairs = order.repairs_drift();
            let (_, hosts) = items.entry((process, op, spec, rev, repairs)).or_insert_with(|| {
                let mut item = self.body(order);
                item["op_type"] = json!(op);
                if !order.reloaded_fields.is_empty() {
                    item["takes"] = order.reloaded_fields.iter().map(|field| field.path()).collect();
                }
                if repairs {
                    item["repairs"] = json!(true);
                }
                (item, Vec::new())
            });
            hosts.push(host_value(&order.host));
        }
        let whole = |(mut item, hosts): (Value, Vec<Value>)| {
            item["hosts"] = Value::Array(hosts);
            item
        };
        items.into_values().map(whole).collect()
    }

    pub(super) fn body(&self, order: &Operation) -> Value {
        let key = &order.instance;
        let mut labels = json!({});
        if let Some(owner) = &order.owner {
            labels["abide_owner"] = json!(owner);
        }
        if let Some(revision) = order.revision {
            labels["abide_rev"] = json!(revision.to_string());
        }
        for (name, value) in order.spec.iter().flat_map(|spec| &spec.labels) {
            labels[name] = json!(value);
        }
        let mut body = json!({"meta": {"namespace": key.namespace, "name": key.name, "labels": labels}});
        if let Some(spec) = &order.spec {
            body["spec"] = spec_body(spec, Dialect::Abide);
        }
        body
    }

    /// register and unregister return their results directly, per process.
    pub(super) async fn registry(
        &self,
        call: &str,
        orders: &[&Operation],
        answered: &mut Vec<OperationStatus>,
    ) -> Result<(), BackendError> {
        let mut calls: BTreeMap<(String, &str, Digest), Vec<&Operation>> = BTreeMap::new();
        for order in orders {
            let spec = order.spec.as_ref().map(|spec| spec.digest());
            let name = match order.op {
                Op::Unregister => "unregister_proc_info",
                // A first registration must not overwrite one made since the observation: the gateway returns 850.
                _ if !order.before.registered && !order.before.owned => "register_proc_info",
                _ => "update_proc_info",
            };
            calls.entry((order.instance.process().to_string(), name, spec)).or_default().push(order);
        }
        for (nth, ((_, name, _), orders)) in calls.into_iter().enumerate() {
            let mut body = self.body(orders[0]);
            body["hosts"] = orders.iter().map(|order| host_value(&order.host)).collect();
            let path = format!("/api/c/compapi/v2/gse/{name}/");
            let signed = self.signed(format!("{call}.{nth}"), orders[0]);
            let asked = self.post(&path, &body, &signed).await;
            let rows: HashMap<String, RowWire> = match asked {
                Ok(text) => read(&text)?,
                Err(fault @ (BackendError::Refused(_) | BackendError::Unreachable(_))) => {
                    let failed =
                        OperationState::Failed { state: RowState::Unreported, message: fault.to_string() };
                    answered.extend(orders.iter().map(|order| answer(order, failed.clone())));
                    continue;
                }
                Err(
                    fault @ (BackendError::NoAnswer | BackendError::Inconclusive(_) | BackendError::Busy(_)),
                ) => return Err(fault),
            };
            for order in orders {
                let process = order.instance.process();
                let key =
                    keys::v1(&order.host, &process).unwrap_or_else(|| keys::v2(&order.host.key, &process));
                let result = rows.get(&key).map_or(OperationState::InProgress, RowWire::outcome);
                answered.push(answer(order, result));
            }
        }
        Ok(())
    }
}

#[derive(Deserialize)]
pub(super) struct TaskWire {
    pub(super) task_id: String,
}

/// Begins the message of a success that has a note.
const SUCCESS_NOTE: &str = "success; ";

#[derive(Deserialize)]
pub(super) struct RowWire {
    error_code: i64,
    #[serde(default)]
    error_msg: String,
}

impl RowWire {
    pub(super) fn outcome(&self) -> OperationState {
        match RowCode(self.error_code) {
            RowCode::DONE => {
                let note = self.error_msg.strip_prefix(SUCCESS_NOTE).unwrap_or_default();
                OperationState::Done { note: note.to_owned() }
            }
            RowCode::RUNNING | RowCode::STOPPING => OperationState::InProgress,
            code => OperationState::Failed { state: RowState::of(code), message: self.error_msg.clone() },
        }
    }
}

fn answer(order: &Operation, result: OperationState) -> OperationStatus {
    OperationStatus { order: order.id.clone(), instance: order.instance.clone(), result }
}

fn op_code(op: Op) -> i64 {
    match op {
        Op::Start => GseOp::Start,
        Op::Stop => GseOp::Stop,
        Op::Supervise => GseOp::Host,
        Op::Unsupervise => GseOp::Unhost,
        Op::Restart => GseOp::Restart,
        Op::Reload => GseOp::Reload,
        Op::Kill => GseOp::Kill,
        // A separate call, not an operation.
        Op::Register | Op::Unregister => GseOp::Status,
    }
    .code()
}

pub(super) fn host_value(host: &Host) -> Value {
    match &host.key {
        HostKey::Address { cloud, ip } => {
            let mut value = json!({"ip": ip.to_string(), "bk_cloud_id": cloud});
            if let Some(supplier) = host.supplier {
                value["bk_supplier_id"] = json!(supplier);
            }
            value
        }
        HostKey::Agent(id) => json!({"bk_agent_id": id}),
    }
}
