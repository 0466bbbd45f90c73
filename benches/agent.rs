//! Agent benchmark: a thousand processes under one agent, over loopback and durably, compared with the same command
//! lines spawned directly.
//!
//! `cargo bench --bench agent` prints one JSON object: how long `operate_proc_multi` takes from the call until the last
//! process runs, and plain spawning in the same run; from a process's death to its next pid; the agent's memory and its
//! processor time when nothing happens; how long taking up all of them takes after `kill -9`; and stopping them all.
//!
//! `ABIDE_BENCH_PROGRAM` names another build of the program, to compare two on the same machine; `ABIDE_BENCH_USER` the user
//! that the processes run as; `ABIDE_BENCH_IDLE_SECS` how long nothing happens (20).

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

const PROCESSES: usize = 1000;
const CRASHES: usize = 300;
const NAP: &str = "100000";

fn main() {
    let folder = tempfile::tempdir().expect("a folder");
    let here = folder.path();
    give_pid_files_to_user(here);
    std::fs::write(here.join("apps.yaml"), "apps: [{code: all, secret: s3cret}]\n").expect("a file");
    std::fs::write(here.join("tokens"), "* token\n").expect("a file");
    std::fs::write(here.join("token"), "token\n").expect("a file");
    let mut spawned: Vec<Duration> = (0..3).map(|_| spawn_directly()).collect();
    spawned.sort();
    let (_gateway, url) = start(
        here,
        &[
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--data",
            "gateway",
            "--apps",
            "apps.yaml",
            "--agent-token-file",
            "tokens",
        ],
    );
    let (mut agent, _) = join(here, &url);
    let client = Client(url.trim_start_matches("http://").to_owned());
    let mut started = Vec::new();
    let mut stopped = Vec::new();
    for round in 0..3 {
        started.push(client.operate_all(here, 0));
        if round < 2 {
            stopped.push(client.operate_all(here, 1));
        }
    }
    // Everything that is still to be written is written.
    std::thread::sleep(Duration::from_secs(2));
    let mut crashes: Vec<Duration> = (0..CRASHES).map(|nth| crash(here, nth * 7 % PROCESSES)).collect();
    crashes.sort();
    let idle_time = Duration::from_secs(idle_secs());
    let before = ticks(agent.0.id());
    std::thread::sleep(idle_time);
    let idle = (ticks(agent.0.id()) - before) as f64 / 100.0 / idle_time.as_secs_f64() * 100.0;
    // With all of them running, after all that.
    let memory = resident(agent.0.id());
    let pids: Vec<u32> = (0..PROCESSES).map(|nth| pid(here, nth)).collect();
    drop(agent);
    let begin = Instant::now();
    (agent, _) = join(here, &url);
    let (_, rows) = client.run(&items(here, 2));
    let adopted = begin.elapsed();
    for (nth, pid) in pids.iter().enumerate() {
        let content =
            rows[format!("0:0:127.0.0.1:bench:p{nth}")]["content"].as_str().expect("content").to_owned();
        let look: Value = serde_json::from_str(&content).expect("a look");
        assert_eq!(look["process"][0]["instance"][0]["pid"], *pid, "p{nth}");
    }
    stopped.push(client.operate_all(here, 1));
    drop(agent);
    started.sort();
    stopped.sort();
    let ms = |time: Duration| (time.as_secs_f64() * 1e4).round() / 10.0;
    println!(
        "{:#}",
        json!({
            "processes": PROCESSES,
            "spawned_directly_ms": spawned.iter().copied().map(ms).collect::<Vec<_>>(),
            "started_ms": started.iter().copied().map(ms).collect::<Vec<_>>(),
            "started_over_spawned": ((started[1].as_secs_f64() / spawned[1].as_secs_f64()) * 100.0).round() / 100.0,
            "crash_to_new_pid_ms": {"median": ms(crashes[CRASHES / 2]), "p99": ms(crashes[CRASHES * 99 / 100]), "crashes": CRASHES},
            "agent_mb": memory as f64 / 1e6,
            "idle_percent_of_a_core": idle,
            "adopted_ms": ms(adopted),
            "stopped_ms": stopped.iter().copied().map(ms).collect::<Vec<_>>(),
        })
    );
}

/// Pid files are written with the rights of the user.
fn give_pid_files_to_user(here: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let run = here.join("run");
    std::fs::create_dir(&run).expect("a folder");
    std::fs::set_permissions(here, std::fs::Permissions::from_mode(0o711)).expect("a mode");
    let user = nix::unistd::User::from_name(&user()).expect("the users").expect("this user");
    std::os::unix::fs::chown(&run, Some(user.uid.as_raw()), Some(user.gid.as_raw()))
        .expect("a folder of this user");
}

fn spawn_directly() -> Duration {
    let begin = Instant::now();
    let mut children: Vec<Child> = (0..PROCESSES)
        .map(|_| {
            let mut command = Command::new("/bin/sleep");
            command.arg(NAP).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            command.spawn().expect("it starts")
        })
        .collect();
    let took = begin.elapsed();
    for child in &mut children {
        child.kill().expect("it is killed");
        child.wait().expect("it ends");
    }
    took
}

struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(here: &Path, args: &[&str]) -> (Program, String) {
    let program = std::env::var_os("ABIDE_BENCH_PROGRAM").unwrap_or(env!("CARGO_BIN_EXE_abide").into());
    let mut child = Command::new(program)
        .args(args)
        .current_dir(here)
        .env_clear()
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    let url = line.trim().strip_prefix("ready ").expect("it is ready").to_owned();
    (Program(child), url)
}

fn join(here: &Path, url: &str) -> (Program, String) {
    start(here, &["agent", "--join", url, "--token-file", "token", "--data", "agent"])
}

fn items(here: &Path, op: u32) -> Value {
    let user = user();
    let item = |nth: usize| {
        json!({"meta": {"namespace": "bench", "name": format!("p{nth}")}, "op_type": op,
               "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0, "bk_supplier_id": 0}],
               "spec": {"identity": {"proc_name": "sleep", "setup_path": "/", "pid_path": pid_path(here, nth), "user": user,
                                     "value_key": format!("p{nth}")},
                        "control": {"start_cmd": format!("/bin/sleep {NAP}"), "start_mode": "foreground"},
                        "monitor_policy": {"auto_type": 1, "start_check_secs": 0}}})
    };
    (0..PROCESSES).map(item).collect()
}

/// How long the agent is observed without work.
fn idle_secs() -> u64 {
    std::env::var("ABIDE_BENCH_IDLE_SECS").ok().and_then(|secs| secs.parse().ok()).unwrap_or(20)
}

fn user() -> String {
    std::env::var("ABIDE_BENCH_USER").unwrap_or_else(|_| "root".to_owned())
}

fn pid_path(here: &Path, nth: usize) -> PathBuf {
    here.join(format!("run/{nth}.pid"))
}

fn pid(here: &Path, nth: usize) -> u32 {
    std::fs::read_to_string(pid_path(here, nth)).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Kills one, and waits for the next.
fn crash(here: &Path, nth: usize) -> Duration {
    let old = pid(here, nth);
    let begin = Instant::now();
    let target = rustix::process::Pid::from_raw(old as i32).expect("a pid");
    rustix::process::kill_process(target, rustix::process::Signal::KILL).expect("it is there");
    loop {
        let new = pid(here, nth);
        if new != old && new != 0 {
            break;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    let took = begin.elapsed();
    // Writes and reports of the last one have ended by then.
    std::thread::sleep(Duration::from_millis(30));
    took
}

struct Client(String);

impl Client {
    fn call(&self, path: &str, mut body: Value) -> Value {
        body["bk_app_code"] = "all".into();
        body["bk_app_secret"] = "s3cret".into();
        let text = body.to_string();
        let mut stream = TcpStream::connect(&self.0).expect("the gateway is there");
        write!(
            stream,
            "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{text}",
            text.len()
        )
        .expect("it listens");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("it answers");
        let body = answer.split_once("\r\n\r\n").expect("a body").1;
        serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {body:.300}"))
    }

    /// One call for all, until every row is final.
    fn run(&self, items: &Value) -> (Duration, Value) {
        let begin = Instant::now();
        let answer =
            self.call("/api/c/compapi/v2/gse/operate_proc_multi/", json!({"proc_operate_req": items}));
        let task = answer["data"]["task_id"].clone();
        loop {
            let answer =
                self.call("/api/c/compapi/v2/gse/get_proc_operate_result/", json!({"task_id": task}));
            let took = begin.elapsed();
            let rows = answer["data"].as_object().expect("rows");
            if rows.values().all(|row| row["error_code"] != 115) {
                if let Some((key, row)) = rows.iter().find(|(_, row)| row["error_code"] != 0) {
                    panic!("{key}: {row}");
                }
                return (took, answer["data"].clone());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn operate_all(&self, here: &Path, op: u32) -> Duration {
        self.run(&items(here, op)).0
    }
}

fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find(|line| line.starts_with("VmRSS")).expect("its memory");
    line.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok()).expect("a number") * 1024
}

fn ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let fields: Vec<&str> = stat.rsplit_once(") ").expect("its name").1.split(' ').collect();
    fields[11].parse::<u64>().expect("ticks") + fields[12].parse::<u64>().expect("ticks")
}
