//! A stolen credential under attack conditions: its requests in flight and their bodies leave room for every other
//! caller, for agents, and for readiness.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use serde_json::json;

use crate::fixtures::workspace::Workspace;
use crate::listeners::{AUTH, GSE, SOON, Site};
use crate::serve::Gateway;
use crate::server::Server;
use crate::support::until;
use crate::system::System;

const TELL: &str = "/api/abide/v1/agent/tell?session=none";

/// A request that announces a body and sends only a part of it.
fn unfinished(at: SocketAddr, path: &str, auth: &str, sent: usize) -> TcpStream {
    let mut stream = TcpStream::connect(at).expect("a connection");
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
    let (mut held, mut refusal) = (Vec::new(), String::new());
    until("a request is refused", || {
        held.push(unfinished(at, path, auth, sent));
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
