//! Controller: a level-triggered loop that observes, plans and executes until it is stopped.
//!
//! # Theory of operation
//!
//! A trigger (a changed file, a new commit, a change at the target, the interval) only requests a pass. Every pass
//! ([`reconciler`]) reads the manifests ([`source`]: the last good version replaces broken files) and observes the
//! target ([`ObservedCache`](crate::observe::ObservedCache): incrementally, where the target streams changes). It then plans with the pure core,
//! dispatches the steps, and reports held instances. Passes run one at a time and do not wait for dispatched work: an
//! [`executor`] runs independent components concurrently, like `apply`. Later passes skip instances that are
//! [`in_flight`]; there is at most one run per instance.
//!
//! A failed instance backs off, longer after each failure ([`backoff`]); a new manifest revision resets that. Only
//! the leader acts: a second controller waits for the lease.
//!
//! Active revisions are stored ([`stored_revisions`]), so that `rollback` can return to them. A pinned revision ([`pin`])
//! overrides the source. Both belong to the [`engine`](crate::engine), which `apply` uses, too.
//!
//! Every [`ControllerEvent`] goes to a closure; [`status`] derives the current state from them.

pub mod backoff;
mod event;
mod executor;
mod in_flight;
mod published;
mod reconciler;
mod repeated_operations;
pub mod spec_history;
pub mod status;
pub mod suspended;
#[cfg(test)]
pub mod testing;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, mpsc, watch};
use tokio::time::Instant;

pub use self::event::ControllerEvent;
use self::event::EventSink;
use self::executor::{Executor, WorkEvent, stop_on_lease_loss};
use self::reconciler::Reconciler;
use self::spec_history::ManifestHistory;
use self::status::Row;
use crate::clock;
use crate::contract::PublishedStatus;
use crate::engine::published_status::Publisher;
use crate::execute::Precheck;
use crate::ids;
use crate::manifest::Limits;
use crate::model::{Desired, Hold, InstanceKey, ManifestRevision, Observed, ObservedInstance, Pause, Plan};
pub use crate::observe::Target;
use crate::reconcile::Rules;
use crate::source::Source;
use crate::store::lease::{LEASE_TTL, RENEW_INTERVAL};
use crate::store::{Holder, Lease, LeaseAttempt, Store, keys};

/// Configuration of a controller.
pub struct ControllerConfig {
    pub rules: Rules,
    /// Apply new revisions.
    pub follow: bool,
    /// Repair drift.
    pub heal: bool,
    /// Interval between full passes.
    pub interval: Duration,
    /// Maximum duration of a pass.
    pub timeout: Duration,
    pub check: Precheck,
    /// Requests a pass at once.
    pub trigger: Arc<Notify>,
    pub manifests: ManifestConfig,
    /// Routes of `notify` whose last delivery failed, for the published status.
    pub notify_failures: watch::Receiver<Vec<String>>,
}

/// Origin of manifests, and limits of reads.
pub struct ManifestConfig {
    /// The source, as it is recorded.
    pub source: String,
    /// Default user of processes.
    pub default_user: Option<String>,
    pub limits: Limits,
    /// Location of older manifests.
    pub history: ManifestHistory,
}

/// Holds and pauses that have not expired.
pub type HoldsAndPauses = (Vec<Hold>, Vec<Pause>);

/// Result of one pass: the observation and its plan.
#[derive(Debug)]
pub struct PassResult {
    pub revision: ManifestRevision,
    pub desired: Arc<Desired>,
    pub observed: Arc<Observed>,
    /// As of this pass: with holds, pauses and backoff.
    pub rules: Rules,
    /// Instances that back off or do not converge.
    pub backing_off: Vec<Hold>,
    pub plan: Plan,
    /// Built on demand: most results are never displayed.
    rows: OnceLock<Vec<Row>>,
}

/// Minimum interval between passes.
const MIN_PASS_INTERVAL: Duration = Duration::from_millis(10);

/// Streamed changes within this time share one pass.
const CHANGE_DEBOUNCE: Duration = Duration::from_millis(30);

/// Upper limit for collecting results of running steps before a pass: the longer passes take, the fewer there are.
const MAX_RESULT_DEBOUNCE: Duration = Duration::from_millis(500);
const RESULT_DEBOUNCE_FACTOR: u32 = 10;

/// Runs until `stop` is set.
pub async fn run<T: Target>(
    config: &ControllerConfig,
    source: &mut Source,
    target: &T,
    stop: watch::Receiver<bool>,
    on_event: &mut (dyn FnMut(ControllerEvent<'_>) + Send),
) {
    let published = Mutex::new(published::initial(config));
    let mut on_event = |event: ControllerEvent<'_>| {
        published::record(&mut published.lock().unwrap_or_else(PoisonError::into_inner), &event);
        on_event(event);
    };
    let events = &EventSink::new(&mut on_event);
    let (work_items, work_queue) = mpsc::unbounded_channel();
    let (work_events, work_results) = mpsc::unbounded_channel();
    let (halt, halted) = watch::channel(false);
    let executor = Executor { config, target, events, halt: halted, work_events };
    let pass = Reconciler::new(config, target, events, work_items);
    let control_loop = ControlLoop {
        config,
        target,
        events,
        halt,
        work_results,
        pass,
        took: Duration::ZERO,
        last_pass_at: None,
        due: None,
        published: &published,
        publisher: Publisher::default(),
    };
    tokio::join!(executor.work(work_queue), control_loop.run_loop(source, stop));
}

/// The loop that schedules passes.
struct ControlLoop<'a, T> {
    config: &'a ControllerConfig,
    target: &'a T,
    events: &'a EventSink<'a>,
    /// Stops all work in flight at the next safe point.
    halt: watch::Sender<bool>,
    work_results: mpsc::UnboundedReceiver<WorkEvent>,
    pass: Reconciler<'a, T>,
    /// Duration of the last pass.
    took: Duration,
    /// Start of the last pass; `None`: a pass is due at once.
    last_pass_at: Option<Instant>,
    /// When streamed changes require a pass.
    due: Option<Instant>,
    /// The status for other commands.
    published: &'a Mutex<PublishedStatus>,
    publisher: Publisher,
}

impl<T: Target> ControlLoop<'_, T> {
    async fn run_loop(mut self, source: &mut Source, mut stop: watch::Receiver<bool>) {
        let holder = Holder::this(ids::holder_id("watch", clock::now()));
        let (state, owner) = (self.target.state(), &self.config.rules.owner);
        let Some(mut leader) = self.acquire_leadership(&holder, &mut stop).await else { return };
        let mut renewed = Instant::now();
        while !*stop.borrow() {
            if renewed.elapsed() >= RENEW_INTERVAL {
                renewed = Instant::now();
                // The lease expired, for example while the target did not reply: its new holder leads.
                if matches!(state.renew_lease(&leader, LEASE_TTL).await, Ok(false)) {
                    self.halt.send_replace(true);
                }
                if self.pass.decisions_changed().await {
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
                self.publisher.reset();
                self.last_pass_at = None;
            }
            if self.is_pass_due(source) {
                // An observation may take longer than the lease TTL.
                let halt = self.halt.clone();
                let pass = self.pass_once(source, leader.clone());
                stop_on_lease_loss(state, &leader, stop.clone(), &halt, pass).await;
            }
            self.publish().await;
            self.events.emit(ControllerEvent::Tick);
            let wants = |key: &InstanceKey| source.wants(key);
            let cares = |key: &InstanceKey, seen: Option<&ObservedInstance>| {
                wants(key) || seen.is_some_and(|seen| seen.owner.as_deref() == Some(owner))
            };
            tokio::select! {
                () = tokio::time::sleep(self.idle_timeout(source)) => {}
                () = source.wait_for_signal() => {}
                () = self.pass.observed_cache.wait_for_change(cares) => self.schedule_pass(CHANGE_DEBOUNCE),
                Some(report) = self.work_results.recv() => self.handle_work_events(report).await,
                () = self.config.trigger.notified() => {
                    // The source is polled, too.
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

    /// Publishes the status for other commands, if it changed.
    async fn publish(&mut self) {
        let mut status = self.published.lock().unwrap_or_else(PoisonError::into_inner).clone();
        status.notify_failures.clone_from(&self.config.notify_failures.borrow());
        self.publisher.publish(self.target.state(), status).await;
    }

    /// Whether a pass is due.
    fn is_pass_due(&mut self, source: &mut Source) -> bool {
        let changed = source.changed();
        let is_change_due = self.due.take_if(|due| *due <= Instant::now()).is_some();
        let is_time = self.last_pass_at.is_none_or(|last| last.elapsed() >= self.config.interval);
        changed || is_change_due || is_time || self.pass.is_due()
    }

    async fn pass_once(&mut self, source: &mut Source, leader: Lease) {
        let began = Instant::now();
        self.last_pass_at = Some(began);
        self.events.emit(ControllerEvent::PassStarted);
        if self.pass.run(source, leader).await {
            self.last_pass_at = None;
        }
        self.took = began.elapsed();
        self.events.emit(ControllerEvent::PassFinished { took: self.took });
    }

    /// Time until the next pass, without a trigger.
    fn idle_timeout(&self, source: &Source) -> Duration {
        let now = Instant::now();
        let due = self.due.map_or(RENEW_INTERVAL, |due| due.saturating_duration_since(now));
        let rest = source.wait().min(Duration::from_millis(500)).min(due);
        // A due pass starts without waiting for a trigger.
        if self.last_pass_at.is_none() { rest.min(MIN_PASS_INTERVAL) } else { rest }
    }

    fn schedule_pass(&mut self, delay: Duration) {
        let then = Instant::now() + delay;
        self.due = Some(self.due.map_or(then, |due| due.min(then)));
    }

    /// Handles the events of a work item, and those that arrived with it.
    async fn handle_work_events(&mut self, report: WorkEvent) {
        let mut work_events = vec![report];
        while let Ok(report) = self.work_results.try_recv() {
            work_events.push(report);
        }
        match self.pass.handle_work_events(work_events).await {
            true => self.last_pass_at = None,
            false => self.schedule_pass(
                (self.took * RESULT_DEBOUNCE_FACTOR).clamp(CHANGE_DEBOUNCE, MAX_RESULT_DEBOUNCE),
            ),
        }
    }

    /// Lets dispatched work finish.
    async fn drain(&mut self) {
        self.halt.send_replace(true);
        while !self.pass.in_flight.is_empty()
            && let Some(report) = self.work_results.recv().await
        {
            self.pass.handle_work_events(vec![report]).await;
        }
        self.pass.store_suspended().await;
    }

    async fn acquire_leadership(&self, holder: &Holder, stop: &mut watch::Receiver<bool>) -> Option<Lease> {
        let (state, name) = (self.target.state(), keys::leader_lease_name(&self.config.rules.owner));
        let mut has_reported = false;
        loop {
            match state.take_lease(&name, holder, LEASE_TTL).await {
                Ok(LeaseAttempt::Acquired(lease)) => {
                    self.events.emit(ControllerEvent::Leading { generation: lease.generation });
                    return Some(lease);
                }
                Ok(LeaseAttempt::HeldByOther { holder, .. })
                    if !std::mem::replace(&mut has_reported, true) =>
                {
                    self.events.emit(ControllerEvent::Waiting { holder: &holder });
                }
                Ok(LeaseAttempt::HeldByOther { .. }) => {}
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
