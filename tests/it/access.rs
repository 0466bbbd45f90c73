//! Authorisation matrix: every route of the gateway's own table, with every kind of caller, for its own and for foreign
//! namespaces, hosts, owners and users. A route without an entry here fails the test.

use std::time::Duration;

use abide::gateway::routes::{self, RouteRule, RouteScope};
use serde_json::{Value, json};

use crate::fixtures::people::digest;
use crate::server::Server;

const NOT_ALLOWED: i64 = 1_900_403;

/// Three apps with one scope, one for each role; an expired app; and an administrator.
const APPS: &str = "apps:
  - {code: all, secret: s3cret}
  - {code: read, secret: s3cret, role: read, namespaces: [web, job-7], hosts: ['0:10.0.0.1'], users: [www], owners: [team]}
  - {code: operate, secret: s3cret, role: operate, namespaces: [web, job-7], hosts: ['0:10.0.0.1'], users: [www], owners: [team]}
  - {code: admin, secret: s3cret, role: admin, namespaces: [web, job-7], hosts: ['0:10.0.0.1'], users: [www], owners: [team]}
  - {code: late, secret: s3cret, expires: '2020-01-01T00:00:00Z'}
";

/// Three people with the same scope, one for each role; and one who has expired. A token is `token-of-NAME`.
fn users() -> String {
    let scope = "namespaces: [web, job-7], hosts: ['0:10.0.0.1'], users: [www], owners: [team]";
    let person = |name: &str, more: &str| {
        format!("  - {{name: {name}, token_sha256: {}, {more}}}\n", digest(&format!("token-of-{name}")))
    };
    let of_role = |role: Role| person(role.name(), &format!("role: {}, {scope}", role.name()));
    let late = person("late", "role: admin, expires: 2020-01-01");
    format!("users:\n{}{late}", Role::ALL.map(of_role).concat())
}

/// A caller with a role.
#[derive(Clone, Copy, Debug)]
pub enum Caller {
    App(Role),
    Person(Role),
}

impl Caller {
    pub const ALL: [Caller; 6] = [
        Caller::App(Role::Read),
        Caller::App(Role::Operate),
        Caller::App(Role::Admin),
        Caller::Person(Role::Read),
        Caller::Person(Role::Operate),
        Caller::Person(Role::Admin),
    ];

    pub fn role(self) -> Role {
        match self {
            Caller::App(role) | Caller::Person(role) => role,
        }
    }

    /// The beginning of a refusal.
    pub fn lacks(self) -> String {
        match self {
            Caller::App(role) => format!("app {} lacks ", role.name()),
            Caller::Person(role) => format!("person {} lacks ", role.name()),
        }
    }

    pub fn credentials(self) -> String {
        match self {
            Caller::App(role) => auth(role.name(), "s3cret"),
            Caller::Person(role) => bearer(&format!("token-of-{}", role.name())),
        }
    }
}

fn bearer(token: &str) -> String {
    format!("Authorization: Bearer {token}\r\n")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    Read,
    Operate,
    Admin,
}

impl Role {
    pub const ALL: [Role; 3] = [Role::Read, Role::Operate, Role::Admin];

    pub fn name(self) -> &'static str {
        match self {
            Role::Read => "read",
            Role::Operate => "operate",
            Role::Admin => "admin",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Namespace,
    Host,
    Owner,
    User,
}

/// What a request is about. Each part is the apps' own, or one foreign value.
#[derive(Clone, Debug)]
pub struct Subject {
    pub namespace: &'static str,
    pub biz: i64,
    pub host: (u64, &'static str),
    pub owner: &'static str,
    pub user: &'static str,
    /// The foreign part and its value.
    pub foreign: Option<(Part, &'static str)>,
    /// Name of a process that is registered with exactly these parts.
    pub name: String,
}

impl Subject {
    pub fn own() -> Subject {
        let (namespace, host, name) = ("web", (0, "10.0.0.1"), "own-process".to_owned());
        Subject { namespace, biz: 7, host, owner: "team", user: "www", foreign: None, name }
    }

    pub fn host_key(&self) -> String {
        format!("{}:{}", self.host.0, self.host.1)
    }

    pub fn key(&self) -> String {
        format!("{}:{}:{}", self.host_key(), self.namespace, self.name)
    }

    pub fn hosts(&self) -> Value {
        json!([{"ip": self.host.1, "bk_cloud_id": self.host.0}])
    }

    pub fn spec(&self, name: &str) -> Value {
        json!({"identity": {"proc_name": name, "setup_path": format!("/opt/{}/{name}", self.namespace),
                            "pid_path": "/run/p.pid", "user": self.user},
               "control": {"start_cmd": "./run"}, "monitor_policy": {"auto_type": 1}})
    }

    pub fn request(&self, name: &str, op: i64) -> Value {
        json!({"meta": {"namespace": self.namespace, "name": name, "labels": {"abide_owner": self.owner}},
               "hosts": self.hosts(), "spec": self.spec(name), "op_type": op})
    }

    pub fn job(&self, op: i64) -> Value {
        let process = json!({"proc_name": "j", "setup_path": "/opt/j", "pid_path": "/run/j.pid", "type": 1,
                             "account": self.user, "contact": "ann", "proc_owner": "ann", "start_cmd": "./run",
                             "ip_list": [{"ip": self.host.1, "bk_cloud_id": self.host.0}]});
        json!({"bk_biz_id": self.biz, "op_type": op, "process_infos": [process]})
    }
}

/// Foreign subjects, each in one part: near misses of the apps' own values.
pub fn foreign() -> Vec<Subject> {
    let mut all = Vec::new();
    for (namespace, biz) in [("web2", 77), ("web-a", 8), ("Web", 70), ("we", 0), ("other", 1)] {
        all.push(Subject { namespace, biz, foreign: Some((Part::Namespace, namespace)), ..Subject::own() });
    }
    for (host, shown) in [
        ((0, "10.0.0.12"), "0:10.0.0.12"),
        ((1, "10.0.0.1"), "1:10.0.0.1"),
        ((0, "10.0.0.2"), "0:10.0.0.2"),
        ((10, "10.0.0.1"), "10:10.0.0.1"),
    ] {
        all.push(Subject { host, foreign: Some((Part::Host, shown)), ..Subject::own() });
    }
    for owner in ["team2", "team-a", "Team", "tea", "other"] {
        all.push(Subject { owner, foreign: Some((Part::Owner, owner)), ..Subject::own() });
    }
    for user in ["www-data", "WWW", "ww", "root"] {
        all.push(Subject { user, foreign: Some((Part::User, user)), ..Subject::own() });
    }
    for (nth, subject) in all.iter_mut().enumerate() {
        subject.name = format!("foreign-process-{nth}");
    }
    all
}

/// A request of a route: its query, its body, the role that it needs, and the parts that decide it.
struct Sample {
    query: String,
    body: Value,
    headers: String,
    role: Role,
    parts: &'static [Part],
}

const ALL_PARTS: &[Part] = &[Part::Namespace, Part::Host, Part::Owner, Part::User];
const INSTANCE: &[Part] = &[Part::Namespace, Part::Host, Part::Owner];
const PLACE: &[Part] = &[Part::Namespace, Part::Host];

fn sample(body: Value, role: Role, parts: &'static [Part]) -> Sample {
    Sample { query: String::new(), body, headers: String::new(), role, parts }
}

fn query(query: String, parts: &'static [Part]) -> Sample {
    Sample { query, ..sample(json!({}), Role::Read, parts) }
}

/// The requests of a route that name a subject. A new route has none, and fails the test.
fn named_requests(word: &str, of: &Subject) -> Vec<Sample> {
    let (name, fresh) = (of.name.as_str(), format!("{}-new", of.name));
    let (namespace, host) = (of.namespace, of.host_key());
    let group = json!({"process_group": [{"name": "g", "resource": {"cpu_pool_limit": 50}}]});
    match word {
        "register" => vec![sample(of.request(&fresh, 0), Role::Operate, ALL_PARTS)],
        // Of a process that exists: with its owner and its account.
        "update" => vec![sample(of.request(name, 0), Role::Operate, ALL_PARTS)],
        "unregister" => vec![sample(of.request(name, 0), Role::Operate, INSTANCE)],
        "operate" => {
            let mut registered = of.request(name, 1);
            registered["meta"]["labels"] = json!({});
            let claim = Sample {
                headers: format!("X-Abide-Owner: {}\r\n", of.owner),
                ..sample(registered.clone(), Role::Operate, ALL_PARTS)
            };
            vec![
                sample(of.request(&fresh, 0), Role::Operate, ALL_PARTS),
                sample(registered, Role::Operate, ALL_PARTS),
                claim,
                sample(of.request(name, 2), Role::Read, INSTANCE),
            ]
        }
        "operate_multi" => {
            let many = |op: i64| json!({"proc_operate_req": [of.request(name, op)]});
            vec![sample(many(0), Role::Operate, ALL_PARTS), sample(many(2), Role::Read, INSTANCE)]
        }
        "status" => vec![sample(of.request(name, 0), Role::Read, PLACE)],
        "sync" => {
            let body = json!({"meta": {"namespace": namespace}, "page": {"start": 0, "limit": 10}});
            vec![sample(body, Role::Read, &[Part::Namespace])]
        }
        "set_groups" => {
            let body = json!({"meta": {"namespace": namespace}, "hosts": of.hosts(), "spec": group});
            vec![sample(body, Role::Operate, PLACE)]
        }
        "groups" => vec![sample(of.request(name, 0), Role::Read, PLACE)],
        "agents" => vec![sample(json!({"hosts": of.hosts()}), Role::Read, &[Part::Host])],
        "manage_proc" => {
            vec![sample(of.job(1), Role::Operate, &[Part::Namespace, Part::Host, Part::User])]
        }
        "operate_process" => vec![
            sample(of.job(0), Role::Operate, &[Part::Namespace, Part::Host, Part::User]),
            sample(of.job(2), Role::Read, PLACE),
        ],
        "figures" => vec![query(format!("?instance={}", of.key()), INSTANCE)],
        "logs" => vec![query(format!("?namespace={namespace}&name={name}&host={host}"), INSTANCE)],
        "rename" => {
            let to = format!("{host}:{namespace}:{name}-renamed");
            let whole = |with: Value| json!({"from": of.key(), "to": to, "spec": with, "meta": {"namespace": namespace}});
            vec![
                sample(whole(of.spec(name)), Role::Operate, ALL_PARTS),
                sample(whole(Value::Null), Role::Operate, INSTANCE),
            ]
        }
        "processes" | "process_digests" => vec![
            query(format!("?namespace={namespace}"), &[Part::Namespace]),
            query(format!("?owner={}", of.owner), &[Part::Owner]),
        ],
        "state" => state_requests(of),
        // Lists, which other tests compare; and answers that are the same for every app.
        "watch" | "hosts" | "tasks" | "result" | "job_result" => Vec::new(),
        "access" | "metrics" | "description" => Vec::new(),
        // These need everything: their own test compares them.
        "join_tokens" | "create_join_token" | "revoke_join_token" | "revoke_host" => Vec::new(),
        "verify_audit" => Vec::new(),
        "audit" => {
            let query = format!("?namespace={namespace}");
            vec![Sample { query, ..sample(json!({}), Role::Admin, &[Part::Namespace]) }]
        }
        other => panic!("the matrix has no request for {other}"),
    }
}

/// Every kind of key, read and written; and leases.
fn state_requests(of: &Subject) -> Vec<Sample> {
    let (owner, key) = (of.owner, of.key());
    let holder = json!({"id": "one", "host": "elsewhere", "boot_id": "b", "pid": 1, "started": 1});
    let lease = format!("writer/{owner}");
    let mut all = Vec::new();
    let mut both = |key: String, value: Value, parts: &'static [Part]| {
        let write = json!({"txn": {"writes": [{"key": key, "value": value.to_string()}]}});
        all.push(sample(json!({"get": {"key": key}}), Role::Read, parts));
        all.push(sample(write, Role::Operate, parts));
        all.push(sample(json!({"txn": {"compares": [{"key": key, "changed": 7}]}}), Role::Operate, parts));
    };
    for start in ["", "at/gse/"] {
        for key in [
            format!("{start}journal/{owner}/r1/000001"),
            format!("{start}history/{owner}/1-1-1"),
            format!("{start}pin/{owner}"),
            format!("{start}left/{owner}/{}", Subject::own().key()),
            format!("{start}source/{owner}/taken"),
            format!("{start}snap/{owner}/rev/r1"),
        ] {
            both(key, json!({}), &[Part::Owner]);
        }
        both(format!("{start}hold/{key}"), json!({}), PLACE);
        both(format!("{start}pause/{}", of.namespace), json!({}), &[Part::Namespace]);
        both(format!("{start}ledger/abide/{key}"), json!({"owner": owner}), INSTANCE);
    }
    let state = |request: Value, role: Role| sample(request, role, &[Part::Owner]);
    // A hold is that of the instance's owner.
    for start in ["", "at/gse/"] {
        let hold = format!("{start}hold/{key}");
        all.push(state(json!({"txn": {"writes": [{"key": hold, "value": null}]}}), Role::Operate));
        all.push(state(json!({"txn": {"writes": [{"key": hold, "value": "{}"}]}}), Role::Operate));
    }
    all.extend([
        state(json!({"range": {"prefix": format!("journal/{owner}/")}}), Role::Read),
        state(json!({"slice": {"prefix": format!("history/{owner}/"), "limit": 5}}), Role::Read),
        state(
            json!({"changes": {"prefix": format!("snap/{owner}/rev/"), "after": 0, "wait_ms": 1}}),
            Role::Read,
        ),
        state(json!({"take_lease": {"name": lease, "holder": holder, "lives_ms": 1000}}), Role::Operate),
        state(
            json!({"renew_lease": {"name": lease, "holder": "one", "generation": 1, "lives_ms": 1000}}),
            Role::Operate,
        ),
        state(json!({"release_lease": {"name": lease, "holder": "one", "generation": 1}}), Role::Operate),
        state(json!({"reset_lease": {"name": lease, "above": 1, "force": true}}), Role::Admin),
    ]);
    all
}

pub fn auth(app: &str, secret: &str) -> String {
    format!("X-Bkapi-Authorization: {{\"bk_app_code\": \"{app}\", \"bk_app_secret\": \"{secret}\"}}\r\n")
}

/// A gateway with a process for each subject, and with entries of every kind in its store.
pub struct World {
    pub server: Server,
    _folder: tempfile::TempDir,
}

impl World {
    pub fn new() -> World {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("store.db");
        let server = Server::with_people(&file, Duration::from_secs(60), APPS, &users(), "* one\n");
        let world = World { server, _folder: folder };
        for subject in std::iter::once(Subject::own()).chain(foreign()) {
            let answer = world.server.gse("register_proc_info", subject.request(&subject.name, 0));
            let rows = answer["data"].as_object().unwrap_or_else(|| panic!("{answer}"));
            assert!(rows.values().all(|row| row["error_code"] == 0), "{answer}");
            for sample in state_requests(&subject).iter().filter(|one| one.body.get("txn").is_some()) {
                world.server.call("POST", "/api/abide/v1/state", sample.body.clone());
            }
        }
        world
    }

    /// The code of the answer, and its text.
    fn call(&self, method: &str, path: &str, caller: Caller, sample: &Sample) -> (i64, String) {
        let (headers, path) =
            (format!("{}{}", caller.credentials(), sample.headers), format!("{path}{}", sample.query));
        let (_, text) = self.server.send(method, &path, &headers, sample.body.to_string().as_bytes());
        // A granted log is a stream of lines, a refusal an envelope.
        let answer: Value = serde_json::from_str(&text).unwrap_or_default();
        assert!(answer.is_object() || path.contains("/logs?"), "{path}: {text}");
        (answer["code"].as_i64().unwrap_or(0), text)
    }
}

#[test]
fn every_route_refuses_unknown_expired_and_removed_credentials() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("store.db");
    let server = Server::with_people(&file, Duration::from_secs(60), APPS, &users(), "* one\n");
    let bodies = Subject::own().request("p", 2).to_string();
    let callers = [
        (String::new(), "no app is known"),
        (auth("all", "wrong"), "no app is known"),
        (auth("late", "s3cret"), "the secret of app late expired at 2020-01-01T00:00:00Z"),
        (auth("removed", "s3cret"), "no app is known"),
        // The token of an agent, a wrong token, and digests and secrets of others.
        (bearer("one"), "no person is known by this token"),
        (bearer("token-of-nothing"), "no person is known by this token"),
        (bearer(&digest("token-of-admin")), "no person is known by this token"),
        (bearer("s3cret"), "no person is known by this token"),
        (auth("person:admin", "token-of-admin"), "no app is known"),
        (bearer("token-of-late"), "the secret of person late expired at 2020-01-01T00:00:00Z"),
    ];
    let (mut number, mut apps) = (0u8, 0);
    for (method, path, call) in routes::all() {
        number += 1;
        let RouteRule::App(..) = call.rule() else {
            let (status, text) = server.send(method, &path, &auth("all", "s3cret"), bodies.as_bytes());
            let expected = if call.rule() == RouteRule::Public { 200 } else { 401 };
            assert_eq!(status, expected, "an app at {method} {path}: {text}");
            continue;
        };
        apps += 1;
        for (nth, (headers, says)) in callers.iter().enumerate() {
            // A peer with one wrong login is not delayed.
            let peer = [127, 2, number, u8::try_from(nth).expect("a few") + 1];
            let (status, text) = server.send_from(peer, method, &path, headers, bodies.as_bytes());
            assert!(status == 401 && text.contains(says), "{method} {path} {headers}: {status} {text}");
        }
    }
    assert!(apps > 55, "{apps}");
}

#[test]
fn every_route_compares_the_role_and_every_part_of_its_request() {
    let world = World::new();
    let (own, others) = (Subject::own(), foreign());
    let (mut granted, mut refused) = (0, 0);
    for (method, path, call) in routes::all() {
        let RouteRule::App(_, scope) = call.rule() else { continue };
        let word = call.word();
        let requests = named_requests(word, &own);
        let is_named = matches!(scope, RouteScope::Named | RouteScope::Operations | RouteScope::Keys);
        assert!(!is_named || !requests.is_empty(), "the matrix has no request for {word}");
        // Foreign subjects first: a granted request may remove the process.
        for subject in &others {
            let (part, value) = subject.foreign.expect("a foreign part");
            for sample in named_requests(word, subject).iter().filter(|one| one.parts.contains(&part)) {
                for caller in Caller::ALL {
                    let role = caller.role();
                    let (code, text) = world.call(method, &path, caller, sample);
                    let what = format!(
                        "{method} {path} as {caller:?} for {part:?} {value}: {text} of {}",
                        sample.body
                    );
                    assert_eq!(code, NOT_ALLOWED, "{what}");
                    assert!(text.contains(&caller.lacks()), "{what}");
                    // JOB names the business.
                    if role >= sample.role && !(part == Part::Namespace && word.contains("proc")) {
                        assert!(text.contains(value), "{what}");
                    }
                    refused += 1;
                }
            }
        }
        for sample in &requests {
            for caller in Caller::ALL {
                let (code, text) = world.call(method, &path, caller, sample);
                let is_granted = caller.role() >= sample.role;
                let what =
                    format!("{method} {path} as {caller:?}: {text} of {}{}", sample.query, sample.body);
                assert_eq!(code != NOT_ALLOWED, is_granted, "{what}");
                granted += usize::from(is_granted);
            }
        }
    }
    assert!(granted > 400 && refused > 4000, "{granted} granted, {refused} refused");
}
