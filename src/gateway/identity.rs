//! Process identities: the owner of a `value_key`, or of a `setup_path` and `proc_name`, on a host.
//!
//! `identity/HOST/INDEX` holds the process that owns an identity. Within a namespace the first registration owns it
//! until it is unregistered. Across namespaces a registration alone reserves nothing: the first process that is
//! started or hosted with the identity takes it over, and owns it until it is unregistered, even while stopped.
//! Registrations without their identity are stored in `claim/HOST/NAMESPACE/NAME`.
//!
//! GSE 2.0 has no call that unregisters. Its calls therefore exchange the name of a process: see [`IdentityTransfer`].

use std::collections::HashSet;

use tokio::sync::OnceCell;
use tracing::{info, warn};

use super::registry::identity_key;
use super::tasks::{ItemResult, TaskItem, instance};
use super::{ApiError, Caller, Gateway};
use crate::agent_protocol::{AgentOp, ReportedRun};
use crate::gse::codes::RowCode;
use crate::model::{InstanceKey, ProcessKey, Spec};
use crate::store::{Entry, Store, Txn, keys};

/// Owner of an identity.
pub(super) enum IdentityOwner {
    /// Free, or owned by this process.
    Own(Option<Entry>),
    /// Owned by a process of another namespace that was only registered.
    Claimed(ProcessKey, Entry),
    Other(ProcessKey, Entry),
}

/// Effect of a start or host of another name with an identity, by a client whose dialect cannot unregister. Both names
/// must have the same owner.
enum IdentityTransfer {
    /// The identity stays with its process.
    Refused,
    /// The earlier process neither runs nor is supervised: for these dialects it is absent.
    Released,
    /// The earlier process runs and is not supervised: it is renamed and supervised in one operation.
    Renamed,
}

/// Instances with an unfinished start, loaded at most once per call because that reads every open task. A check reads
/// the identity before it: a start committed later changes the identity, and the check's commit conflicts.
#[derive(Default)]
pub(super) struct OpenStarts(OnceCell<HashSet<InstanceKey>>);

/// An identity's entry, and its owner if that is another process.
pub(super) type IdentityHolder = (Option<Entry>, Option<ProcessKey>);

/// The message names the owner only to a caller that may see its namespace.
pub fn identity_conflict_message(other: &ProcessKey, caller: &Caller) -> String {
    let same = "has the same value_key, or setup_path and proc_name, on this host";
    match caller.grant.check_namespace(other.namespace.as_str()).is_ok() {
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
            true => IdentityOwner::Other(holder, entry),
            false => IdentityOwner::Claimed(holder, entry),
        })
    }

    /// Whether an instance runs, ever ran, or has a start in flight. An unknown state counts as yes.
    pub(super) async fn was_started(
        &self,
        instance: &InstanceKey,
        starts: &OpenStarts,
    ) -> Result<bool, ApiError> {
        // A start that finishes between the two checks appears in the report, which is therefore checked again.
        Ok(self.has_run(instance).await?
            || self.open_starts(starts).await?.contains(instance)
            || self.has_run(instance).await?)
    }

    /// Whether an instance runs or ever ran by its report. A missing agent counts as yes.
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

    /// Reads the store, not memory: a task enters memory shortly after its commit.
    async fn read_open_starts(&self) -> Result<HashSet<InstanceKey>, ApiError> {
        let mut starts = HashSet::new();
        for entry in self.store.range(keys::OPEN_TASK_PREFIX, None, usize::MAX).await?.entries {
            let Some(id) = keys::open_task_of(&entry.key) else { continue };
            let known = self.tasks.in_memory().get(id).cloned();
            let task = match known {
                Some(task) => Some(task),
                None => self.load(id).await?,
            };
            let Some(task) = task else { continue };
            let open = task.open_rows().into_iter().filter_map(|nth| task.items.get(nth));
            let gives = open.filter(|item| item.op.as_ref().is_some_and(AgentOp::registers_spec));
            starts.extend(gives.map(|item| item.instance.clone()));
        }
        Ok(starts)
    }

    /// The identity writes of a registration. `also`: another name of the same process.
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
        let (process, claim) = (own.process().to_string(), keys::claim(own));
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

    /// Releases an identity if this process owns it.
    pub(super) async fn release_identity_txn(&self, own: &InstanceKey, spec: &Spec) -> Result<Txn, ApiError> {
        Ok(match self.holder(own, spec).await? {
            (Some(entry), None) => Txn::delete(entry.key.to_string()).only_if(&*entry.key, entry.mod_seq),
            (None, _) | (Some(_), Some(_)) => Txn::default(),
        })
    }

    /// Enforces one owner per identity and host. Returns a refusal, or the identity writes of this operation's
    /// commit: a start takes the identity over from a process of another namespace that was only registered.
    pub(super) async fn claims(
        &self,
        item: &mut TaskItem,
        holder: IdentityHolder,
        starts: &OpenStarts,
        caller: &Caller,
    ) -> Result<(Option<ItemResult>, Txn), ApiError> {
        let free = (None, Txn::default());
        let Some(held) = &item.held else { return Ok(free) };
        let own = &item.instance;
        let refused = |other: &ProcessKey| {
            (
                Some(ItemResult::new(RowCode::COMMAND_FAILED, identity_conflict_message(other, caller))),
                Txn::default(),
            )
        };
        let launches = matches!(item.op, Some(AgentOp::Start | AgentOp::Host | AgentOp::Restart));
        let former = match &item.op {
            Some(AgentOp::Rename { from }) => Some(from.process()),
            Some(_) | None => None,
        };
        let key = identity_key(own, &held.spec);
        let mine = |changed| Txn::put(key.clone(), own.process().to_string()).only_if(key.clone(), changed);
        match self.identity_owner(own, holder, starts).await? {
            // Rewritten so that a concurrent take-over conflicts, and then sees this start.
            IdentityOwner::Own(Some(entry)) if launches && !self.is_in_use(own).await? => {
                Ok((None, mine(entry.mod_seq)))
            }
            IdentityOwner::Own(Some(_)) => Ok(free),
            // The registration had no identity, and the identity is free now.
            IdentityOwner::Own(None) if launches && self.store.get(&keys::claim(own)).await?.is_some() => {
                Ok((None, mine(0).and(Txn::delete(keys::claim(own)))))
            }
            IdentityOwner::Own(None) => Ok(free),
            IdentityOwner::Other(other, _) | IdentityOwner::Claimed(other, _)
                if Some(&other) == former.as_ref() =>
            {
                Ok(free)
            }
            IdentityOwner::Claimed(other, entry) if launches => {
                warn!(instance = %own, from = %other, app = ?caller.app, "identity reassigned: the previous holder was never started");
                Ok((None, mine(entry.mod_seq).and(self.reassignment(own, &other).await?)))
            }
            IdentityOwner::Other(other, entry) => {
                match self.succession(item, &other, starts, caller).await? {
                    IdentityTransfer::Refused => Ok(refused(&other)),
                    IdentityTransfer::Released => {
                        info!(instance = %own, from = %other, "identity reassigned: its owner starts it under another name");
                        Ok((None, mine(entry.mod_seq).and(self.reassignment(own, &other).await?)))
                    }
                    IdentityTransfer::Renamed => {
                        info!(instance = %own, from = %other, "the host operation renames the process of its owner");
                        let from = instance(&other, &own.host);
                        (item.op, item.supervises) = (Some(AgentOp::Rename { from }), true);
                        Ok(free)
                    }
                }
            }
            IdentityOwner::Claimed(other, _) => Ok(refused(&other)),
        }
    }

    /// The claims after an identity was reassigned: the new holder has none, the previous one keeps its registration.
    async fn reassignment(&self, own: &InstanceKey, other: &ProcessKey) -> Result<Txn, ApiError> {
        let (other, mut txn) = (instance(other, &own.host), Txn::default());
        if self.store.get(&keys::claim(own)).await?.is_some() {
            txn = txn.and(Txn::delete(keys::claim(own)));
        }
        if self.store.get(&keys::registration(&other)).await?.is_some() {
            txn = txn.and(Txn::put(keys::claim(&other), other.process().to_string()));
        }
        Ok(txn)
    }

    async fn succession(
        &self,
        item: &TaskItem,
        other: &ProcessKey,
        starts: &OpenStarts,
        caller: &Caller,
    ) -> Result<IdentityTransfer, ApiError> {
        let hosts = match item.op {
            Some(AgentOp::Host) => true,
            Some(AgentOp::Start) => false,
            Some(_) | None => return Ok(IdentityTransfer::Refused),
        };
        // Abide's own clients unregister and rename.
        let Some(owner) = item.held.as_ref().and_then(|held| held.owner.as_deref()) else {
            return Ok(IdentityTransfer::Refused);
        };
        let other = instance(other, &item.instance.host);
        let of_other = self.record(&other).await?.and_then(|record| record.given.owner);
        if caller.is_abide() || of_other.as_deref() != Some(owner) {
            return Ok(IdentityTransfer::Refused);
        }
        match self.check_change(caller, &other, None).await {
            Err(ApiError::NotAllowed(_)) => return Ok(IdentityTransfer::Refused),
            checked => checked?,
        }
        // A missing agent may run it.
        if self.hosts.agent_version(&other.host).is_none() || self.open_starts(starts).await?.contains(&other)
        {
            return Ok(IdentityTransfer::Refused);
        }
        let report = self.report(&other).await?;
        let (runs, is_hosted) =
            report.map_or((false, false), |report| (report.live.is_some(), report.hosted));
        Ok(match (runs, is_hosted) {
            (false, false) => IdentityTransfer::Released,
            (true, false) if hosts && !self.is_in_use(&item.instance).await? => IdentityTransfer::Renamed,
            (true, false) | (_, true) => IdentityTransfer::Refused,
        })
    }

    /// Whether an instance runs or is supervised by its report. A missing agent counts as yes.
    async fn is_in_use(&self, instance: &InstanceKey) -> Result<bool, ApiError> {
        if self.hosts.agent_version(&instance.host).is_none() {
            return Ok(true);
        }
        let report = self.report(instance).await?;
        Ok(report.is_some_and(|report| report.live.is_some() || report.hosted))
    }
}
