//! Guesses of one address: right credentials of the same address are accepted at once, on both listeners, while guesses,
//! silent connections and announced bodies from that address are slowed, refused and logged.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::controller_api;
use crate::http::Answer;
use crate::listener_attacks::{AUTH, Controller, GSE, SOON, Site, announce, silent};
use crate::serve::log_of;
use crate::support::until;
use crate::watch::read_log;

const HOSTS: &str = "/api/abide/v1/hosts";
const JOIN: &str = "/api/abide/v1/agent/join";
/// Guessing connections: more than twice as many as have a delayed answer.
const GUESSERS: usize = 40;
const HONEST: usize = 100;

/// Guesses on new connections until it is ended, and what they were answered.
#[derive(Default)]
struct Guesses {
    ended: AtomicBool,
    refused: AtomicUsize,
    too_many: AtomicUsize,
    /// 401 after a second or more.
    delayed: AtomicUsize,
    other: AtomicUsize,
}

impl Guesses {
    fn run(&self, at: SocketAddr, request: &str) {
        while !self.ended.load(Ordering::Relaxed) {
            let begin = Instant::now();
            let count = match exchange(at, request).status {
                401 if begin.elapsed() >= Duration::from_secs(1) => &self.delayed,
                401 => &self.refused,
                429 => &self.too_many,
                // Evicted for another connection of the address.
                0 => continue,
                _ => &self.other,
            };
            count.fetch_add(1, Ordering::Relaxed);
            // The machine has other work: 40 connections without a pause occupy it.
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Runs `honest` while all guessers guess and most of their answers are 429.
    fn during(at: SocketAddr, requests: &[String], honest: impl FnOnce()) {
        let guesses = Guesses::default();
        let read = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        std::thread::scope(|threads| {
            // A failed assertion ends the guessers, too.
            let _end = EndOnDrop(&guesses.ended);
            for request in requests.iter().cycle().take(GUESSERS) {
                let guesses = &guesses;
                threads.spawn(move || guesses.run(at, request));
            }
            until("guesses are refused", || read(&guesses.too_many) > GUESSERS);
            honest();
            let kept_open = requests[0].replace("Connection: close\r\n", "");
            until("a refused guess ends its connection", || {
                let begin = Instant::now();
                let answer = exchange(at, &kept_open);
                answer.status == 429 && begin.elapsed() < Duration::from_secs(1)
            });
            until("guesses are delayed", || read(&guesses.delayed) > 0);
        });
        assert_eq!(read(&guesses.other), 0, "no guess is answered otherwise");
        assert!(read(&guesses.refused) <= 3 + 2 * GUESSERS, "401 sooner: {}", read(&guesses.refused));
    }
}

struct EndOnDrop<'a>(&'a AtomicBool);

impl Drop for EndOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn exchange(at: SocketAddr, request: &str) -> Answer {
    let mut stream = TcpStream::connect(at).expect("a connection");
    stream.set_read_timeout(Some(2 * SOON)).expect("a timeout");
    let _ = stream.write_all(request.as_bytes());
    Answer::read(&mut stream)
}

fn request(at: SocketAddr, method: &str, path: &str, headers: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
    )
}

/// Sends a request on many new connections, one after the other: each is answered soon, with this status.
fn all_succeed(at: SocketAddr, many: usize, what: &str, request: &str, status: u16) {
    let send = |_| {
        let begin = Instant::now();
        let answer = exchange(at, request);
        let failed = answer.status != status || begin.elapsed() >= SOON;
        failed.then(|| format!("{} after {:?}", answer.status, begin.elapsed()))
    };
    let failed: Vec<_> = (0..many).filter_map(send).collect();
    assert!(failed.is_empty(), "{what}: {} of {many} failed: {failed:?}", failed.len());
}

#[test]
fn right_credentials_of_a_guessing_address_are_accepted_at_the_gateway() {
    let site = Site::new(&[]);
    let at = site.at();
    let body = |secret: &str| json!({"bk_app_code": "all", "bk_app_secret": secret}).to_string();
    let wrong = AUTH.replace("s3cret", "a-wrong-guess");
    let guesses = [
        request(at, "GET", HOSTS, &wrong, ""),
        request(at, "GET", HOSTS, "", &body("a-wrong-guess")),
        request(at, "POST", JOIN, "Authorization: Bearer a-wrong-guess\r\n", "{}"),
    ];
    let idle = silent(at, 300);
    let announced = announce(at, GSE, 100);
    Guesses::during(at, &guesses, || {
        all_succeed(at, HONEST, "header credentials", &request(at, "GET", HOSTS, AUTH, ""), 200);
        all_succeed(at, 20, "body credentials", &request(at, "GET", HOSTS, "", &body("s3cret")), 200);
        let join = json!({"agent": "another", "hosts": ["0:10.0.0.9"]}).to_string();
        let join = request(at, "POST", JOIN, "Authorization: Bearer token\r\n", &join);
        all_succeed(at, 20, "agents", &join, 200);
        all_succeed(at, 20, "health checks", &request(at, "GET", "/healthz", "", ""), 200);
        // An agent that carries out an operation, and readiness, too.
        site.is_unharmed("a");
    });
    drop((idle, announced));
    let log = || log_of(&site.system.path("gateway"));
    until("the guesses are logged", || log().contains("wrong credentials"));
    assert!(!log().contains("a-wrong-guess"), "{}", log());
    let guess = exchange(at, &guesses[0]);
    assert_eq!(guess.status, 401, "{}", guess.body);
}

#[test]
fn the_token_is_accepted_from_a_guessing_address_at_the_controller() {
    let controller = Controller::new(&[]);
    let at = controller.at;
    let token = controller_api::token(&controller.machine);
    let wrong = "Authorization: Bearer a-wrong-guess\r\n";
    let guesses = [
        request(at, "GET", "/api/v1/status", wrong, ""),
        request(at, "POST", "/api/v1/look", wrong, ""),
        request(at, "POST", "/api/v1/webhook", "X-Gitlab-Token: a-wrong-guess\r\n", ""),
    ];
    let idle = silent(at, 300);
    let announced = announce(at, "/api/v1/webhook", 100);
    Guesses::during(at, &guesses, || {
        all_succeed(at, HONEST, "the token", &request(at, "GET", "/api/v1/status", &token, ""), 200);
        let webhook = "X-Gitlab-Token: the-secret-of-the-hook\r\n";
        all_succeed(at, 20, "webhooks", &request(at, "POST", "/api/v1/webhook", webhook, ""), 202);
        // A health check needs no credentials: wrong ones do not refuse it.
        for headers in ["", wrong] {
            all_succeed(at, 20, "health checks", &request(at, "GET", "/healthz", headers, ""), 200);
        }
        all_succeed(at, 20, "readers without the token", &request(at, "GET", "/api/v1/status", "", ""), 200);
        controller.is_unharmed();
    });
    drop((idle, announced));
    until("the guesses are logged", || {
        read_log(&controller.machine, "watch.log").contains("wrong credentials")
    });
    assert!(!read_log(&controller.machine, "watch.log").contains("a-wrong-guess"));
}
