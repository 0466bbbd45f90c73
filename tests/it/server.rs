//! A gateway on a free port, and a client of a few lines that shares nothing with it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use abide::gateway::auth::{Apps, Authenticator, Tokens};
use abide::gateway::{Gateway, middleware};
use abide::http::{Listener, Reloadable, serve};
use abide::store::Embedded;
use serde_json::{Value, json};

use crate::apply::KillOnDrop;
use crate::http::Answer;
use crate::support::other_program;

/// It ends with the test.
pub struct Server {
    pub address: SocketAddr,
    _stop: Option<tokio::sync::watch::Sender<bool>>,
    _runtime: Option<tokio::runtime::Runtime>,
    _program: Option<KillOnDrop>,
}

impl Server {
    /// In this process, over a store's file.
    pub fn start(file: &Path, patience: Duration, apps: &str, tokens: &str) -> Server {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        Server::listen(any, file, (patience, None), apps, tokens)
    }

    /// The same with another allowance for agents that give no result.
    pub fn with_allowance(
        file: &Path,
        patience: Duration,
        allowance: Duration,
        apps: &str,
        tokens: &str,
    ) -> Server {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        Server::listen(any, file, (patience, Some(allowance)), apps, tokens)
    }

    /// The same at an address that one had before.
    pub fn restart_at(address: SocketAddr, file: &Path, apps: &str, tokens: &str) -> Server {
        Server::listen(address, file, (Duration::from_secs(10), None), apps, tokens)
    }

    fn listen(
        at: SocketAddr,
        file: &Path,
        (patience, allowance): (Duration, Option<Duration>),
        apps: &str,
        tokens: &str,
    ) -> Server {
        if let Some(program) = other_program() {
            return Server::of_program(&program, at, file, apps, tokens);
        }
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime");
        let mut gateway = Gateway::new(Embedded::open(file).expect("it opens")).with_agent_timeout(patience);
        if let Some(allowance) = allowance {
            gateway = gateway.with_allowance(allowance);
        }
        let gateway = Arc::new(gateway);
        let keepers = Authenticator::new(
            Reloadable::fixed(Apps::parse(apps).expect("apps")),
            Reloadable::fixed(Tokens::parse(tokens).expect("tokens")),
        );
        let router =
            middleware::router(Arc::clone(&gateway), Arc::new(keepers), middleware::Limits::default());
        let socket = runtime.block_on(tokio::net::TcpListener::bind(at)).expect("a port");
        let address = socket.local_addr().expect("an address");
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let listener = Listener { socket, tls: None, connections: 1000, header_time: Duration::from_secs(5) };
        runtime.spawn(serve(listener, router, stopped));
        runtime.spawn(async move { gateway.run_maintenance().await });
        let server = Server { address, _stop: Some(stop), _runtime: Some(runtime), _program: None };
        server.wait_until_ready();
        server
    }

    /// A gateway of another version, over the same files.
    fn of_program(program: &Path, at: SocketAddr, file: &Path, apps: &str, tokens: &str) -> Server {
        use std::os::unix::fs::OpenOptionsExt;
        let folder = file.parent().expect("a folder");
        let write = |name: &str, text: &str| {
            let path = folder.join(name);
            let mut options = std::fs::OpenOptions::new();
            let file = options.write(true).create(true).truncate(true).mode(0o600).open(&path);
            file.expect("a file").write_all(text.as_bytes()).expect("it is written");
            path
        };
        let (apps, tokens) = (write("other-apps", apps), write("other-tokens", tokens));
        let mut command = std::process::Command::new(program);
        command.args(["serve", "--listen", &at.to_string(), "--data"]).arg(folder);
        command.arg("--apps").arg(apps).arg("--agent-token-file").arg(tokens);
        command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped());
        let mut child = command.stderr(std::process::Stdio::null()).spawn().expect("it starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        let address = line.trim().strip_prefix("ready http://").and_then(|text| text.parse().ok());
        let server = Server {
            address: address.expect("an address"),
            _stop: None,
            _runtime: None,
            _program: Some(KillOnDrop(child)),
        };
        server.wait_until_ready();
        server
    }

    /// One that runs elsewhere.
    pub fn at(address: SocketAddr) -> Server {
        Server { address, _stop: None, _runtime: None, _program: None }
    }

    pub fn wait_until_ready(&self) {
        let begin = std::time::Instant::now();
        while self.send("GET", "/readyz", "", b"").0 != 200 {
            assert!(begin.elapsed() < Duration::from_secs(20), "it never became ready");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// One request, byte for byte as written here; its status and body. Status 0: nobody is there.
    pub fn send(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> (u16, String) {
        let Ok(stream) = TcpStream::connect(self.address) else { return (0, String::new()) };
        Server::send_on(stream, method, path, headers, body)
    }

    /// The same from another of this machine's loopback addresses: another peer.
    pub fn send_from(
        &self,
        from: [u8; 4],
        method: &str,
        path: &str,
        headers: &str,
        body: &[u8],
    ) -> (u16, String) {
        Server::send_on(connect_from(from, self.address), method, path, headers, body)
    }

    fn send_on(mut stream: TcpStream, method: &str, path: &str, headers: &str, body: &[u8]) -> (u16, String) {
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        let length = body.len();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n"
        );
        if stream.write_all(head.as_bytes()).is_err() {
            return (0, String::new());
        }
        // A server that has seen enough may close before all of it is sent.
        let _ = stream.write_all(body);
        let Answer { status, body, .. } = Answer::read(&mut stream);
        (status, body)
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("a connection");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        stream
    }

    /// Opens a stream of lines. What comes are chunks of them.
    pub fn stream(&self, path: &str, headers: &str) -> (u16, Lines) {
        let mut stream = self.connect();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\n{headers}\r\n").expect("a request");
        let mut reader = BufReader::new(stream);
        let mut status = String::new();
        reader.read_line(&mut status).expect("a status");
        let status = status.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        let mut line = String::new();
        while reader.read_line(&mut line).expect("a header") > 2 {
            line.clear();
        }
        (status, Lines { reader, left: Vec::new() })
    }

    /// A call as ESB's callers make it: credentials in the body, no Content-Type.
    pub fn call(&self, method: &str, path: &str, body: Value) -> Value {
        self.call_with(method, path, "", body)
    }

    pub fn call_with(&self, method: &str, path: &str, headers: &str, mut body: Value) -> Value {
        body["bk_app_code"] = json!("all");
        body["bk_app_secret"] = json!("s3cret");
        let (_, text) = self.send(method, path, headers, body.to_string().as_bytes());
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{method} {path}: {error}: {text}"))
    }

    /// Takes the writer lease of an owner for a minute: its generation.
    pub fn lease(&self, owner: &str, id: &str) -> u64 {
        self.lease_for(owner, id, 60_000)
    }

    pub fn lease_for(&self, owner: &str, id: &str, lives_ms: u64) -> u64 {
        let holder = json!({"id": id, "host": "elsewhere", "boot_id": "b", "pid": 1, "started": 1});
        let ask = json!({"name": format!("writer/{owner}"), "holder": holder, "lives_ms": lives_ms});
        let answer = self.call("POST", "/api/abide/v1/state", json!({"take_lease": ask}));
        answer["data"]["ours"]["generation"].as_u64().unwrap_or_else(|| panic!("{answer}"))
    }

    /// Another holder takes the lease, until its generation is this one's successor.
    pub fn take_over_lease(&self, owner: &str, generation: u64) -> u64 {
        let reset = json!({"name": format!("writer/{owner}"), "above": generation, "force": true});
        self.call("POST", "/api/abide/v1/state", json!({"reset_lease": reset}));
        self.lease(owner, "another")
    }

    pub fn renew_lease(&self, owner: &str, id: &str, generation: u64) -> bool {
        let ask = json!({"name": format!("writer/{owner}"), "holder": id, "generation": generation, "lives_ms": 60_000});
        self.call("POST", "/api/abide/v1/state", json!({"renew_lease": ask}))["data"]["kept"] == true
    }

    pub fn release(&self, owner: &str, id: &str, generation: u64) {
        let ask = json!({"name": format!("writer/{owner}"), "holder": id, "generation": generation});
        self.call("POST", "/api/abide/v1/state", json!({"release_lease": ask}));
    }

    pub fn gse(&self, name: &str, body: Value) -> Value {
        self.call("POST", &format!("/api/c/compapi/v2/gse/{name}/"), body)
    }
}

/// A connection from a loopback address.
pub fn connect_from(from: [u8; 4], to: SocketAddr) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().expect("a runtime");
    let stream = runtime.block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        socket.bind(SocketAddr::from((from, 0))).expect("an address");
        socket.connect(to).await.expect("a connection").into_std().expect("a stream")
    });
    stream.set_nonblocking(false).expect("a mode");
    stream
}

/// Lines of a chunked body.
pub struct Lines {
    reader: BufReader<TcpStream>,
    left: Vec<u8>,
}

impl Lines {
    /// The next line that says something; `None`: the stream ended.
    pub fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(end) = self.left.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.left.drain(..=end).collect();
                if line.len() > 1 {
                    return Some(serde_json::from_slice(&line).expect("a line is JSON"));
                }
                continue;
            }
            let mut size = String::new();
            if self.reader.read_line(&mut size).ok()? == 0 {
                return None;
            }
            let size = usize::from_str_radix(size.trim(), 16).ok()?;
            if size == 0 {
                return None;
            }
            let mut chunk = vec![0; size + 2];
            self.reader.read_exact(&mut chunk).ok()?;
            self.left.extend_from_slice(&chunk[..size]);
        }
    }
}
