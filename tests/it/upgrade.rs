//! Upgrades: files and processes of the last version are kept, with every pid and every `abide_rev`.
//!
//! `fixtures/upgrade` holds the files of a gateway and of an agent as that version wrote them (see `make` there).
//! `ABIDE_OLD=/path/to/abide` names an older binary: the last two tests then replace it by this one, and put it back.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use abide::manifest::{Limits, load_text};
use abide::model::{OnChange, Spec};
use abide::reconcile::revision;
use abide::store::{Embedded, Store, Txn, TxnOutcome};
use serde_json::{Value, json};

use crate::apply::{KillOnDrop, Machine};
use crate::fixtures::workspace::Workspace;
use crate::support::{key_file, project, stderr, stdout, until};
use crate::system::{is_alive, lines, parent_of, whoami};

/// Where the fixtures were made.
const MADE_IN: &str = "/tmp/abide-upgrade";

fn fixture(name: &str) -> PathBuf {
    project().join("tests/it/fixtures/upgrade").join(name)
}

fn text(name: &str) -> String {
    std::fs::read_to_string(fixture(name)).expect("a fixture")
}

#[test]
fn every_spec_revision_is_unchanged() {
    let mut checked = 0;
    for line in text("revisions.txt").lines().filter(|line| !line.starts_with('#')) {
        let [file, old, new, expected] = line.split('|').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let original = text(file);
        assert!(original.contains(old), "{line}");
        let loaded = load_text("a.yaml", original.replacen(old, new, 1), &Limits::default());
        assert_eq!(loaded.errors(), 0, "{line}: {:?}", loaded.problems);
        let wanted = loaded.desired.instances.values().next().expect("one instance");
        assert_eq!(wanted.spec.revision().to_string(), expected, "{line}");
        checked += 1;
    }
    assert_eq!(checked, 44);
}

/// A machine whose files were left by the old version, and processes that run as its rows say.
struct OldInstallation {
    /// Before the machine: it stops what it runs, and these are waited for first.
    running: BTreeMap<String, KillOnDrop>,
    machine: Machine,
}

impl OldInstallation {
    fn new() -> OldInstallation {
        let machine = Machine::new();
        let moved = machine.folder.path().display().to_string();
        std::fs::write(machine.path("m/fleet.yaml"), text("fleet/fleet.yaml").replace(MADE_IN, &moved))
            .expect("a file");
        std::fs::write(machine.path("web.conf"), "a\n").expect("a file");
        std::fs::create_dir(machine.path("run")).expect("a folder");
        for (name, to) in [
            ("gateway.db", "gateway/store.db"),
            ("agent.db", "agent/agent.db"),
            ("agent-id", "agent/agent-id"),
        ] {
            let to = machine.path(".abide-home").join(to);
            std::fs::create_dir_all(to.parent().expect("a parent")).expect("a folder");
            std::fs::copy(fixture(name), to).expect("a copy");
        }
        let mut left = OldInstallation { running: BTreeMap::new(), machine };
        left.rewrite("gateway/store.db");
        left.rewrite("agent/agent.db");
        left
    }

    /// Puts this machine's folder, user and processes in the place of those of the machine that made the fixtures.
    fn rewrite(&mut self, file: &str) {
        let store = Embedded::open(&self.machine.path(".abide-home").join(file)).expect("it opens");
        block_on(async {
            for entry in store.range("", None, usize::MAX).await.expect("entries").entries {
                let old = String::from_utf8(entry.value.to_vec()).expect("text");
                let new = old.replace(MADE_IN, &self.machine.folder.path().display().to_string());
                let new = new.replace(r#""user":"root""#, &format!(r#""user":"{}""#, whoami()));
                let new = match serde_json::from_str::<Value>(&new) {
                    Ok(mut value) => {
                        stamp(&mut value);
                        self.revive(&entry.key, &mut value);
                        value.to_string()
                    }
                    Err(_) => new,
                };
                if new != old {
                    let written = store.txn(Txn::put(&*entry.key, new)).await.expect("a write");
                    assert!(matches!(written, TxnOutcome::Written(_)));
                }
            }
        });
    }

    /// A row of a running process gets a real one, with the marks that its launch gave it.
    fn revive(&mut self, key: &str, row: &mut Value) {
        let Some(name) = key.strip_prefix("proc/0:127.0.0.1:up:") else { return };
        // Marks are unique on a machine, and several tests use these rows at once.
        if row["next"].is_string() {
            row["next"] = json!(mark());
        }
        let Some(run) = row["run"].as_object_mut() else { return };
        // Its control group went with the machine; a host without control groups has none.
        run.remove("group");
        let mark = mark();
        let pid = self.launch(name, &mark);
        (run["incarnation"], run["identity"]) = (json!(mark), identity(pid));
    }

    fn launch(&mut self, name: &str, mark: &str) -> u32 {
        // A process that was renamed keeps the environment of its launch.
        let launched_as = if name == "new-name" { "old-name" } else { name };
        let child = Command::new("sleep")
            .arg("1000")
            .current_dir(self.machine.folder.path())
            .env("ABIDE_INSTANCE", format!("0:127.0.0.1:up:{launched_as}"))
            .env("ABIDE_INCARNATION", mark)
            .spawn()
            .expect("it starts");
        let pid = child.id();
        self.running.insert(name.to_owned(), KillOnDrop(child));
        pid
    }

    fn pids(&self) -> BTreeMap<String, u64> {
        self.running.iter().map(|(name, child)| (name.clone(), u64::from(child.0.id()))).collect()
    }
}

fn mark() -> String {
    format!("{:032x}", fastrand::u128(..))
}

/// Revisions depend on paths: each spec gets its own.
fn stamp(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.values_mut().for_each(stamp);
            if let (Some(spec), Some(_)) = (map.get("spec"), map.get("revision")) {
                let spec: Spec = serde_json::from_value(spec.clone()).expect("a spec");
                map["revision"] = json!(revision(&spec, &OnChange::new()));
            }
        }
        Value::Array(items) => items.iter_mut().for_each(stamp),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn identity(pid: u32) -> Value {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("a boot");
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let started = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(19)).expect("a start time");
    json!({"boot": boot.trim(), "pid": pid, "started": started.parse::<u64>().expect("a number")})
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime").block_on(future)
}

#[test]
fn an_upgrade_keeps_running_processes() {
    let left = OldInstallation::new();
    let pids = left.pids();
    assert_eq!(pids.keys().collect::<Vec<_>>(), ["daemon", "new-name", "web"]);
    let _up = up(&new(), left.machine.folder.path());
    let before: Vec<Value> = serde_json::from_str(&text("rows.json")).expect("rows");
    let mut now = BTreeMap::new();
    // Until the agent reports, the gateway knows the pids of the machine that made the fixtures.
    until("every process keeps its pid", || {
        now = left.machine.rows();
        pids.iter().all(|(name, pid)| now[name]["pid"].as_u64() == Some(*pid))
    });
    let (code, plan, err) = left.machine.run(&["plan", "m"]);
    assert_eq!(code, 0, "{err}");
    assert_eq!(now.len(), before.len());
    for old in &before {
        let name = old["name"].as_str().expect("a name");
        let new = &now[name];
        for same in ["instance", "registered", "hosted", "owner", "hosting", "labels"] {
            assert_eq!(new[same], old[same], "{name} {same}: {new}");
        }
        if name == "crashes" {
            continue;
        }
        for same in ["running", "health", "sync", "since", "exit", "message"] {
            assert_eq!(new[same], old[same], "{name} {same}: {new}");
        }
        assert!(new["live_revision"].is_null() || new["live_revision"] == new["revision"], "{new}");
    }
    let effects = left.machine.effects();
    assert!(effects.iter().all(|line| line == "start crashes"), "{effects:?}");
    // Nothing is planned but what the old version planned: the crashed one, until it is back.
    assert!(text("plan.txt").contains("1 to start, 1 held, 5 as wanted"));
    assert!(plan.contains("1 held, 5 as wanted") || plan.contains("1 held, 6 as wanted"), "{plan}");
    assert!(plan.contains("out of service"), "{plan}");
    for name in ["web", "daemon", "new-name", "migrate", "tick"] {
        assert!(!plan.contains(&format!("up/{name}")), "{plan}");
    }
}

/// A launch whose outcome the old version did not write is settled by its mark.
#[test]
fn an_unfinished_launch_of_the_old_version_is_recovered() {
    let mut left = OldInstallation::new();
    let mark = mark();
    let pid = left.launch("idle", &mark);
    let store = Embedded::open(&left.machine.path(".abide-home/agent/agent.db")).expect("it opens");
    block_on(async {
        let row = store.get("proc/0:127.0.0.1:up:idle").await.expect("a read").expect("a row");
        let row: Value = serde_json::from_slice(&row.value).expect("JSON");
        let intent =
            json!({"incarnation": mark, "op_id": null, "held": row["given"], "at": 1_794_961_846_747_i64});
        store.txn(Txn::put("intent/0:127.0.0.1:up:idle", intent.to_string())).await.expect("a write");
    });
    drop(store);
    let _up = up(&new(), left.machine.folder.path());
    until("it is found", || left.machine.pids().get("idle") == Some(&u64::from(pid)));
    assert!(!left.machine.effects().contains(&"start idle".to_owned()));
}

/// It waited for its next launch, which the old version did not write down.
#[test]
fn a_pending_relaunch_of_the_old_version_is_executed() {
    let left = OldInstallation::new();
    let _up = up(&new(), left.machine.folder.path());
    until("it runs", || left.machine.pids().contains_key("crashes"));
    assert_eq!(left.machine.effects(), ["start crashes"]);
}

/// The older binary; without one, this one stands in for it.
fn old() -> PathBuf {
    std::env::var_os("ABIDE_OLD").map_or_else(|| PathBuf::from(env!("CARGO_BIN_EXE_abide")), PathBuf::from)
}

fn new() -> PathBuf {
    PathBuf::from(env!("CARGO_BIN_EXE_abide"))
}

fn command(program: &Path, args: &[&str], here: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(args).current_dir(here).env("ABIDE_HOME", here.join(".abide-home"));
    command.env("ABIDE_KEY_FILE", key_file(here));
    command.env_remove("ABIDE_OLD").env_remove("ABIDE_TEST_ALL").stdin(Stdio::null());
    command
}

fn run(program: &Path, args: &[&str], here: &Path) -> String {
    let output = command(program, args, here).output().expect("it runs");
    assert!(output.status.success(), "{} {args:?}: {}", program.display(), stderr(&output));
    stdout(&output)
}

/// The local system, in the foreground.
fn up(program: &Path, here: &Path) -> KillOnDrop {
    let mut child = command(program, &["-q", "up"], here).stdout(Stdio::piped()).spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    assert!(line.starts_with("ready "), "{line:?}");
    KillOnDrop(child)
}

/// Before a downgrade: the next start of the new version decrypts its database.
fn set_plain(here: &Path, is_plain: bool) {
    let file = key_file(here);
    let text = std::fs::read_to_string(&file).expect("a key file");
    let keys = text.strip_prefix("plain\n").unwrap_or(&text);
    let text = if is_plain { format!("plain\n{keys}") } else { keys.to_owned() };
    crate::fixtures::people::write_private(&file, &text);
}

/// The local system, with processes of every kind: replaced by the new version, and back.
#[test]
fn a_local_system_is_upgraded_and_downgraded_under_its_processes() {
    let machine = Machine::new();
    let here = machine.folder.path();
    let fleet = text("fleet/fleet.yaml").replace(MADE_IN, &here.display().to_string());
    std::fs::create_dir(machine.path("run")).expect("a folder");
    std::fs::write(machine.path("web.conf"), "a\n").expect("a file");
    let before_rename = fleet.replace("moved_from: up/old-name\n", "").replace("new-name", "old-name");
    for version in [before_rename, fleet] {
        std::fs::write(machine.path("m/fleet.yaml"), version).expect("a file");
        run(&old(), &["apply", "m", "--yes"], here);
    }
    let rows = |program: &Path| -> BTreeMap<String, Value> {
        let rows: Vec<Value> =
            serde_json::from_str(&run(program, &["get", "processes", "-o", "json"], here)).expect("rows");
        let kept = "hosted running pid owner revision live_revision sync health since exit";
        // The new version shows digests of secrets under a key, and stores them as before. The plan below compares them.
        let is_keyed = |row: &Value, field: &str| {
            old() != new() && row["name"] == "web" && matches!(field, "revision" | "live_revision")
        };
        let kept = |row: &Value| {
            let kept = kept.split(' ').filter(|field| !is_keyed(row, field));
            kept.map(|field| (field.to_owned(), row[field].clone())).collect()
        };
        rows.iter().map(|row| (row["name"].as_str().expect("a name").to_owned(), kept(row))).collect()
    };
    let before = rows(&old());
    let running = before.values().filter(|row| row["running"] == true).count();
    assert_eq!((before.len(), running), (7, 5), "{before:?}");
    let effects = machine.effects();
    run(&old(), &["down"], here);
    for (program, is_plain) in [(new(), false), (new(), true), (old(), true), (new(), false)] {
        if key_file(here).exists() {
            set_plain(here, is_plain);
        }
        let mut up = up(&program, here);
        until("all is as it was", || rows(&program) == before);
        for verb in ["plan", "apply"] {
            let plan = run(&program, &[verb, "m"], here);
            assert!(plan.to_lowercase().contains("nothing to do"), "{plan}");
        }
        run(&program, &["down"], here);
        up.0.wait().expect("it ends");
    }
    assert_eq!(machine.effects(), effects, "nothing was started, stopped or reloaded");
}

/// A gateway and an agent of any version.
struct GatewayAndAgent {
    folder: Workspace,
    gateway: Option<KillOnDrop>,
    agent: Option<KillOnDrop>,
    address: String,
}

impl GatewayAndAgent {
    fn new() -> GatewayAndAgent {
        use std::os::unix::fs::PermissionsExt;
        let folder = Workspace::new();
        let pair = GatewayAndAgent { folder, gateway: None, agent: None, address: String::new() };
        for (name, content) in
            [("apps.yaml", crate::system::APPS), ("tokens", "* token\n"), ("token", "token\n")]
        {
            std::fs::write(pair.path(name), content).expect("a file");
            std::fs::set_permissions(pair.path(name), std::fs::Permissions::from_mode(0o600))
                .expect("private");
        }
        pair
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn start(&self, program: &Path, args: &[&str]) -> (Child, String) {
        let log = std::fs::File::options().append(true).create(true).open(self.path("log")).expect("a log");
        let mut child = command(program, args, self.folder.path())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("it starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        let log = || std::fs::read_to_string(self.path("log")).unwrap_or_default();
        let url = line.trim().strip_prefix("ready http://").unwrap_or_else(|| panic!("{line:?} {}", log()));
        (child, url.to_owned())
    }

    fn start_gateway(&mut self, program: &Path) {
        end(self.gateway.take());
        let listen = if self.address.is_empty() { "127.0.0.1:0" } else { &self.address };
        let args = [
            "serve",
            "--listen",
            listen,
            "--data",
            "gateway",
            "--apps",
            "apps.yaml",
            "--agent-token-file",
            "tokens",
        ];
        let (child, address) = self.start(program, &args);
        (self.gateway, self.address) = (Some(KillOnDrop(child)), address);
    }

    fn start_agent(&mut self, program: &Path) {
        end(self.agent.take());
        let url = format!("http://{}", self.address);
        let args = ["agent", "--join", &url, "--token-file", "token", "--data", "agent"];
        self.agent = Some(KillOnDrop(self.start(program, &args).0));
    }

    fn server(&self) -> crate::server::Server {
        crate::server::Server::at(self.address.parse().expect("an address"))
    }

    fn operate(&self, name: &str, op: i64) -> Value {
        let here = self.folder.path();
        let spec = json!({"identity": {"proc_name": "sleep", "setup_path": here, "user": whoami(), "value_key": name,
                                       "pid_path": self.path(&format!("run/{name}.pid"))},
                          "control": {"start_cmd": format!("echo {name} >> effects; exec sleep 1000"), "start_mode": "foreground"},
                          "monitor_policy": {"auto_type": 1, "start_check_secs": 0}});
        let host = json!([{"ip": "127.0.0.1", "bk_cloud_id": 0}]);
        let body =
            json!({"meta": {"namespace": "up", "name": name}, "hosts": host, "op_type": op, "spec": spec});
        let task = self.server().gse("operate_proc", body)["data"]["task_id"].clone();
        let mut row = Value::Null;
        until("a final row", || {
            let rows = self.server().gse("get_proc_operate_result_v2", json!({"task_id": task}));
            row = rows["data"][format!("0:127.0.0.1:up:{name}")].clone();
            row["error_code"] != 115
        });
        row
    }

    fn pid(&self, name: &str) -> Option<u64> {
        let page = self.server().call("GET", &format!("/api/abide/v1/processes?name={name}"), json!({}));
        page["data"]["items"][0]["pid"].as_u64()
    }
}

/// Asks it to end, as an upgrade does.
fn end(child: Option<KillOnDrop>) {
    if let Some(mut child) = child {
        crate::system::kill(child.0.id(), "TERM");
        child.0.wait().expect("it ends");
    }
}

/// It crashed while no one supervised it, and was hosted afterwards: the old version waits for its next start.
#[test]
fn processes_that_the_old_version_would_not_launch_are_not_launched() {
    let mut pair = GatewayAndAgent::new();
    pair.start_gateway(&old());
    pair.start_agent(&old());
    for (op, name) in [(0, "a"), (4, "a"), (0, "b")] {
        assert_eq!(pair.operate(name, op)["error_code"], 0);
    }
    crate::system::kill(pair.pid("a").expect("it runs") as u32, "KILL");
    until("it is down", || pair.pid("a").is_none());
    assert_eq!(pair.operate("a", 3)["error_code"], 0);
    let effects = lines(&pair.path("effects"));
    pair.start_agent(&new());
    until("the new agent reports", || pair.pid("b").is_some());
    // The agent decides before it takes its first operation.
    assert_eq!(pair.operate("c", 0)["error_code"], 0);
    assert_eq!((pair.pid("a"), lines(&pair.path("effects"))), (None, effects + 1));
    assert_eq!(pair.operate("a", 0)["error_code"], 0, "an explicit start");
}

/// Gateway and agent are replaced one after the other, and back: every mix of versions works and keeps every process.
#[test]
fn gateway_and_agent_are_upgraded_one_after_the_other_and_back() {
    let mut pair = GatewayAndAgent::new();
    pair.start_gateway(&old());
    pair.start_agent(&old());
    let names = ["a", "b", "c"];
    for name in names {
        assert_eq!(pair.operate(name, 0)["error_code"], 0);
    }
    let pids = names.map(|name| pair.pid(name).expect("it runs"));
    let (old, new) = (old(), new());
    for (stage, (what, program)) in
        [("gateway", &new), ("agent", &new), ("gateway", &old), ("agent", &old)].into_iter().enumerate()
    {
        let is_downgrade = stage >= 2;
        if is_downgrade {
            set_plain(pair.folder.path(), true);
        }
        // A start of the new version decrypts before a downgrade.
        for program in is_downgrade.then_some(&new).into_iter().chain([program]) {
            match what {
                "gateway" => pair.start_gateway(program),
                _ => pair.start_agent(program),
            }
        }
        until("all are reported with their pids", || names.map(|name| pair.pid(name)) == pids.map(Some));
        // The mix works: something is started, restarted and stopped.
        let probe = format!("probe{stage}");
        for (op, expected) in [(0, 0), (7, 0), (1, 0)] {
            let row = pair.operate(&probe, op);
            assert_eq!(row["error_code"], expected, "stage {stage}, operation {op}: {row}");
        }
        until("it is gone", || pair.pid(&probe).is_none());
        assert_eq!(lines(&pair.path("effects")), names.len() + 2 * (stage + 1), "each launch once");
        assert!(pids.iter().all(|pid| is_alive(*pid as u32)), "stage {stage}");
    }
    // Held, not only remembered: one that dies is back.
    crate::system::kill(pids[0] as u32, "KILL");
    until("a is back", || pair.pid("a").is_some_and(|pid| pid != pids[0]));
    let agent = pair.agent.as_ref().expect("an agent").0.id();
    assert_eq!(pair.pid("a").and_then(|pid| parent_of(pid as u32)), Some(agent));
}
