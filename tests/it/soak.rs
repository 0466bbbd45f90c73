//! The control loop on simulated fleets of every dialect, in virtual time, under edits, drift, lost replies, repeated and
//! late calls, silent hosts and controller crashes. Afterwards everything is in sync and stays so without a call; nothing
//! was launched more often than edits and crashes explain; held and paused instances were not touched.
//!
//! On our own gateway this holds under every fault: a call has an id, runs once, and is waited for. A platform without call
//! ids may run a call late or twice, which costs a launch and its repair; without such faults the same holds there.
//!
//! `ABIDE_SOAK=5000` runs that many seeds, `ABIDE_SEED=7` one of them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use abide::backend::sim::Proc;
use abide::control::spec_history::ManifestHistory;
use abide::control::{self, ControllerConfig, ControllerEvent, ManifestConfig};
use abide::manifest::Limits;
use abide::model::{Desired, Dialect, Hold, HostKey, InstanceKey, Pause, State};
use abide::reconcile::{Caps, Rules};
use abide::source::Source;
use abide::source::in_memory::InMemory;
use tokio::sync::{Notify, watch};

use crate::fake::{Fake, no_faults};
use crate::fixtures::fault_plan::{FaultPlan, IN_FLIGHT_SECS};
use crate::fixtures::manifest::{self, Manifest};

const HOSTS: u64 = 3;
const NAMES: [&str; 4] = ["api", "db", "cache", "queue"];
/// The same repair three times within ten minutes would be given up.
const BETWEEN_DRIFTS: u64 = 400;

#[test]
fn random_faults_over_hours_converge_and_idle() {
    let seeds = match (number("ABIDE_SEED"), number("ABIDE_SOAK")) {
        (Some(seed), _) => seed..seed + 1,
        (None, soak) => 0..soak.unwrap_or(20),
    };
    // Two at a time.
    std::thread::scope(|scope| {
        let odd =
            scope.spawn(|| seeds.clone().filter(|seed| seed % 2 == 1).for_each(|seed| live(seed, 3600)));
        seeds.clone().filter(|seed| seed % 2 == 0).for_each(|seed| live(seed, 3600));
        odd.join().expect("the odd ones hold as well");
    });
}

/// Of each kind with `ABIDE_SOAK`, else of our own.
#[test]
fn random_faults_over_a_day_converge() {
    let many = if number("ABIDE_SOAK").is_some() { 5 } else { 1 };
    let first = number("ABIDE_SEED").unwrap_or(86_404);
    (first..first + many).for_each(|seed| live(seed, 86_400));
}

/// Three times, then no more, until the manifests are others.
#[test]
fn a_change_that_is_undone_repeatedly_is_suspended() {
    for seed in [2, 3] {
        fastrand::seed(seed);
        paused().block_on(fight_over_state(seed));
    }
}

async fn fight_over_state(seed: u64) {
    let target = Fake::new(Dialect::Abide, seed.is_multiple_of(2), seed);
    let mut wishes = DesiredProcesses::default();
    let (wanted, wants) = watch::channel(wishes.desired());
    let (stop, stopped) = watch::channel(false);
    let setting = setting(Dialect::Abide);
    let mut source = Source::InMemory(InMemory::new(wants));
    let reasons: Mutex<Vec<String>> = Mutex::default();
    let mut told = |event: ControllerEvent<'_>| {
        if let ControllerEvent::Planned { result: look, .. } = event {
            let held = look.plan.held.iter().map(|held| format!("{} {}", held.reason.word(), held.detail));
            reasons.lock().expect("a lock").extend(held);
        }
    };
    let standing = control::run(&setting, &mut source, &target, stopped, &mut told);
    let key: InstanceKey = "0:10.0.0.1:web:cache".parse().expect("a key");
    let launches = || target.sim().fleet().launches().get(&key).copied().unwrap_or_default();
    let happening = async {
        target.pass(20).await;
        assert_eq!(launches(), 1);
        for _ in 0..8 {
            target.sim().kill(&key);
            target.pass(60).await;
        }
        assert_eq!(launches(), 3, "made three times, and undone each time");
        let said = reasons.lock().expect("a lock").last().cloned().unwrap_or_default();
        assert!(
            said.starts_with("NotConverging") && said.contains("the process was not running again each time"),
            "{said}"
        );
        wishes.0.insert("queue", (1, false));
        wanted.send_replace(wishes.desired());
        target.pass(60).await;
        assert_eq!(launches(), 4, "other manifests, another try");
        stop.send(true).expect("it listens");
    };
    tokio::join!(standing, happening);
}

/// A controller whose interval is shorter than the renewal of its lease keeps leading.
#[test]
fn frequent_passes_do_not_lose_the_lease() {
    paused().block_on(async {
        let target = Fake::new(Dialect::Abide, false, 1);
        let setting = ControllerConfig { interval: Duration::from_millis(700), ..setting(Dialect::Abide) };
        let (_wanted, wants) = watch::channel(DesiredProcesses::default().desired());
        let (stop, stopped) = watch::channel(false);
        let told: Mutex<Vec<&str>> = Mutex::default();
        let lead = async |name: &'static str, after: u64| {
            target.pass(after).await;
            let mut source = Source::InMemory(InMemory::new(wants.clone()));
            let mut tell = |event: ControllerEvent<'_>| {
                if let ControllerEvent::Leading { .. } = event
                    && !*stopped.borrow()
                {
                    told.lock().expect("a lock").push(name);
                }
            };
            control::run(&setting, &mut source, &target, stopped.clone(), &mut tell).await;
        };
        let ending = async {
            tokio::time::sleep(Duration::from_secs(60)).await;
            stop.send(true).expect("it listens");
        };
        tokio::join!(lead("first", 0), lead("second", 1), ending);
        assert_eq!(*told.lock().expect("a lock"), ["first"]);
    });
}

/// Counter-proof of the claims above: a fleet without a controller does not converge.
#[test]
fn without_the_control_loop_nothing_converges() {
    let target = Fake::new(Dialect::Abide, false, 1);
    let wishes = DesiredProcesses::default();
    assert_eq!(target.plan(&wishes.desired()).steps().count() as u64, HOSTS * NAMES.len() as u64);
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn live(seed: u64, secs: u64) {
    // The loop's own chance is of this thread.
    fastrand::seed(seed);
    paused().block_on(play(seed, secs));
}

/// Time passes when there is nothing else to do.
pub fn paused() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_time().start_paused(true).build().expect("a runtime")
}

fn setting(dialect: Dialect) -> ControllerConfig {
    ControllerConfig {
        rules: Rules::new(Caps::of(dialect)),
        follow: true,
        heal: true,
        interval: Duration::from_secs(30),
        timeout: Duration::from_secs(600),
        check: |_| None,
        trigger: Arc::default(),
        manifests: ManifestConfig {
            source: "handed".to_owned(),
            default_user: None,
            limits: Limits::default(),
            history: ManifestHistory::Paths(Vec::new()),
        },
        notify_failures: tokio::sync::watch::channel(Vec::new()).1,
    }
}

/// What people want, process by process.
#[derive(Clone, Default)]
struct DesiredProcesses(BTreeMap<&'static str, (u32, bool)>);

impl DesiredProcesses {
    fn desired(&self) -> Desired {
        let one = |name: &str| {
            let (version, stopped) = self.0.get(name).copied().unwrap_or_default();
            let manifest = Manifest::remote(name)
                .hosts(HOSTS)
                .field("state", if stopped && name != "db" { "stopped" } else { "running" })
                .start_cmd(&format!("./run {version}"))
                .stop_cmd("./stop")
                .monitor("auto_type", 1)
                .monitor("start_check_secs", 0);
            let manifest = if name == "api" { manifest.depends_on(&["db"]) } else { manifest };
            // Some have a restart command, the others are stopped and started.
            if name < "d" { manifest.control("restart_cmd", "./restart") } else { manifest }
        };
        manifest::desired(NAMES.map(one))
    }
}

/// What happens to the fleet, and what it is allowed to cost.
struct Script<'a> {
    target: &'a Fake,
    weather: FaultPlan,
    dies: &'a Notify,
    chance: fastrand::Rng,
    wishes: DesiredProcesses,
    wanted: watch::Sender<Desired>,
    /// How often each may have been launched by now.
    launches: BTreeMap<InstanceKey, usize>,
    drifted: BTreeMap<InstanceKey, u64>,
    /// Its time, and the state after the last step in flight ended.
    held: BTreeMap<InstanceKey, (u64, Option<Proc>)>,
}

async fn play(seed: u64, secs: u64) {
    let weather = FaultPlan::of(seed);
    let target = Fake::new(weather.dialect, weather.tells, seed);
    let wishes = DesiredProcesses::default();
    let desired = wishes.desired();
    let launches = desired.instances.keys().map(|key| (key.clone(), 1)).collect();
    let (wanted, wants) = watch::channel(desired);
    let (stop, stopped) = watch::channel(false);
    let setting = setting(weather.dialect);
    let log: Arc<Mutex<VecDeque<String>>> = Arc::default();
    let dies = Notify::new();
    let standing = async {
        while !*stopped.borrow() {
            let mut source = Source::InMemory(InMemory::new(wants.clone()));
            let mut told = |event: ControllerEvent<'_>| note(&log, &target, &event);
            tokio::select! {
                () = control::run(&setting, &mut source, &target, stopped.clone(), &mut told) => {}
                // As if it had been killed: whatever it was about to do or to write is lost.
                () = dies.notified() => {
                    target.expire_leases();
                    record_line(&log, &target, "the controller died".to_owned());
                }
            }
        }
    };
    let chance = fastrand::Rng::with_seed(seed);
    let mut script = Script {
        target: &target,
        weather,
        chance,
        wishes,
        wanted,
        dies: &dies,
        launches,
        drifted: BTreeMap::new(),
        held: BTreeMap::new(),
    };
    let shown = || {
        let said = log.lock().expect("a log").make_contiguous().join("\n");
        format!("seed {seed}, {:?}:\n{said}", FaultPlan::of(seed))
    };
    let happening = async {
        script.inject_faults(secs, &shown).await;
        script.settle_down(&shown).await;
        stop.send(true).expect("it listens");
    };
    tokio::join!(standing, happening);
}

fn note(log: &Mutex<VecDeque<String>>, target: &Fake, event: &ControllerEvent<'_>) {
    let line = match event {
        ControllerEvent::StepFinished { step, ended } => {
            format!("{} {}: {:?} {}", step.op, step.instance, ended.outcome, ended.message)
        }
        ControllerEvent::Planned { result: look, .. } if look.plan.is_empty() => return,
        ControllerEvent::Planned { result: look, .. } => {
            let plan = &look.plan;
            let held: Vec<String> =
                plan.held.iter().map(|held| format!("{} {}", held.reason.word(), held.instance)).collect();
            format!("{} steps, held {}", plan.steps().count(), held.join(", "))
        }
        ControllerEvent::Relaunched { instance, pid } => format!("{instance} is {pid}"),
        ControllerEvent::Failure { why } => (*why).to_owned(),
        ControllerEvent::Read { .. } => "read".to_owned(),
        _ => return,
    };
    record_line(log, target, line);
}

fn record_line(log: &Mutex<VecDeque<String>>, target: &Fake, line: String) {
    let mut log = log.lock().expect("a log");
    // A repeated condition is logged once.
    if log.back().is_some_and(|last| last.split_once(' ').is_some_and(|(_, last)| *last == line)) {
        return;
    }
    log.push_back(format!("{} {line}", target.sim().now().0 / 1000));
    if log.len() > 120 {
        log.pop_front();
    }
}

impl Script<'_> {
    async fn pass(&self, secs: u64) {
        self.target.pass(secs).await;
    }

    fn now(&self) -> u64 {
        (self.target.sim().now().0 / 1000) as u64
    }

    fn any_key(&mut self) -> InstanceKey {
        let host = self.chance.u64(1..=HOSTS);
        let name = NAMES[self.chance.usize(..NAMES.len())];
        format!("0:10.0.0.{host}:web:{name}").parse().expect("a key")
    }

    async fn inject_faults(&mut self, secs: u64, shown: &impl Fn() -> String) {
        while self.now() < secs {
            if self.chance.u32(..10) == 0 {
                let bad = self.chance.bool();
                let weather = &self.weather;
                let faults = if bad { weather.bad.clone() } else { no_faults(weather.dialect) };
                self.target.sim().set_faults(faults);
            }
            match self.chance.u32(..10) {
                0..=3 => self.edit(),
                4..=5 => self.drift(),
                6 => {
                    let host: HostKey =
                        format!("0:10.0.0.{}", self.chance.u64(1..=HOSTS)).parse().expect("a host");
                    let dead = self.chance.bool();
                    self.target.sim().set_dead(host, dead);
                }
                7 => self.hold(),
                8 => self.release(shown),
                _ => self.target.sim().break_off(),
            }
            if self.chance.u32(..3) == 0 {
                // Most of what it does is done within seconds.
                let secs = self.chance.u64(0..3);
                self.pass(secs).await;
                tokio::time::sleep(Duration::from_millis(self.chance.u64(0..999))).await;
                self.dies.notify_one();
            }
            let quiet = self.chance.u64(1..240);
            self.pass(quiet).await;
            self.watch_held(shown);
        }
    }

    /// Nothing happens any more.
    async fn settle_down(&mut self, shown: &impl Fn() -> String) {
        let sim = self.target.sim();
        sim.set_faults(no_faults(self.weather.dialect));
        (1..=HOSTS).for_each(|n| sim.set_dead(format!("0:10.0.0.{n}").parse().expect("a host"), false));
        // Steps in flight end, lists show them, and failed instances are retried.
        self.pass(
            1500 + 2 * (self.weather.in_flight_secs() - IN_FLIGHT_SECS) + 2 * self.target.caps().lag_secs,
        )
        .await;
        let desired = self.wishes.desired();
        self.is_as_wanted(&desired, shown);
        let calls = sim.calls();
        let quiet = sim.fleet();
        self.pass(1000).await;
        assert_eq!(sim.calls(), calls, "it does not rest: {}", shown());
        assert_eq!(sim.fleet(), quiet);
        let extra_effects = sim.extra_effects();
        for (key, launches) in quiet.launches() {
            // A launch that came late or twice, and one that puts right what it did.
            let more =
                if self.is_ours() { 0 } else { 2 * extra_effects.get(key).copied().unwrap_or_default() };
            let may = self.launches[key] + more;
            assert!(*launches <= may, "{key}: {launches} > {may}; {}", shown());
        }
        self.watch_held(shown);
        // Held instances are changed after the release, all of them.
        self.target.interventions.lock().expect("a lock").clone_from(&Default::default());
        self.pass(120 + 2 * self.target.caps().lag_secs).await;
        self.is_as_wanted(&desired, shown);
    }

    fn is_ours(&self) -> bool {
        self.weather.dialect == Dialect::Abide
    }

    /// Nothing is left to do but for what is held, and nothing is but by a hold.
    fn is_as_wanted(&self, desired: &Desired, shown: &impl Fn() -> String) {
        let (plan, extra_effects) = (self.target.plan(desired), self.target.sim().extra_effects());
        // Facts that no list contains.
        let hidden = |key: &InstanceKey| !self.is_ours() && extra_effects.contains_key(key);
        let steps = plan.steps().filter(|step| !hidden(&step.instance));
        let left: Vec<String> = steps.map(|step| format!("{} {}", step.op, step.instance)).collect();
        assert!(left.is_empty(), "{left:?}\n{}", shown());
        for (key, want) in desired.instances.iter().filter(|(key, _)| hidden(key)) {
            let is_free = plan.held.iter().all(|held| held.instance != *key);
            let fleet = self.target.sim().fleet();
            let proc = fleet.procs().get(key).cloned().unwrap_or_default();
            let up = want.origin.state == State::Running;
            assert!(
                !is_free || (proc.hosted, proc.live.is_some()) == (up, up),
                "{key}: {proc:?}\n{}",
                shown()
            );
        }
        if self.target.interventions.lock().expect("a lock").0.is_empty() && !self.target.is_paused() {
            assert!(plan.held.is_empty(), "{:#?}\n{}", plan.held, shown());
        }
    }

    fn edit(&mut self) {
        let name = NAMES[self.chance.usize(..NAMES.len())];
        let stops = self.chance.u32(..4) == 0;
        let wish = self.wishes.0.entry(name).or_default();
        match stops {
            true => wish.1 = !wish.1,
            false => wish.0 += 1,
        }
        for (key, launches) in &mut self.launches {
            *launches += usize::from(key.name.as_str() == name);
        }
        self.wanted.send_replace(self.wishes.desired());
    }

    /// It dies, or another client stops it.
    fn drift(&mut self) {
        let (key, now) = (self.any_key(), self.now());
        let lately = self.drifted.get(&key).is_some_and(|last| now < last + BETWEEN_DRIFTS);
        if lately || self.held.contains_key(&key) || self.target.is_paused() {
            return;
        }
        self.drifted.insert(key.clone(), now);
        *self.launches.entry(key.clone()).or_default() += 1;
        if self.chance.bool() {
            return self.target.sim().kill(&key);
        }
        self.target.sim().meddle(|fleet| {
            let Some(proc) = fleet.procs().get(&key).cloned() else { return };
            fleet.place(key, Proc { live: None, pid: None, hosted: false, ..proc });
        });
    }

    fn hold(&mut self) {
        let (key, now) = (self.any_key(), self.now());
        let mut interventions = self.target.interventions.lock().expect("a lock");
        if self.chance.u32(..4) == 0 {
            let pause = Pause { namespace: None, by: "ann".to_owned(), reason: None, until: None };
            interventions.1 = vec![pause];
            for key in self.launches.keys() {
                self.held.entry(key.clone()).or_insert((now, None));
            }
            return;
        }
        let hold = Hold { instance: key.clone(), by: "ann".to_owned(), reason: None, until: None };
        interventions.0.push(hold);
        self.held.entry(key).or_insert((now, None));
    }

    fn release(&mut self, shown: &impl Fn() -> String) {
        self.watch_held(shown);
        self.held.clear();
        *self.target.interventions.lock().expect("a lock") = Default::default();
    }

    fn watch_held(&mut self, shown: &impl Fn() -> String) {
        let (now, fleet, under_way) = (self.now(), self.target.sim().fleet(), self.weather.in_flight_secs());
        for (key, (since, was)) in &mut self.held {
            let is = fleet.procs().get(key).cloned().unwrap_or_default();
            match was {
                Some(was) => assert_eq!(*was, is, "{key} was held since {since}: {}", shown()),
                None if now > *since + under_way => *was = Some(is),
                None => {}
            }
        }
    }
}
