//! Manifest loading: which files are read, their limits, and the instances that documents expand to.

use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::Command;

use abide::manifest::{self, Limits};
use abide::model::{EnvValue, State};

use crate::support::{GOOD, Tree, abide, stdout, with};

/// The instances of a tree, as keys.
fn instances(tree: &Tree) -> Vec<String> {
    tree.load().desired.instances.keys().map(ToString::to_string).collect()
}

/// [`GOOD`] under another name, with an identity of its own.
fn named(name: &str) -> String {
    GOOD.replace("name: api", &format!("name: {name}")).replace("/opt/api", &format!("/opt/{name}"))
}

#[test]
fn directories_are_read_recursively_without_hidden_files() {
    let tree = Tree::new(&[
        ("a.yaml", named("a")),
        ("deep/er/b.yml", named("b")),
        ("c.JSON", "{}".replace("{}", &json(&named("c")))),
        ("notes.txt", "not: [a manifest".into()),
        (".hidden.yaml", "not: [a manifest".into()),
        (".git/config.yaml", "not: [a manifest".into()),
        ("deep/.cache/x.yaml", "not: [a manifest".into()),
        ("abide.yaml", "targets: {}".into()),
    ]);
    assert_eq!(tree.problems(), [] as [&str; 0]);
    assert_eq!(instances(&tree), ["0:10.0.0.1:web:a", "0:10.0.0.1:web:b", "0:10.0.0.1:web:c"]);
}

fn json(yaml: &str) -> String {
    let value: serde_json::Value = serde_yaml::from_str(yaml).expect("yaml");
    value.to_string()
}

#[test]
fn e0110_links_out_of_the_tree_are_not_followed_and_not_quoted() {
    let outside = Tree::new(&[("secret.yaml", "password: hunter2")]);
    let tree = Tree::new(&[("a.yaml", GOOD)]);
    symlink(outside.path().join("secret.yaml"), tree.path().join("link.yaml")).unwrap();
    symlink(outside.path(), tree.path().join("folder")).unwrap();
    symlink("/nowhere/at/all.yaml", tree.path().join("dangling.yaml")).unwrap();
    let problems = tree.problems();
    let starts: Vec<_> = problems.iter().map(|line| line.split(" | ").next().unwrap_or_default()).collect();
    assert_eq!(
        starts,
        [
            "dangling.yaml:1:1 E0110 cannot follow the link: no such file or directory",
            "folder:1:1 E0110 the link points outside of the tree and is not followed",
            "link.yaml:1:1 E0110 the link points outside of the tree and is not followed",
        ]
    );
    assert!(!problems.concat().contains("hunter2"));
    assert_eq!(instances(&tree), ["0:10.0.0.1:web:api"], "the good file stays good");
}

#[test]
fn links_within_the_tree_are_read_once_and_loops_end() {
    let tree = Tree::new(&[("..2026/a.yaml", named("hidden")), ("real/b.yaml", named("b"))]);
    symlink("..2026", tree.path().join("..data")).unwrap();
    symlink("..data/a.yaml", tree.path().join("a.yaml")).unwrap();
    symlink("real", tree.path().join("again")).unwrap();
    symlink("..", tree.path().join("real/loop")).unwrap();
    symlink("real/b.yaml", tree.path().join("b-again.yaml")).unwrap();
    assert_eq!(tree.problems(), [] as [&str; 0]);
    assert_eq!(instances(&tree), ["0:10.0.0.1:web:b", "0:10.0.0.1:web:hidden"]);
}

#[test]
fn e0110_special_files_are_problems_and_do_not_block() {
    let tree = Tree::new(&[("a.yaml", GOOD)]);
    let fifo = tree.path().join("fifo.yaml");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let _socket = UnixListener::bind(tree.path().join("socket.yaml")).unwrap();
    let problems = tree.problems();
    assert_eq!(problems.len(), 2, "{problems:?}");
    assert!(problems.iter().all(|line| line.contains("E0110 not a regular file or directory")));
    // Named directly, and as a device.
    for path in [fifo.to_str().unwrap(), "/dev/zero", "/dev/null/x", "/nowhere"] {
        let output = abide(&["validate", "-o", "json", path], tree.path(), b"");
        assert_eq!(output.status.code(), Some(65), "{path}");
        assert!(stdout(&output).contains("\"E0110\""), "{path}: {}", stdout(&output));
    }
}

#[test]
fn standard_input_is_yaml_or_json() {
    let here = Tree::new::<&str>(&[]);
    for (text, code) in [(GOOD.to_owned(), 0), (json(GOOD), 0), ("meta: [".into(), 65), (String::new(), 0)] {
        let output = abide(&["validate", "-"], here.path(), text.as_bytes());
        assert_eq!(output.status.code(), Some(code), "{text}");
    }
    let output = abide(&["validate", "-q", "-"], here.path(), b"meta: [");
    assert!(
        stdout(&output).starts_with("error[E0101]: <stdin>:1:7: unclosed bracket"),
        "{}",
        stdout(&output)
    );
}

#[test]
fn e0112_and_e0113_misleading_text() {
    let cases: [(&[u8], &str); 10] = [
        (
            b"a: 1 # fine\r  b: 2\r\n",
            "a.yaml:1:12 E0113 the file contains a line end that only some programs recognize, U+000D",
        ),
        (
            "a: 1 # fine\u{2028}b: 2\n".as_bytes(),
            "a.yaml:1:12 E0113 the file contains a line end that only some programs recognize, U+2028",
        ),
        (
            "a: 1 # fine\u{85}b: 2\n".as_bytes(),
            "a.yaml:1:12 E0113 the file contains a line end that only some programs recognize, U+0085",
        ),
        (b"\xff\xfem\0e\0", "a.yaml:1:1 E0112 the file is UTF-16"),
        (b"\xef\xbb\xbfmeta: {}\n", "a.yaml:1:1 E0113 the file begins with a byte order mark, U+FEFF"),
        (b"a: 1\nb: \xff\n", "a.yaml:2:4 E0112 byte 0xff is not UTF-8"),
        (b"a: 1\n\0\n", "a.yaml:2:1 E0112 the file contains a NUL byte, U+0000"),
        (b"a: \x1b[2J\n", "a.yaml:1:4 E0112 the file contains a control character, U+001B"),
        (
            "a: x\u{202e}y\n".as_bytes(),
            "a.yaml:1:5 E0113 the file contains a character that reverses the displayed text, U+202E",
        ),
        (b"\x7fELF\x02\x01\x01\0\0", "a.yaml:1:1 E0112 the file contains a control character, U+007F"),
    ];
    for (bytes, expected) in cases {
        let problems = Tree::new(&[("a.yaml", bytes)]).problems();
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].starts_with(expected), "{problems:?}");
    }
}

#[test]
fn many_documents_in_a_file_however_they_are_separated() {
    let ends = "---\n# nothing here\n---\n".to_owned()
        + &named("a")
        + "...\n"
        + &named("b")
        + "--- # third\n"
        + &named("c");
    assert_eq!(instances(&Tree::new(&[("a.yaml", ends)])).len(), 3);
    let jsons = json(&named("a")) + &json(&named("b")) + "\n\n" + &json(&named("c"));
    assert_eq!(instances(&Tree::new(&[("a.json", jsons)])).len(), 3);
    let list = format!("[{},\n{}]", json(&named("a")), json(&named("b")));
    assert_eq!(instances(&Tree::new(&[("a.json", &list)])).len(), 2);
    let broken = list.replace("/opt/b", "opt/b");
    let problems = Tree::new(&[("a.json", &broken)]).problems();
    assert!(problems.len() == 1 && problems[0].starts_with("a.json:2:"), "{problems:?}");
    // Places in a value that does not begin its line are places in the file.
    let one_line = json(&named("a")) + " {\"meta\": 5}";
    let column = json(&named("a")).len() + 11;
    let problems = Tree::new(&[("a.json", &one_line)]).problems();
    assert!(
        problems.iter().any(|line| line.starts_with(&format!("a.json:1:{column} E0103"))),
        "{problems:?}"
    );
}

#[test]
fn groups_instances_variables_and_defaults_make_instances() {
    let tree = Tree::new(&[
        (
            "defaults.yaml",
            "kind: Defaults\nspec:\n  identity: {log_path: '/var/log/${name}.log', user: root}\n  env: {A: far, B: far}\n  configmap: [{path: /etc/far}]\n",
        ),
        (
            "near/defaults.yaml",
            "kind: Defaults\nspec: {identity: {user: app}, env: {B: near}, configmap: [{path: /etc/near}]}\n",
        ),
        (
            "near/api.yaml",
            &with("{ip: 10.0.0.1, bk_cloud_id: 0}", "{group: g}, {ip: '2001:db8::1', bk_cloud_id: 2}")
                .replace(", user: app", ", value_key: 'k-${instance}-${host.ip}'")
                .replace("spec:", "instances: 2\ndepends_on: [db]\nmoved_from: old\nspec:"),
        ),
        (
            "db.yaml",
            &with("name: api", "name: db")
                .replace("spec:", "state: stopped\nspec:")
                .replace("bk_cloud_id: 0", "bk_cloud_id: 7, bk_supplier_id: 3"),
        ),
        (
            "group.yaml",
            "kind: HostGroup\nmeta: {name: g}\nhosts: [{ip: 10.0.0.9, bk_cloud_id: 1, bk_agent_id: a9}]\n",
        ),
    ]);
    let loaded = tree.load();
    assert_eq!(loaded.errors(), 0, "{:?}", loaded.problems);
    let keys: Vec<_> = loaded.desired.instances.keys().map(ToString::to_string).collect();
    assert_eq!(
        keys,
        [
            "1:10.0.0.9:web:api_1",
            "1:10.0.0.9:web:api_2",
            "2:2001:db8::1:web:api_1",
            "2:2001:db8::1:web:api_2",
            "7:10.0.0.1:web:db"
        ]
    );
    let want = |key: &str| &loaded.desired.instances[&key.parse().unwrap()];

    let api = want("1:10.0.0.9:web:api_2");
    assert_eq!(api.spec.identity.value_key.as_deref(), Some("k-2-10.0.0.9"));
    assert_eq!(
        api.spec.identity.log_path.as_deref(),
        Some("/var/log/api_2.log"),
        "the far Defaults, with variables"
    );
    assert_eq!(api.spec.identity.user.as_deref(), Some("app"), "the near Defaults win");
    assert_eq!(api.spec.env["A"], EnvValue::Text("far".into()), "maps merge");
    assert_eq!(api.spec.env["B"], EnvValue::Text("near".into()));
    assert_eq!(api.spec.configmap.len(), 1, "lists are replaced");
    assert_eq!(api.spec.configmap[0].path.as_deref(), Some("/etc/near"));
    assert_eq!(api.host.agent().unwrap().as_str(), "a9");
    assert!(api.origin.place.to_string().ends_with("near/api.yaml:1:1"), "{}", api.origin.place);
    assert_eq!(api.origin.depends_on.iter().map(ToString::to_string).collect::<Vec<_>>(), ["web/db"]);
    assert!(api.origin.moved_from.is_empty(), "only the first one takes over an older name");
    let first =
        want("1:10.0.0.9:web:api_1").origin.moved_from.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(first, ["web/old", "web/api"]);

    let db = want("7:10.0.0.1:web:db");
    assert_eq!((db.origin.state, db.host.supplier), (State::Stopped, Some(3)));
    assert_eq!(db.spec.identity.user.as_deref(), Some("app"), "its own word wins");
    let unset = (
        &db.spec.control.stop_cmd,
        db.spec.monitor.start_check_secs,
        db.spec.resource.cpu,
        db.spec.report_id,
    );
    assert_eq!(unset, (&None, None, None, None), "unset stays unset");
}

#[test]
fn an_empty_text_means_unset_and_keeps_defaults_out() {
    let tree = Tree::new(&[
        ("d.yaml", "kind: Defaults\nspec: {control: {stop_cmd: ./stop}}\n".to_owned()),
        ("a.yaml", with("./api}", "./api, stop_cmd: \"\"}")),
    ]);
    let loaded = tree.load();
    assert_eq!(loaded.problems, []);
    assert!(loaded.desired.instances.values().all(|want| want.spec.control.stop_cmd.is_none()));
}

#[test]
fn an_error_in_defaults_is_reported_once_and_disables_its_directory() {
    let tree = Tree::new(&[
        ("x/d.yaml", "kind: Defaults\nspec: {monitor_policy: {start_retries: -1}}\n".to_owned()),
        ("x/a.yaml", named("a")),
        ("x/b.yaml", named("b")),
        ("c.yaml", named("c")),
    ]);
    assert_eq!(tree.problems().len(), 1, "{:?}", tree.problems());
    assert_eq!(instances(&tree), ["0:10.0.0.1:web:c"]);
}

#[test]
fn conflicting_claims_leave_neither() {
    let tree = Tree::new(&[("a.yaml", GOOD.to_owned()), ("b.yaml", GOOD.to_owned()), ("c.yaml", named("c"))]);
    assert_eq!(instances(&tree), ["0:10.0.0.1:web:c"]);
}

#[test]
fn e0111_limits_hold_and_can_be_moved() {
    let two = GOOD.to_owned() + "---\n" + &named("b");
    let tree = Tree::new(&[("a.yaml", &two)]);
    let base = Limits::default();
    let limits = [
        Limits { file_bytes: 100, ..base.clone() },
        Limits { tree_bytes: 100, ..base.clone() },
        Limits { document_bytes: 100, ..base.clone() },
        Limits { documents: 1, ..base.clone() },
        Limits { instances: 1, ..base.clone() },
    ];
    for limits in limits {
        let loaded = manifest::load(&[tree.path().to_path_buf()], &limits);
        assert!(
            loaded.problems.iter().all(|p| p.code.text() == "E0111") && loaded.errors() > 0,
            "{limits:?}"
        );
    }
    let deep = with("./api}", "./api}\n  x: [[[[1]]]]\n  y: *a\n  z: &a 1");
    let tree = Tree::new(&[("a.yaml", deep.replace("y: *a\n  z: &a 1", "z: &a 1\n  y: [*a, *a]"))]);
    for (limits, flag) in [
        (Limits { depth: 4, ..base.clone() }, "--max-depth"),
        (Limits { aliases: 1, ..base.clone() }, "--max-aliases"),
        (Limits { values: 10, ..base.clone() }, "--max-values"),
    ] {
        let problems = manifest::load(&[tree.path().to_path_buf()], &limits).problems;
        assert!(
            problems.len() == 1 && problems[0].hint.as_deref().unwrap_or_default().contains(flag),
            "{problems:?}"
        );
        assert!(problems[0].line > 0);
    }
    let output = abide(&["validate", "--max-depth", "4", "a.yaml"], tree.path(), b"");
    assert!(stdout(&output).contains("E0111"), "{}", stdout(&output));
}

#[test]
fn one_file_named_twice_is_read_once() {
    let tree = Tree::new(&[("a.yaml", GOOD)]);
    let paths = [
        tree.path().to_path_buf(),
        tree.path().join("a.yaml"),
        PathBuf::from(format!("{}/./a.yaml", tree.path().display())),
    ];
    let loaded = manifest::load(&paths, &Limits::default());
    assert_eq!((loaded.problems.len(), loaded.desired.instances.len(), loaded.files), (0, 1, 1));
}

#[test]
fn a_named_link_is_checked_before_it_is_read() {
    let outside = Tree::new(&[("secret.yaml", "password: hunter2")]);
    let tree = Tree::new(&[("a.yaml", GOOD)]);
    symlink(outside.path().join("secret.yaml"), tree.path().join("b.yaml")).unwrap();
    symlink("a.yaml", tree.path().join("c.yaml")).unwrap();
    let output = abide(&["validate", "a.yaml", "b.yaml", "c.yaml"], tree.path(), b"");
    assert!(stdout(&output).contains("E0110") && !stdout(&output).contains("hunter2"), "{}", stdout(&output));
    assert_eq!(abide(&["validate", "c.yaml"], tree.path(), b"").status.code(), Some(0));
}

#[test]
fn tags_and_leading_zeros_are_not_numbers() {
    for value in ["!!str 5", "!foo 5", "010", "00"] {
        for field in ["cpu", "mem", "fd"] {
            let text = with("./api}", &format!("./api}}\n  resource: {{{field}: {value}}}"));
            let problems = Tree::new(&[("a.yaml", &text)]).problems();
            assert!(problems.len() == 1 && problems[0].contains("E0103"), "{field}: {value}: {problems:?}");
        }
    }
}

#[test]
fn a_fault_in_defaults_makes_nothing_missing_below() {
    let tree = Tree::new(&[
        ("d/defaults.yaml", "kind: Defaults\nspec: {control: {start_cmd: 5}}\n".to_owned()),
        ("d/sub/p.yaml", with("  control: {start_cmd: ./api}\n", "")),
    ]);
    let problems = tree.problems();
    assert!(problems.len() == 1 && problems[0].starts_with("d/defaults.yaml:2:"), "{problems:?}");
}

#[test]
fn past_the_limit_of_instances_everything_is_still_checked() {
    let many = GOOD
        .replace("spec:", "instances: 3\nspec:")
        .replace("/run/api.pid", "/run/api.pid, value_key: \"${instance}\"");
    let tree = Tree::new(&[
        ("a.yaml", many),
        ("b.yaml", named("b").replace("10.0.0.1", "x").replace("./api", "\"${X}\"")),
    ]);
    let limits = Limits { instances: 2, ..Limits::default() };
    let codes: Vec<_> = manifest::load(&[tree.path().to_path_buf()], &limits)
        .problems
        .iter()
        .map(|p| p.code.text())
        .collect();
    assert_eq!(codes, ["E0111", "E0203", "E0209"]);
}

#[test]
fn host_fields_are_merged_across_documents() {
    let group = "kind: HostGroup\nmeta: {name: g}\nhosts: [{ip: 10.0.0.1, bk_cloud_id: 0, bk_supplier_id: 3, bk_agent_id: a1}]\n";
    let loaded = Tree::new(&[("a.yaml", GOOD), ("g.yaml", group)]).load();
    let host = &loaded.desired.instances.values().next().expect("one").host;
    assert_eq!(
        (host.supplier, host.agent_id.as_ref().map(ToString::to_string)),
        (Some(3), Some("a1".into()))
    );
}

#[test]
fn items_of_a_list_know_their_own_lines() {
    let list = format!("[{},\n{}]", json(&named("a")), json(&named("b")));
    let yaml = format!("- {}\n- {}\n", json(&named("a")), json(&named("b")));
    for (file, text) in [("a.json", list), ("a.yaml", yaml)] {
        let loaded = Tree::new(&[(file, text)]).load();
        let lines: Vec<_> = loaded.desired.instances.values().map(|want| want.origin.place.line).collect();
        assert_eq!(lines, [1, 2], "{file}: {:?}", loaded.problems);
    }
}

#[test]
fn a_json_list_is_not_taken_for_a_map() {
    let good: serde_json::Value = serde_yaml::from_str(GOOD).expect("YAML");
    let mut cases = Vec::new();
    for (pointer, list) in [
        ("/spec/control", serde_json::json!(["evil"])),
        ("/spec/monitor_policy", serde_json::json!([1])),
        ("/spec/identity", serde_json::json!(["a", "/x", "/p", null, null, "u", null])),
        ("/meta", serde_json::json!(["w", "n"])),
        ("/hosts/0", serde_json::json!(["10.0.0.1", 0])),
    ] {
        let mut value = good.clone();
        *value.pointer_mut(pointer).expect("it is there") = list;
        cases.push((pointer, value));
    }
    cases.push(("twice a list", serde_json::json!([[good.clone()]])));
    for (what, value) in cases {
        for file in ["a.json", "a.yaml"] {
            let problems = Tree::new(&[(file, value.to_string())]).problems();
            assert!(
                problems.iter().any(|line| line.contains("E0103") && line.contains(", not a list")),
                "{what} {file}: {problems:?}"
            );
        }
    }
    assert_eq!(Tree::new(&[("a.json", good.to_string())]).problems(), [] as [&str; 0]);
}

#[test]
fn a_long_key_of_json_hides_nothing() {
    let key = "k".repeat(2_000);
    let mut value: serde_json::Value = serde_yaml::from_str(GOOD).expect("YAML");
    value["meta"]["labels"] = serde_json::json!({key: "x"});
    let text = value.to_string();
    let problems = Tree::new(&[("a.json", text.replace("start_cmd", "strat_cmd"))]).problems();
    let codes: Vec<_> = problems.iter().map(|line| line.split(' ').nth(1).unwrap_or_default()).collect();
    assert_eq!(codes.len(), 2, "{problems:?}");
    assert!(codes.contains(&"E0102") && codes.contains(&"E0208"), "{problems:?}");
}
