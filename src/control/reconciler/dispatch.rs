//! A plan is handed over to be carried out: under the writer's lease, and only if it is still ours to do.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::super::event::ControllerEvent;
use super::super::executor::{WorkEvent, WorkItem, with_lease_renewal};
use super::super::in_flight::InFlightPlan;
use super::super::{PassResult, Target, execution_context, history, new_run_id};
use super::Reconciler;
use crate::clock;
use crate::execute::journal::{self, Call};
use crate::execute::{self, RecoveryError, StepResult};
use crate::model::{Desired, HoldReason, Plan};
use crate::store::keeping::LEASE_TTL;
use crate::store::{Error, Holder, Lease, LeaseAttempt, Store};

/// How long a pass waits for what runs that died had begun, for each of it at least, and how soon it asks again.
const RECOVERY_BUDGET: Duration = Duration::from_secs(3);
const MIN_RECOVERY_TIME: Duration = Duration::from_millis(200);
const RECOVERY_RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// What came of it.
enum Admission {
    Granted(Lease),
    Retry,
    Denied,
}

impl<T: Target> Reconciler<'_, T> {
    /// Is it to be looked at again at once?
    pub(super) async fn dispatch(&mut self, look: &PassResult) -> bool {
        let lease = match self.check_admission().await {
            Admission::Granted(lease) => lease,
            may => {
                self.release_writer_lease().await;
                return matches!(may, Admission::Retry);
            }
        };
        let PassResult { plan, desired, observed, .. } = look;
        self.mark_dispatched(plan, desired).await;
        self.unsettled = true;
        let (_, never) = watch::channel(false);
        for part in execute::split(plan, &execution_context(desired, observed, plan, never)) {
            self.last += 1;
            let (number, run, ends) = (self.last, new_run_id(), watch::channel(false).0);
            let summary = history::summary(&part, &plan.held);
            let plan = Arc::new(part);
            let going = InFlightPlan::new(run.clone(), Arc::clone(&plan), Arc::clone(desired), ends.clone());
            self.observed_cache.expect_changes(going.instances().cloned());
            self.in_flight.add(number, going);
            let (desired, observed, lease) = (Arc::clone(desired), Arc::clone(observed), lease.clone());
            let (revision, commit) = (self.revision.clone(), self.commit.clone());
            let order =
                WorkItem { number, run, plan, desired, observed, revision, commit, summary, lease, ends };
            // Whoever takes them is there for as long as this is.
            let _ = self.orders.send(order);
        }
        false
    }

    /// With the writer's lease in hand: is what was planned still ours to do?
    async fn check_admission(&mut self) -> Admission {
        let (state, owner) = (self.target.state(), &self.config.rules.owner);
        let lease = match self.writer_lease().await {
            Ok(Some(lease)) => lease,
            // Somebody is applying: then there may be something else to do afterwards.
            Ok(None) => return Admission::Denied,
            Err(error) => return self.report_error(&error.to_string(), Admission::Denied),
        };
        // Somebody pinned a revision, or ended a pin, since this was planned.
        if !self.pin_override.is_current(state, owner).await.unwrap_or(false) {
            return Admission::Denied;
        }
        // Whoever slept for long may have been replaced.
        if let Some(leader) = &self.leader
            && !state.renew_lease(leader, LEASE_TTL).await.unwrap_or(false)
        {
            return Admission::Denied;
        }
        // If somebody else wrote since we last did, perhaps after our look, what he did is looked at first.
        let last = self.wrote.replace(lease.generation);
        if !last.is_some_and(|last| last == lease.generation || last.checked_add(1) == Some(lease.generation))
        {
            return Admission::Retry;
        }
        self.target.set_generation(lease.generation);
        // What a run that died had begun may have changed what was looked at: then it is looked at again.
        match self.unfinished_calls().await {
            Ok(left) if left.is_empty() => Admission::Granted(lease),
            Ok(left) => match self.recover_calls(left, &lease).await {
                Ok(()) => Admission::Retry,
                Err(why) => self.report_error(&why, Admission::Denied),
            },
            Err(error) => self.report_error(&error.to_string(), Admission::Denied),
        }
    }

    /// The writer's lease: the one that we have, as long as something is under way, else a new one.
    async fn writer_lease(&mut self) -> Result<Option<Lease>, Error> {
        let state = self.target.state();
        if let Some(lease) = &self.writer
            && state.renew_lease(lease, LEASE_TTL).await?
        {
            return Ok(Some(lease.clone()));
        }
        let holder = Holder::this(format!("watch-{}-{}", std::process::id(), clock::now().0));
        let place = format!("writer/{}", self.config.rules.owner);
        self.writer = match state.take_lease(&place, &holder, LEASE_TTL).await? {
            LeaseAttempt::Ours(lease) => Some(lease),
            LeaseAttempt::Theirs { .. } => None,
        };
        Ok(self.writer.clone())
    }

    /// If nothing is under way, others may write.
    pub(super) async fn release_writer_lease(&mut self) {
        if let Some(lease) = self.writer.take_if(|_| self.in_flight.is_empty()) {
            let _ = self.target.state().release_lease(&lease).await;
        }
    }

    /// What runs that died left in the journal. What was still under way a moment ago is not asked about again.
    async fn unfinished_calls(&self) -> Result<Vec<(String, Call)>, Error> {
        let owner = &self.config.rules.owner;
        let mut left = journal::unfinished(self.target.state(), owner).await?;
        left.retain(|(key, _)| {
            let lives = self.in_flight.run_ids().any(|run| journal::is_of(key, owner, run));
            !lives && (self.is_recovery_due() || !self.open.contains_key(key))
        });
        Ok(left)
    }

    /// Finds out what became of what was left. What takes longer than a moment is left alone meanwhile, so that nobody waits
    /// for it who has nothing to do with it.
    async fn recover_calls(&mut self, left: Vec<(String, Call)>, lease: &Lease) -> Result<(), String> {
        let (state, owner) = (self.target.state(), &self.config.rules.owner);
        let whom = (self.target.name(), &self.config.rules.caps);
        let until = Instant::now() + RECOVERY_BUDGET;
        let mut open = BTreeMap::new();
        for (key, call) in left {
            let instances = call.steps.iter().map(|began| began.instance.clone()).collect();
            // One that takes long does not take the time of the others.
            let deadline = until.max(Instant::now() + MIN_RECOVERY_TIME);
            let one = vec![(key.clone(), call)];
            let settling = execute::recover(self.target.backend(), state, whom, owner, one, deadline);
            match with_lease_renewal(state, lease, settling).await {
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

    /// Is it time to ask again about what was still under way?
    pub(super) fn is_recovery_due(&self) -> bool {
        self.open_until.is_some_and(|then| then <= Instant::now())
    }

    /// What a run that died had begun is found out before anything is planned on: where specs are not read back, a look
    /// alone takes what it gave for what is in effect. `false`: that is not known yet.
    pub(super) async fn recover_first(&mut self) -> bool {
        let left = match self.unfinished_calls().await {
            Ok(left) if left.is_empty() => {
                if self.is_recovery_due() {
                    // Somebody else found out.
                    (self.open, self.open_until) = (BTreeMap::new(), None);
                }
                self.unsettled = false;
                return true;
            }
            Ok(left) => left,
            Err(error) => return self.report_error(&error.to_string(), false),
        };
        // Whatever comes of it, it is not asked about again at once.
        self.open_until = self.open_until.map(|_| Instant::now() + RECOVERY_RETRY_INTERVAL);
        let lease = match self.writer_lease().await {
            Ok(Some(lease)) => lease,
            // It is their own, and not left.
            Ok(None) => return true,
            Err(error) => return self.report_error(&error.to_string(), false),
        };
        self.target.set_generation(lease.generation);
        self.wrote = Some(lease.generation);
        let settled = self.recover_calls(left, &lease).await;
        self.release_writer_lease().await;
        match settled {
            Ok(()) => true,
            Err(why) => self.report_error(&why, false),
        }
    }

    /// Takes in what became of orders. Is one of them over?
    pub async fn handle_work_events(&mut self, reports: Vec<WorkEvent>) -> bool {
        // Of one order many may be free at once.
        let (mut free, mut over): (BTreeMap<u64, Vec<StepResult>>, Vec<_>) = Default::default();
        for report in reports {
            match report {
                WorkEvent::InstanceDone { order, instance, tried } => {
                    self.in_flight.release(order, &instance);
                    free.entry(order).or_default().extend(tried);
                }
                WorkEvent::Finished { order, tried, put_back } => over.push((order, tried, put_back)),
            }
        }
        for (order, tried) in free {
            if let Some((plan, desired)) = self.in_flight.get(order).map(InFlightPlan::plan_and_desired) {
                self.record_results(&plan, &desired, tried);
            }
        }
        let is_over = !over.is_empty();
        for (order, tried, put_back) in over {
            let going = self.in_flight.finish(order);
            if let Some((plan, desired)) = going.as_ref().map(InFlightPlan::plan_and_desired) {
                self.record_results(&plan, &desired, tried);
                let put_back = desired.instances.iter().filter(|(key, want)| {
                    put_back.contains(&want.origin.declared) && desired.is_same_request(&self.desired, key)
                });
                for (key, _) in put_back {
                    let why = "its rollout failed, and it was put back as it was: left alone until its manifest changes";
                    self.backoff.suspend(key, HoldReason::RolledBack, why);
                }
            }
            // What it did not see the end of is in the journal.
            self.unsettled = true;
        }
        self.release_writer_lease().await;
        is_over
    }

    /// Of what is asked for as it was then, how it ended counts.
    fn record_results(&mut self, plan: &Plan, desired: &Desired, mut tried: Vec<StepResult>) {
        tried.retain(|one| desired.is_same_request(&self.desired, &one.instance));
        self.backoff.record_results(plan, &tried, self.target.now(), &mut fastrand::f64);
        self.due = self.backoff.next_retry(self.target.now());
    }

    pub(super) fn report_and_abort<W>(&mut self, why: &str) -> Option<W> {
        self.events.emit(ControllerEvent::Failure { why });
        None
    }

    pub(super) fn report_error<W>(&mut self, why: &str, so: W) -> W {
        self.events.emit(ControllerEvent::Failure { why });
        so
    }
}
