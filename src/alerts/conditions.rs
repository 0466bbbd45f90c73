//! Alert conditions: the current faults, derived from the controller's status. Pure, except for the alert feed it reads.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::feed::{FeedState, MAX_RELAUNCHES, RELAUNCH_WINDOW_SECS};
use crate::contract::AlertKind;
use crate::control::PassResult;
use crate::control::backoff::without_retry_time;
use crate::control::status::{ControllerStatus, HIDDEN, Row, Severity, SyncStatus, may_quote};
use crate::model::{AutoType, Health, HoldReason, HostKey, InstanceKey, ProcessKey, State, Time, span};

/// Maximum instances named per incident.
pub const MAX_NAMED: usize = 5;
/// Maximum length of a detail, in characters.
const MAX_DETAIL: usize = 300;

/// The subject of an incident.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum AlertSubject {
    /// The controller, its source or its target.
    Controller,
    Host(HostKey),
    Process(ProcessKey),
}

impl AlertSubject {
    pub fn namespace(&self) -> Option<&str> {
        match self {
            AlertSubject::Process(process) => Some(process.namespace.as_str()),
            AlertSubject::Controller | AlertSubject::Host(_) => None,
        }
    }
}

impl fmt::Display for AlertSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AlertSubject::Controller => Ok(()),
            AlertSubject::Host(host) => host.fmt(f),
            AlertSubject::Process(process) => process.fmt(f),
        }
    }
}

/// Identity of an incident: all instances of a process with one cause are one incident.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct IncidentKey {
    pub kind: AlertKind,
    pub subject: AlertSubject,
}

/// The extent of a condition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extent {
    pub instances: usize,
    /// The first ones.
    pub named: Vec<InstanceKey>,
    pub detail: String,
}

impl Extent {
    fn of_controller(detail: &str) -> Extent {
        Extent { detail: shorten(detail), ..Extent::default() }
    }

    fn add(&mut self, instance: &InstanceKey, detail: impl FnOnce() -> String) {
        if self.instances == 0 {
            self.detail = shorten(&detail());
        }
        self.instances += 1;
        if self.named.len() < MAX_NAMED {
            self.named.push(instance.clone());
        }
    }
}

/// All conditions at one moment.
#[derive(Clone, Debug, Default)]
pub struct Conditions {
    pub active: BTreeMap<IncidentKey, Extent>,
    /// Conditions that began and ended since the last reading, and events.
    pub passed: BTreeMap<IncidentKey, Extent>,
    /// Subjects in transition: the end of a condition does not mean recovery yet.
    pub unsettled: BTreeSet<AlertSubject>,
    /// Processes with instances that are not well: they have not recovered from a fault of a process.
    pub unwell: BTreeSet<AlertSubject>,
    /// No process was observed yet.
    pub is_partial: bool,
}

impl Conditions {
    /// The current conditions. `None`: nothing was observed yet.
    pub fn of(status: &ControllerStatus, feed: &mut FeedState, now: Time) -> Option<Conditions> {
        let mut conditions = Conditions::default();
        conditions.add_controller(status);
        let Some(pass) = status.pass.last.as_deref() else {
            // Before the first observation only conditions of the controller itself are known.
            conditions.is_partial = true;
            return (!conditions.active.is_empty()).then_some(conditions);
        };
        let rows = status.rows();
        for row in rows {
            conditions.add_row(row, pass, feed, now);
        }
        conditions.add_held(pass);
        conditions.add_drift(rows, pass, feed);
        conditions.add_rollouts(rows, pass, feed);
        feed.retain_declared(&pass.desired);
        Some(conditions)
    }

    fn add_controller(&mut self, status: &ControllerStatus) {
        let mut add = |kind, detail: &str| {
            let key = IncidentKey { kind, subject: AlertSubject::Controller };
            self.active.insert(key, Extent::of_controller(detail));
        };
        // With `--follow no` the operator has switched following off.
        if let Some(why) = status.source.not_followed.as_deref().filter(|_| !status.source.is_follow_off) {
            add(AlertKind::SourceNotFollowed, why);
        }
        if let Some(why) = &status.trouble {
            add(AlertKind::TargetUnreachable, why);
        }
        let errors = || status.source.problems.iter().filter(|one| one.severity == Severity::Error);
        if let Some(first) = errors().next() {
            let more = match errors().count() - 1 {
                0 => String::new(),
                more => format!(", and {more} more"),
            };
            let message = hide(&first.message);
            add(
                AlertKind::ManifestErrors,
                &format!("{}:{}:{}: {message}{more}", first.file, first.line, first.column),
            );
        }
    }

    fn add(
        &mut self,
        kind: AlertKind,
        subject: AlertSubject,
        row: &InstanceKey,
        detail: impl FnOnce() -> String,
    ) {
        self.active.entry(IncidentKey { kind, subject }).or_default().add(row, detail);
    }

    fn add_row(&mut self, row: &Row, pass: &PassResult, feed: &mut FeedState, now: Time) {
        let want = pass.desired.instances.get(&row.key);
        let process = || AlertSubject::Process(declared(pass, &row.key));
        if let Some(why) = &row.gap {
            if want.is_some() {
                self.add(AlertKind::HostUnknown, AlertSubject::Host(row.key.host.clone()), &row.key, || {
                    why.clone()
                });
                self.unsettled.insert(process());
            }
            return;
        }
        let Some(seen) = &row.seen else {
            if row.sync == SyncStatus::OutOfSync {
                self.unsettled.insert(process());
            }
            return;
        };
        let in_flight = row.held.as_ref().is_some_and(|(reason, _)| *reason == HoldReason::UnderWay);
        let is_moving = matches!(row.sync, SyncStatus::OutOfSync | SyncStatus::Unknown) || in_flight;
        if is_moving || matches!(seen.health, Health::Starting | Health::Unknown) {
            self.unsettled.insert(process());
        }
        let is_wanted =
            want.is_some_and(|want| matches!(want.origin.state, State::Running | State::Unhosted));
        if !is_wanted {
            return;
        }
        let is_service = want.is_some_and(|want| want.spec.monitor.auto_type == AutoType::Resident);
        let is_well = match seen.health {
            Health::Degraded | Health::Failed => false,
            Health::NotReported => !is_service || seen.running != Some(false),
            Health::Healthy | Health::Starting | Health::Unknown => true,
        };
        if !is_well {
            self.unwell.insert(process());
        }
        let is_looping = is_service && feed.is_crash_looping(&row.key, now);
        match seen.health {
            Health::Failed if is_service => {
                self.add(AlertKind::CrashLoop, process(), &row.key, || {
                    "the agent no longer relaunches the process".to_owned()
                });
            }
            Health::Failed => {
                let detail = || "the run ended without success".to_owned();
                self.add(AlertKind::Failed, process(), &row.key, detail);
            }
            _ if is_looping => self.add(AlertKind::CrashLoop, process(), &row.key, || {
                format!("relaunched {MAX_RELAUNCHES} times within {}", span(RELAUNCH_WINDOW_SECS))
            }),
            // Without a process nothing was checked: its agent relaunches it.
            Health::Degraded if seen.running == Some(true) => {
                self.add(AlertKind::Unhealthy, process(), &row.key, || "the health check fails".to_owned());
            }
            Health::Degraded | Health::Healthy | Health::Starting | Health::Unknown | Health::NotReported => {
            }
        }
    }

    fn add_held(&mut self, pass: &PassResult) {
        for held in &pass.plan.held {
            let failed = pass.observed.instances.get(&held.instance);
            let crashed = failed.is_some_and(|seen| seen.health == Health::Failed);
            let kind = match held.reason {
                HoldReason::DeleteBudget | HoldReason::RestartBudget => AlertKind::HeldByBudget,
                HoldReason::NotConverging | HoldReason::RolledBack => AlertKind::Suspended,
                HoldReason::AwaitingPromotion => AlertKind::RolloutPaused,
                HoldReason::HealOff => AlertKind::Drift,
                // A crash loop, or a failed run, is an incident already.
                HoldReason::BackingOff if !crashed => AlertKind::Failed,
                _ => continue,
            };
            let subject = AlertSubject::Process(declared(pass, &held.instance));
            let detail = || format!("{}: {}", held.reason.word(), without_retry_time(&held.detail));
            self.add(kind, subject, &held.instance, detail);
        }
    }

    /// Drifted instances. One that is in sync again was repaired.
    fn add_drift(&mut self, rows: &[Row], pass: &PassResult, feed: &mut FeedState) {
        if feed.drifted.is_empty() {
            return;
        }
        let drifted = std::mem::take(&mut feed.drifted);
        for (key, ops) in drifted {
            let row = rows.binary_search_by(|row| row.key.cmp(&key)).ok().map(|at| &rows[at]);
            let subject = AlertSubject::Process(declared(pass, &key));
            let detail = || ops.iter().copied().collect::<Vec<_>>().join(", ");
            let in_flight = |row: &Row| {
                row.sync == SyncStatus::OutOfSync
                    || row.held.as_ref().is_some_and(|(reason, _)| {
                        matches!(reason, HoldReason::UnderWay | HoldReason::BackingOff)
                    })
            };
            match row {
                Some(row) if in_flight(row) => {
                    self.add(AlertKind::Drift, subject, &key, || format!("to repair: {}", detail()));
                    feed.drifted.insert(key, ops);
                }
                Some(row) if row.sync == SyncStatus::InSync => {
                    let passed = IncidentKey { kind: AlertKind::Drift, subject };
                    self.passed.entry(passed).or_default().add(&key, || format!("repaired: {}", detail()));
                }
                // The instance is held, unknown or no longer declared.
                Some(_) | None => {}
            }
        }
    }

    fn add_rollouts(&mut self, rows: &[Row], pass: &PassResult, feed: &mut FeedState) {
        for process in std::mem::take(&mut feed.rolled_back) {
            let key = IncidentKey { kind: AlertKind::RolledBack, subject: AlertSubject::Process(process) };
            let detail = "a rollout failed and was rolled back; `abide history` shows the cause";
            self.passed.insert(key, Extent::of_controller(detail));
        }
        if feed.rolling.is_empty() {
            return;
        }
        // The instances of each process: whether all are in sync, and whether some were given up.
        let mut progress: BTreeMap<ProcessKey, (Extent, bool, bool)> = BTreeMap::new();
        for row in rows {
            let process = declared(pass, &row.key);
            if feed.rolling.contains(&process) {
                let (extent, in_sync, gave_up) =
                    progress.entry(process).or_insert((Extent::default(), true, false));
                extent.add(&row.key, || "every instance has the new version".to_owned());
                *in_sync &= row.sync == SyncStatus::InSync;
                *gave_up |= row.held.as_ref().is_some_and(|(reason, _)| {
                    matches!(reason, HoldReason::RolledBack | HoldReason::RolloutAborted)
                });
            }
        }
        for process in std::mem::take(&mut feed.rolling) {
            match progress.remove(&process) {
                Some((extent, true, _)) => {
                    let subject = AlertSubject::Process(process);
                    self.passed.insert(IncidentKey { kind: AlertKind::RolloutFinished, subject }, extent);
                }
                Some((_, false, false)) => {
                    feed.rolling.insert(process);
                }
                Some((_, false, true)) | None => {}
            }
        }
    }
}

/// The process as it is declared: `api` of the instance `api_2`.
fn declared(pass: &PassResult, key: &InstanceKey) -> ProcessKey {
    pass.desired.instances.get(key).map_or_else(|| key.process(), |want| want.origin.declared.clone())
}

/// A text that may quote a command or an environment value is hidden.
fn hide(text: &str) -> &str {
    if may_quote(text) { HIDDEN } else { text }
}

fn shorten(text: &str) -> String {
    match text.char_indices().nth(MAX_DETAIL) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::AlertFeed;
    use super::*;
    use crate::control::ControllerEvent;
    use crate::control::status::{ControllerInfo, StatusBoard};
    use crate::control::testing::{pass_result, process};
    use crate::model::{Observed, ObservedInstance};

    /// A controller that observes.
    struct Controller {
        board: StatusBoard,
        feed: AlertFeed,
    }

    impl Controller {
        fn new() -> Controller {
            Controller { board: StatusBoard::new(ControllerInfo::default()), feed: AlertFeed::default() }
        }

        fn observe(&self, manifests: &str, adjust: impl FnOnce(&mut Observed)) -> Conditions {
            let result: Arc<PassResult> = pass_result(manifests, adjust);
            let event = ControllerEvent::Planned { result: &result };
            self.board.record(&event);
            self.feed.record(&event);
            if result.plan.steps().count() == 0 {
                self.feed.record(&ControllerEvent::Idle { settled: 0, held: 0 });
            }
            let conditions = Conditions::of(&self.board.status(), &mut self.feed.lock(), Time(2_000));
            conditions.expect("an observation")
        }
    }

    fn each(observed: &mut Observed, change: impl Fn(&mut ObservedInstance)) {
        observed.instances.values_mut().for_each(change);
    }

    fn active(conditions: &Conditions) -> Vec<(AlertKind, String, usize)> {
        let one =
            |(key, extent): (&IncidentKey, &Extent)| (key.kind, key.subject.to_string(), extent.instances);
        conditions.active.iter().map(one).collect()
    }

    #[test]
    fn ten_thousand_unhealthy_instances_of_a_process_are_one_incident() {
        let conditions = Controller::new().observe(&process("api", 10_000), |observed| {
            each(observed, |seen| seen.health = Health::Degraded);
        });
        assert_eq!(active(&conditions), [(AlertKind::Unhealthy, "web/api".to_owned(), 10_000)]);
        assert!(conditions.active.values().all(|extent| extent.named.len() == MAX_NAMED));
        assert!(conditions.unsettled.is_empty());
    }

    #[test]
    fn a_process_that_ended_is_not_unhealthy_and_three_exits_are_one_crash_loop() {
        let controller = Controller::new();
        let manifests = process("api", 1);
        let exited = |since: i64, health: Health| {
            controller.observe(&manifests, |observed| {
                each(observed, |seen| {
                    (seen.running, seen.health, seen.since) = (Some(false), health, Some(Time(since)));
                });
            })
        };
        let looping = [(AlertKind::CrashLoop, "web/api".to_owned(), 1)];
        let first = exited(10, Health::Degraded);
        let kinds: Vec<AlertKind> = first.active.keys().map(|key| key.kind).collect();
        assert!(
            !kinds.contains(&AlertKind::Unhealthy) && !kinds.contains(&AlertKind::CrashLoop),
            "{kinds:?}"
        );
        assert_eq!(first.unwell.len(), 1);
        exited(20, Health::Degraded);
        let third = exited(30, Health::Degraded);
        assert!(active(&third).contains(&looping[0]), "{third:?}");
        // It gives up, or runs between two exits: the incident is the same.
        assert!(active(&exited(40, Health::Failed)).contains(&looping[0]));
        assert!(active(&controller.observe(&manifests, |_| {})).contains(&looping[0]));
    }

    #[test]
    fn a_host_that_cannot_be_observed_leaves_its_processes_unsettled() {
        let conditions = Controller::new().observe(&process("api", 2), |observed| {
            each(observed, |seen| seen.health = Health::Degraded);
            let host = observed.instances.keys().next().expect("an instance").host.clone();
            observed.gaps.insert(host, "no agent is connected".to_owned());
        });
        let expected = [
            (AlertKind::Unhealthy, "web/api".to_owned(), 1),
            (AlertKind::HostUnknown, "0:10.1.0.0".to_owned(), 1),
        ];
        assert_eq!(active(&conditions), expected);
        assert_eq!(conditions.unsettled.len(), 1);
    }

    #[test]
    fn drift_of_applied_manifests_is_found_and_its_repair() {
        let controller = Controller::new();
        let manifests = process("api", 1);
        let stopped = |observed: &mut Observed| {
            each(observed, |seen| (seen.running, seen.health) = (Some(false), Health::NotReported));
        };
        assert!(active(&controller.observe(&manifests, stopped)).is_empty(), "nothing was applied yet");
        assert!(active(&controller.observe(&manifests, |_| {})).is_empty());
        let found = controller.observe(&manifests, stopped);
        assert_eq!(active(&found), [(AlertKind::Drift, "web/api".to_owned(), 1)]);
        let repaired = controller.observe(&manifests, |_| {});
        assert!(repaired.active.is_empty());
        let passed: Vec<&str> = repaired.passed.values().map(|extent| extent.detail.as_str()).collect();
        assert!(passed.len() == 1 && passed[0].starts_with("repaired: "), "{passed:?}");
        assert!(controller.observe(&manifests, |_| {}).passed.is_empty(), "it is reported once");
        // A changed manifest is not drift.
        let changed = manifests.replace("start_cmd: ./api", "start_cmd: ./api --new");
        assert!(active(&controller.observe(&changed, stopped)).is_empty());
        // A process that its agent has given up on is a crash loop.
        controller.observe(&changed, |_| {});
        let crashed = controller.observe(&changed, |observed| {
            each(observed, |seen| (seen.running, seen.health) = (Some(false), Health::Failed));
        });
        assert_eq!(active(&crashed), [(AlertKind::CrashLoop, "web/api".to_owned(), 1)]);
    }

    #[test]
    fn relaunches_count_until_a_new_version_is_started() {
        let controller = Controller::new();
        let manifests = process("api", 1);
        controller.observe(&manifests, |_| {});
        let instance = "0:10.1.0.0:web:api".parse().expect("an instance");
        for pid in 1..=3 {
            controller.feed.record(&ControllerEvent::Relaunched { instance: &instance, pid });
        }
        let looping = controller.observe(&manifests, |_| {});
        assert_eq!(active(&looping), [(AlertKind::CrashLoop, "web/api".to_owned(), 1)]);
        let changed = manifests.replace("start_cmd: ./api", "start_cmd: ./api --new");
        controller.observe(&changed, |observed| each(observed, |seen| seen.running = Some(false)));
        assert!(active(&controller.observe(&changed, |_| {})).is_empty());
    }

    #[test]
    fn a_rollout_has_finished_when_every_instance_is_in_sync() {
        let controller = Controller::new();
        let manifests = process("api", 2).replace("spec:", "rollout: {batch: 1}\nspec:");
        let first = |observed: &mut Observed| {
            observed.instances.values_mut().take(1).for_each(|seen| seen.running = Some(false));
        };
        let begun =
            controller.observe(&manifests, |observed| each(observed, |seen| seen.running = Some(false)));
        assert!(begun.passed.is_empty());
        assert!(controller.observe(&manifests, first).passed.is_empty());
        let finished = controller.observe(&manifests, |_| {});
        let kinds: Vec<AlertKind> = finished.passed.keys().map(|key| key.kind).collect();
        assert_eq!(kinds, [AlertKind::RolloutFinished]);
    }
}
