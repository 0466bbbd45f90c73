//! Deadlines of result rows: clock skew, agents that send no result, and records that agents may drop.

use std::path::Path;
use std::process::{Child, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use abide::store::{Embedded, Store, keys as store_keys};
use serde_json::{Value, json};

use crate::cutting_proxy::{Direction, Fate, Message, Proxy, Rule};
use crate::fixtures::manifest::Manifest;
use crate::fixtures::workspace::Workspace;
use crate::server::{Lines, Server};
use crate::support::{command, keys, stderr, stdout, until};
use crate::system::{APPS, System, is_alive, kill, lines};

const HOST: &str = "0:127.0.0.1";
const HOUR_MS: i64 = 3_600_000;

/// A stand-in for an agent: one session that polls every 100 ms, until it is dropped.
struct FakeAgent {
    address: std::net::SocketAddr,
    session: String,
    seq: u64,
    lines: Lines,
    over: Arc<AtomicBool>,
}

impl FakeAgent {
    fn join(server: &Server, more: Value) -> FakeAgent {
        let mut ask = json!({"agent": "stand-in", "hosts": [HOST], "version": "1"});
        more.as_object().expect("fields").iter().for_each(|(name, value)| ask[name] = value.clone());
        let auth = "Authorization: Bearer token\r\n";
        let (status, text) =
            server.send("POST", "/api/abide/v1/agent/join", auth, ask.to_string().as_bytes());
        assert_eq!(status, 200, "{text}");
        let joined: Value = serde_json::from_str(&text).expect("JSON");
        let session = joined["data"]["session"].as_str().expect("a session").to_owned();
        let (status, lines) =
            server.stream(&format!("/api/abide/v1/agent/stream?session={session}&after=0"), auth);
        assert_eq!(status, 200);
        let over = Arc::new(AtomicBool::new(false));
        let seq = joined["data"]["acked"].as_u64().expect("a number");
        let stand_in = FakeAgent { address: server.address, session, seq, lines, over };
        let (ends, address, session) =
            (Arc::clone(&stand_in.over), stand_in.address, stand_in.session.clone());
        std::thread::spawn(move || {
            while !ends.load(Ordering::Acquire) {
                send_up(address, &session, &json!([]));
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        stand_in
    }

    fn next(&mut self, kind: &str) -> Value {
        loop {
            let line = self.lines.next().expect("the stream goes on");
            if let Some(found) = line.get(kind) {
                return found.clone();
            }
        }
    }

    fn result(&mut self, op: &Value, code: i64, message: &str) {
        self.seq += 1;
        let result = json!({"op_id": op["op_id"], "code": code, "message": message});
        send_up(self.address, &self.session, &json!([{"seq": self.seq, "result": result}]));
    }
}

impl Drop for FakeAgent {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
    }
}

fn send_up(address: std::net::SocketAddr, session: &str, ups: &Value) {
    let path = format!("/api/abide/v1/agent/tell?session={session}");
    Server::at(address).send("POST", &path, "Authorization: Bearer token\r\n", ups.to_string().as_bytes());
}

/// A gateway that waits for a second and a half where it waits for minutes.
fn server_with_short_timeout(folder: &Path) -> Server {
    let patience = Duration::from_millis(700);
    Server::with_allowance(&folder.join("store.db"), patience, Duration::from_millis(300), APPS, "* token\n")
}

fn spec(folder: &Path) -> Value {
    json!({"identity": {"proc_name": "p", "setup_path": folder, "pid_path": folder.join("p.pid"), "user": "root"},
           "control": {"start_cmd": "./p"},
           "monitor_policy": {"auto_type": 1, "op_timeout": 1, "start_check_secs": 0, "stop_check_secs": 0}})
}

fn begin(server: &Server, spec: &Value, op: i64) -> Value {
    let body = json!({"meta": {"namespace": "web", "name": "p"}, "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}],
                      "op_type": op, "spec": spec});
    let answer = server.gse("operate_proc", body);
    assert_eq!(answer["result"], true, "{answer}");
    answer["data"]["task_id"].clone()
}

fn row(server: &Server, task: &Value) -> Value {
    server.gse("get_proc_operate_result_v2", json!({"task_id": task}))["data"][format!("{HOST}:web:p")]
        .clone()
}

#[test]
fn a_row_that_an_agent_never_ends_is_final_at_its_deadline() {
    let folder = Workspace::new();
    let server = server_with_short_timeout(folder.path());
    let mut agent = FakeAgent::join(&server, json!({}));
    let task = begin(&server, &spec(folder.path()), 0);
    let op = agent.next("op");
    assert_eq!(row(&server, &task)["error_code"], 115);
    until("it is given up", || row(&server, &task)["error_code"] != 115);
    let last = row(&server, &task);
    assert_eq!(last["error_code"], 1_900_504, "{last}");
    assert!(last["error_msg"].as_str().expect("text").contains("gave no result within 2 s"), "{last}");
    // A status check too, which is in memory alone.
    let check = begin(&server, &spec(folder.path()), 2);
    until("that too", || row(&server, &check)["error_code"] == 1_900_504);
    // It outlives the gateway, and a late result replaces it.
    let address = server.address;
    drop((agent, server));
    let server = server_with_short_timeout(folder.path());
    assert_ne!(server.address, address);
    assert_eq!(row(&server, &task)["error_code"], 1_900_504);
    let mut agent = FakeAgent::join(&server, json!({}));
    agent.result(&op, 0, "late");
    until("the late result counts", || row(&server, &task)["error_code"] == 0);
}

#[test]
fn apply_ends_though_the_agent_never_answers() {
    let folder = Workspace::new();
    let server = server_with_short_timeout(folder.path());
    let _agent = FakeAgent::join(&server, json!({}));
    let manifest = Manifest::local("p", folder.path())
        .identity("user", "root")
        .start_cmd("./p")
        .monitor("auto_type", 1)
        .monitor("op_timeout", 1)
        .monitor("start_check_secs", 0)
        .monitor("stop_check_secs", 0)
        .to_string();
    std::fs::write(folder.path().join("p.yaml"), manifest).expect("a file");
    let apply = || abide(folder.path(), &server, &["apply", "p.yaml", "--yes", "--timeout", "60s"]);
    let first = apply();
    let shown = format!("{}{}", stdout(&first), stderr(&first));
    assert_eq!(first.status.code(), Some(3), "{shown}");
    assert!(shown.contains("Unknown start") && shown.contains("gave no result within"), "{shown}");
    // Its lease is free: the next one is not kept out.
    let second = apply();
    assert_eq!(second.status.code(), Some(3), "{}{}", stdout(&second), stderr(&second));
}

/// The program, with a target `it` at this gateway.
fn abide(folder: &Path, server: &Server, args: &[&str]) -> Output {
    let config = format!(
        "targets: {{it: {{url: \"http://{}\", dialect: abide, auth: {{app_code: all, app_secret: {{env: IT_SECRET}}}}}}}}\n",
        server.address
    );
    std::fs::write(folder.join("config.yaml"), config).expect("a file");
    let mut command = command(args, folder);
    command.args(["--target", "it", "--config", "config.yaml"]).env("IT_SECRET", "s3cret");
    command.stdin(Stdio::null()).output().expect("it runs")
}

#[test]
fn the_floor_rises_with_what_is_final_and_no_further() {
    let folder = Workspace::new();
    let server = Server::start(&folder.path().join("store.db"), Duration::from_secs(10), APPS, "* token\n");
    let mut agent = FakeAgent::join(&server, json!({"floors": true}));
    begin(&server, &spec(folder.path()), 0);
    let first = agent.next("op");
    let seq = first["seq"].as_u64().expect("a number");
    let second_task = begin(&server, &spec(folder.path()), 7);
    let second = agent.next("op");
    let floor = |agent: &mut FakeAgent| agent.next("heartbeat")["floor"].as_u64().expect("a number");
    assert!(floor(&mut agent) < seq, "nothing is final");
    agent.result(&second, 0, "");
    until("the second is final", || row(&server, &second_task)["error_code"] == 0);
    assert!(floor(&mut agent) < seq, "the first is not final");
    agent.result(&first, 0, "");
    until("both are below the floor", || floor(&mut agent) >= second["seq"].as_u64().expect("a number"));
    // One that does not know heartbeats gets none.
    drop(agent);
    let mut old = FakeAgent::join(&server, json!({}));
    // An agent that joined later and knows them has got one.
    let elsewhere = json!({"agent": "later", "hosts": ["0:10.0.0.9"], "floors": true});
    FakeAgent::join(&server, elsewhere).next("heartbeat");
    let check = begin(&server, &spec(folder.path()), 2);
    let line = loop {
        let line = old.lines.next().expect("the stream goes on");
        assert!(line.get("heartbeat").is_none(), "{line}");
        if line.get("op").is_some() {
            break line;
        }
    };
    assert_eq!(line["op"]["task"], check);
}

#[test]
fn numbers_continue_above_what_an_agent_knows_and_a_forged_one_is_ignored() {
    let folder = Workspace::new();
    let server = Server::start(&folder.path().join("store.db"), Duration::from_secs(10), APPS, "* token\n");
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    let now = u64::try_from(now.as_millis()).expect("a number");
    let hour = u64::try_from(HOUR_MS).expect("a number");
    let next = |last: u64| {
        let mut agent = FakeAgent::join(&server, json!({"last_seq": last}));
        begin(&server, &spec(folder.path()), 0);
        let op = agent.next("op");
        agent.result(&op, 65535, "");
        op["seq"].as_u64().expect("a number")
    };
    assert!(next(0) < (now + hour) << 20);
    for forged in [u64::MAX, (now + 24 * 8 * hour) << 20] {
        assert!(next(forged) < (now + hour) << 20, "{forged} is too far ahead");
    }
    // Of a gateway whose clock was ahead, and whose store is lost.
    let ahead = ((now + 2 * hour) << 20) + 7;
    assert!(next(ahead) > ahead);
    assert!(next(0) > ahead, "and it stays so");
}

/// Operations that the agent remembers, with acknowledged results or without, in a copy of its store.
fn records(system: &System) -> usize {
    let copy = tempfile::tempdir().expect("a folder");
    let agent = system.path("agent");
    let log = || std::fs::read(agent.join("agent.db-wal")).unwrap_or_default();
    // The two files are of one moment if the agent wrote nothing between their copies.
    loop {
        let before = log();
        let _ = std::fs::copy(agent.join("agent.db"), copy.path().join("agent.db"));
        std::fs::write(copy.path().join("agent.db-wal"), &before).expect("a copy");
        if log() == before {
            break;
        }
    }
    let Ok(store) = Embedded::open_as_found(&copy.path().join("agent.db"), &keys(system.folder.path()))
    else {
        return usize::MAX;
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let entries =
        |prefix| runtime.block_on(store.range(prefix, None, usize::MAX)).expect("a page").entries.len();
    entries(store_keys::RESULT_PREFIX) + entries(store_keys::ACKNOWLEDGED_PREFIX)
}

#[test]
fn results_are_dropped_once_the_gateway_cannot_resend() {
    let system = System::new();
    let spec = system.spec("p", "exec sleep 1000");
    for _ in 0..20 {
        assert_eq!(system.operate("p", 3, &spec).0, 0);
        assert_eq!(system.operate("p", 4, &spec).0, 0);
    }
    assert!(records(&system) > 0, "there is something to forget");
    until("nothing is left", || records(&system) == 0);
}

/// A copy of the gateway's store from when an operation was open, in place of one that knows its result.
#[test]
fn a_restored_gateway_does_not_run_an_operation_again() {
    assert!(restore_gateway(true), "the floor was waited for");
    // On a busy machine the gateway may confirm the floor before it is stopped.
    assert!((0..10).any(|_| !restore_gateway(false)), "each time the floor was above the operation");
}

/// Returns whether the floor was above the operation when the gateway was restored.
fn restore_gateway(waits_for_floor: bool) -> bool {
    let mut system = System::new();
    let mut once = system.spec("once", "echo ran >> runs");
    once["monitor_policy"]["auto_type"] = json!(2);
    system.kill_agent();
    let task = system.begin("once", 0, &once);
    let (address, file, copy) = (system.server.address, system.path("store.db"), system.path("copy.db"));
    let stop = |system: &mut System| {
        system.server = Server::at(address);
        until("the port is free", || std::net::TcpListener::bind(address).is_ok());
    };
    stop(&mut system);
    std::fs::copy(&file, &copy).expect("a copy");
    let _ = std::fs::copy(system.path("store.db-wal"), system.path("copy.db-wal"));
    system.server = Server::restart_at(address, &file, APPS, "* token\n");
    system.start_agent();
    assert_eq!(system.row("once", &task)["error_code"], 0);
    if waits_for_floor {
        until("the floor is above it", || records(&system) == 0);
    }
    stop(&mut system);
    system.server = Server::restart_at(address, &copy, APPS, "* token\n");
    let row = system.row("once", &task);
    let is_below_the_floor = row["error_code"] != 0;
    match is_below_the_floor {
        // Its result is repeated.
        false => assert!(!waits_for_floor, "{row}"),
        true => {
            assert_eq!(row["error_code"], 1_900_408, "{row}");
            assert!(
                row["error_msg"].as_str().expect("text").contains("is final, which the gateway confirmed"),
                "{row}"
            );
            assert!(system.log().contains("operation refused"), "{}", system.log());
        }
    }
    assert_eq!(lines(&system.path("runs")), 1, "{}", system.log());
    // The next one runs: its number is larger.
    assert_eq!(system.operate("once", 0, &once).0, 0);
    until("it ran", || lines(&system.path("runs")) == 2);
    is_below_the_floor
}

/// The deadline of an operation is over while the agent is frozen.
#[test]
fn a_frozen_agent_runs_no_operation_after_its_final_row() {
    let mut system = System::new();
    let mut spec = system.spec("p", "echo up >> starts; exec sleep 1000");
    spec["monitor_policy"]["op_timeout"] = json!(1);
    assert_eq!(system.operate("p", 0, &spec).0, 0);
    let pid = system.pid("p").expect("a pid");
    let agent = system.agent.as_mut().expect("an agent").id();
    kill(agent, "STOP");
    let tasks = [7, 1].map(|op| system.begin("p", op, &spec));
    for task in &tasks {
        let row = system.row("p", task);
        assert_eq!(row["error_code"], 117, "{row}");
        assert!(row["error_msg"].as_str().is_some_and(|text| text.contains("not connected")), "{row}");
    }
    kill(agent, "CONT");
    until("it is connected again", || system.process("p")["agent"] == true);
    // A status check comes after everything on the stream, and after every operation on its instance.
    assert_eq!(system.operate("p", 2, &spec).0, 0);
    assert_eq!((system.pid("p"), lines(&system.path("starts"))), (Some(pid), 1), "{}", system.log());
    for task in &tasks {
        // The agent may report that it refused the operation, which replaces the gateway's reason.
        let row = system.row("p", task);
        assert!([117, 1_900_408].contains(&row["error_code"].as_i64().expect("a code")), "{row}");
    }
}

#[test]
fn a_late_operation_is_refused_and_reported() {
    let mut system = System::without_agent();
    let patience = Duration::from_secs(4);
    system.server = Server::start(&system.path("other.db"), patience, APPS, "* token\n");
    let holds = Arc::new(AtomicBool::new(false));
    let armed = Arc::clone(&holds);
    let rule: Rule = Arc::new(move |message: &Message<'_>| {
        if message.call == "stream"
            && message.direction == Direction::Down
            && armed.swap(false, Ordering::AcqRel)
        {
            std::thread::sleep(patience + Duration::from_millis(500));
        }
        Fate::Pass
    });
    let proxy = Proxy::to(system.server.address, rule);
    system.start_agent_at(proxy.address, &[], &[]);
    let spec = system.spec("p", "echo ran >> runs; exec sleep 1000");
    assert_eq!(system.operate("p", 3, &spec).0, 0);
    holds.store(true, Ordering::Release);
    let (code, message) = system.operate("p", 0, &spec);
    assert_eq!(code, 1_900_408, "{message}");
    assert!(message.contains("not begun: the operation reached the agent"), "{message}");
    assert!(system.log().contains("operation refused: it arrived too late"), "{}", system.log());
    assert!(!system.path("runs").exists(), "nothing was started");
    assert_eq!(system.operate("p", 0, &spec).0, 0);
    until("it runs", || lines(&system.path("runs")) == 1);
}

/// A gateway in a process of its own, for its log.
struct Gateway(Child);

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn with_own_gateway() -> (System, Gateway) {
    let mut system = System::without_agent();
    let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
    system.server = Server::at(port);
    std::fs::write(system.path("apps.yaml"), APPS).expect("a file");
    std::fs::write(system.path("tokens"), "* token\n").expect("a file");
    let listen = port.to_string();
    let args = ["serve", "--listen", &listen, "--data", "data", "--apps", "apps.yaml"];
    let log = std::fs::File::create(system.path("gateway.log")).expect("a log");
    let mut gateway = command(&args, system.folder.path());
    gateway.args(["--agent-token-file", "tokens"]).stdout(Stdio::null()).stderr(log);
    let gateway = Gateway(gateway.spawn().expect("it starts"));
    system.server.wait_until_ready();
    (system, gateway)
}

#[test]
fn an_agent_whose_clock_differs_works_and_the_difference_is_shown() {
    for shift in [HOUR_MS, -HOUR_MS, 0] {
        let (mut system, _gateway) = with_own_gateway();
        system.start_agent_with(&[], &[("ABIDE_CLOCK_SHIFT_MS", &shift.to_string())]);
        let spec = system.spec("p", "exec sleep 1000");
        assert_eq!(system.operate("p", 0, &spec).0, 0, "{}", system.log());
        let pid = system.pid("p").expect("a pid");
        assert_eq!(system.operate("p", 7, &spec).0, 0);
        assert!(!is_alive(pid));
        assert_eq!(system.operate("p", 1, &spec).0, 0);
        let folder = system.folder.path();
        let hosts: Value =
            serde_json::from_slice(&abide(folder, &system.server, &["get", "hosts", "-o", "json"]).stdout)
                .expect("JSON");
        let skew = hosts[0]["clock_skew_ms"].as_i64().unwrap_or_else(|| panic!("{hosts}"));
        assert!((skew - shift).abs() < 2_000, "{hosts}");
        let table = stdout(&abide(folder, &system.server, &["get", "hosts"]));
        let doctor = stdout(&abide(folder, &system.server, &["doctor"]));
        let log = std::fs::read_to_string(system.path("gateway.log")).expect("a log");
        let warned = log.contains("the agent's clock differs from the gateway's");
        match shift {
            0 => {
                assert!(table.contains(" ok "), "{table}");
                assert!(!doctor.contains("the clocks of") && !warned, "{doctor}{log}");
            }
            shift => {
                let direction = if shift > 0 { "s ahead" } else { "s behind" };
                assert!(table.contains(direction), "{table}");
                assert!(
                    doctor.contains("the clocks of 1 agent differ") && doctor.contains(direction),
                    "{doctor}"
                );
                assert!(warned, "{log}");
            }
        }
    }
}
