//! Quoted output in the guides: every console block is run again and compared, or listed with a reason.
//!
//! A session runs blocks that belong together on one system. A block in no session and not in [`NOT_RUN`] fails the test.

use std::collections::BTreeSet;

use crate::fixtures::console::Desk;
use crate::fixtures::quotes::{Block, block, blocks};
use crate::guide_sessions::{
    agent_policy, curl_gateway, fleet, full_disk, local_operations, pipeline, platform, site_operations,
};
use crate::support::project;

/// Defines one test per session, and the list of all blocks that sessions run.
macro_rules! sessions {
    ($($session:ident = $run:path: [$(($guide:expr, $text:expr)),+ $(,)?];)+) => {
        $(#[test]
        fn $session() {
            $run([$(block($guide, $text)),+]);
        })+

        /// Guide and a text of each block that a session runs.
        const RUN: &[(&str, &str)] = &[$($(($guide, $text)),+),+];
    };
}

sessions! {
    the_first_terminals_of_the_readme = fleet: [
        ("README.md", "$ abide up manifests"),
        ("README.md", "$ abide get processes\n"),
        ("README.md", "strat_cmd: while"),
    ];
    checks_without_a_target = checks: [
        ("README.md", "$ abide validate web.yaml"),
        ("README.md", "$ abide plan shop"),
        ("docs/planning.md", "$ abide plan shop"),
        ("README.md", "$ abide explain configmap"),
    ];
    the_walk_through_the_sample_fleet = walk: [
        ("manifests/README.md", "$ abide validate manifests"),
        ("manifests/README.md", "$ abide explain identity.pid_path"),
        ("manifests/README.md", "$ abide explain control.start_cmd"),
        ("manifests/README.md", "$ abide convert manifests"),
    ];
    conversions = convert_and_import: [
        ("README.md", "$ abide convert body.json"),
        ("README.md", "$ abide import"),
    ];
    a_gateway_driven_by_curl = curl_gateway: [("README.md", "$ abide -q serve")];
    operations_of_a_gateway_and_an_agent = site_operations: [
        ("docs/operations.md", "$ abide doctor"),
        ("docs/operations.md", "$ systemctl stop abide-agent"),
        ("docs/operations.md", "$ abide lease list"),
        ("docs/operations.md", "$ sqlite3"),
        ("docs/operations.md", "$ systemctl stop abide-serve\n"),
        ("docs/operations.md", "INFO change who="),
        ("docs/operations.md", "NotConverging 0:127"),
    ];
    operations_of_the_local_system = local_operations: [
        ("docs/operations.md", "rolling back web/w"),
        ("docs/operations.md", "$ abide logs"),
    ];
    pipelines = pipeline: [
        ("docs/pipeline.md", "-o markdown"),
        ("docs/pipeline.md", "--max-restart 1"),
        ("docs/pipeline.md", "--lock-timeout 1s"),
        ("docs/pipeline.md", "--out plan.json"),
    ];
    a_platform = platform: [
        ("docs/targets.md", "is not trusted"),
        ("docs/targets.md", "$ cat abide.yaml"),
        ("docs/targets.md", "NotOwned  web/legacy"),
        ("docs/targets.md", "--state https://elsewhere"),
        ("docs/targets.md", "--state /tmp/empty"),
        ("docs/targets.md", "note: gse-v1"),
    ];
    a_full_disk = full_disk: [("docs/operations.md", "the disk is full")];
    the_policy_of_a_host = agent_policy: [("docs/agent.md", "--check-policy")];
}

/// Blocks that no session runs: guide, a text of the block, and the reason.
const NOT_RUN: &[(&str, &str, &str)] = &[
    ("README.md", "$ abide doctor --target prod", "commands without output, for a BlueKing platform"),
    ("docs/operations.md", "ABIDE_OLD=", "runs the test suite with another version"),
    ("docs/operations.md", "openssl rand -hex 32", "commands without output, for a systemd unit"),
    ("CONTRIBUTING.md", "$ cargo build", "builds the project"),
    ("docs/gateway.md", "$ abide audit", "needs several hosts and people"),
];

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

/// Every text for readers: the README files, the guides, and the documents at the top.
pub fn guides() -> Vec<String> {
    let names = |folder: &str| {
        let entries = std::fs::read_dir(project().join(folder)).expect("a folder").flatten();
        let files = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let prefix = if folder == "." { String::new() } else { format!("{folder}/") };
        files
            .filter(|name| name.ends_with(".md"))
            .map(move |name| format!("{prefix}{name}"))
            .collect::<Vec<_>>()
    };
    let mut all: Vec<String> = [".", "docs", "manifests"].into_iter().flat_map(names).collect();
    all.retain(|name| name != "CHANGELOG.md");
    all.sort();
    all
}

#[test]
fn every_console_block_is_run_or_listed_with_a_reason() {
    let listed = NOT_RUN.iter().map(|(guide, text, _)| (*guide, *text));
    let mut known = BTreeSet::new();
    for (guide, text) in RUN.iter().copied().chain(listed) {
        assert!(known.insert(block(guide, text).at), "{guide}: the block with {text:?} is listed twice");
    }
    let all: Vec<Block> = guides().iter().flat_map(|guide| blocks(guide)).collect();
    let new: Vec<&str> =
        all.iter().filter(|block| !known.contains(&block.at)).map(|block| block.at.as_str()).collect();
    assert!(new.is_empty(), "add these blocks to a session, or to NOT_RUN with a reason: {new:?}");
    assert!(all.len() > 30, "only {} blocks were found", all.len());
}

fn checks([validate, plan, plan_again, explain]: [Block; 4]) {
    let mut desk = Desk::new();
    desk.write("web.yaml", BROKEN);
    desk.write("shop/api.yaml", API);
    desk.write("shop/db.yaml", DB);
    desk.write("rows.json", rows());
    std::os::unix::fs::symlink(project().join("manifests"), desk.path("manifests")).expect("a link");
    let mut terminal = desk.terminal(".");
    for block in [validate, plan, plan_again, explain] {
        desk.run(&mut terminal, &block);
    }
}

fn walk(all: [Block; 4]) {
    let mut desk = Desk::new();
    std::os::unix::fs::symlink(project().join("manifests"), desk.path("manifests")).expect("a link");
    let mut terminal = desk.terminal(".");
    for block in all {
        desk.run(&mut terminal, &block);
    }
}

/// These blocks quote no output: each command must succeed.
fn convert_and_import([convert, import]: [Block; 2]) {
    let mut desk = Desk::new();
    let fixtures = project().join("tests/it/fixtures");
    let copy = |from: &str, to: &str| {
        std::fs::copy(fixtures.join(from), desk.path(to)).expect("a copy");
    };
    copy("gse_operate_proc.json", "body.json");
    copy("import/shop.conf", "shop.conf");
    copy("import/fleet.csv", "fleet.csv");
    for unit in ["db.service", "backup.service", "backup.timer"] {
        copy(&format!("import/{unit}"), unit);
    }
    desk.script("pm2", &format!("#!/bin/sh\ncat {}\n", fixtures.join("import/ecosystem.json").display()));
    desk.rename("/etc/supervisor/conf.d/", format!("{}/", desk.folder.path().display()));
    let mut terminal = desk.terminal(".");
    for entry in convert.entries.iter().chain(&import.entries) {
        terminal.prepare(&desk.real_command(&entry.command));
    }
}
