//! Calls that make tasks: operate_proc in all its shapes, JOB's two, and our rename.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};
use tracing::warn;

use super::auth::short_digest;
use super::identity::{OpenStarts, identity_conflict_message};
use super::registry::{CONTENDED, MAX_ATTEMPTS, owned_spec};
use super::tasks::{ItemResult, MAX_ROWS, NamespaceFilter, TaskItem, instance};
use super::{ApiError, Caller, Gateway, now_ms};
use crate::gse::agent_protocol::{AgentOp, OwnedSpec};
use crate::gse::codes::{GseOp, ManageOp, RowCode};
use crate::gse::keys;
use crate::gse::request::ProcRequest;
use crate::gse::{JobApi, JobBody, Subject};
use crate::model::{HostKey, InstanceKey, ProcessKey};
use crate::store::lease::{self, Fenced};
use crate::store::{Store, Txn};

/// What became of a call that has a name of its own.
#[derive(Serialize, Deserialize)]
struct StoredResponse {
    begun: i64,
    answer: serde_json::Value,
}

impl<S: Store> Gateway<S> {
    /// operate_proc, operate_proc_v2 and operate_proc_multi. The number of the task.
    pub async fn operate(&self, requests: &[ProcRequest], caller: &Caller) -> Result<String, ApiError> {
        if requests.is_empty() {
            return Err(ApiError::BadRequest("proc_operate_req is missing".to_owned()));
        }
        let mut orders = Vec::new();
        let mut asked = HashSet::new();
        for request in requests {
            let (process, hosts, written) = (request.process()?, request.targets()?, request.written());
            let code =
                request.op_type.ok_or_else(|| ApiError::BadRequest("op_type is missing".to_owned()))?;
            let op = GseOp::from_code(code);
            let sent = request.spec()?.map(|spec| owned_spec(spec, caller));
            for host in hosts {
                let instance = instance(&process, &host.key);
                if !asked.insert(instance.clone()) {
                    let twice = format!("{instance} is asked for twice in one call: its rows would be one");
                    return Err(ApiError::BadRequest(twice));
                }
                let held = match &sent {
                    Some(held) => Some(self.with_current_owner(&instance, held.clone()).await?),
                    None => self.record(&instance).await?.map(|record| record.given),
                };
                let (held, unknown) = match held {
                    Some(held) => match self.with_secrets(&instance, held).await? {
                        Ok(held) => (Some(held), None),
                        // What becomes of the process does not depend on the spec that was sent.
                        Err(_) if op.is_some_and(|op| !AgentOp::from(op).registers_spec()) => {
                            (self.record(&instance).await?.map(|record| record.given), None)
                        }
                        Err(why) => (None, Some(why)),
                    },
                    None => (None, None),
                };
                let refused = match op {
                    None => Some(ItemResult::new(RowCode::BAD_OP_TYPE, format!("op_type {code} is unknown"))),
                    Some(_) if held.is_none() => {
                        let message = "it is not registered, and no spec was sent".to_owned();
                        Some(ItemResult::new(RowCode::COMMAND_FAILED, unknown.unwrap_or(message)))
                    }
                    Some(_) => None,
                };
                let written = written.get(&host.key).cloned();
                let order = task_item(op.map(AgentOp::from), instance, host.supplier, held, refused, caller);
                orders.push(TaskItem { written, takes: request.takes.clone(), ..order });
            }
        }
        self.submit(orders, caller).await
    }

    /// manage_proc and operate_process. A process with a registered identity is that instance, whatever it is called.
    pub async fn operate_job(
        &self,
        body: &JobBody,
        api: JobApi,
        caller: &Caller,
        may: NamespaceFilter<'_>,
    ) -> Result<String, ApiError> {
        body.check(api)?;
        let code = body.op_type.ok_or_else(|| ApiError::BadRequest("op_type is missing".to_owned()))?;
        let op = match api {
            JobApi::ManageProc => ManageOp::from_code(code).map(ManageOp::to_gse),
            JobApi::OperateProcess => GseOp::from_code(code),
        };
        let (subjects, notes) = body.places(api);
        if subjects.is_empty() {
            let why = notes.first().map_or(String::new(), |note| format!(": {note}"));
            return Err(ApiError::BadRequest(format!("process_infos names no process{why}")));
        }
        let mut orders = Vec::new();
        let starts = OpenStarts::default();
        let mut taken = HashSet::new();
        let mut named: HashMap<InstanceKey, String> = HashMap::new();
        for Subject { key, hosts, spec, .. } in subjects {
            if hosts.is_empty() {
                return Err(ApiError::BadRequest(format!(
                    "ip_list of {} is missing",
                    spec.identity.proc_name
                )));
            }
            let held = owned_spec(spec, caller);
            for host in hosts {
                let row = keys::job(&host.key, &held.spec);
                if !taken.insert(row.clone()) {
                    return Err(ApiError::BadRequest(format!(
                        "two processes would have the result key {row:?}: call twice"
                    )));
                }
                let process = match self.process_of_identity(&host, &held.spec).await? {
                    Some(process)
                        if may(process.namespace.as_str())
                            || self.was_started(&instance(&process, &host.key), &starts).await? =>
                    {
                        process
                    }
                    // None, or a process of another namespace that was only registered.
                    Some(_) | None => self.free_name(&key, &host.key, &held, &named).await?,
                };
                if !may(process.namespace.as_str()) {
                    let message = format!("app {:?} may not touch the process at {row}", caller.app);
                    return Err(ApiError::NotAllowed(message));
                }
                let refused = match op {
                    None => Some(ItemResult::new(RowCode::BAD_OP_TYPE, format!("op_type {code} is unknown"))),
                    Some(_) => None,
                };
                let instance = instance(&process, &host.key);
                named.insert(instance.clone(), held.spec.identity.index_key());
                let held = Some(self.with_current_owner(&instance, held.clone()).await?);
                orders.push(task_item(op.map(AgentOp::from), instance, host.supplier, held, refused, caller));
            }
        }
        self.submit(orders, caller).await
    }

    /// A process is known to JOB by where it is: two places are two instances, also where they are called alike.
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
        const MAX_BASE_NAME: usize = 119; // of 128 characters, with `-` and eight digits behind
        let base: String = key.name.as_str().chars().take(MAX_BASE_NAME).collect();
        let name = format!("{base}-{}", short_digest(&index));
        let name = name
            .parse()
            .map_err(|error| ApiError::BadRequest(format!("{index} cannot be named: {error}")))?;
        Ok(ProcessKey { namespace: key.namespace.clone(), name })
    }

    /// An instance is known by another name from now on, and has another spec, if one is sent. Nothing is restarted.
    pub async fn rename(
        &self,
        from: InstanceKey,
        to: InstanceKey,
        sent: Option<OwnedSpec>,
        caller: &Caller,
    ) -> Result<String, ApiError> {
        if from.host != to.host {
            return Err(ApiError::BadRequest(format!("{from} cannot move to {to}: that is another host")));
        }
        if self.record(&to).await?.is_some() {
            return Err(ApiError::Conflict(format!("{to} is registered already")));
        }
        let known = self.record(&from).await?;
        let supplier = known.as_ref().and_then(|record| record.supplier);
        let (held, why) = match sent {
            Some(sent) => match self.with_secrets(&from, sent).await? {
                Ok(held) => (Some(held), String::new()),
                Err(why) => (None, why),
            },
            None => (known.map(|record| record.given), format!("{from} is not registered")),
        };
        let refused = held.is_none().then(|| ItemResult::new(RowCode::COMMAND_FAILED, why));
        let orders = vec![task_item(Some(AgentOp::Rename { from }), to, supplier, held, refused, caller)];
        self.submit(orders, caller).await
    }

    /// Refuses what may not be done, then begins the task; a call that was made before has its task already.
    async fn submit(&self, orders: Vec<TaskItem>, caller: &Caller) -> Result<String, ApiError> {
        if orders.len() as u64 >= MAX_ROWS {
            return Err(ApiError::BadRequest(format!(
                "{} instances are too many for one call",
                orders.len()
            )));
        }
        for _ in 0..MAX_ATTEMPTS {
            if let Some(answer) = self.stored_response(caller).await? {
                return serde_json::from_value(answer).map_err(ApiError::from);
            }
            // Evaluated for each attempt: another call may have changed what the commit compares.
            let mut orders = orders.clone();
            let identities = self.claim_identities(&mut orders, caller).await?;
            let (fence, refused) = self.fence(caller).await?;
            let is_fenced = refused.is_some();
            for order in orders.iter_mut().filter(|order| order.refused.is_none()) {
                order.refused.clone_from(&refused);
            }
            let with = |id: &str| match is_fenced {
                // A retry is evaluated again: the owner may hold the lease by then.
                true => Ok(Txn::default()),
                false => Ok(fence.clone().and(identities.clone()).and(self.response_txn(caller, &id)?)),
            };
            if let Some(id) = self.begin(&orders, &with).await? {
                return Ok(id);
            }
        }
        Err(ApiError::BadRequest(CONTENDED.to_owned()))
    }

    /// Refuses orders whose identity another process has; what the others write of theirs.
    async fn claim_identities(&self, orders: &mut [TaskItem], caller: &Caller) -> Result<Txn, ApiError> {
        let mut identities: HashMap<(HostKey, String), ProcessKey> = HashMap::new();
        let mut all = Txn::default();
        let gives = |order: &TaskItem| {
            order.refused.is_none() && order.op.as_ref().is_some_and(AgentOp::registers_spec)
        };
        let mut held = Vec::new();
        for order in orders.iter_mut().filter(|order| gives(order)) {
            let holder = match &order.held {
                Some(held) => self.holder(&order.instance, &held.spec).await?,
                None => (None, None),
            };
            held.push((order, holder));
        }
        // Every identity is read before the open starts are.
        let starts = OpenStarts::default();
        for (order, holder) in held {
            let (refused, txn) = self.claims(order, holder, &starts, caller).await?;
            order.refused = refused;
            if let (None, Some(held)) = (&order.refused, &order.held) {
                let place = (order.instance.host.clone(), held.spec.identity.index_key());
                let own = order.instance.process();
                if let Some(other) = identities.insert(place, own.clone()).filter(|other| *other != own) {
                    let message = identity_conflict_message(&other, caller);
                    order.refused = Some(ItemResult::new(RowCode::COMMAND_FAILED, message));
                    continue;
                }
                all.compares.extend(txn.compares);
                all.writes.extend(txn.writes);
            }
        }
        Ok(all)
    }

    /// What the same call was answered before.
    pub(super) async fn stored_response(
        &self,
        caller: &Caller,
    ) -> Result<Option<serde_json::Value>, ApiError> {
        let Some(op) = &caller.op else { return Ok(None) };
        let entry = self.store.get(&format!("op/{}/{op}", caller.app)).await?;
        Ok(entry
            .and_then(|entry| serde_json::from_slice::<StoredResponse>(&entry.value).ok())
            .map(|called| called.answer))
    }

    /// The task that a call of this caller's made, if it was ever taken on.
    pub async fn task_of(&self, caller: &Caller) -> Result<serde_json::Value, ApiError> {
        let answer = self.stored_response(caller).await?.filter(serde_json::Value::is_string);
        Ok(serde_json::json!({"task": answer}))
    }

    /// Remembers what a call is answered, in the commit that carries it out.
    pub(super) fn response_txn(&self, caller: &Caller, answer: &impl Serialize) -> Result<Txn, ApiError> {
        let Some(op) = &caller.op else { return Ok(Txn::default()) };
        let called = StoredResponse { begun: now_ms(), answer: serde_json::to_value(answer)? };
        let name = format!("op/{}/{op}", caller.app);
        Ok(Txn::put(name.clone(), serde_json::to_vec(&called)?).only_if(name, 0))
    }

    /// A generation counts only while the writer lease of its owner holds it. With what a commit has to compare for
    /// that; else why the call is refused, and then nothing of it is remembered.
    pub(super) async fn fence(&self, caller: &Caller) -> Result<(Txn, Option<ItemResult>), ApiError> {
        let (Some(owner), Some(generation)) = (&caller.owner, caller.generation) else {
            return Ok((Txn::default(), None));
        };
        let key = writer_lease(owner);
        let entry = self.store.get(&key).await?;
        let record: Option<lease::Record> =
            entry.as_ref().and_then(|entry| serde_json::from_slice(&entry.value).ok());
        let message = match lease::Record::fences(record.as_ref(), generation) {
            None => return Ok((Txn::default().only_if(key, entry.map_or(0, |entry| entry.mod_seq)), None)),
            Some(Fenced::Older) => RowCode::OLD_GENERATION.meaning().unwrap_or_default().to_owned(),
            Some(Fenced::Released) => format!("the writer lease of owner {owner} was released"),
            Some(Fenced::NeverGiven) => {
                warn!(app = ?caller.app, ?owner, generation, "refused: no writer lease has this generation");
                format!("no writer lease of owner {owner} has generation {generation}")
            }
        };
        Ok((Txn::default(), Some(ItemResult::new(RowCode::OLD_GENERATION, message))))
    }
}

/// The key of the lease whose number is an owner's generation.
pub fn writer_lease(owner: &str) -> String {
    format!("lease/writer/{owner}")
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
    TaskItem {
        op,
        instance,
        supplier,
        spec: None,
        held,
        owner,
        generation: caller.generation,
        refused,
        written: None,
        takes: None,
    }
}
