//! Replaced credentials of a gateway: open streams of their caller end, those of others continue.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::fixtures::people::write_private;
use crate::fixtures::workspace::Workspace;
use crate::listener_attacks::AUTH;
use crate::serve::Gateway;
use crate::server::{Lines, Server};
use crate::support::until;

/// All lines of a stream that must end in time.
fn rest_of(mut lines: Lines, within: Duration) -> Vec<Value> {
    let (send, receive) = std::sync::mpsc::channel();
    std::thread::spawn(move || send.send(std::iter::from_fn(|| lines.next()).collect()));
    receive.recv_timeout(within).expect("the stream ends")
}

#[test]
fn a_replaced_secret_ends_its_open_streams_and_no_other() {
    let folder = Workspace::new();
    let apps = |first: &str| {
        let text = format!(
            "apps: [{{code: one, secret: {first}}}, {{code: two, secret: the-secret-of-two}}, {{code: all, secret: s3cret}}]\n"
        );
        std::fs::write(folder.path().join("apps.yaml"), text).expect("a file");
    };
    apps("the-secret-of-one");
    let gateway = Gateway::start(folder.path(), &[]);
    let server = &gateway.server;
    let auth = |code: &str| {
        AUTH.replace("\"all\"", &format!("\"{code}\"")).replace("s3cret", &format!("the-secret-of-{code}"))
    };
    let (_, first) = server.stream("/api/abide/v1/processes/watch", &auth("one"));
    let (_, mut second) = server.stream("/api/abide/v1/processes/watch", &auth("two"));
    let now =
        server.call("POST", "/api/abide/v1/state", json!({"range": {"prefix": "hold/"}}))["data"]["as_of"]
            .clone();
    let known = || {
        let (_, metrics) = server.send("GET", "/metrics", AUTH, b"");
        let line = metrics.lines().find_map(|line| line.strip_prefix("abide_connections{caller=\"known\"} "));
        line.and_then(|count| count.parse::<usize>().ok())
    };
    // Two streams, and the request for the metrics.
    until("no other call is open", || known() == Some(3));
    let question = json!({"changes": {"prefix": "hold/", "after": now, "wait_ms": 30_000}}).to_string();
    let waits = std::thread::spawn({
        let (at, auth) = (server.address, auth("one"));
        move || Server::at(at).send("POST", "/api/abide/v1/state", &auth, question.as_bytes())
    });
    // A call that waits when its secret is replaced.
    until("the call waits", || known() == Some(4));
    let begin = Instant::now();
    apps("another-secret-of-one");
    let lines = rest_of(first, Duration::from_secs(10));
    let last = lines.last().expect("a last line");
    assert!(last["error"].as_str().is_some_and(|text| text.contains("no longer known")), "{last}");
    let (_, text) = waits.join().expect("an answer");
    assert!(text.contains("no longer known"), "{text}");
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    let body = json!({"meta": {"namespace": "web", "name": "p"}, "hosts": [{"ip": "10.0.0.1", "bk_cloud_id": 0}],
        "spec": {"identity": {"proc_name": "p", "setup_path": "/opt", "pid_path": "/run/p.pid", "user": "root"}}});
    assert_eq!(server.gse("register_proc_info", body)["result"], true);
    assert_eq!(second.next().expect("a change")["instance"], "0:10.0.0.1:web:p", "the other goes on");
}

/// A wait for changes is a long call: the grant may lose a namespace meanwhile.
#[test]
fn a_narrower_grant_ends_a_wait_for_changes_without_those_it_no_longer_has() {
    let folder = Workspace::new();
    let apps = |namespaces: &str| {
        let one = format!("{{code: one, secret: the-secret-of-one, namespaces: [{namespaces}]}}");
        write_private(
            &folder.path().join("apps.yaml"),
            &format!("apps: [{one}, {{code: all, secret: s3cret}}]\n"),
        );
    };
    apps("web, db");
    let gateway = Gateway::start(folder.path(), &[]);
    let server = &gateway.server;
    let auth = AUTH.replace("\"all\"", "\"one\"").replace("s3cret", "the-secret-of-one");
    let waits = std::thread::spawn({
        let (at, auth) = (server.address, auth.clone());
        let question = json!({"changes": {"prefix": "pause/", "after": 0, "wait_ms": 30_000}}).to_string();
        move || Server::at(at).send("POST", "/api/abide/v1/state", &auth, question.as_bytes())
    });
    let known = || {
        let (_, metrics) = server.send("GET", "/metrics", AUTH, b"");
        metrics.contains("abide_connections{caller=\"known\"} 2")
    };
    until("the call waits", known);
    let begin = Instant::now();
    apps("web");
    let grant = || server.send("GET", "/api/abide/v1/access", &auth, b"").1;
    until("the grant is in force", || !grant().contains("\"db\""));
    let pause = json!({"by": "ann", "reason": "a secret reason"}).to_string();
    let write = json!({"txn": {"writes": [{"key": "pause/db", "value": pause}]}});
    let written = server.call("POST", "/api/abide/v1/state", write);
    assert!(written["data"]["written"].is_u64(), "{written}");
    let (status, text) = waits.join().expect("an answer");
    let answer: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((status, &answer["data"]["changes"]), (200, &json!([])), "{text}");
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
}

#[test]
fn a_replaced_token_ends_its_agents_stream_and_no_other() {
    let folder = Workspace::new();
    let gateway = Gateway::start(folder.path(), &[]);
    let tokens = |first: &str| {
        let text = format!("0:10.0.0.1 {first}\n0:10.0.0.2 the-token-of-the-second\n");
        std::fs::write(folder.path().join("tokens"), text).expect("a file");
    };
    tokens("the-token-of-the-first");
    let server = &gateway.server;
    let open = |host: &str, token: &str| {
        let auth = format!("Authorization: Bearer {token}\r\n");
        let join = json!({"agent": host, "hosts": [host]}).to_string();
        let mut joined = Value::Null;
        until("the tokens are known", || {
            let (status, text) = server.send("POST", "/api/abide/v1/agent/join", &auth, join.as_bytes());
            joined = serde_json::from_str(&text).unwrap_or_default();
            status == 200
        });
        let session = joined["data"]["session"].as_str().expect("a session").to_owned();
        server.stream(&format!("/api/abide/v1/agent/stream?session={session}"), &auth).1
    };
    let mut first = open("0:10.0.0.1", "the-token-of-the-first");
    let mut second = open("0:10.0.0.2", "the-token-of-the-second");
    assert!(first.next().is_some() && second.next().is_some());
    let begin = Instant::now();
    tokens("another-token-of-the-first");
    rest_of(first, Duration::from_secs(10));
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
    let body = json!({"meta": {"namespace": "web", "name": "p"}, "hosts": [{"ip": "10.0.0.2", "bk_cloud_id": 0}],
        "spec": {"identity": {"proc_name": "p", "setup_path": "/opt", "pid_path": "/run/p.pid", "user": "root"}}});
    assert_eq!(server.gse("register_proc_info", body)["result"], true);
    assert!(second.next().is_some(), "the other goes on");
}
