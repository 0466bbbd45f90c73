//! Kills of the agent at each step of an operation, on an instance with everything at once: a tree with a worker that ignores
//! SIGTERM, a log writer, a health probe in flight, and commands that replace the process.

use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::log_writer::{numbers, whole, writers};
use crate::process_tree::{KILL, RELOAD, RESTART, START, STOP, alive};
use crate::support::{needs_root, until};
use crate::system::{System, is_alive, kill, lines, processes};

/// Arguments by which the processes of a test are found.
const MAIN: &str = "5001";
const WORKERS: [&str; 2] = ["5002", "5003"];
const PROBE: &str = "5004";

/// An operation, or a crash of the process (`None`), and the step at which the agent is killed.
type Case = (bool, Option<i64>, &'static str);

const FOREGROUND: bool = false;
const DAEMON: bool = true;

const CASES: [Case; 54] = [
    (FOREGROUND, Some(START), "intent-written"),
    (FOREGROUND, Some(START), "writer-started"),
    (FOREGROUND, Some(START), "born"),
    (FOREGROUND, Some(START), "row-written"),
    (FOREGROUND, Some(START), "done"),
    (FOREGROUND, Some(START), "result-written"),
    (FOREGROUND, Some(STOP), "unguarded"),
    (FOREGROUND, Some(STOP), "signalled"),
    (FOREGROUND, Some(STOP), "main-ended"),
    (FOREGROUND, Some(STOP), "done"),
    (FOREGROUND, Some(STOP), "result-written"),
    (FOREGROUND, Some(KILL), "unguarded"),
    (FOREGROUND, Some(KILL), "signalled"),
    (FOREGROUND, Some(KILL), "main-ended"),
    (FOREGROUND, Some(KILL), "done"),
    (FOREGROUND, Some(KILL), "result-written"),
    (FOREGROUND, Some(RESTART), "signalled"),
    (FOREGROUND, Some(RESTART), "main-ended"),
    (FOREGROUND, Some(RESTART), "down"),
    (FOREGROUND, Some(RESTART), "intent-written"),
    (FOREGROUND, Some(RESTART), "writer-started"),
    (FOREGROUND, Some(RESTART), "born"),
    (FOREGROUND, Some(RESTART), "row-written"),
    (FOREGROUND, Some(RESTART), "done"),
    (FOREGROUND, Some(RESTART), "result-written"),
    (FOREGROUND, None, "tree-ended"),
    (FOREGROUND, None, "writer-started"),
    (FOREGROUND, None, "born"),
    (FOREGROUND, None, "row-written"),
    (DAEMON, Some(START), "intent-written"),
    (DAEMON, Some(START), "row-written"),
    (DAEMON, Some(START), "done"),
    (DAEMON, Some(START), "result-written"),
    (DAEMON, Some(STOP), "unguarded"),
    (DAEMON, Some(STOP), "command-begun"),
    (DAEMON, Some(STOP), "command-ended"),
    (DAEMON, Some(STOP), "main-ended"),
    (DAEMON, Some(STOP), "done"),
    (DAEMON, Some(KILL), "unguarded"),
    (DAEMON, Some(KILL), "signalled"),
    (DAEMON, Some(KILL), "main-ended"),
    (DAEMON, Some(KILL), "result-written"),
    (DAEMON, Some(RELOAD), "command-begun"),
    (DAEMON, Some(RELOAD), "command-ended"),
    (DAEMON, Some(RELOAD), "handed-over"),
    (DAEMON, Some(RELOAD), "done"),
    (DAEMON, Some(RELOAD), "result-written"),
    (DAEMON, Some(RESTART), "command-begun"),
    (DAEMON, Some(RESTART), "command-ended"),
    (DAEMON, Some(RESTART), "done"),
    (DAEMON, Some(RESTART), "result-written"),
    (DAEMON, None, "tree-ended"),
    (DAEMON, None, "intent-written"),
    (DAEMON, None, "row-written"),
];

/// Live processes `sleep SECS` of a system.
fn sleepers(system: &System, secs: &str) -> usize {
    let command = format!("sleep\0{secs}\0");
    let is_one = |pid: &u32| {
        let found = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let cwd = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
        found == command.as_bytes() && cwd.starts_with(system.folder.path()) && is_alive(*pid)
    };
    processes().iter().filter(|pid| is_one(pid)).count()
}

/// A process that leaves its lines in a rotated log, with three others in its tree.
fn foreground(system: &System) -> Value {
    let workers = "sleep 5002 & (trap '' TERM; exec sleep 5003) &";
    let ticks = "(i=0; while :; do echo tick-$$ $i; i=$((i+1)); sleep 0.02; done) &";
    let mut spec = system.spec("p", &format!("echo up >> starts; {workers} {ticks} exec sleep {MAIN}"));
    spec["log"] = json!({"max_size": 2000, "keep": 1000});
    spec
}

/// A daemon with a worker. Its reload and its restart start the next one and end this one.
fn daemon(system: &System) -> Value {
    let pid = system.path("run/p.pid").display().to_string();
    let ignores = "(trap '' TERM; exec sleep 5003) &";
    let launch = format!("setsid sh -c \"sleep 5002 & {ignores} exec sleep {MAIN}\" & echo $! > {pid}");
    let swap = format!("echo swap >> swaps; {launch}; kill -9 -$ABIDE_PID");
    let mut spec = system.spec("p", "");
    spec["identity"]["proc_name"] = json!("sleep");
    spec["control"] = json!({"start_mode": "daemon", "start_cmd": format!("echo up >> starts; {launch}"),
        "stop_cmd": "echo stop >> stops; kill $ABIDE_PID", "reload_cmd": swap, "restart_cmd": swap});
    spec["monitor_policy"]["start_check_secs"] = json!(5);
    spec
}

#[test]
fn an_operation_continues_and_leaves_nothing_behind_wherever_the_agent_is_killed() {
    if !needs_root() {
        return;
    }
    let next = AtomicUsize::new(0);
    std::thread::scope(|threads| {
        for _ in 0..6 {
            threads.spawn(|| {
                while let Some(case) = CASES.get(next.fetch_add(1, Ordering::Relaxed)) {
                    crash_at(*case);
                }
            });
        }
    });
}

fn crash_at((is_daemon, op, place): Case) {
    let mut system = System::new();
    std::fs::create_dir_all(system.path("run")).expect("a folder");
    let mut spec = if is_daemon { daemon(&system) } else { foreground(&system) };
    spec["monitor_policy"]["stop_check_secs"] = json!(1);
    spec["health"] = json!({"cmd": format!("exec sleep {PROBE}"), "interval": 1, "timeout": 600});
    let context = format!("daemon: {is_daemon}, op {op:?} at {place}");
    let is_whole = |system: &System| {
        let tree = [MAIN, WORKERS[0], WORKERS[1]].map(|secs| sleepers(system, secs));
        (tree, sleepers(system, PROBE)) == ([1, 1, 1], 1)
    };
    if op != Some(START) {
        assert_eq!(system.operate("p", START, &spec).0, 0, "{context}");
        until(&format!("the tree and a probe: {context}"), || is_whole(&system));
    }
    system.kill_agent();
    system.start_agent_with(&[], &[("ABIDE_DIE_AT", place)]);
    if op != Some(START) {
        until("it is held again", || system.process("p")["agent"] == true);
    }
    let task = op.map(|op| system.begin("p", op, &spec));
    if op.is_none() {
        kill(system.pid("p").expect("a pid"), "KILL");
    }
    until(&format!("the agent is killed: {context}"), || {
        system.agent.as_mut().is_some_and(|agent| agent.try_wait().expect("a child").is_some())
    });
    system.agent = None;
    system.start_agent();
    if let Some(task) = task {
        let row = system.row("p", &task);
        assert_eq!(row["error_code"], 0, "{context}: {row}\n{}", system.log());
    }
    let runs = op != Some(STOP) && op != Some(KILL);
    if runs {
        until(&format!("one tree, which is held, and one probe: {context}"), || {
            let pid = system.pid("p").filter(|pid| is_alive(*pid));
            pid.is_some() && is_whole(&system) && system.facts("p") == (true, true, true)
        });
    } else {
        until(&format!("nothing is left: {context}"), || alive(&system).is_empty());
        until(&format!("the gateway knows of it: {context}"), || system.facts("p") == (true, false, false));
    }
    let count = |name: &str| lines(&system.path(name));
    let replaces = is_daemon && matches!(op, Some(RELOAD | RESTART));
    let starts = if op.is_none() || op == Some(RESTART) && !is_daemon { 2 } else { 1 };
    assert_eq!(count("starts"), starts, "{context}\n{}", system.log());
    assert_eq!(
        (count("swaps"), count("stops")),
        (replaces.into(), (is_daemon && op == Some(STOP)).into()),
        "{context}"
    );
    if !is_daemon {
        all_lines_are_logged(&system, starts, runs, &context);
    }
}

/// Each launch leaves its lines without a gap, and no log writer without a process is left.
fn all_lines_are_logged(system: &System, launches: usize, runs: bool, context: &str) {
    let log = system.path("log/p.log");
    until(&format!("{launches} launches without a gap in the log: {context}"), || {
        let text = whole(&log);
        let mut names: Vec<&str> = text.lines().filter_map(|line| line.split(' ').next()).collect();
        names.sort_unstable();
        names.dedup();
        // A launch that ends at once may have no line.
        let is_complete = |name: &&str| {
            let seen = numbers(&text, name);
            seen.iter().copied().eq(0..seen.len() as u64)
        };
        (1..=launches).contains(&names.len()) && names.iter().all(is_complete)
    });
    until(&format!("log writers: {context}"), || writers(&log).len() == usize::from(runs));
}
