//! Signals of a spec: a stop and a reload by signal, and the time until a stop kills, with real processes.

use serde_json::{Value, json};

use crate::support::until;
use crate::system::{System, is_alive, lines};

const START: i64 = 0;
const STOP: i64 = 1;
const RESTART: i64 = 7;
const RELOAD: i64 = 8;

/// A shell that notes each signal. INT and TERM end it; `deaf`: no signal but KILL ends it.
fn trapping(system: &System, deaf: bool) -> Value {
    let end = if deaf { "" } else { "; exit 0" };
    let script = format!(
        "trap 'echo TERM >> got{end}' TERM; trap 'echo INT >> got{end}' INT; trap 'echo HUP >> got' HUP; \
         echo up >> starts; while :; do sleep 0.02; done"
    );
    system.spec("p", &script)
}

fn got(system: &System) -> String {
    std::fs::read_to_string(system.path("got")).unwrap_or_default()
}

fn started(system: &System, spec: &Value) -> u32 {
    let before = lines(&system.path("starts"));
    assert_eq!(system.operate("p", START, spec), (0, "success".to_owned()));
    until("it traps", || lines(&system.path("starts")) > before);
    system.pid("p").expect("a pid")
}

#[test]
fn stop_signal_stops_the_process_unless_there_is_a_stop_cmd() {
    let system = System::new();
    let mut spec = trapping(&system, false);
    spec["control"]["stop_signal"] = json!("INT");
    started(&system, &spec);
    assert_eq!(system.operate("p", STOP, &spec).0, 0);
    assert_eq!(got(&system), "INT\n");
    let old = started(&system, &spec);
    assert_eq!(system.operate("p", RESTART, &spec).0, 0);
    until("it was restarted", || system.pid("p").is_some_and(|pid| pid != old));
    assert_eq!(got(&system), "INT\nINT\n");
    until("it traps", || lines(&system.path("starts")) == 3);
    spec["control"]["stop_cmd"] = json!("kill -TERM $ABIDE_PID");
    assert_eq!(system.operate("p", STOP, &spec).0, 0);
    assert_eq!(got(&system), "INT\nINT\nTERM\n");
}

#[test]
fn stop_timeout_is_the_time_until_the_tree_is_killed() {
    let system = System::new();
    for command in [None, Some("true"), Some("exit 3")] {
        let mut spec = trapping(&system, true);
        spec["control"]["stop_timeout"] = json!(1);
        spec["monitor_policy"]["stop_check_secs"] = json!(25);
        if let Some(command) = command {
            spec["control"]["stop_cmd"] = json!(command);
        }
        let pid = started(&system, &spec);
        let begin = std::time::Instant::now();
        let (code, message) = system.operate("p", STOP, &spec);
        let took = begin.elapsed().as_secs_f64();
        assert!(code == 0 && message.contains("killed"), "{command:?}: {code} {message}");
        assert!((1.0..20.0).contains(&took) && !is_alive(pid), "{command:?}: {took}");
    }
}

#[test]
fn reload_signal_reloads_and_a_process_that_ends_fails_the_reload() {
    let system = System::new();
    let mut spec = trapping(&system, false);
    assert_ne!(system.operate("p", RELOAD, &spec).0, 0);
    spec["control"]["reload_signal"] = json!("HUP");
    let pid = started(&system, &spec);
    assert_eq!(system.operate("p", RELOAD, &spec), (0, "success".to_owned()));
    until("the signal was handled", || got(&system) == "HUP\n");
    assert_eq!(system.pid("p"), Some(pid));
    spec["control"]["reload_cmd"] = json!("echo cmd >> got");
    assert_eq!(system.operate("p", RELOAD, &spec).0, 0);
    assert_eq!(got(&system), "HUP\ncmd\n", "reload_cmd comes first");
    let mut ends = system.spec("p", "echo up >> starts; exec sleep 1000");
    ends["control"]["reload_signal"] = json!("USR1");
    assert_eq!(system.operate("p", STOP, &spec).0, 0);
    started(&system, &ends);
    let (code, message) = system.operate("p", RELOAD, &ends);
    assert!(code != 0 && message.contains("process ended during reload_signal"), "{code} {message}");
}

#[test]
fn a_reload_by_signal_continues_after_a_crash() {
    let mut system = System::new();
    let mut spec = trapping(&system, false);
    spec["control"]["reload_signal"] = json!("HUP");
    let pid = started(&system, &spec);
    system.kill_agent();
    system.start_agent_with(&[], &[("ABIDE_DIE_AT", "reload-signalled")]);
    let task = system.begin("p", RELOAD, &spec);
    let mut agent = system.agent.take().expect("it runs");
    assert!(!agent.wait().expect("it ends").success());
    system.start_agent();
    assert_eq!(system.row("p", &task)["error_code"], 0, "{}", system.log());
    assert!(got(&system).starts_with("HUP\n") && is_alive(pid) && system.pid("p") == Some(pid));
    assert_eq!(lines(&system.path("starts")), 1);
}
