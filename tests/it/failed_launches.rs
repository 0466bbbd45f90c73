//! Launches of daemons that fail or are slow, with and without control groups: a failed launch leaves no process behind, and
//! a daemon that is about to write its pid file is waited for.

use std::time::Duration;

use serde_json::{Value, json};

use crate::fixtures::wait::until_within;
use crate::process_tree::{START, STOP, alive, replaced};
use crate::support::{needs, needs_root, until};
use crate::system::{System, is_alive, kill, lines};

/// A daemon that writes its pid file after the seconds in the file `delay`. With `bare`, it keeps no variable of its
/// environment. It leaves a line in `launches`.
const LATE: &str = r#"
import os, sys, time
if "again" not in sys.argv:
    if os.fork(): os._exit(0)
    os.setsid()
    if os.fork(): os._exit(0)
if "bare" in sys.argv: os.execve(sys.executable, [sys.executable, "late.py", "again"], {})
with open("launches", "a") as file: file.write(f"{os.getpid()}\n")
time.sleep(float(open("delay").read()))
with open("run/d.new", "w") as file: file.write(str(os.getpid()))
os.rename("run/d.new", "run/d.pid")
time.sleep(1000)
"#;

fn system(groups: bool) -> System {
    let system = System::with_groups(groups);
    std::fs::create_dir_all(system.path("run")).expect("a folder");
    std::fs::write(system.path("late.py"), LATE).expect("a script");
    system
}

fn late(system: &System, how: &str, check: u32) -> Value {
    let mut spec = system.spec("d", &format!("python3 late.py {how}"));
    spec["identity"]["proc_name"] = json!("python3");
    spec["control"]["start_mode"] = json!("daemon");
    spec["monitor_policy"]["start_check_secs"] = json!(check);
    spec["monitor_policy"]["start_retries"] = json!(3);
    spec
}

fn delay(system: &System, secs: &str) {
    std::fs::write(system.path("delay"), secs).expect("a file");
}

#[test]
fn a_failed_launch_leaves_no_process_behind() {
    if !needs("python3") || !needs_root() {
        return;
    }
    for (groups, how) in [(true, ""), (false, ""), (false, "bare")] {
        let system = system(groups);
        // Another instance, whose processes have the same program.
        let other = system.spec("other", "exec python3 -c 'import time; time.sleep(1000)'");
        assert_eq!(system.operate("other", START, &other).0, 0);
        let others = alive(&system);
        let left = || alive(&system).into_iter().filter(|pid| !others.contains(pid)).collect::<Vec<_>>();
        let spec = late(&system, how, 0);
        delay(&system, "1000");
        for attempt in 1..=2 {
            let (code, message) = system.operate("d", START, &spec);
            assert_eq!(code, 836, "{groups} {how}: {message}");
            assert_eq!(left(), [0u32; 0], "{groups} {how}: attempt {attempt}\n{}", system.log());
            assert_eq!(lines(&system.path("launches")), attempt);
        }
        assert!(others.iter().all(|pid| is_alive(*pid)), "{groups} {how}: the other instance was killed");
    }
}

#[test]
fn relaunches_that_fail_never_add_up() {
    if !needs("python3") || !needs_root() {
        return;
    }
    for groups in [true, false] {
        let system = system(groups);
        let spec = late(&system, "", 0);
        delay(&system, "0");
        assert_eq!(system.operate("d", START, &spec).0, 0);
        delay(&system, "1000");
        std::fs::remove_file(system.path("run/d.pid")).expect("a pid file");
        kill(system.pid("d").expect("a pid"), "KILL");
        let mut most = 0;
        // The forks of one launch exist at the same time for a moment.
        until_within(Duration::from_secs(60), "two failed relaunches", || {
            let launches = std::fs::read_to_string(system.path("launches")).unwrap_or_default();
            let running =
                launches.lines().filter_map(|pid| pid.parse().ok()).filter(|pid| is_alive(*pid)).count();
            most = most.max(running);
            launches.lines().count() >= 3
        });
        assert_eq!(most, 1, "{groups}: processes of several launches at once\n{}", system.log());
        delay(&system, "0");
        until_within(Duration::from_secs(60), "it is back", || system.pid("d").is_some_and(is_alive));
        assert_eq!(system.operate("d", STOP, &spec).0, 0);
        assert_eq!(alive(&system), [0u32; 0], "{groups}\n{}", system.log());
    }
}

#[test]
fn a_daemon_that_is_about_to_write_its_pid_file_is_waited_for() {
    if !needs("python3") || !needs_root() {
        return;
    }
    for (groups, how) in [(true, ""), (false, ""), (false, "bare")] {
        let system = system(groups);
        let spec = late(&system, how, 0);
        delay(&system, "0.3");
        let (code, message) = system.operate("d", START, &spec);
        assert_eq!(code, 0, "{groups} {how}: {message}");
        // The pid file of the killed process stays, and names that process until the next one writes its own.
        for _ in 0..2 {
            let old = system.pid("d").expect("a pid");
            kill(old, "KILL");
            replaced(&system, "d", old);
        }
        assert_eq!(lines(&system.path("launches")), 3, "{groups} {how}\n{}", system.log());
        assert_eq!(system.operate("d", STOP, &spec).0, 0);
        until("all have ended", || alive(&system).is_empty());
    }
}
