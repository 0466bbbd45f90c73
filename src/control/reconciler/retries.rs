//! Retries: backoff per instance, when the next retry is due, and the stored suspended instances.

use super::context::PassContext;
use crate::control::Target;
use crate::control::backoff::Backoff;
use crate::control::suspended::{self, Suspended, SuspendedInstances};
use crate::execute::StepResult;
use crate::model::{Desired, HoldReason, InstanceKey, Plan, Time};
use crate::store::Store;

#[derive(Default)]
pub struct Retries {
    pub backoff: Backoff,
    /// When a failed instance may be retried.
    due: Option<Time>,
    /// The stored suspended instances; `None`: not read yet.
    stored: Option<SuspendedInstances>,
}

impl Retries {
    pub fn is_due(&self, now: Time) -> bool {
        self.due.is_some_and(|due| due <= now)
    }

    /// A pass begins: it plans every retry that is due.
    pub fn begin_pass(&mut self) {
        self.due = None;
    }

    pub fn schedule(&mut self, now: Time) {
        self.due = self.backoff.next_retry(now);
    }

    /// Results count only for instances whose declaration is unchanged.
    pub fn record_results(
        &mut self,
        plan: &Plan,
        desired: &Desired,
        current: &Desired,
        mut tried: Vec<StepResult>,
        now: Time,
    ) {
        tried.retain(|one| desired.is_same_request(current, &one.instance));
        self.backoff.record_results(plan, &tried, now, &mut fastrand::f64);
        self.schedule(now);
    }

    /// Suspends an instance whose rollout failed and was rolled back.
    pub fn suspend_rolled_back(&mut self, key: &InstanceKey) {
        // Readers without credentials see this text: the output of a probe is in the event and in the history.
        let why = "rollout failed and was rolled back: suspended until its manifest changes";
        self.backoff.suspend(key, HoldReason::RolledBack, why);
    }

    /// Publishes suspended instances. After a failed write, the next pass tries again.
    pub async fn store_suspended<T: Target>(&mut self, context: PassContext<'_, T>, desired: &Desired) {
        let Some(stored) = &self.stored else { return };
        let all = self
            .backoff
            .suspended()
            .map(|(key, reason, why)| (key.clone(), Suspended::new(reason, why, desired.instances.get(key))));
        let now: SuspendedInstances = all.collect();
        if let Some(change) = suspended::diff(context.owner(), stored, &now)
            && context.state().txn(change).await.is_ok()
        {
            self.stored = Some(now);
        }
    }

    /// Loads the instances that were suspended before a restart, and still are.
    pub async fn restore_suspended<T: Target>(&mut self, context: PassContext<'_, T>, desired: &Desired) {
        if self.stored.is_some() {
            return;
        }
        let Ok(stored) = suspended::read(context.state(), context.owner()).await else { return };
        for (key, one) in stored.iter().filter(|(key, one)| one.still_applies(key, desired)) {
            self.backoff.suspend(key, one.reason(), &one.why);
        }
        self.stored = Some(stored);
    }

    /// Discards state that another leader may have changed.
    pub fn reset(&mut self) {
        self.stored = None;
    }
}
