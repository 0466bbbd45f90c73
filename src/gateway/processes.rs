//! Process list and watch: facts, registered and live specs, revisions and health; and a stream of changes.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use futures_util::stream;
use serde::Deserialize;
use serde_json::json;
use tracing::error;

use super::agent_sessions::HostSession;
use super::failed_starts::is_failed_start;
use super::instance_history::{exits, last_exit, last_probe, next_runs, runs};
use super::registry::RegistryRecord;
use super::row_digests::{RowDigests, RowReader};
use super::secrets::{has_secrets, redacted_spec, spec_with_digests};
use super::tasks::instance;
use super::{ApiError, Gateway, readable};
use crate::access::Grant;
use crate::agent_protocol::{AgentFiles, OwnedSpec, Report, ReportedRun};
use crate::contract::{
    self, AgentFilePaths, GatewayProcess, HostEntry, Hosting, ProcessChange, ProcessPage, ReportedSpec,
    RunReport,
};
use crate::error_chain::chain;
use crate::model::{Health, HostKey, InstanceKey, ProcessKey, Time, glob};
use crate::store::{Error, Seq, Store, keys};

/// Maximum rows per page, and the default.
const MAX_LIMIT: usize = 10_000;
const DEFAULT_LIMIT: usize = 1_000;

/// Reason why a watch ends whose app was removed or has a new secret.
const CREDENTIALS_REVOKED: &str = "these credentials are no longer known";

/// Filter and paging of a query.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Query {
    pub namespace: Option<String>,
    pub name: Option<String>,
    /// A pattern of `CLOUD:IP` or `@AGENT_ID`.
    pub host: Option<String>,
    pub owner: Option<String>,
    /// The last key of the previous page.
    pub after: Option<String>,
    pub limit: Option<String>,
    /// Omit specs, which are most of a row.
    pub brief: Option<String>,
    /// Watch only: also send the numbers of other changes.
    pub numbers: Option<String>,
    /// List only: also instances that are not registered, because their first start failed.
    pub attempts: Option<String>,
    /// `keyed`: digests of secrets under the key of the row's owner.
    pub digests: Option<String>,
}

impl Query {
    pub(super) fn matches(&self, key: &InstanceKey, record: Option<&RegistryRecord>) -> bool {
        self.matches_key(key) && self.matches_owner(record.and_then(|record| record.given.owner.as_deref()))
    }

    pub(super) fn matches_key(&self, key: &InstanceKey) -> bool {
        let is =
            |pattern: &Option<String>, text: &str| pattern.as_ref().is_none_or(|pattern| glob(pattern, text));
        is(&self.namespace, key.namespace.as_str())
            && is(&self.name, key.name.as_str())
            && (self.host.is_none() || is(&self.host, &key.host.to_string()))
    }

    pub(super) fn matches_owner(&self, owner: Option<&str>) -> bool {
        self.owner.as_deref().is_none_or(|wanted| owner == Some(wanted))
    }

    /// Prefix of the registrations that can match.
    pub(super) fn prefix(&self) -> String {
        let name = self.name.as_deref().filter(|text| !is_pattern(text));
        match (self.exact_namespace(), name) {
            (Some(namespace), Some(name)) => format!("{}{name}/", keys::registrations_prefix(namespace)),
            (Some(namespace), None) => keys::registrations_prefix(namespace),
            (None, _) => keys::REGISTRATION_PREFIX.to_owned(),
        }
    }

    /// The namespace, unless it is a pattern.
    pub(super) fn exact_namespace(&self) -> Option<&str> {
        self.namespace.as_deref().filter(|text| !is_pattern(text))
    }

    /// Whether rows have specs and exits.
    pub(super) fn is_whole(&self) -> bool {
        self.brief.is_none()
    }

    pub(super) fn wants_keyed_digests(&self) -> bool {
        self.digests.as_deref() == Some("keyed")
    }

    pub(super) fn limit(&self) -> Result<usize, ApiError> {
        let Some(text) = &self.limit else { return Ok(DEFAULT_LIMIT) };
        let limit = text.parse().ok().filter(|limit| (1..=MAX_LIMIT).contains(limit));
        limit.ok_or_else(|| ApiError::BadRequest(format!("limit is {text:?}: it must be 1 to {MAX_LIMIT}")))
    }
}

impl<S: Store> Gateway<S> {
    /// A page of processes, sorted by namespace, name and host; failed starts follow. `more`: the `after` of the next page.
    pub async fn processes(&self, query: &Query, grant: &Grant) -> Result<ProcessPage, ApiError> {
        let limit = query.limit()?;
        let reader = self.row_reader(query.wants_keyed_digests(), grant).await;
        let mut page = match query.after.as_deref().is_some_and(is_failed_start) {
            true => {
                let as_of = self.store.range("", None, 0).await?.as_of;
                ProcessPage { items: Vec::new(), more: None, as_of, secret_keys: BTreeMap::new() }
            }
            false => self.registered_processes(query, &reader, limit).await?,
        };
        if page.more.is_none() && query.attempts.is_some() {
            self.add_failed_starts(&mut page, query, &reader, limit).await?;
        }
        page.secret_keys = reader.keys(&page.items);
        Ok(page)
    }

    async fn registered_processes(
        &self,
        query: &Query,
        reader: &RowReader<'_>,
        limit: usize,
    ) -> Result<ProcessPage, ApiError> {
        let page_of = |items, more, as_of| ProcessPage { items, more, as_of, secret_keys: BTreeMap::new() };
        let prefix = query.prefix();
        let mut items: Vec<GatewayProcess> = Vec::new();
        let mut after = query.after.clone();
        let mut as_of = None;
        loop {
            let page = self.store.range(&prefix, after.as_deref(), limit).await?;
            // A watch from the first page's number misses no change.
            let as_of = *as_of.get_or_insert(page.as_of);
            for entry in &page.entries {
                if items.len() == limit {
                    return Ok(page_of(items, after, as_of));
                }
                after = Some(entry.key.to_string());
                let Some(key) = keys::instance_of(&entry.key).filter(|key| query.matches_key(key)) else {
                    continue;
                };
                // A record that cannot be read is logged and left out.
                let Some(record) = readable(entry.decode::<RegistryRecord>()) else { continue };
                let owner = record.given.owner.as_deref();
                if query.matches(&key, Some(&record)) && reader.grant.may_see(&key, owner) {
                    let digests = reader.digests(owner);
                    items.push(self.process_row(&key, &record, query.is_whole(), &digests).await?);
                }
            }
            if page.more.is_none() {
                return Ok(page_of(items, None, as_of));
            }
        }
    }

    /// The row of an instance. `unknown`: its report cannot be read, so whether it runs is not known.
    async fn process_row(
        &self,
        key: &InstanceKey,
        record: &RegistryRecord,
        whole: bool,
        digests: &RowDigests,
    ) -> Result<GatewayProcess, ApiError> {
        match self.report(key).await {
            Err(ApiError::Store(error @ Error::InvalidValue { .. })) => {
                error!(%error, "cannot read the report of an instance");
                Ok(GatewayProcess { unknown: true, ..self.process(key, record, None, whole, digests) })
            }
            report => Ok(self.process(key, record, report?.as_ref(), whole, digests)),
        }
    }

    pub(super) fn process(
        &self,
        key: &InstanceKey,
        record: &RegistryRecord,
        report: Option<&Report>,
        whole: bool,
        digests: &RowDigests,
    ) -> GatewayProcess {
        let given = &record.given;
        let live = report.and_then(|report| report.live.as_ref());
        let hosted = report.is_some_and(|report| report.hosted);
        let health = report.map(|report| report.health.as_str()).filter(|health| !health.is_empty());
        let text = |text: fn(&Report) -> &String| report.map(text).cloned().unwrap_or_default();
        let config = report.map(|report| report.config.as_slice()).unwrap_or_default();
        let reported_ms =
            self.reported_at(&key.host, report.map_or(0, |report| report.at)).max(record.registered) * 1000;
        let figures = live.and_then(|_| self.figures_of(key));
        let row = GatewayProcess {
            instance: key.clone(),
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            host: key.host.clone(),
            labels: given.spec.labels.clone(),
            unknown: false,
            registered: true,
            hosted,
            running: live.is_some(),
            completed: report.is_some_and(|report| report.completed),
            pid: report.and_then(|report| report.pid),
            owner: given.owner.clone(),
            revision: given.revision,
            live_revision: live.and_then(|live| live.revision),
            secret_key: None,
            live_spec_unknown: report.is_some_and(|report| report.live_spec_unknown && live.is_some()),
            health: health.unwrap_or(Health::NotReported.word()).to_owned(),
            hosting: Hosting::from(Some(hosted)),
            since: report.and_then(|report| time(report.since)),
            started: report.and_then(|report| time(report.started)),
            report_time: time(reported_ms),
            registered_at: time(record.registered * 1000),
            generation: record.generation,
            supplier: record.supplier,
            agent: self.hosts.agent_version(&key.host).is_some(),
            message: text(|report| &report.message),
            version: text(|report| &report.version),
            exit: report.and_then(|report| report.exit),
            next: report.and_then(|report| report.next).and_then(time),
            cpu: figures.as_ref().map_or(report.map_or(0.0, |report| report.cpu), |one| one.cpu_percent),
            mem: figures.as_ref().map_or(report.map_or(0.0, |report| report.mem), |one| one.mem_percent),
            figures: figures.map(|one| one.details),
            config: config.iter().map(|(path, state)| (path.clone(), json!(state))).collect(),
            restarts: report.map_or(0, |report| report.history.restarts),
            last_exit: last_exit(report),
            probe: last_probe(report).filter(|_| whole),
            exits: whole.then(|| exits(report)),
            runs: runs(report).filter(|_| whole),
            next_runs: next_runs(report).filter(|_| whole),
            agent_files: report.and_then(|report| report.files.as_ref()).filter(|_| whole).map(agent_files),
            spec: None,
            spec_redacted: None,
            live_spec: None,
            live_spec_redacted: None,
            ran: None,
        };
        let ran = report.and_then(|report| match &report.ran {
            Some(ReportedRun::With(held)) => Some(held),
            None | Some(ReportedRun::Never | ReportedRun::Unknown) => None,
        });
        let has_secrets = [Some(given), live, ran].into_iter().flatten().any(|held| has_secrets(&held.spec));
        let digests = if has_secrets { digests } else { &RowDigests::Plain };
        let row = with_revisions(row, digests);
        if whole { with_specs(row, given, live, report, digests) } else { row }
    }

    /// Changes after a number, one JSON object per line: the number, and the current row or null if it was removed.
    /// An empty line is a heartbeat. With `numbers`, a number alone means that no other process changed up to it. A
    /// line `{"forgotten": true}` ends the stream: the reader must list all processes again.
    pub async fn watch(self: &Arc<Self>, query: Query, after: Seq, grant: CurrentGrant) -> Body {
        let state = (Arc::clone(self), query, after, grant, false);
        Body::from_stream(stream::unfold(state, |(gateway, query, after, grant, ended)| async move {
            if ended {
                return None;
            }
            let (line, last, ended) = gateway.changes_after(&query, after, &grant).await;
            Some((Ok::<_, std::convert::Infallible>(Bytes::from(line)), (gateway, query, last, grant, ended)))
        }))
    }

    async fn changes_after(&self, query: &Query, after: Seq, grant: &CurrentGrant) -> (Vec<u8>, Seq, bool) {
        let beat = std::time::Duration::from_secs(crate::agent_protocol::HEARTBEAT_SECS);
        // A number above the newest belongs to another store.
        let ahead = self.store.range("", None, 0).await.is_ok_and(|page| page.as_of < after);
        if ahead {
            return (forgotten(), after, true);
        }
        let changes = match tokio::time::timeout(beat, self.store.changes("", after)).await {
            Err(_) => return (b"\n".to_vec(), after, false),
            Ok(Ok(changes)) => changes,
            Ok(Err(Error::Compacted)) => return (forgotten(), after, true),
            Ok(Err(error)) => return (watch_error(&chain(&error)), after, true),
        };
        let last = changes.last().map_or(after, |change| change.number);
        // Read after the wait: the grant may have changed meanwhile.
        let Some(grant) = grant() else { return (watch_error(CREDENTIALS_REVOKED), after, true) };
        let mut changed: BTreeMap<InstanceKey, ChangedInstance> = BTreeMap::new();
        for change in &changes {
            if let Some(key) = keys::instance_of(&change.key) {
                let known = changed.entry(key).or_default();
                known.number = known.number.max(change.number);
                known.is_registration |= change.key.starts_with(keys::REGISTRATION_PREFIX);
            }
        }
        match self.change_lines(query, changed, last, &grant).await {
            Ok(lines) => (lines, last, false),
            Err(error) => (watch_error(&chain(&error)), after, true),
        }
    }

    /// One line per changed instance. A reader may receive the first lines only: the number of a line means that all changes
    /// up to it were sent.
    async fn change_lines(
        &self,
        query: &Query,
        changed: BTreeMap<InstanceKey, ChangedInstance>,
        last: Seq,
        grant: &Grant,
    ) -> Result<Vec<u8>, ApiError> {
        let reader = self.row_reader(query.wants_keyed_digests(), grant).await;
        let mut rows: Vec<(Seq, InstanceKey, Option<GatewayProcess>)> = Vec::new();
        for (key, change) in changed.into_iter().filter(|(key, _)| grant.may_see(key, None)) {
            let ChangedInstance { number, is_registration } = change;
            let record = self.record(&key).await?;
            let is_foreign =
                record.as_ref().is_some_and(|record| !grant.may_see(&key, record.given.owner.as_deref()));
            // An instance of another owner is sent as removed when its owner may have changed.
            if is_foreign && !is_registration {
                continue;
            }
            let record = record.filter(|_| !is_foreign);
            // A removed process, or one with a new owner, is sent to every watch that may have listed it.
            if !(Query { owner: None, ..query.clone() }).matches(&key, None) {
                continue;
            }
            let record = record.filter(|record| query.matches(&key, Some(record)));
            let row = match record {
                Some(record) => {
                    let digests = reader.digests(record.given.owner.as_deref());
                    Some(self.process_row(&key, &record, query.brief.is_none(), &digests).await?)
                }
                None => None,
            };
            rows.push((number, key, row));
        }
        rows.sort_by_key(|(number, ..)| *number);
        let numbers: Vec<Seq> = rows.iter().map(|(number, ..)| *number).collect();
        let mut lines = Vec::new();
        for (nth, (number, key, row)) in rows.into_iter().enumerate() {
            // One transaction may change several instances.
            let is_last_of_number = numbers.get(nth + 1) != Some(&number);
            let changed = ProcessChange {
                number: Some(if is_last_of_number { number } else { number.saturating_sub(1) }),
                instance: Some(key),
                secret_keys: reader.keys(&row),
                process: Some(row),
                ..ProcessChange::empty()
            };
            lines.extend(line(&changed));
        }
        match (numbers.last(), query.numbers.is_some()) {
            (Some(number), true) if *number == last => {}
            (_, true) => lines.extend(line(&ProcessChange { number: Some(last), ..ProcessChange::empty() })),
            (Some(_), false) => {}
            // A heartbeat.
            (None, false) => lines.push(b'\n'),
        }
        Ok(lines)
    }

    /// The granted hosts with an agent session and, unless `brief`, their number of visible processes.
    pub async fn list_hosts(&self, brief: bool, grant: &Grant) -> Result<Vec<HostEntry>, ApiError> {
        let mut hosts = Vec::new();
        for HostSession { host, connected, version, clock_skew_ms, last_contact } in self.hosts.all() {
            if grant.check_host(&host).is_err() {
                continue;
            }
            let processes = match brief {
                true => None,
                false => Some(self.count_processes(&host, grant).await? as u64),
            };
            hosts.push(HostEntry {
                host,
                agent: connected,
                version: Some(version),
                heard: Time(last_contact).to_string(),
                clock_skew_ms,
                certificate: None,
                processes,
            });
        }
        Ok(hosts)
    }

    /// The number of registered instances of a host that an app may see.
    async fn count_processes(&self, host: &HostKey, grant: &Grant) -> Result<usize, ApiError> {
        let prefixes = [keys::identities_prefix(host), keys::claims_prefix(host)];
        let mut count = 0;
        for prefix in prefixes {
            if grant.sees_everything() {
                count += self.store.slice(&prefix, 0, 0).await?.1;
                continue;
            }
            for entry in self.store.range(&prefix, None, usize::MAX).await?.entries {
                let Some(process) = readable(entry.parse::<ProcessKey>()) else { continue };
                let key = instance(&process, host);
                let owner = match grant.is_bound_to_owners() {
                    true => self.owner_of(&key).await?,
                    false => None,
                };
                count += usize::from(grant.may_see(&key, owner.as_deref()));
            }
        }
        Ok(count)
    }
}

fn is_pattern(text: &str) -> bool {
    text.contains(['*', '?', '['])
}

/// A change of an instance.
#[derive(Default)]
struct ChangedInstance {
    /// The last change.
    number: Seq,
    /// Its registration changed, and not only its report.
    is_registration: bool,
}

/// A time of a report; 0: never.
pub(super) fn time(ms: i64) -> Option<String> {
    (ms > 0).then(|| Time(ms).to_string())
}

/// The revisions of a row, in the form of its digests.
fn with_revisions(row: GatewayProcess, digests: &RowDigests) -> GatewayProcess {
    match digests {
        RowDigests::Plain => row,
        RowDigests::Hidden => GatewayProcess { revision: None, live_revision: None, ..row },
        RowDigests::Keyed(key) => GatewayProcess {
            revision: row.revision.map(|revision| key.keyed_revision(&revision)),
            live_revision: row.live_revision.map(|revision| key.keyed_revision(&revision)),
            secret_key: Some(key.id().to_owned()),
            ..row
        },
    }
}

/// Adds the specs of a row. Clients without support for redacted specs compare revisions.
fn with_specs(
    mut row: GatewayProcess,
    given: &OwnedSpec,
    live: Option<&OwnedSpec>,
    report: Option<&Report>,
    digests: &RowDigests,
) -> GatewayProcess {
    let (labels, key) = (&given.spec.labels, digests.key());
    let is_hidden = matches!(digests, RowDigests::Hidden);
    let redacted = |held: &OwnedSpec| redacted_spec(&held.spec, labels, key);
    let value = |redacted: &ReportedSpec| serde_json::to_value(redacted).ok().filter(|_| !is_hidden);
    let is_secret = |held: &&OwnedSpec| has_secrets(&held.spec);
    match Some(given).filter(is_secret).map(redacted) {
        Some(redacted) => {
            row.revision = row.revision.or(Some(redacted.revision)).filter(|_| !is_hidden);
            (row.spec, row.spec_redacted) = (Some(None), value(&redacted));
        }
        None => row.spec = Some(Some(spec_with_digests(&given.spec, key))),
    }
    match live.filter(is_secret).map(redacted) {
        Some(redacted) => {
            row.live_revision = row.live_revision.or(Some(redacted.revision)).filter(|_| !is_hidden);
            (row.live_spec, row.live_spec_redacted) = (Some(None), value(&redacted));
        }
        None => row.live_spec = Some(live.map(|held| spec_with_digests(&held.spec, key))),
    }
    let word = |word: &str| RunReport::Word(word.to_owned());
    row.ran = Some(match report.and_then(|report| report.ran.as_ref()) {
        None | Some(ReportedRun::Never) => word("never"),
        Some(ReportedRun::Unknown) => word("unknown"),
        Some(ReportedRun::With(_)) if is_hidden => word("unknown"),
        Some(ReportedRun::With(held)) => RunReport::With {
            revision: held.revision.map(|revision| match key {
                Some(key) => key.keyed_revision(&revision),
                None => revision,
            }),
            spec: Some(spec_with_digests(&held.spec, key)),
        },
    });
    row
}

/// A line of a watch.
fn line(change: &ProcessChange) -> Vec<u8> {
    contract::compact(change).into_bytes()
}

fn forgotten() -> Vec<u8> {
    line(&ProcessChange { forgotten: Some(true), ..ProcessChange::empty() })
}

/// The last line of a watch that failed.
fn watch_error(error: &str) -> Vec<u8> {
    line(&ProcessChange { error: Some(error.to_owned()), ..ProcessChange::empty() })
}

/// The grant of the app of a watch, read for every change. `None`: the app was removed.
pub type CurrentGrant = Arc<dyn Fn() -> Option<Arc<Grant>> + Send + Sync>;

fn agent_files(files: &AgentFiles) -> AgentFilePaths {
    let AgentFiles { pid_path, log_path } = files.clone();
    AgentFilePaths { pid_path, log_path }
}
