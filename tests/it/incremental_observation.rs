//! Incremental observation: the changes since the last one, a list of digests, and a list of whole rows show one state, and an
//! apply fetches the fleet once.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use abide::backend::{Backend, InstanceQuery, Scope};
use abide::engine::{
    self, ApplyEvent, ApplyHandler, ApplyRequest, ConnectedTarget, PlanInput, PlanRequest, Report,
};
use abide::model::{Desired, HostKey, KnownSpec, LastRun, Observed, Plan};
use abide::observe::{ObservedCache, Target};
use abide::reconcile::Rules;
use abide::{manifest, source};
use serde_json::json;
use tokio::runtime::Runtime;

use crate::fixtures::machine::Machine;
use crate::support::until;
use crate::system::{kill, whoami};

const PROCESSES: usize = 8;

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime")
}

fn target(machine: &Machine) -> ConnectedTarget {
    ConnectedTarget::local(&machine.path(".abide-home")).expect("a running local system")
}

/// What the manifests declare, as the command line reads them.
fn loaded(machine: &Machine) -> manifest::Loaded {
    let mut loaded = manifest::load(&[machine.path("m")], &manifest::Limits::default());
    assert_eq!(loaded.errors(), 0, "{:?}", loaded.problems);
    source::set_default_user(&mut loaded.desired, &whoami());
    loaded
}

fn scope(desired: &Desired) -> Scope {
    let query = |(key, want): (&_, &abide::model::DesiredInstance)| InstanceQuery {
        instance: Clone::clone(key),
        host: want.host.clone(),
        spec: Some(want.spec.clone()),
    };
    Scope::of(desired.instances.iter().map(query).collect())
}

/// Everything that a plan or a reader uses, without the times of reports.
fn facts(observed: &Observed) -> BTreeMap<String, String> {
    let sum = |spec: &KnownSpec| match spec {
        KnownSpec::Full(spec) => format!("{:x}", u128::from_be_bytes(spec.sum())),
        other => format!("{other:?}"),
    };
    let row = |(key, seen): (&_, &abide::model::ObservedInstance)| {
        let ran: LastRun = seen.specs.ran;
        let specs = (sum(&seen.specs.registered), sum(&seen.specs.live), seen.specs.is_live_assumed, ran);
        let state = (seen.unknown, seen.registered, seen.hosted, seen.running, seen.completed, seen.health);
        let rest = (&seen.labels, &seen.owner, &seen.since, &seen.process, &seen.specs.drifted_files);
        (ToString::to_string(key), format!("{state:?} {specs:?} {rest:?}"))
    };
    let mut all: BTreeMap<String, String> = observed.instances.iter().map(row).collect();
    all.insert("gaps".to_owned(), format!("{:?}", observed.gaps));
    all
}

/// Random changes of manifests, by persons and by the kernel; after each, three ways to observe agree.
#[test]
fn changes_digests_and_whole_rows_show_the_same_state() {
    let seed = std::env::var("ABIDE_SEED").ok().and_then(|text| text.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    let mut random = fastrand::Rng::with_seed(seed);
    let machine = Machine::new();
    (0..PROCESSES).for_each(|nth| machine.process(&format!("p{nth}"), "0", ""));
    assert_eq!(machine.apply(&[]).0, 0);
    let (runtime, target, mut cache) = (runtime(), target(&machine), ObservedCache::default());
    for round in 1..=12 {
        let name = format!("p{}", random.usize(..PROCESSES));
        let verb = |verb: &str| {
            let (code, _, err) = machine.run(&[verb, &format!("web/{name}")]);
            // A process that was stopped or killed in an earlier round is not restarted.
            let is_refused = err.contains("held") || (verb == "restart" && err.contains("is not running"));
            assert!(code == 0 || is_refused, "seed {seed}, round {round}: {verb} {name}: {code} {err}");
        };
        match random.u8(..6) {
            0 | 1 => {
                machine.process(&name, &round.to_string(), "");
                machine.apply(&["--override-holds"]);
            }
            // The registered spec differs from the manifest.
            2 => machine.process(&name, &round.to_string(), ""),
            3 => verb("stop"),
            4 => verb("restart"),
            _ => match machine.pids().get(&name) {
                Some(pid) => kill(*pid as u32, "KILL"),
                None => verb("start"),
            },
        }
        let desired = loaded(&machine).desired;
        let none = BTreeSet::new();
        let mut last = String::new();
        let agree = || {
            runtime.block_on(async {
                let hosts: BTreeSet<HostKey> = BTreeSet::new();
                let before = target.backend().watermark(&hosts).await.expect("a watermark").number;
                let observation = cache.observe(&target, &desired, false, &none).await.expect("changes");
                let changes = facts(&observation.observed);
                cache.set_listed(observation.listed());
                cache.put_back(Arc::new(observation.observed));
                let digests = target.backend().observe(&scope(&desired)).await.expect("digests");
                let whole = target.backend().observe(&Scope::default()).await.expect("whole rows");
                let after = target.backend().watermark(&hosts).await.expect("a watermark").number;
                let (digests, whole) = (facts(&digests), facts(&whole));
                if before == after {
                    let told = format!("seed {seed}, round {round}");
                    assert_eq!(changes, whole, "changes, {told}");
                    assert_eq!(digests, whole, "digests, {told}");
                }
                last = format!("{before} {after}");
                before == after
            })
        };
        until("the fleet is at rest", agree);
        assert!(!last.is_empty());
    }
}

/// The number of requests per call so far.
fn requests(machine: &Machine) -> BTreeMap<String, u64> {
    let read = |name: &str| std::fs::read_to_string(machine.path(".abide-home").join(name)).expect("a file");
    let (address, secret) = (read("address"), read("secret"));
    let authorization =
        json!({"bk_app_code": "abide", "bk_app_secret": secret.trim(), "bk_username": "admin"});
    let mut stream =
        TcpStream::connect(address.trim().trim_start_matches("http://")).expect("the local system answers");
    write!(
        stream,
        "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX-Bkapi-Authorization: {authorization}\r\n\r\n"
    )
    .expect("a request");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("metrics");
    let mut all = BTreeMap::new();
    for line in text.lines().filter(|line| line.contains("requests_total{call=")) {
        let call = line.split('"').nth(1).expect("a call").to_owned();
        let count: u64 = line.rsplit(' ').next().and_then(|count| count.parse().ok()).expect("a number");
        *all.entry(call).or_default() += count;
    }
    all
}

#[test]
fn an_apply_lists_the_fleet_once_and_then_asks_for_changes() {
    let machine = Machine::new();
    (0..20).for_each(|nth| machine.process(&format!("p{nth}"), "1", ""));
    assert_eq!(machine.apply(&[]).0, 0);
    machine.process("p7", "2", "");
    let before = requests(&machine);
    let (code, out, err) = machine.apply(&[]);
    assert!(code == 0 && out.contains("converged"), "{code} {out} {err}");
    let after = requests(&machine);
    let calls = |call: &str| {
        after.get(call).copied().unwrap_or_default() - before.get(call).copied().unwrap_or_default()
    };
    assert_eq!((calls("process_digests"), calls("watch")), (1, 1), "{before:?} {after:?}");
    // The spec that differs, and a watermark for each later plan: under the lease, and until it is healthy.
    assert!((3..10).contains(&calls("processes")), "{before:?} {after:?}");
    assert_eq!(machine.effects().iter().filter(|line| *line == "start p7 2").count(), 1);
}

/// Acts once, at a point of an apply.
struct Meanwhile<F> {
    act: Option<F>,
    at: Point,
    /// Steps of each plan that was executed.
    planned: Vec<usize>,
}

#[derive(PartialEq, Eq)]
enum Point {
    /// After the first plan, before the lease.
    Confirmed,
    /// After the last step, before the verification.
    Executed,
}

impl<F: FnOnce() + Send> Meanwhile<F> {
    fn of(at: Point, act: F) -> Meanwhile<F> {
        Meanwhile { act: Some(act), at, planned: Vec::new() }
    }

    fn reach(&mut self, point: Point) {
        if let (true, Some(act)) = (self.at == point, self.act.take_if(|_| self.at == point)) {
            act();
        }
    }
}

impl<F: FnOnce() + Send> ApplyHandler for Meanwhile<F> {
    fn confirm(&mut self, _input: &PlanInput, plan: &Plan) -> bool {
        assert!(plan.steps().next().is_some(), "the first plan has the change");
        self.reach(Point::Confirmed);
        true
    }

    fn on_event(&mut self, event: ApplyEvent<'_>) {
        match event {
            ApplyEvent::Planned { plan, .. } => self.planned.push(plan.steps().count()),
            ApplyEvent::Executed => self.reach(Point::Executed),
            _ => {}
        }
    }
}

fn apply(machine: &Machine, handler: &mut impl ApplyHandler) -> Report {
    let target = target(machine);
    let rules = Rules::new(target.caps());
    let plan = PlanRequest::new(loaded(machine), rules, machine.path("m").display().to_string());
    runtime().block_on(engine::apply(ApplyRequest::new(plan), &target, handler)).expect("a report")
}

#[test]
fn a_change_between_the_plan_and_the_lease_is_seen() {
    let machine = Machine::new();
    (0..3).for_each(|nth| machine.process(&format!("p{nth}"), "1", ""));
    assert_eq!(machine.apply(&[]).0, 0);
    machine.process("p0", "2", "");
    machine.process("p1", "2", "");
    let mut handler = Meanwhile::of(Point::Confirmed, || {
        let (code, out, err) = machine.apply(&["--include", "web/p0"]);
        assert_eq!(code, 0, "{out} {err}");
    });
    let report = apply(&machine, &mut handler);
    assert_eq!((report.converged, &handler.planned), (Some(true), &vec![1]), "{report:?}");
    let starts = |line: &str| machine.effects().iter().filter(|effect| *effect == line).count();
    assert_eq!((starts("start p0 2"), starts("start p1 2")), (1, 1), "{:?}", machine.effects());
}

#[test]
fn verification_sees_that_a_changed_instance_was_stopped() {
    let machine = Machine::new();
    (0..3).for_each(|nth| machine.process(&format!("p{nth}"), "1", ""));
    assert_eq!(machine.apply(&[]).0, 0);
    machine.process("p1", "2", "");
    let mut handler = Meanwhile::of(Point::Executed, || {
        let (code, out, err) = machine.run(&["stop", "web/p1"]);
        assert_eq!(code, 0, "{out} {err}");
    });
    let report = apply(&machine, &mut handler);
    assert_eq!(report.converged, Some(false), "{report:?}");
    assert_eq!(machine.effects().iter().filter(|line| *line == "start p1 2").count(), 1);
    assert!(report.ended.iter().all(|ended| ended.outcome.is_well()), "its steps succeeded: {report:?}");
}
