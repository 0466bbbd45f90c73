//! Inventories of host groups: hosts and variables of a plan, last good hosts, and refusals.

use std::process::Stdio;

use serde_json::Value;

use crate::apply::Machine;
use crate::controller_api::{address, get};
use crate::support::{Tree, abide, command, stderr, stdout, until};
use crate::watch::{read_log, running, watch};

/// A process on the hosts of a group, in the short form.
const API: &str = "\
kind: Process
meta: {namespace: web, name: api}
hosts: [{group: eu}]
user: app
run: ./api --port ${port}
";
const GROUP: &str = "\
kind: HostGroup
meta: {name: eu}
from: {inventory: ours, select: 'set=eu,module in (api,worker)'}
vars: {port: 80}
";
const CSV: &str = "\
ip,cloud,set,module,var.port
10.0.0.1,0,eu,api,8081
10.0.0.2,1,eu,worker,
10.0.0.3,0,eu,db,
10.0.0.4,0,us,api,
";
const CONFIG: &str = "inventories: {ours: {file: hosts.csv}}\n";

fn tree(csv: &str) -> Tree {
    Tree::new(&[
        ("m/api.yaml", API),
        ("m/groups.yaml", GROUP),
        ("abide.yaml", CONFIG),
        ("hosts.csv", csv),
        ("rows.json", "[]"),
    ])
}

const PLAN: [&str; 6] = ["plan", "m", "--observed", "rows.json", "-o", "json"];

/// Exit code, stdout and stderr of a verb.
fn run(tree: &Tree, args: &[&str]) -> (i32, String, String) {
    let output = abide(args, tree.path(), b"");
    (output.status.code().unwrap_or(-1), stdout(&output), stderr(&output))
}

fn starts(plan: &str) -> Vec<String> {
    let plan: Value = serde_json::from_str(plan).expect("a plan");
    let steps =
        plan["waves"].as_array().into_iter().flatten().flat_map(|wave| wave.as_array().into_iter().flatten());
    let mut starts: Vec<String> = steps
        .filter(|step| step["op"] == "start")
        .map(|step| step["instance"].as_str().expect("an instance").to_owned())
        .collect();
    starts.sort();
    starts
}

#[test]
fn an_inventory_gives_a_group_its_hosts() {
    let (code, out, err) = run(&tree(CSV), &PLAN);
    assert_eq!(code, 0, "{err}");
    assert_eq!(starts(&out), ["0:10.0.0.1:web:api", "1:10.0.0.2:web:api"]);
}

#[test]
fn variables_of_hosts_win_over_those_of_the_group() {
    let tree = tree(CSV);
    let limits = abide::manifest::Limits::default();
    let rows = "\
{\"inventory\":1}
{\"host\":\"0:10.0.0.1\",\"labels\":{\"set\":\"eu\",\"module\":\"api\"},\"vars\":{\"port\":\"8081\"}}
{\"host\":\"1:10.0.0.2\",\"labels\":{\"set\":\"eu\",\"module\":\"worker\"}}
";
    let text: std::sync::Arc<str> = rows.into();
    let files = abide::manifest::inventory::stand_ins([("ours", &text)].into_iter());
    let loaded = abide::manifest::load_with(&[tree.path().join("m")], &limits, &files);
    assert_eq!((loaded.errors(), loaded.files), (0, 2), "{:?}", loaded.problems);
    let command = |host: &str| {
        let key = format!("{host}:web:api").parse().expect("an instance");
        loaded.desired.instances[&key].spec.control.start_cmd.clone().expect("a command")
    };
    assert_eq!(
        (command("0:10.0.0.1").as_str(), command("1:10.0.0.2").as_str()),
        ("./api --port 8081", "./api --port 80")
    );
    // The stored files of a revision are the whole state: they need no inventory.
    let again = abide::manifest::load_files(loaded.file_contents(), Vec::new(), &limits, &Default::default());
    assert_eq!(again.desired, loaded.desired);
    assert!(again.unread_inventories().is_empty() && again.problems.is_empty());
}

/// A value from outside is text: it uses no variables.
#[test]
fn a_value_of_an_inventory_is_literal() {
    let tree = tree("ip,set,module,var.port\n10.0.0.1,eu,api,${name}\n");
    let (code, out, err) = run(&tree, &["inventory", "show", "ours", "-o", "json"]);
    assert_eq!(code, 0, "{err}");
    let hosts: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(hosts[0]["vars"][0], "port");
    assert_eq!(
        (hosts[0]["host"].as_str(), hosts[0]["labels"]["set"].as_str()),
        (Some("0:10.0.0.1"), Some("eu"))
    );
    let (code, out, err) = run(&tree, &PLAN);
    assert!(code == 0 && starts(&out).len() == 1, "{err}");
}

#[test]
fn a_run_without_hosts_and_without_earlier_ones_is_refused() {
    let long: String = "x".repeat(10);
    for (csv, why) in [
        ("", "the inventory has no hosts"),
        ("ip,set\n", "the inventory has no hosts"),
        ("ip\n10.0.0.1\n10.0.0.1\n", "line 3: host 0:10.0.0.1 is already at line 2"),
        ("ip\nweb01\n", "line 2: \"web01\" is not an IP address"),
        (long.as_str(), "invalid type: text"),
    ] {
        let tree = tree(csv);
        if csv == long {
            tree.write("hosts.yaml", csv);
            tree.write("abide.yaml", CONFIG.replace("csv", "yaml"));
        }
        let (code, out, err) = run(&tree, &PLAN);
        assert!(code == 4 && err.contains(why), "{csv}: {code} {err}");
        let refused: Value = serde_json::from_str(&out).expect("JSON");
        assert_eq!(refused["exit"]["reason"], "InventoryUnknown", "{out}");
    }
    let tree = tree(CSV);
    tree.write("abide.yaml", "inventories: {}\n");
    let (code, _, err) = run(&tree, &PLAN);
    assert!(code == 4 && err.contains("inventory \"ours\": no config file of this host defines it"), "{err}");
    let (code, out, _) = run(&tree, &["explain", "InventoryUnknown"]);
    assert!(code == 0 && out.contains("reason of exit code 4"), "{out}");
}

#[test]
fn validate_reads_no_inventory_unless_it_is_asked_to() {
    let tree = tree(CSV);
    tree.write("abide.yaml", "inventories: {ours: {command: [touch, ran]}}\n");
    let (code, out, err) = run(&tree, &["validate", "m"]);
    assert!(code == 0 && out.is_empty(), "{out}{err}");
    assert!(err.contains("inventory \"ours\" was not read, so its hosts are not checked"), "{err}");
    assert!(!tree.path().join("ran").exists());
    let (code, _, err) = run(&tree, &["validate", "m", "--inventories"]);
    assert!(code == 4 && err.contains("the inventory has no hosts"), "{code} {err}");
    assert!(tree.path().join("ran").exists());
    tree.write("abide.yaml", CONFIG);
    let (code, _, err) = run(&tree, &["validate", "m", "--inventories"]);
    assert!(code == 0 && err.contains("2 instances on 2 hosts: no problems"), "{err}");
    // A selection without hosts is an error of the manifests.
    tree.write("m/groups.yaml", GROUP.replace("set=eu", "set=cn"));
    let (code, out, err) = run(&tree, &["validate", "m", "--inventories"]);
    assert!(code == 65 && (out + &err).contains("selects no host of inventory \"ours\""));
}

/// The author of a checkout decides neither which program runs nor where a secret is sent.
#[test]
fn an_inventory_of_a_found_config_file_needs_trust() {
    let tree = tree(CSV);
    tree.write("abide.yaml", "inventories: {ours: {command: [touch, ran]}}\n");
    let run = |args: &[&str]| {
        let mut command = command(args, tree.path());
        command.env_remove("ABIDE_CONFIG").env("HOME", tree.path()).stdin(Stdio::null());
        let output = command.output().expect("it runs");
        (output.status.code(), stderr(&output))
    };
    let (code, err) = run(&PLAN);
    assert!(
        code == Some(64) && err.contains("inventory \"ours\" cannot be used: abide.yaml was found"),
        "{err}"
    );
    assert!(!tree.path().join("ran").exists());
    assert_eq!(run(&["config", "trust"]).0, Some(0));
    assert_eq!(run(&PLAN).0, Some(4));
    assert!(tree.path().join("ran").exists());
}

#[test]
fn the_example_config_defines_every_kind() {
    let folder = crate::support::project().join("examples/inventories");
    let run = |args: &[&str]| {
        let tree = Tree::new::<&str>(&[]);
        let mut command = command(args, tree.path());
        command.env("ABIDE_CONFIG", folder.join("abide.yaml"));
        command.env("PORTAL_URL", "https://portal.example.com/s3cret").env("BK_APP_SECRET", "s3cret");
        let output = command.output().expect("it runs");
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        stdout(&output)
    };
    let list = run(&["inventory", "list"]);
    for part in [
        "file ",
        "command /usr/local/bin/cloud-hosts",
        "url https://portal.example.com/…",
        "ansible ",
        "biz 2",
    ] {
        assert!(list.contains(part), "{part}: {list}");
    }
    assert!(!list.contains("invalid") && !list.contains("s3cret"), "{list}");
    assert_eq!(
        run(&["inventory", "show", "fleet", "-l", "set=eu", "-o", "name"]),
        "0:10.0.0.1\n0:10.0.0.2\n"
    );
    assert_eq!(
        run(&["inventory", "show", "legacy", "-l", "group.eu", "-o", "name"]),
        "0:10.0.2.1\n0:10.0.2.2\n"
    );
}

/// This host and nine others, which no process uses.
fn machine() -> Machine {
    let machine = Machine::new();
    let manifest = machine
        .manifest("a")
        .control("start_mode", "foreground")
        .start_cmd("echo start ${version} >> effects; exec sleep 1000")
        .to_string();
    machine.declare("a", manifest.replace("{ip: 127.0.0.1, bk_cloud_id: 0}", "{group: here}"));
    machine.declare(
        "groups",
        "kind: HostGroup\nmeta: {name: here}\nfrom: {inventory: ours, select: set=here}\n",
    );
    std::fs::write(machine.path("abide.yaml"), "inventories: {ours: {file: hosts.csv, interval: 200ms}}\n")
        .expect("a file");
    hosts(&machine, 9, "1");
    machine
}

fn hosts(machine: &Machine, others: usize, version: &str) {
    let mut csv = format!("ip,set,var.version\n127.0.0.1,here,{version}\n");
    (1..=others).for_each(|n| csv.push_str(&format!("10.0.0.{n},there,\n")));
    // A reader never sees half of it.
    std::fs::write(machine.path("hosts.new"), csv).expect("a file");
    std::fs::rename(machine.path("hosts.new"), machine.path("hosts.csv")).expect("renamed");
}

#[test]
fn a_broken_or_shrunken_inventory_keeps_its_last_good_hosts() {
    let machine = machine();
    let (code, out, err) = machine.apply(&[]);
    assert!(code == 0, "{out}{err}");
    assert_eq!(machine.effects(), ["start 1"]);
    let plan = |more: &[&str]| {
        let (code, out, err) = machine.run(&[&["plan", "m"], more].concat());
        assert_eq!(code, 0, "{out}{err}");
        (out, err)
    };
    assert!(plan(&[]).0.contains("nothing to do"));
    let (_, list, _) = machine.run(&["inventory", "list"]);
    assert!(list.contains("ours") && list.contains("10") && list.contains("file "), "{list}");
    for (csv, why) in [
        (String::new(), "the inventory has no hosts"),
        ("ip\n10.0.0.1,x\n".to_owned(), "more columns than the header"),
        (
            "ip,set\n127.0.0.1,here\n10.0.0.1,x\n".to_owned(),
            "the inventory lost 8 of 10 hosts, and may lose 2 at once",
        ),
    ] {
        std::fs::write(machine.path("hosts.csv"), csv).expect("a file");
        let (out, err) = plan(&[]);
        assert!(out.contains("nothing to do") && err.contains(why), "{out}{err}");
        assert!(err.contains("its 10 last good hosts are used"), "{err}");
        let (code, _, _) = machine.apply(&[]);
        assert_eq!((code, machine.effects().len()), (0, 1));
    }
    // The variable of the host is gone as well: with the accepted hosts, the manifests have an error.
    let (code, out, err) = machine.run(&["plan", "m", "--accept-shrink", "ours"]);
    assert!(code == 65 && !err.contains("last good"), "{code} {out}{err}");
    hosts(&machine, 1, "2");
    assert!(plan(&[]).0.contains("nothing to do"));
    let (out, err) = plan(&["--accept-shrink", "ours", "--out", "plan.json"]);
    assert!(out.contains("1 to restart") && !err.contains("last good"), "{out}{err}");
    // The saved plan sees the same hosts.
    let (code, out, err) = machine.run(&["apply", "plan.json", "--yes"]);
    assert!(code == 0 && machine.effects() == ["start 1", "start 2"], "{out}{err}");
    let (out, err) = plan(&[]);
    assert!(out.contains("nothing to do") && !err.contains("last good"), "{out}{err}");
}

#[test]
fn a_saved_plan_is_refused_when_the_inventory_changed() {
    let machine = machine();
    assert_eq!(machine.apply(&[]).0, 0);
    hosts(&machine, 9, "2");
    let (code, out, err) = machine.run(&["plan", "m", "--out", "plan.json"]);
    assert!(code == 0 && out.contains("1 to restart"), "{out}{err}");
    hosts(&machine, 9, "3");
    let (code, out, err) = machine.run(&["apply", "plan.json", "--yes", "-o", "json"]);
    assert!(code == 4 && out.contains("StalePlan"), "{out}{err}");
    assert_eq!(machine.effects(), ["start 1"]);
    // A rollback has the hosts of its time.
    assert_eq!(machine.apply(&[]).0, 0);
    let (code, out, err) = machine.run(&["rollback", "--to", "previous", "--yes"]);
    assert!(code == 0, "{out}{err}");
    assert_eq!(machine.effects(), ["start 1", "start 1", "start 3"]);
}

#[test]
fn a_watch_follows_an_inventory_and_ignores_a_broken_one() {
    let machine = machine();
    let _watch = watch(&machine, "watch.log", &["--interval", "1h"]);
    until("it runs", || running(&machine, &["a"]));
    hosts(&machine, 9, "2");
    until("a changed variable restarts it", || machine.effects() == ["start 1", "start 2"]);
    let log = || read_log(&machine, "watch.log");
    hosts(&machine, 1, "3");
    until("the loss is reported", || log().contains("the inventory lost 8 of 10 hosts"));
    until("the status has it", || {
        get(address(&machine, "watch.log"), "/api/v1/status").json()["problems"][0]["code"] == "E0412"
    });
    assert_eq!(machine.effects(), ["start 1", "start 2"]);
    let (code, out, err) = machine.run(&["inventory", "accept", "ours"]);
    assert!(code == 0 && out.contains("accepted inventory ours: 2 hosts (0 added, 8 lost)"), "{out}{err}");
    until("the accepted hosts are used", || machine.effects() == ["start 1", "start 2", "start 3"]);
    std::fs::write(machine.path("hosts.csv"), "\u{0}").expect("a file");
    until("the broken file is reported", || log().contains("has no column for hosts"));
    hosts(&machine, 1, "4");
    until("it is followed again", || machine.effects().contains(&"start 4".to_owned()));
    assert_eq!(machine.effects().len(), 4);
}
