//! Redaction without the token: a loopback listener shows neither command lines nor environment values.

use std::time::{Duration, Instant};

use crate::apply::Machine;
use crate::controller_api::{address, get, send, token};
use crate::support::until;
use crate::watch::{read_log, running, watch};

/// In a command, a variable and what a command writes.
const PRIVATE: [&str; 9] = [
    "pass-one",
    "pass-two",
    "env-one",
    "env-two",
    "says-its-password",
    "pass-bad",
    "probe-one",
    "probe-two",
    "probe-bad",
];

fn write(machine: &Machine, which: &str) {
    let control =
        format!("  control: {{start_mode: foreground, start_cmd: 'exec sleep 1000 # pass-{which}'}}\n");
    let health = format!("  health: {{cmd: 'true # probe-{which}', interval: 1}}\n");
    machine.write("a", &format!("{control}  env: {{DB: env-{which}}}\n{health}"));
}

#[test]
fn a_reader_without_the_token_sees_no_command_and_no_variable() {
    let machine = Machine::new();
    write(&machine, "one");
    let _watch = watch(&machine, "watch.log", &[]);
    let at = address(&machine, "watch.log");
    until("it runs", || running(&machine, &["a"]));
    let token = token(&machine);
    let whole = |path: &str| send(at, "GET", path, &token, b"");
    let all = ["/", "/api/v1/status", "/api/v1/processes", "/api/v1/plan", "/api/v1/history", "/metrics"];
    let is_hidden = |when: &str| {
        for path in all {
            let body = get(at, path).body;
            let told = PRIVATE.iter().find(|private| body.contains(**private));
            assert_eq!(told, None, "{when}: {path} tells it: {body}");
        }
    };
    // A step, with both sides of its change.
    write(&machine, "two");
    until("the change is an event", || whole("/api/v1/status").body.contains("pass-two"));
    is_hidden("after a change");
    assert!(whole("/").body.contains("pass-one"), "with the token both sides are shown");
    let status = get(at, "/api/v1/status").json();
    assert_eq!(
        (&status["redacted"], &whole("/api/v1/status").json()["redacted"]),
        (&true.into(), &false.into())
    );
    let titles = status["events"].to_string();
    assert!(titles.contains("start_cmd: (hidden) → (hidden)"), "the change itself is visible: {titles}");
    // A plan that waits.
    let body = br#"{"all": true}"#;
    assert_eq!(send(at, "POST", "/api/v1/pause", &token, body).status, 200);
    write(&machine, "one");
    until("the change is held", || whole("/api/v1/plan").json()["held"][0]["reason"] == "Paused");
    is_hidden("with a plan");
    let plan = get(at, "/api/v1/plan").json();
    let why = plan["held"][0]["why"].to_string();
    assert!(
        plan["redacted"] == true && why.contains("\"old\":\"(hidden)\"") && why.contains("env.DB"),
        "{plan:#}"
    );
    assert_eq!(whole("/api/v1/plan").json()["redacted"], serde_json::Value::Null);
    assert_eq!(send(at, "POST", "/api/v1/resume", &token, body).status, 200);
    // A command that fails, and prints the reason.
    machine.write(
        "bad",
        "  control: {start_mode: foreground, start_cmd: 'echo says-its-password pass-bad >&2; exit 7'}\n",
    );
    until("it failed", || {
        get(at, "/api/v1/status").json()["events"].to_string().contains("start 0:127.0.0.1:web:bad")
    });
    is_hidden("after a failure");
    // A problem of a manifest that quotes a value.
    let control = "  control: {start_mode: foreground, start_cmd: exec sleep 1000}\n";
    machine.write("wrong", &format!("{control}  health: {{http: 'ftp://x/?token=probe-bad'}}\n"));
    until("the problem is known", || whole("/api/v1/status").body.contains("probe-bad"));
    is_hidden("with a problem");
    // A browser is asked for the token where its user wants to see more.
    assert!(get(at, "/").body.contains("href=\"/login\""));
    let asked = get(at, "/login");
    assert!(
        asked.status == 401 && asked.head.to_lowercase().contains("www-authenticate: basic"),
        "{}",
        asked.head
    );
    let entered = whole("/login");
    assert!(entered.status == 303 && entered.head.to_lowercase().contains("location: /"), "{}", entered.head);
}

#[test]
fn a_wrong_token_is_logged_and_slowed_where_reading_needs_none() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let _watch = watch(&machine, "watch.log", &[]);
    let at = address(&machine, "watch.log");
    let guess = |path: &str, headers: &str| send(at, "GET", path, headers, b"");
    let begin = Instant::now();
    let bearer = "Authorization: Bearer a-wrong-guess\r\n";
    for path in ["/api/v1/status", "/", "/metrics", "/api/v1/processes", "/api/v1/plan", "/api/v1/history"] {
        assert_eq!(guess(path, bearer).status, 401, "{path}");
    }
    // As a browser sends it; `any:a-wrong-guess`.
    let asked = guess("/", "Authorization: Basic YW55OmEtd3JvbmctZ3Vlc3M=\r\n");
    assert!(asked.status == 401 && asked.head.to_lowercase().contains("www-authenticate: basic"));
    assert!(begin.elapsed() > Duration::from_secs(1), "seven guesses took {:?}", begin.elapsed());
    until("the guesses are logged", || read_log(&machine, "watch.log").contains("wrong credentials"));
    assert!(!read_log(&machine, "watch.log").contains("wrong-guess"));
    // A reader without a token, and one with the right one, are neither refused nor delayed.
    let begin = Instant::now();
    assert_eq!(get(at, "/api/v1/status").json()["redacted"], true);
    assert_eq!(guess("/api/v1/status", &token(&machine)).json()["redacted"], false);
    assert!(begin.elapsed() < Duration::from_secs(1), "they took {:?}", begin.elapsed());
}

#[test]
fn unauthenticated_readers_do_not_exhaust_event_streams() {
    use std::io::{Read, Write};
    let machine = Machine::new();
    machine.process("a", "1", "");
    let _watch = watch(&machine, "watch.log", &[]);
    let at = address(&machine, "watch.log");
    let token = token(&machine);
    let open = |headers: &str| {
        let mut stream = std::net::TcpStream::connect(at).expect("a connection");
        write!(stream, "GET /api/v1/events HTTP/1.1\r\nHost: {at}\r\n{headers}\r\n").expect("a request");
        let mut head = [0; 12];
        stream.read_exact(&mut head).expect("an answer");
        (String::from_utf8_lossy(&head[9..]).into_owned(), stream)
    };
    let held: Vec<_> = (0..64).map(|_| open("")).collect();
    assert!(held.iter().all(|(status, _)| status == "200"));
    assert_eq!(open("").0, "503", "no stream is left for readers without the token");
    assert_eq!(open(&token).0, "200", "a reader with the token");
}
