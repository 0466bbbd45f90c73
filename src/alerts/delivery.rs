//! Delivery: one task that evaluates the status, and one task per route that sends what is due.
//!
//! A receiver that hangs or fails delays only its own route. An attempt that failed is repeated with growing delays.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::{info, warn};

use super::conditions::Conditions;
use super::feed::AlertFeed;
use super::message::{ALERTMANAGER_REFRESH_SECS, MessageOrigin};
use super::receiver::AlertReceiver;
use super::sent_incidents;
use super::tracker::{IncidentTracker, RouteRules};
use crate::clock;
use crate::contract::{AlertKind, AlertRouteStatus};
use crate::control::status::{ControllerStatus, Role, Severity, StatusBoard};
use crate::error_chain::chain;
use crate::metrics::MetricsText;
use crate::retry_delay::RetryDelay;
use crate::store::{Error, Store};

/// Interval between evaluations of the status, and between checks of a route.
const EVALUATION_INTERVAL: Duration = Duration::from_millis(500);
/// Delays after failed attempts, and after a refusal that only a changed configuration ends.
const DELAYS: RetryDelay =
    RetryDelay::doubling(Duration::from_secs(1), Duration::from_secs(60)).with_jitter(0.2);
const REFUSED_DELAY: Duration = Duration::from_secs(300);

/// One route: a receiver, and the rules that select its incidents.
pub struct AlertRoute {
    pub name: String,
    pub receiver: AlertReceiver,
    pub rules: RouteRules,
    /// Timeout of one attempt.
    pub timeout: Duration,
}

impl AlertRoute {
    /// The rules, adapted to the receiver.
    fn effective_rules(&self) -> RouteRules {
        let mut rules = self.rules.clone();
        if self.receiver.needs_refresh() {
            let refresh = Duration::from_secs(ALERTMANAGER_REFRESH_SECS);
            rules.repeat = rules.repeat.min(refresh);
            // Alertmanager groups and rate-limits alerts itself.
            rules.interval = Duration::from_secs(1).min(rules.interval);
        }
        rules
    }
}

/// Delivery state of the routes, for status and metrics.
pub struct DeliveryBoard {
    routes: Mutex<BTreeMap<String, AlertRouteStatus>>,
    /// Number of incidents by kind, as last evaluated.
    active: Mutex<BTreeMap<AlertKind, usize>>,
    failures: watch::Sender<Vec<String>>,
}

impl Default for DeliveryBoard {
    fn default() -> DeliveryBoard {
        DeliveryBoard {
            routes: Mutex::default(),
            active: Mutex::default(),
            failures: watch::Sender::new(Vec::new()),
        }
    }
}

impl DeliveryBoard {
    fn routes(&self) -> MutexGuard<'_, BTreeMap<String, AlertRouteStatus>> {
        self.routes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn list(&self) -> Vec<AlertRouteStatus> {
        self.routes().values().cloned().collect()
    }

    /// The routes whose last attempt failed, one line each.
    pub fn failures(&self) -> watch::Receiver<Vec<String>> {
        self.failures.subscribe()
    }

    fn update(&self, route: &AlertRoute, change: impl FnOnce(&mut AlertRouteStatus)) {
        let mut routes = self.routes();
        let status = routes.entry(route.name.clone()).or_insert_with(|| AlertRouteStatus {
            route: route.name.clone(),
            to: route.receiver.shown(),
            ..AlertRouteStatus::default()
        });
        change(status);
        let line = |one: &AlertRouteStatus| Some(format!("{}: {}", one.route, one.error.as_ref()?));
        let failing: Vec<String> = routes.values().filter_map(line).collect();
        drop(routes);
        self.failures.send_if_modified(|before| {
            let is_news = *before != failing;
            *before = failing;
            is_news
        });
    }

    fn set_active(&self, conditions: &Conditions) {
        let mut counts: BTreeMap<AlertKind, usize> = BTreeMap::new();
        conditions.active.keys().for_each(|key| *counts.entry(key.kind).or_default() += 1);
        *self.active.lock().unwrap_or_else(PoisonError::into_inner) = counts;
    }

    /// Forgets routes that are no longer configured.
    fn reset(&self, routes: &[AlertRoute]) {
        self.routes().retain(|name, _| routes.iter().any(|route| route.name == *name));
        for route in routes {
            self.update(route, |status| status.to = route.receiver.shown());
        }
    }

    pub fn metrics_text(&self) -> String {
        let mut page = MetricsText::default();
        page.head("abide_alerts", "gauge", "Incidents by kind.");
        let active = self.active.lock().unwrap_or_else(PoisonError::into_inner);
        for kind in AlertKind::ALL.into_iter().filter(|kind| !kind.is_event()) {
            let n = active.get(&kind).copied().unwrap_or(0);
            page.line("abide_alerts", &[("kind", kind.word()), ("severity", kind.severity().word())], n);
        }
        drop(active);
        let routes = self.routes();
        page.head("abide_notifications_total", "counter", "Delivery attempts of alerts by route and result.");
        for route in routes.values() {
            for (result, n) in [("sent", route.sent), ("failed", route.failed)] {
                page.line("abide_notifications_total", &[("route", &route.route), ("result", result)], n);
            }
        }
        page.head("abide_notify_failing", "gauge", "1 if the last delivery attempt of the route failed.");
        for route in routes.values() {
            let failing = u8::from(route.error.is_some());
            page.line("abide_notify_failing", &[("route", &route.route)], failing);
        }
        page.into_text()
    }
}

/// The running alert tasks. Dropping this value ends them.
pub struct RunningAlerts {
    tasks: JoinSet<()>,
}

impl RunningAlerts {
    /// Ends all tasks. A message in flight is abandoned; the next start sends it.
    pub async fn stop(mut self) {
        self.tasks.shutdown().await;
    }
}

/// A route while it runs.
struct ActiveRoute<S> {
    route: AlertRoute,
    rules: RouteRules,
    tracker: Mutex<IncidentTracker>,
    state: S,
    status_board: Arc<StatusBoard>,
    deliveries: Arc<DeliveryBoard>,
    /// A message may be due.
    wake: Notify,
    /// The generation that this controller leads with; `None`: it does not lead.
    leading: watch::Receiver<Option<u64>>,
    /// The last evaluation.
    conditions: watch::Receiver<Option<Arc<Conditions>>>,
}

/// Starts the alerts of a controller.
pub fn start<S: Store + Clone>(
    routes: Vec<AlertRoute>,
    state: S,
    status_board: &Arc<StatusBoard>,
    feed: &Arc<AlertFeed>,
    deliveries: &Arc<DeliveryBoard>,
) -> RunningAlerts {
    deliveries.reset(&routes);
    let mut tasks = JoinSet::new();
    let (leads, leading) = watch::channel(None);
    let (evaluated, conditions) = watch::channel(None);
    let active = |route: AlertRoute| {
        Arc::new(ActiveRoute {
            rules: route.effective_rules(),
            route,
            tracker: Mutex::default(),
            state: state.clone(),
            status_board: Arc::clone(status_board),
            deliveries: Arc::clone(deliveries),
            wake: Notify::new(),
            leading: leading.clone(),
            conditions: conditions.clone(),
        })
    };
    let routes: Vec<Arc<ActiveRoute<S>>> = routes.into_iter().map(active).collect();
    if routes.is_empty() {
        return RunningAlerts { tasks };
    }
    for route in &routes {
        tasks.spawn(Arc::clone(route).run());
    }
    let (board, feed, deliveries) = (Arc::clone(status_board), Arc::clone(feed), Arc::clone(deliveries));
    tasks.spawn(Evaluator { board, feed, deliveries, routes, leads, evaluated }.run());
    RunningAlerts { tasks }
}

/// Evaluates the status while this controller leads.
struct Evaluator<S> {
    board: Arc<StatusBoard>,
    feed: Arc<AlertFeed>,
    deliveries: Arc<DeliveryBoard>,
    routes: Vec<Arc<ActiveRoute<S>>>,
    leads: watch::Sender<Option<u64>>,
    evaluated: watch::Sender<Option<Arc<Conditions>>>,
}

impl<S: Store> Evaluator<S> {
    async fn run(self) {
        let mut observed_before = 0;
        let mut last = None;
        let mut timer = tokio::time::interval(EVALUATION_INTERVAL);
        timer.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            timer.tick().await;
            let status = self.board.status();
            let generation = match status.role {
                Role::Leading { generation } => Some(generation),
                Role::Starting | Role::Waiting { .. } => None,
            };
            let is_new =
                self.leads.send_if_modified(|before| std::mem::replace(before, generation) != generation);
            if is_new {
                (observed_before, last) = (status.pass.observations, None);
                self.evaluated.send_replace(None);
            }
            // An observation from before this leadership is out of date.
            let is_current = status.pass.observations > observed_before;
            // Without valid manifests nothing is observed.
            let has_failed = status.trouble.is_some()
                || status.source.not_followed.is_some()
                || status.source.problems.iter().any(|one| one.severity == Severity::Error);
            let version = Some((status.pass.observations, status.number));
            if generation.is_some() && (is_current || has_failed) && version != last {
                last = version;
                self.evaluate(status, is_current);
            }
        }
    }

    fn evaluate(&self, mut status: ControllerStatus, is_current: bool) {
        if !is_current {
            status.pass.last = None;
        }
        // Rows are built here, and not while the control loop waits for the feed.
        status.rows();
        let now = clock::now();
        let conditions = Conditions::of(&status, &mut self.feed.lock(), now);
        let Some(conditions) = conditions.map(Arc::new) else { return };
        self.deliveries.set_active(&conditions);
        self.evaluated.send_replace(Some(Arc::clone(&conditions)));
        for route in &self.routes {
            route.tracker().observe(&route.rules, &conditions, now);
            route.wake.notify_one();
        }
    }
}

impl<S: Store> ActiveRoute<S> {
    fn tracker(&self) -> MutexGuard<'_, IncidentTracker> {
        self.tracker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn owner(&self) -> &str {
        &self.status_board.subject.owner
    }

    async fn run(self: Arc<Self>) {
        let mut leading = self.leading.clone();
        loop {
            if leading.wait_for(Option::is_some).await.is_err() {
                return;
            }
            let generation = *leading.borrow_and_update();
            if !self.load().await {
                tokio::time::sleep(DELAYS.first()).await;
                continue;
            }
            tokio::select! {
                () = self.send_continuously() => {}
                // Another controller leads now, and sends.
                changed = leading.wait_for(|now| *now != generation) => if changed.is_err() { return },
            }
        }
    }

    /// Loads the incidents that were sent before.
    async fn load(&self) -> bool {
        let stored = match sent_incidents::read(&self.state, self.owner(), &self.route.name).await {
            Ok(stored) => stored,
            // The gateway is of an earlier version, or the app's grant does not cover these keys.
            Err(error @ Error::Refused { .. }) => {
                let why = chain(&error);
                warn!(route = %self.route.name, %why, "sent incidents are not stored: a restart repeats them");
                BTreeMap::new()
            }
            Err(error) => {
                warn!(route = %self.route.name, why = %chain(&error), "cannot read sent incidents: retrying");
                return false;
            }
        };
        let (now, conditions) = (clock::now(), self.conditions.borrow().clone());
        let mut tracker = self.tracker();
        tracker.load(stored, now);
        if let Some(conditions) = conditions {
            tracker.observe(&self.rules, &conditions, now);
        }
        true
    }

    async fn send_continuously(&self) {
        let mut failures = 0;
        let mut store_failures = 0;
        let mut store_at = Instant::now();
        loop {
            let _ = tokio::time::timeout(EVALUATION_INTERVAL, self.wake.notified()).await;
            let delay = match self.send_next().await {
                attempt @ (Attempt::NothingDue | Attempt::Sent) => {
                    failures = 0;
                    if matches!(attempt, Attempt::Sent) || Instant::now() >= store_at {
                        store_failures = self.store(store_failures).await;
                        let delay =
                            if store_failures == 0 { Duration::ZERO } else { DELAYS.after(store_failures) };
                        store_at = Instant::now() + delay;
                    }
                    self.update_counts();
                    continue;
                }
                Attempt::Failed { may_retry: true } => {
                    failures += 1;
                    DELAYS.jittered(DELAYS.after(failures), fastrand::f64())
                }
                Attempt::Failed { may_retry: false } => REFUSED_DELAY,
            };
            tokio::time::sleep(delay).await;
        }
    }

    /// Sends the message that is due.
    async fn send_next(&self) -> Attempt {
        let AlertRoute { name, receiver, timeout, .. } = &self.route;
        let now = clock::now();
        let due = self.tracker().next_batch(&self.rules, now);
        let Some(batch) = due else {
            // The incidents that could not be delivered have ended.
            self.deliveries.update(&self.route, |status| {
                (status.error, status.failing_since) = (None, None);
            });
            return Attempt::NothingDue;
        };
        let result = receiver.send(&batch, &self.origin(), now, *timeout).await;
        let (kind, phase, incidents) = (batch.kind.word(), batch.phase.word(), batch.incidents.len());
        match result {
            Ok(_) => {
                self.tracker().record_sent(&batch, clock::now());
                info!(route = %name, kind, phase, incidents, "alert sent");
                self.deliveries.update(&self.route, |status| {
                    status.sent += 1;
                    (status.error, status.failing_since) = (None, None);
                });
                Attempt::Sent
            }
            Err(error) => {
                let (why, may_retry) = (chain(&error), error.may_retry());
                let to = receiver.shown();
                warn!(route = %name, %to, kind, phase, incidents, %why, "cannot deliver an alert: retrying");
                self.deliveries.update(&self.route, |status| {
                    status.failed += 1;
                    status.error = Some(why);
                    status.failing_since.get_or_insert_with(|| now.to_string());
                });
                Attempt::Failed { may_retry }
            }
        }
    }

    fn update_counts(&self) {
        let (open, dropped) = {
            let tracker = self.tracker();
            (tracker.open(), tracker.dropped)
        };
        self.deliveries.update(&self.route, |status| (status.open, status.dropped) = (open, dropped));
    }

    fn origin(&self) -> MessageOrigin {
        let (subject, status) = (&self.status_board.subject, self.status_board.status());
        MessageOrigin {
            owner: subject.owner.clone(),
            target: subject.target.clone(),
            route: self.route.name.clone(),
            revision: status.source.revision.short(),
            commit: status.source.commit,
        }
    }

    /// Stores the sent incidents. Returns the number of failures in a row.
    async fn store(&self, failures: u32) -> u32 {
        let changed = self.tracker().take_changed();
        if changed.is_empty() {
            return 0;
        }
        let written = sent_incidents::write(&self.state, self.owner(), &self.route.name, changed).await;
        let Err((left, error)) = written else {
            self.tracker().record_stored([]);
            return 0;
        };
        if failures == 0 {
            let why = chain(&error);
            warn!(route = %self.route.name, %why, "cannot store sent incidents: a restart may repeat them");
        }
        self.tracker().record_stored(left);
        failures.saturating_add(1)
    }
}

/// Result of one attempt.
enum Attempt {
    NothingDue,
    Sent,
    Failed { may_retry: bool },
}

#[cfg(test)]
mod tests;
