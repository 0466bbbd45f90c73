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

pub mod backoff;
mod event;
mod executor;
pub mod history;
mod in_flight;
mod observed_cache;
mod overrides;
pub mod pin;
mod reconciler;
pub mod revisions;
pub mod rollback;
pub mod source;
pub mod spec_history;
pub mod status;
pub mod suspended;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

pub use self::event::ControllerEvent;
use self::event::EventSink;
use self::executor::{Executor, WorkEvent, stop_on_lease_loss};
use self::reconciler::Reconciler;
use self::source::Source;
use self::spec_history::ManifestHistory;
use self::status::Row;
use crate::backend::{Backend, ChangeStream};
use crate::clock;
use crate::execute::world::Observation;
use crate::execute::{ActiveHolds, ExecutionContext, Precheck};
use crate::manifest::Limits;
use crate::model::{
    Desired, DesiredInstance, Hold, InstanceKey, Observed, ObservedInstance, Pause, Plan, ProcessKey, Step,
    Time,
};
use crate::reconcile::{Caps, Rules};
use crate::store::keeping::{LEASE_TTL, RENEW_INTERVAL};
use crate::store::{Holder, Lease, LeaseAttempt, Store};

/// What is to be watched over, and how.
pub struct ControllerConfig {
    pub rules: Rules,
    /// Take new revisions.
    pub follow: bool,
    /// Repair what differs though the manifests did not change.
    pub heal: bool,
    /// How often to look without a reason.
    pub interval: Duration,
    /// How long a pass may take.
    pub timeout: Duration,
    pub check: Precheck,
    /// Whoever wants a look at once says so here.
    pub trigger: Arc<Notify>,
    /// Where the manifests come from, as it is remembered.
    pub source: String,
    /// Whom processes run as where nobody says.
    pub user: Option<String>,
    pub limits: Limits,
    /// Where older manifests are.
    pub manifest_history: ManifestHistory,
}

/// One look at the target, and what follows from it.
#[derive(Debug)]
pub struct PassResult {
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
    fn set_generation(&self, generation: u64);
    fn name(&self) -> &str;
    fn observe(
        &self,
        desired: &Desired,
        prune: bool,
    ) -> impl Future<Output = Result<Observation, String>> + Send;
    /// The same, and from there on what changes, where the target tells.
    fn observe_and_watch(
        &self,
        desired: &Desired,
        prune: bool,
    ) -> impl Future<Output = Result<(Observation, Option<ChangeStream>), String>> + Send {
        async move { Ok((self.observe(desired, prune).await?, None)) }
    }
    /// This moment.
    fn now(&self) -> Time {
        clock::now()
    }
    fn active_holds(&self) -> impl Future<Output = Result<(Vec<Hold>, Vec<Pause>), String>> + Send;
}

/// Nothing is looked at more often than this.
const MIN_PASS_INTERVAL: Duration = Duration::from_millis(10);

/// What is told one after the other is looked at together.
const CHANGE_DEBOUNCE: Duration = Duration::from_millis(30);

/// What ends one after the other while more of it is under way is looked at together, too: the longer looks take, the
/// fewer of them.
const MAX_RESULT_DEBOUNCE: Duration = Duration::from_millis(500);
const RESULT_DEBOUNCE_FACTOR: u32 = 10;

/// Goes on until told to stop.
pub async fn run<T: Target>(
    config: &ControllerConfig,
    source: &mut Source,
    target: &T,
    stop: watch::Receiver<bool>,
    told: &mut (dyn FnMut(ControllerEvent<'_>) + Send),
) {
    let events = &EventSink::new(told);
    let (orders, ordered) = mpsc::unbounded_channel();
    let (reports, reported) = mpsc::unbounded_channel();
    let (halt, halted) = watch::channel(false);
    let crew = Executor { config, target, events, halt: halted, reports };
    let pass = Reconciler::new(config, target, events, orders);
    let standing = ControlLoop {
        config,
        target,
        events,
        halt,
        reported,
        pass,
        took: Duration::ZERO,
        last_pass_at: None,
        due: None,
    };
    tokio::join!(crew.work(ordered), standing.run_loop(source, stop));
}

/// Who passes, and when.
struct ControlLoop<'a, T> {
    config: &'a ControllerConfig,
    target: &'a T,
    events: &'a EventSink<'a>,
    /// Lets everything that is under way come to its end.
    halt: watch::Sender<bool>,
    reported: mpsc::UnboundedReceiver<WorkEvent>,
    pass: Reconciler<'a, T>,
    /// How long the last pass took.
    took: Duration,
    /// When the last pass began; `None`: it is to be looked at again at once.
    last_pass_at: Option<Instant>,
    /// Something was told: when to look.
    due: Option<Instant>,
}

impl<T: Target> ControlLoop<'_, T> {
    async fn run_loop(mut self, source: &mut Source, mut stop: watch::Receiver<bool>) {
        let holder = Holder::this(format!("watch-{}-{}", std::process::id(), clock::now().0));
        let (state, owner) = (self.target.state(), &self.config.rules.owner);
        let Some(mut leader) = self.acquire_leadership(&holder, &mut stop).await else { return };
        let mut renewed = Instant::now();
        while !*stop.borrow() {
            if renewed.elapsed() >= RENEW_INTERVAL {
                renewed = Instant::now();
                // It ran out, while the target did not answer, say: whoever has it now leads.
                if matches!(state.renew_lease(&leader, LEASE_TTL).await, Ok(false)) {
                    self.halt.send_replace(true);
                }
                if self.pass.holds_or_pin_changed().await {
                    self.last_pass_at = None;
                }
            }
            if *self.halt.borrow() {
                self.drain().await;
                match self.acquire_leadership(&holder, &mut stop).await {
                    Some(again) => leader = again,
                    None => return,
                }
                self.halt.send_replace(false);
                renewed = Instant::now();
                source.reset();
                self.pass.reset();
                self.last_pass_at = None;
            }
            if self.is_pass_due(source) {
                self.pass.leader = Some(leader.clone());
                // A look may take longer than a lease lives.
                let halt = self.halt.clone();
                stop_on_lease_loss(state, &leader, stop.clone(), &halt, self.pass_once(source)).await;
            }
            self.events.emit(ControllerEvent::Tick);
            let wants = |key: &InstanceKey| source.wants(key);
            let cares = |key: &InstanceKey, seen: Option<&ObservedInstance>| {
                wants(key) || seen.is_some_and(|seen| seen.owner.as_deref() == Some(owner))
            };
            tokio::select! {
                () = tokio::time::sleep(self.idle_timeout(source)) => {}
                () = source.wait_for_signal() => {}
                () = self.pass.observed_cache.wait_for_change(cares) => self.schedule_pass(CHANGE_DEBOUNCE),
                Some(report) = self.reported.recv() => self.handle_work_events(report).await,
                () = self.config.trigger.notified() => {
                    // Wherever the manifests come from, too.
                    source.trigger().now();
                    self.last_pass_at = None;
                }
                _ = async { let _ = stop.wait_for(|stop| *stop).await; } => break,
            }
            self.pass.emit_relaunched();
        }
        self.drain().await;
        let _ = state.release_lease(&leader).await;
    }

    /// Is there a reason to look?
    fn is_pass_due(&mut self, source: &mut Source) -> bool {
        let changed = source.changed();
        let is_told = self.due.take_if(|due| *due <= Instant::now()).is_some();
        let is_time = self.last_pass_at.is_none_or(|last| last.elapsed() >= self.config.interval);
        changed || is_told || is_time || self.pass.is_due()
    }

    async fn pass_once(&mut self, source: &mut Source) {
        let began = Instant::now();
        self.last_pass_at = Some(began);
        self.events.emit(ControllerEvent::PassStarted);
        if self.pass.run(source).await {
            self.last_pass_at = None;
        }
        self.took = began.elapsed();
        self.events.emit(ControllerEvent::PassFinished { took: self.took });
    }

    /// How long to wait, if nothing happens.
    fn idle_timeout(&self, source: &Source) -> Duration {
        let now = Instant::now();
        let due = self.due.map_or(RENEW_INTERVAL, |due| due.saturating_duration_since(now));
        let rest = source.wait().min(Duration::from_millis(500)).min(due);
        // How it is now is looked at without waiting for a reason.
        if self.last_pass_at.is_none() { rest.min(MIN_PASS_INTERVAL) } else { rest }
    }

    fn schedule_pass(&mut self, soon: Duration) {
        let then = Instant::now() + soon;
        self.due = Some(self.due.map_or(then, |due| due.min(then)));
    }

    /// Takes in what became of an order, and of others that came to their end meanwhile.
    async fn handle_work_events(&mut self, report: WorkEvent) {
        let mut reports = vec![report];
        while let Ok(report) = self.reported.try_recv() {
            reports.push(report);
        }
        match self.pass.handle_work_events(reports).await {
            true => self.last_pass_at = None,
            false => self.schedule_pass(
                (self.took * RESULT_DEBOUNCE_FACTOR).clamp(CHANGE_DEBOUNCE, MAX_RESULT_DEBOUNCE),
            ),
        }
    }

    /// Lets what was sent come to its end.
    async fn drain(&mut self) {
        self.halt.send_replace(true);
        while !self.pass.in_flight.is_empty()
            && let Some(report) = self.reported.recv().await
        {
            self.pass.handle_work_events(vec![report]).await;
        }
        self.pass.persist_suspended().await;
    }

    async fn acquire_leadership(&self, holder: &Holder, stop: &mut watch::Receiver<bool>) -> Option<Lease> {
        let (state, place) = (self.target.state(), format!("leader/{}", self.config.rules.owner));
        let mut said = false;
        loop {
            match state.take_lease(&place, holder, LEASE_TTL).await {
                Ok(LeaseAttempt::Ours(lease)) => {
                    self.events.emit(ControllerEvent::Leading { generation: lease.generation });
                    return Some(lease);
                }
                Ok(LeaseAttempt::Theirs { holder, .. }) if !std::mem::replace(&mut said, true) => {
                    self.events.emit(ControllerEvent::Waiting { holder: &holder });
                }
                Ok(LeaseAttempt::Theirs { .. }) => {}
                Err(error) => self.events.emit(ControllerEvent::Failure { why: &error.to_string() }),
            }
            self.events.emit(ControllerEvent::Tick);
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(500)) => {}
                _ = async { let _ = stop.wait_for(|stop| *stop).await; } => return None,
            }
        }
    }
}

/// What a plan for these manifests is carried out under, as far as they and a look say.
pub fn execution_context(
    desired: &Desired,
    observed: &Observed,
    plan: &Plan,
    stop: watch::Receiver<bool>,
) -> ExecutionContext {
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
    let is_rolled = |want: &DesiredInstance| rolled.contains(&want.origin.declared);
    let all = desired.instances.iter().filter(|_| !rolled.is_empty());
    for (key, want) in all.filter(|(_, want)| is_rolled(want)) {
        if let (false, Some(seen)) = (want.origin.rollout.is_none(), observed.instances.get(key)) {
            before.entry(key.clone()).or_insert_with(|| seen.clone());
            declared.entry(key.clone()).or_insert_with(|| want.origin.declared.clone());
        }
    }
    ExecutionContext {
        owner: String::new(),
        target: String::new(),
        caps: Caps::LOCAL,
        run: new_run_id(),
        deadline: Instant::now(),
        max_parallel: 1000,
        depends,
        declared,
        before,
        check: |_| None,
        restraints: watch::channel(ActiveHolds::default()).1,
        stop,
    }
}

/// No two have the same, however soon one comes after the other.
fn new_run_id() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let nth = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("{:013}-{}-{nth}", clock::now().0, std::process::id())
}
