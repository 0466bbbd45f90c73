//! Crashes of the agent at every step of an operation: at most one process of an instance lives, the next agent
//! completes the operation, and foreign processes are not touched. Also the planner's table of operations, row by
//! row.

use std::process::Command;

use serde_json::{Value, json};

use crate::fixtures::workspace::Workspace;
use crate::support::{needs, needs_root, project, skip, until};
use crate::system::{System, is_alive, kill, lines, processes};

/// Live processes of an instance, their helpers not counted: those that carry its mark and run its program.
fn launches(system: &System, name: &str) -> Vec<u32> {
    let mark = format!("ABIDE_INSTANCE=0:127.0.0.1:web:{name}");
    let here = system.folder.path();
    let is_one = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let marked = environment.split(|byte| *byte == 0).any(|entry| entry == mark.as_bytes());
        let cwd = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
        marked && cwd.starts_with(here) && is_alive(*pid)
    };
    processes().into_iter().filter(is_one).collect()
}

#[test]
fn an_operation_continues_after_a_crash_at_any_step() {
    const START: [&str; 5] = ["intent-written", "born", "row-written", "done", "result-written"];
    const STOP: [&str; 4] = ["unguarded", "signalled", "done", "result-written"];
    const RESTART: [&str; 7] =
        ["signalled", "down", "intent-written", "born", "row-written", "done", "result-written"];
    let all: Vec<(i64, &str)> = START
        .iter()
        .map(|place| (0, *place))
        .chain(STOP.iter().flat_map(|place| [(1, *place), (9, *place)]))
        .chain(RESTART.iter().map(|place| (7, *place)))
        .collect();
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| {
                while let Some((op, place)) = all.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
                {
                    crash_at(*op, place);
                }
            });
        }
    });
}

fn crash_at(op: i64, place: &str) {
    let mut system = System::new();
    let old = system.spec("p", "echo old >> starts; exec sleep 1000");
    let new = system.spec("p", "echo new >> starts; exec sleep 2000");
    if op != 0 {
        assert_eq!(system.operate("p", 0, &old).0, 0);
    }
    system.kill_agent();
    system.start_agent_with(&[], &[("ABIDE_DIE_AT", place)]);
    let task = system.begin("p", op, if op == 7 || op == 0 { &new } else { &old });
    let mut agent = system.agent.take().expect("it runs");
    let ended = agent.wait().expect("it ends");
    assert!(!ended.success(), "it died at {place}");
    assert!(launches(&system, "p").len() <= 1, "op {op} at {place}");
    system.start_agent();
    let row = system.row("p", &task);
    assert_eq!(row["error_code"], 0, "op {op} at {place}: {row}\n{}", system.log());
    let live = launches(&system, "p");
    match op {
        0 | 7 => {
            assert_eq!(live.len(), 1, "op {op} at {place}: {}", system.log());
            until("the gateway knows of it", || {
                system.pid("p") == Some(live[0]) && system.facts("p") == (true, true, true)
            });
            let row = system.process("p");
            assert_eq!(
                row["live_spec"]["control"]["start_cmd"], new["control"]["start_cmd"],
                "op {op} at {place}"
            );
            assert_eq!(
                row["spec"]["control"]["start_cmd"], new["control"]["start_cmd"],
                "op {op} at {place}"
            );
            let starts = std::fs::read_to_string(system.path("starts")).expect("it started");
            let news = starts.lines().filter(|line| *line == "new").count();
            assert_eq!(news, 1, "op {op} at {place}: {starts}");
        }
        _ => {
            assert!(live.is_empty(), "op {op} at {place}: {live:?}");
            until("the gateway knows of it", || system.facts("p") == (true, false, false));
            assert_eq!(lines(&system.path("starts")), 1, "op {op} at {place}: it was not brought back");
        }
    }
}

/// The same while it brings back what died: that launch waits for no disk, and is found all the same.
#[test]
fn a_crash_during_a_restart_does_not_start_the_process_twice() {
    for place in ["intent-written", "born", "row-written"] {
        let mut system = System::new();
        let spec = system.spec("p", "echo up >> starts; exec sleep 1000");
        assert_eq!(system.operate("p", 0, &spec).0, 0);
        let first = system.pid("p").expect("a pid");
        system.kill_agent();
        system.start_agent_with(&[], &[("ABIDE_DIE_AT", place)]);
        until("it is held again", || system.process("p")["agent"] == true);
        kill(first, "KILL");
        let mut agent = system.agent.take().expect("it runs");
        assert!(!agent.wait().expect("it ends").success(), "it died at {place}");
        assert!(launches(&system, "p").len() <= 1, "{place}");
        system.start_agent();
        until("it is back", || system.pid("p").is_some_and(|pid| pid != first && is_alive(pid)));
        assert_eq!(launches(&system, "p").len(), 1, "{place}");
        assert_eq!(lines(&system.path("starts")), 2, "{place}: {}", system.log());
    }
}

/// Earlier operations, then the operation, its code, and the state afterwards: registered spec, hosted, live spec, pid.
const EFFECTS: &[(&[&str], &str, i64, &str)] = &[
    (&[], "register 1", 0, "1 no -"),
    (&["register 1"], "update 2", 0, "2 no -"),
    (&["start 1"], "update 2", 0, "2 yes 1 stays"),
    (&["register 1"], "unregister", 0, "- no -"),
    (&["start 1", "stop 1"], "unregister", 0, "- no -"),
    (&["start 1"], "unregister", 65535, "1 yes 1 stays"),
    (&[], "start 1", 0, "1 yes 1"),
    (&["register 1"], "start 2", 0, "2 yes 2"),
    (&["start 1"], "start 2", 828, "1 yes 1 stays"),
    (&["start 1"], "stop 1", 0, "1 no -"),
    (&["start 1"], "stop 2", 0, "1 no -"),
    (&["start 1", "unhost 1"], "stop 1", 0, "1 no -"),
    (&["register 1"], "stop 1", 829, "1 no -"),
    (&["start 1", "unhost 1"], "host 2", 0, "2 yes 1 stays"),
    (&["register 1"], "host 1", 0, "1 yes -"),
    (&["start 1"], "unhost 1", 0, "1 no 1 stays"),
    (&["start 1"], "restart 2", 0, "2 yes 2 other"),
    (&["start 1", "unhost 1"], "restart 2", 0, "2 no 2 other"),
    (&["register 1"], "restart 1", 829, "1 no -"),
    (&["start 1"], "reload 2", 0, "2 yes 1+2 stays"),
    (&["start 1", "unhost 1"], "reload 2", 0, "2 no 1+2 stays"),
    (&["register 1"], "reload 1", 829, "1 no -"),
    (&["start 1"], "kill 1", 0, "1 no -"),
];

/// Given, hosted, live and whether the pid stayed, by the start_cmd and the configmap of specs.
#[test]
fn each_operation_has_the_effect_the_planner_expects() {
    let system = System::new();
    let spec = |name: &str, version: &str| {
        let mut spec = system.spec(name, &format!("exec sleep {version}"));
        spec["control"]["reload_cmd"] = json!("true");
        spec["configmap"] =
            json!([{"path": format!("/etc/{version}"), "md5": "b1946ac92492d2347c6235b4d2611184"}]);
        spec
    };
    let version = |spec: &Value| {
        let start = spec["control"]["start_cmd"]
            .as_str()
            .map(|text| text.rsplit(' ').next().unwrap_or("").to_owned());
        let file =
            spec["configmap"][0]["path"].as_str().map(|text| text.trim_start_matches("/etc/").to_owned());
        match (start, file) {
            (None, _) => "-".to_owned(),
            (Some(start), Some(file)) if start == file => start,
            (Some(start), file) => format!("{start}+{}", file.unwrap_or_default()),
        }
    };
    let registry = |call: &str, name: &str, spec: &Value| {
        let mut body = json!({"meta": {"namespace": "web", "name": name}, "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}]});
        if call != "unregister_proc_info" {
            body["spec"] = spec.clone();
        }
        let rows = system.server.gse(call, body)["data"].clone();
        rows[format!("0:0:127.0.0.1:web:{name}")]["error_code"].as_i64().expect("a code")
    };
    for (nth, (before, op, code, after)) in EFFECTS.iter().enumerate() {
        let name = format!("t{nth}");
        let act = |what: &str| {
            let (op, version) = what.split_once(' ').unwrap_or((what, "1"));
            let spec = spec(&name, version);
            match op {
                "register" => registry("register_proc_info", &name, &spec),
                "update" => registry("update_proc_info", &name, &spec),
                "unregister" => registry("unregister_proc_info", &name, &spec),
                op => {
                    let number = ["start", "stop", "", "host", "unhost", "", "", "restart", "reload", "kill"];
                    let number = number.iter().position(|word| *word == op).expect("an operation");
                    system.operate_as_planner(&name, number as i64, &spec).0
                }
            }
        };
        before.iter().for_each(|what| assert_eq!(act(what), 0, "{what} before {op}"));
        let pid = system.pid(&name);
        assert_eq!(act(op), *code, "{op} after {before:?}");
        let shown = || {
            let row = system.process(&name);
            let hosted = if row["hosted"] == true { "yes" } else { "no" };
            let stays = match (pid, system.pid(&name)) {
                (Some(old), Some(new)) if old == new => " stays",
                (Some(_), Some(_)) => " other",
                _ => "",
            };
            format!("{} {hosted} {}{stays}", version(&row["spec"]), version(&row["live_spec"]))
        };
        until(&format!("{op} after {before:?}: {after}, not {}", shown()), || shown() == *after);
    }
}

/// A reused pid: the agent neither holds nor signals the new process, nor takes it for the old one.
#[test]
fn a_reused_pid_is_not_touched() {
    if !needs_root() || !needs("unshare") || !needs("python3") {
        return;
    }
    let allowed = Command::new("unshare").args(["-p", "-f", "--mount-proc", "true"]).status();
    if !allowed.is_ok_and(|status| status.success()) {
        return skip("the kernel refuses a pid namespace");
    }
    let folder = Workspace::new();
    let script = project().join("tests/it/reuse.sh");
    let output = Command::new("unshare")
        .args(["-p", "-f", "--mount-proc", "--kill-child", "bash"])
        .arg(script)
        .arg(env!("CARGO_BIN_EXE_abide"))
        .env("ABIDE_KEY_FILE", folder.path().join("key"))
        .current_dir(folder.path())
        .output()
        .expect("unshare runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("untouched"),
        "{said}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
