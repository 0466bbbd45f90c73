//! The controller's HTTP API, queried over raw HTTP: status, events, authorized changes, webhooks, notifications,
//! systemd.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

use crate::apply::Machine;
use crate::http::{Answer, Request};
use crate::support::until;
use crate::system::kill;
use crate::watch::{read_log, running, watch};

/// Where a `ready` line in a log leads to.
pub fn address(machine: &Machine, log: &str) -> SocketAddr {
    let text = read_log(machine, log);
    let line = text.lines().find_map(|line| line.strip_prefix("ready http://")).expect("a ready line");
    line.trim().parse().expect("an address")
}

pub fn send(at: SocketAddr, method: &str, path: &str, headers: &str, body: &[u8]) -> Answer {
    let mut stream = TcpStream::connect(at).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    let host = if headers.contains("Host:") { String::new() } else { format!("Host: {at}\r\n") };
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\n{host}Connection: close\r\nContent-Length: {length}\r\n{headers}\r\n"
    );
    stream.write_all(head.as_bytes()).expect("a request");
    let _ = stream.write_all(body);
    Answer::read(&mut stream)
}

pub fn get(at: SocketAddr, path: &str) -> Answer {
    send(at, "GET", path, "", b"")
}

pub fn token(machine: &Machine) -> String {
    let text = std::fs::read_to_string(machine.path(".abide-home/watch.token")).expect("a token");
    format!("Authorization: Bearer {}\r\n", text.trim())
}

pub fn converged(at: SocketAddr) -> bool {
    get(at, "/api/v1/status").json()["converged"] == true
}

/// A stream of events: the numbers and what they say.
pub struct Events(BufReader<TcpStream>);

impl Events {
    pub fn open(at: SocketAddr, path: &str, headers: &str) -> Events {
        let mut stream = TcpStream::connect(at).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {at}\r\n{headers}\r\n").expect("a request");
        let mut events = Events(BufReader::new(stream));
        let mut line = String::new();
        events.0.read_line(&mut line).expect("a status");
        assert!(line.contains(" 200 "), "{line}");
        events
    }

    pub fn next(&mut self) -> (u64, Value) {
        let mut id = 0;
        loop {
            let mut line = String::new();
            assert!(self.0.read_line(&mut line).expect("a line") > 0, "the stream ended");
            if let Some(number) = line.strip_prefix("id: ") {
                id = number.trim().parse().expect("a number");
            }
            if let Some(data) = line.strip_prefix("data: ") {
                return (id, serde_json::from_str(data).expect("JSON"));
            }
        }
    }

    /// Whether the stream ends after what was sent already.
    pub fn ends(&mut self) -> bool {
        let mut line = String::new();
        loop {
            line.clear();
            match self.0.read_line(&mut line) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(_) => return false,
            }
        }
    }

    fn until(&mut self, kind: &str) -> (u64, Value) {
        loop {
            let (id, value) = self.next();
            if value["kind"] == kind {
                return (id, value);
            }
        }
    }
}

#[test]
fn the_api_reports_the_status_of_everything() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    machine.process("b", "1", "");
    let _watch = watch(&machine, "watch.log", &[]);
    let at = address(&machine, "watch.log");
    assert_eq!(get(at, "/healthz").status, 200);
    until("it converges", || converged(at));
    assert_eq!(get(at, "/readyz").json()["status"], "ok");
    let status = get(at, "/api/v1/status").json();
    let fields =
        ["role", "owner", "target", "held_total", "queue", "trouble"].map(|field| status[field].clone());
    assert_eq!(json!(fields), json!(["leader", "default", "local", 0, 0, null]), "{status:#}");
    assert_eq!(status["instances"]["sync"]["InSync"], 2);
    assert!(status["source"]["revision"].as_str().is_some_and(|text| text.len() == 32), "{status:#}");
    // The rows of the contract.
    let rows = get(at, "/api/v1/processes").json();
    let names: Vec<&str> = rows[0].as_object().expect("a row").keys().map(String::as_str).collect();
    let contract = abide::manifest::rows::ROW_FIELDS;
    assert_eq!(names[..contract.len()], contract);
    assert_eq!((&rows[0]["instance"], &rows[0]["sync"]), (&json!("0:127.0.0.1:web:a"), &json!("InSync")));
    assert_eq!(rows[0]["pid"], machine.rows()["a"]["pid"]);
    assert_eq!(rows[0]["revision"], machine.rows()["a"]["revision"]);
    // A person holds one instance, which is then out of sync.
    assert_eq!(machine.run(&["stop", "web/b", "--reason", "<b>by hand</b>"]).0, 0);
    assert_eq!(send(at, "POST", "/api/v1/look", &token(&machine), b"").status, 202);
    until("it is held", || get(at, "/api/v1/processes").json()[1]["sync"] == "Held");
    let plan = get(at, "/api/v1/plan").json();
    assert_eq!(
        (&plan["version"], &plan["held"][0]["reason"], &plan["summary"]["held"]),
        (&json!(1), &json!("Hold"), &json!(1))
    );
    assert!(plan["observed_at"].as_str().is_some() && plan["fingerprint"].as_str().is_some(), "{plan:#}");
    let history = get(at, "/api/v1/history?limit=1").json();
    assert_eq!((history.as_array().map(Vec::len), &history[0]["summary"]["start"]), (Some(1), &json!(2)));
    // The page shows it, as text.
    let page = get(at, "/");
    assert!(page.head.contains("content-security-policy: default-src 'none'"), "{}", page.head);
    assert!(
        page.body.contains("<b>web/b</b>") && page.body.contains("&lt;b&gt;by hand&lt;/b&gt;"),
        "{}",
        page.body
    );
    assert!(
        !page.body.contains("<b>by hand") && !page.body.contains("src=") && !page.body.contains("http://")
    );
    // A broken file is a problem with a place.
    std::fs::write(machine.path("m/z.yaml"), "kind: Process\nstrange: 1\n").expect("a file");
    until("it is logged", || get(at, "/api/v1/status").json()["problems"][0]["line"].is_number());
    assert!(get(at, "/").body.contains("m/z.yaml:"));
}

#[test]
fn prometheus_metrics_are_served() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let _watch = watch(&machine, "watch.log", &[]);
    let at = address(&machine, "watch.log");
    until("it converges", || converged(at));
    let answer = get(at, "/metrics");
    assert!(answer.head.contains("text/plain; version=0.0.4"));
    let mut kinds = std::collections::BTreeMap::new();
    let mut samples = std::collections::BTreeMap::new();
    for line in answer.body.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("a kind");
            assert!(kinds.insert(name.to_owned(), kind.to_owned()).is_none(), "{name} twice");
        } else if !line.starts_with('#') {
            let (name, value) = line.rsplit_once(' ').expect("a sample");
            let value: f64 = value.parse().unwrap_or_else(|_| panic!("{line}"));
            assert!(samples.insert(name.to_owned(), value).is_none(), "{name} twice");
            let family = name.split('{').next().expect("a name");
            let ends = ["_bucket", "_sum", "_count"].iter().find_map(|end| family.strip_suffix(end));
            assert!(
                kinds.contains_key(family) || ends.is_some_and(|name| kinds[name] == "histogram"),
                "{line}"
            );
        }
    }
    assert_eq!(samples["abide_operations_total{op=\"start\",outcome=\"Done\"}"], 1.0);
    assert_eq!((samples["abide_leader"], samples["abide_queue"]), (1.0, 0.0));
    assert!(samples["abide_last_look_age_seconds"] < 20.0);
    assert!(samples["abide_reconcile_seconds_bucket{le=\"+Inf\"}"] >= 2.0);
    let in_sync: f64 =
        samples.iter().filter(|(name, _)| name.contains("sync=\"InSync\"")).map(|(_, value)| value).sum();
    assert_eq!(in_sync, 1.0, "{}", answer.body);
}

#[test]
fn events_stream_and_can_be_resumed() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let mut watch = watch(&machine, "watch.log", &[]);
    let at = address(&machine, "watch.log");
    let mut events = Events::open(at, "/api/v1/events?after=0", "");
    let (_, step) = events.until("step");
    let fields = ["op", "outcome", "instance", "level"].map(|field| step[field].clone());
    assert_eq!(json!(fields), json!(["start", "Done", "0:127.0.0.1:web:a", "info"]));
    let (number, _) = events.until("converged");
    drop(events);
    machine.process("b", "1", "");
    until("b runs", || running(&machine, &["b"]));
    // Events in between are sent, each once.
    let mut again = Events::open(at, "/api/v1/events", &format!("Last-Event-ID: {number}\r\n"));
    let (first, _) = again.next();
    assert_eq!(first, number + 1);
    assert_eq!(again.until("step").1["instance"], "0:127.0.0.1:web:b");
    // An old number: the stream reports that entries were missed.
    assert_eq!(Events::open(at, "/api/v1/events", "Last-Event-ID: 5\r\n").next().1["kind"], "missed");
    // One that was never given: the same, and then whatever comes.
    let mut foreign = Events::open(at, "/api/v1/events", &format!("Last-Event-ID: {}\r\n", u64::MAX));
    assert_eq!(foreign.next().1["kind"], "missed");
    let lower = token(&machine).replace("Bearer", "bearer");
    assert_eq!(send(at, "POST", "/api/v1/look", &lower, b"").status, 202);
    foreign.until("asked");
    let resumed = send(at, "POST", "/api/v1/resume", &lower, b"{\"namespace\":\"web\"}").json();
    assert_eq!(resumed, json!({"resumed": null, "message": "nothing was paused: namespace web"}));
    assert_eq!(send(at, "GET", "/api/v1/events", "Last-Event-ID: x\r\n", b"").status, 400);
    // An open reader does not delay the exit.
    kill(watch.0.id(), "TERM");
    let begin = std::time::Instant::now();
    assert_eq!(watch.0.wait().expect("it ends").code(), Some(143), "{}", read_log(&machine, "watch.log"));
    assert!(begin.elapsed() < Duration::from_secs(4), "{:?}", begin.elapsed());
}

#[test]
fn a_slow_reader_does_not_block_the_loop_and_streams_are_limited() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let _watch = watch(&machine, "watch.log", &[]);
    let at = address(&machine, "watch.log");
    let deaf: Vec<TcpStream> = (0..70)
        .map(|_| {
            let mut stream = TcpStream::connect(at).expect("a connection");
            write!(stream, "GET /api/v1/events?after=0 HTTP/1.1\r\nHost: {at}\r\n\r\n").expect("a request");
            stream
        })
        .collect();
    // Each is answered once, without further reads.
    let status = |stream: &TcpStream| {
        let mut line = String::new();
        BufReader::with_capacity(32, stream).read_line(&mut line).expect("a status");
        line
    };
    let refused = deaf.iter().filter(|stream| status(stream).contains(" 503 ")).count();
    assert_eq!(refused, 6, "no more are taken");
    for version in 2..5 {
        machine.process("a", &version.to_string(), "");
        let line = format!("start a {version}");
        until("it goes on", || machine.effects().contains(&line));
    }
    assert_eq!(get(at, "/api/v1/status").status, 200);
    drop(deaf);
    until("there is room again", || get(at, "/metrics").body.contains("abide_event_readers 0\n"));
}

#[test]
fn changes_need_the_token_and_a_pause_holds() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let _watch = watch(&machine, "watch.log", &[]);
    let at = address(&machine, "watch.log");
    until("it converges", || converged(at));
    let token = token(&machine);
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &std::fs::metadata(machine.path(".abide-home/watch.token")).expect("a file").permissions(),
    );
    assert_eq!(mode & 0o777, 0o600);
    let body = json!({"namespace": "web", "reason": "lunch", "until": "2h"}).to_string();
    for wrong in ["", "Authorization: Bearer wrong\r\n", "Authorization: Basic YTpi\r\n"] {
        let answer = send(at, "POST", "/api/v1/pause", wrong, body.as_bytes());
        assert!(answer.status == 401 && answer.json()["error"].is_string(), "{wrong} {}", answer.body);
    }
    for (wrong, said) in
        [("{}", "either"), ("{\"all\": true, \"until\": \"noon\"}", "duration"), ("nonsense", "expected")]
    {
        let answer = send(at, "POST", "/api/v1/pause", &token, wrong.as_bytes());
        assert!(answer.status == 400 && answer.body.contains(said), "{wrong} {}", answer.body);
    }
    assert_eq!(send(at, "POST", "/api/v1/pause", &token, body.as_bytes()).status, 200);
    // As `abide pause` keeps them.
    assert!(machine.run(&["get", "holds", "-o", "json"]).1.contains("lunch"));
    machine.process("a", "2", "");
    until("it is paused", || get(at, "/api/v1/processes").json()[0]["sync"] == "Paused");
    assert_eq!(machine.effects(), ["start a 1"]);
    assert_eq!(get(at, "/api/v1/status").json()["pauses"][0]["reason"], "lunch");
    let answer = send(at, "POST", "/api/v1/resume", &token, b"{\"namespace\": \"web\"}");
    assert_eq!(answer.status, 200, "{}", answer.body);
    until("it goes on", || machine.effects().contains(&"start a 2".to_owned()));
    // Other names, methods and paths.
    let foreign = send(at, "GET", "/api/v1/status", "Host: evil.example\r\n", b"");
    assert!(foreign.status == 403 && foreign.json()["error"].is_string());
    assert_eq!(send(at, "GET", "/", "Host: localhost:1\r\n", b"").status, 200);
    let other = send(at, "DELETE", "/api/v1/status", "", b"");
    assert!(other.status == 405 && other.head.contains("allow: get") && other.json()["error"].is_string());
    let nowhere = get(at, "/api/v1/nowhere");
    assert!(nowhere.status == 404 && nowhere.json()["error"].is_string());
    assert!(!nowhere.head.contains("access-control") && nowhere.head.contains("nosniff"));
    assert_eq!(send(at, "POST", "/api/v1/webhook", &token, b"").status, 404, "there is no secret");
    let huge = vec![b' '; (1 << 20) + 1];
    assert_eq!(send(at, "POST", "/api/v1/pause", &token, &huge).status, 413);
}

#[test]
fn a_token_file_protects_everything_but_health_and_is_reloaded() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let (code, _, err) = machine.run(&["watch", "m", "--listen", "0.0.0.0:0"]);
    assert!(code == 64 && err.contains("--token-file"), "{code} {err}");
    std::fs::write(machine.path("empty"), "\n").expect("a file");
    let (code, _, err) = machine.run(&["watch", "m", "--listen", "127.0.0.1:0", "--token-file", "empty"]);
    assert!(code == 64 && err.contains("is empty"), "{code} {err}");
    std::fs::write(machine.path("token"), "first\n").expect("a file");
    let _watch = watch(&machine, "watch.log", &["--token-file", "token", "--interval", "10m"]);
    let at = address(&machine, "watch.log");
    assert_eq!((get(at, "/healthz").status, get(at, "/readyz").status != 401), (200, true));
    for path in ["/", "/metrics", "/api/v1/status", "/api/v1/events", "/api/v1/plan"] {
        assert_eq!(get(at, path).status, 401, "{path}");
    }
    let with =
        |auth: &str| send(at, "GET", "/api/v1/status", &format!("Authorization: {auth}\r\n"), b"").status;
    // As a browser sends a password: anybody:first.
    assert_eq!(
        (with("Bearer first"), with("Basic YW55Ym9keTpmaXJzdA=="), with("Bearer second")),
        (200, 200, 401)
    );
    std::fs::write(machine.path("token"), "second\n").expect("a file");
    until("the new one is in force", || with("Bearer second") == 200);
    assert_eq!(with("Bearer first"), 401);
    let basic = send(at, "POST", "/api/v1/look", "Authorization: Basic YW55Ym9keTpzZWNvbmQ=\r\n", b"");
    assert_eq!(basic.status, 401, "a browser sends that by itself");
    // The port is taken.
    let port = at.to_string();
    let (code, _, err) = machine.run(&["watch", "m", "--listen", &port]);
    assert!(code == 1 && err.contains("address is in use") && err.contains("127.0.0.1:0"), "{code} {err}");
}

#[test]
fn a_signed_webhook_triggers_a_pass() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    std::fs::write(machine.path("secret"), "It's a Secret to Everybody\n").expect("a file");
    let _watch = watch(&machine, "watch.log", &["--webhook-secret-file", "secret", "--interval", "10m"]);
    let at = address(&machine, "watch.log");
    until("it converges", || converged(at));
    let looks = || get(at, "/api/v1/status").json()["looks"].as_u64().expect("a number");
    let hook = |headers: &str, body: &[u8]| send(at, "POST", "/api/v1/webhook", headers, body).status;
    let good =
        "X-Hub-Signature-256: sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17\r\n";
    assert_eq!(hook("", b"Hello, World!"), 401);
    assert_eq!(hook(good, b"Hello, World?"), 401);
    assert_eq!(hook("X-Gitlab-Token: It's a Secret\r\n", b"{}"), 401);
    // More rounds than a fleet at rest has passes of its own.
    for _ in 0..5 {
        let before = looks();
        assert_eq!(hook(good, b"Hello, World!"), 202);
        until("the signed webhook has triggered a pass", || looks() > before);
        let before = looks();
        assert_eq!(hook("X-Gitlab-Token: It's a Secret to Everybody\r\n", b"{}"), 202);
        until("the webhook with the token has triggered a pass", || looks() > before);
    }
}

/// A server that takes messages; the first answers are refusals.
fn receiver(refusals: usize) -> (SocketAddr, Arc<Mutex<Vec<Value>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = listener.local_addr().expect("an address");
    let taken = Arc::new(Mutex::new(Vec::new()));
    let into = Arc::clone(&taken);
    std::thread::spawn(move || {
        for (nth, mut stream) in listener.incoming().flatten().enumerate() {
            let Some(Request { body, .. }) = Request::read(&mut stream) else { continue };
            let status = if nth < refusals { "500 Internal Server Error" } else { "200 OK" };
            if nth >= refusals {
                into.lock().expect("a lock").push(serde_json::from_slice(&body).expect("JSON"));
            }
            let _ = write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        }
    });
    (at, taken)
}

#[test]
fn notifications_use_the_template_and_are_retried() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let (to, taken) = receiver(2);
    std::fs::write(
        machine.path("template"),
        "{\"m\": \"{{title}}|{{text}}\", \"l\": \"{{level}}\", \"o\": \"{{owner}}\"}",
    )
    .expect("a file");
    std::fs::write(machine.path("bad"), "{\"m\": \"{{titel}}\"}").expect("a file");
    let url = format!("http://{to}/hooks/s3cret");
    let (code, _, err) =
        machine.run(&["watch", "m", "--listen", "127.0.0.1:0", "--notify", &url, "--notify-template", "bad"]);
    assert!(code == 64 && err.contains("titel"), "{code} {err}");
    let _watch = watch(&machine, "watch.log", &["--notify", &url, "--notify-template", "template"]);
    let at = address(&machine, "watch.log");
    until("it converges", || converged(at));
    let told = |text: &str| {
        let taken = taken.lock().expect("a lock");
        taken.iter().any(|message| message["m"].as_str().is_some_and(|said| said.contains(text)))
    };
    until("leadership is reported", || told("leadership acquired"));
    until("the steps are reported", || told("1 start"));
    std::fs::write(machine.path("m/z.yaml"), "kind: Process\nstrange: \"\\\"\"\n").expect("a file");
    until("problems are reported", || told("z.yaml:"));
    std::fs::remove_file(machine.path("m/z.yaml")).expect("a file");
    until("and that they are gone", || told("manifest errors resolved"));
    // It has surely ended by the time it is checked.
    machine.write("bad", "  control: {start_mode: foreground, start_cmd: exit 7}\n");
    machine.edit("bad", "start_check_secs: 0", "start_check_secs: 3");
    until("failures are reported", || told("start 0:127.0.0.1:web:bad: Failed"));
    let taken = taken.lock().expect("a lock");
    assert_eq!(
        taken
            .iter()
            .filter(|message| message["m"].as_str().is_some_and(|said| said.contains("leadership acquired")))
            .count(),
        1
    );
    assert!(taken.iter().all(|message| message["o"] == "default"));
    assert!(taken.iter().any(|message| message["l"] == "error"));
    let log = read_log(&machine, "watch.log");
    assert!(log.contains("retrying") && !log.contains("s3cret"), "{log}");
}

#[test]
fn up_serves_the_same_api_at_the_gateways_address() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let mut up = machine.start(&["up", "m"], "up.log");
    until("it is ready", || read_log(&machine, "up.log").contains("ready http://"));
    let at = address(&machine, "up.log");
    until("it converges", || converged(at));
    assert_eq!(get(at, "/api/v1/processes").json()[0]["sync"], "InSync");
    assert!(get(at, "/").body.contains("<b>web/a</b>"));
    let metrics = get(at, "/metrics").body;
    assert!(metrics.contains("abide_leader 1\n") && metrics.contains("abide_gateway_ready 1\n"), "{metrics}");
    assert_eq!(get(at, "/api/v1/history").json()[0]["summary"]["start"], 1);
    assert_eq!(get(at, "/api/v1/nowhere").status, 404);
    assert_eq!(get(at, "/readyz").status, 200);
    assert_eq!(get(at, "/api/abide/v1/processes").status, 401, "the gateway's own asks for credentials");
    assert_eq!(send(at, "GET", "/api/v1/status", "Host: evil.example\r\n", b"").status, 403);
    assert_eq!(send(at, "POST", "/api/v1/look", &token(&machine), b"").status, 202);
    let mut events = Events::open(at, "/api/v1/events?after=0", "");
    events.until("converged");
    kill(up.0.id(), "TERM");
    let begin = std::time::Instant::now();
    assert_eq!(up.0.wait().expect("it ends").code(), Some(0));
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}
