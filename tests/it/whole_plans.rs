//! Plans that show everything: every changed field of a changed instance, pins, orphans, and files that differ on hosts.

use serde_json::Value;

use crate::fixtures::machine::Machine;
use crate::support::until;

/// A foreground process with these commands.
fn declare(machine: &Machine, start: &str, stop: &str, more: &str) {
    let manifest = machine
        .manifest("a")
        .control("start_mode", "foreground")
        .start_cmd(start)
        .stop_cmd(stop)
        .control("health_cmd", format!("true {more}"));
    machine.declare("a", manifest);
}

fn fields(step: &Value) -> Vec<&str> {
    step["why"].as_array().expect("reasons").iter().filter_map(|why| why["field"].as_str()).collect()
}

/// A restart for one field also shows the commands that change with it, the cause first.
#[test]
fn a_plan_shows_every_changed_field() {
    let machine = Machine::new();
    declare(&machine, "exec sleep 1000", "kill $ABIDE_PID", "1");
    assert_eq!(machine.apply(&[]).0, 0);
    declare(&machine, "exec sleep 1001", "kill -INT $ABIDE_PID", "2");
    let (code, out, err) = machine.run(&["plan", "m", "-o", "json"]);
    assert_eq!(code, 0, "{err}");
    let plan: Value = serde_json::from_str(&out).expect("a plan");
    let step = &plan["waves"][0][0];
    assert_eq!(step["op"], "restart");
    assert_eq!(fields(step), ["control.start_cmd", "control.stop_cmd", "control.health_cmd"]);
    assert_eq!(step["why"][1]["at"].as_str().map(|at| at.starts_with("m/a.yaml:")), Some(true), "{step}");
    for form in ["text", "markdown"] {
        let (_, out, _) = machine.run(&["plan", "m", "-o", form]);
        let at = |text: &str| out.find(text).unwrap_or_else(|| panic!("{text} is not in {out}"));
        assert!(at("control.start_cmd: ") < at("control.stop_cmd: "), "{out}");
        assert!(out.contains("kill -INT") && out.contains("true 2"), "{out}");
    }
    assert_eq!(machine.apply(&[]).0, 0);
    // A field whose change has no effect of its own changes with the next operation.
    declare(&machine, "exec sleep 1002", "kill -INT $ABIDE_PID", "3");
    let text = machine.manifest_text("a");
    machine.declare("a", format!("on_change: {{control.health_cmd: none}}\n{text}"));
    let (_, out, _) = machine.run(&["plan", "m", "-o", "json"]);
    let plan: Value = serde_json::from_str(&out).expect("a plan");
    assert_eq!(fields(&plan["waves"][0][0]), ["control.start_cmd", "control.health_cmd"], "{out}");
    // A stopped process starts with what changed meanwhile.
    assert_eq!(machine.apply(&[]).0, 0);
    assert_eq!(machine.run(&["stop", "web/a"]).0, 0);
    assert_eq!(machine.run(&["release", "web/a"]).0, 0);
    declare(&machine, "exec sleep 1003", "kill -INT $ABIDE_PID", "3");
    let (_, out, _) = machine.run(&["plan", "m", "-o", "json"]);
    let plan: Value = serde_json::from_str(&out).expect("a plan");
    let step = &plan["waves"][0][0];
    assert_eq!((&step["op"], &step["why"][0]["rule"]), (&"start".into(), &"NotRunning".into()), "{out}");
    assert_eq!(fields(step), ["control.start_cmd"], "{out}");
}

/// One variable has an effect of its own; the others keep that of `env`.
#[test]
fn on_change_of_one_variable_leaves_the_others_as_they_are() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let text = machine.manifest_text("a");
    let declare = |build: &str, mode: &str| {
        machine.declare(
            "a",
            format!("on_change: {{env.BUILD: none, spec.env.LEVEL: reload}}\n{text}").trim_end().to_owned()
                + &format!("\n  env: {{BUILD: \"{build}\", {mode}}}\n"),
        );
    };
    declare("1", "MODE: a, LEVEL: x");
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 0, "{out} {err}");
    let pids = machine.pids();
    declare("2", "MODE: a, LEVEL: x");
    let (code, out, err) = machine.apply(&[]);
    assert!(code == 0 && out.contains("Nothing to do"), "{code} {out} {err}");
    declare("2", "MODE: a, LEVEL: y");
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 0, "{out} {err}");
    assert_eq!(
        (machine.pids(), machine.effects()),
        (pids.clone(), ["reload a", "start a 1"].map(str::to_owned).to_vec())
    );
    let (code, out, _) = machine.apply(&[]);
    assert!(code == 0 && out.contains("Nothing to do"), "{code} {out}");
    declare("2", "MODE: b, LEVEL: y");
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 0, "{out} {err}");
    assert_ne!(machine.pids(), pids);
    let environ = std::fs::read(format!("/proc/{}/environ", machine.pids()["a"])).expect("an environment");
    assert!(String::from_utf8_lossy(&environ).contains("BUILD=2"));
    let (code, out, _) = machine.apply(&[]);
    assert!(code == 0 && out.contains("Nothing to do"), "{code} {out}");
}

#[test]
fn a_plan_mentions_a_pin_and_orphans() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    machine.process("b", "1", "");
    assert_eq!(machine.apply(&[]).0, 0);
    machine.process("a", "2", "");
    assert_eq!(machine.apply(&[]).0, 0);
    assert_eq!(machine.run(&["rollback", "--to", "previous", "--yes", "--reason", "2 leaks"]).0, 0);
    std::fs::remove_file(machine.path("m/b.yaml")).expect("a file");
    for form in ["text", "markdown", "json"] {
        let (code, out, err) = machine.run(&["plan", "m", "-o", form]);
        assert_eq!(code, 0, "{err}");
        assert!(out.contains("is pinned since") && out.contains("2 leaks"), "{form}: {out}");
        assert!(out.contains("in no manifest: web/b (1)"), "{form}: {out}");
    }
    assert_eq!(machine.apply(&[]).0, 0);
    assert!(!machine.run(&["plan", "m"]).1.contains("pinned"));
}

/// A new process has no old values, and the next run of a schedule is not a change of state.
#[test]
fn a_diff_shows_changes_only() {
    let machine = Machine::new();
    let schedule = |rule: &str| {
        let manifest = machine
            .manifest("s")
            .control("start_mode", "foreground")
            .start_cmd("exec true")
            .monitor("auto_type", 0)
            .monitor("crontab_rule", format!("'{rule}'"));
        machine.declare("s", manifest);
    };
    schedule("0 0 1 1 *");
    let (code, out, err) = machine.run(&["diff", "m"]);
    assert_eq!(code, 1, "{err}");
    assert!(out.lines().all(|line| !line.trim_start().starts_with('-')), "{out}");
    assert!(out.contains("+ state: running") && out.contains("+ monitor_policy.auto_type: 0"), "{out}");
    assert_eq!(machine.apply(&[]).0, 0);
    schedule("0 0 2 1 *");
    let (code, out, err) = machine.run(&["diff", "m"]);
    assert_eq!(code, 1, "{err}");
    assert!(out.contains("crontab_rule") && !out.contains("state:"), "{out}");
}

#[test]
fn a_lock_timeout_is_a_duration() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let (code, out, err) = machine.apply(&["--lock-timeout", "500ms"]);
    assert_eq!(code, 0, "{out} {err}");
}

/// A file that differs on its host is in plan, diff, status and get; the plan has no step for it.
#[test]
fn a_file_that_differs_on_its_host_is_shown() {
    let machine = Machine::new();
    machine.process("a", "1", "a");
    assert_eq!(machine.apply(&[]).0, 0);
    assert_eq!(machine.run(&["diff", "m"]).0, 0);
    let file = machine.path("a.conf");
    std::fs::write(&file, "other\n").expect("a file");
    let file = file.display().to_string();
    let shows = |args: &[&str]| machine.run(args).1.contains(&file);
    until("the report", || shows(&["get", "processes"]));
    let (code, out, _) = machine.run(&["plan", "m", "--detailed-exitcode"]);
    assert!(
        code == 0 && out.contains("files on hosts differ from the configmap") && out.contains(&file),
        "{out}"
    );
    let (code, out, _) = machine.run(&["diff", "m"]);
    assert!(code == 1 && out.contains(&file), "{code} {out}");
    assert!(shows(&["status"]) && shows(&["status", "-o", "json"]) && shows(&["diff", "m", "-o", "json"]));
    assert!(shows(&["get", "processes", "-o", "json"]));
    // The file and its manifest change together: that is a reload, not a difference on the host.
    std::fs::write(&file, "b\n").expect("a file");
    machine.process("a", "1", "b");
    let (_, out, _) = machine.run(&["plan", "m"]);
    assert!(out.contains("reload") && !out.contains("files on hosts differ"), "{out}");
    assert_eq!(machine.apply(&[]).0, 0);
    until("it is as stated", || !shows(&["get", "processes"]));
}
