//! Drift policy: instances that `--heal no` and `--follow no` hold, with reasons.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::active_revision::Disabled;
use super::context::PassContext;
use crate::control::Target;
use crate::model::{Desired, HoldReason, InstanceKey, ManifestRevision, Observed, Plan};
use crate::source::SourceState;
use crate::store::{Store, Txn, keys};

/// The revision that everything converged to: differences from it are drift. `None`: unknown.
#[derive(Default)]
pub struct DriftPolicy(Option<ConvergedRevision>);

struct ConvergedRevision {
    revision: ManifestRevision,
    desired: Arc<Desired>,
}

impl DriftPolicy {
    /// Takes these manifests as applied: every difference is drift.
    pub fn set_applied(&mut self, revision: &ManifestRevision, desired: &Arc<Desired>) {
        self.0 = Some(ConvergedRevision { revision: revision.clone(), desired: Arc::clone(desired) });
    }

    /// Loads the revision that was applied before this started, where drift is not repaired.
    pub async fn load<T: Target>(&mut self, context: PassContext<'_, T>, manifests: &SourceState) {
        if self.0.is_some() || context.config.heal {
            return;
        }
        let stored = context.state().get(&keys::applied_revision(context.owner())).await.ok().flatten();
        let revision = stored.and_then(|entry| String::from_utf8(entry.value.to_vec()).ok());
        if revision.is_some_and(|revision| revision == manifests.revision.as_str()) {
            self.set_applied(&manifests.revision, &manifests.desired);
        }
    }

    /// Everything matches this revision: later differences are drift.
    pub async fn mark_converged<T: Target>(
        &mut self,
        context: PassContext<'_, T>,
        revision: &ManifestRevision,
        desired: &Arc<Desired>,
    ) {
        if self.0.as_ref().is_some_and(|applied| applied.revision == *revision) {
            return;
        }
        self.set_applied(revision, desired);
        if !context.config.heal {
            // Stored for the next controller, which must not repair drift either. If the write fails, the next one
            // does repair it.
            let put = Txn::put(keys::applied_revision(context.owner()), revision.as_str());
            let _ = context.state().txn(put).await;
        }
    }

    /// The plan is dispatched: from here on, a return to the previous state is a change, not drift.
    pub async fn mark_dispatched<T: Target>(
        &mut self,
        context: PassContext<'_, T>,
        revision: &ManifestRevision,
        plan: &Plan,
        desired: &Desired,
    ) {
        if !context.config.heal && self.mix_in(revision, plan, desired) {
            let _ = context.state().txn(Txn::delete(keys::applied_revision(context.owner()))).await;
        }
    }

    /// Adds the instances of a plan for another revision. Returns whether neither revision is fully applied now.
    fn mix_in(&mut self, revision: &ManifestRevision, plan: &Plan, desired: &Desired) -> bool {
        let Some(applied) = self.0.as_mut().filter(|applied| applied.revision != *revision) else {
            return false;
        };
        let mixed = Arc::make_mut(&mut applied.desired);
        for key in plan.steps().map(|step| &step.instance) {
            match desired.instances.get(key) {
                Some(want) => mixed.instances.insert(key.clone(), want.clone()),
                None => mixed.instances.remove(key),
            };
        }
        applied.revision = ManifestRevision::default();
        true
    }

    /// Instances that are held because their change is disabled.
    pub fn held(
        &self,
        disabled: Disabled,
        desired: &Desired,
        observed: &Observed,
    ) -> BTreeMap<InstanceKey, (HoldReason, String)> {
        let because = |reason, why: &str| (reason, why.to_owned());
        let all = || desired.instances.keys().chain(observed.instances.keys());
        match (disabled, &self.0) {
            (Disabled::Nothing, _) | (Disabled::Heal, None) => BTreeMap::new(),
            (Disabled::Follow, _) => {
                let why = because(HoldReason::FollowOff, "--follow no, and no revision was ever applied");
                all().map(|key| (key.clone(), why.clone())).collect()
            }
            (Disabled::Heal, Some(applied)) => {
                let why = because(HoldReason::HealOff, "drift is not repaired (--heal no)");
                let is_drift = |key: &&InstanceKey| applied.desired.is_same_request(desired, key);
                all().filter(is_drift).map(|key| (key.clone(), why.clone())).collect()
            }
        }
    }
}
