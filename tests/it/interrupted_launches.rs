//! Interrupted launches and commands: an agent that ends, or is killed together with the shell of a launch or a command,
//! launches and runs nothing twice.

use serde_json::{Value, json};

use crate::support::until;
use crate::system::{System, is_alive, kill, processes};

fn text(system: &System, name: &str) -> String {
    std::fs::read_to_string(system.path(name)).unwrap_or_default()
}

fn children_in(system: &System, program: &str) -> Vec<u32> {
    let here = system.folder.path();
    let is_one = |pid: &u32| {
        let cwd = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
        let command = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        cwd.starts_with(here) && command.trim() == program && is_alive(*pid)
    };
    processes().into_iter().filter(is_one).collect()
}

/// A daemon that is up while its start command goes on.
fn daemon(system: &System) -> Value {
    let pid_path = system.path("run/p.pid");
    let mut spec = system.spec("p", "");
    spec["identity"]["proc_name"] = json!("sleep");
    let command =
        format!("echo up >> starts; setsid sleep 1000 & echo $! > {}; sleep 600", pid_path.display());
    spec["control"] = json!({"start_mode": "daemon", "start_cmd": command});
    spec["monitor_policy"]["start_check_secs"] = json!(5);
    spec
}

/// Kills the agent while a start command runs whose daemon is up, and then the shell of that command.
fn killed_with_the_shell(system: &mut System) {
    let pid = || text(system, "run/p.pid").trim().parse::<u32>().ok();
    until("the daemon is up", || pid().is_some_and(is_alive));
    let daemon = pid().expect("a pid");
    system.kill_agent();
    for shell in children_in(system, "sh") {
        kill(shell, "KILL");
    }
    for sleeper in children_in(system, "sleep").into_iter().filter(|one| *one != daemon) {
        kill(sleeper, "KILL");
    }
    until("one process is left", || {
        children_in(system, "sh").is_empty() && children_in(system, "sleep") == [daemon]
    });
}

#[test]
fn a_daemon_is_not_started_again_though_the_shell_of_its_start_was_killed_with_the_agent() {
    let mut system = System::new();
    let spec = daemon(&system);
    let task = system.begin("p", 0, &spec);
    killed_with_the_shell(&mut system);
    let running = children_in(&system, "sleep");
    system.start_agent();
    let row = system.row("p", &task);
    assert_eq!(text(&system, "starts"), "up\n", "{row}\n{}", system.log());
    assert_eq!(row["error_code"], 0, "{row}\n{}", system.log());
    assert_eq!(children_in(&system, "sleep"), running, "{}", system.log());
    until("it is supervised", || system.facts("p") == (true, true, true));
    assert_eq!(system.pid("p").map(|pid| vec![pid]), Some(running));
    assert_eq!(system.operate("p", 1, &spec).0, 0, "{}", system.log());
}

#[test]
fn a_one_shot_runs_to_its_end_though_the_agent_ends_while_it_launches() {
    let mut system = System::new();
    let mut tasks = Vec::new();
    // Each SIGTERM meets launches at another moment.
    for round in 0..6 {
        for nth in 0..6 {
            let name = format!("p{round}-{nth}");
            let mut spec =
                system.spec(&name, &format!("echo {name} >> begun; sleep 0.1; echo {name} >> ended"));
            spec["monitor_policy"]["auto_type"] = json!(2);
            tasks.push((name.clone(), system.begin(&name, 0, &spec)));
        }
        std::thread::sleep(std::time::Duration::from_millis(round * 5));
        let mut agent = system.agent.take().expect("an agent");
        kill(agent.id(), "TERM");
        assert!(agent.wait().expect("it ends").code().is_some(), "ended by its own exit");
        system.start_agent();
    }
    for (name, task) in &tasks {
        let row = system.row(name, task);
        assert_eq!(row["error_code"], 0, "{name}: {row}\n{}", system.log());
        let count = |file: &str| text(&system, file).lines().filter(|line| line == name).count();
        until(&format!("{name} ended"), || count("ended") == 1);
        assert_eq!(count("begun"), 1, "{name}: {}", system.log());
    }
}

/// Kills the agent while a command runs, and then every process in the folder except `kept`.
fn killed_with_the_command(system: &mut System, begun: &str, kept: u32) {
    until("the command began", || !text(system, begun).is_empty());
    system.kill_agent();
    let others = |system: &System| -> Vec<u32> {
        let all = [children_in(system, "sh"), children_in(system, "sleep")].concat();
        all.into_iter().filter(|one| *one != kept).collect()
    };
    until("one process is left", || {
        others(system).into_iter().for_each(|one| kill(one, "KILL"));
        others(system).is_empty()
    });
}

#[test]
fn a_reload_and_a_stop_that_were_killed_with_the_agent_are_not_repeated() {
    let mut system = System::new();
    let mut spec = system.spec("p", "exec sleep 1000");
    spec["control"]["reload_cmd"] = json!("echo once >> reloads; [ -e quick ] || sleep 600");
    spec["control"]["stop_cmd"] = json!("echo once >> stops; [ -e quick ] && kill $ABIDE_PID || sleep 600");
    spec["monitor_policy"]["stop_check_secs"] = json!(1);
    assert_eq!(system.operate("p", 0, &spec).0, 0, "{}", system.log());
    let pid = system.pid("p").expect("a pid");
    for (op, file) in [(8, "reloads"), (1, "stops")] {
        let task = system.begin("p", op, &spec);
        killed_with_the_command(&mut system, file, pid);
        system.start_agent();
        let row = system.row("p", &task);
        assert!(row["error_msg"].as_str().is_some_and(|why| why.contains("outcome unknown")), "{row}");
        assert_eq!(text(&system, file), "once\n", "{row}\n{}", system.log());
        assert_eq!(system.pid("p"), Some(pid), "the process is left alone");
    }
    // Further operations run their commands.
    std::fs::write(system.path("quick"), "").expect("a file");
    assert_eq!(system.operate("p", 8, &spec).0, 0, "{}", system.log());
    assert_eq!(text(&system, "reloads"), "once\nonce\n");
    assert_eq!(system.operate("p", 1, &spec).0, 0, "{}", system.log());
    assert_eq!(text(&system, "stops"), "once\nonce\n");
}

#[test]
fn a_command_that_outlives_its_recording_shell_is_waited_for_and_not_repeated() {
    let mut system = System::new();
    let mut spec = system.spec("p", "exec sleep 1000");
    spec["control"]["reload_cmd"] = json!("echo begun >> reloads; sleep 3; echo ended >> reloads");
    assert_eq!(system.operate("p", 0, &spec).0, 0, "{}", system.log());
    let task = system.begin("p", 8, &spec);
    until("the command began", || text(&system, "reloads") == "begun\n");
    system.kill_agent();
    let shells = children_in(&system, "sh");
    // All parents are read before the first kill, which changes them.
    let is_recording = |one: &u32| crate::system::parent_of(*one).is_none_or(|of| !shells.contains(&of));
    let recording: Vec<u32> = shells.iter().copied().filter(is_recording).collect();
    recording.into_iter().for_each(|shell| kill(shell, "KILL"));
    system.start_agent();
    let row = system.row("p", &task);
    assert!(row["error_msg"].as_str().is_some_and(|why| why.contains("outcome unknown")), "{row}");
    assert_eq!(text(&system, "reloads"), "begun\nended\n", "the result came after its end: {}", system.log());
}

#[test]
fn a_restart_that_was_killed_with_the_agent_is_judged_by_its_new_process() {
    let mut system = System::new();
    let mut spec = daemon(&system);
    let up = |then: &str| {
        let pid_path = system.path("run/p.pid");
        json!(format!("echo up >> starts; setsid sleep 1000 & echo $! > {}{then}", pid_path.display()))
    };
    spec["control"]["start_cmd"] = up("");
    spec["control"]["restart_cmd"] =
        json!(format!("kill $ABIDE_PID; {}", up("; sleep 600").as_str().expect("a text")));
    assert_eq!(system.operate("p", 0, &spec).0, 0, "{}", system.log());
    let before = system.pid("p").expect("a pid");
    let task = system.begin("p", 7, &spec);
    let pid = || text(&system, "run/p.pid").trim().parse::<u32>().ok().filter(|pid| *pid != before);
    until("the new daemon is up", || pid().is_some_and(is_alive));
    let after = pid().expect("a pid");
    killed_with_the_command(&mut system, "starts", after);
    system.start_agent();
    let row = system.row("p", &task);
    assert_eq!(row["error_code"], 0, "{row}\n{}", system.log());
    assert_eq!((text(&system, "starts").as_str(), system.pid("p")), ("up\nup\n", Some(after)));
    assert_eq!(system.operate("p", 1, &spec).0, 0, "{}", system.log());
}
