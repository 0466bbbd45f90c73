//! People at the status server of `watch`, over real HTTP: login form, sessions, CSRF, scopes, trusted proxies, TLS.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::apply::Machine;
use crate::controller_api::{Events, address};
use crate::fixtures::machine::start_logged;
use crate::fixtures::people::{
    ANN, BOB, HTML, ROOT, Site, bearer, between, digest, set_cookie, users, write_private,
};
use crate::fixtures::schemas::assert_described;
use crate::support::until;
use crate::watch::read_log;

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
fn a_form_of_another_site_opens_no_session() {
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

/// The script of the page parses what it fetches under the policy of the page: a style has another nonce.
#[test]
fn a_refresh_of_the_page_has_no_style_that_its_policy_refuses() {
    let site = Site::new(&[]);
    until("it is ready", || site.status("/readyz", "") == 200);
    let (cookie, _) = site.log_in(ANN);
    let page = site.get("/", &format!("{cookie}{HTML}"));
    assert!(page.body.contains("<style nonce=") && page.body.contains("log out"), "{}", page.body);
    let refresh = site.get("/", &format!("{cookie}{HTML}X-Abide-Background: 1\r\n"));
    assert_eq!(refresh.status, 200);
    assert!(refresh.head.contains("default-src 'none'"), "{}", refresh.head);
    for missing in ["<style", "<script", "csrf", "style="] {
        assert!(!refresh.body.contains(missing), "{missing}: {}", refresh.body);
    }
    let main = |text: &str| between(text, "<main id=\"main\"", "</main>").contains("web/a");
    assert!(main(&page.body) && main(&refresh.body), "{}", refresh.body);
    assert!(refresh.body.contains("<title>abide: "), "{}", refresh.body);
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
