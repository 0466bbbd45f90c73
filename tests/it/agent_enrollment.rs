//! Joining a fleet: join tokens, certificates of agents, renewal and revocation, with a real gateway over TLS.

use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde_json::Value;

use crate::fixtures::certificates::Authority;
use crate::fixtures::machine::{KillOnDrop, start_logged};
use crate::fixtures::manifest::Manifest;
use crate::fixtures::workspace::Workspace;
use crate::serve::{Gateway, log_of};
use crate::support::{abide, command, stderr, stdout, until};
use crate::system::whoami;

const HOST: &str = "0:10.0.0.1";
const TLS: [&str; 6] = ["--tls-cert", "cert.pem", "--tls-key", "key.pem", "--ca-dir", "ca"];
const APPS: &str = "apps:
  - {code: all, secret: s3cret}
  - {code: scoped, secret: s3cret, namespaces: [web], hosts: ['0:10.0.0.1'], owners: [team]}
";

/// A gateway with TLS and a CA for agents.
struct Fleet {
    folder: Workspace,
    gateway: Gateway,
}

impl Fleet {
    fn start(more: &[&str]) -> Fleet {
        Fleet::start_in(Workspace::new(), &[&TLS, more].concat())
    }

    fn start_in(folder: Workspace, args: &[&str]) -> Fleet {
        write_server_files(folder.path());
        std::fs::write(folder.path().join("apps.yaml"), APPS).expect("a file");
        let gateway = Gateway::start(folder.path(), args);
        let target = |name: &str, app: &str| {
            format!(
                "  {name}: {{url: '{}', dialect: abide, ca_file: server-ca.pem, ca_only: true, auth: {{app_code: {app}, app_secret: {{file: secret}}}}}}\n",
                gateway.url
            )
        };
        let config = format!("targets:\n{}{}", target("there", "all"), target("scoped", "scoped"));
        std::fs::write(folder.path().join("abide.yaml"), config).expect("a file");
        std::fs::write(folder.path().join("secret"), "s3cret\n").expect("a file");
        Fleet { folder, gateway }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn run(&self, args: &[&str]) -> (i32, String, String) {
        self.run_at("there", args)
    }

    fn run_at(&self, target: &str, args: &[&str]) -> (i32, String, String) {
        let output = abide(&[args, &["--target", target]].concat(), self.folder.path(), b"");
        (output.status.code().unwrap_or(-1), stdout(&output), stderr(&output))
    }

    /// A join token, and the file that holds it.
    fn token(&self, file: &str, hosts: &[&str], ttl: &str) -> String {
        let hosts = hosts.join(",");
        let (code, token, told) = self.run(&["token", "create", "--host", &hosts, "--ttl", ttl]);
        assert!(code == 0 && token.starts_with("abide-join."), "{code} {token} {told}");
        std::fs::write(self.path(file), &token).expect("a file");
        token.trim().to_owned()
    }

    /// An agent with this data folder; its log is next to it.
    fn agent(&self, data: &str, token_file: &str, host: &str, env: &[(&str, &str)]) -> KillOnDrop {
        self.agent_with(data, &["--token-file", token_file], host, env)
    }

    fn agent_with(&self, data: &str, credential: &[&str], host: &str, env: &[(&str, &str)]) -> KillOnDrop {
        let args = ["agent", "--join", &self.gateway.url, "--data", data];
        let more = ["--as-host", host, "--ca-file", "server-ca.pem", "--ca-only"];
        let mut command = command(&[&args[..], credential, &more].concat(), self.folder.path());
        command.envs(env.iter().copied());
        start_logged(&mut command, &self.path(&format!("{data}.log")))
    }

    fn agent_log(&self, data: &str) -> String {
        std::fs::read_to_string(self.path(&format!("{data}.log"))).unwrap_or_default()
    }

    fn host(&self, host: &str) -> Value {
        let (code, text, told) = self.run(&["get", "hosts", "-o", "json"]);
        assert_eq!(code, 0, "{told}");
        let rows: Value = serde_json::from_str(&text).expect("JSON");
        rows.as_array().expect("rows").iter().find(|row| row["host"] == host).cloned().unwrap_or_default()
    }

    fn wait_connected(&self, host: &str) -> Value {
        until(&format!("{host} has an agent"), || self.host(host)["agent"] == true);
        self.host(host)
    }

    fn token_states(&self) -> Vec<String> {
        let (_, text, _) = self.run(&["token", "list", "-o", "json"]);
        let rows: Value = serde_json::from_str(&text).expect("JSON");
        rows.as_array()
            .expect("rows")
            .iter()
            .map(|row| row["state"].as_str().unwrap_or("").to_owned())
            .collect()
    }

    fn doctor(&self) -> String {
        let (_, out, err) = self.run(&["doctor"]);
        format!("{out}{err}")
    }

    /// Writes a file that no other user can read.
    fn write_private(&self, name: &str, text: &str) {
        let path = self.path(name);
        let mut file = std::fs::File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(path)
            .expect("a file");
        file.write_all(text.as_bytes()).expect("a file");
    }

    fn wait_refused(&self, data: &str, why: &str) {
        until(&format!("agent {data} is refused: {why}"), || self.agent_log(data).contains(why));
    }
}

pub fn write_server_files(folder: &Path) {
    let authority = Authority::new("server CA");
    let own = authority.sign("127.0.0.1");
    for (name, text) in
        [("cert.pem", &own.certificate), ("key.pem", &own.key), ("server-ca.pem", &authority.pem)]
    {
        std::fs::write(folder.join(name), text).expect("a file");
    }
}

#[test]
fn a_join_token_becomes_a_certificate_that_outlives_restarts() {
    let fleet = Fleet::start(&[]);
    let token = fleet.token("join", &[HOST], "1h");
    let agent = fleet.agent("one", "join", HOST, &[]);
    let row = fleet.wait_connected(HOST);
    assert!(row["certificate"]["expires"].is_string() && row["certificate"]["revoked"] == false, "{row}");
    assert_eq!(fleet.token_states(), ["used"]);
    let told = fleet.doctor();
    assert!(told.contains("each with an agent") && !told.contains("certificate"), "{told}");
    for file in ["one/agent.pem", "one/agent-key.pem", "ca/ca.key"] {
        let mode = std::fs::metadata(fleet.path(file)).expect(file).permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }
    // Without its token file, and with the same certificate.
    drop(agent);
    until("the session ended", || fleet.host(HOST)["agent"] == false);
    std::fs::remove_file(fleet.path("join")).expect("a file");
    let _agent = fleet.agent("one", "join", HOST, &[]);
    let again = fleet.wait_connected(HOST);
    assert_eq!(again["certificate"]["serial"], row["certificate"]["serial"]);
    // A static token no longer speaks for the host, and still does for another one.
    std::fs::write(fleet.path("static"), "token").expect("a file");
    let _other = fleet.agent("other", "static", HOST, &[]);
    fleet.wait_refused("other", "no static token is accepted");
    let _second = fleet.agent("second", "static", "0:10.0.0.2", &[]);
    assert!(fleet.wait_connected("0:10.0.0.2")["certificate"].is_null());
    let secret = token.rsplit('.').next().expect("a secret");
    for file in ["data/store.db", "data/store.db-wal", "log", "one.log", "one/agent.pem", "one/agent-key.pem"]
    {
        let bytes = std::fs::read(fleet.path(file)).unwrap_or_default();
        assert!(!bytes.windows(secret.len()).any(|part| part == secret.as_bytes()), "{file}");
    }
    assert!(log_of(fleet.folder.path()).contains("call=\"enroll\""), "{}", log_of(fleet.folder.path()));
}

#[test]
fn a_join_token_is_for_one_agent_its_hosts_and_its_time() {
    let fleet = Fleet::start(&[]);
    let token = fleet.token("join", &[HOST], "1h");
    let _first = fleet.agent("first", "join", HOST, &[]);
    fleet.wait_connected(HOST);
    let _replay = fleet.agent("replay", "join", HOST, &[]);
    fleet.wait_refused("replay", "the join token was used by agent");
    fleet.token("foreign", &["0:10.0.0.3"], "1h");
    let _foreign = fleet.agent("foreign-agent", "foreign", "0:10.0.0.4", &[]);
    fleet.wait_refused("foreign-agent", "the join token is not for host 0:10.0.0.4");
    fleet.token("short", &["0:10.0.0.5"], "1s");
    until("the token expires", || fleet.token_states().contains(&"expired".to_owned()));
    let _late = fleet.agent("late", "short", "0:10.0.0.5", &[]);
    fleet.wait_refused("late", "the join token expired");
    let last = if token.ends_with('0') { "1" } else { "0" };
    std::fs::write(fleet.path("wrong"), format!("{}{last}", &token[..token.len() - 1])).expect("a file");
    let _wrong = fleet.agent("wrong-agent", "wrong", HOST, &[]);
    fleet.wait_refused("wrong-agent", "this join token is not known");
    until("the guess is logged", || log_of(fleet.folder.path()).contains("wrong credentials"));
    fleet.token("gone", &["0:10.0.0.6"], "1h");
    let id = std::fs::read_to_string(fleet.path("gone"))
        .expect("a file")
        .split('.')
        .nth(1)
        .expect("an id")
        .to_owned();
    assert_eq!(fleet.run(&["token", "revoke", &id]).0, 0);
    let _revoked = fleet.agent("revoked", "gone", "0:10.0.0.6", &[]);
    fleet.wait_refused("revoked", "the join token is revoked");
    // The rightful agent is not disturbed.
    assert_eq!(fleet.host(HOST)["agent"], true);
}

#[test]
fn of_two_agents_with_one_token_one_joins() {
    let fleet = Fleet::start(&[]);
    fleet.token("join", &[HOST], "1h");
    let _agents = [fleet.agent("a", "join", HOST, &[]), fleet.agent("b", "join", HOST, &[])];
    fleet.wait_connected(HOST);
    let lost = |data: &str| fleet.agent_log(data).contains("the join token was used by agent");
    until("one of them is refused", || lost("a") || lost("b"));
    let has_certificate = |data: &str| fleet.path(data).join("agent.pem").exists();
    assert!(has_certificate("a") != has_certificate("b") && lost("a") != lost("b"));
}

#[test]
fn a_crash_between_exchange_and_store_is_repeated_with_the_same_key() {
    let fleet = Fleet::start(&[]);
    fleet.token("join", &[HOST], "1h");
    let mut agent = fleet.agent("one", "join", HOST, &[("ABIDE_DIE_AT", "join-exchange")]);
    until("the agent dies", || agent.0.try_wait().expect("a state").is_some());
    assert_eq!(fleet.token_states(), ["used"]);
    assert!(!fleet.path("one/agent.pem").exists() && fleet.path("one/agent-key.pem").exists());
    let _agent = fleet.agent("one", "join", HOST, &[]);
    fleet.wait_connected(HOST);
}

#[test]
fn a_certificate_is_renewed_before_it_expires() {
    let fleet = Fleet::start(&["--cert-life", "9s"]);
    fleet.token("join", &[HOST], "1h");
    let _agent = fleet.agent("one", "join", HOST, &[]);
    let serial = |row: &Value| row["certificate"]["serial"].as_str().unwrap_or_default().to_owned();
    let first = fleet.wait_connected(HOST);
    let mut seen = vec![serial(&first)];
    until("three certificates were issued", || {
        let row = fleet.host(HOST);
        if !seen.contains(&serial(&row)) {
            seen.push(serial(&row));
        }
        seen.len() >= 3
    });
    assert_eq!(fleet.wait_connected(HOST)["certificate"]["key"], first["certificate"]["key"]);
    assert!(!fleet.agent_log("one").contains("Expired"), "{}", fleet.agent_log("one"));
}

#[test]
fn a_certificate_of_one_host_does_not_speak_for_another() {
    let fleet = Fleet::start(&[]);
    fleet.token("join", &[HOST], "1h");
    let agent = fleet.agent("one", "join", HOST, &[]);
    fleet.wait_connected(HOST);
    std::fs::create_dir(fleet.path("thief")).expect("a folder");
    std::fs::set_permissions(fleet.path("thief"), std::fs::Permissions::from_mode(0o700)).expect("a mode");
    for file in ["agent.pem", "agent-key.pem"] {
        std::fs::copy(fleet.path("one").join(file), fleet.path("thief").join(file)).expect("a copy");
    }
    let thief = fleet.agent("thief", "join", "0:10.0.0.2", &[]);
    fleet.wait_refused("thief", "this certificate is not for host 0:10.0.0.2");
    drop((thief, agent));
    // Also for its host, the key is bound to the id of its agent.
    let _thief = fleet.agent("thief", "join", HOST, &[]);
    fleet.wait_refused("thief", "the certificate is for agent");
    let _agent = fleet.agent("one", "join", HOST, &[]);
    fleet.wait_connected(HOST);
}

#[test]
fn a_revoked_host_loses_its_session_and_joins_with_a_new_token_only() {
    let fleet = Fleet::start(&[]);
    fleet.token("join", &[HOST], "1h");
    let _agent = fleet.agent("one", "join", HOST, &[]);
    let before = fleet.wait_connected(HOST);
    let (code, told, _) = fleet.run(&["host", "revoke", HOST]);
    assert!(code == 0 && told.contains("the certificate of host 0:10.0.0.1 is revoked"), "{code} {told}");
    until("the session ends", || fleet.agent_log("one").contains("session with the gateway ended"));
    fleet.wait_refused("one", "401");
    let row = fleet.host(HOST);
    assert!(row["agent"] == false && row["certificate"]["revoked"] == true, "{row}");
    std::fs::write(fleet.path("static"), "token").expect("a file");
    let other = fleet.agent("other", "static", HOST, &[]);
    fleet.wait_refused("other", "no static token is accepted");
    drop(other);
    fleet.token("join", &[HOST], "1h");
    let after = fleet.wait_connected(HOST);
    assert_ne!(after["certificate"]["key"], before["certificate"]["key"], "a new token has a new key");
    // Forgotten: the certificate is refused, and static tokens are accepted.
    assert_eq!(fleet.run(&["host", "revoke", HOST, "--forget"]).0, 0);
    until("the session ends", || fleet.host(HOST)["agent"] == false);
    let _static = fleet.agent("other", "static", HOST, &[]);
    assert!(fleet.wait_connected(HOST)["certificate"].is_null());
    assert_eq!(fleet.run(&["host", "revoke", HOST]).0, 1, "there is nothing to revoke");
}

#[test]
fn an_agent_with_a_static_token_joins_without_a_restart_of_its_processes() {
    let fleet = Fleet::start(&[]);
    std::fs::write(fleet.path("token-file"), "token").expect("a file");
    std::fs::create_dir(fleet.path("m")).expect("a folder");
    std::fs::create_dir(fleet.path("run")).expect("a folder");
    let manifest = Manifest::local("p", fleet.folder.path())
        .identity("user", whoami())
        .control("start_mode", "foreground")
        .control("start_cmd", "sleep 1000")
        .monitor("auto_type", 1)
        .monitor("start_check_secs", 0);
    std::fs::write(fleet.path("m/p.yaml"), manifest.to_string()).expect("a file");
    let _agent = fleet.agent("one", "token-file", "0:127.0.0.1", &[]);
    fleet.wait_connected("0:127.0.0.1");
    let (code, told, wrong) = fleet.run(&["apply", "m", "--yes"]);
    assert_eq!(code, 0, "{told}{wrong}");
    let pid = || {
        let (_, text, _) = fleet.run(&["get", "processes", "-o", "json"]);
        serde_json::from_str::<Value>(&text).expect("JSON")[0]["pid"].clone()
    };
    let before = pid();
    assert!(before.is_u64(), "{before}");
    fleet.token("token-file", &["0:127.0.0.1"], "1h");
    drop(_agent);
    let _agent = fleet.agent("one", "token-file", "0:127.0.0.1", &[]);
    until("it has a certificate", || {
        let row = fleet.host("0:127.0.0.1");
        row["agent"] == true && row["certificate"].is_object()
    });
    assert_eq!(pid(), before);
}

#[test]
fn the_ca_needs_tls_private_files_and_its_own_folder() {
    let folder = Workspace::new();
    write_server_files(folder.path());
    drop(Gateway::start(folder.path(), &TLS));
    let serve = |more: &[&str]| {
        let args = ["serve", "--listen", "127.0.0.1:0", "--data", "data", "--apps", "apps.yaml"];
        let output = abide(&[&args[..], more].concat(), folder.path(), b"");
        (output.status.code().unwrap_or(-1), stderr(&output))
    };
    let mode = |mode: u32| {
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(folder.path().join("ca/ca.key"), permissions).expect("a mode");
    };
    for (bits, says) in [(0o644, "readable by every user"), (0o602, "writable by every user")] {
        mode(bits);
        let (code, told) = serve(&TLS);
        assert!(code == 1 && told.contains(says), "{bits:o}: {code} {told}");
    }
    mode(0o600);
    let (code, told) = serve(&["--ca-dir", "ca"]);
    assert!(code == 64 && told.contains("need TLS"), "{code} {told}");
    let (code, told) = serve(&[&TLS[..4], &["--ca-dir", "data/ca"]].concat());
    assert!(code == 64 && told.contains("must not be inside --data"), "{code} {told}");
    std::fs::remove_file(folder.path().join("ca/ca.key")).expect("a file");
    let (code, told) = serve(&TLS);
    assert!(code == 1 && told.contains("ca.key does not"), "{code} {told}");
}

#[test]
fn a_scoped_app_administers_no_certificates_and_sees_its_hosts() {
    const FORBIDDEN: i32 = 77;
    const OTHER: &str = "0:10.0.0.2";
    let fleet = Fleet::start(&[]);
    fleet.token("join", &[HOST], "1h");
    fleet.token("join-other", &[OTHER], "1h");
    let _agent = fleet.agent("one", "join", HOST, &[]);
    let other = fleet.agent("other", "join-other", OTHER, &[]);
    fleet.wait_connected(HOST);
    fleet.wait_connected(OTHER);
    drop(other);
    until("only the certificate of the other host is left", || fleet.host(OTHER)["version"].is_null());
    let (code, text, told) = fleet.run_at("scoped", &["get", "hosts", "-o", "json"]);
    let rows: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} {code} {told}"));
    assert_eq!(rows.as_array().map(Vec::len), Some(1), "{rows}");
    assert!(rows[0]["host"] == HOST && rows[0]["certificate"].is_object(), "{rows}");
    let verbs: [&[&str]; 4] = [
        &["token", "create", "--host", HOST],
        &["token", "list"],
        &["token", "revoke", "0a1b"],
        &["host", "revoke", HOST],
    ];
    for verb in verbs {
        let (code, _, told) = fleet.run_at("scoped", verb);
        assert!(
            code == FORBIDDEN && told.contains("app scoped lacks namespace * (all namespaces)"),
            "{verb:?}: {code} {told}"
        );
    }
    for (app, expected) in [("scoped", FORBIDDEN), ("all", 0)] {
        for verb in ["token", "host-revoke"] {
            let args = ["access", "check", app, verb, "*", "--apps", "apps.yaml"];
            let output = abide(&args, fleet.folder.path(), b"");
            assert_eq!(output.status.code(), Some(expected), "{app} {verb}: {}", stderr(&output));
        }
    }
    assert_eq!(fleet.token_states(), ["used", "used"]);
    assert_eq!(fleet.host(HOST)["agent"], true);
    assert_eq!(fleet.run(&["host", "revoke", HOST]).0, 0);
}

#[test]
fn doctor_warns_about_certificates_that_expire_are_expired_or_revoked() {
    let fleet = Fleet::start(&["--cert-life", "20s"]);
    fleet.token("join", &[HOST], "1h");
    let agent = fleet.agent("one", "join", HOST, &[]);
    fleet.wait_connected(HOST);
    let told = fleet.doctor();
    assert!(told.contains("1 certificate expiring soon: 0:10.0.0.1 ("), "{told}");
    drop(agent);
    until("the certificate expires", || fleet.doctor().contains("1 certificate expired: 0:10.0.0.1 ("));
    let told = fleet.doctor();
    assert!(!told.contains("expiring soon") && told.contains("abide token create"), "{told}");
    assert_eq!(fleet.run(&["host", "revoke", HOST]).0, 0);
    let told = fleet.doctor();
    assert!(told.contains("1 certificate revoked: 0:10.0.0.1 (") && !told.contains("expired"), "{told}");
}

#[test]
fn an_external_ca_signs_certificates_that_the_gateway_verifies() {
    let (external, stranger) = (Authority::new("external CA"), Authority::new("another CA"));
    let folder = Workspace::new();
    std::fs::write(folder.path().join("client-ca.pem"), &external.pem).expect("a file");
    let fleet = Fleet::start_in(folder, &[&TLS[..4], &["--client-ca", "client-ca.pem"]].concat());
    let earlier = SystemTime::now() - Duration::from_secs(60);
    fleet.write_private("agent.pem", &external.sign_agent(HOST, earlier));
    fleet.write_private("stranger.pem", &stranger.sign_agent(HOST, earlier));
    let credential = ["--client-cert", "agent.pem"];
    let _stranger = fleet.agent_with("stranger", &["--client-cert", "stranger.pem"], HOST, &[]);
    fleet.wait_refused("stranger", "the server rejected our client certificate (TLS alert UnknownCA)");
    let _elsewhere = fleet.agent_with("elsewhere", &credential, "0:10.0.0.2", &[]);
    fleet.wait_refused("elsewhere", "this certificate is not for host 0:10.0.0.2");
    let _agent = fleet.agent_with("one", &credential, HOST, &[]);
    let before = fleet.wait_connected(HOST);
    assert!(before["certificate"]["serial"].is_string() && before["certificate"]["revoked"] == false);
    assert!(fleet.host("0:10.0.0.2").is_null());
    std::fs::write(fleet.path("static"), "token").expect("a file");
    let _static = fleet.agent("static-agent", "static", HOST, &[]);
    fleet.wait_refused("static-agent", "no static token is accepted");
    let (code, _, told) = fleet.run(&["token", "create", "--host", HOST]);
    assert!(code != 0 && told.contains("an external CA signs them (--client-ca)"), "{code} {told}");
    // A revocation ends the session. The same agent joins with a later certificate, which it reads by itself.
    assert_eq!(fleet.run(&["host", "revoke", HOST]).0, 0);
    let revoked = SystemTime::now();
    until("the session ends", || fleet.agent_log("one").contains("session with the gateway ended"));
    fleet.wait_refused("one", "401");
    assert_eq!(fleet.host(HOST)["certificate"]["revoked"], true);
    fleet.write_private("agent.pem", &external.sign_agent(HOST, revoked + Duration::from_secs(1)));
    let after = fleet.wait_connected(HOST);
    assert_eq!(after["certificate"]["revoked"], false, "{after}");
    assert_ne!(after["certificate"]["serial"], before["certificate"]["serial"]);
}
