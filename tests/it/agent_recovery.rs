//! Recovery of operations after a SIGKILL of the agent: each launch and each command of an operation happens once, with
//! supervision on, in foreground and daemon mode. The children count their own launches.

use serde_json::{Value, json};

use crate::support::until;
use crate::system::{HOST, System, is_alive, kill, lines, processes};

/// A daemon: its starter writes a line, leaves a sleeper behind and ends. On SIGTERM the sleeper is gone at once.
fn daemon(system: &System, name: &str, word: &str) -> Value {
    let pid_path = system.path(&format!("run/{name}.pid"));
    let mut spec = system.spec(name, "");
    spec["identity"]["proc_name"] = json!("sleep");
    spec["control"] = json!({"start_mode": "daemon",
        "start_cmd": format!("echo {word} >> starts; setsid sleep 1000 & echo $! > {}", pid_path.display())});
    spec["monitor_policy"]["start_check_secs"] = json!(5);
    spec
}

fn text(system: &System, name: &str) -> String {
    std::fs::read_to_string(system.path(name)).unwrap_or_default()
}

/// Sleepers of a test's folder that live.
fn sleepers(system: &System) -> Vec<u32> {
    let here = system.folder.path();
    let is_one = |pid: &u32| {
        let cwd = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
        let command = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        cwd.starts_with(here) && command.trim() == "sleep" && is_alive(*pid)
    };
    processes().into_iter().filter(is_one).collect()
}

/// Waits until the agent has died at a place.
fn dead(system: &mut System, place: &str) {
    let mut agent = system.agent.take().expect("an agent");
    until(&format!("the agent dies at {place}"), || agent.try_wait().expect("a child").is_some());
}

/// Runs an operation on an agent that dies at a place, then on the agent after it: the final row.
fn through_a_kill(system: &mut System, op: i64, spec: &Value, place: &str) -> Value {
    system.kill_agent();
    system.start_agent_with(&[], &[("ABIDE_DIE_AT", place)]);
    let task = system.begin("p", op, spec);
    dead(system, place);
    system.start_agent();
    system.row("p", &task)
}

/// The places that a restart passes; the supervisor must not launch on its own in between.
const RESTART: [&str; 6] = ["signalled", "down", "intent-written", "born", "row-written", "done"];

#[test]
fn a_restart_launches_once_though_the_agent_is_killed_and_the_process_is_supervised() {
    std::thread::scope(|threads| {
        for place in RESTART {
            threads.spawn(move || {
                let mut system = System::new();
                let old = system.spec("p", "echo old >> starts; exec sleep 1000");
                let new = system.spec("p", "echo new >> starts; exec sleep 2000");
                assert_eq!(system.operate("p", 0, &old).0, 0);
                let row = through_a_kill(&mut system, 7, &new, place);
                assert_eq!(row["error_code"], 0, "{place}: {row}\n{}", system.log());
                until("one process is reported", || system.facts("p") == (true, true, true));
                assert_eq!(text(&system, "starts"), "old\nnew\n", "{place}: {}", system.log());
            });
        }
    });
}

#[test]
fn a_daemons_start_is_continued_though_the_agent_is_killed_while_it_starts() {
    const PLACES: [&str; 6] =
        ["intent-written", "command-begun", "command-ended", "born", "row-written", "done"];
    std::thread::scope(|threads| {
        for place in PLACES {
            // The daemon is up at once, and its start command goes on for a while.
            for tail in ["", "; sleep 1"] {
                threads.spawn(move || {
                    let mut system = System::new();
                    let mut spec = daemon(&system, "p", "up");
                    let command = spec["control"]["start_cmd"].as_str().expect("text").to_owned() + tail;
                    spec["control"]["start_cmd"] = json!(command);
                    let row = through_a_kill(&mut system, 0, &spec, place);
                    assert_eq!(row["error_code"], 0, "{place}{tail}: {row}\n{}", system.log());
                    assert_eq!(text(&system, "starts"), "up\n", "{place}{tail}: {}", system.log());
                    until("it is supervised", || system.facts("p") == (true, true, true));
                    assert_eq!(sleepers(&system).len(), 1, "{place}{tail}: {}", system.log());
                    assert_eq!(system.operate("p", 1, &spec).0, 0, "{place}{tail}: {}", system.log());
                });
            }
        }
    });
}

#[test]
fn a_daemons_restart_launches_once_though_the_agent_is_killed() {
    const PLACES: [&str; 7] =
        ["signalled", "down", "intent-written", "command-begun", "command-ended", "born", "row-written"];
    std::thread::scope(|threads| {
        for place in PLACES {
            threads.spawn(move || {
                let mut system = System::new();
                let (old, new) = (daemon(&system, "p", "old"), daemon(&system, "p", "new"));
                assert_eq!(system.operate("p", 0, &old).0, 0, "{}", system.log());
                let row = through_a_kill(&mut system, 7, &new, place);
                assert_eq!(row["error_code"], 0, "{place}: {row}\n{}", system.log());
                assert_eq!(text(&system, "starts"), "old\nnew\n", "{place}: {}", system.log());
                assert_eq!(sleepers(&system).len(), 1, "{place}: {}", system.log());
            });
        }
    });
}

#[test]
fn a_process_that_runs_again_has_no_message_of_an_earlier_end() {
    let mut system = System::new();
    let mut spec = daemon(&system, "p", "first");
    let pid_path = system.path("run/p.pid");
    let again = format!("kill $(cat {0}); sleep 1; setsid sleep 2000 & echo $! > {0}", pid_path.display());
    spec["control"]["restart_cmd"] = json!(again);
    assert_eq!(system.operate("p", 0, &spec).0, 0);
    let row = through_a_kill(&mut system, 7, &spec, "command-begun");
    assert_eq!(row["error_code"], 0, "{row}\n{}", system.log());
    let process = system.process("p");
    assert!(process["running"] == true && process["message"].as_str().is_none_or(str::is_empty), "{process}");
    assert!(process["exit"].is_null(), "{process}");
}

/// Commands that say when they begin and end, and take long enough to be in progress when the agent is killed.
fn counted(word: &str, rest: &str) -> String {
    format!("echo {word} >> effects; sleep 0.5; {rest}")
}

#[test]
fn a_command_that_finished_or_goes_on_is_not_run_again() {
    // An operation, the command that it runs, and where the agent dies.
    let cases: [(i64, &str); 4] = [(8, "reload_cmd"), (7, "restart_cmd"), (1, "stop_cmd"), (9, "kill_cmd")];
    std::thread::scope(|threads| {
        for (op, field) in cases {
            for place in ["command-begun", "command-ended", "done"] {
                threads.spawn(move || {
                    let mut system = System::new();
                    let mut spec = daemon(&system, "p", "up");
                    let pid_path = system.path("run/p.pid");
                    let pid_path = pid_path.display();
                    spec["control"]["reload_cmd"] = json!(counted("reload", "true"));
                    spec["control"]["stop_cmd"] = json!(counted("stop", &format!("kill $(cat {pid_path})")));
                    spec["control"]["kill_cmd"] =
                        json!(counted("kill", &format!("kill -9 $(cat {pid_path})")));
                    let again = format!("kill $(cat {pid_path}); setsid sleep 2000 & echo $! > {pid_path}");
                    spec["control"]["restart_cmd"] = json!(counted("restart", &again));
                    assert_eq!(system.operate("p", 0, &spec).0, 0, "{}", system.log());
                    let row = through_a_kill(&mut system, op, &spec, place);
                    assert_eq!(row["error_code"], 0, "{field} at {place}: {row}\n{}", system.log());
                    let word = field.trim_end_matches("_cmd");
                    assert_eq!(text(&system, "effects"), format!("{word}\n"), "{field} at {place}");
                    let live = if op == 7 || op == 8 { 1 } else { 0 };
                    until("as many processes live as should", || sleepers(&system).len() == live);
                });
            }
        }
    });
}

/// A command that fails is reported with its own code, also by the agent that did not begin it.
#[test]
fn a_failed_command_is_reported_by_the_next_agent() {
    let mut system = System::new();
    let mut spec = system.spec("p", "exec sleep 1000");
    spec["control"]["reload_cmd"] = json!(counted("reload", "exit 7"));
    assert_eq!(system.operate("p", 0, &spec).0, 0);
    let row = through_a_kill(&mut system, 8, &spec, "command-begun");
    assert_eq!(row["error_code"], 65535, "{row}");
    assert!(row["error_msg"].as_str().is_some_and(|text| text.contains("ended with 7")), "{row}");
    assert_eq!(text(&system, "effects"), "reload\n");
}

fn one_shot(system: &System, command: &str) -> Value {
    let mut spec = system.spec("p", command);
    spec["monitor_policy"]["auto_type"] = json!(2);
    spec
}

#[test]
fn a_one_shot_runs_once_wherever_the_agent_is_killed() {
    const PLACES: [&str; 5] = ["intent-written", "born", "row-written", "done", "result-written"];
    std::thread::scope(|threads| {
        for place in PLACES {
            // One that is over at once, and one that goes on while the agent is away.
            for command in ["echo run >> starts; exit 3", "echo run >> starts; sleep 1; exit 3"] {
                threads.spawn(move || {
                    let mut system = System::new();
                    let spec = one_shot(&system, command);
                    let row = through_a_kill(&mut system, 0, &spec, place);
                    assert_eq!(row["error_code"], 0, "{place}: {row}\n{}", system.log());
                    until(&format!("the exit code is reported after {place}"), || {
                        system.process("p")["health"] == "Failed"
                    });
                    assert_eq!(text(&system, "starts"), "run\n", "{place}: {}", system.log());
                    let ran = &system.process("p")["ran"];
                    assert!(ran["spec"].is_object(), "{place}: {ran}");
                });
            }
        }
    });
}

/// A second kill, in the middle of recovery, repeats nothing either.
#[test]
fn a_one_shot_runs_once_though_the_next_agent_is_killed_while_it_recovers() {
    let mut system = System::new();
    let spec = one_shot(&system, "echo run >> starts; exit 3");
    system.kill_agent();
    system.start_agent_with(&[], &[("ABIDE_DIE_AT", "born")]);
    let task = system.begin("p", 0, &spec);
    dead(&mut system, "born");
    until("the run ended", || text(&system, "starts") == "run\n");
    let url = format!("http://{}", system.server.address);
    let args = ["agent", "--join", &url, "--token-file", "token", "--data", "agent"];
    let mut second = crate::support::command(&args, system.folder.path());
    let second = second.env("ABIDE_DIE_AT", "recovering").stdout(std::process::Stdio::null());
    let mut second = second.stderr(std::process::Stdio::null()).spawn().expect("it starts");
    until("the second agent dies", || second.try_wait().expect("a child").is_some());
    system.start_agent();
    assert_eq!(system.row("p", &task)["error_code"], 0, "{}", system.log());
    until("its exit code is reported", || system.process("p")["health"] == "Failed");
    assert_eq!(text(&system, "starts"), "run\n", "{}", system.log());
}

/// The shell that would record the end is killed with the agent: the outcome is unknown, and the run is not repeated.
#[test]
fn a_one_shot_whose_outcome_is_unknown_is_not_run_again() {
    // Before the agent wrote that it runs, and long after the start was answered.
    outcome_is_unknown("born");
    outcome_is_unknown("");
}

fn outcome_is_unknown(place: &str) {
    let mut system = System::new();
    let spec = one_shot(&system, "echo run >> starts; echo $PPID > shell; sleep 1000");
    system.kill_agent();
    system.start_agent_with(&[], &[("ABIDE_DIE_AT", place)]);
    let task = system.begin("p", 0, &spec);
    until("it runs", || !text(&system, "shell").is_empty());
    match place {
        "" => {
            assert_eq!(system.row("p", &task)["error_code"], 0);
            system.kill_agent();
        }
        place => dead(&mut system, place),
    }
    for pid in processes() {
        let cwd = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
        if cwd.starts_with(system.folder.path()) {
            kill(pid, "KILL");
        }
    }
    until("nothing of it lives", || sleepers(&system).is_empty());
    system.start_agent();
    if !place.is_empty() {
        let row = system.row("p", &task);
        assert_ne!(row["error_code"], 0, "{row}");
        assert!(row["error_msg"].as_str().is_some_and(|text| text.contains("unknown")), "{row}");
    }
    until("the run is reported as unknown", || system.process("p")["ran"] == "unknown");
    // A restart of the agent changes nothing about that.
    system.kill_agent();
    system.start_agent();
    until("the run is reported as unknown", || system.process("p")["ran"] == "unknown");
    assert_eq!(text(&system, "starts"), "run\n");
    // A person's start decides.
    let again = one_shot(&system, "echo again >> starts");
    assert_eq!(system.operate("p", 0, &again).0, 0);
    until("it ran", || text(&system, "starts") == "run\nagain\n");
    until("the run is known again", || system.process("p")["ran"]["spec"].is_object());
}

/// A process that crashed twice waits for its next launch; the agent is replaced meanwhile.
#[test]
fn a_process_in_backoff_is_launched_after_an_agent_restart() {
    std::thread::scope(|threads| {
        // Waiting for start_interval, and after its retries are used up.
        for (retries, signal) in [(4, "KILL"), (4, "TERM"), (1, "KILL"), (1, "TERM")] {
            threads.spawn(move || {
                let mut system = System::new();
                let mut spec = system.spec("p", "echo up >> starts; exec sleep 1000");
                spec["monitor_policy"]["start_interval"] = json!(2);
                spec["monitor_policy"]["start_retries"] = json!(retries);
                assert_eq!(system.operate("p", 0, &spec).0, 0);
                for crash in 1..=2 {
                    until("it runs", || lines(&system.path("starts")) == crash);
                    let pid = || system.pid("p").filter(|pid| is_alive(*pid));
                    until("its pid is reported", || pid().is_some());
                    kill(pid().expect("a pid"), "KILL");
                    until("its end is noticed", || {
                        lines(&system.path("starts")) > crash || system.facts("p") == (true, true, false)
                    });
                }
                let crashed = std::time::Instant::now();
                assert_eq!(lines(&system.path("starts")), 2, "it waits: {}", system.log());
                let agent = system.agent.as_ref().expect("an agent").id();
                kill(agent, signal);
                system.agent.take().expect("an agent").wait().expect("its end");
                system.start_agent();
                until("it is back", || lines(&system.path("starts")) == 3);
                // The wait goes on from the recorded time: it neither starts over nor is skipped.
                let waited = crashed.elapsed().as_millis();
                assert!(waited > 1000, "launched after {waited} ms: {}", system.log());
                until("it is reported", || system.facts("p") == (true, true, true));
            });
        }
    });
}

/// Supervision of a process that was never started begins with its first start, also under the next agent.
#[test]
fn supervision_alone_starts_nothing_after_an_agent_restart() {
    let mut system = System::new();
    let spec = system.spec("p", "echo up >> starts; exec sleep 1000");
    assert_eq!(system.operate("p", 3, &spec).0, 0);
    system.kill_agent();
    system.start_agent();
    // A second process, started after it, is the fence.
    assert_eq!(system.operate("q", 0, &system.spec("q", "exec sleep 1000")).0, 0);
    assert_eq!(lines(&system.path("starts")), 0, "{}", system.log());
    assert_eq!(system.operate("p", 0, &spec).0, 0);
    assert_eq!(lines(&system.path("starts")), 1);
}

/// A rename moves the row in one step: an agent that is killed around it loses nothing.
#[test]
fn a_rename_survives_a_kill_of_the_agent() {
    for place in ["done", "result-written"] {
        let mut system = System::new();
        let spec = system.spec("p", "echo up >> starts; exec sleep 1000");
        assert_eq!(system.operate("p", 0, &spec).0, 0);
        let pid = system.pid("p").expect("a pid");
        system.kill_agent();
        system.start_agent_with(&[], &[("ABIDE_DIE_AT", place)]);
        let body = json!({"from": format!("{HOST}:web:p"), "to": format!("{HOST}:web:q")});
        let answer = system.server.call("POST", "/api/abide/v1/rename", body);
        assert_eq!(answer["result"], true, "{answer}");
        dead(&mut system, place);
        system.start_agent();
        assert_eq!(system.row("q", &answer["data"]["task_id"])["error_code"], 0, "{place}");
        until("it is known by its new name", || {
            system.pid("q") == Some(pid) && system.process("q")["agent"] == true
        });
        assert_eq!(lines(&system.path("starts")), 1, "{place}: {}", system.log());
    }
}
