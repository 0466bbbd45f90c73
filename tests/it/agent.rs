//! The agent behind a gateway, with real processes: every operation and its codes, supervision, and restarts of the
//! agent that start nothing twice.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::server::Server;
use crate::support::until;
use crate::system::{APPS, HOST, System, is_alive, kill, lines, processes};

#[test]
fn each_operation_reports_its_state_and_code() {
    let system = System::new();
    let mut spec = system.spec("s", "sleep 1000");
    assert_eq!(system.operate("s", 0, &spec).0, 0, "start");
    assert_eq!(system.facts("s"), (true, true, true));
    let first = system.pid("s").expect("a pid");
    assert!(is_alive(first));
    assert_eq!(
        std::fs::read_to_string(system.path("run/s.pid")).expect("a pid file").trim(),
        first.to_string()
    );
    assert_eq!(system.operate("s", 0, &spec).0, 828, "it runs already");
    let row = system.row("s", &system.begin("s", 2, &spec));
    let look: Value = serde_json::from_str(row["content"].as_str().expect("text")).expect("JSON");
    let instance = &look["process"][0]["instance"][0];
    assert_eq!(
        (&instance["pid"], &instance["isAuto"], &instance["cmdline"]),
        (&json!(first), &json!(true), &json!("sleep 1000"))
    );
    assert_eq!(system.operate("s", 4, &spec).0, 0, "unhost");
    assert_eq!((system.facts("s"), system.pid("s")), ((true, false, true), Some(first)));
    assert_eq!(system.operate("s", 3, &spec).0, 0, "host");
    assert_eq!((system.facts("s"), system.pid("s")), ((true, true, true), Some(first)));
    // A restart takes the new spec, and leaves hosting as it was.
    spec["control"]["start_cmd"] = json!("sleep 2000");
    assert_eq!(system.operate("s", 7, &spec).0, 0, "restart");
    let second = system.pid("s").expect("a pid");
    assert!(second != first && !is_alive(first));
    let told = system.process("s");
    assert_eq!(
        (&told["spec"]["control"]["start_cmd"], &told["live_spec"]["control"]["start_cmd"]),
        (&json!("sleep 2000"), &json!("sleep 2000"))
    );
    // A reload needs a command, keeps the pid, and moves only what it reads.
    let (code, message) = system.operate("s", 8, &spec);
    assert!(code == 65535 && message.contains("reload_cmd"), "{code} {message}");
    spec["control"]["reload_cmd"] = json!("echo reloaded >> effects");
    spec["configmap"] = json!([{"path": "/etc/x", "md5": "0123456789abcdef0123456789abcdef"}]);
    spec["control"]["start_cmd"] = json!("sleep 3000");
    assert_eq!(system.operate("s", 8, &spec).0, 0, "reload");
    let told = system.process("s");
    assert_eq!((system.pid("s"), lines(&system.path("effects"))), (Some(second), 1));
    assert_eq!(told["live_spec"]["configmap"], spec["configmap"]);
    assert_eq!(
        (&told["spec"]["control"]["start_cmd"], &told["live_spec"]["control"]["start_cmd"]),
        (&json!("sleep 3000"), &json!("sleep 2000"))
    );
    assert_eq!(system.operate("s", 1, &spec).0, 0, "stop");
    assert_eq!((system.facts("s"), is_alive(second)), ((true, false, false), false));
    assert!(!system.path("run/s.pid").exists());
    assert_eq!(system.operate("s", 1, &spec).0, 829, "it does not run");
    assert_eq!(system.operate_as_planner("s", 7, &spec).0, 829);
    // Kill, of one that does not listen.
    spec["control"]["start_cmd"] = json!("trap '' TERM; echo up >> trapped; while :; do sleep 1; done");
    assert_eq!(system.operate("s", 0, &spec).0, 0);
    assert_eq!(system.operate("s", 9, &spec).0, 0, "kill");
    assert_eq!(system.facts("s"), (true, false, false));
}

#[test]
fn a_failed_operation_reports_why_and_changes_nothing() {
    let system = System::new();
    let missing = system.spec("m", "./no-such-program");
    let (code, message) = system.operate("m", 0, &missing);
    assert!(code == 65535 && message.contains("no-such-program"), "{code} {message}");
    let mut quick = system.spec("q", "echo hello; exit 3");
    quick["monitor_policy"]["start_check_secs"] = json!(5);
    let (code, message) = system.operate("q", 0, &quick);
    assert!(code == 836 && message.contains("code 3"), "{code} {message}");
    assert_eq!(std::fs::read_to_string(system.path("log/q.log")).expect("a log"), "hello\n");
    assert!(system.process("m").is_null() && system.process("q").is_null(), "neither is registered by that");
    let mut nobody = system.spec("n", "sleep 1000");
    nobody["identity"]["user"] = json!("no-such-user");
    let (code, message) = system.operate("n", 0, &nobody);
    assert!(code == 65535 && message.contains("no-such-user"), "{code} {message}");
    let mut nowhere = system.spec("w", "sleep 1000");
    nowhere["identity"]["setup_path"] = json!("/no/such/folder");
    let (code, message) = system.operate("w", 0, &nowhere);
    assert!(code == 65535 && message.contains("/no/such/folder"), "{code} {message}");
    assert!(!Path::new("/no/such").exists(), "setup_path is never made");
    // A stop whose command does nothing: it is still there, and guarded as before.
    let mut stubborn = system.spec("s", "sleep 1000");
    stubborn["control"]["stop_cmd"] = json!("true");
    stubborn["monitor_policy"]["stop_check_secs"] = json!(0);
    assert_eq!(system.operate("s", 0, &stubborn).0, 0);
    let (code, message) = system.operate("s", 1, &stubborn);
    assert!(code == 836 && message.starts_with("stop"), "{code} {message}");
    assert_eq!(system.facts("s"), (true, true, true));
    stubborn["control"]["stop_cmd"] = json!("echo cannot; exit 4");
    let (code, message) = system.operate("s", 1, &stubborn);
    assert!(code == 65535 && message.contains("cannot"), "{code} {message}");
}

#[test]
fn a_daemon_is_identified_by_its_pid_file_and_program() {
    let system = System::new();
    let mut spec = system.spec("sleep", "sleep 1000 >/dev/null 2>&1 & echo $! > run/sleep.pid");
    spec["control"]["start_mode"] = json!("daemon");
    spec["monitor_policy"]["start_check_secs"] = json!(2);
    assert_eq!(system.operate("sleep", 0, &spec), (0, "success".to_owned()));
    let pid = system.pid("sleep").expect("a pid");
    assert_eq!(std::fs::read_to_string(format!("/proc/{pid}/comm")).expect("a process").trim(), "sleep");
    // It dies, and is brought back by its own command.
    kill(pid, "KILL");
    until("it is back", || system.pid("sleep").is_some_and(|new| new != pid));
    assert_eq!(system.operate("sleep", 1, &spec).0, 0);
    // A pid file that names another process is not a proof.
    for (content, says) in [
        ("1", "process 1"),
        ("nonsense", "does not contain a pid"),
        (&std::process::id().to_string(), "does not run sleep"),
    ] {
        spec["control"]["start_cmd"] = json!(format!("echo {content} > run/sleep.pid"));
        spec["monitor_policy"]["start_check_secs"] = json!(0);
        let (code, message) = system.operate("sleep", 0, &spec);
        assert!(code == 836 && message.contains(says), "{content}: {code} {message}");
    }
    assert_eq!(system.facts("sleep"), (true, false, false));
}

#[test]
fn a_dead_process_is_restarted_and_a_crash_loop_backs_off() {
    let system = System::new();
    let spec = system.spec("s", "echo up >> starts; exec sleep 1000");
    assert_eq!(system.operate("s", 0, &spec).0, 0);
    let mut pid = system.pid("s").expect("a pid");
    for _ in 0..1 {
        kill(pid, "KILL");
        until("it is back", || system.pid("s").is_some_and(|new| new != pid));
        pid = system.pid("s").expect("a pid");
    }
    // It must not be relaunched after a stop.
    assert_eq!(system.operate("s", 1, &spec).0, 0);
    let starts = lines(&system.path("starts"));
    assert_eq!((starts, system.facts("s")), (2, (true, false, false)));
    let mut loops = system.spec("l", "echo up >> loops; sleep 0.3; exit 1");
    loops["monitor_policy"]["start_retries"] = json!(2);
    assert_eq!(system.operate("l", 0, &loops).0, 0, "it is up when it is looked at");
    until("it has failed", || system.process("l")["health"] == "Failed");
    let told = system.process("l");
    assert!(told["next"].is_string() && told["message"].as_str().expect("text").contains("code 1"), "{told}");
    assert_eq!(lines(&system.path("loops")), 3, "the start, once at once, once after an interval");
}

#[test]
fn processes_survive_an_agent_crash() {
    let mut system = System::new();
    for name in ["a", "b", "c"] {
        let spec = system.spec(name, &format!("echo up >> starts-{name}; exec sleep 1000"));
        assert_eq!(system.operate(name, 0, &spec).0, 0);
    }
    let pids = |system: &System| ["a", "b", "c"].map(|name| system.pid(name).expect("a pid"));
    let before = pids(&system);
    system.kill_agent();
    assert!(before.iter().all(|pid| is_alive(*pid)));
    system.start_agent();
    until("all are reported", || ["a", "b", "c"].iter().all(|name| system.process(name)["agent"] == true));
    assert_eq!(pids(&system), before);
    // What died meanwhile is brought back; the others are left alone.
    system.kill_agent();
    kill(before[1], "KILL");
    until("it is gone", || !is_alive(before[1]));
    system.start_agent();
    until("b is back", || system.pid("b").is_some_and(|pid| pid != before[1] && is_alive(pid)));
    let after = pids(&system);
    assert_eq!((after[0], after[2]), (before[0], before[2]));
    assert_eq!(["a", "b", "c"].map(|name| lines(&system.path(&format!("starts-{name}")))), [1, 2, 1]);
    // They are held: a death is noticed at once.
    kill(after[0], "KILL");
    until("a is back", || system.pid("a").is_some_and(|pid| pid != after[0]));
}

#[test]
fn an_agent_killed_during_starts_starts_nothing_twice() {
    let mut system = System::new();
    let soak: u64 = std::env::var("ABIDE_SOAK").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let rounds = 6 * soak;
    for round in 0..rounds {
        let names: Vec<String> = (0..6).map(|n| format!("p{round}-{n}")).collect();
        let tasks: Vec<Value> = names
            .iter()
            .map(|name| {
                system.begin(
                    name,
                    0,
                    &system.spec(name, &format!("echo up >> starts-{name}; exec sleep 1000")),
                )
            })
            .collect();
        std::thread::sleep(Duration::from_millis(3 * (round % 6)));
        system.kill_agent();
        system.start_agent();
        for (name, task) in names.iter().zip(&tasks) {
            let row = system.row(name, task);
            assert!([0, 828].contains(&row["error_code"].as_i64().expect("a code")), "{name}: {row}");
            until(&format!("{name} runs after {row}"), || system.facts(name).2);
            let starts = lines(&system.path(&format!("starts-{name}")));
            let pid = system.pid(name).expect("a pid");
            let others = processes().into_iter().filter(|other| {
                let environment = std::fs::read(format!("/proc/{other}/environ")).unwrap_or_default();
                let mark = format!("ABIDE_INSTANCE={HOST}:web:{name}\0");
                *other != pid
                    && String::from_utf8_lossy(&environment).contains(&mark)
                    && is_alive(*other)
                    && std::fs::read_link(format!("/proc/{other}/cwd"))
                        .is_ok_and(|cwd| cwd == system.folder.path())
            });
            assert_eq!(others.count(), 0, "{name} has one incarnation");
            assert_eq!(starts, 1, "{name} was started {starts} times");
        }
    }
}

#[test]
fn processes_are_unaffected_by_a_gateway_restart() {
    let mut system = System::new();
    let spec = system.spec("s", "sleep 1000");
    assert_eq!(system.operate("s", 0, &spec).0, 0);
    let pid = system.pid("s").expect("a pid");
    let address = system.server.address;
    let file = system.path("store.db");
    system.server = Server::at(address);
    until("the port is free again", || std::net::TcpListener::bind(address).is_ok());
    system.server = Server::restart_at(address, &file, APPS, "* token\n");
    until("the agent is back", || system.process("s")["agent"] == true);
    assert_eq!(system.pid("s"), Some(pid));
    assert_eq!(system.operate("s", 1, &Value::Null).0, 0);
    assert!(!is_alive(pid));
}

#[test]
fn a_launched_process_has_its_own_session_and_no_agent_descriptors() {
    let system = System::new();
    let mut spec = system.spec("s", "exec sleep 1000");
    spec["env"] = json!({"GREETING": "hello", "PASSWORD": {"value": "hush", "secret": true}});
    assert_eq!(system.operate("s", 0, &spec).0, 0);
    let pid = system.pid("s").expect("a pid");
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
    let session: u32 =
        stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(3)?.parse().ok()).expect("a number");
    assert_eq!(session, pid, "a session of its own");
    let descriptors: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .expect("descriptors")
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    assert_eq!(descriptors.len(), 3, "{descriptors:?}");
    let environment =
        String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/environ")).expect("an environment"))
            .into_owned();
    assert!(environment.contains("GREETING=hello\0") && environment.contains("PASSWORD=hush\0"));
    assert!(environment.contains("ABIDE_INCARNATION=") && !environment.contains("CARGO"), "{environment}");
    assert!(!system.log().contains("hush"), "{}", system.log());
}

#[test]
fn an_exit_code_is_recorded_without_a_waiter() {
    let mut system = System::new();
    let once = |command: &str| {
        let mut spec = system.spec("once", command);
        spec["monitor_policy"]["auto_type"] = json!(2);
        spec
    };
    let spec = once("echo ran >> runs; (exit 3)");
    assert_eq!(system.operate("once", 0, &spec).0, 0, "its end is no failure of the start");
    until("it ended", || !system.facts("once").2);
    let told = system.process("once");
    assert_eq!(
        (&told["exit"], &told["health"], lines(&system.path("runs"))),
        (&json!(3), &json!("Failed"), 1)
    );
    assert_eq!(told["ran"]["spec"], told["spec"], "{told}");
    // It never runs a second time without an operation, also after a crash of the agent.
    let spec = once("echo ran >> runs; sleep 1; exit 7");
    assert_eq!(system.operate("once", 0, &spec).0, 0);
    system.kill_agent();
    let descriptors = || {
        processes().into_iter().any(|pid| {
            let cwd = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
            cwd == system.folder.path() && is_alive(pid)
        })
    };
    until("it ended meanwhile", || !descriptors());
    system.start_agent();
    until("its code is known", || system.process("once")["exit"] == 7);
    assert_eq!(lines(&system.path("runs")), 2);
}

#[test]
fn a_schedule_runs_while_it_is_supervised() {
    let system = System::new();
    let mut spec = system.spec("tick", "echo tick >> ticks");
    spec["monitor_policy"]["auto_type"] = json!(0);
    spec["job"] = json!({"cycle_time": 1});
    assert_eq!(system.operate("tick", 3, &spec).0, 0, "host");
    until("it ran three times", || lines(&system.path("ticks")) >= 3);
    until("its next run is reported", || system.process("tick")["next"].is_string());
    assert_eq!(system.process("tick")["health"], "Healthy");
    assert_eq!(system.operate("tick", 4, &spec).0, 0, "unhost");
    until("the last run ended", || !system.facts("tick").2);
    assert!(system.process("tick")["next"].is_null());
    // A run that takes longer than its cycle is left alone.
    let mut long = system.spec("long", "echo long >> longs; sleep 30");
    long["monitor_policy"]["auto_type"] = json!(0);
    long["job"] = json!({"cycle_time": 1});
    let ticks = lines(&system.path("ticks"));
    assert_eq!(system.operate("long", 3, &long).0, 0);
    until("it runs", || system.facts("long").2);
    let first = system.pid("long");
    until("its time came again", || system.log().contains("the previous run is still in progress"));
    assert_eq!((lines(&system.path("longs")), system.pid("long")), (1, first));
    assert_eq!(lines(&system.path("ticks")), ticks, "what is not hosted does not run");
}

#[test]
fn a_daemon_holding_its_starters_output_does_not_grow_memory() {
    use std::os::unix::fs::MetadataExt;
    let system = System::new();
    let start = "sh -c 'head -c 1000000 /dev/zero; exec sleep 1000' & echo $! > run/flood.pid";
    let mut spec = system.spec("flood", start);
    spec["control"]["start_mode"] = json!("daemon");
    spec["identity"]["proc_name"] = json!("sleep");
    spec["monitor_policy"]["start_check_secs"] = json!(3);
    assert_eq!(system.operate("flood", 0, &spec), (0, "success".to_owned()));
    let pid = system.pid("flood").expect("a pid");
    let output = format!("/proc/{pid}/fd/1");
    let held = || std::fs::metadata(&output).expect("its output").blocks();
    assert_eq!(std::fs::metadata(&output).expect("its output").len(), 1_000_000);
    until("what it said is forgotten", || held() == 0);
}

#[test]
fn a_rename_does_not_touch_the_process() {
    let mut system = System::new();
    let spec = system.spec("old", "sleep 1000");
    assert_eq!(system.operate("old", 0, &spec).0, 0);
    let pid = system.pid("old").expect("a pid");
    let (from, to) = (format!("{HOST}:web:old"), format!("{HOST}:web:new"));
    let task = system.server.call("POST", "/api/abide/v1/rename", json!({"from": from, "to": to}))["data"]["task_id"].clone();
    assert_eq!(system.row("new", &task)["error_code"], 0);
    until("it is reported under its new name", || system.pid("new") == Some(pid));
    assert!(system.process("old").is_null() && is_alive(pid));
    // The name outlives the agent, and the guard knows it.
    system.kill_agent();
    system.start_agent();
    until("it is held again", || system.process("new")["agent"] == true && system.pid("new") == Some(pid));
    kill(pid, "KILL");
    until("it is back", || system.pid("new").is_some_and(|new| new != pid));
    assert!(system.process("old").is_null());
}

/// A gateway that lost its store does not know which generation was the last; the agent does.
#[test]
fn the_agent_refuses_an_older_generation() {
    let mut system = System::new();
    let spec = system.spec("s", "sleep 1000");
    let begin = |system: &System, generation: u64, op: i64| {
        let body = json!({"meta": {"namespace": "web", "name": "s"}, "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}],
                          "op_type": op, "spec": spec});
        let headers = format!("X-Abide-Owner: team\r\nX-Abide-Generation: {generation}\r\n");
        let answer = system.server.call_with("POST", "/api/c/compapi/v2/gse/operate_proc/", &headers, body);
        system.row("s", &answer["data"]["task_id"])["error_code"].as_i64().expect("a code")
    };
    let seventh = system.server.take_over_lease("team", 5);
    assert_eq!((seventh, begin(&system, 7, 0)), (7, 0));
    let pid = system.pid("s").expect("a pid");
    let address = system.server.address;
    system.server = Server::at(address);
    until("the port is free again", || std::net::TcpListener::bind(address).is_ok());
    let other = system.path("other.db");
    system.server = Server::restart_at(address, &other, APPS, "* token\n");
    until("the agent is back", || {
        let hosts = system.server.call("GET", "/api/abide/v1/hosts", json!({}));
        hosts["data"][0]["agent"] == true
    });
    let first = system.server.lease("team", "holder");
    assert_eq!((first, begin(&system, first, 1)), (1, 1_900_409));
    assert!(is_alive(pid), "and nothing was done");
    // The next lease has a number above what the agent reported.
    system.server.release("team", "holder", first);
    assert_eq!(system.server.lease("team", "next"), 8);
    assert_eq!(begin(&system, 8, 1), 0);
}
