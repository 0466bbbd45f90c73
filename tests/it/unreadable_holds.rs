//! Holds and pauses that cannot be read: their instances stay held, and others go on.

use serde_json::{Value, json};

use crate::apply::Machine;
use crate::server::Server;
use crate::support::until;
use crate::watch::{read_log, running, watch};

const HOLD: &str = "hold/0:127.0.0.1:web:a";

/// Writes a value under a key of the local gateway's store.
fn put(machine: &Machine, key: &str, value: &str) {
    let read = |name: &str| {
        std::fs::read_to_string(machine.path(".abide-home").join(name)).expect("a file").trim().to_owned()
    };
    let address = read("address").trim_start_matches("http://").parse().expect("an address");
    let auth = json!({"bk_app_code": "abide", "bk_app_secret": read("secret")});
    let auth = format!("X-Bkapi-Authorization: {auth}\r\n");
    let txn = json!({"txn": {"writes": [{"key": key, "value": value}]}}).to_string();
    let (status, text) = Server::at(address).send("POST", "/api/abide/v1/state", &auth, txn.as_bytes());
    assert!(status == 200 && text.contains("written"), "{status} {text}");
}

/// `b` in another namespace than `a`.
fn processes(machine: &Machine, version: &str) {
    ["a", "b"].iter().for_each(|name| machine.process(name, version, ""));
    let file = machine.path("m/b.yaml");
    let text = std::fs::read_to_string(&file).expect("a file");
    std::fs::write(&file, text.replace("namespace: web", "namespace: other")).expect("a file");
}

fn plan(machine: &Machine) -> Value {
    let (_, out, err) = machine.run(&["plan", "m", "-o", "json"]);
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}{err}"))
}

/// The only held change is of `a`, for this reason and because of this key; `b` has steps.
fn assert_holds_a(machine: &Machine, reason: &str, key: &str) {
    let plan = plan(machine);
    let held = plan["held"].as_array().expect("a list");
    assert!(held.len() == 1 && held[0]["instance"] == "0:127.0.0.1:web:a", "{plan:#}");
    assert_eq!(held[0]["reason"], reason);
    let detail = held[0]["detail"].as_str().expect("a text");
    assert!(detail.contains(&format!("{key} cannot be read")), "{detail}");
    let steps =
        plan["waves"].as_array().expect("a list").iter().flat_map(|wave| wave.as_array().expect("steps"));
    let instances: Vec<Value> = steps.map(|step| step["instance"].clone()).collect();
    assert!(!instances.is_empty() && instances.iter().all(|one| one == "0:127.0.0.1:other:b"), "{plan:#}");
}

#[test]
fn an_unreadable_hold_or_pause_keeps_its_instances_held() {
    let machine = Machine::new();
    processes(&machine, "1");
    assert_eq!(machine.apply(&[]).0, 0);
    for (version, key, reason, end) in [
        ("2", HOLD, "Hold", ["release", "web/a"].as_slice()),
        ("3", "pause/web", "Paused", ["resume", "web"].as_slice()),
    ] {
        put(&machine, key, "{\"by\": garbage");
        processes(&machine, version);
        assert_holds_a(&machine, reason, key);
        let before = machine.pids();
        let (code, out, err) = machine.apply(&[]);
        assert!(out.contains(key) || err.contains(key), "{code} {out}{err}");
        let after = machine.pids();
        assert!(after["a"] == before["a"] && after["b"] != before["b"], "{before:?} {after:?} {out}{err}");
        let (_, holds, err) = machine.run(&["get", "holds"]);
        assert!(holds.contains(key), "{holds}{err}");
        assert_eq!(machine.run(end).0, 0);
        assert_eq!(machine.apply(&[]).0, 0);
        assert_ne!(machine.pids()["a"], before["a"], "nothing holds it any more");
    }
}

#[test]
fn watch_holds_the_instances_of_an_unreadable_entry() {
    let machine = Machine::new();
    processes(&machine, "1");
    let _watch = watch(&machine, "watch.log", &[]);
    until("both run", || running(&machine, &["a", "b"]));
    put(&machine, HOLD, "garbage");
    until("it is a hold", || machine.run(&["get", "holds"]).1.contains(HOLD));
    let before = machine.pids();
    processes(&machine, "2");
    until("b is changed", || machine.pids().get("b").is_some_and(|pid| *pid != before["b"]));
    until("a is held", || read_log(&machine, "watch.log").contains(&format!("{HOLD} cannot be read")));
    assert_eq!(machine.pids()["a"], before["a"]);
    assert_eq!(machine.run(&["release", "web/a"]).0, 0);
    until("a is changed", || machine.pids().get("a").is_some_and(|pid| *pid != before["a"]));
}
