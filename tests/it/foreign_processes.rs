//! Processes that belong to no launch of an instance, without control groups: the end of an instance never ends them, although
//! they share its session, its program, its user or the agent as parent.

use std::process::{Command, Stdio};

use serde_json::json;

use crate::process_tree::{RELOAD, START, STOP, alive, replaced};
use crate::support::{needs, needs_root, until};
use crate::system::{System, is_alive, kill};

/// Forks a successor on SIGUSR2, which writes the pid file, and stays, like nginx during an upgrade of its program.
const UPGRADING: &str = r#"
import os, signal
def write():
    with open("run/d.new", "w") as file: file.write(str(os.getpid()))
    os.rename("run/d.new", "run/d.pid")
def upgrade(*_):
    if os.fork() == 0: write()
signal.signal(signal.SIGUSR2, upgrade)
write()
while True: signal.pause()
"#;

/// A process that a user started in a session with others, and that hands over to a successor in that session.
#[test]
fn the_session_of_an_adopted_process_is_not_its_tree() {
    if !needs("python3") || !needs_root() {
        return;
    }
    for leader_lives in [true, false] {
        let system = System::with_groups(false);
        std::fs::create_dir_all(system.path("run")).expect("a folder");
        std::fs::write(system.path("upgrading.py"), UPGRADING).expect("a script");
        let wait = if leader_lives { "wait" } else { "true" };
        let script = format!("python3 upgrading.py & sleep 1000 & echo $! > other; {wait}");
        let mut terminal = Command::new("setsid");
        terminal.args(["sh", "-c", &script]).current_dir(system.folder.path());
        let mut terminal =
            crate::apply::KillOnDrop(terminal.stdin(Stdio::null()).spawn().expect("it starts"));
        let number =
            |name: &str| std::fs::read_to_string(system.path(name)).unwrap_or_default().trim().parse::<u32>();
        until("both run", || number("run/d.pid").is_ok() && number("other").is_ok());
        let (first, other) = (number("run/d.pid").expect("a pid"), number("other").expect("a pid"));
        if !leader_lives {
            terminal.0.wait().expect("it ends");
        }
        let mut spec = system.spec("d", "false");
        spec["identity"]["proc_name"] = json!("python3");
        spec["control"]["start_mode"] = json!("daemon");
        spec["control"]["reload_cmd"] =
            json!("kill -USR2 $ABIDE_PID; while [ $(cat run/d.pid) = $ABIDE_PID ]; do sleep 0.05; done");
        let (code, message) = system.operate("d", 3, &spec);
        assert_eq!((code, system.pid("d")), (0, Some(first)), "{message}");
        let (code, message) = system.operate("d", RELOAD, &spec);
        assert!(code == 0 && message.contains("the pid changed"), "{code} {message}\n{}", system.log());
        let second = system.pid("d").expect("a pid");
        assert!(second != first);
        let (code, message) = system.operate("d", STOP, &spec);
        assert_eq!(code, 0, "{message}");
        assert!(!is_alive(second));
        assert!(
            is_alive(other),
            "leader lives: {leader_lives}: another process of the session was ended: {message}"
        );
        assert!(!leader_lives || is_alive(terminal.0.id()), "the leader of the session was ended");
        [first, other].iter().for_each(|pid| kill(*pid, "KILL"));
    }
}

/// On SIGUSR1, starts a server of the same program that leaves its parent, its session and its environment. Its first argument
/// names the file for the server's pid.
const STARTER: &str = r#"
import os, signal, sys
def start(*_):
    if os.fork(): return
    os.setsid()
    if os.fork(): os._exit(0)
    code = "import os, time; open(%r, 'w').write(str(os.getpid())); time.sleep(1000)" % sys.argv[1]
    os.execve(sys.executable, [sys.executable, "-c", code], {})
signal.signal(signal.SIGUSR1, start)
open(sys.argv[1] + ".ready", "w").write(str(os.getpid()))
while True: signal.pause()
"#;

/// A daemon whose server has left everything too. It writes its pid file, or never if `delay` exists.
const DAEMON: &str = r#"
import os, sys, time
if len(sys.argv) < 2:
    if os.fork(): os._exit(0)
    os.setsid()
    if os.fork(): os._exit(0)
    os.execve(sys.executable, [sys.executable, "daemon.py", "server"], {})
open("launched", "w").write(str(os.getpid()))
if os.path.exists("delay"): time.sleep(1000)
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
    open("stray", "w").write(str(os.getpid()))
    os.execve(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)"], {})
while not os.path.exists("stray"): time.sleep(0.01)
with open("run/d.new", "w") as file: file.write(str(os.getpid()))
os.rename("run/d.new", "run/d.pid")
time.sleep(1000)
"#;

/// The agent is the parent of all orphans: of this launch, of another instance, and of a process that was its child before.
#[test]
fn orphans_of_the_same_program_and_user_are_distinguished() {
    if !needs("python3") || !needs_root() {
        return;
    }
    let mut system = System::without_agent();
    std::fs::create_dir_all(system.path("run")).expect("a folder");
    std::fs::write(system.path("starter.py"), STARTER).expect("a script");
    std::fs::write(system.path("daemon.py"), DAEMON).expect("a script");
    // As in a container: the agent replaces a shell that has started another program.
    let script = "umount -a -t cgroup2 2>/dev/null; python3 starter.py manual & exec \"$@\"";
    let join = format!("http://{}", system.server.address);
    system.start_agent_under(&join, &["unshare", "-m", "sh", "-c", script, "sh"], &[]);
    let pid = |name: &str| -> Option<u32> {
        std::fs::read_to_string(system.path(name)).unwrap_or_default().trim().parse().ok()
    };
    let started = |name: &str| {
        let _ = std::fs::remove_file(system.path(name));
        until("the starter is ready", || pid(&format!("{name}.ready")).is_some());
        kill(pid(&format!("{name}.ready")).expect("a pid"), "USR1");
        until("its server runs", || pid(name).is_some_and(is_alive));
        pid(name).expect("a pid")
    };
    let mut spec = system.spec("d", "python3 daemon.py");
    spec["identity"]["proc_name"] = json!("python3");
    spec["control"]["start_mode"] = json!("daemon");
    spec["monitor_policy"]["start_check_secs"] = json!(1);
    spec["monitor_policy"]["start_retries"] = json!(3);
    // A failed launch and, for its whole time, the servers of others.
    std::fs::write(system.path("delay"), "").expect("a file");
    let other = system.spec("other", "exec python3 starter.py by-other");
    assert_eq!(system.operate("other", START, &other).0, 0);
    let task = system.begin("d", START, &spec);
    until("the launch has begun", || pid("launched").is_some());
    let others = [started("manual"), started("by-other")];
    let row = system.row("d", &task);
    assert_eq!(row["error_code"], 836, "{row}");
    assert!(
        !is_alive(pid("launched").expect("a pid")),
        "a process of the failed launch is left\n{}",
        system.log()
    );
    assert!(
        others.iter().all(|pid| is_alive(*pid)),
        "a foreign orphan was ended: {others:?}\n{}",
        system.log()
    );
    // The only process that the agent holds dies, and its tree with it.
    assert_eq!(system.operate("other", STOP, &other).0, 0);
    std::fs::remove_file(system.path("delay")).expect("a file");
    let (code, message) = system.operate("d", START, &spec);
    assert_eq!(code, 0, "{message}");
    let (main, stray) = (system.pid("d").expect("a pid"), pid("stray").expect("a pid"));
    let manual = started("manual");
    kill(main, "KILL");
    replaced(&system, "d", main);
    assert!(!is_alive(stray), "an orphan of the launch is left\n{}", system.log());
    assert!(is_alive(manual) && is_alive(others[0]), "a foreign orphan was ended\n{}", system.log());
    assert_eq!(system.operate("d", STOP, &spec).0, 0);
    let left = alive(&system);
    assert!(left.contains(&manual) && left.contains(&others[0]), "{left:?}\n{}", system.log());
    assert!(!left.contains(&pid("stray").expect("a pid")), "{left:?}\n{}", system.log());
    left.into_iter().for_each(|pid| kill(pid, "KILL"));
}

/// The exit record of a start_cmd names a pid. After a kill of the agent another process may have that pid.
#[test]
fn a_process_with_the_pid_of_a_killed_start_shell_is_not_ended() {
    if !needs_root() {
        return;
    }
    let mut system = System::with_groups(false);
    std::fs::create_dir_all(system.path("run")).expect("a folder");
    let mut spec = system.spec("d", "setsid sleep 1000 >/dev/null 2>&1 & echo $! > run/d.pid");
    spec["identity"]["proc_name"] = json!("sleep");
    spec["control"]["start_mode"] = json!("daemon");
    system.kill_agent();
    system.start_agent_without_groups_at("command-ended");
    let task = system.begin("d", START, &spec);
    until("the agent is killed", || {
        system.agent.as_mut().is_some_and(|agent| agent.try_wait().expect("a child").is_some())
    });
    let mut other = Command::new("setsid");
    let other = other.args(["sleep", "1000"]).stdin(Stdio::null()).spawn().expect("it starts");
    let mut other = crate::apply::KillOnDrop(other);
    let records = std::fs::read_dir(system.path("agent/exits")).expect("records").flatten();
    let record = records.map(|entry| entry.path()).find(|path| path.display().to_string().contains("start-"));
    let record = record.expect("the record of start_cmd");
    std::fs::write(&record, format!("pid {}\n", other.0.id())).expect("a record");
    system.disable_control_groups();
    let row = system.row("d", &task);
    assert_eq!(row["error_code"], 0, "{row}\n{}", system.log());
    // The report of the next agent may come after the result that it found.
    until("it runs", || system.pid("d").is_some());
    let pid = system.pid("d").expect("it runs");
    let (code, message) = system.operate("d", STOP, &spec);
    assert!(code == 0 && !is_alive(pid), "{code} {message}\n{}", system.log());
    assert_eq!(other.0.try_wait().expect("a child"), None, "another process was ended: {message}");
}
