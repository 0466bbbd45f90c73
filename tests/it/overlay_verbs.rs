//! Overlays in the verbs of the command line, in watched directories and in git, on the sample repository.

use std::collections::BTreeMap;
use std::path::Path;

use abide::manifest::{self, Limits, Loaded, print, render};
use serde_json::Value;

use crate::apply::Machine;
use crate::git::Repo;
use crate::support::{Tree, abide, project, stderr, stdout, until};

fn shop() -> Tree {
    let tree = Tree::new::<&str>(&[]);
    copy(&project().join("examples/shop"), &tree.path().join("shop"));
    tree
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).expect("a folder");
    for entry in std::fs::read_dir(from).expect("a folder").flatten() {
        let target = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy(&entry.path(), &target),
            false => drop(std::fs::copy(entry.path(), target).expect("a file")),
        }
    }
}

fn load(tree: &Tree, path: &str) -> Loaded {
    manifest::load(&[tree.path().join(path)], &Limits::default())
}

fn run(tree: &Tree, args: &[&str]) -> (i32, String, String) {
    let output = abide(args, tree.path(), b"");
    (output.status.code().unwrap_or(-1), stdout(&output), stderr(&output))
}

#[test]
fn every_overlay_of_the_sample_repository_is_valid() {
    let tree = shop();
    let (code, out, err) = run(&tree, &["validate", "--all", "shop"]);
    assert_eq!((code, out.as_str()), (0, ""), "{err}");
    let lines: Vec<&str> = err.lines().collect();
    assert_eq!(lines.len(), 3, "{err}");
    for (line, name) in lines.iter().zip(["dev", "prod", "staging"]) {
        assert!(
            line.starts_with(&format!("shop/overlays/{name}: ")) && line.ends_with("no problems"),
            "{err}"
        );
    }
    // One broken overlay makes 65, and the others are reported too.
    let path = tree.path().join("shop/overlays/dev/overlay.yaml");
    let text = std::fs::read_to_string(&path).expect("a file");
    std::fs::write(&path, text.replace("name: report", "name: raport")).expect("a file");
    let (code, out, err) = run(&tree, &["validate", "--all", "shop", "-o", "json"]);
    let rows: Vec<Value> = serde_json::from_str(&out).expect("JSON");
    assert_eq!((code, rows.len()), (65, 1), "{out}");
    assert_eq!(rows[0]["code"], "E0423", "{out}");
    assert!(err.contains("shop/overlays/dev: ") && err.contains("1 error"), "{err}");
    // Files that no overlay has are checked, too.
    tree.write("shop/other/a.yaml", "kind: Process\nmeta: {namespace: a}\n");
    let (_, out, _) = run(&tree, &["validate", "--all", "shop", "-o", "json"]);
    assert!(out.contains("shop/other/a.yaml"), "{out}");
}

/// What is rendered plans as the originals do.
#[test]
fn rendered_manifests_mean_the_same() {
    let tree = shop();
    for name in ["dev", "staging", "prod"] {
        let path = format!("shop/overlays/{name}");
        let loaded = load(&tree, &path);
        assert_eq!(loaded.problems, []);
        let text = print::yaml(&render::documents(&loaded.desired));
        let again = manifest::load_text("rendered.yaml", text.clone(), &Limits::default());
        assert_eq!(again.problems, [], "{text}");
        let specs = |loaded: &Loaded| -> BTreeMap<String, _> {
            let wants = loaded.desired.instances.iter();
            wants.map(|(key, want)| (key.to_string(), (want.spec.sum(), want.origin.state))).collect()
        };
        assert_eq!(specs(&loaded), specs(&again));
        let (code, out, err) = run(&tree, &["render", &path]);
        assert_eq!((code, out), (0, text), "{err}");
        let (_, json, _) = run(&tree, &["render", &path, "-o", "json"]);
        let documents: Vec<Value> = serde_json::from_str(&json).expect("JSON");
        assert_eq!(documents.len(), render::documents(&loaded.desired).len());
    }
    let secret = "kind: Process\nmeta: {namespace: a, name: b}\nhosts: [10.0.0.1]\nrun: ./b\nenv: {K: {value: hunter2, secret: true}}\n";
    tree.write("secret/a.yaml", secret);
    let (code, out, err) = run(&tree, &["render", "secret"]);
    assert!(code == 0 && !out.contains("hunter2") && out.contains("secret: true"), "{out}");
    assert!(err.contains("secret values of env are left out"), "{err}");
    let (code, out, _) = run(&tree, &["render", "shop"]);
    assert_eq!((code, out.as_str()), (65, ""), "a tree above overlays renders nothing");
}

#[test]
fn two_overlays_are_compared_without_a_target() {
    let tree = shop();
    let args = ["diff", "--between", "shop/overlays/staging", "shop/overlays/prod"];
    let (code, out, err) = run(&tree, &args);
    assert_eq!(code, 1, "{err}");
    assert!(out.contains("shop/web") && out.contains("B: not declared"), "{out}");
    let (code, json, _) = run(&tree, &[&args[..], &["-o", "json"]].concat());
    let rows: Vec<Value> = serde_json::from_str(&json).expect("JSON");
    assert_eq!((code, rows.len()), (1, 3 + 2 * 2 + 3), "3 + 2 × 2 in production, 3 in staging: {json}");
    assert!(rows.iter().all(|row| row["owner"]["old"].is_null() && row["given"].is_array()), "{json}");
    let same = ["diff", "--between", "shop/overlays/prod", "shop/overlays/prod"];
    assert_eq!(run(&tree, &same).0, 0);
    // One field.
    copy(&tree.path().join("shop"), &tree.path().join("next"));
    let path = tree.path().join("next/overlays/prod/overlay.yaml");
    let text = std::fs::read_to_string(&path).expect("a file");
    std::fs::write(&path, text.replace("workers: 8", "workers: 9")).expect("a file");
    let (_, out, _) = run(&tree, &["diff", "--between", "shop/overlays/prod", "next/overlays/prod"]);
    assert!(out.contains("env.WORKERS"), "{out}");
    assert!(!out.contains("shop/queue"), "{out}");
    assert_eq!(run(&tree, &["diff", "--between", "shop/overlays/prod", "nowhere"]).0, 65);
    assert_eq!(run(&tree, &["diff", "--between", "a", "b", "c"]).0, 2);
    assert_eq!(run(&tree, &["diff"]).0, 2);
}

#[test]
fn every_value_names_the_layer_that_set_it() {
    let tree = shop();
    let (code, out, err) = run(&tree, &["explain", "--in", "shop/overlays/prod", "--process", "shop/web"]);
    assert_eq!(code, 0, "{err}");
    for line in [
        "shop/web  hosts: group prod-web  shop/overlays/prod/overlay.yaml:7:7, from a patch",
        "shop/web  identity.user: \"shop\"  shop/base/web.yaml:5:7",
        "shop/web  limits.memory: \"2GB\"  shop/overlays/prod/overlay.yaml:8:24, from a patch",
        "shop/web  monitor_policy.start_check_secs: 1  shop/base/defaults.yaml:4:38, from Defaults",
        "shop/web  ${port}: \"80\"  shop/overlays/prod/overlay.yaml:3:14, from Overlay",
        "shop/web  ${log_level}: \"info\"  shop/base/defaults.yaml:2:43, from Defaults",
    ] {
        assert!(out.lines().any(|found| found == line), "{line}\n{out}");
    }
    assert!(!out.contains("shop/queue"), "{out}");
    let (_, one, _) = run(&tree, &["explain", "limits.memory", "--in", "shop/overlays/prod"]);
    assert_eq!(one.lines().count(), 3, "{one}");
}

#[test]
fn an_overlay_is_planned_and_a_tree_above_it_is_refused() {
    let tree = shop();
    let plan =
        |path: &str| run(&tree, &["plan", path, "--observed", "rows.json", "-o", "json", "--owner", "shop"]);
    tree.write("rows.json", "[]");
    let (code, out, err) = plan("shop/overlays/prod");
    assert_eq!(code, 0, "{err}");
    let plan_of: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(plan_of["summary"]["instances"], 3 + 2 * 2, "{out}");
    let why = out.contains("shop/base/web.yaml:1:1");
    assert!(why, "{out}");
    let (code, _, err) = plan("shop");
    assert_eq!(code, 65, "{err}");
    assert!(err.contains("E0425") && err.contains("pass the directory of one overlay"), "{err}");
}

/// A machine with a base in `base` and an overlay in `m`.
fn layered() -> Machine {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let text = machine.manifest_text("a").replace("start a 1", "start a ${version}");
    assert!(text.contains("${version}"), "{text}");
    std::fs::remove_file(machine.path("m/a.yaml")).expect("a file");
    std::fs::create_dir_all(machine.path("base")).expect("a folder");
    std::fs::write(machine.path("base/a.yaml"), text).expect("a file");
    write_version(&machine, 1);
    machine
}

fn write_version(machine: &Machine, version: u32) {
    let text = format!("kind: Overlay\nbase: ../base\nvars: {{version: {version}}}\n");
    std::fs::write(machine.path("m/overlay.yaml"), text).expect("a file");
}

#[test]
fn an_overlay_is_applied_and_rolled_back() {
    let machine = layered();
    assert_eq!(machine.apply(&[]).0, 0);
    until("the first version runs", || machine.effects().contains(&"start a 1".to_owned()));
    let revision = |machine: &Machine| -> String {
        let entries: Vec<Value> =
            serde_json::from_str(&machine.run(&["history", "-o", "json"]).1).expect("JSON");
        entries[0]["revision"].as_str().expect("a revision").to_owned()
    };
    let first = revision(&machine);
    // The sample repository against the same gateway.
    copy(&project().join("examples/shop"), &machine.path("shop"));
    let (code, out, err) = machine.run(&["plan", "shop/overlays/dev"]);
    assert!(code == 0 && out.contains("shop-dev/web") && out.contains("shop-dev/queue"), "{out} {err}");
    write_version(&machine, 2);
    assert_eq!(machine.apply(&[]).0, 0);
    until("the second version runs", || machine.effects().contains(&"start a 2".to_owned()));
    assert_ne!(first, revision(&machine), "the revision covers the overlay");
    let (code, _, err) = machine.run(&["rollback", "--to", &first, "--yes"]);
    assert_eq!(code, 0, "{err}");
    until("the first version runs again", || {
        machine.effects().iter().filter(|line| *line == "start a 1").count() == 2
    });
}

#[test]
fn a_change_of_the_base_wakes_a_watch_of_the_overlay() {
    let machine = layered();
    let _watch = machine.start(&["watch", "m", "--listen", "127.0.0.1:0", "--debounce", "50ms"], "watch.log");
    until("the first version runs", || machine.effects() == ["start a 1"]);
    let edit = |old: &str, new: &str| {
        let text = std::fs::read_to_string(machine.path("base/a.yaml")).expect("a file");
        assert!(text.contains(old), "{text}");
        std::fs::write(machine.path("base/a.yaml"), text.replace(old, new)).expect("a file");
    };
    edit("start a ${version}", "start a base-${version}");
    until("the base is followed", || machine.effects().contains(&"start a base-1".to_owned()));
    write_version(&machine, 2);
    until("the overlay is followed", || machine.effects().contains(&"start a base-2".to_owned()));
    // A broken base keeps what runs, and says where it is broken.
    edit("start_cmd", "strat_cmd");
    until("it is reported", || {
        std::fs::read_to_string(machine.path("watch.log")).is_ok_and(|log| log.contains("base/a.yaml:"))
    });
    assert_eq!(machine.pids().len(), 1);
    // And a broken overlay.
    edit("strat_cmd", "start_cmd");
    std::fs::write(machine.path("m/overlay.yaml"), "kind: Overlay\nbase: ../bose\n").expect("a file");
    until("it is reported", || {
        std::fs::read_to_string(machine.path("watch.log")).is_ok_and(|log| log.contains("overlay.yaml:2:7"))
    });
    assert_eq!(machine.pids().len(), 1);
}

#[test]
fn git_sources_read_the_bases_of_the_same_commit() {
    let repo = Repo::new();
    let machine = &repo.machine;
    machine.process("a", "1", "");
    let folder = machine.path("m");
    let text = machine.manifest_text("a").replace("start a 1", "start a ${version}");
    std::fs::create_dir_all(folder.join("base")).expect("a folder");
    std::fs::create_dir_all(folder.join("overlays/prod")).expect("a folder");
    std::fs::remove_file(folder.join("a.yaml")).expect("a file");
    std::fs::write(folder.join("base/a.yaml"), &text).expect("a file");
    let overlay = |base: &str| format!("kind: Overlay\nbase: {base}\nvars: {{version: 1}}\n");
    std::fs::write(folder.join("overlays/prod/overlay.yaml"), overlay("../../base")).expect("a file");
    repo.commit("layers");
    let _watch = repo.watch("watch.log", &["--path", "overlays/prod"]);
    until("the overlay runs", || machine.effects() == ["start a 1"]);
    // Only the base changes.
    std::fs::write(folder.join("base/a.yaml"), text.replace("start a ", "start a base-")).expect("a file");
    repo.commit("the base");
    until("the base is followed", || machine.effects().contains(&"start a base-1".to_owned()));
    // Out of the commit, also by a link.
    for base in ["../../../../etc", "../../link"] {
        let _ = std::os::unix::fs::symlink("/etc", folder.join("link"));
        std::fs::write(folder.join("overlays/prod/overlay.yaml"), overlay(base)).expect("a file");
        repo.commit(base);
        repo.wait_for_log("watch.log", &format!("overlays/prod/overlay.yaml:2:7: base \"{base}\""));
    }
    assert_eq!(machine.pids().len(), 1, "what runs stays");
}

/// No environment is left out because its file cannot be read, and other files are checked with their groups.
#[test]
fn validate_all_reports_unreadable_files_and_checks_other_files_in_their_tree() {
    let process = "kind: Process\nmeta: {namespace: n, name: a}\nhosts: [{group: eu}]\nrun: ./a\n";
    let group = "kind: HostGroup\nmeta: {name: eu}\nhosts: [10.0.0.1]\n";
    let tree = Tree::new(&[("common/groups.yaml", group), ("common/z.yaml", process)]);
    tree.write("o/overlay.yaml", "kind: Overlay\nbase: ../common/groups.yaml\n");
    tree.write("o/b.yaml", process.replace("name: a", "name: b"));
    let (code, _, err) = run(&tree, &["validate", "--all", "."]);
    assert!(code == 0 && err.contains("other files: 1 file: no problems"), "{code} {err}");
    tree.write("common/p.yaml", "kind: Policy\nmeta: {name: p}\nallow: {namespaces: [other]}\n");
    let (code, out, _) = run(&tree, &["validate", "--all", "."]);
    assert!(code == 65 && out.contains("E0407"), "{code} {out}");
    std::fs::remove_file(tree.path().join("common/p.yaml")).expect("a file");
    std::os::unix::fs::symlink("/nowhere", tree.path().join("common/gone.yaml")).expect("a link");
    let (code, out, _) = run(&tree, &["validate", "--all", "."]);
    assert!(code == 65 && out.contains("gone.yaml"), "{code} {out}");
    std::fs::remove_file(tree.path().join("common/gone.yaml")).expect("a file");
    std::fs::remove_file(tree.path().join("o/overlay.yaml")).expect("a file");
    std::os::unix::fs::symlink("/nowhere", tree.path().join("o/overlay.yaml")).expect("a link");
    let (code, out, _) = run(&tree, &["validate", "--all", "."]);
    assert!(code == 65 && out.contains("overlay.yaml"), "{code} {out}");
}
