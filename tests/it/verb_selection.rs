//! Names and selections of verbs: a declared name means all of its instances, and an unknown one is an error where something
//! would change.

use serde_json::Value;

use crate::dialects::{Daemon, Fleet};
use crate::fixtures::machine::Machine;
use crate::support::until;
use crate::system::is_alive;

/// Three instances of `web/w`, and a process of its own.
fn fleet() -> Machine {
    let machine = Machine::new();
    machine.several("w", "1");
    machine.edit("w", "instances: 2", "instances: 3");
    machine.process("other", "1", "");
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 0, "{out} {err}");
    machine
}

fn running(machine: &Machine) -> Vec<String> {
    machine.pids().into_keys().collect()
}

#[test]
fn a_declared_name_means_all_of_its_instances() {
    let machine = fleet();
    let (code, out, err) = machine.run(&["stop", "web/w"]);
    assert!(code == 0 && out.contains("3 of 3 instances"), "{code} {out} {err}");
    assert_eq!(running(&machine), ["other"]);
    let holds = |args: &[&str]| {
        let (_, out, _) = machine.run(&[&["get", "holds", "-o", "json"], args].concat());
        serde_json::from_str::<Vec<Value>>(&out).expect("holds").len()
    };
    assert_eq!((holds(&[]), holds(&["--include", "web/w"]), holds(&["--exclude", "web/w"])), (3, 3, 0));
    // One of them by its own name, and on a host.
    assert_eq!(machine.run(&["start", "web/w_2@127.0.0.1"]).0, 0);
    assert_eq!(running(&machine), ["other", "w_2"]);
    let (code, out, err) = machine.run(&["release", "web/w"]);
    assert!(code == 0 && out.contains("3 holds"), "{code} {out} {err}");
    let (code, out, _) = machine.run(&["release", "web/w"]);
    assert!(code == 0 && out.contains("0 holds"), "nothing is held: {code} {out}");
    assert_eq!(machine.run(&["start", "web/w@0:127.*"]).0, 0);
    assert_eq!(running(&machine), ["other", "w_1", "w_2", "w_3"]);
    let (code, out, err) = machine.run(&["describe", "web/w", "-o", "json"]);
    let rows: Vec<Value> = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out} {err}"));
    assert_eq!((code, rows.len()), (0, 3));
    for (args, count) in
        [(&["--include", "web/w"], 3), (&["--exclude", "web/w"], 1), (&["--host", "10.*"], 0)]
    {
        let (_, out, _) = machine.run(&[&["get", "processes", "-o", "name"], &args[..]].concat());
        assert_eq!(out.lines().filter(|line| line.contains(":web:")).count(), count, "{args:?}: {out}");
        let (code, out, err) = machine.run(&[&["status", "-o", "json"], &args[..]].concat());
        let status: Value = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out} {err}"));
        assert_eq!((code, &status["processes"]), (0, &count.into()), "{args:?}");
    }
    let (code, out, err) = machine.run(&["logs", "--include", "web/w"]);
    assert_eq!((code, out.as_str()), (0, ""), "{err}");
    let (_, out, _) = machine.run(&["export", "--include", "web/w"]);
    assert_eq!(out.matches("kind: Process").count(), 3, "{out}");
}

/// Verbs that change something refuse an unknown name; reading verbs report it.
#[test]
fn an_unknown_name_is_an_error_where_something_changes() {
    let machine = fleet();
    for verb in ["start", "stop", "restart", "reload", "kill", "release"] {
        let (code, _, err) = machine.run(&[verb, "web/othr"]);
        assert!(code == 64 && err.contains("did you mean web/other?"), "{verb}: {code} {err}");
        let (code, _, err) = machine.run(&[verb, "web/other", "web/none@10.0.0.1"]);
        assert_eq!(code, 64, "{verb}: {err}");
    }
    let (code, _, err) = machine.run(&["stop", "-l", "tier=none"]);
    assert!(code == 64 && err.contains("no instance matches"), "{code} {err}");
    let (code, _, err) = machine.run(&["unprotect", "web/othr", "--reason", "x"]);
    assert_eq!(code, 64, "{err}");
    assert_eq!(running(&machine).len(), 4, "nothing happened");
    for args in [&["describe", "web/none"][..], &["logs", "web/none"], &["describe", "-l", "tier=none"]] {
        let (code, _, err) = machine.run(args);
        assert!(code == 0 && err.contains("has no process"), "{args:?}: {code} {err}");
    }
    // Also of an apply: a typing error must not look like success.
    for (args, part) in [
        (&["--include", "web/othr"][..], "did you mean web/other?"),
        (&["--include", "web/other", "--include", "web/none"], "has no process web/none"),
        (&["-l", "tier=none"], "no instance matches"),
        (&["-n", "nowhere"], "no instance matches"),
        (&["--host", "10.9.9.9"], "no instance matches"),
    ] {
        let (code, out, err) = machine.apply(args);
        assert!(code == 64 && err.contains(part), "{args:?}: {code} {out} {err}");
        let (code, out, err) = machine.run(&[&["plan", "m"], args].concat());
        assert_eq!(code, 0, "{args:?}: {out} {err}");
    }
    // A declared process that does not exist yet has a known name.
    machine.process("new", "1", "");
    machine.edit("new", "start_cmd: \"echo start new 1", "start_cmd: \"exit 3; echo start new 1");
    assert_eq!(machine.apply(&[]).0, 3);
    let (code, _, err) = machine.run(&["stop", "web/new"]);
    assert!(code == 1 && err.contains("does not exist yet"), "{code} {err}");
}

#[test]
fn an_empty_directory_is_refused() {
    let machine = Machine::new();
    std::fs::create_dir(machine.path("empty")).expect("a folder");
    let (code, out, err) = machine.run(&["apply", "empty", "--yes", "-o", "json"]);
    assert!(code == 4 && out.contains("EmptySet"), "{code} {out} {err}");
    let (code, _, err) = machine.run(&["plan", "empty"]);
    assert_eq!(code, 0, "{err}");
}

/// A protection outlasts its file, until a person or a manifest ends it.
#[test]
fn a_protection_outlasts_its_manifest() {
    let machine = Machine::new();
    for name in ["a", "b"] {
        machine.process(name, "1", "");
    }
    let text = machine.manifest_text("a");
    machine.declare("a", format!("protect: [delete]\n{text}"));
    assert_eq!(machine.apply(&[]).0, 0);
    let pids = machine.pids();
    std::fs::remove_file(machine.path("m/a.yaml")).expect("a file");
    let (code, out, err) = machine.apply(&["--prune", "-o", "json"]);
    let report: Value = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out} {err}"));
    assert_eq!((code, &report["plan"]["held"][0]["reason"]), (3, &"Protected".into()), "{report}");
    assert_eq!(machine.pids(), pids);
    let (code, out, err) = machine.run(&["unprotect", "web/a", "--reason", "moved to another fleet"]);
    assert!(code == 0 && out.contains("1 instance"), "{code} {out} {err}");
    assert!(machine.run(&["history"]).1.contains("moved to another fleet"));
    let (code, out, err) = machine.apply(&["--prune"]);
    assert_eq!(code, 0, "{out} {err}");
    assert_eq!(running(&machine), ["b"]);
}

/// `protect` is outside of the spec: adding it needs no step.
#[test]
fn a_protection_that_is_added_or_removed_without_a_step_is_recorded() {
    let machine = Machine::new();
    ["a", "b"].iter().for_each(|name| machine.process(name, "1", ""));
    assert_eq!(machine.apply(&[]).0, 0);
    let (pids, text) = (machine.pids(), machine.manifest_text("a"));
    machine.declare("a", format!("protect: [delete]\n{text}"));
    let (code, out, _) = machine.apply(&[]);
    assert!(code == 0 && out.contains("Nothing to do"), "{code} {out}");
    // Another owner declares the same process: it is held, and so is its protection.
    machine.declare("a", text.clone());
    let (code, out, _) = machine.apply(&["--owner", "other", "-o", "json"]);
    assert!(code == 3 && out.contains("NotOwned"), "{code} {out}");
    std::fs::remove_file(machine.path("m/a.yaml")).expect("a file");
    let (code, out, _) = machine.apply(&["--prune"]);
    assert!(code == 3 && out.contains("Protected"), "{code} {out}");
    assert_eq!(machine.pids(), pids);
    machine.declare("a", text);
    assert_eq!(machine.apply(&[]).0, 0);
    std::fs::remove_file(machine.path("m/a.yaml")).expect("a file");
    let (code, out, err) = machine.apply(&["--prune"]);
    assert_eq!(code, 0, "{out} {err}");
    assert_eq!(running(&machine), ["b"]);
}

#[test]
fn an_absent_manifest_ends_a_protection() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    machine.process("b", "1", "");
    let text = machine.manifest_text("a");
    machine.declare("a", format!("protect: [delete, stop]\n{text}"));
    let _watch =
        machine.start(&["watch", "m", "--prune", "--owner", "team", "--listen", "127.0.0.1:0"], "watch.log");
    until("both run", || machine.pids().len() == 2);
    std::fs::remove_file(machine.path("m/a.yaml")).expect("a file");
    until("it is held", || {
        std::fs::read_to_string(machine.path("watch.log")).unwrap_or_default().contains("Protected")
    });
    machine.process("c", "1", "");
    until("another change is applied", || machine.pids().contains_key("c"));
    assert!(machine.pids().contains_key("a"));
    machine.declare("a", format!("protect: []\nstate: absent\n{text}"));
    until("it is gone", || running(&machine) == ["b", "c"]);
}

/// On GSE a label keeps the protection with the process.
fn protected_fleet(dialect: &'static str) -> (Fleet, u32) {
    let fleet = Fleet::new(dialect);
    let mut protected = Daemon::new("a");
    protected.more = "protect: [delete]\n".to_owned();
    [&protected, &Daemon::new("b")].into_iter().for_each(|daemon| fleet.write(daemon));
    fleet.well("two processes", &[]);
    assert_eq!(fleet.row("a")["labels"]["abide_protect"], "delete", "{}", fleet.row("a"));
    let pid = fleet.pid("a").expect("a pid");
    std::fs::remove_file(fleet.path("m/a.yaml")).expect("a file");
    (fleet, pid)
}

fn is_held(fleet: &Fleet, more: &[&str]) {
    let (code, out, err) = fleet.apply(&[&["--prune", "--accept-source"], more].concat());
    assert!(code == 3 && out.contains("Protected"), "{} {more:?}: {code} {out} {err}", fleet.dialect);
}

fn unprotected_is_removed(fleet: &Fleet, pid: u32) {
    let (code, out, err) = fleet.run(&["unprotect", "web/a", "--reason", "moved"]);
    assert!(code == 0 && out.contains("1 instance"), "{}: {code} {out} {err}", fleet.dialect);
    fleet.well("a removal", &["--prune"]);
    until("it is gone", || !is_alive(pid));
    assert!(fleet.pid("b").is_some(), "{}", fleet.dialect);
}

/// Another control host, with another state, reads the label.
#[test]
fn a_label_of_gse_v1_keeps_a_protection() {
    let (fleet, pid) = protected_fleet("gse-v1");
    is_held(&fleet, &[]);
    is_held(&fleet, &["--state", "other-state"]);
    assert_eq!(fleet.pid("a"), Some(pid));
    unprotected_is_removed(&fleet, pid);
}

/// A manual operation sends the labels again, and keeps the protection.
#[test]
fn a_label_of_gse_v2_keeps_a_protection() {
    let (fleet, pid) = protected_fleet("gse-v2");
    is_held(&fleet, &[]);
    let (code, out, err) = fleet.run(&["reload", "web/a"]);
    assert_eq!(code, 0, "{out} {err}");
    assert_eq!(fleet.effects().last().map(String::as_str), Some("reload a"));
    assert_eq!(fleet.row("a")["labels"]["abide_protect"], "delete", "{}", fleet.row("a"));
    unprotected_is_removed(&fleet, pid);
}

/// After `instances` was added, the plain name is that of a leftover and of the declared process.
#[test]
fn a_declared_name_means_its_instances_next_to_a_leftover() {
    let machine = Machine::new();
    for change in [
        Machine::several,
        |machine: &Machine, name: &str, version: &str| {
            machine.process(name, version, "");
        },
        Machine::several,
    ] {
        change(&machine, "w", "1");
        let (code, out, err) = machine.apply(&[]);
        assert_eq!(code, 0, "{out} {err}");
    }
    assert_eq!(running(&machine), ["w", "w_1", "w_2"]);
    for verb in ["restart", "stop"] {
        let (code, out, err) = machine.run(&[verb, "web/w"]);
        assert!(code == 0 && out.contains("3 of 3 instances"), "{verb}: {code} {out} {err}");
    }
    assert_eq!(running(&machine), [""; 0]);
    let (code, out, err) = machine.run(&["release", "web/w"]);
    assert!(code == 0 && out.contains("3 holds"), "{code} {out} {err}");
}
