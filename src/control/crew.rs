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

use super::event::{Event, Teller};
use super::rollback::{as_before, plan_back};
use super::under_way::waits;
use super::{Setting, Target, history, terms};
use crate::clock;
use crate::execute::restraints::{Restraints, heeding};
use crate::execute::{self, Ended, Executed, Outcome, Terms, Told};
use crate::model::{Desired, InstanceKey, Observed, Plan, ProcessKey};
use crate::store::keeping::keep;
use crate::store::{Lease, Store};

/// How long a target may be out of sight before something is put back there, and how often it is looked for.
const TO_BE_SEEN: Duration = Duration::from_secs(30);
const AGAIN: Duration = Duration::from_secs(1);

/// A part of a plan that is to be carried out.
pub struct Order {
    pub number: u64,
    /// The name of its run.
    pub run: String,
    pub plan: Arc<Plan>,
    pub desired: Arc<Desired>,
    pub observed: Arc<Observed>,
    pub revision: String,
    pub commit: Option<String>,
    /// The writer's.
    pub lease: Lease,
    /// It is to come to its end.
    pub ends: watch::Sender<bool>,
}

/// What became of an order.
pub enum Report {
    /// Nothing more is done to this one; how its steps ended.
    Free {
        order: u64,
        instance: InstanceKey,
        tried: Vec<Ended>,
    },
    Over {
        order: u64,
        tried: Vec<Ended>,
        put_back: BTreeSet<ProcessKey>,
    },
}

pub struct Crew<'a, T> {
    pub setting: &'a Setting,
    pub target: &'a T,
    pub teller: &'a Teller<'a>,
    /// Everything is to come to its end.
    pub halt: watch::Receiver<bool>,
    pub reports: mpsc::UnboundedSender<Report>,
}

impl<T: Target> Crew<'_, T> {
    /// Until nobody has orders any more, and all are over.
    pub async fn work(self, mut orders: mpsc::UnboundedReceiver<Order>) {
        let (mut going, mut is_open) = (FuturesUnordered::new(), true);
        while is_open || !going.is_empty() {
            tokio::select! {
                order = orders.recv(), if is_open => match order {
                    Some(order) => going.push(self.carry_out(order)),
                    None => is_open = false,
                },
                Some(over) = going.next() => {
                    let _ = self.reports.send(over);
                }
            }
        }
    }

    async fn carry_out(&self, order: Order) -> Report {
        let (begin, state) = (Instant::now(), self.target.state());
        let Order { plan, desired, observed, lease, ends, .. } = &order;
        self.teller.tell(Event::Doing { steps: plan.steps().count() });
        let (restrain, restraints) = watch::channel(Restraints::default());
        let terms = Terms {
            run: order.run.clone(),
            restraints,
            ..self.terms(desired, observed, plan, ends.subscribe())
        };
        let mut free = Free::of(plan);
        let mut each = |said: Told<'_>| {
            self.tell(plan, &said);
            free.take(&said);
            // Where specs are not read back, the next look needs to know what was noted of it.
            if terms.caps.reads_specs || matches!(said, Told::Noted) {
                for (instance, ended) in std::mem::take(&mut free.ready) {
                    let tried = tried(ended, &terms);
                    let _ = self.reports.send(Report::Free { order: order.number, instance, tried });
                }
            }
        };
        let backend = self.target.backend();
        let executing = execute::execute(plan, backend, state, &terms, &mut each);
        let rules = &self.setting.rules;
        let working = async {
            let Executed { ended, to_roll_back } = executing.await;
            let put_back = match to_roll_back.is_empty() {
                true => BTreeSet::new(),
                false => self.roll_back(&order, &terms, &to_roll_back).await,
            };
            let failed = ended.iter().filter(|ended| !ended.outcome.is_well()).count();
            let exit = if failed == 0 { 0 } else { 3 };
            let end = json!({"exit": exit, "failed": failed, "steps": history::steps(&ended)});
            ((ended, put_back), end)
        };
        let working = heeding(&restrain, rules, || self.target.restraints(), working);
        let working = ending(state, lease, self.halt.clone(), ends, working);
        let (ended, put_back) = history::telling(state, &rules.owner, begun(&order), working).await;
        self.teller.tell(Event::Did { ended: &ended, took: begin.elapsed() });
        let left: Vec<Ended> = ended.into_iter().filter(|one| !free.is_told(&one.instance)).collect();
        Report::Over { order: order.number, tried: tried(left, &terms), put_back }
    }

    fn terms(
        &self,
        desired: &Desired,
        observed: &Observed,
        plan: &Plan,
        stop: watch::Receiver<bool>,
    ) -> Terms {
        Terms {
            owner: self.setting.rules.owner.clone(),
            target: self.target.name().to_owned(),
            caps: self.setting.rules.caps,
            deadline: Instant::now() + self.setting.timeout,
            check: self.setting.check,
            ..terms(desired, observed, plan, stop)
        }
    }

    fn tell(&self, plan: &Plan, said: &Told<'_>) {
        match said {
            Told::Ended(ended) => {
                if let Some(step) = plan.steps().find(|step| step.id == ended.step) {
                    self.teller.tell(Event::Ended { step, ended });
                }
            }
            Told::Soaking { process, secs } => self.teller.tell(Event::Soaking { process, secs: *secs }),
            Told::Wave { .. } | Told::Sent { .. } | Told::Waiting { .. } | Told::Noted => {}
        }
    }

    /// Puts processes back as they were. Those that are.
    async fn roll_back(
        &self,
        order: &Order,
        terms: &Terms,
        processes: &BTreeSet<ProcessKey>,
    ) -> BTreeSet<ProcessKey> {
        let back = as_before(&order.desired, &terms.before, processes);
        let names: Vec<String> = processes.iter().map(ToString::to_string).collect();
        let names = &names.join(", ");
        let begin = Instant::now();
        let mut observed = loop {
            match self.target.look(&back, false).await {
                Ok(world) => break world.observed,
                Err(why) if begin.elapsed() > TO_BE_SEEN || *terms.stop.borrow() => {
                    let why = format!("{names}: its rollout failed, and it is not put back: {why}");
                    self.teller.tell(Event::Trouble { why: &why });
                    return BTreeSet::new();
                }
                Err(_) => tokio::time::sleep(AGAIN).await,
            }
        };
        let now = clock::at(self.target.now(), &back);
        let plan = plan_back(&back, &mut observed, &self.setting.rules, &now);
        self.teller.tell(Event::RolledBack { processes: names, steps: plan.steps().count() });
        let again = Terms {
            run: format!("{}-back", terms.run),
            restraints: terms.restraints.clone(),
            ..self.terms(&back, &observed, &plan, terms.stop.clone())
        };
        let (backend, state) = (self.target.backend(), self.target.state());
        let mut each = |said: Told<'_>| self.tell(&plan, &said);
        let done = execute::execute(&plan, backend, state, &again, &mut each).await;
        let bad = done.ended.iter().filter(|one| !one.outcome.is_well()).map(|one| &one.instance);
        let bad = bad.chain(plan.held.iter().map(|held| &held.instance));
        let bad: BTreeSet<&ProcessKey> =
            bad.filter_map(|key| back.instances.get(key)).map(|want| &want.origin.declared).collect();
        processes.iter().filter(|process| !bad.contains(process)).cloned().collect()
    }
}

/// What the history says of it from its beginning.
fn begun(order: &Order) -> Value {
    let mut summary: BTreeMap<&str, usize> = BTreeMap::new();
    for step in order.plan.steps() {
        *summary.entry(step.op.word()).or_default() += 1;
    }
    let mut entry = json!({
        "revision": order.revision, "source": "watch", "summary": summary, "steps": history::steps_of(&order.plan),
    });
    if let Some(commit) = &order.commit {
        entry["commit"] = commit.as_str().into();
    }
    entry
}

/// What was really tried: what was never begun, because somebody wanted that, has not failed.
fn tried(ended: Vec<Ended>, terms: &Terms) -> Vec<Ended> {
    let is_left_alone = |one: &Ended| terms.restraints.borrow().means(&one.instance, None, false).is_some();
    let tried =
        |one: &Ended| one.outcome != Outcome::Skipped || !(*terms.stop.borrow() || is_left_alone(one));
    ended.into_iter().filter(tried).collect()
}

/// Which instances still have steps before them, where each is free with its own last step.
struct Free {
    left: BTreeMap<InstanceKey, (usize, Vec<Ended>)>,
    /// Nothing more is to be done to these, and nobody was told yet.
    ready: BTreeMap<InstanceKey, Vec<Ended>>,
    waits: bool,
}

impl Free {
    fn of(plan: &Plan) -> Free {
        let mut left: BTreeMap<InstanceKey, (usize, Vec<Ended>)> = BTreeMap::new();
        for step in plan.steps() {
            left.entry(step.instance.clone()).or_default().0 += 1;
        }
        Free { left, ready: BTreeMap::new(), waits: waits(plan) }
    }

    fn take(&mut self, said: &Told<'_>) {
        let Told::Ended(ended) = said else { return };
        let Some((left, all)) = self.left.get_mut(&ended.instance).filter(|_| !self.waits) else { return };
        all.push((*ended).clone());
        *left = left.saturating_sub(1);
        // Of what nobody knows, more may come: it is free when the run is over, and what it left is found out first.
        let is_known = |one: &Ended| !matches!(one.outcome, Outcome::Unknown | Outcome::TimedOut);
        if *left == 0
            && all.iter().all(is_known)
            && let Some((instance, (_, all))) = self.left.remove_entry(&ended.instance)
        {
            self.ready.insert(instance, all);
        }
    }

    fn is_told(&self, instance: &InstanceKey) -> bool {
        !self.left.contains_key(instance) && !self.ready.contains_key(instance)
    }
}

/// Does something that is to come to its end at a safe point when somebody wants that, or when the lease is lost.
pub async fn ending<S: Store, T>(
    state: &S,
    lease: &Lease,
    mut halt: watch::Receiver<bool>,
    ends: &watch::Sender<bool>,
    work: impl Future<Output = T>,
) -> T {
    let halted = async {
        let _ = halt.wait_for(|halt| *halt).await;
    };
    let lost = keep(state, lease);
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
pub async fn keeping<S: Store, T>(state: &S, lease: &Lease, work: impl Future<Output = T>) -> T {
    tokio::select! {
        done = work => done,
        never = async { keep(state, lease).await; std::future::pending::<Infallible>().await } => match never {},
    }
}
