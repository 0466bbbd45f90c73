//! Dispatch of a plan to the executor: under the writer lease, and only if the plan is still current.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::super::event::ControllerEvent;
use super::super::executor::{WorkEvent, WorkItem, with_lease_renewal};
use super::super::in_flight::InFlightPlan;
use super::super::{PassResult, Target, history};
use super::Reconciler;
use crate::clock;
use crate::execute::journal::{self, Call};
use crate::execute::{self, Dependencies, RecoveryError, StepResult, new_run_id};
use crate::ids;
use crate::model::{Desired, HoldReason, Plan};
use crate::store::lease::LEASE_TTL;
use crate::store::{Error, Holder, Lease, LeaseAttempt, Store, keys};

/// Time that a pass spends on calls of crashed runs, the minimum per call, and the delay before the next attempt.
const RECOVERY_BUDGET: Duration = Duration::from_secs(3);
const MIN_RECOVERY_TIME: Duration = Duration::from_millis(200);
const RECOVERY_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Whether a plan may be dispatched.
enum Admission {
    Granted(Lease),
    Retry,
    Denied,
}

impl<T: Target> Reconciler<'_, T> {
    /// Dispatches a plan. Returns whether the next pass is due at once.
    pub(super) async fn dispatch(&mut self, result: &PassResult) -> bool {
        let lease = match self.check_admission().await {
            Admission::Granted(lease) => lease,
            denied => {
                self.release_writer_lease().await;
                return matches!(denied, Admission::Retry);
            }
        };
        let PassResult { plan, desired, observed, .. } = result;
        self.mark_dispatched(plan, desired).await;
        self.needs_recovery = true;
        for component in execute::split(plan, &Dependencies::of(desired, plan)) {
            self.last += 1;
            let (number, run, ends) = (self.last, new_run_id(), watch::channel(false).0);
            let summary = history::summary(&component, &plan.held);
            let plan = Arc::new(component);
            let in_flight =
                InFlightPlan::new(run.clone(), Arc::clone(&plan), Arc::clone(desired), ends.clone());
            self.observed_cache.expect_changes(in_flight.instances().cloned());
            self.in_flight.add(number, in_flight);
            let (desired, observed, lease) = (Arc::clone(desired), Arc::clone(observed), lease.clone());
            let (revision, commit) = (self.revision.clone(), self.commit.clone());
            let item =
                WorkItem { number, run, plan, desired, observed, revision, commit, summary, lease, ends };
            // The executor outlives this sender.
            let _ = self.work_items.send(item);
        }
        false
    }

    /// Acquires the writer lease and checks that the plan is still current.
    async fn check_admission(&mut self) -> Admission {
        let (state, owner) = (self.target.state(), &self.config.rules.owner);
        let lease = match self.writer_lease().await {
            Ok(Some(lease)) => lease,
            // An `apply` holds the lease: the plan may change after it.
            Ok(None) => return Admission::Denied,
            Err(error) => return self.report_error(&error.to_string(), Admission::Denied),
        };
        // A revision was pinned, or a pin ended, since this was planned.
        if !self.pin_override.is_current(state, owner).await.unwrap_or(false) {
            return Admission::Denied;
        }
        // After a long suspension another controller may lead.
        if let Some(leader) = &self.leader
            && !state.renew_lease(leader, LEASE_TTL).await.unwrap_or(false)
        {
            return Admission::Denied;
        }
        // If another writer was active since our last write, its changes are observed first.
        let last = self.last_generation.replace(lease.generation);
        if !last.is_some_and(|last| last == lease.generation || last.checked_add(1) == Some(lease.generation))
        {
            return Admission::Retry;
        }
        self.target.set_generation(lease.generation);
        // Recovered calls may have changed the observed state: then the next pass observes again.
        match self.unfinished_calls().await {
            Ok(left) if left.is_empty() => Admission::Granted(lease),
            Ok(left) => match self.recover_calls(left, &lease).await {
                Ok(()) => Admission::Retry,
                Err(why) => self.report_error(&why, Admission::Denied),
            },
            Err(error) => self.report_error(&error.to_string(), Admission::Denied),
        }
    }

    /// The writer lease: the current one while work is in flight, otherwise a new one.
    async fn writer_lease(&mut self) -> Result<Option<Lease>, Error> {
        let state = self.target.state();
        if let Some(lease) = &self.writer
            && state.renew_lease(lease, LEASE_TTL).await?
        {
            return Ok(Some(lease.clone()));
        }
        let holder = Holder::this(ids::holder_id("watch", clock::now()));
        let name = keys::writer_lease_name(&self.config.rules.owner);
        self.writer = match state.take_lease(&name, &holder, LEASE_TTL).await? {
            LeaseAttempt::Ours(lease) => Some(lease),
            LeaseAttempt::Theirs { .. } => None,
        };
        Ok(self.writer.clone())
    }

    /// Releases the writer lease when nothing is in flight.
    pub(super) async fn release_writer_lease(&mut self) {
        if let Some(lease) = self.writer.take_if(|_| self.in_flight.is_empty()) {
            let _ = self.target.state().release_lease(&lease).await;
        }
    }

    /// Calls that crashed runs left in the journal, without those that were in flight at the last attempt.
    async fn unfinished_calls(&self) -> Result<Vec<(String, Call)>, Error> {
        let owner = &self.config.rules.owner;
        let mut left = journal::unfinished(self.target.state(), owner).await?;
        left.retain(|(key, _)| {
            let lives = self.in_flight.run_ids().any(|run| journal::is_of(key, owner, run));
            !lives && (self.is_recovery_due() || !self.open.contains_key(key))
        });
        Ok(left)
    }

    /// Resolves calls of crashed runs. Their instances are held while a call takes longer, so that nothing else waits
    /// for it.
    async fn recover_calls(&mut self, left: Vec<(String, Call)>, lease: &Lease) -> Result<(), String> {
        let (state, owner) = (self.target.state(), &self.config.rules.owner);
        let target_caps = (self.target.name(), &self.config.rules.caps);
        let until = Instant::now() + RECOVERY_BUDGET;
        let mut open = BTreeMap::new();
        for (key, call) in left {
            let instances = call.steps.iter().map(|began| began.instance.clone()).collect();
            // A slow call does not use up the time of the others.
            let deadline = until.max(Instant::now() + MIN_RECOVERY_TIME);
            let one = vec![(key.clone(), call)];
            let recovering =
                execute::recover(self.target.backend(), state, target_caps, owner, one, deadline);
            match with_lease_renewal(state, lease, recovering).await {
                Ok(()) => {}
                Err(RecoveryError::UnderWay(_)) => drop(open.insert(key, instances)),
                Err(why @ (RecoveryError::Target(_) | RecoveryError::State(_))) => {
                    return Err(why.to_string());
                }
            }
        }
        self.open_until = (!open.is_empty()).then(|| Instant::now() + RECOVERY_RETRY_INTERVAL);
        self.open = open;
        Ok(())
    }

    /// Whether calls that were in flight are due for another poll.
    pub(super) fn is_recovery_due(&self) -> bool {
        self.open_until.is_some_and(|then| then <= Instant::now())
    }

    /// Resolves calls of crashed runs before planning: where specs are not read back, an observation alone takes a
    /// sent spec for the effective one. `false`: not resolved yet.
    pub(super) async fn recover_first(&mut self) -> bool {
        let left = match self.unfinished_calls().await {
            Ok(left) if left.is_empty() => {
                if self.is_recovery_due() {
                    // Another controller resolved them.
                    (self.open, self.open_until) = (BTreeMap::new(), None);
                }
                self.needs_recovery = false;
                return true;
            }
            Ok(left) => left,
            Err(error) => return self.report_error(&error.to_string(), false),
        };
        // Whatever the result, the next attempt waits for its interval.
        self.open_until = self.open_until.map(|_| Instant::now() + RECOVERY_RETRY_INTERVAL);
        let lease = match self.writer_lease().await {
            Ok(Some(lease)) => lease,
            // The lease holder's own calls are not unfinished.
            Ok(None) => return true,
            Err(error) => return self.report_error(&error.to_string(), false),
        };
        self.target.set_generation(lease.generation);
        self.last_generation = Some(lease.generation);
        let recovered = self.recover_calls(left, &lease).await;
        self.release_writer_lease().await;
        match recovered {
            Ok(()) => true,
            Err(why) => self.report_error(&why, false),
        }
    }

    /// Handles events of work items. Returns whether one has finished.
    pub async fn handle_work_events(&mut self, events: Vec<WorkEvent>) -> bool {
        // One work item may release many instances at once.
        let (mut released, mut finished): (BTreeMap<u64, Vec<StepResult>>, Vec<_>) = Default::default();
        for event in events {
            match event {
                WorkEvent::InstanceDone { item, instance, tried } => {
                    self.in_flight.release(item, &instance);
                    released.entry(item).or_default().extend(tried);
                }
                WorkEvent::Finished { item, tried, put_back } => finished.push((item, tried, put_back)),
            }
        }
        for (item, tried) in released {
            if let Some((plan, desired)) = self.in_flight.get(item).map(InFlightPlan::plan_and_desired) {
                self.record_results(&plan, &desired, tried);
            }
        }
        let has_finished = !finished.is_empty();
        for (item, tried, put_back) in finished {
            let in_flight = self.in_flight.finish(item);
            if let Some((plan, desired)) = in_flight.as_ref().map(InFlightPlan::plan_and_desired) {
                self.record_results(&plan, &desired, tried);
                let put_back = desired.instances.iter().filter(|(key, want)| {
                    put_back.contains(&want.origin.declared) && desired.is_same_request(&self.desired, key)
                });
                for (key, _) in put_back {
                    let why = "rollout failed and was rolled back: suspended until its manifest changes";
                    self.backoff.suspend(key, HoldReason::RolledBack, why);
                }
            }
            // Unfinished calls of the work item are in the journal.
            self.needs_recovery = true;
        }
        self.release_writer_lease().await;
        has_finished
    }

    /// Results count only for instances whose declaration is unchanged.
    fn record_results(&mut self, plan: &Plan, desired: &Desired, mut tried: Vec<StepResult>) {
        tried.retain(|one| desired.is_same_request(&self.desired, &one.instance));
        self.backoff.record_results(plan, &tried, self.target.now(), &mut fastrand::f64);
        self.due = self.backoff.next_retry(self.target.now());
    }

    pub(super) fn report_and_abort<W>(&mut self, why: &str) -> Option<W> {
        self.events.emit(ControllerEvent::Failure { why });
        None
    }

    pub(super) fn report_error<W>(&mut self, why: &str, value: W) -> W {
        self.events.emit(ControllerEvent::Failure { why });
        value
    }
}
