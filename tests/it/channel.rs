//! Agent channel of the gateway, with a simulated agent: no message is lost or repeated when a side fails.

use std::time::Duration;

use serde_json::{Value, json};

use crate::fixtures::channel::*;
use crate::support::until;

#[test]
fn an_operation_is_sent_and_its_result_received() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server(folder.path());
    let mut agent = Agent::new(&server, "a");
    let task = begin(&server, spec("./run"), 0);
    assert_eq!(row(&server, &task)["error_code"], 115);
    let op = agent.complete_next_op();
    assert_eq!((&op["op"], &op["instance"], &op["owner"]), (&json!("start"), &json!(KEY), &json!("shop")));
    assert_eq!(op["spec"]["spec"]["control"]["start_cmd"], "./run");
    assert_eq!(row(&server, &task), json!({"error_code": 0, "error_msg": "", "content": ""}));
    // The sent spec is registered now, and the status is the one that the agent reported.
    let status = server.gse("get_proc_status_v2", body(Value::Null, None))["data"]["proc_infos"][0].clone();
    assert_eq!(
        (&status["status"], &status["isauto"], &status["pid"]),
        (&json!(1), &json!(true), &json!(4711))
    );
    assert_eq!(
        (&status["meta"]["labels"]["abide_owner"], &status["last_start_time"]),
        (&json!("shop"), &json!(1_700_000_000))
    );
    let told = processes(&server, "?namespace=web")["items"][0].clone();
    for (field, value) in [
        ("registered", json!(true)),
        ("hosted", json!(true)),
        ("running", json!(true)),
        ("owner", json!("shop")),
        ("health", json!("Healthy")),
        ("labels", json!({"tier": "front"})),
        ("agent", json!(true)),
    ] {
        assert_eq!(told[field], value, "{field}: {told}");
    }
    assert_eq!(told["spec"]["control"]["start_cmd"], "./run");
    assert_eq!(told["live_spec"], told["spec"]);
    // The agent receives its registered spec, and each change of it.
    let update = server.gse("update_proc_info", body(spec("./run"), None));
    assert_eq!(update["data"]["0:0:10.0.0.1:web:p"]["error_code"], 0, "{update}");
    assert_eq!(agent.next("give")["given"]["spec"]["control"]["start_cmd"], "./run");
    let alive = server.gse("get_agent_status", json!({"hosts": [{"ip": "10.0.0.1", "bk_cloud_id": 0}]}));
    assert_eq!(alive["data"][HOST]["bk_agent_alive"], 1);
    let state = server.call("POST", "/api/v2/cluster/list_agent_state", json!({"agent_id_list": [HOST]}));
    assert_eq!(state["data"][0]["status_code"], 2);
}

#[test]
fn a_failed_operation_is_reported_and_registers_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server(folder.path());
    let mut agent = Agent::new(&server, "a");
    let task = begin(&server, spec("./run"), 0);
    let op = agent.next("op");
    agent.send_messages(&[
        report(&op["instance"], false, false, Value::Null),
        done(&op, 65535, "no such file"),
    ]);
    assert_eq!(
        (&row(&server, &task)["error_code"], &row(&server, &task)["error_msg"]),
        (&json!(65535), &json!("no such file"))
    );
    assert_eq!(processes(&server, "")["items"], json!([]), "it is not registered by a start that failed");
    // A look: its content is a text for GSE and an object for JOB.
    let task = begin(&server, spec("./run"), 2);
    let op = agent.next("op");
    assert_eq!((&op["op"], &op["seq"]), (&json!("status"), &json!(0)));
    let content = json!({"ip": "10.0.0.1", "process": []});
    agent.send_messages(&[
        json!({"result": {"op_id": op["op_id"], "code": 0, "message": "success", "content": content}}),
    ]);
    assert_eq!(row(&server, &task)["content"], json!(content.to_string()));
    let job = server.call("POST", "/api/c/compapi/v2/job/get_proc_result/", json!({"bk_gse_taskid": task}));
    assert_eq!(job["data"]["result"]["/opt/p/p:0:10.0.0.1"]["content"], content, "{job}");
}

#[test]
fn a_broken_stream_loses_and_repeats_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server(folder.path());
    let agent = Agent::new(&server, "a");
    drop(agent);
    // Without an agent, the operation waits.
    let task = begin(&server, spec("./run"), 0);
    let mut agent = Agent::new(&server, "a");
    let op = agent.next("op");
    let seq = op["seq"].as_u64().expect("a number");
    assert_eq!(row(&server, &task)["error_code"], 115);
    // The message was lost: the agent reports that it does not know the operation.
    drop(agent);
    let mut agent = Agent::after(&server, "a", seq - 1);
    assert_eq!(agent.next("op")["op_id"], op["op_id"], "the same once more");
    drop(agent);
    // It is known: it does not come again, and what comes next does.
    let mut agent = Agent::after(&server, "a", seq);
    let other = server.gse("operate_proc", {
        let mut other = body(spec("./other"), Some(0));
        other["meta"]["name"] = json!("q");
        other["spec"]["identity"]["proc_name"] = json!("q");
        other
    });
    let next = agent.next("op");
    assert_eq!(next["task"], other["data"]["task_id"], "{next}");
    // A repeated message takes effect once.
    let up = |seq: u64, what: Value| {
        let mut up = what;
        up["seq"] = json!(seq);
        up
    };
    let first = up(7, done(&op, 0, "first"));
    assert_eq!(agent.send(std::slice::from_ref(&first)).1["data"]["acked"], 7);
    assert_eq!(
        agent.send(&[up(7, done(&op, 65535, "again")), up(6, done(&op, 65535, "older"))]).1["data"]["acked"],
        7
    );
    assert_eq!(row(&server, &task)["error_msg"], "first");
    assert_eq!(agent.send(&[up(8, done(&op, 65535, "a row that is final stays so"))]).0, 200);
    assert_eq!(row(&server, &task)["error_msg"], "first");
    drop(agent);
    assert_eq!(join(&server, "a", "one", &[HOST]).1["data"]["acked"], 8, "where it was");
}

#[test]
fn operations_in_flight_survive_a_gateway_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let first = server(folder.path());
    let mut agent = Agent::new(&first, "a");
    let task = begin(&first, spec("./run"), 0);
    let op = agent.next("op");
    let unseen = begin(&first, spec("./run"), 8);
    drop(agent);
    drop(first);
    let second = server(folder.path());
    assert_eq!(row(&second, &task)["error_code"], 115);
    let mut agent = Agent::after(&second, "a", op["seq"].as_u64().expect("a number"));
    let next = agent.next("op");
    assert_eq!((&next["task"], &next["op"]), (&unseen, &json!("reload")), "only what it does not know");
    assert!(agent.seq == 0, "nothing was taken yet");
    agent.send_messages(&[report(&op["instance"], true, true, op["spec"].clone()), done(&op, 0, "")]);
    agent.send_messages(&[done(&next, 65535, "no reload_cmd")]);
    assert_eq!(
        (row(&second, &task)["error_code"].clone(), row(&second, &unseen)["error_code"].clone()),
        (json!(0), json!(65535))
    );
}

#[test]
fn rows_of_lost_agents_end_in_117_and_a_late_result_is_accepted() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server_with(folder.path(), Duration::from_millis(300));
    let mut agent = Agent::new(&server, "a");
    let task = begin(&server, spec("./run"), 0);
    let op = agent.next("op");
    let seq = op["seq"].as_u64().expect("a number");
    drop(agent);
    until("it is given up", || row(&server, &task)["error_code"] == 117);
    // What was never sent is not sent after it was given up.
    let never = begin(&server, spec("./run"), 1);
    until("that too", || row(&server, &never)["error_code"] == 117);
    let mut agent = Agent::after(&server, "a", seq);
    agent.send_messages(&[report(&op["instance"], true, true, op["spec"].clone()), done(&op, 0, "late")]);
    assert_eq!(row(&server, &task)["error_code"], 0);
    let look = begin(&server, Value::Null, 2);
    assert_eq!(agent.next("op")["task"], look, "and nothing of the one that was given up");
}

#[test]
fn a_host_has_one_agent_and_a_token_covers_its_hosts() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server(folder.path());
    let agent = Agent::new(&server, "a");
    let (status, refused) = join(&server, "b", "any", &["0:10.0.0.9", HOST]);
    assert!(status == 409 && refused["message"].as_str().expect("text").contains(HOST), "{refused}");
    assert_eq!(join(&server, "a", "one", &[HOST, "0:10.0.0.2"]).0, 401, "a token for another host");
    for token in ["", "One", "s3cret"] {
        assert_eq!(join(&server, "a", token, &[HOST]).0, 401, "{token}");
    }
    // The successor of the agent takes over; the old session must join again.
    let successor = Agent::new(&server, "a");
    assert_eq!(agent.send(&[]).0, 410);
    assert_eq!(successor.send(&[]).0, 200);
    // An agent speaks for its own hosts alone.
    let (_, other) = join(&server, "c", "any", &["0:10.0.0.7"]);
    let path =
        format!("/api/abide/v1/agent/tell?session={}", other["data"]["session"].as_str().expect("a session"));
    let lie = report(&json!(KEY), true, true, json!({"spec": {}}));
    let (status, _) = server.send("POST", &path, "Authorization: Bearer one\r\n", b"[]");
    assert_eq!(status, 401);
    let mut lie = lie;
    lie["seq"] = json!(1);
    let (status, _) =
        server.send("POST", &path, "Authorization: Bearer any\r\n", json!([lie]).to_string().as_bytes());
    assert_eq!((status, &processes(&server, "")["items"]), (200, &json!([])));
}

#[test]
fn a_repeated_call_runs_once_and_an_older_controller_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server(folder.path());
    let operate = |op: &str, generation: u64| {
        let headers =
            format!("X-Abide-Op: {op}\r\nX-Abide-Owner: shop\r\nX-Abide-Generation: {generation}\r\n");
        server.call_with(
            "POST",
            "/api/c/compapi/v2/gse/operate_proc/",
            &headers,
            body(spec("./run"), Some(0)),
        )
    };
    let held = server.lease("shop", "first");
    server.release("shop", "first", held);
    let second = server.lease("shop", "second");
    server.release("shop", "second", second);
    assert_eq!(server.lease("shop", "third"), 3);
    let first = operate("one", 3);
    assert_eq!(operate("one", 3)["data"], first["data"]);
    assert_ne!(operate("two", 3)["data"], first["data"]);
    let old = operate("three", 2)["data"]["task_id"].clone();
    assert_eq!(row(&server, &old)["error_code"], 1_900_409);
    let register = |op: &str, generation: u64| {
        let headers =
            format!("X-Abide-Op: {op}\r\nX-Abide-Owner: shop\r\nX-Abide-Generation: {generation}\r\n");
        let path = "/api/c/compapi/v2/gse/register_proc_info/";
        server.call_with("POST", path, &headers, body(spec("./run"), None))["data"]["0:0:10.0.0.1:web:p"]["error_code"].clone()
    };
    assert_eq!(register("four", 2), 1_900_409);
    server.release("shop", "third", 3);
    assert_eq!(server.lease("shop", "fourth"), 4);
    assert_eq!(
        (register("five", 4), register("five", 4)),
        (json!(0), json!(0)),
        "not 850: it is the same call"
    );
    assert_eq!(register("six", 4), 850);
    // Eight at once under one name are one.
    let answers: Vec<Value> = std::thread::scope(|threads| {
        let all: Vec<_> = (0..8).map(|_| threads.spawn(|| operate("seven", 4)["data"].clone())).collect();
        all.into_iter().map(|thread| thread.join().expect("an answer")).collect()
    });
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
}

#[test]
fn a_rename_moves_the_state_to_the_new_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server(folder.path());
    let mut agent = Agent::new(&server, "a");
    begin(&server, spec("./run"), 0);
    agent.complete_next_op();
    let to = "0:10.0.0.1:web:renamed";
    let ask =
        json!({"from": KEY, "to": to, "spec": spec("./run"), "meta": {"labels": {"abide_owner": "shop"}}});
    let task = server.call("POST", "/api/abide/v1/rename", ask)["data"]["task_id"].clone();
    let op = agent.next("op");
    assert_eq!((&op["op"]["rename"]["from"], &op["instance"]), (&json!(KEY), &json!(to)), "{op}");
    agent.send_messages(&[
        report(&json!(to), true, true, op["spec"].clone()),
        report(&json!(KEY), false, false, Value::Null),
        done(&op, 0, ""),
    ]);
    let rows = server.gse("get_proc_operate_result_v2", json!({"task_id": task}));
    assert_eq!(rows["data"][to]["error_code"], 0, "{rows}");
    let items = processes(&server, "")["items"].clone();
    let names: Vec<&Value> = items.as_array().expect("rows").iter().map(|row| &row["instance"]).collect();
    assert_eq!(names, [&json!(to)]);
    assert_eq!((&items[0]["pid"], &items[0]["owner"]), (&json!(4711), &json!("shop")));
    let elsewhere = json!({"from": to, "to": "0:10.0.0.2:web:p"});
    assert_eq!(server.call("POST", "/api/abide/v1/rename", elsewhere)["result"], false);
}

#[test]
fn a_running_process_keeps_its_identity_and_registration() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server(folder.path());
    let mut agent = Agent::new(&server, "a");
    begin(&server, spec("./run"), 0);
    agent.complete_next_op();
    let code =
        |name: &str, spec: Value| server.gse(name, body(spec, None))["data"]["0:0:10.0.0.1:web:p"].clone();
    let mut elsewhere = spec("./run");
    elsewhere["identity"]["pid_path"] = json!("/run/other.pid");
    let refused = code("update_proc_info", elsewhere.clone());
    assert!(
        refused["error_code"] == 65535
            && refused["error_msg"].as_str().expect("text").contains("stop it first"),
        "{refused}"
    );
    assert_eq!(code("unregister_proc_info", Value::Null)["error_code"], 65535);
    begin(&server, Value::Null, 1);
    agent.complete_next_op();
    assert_eq!(code("update_proc_info", elsewhere)["error_code"], 0);
    assert_eq!(code("unregister_proc_info", Value::Null)["error_code"], 0);
    until("the agent has the spec", || {
        let given = agent.next("give");
        given["instance"] == KEY && given["given"].is_null()
    });
    assert_eq!(processes(&server, "")["items"], json!([]));
}

#[test]
fn agents_of_the_same_name_have_separate_sequences() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server(folder.path());
    let (_, other) = join(&server, "same", "any", &["0:10.0.0.2"]);
    let path =
        format!("/api/abide/v1/agent/tell?session={}", other["data"]["session"].as_str().expect("a session"));
    let ups: Vec<Value> =
        (1..4).map(|seq| json!({"seq": seq, "result": {"op_id": "x/0", "code": 0}})).collect();
    server.send("POST", &path, "Authorization: Bearer any\r\n", json!(ups).to_string().as_bytes());
    let agent = Agent::new(&server, "same");
    assert_eq!(agent.seq, 0, "three were the other's");
}

#[test]
fn duplicate_and_oversized_messages_are_distinguished() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server(folder.path());
    let _agent = Agent::new(&server, "a");
    // Both names of a field: the same, one empty, or a clash that is named.
    let mut both = body(spec("./run"), None);
    both["spec"]["identity"]["index_key"] = json!("");
    both["spec"]["identity"]["value_key"] = json!("k");
    both["spec"]["alive_monitor_policy"] = both["spec"]["monitor_policy"].clone();
    both["spec"]["monitor_policy"]["crotab_rule"] = json!("");
    both["spec"]["alive_monitor_policy"]["crotab_rule"] = json!("");
    assert_eq!(server.gse("register_proc_info", both.clone())["result"], true);
    both["spec"]["identity"]["index_key"] = json!("other");
    let answer = server.gse("update_proc_info", both);
    assert!(answer["message"].as_str().expect("text").contains("index_key"), "{answer}");
    // One identity twice in one call.
    let one = |name: &str| {
        json!({"meta": {"namespace": "m", "name": name}, "hosts": [{"ip": "10.0.0.1", "bk_cloud_id": 0}], "op_type": 0,
                                  "spec": {"identity": {"proc_name": "x", "setup_path": "/x", "pid_path": "/x.pid", "user": "root"}}})
    };
    let task = server.gse("operate_proc_multi", json!({"proc_operate_req": [one("c"), one("d")]}))["data"]["task_id"].clone();
    let rows = server.gse("get_proc_operate_result_v2", json!({"task_id": task}))["data"].clone();
    assert_eq!(rows["0:10.0.0.1:m:d"]["error_code"], 65535, "{rows}");
    // A generation needs its owner.
    let headers = "X-Abide-Generation: 3\r\n";
    let answer = server.call_with(
        "POST",
        "/api/c/compapi/v2/gse/update_proc_info/",
        headers,
        body(spec("./run"), None),
    );
    assert!(answer["message"].as_str().expect("text").contains("X-Abide-Owner"), "{answer}");
    // The state takes nothing that it does not know.
    let ask = |ask: Value| server.call("POST", "/api/abide/v1/state", ask);
    ask(json!({"txn": {"writes": [{"key": "hold/a", "value": "x"}]}}));
    for bad in [
        json!({"txn": {"checks": [], "writes": [{"key": "hold/a", "value": "y"}]}}),
        json!({"txn": {"writes": [{"key": "hold/a", "vaule": "y"}]}}),
        json!({"txn": {"writes": [{"key": "hold/a"}]}}),
        json!({"txn": {"write": []}}),
    ] {
        assert_eq!(ask(bad.clone())["result"], false, "{bad}");
    }
    assert_eq!(ask(json!({"get": {"key": "hold/a"}}))["data"]["value"], "x");
    // The holder of an identity is named to an app that may see its namespace.
    let mut theirs = body(spec("./run"), None);
    theirs["meta"]["name"] = json!("theirs");
    theirs["spec"]["identity"]["value_key"] = json!("k");
    let text = server.gse("register_proc_info", theirs).to_string();
    assert!(text.contains("web/p has the same value_key"), "{text}");
    // 2.0 asks by agent, and is answered so.
    let status = json!({"meta": {"namespace": "web", "name": "p"}, "agent_id_list": [HOST]});
    let row = server.call("POST", "/api/v2/proc/get_proc_status_v2", status)["data"]["proc_infos"][0].clone();
    assert_eq!(row["bk_agent_id"], HOST, "{row}");
    let (_, mut lines) = server
        .stream("/api/abide/v1/processes/watch?after=999999999", "Authorization: Basic YWxsOnMzY3JldA==\r\n");
    assert_eq!(lines.next(), Some(json!({"forgotten": true})));
}
