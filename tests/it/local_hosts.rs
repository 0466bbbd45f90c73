//! The local system's hosts and exits: every host is served again, and each exit names the processes that it leaves unsupervised.

use crate::apply::Machine;
use crate::support::until;
use crate::system::is_alive;
use crate::watch::read_log;

/// Two processes on two hosts that one `abide up` serves.
fn two_hosts(machine: &Machine) -> Vec<u32> {
    for (name, host) in [("a", "127.0.0.1"), ("b", "127.0.0.2")] {
        machine.process(name, "1", "");
        machine.edit(name, "127.0.0.1", host);
    }
    let args = ["up", "--listen", "127.0.0.1:0", "--as-host", "0:127.0.0.1", "--as-host", "0:127.0.0.2"];
    let up = machine.start(&args, "up.log");
    until("`up` is ready", || read_log(machine, "up.log").contains("ready http://"));
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 0, "{out}{err}");
    let pids: Vec<u32> = machine.pids().values().filter_map(|pid| u32::try_from(*pid).ok()).collect();
    assert_eq!(pids.len(), 2);
    crate::system::kill(up.0.id(), "TERM");
    until("`up` says what it leaves", || {
        read_log(machine, "up.log")
            .contains("2 processes keep running unsupervised: `abide up` supervises them again")
    });
    pids
}

#[test]
fn down_stops_the_processes_of_every_host() {
    let machine = Machine::new();
    let pids = two_hosts(&machine);
    until("`up` ends", || machine.run(&["status"]).1.contains("is not running"));
    assert!(pids.iter().all(|pid| is_alive(*pid)), "an exit leaves the processes");
    let (code, out, err) = machine.run(&["down", "--stop-processes"]);
    assert_eq!(code, 0, "{out}{err}");
    assert!(pids.iter().all(|pid| !is_alive(*pid)), "{out}{err}");
}

#[test]
fn an_up_that_down_ends_does_not_call_stopped_processes_unsupervised() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let mut up = machine.start(&["up", "--listen", "127.0.0.1:0"], "up.log");
    until("`up` is ready", || read_log(&machine, "up.log").contains("ready http://"));
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 0, "{out}{err}");
    let (code, out, err) = machine.run(&["down", "--stop-processes"]);
    assert!(code == 0 && err.contains("stopping 1 process\n"), "{out}{err}");
    up.0.wait().expect("it ends");
    let log = read_log(&machine, "up.log");
    assert!(log.contains("`abide down --stop-processes` stops 1 process\n"), "{log}");
    assert!(!log.contains("unsupervised"), "{log}");
    // The record ends with `down`.
    let mut up = machine.start(&["up", "--listen", "127.0.0.1:0"], "next.log");
    until("`up` is ready", || read_log(&machine, "next.log").contains("ready http://"));
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 0, "{out}{err}");
    crate::system::kill(up.0.id(), "TERM");
    up.0.wait().expect("it ends");
    let log = read_log(&machine, "next.log");
    assert!(log.contains("1 process keeps running unsupervised"), "{log}");
    machine.run(&["down", "--stop-processes"]);
}

#[test]
fn a_background_system_is_announced_and_down_names_unsupervised_processes() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 0, "{out}{err}");
    let said = err.lines().filter(|line| line.contains("started the local system in the background")).count();
    assert_eq!(said, 1, "{err}");
    // It runs now: nothing to announce.
    assert!(!machine.apply(&[]).2.contains("started the local system"));
    let (_, _, err) = machine.run(&["down"]);
    assert!(err.contains("local system stopped; 1 process keeps running unsupervised: `abide up`"), "{err}");
    // A reading verb does not pass this off as a host without processes.
    for verb in [&["get", "processes"][..], &["describe", "web/a"], &["logs", "web/a"], &["export"]] {
        let (_, _, err) = machine.run(verb);
        let warning =
            "the local system is not running, so its processes are not shown; 1 process keeps running";
        assert!(err.contains(warning), "{verb:?}: {err}");
    }
    let (_, _, err) = machine.run(&["down", "--stop-processes"]);
    assert!(err.contains("local system stopped") && !err.contains("unsupervised"), "{err}");
}

#[test]
fn a_local_system_that_was_never_started_has_nothing_to_warn_about() {
    let machine = Machine::new();
    let (code, out, err) = machine.run(&["get", "processes"]);
    assert_eq!((code, out.as_str(), err.as_str()), (0, "no processes\n", ""));
}
