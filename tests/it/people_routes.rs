//! Matrix of the status server: every route of its own table, for every kind of caller.

use crate::controller_api::Events;
use crate::fixtures::people::{Site, bearer, digest, write_private};
use crate::support::until;

/// Who calls a route of the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Visitor {
    Nothing,
    Wrong,
    Expired,
    Removed,
    OldSession,
    Token(&'static str),
    /// A session without its CSRF token.
    Cookie(&'static str),
    Session(&'static str),
}

/// The expected status. A route without a row fails the test.
fn expected(path: &str, visitor: Visitor) -> u16 {
    use Visitor::{Cookie, Expired, Nothing, OldSession, Removed, Session, Token, Wrong};
    match path {
        "/healthz" | "/readyz" => 200,
        // A wrong token in the header is compared; without one it is the form.
        "/login" => match visitor {
            Nothing | OldSession => 200,
            Wrong | Expired | Removed => 401,
            // A bearer token is not a password of the listener.
            Token(_) => 401,
            Cookie(_) | Session(_) => 303,
        },
        // The form has a token of its own.
        "/api/v1/login" => 403,
        "/api/v1/webhook" => 404,
        "/api/v1/logout" => match visitor {
            Cookie(_) => 403,
            Session(_) => 303,
            Nothing | Wrong | Expired | Removed | OldSession | Token(_) => 401,
        },
        "/"
        | "/metrics"
        | "/api/v1/status"
        | "/api/v1/processes"
        | "/api/v1/events"
        | "/api/v1/plan"
        | "/api/v1/history"
        | "/api/v1/openapi.json"
        | "/api/v1/session" => match visitor {
            Nothing | Wrong | Expired | Removed | OldSession => 401,
            Token(_) | Cookie(_) | Session(_) => 200,
        },
        "/api/v1/pause" | "/api/v1/resume" | "/api/v1/look" => match visitor {
            Nothing | Wrong | Expired | Removed | OldSession => 401,
            Token("read") | Session("read") | Cookie(_) => 403,
            Token(_) | Session(_) if path == "/api/v1/look" => 202,
            Token(_) | Session(_) => 200,
        },
        other => panic!("the matrix has no row for {other}"),
    }
}

#[test]
fn every_route_of_the_controller_has_its_rule_for_every_caller() {
    use Visitor::{Cookie, Expired, Nothing, OldSession, Removed, Session, Token, Wrong};
    const ROLES: [&str; 3] = ["read", "operate", "admin"];
    let site = Site::new(&[]);
    let long = |name: &str| format!("a-long-token-of-{name}");
    let person = |name: &str, more: &str| {
        format!("  - {{name: {name}, token_sha256: {}, {more}}}\n", digest(&long(name)))
    };
    let roles = ROLES.map(|role| person(role, &format!("role: {role}"))).concat();
    let (late, removed) = (person("late", "expires: 2020-01-01"), person("removed", "role: admin"));
    let write = |text: String| write_private(&site.machine.path("users.yaml"), &format!("users:\n{text}"));
    write(format!("{roles}{late}{removed}"));
    until("the new file is read", || site.status("/api/v1/session", &bearer(&long("removed"))) == 200);
    let (old, _) = site.log_in(&long("removed"));
    write(format!("{roles}{late}"));
    until("a person is removed", || site.status("/api/v1/session", &bearer(&long("removed"))) == 401);
    until("it is ready", || site.status("/readyz", "") == 200);
    let mut visitors = vec![Nothing, Wrong, Expired, Removed, OldSession];
    visitors.extend(ROLES.into_iter().flat_map(|role| [Token(role), Cookie(role), Session(role)]));
    let (mut nth, mut compared) = (0u8, 0);
    for (method, path) in abide::dashboard::route_table() {
        nth += 1;
        for (other, visitor) in visitors.iter().enumerate() {
            let headers = match visitor {
                Nothing => String::new(),
                Wrong => bearer(&long("nothing")),
                Expired => bearer(&long("late")),
                Removed => bearer(&long("removed")),
                OldSession => old.clone(),
                Token(role) => bearer(&long(role)),
                // One of its own, since a logout ends it.
                Cookie(role) => site.log_in(&long(role)).0,
                Session(role) => {
                    let (cookie, csrf) = site.log_in(&long(role));
                    cookie + &csrf
                }
            };
            let is_stream = path == "/api/v1/events" && expected(path, *visitor) == 200;
            if is_stream {
                drop(Events::open(site.at, path, &headers));
                continue;
            }
            let body = if path.ends_with("/pause") || path.ends_with("/resume") {
                r#"{"namespace": "web"}"#
            } else {
                ""
            };
            // A peer with one wrong login is not delayed.
            let peer = [127, 3, nth, u8::try_from(other).expect("a few") + 1];
            let answer = site.send_from_with(peer, method, path, &headers, body);
            let what = format!("{method} {path} as {visitor:?}: {}", answer.body);
            assert_eq!(answer.status, expected(path, *visitor), "{what}");
            compared += 1;
        }
    }
    assert!(compared > 200, "{compared}");
}
