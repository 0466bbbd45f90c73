//! A gateway and an agent with real processes, for tests.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::server::Server;
use crate::support::{TestUser, command, until};

pub const APPS: &str = "apps: [{code: all, secret: s3cret}]\n";
pub const HOST: &str = "0:127.0.0.1";

/// A gateway in this process, an agent in its own, and a folder for both and for what they run.
pub struct System {
    pub folder: tempfile::TempDir,
    pub server: Server,
    pub agent: Option<Child>,
}

impl System {
    pub fn new() -> System {
        let mut system = System::without_agent();
        system.start_agent();
        system
    }

    pub fn without_agent() -> System {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("token"), "token\n").expect("a file");
        let patience = Duration::from_secs(10);
        let server = Server::start(&folder.path().join("store.db"), patience, APPS, "* token\n");
        System { folder, server, agent: None }
    }

    pub fn start_agent(&mut self) {
        self.start_agent_with(&[], &[]);
    }

    pub fn start_agent_with(&mut self, more: &[&str], env: &[(&str, &str)]) {
        self.start_agent_at(self.server.address, more, env);
    }

    /// One that joins at another address than the gateway's own.
    pub fn start_agent_at(&mut self, address: SocketAddr, more: &[&str], env: &[(&str, &str)]) {
        let url = format!("http://{address}");
        let mut args = vec!["agent", "--join", &url, "--token-file", "token", "--data", "agent"];
        args.extend(more);
        let log =
            std::fs::File::options().append(true).create(true).open(self.path("agent.log")).expect("a log");
        let mut child = command(&args, self.folder.path())
            .envs(env.iter().copied())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("it starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        assert_eq!(line.trim(), format!("ready {url}"), "{}", self.log());
        self.agent = Some(child);
    }

    pub fn kill_agent(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            agent.kill().expect("it is killed");
            agent.wait().expect("it ends");
        }
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("agent.log")).unwrap_or_default()
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A foreground process; what it is started, stopped and reloaded with leaves a line in `effects`.
    pub fn spec(&self, name: &str, start: &str) -> Value {
        json!({"identity": {"proc_name": name, "setup_path": self.folder.path(), "user": whoami(), "value_key": name,
                            "pid_path": self.path(&format!("run/{name}.pid")), "log_path": self.path(&format!("log/{name}.log"))},
               "control": {"start_cmd": start, "start_mode": "foreground"},
               "monitor_policy": {"auto_type": 1, "start_check_secs": 0, "start_interval": 1, "stop_check_secs": 5}})
    }

    /// A folder that belongs to a user, below one that everyone can enter.
    pub fn home(&self, user: &TestUser) -> PathBuf {
        use std::os::unix::fs::{PermissionsExt, chown};
        let home = self.path(&user.name);
        std::fs::create_dir_all(&home).expect("a folder");
        chown(&home, Some(user.uid), Some(user.gid)).expect("another owner");
        std::fs::set_permissions(self.folder.path(), std::fs::Permissions::from_mode(0o755)).expect("a mode");
        home
    }

    /// The same for another user, all of it in that user's folder.
    pub fn spec_of(&self, user: &TestUser, name: &str, start: &str) -> Value {
        let (mut spec, home) = (self.spec(name, start), self.home(user));
        spec["identity"]["user"] = json!(user.name);
        spec["identity"]["setup_path"] = json!(home);
        spec["identity"]["pid_path"] = json!(home.join(format!("run/{name}.pid")));
        spec["identity"]["log_path"] = json!(home.join(format!("log/{name}.log")));
        spec
    }

    pub fn begin(&self, name: &str, op: i64, spec: &Value) -> Value {
        self.begin_with("", name, op, spec)
    }

    /// The same with further headers.
    fn begin_with(&self, headers: &str, name: &str, op: i64, spec: &Value) -> Value {
        let mut body = json!({"meta": {"namespace": "web", "name": name}, "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}], "op_type": op});
        if !spec.is_null() {
            body["spec"] = spec.clone();
        }
        let path = "/api/c/compapi/v2/gse/operate_proc/";
        let answer = self.server.call_with("POST", path, headers, body);
        assert_eq!(answer["result"], true, "{answer}");
        answer["data"]["task_id"].clone()
    }

    /// The final row of a task.
    pub fn row(&self, name: &str, task: &Value) -> Value {
        let mut row = Value::Null;
        until("a final row", || {
            let rows = self.server.gse("get_proc_operate_result_v2", json!({"task_id": task}));
            row = rows["data"][format!("{HOST}:web:{name}")].clone();
            row["error_code"] != 115
        });
        row
    }

    pub fn operate(&self, name: &str, op: i64, spec: &Value) -> (i64, String) {
        let row = self.row(name, &self.begin(name, op, spec));
        (row["error_code"].as_i64().expect("a code"), row["error_msg"].as_str().expect("text").to_owned())
    }

    /// The same as Abide's planner sends it: with the header of its calls.
    pub fn operate_as_planner(&self, name: &str, op: i64, spec: &Value) -> (i64, String) {
        static CALLS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let call = CALLS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let row = self.row(name, &self.begin_with(&format!("X-Abide-Op: call-{call}\r\n"), name, op, spec));
        (row["error_code"].as_i64().expect("a code"), row["error_msg"].as_str().expect("text").to_owned())
    }

    pub fn process(&self, name: &str) -> Value {
        let page = self.server.call("GET", &format!("/api/abide/v1/processes?name={name}"), json!({}));
        page["data"]["items"][0].clone()
    }

    pub fn pid(&self, name: &str) -> Option<u32> {
        self.process(name)["pid"].as_u64().map(|pid| pid as u32)
    }

    pub fn facts(&self, name: &str) -> (bool, bool, bool) {
        let row = self.process(name);
        let fact = |field: &str| row[field].as_bool().unwrap_or(false);
        (fact("registered"), fact("hosted"), fact("running"))
    }
}

impl Drop for System {
    fn drop(&mut self) {
        // Nothing stays behind: whatever runs in the folder goes. Some daemons overwrite their environment.
        self.kill_agent();
        let mark = self.folder.path().display().to_string();
        for pid in processes() {
            let cwd = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
            if cwd.starts_with(&mark) && pid != std::process::id() {
                kill(pid, "KILL");
            }
        }
    }
}

pub fn processes() -> Vec<u32> {
    let folder = std::fs::read_dir("/proc").expect("/proc").flatten();
    folder.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

pub fn whoami() -> String {
    let output = std::process::Command::new("id").arg("-un").output().expect("id");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

pub fn kill(pid: u32, signal: &str) {
    let _ = std::process::Command::new("kill").args([&format!("-{signal}"), &pid.to_string()]).status();
}

pub fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

pub fn lines(path: &Path) -> usize {
    std::fs::read_to_string(path).unwrap_or_default().lines().count()
}

pub fn parent_of(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
}
