//! Hooks around operations: `before_stop` and `after_start`, with real processes, failures and killed agents.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::sandbox::Home;
use crate::support::{test_user, until};
use crate::system::{System, kill, lines};
use crate::{apply::Machine, watch};

const START: i64 = 0;
const STOP: i64 = 1;
const RESTART: i64 = 7;
const RELOAD: i64 = 8;
const KILL: i64 = 9;

/// A process that notes its start and its end in `order`.
const PROCESS: &str =
    "trap 'echo term >> order; exit 0' TERM; echo start >> order; while :; do sleep 0.02; done";

/// A command that waits until the process has noted its start, then runs another one.
fn after(command: &str) -> String {
    format!("while [ \"$(tail -n 1 order 2> /dev/null)\" != start ]; do sleep 0.01; done; {command}")
}

fn text(system: &System, name: &str) -> String {
    std::fs::read_to_string(system.path(name)).unwrap_or_default()
}

/// A process whose hooks note their runs in `order`.
fn hooked(system: &System) -> Value {
    let mut spec = system.spec("p", PROCESS);
    spec["hooks"] = json!({"before_stop": {"run": "echo drain >> order"}, "after_start": {"run": after("echo ready >> order")}});
    spec
}

#[test]
fn hooks_run_around_start_stop_and_restart_and_not_for_reload_and_kill() {
    let system = System::new();
    let mut spec = hooked(&system);
    spec["control"]["reload_cmd"] = json!("echo reload >> order");
    spec["control"]["kill_cmd"] = json!("echo kill >> order; kill -KILL $ABIDE_PID");
    let order = || text(&system, "order");
    assert_eq!(system.operate("p", START, &spec), (0, "success".to_owned()));
    assert_eq!(order(), "start\nready\n");
    assert_eq!(system.operate("p", RESTART, &spec), (0, "success".to_owned()));
    assert_eq!(order(), "start\nready\ndrain\nterm\nstart\nready\n");
    std::fs::remove_file(system.path("order")).expect("a file");
    assert_eq!(system.operate("p", RELOAD, &spec).0, 0);
    assert_eq!(system.operate("p", STOP, &spec), (0, "success".to_owned()));
    assert_eq!(order(), "reload\ndrain\nterm\n");
    // A stopped process has nothing to drain, and a kill does not wait.
    assert_ne!(system.operate("p", STOP, &spec).0, 0);
    assert_eq!(system.operate("p", START, &spec).0, 0);
    assert_eq!(system.operate("p", KILL, &spec).0, 0);
    assert_eq!(order(), "reload\ndrain\nterm\nstart\nready\nkill\n");
}

#[test]
fn a_hook_runs_as_the_user_in_the_environment_and_sandbox_of_the_process() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let home = Home::of(&user);
    let mut spec = home.spec(&system, &user.name, "p", "exec sleep 1000");
    spec["env"]["WORD"] = json!("hello");
    spec["sandbox"] = json!({"private_tmp": true, "umask": "0027"});
    let note = |name: &str| json!({"run": format!("echo $WORD $(id -un) $ABIDE_INSTANCE $ABIDE_PID $(umask) > {name}; ls /tmp | wc -l >> {name}; echo x > /tmp/{name}")});
    spec["hooks"] = json!({"after_start": note("after"), "before_stop": note("before")});
    assert_eq!(system.operate("p", START, &spec), (0, "success".to_owned()));
    let pid = system.pid("p").expect("a pid");
    let expected = |files: u8| format!("hello {} 0:127.0.0.1:web:p {pid} 0027\n{files}\n", user.name);
    assert_eq!(home.text("after"), expected(0));
    assert_eq!(system.operate("p", STOP, &spec).0, 0);
    // The private /tmp of the process has the file of the first hook.
    assert_eq!(home.text("before"), expected(1));
}

#[test]
fn a_before_stop_that_fails_keeps_the_process_running_and_supervised() {
    let system = System::new();
    let mut spec = hooked(&system);
    spec["env"] = json!({"TOKEN": {"value": "hunter2-hunter2", "secret": true}});
    assert_eq!(system.operate("p", START, &spec).0, 0);
    let pid = system.pid("p");
    let expect = |spec: &Value, op: i64, text: &str| {
        let (code, message) = system.operate("p", op, spec);
        assert!(code != 0 && message.contains(text), "{message}");
        assert!(message.contains("the process was not stopped"), "{message}");
        assert_eq!(system.pid("p"), pid);
        until("it is reported", || system.facts("p") == (true, true, true));
    };
    spec["hooks"]["before_stop"] = json!({"run": "echo 3 sessions left, $TOKEN; exit 4"});
    // A stop uses the sent hook, a restart the one of the running process.
    expect(&spec, STOP, "before_stop ended with 4: 3 sessions left, (secret)");
    assert_eq!(system.operate("p", RELOAD, &with_reload(&spec)).0, 0);
    expect(&spec, RESTART, "before_stop ended with 4: 3 sessions left");
    spec["hooks"]["before_stop"] = json!({"run": "echo waiting; sleep 1000", "timeout": 1});
    let begun = Instant::now();
    expect(&spec, STOP, "before_stop timed out after 1 s: waiting");
    assert!(begun.elapsed() < Duration::from_secs(15));
    // It is still supervised.
    kill(pid.expect("a pid"), "KILL");
    until("it is relaunched", || system.pid("p").is_some_and(|new| Some(new) != pid));
    spec["hooks"]["before_stop"] = json!({"run": "echo busy; exit 4", "on_failure": "ignore"});
    let (code, message) = system.operate("p", STOP, &spec);
    assert_eq!((code, message.as_str()), (0, "success; ignored: before_stop ended with 4: busy"));
    assert_eq!(system.pid("p"), None);
}

/// A reload makes the Register fields of a spec those of the running process.
fn with_reload(spec: &Value) -> Value {
    let mut spec = spec.clone();
    spec["control"]["reload_cmd"] = json!("true");
    spec
}

#[test]
fn an_after_start_that_fails_stops_the_process_and_fails_the_start() {
    let system = System::new();
    let mut spec = hooked(&system);
    spec["hooks"]["after_start"] = json!({"run": after("echo no route; exit 5")});
    let (code, message) = system.operate("p", START, &spec);
    assert!(code != 0 && message.starts_with("after_start ended with 5: no route"), "{message}");
    assert!(message.ends_with("; the process was stopped"), "{message}");
    assert_eq!(text(&system, "order"), "start\nterm\n");
    assert_eq!((system.pid("p"), system.facts("p")), (None, (false, false, false)));
    // A failed restart leaves the former spec, which supervision starts again.
    spec["hooks"]["after_start"] = json!({"run": after("true")});
    assert_eq!(system.operate("p", START, &spec).0, 0);
    std::fs::remove_file(system.path("order")).expect("a file");
    spec["hooks"]["after_start"] = json!({"run": after("sleep 1000"), "timeout": 2});
    spec["control"]["start_cmd"] = json!(format!("echo new >> order; {PROCESS}"));
    let (code, message) = system.operate("p", RESTART, &spec);
    assert!(code != 0 && message.contains("after_start timed out after 2 s"), "{message}");
    until("the former one runs", || text(&system, "order") == "drain\nterm\nnew\nstart\nterm\nstart\n");
    until("it is reported", || system.facts("p") == (true, true, true));
    // A process that ends while the hook runs has not started.
    spec["control"]["start_cmd"] = json!("sleep 0.3; exit 9");
    spec["hooks"]["after_start"] = json!({"run": "sleep 1"});
    assert_eq!(system.operate("p", STOP, &spec).0, 0);
    let (code, message) = system.operate("p", START, &spec);
    assert!(code != 0 && message.contains("ended with code 9"), "{message}");
    spec["control"]["start_cmd"] = json!("exec sleep 1000");
    spec["hooks"]["after_start"] = json!({"run": "echo no route; exit 5", "on_failure": "ignore"});
    until("it can be started", || system.pid("p").is_none());
    let (code, message) = system.operate("p", RESTART, &spec);
    assert_eq!((code, message.as_str()), (0, "success; ignored: after_start ended with 5: no route"));
}

#[test]
fn hooks_surround_a_restart_cmd() {
    let system = System::new();
    let mut spec = hooked(&system);
    let pid_file = system.path("run/p.pid").display().to_string();
    let launch =
        format!("echo start >> order; sleep 1000 < /dev/null > /dev/null 2>&1 & echo $! > {pid_file}");
    spec["identity"]["proc_name"] = json!("sleep");
    spec["control"] = json!({"start_mode": "daemon", "start_cmd": launch,
        "restart_cmd": format!("echo restart >> order; kill $ABIDE_PID; {launch}")});
    spec["monitor_policy"]["start_check_secs"] = json!(1);
    assert_eq!(system.operate("p", START, &spec), (0, "success".to_owned()));
    let old = system.pid("p");
    assert_eq!(system.operate("p", RESTART, &spec), (0, "success".to_owned()));
    until("the new one is reported", || system.pid("p").is_some_and(|pid| Some(pid) != old));
    assert_eq!(text(&system, "order"), "start\nready\ndrain\nrestart\nstart\nready\n");
    spec["hooks"]["after_start"] = json!({"run": "exit 5"});
    let (code, message) = system.operate("p", RESTART, &spec);
    assert!(code != 0 && message.contains("after_start ended with 5"), "{message}");
}

/// A hook that an agent did not see end has ended before the operation goes on, and one that ended is not repeated.
#[test]
fn an_agent_that_is_killed_during_a_hook_resumes_the_operation() {
    let slow = |name: &str| format!("echo {name} >> order; sleep 1; echo {name} done >> order");
    for (place, op) in [
        ("unguarded", STOP),
        ("command-begun", STOP),
        ("command-ended", STOP),
        ("hook-ended", STOP),
        ("signalled", STOP),
        ("main-ended", STOP),
        ("done", STOP),
        ("command-begun", RESTART),
        ("hook-ended", RESTART),
        ("down", RESTART),
        ("row-written", RESTART),
        ("done", RESTART),
        ("row-written", START),
        ("command-begun", START),
        ("command-ended", START),
        ("hook-ended", START),
        ("done", START),
    ] {
        let mut system = System::new();
        let mut spec = system.spec("p", PROCESS);
        let here = system.folder.path().display().to_string();
        spec["control"]["start_cmd"] = json!(format!("cd {here}; {PROCESS}"));
        if op != START {
            spec["hooks"] = json!({"before_stop": {"run": slow("drain")}, "after_start": {"run": after("echo ready >> order")}});
            assert_eq!(system.operate("p", START, &spec).0, 0);
        } else {
            spec["hooks"] = json!({"after_start": {"run": after(&slow("ready"))}});
        }
        let row = row_after_death(&mut system, place, op, &spec);
        assert_eq!(row["error_code"], 0, "{place} {op}: {row}\n{}", system.log());
        let expected = match op {
            STOP => "start\nready\ndrain\ndrain done\nterm\n",
            RESTART => "start\nready\ndrain\ndrain done\nterm\nstart\nready\n",
            _ => "start\nready\nready done\n",
        };
        assert_eq!(text(&system, "order"), expected, "{place} {op}\n{}", system.log());
        until("it is reported", || system.facts("p").2 == (op != STOP));
    }
}

/// The row of an operation whose agent died at a failpoint, from the next agent.
fn row_after_death(system: &mut System, place: &str, op: i64, spec: &Value) -> Value {
    system.kill_agent();
    system.start_agent_with(&[], &[("ABIDE_DIE_AT", place)]);
    let task = system.begin("p", op, spec);
    let mut agent = system.agent.take().expect("it runs");
    assert!(!agent.wait().expect("it ends").success(), "it died at {place}");
    system.start_agent();
    system.row("p", &task)
}

/// The failure of a hook is known to the agent that did not run it.
#[test]
fn a_hook_that_failed_while_no_agent_ran_fails_the_operation() {
    for (place, op) in [("command-begun", STOP), ("hook-ended", STOP), ("hook-ended", START)] {
        let mut system = System::new();
        let mut spec = system.spec("p", PROCESS);
        spec["hooks"] = json!({"before_stop": {"run": "sleep 1; exit 7"}});
        if op == STOP {
            assert_eq!(system.operate("p", START, &spec).0, 0);
        } else {
            spec["hooks"] = json!({"after_start": {"run": "sleep 1; exit 7"}});
        }
        let row = row_after_death(&mut system, place, op, &spec);
        let message = row["error_msg"].as_str().unwrap_or_default();
        assert!(
            row["error_code"] != 0
                && message.contains(" ended with 7")
                && message.contains("; the process was"),
            "{place} {op}: {row}"
        );
        until("it is reported", || {
            system.facts("p") == if op == STOP { (true, true, true) } else { (false, false, false) }
        });
    }
}

/// A relaunch by supervision repairs drift.
#[test]
fn a_relaunch_runs_after_start_only_if_the_hook_asks_for_drift() {
    let mut system = System::new();
    let mut spec = hooked(&system);
    assert_eq!(system.operate("p", START, &spec).0, 0);
    kill(system.pid("p").expect("a pid"), "KILL");
    until("it is relaunched", || text(&system, "order") == "start\nready\nstart\n");
    spec["hooks"]["after_start"] = json!({"run": after("echo ready >> order"), "drift": true});
    assert_eq!(system.operate("p", RESTART, &spec).0, 0);
    std::fs::remove_file(system.path("order")).expect("a file");
    kill(system.pid("p").expect("a pid"), "KILL");
    until("the hook has run", || text(&system, "order") == "start\nready\n");
    // An agent that is killed during the hook runs it again after its restart, and not after that.
    spec["hooks"]["after_start"] =
        json!({"run": after("echo begin >> order; sleep 1; echo end >> order"), "drift": true});
    assert_eq!(system.operate("p", RESTART, &spec).0, 0);
    std::fs::remove_file(system.path("order")).expect("a file");
    kill(system.pid("p").expect("a pid"), "KILL");
    until("the hook has begun", || text(&system, "order") == "start\nbegin\n");
    system.kill_agent();
    system.start_agent();
    until("the hook has ended", || text(&system, "order") == "start\nbegin\nend\n");
    until("it is reported", || system.facts("p") == (true, true, true));
    system.kill_agent();
    system.start_agent();
    assert_eq!(system.operate("p", STOP, &spec).0, 0);
    assert_eq!(text(&system, "order"), "start\nbegin\nend\ndrain\nterm\n");
    // A failed hook is a failed relaunch.
    spec["hooks"]["after_start"] = json!({"run": after("test -e good"), "drift": true});
    std::fs::write(system.path("good"), "").expect("a file");
    assert_eq!(system.operate("p", START, &spec).0, 0);
    std::fs::remove_file(system.path("good")).expect("a file");
    let starts = lines(&system.path("order"));
    kill(system.pid("p").expect("a pid"), "KILL");
    until("it is stopped and relaunched", || lines(&system.path("order")) >= starts + 4);
    std::fs::write(system.path("good"), "").expect("a file");
    until("it stays", || system.facts("p") == (true, true, true));
}

#[test]
fn watch_runs_hooks_for_changes_and_for_drift_only_if_they_ask() {
    let machine = Machine::new();
    let declare = |version: &str, drift: bool| {
        let hook = |name: &str| format!("{{run: 'echo {name} >> hooks', drift: {drift}}}");
        let hooks = format!("{{before_stop: {}, after_start: {}}}", hook("drain"), hook("ready"));
        let manifest = machine
            .manifest("a")
            .control("start_mode", "foreground")
            .start_cmd(&format!("echo start {version} >> effects; exec sleep 1000"))
            .spec("hooks", &hooks);
        machine.declare("a", manifest);
    };
    let hooks = || std::fs::read_to_string(machine.path("hooks")).unwrap_or_default();
    declare("1", false);
    let _watch = watch::watch(&machine, "watch.log", &["--interval", "1h"]);
    until("the hook ran", || hooks() == "ready\n");
    until("it has converged", || watch::read_log(&machine, "watch.log").contains("converged: 1 instance"));
    let first = machine.pids()["a"];
    watch::stop_directly(&machine, "a");
    until("it is repaired", || machine.pids().get("a").is_some_and(|pid| *pid != first));
    // The stop was no operation of watch: its hook ran. The repair ran none.
    assert_eq!(hooks(), "ready\ndrain\n");
    let converged = |times: usize| {
        until("it has converged again", || {
            watch::read_log(&machine, "watch.log").matches("converged: 1 instance").count() >= times
        });
    };
    converged(2);
    let second = machine.pids()["a"];
    declare("2", true);
    until("the change is applied", || machine.pids().get("a").is_some_and(|pid| *pid != second));
    until("the hooks ran", || hooks() == "ready\ndrain\ndrain\nready\n");
    converged(3);
    watch::stop_directly(&machine, "a");
    until("the hooks ran for the repair", || hooks() == "ready\ndrain\ndrain\nready\ndrain\nready\n");
}

#[test]
fn an_apply_shows_a_failure_that_its_hook_ignores() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let hooks = "  hooks: {before_stop: {run: 'echo busy; exit 4', on_failure: ignore}}\n";
    machine.declare("a", machine.manifest_text("a") + hooks);
    let (code, out, err) = machine.apply(&[]);
    assert!(code == 0 && !out.contains("ignored"), "{out} {err}");
    machine.edit("a", "start a 1", "start a 2");
    let (code, out, err) = machine.apply(&[]);
    assert!(code == 0 && out.contains("    ignored: before_stop ended with 4: busy\n"), "{code} {out} {err}");
    machine.edit("a", "start a 2", "start a 3");
    let (code, out, err) = machine.apply(&["-o", "json"]);
    let report: Value = serde_json::from_str(&out).expect("JSON");
    let outcome = &report["outcomes"][0];
    assert_eq!((code, &outcome["outcome"]), (0, &"Done".into()), "{err}");
    assert_eq!(outcome["message"], "ignored: before_stop ended with 4: busy");
}
