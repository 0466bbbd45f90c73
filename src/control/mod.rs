//! The standing loop: look, plan, do, wait for a reason to look again.
//!
//! # Theory of operation
//! Level-triggered: a trigger (a file that changed, a new commit, something that the target tells, the interval) only says
//! "look". Every [`pass`] reads the manifests ([`source`]: what is broken stays as it last was), looks at the target
//! ([`sight`]: at what changed, where the target tells), plans with the pure core, hands over what is to be done, and tells
//! what it left alone and why. One pass at a time, and none waits for what it handed over: a [`crew`] carries it out like
//! `apply`, part by part, side by side. What is [`under_way`] is left alone by later passes until it is over; there is never
//! more than one run for an instance.
//!
//! What failed is left alone for a while, longer each time ([`patience`]); a new revision of the manifests begins anew.
//! Only the leader acts: a second controller waits for the lease.
//!
//! What is taken is kept ([`snapshot`]), so that it can be gone back to; a revision that a person pinned ([`pin`]) stands in
//! for what the source says ([`back`]).
//!
//! Every [`Event`] is told to a closure; [`board`] keeps from them what is known now, for whoever asks.

mod back;
pub mod board;
mod crew;
mod event;
pub mod history;
pub mod left;
pub mod old_specs;
mod pass;
pub mod patience;
pub mod pin;
pub mod rollback;
mod sight;
pub mod snapshot;
pub mod source;
mod under_way;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

use self::board::Row;
use self::crew::{Crew, Report, ending};
pub use self::event::Event;
use self::event::Teller;
use self::old_specs::Past;
use self::pass::Pass;
use self::source::Source;
use crate::backend::{Backend, Changes};
use crate::clock;
use crate::execute::world::World;
use crate::execute::{Check, Restraints, Terms};
use crate::manifest::Limits;
use crate::model::{Desired, Hold, InstanceKey, Observed, Pause, Plan, ProcessKey, Seen, Step, Time, Want};
use crate::reconcile::{Caps, Rules};
use crate::store::keeping::{LIVES, RENEWED};
use crate::store::{Holder, Lease, Store, Taken};

/// What is to be watched over, and how.
pub struct Setting {
    pub rules: Rules,
    /// Take new revisions.
    pub follow: bool,
    /// Repair what differs though the manifests did not change.
    pub heal: bool,
    /// How often to look without a reason.
    pub interval: Duration,
    /// How long a pass may take.
    pub timeout: Duration,
    pub check: Check,
    /// Whoever wants a look at once says so here.
    pub look_now: Arc<Notify>,
    /// Where the manifests come from, as it is remembered.
    pub source: String,
    /// Whom processes run as where nobody says.
    pub user: Option<String>,
    pub limits: Limits,
    /// Where older manifests are.
    pub past: Past,
}

/// One look at the target, and what follows from it.
#[derive(Debug)]
pub struct Look {
    pub revision: String,
    pub desired: Arc<Desired>,
    pub observed: Arc<Observed>,
    /// As they held at this look: with holds, pauses and back-off.
    pub rules: Rules,
    /// What is left alone because it failed, or does not stay as it is made.
    pub backing_off: Vec<Hold>,
    pub plan: Plan,
    /// For whoever asks; most looks are never shown.
    rows: OnceLock<Vec<Row>>,
}

/// A target, as the loop needs it.
pub trait Target: Send + Sync {
    type Backend: Backend;
    type State: Store;

    fn backend(&self) -> &Self::Backend;
    fn state(&self) -> &Self::State;
    /// Calls carry this number from here on.
    fn act_as(&self, generation: u64);
    fn name(&self) -> &str;
    fn look(&self, desired: &Desired, prune: bool) -> impl Future<Output = Result<World, String>> + Send;
    /// The same, and from there on what changes, where the target tells.
    fn follow(
        &self,
        desired: &Desired,
        prune: bool,
    ) -> impl Future<Output = Result<(World, Option<Changes>), String>> + Send {
        async move { Ok((self.look(desired, prune).await?, None)) }
    }
    /// This moment.
    fn now(&self) -> Time {
        clock::moment()
    }
    fn restraints(&self) -> impl Future<Output = Result<(Vec<Hold>, Vec<Pause>), String>> + Send;
}

/// Nothing is looked at more often than this.
const AT_ONCE: Duration = Duration::from_millis(10);

/// What is told one after the other is looked at together.
const TOGETHER: Duration = Duration::from_millis(30);

/// What ends one after the other while more of it is under way is looked at together, too: the longer looks take, the
/// fewer of them.
const BESIDE: Duration = Duration::from_millis(500);
const AT_LEISURE: u32 = 10;

/// Goes on until told to stop.
pub async fn run<T: Target>(
    setting: &Setting,
    source: &mut Source,
    target: &T,
    stop: watch::Receiver<bool>,
    told: &mut (dyn FnMut(Event<'_>) + Send),
) {
    let teller = &Teller::new(told);
    let (orders, ordered) = mpsc::unbounded_channel();
    let (reports, reported) = mpsc::unbounded_channel();
    let (halt, halted) = watch::channel(false);
    let crew = Crew { setting, target, teller, halt: halted, reports };
    let pass = Pass::new(setting, target, teller, orders);
    let standing = Standing {
        setting,
        target,
        teller,
        halt,
        reported,
        pass,
        took: Duration::ZERO,
        looked: None,
        due: None,
    };
    tokio::join!(crew.work(ordered), standing.go_on(source, stop));
}

/// Who passes, and when.
struct Standing<'a, T> {
    setting: &'a Setting,
    target: &'a T,
    teller: &'a Teller<'a>,
    /// Lets everything that is under way come to its end.
    halt: watch::Sender<bool>,
    reported: mpsc::UnboundedReceiver<Report>,
    pass: Pass<'a, T>,
    /// How long the last pass took.
    took: Duration,
    /// When the last pass began; `None`: it is to be looked at again at once.
    looked: Option<Instant>,
    /// Something was told: when to look.
    due: Option<Instant>,
}

impl<T: Target> Standing<'_, T> {
    async fn go_on(mut self, source: &mut Source, mut stop: watch::Receiver<bool>) {
        let holder = Holder::this(format!("watch-{}-{}", std::process::id(), clock::moment().0));
        let (state, owner) = (self.target.state(), &self.setting.rules.owner);
        let Some(mut leader) = self.lead(&holder, &mut stop).await else { return };
        let mut renewed = Instant::now();
        while !*stop.borrow() {
            if renewed.elapsed() >= RENEWED {
                renewed = Instant::now();
                // It ran out, while the target did not answer, say: whoever has it now leads.
                if matches!(state.renew_lease(&leader, LIVES).await, Ok(false)) {
                    self.halt.send_replace(true);
                }
                if self.pass.is_told_otherwise().await {
                    self.looked = None;
                }
            }
            if *self.halt.borrow() {
                self.come_to_an_end().await;
                match self.lead(&holder, &mut stop).await {
                    Some(again) => leader = again,
                    None => return,
                }
                self.halt.send_replace(false);
                renewed = Instant::now();
                source.forget();
                self.pass.forget();
                self.looked = None;
            }
            if self.is_time(source) {
                self.pass.leader = Some(leader.clone());
                // A look may take longer than a lease lives.
                let halt = self.halt.clone();
                ending(state, &leader, stop.clone(), &halt, self.pass_once(source)).await;
            }
            self.teller.tell(Event::Turned);
            let wants = |key: &InstanceKey| source.wants(key);
            let cares = |key: &InstanceKey, seen: Option<&Seen>| {
                wants(key) || seen.is_some_and(|seen| seen.owner.as_deref() == Some(owner))
            };
            tokio::select! {
                () = tokio::time::sleep(self.rest(source)) => {}
                () = source.woken() => {}
                () = self.pass.sight.told(cares) => self.look_within(TOGETHER),
                Some(report) = self.reported.recv() => self.hear(report).await,
                () = self.setting.look_now.notified() => {
                    // Wherever the manifests come from, too.
                    source.nudge().now();
                    self.looked = None;
                }
                _ = async { let _ = stop.wait_for(|stop| *stop).await; } => break,
            }
            self.pass.tell_relaunched();
        }
        self.come_to_an_end().await;
        let _ = state.release_lease(&leader).await;
    }

    /// Is there a reason to look?
    fn is_time(&mut self, source: &mut Source) -> bool {
        let changed = source.changed();
        let is_told = self.due.take_if(|due| *due <= Instant::now()).is_some();
        let is_time = self.looked.is_none_or(|last| last.elapsed() >= self.setting.interval);
        changed || is_told || is_time || self.pass.is_due()
    }

    async fn pass_once(&mut self, source: &mut Source) {
        let began = Instant::now();
        self.looked = Some(began);
        self.teller.tell(Event::Passing);
        if self.pass.run(source).await {
            self.looked = None;
        }
        self.took = began.elapsed();
        self.teller.tell(Event::Passed { took: self.took });
    }

    /// How long to wait, if nothing happens.
    fn rest(&self, source: &Source) -> Duration {
        let now = Instant::now();
        let due = self.due.map_or(RENEWED, |due| due.saturating_duration_since(now));
        let rest = source.wait().min(Duration::from_millis(500)).min(due);
        // How it is now is looked at without waiting for a reason.
        if self.looked.is_none() { rest.min(AT_ONCE) } else { rest }
    }

    fn look_within(&mut self, soon: Duration) {
        let then = Instant::now() + soon;
        self.due = Some(self.due.map_or(then, |due| due.min(then)));
    }

    /// Takes in what became of an order, and of others that came to their end meanwhile.
    async fn hear(&mut self, report: Report) {
        let mut reports = vec![report];
        while let Ok(report) = self.reported.try_recv() {
            reports.push(report);
        }
        match self.pass.hear(reports).await {
            true => self.looked = None,
            false => self.look_within((self.took * AT_LEISURE).clamp(TOGETHER, BESIDE)),
        }
    }

    /// Lets what was sent come to its end.
    async fn come_to_an_end(&mut self) {
        self.halt.send_replace(true);
        while !self.pass.under_way.is_empty()
            && let Some(report) = self.reported.recv().await
        {
            self.pass.hear(vec![report]).await;
        }
        self.pass.keep_left().await;
    }

    async fn lead(&self, holder: &Holder, stop: &mut watch::Receiver<bool>) -> Option<Lease> {
        let (state, place) = (self.target.state(), format!("leader/{}", self.setting.rules.owner));
        let mut said = false;
        loop {
            match state.take_lease(&place, holder, LIVES).await {
                Ok(Taken::Ours(lease)) => {
                    self.teller.tell(Event::Leading { generation: lease.generation });
                    return Some(lease);
                }
                Ok(Taken::Theirs { holder, .. }) if !std::mem::replace(&mut said, true) => {
                    self.teller.tell(Event::Waiting { holder: &holder });
                }
                Ok(Taken::Theirs { .. }) => {}
                Err(error) => self.teller.tell(Event::Trouble { why: &error.to_string() }),
            }
            self.teller.tell(Event::Turned);
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(500)) => {}
                _ = async { let _ = stop.wait_for(|stop| *stop).await; } => return None,
            }
        }
    }
}

/// What a plan for these manifests is carried out under, as far as they and a look say.
pub fn terms(desired: &Desired, observed: &Observed, plan: &Plan, stop: watch::Receiver<bool>) -> Terms {
    let (mut depends, mut declared) = (BTreeMap::new(), BTreeMap::new());
    for key in plan.steps().map(|step| &step.instance) {
        let Some(want) = desired.instances.get(key) else { continue };
        declared.insert(key.clone(), want.origin.declared.clone());
        depends.entry(want.origin.declared.clone()).or_insert_with(|| want.origin.depends_on.clone());
    }
    let row = |step: &Step| Some((step.instance.clone(), observed.instances.get(&step.instance)?.clone()));
    let mut before: BTreeMap<_, _> = plan.steps().filter_map(row).collect();
    // A rollback concerns all of a process.
    let rolled: BTreeSet<&ProcessKey> =
        plan.waves.iter().flat_map(|wave| &wave.gates).map(|gate| &gate.process).collect();
    let is_rolled = |want: &Want| rolled.contains(&want.origin.declared);
    let all = desired.instances.iter().filter(|_| !rolled.is_empty());
    for (key, want) in all.filter(|(_, want)| is_rolled(want)) {
        if let (false, Some(seen)) = (want.origin.rollout.is_none(), observed.instances.get(key)) {
            before.entry(key.clone()).or_insert_with(|| seen.clone());
            declared.entry(key.clone()).or_insert_with(|| want.origin.declared.clone());
        }
    }
    Terms {
        owner: String::new(),
        target: String::new(),
        caps: Caps::LOCAL,
        run: name_of_run(),
        deadline: Instant::now(),
        max_parallel: 1000,
        depends,
        declared,
        before,
        check: |_| None,
        restraints: watch::channel(Restraints::default()).1,
        stop,
    }
}

/// No two have the same, however soon one comes after the other.
fn name_of_run() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let nth = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{:013}-{}-{nth}", clock::moment().0, std::process::id())
}
