//! Access from files: `abide access check` on an apps file, limits of apps, and the policy of the control host.

use std::io::Write;
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt, chown};
use std::time::Duration;

use serde_json::{Value, json};

use crate::fixtures::http::Answer;
use crate::fixtures::machine::Machine;
use crate::server::Server;
use crate::support::{GOOD, Tree, abide, stderr, stdout, test_user, until};

const APPS: &str = "apps:
  - {code: ci-web, secret: s3cret, role: operate, namespaces: [web], hosts: ['0:10.0.0.*'], users: [www], owners: [team]}
  - {code: viewer, secret: s3cret, role: read}
  - {code: ownerless, secret: s3cret, role: operate, namespaces: [web]}
  - {code: late, secrets: [{secret: one, expires: 2020-01-01}, {secret: two, expires: 2021-01-01}]}
";

fn check(tree: &Tree, args: &str) -> (i32, String) {
    let mut words = vec!["access", "check", "--apps", "apps.yaml"];
    words.extend(args.split(' '));
    let output = abide(&words, tree.path(), b"");
    (output.status.code().unwrap_or(-1), stdout(&output) + &stderr(&output))
}

#[test]
fn access_check_answers_from_the_file_alone() {
    let tree = Tree::new(&[("apps.yaml", APPS)]);
    for allowed in [
        "ci-web apply web --owner team",
        "ci-web stop web/api --host 0:10.0.0.7 --user www",
        "ci-web get web",
        "viewer plan anything --owner anyone",
        "viewer get *",
        "ci-web unprotect web/api --owner team",
        "ci-web own web/api --host 0:10.0.0.7 --owner team --owner team",
        "ci-web rollout-promote web --owner team",
        "ownerless get web",
        "ownerless stop web/api",
    ] {
        let (code, text) = check(&tree, allowed);
        assert_eq!(code, 0, "{allowed}: {text}");
    }
    for (refused, says) in [
        ("ci-web apply web2", "app ci-web lacks namespace web2"),
        ("ci-web stop Web/api", "app ci-web lacks namespace Web"),
        ("ci-web apply web --owner team2", "app ci-web lacks owner team2"),
        ("ci-web apply web --user root", "app ci-web lacks user root"),
        ("ci-web logs web/api --host 1:10.0.0.7", "app ci-web lacks host 1:10.0.0.7"),
        ("ci-web pause *", "app ci-web lacks namespace * (all namespaces)"),
        ("ci-web lease-reset web --owner team", "app ci-web lacks role admin"),
        ("viewer apply web", "app viewer lacks role operate"),
        ("viewer unprotect web/api", "app viewer lacks role operate"),
        ("viewer own web/api", "app viewer lacks role operate"),
        ("ci-web own web/api --owner team --owner team2", "app ci-web lacks owner team2"),
        ("ci-web unprotect web2/api", "app ci-web lacks namespace web2"),
        ("ci-web audit web", "app ci-web lacks role admin"),
        ("ci-web audit-verify web", "app ci-web lacks role admin"),
        ("ownerless plan web", "app ownerless lacks owners: plan needs the state of an owner"),
        ("ownerless apply web --owner team", "app ownerless lacks owner team"),
        ("ownerless stop web/api --owner team", "app ownerless lacks owner team"),
        ("viewer rollout-abort web", "app viewer lacks role operate"),
        ("late get web", "its secret expired at 2021-01-01T00:00:00Z"),
        ("removed get web", "apps.yaml has no app removed"),
    ] {
        let (code, text) = check(&tree, refused);
        assert!(code == 77 && text.contains(says), "{refused}: {code} {text}");
    }
    assert_eq!(check(&tree, "ci-web fly web").0, 64);
    tree.write("apps.yaml", "apps: [{code: a, secret: s3cret, role: root}]");
    let (code, text) = check(&tree, "a get web");
    assert!(
        code == 64 && text.contains("role must be read, operate or admin") && !text.contains("s3cret"),
        "{text}"
    );
}

fn process(name: &str, ips: &[&str]) -> Value {
    let hosts: Vec<Value> = ips.iter().map(|ip| json!({"ip": ip, "bk_cloud_id": 0})).collect();
    json!({"meta": {"namespace": "web", "name": name}, "hosts": hosts, "op_type": 0,
           "spec": {"identity": {"proc_name": name, "setup_path": "/opt/p", "pid_path": "/run/p.pid", "user": "root"},
                    "control": {"start_cmd": "./run"}, "monitor_policy": {"auto_type": 1}}})
}

#[test]
fn an_app_has_limits_of_instances_and_open_tasks() {
    let folder = tempfile::tempdir().expect("a folder");
    let apps = "limits: {tasks: 2}\napps:\n  - {code: small, secret: s3cret, limits: {instances: 3}}\n  - {code: all, secret: s3cret, limits: {tasks: 100}}\n";
    let server = Server::start(&folder.path().join("store.db"), Duration::from_secs(60), apps, "* one\n");
    let call = |app: &str, name: &str, body: &Value| {
        let headers = format!(
            "X-Bkapi-Authorization: {{\"bk_app_code\": \"{app}\", \"bk_app_secret\": \"s3cret\"}}\r\n"
        );
        let path = format!("/api/c/compapi/v2/gse/{name}/");
        let (status, text) = server.send("POST", &path, &headers, body.to_string().as_bytes());
        (status, text)
    };
    let too_many = |(status, text): (u16, String), says: &str| {
        assert!(status == 429 && text.contains(says), "{status} {text}");
    };
    assert_eq!(call("small", "register_proc_info", &process("a", &["10.0.0.1", "10.0.0.2"])).0, 200);
    let four = process("b", &["10.0.0.1", "10.0.0.2"]);
    let says = "app small may have at most 3 instances in namespace web: 2 registered, 2 more in the call";
    too_many(call("small", "register_proc_info", &four), says);
    too_many(call("small", "update_proc_info", &four), says);
    too_many(call("small", "operate_proc", &four), says);
    // A registered instance is not new, and another app has no such limit.
    assert_eq!(call("small", "update_proc_info", &process("a", &["10.0.0.1"])).0, 200);
    assert_eq!(call("small", "register_proc_info", &process("b", &["10.0.0.1"])).0, 200);
    assert_eq!(call("all", "register_proc_info", &process("c", &["10.0.0.1"])).0, 200);
    let stop = |name: &str| {
        let mut body = process(name, &["10.0.0.1"]);
        body["op_type"] = json!(1);
        body
    };
    for name in ["a", "b"] {
        let (status, text) = call("small", "operate_proc", &stop(name));
        assert!(status == 200 && text.contains("task_id"), "{text}");
    }
    too_many(call("small", "operate_proc", &stop("a")), "app small has 2 open tasks: at most 2 allowed");
    assert_eq!(call("all", "operate_proc", &stop("a")).0, 200, "another app has its own tasks");
}

/// Requests in flight and their bytes, for an app and for a namespace.
#[test]
fn an_app_and_a_namespace_have_limits_of_requests_in_flight_and_bytes() {
    let folder = tempfile::tempdir().expect("a folder");
    let apps = "limits: {bytes: 5000}
namespaces:
  web: {bytes: 1000}
  closed: {requests: 0}
apps:
  - {code: few, secret: s3cret, limits: {requests: 2}}
  - {code: all, secret: s3cret, limits: {bytes: 100000}}
";
    let server = Server::start(&folder.path().join("store.db"), Duration::from_secs(60), apps, "* one\n");
    let auth = |app: &str| {
        format!("X-Bkapi-Authorization: {{\"bk_app_code\": \"{app}\", \"bk_app_secret\": \"s3cret\"}}\r\n")
    };
    let path = "/api/c/compapi/v2/gse/register_proc_info/";
    // Requests whose bodies do not arrive.
    let begin = |app: &str, sent: usize| {
        let mut stream = server.connect();
        let head = format!("POST {path} HTTP/1.1\r\nHost: x\r\n{}Content-Length: 50000\r\n\r\n", auth(app));
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&vec![b' '; sent]));
        stream
    };
    let refused = |stream: &mut TcpStream, says: &str| {
        let Answer { status, body, head, .. } = Answer::read(stream);
        assert!(status == 429 && body.contains(says), "{status} {body}");
        assert!(head.to_lowercase().contains("retry-after: 1"), "{head}");
    };
    let mut held = vec![begin("few", 10), begin("few", 10)];
    let get = |app: &str| server.send("GET", "/api/abide/v1/access", &auth(app), b"");
    // This request may take the place of one that has not arrived, which is refused then: another one follows it.
    until("both are in flight", || {
        let is_full = get("few").0 == 429;
        if !is_full {
            held.push(begin("few", 10));
        }
        is_full
    });
    let (_, text) = get("few");
    assert!(text.contains("app few may have at most 2 requests in flight (limits.requests)"), "{text}");
    refused(&mut begin("few", 0), "at most 2 requests in flight");
    assert_eq!(get("all").0, 200, "another app is served");
    drop(held);
    until("the app is served again", || get("few").0 == 200);
    refused(
        &mut begin("few", 6000),
        "app few may have at most 5000 bytes of requests in flight (limits.bytes)",
    );
    let call = |app: &str, namespace: &str, ips: &[&str]| {
        let mut body = process("a", ips);
        body["meta"]["namespace"] = json!(namespace);
        server.send("POST", path, &auth(app), body.to_string().as_bytes())
    };
    assert_eq!(call("all", "web", &["10.0.0.1"]).0, 200);
    let many: Vec<String> = (1..60).map(|n| format!("10.0.0.{n}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let (status, text) = call("all", "web", &many);
    assert!(status == 429 && text.contains("namespace web may have at most 1000 bytes"), "{status} {text}");
    assert!(text.contains("(namespaces.web.bytes)"), "{text}");
    let (status, text) = call("all", "closed", &["10.0.0.1"]);
    let says = "namespace closed may have at most 0 requests in flight (namespaces.closed.requests)";
    assert!(status == 429 && text.contains(says), "{status} {text}");
    assert_eq!(call("all", "other", &many).0, 200, "a namespace without limits");
    assert_eq!(
        server.send("GET", "/readyz", "", b"").0,
        200,
        "a limit of one caller does not affect readiness"
    );
}

/// The header of a refusal tells the client when to try again.
#[test]
fn a_limit_has_a_retry_after() {
    use std::io::{Read, Write};
    let folder = tempfile::tempdir().expect("a folder");
    let apps = "apps: [{code: all, secret: s3cret, limits: {instances: 0}}]\n";
    let server = Server::start(&folder.path().join("store.db"), Duration::from_secs(60), apps, "* one\n");
    let mut body = process("a", &["10.0.0.1"]);
    (body["bk_app_code"], body["bk_app_secret"]) = (json!("all"), json!("s3cret"));
    let (body, mut stream) = (body.to_string(), server.connect());
    write!(
        stream,
        "POST /api/c/compapi/v2/gse/register_proc_info/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .expect("a request");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    assert!(text.starts_with("HTTP/1.1 429") && text.to_lowercase().contains("retry-after: 1"), "{text}");
}

const POLICY: &str = "kind: Policy\nmeta: {name: prod}\nallow: {namespaces: [web], hosts: ['0:10.0.0.*'], users: [app], \
                      paths: [/opt/*]}\nbudgets: {restart: 0, delete: 50%}\n";

/// A file that others cannot change.
fn write_policy(tree: &Tree, text: &str) {
    tree.write("policy.yaml", text);
    let path = tree.path().join("policy.yaml");
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644)).expect("a mode");
}

fn plan(tree: &Tree, more: &[&str]) -> (i32, String) {
    let args = ["plan", "m", "--observed", "rows.json", "--caps", "gse-v2", "--policy", "policy.yaml"]
        .map(str::to_owned);
    let args: Vec<&str> = args.iter().map(String::as_str).chain(more.iter().copied()).collect();
    let output = abide(&args, tree.path(), b"");
    (output.status.code().unwrap_or(-1), stdout(&output) + &stderr(&output))
}

#[test]
fn a_policy_of_the_control_host_bounds_every_manifest() {
    let tree = Tree::new(&[("m/api.yaml", GOOD), ("rows.json", "[]")]);
    write_policy(&tree, POLICY);
    let (code, text) = plan(&tree, &[]);
    assert!(code == 0 && text.contains("1 to start"), "{code} {text}");
    for (old, new, says) in [
        ("namespace: web", "namespace: web2", "does not allow namespace \"web2\""),
        ("10.0.0.1", "10.0.1.1", "does not allow host 0:10.0.1.1"),
        ("user: app", "user: root", "does not allow user \"root\""),
        ("setup_path: /opt/api", "setup_path: /srv/api", "does not allow setup_path \"/srv/api\""),
        ("setup_path: /opt/api", "setup_path: /opt/../srv", "does not allow setup_path"),
    ] {
        assert!(GOOD.contains(old), "{old}");
        // A Policy of the repository that allows it changes nothing.
        let wide =
            "---\nkind: Policy\nmeta: {name: prod}\nallow: {namespaces: ['*'], users: ['*'], hosts: ['*']}\n";
        tree.write("m/api.yaml", format!("{}{wide}", GOOD.replace(old, new)));
        let (code, text) = plan(&tree, &[]);
        assert_eq!(code, 65, "{new}: {text}");
        assert!(text.contains("m/api.yaml:1:1") && text.contains("E0407"), "{new}: {text}");
        assert!(text.contains("policy \"prod\" (policy.yaml)") && text.contains(says), "{new}: {text}");
    }
    tree.write("m/api.yaml", GOOD);
    let output = abide(
        &["diff", "m", "--observed", "rows.json", "--caps", "gse-v2", "--policy", "policy.yaml"],
        tree.path(),
        b"",
    );
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    write_policy(&tree, &format!("{POLICY}owner: team\n"));
    let (code, text) = plan(&tree, &["--owner", "others"]);
    assert!(code == 4 && text.contains("does not allow owner \"others\""), "{code} {text}");
    assert_eq!(plan(&tree, &["--owner", "team"]).0, 0);
}

#[test]
fn a_policy_that_others_can_change_or_that_is_invalid_is_refused() {
    let tree = Tree::new(&[("m/api.yaml", GOOD), ("rows.json", "[]")]);
    for (text, says) in [
        ("meta: {name: a}\nallow: {namespace: [web]}\n", "unknown field"),
        ("kind: Process\nmeta: {name: a}\n", "kind is not Policy"),
        ("meta: {name: a}\nbudgets: {delete: many}\n", "not a number or a percentage"),
        (
            "meta: {name: a}\nsignatures: {required: 2, allowed_signers: f}\n",
            "signatures.allowed_signers f is not a file",
        ),
        ("meta: {name: a}\nwindows: []\n", "windows is not supported in a policy file"),
        ("allow: {}\n", "missing field"),
    ] {
        write_policy(&tree, text);
        let (code, shown) = plan(&tree, &[]);
        assert!(code == 64 && shown.contains(says), "{text}: {code} {shown}");
    }
    write_policy(&tree, POLICY);
    let path = tree.path().join("policy.yaml");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).expect("a mode");
    let (code, text) = plan(&tree, &[]);
    assert!(code == 64 && text.contains("policy.yaml") && text.contains("chmod"), "{code} {text}");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).expect("a mode");
    assert_eq!(plan(&tree, &[]).0, 0);
    if let Some(user) = test_user() {
        chown(&path, Some(user.uid), Some(user.gid)).expect("another owner");
        let (code, text) = plan(&tree, &[]);
        assert!(code == 64 && text.contains("belongs to"), "{code} {text}");
    }
}

/// A watch cannot end for a manifest: it holds what its policy does not allow, also of an earlier revision.
#[test]
fn a_watch_holds_what_its_policy_does_not_allow() {
    let machine = Machine::new();
    machine.process("good", "1", "");
    machine.process("bad", "1", "");
    machine.edit("bad", "namespace: web", "namespace: web2");
    let policy = machine.path("policy.yaml");
    std::fs::write(&policy, "meta: {name: prod}\nallow: {namespaces: [web]}\nbudgets: {restart: 0}\n")
        .expect("a policy");
    std::fs::set_permissions(&policy, std::fs::Permissions::from_mode(0o644)).expect("a mode");
    let args = ["watch", "m", "--policy", "policy.yaml", "--interval", "1s", "--listen", "127.0.0.1:0"];
    let _watch = machine.start(&args, "watch.log");
    until("the allowed process runs", || machine.pids().contains_key("good"));
    let log = || std::fs::read_to_string(machine.path("watch.log")).unwrap_or_default();
    until("the other is held", || log().contains("PolicyViolated"));
    assert!(log().contains("policy \"prod\" (policy.yaml) does not allow namespace \"web2\""), "{}", log());
    // A restart is above the budget of the policy; another process still starts.
    machine.process("good", "2", "");
    machine.process("more", "1", "");
    until("the new process runs", || machine.pids().contains_key("more"));
    until("the restart is held", || log().contains("RestartBudget"));
    assert!(!machine.pids().contains_key("bad"));
    assert_eq!(machine.effects(), ["start good 1", "start more 1"]);
}
