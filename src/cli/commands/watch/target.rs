//! The controller's [`Target`] for a connected target.

use crate::backend::{AnyBackend, Backend, ChangeStream, InstanceQuery, Scope};
use crate::cli::target::{ConnectedTarget, namespaces};
use crate::control::Target;
use crate::execute::world::Observation;
use crate::model::{Desired, DesiredInstance, Hold, InstanceKey, Pause};
use crate::store::AnyStore;

impl Target for ConnectedTarget {
    type Backend = AnyBackend;
    type State = AnyStore;

    fn backend(&self) -> &AnyBackend {
        &self.backend
    }

    fn state(&self) -> &AnyStore {
        &self.state
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn set_generation(&self, generation: u64) {
        ConnectedTarget::act_as(self, generation);
    }

    async fn observe(&self, desired: &Desired, prune: bool) -> Result<Observation, String> {
        let world = self.observe_for(desired, prune.then(|| namespaces(desired))).await;
        world.map_err(|failure| failure.message)
    }

    async fn observe_and_watch(
        &self,
        desired: &Desired,
        prune: bool,
    ) -> Result<(Observation, Option<ChangeStream>), String> {
        if !self.caps().reads_specs {
            return Ok((self.observe(desired, prune).await?, None));
        }
        let subject = |(key, want): (&InstanceKey, &DesiredInstance)| InstanceQuery {
            instance: key.clone(),
            host: want.host.clone(),
            spec: Some(want.spec.clone()),
        };
        let scope = Scope::of(desired.instances.iter().map(subject).collect());
        let (observed, changes) =
            self.backend.follow(&scope).await.map_err(|fault| self.failure(&fault).message)?;
        Ok((Observation::of(observed), changes))
    }

    async fn active_holds(&self) -> Result<(Vec<Hold>, Vec<Pause>), String> {
        ConnectedTarget::restraints(self).await.map_err(|failure| failure.message)
    }
}
