//! From a plan to outcomes: everything that the plan says is done, once, and nothing else.
//!
//! # Theory of operation
//! Waves come one after the other. Within one, the steps of an instance run in order and instances do not wait for each
//! other: whatever is ready is sent in as few calls as the target allows, and every task is asked about until each of its
//! rows is final. A step that fails takes the rest of its instance with it, and whatever depends on it.
//!
//! Before a call is made, the journal says so ([`journal`]); its entry goes when every row is final. Whoever comes after a
//! death finds it, and waits for what was begun instead of doing it again.
//!
//! Nothing is decided here: what to do was the planner's business, and whether it worked is the next look's.

pub mod journal;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tracing::{info, warn};

use self::journal::Journal;
use crate::backend::{Answer, Backend, Fault, Order, Outcome as Said, Task};
use crate::model::{Health, InstanceKey, Op, Plan, ProcessKey, Step, Wave};
use crate::store::Store;

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    Done,
    /// Somebody had done it already.
    AlreadySo,
    Failed,
    /// It was still under way when the time was over.
    TimedOut,
    /// Nobody knows.
    Unknown,
    /// It was not begun.
    Skipped,
}

impl Outcome {
    pub const ALL: [Outcome; 6] = [
        Outcome::Done,
        Outcome::AlreadySo,
        Outcome::Failed,
        Outcome::TimedOut,
        Outcome::Unknown,
        Outcome::Skipped,
    ];

    pub fn word(self) -> &'static str {
        match self {
            Outcome::Done => "Done",
            Outcome::AlreadySo => "AlreadySo",
            Outcome::Failed => "Failed",
            Outcome::TimedOut => "TimedOut",
            Outcome::Unknown => "Unknown",
            Outcome::Skipped => "Skipped",
        }
    }

    pub fn is_well(self) -> bool {
        matches!(self, Outcome::Done | Outcome::AlreadySo)
    }
}

/// One step, ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    pub step: usize,
    pub instance: InstanceKey,
    pub op: Op,
    pub outcome: Outcome,
    pub code: i64,
    pub message: String,
    pub took_ms: u64,
}

/// What somebody who watches is told.
#[derive(Clone, Debug)]
pub enum Told<'a> {
    Wave { nth: usize, of: usize },
    Sent { steps: usize },
    Ended(&'a Ended),
    Soaking { process: &'a ProcessKey, secs: u64 },
    Waiting { left: usize, longest: Option<&'a InstanceKey> },
}

/// Under which terms it is carried out.
pub struct Terms {
    pub owner: String,
    /// Of this run: no two have the same.
    pub run: String,
    pub deadline: Instant,
    /// Most steps under way at once.
    pub max_parallel: usize,
    /// What each process depends on, by declared names, and the name that an instance is declared under.
    pub depends: BTreeMap<ProcessKey, Vec<ProcessKey>>,
    pub declared: BTreeMap<InstanceKey, ProcessKey>,
    /// Why a step that is ready would fail.
    pub check: Check,
    /// Somebody wants it to end at the next safe point.
    pub stop: watch::Receiver<bool>,
}

/// What must be so before a step: `Some` says what is not.
pub type Check = fn(&Step) -> Option<String>;

/// The most steps in one call.
const BATCH: usize = 1000;
/// From the first question about a task to the slowest pace of asking.
const POLL: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(1000));
/// How often a call that cannot have been carried out is made again.
const TRIES: u32 = 5;
/// A target that does not answer for this long is gone: what was sent is unknown.
const SILENCE: Duration = Duration::from_secs(15);
/// How long what was started may take to be well, before what depends on it begins.
const WELL: Duration = Duration::from_secs(30);

/// Carries a plan out. Every step of it is in the report.
pub async fn execute<B: Backend, S: Store>(
    plan: &Plan,
    backend: &B,
    store: &S,
    terms: &Terms,
    told: &mut (dyn FnMut(Told<'_>) + Send),
) -> Vec<Ended> {
    let mut run = Run {
        backend,
        journal: Journal::new(store, &terms.owner, &terms.run),
        terms,
        told,
        ended: Vec::new(),
        failed: BTreeSet::new(),
        failures: HashMap::new(),
        given_up: BTreeSet::new(),
        silent: None,
    };
    for (nth, wave) in plan.waves.iter().enumerate() {
        (run.told)(Told::Wave { nth: nth + 1, of: plan.waves.len() });
        run.wave(wave).await;
        if nth + 1 < plan.waves.len() && !run.is_over() {
            run.gates(wave).await;
        }
    }
    let mut ended = run.ended;
    ended.sort_by_key(|ended| ended.step);
    ended
}

struct Run<'a, B, S> {
    backend: &'a B,
    journal: Journal<'a, S>,
    terms: &'a Terms,
    told: &'a mut (dyn FnMut(Told<'_>) + Send),
    ended: Vec<Ended>,
    /// Instances of which a step did not end well.
    failed: BTreeSet<InstanceKey>,
    /// By declared name.
    failures: HashMap<ProcessKey, u64>,
    /// Processes whose rollout was ended.
    given_up: BTreeSet<ProcessKey>,
    /// Since when the target does not answer.
    silent: Option<Instant>,
}

/// Tasks that are under way.
struct Flight<'a> {
    task: Task,
    steps: HashMap<String, &'a Step>,
    begun: Instant,
    call: String,
}

impl<'a, B: Backend, S: Store> Run<'a, B, S> {
    fn is_over(&self) -> bool {
        *self.terms.stop.borrow() || Instant::now() >= self.terms.deadline
    }

    async fn wave(&mut self, wave: &Wave) {
        let mut chains: BTreeMap<&InstanceKey, VecDeque<&Step>> = BTreeMap::new();
        for step in &wave.steps {
            chains.entry(&step.instance).or_default().push_back(step);
        }
        let mut ready: VecDeque<&Step> = VecDeque::new();
        for chain in chains.values_mut() {
            ready.extend(chain.pop_front());
        }
        let mut flights: Vec<Flight<'_>> = Vec::new();
        let mut pace = POLL.0;
        loop {
            let under_way: usize = flights.iter().map(|flight| flight.steps.len()).sum();
            let room = self.terms.max_parallel.saturating_sub(under_way).min(BATCH);
            let mut batch: Vec<&Step> = Vec::new();
            while batch.len() < room
                && let Some(step) = ready.pop_front()
            {
                match self.why_not(step) {
                    None if let Some(why) = (self.terms.check)(step) => {
                        self.end(step, Outcome::Failed, 0, why, Instant::now());
                        self.skip_rest(&mut chains, step);
                    }
                    None => batch.push(step),
                    Some(why) => {
                        self.end(step, Outcome::Skipped, 0, why, Instant::now());
                        self.skip_rest(&mut chains, step);
                    }
                }
            }
            if !batch.is_empty() {
                pace = POLL.0;
                if let Some(flight) = self.send(batch, &mut chains, &mut ready).await {
                    flights.push(flight);
                }
                continue;
            }
            if flights.is_empty() {
                if ready.is_empty() {
                    return;
                }
                continue;
            }
            if Instant::now() >= self.terms.deadline {
                for flight in flights.drain(..) {
                    for step in flight.steps.into_values() {
                        let message = "it was still under way when the time was over".to_owned();
                        self.end(step, Outcome::TimedOut, 115, message, flight.begun);
                        self.skip_rest(&mut chains, step);
                    }
                }
                continue;
            }
            tokio::time::sleep(pace).await;
            pace = pace.mul_f64(1.5).min(POLL.1);
            let mut still = Vec::new();
            for mut flight in flights {
                let before = flight.steps.len();
                self.ask(&mut flight, &mut chains, &mut ready).await;
                if flight.steps.len() < before {
                    pace = POLL.0;
                }
                match flight.steps.is_empty() {
                    true => self.journal.ended(&flight.call).await,
                    false => still.push(flight),
                }
            }
            flights = still;
            let left: usize = flights.iter().map(|flight| flight.steps.len()).sum();
            let longest = flights.iter().min_by_key(|flight| flight.begun);
            let longest = longest.and_then(|flight| flight.steps.values().next()).map(|step| &step.instance);
            (self.told)(Told::Waiting { left, longest });
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

    async fn send<'s>(
        &mut self,
        batch: Vec<&'s Step>,
        chains: &mut BTreeMap<&InstanceKey, VecDeque<&'s Step>>,
        ready: &mut VecDeque<&'s Step>,
    ) -> Option<Flight<'s>> {
        let begun = Instant::now();
        let orders: Vec<Order> =
            batch.iter().map(|step| Order::of(step, step.id.to_string(), &self.terms.owner)).collect();
        let call = match self.journal.begin(&orders).await {
            Ok(call) => call,
            Err(error) => {
                for step in batch {
                    self.end(step, Outcome::Failed, 0, format!("not begun: {error}"), begun);
                    self.skip_rest(chains, step);
                }
                return None;
            }
        };
        (self.told)(Told::Sent { steps: batch.len() });
        let mut tries = 0;
        let sent = loop {
            tries += 1;
            match self.backend.submit(&call, &orders).await {
                // Under the same name it is carried out once, however often it is sent.
                Err(fault @ (Fault::NoAnswer | Fault::Unreachable(_)))
                    if tries < TRIES && Instant::now() < self.terms.deadline =>
                {
                    warn!(%fault, tries, "sent again");
                    tokio::time::sleep(POLL.0 * 4u32.pow(tries)).await;
                }
                sent => break sent,
            }
        };
        match sent {
            Ok(task) => {
                let steps = batch.into_iter().map(|step| (step.id.to_string(), step)).collect();
                let mut flight = Flight { task, steps, begun, call };
                if flight.task.ids.is_empty() {
                    self.ask(&mut flight, chains, ready).await;
                }
                if flight.steps.is_empty() {
                    self.journal.ended(&flight.call).await;
                    return None;
                }
                Some(flight)
            }
            Err(fault) => {
                let outcome = match fault {
                    Fault::NoAnswer => Outcome::Unknown,
                    Fault::Unreachable(_) | Fault::Refused(_) => Outcome::Failed,
                };
                for step in batch {
                    self.end(step, outcome, 0, fault.to_string(), begun);
                    self.skip_rest(chains, step);
                }
                if outcome == Outcome::Failed {
                    self.journal.ended(&call).await;
                }
                None
            }
        }
    }

    async fn ask<'s>(
        &mut self,
        flight: &mut Flight<'s>,
        chains: &mut BTreeMap<&InstanceKey, VecDeque<&'s Step>>,
        ready: &mut VecDeque<&'s Step>,
    ) {
        let answers = match self.backend.poll(&flight.task).await {
            Ok(answers) => answers,
            Err(fault) => {
                info!(%fault, "asked again");
                let since = *self.silent.get_or_insert_with(Instant::now);
                if since.elapsed() > SILENCE {
                    for (_, step) in std::mem::take(&mut flight.steps) {
                        self.end(step, Outcome::Unknown, 0, fault.to_string(), flight.begun);
                        self.skip_rest(chains, step);
                    }
                }
                return;
            }
        };
        self.silent = None;
        for Answer { order, result, .. } in answers {
            let (outcome, code, message) = match result {
                Said::InProgress => continue,
                Said::Done => (Outcome::Done, 0, String::new()),
                Said::Failed { code, message } => {
                    let op = flight.steps.get(&order).map(|step| step.op);
                    (understood(op, code), code, message)
                }
            };
            let Some(step) = flight.steps.remove(&order) else { continue };
            self.end(step, outcome, code, message, flight.begun);
            match outcome.is_well() {
                true => ready.extend(chains.get_mut(&step.instance).and_then(VecDeque::pop_front)),
                false => self.skip_rest(chains, step),
            }
        }
    }

    fn end(&mut self, step: &Step, outcome: Outcome, code: i64, message: String, begun: Instant) {
        let took_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (instance, op) = (step.instance.clone(), step.op);
        let ended = Ended { step: step.id, instance, op, outcome, code, message, took_ms };
        if !outcome.is_well() && self.failed.insert(step.instance.clone()) && outcome != Outcome::Skipped {
            let declared = self.terms.declared.get(&step.instance).cloned();
            *self.failures.entry(declared.unwrap_or_else(|| step.instance.process())).or_default() += 1;
        }
        (self.told)(Told::Ended(&ended));
        self.ended.push(ended);
    }

    fn skip_rest(&mut self, chains: &mut BTreeMap<&InstanceKey, VecDeque<&Step>>, after: &Step) {
        let rest = chains.get_mut(&after.instance).map(std::mem::take).unwrap_or_default();
        for step in rest {
            let why = format!("the {} before it did not end well", after.op);
            self.end(step, Outcome::Skipped, 0, why, Instant::now());
        }
    }

    /// Between two waves: what was changed must be well, and stay so for as long as its rollout says.
    async fn gates(&mut self, wave: &Wave) {
        let changed: BTreeSet<&InstanceKey> = wave
            .steps
            .iter()
            .filter(|step| {
                matches!(step.op, Op::Start | Op::Restart | Op::Reload)
                    && !self.failed.contains(&step.instance)
            })
            .map(|step| &step.instance)
            .collect();
        if changed.is_empty() {
            return;
        }
        self.wait_until_well(&changed).await;
        for gate in &wave.gates {
            if gate.soak_secs > 0 && !self.is_over() {
                (self.told)(Told::Soaking { process: &gate.process, secs: gate.soak_secs });
                let mut stop = self.terms.stop.clone();
                let soak = Duration::from_secs(gate.soak_secs);
                let left = self.terms.deadline.saturating_duration_since(Instant::now());
                tokio::select! {
                    () = tokio::time::sleep(soak.min(left)) => {}
                    _ = async { let _ = stop.wait_for(|stop| *stop).await; } => {}
                }
                let of_this = changed
                    .iter()
                    .copied()
                    .filter(|key| self.terms.declared.get(*key) == Some(&gate.process));
                let of_this: BTreeSet<&InstanceKey> = of_this.collect();
                self.count_ill(&of_this).await;
            }
            if self.failures.get(&gate.process).is_some_and(|failures| *failures > gate.max_failures) {
                self.given_up.insert(gate.process.clone());
            }
        }
    }

    async fn wait_until_well(&mut self, changed: &BTreeSet<&InstanceKey>) {
        let until = Instant::now() + WELL;
        while Instant::now() < until && !self.is_over() {
            let Ok(observed) = self.backend.observe().await else { return };
            let starting = |key: &&InstanceKey| {
                observed.instances.get(*key).is_some_and(|seen| seen.health == Health::Starting)
            };
            if !changed.iter().any(starting) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        self.count_ill(changed).await;
    }

    /// What ended well, and is not well any more, has failed after all.
    async fn count_ill(&mut self, changed: &BTreeSet<&InstanceKey>) {
        let Ok(observed) = self.backend.observe().await else { return };
        for key in changed {
            let ill = observed
                .instances
                .get(*key)
                .is_some_and(|seen| matches!(seen.health, Health::Degraded | Health::Failed));
            if ill && self.failed.insert((*key).clone()) {
                let declared = self.terms.declared.get(*key).cloned();
                *self.failures.entry(declared.unwrap_or_else(|| key.process())).or_default() += 1;
                if let Some(ended) = self.ended.iter_mut().rev().find(|ended| ended.instance == **key) {
                    (ended.outcome, ended.message) =
                        (Outcome::Failed, "it is not well afterwards".to_owned());
                }
            }
        }
    }
}

/// Some codes say that there was nothing to do.
fn understood(op: Option<Op>, code: i64) -> Outcome {
    match (op, code) {
        (Some(Op::Start), 828) | (Some(Op::Stop | Op::Kill), 829) | (Some(Op::Register), 850) => {
            Outcome::AlreadySo
        }
        _ => Outcome::Failed,
    }
}
