//! Who carries plans out: several at once, so that what has nothing to do with each other does not wait for each other.
//!
//! # Theory of operation
//! A pass does not wait for what it begins. It hands over [`Order`]s, each a part of a plan that hangs together, and goes on
//! looking; until a [`Report`] says that an instance is free, passes leave it alone ([`under_way`](super::under_way)). An
//! order goes on while the writer's lease is kept and nobody wants it to end; what was sent then comes to its end, and
//! nothing more is begun. A rollout that failed is put back within its order.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::event::{ControllerEvent, EventSink};
use super::in_flight::has_barriers;
use super::rollback::{plan_rollback, previous_desired};
use super::{ControllerConfig, Target, execution_context, history};
use crate::clock;
use crate::execute::active_holds::{ActiveHolds, with_hold_refresh};
use crate::execute::{self, ExecutionContext, ExecutionEvent, ExecutionResult, StepOutcome, StepResult};
use crate::model::{Desired, InstanceKey, Observed, Plan, ProcessKey};
use crate::store::keeping::renew_until_lost;
use crate::store::{Lease, Store};

/// How long a target may be out of sight before something is put back there, and how often it is looked for.
const ROLLBACK_OBSERVE_TIMEOUT: Duration = Duration::from_secs(30);
const OBSERVE_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// A part of a plan that is to be carried out.
pub struct WorkItem {
    pub number: u64,
    /// The name of its run.
    pub run: String,
    pub plan: Arc<Plan>,
    pub desired: Arc<Desired>,
    pub observed: Arc<Observed>,
    pub revision: String,
    pub commit: Option<String>,
    /// See [`history::summary`].
    pub summary: Value,
    /// The writer's.
    pub lease: Lease,
    /// It is to come to its end.
    pub ends: watch::Sender<bool>,
}

/// What became of an order.
pub enum WorkEvent {
    /// Nothing more is done to this one; how its steps ended.
    InstanceDone {
        order: u64,
        instance: InstanceKey,
        tried: Vec<StepResult>,
    },
    Finished {
        order: u64,
        tried: Vec<StepResult>,
        put_back: BTreeSet<ProcessKey>,
    },
}

pub struct Executor<'a, T> {
    pub config: &'a ControllerConfig,
    pub target: &'a T,
    pub events: &'a EventSink<'a>,
    /// Everything is to come to its end.
    pub halt: watch::Receiver<bool>,
    pub reports: mpsc::UnboundedSender<WorkEvent>,
}

impl<T: Target> Executor<'_, T> {
    /// Until nobody has orders any more, and all are over.
    pub async fn work(self, mut orders: mpsc::UnboundedReceiver<WorkItem>) {
        let (mut going, mut is_open) = (FuturesUnordered::new(), true);
        while is_open || !going.is_empty() {
            tokio::select! {
                order = orders.recv(), if is_open => match order {
                    Some(order) => going.push(self.execute_item(order)),
                    None => is_open = false,
                },
                Some(over) = going.next() => {
                    let _ = self.reports.send(over);
                }
            }
        }
    }

    async fn execute_item(&self, order: WorkItem) -> WorkEvent {
        let (begin, state) = (Instant::now(), self.target.state());
        let WorkItem { plan, desired, observed, lease, ends, .. } = &order;
        self.events.emit(ControllerEvent::ExecutionStarted { steps: plan.steps().count() });
        let (restrain, restraints) = watch::channel(ActiveHolds::default());
        let terms = ExecutionContext {
            run: order.run.clone(),
            restraints,
            ..self.execution_context(desired, observed, plan, ends.subscribe())
        };
        let mut free = InstanceTracker::of(plan);
        let mut each = |said: ExecutionEvent<'_>| {
            self.forward_event(plan, &said);
            free.record_event(&said);
            // Where specs are not read back, the next look needs to know what was noted of it.
            if terms.caps.reads_specs || matches!(said, ExecutionEvent::Noted) {
                for (instance, ended) in std::mem::take(&mut free.ready) {
                    let tried = attempted(ended, &terms);
                    let _ =
                        self.reports.send(WorkEvent::InstanceDone { order: order.number, instance, tried });
                }
            }
        };
        let backend = self.target.backend();
        let executing = execute::execute(plan, backend, state, &terms, &mut each);
        let rules = &self.config.rules;
        let working = async {
            let ExecutionResult { ended, to_roll_back } = executing.await;
            let put_back = match to_roll_back.is_empty() {
                true => BTreeSet::new(),
                false => self.roll_back(&order, &terms, &to_roll_back).await,
            };
            let failed = ended.iter().filter(|ended| !ended.outcome.is_well()).count();
            let exit = if failed == 0 { 0 } else { 3 };
            let end = json!({"exit": exit, "failed": failed, "steps": history::steps(&ended)});
            ((ended, put_back), end)
        };
        let working = with_hold_refresh(&restrain, rules, || self.target.active_holds(), working);
        let working = stop_on_lease_loss(state, lease, self.halt.clone(), ends, working);
        let (ended, put_back) =
            history::record_run(state, &rules.owner, history_entry(&order), working).await;
        self.events.emit(ControllerEvent::ExecutionFinished { ended: &ended, took: begin.elapsed() });
        let left: Vec<StepResult> =
            ended.into_iter().filter(|one| !free.is_reported(&one.instance)).collect();
        WorkEvent::Finished { order: order.number, tried: attempted(left, &terms), put_back }
    }

    fn execution_context(
        &self,
        desired: &Desired,
        observed: &Observed,
        plan: &Plan,
        stop: watch::Receiver<bool>,
    ) -> ExecutionContext {
        ExecutionContext {
            owner: self.config.rules.owner.clone(),
            target: self.target.name().to_owned(),
            caps: self.config.rules.caps,
            deadline: Instant::now() + self.config.timeout,
            check: self.config.check,
            ..execution_context(desired, observed, plan, stop)
        }
    }

    fn forward_event(&self, plan: &Plan, said: &ExecutionEvent<'_>) {
        match said {
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

    /// Puts processes back as they were. Those that are.
    async fn roll_back(
        &self,
        order: &WorkItem,
        terms: &ExecutionContext,
        processes: &BTreeSet<ProcessKey>,
    ) -> BTreeSet<ProcessKey> {
        let back = previous_desired(&order.desired, &terms.before, processes);
        let names: Vec<String> = processes.iter().map(ToString::to_string).collect();
        let names = &names.join(", ");
        let begin = Instant::now();
        let mut observed = loop {
            match self.target.observe(&back, false).await {
                Ok(world) => break world.observed,
                Err(why) if begin.elapsed() > ROLLBACK_OBSERVE_TIMEOUT || *terms.stop.borrow() => {
                    let why = format!("{names}: its rollout failed, and it is not put back: {why}");
                    self.events.emit(ControllerEvent::Failure { why: &why });
                    return BTreeSet::new();
                }
                Err(_) => tokio::time::sleep(OBSERVE_RETRY_INTERVAL).await,
            }
        };
        let now = clock::at(self.target.now(), &back);
        let plan = plan_rollback(&back, &mut observed, &self.config.rules, &now);
        self.events.emit(ControllerEvent::RolledBack { processes: names, steps: plan.steps().count() });
        let again = ExecutionContext {
            run: format!("{}-back", terms.run),
            restraints: terms.restraints.clone(),
            ..self.execution_context(&back, &observed, &plan, terms.stop.clone())
        };
        let (backend, state) = (self.target.backend(), self.target.state());
        let mut each = |said: ExecutionEvent<'_>| self.forward_event(&plan, &said);
        let done = execute::execute(&plan, backend, state, &again, &mut each).await;
        let bad = done.ended.iter().filter(|one| !one.outcome.is_well()).map(|one| &one.instance);
        let bad = bad.chain(plan.held.iter().map(|held| &held.instance));
        let bad: BTreeSet<&ProcessKey> =
            bad.filter_map(|key| back.instances.get(key)).map(|want| &want.origin.declared).collect();
        processes.iter().filter(|process| !bad.contains(process)).cloned().collect()
    }
}

/// What the history says of it from its beginning.
fn history_entry(order: &WorkItem) -> Value {
    let mut entry = json!({
        "revision": order.revision, "source": "watch", "summary": order.summary,
        "steps": history::planned_steps(&order.plan),
    });
    if let Some(commit) = &order.commit {
        entry["commit"] = commit.as_str().into();
    }
    entry
}

/// What was really tried: what was never begun, because somebody wanted that, has not failed.
fn attempted(ended: Vec<StepResult>, terms: &ExecutionContext) -> Vec<StepResult> {
    let is_left_alone =
        |one: &StepResult| terms.restraints.borrow().means(&one.instance, None, false).is_some();
    let tried = |one: &StepResult| {
        one.outcome != StepOutcome::Skipped || !(*terms.stop.borrow() || is_left_alone(one))
    };
    ended.into_iter().filter(tried).collect()
}

/// Which instances still have steps before them, where each is free with its own last step.
struct InstanceTracker {
    left: BTreeMap<InstanceKey, (usize, Vec<StepResult>)>,
    /// Nothing more is to be done to these, and nobody was told yet.
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

    fn record_event(&mut self, said: &ExecutionEvent<'_>) {
        let ExecutionEvent::Ended(ended) = said else { return };
        let Some((left, all)) = self.left.get_mut(&ended.instance).filter(|_| !self.waits) else { return };
        all.push((*ended).clone());
        *left = left.saturating_sub(1);
        // Of what nobody knows, more may come: it is free when the run is over, and what it left is found out first.
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

/// Does something that is to come to its end at a safe point when somebody wants that, or when the lease is lost.
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

/// Renews a lease while something goes on.
pub async fn with_lease_renewal<S: Store, T>(state: &S, lease: &Lease, work: impl Future<Output = T>) -> T {
    tokio::select! {
        done = work => done,
        never = async { renew_until_lost(state, lease).await; std::future::pending::<Infallible>().await } => match never {},
    }
}
