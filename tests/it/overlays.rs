//! Overlays: bases, variables and patches, their problems, and the limits of what they read.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use abide::manifest::{self, FileContent, IncrementalLoader, Limits, Loaded};
use abide::model::EnvValue;

use crate::support::Tree;

pub const BASE: &str = "\
kind: Process
meta: {namespace: web, name: api, labels: {tier: front}}
hosts: [10.0.0.1]
run: ./api --port ${port}
env: {A: a, B: b}
---
kind: Process
meta: {namespace: web, name: db, labels: {tier: back}}
hosts: [10.0.0.1]
spec:
  identity: {proc_name: db, setup_path: /opt/db, pid_path: /run/db.pid}
  control: {start_cmd: ./db, stop_cmd: ./stop}
  resource: {cpu: 10, mem: 10}
";
const DEFAULTS: &str = "kind: Defaults\nvars: {port: 8080}\n";

fn overlay(rest: &str) -> String {
    format!("kind: Overlay\nbase: ../../base\n{rest}")
}

fn paths(tree: &Tree, path: &str) -> [PathBuf; 1] {
    [tree.path().join(path)]
}

fn load(tree: &Tree, path: &str) -> Loaded {
    manifest::load(&paths(tree, path), &Limits::default())
}

/// Problems as `file:line:column code message`, files without the folder.
pub fn problems(loaded: &Loaded, tree: &Tree) -> Vec<String> {
    let prefix = format!("{}/", tree.path().display());
    let line = |p: &manifest::Problem| {
        let place = format!("{}:{}:{}", p.file, p.line, p.column);
        format!("{place} {} {}", p.code.text(), p.message).replace(&prefix, "")
    };
    loaded.problems.iter().map(line).collect()
}

/// A tree with the base, and one overlay in overlays/prod.
fn layered(overlay: &str, more: &[(&str, &str)]) -> Tree {
    let tree = Tree::new(&[("base/web.yaml", BASE), ("base/defaults.yaml", DEFAULTS)]);
    tree.write("overlays/prod/overlay.yaml", overlay);
    more.iter().for_each(|(name, text)| tree.write(name, text));
    tree
}

#[track_caller]
fn expect(overlay: &str, more: &[(&str, &str)], wanted: &[&str]) {
    let tree = layered(overlay, more);
    let found = problems(&load(&tree, "overlays/prod"), &tree);
    assert!(
        found.len() == wanted.len()
            && found.iter().zip(wanted).all(|(found, wanted)| found.starts_with(wanted)),
        "found:\n{}\nwanted:\n{}",
        found.join("\n"),
        wanted.join("\n")
    );
}

fn instances(loaded: &Loaded) -> BTreeMap<String, String> {
    assert!(loaded.problems.is_empty(), "{:?}", loaded.problems);
    let instances = loaded.desired.instances.iter();
    instances
        .map(|(key, want)| (key.to_string(), want.spec.control.start_cmd.clone().unwrap_or_default()))
        .collect()
}

#[test]
fn an_overlay_changes_its_base_with_variables_and_patches() {
    let text = overlay(
        "vars: {port: 80}\npatches:\n\
         - match: {name: \"a*\"}\n  patch: {hosts: [10.0.0.2, 10.0.0.3], env: {A: null, C: c}, user: app}\n\
         - match: {labels: tier=back}\n  patch: {spec: {resource: {cpu: 30, mem: null}}, run: ./db --large}\n",
    );
    let own = "kind: Process\nmeta: {namespace: web, name: extra}\nhosts: [10.0.0.2]\nrun: ./extra ${port}\n";
    let tree =
        layered(&text, &[("overlays/prod/extra.yaml", own), ("overlays/dev/overlay.yaml", &overlay(""))]);
    let loaded = load(&tree, "overlays/prod");
    let expected = [
        ("0:10.0.0.1:web:db", "./db --large"),
        ("0:10.0.0.2:web:api", "./api --port 80"),
        ("0:10.0.0.2:web:extra", "./extra 80"),
        ("0:10.0.0.3:web:api", "./api --port 80"),
    ];
    let expected = expected.map(|(key, command)| (key.to_owned(), command.to_owned()));
    assert_eq!(instances(&loaded), expected.into());
    let spec = |key: &str| &loaded.desired.instances[&key.parse().expect("a key")].spec;
    let api = spec("0:10.0.0.2:web:api");
    assert_eq!(api.env.keys().collect::<Vec<_>>(), ["B", "C"]);
    assert_eq!(api.identity.user.as_deref(), Some("app"));
    let db = spec("0:10.0.0.1:web:db");
    assert_eq!((db.resource.cpu.map(|cpu| cpu.get()), db.resource.mem), (Some(30.0), None));
    assert_eq!(db.control.stop_cmd.as_deref(), Some("./stop"));
    // The same texts have the same layers, wherever they come from.
    let texts: Vec<FileContent> = loaded.file_contents();
    let again = manifest::load_files(texts, Vec::new(), &Limits::default(), &BTreeMap::new());
    assert_eq!((&again.desired, again.problems.len()), (&loaded.desired, 0));
    // The file means its directory, and a base alone is a tree of its own.
    assert_eq!(load(&tree, "overlays/prod/overlay.yaml").desired, loaded.desired);
    assert_eq!(instances(&load(&tree, "base"))["0:10.0.0.1:web:api"], "./api --port 8080");
}

#[test]
fn an_overlay_may_have_an_overlay_as_base() {
    let group = "kind: HostGroup\nmeta: {name: eu}\nvars: {port: 3}\nhosts: [{ip: 10.0.0.9, bk_cloud_id: 0, vars: {size: host}}]\n";
    let staging = "kind: Overlay\nbase: [../../base, ../../groups.yaml]\nvars: {port: 1, size: small}\npatches:\n- match: {name: api}\n  patch: {hosts: [{group: eu}], run: \"./api ${port} ${size}\"}\n";
    let prod = "kind: Overlay\nbase: ../staging\nvars: {size: large}\npatches:\n- match: {name: api}\n  patch: {env: {B: prod}}\n- match: {name: none}\n  optional: true\n  patch: {user: x}\n";
    let tree = layered(prod, &[("overlays/staging/overlay.yaml", staging), ("groups.yaml", group)]);
    assert_eq!(instances(&load(&tree, "overlays/staging"))["0:10.0.0.9:web:api"], "./api 1 small");
    let loaded = load(&tree, "overlays/prod");
    assert_eq!(instances(&loaded)["0:10.0.0.9:web:api"], "./api 1 large");
    let env =
        format!("{:?}", loaded.desired.instances[&"0:10.0.0.9:web:api".parse().expect("a key")].spec.env);
    assert!(env.contains("prod") && env.contains("\"A\""), "{env}");
}

#[test]
fn policies_of_the_base_and_of_the_overlay_bind_what_patches_make() {
    let policy = |allow: &str| format!("kind: Policy\nmeta: {{name: p}}\nallow: {{{allow}}}\n");
    let patch = overlay("patches:\n- match: {name: api}\n  patch: {hosts: [10.9.0.1], user: root}\n");
    expect(
        &patch,
        &[("base/policy.yaml", &policy("users: [\"a*\"], namespaces: [web]"))],
        &[
            "base/web.yaml:11:3 E0407 policy \"p\" at base/policy.yaml:3:9 does not allow a process without identity.user",
            "overlays/prod/overlay.yaml:5:36 E0407 policy \"p\" at base/policy.yaml:3:9 does not allow user \"root\"",
        ],
    );
    expect(
        &patch,
        &[("overlays/prod/policy.yaml", &policy("hosts: [\"0:10.0.*\"]"))],
        &[
            "overlays/prod/overlay.yaml:5:19 E0407 policy \"p\" at overlays/prod/policy.yaml:3:9 does not allow host 0:10.9.0.1",
        ],
    );
}

#[test]
fn a_problem_of_a_patch_is_in_the_patch() {
    expect(
        &overlay("patches:\n- match: {name: api}\n  patch:\n    hosts: [nowhere]\n    restrat: never\n"),
        &[],
        &[
            "overlays/prod/overlay.yaml:6:13 E0203 \"nowhere\" is neither IP nor CLOUD:IP",
            "overlays/prod/overlay.yaml:7:5 E0102 patches[0].patch has no field \"restrat\"",
        ],
    );
    expect(
        &overlay("patches:\n- match: {name: api}\n  patch: {run: \"./api ${prot}\"}\n"),
        &[],
        &["overlays/prod/overlay.yaml:5:16 E0209 unknown variable ${prot}"],
    );
    expect(
        &overlay("patches:\n- match: {name: api}\n  patch: {kind: Policy}\n"),
        &[],
        &["overlays/prod/overlay.yaml:5:17 E0102 patches[0].patch has no field \"kind\""],
    );
}

#[test]
fn e0421_a_base_that_cannot_be_read_is_located() {
    let base = |path: &str| format!("kind: Overlay\nbase: {path}\n");
    for (path, why) in [
        ("../../nowhere", "\"../../nowhere\" cannot be read: no such file or directory"),
        ("/etc", "\"/etc\" is an absolute path"),
        ("../../../../../../../../../../etc", "\"../../../../../../../../../../etc\" is outside of the tree"),
        (
            "../../../../../../../../../../../../../../etc",
            "\"../../../../../../../../../../../../../../etc\" is outside",
        ),
        ("../../link", "\"../../link\" is reached through a symbolic link"),
        ("../../empty", "\"../../empty\" has no manifests"),
        ("\"\"", "\"\" is empty"),
    ] {
        let tree = layered(&base(path), &[("empty/read.me", "")]);
        std::os::unix::fs::symlink("/etc", tree.path().join("link")).expect("a link");
        let found = problems(&load(&tree, "overlays/prod"), &tree);
        assert_eq!(found.len(), 1, "{path}: {found:?}");
        assert!(
            found[0].starts_with(&format!("overlays/prod/overlay.yaml:2:7 E0421 base {why}")),
            "{found:?}"
        );
    }
    // Above the common directory there is only `/`.
    let tree = layered(&base("."), &[]);
    let depth = tree.path().canonicalize().expect("a path").components().count() + 1;
    tree.write("overlays/prod/overlay.yaml", base(&format!("{}etc", "../".repeat(depth))));
    let found = problems(&load(&tree, "overlays/prod"), &tree);
    assert!(found.len() == 1 && found[0].ends_with("is outside of the tree"), "{found:?}");
    // In a git work tree, the tree ends at its root.
    let tree = layered(&base("../../../../other"), &[("repo/.git/HEAD", ""), ("other/a.yaml", BASE)]);
    tree.write("repo/overlays/prod/overlay.yaml", base("../../../other"));
    let found = problems(&load(&tree, "repo/overlays/prod"), &tree);
    assert_eq!(
        found,
        ["repo/overlays/prod/overlay.yaml:2:7 E0421 base \"../../../other\" is outside of the tree"]
    );
    // One file in two layers would have two meanings.
    let both = "kind: Overlay\nbase: [../staging, ../../base]\n";
    let tree = tree_of_two(both, &overlay(""));
    let found = problems(&load(&tree, "overlays/prod"), &tree);
    assert_eq!(
        found,
        ["overlays/staging/overlay.yaml:2:7 E0421 base \"../../base\" is named by two overlays of this set"]
    );
}

fn tree_of_two(prod: &str, staging: &str) -> Tree {
    layered(prod, &[("overlays/staging/overlay.yaml", staging)])
}

#[test]
fn e0422_overlays_in_a_cycle_are_reported_once() {
    let tree =
        tree_of_two("kind: Overlay\nbase: ../staging\n", "kind: Overlay\nbase: [../../base, ../prod]\n");
    let found = problems(&load(&tree, "overlays/prod"), &tree);
    let wanted = "E0422 this base leads back to the overlay at ";
    assert!(found.len() == 1 && found[0].contains(wanted), "{found:?}");
    let alone = tree_of_two("kind: Overlay\nbase: .\n", "");
    let found = problems(&load(&alone, "overlays/prod"), &alone);
    assert!(found.len() == 1 && found[0].contains(wanted), "{found:?}");
}

#[test]
fn e0423_a_patch_without_match_is_a_problem_unless_it_is_optional() {
    let text = "patches:\n- match: {namespace: web, name: apo}\n  patch: {user: a}\n";
    expect(&overlay(text), &[], &["overlays/prod/overlay.yaml:4:3 E0423 the patch matches no process"]);
    expect(&overlay(&format!("{text}  optional: true\n")), &[], &[]);
    let tree = layered(&overlay(text), &[]);
    let loaded = load(&tree, "overlays/prod");
    assert!(loaded.desired.instances.is_empty(), "an overlay with an error declares nothing");
    let hint = loaded.problems[0].hint.clone().unwrap_or_default();
    assert!(hint.contains("did you mean \"web/api\"?"), "{hint}");
}

#[test]
fn e0424_patches_that_disagree_are_a_problem() {
    let two = |a: &str, b: &str| {
        overlay(&format!(
            "patches:\n- match: {{name: api}}\n  patch: {a}\n- match: {{name: \"a*\"}}\n  patch: {b}\n"
        ))
    };
    let conflict = "overlays/prod/overlay.yaml:7:";
    expect(&two("{user: a}", "{user: a}"), &[], &[]);
    expect(&two("{user: a}", "{dir: /x}"), &[], &[]);
    for (a, b) in [
        ("{user: a}", "{user: b}"),
        ("{run: a}", "{spec: {control: {start_cmd: b}}}"),
        ("{env: {A: x}}", "{spec: {env: {A: y}}}"),
        ("{env: null}", "{env: {A: y}}"),
    ] {
        let tree = layered(&two(a, b), &[]);
        let found = problems(&load(&tree, "overlays/prod"), &tree);
        assert!(
            found.len() == 1 && found[0].starts_with(conflict) && found[0].contains("E0424 two patches set"),
            "{a} {b}: {found:?}"
        );
        assert!(found[0].contains("the other is at overlays/prod/overlay.yaml:5:"), "{found:?}");
    }
}

#[test]
fn e0425_a_tree_above_overlays_is_no_overlay() {
    let tree = tree_of_two(&overlay("vars: {port: 1}\n"), &overlay(""));
    let loaded = load(&tree, "");
    let skipped = "1:1 E0425 the Overlay is skipped: manifests are read from a directory above it";
    let wanted = ["prod", "staging"].map(|name| format!("overlays/{name}/overlay.yaml:{skipped}"));
    assert_eq!(problems(&loaded, &tree), wanted);
    assert_eq!(loaded.desired.instances.len(), 2, "nothing is declared twice");
    // Two at once are none.
    let both = ["overlays/prod", "overlays/staging"].map(|path| tree.path().join(path));
    let loaded = manifest::load(&both, &Limits::default());
    assert!(
        problems(&loaded, &tree)[0].contains("E0425 two overlays are read at once"),
        "{:?}",
        loaded.problems
    );
    // In another file, it is not one.
    let tree = Tree::new(&[("a.yaml", "kind: Overlay\nvars: {a: 1}\n")]);
    assert_eq!(
        tree.problems()[0].split(" | ").next(),
        Some("a.yaml:1:7 E0425 an Overlay applies only in a file overlay.yaml")
    );
    let twice = format!("{}---\n{}", overlay(""), overlay(""));
    expect(
        &twice,
        &[],
        &[
            "overlays/prod/overlay.yaml:4:7 E0425 the directory already has an Overlay, at overlays/prod/overlay.yaml:1:7",
        ],
    );
    // A base that contains the overlay is read without it and the others.
    let around = tree_of_two("kind: Overlay\nbase: ../..\nvars: {port: 5}\n", &overlay(""));
    assert_eq!(instances(&load(&around, "overlays/prod"))["0:10.0.0.1:web:api"], "./api --port 5");
}

#[test]
fn variables_of_an_overlay_have_the_limits_of_others() {
    expect(
        &overlay("vars: {port: \"${port}\"}\n"),
        &[],
        &["base/web.yaml:4:6 E0218 variables refer to each other in a cycle: port → port"],
    );
    for name in ["name", "namespace", "instance", "host", "host.ip"] {
        let tree = layered(&overlay(&format!("vars: {{{name}: x}}\n")), &[]);
        let found = problems(&load(&tree, "overlays/prod"), &tree);
        assert!(found[0].starts_with("overlays/prod/overlay.yaml:3:8 E0217 variable"), "{found:?}");
    }
    let mut bomb = "vars:\n  port: \"${v30}\"\n  v0: xxxxxxxxxx\n".to_owned();
    for n in 1..=30 {
        bomb.push_str(&format!("  v{n}: \"${{v{}}}${{v{}}}\"\n", n - 1, n - 1));
    }
    let begin = Instant::now();
    expect(&overlay(&bomb), &[], &["base/web.yaml:4:6 E0218 variable ${port} expands to too much text"]);
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
}

/// Patches multiply: their size times the processes that they match is limited.
#[test]
fn a_bomb_of_patches_is_refused() {
    let hosts: String = (0..2_000).map(|n| format!("10.1.{}.{}, ", n / 250, n % 250)).collect();
    let processes: String = (0..1_100)
        .map(|n| {
            format!("kind: Process\nmeta: {{namespace: web, name: p{n}}}\nhosts: [10.0.0.1]\nrun: ./p\n---\n")
        })
        .collect();
    let text = overlay(&format!("patches:\n- match: {{name: \"p*\"}}\n  patch: {{hosts: [{hosts}]}}\n"));
    let begin = Instant::now();
    expect(
        &text,
        &[("base/many.yaml", &processes)],
        &["overlays/prod/overlay.yaml:3:1 E0111 the patches add more than 2000000 values"],
    );
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
    let patches: String = (0..1_001)
        .map(|n| format!("- {{match: {{name: \"x{n}*\"}}, optional: true, patch: {{user: a}}}}\n"))
        .collect();
    expect(
        &overlay(&format!("patches:\n{patches}")),
        &[],
        &["overlays/prod/overlay.yaml:3:1 E0111 the overlay has 1001 patches with patterns, more than 1000"],
    );
    let patches = "- {match: {namespace: a, name: b}, optional: true, patch: {user: a}}\n".repeat(20_001);
    expect(
        &overlay(&format!("patches:\n{patches}")),
        &[],
        &["overlays/prod/overlay.yaml:3:1 E0111 the overlay has 20001 patches, more than 20000"],
    );
}

#[test]
fn overlays_on_top_of_each_other_are_limited() {
    let tree = layered(&overlay(""), &[]);
    let mut base = "../prod".to_owned();
    for n in 1..=10 {
        tree.write(&format!("overlays/o{n}/overlay.yaml"), format!("kind: Overlay\nbase: {base}\n"));
        base = format!("../o{n}");
    }
    assert_eq!(problems(&load(&tree, "overlays/o9"), &tree), [""; 0]);
    let found = problems(&load(&tree, "overlays/o10"), &tree);
    assert_eq!(found, ["overlays/o1/overlay.yaml:2:7 E0111 more than 10 overlays are on top of each other"]);
    let declared = load(&tree, "overlays/o10").desired.instances.len();
    assert_eq!(declared, 0, "a base without its overlays is not declared");
}

#[test]
fn unreadable_files_of_any_layer_are_problems_with_places() {
    let tree = layered(&overlay(""), &[]);
    std::fs::write(tree.path().join("base/bad.yaml"), b"a: 1\nb: \xff").expect("a file");
    assert!(problems(&load(&tree, "overlays/prod"), &tree)[0].starts_with("base/bad.yaml:2:4 E0112"));
    std::fs::remove_file(tree.path().join("base/bad.yaml")).expect("a file");
    std::fs::write(tree.path().join("overlays/prod/overlay.yaml"), b"kind: Overlay\nbase: \xff")
        .expect("a file");
    assert!(
        problems(&load(&tree, "overlays/prod"), &tree)[0].starts_with("overlays/prod/overlay.yaml:2:7 E0112")
    );
    tree.write("overlays/prod/overlay.yaml", overlay("patches: {"));
    let broken = problems(&load(&tree, "overlays/prod"), &tree);
    assert!(
        broken[0].starts_with("overlays/prod/overlay.yaml:3:") && broken[0].contains("E0101"),
        "{broken:?}"
    );
    tree.write("overlays/prod/overlay.yaml", overlay(""));
    let small = Limits { file_bytes: 100, ..Limits::default() };
    let found = manifest::load(&paths(&tree, "overlays/prod"), &small).problems;
    assert!(found.iter().any(|problem| problem.code.text() == "E0111"), "{found:?}");
}

/// Edits of the base are spliced, edits of an overlay read what they concern, and both equal a full load.
#[test]
fn a_reload_equals_a_full_load_in_every_layer() {
    let text = overlay("vars: {port: 1}\npatches:\n- match: {name: api}\n  patch: {user: app}\n");
    let (api, db) = BASE.split_once("---\n").expect("two documents");
    let tree = layered(&text, &[("base/web.yaml", api), ("base/db.yaml", db)]);
    let (paths, limits) = (paths(&tree, "overlays/prod"), Limits::default());
    let mut again = IncrementalLoader::default();
    let mut last = {
        again.rescan(&paths, &limits);
        again.load(&limits, &BTreeMap::new())
    };
    assert_eq!(last.problems, []);
    for (file, old, new, is_spliced) in [
        ("base/web.yaml", "./api --port", "./other --port", false),
        ("base/db.yaml", "./db,", "./db2,", true),
        ("overlays/prod/overlay.yaml", "port: 1", "port: 2", false),
        ("overlays/prod/overlay.yaml", "user: app", "user: other", false),
        ("overlays/prod/overlay.yaml", "name: api", "name: apu", false),
        ("overlays/prod/overlay.yaml", "name: apu", "name: \"*\"", false),
        ("base/db.yaml", "stop_cmd: ./stop", "stop_cmd: ./halt", true),
        ("base/defaults.yaml", "8080", "8081", false),
    ] {
        let path = tree.path().join(file);
        let text = std::fs::read_to_string(&path).expect("a file");
        assert!(text.contains(old), "{old}");
        tree.write(file, text.replace(old, new));
        let changed = again.rescan(&paths, &limits).expect("the same files");
        assert_eq!(changed.len(), 1, "{file}");
        let spliced = again.splice(&changed, &last.desired, &limits);
        assert!(spliced.is_some() || !is_spliced, "{file} {new} is spliced");
        let full = manifest::load(&paths, &limits);
        if let Some(spliced) = spliced {
            let mut desired = std::mem::take(&mut last.desired);
            desired.instances.extend(spliced.wants);
            assert_eq!(desired, full.desired, "{file} {new}");
            last.desired = desired;
        } else {
            last = again.load(&limits, &BTreeMap::new());
        }
        assert_eq!((&last.desired, &last.problems), (&full.desired, &full.problems), "{file} {new}");
    }
    // Another base is another tree.
    tree.write("base2/web.yaml", BASE.replace("./db", "./second"));
    tree.write("overlays/prod/overlay.yaml", "kind: Overlay\nbase: ../../base2\nvars: {port: 1}\n");
    assert!(again.rescan(&paths, &limits).is_none());
    assert_eq!(again.load(&limits, &BTreeMap::new()).desired, manifest::load(&paths, &limits).desired);
}

/// Only `secret: false` makes a secret value public.
#[test]
fn a_patched_secret_stays_secret() {
    let base = "kind: Process\nmeta: {namespace: n, name: a}\nhosts: [10.0.0.1]\nrun: ./a\n\
        env: {S: {value: x, secret: true}, P: p}\n";
    let long = "kind: Process\nmeta: {namespace: n, name: b}\nhosts: [10.0.0.1]\nspec:\n  \
        identity: {proc_name: b, setup_path: /, pid_path: /run/b.pid}\n  control: {start_cmd: ./b}\n  \
        env: {S: {value: x, secret: true}, P: p}\n";
    for (patch, is_secret) in
        [("topsecret", true), ("{value: y}", true), ("{value: y, secret: false}", false)]
    {
        let overlay = overlay(&format!(
            "patches:\n  - match: {{name: a}}\n    patch: {{env: {{S: {patch}, P: q}}}}\n  \
             - match: {{name: b}}\n    patch: {{spec: {{env: {{S: {patch}, P: q}}}}}}\n"
        ));
        let tree = layered(&overlay, &[("base/a.yaml", base), ("base/b.yaml", long)]);
        let loaded = load(&tree, "overlays/prod");
        assert!(loaded.problems.is_empty(), "{:?}", loaded.problems);
        let patched = loaded.desired.instances.iter().filter(|(key, _)| key.namespace.as_str() == "n");
        let patched: Vec<_> = patched.map(|(_, want)| &want.spec.env).collect();
        assert_eq!(patched.len(), 2);
        for env in patched {
            let secret = |name: &str| matches!(env.get(name), Some(EnvValue::Secret(_)));
            assert_eq!((secret("S"), secret("P")), (is_secret, false), "{patch}");
        }
    }
}

/// A text that a template left empty must not select every process.
#[test]
fn an_empty_match_is_a_problem() {
    for field in ["namespace", "name", "labels"] {
        let overlay =
            overlay(&format!("patches:\n  - match: {{{field}: \"\"}}\n    patch: {{state: absent}}\n"));
        let tree = layered(&overlay, &[]);
        let loaded = load(&tree, "overlays/prod");
        let found = problems(&loaded, &tree);
        assert!(found.iter().any(|one| one.contains(&format!("match.{field} is empty"))), "{found:?}");
        assert!(loaded.desired.instances.is_empty(), "an overlay with an error declares nothing");
    }
}
