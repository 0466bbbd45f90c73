//! Dependencies with real processes: a dependent starts when a one-shot has ended with success, or a service is healthy.

use crate::fixtures::machine::Machine;
use crate::support::until;

/// A one-shot that the dependents of a test wait for.
fn job(machine: &Machine, name: &str, start_cmd: &str) {
    let manifest = machine
        .manifest(name)
        .control("start_mode", "foreground")
        .start_cmd(start_cmd)
        .monitor("auto_type", 2);
    machine.declare(name, manifest);
}

/// A dependent that records whether its dependency was done.
fn dependent(machine: &Machine, name: &str, on: &str) {
    let found = "if [ -e marker ]; then echo found; else echo missing; fi >> effects";
    let manifest = machine
        .manifest(name)
        .field("depends_on", &format!("[{on}]"))
        .control("start_mode", "foreground")
        .start_cmd(&format!("{found}; exec sleep 1000"));
    machine.declare(name, manifest);
}

#[test]
fn a_dependent_waits_for_the_end_of_a_one_shot() {
    let machine = Machine::new();
    job(&machine, "migrate", "sleep 2; touch marker");
    dependent(&machine, "api", "migrate");
    let (code, out, err) = machine.apply(&[]);
    assert_eq!((code, machine.effects()), (0, vec!["found".to_owned()]), "{out} {err}");
}

/// A run that an earlier apply started is waited for as well.
#[test]
fn the_next_apply_waits_for_a_run_in_progress() {
    let machine = Machine::new();
    job(&machine, "migrate", "sleep 3; touch marker");
    assert_eq!(machine.apply(&["--no-wait"]).0, 0);
    dependent(&machine, "api", "migrate");
    let (code, out, err) = machine.apply(&["--no-wait"]);
    assert!(code != 0 && out.contains("WaitingForDependency"), "{code} {out} {err}");
    let (code, out, err) = machine.apply(&[]);
    assert_eq!((code, machine.effects()), (0, vec!["found".to_owned()]), "{out} {err}");
    assert!(err.contains("waiting for a run or a start in progress"), "{err}");
}

#[test]
fn watch_waits_for_the_end_of_a_one_shot() {
    let machine = Machine::new();
    job(&machine, "migrate", "sleep 2; touch marker");
    dependent(&machine, "api", "migrate");
    let _watch = machine.start(&["watch", "m", "--listen", "127.0.0.1:0"], "watch.log");
    until("api runs", || machine.pids().contains_key("api"));
    assert_eq!(machine.effects(), ["found"]);
}

#[test]
fn a_one_shot_that_fails_skips_its_dependents() {
    let machine = Machine::new();
    job(&machine, "migrate", "sleep 1; echo no such table; exit 1");
    dependent(&machine, "api", "migrate");
    machine.process("other", "1", "");
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 3, "{out} {err}");
    assert!(out.contains("dependency web/migrate failed") && out.contains("run ended with failure"), "{out}");
    assert_eq!(machine.effects(), ["start other 1"]);
    // The next apply does not start the dependent either, and runs nothing again.
    let (code, out, err) = machine.apply(&[]);
    assert!(code == 3 && machine.effects() == ["start other 1"], "{code} {out} {err}");
}

/// The run of a one-shot delays only what depends on it.
#[test]
fn a_long_run_delays_no_other_process() {
    let machine = Machine::new();
    // The run ends when the process that does not depend on it runs.
    job(&machine, "migrate", "until [ -e other ]; do sleep 0.05; done; touch marker");
    dependent(&machine, "api", "migrate");
    machine.process("base", "1", "");
    let other = machine
        .manifest("other")
        .field("depends_on", "[base]")
        .control("start_mode", "foreground")
        .start_cmd("touch other; exec sleep 1000");
    machine.declare("other", other);
    let (code, out, err) = machine.apply(&["--timeout", "60s"]);
    assert_eq!(
        (code, machine.effects()),
        (0, vec!["found".to_owned(), "start base 1".to_owned()]),
        "{out} {err}"
    );
}

#[test]
fn a_dependent_waits_until_a_service_is_healthy() {
    let machine = Machine::new();
    let slow = machine
        .manifest("slow")
        .control("start_mode", "foreground")
        .start_cmd("sleep 2; touch marker; exec sleep 1000")
        .spec("health", "{cmd: test -e marker, interval: 1}");
    machine.declare("slow", slow);
    dependent(&machine, "api", "slow");
    let (code, out, err) = machine.apply(&[]);
    assert_eq!((code, machine.effects()), (0, vec!["found".to_owned()]), "{out} {err}");
}

/// A version that becomes healthy inside its start period is not rolled back.
#[test]
fn a_rollout_waits_for_the_start_period() {
    let machine = Machine::new();
    let version = |version: &str, delay: &str| {
        let manifest = machine
            .manifest("web")
            .field("instances", "2")
            .field("rollout", "{batch: 1, soak: 1s, auto_rollback: true}")
            .identity("pid_path", machine.path("run/${name}.pid").display())
            .identity("value_key", "${name}")
            .control("start_mode", "foreground")
            .start_cmd(&format!(
                "rm -f ${{name}}.ok; sleep {delay}; touch ${{name}}.ok; echo {version} >> effects; exec sleep 1000"
            ))
            .spec("health", "{cmd: 'test -e ${name}.ok', interval: 1, start_period: 20}");
        machine.declare("web", manifest);
    };
    version("1", "0");
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 0, "{out} {err}");
    version("2", "3");
    let (code, out, err) = machine.apply(&[]);
    assert_eq!((code, machine.effects().join(" ")), (0, "1 1 2 2".to_owned()), "{out} {err}");
}
