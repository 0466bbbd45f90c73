//! Processes of health probes: a probe is ended with its whole tree, also by the next agent, and never runs twice at once.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::json;

use crate::process_tree::{START, STOP, alive, replaced, restart_agent};
use crate::support::{needs_root, test_user, until};
use crate::system::{System, is_alive, kill, lines};

/// Leaves three processes behind: one in its session, one in another, one that also loses its environment.
const LEAVES: &str = "sleep 1000 & setsid sleep 1000 & (env -i setsid sleep 1000 &)";

#[test]
fn a_probe_is_ended_with_its_whole_tree() {
    if !needs_root() {
        return;
    }
    for groups in [true, false] {
        let system = System::with_groups(groups);
        let probes = [
            (
                "hangs",
                format!("{LEAVES}; echo x >> hangs; echo wai''ting; sleep 1000"),
                "timed out after 1 s: waiting",
                "Degraded",
            ),
            (
                "fails",
                format!("{LEAVES}; echo x >> fails; echo bro''ken; exit 3"),
                "ended with 3: broken",
                "Degraded",
            ),
            ("ends", format!("{LEAVES}; echo x >> ends; echo fi''ne"), "fine", "Healthy"),
        ];
        for (name, command, _, _) in &probes {
            let mut spec = system.spec(name, "exec sleep 2000");
            spec["health"] =
                json!({"cmd": command, "interval": 3600, "timeout": 1, "retries": 1, "start_period": 0});
            assert_eq!(system.operate(name, START, &spec).0, 0);
        }
        for (name, _, message, health) in &probes {
            until("a result", || system.process(name)["health"] == *health);
            let row = system.process(name);
            let probe = (&row["probe"]["success"], row["probe"]["output"].as_str());
            assert_eq!(probe, (&json!(*health == "Healthy"), Some(*message)), "{groups} {name}: {row}");
            assert!(row["probe"]["time"].is_string(), "{row}");
            let shown = row["message"].as_str().is_some_and(|shown| shown.contains(message));
            assert_eq!(shown, *health == "Degraded", "{groups} {name}: {row}");
        }
        let mains = probes.each_ref().map(|(name, ..)| system.pid(name).expect("a pid"));
        let mut left = alive(&system);
        left.retain(|pid| !mains.contains(pid));
        assert_eq!(left, [0u32; 0], "{groups}\n{}", system.log());
        assert!(mains.into_iter().all(is_alive));
        for (name, ..) in &probes {
            assert_eq!(lines(&system.path(name)), 1, "{groups} {name}: one probe");
        }
    }
}

#[test]
fn a_probe_in_flight_ends_with_its_process() {
    if !needs_root() {
        return;
    }
    for groups in [true, false] {
        let system = System::with_groups(groups);
        let mut spec = system.spec("p", "exec sleep 2000");
        let probe = format!("{LEAVES}; echo x >> begun; sleep 1000");
        spec["health"] = json!({"cmd": probe, "interval": 1, "timeout": 600});
        assert_eq!(system.operate("p", START, &spec).0, 0);
        until("a probe runs", || lines(&system.path("begun")) == 1);
        let (main, old) = (system.pid("p").expect("a pid"), alive(&system));
        kill(main, "KILL");
        replaced(&system, "p", main);
        until("the probe of the next process runs", || lines(&system.path("begun")) == 2);
        until("the old probe has ended", || old.iter().all(|pid| !is_alive(*pid)));
        assert_eq!(system.operate("p", STOP, &spec).0, 0);
        until("nothing is left", || alive(&system).is_empty());
        assert_eq!(lines(&system.path("begun")), 2, "{groups}");
    }
}

/// Answers each request but the first. Counts the connections, and those that are open at once.
fn second_answers() -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    std::thread::spawn(move || {
        let mut silent = Vec::new();
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            match counted.fetch_add(1, Ordering::Relaxed) {
                0 => silent.push(stream),
                _ => {
                    let _ = stream.set_read_timeout(Some(Duration::from_millis(500)));
                    let _ = stream.read(&mut [0; 4096]);
                    let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
                }
            }
        }
    });
    (port, count)
}

#[test]
fn a_killed_agent_leaves_no_probe_behind_and_health_goes_on() {
    let Some(user) = test_user().filter(|_| needs_root()) else { return };
    for groups in [true, false] {
        let mut system = System::with_groups(groups);
        let home = system.home(&user);
        let (http, requests) = second_answers();
        let (tcp, _) = second_answers();
        // The first probe hangs, and each process of it has left the others.
        let command = format!("echo x >> probes; [ $(wc -l < probes) -gt 1 ] || {{ {LEAVES}; sleep 1000; }}");
        let health = |check: serde_json::Value| {
            let mut health = json!({"interval": 3600, "timeout": 600});
            for (name, value) in check.as_object().expect("fields") {
                health[name] = value.clone();
            }
            health
        };
        for (name, check) in [
            ("cmd", json!({"cmd": command})),
            ("http", json!({"http": format!("http://127.0.0.1:{http}/")})),
            ("tcp", json!({"tcp": format!("127.0.0.1:{tcp}")})),
        ] {
            let mut spec = system.spec_of(&user, name, "exec sleep 2000");
            spec["health"] = health(check);
            assert_eq!(system.operate(name, START, &spec).0, 0);
        }
        let names = ["cmd", "http", "tcp"];
        let mains = names.map(|name| system.pid(name).expect("a pid"));
        let left = |system: &System| {
            alive(system).into_iter().filter(|pid| !mains.contains(pid)).collect::<Vec<_>>()
        };
        until("the probes are in flight", || {
            lines(&home.join("probes")) == 1
                && left(&system).len() >= 4
                && requests.load(Ordering::Relaxed) == 1
        });
        let old = left(&system);
        system.kill_agent();
        assert!(old.iter().all(|pid| is_alive(*pid)), "they outlive the agent");
        restart_agent(&mut system, groups);
        for name in names {
            until("health goes on", || system.process(name)["health"] == "Healthy");
        }
        assert!(old.iter().all(|pid| !is_alive(*pid)), "{groups}: {old:?}\n{}", system.log());
        until("no probe is left", || left(&system).is_empty());
        assert_eq!(
            (lines(&home.join("probes")), requests.load(Ordering::Relaxed)),
            (2, 2),
            "{groups}: no double"
        );
        assert_eq!(names.map(|name| system.pid(name).expect("a pid")), mains, "nothing was restarted");
    }
}
