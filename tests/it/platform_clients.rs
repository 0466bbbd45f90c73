//! Clients of the platform: their requests, byte for byte, against a real gateway and agent.

use std::time::Duration;

use serde_json::{Value, json};

use crate::server::Server;
use crate::support::until;
use crate::system::{APPS, System, is_alive, kill, lines};

const START: i64 = 0;
const STOP: i64 = 1;
const UNHOST: i64 = 4;
const RESTART: i64 = 7;
const RELOAD: i64 = 8;

/// A daemon whose restart script stops the old process, if any, and starts a new one.
fn daemon(system: &System, name: &str) -> Value {
    let pid = format!("run/{name}.pid");
    std::fs::create_dir_all(system.path("run")).expect("a folder");
    let start = format!("sleep 1000 >/dev/null 2>&1 & echo $! > {pid}");
    std::fs::write(system.path("start.sh"), format!("{start}\n")).expect("a script");
    let stop = format!("[ -f {pid} ] && kill -9 $(cat {pid})");
    std::fs::write(system.path("restart.sh"), format!("echo ran >> restarts\n{stop}\n{start}\n"))
        .expect("a script");
    let mut spec = system.spec(name, "sh start.sh");
    spec["identity"]["proc_name"] = json!("sleep");
    spec["control"]["start_mode"] = json!("daemon");
    spec["control"]["restart_cmd"] = json!("sh restart.sh");
    spec["monitor_policy"]["start_check_secs"] = json!(2);
    spec
}

/// Waits until the process is back under another pid.
fn relaunched(system: &System, name: &str, old: u32) -> u32 {
    kill(old, "KILL");
    until("it is guarded", || system.pid(name).is_some_and(|pid| pid != old && is_alive(pid)));
    system.pid(name).expect("a pid")
}

#[test]
fn a_restart_starts_a_stopped_process_and_supervises_it() {
    let system = System::new();
    // Never started: an installation of a plugin ends with this operation.
    let spec = daemon(&system, "d");
    let (code, message) = system.operate("d", RESTART, &spec);
    assert_eq!(code, 0, "{message}");
    assert_eq!((system.facts("d"), lines(&system.path("restarts"))), ((true, true, true), 1));
    let first = system.pid("d").expect("a pid");
    let second = relaunched(&system, "d", first);
    // Stopped, without a restart_cmd: started.
    let mut plain = spec.clone();
    plain["control"].as_object_mut().expect("an object").remove("restart_cmd");
    assert_eq!(system.operate("d", STOP, &spec).0, 0);
    assert!(!is_alive(second) && system.facts("d") == (true, false, false));
    assert_eq!(system.operate("d", RESTART, &plain).0, 0);
    assert_eq!((system.facts("d"), lines(&system.path("restarts"))), ((true, true, true), 1));
    // Running and not supervised: supervised, by command and without one.
    for spec in [&spec, &plain] {
        assert_eq!(system.operate("d", UNHOST, spec).0, 0);
        let old = system.pid("d").expect("a pid");
        assert_eq!(system.operate("d", RESTART, spec).0, 0);
        assert_eq!(system.facts("d"), (true, true, true));
        // A restart command need not wait for the end of the old process.
        until("the old process ended", || !is_alive(old));
    }
    // A foreground process, and a failed restart that leaves everything as it was.
    let good = system.spec("f", "exec sleep 1000");
    assert_eq!(system.operate("f", RESTART, &good).0, 0);
    assert_eq!(system.facts("f"), (true, true, true));
    let mut wrong = daemon(&system, "w");
    wrong["control"]["restart_cmd"] = json!("echo broken; exit 3");
    let (code, message) = system.operate("w", RESTART, &wrong);
    assert!(code == 65535 && message.contains("broken"), "{code} {message}");
    assert_eq!(system.facts("w"), (false, false, false));
}

#[test]
fn a_restart_by_the_planner_leaves_supervision_as_it_was() {
    let system = System::new();
    let spec = system.spec("p", "exec sleep 1000");
    assert_eq!(system.operate_as_planner("p", RESTART, &spec).0, 829);
    assert_eq!(system.operate_as_planner("p", START, &spec).0, 0);
    assert_eq!(system.operate_as_planner("p", UNHOST, &spec).0, 0);
    assert_eq!(system.operate_as_planner("p", RESTART, &spec).0, 0);
    assert_eq!(system.facts("p"), (true, false, true));
}

/// bk-nodeman sends `reload_cmd or restart_cmd`.
#[test]
fn a_reload_by_a_restart_script_leaves_one_supervised_process() {
    let system = System::new();
    let mut spec = daemon(&system, "d");
    spec["control"]["reload_cmd"] = spec["control"]["restart_cmd"].clone();
    assert_eq!(system.operate("d", START, &spec).0, 0);
    let first = system.pid("d").expect("a pid");
    let (code, message) = system.operate("d", RELOAD, &spec);
    assert_eq!(code, 0, "{message}");
    let second = system.pid("d").expect("a pid");
    assert!(second != first && !is_alive(first) && is_alive(second));
    assert_eq!(system.facts("d"), (true, true, true));
    assert_eq!(lines(&system.path("restarts")), 1);
    let third = relaunched(&system, "d", second);
    let here = system.folder.path();
    let running: Vec<u32> = crate::system::processes()
        .into_iter()
        .filter(|pid| {
            let path = |name: &str| std::fs::read_link(format!("/proc/{pid}/{name}")).unwrap_or_default();
            path("cwd").starts_with(here) && path("exe").ends_with("sleep") && is_alive(*pid)
        })
        .collect();
    assert_eq!(running, [third]);
}

/// The start of a task without an agent, and its id.
fn job_task(server: &Server) -> String {
    let process = json!({"setup_path": "/opt/p", "proc_name": "p", "pid_path": "/run/p.pid", "type": 1,
        "ip_list": [{"bk_cloud_id": "0", "ip": "10.0.0.1"}]});
    let body = json!({"bk_biz_id": 2, "op_type": 0, "process_infos": [process]});
    let answer = server.call("POST", "/api/c/compapi/v2/job/operate_process/", body);
    answer["data"]["bk_gse_taskid"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned()
}

fn gateway() -> (Server, tempfile::TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    let patience = Duration::from_millis(1);
    let server = Server::start(&folder.path().join("store.db"), patience, APPS, "");
    (server, folder)
}

#[test]
fn the_result_of_a_job_task_is_read_with_get() {
    let (server, _folder) = gateway();
    let id = job_task(&server).replace(':', "%3A");
    let secret = "bk_app_code=all&bk_app_secret=s3cret&bk_username=admin";
    for (path, expected) in [
        (format!("job/get_proc_result?bk_biz_id=2&bk_gse_taskid={id}&{secret}"), true),
        (format!("jobv3/get_proc_result/?bk_scope_type=biz&bk_scope_id=2&bk_gse_taskid={id}&{secret}"), true),
        (format!("job/get_proc_result?bk_biz_id=2&{secret}"), false),
        (format!("job/get_proc_result?bk_gse_taskid={id}"), false),
        (format!("job/get_proc_result?bk_gse_taskid={id}&bk_app_code=all&bk_app_secret=wrong"), false),
    ] {
        let (_, text) = server.send("GET", &format!("/api/c/compapi/v2/{path}"), "", b"");
        let answer: Value =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}: {text}"));
        assert_eq!(answer["result"], expected, "{path}: {text}");
        assert!(!expected || answer["data"]["result"]["/opt/p/p:0:10.0.0.1"].is_object(), "{path}: {text}");
        assert!(!text.contains("s3cret"), "{text}");
    }
    // By header, and with POST as well.
    let header = "X-Bkapi-Authorization: {\"bk_app_code\":\"all\",\"bk_app_secret\":\"s3cret\"}\r\n";
    for method in ["GET", "POST"] {
        let path = format!("/api/c/compapi/v2/job/get_proc_result?bk_biz_id=2&bk_gse_taskid={id}");
        let (_, text) = server.send(method, &path, header, b"");
        assert!(text.contains("/opt/p/p:0:10.0.0.1"), "{method}: {text}");
    }
}

#[test]
fn a_process_group_is_a_row_of_the_published_shape() {
    let (server, _folder) = gateway();
    let hosts = json!([{"ip": "10.0.0.1", "bk_cloud_id": "0", "bk_supplier_id": 3}]);
    let pool =
        json!({"cpu_pool_limit": 10.0, "mem_pool_limit": 20.0, "cpu_pool_weight": 0, "mem_pool_weight": 1});
    let groups = json!([{"id": 1, "resource": pool}, {"id": 2, "resource": {"cpu_pool_limit": 5.0}}]);
    let set = json!({"meta": {"namespace": "web"}, "hosts": hosts, "spec": {"process_group": groups}});
    assert_eq!(server.gse("set_process_group_info", set)["result"], true);
    let meta = json!({"namespace": "web", "name": "p", "labels": {"set": "3"}});
    let answer = server.gse("get_process_group_info", json!({"meta": meta, "hosts": hosts}));
    let host = json!({"ip": "10.0.0.1", "bk_cloud_id": 0, "bk_supplier_id": 3});
    let row = |id: u64, resource: Value| json!({"meta": meta, "host": host, "id": id, "resource": resource});
    let expected = json!([row(1, pool), row(2, json!({"cpu_pool_limit": 5.0}))]);
    assert_eq!(answer["data"]["process_group_infos"], expected);
}

/// The rows of a call to operate_proc_multi.
fn multi(server: &Server, items: Value) -> Value {
    let answer = server.gse("operate_proc_multi", json!({"proc_operate_req": items}));
    let id = answer["data"]["task_id"].as_str().unwrap_or_else(|| panic!("{answer}"));
    let form = |name: &str| server.gse(name, json!({"task_id": id}))["data"].clone();
    let (first, second) = (form("get_proc_operate_result"), form("get_proc_operate_result_v2"));
    let many = |rows: &Value| rows.as_object().map_or(0, serde_json::Map::len);
    assert_eq!(many(&first), many(&second), "{first} {second}");
    second
}

fn code(rows: &Value, key: &str) -> i64 {
    rows[key]["error_code"].as_i64().unwrap_or_else(|| panic!("no row {key:?} in {rows}"))
}

fn message<'a>(rows: &'a Value, key: &str) -> &'a str {
    rows[key]["error_msg"].as_str().unwrap_or_else(|| panic!("no row {key:?} in {rows}"))
}

/// One item per kind of error: each has its row, and the valid ones are carried out.
#[test]
fn a_bad_item_of_a_batch_has_its_own_row_and_the_others_run() {
    let system = System::new();
    let host = json!({"ip": "127.0.0.1", "bk_cloud_id": "0"});
    let good = |name: &str| {
        let spec = system.spec(name, "exec sleep 1000");
        json!({"meta": {"namespace": "web", "name": name}, "hosts": [host], "op_type": START, "spec": spec})
    };
    let bad = |name: &str, path: &str, value: Value| {
        let mut item = good(name);
        *item.pointer_mut(path).unwrap_or_else(|| panic!("{path}")) = value;
        item
    };
    let mut without = good("nospec");
    without.as_object_mut().expect("an object").remove("spec");
    let mut unnamed = good("x");
    unnamed["meta"].as_object_mut().expect("an object").remove("name");
    let mut two = good("two");
    two["hosts"] =
        json!([host, {"ip": "nowhere", "bk_cloud_id": 0}, {"ip": "10.0.0.7", "bk_cloud_id": "x"}, 7]);
    let rows = multi(
        &system.server,
        json!([
            good("one"),
            bad("empty", "/spec/identity/setup_path", json!("")),
            bad("typed", "/spec/monitor_policy", json!("often")),
            bad("op", "/op_type", Value::Null),
            bad("hostless", "/hosts", json!([])),
            without,
            unnamed,
            "not an object",
            good("twice"),
            good("twice"),
            two,
        ]),
    );
    let until_done = |name: &str| until("it runs", || system.pid(name).is_some_and(is_alive));
    until_done("one");
    until_done("two");
    assert_eq!(rows.as_object().map(serde_json::Map::len), Some(13), "{rows}");
    for (key, text) in [
        ("0:127.0.0.1:web:empty", "proc_operate_req[1].spec.identity.setup_path is missing"),
        ("0:127.0.0.1:web:typed", "proc_operate_req[2]: a field has the wrong type: expected an object"),
        ("0:127.0.0.1:web:op", "proc_operate_req[3].op_type is missing"),
        ("proc_operate_req[4]", "proc_operate_req[4].hosts is missing"),
        ("0:127.0.0.1:web:nospec", "proc_operate_req[5].spec is missing"),
        ("0:127.0.0.1:web:", "proc_operate_req[6].meta.name is missing"),
        ("proc_operate_req[7]", "proc_operate_req[7]: "),
        ("0:127.0.0.1:web:twice", "the call names 0:127.0.0.1:web:twice more than once"),
        ("0:nowhere:web:two", "hosts[1].ip is not an IP address"),
        ("x:10.0.0.7:web:two", "hosts[2] cannot be used: bk_cloud_id is not a whole number"),
        ("hosts[3]:web:two", "hosts[3] is not an object"),
    ] {
        assert_eq!(code(&rows, key), 1_900_400, "{rows}");
        assert!(message(&rows, key).starts_with(text), "{key}: {rows}");
    }
    assert!(system.pid("twice").is_none() && system.pid("empty").is_none());
}

/// A batch of bad items only is a task as well, and so is the result after a restart of the gateway.
#[test]
fn a_batch_of_bad_items_only_has_rows() {
    let (server, folder) = gateway();
    let item = json!({"meta": {"namespace": "web", "name": "p"}, "hosts": [{"ip": "10.0.0.1", "bk_cloud_id": 0}],
        "op_type": START, "spec": {"identity": {"setup_path": ""}}});
    let answer = server.gse("operate_proc_multi", json!({"proc_operate_req": [item]}));
    let id = answer["data"]["task_id"].clone();
    let rows =
        |server: &Server| server.gse("get_proc_operate_result_v2", json!({"task_id": id}))["data"].clone();
    assert_eq!(code(&rows(&server), "0:10.0.0.1:web:p"), 1_900_400);
    let tasks = server.call("GET", "/api/abide/v1/tasks", json!({}));
    let task = tasks["data"].as_array().and_then(|all| all.iter().find(|task| task["id"] == id));
    let counts = task.map(|task| (task["rows"].clone(), task["done"].clone(), task["failed"].clone()));
    assert_eq!(counts, Some((json!(1), json!(1), json!(1))), "{tasks}");
    drop(server);
    let server = Server::start(&folder.path().join("store.db"), Duration::from_millis(1), APPS, "");
    assert_eq!(code(&rows(&server), "0:10.0.0.1:web:p"), 1_900_400);
    // What is not a batch is refused as a whole.
    for body in [json!({}), json!({"proc_operate_req": {}}), json!({"proc_operate_req": "x"}), json!([])] {
        let (status, text) =
            server.send("POST", "/api/c/compapi/v2/gse/operate_proc_multi/", "", body.to_string().as_bytes());
        assert!(text.contains("\"result\":false"), "{status} {body}: {text}");
    }
}

#[test]
fn a_bad_process_of_a_job_call_has_its_own_row_and_the_others_run() {
    let system = System::new();
    let process = |name: &str| {
        let spec = system.spec(name, "exec sleep 1000");
        let identity = &spec["identity"];
        let pid_path = identity["pid_path"].as_str().expect("a path");
        let start = format!("sleep 1000 > /dev/null 2>&1 & echo $! > {pid_path}");
        json!({"proc_name": "sleep", "setup_path": system.path(name), "pid_path": identity["pid_path"], "type": 1,
            "account": identity["user"], "value_key": name, "start_cmd": start,
            "ip_list": [{"bk_cloud_id": "0", "ip": "127.0.0.1"}]})
    };
    let edit = |name: &str, change: &dyn Fn(&mut Value)| {
        let mut process = process(name);
        change(&mut process);
        process
    };
    for name in ["one", "two"] {
        std::fs::create_dir_all(system.path(name)).expect("a folder");
    }
    let bad_hosts =
        json!([{"bk_cloud_id": 0, "ip": "127.0.0.1"}, {"ip": "10.0.0.8"}, {"bk_cloud_id": 0, "ip": "no"}]);
    let daemonless = |process: &mut Value| process["pid_path"] = json!("");
    let infos = json!([
        process("one"),
        edit("empty", &|process| process["setup_path"] = json!("")),
        edit("nopid", &daemonless),
        edit("typed", &|process| process["cycle_time"] = json!({})),
        edit("hostless", &|process| process["ip_list"] = json!([])),
        edit("two", &|process| process["ip_list"] = bad_hosts.clone()),
        process("same"),
        process("same"),
        Value::Null,
    ]);
    let call = |op: i64, infos: &Value| {
        let body = json!({"bk_biz_id": 2, "op_type": op, "process_infos": infos});
        let answer = system.server.call("POST", "/api/c/compapi/v2/job/operate_process/", body);
        let id = answer["data"]["bk_gse_taskid"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned();
        let body = json!({"bk_biz_id": 2, "bk_gse_taskid": id});
        let result = || {
            let answer = system.server.call("POST", "/api/c/compapi/v2/job/get_proc_result/", body.clone());
            answer["data"].clone()
        };
        until("the task ends", || result()["status"] == 1);
        result()["result"].clone()
    };
    let rows = call(START, &infos);
    let path = |name: &str, host: &str| format!("{}/sleep:{host}", system.path(name).display());
    let local = |name: &str| path(name, "0:127.0.0.1");
    assert_eq!(rows.as_object().map(serde_json::Map::len), Some(10), "{rows}");
    for (key, text) in [
        ("/sleep:0:127.0.0.1".to_owned(), "process_infos[1].setup_path is missing"),
        (local("nopid"), "process_infos[2].pid_path is missing"),
        (local("typed"), "process_infos[3]: a field has the wrong type: expected a whole number"),
        ("process_infos[4]".to_owned(), "process_infos[4].ip_list is missing"),
        (path("two", ":10.0.0.8"), "process_infos[5].ip_list[1]: bk_cloud_id is missing"),
        (path("two", "0:no"), "process_infos[5].ip_list[2].ip is not an IP address"),
        (local("same"), "the call names "),
        ("process_infos[8]".to_owned(), "process_infos[8] is not an object"),
    ] {
        assert_eq!(code(&rows, &key), 1_900_400, "{key}: {rows}");
        assert!(message(&rows, &key).starts_with(text), "{key}: {rows}");
    }
    for name in ["one", "two"] {
        assert_eq!(code(&rows, &local(name)), 0, "{rows}");
    }
    // A live check without a path means the process by namespace and name.
    let named = edit("one", &|process| process["setup_path"] = json!(""));
    let unknown = edit("three", &|process| {
        process["setup_path"] = json!("");
        process["proc_name"] = json!("other");
    });
    let rows = call(2, &json!([named, unknown]));
    let instance = &rows["/sleep:0:127.0.0.1"]["content"]["process"][0]["instance"][0];
    assert!(instance["pid"].as_i64().is_some_and(|pid| pid > 0), "{rows}");
    assert!(message(&rows, "/other:0:127.0.0.1").contains("no process job-2/three is registered"), "{rows}");
}

/// The same for the calls with a list of hosts: maps and rows.
#[test]
fn a_bad_host_of_a_list_has_its_own_row() {
    let system = System::new();
    let hosts = json!([{"ip": "127.0.0.1", "bk_cloud_id": "0"}, {"ip": "nowhere", "bk_cloud_id": 0},
        {"ip": "10.0.0.9"}, {"ip": "10.0.0.7", "bk_cloud_id": {}}]);
    let meta = json!({"namespace": "web", "name": "h"});
    let spec = system.spec("h", "exec sleep 1000");
    let body = |more: Value| {
        let mut body = json!({"meta": meta, "hosts": hosts});
        body.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
        body
    };
    let rows = system.server.gse("register_proc_info", body(json!({"spec": spec})))["data"].clone();
    let bad = ["0:0:nowhere:web:h", ":0:10.0.0.9:web:h", ":0:10.0.0.7:web:h"];
    assert_eq!(code(&rows, "0:0:127.0.0.1:web:h"), 0, "{rows}");
    assert!(bad.iter().all(|key| code(&rows, key) == 1_900_400), "{rows}");
    let status = system.server.gse("get_proc_status", body(json!({})))["data"]["proc_infos"].clone();
    let errors: Vec<&Value> = status
        .as_array()
        .into_iter()
        .flatten()
        .filter(|row| row["flag"] == 0 && row["message"] != "")
        .collect();
    assert!(errors.len() == 3 && status.as_array().map(Vec::len) == Some(4), "{status}");
    let agents = system.server.gse("get_agent_status", body(json!({})))["data"].clone();
    assert_eq!(
        (&agents["0:127.0.0.1"]["bk_agent_alive"], &agents["0:nowhere"]["bk_agent_alive"]),
        (&json!(1), &json!(0))
    );
    let group = json!({"spec": {"process_group": [{"id": 1, "resource": {"cpu_pool_limit": 5.0}}]}});
    let rows = system.server.gse("set_process_group_info", body(group))["data"].clone();
    assert_eq!((code(&rows, "0:0:127.0.0.1:web"), code(&rows, "0:0:nowhere:web")), (0, 1_900_400), "{rows}");
    let groups = system.server.gse("get_process_group_info", body(json!({})))["data"].clone();
    assert_eq!(groups["process_group_infos"].as_array().map(Vec::len), Some(1), "{groups}");
    let rows = {
        let answer = system.server.gse("operate_proc", body(json!({"op_type": START})));
        let id = answer["data"]["task_id"].clone();
        let rows = || system.server.gse("get_proc_operate_result", json!({"task_id": id}))["data"].clone();
        until("it ends", || code(&rows(), "0:0:127.0.0.1:web:h") != 115);
        rows()
    };
    assert_eq!(code(&rows, "0:0:127.0.0.1:web:h"), 0, "{rows}");
    assert!(bad.iter().all(|key| code(&rows, key) == 1_900_400), "{rows}");
    // Without any usable host there is nothing to do.
    let none = json!({"meta": meta, "hosts": [{"ip": "nowhere", "bk_cloud_id": 0}], "op_type": START});
    assert_eq!(system.server.gse("operate_proc", none)["result"], false);
}

/// In a live check an empty setup_path means the process by namespace and name.
#[test]
fn a_live_check_without_a_path_means_the_process_by_its_name() {
    let system = System::new();
    let spec = system.spec("n", "exec sleep 1000");
    assert_eq!(system.operate("n", START, &spec).0, 0);
    let host = json!([{"ip": "127.0.0.1", "bk_cloud_id": 0}]);
    let mut empty = spec.clone();
    empty["identity"]["setup_path"] = json!("");
    for (call, spec) in
        [("operate_proc_v2", Some(&empty)), ("operate_proc_v2", None), ("multi", Some(&empty))]
    {
        let mut item = json!({"meta": {"namespace": "web", "name": "n"}, "hosts": host, "op_type": 2});
        if let Some(spec) = spec {
            item["spec"] = spec.clone();
        }
        let answer = match call {
            "multi" => system.server.gse("operate_proc_multi", json!({"proc_operate_req": [item]})),
            call => system.server.gse(call, item),
        };
        let id = answer["data"]["task_id"].as_str().unwrap_or_else(|| panic!("{call}: {answer}"));
        let rows = || system.server.gse("get_proc_operate_result_v2", json!({"task_id": id}))["data"].clone();
        until("it ends", || code(&rows(), "0:127.0.0.1:web:n") != 115);
        let row = rows()["0:127.0.0.1:web:n"].clone();
        let content: Value =
            serde_json::from_str(row["content"].as_str().unwrap_or_default()).unwrap_or_default();
        let instance = &content["process"][0]["instance"][0];
        let top = ["ip", "utctime", "utctime2", "timezone", "process"];
        assert!(top.iter().all(|field| content.get(field).is_some()), "{content}");
        let numbers = [
            "pid",
            "cpuUsage",
            "cpuUsageAve",
            "phyMemUsage",
            "usePhyMem",
            "threadCount",
            "elapsedTime",
            "diskSize",
        ];
        assert!(numbers.iter().all(|field| instance[field].is_number()), "{instance}");
        let texts = [
            "processName",
            "cmdline",
            "version",
            "health",
            "startTime",
            "freeVMem",
            "stat",
            "utime",
            "stime",
        ];
        assert!(
            texts.iter().all(|field| instance[field].is_string()) && instance["isAuto"] == true,
            "{instance}"
        );
        assert!(instance["threadCount"] == 1 && instance["usePhyMem"].as_u64() > Some(0), "{instance}");
        assert_eq!((&instance["health"], &instance["stat"]), (&json!("Healthy"), &json!("S")), "{instance}");
        let pid = instance["pid"].as_u64();
        assert_eq!(pid, system.pid("n").map(u64::from), "{call}: {row}");
    }
}
