//! `watch` on a directory: applies changes, repairs drift, ignores broken manifests, and has one leader.

use serde_json::{Value, json};

use crate::apply::{KillOnDrop, Machine};
use crate::controller_api::{address, get};
use crate::server::Server;
use crate::support::until;
use crate::system::{is_alive, kill};

pub fn watch(machine: &Machine, log: &str, more: &[&str]) -> KillOnDrop {
    let mut args = vec!["watch", "m", "--debounce", "50ms", "--listen", "127.0.0.1:0"];
    if !more.contains(&"--interval") {
        args.extend(["--interval", "1s"]);
    }
    args.extend(more);
    let watch = machine.start(&args, log);
    until("watch is ready", || read_log(machine, log).contains("ready http://"));
    watch
}

/// The same for a machine with `a` and `b`, once both run and `converged` is logged.
fn watch_two(machine: &Machine, log: &str, more: &[&str]) -> KillOnDrop {
    ["a", "b"].iter().for_each(|name| machine.process(name, "1", ""));
    let watch = watch(machine, log, more);
    until("both run", || running(machine, &["a", "b"]));
    until("it is logged", || read_log(machine, log).contains("converged: 2 instances as wanted"));
    watch
}

pub fn read_log(machine: &Machine, log: &str) -> String {
    std::fs::read_to_string(machine.path(log)).unwrap_or_default()
}

pub fn running(machine: &Machine, names: &[&str]) -> bool {
    let pids = machine.pids();
    names.iter().all(|name| pids.get(*name).is_some_and(|pid| is_alive(*pid as u32)))
}

/// As a client without manifests would.
pub fn stop_directly(machine: &Machine, name: &str) {
    operate_directly(machine, name, json!({"op_type": 1}));
}

fn operate_directly(machine: &Machine, name: &str, more: Value) {
    let read = |name: &str| {
        std::fs::read_to_string(machine.path(".abide-home").join(name)).expect("a file").trim().to_owned()
    };
    let address = read("address").trim_start_matches("http://").parse().expect("an address");
    let auth = format!(
        "X-Bkapi-Authorization: {}\r\n",
        json!({"bk_app_code": "abide", "bk_app_secret": read("secret")})
    );
    let mut body =
        json!({"meta": {"namespace": "web", "name": name}, "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}]});
    body.as_object_mut().expect("a map").extend(more.as_object().expect("a map").clone());
    let send = |call: &str, body: Value| -> Value {
        let path = format!("/api/c/compapi/v2/gse/{call}/");
        let (status, text) = Server::at(address).send("POST", &path, &auth, body.to_string().as_bytes());
        assert_eq!(status, 200, "{call}: {text}");
        serde_json::from_str(&text).expect("JSON")
    };
    let task = send("operate_proc", body)["data"]["task_id"].clone();
    until("the operation has a result", || {
        let answer = send("get_proc_operate_result", json!({"task_id": task}));
        let rows = answer["data"].as_object().expect("rows");
        let codes: Vec<&Value> = rows.values().map(|row| &row["error_code"]).collect();
        assert!(codes.iter().all(|code| [0, 115].contains(&code.as_i64().unwrap_or(-1))), "{answer}");
        !codes.is_empty() && codes.iter().all(|code| **code == 0)
    });
}

/// A client that registers another spec without an owner does not become the owner.
#[test]
fn a_directly_registered_change_is_reverted() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let _watch = watch(&machine, "watch.log", &["--interval", "1h"]);
    until("it runs", || running(&machine, &["a"]));
    let text = machine.manifest_text("a");
    let mut manifest: Value = serde_yaml::from_str(&text).expect("a manifest");
    manifest["spec"]["control"]["start_cmd"] = "echo start a other >> effects; exec sleep 1000".into();
    let me = nix::unistd::User::from_uid(nix::unistd::geteuid()).ok().flatten().expect("a user");
    manifest["spec"]["identity"]["user"] = me.name.into();
    operate_directly(&machine, "a", json!({"op_type": 7, "spec": manifest["spec"]}));
    let many = |line: &str| machine.effects().iter().filter(|effect| *effect == line).count();
    until("it is put back", || many("start a other") == 1 && many("start a 1") == 2);
    until("it is logged", || {
        read_log(&machine, "watch.log").contains("control.start_cmd: echo start a other")
    });
}

/// The gateway streams changes: a pass does not wait for the interval.
#[test]
fn a_stopped_process_is_started_and_an_agent_restart_is_only_reported() {
    let machine = Machine::new();
    let _watch = watch_two(&machine, "watch.log", &["--interval", "1h"]);
    let before = machine.pids();
    stop_directly(&machine, "a");
    until("it is repaired", || machine.pids().get("a").is_some_and(|pid| *pid != before["a"]));
    let starts = |name: &str| {
        read_log(&machine, "watch.log").matches(&format!("start 0:127.0.0.1:web:{name}  ")).count()
    };
    until("it is logged", || starts("a") == 2);
    kill(before["b"] as u32, "KILL");
    until("it is logged", || read_log(&machine, "watch.log").contains("exited, and runs again as process"));
    until("b is back", || {
        machine.effects() == ["start a 1", "start a 1", "start b 1", "start b 1", "stop a"]
    });
    assert_eq!(starts("b"), 1, "{}", read_log(&machine, "watch.log"));
}

#[test]
fn a_saved_change_is_applied_and_a_broken_one_is_not() {
    let machine = Machine::new();
    ["a", "b"].iter().for_each(|name| machine.process(name, "1", "a"));
    let _watch = watch(&machine, "watch.log", &[]);
    until("both run", || running(&machine, &["a", "b"]));
    let first = machine.pids();
    // One restart, and the reason.
    machine.process("a", "2", "a");
    until("a was restarted", || machine.pids().get("a").is_some_and(|pid| *pid != first["a"]));
    assert_eq!(machine.pids()["b"], first["b"]);
    until("the reason is logged", || read_log(&machine, "watch.log").contains("control.start_cmd"));
    // A broken edit is shown, and nothing happens; the next good one is taken up.
    let second = machine.pids();
    let good = machine.manifest_text("a");
    machine.edit("a", "start_cmd", "strat_cmd");
    until("it is logged", || read_log(&machine, "watch.log").contains("did you mean \"start_cmd\""));
    machine.process("b", "1", "b");
    until("others go on", || machine.effects().contains(&"reload b".to_owned()));
    assert_eq!(machine.pids(), second);
    // Moving a process between files does nothing.
    std::fs::write(machine.path("m/a.yaml"), &good).expect("a file");
    std::fs::rename(machine.path("m/a.yaml"), machine.path("m/z.yaml")).expect("a file");
    machine.process("c", "1", "");
    until("c runs", || running(&machine, &["c"]));
    assert_eq!((machine.pids()["a"], machine.pids()["b"]), (second["a"], second["b"]));
    // A death is the agent's business.
    kill(second["b"] as u32, "KILL");
    until("b is back", || machine.pids().get("b").is_some_and(|pid| *pid != second["b"]));
    let starts = machine.effects().iter().filter(|line| line.starts_with("start b")).count();
    assert_eq!(starts, 2, "{:?}", machine.effects());
}

#[test]
fn drift_is_repaired_holds_are_not_and_a_missing_directory_prunes_nothing() {
    let machine = Machine::new();
    ["a", "b"].iter().for_each(|name| machine.process(name, "1", ""));
    let _watch = watch(&machine, "watch.log", &["--prune"]);
    until("both run", || running(&machine, &["a", "b"]));
    // A client calls the gateway directly.
    let before = machine.pids();
    stop_directly(&machine, "a");
    until("it is repaired", || machine.pids().get("a").is_some_and(|pid| *pid != before["a"]));
    // What a person did stays so.
    assert_eq!(machine.run(&["stop", "web/b", "--reason", "manually"]).0, 0);
    until("it is logged", || read_log(&machine, "watch.log").contains("manually"));
    machine.process("c", "1", "");
    until("c runs", || running(&machine, &["c"]));
    assert_eq!(machine.rows()["b"]["running"], false);
    assert_eq!(machine.run(&["release", "web/b"]).0, 0);
    until("b is back", || running(&machine, &["b"]));
    // A missing directory deletes nothing.
    let all = machine.pids();
    std::fs::rename(machine.path("m"), machine.path("away")).expect("a folder");
    until("it is logged", || {
        read_log(&machine, "watch.log").contains("the last good version of invalid files stays active")
    });
    std::fs::rename(machine.path("away"), machine.path("m")).expect("a folder");
    // A file that is gone is one, when it was seen to be gone twice.
    std::fs::remove_file(machine.path("m/c.yaml")).expect("a file");
    until("c is gone", || !machine.rows().contains_key("c"));
    assert_eq!((machine.pids()["a"], machine.pids()["b"]), (all["a"], all["b"]));
}

#[test]
fn a_standby_takes_over_without_repeating_operations() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let mut first = watch(&machine, "first", &[]);
    until("a runs", || running(&machine, &["a"]));
    let _second = watch(&machine, "second", &[]);
    until("it waits", || read_log(&machine, "second").contains("standby"));
    first.0.kill().expect("it is killed");
    first.0.wait().expect("it ends");
    machine.process("b", "1", "");
    until("the second took over", || running(&machine, &["a", "b"]));
    assert_eq!(machine.effects(), ["start a 1", "start b 1"]);
}

/// A rollout takes longer than a lease lives; the one who leads goes on leading.
#[test]
fn a_long_rollout_keeps_the_lease() {
    let machine = Machine::new();
    machine.several("many", "1");
    machine.edit("many", "batch: 1", "batch: 1, soak: 7s");
    let _watch = watch(&machine, "watch.log", &[]);
    until("both run", || running(&machine, &["many_1", "many_2"]));
    until("it is logged", || read_log(&machine, "watch.log").contains("converged: 2 instances as wanted"));
    machine.process("later", "1", "");
    until("it still leads", || machine.effects() == ["start later 1", "start many 1", "start many 1"]);
}

/// The same for watch: an instance that is paused or held in between is not changed, and is not a failure.
#[test]
fn a_pause_takes_effect_during_a_rollout() {
    let machine = Machine::new();
    machine.several("many", "1");
    assert_eq!(machine.apply(&[]).0, 0);
    let _watch = watch(&machine, "watch.log", &[]);
    until("it is logged", || read_log(&machine, "watch.log").contains("converged: 2 instances as wanted"));
    let again = || machine.effects().iter().filter(|line| *line == "start many 2").count();
    let soaking = machine.manifest_text("many").replace("batch: 1", "batch: 1, soak: 6s");
    machine.declare("many", soaking.replace("start many 1", "start many 2"));
    until("the first is new", || again() == 1);
    assert_eq!(machine.run(&["pause", "web", "--reason", "hands off"]).0, 0);
    until("watch reports the pause", || read_log(&machine, "watch.log").contains("hands off"));
    // Another namespace is not paused: its rollout begins after the pause and soaks for longer.
    machine.several("other", "1");
    let other = machine.manifest_text("other").replace("batch: 1", "batch: 1, soak: 7s");
    machine.declare("other", other.replace("namespace: web", "namespace: batch"));
    let others = || machine.effects().iter().filter(|line| *line == "start other 1").count();
    until("the other rollout has soaked", || others() == 2);
    assert_eq!(again(), 1, "the soak is over, and the pause still holds");
    assert_eq!(machine.run(&["resume", "web"]).0, 0);
    until("the second is new, too", || again() == 2);
}

/// Editors write a temporary file and rename it; git-sync and config maps swap a link.
#[test]
fn atomic_renames_and_link_swaps_are_applied() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    std::fs::create_dir_all(machine.path("sync/rev-1")).expect("a folder");
    std::fs::rename(machine.path("m"), machine.path("sync/rev-1/m")).expect("a folder");
    std::os::unix::fs::symlink("rev-1", machine.path("sync/current")).expect("a link");
    std::os::unix::fs::symlink("sync/current/m", machine.path("m")).expect("a link");
    let slow = ["--interval", "10m"];
    let _watch = watch(&machine, "watch.log", &slow);
    until("a runs", || running(&machine, &["a"]));
    let swap = |to: &str| {
        std::os::unix::fs::symlink(to, machine.path("sync/next")).expect("a link");
        std::fs::rename(machine.path("sync/next"), machine.path("sync/current")).expect("it is swapped");
    };
    let a = machine.manifest_text("a");
    let version = |number: &str| a.replace("start a 1", &format!("start a {number}"));
    std::fs::create_dir_all(machine.path("sync/rev-2/m")).expect("a folder");
    std::fs::write(machine.path("sync/rev-2/m/a.yaml"), version("2")).expect("a file");
    swap("rev-2");
    until("the second tree is taken", || machine.effects().contains(&"start a 2".to_owned()));
    // The new tree is watched now.
    std::fs::write(machine.path("m/.a.yaml.new"), version("3")).expect("a file");
    std::fs::rename(machine.path("m/.a.yaml.new"), machine.path("m/a.yaml")).expect("it is renamed");
    until("the third is taken", || machine.effects().contains(&"start a 3".to_owned()));
    swap("rev-1");
    until("the first is back", || machine.effects().iter().filter(|line| *line == "start a 1").count() == 2);
}

#[test]
fn without_inotify_files_are_polled() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let _watch = watch(&machine, "watch.log", &["--interval", "10m", "--poll"]);
    until("a runs", || running(&machine, &["a"]));
    machine.process("a", "2", "");
    machine.process("b", "1", "");
    until("both are taken", || {
        running(&machine, &["b"]) && machine.effects().contains(&"start a 2".to_owned())
    });
}

/// A watch that starts again knows the active revision: a file that is broken by then keeps its last good content.
#[test]
fn a_file_broken_at_startup_keeps_its_last_good_version() {
    let machine = Machine::new();
    let first = watch_two(&machine, "first", &["--interval", "1h"]);
    drop(first);
    let file = machine.path("m/a.yaml");
    let good = std::fs::read_to_string(&file).expect("a file");
    std::fs::write(&file, good.replace("start_cmd", "strat_cmd")).expect("a file");
    let _second = watch(&machine, "second", &["--interval", "1h"]);
    until("it is logged", || read_log(&machine, "second").contains("did you mean \"start_cmd\""));
    until("both are wanted", || read_log(&machine, "second").contains("read 2 instances"));
    stop_directly(&machine, "a");
    until("it is repaired", || machine.effects() == ["start a 1", "start a 1", "start b 1", "stop a"]);
}

/// One of two trees is not there for a while: what it declared is kept as it was.
#[test]
fn a_missing_path_keeps_its_last_good_version() {
    let machine = Machine::new();
    ["a", "b"].iter().for_each(|name| machine.process(name, "1", ""));
    std::fs::create_dir(machine.path("n")).expect("a folder");
    std::fs::rename(machine.path("m/b.yaml"), machine.path("n/b.yaml")).expect("a file");
    let _watch = watch(&machine, "watch.log", &["n", "--prune", "--interval", "1h"]);
    until("both run", || running(&machine, &["a", "b"]));
    until("it is logged", || read_log(&machine, "watch.log").contains("converged: 2 instances as wanted"));
    std::fs::rename(machine.path("n"), machine.path("away")).expect("a folder");
    until("it is logged", || {
        read_log(&machine, "watch.log").contains("the last good version of invalid files stays active")
    });
    stop_directly(&machine, "b");
    until("it is repaired", || machine.effects() == ["start a 1", "start b 1", "start b 1", "stop b"]);
}

#[test]
fn follow_no_still_repairs_drift() {
    let machine = Machine::new();
    let first = watch_two(&machine, "first", &["--interval", "1h"]);
    drop(first);
    machine.process("b", "2", "");
    let _second = watch(&machine, "second", &["--interval", "1h", "--follow", "no"]);
    until("it is logged", || read_log(&machine, "second").contains("not followed"));
    until("it rests", || read_log(&machine, "second").contains("converged: 2 instances as wanted"));
    stop_directly(&machine, "a");
    until("it is repaired", || machine.effects() == ["start a 1", "start a 1", "start b 1", "stop a"]);
}

/// While a rollout waits, files are still read: an error is logged, and a newer revision does not wait.
#[test]
fn a_newer_revision_ends_a_waiting_rollout() {
    let machine = Machine::new();
    machine.several("many", "1");
    machine.process("other", "1", "");
    let file = machine.path("m/many.yaml");
    let text = std::fs::read_to_string(&file).expect("a file");
    std::fs::write(&file, text.replace("batch: 1", "batch: 1, soak: 1h")).expect("a file");
    let _watch = watch(&machine, "watch.log", &["--interval", "1h"]);
    until("it waits", || read_log(&machine, "watch.log").contains("soaking for"));
    let other = machine.path("m/other.yaml");
    let good = std::fs::read_to_string(&other).expect("a file");
    std::fs::write(&other, good.replace("start_cmd", "strat_cmd")).expect("a file");
    until("it is logged", || read_log(&machine, "watch.log").contains("did you mean \"start_cmd\""));
    std::fs::write(&other, good).expect("a file");
    std::fs::write(&file, text).expect("a file");
    until("the rest follows", || machine.effects() == ["start many 1", "start many 1", "start other 1"]);
}

/// A rollout that waits, and a start that takes its time, hold up nothing that has nothing to do with them, and are not
/// disturbed by it.
#[test]
fn a_waiting_component_blocks_no_other() {
    let machine = Machine::new();
    machine.several("many", "1");
    ["slow", "other"].iter().for_each(|name| machine.process(name, "1", ""));
    machine.edit("many", "batch: 1", "batch: 1, soak: 1h");
    machine.edit("slow", "start_check_secs: 0", "start_check_secs: 300");
    let _watch = watch(&machine, "watch.log", &["--interval", "1h"]);
    until("it waits", || read_log(&machine, "watch.log").contains("soaking for"));
    let mut effects = vec!["start many 1", "start other 1", "start slow 1"];
    until("what can run, runs", || machine.effects() == effects);
    let status = || get(address(&machine, "watch.log"), "/api/v1/status").json();
    until("only two are in flight", || status()["under_way"] == 2);
    // The gateway has its registration and its first report.
    until("the other runs", || running(&machine, &["other"]));
    stop_directly(&machine, "other");
    effects.extend(["start other 1", "stop other"]);
    effects.sort_unstable();
    until("drift is repaired", || machine.effects() == effects);
    machine.process("later", "1", "");
    effects.insert(0, "start later 1");
    until("something new is made", || machine.effects() == effects);
    until("only two are in flight again", || status()["under_way"] == 2);
    let status = status();
    assert_eq!(status["converged"], false, "{status}");
    let held = status["held"].as_array().expect("a list");
    assert!(held.iter().any(|held| held["reason"] == "UnderWay"), "{status}");
    assert_eq!(read_log(&machine, "watch.log").matches("soaking for").count(), 1, "it still waits");
    // Another spec for an instance in flight does not wait.
    machine.edit("many", ", soak: 1h", "");
    effects.insert(2, "start many 1");
    until("the rest follows", || machine.effects() == effects);
}

/// Other files next to the manifests do not prevent a read.
#[test]
fn unrelated_file_changes_do_not_delay_a_pass() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let _watch = watch(&machine, "watch.log", &["--interval", "10m"]);
    until("a runs", || running(&machine, &["a"]));
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(std::sync::atomic::Ordering::SeqCst) {
                std::fs::write(machine.path("noise"), "x").expect("a file");
                std::fs::write(machine.path("m/noise"), "x").expect("a file");
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
        });
        machine.process("a", "2", "");
        until("it is taken", || machine.effects().contains(&"start a 2".to_owned()));
        is_over.store(true, std::sync::atomic::Ordering::SeqCst);
    });
}

/// A hold or release takes effect without waiting for the interval.
#[test]
fn holds_and_pauses_take_effect_immediately() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let _watch = watch(&machine, "watch.log", &["--interval", "1h"]);
    until("a runs", || running(&machine, &["a"]));
    assert_eq!(machine.run(&["stop", "web/a", "--reason", "manually"]).0, 0);
    until("it is logged", || read_log(&machine, "watch.log").contains("manually"));
    assert_eq!(machine.rows()["a"]["running"], false);
    assert_eq!(machine.run(&["release", "web/a"]).0, 0);
    until("a is back", || running(&machine, &["a"]));
}
