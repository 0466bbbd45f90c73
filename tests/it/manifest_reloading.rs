//! Incremental loads of manifests: the cost of a reload, and equality with a full load.

use std::collections::BTreeMap;
use std::sync::Arc;

use abide::manifest::{IncrementalLoader, Limits, Loaded};

use crate::support::Tree;

/// What did not change is not parsed again; what changed is noticed, though size and time may be the same.
#[test]
fn a_reload_costs_only_what_changed() {
    let body = |name: &str, start: &str| {
        format!(
            "apiVersion: abide/v1\nkind: Process\nmeta: {{namespace: web, name: {name}}}\nhosts: [{{ip: 10.0.0.1, bk_cloud_id: 0}}]\n\
             spec:\n  identity: {{proc_name: {name}, setup_path: /opt, pid_path: /run/{name}.pid}}\n  control: {{start_cmd: {start}}}\n"
        )
    };
    let tree = Tree::new(&[("a.yaml", body("a", "./1")), ("b.yaml", body("b", "./1"))]);
    let (paths, limits) = ([tree.path().to_path_buf()], Limits::default());
    let mut again = IncrementalLoader::default();
    let mut read = || {
        again.rescan(&paths, &limits);
        again.load(&limits, &BTreeMap::new())
    };
    let spec = |loaded: &Loaded, name: &str| {
        let mut all = loaded.desired.instances.iter().filter(|(key, _)| key.name.as_str() == name);
        Arc::clone(&all.next().expect("it is wanted").1.spec)
    };
    let first = read();
    assert_eq!((&first.desired, &first.problems), (&tree.load().desired, &Vec::new()));
    // Same length, and the same time within the resolution of the file system.
    for number in 2..9 {
        let before = read();
        tree.write("a.yaml", body("a", &format!("./{number}")));
        let after = read();
        assert_eq!(spec(&after, "a").control.start_cmd.as_deref(), Some(format!("./{number}").as_str()));
        assert!(Arc::ptr_eq(&spec(&before, "b"), &spec(&after, "b")), "b was parsed again");
        assert_eq!(after.desired, tree.load().desired);
    }
    // Broken, then gone.
    tree.write("b.yaml", "apiVersion: abide/v1\nkind: Process\nmeta: [\n");
    let broken = read();
    assert_eq!((broken.problems.len(), broken.desired.instances.len()), (tree.load().problems.len(), 1));
    assert!(!broken.problems.is_empty());
    std::fs::remove_file(tree.path().join("b.yaml")).expect("a file");
    let gone = read();
    assert_eq!((gone.problems.len(), gone.files), (0, 1));
    // As it was, whatever its times say; and not, though its times may say so.
    assert!(again.rescan(&paths, &limits).is_some_and(|changed| changed.is_empty()));
    let file = tree.path().join("a.yaml");
    let touched = std::fs::File::options().append(true).open(&file).expect("a file");
    touched.set_modified(std::time::SystemTime::now()).expect("a time");
    assert!(again.rescan(&paths, &limits).is_some_and(|changed| changed.is_empty()));
    tree.write("a.yaml", body("a", "./9"));
    assert!(again.rescan(&paths, &limits).is_some_and(|changed| changed.len() == 1));
}

/// Replacements in the text of a manifest.
fn edits(step: usize) -> [(&'static str, String); 14] {
    [
        ("./1", format!("./1 --n={step}")),
        ("./1", format!("./1 ${{host.ip}} {step}")),
        ("apiVersion", format!("# {step}\napiVersion")),
        ("meta: {namespace: web,", format!("meta: {{labels: {{l: \"{step}\"}}, namespace: web,")),
        ("spec:\n", "protect: [delete]\nspec:\n".to_owned()),
        ("spec:\n", "state: stopped\nspec:\n".to_owned()),
        ("spec:\n", "depends_on: [e]\nspec:\n".to_owned()),
        ("setup_path: /opt", "setup_path: /srv".to_owned()),
        ("pid_path: /run/", "user: nobody\n    pid_path: /run/".to_owned()),
        ("10.0.0.1", "10.0.0.3".to_owned()),
        ("name: ", "name: x".to_owned()),
        ("start_cmd", "strat_cmd".to_owned()),
        ("proc_name: e", "proc_name: f".to_owned()),
        ("kind: Process", "kind: Process\ninstances: 2".to_owned()),
    ]
}

/// An incremental load gives the result of a full load, for every edit and every kind of notification.
#[test]
fn an_incremental_load_equals_a_full_load() {
    let process = |name: &str, more: &str, start: &str| {
        format!(
            "apiVersion: abide/v1\nkind: Process\nmeta: {{namespace: web, name: {name}}}\n{more}\
             spec:\n  identity:\n    proc_name: {name}\n    setup_path: /opt\n    pid_path: /run/{name}.pid\n  control:\n    \
             start_cmd: {start}\n"
        )
    };
    let here = "hosts: [{ip: 10.0.0.1, bk_cloud_id: 0}]\n";
    let (mut spliced, mut whole) = (0, 0);
    for seed in 0..60 {
        let mut random = fastrand::Rng::with_seed(seed);
        let group = "apiVersion: abide/v1\nkind: HostGroup\nmeta: {name: g}\nhosts: [{ip: 10.0.0.1, bk_cloud_id: 0}, \
                     {ip: 10.0.0.2, bk_cloud_id: 0}]\n";
        let defaults = |user: &str| {
            format!("apiVersion: abide/v1\nkind: Defaults\nspec: {{identity: {{user: {user}}}}}\n")
        };
        let policy = "apiVersion: abide/v1\nkind: Policy\nmeta: {name: p}\nallow: {users: [www, root]}\n";
        let many = "hosts: [{group: g}]\ninstances: 2\ndepends_on: [a]\n";
        let files = ["a.yaml", "b.yaml", "sub/c.yaml", "sub/d.yaml", "e.yaml", "f.yaml"];
        let tree = Tree::new(&[
            ("group.yaml", group.to_owned()),
            ("sub/defaults.yaml", defaults("www")),
            ("sub/policy.yaml", policy.to_owned()),
            ("a.yaml", process("a", here, "./1")),
            ("b.yaml", format!("{}---\n{}", process("b", here, "./1"), process("b2", here, "./1"))),
            ("sub/c.yaml", process("c", here, "./1")),
            (
                "sub/d.yaml",
                process("d", many, "./1 ${instance} ${host.ip}")
                    .replace("/run/d", "/run/d${instance}")
                    .replace("pid_path", "value_key: d-${instance}\n    pid_path"),
            ),
            ("e.yaml", process("e", here, "./1")),
            ("f.yaml", process("f", here, "./1")),
        ]);
        let (paths, limits) = ([tree.path().to_path_buf()], Limits::default());
        let mut again = IncrementalLoader::default();
        assert!(again.rescan(&paths, &limits).is_none(), "nothing is known yet");
        let mut desired = again.load(&limits, &BTreeMap::new()).desired;
        assert_eq!(tree.problems(), [] as [&str; 0]);
        for step in 0..12 {
            let file = files[random.usize(..files.len())];
            let path = tree.path().join(file);
            let text = std::fs::read_to_string(&path).unwrap_or_else(|_| process("a", here, "./1"));
            let edits = edits(step);
            let (from, to) = &edits[random.usize(..edits.len())];
            match random.u8(..20) {
                0 => drop(std::fs::remove_file(&path)),
                1 => tree.write("sub/defaults.yaml", defaults(["www", "root"][random.usize(..2)])),
                2 => tree.write("new.yaml", process("new", here, "./1")),
                _ => tree.write(file, text.replacen(from, to, 1)),
            }
            let touched: BTreeMap<_, _> =
                [path, tree.path().join("sub/defaults.yaml"), tree.path().join("new.yaml")]
                    .into_iter()
                    .map(|path| (path, false))
                    .collect();
            // A path that does not exist any more may have been a folder.
            let changed = match random.bool() {
                true => again.refresh_paths(&paths, &touched, &limits),
                false => None,
            };
            let changed = changed.or_else(|| again.rescan(&paths, &limits));
            match changed.as_ref().and_then(|changed| again.splice(changed, &desired, &limits)) {
                Some(new) => {
                    spliced += usize::from(!new.wants.is_empty());
                    desired.instances.extend(new.wants);
                }
                None => {
                    whole += 1;
                    desired = again.load(&limits, &BTreeMap::new()).desired;
                }
            }
            let fresh = tree.load();
            assert!(desired == fresh.desired, "seed {seed}, step {step}: {file} {from} → {to}");
        }
    }
    assert!(spliced > 50 && whole > 100, "{spliced} put in, {whole} read whole");
}
