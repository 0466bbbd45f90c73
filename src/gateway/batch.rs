//! Batches: items are judged one by one, and an item that is not valid gets a row of its own.
//!
//! Only a body that is not a batch at all is refused as a whole. The row of an invalid item has the key that its caller
//! expects, built from the item as written; an item without a host has its place in the body as key. Two items with one
//! key cannot be distinguished in the result: neither runs, and their row has that error.

use std::collections::{BTreeSet, HashMap};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::decode::describe_json_error;
use super::tasks::TaskItem;
use crate::gse::codes::{GseOp, RowCode};
use crate::gse::keys as result_keys;
use crate::gse::request::{HostWire, InvalidHost, ProcRequest, RequestError, WrittenHost};
use crate::gse::response::Row;
use crate::gse::{JobApi, JobBody, JobHost, JobProcess};
use crate::model::{Host, InstanceKey};

/// An item that is not carried out: the keys of its row in each form, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RejectedItem {
    /// Empty: the item names none.
    pub namespace: String,
    pub v1: String,
    pub v2: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
    pub message: String,
}

impl RejectedItem {
    pub fn row(&self) -> Row {
        Row::new(RowCode::BAD_ITEM, self.message.clone())
    }

    /// The row of an entry of `hosts` or `agent_id_list`.
    pub fn of_host(invalid: &InvalidHost, namespace: &str, name: &str) -> RejectedItem {
        RejectedItem::new(&invalid.written, namespace, name, invalid.error.to_string())
    }

    fn new(host: &WrittenHost, namespace: &str, name: &str, message: String) -> RejectedItem {
        let key = |host: &str| format!("{host}:{namespace}:{name}");
        let (v1, v2) = (key(&host.v1), key(&host.v2));
        RejectedItem { namespace: namespace.to_owned(), v1, v2, job: None, message }
    }

    /// The row of an item that is valid by itself.
    fn of_item(item: &TaskItem, message: String) -> RejectedItem {
        let (host, process) = (&item.instance.host, item.instance.process());
        let written = |key: String| result_keys::as_written(key, host, item.written.as_ref());
        let v2 = result_keys::v2(host, &process);
        let v1 = Host { key: host.clone(), supplier: item.supplier, agent_id: None };
        let v1 = result_keys::v1(&v1, &process).unwrap_or_else(|| v2.clone());
        let (namespace, job) = (process.namespace.to_string(), item.job_key.clone());
        RejectedItem { namespace, v1: written(v1), v2: written(v2), job, message }
    }

    /// JOB's key, or that of version 2.
    pub fn key(&self) -> &str {
        self.job.as_deref().unwrap_or(&self.v2)
    }

    /// The row of an item without a host.
    fn at(place: &str, namespace: &str, message: String) -> RejectedItem {
        let (namespace, key) = (namespace.to_owned(), || place.to_owned());
        RejectedItem { namespace, v1: key(), v2: key(), job: Some(key()), message }
    }
}

/// Rejects items whose result key occurs more than once in the call.
pub fn reject_repeated(items: &mut Vec<TaskItem>, rejected: &mut Vec<RejectedItem>) {
    let mut keys: HashMap<String, usize> = HashMap::new();
    let mut instances: HashMap<InstanceKey, usize> = HashMap::new();
    for item in items.iter() {
        *keys.entry(item_key(item)).or_default() += 1;
        // One instance may come under two spellings of its address.
        *instances.entry(item.instance.clone()).or_default() += 1;
    }
    rejected.iter().for_each(|item| *keys.entry(item.key().to_owned()).or_default() += 1);
    let is_repeated = |key: &str| keys.get(key).is_some_and(|times| *times > 1);
    let message = |key: &str| {
        format!("the call names {key} more than once, with one result row: send it in several calls")
    };
    // The row of an item that is not valid by itself has both errors.
    for item in rejected.iter_mut().filter(|item| is_repeated(item.key())) {
        item.message = format!("{}; {}", item.message, message(item.key()));
    }
    items.retain(|item| {
        let key = item_key(item);
        let is_single = !is_repeated(&key) && instances.get(&item.instance) == Some(&1);
        if !is_single {
            rejected.push(RejectedItem::of_item(item, message(&key)));
        }
        is_single
    });
}

/// The result key of an item: JOB's, or that of version 2.
fn item_key(item: &TaskItem) -> String {
    let host = &item.instance.host;
    let v2 = || {
        result_keys::as_written(result_keys::v2(host, &item.instance.process()), host, item.written.as_ref())
    };
    item.job_key.clone().unwrap_or_else(v2)
}

/// operate_proc_multi: its items, not read yet.
#[derive(Default, Deserialize)]
#[serde(default)]
pub struct RawOperations {
    proc_operate_req: Vec<Box<RawValue>>,
}

/// The valid items of a call, and the rows of the others.
#[derive(Debug, Default)]
pub struct Operations {
    pub requests: Vec<ProcRequest>,
    pub rejected: Vec<RejectedItem>,
}

impl RawOperations {
    pub fn read(self) -> Operations {
        let mut all = Operations::default();
        for (nth, raw) in self.proc_operate_req.iter().enumerate() {
            let place = format!("proc_operate_req[{nth}]");
            match serde_json::from_str::<ProcRequest>(raw.get()) {
                Ok(request) => match check(&request) {
                    Ok(()) => all.requests.push(request),
                    Err(error) => {
                        let message = format!("{place}.{error}");
                        all.rejected.extend(rows_of(&place, &WrittenItem::of(&request), &message));
                    }
                },
                Err(error) => {
                    let item: WrittenItem = serde_json::from_str(raw.get()).unwrap_or_default();
                    let message = format!("{place}: {}", describe_json_error(&error));
                    all.rejected.extend(rows_of(&place, &item, &message));
                }
            }
        }
        all
    }
}

/// Checks everything of an item but its hosts.
fn check(request: &ProcRequest) -> Result<(), RequestError> {
    request.process()?;
    let missing = |field: &str| RequestError { field: field.to_owned(), why: "is missing".to_owned() };
    let op = GseOp::from_code(request.op_type.ok_or_else(|| missing("op_type"))?);
    let spec = request.spec_of_op(op)?;
    if spec.is_none() && op != Some(GseOp::Status) {
        return Err(missing("spec"));
    }
    match request.hosts.is_empty() && request.agent_id_list.is_empty() {
        true => Err(missing("hosts")),
        false => Ok(()),
    }
}

/// The parts of an item that its row keys need, of any type.
#[derive(Default, Deserialize)]
#[serde(default)]
struct WrittenItem {
    meta: Value,
    hosts: Value,
    agent_id_list: Value,
    #[serde(skip)]
    read: Vec<HostWire>,
}

impl WrittenItem {
    fn of(request: &ProcRequest) -> WrittenItem {
        let text = |text: &Option<String>| text.clone().map_or(Value::Null, Value::String);
        let mut meta = Map::new();
        meta.insert("namespace".to_owned(), text(&request.meta.namespace));
        meta.insert("name".to_owned(), text(&request.meta.name));
        let agent_id_list = request.agent_id_list.iter().cloned().map(Value::String).collect();
        let read = request.hosts.clone();
        WrittenItem { meta: Value::Object(meta), hosts: Value::Null, agent_id_list, read }
    }

    fn text(&self, field: &str) -> String {
        match self.meta.get(field) {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Number(number)) => number.to_string(),
            _ => String::new(),
        }
    }

    /// Each host once.
    fn hosts(&self, place: &str) -> Vec<WrittenHost> {
        let unread = self.hosts.as_array().into_iter().flatten().cloned().map(HostWire::read);
        let hosts = self.read.iter().cloned().chain(unread).map(|host| host.written(place));
        let ids = self.agent_id_list.as_array().into_iter().flatten();
        let agents = ids.map(|id| WrittenHost::agent(id.as_str().unwrap_or_default(), place));
        let mut seen = BTreeSet::new();
        hosts.chain(agents).filter(|host| seen.insert(host.v1.clone())).collect()
    }
}

/// The rows of an invalid item: one per host, or one under its place in the body.
fn rows_of(place: &str, item: &WrittenItem, message: &str) -> Vec<RejectedItem> {
    let (namespace, name) = (item.text("namespace"), item.text("name"));
    let hosts = item.hosts(place);
    if hosts.is_empty() {
        return vec![RejectedItem::at(place, &namespace, message.to_owned())];
    }
    hosts.iter().map(|host| RejectedItem::new(host, &namespace, &name, message.to_owned())).collect()
}

/// A JOB body whose processes are not read yet.
#[derive(Default, Deserialize)]
#[serde(default)]
pub struct RawJobBody {
    bk_biz_id: Option<i64>,
    bk_scope_type: Option<String>,
    bk_scope_id: Option<Value>,
    op_type: Option<i64>,
    process_infos: Vec<Box<RawValue>>,
}

impl RawJobBody {
    /// The body with its valid processes and hosts, and the rows of the others.
    pub fn read(self, api: JobApi) -> Result<(JobBody, Vec<RejectedItem>), RequestError> {
        let RawJobBody { bk_biz_id, bk_scope_type, bk_scope_id, op_type, process_infos } = self;
        let mut body = JobBody { bk_biz_id, bk_scope_type, bk_scope_id, op_type, process_infos: Vec::new() };
        body.check_head()?;
        if process_infos.is_empty() {
            return Err(RequestError { field: "process_infos".to_owned(), why: "is missing".to_owned() });
        }
        let namespace = body.namespace_name();
        let mut rejected = Vec::new();
        for (nth, raw) in process_infos.iter().enumerate() {
            let item = JobItem { place: format!("process_infos[{nth}]"), namespace: namespace.as_str() };
            body.process_infos.extend(item.read(raw, api, op_type, &mut rejected));
        }
        Ok((body, rejected))
    }
}

/// One entry of process_infos.
struct JobItem<'a> {
    place: String,
    namespace: &'a str,
}

impl JobItem<'_> {
    fn read(
        &self,
        raw: &RawValue,
        api: JobApi,
        op_type: Option<i64>,
        rejected: &mut Vec<RejectedItem>,
    ) -> Option<JobProcess> {
        let place = &self.place;
        let Ok(mut fields) = serde_json::from_str::<Map<String, Value>>(raw.get()) else {
            rejected.push(RejectedItem::at(place, self.namespace, format!("{place} is not an object")));
            return None;
        };
        let list = fields.remove("ip_list");
        let entries = list.as_ref().and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        if entries.is_empty() {
            let message = format!("{place}.ip_list is missing");
            rejected.push(RejectedItem::at(place, self.namespace, message));
            return None;
        }
        let row = |entry: &Value, message: String| self.row(&fields, entry, message);
        let mut hosts: Vec<(JobHost, &Value)> = Vec::new();
        for (at, entry) in entries.iter().enumerate() {
            match job_host(entry) {
                Ok(host) => hosts.push((host, entry)),
                Err(why) => rejected.push(row(entry, format!("{place}.ip_list[{at}]{why}"))),
            }
        }
        if hosts.is_empty() {
            return None;
        }
        let ip_list: Vec<JobHost> = hosts.iter().map(|(host, _)| host.clone()).collect();
        let process = serde_json::from_value::<JobProcess>(Value::Object(fields.clone()))
            .map(|process| JobProcess { ip_list, ..process })
            .map_err(|error| ItemError::Json(describe_json_error(&error)));
        let checked = process.and_then(|process| match process.check(api, op_type) {
            Ok(()) => Ok(process),
            Err(error) => Err(ItemError::Field(error)),
        });
        match checked {
            Ok(process) => Some(process),
            Err(error) => {
                let message = format!("{place}{error}");
                let mut seen = BTreeSet::new();
                let rows = hosts.iter().map(|(_, entry)| row(entry, message.clone()));
                rejected.extend(rows.filter(|row| seen.insert(row.v2.clone())));
                None
            }
        }
    }

    /// The row of one host of this item.
    fn row(&self, fields: &Map<String, Value>, entry: &Value, message: String) -> RejectedItem {
        let text = |field: &str| fields.get(field).and_then(Value::as_str).unwrap_or_default();
        let name = Some(text("value_key")).filter(|key| !key.is_empty()).unwrap_or(text("proc_name"));
        let host = HostWire::read(entry.clone()).written(&self.place);
        let program = format!("{}/{}", text("setup_path").trim_end_matches('/'), text("proc_name"));
        let job = Some(format!("{program}:{}", host.v2));
        RejectedItem { job, ..RejectedItem::new(&host, self.namespace, name, message) }
    }
}

/// Defect of an item, after its place in the body.
#[derive(Debug, thiserror::Error)]
enum ItemError {
    #[error(".{0}")]
    Field(RequestError),
    #[error(": {0}")]
    Json(String),
}

fn job_host(entry: &Value) -> Result<JobHost, ItemError> {
    let host = JobHost::deserialize(entry).map_err(|error| ItemError::Json(describe_json_error(&error)))?;
    match host.ip.parse::<std::net::IpAddr>() {
        Ok(_) => Ok(host),
        Err(_) => {
            let (field, why) = ("ip".to_owned(), "is not an IP address".to_owned());
            Err(ItemError::Field(RequestError { field, why }))
        }
    }
}
