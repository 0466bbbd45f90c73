//! Laws of the core over thousands of random fleets, for every kind of target. The fleet carries out what the plan
//! says by rules of its own (`backend::sim`), and so judges it.
//!
//! Every world comes from a number; a law that fails prints it, and `ABIDE_SEED=N cargo test worlds` plays it again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use abide::backend::Operation;
use abide::backend::sim::{Fleet, Held, Proc};
use abide::model::{
    Amount, AutoType, ConfigFile, DeclaredProcess, Desired, DesiredInstance, Dialect, Effect, EnvValue,
    HashedSpec, Hold, HoldReason, Host, HostKey, InstanceKey, KnownSpec, Now, Observed, ObservedInstance,
    OnChange, Op, Pause, Percent, Plan, Policy, ProcessKey, Protection, Rollout, Rule, Secret,
    SourceLocation, Spec, State, Step, Time,
};
use abide::reconcile::{Caps, EffectTable, Expected, Rules, expectations, reconcile};

const WORLDS: u64 = 3_000;
const OWNER: &str = "shop";

/// Plays a law in every world, or in the one that is asked for.
fn in_every_world(law: impl Fn(&mut World)) {
    let seeds = match std::env::var("ABIDE_SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => seed..seed + 1,
        None => 0..WORLDS,
    };
    for seed in seeds {
        let played = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| law(&mut World::new(seed))));
        if let Err(panic) = played {
            eprintln!("in the world of ABIDE_SEED={seed}");
            std::panic::resume_unwind(panic);
        }
    }
}

struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = (self.0 ^ (self.0 >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed >> 33) % sides
    }

    fn one_in(&mut self, sides: u64) -> bool {
        self.roll(sides) == 0
    }

    fn pick<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.roll(of.len() as u64) as usize].clone()
    }
}

struct World {
    dice: Dice,
    fleet: Fleet,
    desired: Desired,
    rules: Rules,
    now: Now,
    /// Hosts that cannot be seen.
    gaps: BTreeSet<HostKey>,
    /// A look shows digests of specs alone.
    hidden: bool,
}

impl World {
    fn new(seed: u64) -> World {
        let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d);
        let dialect = dice.pick(&Dialect::ALL);
        let caps = Caps::of(dialect);
        let mut fleet = Fleet::new(dialect);
        let hidden = dice.one_in(4);
        if hidden {
            fleet = fleet.hide_specs();
        }
        let mut rules = Rules::new(caps);
        rules.owner = OWNER.to_owned();
        rules.prune = dice.one_in(2);
        rules.adopt = dice.one_in(3);
        rules.max_delete = dice.pick(&[None, Some(Amount::Count(10)), Some(Amount::Count(0)), share(50.0)]);
        rules.max_restart = dice.pick(&[None, None, Some(Amount::Count(1)), share(50.0)]);
        let mut world = World {
            dice,
            fleet,
            desired: Desired::default(),
            rules,
            now: Now { at: Time(1_000_000_000), ..Now::default() },
            gaps: BTreeSet::new(),
            hidden,
        };
        world.desired = world.desired();
        world.people();
        world.settle();
        world
    }

    /// Names a to f, each on some of three hosts; a name may depend on those before it.
    fn desired(&mut self) -> Desired {
        let mut desired = Desired::default();
        if self.dice.one_in(4) {
            desired.policies.push(self.policy());
        }
        for (nth, name) in ["a", "b", "c", "d", "e", "f"].into_iter().enumerate() {
            if self.dice.one_in(3) {
                continue;
            }
            let auto_type = self.dice.pick(&[
                AutoType::Resident,
                AutoType::Resident,
                AutoType::Resident,
                AutoType::Periodic,
                AutoType::OneShot,
            ]);
            let spec = Arc::new(HashedSpec::new(self.spec(name, auto_type)));
            let state = match (auto_type, self.dice.roll(8)) {
                (_, 0) => State::Stopped,
                (_, 1) => State::Absent,
                (AutoType::Resident | AutoType::Periodic, 2) => State::Unhosted,
                (_, _) => State::Running,
            };
            let depends_on: Vec<ProcessKey> = ["a", "b", "c", "d", "e"][..nth.min(5)]
                .iter()
                .filter(|_| self.dice.one_in(4))
                .map(|name| process(name))
                .collect();
            let protect =
                if self.dice.one_in(8) { vec![self.dice.pick(&Protection::ALL)] } else { Vec::new() };
            let rollout = self.dice.one_in(5).then(|| Rollout {
                batch: Some(Amount::Count(1)),
                canary: self.dice.one_in(2).then_some(Amount::Count(1)),
                ..Rollout::default()
            });
            let moved_from =
                if self.dice.one_in(5) { vec![process(&format!("old-{name}"))] } else { Vec::new() };
            let policies = (0..desired.policies.len()).collect();
            let on_change = self.on_change();
            let origin = Arc::new(DeclaredProcess {
                place: SourceLocation { file: "w.yaml".into(), line: nth as u32 + 1, column: 1 },
                declared: process(name),
                state,
                depends_on,
                protect,
                adopt: self.dice.one_in(8),
                moved_from,
                on_change,
                rollout,
                policies,
            });
            for host in hosts() {
                if self.dice.one_in(3) {
                    continue;
                }
                let want = DesiredInstance {
                    host: host.clone(),
                    spec: Arc::clone(&spec),
                    origin: Arc::clone(&origin),
                };
                desired.instances.insert(key(&host, name), want);
            }
        }
        desired
    }

    fn policy(&mut self) -> Policy {
        let mut policy = Policy {
            name: "p".into(),
            place: SourceLocation { file: "p.yaml".into(), line: 1, column: 1 },
            reach: "/".into(),
            owner: None,
            allow: Default::default(),
            budgets: Default::default(),
            windows: Vec::new(),
        };
        policy.budgets.delete = self.dice.pick(&[None, Some(Amount::Count(1)), share(20.0)]);
        policy.budgets.restart = self.dice.pick(&[None, Some(Amount::Count(1)), share(30.0)]);
        policy
    }

    fn on_change(&mut self) -> OnChange {
        use abide::model::Field;
        if !self.dice.one_in(4) {
            return OnChange::new();
        }
        let field =
            self.dice.pick(&[Field::StartCmd, Field::Env, Field::Configmap, Field::HealthCmd, Field::Labels]);
        let effect = self.dice.pick(&[Effect::None, Effect::Register, Effect::Reload, Effect::Restart]);
        OnChange::from([(field, effect)])
    }

    /// One of a few specs of a name; every class of fields has two variants or three.
    fn spec(&mut self, name: &str, auto_type: AutoType) -> Spec {
        let (hidden, dice) = (self.hidden, &mut self.dice);
        let mut spec = Spec::default();
        spec.identity.proc_name = name.to_owned();
        spec.identity.setup_path = if dice.one_in(6) { "/opt/other" } else { "/opt" }.to_owned();
        spec.identity.pid_path = format!("/run/{name}.pid");
        spec.identity.user = Some("app".to_owned());
        spec.monitor.auto_type = auto_type;
        spec.monitor.crontab_rule =
            (auto_type == AutoType::Periodic).then(|| dice.pick(&["* * * * *", "@daily"]).to_owned());
        spec.control.start_cmd = Some(dice.pick(&["./run", "./run --fast"]).to_owned());
        // Whether something that is known by digests can be stopped nobody knows before trying.
        spec.control.stop_cmd = (hidden || !dice.one_in(6)).then(|| "./stop".to_owned());
        spec.control.kill_cmd = dice.one_in(3).then(|| "./kill".to_owned());
        spec.control.restart_cmd = dice.one_in(2).then(|| "./restart".to_owned());
        spec.control.reload_cmd = dice.one_in(2).then(|| "./reload".to_owned());
        spec.control.health_cmd = dice.one_in(2).then(|| "./health".to_owned());
        if dice.one_in(2) {
            spec.labels.insert("tier".to_owned(), dice.pick(&["front", "back"]).to_owned());
        }
        for path in ["/etc/a", "/etc/b"] {
            if dice.one_in(2) {
                let md5 =
                    dice.pick(&["0cc175b9c0f1b6a831c399e269772661", "92eb5ffee6ae2fec3ad71c777531578f"]);
                spec.configmap.push(ConfigFile { path: Some(path.into()), md5: Some(md5.into()) });
            }
        }
        if dice.one_in(8) {
            let secret = Secret::new(dice.pick(&["hush", "quiet"]).to_owned());
            spec.env.insert("TOKEN".to_owned(), EnvValue::Secret(secret));
        }
        spec
    }

    fn people(&mut self) {
        for host in hosts() {
            if self.dice.one_in(10) {
                self.gaps.insert(host.key.clone());
            }
            if self.dice.one_in(10) {
                let instance = key(&host, "b");
                self.rules.holds.push(Hold { instance, by: "ann".into(), reason: None, until: None });
            }
        }
        if self.dice.one_in(20) {
            let namespace = Some("web".parse().expect("a name"));
            self.rules.pauses.push(Pause { namespace, by: "bob".into(), reason: None, until: None });
        }
    }

    /// What is there, more or less as somebody would have left it.
    fn settle(&mut self) {
        for host in hosts() {
            for name in ["a", "b", "c", "d", "e", "f", "old-a", "old-b", "old-c", "gone"] {
                if self.dice.one_in(3) {
                    continue;
                }
                let plain = name.trim_start_matches("old-");
                // What was renamed is not there twice; and where only digests are seen nobody can tell that two
                // processes of one identity would meet.
                if plain != name && (self.hidden || self.fleet.procs().contains_key(&key(&host, plain))) {
                    continue;
                }
                let wanted = self.desired.instances.get(&key(&host, plain)).cloned();
                let proc = self.proc(plain, wanted.as_ref());
                if proc != Proc::default() {
                    self.fleet.place(key(&host, name), proc);
                }
            }
        }
    }

    fn proc(&mut self, name: &str, wanted: Option<&DesiredInstance>) -> Proc {
        let kind = wanted.map_or(AutoType::Resident, |want| want.spec.monitor.auto_type);
        let one = self.held(name, kind, wanted);
        // Mostly the same spec is held and runs.
        let other = if self.dice.one_in(3) { self.held(name, kind, wanted) } else { one.clone() };
        let hosted = !self.dice.one_in(3);
        let given = (hosted || self.dice.one_in(2)).then(|| one.clone());
        let live = self.dice.one_in(2).then(|| other.clone());
        let ran = match (&live, kind) {
            (Some(live), AutoType::OneShot) => Some(live.clone()),
            (None, AutoType::OneShot) if self.dice.one_in(2) => Some(other),
            _ => None,
        };
        let owner =
            self.dice.pick(&[Some(OWNER), Some(OWNER), Some(OWNER), Some(OWNER), None, Some("other")]);
        let there = given.is_some() || live.is_some();
        // What nobody owns is adopted as it runs; that it runs as wanted keeps one plan enough.
        let (given, live) = match (owner, wanted) {
            (None, Some(want)) => {
                let wanted = self.exactly(want);
                (given.map(|_| wanted.clone()), live.map(|_| wanted))
            }
            _ => (given, live),
        };
        Proc { owner: owner.filter(|_| there).map(str::to_owned), given, hosted, live, pid: None, ran }
    }

    fn exactly(&self, want: &DesiredInstance) -> Held {
        let caps = self.rules.caps;
        let classes =
            EffectTable::of(&want.spec, &want.origin.on_change).without(|field| !caps.supports_field(field));
        Held { spec: Arc::clone(&want.spec), revision: Some(classes.revision(&want.spec)) }
    }

    fn held(&mut self, name: &str, kind: AutoType, wanted: Option<&DesiredInstance>) -> Held {
        let spec = match wanted {
            Some(want) if self.dice.one_in(2) => Arc::clone(&want.spec),
            _ => Arc::new(HashedSpec::new(self.spec(name, kind))),
        };
        let on_change = wanted.map(|want| want.origin.on_change.clone()).unwrap_or_default();
        let caps = self.rules.caps;
        let classes = EffectTable::of(&spec, &on_change).without(|field| !caps.supports_field(field));
        let revision = Some(classes.revision(&spec));
        Held { spec, revision }
    }

    /// A share of what is ours changes while a plan is carried out; a count does not.
    fn count_budgets(&mut self) {
        let count = |amount: Option<Amount>| amount.map(|_| Amount::Count(1));
        self.rules.max_delete = count(self.rules.max_delete).or(Some(Amount::Count(100)));
        self.rules.max_restart = count(self.rules.max_restart);
        for policy in &mut self.desired.policies {
            policy.budgets.delete = count(policy.budgets.delete);
            policy.budgets.restart = count(policy.budgets.restart);
        }
    }

    fn observe(&self) -> Observed {
        let instances =
            self.fleet.rows().into_iter().filter(|(key, _)| !self.gaps.contains(&key.host)).collect();
        let gaps = self.gaps.iter().map(|host| (host.clone(), "silent".to_owned())).collect();
        Observed { instances, gaps, at: self.now.at }
    }

    fn plan(&self) -> Plan {
        reconcile(&self.desired, &self.observe(), &self.rules, &self.now)
    }

    fn execute_step(&mut self, step: &Step) {
        let order = Operation::of(step, step.id.to_string(), OWNER);
        let before = self.fleet.clone();
        if let Err(why) = self.fleet.carry_out(&order) {
            self.fleet = before;
            panic!("{why}\nof {}\nin {}", line(step), drawn(self));
        }
        // What runs once comes to its end before anybody goes on.
        let once = step.spec.as_ref().is_some_and(|spec| spec.monitor.auto_type == AutoType::OneShot);
        if once && step.op == Op::Start {
            self.fleet.dies(&step.instance);
        }
    }

    /// The steps of a plan in some order that its waves allow.
    fn order<'p>(&mut self, plan: &'p Plan) -> Vec<&'p Step> {
        let mut steps = Vec::new();
        for wave in &plan.waves {
            let mut chains: BTreeMap<&InstanceKey, std::collections::VecDeque<&Step>> = BTreeMap::new();
            for step in &wave.steps {
                chains.entry(&step.instance).or_default().push_back(step);
            }
            while !chains.is_empty() {
                let keys: Vec<&InstanceKey> = chains.keys().copied().collect();
                let chosen = self.dice.pick(&keys);
                let chain = chains.get_mut(chosen).expect("it is there");
                steps.extend(chain.pop_front());
                if chain.is_empty() {
                    chains.remove(chosen);
                }
            }
        }
        steps
    }
}

fn share(percent: f64) -> Option<Amount> {
    Percent::new(percent).map(Amount::Share)
}

fn hosts() -> Vec<Host> {
    let host = |n| format!("0:10.0.0.{n}").parse().expect("a host");
    (1..=3).map(|n| Host { key: host(n), supplier: None, agent_id: None }).collect()
}

fn process(name: &str) -> ProcessKey {
    format!("web/{name}").parse().expect("a process")
}

fn key(host: &Host, name: &str) -> InstanceKey {
    format!("{}:web:{name}", host.key).parse().expect("a key")
}

/// A plan on a few lines.
fn shown(plan: &Plan) -> String {
    let mut text = String::new();
    for (nth, wave) in plan.waves.iter().enumerate() {
        text.extend(wave.steps.iter().map(|step| format!("  wave {} {}\n", nth + 1, line(step))));
    }
    text.extend(
        plan.held
            .iter()
            .map(|held| format!("  held {}: {} {:?}\n", held.instance, held.reason.word(), held.steps)),
    );
    text
}

fn line(step: &Step) -> String {
    let rules: Vec<&str> = step.why.iter().map(|why| why.rule.word()).collect();
    let from = step.from.as_ref().map(|from| format!(" from {from}")).unwrap_or_default();
    format!("{}({}) {}{from} {}", step.op, step.spec_side.word(), step.instance, rules.join(","))
}

/// A fleet beside what is wanted of it, on a few lines.
fn drawn(world: &World) -> String {
    let class = |held: &Option<Held>, want: Option<&DesiredInstance>| match (held, want) {
        (None, _) => "-".to_owned(),
        (Some(_), None) => "o".to_owned(),
        (Some(held), Some(want)) => {
            let classes = EffectTable::of(&want.spec, &want.origin.on_change)
                .without(|field| !world.rules.caps.supports_field(field));
            let changes = abide::reconcile::changes(&held.spec, &want.spec, &classes);
            changes.iter().map(|change| format!("{} ", change.effect)).collect::<String>() + "n"
        }
    };
    let mut text =
        format!("{} prune {} adopt {}\n", world.fleet.dialect().name(), world.rules.prune, world.rules.adopt);
    let keys: BTreeSet<&InstanceKey> =
        world.desired.instances.keys().chain(world.fleet.procs().keys()).collect();
    for key in keys {
        let want = world.desired.instances.get(key);
        let proc = world.fleet.procs().get(key).cloned().unwrap_or_default();
        let wanted = want.map_or("-".to_owned(), |want| {
            let DeclaredProcess { state, depends_on, moved_from, .. } = &*want.origin;
            let Spec { control, monitor, .. } = &**want.spec;
            let commands = [&control.stop_cmd, &control.kill_cmd, &control.restart_cmd, &control.reload_cmd];
            format!(
                "{state:?} {:?} {depends_on:?} {moved_from:?} cmds {:?}",
                monitor.auto_type,
                commands.map(|cmd| cmd.is_some())
            )
        });
        let (given, live) = (class(&proc.given, want), class(&proc.live, want));
        let (ran, owner, hosted) = (proc.ran.is_some(), &proc.owner, proc.hosted);
        text.push_str(&format!(
            "  {key}: {wanted} | given {given} hosted {hosted} live {live} ran {ran} {owner:?}\n"
        ));
    }
    text
}

#[test]
fn one_execution_converges_and_planning_again_is_empty() {
    let mut steps = 0;
    let count = std::cell::RefCell::new(&mut steps);
    in_every_world(|world| {
        world.count_budgets();
        let plan = world.plan();
        for step in world.order(&plan) {
            world.execute_step(step);
            **count.borrow_mut() += 1;
        }
        let again = world.plan();
        assert_eq!(
            again.steps().count(),
            0,
            "again:\n{}after:\n{}{}",
            shown(&again),
            shown(&plan),
            drawn(world)
        );
        // What was held still is, for the same reason: nobody touched it.
        let reasons = |plan: &Plan| -> BTreeMap<InstanceKey, HoldReason> {
            plan.held.iter().map(|held| (held.instance.clone(), held.reason)).collect()
        };
        assert_eq!(reasons(&again), reasons(&plan));
    });
    assert!(steps > 4 * WORLDS || std::env::var("ABIDE_SEED").is_ok(), "only {steps} steps were tried");
}

#[test]
fn every_step_changes_something_and_pids_stay_where_the_plan_says_so() {
    in_every_world(|world| {
        let plan = world.plan();
        for step in world.order(&plan) {
            let pid = |world: &World| {
                let own = world.fleet.procs().get(&step.instance).and_then(|proc| proc.pid);
                own.or(step.from.as_ref().and_then(|from| world.fleet.procs().get(from)?.pid))
            };
            let (before, had) = (world.fleet.clone(), pid(world));
            world.execute_step(step);
            assert_ne!(before.procs(), world.fleet.procs(), "{} changes nothing", line(step));
            if step.pid_stays && had.is_some() {
                assert_eq!(pid(world), had, "the pid did not stay: {}", line(step));
            }
        }
    });
}

#[test]
fn after_any_prefix_exactly_the_rest_is_planned() {
    in_every_world(|world| {
        world.count_budgets();
        let plan = world.plan();
        let steps = world.order(&plan);
        for (done, step) in steps.iter().enumerate() {
            world.execute_step(step);
            let rest = world.plan();
            let left = steps.len() - done - 1;
            let did: Vec<String> = steps[..=done].iter().map(|step| line(step)).collect();
            let story =
                || format!("after {did:#?} of\n{}comes\n{}in {}", shown(&plan), shown(&rest), drawn(world));
            assert_eq!(rest.steps().count(), left, "{}", story());
        }
    });
}

#[test]
fn nothing_is_done_to_what_is_unknown_foreign_held_or_protected() {
    in_every_world(|world| {
        let (plan, look) = (world.plan(), world.observe());
        let held: BTreeSet<&InstanceKey> = plan.held.iter().map(|held| &held.instance).collect();
        for step in plan.steps() {
            let key = &step.instance;
            assert!(!world.gaps.contains(&key.host), "unknown: {}", line(step));
            assert!(!held.contains(key), "both held and done: {}", line(step));
            assert!(
                !world.rules.holds.iter().any(|hold| hold.instance == *key),
                "held by hand: {}",
                line(step)
            );
            assert!(world.rules.pauses.is_empty(), "paused: {}", line(step));
            let want = world.desired.instances.get(key);
            let row = look.instances.get(key).filter(|row| {
                row.hosted == Some(true) || row.running == Some(true) || row.registered == Some(true)
            });
            match row.map(|row| row.owner.as_deref()) {
                None | Some(Some(OWNER)) => {}
                Some(Some(other)) => panic!("{other} owns it: {}", line(step)),
                Some(None) => {
                    // Under an old name, the new one's manifest speaks for it.
                    let name = key.name.as_str().trim_start_matches("old-");
                    let newer = format!("{}:web:{name}", key.host).parse().expect("a key");
                    let want = want.or_else(|| world.desired.instances.get(&newer));
                    let adopts = world.rules.adopt || want.is_some_and(|want| want.origin.adopt);
                    assert!(adopts, "nobody owns it: {}", line(step));
                }
            }
            if want.is_none() {
                let moved = is_moved(step);
                assert!(world.rules.prune || moved, "nobody asked to remove it: {}", line(step));
            }
        }
        for (key, want) in &world.desired.instances {
            let ops: Vec<Op> =
                plan.steps().filter(|step| step.instance == *key).map(|step| step.op).collect();
            let stops = ops.contains(&Op::Stop) || ops.contains(&Op::Kill);
            let restarts = ops.contains(&Op::Restart) || (stops && ops.contains(&Op::Start));
            for guard in &want.origin.protect {
                let broken = match guard {
                    Protection::Delete => want.origin.state == State::Absent && !ops.is_empty(),
                    Protection::Restart => restarts,
                    Protection::Stop => stops,
                };
                assert!(!broken, "{key} is protected from {guard:?}: {ops:?}");
            }
        }
    });
}

/// Done under an old name, so that the new one can have it.
fn is_moved(step: &Step) -> bool {
    step.why.iter().all(|why| why.rule == Rule::Moved)
}

#[test]
fn budgets_hold_over_the_whole_plan() {
    in_every_world(|world| {
        let (plan, look) = (world.plan(), world.observe());
        let mut chains: BTreeMap<&InstanceKey, Vec<Op>> = BTreeMap::new();
        for step in plan.steps() {
            chains.entry(&step.instance).or_default().push(step.op);
        }
        let moved: BTreeSet<&InstanceKey> =
            plan.steps().filter(|step| is_moved(step)).map(|step| &step.instance).collect();
        let deletes = chains.keys().filter(|key| {
            let state = world.desired.instances.get(*key).map(|want| want.origin.state);
            state.is_none_or(|state| state == State::Absent) && !moved.contains(*key)
        });
        let restarts = chains.iter().filter(|(key, ops)| {
            let before =
                plan.steps().find(|step| step.instance == ***key).and_then(|step| step.from.as_ref());
            let before = before.and_then(|from| chains.get(from)).cloned().unwrap_or_default();
            let has = |op: Op| ops.contains(&op) || before.contains(&op);
            has(Op::Restart) || ((has(Op::Stop) || has(Op::Kill)) && has(Op::Start))
        });
        let (deletes, restarts) = (deletes.count(), restarts.count());
        let owned = look.instances.values().filter(|row| row.owner.as_deref() == Some(OWNER)).count();
        let most = |amount: Amount| match amount {
            Amount::Count(count) => count as usize,
            Amount::Share(share) => (owned as f64 * share.get() / 100.0) as usize,
        };
        let by_policy = world.desired.policies.iter().any(|policy| policy.budgets.delete.is_some());
        let default = if by_policy { usize::MAX } else { (owned / 10).max(1) };
        let delete = world.rules.max_delete.map_or(default, most);
        assert!(deletes <= delete, "{deletes} deletes of {delete}: {}", shown(&plan));
        let restart = world.rules.max_restart.map_or(usize::MAX, most);
        assert!(restarts <= restart, "{restarts} restarts of {restart}: {}", shown(&plan));
        for policy in &world.desired.policies {
            assert!(deletes <= policy.budgets.delete.map_or(usize::MAX, most), "{}", shown(&plan));
            assert!(restarts <= policy.budgets.restart.map_or(usize::MAX, most), "{}", shown(&plan));
        }
    });
}

#[test]
fn every_step_says_why_and_names_a_real_difference() {
    in_every_world(|world| {
        let (plan, look) = (world.plan(), world.observe());
        for step in plan.steps() {
            assert!(!step.why.is_empty(), "{}\n{}{}", line(step), shown(&plan), drawn(world));
            let own = look.instances.get(&step.instance);
            let row = own.or_else(|| look.instances.get(step.from.as_ref()?));
            for why in &step.why {
                let text = format!("{why:?}");
                assert!(!text.contains("hush") && !text.contains("quiet"), "a secret is shown: {text}");
                if why.field.is_some() {
                    assert_ne!(why.old, why.new, "{step:?}");
                }
                let real = match why.rule {
                    Rule::GivenDiffers | Rule::LiveDiffers => why.field.is_some() && row.is_some(),
                    Rule::NotRunning => own.is_none_or(|row| row.running == Some(false)),
                    Rule::NotHosted => own.is_none_or(|row| row.hosted == Some(false)),
                    Rule::NotRegistered => own.is_none_or(|row| row.registered == Some(false)),
                    Rule::Hosted => world.desired.instances[&step.instance].origin.state == State::Unhosted,
                    Rule::NotRun => {
                        world.desired.instances[&step.instance].spec.monitor.auto_type == AutoType::OneShot
                    }
                    Rule::StateStopped => {
                        world.desired.instances[&step.instance].origin.state == State::Stopped
                    }
                    Rule::StateAbsent => {
                        world.desired.instances[&step.instance].origin.state == State::Absent
                    }
                    Rule::Orphan => !world.desired.instances.contains_key(&step.instance),
                    Rule::Adopted => row
                        .is_some_and(|row| row.owner.is_none() || row.registered_spec == KnownSpec::Unknown),
                    Rule::Moved => {
                        !world.desired.instances.contains_key(&step.instance)
                            || step.from.is_some()
                            || plan.steps().any(|other| other.from.as_ref() == Some(&step.instance))
                    }
                    Rule::SpecUnknown => row
                        .is_some_and(|row| row.registered_spec.spec().is_none() || row.live.spec().is_none()),
                };
                assert!(real, "{why:?} of {}\n{}{}", line(step), shown(&plan), drawn(world));
            }
        }
    });
}

/// Waves respect dependencies: what starts finds running what it depends on, and what stops leaves nothing behind
/// that depended on it and is to stop too.
#[test]
fn dependencies_are_kept_in_every_order_that_the_waves_allow() {
    in_every_world(|world| {
        let plan = world.plan();
        for step in world.order(&plan) {
            if matches!(step.op, Op::Start | Op::Restart) {
                let Some(want) = world.desired.instances.get(&step.instance) else { continue };
                for name in &want.origin.depends_on {
                    for (key, other) in meant(&world.desired, name, &step.instance.host) {
                        let earlier = format!("{}:web:old-{}", key.host, key.name).parse().expect("a key");
                        let proc = world.fleet.procs().get(key).or_else(|| world.fleet.procs().get(&earlier));
                        let idle = other.origin.state == State::Unhosted
                            && other.spec.monitor.auto_type == AutoType::Periodic;
                        let there = idle
                            || proc.is_some_and(|proc| match other.spec.monitor.auto_type {
                                AutoType::Resident => proc.live.is_some(),
                                AutoType::Periodic => proc.hosted,
                                AutoType::OneShot => proc.ran.is_some(),
                            });
                        assert!(
                            there,
                            "{} starts without {key}:\n{}{}",
                            step.instance,
                            shown(&plan),
                            drawn(world)
                        );
                    }
                }
            }
            if matches!(step.op, Op::Stop | Op::Kill)
                && world
                    .desired
                    .instances
                    .get(&step.instance)
                    .is_some_and(|want| !want.origin.state.needs_start())
            {
                for (key, other) in &world.desired.instances {
                    let depends = other.origin.depends_on.iter().any(|name| {
                        meant(&world.desired, name, &key.host).iter().any(|(key, _)| **key == step.instance)
                    });
                    let stops = plan
                        .steps()
                        .any(|other| other.instance == *key && matches!(other.op, Op::Stop | Op::Kill));
                    let down = !other.origin.state.needs_start() && stops && depends;
                    let runs = world.fleet.procs().get(key).is_some_and(|proc| proc.live.is_some());
                    assert!(!(down && runs), "{} stops before {key}:\n{}", step.instance, shown(&plan));
                }
            }
            world.execute_step(step);
        }
    });
}

fn meant<'a>(
    desired: &'a Desired,
    name: &ProcessKey,
    host: &HostKey,
) -> Vec<(&'a InstanceKey, &'a DesiredInstance)> {
    let all: Vec<_> = desired.instances.iter().filter(|(key, _)| key.process() == *name).collect();
    let here: Vec<_> = all.iter().copied().filter(|(key, _)| key.host == *host).collect();
    if here.is_empty() { all } else { here }
}

#[test]
fn a_change_and_its_revert_leave_nothing_to_do() {
    in_every_world(|world| {
        world.count_budgets();
        let first = world.desired.clone();
        let run = |world: &mut World| {
            let plan = world.plan();
            for step in world.order(&plan) {
                world.execute_step(step);
            }
        };
        run(world);
        let second = world.desired();
        world.desired = first.clone();
        let settled = world.plan();
        assert_eq!(settled.steps().count(), 0);
        // Wanting something else for a moment, and then not: nothing was done, nothing is to do.
        world.desired = second;
        world.plan();
        world.desired = first;
        assert_eq!(world.plan(), settled);
    });
}

/// What a step leaves behind as an expectation is what a look shows once it knows.
#[test]
fn expectations_match_the_effect_of_each_step() {
    in_every_world(|world| {
        let plan = world.plan();
        for step in world.order(&plan) {
            let before = world.fleet.rows();
            let row = before.get(&step.instance).or_else(|| before.get(step.from.as_ref()?));
            let expected = expectations::after(step, row, OWNER, &world.rules.caps);
            if step.spec.as_ref().is_some_and(|spec| spec.monitor.auto_type == AutoType::OneShot) {
                // Its end comes with the step here.
                world.execute_step(step);
                continue;
            }
            world.execute_step(step);
            let shown = world.fleet.rows().remove(&step.instance);
            match (expected, shown) {
                (Expected::Gone, shown) => {
                    assert!(shown.is_none_or(|row| row.registered == Some(false)), "{}", line(step));
                }
                (Expected::State(seen), shown) => {
                    let shown = shown.unwrap_or_default();
                    let fact = |fact: Option<bool>| fact.unwrap_or(false);
                    let facts = |seen: &ObservedInstance| [fact(seen.hosted), fact(seen.running)];
                    assert_eq!(facts(&seen), facts(&shown), "{}\n{}", line(step), drawn(world));
                    let held = fact(shown.hosted) || fact(shown.registered);
                    if !world.hidden && held && step.spec_side == abide::model::SpecSide::New {
                        assert_eq!(seen.registered_spec, shown.registered_spec, "{}", line(step));
                    }
                    if held && matches!(step.op, Op::Register | Op::Start | Op::Supervise) {
                        assert_eq!(seen.owner, shown.owner, "{}", line(step));
                    }
                    // Fields with effect Register take effect with a registration at some engines: no plan depends on that.
                    let registers = matches!(step.op, Op::Register | Op::Supervise);
                    let revision = |row: &ObservedInstance| row.live.spec().map(|spec| *spec.revision());
                    let alike = match (revision(&seen), revision(&shown)) {
                        (Some(seen), Some(shown)) => seen.differs_from(&shown) <= Effect::Register,
                        (seen, shown) => seen == shown,
                    };
                    if !world.hidden && fact(shown.running) && step.op != Op::Reload {
                        assert!(seen.live == shown.live || registers && alike, "{}", line(step));
                    }
                }
                (Expected::Unknown, _) => panic!("a step that was done is never unsure"),
            }
        }
    });
}
