//! A target to observe and to operate on: its backend, its state store, and what both report together.

use std::collections::BTreeSet;

use super::error::TargetError;
use super::observation::{Observation, ObserveRequest};
use crate::backend::{Backend, ChangeStream, InstanceQuery, Scope};
use crate::clock;
use crate::execute::active_holds::read_active_holds;
use crate::model::{Desired, DesiredInstance, Hold, InstanceKey, Name, Pause, Time};
use crate::reconcile::Caps;
use crate::store::Store;

/// A target, as an apply and a controller need it.
pub trait Target: Send + Sync {
    type Backend: Backend;
    type State: Store;

    fn backend(&self) -> &Self::Backend;
    fn state(&self) -> &Self::State;
    fn name(&self) -> &str;
    /// Later calls carry this lease generation.
    fn set_generation(&self, generation: u64);
    /// Discards an observation that was fetched in advance: a recovery changed the observed state.
    fn discard_prefetched(&self) {}

    fn caps(&self) -> Caps {
        Caps::of(self.backend().dialect())
    }

    /// The current time.
    fn now(&self) -> Time {
        clock::now()
    }

    /// Observes the instances of these manifests. With `prune`, also all instances of their namespaces and of the
    /// ledger.
    fn observe(
        &self,
        desired: &Desired,
        prune: bool,
    ) -> impl Future<Output = Result<Observation, TargetError>> + Send {
        async move { observe_target(self, desired, prune.then(|| namespaces(desired))).await }
    }

    /// An observation, and a stream of later changes where the target has one.
    fn observe_and_watch(
        &self,
        desired: &Desired,
        prune: bool,
    ) -> impl Future<Output = Result<(Observation, Option<ChangeStream>), TargetError>> + Send {
        async move {
            if !self.caps().reads_specs {
                return Ok((self.observe(desired, prune).await?, None));
            }
            let subject = |(key, want): (&InstanceKey, &DesiredInstance)| InstanceQuery {
                instance: key.clone(),
                host: want.host.clone(),
                spec: Some(want.spec.clone()),
            };
            let scope = Scope::of(desired.instances.iter().map(subject).collect());
            let followed = self.backend().follow(&scope).await;
            let (observed, changes) = followed.map_err(|fault| TargetError::backend(self.name(), fault))?;
            Ok((Observation::of(observed), changes))
        }
    }

    /// Holds and pauses that have not expired. An entry that cannot be read holds what its key names.
    fn active_holds(&self) -> impl Future<Output = Result<(Vec<Hold>, Vec<Pause>), TargetError>> + Send {
        async move {
            let read = read_active_holds(self.state(), clock::now()).await;
            read.map_err(|error| TargetError::state(self.name(), error))
        }
    }
}

/// Observes the instances of these manifests. With `whole`, also all instances of these namespaces and of the ledger.
pub async fn observe_target<T: Target + ?Sized>(
    target: &T,
    desired: &Desired,
    whole: Option<BTreeSet<Name>>,
) -> Result<Observation, TargetError> {
    let request = ObserveRequest { target: target.name(), caps: &target.caps(), desired, whole };
    let observation = Observation::observe(target.backend(), target.state(), &request).await;
    observation.map_err(|cause| TargetError::observe(target.name(), cause))
}

/// The namespaces of manifests and their policies.
pub fn namespaces(desired: &Desired) -> BTreeSet<Name> {
    let allowed = desired.policies.iter().filter_map(|policy| policy.allow.namespaces.as_ref()).flatten();
    // A pattern is not a name: its namespaces are known only after the observation.
    let named = allowed.filter(|pattern| !pattern.contains('*')).filter_map(|name| name.parse().ok());
    desired.instances.keys().map(|key| key.namespace.clone()).chain(named).collect()
}
