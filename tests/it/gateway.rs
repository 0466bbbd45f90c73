//! The gateway over real HTTP, with an independent client: every route, requests of real callers, forbidden
//! requests, and restarts.

use std::path::Path;
use std::time::Duration;

use abide::gateway::routes::{self, RouteRule};
use serde_json::{Value, json};

use crate::server::Server;
use crate::support::until;

const APPS: &str =
    "apps:\n  - {code: all, secret: s3cret}\n  - {code: web, secret: web-s3cret, namespaces: [web]}\n";

fn server(file: &Path, patience: Duration) -> Server {
    Server::start(file, patience, APPS, "")
}

struct Fixture {
    server: Server,
    folder: tempfile::TempDir,
}

fn fixture() -> Fixture {
    fixture_with(Duration::from_secs(10))
}

fn fixture_with(patience: Duration) -> Fixture {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = server(&folder.path().join("store.db"), patience);
    Fixture { server, folder }
}

fn spec() -> Value {
    json!({"identity": {"proc_name": "p", "setup_path": "/opt/p", "pid_path": "/run/p.pid", "user": "root"},
           "control": {"start_cmd": "./p"}, "monitor_policy": {"auto_type": 1}})
}

fn body(hosts: &[&str]) -> Value {
    let hosts: Vec<Value> =
        hosts.iter().map(|ip| json!({"ip": ip, "bk_cloud_id": 0, "bk_supplier_id": 0})).collect();
    json!({"meta": {"namespace": "web", "name": "p", "labels": {"set": 3}}, "hosts": hosts, "spec": spec()})
}

#[test]
fn the_documented_example_is_registered() {
    let it = fixture();
    let example: Value =
        serde_json::from_str(include_str!("fixtures/gse_register_proc_info.json")).expect("JSON");
    let answer = it.server.gse("register_proc_info", example.clone());
    let expected = json!({"result": true, "code": 0, "message": "success",
        "data": {"1:2:10.0.0.1:gse:proc-test": {"error_code": 0, "error_msg": "success", "content": ""}}});
    assert_eq!(answer, expected);
    let again = it.server.gse("register_proc_info", example);
    assert_eq!(again["data"]["1:2:10.0.0.1:gse:proc-test"]["error_code"], 850, "it exists already");
}

#[test]
fn every_path_of_a_call_is_equivalent() {
    let it = fixture();
    let register = |method: &str, path: &str| it.server.call(method, path, body(&["10.0.0.1"]));
    let first = register("POST", "/api/c/compapi/v2/gse/register_proc_info/");
    assert_eq!(first["data"]["0:0:10.0.0.1:web:p"]["error_code"], 0);
    for (method, path) in [
        ("POST", "/api/c/compapi/v2/gse/register_proc_info"),
        ("POST", "/procapi/v1/proc/procinfo"),
        ("POST", "/procapi/v1/proc/procinfo/"),
        ("POST", "/api/v2/proc/register_proc_info"),
        ("POST", "/api/bk-gse/prod/api/v2/proc/register_proc_info/"),
        ("POST", "/prod/api/v2/proc/register_proc_info"),
    ] {
        assert_eq!(
            register(method, path)["data"]["0:0:10.0.0.1:web:p"]["error_code"],
            850,
            "{method} {path}"
        );
    }
    assert_eq!(register("PUT", "/procapi/v1/proc/procinfo")["data"]["0:0:10.0.0.1:web:p"]["error_code"], 0);
    // A query by GET with a body.
    let status = it.server.call("GET", "/procapi/v2/proc/status", body(&["10.0.0.1", "10.0.0.2"]));
    assert_eq!(status["data"]["proc_infos"].as_array().map(Vec::len), Some(1), "{status}");
    let row = &status["data"]["proc_infos"][0];
    assert_eq!(
        (&row["meta"]["labels"]["set"], &row["isauto"], &row["pid"]),
        (&json!("3"), &json!(false), &json!(-1))
    );
    let first = it.server.gse("get_proc_status", body(&["10.0.0.1"]));
    assert_eq!(first["data"]["proc_infos"][0].get("isauto"), None, "the first version has no such field");
    let gone = it.server.call("DELETE", "/procapi/v1/proc/procinfo", body(&["10.0.0.1"]));
    assert_eq!(gone["data"]["0:0:10.0.0.1:web:p"]["error_code"], 0);
    assert_eq!(it.server.gse("get_proc_status", body(&["10.0.0.1"]))["data"]["proc_infos"], json!([]));
    for (method, path) in [
        ("GET", "/api/c/compapi/v2/gse/register_proc_info/"),
        ("POST", "/nowhere"),
        ("PATCH", "/procapi/v1/proc/procinfo"),
    ] {
        let (status, text) = it.server.send(method, path, "", b"{}");
        let expected = if path == "/nowhere" { 404 } else { 405 };
        assert!(status == expected && text.contains("\"result\":false"), "{method} {path}: {status} {text}");
    }
}

#[test]
fn a_task_has_a_row_for_every_instance_and_without_an_agent_each_ends_in_117() {
    let it = fixture_with(Duration::from_millis(300));
    let mut start = body(&["10.0.0.1", "10.0.0.2"]);
    start["op_type"] = json!(0);
    let id = it.server.gse("operate_proc", start)["data"]["task_id"].as_str().expect("a task").to_owned();
    let keys = ["0:0:10.0.0.1:web:p", "0:0:10.0.0.2:web:p"];
    until("both are given up", || {
        let rows = it.server.gse("get_proc_operate_result", json!({"task_id": id}))["data"].clone();
        let codes: Vec<i64> =
            keys.iter().map(|key| rows[*key]["error_code"].as_i64().expect("a row")).collect();
        assert!(codes.iter().all(|code| [115, 117].contains(code)), "{rows}");
        codes == [117, 117]
    });
    let second = it.server.gse("get_proc_operate_result_v2", json!({"task_id": id}));
    assert_eq!(second["data"]["0:10.0.0.1:web:p"]["error_code"], 117, "the same by the other key");
    let unknown = it.server.gse("get_proc_operate_result", json!({"task_id": "GSETASK:none"}));
    assert!(
        unknown["result"] == false && unknown["message"].as_str().expect("text").contains("GSETASK:none"),
        "{unknown}"
    );
    let mut odd = body(&["10.0.0.1"]);
    odd["op_type"] = json!(5);
    let id = it.server.gse("operate_proc", odd)["data"]["task_id"].clone();
    let rows = it.server.gse("get_proc_operate_result", json!({"task_id": id}));
    assert_eq!(rows["data"]["0:0:10.0.0.1:web:p"]["error_code"], 832);
}

#[test]
fn the_v1_shape_uses_the_registered_spec() {
    let it = fixture_with(Duration::from_millis(1));
    let mut bare = body(&["10.0.0.1", "10.0.0.2"]);
    bare.as_object_mut().expect("an object").remove("spec");
    bare["op_type"] = json!(0);
    it.server.gse("register_proc_info", body(&["10.0.0.1"]));
    let id = it.server.gse("operate_proc", bare)["data"]["task_id"].clone();
    let ask = || it.server.gse("get_proc_operate_result", json!({"task_id": id}))["data"].clone();
    until("it is known, and waits for its agent", || ask()["0:0:10.0.0.1:web:p"]["error_code"] == 117);
    let rows = ask();
    assert_eq!(rows["0:0:10.0.0.2:web:p"]["error_code"], 65535, "it is not: {rows}");
    let multi = json!({"proc_operate_req": [
        {"meta": {"namespace": "web", "name": "p"}, "agent_id_list": ["0:10.0.0.1"], "op_type": 0, "spec": spec()},
        {"meta": {"namespace": "web", "name": "q"}, "hosts": [{"ip": "10.0.0.3", "bk_cloud_id": 7}], "op_type": 1, "spec": spec()}]});
    let id = it.server.gse("operate_proc_multi", multi)["data"]["task_id"].clone();
    let rows = it.server.gse("get_proc_operate_result_v2", json!({"task_id": id}))["data"].clone();
    let keys: Vec<&String> = rows.as_object().expect("rows").keys().collect();
    assert_eq!(keys, ["0:10.0.0.1:web:p", "7:10.0.0.3:web:q"]);
}

#[test]
fn job_calls_are_the_same_engine_under_other_numbers() {
    let it = fixture_with(Duration::from_millis(1));
    for (name, fixture) in [
        ("job/manage_proc", include_str!("fixtures/job_manage_proc.json")),
        ("jobv3/manage_proc", include_str!("fixtures/job_v3_manage_proc.json")),
        ("job/operate_process", include_str!("fixtures/job_operate_process.json")),
    ] {
        let example: Value = serde_json::from_str(fixture).expect("JSON");
        let answer = it.server.call("POST", &format!("/api/c/compapi/v2/{name}/"), example.clone());
        let id =
            answer["data"]["bk_gse_taskid"].as_str().unwrap_or_else(|| panic!("{name}: {answer}")).to_owned();
        let ask =
            || it.server.call("POST", "/api/c/compapi/v2/job/get_proc_result/", json!({"bk_gse_taskid": id}));
        until("its rows are final", || ask()["data"]["status"] == 1);
        let result = ask();
        let rows = result["data"]["result"].as_object().expect("rows");
        let process = &example["process_infos"][0];
        let program = format!(
            "{}/{}",
            process["setup_path"].as_str().expect("a path").trim_end_matches('/'),
            process["proc_name"].as_str().expect("a name")
        );
        let hosts = process["ip_list"].as_array().expect("hosts").len();
        assert_eq!(rows.keys().filter(|key| key.starts_with(&program)).count(), hosts, "{name}: {result}");
        assert!(
            result["data"]["status"] == 1 && rows.values().all(|row| row["error_code"] == 117),
            "{name}: {result}"
        );
    }
}

#[test]
fn pages_come_in_a_stable_order_with_a_count() {
    let it = fixture();
    for n in 0..25 {
        let mut one = body(&["10.0.0.1", "10.0.0.2"]);
        one["meta"]["name"] = json!(format!("p{n:02}"));
        one["spec"]["identity"]["proc_name"] = json!(format!("p{n:02}"));
        it.server.gse("register_proc_info", one);
    }
    let page = |start: u64, limit: u64| {
        it.server.gse(
            "sync_proc_status",
            json!({"meta": {"namespace": "web"}, "page": {"start": start, "limit": limit}}),
        )
    };
    let mut names = Vec::new();
    for start in (0..60).step_by(20) {
        let page = page(start, 20);
        assert_eq!(page["data"]["count"], 50);
        let rows = page["data"]["proc_infos"].as_array().expect("rows");
        names.extend(rows.iter().map(|row| format!("{} {}", row["meta"]["name"], row["host"]["ip"])));
    }
    let mut sorted = names.clone();
    sorted.sort();
    sorted.dedup();
    assert_eq!((names.len(), &names), (50, &sorted), "each once, in order");
    assert_eq!(page(0, 1001)["result"], false);
    assert_eq!(
        it.server.gse("sync_proc_status", json!({"page": {"start": 0, "limit": 10}}))["result"],
        false
    );
}

#[test]
fn two_processes_of_a_host_cannot_share_an_identity() {
    let it = fixture();
    it.server.gse("register_proc_info", body(&["10.0.0.1", "10.0.0.2"]));
    let mut other = body(&["10.0.0.1", "10.0.0.3"]);
    other["meta"]["name"] = json!("q");
    let rows = it.server.gse("register_proc_info", other.clone())["data"].clone();
    assert_eq!(rows["0:0:10.0.0.3:web:q"]["error_code"], 0, "each row has its own result");
    let refused = &rows["0:0:10.0.0.1:web:q"];
    assert!(
        refused["error_code"] == 65535 && refused["error_msg"].as_str().expect("text").contains("web/p"),
        "{rows}"
    );
    // When the first has another, the place is free.
    let mut moved = body(&["10.0.0.1"]);
    moved["spec"]["identity"]["setup_path"] = json!("/opt/elsewhere");
    it.server.gse("update_proc_info", moved);
    assert_eq!(it.server.gse("register_proc_info", other)["data"]["0:0:10.0.0.1:web:q"]["error_code"], 0);
}

#[test]
fn groups_are_stored_and_agents_are_listed() {
    let it = fixture();
    let groups = json!([{"id": 1, "resource": {"cpu_pool_limit": 30.0, "mem_pool_limit": 10.0, "cpu_pool_weight": 0}}]);
    let set = json!({"meta": {"namespace": "web"}, "hosts": [{"ip": "10.0.0.1", "bk_cloud_id": 0, "bk_supplier_id": 2}],
                     "spec": {"process_group": groups}});
    assert_eq!(
        it.server.gse("set_process_group_info", set.clone())["data"]["0:2:10.0.0.1:web"]["error_code"],
        0
    );
    let told = it.server.gse("get_process_group_info", set);
    assert_eq!(told["data"]["process_group_infos"][0]["resource"], groups[0]["resource"]);
    let states = it.server.gse("get_agent_status", json!({"hosts": [{"ip": "10.0.0.1", "bk_cloud_id": 0}]}));
    assert_eq!(states["data"]["0:10.0.0.1"]["bk_agent_alive"], 0);
    let states =
        it.server.call("POST", "/api/v2/cluster/list_agent_state", json!({"agent_id_list": ["0:10.0.0.1"]}));
    assert_eq!(states["data"][0]["bk_agent_id"], "0:10.0.0.1");
}

#[test]
fn acknowledged_changes_survive_a_restart() {
    let it = fixture_with(Duration::from_millis(1));
    it.server.gse("register_proc_info", body(&["10.0.0.1"]));
    let mut start = body(&["10.0.0.1"]);
    start["op_type"] = json!(0);
    let id = it.server.gse("operate_proc", start.clone())["data"]["task_id"].clone();
    let Fixture { server: old, folder } = it;
    drop(old);
    let server = server(&folder.path().join("store.db"), Duration::from_millis(1));
    assert_eq!(
        server.gse("get_proc_status", body(&["10.0.0.1"]))["data"]["proc_infos"].as_array().map(Vec::len),
        Some(1)
    );
    // Agents have their time again, and none connects.
    let code = || {
        server.gse("get_proc_operate_result", json!({"task_id": id}))["data"]["0:0:10.0.0.1:web:p"]["error_code"].clone()
    };
    until("the row is given up", || code() == 117);
    assert_ne!(server.gse("operate_proc", start)["data"]["task_id"], id, "a number is never given twice");
}

/// Every route × every kind of caller. The table of routes is the gateway's own, so that a new one is in here too.
#[test]
fn calls_need_credentials_and_stay_in_their_namespaces() {
    let it = fixture();
    let header = |code: &str, secret: &str| {
        format!("X-Bkapi-Authorization: {{\"bk_app_code\": \"{code}\", \"bk_app_secret\": \"{secret}\"}}\r\n")
    };
    let strangers = [
        String::new(),
        header("all", "wrong"),
        header("nobody", "s3cret"),
        header("", ""),
        "Authorization: Bearer s3cret\r\n".to_owned(),
        "Authorization: Basic YWxsOndyb25n\r\n".to_owned(),
    ];
    let mut request = body(&["10.0.0.1"]);
    request["meta"]["namespace"] = json!("db");
    request["op_type"] = json!(2);
    let (mut routes, mut own) = (0u8, 0);
    for (method, path, call) in routes::all() {
        routes += 1;
        let send =
            |headers: &str, path: &str| it.server.send(method, path, headers, request.to_string().as_bytes());
        if call.rule() == RouteRule::Public {
            assert_eq!(send("", &path).0, 200, "{method} {path}");
            continue;
        }
        for (nth, headers) in strangers.iter().enumerate() {
            // A peer with a few wrong credentials is not slowed down yet.
            let peer = [127, 1, routes, u8::try_from(nth).expect("a few") + 1];
            for path in [path.clone(), format!("{path}/")] {
                let bytes = request.to_string();
                let (status, text) = it.server.send_from(peer, method, &path, headers, bytes.as_bytes());
                assert!(
                    status == 401 && text.contains("\"result\":false") && !text.contains("s3cret"),
                    "{method} {path} {headers}: {status} {text}"
                );
            }
        }
        if matches!(call.rule(), RouteRule::Agent | RouteRule::JoinToken) {
            // The secret of an app is not a token of an agent.
            assert_eq!(send(&header("all", "s3cret"), &path).0, 401, "{method} {path}");
            continue;
        }
        if call.word() == "watch" {
            continue; // it would not end
        }
        let (status, text) = send(&header("web", "web-s3cret"), &path);
        assert!(!text.contains("s3cret") && status == 200, "{method} {path}: {status} {text}");
        if text.contains("app web lacks namespace db") {
            own += 1;
        }
    }
    assert!(routes > 60 && own >= 35, "{own} of {routes} routes are about a namespace");
    let id = it.server.gse("operate_proc", request)["data"]["task_id"].clone();
    let (_, text) = it.server.send(
        "POST",
        "/api/c/compapi/v2/gse/get_proc_operate_result/",
        &header("web", "web-s3cret"),
        json!({"task_id": id}).to_string().as_bytes(),
    );
    assert!(text.contains("there is no task"), "others' tasks are not there: {text}");
}

#[test]
fn bad_input_gets_an_envelope_and_changes_nothing() {
    let it = fixture();
    let auth = "X-Bkapi-Authorization: {\"bk_app_code\": \"all\", \"bk_app_secret\": \"s3cret\"}\r\n";
    let path = "/api/c/compapi/v2/gse/register_proc_info/";
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let wrong_type =
        json!({"meta": {"namespace": "web", "name": "p"}, "hosts": "10.0.0.1", "spec": spec()}).to_string();
    let secret_type = json!({"meta": {"namespace": "web", "name": "p"}, "hosts": [{"ip": "10.0.0.1", "bk_cloud_id": "hush"}]}).to_string();
    for bad in ["{", "[]", "null", "\"x\"", "{\"meta\": ", "\u{0}", &deep, &wrong_type, &secret_type, "{}"] {
        let (status, text) = it.server.send("POST", path, auth, bad.as_bytes());
        let answer: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        let shown = &bad[..bad.len().min(40)];
        assert!(
            status == 200 && answer["result"] == false && answer["code"] != 0,
            "{shown}: {status} {text}"
        );
        assert!(!text.contains("hush"), "{text}");
    }
    let (status, text) = it.server.send("POST", path, auth, &vec![b' '; 17 << 20]);
    assert!(status == 413 || text.is_empty(), "{status} {text}");
    for (pointer, value, says) in [
        ("/meta/name", json!("a:b"), "meta.name"),
        ("/hosts", json!([]), "hosts is missing"),
        ("/hosts/0/ip", json!("nowhere"), "hosts[0].ip"),
        ("/spec/identity/user", json!(""), "spec.identity.user is missing"),
        ("/spec/monitor_policy/auto_type", json!(9), "auto_type"),
    ] {
        let mut bad = body(&["10.0.0.1"]);
        *bad.pointer_mut(pointer).expect("a field") = value;
        let answer = it.server.gse("register_proc_info", bad);
        assert!(answer["message"].as_str().expect("text").contains(says), "{pointer}: {answer}");
    }
    assert_eq!(it.server.gse("sync_proc_status", json!({"meta": {"namespace": "web"}}))["data"]["count"], 0);
    // Many hosts, some of them twice: each once.
    let many: Vec<Value> = (0..20_000)
        .map(|n| json!({"ip": format!("10.{}.{}.{}", n / 65_536, n / 256 % 256, n % 250), "bk_cloud_id": 0}))
        .collect();
    let mut large = body(&["10.0.0.1"]);
    large["hosts"] = Value::Array(many);
    let rows = it.server.gse("register_proc_info", large)["data"].as_object().expect("rows").len();
    assert_eq!(
        it.server.gse("sync_proc_status", json!({"meta": {"namespace": "web"}}))["data"]["count"],
        rows as u64
    );
}

#[test]
fn tasks_are_kept_for_a_day() {
    use abide::store::{Embedded, Store, Txn};
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("store.db");
    let hours_ago = |hours: u64| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock");
        (now - Duration::from_secs(3600 * hours)).as_millis() as u64
    };
    let task = |hours: u64| {
        let order = json!({"op": "start", "instance": "0:10.0.0.1:web:p"});
        json!({"begun": hours_ago(hours), "number": 1, "orders": [order], "specs": []}).to_string()
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let store = Embedded::open(&file).expect("it opens");
        for (id, hours) in [("old", 25), ("new", 23)] {
            let done = json!({"code": 0, "message": "done"}).to_string();
            let txn = Txn::put(format!("task/{id}"), task(hours)).and(Txn::put(format!("done/{id}/0"), done));
            store.txn(txn).await.expect("written");
        }
    });
    let server = server(&file, Duration::from_secs(10));
    let code = |id: &str| server.gse("get_proc_operate_result_v2", json!({"task_id": id}))["code"].clone();
    until("the old one is forgotten", || code("old") == 1_900_404);
    let rows = server.gse("get_proc_operate_result_v2", json!({"task_id": "new"}));
    assert_eq!(rows["data"]["0:10.0.0.1:web:p"]["error_code"], 0, "{rows}");
}
