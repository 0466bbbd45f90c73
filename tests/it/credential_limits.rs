//! A stolen credential under attack conditions: its requests in flight and their bodies leave room for every other
//! caller, for agents, and for readiness.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};

use abide::store::{Embedded, Store, Txn};
use serde_json::json;

use crate::fixtures::workspace::Workspace;
use crate::listener_attacks::{AUTH, GSE, SOON, Site};
use crate::serve::Gateway;
use crate::server::Server;
use crate::support::{abide, keys, stderr, stdout, until};
use crate::system::System;

const TELL: &str = "/api/abide/v1/agent/tell?session=none";

const HERE: [u8; 4] = [127, 0, 0, 1];

/// A connection from one of the addresses of loopback.
fn connect_from(source: [u8; 4], at: SocketAddr) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().expect("a runtime");
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        socket.bind(SocketAddr::new(IpAddr::from(source), 0)).expect("an address of loopback");
        socket.connect(at).await.expect("a connection").into_std().expect("a stream")
    });
    stream.set_nonblocking(false).expect("a mode");
    stream
}

/// A request that announces a body and sends only a part of it.
fn unfinished(source: [u8; 4], at: SocketAddr, path: &str, auth: &str, sent: usize) -> TcpStream {
    let mut stream = connect_from(source, at);
    stream.set_read_timeout(Some(SOON)).expect("a timeout");
    stream.set_write_timeout(Some(SOON)).expect("a timeout");
    let head = format!("POST {path} HTTP/1.1\r\nHost: x\r\n{auth}Content-Length: 16000000\r\n\r\n");
    // A refused request may be closed before all of it is sent.
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&vec![b' '; sent]));
    stream
}

/// The head of an answer that has arrived, or an empty text.
fn answered(stream: &mut TcpStream) -> String {
    stream.set_nonblocking(true).expect("a mode");
    let mut answer = [0; 4096];
    let read = stream.read(&mut answer).unwrap_or(0);
    stream.set_nonblocking(false).expect("a mode");
    String::from_utf8_lossy(&answer[..read]).into_owned()
}

/// Opens unfinished requests until one is refused, and returns all with that answer.
fn exhaust(at: SocketAddr, path: &str, auth: &str, sent: usize) -> (Vec<TcpStream>, String) {
    exhaust_from(HERE, at, path, auth, sent)
}

fn exhaust_from(
    source: [u8; 4],
    at: SocketAddr,
    path: &str,
    auth: &str,
    sent: usize,
) -> (Vec<TcpStream>, String) {
    let (mut held, mut refusal) = (Vec::new(), String::new());
    until("a request is refused", || {
        held.push(unfinished(source, at, path, auth, sent));
        refusal = held.iter_mut().map(answered).find(|answer| !answer.is_empty()).unwrap_or_default();
        !refusal.is_empty()
    });
    (held, refusal)
}

#[track_caller]
fn is_over_its_share(refusal: &str) {
    assert!(refusal.starts_with("HTTP/1.1 429"), "{refusal}");
    assert!(refusal.to_lowercase().contains("retry-after: 1"), "{refusal}");
    assert!(refusal.contains("with these credentials"), "{refusal}");
}

fn stolen_app() -> String {
    AUTH.replace("\"all\"", "\"web\"").replace("s3cret", "web-s3cret")
}

#[test]
fn the_requests_of_one_app_leave_permits_for_others() {
    let site = Site::new(&["--max-requests", "16"]);
    let (held, refusal) = exhaust(site.at(), GSE, &stolen_app(), 1);
    is_over_its_share(&refusal);
    site.is_unharmed("p");
    let metrics = site.gateway.server.send("GET", "/metrics", AUTH, b"").1;
    let refused = metrics.lines().find(|line| line.contains("resource=\"credential_share\""));
    assert!(refused.is_some_and(|line| !line.ends_with(" 0")), "{metrics}");
    // The same credentials in a body have the same share.
    let body = json!({"bk_app_code": "web", "bk_app_secret": "web-s3cret"}).to_string();
    let (status, text) = site.gateway.server.send("POST", GSE, "", body.as_bytes());
    assert_eq!(status, 429, "{text}");
    drop(held);
    until("its share is free again", || {
        site.gateway.server.send("GET", "/api/abide/v1/processes", &stolen_app(), b"").0 == 200
    });
}

#[test]
fn the_bodies_of_one_app_leave_memory_for_others() {
    let site = Site::new(&[]);
    let (_held, refusal) = exhaust(site.at(), GSE, &stolen_app(), 15_000_000);
    is_over_its_share(&refusal);
    let large = vec![b' '; 12_000_000];
    let (status, text) = site.gateway.server.send("POST", GSE, AUTH, &large);
    // The whole body was read and parsed.
    assert!(status == 200 && text.contains("meta.namespace is missing"), "{status} {text}");
    site.is_unharmed("p");
}

#[test]
fn the_requests_of_one_stolen_token_leave_permits_for_other_agents() {
    let folder = Workspace::new();
    std::fs::write(folder.path().join("token"), "token\n").expect("a file");
    let gateway = Gateway::start(folder.path(), &["--max-requests", "16"]);
    let tokens = "* token\n0:10.0.0.66 stolen-stolen-stolen\n";
    std::fs::write(folder.path().join("tokens"), tokens).expect("a file");
    let token = "Authorization: Bearer stolen-stolen-stolen\r\n";
    let server = &gateway.server;
    until("the token is known", || {
        server.send("GET", "/api/abide/v1/agent/stream?session=none", token, b"").0 == 410
    });
    let (_held, refusal) = exhaust(server.address, TELL, token, 1);
    is_over_its_share(&refusal);
    assert_eq!(server.send("GET", "/readyz", "", b"").0, 200);
    let mut system = System { folder: Workspace::new(), server: Server::at(server.address), agent: None };
    std::fs::write(system.path("token"), "token\n").expect("a file");
    system.start_agent();
    let done = system.operate("p", 0, &system.spec("p", "exec sleep 1000"));
    assert_eq!(done.0, 0, "an agent joins and works: {}", done.1);
}

/// One holder of the token of all hosts gets its share of permits and of body memory. Holders at other addresses, and
/// agents with credentials of their own, work on.
#[test]
fn the_requests_of_one_holder_of_a_token_of_all_hosts_leave_permits_for_other_agents() {
    let folder = Workspace::new();
    let gateway = Gateway::start(folder.path(), &["--max-requests", "16"]);
    let tokens = "* token-of-all-hosts\n0:127.0.0.1 token-of-one-host\n";
    std::fs::write(folder.path().join("tokens"), tokens).expect("a file");
    let shared = "Authorization: Bearer token-of-all-hosts\r\n";
    let server = &gateway.server;
    until("the token is known", || {
        server.send("GET", "/api/abide/v1/agent/stream?session=none", shared, b"").0 == 410
    });
    let (_held, refusal) = exhaust_from([127, 0, 0, 2], server.address, TELL, shared, 1);
    is_over_its_share(&refusal);
    let (_large, refusal) = exhaust_from([127, 0, 0, 3], server.address, TELL, shared, 15_000_000);
    is_over_its_share(&refusal);
    assert_eq!(server.send("GET", "/readyz", "", b"").0, 200);
    for token in ["token-of-all-hosts", "token-of-one-host"] {
        let mut system = System { folder: Workspace::new(), server: Server::at(server.address), agent: None };
        std::fs::write(system.path("token"), format!("{token}\n")).expect("a file");
        system.start_agent();
        let done = system.operate("p", 0, &system.spec("p", "exec sleep 1000"));
        assert_eq!(done.0, 0, "{token}: an agent joins and works: {}", done.1);
        system.operate("p", 1, &serde_json::Value::Null);
    }
}

/// Fills a store with `number` large rows of one host, a small row of it, and one of another host.
fn fill_store(data: &std::path::Path, number: usize, row: impl Fn(&str, &str, usize) -> Txn) {
    crate::store::run(async {
        let store = Embedded::open(&data.join("store.db")).expect("a store");
        for nth in 0..number {
            store.txn(row(&format!("p{nth}"), "0:10.0.0.66", 4 << 20)).await.expect("a write");
        }
        store.txn(row("small", "0:10.0.0.66", 10)).await.expect("a write");
        store.txn(row("other", "0:10.0.0.1", 10)).await.expect("a write");
        store.settle().await.expect("a checkpoint");
    });
}

/// A store that a stolen token filled before reports were limited. The gateway starts with the memory of its limits.
#[test]
fn an_overfilled_store_is_trimmed_before_it_is_loaded() {
    let folder = Workspace::new();
    let data = folder.path().join("data");
    std::fs::create_dir(&data).expect("a folder");
    let row = |name: &str, host: &str, size: usize| {
        let message = "x".repeat(size);
        let instance = json!({"host": host, "namespace": "web", "name": name});
        let report = json!({"instance": instance, "at": 1, "hosted": false, "message": message});
        Txn::put(format!("live/web/{name}/{host}"), report.to_string())
    };
    fill_store(&data, 160, row);
    let gateway = Gateway::start(folder.path(), &[]);
    let log = crate::serve::log_of(folder.path());
    assert!(log.contains("store is overfilled") && log.contains("host=0:10.0.0.66"), "{log}");
    assert!(!log.contains("0:10.0.0.1 "), "{log}");
    let peak = peak_kb(&gateway);
    assert!(peak < 256 << 10, "{peak} kB for 640 MB of reports");
    drop(gateway);
    let left = crate::store::run(async {
        let store = Embedded::open_keyed(&data.join("store.db"), &keys(folder.path())).expect("a store");
        let page = store.range("live/", None, 1000).await.expect("entries");
        page.entries.iter().map(|entry| entry.key.to_string()).collect::<Vec<_>>()
    });
    assert!(left.len() > 10 && left.len() < 20, "{left:?}");
    for key in ["live/web/small/0:10.0.0.66", "live/web/other/0:10.0.0.1"] {
        assert!(left.iter().any(|one| one == key), "{key}: {left:?}");
    }
}

fn peak_kb(gateway: &Gateway) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", gateway.child.id())).expect("a status");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    peak.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// The same with registrations, which reports of a stolen token created. They are moved to a file, not lost.
#[test]
fn registrations_of_an_overfilled_store_are_set_aside_before_they_are_loaded() {
    let folder = Workspace::new();
    let data = folder.path().join("data");
    std::fs::create_dir(&data).expect("a folder");
    let row = |name: &str, host: &str, size: usize| {
        let identity = json!({"proc_name": name, "setup_path": "/opt", "pid_path": "/run/p.pid"});
        let spec = json!({"identity": identity, "control": {"start_cmd": "x".repeat(size)}});
        let record = json!({"given": {"spec": spec}, "registered": 1});
        Txn::put(format!("reg/web/{name}/{host}"), record.to_string())
            .and(Txn::put(format!("identity/{host}/{name}"), format!("web/{name}")))
    };
    fill_store(&data, 80, row);
    let gateway = Gateway::start(folder.path(), &[]);
    let log = crate::serve::log_of(folder.path());
    assert!(
        log.contains("registrations of a host are set aside") && log.contains("host=0:10.0.0.66"),
        "{log}"
    );
    let peak = peak_kb(&gateway);
    assert!(peak < 256 << 10, "{peak} kB for 320 MB of registrations");
    drop(gateway);
    let keys_of = |prefix: &'static str| {
        crate::store::run(async {
            let store =
                Embedded::open_as_found(&data.join("store.db"), &keys(folder.path())).expect("a store");
            let page = store.range(prefix, None, 1000).await.expect("entries");
            page.entries.iter().map(|entry| entry.key.to_string()).collect::<Vec<_>>()
        })
    };
    let left = keys_of("reg/");
    assert!(left.len() > 10 && left.len() < 20, "{left:?}");
    for key in ["reg/web/small/0:10.0.0.66", "reg/web/other/0:10.0.0.1"] {
        assert!(left.iter().any(|one| one == key), "{key}: {left:?}");
    }
    let identities = keys_of("identity/");
    assert_eq!(identities.len(), left.len(), "{identities:?}");
    let entries = std::fs::read_dir(&data).expect("a folder").flatten();
    let file = entries.map(|entry| entry.path()).find(|path| path.to_string_lossy().contains(".set-aside-"));
    let file = file.expect("a file");
    let mode = std::os::unix::fs::PermissionsExt::mode(&file.metadata().expect("a file").permissions());
    assert_eq!(mode & 0o777, 0o600);
    let name = file.display().to_string();
    let args = ["serve", "--data", "data", "--apps", "apps.yaml", "--print-set-aside", &name];
    let output = abide(&args, folder.path(), b"");
    assert!(output.status.success(), "{}", stderr(&output));
    let mut count = 0;
    for line in stdout(&output).lines() {
        let row: serde_json::Value = serde_json::from_str(line).expect("a row");
        let key = row["key"].as_str().expect("a key").to_owned();
        assert!(
            !left.contains(&key) && row["value"]["given"]["spec"]["identity"]["setup_path"] == "/opt",
            "{key}"
        );
        count += 1;
    }
    assert_eq!(count + left.len(), 82);
}
