//! The gateway's own API: the change stream, pages of processes, stored keys, metrics, and atomic job calls.

use std::time::Duration;

use abide::gateway::StoreRequest;
use serde_json::{Value, json};

use crate::fixtures::channel::*;
use crate::server::Server;

#[test]
fn a_watcher_receives_every_change_in_its_namespaces() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server(folder.path());
    let as_of = processes(&server, "")["as_of"].as_u64().expect("a number");
    let auth = "X-Bkapi-Authorization: {\"bk_app_code\": \"web\", \"bk_app_secret\": \"web-s3cret\"}\r\n";
    let (status, mut lines) = server.stream(&format!("/api/abide/v1/processes/watch?after={as_of}"), auth);
    assert_eq!(status, 200);
    let mut others = body(spec("./run"), None);
    others["meta"]["namespace"] = json!("db");
    server.gse("register_proc_info", others);
    let mut same = body(spec("./run"), None);
    same["spec"]["identity"]["setup_path"] = json!("/opt/web");
    server.gse("register_proc_info", same.clone());
    let line = lines.next().expect("a change");
    assert_eq!(
        (&line["instance"], &line["process"]["spec"]["identity"]["setup_path"]),
        (&json!(KEY), &json!("/opt/web")),
        "not the other namespace's"
    );
    server.gse("unregister_proc_info", same);
    let line = lines.next().expect("a change");
    assert_eq!((&line["instance"], &line["process"]), (&json!(KEY), &Value::Null));
    // From the beginning again: nothing was missed.
    let (_, mut again) = server.stream(&format!("/api/abide/v1/processes/watch?after={as_of}"), auth);
    assert_eq!(again.next().expect("what was missed")["instance"], KEY);
}

#[test]
fn pages_of_processes_can_be_filtered_and_followed() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server(folder.path());
    for (n, owner) in (0..25).map(|n| (n, if n % 2 == 0 { "even" } else { "odd" })) {
        let mut one = body(spec("./run"), None);
        one["meta"]["name"] = json!(format!("p{n:02}"));
        one["meta"]["labels"]["abide_owner"] = json!(owner);
        one["spec"]["identity"]["proc_name"] = json!(format!("p{n:02}"));
        server.gse("register_proc_info", one);
    }
    let mut names = Vec::new();
    let mut after = String::new();
    loop {
        let page = processes(&server, &format!("?owner=even&limit=5&brief=1{after}"));
        names.extend(page["items"].as_array().expect("rows").iter().map(|row| row["name"].clone()));
        assert!(page["items"][0].get("spec").is_none(), "brief");
        match page["more"].as_str() {
            Some(more) => after = format!("&after={more}"),
            None => break,
        }
    }
    let expected: Vec<Value> = (0..25).step_by(2).map(|n| json!(format!("p{n:02}"))).collect();
    assert_eq!(names, expected);
    let names = |query: &str| processes(&server, query)["items"].as_array().expect("rows").len();
    assert_eq!(
        (names("?name=p1*"), names("?host=0:10.0.0.1"), names("?host=9:*"), names("?namespace=nowhere")),
        (10, 25, 0, 0)
    );
    let bad = server.call("GET", "/api/abide/v1/processes?limit=0", json!({}));
    assert_eq!(bad["result"], false);
}

#[test]
fn controllers_can_store_only_their_own_keys() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server(folder.path());
    let ask = |ask: Value| server.call("POST", "/api/abide/v1/state", ask);
    let put = |key: &str, value: &str, changed: u64| {
        ask(
            json!({"txn": {"compares": [{"key": key, "changed": changed}], "writes": [{"key": key, "value": value}]}}),
        )
    };
    let first = put("hold/web/p", "held", 0)["data"]["written"].as_u64().expect("written");
    assert_eq!(put("hold/web/p", "again", 0)["data"], json!({"conflict": "hold/web/p"}));
    let entry = json!({"key": "hold/web/p", "value": "held", "changed": first});
    assert_eq!(ask(json!({"get": {"key": "hold/web/p"}}))["data"], entry);
    assert_eq!(ask(json!({"range": {"prefix": "hold/"}}))["data"]["entries"], json!([entry]));
    let changes = ask(json!({"changes": {"prefix": "hold/", "after": 0, "wait_ms": 1000}}));
    assert_eq!(changes["data"]["changes"][0]["value"], "held");
    let none = ask(json!({"changes": {"prefix": "hold/", "after": first, "wait_ms": 10}}));
    assert_eq!(none["data"]["changes"], json!([]));
    let holder = |id: &str| json!({"id": id, "host": "elsewhere", "boot_id": "b", "pid": 1, "started": 1});
    let take = |id: &str| {
        ask(json!({"take_lease": {"name": "local/shop/writer", "holder": holder(id), "lives_ms": 60_000}}))["data"].clone()
    };
    assert_eq!(take("one"), json!({"ours": {"generation": 1}}));
    assert_eq!(take("two")["theirs"]["holder"]["id"], "one");
    let lease = json!({"name": "local/shop/writer", "holder": "one", "generation": 1});
    let renewed = json!({"name": "local/shop/writer", "holder": "one", "generation": 1, "lives_ms": 60_000});
    assert_eq!(ask(json!({"renew_lease": renewed}))["data"]["kept"], true);
    ask(json!({"release_lease": lease}));
    assert_eq!(take("two"), json!({"ours": {"generation": 2}}));
    for bad in [
        json!({"get": {"key": "reg/web/p/0:10.0.0.1"}}),
        json!({"txn": {"writes": [{"key": "reg/x", "value": ""}]}}),
        json!({"txn": {"writes": [{"key": "lease/local/shop/writer", "value": "{}"}]}}),
        json!({"range": {"prefix": ""}}),
        json!({"drop": {}}),
        json!({}),
    ] {
        assert_eq!(ask(bad.clone())["result"], false, "{bad}");
    }
}

#[test]
fn openapi_lists_every_route_and_metrics_count() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server(folder.path());
    let _agent = Agent::new(&server, "a");
    server.gse("register_proc_info", body(spec("./run"), None));
    let auth = "Authorization: Basic YWxsOnMzY3JldA==\r\n";
    let (_, text) = server.send("GET", "/openapi.json", auth, b"");
    let description: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(description["openapi"], "3.1.0");
    for (method, path, _) in abide::gateway::routes::all() {
        let operation = &description["paths"][&path][method.to_lowercase()];
        assert!(
            operation["summary"].is_string() && operation["responses"]["200"].is_object(),
            "{method} {path}"
        );
        if let Some(schema) = operation.pointer("/requestBody/content/application~1json/schema/$ref") {
            let pointer = schema.as_str().expect("text").trim_start_matches('#').to_owned();
            assert!(description.pointer(&pointer).is_some(), "{pointer} is not there");
        }
    }
    // One path has many requests: the schema lists exactly those that the decoder accepts, by its own error message.
    let accepted =
        serde_json::from_str::<StoreRequest>("{\"?\": {}}").expect_err("no such request").to_string();
    let (_, accepted) = accepted.split_once("expected one of ").expect("the accepted requests");
    let mut accepted: Vec<&str> = accepted.split('`').skip(1).step_by(2).collect();
    accepted.sort_unstable();
    let requests = description["components"]["schemas"]["State"]["oneOf"].as_array().expect("requests");
    let mut described: Vec<&str> =
        requests.iter().map(|request| request["required"][0].as_str().expect("a name")).collect();
    described.sort_unstable();
    assert_eq!(described, accepted);
    let (_, text) = server.send("GET", "/metrics", auth, b"");
    for line in [
        "abide_gateway_requests_total{call=\"register\",result=\"ok\"} 1",
        "abide_gateway_registered 1",
        "abide_gateway_agent_sessions 1",
        "abide_gateway_ready 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }
    assert!(!text.contains("s3cret"));
}

fn job(name: &str, setup: &str) -> Value {
    json!({"proc_name": name, "setup_path": setup, "pid_path": "/run/x.pid", "type": 1, "start_cmd": setup,
           "ip_list": [{"ip": "10.0.0.1", "bk_cloud_id": 0}]})
}

fn operate_process(processes: Value) -> Value {
    json!({"bk_biz_id": 1, "op_type": 0, "process_infos": processes})
}

#[test]
fn a_job_call_is_judged_process_by_process_and_bound_to_its_namespaces() {
    let folder = tempfile::tempdir().expect("a folder");
    let apps =
        "apps:\n  - {code: all, secret: s3cret}\n  - {code: job, secret: s3cret, namespaces: [job-1]}\n";
    let server = Server::start(&folder.path().join("store.db"), Duration::from_secs(10), apps, TOKENS);
    let mut agent = Agent::new(&server, "a");
    let path = "/api/c/compapi/v2/job/operate_process/";
    // A process that was started elsewhere is that process, and only for those who may touch it.
    begin(&server, spec("./run"), 0);
    agent.complete_next_op();
    let auth = "X-Bkapi-Authorization: {\"bk_app_code\": \"job\", \"bk_app_secret\": \"s3cret\"}\r\n";
    let other = operate_process(json!([job("p", "/opt/p")])).to_string();
    let (_, text) = server.send("POST", path, auth, other.as_bytes());
    assert!(text.contains("1900403") && !text.contains("web"), "{text}");
    // One that is wrong is named in its row, and the others run.
    let call = |processes: Value| server.call("POST", path, operate_process(processes));
    let result = |answer: &Value| {
        let body = json!({"bk_biz_id": 1, "bk_gse_taskid": answer["data"]["bk_gse_taskid"]});
        server.call("POST", "/api/c/compapi/v2/job/get_proc_result/", body)["data"]["result"].clone()
    };
    let with = |field: &str, value: Value| {
        let mut process = job("q", "/opt/q");
        process[field] = value;
        process
    };
    for (process, says) in [
        (with("proc_name", json!("")), "process_infos[1].proc_name is missing"),
        (with("pid_path", Value::Null), "process_infos[1].pid_path is missing"),
        (
            with("ip_list", json!([{"ip": "10.0.0.1", "bk_cloud_id": 0}, {"ip": "bogus", "bk_cloud_id": 0}])),
            "process_infos[1].ip_list[1].ip",
        ),
        (with("ip_list", json!([])), "process_infos[1].ip_list is missing"),
        (with("type", json!(7)), "process_infos[1].type"),
        (with("type", json!(0)), "process_infos[1].cycle_time"),
        (with("cpu_lmt", json!(500)), "process_infos[1].cpu_lmt"),
    ] {
        let rows = result(&call(json!([job("r", "/opt/r"), process])));
        let named = |row: &Value| row["error_msg"].as_str().is_some_and(|text| text.starts_with(says));
        assert!(rows.as_object().is_some_and(|rows| rows.values().any(named)), "{says}: {rows}");
        let other = agent.complete_next_op();
        assert!(other["instance"].as_str().is_some_and(|key| key.ends_with(":r")), "{says}: {other}");
        if says.contains("ip_list[1]") {
            agent.complete_next_op();
        }
    }
    let manage = json!({"bk_biz_id": 1, "op_type": 1, "process_infos": [job("q", "/opt/q")]});
    let rows = result(&server.call("POST", "/api/c/compapi/v2/job/manage_proc/", manage));
    assert!(rows.to_string().contains("proc_owner is missing"), "{rows}");
    let nowhere = json!({"op_type": 0, "process_infos": [job("q", "/opt/q")]});
    assert_eq!(server.call("POST", path, nowhere)["result"], false, "a business is required");
    // Two places are two instances, also where their programs are called alike, in one call or in two.
    let answer = call(json!([job("same", "/v1"), job("same", "/v2")]));
    assert_eq!((&answer["result"], &answer["message"]), (&json!(true), &json!("")), "{answer}");
    assert!(answer["request_id"].is_string() && answer.get("permission").is_some(), "{answer}");
    let (first, second) = (agent.complete_next_op(), agent.complete_next_op());
    assert_ne!(first["instance"], second["instance"]);
    call(json!([job("same", "/v3")]));
    let third = agent.complete_next_op();
    assert!(third["instance"] != first["instance"] && third["instance"] != second["instance"], "{third}");
    call(json!([job("same", "/v1")]));
    assert_eq!(agent.next("op")["instance"], first["instance"], "and each stays what it is");
}
