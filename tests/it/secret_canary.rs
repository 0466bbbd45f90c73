//! Secret canary: unique secrets go through an end-to-end run, and no output, log, file or answer has one of them.
//!
//! A gateway with TLS, an agent with a join token, a controller that follows a git repository with credentials, and every
//! verb, with `-vv`. A secret is allowed in the file that the user wrote it to, and in the environment of its process.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::agent_enrollment::write_server_files;
use crate::apply::KillOnDrop;
use crate::fixtures::canaries::Canaries;
use crate::fixtures::git_server::git_server;
use crate::fixtures::machine::start_logged;
use crate::fixtures::manifest::Manifest;
use crate::fixtures::people::{between, set_cookie, write_private};
use crate::fixtures::tls_client::{over_tls, read_start};
use crate::fixtures::workspace::Workspace;
use crate::http::Answer;
use crate::serve::Gateway;
use crate::support::{abide, command, needs, stderr, stdout, until};
use crate::system::{kill, processes, whoami};

const HOST: &str = "0:127.0.0.1";
/// Files and folders that the user wrote secrets to: inputs, not outputs.
const INPUTS: [&str; 10] = [
    "apps.yaml",
    "abide.yaml",
    "secret",
    "reader-secret",
    "person-token",
    "join",
    "env-file",
    "m",
    "repository",
    ".abide-key",
];

/// A run, and the places where a secret was found.
struct Run {
    folder: Workspace,
    gateway: Option<Gateway>,
    canaries: Canaries,
    leaks: Vec<String>,
}

impl Run {
    fn new() -> Run {
        let folder = Workspace::new();
        let canaries = Canaries::new();
        write_server_files(folder.path());
        let apps = format!(
            "apps:\n  - {{code: all, secret: {}}}\n  - {{code: reader, secret: {}, role: read}}\n",
            canaries.get("app"),
            canaries.get("reader")
        );
        std::fs::write(folder.path().join("apps.yaml"), apps).expect("a file");
        for (file, name) in [
            ("secret", "app"),
            ("reader-secret", "reader"),
            ("env-file", "env-file"),
            ("person-token", "person"),
        ] {
            write_private(&folder.path().join(file), &format!("{}\n", canaries.get(name)));
        }
        std::fs::create_dir(folder.path().join("m")).expect("a folder");
        let mut run = Run { folder, gateway: None, canaries, leaks: Vec::new() };
        run.write_users();
        run.start_gateway();
        run
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A person, with the digest of the token that `access hash` prints.
    fn write_users(&mut self) {
        let token = self.canaries.get("person").to_owned();
        let output = abide(&["-vv", "access", "hash"], self.folder.path(), token.as_bytes());
        let digest = stdout(&output).trim().to_owned();
        assert_eq!(digest.len(), 64, "{digest} {}", stderr(&output));
        self.check("abide access hash", &[output.stdout, output.stderr].concat());
        let users = format!("users:\n  - {{name: ann, token_sha256: {digest}, role: admin}}\n");
        write_private(&self.path("users.yaml"), &users);
    }

    fn start_gateway(&mut self) {
        let tls = ["-vv", "--tls-cert", "cert.pem", "--tls-key", "key.pem", "--ca-dir", "ca"];
        let gateway = Gateway::start(self.folder.path(), &[&tls[..], &["--users", "users.yaml"]].concat());
        let target = |name: &str, auth: &str| {
            format!(
                "  {name}: {{url: '{}', dialect: abide, ca_file: server-ca.pem, ca_only: true, auth: {{{auth}}}}}\n",
                gateway.url
            )
        };
        let all = target("there", "app_code: all, app_secret: {file: secret}");
        let reader = target("reader", "app_code: reader, app_secret: {file: reader-secret}");
        let person = target("person", "token: {file: person-token}");
        std::fs::write(self.path("abide.yaml"), format!("targets:\n{all}{reader}{person}")).expect("a file");
        self.gateway = Some(gateway);
    }

    fn start_agent(&self, log: &str) -> KillOnDrop {
        let url = &self.gateway.as_ref().expect("a gateway").url;
        let args =
            ["-vv", "agent", "--join", url, "--data", "agent", "--token-file", "join", "--as-host", HOST];
        let args = [&args[..], &["--ca-file", "server-ca.pem", "--ca-only"]].concat();
        start_logged(&mut command(&args, self.folder.path()), &self.path(log))
    }

    fn check(&mut self, what: &str, bytes: &[u8]) {
        let found = self.canaries.found_in(bytes);
        if !found.is_empty() {
            self.leaks.push(format!("{what}: {}", found.join(", ")));
        }
    }

    /// Runs a verb and checks what it prints.
    fn verb(&mut self, args: &[&str]) -> (i32, String, String) {
        self.verb_at("there", args)
    }

    fn verb_at(&mut self, target: &str, args: &[&str]) -> (i32, String, String) {
        let all = [&["-vv"], args, &["--target", target]].concat();
        let output = command(&all, self.folder.path()).stdin(Stdio::null()).output().expect("it runs");
        let (out, err) = (stdout(&output), stderr(&output));
        self.check(&format!("abide {} ({target})", args.join(" ")), format!("{out}\n{err}").as_bytes());
        (output.status.code().unwrap_or(-1), out, err)
    }

    /// Calls the gateway with the credentials of an app, or of the person `ann`, and checks the answer.
    fn call(&mut self, app: &str, secret: &str, method: &str, path: &str, body: &str) -> String {
        use base64::Engine;
        let credentials = match app {
            "ann" => format!("Bearer {}", self.canaries.get(secret)),
            _ => {
                let credentials = format!("{app}:{}", self.canaries.get(secret));
                format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(credentials))
            }
        };
        let url = self.gateway.as_ref().expect("a gateway").url.clone();
        let address = url.split("//").nth(1).expect("an address").parse().expect("an address");
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: {credentials}\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let answer = over_tls(address, &self.path("server-ca.pem"), request.as_bytes());
        self.check(&format!("{method} {path} of app {app}"), answer.body.as_bytes());
        assert_ne!(answer.status, 0, "{method} {path}");
        answer.body
    }

    /// Checks every file of the folder that the user did not write.
    fn check_files(&mut self, when: &str) {
        let mut folders = vec![self.folder.path().to_owned()];
        let mut files = Vec::new();
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
                let path = entry.path();
                let name = path.strip_prefix(self.folder.path()).expect("a part").to_path_buf();
                if INPUTS.iter().any(|input| name == Path::new(input)) {
                    continue;
                }
                match path.is_dir() {
                    true => folders.push(path),
                    false => files.push((name, path)),
                }
            }
        }
        let has = |name: &str| files.iter().any(|(file, _)| file.ends_with(name));
        assert!(has("store.db") && has("agent.db") && has("watch.log"), "{files:?}");
        for (name, path) in files {
            let bytes = std::fs::read(path).unwrap_or_default();
            self.check(&format!("file {} {when}", name.display()), &bytes);
        }
    }

    /// Checks the command lines of all processes, and the environments of those that work in the folder. Returns
    /// whether a fetch was in progress.
    fn check_processes(&mut self) -> bool {
        let mut has_fetch = false;
        for pid in processes() {
            let read = |name: &str| std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
            let line = read("cmdline");
            let here = std::fs::read_link(format!("/proc/{pid}/cwd"))
                .is_ok_and(|at| at.starts_with(self.folder.path()));
            let shown = String::from_utf8_lossy(&line).replace('\0', " ");
            self.check(&format!("command line of {pid}: {shown}"), &line);
            // The process itself has its secrets; the controller has the variable that the user set.
            let is_own = shown.starts_with("sleep") || shown.contains("exec sleep");
            if here && !is_own && !shown.contains(" watch ") {
                self.check_environment(&shown, &read("environ"));
                has_fetch |= is_fetch(&shown);
            }
        }
        has_fetch
    }

    /// A fetch in progress has the password of its server, and no other secret.
    fn check_environment(&mut self, command_line: &str, bytes: &[u8]) {
        let may_have_password = is_fetch(command_line);
        let found = self.canaries.found_in(bytes);
        let leaked: Vec<&str> =
            found.into_iter().filter(|name| !(may_have_password && *name == "git")).collect();
        if !leaked.is_empty() {
            self.leaks.push(format!("environment of {command_line}: {}", leaked.join(", ")));
        }
    }

    fn write(&self, secret: &str) {
        let text = manifest(self.folder.path(), "api", self.canaries.get(secret)).to_string();
        std::fs::write(self.path("m/api.yaml"), text).expect("a file");
    }

    fn pid(&mut self, name: &str) -> Option<u32> {
        let (_, text, _) = self.verb(&["get", "processes", "-o", "json"]);
        let rows: Vec<Value> = serde_json::from_str(&text).ok()?;
        rows.iter().find(|row| row["name"] == name).and_then(|row| row["pid"].as_u64()).map(|pid| pid as u32)
    }

    fn has_agent(&mut self) -> bool {
        let (_, text, _) = self.verb(&["get", "hosts", "-o", "json"]);
        let rows: Value = serde_json::from_str(&text).unwrap_or_default();
        rows[0]["agent"] == true
    }
}

/// Whether a process belongs to a fetch: git, or the shell that gives git the password.
fn is_fetch(command_line: &str) -> bool {
    let program = command_line.split(' ').next().and_then(|program| program.rsplit('/').next());
    program.is_some_and(|name| name.starts_with("git")) || command_line.contains("ABIDE_GIT_PASSWORD")
}

fn manifest(here: &Path, name: &str, secret: &str) -> Manifest {
    let file = here.join("env-file");
    Manifest::local(name, here)
        .identity("user", whoami())
        .identity("log_path", here.join(format!("{name}.log")).display())
        .start_cmd("echo started; exec sleep 1000")
        .control("start_mode", "foreground")
        .monitor("auto_type", 1)
        .monitor("start_check_secs", 0)
        .monitor("stop_check_secs", 5)
        .spec(
            "env",
            &format!("{{TOKEN: {{value: {secret}, secret: true}}, PASS: {{file: {}}}}}", file.display()),
        )
}

fn environment(pid: u32) -> String {
    String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default()).into_owned()
}

fn git(here: &Path, args: &[&str]) {
    let identity = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"];
    let output = Command::new("git").args(identity).args(args).current_dir(here).output().expect("git runs");
    assert!(output.status.success(), "{args:?}: {}", stderr(&output));
}

#[test]
fn no_secret_is_in_any_output_log_file_or_answer() {
    if !needs("git") {
        return;
    }
    let mut run = Run::new();
    // The join token is a secret that the gateway makes: its output is the one place that shows it.
    let output =
        command(&["token", "create", "--host", HOST, "--ttl", "1h", "--target", "there"], run.folder.path());
    let token = stdout(&{ output }.output().expect("it runs")).trim().to_owned();
    std::fs::write(run.path("join"), &token).expect("a file");
    run.canaries.0.push(("join-token", token.rsplit('.').next().expect("a secret").to_owned()));
    let mut agent = run.start_agent("agent.log");
    until("the agent joined", || run.has_agent());
    apply_and_read(&mut run);
    let watch = follow_git(&mut run);
    call_everything(&mut run);
    until("a fetch was observed", || run.check_processes());
    run.check_files("while all run");
    // After crashes and clean ends, when write-ahead logs are merged and free pages exist.
    agent.0.kill().expect("it is killed");
    agent.0.wait().expect("it ends");
    let mut agent = run.start_agent("agent-2.log");
    until("the next agent joined", || run.has_agent());
    let pid = run.pid("api").expect("it runs");
    assert!(environment(pid).contains(run.canaries.get("next-env")), "the process has its secret");
    assert!(environment(pid).contains(run.canaries.get("env-file")), "and the one of a file");
    for verb in ["restart", "stop", "start"] {
        let (code, out, err) = run.verb(&[verb, "web/api"]);
        assert_eq!(code, 0, "{verb}: {out}{err}");
    }
    kill(agent.0.id(), "TERM");
    agent.0.wait().expect("it ends");
    drop(watch);
    let gateway = run.gateway.take().expect("a gateway");
    kill(gateway.child.id(), "TERM");
    until("the gateway ended", || {
        std::fs::metadata(run.path("data/store.db-wal")).map_or(0, |meta| meta.len()) == 0
    });
    drop(gateway);
    run.check_files("after the end");
    assert!(run.leaks.is_empty(), "secrets were found:\n{}", run.leaks.join("\n"));
}

/// Applies a manifest and a change of its secret, and runs every verb that reads.
fn apply_and_read(run: &mut Run) {
    run.write("env");
    let owner = ["--owner", "cli"];
    for args in [
        &["plan", "m"][..],
        &["plan", "m", "-o", "json"],
        &["diff", "m"],
        &["plan", "m", "--out", "plan.json"],
    ] {
        run.verb(&[args, &owner].concat());
    }
    let (code, out, err) = run.verb(&["apply", "m", "--yes", "--owner", "cli"]);
    assert_eq!(code, 0, "{out}{err}");
    run.write("next-env");
    for args in [
        &["plan", "m"][..],
        &["plan", "m", "-o", "json"],
        &["plan", "m", "-o", "markdown"],
        &["diff", "m"],
        &["diff", "m", "-o", "json"],
    ] {
        let (_, text, _) = run.verb(&[args, &owner].concat());
        assert!(text.contains("TOKEN"), "{args:?} shows the change: {text}");
    }
    let (code, out, err) =
        run.verb(&["apply", "m", "--yes", "--max-restart", "1", "-o", "json", "--owner", "cli"]);
    assert_eq!(code, 0, "{out}{err}");
    let first = ["validate", "explain", "schema"];
    for verb in first {
        let args: &[&str] = match verb {
            "validate" => &["-vv", "validate", "m"],
            "explain" => &["-vv", "explain", "web/api", "m"],
            _ => &["-vv", "schema"],
        };
        let output = command(args, run.folder.path()).stdin(Stdio::null()).output().expect("it runs");
        run.check(&args.join(" "), &[output.stdout, output.stderr].concat());
    }
    let (code, out, err) = run.verb_at("person", &["get", "processes"]);
    assert!(code == 0 && out.contains("api"), "{out}{err}");
    for target in ["there", "reader", "person"] {
        for args in [
            &["get", "processes", "-o", "json"][..],
            &["get", "processes"],
            &["get", "tasks", "-o", "json"],
            &["get", "hosts", "-o", "json"],
            &["get", "holds"],
            &["get", "orphans", "m"],
            &["describe", "web/api"],
            &["describe", "web/api", "-o", "json"],
            &["status"],
            &["status", "-o", "json"],
            &["history", "--owner", "cli"],
            &["history", "--owner", "cli", "-o", "json"],
            &["logs", "web/api"],
            &["doctor"],
            &["export"],
            &["lease", "list", "-o", "json"],
            &["token", "list", "-o", "json"],
        ] {
            run.verb_at(target, args);
        }
    }
}

/// A controller that follows a repository with credentials in its URL.
fn follow_git(run: &mut Run) -> KillOnDrop {
    let work = run.path("repository/work");
    std::fs::create_dir_all(&work).expect("a folder");
    let secret = run.canaries.get("git-env").to_owned();
    std::fs::write(work.join("b.yaml"), manifest(run.folder.path(), "b", &secret).to_string())
        .expect("a file");
    let origin = run.path("repository/fleet.git").display().to_string();
    git(&work, &["init", "--quiet", "--initial-branch=main"]);
    git(&work, &["add", "--all"]);
    git(&work, &["commit", "--quiet", "-m", "first"]);
    git(&work, &["clone", "--quiet", "--bare", ".", &origin]);
    let credentials = format!("ci:{}", run.canaries.get("git"));
    let address = git_server(&run.path("repository"), &credentials);
    let args = "-vv watch --interval 1s --listen 127.0.0.1:0 --owner git --target there --users users.yaml";
    let args: Vec<&str> = args.split(' ').collect();
    let mut watch = command(&args, run.folder.path());
    watch
        .env("ABIDE_GIT", format!("http://{credentials}@{address}/fleet.git"))
        .env("HOME", run.path("."))
        .env("GIT_CONFIG_NOSYSTEM", "1");
    let watch = start_logged(&mut watch, &run.path("watch.log"));
    until("the controller started the process", || run.pid("b").is_some());
    let pid = run.pid("b").expect("it runs");
    assert!(environment(pid).contains(&secret), "the process has its secret");
    watch
}

/// Every answer of the controller and of the gateway.
fn call_everything(run: &mut Run) {
    let log = std::fs::read_to_string(run.path("watch.log")).expect("a log");
    let address: SocketAddr = log
        .lines()
        .find_map(|line| line.strip_prefix("ready http://"))
        .and_then(|address| address.trim().parse().ok())
        .expect("an address");
    for path in [
        "/",
        "/metrics",
        "/api/v1/status",
        "/api/v1/processes",
        "/api/v1/plan",
        "/api/v1/history",
        "/api/v1/events",
        "/api/v1/session",
    ] {
        let bearer = format!("Authorization: Bearer {}\r\n", run.canaries.get("person"));
        let answer = call_controller(run, address, "GET", path, &bearer, "");
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
    }
    log_in(run, address);
    let host = r#"[{"ip": "127.0.0.1", "bk_cloud_id": 0}]"#;
    let meta = r#""meta": {"namespace": "web", "name": "api"}"#;
    for (app, secret) in [("all", "app"), ("reader", "reader"), ("ann", "person")] {
        for path in [
            "processes",
            "processes/digests",
            "processes/figures",
            "processes/watch?after=0",
            "hosts",
            "tasks",
            "access",
            "tokens",
        ] {
            run.call(app, secret, "GET", &format!("/api/abide/v1/{path}"), "");
        }
        let log = "/api/abide/v1/logs?namespace=web&name=api";
        run.call(app, secret, "GET", log, "");
        for call in ["get_proc_status", "get_proc_info", "get_proc_operate_result", "sync_proc_status"] {
            let body = format!("{{{meta}, \"hosts\": {host}, \"task_id\": \"1\"}}");
            run.call(app, secret, "POST", &format!("/api/c/compapi/v2/gse/{call}/"), &body);
        }
    }
    // Right secrets of other callers.
    run.call("reader", "app", "GET", "/api/abide/v1/processes", "");
    run.call("ann", "app", "GET", "/api/abide/v1/processes", "");
}

/// Calls the controller, and checks head and body of the answer.
fn call_controller(
    run: &mut Run,
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
    body: &str,
) -> Answer {
    let mut stream = TcpStream::connect(address).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(1))).expect("a timeout");
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
    )
    .expect("a request");
    let answer = read_start(&mut stream);
    run.check(
        &format!("{method} {path} of the controller"),
        format!("{}\n{}", answer.head, answer.body).as_bytes(),
    );
    answer
}

/// A person logs in with the form, first with a token that the form refuses.
fn log_in(run: &mut Run, address: SocketAddr) {
    for (token, status) in [("app", 401), ("person", 303)] {
        let form = call_controller(run, address, "GET", "/login", "Accept: text/html\r\n", "");
        let csrf = between(&form.body, "name=\"csrf\" value=\"", "\"").to_owned();
        let cookie = set_cookie(&form, &format!("abide_login_{}", address.port()));
        let body = format!("token={}&csrf={csrf}", run.canaries.get(token));
        let cookie = format!("Cookie: {cookie}\r\n");
        let answer = call_controller(run, address, "POST", "/api/v1/login", &cookie, &body);
        assert_eq!(answer.status, status, "{}", answer.body);
        if status == 303 {
            let session = set_cookie(&answer, &format!("abide_session_{}", address.port()));
            let cookie = format!("Cookie: {session}\r\n");
            let page = call_controller(run, address, "GET", "/", &cookie, "");
            assert!(page.status == 200 && page.body.contains("ann"), "{}", page.body);
        }
    }
}
