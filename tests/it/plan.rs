//! `plan` and `diff` as scripts use them: exit codes, forms, filters, and what must never be printed.

use serde_json::Value;

use crate::support::{GOOD, Tree, abide, stderr, stdout, with};

const ROW: &str = r#"{"instance": "0:10.0.0.1:web:api", "registered": true, "hosted": true, "running": true, "owner": "default",
  "spec": {"identity": {"proc_name": "api", "setup_path": "/opt/api", "pid_path": "/run/api.pid", "user": "app"},
           "control": {"start_cmd": "./api"}}}"#;

fn tree(manifest: &str, rows: &str) -> Tree {
    Tree::new(&[("m.yaml", manifest), ("rows.json", &format!("[{rows}]"))])
}

/// Runs with rows, and returns the exit code, stdout and stderr.
fn run(tree: &Tree, args: &[&str]) -> (i32, String, String) {
    let all = [&args[..1], &["m.yaml", "--observed", "rows.json"], &args[1..]].concat();
    let output = abide(&all, tree.path(), b"");
    (output.status.code().expect("a code"), stdout(&output), stderr(&output))
}

fn json(tree: &Tree, args: &[&str]) -> Value {
    let (_, out, err) = run(tree, &[&["plan", "-o", "json"], args].concat());
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}{err}"))
}

fn ops(plan: &Value) -> Vec<String> {
    let waves = plan["waves"].as_array().expect("waves").iter();
    let steps = waves.flat_map(|wave| wave.as_array().expect("steps"));
    steps.map(|step| step["op"].as_str().expect("an op").to_owned()).collect()
}

#[test]
fn exit_codes_of_plan() {
    let settled = tree(GOOD, ROW);
    assert_eq!(run(&settled, &["plan", "--detailed-exitcode"]).0, 0);
    let empty = tree(GOOD, "");
    assert_eq!(run(&empty, &["plan"]).0, 0);
    assert_eq!(run(&empty, &["plan", "--detailed-exitcode"]).0, 2);
    // What is only held is a change too.
    let held = tree(GOOD, r#"{"host": "0:10.0.0.1", "unknown": true}"#);
    assert_eq!(run(&held, &["plan", "--detailed-exitcode"]).0, 2);
    let bad = tree(&with("proc_name: api", "proc_nam: api"), "");
    let (code, out, err) = run(&bad, &["plan"]);
    assert!(code == 65 && out.is_empty() && err.contains("proc_nam"), "{code} {out} {err}");
    assert_eq!(run(&empty, &["plan", "--only", "explode"]).0, 64);
    assert_eq!(run(&empty, &["plan", "--max-delete", "many"]).0, 64);
    let (code, _, err) = run(&tree(GOOD, "{\"instance\": \"nobody\"}"), &["plan"]);
    assert!(code == 1 && err.contains("row 1"), "{err}");
    let output = abide(&["plan", "m.yaml", "--target", "prod"], empty.path(), b"");
    assert_eq!(output.status.code(), Some(64), "no config file names it");
    let output = abide(&["plan", "-", "--observed", "-"], empty.path(), b"");
    assert_eq!(output.status.code(), Some(64));
}

#[test]
fn exit_codes_of_diff() {
    let same = run(&tree(GOOD, ROW), &["diff"]);
    assert_eq!((same.0, same.1.as_str()), (0, "no differences\n"));
    let (code, out, _) = run(&tree(&with("./api", "./api --fast"), ROW), &["diff"]);
    assert_eq!(code, 1);
    assert!(out.contains("  - control.start_cmd: ./api\n  + control.start_cmd: ./api --fast\n"), "{out}");
    assert_eq!(run(&tree(GOOD, "{}"), &["diff"]).0, 2);
    assert_eq!(run(&tree("kind: Nothing\n", ""), &["diff"]).0, 65);
    let refused = run(&tree(GOOD, ROW), &["diff", "--prune", "--caps", "gse-v1", "-o", "json"]);
    assert_eq!((refused.0, refused.1.trim()), (2, r#"{"exit":{"code":2,"reason":"OwnerNotNamed"}}"#));
    assert_eq!(run(&tree(GOOD, ROW), &["diff", "--nonsense"]).0, 2);
}

#[test]
fn a_refusal_is_one_word_for_scripts() {
    let tree = tree(GOOD, ROW);
    let (code, out, err) = run(&tree, &["plan", "--prune", "--caps", "gse-v1", "-o", "json"]);
    assert_eq!((code, out.trim()), (4, r#"{"exit":{"code":4,"reason":"OwnerNotNamed"}}"#));
    assert!(err.contains("--owner NAME"), "{err}");
    let empty = Tree::new(&[("m.yaml", "# nothing\n"), ("rows.json", "[]")]);
    let (code, out, _) = run(&empty, &["plan", "--prune", "-o", "json"]);
    assert_eq!((code, out.trim()), (4, r#"{"exit":{"code":4,"reason":"EmptySet"}}"#));
    let policy = format!("{GOOD}---\napiVersion: abide/v1\nkind: Policy\nmeta: {{name: p}}\nowner: shop\n");
    let owned = self::tree(&policy, &ROW.replace("default", "shop"));
    assert_eq!(json(&owned, &[])["owner"], "shop");
    let (code, _, err) = run(&owned, &["plan", "--owner", "other"]);
    assert!(code == 4 && err.contains("\"shop\""), "{err}");
    // Two owners are two sets, for every caller.
    let two = Tree::new(&[
        ("m.yaml/a/p.yaml", policy.as_str()),
        ("m.yaml/b/p.yaml", "apiVersion: abide/v1\nkind: Policy\nmeta: {name: p}\nowner: bob\n"),
        ("rows.json", "[]"),
    ]);
    assert_eq!(run(&two, &["plan", "--owner", "bob"]).0, 4);
}

#[test]
fn plan_json_has_the_documented_shape() {
    let plan = json(&tree(GOOD, ""), &["--now", "2026-11-15T00:00:00Z"]);
    for (field, value) in [
        ("version", serde_json::json!(1)),
        ("target", "local".into()),
        ("owner", "default".into()),
        ("observed_at", "2026-11-15T00:00:00Z".into()),
        ("held", serde_json::json!([])),
        ("notes", serde_json::json!([])),
    ] {
        assert_eq!(plan[field], value, "{field}");
    }
    let summary = serde_json::json!({"start": 1, "stop": 0, "restart": 0, "reload": 0, "host": 0, "unhost": 0,
        "register": 0, "unregister": 0, "kill": 0, "instances": 1, "held": 0, "unknown": 0});
    assert_eq!(plan["summary"], summary);
    let step = serde_json::json!({"id": "1", "instance": "0:10.0.0.1:web:api", "op": "start", "spec": "new",
        "pid_stays": false,
        "why": [{"rule": "NotRunning", "field": null, "old": null, "new": null, "at": "m.yaml:1:1"}]});
    assert_eq!(plan["waves"], serde_json::json!([[step]]));
    assert_eq!(plan["source"]["path"], "m.yaml");
}

#[test]
fn filters_show_less_and_count_less() {
    let second =
        with("name: api", "name: other").replace("/opt/api", "/opt/other").replace("./api", "./other");
    let both = tree(&format!("{}---\n{second}", with("./api", "./api --fast")), ROW);
    assert_eq!(ops(&json(&both, &[])), ["restart", "start"]);
    let only = json(&both, &["--only", "restart,stop"]);
    assert_eq!((ops(&only), &only["summary"]["start"]), (vec!["restart".to_owned()], &0.into()));
    assert_eq!(
        run(&both, &["plan", "--only", "stop", "--detailed-exitcode"]).0,
        2,
        "what is not shown is still there"
    );
    for (flags, expected) in [
        (&["--include", "web/other"][..], &["start"][..]),
        (&["--exclude", "web/other"], &["restart"]),
        (&["-n", "web"], &["restart", "start"]),
        (&["-n", "db"], &[]),
        (&["--host", "10.0.0.*"], &["restart", "start"]),
        (&["--host", "10.1.*"], &[]),
        (&["-l", "tier=front"], &[]),
        (&["-l", "!tier"], &["restart", "start"]),
    ] {
        assert_eq!(ops(&json(&both, flags)), expected, "{flags:?}");
    }
    assert_eq!(run(&both, &["plan", "--only", "stop", "--out", "p.json"]).0, 64, "a saved plan is whole");
}

#[test]
fn a_saved_plan_has_its_inputs_and_no_secret() {
    let secret =
        with("  monitor_policy", "  env: {TOKEN: {value: correct-horse, secret: true}}\n  monitor_policy");
    let old = ROW.replace(
        r#""control""#,
        r#""env": {"TOKEN": {"value": "battery-staple", "secret": true}}, "control""#,
    );
    let tree = tree(&secret, &old);
    let (code, out, err) = run(&tree, &["plan", "--out", "plan.json", "--adopt"]);
    assert_eq!(code, 0, "{err}");
    let saved = std::fs::read_to_string(tree.path().join("plan.json")).expect("a plan");
    let plan: Value = serde_json::from_str(&saved).expect("JSON");
    assert_eq!(plan["inputs"]["paths"], serde_json::json!(["m.yaml"]));
    assert_eq!(plan["inputs"]["flags"]["adopt"], true);
    assert_eq!(ops(&plan), ["restart"]);
    let others = [
        run(&tree, &["plan", "-o", "json"]).1,
        run(&tree, &["plan", "-o", "markdown"]).1,
        run(&tree, &["diff"]).1,
        run(&tree, &["diff", "-o", "json"]).1,
    ];
    for text in others.iter().chain([&saved, &out, &err]) {
        assert!(!text.contains("horse") && !text.contains("staple"), "{text}");
    }
    // A value that one side declares as secret is not shown for the other side either.
    let plain = old.replace(r#"{"value": "battery-staple", "secret": true}"#, r#""battery-staple""#);
    let (_, out, _) = run(&self::tree(&secret, &plain), &["plan"]);
    assert!(out.contains("env.TOKEN") && !out.contains("staple"), "{out}");
    // Neither by one of two old specs, nor by the message about a wrong row.
    let two = plain.replace("\"spec\"", &format!("\"live_spec\": {}, \"spec\"", spec_of(&old)));
    for verb in ["plan", "diff"] {
        let (_, out, _) = run(&self::tree(GOOD, &two), &[verb]);
        assert!(out.contains("env.TOKEN") && !out.contains("staple"), "{verb}: {out}");
    }
    let wrong = old.replace("\"secret\": true", "\"secret\": \"battery-staple\"");
    let (code, _, err) = run(&self::tree(&secret, &wrong), &["plan"]);
    assert!(code == 1 && err.contains("row 1") && !err.contains("staple"), "{err}");
    let (code, _, err) = run(&tree, &["plan", "--out", "nowhere/plan.json"]);
    assert!(code == 1 && err.contains("nowhere"), "{err}");
}

/// The spec of a row, as written.
fn spec_of(row: &str) -> String {
    serde_json::from_str::<Value>(row).expect("a row")["spec"].to_string()
}

#[test]
fn markdown_is_never_longer_than_asked_for() {
    let hosts: Vec<String> = (1..=40).map(|n| format!("{{ip: 10.0.0.{n}, bk_cloud_id: 0}}")).collect();
    let many: String = (0..30)
        .map(|n| {
            let one =
                with("name: api", &format!("name: api-{n}")).replace("/opt/api", &format!("/opt/api-{n}"));
            format!(
                "---\n{}",
                one.replace("[{ip: 10.0.0.1, bk_cloud_id: 0}]", &format!("[{}]", hosts.join(", ")))
            )
        })
        .collect();
    let tree = tree(&many, "");
    for most in ["0", "10", "300", "1000", "65000"] {
        let (code, out, _) = run(&tree, &["plan", "-o", "markdown", "--max-bytes", most]);
        assert!(code == 0 && out.len() <= most.parse().expect("a number"), "{most}: {}", out.len());
    }
    let (_, out, _) = run(&tree, &["plan", "-o", "markdown", "--max-bytes", "1000"]);
    assert!(out.starts_with("### Abide: 1200 to start\n") && out.contains("more"), "{out}");
}

#[test]
fn the_order_of_files_and_rows_does_not_matter() {
    let processes: Vec<(String, String)> = (0..6)
        .map(|n| {
            let text =
                with("name: api", &format!("name: api-{n}")).replace("/opt/api", &format!("/opt/api-{n}"));
            (format!("{n}.yaml"), text)
        })
        .collect();
    let row = |n: usize| {
        ROW.replace(":api\"", &format!(":api-{n}\""))
            .replace("./api", if n.is_multiple_of(2) { "./api" } else { "./old" })
    };
    let mut seen = Vec::new();
    for order in [[0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4], [2, 4, 0, 5, 1, 3]] {
        let tree = Tree::new::<&str>(&[]);
        for n in order {
            tree.write(&format!("fleet/{}", processes[n].0), &processes[n].1);
        }
        let rows: Vec<String> = order.iter().map(|n| row(*n)).collect();
        tree.write("rows.json", format!("[{}]", rows.join(",")));
        let now = "2026-11-16T08:00:00Z";
        let args = ["plan", "fleet", "--observed", "rows.json", "-o", "json", "--now", now];
        seen.push(stdout(&abide(&args, tree.path(), b"")));
    }
    assert!(seen[0].contains("\"restart\"") && seen.iter().all(|plan| *plan == seen[0]));
}

#[test]
fn a_fingerprint_covers_relevant_inputs_only() {
    let print =
        |manifest: &str, row: &str, flags: &[&str]| json(&tree(manifest, row), flags)["fingerprint"].clone();
    let (changed, pid) = (with("./api", "./api --fast"), ROW.replace("\"owner\"", "\"pid\": 77, \"owner\""));
    let base = print(&changed, ROW, &[]);
    assert_eq!(print(&changed, &pid, &[]), base, "a pid does not matter");
    assert_eq!(print(&format!("# a remark\n{changed}"), ROW, &[]), base, "nor where something stands");
    assert_ne!(print(&with("./api", "./api --slow"), ROW, &[]), base);
    assert_ne!(print(&changed, &ROW.replace("./api\"", "./other\""), &[]), base);
    assert_ne!(print(&changed, &ROW.replace("\"hosted\": true", "\"hosted\": false"), &[]), base);
    assert_ne!(print(&changed, ROW, &["--max-restart", "5"]), base);
}

#[test]
fn a_user_must_be_named_for_every_target_but_local() {
    let nobody = tree(&with(", user: app", ""), "");
    assert_eq!(run(&nobody, &["plan"]).0, 0);
    let (code, _, err) = run(&nobody, &["plan", "--caps", "gse-v1"]);
    assert!(code == 65 && err.contains("m.yaml:1:1") && err.contains("identity.user"), "{err}");
}

#[test]
fn rows_may_be_yaml_and_every_wrong_row_is_named() {
    let tree = Tree::new(&[
        ("m.yaml", GOOD),
        ("rows.yaml", "- instance: 0:10.0.0.1:web:api\n  running: true\n  owner: default\n"),
        (
            "wrong.json",
            "[{\"instance\": \"x\"}, {\"running\": true}, {\"instance\": \"0:10.0.0.1:web:a\", \"pid\": -1}]",
        ),
    ]);
    let output = abide(&["plan", "m.yaml", "--observed", "rows.yaml", "-o", "json"], tree.path(), b"");
    assert!(stdout(&output).contains("OldSpecUnknown"), "{}", stdout(&output));
    let output = abide(&["plan", "m.yaml", "--observed", "wrong.json"], tree.path(), b"");
    let err = stderr(&output);
    assert!(["row 1", "row 2", "row 3"].iter().all(|row| err.contains(row)), "{err}");
    let rows = format!("[{ROW}]");
    let output = abide(&["plan", "m.yaml", "--observed", "-"], tree.path(), rows.as_bytes());
    assert_eq!(stdout(&output), "nothing to do: 1 instance as wanted\n");
}

#[test]
fn a_plan_is_written_to_a_file_of_its_own_or_not_at_all() {
    let tree = tree(GOOD, "");
    tree.write("fleet/m.yaml", GOOD);
    let pipe = tree.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs");
    assert!(made.success());
    std::os::unix::fs::symlink("elsewhere.json", tree.path().join("link.json")).expect("a link");
    tree.write("elsewhere.json", "old");
    for taken in ["pipe", "m.yaml", "rows.json", ".", "-"] {
        let (code, _, err) = run(&tree, &["plan", "--out", taken]);
        assert!(code == 64 && err.contains("--out"), "{taken}: {code} {err}");
    }
    assert_eq!(std::fs::read_to_string(tree.path().join("m.yaml")).expect("a file"), GOOD);
    let output = abide(&["plan", "fleet", "--out", "fleet/plan.json"], tree.path(), b"");
    assert_eq!(output.status.code(), Some(64), "it would be read as a manifest the next time");
    assert_eq!(run(&tree, &["plan", "--out", "link.json"]).0, 0);
    let followed = std::fs::read_to_string(tree.path().join("elsewhere.json")).expect("a file");
    assert!(followed.contains("fingerprint") && tree.path().join("link.json").is_symlink());
}

#[test]
fn values_cannot_control_the_terminal_or_forge_output() {
    let nasty = "./a\\u001b[2J\\u009b31m\\n+ start root/evil on 0:6.6.6.6\\u202e";
    let row = ROW
        .replace("\"./api\"", &format!("\"{nasty}\""))
        .replace("\"owner\"", "\"labels\": {\"x\\ny\\u001b[31m\": \"1\"}, \"owner\"");
    let tree = tree(GOOD, &row);
    for args in [&["plan"][..], &["diff"], &["plan", "-o", "markdown"]] {
        let (_, out, _) = run(&tree, &[args, &["--color", "never"]].concat());
        assert!(!out.contains(['\u{1b}', '\u{9b}', '\u{202e}']), "{args:?}: {out:?}");
        assert!(!out.lines().any(|line| line.starts_with("+ start root")), "{args:?}: {out}");
        assert!(out.contains("start_cmd"), "{args:?}: {out}");
        let coloured = run(&tree, &[args, &["--color", "always"]].concat()).1;
        assert!(!coloured.contains("\u{1b}[2J") && !coloured.contains('\u{9b}'), "{coloured:?}");
    }
}

#[test]
fn oddities_are_warned_about() {
    let typo = ROW.replace("\"running\"", "\"runing\"");
    let (_, _, err) = run(&tree(GOOD, &typo), &["plan"]);
    assert!(err.contains("runing") && err.contains("Did you mean \"running\"?"), "{err}");
    let (code, _, err) = run(&tree(GOOD, ""), &["plan", "-n", "nope"]);
    assert!(code == 0 && err.contains("no process in the manifests matches this selection"), "{err}");
    let (code, out, _) = run(&tree(GOOD, ""), &["plan", "--only", "stop"]);
    assert_eq!((code, out.as_str()), (0, "1 other step not shown (--only)\n"));
    assert_eq!(run(&tree(GOOD, ""), &["plan", "--owner", ""]).0, 64);
    let wrong = ROW.replace("\"owner\"", "\"name\": \"other\", \"owner\"");
    assert!(run(&tree(GOOD, &wrong), &["plan"]).2.contains("differs from that of `instance`"));
    let tree = tree(GOOD, "");
    let mut maybe = crate::support::command(&["plan", "m.yaml"], tree.path());
    let output = maybe.env("ABIDE_PRUNE", "maybe").output().expect("it runs");
    assert_eq!(output.status.code(), Some(64), "maybe is no yes");
}

#[test]
fn a_rename_is_a_rename_in_a_diff_too() {
    let renamed = with("hosts:", "moved_from: web/old\nhosts:");
    let (code, out, _) = run(&tree(&renamed, &ROW.replace(":api\"", ":old\"")), &["diff"]);
    assert_eq!(code, 1);
    assert!(out.contains("- name: web/old\n  + name: web/api") && !out.contains("absent"), "{out}");
}
