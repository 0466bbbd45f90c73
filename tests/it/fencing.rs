//! Fencing by lease generations: no app of another namespace, agent or long lease can forge one, and entries of
//! earlier versions are repaired.

use std::time::Duration;

use serde_json::{Value, json};

use crate::server::{Lines, Server};
use crate::support::{abide, keys, stderr, stdout};

const APPS: &str =
    "apps:\n  - {code: all, secret: s3cret}\n  - {code: web, secret: web-s3cret, namespaces: [web]}\n";
const TOKENS: &str = "0:10.0.0.1 one\n0:10.0.0.2 two\n";
const FORGED: u64 = u64::MAX;

fn server(folder: &std::path::Path) -> Server {
    Server::start(&folder.join("store.db"), Duration::from_secs(10), APPS, TOKENS)
}

fn body(namespace: &str, name: &str, host: &str) -> Value {
    let path = format!("/opt/{namespace}-{name}");
    json!({"meta": {"namespace": namespace, "name": name}, "hosts": [{"ip": host, "bk_cloud_id": 0}],
           "spec": {"identity": {"proc_name": name, "setup_path": path, "pid_path": "/run/p.pid", "user": "root"},
                    "control": {"start_cmd": "./run"}, "monitor_policy": {"auto_type": 1}}})
}

fn fenced(generation: u64) -> String {
    format!("X-Abide-Owner: team\r\nX-Abide-Generation: {generation}\r\n")
}

/// The only row of an answer, as an app with rights on every namespace.
fn register(server: &Server, namespace: &str, headers: &str) -> (i64, String) {
    let path = "/api/c/compapi/v2/gse/update_proc_info/";
    let answer = server.call_with("POST", path, headers, body(namespace, "p", "10.0.0.1"));
    only_row(&answer["data"])
}

fn only_row(rows: &Value) -> (i64, String) {
    let row = rows.as_object().and_then(|rows| rows.values().next()).expect("a row");
    (row["error_code"].as_i64().expect("a code"), row["error_msg"].as_str().expect("text").to_owned())
}

/// The same as the app `web`, which has no rights elsewhere.
fn as_web(server: &Server, call: &str, headers: &str, mut body: Value) -> Value {
    body["bk_app_code"] = json!("web");
    body["bk_app_secret"] = json!("web-s3cret");
    let path = format!("/api/c/compapi/v2/gse/{call}/");
    let (_, text) = server.send("POST", &path, headers, body.to_string().as_bytes());
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn state(server: &Server, ask: Value) -> Value {
    server.call("POST", "/api/abide/v1/state", ask)
}

fn record(server: &Server) -> Value {
    let entry = state(server, json!({"get": {"key": "lease/writer/team"}}));
    entry["data"]["value"].as_str().and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

#[test]
fn an_app_of_another_namespace_locks_no_owner_out() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server(folder.path());
    let generation = server.lease("team", "one");
    // Register, operate, groups: whatever takes a generation.
    let answer = as_web(&server, "update_proc_info", &fenced(FORGED), body("web", "x", "10.0.0.1"));
    let (code, message) = only_row(&answer["data"]);
    assert_eq!(code, 1_900_409, "{answer}");
    assert!(message.contains("no writer lease of owner team"), "{message}");
    let mut start = body("web", "x", "10.0.0.1");
    start["op_type"] = json!(0);
    for forged in [generation + 1, 1 << 40, FORGED] {
        let task = as_web(&server, "operate_proc", &fenced(forged), start.clone())["data"]["task_id"].clone();
        let rows = server.gse("get_proc_operate_result_v2", json!({"task_id": task}))["data"].clone();
        assert_eq!(only_row(&rows).0, 1_900_409, "{rows}");
    }
    let mut groups = body("web", "x", "10.0.0.1");
    groups["spec"] = json!({"process_group": []});
    let answer = as_web(&server, "set_process_group_info", &fenced(FORGED), groups);
    assert_eq!(only_row(&answer["data"]).0, 1_900_409, "{answer}");
    // The owner goes on, and so does the next holder.
    assert_eq!(register(&server, "shop", &fenced(generation)).0, 0);
    server.release("team", "one", generation);
    let next = server.lease("team", "two");
    assert_eq!(next, generation + 1);
    assert_eq!(register(&server, "shop", &fenced(next)).0, 0);
    assert_eq!(register(&server, "shop", &fenced(generation)).0, 1_900_409);
    // A call without a generation is not fenced.
    assert_eq!(as_web(&server, "update_proc_info", "", body("web", "x", "10.0.0.1"))["result"], true);
}

#[test]
fn a_generation_is_valid_while_its_lease_is_held() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server(folder.path());
    let (code, message) = register(&server, "shop", &fenced(1));
    assert!(code == 1_900_409 && message.contains("no writer lease"), "no lease was ever taken: {message}");
    let generation = server.lease_for("team", "one", 1);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(register(&server, "shop", &fenced(generation)).0, 0, "expired, and not taken by another");
    let next = server.lease("team", "two");
    assert_eq!(register(&server, "shop", &fenced(generation)).0, 1_900_409);
    server.release("team", "two", next);
    let (code, message) = register(&server, "shop", &fenced(next));
    assert!(code == 1_900_409 && message.contains("released"), "{message}");
    // What was done before is answered as before.
    let third = server.lease("team", "three");
    let named = format!("X-Abide-Op: once\r\n{}", fenced(third));
    assert_eq!(register(&server, "shop", &named).0, 0);
    server.take_over_lease("team", third);
    assert_eq!(register(&server, "shop", &named).0, 0);
    assert_eq!(register(&server, "shop", &fenced(third)).0, 1_900_409);
}

/// A fenced call is not remembered: its retry is evaluated again.
#[test]
fn a_fenced_call_runs_once_its_lease_is_held() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server(folder.path());
    let generation = server.lease("team", "one");
    let named = |op: &str| format!("X-Abide-Op: {op}\r\n{}", fenced(generation + 1));
    let operate = || {
        let mut start = body("shop", "p", "10.0.0.1");
        start["op_type"] = json!(0);
        let path = "/api/c/compapi/v2/gse/operate_proc/";
        let task = server.call_with("POST", path, &named("operate"), start)["data"]["task_id"].clone();
        only_row(&server.gse("get_proc_operate_result_v2", json!({"task_id": task}))["data"]).0
    };
    assert_eq!(register(&server, "shop", &named("register")).0, 1_900_409);
    assert_eq!(operate(), 1_900_409);
    server.release("team", "one", generation);
    assert_eq!(server.lease("team", "two"), generation + 1);
    assert_eq!(register(&server, "shop", &named("register")).0, 0);
    assert_ne!(operate(), 1_900_409);
}

/// A host's agent in the hands of an attacker with its token.
struct Thief<'a> {
    server: &'a Server,
    session: String,
    lines: Lines,
    seq: u64,
}

impl<'a> Thief<'a> {
    fn new(server: &'a Server, host: &str, token: &str) -> Thief<'a> {
        let headers = format!("Authorization: Bearer {token}\r\n");
        let ask = json!({"agent": token, "hosts": [host], "version": "1"}).to_string();
        let (_, text) = server.send("POST", "/api/abide/v1/agent/join", &headers, ask.as_bytes());
        let joined: Value = serde_json::from_str(&text).expect("JSON");
        let session = joined["data"]["session"].as_str().expect("a session").to_owned();
        let path = format!("/api/abide/v1/agent/stream?session={session}&after=0");
        let (status, lines) = server.stream(&path, &headers);
        assert_eq!(status, 200);
        Thief { server, session, lines, seq: 0 }
    }

    /// Answers the next operation.
    fn answer(&mut self, token: &str, code: i64, generation: Option<u64>) {
        let op = loop {
            let line = self.lines.next().expect("the stream goes on");
            if let Some(op) = line.get("op") {
                break op.clone();
            }
        };
        self.seq += 1;
        let content = generation.map(|generation| json!({"generation": generation}));
        let up = json!([{"seq": self.seq, "result": {"op_id": op["op_id"], "code": code, "message": "", "content": content}}]);
        let path = format!("/api/abide/v1/agent/tell?session={}", self.session);
        let headers = format!("Authorization: Bearer {token}\r\n");
        let (status, text) = self.server.send("POST", &path, &headers, up.to_string().as_bytes());
        assert_eq!(status, 200, "{text}");
    }
}

fn start(server: &Server, host: &str, generation: u64) -> Value {
    let mut start = body("shop", "p", host);
    start["op_type"] = json!(0);
    server.call_with("POST", "/api/c/compapi/v2/gse/operate_proc/", &fenced(generation), start)["data"]["task_id"]
        .clone()
}

fn result(server: &Server, task: &Value) -> i64 {
    only_row(&server.gse("get_proc_operate_result_v2", json!({"task_id": task}))["data"]).0
}

#[test]
fn one_stolen_agent_token_locks_no_owner_out() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server(folder.path());
    let (mut stolen, mut honest) =
        (Thief::new(&server, "0:10.0.0.1", "one"), Thief::new(&server, "0:10.0.0.2", "two"));
    let generation = server.lease("team", "holder");
    for lie in [FORGED, FORGED - 1, 1 << 53, 1 << 30] {
        let task = start(&server, "10.0.0.1", generation);
        stolen.answer("one", 1_900_409, Some(lie));
        assert_eq!(result(&server, &task), 1_900_409);
        assert_eq!(record(&server)["generation"], json!(generation), "after {lie}");
        assert_eq!(record(&server).get("floor"), None, "after {lie}");
    }
    // A credible number raises the next lease, and the present holder keeps its own: other hosts go on.
    let task = start(&server, "10.0.0.1", generation);
    stolen.answer("one", 1_900_409, Some(100));
    assert_eq!(result(&server, &task), 1_900_409);
    assert!(server.renew_lease("team", "holder", generation), "the holder's lease is not ended");
    let task = start(&server, "10.0.0.2", generation);
    honest.answer("two", 0, None);
    assert_eq!(result(&server, &task), 0, "another host works as before");
    server.release("team", "holder", generation);
    assert_eq!(server.lease("team", "next"), 101);
    let task = start(&server, "10.0.0.2", 101);
    honest.answer("two", 0, None);
    assert_eq!(result(&server, &task), 0);
}

#[test]
fn a_lease_ttl_is_capped_and_a_lease_key_is_read_only() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server(folder.path());
    let holder = json!({"id": "thief", "host": "elsewhere", "boot_id": "b", "pid": 1, "started": 1});
    let take = |lives: u64| {
        state(&server, json!({"take_lease": {"name": "writer/team", "holder": holder, "lives_ms": lives}}))
    };
    for years in [60_001, 1 << 40, u64::MAX] {
        let answer = take(years);
        assert!(answer["message"].as_str().expect("text").contains("at most 60000 ms"), "{answer}");
    }
    assert_eq!(take(60_000)["data"]["ours"]["generation"], 1);
    let renew = json!({"name": "writer/team", "holder": "thief", "generation": 1, "lives_ms": 1u64 << 40});
    assert_eq!(state(&server, json!({"renew_lease": renew}))["result"], false);
    let forged = json!({"generation": 1u64 << 50, "holder": holder, "expires": i64::MAX}).to_string();
    for (key, value) in [("lease/writer/team", json!(forged)), ("lease/writer/team", Value::Null)] {
        let answer = state(&server, json!({"txn": {"writes": [{"key": key, "value": value}]}}));
        assert_eq!(answer["result"], false, "{answer}");
    }
    let scoped = json!({"take_lease": {"name": "writer/team", "holder": holder, "lives_ms": 1000}, "bk_app_code": "web",
                        "bk_app_secret": "web-s3cret"});
    let (_, text) = server.send("POST", "/api/abide/v1/state", "", scoped.to_string().as_bytes());
    assert!(text.contains("app web lacks owner team"), "{text}");
}

/// A file that an earlier version wrote: a lease of years, with a generation that no holder had.
#[test]
fn lease_list_shows_and_lease_reset_repairs() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("store.db");
    let holder = json!({"id": "thief", "host": "elsewhere", "boot_id": "b", "pid": 7, "started": 1});
    let stuck = |generation: u64| {
        json!({"generation": generation, "holder": holder, "expires": 4_000_000_000_000i64}).to_string()
    };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        use abide::store::{Embedded, Store, Txn};
        let store = Embedded::open(&file).expect("it opens");
        let txn = Txn::put("lease/writer/team", stuck(FORGED)).and(Txn::put("lease/writer/shop", stuck(9)));
        store.txn(txn).await.expect("a write");
    });
    let server = server(folder.path());
    server.write_target(folder.path());
    let run = |args: &[&str]| abide(&[args, &["--target", "there"]].concat(), folder.path(), b"");
    let listed = run(&["lease", "list", "-o", "json"]);
    let rows: Value =
        serde_json::from_str(&stdout(&listed)).unwrap_or_else(|_| panic!("{}", stderr(&listed)));
    assert_eq!(
        (&rows[0]["owner"], &rows[0]["kind"], &rows[0]["generation"], &rows[0]["holder"]["pid"]),
        (&json!("shop"), &json!("writer"), &json!(9), &json!(7)),
        "{rows}"
    );
    let text = stdout(&run(&["lease", "list"]));
    assert!(text.contains("shop") && text.contains("elsewhere (process 7"), "{text}");
    // It is stuck: no holder's lease ends in years.
    let reset = run(&["lease", "reset", "shop"]);
    assert_eq!(reset.status.code(), Some(0), "{}", stderr(&reset));
    assert_eq!(server.lease("shop", "me"), 11);
    // The holder renews it: only with --force.
    let reset = run(&["lease", "reset", "shop"]);
    assert_eq!(reset.status.code(), Some(6), "{}", stderr(&reset));
    assert!(stderr(&reset).contains("--force"), "{}", stderr(&reset));
    assert!(server.renew_lease("shop", "me", 11));
    assert_eq!(run(&["lease", "reset", "shop", "--force"]).status.code(), Some(0));
    assert!(!server.renew_lease("shop", "me", 11));
    // Agents that remember more than the store.
    assert_eq!(run(&["lease", "reset", "team", "--generation", "500"]).status.code(), Some(0));
    assert_eq!(server.lease("team", "me"), 502);
    assert_eq!(run(&["lease", "reset", "mistyped"]).status.code(), Some(1));
    let too_far = format!("{}", u64::MAX);
    assert_eq!(run(&["lease", "reset", "team", "--generation", &too_far]).status.code(), Some(64));
}

#[test]
fn leases_of_a_state_folder_are_listed_and_reset() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = server(folder.path());
    server.write_target(folder.path());
    let run = |args: &[&str]| {
        abide(&[args, &["--target", "there", "--state", "state"]].concat(), folder.path(), b"")
    };
    assert_eq!(stdout(&run(&["lease", "list", "-o", "json"])).trim(), "[]");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        use abide::store::{AnyStore, Embedded, Holder, Store};
        let file = folder.path().join("state/state.db");
        let store = Embedded::open_keyed(&file, &keys(folder.path())).expect("it opens");
        let store = AnyStore::here(store, "there");
        let minute = Duration::from_secs(60);
        let holder = Holder { host: "elsewhere".into(), ..Holder::this("x") };
        store.take_lease("writer/team", &holder, minute).await.expect("taken");
    });
    let rows: Value = serde_json::from_str(&stdout(&run(&["lease", "list", "-o", "json"]))).expect("JSON");
    assert_eq!((&rows[0]["owner"], &rows[0]["generation"]), (&json!("team"), &json!(1)), "{rows}");
    assert_eq!(run(&["lease", "reset", "team"]).status.code(), Some(6));
    let reset = run(&["lease", "reset", "team", "--force", "-o", "json"]);
    assert_eq!(reset.status.code(), Some(0), "{}", stderr(&reset));
    let row: Value = serde_json::from_str(&stdout(&reset)).expect("JSON");
    assert_eq!((&row["kind"], &row["generation"]), (&json!("writer"), &json!(2)), "{row}");
}
