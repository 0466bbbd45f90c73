//! One run: what is ready is sent, what was sent is asked about, what was lost is looked at.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use tokio::time::Instant;
use tracing::{info, warn};

use super::doubt::{Verdict, judge};
use super::journal::{Began, Call, Journal};
use super::{Ended, Executed, Outcome, Terms, Told, ledger};
use crate::backend::{Answer, Backend, Fault, Order, Outcome as Said, Subject, Task};
use crate::clock;
use crate::model::{AutoType, InstanceKey, Monitor, Op, ProcessKey, Seen, Spec, Step, Wave};
use crate::reconcile::{Expected, after};
use crate::store::{Error, Store, Txn};

/// The most steps in one batch.
const BATCH: usize = 1000;
/// How often a call that cannot have been carried out is made again.
const TRIES: u32 = 5;
const FIRST_TRY: Duration = Duration::from_millis(10);
/// A target that does not answer for this long is gone: what was sent is unknown.
const SILENCE: Duration = Duration::from_secs(15);
/// Even when the time is nearly over, a look has this much.
const LEAST_LOOK: Duration = Duration::from_secs(1);

pub(super) struct Run<'a, B, S> {
    pub(super) backend: &'a B,
    store: &'a S,
    journal: Journal<'a, S>,
    pub(super) terms: &'a Terms,
    pub(super) told: &'a mut (dyn FnMut(Told<'_>) + Send),
    pub(super) ended: Vec<Ended>,
    /// Instances of which a step did not end well.
    pub(super) failed: BTreeSet<InstanceKey>,
    /// By declared name.
    pub(super) failures: HashMap<ProcessKey, u64>,
    /// Processes whose rollout was ended.
    pub(super) given_up: BTreeSet<ProcessKey>,
    pub(super) to_roll_back: BTreeSet<ProcessKey>,
    /// Since when the target does not answer.
    silent: Option<Instant>,
    /// How things are by what was done so far.
    pub(super) seen: BTreeMap<InstanceKey, Seen>,
    /// What is known of them beside, and what of that is not written yet.
    known: BTreeMap<InstanceKey, ledger::Entry>,
    notes: BTreeMap<InstanceKey, ledger::Entry>,
}

/// Tasks that are under way.
struct Flight<'a> {
    /// `None`: the answer was lost, and nobody knows of a task.
    task: Option<Task>,
    steps: HashMap<String, &'a Step>,
    begun: Instant,
    call: String,
}

type Chains<'c, 's> = BTreeMap<&'c InstanceKey, VecDeque<&'s Step>>;

/// What became of a call.
enum Lost {
    /// The journal could not be written: nothing was sent.
    NotBegun(Error),
    Fault(Fault),
}

impl<'a, B: Backend, S: Store> Run<'a, B, S> {
    pub(super) async fn new(
        backend: &'a B,
        store: &'a S,
        terms: &'a Terms,
        told: &'a mut (dyn FnMut(Told<'_>) + Send),
    ) -> Run<'a, B, S> {
        let known = match terms.caps.reads_specs {
            true => ledger::Ledger::default(),
            false => ledger::read(store, &terms.target).await.unwrap_or_default(),
        };
        Run {
            backend,
            store,
            journal: Journal::new(store, &terms.owner, &terms.run),
            terms,
            told,
            ended: Vec::new(),
            failed: BTreeSet::new(),
            failures: HashMap::new(),
            given_up: BTreeSet::new(),
            to_roll_back: BTreeSet::new(),
            silent: None,
            seen: terms.before.clone(),
            known: known.entries,
            notes: BTreeMap::new(),
        }
    }

    pub(super) async fn over(mut self) -> Executed {
        let rest = self.take_notes();
        if !rest.writes.is_empty()
            && let Err(error) = self.store.txn(rest).await
        {
            warn!(%error, "what was done is not in the ledger");
        }
        self.ended.sort_by_key(|ended| ended.step);
        Executed { ended: self.ended, to_roll_back: self.to_roll_back }
    }

    pub(super) fn is_over(&self) -> bool {
        *self.terms.stop.borrow() || Instant::now() >= self.terms.deadline
    }

    fn take_notes(&mut self) -> Txn {
        ledger::noted(&self.terms.target, &std::mem::take(&mut self.notes))
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
        let (fast, slow) = self.backend.pace();
        let mut pace = fast;
        loop {
            let under_way: usize = flights.iter().map(|flight| flight.steps.len()).sum();
            let room = self.terms.max_parallel.saturating_sub(under_way).min(BATCH);
            let batch = self.next_batch(room, &mut ready, &mut chains);
            if !batch.is_empty() {
                pace = fast;
                flights.extend(self.send(batch, &mut chains, &mut ready).await);
                continue;
            }
            if flights.is_empty() {
                if ready.is_empty() {
                    return;
                }
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
            (self.told)(Told::Waiting { left, longest });
        }
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
                    self.end(step, Outcome::Failed, 0, why, Instant::now());
                    self.skip_rest(chains, step);
                }
                None => batch.push(step),
                Some(why) => {
                    self.end(step, Outcome::Skipped, 0, why, Instant::now());
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
                self.end(step, Outcome::TimedOut, 115, message, flight.begun);
                self.skip_rest(chains, step);
            }
        }
    }

    /// Why a step that is ready is not begun.
    fn why_not(&self, step: &Step) -> Option<String> {
        if *self.terms.stop.borrow() {
            return Some("interrupted before it was begun".to_owned());
        }
        if Instant::now() >= self.terms.deadline {
            return Some("the time was over before it was begun".to_owned());
        }
        let declared = self.terms.declared.get(&step.instance)?;
        if self.given_up.contains(declared) {
            return Some(format!("the rollout of {declared} was ended: too many of it failed"));
        }
        if !matches!(step.op, Op::Start | Op::Restart) {
            return None;
        }
        let needs = self.terms.depends.get(declared)?;
        let lost = needs.iter().find(|name| self.failures.contains_key(*name))?;
        Some(format!("{lost}, which it depends on, failed"))
    }

    /// Sends a batch, in as few calls as the target allows, side by side.
    async fn send<'s>(
        &mut self,
        batch: Vec<&'s Step>,
        chains: &mut Chains<'_, 's>,
        ready: &mut VecDeque<&'s Step>,
    ) -> Vec<Flight<'s>> {
        let begun = Instant::now();
        let order = |step: &&Step| {
            let seen = self.seen.get(&step.instance);
            let registered = seen.is_some_and(|seen| seen.registered == Some(true));
            Order { registered, ..Order::of(step, step.id.to_string(), &self.terms.owner) }
        };
        let calls = self.backend.batches(batch.iter().map(order).collect());
        let mut steps: HashMap<String, &Step> =
            batch.into_iter().map(|step| (step.id.to_string(), step)).collect();
        (self.told)(Told::Sent { steps: steps.len() });
        let (backend, journal, terms, seen) = (self.backend, &self.journal, self.terms, &self.seen);
        let one = |orders: Vec<Order>| async move {
            let sent = submit(backend, journal, terms, seen, &orders).await;
            (orders, sent)
        };
        let sent: Vec<_> = stream::iter(calls).map(one).buffered(backend.at_once()).collect().await;
        let mut flights = Vec::new();
        for (orders, (call, result)) in sent {
            let steps: HashMap<String, &Step> =
                orders.iter().filter_map(|order| steps.remove_entry(&order.id)).collect();
            match result {
                Ok(task) => {
                    let mut flight = Flight { task: Some(task), steps, begun, call };
                    // Some calls answer at once.
                    if let Some(task) = flight.task.take() {
                        self.take_in(&mut flight, task.answered.clone(), chains, ready);
                        flight.task = Some(Task { answered: Vec::new(), ..task });
                    }
                    flights.extend(self.if_open(flight).await);
                }
                Err(Lost::NotBegun(error)) => {
                    for step in steps.into_values() {
                        self.end(step, Outcome::Failed, 0, format!("not begun: {error}"), begun);
                        self.skip_rest(chains, step);
                    }
                }
                Err(Lost::Fault(Fault::NoAnswer)) if !self.backend.knows_names() => {
                    flights.push(Flight { task: None, steps, begun, call });
                }
                Err(Lost::Fault(fault)) => {
                    let outcome = match fault {
                        Fault::NoAnswer => Outcome::Unknown,
                        Fault::Unreachable(_) | Fault::Refused(_) | Fault::Busy(_) => Outcome::Failed,
                    };
                    for step in steps.into_values() {
                        self.end(step, outcome, 0, fault.to_string(), begun);
                        self.skip_rest(chains, step);
                    }
                    if outcome == Outcome::Failed {
                        let notes = self.take_notes();
                        self.journal.ended(&call, notes).await;
                    }
                }
            }
        }
        flights
    }

    /// A flight that is over is forgotten by the journal.
    async fn if_open<'s>(&mut self, flight: Flight<'s>) -> Option<Flight<'s>> {
        if !flight.steps.is_empty() {
            return Some(flight);
        }
        let notes = self.take_notes();
        self.journal.ended(&flight.call, notes).await;
        None
    }

    /// Asks about all that is under way, side by side.
    async fn ask<'s>(
        &mut self,
        flights: Vec<Flight<'s>>,
        chains: &mut Chains<'_, 's>,
        ready: &mut VecDeque<&'s Step>,
    ) -> Vec<Flight<'s>> {
        let backend = self.backend;
        let one = |flight: Flight<'s>| async move {
            let answers = match &flight.task {
                Some(task) => Some(backend.poll(task).await),
                None => None,
            };
            (flight, answers)
        };
        let told: Vec<_> = stream::iter(flights).map(one).buffered(backend.at_once()).collect().await;
        let mut open = Vec::new();
        for (mut flight, answers) in told {
            match answers {
                Some(Ok(answers)) => {
                    self.silent = None;
                    self.take_in(&mut flight, answers, chains, ready);
                    self.overdue(&mut flight, chains, ready).await;
                }
                Some(Err(fault)) => {
                    info!(%fault, "asked again");
                    let since = *self.silent.get_or_insert_with(Instant::now);
                    match since.elapsed() > SILENCE && self.backend.knows_names() {
                        true => self.lose(&mut flight, &fault.to_string(), chains),
                        false => self.overdue(&mut flight, chains, ready).await,
                    }
                }
                None => self.look_into(&mut flight, None, chains, ready).await,
            }
            open.extend(self.if_open(flight).await);
        }
        open
    }

    fn take_in<'s>(
        &mut self,
        flight: &mut Flight<'s>,
        answers: Vec<Answer>,
        chains: &mut Chains<'_, 's>,
        ready: &mut VecDeque<&'s Step>,
    ) {
        for Answer { order, result, .. } in answers {
            let (code, message) = match result {
                Said::InProgress => continue,
                Said::Done => (0, String::new()),
                Said::Failed { code, message } => (code, message),
            };
            let Some(step) = flight.steps.remove(&order) else { continue };
            let (outcome, message) = self.understood(step, code, message);
            self.close(step, outcome, code, message, flight.begun, chains, ready);
        }
    }

    #[expect(clippy::too_many_arguments, reason = "what a step is closed with, and what goes on after it")]
    fn close<'s>(
        &mut self,
        step: &'s Step,
        outcome: Outcome,
        code: i64,
        message: String,
        begun: Instant,
        chains: &mut Chains<'_, 's>,
        ready: &mut VecDeque<&'s Step>,
    ) {
        self.end(step, outcome, code, message, begun);
        match outcome.is_well() {
            true => ready.extend(chains.get_mut(&step.instance).and_then(VecDeque::pop_front)),
            false => self.skip_rest(chains, step),
        }
    }

    /// Some codes say that there was nothing to do.
    fn understood(&self, step: &Step, code: i64, message: String) -> (Outcome, String) {
        match (step.op, code) {
            (_, 0) => (Outcome::Done, String::new()),
            (Op::Start, 828) if self.runs_as_wanted(step) => (Outcome::AlreadySo, message),
            (Op::Start, 828) => {
                let why = "it runs already, and not as it is wanted: a restart is needed";
                (Outcome::Failed, format!("{why} ({message})"))
            }
            (Op::Stop | Op::Kill, 829) | (Op::Register, 850) => (Outcome::AlreadySo, message),
            // A one-shot has ended by the time it is checked.
            (Op::Start, 836) if is_once(step) && !self.terms.caps.reads_health => (Outcome::Done, message),
            _ => (Outcome::Failed, message),
        }
    }

    /// Where specs are read back, the next look tells; elsewhere only what we know of it counts.
    fn runs_as_wanted(&self, step: &Step) -> bool {
        if self.terms.caps.reads_specs {
            return true;
        }
        let entry = self.known.get(&step.instance);
        let live = entry.and_then(|entry| entry.live.as_ref().or(entry.given.as_ref()));
        match (live, &step.spec) {
            (Some(live), Some(wanted)) => live.spec == ***wanted || live.revision == step.revision,
            (None, _) | (_, None) => false,
        }
    }

    /// Rows that stay in progress, or never come, for longer than their operation can take.
    async fn overdue<'s>(
        &mut self,
        flight: &mut Flight<'s>,
        chains: &mut Chains<'_, 's>,
        ready: &mut VecDeque<&'s Step>,
    ) {
        if self.backend.knows_names() {
            return;
        }
        let (_, slow) = self.backend.pace();
        let late: BTreeSet<String> = flight
            .steps
            .iter()
            .filter(|(_, step)| flight.begun.elapsed() > patience(step, slow))
            .map(|(id, _)| id.clone())
            .collect();
        if !late.is_empty() {
            self.look_into(flight, Some(&late), chains, ready).await;
        }
    }

    /// Finds out by looking what became of steps; `only`: of these, for the last time.
    async fn look_into<'s>(
        &mut self,
        flight: &mut Flight<'s>,
        only: Option<&BTreeSet<String>>,
        chains: &mut Chains<'_, 's>,
        ready: &mut VecDeque<&'s Step>,
    ) {
        let meant = |id: &String| only.is_none_or(|only| only.contains(id));
        let steps: Vec<(String, &Step)> =
            flight.steps.iter().filter(|(id, _)| meant(id)).map(|(id, step)| (id.clone(), *step)).collect();
        let subjects: Vec<Subject> = steps.iter().map(|(_, step)| self.subject(step)).collect();
        let left = self.terms.deadline.saturating_duration_since(Instant::now()).max(LEAST_LOOK);
        let look = tokio::time::timeout(left, self.backend.look_closely(&subjects)).await;
        let look = look.unwrap_or(Err(Fault::NoAnswer));
        let (_, slow) = self.backend.pace();
        for (id, step) in steps {
            let verdict = match &look {
                Ok(look) if look.gaps.contains_key(&step.instance.host) => Verdict::Unknown,
                Ok(look) => {
                    let now = look.instances.get(&step.instance);
                    judge(step.op, self.seen.get(&step.instance), now, is_once(step))
                }
                Err(_) => Verdict::Unknown,
            };
            let is_last = only.is_some() || flight.begun.elapsed() > patience(step, slow);
            let (outcome, message) = match verdict {
                Verdict::Done => (Outcome::Done, String::new()),
                Verdict::Again => (Outcome::Unknown, "its answer was lost: the next look decides".to_owned()),
                Verdict::NotYet | Verdict::Unknown if !is_last => continue,
                Verdict::NotYet if only.is_none() => {
                    (Outcome::Failed, "its answer was lost, and it was not carried out".to_owned())
                }
                Verdict::NotYet | Verdict::Unknown => {
                    (Outcome::Unknown, "no word of it came, and looking does not tell".to_owned())
                }
            };
            flight.steps.remove(&id);
            self.close(step, outcome, 0, message, flight.begun, chains, ready);
        }
    }

    pub(super) fn subject(&self, step: &Step) -> Subject {
        let known = self.known.get(&step.instance).and_then(ledger::Entry::spec);
        let spec = match step.op {
            // What is sent is what it is from now on.
            Op::Start | Op::Host | Op::Restart | Op::Reload | Op::Register => step.spec.clone().or(known),
            Op::Stop | Op::Kill | Op::Unhost | Op::Unregister => known.or_else(|| step.spec.clone()),
        };
        Subject { instance: step.instance.clone(), host: step.host.clone(), spec }
    }

    fn lose(&mut self, flight: &mut Flight<'_>, why: &str, chains: &mut Chains<'_, '_>) {
        for (_, step) in std::mem::take(&mut flight.steps) {
            self.end(step, Outcome::Unknown, 0, why.to_owned(), flight.begun);
            self.skip_rest(chains, step);
        }
    }

    fn end(&mut self, step: &Step, outcome: Outcome, code: i64, message: String, begun: Instant) {
        let took_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (instance, op) = (step.instance.clone(), step.op);
        self.note(step, outcome, code);
        let ended = Ended { step: step.id, instance, op, outcome, code, message, took_ms };
        if !outcome.is_well() && self.failed.insert(step.instance.clone()) && outcome != Outcome::Skipped {
            let declared = self.terms.declared.get(&step.instance).cloned();
            *self.failures.entry(declared.unwrap_or_else(|| step.instance.process())).or_default() += 1;
        }
        (self.told)(Told::Ended(&ended));
        self.ended.push(ended);
    }

    /// How the instance is by now, for the ledger.
    fn note(&mut self, step: &Step, outcome: Outcome, code: i64) {
        if outcome == Outcome::Skipped {
            return;
        }
        // These can be done again without harm: as long as nobody knows better, they were not done.
        let harmless = matches!(step.op, Op::Register | Op::Unregister | Op::Reload | Op::Host);
        if harmless && !outcome.is_well() {
            return;
        }
        let expected = match outcome {
            // Nobody stopped it: whether it is still guarded has to be seen.
            Outcome::AlreadySo if code == 829 => Expected::Unsure,
            Outcome::Done | Outcome::AlreadySo => {
                after(step, self.seen.get(&step.instance), &self.terms.owner, &self.terms.caps)
            }
            Outcome::Failed | Outcome::TimedOut | Outcome::Unknown | Outcome::Skipped => Expected::Unsure,
        };
        if let Expected::So(seen) = &expected {
            self.seen.insert(step.instance.clone(), (**seen).clone());
        }
        if self.terms.caps.reads_specs {
            return;
        }
        let known = self.known.get(&step.instance);
        let entry = ledger::Entry::after(step, &expected, &self.terms.owner, known, clock::moment());
        // A step that was surely not carried out leaves no doubt about a run.
        let once = entry.once && outcome != Outcome::Failed;
        let entry = ledger::Entry { once, ..entry };
        self.known.insert(step.instance.clone(), entry.clone());
        self.notes.insert(step.instance.clone(), entry);
    }

    fn skip_rest(&mut self, chains: &mut Chains<'_, '_>, after: &Step) {
        let rest = chains.get_mut(&after.instance).map(std::mem::take).unwrap_or_default();
        for step in rest {
            let why = format!("the {} before it did not end well", after.op);
            self.end(step, Outcome::Skipped, 0, why, Instant::now());
        }
    }
}

/// One call: into the journal, then out. Only what cannot have had an effect is sent again.
async fn submit<B: Backend, S: Store>(
    backend: &B,
    journal: &Journal<'_, S>,
    terms: &Terms,
    seen: &BTreeMap<InstanceKey, Seen>,
    orders: &[Order],
) -> (String, Result<Task, Lost>) {
    let mut call = Call { steps: orders.iter().map(|order| began(order, terms, seen)).collect(), task: None };
    let name = match journal.begin(&call).await {
        Ok(name) => name,
        Err(error) => return (String::new(), Err(Lost::NotBegun(error))),
    };
    let mut tries = 0;
    let sent = loop {
        tries += 1;
        let may = |fault: &Fault| match fault {
            Fault::Unreachable(_) | Fault::Busy(_) => true,
            // Under the same name it is carried out once, however often it is sent.
            Fault::NoAnswer => backend.knows_names(),
            Fault::Refused(_) => false,
        };
        match backend.submit(&name, orders).await {
            Err(fault) if may(&fault) && tries < TRIES && Instant::now() < terms.deadline => {
                warn!(%fault, tries, "sent again");
                tokio::time::sleep(FIRST_TRY * 4u32.pow(tries)).await;
            }
            sent => break sent,
        }
    };
    if let Ok(task) = &sent
        && !backend.knows_names()
        && !task.ids.is_empty()
    {
        call.task = Some(task.clone());
        journal.taken_on(&name, &call).await;
    }
    (name, sent.map_err(Lost::Fault))
}

/// A step as the journal keeps it: where calls have names, the name finds the rest.
fn began(order: &Order, terms: &Terms, seen: &BTreeMap<InstanceKey, Seen>) -> Began {
    let lasting = !terms.caps.reads_specs;
    let row = seen.get(&order.instance);
    Began {
        instance: order.instance.clone(),
        op: order.op,
        revision: order.revision.filter(|_| lasting),
        spec: order.spec.as_ref().filter(|_| lasting).map(|spec| Arc::new(Spec::clone(spec))),
        supplier: order.host.supplier.filter(|_| lasting),
        agent_id: order.host.agent_id.clone().filter(|_| lasting),
        hosted: lasting && row.is_some_and(|row| row.hosted == Some(true)),
        pid: row.and_then(|row| row.pid).filter(|_| lasting),
    }
}

fn is_once(step: &Step) -> bool {
    step.spec.as_ref().is_some_and(|spec| spec.monitor.auto_type == AutoType::OneShot)
}

/// How long an operation may take until its row is overdue.
pub(super) fn patience(step: &Step, poll: Duration) -> Duration {
    let monitor = step.spec.as_ref().map(|spec| spec.monitor.clone()).unwrap_or_default();
    let check = match step.op {
        Op::Start | Op::Restart => monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS),
        Op::Stop | Op::Kill => monitor.stop_check_secs.unwrap_or(Monitor::STOP_CHECK_SECS),
        Op::Register | Op::Unregister | Op::Host | Op::Unhost | Op::Reload => 0,
    };
    let timeout = monitor.op_timeout.unwrap_or(Monitor::OP_TIMEOUT);
    Duration::from_secs(u64::from(timeout) + u64::from(check)) + (poll * 2).max(Duration::from_secs(10))
}
