//! People at the status server of `watch`, over real HTTP: login form, sessions, CSRF, scopes, trusted proxies, TLS.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::apply::{KillOnDrop, Machine};
use crate::fixtures::certificates::{Authority, Pair};
use crate::fixtures::machine::start_logged;
use crate::http::Answer;
use crate::listen::{Events, address, get, send, token};
use crate::openapi::assert_described;
use crate::server::connect_from;
use crate::support::{abide, needs, stderr, stdout, until};
use crate::watch::{read_log, watch};

const ANN: &str = "a-long-token-of-ann";
const BOB: &str = "a-long-token-of-bob";
const ROOT: &str = "a-long-token-of-root";
const HTML: &str = "Accept: text/html\r\n";

pub fn digest(token: &str) -> String {
    hex::encode(Sha256::digest(token.as_bytes()))
}

/// `ann` operates in namespace web, `bob` reads everything, `root` may do everything, `late` has expired, `sso` has no token.
fn users() -> String {
    format!(
        "users:
  - {{name: ann, token_sha256: {}, role: operate, namespaces: [web], owners: [default]}}
  - {{name: bob, token_sha256: {}}}
  - {{name: root, token_sha256: {}, role: admin}}
  - {{name: late, token_sha256: {}, expires: 2020-01-01}}
  - {{name: sso, role: operate}}
",
        digest(ANN),
        digest(BOB),
        digest(ROOT),
        digest("a-long-token-of-late"),
    )
}

/// A controller with a users file.
struct Site {
    machine: Machine,
    at: SocketAddr,
    _watch: KillOnDrop,
}

impl Site {
    fn new(more: &[&str]) -> Site {
        let machine = Machine::new();
        machine.process("a", "1", "");
        write_private(&machine.path("users.yaml"), &users());
        let watch = watch(&machine, "watch.log", &[&["--users", "users.yaml"], more].concat());
        let at = address(&machine, "watch.log");
        Site { machine, at, _watch: watch }
    }

    fn get(&self, path: &str, headers: &str) -> Answer {
        send(self.at, "GET", path, headers, b"")
    }

    fn status(&self, path: &str, headers: &str) -> u16 {
        self.get(path, headers).status
    }

    fn post(&self, path: &str, headers: &str, body: &str) -> Answer {
        send(self.at, "POST", path, headers, body.as_bytes())
    }

    fn cookie_name(&self) -> String {
        format!("abide_session_{}", self.at.port())
    }

    /// The form's token, and the header with its cookie.
    fn form(&self) -> (String, String) {
        let form = self.get("/login", HTML);
        assert_eq!(form.status, 200, "{}", form.body);
        let csrf = between(&form.body, "name=\"csrf\" value=\"", "\"").to_owned();
        (csrf, format!("Cookie: {}\r\n", set_cookie(&form, &format!("abide_login_{}", self.at.port()))))
    }

    fn submit(&self, token: &str) -> Answer {
        let (csrf, cookie) = self.form();
        self.post("/api/v1/login", &cookie, &format!("token={token}&csrf={csrf}"))
    }

    /// A session: the header with its cookie, and its CSRF header.
    fn log_in(&self, token: &str) -> (String, String) {
        let answer = self.submit(token);
        assert_eq!(answer.status, 303, "{}", answer.body);
        let cookie = format!("Cookie: {}\r\n", set_cookie(&answer, &self.cookie_name()));
        let csrf = self.get("/api/v1/session", &cookie).json()["csrf"].as_str().expect("a token").to_owned();
        (cookie, format!("X-Abide-Csrf: {csrf}\r\n"))
    }

    /// A request from another of this machine's loopback addresses.
    fn send_from(&self, peer: [u8; 4], method: &str, path: &str, headers: &str) -> Answer {
        self.send_from_with(peer, method, path, headers, "")
    }

    fn send_from_with(&self, peer: [u8; 4], method: &str, path: &str, headers: &str, body: &str) -> Answer {
        use std::io::Write;
        let mut stream = connect_from(peer, self.at);
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: watch.example\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
        );
        stream.write_all(head.as_bytes()).expect("a request");
        Answer::read(&mut stream)
    }
}

pub fn write_private(path: &Path, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    // Replaced as a whole: a reader sees the old file or the new one.
    let next = path.with_extension("next");
    std::fs::write(&next, text).expect("a file");
    std::fs::set_permissions(&next, std::fs::Permissions::from_mode(0o600)).expect("a mode");
    std::fs::rename(&next, path).expect("it is replaced");
}

pub fn between<'a>(text: &'a str, start: &str, end: &str) -> &'a str {
    let rest = text.split_once(start).unwrap_or_else(|| panic!("{start:?} is not in {text}")).1;
    rest.split_once(end).expect("an end").0
}

/// `NAME=VALUE` of a cookie that an answer sets.
pub fn set_cookie(answer: &Answer, name: &str) -> String {
    let lines = answer.head.lines().filter_map(|line| line.strip_prefix("set-cookie: "));
    let found = lines.into_iter().find(|line| line.starts_with(&format!("{name}=")));
    found
        .unwrap_or_else(|| panic!("no {name} in {}", answer.head))
        .split(';')
        .next()
        .expect("a pair")
        .to_owned()
}

fn bearer(token: &str) -> String {
    format!("Authorization: Bearer {token}\r\n")
}

#[test]
fn a_browser_logs_in_with_a_form_and_has_a_session() {
    let site = Site::new(&[]);
    let first = site.get("/", HTML);
    assert_eq!(first.status, 303, "{}", first.body);
    assert!(first.head.contains("location: /login\r\n"), "{}", first.head);
    // A program gets no form, and no dialog of a browser opens.
    let refused = site.get("/api/v1/status", "");
    assert!(
        refused.status == 401 && refused.head.contains("www-authenticate: bearer\r\n"),
        "{}",
        refused.head
    );
    assert_eq!((site.status("/healthz", ""), site.status("/metrics", "")), (200, 401));
    let wrong = site.submit("a-wrong-token-of-16");
    assert!(wrong.status == 401 && wrong.body.contains("unknown token"), "{}", wrong.body);
    assert!(!wrong.head.contains("abide_session"), "{}", wrong.head);
    let late = site.submit("a-long-token-of-late");
    assert!(late.status == 401 && late.body.contains("this token has expired"), "{}", late.body);
    let answer = site.submit(ANN);
    assert!(answer.status == 303 && answer.head.contains("location: /\r\n"), "{}", answer.head);
    let line = answer.head.lines().find(|line| line.contains(&site.cookie_name())).expect("a cookie");
    assert!(
        line.ends_with("; path=/; max-age=43200; httponly; samesite=strict"),
        "no other attribute, and none is missing: {line}"
    );
    assert!(set_cookie(&answer, &site.cookie_name()).len() >= site.cookie_name().len() + 1 + 48, "{line}");
    let cookie = format!("Cookie: other=1; {}\r\n", set_cookie(&answer, &site.cookie_name()));
    let page = site.get("/", &format!("{cookie}{HTML}"));
    assert!(page.status == 200 && page.body.contains("<b>ann</b> (operate)"), "{}", page.body);
    let document = site.get("/api/v1/openapi.json", &cookie).json();
    let session = site.get("/api/v1/session", &cookie);
    assert_described(&document, "GET", "/api/v1/session", 200, &session.json());
    assert_eq!(session.json()["person"], "ann");
    for path in ["/api/v1/processes", "/api/v1/plan", "/metrics", "/api/v1/history"] {
        until(path, || site.status(path, &cookie) == 200);
    }
    // Two logins have two sessions, and an id is not guessable from another.
    let second = set_cookie(&site.submit(ANN), &site.cookie_name());
    assert_ne!(format!("Cookie: other=1; {second}\r\n"), cookie);
    // The same name twice may be of another site.
    let twice = format!("Cookie: {second}; {second}\r\n");
    assert_eq!(site.status("/api/v1/session", &twice), 401);
    let log = read_log(&site.machine, "watch.log");
    assert!(
        log.contains("wrong credentials") && !log.contains("a-wrong-token") && !log.contains(ANN),
        "{log}"
    );
}

#[test]
fn a_form_of_another_site_logs_nobody_in() {
    let site = Site::new(&[]);
    let (csrf, cookie) = site.form();
    let (other, _) = site.form();
    for (headers, body) in [
        ("", format!("token={ANN}&csrf={csrf}")),
        (cookie.as_str(), format!("token={ANN}")),
        (&cookie, format!("token={ANN}&csrf=")),
        (&cookie, format!("token={ANN}&csrf={other}")),
        (&format!("Cookie: abide_login_{}=\r\n", site.at.port()), format!("token={ANN}&csrf=")),
    ] {
        let answer = site.post("/api/v1/login", headers, &body);
        assert!(
            answer.status == 403 && !answer.head.contains("abide_session"),
            "{headers} {body}: {}",
            answer.head
        );
    }
    let answer = site.post("/api/v1/login", &cookie, &format!("token={ANN}&csrf={csrf}"));
    assert_eq!(answer.status, 303);
    assert_eq!(site.status("/api/v1/login", ""), 405, "a link opens no session");
}

#[test]
fn changes_of_a_session_need_its_own_csrf_token() {
    let site = Site::new(&[]);
    let (cookie, csrf) = site.log_in(ANN);
    let (_, other_session) = site.log_in(ANN);
    let (_, other_person) = site.log_in(ROOT);
    let pause = r#"{"namespace": "web"}"#;
    for wrong in ["", "X-Abide-Csrf: \r\n", "X-Abide-Csrf: 00\r\n", &other_session, &other_person] {
        for (path, body) in [("/api/v1/look", ""), ("/api/v1/pause", pause), ("/api/v1/resume", pause)] {
            let answer = site.post(path, &format!("{cookie}{wrong}"), body);
            assert!(answer.status == 403 && answer.body.contains("CSRF"), "{path} {wrong}: {}", answer.body);
        }
        let answer = site.post("/api/v1/logout", &format!("{cookie}{wrong}"), "");
        assert_eq!(answer.status, 403, "{wrong}: {}", answer.body);
    }
    assert_eq!(site.get("/api/v1/status", &cookie).json()["pauses"], json!([]));
    let answer =
        site.post("/api/v1/pause", &format!("{cookie}{csrf}"), r#"{"namespace": "web", "by": "root"}"#);
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(answer.json()["paused"]["by"], "ann", "a person acts in the own name");
    // A browser adds no bearer token to a request of another site.
    assert_eq!(site.post("/api/v1/resume", &bearer(ANN), pause).status, 200);
    // The token of the CSRF header opens nothing.
    assert_eq!(site.post("/api/v1/look", &csrf, "").status, 401);
    // A reader changes nothing, also with the right token.
    let (cookie, csrf) = site.log_in(BOB);
    let answer = site.post("/api/v1/look", &format!("{cookie}{csrf}"), "");
    assert!(answer.status == 403 && answer.body.contains("person bob lacks role operate"), "{}", answer.body);
    assert_eq!(site.status("/api/v1/processes", &cookie), 200);
}

#[test]
fn a_session_ends_by_idle_time_age_and_logout() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    write_private(&machine.path("users.yaml"), &users());
    std::fs::write(machine.path("shift"), "0").expect("a shift");
    let args = ["watch", "m", "--listen", "127.0.0.1:0", "--users", "users.yaml"];
    let mut command = machine.command(&args);
    command.env("ABIDE_CLOCK_SHIFT_FILE", machine.path("shift"));
    let watch = start_logged(&mut command, &machine.path("watch.log"));
    until("watch is ready", || read_log(&machine, "watch.log").contains("ready http://"));
    let at = address(&machine, "watch.log");
    let site = Site { machine, at, _watch: watch };
    let begin = Instant::now();
    let clock = |minutes: u64| {
        let next = site.machine.path("shift.next");
        std::fs::write(&next, (minutes * 60_000).to_string()).expect("a shift");
        std::fs::rename(next, site.machine.path("shift")).expect("it is replaced");
    };
    let (cookie, _) = site.log_in(ANN);
    let open = |headers: &str| site.status("/api/v1/session", headers) == 200;
    clock(25);
    assert!(open(&cookie));
    clock(50);
    assert!(open(&cookie), "the request 25 minutes before was an action");
    clock(81);
    assert!(!open(&cookie), "idle");
    clock(60);
    assert!(!open(&cookie), "an ended session does not come back");
    // Refreshes of an open page are no actions of a person.
    let (cookie, _) = site.log_in(ANN);
    let background = format!("{cookie}X-Abide-Background: 1\r\n");
    clock(85);
    assert!(open(&background));
    clock(91);
    assert!(!open(&background), "idle in spite of refreshes");
    let (cookie, _) = site.log_in(ANN);
    for quarters in 1..48 {
        clock(91 + 15 * quarters);
        assert!(open(&cookie), "after {quarters} quarters of an hour");
    }
    clock(91 + 12 * 60);
    assert!(!open(&cookie), "12 hours old");
    let (cookie, csrf) = site.log_in(ANN);
    let (second, _) = site.log_in(ANN);
    let mut events = Events::open(site.at, "/api/v1/events", &cookie);
    let form = csrf.trim().replace("X-Abide-Csrf: ", "csrf=");
    let answer = site.post("/api/v1/logout", &cookie, &form);
    assert!(answer.status == 303 && answer.head.contains("max-age=0"), "{}", answer.head);
    assert!(!open(&cookie) && open(&second), "no other one ends");
    assert!(events.ends(), "the stream of the session ends");
    assert!(begin.elapsed() < Duration::from_secs(300), "the clock of the test did not move by itself");
}

#[test]
fn sessions_end_with_the_person_the_expiry_and_the_token() {
    let site = Site::new(&[]);
    let people = |text: &str| write_private(&site.machine.path("users.yaml"), text);
    let (ann, _) = site.log_in(ANN);
    let (bob, _) = site.log_in(BOB);
    let (root, csrf) = site.log_in(ROOT);
    let (unused, _) = site.log_in(ROOT);
    let mut stream = Events::open(site.at, "/api/v1/events", &ann);
    let mut by_token = Events::open(site.at, "/api/v1/events", &bearer(ANN));
    // An invalid file changes nothing.
    people("users: [{name: ann}");
    until("the error is logged", || read_log(&site.machine, "watch.log").contains("reload failed"));
    assert_eq!(site.status("/api/v1/session", &ann), 200);
    // ann has another token, bob has expired, and root only reads.
    let new = "another-token-of-ann";
    people(&format!(
        "users:\n  - {{name: ann, token_sha256: {}}}\n  - {{name: bob, token_sha256: {}, expires: 2020-01-01}}\n  - {{name: root, token_sha256: {}, role: read}}\n",
        digest(new),
        digest(BOB),
        digest(ROOT)
    ));
    until("the rotated token ends its session", || site.status("/api/v1/session", &ann) == 401);
    assert!(stream.ends() && by_token.ends(), "streams end, too");
    assert_eq!(site.status("/api/v1/session", &bob), 401, "expired");
    assert_eq!((site.submit(ANN).status, site.submit(new).status), (401, 303));
    assert_eq!(site.status("/api/v1/session", &root), 200);
    let answer = site.post("/api/v1/look", &format!("{root}{csrf}"), "");
    assert!(answer.body.contains("person root lacks role operate"), "{}", answer.body);
    people("users: []\n");
    until("the removed person has no session", || site.status("/api/v1/session", &root) == 401);
    assert_eq!(site.status("/api/v1/session", &bearer(ROOT)), 401);
    // A person who comes back does not get an old session, also without a request in between.
    people(&users());
    until("root is known again", || site.status("/api/v1/session", &bearer(ROOT)) == 200);
    assert_eq!(site.status("/api/v1/session", &unused), 401);
    assert_eq!((site.status("/api/v1/session", &root), site.status("/api/v1/session", &ann)), (401, 401));
}

#[test]
fn a_person_sees_and_changes_only_the_own_namespaces() {
    let site = Site::new(&[]);
    for (name, namespace) in [("b", "web2"), ("c", "web-a"), ("d", "Web"), ("e", "we")] {
        site.machine.process(name, "1", "");
        site.machine.edit(name, "namespace: web", &format!("namespace: {namespace}"));
    }
    std::fs::write(site.machine.path("m/z.yaml"), "kind: Process\nweb2-problem: 1\n").expect("a file");
    let (ann, root) = (bearer(ANN), bearer(ROOT));
    until("all run", || {
        let status = site.get("/api/v1/status", &root).json();
        status["instances"]["sync"]["InSync"] == 5 && status["problems"][0]["line"].is_number()
    });
    let mut events = Events::open(site.at, "/api/v1/events?after=0", &ann);
    let answer = site.post("/api/v1/pause", &root, r#"{"namespace": "web2", "reason": "secret-web2"}"#);
    assert_eq!(answer.status, 200);
    until("the pause is known", || {
        site.get("/api/v1/status", &root).json()["pauses"][0]["namespace"] == "web2"
    });
    site.machine.process("b", "2", "");
    site.machine.edit("b", "namespace: web", "namespace: web2");
    until("the change is held", || site.get("/api/v1/status", &root).json()["held_total"] == 1);
    assert_eq!(site.get("/api/v1/status", &ann).json()["held_total"], 0);
    let foreign = ["web2", "web-a", ":Web:", "Web/", ":we:", "we/e"];
    for path in ["/", "/api/v1/status", "/api/v1/processes", "/api/v1/plan", "/api/v1/history"] {
        let (own, all) = (site.get(path, &ann), site.get(path, &root));
        assert_eq!((own.status, all.status), (200, 200), "{path}: {}", own.body);
        assert!(all.body.contains("web2"), "{path}: the administrator sees it: {}", all.body);
        for other in foreign {
            assert!(!own.body.contains(other), "{path} shows {other}: {}", own.body);
        }
        assert!(
            own.body.contains(if path.contains("plan") { "default" } else { "web" }),
            "{path}: {}",
            own.body
        );
    }
    let rows = site.get("/api/v1/processes", &ann).json();
    assert_eq!(rows.as_array().map(Vec::len), Some(1), "{rows}");
    assert_eq!(rows[0]["instance"], "0:127.0.0.1:web:a");
    assert_eq!(site.get("/api/v1/status", &ann).json()["instances"]["total"], 1);
    let history = site.get("/api/v1/history", &ann).json();
    assert_eq!(history[0]["summary"]["instances"], 1, "{history}");
    for namespace in ["web2", "web-a", "Web", "we"] {
        for path in ["/api/v1/pause", "/api/v1/resume"] {
            let answer = site.post(path, &ann, &json!({"namespace": namespace}).to_string());
            let says = format!("person ann lacks namespace {namespace}");
            assert!(answer.status == 403 && answer.body.contains(&says), "{path}: {}", answer.body);
        }
    }
    let answer = site.post("/api/v1/pause", &ann, r#"{"all": true}"#);
    assert!(answer.status == 403 && answer.body.contains("namespace * (all namespaces)"), "{}", answer.body);
    // Steps of other namespaces come before this one, and are not in the stream.
    site.post("/api/v1/resume", &root, r#"{"namespace": "web2"}"#);
    for name in ["b", "c", "d", "e", "a"] {
        site.machine.process(name, "2", "");
        let namespace = match name {
            "b" => "web2",
            "c" => "web-a",
            "d" => "Web",
            "e" => "we",
            _ => "web",
        };
        site.machine.edit(name, "namespace: web", &format!("namespace: {namespace}"));
        if name != "a" {
            let key = format!("start {name} 2");
            until("it is restarted", || site.machine.effects().contains(&key));
        }
    }
    loop {
        let (_, event) = events.next();
        assert_eq!(event["instance"], "0:127.0.0.1:web:a", "{event}");
        if event["op"] == "restart" {
            break;
        }
    }
}

#[test]
fn the_user_header_counts_only_from_a_trusted_proxy() {
    const PROXY: [u8; 4] = [127, 9, 9, 9];
    let proxy = ["--trusted-proxy", "127.9.9.9/32", "--user-header", "X-Forwarded-User"];
    let site = Site::new(&proxy);
    let ann = "X-Forwarded-User: ann\r\n";
    for peer in [[127, 0, 0, 1], [127, 9, 9, 8], [127, 9, 9, 10]] {
        assert_eq!(site.send_from(peer, "GET", "/api/v1/session", ann).status, 401, "{peer:?}");
    }
    let says = "user header ignored: the peer is not a trusted proxy";
    until("it is logged", || read_log(&site.machine, "watch.log").contains(says));
    let session = site.send_from(PROXY, "GET", "/api/v1/session", ann);
    assert_eq!((session.status, &session.json()["person"]), (200, &json!("ann")), "{}", session.body);
    assert_eq!(session.json()["csrf"], Value::Null, "a program has no session");
    for (name, says) in
        [("eve", "person eve is not in the users file"), ("Ann", "person Ann is not"), ("late", "expired at")]
    {
        let answer = site.send_from(PROXY, "GET", "/api/v1/status", &format!("X-Forwarded-User: {name}\r\n"));
        assert!(answer.status == 403 && answer.body.contains(says), "{name}: {}", answer.body);
    }
    let two = format!("{ann}X-Forwarded-User: root\r\n");
    assert_eq!(site.send_from(PROXY, "GET", "/api/v1/session", &two).status, 400);
    // Without a header the proxy is a peer like others.
    assert_eq!(site.send_from(PROXY, "GET", "/api/v1/session", "").status, 401);
    // The login at the proxy is sent with requests of other sites' pages, too.
    let answer = site.send_from(PROXY, "POST", "/api/v1/look", ann);
    assert!(answer.status == 403 && answer.body.contains("CSRF"), "{}", answer.body);
    let https = format!("{ann}{HTML}X-Forwarded-Proto: https\r\n");
    let page = site.send_from(PROXY, "GET", "/", &https);
    let name = format!("__host-{}", site.cookie_name());
    let line = page.head.lines().find(|line| line.contains(&name)).unwrap_or_else(|| panic!("{}", page.head));
    assert!(line.ends_with("; httponly; samesite=strict; secure"), "{line}");
    let cookie = set_cookie(&page, &name).replace("__host-", "__Host-");
    let csrf = between(&page.body, "name=\"csrf\" value=\"", "\"");
    let change = format!("Cookie: {cookie}\r\nX-Abide-Csrf: {csrf}\r\nX-Forwarded-Proto: https\r\n");
    let by = |name: &str| format!("{change}X-Forwarded-User: {name}\r\n");
    assert_eq!(site.send_from(PROXY, "POST", "/api/v1/look", &by("ann")).status, 202);
    assert_eq!(
        site.send_from(PROXY, "POST", "/api/v1/look", &change).status,
        401,
        "the session needs the proxy's header"
    );
    assert_eq!(site.send_from([127, 0, 0, 1], "POST", "/api/v1/look", &by("ann")).status, 401);
    // Another person at the same browser does not use the session, and ends it.
    assert_eq!(site.send_from(PROXY, "POST", "/api/v1/look", &by("sso")).status, 403);
    assert_eq!(site.send_from(PROXY, "POST", "/api/v1/look", &by("ann")).status, 403);
    // A person without a token has only the proxy; tokens work directly.
    assert_eq!(site.send_from(PROXY, "GET", "/api/v1/session", "X-Forwarded-User: sso\r\n").status, 200);
    assert_eq!(site.status("/api/v1/session", &bearer(ANN)), 200);
    // The person of the header counts, not the credentials next to it.
    let both = format!("X-Forwarded-User: bob\r\n{}", bearer(ROOT));
    assert_eq!(site.send_from(PROXY, "GET", "/api/v1/session", &both).json()["person"], "bob");
}

/// A connection with TLS, verified against an authority.
fn curl(site: &Site, ca: &str, path: &str) -> (bool, String) {
    let url = format!("https://localhost:{}{path}", site.at.port());
    let mut command = std::process::Command::new("curl");
    command.args(["-s", "-S", "-i", "-m", "20", "--cacert", ca, "-H", HTML.trim(), &url]);
    let output =
        command.current_dir(site.machine.folder.path()).stdin(Stdio::null()).output().expect("curl runs");
    (output.status.success(), stdout(&output) + &stderr(&output))
}

#[test]
fn tls_of_the_listener_is_reloaded_and_a_bad_pair_keeps_the_old_one() {
    if !needs("curl") {
        return;
    }
    let machine = Machine::new();
    machine.process("a", "1", "");
    write_private(&machine.path("users.yaml"), &users());
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let write = |name: &str, text: &str| write_private(&machine.path(name), text);
    let install = |Pair { certificate, key }: Pair| {
        write("key.pem", &key);
        write("cert.pem", &certificate);
    };
    write("old-ca.pem", &old.pem);
    write("new-ca.pem", &new.pem);
    install(old.sign("localhost"));
    let args = [
        "watch",
        "m",
        "--listen",
        "127.0.0.1:0",
        "--users",
        "users.yaml",
        "--tls-cert",
        "cert.pem",
        "--tls-key",
    ];
    let child = machine.start(&[&args[..], &["key.pem"]].concat(), "watch.log");
    until("watch is ready", || read_log(&machine, "watch.log").contains("ready https://"));
    let text = read_log(&machine, "watch.log");
    let at = text.lines().find_map(|line| line.strip_prefix("ready https://")).expect("an address");
    let at = at.trim().parse().expect("an address");
    let site = Site { machine, at, _watch: child };
    let (ok, text) = curl(&site, "old-ca.pem", "/login");
    assert!(ok && text.contains("HTTP/1.1 200"), "{text}");
    let name = format!("set-cookie: __Host-abide_login_{}=", site.at.port());
    let line = text.lines().find(|line| line.starts_with(&name)).unwrap_or_else(|| panic!("{text}"));
    assert!(line.trim_end().ends_with("; HttpOnly; SameSite=Strict; Secure"), "{line}");
    assert!(!curl(&site, "new-ca.pem", "/healthz").0, "another authority is not trusted");
    assert_eq!(get(site.at, "/healthz").status, 0, "no plain http");
    // A certificate without its key is logged, and the old pair stays.
    let write = |name: &str, text: &str| write_private(&site.machine.path(name), text);
    let next = new.sign("localhost");
    write("cert.pem", &next.certificate);
    until("the error is logged", || read_log(&site.machine, "watch.log").contains("reload failed"));
    assert!(curl(&site, "old-ca.pem", "/healthz").0);
    write("key.pem", &next.key);
    until("the new pair is used", || curl(&site, "new-ca.pem", "/healthz").0);
    assert!(!curl(&site, "old-ca.pem", "/healthz").0);
}

#[test]
fn guesses_in_the_form_are_delayed_and_logged() {
    let site = Site::new(&[]);
    let begin = Instant::now();
    for _ in 0..7 {
        assert_eq!(site.submit("a-wrong-token-of-16").status, 401);
    }
    // Three are free; then 100, 200, 400 and 800 ms.
    assert!(begin.elapsed() >= Duration::from_millis(1500), "{:?}", begin.elapsed());
    let begin = Instant::now();
    let (cookie, _) = site.log_in(ANN);
    assert_eq!(site.status("/api/v1/session", &cookie), 200);
    assert!(
        begin.elapsed() < Duration::from_secs(3),
        "the right token is not delayed: {:?}",
        begin.elapsed()
    );
    let log = read_log(&site.machine, "watch.log");
    assert!(log.contains("wrong credentials") && log.contains("a person"), "{log}");
    let large = format!("token={}", "x".repeat(9000));
    assert_eq!(site.post("/api/v1/login", "", &large).status, 413);
}

#[test]
fn a_controller_without_people_is_unchanged() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let _watch = watch(&machine, "watch.log", &[]);
    let at = address(&machine, "watch.log");
    assert_eq!(get(at, "/api/v1/status").status, 200, "reads on loopback need no token");
    assert_eq!(send(at, "GET", "/", HTML, b"").status, 200);
    let login = send(at, "GET", "/login", HTML, b"");
    assert!(login.status == 401 && login.head.contains("www-authenticate: basic realm="), "{}", login.head);
    assert!(!login.head.contains("set-cookie"), "{}", login.head);
    assert_eq!(send(at, "GET", "/login", &token(&machine), b"").status, 303);
    assert_eq!(send(at, "POST", "/api/v1/look", "", b"").status, 401);
    assert_eq!(send(at, "POST", "/api/v1/look", &token(&machine), b"").status, 202);
    for (method, path) in [("POST", "/api/v1/login"), ("POST", "/api/v1/logout"), ("GET", "/api/v1/session")]
    {
        assert_eq!(send(at, method, path, "", b"").status, 404, "{path}");
    }
    // The header of a proxy means nothing.
    assert_eq!(send(at, "POST", "/api/v1/look", "X-Forwarded-User: ann\r\n", b"").status, 401);
}

#[test]
fn the_token_of_the_listener_and_webhooks_work_next_to_people() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    write_private(&machine.path("users.yaml"), &users());
    write_private(&machine.path("listener.token"), "the-token-of-the-listener\n");
    write_private(&machine.path("secret"), "a long webhook secret\n");
    let more = ["--users", "users.yaml", "--token-file", "listener.token", "--webhook-secret-file", "secret"];
    let _watch = watch(&machine, "watch.log", &more);
    let at = address(&machine, "watch.log");
    let listener = bearer("the-token-of-the-listener");
    assert_eq!(send(at, "GET", "/api/v1/status", &listener, b"").status, 200);
    assert_eq!(
        send(at, "POST", "/api/v1/pause", &listener, br#"{"all": true, "by": "ops"}"#).json()["paused"]["by"],
        "ops"
    );
    let password = "Authorization: Basic OnRoZS10b2tlbi1vZi10aGUtbGlzdGVuZXI=\r\n";
    assert_eq!(send(at, "GET", "/", password, b"").status, 200);
    assert_eq!(send(at, "GET", "/login", password, b"").status, 303);
    let session = send(at, "GET", "/api/v1/session", &listener, b"").json();
    assert_eq!((&session["role"], &session["person"]), (&json!("admin"), &Value::Null));
    assert_eq!(
        send(at, "POST", "/api/v1/webhook", "X-Gitlab-Token: a long webhook secret\r\n", b"{}").status,
        202
    );
    assert_eq!(send(at, "GET", "/api/v1/status", &bearer(BOB), b"").status, 200);
    assert_eq!(send(at, "GET", "/api/v1/status", &bearer("the-token-of-the-listeneR"), b"").status, 401);
}

#[test]
fn flags_that_would_trust_too_much_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    write_private(&folder.path().join("users.yaml"), &users());
    let run = |args: &str| {
        let all: Vec<&str> = ["watch", "m"].into_iter().chain(args.split(' ')).collect();
        let output = abide(&all, folder.path(), b"");
        (output.status.code(), stderr(&output))
    };
    for (args, says) in [
        ("--listen 0.0.0.0:0 --users users.yaml", "without TLS"),
        ("--listen 0.0.0.0:0", "without a token"),
        ("--trusted-proxy 10.0.0.1", "--user-header"),
        ("--users users.yaml --user-header X-User", "--trusted-proxy"),
        ("--trusted-proxy 10.0.0.1 --user-header X-User", "--users"),
        ("--users users.yaml --trusted-proxy 0.0.0.0/0 --user-header X-User", "trust every peer"),
        ("--users users.yaml --trusted-proxy ten --user-header X-User", "address range"),
        (
            "--users users.yaml --trusted-proxy 10.0.0.1 --user-header Authorization",
            "clients send this header",
        ),
        ("--tls-cert cert.pem", "--tls-key"),
    ] {
        let (code, text) = run(args);
        assert!(code == Some(64) && text.contains(says), "{args}: {code:?} {text}");
    }
    let (code, text) = run("--listen 127.0.0.1:0 --users missing.yaml");
    assert!(code == Some(1) && text.contains("--users: cannot read missing.yaml"), "{code:?} {text}");
    assert!(!folder.path().join(".abide-home/address").exists(), "no local system was started: {text}");
}

/// Who calls a route of the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Visitor {
    Nothing,
    Wrong,
    Expired,
    Removed,
    OldSession,
    Token(&'static str),
    /// A session without its CSRF token.
    Cookie(&'static str),
    Session(&'static str),
}

/// The expected status. A route without a row fails the test.
fn expected(path: &str, visitor: Visitor) -> u16 {
    use Visitor::{Cookie, Expired, Nothing, OldSession, Removed, Session, Token, Wrong};
    match path {
        "/healthz" | "/readyz" => 200,
        // A wrong token in the header is compared; without one it is the form.
        "/login" => match visitor {
            Nothing | OldSession => 200,
            Wrong | Expired | Removed => 401,
            // A bearer token is not a password of the listener.
            Token(_) => 401,
            Cookie(_) | Session(_) => 303,
        },
        // The form has a token of its own.
        "/api/v1/login" => 403,
        "/api/v1/webhook" => 404,
        "/api/v1/logout" => match visitor {
            Cookie(_) => 403,
            Session(_) => 303,
            Nothing | Wrong | Expired | Removed | OldSession | Token(_) => 401,
        },
        "/"
        | "/metrics"
        | "/api/v1/status"
        | "/api/v1/processes"
        | "/api/v1/events"
        | "/api/v1/plan"
        | "/api/v1/history"
        | "/api/v1/openapi.json"
        | "/api/v1/session" => match visitor {
            Nothing | Wrong | Expired | Removed | OldSession => 401,
            Token(_) | Cookie(_) | Session(_) => 200,
        },
        "/api/v1/pause" | "/api/v1/resume" | "/api/v1/look" => match visitor {
            Nothing | Wrong | Expired | Removed | OldSession => 401,
            Token("read") | Session("read") | Cookie(_) => 403,
            Token(_) | Session(_) if path == "/api/v1/look" => 202,
            Token(_) | Session(_) => 200,
        },
        other => panic!("the matrix has no row for {other}"),
    }
}

#[test]
fn every_route_of_the_controller_has_its_rule_for_every_caller() {
    use Visitor::{Cookie, Expired, Nothing, OldSession, Removed, Session, Token, Wrong};
    const ROLES: [&str; 3] = ["read", "operate", "admin"];
    let site = Site::new(&[]);
    let long = |name: &str| format!("a-long-token-of-{name}");
    let person = |name: &str, more: &str| {
        format!("  - {{name: {name}, token_sha256: {}, {more}}}\n", digest(&long(name)))
    };
    let roles = ROLES.map(|role| person(role, &format!("role: {role}"))).concat();
    let (late, removed) = (person("late", "expires: 2020-01-01"), person("removed", "role: admin"));
    let write = |text: String| write_private(&site.machine.path("users.yaml"), &format!("users:\n{text}"));
    write(format!("{roles}{late}{removed}"));
    until("the new file is read", || site.status("/api/v1/session", &bearer(&long("removed"))) == 200);
    let (old, _) = site.log_in(&long("removed"));
    write(format!("{roles}{late}"));
    until("a person is removed", || site.status("/api/v1/session", &bearer(&long("removed"))) == 401);
    until("it is ready", || site.status("/readyz", "") == 200);
    let mut visitors = vec![Nothing, Wrong, Expired, Removed, OldSession];
    visitors.extend(ROLES.into_iter().flat_map(|role| [Token(role), Cookie(role), Session(role)]));
    let (mut nth, mut compared) = (0u8, 0);
    for (method, path) in abide::dashboard::route_table() {
        nth += 1;
        for (other, visitor) in visitors.iter().enumerate() {
            let headers = match visitor {
                Nothing => String::new(),
                Wrong => bearer(&long("nothing")),
                Expired => bearer(&long("late")),
                Removed => bearer(&long("removed")),
                OldSession => old.clone(),
                Token(role) => bearer(&long(role)),
                // One of its own, since a logout ends it.
                Cookie(role) => site.log_in(&long(role)).0,
                Session(role) => {
                    let (cookie, csrf) = site.log_in(&long(role));
                    cookie + &csrf
                }
            };
            let is_stream = path == "/api/v1/events" && expected(path, *visitor) == 200;
            if is_stream {
                drop(Events::open(site.at, path, &headers));
                continue;
            }
            let body = if path.ends_with("/pause") || path.ends_with("/resume") {
                r#"{"namespace": "web"}"#
            } else {
                ""
            };
            // A peer with one wrong login is not delayed.
            let peer = [127, 3, nth, u8::try_from(other).expect("a few") + 1];
            let answer = site.send_from_with(peer, method, path, &headers, body);
            let what = format!("{method} {path} as {visitor:?}: {}", answer.body);
            assert_eq!(answer.status, expected(path, *visitor), "{what}");
            compared += 1;
        }
    }
    assert!(compared > 200, "{compared}");
}
