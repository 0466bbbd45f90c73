//! Published status of controllers: `status` shows it, and `apply` checks it for other controllers.

use std::fs;

use serde_json::Value;

use crate::fixtures::machine::Machine;
use crate::git::Repo;
use crate::support::until;
use crate::watch::watch;

fn status(machine: &Machine) -> Value {
    let (code, out, err) = machine.run(&["status", "-o", "json"]);
    assert_eq!(code, 0, "{err}");
    serde_json::from_str(&out).expect("a status")
}

fn is_watched(machine: &Machine) -> bool {
    status(machine)["controllers"][0]["running"] == true
}

/// Manifests in another folder, with the same owner.
fn elsewhere(machine: &Machine) {
    fs::create_dir_all(machine.path("n")).expect("a folder");
    fs::copy(machine.path("m/a.yaml"), machine.path("n/a.yaml")).expect("a copy");
}

#[test]
fn an_apply_that_a_watch_would_undo_is_refused() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let first = watch(&machine, "first.log", &["--interval", "1h"]);
    until("the watch is published", || is_watched(&machine));
    elsewhere(&machine);
    let (code, out, err) = machine.run(&["apply", "n", "--yes", "-o", "json"]);
    assert!(code == 4 && out.contains("OtherController"), "{code} {out} {err}");
    assert!(err.contains("follows") && err.contains("--force"), "{err}");
    // The same source, a folder in it, and another owner are not refused.
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 0, "{out} {err}");
    let (code, out, err) = machine.run(&["apply", "m/a.yaml", "--yes"]);
    assert_eq!(code, 0, "{out} {err}");
    let (code, out, err) = machine.run(&["apply", "n", "--yes", "--force"]);
    assert!(code == 0 && err.contains("would undo"), "{code} {out} {err}");
    drop(first);
    until("no watch runs", || !is_watched(&machine));
    let (code, out, err) = machine.run(&["apply", "n", "--yes"]);
    assert_eq!(code, 0, "{out} {err}");
    let _second = watch(&machine, "second.log", &["--interval", "1h", "--follow", "no"]);
    until("the watch is published", || is_watched(&machine));
    assert_eq!(status(&machine)["controllers"][0]["follow"], false);
    let (code, out, err) = machine.run(&["apply", "n", "--yes"]);
    assert_eq!(code, 0, "a watch that does not follow does not count: {out} {err}");
}

#[test]
fn status_knows_the_problems_of_a_watch() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let _watch = watch(&machine, "watch.log", &["--interval", "1h"]);
    until("all is well", || is_watched(&machine) && machine.run(&["status", "--check"]).0 == 0);
    fs::write(machine.path("m/broken.yaml"), "kind: [").expect("a file");
    until("the error is published", || status(&machine)["controllers"][0]["errors"] == 1);
    let (code, out, err) = machine.run(&["status", "--check"]);
    assert!(
        code == 3 && out.contains("1 error in the manifests") && out.contains("broken.yaml"),
        "{out} {err}"
    );
    fs::remove_file(machine.path("m/broken.yaml")).expect("a file");
    until("it is fixed", || machine.run(&["status", "--check"]).0 == 0);
    // A status that does not change is not written again.
    let before = status(&machine)["controllers"][0]["at"].clone();
    machine.process("b", "1", "");
    until("b runs", || machine.pids().contains_key("b"));
    until("its revision is published", || status(&machine)["controllers"][0]["at"] != before);
}

/// A declared process on a host that cannot be observed needs attention, also if no row of it exists.
#[test]
fn status_counts_processes_on_unknown_hosts() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let text = machine.manifest_text("a").replace("name: a}", "name: far}").replace("127.0.0.1", "10.9.9.9");
    machine.declare("far", text);
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 3, "{out} {err}");
    let (code, out, err) = machine.run(&["status", "--check"]);
    assert!(code == 3 && out.contains("10.9.9.9:web:far  unknown: "), "{code} {out} {err}");
    fs::remove_file(machine.path("m/far.yaml")).expect("a file");
    // An apply without steps leaves the active revision as it is.
    machine.process("b", "1", "");
    assert_eq!(machine.apply(&[]).0, 0);
    assert_eq!(machine.run(&["status", "--check"]).0, 0);
}

/// A commit that the work tree contains only warns; another one is refused. A rewind is in `status`.
#[test]
fn an_apply_knows_the_commit_of_a_watch() {
    let repo = Repo::new();
    let machine = &repo.machine;
    machine.process("a", "1", "");
    repo.commit("first");
    machine.process("a", "2", "");
    let second = repo.commit("second");
    let _watch = repo.watch("watch.log", &[]);
    until("the commit is published", || status(machine)["controllers"][0]["commit"] == second.as_str());
    let (code, out, err) = machine.apply(&[]);
    assert!(code == 0 && !err.contains("undo"), "{code} {out} {err}");
    repo.git(&["commit", "--quiet", "--allow-empty", "-m", "not pushed"]);
    let (code, out, err) = machine.apply(&[]);
    assert!(code == 0 && err.contains("it undoes this apply until"), "{code} {out} {err}");
    repo.git(&["reset", "--quiet", "--hard", "HEAD~2"]);
    let (code, out, err) = machine.apply(&["-o", "json"]);
    assert!(code == 4 && out.contains("OtherController"), "{code} {out} {err}");
    assert!(err.contains(&second[..12]) && err.contains("do not contain"), "{err}");
    assert_eq!(machine.run(&["status", "--check"]).0, 0);
    repo.push(&["--force"]);
    until("the rewind is published", || {
        machine.run(&["status"]).1.contains("the source is not followed: Rewound")
    });
    assert_eq!(machine.run(&["status", "--check"]).0, 3);
}
