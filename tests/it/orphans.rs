//! Orphans: `--prune` removes instances that no manifest declares, also the last one of a namespace.

use crate::apply::Machine;
use crate::dialects::{Daemon, Fleet};
use crate::system::is_alive;

/// Puts a manifest into another namespace.
fn elsewhere(file: &std::path::Path) {
    let text = std::fs::read_to_string(file).expect("a file");
    std::fs::write(file, text.replace("namespace: web", "namespace: batch")).expect("a file");
}

#[test]
fn the_last_process_of_a_namespace_is_pruned() {
    let machine = Machine::new();
    ["a", "b"].iter().for_each(|name| machine.process(name, "1", ""));
    elsewhere(&machine.path("m/b.yaml"));
    assert_eq!(machine.apply(&[]).0, 0);
    let pids = machine.pids();
    std::fs::remove_file(machine.path("m/b.yaml")).expect("it was there");
    // An instance of another owner is an orphan of that owner only.
    let (code, out, err) = machine.apply(&["--prune", "--owner", "another"]);
    assert!(code == 3 && !out.contains("batch") && machine.pids() == pids, "{code} {out}{err}");
    let (code, out, err) = machine.apply(&["--prune"]);
    assert!(code == 0 && !machine.rows().contains_key("b"), "{code} {out}{err}");
    assert!(!is_alive(pids["b"] as u32) && machine.pids()["a"] == pids["a"]);
}

#[test]
fn the_last_process_of_a_namespace_is_pruned_from_the_ledger() {
    for dialect in ["gse-v1", "gse-v2", "job"] {
        let fleet = Fleet::new(dialect);
        ["x", "y"].iter().for_each(|name| fleet.write(&Daemon::new(name)));
        elsewhere(&fleet.path("m/y.yaml"));
        fleet.well("two namespaces", &[]);
        std::fs::remove_file(fleet.path("m/y.yaml")).expect("it was there");
        fleet.well("one of them", &["--prune"]);
        let mut effects = fleet.effects();
        effects.sort();
        assert_eq!(effects, ["start x 1", "start y 1", "stop y"], "{dialect}");
        let (code, out, err) = fleet.apply(&["--prune"]);
        assert!(code == 0 && out.contains("Nothing to do"), "{dialect}: {out}{err}");
    }
}
