//! Audit log: entries of a real gateway name who did what to every instance, refusals and secret reads included; scoped
//! apps read their part; callers forge no line, and no secret is in it.

use std::path::Path;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::fixtures::repository::Repo;
use crate::fixtures::schemas::assert_described;
use crate::fixtures::workspace::Workspace;
use crate::serve::Gateway;
use crate::support::{abide, command, needs, stderr, stdout, until};

pub const NOT_ALLOWED: i64 = 1_900_403;
const CANARY: &str = "canary-5f1b";

/// The app `all` has everything; the others have one namespace.
const APPS: &str = "apps:
  - {code: all, secret: s3cret}
  - {code: web, secret: s3cret, role: admin, namespaces: [web], owners: [team]}
  - {code: reader, secret: s3cret, role: read, namespaces: [web]}
  - {code: busy, secret: s3cret, limits: {instances: 0}}
";

pub fn auth(app: &str) -> String {
    format!(
        "X-Bkapi-Authorization: {{\"bk_app_code\": \"{app}\", \"bk_app_secret\": \"s3cret\", \"bk_username\": \"ann\"}}\r\n"
    )
}

pub fn body(namespace: &str, name: &str, hosts: &[String], op: i64) -> Value {
    let hosts: Vec<Value> = hosts.iter().map(|ip| json!({"ip": ip, "bk_cloud_id": 0})).collect();
    json!({"meta": {"namespace": namespace, "name": name}, "hosts": hosts, "op_type": op,
           "spec": {"identity": {"proc_name": name, "setup_path": "/opt", "pid_path": format!("/run/{name}.pid"), "user": "root"},
                    "control": {"start_cmd": format!("./run --password {CANARY}")},
                    "env": {"PASSWORD": {"value": CANARY, "secret": true}}}})
}

/// A gateway with the apps of this file.
pub fn start(folder: &Path, more: &[&str]) -> Gateway {
    if !folder.join("apps.yaml").exists() {
        std::fs::write(folder.join("apps.yaml"), APPS).expect("a file");
    }
    Gateway::start(folder, more)
}

/// Entries of the files in the data folder.
pub fn entries(folder: &Path, more: &[&str]) -> Vec<Value> {
    let args = [&["audit", "--data", "data", "-o", "json"], more].concat();
    let output = abide(&args, folder, b"");
    assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    stdout(&output).lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// The entry of the latest call by a name.
fn last_of(folder: &Path, call: &str) -> Value {
    let all = entries(folder, &[]);
    let found = all.iter().rfind(|entry| entry["what"]["call"] == call && entry["event"] != "login");
    found.cloned().unwrap_or_else(|| panic!("no {call} in {all:?}"))
}

fn hosts(from: u32, count: u32) -> Vec<String> {
    (from..from + count).map(|n| format!("10.{}.{}.{}", n >> 16, (n >> 8) & 255, n & 255)).collect()
}

#[test]
fn a_change_names_its_caller_and_every_instance_and_no_secret() {
    let folder = Workspace::new();
    let gateway = start(folder.path(), &[]);
    let send = |path: &str, headers: &str, body: &Value| {
        let headers = format!("{}{headers}", auth("all"));
        let (_, text) = gateway.server.send("POST", path, &headers, body.to_string().as_bytes());
        serde_json::from_str::<Value>(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    };
    let answer = send("/api/c/compapi/v2/gse/register_proc_info/", "", &body("web", "api", &hosts(1, 2), 0));
    assert_eq!(answer["code"], 0, "{answer}");
    let entry = last_of(folder.path(), "register");
    assert_eq!((&entry["event"], &entry["result"]["status"]), (&json!("change"), &json!("ok")), "{entry}");
    assert_eq!(entry["what"]["instances"][0]["process"], "web/api");
    assert_eq!(entry["what"]["instances"][0]["hosts"], json!(["0:10.0.0.1", "0:10.0.0.2"]));
    assert_eq!((&entry["who"]["kind"], &entry["who"]["name"]), (&json!("app"), &json!("all")));
    assert_eq!(entry["who"]["user"], "ann");
    assert!(entry["who"]["peer"].as_str().is_some_and(|peer| peer.starts_with("127.0.0.1:")), "{entry}");
    // Refused rows have their codes: they are registered already.
    send("/api/c/compapi/v2/gse/register_proc_info/", "", &body("web", "api", &hosts(2, 2), 0));
    let failed = last_of(folder.path(), "register")["result"]["failed"].clone();
    assert_eq!(failed, json!([{"instance": "0:10.0.0.2:web:api", "code": 850}]));
    // A call of Abide's own form, with two processes and many hosts.
    let many = json!({"proc_operate_req": [body("web", "api", &hosts(1, 3000), 0), body("db", "sql", &hosts(1, 2), 1)]});
    let headers = "X-Abide-Op: journal.team.r1.000001\r\nX-Abide-Owner: team\r\nX-Abide-Plan: 0123abcd\r\n\
                   X-Abide-Revision: feed\r\nX-Abide-Commit: c0ffee\r\n";
    let task = send("/api/c/compapi/v2/gse/operate_proc_multi/", headers, &many)["data"]["task_id"].clone();
    let entry = last_of(folder.path(), "operate_multi");
    assert_eq!(entry["what"]["task"], task);
    let named = |nth: usize| &entry["what"]["instances"][nth];
    assert_eq!((&named(0)["process"], &named(0)["op"]), (&json!("web/api"), &json!("start")));
    let all: Vec<String> = hosts(1, 3000).iter().map(|ip| format!("0:{ip}")).collect();
    assert_eq!(named(0)["hosts"], json!(all), "every instance is named");
    assert_eq!((&named(1)["process"], &named(1)["op"]), (&json!("db/sql"), &json!("stop")));
    let purpose = json!({"owner": "team", "op": "journal.team.r1.000001", "plan": "0123abcd", "revision": "feed", "commit": "c0ffee"});
    assert_eq!(entry["for"], purpose);
    // State writes name their keys and instances, without values.
    let hold = json!({"by": CANARY, "reason": CANARY}).to_string();
    let write = json!({"txn": {"writes": [{"key": "hold/0:10.0.0.1:web:api", "value": hold}]}});
    send("/api/abide/v1/state", "", &write);
    let entry = last_of(folder.path(), "state");
    assert_eq!(entry["what"]["keys"], json!(["hold/0:10.0.0.1:web:api"]));
    assert_eq!(entry["what"]["instances"], json!([{"process": "web/api", "hosts": ["0:10.0.0.1"]}]));
    let files = files_text(folder.path());
    assert!(files.contains("web/api") && !files.contains(CANARY) && !files.contains("s3cret"), "{files}");
    // Filters.
    let of = |more: &[&str]| entries(folder.path(), more).len();
    assert!(of(&["-n", "db"]) == 1 && of(&["-n", "we"]) == 0 && of(&["--who", "all"]) > 3);
    assert!(of(&["--who", "ann"]) > 3 && of(&["--who", "nobody-else"]) == 0);
    assert!(of(&["--since", "1h"]) > 3 && of(&["--since", "2100-01-01T00:00:00Z"]) == 0);
}

/// The text of all audit files.
fn files_text(folder: &Path) -> String {
    use std::os::unix::fs::PermissionsExt;
    let mut text = String::new();
    for entry in std::fs::read_dir(folder.join("data/audit")).expect("a folder").flatten() {
        let mode = entry.metadata().expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{:?}", entry.path());
        text.push_str(&std::fs::read_to_string(entry.path()).expect("a file"));
    }
    text
}

#[test]
fn refused_calls_wrong_credentials_logins_and_secret_reads_are_recorded() {
    let folder = Workspace::new();
    let gateway = start(folder.path(), &[]);
    let server = &gateway.server;
    let path = "/api/c/compapi/v2/gse/register_proc_info/";
    let send = |headers: &str, body: Value| server.send("POST", path, headers, body.to_string().as_bytes());
    let (_, text) = send(&auth("web"), body("db", "sql", &hosts(1, 1), 0));
    assert!(text.contains("app web lacks namespace db"), "{text}");
    let entry = last_of(folder.path(), "register");
    assert_eq!((&entry["event"], &entry["who"]["name"]), (&json!("refused"), &json!("web")), "{entry}");
    assert_eq!(entry["result"]["message"], "app web lacks namespace db");
    assert_eq!(
        (&entry["result"]["status"], &entry["result"]["code"]),
        (&json!("refused"), &json!(NOT_ALLOWED))
    );
    assert_eq!(entry["what"]["instances"][0]["hosts"], json!(["0:10.0.0.1"]));
    let (status, _) = send(&auth("busy"), body("db", "sql", &hosts(1, 1), 0));
    assert_eq!(status, 429);
    let entry = last_of(folder.path(), "register");
    assert_eq!((&entry["event"], &entry["who"]["name"]), (&json!("refused"), &json!("busy")), "{entry}");
    // An unknown caller: the claimed name, in one line without control characters.
    let forged = "x\\n{\\\"seq\\\":99}\\u001b[2J\\u009b";
    let wrong = format!("{{\"bk_app_code\": \"{forged}\", \"bk_app_secret\": \"{CANARY}\"}}");
    let (status, _) = server.send("POST", path, "", wrong.as_bytes());
    assert_eq!(status, 401);
    until("the refusal is written", || last_of(folder.path(), "register")["who"]["kind"] == "unknown");
    let entry = last_of(folder.path(), "register");
    assert_eq!(entry["who"]["name"], "x\n{\"seq\":99}\u{1b}[2J\u{9b}");
    // A flood of them is counted, not written.
    for _ in 0..20 {
        let peer = [127, 9, 0, 7];
        server.send_from(peer, "GET", "/api/abide/v1/hosts", "", b"");
    }
    let is_guess = |entry: &&Value| entry["what"]["call"] == "hosts" && entry["event"] == "refused";
    until("the first are written", || entries(folder.path(), &[]).iter().filter(is_guess).count() == 3);
    // Reads that may contain secrets, once for an app and address.
    for _ in 0..3 {
        let range = json!({"range": {"prefix": "ledger/"}}).to_string();
        server.send("POST", "/api/abide/v1/state", &auth("all"), range.as_bytes());
    }
    server.send("GET", "/api/abide/v1/logs?namespace=web&name=api&host=0:10.0.0.1", &auth("all"), b"");
    let is_read = |entry: &&Value| entry["event"] == "read";
    until("the reads are written", || entries(folder.path(), &[]).iter().filter(is_read).count() >= 2);
    let all = entries(folder.path(), &[]);
    let reads: Vec<&Value> = all.iter().filter(is_read).collect();
    assert_eq!(reads.len(), 2, "{reads:?}");
    assert_eq!((&reads[0]["what"]["keys"], &reads[1]["what"]["call"]), (&json!(["ledger/"]), &json!("logs")));
    // Every app has one login, with its address.
    let logins: Vec<&Value> =
        all.iter().filter(|entry| entry["event"] == "login").map(|entry| &entry["who"]["name"]).collect();
    assert_eq!(logins, [&json!("web"), &json!("busy"), &json!("all")]);
    let text = files_text(folder.path());
    assert!(!text.contains(CANARY) && !text.contains("s3cret"), "{text}");
    assert!(text.bytes().all(|byte| byte == b'\n' || (32..127).contains(&byte)), "{text}");
    assert_eq!(text.lines().count(), all.len() + 1, "a header, and a line per entry");
    let shown = stdout(&abide(&["audit", "--data", "data"], folder.path(), b""));
    assert_eq!(shown.lines().count(), all.len(), "{shown}");
    assert!(!shown.contains('\u{1b}') && shown.contains("\\u{1b}[2J"), "{shown}");
}

/// A target of the gateway for an app.
fn target(folder: &Path, gateway: &Gateway, app: &str) {
    let config = format!(
        "targets:\n  it: {{url: '{}', dialect: abide, auth: {{app_code: {app}, app_secret: {{file: secret}}}}}}\n",
        gateway.url
    );
    std::fs::write(folder.join("abide.yaml"), config).expect("a file");
    std::fs::write(folder.join("secret"), "s3cret").expect("a file");
}

#[test]
fn a_gateway_shows_its_log_to_administrators_and_a_part_of_it_to_scoped_ones() {
    let folder = Workspace::new();
    let gateway = start(folder.path(), &[]);
    let register = |namespace: &str| {
        let answer = gateway.server.gse("register_proc_info", body(namespace, "api", &hosts(1, 2), 0));
        assert_eq!(answer["code"], 0, "{answer}");
    };
    ["web", "web2", "db"].iter().for_each(|namespace| register(namespace));
    let both = json!({"proc_operate_req": [body("web", "api", &hosts(1, 1), 1), body("db", "api", &hosts(1, 1), 1)]});
    gateway.server.gse("operate_proc_multi", both);
    let run = |app: &str, more: &[&str]| {
        target(folder.path(), &gateway, app);
        let args = [&["audit", "--target", "it"], more].concat();
        let output = command(&args, folder.path()).stdin(Stdio::null()).output().expect("it runs");
        (output.status.code().unwrap_or(-1), stdout(&output), stderr(&output))
    };
    let (code, all, err) = run("all", &["-o", "json"]);
    assert!(code == 0 && all.contains("web2/api") && all.contains("db/api"), "{code} {all} {err}");
    let (code, own, err) = run("web", &["-o", "json"]);
    assert!(code == 0 && own.contains("web/api"), "{code} {own} {err}");
    assert!(!own.contains("web2") && !own.contains("db/"), "{own}");
    let lines: Vec<Value> = own.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let multi = lines.iter().find(|entry| entry["what"]["call"] == "operate_multi").expect("its part");
    assert_eq!(multi["what"]["instances"].as_array().map(Vec::len), Some(1), "{multi}");
    assert!(lines.iter().all(|entry| entry["event"] != "gateway"), "{own}");
    let (code, text, _) = run("web", &["-n", "web", "--since", "1h"]);
    assert!(code == 0 && text.contains("stop web/api@0:10.0.0.1"), "{text}");
    let (code, _, err) = run("web", &["-n", "db"]);
    assert!(code == 77 && err.contains("app web lacks namespace db"), "{code} {err}");
    let (code, _, err) = run("reader", &[]);
    assert!(code == 77 && err.contains("app reader lacks role admin"), "{code} {err}");
    let (code, _, err) = run("web", &["--verify"]);
    assert!(code == 77 && err.contains("app web lacks namespace * (all namespaces)"), "{code} {err}");
    let (code, text, err) = run("all", &["--verify"]);
    assert!(code == 0 && text.starts_with("intact: "), "{code} {text} {err}");
    let (_, document) = gateway.server.send("GET", "/openapi.json", &auth("all"), b"");
    let document: Value = serde_json::from_str(&document).expect("JSON");
    for path in ["/api/abide/v1/audit", "/api/abide/v1/audit/verify"] {
        let (status, text) = gateway.server.send("GET", path, &auth("all"), b"");
        let answer: Value = serde_json::from_str(&text).expect("JSON");
        assert!(status == 200 && answer["result"] == true, "{path}: {text}");
        assert_described(&document, "GET", path, status, &answer);
    }
    // The reads are recorded themselves.
    let reads: Vec<Value> = entries(folder.path(), &["--who", "web"]);
    assert!(
        reads.iter().any(|entry| entry["event"] == "read" && entry["what"]["call"] == "audit"),
        "{reads:?}"
    );
}

#[test]
fn changes_of_a_watch_have_their_commit_and_those_of_an_apply_their_plan() {
    if !needs("git") {
        return;
    }
    let repo = Repo::new();
    let machine = &repo.machine;
    machine.process("a", "1", "");
    let commit = repo.commit("one process");
    let watch = repo.watch("watch.log", &[]);
    until("it runs", || repo.runs(&["a"]));
    let audit = |more: &[&str]| -> Vec<Value> {
        let (code, out, err) = machine.run(&[&["audit", "-o", "json"], more].concat());
        assert_eq!(code, 0, "{err}");
        out.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    let is_start =
        |entry: &&Value| entry["what"]["instances"][0]["op"] == "start" && entry["event"] == "change";
    let started = audit(&[]).into_iter().rfind(|entry| is_start(&entry)).expect("a start");
    assert_eq!(started["for"]["commit"], json!(commit), "{started}");
    assert!(started["for"]["revision"].as_str().is_some_and(|text| text.len() > 8), "{started}");
    assert!(
        started["for"]["op"].as_str().is_some_and(|text| text.starts_with("journal.default.")),
        "{started}"
    );
    assert!(started["for"]["generation"].as_u64() > Some(0), "{started}");
    let task = started["what"]["task"].clone();
    let ended =
        || audit(&[]).into_iter().find(|entry| entry["event"] == "task" && entry["what"]["task"] == task);
    until("the task has its end", || ended().is_some());
    let ended = ended().expect("an end");
    assert_eq!(
        (&ended["result"]["status"], &ended["what"]["instances"][0]["op"]),
        (&json!("ok"), &json!("start"))
    );
    drop(watch);
    machine.process("a", "2", "");
    let (code, out, err) = machine.apply(&["-o", "json", "--lock-timeout", "60s", "--accept-source"]);
    assert_eq!(code, 0, "{out} {err}");
    let report: Value = serde_json::from_str(&out).expect("JSON");
    let is_of_plan =
        |entry: &&Value| entry["for"]["plan"] == report["plan"]["id"] && entry["event"] == "change";
    let all = audit(&[]);
    let of_plan: Vec<&Value> = all.iter().filter(is_of_plan).collect();
    assert!(report["plan"]["id"].is_string() && !of_plan.is_empty(), "{out} {all:?}");
    let (_, history, _) = machine.run(&["history", "-o", "json"]);
    let history: Value = serde_json::from_str(&history).expect("JSON");
    assert_eq!(of_plan[0]["for"]["revision"], history[0]["revision"], "{of_plan:?}");
    assert!(of_plan.iter().any(|entry| entry["what"]["instances"][0]["process"] == "web/a"), "{of_plan:?}");
    let (code, out, err) = machine.run(&["audit", "--verify"]);
    assert!(code == 0 && out.starts_with("intact: "), "{out} {err}");
}
