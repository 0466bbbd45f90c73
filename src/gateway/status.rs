//! What is told of processes: by name and hosts, page by page; and the groups that pool their limits.

use serde_json::{Map, Value, json};

use super::registry::Record;
use super::{Gateway, Refusal, now_secs};
use crate::gse::answer::{Row, Rows, StatusData, StatusHost, StatusMeta, StatusRow};
use crate::gse::keys;
use crate::gse::request::ProcRequest;
use crate::model::{HostKey, InstanceKey, Name};
use crate::store::{Store, Txn};

/// The most rows on a page.
const PAGE: u64 = 1000;

impl<S: Store> Gateway<S> {
    /// get_proc_status, in both versions: the second adds what the first has no place for.
    pub async fn status(&self, request: &ProcRequest, second: bool) -> Result<StatusData, Refusal> {
        let (process, hosts) = (request.process()?, request.targets()?);
        let mut records = self.records(&process, &hosts).await?;
        let mut proc_infos = Vec::new();
        for host in hosts {
            let key = InstanceKey {
                host: host.key,
                namespace: process.namespace.clone(),
                name: process.name.clone(),
            };
            if let Some(record) = records.remove(&key) {
                proc_infos.push(row(&key, &record, second));
            }
        }
        Ok(StatusData { count: None, proc_infos })
    }

    /// sync_proc_status: all of a namespace, in a stable order.
    pub async fn sync(&self, request: &ProcRequest) -> Result<StatusData, Refusal> {
        let namespace: Name = match &request.meta.namespace {
            None => return Err(Refusal::Wrong("meta.namespace is missing".to_owned())),
            Some(text) => text
                .parse()
                .map_err(|error| Refusal::Wrong(format!("meta.namespace cannot be used: {error}")))?,
        };
        let (start, limit) = (request.page.start.unwrap_or(0), request.page.limit.unwrap_or(PAGE));
        if limit == 0 || limit > PAGE {
            return Err(Refusal::Wrong(format!("page.limit is {limit}: it must be 1 to {PAGE}")));
        }
        let prefix = format!("reg/{namespace}/");
        let all = self.store.range(&prefix, None, usize::MAX).await?.entries;
        let skip = usize::try_from(start).unwrap_or(usize::MAX);
        let shown = all.iter().skip(skip).take(limit as usize);
        let rows = shown.filter_map(|entry| {
            let (name, host) = entry.key[prefix.len()..].split_once('/')?;
            let (name, host) = (name.parse().ok()?, host.parse().ok()?);
            let record = serde_json::from_slice(&entry.value).ok()?;
            Some(row(&InstanceKey { host, namespace: namespace.clone(), name }, &record, true))
        });
        Ok(StatusData { count: Some(all.len() as u64), proc_infos: rows.collect() })
    }

    /// set_process_group_info: kept as it was sent, host by host.
    pub async fn set_groups(&self, request: &ProcRequest, body: &Value) -> Result<Rows, Refusal> {
        let namespace = namespace(request)?;
        let groups = body.pointer("/spec/process_group").filter(|groups| groups.is_array());
        let groups = groups.ok_or_else(|| Refusal::Wrong("spec.process_group is missing".to_owned()))?;
        let mut rows = Rows::new();
        let mut txn = Txn::default();
        for host in request.targets()? {
            let key = keys::v1_namespace(&host, namespace.as_str())
                .unwrap_or_else(|| format!("{}:{namespace}", host.key));
            txn = txn.and(Txn::put(format!("group/{namespace}/{}", host.key), groups.to_string()));
            rows.insert(key, Row::done());
        }
        self.store.txn(txn).await?;
        Ok(rows)
    }

    pub async fn groups(&self, request: &ProcRequest) -> Result<Value, Refusal> {
        let namespace = namespace(request)?;
        let mut infos = Vec::new();
        for host in request.targets()? {
            let Some(entry) = self.store.get(&format!("group/{namespace}/{}", host.key)).await? else {
                continue;
            };
            let groups: Value = serde_json::from_slice(&entry.value).unwrap_or_default();
            infos.push(json!({"meta": {"namespace": namespace}, "host": host_value(&host.key), "process_group": groups}));
        }
        Ok(json!({"process_group_infos": infos}))
    }

    /// get_agent_status and list_agent_state: which hosts have a live agent. So far none can.
    pub fn agents(&self, request: &ProcRequest, by_id: bool) -> Result<Value, Refusal> {
        let hosts = request.targets()?;
        if by_id {
            let state = |host: &HostKey| json!({"bk_agent_id": bare(host), "status_code": -1, "version": ""});
            return Ok(Value::Array(hosts.iter().map(|host| state(&host.key)).collect()));
        }
        let states = hosts.iter().map(|host| {
            let mut state = host_value(&host.key);
            state["bk_agent_alive"] = json!(0);
            state["version"] = json!("");
            (bare(&host.key), state)
        });
        Ok(Value::Object(states.collect::<Map<String, Value>>()))
    }
}

fn namespace(request: &ProcRequest) -> Result<Name, Refusal> {
    let text = request
        .meta
        .namespace
        .as_ref()
        .ok_or_else(|| Refusal::Wrong("meta.namespace is missing".to_owned()))?;
    text.parse().map_err(|error| Refusal::Wrong(format!("meta.namespace cannot be used: {error}")))
}

fn bare(host: &HostKey) -> String {
    match host {
        HostKey::Address { .. } => host.to_string(),
        HostKey::Agent(id) => id.to_string(),
    }
}

fn host_value(host: &HostKey) -> Value {
    match host {
        HostKey::Address { cloud, ip } => json!({"ip": ip.to_string(), "bk_cloud_id": cloud}),
        HostKey::Agent(id) => json!({"bk_agent_id": id}),
    }
}

/// Registered, and nobody has told of it running.
fn row(key: &InstanceKey, record: &Record, second: bool) -> StatusRow {
    const STOPPED: i64 = 2;
    let (ip, bk_cloud_id, bk_agent_id) = match &key.host {
        HostKey::Address { cloud, ip } => (ip.to_string(), *cloud, None),
        HostKey::Agent(id) => (String::new(), 0, Some(id.to_string())),
    };
    let labels = record.spec.labels.iter().map(|(name, value)| (name.clone(), json!(value)));
    StatusRow {
        meta: StatusMeta {
            namespace: key.namespace.to_string(),
            name: key.name.to_string(),
            labels: labels.collect(),
        },
        host: StatusHost { ip, bk_cloud_id, bk_supplier_id: record.supplier },
        flag: STOPPED,
        status: STOPPED,
        isauto: second.then_some(false),
        pid: -1,
        register_time: record.registered,
        report_time: now_secs(),
        bk_agent_id,
        ..StatusRow::default()
    }
}
