//! Launches: no user delays the starts of another, and a queued launch holds no open files.

use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{TestUser, command, test_user, until};
use crate::system::{System, is_alive, kill, parent_of, processes};

/// From <fcntl.h>.
const F_SETSIG: i32 = 10;

/// A lease on a file: an execve of it waits until the lease is given back, for 45 s by default.
struct Lease(std::fs::File);

impl Lease {
    fn take(path: &Path) -> Lease {
        let file = std::fs::File::open(path).expect("a file");
        // The holder is signalled; this signal is ignored by default.
        // SAFETY: only flags of a descriptor that is ours are set.
        let taken = || unsafe {
            libc::fcntl(file.as_raw_fd(), F_SETSIG, libc::SIGURG);
            libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) == 0
        };
        // A process that another test is just launching may have a copy of the descriptor that wrote the file.
        until("a lease", taken);
        Lease(file)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { libc::fcntl(self.0.as_raw_fd(), libc::F_SETLEASE, libc::F_UNLCK) };
    }
}

/// Launches of a user that cannot reach their program: leased, and stopped by the user.
fn stuck_launches(system: &System, user: &TestUser, count: usize) -> (Lease, Vec<(String, Value)>) {
    let program = system.home(user).join("leased");
    std::fs::copy("/bin/sleep", &program).expect("a program");
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("a mode");
    chown(&program, Some(user.uid), Some(user.gid)).expect("another owner");
    let lease = Lease::take(&program);
    let agent = system.agent.as_ref().expect("an agent").id();
    let names: Vec<String> = (0..count).map(|nth| format!("stuck{nth}")).collect();
    let begin =
        |name: &String| (name.clone(), system.begin(name, 0, &system.spec_of(user, name, "./leased 1000")));
    let tasks = names.iter().map(begin).collect();
    let of_user = |pid: &u32| {
        parent_of(*pid) == Some(agent)
            && std::fs::metadata(format!("/proc/{pid}")).is_ok()
            && std::fs::read_to_string(format!("/proc/{pid}/status"))
                .is_ok_and(|status| status.contains(&format!("\nUid:\t{}\t", user.uid)))
    };
    until("eight launches wait", || processes().iter().filter(|pid| of_user(pid)).count() >= 8);
    for pid in processes().into_iter().filter(|pid| of_user(pid)) {
        let stopped = user.command("kill").args(["-STOP", &pid.to_string()]).status().expect("kill");
        assert!(stopped.success(), "the user stops his own process");
    }
    (lease, tasks)
}

#[test]
fn stuck_launches_of_one_user_do_not_block_others() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let (lease, tasks) = stuck_launches(&system, &user, 10);
    for (name, spec) in [
        ("root", system.spec("root", "sleep 1000")),
        ("shell", system.spec("shell", "echo hello; sleep 1000")),
    ] {
        let begin = Instant::now();
        assert_eq!(system.operate(name, 0, &spec), (0, "success".to_owned()));
        assert!(begin.elapsed() < Duration::from_secs(5), "{name}: {:?}", begin.elapsed());
    }
    let mut nobody = system.spec("other", "sleep 1000");
    let other = system.path("other");
    std::fs::create_dir(&other).expect("a folder");
    chown(&other, Some(65534), None).expect("another owner");
    nobody["identity"]["user"] = json!("nobody");
    nobody["identity"]["setup_path"] = json!(other);
    nobody["identity"]["pid_path"] = json!(other.join("pid"));
    nobody["identity"]["log_path"] = json!(other.join("log"));
    let begin = Instant::now();
    assert_eq!(system.operate("other", 0, &nobody), (0, "success".to_owned()));
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    // The stuck ones end with a reason, and leave nothing behind; those that waited for them have their turn.
    let row = system.row(&tasks[0].0, &tasks[0].1);
    let message = row["error_msg"].as_str().unwrap_or_default();
    assert!(
        message.contains("did not reach its program within 10 s") && message.contains(&user.name),
        "{row}"
    );
    drop(lease);
    for (name, task) in &tasks {
        let row = system.row(name, task);
        assert!(row["error_code"] == 65535 || row["error_code"] == 0, "{name}: {row}");
    }
    let temporary = std::fs::read_dir(system.home(&user).join("run")).expect("a folder").flatten();
    assert!(temporary.map(|entry| entry.file_name()).all(|name| !name.to_string_lossy().starts_with('.')));
}

/// Before `execve` such a process has its user and shares the memory of the launcher.
#[test]
fn a_user_reaches_no_memory_of_a_process_that_is_being_launched() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let agent = system.agent.as_ref().expect("an agent").id();
    let (lease, tasks) = stuck_launches(&system, &user, 8);
    let uid = format!("\nUid:\t{}\t", user.uid);
    let is_launched = |pid: &u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        parent_of(*pid) == Some(agent) && status.contains(&uid)
    };
    let pids: Vec<u32> = processes().into_iter().filter(is_launched).collect();
    assert!(pids.len() >= 8, "{pids:?}");
    for pid in pids {
        for attack in [
            format!("cat /proc/{pid}/environ"),
            format!("cat /proc/{pid}/maps"),
            format!("dd if=/proc/{pid}/mem bs=1 count=1 skip=4194304"),
            format!("ls /proc/{pid}/fd/"),
            format!("echo 5 > /proc/{pid}/oom_score_adj"),
            // PTRACE_ATTACH and PTRACE_SEIZE.
            format!("perl -e 'exit(syscall(101, 16, {pid}, 0, 0) != 0)'"),
            format!("perl -e 'exit(syscall(101, 16902, {pid}, 0, 0) != 0)'"),
        ] {
            let done = user.command("sh").args(["-c", &attack]).output().expect("sh");
            assert!(!done.status.success(), "{attack}: {done:?}");
        }
    }
    drop(lease);
    for (name, task) in &tasks {
        let row = system.row(name, task);
        assert!(row["error_code"] == 65535 || row["error_code"] == 0, "{name}: {row}");
    }
}

#[test]
fn an_agent_with_stuck_launches_stops_on_sigterm() {
    let Some(user) = test_user() else { return };
    let mut system = System::new();
    let (lease, _tasks) = stuck_launches(&system, &user, 8);
    let mut agent = system.agent.take().expect("an agent");
    let begin = Instant::now();
    kill(agent.id(), "TERM");
    let mut ended = None;
    until("it ends", || {
        ended = agent.try_wait().expect("it is ours");
        ended.is_some()
    });
    assert_eq!(ended.and_then(|status| status.code()), Some(0));
    assert!(begin.elapsed() < Duration::from_secs(8), "{:?}", begin.elapsed());
    let mark = system.folder.path().display().to_string();
    drop(lease);
    // Processes that were stopped on their way are the test's to end.
    for pid in processes() {
        let cwd = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
        if cwd.starts_with(&mark) {
            kill(pid, "KILL");
        }
    }
}

/// Each queued start had its log, its exit file and its control group open.
#[test]
fn queued_starts_hold_no_descriptors() {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let system = System::new();
    let agent = system.agent.as_ref().expect("an agent").id();
    let open = std::fs::read_dir(format!("/proc/{agent}/fd")).expect("a process").count() as u64;
    // A process that runs is held by one descriptor; beyond that, there is room for a few launches.
    let many = 600;
    let limit = Some(open + many + 150);
    let limit = Rlimit { current: limit, maximum: limit };
    prlimit(Pid::from_raw(agent as i32), Resource::Nofile, limit).expect("a limit");
    let item = |nth: u64| {
        let name = format!("q{nth}");
        let mut spec = system.spec(&name, "true");
        spec["monitor_policy"]["auto_type"] = json!(2);
        json!({"meta": {"namespace": "web", "name": name}, "op_type": 0, "spec": spec,
               "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0, "bk_supplier_id": 0}]})
    };
    let items: Vec<Value> = (0..many).map(item).collect();
    let answer = system.server.gse("operate_proc_multi", json!({"proc_operate_req": items}));
    let task = answer["data"]["task_id"].clone();
    let mut rows = Value::Null;
    until("all are started", || {
        rows = system.server.gse("get_proc_operate_result_v2", json!({"task_id": task}))["data"].clone();
        rows.as_object().is_some_and(|rows| rows.values().all(|row| row["error_code"] != 115))
    });
    for (name, row) in rows.as_object().expect("rows") {
        assert_eq!(row["error_code"], 0, "{name}: {row}");
    }
}

/// A daemon whose descriptor 1 is what the command makes of it.
fn daemon(system: &System, user: &TestUser, name: &str, start: &str) -> Value {
    let mut spec = system.spec_of(user, name, start);
    let run = system.home(user).join("run");
    std::fs::create_dir_all(&run).expect("a folder");
    chown(&run, Some(user.uid), Some(user.gid)).expect("another owner");
    spec["identity"]["proc_name"] = json!("sleep");
    spec["control"]["start_mode"] = json!("daemon");
    spec["monitor_policy"]["start_check_secs"] = json!(5);
    spec
}

/// Starts the agent, and fails instead of waiting for one that hangs.
fn start_within(system: &mut System, time: Duration) {
    let url = format!("http://{}", system.server.address);
    let args = ["agent", "--join", &url, "--token-file", "token", "--data", "agent"];
    let mut child = command(&args, system.folder.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
    system.agent = Some(child);
    let (send, ready) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let _ = out.read_line(&mut line);
        let _ = send.send(line);
    });
    let line = ready.recv_timeout(time).expect("the agent hangs at its start");
    assert!(line.starts_with("ready "), "{line}");
}

#[test]
fn captured_output_is_not_reopened_by_name() {
    let Some(user) = test_user() else { return };
    let mut system = System::new();
    let home = system.home(&user);
    // A file of root that the user can only read, opened as descriptor 1.
    let victim = system.path("abide-output-of-root");
    std::fs::write(&victim, "of root\n").expect("a file");
    let start = format!("sleep 1000 1<{} 2>/dev/null & echo $! > run/victim.pid", victim.display());
    let named = daemon(&system, &user, "victim", &start);
    assert_eq!(system.operate("victim", 0, &named), (0, "success".to_owned()));
    // A FIFO that waits for a reader.
    let fifo = home.join("abide-output");
    let start = format!(
        "mkfifo {0}; exec 3<>{0} 4>{0}; sleep 1000 3>&- 1>&4 4>&- 2>/dev/null & echo $! > run/fifo.pid",
        fifo.display()
    );
    let spec = daemon(&system, &user, "fifo", &start);
    assert_eq!(system.operate("fifo", 0, &spec), (0, "success".to_owned()));
    // And one that kept its starter's output.
    let kept =
        daemon(&system, &user, "kept", "head -c 100000 /dev/zero; sleep 1000 & echo $! > run/kept.pid");
    assert_eq!(system.operate("kept", 0, &kept), (0, "success".to_owned()));
    let pids = ["victim", "fifo", "kept"].map(|name| system.pid(name).expect("a pid"));
    system.kill_agent();
    let output =
        std::fs::File::options().write(true).open(format!("/proc/{}/fd/1", pids[2])).expect("memory");
    output.write_all_at(b"more", 200_000).expect("it grows");
    start_within(&mut system, Duration::from_secs(20));
    assert_eq!(["victim", "fifo", "kept"].map(|name| system.pid(name).expect("a pid")), pids);
    // What is forgotten of the one is forgotten of none of the others.
    until("the kept output is given back", || output.metadata().expect("memory").blocks() == 0);
    assert_eq!(std::fs::read_to_string(&victim).expect("a file"), "of root\n");
    assert!(pids.into_iter().all(is_alive));
}

#[test]
fn a_spec_cannot_set_the_agents_own_variables() {
    let system = System::new();
    let mut spec = system.spec("app", "exec sleep 1000");
    spec["env"] = json!({"ABIDE_INSTANCE": "forged", "ABIDE_INCARNATION": "forged", "ABIDE_RECORD": "forged",
                         "ABIDE_HOME": "/srv", "PATH": "/bin:/usr/bin"});
    assert_eq!(system.operate("app", 0, &spec), (0, "success".to_owned()));
    let pid = system.pid("app").expect("a pid");
    let bytes = std::fs::read(format!("/proc/{pid}/environ")).expect("it runs");
    let text = String::from_utf8(bytes).expect("text");
    assert!(!text.contains("forged"), "{text}");
    let values = |name: &str| text.split('\0').filter(|one| one.starts_with(name)).collect::<Vec<_>>();
    assert_eq!(values("ABIDE_INSTANCE="), ["ABIDE_INSTANCE=0:127.0.0.1:web:app"]);
    assert_eq!((values("ABIDE_INCARNATION=").len(), values("ABIDE_HOME=")), (1, vec!["ABIDE_HOME=/srv"]));
    assert_eq!(values("PATH="), ["PATH=/bin:/usr/bin"], "one value per name");
    assert!(system.log().contains("spec variable ignored"), "{}", system.log());
    assert_eq!(system.operate("app", 1, &spec).0, 0);
}
