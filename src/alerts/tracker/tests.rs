//! Tests of the incident tracker: due messages over time.

use super::*;

fn at(secs: i64) -> Time {
    Time(secs * 1000)
}

fn incident(kind: AlertKind, process: &str) -> IncidentKey {
    IncidentKey { kind, subject: AlertSubject::Process(process.parse().expect("a process")) }
}

fn extent(instances: usize) -> Extent {
    Extent { instances, ..Extent::default() }
}

fn active(all: &[(AlertKind, &str, usize)]) -> Conditions {
    let active = all.iter().map(|(kind, process, n)| (incident(*kind, process), extent(*n)));
    Conditions { active: active.collect(), ..Conditions::default() }
}

/// A tracker whose receiver takes every message.
#[derive(Default)]
struct Route {
    tracker: IncidentTracker,
    rules: RouteRules,
}

impl Route {
    /// The messages at this second: phase, kind, number of incidents.
    fn step(&mut self, secs: i64, conditions: &Conditions) -> Vec<(AlertPhase, AlertKind, usize)> {
        self.tracker.observe(&self.rules, conditions, at(secs));
        let mut sent = Vec::new();
        while let Some(batch) = self.tracker.next_batch(&self.rules, at(secs)) {
            sent.push((batch.phase, batch.kind, batch.incidents.len()));
            self.tracker.record_sent(&batch, at(secs));
            assert!(sent.len() < 100, "a message is due again at once: {batch:?}");
        }
        sent
    }
}

use AlertKind::{CrashLoop, Drift, Failed, RolloutFinished, Unhealthy};
use AlertPhase::{Firing, Resolved};

#[test]
fn an_incident_is_sent_once_repeated_rarely_and_its_recovery_is_sent() {
    let mut route = Route::default();
    let sick = active(&[(Unhealthy, "web/api", 1)]);
    assert_eq!(route.step(0, &sick), [], "it may pass");
    assert_eq!(route.step(5, &sick), [(Firing, Unhealthy, 1)]);
    for secs in [6, 60, 600, 4 * 3600] {
        assert_eq!(route.step(secs, &sick), [], "{secs}");
    }
    assert_eq!(route.step(4 * 3600 + 5, &sick), [(Firing, Unhealthy, 1)], "a reminder");
    let well = Conditions::default();
    assert_eq!(route.step(20_000, &well), []);
    assert_eq!(route.step(20_010, &sick), [], "a short recovery is none");
    assert_eq!(route.step(20_020, &well), []);
    assert_eq!(route.step(20_050, &well), [(Resolved, Unhealthy, 1)]);
    assert_eq!(route.step(40_000, &well), []);
    assert!(route.tracker.incidents.is_empty());
}

#[test]
fn a_condition_that_passes_before_the_first_message_is_not_sent() {
    let mut route = Route::default();
    assert_eq!(route.step(0, &active(&[(Unhealthy, "web/api", 1)])), []);
    assert_eq!(route.step(4, &Conditions::default()), []);
    assert_eq!(route.step(100, &Conditions::default()), []);
}

#[test]
fn many_incidents_share_one_message_and_messages_of_a_kind_keep_their_distance() {
    let mut route = Route::default();
    let names: Vec<String> = (0..10_000).map(|n| format!("web/p{n}")).collect();
    let all: Vec<_> = names.iter().map(|name| (Unhealthy, name.as_str(), 1)).collect();
    route.step(0, &active(&all[..10]));
    // Those that began later join.
    assert_eq!(route.step(5, &active(&all[..5_000])), [(Firing, Unhealthy, 5_000)]);
    assert_eq!(route.step(20, &active(&all)), [], "the last message is recent");
    assert_eq!(route.step(65, &active(&all)), [(Firing, Unhealthy, 5_000)]);
    assert_eq!(route.step(70, &Conditions::default()), []);
    assert_eq!(route.step(100, &Conditions::default()), [(Resolved, Unhealthy, 10_000)]);
}

#[test]
fn an_incident_that_doubles_is_sent_again() {
    let mut route = Route::default();
    route.step(0, &active(&[(Failed, "web/api", 3)]));
    assert_eq!(route.step(5, &active(&[(Failed, "web/api", 3)])).len(), 1);
    assert_eq!(route.step(100, &active(&[(Failed, "web/api", 5)])), []);
    assert_eq!(route.step(101, &active(&[(Failed, "web/api", 6)])).len(), 1);
    assert_eq!(route.step(102, &active(&[(Failed, "web/api", 500)])), [], "too soon");
    assert_eq!(route.step(161, &active(&[(Failed, "web/api", 500)])).len(), 1);
}

#[test]
fn a_subject_in_transition_has_not_recovered() {
    let mut route = Route::default();
    route.step(0, &active(&[(Failed, "web/api", 1)]));
    route.step(5, &active(&[(Failed, "web/api", 1)]));
    let mut retry = Conditions::default();
    retry.unsettled.insert(incident(Failed, "web/api").subject);
    assert_eq!(route.step(500, &retry), []);
    assert_eq!(route.tracker.open(), 1);
    route.step(501, &Conditions::default());
    assert_eq!(route.step(531, &Conditions::default()), [(Resolved, Failed, 1)]);
}

#[test]
fn a_quick_repair_is_one_message_and_events_have_no_recovery() {
    let mut route = Route::default();
    let mut repaired = Conditions::default();
    repaired.passed.insert(incident(Drift, "web/api"), extent(1));
    repaired.passed.insert(incident(RolloutFinished, "web/db"), extent(2));
    assert_eq!(route.step(0, &repaired), []);
    assert_eq!(route.step(5, &Conditions::default()), [(Resolved, Drift, 1), (Firing, RolloutFinished, 1)]);
    assert_eq!(route.step(5000, &Conditions::default()), []);
    // A repair that takes longer: found, then repaired.
    route.step(6000, &active(&[(Drift, "web/api", 1)]));
    assert_eq!(route.step(6005, &active(&[(Drift, "web/api", 1)])), [(Firing, Drift, 1)]);
    route.step(6010, &repaired);
    assert!(route.step(6040, &Conditions::default()).contains(&(Resolved, Drift, 1)));
}

#[test]
fn a_restart_sends_nothing_again_and_recoveries_that_it_missed() {
    let mut before = Route::default();
    let sick = active(&[(Unhealthy, "web/api", 1), (CrashLoop, "web/db", 1)]);
    before.step(0, &sick);
    assert_eq!(before.step(5, &sick).len(), 2);
    let stored = before.tracker.take_changed();
    before.tracker.record_stored([]);
    assert!(before.tracker.take_changed().is_empty());
    let stored = stored.into_iter().filter_map(|(key, one)| Some((key, one?))).collect();
    let mut after = Route::default();
    after.tracker.load(stored, at(100));
    assert_eq!(after.step(101, &sick), []);
    assert_eq!(after.step(110, &Conditions::default()), []);
    assert_eq!(after.step(140, &Conditions::default()), [(Resolved, Unhealthy, 1)]);
    let deleted = after.tracker.take_changed();
    assert!(deleted == [(incident(Unhealthy, "web/api"), None)], "{deleted:?}");
    // A crash loop that began later ends as usual.
    let looping = active(&[(CrashLoop, "web/new", 1)]);
    after.step(150, &looping);
    assert_eq!(after.step(155, &looping), [(Firing, CrashLoop, 1)]);
    after.step(160, &Conditions::default());
    assert_eq!(after.step(190, &Conditions::default()), [(Resolved, CrashLoop, 1)]);
    // The relaunches of the earlier one are counted again.
    after.step(700, &Conditions::default());
    assert_eq!(after.step(730, &Conditions::default()), [(Resolved, CrashLoop, 1)]);
}

#[test]
fn sent_incidents_that_are_not_stored_survive_a_load() {
    let mut route = Route::default();
    let sick = active(&[(Unhealthy, "web/api", 1), (Failed, "web/db", 1)]);
    route.step(0, &sick);
    assert_eq!(route.step(5, &sick).len(), 2);
    let changed = route.tracker.take_changed();
    assert_eq!(changed.len(), 2);
    // Only one is written.
    route.tracker.record_stored([incident(Unhealthy, "web/api")]);
    let stored: BTreeMap<IncidentKey, Incident> = changed
        .into_iter()
        .filter_map(|(key, one)| Some((key, one?)))
        .filter(|(key, _)| key.kind == Failed)
        .collect();
    route.tracker.load(stored.clone(), at(20));
    assert_eq!(route.tracker.open(), 2);
    assert_eq!(route.tracker.take_changed().len(), 1, "it is stored now");
    // The write is abandoned.
    route.tracker.load(stored.clone(), at(30));
    assert_eq!(route.tracker.take_changed().len(), 1);
    route.tracker.record_stored([]);
    route.step(100, &Conditions::default());
    assert_eq!(route.step(130, &Conditions::default()).len(), 2, "both recoveries");
    // The deletions are not written either: nothing is sent again.
    route.tracker.load(stored, at(200));
    assert_eq!(route.tracker.open(), 0);
    assert_eq!(route.step(300, &Conditions::default()), []);
    let deleted = route.tracker.take_changed();
    assert!(deleted.len() == 2 && deleted.iter().all(|(_, one)| one.is_none()), "{deleted:?}");
}

#[test]
fn an_unwell_process_has_not_recovered() {
    let mut route = Route::default();
    let all = active(&[(Failed, "web/api", 1), (Drift, "web/api", 1)]);
    route.step(0, &all);
    assert_eq!(route.step(5, &all).len(), 2);
    let mut unwell = Conditions::default();
    unwell.unwell.insert(incident(Failed, "web/api").subject);
    route.step(100, &unwell);
    assert_eq!(route.step(130, &unwell), [(Resolved, Drift, 1)]);
    route.step(200, &Conditions::default());
    assert_eq!(route.step(230, &Conditions::default()), [(Resolved, Failed, 1)]);
}

#[test]
fn changes_during_a_delivery_are_sent_later() {
    let mut route = Route::default();
    let sick = active(&[(Unhealthy, "web/api", 1)]);
    route.tracker.observe(&route.rules, &sick, at(0));
    let batch = route.tracker.next_batch(&route.rules, at(5)).expect("it is due");
    // It ends before the receiver answers.
    route.tracker.observe(&route.rules, &Conditions::default(), at(6));
    route.tracker.record_sent(&batch, at(9));
    assert_eq!(route.step(10, &Conditions::default()), []);
    assert_eq!(route.step(39, &Conditions::default()), [(Resolved, Unhealthy, 1)]);
    // It begins again before the receiver answers.
    route.step(100, &sick);
    assert_eq!(route.step(105, &sick), [(Firing, Unhealthy, 1)]);
    route.step(110, &Conditions::default());
    let batch = route.tracker.next_batch(&route.rules, at(140)).expect("it is due");
    assert_eq!(batch.phase, Resolved);
    route.tracker.observe(&route.rules, &sick, at(141));
    route.tracker.record_sent(&batch, at(142));
    assert_eq!(route.step(165, &sick), [(Firing, Unhealthy, 1)]);
}

#[test]
fn a_route_sends_its_namespaces_severities_and_kinds() {
    let rules = |namespaces: &[&str], min_severity, kinds: &[AlertKind]| RouteRules {
        namespaces: namespaces.iter().map(|name| (*name).to_owned()).collect(),
        min_severity,
        kinds: kinds.iter().copied().collect(),
        ..RouteRules::default()
    };
    let api = incident(Unhealthy, "web-eu/api");
    let source = IncidentKey { kind: AlertKind::SourceNotFollowed, subject: AlertSubject::Controller };
    let all = rules(&[], EventLevel::Info, &[]);
    assert!(all.matches(&api) && all.matches(&source));
    let web = rules(&["shop", "web-*"], EventLevel::Info, &[]);
    assert!(web.matches(&api) && !web.matches(&source) && !web.matches(&incident(Unhealthy, "db/x")));
    let errors = rules(&[], EventLevel::Error, &[]);
    assert!(errors.matches(&api) && !errors.matches(&incident(Drift, "web-eu/api")));
    let drift = rules(&[], EventLevel::Info, &[Drift]);
    assert!(!drift.matches(&api) && drift.matches(&incident(Drift, "web-eu/api")));
    let mut quiet = Route { rules: rules(&[], EventLevel::Error, &[]), ..Route::default() };
    quiet.rules.send_recoveries = false;
    quiet.step(0, &active(&[(Unhealthy, "web/api", 1)]));
    assert_eq!(quiet.step(5, &active(&[(Unhealthy, "web/api", 1)])).len(), 1);
    quiet.step(10, &Conditions::default());
    assert_eq!(quiet.step(40, &Conditions::default()), []);
    assert!(quiet.tracker.incidents.is_empty() && quiet.tracker.changed.len() == 1);
}
