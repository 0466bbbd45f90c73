//! Identities: which process of a host has a `value_key`, or a `setup_path` and `proc_name`.
//!
//! `identity/HOST/INDEX` names the process that has an identity. Within a namespace the first registration has it until it
//! is unregistered. Across namespaces a registration alone claims nothing: it has the identity only until a process of
//! another namespace is really started or hosted with it. From then on that process has it, also while it is stopped, until
//! it is unregistered. Registrations without their identity are kept in `claim/HOST/NAMESPACE/NAME`.

use std::collections::HashSet;

use tokio::sync::OnceCell;
use tracing::warn;

use super::registry::{identity_key, key_of};
use super::tasks::{ItemResult, TaskItem, instance};
use super::{ApiError, Caller, Gateway};
use crate::gse::agent_protocol::{AgentOp, ReportedRun};
use crate::gse::codes::RowCode;
use crate::model::{InstanceKey, ProcessKey, Spec};
use crate::store::{Entry, Store, Txn};

/// Whose an identity is.
pub(super) enum IdentityOwner {
    /// Free, or the process's own.
    Own(Option<Entry>),
    /// Of a process that was only registered, in another namespace.
    Claimed(ProcessKey, Entry),
    Other(ProcessKey),
}

/// Instances with an unfinished start: read at most once per call, since that reads every open task. A check that takes
/// an identity reads the identity first: a start that is committed later changes it, and the commit conflicts.
#[derive(Default)]
pub(super) struct OpenStarts(OnceCell<HashSet<InstanceKey>>);

/// An identity's entry, and the process that has it if that is another one.
pub(super) type IdentityHolder = (Option<Entry>, Option<ProcessKey>);

pub(super) fn claim_key(instance: &InstanceKey) -> String {
    format!("claim/{}/{}/{}", instance.host, instance.namespace, instance.name)
}

/// The refusal names the holder to a caller who may see its namespace.
pub fn identity_conflict_message(other: &ProcessKey, caller: &Caller) -> String {
    let same = "has the same value_key, or setup_path and proc_name, on this host";
    match caller.may_see(other.namespace.as_str()) {
        true => format!("{other} {same}"),
        false => format!("a process of another namespace {same}"),
    }
}

impl<S: Store> Gateway<S> {
    pub(super) async fn holder(&self, own: &InstanceKey, spec: &Spec) -> Result<IdentityHolder, ApiError> {
        let entry = self.store.get(&identity_key(own, spec)).await?;
        let holder: Option<ProcessKey> =
            entry.as_ref().and_then(|entry| std::str::from_utf8(&entry.value).ok()?.parse().ok());
        Ok((entry, holder.filter(|holder| *holder != own.process())))
    }

    pub(super) async fn identity_owner(
        &self,
        own: &InstanceKey,
        holder: IdentityHolder,
        starts: &OpenStarts,
    ) -> Result<IdentityOwner, ApiError> {
        let (Some(entry), Some(holder)) = holder else { return Ok(IdentityOwner::Own(holder.0)) };
        let settled = holder.namespace == own.namespace
            || self.was_started(&instance(&holder, &own.host), starts).await?;
        Ok(match settled {
            true => IdentityOwner::Other(holder),
            false => IdentityOwner::Claimed(holder, entry),
        })
    }

    /// Does it run, or did it ever, or is it about to? An unknown state counts as yes.
    pub(super) async fn was_started(
        &self,
        instance: &InstanceKey,
        starts: &OpenStarts,
    ) -> Result<bool, ApiError> {
        // A start that ends between the two checks is in its report by then: hence the second one.
        Ok(self.has_run(instance).await?
            || self.open_starts(starts).await?.contains(instance)
            || self.has_run(instance).await?)
    }

    /// Does it run, or did it ever, by its report? An absent agent counts as yes.
    async fn has_run(&self, instance: &InstanceKey) -> Result<bool, ApiError> {
        if self.hosts.agent_version(&instance.host).is_none() {
            return Ok(true);
        }
        let Some(report) = self.report(instance).await? else { return Ok(false) };
        let ran = match report.ran {
            None | Some(ReportedRun::Never) => false,
            Some(ReportedRun::With(_) | ReportedRun::Unknown) => true,
        };
        Ok(report.live.is_some() || report.hosted || report.started > 0 || ran)
    }

    async fn open_starts<'a>(&self, starts: &'a OpenStarts) -> Result<&'a HashSet<InstanceKey>, ApiError> {
        starts.0.get_or_try_init(|| self.read_open_starts()).await
    }

    /// From the store: a task is there from its commit on, and in memory a moment later.
    async fn read_open_starts(&self) -> Result<HashSet<InstanceKey>, ApiError> {
        let mut starts = HashSet::new();
        for entry in self.store.range("open/", None, usize::MAX).await?.entries {
            let id = entry.key.trim_start_matches("open/");
            let known = self.tasks.in_memory().get(id).cloned();
            let task = match known {
                Some(task) => Some(task),
                None => self.load(id).await?,
            };
            let Some(task) = task else { continue };
            let open = task.open_rows().into_iter().filter_map(|nth| task.orders.get(nth));
            let gives = open.filter(|order| order.op.as_ref().is_some_and(AgentOp::registers_spec));
            starts.extend(gives.map(|order| order.instance.clone()));
        }
        Ok(starts)
    }

    /// What a registration writes of its identity. `also`: another name of the same process.
    pub(super) async fn identity_txn(
        &self,
        own: &InstanceKey,
        old: Option<&Spec>,
        new: &Spec,
        also: Option<&ProcessKey>,
    ) -> Result<Txn, ApiError> {
        let key = identity_key(own, new);
        let mut txn = match old.filter(|old| identity_key(own, old) != key) {
            Some(old) => self.release_identity_txn(own, old).await?,
            None => Txn::default(),
        };
        let (process, claim) = (own.process().to_string(), claim_key(own));
        let claimed = self.store.get(&claim).await?.is_some();
        match self.holder(own, new).await? {
            (_, Some(other)) if Some(&other) != also => {
                if !claimed {
                    txn = txn.and(Txn::put(claim, process));
                }
                Ok(txn)
            }
            (_, Some(_) | None) => {
                if claimed {
                    txn = txn.and(Txn::delete(claim));
                }
                Ok(txn.and(Txn::put(key, process)))
            }
        }
    }

    /// An identity is given up only by the process that has it.
    pub(super) async fn release_identity_txn(&self, own: &InstanceKey, spec: &Spec) -> Result<Txn, ApiError> {
        Ok(match self.holder(own, spec).await? {
            (Some(entry), None) => Txn::delete(entry.key.to_string()).only_if(&*entry.key, entry.mod_seq),
            (None, _) | (Some(_), Some(_)) => Txn::default(),
        })
    }

    /// Two processes on one host cannot have one identity. A refusal, or what the commit of this operation writes of the
    /// identity: a real start takes it from a process that was only registered, in another namespace.
    pub(super) async fn claims(
        &self,
        order: &TaskItem,
        holder: IdentityHolder,
        starts: &OpenStarts,
        caller: &Caller,
    ) -> Result<(Option<ItemResult>, Txn), ApiError> {
        let free = (None, Txn::default());
        let Some(held) = &order.held else { return Ok(free) };
        let own = &order.instance;
        let refused = |other: &ProcessKey| {
            (
                Some(ItemResult::new(RowCode::COMMAND_FAILED, identity_conflict_message(other, caller))),
                Txn::default(),
            )
        };
        let launches = matches!(order.op, Some(AgentOp::Start | AgentOp::Host | AgentOp::Restart));
        let former = match &order.op {
            Some(AgentOp::Rename { from }) => Some(from.process()),
            Some(_) | None => None,
        };
        let key = identity_key(own, &held.spec);
        let mine = |changed| Txn::put(key.clone(), own.process().to_string()).only_if(key.clone(), changed);
        match self.identity_owner(own, holder, starts).await? {
            // Written again: a concurrent call that takes the identity conflicts, and finds this start.
            IdentityOwner::Own(Some(entry)) if launches && !self.has_run(own).await? => {
                Ok((None, mine(entry.mod_seq)))
            }
            IdentityOwner::Own(Some(_)) => Ok(free),
            // A registration that came without its identity, which is free by now.
            IdentityOwner::Own(None) if launches && self.store.get(&claim_key(own)).await?.is_some() => {
                Ok((None, mine(0).and(Txn::delete(claim_key(own)))))
            }
            IdentityOwner::Own(None) => Ok(free),
            IdentityOwner::Other(other) | IdentityOwner::Claimed(other, _)
                if Some(&other) == former.as_ref() =>
            {
                Ok(free)
            }
            IdentityOwner::Claimed(other, entry) if launches => {
                warn!(instance = %own, from = %other, app = ?caller.app, "identity reassigned: the previous holder was never started");
                let other = instance(&other, &own.host);
                let mut txn = mine(entry.mod_seq);
                if self.store.get(&claim_key(own)).await?.is_some() {
                    txn = txn.and(Txn::delete(claim_key(own)));
                }
                if self.store.get(&key_of("reg", &other)).await?.is_some() {
                    txn = txn.and(Txn::put(claim_key(&other), other.process().to_string()));
                }
                Ok((None, txn))
            }
            IdentityOwner::Other(other) | IdentityOwner::Claimed(other, _) => Ok(refused(&other)),
        }
    }
}
