//! Process status calls: by name and hosts, paged by namespace; process groups; and agent status.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};

use super::registry::MAX_ATTEMPTS;
use super::tasks::instance;
use super::{ApiError, Caller, Gateway};
use crate::access::Grant;
use crate::agent_protocol::ToAgent;
use crate::gse::codes::RowCode;
use crate::gse::keys as result_keys;
use crate::gse::request::{InvalidHost, ProcRequest, Targets};
use crate::gse::response::{
    AgentState, AgentStatus, GroupData, GroupHost, GroupInfo, GroupMeta, HostAddress, Row, Rows, StatusData,
    StatusHost, StatusMeta, StatusRow,
};
use crate::model::{HostKey, InstanceKey, Name, Percent, ProcessKey, SpecRevision};
use crate::store::{Entry, Error, Store, Txn, TxnOutcome, keys};

/// Maximum rows per page.
const PAGE: u64 = 1000;
/// Values of `flag` and `status`.
const RUNNING: i64 = 1;
const STOPPED: i64 = 2;
/// GSE 2.0 status codes of an agent.
const AGENT_RUNS: i64 = 2;
const AGENT_UNKNOWN: i64 = -1;

impl<S: Store> Gateway<S> {
    /// get_proc_status, in both versions; the second has additional fields.
    pub async fn status(
        &self,
        request: &ProcRequest,
        second: bool,
        grant: &Grant,
    ) -> Result<StatusData, ApiError> {
        let (process, targets) = (request.process()?, request.usable_targets()?);
        let mut proc_infos: Vec<StatusRow> =
            targets.invalid.iter().map(|invalid| invalid_row(invalid, &process)).collect();
        for host in targets.hosts {
            let key = instance(&process, &host.key);
            let entry = self.store.get(&keys::registration(&key)).await?;
            if let Some(entry) = entry.filter(|entry| is_visible(grant, &key, entry)) {
                proc_infos.push(self.row(key, entry.decode(), second, grant).await?);
            }
        }
        Ok(StatusData { count: None, proc_infos })
    }

    /// sync_proc_status: all processes of a namespace, in a stable order.
    pub async fn sync(&self, request: &ProcRequest, grant: &Grant) -> Result<StatusData, ApiError> {
        let namespace = namespace(request)?;
        let page = request.page.unwrap_or_default();
        let (start, limit) = (page.start.unwrap_or(0), page.limit.unwrap_or(PAGE));
        if limit == 0 || limit > PAGE {
            return Err(ApiError::BadRequest(format!("page.limit is {limit}: it must be 1 to {PAGE}")));
        }
        let prefix = keys::registrations_prefix(namespace.as_str());
        let skip = usize::try_from(start).unwrap_or(usize::MAX);
        let (entries, count) = self.visible_slice(grant, &prefix, skip, limit as usize).await?;
        let mut proc_infos = Vec::with_capacity(entries.len());
        for entry in entries {
            if let Some(key) = keys::instance_of(&entry.key) {
                proc_infos.push(self.row(key, entry.decode(), true, grant).await?);
            }
        }
        Ok(StatusData { count: Some(count as u64), proc_infos })
    }

    /// Registrations by offset and their count, without those that the app may not see.
    async fn visible_slice(
        &self,
        grant: &Grant,
        prefix: &str,
        skip: usize,
        limit: usize,
    ) -> Result<(Vec<Entry>, usize), ApiError> {
        if !grant.is_bound_to_owners() && !grant.is_bound_to_hosts() {
            return Ok(self.store.slice(prefix, skip, limit).await?);
        }
        let is_visible =
            |entry: &Entry| keys::instance_of(&entry.key).is_some_and(|key| is_visible(grant, &key, entry));
        self.filtered_slice(prefix, skip, limit, is_visible).await
    }

    /// set_process_group_info: stored as sent, per host.
    pub async fn set_groups(
        &self,
        request: &ProcRequest,
        body: &Value,
        caller: &Caller,
    ) -> Result<Rows, ApiError> {
        let namespace = namespace(request)?;
        let groups = body.pointer("/spec/process_group").filter(|groups| groups.is_array());
        let groups =
            groups.ok_or_else(|| ApiError::BadRequest("spec.process_group is missing".to_owned()))?;
        check_groups(groups)?;
        let (Targets { hosts, invalid }, written) = (request.usable_targets()?, request.written());
        let invalid = invalid.iter().map(|invalid| {
            let row = Row::new(RowCode::BAD_ITEM, invalid.error.to_string());
            (format!("{}:{namespace}", invalid.written.v1), row)
        });
        let invalid: Rows = invalid.collect();
        let rows = 'written: {
            for _ in 0..MAX_ATTEMPTS {
                let (mut txn, fenced) = self.fence(caller).await?;
                let mut rows = invalid.clone();
                for host in &hosts {
                    let key = result_keys::v1_namespace(host, namespace.as_str())
                        .unwrap_or_else(|| format!("{}:{namespace}", host.key));
                    let key = result_keys::as_written(key, &host.key, written.get(&host.key));
                    if let Some(done) = &fenced {
                        rows.insert(key, Row::new(RowCode(done.code), done.message.clone()));
                        continue;
                    }
                    txn = txn.and(Txn::put(keys::group(namespace.as_str(), &host.key), groups.to_string()));
                    rows.insert(key, Row::done());
                }
                if fenced.is_some() {
                    return Ok(rows);
                }
                // Conflict: the lease was renewed or acquired between the check and the commit.
                if let TxnOutcome::Written(_) = self.store.txn(txn).await? {
                    break 'written rows;
                }
            }
            return Err(ApiError::BadRequest(
                "too many concurrent changes of the owner's writer lease: try again".to_owned(),
            ));
        };
        for host in hosts {
            let (namespace, groups) = (namespace.to_string(), groups.clone());
            self.hosts.send(&host.key.clone(), ToAgent::Groups { host: host.key, namespace, groups });
        }
        Ok(rows)
    }

    /// get_process_group_info: one row per group. The groups belong to the namespace, so name and labels are the caller's.
    pub async fn groups(&self, request: &ProcRequest) -> Result<GroupData, ApiError> {
        let namespace = namespace(request)?;
        let name = request.meta.name.as_deref().unwrap_or_default();
        let labels = request.meta.labels.iter().flatten();
        let mut infos = Vec::new();
        // The answer has no place for the error of a host: one that cannot be used has no groups.
        for host in request.usable_targets()?.hosts {
            let Some(entry) = self.store.get(&keys::group(namespace.as_str(), &host.key)).await? else {
                continue;
            };
            let labels = labels.clone().map(|(name, value)| (name.clone(), value.to_string())).collect();
            let meta = GroupMeta { namespace: namespace.to_string(), name: name.to_owned(), labels };
            let group_host =
                GroupHost { address: host_address(&host.key), bk_supplier_id: host.supplier.unwrap_or(0) };
            let groups: Vec<Value> = entry.decode()?;
            infos.extend(groups.into_iter().map(|mut group| GroupInfo {
                meta: meta.clone(),
                host: group_host.clone(),
                id: group["id"].take(),
                resource: group["resource"].take(),
            }));
        }
        Ok(GroupData { process_group_infos: infos })
    }

    /// list_agent_state: hosts with a connected agent.
    pub fn agent_states(&self, request: &ProcRequest) -> Result<Vec<AgentState>, ApiError> {
        let state = |host: &HostKey| {
            let alive = self.hosts.agent_version(host);
            let status_code = if alive.is_some() { AGENT_RUNS } else { AGENT_UNKNOWN };
            AgentState { bk_agent_id: host_text(host), status_code, version: alive.unwrap_or_default() }
        };
        let targets = request.usable_targets()?;
        let unknown = |invalid: &InvalidHost| AgentState {
            bk_agent_id: invalid.written.v2.clone(),
            status_code: AGENT_UNKNOWN,
            version: String::new(),
        };
        let known = targets.hosts.iter().map(|host| state(&host.key));
        Ok(known.chain(targets.invalid.iter().map(unknown)).collect())
    }

    /// get_agent_status: the [`AgentStatus`] of each host, in the order of the request.
    pub fn agents(&self, request: &ProcRequest) -> Result<Map<String, Value>, ApiError> {
        let Targets { hosts, invalid } = request.usable_targets()?;
        let state = |host: &HostKey| {
            let alive = self.hosts.agent_version(host);
            let bk_agent_alive = u8::from(alive.is_some());
            let version = alive.unwrap_or_default();
            let status = AgentStatus { host: host_address(host), bk_agent_alive, version };
            Ok((host_text(host), serde_json::to_value(status)?))
        };
        let dead = |invalid: &InvalidHost| {
            let host = HostAddress {
                ip: Some(invalid.written.ip.clone()),
                bk_cloud_id: invalid.written.cloud,
                bk_agent_id: None,
            };
            let status = AgentStatus { host, bk_agent_alive: 0, version: String::new() };
            Ok((invalid.written.v2.clone(), serde_json::to_value(status)?))
        };
        hosts.iter().map(|host| state(&host.key)).chain(invalid.iter().map(dead)).collect()
    }

    /// Report time of an instance. A connected agent reports every change, so its last contact counts as a report.
    pub(super) fn reported_at(&self, host: &HostKey, at_ms: i64) -> i64 {
        self.hosts.last_contact(host).map_or(at_ms, |contact| contact.max(at_ms)) / 1000
    }

    /// The row of an instance. A value that cannot be read is logged and named in the message; without a time of a report,
    /// clients take the row as unknown, and it concerns no other row.
    async fn row(
        &self,
        key: InstanceKey,
        record: Result<RegisteredFields, Error>,
        second: bool,
        grant: &Grant,
    ) -> Result<StatusRow, ApiError> {
        let entry = self.store.get(&keys::report(&key)).await?;
        let report: Result<Option<ReportFields>, Error> = entry.as_ref().map(Entry::decode).transpose();
        let errors = [record.as_ref().err(), report.as_ref().err()];
        let unreadable = errors.into_iter().flatten().map(ToString::to_string).next();
        if let Some(error) = &unreadable {
            tracing::error!(%error, instance = %key, "cannot read a stored value");
        }
        let (record, report) = (record.unwrap_or_default(), report.ok().flatten().unwrap_or_default());
        let (ip, bk_cloud_id) = match &key.host {
            HostKey::Address { cloud, ip } => (ip.to_string(), *cloud),
            HostKey::Agent(_) => (String::new(), 0),
        };
        // Without an agent id the host's address is used, as in requests.
        let bk_agent_id = second.then(|| host_text(&key.host));
        let OwnedSpecFields { spec, owner, revision } = record.given;
        let has_secrets = spec.env.values().any(|value| matches!(value, EnvKind::Secret(_)));
        let revision = match revision {
            Some(revision) if has_secrets => self.revision_label(&revision, owner.as_deref(), grant).await,
            revision => revision.map(|revision| revision.to_string()),
        };
        let ours = [("abide_owner", owner), ("abide_rev", revision)];
        let ours = ours.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
        let labels = spec.labels.into_iter().chain(ours).map(|(name, value)| (name, Value::String(value)));
        let runs = report.live.is_some();
        let number = |yes: bool| if yes { RUNNING } else { STOPPED };
        let figures = self.figures_of(&key).filter(|_| runs);
        Ok(StatusRow {
            meta: StatusMeta {
                namespace: key.namespace.to_string(),
                name: key.name.to_string(),
                labels: labels.collect(),
            },
            flag: number(report.hosted || runs),
            status: number(runs),
            isauto: second.then_some(report.hosted),
            message: unreadable.clone().unwrap_or(report.message),
            pid: report.pid.map_or(-1, i64::from),
            version: report.version,
            register_time: record.registered,
            last_start_time: report.started / 1000,
            // Without a report since the registration, its time counts.
            report_time: match unreadable {
                Some(_) => 0,
                None => self.reported_at(&key.host, report.at).max(record.registered),
            },
            cpu_usage: figures.as_ref().map_or(report.cpu, |figures| figures.cpu_percent),
            mem_usage: figures.as_ref().map_or(report.mem, |figures| figures.mem_percent),
            fd: figures.map_or(0, |figures| figures.details.fds.into()),
            host: StatusHost { ip, bk_cloud_id, bk_supplier_id: Some(record.supplier.unwrap_or(0)) },
            bk_agent_id,
            ..StatusRow::default()
        })
    }
}

/// Whether an app may see a registration. One that cannot be read has no known owner.
fn is_visible(grant: &Grant, key: &InstanceKey, entry: &Entry) -> bool {
    if !grant.is_bound_to_owners() {
        return grant.may_see(key, None);
    }
    entry.decode::<RegisteredFields>().is_ok_and(|fields| grant.may_see(key, fields.given.owner.as_deref()))
}

/// The row of a host that cannot be used: not registered, with the error as message.
fn invalid_row(invalid: &InvalidHost, process: &ProcessKey) -> StatusRow {
    StatusRow {
        meta: StatusMeta {
            namespace: process.namespace.to_string(),
            name: process.name.to_string(),
            labels: Map::new().into_iter().collect(),
        },
        message: invalid.error.to_string(),
        pid: -1,
        host: StatusHost {
            ip: invalid.written.ip.clone(),
            bk_cloud_id: invalid.written.cloud.unwrap_or_default(),
            bk_supplier_id: Some(0),
        },
        ..StatusRow::default()
    }
}

/// The fields of a record that a row needs: parsing the rest would take most of the time.
#[derive(Default, Deserialize)]
struct RegisteredFields {
    given: OwnedSpecFields,
    supplier: Option<u64>,
    registered: i64,
}

#[derive(Default, Deserialize)]
struct OwnedSpecFields {
    spec: SpecLabels,
    owner: Option<String>,
    revision: Option<SpecRevision>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct SpecLabels {
    labels: BTreeMap<String, String>,
    env: BTreeMap<String, EnvKind>,
}

/// Kind of a stored variable, without its value.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum EnvKind {
    Text(IgnoredAny),
    File(IgnoredAny),
    Exec(IgnoredAny),
    Secret(IgnoredAny),
    Digest(IgnoredAny),
}

/// The fields of a report that a row needs.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ReportFields {
    at: i64,
    hosted: bool,
    pid: Option<u32>,
    live: Option<IgnoredAny>,
    started: i64,
    message: String,
    version: String,
    cpu: f64,
    mem: f64,
}

/// Checks that limits are percentages and weights are 0 or 1.
fn check_groups(groups: &Value) -> Result<(), ApiError> {
    for (at, group) in groups.as_array().into_iter().flatten().enumerate() {
        let wrong = |name: &str, why: &str| {
            Err(ApiError::BadRequest(format!("spec.process_group[{at}].resource.{name} {why}")))
        };
        let resource = group.get("resource").unwrap_or(&Value::Null);
        for name in ["cpu_pool_limit", "mem_pool_limit"] {
            let share = resource.get(name).filter(|limit| !limit.is_null());
            if share.is_some_and(|limit| limit.as_f64().and_then(Percent::new).is_none()) {
                return wrong(name, "is not a percentage between 0 and 100");
            }
        }
        for name in ["cpu_pool_weight", "mem_pool_weight"] {
            let weight = resource.get(name).filter(|weight| !weight.is_null());
            if weight.is_some_and(|weight| !matches!(weight.as_u64(), Some(0 | 1))) {
                return wrong(name, "must be 0 or 1");
            }
        }
    }
    Ok(())
}

fn namespace(request: &ProcRequest) -> Result<Name, ApiError> {
    let text = request
        .meta
        .namespace
        .as_ref()
        .ok_or_else(|| ApiError::BadRequest("meta.namespace is missing".to_owned()))?;
    text.parse().map_err(|error| ApiError::BadRequest(format!("meta.namespace is not valid: {error}")))
}

fn host_text(host: &HostKey) -> String {
    match host {
        HostKey::Address { .. } => host.to_string(),
        HostKey::Agent(id) => id.to_string(),
    }
}

fn host_address(host: &HostKey) -> HostAddress {
    match host {
        HostKey::Address { cloud, ip } => {
            HostAddress { ip: Some(ip.to_string()), bk_cloud_id: Some(*cloud), bk_agent_id: None }
        }
        HostKey::Agent(id) => HostAddress { bk_agent_id: Some(id.to_string()), ..HostAddress::default() },
    }
}
