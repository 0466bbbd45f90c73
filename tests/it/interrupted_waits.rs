//! Requests of persons while an apply waits: aborts of rollouts before a new version is healthy, and Ctrl-C during
//! verification.

use crate::fixtures::machine::Machine;
use crate::promotions::{expect, started, system, version};
use crate::support::until;
use crate::system::kill;
use crate::watch::read_log;

/// A version that never becomes healthy, within a start period that no test waits for.
fn unhealthy(machine: &Machine, nth: &str, rollout: &str) {
    version(machine, nth, rollout);
    machine.edit("api", "rollout:", "health: {cmd: 'false', start_period: 900}\nrollout:");
}

/// The first stage is all that the plan of an apply does before a promotion.
#[test]
fn an_apply_whose_last_stage_was_aborted_does_not_ask_for_its_promotion() {
    let machine = Machine::new();
    let _up = system(&machine);
    version(&machine, "1", "{}");
    expect(&machine, &["apply", "m", "--yes"], 0, "converged");
    unhealthy(&machine, "2", "{order: [first, eu, us], pause: promoted}");
    let mut apply = machine.start(&["apply", "m", "--yes", "--timeout", "2h"], "apply.log");
    until("the first stage is restarted", || started(&machine, "2").len() == 1);
    expect(&machine, &["rollout", "abort", "web/api"], 0, "aborted");
    let code = apply.0.wait().expect("it ends").code();
    let log = read_log(&machine, "apply.log");
    assert!(code == Some(3) && !log.contains("is done: `abide rollout promote"), "{code:?} {log}");
    assert_eq!(started(&machine, "2"), ["127.0.0.1"]);
}

/// The apply holds the lease that `undo` needs. A dependent of what may never be healthy is skipped.
#[test]
fn an_abort_ends_the_wait_for_the_health_of_a_new_version() {
    let machine = Machine::new();
    let _up = system(&machine);
    version(&machine, "1", "{}");
    expect(&machine, &["apply", "m", "--yes"], 0, "converged");
    unhealthy(&machine, "2", "{batch: 1, auto_rollback: true}");
    let after = machine.manifest("after").depends_on(&["api"]).start_cmd("echo after >> effects; sleep 1000");
    machine.declare("after", after.control("start_mode", "foreground"));
    let mut apply = machine.start(&["apply", "m", "--yes", "--timeout", "2h"], "apply.log");
    until("the first batch is restarted", || started(&machine, "2").len() == 1);
    expect(&machine, &["rollout", "undo", "web/api", "--yes", "--timeout", "5m"], 0, "converged");
    let code = apply.0.wait().expect("it ends").code();
    let log = read_log(&machine, "apply.log");
    assert!(
        code == Some(3) && log.contains("the rollout of dependency web/api was aborted"),
        "{code:?} {log}"
    );
    assert!(!log.contains("rolling back"), "{log}");
    assert_eq!((started(&machine, "2").len(), started(&machine, "1").len()), (1, 4), "{log}");
    assert!(!machine.effects().contains(&"after".to_owned()), "{log}");
}

/// After the last step nothing but the verification waits.
#[test]
fn an_abort_ends_the_verification_of_a_new_version() {
    let machine = Machine::new();
    let _up = system(&machine);
    version(&machine, "1", "{}");
    machine.edit("api", "rollout: {}\n", "");
    expect(&machine, &["apply", "m", "--yes"], 0, "converged");
    unhealthy(&machine, "2", "{}");
    machine.edit("api", "rollout: {}\n", "");
    let mut apply = machine.start(&["apply", "m", "--yes", "--timeout", "2h"], "apply.log");
    until("all are restarted", || started(&machine, "2").len() == 3);
    expect(&machine, &["rollout", "undo", "web/api", "--yes", "--timeout", "5m"], 0, "converged");
    apply.0.wait().expect("it ends");
    assert_eq!(started(&machine, "1").len(), 6);
}

#[test]
fn a_signal_ends_the_verification() {
    let machine = Machine::new();
    for (signal, code, secs) in [("INT", 130, 1000), ("TERM", 143, 1001)] {
        let start = format!("exec sleep {secs}");
        let text = machine.manifest("api").start_cmd(&start).control("start_mode", "foreground");
        machine.declare("api", text.spec("health", "{cmd: 'false', start_period: 900}"));
        let log = format!("{signal}.log");
        let mut apply = machine.start(&["apply", "m", "--yes", "--timeout", "2m", "-v"], &log);
        // Before the approval, under the lease, and several times afterwards.
        until("it is verified", || read_log(&machine, &log).matches("planned").count() > 5);
        kill(apply.0.id(), signal);
        let ended = apply.0.wait().expect("it ends").code();
        assert_eq!(ended, Some(code), "{}", read_log(&machine, &log));
    }
    // The lease of the first one was free.
    expect(&machine, &["history", "-o", "json"], 0, "\"exit\": 143");
}
