//! Access of the app or person of a target: refusals as failures with exit code 77, and checks before the first change.
//!
//! The gateway decides. The checks here only report a refusal earlier, before a plan is executed.

use crate::access::{AccessRequest, AccessRole, Grant, MissingGrant, authorize};
use crate::backend::AnyBackend;
use crate::cli::{Exit, Failure};
use crate::contract::AccessInfo;
use crate::engine::ConnectedTarget;
use crate::model::{Desired, InstanceKey, Name, ObservedInstance};
use crate::reconcile::Rules;

/// The reason of a refusal, as one word for scripts.
pub const FORBIDDEN: &str = "Forbidden";

/// Hint for a call that the credentials do not permit; the error names the missing grant.
pub const FORBIDDEN_HINT: &str = "the gateway's apps file or users file grants it: `abide access check` evaluates these files; or use other credentials (auth)";

/// The failure of a call that the credentials do not permit.
pub fn forbidden(message: impl Into<String>) -> Failure {
    Failure { reason: Some(FORBIDDEN), ..Failure::new(Exit::Forbidden, message) }.hint(FORBIDDEN_HINT)
}

impl ConnectedTarget {
    /// Access of the app. `None`: the target does not report it.
    pub async fn access(&self) -> Option<AccessInfo> {
        match &self.backend {
            AnyBackend::Abide(abide) => abide.access().await.ok(),
            AnyBackend::Platform(_) => None,
        }
    }

    fn missing(&self, missing: &MissingGrant) -> Failure {
        forbidden(format!("target {}: {missing}", self.name))
    }

    /// Refuses manifests with instances outside the grant of the app, before anything is observed or changed.
    pub async fn check_desired(
        &self,
        desired: &Desired,
        rules: &Rules,
        role: AccessRole,
    ) -> Result<(), Failure> {
        if self.name == "local" {
            return Ok(());
        }
        let Some(grant) = self.access().await.map(Grant::from) else { return Ok(()) };
        let owner = Some(rules.owner.as_str());
        let own = AccessRequest { role: Some(role), owner, state_owner: owner, ..AccessRequest::default() };
        authorize(&grant, &own).map_err(|missing| self.missing(&missing))?;
        for (key, want) in &desired.instances {
            if !rules.selection.selects(key, Some(&want.origin.declared), &want.spec.labels) {
                continue;
            }
            let (namespace, host) = (Some(key.namespace.as_str()), Some(&key.host));
            let user = Some(want.spec.identity.user.as_deref().unwrap_or_default());
            let request = AccessRequest { namespace, host, user, ..AccessRequest::default() };
            authorize(&grant, &request).map_err(|missing| {
                let place = &want.origin.place;
                let failure = self.missing(&missing);
                Failure { message: format!("{place}: {}", failure.message), ..failure }
            })?;
        }
        Ok(())
    }

    /// Refuses a manual operation on an instance outside the grant of the app, before its hold is written.
    pub async fn check_operation(
        &self,
        instances: &[(&InstanceKey, &ObservedInstance)],
    ) -> Result<(), Failure> {
        if self.name == "local" {
            return Ok(());
        }
        let Some(grant) = self.access().await.map(Grant::from) else { return Ok(()) };
        for (key, seen) in instances {
            // A process without an owner belongs to its namespace.
            let owner = seen.owner.as_deref().filter(|owner| !owner.is_empty());
            let user =
                seen.specs.registered.spec().map(|spec| spec.identity.user.as_deref().unwrap_or_default());
            let request = AccessRequest {
                role: Some(AccessRole::Operate),
                namespace: Some(key.namespace.as_str()),
                host: Some(&key.host),
                user,
                owner,
                state_owner: owner,
            };
            authorize(&grant, &request).map_err(|missing| self.missing(&missing))?;
        }
        Ok(())
    }

    /// Fails if one of the namespaces is outside the grant: a verb that found no process names the cause.
    pub async fn check_namespaces(&self, namespaces: impl IntoIterator<Item = &Name>) -> Result<(), Failure> {
        let Some(grant) = self.access().await.map(Grant::from) else { return Ok(()) };
        let missing = namespaces.into_iter().find_map(|name| grant.check_namespace(name.as_str()).err());
        missing.map_or(Ok(()), |missing| Err(self.missing(&missing)))
    }

    /// The failure of a verb that found no process of these namespaces: a namespace outside the grant is the cause.
    pub async fn not_found(&self, namespaces: impl IntoIterator<Item = &Name>, failure: Failure) -> Failure {
        self.check_namespaces(namespaces).await.err().unwrap_or(failure)
    }
}
