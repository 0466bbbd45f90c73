//! Conversion between request bodies and manifests: the documents' own examples, and fields that a dialect does not
//! have.

use serde_json::{Value, json};

use crate::support::{GOOD, Tree, abide, project, stderr, stdout, with};

/// The example of each document, and the dialect that speaks it.
const BODIES: [(&str, &str); 5] = [
    ("job_manage_proc.json", "job"),
    ("job_operate_process.json", "job"),
    ("job_v3_manage_proc.json", "job"),
    ("gse_operate_proc.json", "gse-v2"),
    ("gse_register_proc_info.json", "gse-v1"),
];

fn fixture(name: &str) -> String {
    let path = project().join("tests/it/fixtures").join(name);
    std::fs::read_to_string(path).expect("a fixture")
}

/// Runs convert on a text; it must succeed.
#[track_caller]
fn convert(args: &[&str], text: &str) -> String {
    let here = Tree::new::<&str>(&[]);
    let args = [&["convert", "-"], args].concat();
    let output = abide(&args, here.path(), text.as_bytes());
    assert_eq!(output.status.code(), Some(0), "{args:?}\n{text}\n{}", stderr(&output));
    stdout(&output)
}

/// What the documents call empty is not there; op_type and credentials are no part of a round trip; names that the
/// documents spell in two ways have one spelling.
fn essence(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let skipped = ["op_type", "bk_app_code", "bk_app_secret", "bk_token", "bk_username"];
            let kept = map.iter().filter(|(name, _)| !skipped.contains(&name.as_str()));
            let kept = kept.map(|(name, value)| (name.clone(), essence(value)));
            let empty = |value: &Value| {
                *value == json!("") || *value == json!({}) || *value == json!([]) || *value == json!([{}])
            };
            Value::Object(kept.filter(|(_, value)| !empty(value)).collect())
        }
        Value::Array(items) => {
            Value::Array(items.iter().map(essence).filter(|item| *item != json!({})).collect())
        }
        Value::Number(n) => json!(n.as_f64()),
        other => other.clone(),
    }
}

#[test]
fn every_documented_body_becomes_a_valid_manifest_and_the_same_body_again() {
    for (name, dialect) in BODIES {
        let body = fixture(name);
        let manifest = convert(&[], &body);
        let tree = Tree::new(&[("m.yaml", &manifest)]);
        assert_eq!(tree.problems(), [] as [&str; 0], "{manifest}");
        let back: Value =
            serde_json::from_str(&convert(&["--to", dialect, "--strict"], &manifest)).expect("JSON");
        let mut original: Value = serde_json::from_str(&body).expect("JSON");
        if name == "job_operate_process.json" {
            // Left out there; what it is taken as is written.
            original["process_infos"][0]["type"] = json!(1);
        }
        assert_eq!(essence(&back), essence(&original), "{name}");
        // Straight from the body, without a manifest in between.
        let direct: Value =
            serde_json::from_str(&convert(&["--to", dialect, "--strict"], &body)).expect("JSON");
        assert_eq!(direct, back, "{name}");
    }
}

#[test]
fn gse_bodies_are_manifests_as_they_are() {
    for name in ["gse_operate_proc.json", "gse_register_proc_info.json"] {
        for file in ["a.json", "a.yaml"] {
            let loaded = Tree::new(&[(file, fixture(name))]).load();
            assert_eq!(
                (loaded.errors(), loaded.desired.instances.len()),
                (0, 1),
                "{name} {file}: {:?}",
                loaded.problems
            );
        }
    }
}

#[test]
fn the_state_comes_from_the_operation() {
    let state = |body: &Value| {
        let manifest: Value = serde_yaml::from_str(&convert(&[], &body.to_string())).expect("YAML");
        manifest["state"].as_str().unwrap_or("running").to_owned()
    };
    let of = |fixture_name: &str, op: i64, auto_type: i64| {
        let mut body: Value = serde_json::from_str(&fixture(fixture_name)).expect("JSON");
        body["op_type"] = json!(op);
        match body.get_mut("process_infos") {
            Some(infos) => infos[0]["type"] = json!(auto_type),
            None => body["spec"]["alive_monitor_policy"]["auto_type"] = json!(auto_type),
        }
        state(&body)
    };
    for name in ["gse_operate_proc.json", "job_operate_process.json"] {
        for (op, expected) in [
            (0, "running"),
            (2, "running"),
            (3, "running"),
            (7, "running"),
            (8, "running"),
            (1, "stopped"),
            (9, "stopped"),
            (4, "unhosted"),
        ] {
            assert_eq!(of(name, op, 1), expected, "{name} {op}");
        }
        assert_eq!(of(name, 4, 2), "stopped", "a one-shot is not kept running: {name}");
    }
    assert_eq!(of("job_manage_proc.json", 1, 1), "running");
    assert_eq!(of("job_manage_proc.json", 2, 1), "unhosted");
    assert_eq!(of("job_manage_proc.json", 2, 2), "stopped");
}

#[test]
fn omitted_job_fields_get_documented_defaults() {
    let body = |extra: Value| {
        let mut process = json!({"proc_name": "p", "setup_path": "/p", "pid_path": "/p.pid", "contact": "me", "ip_list": [{"bk_cloud_id": 0, "ip": "10.0.0.1"}]});
        process.as_object_mut().expect("a map").extend(extra.as_object().expect("a map").clone());
        json!({"bk_biz_id": 7, "op_type": 0, "process_infos": [process]}).to_string()
    };
    let read = |body: &str| -> Value { serde_yaml::from_str(&convert(&[], body)).expect("YAML") };
    let plain = read(&body(json!({"start_cmd": "./p ${HOME}"})));
    let labels = json!({"bk_job_api": "operate_process"});
    assert_eq!(plain["meta"], json!({"namespace": "job-7", "name": "p", "labels": labels}));
    assert_eq!(plain["spec"]["identity"]["user"], "root");
    assert_eq!(plain["spec"]["monitor_policy"]["auto_type"], 1);
    assert_eq!(
        plain["spec"]["control"]["start_cmd"], "./p $${HOME}",
        "the shell's own variables stay the shell's"
    );
    assert_eq!(
        read(&body(json!({"cycle_time": 60, "start_cmd": "x"})))["spec"]["monitor_policy"]["auto_type"],
        0
    );
    assert_eq!(read(&body(json!({"account": "app", "value_key": "k"})))["meta"]["name"], "k");
    let here = Tree::new::<&str>(&[]);
    let output = abide(&["convert", "-"], here.path(), body(json!({})).as_bytes());
    assert!(stderr(&output).contains("`type` is unset; auto_type 1 is assumed"), "{}", stderr(&output));
}

#[test]
fn unsupported_fields_are_listed_and_refused_with_strict() {
    let rich = with("spec:", "depends_on: []\nprotect: [stop]\nspec:")
        .replace("./api}", "./api, start_mode: foreground, version_cmd: v}")
        .replace("auto_type: 1", "auto_type: 1, op_timeout: 9, start_retries: 2")
        + "  resource: {cpu: 12.5, fd: 10}\n  env: {TOKEN: {value: hunter2, secret: true}}\n  job: {func_id: f}\n";
    let here = Tree::new(&[("a.yaml", &rich)]);
    for (dialect, unsaid, said) in [
        (
            "gse-v1",
            &["monitor_policy.op_timeout", "env", "control.start_mode", "job.func_id", "protect"][..],
            &["resource", "version_cmd", "bk_supplier_id"][..],
        ),
        (
            "gse-v2",
            &["resource.cpu", "resource.fd", "env", "control.start_mode", "job.func_id", "protect"][..],
            &["op_timeout"][..],
        ),
        (
            "job",
            &[
                "resource.fd",
                "resource.cpu",
                "env",
                "control.version_cmd",
                "monitor_policy.start_retries",
                "meta.namespace",
                "protect",
            ][..],
            &["func_id", "op_timeout", "account"][..],
        ),
    ] {
        let output = abide(&["convert", "a.yaml", "--to", dialect], here.path(), b"");
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        let listed = stderr(&output);
        for what in unsaid {
            assert!(
                listed.contains(&format!("not converted: web/api: {what}")),
                "{dialect} {what}:\n{listed}"
            );
        }
        for what in said {
            assert!(stdout(&output).contains(what), "{dialect} {what}: {}", stdout(&output));
        }
        assert!(!(stdout(&output) + &listed).contains("hunter2"), "a secret goes nowhere");
        let strict = abide(&["convert", "a.yaml", "--to", dialect, "--strict"], here.path(), b"");
        assert_eq!(strict.status.code(), Some(65), "{dialect}");
    }
}

#[test]
fn hosts_that_differ_only_in_address_share_a_body() {
    let hosts = "{ip: 10.0.0.1, bk_cloud_id: 0}, {ip: 10.0.0.2, bk_cloud_id: 0}";
    let count = |text: &str| {
        let bodies = convert(&["--to", "gse-v2"], text);
        serde_json::Deserializer::from_str(&bodies)
            .into_iter::<Value>()
            .map(|body| body.expect("JSON")["hosts"].as_array().map_or(0, Vec::len))
            .collect::<Vec<_>>()
    };
    let two = with("{ip: 10.0.0.1, bk_cloud_id: 0}", hosts);
    assert_eq!(count(&two), [2]);
    assert_eq!(count(&two.replace("./api", "\"./api ${host.ip}\"")), [1, 1], "they differ after all");
}

#[test]
fn an_invalid_body_is_refused_with_its_location() {
    let here = Tree::new::<&str>(&[]);
    let refused = |text: &str| {
        let output = abide(&["convert", "-"], here.path(), text.as_bytes());
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(65), ""), "{text}");
        stderr(&output)
    };
    assert!(
        refused("{\"process_infos\": [{\"proc_nam\": 1}]}")
            .contains("<stdin>:1:21: process_infos[0] has no field \"proc_nam\"")
    );
    assert!(refused("{\"process_infos\": {}}").contains("E0103"));
    assert!(refused("{\"meta\": ").contains("E0101"));
    assert!(
        refused(&with("/opt/api", "opt").replace("apiVersion: abide/v1\nkind: Process\n", ""))
            .contains("E0202")
    );
    let incomplete = "{\"bk_biz_id\":1,\"op_type\":0,\"process_infos\":[{\"proc_name\":\"p\",\"ip_list\":[{\"bk_cloud_id\":0,\"ip\":\"10.0.0.1\"}]}]}";
    let output = abide(&["convert", "-"], here.path(), incomplete.as_bytes());
    assert!(
        output.status.success() && stderr(&output).contains("spec.identity.pid_path is missing"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_manifest_stays_what_it_is() {
    let again = convert(&[], GOOD);
    let (a, b) = (Tree::new(&[("a.yaml", GOOD)]).load(), Tree::new(&[("a.yaml", &again)]).load());
    let specs = |loaded: &abide::manifest::Loaded| {
        loaded.desired.instances.iter().map(|(k, w)| (k.clone(), w.spec.clone())).collect::<Vec<_>>()
    };
    assert_eq!(specs(&a), specs(&b));
}

/// A JOB body of one process.
fn job(head: Value, process: Value) -> String {
    let mut body = head;
    let mut whole = json!({"proc_name": "p", "setup_path": "/p", "pid_path": "/p.pid", "start_cmd": "./p", "type": 1, "ip_list": [{"bk_cloud_id": 0, "ip": "10.0.0.1"}]});
    whole.as_object_mut().expect("a map").extend(process.as_object().expect("a map").clone());
    body["process_infos"] = json!([whole]);
    body.to_string()
}

#[test]
fn a_job_body_comes_back_for_the_call_it_was_made_for() {
    let operate = |op: i64, extra: Value| job(json!({"bk_biz_id": 1, "op_type": op}), extra);
    // start, stop, unhost: what the manifest's state leads back to. The others are ways to the same state.
    for (op, back) in [(0, 0), (1, 1), (4, 4), (3, 0), (7, 0), (9, 1)] {
        for extra in
            [json!({"contact": "me", "account": "root"}), json!({"contact": "me"}), json!({"account": "app"})]
        {
            let body: Value =
                serde_json::from_str(&convert(&["--to", "job", "--strict"], &operate(op, extra.clone())))
                    .expect("JSON");
            assert_eq!(body["op_type"], back, "{op} {extra}");
            assert_eq!(body["process_infos"][0].get("contact"), extra.get("contact"), "{op} {extra}");
            assert!(body["process_infos"][0].get("proc_owner").is_none(), "{op} {extra}");
        }
    }
    for (op, kind) in [(1, 1), (2, 1), (2, 2)] {
        let manage = job(
            json!({"bk_scope_type": "biz_set", "bk_scope_id": "9", "op_type": op}),
            json!({"proc_owner": "me", "type": kind}),
        );
        let body: Value =
            serde_json::from_str(&convert(&["--to", "job", "--strict"], &manage)).expect("JSON");
        assert_eq!(
            (&body["op_type"], &body["process_infos"][0]["proc_owner"]),
            (&json!(op), &json!("me")),
            "{op} {kind}"
        );
        assert_eq!((&body["bk_scope_type"], &body["bk_scope_id"]), (&json!("biz_set"), &json!("9")));
        assert!(body["process_infos"][0].get("account").is_none());
    }
    let forced = convert(&["--to", "job", "--job-api", "operate_process"], &fixture("job_manage_proc.json"));
    assert!(forced.contains("\"contact\""), "{forced}");
}

#[test]
fn two_instances_with_one_result_key_never_share_a_call() {
    let text = with("namespace: web", "namespace: job-1")
        .replace("spec:", "instances: 2\nspec:")
        .replace("/run/api.pid", "/run/api.pid, value_key: \"api_${instance}\"");
    let bodies = convert(&["--to", "job"], &text);
    let counts: Vec<_> = serde_json::Deserializer::from_str(&bodies)
        .into_iter::<Value>()
        .map(|b| b.expect("JSON")["process_infos"].as_array().map_or(0, Vec::len))
        .collect();
    assert_eq!(counts, [1, 1]);
}

#[test]
fn errors_in_a_job_body_have_their_location() {
    let here = Tree::new::<&str>(&[]);
    for (process, code) in [
        (json!({"type": 7}), "E0205"),
        (json!({"cpu_lmt": 150}), "E0204"),
        (json!({"cycle_time": -5}), "E0205"),
        (json!({"ip_list": [{"bk_cloud_id": 0, "ip": "x"}]}), "E0203"),
        (json!({"ip_list": [{"ip": "10.0.0.1"}]}), "E0104"),
        (json!({"ip_list": [{"bk_cloud_id": -1, "ip": "10.0.0.1"}]}), "E0205"),
    ] {
        let output = abide(
            &["convert", "-"],
            here.path(),
            job(json!({"bk_biz_id": 1, "op_type": 0}), process.clone()).as_bytes(),
        );
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(65), ""), "{process}");
        assert!(stderr(&output).contains(code), "{process}: {}", stderr(&output));
    }
}

#[test]
fn several_json_values_convert_as_they_validate() {
    let value: Value = serde_yaml::from_str(GOOD).expect("YAML");
    let other: Value =
        serde_yaml::from_str(&GOOD.replace("name: api}", "name: b}").replace("/opt/api", "/opt/b"))
            .expect("YAML");
    let tree = Tree::new(&[("two.json", format!("{value}\n{other}"))]);
    assert_eq!(tree.problems(), [] as [&str; 0]);
    let output = abide(&["convert", "two.json", "--to", "gse-v2"], tree.path(), b"");
    assert_eq!(
        serde_json::Deserializer::from_str(&stdout(&output)).into_iter::<Value>().count(),
        2,
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_bare_document_with_abide_fields_stays_whole() {
    let bare = with("apiVersion: abide/v1\nkind: Process\n", "")
        .replace("spec:", "state: stopped\nprotect: [delete]\nspec:")
        .replace("./api", "\"./api ${name}\"");
    let again = convert(&[], &bare);
    for part in ["state: stopped", "protect: [delete]", "./api ${name}"] {
        assert!(again.contains(part) && !again.contains("$${"), "{again}");
    }
}

#[test]
fn the_state_that_a_registry_cannot_hold_is_listed() {
    let tree = Tree::new(&[(
        "a.yaml",
        with("spec:", "state: stopped\nspec:").replace("bk_cloud_id: 0", "bk_cloud_id: 0, bk_supplier_id: 0"),
    )]);
    let output = abide(&["convert", "a.yaml", "--to", "gse-v1", "--strict"], tree.path(), b"");
    assert!(
        output.status.code() == Some(65)
            && stderr(&output).contains("not converted: web/api: state: stopped"),
        "{}",
        stderr(&output)
    );
    assert_eq!(stdout(&output), "", "nothing is written before it is refused");
}

#[test]
fn a_tree_whose_defaults_reach_one_directory_is_not_flattened() {
    let defaults = "kind: Defaults\nspec: {control: {stop_cmd: A}}\n".to_owned();
    let other = GOOD.replace("name: api}", "name: b}").replace("/opt/api", "/opt/b");
    let tree =
        Tree::new(&[("a/d.yaml", defaults.clone()), ("a/p.yaml", GOOD.to_owned()), ("b/p.yaml", other)]);
    let output = abide(&["convert", "."], tree.path(), b"");
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(64), ""), "{}", stderr(&output));
    let bodies = stdout(&abide(&["convert", ".", "--to", "gse-v2"], tree.path(), b""));
    assert_eq!(bodies.matches("stop_cmd").count(), 1, "{bodies}");
    let flat = Tree::new(&[("d.yaml", defaults), ("p.yaml", GOOD.to_owned())]);
    assert_eq!(abide(&["convert", "."], flat.path(), b"").status.code(), Some(0));
}

#[test]
fn two_processes_of_one_program_stay_separate() {
    let process = |path: &str| json!({"proc_name": "a", "setup_path": path, "pid_path": "/p", "start_cmd": "s", "type": 1, "contact": "me", "account": "app", "ip_list": [{"bk_cloud_id": 0, "ip": "10.0.0.1"}]});
    let body =
        json!({"bk_biz_id": 1, "op_type": 0, "process_infos": [process("/x"), process("/y"), process("/z")]});
    let manifest = convert(&[], &body.to_string());
    let tree = Tree::new(&[("m.yaml", &manifest)]);
    assert_eq!((tree.problems().len(), tree.load().desired.instances.len()), (0, 3), "{manifest}");
    let back: Value = serde_json::from_str(&convert(&["--to", "job", "--strict"], &manifest)).expect("JSON");
    assert_eq!(essence(&back), essence(&body));
}

#[test]
fn names_are_found_whatever_a_body_repeats() {
    let process = |name: &str, path: String, hosts: &[&str]| json!({"proc_name": name, "setup_path": path, "pid_path": "/p", "start_cmd": "s", "type": 1, "account": "app", "ip_list": hosts.iter().map(|ip| json!({"bk_cloud_id": 0, "ip": ip})).collect::<Vec<_>>()});
    let instances = |processes: Vec<Value>| {
        let manifest =
            convert(&[], &json!({"bk_biz_id": 1, "op_type": 0, "process_infos": processes}).to_string());
        let tree = Tree::new(&[("m.yaml", &manifest)]);
        assert_eq!(tree.problems(), [] as [&str; 0]);
        tree.load().desired.instances.len()
    };
    // One host named twice is one host.
    assert_eq!(instances(vec![process("a", "/x".into(), &["10.0.0.1", "10.0.0.1"])]), 1);
    // The longest names still find another one.
    let long = "n".repeat(128);
    assert_eq!(instances((0..3).map(|n| process(&long, format!("/x{n}"), &["10.0.0.1"])).collect()), 3);
    // A name that seems numbered is unchanged.
    assert_eq!(
        instances(vec![
            process("a-2", "/x".into(), &["10.0.0.1"]),
            process("a", "/y".into(), &["10.0.0.1"]),
            process("a", "/z".into(), &["10.0.0.1"])
        ]),
        3
    );
    assert_eq!(instances((0..2_000).map(|n| process("a", format!("/x{n}"), &["10.0.0.1"])).collect()), 2_000);
}
