//! Stored values of the gateway that cannot be read: each is named in the log or the answer, and concerns no other instance.

use serde_json::{Value, json};

use abide::store::{Embedded, Store, Txn};

use crate::fixtures::channel::{Agent, processes, server};
use crate::fixtures::workspace::Workspace;
use crate::server::Server;

const GARBAGE: &str = "{\"given\": gar\u{0}bage";

fn body(name: &str, op: Option<i64>) -> Value {
    let identity = json!({"proc_name": name, "setup_path": format!("/opt/{name}"), "pid_path": format!("/run/{name}.pid"),
        "user": "root"});
    let spec =
        json!({"identity": identity, "control": {"start_cmd": "./run"}, "monitor_policy": {"auto_type": 1}});
    let mut body = json!({"meta": {"namespace": "web", "name": name}, "spec": spec,
        "hosts": [{"ip": "10.0.0.1", "bk_cloud_id": 0}]});
    if let Some(op) = op {
        body["op_type"] = json!(op);
    }
    body
}

fn start(server: &Server, name: &str) -> Value {
    let answer = server.gse("operate_proc_v2", body(name, Some(0)));
    assert_eq!(answer["result"], true, "{answer}");
    answer["data"]["task_id"].clone()
}

fn result(server: &Server, task: &Value) -> Value {
    server.gse("get_proc_operate_result_v2", json!({"task_id": task}))
}

/// Replaces a value in the store of a stopped gateway. The key must exist.
fn corrupt(folder: &Workspace, key: &str) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let store = Embedded::open(&folder.path().join("store.db")).expect("a store");
    runtime.block_on(async {
        assert!(store.get(key).await.expect("an answer").is_some(), "{key} is not in the store");
        store.txn(Txn::put(key, GARBAGE)).await.expect("it is written");
    });
}

/// A gateway with `p` and `q` running, stopped, and started again with one value that cannot be read.
fn with_garbage(key: impl Fn(&Value) -> String, check: impl Fn(&Server, &Value, &Value, &str)) {
    let folder = Workspace::new();
    let (first, second) = {
        let server = server(folder.path());
        let mut agent = Agent::new(&server, "a");
        let tasks = (start(&server, "p"), start(&server, "q"));
        agent.complete_next_op();
        agent.complete_next_op();
        tasks
    };
    let key = key(&first);
    corrupt(&folder, &key);
    let server = server(folder.path());
    server.wait_until_ready();
    check(&server, &first, &second, &key);
    // The other instance is operated as ever, and agents join.
    let mut agent = Agent::new(&server, "a");
    let answer = server.gse("operate_proc_v2", body("q", Some(1)));
    // An operation on the other instance may come first.
    while agent.complete_next_op()["instance"] != "0:10.0.0.1:web:q" {}
    let rows = result(&server, &answer["data"]["task_id"]);
    assert_eq!(rows["data"]["0:10.0.0.1:web:q"]["error_code"], 0, "{key}: {rows}");
}

fn status(server: &Server, name: &str) -> Value {
    let answer = server.gse("get_proc_status_v2", body(name, None));
    assert_eq!(answer["result"], true, "{answer}");
    answer["data"]["proc_infos"][0].clone()
}

#[test]
fn an_unreadable_registration_or_report_concerns_its_instance_only() {
    for prefix in ["reg", "live"] {
        with_garbage(
            |_| format!("{prefix}/web/p/0:10.0.0.1"),
            |server, _, _, key| {
                let row = status(server, "p");
                assert!(row["message"].as_str().is_some_and(|text| text.contains(key)), "{row}");
                assert_eq!(row["report_time"], 0, "it counts as unknown: {row}");
                let other = status(server, "q");
                assert_eq!((&other["status"], &other["pid"]), (&json!(1), &json!(4711)), "{key}: {other}");
                let page = json!({"meta": {"namespace": "web"}, "page": {"start": 0, "limit": 10}});
                let all = server.gse("sync_proc_status", page)["data"].clone();
                assert_eq!(
                    (&all["count"], all["proc_infos"].as_array().map(Vec::len)),
                    (&json!(2), Some(2)),
                    "{all}"
                );
                let rows = processes(server, "");
                assert!(rows.to_string().contains("0:10.0.0.1:web:q"), "{key}: {rows}");
                // An operation on the instance itself either succeeds with the spec that it brings, or names the key.
                let answer = server.gse("operate_proc", {
                    let mut bare = body("p", Some(1));
                    bare.as_object_mut().expect("an object").remove("spec");
                    bare
                });
                let text = answer.to_string();
                assert!(answer["result"] == true || text.contains(key), "{key}: {text}");
            },
        );
    }
}

#[test]
fn an_unreadable_task_concerns_its_callers_only() {
    with_garbage(
        |task| format!("task/{}", task.as_str().expect("an id")),
        |server, first, second, key| {
            let answer = result(server, first);
            assert!(answer["result"] == false && answer.to_string().contains(key), "{answer}");
            assert_eq!(result(server, second)["data"]["0:10.0.0.1:web:q"]["error_code"], 0);
            let tasks = server.call("GET", "/api/abide/v1/tasks", json!({}))["data"].clone();
            assert!(
                tasks.as_array().is_some_and(|all| all.iter().any(|task| task["id"] == *second)),
                "{tasks}"
            );
        },
    );
}
