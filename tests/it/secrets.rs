//! Secrets of specs reach the process and no reader: not in rows, not in the stream of changes, not in an export; and plans
//! compare them all the same.

use serde_json::{Value, json};

use crate::fixtures::manifest::Manifest;
use crate::support::{abide, stderr, stdout, until};
use crate::system::{HOST, System, whoami};

const OLD: &str = "hunter2-of-the-db";
const NEW: &str = "correct-horse-battery";

fn manifest(system: &System, secret: &str, more: &str) -> String {
    Manifest::local("api", system.folder.path())
        .identity("user", whoami())
        .identity("log_path", system.path("api.log").display())
        .start_cmd(&format!("echo hello; exec sleep 1000{more}"))
        .control("start_mode", "foreground")
        .monitor("auto_type", 1)
        .monitor("start_check_secs", 0)
        .monitor("stop_check_secs", 5)
        .spec("env", &format!("{{TOKEN: {{value: {secret}, secret: true}}, MODE: plain}}"))
        .to_string()
}

fn system() -> System {
    let system = System::new();
    system.server.write_target(system.folder.path());
    std::fs::create_dir(system.path("m")).expect("a folder");
    until("the agent is there", || {
        system.server.call("GET", "/api/abide/v1/hosts", json!({}))["data"][0]["agent"] == true
    });
    system
}

fn run(system: &System, args: &[&str]) -> (i32, String, String) {
    let output = abide(&[args, &["--target", "there"]].concat(), system.folder.path(), b"");
    (output.status.code().unwrap_or(-1), stdout(&output), stderr(&output))
}

fn token(system: &System) -> String {
    let environ =
        system.pid("api").map(|pid| std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default());
    let environ = String::from_utf8_lossy(&environ.unwrap_or_default()).into_owned();
    environ.split('\0').find_map(|one| one.strip_prefix("TOKEN=")).unwrap_or_default().to_owned()
}

fn is_clean(what: &str, text: &str) {
    assert!(!text.contains(OLD) && !text.contains(NEW), "{what} tells a secret: {text}");
}

#[test]
fn a_secret_is_applied_without_being_printed() {
    let system = system();
    let write = |secret: &str, more: &str| {
        std::fs::write(system.path("m/api.yaml"), manifest(&system, secret, more)).expect("a file");
    };
    write(OLD, "");
    let (code, out, err) = run(&system, &["apply", "m", "--yes"]);
    assert_eq!(code, 0, "{out}{err}");
    until("it runs with its secret", || token(&system) == OLD);
    let pid = system.pid("api");
    // Readers.
    let page = system.server.call("GET", "/api/abide/v1/processes", json!({})).to_string();
    is_clean("a page", &page);
    let row = system.process("api");
    assert_eq!((&row["spec"], &row["live_spec"]), (&Value::Null, &Value::Null), "{row}");
    assert!(
        row["revision"].is_string() && row["live_revision"].is_string(),
        "older clients compare these: {row}"
    );
    let redacted = &row["spec_redacted"]["spec"]["env"];
    assert_eq!((&redacted["MODE"], &redacted["TOKEN"]["secret"]), (&json!("plain"), &json!(true)), "{row}");
    let (_, mut lines) = system
        .server
        .stream("/api/abide/v1/processes/watch?after=0", "Authorization: Basic YWxsOnMzY3JldA==\r\n");
    is_clean("the stream of changes", &lines.next().expect("a line").to_string());
    is_clean("the tasks", &system.server.call("GET", "/api/abide/v1/tasks", json!({})).to_string());
    for args in [
        &["get", "processes", "-o", "json"][..],
        &["describe", "web/api"],
        &["describe", "web/api", "-o", "json"],
        &["get", "tasks", "-o", "json"],
    ] {
        let (code, out, err) = run(&system, args);
        assert_eq!(code, 0, "{args:?}: {err}");
        is_clean(&args.join(" "), &out);
    }
    let (_, exported, warned) = run(&system, &["export"]);
    is_clean("an export", &exported);
    assert!(warned.contains("not exported (TOKEN)"), "{warned}");
    std::fs::create_dir(system.path("x")).expect("a folder");
    std::fs::write(system.path("x/exported.yaml"), &exported).expect("a file");
    let checked = abide(&["validate", "x"], system.folder.path(), b"");
    assert_eq!(checked.status.code(), Some(65), "without its secret it cannot be applied: {exported}");
    // The same secret is not a change; a change of another field keeps it.
    let (code, out, err) = run(&system, &["plan", "m", "--detailed-exitcode"]);
    assert!(code == 0 && out.to_lowercase().contains("nothing to do"), "{code} {out}{err}");
    write(OLD, "0");
    let (_, out, _) = run(&system, &["plan", "m"]);
    assert!(out.contains("start_cmd") && !out.contains("TOKEN"), "{out}");
    write(NEW, "");
    let (_, out, err) = run(&system, &["plan", "m"]);
    assert!(out.contains("env.TOKEN: secret ") && out.contains("restart"), "{out}{err}");
    is_clean("a plan", &out);
    assert_eq!(system.pid("api"), pid);
    let (code, out, err) = run(&system, &["apply", "m", "--yes", "--max-restart", "1"]);
    assert_eq!(code, 0, "{out}{err}");
    until("it runs with the new one", || token(&system) == NEW);
}

/// Commands that print their environment: start, restart, reload, stop, health and version, and a start that takes too long.
#[test]
fn a_secret_that_a_command_prints_is_masked_in_every_message() {
    let system = system();
    let file = system.path("from-file");
    std::fs::write(&file, "file-of-the-secret\n").expect("a file");
    let env = json!({"TOKEN": {"value": OLD, "secret": true}, "PASS": {"file": file}, "PIN": {"value": "1234", "secret": true},
                     "MODE": "plain-value"});
    let prints = "echo $TOKEN $PASS $PIN $MODE";
    let clean = |what: &str, text: &str| {
        is_clean(what, text);
        assert!(!text.contains("file-of-the-secret"), "{what} tells a secret: {text}");
    };
    let check = |what: &str, message: &str| {
        clean(what, message);
        assert!(message.contains("(secret) (secret) 1234 plain-value"), "{what}: {message}");
    };
    let mut daemon = system.spec("d", &format!("{prints}; exit 3"));
    daemon["control"]["start_mode"] = json!("daemon");
    daemon["env"] = env.clone();
    let (code, message) = system.operate("d", 0, &daemon);
    assert_ne!(code, 0);
    check("start_cmd", &message);
    // Cut in the middle of a secret: 4096 bytes are kept.
    daemon["control"]["start_cmd"] = json!("printf '%s%4090d' $TOKEN 0; exit 3");
    let (_, message) = system.operate("d", 0, &daemon);
    assert!(message.contains("(secret)") && !message.contains("-db"), "{}", &message[..80]);
    daemon["control"]["start_cmd"] = json!(format!("{prints}; sleep 1000"));
    daemon["monitor_policy"]["op_timeout"] = json!(1);
    check("a start that takes too long", &system.operate("d", 0, &daemon).1);
    // A process that runs, and its other commands.
    let mut spec = system.spec("r", "exec sleep 1000");
    spec["env"] = env;
    for (name, command) in [("restart_cmd", 3), ("reload_cmd", 4), ("stop_cmd", 5), ("health_cmd", 6)] {
        spec["control"][name] = json!(format!("{prints}; exit {command}"));
    }
    spec["control"]["version_cmd"] = json!(prints);
    assert_eq!(system.operate("r", 0, &spec).0, 0);
    until("its health is known", || {
        system.process("r")["message"].as_str().is_some_and(|text| text.contains("health_cmd"))
    });
    check("health_cmd", system.process("r")["message"].as_str().expect("a message"));
    until("its version is known", || {
        system.process("r")["version"].as_str().is_some_and(|text| !text.is_empty())
    });
    check("version_cmd", system.process("r")["version"].as_str().expect("a version"));
    check("reload_cmd", &system.operate("r", 8, &spec).1);
    check("restart_cmd", &system.operate("r", 7, &spec).1);
    check("stop_cmd", &system.operate("r", 1, &spec).1);
    for path in ["/api/abide/v1/processes", "/api/abide/v1/tasks"] {
        clean(path, &system.server.call("GET", path, json!({})).to_string());
    }
    spec["control"]["stop_cmd"] = Value::Null;
    system.operate("r", 1, &spec);
}

#[test]
fn a_returned_digest_selects_the_stored_value() {
    let system = system();
    std::fs::write(system.path("m/api.yaml"), manifest(&system, OLD, "")).expect("a file");
    let (code, out, err) = run(&system, &["apply", "m", "--yes"]);
    assert_eq!(code, 0, "{out}{err}");
    until("it runs", || token(&system) == OLD);
    let old = system.process("api")["spec_redacted"]["spec"].clone();
    // A manual verb: the client has only the digest.
    for verb in ["restart", "stop", "start"] {
        let (code, out, err) = run(&system, &[verb, "web/api"]);
        assert_eq!(code, 0, "{verb}: {out}{err}");
    }
    until("it runs with its secret again", || token(&system) == OLD);
    run(&system, &["release", "web/api"]);
    // A rollback: the value was replaced since.
    std::fs::write(system.path("m/api.yaml"), manifest(&system, NEW, "")).expect("a file");
    let (code, out, err) = run(&system, &["apply", "m", "--yes", "--max-restart", "1"]);
    assert_eq!(code, 0, "{out}{err}");
    until("it runs with the new one", || token(&system) == NEW);
    assert_eq!(system.operate("api", 7, &old).0, 0);
    until("it runs with the old one", || token(&system) == OLD);
    // A digest of nothing that is known starts nothing.
    let mut forged = old.clone();
    forged["env"]["TOKEN"] = json!({"digest": "00", "secret": true});
    let (code, message) = system.operate("api", 7, &forged);
    assert!(code != 0 && message.contains("env TOKEN"), "{code} {message}");
    let body = json!({"meta": {"namespace": "web", "name": "api"}, "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}],
                      "spec": forged});
    let rows = system.server.gse("update_proc_info", body)["data"].to_string();
    assert!(rows.contains("env TOKEN"), "{rows}");
    assert_eq!(token(&system), OLD);
    // Another process has no part in it.
    let (code, message) = system.operate("other", 0, &old);
    assert!(code != 0 && message.contains("env TOKEN"), "{code} {message} on {HOST}");
    let (code, _, err) = run(&system, &["stop", "web/api"]);
    assert_eq!(code, 0, "{err}");
}
