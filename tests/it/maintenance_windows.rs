//! Windows that deny operations, and break-glass past them, on a real system.

use serde_json::Value;

use crate::apply::Machine;
use crate::support::until;
use crate::system::is_alive;

/// A policy whose window never closes.
const POLICY: &str = "apiVersion: abide/v1\nkind: Policy\nmeta: {name: freeze}\nwindows:\n\
                      \x20 - {from: \"00:00\", to: \"24:00\", for: [start, stop, restart, reload, delete]}\n\
                      \x20 - {from: \"00:00\", to: \"24:00\", for: [restart, stop], deny: true}\n";
const REASON: &str = "incident 7: 100% of öbb requests fail";

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// A machine with a running process, a policy that denies its restart, and a change that needs one.
fn frozen() -> (Machine, i64) {
    let machine = Machine::new();
    machine.process("a", "1", "");
    assert_eq!(machine.apply(&[]).0, 0);
    let pid = machine.pids()["a"] as i64;
    std::fs::write(machine.path("m/policy.yaml"), POLICY).expect("a policy");
    machine.process("a", "2", "");
    (machine, pid)
}

#[test]
fn a_denied_restart_is_held_and_break_glass_passes_the_window() {
    let (machine, pid) = frozen();
    let (code, out, err) = machine.apply(&["-o", "json"]);
    assert!(code != 0, "{out}{err}");
    let report = json(&out);
    let held = &report["plan"]["held"][0];
    assert_eq!(held["reason"], "OutsideWindow", "{report}");
    let expected =
        "policy \"freeze\" (m/policy.yaml:6:5) forbids a restart mon,tue,wed,thu,fri,sat,sun 00:00-24:00 UTC";
    let detail = held["detail"].as_str().expect("text").replace("every day", "mon,tue,wed,thu,fri,sat,sun");
    assert_eq!(detail, expected);
    assert_eq!(machine.pids()["a"] as i64, pid);
    for args in [&["--break-glass"][..], &["--break-glass", "--reason", " "]] {
        let (code, _, err) = machine.apply(args);
        assert!(code == 64 && err.contains("--break-glass requires a reason"), "{code} {err}");
    }
    let (code, out, _) = machine.run(&["plan", "m", "--break-glass", "--reason", REASON]);
    assert_eq!(code, 0);
    let note = format!("break-glass ({REASON}): changes 1 instance although policy \"freeze\"");
    assert!(out.contains(&note), "{out}");
    let (code, out, err) = machine.apply(&["--break-glass", "--reason", REASON]);
    assert!(code == 0 && out.contains(&note), "{code} {out} {err}");
    until("it was restarted", || machine.pids().get("a").is_some_and(|now| *now as i64 != pid));
    let (_, out, _) = machine.run(&["history", "-o", "json"]);
    let history = json(&out);
    assert_eq!(history[0]["break_glass"], REASON, "{history}");
    assert!(history[0]["by"].as_str().is_some_and(|by| by.contains('@')), "{history}");
    assert!(history[1]["break_glass"].is_null(), "{history}");
    let (_, out, _) = machine.run(&["history"]);
    assert!(
        out.contains(&format!("break-glass by {}: {REASON}", history[0]["by"].as_str().expect("a person"))),
        "{out}"
    );
    let (code, out, err) = machine.run(&["audit", "--data", ".abide-home/gateway", "-o", "json"]);
    assert_eq!(code, 0, "{err}");
    let entries: Vec<Value> = out.lines().map(json).collect();
    let glass: Vec<&Value> = entries.iter().filter(|entry| !entry["for"]["break_glass"].is_null()).collect();
    assert!(glass.iter().all(|entry| entry["for"]["break_glass"] == REASON), "{glass:?}");
    assert!(glass.iter().any(|entry| entry["what"]["instances"][0]["op"] == "restart"), "{entries:?}");
}

/// Break-glass passes windows, and nothing else.
#[test]
fn break_glass_passes_no_protection_and_no_budget() {
    let (machine, pid) = frozen();
    let text = machine.manifest_text("a");
    machine.declare("a", format!("protect: [restart]\n{text}"));
    let (code, out, _) = machine.apply(&["-o", "json", "--break-glass", "--reason", REASON]);
    assert!(code != 0 && json(&out)["plan"]["held"][0]["reason"] == "Protected", "{code} {out}");
    machine.declare("a", text);
    let (code, _, err) = machine.apply(&["--break-glass", "--reason", REASON, "--max-restart", "0"]);
    assert!(code == 4 && err.contains("over a budget"), "{code} {err}");
    assert!(is_alive(pid as u32));
    // A rollback out of a frozen change.
    assert_eq!(machine.apply(&["--break-glass", "--reason", REASON]).0, 0);
    let back = ["rollback", "--to", "previous", "--yes"];
    let first = machine.pids()["a"];
    std::fs::write(machine.path("m/policy.yaml"), POLICY).expect("a policy");
    let (code, _, err) = machine.run(&[&back[..], &["--break-glass"]].concat());
    assert!(code == 64 && err.contains("--break-glass requires a reason"), "{code} {err}");
    let (code, _, err) = machine.run(&[&back[..], &["--break-glass", "--reason", "it was worse"]].concat());
    assert_eq!(code, 0, "{err}");
    assert_ne!(machine.pids()["a"], first);
    let (_, out, _) = machine.run(&["history", "-o", "json"]);
    assert_eq!(json(&out)[0]["break_glass"], "it was worse");
}
