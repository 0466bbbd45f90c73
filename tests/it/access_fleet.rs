//! Authorisation of calls that administer the fleet: join tokens and certificates concern every namespace, host and owner.

use std::time::Duration;

use abide::gateway::routes::{self, RouteRule, RouteScope};
use serde_json::{Value, json};

use crate::fixtures::people::digest;
use crate::server::Server;

const NOT_ALLOWED: i64 = 1_900_403;
const TOKEN: &str = "Authorization: Bearer one\r\n";

/// Each app but the last two lacks one grant.
const APPS: &str = "apps:
  - {code: reader, secret: s3cret, role: read}
  - {code: operator, secret: s3cret, role: operate}
  - {code: namespaces, secret: s3cret, namespaces: ['w*', web]}
  - {code: hosts, secret: s3cret, hosts: ['0:*', '1:*']}
  - {code: owners, secret: s3cret, owners: ['t*']}
  - {code: users, secret: s3cret, users: [www], owners: ['*']}
  - {code: all, secret: s3cret}
";

const REFUSED: [(&str, &str); 5] = [
    ("reader", "app reader lacks role admin"),
    ("operator", "app operator lacks role admin"),
    ("namespaces", "app namespaces lacks namespace * (all namespaces)"),
    ("hosts", "app hosts lacks host * (all hosts)"),
    ("owners", "app owners lacks owner * (all owners)"),
];

fn auth(app: &str) -> String {
    format!("X-Bkapi-Authorization: {{\"bk_app_code\": \"{app}\", \"bk_app_secret\": \"s3cret\"}}\r\n")
}

/// The body of a call, by the word of its route.
fn body(word: &str) -> Value {
    match word {
        "join_tokens" | "verify_audit" => json!({}),
        "create_join_token" => json!({"hosts": ["0:10.0.0.1"], "ttl_secs": 60}),
        "revoke_join_token" => json!({"id": "0a1b"}),
        "revoke_host" => json!({"host": "0:10.0.0.1"}),
        other => panic!("the matrix has no request for {other}"),
    }
}

#[test]
fn calls_that_concern_everything_refuse_every_scoped_app() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = Server::start(&folder.path().join("store.db"), Duration::from_secs(60), APPS, "* one\n");
    let mut words = Vec::new();
    for (method, path, call) in routes::all() {
        let RouteRule::App(role, RouteScope::Everything) = call.rule() else { continue };
        assert_eq!(role.word(), "admin", "{path}");
        words.push(call.word());
        let body = body(call.word()).to_string();
        let send = |app: &str| {
            let (status, text) = server.send(method, &path, &auth(app), body.as_bytes());
            let answer: Value = serde_json::from_str(&text).unwrap_or_default();
            (status, answer["code"].as_i64().unwrap_or(-1), text)
        };
        for (app, says) in REFUSED {
            let (_, code, text) = send(app);
            assert!(code == NOT_ALLOWED && text.contains(says), "{method} {path} as {app}: {text}");
        }
        // Accounts of processes do not matter here. Without a CA the gateway makes no token.
        for app in ["users", "all"] {
            let (status, code, text) = send(app);
            assert!(status != 401 && code != NOT_ALLOWED, "{method} {path} as {app}: {status} {text}");
            assert!(!text.contains("lacks"), "{text}");
        }
    }
    words.sort_unstable();
    let expected = ["create_join_token", "join_tokens", "revoke_host", "revoke_join_token", "verify_audit"];
    assert_eq!(words, expected);
}

#[test]
fn a_join_needs_a_join_token_and_a_renewal_a_certificate() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = Server::start(&folder.path().join("store.db"), Duration::from_secs(60), APPS, "* one\n");
    let unknown = format!("Authorization: Bearer abide-join.{}.{}\r\n", "0a".repeat(8), "0b".repeat(24));
    let callers = [String::new(), auth("all"), TOKEN.to_owned(), unknown];
    let (mut joins, mut number) = (0, 0u8);
    for (method, path, call) in routes::all() {
        let is_join = call.rule() == RouteRule::JoinToken;
        if !is_join && call.word() != "renew_certificate" {
            continue;
        }
        joins += usize::from(is_join);
        for headers in &callers {
            number += 1;
            let (status, text) = server.send_from([127, 3, 0, number], method, &path, headers, b"{}");
            assert_eq!(status, 401, "{method} {path} {headers}: {text}");
        }
    }
    assert!(joins == 1 && number == 8, "{joins} {number}");
    let (_, text) = server.send("POST", "/api/abide/v1/agent/renew", TOKEN, b"{}");
    assert!(text.contains("only a certificate can be renewed"), "{text}");
}

/// Agents of other hosts are near misses: an address that begins like the host's, and the same address in another cloud.
#[test]
fn every_agent_route_compares_the_hosts_of_its_credential() {
    let folder = tempfile::tempdir().expect("a folder");
    let tokens = "0:10.0.0.1 one\n0:10.0.0.12 near\n1:10.0.0.1 cloud\n";
    let server = Server::start(&folder.path().join("store.db"), Duration::from_secs(60), APPS, tokens);
    let bearer = |token: &str| format!("Authorization: Bearer {token}\r\n");
    let join = json!({"agent": "a", "hosts": ["0:10.0.0.1"], "version": "1"}).to_string();
    let open_session = || {
        let (status, text) = server.send("POST", "/api/abide/v1/agent/join", &bearer("one"), join.as_bytes());
        assert_eq!(status, 200, "{text}");
        let answer: Value = serde_json::from_str(&text).expect("JSON");
        answer["data"]["session"].as_str().expect("a session").to_owned()
    };
    let refused = [
        String::new(),
        auth("all"),
        bearer("wrong"),
        bearer("on"),
        bearer(&digest("one")),
        bearer(&format!("sha256:{}", digest("one"))),
        bearer("near"),
        bearer("cloud"),
    ];
    let mut number = 0u8;
    for (method, path, call) in routes::all() {
        if call.rule() != RouteRule::Agent {
            continue;
        }
        number += 1;
        let path = format!("{path}?session={}", open_session());
        for (nth, headers) in refused.iter().enumerate() {
            let peer = [127, 4, number, u8::try_from(nth).expect("a few") + 1];
            let (status, text) = server.send_from(peer, method, &path, headers, join.as_bytes());
            assert_eq!(status, 401, "{method} {path} {headers}: {text}");
        }
        let status = match method {
            "GET" => server.stream(&path, &bearer("one")).0,
            _ => server.send(method, &path, &bearer("one"), join.as_bytes()).0,
        };
        // Only a certificate can be renewed.
        let is_own = call.word() != "renew_certificate";
        assert_eq!(status != 401, is_own, "{method} {path}: {status}");
    }
    assert!(number >= 6, "{number}");
}
