//! Process ownership on real processes: pid files and environments of another user prove nothing, and a daemon that was
//! really launched or may be adopted is held, however it detaches itself.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::apply::KillOnDrop;
use crate::support::{TestUser, needs, needs_root, test_user, until};
use crate::system::{HOST, System, is_alive, kill};

/// A folder that belongs to a user, in a system's folder that every user may enter.
pub fn folder_of(system: &System, name: &str, uid: u32, mode: u32) -> PathBuf {
    let open = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(system.folder.path(), open).expect("a mode");
    let path = system.path(name);
    std::fs::create_dir_all(&path).expect("a folder");
    std::os::unix::fs::chown(&path, Some(uid), Some(uid)).expect("an owner");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).expect("a mode");
    path
}

/// A daemon called `sleep` of a user, with everything in a folder of his.
pub fn daemon(folder: &Path, user: &str, start: &str) -> Value {
    json!({"identity": {"proc_name": "sleep", "setup_path": folder, "user": user, "pid_path": folder.join("d.pid")},
           "control": {"start_cmd": start, "start_mode": "daemon"},
           "monitor_policy": {"auto_type": 1, "start_check_secs": 2, "start_interval": 1, "stop_check_secs": 5}})
}

fn write_pid(folder: &Path, pid: u32) {
    use std::os::unix::fs::MetadataExt;
    let owner = std::fs::metadata(folder).expect("a folder").uid();
    std::fs::write(folder.join("d.pid"), format!("{pid}\n")).expect("a pid file");
    std::os::unix::fs::chown(folder.join("d.pid"), Some(owner), None).expect("an owner");
}

/// A process that no agent knows.
fn sleeper(command: &mut Command) -> KillOnDrop {
    KillOnDrop(
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts"),
    )
}

fn sleep_of(user: &TestUser) -> KillOnDrop {
    sleeper(user.command("sleep").arg("1000"))
}

/// An operation in any namespace.
fn operate_in(system: &System, namespace: &str, name: &str, op: i64, spec: &Value) -> (i64, String) {
    let body = json!({"meta": {"namespace": namespace, "name": name}, "op_type": op, "spec": spec,
                      "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}]});
    let task = system.server.gse("operate_proc", body)["data"]["task_id"].clone();
    let mut row = Value::Null;
    until("a final row", || {
        let rows = system.server.gse("get_proc_operate_result_v2", json!({"task_id": task}));
        row = rows["data"][format!("{HOST}:{namespace}:{name}")].clone();
        row["error_code"] != 115
    });
    (row["error_code"].as_i64().expect("a code"), row["error_msg"].as_str().expect("text").to_owned())
}

fn register(system: &System, name: &str, spec: &Value) {
    let body = json!({"meta": {"namespace": "web", "name": name}, "spec": spec,
                      "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}]});
    let rows = system.server.gse("register_proc_info", body)["data"].clone();
    assert_eq!(rows[format!("0:{HOST}:web:{name}")]["error_code"], 0, "{rows}");
}

#[test]
fn a_users_pid_file_does_not_stop_roots_process() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let folder = folder_of(&system, "app", user.uid, 0o755);
    let victim = sleeper(Command::new("sleep").arg("1000"));
    // Written by the user himself, and again by his own start command.
    write_pid(&folder, victim.0.id());
    let spec = daemon(&folder, &user.name, &format!("echo {} > d.pid", victim.0.id()));
    for (op, refused) in [(1, 829), (9, 829), (7, 836), (3, 65535), (0, 836), (1, 829)] {
        let (code, message) = system.operate("d", op, &spec);
        assert_eq!(code, refused, "operation {op}: {message}");
        if op == 3 || op == 0 {
            assert!(message.contains("runs as user root, not as"), "operation {op}: {message}");
        }
    }
    assert!(is_alive(victim.0.id()), "root's process lives");
    let look = system.row("d", &system.begin("d", 2, &spec));
    assert!(!look["content"].as_str().expect("text").contains(&victim.0.id().to_string()), "{look}");
}

#[test]
fn a_pid_file_does_not_reach_another_instances_process() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let folder = folder_of(&system, "app", user.uid, 0o755);
    let theirs = folder_of(&system, "theirs", user.uid, 0o755);
    let start = "sleep 1000 >/dev/null 2>&1 & echo $! > d.pid";
    assert_eq!(operate_in(&system, "theirs", "victim", 0, &daemon(&theirs, &user.name, start)).0, 0);
    let victim: u32 =
        std::fs::read_to_string(theirs.join("d.pid")).expect("it").trim().parse().expect("a pid");
    // The same user, another namespace: by the pid file alone, and by a launch that points there.
    write_pid(&folder, victim);
    let spec = daemon(&folder, &user.name, &format!("echo {victim} > d.pid"));
    for (op, refused) in [(1, 829), (9, 829), (3, 65535), (0, 836), (1, 829)] {
        let (code, message) = system.operate("d", op, &spec);
        assert_eq!(code, refused, "operation {op}: {message}");
        if op == 3 || op == 0 {
            assert!(message.contains("held by another instance"), "{message}");
        }
    }
    assert!(is_alive(victim), "the other namespace's process lives");
    assert_eq!(operate_in(&system, "theirs", "victim", 1, &Value::Null).0, 0, "its own instance stops it");
}

#[test]
fn a_process_from_before_the_launch_is_not_its_main_process() {
    let Some(user) = test_user() else { return };
    let mut system = System::new();
    for groups in [true, false] {
        if !groups {
            system.disable_control_groups();
        }
        let folder = folder_of(&system, &format!("app-{groups}"), user.uid, 0o755);
        let other = sleep_of(&user);
        let spec = daemon(&folder, &user.name, &format!("echo {} > d.pid", other.0.id()));
        let (code, message) = system.operate("d", 0, &spec);
        assert!(code == 836 && message.contains("was not started by this launch"), "{code} {message}");
        assert_eq!(system.operate("d", 1, &spec).0, 829);
        assert!(is_alive(other.0.id()));
    }
}

#[test]
fn a_forged_environment_is_not_taken_for_roots_service() {
    let Some(user) = test_user() else { return };
    let mut system = System::new();
    system.kill_agent();
    std::fs::remove_dir_all(system.path("agent")).expect("its folder");
    let folder = folder_of(&system, "svc", 0, 0o755);
    let mut spec = daemon(&folder, "root", "true");
    spec["control"]["start_mode"] = json!("foreground");
    spec["control"]["start_cmd"] = json!("exec sleep 1000");
    register(&system, "svc", &spec);
    let forged = |command: &mut Command| {
        command.arg("1000").current_dir(&folder);
        command.env("ABIDE_INSTANCE", format!("{HOST}:web:svc")).env("ABIDE_INCARNATION", "0123456789abcdef");
        sleeper(command)
    };
    let forger = forged(&mut user.command("sleep"));
    system.start_agent();
    until("the agent reports it", || system.process("svc")["agent"] == true);
    assert_eq!((system.facts("svc"), system.pid("svc")), ((true, false, false), None));
    assert_eq!(system.operate("svc", 1, &spec).0, 829);
    assert!(is_alive(forger.0.id()));
    // The real service is found again after the folder is lost, with the forger running.
    assert_eq!(system.operate("svc", 0, &spec).0, 0);
    let real = system.pid("svc").expect("a pid");
    system.kill_agent();
    std::fs::remove_dir_all(system.path("agent")).expect("its folder");
    system.start_agent();
    until("the real one is found", || {
        system.pid("svc") == Some(real) && system.process("svc")["agent"] == true
    });
    assert_eq!(system.operate("svc", 1, &spec).0, 0);
    assert!(is_alive(forger.0.id()) && !is_alive(real));
}

#[test]
fn an_unowned_process_is_reported_and_untouched_until_adopted() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let folder = folder_of(&system, "app", user.uid, 0o755);
    let mut stranger = sleep_of(&user);
    let pid = stranger.0.id();
    write_pid(&folder, pid);
    let spec = daemon(&folder, &user.name, "echo started >> effects; sleep 1000 & echo $! > d.pid");
    let (code, message) = system.operate("d", 0, &spec);
    assert!(
        code == 828 && message.contains("did not start it") && message.contains("--adopt"),
        "{code} {message}"
    );
    assert!(system.process("d").is_null(), "nothing is recorded: {}", system.process("d"));
    for (op, refused) in [(1, 829), (9, 829), (7, 828), (8, 829)] {
        let (code, message) = system.operate("d", op, &spec);
        assert!(code == refused && message.contains("did not start it"), "operation {op}: {code} {message}");
    }
    let look = system.row("d", &system.begin("d", 2, &spec));
    let look: Value = serde_json::from_str(look["content"].as_str().expect("text")).expect("JSON");
    let seen = &look["process"][0]["instance"][0];
    assert_eq!(
        (&seen["pid"], &seen["notOwned"], &seen["isAuto"]),
        (&json!(pid), &json!(true), &json!(false))
    );
    // Registering it changes nothing; hosting it names it explicitly.
    register(&system, "d", &spec);
    assert_eq!(system.facts("d"), (true, false, false));
    assert_eq!(system.operate("d", 3, &spec), (0, "success".to_owned()));
    until("it is ours", || system.facts("d") == (true, true, true) && system.pid("d") == Some(pid));
    assert!(!folder.join("effects").exists() && is_alive(pid));
    let task = system.begin("d", 1, &spec);
    stranger.0.wait().expect("it ends");
    assert_eq!(system.row("d", &task)["error_code"], 0);
}

#[test]
fn adoption_needs_a_pid_file_that_only_its_user_can_write() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let process = sleep_of(&user);
    let nobody = 65534;
    for (name, owner, mode, file_owner, file_mode, says) in [
        ("world", user.uid, 0o777, user.uid, 0o644, "world is writable by every user"),
        ("sticky", user.uid, 0o1777, user.uid, 0o644, "sticky is writable by every user"),
        ("other", nobody, 0o755, user.uid, 0o644, "other belongs to user nobody"),
        ("file", user.uid, 0o755, user.uid, 0o666, "d.pid is writable by every user"),
        ("owner", user.uid, 0o755, nobody, 0o644, "d.pid belongs to user nobody"),
        ("good", user.uid, 0o755, user.uid, 0o644, ""),
    ] {
        let folder = folder_of(&system, name, owner, mode);
        let file = folder.join("d.pid");
        write_pid(&folder, process.0.id());
        std::os::unix::fs::chown(&file, Some(file_owner), None).expect("an owner");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(file_mode)).expect("a mode");
        let (code, message) = system.operate(name, 3, &daemon(&folder, &user.name, "true"));
        match says.is_empty() {
            true => assert_eq!(code, 0, "{name}: {message}"),
            // A pid file that is handed over would prove what its former owner wrote.
            false => assert!(
                code == 65535 && message.contains(says) && !message.contains("chown"),
                "{name}: {code} {message}"
            ),
        }
        assert_eq!(system.pid(name), says.is_empty().then(|| process.0.id()), "{name}");
    }
}

/// Forks twice, leaves its session, clears its environment, drops its privileges on request, and becomes `sleep`.
const DETACH: &str = r#"use POSIX qw(setsid dup2); fork and exit; setsid; fork and exit;
    open(my $f, ">", "d.pid"); print $f "$$\n"; close $f;
    open(STDIN, "</dev/null"); open(STDOUT, ">/dev/null"); open(STDERR, ">/dev/null");
    if (my $uid = shift) { $( = $) = $uid; $< = $> = $uid; }
    %ENV = (); exec "/bin/sleep", "1000";"#;

#[test]
fn a_daemon_that_detaches_itself_completely_is_still_its_launchs() {
    let Some(user) = test_user() else { return };
    let mut system = System::new();
    for groups in [true, false] {
        if !groups {
            system.disable_control_groups();
        }
        for (name, account, drops) in
            [("own", user.name.as_str(), String::new()), ("root", "root", user.uid.to_string())]
        {
            let uid = if account == "root" { 0 } else { user.uid };
            let folder = folder_of(&system, &format!("{name}-{groups}"), uid, 0o755);
            std::fs::write(folder.join("detach.pl"), DETACH).expect("a script");
            let spec = daemon(&folder, account, &format!("perl detach.pl {drops}"));
            let name = format!("{name}-{groups}");
            assert_eq!(system.operate(&name, 0, &spec), (0, "success".to_owned()), "{name}");
            let pid = system.pid(&name).expect("a pid");
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
            assert!(status.contains(&format!("Uid:\t{}", user.uid)), "{name}: {status}");
            assert_eq!(std::fs::read(format!("/proc/{pid}/environ")).expect("it runs"), b"", "{name}");
            kill(pid, "KILL");
            until("it is back", || system.pid(&name).is_some_and(|new| new != pid && is_alive(new)));
            assert_eq!(system.operate(&name, 1, &spec).0, 0, "{name}");
        }
    }
}

#[test]
fn restart_cmd_may_replace_the_process_itself_or_have_it_fork_its_successor() {
    if !needs_root() {
        return;
    }
    let mut system = System::new();
    for groups in [true, false] {
        if !groups {
            system.disable_control_groups();
        }
        let folder = folder_of(&system, &format!("r-{groups}"), 0, 0o755);
        // Forks a successor on USR2, which writes the pid file, and ends.
        let forking = r#"$SIG{USR2} = sub { if (fork) { exit } write_pid() };
            sub write_pid { open(my $f, ">", "d.pid"); print $f "$$\n"; close $f }
            fork and exit; write_pid(); $0 = "sleep"; sleep 1 while 1;"#;
        std::fs::write(folder.join("fork.pl"), forking).expect("a script");
        let start = "sleep 1000 >/dev/null 2>&1 & echo $! > d.pid";
        for (name, start, restart) in [
            ("replaced", start, format!("kill $ABIDE_PID; {start}")),
            ("forked", "perl fork.pl >/dev/null 2>&1", "kill -USR2 $ABIDE_PID".to_owned()),
        ] {
            let mut spec = daemon(&folder, "root", start);
            spec["control"]["restart_cmd"] = json!(restart);
            spec["identity"]["value_key"] = json!(name);
            assert_eq!(system.operate(name, 0, &spec), (0, "success".to_owned()), "{name} {groups}");
            let before = system.pid(name).expect("a pid");
            assert_eq!(system.operate(name, 7, &spec), (0, "success".to_owned()), "{name} {groups}");
            let after = system.pid(name).expect("a pid");
            assert!(after != before && is_alive(after), "{name} {groups}");
            // A restart that points to a process of before is refused, and that process is not held.
            let other = sleeper(Command::new("sleep").arg("1000"));
            spec["control"]["restart_cmd"] = json!(format!("echo {} > d.pid", other.0.id()));
            let (code, message) = system.operate(name, 7, &spec);
            assert!(code == 836 && message.contains("not started by this launch"), "{code} {message}");
            assert_eq!((system.pid(name), system.operate(name, 1, &spec).0), (Some(after), 0));
            assert!(is_alive(other.0.id()) && !is_alive(after));
        }
    }
}

#[test]
fn common_daemons_are_supervised_after_a_launch_by_root() {
    let Some(user) = test_user() else { return };
    if !needs("nginx") || !needs("redis-server") {
        return;
    }
    let system = System::new();
    let folder = folder_of(&system, "daemons", 0, 0o755);
    let at = |name: &str| folder.join(name).display().to_string();
    let config = format!(
        "user {0} {0};\npid {1};\nerror_log {2};\nevents {{}}\nhttp {{ access_log off; server {{ listen unix:{3}; }} }}\n",
        user.name,
        at("nginx.pid"),
        at("error.log"),
        at("nginx.sock")
    );
    std::fs::write(folder.join("nginx.conf"), config).expect("a file");
    let redis = format!(
        "redis-server --daemonize yes --port 0 --unixsocket {} --pidfile {} --dir {} --save ''",
        at("redis.sock"),
        at("redis-server.pid"),
        folder.display()
    );
    for (name, start) in [("nginx", format!("nginx -c {}", at("nginx.conf"))), ("redis-server", redis)] {
        let mut spec = daemon(&folder, "root", &start);
        spec["identity"]["proc_name"] = json!(name);
        spec["identity"]["pid_path"] = json!(at(&format!("{name}.pid")));
        spec["monitor_policy"]["start_check_secs"] = json!(5);
        assert_eq!(system.operate(name, 0, &spec), (0, "success".to_owned()), "{name}");
        assert!(system.pid(name).is_some_and(is_alive), "{name}");
        assert_eq!(system.operate(name, 1, &spec).0, 0, "{name}");
    }
}

#[test]
fn a_renamed_process_is_found_again_after_the_folder_is_lost() {
    let Some(user) = test_user() else { return };
    let mut system = System::new();
    let folder = folder_of(&system, "app", user.uid, 0o755);
    let mut spec = daemon(&folder, &user.name, "exec sleep 1000");
    spec["control"]["start_mode"] = json!("foreground");
    assert_eq!(system.operate("old", 0, &spec).0, 0);
    let pid = system.pid("old").expect("a pid");
    let (from, to) = (format!("{HOST}:web:old"), format!("{HOST}:web:new"));
    let answer = system.server.call("POST", "/api/abide/v1/rename", json!({"from": from, "to": to}));
    assert_eq!(system.row("new", &answer["data"]["task_id"])["error_code"], 0);
    until("it has its new name", || system.pid("new") == Some(pid));
    system.kill_agent();
    std::fs::remove_dir_all(system.path("agent")).expect("its folder");
    // Another process of this user claims the same old name; the pid file does not name it.
    let mut other = user.command("sleep");
    other.arg("1000").current_dir(&folder).env("ABIDE_INSTANCE", &from).env("ABIDE_INCARNATION", "0123");
    let other = sleeper(&mut other);
    system.start_agent();
    until("it is found", || system.pid("new") == Some(pid) && system.facts("new") == (true, false, true));
    assert_eq!(system.operate("new", 0, &spec).0, 828, "nothing is started next to it");
    assert_eq!(system.operate("new", 1, &spec).0, 0);
    assert!(!is_alive(pid) && is_alive(other.0.id()));
}

#[test]
fn nothing_is_started_or_adopted_while_the_pid_file_cannot_be_read() {
    let Some(user) = test_user() else { return };
    let system = System::new();
    let folder = folder_of(&system, "app", user.uid, 0o755);
    let running = sleep_of(&user);
    write_pid(&folder, running.0.id());
    // The user cannot read it, so it is not known whether a process runs.
    let file = folder.join("d.pid");
    std::os::unix::fs::chown(&file, Some(0), Some(0)).expect("an owner");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).expect("a mode");
    let spec =
        daemon(&folder, &user.name, "echo started >> effects; rm -f d.pid; sleep 1000 & echo $! > d.pid");
    for op in [0, 3, 2, 7] {
        let (code, message) = system.operate("d", op, &spec);
        assert!(
            code == 65535 && message.contains("cannot determine whether"),
            "operation {op}: {code} {message}"
        );
        assert!(message.contains("cannot read pid_path"), "operation {op}: {message}");
    }
    assert!(!folder.join("effects").exists() && is_alive(running.0.id()));
    // A file that does not exist names no process.
    std::fs::remove_file(&file).expect("a file");
    assert_eq!(system.operate("d", 0, &spec), (0, "success".to_owned()));
    assert_eq!(system.operate("d", 1, &spec).0, 0);
}
