//! Law of unowned processes: processes and registrations of others are never touched without `--adopt`.
//!
//! Thousands of seeded worlds have every dialect, lost and doubled calls, lists that lag, and runs that crash. Time is paused.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use abide::backend::sim::{Faults, Proc, SimulatedSpec};
use abide::execute::{ActiveHolds, ExecutionContext, ExecutionSettings, execute, journal, recover};
use abide::model::{Desired, Dialect, HashedSpec, HoldReason, InstanceKey, Now, Plan, Spec};
use abide::observe::{NoHistory, Observation, SearchCache, StablePlanInputs, Target};
use abide::reconcile::Rules;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::fake::{Fake, no_faults};
use crate::fixtures::manifest::{self, Manifest};
use crate::soak::paused;

const OWNER: &str = "team";

/// Four processes on two hosts, each wanted in one of the states.
fn desired(random: &mut fastrand::Rng) -> Desired {
    let one = |name: &str| {
        let state = ["running", "running", "running", "stopped", "unhosted", "absent"][random.usize(..6)];
        Manifest::remote(name)
            .hosts(2)
            .field("state", state)
            .start_cmd("./run")
            .stop_cmd("./stop")
            .control("restart_cmd", "./restart")
    };
    manifest::desired(["a", "b", "c", "d"].map(one))
}

/// What others have in a world: their processes by pid, and their registrations.
#[derive(Debug, Default, PartialEq)]
struct UnownedProcesses {
    pids: BTreeMap<InstanceKey, u32>,
    registered: BTreeMap<InstanceKey, Option<SimulatedSpec>>,
}

fn place_others(fake: &Fake, desired: &Desired, random: &mut fastrand::Rng) -> UnownedProcesses {
    let mut others = UnownedProcesses::default();
    for key in desired.instances.keys() {
        match random.u8(..4) {
            0 => fake.sim().meddle(|fleet| {
                others.pids.insert(key.clone(), fleet.place_stranger(key.clone()));
            }),
            1 if fake.caps().registry => fake.sim().meddle(|fleet| {
                let mut spec = Spec::default();
                spec.control.start_cmd = Some("./theirs".to_owned());
                let held = SimulatedSpec { spec: Arc::new(HashedSpec::new(spec)), revision: None };
                fleet.place(key.clone(), Proc { given: Some(held.clone()), ..Proc::default() });
                others.registered.insert(key.clone(), Some(held));
            }),
            _ => {}
        }
    }
    others
}

/// What is left of it.
fn remaining(fake: &Fake, others: &UnownedProcesses) -> UnownedProcesses {
    let fleet = fake.sim().fleet();
    let given = |key: &InstanceKey| fleet.procs().get(key).and_then(|proc| proc.given.clone());
    UnownedProcesses {
        pids: fleet.strangers().iter().map(|(key, pid)| (key.clone(), *pid)).collect(),
        registered: others.registered.keys().map(|key| (key.clone(), given(key))).collect(),
    }
}

struct Controller<'a> {
    fake: &'a Fake,
    desired: &'a Desired,
    rules: Rules,
    runs: usize,
}

impl Controller<'_> {
    async fn plan(&self) -> Option<(Observation, Plan)> {
        let mut world = self.fake.observe(self.desired, true).await.ok()?;
        let mut rules = self.rules.clone();
        rules.orphans.known_namespaces = world.namespaces(OWNER);
        let now = Now { at: self.fake.sim().now(), ..Now::default() };
        let inputs = StablePlanInputs { desired: self.desired, rules: &rules, now: &now };
        let known = &mut SearchCache::default();
        let planned = world.plan_until_stable(&inputs, &self.fake.far, &NoHistory, known).await;
        Some((world, planned))
    }

    /// Time passes while something is done. `None`: it did not end within that many seconds.
    async fn within<T>(&self, secs: u64, work: impl Future<Output = T>) -> Option<T> {
        let mut work = std::pin::pin!(work);
        for _ in 0..secs {
            tokio::select! {
                biased;
                done = &mut work => return Some(done),
                () = tokio::time::sleep(Duration::from_secs(1)) => self.fake.sim().advance(1),
            }
        }
        None
    }

    /// One run, which may be killed after a number of seconds.
    async fn run(&mut self, secs: u64) {
        self.runs += 1;
        let (backend, store) = (&self.fake.far, self.fake.state());
        let call = journal::unfinished(store, OWNER).await.expect("a journal");
        let whom = (self.fake.name(), &self.rules.caps);
        let deadline = Instant::now() + Duration::from_secs(300);
        let settled = self.within(400, recover(backend, store, whom, OWNER, call, deadline)).await;
        if settled.is_none_or(|settled| settled.is_err()) {
            return;
        }
        let Some((world, plan)) = self.plan().await else { return };
        let (_stop, stopped) = watch::channel(false);
        let settings = ExecutionSettings {
            owner: OWNER.to_owned(),
            target: self.fake.name().to_owned(),
            caps: self.rules.caps,
            run: format!("run-{}", self.runs),
            deadline: Instant::now() + Duration::from_secs(300),
            max_parallel: 1000,
            check: |_| None,
            active_holds: watch::channel(ActiveHolds::default()).1,
            stop: stopped,
            origin: None,
        };
        let terms = ExecutionContext::new(settings, self.desired, &world.observed, &plan);
        self.within(secs, execute(&plan, backend, store, &terms, &mut |_| {})).await;
    }
}

async fn check_property(dialect: Dialect, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let fake = Fake::new(dialect, false, seed);
    let desired = desired(&mut random);
    let others = place_others(&fake, &desired, &mut random);
    // They were there before the first run.
    fake.pass(random.u64(2..400)).await;
    let chance = |random: &mut fastrand::Rng| if random.bool() { 0.3 } else { 0.0 };
    fake.sim().set_faults(Faults {
        lost_replies: chance(&mut random),
        doubled_calls: chance(&mut random),
        // Every row of our own gateway ends: in 117, if its agent never answers.
        missing_rows: if dialect == Dialect::Abide { 0.0 } else { chance(&mut random) },
        endless_rows: if dialect == Dialect::Abide { 0.0 } else { chance(&mut random) },
        ..no_faults(dialect)
    });
    let rules = Rules { owner: OWNER.to_owned(), prune: random.bool(), ..Rules::new(fake.caps()) };
    let mut controller = Controller { fake: &fake, desired: &desired, rules, runs: 0 };
    let what = format!("{dialect:?} seed {seed}");
    for run in 0..4 {
        let secs = if random.bool() { random.u64(1..5) } else { 400 };
        controller.run(secs).await;
        assert_eq!(remaining(&fake, &others), others, "{what} run {run}");
        fake.pass(random.u64(0..400)).await;
    }
    fake.sim().set_faults(no_faults(dialect));
    for run in 0..3 {
        fake.pass(400).await;
        controller.run(400).await;
        assert_eq!(remaining(&fake, &others), others, "{what} calm run {run}");
    }
    fake.pass(400).await;
    let (_, plan) = controller.plan().await.expect("a plan");
    assert_eq!(plan.steps().count(), 0, "{what}: {plan:#?}");
    assert!(plan.held.iter().all(|held| held.reason == HoldReason::NotOwned), "{what}: {:#?}", plan.held);
    for key in others.pids.keys().filter(|key| desired.instances[*key].origin.state.needs_start()) {
        assert!(plan.held.iter().any(|held| held.instance == *key), "{what}: {key} is not held");
    }
}

#[test]
fn processes_of_other_owners_are_never_touched() {
    let seeds = if std::env::var_os("ABIDE_SOAK").is_some() { 2000 } else { 200 };
    for dialect in Dialect::ALL {
        for seed in 0..seeds {
            paused().block_on(check_property(dialect, seed));
        }
    }
}
