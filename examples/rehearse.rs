//! Rehearsal: reconciles manifests with a simulated fleet that injects faults, until it converges.
//!
//! `cargo run --example rehearse -- manifests 7` (7 is the seed of the faults). Each pass observes, plans and executes the
//! first wave, as a controller does. Lists lag by a minute, replies get lost, processes die.

use std::path::PathBuf;
use std::pin::pin;
use std::process::ExitCode;
use std::task::{Context, Poll, Waker};

use abide::backend::Scope;
use abide::backend::sim::{Faults, Fleet, Sim};
use abide::backend::{Backend, Operation, OperationState};
use abide::manifest::{self, Limits};
use abide::model::{Dialect, Now};
use abide::reconcile::{Caps, Expectation, Expected, Rules, expectations, overlay, reconcile};

const LAG: u64 = 60;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let Some(path) = args.first() else {
        eprintln!("usage: rehearse PATH [SEED]");
        return ExitCode::FAILURE;
    };
    let seed = args.get(1).and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let loaded = manifest::load(&[PathBuf::from(path)], &Limits::default());
    for problem in &loaded.problems {
        eprintln!("{}:{}: {}", problem.file, problem.line, problem.message);
    }
    let faults =
        Faults { lag_secs: LAG, lost_replies: 0.2, missing_rows: 0.1, deaths: 0.0005, ..Faults::default() };
    let sim = Sim::over(Fleet::new(Dialect::Abide), faults, seed);
    let rules = Rules::new(Caps::LOCAL);
    let mut expectations = Vec::new();
    let mut quiet = 0;
    for pass in 1..=100 {
        let look = now(sim.observe(&Scope::default())).expect("the simulation always answers a look");
        let (observed, open) = overlay(look, expectations, LAG, sim.now());
        expectations = open;
        let moment = Now { at: sim.now(), ..Now::default() };
        let plan = reconcile(&loaded.desired, &observed, &rules, &moment);
        quiet = if plan.is_empty() { quiet + 1 } else { 0 };
        if quiet == 3 {
            println!("pass {pass}: nothing to do, three times in a row: converged");
            return ExitCode::SUCCESS;
        }
        let mut steps: Vec<_> =
            plan.waves.first().map(|wave| wave.steps.iter().collect()).unwrap_or_default();
        steps.dedup_by_key(|step| &step.instance);
        let orders: Vec<Operation> = steps
            .iter()
            .map(|step| Operation::of(step, format!("{pass}-{}", step.id), &rules.owner))
            .collect();
        let task = now(sim.submit("call", &orders));
        sim.advance(5);
        let answers = task.and_then(|task| now(sim.poll(&task))).unwrap_or_default();
        for (step, order) in steps.iter().zip(&orders) {
            let answer = answers.iter().find(|answer| answer.order == order.id).map(|answer| &answer.result);
            let (word, expected) = match answer {
                Some(OperationState::Done { .. }) => {
                    let before = observed.instances.get(&step.instance);
                    ("done", Some(expectations::after(step, before, &rules.owner, &rules.caps)))
                }
                Some(OperationState::Failed { .. }) => ("refused", None),
                Some(OperationState::InProgress) | None => ("no answer", Some(Expected::Unknown)),
            };
            println!("pass {pass}: {} {}: {word}", step.op, step.instance);
            let leave = |expected| Expectation::new(step.instance.clone(), expected, sim.now(), LAG);
            expectations.extend(expected.map(leave));
        }
        sim.advance(30);
    }
    println!("not converged after 100 passes");
    ExitCode::FAILURE
}

/// Runs a future that never waits: simulated time passes only on request.
fn now<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => unreachable!("the simulation does not wait"),
    }
}
