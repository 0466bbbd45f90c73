//! Alerts: incidents of real processes reach real receivers once, recover, and survive restarts and dead receivers.

use std::fs;
use std::net::SocketAddr;

use serde_json::Value;

use crate::apply::{KillOnDrop, Machine};
use crate::controller_api::{address, get};
use crate::fixtures::receiver::{AlertReceiver, Behaviour};
use crate::git::Repo;
use crate::rollouts;
use crate::support::until;
use crate::watch::{read_log, running, stop_directly, watch};

/// Times of a route in a test: everything is due at once.
const SOON: &str = "wait: 0s, settle: 100ms, interval: 100ms";

/// Writes a config file with these routes; `{…}` of each route.
pub fn routes(machine: &Machine, all: &[(&str, String)]) {
    let lines: String = all.iter().map(|(name, route)| format!("  {name}: {{{route}}}\n")).collect();
    fs::write(machine.path("abide.yaml"), format!("notify:\n{lines}")).expect("a config file");
}

pub fn webhook(receiver: &AlertReceiver, more: &str) -> String {
    format!("webhook: {{url: \"{}\"}}, {SOON}{more}", receiver.url("/hooks/s3cret"))
}

/// A process that is unhealthy while the file `ill` exists.
fn sickly(machine: &Machine, name: &str) {
    let manifest = machine
        .manifest(name)
        .control("start_mode", "foreground")
        .start_cmd("exec sleep 1000")
        .spec("health", "{cmd: test ! -e ill, interval: 1, retries: 1, start_period: 1}");
    machine.declare(name, manifest);
}

fn become_ill(machine: &Machine) {
    fs::write(machine.path("ill"), "").expect("a file");
}

fn notify_status(at: SocketAddr, route: &str) -> Value {
    let status = get(at, "/api/v1/status").json();
    let routes = status["notify"].as_array().cloned().unwrap_or_default();
    routes.into_iter().find(|one| one["route"] == route).unwrap_or_default()
}

fn end(mut child: KillOnDrop) {
    child.0.kill().expect("it is killed");
    child.0.wait().expect("it ends");
}

#[test]
fn an_incident_is_one_message_and_its_recovery_is_sent_by_the_next_leader() {
    let machine = Machine::new();
    ["a", "b"].iter().for_each(|name| sickly(&machine, name));
    let (team, other) = (AlertReceiver::start(), AlertReceiver::start());
    routes(
        &machine,
        &[
            ("team", webhook(&team, ", namespaces: [web]")),
            ("other", webhook(&other, ", namespaces: [shop]")),
        ],
    );
    let first = watch(&machine, "first.log", &[]);
    until("both run", || running(&machine, &["a", "b"]));
    become_ill(&machine);
    until("it is reported", || !team.messages("unhealthy", "firing").is_empty());
    let named = || -> Vec<String> {
        let all = team.messages("unhealthy", "firing");
        let incidents = all.iter().flat_map(|message| message["incidents"].as_array().expect("a list"));
        incidents.map(|one| one["subject"].as_str().expect("a name").to_owned()).collect()
    };
    until("both are reported", || named().len() == 2);
    let message = team.messages("unhealthy", "firing").remove(0);
    assert_eq!(message["severity"], "error");
    assert!(message["title"].as_str().expect("a title").starts_with("abide local/default: "), "{message}");
    let instances = message["incidents"][0]["first_instances"].to_string();
    assert!(instances.contains("0:127.0.0.1:web:"), "{message}");
    until("the incidents are open", || notify_status(address(&machine, "first.log"), "team")["open"] == 2);
    let second = watch(&machine, "second.log", &[]);
    until("it waits", || read_log(&machine, "second.log").contains("standby"));
    end(first);
    let at = address(&machine, "second.log");
    until("the second one leads", || get(at, "/api/v1/status").json()["role"] == "leader");
    until("it knows the incidents", || notify_status(at, "team")["open"] == 2);
    fs::remove_file(machine.path("ill")).expect("a file");
    until("the recovery is sent", || !team.messages("unhealthy", "resolved").is_empty());
    until("the incidents are closed", || notify_status(at, "team")["open"] == 0);
    assert_eq!(named().len(), 2, "nothing is sent again");
    assert!(other.received().is_empty(), "another namespace");
    drop(second);
    assert!(!read_log(&machine, "second.log").contains("s3cret"));
}

#[test]
fn a_crash_loop_reaches_a_command_and_alertmanager_without_secrets() {
    let machine = Machine::new();
    let manager = AlertReceiver::start();
    let script = machine.path("receive");
    let line = format!("#!/bin/sh\ncat >> {}\n", machine.path("alerts").display());
    fs::write(&script, line).expect("a script");
    routes(
        &machine,
        &[
            ("program", format!("command: [sh, \"{}\"], {SOON}", script.display())),
            ("manager", format!("alertmanager: {{url: \"{}\"}}, {SOON}", manager.url("/"))),
        ],
    );
    machine.declare(
        "loop",
        machine
            .manifest("loop")
            .control("start_mode", "foreground")
            .start_cmd("echo t0psecret >&2; sleep 0.3; exit 7")
            .monitor("start_retries", 1)
            .monitor("start_interval", 1)
            .spec("env", "{PASSWORD: t0psecret}"),
    );
    let _watch = watch(&machine, "watch.log", &[]);
    let alerts = || fs::read_to_string(machine.path("alerts")).unwrap_or_default();
    until("the command gets it", || alerts().contains("\"kind\":\"crash_loop\""));
    let first: Value = serde_json::from_str(alerts().lines().next().expect("a line")).expect("JSON");
    assert_eq!((&first["version"], &first["owner"]), (&1.into(), &"default".into()));
    let posted = || -> Vec<Value> {
        let all = manager.received();
        assert!(all.iter().all(|one| one.path == "/api/v2/alerts"));
        all.iter().flat_map(|one| one.json().as_array().cloned().expect("a list")).collect()
    };
    let of_loop = |alert: &Value| {
        alert["labels"]["alertname"] == "AbideCrashLoop" && alert["labels"]["process"] == "web/loop"
    };
    until("Alertmanager gets it", || posted().iter().any(of_loop));
    let alert = posted().into_iter().find(|alert| of_loop(alert)).expect("an alert");
    assert_eq!(
        (&alert["labels"]["severity"], &alert["labels"]["namespace"]),
        (&"error".into(), &"web".into())
    );
    assert!(alert["startsAt"].as_str() < alert["endsAt"].as_str(), "{alert}");
    // A fixed version ends the incident: the alert ends now.
    sickly(&machine, "loop");
    until("it is over", || {
        let ends: Vec<String> = posted()
            .iter()
            .filter(|alert| of_loop(alert))
            .map(|alert| alert["endsAt"].as_str().expect("a time").to_owned())
            .collect();
        ends.last() < ends.first()
    });
    assert!(
        !alerts().contains("t0psecret") && !posted().iter().any(|one| one.to_string().contains("t0psecret"))
    );
}

/// In `abide up` the agent reaps orphans in the same process: commands of routes are not among them.
#[test]
fn a_command_of_up_is_delivered_once() {
    let machine = Machine::new();
    sickly(&machine, "a");
    become_ill(&machine);
    routes(&machine, &[("program", format!("command: [sh, -c, \"cat >> alerts\"], {SOON}"))]);
    let _up = machine.start(&["up", "m"], "up.log");
    until("it is ready", || read_log(&machine, "up.log").contains("ready http://"));
    let at = address(&machine, "up.log");
    until("it is delivered", || notify_status(at, "program")["sent"] == 1);
    fs::remove_file(machine.path("ill")).expect("a file");
    until("the recovery is delivered", || notify_status(at, "program")["sent"] == 2);
    assert_eq!(notify_status(at, "program")["failed"], 0);
    let text = fs::read_to_string(machine.path("alerts")).expect("a file");
    assert_eq!(text.lines().count(), 2, "{text}");
}

#[test]
fn drift_is_one_message_with_its_repair() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let receiver = AlertReceiver::start();
    routes(&machine, &[("ops", webhook(&receiver, "").replace("wait: 0s", "wait: 1s"))]);
    let _watch = watch(&machine, "watch.log", &[]);
    until("it converges", || read_log(&machine, "watch.log").contains("converged: 1 instance as wanted"));
    let before = machine.pids();
    stop_directly(&machine, "a");
    until("it is repaired", || machine.pids().get("a").is_some_and(|pid| *pid != before["a"]));
    until("it is reported", || !receiver.messages("drift", "resolved").is_empty());
    let message = receiver.messages("drift", "resolved").remove(0);
    assert!(
        message["title"].as_str().is_some_and(|title| title.contains("web/a drifted and repaired")),
        "{message}"
    );
    let detail = message["incidents"][0]["detail"].as_str().expect("a detail");
    assert!(detail.starts_with("repaired: ") && detail.contains("start"), "{message}");
    // A change of a manifest is not drift.
    machine.process("a", "2", "");
    until("the change is applied", || machine.effects().contains(&"start a 2".to_owned()));
    let rests = || read_log(&machine, "watch.log").matches("converged: 1 instance as wanted").count();
    until("it converges again", || rests() >= 3);
    stop_directly(&machine, "a");
    until("the next drift is reported", || receiver.messages("drift", "resolved").len() == 2);
    assert_eq!(receiver.messages("drift", "resolved").len(), 2);
}

#[test]
fn drift_that_is_not_repaired_and_budgets_are_reported() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let receiver = AlertReceiver::start();
    routes(&machine, &[("ops", webhook(&receiver, ", severity: warning"))]);
    let watching = watch(&machine, "watch.log", &["--max-restart", "0"]);
    until("it runs", || running(&machine, &["a"]));
    machine.process("a", "2", "");
    until("the budget is reported", || !receiver.messages("held_by_budget", "firing").is_empty());
    machine.process("a", "1", "");
    until("it is over", || !receiver.messages("held_by_budget", "resolved").is_empty());
    end(watching);
    let _watch = watch(&machine, "second.log", &["--heal", "no"]);
    until("it converges", || read_log(&machine, "second.log").contains("1 instance as wanted"));
    stop_directly(&machine, "a");
    until("drift is reported", || !receiver.messages("drift", "firing").is_empty());
}

#[test]
fn broken_manifests_and_a_source_that_disappears_are_reported_and_recover() {
    let repo = Repo::new();
    let machine = &repo.machine;
    machine.process("a", "1", "");
    repo.commit("first");
    let receiver = AlertReceiver::start();
    routes(machine, &[("ops", webhook(&receiver, ""))]);
    let _watch = repo.watch("watch.log", &[]);
    until("it runs", || repo.runs(&["a"]));
    fs::write(machine.path("m/z.yaml"), "kind: Process\nstrange: 1\n").expect("a file");
    repo.commit("broken");
    until("errors are reported", || !receiver.messages("manifest_errors", "firing").is_empty());
    let message = receiver.messages("manifest_errors", "firing").remove(0);
    assert!(message["text"].as_str().is_some_and(|text| text.starts_with("z.yaml:")), "{message}");
    fs::remove_file(machine.path("m/z.yaml")).expect("a file");
    repo.commit("fixed");
    until("their end is reported", || !receiver.messages("manifest_errors", "resolved").is_empty());
    let (origin, away) = (machine.path("origin.git"), machine.path("away.git"));
    fs::rename(&origin, &away).expect("a folder");
    until("the source is reported", || !receiver.messages("source_not_followed", "firing").is_empty());
    fs::rename(&away, &origin).expect("a folder");
    until("it is back", || !receiver.messages("source_not_followed", "resolved").is_empty());
}

#[test]
fn rollouts_and_rollbacks_are_reported() {
    let machine = Machine::new();
    let version = |start: &str, health: &str| rollouts::version(&machine, 2, start, health);
    version("1", "{cmd: 'true', interval: 1}");
    let receiver = AlertReceiver::start();
    routes(&machine, &[("ops", webhook(&receiver, ""))]);
    let _watch = watch(&machine, "watch.log", &[]);
    until("the rollout is reported", || receiver.messages("rollout_finished", "firing").len() == 1);
    version("2", "{cmd: 'echo t0psecret; false', interval: 1, start_period: 1, retries: 1}");
    until("the rollback is reported", || receiver.messages("rolled_back", "firing").len() == 1);
    until("the suspension is reported", || !receiver.messages("suspended", "firing").is_empty());
    let message = receiver.messages("rolled_back", "firing").remove(0);
    assert_eq!(message["incidents"][0]["subject"], "web/web");
    version("3", "{cmd: 'true', interval: 1}");
    until("the suspension is over", || !receiver.messages("suspended", "resolved").is_empty());
    until("the next rollout is reported", || receiver.messages("rollout_finished", "firing").len() == 2);
    assert!(receiver.received().iter().all(|one| !one.body.contains("t0psecret")));
}

#[test]
fn a_dead_receiver_blocks_nothing_and_is_visible() {
    let machine = Machine::new();
    sickly(&machine, "a");
    become_ill(&machine);
    let (hanging, failing) = (AlertReceiver::start(), AlertReceiver::start());
    hanging.behave(Behaviour::Hang);
    failing.behave(Behaviour::Answer("500 Internal Server Error", ""));
    routes(
        &machine,
        &[("hangs", webhook(&hanging, ", timeout: 1s")), ("fails", webhook(&failing, ", timeout: 1s"))],
    );
    let _watch = watch(&machine, "watch.log", &[]);
    let at = address(&machine, "watch.log");
    until("attempts fail", || {
        notify_status(at, "fails")["failed"].as_u64() > Some(1)
            && notify_status(at, "hangs")["failed"].as_u64() > Some(0)
    });
    assert!(notify_status(at, "fails")["error"].as_str().is_some_and(|why| why.contains("HTTP 500")));
    let metrics = get(at, "/metrics").body;
    assert!(metrics.contains("abide_notify_failing{route=\"fails\"} 1"), "{metrics}");
    assert!(metrics.contains("abide_alerts{kind=\"unhealthy\",severity=\"error\"} 1"), "{metrics}");
    until("`abide status` shows it", || {
        let (_, out, _) = machine.run(&["status"]);
        out.contains("alerts are not delivered: fails: HTTP 500")
    });
    until("it is logged", || read_log(&machine, "watch.log").contains("cannot deliver an alert"));
    // The loop goes on.
    machine.process("b", "1", "");
    until("another process runs", || running(&machine, &["b"]));
    failing.behave(Behaviour::Answer("200 OK", ""));
    until("it is delivered", || failing.messages("unhealthy", "firing").len() == 1);
    until("the route is well", || notify_status(at, "fails")["error"].is_null());
    let log = read_log(&machine, "watch.log");
    assert!(!log.contains("s3cret"), "{log}");
}

#[test]
fn ten_thousand_incidents_are_few_short_messages() {
    let machine = Machine::new();
    let hosts: String =
        (0..10_000).map(|n| format!("- {{ip: 10.1.{}.{}, bk_cloud_id: 0}}\n", n / 250, n % 250)).collect();
    let manifest = machine.manifest("many").start_cmd("exec sleep 1000").host("127.0.0.1").to_string();
    let (before, after) = manifest.split_once("hosts: [").expect("the hosts");
    let (_, after) = after.split_once("]\n").expect("the end of the hosts");
    machine.declare("many", format!("{before}hosts:\n{hosts}{after}"));
    let receiver = AlertReceiver::start();
    let url = receiver.url("/");
    routes(&machine, &[("ops", format!("webhook: {{url: \"{url}\"}}, wait: 1s"))]);
    let _watch = watch(&machine, "watch.log", &[]);
    let told = || -> u64 {
        let all = receiver.messages("host_unknown", "firing");
        all.iter().map(|message| message["total"].as_u64().expect("a number")).sum()
    };
    until("all are reported", || told() == 10_000);
    let received = receiver.received();
    assert!(received.len() <= 2, "{} messages", received.len());
    assert!(received.iter().all(|one| one.body.len() < 32 << 10));
}
