//! Plan execution against a scripted target: started and skipped steps, and their order. Time is paused.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Duration;

use abide::backend::{
    Backend, BackendError, Operation, OperationState, OperationStatus, RowState, Scope, Task,
};
use abide::execute::{
    ActiveHolds, ExecutionContext, ExecutionResult, ExecutionSettings, StepOutcome, execute, journal,
    new_run_id,
};
use abide::model::{
    Desired, Dialect, Health, InstanceKey, KnownSpec, Now, Observed, ObservedInstance, ObservedSpecs, Pause,
    RunningProcess, Time,
};
use abide::reconcile::{Caps, Rules, reconcile};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::fake::MemoryStore;
use crate::fixtures::manifest::{self, Manifest};
use crate::soak::paused;

/// Performs each operation at once, except for the faults of the test.
#[derive(Default)]
struct Stub {
    /// What was sent, and how long after the beginning.
    sent: Mutex<Vec<(String, Duration)>>,
    begin: Option<Instant>,
    fails: BTreeSet<&'static str>,
    /// Takes calls and never answers.
    hangs: bool,
    /// Accepts calls, and does not answer afterwards.
    leaves: bool,
    /// The target cannot be observed from here on.
    blind_after: Option<Duration>,
    /// Hosts that are gone by then.
    gone: Option<(&'static str, Duration)>,
}

impl Stub {
    fn new() -> Stub {
        Stub { begin: Some(Instant::now()), ..Stub::default() }
    }

    fn at(&self) -> Duration {
        self.begin.map(|begin| begin.elapsed()).unwrap_or_default()
    }

    /// When something was sent for this one.
    fn sent(&self, name: &str) -> Option<u64> {
        let sent = self.sent.lock().expect("a lock");
        sent.iter().find(|(key, _)| key.contains(name)).map(|(_, at)| at.as_secs())
    }
}

impl Backend for Stub {
    fn dialect(&self) -> Dialect {
        Dialect::Abide
    }

    fn has_idempotency_keys(&self) -> bool {
        true
    }

    async fn observe(&self, scope: &Scope) -> Result<Observed, BackendError> {
        if self.hangs {
            return std::future::pending().await;
        }
        if self.blind_after.is_some_and(|after| self.at() >= after) {
            return Err(BackendError::NoAnswer);
        }
        let well =
            ObservedInstance { running: Some(true), health: Health::Healthy, ..ObservedInstance::default() };
        let rows = scope.subjects.iter().map(|subject| (subject.instance.clone(), well.clone()));
        let mut observed = Observed { instances: rows.collect(), ..Observed::default() };
        if let Some((host, _)) = self.gone.filter(|(_, after)| self.at() >= *after) {
            observed.gaps.insert(host.parse().expect("a host"), "gone".to_owned());
        }
        Ok(observed)
    }

    async fn submit(&self, _call: &str, orders: &[Operation]) -> Result<Task, BackendError> {
        if self.hangs {
            return std::future::pending().await;
        }
        let at = self.at();
        self.sent.lock().expect("a lock").extend(orders.iter().map(|order| (order.instance.to_string(), at)));
        if self.leaves {
            let rows = orders.iter().map(|order| (order.instance.clone(), order.id.clone()));
            return Ok(Task { ids: vec!["1".to_owned()], rows: rows.collect(), ..Task::default() });
        }
        let answer = |order: &Operation| {
            let failed = OperationState::Failed { state: RowState::Other(1), message: "no".to_owned() };
            let fails = self.fails.contains(order.instance.name.to_string().as_str());
            let result = if fails { failed } else { OperationState::Done { note: String::new() } };
            OperationStatus { order: order.id.clone(), instance: order.instance.clone(), result }
        };
        Ok(Task { answered: orders.iter().map(answer).collect(), ..Task::default() })
    }

    async fn poll(&self, _task: &Task) -> Result<Vec<OperationStatus>, BackendError> {
        Err(BackendError::NoAnswer)
    }
}

/// Processes by name, number of hosts from 10.0.0.1 on, and one more field as YAML.
fn desired(processes: &[(&str, u64, &str)]) -> Desired {
    let one = |(name, hosts, more): &(&str, u64, &str)| {
        let manifest = Manifest::remote(name).hosts(*hosts).start_cmd("./run").stop_cmd("./stop");
        match more.split_once(": ") {
            Some((field, yaml)) => manifest.field(field, yaml),
            None => manifest,
        }
    };
    manifest::desired(processes.iter().map(one))
}

/// As wanted, and running since then.
fn observed_running(desired: &Desired, key: &InstanceKey, since: Time) -> ObservedInstance {
    let (yes, spec) = (Some(true), KnownSpec::Full(desired.instances[key].spec.clone()));
    let owner = Some("default".into());
    let (given, live, since) = (spec.clone(), spec, Some(since));
    let health = Health::Healthy;
    ObservedInstance {
        registered: yes,
        hosted: yes,
        running: yes,
        owner,
        since,
        health,
        specs: ObservedSpecs { registered: given, live, ..ObservedSpecs::default() },
        process: RunningProcess { pid: Some(7), ..RunningProcess::default() },
        ..ObservedInstance::default()
    }
}

async fn execute_with(
    stub: &Stub,
    store: &MemoryStore,
    desired: &Desired,
    observed: &Observed,
    change: impl FnOnce(&mut ExecutionContext),
) -> ExecutionResult {
    let plan = reconcile(desired, observed, &Rules::new(Caps::LOCAL), &Now::default());
    assert_eq!(plan.held, []);
    let (_stop, stopped) = watch::channel(false);
    let settings = ExecutionSettings {
        owner: "default".to_owned(),
        target: String::new(),
        caps: Caps::LOCAL,
        run: new_run_id(),
        deadline: Instant::now() + Duration::from_secs(600),
        max_parallel: 1000,
        check: |_| None,
        active_holds: watch::channel(ActiveHolds::default()).1,
        stop: stopped,
        origin: None,
    };
    let mut terms = ExecutionContext::new(settings, desired, observed, &plan);
    change(&mut terms);
    execute(&plan, stub, store, &terms, &mut |_| {}).await
}

fn outcome<'e>(done: &'e ExecutionResult, name: &str) -> (StepOutcome, &'e str) {
    let last =
        done.ended.iter().rev().find(|ended| ended.instance.to_string().contains(name)).expect("a step");
    (last.outcome, &last.message)
}

#[test]
fn dependents_of_a_skipped_step_are_skipped() {
    paused().block_on(async {
        let needs = |name: &str| format!("depends_on: [{name}]");
        let all = desired(&[
            ("db", 1, ""),
            ("api", 1, &needs("db")),
            ("front", 1, &needs("api")),
            ("alone", 1, ""),
        ]);
        let stub = Stub { fails: BTreeSet::from(["db"]), ..Stub::new() };
        let done = execute_with(&stub, &MemoryStore::default(), &all, &Observed::default(), |_| {}).await;
        assert_eq!(outcome(&done, ":db"), (StepOutcome::Failed, "no"));
        assert_eq!(outcome(&done, ":api").0, StepOutcome::Skipped);
        assert_eq!(outcome(&done, ":front"), (StepOutcome::Skipped, "dependency web/api was not started"));
        assert_eq!(outcome(&done, ":alone").0, StepOutcome::Done);
    });
}

#[test]
fn a_soak_blocks_no_other_component_and_paused_steps_are_skipped() {
    paused().block_on(async {
        let all = desired(&[
            ("slow", 3, "rollout: {batch: 1, soak: 20s}"),
            ("db", 1, ""),
            ("api", 1, "depends_on: [db]"),
        ]);
        let stub = Stub::new();
        let (tell, active_holds) = watch::channel(ActiveHolds::default());
        let pause = async {
            tokio::time::sleep(Duration::from_secs(30)).await;
            let pause = Pause { namespace: None, by: "me".to_owned(), reason: None, until: None };
            tell.send_replace(ActiveHolds::of((Vec::new(), vec![pause]), &Rules::new(Caps::LOCAL)));
        };
        let (store, nothing) = (MemoryStore::default(), Observed::default());
        let done =
            execute_with(&stub, &store, &all, &nothing, |terms| terms.settings.active_holds = active_holds);
        let (done, ()) = tokio::join!(done, pause);
        assert_eq!([stub.sent("10.0.0.1:web:slow"), stub.sent("10.0.0.2:web:slow")], [Some(0), Some(20)]);
        assert_eq!(stub.sent(":api"), Some(0), "it does not wait for what it has nothing to do with");
        assert_eq!(outcome(&done, "10.0.0.3:web:slow"), (StepOutcome::Skipped, "everything is paused by me"));
        assert_eq!(done.ended.len(), 5);
        assert!(done.ended.is_sorted_by_key(|ended| ended.step));
    });
}

#[test]
fn an_unresponsive_target_ends_at_the_timeout() {
    paused().block_on(async {
        let begin = Instant::now();
        let stub = Stub { hangs: true, ..Stub::new() };
        let five =
            |terms: &mut ExecutionContext| terms.settings.deadline = Instant::now() + Duration::from_secs(5);
        let all = desired(&[("a", 1, "")]);
        let done = execute_with(&stub, &MemoryStore::default(), &all, &Observed::default(), five).await;
        assert_eq!(outcome(&done, ":a").0, StepOutcome::Unknown);
        assert!(begin.elapsed() < Duration::from_secs(8), "{:?}", begin.elapsed());
    });
}

#[test]
fn an_unobservable_instance_fails_its_rollout() {
    paused().block_on(async {
        let all = desired(&[("slow", 2, "rollout: {batch: 1, soak: 20s, auto_rollback: true}")]);
        let soon = Duration::from_secs(10);
        let stub = Stub { blind_after: Some(soon), ..Stub::new() };
        let done = execute_with(&stub, &MemoryStore::default(), &all, &Observed::default(), |_| {}).await;
        assert_eq!(outcome(&done, "10.0.0.1").0, StepOutcome::Failed);
        assert_eq!((stub.sent("10.0.0.2"), done.to_roll_back.len()), (None, 1));

        let stub = Stub { gone: Some(("0:10.0.0.1", soon)), ..Stub::new() };
        let done = execute_with(&stub, &MemoryStore::default(), &all, &Observed::default(), |_| {}).await;
        assert_eq!(
            outcome(&done, "10.0.0.1"),
            (StepOutcome::Failed, "host could not be observed after the change")
        );
        assert_eq!((stub.sent("10.0.0.2"), done.to_roll_back.len()), (None, 1));
    });
}

#[test]
fn an_interrupted_soak_resumes_before_the_next_batch() {
    paused().block_on(async {
        let all = desired(&[("slow", 2, "rollout: {batch: 1, soak: 20s}")]);
        let first = all.instances.keys().next().expect("an instance");
        let observed = |since| {
            let rows = [(first.clone(), observed_running(&all, first, since))];
            Observed { instances: rows.into(), ..Observed::default() }
        };
        let young = abide::clock::now().before_secs(5);
        let stub = Stub::new();
        execute_with(&stub, &MemoryStore::default(), &all, &observed(young), |_| {}).await;
        assert!(
            stub.sent("10.0.0.2").is_some_and(|at| (13..=15).contains(&at)),
            "{:?}",
            stub.sent("10.0.0.2")
        );

        let stub = Stub::new();
        execute_with(&stub, &MemoryStore::default(), &all, &observed(young.before_secs(60)), |_| {}).await;
        assert_eq!(stub.sent("10.0.0.2"), Some(0));

        let stub = Stub { gone: Some(("0:10.0.0.1", Duration::from_secs(9))), ..Stub::new() };
        let young = abide::clock::now();
        let done = execute_with(&stub, &MemoryStore::default(), &all, &observed(young), |_| {}).await;
        assert_eq!(outcome(&done, "10.0.0.2").0, StepOutcome::Skipped, "the canary is not well");
    });
}

#[test]
fn the_journal_keeps_steps_with_unknown_outcome() {
    paused().block_on(async {
        let (stub, store) = (Stub { leaves: true, ..Stub::new() }, MemoryStore::default());
        let all = desired(&[("a", 1, "")]);
        let done = execute_with(&stub, &store, &all, &Observed::default(), |_| {}).await;
        assert_eq!(outcome(&done, ":a").0, StepOutcome::Unknown);
        assert_eq!(journal::unfinished(&store, "default").await.expect("a journal").len(), 1);
    });
}
