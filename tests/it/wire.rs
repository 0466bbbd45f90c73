//! Wire formats against the documents' own examples, field by field. No comparison has our own types on both sides.

use abide::gse::codes::{EnvelopeCode, GseOp, RowCode};
use abide::gse::request::{MultiRequest, ProcRequest};
use abide::gse::response::{Envelope, JobTaskData, LiveStatus, Row, Rows, StatusData, TaskData};
use abide::gse::{bodies, keys};
use abide::model::{AutoType, Dialect, EnvValue, ProcessKey, State};
use serde_json::{Value, json};

fn request(body: Value) -> ProcRequest {
    serde_json::from_value(body).expect("a request")
}

fn fixture(text: &str) -> Value {
    serde_json::from_str(text).expect("JSON")
}

#[test]
fn the_register_proc_info_example_is_parsed() {
    let request = request(fixture(include_str!("fixtures/gse_register_proc_info.json")));
    assert_eq!(request.process().expect("a name").to_string(), "gse/proc-test");
    let hosts = request.targets().expect("hosts");
    assert_eq!(
        (hosts.len(), hosts[0].key.to_string(), hosts[0].supplier),
        (1, "1:10.0.0.1".to_owned(), Some(2))
    );
    let key = keys::v1(&hosts[0], &request.process().expect("a name"));
    assert_eq!(key.as_deref(), Some("1:2:10.0.0.1:gse:proc-test"), "as its example of an answer shows it");
    let spec = request.spec().expect("a spec").expect("there is one");
    let seen = json!({
        "labels": spec.labels, "proc_name": spec.identity.proc_name, "setup_path": spec.identity.setup_path,
        "user": spec.identity.user, "value_key": spec.identity.value_key, "start": spec.control.start_cmd,
        "cpu": spec.resource.cpu.map(f64::from), "auto_type": i64::from(spec.monitor.auto_type),
        "crontab_rule": spec.monitor.crontab_rule, "report_id": spec.report_id, "configmap": spec.configmap.len(),
    });
    let body = fixture(include_str!("fixtures/gse_register_proc_info.json"));
    assert_eq!(seen["proc_name"], body["spec"]["identity"]["proc_name"]);
    assert_eq!(seen["setup_path"], body["spec"]["identity"]["setup_path"]);
    assert_eq!(seen["user"], body["spec"]["identity"]["user"]);
    assert_eq!(seen["start"], body["spec"]["control"]["start_cmd"]);
    assert_eq!(seen["cpu"], body["spec"]["resource"]["cpu"]);
    assert_eq!(seen["labels"], body["meta"]["labels"]);
    // An empty text counts as unset, and so does an empty entry of configmap.
    assert_eq!(
        (&seen["value_key"], &seen["crontab_rule"], &seen["configmap"]),
        (&Value::Null, &Value::Null, &json!(0))
    );
}

#[test]
fn requests_round_trip() {
    // From the example, through the model, to a body, and back: the same wish.
    let request = request(fixture(include_str!("fixtures/gse_operate_proc.json")));
    let spec = request.spec().expect("a spec").expect("there is one");
    let subject = abide::gse::BodyContent {
        key: request.process().expect("a name"),
        hosts: request.targets().expect("hosts"),
        state: State::Running,
        spec: spec.clone(),
    };
    let (sent, losses) = bodies(&[subject], Dialect::GseV2, None);
    assert!(losses.is_empty(), "{losses:?}");
    let again: ProcRequest = serde_json::from_value(sent[0].clone()).expect("a request");
    assert_eq!(again.spec(), Ok(Some(spec)));
    assert_eq!(again.op_type.and_then(GseOp::from_code), Some(GseOp::Start));
}

#[test]
fn responses_match_the_documentation() {
    let rows = Rows::from([("1:2:10.0.0.1:gse:proc-test".to_owned(), Row::done())]);
    let registered = json!({"result": true, "code": 0, "message": "success",
        "data": {"1:2:10.0.0.1:gse:proc-test": {"error_code": 0, "error_msg": "success", "content": ""}}});
    assert_eq!(serde_json::to_value(Envelope::ok(rows.clone())).expect("JSON"), registered);
    assert_eq!(serde_json::from_value::<Envelope<Rows>>(registered).expect("an answer").data, Some(rows));
    let task = json!({"result": true, "code": 0, "message": "success", "data": {"task_id": "GSETASK:1"}});
    assert_eq!(
        serde_json::to_value(Envelope::ok(TaskData { task_id: "GSETASK:1".into() })).expect("JSON"),
        task
    );
    let job = json!({"result": true, "code": 0, "message": "",
        "data": {"bk_gse_taskid": "GSETASK:20180315180551:1000"}});
    let read: Envelope<JobTaskData> = serde_json::from_value(job).expect("an answer");
    assert_eq!(read.data.map(|data| data.bk_gse_taskid).as_deref(), Some("GSETASK:20180315180551:1000"));
    // A platform that cannot reach GSE answers so, without data.
    let lost: Envelope<Rows> =
        serde_json::from_value(json!({"result": false, "code": 50001, "message": "x", "data": null}))
            .expect("an answer");
    assert_eq!((lost.data, lost.code), (None, EnvelopeCode::NO_GSE.0));
    let failed =
        serde_json::to_value(Envelope::<Rows>::failed(EnvelopeCode::UNKNOWN_TASK, "no")).expect("JSON");
    assert_eq!((&failed["result"], &failed["data"]), (&json!(false), &Value::Null));
}

#[test]
fn lenient_request_forms_are_accepted() {
    let request = request(json!({
        "meta": {"namespace": "gse", "name": "p", "labels": {"set": 3, "on": true, "none": null}, "extra": 1},
        "hosts": [{"ip": "10.0.0.1", "bk_cloud_id": 0}, {"ip": "10.0.0.1", "bk_cloud_id": 0}, {"ip": "fe80::1", "bk_cloud_id": 5}],
        "agent_id_list": ["0:10.0.0.9"],
        "unknown": {"deep": []},
        "spec": {
            "identity": {"proc_name": "p", "setup_path": "/p", "pid_path": "/p.pid", "user": "root", "index_key": "k"},
            "alive_monitor_policy": {"auto_type": 0, "crotab_rule": "@daily", "op_timeout": 0},
            "env": {"A": 1, "B": {"file": "/b"}, "C": {"value": "x", "secret": true}},
        },
    }));
    let hosts: Vec<String> =
        request.targets().expect("hosts").iter().map(|host| host.key.to_string()).collect();
    assert_eq!(hosts, ["0:10.0.0.1", "5:fe80::1", "0:10.0.0.9"], "a host that is named twice is one");
    let spec = request.spec().expect("a spec").expect("there is one");
    assert_eq!(spec.labels.get("set").map(String::as_str), Some("3"));
    assert_eq!(spec.identity.value_key.as_deref(), Some("k"));
    assert_eq!(
        (spec.monitor.auto_type, spec.monitor.op_timeout),
        (AutoType::Periodic, Some(0)),
        "0 is a value"
    );
    assert_eq!(spec.monitor.crontab_rule.as_deref(), Some("@daily"));
    assert_eq!(spec.env.get("A"), Some(&EnvValue::Text("1".into())));
    assert!(matches!(spec.env.get("C"), Some(EnvValue::Secret(_))) && !format!("{spec:?}").contains("\"x\""));
    let multi: MultiRequest =
        serde_json::from_value(json!({"proc_operate_req": [{"op_type": 0}, {"op_type": 1}]}))
            .expect("a request");
    assert_eq!(multi.proc_operate_req.iter().map(|one| one.op_type).collect::<Vec<_>>(), [Some(0), Some(1)]);
}

#[test]
fn missing_and_invalid_fields_are_named() {
    let good = json!({
        "meta": {"namespace": "gse", "name": "p"},
        "hosts": [{"ip": "10.0.0.1", "bk_cloud_id": 0}],
        "spec": {"identity": {"proc_name": "p", "setup_path": "/p", "pid_path": "/p.pid", "user": "root"}},
    });
    let wrong = |pointer: &str, value: Value| {
        let mut body = good.clone();
        *body.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = value;
        let request = request(body);
        let all = [request.process().err(), request.targets().err(), request.spec().err()];
        all.into_iter().flatten().next().map(|wrong| wrong.to_string()).unwrap_or_default()
    };
    for (pointer, value, says) in [
        ("/meta/namespace", json!(""), "meta.namespace is missing"),
        ("/meta/name", json!(null), "meta.name is missing"),
        ("/meta/name", json!("a:b"), "meta.name cannot be used: the text contains ':'"),
        ("/hosts", json!([]), "hosts is missing"),
        ("/hosts/0", json!({}), "hosts[0].ip is missing"),
        ("/hosts/0", json!({"ip": "10.0.0.1"}), "hosts[0].bk_cloud_id is missing"),
        ("/hosts/0/ip", json!("nowhere"), "hosts[0].ip is not an IP address"),
        ("/spec", json!({}), "spec.identity is missing"),
        ("/spec/identity/user", json!(""), "spec.identity.user is missing"),
        ("/spec/identity/pid_path", json!(null), "spec.identity.pid_path is missing"),
    ] {
        assert!(wrong(pointer, value).starts_with(says), "{pointer}: {}", says);
    }
}

#[test]
fn a_live_status_is_text_for_gse_and_an_object_for_job() {
    let look = json!({"ip": "10.0.0.1", "utctime": "2026-11-16 08:00:00", "timezone": 8, "process": [
        {"procname": "p", "instance": [{"pid": 77, "isAuto": true, "processName": "p", "cmdline": "./p", "startTime": "1",
          "cpuUsage": 0.5, "phyMemUsage": 1.0, "more": 1}]}]});
    for content in [look.clone(), Value::String(look.to_string())] {
        let read = LiveStatus::read(&content).expect("a look");
        assert_eq!((read.process[0].instance[0].pid, read.process[0].instance[0].is_auto), (77, true));
    }
    let empty = LiveStatus::read(&json!({"ip": "10.0.0.1", "process": []})).expect("a look");
    assert!(empty.process.is_empty());
    assert_eq!((LiveStatus::read(&json!("")), LiveStatus::read(&json!(3))), (None, None));
    let rows: StatusData = serde_json::from_value(json!({"proc_infos": [{"meta": {"namespace": "g", "name": "p", "labels": {"n": 1}},
        "host": {"ip": "10.0.0.1", "bk_cloud_id": 0}, "flag": 1, "status": 2, "report_time": 5, "new_field": []}]})).expect("rows");
    assert_eq!((rows.proc_infos[0].flag, rows.proc_infos[0].status, rows.count), (1, 2, None));
    assert_eq!(Row::new(RowCode::AGENT_MISSING, "x").code(), RowCode::AGENT_MISSING);
    let _: ProcessKey = "g/p".parse().expect("a name");
}
