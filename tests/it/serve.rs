//! `serve` as installed: files, signals, slow and greedy clients, an independent client, and crashes during work.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::fixtures::workspace::Workspace;
use crate::server::Server;
use crate::support::{abide, command, needs, project, stderr, until};

const APPS: &str =
    "apps:\n  - {code: all, secret: s3cret}\n  - {code: web, secret: web-s3cret, namespaces: [web]}\n";

/// A gateway in a process of its own; it ends with the test.
pub struct Gateway {
    pub child: Child,
    pub url: String,
    pub server: Server,
}

impl Gateway {
    pub fn start(folder: &Path, more: &[&str]) -> Gateway {
        if !folder.join("apps.yaml").exists() {
            std::fs::write(folder.join("apps.yaml"), APPS).expect("a file");
        }
        std::fs::write(folder.join("tokens"), "* token\n").expect("a file");
        let mut args = vec!["serve", "--listen", "127.0.0.1:0", "--data", "data", "--apps", "apps.yaml"];
        args.extend(["--agent-token-file", "tokens"]);
        args.extend(more);
        let log = std::fs::File::options().append(true).create(true).open(folder.join("log")).expect("a log");
        let mut child = command(&args, folder).stdout(Stdio::piped()).stderr(log).spawn().expect("it starts");
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
        out.read_line(&mut line).expect("a line");
        let url = line
            .trim()
            .strip_prefix("ready ")
            .unwrap_or_else(|| panic!("{line:?} {}", log_of(folder)))
            .to_owned();
        let address = url.split("//").nth(1).expect("an address").parse().expect("an address");
        Gateway { child, url, server: Server::at(address) }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub fn log_of(folder: &Path) -> String {
    std::fs::read_to_string(folder.join("log")).unwrap_or_default()
}

fn body(name: &str, host: &str) -> Value {
    json!({"meta": {"namespace": "web", "name": name}, "hosts": [{"ip": host, "bk_cloud_id": 0}],
           "spec": {"identity": {"proc_name": name, "setup_path": "/opt", "pid_path": format!("/run/{name}.pid"), "user": "root"},
                    "env": {"PASSWORD": {"value": "hush-hush", "secret": true}}}})
}

fn contract(url: &str) {
    let script = project().join("tests/it/contract.py");
    let output = Command::new("python3").arg(script).arg(url).output().expect("python3 runs");
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn an_independent_client_passes_the_protocol_contract() {
    if !needs("python3") {
        return;
    }
    let folder = Workspace::new();
    let gateway = Gateway::start(folder.path(), &[]);
    contract(&gateway.url);
    let log = log_of(folder.path());
    let line = log.lines().find(|line| line.contains("call=\"register\"")).unwrap_or_else(|| panic!("{log}"));
    for part in [
        "who=\"all\"",
        "as_user=\"admin\"",
        "what=\"gsekit/nginx on 1 host\"",
        "from=127.0.0.1:",
        "result=\"ok\"",
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
    assert!(!log.contains("s3cret"), "{log}");
}

#[test]
fn tls_works_and_a_renewed_certificate_is_reloaded() {
    if !needs("python3") {
        return;
    }
    let folder = Workspace::new();
    let write = |name: &str| {
        let made = rcgen::generate_simple_self_signed(vec![name.to_owned()]).expect("a certificate");
        std::fs::write(folder.path().join("cert.pem"), made.cert.pem()).expect("a file");
        std::fs::write(folder.path().join("key.pem"), made.signing_key.serialize_pem()).expect("a file");
        made.cert.der().to_vec()
    };
    write("first");
    let gateway = Gateway::start(folder.path(), &["--tls-cert", "cert.pem", "--tls-key", "key.pem"]);
    assert!(gateway.url.starts_with("https://"), "{}", gateway.url);
    contract(&gateway.url);
    let second = write("second");
    let fingerprint = |der: &[u8]| der.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let script = "import ssl,sys,socket;c=ssl.create_default_context();c.check_hostname=False;c.verify_mode=ssl.CERT_NONE\n\
                  h,p=sys.argv[1].split('//')[1].split(':')\n\
                  s=c.wrap_socket(socket.create_connection((h,int(p))),server_hostname='x');print(s.getpeercert(True).hex())";
    let served = || {
        let output = Command::new("python3").args(["-c", script, &gateway.url]).output().expect("python3");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    until("the new certificate is served", || served() == fingerprint(&second));
    // Half of a pair changes nothing.
    std::fs::write(folder.path().join("cert.pem"), "nonsense").expect("a file");
    until("the failed reload is logged", || {
        log_of(folder.path()).contains("the previous content stays active")
    });
    assert_eq!(served(), fingerprint(&second));
}

#[test]
fn apps_are_reloaded_while_it_runs() {
    let folder = Workspace::new();
    let gateway = Gateway::start(folder.path(), &[]);
    let auth = |code: &str, secret: &str| {
        format!("X-Bkapi-Authorization: {{\"bk_app_code\": \"{code}\", \"bk_app_secret\": \"{secret}\"}}\r\n")
    };
    let status = |code: &str, secret: &str| {
        gateway.server.send("GET", "/api/abide/v1/processes", &auth(code, secret), b"").0
    };
    assert_eq!((status("web", "web-s3cret"), status("new", "hush")), (200, 401));
    std::fs::write(folder.path().join("apps.yaml"), "apps: [{code: new, secret: hush}]\n").expect("a file");
    until("the new app is known", || status("new", "hush") == 200);
    assert_eq!(status("web", "web-s3cret"), 401);
    std::fs::write(folder.path().join("apps.yaml"), "apps: [{code: new, secret: [hush]}]\n").expect("a file");
    until("a bad file is logged", || log_of(folder.path()).contains("the previous content stays active"));
    assert_eq!(status("new", "hush"), 200);
    assert!(!log_of(folder.path()).contains("hush"));
}

#[test]
fn a_non_loopback_address_needs_tls_or_a_flag() {
    let folder = Workspace::new();
    std::fs::write(folder.path().join("apps.yaml"), APPS).expect("a file");
    let args = ["serve", "--listen", "0.0.0.0:0", "--data", "data", "--apps", "apps.yaml"];
    let output = abide(&args, folder.path(), b"");
    assert!(
        output.status.code() == Some(64) && stderr(&output).contains("--insecure-listen"),
        "{}",
        stderr(&output)
    );
    for (file, content, says) in [
        ("apps.yaml", "apps: 7", "apps.yaml"),
        ("data/store.db", "not a database at all, really", "Move it away"),
    ] {
        std::fs::create_dir_all(folder.path().join("data")).expect("a folder");
        std::fs::write(folder.path().join("apps.yaml"), APPS).expect("a file");
        std::fs::write(folder.path().join(file), content).expect("a file");
        let args = ["serve", "--listen", "127.0.0.1:0", "--data", "data", "--apps", "apps.yaml"];
        let output = abide(&args, folder.path(), b"");
        assert!(output.status.code() == Some(1) && stderr(&output).contains(says), "{}", stderr(&output));
    }
}

#[test]
fn slow_and_greedy_clients_are_refused_and_others_continue() {
    let folder = Workspace::new();
    let limits =
        ["--request-secs", "1", "--max-connections", "12", "--max-rate", "40", "--max-body-bytes", "2000"];
    let gateway = Gateway::start(folder.path(), &limits);
    let server = &gateway.server;
    // A header that never ends, and a body that never comes.
    let mut slow: Vec<_> = (0..3).map(|_| server.connect()).collect();
    for stream in &mut slow {
        stream
            .write_all(b"POST /api/c/compapi/v2/gse/register_proc_info/ HTTP/1.1\r\nHost: x\r\n")
            .expect("it takes it");
    }
    let mut bodies: Vec<_> = (0..3).map(|_| server.connect()).collect();
    for stream in &mut bodies {
        stream.write_all(b"POST /api/c/compapi/v2/gse/register_proc_info/ HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{").expect("it takes it");
    }
    assert_eq!(server.send("GET", "/healthz", "", b"").0, 200, "others are served meanwhile");
    for stream in slow.iter_mut().chain(&mut bodies) {
        let begin = Instant::now();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(begin.elapsed() < Duration::from_secs(10), "it is closed");
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.is_empty() || answer.contains(" 408 "), "{answer}");
    }
    // More silent connections than it has room for: the oldest makes room, and the others are served.
    let mut crowd: Vec<_> = (0..20).map(|_| server.connect()).collect();
    assert_eq!(server.send("GET", "/healthz", "", b"").0, 200);
    let mut byte = [0];
    assert_eq!(crowd[0].read(&mut byte).expect("it is closed"), 0);
    drop(crowd);
    // Known callers are not displaced: the one beyond the limit is refused, and readiness says so.
    let auth = "X-Bkapi-Authorization: {\"bk_app_code\": \"all\", \"bk_app_secret\": \"s3cret\"}\r\n";
    let watch = || server.stream("/api/abide/v1/processes/watch", auth);
    let known: Vec<_> = (0..12).map(|_| watch()).collect();
    assert!(known.iter().all(|(status, _)| *status == 200));
    assert_eq!(server.send("GET", "/healthz", "", b"").0, 503);
    drop(known);
    until("there is room again", || server.send("GET", "/healthz", "", b"").0 == 200);
    let (status, text) = server.send("GET", "/readyz", "", b"");
    assert!(status == 503 && text.contains("all connections are in use"), "{status} {text}");
    until("it is ready again", || server.send("GET", "/readyz", "", b"").0 == 200);
    // A body that is too large, and too many requests a second.
    let auth = "X-Bkapi-Authorization: {\"bk_app_code\": \"all\", \"bk_app_secret\": \"s3cret\"}\r\n";
    let (status, text) = server.send("POST", "/api/abide/v1/state", auth, &[b' '; 3000]);
    assert!(status == 413 && text.contains("1900413"), "{status} {text}");
    let get = || server.send("GET", "/api/abide/v1/hosts", auth, b"");
    let mut answers = Vec::new();
    let begin = Instant::now();
    while !answers.iter().any(|(status, _)| *status == 429) && begin.elapsed() < Duration::from_secs(20) {
        answers.extend(std::thread::scope(|threads| {
            let all: Vec<_> = (0..8).map(|_| threads.spawn(get)).collect();
            all.into_iter().map(|thread| thread.join().expect("an answer")).collect::<Vec<_>>()
        }));
    }
    let refused = answers.iter().find(|(status, _)| *status == 429).expect("too many");
    assert!(refused.1.contains("1642902"), "{}", refused.1);
    until("it recovers", || get().0 == 200);
}

#[test]
fn excess_concurrent_requests_are_refused_and_it_recovers() {
    let folder = Workspace::new();
    let gateway = Gateway::start(folder.path(), &["--max-requests", "2"]);
    let auth = "X-Bkapi-Authorization: {\"bk_app_code\": \"all\", \"bk_app_secret\": \"s3cret\"}\r\n";
    let get = || gateway.server.send("GET", "/api/abide/v1/hosts", auth, b"");
    let unfinished = |auth: &str, length: usize| {
        let mut stream = gateway.server.connect();
        let head = format!(
            "POST /api/c/compapi/v2/gse/register_proc_info/ HTTP/1.1\r\nHost: x\r\n{auth}Content-Length: {length}\r\n\r\n{{"
        );
        stream.write_all(head.as_bytes()).expect("it takes it");
        stream
    };
    // Unknown callers hold none of the permits of known ones.
    let unknown: Vec<_> = (0..40).map(|_| unfinished("", 1000)).collect();
    assert_eq!(get().0, 200);
    drop(unknown);
    // Requests of two apps hold both permits. One that comes while another is answered is turned away itself.
    let web = auth.replace("\"all\"", "\"web\"").replace("s3cret", "web-s3cret");
    let mut held = Vec::new();
    until("there is no room", || {
        held.push(unfinished(auth, 1000));
        held.push(unfinished(&web, 1000));
        get().0 == 503
    });
    let (_, text) = get();
    assert!(text.contains("1642903"), "{text}");
    assert_eq!(gateway.server.send("GET", "/healthz", "", b"").0, 200, "health is answered anyway");
    let (status, text) = gateway.server.send("GET", "/readyz", "", b"");
    assert!(status == 503 && text.contains("permits of known callers"), "{status} {text}");
    drop(held);
    until("there is room again", || get().0 == 200);
    until("it is ready again", || gateway.server.send("GET", "/readyz", "", b"").0 == 200);
    drop(gateway);
    // Bodies that have arrived share an amount of memory; announced ones take none.
    let gateway = Gateway::start(folder.path(), &["--max-body-bytes", "100000000"]);
    let head = format!(
        "POST /api/c/compapi/v2/gse/register_proc_info/ HTTP/1.1\r\nHost: x\r\n{auth}Content-Length: 100000000\r\n\r\n{{"
    );
    let mut held: Vec<_> = (0..5).map(|_| gateway.server.connect()).collect();
    held.iter_mut().for_each(|stream| stream.write_all(head.as_bytes()).expect("it takes it"));
    assert_eq!(gateway.server.gse("register_proc_info", body("p", "10.0.0.1"))["result"], true);
    let large = vec![b' '; 90_000_000];
    let refused = held.iter_mut().any(|stream| {
        stream.set_write_timeout(Some(Duration::from_secs(5))).expect("a timeout");
        let sent = stream.write_all(&large);
        stream.set_read_timeout(Some(Duration::from_millis(500))).expect("a timeout");
        let mut answer = [0; 12];
        sent.is_err() || stream.read_exact(&mut answer).is_ok() && answer.ends_with(b"429")
    });
    assert!(refused, "two of 90 MB exceed the share of an app");
    drop(held);
    until("the memory is free again", || {
        gateway.server.gse("register_proc_info", body("q", "10.0.0.1"))["result"] == true
    });
    for zero in ["--max-requests", "--max-connections", "--max-body-bytes", "--max-rate", "--request-secs"] {
        let output = abide(&["serve", "--apps", "apps.yaml", zero, "0"], folder.path(), b"");
        assert_eq!(output.status.code(), Some(64), "{zero} 0: {}", stderr(&output));
    }
}

#[test]
fn every_quirk_of_the_protocol_and_every_nasty_body_gets_its_answer() {
    if !needs("python3") {
        return;
    }
    let folder = Workspace::new();
    let gateway = Gateway::start(folder.path(), &[]);
    let script = project().join("tests/it/quirks.py");
    let output = Command::new("python3").arg(script).arg(&gateway.url).output().expect("python3 runs");
    assert!(output.status.success(), "{}\n{}", String::from_utf8_lossy(&output.stdout), stderr(&output));
}

#[test]
fn secrets_are_not_logged_and_the_folder_is_private() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Workspace::new();
    let gateway = Gateway::start(folder.path(), &["-vvv"]);
    let answer = gateway.server.gse("register_proc_info", body("p", "10.0.0.1"));
    assert_eq!(answer["result"], true, "{answer}");
    let mut wrong = body("q", "10.0.0.1");
    wrong["spec"]["env"]["PASSWORD"] = json!({"value": ["hush-hush"], "secret": true});
    let answer = gateway.server.gse("register_proc_info", wrong);
    assert!(answer["result"] == false && !answer.to_string().contains("hush"), "{answer}");
    let (_, metrics) =
        gateway.server.send("GET", "/metrics", "Authorization: Basic YWxsOnMzY3JldA==\r\n", b"");
    assert!(metrics.contains("abide_gateway_registered 1") && !metrics.contains("hush"));
    assert!(!log_of(folder.path()).contains("hush") && !log_of(folder.path()).contains("s3cret"));
    let mode = |path: &str| {
        std::fs::metadata(folder.path().join(path)).expect("it is there").permissions().mode() & 0o777
    };
    assert_eq!((mode("data"), mode("data/store.db")), (0o700, 0o600));
}

#[test]
fn killed_under_load_it_comes_back_with_everything_it_acknowledged() {
    let folder = Workspace::new();
    let mut acknowledged: Vec<String> = Vec::new();
    for round in 0..8 {
        let gateway = Gateway::start(folder.path(), &[]);
        for name in &acknowledged {
            let status = gateway.server.gse("get_proc_status", body(name, "10.0.0.1"));
            assert_eq!(
                status["data"]["proc_infos"].as_array().map(Vec::len),
                Some(1),
                "{name} of round {round}"
            );
        }
        let count =
            gateway.server.gse("sync_proc_status", json!({"meta": {"namespace": "web"}}))["data"]["count"]
                .clone();
        assert!(
            count.as_u64().expect("a count") <= acknowledged.len() as u64 + 4 * round,
            "nothing without a request"
        );
        let pid = gateway.child.id().to_string();
        let server = &gateway.server;
        let told: Vec<Vec<String>> = std::thread::scope(|threads| {
            let writers: Vec<_> = (0..4)
                .map(|writer| {
                    threads.spawn(move || {
                        let mut told = Vec::new();
                        for n in 0..10_000 {
                            let name = format!("p-{round}-{writer}-{n}");
                            let mut request = body(&name, "10.0.0.1");
                            request["bk_app_code"] = json!("all");
                            request["bk_app_secret"] = json!("s3cret");
                            let bytes = request.to_string();
                            let sent = server.send("POST", "/procapi/v1/proc/procinfo", "", bytes.as_bytes());
                            let (200, text) = sent else { break };
                            let Ok(answer) = serde_json::from_str::<Value>(&text) else { break };
                            assert_eq!(
                                answer["data"][format!("0:0:10.0.0.1:web:{name}")]["error_code"],
                                0,
                                "{answer}"
                            );
                            told.push(name);
                        }
                        told
                    })
                })
                .collect();
            std::thread::sleep(Duration::from_millis(40 + 17 * round));
            assert!(Command::new("kill").args(["-9", &pid]).status().expect("kill").success());
            writers.into_iter().map(|writer| writer.join().expect("a writer")).collect()
        });
        acknowledged.extend(told.into_iter().flatten());
    }
    assert!(acknowledged.len() > 50, "only {} were acknowledged", acknowledged.len());
}

#[test]
fn sigterm_stops_the_gateway() {
    let folder = Workspace::new();
    for signal in ["-TERM", "-INT"] {
        let mut gateway = Gateway::start(folder.path(), &[]);
        // An idle connection does not delay the exit.
        let _idle = gateway.server.connect();
        let pid = gateway.child.id().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().expect("kill").success());
        let status = gateway.child.wait().expect("it ends");
        assert_eq!(status.code(), Some(0), "{}", log_of(folder.path()));
    }
}

#[test]
fn a_folder_has_one_gateway() {
    let folder = Workspace::new();
    let _first = Gateway::start(folder.path(), &[]);
    let args = ["serve", "--listen", "127.0.0.1:0", "--data", "data", "--apps", "apps.yaml"];
    let output = abide(&args, folder.path(), b"");
    assert!(output.status.code() == Some(1) && stderr(&output).contains("in use"), "{}", stderr(&output));
}

#[test]
fn a_revoked_permission_closes_its_streams() {
    let folder = Workspace::new();
    let gateway = Gateway::start(folder.path(), &[]);
    let join = json!({"agent": "a\nfalse line", "hosts": ["0:10.0.0.1"]}).to_string();
    let token = "Authorization: Bearer token\r\n";
    let (status, text) = gateway.server.send("POST", "/api/abide/v1/agent/join", token, join.as_bytes());
    let joined: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(status, 200, "{joined}");
    assert!(
        !log_of(folder.path()).lines().any(|line| line.starts_with("false line")),
        "a name is no line of its own"
    );
    let session = joined["data"]["session"].as_str().expect("a session");
    let path = format!("/api/abide/v1/agent/stream?session={session}");
    let (_, mut stream) = gateway.server.stream(&path, token);
    let basic = "Authorization: Basic YWxsOnMzY3JldA==\r\n";
    let (_, mut watch) = gateway.server.stream("/api/abide/v1/processes/watch", basic);
    std::fs::write(folder.path().join("tokens"), "* another\n").expect("a file");
    std::fs::write(folder.path().join("apps.yaml"), "apps: [{code: new, secret: hush}]\n").expect("a file");
    while stream.next().is_some() {}
    let mut last = Value::Null;
    while let Some(line) = watch.next() {
        last = line;
    }
    assert!(last["error"].as_str().expect("a word").contains("no longer known"), "{last}");
}

#[test]
fn a_damaged_entry_is_detected_and_a_clean_stop_leaves_one_file() {
    let folder = Workspace::new();
    let mut gateway = Gateway::start(folder.path(), &["--key-file", "none"]);
    for n in 0..50 {
        gateway.server.gse("register_proc_info", body(&format!("p{n}"), "10.0.0.1"));
    }
    let pid = gateway.child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().expect("kill").success());
    gateway.child.wait().expect("it ends");
    let file = folder.path().join("data/store.db");
    let wal = std::fs::metadata(folder.path().join("data/store.db-wal")).map_or(0, |meta| meta.len());
    assert_eq!(wal, 0, "everything is in the one file");
    let good = std::fs::read(&file).expect("a file");
    // Wherever it stands: in an entry, and in the log of changes.
    let mut bad = good.clone();
    let places: Vec<usize> = (0..good.len() - 9).filter(|at| &good[*at..at + 9] == b"hush-hush").collect();
    assert!(places.len() >= 50, "{places:?}");
    places.into_iter().for_each(|at| bad[at] ^= 1);
    std::fs::write(&file, bad).expect("a file");
    let args = ["serve", "--listen", "127.0.0.1:0", "--data", "data", "--apps", "apps.yaml"];
    let args = [&args[..], &["--key-file", "none"]].concat();
    let output = abide(&args, folder.path(), b"");
    assert!(output.status.code() == Some(1) && stderr(&output).contains("is damaged"), "{}", stderr(&output));
    std::fs::write(&file, good).expect("a file");
    let gateway = Gateway::start(folder.path(), &["--key-file", "none"]);
    let page = gateway.server.gse("sync_proc_status", json!({"meta": {"namespace": "web"}}));
    assert_eq!(page["data"]["count"], 50);
}

#[test]
fn a_file_that_may_not_grow_stops_writes_and_nothing_else() {
    if !needs("prlimit") {
        return;
    }
    let folder = Workspace::new();
    let gateway = Gateway::start(folder.path(), &[]);
    gateway.server.gse("register_proc_info", body("first", "10.0.0.1"));
    let pid = gateway.child.id().to_string();
    let limit = |size: &str| {
        Command::new("prlimit").args(["--pid", &pid, &format!("--fsize={size}:")]).status().expect("prlimit")
    };
    assert!(limit("200000").success());
    let mut refused = Value::Null;
    for n in 0..200 {
        let answer = gateway.server.gse("register_proc_info", body(&format!("p{n}"), "10.0.0.1"));
        if answer["result"] == false {
            refused = answer;
            break;
        }
    }
    assert_eq!(refused["code"], 1_900_507, "{refused}");
    assert_eq!(
        gateway.server.gse("get_proc_status", body("first", "10.0.0.1"))["data"]["proc_infos"]
            .as_array()
            .map(Vec::len),
        Some(1)
    );
    assert_eq!(gateway.server.send("GET", "/readyz", "", b"").0, 503);
    assert!(limit("unlimited").success());
    until("it is ready again", || gateway.server.send("GET", "/readyz", "", b"").0 == 200);
    assert_eq!(gateway.server.gse("register_proc_info", body("last", "10.0.0.1"))["result"], true);
}
