//! Variables: values of Defaults, HostGroups and hosts in commands and paths, and their limits.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use abide::manifest::Loaded;

use crate::problem_codes::expect;
use crate::support::Tree;

fn service(run: &str) -> String {
    format!("kind: Process\nmeta: {{namespace: web, name: api}}\nhosts: [10.0.0.1]\nrun: {run}\n")
}

fn commands(loaded: &Loaded) -> BTreeMap<String, String> {
    assert!(loaded.problems.is_empty(), "{:?}", loaded.problems);
    let instances = loaded.desired.instances.iter();
    let command = |spec: &abide::model::Spec| spec.control.start_cmd.clone().unwrap_or_default();
    instances.map(|(key, want)| (key.to_string(), command(&want.spec))).collect()
}

fn only(files: &[(&str, &str)]) -> String {
    commands(&Tree::new(files).load()).into_values().next().expect("an instance")
}

#[test]
fn the_nearest_layer_wins() {
    let root = "kind: Defaults\nvars: {port: 8080, host_name: root, ratio: 1.5, tls: true, empty: \"\"}\n";
    let near = "kind: Defaults\nvars: {port: 9090}\n";
    let run = "./api ${port} ${host_name} ${ratio} ${tls} [${empty}] ${none:-x y} ${none:-} $${HOME} $HOME";
    assert_eq!(
        only(&[("root.yaml", root), ("web/near.yaml", near), ("web/api.yaml", &service(run))]),
        "./api 9090 root 1.5 true [] x y  ${HOME} $HOME"
    );
    let groups = "kind: HostGroup\nmeta: {name: eu}\nvars: {port: 1, zone: eu}\nhosts:\n- 10.0.0.1\n- {ip: 10.0.0.2, bk_cloud_id: 0, vars: {port: 2}}\n";
    let process = service("./api ${port} ${zone:-none}")
        .replace("[10.0.0.1]", "[{group: eu}, {ip: 10.0.0.3, bk_cloud_id: 0, vars: {port: 3}}, 10.0.0.4]");
    let loaded = Tree::new(&[("root.yaml", root), ("groups.yaml", groups), ("api.yaml", &process)]).load();
    assert_eq!(
        commands(&loaded).into_values().collect::<Vec<_>>(),
        ["./api 1 eu", "./api 2 eu", "./api 3 none", "./api 8080 none"]
    );
}

#[test]
fn variables_are_replaced_where_templates_are() {
    let defaults = "kind: Defaults\nvars: {data: /srv/data, port: 80, url: \"http://127.0.0.1:${port}\"}\nspec: {env: {URL: \"${url}/${name}\"}}\n";
    let process = format!("{}dir: ${{data}}/api\nhealth: {{http: \"${{url}}/healthz\"}}\n", service("./api"));
    let loaded = Tree::new(&[("d.yaml", defaults), ("api.yaml", &process)]).load();
    assert!(loaded.problems.is_empty(), "{:?}", loaded.problems);
    let spec = &loaded.desired.instances.values().next().expect("one").spec;
    assert_eq!(spec.identity.setup_path, "/srv/data/api");
    assert_eq!(spec.health.http.as_deref(), Some("http://127.0.0.1:80/healthz"));
    expect(
        &[("d.yaml", defaults), ("api.yaml", &format!("{}health: ${{url}}/x\n", service("./api")))],
        &[
            "api.yaml:5:9 E0216 health begins with a variable, so its kind of probe is unknown | write {http: …}, {tcp: …} or {cmd: …}",
        ],
    );
    assert!(format!("{:?}", spec.env).contains("http://127.0.0.1:80/api"), "{:?}", spec.env);
}

#[test]
fn unknown_and_unset_variables_are_problems() {
    let defaults = "kind: Defaults\nvars: {port: 80}\n";
    expect(
        &[("a.yaml", &service("./api ${prot}")), ("d.yaml", defaults)],
        &[
            "a.yaml:4:6 E0209 unknown variable ${prot} | did you mean ${port}? write $${prot} (or $prot) for a variable of the shell",
        ],
    );
    let two = service("./api ${zone}")
        .replace("[10.0.0.1]", "[10.0.0.1, {ip: 10.0.0.2, bk_cloud_id: 0, vars: {zone: b}}]");
    expect(
        &[("a.yaml", &two)],
        &[
            "a.yaml:4:6 E0209 variable ${zone} is not set for host 0:10.0.0.1 | set it in a Defaults, or write ${zone:-DEFAULT}",
        ],
    );
    // In a Defaults it is one problem, whatever number of processes is below.
    expect(
        &[("a.yaml", &service("./api")), ("d.yaml", "kind: Defaults\nspec: {env: {A: \"${nope}\"}}\n")],
        &["d.yaml:2:17 E0209 unknown variable ${nope} | …"],
    );
    expect(
        &[("a.yaml", &service("./api ${a:-${b}}"))],
        &[
            "a.yaml:4:6 E0209 the default of ${a} contains a variable | define a variable with that value instead",
        ],
    );
    let path = format!("{}dir: ${{port}}/x\n", service("./api"));
    expect(
        &[("a.yaml", &path), ("d.yaml", defaults)],
        &[
            "a.yaml:5:6 E0202 dir begins with ${port}, which is \"80\" | use an absolute path, with a leading /",
        ],
    );
}

#[test]
fn names_are_checked() {
    let wrong = |vars: &str, problem: &str| {
        expect(
            &[("d.yaml", &format!("kind: Defaults\nvars: {{{vars}}}\n")), ("p.yaml", &service("./api"))],
            &[problem],
        );
    };
    wrong("name: x", "d.yaml:2:8 E0217 variable \"name\" is reserved: Abide sets it | …");
    wrong("host: x", "d.yaml:2:8 E0217 variable \"host\" is reserved: Abide sets it | …");
    wrong("a-b: x", "d.yaml:2:8 E0217 variable \"a-b\" has an invalid name | …");
    wrong("a: [x]", "d.yaml:2:11 E0103 vars.a must be …");
    expect(
        &[
            ("d.yaml", "kind: Defaults\nvars: {a: 1}\n---\nkind: Defaults\nvars: {a: 2}\n"),
            ("p.yaml", &service("./api")),
        ],
        &[
            "d.yaml:5:11 E0408 variable a has another value at d.yaml:2:11, in the same directory | keep one of them",
        ],
    );
    expect(
        &[("p.yaml", &format!("{}vars: {{a: 1}}\n", service("./api")))],
        &["p.yaml:5:1 E0102 a Process has no field \"vars\" | …"],
    );
}

#[test]
fn circles_and_floods_end() {
    let circle = "kind: Defaults\nvars: {a: \"${b}\", b: \"x${c}\", c: \"${a}\"}\n";
    expect(
        &[("a.yaml", &service("./api ${a}")), ("d.yaml", circle)],
        &[
            "a.yaml:4:6 E0218 variables refer to each other in a cycle: a → b → c → a | give one of them a value without variables",
        ],
    );
    expect(
        &[("a.yaml", &service("./api ${a}")), ("d.yaml", "kind: Defaults\nvars: {a: \"${a}\"}\n")],
        &["a.yaml:4:6 E0218 variables refer to each other in a cycle: a → a | …"],
    );
    // A billion laughs, with text and without.
    for last in ["laugh", ""] {
        let mut vars = format!("v0: \"{last}\"");
        for n in 1..30 {
            vars.push_str(&format!(", v{n}: \"{}\"", format!("${{v{}}}", n - 1).repeat(10)));
        }
        let begin = Instant::now();
        expect(
            &[
                ("a.yaml", &service("./api ${v29}")),
                ("d.yaml", &format!("kind: Defaults\nvars: {{{vars}}}\n")),
            ],
            &[
                "a.yaml:4:6 E0218 variable ${v29} expands to too much text | use fewer variables inside of variables",
            ],
        );
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    }
}
