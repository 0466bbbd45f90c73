//! The standing loop as it is, on a simulated fleet, in virtual time: people edit, things break, somebody meddles, replies are
//! lost, hosts are silent. When that is over, everything is as wanted and stays so without another call; nothing was
//! launched more often than people and deaths asked for; what is held or paused was not touched.
//!
//! `ABIDE_SOAK=5000` runs that many seeds, `ABIDE_SEED=7` one of them.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use abide::backend::sim::{Faults, Fleet, Proc, Sim};
use abide::backend::{Backend, Changes, Scope};
use abide::control::old_specs::Past;
use abide::control::source::Source;
use abide::control::source::handed::Handed;
use abide::control::{self, Event, Setting, Target};
use abide::execute::world::World;
use abide::manifest::{Limits, load_text};
use abide::model::{Desired, Dialect, Hold, HostKey, InstanceKey, Now, Pause, Plan, Time};
use abide::reconcile::{Caps, Rules, reconcile};
use abide::store::{Change, Entry, Error, Holder, Lease, Number, Outcome, Page, Store, Taken, Txn, Write};
use tokio::sync::watch;

const HOSTS: u64 = 3;
const NAMES: [&str; 4] = ["api", "db", "cache", "queue"];
/// The same repair three times within ten minutes would be given up.
const BETWEEN_DRIFTS: u64 = 400;
/// Whatever was under way when a hold was laid has ended after so long.
const UNDER_WAY: u64 = 700;

#[test]
fn whatever_happens_in_hours_it_converges_and_rests() {
    let seeds = match (number("ABIDE_SEED"), number("ABIDE_SOAK")) {
        (Some(seed), _) => seed..seed + 1,
        (None, soak) => 0..soak.unwrap_or(200),
    };
    // Two at a time.
    std::thread::scope(|scope| {
        let odd =
            scope.spawn(|| seeds.clone().filter(|seed| seed % 2 == 1).for_each(|seed| live(seed, 3600)));
        seeds.clone().filter(|seed| seed % 2 == 0).for_each(|seed| live(seed, 3600));
        odd.join().expect("the odd ones hold as well");
    });
}

#[test]
fn a_whole_day() {
    live(number("ABIDE_SEED").unwrap_or(86_400), 86_400);
}

/// Three times, then no more, until the manifests are others.
#[test]
fn what_somebody_undoes_again_and_again_is_left_alone() {
    for seed in [2, 3] {
        fastrand::seed(seed);
        paused().block_on(quarrel(seed));
    }
}

async fn quarrel(seed: u64) {
    let target = Fake::new(seed);
    let mut wishes = Wishes::default();
    let (wanted, wants) = watch::channel(wishes.desired());
    let (stop, stopped) = watch::channel(false);
    let setting = setting();
    let mut source = Source::Handed(Handed::new(wants));
    let reasons: Mutex<Vec<String>> = Mutex::default();
    let mut told = |event: Event<'_>| {
        if let Event::Planned { look, .. } = event {
            let held = look.plan.held.iter().map(|held| format!("{} {}", held.reason.word(), held.detail));
            reasons.lock().expect("a lock").extend(held);
        }
    };
    let standing = control::run(&setting, &mut source, &target, stopped, &mut told);
    let key: InstanceKey = "0:10.0.0.1:web:cache".parse().expect("a key");
    let launches = || target.sim.fleet().launches().get(&key).copied().unwrap_or_default();
    let happening = async {
        target.pass(20).await;
        assert_eq!(launches(), 1);
        for _ in 0..8 {
            target.sim.kill(&key);
            target.pass(60).await;
        }
        assert_eq!(launches(), 3, "made three times, and undone each time");
        let said = reasons.lock().expect("a lock").last().cloned().unwrap_or_default();
        assert!(said.starts_with("NotConverging") && said.contains("NotRunning"), "{said}");
        wishes.0.insert("queue", (1, false));
        wanted.send_replace(wishes.desired());
        target.pass(60).await;
        assert_eq!(launches(), 4, "other manifests, another try");
        stop.send(true).expect("it listens");
    };
    tokio::join!(standing, happening);
}

/// The claims above need something to fail on: a fleet that nobody tends does not come to be as wanted.
#[test]
fn without_the_loop_nothing_is_as_wanted() {
    let target = Fake::new(1);
    let wishes = Wishes::default();
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
fn paused() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_time().start_paused(true).build().expect("a runtime")
}

fn setting() -> Setting {
    Setting {
        rules: Rules::new(Caps::of(Dialect::Abide)),
        follow: true,
        heal: true,
        interval: Duration::from_secs(30),
        timeout: Duration::from_secs(600),
        check: |_| None,
        look_now: Arc::default(),
        source: "handed".to_owned(),
        user: None,
        limits: Limits::default(),
        past: Past::Paths(Vec::new()),
    }
}

/// What people want, process by process.
#[derive(Clone, Default)]
struct Wishes(BTreeMap<&'static str, (u32, bool)>);

impl Wishes {
    fn desired(&self) -> Desired {
        let mut text = String::new();
        for name in NAMES {
            let (version, stopped) = self.0.get(name).copied().unwrap_or_default();
            let depends = if name == "api" { "depends_on: [db]\n" } else { "" };
            let state = if stopped && name != "db" { "stopped" } else { "running" };
            text.push_str(&format!(
                "---\napiVersion: abide/v1\nkind: Process\nstate: {state}\nmeta: {{namespace: web, name: {name}}}\n{depends}hosts:\n"
            ));
            text.extend((1..=HOSTS).map(|n| format!("  - {{ip: 10.0.0.{n}, bk_cloud_id: 0}}\n")));
            text.push_str(&format!(
                "spec:\n  identity: {{proc_name: {name}, setup_path: /opt/{name}, pid_path: /run/{name}.pid, user: app}}\n  \
                 control: {{start_cmd: ./run {version}, stop_cmd: ./stop}}\n  monitor_policy: {{auto_type: 1, start_check_secs: 0}}\n"
            ));
        }
        let loaded = load_text("fleet.yaml", text, &Limits::default());
        assert_eq!(loaded.problems, []);
        loaded.desired
    }
}

/// What happens to the fleet, and what it is allowed to cost.
struct Script<'a> {
    target: &'a Fake,
    chance: fastrand::Rng,
    wishes: Wishes,
    wanted: watch::Sender<Desired>,
    /// How often each may have been launched by now.
    launches: BTreeMap<InstanceKey, usize>,
    drifted: BTreeMap<InstanceKey, u64>,
    /// Since when, and how it was when everything that had been under way was over.
    held: BTreeMap<InstanceKey, (u64, Option<Proc>)>,
}

async fn play(seed: u64, secs: u64) {
    let target = Fake::new(seed);
    let wishes = Wishes::default();
    let desired = wishes.desired();
    let launches = desired.instances.keys().map(|key| (key.clone(), 1)).collect();
    let (wanted, wants) = watch::channel(desired);
    let (stop, stopped) = watch::channel(false);
    let setting = setting();
    let mut source = Source::Handed(Handed::new(wants));
    let log: Arc<Mutex<VecDeque<String>>> = Arc::default();
    let mut told = |event: Event<'_>| note(&log, &target, &event);
    let standing = control::run(&setting, &mut source, &target, stopped, &mut told);
    let chance = fastrand::Rng::with_seed(seed);
    let mut script = Script {
        target: &target,
        chance,
        wishes,
        wanted,
        launches,
        drifted: BTreeMap::new(),
        held: BTreeMap::new(),
    };
    let shown = || format!("seed {seed}:\n{}", log.lock().expect("a log").make_contiguous().join("\n"));
    let happening = async {
        script.trouble(secs, &shown).await;
        script.calm(&shown).await;
        stop.send(true).expect("it listens");
    };
    tokio::join!(standing, happening);
}

fn note(log: &Mutex<VecDeque<String>>, target: &Fake, event: &Event<'_>) {
    let line = match event {
        Event::Ended { step, ended } => {
            format!("{} {}: {:?} {}", step.op, step.instance, ended.outcome, ended.message)
        }
        Event::Planned { look, .. } if look.plan.is_empty() => return,
        Event::Planned { look, .. } => {
            let plan = &look.plan;
            let held: Vec<String> =
                plan.held.iter().map(|held| format!("{} {}", held.reason.word(), held.instance)).collect();
            format!("{} steps, held {}", plan.steps().count(), held.join(", "))
        }
        Event::Relaunched { instance, pid } => format!("{instance} is {pid}"),
        Event::Trouble { why } => (*why).to_owned(),
        Event::Read { .. } => "read".to_owned(),
        _ => return,
    };
    let mut log = log.lock().expect("a log");
    // What is so again and again is told once.
    if log.back().is_some_and(|last| last.split_once(' ').is_some_and(|(_, last)| *last == line)) {
        return;
    }
    log.push_back(format!("{} {line}", target.sim.now().0 / 1000));
    if log.len() > 120 {
        log.pop_front();
    }
}

impl Script<'_> {
    async fn pass(&self, secs: u64) {
        self.target.pass(secs).await;
    }

    fn now(&self) -> u64 {
        (self.target.sim.now().0 / 1000) as u64
    }

    fn any_key(&mut self) -> InstanceKey {
        let host = self.chance.u64(1..=HOSTS);
        let name = NAMES[self.chance.usize(..NAMES.len())];
        format!("0:10.0.0.{host}:web:{name}").parse().expect("a key")
    }

    async fn trouble(&mut self, secs: u64, shown: &impl Fn() -> String) {
        let faults =
            Faults { lost_replies: 0.1, missing_rows: 0.05, endless_rows: 0.05, ..Faults::default() };
        while self.now() < secs {
            if self.chance.u32(..10) == 0 {
                let bad = self.chance.bool();
                self.target.sim.set_faults(if bad { faults.clone() } else { Faults::default() });
            }
            match self.chance.u32(..10) {
                0..=3 => self.edit(),
                4..=5 => self.drift(),
                6 => {
                    let host: HostKey =
                        format!("0:10.0.0.{}", self.chance.u64(1..=HOSTS)).parse().expect("a host");
                    let dead = self.chance.bool();
                    self.target.sim.set_dead(host, dead);
                }
                7 => self.hold(),
                8 => self.release(shown),
                _ => self.target.sim.break_off(),
            }
            let quiet = self.chance.u64(1..240);
            self.pass(quiet).await;
            self.watch_held(shown);
        }
    }

    /// Nothing happens any more.
    async fn calm(&mut self, shown: &impl Fn() -> String) {
        let sim = &self.target.sim;
        sim.set_faults(Faults::default());
        (1..=HOSTS).for_each(|n| sim.set_dead(format!("0:10.0.0.{n}").parse().expect("a host"), false));
        self.pass(1500).await;
        let desired = self.wishes.desired();
        let plan = self.target.plan(&desired);
        let left: Vec<String> = plan.steps().map(|step| format!("{} {}", step.op, step.instance)).collect();
        assert!(left.is_empty(), "{left:?}\n{}", shown());
        let calls = self.target.sim.calls();
        let quiet = self.target.sim.fleet();
        self.pass(1000).await;
        assert_eq!(self.target.sim.calls(), calls, "it does not rest: {}", shown());
        assert_eq!(self.target.sim.fleet(), quiet);
        for (key, launches) in quiet.launches() {
            assert!(
                *launches <= self.launches[key],
                "{key}: {launches} > {}; {}",
                self.launches[key],
                shown()
            );
        }
        self.watch_held(shown);
        // What was held is made true when it is released, all of it.
        self.target.restraints.lock().expect("a lock").clone_from(&Default::default());
        self.pass(120).await;
        let plan = self.target.plan(&desired);
        assert!(plan.is_empty(), "{plan:#?}\n{}", shown());
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

    /// It dies, or somebody stops it behind our back.
    fn drift(&mut self) {
        let (key, now) = (self.any_key(), self.now());
        let lately = self.drifted.get(&key).is_some_and(|last| now < last + BETWEEN_DRIFTS);
        if lately || self.held.contains_key(&key) || self.target.is_paused() {
            return;
        }
        self.drifted.insert(key.clone(), now);
        *self.launches.entry(key.clone()).or_default() += 1;
        if self.chance.bool() {
            return self.target.sim.kill(&key);
        }
        self.target.sim.meddle(|fleet| {
            let Some(proc) = fleet.procs().get(&key).cloned() else { return };
            fleet.place(key, Proc { live: None, pid: None, hosted: false, ..proc });
        });
    }

    fn hold(&mut self) {
        let (key, now) = (self.any_key(), self.now());
        let mut restraints = self.target.restraints.lock().expect("a lock");
        if self.chance.u32(..4) == 0 {
            let pause = Pause { namespace: None, by: "ann".to_owned(), reason: None, until: None };
            restraints.1 = vec![pause];
            for key in self.launches.keys() {
                self.held.entry(key.clone()).or_insert((now, None));
            }
            return;
        }
        let hold = Hold { instance: key.clone(), by: "ann".to_owned(), reason: None, until: None };
        restraints.0.push(hold);
        self.held.entry(key).or_insert((now, None));
    }

    fn release(&mut self, shown: &impl Fn() -> String) {
        self.watch_held(shown);
        self.held.clear();
        *self.target.restraints.lock().expect("a lock") = Default::default();
    }

    fn watch_held(&mut self, shown: &impl Fn() -> String) {
        let (now, fleet) = (self.now(), self.target.sim.fleet());
        for (key, (since, was)) in &mut self.held {
            let is = fleet.procs().get(key).cloned().unwrap_or_default();
            match was {
                Some(was) => assert_eq!(*was, is, "{key} was held since {since}: {}", shown()),
                None if now > *since + UNDER_WAY => *was = Some(is),
                None => {}
            }
        }
    }
}

/// A simulated fleet as a target. Every other one tells of its changes.
struct Fake {
    sim: Sim,
    store: Memory,
    restraints: Mutex<(Vec<Hold>, Vec<Pause>)>,
}

impl Fake {
    fn new(seed: u64) -> Fake {
        let sim = Sim::over(Fleet::new(Dialect::Abide), Faults::default(), seed);
        let sim = if seed.is_multiple_of(2) { sim.tell_changes() } else { sim };
        Fake { sim, store: Memory::default(), restraints: Mutex::default() }
    }

    /// Lets time pass.
    async fn pass(&self, secs: u64) {
        for _ in 0..secs {
            tokio::time::sleep(Duration::from_secs(1)).await;
            self.sim.advance(1);
        }
    }

    fn is_paused(&self) -> bool {
        !self.restraints.lock().expect("a lock").1.is_empty()
    }

    /// What there would be to do.
    fn plan(&self, desired: &Desired) -> Plan {
        let everything = Scope::default();
        let observed = self.sim.observe(&everything);
        let observed = futures_util::FutureExt::now_or_never(observed).expect("no waiting").expect("a look");
        let (holds, pauses) = self.restraints.lock().expect("a lock").clone();
        let rules = Rules { holds, pauses, ..Rules::new(Caps::of(Dialect::Abide)) };
        reconcile(desired, &observed, &rules, &Now { at: self.sim.now(), ..Now::default() })
    }
}

impl Target for Fake {
    type Backend = Sim;
    type State = Memory;

    fn backend(&self) -> &Sim {
        &self.sim
    }

    fn state(&self) -> &Memory {
        &self.store
    }

    fn act_as(&self, _generation: u64) {}

    fn name(&self) -> &str {
        "sim"
    }

    async fn look(&self, desired: &Desired, prune: bool) -> Result<World, String> {
        Ok(self.follow(desired, prune).await?.0)
    }

    async fn follow(&self, _desired: &Desired, _prune: bool) -> Result<(World, Option<Changes>), String> {
        let (observed, changes) =
            self.sim.follow(&Scope::default()).await.map_err(|fault| fault.to_string())?;
        Ok((World::of(observed), changes))
    }

    fn now(&self) -> Time {
        self.sim.now()
    }

    async fn restraints(&self) -> Result<(Vec<Hold>, Vec<Pause>), String> {
        Ok(self.restraints.lock().expect("a lock").clone())
    }
}

/// A store for one process, in memory.
#[derive(Default)]
struct Memory(Mutex<(Number, Values)>);

/// Each with the change that it is from.
type Values = BTreeMap<String, (Number, Vec<u8>)>;

impl Store for Memory {
    async fn get(&self, key: &str) -> Result<Option<Entry>, Error> {
        let kept = self.0.lock().expect("a lock");
        Ok(kept.1.get(key).map(|(changed, value)| entry(key, *changed, value)))
    }

    async fn range(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Page, Error> {
        let kept = self.0.lock().expect("a lock");
        let means = |key: &str| key.starts_with(prefix) && after.is_none_or(|after| key > after);
        let all = kept.1.iter().filter(|(key, _)| means(key)).take(limit);
        let entries = all.map(|(key, (changed, value))| entry(key, *changed, value)).collect();
        Ok(Page { entries, more: None, as_of: kept.0 })
    }

    async fn slice(&self, prefix: &str, skip: usize, limit: usize) -> Result<(Vec<Entry>, usize), Error> {
        let all = self.range(prefix, None, usize::MAX).await?.entries;
        let many = all.len();
        Ok((all.into_iter().skip(skip).take(limit).collect(), many))
    }

    async fn txn(&self, txn: Txn) -> Result<Outcome, Error> {
        let mut kept = self.0.lock().expect("a lock");
        for compare in &txn.compares {
            if kept.1.get(&compare.key).map_or(0, |(changed, _)| *changed) != compare.changed {
                return Ok(Outcome::Conflict(compare.key.clone()));
            }
        }
        kept.0 += 1;
        let number = kept.0;
        for write in txn.writes {
            match write {
                Write::Put(key, value) => drop(kept.1.insert(key, (number, value))),
                Write::Delete(key) => drop(kept.1.remove(&key)),
            }
        }
        Ok(Outcome::Written(number))
    }

    async fn changes(&self, _prefix: &str, _after: Number) -> Result<Vec<Change>, Error> {
        std::future::pending().await
    }

    async fn take_lease(&self, name: &str, holder: &Holder, _lives: Duration) -> Result<Taken, Error> {
        let generation = self.0.lock().expect("a lock").0 + 1;
        Ok(Taken::Ours(Lease { name: name.to_owned(), holder: holder.id.clone(), generation }))
    }

    async fn renew_lease(&self, _lease: &Lease, _lives: Duration) -> Result<bool, Error> {
        Ok(true)
    }

    async fn release_lease(&self, _lease: &Lease) -> Result<(), Error> {
        Ok(())
    }
}

fn entry(key: &str, changed: Number, value: &[u8]) -> Entry {
    Entry { key: key.into(), value: value.into(), changed }
}
