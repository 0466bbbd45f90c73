//! Golden requests of each dialect against a platform built from the documents: requests match field by field, and
//! literal responses are understood.

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

use crate::http::Request;
use crate::support::{command, project, stderr, stdout};

/// A received request: the path, the headers in lower case, the body.
type RecordedRequest = (String, String, Value);

struct FakePlatform {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<RecordedRequest>>>,
    folder: tempfile::TempDir,
}

impl FakePlatform {
    /// Answers as the documents show, for one process that does not exist until it is started.
    fn new(config: &str, manifest: &str, keys: [&'static str; 2]) -> FakePlatform {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let requests: Arc<Mutex<Vec<RecordedRequest>>> = Arc::default();
        let recorded = Arc::clone(&requests);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let recorded = Arc::clone(&recorded);
                std::thread::spawn(move || answer(stream, &recorded, keys));
            }
        });
        let folder = tempfile::tempdir().expect("a folder");
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("a file");
        let config = config.replace("URL", &format!("http://{address}"));
        write("abide.yaml", &config);
        write("m.yaml", manifest);
        FakePlatform { address, requests, folder }
    }

    fn apply(&self) -> (i32, String) {
        assert!(self.address.port() > 0);
        let output =
            command(&["apply", "m.yaml", "--yes", "--target", "it", "--owner", "team"], self.folder.path())
                .env("IT_SECRET", "s3cret")
                .stdin(Stdio::null())
                .output()
                .expect("it runs");
        (output.status.code().unwrap_or(-1), stdout(&output) + &stderr(&output))
    }

    /// The bodies of calls to a path, without live checks.
    fn bodies(&self, path: &str) -> Vec<Value> {
        let requests = self.requests.lock().expect("a lock");
        let selected = |one: &&RecordedRequest| one.0 == path && !one.2.to_string().contains("\"op_type\":2");
        requests.iter().filter(selected).map(|one| one.2.clone()).collect()
    }

    fn paths(&self) -> Vec<String> {
        self.requests.lock().expect("a lock").iter().map(|one| one.0.clone()).collect()
    }
}

fn answer(
    mut stream: TcpStream,
    recorded: &Mutex<Vec<RecordedRequest>>,
    [key, result_key]: [&str; 2],
) -> Option<()> {
    stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
    while let Some(Request { path, head, body }) = Request::read(&mut stream) {
        let body: Value = serde_json::from_slice(&body).unwrap_or_default();
        let mut requests = recorded.lock().expect("a lock");
        let is_live_check = body.to_string().contains("\"op_type\":2");
        let acted = |(path, _, body): &RecordedRequest| {
            let acts = path.contains("operate_proc") && !path.contains("result");
            acts && !body.to_string().contains("\"op_type\":2")
        };
        let runs = requests.iter().any(acted);
        requests.push((path.clone(), head, body.clone()));
        drop(requests);
        // As GSE writes a live check: JSON inside a text; JOB writes the object itself.
        let pid = if runs { 4321 } else { -1 };
        let check = json!({"ip": "10.0.0.1", "utctime": "2026-11-16 08:00:00", "timezone": 8, "process": [
            {"procname": "proc-test", "instance": [{"cmdline": "./start.sh", "cpuUsage": 0.0, "isAuto": runs, "phyMemUsage": 0.0,
             "pid": pid, "processName": "proc-test", "startTime": "Nov 16 08:00:00"}]}]});
        let is_job = path.contains("/job");
        let content = if is_job { check } else { Value::String(check.to_string()) };
        let data = match path.trim_end_matches('/').rsplit('/').next()? {
            "get_proc_status" | "get_proc_status_v2" => json!({"proc_infos": []}),
            "get_agent_status" => {
                let (cloud, ip) = (body["hosts"][0]["bk_cloud_id"].clone(), body["hosts"][0]["ip"].clone());
                json!({format!("{cloud}:{}", ip.as_str()?): {"ip": ip, "bk_cloud_id": cloud, "bk_agent_alive": 1, "version": "1.60.77"}})
            }
            "list_agent_state" => {
                json!([{"bk_agent_id": body["agent_id_list"][0], "status_code": 2, "version": "2.0.0"}])
            }
            "register_proc_info" => json!({key: {"error_code": 0, "error_msg": "success", "content": ""}}),
            "operate_proc" | "operate_proc_multi" => {
                json!({"task_id": if is_live_check { "GSETASK:CHECK" } else { "GSETASK:XXXXXXXXXX" }})
            }
            "operate_process" | "manage_proc" => {
                json!({"bk_gse_taskid": if is_live_check { "GSETASK:CHECK" } else { "GSETASK:20180315180551:1000" }})
            }
            "get_proc_operate_result" | "get_proc_operate_result_v2" => {
                let content = if body["task_id"] == "GSETASK:CHECK" { content } else { json!("") };
                json!({result_key: {"error_code": 0, "error_msg": "success", "content": content}})
            }
            "get_proc_result" => {
                let content = if body["bk_gse_taskid"] == "GSETASK:CHECK" { content } else { json!("") };
                json!({"status": 1, "result": {result_key: {"error_code": 0, "error_msg": "success", "content": content}}})
            }
            _ => Value::Null,
        };
        let envelope = json!({"result": true, "code": 0, "message": "success", "data": data}).to_string();
        let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{envelope}", envelope.len());
        stream.write_all(answer.as_bytes()).ok()?;
    }
    Some(())
}

fn fixture(name: &str) -> Value {
    let text = std::fs::read_to_string(project().join("tests/it/fixtures").join(name)).expect("a fixture");
    serde_json::from_str(&text).expect("JSON")
}

const CONFIG: &str = "targets: {it: {url: \"URL\", dialect: DIALECT, MORE auth: {app_code: esb_test, app_secret: {env: IT_SECRET}, username: admin}}}\n";

fn config(dialect: &str, more: &str) -> String {
    CONFIG.replace("DIALECT", dialect).replace("MORE", more)
}

/// The value without the empty fields of the documents' examples, which count as unset.
fn normalized(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let empty = |value: &Value| *value == json!("") || *value == json!({}) || *value == json!([]);
            let fields = map.iter().map(|(name, value)| (name.clone(), normalized(value)));
            Value::Object(fields.filter(|(_, value)| !empty(value)).collect())
        }
        Value::Array(list) => {
            Value::Array(list.iter().map(normalized).filter(|one| *one != json!({})).collect())
        }
        other => other.clone(),
    }
}

/// Splits a body into its documented fields and those that only Abide adds.
fn split_abide_fields(body: &Value) -> (Value, Value) {
    let mut body = body.clone();
    let mut abide_fields = json!({});
    for name in ["bk_app_code", "bk_app_secret", "bk_username"] {
        if let Some(value) = body.as_object_mut().and_then(|map| map.remove(name)) {
            abide_fields[name] = value;
        }
    }
    let labels = match body.pointer("/meta/labels").is_some() {
        true => body.pointer_mut("/meta/labels"),
        false => body.pointer_mut("/proc_operate_req/0/meta/labels"),
    };
    for name in ["abide_owner", "abide_rev"] {
        if let Some(value) = labels.as_ref().and_then(|labels| labels.get(name)).cloned() {
            abide_fields[name] = value;
        }
    }
    if let Some(labels) = labels.and_then(Value::as_object_mut) {
        labels.retain(|name, _| !name.starts_with("abide_"));
    }
    (body, abide_fields)
}

#[test]
fn gse_v2_requests_match_the_documentation() {
    let seed = fixture("gse_operate_proc.json");
    let key = "1:10.0.0.1:gse:proc-test";
    let platform = FakePlatform::new(&config("gse-v2", ""), &seed.to_string(), [key, key]);
    let (code, output) = platform.apply();
    assert_eq!(code, 0, "{output}\n{:?}", platform.paths());
    let bodies = platform.bodies("/api/c/compapi/v2/gse/operate_proc_multi/");
    assert_eq!(bodies.len(), 1, "one call: {bodies:?}");
    let (body, abide_fields) = split_abide_fields(&bodies[0]);
    assert_eq!(body, json!({"proc_operate_req": [normalized(&seed)]}));
    assert_eq!(
        (&abide_fields["bk_app_code"], &abide_fields["bk_app_secret"], &abide_fields["abide_owner"]),
        (&json!("esb_test"), &json!("s3cret"), &json!("team"))
    );
    assert!(abide_fields["abide_rev"].as_str().is_some_and(|rev| rev.starts_with("v1.")));
}

#[test]
fn gse_v1_requests_match_the_documentation() {
    let seed = fixture("gse_register_proc_info.json");
    let key = "1:2:10.0.0.1:gse:proc-test";
    let platform = FakePlatform::new(&config("gse-v1", ""), &seed.to_string(), [key, key]);
    let (code, output) = platform.apply();
    assert_eq!(code, 0, "{output}\n{:?}", platform.paths());
    let bodies = platform.bodies("/api/c/compapi/v2/gse/register_proc_info/");
    assert_eq!((bodies.len(), split_abide_fields(&bodies[0]).0), (1, normalized(&seed)));
    let bodies = platform.bodies("/api/c/compapi/v2/gse/operate_proc/");
    let (body, _) = split_abide_fields(&bodies[0]);
    let expected = json!({"meta": normalized(&seed)["meta"], "hosts": seed["hosts"], "op_type": 0});
    assert_eq!((bodies.len(), body), (1, expected), "no spec: the registered one is used");
}

#[test]
fn gse_apigw_names_agents_and_has_its_credentials_in_a_header() {
    let mut seed = fixture("gse_operate_proc.json");
    seed["hosts"] = json!([{"ip": "10.0.0.1", "bk_cloud_id": 1, "bk_agent_id": "0200000000525400"}]);
    let key = "0200000000525400:gse:proc-test";
    let more = "tenant: blue, headers: {X-Extra: \"1\"},";
    let platform = FakePlatform::new(&config("gse-apigw", more), &seed.to_string(), [key, key]);
    let (code, output) = platform.apply();
    assert_eq!(code, 0, "{output}\n{:?}", platform.paths());
    let bodies = platform.bodies("/api/v2/proc/operate_proc_multi");
    let (body, abide_fields) = split_abide_fields(&bodies[0]);
    let one = &body["proc_operate_req"][0];
    assert_eq!((&one["agent_id_list"], &one["hosts"]), (&json!(["0200000000525400"]), &Value::Null));
    assert_eq!((&one["spec"], &abide_fields["bk_app_secret"]), (&normalized(&seed)["spec"], &Value::Null));
    let requests = platform.requests.lock().expect("a lock");
    let (_, head, _) = requests.iter().find(|one| one.0.contains("operate_proc_multi")).expect("a call");
    let lower = head.to_ascii_lowercase();
    assert!(
        head.contains(r#""bk_app_code":"esb_test""#) && head.contains(r#""bk_app_secret":"s3cret""#),
        "{head}"
    );
    assert!(lower.contains("x-bk-tenant-id: blue") && lower.contains("x-extra: 1"), "{head}");
}

#[test]
fn job_requests_match_the_documentation() {
    // The document's example, with a command to start it and its kind.
    let mut seed = fixture("job_operate_process.json");
    seed["op_type"] = json!(0);
    let process = &mut seed["process_infos"][0];
    process["type"] = json!(1);
    process["start_cmd"] = json!("./gseagent");
    process["stop_cmd"] = json!("kill");
    let key = "/usr/local/xxx/gseagent:0:10.0.0.1";
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("body.json"), seed.to_string()).expect("a file");
    let manifest = stdout(&command(&["convert", "body.json"], folder.path()).output().expect("it runs"));
    for (more, path) in [
        ("biz_id: 1,", "/api/c/compapi/v2/job/operate_process/"),
        ("scope: {type: biz, id: \"1\"},", "/api/c/compapi/v2/jobv3/operate_process/"),
    ] {
        let platform = FakePlatform::new(&config("job", more), &manifest, [key, key]);
        let (code, output) = platform.apply();
        assert_eq!(code, 0, "{output}\n{:?}", platform.paths());
        let bodies = platform.bodies(path);
        assert_eq!(bodies.len(), 1, "{:?}", platform.paths());
        let (body, _) = split_abide_fields(&bodies[0]);
        assert_eq!((&body["op_type"], &body["process_infos"]), (&json!(0), &seed["process_infos"]));
        let business = [&body["bk_biz_id"], &body["bk_scope_type"], &body["bk_scope_id"]];
        match more.starts_with("biz") {
            true => assert_eq!(business, [&json!(1), &Value::Null, &Value::Null]),
            false => assert_eq!(business, [&Value::Null, &json!("biz"), &json!("1")]),
        }
    }
}

#[test]
fn a_proxy_receives_every_request() {
    let seed = fixture("gse_operate_proc.json");
    let key = "1:10.0.0.1:gse:proc-test";
    // The platform's own address leads nowhere.
    let config = config("gse-v2", "proxy: \"URL\", insecure: true,").replacen(
        "url: \"URL\"",
        "url: \"http://platform.invalid\"",
        1,
    );
    let platform = FakePlatform::new(&config, &seed.to_string(), [key, key]);
    let (code, output) = platform.apply();
    assert_eq!(code, 0, "{output}\n{:?}", platform.paths());
    let paths = platform.paths();
    assert!(
        !paths.is_empty() && paths.iter().all(|path| path.starts_with("http://platform.invalid/")),
        "{paths:?}"
    );
}
