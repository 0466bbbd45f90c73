//! Manual operations on targets with few facts: the right processes, their owners, and the recorded holds.

use abide::store::{Embedded, Store, Txn};
use serde_json::Value;

use crate::dialects::{Daemon, Fleet};
use crate::fixtures::machine::Machine;
use crate::support::{keys, until};
use crate::system::is_alive;

fn sorted(fleet: &Fleet) -> Vec<String> {
    let mut effects = fleet.effects();
    effects.sort();
    effects
}

/// Some dialects take one process a call: each of them is meant, and no other.
#[test]
fn an_operation_on_several_processes_runs_on_each() {
    for dialect in ["gse-v1", "gse-v2"] {
        let fleet = Fleet::new(dialect);
        ["x", "y", "z"].iter().for_each(|name| fleet.write(&Daemon::new(name)));
        fleet.well("three", &[]);
        let third = fleet.pid("z").expect("a pid");
        let (code, out, err) = fleet.run(&["stop", "web/x", "web/y"]);
        assert!(code == 0 && out.contains("2 of 2"), "{dialect}: {code} {out}{err}");
        let expected = ["start x 1", "start y 1", "start z 1", "stop x", "stop y"];
        assert_eq!(sorted(&fleet), expected, "{dialect}");
        assert_eq!((fleet.pid("x"), fleet.pid("y"), fleet.pid("z")), (None, None, Some(third)), "{dialect}");
        // What was done is known: nothing has to be found out.
        assert_eq!(fleet.run(&["start", "web/x", "web/y"]).0, 0, "{dialect}");
        assert_eq!(fleet.run(&["release", "web/x", "web/y"]).0, 0, "{dialect}");
        let (code, out, err) = fleet.apply(&[]);
        assert!(code == 0 && out.contains("Nothing to do"), "{dialect}: {code} {out}{err}");
    }
}

#[test]
fn an_unowned_process_stays_unowned() {
    for dialect in ["abide", "gse-v1"] {
        let fleet = Fleet::new(dialect);
        // Such a platform is observed only for recorded instances.
        fleet.write(&Daemon::new("ours"));
        fleet.well("something", &[]);
        let mut spec = fleet.system.spec("foreign", "exec sleep 1000");
        spec["control"]["restart_cmd"] = "exec sleep 1000".into();
        assert_eq!(fleet.system.operate("foreign", 0, &spec).0, 0);
        let before = fleet.pid("foreign").expect("a pid");
        assert_eq!(fleet.row("foreign")["owner"], Value::Null);
        let (code, out, err) = fleet.run(&["restart", "web/foreign"]);
        assert_eq!(code, 0, "{dialect}: {out}{err}");
        assert_ne!(fleet.pid("foreign"), Some(before), "{dialect}");
        assert_eq!(fleet.row("foreign")["owner"], Value::Null, "{dialect}");
        // Nor does anybody take it for his own afterwards.
        let (code, out, err) = fleet.apply(&["--prune"]);
        assert!(code == 0 && out.contains("Nothing to do"), "{dialect}: {code} {out}{err}");
    }
}

/// JOB has no lists: what does not run is known from the ledger alone.
#[test]
fn a_stopped_process_can_be_started_on_a_target_without_lists() {
    let fleet = Fleet::new("job");
    fleet.write(&Daemon::new("x"));
    fleet.well("one", &[]);
    for verb in ["stop", "start"] {
        let (code, out, err) = fleet.run(&[verb, "web/x"]);
        assert_eq!(code, 0, "{verb}: {out}{err}");
    }
    assert_eq!(fleet.effects(), ["start x 1", "stop x", "start x 1"]);
    assert!(fleet.pid("x").is_some_and(is_alive));
    assert_eq!(fleet.run(&["release", "web/x"]).0, 0);
    let (code, out, err) = fleet.apply(&[]);
    assert!(code == 0 && out.contains("Nothing to do"), "{code} {out}{err}");
    let (code, _, err) = fleet.run(&["start", "web/none"]);
    assert!(code == 64 && err.contains("has no process web/none"), "{code} {err}");
}

/// Supervision would launch it later: after the wait between two tries, or at the next time of its schedule.
#[test]
fn a_stop_ends_the_supervision_of_a_process_that_waits() {
    let machine = Machine::new();
    let crashes = machine
        .manifest("crashes")
        .control("start_mode", "foreground")
        .start_cmd("echo up >> starts; while [ ! -e go ]; do sleep 0.05; done; exit 1")
        .monitor("start_interval", 3600);
    machine.declare("crashes", crashes);
    machine.declare(
        "daily",
        format!(
            "kind: Process\nmeta: {{namespace: web, name: daily}}\nhosts: [127.0.0.1]\nrun: \"true\"\ndir: {}\nschedule: \"0 3 * * *\"\n",
            machine.path("").display()
        ),
    );
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 0, "{out}{err}");
    // It crashes, is launched again at once, and crashes again.
    std::fs::write(machine.path("go"), "").expect("a file");
    let row = |name: &str| {
        let rows: Value =
            serde_json::from_str(&machine.run(&["get", "processes", "-o", "json"]).1).expect("JSON");
        let rows = rows.as_array().expect("rows").clone();
        rows.into_iter().find(|row| row["name"] == name).unwrap_or_default()
    };
    until("both wait", || row("crashes")["next"].is_string() && row("daily")["next"].is_string());
    let starts = crate::system::lines(&machine.path("starts"));
    let (code, out, err) = machine.run(&["stop", "web/crashes", "web/daily"]);
    assert!(code == 0 && out.contains("2 of 2 instances; held"), "{code} {out}{err}");
    assert_eq!(err.matches("process is not running; it is not supervised any more").count(), 2, "{err}");
    for name in ["crashes", "daily"] {
        until("the wait is over", || row(name)["hosted"] == false && row(name)["next"].is_null());
    }
    assert_eq!(crate::system::lines(&machine.path("starts")), starts, "nothing was launched");
    // The end of the hold ends the stop.
    assert_eq!(machine.run(&["release", "web/daily"]).0, 0);
    let (_, out, err) = machine.apply(&[]);
    assert!(row("daily")["hosted"] == true, "{out}{err}");
}

/// A one-shot that may have run is held until a person starts it.
#[test]
fn a_run_with_unknown_outcome_is_resolved_manually() {
    let fleet = Fleet::new("job");
    fleet.once("once", "echo start once >> effects");
    fleet.well("it runs", &[]);
    // The state after a run that died with its start in flight.
    tokio::runtime::Runtime::new().expect("a runtime").block_on(async {
        let store = Embedded::open_keyed(&fleet.path(".abide-home/state/state.db"), &keys(&fleet.path(".")))
            .expect("a store");
        let all = store.range("at/it/ledger/", None, 10).await.expect("entries").entries;
        let mut entry: Value = serde_json::from_slice(&all[0].value).expect("an entry");
        entry["ran"] = Value::Null;
        entry["sent"] = entry["given"].clone();
        entry["unsure"] = true.into();
        entry["once"] = true.into();
        store.txn(Txn::put(&*all[0].key, entry.to_string())).await.expect("it is written");
    });
    let (_, out, err) = fleet.run(&["plan", "m", "--owner", "team", "-o", "json"]);
    assert!(out.contains("RunUnknown"), "{out}{err}");
    fleet.apply(&[]);
    assert_eq!(fleet.effects(), ["start once"]);
    let (code, out, err) = fleet.run(&["start", "web/once"]);
    assert_eq!((code, fleet.effects().len()), (0, 2), "{out}{err}");
    assert_eq!(fleet.run(&["release", "web/once"]).0, 0);
    let (code, out, err) = fleet.apply(&[]);
    assert!(code == 0 && out.contains("Nothing to do") && !out.contains("held"), "{code} {out}{err}");
    assert_eq!(fleet.effects().len(), 2);
}

#[test]
fn an_exported_host_keeps_all_its_fields() {
    let fleet = Fleet::new("gse-v1");
    fleet.write(&Daemon::new("x"));
    let file = fleet.path("m/x.yaml");
    let text = std::fs::read_to_string(&file).expect("a file");
    std::fs::write(&file, text.replace("bk_cloud_id: 0}", "bk_cloud_id: 0, bk_supplier_id: 3}"))
        .expect("a file");
    fleet.well("one", &[]);
    let (code, out, err) = fleet.run(&["export"]);
    assert!(code == 0 && out.contains("bk_supplier_id: 3"), "{code} {out}{err}");
}

/// A restart and a reload change nothing that a controller would undo.
#[test]
fn only_operations_that_a_controller_would_undo_leave_a_hold() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    assert_eq!(machine.apply(&[]).0, 0);
    let holds = || machine.run(&["get", "holds", "-o", "json"]).1;
    for verb in ["restart", "reload"] {
        let (code, out, err) = machine.run(&[verb, "web/a"]);
        assert!(
            code == 0 && out.contains("1 of 1 instance") && !out.contains("held"),
            "{verb}: {code} {out}{err}"
        );
        assert_eq!(holds().trim(), "[]", "{verb}");
        let (code, _, err) = machine.run(&[verb, "web/a", "--until", "1h"]);
        assert!(code == 0 && err.contains("leaves no hold"), "{verb}: {code} {err}");
    }
    for verb in ["stop", "start", "kill"] {
        let (code, out, err) = machine.run(&[verb, "web/a", "--until", "1h"]);
        assert!(code == 0 && out.contains("`abide release web/a`"), "{verb}: {code} {out}{err}");
        assert!(holds().contains(&format!("manual {verb}")), "{verb}: {}", holds());
    }
}
