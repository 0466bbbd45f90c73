//! The simulated fleet behind the `Backend` trait, with faults, and a minimal controller: it converges once the
//! faults end, and repeats nothing.

use std::collections::BTreeMap;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use abide::backend::Scope;
use abide::backend::sim::{Faults, Fleet, LATE_SECS, Sim};
use abide::backend::{Backend, Operation, OperationState};
use abide::model::{Desired, Dialect, HostKey, InstanceKey, Now, Observed, Op, Plan};
use abide::reconcile::{Caps, Expectation, Expected, Rules, expectations, overlay, reconcile};

use crate::fixtures::manifest::{self, Manifest};

const LAG: u64 = 300;

/// Runs a future that never waits: simulated time passes only on request.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => unreachable!("the simulation does not wait"),
    }
}

fn desired(start: &str) -> Desired {
    let one = |name: &str| {
        let manifest = Manifest::remote(name).hosts(4).start_cmd(start).stop_cmd("./stop");
        let manifest = manifest.control("restart_cmd", "./restart");
        if name == "api" { manifest.depends_on(&["db"]) } else { manifest }
    };
    manifest::desired(["api", "db", "cache"].map(one))
}

struct Controller<'a> {
    sim: &'a Sim,
    desired: Desired,
    rules: Rules,
    expectations: Vec<Expectation>,
    lag: u64,
    /// How often each operation was sent for each instance.
    sent: BTreeMap<(InstanceKey, Op), usize>,
    orders: usize,
}

impl<'a> Controller<'a> {
    fn new(sim: &'a Sim, desired: Desired, lag: u64) -> Controller<'a> {
        let rules = Rules::new(Caps::of(sim.dialect()));
        Controller { sim, desired, rules, expectations: Vec::new(), lag, sent: BTreeMap::new(), orders: 0 }
    }

    fn observe(&mut self) -> Observed {
        let observed = now(self.sim.observe(&Scope::default())).expect("an observation");
        let open = std::mem::take(&mut self.expectations);
        let (observed, open) = overlay(observed, open, self.lag, self.sim.now());
        self.expectations = open;
        observed
    }

    fn plan(&mut self) -> (Plan, Observed) {
        let observed = self.observe();
        let now = Now { at: self.sim.now(), ..Now::default() };
        (reconcile(&self.desired, &observed, &self.rules, &now), observed)
    }

    /// One pass: the first step of every instance of the first wave, then the next observation.
    fn pass(&mut self) -> usize {
        let (plan, observed) = self.plan();
        let Some(wave) = plan.waves.first() else { return 0 };
        let mut firsts: BTreeMap<&InstanceKey, _> = BTreeMap::new();
        wave.steps.iter().for_each(|step| {
            firsts.entry(&step.instance).or_insert(step);
        });
        let mut orders = Vec::new();
        for step in firsts.values() {
            self.orders += 1;
            *self.sent.entry((step.instance.clone(), step.op)).or_default() += 1;
            orders.push(Operation::of(step, self.orders.to_string(), "default"));
        }
        let task = now(self.sim.submit("call", &orders));
        self.sim.advance(5);
        let answers = task.and_then(|task| now(self.sim.poll(&task))).unwrap_or_default();
        for (order, step) in orders.iter().zip(firsts.values()) {
            let result = answers.iter().find(|answer| answer.order == order.id).map(|answer| &answer.result);
            let expected = match result {
                Some(OperationState::Done { .. }) => expectations::after(
                    step,
                    observed.instances.get(&step.instance),
                    "default",
                    &self.rules.caps,
                ),
                // Refused: nothing was done.
                Some(OperationState::Failed { .. }) => continue,
                // In progress, missing, or without an answer: unknown.
                Some(OperationState::InProgress) | None => Expected::Unknown,
            };
            let unsure = matches!(expected, Expected::Unknown);
            // What may come late counts for as long as it may come.
            let counts = if unsure { self.lag.max(LATE_SECS + 1) } else { self.lag };
            self.expectations.push(Expectation::new(step.instance.clone(), expected, self.sim.now(), counts));
        }
        firsts.len()
    }

    /// Until there is nothing to do, and nothing left to wait for.
    fn converge(&mut self) -> usize {
        for pass in 0..400 {
            if self.pass() == 0 && self.expectations.is_empty() && self.plan().0.is_empty() {
                return pass;
            }
            self.sim.advance(30);
        }
        panic!("it does not converge: {:#?}", self.plan().0);
    }
}

#[test]
fn a_lagging_list_repeats_no_operation() {
    for dialect in [Dialect::GseV1, Dialect::GseV2] {
        let faults = Faults { lag_secs: LAG, ..Faults::default() };
        let sim = Sim::over(Fleet::new(dialect), faults, 1);
        let mut controller = Controller::new(&sim, desired("./run"), LAG);
        controller.converge();
        let pids: Vec<_> = sim.fleet().procs().values().map(|proc| proc.pid).collect();
        assert!(controller.sent.values().all(|count| *count == 1), "{dialect:?}: {:#?}", controller.sent);

        // A change: one restart each, however long the list shows the old spec.
        controller.desired = desired("./run --fast");
        controller.converge();
        assert!(
            sim.fleet().procs().values().zip(pids).all(|(proc, old)| proc.pid.is_some() && proc.pid != old)
        );
        let restarts = controller.sent.iter().filter(|((_, op), _)| *op == Op::Restart);
        assert!(
            restarts.clone().count() == 12 && restarts.clone().all(|(_, count)| *count == 1),
            "{dialect:?}"
        );
    }
}

/// The same list without expectations: the test above has something to prevent.
#[test]
fn without_expectations_a_lagging_list_starts_it_twice() {
    let sim = Sim::over(Fleet::new(Dialect::GseV2), Faults { lag_secs: LAG, ..Faults::default() }, 1);
    let mut controller = Controller::new(&sim, desired("./run"), LAG);
    controller.pass();
    controller.expectations.clear();
    assert!(controller.plan().0.steps().any(|step| step.op == Op::Start));
}

#[test]
fn a_fleet_converges_after_random_faults() {
    for seed in 0..20 {
        for dialect in Dialect::ALL {
            let lag = if matches!(dialect, Dialect::Abide | Dialect::Job) { 0 } else { LAG };
            let bad = Faults {
                lag_secs: lag,
                lost_replies: 0.2,
                doubled_calls: 0.2,
                missing_rows: 0.1,
                endless_rows: 0.1,
                late_effects: 0.1,
                deaths: 0.001,
            };
            let sim = Sim::over(Fleet::new(dialect), bad, seed);
            let mut controller = Controller::new(&sim, desired("./run"), lag);
            let silent: HostKey = "0:10.0.0.3".parse().expect("a host");
            for pass in 0..20 {
                sim.set_dead(silent.clone(), pass % 5 < 2);
                controller.pass();
                sim.advance(20);
                controller.desired = desired(if pass % 2 == 0 { "./run" } else { "./run --fast" });
                if pass % 5 < 2 {
                    let (plan, _) = controller.plan();
                    assert!(
                        plan.steps().all(|step| step.instance.host != silent),
                        "a silent host was touched"
                    );
                }
            }
            sim.set_dead(silent, false);
            sim.set_faults(Faults { lag_secs: lag, ..Faults::default() });
            controller.converge();
            let fleet = sim.fleet();
            let all_run = fleet.procs().values().all(|proc| proc.hosted && proc.live.is_some());
            assert!(fleet.procs().len() == 12 && all_run, "{dialect:?} seed {seed}");
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_history() {
    let play = |seed: u64| {
        let faults = Faults { lost_replies: 0.3, missing_rows: 0.3, deaths: 0.01, ..Faults::default() };
        let sim = Sim::over(Fleet::new(Dialect::Abide), faults, seed);
        let mut controller = Controller::new(&sim, desired("./run"), 0);
        (0..10).for_each(|_| {
            controller.pass();
            sim.advance(10);
        });
        (sim.fleet(), controller.sent)
    };
    assert_eq!(play(3), play(3));
    assert_ne!(play(3), play(4));
}
