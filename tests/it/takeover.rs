//! Takeover of processes that were started manually, in both start modes: held `NotOwned` until adopted, and shown as running
//! with an unknown spec until restarted.

use serde_json::{Value, json};

use crate::dialects::{Daemon, Fleet};
use crate::fixtures::manifest::Manifest;
use crate::support::until;
use crate::system::{is_alive, kill, parent_of, whoami};
use crate::unowned_processes::{UnownedProcess, applied, held, is_refused};

const NOTE: &str = "runs with an unknown spec";

/// Writes the manifest of a process in one of the start modes. Each launch leaves a line in `effects`.
fn write(fleet: &Fleet, mode: &str, version: &str, more: &str) {
    if mode == "daemon" {
        let version = if version == "1" { "1" } else { "2" };
        return fleet.write(&Daemon { version, more: more.to_owned(), ..Daemon::new("x") });
    }
    let here = fleet.system.folder.path().display();
    let text = Manifest::local("x", fleet.system.folder.path())
        .identity("pid_path", format!("{here}/run/x.first.pid"))
        .identity("user", whoami())
        .monitor("auto_type", 1)
        .monitor("start_check_secs", 0)
        .monitor("start_interval", 1)
        .control("start_mode", "foreground")
        .start_cmd(&format!("echo start x {version} >> effects; exec sleep 1000"))
        .to_string()
        .replace("spec:\n", &format!("{more}spec:\n"));
    std::fs::write(fleet.path("m/x.yaml"), text).expect("a file");
}

fn json_of(fleet: &Fleet, args: &[&str]) -> Value {
    let (_, out, err) = fleet.run(args);
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out}{err}"))
}

fn plan(fleet: &Fleet) -> Value {
    json_of(fleet, &["plan", "m", "--owner", "team", "-o", "json"])
}

/// Whether every view shows the process as running with an unknown spec, or none does.
fn shows_unknown_spec(fleet: &Fleet) -> bool {
    let row = fleet.row("x");
    let listed = json_of(fleet, &["get", "processes", "-o", "json"]);
    let described = json_of(fleet, &["describe", "web/x", "-o", "json"]);
    let status = json_of(fleet, &["status", "-o", "json"]);
    let (_, text, _) = fleet.run(&["status"]);
    let plan = plan(fleet);
    let views = [
        row["live_spec_unknown"] == true,
        row["message"].as_str().is_some_and(|message| message.starts_with(NOTE)),
        listed[0]["live_spec_unknown"] == true,
        described[0]["live_spec_unknown"] == true,
        status["unknown_specs"] == json!(["0:127.0.0.1:web:x"]),
        text.contains(NOTE),
        plan["notes"].to_string().contains(NOTE),
    ];
    assert!(views.iter().all(|view| *view == views[0]), "{views:?}: {row:#} {listed:#} {plan:#}");
    assert_eq!((&plan["waves"], &plan["held"]), (&json!([]), &json!([])), "{plan:#}");
    views[0]
}

fn in_both_modes(story: fn(&mut Fleet, &str)) {
    for mode in ["daemon", "foreground"] {
        story(&mut Fleet::new("abide"), mode);
    }
}

/// Without `--adopt` it is held in every run; no verb, state or prune touches it, and no second process is started.
#[test]
fn a_manual_process_is_held_until_it_is_adopted() {
    in_both_modes(|fleet, mode| {
        let mut stranger = UnownedProcess::of(fleet, "x");
        write(fleet, mode, "1", "");
        for run in 1..=3 {
            let done = applied(fleet, &[]);
            is_refused(fleet, &done);
            if run > 1 {
                assert_eq!(held(&done.1["plan"]), ["0:127.0.0.1:web:x NotOwned"], "{mode} {run}");
            }
        }
        for verb in ["stop", "kill", "restart", "start"] {
            let (code, out, err) = fleet.run(&[verb, "web/x"]);
            assert_ne!(code, 0, "{mode} {verb}: {out}{err}");
            fleet.run(&["release", "web/x"]);
        }
        for state in ["stopped", "absent"] {
            write(fleet, mode, "1", &format!("state: {state}\n"));
            let (_, report) = applied(fleet, &[]);
            assert!(stranger.lives(), "{mode} {state}: {report:#}");
        }
        std::fs::remove_file(fleet.path("m/x.yaml")).expect("a file");
        fleet.write(&Daemon::new("y"));
        fleet.well("another process", &["--prune"]);
        assert_eq!(fleet.effects(), ["start y 1"], "{mode}");
        assert!(stranger.lives(), "{mode}");
    });
}

/// Adopted without a restart, its spec is unknown, also for the next agent; a restart makes it known.
#[test]
fn an_adopted_process_runs_with_an_unknown_spec_until_it_is_restarted() {
    in_both_modes(|fleet, mode| {
        let mut stranger = UnownedProcess::of(fleet, "x");
        write(fleet, mode, "1", "adopt: true\n");
        fleet.well("adoption by the manifest", &[]);
        write(fleet, mode, "1", "");
        let (code, out, err) = fleet.apply(&[]);
        assert!(code == 0 && out.contains("Nothing to do"), "{mode}: {out}{err}");
        assert!(shows_unknown_spec(fleet), "{mode}");
        assert_eq!(fleet.run(&["status", "--check"]).0, 0, "{mode}: in sync and healthy");
        fleet.system.kill_agent();
        fleet.system.start_agent();
        until("the next agent holds it", || fleet.pid("x") == Some(stranger.pid));
        assert!(shows_unknown_spec(fleet), "{mode}");
        assert!(stranger.lives() && fleet.effects().is_empty(), "{mode}: {:?}", fleet.effects());
        let (code, out, err) = fleet.run(&["restart", "web/x"]);
        assert_eq!(code, 0, "{mode}: {out}{err}");
        assert!(!shows_unknown_spec(fleet), "{mode}");
        assert!(!stranger.lives() && fleet.pid("x").is_some_and(is_alive), "{mode}");
    });
}

/// A changed start_cmd restarts it, although the spec that it runs with is unknown.
#[test]
fn a_changed_spec_restarts_an_adopted_process() {
    in_both_modes(|fleet, mode| {
        let mut stranger = UnownedProcess::of(fleet, "x");
        write(fleet, mode, "1", "");
        fleet.well("adoption", &["--adopt"]);
        // A field that is registered restarts nothing, and the spec stays unknown.
        write(fleet, mode, "1", "");
        let path = fleet.path("m/x.yaml");
        let text = std::fs::read_to_string(&path).expect("a file");
        std::fs::write(&path, text.replace("start_check_secs: 0", "start_check_secs: 1")).expect("a file");
        fleet.well("a registered field", &[]);
        assert!(stranger.lives() && shows_unknown_spec(fleet), "{mode}");
        write(fleet, mode, "2", "");
        fleet.well("another start_cmd", &[]);
        assert!(!stranger.lives() && !shows_unknown_spec(fleet), "{mode}");
        assert!(fleet.effects().iter().any(|line| line.ends_with("x 2")), "{mode}: {:?}", fleet.effects());
    });
}

/// An adopted process that ends is relaunched by its start_cmd, as a process of the agent, with a known spec.
#[test]
fn an_adopted_process_that_ends_is_relaunched() {
    in_both_modes(|fleet, mode| {
        let mut stranger = UnownedProcess::of(fleet, "x");
        write(fleet, mode, "1", "");
        fleet.well("adoption", &["--adopt"]);
        assert!(stranger.lives(), "{mode}");
        kill(stranger.pid, "KILL");
        until("it ended", || !stranger.lives());
        let pid = || fleet.pid("x").filter(|pid| *pid != stranger.pid && is_alive(*pid));
        until("it is relaunched", || pid().is_some());
        assert_eq!(fleet.effects(), ["start x 1"], "{mode}");
        if mode == "foreground" {
            let agent = fleet.system.agent.as_ref().map(std::process::Child::id);
            assert_eq!(pid().and_then(parent_of), agent, "{}", fleet.system.log());
            let file = std::fs::read_to_string(fleet.path("run/x.first.pid")).unwrap_or_default();
            assert_eq!(file.trim().parse().ok(), pid());
        }
        until("the spec is known", || fleet.row("x")["live_spec_unknown"] != true);
        assert!(!shows_unknown_spec(fleet), "{mode}");
        assert_eq!(fleet.row("x")["restarts"], 1, "{mode}: {:#}", fleet.row("x"));
    });
}

/// A supervised process that was started manually while no agent ran: supervision starts no second one, and relaunches when it
/// ends.
#[test]
fn supervision_starts_no_second_process_next_to_a_manual_one() {
    let mut fleet = Fleet::new("abide");
    write(&fleet, "foreground", "1", "");
    fleet.well("a start", &[]);
    let first = fleet.pid("x").expect("a pid");
    fleet.system.kill_agent();
    kill(first, "KILL");
    until("it ended", || !is_alive(first));
    let mut stranger = UnownedProcess::of(&fleet, "x");
    fleet.system.start_agent();
    let message = || fleet.row("x")["message"].as_str().unwrap_or_default().to_owned();
    until("the agent reports it", || message().contains(&format!("process {} runs", stranger.pid)));
    // The next attempts of supervision are refused too.
    fleet.write(&Daemon::new("y"));
    fleet.apply(&[]);
    until("another process runs", || fleet.pid("y").is_some_and(is_alive));
    assert!(stranger.lives());
    assert_eq!(fleet.effects().iter().filter(|line| line.starts_with("start x")).count(), 1);
    drop(stranger);
    until("it is relaunched", || fleet.pid("x").is_some_and(is_alive));
    assert_eq!(fleet.effects().iter().filter(|line| line.starts_with("start x")).count(), 2);
}

/// On the other platforms the ledger records the adoption.
#[test]
fn the_ledger_records_an_unknown_spec_on_other_platforms() {
    for dialect in ["gse-v1", "gse-v2", "gse-apigw", "job"] {
        let fleet = Fleet::new(dialect);
        let mut stranger = UnownedProcess::of(&fleet, "x");
        fleet.write(&Daemon::new("x"));
        applied(&fleet, &[]);
        fleet.well("adoption", &["--adopt"]);
        let notes = || plan(&fleet)["notes"].to_string();
        assert!(stranger.lives() && notes().contains(NOTE), "{dialect}: {}", notes());
        let listed = json_of(&fleet, &["get", "processes", "-o", "json"]);
        assert_eq!(listed[0]["live_spec_unknown"], true, "{dialect}: {listed:#}");
        fleet.write(&Daemon { version: "2", ..Daemon::new("x") });
        fleet.well("a restart", &[]);
        assert!(!stranger.lives() && !notes().contains(NOTE), "{dialect}: {}", notes());
    }
}
