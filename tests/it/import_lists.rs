//! Import of crontabs and of Ansible inventories, in the short form.

use abide::import::Kind;
use abide::manifest::{self, Limits};
use serde_json::Value;

use crate::import::imported;
use crate::support::{Tree, abide, stderr, stdout};

/// The program's output for one file, as people see it.
fn printed(args: &[&str], name: &str, text: &str) -> (String, String) {
    let tree = Tree::new(&[(name, text)]);
    let output = abide(&[&["import"], args].concat(), tree.path(), b"");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let loaded = manifest::load_text("m", stdout(&output), &Limits::default());
    assert!(loaded.problems.is_empty(), "{}{:?}", stdout(&output), loaded.problems);
    (stdout(&output), stderr(&output))
}

#[test]
fn a_crontab_becomes_schedules_in_the_short_form() {
    let text = "\
# of the shop
SHELL=/bin/sh
MAILTO=ops
CRON_TZ=Asia/Shanghai
PATH=/usr/local/bin:/usr/bin
*/5 8-18 * * mon-fri  /opt/shop/sync --all > /dev/null
@daily  report.sh \"$(date +\\%F)\"
@reboot /opt/shop/warm-up
30 3 1 jan,jul * sync %hello%it's me
";
    let (yaml, notes) = printed(&["crontab", "jobs", "-n", "shop"], "jobs", text);
    let documents: Vec<Value> = serde_yaml::Deserializer::from_str(&yaml)
        .map(|document| serde::Deserialize::deserialize(document).expect("a document"))
        .collect();
    let fields =
        |nth: usize| ["run", "schedule", "zone"].map(|name| documents[nth][name].as_str().unwrap_or("-"));
    assert_eq!(documents.len(), 3, "{yaml}");
    assert_eq!(fields(0), ["/opt/shop/sync --all > /dev/null", "*/5 8-18 * * mon-fri", "Asia/Shanghai"]);
    assert_eq!(fields(1), ["report.sh \"$(date +%F)\"", "0 0 * * *", "Asia/Shanghai"]);
    assert_eq!(fields(2)[0], "printf '%s\\n' 'hello' 'it'\\''s me' | { sync\n}");
    assert_eq!(documents[0]["env"]["PATH"], "/usr/local/bin:/usr/bin");
    let name = |nth: usize| documents[nth]["meta"]["name"].as_str().expect("a name");
    assert_eq!([name(0), name(1), name(2)], ["sync", "report.sh", "sync-2"]);
    assert!(!yaml.contains("pid_path") && !yaml.contains("spec:"), "{yaml}");
    for part in ["jobs:3: MAILTO: ", "jobs:8: @reboot: left out", "jobs:9: %: the text after %"] {
        assert!(notes.contains(part), "{part}\n{notes}");
    }
    // The user is a column of its own there.
    let (yaml, _) = printed(&["system-crontab", "x"], "x", "0 3 * * * root /bin/backup\n");
    assert!(yaml.contains("user: root\n") && yaml.contains("run: /bin/backup\n"), "{yaml}");
    let names = |text: &str, kind| imported("crontab", text, Some(kind)).map(|done| done.documents.len());
    for (text, says) in [
        ("0 3 * * *\n", "neither a variable nor a schedule"),
        ("@often x\n", "is not a schedule"),
        ("buy milk\n", "neither a variable nor a schedule"),
    ] {
        let problems = names(text, Kind::Crontab).expect_err(text);
        assert!(problems[0].line == 1 && problems[0].message.contains(says), "{problems:?}");
    }
    let problems = names("0 3 * * * root\n", Kind::SystemCrontab).expect_err("no command");
    assert!(problems[0].message.contains("has no command"), "{problems:?}");
}

#[test]
fn an_ansible_inventory_becomes_host_groups() {
    let text = "\
[web]
web[01:02] ansible_host=10.0.0.1
10.0.0.3 port=81
[web:vars]
port=80
[eu:children]
web
[eu:vars]
zone=eu
name=reserved
";
    let problem = imported("hosts", &text.replace("web[01:02] ansible_host=10.0.0.1", "web01"), None);
    let done = problem.expect("a host without an address is left out");
    assert!(done.notes.iter().any(|note| note.setting == "web01" && note.line == 2), "{:?}", done.notes);
    let text = text.replace("web[01:02]", "web01");
    let (yaml, notes) = printed(&["ansible", "hosts"], "hosts", &text);
    let groups = manifest::load_text("m", yaml.clone(), &Limits::default());
    assert_eq!(groups.documents.len(), 2, "{yaml}");
    assert!(yaml.contains("name: eu") && yaml.contains("name: web") && yaml.contains("10.0.0.3"), "{yaml}");
    assert!(notes.contains("hosts:") && notes.contains("name: the variable is"), "{notes}");
    // A process of the group has the variables that Ansible would give it.
    let process =
        "---\nkind: Process\nmeta: {namespace: n, name: p}\nhosts: [{group: web}]\nrun: x ${port} ${zone}\n";
    let loaded = manifest::load_text("m", yaml + process, &Limits::default());
    assert_eq!(loaded.errors(), 0, "{:?}", loaded.problems);
    let commands: Vec<String> =
        loaded.desired.instances.values().filter_map(|want| want.spec.control.start_cmd.clone()).collect();
    assert_eq!(commands, ["x 80 eu", "x 81 eu"]);
}
