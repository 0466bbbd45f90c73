//! Processes of an unprivileged user against the agent of root, and users that the host no longer knows.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};

use serde_json::json;

use crate::support::{TestUser, needs, test_user};
use crate::system::System;

const START: i64 = 0;
const STOP: i64 = 1;
const LIVE_STATUS: i64 = 2;

/// Declares a mapping without content as environment or arguments of the process (PR_SET_MM_MAP): reading it costs the
/// reader that many MiB, and the process none.
const DECLARE: &str = r#"
import ctypes, struct, sys, time
size, what = int(sys.argv[1]) << 20, sys.argv[2]
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
at = libc.mmap(None, size, 3, 0x4022, -1, 0)
fields = open("/proc/self/stat").read().rsplit(") ", 1)[1].split()
field = lambda number: int(fields[number - 3])
words = dict(start_code=field(26), end_code=field(27), start_data=field(45), end_data=field(46), start_brk=field(47),
    brk=libc.sbrk(0), start_stack=field(28), arg_start=field(48), arg_end=field(49), env_start=field(50), env_end=field(51))
words[what + "_start"], words[what + "_end"] = at, at + size
layout = struct.pack("11QQIi", *words.values(), 0, 0, -1)
buffer = ctypes.create_string_buffer(layout, len(layout))
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
print(libc.prctl(35, 14, ctypes.addressof(buffer), len(layout), 0), flush=True)
time.sleep(600)
"#;

/// MiB that a hostile process declares, and the peak memory of an agent that does not read them.
const DECLARED: u64 = 400;
const MAX_PEAK_KIB: u64 = 150 << 10;

/// A hostile process; dropping it ends it.
struct Hostile(Child);

impl Hostile {
    fn start(system: &System, user: &TestUser) -> Hostile {
        let script = system.home(user).join("declare.py");
        std::fs::write(&script, DECLARE).expect("a script");
        let mut command = user.command("/usr/bin/python3");
        command.arg(&script).args([&DECLARED.to_string(), "env"]).current_dir("/");
        let mut child = command.stdout(Stdio::piped()).spawn().expect("it starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        assert_eq!(line.trim(), "0", "the kernel takes the new layout");
        Hostile(child)
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Peak memory of the agent in KiB.
fn peak(system: &System) -> u64 {
    let pid = system.agent.as_ref().expect("an agent").id();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("the agent runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

#[test]
fn a_huge_declared_environment_costs_the_agent_no_memory() {
    let Some(user) = test_user() else { return };
    if !needs("python3") {
        return;
    }
    let mut system = System::without_agent();
    let _hostile = Hostile::start(&system, &user);
    // An agent without a store searches all processes for those of an earlier agent.
    system.disable_control_groups();
    assert!(peak(&system) < MAX_PEAK_KIB, "{} KiB at start-up", peak(&system));
    // A stop, as root and as the user of the hostile process, searches all processes for the tree.
    for spec in [system.spec("one", "exec sleep 600"), system.spec_of(&user, "two", "exec sleep 600")] {
        let name = spec["identity"]["value_key"].as_str().expect("a name").to_owned();
        assert_eq!(system.operate(&name, START, &spec), (0, "success".to_owned()));
        let (code, message) = system.operate(&name, STOP, &spec);
        assert_eq!(code, 0, "{message}");
        assert!(peak(&system) < MAX_PEAK_KIB, "{} KiB after the stop of {name}", peak(&system));
    }
}

#[test]
fn huge_declared_arguments_cost_the_agent_no_memory() {
    let Some(user) = test_user() else { return };
    if !needs("python3") {
        return;
    }
    let system = System::new();
    std::fs::write(system.home(&user).join("declare.py"), DECLARE).expect("a script");
    for (name, declared) in [("huge", DECLARED), ("large", 7)] {
        let start = format!("exec /usr/bin/python3 declare.py {declared} arg");
        let mut spec = system.spec_of(&user, name, &start);
        spec["identity"]["proc_name"] = json!("python3");
        assert_eq!(system.operate(name, START, &spec), (0, "success".to_owned()));
        let log = system.home(&user).join(format!("log/{name}.log"));
        crate::support::until("the new layout", || {
            std::fs::read_to_string(&log).is_ok_and(|text| text == "0\n")
        });
        let (code, content) = system.operate(name, LIVE_STATUS, &spec);
        assert_eq!(code, 0, "{content}");
        assert!(content.len() < 200 << 10, "{} bytes of live status", content.len());
        assert!(peak(&system) < MAX_PEAK_KIB, "{} KiB after a live status check", peak(&system));
        assert_eq!(system.operate(name, STOP, &spec).0, 0);
        assert!(peak(&system) < MAX_PEAK_KIB, "{} KiB after a stop", peak(&system));
    }
}

/// An agent with a user database of its own, and without control groups.
fn start_with_users(system: &mut System, users: &std::path::Path) {
    let url = format!("http://{}", system.server.address);
    let mount = format!(
        "umount -a -t cgroup2 2>/dev/null; mount --bind {} /etc/passwd && exec \"$@\"",
        users.display()
    );
    system.start_agent_under(&url, &["unshare", "-m", "sh", "-c", &mount, "sh"], &[]);
}

/// A user in a list of users of its own: the user, the file of the list, and its content without the user.
fn ghost(system: &System, uid: u32) -> (TestUser, std::path::PathBuf, Vec<u8>) {
    use std::os::unix::fs::PermissionsExt;
    let known = std::fs::read("/etc/passwd").expect("users");
    let users = system.path("passwd");
    let with = [&known[..], format!("ghost:x:{uid}:{uid}::/:/bin/sh\n").as_bytes()].concat();
    std::fs::write(&users, &with).expect("a file");
    std::fs::set_permissions(&users, std::fs::Permissions::from_mode(0o644)).expect("a mode");
    (TestUser { name: "ghost".to_owned(), uid, gid: uid }, users, known)
}

#[test]
fn the_tree_of_a_user_that_is_no_longer_known_is_ended() {
    use std::os::unix::fs::chown;
    if !crate::support::needs_root() {
        return;
    }
    let mut system = System::without_agent();
    let (user, users, known) = ghost(&system, 54_321);
    let home = system.home(&user);
    start_with_users(&mut system, &users);
    let start = |name: &str| format!("sleep 600 & echo $! > {name}.worker; exec sleep 600");
    let specs = ["killed", "stopped"].map(|name| (name, system.spec_of(&user, name, &start(name))));
    for (name, spec) in &specs {
        assert_eq!(system.operate(name, START, spec), (0, "success".to_owned()));
    }
    let worker = |name: &str| -> u32 {
        let text = std::fs::read_to_string(home.join(format!("{name}.worker"))).expect("a pid");
        text.trim().parse().expect("a pid")
    };
    let (of_killed, of_stopped) = (worker("killed"), worker("stopped"));
    // In place: the file is mounted.
    std::fs::write(&users, &known).expect("a file");
    let other = system.spec_of(&user, "other", "exec sleep 600");
    crate::support::until("the user is unknown", || system.operate("other", START, &other).0 != 0);
    crate::system::kill(system.pid("killed").expect("a pid"), "KILL");
    crate::support::until("the rest of the tree ends", || !crate::system::is_alive(of_killed));
    let (code, message) = system.operate("stopped", STOP, &serde_json::Value::Null);
    assert_eq!(code, 0, "{message}");
    assert!(!crate::system::is_alive(of_stopped), "{message}");
    let _ = chown(&home, Some(0), Some(0));
}

/// The commands of an earlier agent are ended by the uid of their launch: the account may be gone.
#[test]
fn the_probe_of_a_user_that_is_no_longer_known_is_ended() {
    use std::os::unix::fs::chown;
    if !crate::support::needs_root() {
        return;
    }
    let mut system = System::without_agent();
    let (user, users, known) = ghost(&system, 54_322);
    let home = system.home(&user);
    start_with_users(&mut system, &users);
    let mut spec = system.spec_of(&user, "p", "exec sleep 600");
    let probe = "setsid sleep 600 & echo $! > left; sleep 600";
    spec["health"] = serde_json::json!({"cmd": probe, "interval": 3600, "timeout": 600});
    assert_eq!(system.operate("p", START, &spec), (0, "success".to_owned()));
    let left = || std::fs::read_to_string(home.join("left")).ok()?.trim().parse::<u32>().ok();
    crate::support::until("the probe runs", || left().is_some_and(crate::system::is_alive));
    let (left, main) = (left().expect("a pid"), system.pid("p").expect("a pid"));
    system.kill_agent();
    assert!(crate::system::is_alive(left), "it outlives the agent");
    std::fs::write(&users, &known).expect("a file");
    start_with_users(&mut system, &users);
    crate::support::until("the probe is ended", || !crate::system::is_alive(left));
    assert!(crate::system::is_alive(main), "the process stays");
    let _ = chown(&home, Some(0), Some(0));
}
