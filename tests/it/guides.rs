//! Quoted output in the guides: commands that need no target are run again and compared line by line.
//!
//! `…` at the end of a quoted line omits the rest of the line.

use std::path::Path;

use crate::support::{Tree, abide, project, stderr, stdout};

const BROKEN: &str = "\
apiVersion: abide/v1
kind: Process
meta: {namespace: web, name: api}
hosts:
  - {ip: 10.0.0.1, bk_cloud_id: 0}
  - {group: eu-1}
spec:
  identity:
    proc_name: api
    setup_path: opt/api
    pid_path: /run/api.pid
  control:
    strat_cmd: ./api
---
apiVersion: abide/v1
kind: HostGroup
meta: {name: eu-west}
hosts: [{ip: 10.0.0.9, bk_cloud_id: 0}]
";

const API: &str = "\
apiVersion: abide/v1
kind: Process
meta: {namespace: shop, name: api}
hosts: [{ip: 10.0.0.1, bk_cloud_id: 0}, {ip: 10.0.0.2, bk_cloud_id: 0}, {ip: 10.0.0.4, bk_cloud_id: 0}]
depends_on: [shop/db]
spec:
  identity: {proc_name: api, setup_path: /opt/api, pid_path: /run/api.pid}
  control: {start_cmd: ./api --port 8080}
";

const DB: &str = "\
apiVersion: abide/v1
kind: Process
meta: {namespace: shop, name: db}
hosts: [{ip: 10.0.0.3, bk_cloud_id: 0}]
spec:
  identity: {proc_name: db, setup_path: /opt/db, pid_path: /run/db.pid, config_path: /etc/db-2.conf}
  control: {start_cmd: ./db, reload_cmd: ./reload}
";

/// The rows before the change: old ports, an old config file, a worker without a manifest, and a host that is unknown.
fn rows() -> String {
    let row = |host: &str, name: &str, more: &str, control: &str| {
        format!(
            r#"{{"instance": "0:{host}:shop:{name}", "registered": true, "hosted": true, "running": true,
                 "owner": "default", "spec": {{"identity": {{"proc_name": "{name}", "setup_path": "/opt/{name}",
                 "pid_path": "/run/{name}.pid"{more}}}, "control": {{{control}}}}}}}"#
        )
    };
    let api = |host| row(host, "api", "", r#""start_cmd": "./api --port 80""#);
    let db = r#""start_cmd": "./db", "reload_cmd": "./reload""#;
    let all = [
        api("10.0.0.1"),
        api("10.0.0.2"),
        row("10.0.0.3", "db", r#", "config_path": "/etc/db.conf""#, db),
        row("10.0.0.9", "old-worker", "", r#""start_cmd": "./work""#),
        r#"{"host": "0:10.0.0.4", "unknown": true}"#.to_owned(),
    ];
    format!("[{}]", all.join(",\n"))
}

/// The lines that a guide quotes below a command, up to the next command or the end of the block.
fn quoted(guide: &str, command: &str) -> Vec<String> {
    let text = std::fs::read_to_string(project().join(guide)).expect("a guide");
    let prompt = format!("$ {command}");
    let below = text.lines().skip_while(|line| line.split("  #").next().map(str::trim_end) != Some(&prompt));
    let lines: Vec<String> = below
        .skip(1)
        .take_while(|line| !line.starts_with("$ ") && !line.starts_with("```"))
        .map(str::to_owned)
        .collect();
    assert!(!lines.is_empty(), "{guide} does not quote {prompt}");
    lines
}

/// Runs a quoted command and compares its output with the quoted one.
fn compare(guide: &str, command: &str, here: &Path) {
    let args: Vec<&str> = command.split(' ').skip(1).collect();
    let output = abide(&args, here, b"");
    let text = format!("{}{}", stdout(&output), stderr(&output));
    let real: Vec<&str> = text.trim_end().lines().collect();
    let mut lines = quoted(guide, command);
    while lines.last().is_some_and(String::is_empty) {
        lines.pop();
    }
    let is_same = |(quoted, real): (&String, &&str)| match quoted.strip_suffix('…') {
        Some(begin) => real.starts_with(begin),
        None => quoted == real,
    };
    let same = lines.len() == real.len() && lines.iter().zip(&real).all(is_same);
    assert!(same, "{guide}: {command}\nquoted:\n{}\nreal:\n{}", lines.join("\n"), real.join("\n"));
}

#[test]
fn the_problems_of_a_broken_manifest_are_as_quoted() {
    let tree = Tree::new(&[("web.yaml", BROKEN)]);
    compare("README.md", "abide validate web.yaml", tree.path());
}

#[test]
fn a_plan_is_as_quoted() {
    let tree = Tree::new(&[("shop/api.yaml", API), ("shop/db.yaml", DB), ("rows.json", &rows())]);
    for guide in ["README.md", "docs/planning.md"] {
        compare(guide, "abide plan shop --observed rows.json --prune", tree.path());
    }
}

#[test]
fn explanations_are_as_quoted() {
    for command in [
        "abide explain configmap",
        "abide explain monitor_policy.start_check_secs --in manifests --process sample/web",
    ] {
        compare("README.md", command, &project());
    }
}
