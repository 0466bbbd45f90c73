//! `apply` and the local system as users run them: real processes, real crashes, and nothing done twice.

use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

pub use crate::fixtures::machine::{KillOnDrop, Machine};
use crate::fixtures::workspace::Workspace;
use crate::support::{project, stderr, stdout, until};
use crate::system::{is_alive, kill, lines};

#[test]
fn apply_runs_the_fewest_operations_and_keeps_other_pids() {
    let machine = Machine::new();
    for name in ["a", "b", "c", "d"] {
        machine.process(name, "1", "a");
    }
    let (code, out, err) = machine.apply(&[]);
    assert!(code == 0 && out.contains("converged"), "{code} {out} {err}");
    assert_eq!(machine.effects(), ["start a 1", "start b 1", "start c 1", "start d 1"]);
    let first = machine.pids();
    // Nothing to do takes no lease and writes nothing.
    let writes = machine.writes();
    let (code, out, _) = machine.apply(&[]);
    assert!(code == 0 && out.contains("Nothing to do"), "{out}");
    assert_eq!((machine.writes(), machine.run(&["plan", "m", "--detailed-exitcode"]).0), (writes, 0));
    // A file's sum: one reload, and the pid stays. A command: one restart.
    machine.process("a", "1", "b");
    machine.process("b", "2", "a");
    let (code, out, err) = machine.apply(&["-o", "json"]);
    let report: Value = serde_json::from_str(&out).unwrap_or_else(|error| panic!("{error}: {out} {err}"));
    assert_eq!(
        (code, &report["converged"], &report["exit"]["code"]),
        (0, &true.into(), &0.into()),
        "{report}"
    );
    let outcomes: Vec<String> = report["outcomes"]
        .as_array()
        .expect("outcomes")
        .iter()
        .map(|one| {
            format!(
                "{} {} {}",
                one["op"].as_str().expect("op"),
                one["instance"].as_str().expect("key"),
                one["outcome"].as_str().expect("outcome")
            )
        })
        .collect();
    assert_eq!(outcomes, ["reload 0:127.0.0.1:web:a Done", "restart 0:127.0.0.1:web:b Done"]);
    let second = machine.pids();
    assert_eq!((second["a"], second["c"], second["d"]), (first["a"], first["c"], first["d"]));
    assert_ne!(second["b"], first["b"]);
    // What no file wants any more goes with --prune, and only then.
    std::fs::remove_file(machine.path("m/c.yaml")).expect("it was there");
    assert!(machine.apply(&[]).1.contains("Nothing to do"));
    let (code, _, err) = machine.apply(&["--prune"]);
    assert_eq!(code, 0, "{err}");
    assert!(!machine.rows().contains_key("c") && !is_alive(first["c"] as u32));
    let last = machine.pids();
    assert_eq!((last["a"], last["b"], last["d"]), (second["a"], second["b"], second["d"]));
    // Guarded: one that dies is back.
    kill(last["d"] as u32, "KILL");
    until("d is back", || machine.pids().get("d").is_some_and(|pid| *pid != last["d"]));
    let (_, out, _) = machine.run(&["get", "hosts", "-o", "json"]);
    let hosts: Value = serde_json::from_str(&out).expect("rows");
    assert_eq!(
        (&hosts[0]["host"], &hosts[0]["agent"], &hosts[0]["processes"]),
        (&"0:127.0.0.1".into(), &true.into(), &3.into())
    );
}

#[test]
fn apply_needs_approval_and_refuses_a_stale_plan_file() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let (code, _, err) = machine.run(&["apply", "m"]);
    assert!(code == 4 && err.contains("--yes"), "{code} {err}");
    let (code, out, _) = machine.run(&["apply", "m", "-o", "json"]);
    assert!(code == 4 && out.contains("NoApproval"), "{code} {out}");
    assert_eq!(machine.effects(), Vec::<String>::new());
    assert_eq!(machine.run(&["plan", "m", "--out", "plan.saved"]).0, 0);
    let (code, _, err) = machine.run(&["apply", "plan.saved"]);
    assert_eq!((code, machine.effects()), (0, vec!["start a 1".to_owned()]), "{err}");
    let (code, out, _) = machine.run(&["apply", "plan.saved", "-o", "json"]);
    assert!(code == 4 && out.contains("StalePlan"), "what was there has changed: {code} {out}");
    // A tree with an error is refused as a whole.
    std::fs::write(machine.path("m/b.yaml"), "kind: Process\n").expect("a file");
    machine.process("a", "2", "");
    assert_eq!(machine.apply(&[]).0, 65);
    assert_eq!(machine.effects(), ["start a 1"]);
}

#[test]
fn failures_are_reported_and_their_dependents_are_skipped() {
    let machine = Machine::new();
    machine.write("bad", "  control: {start_mode: foreground, start_cmd: ./no-such-program}\n");
    machine.process("good", "1", "");
    machine.process("needs", "1", "");
    machine.edit("needs", "spec:\n", "depends_on: [bad]\nspec:\n");
    let (code, out, err) = machine.apply(&["--junit", "junit.xml"]);
    assert_eq!(code, 3, "{out} {err}");
    assert!(out.contains("no-such-program") && out.contains("dependency web/bad failed"), "{out}");
    assert_eq!(machine.effects(), ["start good 1"]);
    let junit = std::fs::read_to_string(machine.path("junit.xml")).expect("a file");
    assert!(junit.contains("failures=\"1\"") && junit.contains("skipped=\"1\""), "{junit}");
}

/// A target that accepts every call and never answers.
#[test]
fn an_unresponsive_target_ends_at_the_timeout() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let hole = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let config = format!(
        "targets: {{hole: {{url: \"http://{}\", dialect: abide, auth: {{app_code: a, app_secret: {{env: SECRET}}}}}}}}\n",
        hole.local_addr().expect("an address")
    );
    std::fs::write(machine.path("abide.yaml"), config).expect("a file");
    machine.edit("a", "proc_name: sleep", "user: app, proc_name: sleep");
    let begin = std::time::Instant::now();
    let mut apply = machine.command(&["apply", "m", "--yes", "--target", "hole", "--timeout", "2s"]);
    let output = apply.env("SECRET", "x").stdin(Stdio::null()).output().expect("it runs");
    assert_eq!(output.status.code(), Some(5), "{}", stderr(&output));
    assert!(
        stderr(&output).contains("did not answer before the timeout: nothing was done"),
        "{}",
        stderr(&output)
    );
    assert!(
        begin.elapsed() < Duration::from_secs(15),
        "not the half minute of a call: {:?}",
        begin.elapsed()
    );
}

#[test]
fn an_unwritable_report_file_is_refused_before_the_first_step() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let (code, _, err) = machine.apply(&["--junit", "no/such/folder/junit.xml"]);
    assert!(code == 1 && err.contains("junit.xml") && err.contains("nothing was done"), "{code} {err}");
    assert!(!machine.path("effects").exists());
}

/// A pause during the soak of a rollout takes effect.
#[test]
fn a_pause_takes_effect_during_a_rollout() {
    let machine = Machine::new();
    machine.several("many", "1");
    assert_eq!(machine.apply(&[]).0, 0);
    machine.several("many", "2");
    machine.edit("many", "batch: 1", "batch: 1, soak: 6s");
    let again = |version: &str| {
        machine.effects().iter().filter(|line| **line == format!("start many {version}")).count()
    };
    let mut apply = machine.command(&["apply", "m", "--yes"]);
    let apply = apply.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let apply = apply.spawn().expect("it starts");
    until("the first is new", || again("2") == 1);
    assert_eq!(machine.run(&["pause", "web", "--reason", "hands off"]).0, 0);
    let output = apply.wait_with_output().expect("it ends");
    let out = stdout(&output);
    assert!(output.status.code() == Some(3) && out.contains("hands off"), "{:?} {out}", output.status.code());
    assert_eq!(again("2"), 1);
    assert_eq!(machine.run(&["resume", "web"]).0, 0);
    assert_eq!(machine.apply(&[]).0, 0);
    assert_eq!(again("2"), 2);
}

#[test]
fn ten_concurrent_applies_start_one_system_and_each_process_once() {
    let machine = Machine::new();
    (0..5).for_each(|nth| machine.process(&format!("p{nth}"), "1", ""));
    let codes = machine.apply_concurrently(10);
    assert!(codes.iter().all(|code| *code == Some(0)), "{codes:?}");
    assert_eq!(lines(&machine.path("effects")), 5, "{:?}", machine.effects());
    let log = std::fs::read_to_string(machine.path(".abide-home/system.log")).expect("a log");
    assert_eq!(log.matches("instances recovered").count(), 1, "{log}");
}

#[test]
fn up_takes_a_background_system_over_and_leaves_processes_running() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    assert_eq!(machine.apply(&[]).0, 0);
    let before = machine.pids();
    machine.process("b", "1", "");
    let mut up = machine.start(&["up", "m"], "up.log");
    until("b runs", || machine.pids().contains_key("b"));
    assert_eq!(machine.pids()["a"], before["a"]);
    let all = machine.pids();
    kill(up.0.id(), "INT");
    assert_eq!(up.0.wait().expect("it ends").code(), Some(0));
    assert!(all.values().all(|pid| is_alive(*pid as u32)), "they go on");
    assert_eq!(machine.run(&["get", "processes"]).1, "no processes\n", "no gateway serves them");
    // The next one holds them again.
    assert!(machine.apply(&[]).1.contains("Nothing to do"));
    assert_eq!(machine.pids(), all);
    assert_eq!(machine.run(&["down", "--stop-processes"]).0, 0);
    assert!(all.values().all(|pid| !is_alive(*pid as u32)));
}

#[test]
fn logs_are_shown_from_the_end_and_followed() {
    let machine = Machine::new();
    machine.write("says", "  control: {start_mode: foreground, start_cmd: \"for n in 1 2 3; do echo line $n; done; exec sleep 1000\"}\n");
    assert_eq!(machine.apply(&[]).0, 0);
    until("it has spoken", || lines(&machine.path("log/says.log")) == 3);
    assert_eq!(machine.run(&["logs", "web/says"]).1, "line 1\nline 2\nline 3\n");
    assert_eq!(machine.run(&["logs", "web/says", "--tail", "2"]).1, "line 2\nline 3\n");
    assert_eq!(machine.run(&["logs", "web/says", "--tail", "0"]).1, "");
    let (code, _, err) = machine.run(&["logs", "web/none"]);
    assert!(code == 0 && err.contains("web/none"), "{err}");
    let out = std::fs::File::create(machine.path("followed")).expect("a file");
    let mut follow = machine.command(&["logs", "web/says", "-f", "--tail", "1"]);
    let follow = follow.stdin(Stdio::null()).stdout(out).stderr(Stdio::null()).spawn().expect("it starts");
    let _follow = KillOnDrop(follow);
    let log = || std::fs::File::options().append(true).open(machine.path("log/says.log")).expect("a log");
    let followed = || std::fs::read_to_string(machine.path("followed")).unwrap_or_default();
    until("it begins", || followed() == "line 3\n");
    std::io::Write::write_all(&mut log(), b"line 4\n").expect("a line");
    until("it follows", || followed() == "line 3\nline 4\n");
    // A log that was moved away goes on in a new file.
    std::fs::rename(machine.path("log/says.log"), machine.path("log/old.log")).expect("a log");
    std::fs::write(machine.path("log/says.log"), "line 5\n").expect("a log");
    until("it follows the new one", || followed() == "line 3\nline 4\nline 5\n");
}

#[test]
fn the_sample_fleet_converges_as_in_the_readme() {
    let folder = Workspace::new();
    let machine = Machine { folder };
    let manifests = project().join("manifests");
    let path = manifests.display().to_string();
    let text = |name: &str| std::fs::read_to_string(manifests.join(name)).expect("a manifest");
    assert!(text("fleet.yaml").contains("/tmp/abide-sample"));
    // Its own place, so that tests do not meet each other or a fleet that runs here.
    let own = machine.path("fleet");
    std::fs::create_dir(&own).expect("a folder");
    for entry in std::fs::read_dir(&manifests)
        .expect(&path)
        .flatten()
        .filter(|entry| entry.path().extension().is_some_and(|e| e == "yaml"))
    {
        let text = std::fs::read_to_string(entry.path()).expect("a file");
        let text = text
            .replace("/tmp/abide-sample", &machine.path("run").display().to_string())
            .replace("soak: 5s", "soak: 1s");
        std::fs::write(own.join(entry.file_name()), text).expect("a file");
    }
    let (code, out, err) = machine.run(&["apply", "fleet", "--yes"]);
    assert!(code == 0 && out.contains("converged"), "{code} {out} {err}");
    let rows = machine.rows();
    assert_eq!(rows.len(), 8);
    assert!(rows.values().all(|row| row["health"] == "Healthy" || row["name"] == "tick"), "{rows:#?}");
    assert!(machine.run(&["apply", "fleet", "--yes"]).1.contains("Nothing to do"));
}

#[test]
fn a_manual_operation_is_held_until_released() {
    let machine = Machine::new();
    ["a", "b"].iter().for_each(|name| machine.process(name, "1", ""));
    assert_eq!(machine.apply(&[]).0, 0);
    let (code, out, err) = machine.run(&["stop", "web/a", "--reason", "maintenance"]);
    assert!(
        code == 0 && out.contains("held until it is released: `abide release web/a`"),
        "{code} {out} {err}"
    );
    assert_eq!(machine.rows()["a"]["running"], false);
    // No plan undoes it.
    let (code, out, _) = machine.run(&["plan", "m", "-o", "json"]);
    let plan: Value = serde_json::from_str(&out).expect("a plan");
    assert_eq!(
        (code, &plan["held"][0]["reason"], plan["waves"].as_array().map(Vec::len)),
        (0, &"Hold".into(), Some(0)),
        "{plan}"
    );
    assert!(plan["held"][0]["detail"].as_str().expect("text").contains("maintenance"), "{plan}");
    for form in ["text", "markdown"] {
        let (code, out, err) = machine.apply(&["-o", form]);
        let names = ["Hold", "web/a", "maintenance"].iter().all(|part| out.contains(part));
        assert!(code == 3 && names, "{form}: {code} {out} {err}");
    }
    assert_eq!(machine.rows()["a"]["running"], false);
    assert!(machine.run(&["get", "holds"]).1.contains("maintenance"));
    assert_eq!(machine.run(&["release", "web/a"]).0, 0);
    assert_eq!((machine.apply(&[]).0, &machine.rows()["a"]["running"]), (0, &true.into()));
    // A pause holds a whole namespace.
    assert_eq!(machine.run(&["pause", "web"]).0, 0);
    machine.process("b", "2", "");
    let (_, out, _) = machine.run(&["plan", "m"]);
    assert!(out.contains("Paused"), "{out}");
    assert_eq!(machine.run(&["resume", "web"]).0, 0);
    assert_eq!(machine.apply(&[]).0, 0);
    assert_eq!(machine.run(&["status", "--check"]).0, 0);
    let before = machine.pids();
    assert_eq!(machine.run(&["restart", "web/b@127.0.0.1", "--until", "1s"]).0, 0);
    assert!(machine.pids()["b"] != before["b"] && machine.pids()["a"] == before["a"]);
    let (code, _, err) = machine.run(&["stop", "web/none"]);
    assert!(code == 64 && err.contains("web/none"), "{err}");
    let (code, out, _) = machine.run(&["describe", "web/b", "-o", "json"]);
    let told: Value = serde_json::from_str(&out).expect("rows");
    // A restart leaves no hold, and keeps the revision.
    assert!(code == 0 && told[0]["hold"].is_null() && told[0]["revision"].is_string(), "{told}");
    let (_, out, _) = machine.run(&["history", "-o", "json"]);
    assert!(serde_json::from_str::<Vec<Value>>(&out).expect("entries").len() >= 2, "{out}");
    // What is exported plans to nothing.
    let (code, out, _) = machine.run(&["export"]);
    std::fs::write(machine.path("exported.yaml"), &out).expect("a file");
    assert_eq!(code, 0);
    let (code, out, err) = machine.run(&["plan", "exported.yaml", "--detailed-exitcode"]);
    assert_eq!(code, 0, "{out} {err}");
    assert_eq!(machine.run(&["doctor"]).0, 0);
}

/// Two runners with empty homes, one gateway: the second does nothing, and a change is still classified rightly.
#[test]
fn two_empty_homes_against_one_gateway() {
    let machine = Machine::new();
    machine.process("a", "1", "a");
    assert_eq!(machine.apply(&[]).0, 0);
    let home = machine.path(".abide-home");
    let read = |name: &str| std::fs::read_to_string(home.join(name)).expect("a file").trim().to_owned();
    let config = format!(
        "targets:\n  prod: {{url: \"{}\", dialect: abide, auth: {{app_code: abide, app_secret: {{env: THE_SECRET}}}}}}\n",
        read("address")
    );
    std::fs::write(machine.path("abide.yaml"), config).expect("a file");
    let elsewhere = |args: &[&str]| {
        let output = machine
            .command(args)
            .env("ABIDE_HOME", machine.path("empty"))
            .env("THE_SECRET", read("secret"))
            .env("HOME", machine.path("empty"))
            .stdin(Stdio::null())
            .output()
            .expect("it runs");
        (output.status.code().unwrap_or(-1), stdout(&output), stderr(&output))
    };
    let user = "user: root";
    let text = std::fs::read_to_string(machine.path("m/a.yaml")).expect("a file");
    let (code, _, err) = elsewhere(&["plan", "m", "--target", "prod"]);
    assert!(
        code == 65 && err.contains("identity.user"),
        "another machine must be told whom to run as: {code} {err}"
    );
    let me = crate::system::whoami();
    let named = |text: &str| {
        text.replace("proc_name: sleep,", &format!("proc_name: sleep, {},", user.replace("root", &me)))
    };
    std::fs::write(machine.path("m/a.yaml"), named(&text)).expect("a file");
    let (code, out, err) = elsewhere(&["apply", "m", "--target", "prod", "--yes"]);
    assert!(code == 0 && out.contains("Nothing to do"), "{code} {out} {err}");
    assert!(!machine.path("empty").exists(), "nothing was started or written here");
    machine.process("a", "1", "b");
    let text = std::fs::read_to_string(machine.path("m/a.yaml")).expect("a file");
    std::fs::write(machine.path("m/a.yaml"), named(&text)).expect("a file");
    let (code, out, err) = elsewhere(&["apply", "m", "--target", "prod", "--yes"]);
    assert!(code == 0 && out.contains("reload web/a"), "{code} {out} {err}");
    assert_eq!(machine.effects(), ["reload a", "start a 1"]);
}

#[test]
fn a_reload_waits_for_its_config_file_only() {
    let machine = Machine::new();
    ["a", "b"].iter().for_each(|name| machine.process(name, "1", "a"));
    assert_eq!(machine.apply(&[]).0, 0);
    machine.process("a", "1", "b");
    std::fs::write(machine.path("a.conf"), "a\n").expect("the file comes later");
    let (code, out, _) = machine.apply(&[]);
    assert!(code == 3 && out.contains("ConfigNotThere"), "{code} {out}");
    assert_eq!(machine.effects(), ["start a 1", "start b 1"]);
    std::fs::write(machine.path("a.conf"), "b\n").expect("a file");
    assert_eq!(machine.apply(&[]).0, 0);
    assert_eq!(machine.effects(), ["reload a", "start a 1", "start b 1"]);
    // An unhealthy process does not affect an apply of another one.
    machine.write(
        "ill",
        "  control: {start_mode: foreground, start_cmd: exec sleep 1000, health_cmd: \"false\"}\n",
    );
    assert_eq!(machine.apply(&[]).0, 3);
    assert_eq!(machine.apply(&["--include", "web/a"]).0, 0);
    // Without an agent, success would be false.
    assert_eq!(machine.run(&["down"]).0, 0);
    assert_eq!(machine.run(&["status", "--check"]).0, 3);
}

#[test]
fn concurrent_applies_restart_each_process_once() {
    let machine = Machine::new();
    (0..4).for_each(|nth| machine.process(&format!("p{nth}"), "1", ""));
    assert_eq!(machine.apply(&[]).0, 0);
    (0..4).for_each(|nth| machine.process(&format!("p{nth}"), "2", ""));
    let codes = machine.apply_concurrently(5);
    assert!(codes.iter().all(|code| *code == Some(0)), "{codes:?}");
    let starts: Vec<String> = machine
        .effects()
        .into_iter()
        .filter(|line| line.starts_with("start") && line.ends_with('2'))
        .collect();
    assert_eq!(starts.len(), 4, "{starts:?}");
}

#[test]
fn a_dead_local_system_is_detected_before_the_timeout() {
    let machine = Machine::new();
    machine.process("slow", "1", "");
    machine.edit("slow", "start_check_secs: 0", "start_check_secs: 300");
    let mut command = machine.command(&["apply", "m", "--yes"]);
    let child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("it starts");
    until("it was started", || machine.effects() == ["start slow 1"]);
    let system = std::fs::read_to_string(machine.path(".abide-home/system.lock")).expect("a lock");
    kill(system.trim().parse().expect("a pid"), "KILL");
    let output = child.wait_with_output().expect("it ends long before its ten minutes");
    assert_eq!(output.status.code(), Some(3), "{}", stdout(&output));
    assert!(stdout(&output).contains("cannot be reached"), "{}", stdout(&output));
    assert_eq!(machine.effects(), ["start slow 1"]);
}

/// A watch does not start processes that `down` stops.
#[test]
fn down_while_up_runs_leaves_nothing_running() {
    let machine = Machine::new();
    ["a", "b", "c"].iter().for_each(|name| machine.process(name, "1", ""));
    let mut up = machine.start(&["up", "m"], "up.log");
    let said = || std::fs::read_to_string(machine.path("up.log")).unwrap_or_default();
    until("all run", || said().contains("converged: 3 instances as wanted"));
    let pids = machine.pids();
    assert_eq!(pids.len(), 3);
    let (code, out, err) = machine.run(&["down", "--stop-processes"]);
    assert_eq!(code, 0, "{out}{err}");
    until("up has ended", || up.0.try_wait().expect("it is ours").is_some());
    assert!(pids.values().all(|pid| !is_alive(*pid as u32)));
    assert_eq!(machine.effects(), ["start a 1", "start b 1", "start c 1", "stop a", "stop b", "stop c"]);
}

/// A first start that is still being checked is not registered yet; `down` waits for it, and stops it too.
#[test]
fn down_stops_a_first_start_that_is_in_flight() {
    let machine = Machine::new();
    machine.write(
        "slow",
        "  control: {start_mode: foreground, start_cmd: \"echo $$ > started; exec sleep 1000\"}\n",
    );
    machine.edit("slow", "start_check_secs: 0", "start_check_secs: 300");
    let _apply = machine.start(&["apply", "m", "--yes"], "apply.log");
    let pid = || std::fs::read_to_string(machine.path("started")).ok()?.trim().parse::<u32>().ok();
    until("it runs", || pid().is_some());
    let (code, out, err) = machine.run(&["down", "--stop-processes"]);
    assert!(code == 0 && err.contains("stopping 1 process"), "{code} {out}{err}");
    assert!(!is_alive(pid().expect("a pid")), "{err}");
}
