//! Observation of a platform: lists, which may be old, and live checks.
//!
//! Incomplete data is unknown, not absent: a namespace whose pages do not add up, a row without the supervision flag, a
//! host whose agent is not known to be alive.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use futures_util::stream;
use serde_json::{Value, json};
use tracing::warn;

use super::wire::Item;
use super::{CallAnswer, Platform, error_of_query};
use crate::backend::live_check::{facts, live};
use crate::backend::{BackendError, InstanceQuery, Scope};
use crate::clock;
use crate::gse::codes::{EnvelopeCode, RowCode};
use crate::gse::response::{Row, StatusData, StatusRow};
use crate::http::CallError;
use crate::model::{
    Dialect, Host, HostKey, InstanceKey, KnownSpec, LastRun, Name, Observed, ObservedInstance, ObservedSpecs,
    Protection, RunningProcess, Time,
};

/// Hosts per call, rows per page.
const BATCH: usize = 1000;
/// Up to this many queries by name are cheaper than the pages of a namespace.
const FEW: usize = 4;
/// Timeout of a live check.
const CLOSE: Duration = Duration::from_secs(10);
/// Status code of a running agent in GSE 2.0.
const AGENT_RUNS: i64 = 2;
/// Value of `status` for a running process, and of `flag` for one that should run.
const RUNNING: i64 = 1;

/// Result row per instance.
type InstanceRows = Vec<(InstanceKey, Option<Row>)>;

type Processes<'a> = BTreeMap<(&'a Name, &'a Name), Vec<&'a Host>>;

impl Platform {
    /// Lists the scope.
    pub(super) async fn observe_scope(&self, scope: &Scope) -> Result<Observed, BackendError> {
        let at = clock::now();
        let mut observed = Observed { at, ..Observed::default() };
        let mut processes: Processes<'_> = BTreeMap::new();
        for InstanceQuery { instance, host, .. } in &scope.subjects {
            processes.entry((&instance.namespace, &instance.name)).or_default().push(host);
        }
        let mut namespaces: BTreeSet<&Name> = scope.namespaces.iter().collect();
        namespaces.extend(processes.keys().map(|(namespace, _)| *namespace));
        let known = by_agent(scope);
        for namespace in namespaces {
            let of_it: Vec<_> = processes.iter().filter(|((its, _), _)| *its == namespace).collect();
            let questions: usize = of_it.iter().map(|(_, hosts)| hosts.len().div_ceil(BATCH)).sum();
            let rows = match questions > FEW || scope.namespaces.contains(namespace) {
                true => self.sync(namespace).await?,
                false => None,
            };
            let rows = match rows {
                Some(rows) => rows,
                None if scope.namespaces.contains(namespace) => {
                    // Incomplete pages: an instance that they do not contain is unknown.
                    for subject in scope.subjects.iter().filter(|s| s.instance.namespace == *namespace) {
                        observed.instances.entry(subject.instance.clone()).or_default().unknown = true;
                    }
                    continue;
                }
                None => self.by_name(&of_it).await?,
            };
            for row in rows {
                if let Some(key) = instance_of(&row, &known) {
                    observed.instances.insert(key, seen(&row));
                }
            }
        }
        self.agents(scope, &mut observed).await;
        self.observe_supervision(scope, &mut observed).await;
        Ok(observed)
    }

    /// Rows of some processes by name, for their labels.
    pub(super) async fn labels(
        &self,
        scope: &Scope,
    ) -> Result<BTreeMap<InstanceKey, ObservedInstance>, BackendError> {
        let mut processes: Processes<'_> = BTreeMap::new();
        for InstanceQuery { instance, host, .. } in &scope.subjects {
            processes.entry((&instance.namespace, &instance.name)).or_default().push(host);
        }
        let known = by_agent(scope);
        let rows = self.by_name(&processes.iter().collect::<Vec<_>>()).await?;
        Ok(rows.iter().filter_map(|row| Some((instance_of(row, &known)?, seen(row)))).collect())
    }

    /// All rows of a namespace; `None`: incomplete.
    async fn sync(&self, namespace: &Name) -> Result<Option<Vec<StatusRow>>, BackendError> {
        let mut all: Vec<StatusRow> = Vec::new();
        loop {
            let page = json!({"start": all.len(), "limit": BATCH});
            let body = json!({"meta": {"namespace": namespace}, "page": page});
            let data: StatusData = self.question("sync_proc_status", body).await.map_err(error_of_query)?;
            let (many, count) = (data.proc_infos.len(), data.count.unwrap_or(0));
            all.extend(data.proc_infos);
            let so_far = u64::try_from(all.len()).unwrap_or(u64::MAX);
            if so_far >= count {
                let names: BTreeSet<_> = all
                    .iter()
                    .map(|row| (&row.host.ip, row.host.bk_cloud_id, &row.meta.name, &row.bk_agent_id))
                    .collect();
                // Rows added or removed between two pages shift the others.
                let whole = so_far == count && names.len() == all.len();
                return Ok(whole.then_some(all));
            }
            if many == 0 {
                warn!(%namespace, so_far, count, "the pages of the namespace are incomplete");
                return Ok(None);
            }
        }
    }

    /// The rows of some processes on their hosts.
    async fn by_name(
        &self,
        processes: &[(&(&Name, &Name), &Vec<&Host>)],
    ) -> Result<Vec<StatusRow>, BackendError> {
        let name = match self.wire.dialect {
            Dialect::GseV1 => "get_proc_status",
            Dialect::GseV2 | Dialect::GseApigw | Dialect::Job | Dialect::Abide => "get_proc_status_v2",
        };
        let mut questions = Vec::new();
        for ((namespace, process), hosts) in processes {
            for hosts in hosts.chunks(BATCH) {
                let hosts: Vec<Host> = hosts.iter().map(|host| (*host).clone()).collect();
                let (field, hosts) = self.wire.where_(&hosts);
                let mut body = json!({"meta": {"namespace": namespace, "name": process}});
                body[field] = hosts;
                questions.push(body);
            }
        }
        let ask = |body: Value| async move {
            self.question::<StatusData>(name, body).await.map_err(error_of_query)
        };
        let answers: Vec<Result<StatusData, BackendError>> =
            stream::iter(questions).map(ask).buffer_unordered(self.pace.at_once.max(1)).collect().await;
        let mut all = Vec::new();
        for answer in answers {
            all.extend(answer?.proc_infos);
        }
        Ok(all)
    }

    /// Adds a gap for each host whose agent is not known to be alive.
    async fn agents(&self, scope: &Scope, observed: &mut Observed) {
        let mut hosts: BTreeMap<HostKey, Host> =
            scope.subjects.iter().map(|subject| (subject.host.key.clone(), subject.host.clone())).collect();
        for key in observed.instances.keys() {
            let host = || Host { key: key.host.clone(), supplier: None, agent_id: None };
            hosts.entry(key.host.clone()).or_insert_with(host);
        }
        let hosts: Vec<Host> = hosts.into_values().collect();
        for chunk in hosts.chunks(BATCH) {
            match self.alive(chunk).await {
                Ok(alive) => {
                    let gone = chunk.iter().filter(|host| !alive.contains(&host.key));
                    let gap = |host: &Host| (host.key.clone(), "the agent is not alive".to_owned());
                    observed.gaps.extend(gone.map(gap));
                }
                Err(broken) => {
                    let why = format!("cannot query the agent state: {broken}");
                    observed.gaps.extend(chunk.iter().map(|host| (host.key.clone(), why.clone())));
                }
            }
        }
    }

    async fn alive(&self, hosts: &[Host]) -> Result<BTreeSet<HostKey>, CallError> {
        let (field, value) = self.wire.where_(hosts);
        let mut body = json!({});
        body[field] = value;
        let is_apigw = self.wire.dialect == Dialect::GseApigw;
        let name = if is_apigw { "list_agent_state" } else { "get_agent_status" };
        let answer: Value = match self.question(name, body).await {
            Err(CallError::Refused { code, .. }) if code == EnvelopeCode::NO_AGENTS.0 => json!([]),
            result => result?,
        };
        let lives = |host: &&Host| match is_apigw {
            true => {
                let (_, id) = self.wire.where_(std::slice::from_ref(host));
                let mut rows = answer.as_array().into_iter().flatten();
                rows.any(|row| row["bk_agent_id"] == id[0] && row["status_code"] == AGENT_RUNS)
            }
            false => answer[host.key.to_string()]["bk_agent_alive"] == 1,
        };
        Ok(hosts.iter().filter(lives).map(|host| host.key.clone()).collect())
    }

    /// GSE 1.0 lists do not contain the supervision flag of a running process: a live check adds it.
    async fn observe_supervision(&self, scope: &Scope, observed: &mut Observed) {
        let unflagged = |subject: &&InstanceQuery| {
            let row = observed.instances.get(&subject.instance);
            !observed.gaps.contains_key(&subject.host.key)
                && row.is_some_and(|seen| !seen.unknown && seen.hosted.is_none())
        };
        let unflagged: Vec<InstanceQuery> = scope.subjects.iter().filter(unflagged).cloned().collect();
        if unflagged.is_empty() {
            return;
        }
        match self.observe_live_once(&unflagged).await {
            Ok(closer) => observed.merge_live_check(closer),
            Err(why) => warn!(%why, "cannot determine which processes are supervised"),
        }
    }

    /// Operation 2 for each instance: live, read-only.
    pub(super) async fn observe_live_once(
        &self,
        subjects: &[InstanceQuery],
    ) -> Result<Observed, BackendError> {
        let mut observed = Observed { at: clock::now(), ..Observed::default() };
        // Without a registry the target identifies a process by its spec only.
        let can = |subject: &&InstanceQuery| self.wire.dialect == Dialect::GseV1 || subject.spec.is_some();
        let items: Vec<Item> = subjects.iter().filter(can).map(Item::live_check).collect();
        let calls = self.wire.calls(&items);
        let look = |places: Vec<usize>| {
            let items: Vec<Item> = places.into_iter().map(|at| items[at].clone()).collect();
            async move {
                let rows = self.look_once(&items).await?;
                let found = |item: &Item| (item.instance.clone(), rows.get(&self.wire.key(item)).cloned());
                Ok(items.iter().map(found).collect::<InstanceRows>())
            }
        };
        let answers: Vec<Result<InstanceRows, BackendError>> =
            stream::iter(calls).map(look).buffer_unordered(self.pace.at_once.max(1)).collect().await;
        let mut rows: HashMap<InstanceKey, Row> = HashMap::new();
        for answer in answers {
            rows.extend(answer?.into_iter().filter_map(|(key, row)| Some((key, row?))));
        }
        let replied = clock::now();
        for subject in subjects {
            let key = subject.instance.clone();
            match rows.get(&key).map(|row| (row.code(), row)) {
                Some((RowCode::DONE, row)) => {
                    observed.instances.insert(key, live(&row.content, observed.at, replied));
                }
                Some((RowCode::AGENT_MISSING, row)) => {
                    observed.gaps.insert(key.host, row.error_msg.clone());
                }
                Some((RowCode::NOT_RUNNING, _)) => {
                    observed.instances.insert(key, facts(None, false, observed.at));
                }
                Some((code, _)) => {
                    // Queried by name only: most likely not registered, and then in no list.
                    let unheard = self.wire.dialect == Dialect::GseV1 && code != RowCode::RUNNING;
                    let registered = unheard.then_some(false);
                    observed.instances.insert(
                        key,
                        ObservedInstance { unknown: true, registered, ..ObservedInstance::default() },
                    );
                }
                None => {
                    observed
                        .instances
                        .insert(key, ObservedInstance { unknown: true, ..ObservedInstance::default() });
                }
            }
        }
        Ok(observed)
    }

    async fn look_once(&self, items: &[Item]) -> Result<BTreeMap<String, Row>, BackendError> {
        // A repeated query changes nothing.
        let mut sent = self.send(self.wire.ask(items)).await;
        if sent.as_ref().is_err_and(|broken| error_of_query(broken.clone()).may_have_run()) {
            sent = self.send(self.wire.ask(items)).await;
        }
        let id = match sent.map_err(error_of_query)? {
            CallAnswer::Task(id) => id,
            CallAnswer::Rows(rows) => return Ok(rows),
        };
        let keys: Vec<String> = items.iter().map(|item| self.wire.key(item)).collect();
        let begin = Instant::now();
        let mut pace = Duration::from_millis(50);
        let mut rows: BTreeMap<String, Row> = BTreeMap::new();
        loop {
            match self.results(&id).await {
                Ok(found) => {
                    rows.extend(found.into_iter().filter(|(_, row)| row.code() != RowCode::RUNNING));
                }
                Err(broken) => match error_of_query(broken) {
                    refused @ BackendError::Refused(_) => return Err(refused),
                    // Lost or rate-limited: the query can be repeated.
                    fault @ (BackendError::NoAnswer
                    | BackendError::Inconclusive(_)
                    | BackendError::Busy(_)
                    | BackendError::Unreachable(_)) => {
                        warn!(%fault, "retrying");
                    }
                },
            }
            let left = keys.iter().any(|key| !rows.contains_key(key));
            if !left || begin.elapsed() > CLOSE {
                return Ok(rows);
            }
            tokio::time::sleep(pace).await;
            pace = pace.mul_f64(1.6).min(Duration::from_millis(1500));
        }
    }
}

/// Maps agent ids to the addresses of the wanted hosts.
fn by_agent(scope: &Scope) -> HashMap<String, HostKey> {
    let hosts = scope.subjects.iter().map(|subject| &subject.host);
    hosts.filter_map(|host| Some((host.agent()?.to_string(), host.key.clone()))).collect()
}

fn instance_of(row: &StatusRow, known: &HashMap<String, HostKey>) -> Option<InstanceKey> {
    let agent = row.bk_agent_id.as_deref().filter(|id| !id.is_empty());
    let host = match (agent.and_then(|id| known.get(id)), row.host.ip.is_empty(), agent) {
        (Some(host), _, _) => host.clone(),
        (None, false, _) => HostKey::Address { cloud: row.host.bk_cloud_id, ip: row.host.ip.parse().ok()? },
        (None, true, Some(id)) => match id.parse() {
            Ok(key @ HostKey::Address { .. }) => key,
            Ok(HostKey::Agent(_)) | Err(_) => HostKey::Agent(id.parse().ok()?),
        },
        (None, true, None) => return None,
    };
    Some(InstanceKey { host, namespace: row.meta.namespace.parse().ok()?, name: row.meta.name.parse().ok()? })
}

/// Parses one row of a list.
fn seen(row: &StatusRow) -> ObservedInstance {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let mut labels: BTreeMap<String, String> =
        row.meta.labels.iter().map(|(name, value)| (name.clone(), text(value))).collect();
    let owner = labels.remove("abide_owner").map(Arc::from);
    let revision = labels.remove("abide_rev").and_then(|text| text.parse().ok());
    let protections =
        labels.remove("abide_protect").map(|text| Protection::of_label(&text)).unwrap_or_default();
    labels.retain(|name, _| !name.starts_with("abide_"));
    let running = row.status == RUNNING;
    let hosted = match (row.isauto, row.flag == RUNNING) {
        (Some(guarded), _) => Some(guarded),
        // `flag` is set for a running process, supervised or not.
        (None, true) if running => None,
        (None, expected) => Some(expected),
    };
    let version = || revision.map_or(KnownSpec::Unknown, KnownSpec::Digests);
    let seconds = |secs: i64| (secs > 0).then(|| Time(secs.saturating_mul(1000)));
    let ran = match row.last_start_time {
        0 => LastRun::Never,
        // The process was started after the last registration.
        started if revision.is_some() && started >= row.register_time => LastRun::Given,
        _ => LastRun::Unknown,
    };
    ObservedInstance {
        registered: Some(row.flag != 0 || row.status != 0),
        hosted,
        running: Some(running),
        labels,
        owner,
        since: None,
        report_time: seconds(row.report_time),
        specs: ObservedSpecs {
            registered: version(),
            live: if running { version() } else { KnownSpec::Unknown },
            is_live_assumed: false,
            ran,
            protections,
            ..ObservedSpecs::default()
        },
        process: RunningProcess {
            pid: u32::try_from(row.pid).ok().filter(|pid| *pid > 0),
            ..RunningProcess::default()
        },
        ..ObservedInstance::default()
    }
}
