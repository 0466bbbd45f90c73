//! Digests of secrets have a key of the store and the owner: a reader without it can test no guess and restarts nothing; the
//! manifests of an owner with secrets are for callers that may run them.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use abide::model::{SpecRevision, secret_digest};
use abide::store::{Embedded, Store, Txn};
use serde_json::{Value, json};

use crate::fixtures::machine::{KillOnDrop, start_logged};
use crate::fixtures::manifest::Manifest;
use crate::fixtures::workspace::Workspace;
use crate::server::Server;
use crate::support::{command, stderr, stdout, until};
use crate::system::whoami;

const OLD: &str = "hunter2-of-the-shop";
const NEW: &str = "correct-horse-of-the-shop";

/// Code, role and owners. `None`: every owner.
const APPS: [(&str, &str, Option<&str>); 5] = [
    ("writer", "operate", Some("shop")),
    ("planner", "read", Some("shop")),
    ("near-planner", "read", Some("shop2")),
    ("reader", "read", None),
    ("other-writer", "operate", Some("shop2")),
];

/// A gateway with apps of several grants, and one process with a secret.
struct Shop {
    folder: Workspace,
    server: Server,
    _agent: KillOnDrop,
}

impl Shop {
    fn new() -> Shop {
        let folder = Workspace::new();
        let mut apps = "apps:\n  - {code: all, secret: s3cret}\n".to_owned();
        for (code, role, owner) in APPS {
            let owners = owner.map_or(String::new(), |owner| format!(", owners: [{owner}]"));
            apps.push_str(&format!("  - {{code: {code}, secret: s3cret, role: {role}{owners}}}\n"));
        }
        let server =
            Server::start(&folder.path().join("store.db"), Duration::from_secs(10), &apps, "* token\n");
        std::fs::write(folder.path().join("token"), "token\n").expect("a token");
        let url = format!("http://{}", server.address);
        let args = ["agent", "--join", &url, "--token-file", "token", "--data", "agent"];
        let args = [&args[..], &["--as-host", "0:127.0.0.1"]].concat();
        let log = folder.path().join("agent.log");
        let agent = start_logged(&mut command(&args, folder.path()), &log);
        let targets: String = APPS
            .iter()
            .map(|(code, _, _)| {
                format!("  {code}: {{url: '{url}', dialect: abide, auth: {{app_code: {code}, app_secret: {{file: secret}}}}}}\n")
            })
            .collect();
        std::fs::write(folder.path().join("abide.yaml"), format!("owner: shop\ntargets:\n{targets}"))
            .expect("a file");
        std::fs::write(folder.path().join("secret"), "s3cret").expect("a file");
        std::fs::create_dir(folder.path().join("m")).expect("a folder");
        let shop = Shop { folder, server, _agent: agent };
        until("the agent is connected", || {
            shop.server.call("GET", "/api/abide/v1/hosts", json!({}))["data"][0]["agent"] == true
        });
        shop
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn declare(&self, secret: &str) {
        let manifest = Manifest::local("api", self.folder.path())
            .identity("user", whoami())
            .identity("log_path", self.path("api.log").display())
            .start_cmd("exec sleep 1000")
            .control("start_mode", "foreground")
            .monitor("auto_type", 1)
            .monitor("start_check_secs", 0)
            .spec("env", &format!("{{TOKEN: {{value: {secret}, secret: true}}, MODE: plain}}"));
        std::fs::write(self.path("m/api.yaml"), manifest.to_string()).expect("a manifest");
    }

    fn run(&self, app: &str, args: &[&str]) -> (i32, String) {
        let args = [args, &["--target", app]].concat();
        let output = command(&args, self.folder.path()).stdin(Stdio::null()).output().expect("it runs");
        (output.status.code().unwrap_or(-1), stdout(&output) + &stderr(&output))
    }

    #[track_caller]
    fn apply(&self) {
        let (code, text) = self.run("writer", &["apply", "m", "--yes", "--max-restart", "1"]);
        assert_eq!(code, 0, "{text}");
        until("the process runs", || self.pid().is_some());
    }

    fn get(&self, app: &str, path: &str) -> (Value, String) {
        self.send(app, "GET", path, &Value::Null)
    }

    fn send(&self, app: &str, method: &str, path: &str, body: &Value) -> (Value, String) {
        let headers = format!(
            "X-Bkapi-Authorization: {{\"bk_app_code\": \"{app}\", \"bk_app_secret\": \"s3cret\"}}\r\n"
        );
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let (_, text) = self.server.send(method, path, &headers, body.as_bytes());
        (serde_json::from_str(&text).unwrap_or_default(), text)
    }

    fn row(&self, app: &str, query: &str) -> Value {
        self.get(app, &format!("/api/abide/v1/processes?{query}")).0["data"]["items"][0].clone()
    }

    fn pid(&self) -> Option<u64> {
        self.row("all", "name=api")["pid"].as_u64()
    }

    /// The plain digests of the running spec, as a client of an earlier version gets them.
    fn plain_revision(&self) -> SpecRevision {
        let row = self.row("writer", "name=api");
        row["revision"].as_str().and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{row}"))
    }
}

/// No secret, no plain digest of one, and no part of a revision that covers one.
#[track_caller]
fn discloses_nothing(what: &str, text: &str, revision: &SpecRevision) {
    let digests = [OLD, NEW].map(|secret| secret_digest(secret)[..8].to_owned());
    let parts = [revision.restart, revision.run].map(|part| format!("{part:08x}"));
    let secrets = [OLD, NEW].map(str::to_owned);
    for word in secrets.iter().chain(&digests).chain(&parts) {
        assert!(!text.contains(word.as_str()), "{what} has {word}: {text}");
    }
}

#[test]
fn only_callers_with_the_owner_get_the_key_and_no_reader_gets_a_plain_digest() {
    let shop = Shop::new();
    shop.declare(OLD);
    shop.apply();
    let revision = shop.plain_revision();
    let plain = secret_digest(OLD);
    let old_client = shop.row("writer", "name=api");
    assert_eq!(old_client["spec_redacted"]["spec"]["env"]["TOKEN"]["digest"], json!(plain), "{old_client}");
    for (app, role, owner) in APPS {
        let sees = owner.is_none_or(|owner| owner == "shop");
        let may_have_key = owner == Some("shop");
        let (page, text) = shop.get(app, "/api/abide/v1/processes?digests=keyed");
        discloses_nothing(app, &text, &revision);
        let row = &page["data"]["items"][0];
        assert_eq!(row.is_object(), sees, "{app}: {page}");
        let id = row["secret_key"].as_str().unwrap_or_default();
        assert_eq!(page["data"]["secret_keys"][id].is_string(), may_have_key, "{app}: {page}");
        let (_, text) = shop.get(app, "/api/abide/v1/processes?digests=keyed&brief=1");
        discloses_nothing(app, &text, &revision);
        if role == "read" && !may_have_key {
            for path in ["processes", "processes?brief=1", "processes?digests=plain"] {
                let (_, text) = shop.get(app, &format!("/api/abide/v1/{path}"));
                discloses_nothing(&format!("{path} for {app}"), &text, &revision);
            }
            let auth = format!(
                "X-Bkapi-Authorization: {{\"bk_app_code\": \"{app}\", \"bk_app_secret\": \"s3cret\"}}\r\n"
            );
            for query in ["numbers=1&after=0", "numbers=1&after=0&digests=keyed"] {
                let (_, mut lines) =
                    shop.server.stream(&format!("/api/abide/v1/processes/watch?{query}"), &auth);
                discloses_nothing(query, &lines.next().unwrap_or_default().to_string(), &revision);
            }
        }
        if !may_have_key {
            let body = json!({"meta": {"namespace": "web"}});
            let (_, text) = shop.send(app, "POST", "/api/c/compapi/v2/gse/sync_proc_status/", &body);
            discloses_nothing(&format!("labels for {app}"), &text, &revision);
        }
        for args in [
            &["get", "processes", "-o", "json"][..],
            &["describe", "web/api"],
            &["describe", "web/api", "-o", "json"],
            &["plan", "m", "-o", "json"],
            &["diff", "m"],
            &["export"],
            &["history"],
        ] {
            discloses_nothing(&format!("{args:?} of {app}"), &shop.run(app, args).1, &revision);
        }
    }
    let (_, text) = shop.send(
        "reader",
        "POST",
        "/api/c/compapi/v2/gse/sync_proc_status/",
        &json!({"meta": {"namespace": "web"}}),
    );
    assert!(text.contains("\"abide_rev\":\"v2."), "keyed, with the key's id: {text}");
}

#[test]
fn a_plan_without_the_key_is_held_and_restarts_nothing() {
    let shop = Shop::new();
    shop.declare(OLD);
    shop.apply();
    let (pid, revision) = (shop.pid(), shop.plain_revision());
    for app in ["writer", "planner"] {
        let (code, text) = shop.run(app, &["plan", "m", "--detailed-exitcode"]);
        assert!(code == 0 && text.to_lowercase().contains("nothing to do"), "{app}: {code} {text}");
    }
    let (_, text) = shop.run("reader", &["plan", "m"]);
    assert!(text.contains("SecretKeyUnknown") && text.contains("role operate"), "{text}");
    let (_, text) = shop.run("reader", &["plan", "m", "-o", "json"]);
    let start = text.find('{').unwrap_or_default();
    let mut documents = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
    let plan = documents.next().and_then(Result::ok).unwrap_or_default();
    assert_eq!(plan["waves"], json!([]), "{text}");
    // A changed secret is shown by keyed digests, which name their key.
    shop.declare(NEW);
    let id = shop.row("reader", "digests=keyed")["secret_key"].as_str().unwrap_or_default().to_owned();
    for (app, verb) in [("writer", "plan"), ("planner", "plan"), ("planner", "diff")] {
        let (_, text) = shop.run(app, &[verb, "m"]);
        assert!(text.contains(&format!("secret {id}.")), "{verb} of {app}: {text}");
        discloses_nothing(verb, &text, &revision);
    }
    assert_eq!(shop.pid(), pid);
    shop.apply();
    assert_ne!(shop.pid(), pid, "the writer restarts it");
}

#[test]
fn a_lost_or_replaced_key_changes_no_process() {
    let shop = Shop::new();
    shop.declare(OLD);
    shop.apply();
    let pid = shop.pid();
    let id = || shop.row("reader", "digests=keyed")["secret_key"].as_str().unwrap_or_default().to_owned();
    let first = id();
    let store = Embedded::open(&shop.path("store.db")).expect("it opens");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let mut seen = vec![first];
    for change in [Txn::delete("secret-key"), Txn::put("secret-key", "not hex")] {
        runtime.block_on(store.txn(change)).expect("it is written");
        let (code, text) = shop.run("writer", &["plan", "m", "--detailed-exitcode"]);
        assert!(code == 0 && text.to_lowercase().contains("nothing to do"), "{code} {text}");
        assert!(!seen.contains(&id()), "a new key: {seen:?}");
        seen.push(id());
    }
    let (code, text) = shop.run("writer", &["apply", "m", "--yes"]);
    assert_eq!((code, shop.pid()), (0, pid), "{text}");
}

#[test]
fn a_reader_gets_no_stored_manifest_with_a_secret_and_a_rollback_still_has_it() {
    let shop = Shop::new();
    shop.declare(OLD);
    shop.apply();
    shop.declare(NEW);
    shop.apply();
    let revision = shop.plain_revision();
    let texts = |app: &str| {
        shop.send(app, "POST", "/api/abide/v1/state", &json!({"range": {"prefix": "snap/shop/text/"}}))
    };
    let (answer, text) = texts("writer");
    assert!(text.contains(OLD) && text.contains(NEW), "an operator can roll back: {text}");
    let key = answer["data"]["entries"][0]["key"].as_str().expect("a text").to_owned();
    for app in ["planner", "reader", "near-planner"] {
        let (_, text) = texts(app);
        assert!(text.contains("lacks"), "{app}: {text}");
        let (_, text) = shop.send(app, "POST", "/api/abide/v1/state", &json!({"get": {"key": key}}));
        assert!(text.contains("lacks"), "{app}: {text}");
        for prefix in
            ["", "snap/", "snap/shop/", "journal/", "ledger/", "left/", "source/", "history/", "controller/"]
        {
            for request in [
                json!({"range": {"prefix": prefix}}),
                json!({"slice": {"prefix": prefix, "skip": 0, "limit": 1000}}),
                json!({"changes": {"prefix": prefix, "after": 0, "wait_ms": 1}}),
            ] {
                let (_, text) = shop.send(app, "POST", "/api/abide/v1/state", &request);
                discloses_nothing(&format!("{request} for {app}"), &text, &revision);
            }
        }
        for args in [&["status"][..], &["history", "-o", "json"], &["get", "revisions"]] {
            discloses_nothing(&format!("{args:?} of {app}"), &shop.run(app, args).1, &revision);
        }
    }
    let (code, text) = shop.run("planner", &["status"]);
    assert!(
        code == 0
            && text.contains("the sync status is unknown")
            && !text.contains("all processes are in sync"),
        "{text}"
    );
    let (_, text) = shop.run("writer", &["status"]);
    assert!(text.contains("all processes are in sync and healthy"), "{text}");
    let (code, text) = shop.run("writer", &["rollback", "--to", "previous", "--yes", "--max-restart", "1"]);
    assert_eq!(code, 0, "{text}");
    let environ = |pid: u64| std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    until("it runs with the earlier secret", || {
        let bytes = shop.pid().map(environ).unwrap_or_default();
        String::from_utf8_lossy(&bytes).contains(OLD)
    });
}
