//! Identities cannot be squatted: a registration alone keeps no other namespace from starting its process, a process that
//! really runs keeps its identity, and a refusal names the holder only to those who may see it.

use serde_json::{Value, json};

use crate::server::Server;
use crate::support::until;
use crate::system::{HOST, System, is_alive};

const APPS: &str = "apps:\n  - {code: all, secret: s3cret}\n  - {code: thief, secret: thief-s3cret, namespaces: [thief]}\n  \
                    - {code: shop, secret: shop-s3cret, namespaces: [shop]}\n";

fn system() -> System {
    let mut system = System::new();
    let (address, file) = (system.server.address, system.path("other.db"));
    system.kill_agent();
    system.server = Server::at(address);
    until("the port is free again", || std::net::TcpListener::bind(address).is_ok());
    system.server = Server::restart_at(address, &file, APPS, "* token\n");
    system.start_agent();
    until("the agent is there", || {
        system.server.call("GET", "/api/abide/v1/hosts", json!({}))["data"][0]["agent"] == true
    });
    system
}

/// As an app that is named like its namespace.
fn call(system: &System, namespace: &str, name: &str, mut body: Value) -> Value {
    body["bk_app_code"] = json!(namespace);
    body["bk_app_secret"] = json!(format!("{namespace}-s3cret"));
    let path = format!("/api/c/compapi/v2/gse/{name}/");
    let (_, text) = system.server.send("POST", &path, "", body.to_string().as_bytes());
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn body(system: &System, namespace: &str, start: &str) -> Value {
    json!({"meta": {"namespace": namespace, "name": "p"}, "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}],
           "spec": system.spec("p", start)})
}

fn only_row(rows: &Value) -> (i64, String) {
    let row = rows.as_object().and_then(|rows| rows.values().next()).unwrap_or_else(|| panic!("{rows}"));
    (row["error_code"].as_i64().expect("a code"), row["error_msg"].as_str().expect("text").to_owned())
}

fn register(system: &System, namespace: &str) -> (i64, String) {
    only_row(&call(system, namespace, "update_proc_info", body(system, namespace, "exec sleep 1000"))["data"])
}

fn operate(system: &System, namespace: &str, op: i64) -> (i64, String) {
    let mut body = body(system, namespace, "exec sleep 1000");
    body["op_type"] = json!(op);
    let task = call(system, namespace, "operate_proc", body)["data"]["task_id"].clone();
    let mut row = (115, String::new());
    until("a final row", || {
        let rows = call(system, namespace, "get_proc_operate_result_v2", json!({"task_id": task}));
        row = only_row(&rows["data"]);
        row.0 != 115
    });
    row
}

fn pid(system: &System, namespace: &str) -> Option<u32> {
    let page =
        system.server.call("GET", &format!("/api/abide/v1/processes?namespace={namespace}"), json!({}));
    page["data"]["items"][0]["pid"].as_u64().map(|pid| pid as u32)
}

#[test]
fn a_registration_alone_keeps_no_other_namespace_out() {
    let system = system();
    assert_eq!(register(&system, "thief").0, 0);
    assert_eq!(register(&system, "shop").0, 0, "it is registered, and has no identity yet");
    assert_eq!(operate(&system, "shop", 0).0, 0);
    until("it runs", || pid(&system, "shop").is_some());
    // The conflict is final: the other one cannot start, and its error does not name the holder.
    for (code, message) in [operate(&system, "thief", 0), register(&system, "thief")] {
        assert!(code == 65535 && message.contains("a process of another namespace"), "{code} {message}");
        assert!(!message.contains("shop"), "{message}");
    }
    let pid = pid(&system, "shop").expect("a pid");
    // An administrator sees the holder.
    let answer = system.server.gse("update_proc_info", body(&system, "thief", "exec sleep 1000"));
    assert!(only_row(&answer["data"]).1.contains("shop/p"), "{answer}");
    // Stopped for maintenance, it is still whose it was; its own namespace registers it as it likes.
    assert_eq!(operate(&system, "shop", 1).0, 0);
    until("it is stopped", || !is_alive(pid));
    assert_eq!(operate(&system, "thief", 0).0, 65535);
    assert_eq!((register(&system, "shop").0, operate(&system, "shop", 0).0), (0, 0));
    // What the other one unregisters is its own registration.
    let gone = call(&system, "thief", "unregister_proc_info", body(&system, "thief", "x"));
    assert_eq!(only_row(&gone["data"]).0, 0, "{gone}");
    assert_eq!(operate(&system, "thief", 0).0, 65535, "the identity is still the running process's");
    // Unregistered, it is free.
    assert_eq!(operate(&system, "shop", 1).0, 0);
    let mut row = Value::Null;
    until("it can be unregistered", || {
        row = call(&system, "shop", "unregister_proc_info", body(&system, "shop", "x"))["data"].clone();
        only_row(&row).0 == 0
    });
    assert_eq!(operate(&system, "thief", 0).0, 0);
    assert_eq!(operate(&system, "thief", 1).0, 0);
}

#[test]
fn two_that_start_at_once_are_one_process() {
    let system = system();
    assert_eq!((register(&system, "thief").0, register(&system, "shop").0), (0, 0));
    let codes: Vec<i64> = std::thread::scope(|threads| {
        let both = ["thief", "shop"].map(|namespace| {
            let system = &system;
            threads.spawn(move || operate(system, namespace, 0).0)
        });
        both.into_iter().map(|thread| thread.join().expect("a code")).collect()
    });
    assert_eq!(codes.iter().filter(|code| **code == 0).count(), 1, "{codes:?} on {HOST}");
    // What waits for its identity is counted, too.
    let hosts = system.server.call("GET", "/api/abide/v1/hosts", json!({}));
    assert_eq!(hosts["data"][0]["processes"], 2, "{hosts}");
}
