//! OpenAPI documents of the gateway and of the controller: every route is called, and each real answer is valid against
//! the described schema.

use std::collections::BTreeSet;
use std::time::Duration;

use abide::gateway::routes;
use serde_json::{Value, json};

use crate::apply::Machine;
use crate::controller_api::{Events, address, get, send, token};
use crate::fixtures::schemas::{assert_accepted, assert_described};
use crate::server::Server;
use crate::support::until;
use crate::watch::watch;

const APPS: &str = "apps:\n  - {code: all, secret: s3cret}\n";
const APP: &str = "Authorization: Basic YWxsOnMzY3JldA==\r\n";
const AGENT: &str = "Authorization: Bearer one\r\n";
const KEY: &str = "0:10.0.0.1:web:p";

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn spec() -> Value {
    json!({"identity": {"proc_name": "p", "setup_path": "/opt/p", "pid_path": "/run/p.pid", "user": "root"},
           "control": {"start_cmd": "./run"}, "monitor_policy": {"auto_type": 1},
           "env": {"PASSWORD": {"value": "x", "secret": true}, "MODE": "fast"}})
}

fn process() -> Value {
    json!({"meta": {"namespace": "web", "name": "p", "labels": {"abide_owner": "shop", "tier": 1}},
           "hosts": [{"ip": "10.0.0.1", "bk_cloud_id": 0}], "spec": spec(), "op_type": 0})
}

/// The state requests of a controller, in an order in which each succeeds.
fn store_requests() -> Vec<Value> {
    let holder = |id: &str| json!({"id": id, "host": "elsewhere", "boot_id": "b", "pid": 1, "started": 1});
    let take =
        |id: &str| json!({"take_lease": {"name": "writer/shop", "holder": holder(id), "lives_ms": 60_000}});
    let write = |compared: u64| json!({"txn": {"compares": [{"key": "hold/x", "changed": compared}], "writes": [{"key": "hold/x", "value": "{}"}]}});
    vec![
        json!({"get": {"key": "hold/x"}}),
        write(0),
        write(0),
        json!({"get": {"key": "hold/x"}}),
        json!({"range": {"prefix": "hold/", "limit": 1}}),
        json!({"slice": {"prefix": "hold/", "skip": 0, "limit": 1}}),
        json!({"changes": {"prefix": "hold/", "after": 0, "wait_ms": 1000}}),
        take("one"),
        take("two"),
        json!({"reset_lease": {"name": "writer/shop", "above": 7, "force": false}}),
        json!({"renew_lease": {"name": "writer/shop", "holder": "one", "generation": 1, "lives_ms": 60_000}}),
        json!({"release_lease": {"name": "writer/shop", "holder": "one", "generation": 1}}),
        json!({"reset_lease": {"name": "writer/shop", "above": 7, "force": false}}),
    ]
}

/// A gateway with a session of one agent.
struct Called<'a> {
    server: &'a Server,
    document: Value,
    session: String,
    task: Value,
    job_task: Value,
}

impl Called<'_> {
    /// The queries and bodies of a successful call. A new call has none, and fails the test.
    fn requests(&self, call: &str) -> Vec<(String, Option<Value>)> {
        let body = |body: Value| vec![(String::new(), Some(body))];
        let query = |queries: &[&str]| queries.iter().map(|query| ((*query).to_owned(), None)).collect();
        let job = |op: i64, owner: &str| {
            let process = json!({"proc_name": "j", "setup_path": "/opt/j", "pid_path": "/run/j.pid", "type": 1, owner: "ann",
                                 "start_cmd": "./run", "cpu_lmt": 20, "ip_list": [{"ip": "10.0.0.1", "bk_cloud_id": 0}]});
            json!({"bk_biz_id": 1, "op_type": op, "process_infos": [process]})
        };
        let group = json!({"name": "g", "resource": {"cpu_pool_limit": 50}});
        match call {
            "register" | "update" | "unregister" | "operate" | "status" | "agents" | "groups" => {
                body(process())
            }
            "operate_multi" => body(json!({"proc_operate_req": [process()]})),
            "result" => body(json!({"task_id": self.task})),
            "sync" => body(json!({"meta": {"namespace": "web"}, "page": {"start": 0, "limit": 10}})),
            "set_groups" => {
                body(json!({"meta": {"namespace": "web"}, "hosts": [{"ip": "10.0.0.1", "bk_cloud_id": 0}],
                                        "spec": {"process_group": [group]}}))
            }
            "manage_proc" => body(job(1, "proc_owner")),
            "operate_process" => body(job(0, "contact")),
            "job_result" => body(json!({"bk_gse_taskid": self.job_task})),
            "processes" => query(&["", "?brief=1", "?limit=1", "?namespace=none"]),
            "process_digests" => query(&["", "?limit=1", "?namespace=none"]),
            "hosts" => query(&["", "?brief=1"]),
            "tasks" => query(&["", "?op=none"]),
            "state" => store_requests().into_iter().map(|one| (String::new(), Some(one))).collect(),
            "rename" => {
                let to = KEY.replace(":p", ":q");
                body(json!({"from": KEY, "to": to, "spec": spec(), "meta": {"namespace": "web"}}))
            }
            "join" => body(json!({"agent": "b", "hosts": ["0:10.0.0.2"], "version": "1"})),
            "tell" => {
                vec![(format!("?session={}", self.session), Some(json!([{"seq": 2, "report": report()}])))]
            }
            "health" | "ready" | "description" | "access" => query(&[""]),
            // Text, streams, and an answer of an agent, which its own test compares.
            "metrics" | "watch" | "stream" | "logs" | "figures" => Vec::new(),
            // These need a CA, which their own tests have.
            "enroll" | "renew_certificate" | "create_join_token" | "revoke_join_token" | "revoke_host" => {
                Vec::new()
            }
            "join_tokens" => query(&[""]),
            // These need a gateway with a data folder, which their own test has.
            "audit" | "verify_audit" => Vec::new(),
            "agent_figures" => {
                let rows = json!([[KEY, [100, 2000, 5, 1, 1]], [KEY.replace(":p", ":q"), null]]);
                let update = json!({"cores": 2, "mem_kb": 4000, "complete": true, "rows": rows});
                vec![(format!("?session={}", self.session), Some(update))]
            }
            "agent_logs" => {
                let chunk = json!({"id": "none", "text": "a line\n", "cursor": "{}", "end": true});
                vec![(format!("?session={}", self.session), Some(chunk))]
            }
            other => panic!("the test has no request for {other}"),
        }
    }

    fn call(
        &self,
        method: &str,
        path: &str,
        query: &str,
        headers: &str,
        body: Option<&Value>,
    ) -> (u16, Value) {
        let text = body.map(Value::to_string).unwrap_or_default();
        let (status, answer) = self.server.send(method, &format!("{path}{query}"), headers, text.as_bytes());
        (status, parsed(&answer))
    }

    fn succeeds(&self, method: &str, path: &str, call: &str, headers: &str) {
        for (query, body) in self.requests(call) {
            if let Some(body) = &body {
                // The groups of a pool are not part of a spec.
                if call != "set_groups" {
                    assert_accepted(&self.document, method, path, body);
                }
            }
            let (status, answer) = self.call(method, path, &query, headers, body.as_ref());
            assert!(
                status == 200 && answer.get("result").is_none_or(|well| *well == true),
                "{path} {status} {answer}"
            );
            assert_described(&self.document, method, path, status, &answer);
        }
    }
}

fn report() -> Value {
    let live = json!({"spec": {"identity": {"proc_name": "p", "setup_path": "/opt/p", "pid_path": "/run/p.pid", "user": "root"}}});
    json!({"instance": KEY, "at": 1_800_000_000_000i64, "hosted": true, "pid": 4711, "live": live, "health": "Healthy",
           "since": 1_700_000_000_000i64, "started": 1_700_000_000_000i64, "config": [["/etc/p", "differs"]], "cpu": 1.5})
}

fn called(server: &Server) -> Called<'_> {
    let document = parsed(&server.send("GET", "/openapi.json", APP, b"").1);
    let join = json!({"agent": "a", "hosts": ["0:10.0.0.1"], "version": "1"}).to_string();
    let joined = parsed(&server.send("POST", "/api/abide/v1/agent/join", AGENT, join.as_bytes()).1);
    let session = joined["data"]["session"].as_str().expect("a session").to_owned();
    server.gse("register_proc_info", process());
    let task = server.gse("operate_proc", process())["data"]["task_id"].clone();
    let mut called = Called { server, document, session, task, job_task: Value::Null };
    let (_, job) = called.requests("operate_process").remove(0);
    let path = "/api/c/compapi/v2/job/operate_process/";
    called.job_task = called.call("POST", path, "", APP, job.as_ref()).1["data"]["bk_gse_taskid"].clone();
    let tell = json!([{"seq": 1, "report": report()}]);
    called.call(
        "POST",
        "/api/abide/v1/agent/tell",
        &format!("?session={}", called.session),
        AGENT,
        Some(&tell),
    );
    until("the task is queued", || {
        server.gse("get_proc_operate_result", json!({"task_id": called.task}))["result"] == true
    });
    called
}

#[test]
fn every_answer_of_the_gateway_is_as_described() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = Server::start(&folder.path().join("store.db"), Duration::from_secs(60), APPS, "* one\n");
    let called = called(&server);
    let document = &called.document;
    let described: usize = document["paths"]
        .as_object()
        .expect("paths")
        .values()
        .map(|path| path.as_object().map_or(0, |all| all.len()))
        .sum();
    assert_eq!(described, routes::all().count(), "a route is described that does not exist");
    for (method, path, call) in routes::all() {
        let headers = match call.rule() {
            routes::RouteRule::Public | routes::RouteRule::JoinToken => "",
            routes::RouteRule::Agent => AGENT,
            routes::RouteRule::App(..) => APP,
        };
        called.succeeds(method, &path, call.word(), headers);
        if call.rule() == routes::RouteRule::Public {
            continue;
        }
        let (status, answer) = called.call(method, &path, "", "", None);
        assert_eq!(status, 401, "{path} without credentials");
        assert_described(document, method, &path, status, &answer);
        if document["paths"][&path][method.to_lowercase()]["requestBody"].is_object() {
            let (status, answer) = called.call(method, &path, "", headers, Some(&json!("nonsense")));
            assert!(answer["result"] == false, "{path}: {answer}");
            assert_described(document, method, &path, status, &answer);
        }
    }
    // Statuses of single calls.
    let (_, again) = called.requests("rename").remove(0);
    let taken = again.map(|mut body| {
        body["to"] = json!(KEY);
        body
    });
    for (path, headers, body, expected) in
        [("/api/abide/v1/rename", APP, taken, 409), ("/api/abide/v1/agent/tell", AGENT, Some(json!([])), 410)]
    {
        let (status, answer) = called.call("POST", path, "", headers, body.as_ref());
        assert_eq!(status, expected, "{path}: {answer}");
        assert_described(document, "POST", path, status, &answer);
    }
    let (status, mut lines) = server.stream("/api/abide/v1/processes/watch?after=0&numbers=1", APP);
    let line = lines.next().expect("a line");
    assert!(status == 200 && line["process"]["spec_redacted"].is_object(), "{line}");
    assert_described(document, "GET", "/api/abide/v1/processes/watch", status, &line);
    let log = "/api/abide/v1/logs?namespace=web&name=p&host=0:10.0.0.1";
    let (status, mut lines) = server.stream(log, APP);
    let line = lines.next().expect("a line");
    assert_eq!((status, &line["reason"]), (200, &json!("no_agent")), "{line}");
    assert_described(document, "GET", "/api/abide/v1/logs", status, &line);
    let stream = format!("/api/abide/v1/agent/stream?session={}", called.session);
    assert_eq!(server.stream(&stream, AGENT).0, 200);
    assert!(server.send("GET", "/metrics", APP, b"").1.contains("abide_gateway_ready 1"));
}

/// Bodies and headers of a successful call to the controller, with the expected status.
fn controller_requests(path: &str, token: &str) -> Vec<(String, String, u16)> {
    let with = |headers: &str, body: &str, status: u16| vec![(headers.to_owned(), body.to_owned(), status)];
    match path {
        // With and without the token: the views differ.
        "/api/v1/status" | "/api/v1/processes" | "/api/v1/plan" | "/api/v1/history" => {
            [with(token, "", 200), with("", "", 200)].concat()
        }
        "/healthz" | "/readyz" | "/api/v1/openapi.json" => with("", "", 200),
        "/api/v1/pause" => [
            with(token, r#"{"namespace": "web", "reason": "lunch", "until": "2h"}"#, 200),
            with(token, r#"{"all": true}"#, 200),
            with(token, "{}", 400),
        ]
        .concat(),
        "/api/v1/resume" => [
            with(token, r#"{"namespace": "web"}"#, 200),
            with(token, r#"{"all": true}"#, 200),
            with(token, r#"{"all": true}"#, 200),
            with(token, "nonsense", 400),
        ]
        .concat(),
        "/api/v1/look" => with(token, "", 202),
        "/api/v1/webhook" => {
            [with("X-Gitlab-Token: a long webhook secret\r\n", "{}", 202), with("", "{}", 401)].concat()
        }
        // Without a users file. The test of people calls them with one.
        "/api/v1/login" | "/api/v1/logout" | "/api/v1/session" => with("", "", 404),
        // Text, and streams.
        "/" | "/login" | "/metrics" | "/api/v1/events" => Vec::new(),
        other => panic!("the test has no request for {other}"),
    }
}

#[test]
fn every_answer_of_the_controller_is_as_described() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    machine.process("b", "1", "");
    std::fs::write(machine.path("secret"), "a long webhook secret\n").expect("a file");
    let _watch = watch(&machine, "watch.log", &["--webhook-secret-file", "secret"]);
    let at = address(&machine, "watch.log");
    until("it converges", || get(at, "/api/v1/status").json()["converged"] == true);
    // A hold, a problem, and steps in the history.
    assert_eq!(machine.run(&["stop", "web/b", "--reason", "test"]).0, 0);
    std::fs::write(machine.path("m/z.yaml"), "kind: Process\nstrange: 1\n").expect("a file");
    until("the hold and the problem are known", || {
        let status = get(at, "/api/v1/status").json();
        status["held_total"] == 1 && status["problems"][0]["line"].is_number()
    });
    let token = token(&machine);
    let document = get(at, "/api/v1/openapi.json").json();
    let described = document["paths"].as_object().expect("paths").len();
    assert_eq!(
        described,
        abide::dashboard::route_table().count(),
        "a route is described that does not exist"
    );
    for (method, path) in abide::dashboard::route_table() {
        for (headers, body, expected) in controller_requests(path, &token) {
            let answer = send(at, method, path, &headers, body.as_bytes());
            assert_eq!(answer.status, expected, "{method} {path}: {}", answer.body);
            assert_described(&document, method, path, answer.status, &answer.json());
            if expected == 200 && method == "POST" {
                assert_accepted(&document, method, path, &parsed(&body));
            }
        }
        let other_method = send(at, "DELETE", path, "", b"");
        let foreign = send(at, method, path, "Host: evil.example\r\n", b"");
        assert_eq!((other_method.status, foreign.status), (405, 403), "{path}");
        for refused in [other_method, foreign] {
            assert_described(&document, method, path, refused.status, &refused.json());
        }
    }
    for (method, path, query) in [
        ("GET", "/api/v1/history", "?limit=0"),
        ("GET", "/api/v1/events", "?after=x"),
        ("GET", "/login", ""),
        ("POST", "/api/v1/pause", ""),
    ] {
        let refused = send(at, method, &format!("{path}{query}"), "", b"{}");
        assert!(refused.status >= 400, "{path}: {}", refused.body);
        assert_described(&document, method, path, refused.status, &refused.json());
    }
    assert_eq!(send(at, "GET", "/login", &token, b"").status, 303);
    assert!(get(at, "/").body.contains("<html") && get(at, "/metrics").body.contains("abide_event_readers"));
    for headers in ["", token.as_str()] {
        let newest = get(at, "/api/v1/status").json()["last_event"].as_u64().expect("a number");
        let mut events = Events::open(at, "/api/v1/events?after=0", headers);
        let mut kinds = BTreeSet::new();
        loop {
            let (number, event) = events.next();
            assert_described(&document, "GET", "/api/v1/events", 200, &event);
            kinds.insert(event["kind"].as_str().expect("a kind").to_owned());
            if number >= newest {
                break;
            }
        }
        let expected = ["asked", "converged", "doing", "done", "held", "leading", "problems", "read", "step"];
        assert!(expected.iter().all(|kind| kinds.contains(*kind)), "{kinds:?}");
    }
}
