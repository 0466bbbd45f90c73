//! Executor: runs work items. Independent components run concurrently.
//!
//! # Theory of operation
//!
//! A pass does not wait for its steps. It dispatches [`WorkItem`]s, each one component of a plan, and continues.
//! Passes skip an instance until a [`WorkEvent`] releases it ([`in_flight`](super::in_flight)). A work item runs
//! while the writer lease is held and `ends` is not set; after that, sent steps finish and no more are sent. A failed
//! rollout is rolled back within its work item.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::event::{ControllerEvent, EventSink};
use super::in_flight::has_barriers;
use super::{ControllerConfig, Target};
use crate::backend::ChangeOrigin;
use crate::clock;
use crate::contract::{HistoryEntry, OperationCounts};
use crate::engine::history::{self, RunEnd};
use crate::engine::rollback::{PreviousState, names_of, reasons_of};
use crate::engine::rollout_records;
use crate::execute::active_holds::{ActiveHolds, with_hold_refresh};
use crate::execute::{
    self, ExecutionContext, ExecutionEvent, ExecutionResult, ExecutionSettings, StepOutcome, StepResult,
};
use crate::model::{Desired, InstanceKey, ManifestRevision, Observed, Plan, ProcessKey};
use crate::store::lease::renew_until_lost;
use crate::store::{Lease, Store};

/// Time limit and interval of retries of the observation before a rollback.
const ROLLBACK_OBSERVE_TIMEOUT: Duration = Duration::from_secs(30);
const OBSERVE_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Maximum number of steps in flight per work item.
const MAX_PARALLEL: usize = 1000;

/// A component of a plan to execute.
pub struct WorkItem {
    pub number: u64,
    /// The id of its run.
    pub run: String,
    pub plan: Arc<Plan>,
    /// Instances whose operations repair drift.
    pub repairs: BTreeSet<InstanceKey>,
    pub desired: Arc<Desired>,
    pub observed: Arc<Observed>,
    pub revision: ManifestRevision,
    pub commit: Option<String>,
    /// See [`history::summary`].
    pub summary: OperationCounts,
    /// The writer lease.
    pub lease: Lease,
    /// Stops the item at the next safe point.
    pub ends: watch::Sender<bool>,
}

/// Progress of a work item.
pub enum WorkEvent {
    /// No more steps of this instance follow; the results of its steps.
    InstanceDone { item: u64, instance: InstanceKey, tried: Vec<StepResult> },
    Finished {
        item: u64,
        tried: Vec<StepResult>,
        /// Processes that were rolled back, each with the reason.
        put_back: BTreeMap<ProcessKey, String>,
    },
}

pub struct Executor<'a, T> {
    pub config: &'a ControllerConfig,
    pub target: &'a T,
    pub events: &'a EventSink<'a>,
    /// Stops all items at the next safe point.
    pub halt: watch::Receiver<bool>,
    pub work_events: mpsc::UnboundedSender<WorkEvent>,
}

impl<T: Target> Executor<'_, T> {
    /// Runs until the queue is closed and all items have finished.
    pub async fn work(self, mut orders: mpsc::UnboundedReceiver<WorkItem>) {
        let (mut going, mut is_open) = (FuturesUnordered::new(), true);
        while is_open || !going.is_empty() {
            tokio::select! {
                item = orders.recv(), if is_open => match item {
                    Some(item) => going.push(self.execute_item(item)),
                    None => is_open = false,
                },
                Some(over) = going.next() => {
                    let _ = self.work_events.send(over);
                }
            }
        }
    }

    async fn execute_item(&self, item: WorkItem) -> WorkEvent {
        let (begin, state) = (Instant::now(), self.target.state());
        let WorkItem { plan, desired, observed, lease, ends, .. } = &item;
        self.events.emit(ControllerEvent::ExecutionStarted { steps: plan.steps().count() });
        let (hold_sender, active_holds) = watch::channel(ActiveHolds::default());
        let origin = ChangeOrigin {
            plan: None,
            revision: Some(item.revision.to_string()),
            commit: item.commit.clone(),
            break_glass: None,
            repairs: item.repairs.clone(),
        };
        let origin = Some(Arc::new(origin));
        let settings = self.execution_settings(item.run.clone(), origin, active_holds, ends.subscribe());
        let context = ExecutionContext::new(settings, desired, observed, plan);
        let mut tracker = InstanceTracker::of(plan);
        let mut each = |event: ExecutionEvent<'_>| {
            self.forward_event(plan, &event);
            tracker.record_event(&event);
            // Where specs are not read back, the next observation needs the ledger entry.
            if context.settings.caps.reads_specs || matches!(event, ExecutionEvent::Noted) {
                for (instance, ended) in std::mem::take(&mut tracker.ready) {
                    let tried = attempted(ended, &context);
                    let _ =
                        self.work_events.send(WorkEvent::InstanceDone { item: item.number, instance, tried });
                }
            }
        };
        let backend = self.target.backend();
        let executing = execute::execute(plan, backend, state, &context, &mut each);
        let rules = &self.config.rules;
        let working = async {
            let ExecutionResult { ended, to_roll_back } = executing.await;
            let put_back = match to_roll_back.is_empty() {
                true => BTreeMap::new(),
                false => self.roll_back(&item, &context, &ended, &to_roll_back).await,
            };
            let failed = ended.iter().filter(|ended| !ended.outcome.is_well()).count();
            let exit = match failed {
                0 => 0,
                // Everything is as before.
                _ if !to_roll_back.is_empty() && put_back.len() == to_roll_back.len() => 7,
                _ => 3,
            };
            let end = RunEnd { exit, converged: None, failed, steps: history::steps(&ended) };
            ((ended, put_back), end)
        };
        let working = with_hold_refresh(
            &hold_sender,
            || rollout_records::active_holds(self.target, rules, desired, plan),
            working,
        );
        let working = stop_on_lease_loss(state, lease, self.halt.clone(), ends, working);
        let (ended, put_back) = history::record_run(state, &rules.owner, history_entry(&item), working).await;
        self.events.emit(ControllerEvent::ExecutionFinished { ended: &ended, took: begin.elapsed() });
        let left: Vec<StepResult> =
            ended.into_iter().filter(|one| !tracker.is_reported(&one.instance)).collect();
        WorkEvent::Finished { item: item.number, tried: attempted(left, &context), put_back }
    }

    fn execution_settings(
        &self,
        run: String,
        origin: Option<Arc<ChangeOrigin>>,
        active_holds: watch::Receiver<ActiveHolds>,
        stop: watch::Receiver<bool>,
    ) -> ExecutionSettings {
        ExecutionSettings {
            owner: self.config.rules.owner.clone(),
            target: self.target.name().to_owned(),
            caps: self.config.rules.caps,
            run,
            deadline: Instant::now() + self.config.timeout,
            max_parallel: MAX_PARALLEL,
            check: self.config.check,
            active_holds,
            stop,
            origin,
        }
    }

    fn forward_event(&self, plan: &Plan, event: &ExecutionEvent<'_>) {
        match event {
            ExecutionEvent::Ended(ended) => {
                if let Some(step) = plan.steps().find(|step| step.id == ended.step) {
                    self.events.emit(ControllerEvent::StepFinished { step, ended });
                }
            }
            ExecutionEvent::Soaking { process, secs } => {
                self.events.emit(ControllerEvent::Soaking { process, secs: *secs })
            }
            ExecutionEvent::Wave { .. }
            | ExecutionEvent::Sent { .. }
            | ExecutionEvent::Waiting { .. }
            | ExecutionEvent::Noted => {}
        }
    }

    /// Rolls processes back. Returns those that succeeded.
    async fn roll_back(
        &self,
        item: &WorkItem,
        context: &ExecutionContext,
        ended: &[StepResult],
        processes: &BTreeMap<ProcessKey, String>,
    ) -> BTreeMap<ProcessKey, String> {
        let (WorkItem { plan, desired, .. }, caps) = (item, &self.config.rules.caps);
        let previous = PreviousState::of(desired, &context.before, (plan, ended), processes, caps);
        let (back, names) = (&previous.desired, &names_of(processes));
        let begin = Instant::now();
        let mut observed = loop {
            match self.target.observe(back, false).await {
                Ok(world) => break world.observed,
                Err(why) if begin.elapsed() > ROLLBACK_OBSERVE_TIMEOUT || *context.settings.stop.borrow() => {
                    let why = format!("{names}: rollout failed and cannot be rolled back: {why}");
                    self.events.emit(ControllerEvent::Failure { why: &why });
                    return BTreeMap::new();
                }
                Err(_) => tokio::time::sleep(OBSERVE_RETRY_INTERVAL).await,
            }
        };
        let now = clock::at(self.target.now(), back);
        let plan = previous.plan(&mut observed, &self.config.rules, &now);
        let (why, steps) = (&reasons_of(processes), plan.steps().count());
        self.events.emit(ControllerEvent::RolledBack { processes: names, why, steps });
        let ExecutionSettings { run, active_holds, stop, origin, .. } = &context.settings;
        let (run, origin) = (format!("{run}-back"), origin.clone());
        let settings = self.execution_settings(run, origin, active_holds.clone(), stop.clone());
        let again = ExecutionContext::new(settings, back, &observed, &plan).rollback();
        let (backend, state) = (self.target.backend(), self.target.state());
        let mut each = |event: ExecutionEvent<'_>| self.forward_event(&plan, &event);
        let done = execute::execute(&plan, backend, state, &again, &mut each).await;
        let bad = done.ended.iter().filter(|one| !one.outcome.is_well()).map(|one| &one.instance);
        let bad = bad.chain(plan.held.iter().map(|held| &held.instance)).chain(&previous.lost);
        let bad: BTreeSet<&ProcessKey> =
            bad.filter_map(|key| desired.instances.get(key)).map(|want| &want.origin.declared).collect();
        let restored = processes.iter().filter(|(process, _)| !bad.contains(process));
        restored.map(|(process, why)| (process.clone(), why.clone())).collect()
    }
}

/// The history entry at the start of an item.
fn history_entry(item: &WorkItem) -> HistoryEntry {
    HistoryEntry {
        revision: item.revision.to_string(),
        source: "watch".to_owned(),
        summary: item.summary.clone(),
        steps: history::planned_steps(&item.plan),
        commit: item.commit.clone(),
        ..HistoryEntry::default()
    }
}

/// Results that count for backoff: a step that was skipped because of a stop or a hold has not failed.
fn attempted(ended: Vec<StepResult>, context: &ExecutionContext) -> Vec<StepResult> {
    let is_held = |one: &StepResult| {
        context.settings.active_holds.borrow().hold_reason(&one.instance, None, false).is_some()
    };
    let is_left_alone = |one: &StepResult| is_held(one) || context.aborted(&one.instance).is_some();
    let tried = |one: &StepResult| {
        one.outcome != StepOutcome::Skipped || !(*context.settings.stop.borrow() || is_left_alone(one))
    };
    ended.into_iter().filter(tried).collect()
}

/// Instances with remaining steps, where an instance is released with its own last step.
struct InstanceTracker {
    left: BTreeMap<InstanceKey, (usize, Vec<StepResult>)>,
    /// Instances without remaining steps that are not reported yet.
    ready: BTreeMap<InstanceKey, Vec<StepResult>>,
    waits: bool,
}

impl InstanceTracker {
    fn of(plan: &Plan) -> InstanceTracker {
        let mut left: BTreeMap<InstanceKey, (usize, Vec<StepResult>)> = BTreeMap::new();
        for step in plan.steps() {
            left.entry(step.instance.clone()).or_default().0 += 1;
        }
        InstanceTracker { left, ready: BTreeMap::new(), waits: has_barriers(plan) }
    }

    fn record_event(&mut self, event: &ExecutionEvent<'_>) {
        let ExecutionEvent::Ended(ended) = event else { return };
        let Some((left, all)) = self.left.get_mut(&ended.instance).filter(|_| !self.waits) else { return };
        all.push((*ended).clone());
        *left = left.saturating_sub(1);
        // A step with an unknown outcome may still take effect: its instance is released after recovery, at the end
        // of the run.
        let is_known =
            |one: &StepResult| !matches!(one.outcome, StepOutcome::Unknown | StepOutcome::TimedOut);
        if *left == 0
            && all.iter().all(is_known)
            && let Some((instance, (_, all))) = self.left.remove_entry(&ended.instance)
        {
            self.ready.insert(instance, all);
        }
    }

    fn is_reported(&self, instance: &InstanceKey) -> bool {
        !self.left.contains_key(instance) && !self.ready.contains_key(instance)
    }
}

/// Runs `work`, and stops it at a safe point when `stop` is set or the lease is lost.
pub async fn stop_on_lease_loss<S: Store, T>(
    state: &S,
    lease: &Lease,
    mut halt: watch::Receiver<bool>,
    ends: &watch::Sender<bool>,
    work: impl Future<Output = T>,
) -> T {
    let halted = async {
        let _ = halt.wait_for(|halt| *halt).await;
    };
    let lost = renew_until_lost(state, lease);
    tokio::pin!(work, halted, lost);
    let (mut is_halted, mut is_lost) = (false, false);
    loop {
        tokio::select! {
            done = &mut work => return done,
            () = &mut halted, if !is_halted => is_halted = true,
            _ = &mut lost, if !is_lost => is_lost = true,
        }
        ends.send_replace(true);
    }
}

/// Renews a lease while `work` runs.
pub async fn with_lease_renewal<S: Store, T>(state: &S, lease: &Lease, work: impl Future<Output = T>) -> T {
    tokio::select! {
        done = work => done,
        never = async { renew_until_lost(state, lease).await; std::future::pending::<Infallible>().await } => match never {},
    }
}
