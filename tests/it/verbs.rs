//! Verbs of the command line, as scripts and users run them.

use std::io::Read;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::support::{GOOD, Tree, abide, command, project, stderr, stdout, with};

#[test]
fn validate_prints_problems_for_scripts() {
    let tree = Tree::new(&[
        ("a.yaml", with("start_cmd", "strat_cmd")),
        ("b.yaml", with("name: api}", "name: b, labels: {n: 1}}").replace("/opt/api", "/opt/b")),
    ]);
    let output = abide(&["validate", "-o", "json", "."], tree.path(), b"");
    assert_eq!(output.status.code(), Some(65));
    let problems: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    assert_eq!(
        problems[0],
        json!({
            "file": "a.yaml", "line": 7, "column": 13, "severity": "error", "code": "E0102",
            "message": "spec.control has no field \"strat_cmd\"", "hint": "did you mean \"start_cmd\"?",
        })
    );
    assert_eq!(
        (&problems[1]["severity"], &problems[1]["code"], problems.as_array().map(Vec::len)),
        (&json!("warning"), &json!("W0501"), Some(2))
    );
    assert_eq!(stderr(&output), "2 documents in 2 files, 1 instance on 1 host: 1 error, 1 warning\n");
    let good = abide(&["validate", "-o", "json", "b.yaml"], tree.path(), b"");
    assert_eq!(good.status.code(), Some(0), "only errors make 65");
    let none = abide(&["validate", "-o", "json", "-"], tree.path(), GOOD.as_bytes());
    assert_eq!(stdout(&none), "[]\n");
}

#[test]
fn validate_shows_the_line_with_a_marker() {
    let tree = Tree::new(&[("a.yaml", with("start_cmd", "strat_cmd"))]);
    let output = abide(&["validate", "-q", "a.yaml"], tree.path(), b"");
    let expected = "\
error[E0102]: a.yaml:7:13: spec.control has no field \"strat_cmd\"
  |
7 |   control: {strat_cmd: ./api}
  |             ^^^^^^^^^
hint: did you mean \"start_cmd\"?

";
    assert_eq!((stdout(&output).as_str(), stderr(&output).as_str()), (expected, ""));
    let colour = abide(&["validate", "--color", "always", "a.yaml"], tree.path(), b"");
    assert!(stdout(&colour).contains("\u{1b}["));
}

#[test]
fn validate_annotates_github_workflows() {
    let tree = Tree::new(&[("a,b%.yaml", with("start_cmd", "strat_cmd"))]);
    let output = abide(&["validate", "-q", "-o", "github", "."], tree.path(), b"");
    let expected = "::error file=a%2Cb%25.yaml,line=7,col=13,title=E0102::spec.control has no field \"strat_cmd\"%0Ahint: did you mean \"start_cmd\"?\n";
    assert_eq!(stdout(&output), expected);
}

#[test]
fn output_cannot_control_the_terminal() {
    let tree = Tree::new(&[("a\u{1b}[31m.yaml", with("start_cmd", "\"\\e[31mx\""))]);
    let output = abide(&["validate", "."], tree.path(), b"");
    assert!(!stdout(&output).contains('\u{1b}'), "{:?}", stdout(&output));
}

#[test]
fn init_writes_a_manifest_that_is_valid_and_runs_the_command() {
    let tree = Tree::new::<&str>(&[]);
    for words in [
        &[][..],
        &["--", "sleep", "1000"],
        &["--", "/usr/bin/env", "A=${B}", "it's", "a \"b\""],
        &["--", "123"],
        &["--", "no"],
    ] {
        let output = abide(&[&["init"], words].concat(), tree.path(), b"");
        let text = stdout(&output);
        let checked = Tree::new(&[("m.yaml", &text)]).load();
        assert_eq!(
            (checked.problems.len(), checked.desired.instances.len()),
            (0, 1),
            "{words:?}\n{text}\n{:?}",
            checked.problems
        );
        let spec = &checked.desired.instances.values().next().expect("one").spec;
        assert!(spec.identity.setup_path == tree.path().display().to_string());
        assert_eq!(spec.sandbox.no_new_privs, Some(true), "new manifests are restricted");
        if let [_, command @ ..] = words {
            let start = spec.control.start_cmd.as_deref().expect("a command");
            let shell = std::process::Command::new("sh")
                .args(["-c", &format!("printf '%s\\n' {}", start.strip_prefix("exec ").unwrap_or(start))])
                .output()
                .expect("a shell");
            assert_eq!(stdout(&shell), command.join("\n") + "\n");
        }
    }
}

#[test]
fn explain_shows_a_field_and_its_provenance() {
    let manifests = project();
    let explain = |args: &[&str]| {
        let output = abide(&[&["explain"], args].concat(), &manifests, b"");
        (output.status.code().unwrap_or(-1), stdout(&output) + &stderr(&output))
    };
    let (code, text) = explain(&["monitor_policy.start_check_secs"]);
    for part in [
        "whole number, 0 to 86400",
        "default   5",
        "GSE register_proc_info",
        "register: the spec is registered again",
    ] {
        assert!(code == 0 && text.contains(part), "{part}\n{text}");
    }
    assert_eq!(explain(&["spec.control.start_cmd"]), explain(&["control.start_cmd"]));
    assert!(explain(&["control.start_cmd"]).1.contains("restart: the process is restarted"));
    assert!(
        explain(&["identity.log_path"]).1.contains("in foreground mode restart: the process is restarted")
    );
    assert!(explain(&["configmap[0].md5"]).1.contains("32 hex digits"));
    assert!(explain(&["Policy.windows"]).1.contains("tz"));
    assert!(explain(&["E0402"]).1.contains("share an identity"));
    assert_eq!(explain(&["problems"]).1.lines().count(), abide::manifest::Code::ALL.len());
    assert!(explain(&[]).1.contains("monitor_policy.crontab_rule"));
    assert_eq!(
        explain(&["control.strat_cmd"]),
        (
            64,
            "error: \"control.strat_cmd\" is not a manifest field, reason, state or code\nhint: did you mean control.start_cmd?\n"
                .into()
        )
    );
    let (_, given) = explain(&["start_retries", "--in", "manifests", "--process", "sample/workers"]);
    assert!(
        given.starts_with("sample/workers  monitor_policy.start_retries: 2  manifests/workers.yaml:"),
        "{given}"
    );
    let (_, given) = explain(&["monitor_policy", "--in", "manifests", "--process", "sample/workers"]);
    assert!(given.contains("monitor_policy.start_retries: 2  manifests/workers.yaml:"), "{given}");
    assert!(
        given.contains("monitor_policy.start_check_secs: 1  manifests/fleet.yaml:")
            && given.contains(", from Defaults"),
        "{given}"
    );
}

#[test]
fn every_field_of_the_spec_can_be_explained() {
    for field in abide::model::Field::ALL {
        let output = abide(&["explain", field.path()], &project(), b"");
        assert!(stdout(&output).contains("\nchange "), "{field}: {}", stdout(&output));
    }
}

#[test]
fn completions_and_man_pages_list_the_verbs() {
    for shell in ["bash", "zsh", "fish"] {
        let output = abide(&["completions", shell], &project(), b"");
        assert!(output.status.success() && stdout(&output).contains("validate"), "{shell}");
    }
    assert!(stdout(&abide(&["man"], &project(), b"")).contains(".TH abide 1"));
    assert!(stdout(&abide(&["man", "validate"], &project(), b"")).contains("abide\\-validate"));
    assert_eq!(abide(&["man", "valdate"], &project(), b"").status.code(), Some(64));
    let version: Value =
        serde_json::from_str(&stdout(&abide(&["version", "-o", "json"], &project(), b""))).expect("JSON");
    assert_eq!(version["version"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn usage_errors_exit_with_64() {
    for args in [
        &["validate"][..],
        &["frobnicate"],
        &["validate", "--nope", "x"],
        &["convert", "x", "--to", "yaml"],
        &[],
        &["validate", "--max-depth", "1000", "x"],
        &["validate", "--max-file-bytes", "x", "y"],
    ] {
        let output = abide(args, &project(), b"");
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(64), ""), "{args:?}");
    }
    for args in [&["--help"][..], &["validate", "--help"], &["--version"]] {
        let output = abide(args, &project(), b"");
        assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn the_help_lists_verbs_by_group() {
    let help = |args: &[&str]| stdout(&abide(args, &project(), b""));
    let text = help(&["--help"]);
    let headings = ["Write manifests", "Plan and apply", "Inspect", "Operate", "Run", "Convert", "Tools"];
    let positions: Vec<_> = headings.iter().map(|heading| text.find(&format!("\n{heading}:\n"))).collect();
    assert!(positions.iter().all(Option::is_some) && positions.is_sorted(), "{text}");
    assert!(text.contains("  apply        Apply manifests: plan, confirm, execute, verify\n"), "{text}");
    assert_eq!((help(&["-h"]), help(&["help"])), (text.clone(), text));
    assert!(help(&["man"]).contains("abide\\-rollback(1)"), "the manual page lists all verbs");
}

#[test]
fn every_flag_has_its_variable() {
    for verb in
        ["init", "validate", "render", "convert", "explain", "schema", "completions", "man", "version"]
    {
        let help = stdout(&abide(&[verb, "--help"], &project(), b""));
        // A flag begins a line, and goes on to the next line that begins one.
        let mut flags: Vec<String> = Vec::new();
        for line in help.lines() {
            let begins = line.starts_with("  -") || line.starts_with("      --");
            match flags.last_mut() {
                _ if begins => flags.push(line.to_owned()),
                Some(flag) => flag.push_str(line),
                None => {}
            }
        }
        assert!(flags.len() >= 5, "{verb}: {flags:?}");
        for flag in flags.iter().filter(|flag| !flag.contains("--help") && !flag.contains("--version")) {
            assert!(flag.contains("[env: ABIDE_"), "{verb}: {flag}");
        }
    }
    let tree = Tree::new(&[("a.yaml", GOOD)]);
    let output =
        command(&["validate", "a.yaml"], tree.path()).env("ABIDE_OUTPUT", "json").output().expect("it runs");
    assert_eq!(stdout(&output), "[]\n");
}

#[test]
fn a_reader_that_goes_away_is_not_an_error() {
    let mut child = command(&["explain"], &project())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    drop(child.stdout.take());
    let status = child.wait().expect("it ends");
    let mut errors = String::new();
    child.stderr.take().expect("a pipe").read_to_string(&mut errors).expect("text");
    assert_eq!((status.code(), errors.as_str()), (Some(0), ""));
}

#[test]
fn secrets_are_shown_nowhere() {
    let text = with(
        "./api}",
        "./api}\n  env:\n    A: {value: hunter2, secret: true, oops: 1}\n    B:\n      value: 4711\n      secret: true\n    C: {value: hunter2, secret: true}",
    );
    let tree = Tree::new(&[
        ("a.yaml", text.clone()),
        ("b.yaml", text.replace(", oops: 1", "").replace("4711", "\"4711\"")),
    ]);
    for form in ["text", "json", "github"] {
        let output = abide(&["validate", "-o", form, "a.yaml"], tree.path(), b"");
        let all = stdout(&output) + &stderr(&output);
        assert!(all.contains("E0102") && all.contains("W0501"), "{all}");
        assert!(!all.contains("hunter2") && !all.contains("4711"), "{all}");
    }
    let output = abide(&["explain", "env", "--in", "b.yaml"], tree.path(), b"");
    let given = stdout(&output);
    assert!(
        given.contains("env.C: (secret)") && !given.contains("hunter2") && !given.contains("4711"),
        "{given}"
    );
    let body = with("apiVersion: abide/v1\nkind: Process\n", "") + "bk_app_secret: hunter2\n";
    let output = abide(&["validate", "-"], tree.path(), body.as_bytes());
    assert!(stdout(&output).contains("W0502") && !stdout(&output).contains("hunter2"), "{}", stdout(&output));
}

#[test]
fn an_env_entry_is_set_as_a_whole() {
    let tree = Tree::new(&[
        ("d.yaml", "kind: Defaults\nspec: {env: {C: {file: /mid}, D: far}}\n".to_owned()),
        ("sub/p.yaml", with("./api}", "./api}\n  env: {C: own}")),
    ]);
    let given = |field: &str| stdout(&abide(&["explain", field, "--in", "."], tree.path(), b""));
    assert_eq!(given("env.C"), "web/api  env.C: \"own\"  sub/p.yaml:8:12\n");
    assert_eq!(
        given("env"),
        "web/api  env.C: \"own\"  sub/p.yaml:8:12\nweb/api  env.D: \"far\"  d.yaml:2:34, from Defaults\n"
    );
}

#[test]
fn a_full_disk_is_an_error() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
    for args in [&["schema"][..], &["explain"], &["validate", "-o", "json", "manifests"]] {
        let status = command(args, &project())
            .stdout(full.try_clone().expect("a file"))
            .stderr(Stdio::null())
            .status()
            .expect("it runs");
        assert_eq!(status.code(), Some(1), "{args:?}");
    }
}

#[test]
fn boolean_variables_accept_common_spellings() {
    for yes in ["1", "true", "yes"] {
        let output = command(&["validate", "manifests"], &project())
            .env("ABIDE_QUIET", yes)
            .output()
            .expect("it runs");
        assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""), "{yes}");
    }
}

#[test]
fn init_refuses_commands_that_no_manifest_can_express() {
    for word in ["/", "..", ""] {
        let output = abide(&["init", "--", word], &project(), b"");
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(64), ""), "{word:?}");
    }
}
