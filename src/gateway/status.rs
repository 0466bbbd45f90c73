//! What is told of processes: by name and hosts, page by page; and the groups that pool their limits.

use serde_json::{Map, Value, json};

use super::registry::{Record, instance_of};
use super::tasks::instance;
use super::{Gateway, Refusal};
use crate::gse::answer::{Row, Rows, StatusData, StatusHost, StatusMeta, StatusRow};
use crate::gse::channel::{Down, Report};
use crate::gse::keys;
use crate::gse::request::ProcRequest;
use crate::model::{HostKey, InstanceKey, Name};
use crate::store::{Store, Txn};

/// The most rows on a page.
const PAGE: u64 = 1000;
/// What `flag` and `status` say.
const RUNNING: i64 = 1;
const STOPPED: i64 = 2;
/// GSE 2.0's words for an agent.
const AGENT_RUNS: i64 = 2;
const AGENT_UNKNOWN: i64 = -1;

impl<S: Store> Gateway<S> {
    /// get_proc_status, in both versions: the second adds what the first has no place for.
    pub async fn status(&self, request: &ProcRequest, second: bool) -> Result<StatusData, Refusal> {
        let (process, hosts) = (request.process()?, request.targets()?);
        let mut proc_infos = Vec::new();
        for host in hosts {
            let key = instance(&process, &host.key);
            if let Some(record) = self.record(&key).await? {
                proc_infos.push(self.row(&key, &record, second).await?);
            }
        }
        Ok(StatusData { count: None, proc_infos })
    }

    /// sync_proc_status: all of a namespace, in a stable order.
    pub async fn sync(&self, request: &ProcRequest) -> Result<StatusData, Refusal> {
        let namespace = namespace(request)?;
        let (start, limit) = (request.page.start.unwrap_or(0), request.page.limit.unwrap_or(PAGE));
        if limit == 0 || limit > PAGE {
            return Err(Refusal::Wrong(format!("page.limit is {limit}: it must be 1 to {PAGE}")));
        }
        let prefix = format!("reg/{namespace}/");
        let skip = usize::try_from(start).unwrap_or(usize::MAX);
        let (entries, count) = self.store.slice(&prefix, skip, limit as usize).await?;
        let mut proc_infos = Vec::with_capacity(entries.len());
        for entry in entries {
            if let (Some(key), Ok(record)) = (instance_of(&entry.key), serde_json::from_slice(&entry.value)) {
                proc_infos.push(self.row(&key, &record, true).await?);
            }
        }
        Ok(StatusData { count: Some(count as u64), proc_infos })
    }

    /// set_process_group_info: kept as it was sent, host by host.
    pub async fn set_groups(&self, request: &ProcRequest, body: &Value) -> Result<Rows, Refusal> {
        let namespace = namespace(request)?;
        let groups = body.pointer("/spec/process_group").filter(|groups| groups.is_array());
        let groups = groups.ok_or_else(|| Refusal::Wrong("spec.process_group is missing".to_owned()))?;
        let mut rows = Rows::new();
        let mut txn = Txn::default();
        let hosts = request.targets()?;
        for host in &hosts {
            let key = keys::v1_namespace(host, namespace.as_str())
                .unwrap_or_else(|| format!("{}:{namespace}", host.key));
            txn = txn.and(Txn::put(format!("group/{namespace}/{}", host.key), groups.to_string()));
            rows.insert(key, Row::done());
        }
        self.store.txn(txn).await?;
        for host in hosts {
            let (namespace, groups) = (namespace.to_string(), groups.clone());
            self.hosts.send(&host.key.clone(), Down::Groups { host: host.key, namespace, groups });
        }
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

    /// get_agent_status and list_agent_state: which hosts have a live agent.
    pub fn agents(&self, request: &ProcRequest, by_id: bool) -> Result<Value, Refusal> {
        let hosts = request.targets()?;
        if by_id {
            let state = |host: &HostKey| {
                let alive = self.hosts.alive(host);
                let status_code = if alive.is_some() { AGENT_RUNS } else { AGENT_UNKNOWN };
                json!({"bk_agent_id": bare(host), "status_code": status_code, "version": alive.unwrap_or_default()})
            };
            return Ok(Value::Array(hosts.iter().map(|host| state(&host.key)).collect()));
        }
        let states = hosts.iter().map(|host| {
            let alive = self.hosts.alive(&host.key);
            let mut state = host_value(&host.key);
            state["bk_agent_alive"] = json!(u8::from(alive.is_some()));
            state["version"] = json!(alive.unwrap_or_default());
            (bare(&host.key), state)
        });
        Ok(Value::Object(states.collect::<Map<String, Value>>()))
    }

    /// When a host told of an instance: an agent that is there would have told of a change.
    pub(super) fn reported_at(&self, host: &HostKey, report: Option<&Report>) -> i64 {
        let told = report.map_or(0, |report| report.at);
        self.hosts.last_heard(host).map_or(told, |heard| heard.max(told)) / 1000
    }

    async fn row(&self, key: &InstanceKey, record: &Record, second: bool) -> Result<StatusRow, Refusal> {
        let report = self.report(key).await?;
        let (ip, bk_cloud_id, bk_agent_id) = match &key.host {
            HostKey::Address { cloud, ip } => (ip.to_string(), *cloud, None),
            HostKey::Agent(id) => (String::new(), 0, Some(id.to_string())),
        };
        let given = &record.given;
        let ours = [
            ("abide_owner", given.owner.clone()),
            ("abide_rev", given.revision.map(|revision| revision.to_string())),
        ];
        let labels = given.spec.labels.iter().map(|(name, value)| (name.clone(), json!(value)));
        let ours = ours.into_iter().filter_map(|(name, value)| Some((name.to_owned(), json!(value?))));
        let hosted = report.as_ref().is_some_and(|report| report.hosted);
        let runs = report.as_ref().is_some_and(|report| report.live.is_some());
        let number = |yes: bool| if yes { RUNNING } else { STOPPED };
        // Nobody has told of it since it was registered.
        let report_time = self.reported_at(&key.host, report.as_ref()).max(record.registered);
        let report = report.as_ref();
        Ok(StatusRow {
            meta: StatusMeta {
                namespace: key.namespace.to_string(),
                name: key.name.to_string(),
                labels: labels.chain(ours).collect(),
            },
            host: StatusHost { ip, bk_cloud_id, bk_supplier_id: record.supplier },
            flag: number(hosted || runs),
            status: number(runs),
            isauto: second.then_some(hosted),
            message: report.map(|report| report.message.clone()).unwrap_or_default(),
            pid: report.and_then(|report| report.pid).map_or(-1, i64::from),
            version: report.map(|report| report.version.clone()).unwrap_or_default(),
            register_time: record.registered,
            last_start_time: report.map_or(0, |report| report.started / 1000),
            report_time,
            cpu_usage: report.map_or(0.0, |report| report.cpu),
            mem_usage: report.map_or(0.0, |report| report.mem),
            bk_agent_id,
            ..StatusRow::default()
        })
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
