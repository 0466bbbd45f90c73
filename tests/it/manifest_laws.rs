//! Laws over random manifests: printing and parsing, revisions, file order, JSON and YAML.

use std::collections::BTreeMap;

use abide::manifest::document::Document;
use abide::manifest::{Limits, load_text, print};
use abide::model::{Effect, Field, OnChange, Spec};
use abide::reconcile::spec_effects::{base_effect, effect_of, revision, table};
use proptest::prelude::*;

use crate::fixtures::documents::*;
use crate::support::Tree;

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    /// What is good as YAML is good: the two laws below would hold for nothing but refusals otherwise.
    #[test]
    fn good_documents_are_good(document in good_document()) {
        let loaded = load_text("a.yaml", print::yaml(std::slice::from_ref(&document)), &Limits::default());
        prop_assert_eq!((loaded.errors(), loaded.desired.instances.len()), (0, 1), "{:?}", loaded.problems);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// parse(print(m)) = m for all texts, and other YAML parsers read the same types.
    #[test]
    fn printing_and_parsing_round_trip(document in document()) {
        let text = print::yaml(std::slice::from_ref(&document));
        let again: Document = serde_yaml::from_str(&text).map_err(|e| TestCaseError::fail(format!("{e}\n{text}")))?;
        prop_assert_eq!(&again, &document, "{}", text);
        let several = print::yaml(&[document.clone(), document.clone()]);
        prop_assert_eq!(serde_yaml::Deserializer::from_str(&several).count(), 2, "{}", several);
    }

    /// JSON and YAML say the same: the same instances, and problems of the same kinds.
    #[test]
    fn json_and_yaml_load_the_same(document in prop_oneof![document(), good_document()]) {
        let json = ascii(&serde_json::to_string_pretty(&document).expect("JSON"));
        let yaml = print::yaml(std::slice::from_ref(&document));
        let (json, yaml) = (Tree::new(&[("a.json", json)]), Tree::new(&[("a.yaml", yaml)]));
        let (a, b) = (json.load(), yaml.load());
        let specs = |l: &abide::manifest::Loaded| l.desired.instances.iter().map(|(k, w)| (k.clone(), w.spec.clone())).collect::<Vec<_>>();
        prop_assert_eq!(specs(&a), specs(&b));
        let codes = |l: &abide::manifest::Loaded| {
            let mut codes: Vec<_> = l.problems.iter().map(|p| (p.code, p.message.clone())).collect();
            codes.sort();
            codes
        };
        prop_assert_eq!(codes(&a), codes(&b));
    }
}

/// JSON with an escape (or two, beyond 16 bits) for everything outside of ASCII, as many programs write it.
fn ascii(json: &str) -> String {
    let mut units = [0; 2];
    let mut out = String::new();
    for c in json.chars() {
        if c.is_ascii() && c != '\u{7f}' {
            out.push(c);
        } else {
            out.extend(c.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")));
        }
    }
    out
}

/// A spec in which every field is set, and differs from its default.
fn full() -> String {
    "\
meta: {namespace: web, name: api, labels: {a: b, c: d}}
hosts: [{ip: 10.0.0.1, bk_cloud_id: 0}]
spec:
  identity: {proc_name: p, setup_path: /s, pid_path: /p, config_path: /c, log_path: /l, user: u, value_key: k}
  control: {start_cmd: a, stop_cmd: b, restart_cmd: c, reload_cmd: d, kill_cmd: e, version_cmd: f, health_cmd: g}
  resource: {cpu: 1, mem: 2, fd: 3, disk: 4, net: 5}
  monitor_policy: {auto_type: 1, start_check_secs: 7, stop_check_secs: 8, start_retries: 9, start_interval: 11, crontab_rule: 1 * * * *, op_timeout: 12}
  warn_report_policy: {report_id: 13}
  configmap: [{path: /x, md5: 0123456789abcdef0123456789abcdef}, {path: /y}]
  env: {A: x, B: {file: /f}, C: {value: s, secret: true}}
  job: {proc_owner: o, func_id: f, instance_id: i, instance_num: 14, cycle_time: 15, start_check_begin_time: 16, start_check_end_time: 17}
"
    .to_owned()
}

#[track_caller]
fn spec_of(text: &str) -> Spec {
    let loaded = load_text("a.yaml", text.to_owned(), &Limits::default());
    assert_eq!(loaded.errors(), 0, "{:?}", loaded.problems);
    (**loaded.desired.instances.values().next().expect("one instance").spec).clone()
}

fn rev(text: &str) -> abide::model::SpecRevision {
    revision(&spec_of(text), &OnChange::new())
}

/// Every map of a document with its keys in the opposite order.
fn reversed(value: serde_yaml::Value) -> serde_yaml::Value {
    use serde_yaml::Value;
    match value {
        Value::Mapping(map) => Value::Mapping(
            map.into_iter().collect::<Vec<_>>().into_iter().rev().map(|(k, v)| (k, reversed(v))).collect(),
        ),
        Value::Sequence(items) => Value::Sequence(items.into_iter().map(reversed).collect()),
        other => other,
    }
}

#[test]
fn a_revision_does_not_depend_on_order_spelling_or_written_defaults() {
    let base = rev(&full());
    let turned =
        serde_yaml::to_string(&reversed(serde_yaml::from_str(&full()).expect("YAML"))).expect("YAML");
    assert_ne!(turned, full());
    assert_eq!(rev(&turned), base, "order of fields");
    let alias = full()
        .replace("monitor_policy", "alive_monitor_policy")
        .replace("crontab_rule", "crotab_rule")
        .replace("value_key", "index_key");
    assert_eq!(rev(&alias), base, "spelling of aliases");
    assert_eq!(rev(&full().replace("cpu: 1,", "cpu: 1.0,")), base, "spelling of numbers");
    assert_eq!(rev(&full().replace("0123456789abcdef", "0123456789ABCDEF")), base, "case of hex digits");
    let moved = full().replace(
        "{path: /x, md5: 0123456789abcdef0123456789abcdef}, {path: /y}",
        "{path: /y}, {path: '', md5: ''}, {path: /x, md5: 0123456789abcdef0123456789abcdef}",
    );
    assert_eq!(rev(&moved), base, "order of files, and entries that say nothing");
    assert_eq!(
        rev(&full().replace("C: {value: s, secret: true}", "C: s")),
        base,
        "hiding a value is not changing it"
    );

    let bare = crate::support::GOOD;
    let written = bare
        .replace("auto_type: 1", "auto_type: 1, start_check_secs: 5, start_retries: 4, start_interval: 10, op_timeout: 60, crontab_rule: ''")
        .replace("./api}", "./api, start_mode: daemon, stop_cmd: ''}")
        .replace("name: api}", "name: api, labels: {}}");
    assert_eq!(rev(&written), rev(bare), "documented defaults");
    assert_ne!(
        rev(&bare.replace("auto_type: 1", "auto_type: 1, start_check_secs: 0")),
        rev(bare),
        "0 is a value"
    );
}

/// One change for each field, by exact replacement in [`full`].
fn changes() -> BTreeMap<Field, (&'static str, &'static str)> {
    use Field::*;
    BTreeMap::from([
        (Labels, ("a: b", "a: z")),
        (ProcName, ("proc_name: p", "proc_name: q")),
        (SetupPath, ("setup_path: /s", "setup_path: /t")),
        (PidPath, ("pid_path: /p", "pid_path: /q")),
        (ConfigPath, ("config_path: /c", "config_path: /d")),
        (LogPath, ("log_path: /l", "log_path: /m")),
        (User, ("user: u", "user: v")),
        (ValueKey, ("value_key: k", "value_key: l")),
        (StartCmd, ("start_cmd: a", "start_cmd: z")),
        (StopCmd, ("stop_cmd: b", "stop_cmd: z")),
        (RestartCmd, ("restart_cmd: c", "restart_cmd: z")),
        (ReloadCmd, ("reload_cmd: d", "reload_cmd: z")),
        (KillCmd, ("kill_cmd: e", "kill_cmd: z")),
        (VersionCmd, ("version_cmd: f", "version_cmd: z")),
        (HealthCmd, ("health_cmd: g", "health_cmd: z")),
        (StartMode, ("health_cmd: g", "health_cmd: g, start_mode: foreground")),
        (Cpu, ("cpu: 1,", "cpu: 1.5,")),
        (Mem, ("mem: 2", "mem: 0")),
        (Fd, ("fd: 3", "fd: 0")),
        (Disk, ("disk: 4", "disk: 0")),
        (Net, ("net: 5", "net: 0")),
        (AutoType, ("auto_type: 1", "auto_type: 2")),
        (StartCheckSecs, ("start_check_secs: 7", "start_check_secs: 0")),
        (StopCheckSecs, ("stop_check_secs: 8", "stop_check_secs: 0")),
        (StartRetries, ("start_retries: 9", "start_retries: 0")),
        (StartInterval, ("start_interval: 11", "start_interval: 0")),
        (CrontabRule, ("1 * * * *", "2 * * * *")),
        (OpTimeout, ("op_timeout: 12", "op_timeout: 0")),
        (ReportId, ("report_id: 13", "report_id: 0")),
        (Configmap, ("{path: /y}", "{path: /z}")),
        (Env, ("A: x", "A: y")),
        (ProcOwner, ("proc_owner: o", "proc_owner: p")),
        (FuncId, ("func_id: f", "func_id: g")),
        (InstanceId, ("instance_id: i", "instance_id: j")),
        (InstanceNum, ("instance_num: 14", "instance_num: 0")),
        (CycleTime, ("cycle_time: 15", "cycle_time: 16")),
        (StartCheckBeginTime, ("begin_time: 16", "begin_time: 0")),
        (StartCheckEndTime, ("end_time: 17", "end_time: 0")),
        (StopSignal, ("health_cmd: g", "health_cmd: g, stop_signal: INT")),
        (StopTimeout, ("health_cmd: g", "health_cmd: g, stop_timeout: 3s")),
        (ReloadSignal, ("health_cmd: g", "health_cmd: g, reload_signal: HUP")),
        (CrontabZone, ("crontab_rule: 1 * * * *", "crontab_rule: 1 * * * *, crontab_zone: Asia/Shanghai")),
        (Health, ("spec:", "spec:\n  health: tcp://127.0.0.1:80")),
        (Restart, ("spec:", "spec:\n  restart: never")),
        (Log, ("spec:", "spec:\n  log: {max_size: 10MB}")),
        (Limits, ("spec:", "spec:\n  limits: {cpu: 1.5}")),
        (EnvFile, ("spec:", "spec:\n  env_file: /e")),
        (Sandbox, ("spec:", "spec:\n  sandbox: {capabilities: []}")),
        (Hooks, ("spec:", "spec:\n  hooks: {before_start: h}")),
    ])
}

#[test]
fn a_field_change_changes_only_the_digest_of_its_effect() {
    let changes = changes();
    assert_eq!(changes.len(), Field::ALL.len(), "every field has a change");
    for (field, (old, new)) in changes {
        // A spec has one health check.
        let full = if field == Field::Health { full().replace(", health_cmd: g", "") } else { full() };
        assert!(full.contains(old), "{old}");
        let (base, changed) = (rev(&full), spec_of(&full.replace(old, new)));
        let now = revision(&changed, &OnChange::new());
        let mode = abide::model::StartMode::Daemon;
        if field == Field::StartMode {
            // Going to the foreground also moves log_path from one class to another.
            assert_eq!(now.differs_from(&base), Effect::Restart);
            continue;
        }
        let effect = base_effect(field, mode);
        assert_eq!(now.differs_from(&base), effect, "{field}");
        let differing = [
            (Effect::Register, now.register != base.register),
            (Effect::Reload, now.reload != base.reload),
            (Effect::Restart, now.restart != base.restart),
            (Effect::Replace, now.replace != base.replace),
        ];
        assert_eq!(
            differing.iter().filter(|(_, differs)| *differs).map(|(e, _)| *e).collect::<Vec<_>>(),
            [effect],
            "{field}"
        );
        assert_eq!(now.run != base.run, effect >= Effect::Reload, "{field}: a new run only for what runs");
        // `on_change` moves it; `none` leaves it out.
        for other in Effect::ALL {
            let moved = OnChange::from([(field, other)]);
            assert_eq!(effect_of(field, mode, &moved), other);
            assert_eq!(
                revision(&changed, &moved).differs_from(&revision(&spec_of(&full), &moved)),
                other,
                "{field} {other}"
            );
        }
    }
}

/// A variable with an effect of its own is in no other digest; without one, no digest changes.
#[test]
fn digests_of_one_variable_follow_its_effect() {
    let with =
        |env: &str| {
            spec_of(&full().replace(
                "env: {A: x, B: {file: /f}, C: {value: s, secret: true}}",
                &format!("env: {{{env}}}"),
            ))
        };
    let (old, new) = (with("A: x, B: y"), with("A: z, B: y"));
    let plain = |spec: &Spec| revision(spec, &OnChange::new());
    for effect in Effect::ALL {
        let mut own = OnChange::new();
        own.insert_variable("A", effect);
        assert_eq!(revision(&new, &own).differs_from(&revision(&old, &own)), effect);
        let other = with("A: x, B: other");
        assert_eq!(revision(&other, &own).differs_from(&revision(&old, &own)), Effect::Restart, "{effect}");
        let removed = with("B: y");
        assert_eq!(revision(&removed, &own).differs_from(&revision(&old, &own)), effect, "removed: {effect}");
        let mut unset = OnChange::new();
        unset.insert_variable("C", effect);
        assert_eq!(revision(&old, &unset), plain(&old), "{effect}");
    }
    assert_eq!(plain(&new).differs_from(&plain(&old)), Effect::Restart);
}

#[test]
fn the_table_lists_every_field_once_in_order() {
    let spec = spec_of(&full());
    let fields: Vec<_> = table(&spec, &OnChange::new()).into_iter().map(|row| row.field).collect();
    assert_eq!(fields, Field::ALL);
    for field in Field::ALL {
        assert_eq!(Field::from_path(field.path()), Some(*field));
        assert_eq!(Field::from_path(&format!("spec.{}", field.path())), Some(*field));
    }
}

/// Documents that depend on each other in every way that crosses files.
fn related() -> Vec<String> {
    let process = |n: usize| {
        let depends = if n == 0 { String::new() } else { format!("depends_on: [p{}]\n", n - 1) };
        crate::support::GOOD
            .replace("name: api", &format!("name: p{n}"))
            .replace("/opt/api", &format!("/opt/p{n}"))
            .replace("{ip: 10.0.0.1, bk_cloud_id: 0}", "{group: g}")
            .replace("spec:", &format!("{depends}spec:"))
    };
    let mut all: Vec<String> = (0..8).map(process).collect();
    all.push("kind: HostGroup\nmeta: {name: g}\nhosts: [{ip: 10.0.0.1, bk_cloud_id: 0}, {ip: 10.0.0.2, bk_cloud_id: 0}]\n".into());
    all.push("kind: Defaults\nspec: {monitor_policy: {start_retries: 2}}\n".into());
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// However documents are spread over files and files are named, the same instances come out.
    #[test]
    fn expansion_does_not_depend_on_files(order in Just((0..10usize).collect::<Vec<_>>()).prop_shuffle(), cuts in proptest::collection::vec(any::<bool>(), 10)) {
        let wanted = |tree: &Tree| {
            let loaded = tree.load();
            assert_eq!(loaded.problems, []);
            loaded.desired.instances.iter().map(|(k, w)| (k.clone(), w.spec.clone(), w.origin.depends_on.clone())).collect::<Vec<_>>()
        };
        let documents = related();
        let base = wanted(&Tree::new(&[("all.yaml", documents.join("---\n"))]));
        let shuffled = Tree::new::<&str>(&[]);
        let mut file = String::new();
        for (nth, (at, cut)) in order.iter().zip(&cuts).enumerate() {
            if !file.is_empty() {
                file.push_str("---\n");
            }
            file.push_str(&documents[*at]);
            if *cut || nth == 9 {
                shuffled.write(&format!("{}-{at}.yaml", 9 - nth), std::mem::take(&mut file));
            }
        }
        prop_assert_eq!(wanted(&shuffled), base);
    }
}
