//! Git sources against attackers: credentials stay out of argument lists and messages, every commit can be required to be
//! signed, a git that could run a stranger's code is refused, and recorded webhooks are not accepted again.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::apply::{KillOnDrop, Machine};
use crate::fixtures::machine::start_logged;
use crate::git::Repo;
use crate::http::{Answer, Request};
use crate::support::{needs, until};
use crate::system::processes;

/// A forge that wants credentials: what it was sent, and which command lines held a text meanwhile.
struct Forge {
    address: SocketAddr,
    authorizations: Arc<Mutex<Vec<String>>>,
    leaks: Arc<Mutex<Vec<String>>>,
}

impl Forge {
    fn new(secret: &'static str) -> Forge {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let (authorizations, leaks) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
        let (got, found) = (Arc::clone(&authorizations), Arc::clone(&leaks));
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                stream.set_read_timeout(Some(Duration::from_secs(5))).expect("a timeout");
                let Some(request) = Request::read(&mut stream) else { continue };
                // git and its children wait for us now.
                found.lock().expect("a lock").extend(command_lines(secret));
                let header = request.head.lines().find_map(|line| line.strip_prefix("Authorization: Basic "));
                let status = match header {
                    Some(header) => {
                        got.lock().expect("a lock").push(header.trim().to_owned());
                        "403 Forbidden"
                    }
                    None => "401 Unauthorized\r\nWWW-Authenticate: Basic realm=\"x\"",
                };
                let _ = write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            }
        });
        Forge { address, authorizations, leaks }
    }
}

/// The command lines of this machine that hold a text; not our own.
fn command_lines(secret: &str) -> Vec<String> {
    let line = |pid: u32| {
        let bytes = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).replace('\0', " ")
    };
    let others = processes().into_iter().filter(|pid| *pid != std::process::id());
    others.map(line).filter(|line| line.contains(secret)).collect()
}

fn watch(machine: &Machine, log: &str, url: &str) -> KillOnDrop {
    let mut command =
        machine.command(&["watch", "--interval", "1s", "--listen", "127.0.0.1:0", "--owner", "x"]);
    command.env("ABIDE_GIT", url).env("HOME", machine.path(".")).env("GIT_CONFIG_NOSYSTEM", "1");
    start_logged(&mut command, &machine.path(log))
}

#[test]
fn credentials_of_a_url_are_in_no_argument_list_and_in_no_message() {
    let machine = Machine::new();
    // Each with what the forge must get: any character may be in a password.
    for (nth, (userinfo, sent)) in [
        ("ann:p4ssw0rd", "YW5uOnA0c3N3MHJk"),
        // p4ss/w@r%d ä
        ("ann:p4ss%2Fw@r%d%20%C3%A4", "YW5uOnA0c3Mvd0ByJWQgw6Q="),
        ("p4ssw0rd", "cDRzc3cwcmQ6"),
    ]
    .into_iter()
    .enumerate()
    {
        let forge = Forge::new("p4ss");
        let log = format!("log{nth}");
        let _watch = watch(&machine, &log, &format!("http://{userinfo}@{}/fleet.git", forge.address));
        let said = || std::fs::read_to_string(machine.path(&log)).unwrap_or_default();
        until("the fetch failed", || said().contains("cannot fetch"));
        assert_eq!(forge.authorizations.lock().expect("a lock").first().map(String::as_str), Some(sent));
        assert_eq!(*forge.leaks.lock().expect("a lock"), Vec::<String>::new());
        assert!(said().contains(&format!("http://***@{}/fleet.git", forge.address)), "{}", said());
        assert!(!said().contains("p4ss") && !said().contains("w@r"), "{}", said());
    }
    for (url, says) in [
        ("https://ann:p4ss/w0rd@h/x", "credentials"),
        ("https://h/x?access_token=p4ss", "credential as a parameter"),
        ("https://h/x?a=b&private_token=p4ss", "credential as a parameter"),
    ] {
        let mut ends = watch(&machine, "refused", url);
        let code = ends.0.wait().expect("it ends").code();
        let said = std::fs::read_to_string(machine.path("refused")).expect("a log");
        assert!(code == Some(64) && said.contains(says) && !said.contains("p4ss"), "{code:?} {said}");
    }
}

#[test]
fn a_repository_on_loopback_is_fetched_through_no_proxy() {
    for (nth, host) in ["127.0.0.1", "localhost"].into_iter().enumerate() {
        let machine = Machine::new();
        let (forge, proxy) = (Forge::new("p4ssw0rd"), Forge::new("p4ssw0rd"));
        let through = format!("http://{}", proxy.address);
        let url = format!("http://ann:p4ssw0rd@{host}:{}/fleet.git", forge.address.port());
        let mut command = machine.command(&["watch", "--listen", "127.0.0.1:0", "--owner", "x"]);
        command.env("ABIDE_GIT", url).env("HOME", machine.path(".")).env("GIT_CONFIG_NOSYSTEM", "1");
        // From the environment, and from the user's configuration.
        match nth {
            0 => command.env("http_proxy", &through).env("all_proxy", &through).env_remove("no_proxy"),
            _ => {
                let text = format!("[http]\n\tproxy = {through}\n");
                std::fs::write(machine.path(".gitconfig"), text).expect("a file");
                &mut command
            }
        };
        let _watch =
            KillOnDrop(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("it starts"));
        let sent = |forge: &Forge| forge.authorizations.lock().expect("a lock").len();
        until("the credentials were sent", || sent(&forge) + sent(&proxy) > 0);
        assert_eq!(sent(&proxy), 0, "the proxy got the credentials for {host}");
    }
}

/// A helper that the user configured is asked as before, with the name of the URL.
#[test]
fn a_name_alone_is_what_the_users_helper_is_asked_for() {
    let machine = Machine::new();
    let helper = machine.path("helper");
    let script =
        "#!/bin/sh\n[ \"$1\" = get ] || exit 0\ngrep -q '^username=ann$' && echo password=fromhelper\n";
    std::fs::write(&helper, script).expect("a file");
    std::fs::set_permissions(&helper, PermissionsExt::from_mode(0o755)).expect("a mode");
    std::fs::write(machine.path(".gitconfig"), format!("[credential]\n\thelper = {}\n", helper.display()))
        .expect("a file");
    let forge = Forge::new("fromhelper");
    let _watch = watch(&machine, "log", &format!("http://ann@{}/fleet.git", forge.address));
    until("it was asked", || !forge.authorizations.lock().expect("a lock").is_empty());
    // ann:fromhelper
    assert_eq!(forge.authorizations.lock().expect("a lock")[0], "YW5uOmZyb21oZWxwZXI=");
}

#[test]
fn every_commit_since_the_last_one_can_be_required_to_be_signed() {
    if !needs("ssh-keygen") {
        return;
    }
    let repo = Repo::new();
    let machine = &repo.machine;
    let key = machine.path("ann");
    let made = Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-C", "ann", "-f"])
        .arg(&key)
        .stdin(Stdio::null())
        .status()
        .expect("ssh-keygen runs");
    assert!(made.success());
    let public = std::fs::read_to_string(machine.path("ann.pub")).expect("a key");
    std::fs::write(machine.path("signers"), format!("ann@example.org {public}")).expect("a file");
    let key = format!("user.signingKey={}", key.display());
    let sign = ["-c", "gpg.format=ssh", "-c", key.as_str(), "-c", "commit.gpgSign=true"];
    let commit = |message: &str, signed: bool| {
        repo.git(&["add", "--all"]);
        let mut args = if signed { sign.to_vec() } else { Vec::new() };
        args.extend(["commit", "--quiet", "--allow-empty", "-m", message]);
        repo.git(&args);
        repo.git(&["rev-parse", "HEAD"])
    };
    // What was there before the first one that is taken is not judged.
    commit("before", false);
    machine.process("a", "1", "");
    commit("first", true);
    repo.push(&[]);
    let flags = ["--verify-signatures", "signers"];
    let mut all = repo.watch("all", &[flags[0], flags[1], "--signatures", "all"]);
    until("the first is taken", || repo.runs(&["a"]));
    // An attacker smuggles a commit in, on a branch that is merged, below a tip that ann signs.
    repo.git(&["checkout", "--quiet", "-b", "side"]);
    machine.process("b", "1", "");
    let smuggled = commit("smuggled", false);
    repo.git(&["checkout", "--quiet", "-"]);
    let merge = [&sign[..], &["merge", "--quiet", "--no-ff", "-S", "-m", "merge", "side"]].concat();
    repo.git(&merge);
    let tip = repo.push(&[]);
    repo.wait_for_log(
        "all",
        &format!("commit {tip} is refused: its history contains commit {smuggled}: not signed"),
    );
    assert!(!machine.effects().contains(&"start b 1".to_owned()));
    all.0.kill().expect("it is killed");
    all.0.wait().expect("it ends");
    // The tip alone is good.
    let _tip = repo.watch("tip", &[flags[0], flags[1], "--signatures", "tip"]);
    until("the merge is taken", || repo.runs(&["a", "b"]));
    let (code, _, err) = machine.run(&["watch", "--git", "/x", "--signatures", "all"]);
    assert!(code == 64 && err.contains("--verify-signatures"), "{code} {err}");
}

/// A server that declares the tip shallow has no unsigned ancestors to show.
#[test]
fn a_shallow_history_hides_no_commit() {
    if !needs("ssh-keygen") {
        return;
    }
    let repo = Repo::new();
    let machine = &repo.machine;
    let key = machine.path("ann");
    let mut keygen = Command::new("ssh-keygen");
    keygen.args(["-q", "-t", "ed25519", "-N", "", "-C", "ann", "-f"]).arg(&key).stdin(Stdio::null());
    assert!(keygen.status().expect("ssh-keygen runs").success());
    let public = std::fs::read_to_string(machine.path("ann.pub")).expect("a key");
    std::fs::write(machine.path("signers"), format!("ann@example.org {public}")).expect("a file");
    let key = format!("user.signingKey={}", key.display());
    let sign = ["-c", "gpg.format=ssh", "-c", key.as_str(), "-c", "commit.gpgSign=true"];
    machine.process("a", "1", "");
    let first = repo.commit_with("first", &sign);
    let flags = ["--verify-signatures", "signers", "--signatures", "all"];
    let _watch = repo.watch("all", &flags);
    until("the first is taken", || repo.runs(&["a"]));
    machine.process("b", "1", "");
    repo.commit("smuggled");
    repo.commit_with("tip", &sign);
    // The tip is grafted: both the commit taken last and the smuggled one are its ancestors, and neither is shown.
    let merge = ["commit-tree", "-S", "-m", "graft", "-p", &first, "-p", "HEAD", "HEAD^{tree}"];
    let graft = repo.git(&[&sign[..], &merge].concat());
    repo.git(&["reset", "--quiet", "--hard", &graft]);
    repo.push(&[]);
    let smuggled = repo.git(&["rev-parse", "HEAD^2"]);
    std::fs::write(machine.path("origin.git/shallow"), format!("{smuggled}\n")).expect("a file");
    repo.wait_for_log(
        "all",
        "the server declares a shallow history, and --signatures all needs every commit",
    );
    assert!(!machine.effects().contains(&"start b 1".to_owned()), "{}", repo.read_log("all"));
}

#[test]
fn a_git_that_could_fetch_while_it_reads_is_refused() {
    let repo = Repo::new();
    let machine = &repo.machine;
    machine.process("a", "1", "");
    repo.commit("first");
    std::fs::create_dir(machine.path("bin")).expect("a folder");
    let script = "#!/bin/sh\n[ \"$1\" != --version ] || { echo git version 2.34.1; exit; }\nunset GIT_NO_LAZY_FETCH\nexec /usr/bin/git \"$@\"\n";
    std::fs::write(machine.path("bin/git"), script).expect("a file");
    std::fs::set_permissions(machine.path("bin/git"), PermissionsExt::from_mode(0o755)).expect("a mode");
    let path = format!("{}:{}", machine.path("bin").display(), std::env::var("PATH").unwrap_or_default());
    let url = machine.path("origin.git").display().to_string();
    let mut command = machine.command(&["watch", "--git", &url, "--listen", "127.0.0.1:0"]);
    let out = std::fs::File::create(machine.path("log")).expect("a file");
    let both = out.try_clone().expect("a file");
    command.env("PATH", path).stdin(Stdio::null()).stdout(out).stderr(both);
    let mut watch = KillOnDrop(command.spawn().expect("it starts"));
    let mut code = None;
    until("it ends", || {
        code = watch.0.try_wait().expect("it can be asked").and_then(|status| status.code());
        code.is_some() || repo.read_log("log").contains("ready ")
    });
    let said = repo.read_log("log");
    assert!(
        code == Some(1) && said.contains("git 2.34.1 does not know GIT_NO_LAZY_FETCH"),
        "{code:?} {said}"
    );
}

#[test]
fn a_repeated_webhook_is_acknowledged_and_has_no_effect() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    std::fs::write(machine.path("secret"), "s3cret\n").expect("a file");
    let out = std::fs::File::create(machine.path("log")).expect("a file");
    let args = ["watch", "m", "--listen", "127.0.0.1:0", "--webhook-secret-file", "secret"];
    let mut command = machine.command(&args);
    let _watch = KillOnDrop(
        command.stdin(Stdio::null()).stdout(out).stderr(Stdio::null()).spawn().expect("it starts"),
    );
    let said = || std::fs::read_to_string(machine.path("log")).unwrap_or_default();
    until("it is ready", || said().contains("ready http://"));
    let at: SocketAddr = said().trim().trim_start_matches("ready http://").parse().expect("an address");
    let now = std::time::UNIX_EPOCH.elapsed().expect("a clock").as_secs();
    let hook = |id: &str, time: u64, signed_time: u64| {
        let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, b"s3cret");
        let tag = ring::hmac::sign(&key, format!("{id}.{signed_time}.{{}}").as_bytes());
        let tag = base64(tag.as_ref());
        let mut stream = std::net::TcpStream::connect(at).expect("a connection");
        write!(stream, "POST /api/v1/webhook HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 2\r\nwebhook-id: {id}\r\nwebhook-timestamp: {time}\r\nwebhook-signature: v1,{tag}\r\n\r\n{{}}").expect("a request");
        Answer::read(&mut stream)
    };
    let first = hook("one", now, now);
    assert_eq!((first.status, first.json()), (202, serde_json::json!({"accepted": true})));
    let retry = hook("one", now, now);
    assert_eq!((retry.status, retry.json()), (202, serde_json::json!({"repeated": true})));
    let hook = |id: &str, time: u64, signed_time: u64| hook(id, time, signed_time).status;
    assert_eq!(hook("two", now, now - 1), 401, "the time is signed");
    assert_eq!(hook("three", now - 400, now - 400), 401, "too old");
    assert_eq!(hook("four", now + 400, now + 400), 401, "of the future");
    assert_eq!(hook("five", now - 100, now - 100), 202);
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let bits =
            three.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        text.extend((0..=three.len()).map(|nth| LETTERS[(bits >> (18 - 6 * nth) & 63) as usize] as char));
    }
    text
}
