//! Requests of JOB over a process that has an owner and labels: JOB knows neither, so both stay.

use serde_json::{Value, json};

use crate::fixtures::system::{System, whoami};
use crate::support::until;

#[test]
fn a_start_by_job_keeps_owner_and_labels() {
    let system = System::new();
    let mut spec = system.spec("p", "exec sleep 1000");
    // JOB names a process by folder and program.
    spec["identity"].as_object_mut().expect("an identity").remove("value_key");
    let body = json!({"meta": {"namespace": "web", "name": "p",
                               "labels": {"tier": "front", "abide_owner": "team"}},
                      "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0}], "spec": spec});
    let answer = system.server.gse("register_proc_info", body);
    assert_eq!(answer["code"], 0, "{answer}");
    let before = system.process("p");
    assert_eq!((&before["owner"], &before["labels"]["tier"]), (&"team".into(), &"front".into()), "{before}");
    let job = json!({"bk_biz_id": 1, "op_type": 0, "process_infos": [{
        "setup_path": system.folder.path(), "proc_name": "p", "account": whoami(),
        "pid_path": system.path("run/p.pid"), "type": 1,
        "start_cmd": "cp /bin/sleep p; mkdir -p run; ./p 1000 & echo $! > run/p.pid",
        "ip_list": [{"bk_cloud_id": 0, "ip": "127.0.0.1"}]}]});
    let answer = system.server.call("POST", "/api/c/compapi/v2/job/operate_process/", job);
    let id = answer["data"]["bk_gse_taskid"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned();
    let ask =
        || system.server.call("POST", "/api/c/compapi/v2/job/get_proc_result/", json!({"bk_gse_taskid": id}));
    let mut result = Value::Null;
    until("its rows are final", || {
        result = ask();
        result["data"]["status"] == 1
    });
    let codes = result["data"]["result"].as_object().expect("rows").values().map(|row| &row["error_code"]);
    assert!(codes.clone().all(|code| *code == 0), "{result}");
    let after = system.process("p");
    assert_eq!(
        (&after["owner"], &after["labels"]["tier"]),
        (&"team".into(), &"front".into()),
        "{after} {result}"
    );
}
