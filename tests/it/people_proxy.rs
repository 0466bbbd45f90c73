//! Single sign-on with a real nginx: it asks an authentication service for each request, as it does in front of oauth2-proxy, and
//! sends the name of the person to a controller and to a gateway.

use std::net::SocketAddr;
use std::path::Path;

use serde_json::{Value, json};

use crate::controller_api::send;
use crate::fixtures::http::Answer;
use crate::fixtures::machine::{KillOnDrop, start_logged};
use crate::fixtures::people::{ANN, HTML, Site, bearer, between, set_cookie, users, write_private};
use crate::fixtures::workspace::Workspace;
use crate::process_tree::port;
use crate::serve::Gateway;
use crate::support::{needs, until};

/// The address that nginx connects from.
const PROXY: &str = "127.9.9.9";
const FLAGS: [&str; 4] = ["--trusted-proxy", "127.9.9.9/32", "--user-header", "X-Forwarded-User"];

/// An nginx in front of a listener, and the authentication service that knows its sessions.
struct Proxy {
    at: SocketAddr,
    _nginx: KillOnDrop,
}

impl Proxy {
    fn start(folder: &Path, backend: SocketAddr) -> Proxy {
        let (front, service) = (port(), port());
        let config = format!(
            "daemon off; master_process off; pid nginx.pid; error_log nginx.log;
events {{ }}
http {{
  access_log off;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  map $cookie_sso $person {{ default ''; session-of-ann ann; session-of-sso sso; session-of-eve eve; }}
  server {{
    listen 127.0.0.1:{service};
    location / {{
      if ($person = '') {{ return 401; }}
      add_header X-Auth-Request-User $person always;
      return 202;
    }}
  }}
  server {{
    listen 127.0.0.1:{front};
    location / {{
      auth_request /oauth2/auth;
      auth_request_set $user $upstream_http_x_auth_request_user;
      proxy_set_header X-Forwarded-User $user;
      proxy_set_header X-Forwarded-Proto https;
      proxy_set_header Host watch.example;
      proxy_bind {PROXY};
      proxy_buffering off;
      proxy_pass http://{backend};
    }}
    location = /oauth2/auth {{
      internal;
      proxy_pass http://127.0.0.1:{service};
      proxy_pass_request_body off;
      proxy_set_header Content-Length '';
    }}
  }}
}}
"
        );
        let file = folder.join("nginx.conf");
        std::fs::write(&file, config).expect("a file");
        let mut command = std::process::Command::new("nginx");
        command.arg("-p").arg(folder).arg("-c").arg(&file);
        let nginx = start_logged(&mut command, &folder.join("nginx.out"));
        let at = SocketAddr::from(([127, 0, 0, 1], front));
        until("nginx answers", || std::net::TcpStream::connect(at).is_ok());
        Proxy { at, _nginx: nginx }
    }

    /// A request of a browser with a session at the authentication service.
    fn send(&self, session: &str, method: &str, path: &str, headers: &str) -> Answer {
        send(self.at, method, path, &format!("Cookie: sso={session}\r\n{headers}"), b"")
    }

    fn person(&self, headers: &str) -> (u16, Value) {
        let answer = send(self.at, "GET", "/api/v1/session", headers, b"");
        let body: Value = serde_json::from_str(&answer.body).unwrap_or_default();
        (answer.status, body["person"].clone())
    }
}

#[test]
fn nginx_names_people_to_a_controller() {
    if !needs("nginx") {
        return;
    }
    let site = Site::new(&FLAGS);
    let proxy = Proxy::start(site.machine.folder.path(), site.at);
    let ann = "Cookie: sso=session-of-ann\r\n";
    assert_eq!(proxy.person(ann), (200, json!("ann")));
    assert_eq!(
        proxy.person("Cookie: sso=session-of-sso\r\n"),
        (200, json!("sso")),
        "a person without a token"
    );
    // Without a session nginx refuses; a header of the client names no person.
    for forged in
        ["X-Forwarded-User: root\r\n", "x-forwarded-user: root\r\n", "X_Forwarded_User: root\r\n", ""]
    {
        assert_eq!(proxy.person(forged).0, 401, "{forged}");
        assert_eq!(proxy.person(&format!("{ann}{forged}")), (200, json!("ann")), "{forged}");
        assert_eq!(proxy.person(&format!("{ann}{forged}{}", bearer("a-long-token-of-root"))).1, "ann");
    }
    let eve = proxy.send("session-of-eve", "GET", "/api/v1/status", "");
    assert!(eve.status == 403 && eve.body.contains("person eve is not in the users file"), "{}", eve.body);
    // Past the proxy the header counts for nothing, and a token still does.
    let direct = |headers: &str| send(site.at, "GET", "/api/v1/session", headers, b"").status;
    assert_eq!((direct("X-Forwarded-User: ann\r\n"), direct(&bearer(ANN))), (401, 200));
    // A browser gets a session with the page, and changes something with its CSRF token only.
    let page = proxy.send("session-of-ann", "GET", "/", HTML);
    let name = format!("__Host-{}", site.cookie_name());
    let cookie = set_cookie(&page, &name.to_ascii_lowercase()).replace("__host-", "__Host-");
    let csrf = between(&page.body, "name=\"csrf\" value=\"", "\"").to_owned();
    let look = |session: &str, csrf: &str| {
        let headers = format!("Cookie: sso={session}; {cookie}\r\nX-Abide-Csrf: {csrf}\r\n");
        send(proxy.at, "POST", "/api/v1/look", &headers, b"").status
    };
    assert_eq!(look("session-of-ann", "another"), 403);
    assert_eq!(look("session-of-ann", &csrf), 202);
    assert_eq!(look("session-of-sso", &csrf), 403, "the session of another person");
    // Events pass nginx as they come.
    let mut stream = std::net::TcpStream::connect(proxy.at).expect("a connection");
    let request = format!("GET /api/v1/events?after=0 HTTP/1.1\r\nHost: x\r\n{ann}\r\n");
    std::io::Write::write_all(&mut stream, request.as_bytes()).expect("a request");
    stream.set_read_timeout(Some(std::time::Duration::from_secs(20))).expect("a timeout");
    let mut seen = Vec::new();
    until("an event passes", || {
        let mut part = [0; 4096];
        let read = std::io::Read::read(&mut stream, &mut part).unwrap_or(0);
        seen.extend_from_slice(&part[..read]);
        String::from_utf8_lossy(&seen).contains("data: {")
    });
}

#[test]
fn nginx_names_people_to_a_gateway() {
    if !needs("nginx") {
        return;
    }
    let folder = Workspace::new();
    write_private(&folder.path().join("users.yaml"), &users());
    let gateway = Gateway::start(folder.path(), &[&["--users", "users.yaml"][..], &FLAGS].concat());
    let proxy = Proxy::start(folder.path(), gateway.server.address);
    let who = |session: &str, headers: &str| {
        let answer = proxy.send(session, "GET", "/api/abide/v1/access", headers);
        let body: Value = serde_json::from_str(&answer.body).unwrap_or_default();
        (answer.status, body["data"]["person"].clone())
    };
    assert_eq!(who("session-of-ann", ""), (200, json!("ann")));
    assert_eq!(who("session-of-ann", "X-Forwarded-User: root\r\n"), (200, json!("ann")));
    assert_eq!(who("nothing", "X-Forwarded-User: root\r\n").0, 401);
    assert_eq!(who("session-of-eve", "").0, 401);
    let state = |headers: &str| {
        let headers = format!("Cookie: sso=session-of-ann\r\n{headers}");
        send(proxy.at, "POST", "/api/abide/v1/state", &headers, br#"{"get": {"key": "pin/default"}}"#).status
    };
    assert_eq!((state(""), state("X-Requested-With: abide\r\n")), (401, 200));
}
