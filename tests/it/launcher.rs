//! The launcher process: killed at any time, it repeats and loses no launch; no user reaches it; it ends with the agent.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::{TestUser, test_user, until};
use crate::system::{System, is_alive, kill, lines, parent_of, processes};

/// The launcher of an agent. A process that it forked has its arguments until `execve`, and another user.
fn launcher_of(agent: u32) -> Option<u32> {
    processes().into_iter().find(|pid| {
        let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap_or_default();
        parent_of(*pid) == Some(agent)
            && read("cmdline") == "abide\0agent-launcher\0"
            && read("stat").rsplit_once(") ").is_some_and(|(_, rest)| {
                // The flag of a process that was forked and has not called `execve`.
                let flags = rest.split(' ').nth(6).and_then(|flags| flags.parse::<u64>().ok());
                flags.is_some_and(|flags| flags & 0x40 == 0)
            })
    })
}

/// A spec whose process counts its starts.
fn counted(system: &System, user: &TestUser, name: &str) -> Value {
    let mut spec = system.spec_of(user, name, &format!("echo $$ >> {name}.starts; exec sleep 1000"));
    spec["monitor_policy"]["start_check_secs"] = json!(0);
    spec
}

#[test]
fn a_launcher_that_is_killed_again_and_again_repeats_and_loses_no_launch() {
    const STARTS: usize = 40;
    let Some(user) = test_user() else { return };
    let system = System::new();
    let agent = system.agent.as_ref().expect("an agent").id();
    assert_eq!(system.operate("first", 0, &counted(&system, &user, "first")).0, 0);
    let (is_over, kills) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                if let Some(launcher) = launcher_of(agent) {
                    kill(launcher, "KILL");
                    kills.fetch_add(1, Ordering::Relaxed);
                }
                std::thread::sleep(Duration::from_millis(15));
            }
        });
        let names: Vec<String> = (0..STARTS).map(|nth| format!("p{nth}")).collect();
        let tasks: Vec<Value> =
            names.iter().map(|name| system.begin(name, 0, &counted(&system, &user, name))).collect();
        let rows: Vec<Value> = names.iter().zip(&tasks).map(|(name, task)| system.row(name, task)).collect();
        is_over.store(true, Ordering::Relaxed);
        for (name, row) in names.iter().zip(rows) {
            let file = system.home(&user).join(format!("{name}.starts"));
            until("the process counts its start", || row["error_code"] != 0 || lines(&file) > 0);
            let started = lines(&file);
            // A launch whose launcher was killed twice in a row fails with that reason.
            let text = row["error_msg"].as_str().unwrap_or_default();
            let failed = row["error_code"] == 65535 && text.contains("the launcher did not reply");
            assert_eq!(started, usize::from(!failed), "{name}: {row}");
        }
    });
    assert!(kills.load(Ordering::Relaxed) > 3, "the launcher was hardly ever killed");
    assert_eq!(system.operate("last", 0, &counted(&system, &user, "last")), (0, "success".to_owned()));
    assert!(system.pid("last").is_some_and(is_alive));
}

#[test]
fn the_launcher_ends_with_the_agent_and_no_launch_is_repeated_or_lost() {
    const STARTS: usize = 20;
    let Some(user) = test_user() else { return };
    let mut system = System::new();
    for round in 0..4 {
        let agent = system.agent.as_ref().expect("an agent").id();
        let first = format!("first{round}");
        assert_eq!(system.operate(&first, 0, &counted(&system, &user, &first)), (0, "success".to_owned()));
        let launcher = launcher_of(agent).expect("a launcher");
        let names: Vec<String> = (0..STARTS).map(|nth| format!("p{round}-{nth}")).collect();
        let tasks: Vec<Value> =
            names.iter().map(|name| system.begin(name, 0, &counted(&system, &user, name))).collect();
        // Some have run, others are on their way.
        let starts = |name: &String| lines(&system.home(&user).join(format!("{name}.starts")));
        until("the first starts", || names.iter().map(starts).sum::<usize>() > round * 4);
        system.kill_agent();
        until("the launcher ends", || !is_alive(launcher));
        system.start_agent();
        for (name, task) in names.iter().zip(&tasks) {
            let row = system.row(name, task);
            assert_eq!(row["error_code"], 0, "{name}: {row}");
        }
        let starts = |name: &String| lines(&system.home(&user).join(format!("{name}.starts")));
        until("every process counts its start", || names.iter().all(|name| starts(name) > 0));
        for name in &names {
            assert_eq!(starts(name), 1, "{name}");
        }
    }
}

#[test]
fn no_user_reaches_the_launcher_and_its_children_begin_as_before() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let agent = system.agent.as_ref().expect("an agent").id();
    assert_eq!(launcher_of(agent), None, "an agent without processes of other users has no launcher");
    let command = "sh -c 'ls -l /proc/self/fd > fds; env > env; exec sleep 1000'";
    assert_eq!(system.operate("p", 0, &system.spec_of(&user, "p", command)), (0, "success".to_owned()));
    let launcher = launcher_of(agent).expect("a launcher");
    for signal in ["-KILL", "-STOP", "-TERM"] {
        let sent = user.command("kill").args([signal, &launcher.to_string()]).output().expect("kill");
        assert!(!sent.status.success(), "{signal}");
    }
    for file in ["environ", "maps", "mem", "fd"] {
        let read = user
            .command("ls")
            .arg(format!("/proc/{launcher}/{file}/"))
            .output()
            .expect("ls")
            .status
            .success()
            || user
                .command("cat")
                .arg(format!("/proc/{launcher}/{file}"))
                .output()
                .expect("cat")
                .status
                .success();
        assert!(!read, "the user reads {file} of the launcher");
    }
    let pid = system.pid("p").expect("a process");
    assert_eq!(parent_of(pid), Some(agent));
    let written = std::fs::read_to_string(system.home(&user).join("run/p.pid")).expect("a pid file");
    assert_eq!(written.trim(), pid.to_string());
    let read = |file: &str| std::fs::read_to_string(system.home(&user).join(file)).expect("a file");
    until("the process has written", || system.home(&user).join("env").exists() && !read("env").is_empty());
    // 0, 1, 2, and the folder that ls reads.
    assert_eq!(read("fds").lines().filter(|line| line.contains("->")).count(), 4, "{}", read("fds"));
    assert!(read("env").contains("ABIDE_INCARNATION="), "{}", read("env"));
    // A program that cannot be executed leaves no pid file of a process that never ran.
    let (code, why) = system.operate("q", 0, &system.spec_of(&user, "q", "./no-such-program"));
    assert!(code != 0 && why.contains("No such file"), "{code} {why}");
    assert!(!system.home(&user).join("run/q.pid").exists());
}
