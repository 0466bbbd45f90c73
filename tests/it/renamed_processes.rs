//! Moves on dialects without a registry: a process gets another name, keeps running, and is supervised afterwards.

use crate::dialects::{Daemon, Fleet};
use crate::support::until;
use crate::system::{is_alive, kill};

/// A fleet whose process is called `p0`.
fn fleet(dialect: &'static str) -> Fleet {
    let fleet = Fleet::new(dialect);
    fleet.write(&Daemon::new("p"));
    rename(&fleet, "p", "p0", None);
    fleet.well("one process", &[]);
    assert_eq!(fleet.effects(), ["start p 1"]);
    fleet
}

/// Renames the process in the manifests. Its identity stays.
fn rename(fleet: &Fleet, old: &str, new: &str, moved_from: Option<&str>) {
    let file = fleet.path("m/p.yaml");
    let text = std::fs::read_to_string(&file).expect("a file");
    let name = |name: &str| format!("namespace: web, name: {name}}}");
    assert!(text.contains(&name(old)), "{text}");
    let text: String = text
        .lines()
        .filter(|line| !line.starts_with("moved_from"))
        .map(|line| format!("{}\n", line.replace(&name(old), &name(new))))
        .collect();
    let moved = moved_from.map_or(String::new(), |from| format!("moved_from: web/{from}\n"));
    std::fs::write(&file, text.replace("spec:\n", &format!("{moved}spec:\n"))).expect("a file");
}

fn starts(fleet: &Fleet) -> usize {
    fleet.effects().iter().filter(|line| line.starts_with("start p")).count()
}

/// Kills the process, and expects exactly one start by the agent.
fn comes_back_once(fleet: &Fleet, name: &str) {
    let (pid, before) = (fleet.pid(name).expect("a pid"), starts(fleet));
    kill(pid, "KILL");
    until("another process", || fleet.pid(name).is_some_and(|new| new != pid && is_alive(new)));
    assert_eq!(starts(fleet), before + 1, "{:?}", fleet.effects());
    let row = fleet.row(name);
    assert_eq!((&row["running"], &row["hosted"]), (&true.into(), &true.into()), "{row}");
}

fn a_moved_process_stays_supervised(dialect: &'static str) {
    let fleet = fleet(dialect);
    let pid = fleet.pid("p0").expect("a pid");
    rename(&fleet, "p0", "p1", Some("p0"));
    let (code, out, err) = fleet.run(&["plan", "m", "--owner", "team"]);
    assert_eq!(code, 0, "{out}{err}");
    assert!(out.contains("not supervised while its name changes: web/p1 (1)"), "{out}{err}");
    fleet.well("a move", &[]);
    assert_eq!((fleet.pid("p1"), fleet.pid("p0")), (Some(pid), None), "{:?}", fleet.rows());
    assert_eq!(fleet.effects(), ["start p 1"]);
    comes_back_once(&fleet, "p1");
    let (code, out, err) = fleet.apply(&[]);
    assert_eq!((code, out.contains("Nothing to do")), (0, true), "{out}{err}");
    // A name that was used before can be used again.
    rename(&fleet, "p1", "p0", Some("p1"));
    fleet.well("the move back", &[]);
    comes_back_once(&fleet, "p0");
}

#[test]
fn a_process_moved_over_gse_v2_stays_supervised() {
    a_moved_process_stays_supervised("gse-v2");
}

#[test]
fn a_process_moved_over_gse_apigw_stays_supervised() {
    a_moved_process_stays_supervised("gse-apigw");
}

/// Whether the apply was killed at its nth step.
fn dies_at(fleet: &Fleet, nth: u32) -> bool {
    let mut apply = fleet.command(&["apply", "m", "--yes", "--owner", "team"]);
    let output = apply.env("ABIDE_DIE_AFTER", nth.to_string()).output().expect("it runs");
    output.status.code() != Some(0)
}

/// The controller is killed at each step of the move, and the process after it. The next apply completes the move: the
/// process was started once more, by the agent or by the apply, and is supervised under its new name.
#[test]
fn a_process_killed_during_a_move_comes_back_once() {
    let fleet = fleet("gse-v2");
    let mut nth = 0;
    loop {
        nth += 1;
        assert!(nth < 60, "the move never ends");
        let (old, new) = (format!("p{}", nth - 1), format!("p{nth}"));
        rename(&fleet, &old, &new, Some(&old));
        let pid = fleet.pid(&old).expect("a pid");
        let died = dies_at(&fleet, nth);
        let before = starts(&fleet);
        kill(pid, "KILL");
        until("the process ends", || !is_alive(pid));
        fleet.well(&format!("the move, killed at step {nth}"), &[]);
        let running = |name: &str| fleet.pid(name).filter(|pid| is_alive(*pid));
        until("the process runs under its new name", || running(&new).is_some());
        assert_eq!((starts(&fleet), running(&old)), (before + 1, None), "step {nth}: {:?}", fleet.effects());
        assert_eq!(fleet.row(&new)["hosted"], true, "step {nth}: {}", fleet.row(&new));
        if !died {
            break;
        }
    }
    assert!(nth > 6, "only {nth} steps");
    comes_back_once(&fleet, &format!("p{nth}"));
}
