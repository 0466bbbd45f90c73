//! Cut sessions between agent and gateway: each operation runs once. The processes count their own runs.

use std::collections::BTreeMap;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::cutting_proxy::{Direction, Fate, Message, Proxy, Rule};
use crate::server::Server;
use crate::support::{command, until};
use crate::system::{APPS, System, lines};

/// Which message is cut, and whether the next stream is held back until a result was acknowledged.
#[derive(Default)]
struct Script {
    /// Messages since the script was armed; `None`: it is not.
    seen: Option<usize>,
    cut_at: Option<usize>,
    /// Cuts the first message of this direction that belongs to a result.
    cut_result: Option<Direction>,
    holds: bool,
    is_cut: bool,
    /// A result was acknowledged after the cut.
    acknowledged: Option<Instant>,
}

/// Long enough for the agent to read an acknowledgement before the stream.
const AFTER_ACK: Duration = Duration::from_millis(150);
const LONGEST_HOLD: Duration = Duration::from_secs(3);

type Shared = Arc<Mutex<Script>>;

fn rule(script: &Shared) -> Rule {
    let script = Arc::clone(script);
    Arc::new(move |message: &Message<'_>| {
        let begin = Instant::now();
        let mut counted = false;
        loop {
            let mut script = script.lock().expect("no panic");
            let Some(seen) = script.seen else { return Fate::Pass };
            if !std::mem::replace(&mut counted, true) {
                script.seen = Some(seen + 1);
                let by_result = message.is_result() && script.cut_result == Some(message.direction);
                if !script.is_cut && (script.cut_at == Some(seen + 1) || by_result) {
                    script.is_cut = true;
                    return Fate::Cut;
                }
                if script.is_cut && message.is_result() && message.direction == Direction::Down {
                    script.acknowledged = Some(Instant::now());
                }
            }
            let held = script.holds && script.is_cut && message.call == "stream";
            let released = script.acknowledged.is_some_and(|at| at.elapsed() > AFTER_ACK);
            if !held || message.direction == Direction::Up || released || begin.elapsed() > LONGEST_HOLD {
                return Fate::Pass;
            }
            drop(script);
            std::thread::sleep(Duration::from_millis(5));
        }
    })
}

/// A system whose agent joins through a proxy.
fn behind_a_proxy() -> (System, Proxy, Shared) {
    let mut system = System::without_agent();
    let script = Shared::default();
    let proxy = Proxy::to(system.server.address, rule(&script));
    system.start_agent_at(proxy.address, &[], &[]);
    (system, proxy, script)
}

/// What runs once, is reloaded and is restarted; each run leaves a line.
struct Scenario {
    once: Value,
    reloaded: Value,
    restarted: Value,
}

impl Scenario {
    fn prepare(system: &System) -> Scenario {
        let mut once = system.spec("once", "echo ran >> once-runs");
        once["monitor_policy"]["auto_type"] = json!(2);
        let mut reloaded = system.spec("reloaded", "exec sleep 1000");
        reloaded["control"]["reload_cmd"] = json!("echo ran >> reloads");
        let restarted = system.spec("restarted", "echo ran >> restarts; exec sleep 1000");
        assert_eq!(system.operate("reloaded", 0, &reloaded).0, 0);
        assert_eq!(system.operate("restarted", 0, &restarted).0, 0);
        until("it wrote its line", || lines(&system.path("restarts")) == 1);
        Scenario { once, reloaded, restarted }
    }

    fn run(&self, system: &System, what: &str) {
        let all =
            [("once", 0, &self.once), ("reloaded", 8, &self.reloaded), ("restarted", 7, &self.restarted)];
        let tasks = all.map(|(name, op, spec)| (name, system.begin(name, op, spec)));
        for (name, task) in tasks {
            let row = system.row(name, &task);
            assert_eq!(row["error_code"], 0, "{what}: {name}: {row}\n{}", system.log());
        }
        self.settle(system);
        for (file, runs) in [("once-runs", 1), ("reloads", 1), ("restarts", 2)] {
            let log = system.log();
            until(&format!("{what}: {file}"), || lines(&system.path(file)) >= runs);
            assert_eq!(lines(&system.path(file)), runs, "{what}: {file}\n{log}");
        }
    }

    /// A status check comes after everything on the stream, and after every operation on its instance.
    fn settle(&self, system: &System) {
        for (name, spec) in
            [("once", &self.once), ("reloaded", &self.reloaded), ("restarted", &self.restarted)]
        {
            assert_eq!(system.operate(name, 2, spec).0, 0);
        }
        until("the run that ends has ended", || !system.facts("once").2);
    }
}

#[test]
fn a_lost_result_and_a_late_stream_do_not_run_an_operation_again() {
    for direction in [Direction::Up, Direction::Down] {
        let (system, _proxy, script) = behind_a_proxy();
        let scenario = Scenario::prepare(&system);
        *script.lock().expect("no panic") =
            Script { seen: Some(0), cut_result: Some(direction), holds: true, ..Script::default() };
        scenario.run(&system, &format!("a lost result, {direction:?}"));
        assert!(script.lock().expect("no panic").is_cut, "nothing was cut");
    }
}

#[test]
fn a_session_that_breaks_at_any_message_runs_each_operation_once() {
    // How many messages there are when nothing breaks, with some of the time after it.
    let messages = {
        let (system, _proxy, script) = behind_a_proxy();
        let scenario = Scenario::prepare(&system);
        script.lock().expect("no panic").seen = Some(0);
        scenario.run(&system, "uncut");
        script.lock().expect("no panic").seen.expect("it was armed")
    };
    let cases: Vec<(usize, bool)> = (1..=messages).flat_map(|nth| [(nth, false), (nth, true)]).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|threads| {
        for _ in 0..4 {
            threads.spawn(|| {
                while let Some((nth, holds)) = cases.get(next.fetch_add(1, Ordering::Relaxed)).copied() {
                    let (system, _proxy, script) = behind_a_proxy();
                    let scenario = Scenario::prepare(&system);
                    *script.lock().expect("no panic") =
                        Script { seen: Some(0), cut_at: Some(nth), holds, ..Script::default() };
                    scenario
                        .run(&system, &format!("cut at message {nth} of {messages}, stream held: {holds}"));
                }
            });
        }
    });
}

/// A gateway in a process of its own, at an address that stays.
struct Killable {
    child: Child,
}

impl Killable {
    fn start(system: &System, env: &[(&str, &str)]) -> Killable {
        std::fs::write(system.path("apps.yaml"), APPS).expect("a file");
        std::fs::write(system.path("tokens"), "* token\n").expect("a file");
        let address = system.server.address.to_string();
        let args = ["serve", "--listen", &address, "--data", "data", "--apps", "apps.yaml"];
        let log = std::fs::File::options().append(true).create(true).open(system.path("gateway.log"));
        let child = command(&args, system.folder.path())
            .args(["--agent-token-file", "tokens"])
            .envs(env.iter().copied())
            .stdout(Stdio::null())
            .stderr(log.expect("a log"))
            .spawn()
            .expect("it starts");
        system.server.wait_until_ready();
        Killable { child }
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Killable {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Starts of processes that run once, in one call under a name, until a gateway answers it.
fn begin_all(system: &System, call: &str, names: &[String]) -> Value {
    let request = |name: &String| {
        let mut spec = system.spec(name, &format!("echo ran >> runs-{name}"));
        spec["monitor_policy"]["auto_type"] = json!(2);
        json!({"meta": {"namespace": "web", "name": name}, "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}],
               "op_type": 0, "spec": spec})
    };
    let requests: Vec<Value> = names.iter().map(request).collect();
    let body = json!({"proc_operate_req": requests, "bk_app_code": "all", "bk_app_secret": "s3cret"});
    let mut task = Value::Null;
    until("a gateway takes it", || {
        let path = "/api/c/compapi/v2/gse/operate_proc_multi/";
        let headers = format!("X-Abide-Op: {call}\r\n");
        let (_, text) = system.server.send("POST", path, &headers, body.to_string().as_bytes());
        let answer: Value = serde_json::from_str(&text).unwrap_or_default();
        task = answer["data"]["task_id"].clone();
        task.is_string()
    });
    task
}

#[test]
fn a_gateway_that_is_killed_under_work_runs_nothing_twice() {
    const AT_ONCE: usize = 100;
    let mut system = System::without_agent();
    let port = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("an address");
    system.server = Server::at(port);
    let mut gateway = Killable::start(&system, &[]);
    system.start_agent();
    let soak: usize = std::env::var("ABIDE_SOAK").ok().and_then(|n| n.parse().ok()).unwrap_or(1);
    let mut tasks: BTreeMap<String, Value> = BTreeMap::new();
    for round in 0..6 * soak {
        let names: Vec<String> = (0..AT_ONCE).map(|nth| format!("once-{round}-{nth}")).collect();
        let begun = std::thread::scope(|threads| {
            let begun = threads.spawn(|| begin_all(&system, &format!("call-{round}"), &names));
            // In the middle of them: some have run, and not all results are there.
            until("some ran", || lines_of(&system, &names) > (round % 6) * AT_ONCE / 8);
            gateway.kill();
            gateway = Killable::start(&system, &[]);
            begun.join().expect("no panic")
        });
        tasks.extend(names.into_iter().map(|name| (name, begun.clone())));
    }
    for (name, task) in &tasks {
        let row = system.row(name, task);
        assert_eq!(row["error_code"], 0, "{name}: {row}\n{}", system.log());
    }
    // After everything that a stream may still contain.
    let last = system.spec("last", "true");
    assert_eq!(system.operate("last", 2, &last).0, 0);
    for name in tasks.keys() {
        until("it ended", || !system.facts(name).2);
    }
    let twice: Vec<&String> =
        tasks.keys().filter(|name| lines(&system.path(&format!("runs-{name}"))) != 1).collect();
    assert!(twice.is_empty(), "{} of {} did not run once: {twice:?}", twice.len(), tasks.len());
}

fn lines_of(system: &System, names: &[String]) -> usize {
    names.iter().map(|name| lines(&system.path(&format!("runs-{name}")))).sum()
}
