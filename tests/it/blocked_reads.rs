//! Processes whose arguments and environment the kernel does not let the agent read: they delay no other instance.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::apply::KillOnDrop;
use crate::process_tree::{START, STOP, replaced};
use crate::support::{needs_root, until};
use crate::system::{System, is_alive, kill};

/// Maximum time of a stop while reads are blocked: the agent notices each after a second.
const STOP_BOUND: Duration = Duration::from_secs(25);
/// Maximum time of a relaunch, which needs no scan.
const RELAUNCH_BOUND: Duration = Duration::from_secs(3);

fn sleeper() -> KillOnDrop {
    let mut command = Command::new("setsid");
    let command = command.args(["sleep", "1000"]).stdin(Stdio::null()).stdout(Stdio::null());
    KillOnDrop(command.spawn().expect("it starts"))
}

/// A daemon whose pid file names a process: each live status check reads the arguments of that process.
fn named_by_pid_file(system: &System, name: &str, pid: u32) -> Value {
    let mut spec = system.spec(name, "false");
    spec["identity"]["proc_name"] = json!("other-program");
    spec["control"]["start_mode"] = json!("daemon");
    std::fs::create_dir_all(system.path("run")).expect("a folder");
    std::fs::write(system.path(&format!("run/{name}.pid")), format!("{pid}\n")).expect("a pid file");
    spec
}

#[test]
fn a_process_that_cannot_be_read_stops_nothing_else() {
    if !needs_root() {
        return;
    }
    let mut system = System::new();
    let blocked_file = system.path("blocked");
    let specs = ["a", "b"].map(|name| system.spec(name, "exec sleep 1000"));
    assert_eq!(system.operate("a", START, &specs[0]).0, 0);
    // An agent that did not launch the process scans all processes at its stop.
    system.kill_agent();
    let env = [("ABIDE_BLOCKED_FILE", blocked_file.to_str().expect("a path"))];
    system.start_agent_with(&[], &env);
    assert_eq!(system.operate("b", START, &specs[1]).0, 0);
    let stuck: Vec<KillOnDrop> = (0..4).map(|_| sleeper()).collect();
    let pids: Vec<String> = stuck.iter().map(|one| one.0.id().to_string()).collect();
    std::fs::write(&blocked_file, pids.join("\n")).expect("a file");

    // More blocked reads than the agent has runtime threads.
    let checks: Vec<(String, Value)> = stuck
        .iter()
        .enumerate()
        .map(|(nth, one)| {
            let name = format!("c{nth}");
            let spec = named_by_pid_file(&system, &name, one.0.id());
            let task = system.begin(&name, START, &spec);
            (name, task)
        })
        .collect();
    let begun = Instant::now();
    let stop = system.begin("a", STOP, &specs[0]);
    let pid = system.pid("b").expect("it runs");
    let killed = Instant::now();
    kill(pid, "KILL");
    let next = replaced(&system, "b", pid);
    assert!(killed.elapsed() < RELAUNCH_BOUND, "the relaunch took {:?}", killed.elapsed());
    let row = system.row("a", &stop);
    assert!(begun.elapsed() < STOP_BOUND, "the stop took {:?}", begun.elapsed());
    // Without a control group, one of the blocked processes may belong to the tree.
    let has_groups =
        std::fs::read_to_string(format!("/proc/{next}/cgroup")).is_ok_and(|text| text.contains("/abide-"));
    match has_groups {
        true => assert_eq!(row["error_code"], 0, "{row}"),
        false => {
            assert!(row["error_msg"].as_str().is_some_and(|text| text.contains("blocks reads")), "{row}")
        }
    }
    for (name, task) in &checks {
        let row = system.row(name, task);
        let message = row["error_msg"].as_str().unwrap_or_default();
        assert!(message.contains("cannot be read"), "an unknown process is not gone: {row}");
    }
    // The agent ends at once although threads of it are blocked.
    let agent = system.agent.as_mut().expect("an agent");
    let (begun, id) = (Instant::now(), agent.id());
    kill(id, "TERM");
    until("the agent has ended", || agent.try_wait().expect("a child").is_some());
    assert!(begun.elapsed() < Duration::from_secs(5), "the end took {:?}", begun.elapsed());
    system.agent = None;
    assert!(is_alive(next), "processes live on");
    // A process that can be read again is found again.
    std::fs::remove_file(&blocked_file).expect("a file");
    system.start_agent_with(&[], &env);
    for (name, spec) in ["a", "b"].iter().zip(&specs) {
        let (code, message) = system.operate(name, STOP, spec);
        assert!(code == 0 || system.pid(name).is_none(), "{code} {message}");
    }
    assert!(!is_alive(next) && stuck.iter().all(|one| is_alive(one.0.id())));
}
