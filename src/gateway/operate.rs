//! Operation calls: all forms of operate_proc, JOB's two calls, and rename. Each creates a task.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use tracing::warn;

use super::auth::short_digest;
use super::batch::{Operations, RejectedItem, reject_repeated};
use super::identity::{OpenStarts, identity_conflict_message};
use super::registry::{CONTENDED, MAX_ATTEMPTS, owned_spec};
use super::tasks::{ItemResult, MAX_ROWS, Submission, TaskItem, instance};
use super::{ApiError, Caller, Gateway};
use crate::agent_protocol::{AgentOp, OwnedSpec};
use crate::clock;
use crate::contract::FoundTask;
use crate::gse::codes::{GseOp, ManageOp, RowCode};
use crate::gse::keys as result_keys;
use crate::gse::{BodyContent, JobApi, JobBody};
use crate::model::{HostKey, InstanceKey, ProcessKey};
use crate::store::lease::{self, Fenced};
use crate::store::{Entry, Store, Txn, keys};

/// Stored response of a call with an `X-Abide-Op`.
#[derive(Serialize, Deserialize)]
struct StoredResponse {
    begun: i64,
    answer: serde_json::Value,
}

impl<S: Store> Gateway<S> {
    /// operate_proc, operate_proc_v2 and operate_proc_multi. Returns the task id.
    pub async fn operate(&self, operations: Operations, caller: &Caller) -> Result<String, ApiError> {
        let Operations { requests, mut rejected } = operations;
        if requests.is_empty() && rejected.is_empty() {
            return Err(ApiError::BadRequest("proc_operate_req is missing".to_owned()));
        }
        let mut items = Vec::new();
        for request in &requests {
            let (process, targets, written) =
                (request.process()?, request.read_targets()?, request.written());
            let (namespace, name) = (process.namespace.as_str(), process.name.as_str());
            let invalid = targets.invalid.iter();
            rejected.extend(invalid.map(|invalid| RejectedItem::of_host(invalid, namespace, name)));
            let code =
                request.op_type.ok_or_else(|| ApiError::BadRequest("op_type is missing".to_owned()))?;
            let op = GseOp::from_code(code);
            let sent = request.spec_of_op(op)?.map(|spec| owned_spec(spec, caller));
            for host in targets.hosts {
                let instance = instance(&process, &host.key);
                let held = match &sent {
                    Some(held) => Some(self.with_current_owner(&instance, held.clone()).await?),
                    None => self.record(&instance).await?.map(|record| record.given),
                };
                let (held, unknown) = match held {
                    Some(held) => match self.with_secrets(&instance, held).await? {
                        Ok(held) => (Some(held), None),
                        // The operation does not depend on the sent spec.
                        Err(_) if op.is_some_and(|op| !AgentOp::from(op).registers_spec()) => {
                            (self.record(&instance).await?.map(|record| record.given), None)
                        }
                        Err(unknown) => (None, Some(unknown.to_string())),
                    },
                    None => (None, None),
                };
                let refused = match op {
                    None => Some(ItemResult::new(RowCode::BAD_OP_TYPE, format!("op_type {code} is unknown"))),
                    Some(_) if held.is_none() => {
                        let message = "the process is not registered, and the call has no spec".to_owned();
                        Some(ItemResult::new(RowCode::COMMAND_FAILED, unknown.unwrap_or(message)))
                    }
                    Some(_) => None,
                };
                let written = written.get(&host.key).cloned();
                let item = task_item(op.map(AgentOp::from), instance, host.supplier, held, refused, caller);
                let repairs = request.repairs.unwrap_or_default();
                items.push(TaskItem { written, takes: request.takes.clone(), repairs, ..item });
            }
        }
        reject_repeated(&mut items, &mut rejected);
        self.submit(Submission { items, rejected }, caller).await
    }

    /// manage_proc and operate_process. A registered identity selects its instance, regardless of the name in the call.
    pub async fn operate_job(
        &self,
        (body, mut rejected): (&JobBody, Vec<RejectedItem>),
        api: JobApi,
        caller: &Caller,
    ) -> Result<String, ApiError> {
        let code = body.op_type.ok_or_else(|| ApiError::BadRequest("op_type is missing".to_owned()))?;
        let op = match api {
            JobApi::ManageProc => ManageOp::from_code(code).map(ManageOp::to_gse),
            JobApi::OperateProcess => GseOp::from_code(code),
        };
        let (subjects, _) = body.contents_by_path(api);
        let mut items = Vec::new();
        let starts = OpenStarts::default();
        let mut named: HashMap<InstanceKey, String> = HashMap::new();
        for BodyContent { key, hosts, spec, .. } in subjects {
            let held = owned_spec(spec, caller);
            for host in hosts {
                let row = result_keys::job(&host.key, &held.spec);
                if held.spec.identity.setup_path.is_empty() && op == Some(GseOp::Status) {
                    items.push(self.named_live_check(instance(&key, &host.key), row, caller).await?);
                    continue;
                }
                let process = match self.process_of_identity(&host, &held.spec).await? {
                    Some(process)
                        if caller.grant.check_namespace(process.namespace.as_str()).is_ok()
                            || self.was_started(&instance(&process, &host.key), &starts).await? =>
                    {
                        process
                    }
                    // No owner, or an owner in another namespace that was only registered.
                    Some(_) | None => self.free_name(&key, &host.key, &held, &named).await?,
                };
                // The message does not name the namespace of another app.
                if caller.grant.check_namespace(process.namespace.as_str()).is_err() {
                    let who = &caller.grant.principal;
                    let message = format!("{who} lacks the namespace of the process at {row}");
                    return Err(ApiError::NotAllowed(message));
                }
                let refused = match op {
                    None => Some(ItemResult::new(RowCode::BAD_OP_TYPE, format!("op_type {code} is unknown"))),
                    Some(_) => None,
                };
                let instance = instance(&process, &host.key);
                named.insert(instance.clone(), held.spec.identity.index_key());
                let held = Some(self.with_current_labels(&instance, held.clone()).await?);
                let item = task_item(op.map(AgentOp::from), instance, host.supplier, held, refused, caller);
                items.push(TaskItem { job_key: Some(row), ..item });
            }
        }
        reject_repeated(&mut items, &mut rejected);
        self.submit(Submission { items, rejected }, caller).await
    }

    /// A live check of the process with this name.
    async fn named_live_check(
        &self,
        instance: InstanceKey,
        row: String,
        caller: &Caller,
    ) -> Result<TaskItem, ApiError> {
        let record = self.record(&instance).await?;
        let message = format!("setup_path is empty, and no process {} is registered", instance.process());
        let refused = record.is_none().then(|| ItemResult::new(RowCode::COMMAND_FAILED, message));
        let (supplier, held) = record.map_or((None, None), |record| (record.supplier, Some(record.given)));
        let item = task_item(Some(AgentOp::from(GseOp::Status)), instance, supplier, held, refused, caller);
        Ok(TaskItem { job_key: Some(row), ..item })
    }

    /// A free process name: JOB identifies a process by its path, so two paths with one name are two instances.
    async fn free_name(
        &self,
        key: &ProcessKey,
        host: &HostKey,
        held: &OwnedSpec,
        named: &HashMap<InstanceKey, String>,
    ) -> Result<ProcessKey, ApiError> {
        let index = held.spec.identity.index_key();
        let of_another = |other: &OwnedSpec| other.spec.identity.index_key() != index;
        let wanted = instance(key, host);
        let taken = match named.get(&wanted) {
            Some(other) => *other != index,
            None => self.record(&wanted).await?.is_some_and(|record| of_another(&record.given)),
        };
        if !taken {
            return Ok(key.clone());
        }
        const MAX_BASE_NAME: usize = 119; // of 128 characters; `-` and eight digits follow
        let base: String = key.name.as_str().chars().take(MAX_BASE_NAME).collect();
        let name = format!("{base}-{}", short_digest(&index));
        let name = name
            .parse()
            .map_err(|error| ApiError::BadRequest(format!("no valid process name for {index}: {error}")))?;
        Ok(ProcessKey { namespace: key.namespace.clone(), name })
    }

    /// Renames an instance without a restart, with a new spec if one is sent.
    pub async fn rename(
        &self,
        from: InstanceKey,
        to: InstanceKey,
        sent: Option<OwnedSpec>,
        caller: &Caller,
    ) -> Result<String, ApiError> {
        if from.host != to.host {
            return Err(ApiError::BadRequest(format!("cannot rename {from} to {to}: the hosts differ")));
        }
        if self.record(&to).await?.is_some() {
            return Err(ApiError::Conflict(format!(
                "cannot rename {from} to {to}: the new name is already registered"
            )));
        }
        let known = self.record(&from).await?;
        let supplier = known.as_ref().and_then(|record| record.supplier);
        let (held, why) = match sent {
            Some(sent) => match self.with_secrets(&from, sent).await? {
                Ok(held) => (Some(held), String::new()),
                Err(unknown) => (None, unknown.to_string()),
            },
            None => (known.map(|record| record.given), format!("{from} is not registered")),
        };
        let refused = held.is_none().then(|| ItemResult::new(RowCode::COMMAND_FAILED, why));
        let items = vec![task_item(Some(AgentOp::Rename { from }), to, supplier, held, refused, caller)];
        self.submit(Submission { items, rejected: Vec::new() }, caller).await
    }

    /// Checks access, identities and the lease, then creates the task. A repeated call returns its existing task.
    async fn submit(&self, submission: Submission, caller: &Caller) -> Result<String, ApiError> {
        let many = submission.items.len() + submission.rejected.len();
        if many as u64 >= MAX_ROWS {
            return Err(ApiError::BadRequest(format!("too many instances in one call: {many}")));
        }
        if submission.items.iter().any(|item| item.op.as_ref().is_none_or(|op| !op.is_read_only())) {
            self.check_audited()?;
        }
        for item in &submission.items {
            match item.op.as_ref().is_none_or(AgentOp::is_read_only) {
                true => self.check_read(caller, &item.instance).await?,
                false => self.check_change(caller, &item.instance, item.held.as_ref()).await?,
            }
        }
        for _ in 0..MAX_ATTEMPTS {
            if let Some(answer) = self.stored_response(caller).await? {
                return serde_json::from_value(answer).map_err(ApiError::from);
            }
            self.check_task_limits(caller, &submission.items).await?;
            // Evaluated for each attempt: a concurrent call may have changed the compared entries.
            let mut submission = submission.clone();
            let items = &mut submission.items;
            let identities = self.claim_identities(items, caller).await?;
            let (fence, refused) = self.fence(caller).await?;
            let is_fenced = refused.is_some();
            for item in items.iter_mut().filter(|item| item.refused.is_none()) {
                item.refused.clone_from(&refused);
            }
            let with = |id: &str| match is_fenced {
                // Not stored, so that a retry is evaluated again: the owner may hold the lease by then.
                true => Ok(Txn::default()),
                false => Ok(fence.clone().and(identities.clone()).and(self.response_txn(caller, &id)?)),
            };
            if let Some(id) = self.begin(&submission, &with).await? {
                return Ok(id);
            }
        }
        Err(ApiError::BadRequest(CONTENDED.to_owned()))
    }

    /// Refuses items whose identity another process owns. Returns the identity writes of the others.
    async fn claim_identities(&self, items: &mut [TaskItem], caller: &Caller) -> Result<Txn, ApiError> {
        let mut identities: HashMap<(HostKey, String), ProcessKey> = HashMap::new();
        let mut all = Txn::default();
        let registers =
            |item: &TaskItem| item.refused.is_none() && item.op.as_ref().is_some_and(AgentOp::registers_spec);
        let mut held = Vec::new();
        for item in items.iter_mut().filter(|item| registers(item)) {
            let holder = match &item.held {
                Some(held) => self.holder(&item.instance, &held.spec).await?,
                None => (None, None),
            };
            held.push((item, holder));
        }
        // Identities are read before the open starts, see [`OpenStarts`].
        let starts = OpenStarts::default();
        for (item, holder) in held {
            let (refused, txn) = self.claims(item, holder, &starts, caller).await?;
            item.refused = refused;
            if let (None, Some(held)) = (&item.refused, &item.held) {
                let slot = (item.instance.host.clone(), held.spec.identity.index_key());
                let own = item.instance.process();
                if let Some(other) = identities.insert(slot, own.clone()).filter(|other| *other != own) {
                    let message = identity_conflict_message(&other, caller);
                    item.refused = Some(ItemResult::new(RowCode::COMMAND_FAILED, message));
                    continue;
                }
                all.compares.extend(txn.compares);
                all.writes.extend(txn.writes);
            }
        }
        Ok(all)
    }

    /// The stored response of a repeated call.
    pub(super) async fn stored_response(
        &self,
        caller: &Caller,
    ) -> Result<Option<serde_json::Value>, ApiError> {
        let Some(op) = &caller.op else { return Ok(None) };
        let entry = self.store.get(&keys::response(&caller.app, op)).await?;
        let called: Option<StoredResponse> = entry.as_ref().map(Entry::decode).transpose()?;
        Ok(called.map(|called| called.answer))
    }

    /// The task that an earlier call with the same `X-Abide-Op` created.
    pub async fn task_of(&self, caller: &Caller) -> Result<FoundTask, ApiError> {
        let answer = self.stored_response(caller).await?;
        Ok(FoundTask { task: answer.and_then(|answer| answer.as_str().map(str::to_owned)) })
    }

    /// Stores the response of a call, in the commit of its changes.
    pub(super) fn response_txn(&self, caller: &Caller, answer: &impl Serialize) -> Result<Txn, ApiError> {
        let Some(op) = &caller.op else { return Ok(Txn::default()) };
        let called = StoredResponse { begun: clock::now().0, answer: serde_json::to_value(answer)? };
        let name = keys::response(&caller.app, op);
        Ok(Txn::put(name.clone(), serde_json::to_vec(&called)?).only_if(name, 0))
    }

    /// Checks the caller's generation against the writer lease of its owner. Returns the comparison for the commit,
    /// or the refusal; a refused call is not stored.
    pub(super) async fn fence(&self, caller: &Caller) -> Result<(Txn, Option<ItemResult>), ApiError> {
        let (Some(owner), Some(generation)) = (&caller.owner, caller.generation) else {
            return Ok((Txn::default(), None));
        };
        let key = keys::lease(&keys::writer_lease_name(owner));
        let entry = self.store.get(&key).await?;
        let record: Option<lease::Record> = entry.as_ref().map(Entry::decode).transpose()?;
        let message = match lease::Record::fences(record.as_ref(), generation) {
            None => return Ok((Txn::default().only_if(key, entry.map_or(0, |entry| entry.mod_seq)), None)),
            Some(Fenced::Older) => RowCode::OLD_GENERATION.meaning().unwrap_or_default().to_owned(),
            Some(Fenced::Released) => format!("the writer lease of owner {owner} was released"),
            Some(Fenced::NeverIssued) => {
                warn!(app = ?caller.app, ?owner, generation, "refused: no writer lease has this generation");
                format!("no writer lease of owner {owner} has generation {generation}")
            }
        };
        Ok((Txn::default(), Some(ItemResult::new(RowCode::OLD_GENERATION, message))))
    }
}

fn task_item(
    op: Option<AgentOp>,
    instance: InstanceKey,
    supplier: Option<u64>,
    held: Option<OwnedSpec>,
    refused: Option<ItemResult>,
    caller: &Caller,
) -> TaskItem {
    let owner = caller.owner.clone().or_else(|| held.as_ref().and_then(|held| held.owner.clone()));
    // Abide's planner counts on supervision as it was; other clients expect a restart to supervise.
    let supervises = op == Some(AgentOp::Restart) && !caller.is_abide();
    TaskItem {
        op,
        instance,
        supplier,
        spec: None,
        held,
        owner,
        app: Some(caller.app.clone()).filter(|app| !app.is_empty()),
        generation: caller.generation,
        refused,
        written: None,
        takes: None,
        repairs: false,
        job_key: None,
        supervises,
    }
}
