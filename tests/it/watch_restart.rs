//! Restarts of `watch`: its switches, suspended instances, history and target survive.

use std::fs;

use serde_json::Value;

use crate::apply::Machine;
use crate::controller_api::{address, get};
use crate::support::until;
use crate::system::kill;
use crate::watch::{read_log, running, stop_directly, watch};

/// Follow and heal are two things.
#[test]
fn heal_no_applies_changes_only() {
    let machine = Machine::new();
    ["a", "b"].iter().for_each(|name| machine.process(name, "1", ""));
    let args = ["--heal", "no", "--interval", "1h"];
    let first = watch(&machine, "first", &args);
    until("it is logged", || read_log(&machine, "first").contains("converged: 2 instances as wanted"));
    stop_directly(&machine, "a");
    until("it is left alone, and why", || read_log(&machine, "first").contains("HealOff 0:127.0.0.1:web:a"));
    machine.process("b", "2", "");
    let mut effects = vec!["start a 1", "start b 1", "start b 2", "stop a", "stop b"];
    until("b follows", || machine.effects() == effects);
    until("it rests", || read_log(&machine, "first").contains("idle: 1 instance as wanted, 1 held"));
    drop(first);
    // The next one does not take what it finds for something new, either.
    let _second = watch(&machine, "second", &args);
    until("it is left alone", || read_log(&machine, "second").contains("HealOff 0:127.0.0.1:web:a"));
    machine.process("c", "1", "");
    effects.insert(3, "start c 1");
    until("c follows", || machine.effects() == effects);
}

/// A change that is reverted before it was applied everywhere is not drift.
#[test]
fn heal_no_applies_a_revert() {
    let machine = Machine::new();
    machine.several("many", "1");
    let file = machine.path("m/many.yaml");
    let _watch = watch(&machine, "watch.log", &["--heal", "no", "--interval", "1h"]);
    until("it is logged", || read_log(&machine, "watch.log").contains("converged: 2 instances as wanted"));
    let good = fs::read_to_string(&file).expect("a file");
    let bad = good.replace("start many 1", "start many 2").replace("batch: 1", "batch: 1, soak: 1h");
    fs::write(&file, bad).expect("a file");
    until("the first is changed", || machine.effects().contains(&"start many 2".to_owned()));
    until("it waits", || read_log(&machine, "watch.log").contains("soaking for"));
    fs::write(&file, good).expect("a file");
    let again = || machine.effects().iter().filter(|line| *line == "start many 1").count();
    until("it is as it was", || again() == 3);
}

/// Two plans at once have one budget.
#[test]
fn in_flight_steps_count_towards_the_budget() {
    let machine = Machine::new();
    ["a", "b"].iter().for_each(|name| machine.process(name, "1", ""));
    let _watch = watch(&machine, "watch.log", &["--max-restart", "1", "--interval", "1h"]);
    until("it is logged", || read_log(&machine, "watch.log").contains("converged: 2 instances as wanted"));
    machine.process("a", "2", "");
    machine.edit("a", "start_check_secs: 0", "start_check_secs: 300");
    until("it is begun", || machine.effects().contains(&"start a 2".to_owned()));
    machine.process("b", "2", "");
    until("it is held", || {
        read_log(&machine, "watch.log").contains("1 restart planned, 1 in flight, at most 1 allowed")
    });
    assert!(!machine.effects().contains(&"start b 2".to_owned()));
}

/// A new name for what is just being started waits until that is over.
#[test]
fn an_instance_in_flight_is_not_renamed() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let file = machine.path("m/a.yaml");
    let text = fs::read_to_string(&file).expect("a file");
    let text = text.replace("start_check_secs: 0", "start_check_secs: 300");
    fs::write(&file, &text).expect("a file");
    let _watch = watch(&machine, "watch.log", &["--interval", "1h"]);
    until("it is begun", || machine.effects() == ["start a 1"]);
    let renamed = format!("moved_from: web/a\n{}", text.replace("name: a}", "name: b}"));
    fs::write(&file, renamed).expect("a file");
    let held = || {
        let status = get(address(&machine, "watch.log"), "/api/v1/status").json();
        let all = status["held"].as_array().cloned().unwrap_or_default();
        all.iter().any(|one| one["instance"] == "0:127.0.0.1:web:b" && one["reason"] == "UnderWay")
    };
    until("it is left alone", held);
    assert_eq!(machine.effects(), ["start a 1"]);
}

/// Who neither follows nor heals does nothing at all.
#[test]
fn heal_no_and_follow_no_only_observe() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let first = watch(&machine, "first", &["--interval", "1h"]);
    until("it is logged", || read_log(&machine, "first").contains("converged: 1 instance as wanted"));
    drop(first);
    stop_directly(&machine, "a");
    machine.process("a", "2", "");
    let _second = watch(&machine, "second", &["--heal", "no", "--follow", "no", "--interval", "1h"]);
    until("it is left alone, and why", || read_log(&machine, "second").contains("HealOff 0:127.0.0.1:web:a"));
    until("it is logged", || read_log(&machine, "second").contains("not followed"));
    assert_eq!(machine.effects(), ["start a 1", "stop a"]);
}

#[test]
fn follow_no_is_reported() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let _watch = watch(&machine, "watch.log", &["--follow", "no", "--interval", "1h"]);
    until("it is logged", || read_log(&machine, "watch.log").contains("FollowOff 0:127.0.0.1:web:a"));
    let status = get(address(&machine, "watch.log"), "/api/v1/status").json();
    assert!(
        status["source"]["not_followed"].as_str().is_some_and(|why| why.starts_with("FollowOff")),
        "{status}"
    );
    assert!(machine.effects().is_empty());
}

/// A rollout that failed is not tried again for what others ask for, nor by the next one; and others know of it.
#[test]
fn a_rolled_back_process_waits_for_a_manifest_change() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let file = machine.path("m/a.yaml");
    let good = fs::read_to_string(&file).expect("a file");
    let good = format!("rollout: {{batch: 1, soak: 1s, max_failures: 0, auto_rollback: true}}\n{good}");
    fs::write(&file, &good).expect("a file");
    let first = watch(&machine, "first", &["--interval", "1h"]);
    until("it is logged", || read_log(&machine, "first").contains("converged: 1 instance as wanted"));
    let bad = good.replace("start a 1 >> effects; exec sleep 1000", "start a 2 >> effects; exit 3");
    let bad = bad.replace("start_check_secs: 0", "start_check_secs: 1, start_interval: 1, start_retries: 1");
    fs::write(&file, &bad).expect("a file");
    until("it is put back", || read_log(&machine, "first").contains("RolledBack 0:127.0.0.1:web:a"));
    until("it runs", || running(&machine, &["a"]));
    let tries = || machine.effects().iter().filter(|line| *line == "start a 2").count();
    let before = tries();
    machine.process("b", "1", "");
    until("b runs", || running(&machine, &["b"]));
    drop(first);
    let holds = machine.run(&["get", "holds"]).1;
    assert!(holds.contains("RolledBack") && holds.contains("watch"), "{holds}");
    assert_eq!(machine.run(&["status", "--check"]).0, 3, "it is not as wanted");
    let described = machine.run(&["describe", "web/a", "-o", "json"]).1;
    assert!(described.contains("RolledBack"), "{described}");
    let _second = watch(&machine, "second", &["--interval", "1h"]);
    until("it is left alone", || read_log(&machine, "second").contains("RolledBack 0:127.0.0.1:web:a"));
    machine.process("c", "1", "");
    until("c runs", || running(&machine, &["c"]));
    assert_eq!(tries(), before);
    fs::write(&file, good.replace("start a 1", "start a 3")).expect("a file");
    until("its own change is taken", || machine.effects().contains(&"start a 3".to_owned()));
    until("nothing is left", || !machine.run(&["get", "holds"]).1.contains("RolledBack"));
}

/// Steps in flight at a kill are in the history.
#[test]
fn a_killed_run_is_in_the_history() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    machine.edit("a", "start_check_secs: 0", "start_check_secs: 300");
    let mut watch = watch(&machine, "watch.log", &["--interval", "1h"]);
    until("it is begun", || machine.effects() == ["start a 1"]);
    let history =
        || -> Vec<Value> { serde_json::from_str(&machine.run(&["history", "-o", "json"]).1).expect("JSON") };
    until("it is written down", || history().len() == 1);
    watch.0.kill().expect("it is killed");
    let entry = &history()[0];
    assert!(entry["exit"].is_null() && entry["summary"]["start"] == 1, "{entry}");
    assert_eq!(entry["steps"][0]["outcome"], "Unknown");
    assert!(machine.run(&["history"]).1.contains("in flight, or interrupted"));
}

/// Entries of `apply` and `watch` have the same fields in their summaries, with zero where nothing was done.
#[test]
fn history_summaries_have_one_shape() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    assert_eq!(machine.apply(&[]).0, 0);
    let (code, _, err) = machine.run(&["stop", "web/a"]);
    assert_eq!(code, 0, "{err}");
    machine.process("b", "1", "");
    let _watch = watch(&machine, "watch.log", &["--interval", "1h"]);
    until("b runs", || running(&machine, &["b"]));
    let history =
        || -> Vec<Value> { serde_json::from_str(&machine.run(&["history", "-o", "json"]).1).expect("JSON") };
    until("the run has ended", || {
        history().iter().any(|entry| entry["source"] == "watch" && entry["exit"] == 0)
    });
    let summary = |source: &str| {
        let entry = history().into_iter().find(|entry| entry["source"] == source).expect("an entry");
        entry["summary"].as_object().expect("a summary").clone()
    };
    let (by_apply, by_watch) = (summary("m"), summary("watch"));
    assert!(by_apply.keys().eq(by_watch.keys()), "{by_apply:?} {by_watch:?}");
    let numbers = |of: &serde_json::Map<String, Value>| {
        ["start", "stop", "instances", "held", "unknown"].map(|name| of[name].as_u64().expect("a number"))
    };
    assert_eq!((numbers(&by_apply), numbers(&by_watch)), ([1, 0, 1, 0, 0], [1, 0, 1, 1, 0]));
}

/// The local system ends and another one starts at another address: a watch continues there.
#[test]
fn a_dead_local_system_is_restarted() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let _watch = watch(&machine, "watch.log", &["--interval", "1h"]);
    until("a runs", || running(&machine, &["a"]));
    let lock = || fs::read_to_string(machine.path(".abide-home/system.lock")).expect("a lock");
    // The file is empty for a moment when a new system writes it.
    let serving = || lock().trim().parse::<u32>().ok();
    kill(serving().expect("a process"), "KILL");
    machine.process("b", "1", "");
    until("it is begun again", || running(&machine, &["a", "b"]));
    // One in the foreground takes over.
    let up = machine.start(&["up", "--listen", "127.0.0.1:0"], "up.log");
    until("it serves", || serving() == Some(up.0.id()));
    machine.process("c", "1", "");
    until("it is followed there", || running(&machine, &["a", "b", "c"]));
    // And is not taken over by the next.
    let (code, _, err) = machine.run(&["up", "--listen", "127.0.0.1:0"]);
    assert!(code == 1 && err.contains("is already running as process"), "{code} {err}");
    assert_eq!(machine.effects(), ["start a 1", "start b 1", "start c 1"]);
}

/// Each operation is logged with the line of the field that caused it.
#[test]
fn a_change_is_reported_with_its_source_line() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let _watch = watch(&machine, "watch.log", &["--interval", "1h"]);
    until("it is logged", || read_log(&machine, "watch.log").contains("converged: 1 instance as wanted"));
    machine.process("a", "2", "");
    let text = fs::read_to_string(machine.path("m/a.yaml")).expect("a file");
    let line = text.lines().position(|line| line.contains("start_cmd:")).expect("a line") + 1;
    until("it is logged", || read_log(&machine, "watch.log").contains(&format!("m/a.yaml:{line}:")));
    // Defaults are written elsewhere.
    fs::write(machine.path("m/d.yaml"), "apiVersion: abide/v1\nkind: Defaults\nspec:\n  env: {A: \"1\"}\n")
        .expect("a file");
    until("it is logged", || read_log(&machine, "watch.log").contains("m/d.yaml:4:"));
}
