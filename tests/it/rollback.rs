//! Rollback: an earlier revision is active, with real processes, until a newer change.

use abide::engine::stored_revisions::{self, MAX_REVISIONS, NewRevision};
use abide::manifest::{self, Limits};
use abide::model::ManifestRevision;
use abide::store::{Embedded, Store};
use serde_json::Value;

use crate::apply::Machine;
use crate::fixtures::workspace::Workspace;
use crate::git::Repo;
use crate::support::{GOOD, until};
use crate::watch::{read_log, watch};

fn history(machine: &Machine) -> Vec<Value> {
    let (code, out, err) = machine.run(&["history", "-o", "json"]);
    assert_eq!(code, 0, "{err}");
    serde_json::from_str(&out).expect("entries")
}

/// Of the newest entry.
fn revision(machine: &Machine) -> String {
    history(machine)[0]["revision"].as_str().expect("a revision").to_owned()
}

fn last(machine: &Machine) -> Option<String> {
    let text = std::fs::read_to_string(machine.path("effects")).unwrap_or_default();
    text.lines().rfind(|line| line.starts_with("start a")).map(str::to_owned)
}

/// A launched process writes its line itself, at some time after the launch.
fn until_started(machine: &Machine, line: &str) {
    until(line, || last(machine).as_deref() == Some(line));
}

#[test]
fn a_rollback_pins_the_earlier_revision_until_the_next_apply() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    assert_eq!(machine.apply(&[]).0, 0);
    let first = revision(&machine);
    machine.process("a", "2", "");
    machine.process("b", "1", "");
    assert_eq!(machine.apply(&[]).0, 0);
    let second = revision(&machine);
    assert_ne!(first, second);
    // Without a terminal to ask for approval, nothing happens.
    let (code, out, _) = machine.run(&["rollback", "--to", &first[..6], "-o", "json"]);
    assert!(code == 4 && out.contains("NoApproval"), "{code} {out}");
    assert!(!machine.run(&["status"]).1.contains("pinned"));
    // The error for an unknown revision lists the stored ones.
    let (code, _, err) = machine.run(&["rollback", "--to", "000000000000", "--yes"]);
    assert!(code == 1 && err.contains(&first[..12]) && err.contains(&second[..12]), "{code} {err}");
    assert_eq!(machine.run(&["rollback", "--to", "0000", "--yes"]).0, 64);
    until_started(&machine, "start a 2");

    let (code, out, err) = machine.run(&["rollback", "--to", &first[..6], "--yes", "--reason", "2 leaks"]);
    assert!(code == 0 && out.contains("converged"), "{code} {out} {err}");
    until_started(&machine, "start a 1");
    assert!(machine.pids().contains_key("b"), "what was not there then goes with --prune only");
    let entries = history(&machine);
    assert_eq!((&entries[0]["revision"], &entries[0]["pinned"]), (&first.as_str().into(), &true.into()));
    for verb in ["status", "history"] {
        let (_, out, _) = machine.run(&[verb]);
        assert!(
            out.contains(&format!("pinned to {}", &first[..12])) && out.contains("2 leaks"),
            "{verb}: {out}"
        );
    }
    // Once more changes nothing; `previous` is what came before.
    let effects = machine.effects();
    assert_eq!(machine.run(&["rollback", "--to", &first, "--yes"]).0, 0);
    assert_eq!(machine.effects(), effects);
    assert_eq!(machine.run(&["rollback", "--to", "previous", "--yes"]).0, 0);
    until_started(&machine, "start a 2");
    assert_eq!(machine.run(&["rollback", "--to", "previous", "--yes", "--prune"]).0, 0);
    until_started(&machine, "start a 1");
    assert!(!machine.pids().contains_key("b"), "it was not there then");

    // A person's new word ends it.
    let (code, _, err) = machine.apply(&[]);
    assert!(code == 0 && err.contains("end the pin"), "{code} {err}");
    until_started(&machine, "start a 2");
    assert!(!machine.run(&["history"]).1.contains("pinned"));
    let (code, _, err) = machine.run(&["rollback", "--unpin"]);
    assert!(code == 0 && err.contains("has no pinned revision"), "{code} {err}");
}

#[test]
fn watch_keeps_the_pin_until_its_source_changes() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let watching = watch(&machine, "watch.log", &["--prune"]);
    until("the first runs", || history_is(&machine, 1));
    let first = revision(&machine);
    machine.process("a", "2", "");
    until("the second runs", || history_is(&machine, 2));
    let (code, _, err) = machine.run(&["rollback", "--to", &first, "--yes"]);
    assert_eq!(code, 0, "{err}");
    until_started(&machine, "start a 1");
    until("it is logged", || read_log(&machine, "watch.log").contains("pinned to"));
    // Drift from the pinned revision is repaired; the older source does not matter.
    assert_eq!(machine.run(&["stop", "web/a"]).0, 0);
    assert_eq!(machine.run(&["release", "web/a"]).0, 0);
    let starts = |what: &str| machine.effects().iter().filter(|line| *line == what).count();
    until("it is repaired", || starts("start a 1") == 3);
    let text = std::fs::read_to_string(machine.path("m/a.yaml")).expect("a file");
    std::fs::write(machine.path("m/a.yaml"), format!("# as it was\n{text}")).expect("a file");
    // Another one that takes over does the same.
    drop(watching);
    let _watch = watch(&machine, "second.log", &["--prune"]);
    until("it is logged again", || read_log(&machine, "second.log").contains("pinned to"));
    until("it is at rest", || read_log(&machine, "second.log").contains("converged"));
    assert_eq!((starts("start a 1"), starts("start a 2")), (3, 1));
    // A broken file is not a newer revision; a valid one is.
    std::fs::write(machine.path("m/a.yaml"), text.replace("start_cmd", "strat_cmd")).expect("a file");
    until("it is shown", || read_log(&machine, "second.log").contains("did you mean \"start_cmd\""));
    machine.process("a", "3", "");
    until("the third runs", || last(&machine).as_deref() == Some("start a 3"));
    assert!(
        read_log(&machine, "second.log").contains("no longer pinned"),
        "{}",
        read_log(&machine, "second.log")
    );
    assert_eq!((starts("start a 1"), starts("start a 2")), (3, 1));
    assert!(!machine.run(&["status"]).1.contains("pinned"));
}

fn history_is(machine: &Machine, many: usize) -> bool {
    let history = history(machine);
    // An entry is written when its run begins; its exit code follows at the end.
    history.len() == many && history.iter().all(|entry| !entry["exit"].is_null())
}

#[test]
fn unpin_returns_to_the_source_revision() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let _watch = watch(&machine, "watch.log", &[]);
    until("the first runs", || history_is(&machine, 1));
    machine.process("a", "2", "");
    until("the second runs", || history_is(&machine, 2));
    assert_eq!(machine.run(&["rollback", "--to", "previous", "--yes"]).0, 0);
    until_started(&machine, "start a 1");
    let (code, _, err) = machine.run(&["rollback", "--unpin"]);
    assert!(code == 0 && err.contains("no longer pinned"), "{code} {err}");
    until("the source is followed", || last(&machine).as_deref() == Some("start a 2"));
}

/// By its commit, though other commits with the same meaning came after it.
#[test]
fn a_rollback_accepts_a_commit() {
    let repo = Repo::new();
    let machine = &repo.machine;
    machine.process("a", "1", "");
    let first = repo.commit("the first");
    let _watch = repo.watch("watch.log", &[]);
    until("the first runs", || history_is(machine, 1));
    machine.process("a", "2", "");
    repo.commit("the second");
    until("the second runs", || history_is(machine, 2));
    let (code, _, err) = machine.run(&["rollback", "--to", &first[..8], "--yes"]);
    assert_eq!(code, 0, "{err}");
    until_started(machine, "start a 1");
    assert_eq!(history(machine)[0]["commit"], first.as_str());
    // Nothing new in it.
    std::fs::write(machine.path("m/read.me"), "hello").expect("a file");
    repo.commit("a word on it");
    machine.process("a", "3", "");
    repo.commit("the third");
    until("the third runs", || last(machine).as_deref() == Some("start a 3"));
    assert_eq!(machine.effects().iter().filter(|line| *line == "start a 2").count(), 1);
}

#[test]
fn the_last_twenty_revisions_are_kept() {
    let folder = Workspace::new();
    let store = Embedded::open(&folder.path().join("state.db")).expect("a store");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let load = |version: usize| {
        std::fs::write(folder.path().join("same.yaml"), GOOD).expect("a file");
        let other = GOOD.replace("name: api", "name: other").replace("./api", &format!("./api {version}"));
        std::fs::write(folder.path().join("other.yaml"), other).expect("a file");
        manifest::load(&[folder.path().to_path_buf()], &Limits::default())
    };
    runtime.block_on(async {
        for version in 0..MAX_REVISIONS + 5 {
            let revision = ManifestRevision::from_text(format!("{version:032}"));
            let texts = load(version).file_contents();
            let word = NewRevision {
                owner: "team",
                source: "here",
                revision: &revision,
                commit: None,
                texts: &texts,
            };
            assert_eq!(stored_revisions::activate(&store, &word).await.expect("it is kept"), None);
            stored_revisions::gc(&store, "team").await.expect("it is tidy");
        }
        let kept = stored_revisions::list(&store, "team").await.expect("a list");
        assert_eq!(kept.len(), MAX_REVISIONS);
        // What they share is there once.
        let texts = store.range("snap/team/text/", None, usize::MAX).await.expect("texts").entries;
        assert_eq!(texts.len(), MAX_REVISIONS + 1);
        assert_eq!(
            store.range("snap/team/", None, usize::MAX).await.expect("all").entries.len(),
            3 * MAX_REVISIONS + 1
        );
        for snapshot in &kept {
            let version = snapshot.revision.as_str().parse().expect("a number");
            let texts = stored_revisions::texts(&store, "team", snapshot).await.expect("its texts");
            let again = manifest::load_files(texts, Vec::new(), &Limits::default(), &Default::default());
            assert_eq!(again.desired, load(version).desired);
        }
    });
}
