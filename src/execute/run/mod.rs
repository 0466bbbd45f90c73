//! Execution of one component: sends ready steps, polls tasks, and resolves lost replies.
//!
//! This module has the loop and the choice of ready steps. [`send`] submits calls, [`poll`] collects their results,
//! and [`record`] writes outcomes to the ledger.

mod poll;
mod record;
mod send;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::time::Instant;
use tracing::warn;

use super::context::HostsByName;
use super::journal::Journal;
use super::{
    ExecutionContext, ExecutionEvent, ExecutionResult, FINAL_WRITE_TIMEOUT, StepOutcome, StepResult, ledger,
};
use crate::backend::{Backend, RowState, Task};
use crate::model::{InstanceKey, ObservedInstance, Op, ProcessKey, Step, Wave};
use crate::store::{Error, Store};

/// Maximum number of steps in one batch.
const BATCH: usize = 1000;

/// State that the runs of one plan share.
pub(super) struct SharedRunState<'a, B, S> {
    pub(super) backend: &'a B,
    pub(super) store: &'a S,
    pub(super) terms: &'a ExecutionContext,
    /// Number of steps in flight in all runs of the plan.
    pub(super) in_flight: &'a AtomicUsize,
}

pub(super) struct Run<'a, B, S> {
    pub(super) backend: &'a B,
    store: &'a S,
    journal: Journal<'a, S>,
    pub(super) terms: &'a ExecutionContext,
    pub(super) on_event: &'a mut (dyn FnMut(ExecutionEvent<'_>) + Send),
    all_in_flight: &'a AtomicUsize,
    /// Number of steps in flight in this run.
    in_flight: usize,
    pub(super) outcomes: RunOutcomes,
    pub(super) rollouts: RolloutState,
    /// Since when the target has not replied.
    silent_since: Option<Instant>,
    /// State of the instances after the steps so far.
    pub(super) seen: BTreeMap<InstanceKey, ObservedInstance>,
    ledger: LedgerEntries,
}

/// The results of a run so far.
#[derive(Default)]
pub(super) struct RunOutcomes {
    pub(super) ended: Vec<StepResult>,
    /// Instances with a step that was sent.
    begun: BTreeSet<InstanceKey>,
    /// Instances with a step that did not succeed.
    pub(super) failed: BTreeSet<InstanceKey>,
    /// By declared name.
    pub(super) failures: HashMap<ProcessKey, u64>,
    /// Names of the failed instances.
    failed_names: HostsByName,
    /// Names of the instances whose start was skipped, or whose rollout was aborted before they were ready: processes that
    /// depend on them are skipped, too.
    pub(super) not_started: HostsByName,
}

/// The rollouts of a run.
#[derive(Default)]
pub(super) struct RolloutState {
    /// Processes whose rollout has ended.
    pub(super) given_up: BTreeSet<ProcessKey>,
    /// With the reason.
    pub(super) to_roll_back: BTreeMap<ProcessKey, String>,
    /// Rollouts that have started in this run.
    pub(super) soaked: BTreeSet<ProcessKey>,
}

/// Ledger entries, and those that are not written yet.
struct LedgerEntries {
    known: BTreeMap<InstanceKey, ledger::Entry>,
    notes: BTreeMap<InstanceKey, ledger::Entry>,
}

/// Message of a start that finds a process without an owner.
pub(super) const RUNS_ALREADY: &str = "process exists and was not started by Abide: it is not owned. `--adopt` (or `adopt: true`) \
     takes it over without a restart";
/// The same for a registration.
pub(super) const REGISTERED_ALREADY: &str = "registration exists and was not made by Abide: it is not owned. `--adopt` (or \
     `adopt: true`) takes it over";

/// A call in flight.
struct InFlightCall<'a> {
    /// `None`: the reply was lost, and the task is unknown.
    task: Option<Task>,
    /// Reason why there is no task, if a response was received.
    response: Option<String>,
    steps: HashMap<String, &'a Step>,
    begun: Instant,
    call: String,
}

impl InFlightCall<'_> {
    /// State of the reply, as the subject of a message.
    fn lost_reply(&self) -> &str {
        self.response.as_deref().unwrap_or("reply was lost")
    }
}

type Chains<'c, 's> = BTreeMap<&'c InstanceKey, VecDeque<&'s Step>>;

impl<'a, B: Backend, S: Store> Run<'a, B, S> {
    /// `nth`: index of the component.
    pub(super) async fn new(
        common: SharedRunState<'a, B, S>,
        nth: usize,
        on_event: &'a mut (dyn FnMut(ExecutionEvent<'_>) + Send),
    ) -> Result<Run<'a, B, S>, Error> {
        let SharedRunState { backend, store, terms, in_flight } = common;
        let name =
            if nth == 0 { terms.settings.run.clone() } else { format!("{}-{nth}", terms.settings.run) };
        // A ledger that cannot be read is not empty: without it, no step is sent.
        let known = ledger::read(store, &terms.settings.target).await?;
        Ok(Run {
            backend,
            store,
            journal: Journal::new(store, &terms.settings.owner, &name),
            terms,
            on_event,
            all_in_flight: in_flight,
            in_flight: 0,
            outcomes: RunOutcomes::default(),
            rollouts: RolloutState::default(),
            silent_since: None,
            seen: terms.before.clone(),
            ledger: LedgerEntries { known: known.entries, notes: BTreeMap::new() },
        })
    }

    pub(super) async fn finish(mut self) -> ExecutionResult {
        let rest = self.take_unwritten();
        if !rest.writes.is_empty() {
            match tokio::time::timeout_at(self.final_write_deadline(), self.store.txn(rest)).await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => warn!(%error, "cannot write outcomes to the ledger"),
                Err(_) => warn!("cannot write outcomes to the ledger: the store does not reply"),
            }
        }
        ledger::forget(self.store, &self.terms.settings.target, &self.ledger.known, self.backend.now()).await;
        ExecutionResult { ended: self.outcomes.ended, to_roll_back: self.rollouts.to_roll_back }
    }

    pub(super) fn is_over(&self) -> bool {
        *self.terms.settings.stop.borrow() || Instant::now() >= self.terms.settings.deadline
    }

    pub(super) async fn wave(&mut self, wave: &Wave) {
        let mut chains: Chains<'_, '_> = BTreeMap::new();
        for step in &wave.steps {
            chains.entry(&step.instance).or_default().push_back(step);
        }
        let mut ready: VecDeque<&Step> = VecDeque::new();
        for chain in chains.values_mut() {
            ready.extend(chain.pop_front());
        }
        let mut flights: Vec<InFlightCall<'_>> = Vec::new();
        let (fast, slow) = self.backend.poll_interval();
        let mut interval = fast;
        loop {
            let in_flight: usize = flights.iter().map(|flight| flight.steps.len()).sum();
            self.set_in_flight(in_flight);
            let all = self.all_in_flight.load(Ordering::Relaxed);
            let capacity = self.terms.settings.max_parallel.saturating_sub(all).min(BATCH);
            let batch = self.next_batch(capacity, &mut ready, &mut chains);
            if !batch.is_empty() {
                self.set_in_flight(in_flight + batch.len());
                interval = fast;
                flights.extend(self.send(batch, &mut chains, &mut ready).await);
                continue;
            }
            if flights.is_empty() {
                if ready.is_empty() {
                    return;
                }
                // Other components use all of `max_parallel`.
                tokio::time::sleep(fast).await;
                continue;
            }
            if Instant::now() >= self.terms.settings.deadline {
                self.time_out(flights, &mut chains).await;
                flights = Vec::new();
                continue;
            }
            // Jitter: many clients must not poll at the same moment.
            tokio::time::sleep(interval.mul_f64(0.85 + 0.3 * fastrand::f64())).await;
            interval = interval.mul_f64(1.5).min(slow);
            let before: usize = flights.iter().map(|flight| flight.steps.len()).sum();
            flights = self.poll(flights, &mut chains, &mut ready).await;
            let left: usize = flights.iter().map(|flight| flight.steps.len()).sum();
            if left < before {
                interval = fast;
            }
            let longest = flights.iter().min_by_key(|flight| flight.begun);
            let longest = longest.and_then(|flight| flight.steps.values().next()).map(|step| &step.instance);
            (self.on_event)(ExecutionEvent::Waiting { left, longest });
        }
    }

    /// Sets the number of this run's steps in flight.
    fn set_in_flight(&mut self, many: usize) {
        self.all_in_flight.fetch_add(many, Ordering::Relaxed);
        self.all_in_flight.fetch_sub(std::mem::replace(&mut self.in_flight, many), Ordering::Relaxed);
    }

    fn next_batch<'s>(
        &mut self,
        capacity: usize,
        ready: &mut VecDeque<&'s Step>,
        chains: &mut Chains<'_, 's>,
    ) -> Vec<&'s Step> {
        let mut batch: Vec<&Step> = Vec::new();
        while batch.len() < capacity
            && let Some(step) = ready.pop_front()
        {
            match self.skip_reason(step) {
                None if let Some(why) = (self.terms.settings.check)(step) => {
                    self.end(step, StepOutcome::Failed, RowState::Unreported, why, Instant::now());
                    self.skip_rest(chains, step);
                }
                None => {
                    self.outcomes.begun.insert(step.instance.clone());
                    batch.push(step);
                }
                Some(why) => {
                    self.end(step, StepOutcome::Skipped, RowState::Unreported, why, Instant::now());
                    self.skip_rest(chains, step);
                }
            }
        }
        batch
    }

    async fn time_out(&mut self, flights: Vec<InFlightCall<'_>>, chains: &mut Chains<'_, '_>) {
        for flight in flights {
            for step in flight.steps.into_values() {
                let message = "step was still in flight at the deadline".to_owned();
                self.end(step, StepOutcome::TimedOut, RowState::StillRunning, message, flight.begun);
                self.skip_rest(chains, step);
            }
        }
    }

    /// Reason why a ready step is skipped.
    fn skip_reason(&mut self, step: &Step) -> Option<String> {
        if *self.terms.settings.stop.borrow() {
            return Some("interrupted before the step was sent".to_owned());
        }
        if Instant::now() >= self.terms.settings.deadline {
            return Some("deadline passed before the step was sent".to_owned());
        }
        let is_begun = self.outcomes.begun.contains(&step.instance);
        let held = self.terms.settings.active_holds.borrow().hold_reason(
            &step.instance,
            step.from.as_ref(),
            is_begun,
        );
        if let Some(reason) = held.or_else(|| self.terms.aborted(&step.instance).filter(|_| !is_begun)) {
            // Processes that depend on the skipped start are skipped, too.
            if step.op == Op::Start {
                self.terms.dependencies.name_instance(&step.instance, &mut self.outcomes.not_started);
            }
            return Some(reason);
        }
        let declared = self.terms.dependencies.declared.get(&step.instance)?;
        if self.rollouts.given_up.contains(declared) {
            return Some(format!("rollout of {declared} ended: too many instances failed"));
        }
        if !matches!(step.op, Op::Start | Op::Restart) {
            return None;
        }
        let (dependencies, host) = (&self.terms.dependencies, &step.instance.host);
        let failed = dependencies.find_among(declared, host, &self.outcomes.failed_names);
        let is_aborted = |name: &ProcessKey| self.terms.settings.active_holds.borrow().is_aborted(name);
        let why = match (failed, dependencies.find_among(declared, host, &self.outcomes.not_started)) {
            (Some(name), _) => format!("dependency {name} failed"),
            (None, Some(name)) if is_aborted(name) => format!("the rollout of dependency {name} was aborted"),
            (None, Some(name)) => format!("dependency {name} was not started"),
            (None, None) => return None,
        };
        dependencies.name_instance(&step.instance, &mut self.outcomes.not_started);
        Some(why)
    }

    /// Counts a failed instance; `false`: it was counted before.
    pub(super) fn count_failed(&mut self, instance: &InstanceKey) -> bool {
        let (terms, outcomes) = (self.terms, &mut self.outcomes);
        if !outcomes.failed.insert(instance.clone()) {
            return false;
        }
        let declared = terms.dependencies.declared.get(instance).cloned();
        *outcomes.failures.entry(declared.unwrap_or_else(|| instance.process())).or_default() += 1;
        terms.dependencies.name_instance(instance, &mut outcomes.failed_names);
        true
    }

    /// Deletes a finished call from the journal.
    async fn finish_if_done<'s>(&mut self, flight: InFlightCall<'s>) -> Option<InFlightCall<'s>> {
        if !flight.steps.is_empty() {
            return Some(flight);
        }
        self.forget(&flight.call).await;
        None
    }

    /// A call that cannot be deleted in time stays in the journal, and the next run resolves it.
    async fn forget(&mut self, call: &str) {
        let notes = self.take_unwritten();
        let written =
            tokio::time::timeout_at(self.final_write_deadline(), self.journal.ended(call, notes)).await;
        if written.unwrap_or(false) {
            (self.on_event)(ExecutionEvent::Noted);
        }
    }

    fn final_write_deadline(&self) -> Instant {
        self.terms.settings.deadline.max(Instant::now()) + FINAL_WRITE_TIMEOUT
    }
}
