//! Last good manifests: they stay active when files disappear, conflict, lose their dependencies or become dangling
//! links, also after a restart of watch.

use std::fs;
use std::os::unix::fs::symlink;
use std::time::Duration;

use abide::manifest::Limits;
use abide::source::Source;
use abide::store::Embedded;
use serde_json::Value;

use crate::apply::Machine;
use crate::controller_api::{address, get};
use crate::fixtures::manifest::Manifest;
use crate::fixtures::workspace::Workspace;
use crate::support::until;
use crate::watch::{read_log, running, stop_directly, watch};

/// A source tree that the test reads at will.
struct Tree {
    folder: Workspace,
    store: Embedded,
    source: Option<Source>,
}

impl Tree {
    fn new(files: &[(&str, &str)]) -> Tree {
        let folder = Workspace::new();
        let store = Embedded::open(&folder.path().join("state.db")).expect("a store");
        fs::create_dir(folder.path().join("m")).expect("a folder");
        let tree = Tree { folder, store, source: None };
        files.iter().for_each(|(name, text)| tree.write(name, text));
        tree
    }

    fn write(&self, name: &str, text: &str) {
        let file = self.folder.path().join("m").join(name);
        fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
        fs::write(file, text).expect("a file");
    }

    /// The names that are wanted, and the files that something is wrong with.
    async fn read(&mut self) -> (Vec<String>, Vec<String>) {
        let paths = vec![self.folder.path().join("m")];
        let open = || Source::new(paths, Limits::default(), Duration::ZERO, Box::new(|_| {}));
        let source = self.source.get_or_insert_with(open);
        source.trigger().now();
        source.changed();
        let reading = source.read(&self.store).await.expect("a reading").expect("it was read");
        let mut names: Vec<String> =
            reading.desired.instances.keys().map(|key| key.name.to_string()).collect();
        names.dedup();
        let root = format!("{}/", self.folder.path().join("m").display());
        let file = |file: &str| file.strip_prefix(&root).unwrap_or("m").to_owned();
        (names, reading.problems.iter().map(|problem| file(&problem.file)).collect())
    }
}

fn process(name: &str, hosts: &str) -> String {
    Manifest::remote(name).start_cmd("./run").to_string().replace("hosts: []", &format!("hosts: [{hosts}]"))
}

const HERE: &str = "{ip: 10.0.0.1, bk_cloud_id: 0}";

fn wanted(names: &[&str], bad: &[&str]) -> (Vec<String>, Vec<String>) {
    let all = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    (all(names), all(bad))
}

#[tokio::test]
async fn the_previous_file_keeps_a_process_that_two_files_claim() {
    for copy in ["0.yaml", "z.yaml"] {
        let mut tree = Tree::new(&[("a.yaml", &process("a", HERE)), ("b.yaml", &process("b", HERE))]);
        assert_eq!(tree.read().await, wanted(&["a", "b"], &[]));
        tree.write(copy, &process("a", HERE));
        let (names, bad) = tree.read().await;
        assert_eq!((names, bad.len()), (wanted(&["a", "b"], &[]).0, 1), "{copy}");
        tree.write(copy, &process("c", HERE));
        assert_eq!(tree.read().await, wanted(&["a", "b", "c"], &[]));
    }
}

#[tokio::test]
async fn a_process_moved_out_of_a_broken_file_stays() {
    let (a, b) = (process("a", HERE), process("b", HERE));
    let mut tree = Tree::new(&[("a.yaml", &a), ("b.yaml", &b)]);
    assert_eq!(tree.read().await, wanted(&["a", "b"], &[]));
    tree.write("a.yaml", "x: [");
    tree.write("b.yaml", &format!("{b}---\n{a}"));
    assert_eq!(tree.read().await, wanted(&["a", "b"], &["a.yaml"]));
    tree.write("a.yaml", "");
    assert_eq!(tree.read().await, wanted(&["a", "b"], &[]), "and moves when it is fixed");
}

#[tokio::test]
async fn a_process_whose_dependency_file_breaks_stays() {
    let group = |name: &str| {
        format!("apiVersion: abide/v1\nkind: HostGroup\nmeta: {{name: {name}}}\nhosts: [{HERE}]\n")
    };
    let mut tree = Tree::new(&[
        ("a.yaml", &process("a", "{group: eu}")),
        ("b.yaml", &process("b", HERE)),
        ("groups.yaml", &group("eu")),
    ]);
    assert_eq!(tree.read().await, wanted(&["a", "b"], &[]));
    tree.write("groups.yaml", &group("us"));
    assert_eq!(tree.read().await, wanted(&["a", "b"], &["a.yaml"]));
    tree.write("b.yaml", &process("c", HERE));
    assert_eq!(tree.read().await, wanted(&["a", "b"], &["a.yaml"]), "all of it, until it is fixed");
    tree.write("groups.yaml", &format!("{}---\n{}", group("us"), group("eu")));
    assert_eq!(tree.read().await, wanted(&["a", "c"], &[]));
}

#[tokio::test]
async fn an_empty_manifest_is_a_problem_and_changes_nothing() {
    let mut tree = Tree::new(&[("a.yaml", &process("a", HERE))]);
    assert_eq!(tree.read().await, wanted(&["a"], &[]));
    tree.write("a.yaml", "# nothing\n");
    for _ in 0..2 {
        assert_eq!(tree.read().await, wanted(&["a"], &["m"]));
    }
    // What was good before is still known.
    tree.write("a.yaml", "x: [");
    assert_eq!(tree.read().await, wanted(&["a"], &["a.yaml"]));
    let mut new = Tree::new(&[]);
    assert_eq!(new.read().await, wanted(&[], &["m"]), "also for a new reader");
}

#[tokio::test]
async fn processes_behind_a_dangling_link_stay() {
    let mut tree = Tree::new(&[("a.yaml", &process("a", HERE)), ("sub/b.yaml", &process("b", HERE))]);
    let root = tree.folder.path().join("m");
    symlink("nowhere", root.join("README")).expect("a link");
    tree.source = None;
    // The content behind it is not known yet.
    assert_eq!(tree.read().await, wanted(&["a", "b"], &["README"]));
    assert!(tree.source.as_mut().expect("a source").restore_last_good(Vec::new()));
    assert_eq!(tree.read().await, wanted(&["a", "b"], &[]), "nothing was");
    fs::rename(root.join("sub"), tree.folder.path().join("away")).expect("a folder");
    symlink("nowhere", root.join("sub")).expect("a link");
    assert_eq!(tree.read().await, wanted(&["a", "b"], &["sub"]));
}

/// Without its Defaults or its Policy, the spec of a process is not known.
#[tokio::test]
async fn an_unread_file_that_may_set_policy_blocks_the_first_load() {
    let (a, b) = (process("a", HERE), process("b", HERE));
    let mut tree =
        Tree::new(&[("a.yaml", &a), ("sub/b.yaml", &b), ("sub/policy.yaml", "kind: Policy\nowner: [\n")]);
    assert_eq!(tree.read().await, wanted(&["a"], &["sub/policy.yaml"]));
    // Who is known is as he was.
    let mut known = Tree::new(&[("a.yaml", &a), ("sub/b.yaml", &b)]);
    assert_eq!(known.read().await, wanted(&["a", "b"], &[]));
    known.write("sub/policy.yaml", "kind: Policy\nowner: [\n");
    assert_eq!(known.read().await, wanted(&["a", "b"], &["sub/policy.yaml"]));
    known.write("sub/policy.yaml", "");
    known.write("sub/b.yaml", "x: [");
    assert_eq!(known.read().await, wanted(&["a", "b"], &["sub/b.yaml"]), "and still known");
    let mut other =
        Tree::new(&[("a.yaml", &a), ("sub/b.yaml", &b), ("sub/c.yaml", "kind: Process\nmeta: [\n")]);
    assert_eq!(other.read().await, wanted(&["a", "b"], &["sub/c.yaml"]), "other processes are read");
}

#[test]
fn an_emptied_folder_prunes_nothing_also_after_a_restart() {
    let machine = Machine::new();
    ["a", "b"].iter().for_each(|name| machine.process(name, "1", ""));
    let args = ["--prune", "--max-delete", "100%", "--interval", "1h"];
    let first = watch(&machine, "first", &args);
    until("both run", || running(&machine, &["a", "b"]));
    until("it is logged", || read_log(&machine, "first").contains("converged: 2 instances as wanted"));
    ["a", "b"]
        .iter()
        .for_each(|name| fs::remove_file(machine.path(&format!("m/{name}.yaml"))).expect("a file"));
    until("it is logged", || read_log(&machine, "first").contains("error[E0115]"));
    drop(first);
    let _second = watch(&machine, "second", &args);
    until("it is logged", || read_log(&machine, "second").contains("no process is declared here"));
    let status = || get(address(&machine, "second"), "/api/v1/status").json();
    until("both are still wanted", || status()["instances"]["sync"]["InSync"] == 2);
    stop_directly(&machine, "a");
    until("and repaired", || machine.effects() == ["start a 1", "start a 1", "start b 1", "stop a"]);
}

/// An incomplete read removes nothing, and reports the kept files.
#[test]
fn a_prune_blocked_by_a_broken_file_is_reported() {
    let machine = Machine::new();
    ["a", "b"].iter().for_each(|name| machine.process(name, "1", ""));
    let _watch = watch(&machine, "watch.log", &["--prune", "--interval", "1h"]);
    until("both run", || running(&machine, &["a", "b"]));
    until("it is logged", || read_log(&machine, "watch.log").contains("converged: 2 instances as wanted"));
    fs::write(machine.path("m/a.yaml"), "x: [").expect("a file");
    until("it is logged", || read_log(&machine, "watch.log").contains("E0101"));
    fs::remove_file(machine.path("m/b.yaml")).expect("a file");
    until("it is held", || read_log(&machine, "watch.log").contains("SourceUnreadable"));
    assert!(running(&machine, &["a", "b"]));
    let status = get(address(&machine, "watch.log"), "/api/v1/status").json();
    assert_eq!(
        (&status["converged"], &status["held"][0]["reason"]),
        (&Value::Bool(false), &"SourceUnreadable".into())
    );
}
