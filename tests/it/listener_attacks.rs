//! Both listeners under attack: silent, slow and idle connections, wrong credentials, replaced secrets. Agents, health
//! checks and other callers of the same address are not harmed.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::apply::{KillOnDrop, Machine};
use crate::controller_api::address;
use crate::fixtures::workspace::Workspace;
use crate::http::Answer;
use crate::serve::{Gateway, log_of};
use crate::server::{Server, connect_from};
use crate::support::until;
use crate::system::System;
use crate::watch::{read_log, watch};

pub const AUTH: &str = "X-Bkapi-Authorization: {\"bk_app_code\": \"all\", \"bk_app_secret\": \"s3cret\"}\r\n";
pub const GSE: &str = "/api/c/compapi/v2/gse/register_proc_info/";
/// Every honest request is answered within this time, on a busy machine too.
pub const SOON: Duration = Duration::from_secs(3);

/// A gateway and an agent, each in a process of its own.
pub struct Site {
    pub system: System,
    pub gateway: Gateway,
}

impl Site {
    pub fn new(more: &[&str]) -> Site {
        let folder = Workspace::new();
        std::fs::write(folder.path().join("token"), "token\n").expect("a file");
        // The gateway has a folder of its own: both write a log.
        let own = folder.path().join("gateway");
        std::fs::create_dir(&own).expect("a folder");
        let gateway = Gateway::start(&own, more);
        let server = Server::at(gateway.server.address);
        let mut system = System { folder, server, agent: None };
        system.start_agent();
        Site { system, gateway }
    }

    pub fn at(&self) -> SocketAddr {
        self.gateway.server.address
    }

    /// A health check, both kinds of callers, another peer, and an operation that the agent carries out.
    pub fn is_unharmed(&self, name: &str) {
        let server = &self.gateway.server;
        let soon = |what: &str, get: &dyn Fn() -> u16| {
            let begin = Instant::now();
            let status = get();
            assert!(status == 200 && begin.elapsed() < SOON, "{what}: {status} after {:?}", begin.elapsed());
        };
        for path in ["/healthz", "/readyz"] {
            soon(path, &|| server.send("GET", path, "", b"").0);
            soon(path, &|| server.send_from([127, 0, 0, 2], "GET", path, "", b"").0);
        }
        soon("header credentials", &|| server.send("GET", "/api/abide/v1/processes", AUTH, b"").0);
        let body = json!({"bk_app_code": "all", "bk_app_secret": "s3cret"}).to_string();
        soon("body credentials", &|| server.send("GET", "/api/abide/v1/processes", "", body.as_bytes()).0);
        soon("another peer", &|| {
            server.send_from([127, 0, 0, 3], "GET", "/api/abide/v1/processes", "", body.as_bytes()).0
        });
        let begin = Instant::now();
        let done = self.system.operate(name, 0, &self.system.spec(name, "exec sleep 1000"));
        assert_eq!(done.0, 0, "{}", done.1);
        assert!(begin.elapsed() < 3 * SOON, "an operation took {:?}", begin.elapsed());
        assert_eq!(self.system.operate(name, 1, &Value::Null).0, 0);
    }
}

/// Connections that announce a body and send nothing of it: the largest that is allowed, and every 17th a small one.
pub fn announce(at: SocketAddr, path: &str, many: usize) -> Vec<TcpStream> {
    let open = |nth| {
        let length = if nth % 17 == 16 { 60_000 } else { 16 << 20 };
        let mut stream = TcpStream::connect(at).expect("a connection");
        write!(stream, "POST {path} HTTP/1.1\r\nHost: {at}\r\nContent-Length: {length}\r\n\r\n")
            .expect("it takes it");
        stream
    };
    (0..many).map(open).collect()
}

/// Silent connections, as many as requested within the file limit of this process.
pub fn silent(at: SocketAddr, many: usize) -> Vec<TcpStream> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
    (0..many).map(|_| TcpStream::connect(at).expect("a connection")).collect()
}

/// Senders of one byte a second each, until they are dropped: half of them in a header, half in a body.
struct Slow {
    ends: Arc<AtomicBool>,
    sending: Option<std::thread::JoinHandle<()>>,
}

impl Slow {
    fn begin(at: SocketAddr, path: &str, many: usize) -> Slow {
        let mut streams = announce(at, path, many / 2);
        streams.extend((0..many / 2).map(|_| TcpStream::connect(at).expect("a connection")));
        let ends = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&ends);
        let sending = std::thread::spawn(move || {
            while !until.load(Ordering::Relaxed) {
                streams.retain_mut(|stream| stream.write_all(b"x").is_ok());
                std::thread::sleep(Duration::from_secs(1));
            }
        });
        Slow { ends, sending: Some(sending) }
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        let _ = self.sending.take().map(std::thread::JoinHandle::join);
    }
}

/// What a connection ends with, if it does in time.
fn end_of(stream: &mut TcpStream, within: Duration) -> Option<Vec<u8>> {
    stream.set_read_timeout(Some(within)).expect("a timeout");
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => Some(rest),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Some(rest),
        Err(_) => None,
    }
}

#[test]
fn announced_bodies_of_unknown_callers_do_not_block_the_gateway() {
    let site = Site::new(&[]);
    let mut held = announce(site.at(), GSE, 17);
    site.is_unharmed("a");
    held.extend(announce(site.at(), GSE, 183));
    site.is_unharmed("b");
    // Agents' calls have no body that is read before the token is known.
    let begin = Instant::now();
    let mut agents = announce(site.at(), "/api/abide/v1/agent/join", 1);
    let answer = end_of(&mut agents[0], SOON).expect("it is answered at once");
    assert!(String::from_utf8_lossy(&answer).contains(" 401 ") && begin.elapsed() < SOON);
    // A body that does not come is not waited for.
    let mut last = held.pop().expect("one");
    let answer = end_of(&mut last, Duration::from_secs(10)).expect("it ends");
    assert!(String::from_utf8_lossy(&answer).contains(" 408 "), "{}", String::from_utf8_lossy(&answer));
}

#[test]
fn two_hundred_slow_senders_do_not_block_the_gateway() {
    let site = Site::new(&[]);
    let _slow = Slow::begin(site.at(), GSE, 200);
    let begin = Instant::now();
    let mut round = 0;
    while begin.elapsed() < Duration::from_secs(6) {
        round += 1;
        site.is_unharmed(&format!("p{round}"));
    }
}

#[test]
fn five_thousand_silent_connections_do_not_block_the_gateway() {
    let site = Site::new(&[]);
    let begin = Instant::now();
    let held = silent(site.at(), 5000);
    assert!(begin.elapsed() < Duration::from_secs(20), "a burst took {:?}", begin.elapsed());
    site.is_unharmed("a");
    let (_, metrics) = site.gateway.server.send("GET", "/metrics", AUTH, b"");
    let evicted = metrics.lines().find_map(|line| line.strip_prefix("abide_connections_evicted_total "));
    assert!(evicted.and_then(|text| text.parse().ok()).is_some_and(|n: u64| n >= 500), "{evicted:?}");
    assert!(!site.system.log().contains("the stream broke"), "{}", site.system.log());
    drop(held);
}

/// The controller's listener: its health, what anybody may read, what needs the token.
pub struct Controller {
    pub machine: Machine,
    _watch: KillOnDrop,
    pub at: SocketAddr,
}

impl Controller {
    pub fn new(more: &[&str]) -> Controller {
        let machine = Machine::new();
        machine.process("a", "1", "");
        for (name, text) in [("hook", "the-secret-of-the-hook"), ("token-file", "the-first-token-of-all")] {
            private(&machine, name, text);
        }
        let mut args = vec!["--webhook-secret-file", "hook"];
        args.extend(more);
        let watch = watch(&machine, "watch.log", &args);
        let at = address(&machine, "watch.log");
        until("it is ready", || send(at, [127, 0, 0, 1], "GET", "/readyz", "").status == 200);
        Controller { machine, _watch: watch, at }
    }

    pub fn is_unharmed(&self) {
        let token = std::fs::read_to_string(self.machine.path(".abide-home/watch.token")).expect("a token");
        let auth = format!("Authorization: Bearer {}\r\n", token.trim());
        let gitlab = "X-Gitlab-Token: the-secret-of-the-hook\r\n";
        for from in [[127, 0, 0, 1], [127, 0, 0, 2]] {
            for (method, path, headers, expected) in [
                ("GET", "/healthz", "", 200),
                ("GET", "/readyz", "", 200),
                ("GET", "/api/v1/status", "", 200),
                ("POST", "/api/v1/look", &*auth, 202),
                ("POST", "/api/v1/webhook", gitlab, 202),
            ] {
                let begin = Instant::now();
                let status = send(self.at, from, method, path, headers).status;
                assert_eq!(status, expected, "{method} {path}");
                assert!(begin.elapsed() < SOON, "{method} {path} took {:?}", begin.elapsed());
            }
        }
    }
}

fn private(machine: &Machine, name: &str, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    let file = machine.path(name);
    std::fs::write(&file, format!("{text}\n")).expect("a file");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).expect("a mode");
}

fn send(at: SocketAddr, from: [u8; 4], method: &str, path: &str, headers: &str) -> Answer {
    let mut stream = connect_from(from, at);
    stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\nContent-Length: 0\r\n{headers}\r\n"
    );
    stream.write_all(head.as_bytes()).expect("a request");
    Answer::read(&mut stream)
}

#[test]
fn silent_slow_and_idle_connections_do_not_block_the_controller() {
    let controller = Controller::new(&[]);
    let held = announce(controller.at, "/api/v1/webhook", 200);
    controller.is_unharmed();
    let slow = Slow::begin(controller.at, "/api/v1/webhook", 200);
    controller.is_unharmed();
    drop((held, slow));
    let begin = Instant::now();
    let held = silent(controller.at, 5000);
    assert!(begin.elapsed() < Duration::from_secs(20), "a burst took {:?}", begin.elapsed());
    controller.is_unharmed();
    drop(held);
}

#[test]
fn wrong_credentials_are_logged_and_slowed_down_by_peer() {
    let site = Site::new(&[]);
    let server = &site.gateway.server;
    let attacker = [127, 0, 0, 7];
    let guess = AUTH.replace("s3cret", "a-wrong-guess").replace("\"all\"", "\"all\\nfake line\"");
    let try_one = |headers: &str| server.send_from(attacker, "GET", "/api/abide/v1/hosts", headers, b"").0;
    let begin = Instant::now();
    let answers: Vec<u16> = (0..8).map(|_| try_one(&guess)).collect();
    assert!(answers.iter().all(|status| *status == 401), "{answers:?}");
    assert!(begin.elapsed() > Duration::from_secs(2), "eight guesses took {:?}", begin.elapsed());
    let begin = Instant::now();
    assert_eq!(try_one(AUTH), 200, "right credentials of the same peer");
    assert_eq!(server.send("GET", "/api/abide/v1/hosts", &guess, b"").0, 401, "another peer");
    assert!(begin.elapsed() < Duration::from_secs(1), "they took {:?}", begin.elapsed());
    // Many at once: some wait, the others are refused at once. Right credentials are accepted, on new connections too.
    let mut known = connect_from(attacker, site.at());
    assert_eq!(ask(&mut known, "/api/abide/v1/hosts", AUTH), 200);
    let at_once: Vec<u16> = std::thread::scope(|threads| {
        let all: Vec<_> = (0..40).map(|_| threads.spawn(|| try_one(&guess))).collect();
        let begin = Instant::now();
        assert!((0..20).all(|_| try_one(AUTH) == 200), "right credentials of the same peer");
        assert!(begin.elapsed() < SOON, "they took {:?}", begin.elapsed());
        assert_eq!(ask(&mut known, "/api/abide/v1/hosts", AUTH), 200, "a known connection");
        all.into_iter().map(|one| one.join().expect("an answer")).collect()
    });
    assert!(at_once.contains(&429) && at_once.contains(&401), "{at_once:?}");
    let token = "Authorization: Bearer a-wrong-token\r\n";
    assert_eq!(server.send_from([127, 0, 0, 8], "POST", "/api/abide/v1/agent/join", token, b"{}").0, 401);
    // The log is written by a thread of its own.
    let read = || log_of(&site.system.path("gateway"));
    until("the last guess is logged", || read().contains("peer=127.0.0.8:"));
    let log = read();
    let line = |part: &str| log.lines().any(|line| line.contains("wrong credentials") && line.contains(part));
    assert!(line("peer=127.0.0.7:") && line("who=\"all\\nfake line\"") && line("peer=127.0.0.8:"), "{log}");
    assert!(log.lines().filter(|line| line.contains("wrong credentials")).count() < 10, "{log}");
    assert!(!log.contains("wrong-guess") && !log.contains("wrong-token"), "{log}");
    assert!(log.contains("app=\"all\"") && log.contains("fewer than 16 characters"), "{log}");
    let (_, metrics) = server.send("GET", "/metrics", AUTH, b"");
    let failed = metrics.lines().find_map(|line| line.strip_prefix("abide_logins_failed_total "));
    let failed: u64 = failed.and_then(|text| text.parse().ok()).expect("a number");
    assert_eq!(failed, 50, "every wrong one is counted");
}

#[test]
fn the_controllers_token_is_guessed_slowly_and_a_replaced_one_ends_its_streams() {
    let controller = Controller::new(&["--token-file", "token-file"]);
    let (machine, at) = (&controller.machine, controller.at);
    let attacker = [127, 0, 0, 7];
    let with = |from, token: &str| {
        send(at, from, "GET", "/api/v1/status", &format!("Authorization: Bearer {token}\r\n")).status
    };
    let begin = Instant::now();
    assert!((0..8).all(|_| with(attacker, "a-wrong-guess") == 401));
    assert!(begin.elapsed() > Duration::from_secs(2), "eight guesses took {:?}", begin.elapsed());
    let begin = Instant::now();
    assert_eq!(with(attacker, "the-first-token-of-all"), 200);
    assert!(begin.elapsed() < Duration::from_secs(1), "it took {:?}", begin.elapsed());
    let log = read_log(machine, "watch.log");
    assert!(log.contains("wrong credentials") && log.contains("127.0.0.7:"), "{log}");
    assert!(!log.contains("wrong-guess"), "{log}");
    let mut stream = TcpStream::connect(at).expect("a connection");
    let auth = "Connection: close\r\nAuthorization: Bearer the-first-token-of-all\r\n";
    write!(stream, "GET /api/v1/events HTTP/1.1\r\nHost: {at}\r\n{auth}\r\n").expect("a request");
    let mut head = [0; 15];
    stream.read_exact(&mut head).expect("an answer");
    assert!(head.ends_with(b"200 OK"), "{}", String::from_utf8_lossy(&head));
    private(machine, "token-file", "the-second-token-of-all");
    let begin = Instant::now();
    let last = end_of(&mut stream, Duration::from_secs(10)).expect("the stream ends");
    assert!(
        last.ends_with(b"0\r\n\r\n") && begin.elapsed() < Duration::from_secs(5),
        "{:?}",
        begin.elapsed()
    );
    assert_eq!(with([127, 0, 0, 1], "the-second-token-of-all"), 200);
}

/// The status of a request on a connection that stays open.
fn ask(stream: &mut TcpStream, path: &str, headers: &str) -> u16 {
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n").expect("a request");
    stream.set_read_timeout(Some(Duration::from_secs(10))).expect("a timeout");
    let mut answer = Vec::new();
    loop {
        let mut piece = [0; 4096];
        let many = stream.read(&mut piece).expect("an answer");
        answer.extend_from_slice(&piece[..many]);
        let text = String::from_utf8_lossy(&answer).to_lowercase();
        let length = text.split("content-length: ").nth(1).and_then(|rest| rest.lines().next()?.parse().ok());
        let whole = text
            .split_once("\r\n\r\n")
            .zip(length)
            .is_some_and(|((_, body), length): (_, usize)| body.len() >= length);
        if whole || many == 0 {
            return text.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        }
    }
}

/// Known connections, as the gateway counts them, without the one that asks.
fn known_connections(server: &Server) -> u64 {
    let (_, metrics) = server.send("GET", "/metrics", AUTH, b"");
    let known = metrics.lines().find_map(|line| line.strip_prefix("abide_connections{caller=\"known\"} "));
    known.and_then(|text| text.parse::<u64>().ok()).expect("a number") - 1
}

#[test]
fn a_connection_is_authenticated_only_while_its_caller_is() {
    let folder = Workspace::new();
    let apps = |secret: &str| {
        let text = format!("apps: [{{code: one, secret: {secret}}}, {{code: all, secret: s3cret}}]\n");
        std::fs::write(folder.path().join("apps.yaml"), text).expect("a file");
    };
    apps("the-secret-of-one");
    let gateway = Gateway::start(folder.path(), &[]);
    let server = &gateway.server;
    let auth = AUTH.replace("\"all\"", "\"one\"").replace("s3cret", "the-secret-of-one");
    let mut held: Vec<_> =
        (0..4).map(|_| TcpStream::connect(server.address).expect("a connection")).collect();
    for stream in &mut held {
        assert_eq!(ask(stream, "/api/abide/v1/hosts", &auth), 200);
    }
    until("they are known", || known_connections(server) == 4);
    assert_eq!(ask(&mut held[0], "/healthz", ""), 200);
    assert_eq!(known_connections(server), 4, "a health check needs no credentials");
    assert_eq!(ask(&mut held[0], "/api/abide/v1/hosts", ""), 401);
    assert_eq!(ask(&mut held[1], "/no/such/path", ""), 404);
    until("requests without proof end it", || known_connections(server) == 2);
    apps("another-secret-of-one");
    until("a replaced secret ends it", || {
        assert!(held.iter_mut().all(|stream| ask(stream, "/healthz", "") == 200));
        known_connections(server) == 0
    });
}

#[test]
fn the_credentials_of_one_caller_do_not_take_all_connections() {
    let folder = Workspace::new();
    let apps =
        "apps: [{code: one, secret: the-secret-of-one, namespaces: [web]}, {code: all, secret: s3cret}]\n";
    std::fs::write(folder.path().join("apps.yaml"), apps).expect("a file");
    std::fs::write(folder.path().join("token"), "token\n").expect("a file");
    let gateway = Gateway::start(folder.path(), &["--max-connections", "256"]);
    let tokens = "* token\n0:10.0.0.66 stolen-stolen-stolen\n";
    std::fs::write(folder.path().join("tokens"), tokens).expect("a file");
    let server = &gateway.server;
    let app = AUTH.replace("\"all\"", "\"one\"").replace("s3cret", "the-secret-of-one");
    let token = "Authorization: Bearer stolen-stolen-stolen\r\n";
    let stolen = "/api/abide/v1/agent/stream?session=none";
    until("the token is known", || server.send("GET", stolen, token, b"").0 == 410);
    let mut held: Vec<TcpStream> = Vec::new();
    let mut open = |path: &str, headers: &str, expected: u16| {
        let mut stream = TcpStream::connect(server.address).expect("a connection");
        stream.set_read_timeout(Some(SOON)).expect("a timeout");
        if ask(&mut stream, path, headers) == expected {
            held.push(stream);
        }
    };
    for _ in 0..300 {
        open("/api/abide/v1/hosts", &app, 200);
        open(stolen, token, 410);
    }
    // A silent connection of a credential is closed when it opens more than its share.
    until("both have their shares", || known_connections(server) <= 128 + 64);
    for path in ["/healthz", "/readyz"] {
        assert_eq!(server.send("GET", path, "", b"").0, 200, "{path}");
    }
    assert_eq!(server.send("GET", "/api/abide/v1/processes", AUTH, b"").0, 200, "another app");
    let mut system = System { folder: Workspace::new(), server: Server::at(server.address), agent: None };
    std::fs::write(system.path("token"), "token\n").expect("a file");
    system.start_agent();
    let done = system.operate("p", 0, &system.spec("p", "exec sleep 1000"));
    assert_eq!(done.0, 0, "an agent joins and works: {}", done.1);
}
