//! Answers that cannot be read, from a proxy or a broken platform: errors name the HTTP status and the first characters.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use serde_json::Value;

use crate::http::Request;
use crate::support::{GOOD, Tree, abide, stderr, stdout};

const DIALECTS: [&str; 5] = ["abide", "gse-v1", "gse-v2", "gse-apigw", "job"];

/// Answers every request with `answer` of its path. `length`: what the header claims, if not the length of the text.
fn platform(answer: impl Fn(&str) -> (u16, Option<usize>, String) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            stream.set_read_timeout(Some(Duration::from_secs(5))).expect("a timeout");
            let Some(request) = Request::read(&mut stream) else { continue };
            let (status, length, text) = answer(&request.path);
            let length = length.unwrap_or(text.len());
            let head =
                format!("HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n");
            let _ = stream.write_all(format!("{head}{text}").as_bytes());
        }
    });
    address
}

fn tree(at: SocketAddr, dialect: &str) -> Tree {
    let business = if dialect == "job" { "biz_id: 2, " } else { "" };
    let auth = "auth: {app_code: all, app_secret: {file: secret}}";
    let config = format!("targets: {{it: {{url: \"http://{at}\", dialect: {dialect}, {business}{auth}}}}}\n");
    let manifest = GOOD.replace("control: {", "control: {stop_cmd: ./stop, ");
    Tree::new(&[("it.yaml", config.as_str()), ("secret", "s3cret"), ("m/api.yaml", &manifest)])
}

/// Plans against a target that gives one answer, and returns the exit code and the errors.
fn plan(dialect: &str, status: u16, length: Option<usize>, text: &str) -> (Option<i32>, String) {
    let text = text.to_owned();
    let at = platform(move |_| (status, length, text.clone()));
    let tree = tree(at, dialect);
    let output = abide(&["plan", "m", "--target", "it", "--config", "it.yaml"], tree.path(), b"");
    (output.status.code(), stderr(&output))
}

#[test]
fn an_answer_that_cannot_be_read_is_quoted_with_its_status() {
    let page = format!("<html>\r\n\u{1b}[31m<h1>Sign in</h1>{}</html>", "x".repeat(100_000));
    let cut = r#"{"result": true, "code": 0, "data": {"proc_in"#;
    for dialect in DIALECTS {
        for (status, length, text, shown) in [
            (
                200,
                None,
                page.as_str(),
                "HTTP 200, 100036 bytes: \"<html>\\r\\n\\u{1b}[31m<h1>Sign in</h1>xxx",
            ),
            (502, None, "<h1>Bad gateway</h1>", "HTTP 502, 20 bytes: \"<h1>Bad gateway</h1>\""),
            (403, None, "<h1>No</h1>", "HTTP 403, 11 bytes: \"<h1>No</h1>\""),
            (200, None, cut, "JSON that ends early (HTTP 200"),
            (200, Some(500), cut, "incomplete: "),
            (200, None, "", "empty (HTTP 200, 0 bytes"),
            (200, None, "[1, 2]", "not a GSE envelope (HTTP 200, 6 bytes: \"[1, 2]\")"),
        ] {
            let (code, err) = plan(dialect, status, length, text);
            assert_eq!(code, Some(69), "{dialect} {text:.20}: {err}");
            assert!(err.contains(shown), "{dialect}: {shown:?} is missing in {err}");
            assert!(!err.contains("did not respond") && !err.contains('\u{1b}'), "{dialect}: {err}");
            let longest = err.lines().map(str::len).max().unwrap_or(0);
            assert!(longest < 600, "{dialect}: {longest}: {err:.1000}");
        }
    }
}

#[test]
fn data_of_another_type_is_quoted_as_well() {
    for dialect in DIALECTS {
        let data = r#"{"result": true, "code": 0, "message": "", "data": "none of your business"}"#;
        let (code, err) = plan(dialect, 200, None, data);
        assert_eq!(code, Some(69), "{dialect}: {err}");
        assert!(err.contains("none of your business") && err.contains("HTTP 200"), "{dialect}: {err}");
    }
}

/// An operation whose answer is a page may have run: its step is checked, and its message contains the page.
#[test]
fn the_message_of_a_step_contains_the_unreadable_answer() {
    let nothing = r#"{"result": true, "code": 0, "message": "", "data": {"count": 0, "proc_infos": []}}"#;
    let alive = r#"{"result": true, "code": 0, "message": "",
        "data": {"0:10.0.0.1": {"ip": "10.0.0.1", "bk_cloud_id": 0, "bk_agent_alive": 1, "version": "2"}}}"#;
    let at = platform(move |path| match path {
        path if path.contains("agent") => (200, None, alive.to_owned()),
        path if path.contains("operate_proc") => (504, None, "<h1>upstream timed out</h1>".to_owned()),
        _ => (200, None, nothing.to_owned()),
    });
    let tree = tree(at, "gse-v2");
    let args = ["apply", "m", "--target", "it", "--config", "it.yaml", "--yes", "--timeout", "3s"];
    let output = abide(&args, tree.path(), b"");
    let text = format!("{}{}", stdout(&output), stderr(&output));
    assert!(text.contains("HTTP 504, 27 bytes: \"<h1>upstream timed out</h1>\""), "{text}");
    assert!(!text.contains("did not respond"), "{text}");
}

/// One process in the list of namespace `shop`, of which no manifest and no state knows.
fn shop(path: &str) -> (u16, Option<usize>, String) {
    let envelope =
        |data: &str| (200, None, format!(r#"{{"result": true, "code": 0, "message": "", "data": {data}}}"#));
    let row = r#"{"meta": {"namespace": "shop", "name": "cart", "labels": {}}, "flag": 1, "status": 1, "isauto": true,
        "host": {"ip": "10.0.0.1", "bk_cloud_id": 0}, "pid": 7, "report_time": 4000000000}"#;
    match path {
        path if path.contains("list_agent_state") => {
            envelope(r#"[{"bk_agent_id": "0:10.0.0.1", "status_code": 2, "version": "2"}]"#)
        }
        path if path.contains("agent") => {
            envelope(r#"{"0:10.0.0.1": {"ip": "10.0.0.1", "bk_cloud_id": 0, "bk_agent_alive": 1}}"#)
        }
        path if path.contains("sync") => envelope(&format!(r#"{{"count": 1, "proc_infos": [{row}]}}"#)),
        _ => envelope("{}"),
    }
}

#[test]
fn reading_verbs_ask_about_the_namespaces_that_they_name() {
    for dialect in ["gse-v1", "gse-v2", "gse-apigw"] {
        let tree = tree(platform(shop), dialect);
        let run = |args: &[&str]| {
            let output =
                abide(&[args, &["--target", "it", "--config", "it.yaml"]].concat(), tree.path(), b"");
            (output.status.code(), stdout(&output), stderr(&output))
        };
        let (code, out, err) = run(&["get", "processes", "-n", "shop", "-o", "json"]);
        let rows: Value = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}{err}"));
        assert_eq!(
            (code, &rows[0]["instance"]),
            (Some(0), &"0:10.0.0.1:shop:cart".into()),
            "{dialect}: {err}"
        );
        assert_eq!((&rows[0]["running"], &rows[0]["pid"]), (&true.into(), &7.into()), "{dialect}: {out}");
        let (_, out, _) = run(&["get", "orphans", "-n", "shop", "-o", "name"]);
        assert_eq!(out, "0:10.0.0.1:shop:cart\n", "{dialect}");
        let (_, out, _) = run(&["get", "hosts", "-n", "shop", "-o", "name"]);
        assert_eq!(out, "0:10.0.0.1\n", "{dialect}");
        let (code, out, err) = run(&["describe", "shop/cart"]);
        assert!(code == Some(0) && out.contains("0:10.0.0.1:shop:cart"), "{dialect}: {out}{err}");
        // Without a name there is nothing to ask for, and an unknown process stays unknown.
        let (_, out, _) = run(&["get", "processes"]);
        assert_eq!(out, "no processes\n", "{dialect}");
        let (code, out, err) = run(&["describe", "shop/other"]);
        assert!(
            code == Some(0) && out.is_empty() && err.contains("no process shop/other"),
            "{dialect}: {out}{err}"
        );
    }
    let tree = tree(platform(shop), "job");
    let args = ["get", "processes", "-n", "job-2", "--target", "it", "--config", "it.yaml"];
    let output = abide(&args, tree.path(), b"");
    assert!(stderr(&output).contains("JOB has no list of processes"), "{}", stderr(&output));
    assert_eq!(stdout(&output), "no processes\n");
}
