//! Heal and follow are two switches: what is off is left alone, with that as its reason.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::Target;
use super::super::source::SourceState;
use super::Reconciler;
use crate::model::{Desired, HoldReason, InstanceKey, Observed, Plan};
use crate::store::{Store, Txn};

/// What everything was made to be, once.
pub(super) struct AppliedRevision {
    revision: String,
    desired: Arc<Desired>,
}

impl AppliedRevision {
    pub(super) fn of(reading: &SourceState) -> AppliedRevision {
        AppliedRevision { revision: reading.revision.clone(), desired: Arc::clone(&reading.desired) }
    }
}

/// What somebody does not want to be done, and why.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Disabled {
    Nothing,
    /// Drift is left alone.
    Heal,
    /// New manifests are.
    Follow,
}

impl<T: Target> Reconciler<'_, T> {
    /// What was made true before this began, where drift from it is not to be repaired.
    pub(super) async fn load_applied(&mut self, reading: &SourceState) -> Option<AppliedRevision> {
        let kept = self.target.state().get(&self.applied_key()).await.ok().flatten()?;
        let revision = String::from_utf8(kept.value.to_vec()).ok()?;
        (revision == reading.revision).then(|| AppliedRevision::of(reading))
    }

    fn applied_key(&self) -> String {
        format!("source/{}/applied", self.config.rules.owner)
    }

    /// Everything is as this revision wants it: what differs from now on is drift.
    pub(super) async fn mark_applied(&mut self, desired: &Arc<Desired>) {
        if self.applied.as_ref().is_some_and(|applied| applied.revision == self.revision) {
            return;
        }
        self.applied =
            Some(AppliedRevision { revision: self.revision.clone(), desired: Arc::clone(desired) });
        if !self.config.heal {
            // Known to the next one as well, who is not to repair either. What cannot be written now is not: then it repairs.
            let _ = self.target.state().txn(Txn::put(self.applied_key(), self.revision.clone())).await;
        }
    }

    /// This is begun: from here on, going back to what was before is a change, and no drift.
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
        // It is neither the one nor the other.
        applied.revision.clear();
        let _ = self.target.state().txn(Txn::delete(self.applied_key())).await;
    }

    /// What is left alone because somebody switched it off.
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
                let why = said(
                    HoldReason::FollowOff,
                    "the manifests are not followed (--follow no), and nothing was ever taken",
                );
                all().map(|key| (key.clone(), why.clone())).collect()
            }
            (Disabled::Heal, Some(applied)) => {
                let why = said(
                    HoldReason::HealOff,
                    "it differs though no manifest asks for that, and drift is not repaired (--heal no)",
                );
                let is_drift = |key: &&InstanceKey| applied.desired.is_same_request(desired, key);
                all().filter(is_drift).map(|key| (key.clone(), why.clone())).collect()
            }
        }
    }
}
