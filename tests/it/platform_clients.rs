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
        assert_eq!((system.facts("d"), is_alive(old)), ((true, true, true), false));
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
