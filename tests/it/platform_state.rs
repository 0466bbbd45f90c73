//! State for platforms that return no specs and no call ids: rollbacks, the location of the state, and recorded
//! specs.

use std::process::Stdio;

use serde_json::Value;

use crate::dialects::{Daemon, Fleet};
use crate::server::Server;
use crate::support::{command, key_file, stderr, until};
use crate::system::{APPS, is_alive};

#[test]
fn a_failed_rollout_is_rolled_back() {
    for dialect in ["abide", "gse-v2"] {
        let fleet = Fleet::new(dialect);
        let several = "instances: 3\nrollout: {batch: 1, auto_rollback: true}\n";
        let mut daemon = Daemon { more: several.to_owned(), ..Daemon::new("x") };
        let write = |daemon: &Daemon| fleet.write_several(daemon);
        write(&daemon);
        fleet.well("three of a kind", &[]);
        let pids = || ["x_1", "x_2", "x_3"].map(|name| fleet.pid(name));
        let first = pids();
        assert!(first.iter().all(|pid| pid.is_some_and(is_alive)), "{dialect}");
        // The next version does not come up.
        daemon.version = "2; exit 1";
        write(&daemon);
        let (code, out, err) = fleet.apply(&[]);
        assert_eq!(code, 7, "{dialect}: {out}{err}");
        assert!(err.contains("rolling back"), "{dialect}: {err}");
        // Two were never touched, and the first runs as before.
        let now = pids();
        assert!(now.iter().all(|pid| pid.is_some_and(is_alive)), "{dialect}: {now:?} {out}{err}");
        assert_eq!(now[1..], first[1..], "{dialect}: {out}{err}");
        daemon.version = "1";
        write(&daemon);
        let (code, out, err) = fleet.apply(&[]);
        assert!(code == 0 && out.contains("Nothing to do"), "{dialect}: {out}{err}");
    }
}

/// Holds, pauses and history are in the state folder, with the ledger; another folder has other ones.
#[test]
fn state_is_stored_where_configured() {
    let fleet = Fleet::new("gse-v2");
    fleet.write(&Daemon::new("x"));
    let state = fleet.path("elsewhere");
    let at = ["--state", state.to_str().expect("a path")];
    fleet.well("new", &at);
    assert!(state.join("state.db").exists() && !fleet.path(".abide-home/state").exists());
    let (code, out, err) = fleet.run(&["stop", "web/x", at[0], at[1]]);
    assert_eq!(code, 0, "{out}{err}");
    assert_eq!(fleet.pid("x"), None);
    let (code, out, _) = fleet.apply(&at);
    assert!(out.contains("held"), "{code} {out}");
    assert_eq!(fleet.pid("x"), None, "held by a person");
    let (code, out, err) = fleet.run(&["history", "--owner", "team", "-o", "json", at[0], at[1]]);
    let entries: Value = serde_json::from_str(&out).unwrap_or_default();
    assert!(code == 0 && entries.as_array().is_some_and(|all| !all.is_empty()), "{out}{err}");
    let (code, out, err) = fleet.run(&["get", "processes", "-o", "json", at[0], at[1]]);
    let rows: Value = serde_json::from_str(&out).unwrap_or_default();
    assert_eq!((code, &rows[0]["name"], &rows[0]["running"]), (0, &"x".into(), &false.into()), "{out}{err}");
}

#[test]
fn a_missing_or_incomplete_target_is_reported() {
    let fleet = Fleet::new("job");
    fleet.write(&Daemon::new("x"));
    let config = |text: &str| std::fs::write(fleet.path("abide.yaml"), text).expect("a file");
    let auth = "auth: {app_code: all, app_secret: {env: IT_SECRET}}";
    let url = format!("http://{}", fleet.system.server.address);
    for (text, exit, message) in [
        (format!("targets: {{it: {{url: \"{url}\", dialect: job, {auth}}}}}"), 64, "JOB needs a business"),
        (format!("targets: {{it: {{url: \"{url}\", dialect: gse-v9, {auth}}}}}"), 64, "unknown dialect"),
        (format!("targets: {{it: {{url: \"{url}\", dialect: gse-v2}}}}"), 64, "has no auth"),
        (format!("targets: {{it: {{url: \"{url}\", dialect: gse-v2, colour: red, {auth}}}}}"), 64, "colour"),
        (
            format!("targets: {{it: {{url: \"http://127.0.0.1:1\", dialect: gse-v2, {auth}}}}}"),
            69,
            "cannot be reached",
        ),
        (
            format!("targets: {{other: {{url: \"{url}\", dialect: gse-v2, {auth}}}}}"),
            64,
            "has no target \"it\"",
        ),
    ] {
        config(&text);
        let (code, out, err) = fleet.apply(&[]);
        assert!(code == exit && err.contains(message), "{text}: {code} {out}{err}");
    }
    let output =
        command(&["doctor", "--target", "it"], fleet.system.folder.path()).output().expect("it runs");
    assert!(!output.status.success(), "{}", stderr(&output));
}

/// A one-shot that has run, and of which its host has no trace, is not run again.
#[test]
fn a_run_is_recorded_on_targets_that_do_not_report_it() {
    let fleet = Fleet::new("job");
    fleet.write(&Daemon::new("once"));
    let file = fleet.path("m/once.yaml");
    let text = std::fs::read_to_string(&file).expect("a file");
    let command = "    start_cmd: echo start once >> effects\n";
    let text: String = text
        .lines()
        .map(|line| match line.trim_start().starts_with("start_cmd") {
            true => command.to_owned(),
            false => format!("{line}\n"),
        })
        .collect();
    std::fs::write(&file, text.replace("auto_type: 1", "auto_type: 2")).expect("a file");
    fleet.well("it runs", &[]);
    for nth in 0..2 {
        let (code, out, err) = fleet.apply(&[]);
        assert!(code == 0 && out.contains("Nothing to do"), "{nth}: {out}{err}");
    }
    assert_eq!(fleet.effects(), ["start once"]);
}

/// Two targets keep their state side by side, and one's journal is not the other's.
#[test]
fn targets_that_share_a_state_folder_are_isolated() {
    let (one, other) = (Fleet::new("gse-v2"), Fleet::new("gse-v2"));
    let state = one.path("state");
    let at = ["--state", state.to_str().expect("a path")];
    let config = |fleet: &Fleet, name: &str| {
        let text = std::fs::read_to_string(fleet.path("abide.yaml")).expect("a file");
        std::fs::write(fleet.path("abide.yaml"), text.replace("  it:", &format!("  {name}:")))
            .expect("a file");
    };
    config(&one, "one");
    config(&other, "other");
    let apply = |fleet: &Fleet, target: &str, dies: &str| {
        let args = ["apply", "m", "--yes", "--owner", "team", "--target", target, at[0], at[1]];
        let mut command = command(&args, fleet.system.folder.path());
        command.env("IT_SECRET", "s3cret").env("ABIDE_KEY_FILE", key_file(one.system.folder.path()));
        command.stdin(Stdio::null());
        if !dies.is_empty() {
            command.env("ABIDE_DIE_AFTER", dies);
        }
        let output = command.output().expect("it runs");
        (output.status.success(), stderr(&output))
    };
    one.write(&Daemon::new("x"));
    other.write(&Daemon::new("x"));
    // It dies with a call in its journal.
    let died = (4..20).map(|nth| apply(&one, "one", &nth.to_string())).find(|(well, _)| *well);
    assert!(died.is_none() || one.effects() == ["start x 1"]);
    let (well, told) = apply(&other, "other", "");
    assert!(well && !told.contains("interrupted"), "{told}");
    assert_eq!(other.effects(), ["start x 1"]);
    let (well, told) = apply(&one, "one", "");
    assert!(well, "{told}");
    assert_eq!(one.effects(), ["start x 1"], "{told}");
}

/// A gateway that lost its store counts on from what its agents saw: at most one run is refused.
#[test]
fn a_gateway_that_lost_its_store_is_accepted_again() {
    let mut fleet = Fleet::new("abide");
    for version in ["1", "2", "3", "4"] {
        fleet.write(&Daemon { version, ..Daemon::new("x") });
        fleet.well("several generations", &[]);
    }
    let address = fleet.system.server.address;
    drop(std::mem::replace(&mut fleet.system.server, Server::at(address)));
    fleet.system.server = Server::restart_at(address, &fleet.path("another.db"), APPS, "* token\n");
    until("the agent tells of it again", || fleet.pid("x").is_some());
    fleet.write(&Daemon { version: "5", ..Daemon::new("x") });
    let (code, out, err) = fleet.apply(&[]);
    assert!(code == 0 || out.contains("a newer controller has taken over"), "{code} {out}{err}");
    fleet.well("the next one", &[]);
    assert_eq!(
        fleet.effects().iter().filter(|line| line.ends_with(" 5")).count(),
        1,
        "{:?}",
        fleet.effects()
    );
}
