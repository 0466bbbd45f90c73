//! Limits of the gateway for agents: number and size of messages, and absence measured by a monotonic clock.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use abide::model::{EnvValue, Identity, Spec};
use abide::store::{Embedded, Store};
use serde_json::{Value, json};

use crate::apply::KillOnDrop;
use crate::fixtures::workspace::Workspace;
use crate::server::Server;
use crate::support::{command, until};
use crate::system::APPS;

const HOST: &str = "0:10.0.0.1";

fn server(folder: &std::path::Path) -> Server {
    Server::start(&folder.join("store.db"), Duration::from_secs(60), APPS, "* token\n")
}

fn send(server: &Server, path: &str, body: &Value) -> Value {
    let headers = "Authorization: Bearer token\r\n";
    let (_, text) =
        server.send("POST", &format!("/api/abide/v1/agent/{path}"), headers, body.to_string().as_bytes());
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn join(server: &Server, agent: &str) -> Value {
    send(server, "join", &json!({"agent": agent, "hosts": [HOST], "version": "1"}))
}

fn report(seq: u64, name: &str, message: &str) -> Value {
    json!({"seq": seq, "report": {"instance": format!("{HOST}:web:{name}"), "at": 1, "hosted": true, "pid": null,
                                  "live": null, "message": message}})
}

fn spec(name: &str) -> Value {
    json!({"identity": {"proc_name": name, "setup_path": "/opt", "pid_path": format!("/run/{name}.pid"), "user": "root"},
           "control": {"start_cmd": "./run"}, "monitor_policy": {"auto_type": 1}})
}

fn body(name: &str) -> Value {
    json!({"meta": {"namespace": "web", "name": name}, "hosts": [{"ip": "10.0.0.1", "bk_cloud_id": 0}],
           "spec": spec(name), "op_type": 0})
}

fn message(server: &Server, name: &str) -> String {
    let page = server.call("GET", &format!("/api/abide/v1/processes?name={name}"), json!({}));
    page["data"]["items"][0]["message"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn an_agent_cannot_fill_the_gateway_with_messages() {
    let folder = Workspace::new();
    let server = server(folder.path());
    let refused = join(&server, &"a".repeat(300));
    assert!(refused["message"].as_str().is_some_and(|why| why.contains("256 bytes")), "{refused}");
    let session = join(&server, "a")["data"]["session"].as_str().expect("a session").to_owned();
    let tell = format!("tell?session={session}");
    for name in ["small", "large"] {
        assert_eq!(server.gse("register_proc_info", body(name))["result"], true);
    }
    // One report is too large: it is ignored, and the other one is taken.
    let told =
        send(&server, &tell, &json!([report(1, "large", &"x".repeat(5 << 20)), report(2, "small", "well")]));
    assert_eq!(told["data"]["acked"], 2, "{told}");
    assert_eq!((message(&server, "small").as_str(), message(&server, "large").as_str()), ("well", ""));
    // Far more messages than an agent sends at once.
    let many: Vec<Value> = (0..10_001).map(|nth| report(3 + nth, "small", "many")).collect();
    let refused = send(&server, &tell, &json!(many));
    assert!(refused["message"].as_str().is_some_and(|why| why.contains("at most 10000")), "{refused:.300}");
    assert_eq!(message(&server, "small"), "well");
    let told = send(&server, &tell, &json!(many[..10_000]));
    assert_eq!(told["data"]["acked"], 10_002, "a generous number: {told:.300}");
    assert_eq!(message(&server, "small"), "many");
    // A result is taken, shortened: its caller waits for it.
    let task = server.gse("operate_proc", body("small"))["data"]["task_id"].clone();
    let result = json!({"seq": 10_003, "result": {"op_id": format!("{}/0", task.as_str().expect("a task")), "code": 65535,
                                                  "message": "y".repeat(1 << 20)}});
    assert_eq!(send(&server, &tell, &json!([result]))["data"]["acked"], 10_003);
    let rows = server.gse("get_proc_operate_result_v2", json!({"task_id": task}));
    let row = &rows["data"][format!("{HOST}:web:small")];
    let text = row["error_msg"].as_str().unwrap_or_default();
    assert!(row["error_code"] == 65535 && text.len() < 100_000, "{}", text.len());
    assert!(text.ends_with("(shortened by the gateway: the agent's result is too large)"));
}

#[test]
fn a_step_of_the_wall_clock_loses_no_agent() {
    let folder = Workspace::new();
    let path = |name: &str| folder.path().join(name);
    for (name, content) in [("apps.yaml", APPS), ("tokens", "* token\n"), ("shift", "0")] {
        std::fs::write(path(name), content).expect("a file");
        std::fs::set_permissions(path(name), std::fs::Permissions::from_mode(0o600)).expect("private");
    }
    let listen = ["serve", "--listen", "127.0.0.1:0", "--data", "gateway"];
    let args = [&listen[..], &["--apps", "apps.yaml", "--agent-token-file", "tokens"]].concat();
    let mut gateway = command(&args, folder.path())
        .env("ABIDE_CLOCK_SHIFT_FILE", path("shift"))
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map(KillOnDrop)
        .expect("it starts");
    let mut line = String::new();
    BufReader::new(gateway.0.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    let address = line.trim().strip_prefix("ready http://").expect("an address").parse().expect("an address");
    let server = Server::at(address);
    let begun = Instant::now();
    let task = server.gse("operate_proc", body("p"))["data"]["task_id"].clone();
    std::fs::write(path("shift"), "86400000").expect("a file");
    let mut code = Value::Null;
    until("it is given up", || {
        let rows = server.gse("get_proc_operate_result_v2", json!({"task_id": task}));
        code = rows["data"][format!("{HOST}:web:p")]["error_code"].clone();
        code != 115
    });
    assert_eq!(code, 117);
    assert!(
        begun.elapsed() > Duration::from_secs(8),
        "given up after {:?}, as the clock stepped",
        begun.elapsed()
    );
}

/// Bytes of all files in a folder.
fn bytes_in(folder: &std::path::Path) -> u64 {
    let sizes = std::fs::read_dir(folder).expect("a folder").filter_map(|entry| entry.ok()?.metadata().ok());
    sizes.map(|meta| meta.len()).sum()
}

fn metric(server: &Server, name: &str) -> u64 {
    let text = server.send("GET", "/metrics", crate::listener_attacks::AUTH, b"").1;
    let line = text.lines().find(|line| line.starts_with(&format!("{name} "))).unwrap_or_default();
    line.rsplit(' ').next().and_then(|number| number.parse().ok()).unwrap_or_else(|| panic!("{name}: {text}"))
}

const MIB: usize = 1 << 20;

#[test]
fn new_instances_of_one_host_cannot_fill_the_store() {
    let folder = Workspace::new();
    let server = server(folder.path());
    let session = join(&server, "a")["data"]["session"].as_str().expect("a session").to_owned();
    let tell = format!("tell?session={session}");
    let large = "x".repeat(3 * MIB);
    for call in 0..10u64 {
        let reports: Vec<Value> =
            (1..=4).map(|nth| report(4 * call + nth, &format!("i{call}-{nth}"), &large)).collect();
        assert_eq!(send(&server, &tell, &json!(reports))["data"]["acked"], 4 * call + 4);
    }
    assert!(metric(&server, "abide_gateway_reports_ignored_total") >= 5, "120 MiB do not fit");
    // Each name of an agent has a counter; the oldest are deleted.
    for nth in 0..40 {
        let session =
            join(&server, &format!("a{nth}"))["data"]["session"].as_str().expect("a session").to_owned();
        let told = send(&server, &format!("tell?session={session}"), &json!([report(1, "i0-1", "small")]));
        assert_eq!(told["data"]["acked"], 1, "{told}");
    }
    let store = Embedded::open(&folder.path().join("store.db")).expect("it opens");
    let counters = crate::store::run(store.range("agent/", None, 100)).expect("a page").entries;
    assert_eq!(counters.len(), 16);
    let stored = bytes_in(folder.path()) as usize;
    // Entries, change log and WAL.
    assert!(stored < 64 * MIB + 128 * MIB + 64 * MIB, "{} MiB on disk", stored / MIB);
    // Other hosts are not affected.
    let join = json!({"agent": "b", "hosts": ["0:10.0.0.2"], "version": "1"});
    let session = send(&server, "join", &join)["data"]["session"].as_str().expect("a session").to_owned();
    let mut other = body("other");
    other["hosts"][0]["ip"] = json!("10.0.0.2");
    assert_eq!(server.gse("register_proc_info", other)["result"], true);
    let mut honest = report(1, "other", "well");
    honest["report"]["instance"] = json!("0:10.0.0.2:web:other");
    assert_eq!(send(&server, &format!("tell?session={session}"), &json!([honest]))["data"]["acked"], 1);
    assert_eq!(message(&server, "other"), "well");
}

#[test]
fn repeated_reports_are_deferred_and_the_newest_is_stored() {
    let folder = Workspace::new();
    let server = server(folder.path());
    assert_eq!(server.gse("register_proc_info", body("noisy"))["result"], true);
    let session = join(&server, "a")["data"]["session"].as_str().expect("a session").to_owned();
    let tell = format!("tell?session={session}");
    let large = "x".repeat(3 * MIB);
    for seq in 1..=60 {
        let text = format!("{seq} {large}");
        assert_eq!(send(&server, &tell, &json!([report(seq, "noisy", &text)]))["data"]["acked"], seq);
    }
    let stored = message(&server, "noisy").split(' ').next().map(str::to_owned);
    assert_ne!(stored.as_deref(), Some("60"), "180 MiB are more than the rate allows");
    assert!(bytes_in(folder.path()) as usize <= 300 * MIB, "{} MiB", bytes_in(folder.path()) as usize / MIB);
    // Each call of the agent stores deferred reports as the rate allows.
    until("the newest report is stored", || {
        assert_eq!(send(&server, &tell, &json!([]))["data"]["acked"], 60);
        message(&server, "noisy").starts_with("60 ")
    });
    assert_eq!(metric(&server, "abide_gateway_reports_ignored_total"), 0, "all but the newest are replaced");
}

#[test]
fn a_host_with_thousands_of_ordinary_instances_fits() {
    let folder = Workspace::new();
    let server = server(folder.path());
    let session = join(&server, "a")["data"]["session"].as_str().expect("a session").to_owned();
    let tell = format!("tell?session={session}");
    let ordinary = |seq: u64| {
        let identity = Identity {
            proc_name: "p".to_owned(),
            setup_path: "/opt/p".to_owned(),
            pid_path: format!("/run/p{seq}.pid"),
            user: Some("app".to_owned()),
            value_key: Some(format!("p{seq}")),
            ..Identity::default()
        };
        let mut spec = Spec { identity, ..Spec::default() };
        // 2 KiB, which is more than most specifications have.
        spec.env.insert("SETTINGS".to_owned(), EnvValue::Text("s".repeat(1800)));
        let given = json!({"spec": spec, "owner": "team"});
        json!({"seq": seq, "report": {"instance": format!("{HOST}:web:p{seq}"), "at": 1, "hosted": true, "pid": 100,
               "given": given.clone(), "live": given, "health": "Healthy"}})
    };
    for call in 0..5u64 {
        let reports: Vec<Value> = (1..=1000).map(|nth| ordinary(1000 * call + nth)).collect();
        let told = send(&server, &tell, &json!(reports));
        assert_eq!(told["data"]["acked"], 1000 * call + 1000, "{told}");
    }
    assert_eq!(metric(&server, "abide_gateway_reports_ignored_total"), 0);
    assert_eq!(metric(&server, "abide_gateway_registered"), 5000);
}
