//! Hosts with an address and an agent id: rows under either key describe one instance, for `apply` and for `watch`.

use std::fs;
use std::process::Stdio;

use crate::apply::{KillOnDrop, Machine};
use crate::support::until;
use crate::watch::{read_log, watch};

const ADDRESS: &str = "{ip: 127.0.0.1, bk_cloud_id: 0}";
const AGENT_ID: &str = "{bk_agent_id: a1}";
const BOTH: &str = "{ip: 127.0.0.1, bk_cloud_id: 0, bk_agent_id: a1}";
const CONFLICT: &str = "has two rows: one under its host's address, one under its agent id";

/// A machine whose agent serves its host under the address and under the agent id.
fn machine_with_agent_id() -> (KillOnDrop, Machine) {
    let machine = Machine::new();
    let args = ["up", "--listen", "127.0.0.1:0", "--as-host", "0:127.0.0.1", "--as-host", "@a1"];
    let up = machine.start(&args, "up.log");
    until("`up` is ready", || read_log(&machine, "up.log").contains("ready http://"));
    (up, machine)
}

/// Writes the manifest of `name` into `folder`, with this `hosts` entry.
fn declare(machine: &Machine, folder: &str, name: &str, host: &str) {
    machine.process(name, "1", "");
    let file = machine.path(&format!("m/{name}.yaml"));
    let text = fs::read_to_string(&file).expect("a manifest").replace(ADDRESS, host);
    fs::remove_file(&file).expect("the manifest is moved");
    fs::create_dir_all(machine.path(folder)).expect("a folder");
    fs::write(machine.path(&format!("{folder}/{name}.yaml")), text).expect("a manifest");
}

/// Writes a manifest of another process under the name `a` at the host's address.
fn declare_second(machine: &Machine) {
    declare(machine, "by-address", "a", ADDRESS);
    let file = machine.path("by-address/a.yaml");
    let text = fs::read_to_string(&file).expect("a manifest").replace("run/a.pid", "run/second.pid");
    fs::write(&file, text.replace("value_key: a", "value_key: second")).expect("a manifest");
}

/// Starts that process for another owner.
fn add_second_row(machine: &Machine) {
    let (code, out, err) = apply(machine, "by-address", &["--owner", "other"]);
    assert_eq!(code, 0, "{out} {err}");
}

fn apply(machine: &Machine, folder: &str, more: &[&str]) -> (i32, String, String) {
    let mut args = vec!["apply", folder, "--yes"];
    args.extend(more);
    machine.run(&args)
}

#[test]
fn watch_finds_an_instance_under_its_agent_id() {
    let (_up, machine) = machine_with_agent_id();
    declare(&machine, "by-agent", "a", AGENT_ID);
    assert_eq!(apply(&machine, "by-agent", &[]).0, 0);
    declare(&machine, "m", "a", BOTH);
    let (code, out, err) = machine.run(&["plan", "m", "--detailed-exitcode"]);
    assert_eq!(code, 0, "{out} {err}");
    let _watch = watch(&machine, "watch.log", &["--interval", "1h"]);
    until("watch has compared", || read_log(&machine, "watch.log").contains("1 instance as wanted"));
    assert_eq!(machine.effects(), ["start a 1"], "no second copy was started");
    // The change stream reports the row under the agent id, too.
    let mut pid = machine.pids()["a"];
    crate::system::kill(u32::try_from(pid).expect("a pid"), "KILL");
    until("the agent relaunches it", || {
        let now = machine.pids().get("a").copied().unwrap_or(pid);
        std::mem::replace(&mut pid, now) != now
    });
    until("watch sees that", || read_log(&machine, "watch.log").contains("relaunched 0:127.0.0.1:web:a"));
    assert_eq!(machine.effects(), ["start a 1", "start a 1"], "the agent's relaunch only");
}

#[test]
fn watch_refuses_an_instance_with_two_rows() {
    let (_up, machine) = machine_with_agent_id();
    declare_second(&machine);
    declare(&machine, "by-agent", "a", AGENT_ID);
    assert_eq!(apply(&machine, "by-agent", &[]).0, 0);
    declare(&machine, "m", "a", BOTH);
    let _watch = watch(&machine, "watch.log", &["--interval", "1h"]);
    until("watch has compared", || read_log(&machine, "watch.log").contains("1 instance as wanted"));
    // The second row arrives by the change stream.
    add_second_row(&machine);
    until("watch reports the conflict", || read_log(&machine, "watch.log").contains(CONFLICT));
    let (code, out, err) = machine.run(&["plan", "m"]);
    assert!(code == 1 && err.contains(CONFLICT), "{code} {out} {err}");
    // And a watch that starts with it.
    let _second = watch(&machine, "second.log", &["--interval", "1h", "--owner", "third"]);
    until("watch reports the conflict", || read_log(&machine, "second.log").contains(CONFLICT));
    assert_eq!(machine.effects(), ["start a 1", "start a 1"], "one start per apply");
}

#[test]
fn a_second_row_after_the_first_observation_ends_apply() {
    let (_up, machine) = machine_with_agent_id();
    declare_second(&machine);
    declare(&machine, "by-agent", "a", AGENT_ID);
    assert_eq!(apply(&machine, "by-agent", &[]).0, 0);
    // Holds the writer lease until `go` exists.
    declare(&machine, "slow", "slow", ADDRESS);
    let file = machine.path("slow/slow.yaml");
    let text = fs::read_to_string(&file)
        .expect("a manifest")
        .replace("start_mode: foreground", "start_mode: daemon");
    let text = text.replace(
        "exec sleep 1000",
        "while [ ! -e go ]; do sleep 0.05; done; sleep 1000 & echo $! > run/slow.pid",
    );
    fs::write(&file, text).expect("a manifest");
    let quiet = |args: &[&str]| {
        let mut command = machine.command(args);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        KillOnDrop(command.spawn().expect("apply starts"))
    };
    let mut holder = quiet(&["apply", "slow", "--yes"]);
    until("the slow start runs", || machine.effects().contains(&"start slow 1".to_owned()));
    declare(&machine, "m", "a", BOTH);
    declare(&machine, "m", "b", ADDRESS);
    let log = fs::File::create(machine.path("apply.log")).expect("a file");
    let args = ["-v", "apply", "m", "--yes", "--lock-timeout", "60s"];
    let waiting = machine.command(&args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn();
    let mut waiting = KillOnDrop(waiting.expect("apply starts"));
    until("apply has observed", || read_log(&machine, "apply.log").contains("planned"));
    add_second_row(&machine);
    fs::write(machine.path("go"), "").expect("a file");
    holder.0.wait().expect("the holder ends");
    let code = waiting.0.wait().expect("apply ends").code();
    let err = read_log(&machine, "apply.log");
    assert!(code == Some(1) && err.contains(CONFLICT), "{code:?} {err}");
    assert!(!machine.effects().contains(&"start b 1".to_owned()), "nothing was executed");
}
