//! Restart policies with a real gateway and agent: `always`, `on-failure` and `never`; a completed process stays stopped.

use serde_json::Value;

use crate::dialects::Fleet;
use crate::support::until;
use crate::system::{is_alive, kill, whoami};

/// A foreground process with a restart rule. Each launch leaves a line in `effects`.
fn write(fleet: &Fleet, command: &str, restart: &str, check_secs: u32) {
    let here = fleet.system.folder.path().display();
    let text = format!(
        "apiVersion: abide/v1\nkind: Process\nmeta: {{namespace: web, name: job}}\n\
         hosts: [{{ip: 127.0.0.1, bk_cloud_id: 0}}]\nspec:\n\
         \x20 identity: {{proc_name: sh, setup_path: {here}, pid_path: {here}/run/job.pid, value_key: job, user: {user}}}\n\
         \x20 monitor_policy: {{auto_type: 1, start_check_secs: {check_secs}, start_interval: 1}}\n\
         \x20 control: {{start_mode: foreground, start_cmd: \"echo start >> effects; {command}\"}}\n\
         \x20 restart: {restart}\n",
        user = whoami(),
    );
    std::fs::write(fleet.path("m/job.yaml"), text).expect("a file");
}

fn is_completed(fleet: &Fleet) -> bool {
    let row = fleet.row("job");
    row["completed"] == true && row["running"] == false
}

/// `apply` plans nothing, and the process is not launched again.
fn stays_as_it_is(fleet: &Fleet, launches: usize) {
    let (code, out, err) = fleet.apply(&[]);
    assert_eq!((code, out.contains("Nothing to do")), (0, true), "{out}{err}");
    assert_eq!(fleet.effects().len(), launches, "{}", fleet.system.log());
    let (code, out, err) = fleet.run(&["status", "--check"]);
    assert_eq!(code, 0, "{out}{err}");
}

fn message(row: &Value) -> &str {
    row["message"].as_str().unwrap_or_default()
}

#[test]
fn on_failure_restarts_failures_and_leaves_a_success_alone() {
    let mut fleet = Fleet::new("abide");
    write(&fleet, "read go < fifo; exit $go", "{policy: on-failure, success_codes: [3]}", 0);
    let fifo = fleet.path("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().expect("mkfifo runs");
    assert!(made.success());
    let end_with = |code: &str| std::fs::write(&fifo, format!("{code}\n")).expect("it is read");
    fleet.well("a start", &[]);
    end_with("7");
    until("a failure is restarted", || fleet.effects().len() == 2);
    let pid = || fleet.pid("job").filter(|_| fleet.row("job")["running"] == true);
    until("it runs", || pid().is_some_and(is_alive));
    let first = pid();
    kill(first.expect("a pid"), "KILL");
    until("a killed process is restarted", || pid() != first && fleet.effects().len() == 3);
    end_with("3");
    until("it completed", || is_completed(&fleet));
    let row = fleet.row("job");
    assert_eq!((&row["hosted"], &row["health"]), (&true.into(), &"Healthy".into()), "{row:#}");
    assert_eq!(message(&row), "exited with 3; restart policy on-failure does not restart it");
    stays_as_it_is(&fleet, 3);
    // A killed agent has it in its folder.
    fleet.system.kill_agent();
    fleet.system.start_agent();
    let (code, out, err) = fleet.run(&["get", "processes", "-o", "json"]);
    assert_eq!(code, 0, "{out}{err}");
    assert!(is_completed(&fleet), "{:#}", fleet.row("job"));
    stays_as_it_is(&fleet, 3);
    // An explicit start, and another spec, run it again.
    let (code, out, err) = fleet.run(&["start", "web/job"]);
    assert_eq!(code, 0, "{out}{err}");
    assert_eq!(fleet.run(&["release", "web/job"]).0, 0);
    end_with("0");
    until("it completed again", || is_completed(&fleet));
    stays_as_it_is(&fleet, 4);
    write(&fleet, "read go < fifo; exit $go; :", "{policy: on-failure}", 0);
    fleet.well("another spec", &[]);
    end_with("0");
    until("it ran again", || is_completed(&fleet) && fleet.effects().len() == 5);
}

#[test]
fn never_restarts_nothing_and_reports_a_failure() {
    let mut fleet = Fleet::new("abide");
    write(&fleet, "exec sleep 1000", "never", 0);
    fleet.well("a start", &[]);
    kill(fleet.pid("job").expect("a pid"), "KILL");
    until("it completed", || is_completed(&fleet));
    let row = fleet.row("job");
    assert_eq!(row["health"], "Failed", "{row:#}");
    assert_eq!(message(&row), "killed by signal 9; restart policy never does not restart it");
    fleet.system.kill_agent();
    fleet.system.start_agent();
    let (_, out, err) = fleet.apply(&[]);
    assert!(out.contains("Nothing to do"), "{out}{err}");
    assert_eq!(fleet.effects().len(), 1, "{}", fleet.system.log());
}

#[test]
fn always_restarts_a_success() {
    let fleet = Fleet::new("abide");
    write(&fleet, "until test -e go; do sleep 0.01; done; rm go; exit 0", "always", 0);
    fleet.well("a start", &[]);
    std::fs::write(fleet.path("go"), "").expect("a file");
    until("it is restarted", || fleet.effects().len() == 2 && fleet.row("job")["running"] == true);
    assert_eq!(fleet.row("job")["completed"], Value::Null);
}

/// A process that does its work within the start check has started well.
#[test]
fn a_success_within_the_start_check_is_a_good_start() {
    let fleet = Fleet::new("abide");
    write(&fleet, "exit 0", "on-failure", 5);
    fleet.well("a start", &[]);
    assert!(is_completed(&fleet), "{:#}", fleet.row("job"));
    stays_as_it_is(&fleet, 1);
    write(&fleet, "exit 1", "on-failure", 5);
    let (code, out, err) = fleet.apply(&[]);
    assert_ne!(code, 0, "{out}{err}");
}

/// `attempts` takes the place of `start_retries`: after them the process counts as failed.
#[test]
fn attempts_bound_the_relaunches() {
    let fleet = Fleet::new("abide");
    write(
        &fleet,
        "test $(grep -c . effects) -gt 1 || exec sleep 1000; exit 1",
        "{policy: on-failure, attempts: 1}",
        0,
    );
    fleet.well("a start", &[]);
    kill(fleet.pid("job").expect("a pid"), "KILL");
    until("it failed", || fleet.row("job")["health"] == "Failed");
    assert_eq!(fleet.effects().len(), 2);
}
