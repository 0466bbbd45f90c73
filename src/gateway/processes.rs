//! Process list and watch: facts, registered and live specs, revisions and health; and a stream of changes.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use futures_util::stream;
use serde::Deserialize;
use serde_json::{Value, json};
use tracing::error;

use super::hosts::HostSession;
use super::registry::{RegistryRecord, instance_of};
use super::secrets::{has_secrets, redacted_spec, spec_with_digests};
use super::tasks::NamespaceFilter;
use super::{ApiError, Gateway, readable};
use crate::agent_protocol::{OwnedSpec, Report, ReportedRun};
use crate::error_chain::chain;
use crate::model::{InstanceKey, Time, glob};
use crate::store::{Error, Seq, Store};

/// Maximum rows per page, and the default.
const MAX_LIMIT: usize = 10_000;
const DEFAULT_LIMIT: usize = 1_000;

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
}

impl Query {
    fn matches(&self, key: &InstanceKey, record: Option<&RegistryRecord>) -> bool {
        let is =
            |pattern: &Option<String>, text: &str| pattern.as_ref().is_none_or(|pattern| glob(pattern, text));
        let owner = record.and_then(|record| record.given.owner.as_deref());
        is(&self.namespace, key.namespace.as_str())
            && is(&self.name, key.name.as_str())
            && is(&self.host, &key.host.to_string())
            && self.owner.as_ref().is_none_or(|wanted| owner == Some(wanted))
    }

    fn limit(&self) -> Result<usize, ApiError> {
        let Some(text) = &self.limit else { return Ok(DEFAULT_LIMIT) };
        let limit = text.parse().ok().filter(|limit| (1..=MAX_LIMIT).contains(limit));
        limit.ok_or_else(|| ApiError::BadRequest(format!("limit is {text:?}: it must be 1 to {MAX_LIMIT}")))
    }
}

impl<S: Store> Gateway<S> {
    /// A page of processes, sorted by namespace, name and host. `more`: the `after` of the next page.
    pub async fn processes(&self, query: &Query, may: NamespaceFilter<'_>) -> Result<Value, ApiError> {
        let limit = query.limit()?;
        let plain = |text: &&String| !text.contains(['*', '?', '[']);
        let prefix = match query.namespace.as_ref().filter(plain) {
            Some(namespace) => format!("reg/{namespace}/"),
            None => "reg/".to_owned(),
        };
        let mut items: Vec<Value> = Vec::new();
        let mut after = query.after.clone();
        let mut as_of = None;
        loop {
            let page = self.store.range(&prefix, after.as_deref(), limit).await?;
            // A watch from the first page's number misses no change.
            let as_of = *as_of.get_or_insert(page.as_of);
            for entry in &page.entries {
                if items.len() == limit {
                    return Ok(json!({"items": items, "more": after, "as_of": as_of}));
                }
                after = Some(entry.key.to_string());
                // A record that cannot be read is logged and left out.
                let (Some(key), Some(record)) =
                    (instance_of(&entry.key), readable(entry.decode::<RegistryRecord>()))
                else {
                    continue;
                };
                if query.matches(&key, Some(&record)) && may(key.namespace.as_str()) {
                    items.push(self.process_row(&key, &record, query.brief.is_none()).await?);
                }
            }
            if page.more.is_none() {
                return Ok(json!({"items": items, "more": null, "as_of": as_of}));
            }
        }
    }

    /// The row of an instance. `unknown`: its report cannot be read, so whether it runs is not known.
    async fn process_row(
        &self,
        key: &InstanceKey,
        record: &RegistryRecord,
        whole: bool,
    ) -> Result<Value, ApiError> {
        match self.report(key).await {
            Err(ApiError::Store(error @ Error::InvalidValue { .. })) => {
                error!(%error, "cannot read the report of an instance");
                let mut row = self.process(key, record, None, whole);
                row["unknown"] = json!(true);
                Ok(row)
            }
            report => Ok(self.process(key, record, report?.as_ref(), whole)),
        }
    }

    fn process(
        &self,
        key: &InstanceKey,
        record: &RegistryRecord,
        report: Option<&Report>,
        whole: bool,
    ) -> Value {
        let given = &record.given;
        let live = report.and_then(|report| report.live.as_ref());
        let hosted = report.is_some_and(|report| report.hosted);
        let alive = self.hosts.agent_version(&key.host).is_some();
        let time = |ms: i64| (ms > 0).then(|| Time(ms).to_string());
        let reported_ms =
            self.reported_at(&key.host, report.map_or(0, |report| report.at)).max(record.registered) * 1000;
        let mut row = json!({
            "instance": key,
            "namespace": key.namespace,
            "name": key.name,
            "host": key.host,
            "labels": given.spec.labels,
            "registered": true,
            "hosted": hosted,
            "running": live.is_some(),
            "pid": report.and_then(|report| report.pid),
            "owner": given.owner,
            "revision": given.revision,
            "live_revision": live.and_then(|live| live.revision),
            "health": report.map_or("NotReported", |report| match report.health.as_str() { "" => "NotReported", health => health }),
            "hosting": if hosted { "Hosted" } else { "NotHosted" },
            "since": report.and_then(|report| time(report.since)),
            "started": report.and_then(|report| time(report.started)),
            "report_time": time(reported_ms),
            "registered_at": time(record.registered * 1000),
            "generation": record.generation,
            "supplier": record.supplier,
            "agent": alive,
            "message": report.map_or("", |report| report.message.as_str()),
            "version": report.map_or("", |report| report.version.as_str()),
            "exit": report.and_then(|report| report.exit),
            "next": report.and_then(|report| report.next).and_then(time),
            "cpu": report.map_or(0.0, |report| report.cpu),
            "mem": report.map_or(0.0, |report| report.mem),
            "config": report.map_or(json!({}), |report| report.config.iter().map(|(path, state)| (path.clone(), json!(state))).collect()),
        });
        if report.is_some_and(|report| report.completed) {
            row["completed"] = json!(true);
        }
        if whole {
            let labels = &given.spec.labels;
            // Clients without support for redacted specs compare revisions.
            let mut put = |name: &str, revision: &str, held: Option<&OwnedSpec>| match held {
                Some(held) if has_secrets(&held.spec) => {
                    let redacted = redacted_spec(&held.spec, labels);
                    if row[revision].is_null() {
                        row[revision] = redacted["revision"].clone();
                    }
                    row[name] = Value::Null;
                    row[format!("{name}_redacted")] = redacted;
                }
                held => row[name] = held.map_or(Value::Null, |held| spec_with_digests(&held.spec)),
            };
            put("spec", "revision", Some(given));
            put("live_spec", "live_revision", live);
            row["ran"] = match report.and_then(|report| report.ran.as_ref()) {
                None | Some(ReportedRun::Never) => json!("never"),
                Some(ReportedRun::Unknown) => json!("unknown"),
                Some(ReportedRun::With(held)) => {
                    json!({"revision": held.revision, "spec": spec_with_digests(&held.spec)})
                }
            };
        }
        row
    }

    /// Changes after a number, one JSON object per line: the number, and the current row or null if it was removed.
    /// An empty line is a heartbeat. With `numbers`, a number alone means that no other process changed up to it. A
    /// line `{"forgotten": true}` ends the stream: the reader must list all processes again.
    pub async fn watch(self: &Arc<Self>, query: Query, after: Seq, apps: SharedNamespaceFilter) -> Body {
        let state = (Arc::clone(self), query, after, apps, false);
        Body::from_stream(stream::unfold(state, |(gateway, query, after, apps, ended)| async move {
            if ended {
                return None;
            }
            let (line, last, ended) = gateway.changes_after(&query, after, &apps).await;
            Some((Ok::<_, std::convert::Infallible>(Bytes::from(line)), (gateway, query, last, apps, ended)))
        }))
    }

    async fn changes_after(
        &self,
        query: &Query,
        after: Seq,
        may: &SharedNamespaceFilter,
    ) -> (Vec<u8>, Seq, bool) {
        let beat = std::time::Duration::from_secs(crate::agent_protocol::HEARTBEAT_SECS);
        // A number above the newest belongs to another store.
        let ahead = self.store.range("", None, 0).await.is_ok_and(|page| page.as_of < after);
        if ahead {
            return (b"{\"forgotten\":true}\n".to_vec(), after, true);
        }
        if !may("") {
            return (b"{\"error\":\"these credentials are no longer known\"}\n".to_vec(), after, true);
        }
        let changes = match tokio::time::timeout(beat, self.store.changes("", after)).await {
            Err(_) => return (b"\n".to_vec(), after, false),
            Ok(Ok(changes)) => changes,
            Ok(Err(Error::Compacted)) => return (b"{\"forgotten\":true}\n".to_vec(), after, true),
            Ok(Err(error)) => return (error_line(&error), after, true),
        };
        let last = changes.last().map_or(after, |change| change.number);
        let mut keys: Vec<InstanceKey> = changes
            .iter()
            .filter(|change| change.key.starts_with("reg/") || change.key.starts_with("live/"))
            .filter_map(|change| instance_of(&change.key))
            .collect();
        keys.sort();
        keys.dedup();
        let lines = match self.change_lines(query, keys, last, may).await {
            Ok(lines) => lines,
            Err(error) => return (error_line(&error), after, true),
        };
        (lines.into_bytes(), last, false)
    }

    /// One line per changed instance.
    async fn change_lines(
        &self,
        query: &Query,
        keys: Vec<InstanceKey>,
        last: Seq,
        may: &SharedNamespaceFilter,
    ) -> Result<String, ApiError> {
        let mut lines = String::new();
        for key in keys.into_iter().filter(|key| may(key.namespace.as_str())) {
            let record = self.record(&key).await?;
            // A removed process, or one with a new owner, is sent to every watch that may have listed it.
            if !(Query { owner: None, ..query.clone() }).matches(&key, None) {
                continue;
            }
            let record = record.filter(|record| query.matches(&key, Some(record)));
            let row = match record {
                Some(record) => Some(self.process_row(&key, &record, query.brief.is_none()).await?),
                None => None,
            };
            lines.push_str(&json!({"number": last, "instance": key, "process": row}).to_string());
            lines.push('\n');
        }
        if lines.is_empty() && query.numbers.is_some() {
            lines.push_str(&json!({"number": last}).to_string());
        }
        if !lines.ends_with('\n') {
            lines.push('\n');
        }
        Ok(lines)
    }

    /// All hosts with an agent session and, unless `brief`, their number of processes.
    pub async fn list_hosts(&self, brief: bool) -> Result<Value, ApiError> {
        let mut hosts = Vec::new();
        for HostSession { host, connected, version, clock_skew_ms, last_contact } in self.hosts.all() {
            let mut row = json!({"host": host, "agent": connected, "version": version,
                                 "heard": Time(last_contact).to_string(), "clock_skew_ms": clock_skew_ms});
            if !brief {
                let with = self.store.slice(&format!("identity/{host}/"), 0, 0).await?.1;
                let without = self.store.slice(&format!("claim/{host}/"), 0, 0).await?.1;
                row["processes"] = json!(with + without);
            }
            hosts.push(row);
        }
        Ok(Value::Array(hosts))
    }
}

/// The last line of a stream that ends with an error.
fn error_line(error: &(dyn std::error::Error + 'static)) -> Vec<u8> {
    (json!({"error": chain(error)}).to_string() + "\n").into_bytes()
}

/// Namespaces that a watch may see, evaluated for every change so that revocation takes effect. An empty name asks
/// whether the app still exists.
pub type SharedNamespaceFilter = Arc<dyn Fn(&str) -> bool + Send + Sync>;
