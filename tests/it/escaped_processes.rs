//! Processes that leave the evidence of their launch: another control group, another session, no environment, and forks that
//! are faster than a scan.

use std::path::PathBuf;

use serde_json::json;

use crate::process_tree::{START, STOP, alive, replaced};
use crate::support::{needs, needs_root, skip, until};
use crate::system::{System, is_alive, kill};

/// The root of the control groups of version 2.
fn group_root() -> Option<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
    let is_v2 = |line: &&str| line.split(' ').nth(2) == Some("cgroup2");
    let line = mounts.lines().find(is_v2);
    if line.is_none() {
        skip("no control groups of version 2");
    }
    line.and_then(|line| line.split(' ').nth(1)).map(PathBuf::from)
}

#[test]
fn a_process_that_moves_to_another_control_group_is_ended_with_its_tree() {
    if !needs_root() {
        return;
    }
    let Some(root) = group_root() else { return };
    for op in [None, Some(STOP)] {
        let system = System::new();
        let moves =
            format!("echo 0 > {}/cgroup.procs && echo moved >> moved && exec sleep 1000", root.display());
        let spec =
            system.spec("p", &format!("sh -c '{moves}' & (setsid sh -c '{moves}' &) ; exec sleep 2000"));
        assert_eq!(system.operate("p", START, &spec).0, 0);
        until("two have moved", || crate::system::lines(&system.path("moved")) == 2);
        let (old, main) = (alive(&system), system.pid("p").expect("a pid"));
        assert_eq!(old.len(), 3, "{old:?}");
        match op {
            None => {
                kill(main, "KILL");
                replaced(&system, "p", main);
            }
            Some(op) => assert_eq!(system.operate("p", op, &spec).0, 0),
        }
        assert!(old.iter().all(|pid| !is_alive(*pid)), "{op:?}: {old:?}\n{}", system.log());
    }
}

#[test]
fn a_descendant_without_session_and_environment_is_ended_with_its_tree() {
    if !needs_root() {
        return;
    }
    // `agent_lives`: whether the same agent sees the crash, or the next one.
    for agent_lives in [true, false] {
        let mut system = System::new();
        system.disable_control_groups();
        let other = system.spec("other", "exec sleep 3000");
        assert_eq!(system.operate("other", START, &other).0, 0);
        let spec = system.spec("p", "env -i setsid sleep 1000 & exec sleep 2000");
        assert_eq!(system.operate("p", START, &spec).0, 0);
        until("the descendant was observed", || {
            let rows = system.stored("proc/");
            rows.iter().any(|row| row.contains("\"observed\":[{"))
        });
        let main = system.pid("p").expect("a pid");
        let apart = [Some(main), system.pid("other")];
        let left =
            || alive(&system).into_iter().filter(|pid| !apart.contains(&Some(*pid))).collect::<Vec<_>>();
        let old = left();
        assert_eq!(old.len(), 1, "{old:?}");
        if agent_lives {
            kill(main, "KILL");
        } else {
            system.kill_agent();
            kill(main, "KILL");
            system.disable_control_groups();
        }
        replaced(&system, "p", main);
        assert!(!is_alive(old[0]), "agent lives: {agent_lives}\n{}", system.log());
        assert!(system.pid("other").is_some_and(is_alive));
    }
}

/// Forks and exits as fast as it can, so that each process lives for less than a scan.
const COMET: &str = r#"
import os, signal
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        if os.fork(): os._exit(0)
open("begun", "w").close()
signal.pause()
"#;

#[test]
fn a_stop_succeeds_only_if_nothing_is_left() {
    if !needs("python3") || !needs_root() {
        return;
    }
    for groups in [true, false] {
        let system = System::with_groups(groups);
        std::fs::write(system.path("comet.py"), COMET).expect("a script");
        let mut spec = system.spec("p", "exec python3 comet.py");
        spec["monitor_policy"]["stop_check_secs"] = json!(1);
        assert_eq!(system.operate("p", START, &spec).0, 0);
        until("it forks", || system.path("begun").exists());
        let (code, message) = system.operate("p", STOP, &spec);
        let left: Vec<u32> = (0..50).flat_map(|_| alive(&system)).collect();
        match code {
            0 => assert_eq!(left, [0u32; 0], "groups: {groups}: {message}"),
            _ => {
                assert!(
                    !groups && code == 836 && message.contains("still alive after SIGKILL"),
                    "{code} {message}"
                );
                let (code, message) = system.operate("p", START, &spec);
                assert!(
                    code == 0 || message.contains("of an earlier launch are still alive"),
                    "{code} {message}"
                );
            }
        }
    }
}
