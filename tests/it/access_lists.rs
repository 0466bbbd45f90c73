//! Lists, streams and idempotency keys of the gateway: each caller finds what its grant covers, and nothing else.

use std::time::Duration;

use serde_json::{Value, json};

use crate::access::{Caller, Part, Role, Subject, World, auth, foreign};
use crate::server::Server;
use crate::support::until;

#[test]
fn lists_contain_what_the_caller_may_see_and_nothing_else() {
    for caller in [Caller::App(Role::Read), Caller::Person(Role::Read)] {
        lists_are_filtered_for(&caller.credentials());
    }
}

/// The cursor of a page of digests names its last process.
fn digest_cursors_name_listed_processes(get: impl Fn(&str) -> Value) {
    let mut after = String::new();
    loop {
        let page = get(&format!("/api/abide/v1/processes/digests?limit=1{after}"));
        let Some(more) = page["more"].as_str() else { break };
        let shown = page["items"][0]["instance"].as_str().expect("a key");
        let name = shown.rsplit(':').next().expect("a name");
        assert!(more.contains(&format!("/{name}/")), "{page}");
        after = format!("&after={more}");
    }
}

fn lists_are_filtered_for(headers: &str) {
    let world = World::new();
    let server = &world.server;
    for host in ["0:10.0.0.1", "0:10.0.0.12", "1:10.0.0.1"] {
        let join = json!({"agent": host, "hosts": [host], "version": "1"}).to_string();
        server.send("POST", "/api/abide/v1/agent/join", "Authorization: Bearer one\r\n", join.as_bytes());
    }
    let mut tasks = Vec::new();
    for subject in std::iter::once(Subject::own()).chain(foreign()) {
        tasks.push((
            server.gse("operate_proc", subject.request(&subject.name, 1))["data"]["task_id"].clone(),
            subject,
        ));
    }
    let get = |path: &str| {
        let (_, text) = server.send("GET", path, headers, b"");
        serde_json::from_str::<Value>(&text).unwrap_or_else(|error| panic!("{path}: {error} {text}"))["data"]
            .clone()
    };
    let state = |request: Value| {
        let (_, text) = server.send("POST", "/api/abide/v1/state", headers, request.to_string().as_bytes());
        serde_json::from_str::<Value>(&text).expect("JSON")["data"].clone()
    };
    let sync = json!({"meta": {"namespace": "web"}, "page": {"start": 0, "limit": 100}});
    let (_, synced) =
        server.send("POST", "/api/c/compapi/v2/gse/sync_proc_status/", headers, sync.to_string().as_bytes());
    // A foreign account hides nothing: it only limits what the app may run.
    let is_seen = |subject: &Subject| matches!(subject.foreign, None | Some((Part::User, _)));
    let lists = [
        ("processes", get("/api/abide/v1/processes").to_string()),
        ("digests", get("/api/abide/v1/processes/digests").to_string()),
        ("sync", synced),
        ("holds", state(json!({"range": {"prefix": "hold/"}})).to_string()),
        ("ledger", state(json!({"range": {"prefix": "ledger/abide/"}})).to_string()),
        ("slice", state(json!({"slice": {"prefix": "ledger/abide/", "limit": 100}})).to_string()),
        ("changes", state(json!({"changes": {"prefix": "ledger/", "after": 0, "wait_ms": 1}})).to_string()),
    ];
    for (name, text) in &lists {
        for (_, subject) in &tasks {
            let is_listed = text.contains(&format!("{}\"", subject.name));
            let is_hold = *name == "holds" && matches!(subject.foreign, Some((Part::Owner, _)));
            assert_eq!(is_listed, is_seen(subject) || is_hold, "{name}: {subject:?}: {text}");
        }
    }
    digest_cursors_name_listed_processes(get);
    // The cursor of a page is a key, too.
    for prefix in ["ledger/", "hold/", "journal/", "history/", "snap/"] {
        let mut after = Value::Null;
        loop {
            let page = state(json!({"range": {"prefix": prefix, "after": after, "limit": 1}}));
            let shown: Vec<&Value> =
                page["entries"].as_array().expect("entries").iter().map(|entry| &entry["key"]).collect();
            after = page["more"].clone();
            if after.is_null() {
                break;
            }
            assert_eq!(shown, [&after], "{prefix}: {page}");
        }
    }
    for prefix in ["journal/", "history/", "pin/", "left/", "source/", "snap/", "pause/", "at/gse/"] {
        let text = state(json!({"range": {"prefix": prefix}})).to_string();
        assert!(text.contains("team/") || text.contains("/team\"") || prefix == "pause/", "{prefix}: {text}");
        for other in ["team2", "team-a", "Team", "tea/", "tea\"", "web2", "web-a", "Web", "/we\"", "other"] {
            assert!(!text.contains(other), "{prefix} has {other}: {text}");
        }
    }
    let hosts = get("/api/abide/v1/hosts");
    assert_eq!(hosts.as_array().map(Vec::len), Some(1), "{hosts}");
    assert_eq!(hosts[0]["host"], "0:10.0.0.1", "{hosts}");
    let listed = get("/api/abide/v1/tasks").to_string();
    for (task, subject) in &tasks {
        assert_eq!(listed.contains(task.as_str().expect("an id")), is_seen(subject), "{subject:?}: {listed}");
        let body = json!({"task_id": task}).to_string();
        let path = "/api/c/compapi/v2/gse/get_proc_operate_result_v2/";
        let (_, text) = server.send("POST", path, headers, body.as_bytes());
        assert_eq!(!text.contains("there is no task"), is_seen(subject), "{subject:?}: {text}");
    }
}

#[test]
fn a_watch_has_no_lines_of_others_and_ends_when_the_secret_expires() {
    let folder = tempfile::tempdir().expect("a folder");
    let until_then = std::time::SystemTime::now() + Duration::from_secs(4);
    let at = jiff::Timestamp::try_from(until_then).expect("a time");
    let apps = format!(
        "apps:\n  - {{code: all, secret: s3cret}}\n  - {{code: web, secret: s3cret, namespaces: [web], owners: [team], expires: '{at}'}}\n"
    );
    let server = Server::start(&folder.path().join("store.db"), Duration::from_secs(60), &apps, "* one\n");
    let (status, mut lines) = server.stream("/api/abide/v1/processes/watch", &auth("web", "s3cret"));
    assert_eq!(status, 200);
    for subject in foreign().into_iter().filter(|one| matches!(one.foreign, Some((Part::Namespace, _)))) {
        server.gse("register_proc_info", subject.request(&subject.name, 0));
    }
    let own = Subject::own();
    server.gse("register_proc_info", own.request(&own.name, 0));
    assert_eq!(lines.next().expect("a change")["instance"], own.key(), "the first line is the app's own");
    let last = lines.next().expect("a last line");
    assert!(last["error"].as_str().is_some_and(|text| text.contains("no longer known")), "{last}");
    assert!(std::time::SystemTime::now() >= until_then, "the stream ended early");
    assert_eq!(lines.next(), None);
    let (status, text) = server.send("GET", "/api/abide/v1/access", &auth("web", "s3cret"), b"");
    assert!(status == 401 && text.contains("expired"), "{status} {text}");
}

/// Another app's idempotency keys are not visible, and do not collide.
#[test]
fn idempotency_keys_belong_to_their_app() {
    let world = World::new();
    let own = Subject::own();
    let op = "X-Abide-Op: the-op\r\n";
    let path = "/api/c/compapi/v2/gse/operate_proc/";
    let first =
        world.server.call_with("POST", path, op, own.request(&own.name, 1))["data"]["task_id"].clone();
    assert!(first.is_string());
    let find = |app: &str| {
        let (_, text) = world.server.send("GET", "/api/abide/v1/tasks?op=the-op", &auth(app, "s3cret"), b"");
        serde_json::from_str::<Value>(&text).expect("JSON")["data"]["task"].clone()
    };
    assert_eq!((find("all"), find("operate")), (first.clone(), Value::Null));
    let headers = format!("{}{op}", auth("operate", "s3cret"));
    let (_, text) =
        world.server.send("POST", path, &headers, own.request(&own.name, 1).to_string().as_bytes());
    let second = serde_json::from_str::<Value>(&text).expect("JSON")["data"]["task_id"].clone();
    assert!(second.is_string() && second != first, "{text}");
    until("the app finds its own", || find("operate") == second);
}
