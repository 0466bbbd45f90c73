//! A platform that refuses live status checks (operation 2): a first start is planned all the same, and only an instance that
//! a plan could harm is held.

use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use crate::http::Request;
use crate::support::{GOOD, Tree, abide, stderr, stdout};

/// A `gse-v2` platform on which `web/old` of the owner `default` runs with another spec, and operations are refused.
fn platform() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("an address");
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            stream.set_read_timeout(Some(Duration::from_secs(5))).expect("a timeout");
            let Some(request) = Request::read(&mut stream) else { continue };
            let asked = String::from_utf8_lossy(&request.body).into_owned();
            let called = |name: &str| request.path.contains(name);
            let data = match () {
                () if called("get_agent_status") => {
                    r#"{"0:10.0.0.1": {"ip": "10.0.0.1", "bk_cloud_id": 0, "bk_agent_alive": 1}}"#
                }
                () if called("get_proc_status_v2") && asked.contains(r#""name":"old""#) => OLD,
                () if called("get_proc_status_v2") => r#"{"proc_infos": []}"#,
                () => "",
            };
            let body = match data {
                "" => r#"{"result": false, "code": 1306000, "message": "no permission", "data": null}"#
                    .to_owned(),
                data => format!(r#"{{"result": true, "code": 0, "message": "", "data": {data}}}"#),
            };
            let head =
                format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
            let _ = stream.write_all((head + &body).as_bytes());
        }
    });
    address
}

const OLD: &str = r#"{"proc_infos": [{"meta": {"namespace": "web", "name": "old", "labels": {"abide_owner": "default"}},
    "host": {"ip": "10.0.0.1", "bk_cloud_id": 0}, "status": 1, "flag": 1, "isauto": true, "pid": 77}]}"#;

fn plan(more: &[(&str, &str)]) -> (Option<i32>, String) {
    let config = format!(
        "targets: {{it: {{url: \"http://{}\", dialect: gse-v2, auth: {{app_code: all, app_secret: {{file: secret}}}}}}}}\n",
        platform()
    );
    let good = GOOD.replace("control: {", "control: {stop_cmd: ./stop, ");
    let mut files = vec![("it.yaml", config.as_str()), ("secret", "s3cret"), ("m/api.yaml", good.as_str())];
    files.extend(more);
    let tree = Tree::new(&files);
    let output = abide(&["plan", "m", "--target", "it", "--config", "it.yaml"], tree.path(), b"");
    (output.status.code(), stdout(&output) + &stderr(&output))
}

#[test]
fn a_refused_check_before_a_first_start_fails_no_plan() {
    let (code, said) = plan(&[]);
    assert!(code == Some(0) && said.contains("1 to start"), "{code:?}: {said}");
}

#[test]
fn a_refused_check_before_a_stop_holds_that_instance_alone() {
    let old = GOOD
        .replace("spec:\n", "state: stopped\nspec:\n")
        .replace("control: {", "control: {stop_cmd: ./stop, ")
        .replace("name: api", "name: old");
    let (code, said) = plan(&[("m/old.yaml", &old)]);
    assert!(code == Some(0) && said.contains("1 to start") && !said.contains("to stop"), "{code:?}: {said}");
    assert!(said.contains("web/old"), "{said}");
}
