//! Monitoring by the agent while processes run: limits, pools, health, version, files, process trees, and orphans.

use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{needs, needs_root, skip, test_user, until};
use crate::system::{System, is_alive, kill, lines, parent_of, processes};

/// Is there a place for control groups here?
fn has_groups() -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let mount = mounts.lines().filter_map(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        (words.get(2) == Some(&"cgroup2")).then(|| words[1].to_owned())
    });
    let found = mount.into_iter().any(|mount| Path::new(&mount).join("cgroup.procs").exists());
    if !found {
        skip("no cgroup2 file system is mounted");
    }
    found && needs_root()
}

#[test]
fn only_the_process_over_its_limit_is_stopped() {
    if !needs("python3") {
        return;
    }
    let system = System::new();
    let innocent = system.spec("innocent", "sleep 1000");
    assert_eq!(system.operate("innocent", 0, &innocent).0, 0);
    let mut spins = system.spec("spins", "echo up >> spins; while :; do :; done");
    // One processor of two is half of the host; ten percent are a fifth of one.
    spins["resource"] = json!({"cpu": 10.0});
    let mut eats = system.spec(
        "eats",
        "echo up >> eats; exec python3 -c 'b = b\"x\" * (400 << 20); import time; time.sleep(1000)'",
    );
    eats["resource"] = json!({"mem": 0.5});
    for (name, spec) in [("spins", &mut spins), ("eats", &mut eats)] {
        spec["monitor_policy"]["start_retries"] = json!(0);
        spec["monitor_policy"]["start_interval"] = json!(120);
        assert_eq!(system.operate(name, 0, spec).0, 0, "{name}");
    }
    let pid = system.pid("innocent");
    for (name, says) in [("spins", "over its cpu limit"), ("eats", "over its memory limit")] {
        until("it was stopped", || {
            system.process(name)["message"].as_str().is_some_and(|text| text.contains(says))
        });
        let told = system.process(name);
        assert_eq!((&told["running"], &told["health"]), (&json!(false), &json!("Failed")), "{told}");
        assert!(told["next"].is_string(), "it is tried again later: {told}");
        assert_eq!(lines(&system.path(name)), 1);
    }
    assert_eq!(system.pid("innocent"), pid, "and no other process");
}

#[test]
fn an_exceeded_pool_stops_its_largest_process() {
    let system = System::new();
    let body = json!({"meta": {"namespace": "web"}, "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}],
                      "spec": {"process_group": [{"id": 1, "resource": {"cpu_pool_limit": 10.0, "mem_pool_limit": 90.0,
                                                                        "cpu_pool_weight": 0, "mem_pool_weight": 0}}]}});
    assert_eq!(system.server.gse("set_process_group_info", body)["result"], true);
    assert_eq!(system.operate("small", 0, &system.spec("small", "sleep 1000")).0, 0);
    let mut big = system.spec("big", "while :; do :; done");
    big["monitor_policy"]["start_retries"] = json!(0);
    assert_eq!(system.operate("big", 0, &big).0, 0);
    let small = system.pid("small");
    until("the pool was exceeded", || {
        system.process("big")["message"]
            .as_str()
            .is_some_and(|text| text.contains("the pool of namespace web"))
    });
    assert_eq!((system.process("big")["running"].clone(), system.pid("small")), (json!(false), small));
}

#[test]
fn health_version_and_files_are_reported_on_change() {
    let mut system = System::new();
    system.kill_agent();
    system.start_agent_with(&["--check-secs", "1"], &[]);
    let mut spec = system.spec("h", "sleep 1000");
    std::fs::write(system.path("well"), "").expect("a file");
    std::fs::write(system.path("app.conf"), "hello\n").expect("a file");
    spec["control"]["health_cmd"] = json!("test -e well || { echo it is ill; exit 2; }");
    spec["control"]["version_cmd"] = json!("echo 1.2.3; echo more");
    spec["configmap"] = json!([{"path": system.path("app.conf"), "md5": "b1946ac92492d2347c6235b4d2611184"},
                               {"path": system.path("none.conf"), "md5": "b1946ac92492d2347c6235b4d2611184"}]);
    assert_eq!(system.operate("h", 0, &spec).0, 0);
    let told = |system: &System, health: &str, config: &str| {
        until(&format!("{health}, {config}"), || {
            let row = system.process("h");
            row["health"] == health && row["config"][system.path("app.conf").display().to_string()] == config
        });
        system.process("h")
    };
    let row = told(&system, "Healthy", "as_stated");
    assert_eq!(
        (&row["version"], &row["config"][system.path("none.conf").display().to_string()]),
        (&json!("1.2.3"), &json!("missing"))
    );
    let pid = system.pid("h");
    std::fs::remove_file(system.path("well")).expect("it was there");
    std::fs::write(system.path("app.conf"), "other\n").expect("a file");
    let row = told(&system, "Degraded", "differs");
    assert!(row["message"].as_str().expect("text").contains("it is ill"), "{row}");
    std::fs::write(system.path("well"), "").expect("a file");
    let row = told(&system, "Healthy", "differs");
    assert_eq!((row["message"].as_str(), system.pid("h")), (Some(""), pid));
    // What hangs is not waited for, and operations are not held up by it.
    spec["control"]["health_cmd"] = json!("sleep 60");
    assert_eq!(system.operate("h", 7, &spec).0, 0);
    assert_eq!(system.process("h")["health"], "Starting");
    let begin = Instant::now();
    assert_eq!(system.operate("h", 1, &spec).0, 0);
    assert!(begin.elapsed() < Duration::from_secs(4));
}

#[test]
fn a_stop_ends_the_whole_process_tree() {
    if !has_groups() {
        return;
    }
    let system = System::new();
    // A child, and one that left the session and its parent.
    let script = "sleep 1001 & setsid sh -c 'sleep 1002 & echo $! > away' & echo $! > child; exec sleep 1000";
    let started = |name: &str| {
        let spec = system.spec(name, script);
        assert_eq!(system.operate(name, 0, &spec).0, 0);
        let read = |file: &str| std::fs::read_to_string(system.path(file)).ok()?.trim().parse::<u32>().ok();
        until("they are there", || read("away").is_some_and(is_alive));
        (spec, system.pid(name).expect("a pid"), read("away").expect("a pid"))
    };
    for (op, what) in [(1, "stop"), (9, "kill")] {
        let _ = std::fs::remove_file(system.path("away"));
        let (spec, main, away) = started(what);
        assert_eq!(system.operate(what, op, &spec).0, 0);
        until("all are gone", || !is_alive(main) && !is_alive(away));
    }
    // One that crashes leaves nothing behind for its successor to stumble over.
    let _ = std::fs::remove_file(system.path("away"));
    let (_, main, away) = started("crash");
    kill(main, "KILL");
    until("what it left is gone", || !is_alive(away));
    until("it is back", || system.pid("crash").is_some_and(|pid| pid != main && is_alive(pid)));
}

#[test]
fn many_simultaneous_exits_leave_no_zombie() {
    let soak: usize = std::env::var("ABIDE_SOAK").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let many = 100 * soak;
    let system = System::new();
    let name = |nth: usize| format!("p{nth}");
    let items: Vec<Value> = (0..many)
        .map(|nth| {
            json!({"meta": {"namespace": "web", "name": name(nth)}, "op_type": 0,
                   "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}], "spec": system.spec(&name(nth), "sleep 1000")})
        })
        .collect();
    let answer = system.server.gse("operate_proc_multi", json!({"proc_operate_req": items}));
    let task = answer["data"]["task_id"].clone();
    (0..many).for_each(|nth| assert_eq!(system.row(&name(nth), &task)["error_code"], 0));
    // A daemon whose starter is long gone is an orphan, and ours.
    let mut daemon = system.spec("sleep", "sleep 1000 >/dev/null 2>&1 & echo $! > run/sleep.pid");
    daemon["control"]["start_mode"] = json!("daemon");
    daemon["monitor_policy"]["start_check_secs"] = json!(2);
    assert_eq!(system.operate("sleep", 0, &daemon).0, 0);
    // And one without any holder.
    let stray = system.spec("stray", "(sleep 0.2 &) ; exec sleep 1000");
    assert_eq!(system.operate("stray", 0, &stray).0, 0);
    let agent = system.agent.as_ref().expect("it runs").id();
    let mine = || processes().into_iter().filter(|pid| parent_of(*pid) == Some(agent)).collect::<Vec<u32>>();
    let daemon = system.pid("sleep").expect("a pid");
    assert_eq!(parent_of(daemon), Some(agent), "an orphan of ours is ours");
    let before = mine();
    before.iter().for_each(|pid| kill(*pid, "KILL"));
    until("none of them is left, dead or alive", || {
        before.iter().all(|pid| !Path::new(&format!("/proc/{pid}")).exists())
    });
    until("all are back", || {
        (0..many).all(|nth| system.pid(&name(nth)).is_some_and(|pid| !before.contains(&pid) && is_alive(pid)))
    });
    until("no zombie is left", || mine().into_iter().all(is_alive));
}

#[test]
fn a_process_runs_as_its_user() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let spec = system.spec_of(&user, "n", "sleep 1000");
    assert_eq!(system.operate("n", 0, &spec), (0, "success".to_owned()));
    let pid = system.pid("n").expect("a pid");
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap_or_default();
        line.split_whitespace().skip(1).map(str::to_owned).collect::<Vec<_>>()
    };
    let groups = user.command("id").args(["-G", &user.name]).output().expect("id");
    let groups = String::from_utf8_lossy(&groups.stdout);
    assert_eq!(field("Uid:"), vec![user.uid.to_string(); 4], "all four of them");
    assert_eq!(field("Gid:"), vec![user.gid.to_string(); 4]);
    assert_eq!(field("Groups:"), groups.split_whitespace().collect::<Vec<_>>());
    assert_eq!(
        (field("SigBlk:"), field("SigIgn:")),
        (vec!["0000000000000000".to_owned()], vec!["0000000000000000".to_owned()])
    );
}

#[test]
fn a_slow_stop_is_reported_as_running() {
    let system = System::new();
    let mut slow = system.spec("slow", "exec sleep 1000");
    slow["monitor_policy"]["start_check_secs"] = json!(2);
    let task = system.begin("slow", 0, &slow);
    let row = system.server.gse("get_proc_operate_result_v2", json!({"task_id": task}))["data"]["0:127.0.0.1:web:slow"].clone();
    assert_eq!(row["error_code"], 115, "{row}");
    assert_eq!(system.row("slow", &task)["error_code"], 0);
    // A daemon that writes its pid file late is waited for; one that never does has not come up.
    let mut late =
        system.spec("sleep", "(sleep 0.5; sleep 1000 & echo $! > run/sleep.pid) >/dev/null 2>&1 &");
    late["control"]["start_mode"] = json!("daemon");
    late["monitor_policy"]["start_check_secs"] = json!(5);
    assert_eq!(system.operate("sleep", 0, &late), (0, "success".to_owned()));
    let mut never = system.spec("never", "sleep 1000 >/dev/null 2>&1 &");
    never["control"]["start_mode"] = json!("daemon");
    never["monitor_policy"]["start_check_secs"] = json!(1);
    let (code, message) = system.operate("never", 0, &never);
    assert!(code == 836 && message.contains("never.pid"), "{code} {message}");
    // A command with much output is not delayed, and delays no other one.
    let flood = system.spec(
        "flood",
        "while :; do echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa; done",
    );
    assert_eq!(system.operate("flood", 0, &flood).0, 0);
    until("its log grows", || {
        std::fs::metadata(system.path("log/flood.log")).is_ok_and(|meta| meta.len() > 1 << 20)
    });
    assert_eq!(system.operate("flood", 1, &flood).0, 0);
}

#[test]
fn one_agent_answers_for_several_hosts_each_with_its_own_processes() {
    let mut system = System::new();
    system.kill_agent();
    system.start_agent_with(&["--as-host", "0:127.0.0.2", "--as-host", "0:127.0.0.3"], &[]);
    let hosts = json!([{"ip": "127.0.0.2", "bk_cloud_id": 0}, {"ip": "127.0.0.3", "bk_cloud_id": 0}]);
    let mut spec = system.spec("twin", "echo up >> twins; exec sleep 1000");
    spec["identity"]["pid_path"] = json!(system.path("run/twin-$$.pid"));
    let body =
        json!({"meta": {"namespace": "web", "name": "twin"}, "hosts": hosts, "op_type": 0, "spec": spec});
    let task = system.server.gse("operate_proc", body)["data"]["task_id"].clone();
    until("both are up", || {
        let rows = system.server.gse("get_proc_operate_result_v2", json!({"task_id": task}))["data"].clone();
        ["0:127.0.0.2:web:twin", "0:127.0.0.3:web:twin"].iter().all(|key| rows[*key]["error_code"] == 0)
    });
    let page = system.server.call("GET", "/api/abide/v1/processes?name=twin", json!({}));
    let pids: Vec<u64> = page["data"]["items"]
        .as_array()
        .expect("rows")
        .iter()
        .filter_map(|row| row["pid"].as_u64())
        .collect();
    assert!(pids.len() == 2 && pids[0] != pids[1], "{pids:?}");
    assert_eq!(lines(&system.path("twins")), 2);
    // A host without an agent is different.
    assert_eq!(system.row("x", &system.begin("x", 0, &system.spec("x", "sleep 1000")))["error_code"], 117);
}

/// An agent whose folder is lost reports processes that ended, and reclaims running ones by their launch ids.
#[test]
fn an_agent_without_its_folder_reports_running_processes_and_claims_none() {
    let mut system = System::new();
    let spec = |name: &str| system.spec(name, "exec sleep 1000");
    let specs = [spec("kept"), spec("dead")];
    assert_eq!(system.operate("kept", 0, &specs[0]).0, 0);
    assert_eq!(system.operate("dead", 0, &specs[1]).0, 0);
    let (kept, dead) = (system.pid("kept").expect("a pid"), system.pid("dead").expect("a pid"));
    system.kill_agent();
    kill(dead, "KILL");
    until("it is gone", || !is_alive(dead));
    std::fs::rename(system.path("agent"), system.path("agent.old")).expect("a folder");
    system.start_agent();
    until("the end is reported", || system.facts("dead") == (true, false, false));
    until("what runs is found", || system.pid("kept") == Some(kept) && system.facts("kept").2);
    assert_eq!(system.operate("kept", 0, &specs[0]).0, 828, "no second process is started");
    assert_eq!(system.operate("kept", 1, &specs[0]).0, 0);
    until("it is stopped", || !is_alive(kept));
}

/// A second agent with an empty folder, for the same host, user and folder of the process: the process has its agent.
#[test]
fn a_process_of_another_running_agent_is_not_reclaimed() {
    let system = System::new();
    let spec = system.spec("shared", "exec sleep 1000");
    assert_eq!(system.operate("shared", 3, &spec).0, 0);
    assert_eq!(system.operate("shared", 0, &spec).0, 0);
    let pid = system.pid("shared").expect("a pid");
    let mut second = System::new();
    assert_eq!(second.operate("shared", 3, &spec).0, 0);
    second.kill_agent();
    std::fs::rename(second.path("agent"), second.path("agent.old")).expect("a folder");
    second.start_agent();
    // A status check comes after the search for processes of the lost folder.
    assert_eq!(second.operate("shared", 2, &spec).0, 0);
    assert_eq!(second.pid("shared"), None, "{}", second.log());
    second.operate("shared", 1, &spec);
    assert!(is_alive(pid), "{}", second.log());
    assert_eq!((system.pid("shared"), system.facts("shared").1), (Some(pid), true));
}
