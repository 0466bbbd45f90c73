//! Input and output of long-running commands: streams, readiness, arguments, and the owner.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::apply::{KillOnDrop, Machine};
use crate::support::until;
use crate::system::kill;
use crate::watch::{read_log, running};

const WATCH: [&str; 6] = ["watch", "m", "--debounce", "50ms", "--listen", "127.0.0.1:0"];

fn with_pipes(command: &mut Command) -> KillOnDrop {
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    KillOnDrop(command.spawn().expect("it starts"))
}

/// The `ready` line, and the rest for later.
fn ready(child: &mut Child) -> (String, impl Read + use<>) {
    let mut out = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    out.read_line(&mut line).expect("a line");
    assert!(line.starts_with("ready http://"), "{line}");
    (line, out)
}

fn rest(mut from: impl Read) -> String {
    let mut text = String::new();
    from.read_to_string(&mut text).expect("text");
    text
}

/// More output than a pipe holds, and no reader: the run continues and ends.
#[test]
fn an_unread_stderr_does_not_block_the_loop() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let faults: String = (0..2000).map(|nth| format!("wrong_{nth}: 1\n")).collect();
    std::fs::write(machine.path("m/z.yaml"), format!("kind: Process\n{faults}")).expect("a file");
    let args = [&WATCH[..], &["--interval", "500ms", "--heal", "--follow"]].concat();
    let mut watch = with_pipes(&mut machine.command(&args));
    let (_, out) = ready(&mut watch.0);
    until("a runs", || running(&machine, &["a"]));
    machine.process("b", "1", "");
    until("b runs", || running(&machine, &["b"]));
    kill(watch.0.id(), "TERM");
    let err = rest(watch.0.stderr.take().expect("a pipe"));
    assert_eq!(watch.0.wait().expect("it ends").code(), Some(143));
    assert_eq!(rest(out), "", "all but `ready` is said on stderr");
    assert!(err.contains("wrong_0") && err.contains("start 0:127.0.0.1:web:a"), "{err:.2000}");
}

#[test]
fn json_logs_are_objects_only() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    std::fs::write(machine.path("m/z.yaml"), "kind: Process\nwrong: 1\n").expect("a file");
    let log = std::fs::File::create(machine.path("watch.log")).expect("a file");
    let args = [&["--log-format", "json"], &WATCH[..]].concat();
    let mut command = machine.command(&args);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let mut watch = KillOnDrop(command.spawn().expect("it starts"));
    until("it converges", || read_log(&machine, "watch.log").contains("converged"));
    kill(watch.0.id(), "INT");
    assert_eq!(watch.0.wait().expect("it ends").code(), Some(130));
    let text = read_log(&machine, "watch.log");
    let lines: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect();
    for line in &lines {
        assert!(["time", "level", "event"].iter().all(|field| line[*field].is_string()), "{line}");
    }
    let of =
        |event: &str| lines.iter().find(|line| line["event"] == event).unwrap_or_else(|| panic!("{text}"));
    assert_eq!(of("step")["instance"], "0:127.0.0.1:web:a");
    assert_eq!((&of("step")["op"], &of("step")["outcome"]), (&"start".into(), &"Done".into()), "{text}");
    assert!(of("problem")["file"].as_str().is_some_and(|file| file.ends_with("z.yaml")), "{text}");
    assert!(of("problem")["line"].is_u64() && of("read")["revision"].is_string(), "{text}");
}

/// Before anybody is asked anything: the gateway of this target is not there.
#[test]
fn watch_is_ready_before_it_checks_the_source() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    let config = "targets: {prod: {url: \"http://127.0.0.1:9\", dialect: abide, auth: {app_code: a, app_secret: {env: IT_SECRET}}}}\n";
    std::fs::write(machine.path("abide.yaml"), config).expect("a file");
    let args = [&WATCH[..], &["--prune", "--target", "prod", "--owner", "team"]].concat();
    let mut watch = with_pipes(machine.command(&args).env("IT_SECRET", "s"));
    ready(&mut watch.0);
    let mut line = String::new();
    let mut err = BufReader::new(watch.0.stderr.take().expect("a pipe"));
    err.read_line(&mut line).expect("a line");
    assert!(line.starts_with("error: "), "{line}");
    kill(watch.0.id(), "TERM");
    assert_eq!(watch.0.wait().expect("it ends").code(), Some(143));
}

/// The same as `apply` takes.
#[test]
fn a_policys_owner_is_the_owner_and_a_hold_can_be_overridden() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    std::fs::write(machine.path("m/policy.yaml"), "kind: Policy\nmeta: {name: p}\nowner: team\n")
        .expect("a file");
    assert_eq!(machine.apply(&["--lock-timeout", "5s"]).0, 0);
    assert_eq!(machine.rows()["a"]["owner"], "team");
    assert_eq!(machine.run(&["stop", "web/a"]).0, 0);
    for verb in ["plan", "diff"] {
        let (code, out, err) = machine.run(&[verb, "m", "--lock-timeout", "5s"]);
        assert!(code <= 1, "{out}{err}");
    }
    let args = [&WATCH[..], &["--override-holds", "--lock-timeout", "5s", "--stale-after", "5m"]].concat();
    let mut watch = with_pipes(&mut machine.command(&args));
    ready(&mut watch.0);
    until("it is started again", || running(&machine, &["a"]));
    assert_eq!(machine.rows()["a"]["owner"], "team");
}

#[test]
fn a_broken_or_missing_config_file_is_reported() {
    let machine = Machine::new();
    assert_eq!(machine.run(&["get", "processes", "--config", "nowhere.yaml"]).0, 64);
    std::fs::write(machine.path("abide.yaml"), "# nothing yet\n").expect("a file");
    assert_eq!(machine.run(&["get", "processes"]).0, 0);
    std::fs::write(machine.path("abide.yaml"), "owner: team\nstate: [\n").expect("a file");
    machine.process("a", "1", "");
    for args in [&["get", "processes"][..], &["plan", "m"], &["status"], &["watch", "m"], &["up", "m"]] {
        let (code, out, err) = machine.run(args);
        assert!(
            code == 64 && err.contains("abide.yaml") && err.contains("line "),
            "{args:?}: {code} {out}{err}"
        );
    }
    let (code, out, _) = machine.run(&["doctor"]);
    assert!(code == 1 && out.contains("abide.yaml"), "{out}");
}

#[test]
fn every_verb_with_instances_takes_a_selection() {
    let machine = Machine::new();
    ["a", "b", "c"].iter().for_each(|name| machine.process(name, "1", ""));
    machine.edit("b", "name: b}", "name: b, labels: {tier: front}}");
    let (code, out, err) = machine.apply(&[]);
    assert_eq!(code, 0, "{out}{err}");
    let names = |more: &[&str]| {
        let (code, out, err) = machine.run(&[&["get", "processes", "-o", "name"], more].concat());
        assert_eq!(code, 0, "{err}");
        out.replace("0:127.0.0.1:web:", "").split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(names(&["--host", "127.0.0.1"]), "a b c");
    assert_eq!(names(&["--host", "10.*", "--host", "0:127.*", "--exclude", "web/a"]), "b c");
    assert_eq!((names(&["--include", "web/c"]), names(&["-l", "tier=front"])), ("c".into(), "b".into()));
    let (code, out, _) = machine.run(&["export", "-l", "tier=front"]);
    assert!(code == 0 && out.contains("name: b") && !out.contains("name: a"), "{out}");
    assert_eq!(machine.run(&["stop", "-n", "web"]).0, 64, "that names no process");
    let (code, out, err) = machine.run(&["stop", "--include", "web/a,web/b", "-l", "!tier", "--until", "2h"]);
    assert!(code == 0 && out.contains("stop: 1 of 1 instance"), "{out}{err}");
    let until = out.split("held until ").nth(1).and_then(|rest| rest.split(',').next()).expect("a time");
    let holds = || machine.run(&["get", "holds", "-o", "json"]).1;
    assert!(holds().contains(until), "{until} {}", holds());
    assert_eq!(machine.run(&["get", "holds", "-o", "name", "--exclude", "web/a"]).1, "");
    assert!(machine.run(&["release", "--include", "web/c"]).1.contains("0 holds"));
    assert!(machine.run(&["release", "--include", "web/a", "--host", "127.0.0.1"]).1.contains("1 hold"));
}

/// What has no variable that names him has a name all the same.
#[test]
fn a_hold_names_its_creator_without_an_environment_variable() {
    let machine = Machine::new();
    machine.process("a", "1", "");
    assert_eq!(machine.apply(&[]).0, 0);
    let stop = machine.command(&["stop", "web/a"]).env_remove("USER").stdin(Stdio::null()).output();
    assert!(stop.expect("it runs").status.success());
    let (_, out, _) = machine.run(&["get", "holds", "-o", "json"]);
    assert!(!out.contains("somebody"), "{out}");
}
