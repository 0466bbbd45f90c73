//! Process trees: real daemons with workers, on a real gateway and agent, with and without control groups.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::support::{needs, needs_root, until};
use crate::system::{System, is_alive, kill, lines, parent_of, processes};

pub const START: i64 = 0;
pub const STOP: i64 = 1;
pub const RESTART: i64 = 7;
pub const RELOAD: i64 = 8;
pub const KILL: i64 = 9;

/// Live processes in the folder of a system, except its agent.
pub fn alive(system: &System) -> Vec<u32> {
    let here = system.folder.path().to_owned();
    let agent = system.agent.as_ref().map(std::process::Child::id);
    let is_here = |pid: &u32| {
        std::fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd.starts_with(&here))
            && is_alive(*pid)
            && Some(*pid) != agent
    };
    processes().into_iter().filter(is_here).collect()
}

/// A free port below the range from which the kernel takes the ports of connections: it stays free while a server is down.
pub fn port() -> u16 {
    static NEXT: std::sync::atomic::AtomicU16 = std::sync::atomic::AtomicU16::new(0);
    let first = 20_000 + (std::process::id() % 10_000) as u16;
    loop {
        let port = first + NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if std::net::TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Waits until an instance runs as another process.
pub fn replaced(system: &System, name: &str, old: u32) -> u32 {
    let begin = Instant::now();
    loop {
        match system.pid(name) {
            Some(pid) if pid != old && is_alive(pid) => return pid,
            _ => std::thread::sleep(Duration::from_millis(5)),
        }
        assert!(begin.elapsed() < Duration::from_secs(30), "{name} is not back\n{}", system.log());
    }
}

/// The body of an answer to `GET /`; `None`: no complete answer.
pub fn get(port: u16) -> Option<String> {
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
    stream.write_all(b"GET / HTTP/1.0\r\nHost: a\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    text.split_once("\r\n\r\n").map(|(_, body)| body.to_owned())
}

/// A daemon of root with a pid file of its own.
pub fn daemon(system: &System, name: &str, program: &str, start: &str) -> Value {
    let mut spec = system.spec(name, start);
    spec["identity"]["proc_name"] = json!(program);
    spec["control"]["start_mode"] = json!("daemon");
    spec["monitor_policy"]["start_check_secs"] = json!(5);
    spec["monitor_policy"]["start_retries"] = json!(3);
    std::fs::create_dir_all(system.path("run")).expect("a folder");
    spec
}

/// Starts the agent again, with or without control groups.
pub fn restart_agent(system: &mut System, groups: bool) {
    match groups {
        true => system.start_agent(),
        false => system.disable_control_groups(),
    }
}

pub struct Nginx {
    pub port: u16,
    pub spec: Value,
    pub config: PathBuf,
}

/// An nginx with two workers, which answers with a text.
pub fn nginx(system: &System) -> Nginx {
    let (port, config) = (port(), system.path("nginx.conf"));
    // A binary upgrade executes the path that nginx was started with.
    let path = std::env::var_os("PATH").unwrap_or_default();
    let program = std::env::split_paths(&path).map(|folder| folder.join("nginx")).find(|path| path.is_file());
    let program = program.expect("nginx").display().to_string();
    let start = format!("{program} -c {} -p {}", config.display(), system.folder.path().display());
    let mut spec = daemon(system, "nginx", "nginx", &start);
    spec["control"]["reload_cmd"] = json!(format!("{start} -t && kill -HUP $ABIDE_PID"));
    let one = Nginx { port, spec, config };
    one.answer_with(system, "one");
    one
}

impl Nginx {
    pub fn answer_with(&self, system: &System, text: &str) {
        let (port, at) = (self.port, |name: &str| system.path(name).display().to_string());
        let config = format!(
            "worker_processes 2;\nuser root;\npid {};\nerror_log {} notice;\nevents {{}}\nhttp {{ access_log off; \
             client_body_temp_path {tmp}; proxy_temp_path {tmp}; fastcgi_temp_path {tmp}; uwsgi_temp_path {tmp}; \
             scgi_temp_path {tmp}; server {{ listen 127.0.0.1:{port}; location / {{ return 200 {text}; }} }} }}\n",
            at("run/nginx.pid"),
            at("error.log"),
            tmp = at("tmp"),
        );
        std::fs::write(&self.config, config).expect("a file");
    }
}

fn children(pid: u32) -> Vec<u32> {
    processes().into_iter().filter(|one| parent_of(*one) == Some(pid) && is_alive(*one)).collect()
}

#[test]
fn a_daemon_whose_master_is_killed_comes_back() {
    if !needs("nginx") || !needs_root() {
        return;
    }
    for groups in [true, false] {
        let mut system = System::with_groups(groups);
        let nginx = nginx(&system);
        assert_eq!(system.operate("nginx", START, &nginx.spec), (0, "success".to_owned()));
        for _ in 0..2 {
            let master = system.pid("nginx").expect("a pid");
            until("two workers", || children(master).len() == 2);
            let workers = children(master);
            kill(master, "KILL");
            replaced(&system, "nginx", master);
            assert!(workers.iter().all(|pid| !is_alive(*pid)), "groups: {groups}\n{}", system.log());
            until("it answers", || get(nginx.port).as_deref() == Some("one"));
        }
        // The agent is killed too: the next one ends the tree.
        let master = system.pid("nginx").expect("a pid");
        until("two workers", || children(master).len() == 2);
        let workers = children(master);
        system.kill_agent();
        kill(master, "KILL");
        restart_agent(&mut system, groups);
        replaced(&system, "nginx", master);
        assert!(workers.iter().all(|pid| !is_alive(*pid)), "groups: {groups}\n{}", system.log());
        let (code, message) = system.operate("nginx", STOP, &nginx.spec);
        assert_eq!(code, 0, "{message}");
        assert_eq!(alive(&system), [0u32; 0], "groups: {groups}");
    }
}

/// A server with workers that ignore SIGTERM, in the foreground.
const PREFORK: &str = r#"
import os, signal, socket, sys, time
ignores, port = sys.argv[1] == "stubborn", int(sys.argv[2])
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", port))
server.listen(16)
for _ in range(3):
    if os.fork() == 0:
        os.setsid() if len(sys.argv) > 3 else None
        if ignores: signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open("workers", "a") as file: file.write(f"{os.getpid()}\n")
        while True:
            peer, _ = server.accept()
            peer.recv(1000)
            peer.sendall(b"HTTP/1.0 200 OK\r\n\r\nserved")
            peer.close()
signal.pause()
"#;

fn workers(system: &System) -> Vec<u32> {
    let text = std::fs::read_to_string(system.path("workers")).unwrap_or_default();
    text.lines().filter_map(|line| line.parse().ok()).filter(|pid| is_alive(*pid)).collect()
}

#[test]
fn a_stop_ends_the_whole_tree_and_names_killed_processes() {
    if !needs("python3") || !needs_root() {
        return;
    }
    for (groups, op, kind) in [
        (true, STOP, "stubborn"),
        (false, STOP, "stubborn"),
        (true, STOP, "polite"),
        (false, STOP, "polite"),
        (true, KILL, "stubborn"),
        (false, KILL, "stubborn session"),
    ] {
        let system = System::with_groups(groups);
        std::fs::write(system.path("prefork.py"), PREFORK).expect("a script");
        let mut spec = system.spec("p", &format!("exec python3 prefork.py {} {kind}", port()));
        spec["control"]["start_cmd"] = json!(format!(
            "exec python3 prefork.py {} {} {}",
            kind.split(' ').next().expect("a word"),
            port(),
            kind.split(' ').nth(1).unwrap_or_default()
        ));
        let is_immediate = op == KILL || kind == "polite";
        spec["monitor_policy"]["stop_check_secs"] = json!(if is_immediate { 30 } else { 1 });
        assert_eq!(system.operate("p", START, &spec).0, 0);
        until("three workers", || workers(&system).len() == 3);
        let pids = workers(&system);
        let begin = Instant::now();
        let (code, message) = system.operate("p", op, &spec);
        assert_eq!(code, 0, "{message}");
        assert_eq!(alive(&system), [0u32; 0], "{groups} {op} {kind}");
        assert!(!is_immediate || begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
        match kind {
            "polite" => assert_eq!(message, "success", "{groups}"),
            _ => {
                assert!(message.contains("killed 3 "), "{groups} {op}: {message}");
                for pid in pids {
                    assert!(message.contains(&format!("{pid} (python3")), "{message}");
                }
            }
        }
    }
}

/// An adopted process has no launch: its tree is what descends from it when it is stopped.
#[test]
fn a_stop_of_an_adopted_process_ends_its_descendants() {
    if !needs("python3") || !needs_root() {
        return;
    }
    let system = System::new();
    std::fs::write(system.path("prefork.py"), PREFORK).expect("a script");
    let mut spec = daemon(&system, "p", "prefork.py", "false");
    spec["monitor_policy"]["stop_check_secs"] = json!(1);
    let start = |kind: &str| {
        let mut command = std::process::Command::new("python3");
        command.args(["prefork.py", kind, &port().to_string(), "session"]).current_dir(system.folder.path());
        crate::apply::KillOnDrop(command.spawn().expect("it starts"))
    };
    let (mut adopted, bystander) = (start("stubborn"), start("polite"));
    until("six workers", || workers(&system).len() == 6);
    std::fs::write(system.path("run/p.pid"), adopted.0.id().to_string()).expect("a file");
    let (code, message) = system.operate("p", 3, &spec);
    assert_eq!(code, 0, "{message}");
    let reaped = std::thread::spawn(move || adopted.0.wait());
    let (code, message) = system.operate("p", STOP, &spec);
    assert!(code == 0 && message.contains("killed 3 "), "{code} {message}");
    reaped.join().expect("a thread").expect("it ends");
    assert_eq!(workers(&system).len(), 3, "the workers of the other server live");
    assert!(is_alive(bystander.0.id()));
}

#[test]
fn a_prefork_server_in_the_foreground_comes_back_on_its_port() {
    if !needs("python3") || !needs_root() {
        return;
    }
    for groups in [true, false] {
        let system = System::with_groups(groups);
        std::fs::write(system.path("prefork.py"), PREFORK).expect("a script");
        let port = port();
        let spec = system.spec("p", &format!("exec python3 prefork.py polite {port} session"));
        assert_eq!(system.operate("p", START, &spec).0, 0);
        for round in 1..=2 {
            until("three workers", || workers(&system).len() == 3);
            let (old, main) = (workers(&system), system.pid("p").expect("a pid"));
            kill(main, "KILL");
            replaced(&system, "p", main);
            assert!(
                old.iter().all(|pid| !is_alive(*pid)),
                "groups: {groups}, round {round}\n{}",
                system.log()
            );
            until("it serves", || get(port).as_deref() == Some("served"));
        }
        assert_eq!(system.operate("p", STOP, &spec).0, 0);
        assert_eq!(alive(&system), [0u32; 0]);
    }
}

#[test]
fn redis_is_started_killed_restarted_and_stopped() {
    if !needs("redis-server") || !needs_root() {
        return;
    }
    let system = System::new();
    let here = system.folder.path().display().to_string();
    let start = format!(
        "redis-server --daemonize yes --port 0 --unixsocket {here}/redis.sock --pidfile {here}/run/redis.pid --dir {here} --save ''"
    );
    let spec = daemon(&system, "redis", "redis-server", &start);
    assert_eq!(system.operate("redis", START, &spec), (0, "success".to_owned()));
    let first = system.pid("redis").expect("a pid");
    kill(first, "KILL");
    let second = replaced(&system, "redis", first);
    assert_eq!(system.operate("redis", RESTART, &spec), (0, "success".to_owned()));
    assert!(!is_alive(second));
    assert_eq!(system.operate("redis", STOP, &spec), (0, "success".to_owned()));
    assert_eq!(alive(&system), [0u32; 0]);
}

pub struct Haproxy {
    pub port: u16,
    pub spec: Value,
}

pub fn haproxy(system: &System) -> Haproxy {
    let (port, config) = (port(), system.path("haproxy.cfg"));
    let text = format!(
        "defaults\n  mode http\n  timeout client 60s\n  timeout server 60s\n  timeout connect 5s\nfrontend f\n  bind \
         127.0.0.1:{port}\n  http-request return status 200 content-type text/plain string served\n"
    );
    std::fs::write(&config, text).expect("a file");
    let pid = system.path("run/haproxy.pid");
    let start = format!("haproxy -D -f {} -p {}", config.display(), pid.display());
    let mut spec = daemon(system, "haproxy", "haproxy", &start);
    spec["control"]["reload_cmd"] = json!(format!("{start} -sf $ABIDE_PID"));
    Haproxy { port, spec }
}

#[test]
fn a_reload_that_replaces_the_process_hands_over() {
    if !needs("haproxy") || !needs_root() {
        return;
    }
    for groups in [true, false] {
        let system = System::with_groups(groups);
        let haproxy = haproxy(&system);
        assert_eq!(system.operate("haproxy", START, &haproxy.spec), (0, "success".to_owned()));
        let first = system.pid("haproxy").expect("a pid");
        until("it serves", || get(haproxy.port).as_deref() == Some("served"));
        // An open connection: the old process drains until it is closed.
        let open = std::net::TcpStream::connect(("127.0.0.1", haproxy.port)).expect("a connection");
        let (code, message) = system.operate("haproxy", RELOAD, &haproxy.spec);
        assert!(code == 0 && message.contains(&first.to_string()), "{code} {message}\n{}", system.log());
        let second = system.pid("haproxy").expect("a pid");
        assert!(second != first && is_alive(second), "groups: {groups} {first} {second}");
        assert!(is_alive(first), "the old one drains");
        drop(open);
        until("it has drained", || !is_alive(first));
        assert_eq!(system.pid("haproxy"), Some(second), "no second launch");
        assert_eq!(alive(&system), [second]);
        // Another one, without a connection; then a stop with one that drains.
        let (code, _) = system.operate("haproxy", RELOAD, &haproxy.spec);
        assert_eq!(code, 0);
        let third = system.pid("haproxy").expect("a pid");
        assert!(third != second, "{third}");
        let _open = std::net::TcpStream::connect(("127.0.0.1", haproxy.port)).expect("a connection");
        assert_eq!(system.operate("haproxy", RELOAD, &haproxy.spec).0, 0);
        let (code, message) = system.operate("haproxy", STOP, &haproxy.spec);
        assert_eq!(code, 0, "{message}");
        assert_eq!(alive(&system), [0u32; 0], "groups: {groups}: {message}");
    }
}

#[test]
fn a_start_without_a_check_waits_for_the_program() {
    let system = System::new();
    // The child has its pid in the file before it runs its program.
    let start =
        "echo start >> starts; (sleep 0.1; exec sleep 1000) >/dev/null 2>&1 & echo $! > run/sleep.pid";
    let mut spec = daemon(&system, "sleep", "sleep", start);
    spec["monitor_policy"]["start_check_secs"] = json!(0);
    for _ in 0..5 {
        assert_eq!(system.operate("sleep", START, &spec), (0, "success".to_owned()), "{}", system.log());
        assert_eq!(system.operate("sleep", STOP, &spec).0, 0);
    }
    assert_eq!(lines(&system.path("starts")), 5);
    // Nothing comes: the failure does not wait for the longest time of a start.
    spec["control"]["start_cmd"] = json!("rm -f run/sleep.pid");
    let begin = Instant::now();
    assert_eq!(system.operate("sleep", START, &spec).0, 836);
    assert!(begin.elapsed() < Duration::from_millis(1900), "{:?}", begin.elapsed());
}

#[test]
fn a_script_that_waits_for_the_end_of_the_process_sees_it() {
    let system = System::new();
    let start = "sleep 1000 >/dev/null 2>&1 & echo $! > run/sleep.pid";
    let mut spec = daemon(&system, "sleep", "sleep", start);
    let wait = "kill $ABIDE_PID; while kill -0 $ABIDE_PID 2>/dev/null; do sleep 0.05; done";
    spec["control"]["stop_cmd"] = json!(wait);
    spec["control"]["restart_cmd"] = json!(format!("{wait}; {start}"));
    spec["monitor_policy"]["op_timeout"] = json!(10);
    for mode in ["daemon", "foreground"] {
        spec["control"]["start_mode"] = json!(mode);
        if mode == "foreground" {
            spec["monitor_policy"]["start_check_secs"] = json!(0);
            spec["control"]["start_cmd"] = json!("exec sleep 1000");
        }
        assert_eq!(system.operate("sleep", START, &spec), (0, "success".to_owned()));
        let begin = Instant::now();
        assert_eq!(system.operate("sleep", RESTART, &spec), (0, "success".to_owned()), "{mode}");
        assert_eq!(system.operate("sleep", STOP, &spec), (0, "success".to_owned()), "{mode}");
        assert!(begin.elapsed() < Duration::from_secs(5), "{mode}: {:?}", begin.elapsed());
    }
}

#[test]
fn corrected_commands_take_effect_without_a_restart() {
    let mut system = System::without_agent();
    system.start_agent_with(&["--check-secs", "1"], &[]);
    let system = system;
    let mut spec = system.spec("p", "exec sleep 1000");
    spec["control"]["stop_cmd"] = json!("false");
    spec["control"]["health_cmd"] = json!("echo broken; false");
    spec["monitor_policy"]["stop_check_secs"] = json!(1);
    assert_eq!(system.operate("p", START, &spec).0, 0);
    let pid = system.pid("p");
    // Within the start period a failed probe does not make it Degraded.
    until("a failed probe", || {
        system.process("p")["message"].as_str().is_some_and(|text| text.contains("broken"))
    });
    assert_eq!(system.process("p")["health"], "Starting");
    let update = |spec: &Value| {
        let body = json!({"meta": {"namespace": "web", "name": "p"},
            "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}], "spec": spec});
        let rows = system.server.gse("update_proc_info", body)["data"].clone();
        assert_eq!(rows["0:0:127.0.0.1:web:p"]["error_code"], 0, "{rows}");
    };
    spec["control"]["stop_cmd"] = json!("echo right >> stops; kill $ABIDE_PID");
    spec["control"]["health_cmd"] = json!("true");
    update(&spec);
    until("the corrected spec is in effect", || {
        system.process("p")["live_spec"]["control"]["stop_cmd"] == spec["control"]["stop_cmd"]
    });
    // While a restart is pending, the stop belongs to the program that runs.
    let mut pending = spec.clone();
    pending["control"]["start_cmd"] = json!("exec sleep 2000");
    pending["control"]["stop_cmd"] = json!("echo wrong >> stops; false");
    update(&pending);
    until("the new spec is registered", || {
        system.process("p")["spec"]["control"]["start_cmd"] == pending["control"]["start_cmd"]
    });
    assert_eq!(system.process("p")["live_spec"]["control"]["stop_cmd"], spec["control"]["stop_cmd"]);
    assert_eq!(system.pid("p"), pid);
    until("healthy by the corrected command", || system.process("p")["health"] == "Healthy");
    assert_eq!(system.operate("p", STOP, &Value::Null).0, 0);
    assert_eq!(std::fs::read_to_string(system.path("stops")).expect("a file"), "right\n");
}

/// A crash that is the first one for a long time is repaired at once, also if the process was replaced in between.
#[test]
fn a_replaced_process_that_was_up_long_ends_the_series_of_relaunches() {
    let system = System::new();
    let launch = format!("setsid sleep 1000 & echo $! > {}", system.path("run/p.pid").display());
    let mut spec = daemon(&system, "p", "sleep", &launch);
    spec["control"]["reload_cmd"] = json!(format!("{launch}; kill -9 $ABIDE_PID"));
    spec["monitor_policy"]["start_interval"] = json!(10);
    assert_eq!(system.operate("p", START, &spec).0, 0);
    let first = system.pid("p").expect("a pid");
    kill(first, "KILL");
    let second = replaced(&system, "p", first);
    let up = Instant::now();
    until("it was up for more than start_interval", || up.elapsed() > Duration::from_millis(10_500));
    assert_eq!(system.operate("p", RELOAD, &spec).0, 0);
    let third = system.pid("p").expect("a pid");
    assert!(third != second && is_alive(third), "{second} {third}");
    let crash = Instant::now();
    kill(third, "KILL");
    replaced(&system, "p", third);
    assert!(crash.elapsed() < Duration::from_secs(9), "no wait of start_interval: {:?}", crash.elapsed());
}
