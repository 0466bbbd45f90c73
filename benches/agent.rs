//! Agent benchmark: 1,000 processes under one agent, over loopback, durably, compared with spawning them directly.
//!
//! `cargo bench --bench agent` prints one JSON object. As root it has the figures of root's processes and of another user's
//! processes. They are: the time of `operate_proc_multi` from the call until the last process runs, and of direct spawning
//! in the same run; the time from the death of a process to its next pid, and the same for a loop that only waits and spawns
//! (the floor of this machine); the agent's memory and its CPU time; the time of adoption after `kill -9`; and the time of
//! stopping all processes. `targets` compares them with their limits.
//!
//! `ABIDE_BENCH_PROGRAM` names another build of the program, to compare two on the same machine; `ABIDE_BENCH_USER` the other
//! user (abide-test, or the system user without rights); `ABIDE_BENCH_ONLY` measures one user alone; `ABIDE_BENCH_IDLE_SECS` is the
//! duration of the idle phase (70: one sample of each process, by default).

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

const PROCESSES: usize = 1000;
const CRASHES: usize = 300;
const ROUNDS: usize = 3;
const NAP: &str = "100000";

fn main() {
    let figures: Vec<Figures> = users().iter().map(|user| measure(user)).collect();
    let targets: Vec<Value> = figures.iter().flat_map(Figures::targets).collect();
    let by_user: serde_json::Map<String, Value> =
        figures.iter().map(|figures| (figures.user.clone(), figures.to_json())).collect();
    println!("{:#}", json!({"processes": PROCESSES, "users": by_user, "targets": targets}));
}

/// The users whose processes are measured. An agent without root rights runs only its own.
fn users() -> Vec<String> {
    let exists = |name: &str| nix::unistd::User::from_name(name).is_ok_and(|user| user.is_some());
    let variable = |name: &str| std::env::var(name).ok();
    let me = nix::unistd::User::from_uid(nix::unistd::geteuid()).expect("the users").expect("this user").name;
    if let Some(only) = variable("ABIDE_BENCH_ONLY") {
        return vec![only];
    }
    if !nix::unistd::geteuid().is_root() {
        return vec![me];
    }
    let usual = || if exists("abide-test") { "abide-test" } else { "nobody" }.to_owned();
    vec![me, variable("ABIDE_BENCH_USER").unwrap_or_else(usual)]
}

/// The figures of one user's processes. Times of several rounds are sorted.
struct Figures {
    user: String,
    spawned: Vec<Duration>,
    started: Vec<Duration>,
    /// CPU time of the agent and its launcher for one start.
    start_cpu: Duration,
    stopped: Vec<Duration>,
    crashes: Vec<Duration>,
    /// Crashes of a process of a loop that waits and spawns.
    floor: Vec<Duration>,
    /// Percent of a core.
    idle: f64,
    agent_memory: AgentMemory,
    launcher_memory: u64,
    adopted: Duration,
}

impl Figures {
    fn to_json(&self) -> Value {
        let all = |times: &[Duration]| times.iter().copied().map(ms).collect::<Vec<_>>();
        json!({
            "spawned_directly_ms": all(&self.spawned),
            "started_ms": all(&self.started),
            "started_over_spawned": self.started_over_spawned(),
            "agent_cpu_ms_per_start": (self.start_cpu.as_secs_f64() * 1e5).round() / 100.0,
            "crash_to_new_pid_ms": {"median": ms(self.crash(50)), "p99": ms(self.crash(99)), "crashes": CRASHES},
            "crash_floor_ms": {"median": ms(self.floor[CRASHES * 50 / 100]), "p99": ms(self.floor[CRASHES * 99 / 100])},
            "agent_mb": mb(self.agent_memory.idle),
            "agent_mb_of_files": mb(self.agent_memory.idle_files),
            "agent_mb_after_crashes": mb(self.agent_memory.after_crashes),
            "launcher_mb": mb(self.launcher_memory),
            "idle_percent_of_a_core": self.idle,
            "adopted_ms": ms(self.adopted),
            "stopped_ms": all(&self.stopped),
        })
    }

    fn started_over_spawned(&self) -> f64 {
        let (started, spawned) = (self.started[ROUNDS / 2], self.spawned[ROUNDS / 2]);
        (started.as_secs_f64() / spawned.as_secs_f64() * 100.0).round() / 100.0
    }

    fn crash(&self, percent: usize) -> Duration {
        self.crashes[CRASHES * percent / 100]
    }

    fn targets(&self) -> Vec<Value> {
        let target = |name: &str, value: f64, limit: f64| json!({"user": self.user, "target": name, "value": value, "limit": limit, "reached": value <= limit});
        vec![
            target("started_over_spawned", self.started_over_spawned(), 1.5),
            target("crash_to_new_pid_ms_median", ms(self.crash(50)), 1.0),
            target("crash_to_new_pid_ms_p99", ms(self.crash(99)), 5.0),
            target("agent_mb", mb(self.agent_memory.idle), 25.0),
            target("idle_percent_of_a_core", self.idle, 0.1),
            target("adopted_ms", ms(self.adopted), 500.0),
        ]
    }
}

/// Resident memory of an agent with all its processes, in bytes.
struct AgentMemory {
    /// Right after the crashes: their code and their buffers are still mapped.
    after_crashes: u64,
    /// After the idle phase.
    idle: u64,
    /// The part of `idle` that is mapped files: code and libraries.
    idle_files: u64,
}

fn mb(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e5).round() / 100.0
}

/// A gateway and its agent's files.
struct Host {
    folder: tempfile::TempDir,
    pid_files: tempfile::TempDir,
    _gateway: Program,
    url: String,
    user: String,
}

impl Host {
    fn new(user: &str) -> Host {
        let folder = tempfile::tempdir().expect("a folder");
        let here = folder.path();
        let pid_files = pid_folder_of(user);
        std::fs::write(here.join("apps.yaml"), "apps: [{code: all, secret: s3cret}]\n").expect("a file");
        std::fs::write(here.join("tokens"), "* token\n").expect("a file");
        std::fs::write(here.join("token"), "token\n").expect("a file");
        #[rustfmt::skip]
        let args = [
            "serve", "--listen", "127.0.0.1:0", "--data", "gateway", "--apps", "apps.yaml", "--agent-token-file", "tokens",
        ];
        let (gateway, url) = start(here, &args);
        Host { _gateway: gateway, url, user: user.to_owned(), folder, pid_files }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn join(&self) -> Program {
        start(self.path(), &["agent", "--join", &self.url, "--token-file", "token", "--data", "agent"]).0
    }

    fn client(&self) -> Client {
        Client(self.url.trim_start_matches("http://").to_owned())
    }

    fn operate_all(&self, op: u32) -> Duration {
        self.client().run(&items(self, op)).0
    }
}

fn measure(user: &str) -> Figures {
    let spawned = (0..ROUNDS).map(|_| spawn_directly()).collect();
    let host = Host::new(user);
    let agent = host.join();
    let (mut started, mut stopped, mut start_cpu) = (Vec::new(), Vec::new(), Duration::ZERO);
    for round in 0..ROUNDS {
        let before = cpu_time(&agent);
        started.push(host.operate_all(0));
        start_cpu += (cpu_time(&agent) - before) / (PROCESSES * ROUNDS) as u32;
        if round + 1 < ROUNDS {
            stopped.push(host.operate_all(1));
        }
    }
    // Lets the agent write and report everything that is pending.
    std::thread::sleep(Duration::from_secs(2));
    let here = host.pid_files.path();
    let crashes = (0..CRASHES).map(|nth| crash(here, nth * 7 % PROCESSES)).collect();
    let after_crashes = memory_of(agent.0.id(), "VmRSS");
    let floor = crash_floor();
    let idle_time = Duration::from_secs(idle_secs());
    let before = cpu_time(&agent);
    std::thread::sleep(idle_time);
    let idle = (cpu_time(&agent) - before).as_secs_f64() / idle_time.as_secs_f64() * 100.0;
    let (idle_memory, idle_files) = (memory_of(agent.0.id(), "VmRSS"), memory_of(agent.0.id(), "RssFile"));
    let agent_memory = AgentMemory { after_crashes, idle: idle_memory, idle_files };
    let launcher_memory = launcher_of(agent.0.id()).map_or(0, |launcher| memory_of(launcher, "VmRSS"));
    let pids: Vec<u32> = (0..PROCESSES).map(|nth| pid(here, nth)).collect();
    drop(agent);
    let (agent, adopted) = adopt(&host, &pids);
    stopped.push(host.operate_all(1));
    drop(agent);
    let mut figures = Figures {
        user: user.to_owned(),
        spawned,
        started,
        start_cpu,
        stopped,
        crashes,
        floor,
        idle,
        agent_memory,
        launcher_memory,
        adopted,
    };
    let Figures { spawned, started, stopped, crashes, floor, .. } = &mut figures;
    for times in [spawned, started, stopped, crashes, floor] {
        times.sort();
    }
    figures
}

/// Starts the next agent. Returns the time until it knows every process.
fn adopt(host: &Host, pids: &[u32]) -> (Program, Duration) {
    let begin = Instant::now();
    let agent = host.join();
    let (_, rows) = host.client().run(&items(host, 2));
    let adopted = begin.elapsed();
    for (nth, pid) in pids.iter().enumerate() {
        let row = &rows[format!("0:0:127.0.0.1:bench:p{nth}")];
        let content = row["content"].as_str().expect("content").to_owned();
        let status: Value = serde_json::from_str(&content).expect("a status");
        assert_eq!(status["process"][0]["instance"][0]["pid"], *pid, "p{nth}");
    }
    (agent, adopted)
}

/// The folder of the pid files, which the user can write. It is in memory, like /run: ext4 gets slower with every file that
/// was removed in the last minutes, so that one round would slow down the next.
fn pid_folder_of(user: &str) -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a folder");
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o755)).expect("a mode");
    let user = nix::unistd::User::from_name(user).expect("the users").expect("this user");
    std::os::unix::fs::chown(folder.path(), Some(user.uid.as_raw()), Some(user.gid.as_raw()))
        .expect("a folder of this user");
    folder
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
        .env("ABIDE_KEY_FILE", here.join("key"))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    let url = line.trim().strip_prefix("ready ").expect("it is ready").to_owned();
    (Program(child), url)
}

fn items(host: &Host, op: u32) -> Value {
    let (here, user) = (host.pid_files.path(), &host.user);
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

/// Duration of the idle phase.
fn idle_secs() -> u64 {
    std::env::var("ABIDE_BENCH_IDLE_SECS").ok().and_then(|secs| secs.parse().ok()).unwrap_or(70)
}

fn pid_path(here: &Path, nth: usize) -> PathBuf {
    here.join(format!("{nth}.pid"))
}

fn pid(here: &Path, nth: usize) -> u32 {
    std::fs::read_to_string(pid_path(here, nth)).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Kills a process. Returns the time until its pid file names the next one.
fn crash(here: &Path, nth: usize) -> Duration {
    let old = pid(here, nth);
    assert_ne!(old, 0, "process {nth} has no pid file");
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
    // Lets the agent write and report this crash.
    std::thread::sleep(Duration::from_millis(30));
    took
}

/// The same with a loop that waits for its process and spawns the next one, next to the agent's processes.
fn crash_floor() -> Vec<Duration> {
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a folder");
    let (path, new) = (pid_path(folder.path(), 0), folder.path().join("new"));
    let supervise = move || {
        for _ in 0..=CRASHES {
            let mut command = Command::new("/bin/sleep");
            command.arg(NAP).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let mut child = command.spawn().expect("it starts");
            std::fs::write(&new, child.id().to_string()).expect("a file");
            std::fs::rename(&new, &path).expect("a pid file");
            child.wait().expect("it ends");
        }
    };
    let supervisor = std::thread::spawn(supervise);
    while pid(folder.path(), 0) == 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let times = (0..CRASHES).map(|_| crash(folder.path(), 0)).collect();
    let last = rustix::process::Pid::from_raw(pid(folder.path(), 0) as i32).expect("a pid");
    rustix::process::kill_process(last, rustix::process::Signal::KILL).expect("it is there");
    supervisor.join().expect("it ends");
    times
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

    /// One call for all processes, until every row is final.
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
}

/// A line of a process's status, in bytes.
fn memory_of(pid: u32, name: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find(|line| line.starts_with(name)).expect("its memory");
    line.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok()).expect("a number") * 1024
}

/// The agent's launcher; `None`: it has none.
fn launcher_of(agent: u32) -> Option<u32> {
    let children = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("children")).ok();
    let threads = std::fs::read_dir(format!("/proc/{agent}/task")).expect("the agent").flatten();
    let lists: Vec<String> = threads.filter_map(children).collect();
    let pids = lists.iter().flat_map(|list| list.split_whitespace()).filter_map(|pid| pid.parse().ok());
    let is_launcher = |pid: &u32| {
        std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line == b"abide\0agent-launcher\0")
    };
    pids.into_iter().find(is_launcher)
}

/// CPU time of the agent and its launcher.
fn cpu_time(agent: &Program) -> Duration {
    let agent = agent.0.id();
    let ticks = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields: Vec<&str> =
            stat.rsplit_once(") ").map_or(Vec::new(), |(_, rest)| rest.split(' ').collect());
        let ticks = |nth: usize| fields.get(nth).and_then(|ticks| ticks.parse::<u64>().ok()).unwrap_or(0);
        ticks(11) + ticks(12)
    };
    Duration::from_millis((ticks(agent) + launcher_of(agent).map_or(0, ticks)) * 10)
}
