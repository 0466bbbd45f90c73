//! Incident tracker of a route: which message is due. Pure; time is an input.
//!
//! An incident is sent once when it begins, again after `repeat` or when it has doubled, and once when it ended. It must
//! last for `wait` before it is sent, and be absent for `settle` before it has ended. All incidents of a kind that are
//! due share one message, and two messages of a kind are at least `interval` apart. So the number of messages does not
//! depend on the number of instances.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::conditions::{AlertSubject, Conditions, Extent, IncidentKey};
use super::feed::RELAUNCH_WINDOW_SECS;
use crate::contract::{AlertKind, AlertPhase, EventLevel};
use crate::model::{Time, glob};

/// Maximum waiting events of a route.
const MAX_EVENTS: usize = 1000;
/// Minimum time between two writes of an incident that continues.
const MIN_STORE_INTERVAL: Duration = Duration::from_secs(600);

/// Filter and timing of a route's incidents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteRules {
    /// Patterns of namespaces. Empty: all, and incidents without a namespace.
    pub namespaces: Vec<String>,
    pub min_severity: EventLevel,
    /// Empty: all.
    pub kinds: BTreeSet<AlertKind>,
    pub send_recoveries: bool,
    pub wait: Duration,
    pub settle: Duration,
    pub interval: Duration,
    pub repeat: Duration,
}

impl Default for RouteRules {
    fn default() -> RouteRules {
        RouteRules {
            namespaces: Vec::new(),
            min_severity: EventLevel::Info,
            kinds: BTreeSet::new(),
            send_recoveries: true,
            wait: Duration::from_secs(5),
            settle: Duration::from_secs(30),
            interval: Duration::from_secs(60),
            repeat: Duration::from_secs(4 * 3600),
        }
    }
}

impl RouteRules {
    pub fn matches(&self, key: &IncidentKey) -> bool {
        let in_namespace = match key.subject.namespace() {
            _ if self.namespaces.is_empty() => true,
            Some(namespace) => self.namespaces.iter().any(|pattern| glob(pattern, namespace)),
            None => false,
        };
        in_namespace
            && key.kind.severity() >= self.min_severity
            && (self.kinds.is_empty() || self.kinds.contains(&key.kind))
    }
}

/// One incident of a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incident {
    pub since: Time,
    /// When its condition ended; `None`: it continues.
    pub ended: Option<Time>,
    /// The last message about it; `None`: it was not sent yet.
    pub sent: Option<LastSent>,
    pub extent: Extent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastSent {
    pub at: Time,
    pub instances: usize,
}

/// Incidents of one kind for one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IncidentBatch {
    pub kind: AlertKind,
    pub phase: AlertPhase,
    pub incidents: Vec<(IncidentKey, Incident)>,
}

/// The incidents of a route.
#[derive(Debug, Default)]
pub struct IncidentTracker {
    incidents: BTreeMap<IncidentKey, Incident>,
    /// Times of the last messages.
    last: BTreeMap<(AlertKind, AlertPhase), Time>,
    /// Incidents whose stored state is out of date.
    changed: BTreeSet<IncidentKey>,
    /// Incidents of the write in progress, or of one that was abandoned.
    writing: BTreeSet<IncidentKey>,
    /// When stored incidents were loaded.
    loaded: Option<Time>,
    /// Events that were dropped.
    pub dropped: u64,
}

fn is_past(time: Time, span: Duration, now: Time) -> bool {
    now.0.saturating_sub(time.0) >= i64::try_from(span.as_millis()).unwrap_or(i64::MAX)
}

impl IncidentTracker {
    /// Continues with the incidents that were sent before. What this process sent and could not store stays.
    pub fn load(&mut self, stored: BTreeMap<IncidentKey, Incident>, now: Time) {
        let mut before = std::mem::take(self);
        let mut unsaved = before.changed;
        unsaved.append(&mut before.writing);
        let mut incidents = stored;
        for key in &unsaved {
            match before.incidents.remove(key).filter(|own| own.sent.is_some()) {
                Some(own) => {
                    let sent_at = |one: &Incident| one.sent.map(|sent| sent.at);
                    // Another leader may have sent it later.
                    if incidents.get(key).is_none_or(|stored| sent_at(stored) <= sent_at(&own)) {
                        incidents.insert(key.clone(), own);
                    }
                }
                // Its recovery was sent.
                None => drop(incidents.remove(key)),
            }
        }
        *self =
            IncidentTracker { incidents, changed: unsaved, loaded: Some(now), ..IncidentTracker::default() };
    }

    /// Number of incidents that the receiver knows and that have not ended.
    pub fn open(&self) -> usize {
        self.incidents.values().filter(|one| one.sent.is_some() && one.ended.is_none()).count()
    }

    /// Applies the current conditions.
    pub fn observe(&mut self, rules: &RouteRules, conditions: &Conditions, now: Time) {
        for (key, extent) in conditions.active.iter().filter(|(key, _)| rules.matches(key)) {
            let new = || Incident { since: now, ended: None, sent: None, extent: Extent::default() };
            let incident = self.incidents.entry(key.clone()).or_insert_with(new);
            incident.ended = None;
            incident.extent.clone_from(extent);
        }
        let absent: Vec<IncidentKey> = self
            .incidents
            .iter()
            .filter(|(key, one)| one.ended.is_none() && !key.kind.is_event())
            .filter(|(key, _)| {
                !conditions.active.contains_key(key) && !self.may_continue(key, conditions, now)
            })
            .map(|(key, _)| key.clone())
            .collect();
        for key in absent {
            match self.incidents.get_mut(&key) {
                Some(incident) if incident.sent.is_some() || key.kind == AlertKind::Drift => {
                    incident.ended = Some(now);
                }
                // The receiver has no message about this incident.
                _ => drop(self.incidents.remove(&key)),
            }
        }
        for (key, extent) in conditions.passed.iter().filter(|(key, _)| rules.matches(key)) {
            self.add_passed(key, extent, now);
        }
    }

    /// Whether a condition that is not observed now may still exist.
    fn may_continue(&self, key: &IncidentKey, conditions: &Conditions, now: Time) -> bool {
        // Relaunches before a restart of the controller are not counted.
        let is_loaded = |at: Time| self.incidents.get(key).is_some_and(|one| one.since < at);
        let is_recount = key.kind == AlertKind::CrashLoop
            && self.loaded.is_some_and(|at| is_loaded(at) && now.secs_since(at) < RELAUNCH_WINDOW_SECS);
        let is_unknown = conditions.is_partial && key.subject != AlertSubject::Controller;
        // A process that went from one of these to another has not recovered.
        let is_unwell = matches!(key.kind, AlertKind::Unhealthy | AlertKind::CrashLoop | AlertKind::Failed)
            && conditions.unwell.contains(&key.subject);
        is_recount || is_unknown || is_unwell || conditions.unsettled.contains(&key.subject)
    }

    fn add_passed(&mut self, key: &IncidentKey, extent: &Extent, now: Time) {
        let ended = (!key.kind.is_event()).then_some(now);
        if let Some(incident) = self.incidents.get_mut(key) {
            incident.ended = ended;
            incident.extent.clone_from(extent);
            return;
        }
        if self.incidents.iter().filter(|(key, one)| key.kind.is_event() || one.sent.is_none()).count()
            >= MAX_EVENTS
        {
            self.dropped += 1;
            return;
        }
        let incident = Incident { since: now, ended, sent: None, extent: extent.clone() };
        self.incidents.insert(key.clone(), incident);
    }

    /// The message that is due.
    pub fn next_batch(&mut self, rules: &RouteRules, now: Time) -> Option<IncidentBatch> {
        if !rules.send_recoveries {
            self.forget_ended(rules, now);
        }
        let phases = [AlertPhase::Firing, AlertPhase::Resolved];
        let due = AlertKind::ALL.into_iter().flat_map(|kind| phases.map(|phase| (kind, phase)));
        due.into_iter().find_map(|(kind, phase)| {
            let is_paced =
                self.last.get(&(kind, phase)).is_none_or(|last| is_past(*last, rules.interval, now));
            let of_kind = || self.incidents.iter().filter(move |(key, _)| key.kind == kind);
            if !is_paced || !of_kind().any(|(_, one)| is_due(kind, phase, one, rules, now)) {
                return None;
            }
            // A message takes along those of the same kind that are not due yet.
            let joins = |one: &Incident| match phase {
                AlertPhase::Firing => {
                    one.ended.is_none() && (one.sent.is_none() || is_due(kind, phase, one, rules, now))
                }
                AlertPhase::Resolved => is_due(kind, phase, one, rules, now),
            };
            let incidents = of_kind().filter(|(_, one)| joins(one));
            let incidents = incidents.map(|(key, one)| (key.clone(), one.clone())).collect();
            Some(IncidentBatch { kind, phase, incidents })
        })
    }

    fn forget_ended(&mut self, rules: &RouteRules, now: Time) {
        let changed = &mut self.changed;
        self.incidents.retain(|key, one| {
            let is_over = one.ended.is_some_and(|ended| is_past(ended, rules.settle, now));
            let stays = !is_over || key.kind == AlertKind::Drift;
            if !stays && one.sent.is_some() {
                changed.insert(key.clone());
            }
            stays
        });
    }

    /// Records a delivered message.
    pub fn record_sent(&mut self, batch: &IncidentBatch, now: Time) {
        self.last.insert((batch.kind, batch.phase), now);
        for (key, delivered) in &batch.incidents {
            let is_over = batch.phase == AlertPhase::Resolved || key.kind.is_event();
            match self.incidents.get_mut(key) {
                // It began again while the message was in flight: for the receiver it is a new incident.
                Some(incident) if is_over && incident.ended.is_none() && !key.kind.is_event() => {
                    *incident = Incident { since: now, sent: None, ..incident.clone() };
                }
                Some(_) if is_over => drop(self.incidents.remove(key)),
                Some(incident) => {
                    let sent = LastSent { at: now, instances: delivered.extent.instances };
                    let before = incident.sent.replace(sent);
                    // The frequent repetitions for Alertmanager are not worth a write each.
                    if before.is_some_and(|before| !is_past(before.at, MIN_STORE_INTERVAL, now)) {
                        continue;
                    }
                }
                // It ended while the message was in flight: the recovery follows.
                None if !is_over => {
                    let sent = Some(LastSent { at: now, instances: delivered.extent.instances });
                    self.incidents
                        .insert(key.clone(), Incident { ended: Some(now), sent, ..delivered.clone() });
                }
                None => {}
            }
            self.changed.insert(key.clone());
        }
    }

    /// The incidents to store; `None`: to delete. They are returned again, unless [`Self::record_stored`] follows.
    pub fn take_changed(&mut self) -> Vec<(IncidentKey, Option<Incident>)> {
        let mut changed = std::mem::take(&mut self.changed);
        changed.append(&mut self.writing);
        self.writing.clone_from(&changed);
        let current = |key: IncidentKey| {
            let incident = self.incidents.get(&key).filter(|one| one.sent.is_some()).cloned();
            (key, incident)
        };
        changed.into_iter().map(current).collect()
    }

    /// Records a write. These were not written, and are stored later.
    pub fn record_stored(&mut self, left: impl IntoIterator<Item = IncidentKey>) {
        self.writing.clear();
        self.changed.extend(left);
    }
}

fn is_due(kind: AlertKind, phase: AlertPhase, one: &Incident, rules: &RouteRules, now: Time) -> bool {
    match (phase, one.ended, one.sent) {
        (AlertPhase::Firing, None, None) => is_past(one.since, rules.wait, now),
        (AlertPhase::Firing, None, Some(sent)) => {
            is_past(sent.at, rules.repeat, now) || one.extent.instances >= 2 * sent.instances.max(1)
        }
        (AlertPhase::Resolved, Some(ended), Some(_)) => is_past(ended, rules.settle, now),
        // A repair that was faster than the first message is one message.
        (AlertPhase::Resolved, Some(ended), None) => {
            kind == AlertKind::Drift && is_past(ended, rules.wait, now)
        }
        (AlertPhase::Firing, Some(_), _) | (AlertPhase::Resolved, None, _) => false,
    }
}

#[cfg(test)]
mod tests;
