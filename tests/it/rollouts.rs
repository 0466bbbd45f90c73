//! Rollouts of real processes: the state after a failed rollout, and the reason in every output.

use serde_json::Value;

use crate::fixtures::machine::Machine;
use crate::support::until;
use crate::watch::{read_log, watch};

const FAILING: &str = "{cmd: 'echo no database; false', interval: 1, start_period: 1, retries: 1}";
const REASON: &str = "ended with 1: no database";

/// A process with instances that a rollout changes one after the other.
pub fn version(machine: &Machine, instances: usize, start: &str, health: &str) {
    let manifest = machine
        .manifest("web")
        .field("instances", &instances.to_string())
        .field("rollout", "{canary: 1, batch: 1, auto_rollback: true}")
        .identity("pid_path", machine.path("run/${name}.pid").display())
        .identity("value_key", "${name}")
        .control("start_mode", "foreground")
        .start_cmd(&format!("echo {start} >> effects; exec sleep 1000"))
        .spec("health", health);
    machine.declare("web", manifest);
}

fn history(machine: &Machine) -> Vec<Value> {
    serde_json::from_str(&machine.run(&["history", "-o", "json"]).1).expect("entries")
}

/// A failed canary of a first deployment is removed, and the reason is the output of its probe.
#[test]
fn a_failed_first_rollout_leaves_nothing_behind() {
    let machine = Machine::new();
    version(&machine, 3, "1", FAILING);
    let (code, out, err) = machine.apply(&["--junit", "report.xml"]);
    assert_eq!(code, 7, "{out} {err}");
    assert!(out.contains("rolled back web/web") && out.contains(REASON), "{out}");
    assert!(err.contains("rolling back web/web") && err.contains(REASON), "{err}");
    assert!(machine.rows().is_empty(), "{:?}", machine.rows());
    assert_eq!(machine.effects(), ["1"], "the canary only");
    let junit = std::fs::read_to_string(machine.path("report.xml")).expect("a report");
    assert!(junit.contains("<failure") && junit.contains(REASON), "{junit}");
    assert!(junit.contains("name=\"roll back: stop 0:127.0.0.1:web:web_1\""), "{junit}");
    let entry = &history(&machine)[0];
    assert_eq!(entry["exit"], 7, "{entry}");
    assert!(entry["steps"][0]["message"].as_str().is_some_and(|text| text.contains(REASON)), "{entry}");
    assert!(machine.run(&["history"]).1.contains(REASON));
    // The same again, for programs.
    let (code, out, err) = machine.apply(&["-o", "json"]);
    let report: Value = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out} {err}"));
    assert_eq!((code, &report["exit"]["code"]), (7, &7.into()), "{report}");
    assert_eq!(report["rolled_back"][0]["process"], "web/web", "{report}");
    let why = report["rolled_back"][0]["why"].as_str().expect("a reason");
    assert!(why.starts_with("0:127.0.0.1:web:web_1: ") && why.contains(REASON), "{why}");
    // A good version starts all of them.
    version(&machine, 3, "2", "{cmd: 'true'}");
    let (code, out, err) = machine.apply(&[]);
    assert_eq!((code, machine.pids().len()), (0, 3), "{out} {err}");
}

/// Instances that a larger version adds are removed; the others run as before.
#[test]
fn a_rollback_removes_only_new_instances() {
    let machine = Machine::new();
    version(&machine, 1, "1", "{cmd: 'true'}");
    assert_eq!(machine.apply(&[]).0, 0);
    version(&machine, 3, "2", "{cmd: 'echo no database; false', interval: 1, start_period: 1, retries: 1}");
    // The first two are changed before the rollout ends.
    machine.edit("web", "canary: 1, batch: 1", "canary: 2, batch: 1");
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 7, "{out} {err}");
    let rows = machine.rows();
    assert_eq!(rows.keys().collect::<Vec<_>>(), ["web_1"], "{rows:?}");
    assert_eq!((&rows["web_1"]["running"], &rows["web_1"]["health"]), (&true.into(), &"Healthy".into()));
    until("the old version", || machine.effects().iter().filter(|line| *line == "1").count() == 2);
}

/// A stopped process is stopped again, with its old spec.
#[test]
fn a_rollback_restores_a_stopped_process() {
    let machine = Machine::new();
    version(&machine, 2, "1", "{cmd: 'true'}");
    machine.edit("web", "rollout:", "state: stopped\nrollout:");
    assert_eq!(machine.apply(&[]).0, 0);
    let before = machine.rows();
    assert!(before.len() == 2 && before["web_1"]["running"] == false, "{before:?}");
    version(&machine, 2, "2", FAILING);
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 7, "{out} {err}");
    for (name, row) in machine.rows() {
        for field in ["registered", "running", "hosted", "revision"] {
            assert_eq!(row[field], before[&name][field], "{name} {field}");
        }
    }
}

/// `watch` removes a failed canary as well, and keeps the reason with the suspension.
#[test]
fn watch_rolls_a_first_rollout_back() {
    let machine = Machine::new();
    version(&machine, 2, "1", FAILING);
    let _watch = watch(&machine, "watch.log", &["--interval", "1h"]);
    until("the rollback", || read_log(&machine, "watch.log").contains("RolledBack 0:127.0.0.1:web:web_1"));
    let log = read_log(&machine, "watch.log");
    assert!(log.contains("rolled back web/web") && log.contains(REASON), "{log}");
    until("nothing runs", || machine.rows().is_empty());
    assert!(machine.run(&["get", "holds"]).1.contains("RolledBack"));
    assert!(machine.run(&["history"]).1.contains(REASON));
    assert_eq!(history(&machine)[0]["exit"], 7);
    version(&machine, 2, "2", "{cmd: 'true'}");
    until("the next version runs", || machine.pids().len() == 2);
    assert_eq!(machine.effects().iter().filter(|line| *line == "1").count(), 1);
}
