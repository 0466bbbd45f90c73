//! Gateway benchmark: `abide serve` over loopback, compared with a server that only echoes, in the same run.
//!
//! `cargo bench --bench gateway` prints: requests per second at 8 connections for both; how long 10,000 registrations in
//! calls of 1,000 take, durably; a page of 1,000 rows; memory with 100,000 registered; and how long a restart with them
//! takes until it is ready. The gateway is the program itself (`abide serve`), so its memory is its own. At last: reads of a gateway
//! with its audit log, compared with one without, in turns. `ABIDE_BENCH_ONLY=audit` runs this part alone.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use abide::gateway::audit::{AuditLog, AuditSettings};
use abide::gateway::auth::{Apps, Authenticator, Tokens};
use abide::gateway::{Gateway as InProcess, middleware};
use abide::http::{Listener, Reloadable, serve};
use abide::store::Embedded;

const CONNECTIONS: usize = 8;
const SECONDS: u64 = 5;

fn main() {
    if std::env::var("ABIDE_BENCH_ONLY").is_ok_and(|part| part == "audit") {
        return compare_audit();
    }
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("apps.yaml"), "apps: [{code: all, secret: s3cret}]\n").expect("a file");
    let begin = Instant::now();
    let (gateway, address) = start(folder.path());
    println!("start, empty                          {:>9.1?}", begin.elapsed());
    let mut connection = Connection::to(address);
    let begin = Instant::now();
    for call in 0..10 {
        connection.ask("/procapi/v1/proc/procinfo", "POST", &register(call * 1000, 1000));
    }
    println!("10,000 registered, 1,000 a call       {:>9.1?}", begin.elapsed());
    let status = body(
        "\"meta\": {\"namespace\": \"web\", \"name\": \"p\"}, \"hosts\": [{\"ip\": \"10.0.0.1\", \"bk_cloud_id\": 0}]",
    );
    let echo = echo();
    // In turns, so that a machine that is busy for a while slows both.
    let (mut echoed, mut answered) = (0.0, 0.0);
    for _ in 0..3 {
        echoed += rate(echo, "POST", "/", &status);
        answered += rate(address, "GET", "/procapi/v2/proc/status", &status);
    }
    let (echoed, answered) = (echoed / 3.0, answered / 3.0);
    println!("echo, {CONNECTIONS} connections                   {echoed:>9.0} requests/s");
    println!(
        "status of one process                 {answered:>9.0} requests/s   {:.0} %",
        answered / echoed * 100.0
    );
    // The first one was idle for longer than a connection may be.
    let mut connection = Connection::to(address);
    for call in 10..100 {
        connection.ask("/procapi/v1/proc/procinfo", "POST", &register(call * 1000, 1000));
    }
    for start in [0, 50_000, 99_000] {
        let page = body(&format!(
            "\"meta\": {{\"namespace\": \"web\"}}, \"page\": {{\"start\": {start}, \"limit\": 1000}}"
        ));
        let mut took: Vec<Duration> = (0..21)
            .map(|_| {
                let begin = Instant::now();
                let bytes = connection.ask("/procapi/v1/proc/syncstatus", "GET", &page);
                assert!(bytes > 100_000, "{bytes}");
                begin.elapsed()
            })
            .collect();
        took.sort();
        println!("sync_proc_status, 1,000 from {start:>6}   {:>9.1?} (median of 21)", took[10]);
    }
    println!("memory with 100,000 registered        {:>9} MB", resident(&gateway) / 1_000_000);
    drop(gateway);
    let begin = Instant::now();
    let (gateway, _) = start(folder.path());
    println!("restart with them, until ready        {:>9.1?}", begin.elapsed());
    println!("memory then                           {:>9} MB", resident(&gateway) / 1_000_000);
    drop(gateway);
    compare_audit();
}

/// Rounds of the comparison.
const ROUNDS: usize = 5;

/// Reads with and without the audit log, in turns: the status of one process, with the credentials in the body.
fn compare_audit() {
    let folder = tempfile::tempdir().expect("a folder");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let [with, without] =
        [true, false].map(|audited| runtime.block_on(start_in_process(folder.path(), audited)));
    let status = body(
        "\"meta\": {\"namespace\": \"web\", \"name\": \"p\"}, \"hosts\": [{\"ip\": \"10.0.0.1\", \"bk_cloud_id\": 0}]",
    );
    for at in [with, without] {
        Connection::to(at).ask("/procapi/v1/proc/procinfo", "POST", &register(0, 1000));
    }
    let mut rates: Vec<(f64, f64)> = (0..ROUNDS)
        .map(|nth| {
            let ask = |at| rate(at, "GET", "/procapi/v2/proc/status", &status);
            // Neither is always the first.
            match nth % 2 {
                0 => (ask(with), ask(without)),
                _ => {
                    let without = ask(without);
                    (ask(with), without)
                }
            }
        })
        .collect();
    rates.sort_by(|one, other| (one.0 / one.1).total_cmp(&(other.0 / other.1)));
    let (with, without) = rates[ROUNDS / 2];
    println!("reads without the audit log           {without:>9.0} requests/s");
    println!(
        "reads with it                         {with:>9.0} requests/s   {:.1} %",
        with / without * 100.0
    );
    let all: Vec<String> =
        rates.iter().map(|(with, without)| format!("{:.1}", with / without * 100.0)).collect();
    println!("each round                            {} %", all.join(" "));
}

/// A gateway in this process, over a store of its own.
async fn start_in_process(folder: &Path, audited: bool) -> SocketAddr {
    let file = folder.join(format!("store-{audited}.db"));
    let store = Embedded::open(&file).expect("a store");
    let gateway = InProcess::new(store.clone());
    let gateway = match audited {
        true => {
            let log = AuditLog::open(&folder.join("audit"), AuditSettings::default(), &store).await;
            gateway.with_audit(log.expect("a log"))
        }
        false => gateway,
    };
    let authenticator = Authenticator::new(
        Reloadable::fixed(Apps::parse("apps: [{code: all, secret: s3cret}]").expect("apps")),
        Reloadable::fixed(Tokens::default()),
    );
    let limits = middleware::Limits { rate: 10_000_000, ..middleware::Limits::default() };
    let router = middleware::router(Arc::new(gateway), Arc::new(authenticator), limits);
    let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = socket.local_addr().expect("an address");
    let (header_time, overload_body) = (Duration::from_secs(30), abide::gateway::overload_body());
    let listener = Listener { socket, tls: None, connections: 1000, header_time, overload_body };
    let (stop, stopped) = tokio::sync::watch::channel(false);
    tokio::spawn(serve(listener, router, stopped));
    // It serves until the program ends.
    std::mem::forget(stop);
    address
}

struct Gateway(Child);

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(folder: &Path) -> (Gateway, SocketAddr) {
    let mut child = Command::new(env!("CARGO_BIN_EXE_abide"))
        .args(["-q", "serve", "--listen", "127.0.0.1:0", "--data", "data", "--apps", "apps.yaml"])
        .args(["--max-rate", "1000000"])
        .current_dir(folder)
        .env("ABIDE_KEY_FILE", folder.join("key"))
        .stdout(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    let address = line.trim().split("//").nth(1).expect("an address").parse().expect("an address");
    (Gateway(child), address)
}

/// One process on a number of hosts.
fn register(first: usize, count: usize) -> String {
    let hosts: Vec<String> = (first..first + count)
        .map(|n| {
            format!(
                "{{\"ip\": \"10.{}.{}.{}\", \"bk_cloud_id\": 0, \"bk_supplier_id\": 0}}",
                n / 65_536,
                n / 256 % 256,
                n % 256
            )
        })
        .collect();
    body(&format!(
        "\"meta\": {{\"namespace\": \"web\", \"name\": \"p\", \"labels\": {{\"tier\": \"front\"}}}}, \"hosts\": [{}], \
         \"spec\": {{\"identity\": {{\"proc_name\": \"p\", \"setup_path\": \"/opt/p\", \"pid_path\": \"/run/p.pid\", \"user\": \"app\"}}, \
         \"control\": {{\"start_cmd\": \"./p start\", \"stop_cmd\": \"./p stop\", \"reload_cmd\": \"./p reload\"}}, \
         \"monitor_policy\": {{\"auto_type\": 1, \"start_check_secs\": 5}}}}",
        hosts.join(",")
    ))
}

fn body(fields: &str) -> String {
    format!("{{\"bk_app_code\": \"all\", \"bk_app_secret\": \"s3cret\", {fields}}}")
}

/// A connection that is kept.
struct Connection(BufReader<TcpStream>);

impl Connection {
    fn to(address: SocketAddr) -> Connection {
        let stream = TcpStream::connect(address).expect("a connection");
        stream.set_nodelay(true).expect("a socket");
        Connection(BufReader::new(stream))
    }

    /// How many bytes the answer's body has.
    fn ask(&mut self, path: &str, method: &str, body: &str) -> usize {
        let request =
            format!("{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        self.0.get_mut().write_all(request.as_bytes()).expect("a request");
        let mut length = 0;
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.0.read_line(&mut line).expect("a header") > 0, "it was closed");
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().expect("a length");
            }
            if line == "\r\n" {
                break;
            }
        }
        let mut answer = vec![0; length];
        self.0.read_exact(&mut answer).expect("a body");
        length
    }
}

fn rate(address: SocketAddr, method: &str, path: &str, body: &str) -> f64 {
    let begin = Instant::now();
    let asked: usize = std::thread::scope(|threads| {
        let clients: Vec<_> = (0..CONNECTIONS)
            .map(|_| {
                threads.spawn(|| {
                    let mut connection = Connection::to(address);
                    let mut asked = 0;
                    while begin.elapsed() < Duration::from_secs(SECONDS) {
                        connection.ask(path, method, body);
                        asked += 1;
                    }
                    asked
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().expect("a client")).sum()
    });
    asked as f64 / begin.elapsed().as_secs_f64()
}

/// The least that answers: axum as it comes.
fn echo() -> SocketAddr {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        let router =
            axum::Router::new().route("/", axum::routing::post(|body: axum::body::Bytes| async { body }));
        runtime.block_on(async { axum::serve(listener, router).await })
    });
    address
}

fn resident(gateway: &Gateway) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", gateway.0.id())).expect("a process");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("a line");
    line.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok()).expect("a number") * 1024
}
