//! Redirects and plain http: no client follows a redirect, so credentials and operations stay with the host that the user
//! named; plain http leaves loopback only where the user accepted it; `ca_only` narrows trust.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use abide::http::WebhookClient;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::fixtures::certificates::{Authority, Pair};
use crate::fixtures::workspace::Workspace;
use crate::http::{NOTHING_RUNS, Request};
use crate::server::Server;
use crate::support::{GOOD, Tree, abide, command, stderr, stdout, until};
use crate::system::{APPS, System};

/// Answers every request with a status and a location; the requests that it got.
fn redirector(status: u16, location: &str) -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("an address");
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (location, got) = (location.to_owned(), Arc::clone(&seen));
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            stream.set_read_timeout(Some(Duration::from_secs(5))).expect("a timeout");
            let Some(request) = Request::read(&mut stream) else { continue };
            let text = format!("{}{}", request.head, String::from_utf8_lossy(&request.body));
            got.lock().expect("a lock").push(text);
            let to = location.replace("{path}", &request.path);
            let _ = write!(
                stream,
                "HTTP/1.1 {status} Moved\r\nLocation: {to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            );
        }
    });
    (address, seen)
}

fn config(url: &str, dialect: &str, more: &str) -> String {
    format!(
        "targets: {{it: {{url: \"{url}\", dialect: {dialect}, {more} auth: {{app_code: all, app_secret: {{file: secret}}}}}}}}\n"
    )
}

fn tree(config: &str) -> Tree {
    let manifest = GOOD.replace("control: {", "control: {stop_cmd: ./stop, ");
    Tree::new(&[("it.yaml", config), ("secret", "s3cret"), ("m/api.yaml", &manifest)])
}

const PLAN: [&str; 6] = ["plan", "m", "--target", "it", "--config", "it.yaml"];

#[test]
fn a_redirecting_target_receives_no_secret_at_the_new_location() {
    for status in [301, 302, 307, 308] {
        for dialect in ["abide", "gse-v2", "gse-apigw", "job"] {
            let (other, got) = redirector(404, "");
            let (at, asked) = redirector(status, &format!("http://u:hidden@{other}{{path}}"));
            let business = if dialect == "job" { "biz_id: 2," } else { "" };
            let tree = tree(&config(&format!("http://{at}"), dialect, business));
            let output = abide(&PLAN, tree.path(), b"");
            let err = stderr(&output);
            assert_eq!(output.status.code(), Some(69), "{status} {dialect}: {err}");
            let says = format!("redirects to {other} (HTTP {status}); redirects are never followed");
            assert!(err.contains(&says) && !err.contains("hidden"), "{status} {dialect}: {err}");
            assert!(asked.lock().expect("a lock").iter().any(|request| request.contains("s3cret")));
            assert_eq!(*got.lock().expect("a lock"), Vec::<String>::new(), "{status} {dialect}");
        }
    }
}

#[test]
fn an_agent_takes_no_operations_from_where_it_is_redirected_to() {
    let folder = Workspace::new();
    std::fs::write(folder.path().join("token"), "token\n").expect("a file");
    // A gateway that would accept this very agent.
    let server = Server::start(&folder.path().join("store.db"), Duration::from_secs(10), APPS, "* token\n");
    let (at, asked) = redirector(307, &format!("http://{}{{path}}", server.address));
    let log = folder.path().join("agent.log");
    let url = format!("http://{at}");
    let args = ["agent", "--join", &url, "--token-file", "token", "--data", "agent"];
    let mut child = command(&args, folder.path())
        .stdout(Stdio::piped())
        .stderr(std::fs::File::create(&log).expect("a file"))
        .spawn()
        .expect("it starts");
    let stdout = child.stdout.take().expect("a pipe");
    until("it was redirected twice", || asked.lock().expect("a lock").len() > 1);
    let said = std::fs::read_to_string(&log).expect("a log");
    let hosts = server.call("GET", "/api/abide/v1/hosts", serde_json::json!({}));
    child.kill().expect("it is killed");
    child.wait().expect("it ends");
    let mut line = String::new();
    let _ = BufReader::new(stdout).read_line(&mut line);
    assert_eq!(line, "", "it joined");
    assert!(said.contains(&format!("redirects to {}", server.address)), "{said}");
    assert_eq!(hosts["data"]["count"].as_u64().unwrap_or(0), 0, "{hosts}");
}

#[test]
fn state_and_notifications_are_not_redirected_either() {
    let (other, got) = redirector(404, "");
    let (at, _) = redirector(307, &format!("http://{other}{{path}}"));
    let tree = tree(&config(&format!("http://{at}"), "abide", ""));
    let url = format!("http://{at}");
    let args = ["pause", "--all", "--config", "it.yaml", "--target", "it", "--state", &url];
    let output = abide(&args, tree.path(), b"");
    assert!(stderr(&output).contains(&format!("redirects to {other}")), "{}", stderr(&output));
    let hook = WebhookClient::new(&format!("http://{at}/hooks/t0ken"), false).expect("an address");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let sent = runtime.block_on(hook.post("{}".to_owned(), Duration::from_secs(5)));
    let error = sent.expect_err("a redirect is a failure");
    let why = error.to_string();
    assert!(why.contains("redirects are never followed") && !why.contains("t0ken"), "{why}");
    assert!(!error.may_retry);
    assert_eq!(*got.lock().expect("a lock"), Vec::<String>::new());
}

#[test]
fn git_does_not_follow_a_redirect() {
    let (other, got) = redirector(404, "");
    let (at, asked) = redirector(301, &format!("http://{other}{{path}}"));
    let folder = Workspace::new();
    let (url, log) = (format!("http://{at}/fleet.git"), folder.path().join("log"));
    let out = std::fs::File::create(&log).expect("a file");
    let args = ["watch", "--git", &url, "--listen", "127.0.0.1:0", "--owner", "x"];
    let mut child = command(&args, folder.path())
        .env("HOME", folder.path())
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .stdout(out.try_clone().expect("a file"))
        .stderr(out)
        .spawn()
        .expect("it starts");
    until("the failure is reported", || {
        std::fs::read_to_string(&log).is_ok_and(|said| said.contains("cannot fetch"))
    });
    abide(&["down", "--stop-processes"], folder.path(), b"");
    child.kill().expect("it is killed");
    child.wait().expect("it ends");
    let said = std::fs::read_to_string(&log).expect("a log");
    assert!(!asked.lock().expect("a lock").is_empty());
    assert_eq!(*got.lock().expect("a lock"), Vec::<String>::new(), "{said}");
    assert!(said.contains("redirects are never followed"), "{said}");
}

#[test]
fn plain_http_leaves_loopback_only_where_it_was_accepted() {
    let system = System::new();
    // Not a loopback address by its text, and yet this machine.
    let plain = format!("http://0.0.0.0:{}", system.server.address.port());
    let tree = tree(&config(&plain, "abide", ""));
    let output = abide(&PLAN, tree.path(), b"");
    let err = stderr(&output);
    assert_eq!(output.status.code(), Some(64), "{err}");
    assert!(err.contains("target \"it\": refusing plain http to 0.0.0.0 (not a loopback address)"), "{err}");
    assert!(err.contains("hint: use https, or set `insecure: true` for this target"), "{err}");
    tree.write("it.yaml", config(&plain, "abide", "insecure: true,"));
    let output = abide(&PLAN, tree.path(), b"");
    assert_eq!(output.status.code(), Some(0), "{}{}", stdout(&output), stderr(&output));

    let join =
        ["agent", "--join", &plain, "--token-file", "token", "--data", "other", "--as-host", "0:10.9.9.9"];
    let output = abide(&join, system.folder.path(), b"");
    let err = stderr(&output);
    assert_eq!(output.status.code(), Some(64), "{err}");
    assert!(err.contains("--join: refusing plain http") && err.contains("--insecure-join"), "{err}");
    assert!(!system.path("other").exists(), "it was refused before anything was made");
    let mut child = command(&join, system.folder.path())
        .env("ABIDE_INSECURE_JOIN", "true")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
    child.kill().expect("it is killed");
    child.wait().expect("it ends");
    assert_eq!(line.trim(), format!("ready {plain}"));

    let notify = ["watch", "m", "--listen", "127.0.0.1:0", "--notify", "http://10.9.9.9/t0ken"];
    let output = abide(&notify, tree.path(), b"");
    let err = stderr(&output);
    abide(&["down"], tree.path(), b"");
    assert!(output.status.code() == Some(64) && err.contains("--insecure-notify"), "{err}");
    assert!(!err.contains("t0ken"), "{err}");
}

/// A platform with a certificate of this authority, on which nothing runs.
fn platform(authority: &Authority) -> SocketAddr {
    let Pair { certificate, key } = authority.sign("127.0.0.1");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(
            vec![CertificateDer::from_pem_slice(certificate.as_bytes()).expect("a certificate")],
            PrivateKeyDer::from_pem_slice(key.as_bytes()).expect("a key"),
        )
        .expect("a configuration");
    let config = Arc::new(config);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for mut socket in listener.incoming().flatten() {
            let mut connection = rustls::ServerConnection::new(Arc::clone(&config)).expect("a connection");
            socket.set_read_timeout(Some(Duration::from_secs(5))).expect("a timeout");
            std::thread::spawn(move || {
                let mut stream = rustls::Stream::new(&mut connection, &mut socket);
                while let Some(request) = Request::read(&mut stream) {
                    let called = |name: &str| request.path.contains(name);
                    let data = match () {
                        () if called("get_agent_status") => {
                            r#"{"0:10.0.0.1": {"ip": "10.0.0.1", "bk_cloud_id": 0, "bk_agent_alive": 1}}"#
                        }
                        () if called("get_proc_operate_result") => NOTHING_RUNS,
                        () if called("operate_proc") => r#"{"task_id": "1"}"#,
                        () => r#"{"proc_infos": []}"#,
                    };
                    let body = format!(r#"{{"result": true, "code": 0, "message": "", "data": {data}}}"#);
                    let _ = write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
                }
            });
        }
    });
    address
}

#[test]
fn ca_only_trusts_only_the_file() {
    let (ours, machines) = (Authority::new("ours"), Authority::new("the machine's"));
    let plan = |at: SocketAddr, more: &str| {
        let tree = tree(&config(&format!("https://{at}"), "gse-v2", more));
        tree.write("ours.pem", &ours.pem);
        tree.write("machine.pem", &machines.pem);
        let output = command(&PLAN, tree.path())
            .env("SSL_CERT_FILE", tree.path().join("machine.pem"))
            .env_remove("SSL_CERT_DIR")
            .output()
            .expect("it runs");
        (output.status.code(), stdout(&output) + &stderr(&output))
    };
    let (known, own) = (platform(&machines), platform(&ours));
    for (at, more, code) in [
        (known, "ca_file: ours.pem,", 0),
        (own, "ca_file: ours.pem,", 0),
        (own, "ca_file: ours.pem, ca_only: true,", 0),
        (known, "ca_file: ours.pem, ca_only: true,", 69),
        (known, "ca_only: true,", 64),
    ] {
        let (got, told) = plan(at, more);
        assert_eq!(got, Some(code), "{more}: {told}");
    }
    let (_, told) = plan(known, "ca_only: true,");
    assert!(told.contains("ca_only needs a ca_file"), "{told}");
}
