//! Several sources of one owner: what another source declares is not an orphan of this one.

use std::fs;

use serde_json::Value;

use crate::fixtures::machine::Machine;
use crate::support::until;

/// Writes a process below `all/FOLDER`.
fn declare(machine: &Machine, folder: &str, name: &str, version: &str) {
    machine.process(name, version, "");
    fs::create_dir_all(machine.path(&format!("all/{folder}"))).expect("a folder");
    let file = format!("{name}.yaml");
    fs::rename(machine.path("m").join(&file), machine.path(&format!("all/{folder}/{file}"))).expect("a file");
}

fn apply(machine: &Machine, path: &str, more: &[&str]) {
    let (code, out, err) = machine.run(&[&["apply", path, "--yes"], more].concat());
    assert_eq!(code, 0, "{path} {more:?}: {out} {err}");
}

fn running(machine: &Machine) -> Vec<String> {
    machine.pids().into_keys().collect()
}

#[test]
fn a_process_of_another_source_is_not_pruned() {
    let machine = Machine::new();
    declare(&machine, "a", "x", "1");
    declare(&machine, "b", "y", "1");
    declare(&machine, "b", "z", "1");
    apply(&machine, "all/a", &[]);
    apply(&machine, "all/b", &[]);
    fs::remove_file(machine.path("all/b/z.yaml")).expect("a file");
    apply(&machine, "all/b", &["--prune"]);
    assert_eq!(running(&machine), ["x", "y"], "its own orphan is removed, the other source's process stays");
    // The parent directory has both, and may remove what each of them no longer declares.
    apply(&machine, "all", &["--prune"]);
    fs::remove_file(machine.path("all/b/y.yaml")).expect("a file");
    apply(&machine, "all", &["--prune"]);
    assert_eq!(running(&machine), ["x"]);
    // A directory in it does not own the rest.
    declare(&machine, "b", "y", "2");
    let (code, out, _) = machine.run(&["apply", "all/b", "--yes", "--prune", "-o", "json"]);
    assert!(code == 4 && out.contains("SourceChanged"), "{code} {out}");
    apply(&machine, "all/b", &[]);
    apply(&machine, "all/b", &["--prune"]);
    assert_eq!(running(&machine), ["x", "y"]);
    apply(&machine, "all/b", &["--prune", "--accept-source", "--max-delete", "1"]);
    assert_eq!(running(&machine), ["y"], "the claim makes it an orphan");
}

#[test]
fn a_process_of_another_source_is_shown_as_declared() {
    let machine = Machine::new();
    declare(&machine, "a", "x", "1");
    declare(&machine, "b", "y", "1");
    declare(&machine, "b", "z", "1");
    apply(&machine, "all/a", &[]);
    apply(&machine, "all/b", &[]);
    let syncs = || {
        let rows = machine.rows().into_iter();
        rows.map(|(name, row)| format!("{name} {}", row["sync"].as_str().unwrap_or_default()))
            .collect::<Vec<_>>()
    };
    assert_eq!(syncs(), ["x InSync", "y InSync", "z InSync"]);
    // Its own orphan is one, in every output.
    fs::remove_file(machine.path("all/b/z.yaml")).expect("a file");
    let (code, out, err) = machine.run(&["plan", "all/b"]);
    assert!(code == 0 && out.contains("in no manifest: web/z (1); --prune would remove them"), "{out} {err}");
    let (_, out, err) = machine.run(&["get", "orphans", "all/b", "-o", "name"]);
    assert_eq!(out.lines().collect::<Vec<_>>(), ["0:127.0.0.1:web:z"], "{err}");
    apply(&machine, "all/b", &[]);
    assert_eq!(syncs(), ["x InSync", "y InSync", "z Orphan"]);
    // A drifted process of another source is not hidden.
    assert_eq!(machine.run(&["kill", "web/x"]).0, 0);
    assert_eq!(machine.run(&["release", "web/x"]).0, 0);
    let (code, out, err) = machine.run(&["status", "--check"]);
    assert!(code == 3 && out.contains("web:x"), "{code} {out} {err}");
    // A process that its source no longer has is not missed.
    apply(&machine, "all/b", &["--prune", "--accept-source", "--max-delete", "2"]);
    assert_eq!(running(&machine), ["y"]);
    let (code, out, err) = machine.run(&["status", "--check"]);
    assert!(code == 0, "{out} {err}");
}

#[test]
fn watch_does_not_prune_another_source() {
    let machine = Machine::new();
    declare(&machine, "a", "x", "1");
    declare(&machine, "b", "y", "1");
    declare(&machine, "b", "z", "1");
    apply(&machine, "all/a", &[]);
    apply(&machine, "all/b", &[]);
    let args = ["watch", "all/b", "--prune", "--listen", "127.0.0.1:0"];
    let _watch = machine.start(&args, "watch.log");
    fs::remove_file(machine.path("all/b/z.yaml")).expect("a file");
    until("its own orphan is removed", || running(&machine) == ["x", "y"]);
}

#[test]
fn a_rollback_stays_within_its_source() {
    let machine = Machine::new();
    let revision = || {
        let (_, out, _) = machine.run(&["history", "-o", "json"]);
        let entries: Vec<Value> = serde_json::from_str(&out).expect("entries");
        entries[0]["revision"].as_str().expect("a revision").to_owned()
    };
    declare(&machine, "b", "y", "1");
    apply(&machine, "all/b", &[]);
    let first = revision();
    declare(&machine, "a", "x", "1");
    apply(&machine, "all/a", &[]);
    let other = revision();
    declare(&machine, "b", "y", "2");
    apply(&machine, "all/b", &[]);
    let (code, out, err) = machine.run(&["rollback", "--to", "previous", "--yes"]);
    assert_eq!(code, 0, "{out} {err}");
    assert_eq!(revision(), first, "not the revision of the other source, though it is newer");
    let (code, out, err) = machine.run(&["rollback", "--to", &other, "--yes", "-o", "json"]);
    assert!(code == 4 && out.contains("SourceChanged"), "{code} {out} {err}");
}

/// A transfer changes the owner and nothing else.
#[test]
fn a_process_is_transferred_to_another_owner() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    machine.process("b", "1", "");
    assert_eq!(machine.apply(&["--owner", "one"]).0, 0);
    let pids = machine.pids();
    let (code, _, err) = machine.run(&["own", "web/a", "--from", "two", "--to", "three"]);
    assert!(code == 4 && err.contains("belongs to owner \"one\""), "{code} {err}");
    let (code, _, err) = machine.run(&["own", "web/none", "--from", "one", "--to", "two"]);
    assert_eq!(code, 64, "{err}");
    let (code, out, err) = machine.run(&["own", "web/a", "--from", "one", "--to", "two"]);
    assert!(code == 0 && out.contains("1 of 1 instance"), "{code} {out} {err}");
    let rows = machine.rows();
    assert_eq!((&rows["a"]["owner"], &rows["b"]["owner"]), (&"two".into(), &"one".into()));
    assert_eq!(machine.pids(), pids);
    // The new owner has nothing to do; the old one may not touch it any more.
    let (code, out, err) = machine.run(&["apply", "m/a.yaml", "--yes", "--owner", "two"]);
    assert!(code == 0 && out.contains("Nothing to do"), "{code} {out} {err}");
    machine.edit("a", "start a 1", "start a 2");
    let (code, out, err) = machine.apply(&["--owner", "one"]);
    assert!(code == 3 && out.contains("NotOwned"), "{code} {out} {err}");
    assert_eq!(machine.pids(), pids);
}

/// A source that finds everything as it wants it declares its processes all the same.
#[test]
fn a_source_without_steps_keeps_its_processes() {
    let machine = Machine::new();
    declare(&machine, "a", "x", "1");
    declare(&machine, "a", "y", "1");
    declare(&machine, "a", "z", "1");
    apply(&machine, "all/a", &[]);
    // One process moves to another source.
    fs::create_dir_all(machine.path("all/b")).expect("a folder");
    fs::rename(machine.path("all/a/y.yaml"), machine.path("all/b/y.yaml")).expect("a file");
    let (code, out, err) = machine.run(&["apply", "all/b", "--yes"]);
    assert!(code == 0 && out.contains("Nothing to do"), "{code} {out} {err}");
    fs::remove_file(machine.path("all/a/z.yaml")).expect("a file");
    apply(&machine, "all/a", &["--prune"]);
    assert_eq!(running(&machine), ["x", "y"], "only what no source declares is removed");
    let writes = machine.writes();
    let (code, out, err) = machine.run(&["apply", "all/b", "--yes"]);
    assert!(code == 0 && out.contains("Nothing to do"), "{code} {out} {err}");
    assert_eq!(machine.writes(), writes, "it is stored once");
    // The first source is still the active one.
    let (code, out, err) = machine.run(&["rollback", "--to", "previous", "--yes"]);
    assert_eq!(code, 0, "{out} {err}");
    assert_eq!(running(&machine), ["x", "y", "z"]);
}

/// Whether another source declares a process is unknown if its stored texts cannot be loaded.
#[test]
fn nothing_is_pruned_while_a_stored_source_is_unreadable() {
    let machine = Machine::new();
    declare(&machine, "a", "x", "1");
    declare(&machine, "a", "z", "1");
    declare(&machine, "b", "y", "1");
    let file = machine.path("all/b/y.yaml");
    let text = fs::read_to_string(&file).expect("a file");
    fs::write(&file, format!("# {}\n{text}", "x".repeat(100_000))).expect("a file");
    apply(&machine, "all/b", &[]);
    apply(&machine, "all/a", &[]);
    fs::remove_file(machine.path("all/a/z.yaml")).expect("a file");
    let args = ["apply", "all/a", "--yes", "--prune", "--max-file-bytes", "50000", "-o", "json"];
    let (code, out, err) = machine.run(&args);
    let report: Value = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out} {err}"));
    let held = report["plan"]["held"].as_array().expect("a list");
    let held: Vec<_> = held.iter().map(|held| (held["instance"].clone(), held["reason"].clone())).collect();
    let of = |name: &str| (format!("0:127.0.0.1:web:{name}").into(), "SourceUnreadable".into());
    assert_eq!((code, held), (3, vec![of("y"), of("z")]), "{report}");
    assert_eq!(running(&machine), ["x", "y", "z"]);
    apply(&machine, "all/a", &["--prune"]);
    assert_eq!(running(&machine), ["x", "y"]);
}
