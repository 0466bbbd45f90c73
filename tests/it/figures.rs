//! Figures and limits of process trees: real servers, measured by the agent and by this test.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::apply::Machine;
use crate::controller_api::{address, converged, get, send, token};
use crate::fixtures::schemas::assert_described;
use crate::process_tree::{START, STOP, replaced};
use crate::support::{needs, needs_root, until};
use crate::system::{System, is_alive, parent_of, processes};
use crate::watch::watch;

/// A system whose agent samples every second.
fn sampled() -> System {
    let mut system = System::without_agent();
    system.start_agent_with(&["--sample-secs", "1"], &[]);
    system
}

fn field(pid: u32, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(&format!("{name}:"))).unwrap_or_default();
    line.split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or(0)
}

/// A process and its descendants.
fn tree(root: u32) -> Vec<u32> {
    let mut all = vec![root];
    let every = processes();
    let mut next = 0;
    while next < all.len() {
        let parent = all[next];
        all.extend(every.iter().filter(|pid| parent_of(**pid) == Some(parent) && is_alive(**pid)));
        next += 1;
    }
    all
}

fn figures(system: &System, name: &str) -> Value {
    system.process(name)["figures"].clone()
}

fn series(system: &System, name: &str) -> Value {
    let path = format!("/api/abide/v1/processes/figures?instance=0:127.0.0.1:web:{name}");
    system.server.call("GET", &path, json!({}))
}

/// A pre-forking server: each worker has memory of its own and a thread, one of them computes.
const WORKERS: &str = r#"
import os, threading, time
for number in range(3):
    if os.fork() == 0:
        data = bytearray(os.urandom(1 << 20)) * 20
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        while number == 0: pass
        time.sleep(1000)
open("ready", "w").close()
time.sleep(1000)
"#;

#[test]
fn the_figures_of_a_tree_are_the_sum_of_its_processes() {
    if !needs("python3") || !needs_root() {
        return;
    }
    for groups in [true, false] {
        let mut system = System::without_agent();
        if groups {
            system.start_agent_with(&["--sample-secs", "1"], &[]);
        } else {
            system.start_agent_without_groups(&["--sample-secs", "1"]);
        }
        std::fs::write(system.path("workers.py"), WORKERS).expect("a script");
        let spec = system.spec("w", "exec python3 workers.py");
        assert_eq!(system.operate("w", START, &spec).0, 0);
        let pid = system.pid("w").expect("a pid");
        until("all workers", || system.path("ready").exists() && tree(pid).len() == 4);
        until("the workers have their memory", || {
            tree(pid).iter().map(|pid| field(*pid, "VmRSS")).sum::<u64>() > 60_000
        });
        until("figures of the whole tree", || {
            let sum: u64 = tree(pid).iter().map(|pid| field(*pid, "VmRSS") * 1024).sum();
            let row = figures(&system, "w");
            let memory = row["memory"].as_u64().unwrap_or(0);
            row["processes"] == 4 && memory.abs_diff(sum) < sum / 10 && row["cores"].as_f64() > Some(0.1)
        });
        let row = figures(&system, "w");
        let threads: u64 = tree(pid).iter().map(|pid| field(*pid, "Threads")).sum();
        let fds = |pid: &u32| std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
        let fds: usize = tree(pid).iter().map(fds).sum();
        assert_eq!((&row["threads"], &row["fds"]), (&json!(threads), &json!(fds)), "groups: {groups}");
        assert!(row["cores"].as_f64() < Some(1.5), "{row}");
        // GSE's rows have shares of the host.
        let body = json!({"meta": {"namespace": "web", "name": "w"}, "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}]});
        let status = system.server.gse("get_proc_status", body)["data"]["proc_infos"][0].clone();
        let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        let usage = status["cpu_usage"].as_f64().expect("a number");
        assert!(usage > 5.0 / cores && usage < 160.0 / cores, "{status}");
        assert!(status["mem_usage"].as_f64() > Some(0.1) && status["fd"] == json!(fds), "{status}");
        // Operation 2 measures now.
        let row = system.row("w", &system.begin("w", 2, &Value::Null));
        let content: Value = serde_json::from_str(row["content"].as_str().expect("text")).expect("JSON");
        let live = &content["process"][0]["instance"][0];
        assert_eq!((&live["threadCount"], &live["diskSize"]), (&json!(threads), &json!(-1)), "{live}");
        assert!(live["usePhyMem"].as_u64() > Some(60_000) && live["cpuUsage"].as_f64() > Some(1.0), "{live}");
        assert!(
            live["stat"].as_str().is_some_and(|stat| !stat.is_empty()) && live["utime"].is_string(),
            "{live}"
        );
        assert_eq!(system.operate("w", STOP, &Value::Null).0, 0);
        assert_eq!(figures(&system, "w"), Value::Null, "not running");
    }
}

#[test]
fn figures_are_sampled_without_a_write_and_the_last_hour_survives_a_kill_of_the_agent() {
    let mut system = sampled();
    // One that computes, so that its figures differ in each batch.
    let spec =
        system.spec("busy", "while :; do i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; sleep 0.2; done");
    assert_eq!(system.operate("busy", START, &spec).0, 0);
    until("figures", || figures(&system, "busy")["cores"].as_f64() > Some(0.0));
    let number =
        || system.server.call("GET", "/api/abide/v1/processes?limit=1", json!({}))["data"]["as_of"].clone();
    let (before, first) = (number(), figures(&system, "busy")["time"].clone());
    let points = |system: &System| series(system, "busy")["data"]["points"].as_array().map_or(0, Vec::len);
    let begun = points(&system);
    until("several batches", || points(&system) >= begun + 4);
    until("another batch", || figures(&system, "busy")["time"] != first);
    assert_eq!(number(), before, "figures write nothing, so no watch wakes");
    let answer = series(&system, "busy");
    assert!(answer["data"]["now"]["memory"].as_u64() > Some(100_000), "{answer}");
    let document = system.server.call("GET", "/openapi.json", json!({}));
    assert_described(&document, "GET", "/api/abide/v1/processes/figures", 200, &answer);
    let rows = system.server.call("GET", "/api/abide/v1/processes", json!({}));
    assert_described(&document, "GET", "/api/abide/v1/processes", 200, &rows);
    let times: Vec<&str> = answer["data"]["points"]
        .as_array()
        .expect("points")
        .iter()
        .filter_map(|point| point["time"].as_str())
        .collect();
    assert!(times.is_sorted() && times.len() <= 60, "{times:?}");
    // The ring outlives a relaunch and the agent.
    let pid = system.pid("busy").expect("a pid");
    crate::system::kill(pid, "KILL");
    replaced(&system, "busy", pid);
    assert!(points(&system) >= begun + 4);
    let before = times_of(&series(&system, "busy"));
    system.kill_agent();
    until("the agent is gone", || figures(&system, "busy").is_null());
    assert_eq!(system.process("busy")["cpu"], 0.0);
    assert_eq!(series(&system, "busy")["result"], false);
    system.start_agent_with(&["--sample-secs", "1"], &[]);
    until("the samples of the last agent, and new ones", || {
        let now = times_of(&series(&system, "busy"));
        now.starts_with(&before) && now.len() > before.len()
    });
    // A damaged end loses the samples behind it, not the agent.
    system.kill_agent();
    let file = system.path("agent/figures");
    let mut bytes = std::fs::read(&file).expect("figures");
    bytes.truncate(bytes.len() - 3);
    std::fs::write(&file, [bytes, vec![0xff; 100]].concat()).expect("it is written");
    system.start_agent_with(&["--sample-secs", "1"], &[]);
    until("the samples before the damage", || times_of(&series(&system, "busy")).starts_with(&before));
    assert!(system.log().contains("cannot read all figures of the last hour"), "{}", system.log());
    // An instance that is not registered leaves none.
    assert_eq!(system.operate("busy", STOP, &spec).0, 0);
    let meta = json!({"meta": {"namespace": "web", "name": "busy"}, "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}]});
    assert_eq!(system.server.gse("unregister_proc_info", meta)["result"], true);
    until("no samples", || times_of(&series(&system, "busy")).is_empty());
    system.kill_agent();
    system.start_agent_with(&["--sample-secs", "1"], &[]);
    assert_eq!(system.operate("busy", START, &spec).0, 0);
    until("its own samples", || !times_of(&series(&system, "busy")).is_empty());
    assert!(!times_of(&series(&system, "busy")).iter().any(|time| before.contains(time)));
}

/// The times of a series.
fn times_of(series: &Value) -> Vec<String> {
    let points = series["data"]["points"].as_array().into_iter().flatten();
    points.filter_map(|point| Some(point["time"].as_str()?.to_owned())).collect()
}

/// Waits for an exit because of a limit, and returns its detail.
fn ended_by_limit(system: &System, name: &str) -> String {
    let begin = Instant::now();
    loop {
        let exit = system.process(name)["last_exit"].clone();
        if exit["reason"] == "limit" {
            return exit["detail"].as_str().expect("text").to_owned();
        }
        assert!(begin.elapsed() < Duration::from_secs(40), "{exit} {}", system.log());
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_limit_in_bytes_ends_a_hog_and_is_named() {
    if !needs("python3") {
        return;
    }
    let system = sampled();
    let mut spec =
        system.spec("hog", "exec python3 -c 'import time; data = bytearray(200_000_000); time.sleep(1000)'");
    spec["limits"] = json!({"memory": 100_000_000});
    assert_eq!(system.operate("hog", START, &spec).0, 0);
    let detail = ended_by_limit(&system, "hog");
    let used = detail.strip_prefix("memory ").and_then(|rest| rest.strip_suffix(" MB of 100 MB"));
    assert!(
        used.and_then(|used| used.parse::<u64>().ok()).is_some_and(|used| (195..260).contains(&used)),
        "{detail}"
    );
    until("it is relaunched", || system.process("hog")["restarts"].as_u64() >= Some(1));
}

#[test]
fn a_changed_limit_takes_effect_without_a_restart() {
    if !needs("python3") {
        return;
    }
    let system = sampled();
    let hog = "exec python3 -c 'import time; data = bytearray(200_000_000); time.sleep(1000)'";
    let mut spec = system.spec("hog", hog);
    spec["limits"] = json!({"memory": 900_000_000});
    assert_eq!(system.operate("hog", START, &spec).0, 0);
    let pid = system.pid("hog").expect("a pid");
    until("it uses its memory", || field(pid, "VmRSS") > 190_000);
    spec["limits"] = json!({"memory": 100_000_000});
    let host = json!([{"ip": "127.0.0.1", "bk_cloud_id": 0}]);
    let body = json!({"meta": {"namespace": "web", "name": "hog"}, "hosts": host, "spec": spec});
    assert_eq!(system.server.gse("update_proc_info", body)["result"], true);
    let detail = ended_by_limit(&system, "hog");
    assert!(detail.ends_with(" MB of 100 MB"), "{detail}");
    assert_eq!(
        system.process("hog")["exits"]
            .as_array()
            .and_then(|exits| exits.last())
            .map(|exit| exit["pid"].clone()),
        Some(json!(pid)),
        "the same process"
    );
}

#[test]
fn a_limit_in_cores_ends_a_hog_and_is_named() {
    let system = sampled();
    let mut spec = system.spec("hog", "while :; do :; done");
    spec["limits"] = json!({"cpu": 0.2});
    assert_eq!(system.operate("hog", START, &spec).0, 0);
    let detail = ended_by_limit(&system, "hog");
    let used = detail.strip_prefix("cpu ").and_then(|rest| rest.strip_suffix(" cores of 0.2"));
    // The text has two digits: on a busy host, the hog may have used little more than its limit.
    assert!(used.and_then(|used| used.parse::<f64>().ok()).is_some_and(|used| used >= 0.2), "{detail}");
    assert!(system.log().contains("resource limit exceeded"));
}

/// Rows of the controller have the details of the gateway's rows.
#[test]
fn rows_of_the_controller_have_figures_and_their_source() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let _watch = watch(&machine, "watch.log", &[]);
    let at = address(&machine, "watch.log");
    until("it converges", || converged(at));
    // The details of the gateway's row: the first sample is taken 2 s after a launch.
    let row = || get(at, "/api/v1/processes").json()[0].clone();
    until("its figures are sampled", || row()["memory"].as_u64().is_some_and(|bytes| bytes > 0));
    let listed = || {
        let (_, out, _) = machine.run(&["get", "processes", "-o", "json"]);
        serde_json::from_str::<Value>(&out).unwrap_or_default()[0].clone()
    };
    let (shown, listed) = (row(), listed());
    for field in ["cpu", "mem", "cores", "fds", "threads"] {
        assert!(shown[field].is_number() && listed[field].is_number(), "{field}: {shown:#} {listed:#}");
    }
    assert_eq!((&shown["restarts"], &shown["last_exit"]), (&json!(0), &Value::Null), "{shown:#}");
    assert_eq!(shown["source"], shown["declared"]);
    assert!(shown["source"].as_str().is_some_and(|at| at.ends_with("a.yaml:1:1")), "{shown:#}");
    assert!(listed["source"].as_str().is_some_and(|at| at.ends_with("a.yaml:1:1")), "{listed:#}");
    // Without the token, a message that may quote output is hidden.
    let full = send(at, "GET", "/api/v1/processes", &token(&machine), b"").json();
    assert_eq!((&shown["message"], full[0]["message"].is_string()), (&Value::Null, true), "{full:#}");
}

/// The agent samples once per minute. The first sample of a process is at the gateway within seconds.
#[test]
fn a_started_process_has_figures_long_before_the_next_interval() {
    let system = System::new();
    // The first batch of the session has been sent: the next one is a minute away.
    assert_eq!(system.operate("early", START, &system.spec("early", "exec sleep 1000")).0, 0);
    until("figures of the first process", || !figures(&system, "early").is_null());
    for name in ["one", "two"] {
        assert_eq!(system.operate(name, START, &system.spec(name, "exec sleep 1000")).0, 0);
        let begin = Instant::now();
        until("figures of a new process", || figures(&system, name)["memory"].as_u64() > Some(0));
        assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    }
}
