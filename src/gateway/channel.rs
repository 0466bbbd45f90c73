//! Agent channel: sessions, the stream of messages to an agent, and commits of its results and reports.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures_util::stream;
use serde_json::Value;
use tracing::{error, info, warn};

use super::agent_sessions::{AgentStreamReceiver, JoinRefusal};
use super::auth::short_digest;
use super::decode::describe_json_error;
use super::registry::{RegistryRecord, record_txn};
use super::report_limits::{self, Admission, ReportBudget, ReportSize};
use super::secrets::secret_history;
use super::tasks::{GatewayTask, ItemResult};
use super::{ApiError, Gateway, readable};
use crate::agent_protocol::{
    Acked, AgentMessage, AgentOp, FromAgent, HEARTBEAT_SECS, Join, Joined, OwnedSpec, Report, ToAgent,
};
use crate::clock::{self, BootInstant};
use crate::gse::codes::RowCode;
use crate::gse::response::Envelope;
use crate::http::CredentialKey;
use crate::model::{HostKey, InstanceKey};
use crate::store::lease::{self, Reported};
use crate::store::{Entry, Seq, Store, Txn, TxnOutcome, keys};

/// Minimum interval between floor updates on a busy stream.
const FLOOR_INTERVAL_MS: u64 = 2_000;

/// Maximum counters of agents with the same hosts. A reinstalled agent has a new name.
const MAX_COUNTERS: usize = 16;

impl<S: Store> Gateway<S> {
    /// Opens a session for all of an agent's hosts.
    pub async fn join(&self, join: &Join, credential: CredentialKey) -> Result<Joined, ApiError> {
        if join.hosts.is_empty() || join.agent.is_empty() {
            return Err(ApiError::BadRequest("agent and hosts are required".to_owned()));
        }
        report_limits::check_join(join)?;
        let (session, turns) =
            self.hosts.join(join, credential, self.timeouts.agent).map_err(|refusal| match refusal {
                JoinRefusal::HostInUse(_) => ApiError::Conflict(refusal.to_string()),
                JoinRefusal::TooManyHosts => ApiError::Busy(refusal.to_string()),
            })?;
        // Waits for commits of the previous session: their sequence numbers must not be assigned to other messages.
        for commit_lock in turns {
            drop(commit_lock.lock().await);
        }
        self.report_usage.forget_deferred(&join.hosts);
        self.raise_task_number(join).await?;
        let (acked, _) = self.acked(&counter(&join.agent, &join.hosts)).await?;
        let store = self.store_id().await?;
        Ok(Joined { session, acked, store, figures: true, certificate: None })
    }

    /// The hosts of a session.
    pub fn session_hosts(&self, session: &str) -> Result<Vec<HostKey>, ApiError> {
        self.hosts.touch(session).map(|(_, hosts)| hosts).ok_or_else(unknown_session)
    }

    pub fn sessions(&self) -> usize {
        self.hosts.sessions()
    }

    pub fn open_tasks(&self) -> usize {
        self.tasks.open()
    }

    pub async fn count_registered(&self) -> Result<usize, ApiError> {
        Ok(self.store.slice(keys::REGISTRATION_PREFIX, 0, 0).await?.1)
    }

    /// The last acknowledged number of an agent, and the store sequence that wrote it.
    async fn acked(&self, counter: &str) -> Result<(u64, Seq), ApiError> {
        let entry = self.store.get(counter).await?;
        let text = entry.as_ref().and_then(|entry| std::str::from_utf8(&entry.value).ok());
        Ok((text.and_then(|text| text.parse().ok()).unwrap_or(0), entry.map_or(0, |entry| entry.mod_seq)))
    }

    /// The stream to an agent: registered specs first, then operations after the last one it received, then new
    /// messages.
    pub async fn stream(
        self: &Arc<Self>,
        session: &str,
        after: u64,
        may: AgentAuthCheck,
    ) -> Result<Body, ApiError> {
        let (stream, hosts) = self.hosts.open(session).ok_or_else(unknown_session)?;
        let heartbeat = Heartbeat { floor: 0, sent: stream.opened };
        let guard =
            AgentStream { gateway: Arc::clone(self), session: session.to_owned(), stream, may, heartbeat };
        self.sync_agent(&hosts).await?;
        self.dispatch_after(&hosts, after);
        Ok(Body::from_stream(stream::unfold(guard, |mut guard| async move {
            let line = guard.next().await?;
            Some((Ok::<_, std::convert::Infallible>(line), guard))
        })))
    }

    async fn sync_agent(&self, hosts: &[HostKey]) -> Result<(), ApiError> {
        for host in hosts {
            // Read first: later registrations are pushed separately, with a larger number.
            let page = self.store.range(&keys::identities_prefix(host), None, usize::MAX).await?;
            let claims = self.store.range(&keys::claims_prefix(host), None, usize::MAX).await?;
            for entry in page.entries.into_iter().chain(claims.entries) {
                // One value that cannot be read must not disconnect the agent.
                let Some(process) = readable(entry.parse()) else { continue };
                let instance = super::tasks::instance(&process, host);
                let Some(entry) = self.store.get(&keys::registration(&instance)).await? else { continue };
                if let Some(record) = readable(entry.decode::<RegistryRecord>()) {
                    self.push_spec(instance, Some(record.given), entry.mod_seq);
                }
            }
            self.hosts.send(host, ToAgent::Synced { as_of: page.as_of, host: Some(host.clone()) });
        }
        for entry in self.store.range(keys::GROUP_PREFIX, None, usize::MAX).await?.entries {
            let Some((namespace, host)) = keys::group_of(&entry.key) else { continue };
            if hosts.contains(&host)
                && let Some(groups) = readable(entry.decode())
            {
                self.hosts
                    .send(&host.clone(), ToAgent::Groups { host, namespace: namespace.to_owned(), groups });
            }
        }
        Ok(())
    }

    /// Takes the messages of an agent. `clock`: its clock as text.
    pub async fn receive_batch(
        &self,
        session: &str,
        bytes: &[u8],
        clock: Option<String>,
    ) -> Result<Envelope<Value>, ApiError> {
        let messages: Vec<FromAgent> = serde_json::from_slice(bytes)
            .map_err(|error| ApiError::BadRequest(describe_json_error(&error)))?;
        let clock = clock.and_then(|text| text.parse().ok());
        Ok(Envelope::ok(serde_json::to_value(self.receive_messages(session, messages, clock).await?)?))
    }

    /// Commits an agent's messages in one transaction, each message once. `clock`: the agent's clock, in milliseconds
    /// since 1970.
    pub async fn receive_messages(
        &self,
        session: &str,
        mut messages: Vec<FromAgent>,
        clock: Option<i64>,
    ) -> Result<Acked, ApiError> {
        let commit_lock = self.hosts.commit_lock(session).ok_or_else(unknown_session)?;
        let _guard = commit_lock.lock().await;
        let (agent, hosts) = self.hosts.touch(session).ok_or_else(unknown_session)?;
        report_limits::check_messages(&agent, &messages)?;
        self.hosts.measure_skew(session, clock);
        self.count_reports().await?;
        let key = counter(&agent, &hosts);
        messages.sort_by_key(|message| message.seq);
        loop {
            let (last, changed) = self.acked(&key).await?;
            let fresh: Vec<&FromAgent> = messages.iter().filter(|message| message.seq > last).collect();
            let acked = fresh.last().map_or(last, |newest| newest.seq);
            let deferred = self.report_usage.due(&hosts);
            if fresh.is_empty() && deferred.is_empty() {
                return Ok(Acked { acked });
            }
            let batch = self.collect_changes(&fresh, &deferred, &hosts).await?;
            let counted = Txn::put(key.clone(), acked.to_string()).only_if(key.clone(), changed);
            // Live checks change nothing, so their results are not stored.
            for (task, nth, done) in batch.rows.iter().filter(|(task, ..)| task.is_live_check()) {
                task.finish(*nth, done.clone());
            }
            let obsolete = if changed == 0 { self.obsolete_counters(&key).await? } else { Txn::default() };
            let txn = batch.txn.and(counted).and(obsolete);
            if let TxnOutcome::Written(number) = self.store.txn(txn).await? {
                batch.budget.commit(&self.report_usage);
                for (task, nth, done) in batch.rows {
                    self.metrics.operation(task.items.get(nth).and_then(|item| item.op.as_ref()), done.code);
                    task.finish(nth, done);
                }
                for (instance, given) in batch.given {
                    self.push_spec(instance, given, number);
                }
                return Ok(Acked { acked });
            }
        }
    }

    /// Deletes the oldest counters of the same hosts beyond [`MAX_COUNTERS`]: an agent's name is its own choice, and each
    /// name has a counter.
    async fn obsolete_counters(&self, key: &str) -> Result<Txn, ApiError> {
        let prefix = key.rfind('/').map_or(key, |end| &key[..=end]);
        let mut counters = self.store.range(prefix, None, usize::MAX).await?.entries;
        counters.sort_by_key(|entry| std::cmp::Reverse(entry.mod_seq));
        let obsolete = counters.iter().skip(MAX_COUNTERS - 1).map(|entry| Txn::delete(&*entry.key));
        Ok(obsolete.fold(Txn::default(), Txn::and))
    }

    /// Collects the changes of a batch. Messages about hosts outside the session are ignored.
    async fn collect_changes(
        &self,
        fresh: &[&FromAgent],
        deferred: &[Report],
        hosts: &[HostKey],
    ) -> Result<BatchChanges, ApiError> {
        let mut batch = BatchChanges::default();
        let hosts: HashSet<&HostKey> = hosts.iter().collect();
        let mut finals: BTreeMap<String, FinalRows> = BTreeMap::new();
        // A fresh report replaces a deferred one.
        let mut reports: BTreeMap<&InstanceKey, &Report> =
            deferred.iter().map(|report| (&report.instance, report)).collect();
        // By owner: the newest generation for which a host refused an older one.
        let mut generations: BTreeMap<String, (u64, HostKey)> = BTreeMap::new();
        for message in fresh {
            match &message.what {
                AgentMessage::Report(report) if hosts.contains(&report.instance.host) => {
                    reports.insert(&report.instance, report);
                }
                AgentMessage::Report(_) => {}
                AgentMessage::Result(result) => {
                    let Some((task, nth)) = self.find_row(&result.op_id).await? else { continue };
                    let item = &task.items[nth];
                    if !hosts.contains(&item.instance.host) || !task.is_awaited(nth) {
                        continue;
                    }
                    let (message, content) = report_limits::shortened(result);
                    let done = ItemResult { content, ..ItemResult::new(RowCode(result.code), message) };
                    if result.code == RowCode::DONE.0
                        && let (Some(op), Some(held)) = (&item.op, &item.held)
                    {
                        self.register_operated_spec(
                            op,
                            &item.instance,
                            held,
                            item.supplier,
                            item.generation,
                            &mut batch,
                        )
                        .await?;
                    }
                    if result.code == RowCode::OLD_GENERATION.0 {
                        let newest =
                            result.content.as_ref().and_then(|content| content["generation"].as_u64());
                        if let (Some(owner), Some(_), Some(newest)) = (&item.owner, item.generation, newest) {
                            let reported = (newest, item.instance.host.clone());
                            let known = generations.entry(owner.clone()).or_insert_with(|| reported.clone());
                            *known = reported.max(known.clone());
                        }
                    }
                    let id = task.id.clone();
                    finals.entry(id).or_insert_with(|| (task, Vec::new())).1.push((nth, done));
                }
            }
        }
        for (task, rows) in finals.into_values() {
            let shown: Vec<(usize, &ItemResult)> = rows.iter().map(|(nth, done)| (*nth, done)).collect();
            let part = self.finished(&task, &shown)?;
            batch.add(part);
            batch.rows.extend(rows.into_iter().map(|(nth, done)| (Arc::clone(&task), nth, done)));
        }
        for (owner, (newest, host)) in generations {
            batch.add(self.raise_generation(&owner, newest, &host).await?);
        }
        for (instance, report) in reports {
            self.store_report(instance, report, &mut batch).await?;
        }
        Ok(batch)
    }

    /// Raises the lease's generation above one that a host's agent reports: another store, or a lost one, issued it.
    /// The raise is bounded, because an agent token must not control the store.
    async fn raise_generation(&self, owner: &str, newest: u64, host: &HostKey) -> Result<Txn, ApiError> {
        let key = keys::lease(&keys::writer_lease_name(owner));
        let entry = self.store.get(&key).await?;
        // Without the record, a raised generation could be below one that was issued.
        let record: lease::Record = match entry.as_ref().map(Entry::decode).transpose() {
            Ok(record) => record.unwrap_or_default(),
            Err(error) => {
                error!(%error, %host, ?owner, newest, "ignored: the agent reports a generation");
                return Ok(Txn::default());
            }
        };
        let generation = record.generation;
        match record.reported(newest) {
            Reported::Known => Ok(Txn::default()),
            Reported::OutOfBounds => {
                warn!(%host, ?owner, newest, generation, "ignored: the agent reports a generation far above the \
                      lease; `abide lease reset` with --generation accepts one");
                Ok(Txn::default())
            }
            Reported::Raised(record) => {
                warn!(%host, ?owner, newest, generation, "the agent reports a newer generation: the next lease is above it");
                let changed = entry.map_or(0, |entry| entry.mod_seq);
                Ok(Txn::put(key.clone(), serde_json::to_vec(&record)?).only_if(key, changed))
            }
        }
    }

    /// Registers the spec of a successful operation.
    async fn register_operated_spec(
        &self,
        op: &AgentOp,
        instance: &InstanceKey,
        held: &OwnedSpec,
        supplier: Option<u64>,
        generation: Option<u64>,
        batch: &mut BatchChanges,
    ) -> Result<(), ApiError> {
        if let AgentOp::Rename { from } = op
            && let Some(entry) = self.store.get(&keys::registration(from)).await?
        {
            let part = self.removal(from, &entry).await?;
            batch.add(part);
            batch.given.push((from.clone(), None));
        }
        if !op.registers_spec() {
            return Ok(());
        }
        let old = match batch.records.get(instance) {
            Some(record) => Some(record.clone()),
            // A record that cannot be read is replaced.
            None => self.replaceable_record(instance).await?,
        };
        if old.as_ref().is_some_and(|old| old.given == *held) && !matches!(op, AgentOp::Rename { .. }) {
            return Ok(());
        }
        let former = match op {
            AgentOp::Rename { from } => Some(from.process()),
            _ => None,
        };
        let before = old.as_ref().map(|old| &*old.given.spec);
        let part = record_txn(instance, held, old.as_ref(), supplier, generation)?
            .and(self.identity_txn(instance, before, &held.spec, former.as_ref()).await?);
        batch.add(part);
        batch.given.push((instance.clone(), Some(held.clone())));
        let registered = old.as_ref().map_or_else(super::now_secs, |old| old.registered);
        let secrets = secret_history(old.as_ref(), &held.spec);
        let record = RegistryRecord { given: held.clone(), supplier, registered, generation, secrets };
        batch.records.insert(instance.clone(), record);
        Ok(())
    }

    /// Stores a report within the limits of its host. An instance that the agent holds is registered even if the store
    /// lost it; reports of absent instances are deleted.
    async fn store_report(
        &self,
        instance: &InstanceKey,
        report: &Report,
        batch: &mut BatchChanges,
    ) -> Result<(), ApiError> {
        let known = batch.records.contains_key(instance)
            || self.store.get(&keys::registration(instance)).await?.is_some();
        let key = keys::report(instance);
        let stored = self.store.get(&key).await?.map(|entry| entry.value.len());
        let failed = self.store.get(&keys::failed_start(instance)).await?.map(|entry| entry.value.len());
        let is_absent = !known && report.live.is_none() && !report.hosted;
        let is_failed = !known && report.history.failed_start.is_some();
        let registered = report.given.as_ref().filter(|_| !known && !is_absent);
        // An agent clock that is ahead must not make an old report appear recent, or keep a failed start.
        let report = Report { at: report.at.min(clock::now().0), ..report.clone() };
        let value = serde_json::to_vec(&report)?;
        let rows = usize::from(!is_absent) + usize::from(is_failed) + usize::from(registered.is_some());
        let size = ReportSize {
            report: value.len(),
            before: stored.unwrap_or(0) + failed.unwrap_or(0),
            after: rows * value.len(),
            is_new: !known && stored.is_none() && failed.is_none(),
        };
        if batch.budget.admit(self, instance, &value, size).await? != Admission::Stored {
            return Ok(());
        }
        if is_failed || failed.is_some() {
            let key = keys::failed_start(instance);
            batch.add(if is_failed { Txn::put(key, value.clone()) } else { Txn::delete(key) });
        }
        if is_absent {
            batch.add(stored.map_or_else(Txn::default, |_| Txn::delete(key)));
            return Ok(());
        }
        batch.add(Txn::put(key, value));
        if let Some(given) = registered {
            info!(%instance, owner = ?given.owner, "registered from the agent's report: the store had no record");
            let part = record_txn(instance, given, None, None, None)?
                .and(self.identity_txn(instance, None, &given.spec, None).await?);
            batch.add(part);
        }
        Ok(())
    }
}

/// Store key of an agent's last number. Agents with one name and different hosts have separate counters.
fn counter(agent: &str, hosts: &[HostKey]) -> String {
    let mut hosts: Vec<String> = hosts.iter().map(HostKey::to_string).collect();
    hosts.sort();
    keys::agent_counter(&short_digest(&hosts.join(",")), agent)
}

fn unknown_session() -> ApiError {
    ApiError::Gone("unknown session: join again".to_owned())
}

/// The rows of one task that became final.
type FinalRows = (Arc<GatewayTask>, Vec<(usize, ItemResult)>);

/// Checks whether an agent may still receive messages: its token may be revoked during the stream.
pub type AgentAuthCheck = Arc<dyn Fn() -> bool + Send + Sync>;

/// Changes of a batch: in the store, then in memory, then at the agents.
#[derive(Default)]
struct BatchChanges {
    txn: Txn,
    rows: Vec<(Arc<GatewayTask>, usize, ItemResult)>,
    given: Vec<(InstanceKey, Option<OwnedSpec>)>,
    /// Records of this batch that are not in the store yet.
    records: HashMap<InstanceKey, RegistryRecord>,
    budget: ReportBudget,
}

impl BatchChanges {
    fn add(&mut self, part: Txn) {
        self.txn.compares.extend(part.compares);
        self.txn.writes.extend(part.writes);
    }
}

/// An open stream; dropping it closes the stream of its session.
struct AgentStream<S: Store> {
    gateway: Arc<Gateway<S>>,
    session: String,
    stream: AgentStreamReceiver,
    may: AgentAuthCheck,
    heartbeat: Heartbeat,
}

/// The last heartbeat of a stream.
struct Heartbeat {
    floor: u64,
    sent: BootInstant,
}

impl<S: Store> AgentStream<S> {
    /// The next lines; an empty line or a heartbeat when idle, so that a dead connection is detected.
    async fn next(&mut self) -> Option<Bytes> {
        let next =
            tokio::time::timeout(Duration::from_secs(HEARTBEAT_SECS), self.stream.receive.recv()).await;
        if !(self.may)() {
            return None;
        }
        // Read before the queue: a queued operation that is final by now is sent before the floor.
        let floor = self.gateway.numbers.floor();
        let is_idle = next.is_err();
        let mut lines = Vec::new();
        let mut next = match next {
            Err(_) => None,
            Ok(None) => return None,
            Ok(Some(first)) => Some(first),
        };
        // Queued messages are sent in one chunk of bounded size.
        const MAX_CHUNK_BYTES: usize = 1 << 20;
        while let Some(down) = next {
            write_line(&mut lines, &down)?;
            next = if lines.len() < MAX_CHUNK_BYTES { self.stream.receive.try_recv().ok() } else { None };
        }
        let is_risen = floor > self.heartbeat.floor && self.heartbeat.sent.elapsed_ms() >= FLOOR_INTERVAL_MS;
        if self.stream.floors && lines.len() < MAX_CHUNK_BYTES && (is_idle || is_risen) {
            self.heartbeat = Heartbeat { floor, sent: BootInstant::now() };
            write_line(&mut lines, &ToAgent::Heartbeat { floor, sent_ms: self.stream.opened.elapsed_ms() })?;
        }
        if lines.is_empty() {
            lines.push(b'\n');
        }
        Some(Bytes::from(lines))
    }
}

fn write_line(lines: &mut Vec<u8>, down: &ToAgent) -> Option<()> {
    serde_json::to_writer(&mut *lines, down).ok()?;
    lines.push(b'\n');
    Some(())
}

impl<S: Store> Drop for AgentStream<S> {
    fn drop(&mut self) {
        self.gateway.hosts.close_stream(&self.session, self.stream.number);
    }
}
