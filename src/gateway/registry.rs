//! Process registry: one spec per instance, and one identity per process and host.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use tracing::error;

use super::batch::RejectedItem;
use super::identity::{IdentityOwner, OpenStarts, identity_conflict_message};
use super::secrets::secret_history;
use super::tasks::instance;
use super::{ApiError, Caller, Gateway, now_secs};
use crate::agent_protocol::{OwnedSpec, Report, ToAgent};
use crate::gse::codes::RowCode;
use crate::gse::keys as result_keys;
use crate::gse::request::ProcRequest;
use crate::gse::response::{Row, Rows};
use crate::model::{AutoType, Host, InstanceKey, ProcessKey, Secret, Spec};
use crate::store::{Entry, Error, Seq, Store, Txn, TxnOutcome, keys};

/// One registered instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RegistryRecord {
    pub given: OwnedSpec,
    pub supplier: Option<u64>,
    /// Seconds since 1970.
    pub registered: i64,
    /// Lease generation of the last writer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// Secrets replaced by newer specs; see [`super::secrets`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<Secret>,
}

/// Maximum attempts of a call that conflicts with concurrent writes.
pub(super) const MAX_ATTEMPTS: usize = 50;

/// Error of a call that conflicted at every attempt.
pub(super) const CONTENDED: &str = "too many concurrent changes of the same processes: try again";

/// A registry call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegistryCall {
    Register,
    Update,
    Unregister,
}

/// Store key of an identity on a host.
pub(super) fn identity_key(instance: &InstanceKey, spec: &Spec) -> String {
    keys::identity(&instance.host, &spec.identity.index_key())
}

/// The label with the protections of a process, which GSE clients of Abide set and read.
const PROTECTION_LABEL: &str = "abide_protect";

/// A spec without Abide's own labels except the protections, and its owner.
pub fn owned_spec(mut spec: Spec, caller: &Caller) -> OwnedSpec {
    let owner = spec.labels.remove("abide_owner").or_else(|| caller.owner.clone());
    let revision = spec.labels.remove("abide_rev").and_then(|text| text.parse().ok());
    spec.labels.retain(|name, _| !name.starts_with("abide_") || name == PROTECTION_LABEL);
    OwnedSpec { spec: Arc::new(spec), owner, revision }
}

impl<S: Store> Gateway<S> {
    /// Runs a registry call for all hosts in one commit, with one row per host.
    pub async fn registry_call(
        &self,
        call: RegistryCall,
        request: &ProcRequest,
        caller: &Caller,
    ) -> Result<Rows, ApiError> {
        let (process, targets, written) = (request.process()?, request.usable_targets()?, request.written());
        let (namespace, name) = (process.namespace.as_str(), process.name.as_str());
        let invalid = targets.invalid.iter().map(|invalid| RejectedItem::of_host(invalid, namespace, name));
        let invalid: Rows = invalid.map(|item| (item.v1.clone(), item.row())).collect();
        let given = request.spec()?.map(|spec| owned_spec(spec, caller));
        if given.is_none() && call != RegistryCall::Unregister {
            return Err(ApiError::BadRequest("spec is missing".to_owned()));
        }
        for _ in 0..MAX_ATTEMPTS {
            if let Some(answer) = self.stored_response(caller).await? {
                return Ok(serde_json::from_value(answer)?);
            }
            let mut rows = invalid.clone();
            let mut txn = Txn::default();
            let starts = OpenStarts::default();
            let mut pushes: Vec<(InstanceKey, Option<OwnedSpec>)> = Vec::new();
            let mut new = 0;
            for host in &targets.hosts {
                let row_key =
                    result_keys::v1(host, &process).unwrap_or_else(|| result_keys::v2(&host.key, &process));
                let row_key = result_keys::as_written(row_key, &host.key, written.get(&host.key));
                let instance = instance(&process, &host.key);
                let given = match given.clone().filter(|_| call != RegistryCall::Unregister) {
                    Some(given) => {
                        let given = self.with_current_owner(&instance, given).await?;
                        match self.with_secrets(&instance, given).await? {
                            Ok(given) => Some(given),
                            Err(unknown) => {
                                let message = unknown.to_string();
                                self.check_change(caller, &instance, None).await?;
                                rows.insert(row_key, Row::new(RowCode::COMMAND_FAILED, message));
                                continue;
                            }
                        }
                    }
                    None => None,
                };
                self.check_change(caller, &instance, given.as_ref()).await?;
                let (row, part) = match &given {
                    Some(given) => {
                        let update = call == RegistryCall::Update;
                        self.put(&instance, host.supplier, given, update, caller, &starts).await?
                    }
                    None => self.remove(&instance).await?,
                };
                rows.insert(row_key, row);
                if !part.writes.is_empty() {
                    new += usize::from(given.is_some() && creates(&part, &instance));
                    pushes.push((instance, given));
                }
                txn = txn.and(part);
            }
            self.check_instances(caller, namespace, new).await?;
            // Read last: the caller renews its lease while a call on many hosts is evaluated, and each renewal would
            // conflict.
            let (fence, fenced) = self.fence(caller).await?;
            if let Some(done) = fenced {
                let row = Row::new(RowCode(done.code), done.message);
                return Ok(rows.into_keys().map(|key| (key, row.clone())).collect());
            }
            txn = txn.and(fence).and(self.response_txn(caller, &rows)?);
            if txn.writes.is_empty() {
                return Ok(rows);
            }
            if let TxnOutcome::Written(number) = self.store.txn(txn).await? {
                pushes.into_iter().for_each(|(instance, given)| self.push_spec(instance, given, number));
                return Ok(rows);
            }
        }
        Err(ApiError::BadRequest(CONTENDED.to_owned()))
    }

    /// Sends the registered spec to the host's agent; a disconnected agent gets it when it joins.
    pub(super) fn push_spec(&self, instance: InstanceKey, given: Option<OwnedSpec>, changed: Seq) {
        let host = instance.host.clone();
        self.hosts.send(&host, ToAgent::SetSpec { instance, given, changed });
    }

    async fn put(
        &self,
        instance: &InstanceKey,
        supplier: Option<u64>,
        given: &OwnedSpec,
        update: bool,
        caller: &Caller,
        starts: &OpenStarts,
    ) -> Result<(Row, Txn), ApiError> {
        let key = keys::registration(instance);
        let existing = self.store.get(&key).await?;
        if existing.is_some() && !update {
            let message = "the process is already registered: use update_proc_info to change it";
            return Ok((Row::new(RowCode::EXISTS, message), Txn::default()));
        }
        let old: Option<RegistryRecord> = existing.as_ref().map(Entry::decode).transpose()?;
        let taken =
            match self.identity_owner(instance, self.holder(instance, &given.spec).await?, starts).await? {
                IdentityOwner::Own(entry) => entry.map_or(0, |entry| entry.mod_seq),
                // Registered without the identity: the first start decides its owner.
                IdentityOwner::Claimed(_, entry) => entry.mod_seq,
                IdentityOwner::Other(other, _) => {
                    let message = identity_conflict_message(&other, caller);
                    return Ok((Row::new(RowCode::COMMAND_FAILED, message), Txn::default()));
                }
            };
        if let Some(why) = self.identity_change_error(instance, old.as_ref(), &given.spec).await? {
            return Ok((Row::new(RowCode::COMMAND_FAILED, why), Txn::default()));
        }
        let before = old.as_ref().map(|old| &*old.given.spec);
        let txn = record_txn(instance, given, old.as_ref(), supplier, caller.generation)?
            .and(self.identity_txn(instance, before, &given.spec, None).await?)
            .only_if(key, existing.map_or(0, |entry| entry.mod_seq))
            .only_if(identity_key(instance, &given.spec), taken);
        Ok((Row::done(), txn))
    }

    /// Refuses a new identity while the process runs or is hosted under another.
    async fn identity_change_error(
        &self,
        instance: &InstanceKey,
        old: Option<&RegistryRecord>,
        new: &Spec,
    ) -> Result<Option<String>, ApiError> {
        let Some(report) = self.report(instance).await? else { return Ok(None) };
        let differs = |old: &Spec| !has_same_identity(old, new);
        let runs = report.live.as_ref().filter(|live| live.spec.monitor.auto_type != AutoType::Periodic);
        if runs.is_some_and(|live| differs(&live.spec)) {
            return Ok(Some("the process runs under another identity: stop it first".to_owned()));
        }
        if report.hosted && old.is_some_and(|old| differs(&old.given.spec)) {
            return Ok(Some(
                "the process is supervised under another identity: unhost it (op 4) first".to_owned(),
            ));
        }
        Ok(None)
    }

    async fn remove(&self, instance: &InstanceKey) -> Result<(Row, Txn), ApiError> {
        let key = keys::registration(instance);
        let Some(entry) = self.store.get(&key).await? else {
            return Ok((Row::new(RowCode::DONE, "the process was not registered"), Txn::default()));
        };
        let report = self.report(instance).await?;
        let wrong = match &report {
            Some(report) if report.live.is_some() => Some("the process is running: stop it first"),
            Some(report) if report.hosted => Some("the process is supervised: unhost it (op 4) first"),
            Some(_) | None => None,
        };
        if let Some(wrong) = wrong {
            return Ok((Row::new(RowCode::COMMAND_FAILED, wrong), Txn::default()));
        }
        Ok((Row::done(), self.removal(instance, &entry).await?.only_if(key, entry.mod_seq)))
    }

    /// Deletes all entries of an instance. A record that cannot be read is deleted as well; its identity stays taken.
    pub(super) async fn removal(&self, instance: &InstanceKey, record: &Entry) -> Result<Txn, ApiError> {
        let mut txn = Txn::delete(keys::registration(instance)).and(Txn::delete(keys::report(instance)));
        match record.decode::<RegistryRecord>() {
            Ok(record) => txn = txn.and(self.release_identity_txn(instance, &record.given.spec).await?),
            Err(error) => error!(%error, "the record is deleted without its identity"),
        }
        if self.store.get(&keys::claim(instance)).await?.is_some() {
            txn = txn.and(Txn::delete(keys::claim(instance)));
        }
        Ok(txn)
    }

    /// The process that owns an identity on a host.
    pub(super) async fn process_of_identity(
        &self,
        host: &Host,
        spec: &Spec,
    ) -> Result<Option<ProcessKey>, ApiError> {
        let key = keys::identity(&host.key, &spec.identity.index_key());
        let entry = self.store.get(&key).await?;
        Ok(entry.as_ref().map(Entry::parse).transpose()?)
    }

    /// A request without an owner keeps the current owner.
    pub(super) async fn with_current_owner(
        &self,
        instance: &InstanceKey,
        held: OwnedSpec,
    ) -> Result<OwnedSpec, ApiError> {
        if held.owner.is_some() {
            return Ok(held);
        }
        let owner = self.record(instance).await?.and_then(|record| record.given.owner);
        Ok(OwnedSpec { owner, ..held })
    }

    /// A request of JOB has neither an owner nor labels: the process keeps both.
    pub(super) async fn with_current_labels(
        &self,
        instance: &InstanceKey,
        held: OwnedSpec,
    ) -> Result<OwnedSpec, ApiError> {
        let Some(record) = self.record(instance).await? else { return Ok(held) };
        let labels = match held.spec.labels.is_empty() {
            true => record.given.spec.labels.clone(),
            false => held.spec.labels.clone(),
        };
        let spec = Arc::new(Spec { labels, ..(*held.spec).clone() });
        Ok(OwnedSpec { spec, owner: held.owner.or(record.given.owner), ..held })
    }

    pub(super) async fn record(&self, instance: &InstanceKey) -> Result<Option<RegistryRecord>, ApiError> {
        let entry = self.store.get(&keys::registration(instance)).await?;
        Ok(entry.as_ref().map(Entry::decode).transpose()?)
    }

    /// The same, for a caller that replaces the record: one that cannot be read counts as missing.
    pub(super) async fn replaceable_record(
        &self,
        instance: &InstanceKey,
    ) -> Result<Option<RegistryRecord>, ApiError> {
        match self.record(instance).await {
            Err(ApiError::Store(error @ Error::InvalidValue { .. })) => {
                error!(%error, %instance, "the record is replaced");
                Ok(None)
            }
            record => record,
        }
    }

    /// The last report of an instance.
    pub(super) async fn report(&self, instance: &InstanceKey) -> Result<Option<Report>, ApiError> {
        let entry = self.store.get(&keys::report(instance)).await?;
        Ok(entry.as_ref().map(Entry::decode).transpose()?)
    }
}

/// Writes the record of an instance; [`Gateway::identity_txn`] writes its identity.
pub fn record_txn(
    instance: &InstanceKey,
    given: &OwnedSpec,
    old: Option<&RegistryRecord>,
    supplier: Option<u64>,
    generation: Option<u64>,
) -> Result<Txn, ApiError> {
    let registered = old.map_or_else(now_secs, |old| old.registered);
    let supplier = supplier.or(old.and_then(|old| old.supplier));
    let secrets = secret_history(old, &given.spec);
    let record = RegistryRecord { given: given.clone(), supplier, registered, generation, secrets };
    Ok(Txn::put(keys::registration(instance), serde_json::to_vec(&record)?))
}

/// Whether a transaction writes the first record of an instance.
fn creates(txn: &Txn, instance: &InstanceKey) -> bool {
    let key = keys::registration(instance);
    txn.compares.iter().any(|compare| compare.key == key && compare.mod_seq == 0)
}

/// Whether two specs have the same identity.
fn has_same_identity(one: &Spec, other: &Spec) -> bool {
    let parts = |spec: &Spec| {
        let identity = spec.identity.clone();
        (identity.proc_name, identity.setup_path, identity.pid_path, identity.user, identity.value_key)
    };
    parts(one) == parts(other) && one.monitor.auto_type == other.monitor.auto_type
}
