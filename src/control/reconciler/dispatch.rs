//! Dispatch of a plan to the executor: under the writer lease, and only if the plan is still current.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::watch;

use super::Reconciler;
use super::context::PassError;
use crate::control::executor::{WorkEvent, WorkItem};
use crate::control::in_flight::InFlightPlan;
use crate::control::{PassResult, Target};
use crate::engine::history;
use crate::execute::{self, Dependencies, StepResult, new_run_id};
use crate::model::{Plan, ProcessKey};
use crate::store::Lease;

/// Whether a plan may be dispatched.
enum Admission {
    Granted(Lease),
    Retry,
    Denied,
}

/// Events of work items: results per item, and items that finished with their rolled-back processes.
#[derive(Default)]
struct WorkReport {
    released: BTreeMap<u64, Vec<StepResult>>,
    finished: Vec<(u64, Vec<StepResult>, BTreeMap<ProcessKey, String>)>,
}

impl<T: Target> Reconciler<'_, T> {
    /// Dispatches a plan. Returns whether the next pass is due at once.
    pub(super) async fn dispatch(&mut self, result: &PassResult) -> bool {
        let admission = self.check_admission().await.unwrap_or_else(|error| {
            self.context.report_failure(&error);
            Admission::Denied
        });
        let Admission::Granted(lease) = admission else {
            self.release_writer().await;
            return matches!(admission, Admission::Retry);
        };
        let PassResult { plan, desired, .. } = result;
        self.drift.mark_dispatched(self.context, &self.current.revision, plan, desired).await;
        self.recovery.expect();
        for component in execute::split(plan, &Dependencies::of(desired, plan)) {
            self.send(component, result, &lease);
        }
        false
    }

    /// Queues a component of a plan. Passes skip its instances from here on.
    fn send(&mut self, component: Plan, result: &PassResult, lease: &Lease) {
        let summary = history::summary(&component, &result.plan.held);
        let (plan, ends) = (Arc::new(component), watch::channel(false).0);
        let item = WorkItem {
            number: self.writer.next_number(),
            run: new_run_id(),
            repairs: self.repairs.of(&plan, &result.desired),
            plan: Arc::clone(&plan),
            desired: Arc::clone(&result.desired),
            observed: Arc::clone(&result.observed),
            revision: self.current.revision.clone(),
            commit: self.current.commit.clone(),
            summary,
            lease: lease.clone(),
            ends: ends.clone(),
        };
        let in_flight = InFlightPlan::new(item.run.clone(), plan, Arc::clone(&result.desired), ends);
        self.observed_cache.expect_changes(in_flight.instances().cloned());
        self.in_flight.add(item.number, in_flight);
        self.writer.send(item);
    }

    /// Acquires the writer lease and checks that the plan is still current.
    async fn check_admission(&mut self) -> Result<Admission, PassError> {
        let context = self.context;
        // Both are durable writes, which the store commits together.
        let leading = self.writer.is_leading(context);
        let (lease, is_leading) = tokio::join!(self.writer.acquire(context), leading);
        // An `apply` holds the lease: the plan may change after it.
        let Some(lease) = lease? else { return Ok(Admission::Denied) };
        // A revision was pinned, or a pin ended, since this was planned.
        if !self.resolver.is_pin_current(context).await.unwrap_or(false) {
            return Ok(Admission::Denied);
        }
        if !is_leading {
            return Ok(Admission::Denied);
        }
        // If another writer was active since our last write, its changes are observed first.
        if !self.writer.begin_generation(lease.generation) {
            return Ok(Admission::Retry);
        }
        context.target.set_generation(lease.generation);
        let left = self.recovery.unfinished_calls(context, &self.in_flight).await?;
        if left.is_empty() {
            return Ok(Admission::Granted(lease));
        }
        // Recovered calls may have changed the observed state: then the next pass observes again.
        self.recovery.resolve(context, left, &lease).await?;
        Ok(Admission::Retry)
    }

    /// Resolves calls of crashed runs before the target is observed, if they come first.
    pub(super) async fn recover_first(&mut self) -> Result<(), PassError> {
        let context = self.context;
        if !self.recovery.comes_first(&context.config.rules.caps) {
            return Ok(());
        }
        let left = self.recovery.unfinished_calls(context, &self.in_flight).await?;
        if left.is_empty() {
            self.recovery.set_resolved();
            return Ok(());
        }
        self.recovery.postpone();
        // The calls of another lease holder are not unfinished.
        let Some(lease) = self.writer.acquire(context).await? else { return Ok(()) };
        context.target.set_generation(lease.generation);
        self.writer.begin_generation(lease.generation);
        let resolved = self.recovery.resolve(context, left, &lease).await;
        self.release_writer().await;
        Ok(resolved?)
    }

    /// Releases the writer lease when nothing is in flight.
    pub(super) async fn release_writer(&mut self) {
        self.writer.release_when(self.context, self.in_flight.is_empty()).await;
    }

    /// Handles events of work items. Returns whether one has finished.
    pub async fn handle_work_events(&mut self, events: Vec<WorkEvent>) -> bool {
        let has_finished = self.record_work_events(events);
        self.release_writer().await;
        has_finished
    }

    fn record_work_events(&mut self, events: Vec<WorkEvent>) -> bool {
        // One work item may release many instances at once.
        let mut report = WorkReport::default();
        for event in events {
            match event {
                WorkEvent::InstanceDone { item, instance, tried } => {
                    self.in_flight.release(item, &instance);
                    report.released.entry(item).or_default().extend(tried);
                }
                WorkEvent::Finished { item, tried, put_back } => {
                    report.finished.push((item, tried, put_back));
                }
            }
        }
        for (item, tried) in report.released {
            if let Some((plan, desired)) = self.in_flight.get(item).map(InFlightPlan::plan_and_desired) {
                self.retries.record_results(&plan, &desired, &self.current.desired, tried, self.now());
            }
        }
        let has_finished = !report.finished.is_empty();
        for (item, tried, put_back) in report.finished {
            self.record_finished(item, tried, &put_back);
        }
        has_finished
    }

    fn record_finished(
        &mut self,
        item: u64,
        tried: Vec<StepResult>,
        put_back: &BTreeMap<ProcessKey, String>,
    ) {
        if let Some((plan, desired)) =
            self.in_flight.finish(item).as_ref().map(InFlightPlan::plan_and_desired)
        {
            let current = &self.current.desired;
            self.retries.record_results(&plan, &desired, current, tried, self.context.target.now());
            for (key, want) in &desired.instances {
                if put_back.contains_key(&want.origin.declared) && desired.is_same_request(current, key) {
                    self.retries.suspend_rolled_back(key);
                }
            }
        }
        // Unfinished calls of the work item are in the journal.
        self.recovery.expect();
    }
}
