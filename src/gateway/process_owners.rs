//! Process owners: looked up for a call, and compared with its grant.
//!
//! An owner is looked up only for an app that is bound to owners. A process without an owner belongs to its namespace.

use super::{ApiError, Caller, Gateway, readable};
use crate::access::{AccessRequest, AccessRole, authorize};
use crate::agent_protocol::{OwnedSpec, Report};
use crate::gse::request::ProcRequest;
use crate::model::{InstanceKey, Spec};
use crate::store::{Entry, Store, keys};

/// The account of a process; empty: the agent's own.
fn account(spec: &Spec) -> &str {
    spec.identity.user.as_deref().unwrap_or_default()
}

impl Caller {
    /// Checks the namespace and the hosts that a request names. Hosts that are not valid have rows of their own.
    pub(super) fn check_request(&self, request: &ProcRequest) -> Result<(), ApiError> {
        if let Some(namespace) = &request.meta.namespace {
            self.grant.check_namespace(namespace)?;
        }
        if self.grant.is_bound_to_hosts()
            && let Ok(targets) = request.read_targets()
        {
            targets.hosts.iter().try_for_each(|host| self.grant.check_host(&host.key))?;
        }
        Ok(())
    }
}

impl<S: Store> Gateway<S> {
    /// The owner of an instance: of its registration, else of its failed start.
    pub(super) async fn owner_of(&self, instance: &InstanceKey) -> Result<Option<String>, ApiError> {
        if let Some(record) = self.record(instance).await? {
            return Ok(record.given.owner);
        }
        let entry = self.store.get(&keys::failed_start(instance)).await?;
        let report = entry.as_ref().map(Entry::decode::<Report>).and_then(readable);
        Ok(report.and_then(|report| report.history.failed_start).and_then(|failed| failed.spec.owner))
    }

    /// Checks a read of one instance.
    pub(super) async fn check_read(&self, caller: &Caller, instance: &InstanceKey) -> Result<(), ApiError> {
        let owner = match caller.grant.is_bound_to_owners() {
            true => self.owner_of(instance).await?,
            false => None,
        };
        Ok(caller.grant.check_instance(instance, owner.as_deref())?)
    }

    /// Checks a change of one instance: its present owner, the owner that the caller claims, and with `given` the
    /// owner and the account of a spec.
    pub(super) async fn check_change(
        &self,
        caller: &Caller,
        instance: &InstanceKey,
        given: Option<&OwnedSpec>,
    ) -> Result<(), ApiError> {
        let grant = &caller.grant;
        grant.check_role(AccessRole::Operate)?;
        self.check_read(caller, instance).await?;
        let user = given.map(|given| account(&given.spec));
        for owner in [caller.owner.as_deref(), given.and_then(|given| given.owner.as_deref())] {
            authorize(grant, &AccessRequest { owner, user, ..AccessRequest::default() })?;
        }
        Ok(())
    }
}
