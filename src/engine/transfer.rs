//! Transfer of instances to another owner, without a change of the process.
//!
//! The writer leases of both owners are held, so that neither changes the instances while they are transferred. Where a target has a
//! registry, the registration carries the owner; elsewhere supervision does.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::error::ApplyError;
use super::manual::{execute_steps, observe_all, step};
use super::writer_lease::WriterLease;
use crate::execute::StepResult;
use crate::model::{HostKey, InstanceKey, Observed, ObservedInstance, Op, Step};
use crate::observe::{Observation, Target};

/// Reason why nothing was transferred.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    #[error("{instance} belongs to {}, not to {from:?}; nothing was done", shown_owner(.owner))]
    NotOwned { instance: InstanceKey, owner: Option<String>, from: String },
    #[error("host {0}: no agent is connected; nothing was done")]
    NoAgent(HostKey),
    /// The target records owners of supervised processes only.
    #[error(
        "{0} is not supervised, and the target records owners of supervised processes only; nothing was done"
    )]
    NotSupervised(InstanceKey),
    #[error("the spec of {0} is unknown; nothing was done")]
    UnknownSpec(InstanceKey),
    #[error(transparent)]
    Lease(#[from] ApplyError),
}

fn shown_owner(owner: &Option<String>) -> String {
    owner.as_ref().map_or("no owner".to_owned(), |owner| format!("owner {owner:?}"))
}

/// The two owners of a transfer, and its time limits.
pub struct Transfer<'a> {
    pub from: &'a str,
    pub to: &'a str,
    pub lock_timeout: Duration,
    pub deadline: Instant,
}

impl Transfer<'_> {
    /// Transfers the instances that `is_meant` selects.
    pub async fn run<T>(
        &self,
        target: &T,
        is_meant: impl Fn(&InstanceKey, &ObservedInstance) -> bool,
    ) -> Result<Vec<StepResult>, TransferError>
    where
        T: Target<State: Clone + 'static>,
    {
        let old = WriterLease::acquire(target, self.from, self.lock_timeout).await?;
        // Calls carry the generation of the lease that was acquired last: that of the new owner.
        let new = match WriterLease::acquire(target, self.to, self.lock_timeout).await {
            Ok(new) => new,
            Err(error) => {
                old.release(target).await;
                return Err(error.into());
            }
        };
        let done = self.transfer(target, is_meant).await;
        new.release(target).await;
        old.release(target).await;
        done
    }

    async fn transfer<T: Target>(
        &self,
        target: &T,
        is_meant: impl Fn(&InstanceKey, &ObservedInstance) -> bool,
    ) -> Result<Vec<StepResult>, TransferError> {
        let world = observe_all(target).await.map_err(ApplyError::from)?;
        let mut observed = world.remembered();
        let steps = self.steps(target, &world, &observed, is_meant)?;
        // The executor compares the observed owner with that of the steps.
        let owner: Arc<str> = Arc::from(self.to);
        for step in &steps {
            if let Some(seen) = observed.instances.get_mut(&step.instance) {
                seen.owner = Some(Arc::clone(&owner));
            }
        }
        Ok(execute_steps(steps, target, &observed, self.deadline).await)
    }

    fn steps<T: Target>(
        &self,
        target: &T,
        world: &Observation,
        observed: &Observed,
        is_meant: impl Fn(&InstanceKey, &ObservedInstance) -> bool,
    ) -> Result<Vec<Step>, TransferError> {
        let caps = target.caps();
        let mut steps = Vec::new();
        for (key, seen) in observed.instances.iter().filter(|(key, seen)| is_meant(key, seen)) {
            if world.observed.gaps.contains_key(&key.host) {
                return Err(TransferError::NoAgent(key.host.clone()));
            }
            let owner = seen.owner.as_deref();
            if owner != Some(self.from) {
                let (instance, owner) = (key.clone(), owner.map(str::to_owned));
                return Err(TransferError::NotOwned { instance, owner, from: self.from.to_owned() });
            }
            let op = match caps.registry {
                true => Op::Register,
                false if seen.hosted == Some(true) => Op::Supervise,
                false => return Err(TransferError::NotSupervised(key.clone())),
            };
            let step = step(op, key, seen, world);
            if step.spec.is_none() {
                return Err(TransferError::UnknownSpec(key.clone()));
            }
            steps.push(step);
        }
        Ok(steps)
    }
}
