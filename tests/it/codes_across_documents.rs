//! Problem codes of fields and documents that contradict each other: each has an input that triggers it.

use crate::problem_codes::{expect, one, other};
use crate::support::{GOOD, Tree, with};

#[test]
fn e0301_to_e0304_fields_that_do_not_go_together() {
    one(
        &with("auto_type: 1", "auto_type: 0"),
        "a.yaml:8:31 E0301 a periodic process (auto_type 0) needs crontab_rule or job.cycle_time | such as crontab_rule: \"*/5 * * * *\"",
    );
    expect(&[("a.yaml", &(with("auto_type: 1", "auto_type: 0") + "  job: {cycle_time: 60}\n"))], &[]);
    one(
        &with("  control: {start_cmd: ./api}\n", ""),
        "a.yaml:5:1 E0302 state running needs control.start_cmd, which is not set | …",
    );
    expect(
        &[("a.yaml", &with("  control: {start_cmd: ./api}\n", "").replace("spec:", "state: stopped\nspec:"))],
        &[],
    );
    one(
        &with("auto_type: 1", "auto_type: 2").replace("spec:", "state: unhosted\nspec:"),
        "a.yaml:5:8 E0303 a one-shot process (auto_type 2) cannot have state unhosted: a one-shot is never supervised | use running, stopped or absent",
    );
    one(
        &with("spec:", "moved_from: 0:10.0.0.2:web:api\nspec:"),
        "a.yaml:5:13 E0304 moved_from \"0:10.0.0.2:web:api\" is invalid: a process cannot move across hosts | …",
    );
    one(
        &with("spec:", "moved_from: web/b@10.0.0.2\nspec:"),
        "a.yaml:5:13 E0304 moved_from \"web/b@10.0.0.2\" is invalid: a process cannot move across hosts | …",
    );
    one(
        &with("spec:", "moved_from: api\nspec:"),
        "a.yaml:5:13 E0304 moved_from \"api\" is invalid: a process cannot be moved from its own name | …",
    );
    let moved = with("spec:", "moved_from: web/b\nspec:");
    expect(
        &[("a.yaml", &moved), ("b.yaml", &other("b"))],
        &[
            "a.yaml:5:13 E0304 moved_from names web/b, which is still declared at b.yaml:3:30 | remove the old declaration",
        ],
    );
}

#[test]
fn e0401_and_e0402_one_instance_and_one_identity() {
    expect(
        &[("a.yaml", GOOD), ("b.yaml", &GOOD.replace("/opt/api", "/opt/b"))],
        &[
            "b.yaml:3:30 E0401 instance 0:10.0.0.1:web:api is already declared at a.yaml:3:30 | remove or rename one, or give them different hosts",
        ],
    );
    let twin = GOOD.replace("name: api}", "name: twin}").replace("/opt/api", "/opt/api/");
    expect(
        &[("a.yaml", GOOD), ("b.yaml", &twin)],
        &[
            "b.yaml:6:3 E0402 web/twin and web/api at a.yaml:6:3 have the same identity \"/opt/api/api\" on host 0:10.0.0.1 | set value_key in one of them",
        ],
    );
    one(
        &with("spec:", "instances: 2\nspec:"),
        "a.yaml:7:3 E0402 web/api_2 and web/api_1 at a.yaml:7:3 have the same identity \"/opt/api/api\" on host 0:10.0.0.1 | set value_key: NAME-${instance}",
    );
    // On another host, or absent, it conflicts with nothing.
    expect(&[("a.yaml", GOOD), ("b.yaml", &twin.replace("10.0.0.1", "10.0.0.2"))], &[]);
    expect(&[("a.yaml", GOOD), ("b.yaml", &twin.replace("spec:", "state: absent\nspec:"))], &[]);
    // An agent's id and an address can be one host.
    let known =
        "kind: HostGroup\nmeta: {name: g}\nhosts: [{ip: 10.0.0.1, bk_cloud_id: 0, bk_agent_id: a1}]\n";
    let by_agent =
        GOOD.replace("ip: 10.0.0.1, bk_cloud_id: 0", "bk_agent_id: a1").replace("/opt/api", "/opt/b");
    expect(
        &[("a.yaml", GOOD), ("b.yaml", &by_agent), ("c.yaml", known)],
        &["b.yaml:3:30 E0401 instance 0:10.0.0.1:web:api is already declared at a.yaml:3:30 | …"],
    );
}

#[test]
fn e0403_and_e0404_groups() {
    let of = |group: &str| with("{ip: 10.0.0.1, bk_cloud_id: 0}", group);
    let groups = "kind: HostGroup\nmeta: {name: eu-west}\nhosts: [{ip: 10.0.0.1, bk_cloud_id: 0, labels: {rack: a}}]\n---\nkind: HostGroup\nmeta: {name: none}\nhosts: []\n";
    expect(
        &[("a.yaml", &of("{group: eu-wst}")), ("g.yaml", groups)],
        &[
            "a.yaml:4:17 E0403 process \"web/api\" names host group \"eu-wst\", which no manifest defines | did you mean \"eu-west\"?",
        ],
    );
    expect(
        &[("a.yaml", &of("{group: x}")), ("g.yaml", groups)],
        &[
            "a.yaml:4:17 E0403 process \"web/api\" names host group \"x\", which no manifest defines | defined groups: eu-west, none",
        ],
    );
    expect(
        &[("a.yaml", &of("{group: x}")), ("g.yaml", "kind: [")],
        &[
            "a.yaml:4:17 E0403 process \"web/api\" names host group \"x\", which no manifest defines | no HostGroup is defined; pass the directory that defines it as a PATH too (some documents are unreadable; the group may be in one of them)",
            "g.yaml:1:7 E0101 …",
        ],
    );
    expect(
        &[("a.yaml", &of("{group: none}")), ("g.yaml", groups)],
        &["a.yaml:4:17 E0404 host group \"none\" has no hosts | …"],
    );
    expect(
        &[("a.yaml", &of("{group: eu-west, labels: rack=b}")), ("g.yaml", groups)],
        &["a.yaml:4:34 E0404 no host of group \"eu-west\" has the labels rack=b | …"],
    );
    expect(&[("a.yaml", &of("{group: eu-west, labels: rack=a}")), ("g.yaml", groups)], &[]);
}

#[test]
fn e0405_and_e0406_dependencies() {
    one(
        &with("spec:", "depends_on: [bd]\nspec:"),
        "a.yaml:5:14 E0405 depends_on names web/bd, which no manifest declares | …",
    );
    let needs = |name: &str, on: &str| other(name).replace("spec:", &format!("depends_on: [{on}]\nspec:"));
    expect(
        &[("a.yaml", &needs("a", "b")), ("b.yaml", &needs("b", "web/c")), ("c.yaml", &needs("c", "a"))],
        &[
            "c.yaml:5:14 E0406 dependency cycle: web/a → web/b → web/c → web/a | remove one of the dependencies",
        ],
    );
    one(
        &needs("a", "a"),
        "a.yaml:5:14 E0406 dependency cycle: web/a → web/a | remove one of the dependencies",
    );
    // A name with a number is a name too; a broken process still has its name.
    let many = other("b")
        .replace("spec:", "instances: 2\nspec:")
        .replace("/run/api.pid", "/run/api.pid, value_key: \"${instance}\"");
    expect(&[("a.yaml", &needs("a", "b_2")), ("b.yaml", &many)], &[]);
    expect(
        &[("a.yaml", &needs("a", "b")), ("b.yaml", &other("b").replace("10.0.0.1", "x"))],
        &["b.yaml:4:14 E0203 …"],
    );
}

#[test]
fn e0407_policies_bind_their_directory_and_below() {
    let policy = "kind: Policy\nmeta: {name: prod}\nallow: {namespaces: [\"shop-*\"], users: [www], hosts: [\"0:10.1.*\"]}\n";
    expect(
        &[("p/policy.yaml", policy), ("p/deep/a.yaml", GOOD), ("b.yaml", &other("b"))],
        &[
            "p/deep/a.yaml:3:19 E0407 policy \"prod\" at p/policy.yaml:3:9 does not allow namespace \"web\" | allowed namespaces: shop-*",
            "p/deep/a.yaml:4:9 E0407 policy \"prod\" at p/policy.yaml:3:47 does not allow host 0:10.0.0.1 | allowed hosts: 0:10.1.*",
            "p/deep/a.yaml:6:82 E0407 policy \"prod\" at p/policy.yaml:3:33 does not allow user \"app\" | allowed users: www",
        ],
    );
}

#[test]
fn e0408_to_e0410_contradictions() {
    let defaults =
        |retries: u32| format!("kind: Defaults\nspec: {{monitor_policy: {{start_retries: {retries}}}}}\n");
    expect(
        &[("a.yaml", &defaults(1)), ("b.yaml", &defaults(2))],
        &[
            "b.yaml:2:40 E0408 spec.monitor_policy.start_retries has another default at a.yaml:2:40, in the same directory | keep one of them",
        ],
    );
    expect(&[("a.yaml", &defaults(1)), ("b/b.yaml", &defaults(2))], &[]);
    let group = "kind: HostGroup\nmeta: {name: g}\nhosts: [{ip: 10.0.0.1, bk_cloud_id: 0}]\n";
    expect(
        &[("a.yaml", group), ("b.yaml", group)],
        &[
            "b.yaml:2:14 E0409 host group \"g\" is already defined at a.yaml:2:14 | put all hosts of the group into one document",
        ],
    );
    let with_agent = |name: &str, ip: &str, agent: &str| {
        format!(
            "kind: HostGroup\nmeta: {{name: {name}}}\nhosts: [{{ip: {ip}, bk_cloud_id: 0, bk_agent_id: {agent}}}]\n"
        )
    };
    expect(
        &[("a.yaml", &with_agent("a", "10.0.0.1", "x")), ("b.yaml", &with_agent("b", "10.0.0.1", "y"))],
        &["b.yaml:3:9 E0410 host 0:10.0.0.1 has another bk_agent_id at a.yaml:3:9 | …"],
    );
    expect(
        &[("a.yaml", &with_agent("a", "10.0.0.1", "x")), ("b.yaml", &with_agent("b", "10.0.0.2", "x"))],
        &["b.yaml:3:9 E0410 agent x is on host 0:10.0.0.2 here, but on 0:10.0.0.1 at a.yaml:3:9 | …"],
    );
}

#[test]
fn every_problem_of_every_file_is_reported_in_one_run() {
    let bad = with("/opt/api", "opt")
        .replace("10.0.0.1", "x")
        .replace("start_cmd", "strat_cmd")
        .replace("auto_type: 1", "auto_type: 7, start_retries: -1");
    let found = Tree::new(&[
        ("a.yaml", bad.as_str()),
        ("b.yaml", "meta: ["),
        ("c.yaml", &bad.replace("name: api", "name: b")),
    ])
    .problems();
    let codes: Vec<_> =
        found.iter().map(|line| (&line[..6], line.split(' ').nth(1).unwrap_or_default())).collect();
    let five = |file: &'static str| {
        [(file, "E0203"), (file, "E0202"), (file, "E0102"), (file, "E0205"), (file, "E0205")]
    };
    let all = [five("a.yaml").to_vec(), vec![("b.yaml", "E0101")], five("c.yaml").to_vec()].concat();
    assert_eq!(codes, all);
}

#[test]
fn e0411_and_e0412_inventories_without_hosts() {
    let group = "kind: HostGroup\nmeta: {name: eu}\nfrom: {inventory: cmdb}\n";
    let on_group = GOOD.replace("{ip: 10.0.0.1, bk_cloud_id: 0}", "{group: eu}");
    expect(
        &[("a.yaml", &on_group), ("b.yaml", group)],
        &["b.yaml:3:19 E0411 the hosts of inventory \"cmdb\" are not known | …"],
    );
    expect(
        &[("b.yaml", &format!("{group}hosts: []\n"))],
        &["b.yaml:3:1 E0215 a host group has either hosts or from, not both | …"],
    );
    expect(&[("b.yaml", &group.replace("cmdb}", "cmdb, select: 'a=b=c,'}"))], &["b.yaml:3:33 E0212 …"]);
    expect(
        &[("b.yaml", &group.replace("cmdb}", "../cmdb}"))],
        &["b.yaml:3:19 E0201 \"../cmdb\" is not the name of an inventory | …"],
    );
    let tree = Tree::new(&[("b.yaml", group)]);
    let damaged: std::sync::Arc<str> = "{\"inventory\":1}\n{\"host\":\"0:10.0.0.1\"}\n{\n".into();
    let files = abide::manifest::inventory::stand_ins([("cmdb", &damaged)].into_iter());
    let limits = abide::manifest::Limits::default();
    let loaded = abide::manifest::load_with(&[tree.path().to_path_buf()], &limits, &files);
    let damage = loaded.problems.iter().find(|problem| problem.code.text() == "E0412").expect("a problem");
    assert_eq!((&*damage.file, damage.line), ("<inventory cmdb>", 3));
}
