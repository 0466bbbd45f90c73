//! Sync status in `status` and `get`: it compares against the active revision.

use serde_json::Value;

use crate::apply::Machine;
use crate::support::until;

fn sync(machine: &Machine, name: &str) -> Value {
    machine.rows().get(name).map_or(Value::Null, |row| row["sync"].clone())
}

#[test]
fn sync_status_compares_against_the_pinned_revision() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    assert_eq!(machine.apply(&[]).0, 0);
    let (_, out, _) = machine.run(&["history", "-o", "json"]);
    let history: Value = serde_json::from_str(&out).expect("entries");
    let first = history[0]["revision"].as_str().expect("a revision").to_owned();
    machine.process("a", "2", "");
    assert_eq!(machine.apply(&[]).0, 0);
    assert_eq!(sync(&machine, "a"), "InSync");
    assert_eq!(machine.run(&["rollback", "--to", &first, "--yes"]).0, 0);
    assert_eq!(sync(&machine, "a"), "InSync");
    let (code, out, _) = machine.run(&["status", "--check"]);
    assert_eq!(code, 0, "{out}");
}

#[test]
fn status_counts_out_of_sync_processes() {
    let machine = Machine::new();
    ["a", "b"].iter().for_each(|name| machine.process(name, "1", ""));
    assert_eq!(machine.apply(&[]).0, 0);
    assert_eq!(machine.run(&["status", "--check"]).0, 0);
    // Left alone on purpose.
    assert_eq!(machine.run(&["stop", "web/a"]).0, 0);
    let (code, out, _) = machine.run(&["status", "--check"]);
    assert_eq!(code, 0, "{out}");
    // Stopped, without a hold.
    assert_eq!(machine.run(&["release", "web/a"]).0, 0);
    let (code, out, _) = machine.run(&["status", "--check"]);
    assert!(code == 3 && out.contains("web:a  out of sync: needs start"), "{code} {out}");
    // Nothing of the owner is there any more.
    assert_eq!(machine.apply(&[]).0, 0);
    let remove = "apiVersion: abide/v1\nkind: Process\nstate: absent\n";
    for name in ["a", "b"] {
        let text = std::fs::read_to_string(machine.path(&format!("m/{name}.yaml"))).expect("a file");
        let gone = text.replacen("apiVersion: abide/v1\nkind: Process\n", remove, 1);
        std::fs::create_dir_all(machine.path("gone")).expect("a folder");
        std::fs::write(machine.path(&format!("gone/{name}.yaml")), gone).expect("a file");
    }
    // Another owner removes them; our revision is still active.
    let (code, out, err) =
        machine.run(&["apply", "gone", "--yes", "--owner", "default", "--max-delete", "100%"]);
    assert_eq!(code, 0, "{out}{err}");
    until("they are gone", || machine.rows().is_empty());
    assert_eq!(machine.run(&["status", "--check"]).0, 0, "absent is what is wanted now");
}
