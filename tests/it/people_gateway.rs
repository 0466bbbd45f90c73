//! People at the gateway: the command line with a person's token, rotation and removal, and trusted proxies.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};

use crate::audit::entries;
use crate::fixtures::machine::{KillOnDrop, Machine, start_logged};
use crate::fixtures::people::{digest, write_private};
use crate::fixtures::workspace::Workspace;
use crate::serve::{Gateway, log_of};
use crate::server::Server;
use crate::support::{Tree, abide, command, stderr, stdout, until};
use crate::system::whoami;

const ANN: &str = "a-long-token-of-ann";
const BOB: &str = "a-long-token-of-bob";

fn users(more: &str) -> String {
    let me = whoami();
    format!(
        "users:\n  - {{name: ann, token_sha256: {}, role: operate, namespaces: [web], owners: [web-team], users: [{me}]}}\n  \
         - {{name: bob, token_sha256: {}, namespaces: [web], owners: [web-team]}}\n{more}",
        digest(ANN),
        digest(BOB)
    )
}

/// A gateway with people, and an agent.
struct Site {
    folder: Workspace,
    gateway: Gateway,
    _agent: KillOnDrop,
}

impl Site {
    fn new(more: &[&str]) -> Site {
        let folder = Workspace::new();
        write_private(&folder.path().join("users.yaml"), &users(""));
        let gateway = Gateway::start(folder.path(), &[&["--users", "users.yaml"], more].concat());
        std::fs::write(folder.path().join("agent-token"), "token\n").expect("a file");
        let args = ["agent", "--join", &gateway.url, "--token-file", "agent-token", "--data", "agent"];
        let args = [&args[..], &["--as-host", "0:127.0.0.1"]].concat();
        let agent = start_logged(&mut command(&args, folder.path()), &folder.path().join("agent.log"));
        for (name, token) in [("ann", ANN), ("bob", BOB)] {
            write_private(&folder.path().join(format!("{name}.token")), token);
        }
        let target = |name: &str| {
            format!(
                "  {name}: {{url: '{}', dialect: abide, auth: {{token: {{file: {name}.token}}}}}}\n",
                gateway.url
            )
        };
        let config = format!("owner: web-team\ntargets:\n{}{}", target("ann"), target("bob"));
        std::fs::write(folder.path().join("abide.yaml"), config).expect("a file");
        let site = Site { folder, gateway, _agent: agent };
        until("the agent is connected", || {
            let (_, text) = site.get("/api/abide/v1/hosts", &bearer(ANN));
            text.contains("\"agent\":true")
        });
        site
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn get(&self, path: &str, headers: &str) -> (u16, String) {
        self.gateway.server.send("GET", path, headers, b"")
    }

    fn run(&self, person: &str, args: &[&str]) -> (i32, String) {
        let args = [args, &["--target", person]].concat();
        let output = command(&args, self.path()).stdin(Stdio::null()).output().expect("it runs");
        (output.status.code().unwrap_or(-1), stdout(&output) + &stderr(&output))
    }

    fn declare(&self, namespace: &str) {
        let (here, me) = (self.path().display(), whoami());
        let manifest = format!(
            "apiVersion: abide/v1\nkind: Process\nmeta: {{namespace: {namespace}, name: api}}\nhosts: [{{ip: 127.0.0.1, bk_cloud_id: 0}}]\nspec:\n  \
             identity: {{proc_name: sleep, setup_path: {here}, pid_path: {here}/{namespace}.pid, user: {me}, value_key: {namespace}}}\n  \
             control: {{start_mode: foreground, start_cmd: 'exec sleep 1000'}}\n  monitor_policy: {{auto_type: 1, start_check_secs: 0}}\n"
        );
        std::fs::create_dir_all(self.path().join("m")).expect("a folder");
        std::fs::write(self.path().join(format!("m/{namespace}.yaml")), manifest).expect("a manifest");
    }
}

fn bearer(token: &str) -> String {
    format!("Authorization: Bearer {token}\r\n")
}

fn person(answer: &(u16, String)) -> Value {
    serde_json::from_str::<Value>(&answer.1).unwrap_or_default()["data"]["person"].clone()
}

#[test]
fn a_person_uses_the_command_line_with_a_token() {
    let site = Site::new(&[]);
    site.declare("web");
    let (code, text) = site.run("ann", &["apply", "m", "--yes"]);
    assert_eq!(code, 0, "{text}");
    let (code, text) = site.run("bob", &["get", "processes", "-o", "json"]);
    assert!(code == 0 && text.contains("0:127.0.0.1:web:api"), "{text}");
    let (code, text) = site.run("bob", &["stop", "web/api"]);
    assert!(code == 77 && text.contains("person bob lacks role operate"), "{code} {text}");
    let (code, text) = site.run("ann", &["doctor"]);
    assert!(text.contains("person ann has role operate, namespaces web"), "{code} {text}");
    // Near misses of the own namespace.
    for namespace in ["web2", "web-a", "Web"] {
        site.declare(namespace);
        let (code, text) = site.run("ann", &["apply", "m", "--yes"]);
        let says = format!("person ann lacks namespace {namespace}");
        assert!(code == 77 && text.contains(&says), "{code} {text}");
        std::fs::remove_file(site.path().join(format!("m/{namespace}.yaml"))).expect("a file");
        let (code, text) = site.run("ann", &["pause", namespace]);
        assert!(code == 77 && text.contains(&says), "{code} {text}");
    }
    let (code, text) = site.run("ann", &["stop", "web/api", "--reason", "test"]);
    assert_eq!(code, 0, "{text}");
    let log = log_of(site.path());
    assert!(log.contains("who=\"person:ann\""), "{log}");
    assert!(!log.contains(ANN) && !log.contains(BOB), "{log}");
    site.run("ann", &["release", "web/api"]);
    let (code, text) = site.run("ann", &["apply", "m", "--yes"]);
    assert_eq!(code, 0, "{text}");
}

#[test]
fn a_target_has_either_an_app_or_a_person() {
    let tree = Tree::new(&[("token", ANN)]);
    for (dialect, auth, says) in [
        (
            "abide",
            "{token: {file: token}, app_code: a, app_secret: {file: token}}",
            "must have app_code and app_secret",
        ),
        ("abide", "{app_code: a}", "must have app_code and app_secret"),
        ("abide", "{}", "must have app_code and app_secret"),
        ("abide", "{token: {file: token}, username: ann}", "username belongs to an app"),
        ("gse-v2", "{token: {file: token}}", "only dialect abide has tokens of people"),
        ("abide", "{token: {file: none}}", "auth.token: cannot read none"),
    ] {
        let config =
            format!("targets: {{it: {{url: 'http://127.0.0.1:1', dialect: {dialect}, auth: {auth}}}}}\n");
        tree.write("abide.yaml", &config);
        let output = abide(&["get", "processes", "--target", "it"], tree.path(), b"");
        let text = stderr(&output);
        assert!(output.status.code() == Some(64) && text.contains(says), "{auth}: {text}");
        assert!(!text.contains(ANN), "{text}");
    }
}

#[test]
fn tokens_rotate_and_streams_end_with_their_token() {
    let site = Site::new(&[]);
    let access = |token: &str| site.get("/api/abide/v1/access", &bearer(token));
    assert_eq!(person(&access(ANN)), "ann");
    let (status, text) = access("a-wrong-token-of-16");
    assert!(status == 401 && text.contains("no person is known by this token"), "{status} {text}");
    // The digest in the file is not a credential.
    assert_eq!(access(&digest(ANN)).0, 401);
    // A person has no app's credentials, and an app no token.
    for (code, secret) in [("ann", ANN), ("person:ann", ANN)] {
        let header = format!(
            "X-Bkapi-Authorization: {{\"bk_app_code\": \"{code}\", \"bk_app_secret\": \"{secret}\"}}\r\n"
        );
        assert_eq!(site.get("/api/abide/v1/access", &header).0, 401, "{code}");
    }
    assert_eq!(access("s3cret").0, 401);
    let (status, mut lines) = site.gateway.server.stream("/api/abide/v1/processes/watch", &bearer(ANN));
    assert_eq!(status, 200);
    let new = "another-token-of-ann";
    let file = |tokens: &str| {
        write_private(
            &site.path().join("users.yaml"),
            &format!("users:\n  - {{name: ann, tokens: [{tokens}]}}\n"),
        );
    };
    let (old_hash, new_hash) = (digest(ANN), digest(new));
    file(&format!("{{token_sha256: {old_hash}}}, {{token_sha256: {new_hash}, expires: 2099-01-01}}"));
    until("the new token is known", || access(new).0 == 200);
    assert_eq!((access(ANN).0, access(BOB).0), (200, 401), "both tokens of ann; bob is removed");
    file(&format!("{{token_sha256: {new_hash}}}"));
    until("the old token is gone", || access(ANN).0 == 401);
    let last = std::iter::from_fn(|| lines.next()).last().expect("a last line");
    assert!(last["error"].as_str().is_some_and(|text| text.contains("no longer known")), "{last}");
    file(&format!("{{token_sha256: {new_hash}, expires: 2020-01-01}}"));
    until("it has expired", || access(new).0 == 401);
    let (_, text) = access(new);
    assert!(text.contains("the secret of person ann expired at 2020-01-01T00:00:00Z"), "{text}");
    // A file that cannot be used changes neither people nor apps.
    write_private(&site.path().join("users.yaml"), "users: [{name: ann, token: hush-hush-hush-hush}]\n");
    until("the error is logged", || log_of(site.path()).contains("the previous content stays active"));
    let app = "X-Bkapi-Authorization: {\"bk_app_code\": \"all\", \"bk_app_secret\": \"s3cret\"}\r\n";
    assert_eq!(site.get("/api/abide/v1/access", app).0, 200);
    assert!(!log_of(site.path()).contains("hush"), "{}", log_of(site.path()));
}

#[test]
fn an_app_and_a_person_of_one_name_are_two_callers() {
    let folder = tempfile::tempdir().expect("a folder");
    let apps = "apps: [{code: all, secret: s3cret}, {code: ann, secret: app-s3cret}]\n";
    let people = format!("users: [{{name: ann, token_sha256: {}, role: admin}}]\n", digest(ANN));
    let file = folder.path().join("store.db");
    let server = Server::with_people(&file, Duration::from_secs(60), apps, &people, "* one\n");
    let process = json!({"meta": {"namespace": "web", "name": "p"}, "hosts": [{"ip": "10.0.0.1", "bk_cloud_id": 0}], "op_type": 1,
        "spec": {"identity": {"proc_name": "p", "setup_path": "/opt/p", "pid_path": "/run/p.pid", "user": "root"}, "control": {"start_cmd": "./run"}}});
    server.gse("register_proc_info", process.clone());
    let operate = |auth: &str| {
        let headers = format!("{auth}X-Abide-Op: the-op\r\n");
        let path = "/api/c/compapi/v2/gse/operate_proc/";
        let (_, text) = server.send("POST", path, &headers, process.to_string().as_bytes());
        serde_json::from_str::<Value>(&text).expect("JSON")["data"]["task_id"].clone()
    };
    let app = "X-Bkapi-Authorization: {\"bk_app_code\": \"ann\", \"bk_app_secret\": \"app-s3cret\"}\r\n";
    let (first, second) = (operate(app), operate(&bearer(ANN)));
    assert!(first.is_string() && second.is_string() && first != second, "{first} {second}");
    assert_eq!(operate(&bearer(ANN)), second, "the person's own idempotency key");
}

#[test]
fn a_trusted_proxy_names_a_person_at_the_gateway() {
    const PROXY: [u8; 4] = [127, 9, 9, 9];
    let folder = Workspace::new();
    write_private(&folder.path().join("users.yaml"), &users(""));
    let more =
        ["--users", "users.yaml", "--trusted-proxy", "127.9.9.9", "--user-header", "X-Auth-Request-User"];
    let gateway = Gateway::start(folder.path(), &more);
    let ask = |peer: [u8; 4], headers: &str| {
        gateway.server.send_from(peer, "GET", "/api/abide/v1/access", headers, b"")
    };
    let ann = "X-Auth-Request-User: ann\r\n";
    assert_eq!(person(&ask(PROXY, ann)), "ann");
    assert_eq!(ask([127, 0, 0, 1], ann).0, 401);
    until("the ignored header is logged", || log_of(folder.path()).contains("user header ignored"));
    let (status, text) = ask(PROXY, "X-Auth-Request-User: eve\r\n");
    assert!(status == 401 && text.contains("person eve is not in the users file"), "{text}");
    assert_eq!(ask(PROXY, &format!("{ann}X-Auth-Request-User: bob\r\n")).0, 401);
    // A page of another site cannot send this header.
    let state = |headers: &str| {
        let body = br#"{"get": {"key": "pin/web-team"}}"#;
        gateway.server.send_from(PROXY, "POST", "/api/abide/v1/state", headers, body)
    };
    let (status, text) = state(ann);
    assert!(status == 401 && text.contains("X-Requested-With"), "{status} {text}");
    assert_eq!(state(&format!("{ann}X-Requested-With: abide\r\n")).0, 200);
    // Agents are not affected.
    let join = json!({"agent": "a", "hosts": ["0:10.0.0.1"], "version": "1"}).to_string();
    let headers = format!("Authorization: Bearer token\r\n{ann}");
    let (status, text) =
        gateway.server.send_from(PROXY, "POST", "/api/abide/v1/agent/join", &headers, join.as_bytes());
    assert_eq!(status, 200, "{text}");
}

#[test]
fn the_audit_log_names_people_who_act_for_no_other_user_within_their_limits() {
    let folder = Workspace::new();
    let busy = "a-long-token-of-busy";
    let more = format!("  - {{name: busy, token_sha256: {}, limits: {{requests: 0}}}}\n", digest(busy));
    write_private(&folder.path().join("users.yaml"), &users(&more));
    let gateway = Gateway::start(folder.path(), &["--users", "users.yaml"]);
    let of = |who: &str, event: &str| -> Vec<Value> {
        let all = entries(folder.path(), &["--who", who]).into_iter();
        all.filter(|entry| entry["event"] == event).collect()
    };
    let claims = format!("{}X-Bkapi-Authorization: {{\"bk_username\": \"root\"}}\r\n", bearer(ANN));
    for _ in 0..5 {
        let (status, text) = gateway.server.send("GET", "/api/abide/v1/access", &claims, b"");
        assert_eq!(status, 200, "{text}");
    }
    let hold = json!({"by": "ann", "reason": "test"}).to_string();
    let write = json!({"bk_username": "root", "txn": {"writes": [{"key": "pause/web", "value": hold}]}});
    let (_, text) = gateway.server.send("POST", "/api/abide/v1/state", &claims, write.to_string().as_bytes());
    assert!(text.contains("\"code\":0"), "{text}");
    let changes = of("person:ann", "change");
    let [change] = changes.as_slice() else { panic!("{changes:?}") };
    let who = &change["who"];
    assert_eq!((&who["kind"], &who["name"]), (&json!("person"), &json!("person:ann")), "{change}");
    assert!(who["user"].is_null() && of("root", "change").is_empty(), "{change}");
    let log = log_of(folder.path());
    assert!(log.contains("who=\"person:ann\" as_user=\"\" call=\"state\""), "{log}");
    assert_eq!(of("person:ann", "login").len(), 1, "one of six calls");
    let (status, text) = gateway.server.send("GET", "/api/abide/v1/access", &bearer(busy), b"");
    assert_eq!(status, 429, "{text}");
    assert!(text.contains("person busy may have at most 0 requests in flight (limits.requests)"), "{text}");
    until("the refusal is written", || of("person:busy", "refused").len() == 1);
    let (status, _) = gateway.server.send("GET", "/api/abide/v1/access", &bearer("a-wrong-token-of-16"), b"");
    assert_eq!(status, 401);
    until("the refused login is written", || of("a person", "refused").len() == 1);
    assert_eq!(of("a person", "refused")[0]["who"]["kind"], "unknown");
    let text = stdout(&abide(&["audit", "--data", "data", "--who", "person:ann"], folder.path(), b""));
    assert!(text.contains(" ok person:ann from 127.0.0.1:") && !text.contains(ANN), "{text}");
}

#[test]
fn the_local_system_has_people_at_its_page_and_its_gateway() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let file = format!("users: [{{name: bob, token_sha256: {}}}]\n", digest(BOB));
    write_private(&machine.path("users.yaml"), &file);
    let _up = machine.start(&["up", "m", "--users", "users.yaml"], "up.log");
    let log = || std::fs::read_to_string(machine.path("up.log")).unwrap_or_default();
    until("it is ready", || log().contains("ready http://"));
    let text = log();
    let at = text.lines().find_map(|line| line.strip_prefix("ready http://")).expect("an address");
    let server = Server::at(at.trim().parse().expect("an address"));
    for path in ["/api/v1/session", "/api/abide/v1/access", "/api/abide/v1/processes"] {
        assert_eq!(server.send("GET", path, &bearer(BOB), b"").0, 200, "{path}");
        assert_eq!(server.send("GET", path, &bearer(ANN), b"").0, 401, "{path}");
    }
    assert_eq!(server.send("GET", "/api/v1/status", "", b"").0, 401);
    assert_eq!(server.send("POST", "/api/v1/look", &bearer(BOB), b"").0, 403, "a reader");
    // The command line of the local system does not change.
    until("it runs", || machine.pids().contains_key("a"));
}

#[test]
fn tokens_are_hashed_by_a_verb_and_checked_in_the_file() {
    let tree = Tree::new(&[("users.yaml", &users(""))]);
    let run = |args: &[&str], input: &str| {
        let output = abide(args, tree.path(), input.as_bytes());
        (output.status.code().unwrap_or(-1), stdout(&output), stderr(&output))
    };
    assert_eq!(
        run(&["access", "hash"], &format!("{ANN}\n")),
        (0, format!("{}\n", digest(ANN)), String::new())
    );
    let (code, out, err) = run(&["access", "hash"], "fifteen-letters\n");
    assert!(code == 64 && out.is_empty() && err.contains("fewer than 16 characters"), "{code} {err}");
    assert!(!err.contains("fifteen-letters"), "{err}");
    let (code, out, _) = run(&["access", "hash", "--generate", "-o", "json"], "");
    let made: Value = serde_json::from_str(&out).expect("JSON");
    let token = made["token"].as_str().expect("a token");
    assert_eq!((code, made["token_sha256"].as_str()), (0, Some(digest(token).as_str())));
    assert_ne!(run(&["access", "hash", "--generate"], "").1, run(&["access", "hash", "--generate"], "").1);
    let check = |args: &str| {
        let words = ["access", "check", "--users", "users.yaml"].into_iter().chain(args.split(' '));
        let (code, out, err) = run(&words.collect::<Vec<_>>(), "");
        (code, out + &err)
    };
    assert_eq!(check("ann apply web --owner web-team").0, 0);
    for (refused, says) in [
        ("ann apply web2", "person ann lacks namespace web2"),
        ("ann apply web --user root2", "person ann lacks user root2"),
        ("bob stop web/api", "person bob lacks role operate"),
        ("Ann get web", "users.yaml has no person Ann"),
    ] {
        let (code, text) = check(refused);
        assert!(code == 77 && text.contains(says), "{refused}: {code} {text}");
    }
}
