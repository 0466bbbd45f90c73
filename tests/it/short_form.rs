//! Short form: a service in four lines, its expansion, its problems, and conversion to and from the long form.

use std::collections::BTreeMap;

use abide::manifest::document::{
    ControlEntry, Document, HealthEntry, HealthValue, HostEntry, HostValue, IdentityEntry, MonitorEntry,
    SpecEntry, Text, TextOrNumber,
};
use abide::manifest::{Limits, Loaded, forms, load_text, print};
use abide::model::{AutoType, Spec, StartMode};
use abide::reconcile::spec_effects::revision;
use proptest::option::of;
use proptest::prelude::*;
use serde_json::Value;

use crate::apply::Machine;
use crate::support::{Tree, abide, stderr, stdout, test_user, until};
use crate::system::is_alive;

const SERVICE: &str = "kind: Process\nmeta: {namespace: web, name: api}\nhosts: [127.0.0.1]\nrun: ./api\n";

fn only(text: &str) -> Spec {
    let loaded = Tree::new(&[("a.yaml", text)]).load();
    assert!(loaded.problems.is_empty(), "{text}\n{:?}", loaded.problems);
    let mut specs = loaded.desired.instances.values().map(|want| (**want.spec).clone());
    let spec = specs.next().expect("an instance");
    assert!(specs.next().is_none());
    spec
}

fn problems(text: &str) -> Vec<String> {
    Tree::new(&[("a.yaml", text)]).problems()
}

#[test]
fn a_service_is_four_lines() {
    let spec = only(SERVICE);
    assert_eq!(spec.control.start_mode, Some(StartMode::Foreground));
    assert_eq!(spec.control.start_cmd.as_deref(), Some("./api"));
    assert_eq!(spec.identity.proc_name, "api");
    assert_eq!(spec.identity.setup_path, "/");
    assert_eq!(spec.identity.value_key.as_deref(), Some("web/api"));
    assert_eq!(
        (spec.identity.pid_path.as_str(), spec.identity.log_path, spec.identity.user),
        ("", None, None)
    );
    // Without `kind` it is a process too, and not a request body.
    assert_eq!(only(&SERVICE.replace("kind: Process\n", "")).identity.value_key.as_deref(), Some("web/api"));
}

#[test]
fn short_fields_are_those_of_the_spec() {
    let spec = only(&format!(
        "{SERVICE}dir: /opt/api\nuser: app\nenv: {{A: \"1\"}}\nstop_signal: INT\nstop_timeout: 20s\nreload_signal: HUP\n\
         health: tcp://127.0.0.1:80\nrestart: on-failure\nlog: {{keep: 2}}\nlimits: {{cpu: 1.5}}\nenv_file: /etc/api/env\n\
         sandbox: {{no_new_privs: true}}\nspec: {{resource: {{cpu: 30}}, identity: {{proc_name: api-server}}}}\n"
    ));
    assert_eq!((spec.identity.setup_path.as_str(), spec.identity.user.as_deref()), ("/opt/api", Some("app")));
    // Both parts of the identity are written: they are the key, as in the long form.
    assert_eq!((spec.identity.proc_name.as_str(), spec.identity.value_key), ("api-server", None));
    assert!(spec.env.contains_key("A") && spec.resource.cpu.is_some());
    assert_eq!(spec.control.stop_timeout, Some(20));
    assert_eq!(spec.health.tcp.as_deref(), Some("127.0.0.1:80"));
    let kind = |more: &str| {
        let spec = only(&format!("{SERVICE}{more}\n"));
        (spec.monitor.auto_type, spec.monitor.crontab_rule, spec.monitor.crontab_zone)
    };
    let rule = Some("0 3 * * *".to_owned());
    assert_eq!(kind("type: service"), (AutoType::Resident, None, None));
    assert_eq!(kind("type: job"), (AutoType::OneShot, None, None));
    assert_eq!(
        kind("schedule: 0 3 * * *\nzone: Asia/Shanghai"),
        (AutoType::Periodic, rule.clone(), Some("Asia/Shanghai".to_owned()))
    );
    assert_eq!(kind("type: schedule\nschedule: 0 3 * * *").1, rule);
    let daemon = only(&format!("{SERVICE}mode: daemon\nspec: {{identity: {{pid_path: /run/api.pid}}}}\n"));
    assert_eq!(daemon.control.start_mode, Some(StartMode::Daemon));
}

#[test]
fn hosts_are_text() {
    let text = SERVICE.replace("127.0.0.1", "10.0.0.1, \"1:10.0.0.2\", 2001:db8::1, \"2:[2001:db8::2]\"");
    let loaded = Tree::new(&[("a.yaml", text)]).load();
    assert!(loaded.problems.is_empty(), "{:?}", loaded.problems);
    let hosts: Vec<String> = loaded.desired.instances.keys().map(|key| key.host.to_string()).collect();
    assert_eq!(hosts, ["0:10.0.0.1", "0:2001:db8::1", "1:10.0.0.2", "2:2001:db8::2"]);
    let group = "kind: HostGroup\nmeta: {name: eu}\nhosts: [10.0.0.7, {ip: 10.0.0.8, bk_cloud_id: 0}]\n---\n";
    let loaded =
        Tree::new(&[("a.yaml", group.to_owned() + &SERVICE.replace("127.0.0.1", "{group: eu}"))]).load();
    assert_eq!((loaded.problems.len(), loaded.desired.instances.len()), (0, 2));
    let with_host = |host: &str| problems(&SERVICE.replace("127.0.0.1", host)).join("\n");
    assert_eq!(
        with_host("eu"),
        "a.yaml:3:9 E0203 \"eu\" is neither IP nor CLOUD:IP | for a host group, write {group: eu}; host names are not resolved"
    );
    for wrong in [
        "1:2001:db8:1:2:3:4:5:6:7",
        "x:10.0.0.1",
        "\"-1:10.0.0.1\"",
        "10.0.0",
        "\"\"",
        "\"1:\"",
        "\"[10.0.0.1]\"",
    ] {
        assert!(with_host(wrong).contains("a.yaml:3:9 E0203 "), "{wrong}: {}", with_host(wrong));
    }
    assert!(with_host("7").contains("E0103"));
}

#[test]
fn numbered_instances_have_keys_of_their_own() {
    let loaded = Tree::new(&[("a.yaml", format!("{SERVICE}instances: 2\n"))]).load();
    assert!(loaded.problems.is_empty(), "{:?}", loaded.problems);
    let keys: Vec<_> =
        loaded.desired.instances.values().map(|want| want.spec.identity.value_key.clone()).collect();
    assert_eq!(keys, [Some("web/api_1".to_owned()), Some("web/api_2".to_owned())]);
}

#[test]
fn defaults_fill_the_short_form() {
    let defaults = "kind: Defaults\nspec: {identity: {setup_path: /opt/api, user: app}, control: {start_mode: daemon}}\n---\n";
    let spec = only(&format!("{defaults}{SERVICE}"));
    assert_eq!((spec.identity.setup_path.as_str(), spec.identity.user.as_deref()), ("/opt/api", Some("app")));
    assert_eq!(spec.identity.value_key.as_deref(), Some("web/api"));
    assert_eq!(spec.control.start_mode, Some(StartMode::Foreground), "`run` names the process");
}

#[test]
fn problems_point_into_the_short_document() {
    let one =
        |more: &str, problem: &str| assert_eq!(problems(&format!("{SERVICE}{more}\n")), [problem], "{more}");
    one(
        "dir: opt",
        "a.yaml:5:6 E0202 dir \"opt\" is a relative path | use an absolute path, with a leading /",
    );
    one("mode: demon", "a.yaml:5:7 E0107 mode \"demon\" is not an allowed value | did you mean daemon?");
    one(
        "type: cron",
        "a.yaml:5:7 E0107 type \"cron\" is not an allowed value | one of schedule, service, job",
    );
    one(
        "type: job\nschedule: 0 3 * * *",
        "a.yaml:6:1 E0305 a process of type job cannot have a schedule | remove `type`, or `schedule`",
    );
    one(
        "schedule: 0 3 * *",
        "a.yaml:5:11 E0207 crontab rule \"0 3 * *\" is invalid: pattern must have 5 fields when seconds are disallowed | use minute hour day-of-month month day-of-week, such as \"*/5 * * * *\"",
    );
    one(
        "spec: {control: {start_cmd: ./b}}",
        "a.yaml:4:1 E0105 run and spec.control.start_cmd are the same field, and both are set; the other is at a.yaml:5:29 | remove one of them",
    );
    one(
        "dir: /a\nspec: {identity: {setup_path: /b}}",
        "a.yaml:5:1 E0105 dir and spec.identity.setup_path are the same field, and both are set; the other is at a.yaml:6:31 | remove one of them",
    );
    let daemon = problems(&format!("{SERVICE}mode: daemon\n"));
    assert!(daemon[0].contains("spec.identity.pid_path is missing"), "{daemon:?}");
    // A wrong `run` is one problem, not a list of missing fields.
    let wrong = problems(&SERVICE.replace("./api", "[./api]"));
    assert_eq!((wrong.len(), wrong[0].starts_with("a.yaml:4:6 E0103")), (1, true), "{wrong:?}");
}

#[test]
fn other_platforms_need_a_pid_file_and_a_user() {
    let tree = Tree::new(&[("a.yaml", SERVICE)]);
    tree.write("rows.json", "[]");
    let plan =
        |caps: &str| abide(&["plan", "a.yaml", "--observed", "rows.json", "--caps", caps], tree.path(), b"");
    assert_eq!(plan("local").status.code(), Some(0), "{}", stderr(&plan("local")));
    for caps in ["gse-v1", "gse-v2", "gse-apigw", "job"] {
        let output = plan(caps);
        let expected = format!(
            "a.yaml:1:1: process \"web/api\" has neither spec.identity.user nor spec.identity.pid_path, and {caps} needs them\n\
             hint: set `user`, `mode: daemon` and spec.identity.pid_path, the pid file that the daemon writes\n"
        );
        assert_eq!(output.status.code(), Some(65));
        assert!(stderr(&output).ends_with(&expected), "{}", stderr(&output));
    }
    tree.write("a.yaml", format!("{SERVICE}user: app\n"));
    assert!(stderr(&plan("gse-v2")).contains("has no spec.identity.pid_path"), "{}", stderr(&plan("gse-v2")));
    tree.write(
        "a.yaml",
        format!("{SERVICE}user: app\nmode: daemon\nspec: {{identity: {{pid_path: /r.pid}}}}\n"),
    );
    assert_eq!(plan("gse-v2").status.code(), Some(0), "{}", stderr(&plan("gse-v2")));
}

/// Instances with their specs and digests.
fn meaning(loaded: &Loaded) -> BTreeMap<String, (String, String)> {
    let instances = loaded.desired.instances.iter();
    let meaning = |spec: &Spec| revision(spec, &Default::default()).to_string();
    instances
        .map(|(key, want)| (key.to_string(), (format!("{:?}", want.host), meaning(&want.spec))))
        .collect()
}

#[test]
fn convert_prints_both_forms() {
    let text = format!("{SERVICE}user: app\nschedule: 0 3 * * *\nhealth: http://127.0.0.1/\n");
    let tree = Tree::new(&[("a.yaml", &text)]);
    let full = abide(&["convert", "--full", "a.yaml"], tree.path(), b"");
    assert_eq!(full.status.code(), Some(0), "{}", stderr(&full));
    let full = stdout(&full);
    for part in [
        "proc_name: api",
        "setup_path: /",
        "value_key: web/api",
        "start_mode: foreground",
        "auto_type: 0",
        "{ip: 127.0.0.1, bk_cloud_id: 0}",
    ] {
        assert!(full.contains(part), "{part}\n{full}");
    }
    tree.write("full.yaml", &full);
    let short = abide(&["convert", "--short", "full.yaml"], tree.path(), b"");
    assert_eq!(
        stdout(&short),
        "kind: Process\nmeta:\n  namespace: web\n  name: api\nhosts: [127.0.0.1]\nrun: ./api\nuser: app\nschedule: \"0 3 * * *\"\nhealth: \"http://127.0.0.1/\"\n"
    );
    tree.write("a.yaml", "kind: Process\nrun: [x]\n");
    let wrong = abide(&["convert", "--full", "a.yaml"], tree.path(), b"");
    assert_eq!((wrong.status.code(), stdout(&wrong).as_str()), (Some(65), ""));
}

fn word() -> BoxedStrategy<Text> {
    prop_oneof!["[a-z]{1,6}", Just("$${HOME} ${name}".to_owned()), Just("no".to_owned())]
        .prop_map(Text)
        .boxed()
}

fn path() -> BoxedStrategy<Option<Text>> {
    of(prop_oneof![Just(Text("/".to_owned())), "/[a-z]{1,4}".prop_map(Text)]).boxed()
}

fn host() -> BoxedStrategy<HostValue> {
    let entry =
        |ip: &str, cloud| HostEntry { ip: Some(ip.into()), bk_cloud_id: Some(cloud), ..HostEntry::default() };
    prop_oneof![
        Just(HostValue::Address("10.0.0.1".to_owned())),
        Just(HostValue::Address("3:10.0.0.2".to_owned())),
        Just(HostValue::Address("[2001:db8::1]".to_owned())),
        Just(HostValue::Entry(entry("10.0.0.4", 0))),
        Just(HostValue::Entry(entry("2001:db8::2", 4))),
        Just(HostValue::Entry(HostEntry { bk_supplier_id: Some(1), ..entry("10.0.0.9", 0) })),
    ]
    .boxed()
}

fn health() -> BoxedStrategy<HealthValue> {
    prop_oneof![
        Just(HealthValue::Probe("tcp://127.0.0.1:80".to_owned())),
        Just(HealthValue::Check(HealthEntry {
            http: Some("http://127.0.0.1/".into()),
            ..HealthEntry::default()
        })),
        Just(HealthValue::Check(HealthEntry { cmd: Some("tcp://x".into()), ..HealthEntry::default() })),
        Just(HealthValue::Check(HealthEntry {
            tcp: Some("127.0.0.1:9".into()),
            retries: Some(2),
            ..HealthEntry::default()
        })),
    ]
    .boxed()
}

/// A valid process, in either form or in both.
fn process() -> BoxedStrategy<Document> {
    let top =
        (word(), path(), of(word()), any::<bool>(), of(1..3i64), proptest::collection::vec(host(), 1..3));
    let inner = (
        of(Just(Text("api".to_owned()))),
        path(),
        path(),
        of(Just(Text("web/api".to_owned()))),
        of(0..3usize),
    );
    (top, inner, any::<bool>(), any::<bool>(), of(health()))
        .prop_map(|((run, dir, user, daemon, instances, hosts), inner, is_short, has_schedule, health)| {
            let (proc_name, setup_path, pid_path, value_key, kind) = inner;
            let user = user.map(|Text(user)| Text(user.replace(['$', '{', '}'], "")));
            let is_long = !is_short;
            let (kind, schedule) = match has_schedule {
                true => (Some(0), Some(Text("*/5 * * * *".to_owned()))),
                false => (kind.filter(|kind| *kind > 0), None),
            };
            let needs_pid = daemon;
            let identity = IdentityEntry {
                proc_name: proc_name.or_else(|| is_long.then(|| "api".into())),
                setup_path: setup_path
                    .filter(|_| is_long || dir.is_none())
                    .or_else(|| is_long.then(|| "/opt".into())),
                pid_path: pid_path.or_else(|| needs_pid.then(|| "/run/p".into())),
                value_key: value_key
                    .filter(|_| instances.is_none())
                    .or_else(|| (is_long && instances.is_some()).then(|| "${namespace}/${name}".into())),
                user: user.clone().filter(|_| is_long),
                ..IdentityEntry::default()
            };
            let mode =
                |is_here: bool| is_here.then(|| if daemon { "daemon".into() } else { "foreground".into() });
            let words = ["schedule", "service", "job"];
            Document {
                kind: Some("Process".into()),
                meta: Some(abide::manifest::document::Meta {
                    namespace: Some("web".into()),
                    name: Some("api".into()),
                    labels: None,
                }),
                hosts: Some(hosts),
                instances,
                run: is_short.then(|| run.clone()),
                dir: dir.filter(|_| is_short),
                user: user.filter(|_| is_short),
                mode: mode(is_short && daemon),
                process_type: kind.filter(|_| is_short && !has_schedule).map(|kind| words[kind].into()),
                schedule: schedule.clone().filter(|_| is_short),
                stop_timeout: is_short.then(|| TextOrNumber::Text("7s".to_owned())),
                health: health.clone().filter(|_| is_short).map(Box::new),
                spec: Some(Box::new(SpecEntry {
                    identity: Some(identity),
                    control: Some(ControlEntry {
                        start_cmd: is_long.then_some(run),
                        start_mode: mode(is_long),
                        reload_cmd: Some("./reload".into()),
                        ..ControlEntry::default()
                    }),
                    monitor_policy: is_long.then(|| MonitorEntry {
                        auto_type: kind.map(|kind| kind as i64),
                        crontab_rule: schedule,
                        ..MonitorEntry::default()
                    }),
                    health: health.filter(|_| is_long).map(Box::new),
                    ..SpecEntry::default()
                })),
                ..Document::default()
            }
        })
        .boxed()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// Both conversions keep every instance with its digests, and the forms are fixed points.
    #[test]
    fn forms_have_one_meaning(document in process(), defaults in any::<bool>()) {
        let above = Document {
            kind: Some("Defaults".into()),
            spec: Some(Box::new(SpecEntry {
                identity: Some(IdentityEntry { setup_path: Some("/above".into()), ..IdentityEntry::default() }),
                monitor_policy: Some(MonitorEntry { auto_type: Some(2), ..MonitorEntry::default() }),
                ..SpecEntry::default()
            })),
            ..Document::default()
        };
        let above: Vec<Document> = defaults.then_some(above).into_iter().collect();
        let inherited = forms::inherited(&above);
        let load = |document: &Document| {
            let all: Vec<Document> = above.iter().chain([document]).cloned().collect();
            let text = print::yaml(&all);
            (load_text("a.yaml", text.clone(), &Limits::default()), text)
        };
        let (loaded, text) = load(&document);
        prop_assert_eq!(loaded.errors(), 0, "{}\n{:?}", text, loaded.problems);
        let long = forms::long(document.clone(), &inherited);
        let short = forms::short(document.clone(), &inherited);
        for form in [&long, &short] {
            let (again, form) = load(form);
            prop_assert_eq!(meaning(&again), meaning(&loaded), "{}\n=>\n{}\n{:?}", text, form, again.problems);
        }
        prop_assert_eq!(forms::long(short.clone(), &inherited).run, None);
        prop_assert_eq!(forms::short(long, &inherited), short.clone());
        prop_assert_eq!(forms::short(short.clone(), &inherited), short);
    }
}

#[test]
fn a_four_line_service_runs_and_its_output_is_kept() {
    let machine = Machine::new();
    let here = machine.path("");
    let script = machine.path("serve");
    std::fs::write(&script, "#!/bin/sh\necho up\nexec sleep 1000\n").expect("a script");
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("its mode");
    let service = |run: &str| {
        format!("kind: Process\nmeta: {{namespace: web, name: api}}\nhosts: [127.0.0.1]\nrun: {run}\n")
    };
    std::fs::write(machine.path("m/api.yaml"), service(&format!("{}serve", here.display()))).expect("a file");
    let (code, out, err) = machine.apply(&[]);
    assert!(code == 0 && out.contains("converged"), "{code} {out} {err}");
    until("its output is shown", || machine.run(&["logs", "web/api"]).1 == "up\n");
    let described = machine.run(&["describe", "web/api", "-o", "json"]).1;
    let rows: Value = serde_json::from_str(&described).unwrap_or_else(|error| panic!("{error}: {described}"));
    let path = |name: &str| {
        rows[0]["agent_files"][name].as_str().unwrap_or_else(|| panic!("{name}: {rows:#}")).to_owned()
    };
    let pid = rows[0]["pid"].as_u64().expect("a pid");
    assert_eq!(std::fs::read_to_string(path("pid_path")).expect("a pid file"), format!("{pid}\n"));
    assert_eq!(std::fs::read_to_string(path("log_path")).expect("a log"), "up\n");
    assert!(machine.apply(&[]).1.contains("Nothing to do"));
    // A long form with the same meaning changes nothing.
    let full = machine.run(&["convert", "--full", "m/api.yaml"]).1;
    std::fs::write(machine.path("m/api.yaml"), full).expect("a file");
    assert!(machine.apply(&[]).1.contains("Nothing to do"));
    assert_eq!(machine.run(&["stop", "web/api"]).0, 0);
    assert!(!is_alive(pid as u32) && !std::path::Path::new(&path("pid_path")).exists());
    let absent = service("./api") + "state: absent\n";
    std::fs::write(machine.path("m/api.yaml"), absent).expect("a file");
    let (code, out, err) = machine.apply(&["--override-holds"]);
    assert_eq!(code, 0, "{out} {err}");
    until("its files are removed", || !std::path::Path::new(&path("log_path")).exists());
}

#[test]
fn the_log_of_another_user_is_the_agents() {
    let Some(user) = test_user() else { return };
    let machine = Machine::new();
    let text = format!(
        "kind: Process\nmeta: {{namespace: web, name: api}}\nhosts: [127.0.0.1]\nrun: \"id -un; exec sleep 1000\"\nuser: {}\n",
        user.name
    );
    std::fs::write(machine.path("m/api.yaml"), text).expect("a file");
    let (code, out, err) = machine.apply(&[]);
    assert!(code == 0 && out.contains("converged"), "{code} {out} {err}");
    until("its output is shown", || machine.run(&["logs", "web/api"]).1 == format!("{}\n", user.name));
    let described = machine.run(&["describe", "web/api", "-o", "json"]).1;
    let rows: Value = serde_json::from_str(&described).expect("JSON");
    let log = rows[0]["agent_files"]["log_path"].as_str().expect("a path");
    let meta = std::fs::metadata(log).expect("a log");
    assert_eq!(std::os::unix::fs::MetadataExt::uid(&meta), 0);
}
