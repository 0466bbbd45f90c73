//! A target as the standing controller asks it.

use crate::backend::{Backend, Changes, Client, Scope, Subject};
use crate::cli::target::{Live, namespaces};
use crate::control::Target;
use crate::execute::world::World;
use crate::model::{Desired, Hold, InstanceKey, Pause, Want};
use crate::store::Either;

impl Target for Live {
    type Backend = Client;
    type State = Either;

    fn backend(&self) -> &Client {
        &self.backend
    }

    fn state(&self) -> &Either {
        &self.state
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn act_as(&self, generation: u64) {
        Live::act_as(self, generation);
    }

    async fn look(&self, desired: &Desired, prune: bool) -> Result<World, String> {
        let world = self.world(desired, prune.then(|| namespaces(desired))).await;
        world.map_err(|failure| failure.message)
    }

    async fn follow(&self, desired: &Desired, prune: bool) -> Result<(World, Option<Changes>), String> {
        if !self.caps().reads_specs {
            return Ok((self.look(desired, prune).await?, None));
        }
        let subject = |(key, want): (&InstanceKey, &Want)| Subject {
            instance: key.clone(),
            host: want.host.clone(),
            spec: Some(want.spec.clone()),
        };
        let scope = Scope::of(desired.instances.iter().map(subject).collect());
        let (observed, changes) =
            self.backend.follow(&scope).await.map_err(|fault| self.failure(&fault).message)?;
        Ok((World::of(observed), changes))
    }

    async fn restraints(&self) -> Result<(Vec<Hold>, Vec<Pause>), String> {
        Live::restraints(self).await.map_err(|failure| failure.message)
    }
}
