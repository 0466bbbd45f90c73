//! Routes of alerts: test messages, invalid and untrusted config files, and the examples.

use std::fs;

use serde_json::Value;

use crate::alerts::{routes, webhook};
use crate::apply::Machine;
use crate::controller_api::{address, get};
use crate::fixtures::receiver::{AlertReceiver, Behaviour};
use crate::support::{project, until};
use crate::watch::{read_log, watch};

#[test]
fn a_test_message_shows_the_answer_of_the_receiver() {
    let machine = Machine::new();
    let receiver = AlertReceiver::start();
    let url = receiver.url("/send?access_token=t");
    fs::write(machine.path("secret"), "SECabc\n").expect("a file");
    let feishu = project().join("examples/notify/feishu.json");
    let of = |more: &str| format!("webhook: {{url: \"{url}\", {more}}}");
    routes(
        &machine,
        &[
            ("plain", of("headers: {X-Key: {file: secret}}")),
            ("dingtalk", of("sign: {scheme: dingtalk, secret: {file: secret}}")),
            (
                "feishu",
                of(&format!(
                    "template: {}, sign: {{scheme: feishu, secret: {{file: secret}}}}",
                    feishu.display()
                )),
            ),
            ("program", "command: [sh, -c, \"cat > got; echo thanks\"]".to_owned()),
            ("missing", "command: [/does/not/exist]".to_owned()),
        ],
    );
    let test = |route: &str| machine.run(&["notify", "test", route]);
    let (code, out, err) = test("plain");
    assert!(code == 0 && out.contains("HTTP 200: ok") && !out.contains("access_token"), "{code} {out} {err}");
    let last = || receiver.received().last().cloned().expect("a request");
    assert!(last().head.contains("SECabc") && last().json()["title"].is_string());
    assert_eq!(test("dingtalk").0, 0);
    let path = last().path;
    assert!(path.starts_with("/send?access_token=t&timestamp=") && path.contains("&sign="), "{path}");
    assert_eq!(test("feishu").0, 0);
    let body = last().json();
    assert!(
        body["sign"].as_str().is_some_and(|sign| sign.len() == 44) && body["msg_type"] == "post",
        "{body}"
    );
    let (code, out, _) = test("program");
    assert!(code == 0 && out.contains("exit 0: thanks"), "{out}");
    let got: Value =
        serde_json::from_str(&fs::read_to_string(machine.path("got")).expect("a file")).expect("JSON");
    assert_eq!((&got["kind"], &got["status"]), (&"unhealthy".into(), &"firing".into()));
    for (answer, says) in [
        (Behaviour::Answer("500 Internal Server Error", ""), "HTTP 500"),
        (Behaviour::Answer("200 OK", "{\"errcode\":310000,\"errmsg\":\"sign not match\"}"), "sign not match"),
        (Behaviour::Answer("302 Found", ""), "redirects are never followed"),
    ] {
        receiver.behave(answer);
        let (code, out, err) = test("plain");
        assert!(code == 1 && err.contains(says), "{code} {out} {err}");
        assert!(!err.contains("access_token"), "{err}");
    }
    let (code, _, err) = test("missing");
    assert!(code == 1 && err.contains("cannot run /does/not/exist"), "{err}");
    let (code, _, err) = test("plane");
    assert!(code == 64 && err.contains("routes: dingtalk, feishu, missing, plain, program"), "{err}");
    let (code, out, _) = machine.run(&["notify", "list"]);
    assert!(code == 0 && out.contains("program: command sh; all namespaces"), "{out}");
    let (_, out, _) = machine.run(&["doctor"]);
    assert!(out.contains("alert routes: dingtalk, feishu, missing, plain, program"), "{out}");
}

#[test]
fn an_invalid_or_untrusted_route_is_an_error_before_anything_starts() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    fs::write(machine.path("bad.json"), "{\"m\": \"{{titel}}\"}").expect("a file");
    let pipe = std::process::Command::new("mkfifo").arg(machine.path("pipe.json")).status();
    assert!(pipe.expect("mkfifo").success());
    let url = "url: \"https://hooks.example/s3cret\"";
    for (route, says) in [
        (format!("webhook: {{{url}, template: bad.json}}"), "unknown placeholder {{titel}}"),
        (format!("webhook: {{{url}, template: pipe.json}}"), "not a regular file"),
        (
            "webhook: {url: \"http://hooks.example/s3cret\"}".to_owned(),
            "refusing plain http to hooks.example",
        ),
        ("wait: 5s".to_owned(), "one of webhook, command and alertmanager"),
        ("command: []".to_owned(), "command is empty"),
        ("command: [x], wait: soon".to_owned(), "wait: \"soon\" is not a duration"),
        ("command: [x], alerts: [unhealthi]".to_owned(), "unhealthi"),
        ("command: [x], shell: true".to_owned(), "unknown field"),
        (format!("alertmanager: {{{url}, template: bad.json}}"), "Alertmanager has its own templates"),
        (format!("webhook: {{{url}, sign: {{scheme: feishu, secret: {{env: HOME}}}}}}"), "needs a template"),
        (format!("webhook: {{{url}, sign: {{scheme: other, secret: {{env: HOME}}}}}}"), "dingtalk or feishu"),
        ("webhook: {url: {env: ABSENT_URL}}".to_owned(), "the variable ABSENT_URL is not set"),
    ] {
        routes(&machine, &[("ops", route.clone())]);
        let (code, out, err) = machine.run(&["watch", "m", "--listen", "127.0.0.1:0"]);
        assert!(code == 64 && err.contains(says) && !err.contains("s3cret"), "{route}: {code} {out} {err}");
    }
    assert!(machine.effects().is_empty());
    let (code, out, _) = machine.run(&["doctor"]);
    assert!(code == 1 && out.contains("the variable ABSENT_URL is not set"), "{out}");
    // A file that is only found decides neither what runs nor where messages go.
    routes(&machine, &[("ops", "command: [touch, ran]".to_owned())]);
    let mut command = machine.command(&["notify", "test", "ops"]);
    let output = command.env_remove("ABIDE_CONFIG").output().expect("it runs");
    let err = crate::support::stderr(&output);
    assert!(output.status.code() == Some(64) && err.contains("abide config trust"), "{err}");
    assert!(!machine.path("ran").exists());
}

#[test]
fn the_examples_are_valid_and_name_existing_metrics() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let receiver = AlertReceiver::start();
    fs::write(machine.path("secret"), "SECabc\n").expect("a file");
    let folder = project().join("examples/notify");
    let templates: Vec<_> = fs::read_dir(&folder)
        .expect("a folder")
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|end| end == "json"))
        .collect();
    assert!(templates.len() >= 4);
    for template in &templates {
        let sign = match template.ends_with("feishu.json") {
            true => ", sign: {scheme: feishu, secret: {file: secret}}",
            false => "",
        };
        let (url, file) = (receiver.url("/"), template.display());
        routes(&machine, &[("it", format!("webhook: {{url: \"{url}\", template: {file}{sign}}}"))]);
        let (code, out, err) = machine.run(&["notify", "test", "it"]);
        assert_eq!(code, 0, "{file}: {out} {err}");
        let body = receiver.received().last().cloned().expect("a request");
        assert!(body.json().is_object() && body.body.contains("test/message"), "{}", body.body);
    }
    // The config file of the examples, with its variables.
    let mut command = machine.command(&["notify", "list", "--config"]);
    command.arg(folder.join("abide.yaml"));
    for (name, value) in [
        ("SLACK", "URL"),
        ("WECOM", "URL"),
        ("DINGTALK", "URL"),
        ("FEISHU", "URL"),
        ("DINGTALK", "SECRET"),
        ("FEISHU", "SECRET"),
    ] {
        command.env(format!("{name}_{value}"), "https://hooks.example/x");
    }
    let output = command.output().expect("it runs");
    assert_eq!(output.status.code(), Some(0), "{}", crate::support::stderr(&output));
    // Every metric that the rules and the dashboard name exists.
    routes(&machine, &[("it", webhook(&receiver, ""))]);
    let _watch = watch(&machine, "watch.log", &[]);
    until("it converges", || read_log(&machine, "watch.log").contains("converged"));
    let metrics = get(address(&machine, "watch.log"), "/metrics").body;
    let known: Vec<&str> = metrics
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
        .filter_map(|rest| rest.split(' ').next())
        .collect();
    let rules = fs::read_to_string(project().join("examples/prometheus/abide-rules.yaml")).expect("rules");
    let parsed: Value = serde_yaml::from_str(&rules).expect("YAML");
    let rules: Vec<&str> = parsed["groups"][0]["rules"]
        .as_array()
        .expect("rules")
        .iter()
        .map(|rule| rule["expr"].as_str().expect("an expression"))
        .collect();
    let board = fs::read_to_string(project().join("examples/grafana/abide-dashboard.json")).expect("a board");
    let board: Value = serde_json::from_str(&board).expect("JSON");
    let panels = board["panels"].as_array().expect("panels").iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().expect("targets"));
    let queries = targets.map(|target| target["expr"].as_str().expect("an expression"));
    let mut count = 0;
    for query in rules.into_iter().chain(queries) {
        let words = query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        for name in words.filter(|word| word.starts_with("abide_")) {
            let family = name.strip_suffix("_bucket").unwrap_or(name);
            assert!(known.contains(&family), "{name} of {query} is not in {known:?}");
            count += 1;
        }
    }
    assert!(count > 25, "{count}");
}
