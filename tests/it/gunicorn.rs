//! gunicorn, a pre-forking server: its master is killed, reloaded (HUP) and upgraded (USR2), and its workers end with it.

use serde_json::{Value, json};

use crate::process_tree::{RELOAD, START, STOP, alive, daemon, get, port, replaced};
use crate::support::{needs, needs_root, until};
use crate::system::{System, is_alive, kill, parent_of, processes};

const APP: &str = r#"
VERSION = open("version").read().encode()
def app(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(VERSION)))])
    return [VERSION]
"#;

/// Starts a new master, waits until it serves, ends the old one, and waits until the pid file names the new one.
const UPGRADE: &str = r#"
kill -USR2 $ABIDE_PID
until [ -s run/gunicorn.pid.2 ] && pgrep -P "$(cat run/gunicorn.pid.2)" >/dev/null; do sleep 0.05; done
new=$(cat run/gunicorn.pid.2)
kill -TERM $ABIDE_PID
until [ "$(cat run/gunicorn.pid 2>/dev/null)" = "$new" ]; do sleep 0.05; done
"#;

struct Gunicorn {
    port: u16,
    spec: Value,
}

fn gunicorn(system: &System, mode: &str) -> Gunicorn {
    let port = port();
    std::fs::write(system.path("app.py"), APP).expect("a script");
    std::fs::write(system.path("version"), "one").expect("a file");
    let arguments = format!("--pid run/gunicorn.pid --bind 127.0.0.1:{port} --workers 3 app:app");
    let start = match mode {
        "daemon" => format!("gunicorn --daemon {arguments}"),
        _ => format!("exec gunicorn {arguments}"),
    };
    let mut spec = daemon(system, "gunicorn", "gunicorn", &start);
    spec["control"]["start_mode"] = json!(mode);
    spec["control"]["reload_cmd"] = json!("kill -HUP $ABIDE_PID");
    spec["monitor_policy"]["start_check_secs"] = json!(10);
    if mode == "foreground" {
        spec["monitor_policy"]["start_check_secs"] = json!(1);
    }
    Gunicorn { port, spec }
}

fn workers(master: u32) -> Vec<u32> {
    processes().into_iter().filter(|pid| parent_of(*pid) == Some(master) && is_alive(*pid)).collect()
}

#[track_caller]
fn serves(gunicorn: &Gunicorn, version: &str) {
    until("it serves", || get(gunicorn.port).as_deref() == Some(version));
}

fn survives_a_killed_master_and_reloads(mode: &str) {
    if !needs("gunicorn") || !needs_root() {
        return;
    }
    for groups in [true, false] {
        let system = System::with_groups(groups);
        let gunicorn = gunicorn(&system, mode);
        assert_eq!(system.operate("gunicorn", START, &gunicorn.spec), (0, "success".to_owned()));
        let mut master = system.pid("gunicorn").expect("a pid");
        for round in 1..=2 {
            until("three workers", || workers(master).len() == 3);
            serves(&gunicorn, "one");
            let old = workers(master);
            kill(master, "KILL");
            master = replaced(&system, "gunicorn", master);
            let left: Vec<&u32> = old.iter().filter(|pid| is_alive(**pid)).collect();
            assert!(left.is_empty(), "groups: {groups}, round {round}: {left:?}\n{}", system.log());
            serves(&gunicorn, "one");
        }
        until("three workers", || workers(master).len() == 3);
        let old = workers(master);
        std::fs::write(system.path("version"), "two").expect("a file");
        assert_eq!(system.operate("gunicorn", RELOAD, &gunicorn.spec).0, 0);
        serves(&gunicorn, "two");
        until("the old workers end", || old.iter().all(|pid| !is_alive(*pid)));
        assert_eq!(system.pid("gunicorn"), Some(master), "a reload keeps the master");
        let (code, message) = system.operate("gunicorn", STOP, &gunicorn.spec);
        assert_eq!((code, alive(&system)), (0, Vec::new()), "groups: {groups}: {message}");
    }
}

#[test]
fn a_daemon_survives_a_killed_master_and_reloads() {
    survives_a_killed_master_and_reloads("daemon");
}

#[test]
fn a_foreground_process_survives_a_killed_master_and_reloads() {
    survives_a_killed_master_and_reloads("foreground");
}

/// USR2 starts a second master, which takes the pid file when the first one ends.
#[test]
fn an_upgrade_hands_over_to_the_new_master() {
    if !needs("gunicorn") || !needs("pgrep") || !needs_root() {
        return;
    }
    for (groups, mode) in [(true, "daemon"), (false, "daemon"), (true, "foreground"), (false, "foreground")] {
        let system = System::with_groups(groups);
        let mut gunicorn = gunicorn(&system, mode);
        gunicorn.spec["control"]["reload_cmd"] = json!(UPGRADE);
        assert_eq!(system.operate("gunicorn", START, &gunicorn.spec), (0, "success".to_owned()));
        let first = system.pid("gunicorn").expect("a pid");
        serves(&gunicorn, "one");
        std::fs::write(system.path("version"), "two").expect("a file");
        let (code, message) = system.operate("gunicorn", RELOAD, &gunicorn.spec);
        assert_eq!(code, 0, "groups: {groups} {mode}: {message}\n{}", system.log());
        let second = system.pid("gunicorn").expect("a pid");
        assert!(second != first && is_alive(second), "groups: {groups} {mode}: {first} {second} {message}");
        serves(&gunicorn, "two");
        until("the first master ends", || !is_alive(first));
        until("one tree", || workers(second).len() == 3 && alive(&system).len() == 4);
        assert_eq!(system.process("gunicorn")["restarts"].as_u64().unwrap_or(0), 0, "no second launch");
        // The new master is guarded as the old one was.
        kill(second, "KILL");
        let third = replaced(&system, "gunicorn", second);
        until("one tree", || workers(third).len() == 3 && alive(&system).len() == 4);
        serves(&gunicorn, "two");
        let (code, message) = system.operate("gunicorn", STOP, &gunicorn.spec);
        assert_eq!((code, alive(&system)), (0, Vec::new()), "groups: {groups} {mode}: {message}");
    }
}
