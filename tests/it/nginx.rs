//! An nginx through its life: start, kill of the master, reload, upgrades, bad configuration, stop; every operation is counted.

use serde_json::json;

use crate::process_tree::{RELOAD, START, STOP, alive, get, nginx, replaced};
use crate::support::{needs, needs_root, until};
use crate::system::{System, is_alive, kill, lines};

/// The commands count themselves, nginx logs each signal and each worker, and the agent counts relaunches and exits.
#[test]
fn nginx_from_start_to_stop() {
    if !needs("nginx") || !needs_root() {
        return;
    }
    let system = System::new();
    let mut nginx = nginx(&system);
    let start = nginx.spec["control"]["start_cmd"].as_str().expect("text").to_owned();
    nginx.spec["control"]["start_cmd"] = json!(format!("echo start >> starts; {start}"));
    // Each command, and each master and worker of nginx by itself, leaves a line.
    let reload = nginx.spec["control"]["reload_cmd"].as_str().expect("text").to_owned();
    nginx.spec["control"]["reload_cmd"] = json!(format!("echo reload >> reloads; {reload}"));
    nginx.spec["control"]["stop_cmd"] = json!("echo stop >> stops; kill -QUIT $ABIDE_PID");
    let notices = |text: &str| {
        let log = std::fs::read_to_string(system.path("error.log")).unwrap_or_default();
        log.lines().filter(|line| line.contains(text)).count()
    };
    assert_eq!(system.operate("nginx", START, &nginx.spec), (0, "success".to_owned()));
    until("it answers", || get(nginx.port).as_deref() == Some("one"));

    let master = system.pid("nginx").expect("a pid");
    kill(master, "KILL");
    let master = replaced(&system, "nginx", master);
    until("it answers", || get(nginx.port).as_deref() == Some("one"));

    nginx.answer_with(&system, "two");
    assert_eq!(system.operate("nginx", RELOAD, &nginx.spec), (0, "success".to_owned()));
    until("the new configuration answers", || get(nginx.port).as_deref() == Some("two"));
    assert_eq!(system.pid("nginx"), Some(master), "the pid stays");

    // A binary upgrade: the new master is a child of the old one, which quits.
    let mut upgrade = nginx.spec.clone();
    let pid = system.path("run/nginx.pid").display().to_string();
    upgrade["control"]["reload_cmd"] = json!(format!(
        "echo upgrade >> upgrades; kill -USR2 $ABIDE_PID; while [ ! -s {pid}.oldbin ] || [ ! -s {pid} ]; do sleep 0.05; done; kill -QUIT $ABIDE_PID; \
         while kill -0 $ABIDE_PID; do sleep 0.05; done"
    ));
    let (code, message) = system.operate("nginx", RELOAD, &upgrade);
    assert!(code == 0 && message.contains("pid"), "{code} {message}");
    let upgraded = system.pid("nginx").expect("a pid");
    assert!(upgraded != master && is_alive(upgraded) && !is_alive(master), "{upgraded} {master}");
    until("it answers", || get(nginx.port).as_deref() == Some("two"));

    // An upgrade whose end comes later: the old master quits on its own, and the new one is taken over.
    upgrade["control"]["reload_cmd"] = json!("echo upgrade >> upgrades; kill -USR2 $ABIDE_PID");
    assert_eq!(system.operate("nginx", RELOAD, &upgrade).0, 0);
    until("the new master runs", || {
        let named = std::fs::read_to_string(&pid).unwrap_or_default();
        named.trim().parse::<u32>().is_ok_and(|named| named != upgraded && is_alive(named))
    });
    kill(upgraded, "QUIT");
    let last = replaced(&system, "nginx", upgraded);
    until("it answers", || get(nginx.port).as_deref() == Some("two"));

    std::fs::write(&nginx.config, "nonsense").expect("a file");
    let (code, message) = system.operate("nginx", RELOAD, &nginx.spec);
    assert!(code == 65535 && message.contains("reload_cmd ended with"), "{code} {message}");
    assert_eq!((system.pid("nginx"), get(nginx.port).as_deref()), (Some(last), Some("two")));

    assert_eq!(system.operate("nginx", STOP, &nginx.spec), (0, "success".to_owned()));
    assert_eq!(alive(&system), [0u32; 0]);
    let count = |name: &str| lines(&system.path(name));
    assert_eq!(count("starts"), 2, "one start, and one relaunch after the kill");
    assert_eq!((count("reloads"), count("upgrades"), count("stops")), (2, 2, 1), "one reload fails");
    assert_eq!(notices("signal 1 (SIGHUP) received"), 1, "the reload of a bad configuration sent no signal");
    assert_eq!(notices("signal 12 (SIGUSR2) received"), 2);
    assert_eq!(notices("start worker processes"), 4 + 1, "two starts, two upgrades, one reload");
    let row = system.process("nginx");
    assert_eq!(row["restarts"], 1, "{row}");
    let exits: Vec<&str> =
        row["exits"].as_array().expect("exits").iter().filter_map(|exit| exit["reason"].as_str()).collect();
    assert_eq!(exits, ["stopped", "crashed"], "the last first: {row}");
}
