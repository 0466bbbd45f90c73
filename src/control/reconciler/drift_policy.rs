//! Drift policy: what `--heal no` and `--follow no` hold, and why.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::Target;
use super::Reconciler;
use crate::model::{Desired, HoldReason, InstanceKey, ManifestRevision, Observed, Plan};
use crate::source::SourceState;
use crate::store::{Store, Txn};

/// The revision that everything converged to.
pub(super) struct AppliedRevision {
    revision: ManifestRevision,
    desired: Arc<Desired>,
}

impl AppliedRevision {
    pub(super) fn of(reading: &SourceState) -> AppliedRevision {
        AppliedRevision { revision: reading.revision.clone(), desired: Arc::clone(&reading.desired) }
    }
}

/// Which changes are disabled.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Disabled {
    Nothing,
    /// Drift is held.
    Heal,
    /// New revisions are held.
    Follow,
}

impl<T: Target> Reconciler<'_, T> {
    /// The revision that was applied before this started, where drift is not repaired.
    pub(super) async fn load_applied(&mut self, reading: &SourceState) -> Option<AppliedRevision> {
        let kept = self.target.state().get(&self.applied_key()).await.ok().flatten()?;
        let revision = String::from_utf8(kept.value.to_vec()).ok()?;
        (ManifestRevision::from_text(revision) == reading.revision).then(|| AppliedRevision::of(reading))
    }

    fn applied_key(&self) -> String {
        format!("source/{}/applied", self.config.rules.owner)
    }

    /// Everything matches this revision: later differences are drift.
    pub(super) async fn mark_applied(&mut self, desired: &Arc<Desired>) {
        if self.applied.as_ref().is_some_and(|applied| applied.revision == self.revision) {
            return;
        }
        self.applied =
            Some(AppliedRevision { revision: self.revision.clone(), desired: Arc::clone(desired) });
        if !self.config.heal {
            // Stored for the next controller, which must not repair drift either. If the write fails, the next one
            // does repair it.
            let _ = self.target.state().txn(Txn::put(self.applied_key(), self.revision.as_str())).await;
        }
    }

    /// The plan is dispatched: from here on, a return to the previous state is a change, not drift.
    pub(super) async fn mark_dispatched(&mut self, plan: &Plan, desired: &Desired) {
        let Some(applied) = self.applied.as_mut().filter(|_| !self.config.heal) else { return };
        if applied.revision == self.revision {
            return;
        }
        let made = Arc::make_mut(&mut applied.desired);
        for key in plan.steps().map(|step| &step.instance) {
            match desired.instances.get(key) {
                Some(want) => made.instances.insert(key.clone(), want.clone()),
                None => made.instances.remove(key),
            };
        }
        // Neither revision is fully applied.
        applied.revision = ManifestRevision::default();
        let _ = self.target.state().txn(Txn::delete(self.applied_key())).await;
    }

    /// Instances that are held because their change is disabled.
    pub(super) fn disabled_changes(
        &self,
        off: Disabled,
        desired: &Desired,
        observed: &Observed,
    ) -> BTreeMap<InstanceKey, (HoldReason, String)> {
        let said = |reason, why: &str| (reason, why.to_owned());
        let all = || desired.instances.keys().chain(observed.instances.keys());
        match (off, &self.applied) {
            (Disabled::Nothing, _) | (Disabled::Heal, None) => BTreeMap::new(),
            (Disabled::Follow, _) => {
                let why = said(HoldReason::FollowOff, "--follow no, and no revision was ever applied");
                all().map(|key| (key.clone(), why.clone())).collect()
            }
            (Disabled::Heal, Some(applied)) => {
                let why = said(HoldReason::HealOff, "drift is not repaired (--heal no)");
                let is_drift = |key: &&InstanceKey| applied.desired.is_same_request(desired, key);
                all().filter(is_drift).map(|key| (key.clone(), why.clone())).collect()
            }
        }
    }
}
