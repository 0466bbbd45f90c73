//! Listener of a controller with people: trusted proxies, TLS, the listener's own token, and flags that are refused.

use std::process::Stdio;

use serde_json::{Value, json};

use crate::apply::Machine;
use crate::controller_api::{address, get, send, token};
use crate::fixtures::certificates::{Authority, Pair};
use crate::fixtures::people::{
    ANN, BOB, HTML, ROOT, Site, bearer, between, set_cookie, users, write_private,
};
use crate::support::{abide, needs, stderr, stdout, until};
use crate::watch::{read_log, watch};

#[test]
fn the_user_header_counts_only_from_a_trusted_proxy() {
    const PROXY: [u8; 4] = [127, 9, 9, 9];
    let proxy = ["--trusted-proxy", "127.9.9.9/32", "--user-header", "X-Forwarded-User"];
    let site = Site::new(&proxy);
    let ann = "X-Forwarded-User: ann\r\n";
    for peer in [[127, 0, 0, 1], [127, 9, 9, 8], [127, 9, 9, 10]] {
        assert_eq!(site.send_from(peer, "GET", "/api/v1/session", ann).status, 401, "{peer:?}");
    }
    let says = "user header ignored: the peer is not a trusted proxy";
    until("it is logged", || read_log(&site.machine, "watch.log").contains(says));
    let session = site.send_from(PROXY, "GET", "/api/v1/session", ann);
    assert_eq!((session.status, &session.json()["person"]), (200, &json!("ann")), "{}", session.body);
    assert_eq!(session.json()["csrf"], Value::Null, "a program has no session");
    for (name, says) in
        [("eve", "person eve is not in the users file"), ("Ann", "person Ann is not"), ("late", "expired at")]
    {
        let answer = site.send_from(PROXY, "GET", "/api/v1/status", &format!("X-Forwarded-User: {name}\r\n"));
        assert!(answer.status == 403 && answer.body.contains(says), "{name}: {}", answer.body);
    }
    let two = format!("{ann}X-Forwarded-User: root\r\n");
    assert_eq!(site.send_from(PROXY, "GET", "/api/v1/session", &two).status, 400);
    // Without a header the proxy is a peer like others.
    assert_eq!(site.send_from(PROXY, "GET", "/api/v1/session", "").status, 401);
    // The login at the proxy is sent with requests of other sites' pages, too.
    let answer = site.send_from(PROXY, "POST", "/api/v1/look", ann);
    assert!(answer.status == 403 && answer.body.contains("CSRF"), "{}", answer.body);
    let https = format!("{ann}{HTML}X-Forwarded-Proto: https\r\n");
    let page = site.send_from(PROXY, "GET", "/", &https);
    let name = format!("__host-{}", site.cookie_name());
    let line = page.head.lines().find(|line| line.contains(&name)).unwrap_or_else(|| panic!("{}", page.head));
    assert!(line.ends_with("; httponly; samesite=strict; secure"), "{line}");
    let cookie = set_cookie(&page, &name).replace("__host-", "__Host-");
    let csrf = between(&page.body, "name=\"csrf\" value=\"", "\"");
    let change = format!("Cookie: {cookie}\r\nX-Abide-Csrf: {csrf}\r\nX-Forwarded-Proto: https\r\n");
    let by = |name: &str| format!("{change}X-Forwarded-User: {name}\r\n");
    assert_eq!(site.send_from(PROXY, "POST", "/api/v1/look", &by("ann")).status, 202);
    assert_eq!(
        site.send_from(PROXY, "POST", "/api/v1/look", &change).status,
        401,
        "the session needs the proxy's header"
    );
    assert_eq!(site.send_from([127, 0, 0, 1], "POST", "/api/v1/look", &by("ann")).status, 401);
    // Another person at the same browser does not use the session, and ends it.
    assert_eq!(site.send_from(PROXY, "POST", "/api/v1/look", &by("sso")).status, 403);
    assert_eq!(site.send_from(PROXY, "POST", "/api/v1/look", &by("ann")).status, 403);
    // A person without a token has only the proxy; tokens work directly.
    assert_eq!(site.send_from(PROXY, "GET", "/api/v1/session", "X-Forwarded-User: sso\r\n").status, 200);
    assert_eq!(site.status("/api/v1/session", &bearer(ANN)), 200);
    // The person of the header counts, not the credentials next to it.
    let both = format!("X-Forwarded-User: bob\r\n{}", bearer(ROOT));
    assert_eq!(site.send_from(PROXY, "GET", "/api/v1/session", &both).json()["person"], "bob");
}

/// A connection with TLS, verified against an authority.
fn curl(site: &Site, ca: &str, path: &str) -> (bool, String) {
    let url = format!("https://localhost:{}{path}", site.at.port());
    let mut command = std::process::Command::new("curl");
    command.args(["-s", "-S", "-i", "-m", "20", "--cacert", ca, "-H", HTML.trim(), &url]);
    let output =
        command.current_dir(site.machine.folder.path()).stdin(Stdio::null()).output().expect("curl runs");
    (output.status.success(), stdout(&output) + &stderr(&output))
}

#[test]
fn tls_of_the_listener_is_reloaded_and_a_bad_pair_keeps_the_old_one() {
    if !needs("curl") {
        return;
    }
    let machine = Machine::new();
    machine.process("a", "1", "");
    write_private(&machine.path("users.yaml"), &users());
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let write = |name: &str, text: &str| write_private(&machine.path(name), text);
    let install = |Pair { certificate, key }: Pair| {
        write("key.pem", &key);
        write("cert.pem", &certificate);
    };
    write("old-ca.pem", &old.pem);
    write("new-ca.pem", &new.pem);
    install(old.sign("localhost"));
    let args = [
        "watch",
        "m",
        "--listen",
        "127.0.0.1:0",
        "--users",
        "users.yaml",
        "--tls-cert",
        "cert.pem",
        "--tls-key",
    ];
    let child = machine.start(&[&args[..], &["key.pem"]].concat(), "watch.log");
    until("watch is ready", || read_log(&machine, "watch.log").contains("ready https://"));
    let text = read_log(&machine, "watch.log");
    let at = text.lines().find_map(|line| line.strip_prefix("ready https://")).expect("an address");
    let at = at.trim().parse().expect("an address");
    let site = Site { machine, at, _watch: child };
    let (ok, text) = curl(&site, "old-ca.pem", "/login");
    assert!(ok && text.contains("HTTP/1.1 200"), "{text}");
    let name = format!("set-cookie: __Host-abide_login_{}=", site.at.port());
    let line = text.lines().find(|line| line.starts_with(&name)).unwrap_or_else(|| panic!("{text}"));
    assert!(line.trim_end().ends_with("; HttpOnly; SameSite=Strict; Secure"), "{line}");
    assert!(!curl(&site, "new-ca.pem", "/healthz").0, "another authority is not trusted");
    assert_eq!(get(site.at, "/healthz").status, 0, "no plain http");
    // A certificate without its key is logged, and the old pair stays.
    let write = |name: &str, text: &str| write_private(&site.machine.path(name), text);
    let next = new.sign("localhost");
    write("cert.pem", &next.certificate);
    until("the error is logged", || read_log(&site.machine, "watch.log").contains("reload failed"));
    assert!(curl(&site, "old-ca.pem", "/healthz").0);
    write("key.pem", &next.key);
    until("the new pair is used", || curl(&site, "new-ca.pem", "/healthz").0);
    assert!(!curl(&site, "old-ca.pem", "/healthz").0);
}

#[test]
fn a_controller_without_people_is_unchanged() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let _watch = watch(&machine, "watch.log", &[]);
    let at = address(&machine, "watch.log");
    assert_eq!(get(at, "/api/v1/status").status, 200, "reads on loopback need no token");
    assert_eq!(send(at, "GET", "/", HTML, b"").status, 200);
    let login = send(at, "GET", "/login", HTML, b"");
    assert!(login.status == 401 && login.head.contains("www-authenticate: basic realm="), "{}", login.head);
    assert!(!login.head.contains("set-cookie"), "{}", login.head);
    assert_eq!(send(at, "GET", "/login", &token(&machine), b"").status, 303);
    assert_eq!(send(at, "POST", "/api/v1/look", "", b"").status, 401);
    assert_eq!(send(at, "POST", "/api/v1/look", &token(&machine), b"").status, 202);
    for (method, path) in [("POST", "/api/v1/login"), ("POST", "/api/v1/logout"), ("GET", "/api/v1/session")]
    {
        assert_eq!(send(at, method, path, "", b"").status, 404, "{path}");
    }
    // The header of a proxy means nothing.
    assert_eq!(send(at, "POST", "/api/v1/look", "X-Forwarded-User: ann\r\n", b"").status, 401);
}

#[test]
fn the_token_of_the_listener_and_webhooks_work_next_to_people() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    write_private(&machine.path("users.yaml"), &users());
    write_private(&machine.path("listener.token"), "the-token-of-the-listener\n");
    write_private(&machine.path("secret"), "a long webhook secret\n");
    let more = ["--users", "users.yaml", "--token-file", "listener.token", "--webhook-secret-file", "secret"];
    let _watch = watch(&machine, "watch.log", &more);
    let at = address(&machine, "watch.log");
    let listener = bearer("the-token-of-the-listener");
    assert_eq!(send(at, "GET", "/api/v1/status", &listener, b"").status, 200);
    assert_eq!(
        send(at, "POST", "/api/v1/pause", &listener, br#"{"all": true, "by": "ops"}"#).json()["paused"]["by"],
        "ops"
    );
    let password = "Authorization: Basic OnRoZS10b2tlbi1vZi10aGUtbGlzdGVuZXI=\r\n";
    assert_eq!(send(at, "GET", "/", password, b"").status, 200);
    assert_eq!(send(at, "GET", "/login", password, b"").status, 303);
    let session = send(at, "GET", "/api/v1/session", &listener, b"").json();
    assert_eq!((&session["role"], &session["person"]), (&json!("admin"), &Value::Null));
    assert_eq!(
        send(at, "POST", "/api/v1/webhook", "X-Gitlab-Token: a long webhook secret\r\n", b"{}").status,
        202
    );
    assert_eq!(send(at, "GET", "/api/v1/status", &bearer(BOB), b"").status, 200);
    assert_eq!(send(at, "GET", "/api/v1/status", &bearer("the-token-of-the-listeneR"), b"").status, 401);
}

#[test]
fn flags_that_would_trust_too_much_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    write_private(&folder.path().join("users.yaml"), &users());
    let run = |args: &str| {
        let all: Vec<&str> = ["watch", "m"].into_iter().chain(args.split(' ')).collect();
        let output = abide(&all, folder.path(), b"");
        (output.status.code(), stderr(&output))
    };
    for (args, says) in [
        ("--listen 0.0.0.0:0 --users users.yaml", "without TLS"),
        ("--listen 0.0.0.0:0", "without a token"),
        ("--trusted-proxy 10.0.0.1", "--user-header"),
        ("--users users.yaml --user-header X-User", "--trusted-proxy"),
        ("--trusted-proxy 10.0.0.1 --user-header X-User", "--users"),
        ("--users users.yaml --trusted-proxy 0.0.0.0/0 --user-header X-User", "trust every peer"),
        ("--users users.yaml --trusted-proxy ten --user-header X-User", "address range"),
        (
            "--users users.yaml --trusted-proxy 10.0.0.1 --user-header Authorization",
            "clients send this header",
        ),
        ("--tls-cert cert.pem", "--tls-key"),
    ] {
        let (code, text) = run(args);
        assert!(code == Some(64) && text.contains(says), "{args}: {code:?} {text}");
    }
    let (code, text) = run("--listen 127.0.0.1:0 --users missing.yaml");
    assert!(code == Some(1) && text.contains("--users: cannot read missing.yaml"), "{code:?} {text}");
    assert!(!folder.path().join(".abide-home/address").exists(), "no local system was started: {text}");
}
