//! Variables that programs print: `env: {NAME: {exec: […]}}` runs on the host at each start, as the process's user, and only
//! if the host policy allows it.

use serde_json::{Value, json};

use crate::support::{abide, stderr, stdout, test_user, until};
use crate::system::{System, lines, whoami};

fn allow(system: &mut System, policy: &str) {
    std::fs::write(system.path("policy.yaml"), policy).expect("a file");
    system.kill_agent();
    system.start_agent_with(&["--policy", "policy.yaml"], &[]);
}

fn with_exec(system: &System, start: &str, script: &str) -> Value {
    let mut spec = system.spec("p", start);
    spec["env"] = json!({"TOKEN": {"exec": ["/bin/sh", "-c", script]}, "MODE": "plain"});
    spec
}

fn variable(pid: u32, name: &str) -> Option<String> {
    let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let environ = String::from_utf8_lossy(&environ).into_owned();
    environ.split('\0').find_map(|one| one.strip_prefix(&format!("{name}="))).map(str::to_owned)
}

#[test]
fn a_program_runs_at_each_start_and_at_no_other_time() {
    let mut system = System::new();
    allow(&mut system, "env_exec: true\n");
    let script = "echo run >> runs; echo hidden-text >&2; echo value-$(wc -l < runs); echo second";
    let mut spec = with_exec(&system, "exec sleep 1000", script);
    spec["control"]["health_cmd"] = json!("echo check >> checks; test -z \"$TOKEN\"");
    assert_eq!(system.operate("p", 0, &spec).0, 0);
    let pid = system.pid("p").expect("it runs");
    assert_eq!(variable(pid, "TOKEN").as_deref(), Some("value-1\nsecond"), "without the final line break");
    assert_eq!(variable(pid, "MODE").as_deref(), Some("plain"));
    until("its health is known", || system.process("p")["health"] == "Healthy");
    assert_eq!(lines(&system.path("runs")), 1, "a check does not run it");
    // No answer has the value or the error text; the row has the program.
    let row = system.process("p").to_string();
    assert!(row.contains("/bin/sh") && !row.contains("value-1") && !row.contains("hidden-text\""), "{row}");
    assert_eq!(system.operate("p", 7, &spec).0, 0);
    let next = system.pid("p").expect("it runs");
    assert_eq!((next != pid, variable(next, "TOKEN").as_deref()), (true, Some("value-2\nsecond")));
    // A relaunch after a crash is a start.
    assert_eq!(system.operate("p", 3, &spec).0, 0);
    crate::system::kill(next, "KILL");
    until("it is back", || {
        system.pid("p").is_some_and(|pid| variable(pid, "TOKEN").as_deref() == Some("value-3\nsecond"))
    });
    assert!(!system.log().contains("value-"), "{}", system.log());
}

#[test]
fn planning_runs_nothing_and_an_unchanged_program_is_no_change() {
    let mut system = System::new();
    allow(&mut system, "env_exec: true\n");
    system.server.write_target(system.folder.path());
    std::fs::create_dir(system.path("m")).expect("a folder");
    let manifest = |script: &str| {
        let text = crate::fixtures::manifest::Manifest::local("api", system.folder.path())
            .identity("user", whoami())
            .start_cmd("exec sleep 1000")
            .control("start_mode", "foreground")
            .monitor("auto_type", 1)
            .monitor("start_check_secs", 0)
            .spec("env", &format!("{{TOKEN: {{exec: [/bin/sh, -c, '{script}']}}}}"))
            .to_string();
        std::fs::write(system.path("m/api.yaml"), text).expect("a file");
    };
    let run = |args: &[&str]| {
        let output = abide(&[args, &["--target", "there"]].concat(), system.folder.path(), b"");
        (output.status.code(), stdout(&output) + &stderr(&output))
    };
    manifest("echo run >> runs; echo the-value");
    let (code, text) = run(&["plan", "m"]);
    assert!(code == Some(0) && !system.path("runs").exists(), "{text}");
    let (code, text) = run(&["apply", "m", "--yes"]);
    assert_eq!((code, lines(&system.path("runs"))), (Some(0), 1), "{text}");
    let (_, text) = run(&["plan", "m"]);
    assert!(text.to_lowercase().contains("nothing to do"), "{text}");
    manifest("echo run >> runs; echo another");
    let (_, text) = run(&["plan", "m"]);
    assert!(
        text.contains("env.TOKEN: exec /bin/sh") && text.contains("restart") && !text.contains("the-value\n"),
        "{text}"
    );
    assert_eq!(lines(&system.path("runs")), 1);
    let (code, text) = run(&["apply", "m", "--yes", "--max-restart", "1"]);
    assert_eq!((code, lines(&system.path("runs"))), (Some(0), 2), "{text}");
}

#[test]
fn a_program_runs_as_the_user_of_the_process() {
    let Some(user) = test_user() else { return };
    let mut system = System::new();
    allow(&mut system, "env_exec: true\n");
    let mut spec = system.spec_of(&user, "u", "exec sleep 1000");
    spec["env"] =
        json!({"WHO": {"exec": ["id", "-un"]}, "WORDS": {"exec": ["printf", "%s|", "a b", "'c'", "$HOME"]}});
    assert_eq!(system.operate("u", 0, &spec).0, 0);
    let pid = system.pid("u").expect("it runs");
    assert_eq!(variable(pid, "WHO").as_deref(), Some(user.name.as_str()));
    assert_eq!(variable(pid, "WORDS").as_deref(), Some("a b|'c'|$HOME|"), "no shell reads the arguments");
}

#[test]
fn a_host_without_the_rule_refuses_and_a_failed_program_starts_nothing() {
    let mut system = System::new();
    let good = with_exec(&system, "echo started >> starts; exec sleep 1000", "echo run >> runs; echo value");
    system.refuses("p", &good, &["env_exec: env TOKEN is read from a program"]);
    allow(&mut system, "namespaces: [web]\n");
    system.refuses("p", &good, &["host policy policy.yaml", "env_exec"]);
    assert!(!system.path("runs").exists());
    allow(&mut system, "env_exec: true\n");
    let start = "echo started >> starts; exec sleep 1000";
    for (script, says) in [
        ("echo the-secret; echo the-reason >&2; exit 3", "\"/bin/sh\" ended with 3"),
        ("head -c 70000 /dev/zero | tr '\\0' x", "more than 64 KiB"),
        ("printf 'a\\377b'", "not UTF-8"),
        ("printf 'a\\0b'", "NUL byte"),
        ("sleep 300 & exec sleep 301", "timed out after 10 s"),
    ] {
        let (code, message) = system.operate("p", 0, &with_exec(&system, start, script));
        assert!(
            code != 0 && message.contains("env TOKEN") && message.contains(says),
            "{script}: {code} {message}"
        );
        assert!(!message.contains("the-secret") && !message.contains("the-reason"), "{message}");
    }
    assert!(!system.path("starts").exists());
    assert_eq!(system.operate("p", 0, &good).0, 0, "it starts with a value");
    assert_eq!((lines(&system.path("runs")), lines(&system.path("starts"))), (1, 1));
}
