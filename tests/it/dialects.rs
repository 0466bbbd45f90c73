//! Dialects: each drives the same fleet of real processes to the same state, with the gateway as the platform.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::fixtures::manifest::Manifest;
use crate::support::{command, stderr, stdout, until};
use crate::system::{System, is_alive, whoami};

/// A platform, and a controller's own folder.
pub struct Fleet {
    pub system: System,
    pub dialect: &'static str,
}

/// A process in daemon mode, whose commands leave a line each.
#[derive(Clone)]
pub struct Daemon {
    pub name: &'static str,
    pub version: &'static str,
    pub config: &'static str,
    pub pid_file: &'static str,
    pub state: &'static str,
    pub more: String,
}

impl Daemon {
    pub fn new(name: &'static str) -> Daemon {
        Daemon {
            name,
            version: "1",
            config: "a.conf",
            pid_file: "first",
            state: "running",
            more: String::new(),
        }
    }
}

impl Fleet {
    pub fn new(dialect: &'static str) -> Fleet {
        let system = System::new();
        let url = format!("http://{}", system.server.address);
        let fleet = Fleet { system, dialect };
        fleet.target(&url, "");
        for folder in ["m", "run"] {
            std::fs::create_dir(fleet.path(folder)).expect("a folder");
        }
        fleet
    }

    /// Where calls go.
    pub fn target(&self, url: &str, more: &str) {
        let text = format!(
            "targets:\n  it:\n    url: {url}\n    dialect: {}\n    biz_id: 2\n    supplier_id: 0\n{more}\
             \x20   auth: {{app_code: all, app_secret: {{env: IT_SECRET}}, username: admin}}\n",
            self.dialect
        );
        std::fs::write(self.path("abide.yaml"), text).expect("a file");
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.system.path(name)
    }

    pub fn write(&self, daemon: &Daemon) {
        let Daemon { name, version, config, pid_file, state, more } = daemon;
        let here = self.system.folder.path().display();
        let pid = format!("{here}/run/{name}.{pid_file}.pid");
        // The shell's child is a sleep a moment later.
        let up = "until grep -q sleep /proc/$!/comm; do :; done";
        let run = format!("sleep 1000 & echo $! > {pid}; {up}");
        let text = Manifest::local(name, self.system.folder.path())
            .field("state", state)
            .identity("pid_path", &pid)
            .identity("user", whoami())
            .identity("config_path", format!("{here}/{config}"))
            .monitor("auto_type", 1)
            .monitor("start_check_secs", 0)
            .monitor("stop_check_secs", 5)
            .monitor("op_timeout", 5)
            .start_cmd(&format!("echo start {name} {version} >> effects; {run}"))
            .stop_cmd(&format!("echo stop {name} >> effects; kill $(cat {pid})"))
            .control("reload_cmd", format!("echo reload {name} >> effects"))
            .control(
                "restart_cmd",
                format!("echo restart {name} {version} >> effects; kill $(cat {pid}); {run}"),
            )
            .to_string()
            .replace("spec:\n", &format!("{more}spec:\n"));
        std::fs::write(self.path(&format!("m/{name}.yaml")), text).expect("a file");
    }

    /// The same with several instances, each with its own files.
    pub fn write_several(&self, daemon: &Daemon) {
        self.write(daemon);
        let Daemon { name, pid_file, .. } = daemon;
        let file = self.path(&format!("m/{name}.yaml"));
        let text = std::fs::read_to_string(&file).expect("a file");
        let pid = format!("{}/run/{name}.{pid_file}.pid", self.system.folder.path().display());
        let own = pid.replace(&format!("{name}.{pid_file}"), "${name}");
        let text = text
            .replace(&format!("pid_path: {pid}"), &format!("pid_path: \"{own}\""))
            .replace(&pid, &own)
            .replace(&format!("value_key: {name}"), "value_key: \"${name}\"");
        std::fs::write(&file, text).expect("a file");
    }

    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = command(args, self.system.folder.path());
        command.args(["--target", "it"]).env("IT_SECRET", "s3cret").stdin(Stdio::null());
        command
    }

    /// A process that runs once, and what it does.
    pub fn once(&self, name: &'static str, command: &str) {
        self.write(&Daemon::new(name));
        let file = self.path(&format!("m/{name}.yaml"));
        let text = std::fs::read_to_string(&file).expect("a file");
        let line = |line: &str| match line.trim_start().starts_with("start_cmd") {
            true => format!("    start_cmd: {command}\n"),
            false => format!("{line}\n"),
        };
        let text: String = text.lines().map(line).collect();
        std::fs::write(&file, text.replace("auto_type: 1", "auto_type: 2")).expect("a file");
    }

    pub fn run(&self, args: &[&str]) -> (i32, String, String) {
        let output = self.command(args).output().expect("it runs");
        (output.status.code().unwrap_or(-1), stdout(&output), stderr(&output))
    }

    pub fn apply(&self, more: &[&str]) -> (i32, String, String) {
        let mut args = vec!["apply", "m", "--yes", "--owner", "team"];
        args.extend(more);
        self.run(&args)
    }

    pub fn effects(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.path("effects")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    /// The gateway's rows of all processes, under any name.
    pub fn rows(&self) -> Vec<Value> {
        let page =
            self.system.server.call("GET", "/api/abide/v1/processes?limit=1000", serde_json::json!({}));
        page["data"]["items"].as_array().cloned().unwrap_or_default()
    }

    pub fn row(&self, name: &str) -> Value {
        self.rows().into_iter().find(|row| row["name"] == name).unwrap_or(Value::Null)
    }

    pub fn pid(&self, name: &str) -> Option<u32> {
        self.row(name)["pid"].as_u64().map(|pid| pid as u32)
    }

    pub fn well(&self, what: &str, more: &[&str]) {
        let (code, out, err) = self.apply(more);
        assert_eq!(
            code,
            0,
            "{} {what}: {out}{err}\n{:?}\n{}",
            self.dialect,
            self.effects(),
            self.system.log()
        );
    }
}

fn the_same_story(dialect: &'static str) {
    let fleet = Fleet::new(dialect);
    let (mut a, mut b) = (Daemon::new("a"), Daemon::new("b"));
    [&a, &b].into_iter().for_each(|daemon| fleet.write(daemon));
    fleet.well("both are new", &[]);
    let mut effects = fleet.effects();
    effects.sort();
    assert_eq!(effects, ["start a 1", "start b 1"], "{dialect}");
    let first = (fleet.pid("a"), fleet.pid("b"));
    assert!(first.0.is_some_and(is_alive) && first.1.is_some_and(is_alive), "{dialect}");
    let (code, out, err) = fleet.apply(&[]);
    assert_eq!((code, out.contains("Nothing to do")), (0, true), "{dialect}: {out}{err}");
    // A reload leaves the pid as it is.
    a.config = "b.conf";
    fleet.write(&a);
    fleet.well("a reload", &[]);
    assert_eq!(
        (fleet.pid("a"), fleet.effects().last().cloned()),
        (first.0, Some("reload a".to_owned())),
        "{dialect}"
    );
    // A restart, by its own command where the target has no other way.
    b.version = "2";
    fleet.write(&b);
    fleet.well("a restart", &[]);
    assert!(fleet.pid("b").is_some() && fleet.pid("b") != first.1, "{dialect}");
    assert_eq!(fleet.pid("a"), first.0, "{dialect}");
    // Another identity: the old one is stopped by what it was started with.
    a.pid_file = "second";
    fleet.write(&a);
    fleet.well("a replacement", &[]);
    let effects = fleet.effects();
    assert_eq!(effects[effects.len() - 2..], ["stop a", "start a 1"], "{dialect}: {effects:?}");
    assert!(!first.0.is_some_and(is_alive), "{dialect}");
    let second = fleet.pid("a");
    let (code, out, err) = fleet.apply(&[]);
    assert_eq!((code, out.contains("Nothing to do")), (0, true), "{dialect}: {out}{err}");
    // Stopped, and up again.
    b.state = "stopped";
    fleet.write(&b);
    fleet.well("a stop", &[]);
    assert_eq!(fleet.pid("b"), None, "{dialect}");
    b.state = "running";
    fleet.write(&b);
    fleet.well("a start", &[]);
    // What is in no manifest any more goes, and only that.
    std::fs::remove_file(fleet.path("m/b.yaml")).expect("a file");
    let third = fleet.pid("b");
    fleet.well("nothing without --prune", &[]);
    assert_eq!(fleet.pid("b"), third, "{dialect}");
    fleet.well("a removal", &["--prune"]);
    until("b is gone", || !third.is_some_and(is_alive));
    assert_eq!(fleet.pid("a"), second, "{dialect}");
    let counted = |word: &str| fleet.effects().iter().filter(|line| line.starts_with(word)).count();
    assert_eq!((counted("start a"), counted("stop a"), counted("reload a")), (2, 1, 1), "{dialect}");
    assert_eq!((counted("stop b"), counted("restart b"), counted("reload b")), (2, 1, 0), "{dialect}");
}

#[test]
fn abide_reaches_the_same_fleet() {
    the_same_story("abide");
}

#[test]
fn gse_v1_reaches_the_same_fleet() {
    the_same_story("gse-v1");
}

#[test]
fn gse_v2_reaches_the_same_fleet() {
    the_same_story("gse-v2");
}

#[test]
fn gse_apigw_reaches_the_same_fleet() {
    the_same_story("gse-apigw");
}

#[test]
fn job_reaches_the_same_fleet() {
    the_same_story("job");
}

/// As people write it: a number.
#[test]
fn a_scope_may_be_a_number_and_a_timeout_may_be_unlimited() {
    let fleet = Fleet::new("job");
    fleet.write(&Daemon::new("x"));
    let config = std::fs::read_to_string(fleet.path("abide.yaml")).expect("a file");
    let config = config.replace("biz_id: 2", "scope: {type: biz, id: 2}");
    std::fs::write(fleet.path("abide.yaml"), config).expect("a file");
    fleet.well("one", &["--timeout", "18446744073709551615s"]);
    assert_eq!(fleet.effects(), ["start x 1"]);
}
