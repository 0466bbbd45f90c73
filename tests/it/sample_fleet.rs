//! The sample fleet: valid, complete, and its commands run with a shell alone.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use abide::manifest::{self, Limits};
use abide::model::{AutoType, Spec, StartMode};

use crate::support::{Tree, project, until};

fn fleet() -> manifest::Loaded {
    manifest::load(&[project().join("manifests")], &Limits::default())
}

fn spec(name: &str) -> Spec {
    let key = format!("0:127.0.0.1:sample:{name}").parse().expect("a key");
    (**fleet().desired.instances[&key].spec).clone()
}

#[test]
fn the_sample_fleet_has_one_of_each_kind() {
    let fleet = fleet();
    assert_eq!(fleet.problems, []);
    let names: Vec<_> = fleet.desired.instances.keys().map(|key| key.name.to_string()).collect();
    assert_eq!(names, ["beat", "hello", "migrate", "tick", "web", "workers_1", "workers_2", "workers_3"]);
    let kinds: Vec<_> = fleet.desired.instances.values().map(|want| want.spec.monitor.auto_type).collect();
    for kind in [AutoType::Periodic, AutoType::Resident, AutoType::OneShot] {
        assert!(kinds.contains(&kind));
    }
    for want in fleet.desired.instances.values() {
        assert!(Path::new(&want.spec.identity.setup_path).is_dir(), "{}", want.spec.identity.setup_path);
        assert_eq!(want.spec.monitor.start_check_secs, Some(1));
        assert_eq!(want.spec.identity.user, None, "it runs as the user of the agent");
    }
}

fn shell(command: &str, spec: &Spec) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", command]).current_dir(&spec.identity.setup_path).stdin(Stdio::null());
    shell
}

#[test]
fn foreground_samples_run_and_print() {
    for name in ["hello", "web", "workers_1", "workers_3"] {
        let spec = spec(name);
        assert_eq!(spec.control.start_mode, Some(StartMode::Foreground));
        let command = spec.control.start_cmd.as_deref().expect("a command");
        let mut child =
            shell(command, &spec).env("GREETING", "you").stdout(Stdio::piped()).spawn().expect("a shell");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        assert!(child.try_wait().expect("a state").is_none(), "{name} has ended");
        child.kill().and_then(|()| child.wait()).expect("it ends");
        let said = match name {
            "workers_3" => "worker 3 at work\n",
            "workers_1" => "worker 1 at work\n",
            "web" => "serving as you\n",
            _ => "hello, it is ",
        };
        assert!(line.starts_with(said), "{name}: {line}");
    }
}

#[test]
fn one_shot_samples_succeed() {
    for (name, said) in [("migrate", "migrating\ndone\n"), ("tick", "tick at ")] {
        let spec = spec(name);
        let output =
            shell(spec.control.start_cmd.as_deref().expect("a command"), &spec).output().expect("a shell");
        assert!(output.status.success(), "{name}");
        assert!(String::from_utf8_lossy(&output.stdout).starts_with(said), "{name}");
    }
}

#[test]
fn the_daemon_starts_reloads_and_stops_by_its_commands() {
    let folder = Tree::new::<&str>(&[]);
    let moved = |command: &Option<String>| {
        command
            .as_deref()
            .expect("a command")
            .replace("/tmp/abide-sample", &folder.path().display().to_string())
    };
    let spec = spec("beat");
    assert!(shell(&moved(&spec.control.start_cmd), &spec).status().expect("a shell").success());
    let pid_file = folder.path().join("beat.pid");
    until("the pid file", || std::fs::read_to_string(&pid_file).is_ok_and(|pid| pid.ends_with('\n')));
    let healthy = || {
        shell(&moved(&spec.control.health_cmd), &spec)
            .stderr(Stdio::null())
            .status()
            .expect("a shell")
            .success()
    };
    assert!(healthy());
    assert!(shell(&moved(&spec.control.reload_cmd), &spec).status().expect("a shell").success());
    let log = || std::fs::read_to_string(folder.path().join("beat.log")).unwrap_or_default();
    until("the reload", || log().contains("reloaded"));
    assert!(healthy() && log().contains("beat"));
    assert!(shell(&moved(&spec.control.stop_cmd), &spec).status().expect("a shell").success());
    until("the end", || !healthy());
}
