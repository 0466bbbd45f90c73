//! Controller crashes: `apply` and `watch` converge after a kill at every journal write and every call.
//!
//! Every command runs as often as without a kill. A reload may run twice on targets without call ids, and runs at least once.
//!
//! The processes record what happens: each command writes a line. A few points are tried by default, all of
//! them with `ABIDE_SOAK`.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::apply::{KillOnDrop, Machine};
use crate::dialects::{Daemon, Fleet};
use crate::support::until;
use crate::system::kill;

/// A system with real processes and manifests in `m`.
trait Stage: Sized {
    fn set_up(dialect: &'static str) -> Self;
    /// The command with the flags of the stage: target, state and owner.
    fn command(&self, args: &[&str]) -> Command;
    fn folder(&self) -> String;
    /// A process of the owner that does not change: prune needs one that remains.
    fn write_stays(&self);
    fn rows(&self) -> BTreeMap<String, Value>;
    /// Is a call that was lost found by its name?
    fn has_idempotency_keys(&self) -> bool;

    /// Everything that happened, as recorded by the commands of the processes.
    fn effects(&self) -> Vec<String> {
        let text = self.read("effects");
        let mut effects: Vec<String> = text.lines().map(str::to_owned).collect();
        effects.sort();
        if !self.has_idempotency_keys() {
            effects.dedup_by(|one, other| one == other && one.starts_with("reload"));
        }
        effects
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(format!("{}/{name}", self.folder())).unwrap_or_default()
    }

    /// How everything is, without what is another in every run.
    fn state(&self) -> BTreeMap<String, String> {
        const SAME: [&str; 7] = ["registered", "hosted", "running", "owner", "spec", "live_spec", "health"];
        let told = |row: &Value| SAME.map(|field| format!("{field}: {}", row[field])).join("\n");
        let told = |row: &Value| told(row).replace(&self.folder(), ".");
        self.rows().iter().map(|(name, row)| (name.clone(), told(row))).collect()
    }
}

impl Stage for Machine {
    fn set_up(_: &'static str) -> Machine {
        Machine::new()
    }

    fn command(&self, args: &[&str]) -> Command {
        Machine::command(self, args)
    }

    fn folder(&self) -> String {
        self.folder.path().display().to_string()
    }

    fn write_stays(&self) {
        self.process("stays", "1", "");
    }

    fn rows(&self) -> BTreeMap<String, Value> {
        Machine::rows(self)
    }

    fn has_idempotency_keys(&self) -> bool {
        true
    }
}

impl Stage for Fleet {
    fn set_up(dialect: &'static str) -> Fleet {
        Fleet::new(dialect)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Fleet::command(self, args);
        command.args(["--owner", "team"]);
        command
    }

    fn folder(&self) -> String {
        self.system.folder.path().display().to_string()
    }

    fn write_stays(&self) {
        self.write(&Daemon::new("stays"));
    }

    fn rows(&self) -> BTreeMap<String, Value> {
        let rows = self.rows().into_iter();
        rows.map(|row| (row["name"].as_str().expect("a name").to_owned(), row)).collect()
    }

    fn has_idempotency_keys(&self) -> bool {
        false
    }
}

/// The first manifests, their change, and further arguments.
struct Scene<S> {
    what: &'static str,
    before: fn(&S),
    after: fn(&S),
    flags: &'static [&'static str],
}

const ABIDE_SCENES: [Scene<Machine>; 9] = [
    Scene {
        what: "create",
        before: |_| {},
        after: |m| ["x", "y"].iter().for_each(|name| m.process(name, "1", "")),
        flags: &[],
    },
    Scene {
        what: "change",
        before: |m| ["x", "y"].iter().for_each(|name| m.process(name, "1", "a")),
        after: |m| {
            m.process("x", "2", "a");
            m.process("y", "1", "b");
        },
        flags: &[],
    },
    Scene {
        what: "replace",
        before: |m| m.process("x", "1", ""),
        after: |m| m.edit("x", "value_key: x", "value_key: other"),
        flags: &[],
    },
    Scene { what: "rollout", before: |m| m.several("x", "1"), after: |m| m.several("x", "2"), flags: &[] },
    Scene {
        what: "prune",
        before: |m| ["x", "y"].iter().for_each(|name| m.process(name, "1", "")),
        after: |m| std::fs::remove_file(m.path("m/x.yaml")).expect("it was there"),
        flags: &["--prune"],
    },
    Scene {
        what: "one-shot pending",
        before: |_| {},
        after: |m| {
            let job = m.manifest("x").monitor("auto_type", 2);
            m.declare(
                "x",
                job.control("start_mode", "foreground").start_cmd("sleep 0.5; echo run x >> effects"),
            );
            dependent(m);
        },
        flags: &[],
    },
    Scene {
        what: "start period",
        before: |_| {},
        after: |m| {
            let slow = m
                .manifest("x")
                .control("start_mode", "foreground")
                .start_cmd("echo start x >> effects; sleep 1; touch x.ok; exec sleep 1000")
                .spec("health", "{cmd: test -e x.ok, interval: 1, start_period: 20}");
            m.declare("x", slow);
            dependent(m);
        },
        flags: &[],
    },
    Scene { what: "hooks", before: |m| hooked(m, "1"), after: |m| hooked(m, "2"), flags: &[] },
    Scene { what: "groups", before: |m| grouped(m, "1"), after: |m| grouped(m, "2"), flags: &[] },
];

/// Hooks around its restart.
fn hooked(machine: &Machine, version: &str) {
    let hook =
        |name: &str| format!("{name}: {{run: 'echo {name} x >> {}'}}", machine.path("effects").display());
    machine.process("x", version, "");
    let hooks = format!("  hooks: {{{}, {}}}\n", hook("before_stop"), hook("after_start"));
    machine.declare("x", machine.manifest_text("x") + &hooks);
}

/// Two instances in a group of which one may be unavailable.
fn grouped(machine: &Machine, version: &str) {
    machine.several("x", version);
    machine.edit("x", "rollout: {batch: 1}", "rollout: {order: [here], max_unavailable: 1}");
    let host =
        machine.manifest_text("x").lines().find(|line| line.starts_with("hosts:")).expect("hosts").to_owned();
    machine.edit("x", &host, "hosts: [{group: here}]");
    machine.declare("here", format!("apiVersion: abide/v1\nkind: HostGroup\nmeta: {{name: here}}\n{host}\n"));
}

/// `y`, which starts when `x` is ready.
fn dependent(machine: &Machine) {
    let manifest = machine
        .manifest("y")
        .depends_on(&["x"])
        .control("start_mode", "foreground")
        .start_cmd("echo start y >> effects; exec sleep 1000");
    machine.declare("y", manifest);
}

const PLATFORM_SCENES: [Scene<Fleet>; 5] = [
    Scene {
        what: "create",
        before: |_| {},
        after: |fleet| ["x", "y"].iter().for_each(|name| fleet.write(&Daemon::new(name))),
        flags: &[],
    },
    Scene {
        what: "change",
        before: |fleet| ["x", "y"].iter().for_each(|name| fleet.write(&Daemon::new(name))),
        after: |fleet| {
            fleet.write(&Daemon { version: "2", ..Daemon::new("x") });
            fleet.write(&Daemon { config: "b.conf", ..Daemon::new("y") });
        },
        flags: &[],
    },
    Scene {
        what: "replace",
        before: |fleet| fleet.write(&Daemon::new("x")),
        after: |fleet| fleet.write(&Daemon { pid_file: "second", ..Daemon::new("x") }),
        flags: &[],
    },
    Scene {
        what: "rollout",
        before: |fleet| fleet.write_several(&several("1")),
        after: |fleet| fleet.write_several(&several("2")),
        flags: &[],
    },
    Scene {
        what: "prune",
        before: |fleet| ["x", "y"].iter().for_each(|name| fleet.write(&Daemon::new(name))),
        after: |fleet| std::fs::remove_file(fleet.path("m/x.yaml")).expect("it was there"),
        flags: &["--prune"],
    },
];

fn several(version: &'static str) -> Daemon {
    let more = "instances: 2\nrollout: {batch: 1}\n".to_owned();
    Daemon { version, more, ..Daemon::new("x") }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Verb {
    Apply,
    Watch,
}

/// One run of a verb, whose words are in a file.
struct Run<'a, S> {
    stage: &'a S,
    verb: Verb,
    flags: &'a [&'a str],
    log: String,
    child: KillOnDrop,
}

impl<'a, S: Stage> Run<'a, S> {
    /// `dies`: at which step.
    fn begin(stage: &'a S, verb: Verb, flags: &'a [&'a str], log: &str, dies: Option<usize>) -> Run<'a, S> {
        let mut args = match verb {
            Verb::Apply => vec!["apply", "m", "--yes"],
            Verb::Watch => {
                let interval = if log == "again" { "1s" } else { "1h" };
                vec!["watch", "m", "--debounce", "50ms", "--interval", interval, "--listen", "127.0.0.1:0"]
            }
        };
        args.extend(flags);
        let file = std::fs::File::create(format!("{}/{log}", stage.folder())).expect("a file");
        let both = file.try_clone().expect("a file");
        let mut command = stage.command(&args);
        let steps = format!("{}/steps", stage.folder());
        let _ = std::fs::remove_file(&steps);
        command.env("ABIDE_STEPS_FILE", steps).stdin(Stdio::null()).stdout(file).stderr(both);
        if let Some(nth) = dies {
            command.env("ABIDE_DIE_AFTER", nth.to_string());
        }
        let child: Child = command.spawn().expect("it starts");
        Run { stage, verb, flags, log: log.to_owned(), child: KillOnDrop(child) }
    }

    fn read_log(&self) -> String {
        self.stage.read(&self.log)
    }

    /// Until everything is as wanted; then nothing of it goes on.
    fn finishes(mut self, what: &str) {
        if self.verb == Verb::Watch {
            // Some say so before they begin to prune.
            until(&format!("{what}: it converges"), || {
                self.read_log().lines().last().is_some_and(is_whole) && nothing_left(self.stage, self.flags)
            });
            kill(self.child.0.id(), "TERM");
        }
        let ended = self.child.0.wait().expect("it ends");
        let well = if self.verb == Verb::Watch { 143 } else { 0 };
        assert_eq!(ended.code(), Some(well), "{what}: {}\n{:?}", self.read_log(), self.stage.effects());
    }

    /// Whether it was killed, rather than finished before.
    fn dies(mut self, what: &str) -> bool {
        let mut ended = None;
        until(&format!("{what} is reached"), || {
            ended = self.child.0.try_wait().expect("it is ours");
            ended.is_some()
        });
        let killed = ended.and_then(|ended| ended.signal()) == Some(9);
        let well = ended.and_then(|ended| ended.code()) == Some(0);
        assert!(killed || well, "{what} was not reached: {ended:?}\n{}", self.read_log());
        killed
    }
}

/// Everything is as wanted, and nothing of it is left alone.
fn is_whole(line: &str) -> bool {
    line.starts_with("converged:") && line.ends_with("as wanted")
}

fn nothing_left(stage: &impl Stage, flags: &[&str]) -> bool {
    let mut args = vec!["plan", "m", "--detailed-exitcode"];
    args.extend(flags);
    let ended =
        stage.command(&args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    ended.expect("it runs").code() == Some(0)
}

/// The number of points: calls and writes of the journal, up to the last of these. Lease renewals and polls do not count,
/// and no observation is caused by time, since the interval is long. The number of live checks and the content of a call
/// still differ a little from run to run: the observation after the work compensates for that.
fn points(steps: &str) -> usize {
    let steps: Vec<&str> = steps.lines().collect();
    steps.iter().rposition(|step| step.starts_with("journal")).map_or(0, |last| last + 1)
}

/// So often a point may be missed.
const MAX_ATTEMPTS: usize = 4;

fn survives<S: Stage>(verb: Verb, dialect: &'static str, scene: &Scene<S>, few: usize) {
    let Scene { what, before, after, flags } = scene;
    let prepared = || {
        let stage = S::set_up(dialect);
        before(&stage);
        stage.write_stays();
        Run::begin(&stage, Verb::Apply, &[], "prepared", None).finishes(what);
        // A process runs a moment before it has written its line.
        let run = stage.rows().values().filter(|row| row["running"] == true).count();
        until("all have begun", || stage.effects().len() >= run);
        std::fs::write(format!("{}/effects", stage.folder()), "").expect("a file");
        after(&stage);
        stage
    };
    let stage = prepared();
    let run = Run::begin(&stage, verb, flags, "clean", None);
    run.finishes(&format!("{verb:?} {dialect} {what}"));
    let (steps, effects, state) = (stage.read("steps"), stage.effects(), stage.state());
    let many = points(&steps);
    assert!(many > 5 && !effects.is_empty(), "{dialect} {what}: {steps}, {effects:?}");
    println!("{verb:?} {dialect} {what}: {many} points");
    drop(stage);
    let every = if std::env::var("ABIDE_SOAK").is_ok() { 1 } else { (many / few).max(1) };
    for nth in (1..=many).filter(|nth| nth % every == 0) {
        let at = steps.lines().nth(nth - 1).unwrap_or_default();
        let what = format!("{verb:?} {dialect} {what}: death {nth} of {many} ({at})");
        // A run with fewer observations than the counted one does not count.
        let stage = (0..MAX_ATTEMPTS).find_map(|_| {
            let stage = prepared();
            Run::begin(&stage, verb, flags, "dies", Some(nth)).dies(&what).then_some(stage)
        });
        let stage = stage.unwrap_or_else(|| panic!("{what} was not reached"));
        Run::begin(&stage, verb, flags, "again", None).finishes(&what);
        let said = stage.read("dies") + "--- again:\n" + &stage.read("again");
        assert_eq!(stage.effects(), effects, "{what}\n{said}");
        assert_eq!(stage.state(), state, "{what}\n{said}");
        assert!(nothing_left(&stage, flags), "{what}\n{said}");
    }
}

/// All scenes, side by side.
fn all<S: Stage>(verb: Verb, dialect: &'static str, scenes: &'static [Scene<S>], few: usize) {
    std::thread::scope(|threads| {
        for scene in scenes {
            threads.spawn(move || survives(verb, dialect, scene, few));
        }
    });
}

#[test]
fn the_next_apply_finishes_a_killed_one() {
    all(Verb::Apply, "abide", &ABIDE_SCENES, 5);
}

#[test]
fn the_next_apply_on_gse_v1_finishes_a_killed_one() {
    all(Verb::Apply, "gse-v1", &PLATFORM_SCENES, 3);
}

#[test]
fn the_next_apply_on_gse_v2_finishes_a_killed_one() {
    all(Verb::Apply, "gse-v2", &PLATFORM_SCENES, 3);
}

/// Its starts are checked for five seconds, which no field of it can change: one scene by default.
#[test]
fn the_next_apply_on_job_finishes_a_killed_one() {
    match std::env::var("ABIDE_SOAK") {
        Ok(_) => all(Verb::Apply, "job", &PLATFORM_SCENES, 3),
        Err(_) => survives(Verb::Apply, "job", &PLATFORM_SCENES[2], 2),
    }
}

#[test]
fn watch_resumes_after_a_kill() {
    all(Verb::Watch, "abide", &ABIDE_SCENES, 2);
}

#[test]
fn watch_on_gse_v2_resumes_after_a_kill() {
    all(Verb::Watch, "gse-v2", &PLATFORM_SCENES, 2);
}

/// With every point only: it takes its time.
#[test]
fn watch_on_other_dialects_resumes_after_a_kill() {
    if std::env::var("ABIDE_SOAK").is_ok() {
        all(Verb::Watch, "gse-v1", &PLATFORM_SCENES, 2);
        all(Verb::Watch, "job", &PLATFORM_SCENES, 2);
    }
}
