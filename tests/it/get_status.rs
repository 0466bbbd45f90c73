//! `get` and `status`: orphans, pauses that do not exist, and the reasons of unhealthy processes.

use serde_json::{Value, json};

use crate::apply::Machine;
use crate::server::Server;

fn rows(machine: &Machine, more: &[&str]) -> Vec<(String, String)> {
    let (code, out, err) = machine.run(&[&["get", "orphans", "-o", "json"], more].concat());
    assert_eq!(code, 0, "{err}");
    let rows: Vec<Value> = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}"));
    assert!(rows.iter().all(|row| row["sync"] == "Orphan"), "{out}");
    let text = |row: &Value, field: &str| row[field].as_str().unwrap_or_default().to_owned();
    rows.iter().map(|row| (text(row, "name"), text(row, "why"))).collect()
}

/// Registers a process without an owner, as other clients do.
fn register(machine: &Machine, name: &str) {
    let read =
        |name: &str| std::fs::read_to_string(machine.path(&format!(".abide-home/{name}"))).expect("a file");
    let (address, secret) = (read("address"), read("secret"));
    let server = Server::at(address.trim().trim_start_matches("http://").parse().expect("an address"));
    let identity = json!({"proc_name": "x", "setup_path": "/", "pid_path": "/run/x.pid", "user": "root"});
    let body = json!({
        "bk_app_code": "abide", "bk_app_secret": secret.trim(),
        "meta": {"namespace": "web", "name": name}, "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}],
        "spec": {"identity": identity, "monitor_policy": {"auto_type": 1}},
    });
    let body = body.to_string();
    let (status, answer) =
        server.send("POST", "/api/c/compapi/v2/gse/register_proc_info/", "", body.as_bytes());
    assert!(status == 200 && answer.contains("\"error_code\":0"), "{status} {answer}");
}

#[test]
fn orphans_are_unclaimed_processes() {
    let machine = Machine::new();
    assert_eq!(rows(&machine, &[]), []);
    for name in ["a", "b"] {
        machine.process(name, "1", "");
    }
    assert_eq!(machine.apply(&["--owner", "team"]).0, 0);
    assert_eq!(rows(&machine, &["m", "--owner", "team"]), []);
    std::fs::remove_file(machine.path("m/b.yaml")).expect("it was there");
    // Without manifests, only an instance without an owner is an orphan.
    assert_eq!(rows(&machine, &[]), []);
    let left = ("b".to_owned(), "declared by no manifest of team".to_owned());
    assert_eq!(rows(&machine, &["m", "--owner", "team"]), std::slice::from_ref(&left));
    assert_eq!(rows(&machine, &["m", "--owner", "team", "-n", "other"]), []);
    assert_eq!(rows(&machine, &["m"]), [], "it is not the default owner's");
    // One that came by another way, without an owner.
    register(&machine, "stray");
    let stray = ("stray".to_owned(), "no owner".to_owned());
    assert_eq!(rows(&machine, &[]), std::slice::from_ref(&stray));
    assert_eq!(rows(&machine, &["m", "--owner", "team"]), [left, stray]);
    let (code, out, _) = machine.run(&["get", "orphans", "-o", "name"]);
    assert_eq!((code, out.as_str()), (0, "0:127.0.0.1:web:stray\n"));
    let (_, out, _) = machine.run(&["get", "orphans"]);
    assert!(out.contains("WHY") && out.contains("no owner"), "{out}");
    // A file that cannot be read would make orphans of what it declares.
    std::fs::write(machine.path("m/c.yaml"), "kind: Process\n").expect("a file");
    assert_eq!(machine.run(&["get", "orphans", "m"]).0, 65);
    assert_eq!(machine.run(&["get", "processes", "m"]).0, 64);
}

#[test]
fn a_resume_without_a_pause_is_reported() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    assert_eq!(machine.apply(&[]).0, 0);
    let said = |args: &[&str]| {
        let (code, out, err) = machine.run(args);
        assert_eq!(code, 0, "{err}");
        out
    };
    assert_eq!(said(&["resume", "web"]), "nothing was paused: namespace web\n");
    said(&["pause", "web"]);
    assert_eq!(said(&["resume"]), "nothing was paused: everything\n");
    assert_eq!(said(&["resume", "web"]), "resumed: namespace web\n");
    assert_eq!(said(&["resume", "web"]), "nothing was paused: namespace web\n");
}

#[test]
fn an_unhealthy_process_has_a_reason() {
    let machine = Machine::new();
    machine.write(
        "a",
        "  control:\n    start_mode: foreground\n    start_cmd: exec sleep 1000\n    health_cmd: echo the disk is full; exit 1\n",
    );
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 3, "{out} {err}");
    assert!(out.contains("Degraded 0:127.0.0.1:web:a\n    ") && out.contains("the disk is full"), "{out}");
    // Also when there is nothing to do about it.
    let (code, out, _) = machine.apply(&["-o", "json"]);
    let report: Value = serde_json::from_str(&out).expect("JSON");
    let ill = &report["not_well"][0];
    assert_eq!(
        (code, &ill["instance"], &ill["health"]),
        (3, &"0:127.0.0.1:web:a".into(), &"Degraded".into())
    );
    assert!(ill["why"].as_str().is_some_and(|why| why.contains("the disk is full")), "{report}");
}

/// What was last applied is known without its manifests: how each stands to it, what would be done, and who did what.
#[test]
fn describe_shows_sync_status_and_who_changed_a_process() {
    let machine = Machine::new();
    ["a", "b"].iter().for_each(|name| machine.process(name, "1", ""));
    assert_eq!(machine.apply(&[]).0, 0);
    let sync = |name: &str| machine.rows()[name]["sync"].as_str().unwrap_or_default().to_owned();
    assert_eq!((sync("a"), sync("b")), ("InSync".to_owned(), "InSync".to_owned()));
    assert_eq!(machine.run(&["stop", "web/b", "--reason", "lunch"]).0, 0);
    assert_eq!((sync("a"), sync("b")), ("InSync".to_owned(), "Held".to_owned()));
    let (code, out, err) = machine.run(&["describe", "web/b", "-o", "json"]);
    let told: Value = serde_json::from_str(&out).unwrap_or_default();
    assert_eq!((code, &told[0]["next_action"][0]["held"]), (0, &"Hold".into()), "{out}{err}");
    let change = &told[0]["changes"][0];
    assert_eq!(
        (&change["did"][0]["op"], &change["did"][0]["outcome"]),
        (&"start".into(), &"Done".into()),
        "{out}"
    );
    assert!(change["by"].as_str().is_some_and(|by| by.contains('@')), "{out}");
    assert_eq!(machine.run(&["release", "web/b"]).0, 0);
    assert_eq!(sync("b"), "OutOfSync");
    let (_, out, _) = machine.run(&["describe", "web/b"]);
    assert!(out.contains("next_action") && out.contains("start"), "{out}");
}
