//! One run: what is ready is sent, what was sent is asked about, what was lost is looked at.
//!
//! Here is the loop, and what is ready. [`send`] brings calls on their way, [`answers`] finds out what became of them, and
//! [`books`] keeps what is known by the end of each step.

mod poll;
mod record;
mod send;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::time::Instant;
use tracing::warn;

use super::journal::Journal;
use super::{ExecutionContext, ExecutionEvent, ExecutionResult, LAST_WORDS, StepOutcome, StepResult, ledger};
use crate::backend::{Backend, Task};
use crate::model::{InstanceKey, ObservedInstance, Op, ProcessKey, Step, Wave};
use crate::store::{Error, Store};

/// The most steps in one batch.
const BATCH: usize = 1000;

/// What the runs of one plan share.
pub(super) struct Common<'a, B, S> {
    pub(super) backend: &'a B,
    pub(super) store: &'a S,
    pub(super) terms: &'a ExecutionContext,
    /// Steps of all of them.
    pub(super) under_way: &'a AtomicUsize,
}

pub(super) struct Run<'a, B, S> {
    pub(super) backend: &'a B,
    store: &'a S,
    journal: Journal<'a, S>,
    pub(super) terms: &'a ExecutionContext,
    pub(super) told: &'a mut (dyn FnMut(ExecutionEvent<'_>) + Send),
    all_under_way: &'a AtomicUsize,
    /// How many of those are ours.
    under_way: usize,
    pub(super) ended: Vec<StepResult>,
    /// Instances of which something was done, or sent.
    begun: BTreeSet<InstanceKey>,
    /// Instances of which a step did not end well.
    pub(super) failed: BTreeSet<InstanceKey>,
    /// By declared name.
    pub(super) failures: HashMap<ProcessKey, u64>,
    /// Declared names of which something was not begun, so that what depends on them is not, either.
    left_out: BTreeSet<ProcessKey>,
    /// Processes whose rollout was ended.
    pub(super) given_up: BTreeSet<ProcessKey>,
    pub(super) to_roll_back: BTreeSet<ProcessKey>,
    /// Rollouts that have begun here.
    pub(super) soaked: BTreeSet<ProcessKey>,
    /// Since when the target does not answer.
    silent: Option<Instant>,
    /// How things are by what was done so far.
    pub(super) seen: BTreeMap<InstanceKey, ObservedInstance>,
    /// What is known of them beside, and what of that is not written yet.
    known: BTreeMap<InstanceKey, ledger::Entry>,
    notes: BTreeMap<InstanceKey, ledger::Entry>,
}

/// Message of a start that a process without an owner stands in the way of.
pub(super) const RUNS_ALREADY: &str = "process exists and was not started by Abide: it is not owned. `--adopt` (or `adopt: true`) \
     takes it over without a restart";
/// The same for a registration.
pub(super) const REGISTERED_ALREADY: &str = "registration exists and was not made by Abide: it is not owned. `--adopt` (or \
     `adopt: true`) takes it over";

/// Tasks that are under way.
struct Flight<'a> {
    /// `None`: the answer was lost, and nobody knows of a task.
    task: Option<Task>,
    steps: HashMap<String, &'a Step>,
    begun: Instant,
    call: String,
}

type Chains<'c, 's> = BTreeMap<&'c InstanceKey, VecDeque<&'s Step>>;

impl<'a, B: Backend, S: Store> Run<'a, B, S> {
    /// `nth`: of the runs of this plan.
    pub(super) async fn new(
        common: Common<'a, B, S>,
        nth: usize,
        told: &'a mut (dyn FnMut(ExecutionEvent<'_>) + Send),
    ) -> Result<Run<'a, B, S>, Error> {
        let Common { backend, store, terms, under_way } = common;
        let name = if nth == 0 { terms.run.clone() } else { format!("{}-{nth}", terms.run) };
        // A ledger that cannot be read is not empty: nothing is begun that it would have to tell of.
        let known = ledger::read(store, &terms.target).await?;
        Ok(Run {
            backend,
            store,
            journal: Journal::new(store, &terms.owner, &name),
            terms,
            told,
            all_under_way: under_way,
            under_way: 0,
            ended: Vec::new(),
            begun: BTreeSet::new(),
            failed: BTreeSet::new(),
            failures: HashMap::new(),
            left_out: BTreeSet::new(),
            given_up: BTreeSet::new(),
            to_roll_back: BTreeSet::new(),
            soaked: BTreeSet::new(),
            silent: None,
            seen: terms.before.clone(),
            known: known.entries,
            notes: BTreeMap::new(),
        })
    }

    pub(super) async fn over(mut self) -> ExecutionResult {
        let rest = self.take_notes();
        if !rest.writes.is_empty() {
            match tokio::time::timeout_at(self.last_words(), self.store.txn(rest)).await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => warn!(%error, "what was done is not in the ledger"),
                Err(_) => warn!("what was done is not in the ledger: it does not answer"),
            }
        }
        ledger::forget(self.store, &self.terms.target, &self.known, self.backend.now()).await;
        ExecutionResult { ended: self.ended, to_roll_back: self.to_roll_back }
    }

    pub(super) fn is_over(&self) -> bool {
        *self.terms.stop.borrow() || Instant::now() >= self.terms.deadline
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
        let mut flights: Vec<Flight<'_>> = Vec::new();
        let (fast, slow) = self.backend.poll_interval();
        let mut pace = fast;
        loop {
            let under_way: usize = flights.iter().map(|flight| flight.steps.len()).sum();
            self.takes(under_way);
            let all = self.all_under_way.load(Ordering::Relaxed);
            let room = self.terms.max_parallel.saturating_sub(all).min(BATCH);
            let batch = self.next_batch(room, &mut ready, &mut chains);
            if !batch.is_empty() {
                self.takes(under_way + batch.len());
                pace = fast;
                flights.extend(self.send(batch, &mut chains, &mut ready).await);
                continue;
            }
            if flights.is_empty() {
                if ready.is_empty() {
                    return;
                }
                // Others have all the room just now.
                tokio::time::sleep(fast).await;
                continue;
            }
            if Instant::now() >= self.terms.deadline {
                self.time_is_over(flights, &mut chains).await;
                flights = Vec::new();
                continue;
            }
            // Many who wait do not all ask at once.
            tokio::time::sleep(pace.mul_f64(0.85 + 0.3 * fastrand::f64())).await;
            pace = pace.mul_f64(1.5).min(slow);
            let before: usize = flights.iter().map(|flight| flight.steps.len()).sum();
            flights = self.ask(flights, &mut chains, &mut ready).await;
            let left: usize = flights.iter().map(|flight| flight.steps.len()).sum();
            if left < before {
                pace = fast;
            }
            let longest = flights.iter().min_by_key(|flight| flight.begun);
            let longest = longest.and_then(|flight| flight.steps.values().next()).map(|step| &step.instance);
            (self.told)(ExecutionEvent::Waiting { left, longest });
        }
    }

    /// So many steps of ours are under way now.
    fn takes(&mut self, many: usize) {
        self.all_under_way.fetch_add(many, Ordering::Relaxed);
        self.all_under_way.fetch_sub(std::mem::replace(&mut self.under_way, many), Ordering::Relaxed);
    }

    fn next_batch<'s>(
        &mut self,
        room: usize,
        ready: &mut VecDeque<&'s Step>,
        chains: &mut Chains<'_, 's>,
    ) -> Vec<&'s Step> {
        let mut batch: Vec<&Step> = Vec::new();
        while batch.len() < room
            && let Some(step) = ready.pop_front()
        {
            match self.why_not(step) {
                None if let Some(why) = (self.terms.check)(step) => {
                    self.end(step, StepOutcome::Failed, 0, why, Instant::now());
                    self.skip_rest(chains, step);
                }
                None => {
                    self.begun.insert(step.instance.clone());
                    batch.push(step);
                }
                Some(why) => {
                    self.end(step, StepOutcome::Skipped, 0, why, Instant::now());
                    self.skip_rest(chains, step);
                }
            }
        }
        batch
    }

    async fn time_is_over(&mut self, flights: Vec<Flight<'_>>, chains: &mut Chains<'_, '_>) {
        for flight in flights {
            for step in flight.steps.into_values() {
                let message = "it was still under way when the time was over".to_owned();
                self.end(step, StepOutcome::TimedOut, 115, message, flight.begun);
                self.skip_rest(chains, step);
            }
        }
    }

    /// Why a step that is ready is not begun.
    fn why_not(&mut self, step: &Step) -> Option<String> {
        if *self.terms.stop.borrow() {
            return Some("interrupted before it was begun".to_owned());
        }
        if Instant::now() >= self.terms.deadline {
            return Some("the time was over before it was begun".to_owned());
        }
        let is_begun = self.begun.contains(&step.instance);
        if let Some(word) = self.terms.restraints.borrow().means(&step.instance, step.from.as_ref(), is_begun)
        {
            // What was to be started is not there for those that need it.
            let starts = self.terms.declared.get(&step.instance).filter(|_| step.op == Op::Start);
            self.left_out.extend(starts.cloned());
            return Some(word);
        }
        let declared = self.terms.declared.get(&step.instance)?;
        if self.given_up.contains(declared) {
            return Some(format!("the rollout of {declared} was ended: too many of it failed"));
        }
        if !matches!(step.op, Op::Start | Op::Restart) {
            return None;
        }
        let needs = self.terms.depends.get(declared)?;
        let failed = needs.iter().find(|name| self.failures.contains_key(*name));
        let why = match (failed, needs.iter().find(|name| self.left_out.contains(*name))) {
            (Some(failed), _) => format!("{failed}, which it depends on, failed"),
            (None, Some(left_out)) => format!("{left_out}, which it depends on, was not begun"),
            (None, None) => return None,
        };
        self.left_out.insert(declared.clone());
        Some(why)
    }

    /// A flight that is over is forgotten by the journal.
    async fn if_open<'s>(&mut self, flight: Flight<'s>) -> Option<Flight<'s>> {
        if !flight.steps.is_empty() {
            return Some(flight);
        }
        self.forget(&flight.call).await;
        None
    }

    /// What cannot be written in time stays in the journal, and is found out by whoever comes next.
    async fn forget(&mut self, call: &str) {
        let notes = self.take_notes();
        let written = tokio::time::timeout_at(self.last_words(), self.journal.ended(call, notes)).await;
        if written.unwrap_or(false) {
            (self.told)(ExecutionEvent::Noted);
        }
    }

    fn last_words(&self) -> Instant {
        self.terms.deadline.max(Instant::now()) + LAST_WORDS
    }
}
