//! Processes that others started under a wanted identity: held `NotOwned` in every run and on every dialect, until adopted.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::apply::KillOnDrop;
use crate::dialects::{Daemon, Fleet};
use crate::support::until;
use crate::system::{is_alive, whoami};

/// Each story on every dialect, as a test of its own.
macro_rules! on_every_dialect {
    ($($story:ident)*) => { $(
        mod $story {
            #[test]
            fn abide() {
                super::$story("abide");
            }

            #[test]
            fn gse_v1() {
                super::$story("gse-v1");
            }

            #[test]
            fn gse_v2() {
                super::$story("gse-v2");
            }

            #[test]
            fn gse_apigw() {
                super::$story("gse-apigw");
            }

            #[test]
            fn job() {
                super::$story("job");
            }
        }
    )* };
}

on_every_dialect! {
    a_stranger_is_held_in_every_run_and_never_pruned
    a_stranger_is_not_stopped_by_a_state
    verbs_do_not_touch_a_stranger
    adoption_keeps_the_pid_and_makes_it_ours
    a_stranger_that_ends_makes_room
    a_crash_proves_nothing_about_a_stranger
    watch_leaves_a_stranger_alone
}

/// A daemon that neither the platform nor Abide started: a pid file names it, and its program is the wanted one.
pub struct UnownedProcess {
    child: Child,
    pub pid: u32,
}

impl UnownedProcess {
    pub fn of(fleet: &Fleet, name: &str) -> UnownedProcess {
        let child = Command::new("sleep")
            .arg("2000")
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("sleep starts");
        let pid = child.id();
        let is_sleep =
            || std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == "sleep");
        until("the stranger runs", is_sleep);
        std::fs::write(fleet.path(&format!("run/{name}.first.pid")), format!("{pid}\n")).expect("a pid file");
        UnownedProcess { child, pid }
    }

    /// Ended by a signal? A zombie that was not reaped is not alive either.
    pub fn lives(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None)) && is_alive(self.pid)
    }
}

impl Drop for UnownedProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `apply -o json`: its exit code, and what it printed.
pub fn applied(fleet: &Fleet, more: &[&str]) -> (i32, Value) {
    let mut args = vec!["-o", "json"];
    args.extend(more);
    let (code, out, err) = fleet.apply(&args);
    let report = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {code} {out}{err}"));
    (code, report)
}

fn steps(report: &Value) -> usize {
    report["outcomes"].as_array().map_or(0, Vec::len)
}

pub fn held(plan: &Value) -> Vec<String> {
    let held = plan["held"].as_array().cloned().unwrap_or_default();
    held.iter()
        .map(|held| {
            format!("{} {}", held["instance"].as_str().unwrap_or(""), held["reason"].as_str().unwrap_or(""))
        })
        .collect()
}

/// Exit code, `converged` and the reason say one thing: ownership stands in the way.
pub fn is_refused(fleet: &Fleet, (code, report): &(i32, Value)) {
    let dialect = fleet.dialect;
    assert_eq!(*code, 3, "{dialect}: {report:#}");
    assert_eq!(report["converged"], false, "{dialect}: {report:#}");
    assert_eq!(report["exit"], json!({"code": 3, "reason": "NotOwned"}), "{dialect}: {report:#}");
}

fn not_owned(name: &str) -> Vec<String> {
    vec![format!("0:127.0.0.1:web:{name} NotOwned")]
}

fn a_stranger_is_held_in_every_run_and_never_pruned(dialect: &'static str) {
    let fleet = Fleet::new(dialect);
    let mut stranger = UnownedProcess::of(&fleet, "x");
    fleet.write(&Daemon::new("x"));
    // Abide's agent finds the process before anything is registered: the first plan holds it.
    let is_found_first = dialect == "abide";
    if is_found_first {
        let (code, out, err) = fleet.run(&["plan", "m", "--owner", "team", "-o", "json"]);
        let plan: Value = serde_json::from_str(&out).unwrap_or_default();
        assert_eq!((code, held(&plan)), (0, not_owned("x")), "{out}{err}");
        let detail = plan["held"][0]["detail"].as_str().unwrap_or_default();
        assert!(detail.contains("--adopt"), "{detail}");
    }
    for run in 1..=3 {
        let done = applied(&fleet, &[]);
        is_refused(&fleet, &done);
        assert!(stranger.lives(), "{dialect} run {run}");
        if run > 1 || is_found_first {
            // What the first run found out is remembered: nothing is sent any more.
            assert_eq!(
                (held(&done.1["plan"]), steps(&done.1)),
                (not_owned("x"), 0),
                "{dialect} {:#}",
                done.1
            );
        }
    }
    let (code, out, err) = fleet.run(&["plan", "m", "--owner", "team", "-o", "json"]);
    let plan: Value = serde_json::from_str(&out).unwrap_or_default();
    assert_eq!((code, held(&plan)), (0, not_owned("x")), "{dialect}: {out}{err}");
    // Others are not kept waiting for it, and what was never ours is not removed with its manifest.
    fleet.write(&Daemon::new("y"));
    is_refused(&fleet, &applied(&fleet, &[]));
    assert_eq!(fleet.effects(), ["start y 1"], "{dialect}");
    std::fs::remove_file(fleet.path("m/x.yaml")).expect("a file");
    let (code, report) = applied(&fleet, &["--prune"]);
    assert_eq!((code, &report["converged"]), (0, &json!(true)), "{dialect}: {report:#}");
    assert_eq!(fleet.effects(), ["start y 1"], "{dialect}");
    assert!(stranger.lives(), "{dialect}: pruned");
}

/// `state: stopped` and `state: absent` do not end what others started.
fn a_stranger_is_not_stopped_by_a_state(dialect: &'static str) {
    let fleet = Fleet::new(dialect);
    let mut stranger = UnownedProcess::of(&fleet, "x");
    for state in ["stopped", "absent", "unhosted"] {
        fleet.write(&Daemon { state, ..Daemon::new("x") });
        for run in 1..=3 {
            let (code, report) = applied(&fleet, &[]);
            assert!(stranger.lives(), "{dialect} {state} {run}: {report:#}");
            assert_eq!(code == 0, report["converged"] == true, "{dialect} {state} {run}: {report:#}");
        }
    }
    assert_eq!(fleet.effects(), Vec::<String>::new(), "{dialect}");
}

/// A manual operation on it is refused too: a name is not a proof.
fn verbs_do_not_touch_a_stranger(dialect: &'static str) {
    let fleet = Fleet::new(dialect);
    let mut stranger = UnownedProcess::of(&fleet, "x");
    fleet.write(&Daemon::new("x"));
    is_refused(&fleet, &applied(&fleet, &[]));
    for verb in ["stop", "kill", "restart", "reload"] {
        let (code, out, err) = fleet.run(&[verb, "web/x"]);
        assert_ne!(code, 0, "{dialect} {verb}: {out}{err}");
        assert!(stranger.lives(), "{dialect} {verb}: {out}{err}");
    }
    is_refused(&fleet, &applied(&fleet, &[]));
    assert_eq!(fleet.effects(), Vec::<String>::new(), "{dialect}");
}

/// Adopted it is ours: it keeps its pid, the next plan is empty, and pruning stops it.
fn adoption_keeps_the_pid_and_makes_it_ours(dialect: &'static str) {
    for (is_known, by_flag) in [(true, true), (false, true), (false, false)] {
        let fleet = Fleet::new(dialect);
        let mut stranger = UnownedProcess::of(&fleet, "x");
        fleet.write(&Daemon::new("x"));
        if is_known {
            is_refused(&fleet, &applied(&fleet, &[]));
        }
        let flags: &[&str] = if by_flag { &["--adopt"] } else { &[] };
        if !by_flag {
            fleet.write(&Daemon { more: "adopt: true\n".to_owned(), ..Daemon::new("x") });
        }
        if dialect == "gse-v1" && !is_known {
            // It is found only once it is registered: the second run adopts it.
            is_refused(&fleet, &applied(&fleet, flags));
        }
        let (code, report) = applied(&fleet, flags);
        assert_eq!((code, &report["converged"]), (0, &json!(true)), "{dialect} {is_known}: {report:#}");
        assert!(stranger.lives(), "{dialect}");
        assert_eq!((fleet.effects(), fleet.pid("x")), (vec![], Some(stranger.pid)), "{dialect}");
        fleet.write(&Daemon::new("x"));
        let (code, out, err) = fleet.apply(&[]);
        assert!(code == 0 && out.contains("Nothing to do"), "{dialect}: {out}{err}");
        fleet.write(&Daemon::new("y"));
        std::fs::remove_file(fleet.path("m/x.yaml")).expect("a file");
        fleet.well("an adopted process is pruned", &["--prune"]);
        until("it is gone", || !stranger.lives());
        assert_eq!(fleet.effects().iter().filter(|line| *line == "stop x").count(), 1, "{dialect}");
    }
}

/// Once the stranger is gone, the identity is free, and the wanted process is started.
fn a_stranger_that_ends_makes_room(dialect: &'static str) {
    let fleet = Fleet::new(dialect);
    let stranger = UnownedProcess::of(&fleet, "x");
    fleet.write(&Daemon::new("x"));
    is_refused(&fleet, &applied(&fleet, &[]));
    is_refused(&fleet, &applied(&fleet, &[]));
    drop(stranger);
    fleet.well("its place is free", &[]);
    assert_eq!(fleet.effects(), ["start x 1"], "{dialect}");
    let (code, out, err) = fleet.apply(&[]);
    assert!(code == 0 && out.contains("Nothing to do"), "{dialect}: {out}{err}");
}

/// A run that dies anywhere leaves a stranger a stranger, and a process of its own its own.
fn a_crash_proves_nothing_about_a_stranger(dialect: &'static str) {
    let fleet = Fleet::new(dialect);
    let mut stranger = UnownedProcess::of(&fleet, "x");
    fleet.write(&Daemon::new("x"));
    fleet.write(&Daemon::new("y"));
    for nth in 1..=12 {
        let args = ["apply", "m", "--yes", "--owner", "team"];
        let _ = fleet.command(&args).env("ABIDE_DIE_AFTER", nth.to_string()).output().expect("it runs");
        assert!(stranger.lives(), "{dialect} {nth}");
    }
    let done = applied(&fleet, &[]);
    is_refused(&fleet, &done);
    let done = applied(&fleet, &[]);
    is_refused(&fleet, &done);
    assert_eq!(held(&done.1["plan"]), not_owned("x"), "{dialect}: {:#}", done.1);
    assert_eq!(fleet.effects(), ["start y 1"], "{dialect}");
    assert!(stranger.lives(), "{dialect}");
}

/// `watch` shows it as held, sends nothing more, and does not end it.
fn watch_leaves_a_stranger_alone(dialect: &'static str) {
    let fleet = Fleet::new(dialect);
    let mut stranger = UnownedProcess::of(&fleet, "x");
    fleet.write(&Daemon::new("x"));
    fleet.write(&Daemon::new("y"));
    let log = |name: &str| std::fs::read_to_string(fleet.path(name)).unwrap_or_default();
    let watch = |name: &str| {
        let out = std::fs::File::create(fleet.path(name)).expect("a file");
        let both = out.try_clone().expect("a file");
        let args = [
            "watch",
            "m",
            "--owner",
            "team",
            "--prune",
            "--interval",
            "1s",
            "--debounce",
            "50ms",
            "--listen",
            "127.0.0.1:0",
        ];
        let mut command = fleet.command(&args);
        KillOnDrop(command.stdout(out).stderr(both).spawn().expect("it starts"))
    };
    let first = watch("first.log");
    until("the stranger is held", || log("first.log").contains("NotOwned"));
    until("the other one runs", || fleet.pid("y").is_some_and(is_alive));
    let sent = tries(&fleet.path("first.log"));
    assert!(sent <= 1, "{dialect}: {}", log("first.log"));
    std::fs::remove_file(fleet.path("m/x.yaml")).expect("a file");
    fleet.write(&Daemon::new("z"));
    until("a later pass is over", || fleet.pid("z").is_some_and(is_alive));
    assert!(stranger.lives(), "{dialect}: {}", log("first.log"));
    drop(first);
    fleet.write(&Daemon::new("x"));
    let _second = watch("second.log");
    until("the next watch holds it", || log("second.log").contains("NotOwned"));
    assert_eq!(tries(&fleet.path("second.log")), 0, "{dialect}: {}", log("second.log"));
    assert!(stranger.lives(), "{dialect}");
    let mut effects = fleet.effects();
    effects.sort();
    assert_eq!(effects, ["start y 1", "start z 1"], "{dialect}");
}

/// How often an operation on the stranger was tried.
fn tries(log: &Path) -> usize {
    let log = std::fs::read_to_string(log).unwrap_or_default();
    log.lines()
        .filter(|line| line.contains("web:x") && (line.contains("Failed") || line.contains("failed")))
        // A hold quotes the failure of the step before it.
        .filter(|line| !line.starts_with("BackingOff"))
        .count()
}

/// A registration by another client is not overwritten: 850 is an answer, not an invitation.
#[test]
fn a_registration_of_another_owner_is_not_overwritten() {
    for dialect in ["abide", "gse-v1"] {
        let fleet = Fleet::new(dialect);
        fleet.write(&Daemon::new("x"));
        let body = json!({"meta": {"namespace": "web", "name": "x", "labels": {"team": "other"}},
                          "hosts": [{"ip": "127.0.0.1", "bk_cloud_id": 0, "bk_supplier_id": 0}],
                          "spec": {"identity": {"proc_name": "theirs", "setup_path": "/", "pid_path": "/run/theirs.pid", "user": whoami()},
                                   "control": {"start_cmd": "true"}}});
        let answer = fleet.system.server.gse("register_proc_info", body);
        assert_eq!(answer["result"], true, "{answer}");
        for _ in 0..2 {
            let done = applied(&fleet, &[]);
            is_refused(&fleet, &done);
            let row = fleet.row("x");
            assert_eq!(row["spec"]["identity"]["proc_name"], "theirs", "{dialect}: {row:#}");
            assert_eq!((&row["labels"]["team"], &row["owner"]), (&json!("other"), &Value::Null), "{dialect}");
        }
    }
}
