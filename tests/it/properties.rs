//! Laws over random manifests: printing and reading, revisions, order of files, JSON and YAML.

use std::collections::BTreeMap;

use abide::manifest::document::{
    AllowEntry, BudgetsEntry, ConfigEntry, ControlEntry, Document, EnvEntry, EnvSource, HealthEntry,
    HealthValue, HookEntry, HookValue, HooksEntry, HostEntry, IdentityEntry, JobEntry, LimitsEntry, LogEntry,
    Map, Meta, MonitorEntry, ProtectValue, Real, ResourceEntry, RestartEntry, RestartValue, RolloutEntry,
    SandboxEntry, SpecEntry, Text, TextOrNumber, WarnEntry, WindowEntry,
};
use abide::manifest::{Limits, load_text, print};
use abide::model::{Effect, Field, OnChange, Spec};
use abide::reconcile::effect::{base_effect, effect_of, revision, table};
use proptest::option::of;
use proptest::prelude::*;

use crate::support::Tree;

/// Text that readers of YAML stumble over, and some that they do not.
fn text() -> BoxedStrategy<String> {
    let odd = [
        "",
        " ",
        "no",
        "y",
        "NULL",
        "~",
        "1e3",
        "0x10",
        "0o7",
        "1_000",
        "12:30:45",
        "2026-11-16",
        ".5",
        "-",
        "- a",
        "? b",
        "a: b",
        "a #b",
        "#",
        "&a",
        "*a",
        "!t",
        "|",
        ">",
        "%d",
        "@x",
        "`",
        "'",
        "\"",
        "\\",
        "\n",
        "a\n",
        "\na",
        "a\nb",
        "a\nb\n",
        "a\n\n",
        " a\nb",
        "a \nb",
        "\t",
        "a\tb",
        "\u{85}",
        "\u{2028}",
        "\u{feff}",
        "\u{202e}x",
        "é 中文 🎉",
        "{a}",
        "[a]",
        "a,b",
        "${name}",
        "$${X}",
        "=",
        "<<",
        "true",
        "...",
        "---",
        "a\r\nb",
        "\u{7f}",
        "\u{1b}[0m",
    ];
    prop_oneof![
        3 => "[a-z][a-z0-9_./ -]{0,12}",
        2 => proptest::sample::select(odd.to_vec()).prop_map(str::to_owned),
        1 => "\\PC{0,12}",
        1 => any::<String>().prop_map(|text| text.replace('\0', "")),
    ]
    .boxed()
}

fn words() -> BoxedStrategy<Option<Text>> {
    of(text().prop_map(Text)).boxed()
}

fn loose() -> impl Strategy<Value = TextOrNumber> {
    prop_oneof![text().prop_map(TextOrNumber::Text), any::<i64>().prop_map(TextOrNumber::Number)]
}

fn map<V: std::fmt::Debug>(value: impl Strategy<Value = V>) -> impl Strategy<Value = Option<Map<V>>> {
    of(proptest::collection::btree_map(text(), value, 0..4).prop_map(Map))
}

fn env() -> BoxedStrategy<EnvEntry> {
    let source = (words(), of(loose()), of(any::<bool>())).prop_map(|(file, value, secret)| EnvSource {
        file,
        value,
        secret,
    });
    prop_oneof![loose().prop_map(EnvEntry::Plain), source.prop_map(EnvEntry::Source)].boxed()
}

fn number() -> BoxedStrategy<Option<i64>> {
    of(any::<i64>()).boxed()
}

fn share() -> impl Strategy<Value = Option<Real>> {
    of(prop_oneof![(-1000i32..1000).prop_map(f64::from), -1e9..1e9f64].prop_map(Real))
}

fn host() -> BoxedStrategy<HostEntry> {
    (words(), number(), number(), words(), words())
        .prop_map(|(ip, bk_cloud_id, bk_supplier_id, bk_agent_id, group)| HostEntry {
            ip,
            bk_cloud_id,
            bk_supplier_id,
            bk_agent_id,
            group,
            labels: None,
        })
        .boxed()
}

fn spec() -> impl Strategy<Value = SpecEntry> {
    let identity = (words(), words(), words(), words(), words(), words(), words()).prop_map(
        |(proc_name, setup_path, pid_path, config_path, log_path, user, value_key)| IdentityEntry {
            proc_name,
            setup_path,
            pid_path,
            config_path,
            log_path,
            user,
            value_key,
        },
    );
    let signals = (words(), of(loose()), words());
    let control = (words(), words(), words(), words(), words(), words(), words(), words(), signals).prop_map(
        |(
            start_cmd,
            stop_cmd,
            restart_cmd,
            reload_cmd,
            kill_cmd,
            version_cmd,
            health_cmd,
            start_mode,
            signals,
        )| {
            let (stop_signal, stop_timeout, reload_signal) = signals;
            ControlEntry {
                start_cmd,
                stop_cmd,
                restart_cmd,
                reload_cmd,
                kill_cmd,
                version_cmd,
                health_cmd,
                start_mode,
                stop_signal,
                stop_timeout,
                reload_signal,
            }
        },
    );
    let resource = (share(), share(), number(), number(), number())
        .prop_map(|(cpu, mem, fd, disk, net)| ResourceEntry { cpu, mem, fd, disk, net });
    let monitor = (number(), number(), number(), number(), number(), words(), words(), number()).prop_map(
        |(
            auto_type,
            start_check_secs,
            stop_check_secs,
            start_retries,
            start_interval,
            crontab_rule,
            crontab_zone,
            op_timeout,
        )| MonitorEntry {
            auto_type,
            start_check_secs,
            stop_check_secs,
            start_retries,
            start_interval,
            crontab_rule,
            crontab_zone,
            op_timeout,
        },
    );
    let job = (words(), words(), words(), number(), number(), number(), number()).prop_map(
        |(
            proc_owner,
            func_id,
            instance_id,
            instance_num,
            cycle_time,
            start_check_begin_time,
            start_check_end_time,
        )| JobEntry {
            proc_owner,
            func_id,
            instance_id,
            instance_num,
            cycle_time,
            start_check_begin_time,
            start_check_end_time,
        },
    );
    let files =
        proptest::collection::vec((words(), words()).prop_map(|(path, md5)| ConfigEntry { path, md5 }), 0..3);
    let warn = number().prop_map(|report_id| WarnEntry { report_id });
    (
        of(identity.boxed()),
        of(control.boxed()),
        of(resource.boxed()),
        of(monitor.boxed()),
        of(warn.boxed()),
        of(files.boxed()),
        map(env()),
        of(job.boxed()),
        supervision(),
    )
        .prop_map(
            |(identity, control, resource, monitor_policy, warn_report_policy, configmap, env, job, own)| {
                SpecEntry {
                    identity,
                    control,
                    resource,
                    monitor_policy,
                    warn_report_policy,
                    configmap,
                    env,
                    job,
                    ..own
                }
            },
        )
}

/// The sections that only Abide has.
fn supervision() -> BoxedStrategy<SpecEntry> {
    let check = (words(), words(), words(), of(loose()), of(loose()), of(loose()), number()).prop_map(
        |(cmd, http, tcp, start_period, interval, timeout, retries)| {
            HealthValue::Check(HealthEntry { cmd, http, tcp, start_period, interval, timeout, retries })
        },
    );
    let health = prop_oneof![text().prop_map(HealthValue::Probe), check];
    let codes = || of(proptest::collection::vec(any::<i64>(), 0..3));
    let restart = prop_oneof![
        text().prop_map(RestartValue::Policy),
        (words(), number(), codes()).prop_map(|(policy, attempts, success_codes)| {
            RestartValue::Map(RestartEntry { policy, attempts, success_codes })
        })
    ];
    let hook = prop_oneof![
        text().prop_map(HookValue::Run),
        (words(), of(loose())).prop_map(|(run, timeout)| HookValue::Map(HookEntry { run, timeout }))
    ];
    let texts = || of(proptest::collection::vec(text().prop_map(Text), 0..3));
    let protect =
        prop_oneof![any::<bool>().prop_map(ProtectValue::Switch), text().prop_map(ProtectValue::Word)];
    let switches = (of(any::<bool>()), of(any::<bool>()));
    let sandbox = (switches, texts(), words(), number(), number(), map(loose()), texts(), of(protect))
        .prop_map(
            |(
                switches,
                capabilities,
                umask,
                nice,
                oom_score_adj,
                ulimits,
                read_only_paths,
                protect_system,
            )| {
                let (no_new_privs, private_tmp) = switches;
                SandboxEntry {
                    no_new_privs,
                    capabilities,
                    umask,
                    nice,
                    oom_score_adj,
                    ulimits,
                    private_tmp,
                    read_only_paths,
                    protect_system,
                }
            },
        );
    let log = (of(loose()), number()).prop_map(|(max_size, keep)| LogEntry { max_size, keep });
    let limits = (of(loose()), share()).prop_map(|(memory, cpu)| LimitsEntry { memory, cpu });
    let hooks = of(hook).prop_map(|before_start| HooksEntry { before_start });
    (of(health), of(restart), of(log), of(limits), words(), of(sandbox), of(hooks))
        .prop_map(|(health, restart, log, limits, env_file, sandbox, hooks)| SpecEntry {
            health,
            restart,
            log,
            limits,
            env_file,
            sandbox,
            hooks,
            ..SpecEntry::default()
        })
        .boxed()
}

fn document() -> BoxedStrategy<Document> {
    let meta = (words(), words(), map(loose())).prop_map(|(namespace, name, labels)| Meta {
        namespace,
        name,
        labels,
    });
    let list = || of(proptest::collection::vec(text().prop_map(Text), 0..3)).boxed();
    let hosts = of(proptest::collection::vec(host(), 0..3)).boxed();
    let rollout = (of(loose()), of(loose()), of(loose()), number(), of(any::<bool>())).prop_map(
        |(batch, canary, soak, max_failures, auto_rollback)| RolloutEntry {
            batch,
            canary,
            soak,
            max_failures,
            auto_rollback,
        },
    );
    let allow = (list(), list(), list()).prop_map(|(namespaces, users, hosts)| AllowEntry {
        namespaces,
        users,
        hosts,
    });
    let budgets = (of(loose()), of(loose())).prop_map(|(delete, restart)| BudgetsEntry { delete, restart });
    let window = (words(), words(), words(), words(), list())
        .prop_map(|(days, from, to, tz, operations)| WindowEntry { days, from, to, tz, operations });
    let first =
        (words(), of(meta.boxed()), hosts, words(), number(), list(), list(), of(any::<bool>()), words())
            .boxed();
    let second = (
        map(text().prop_map(Text)),
        of(rollout.boxed()),
        of(spec().boxed()),
        words(),
        of(allow.boxed()),
        of(budgets.boxed()),
        of(proptest::collection::vec(window.boxed(), 0..2)),
    )
        .boxed();
    (first, second)
        .prop_map(
            |((kind, meta, hosts, state, instances, depends_on, protect, adopt, moved_from), second)| {
                let (on_change, rollout, spec, owner, allow, budgets, windows) = second;
                Document {
                    api_version: Some("abide/v1".into()),
                    kind,
                    meta,
                    hosts,
                    state,
                    instances,
                    depends_on,
                    protect,
                    adopt,
                    moved_from,
                    on_change,
                    rollout,
                    spec,
                    owner,
                    allow,
                    budgets,
                    windows,
                    ..Document::default()
                }
            },
        )
        .boxed()
}

/// A document that is good, with odd texts wherever a text may be odd.
fn good_document() -> BoxedStrategy<Document> {
    let safe = || text().prop_map(|text| Text(text.replace("${", "$${").replace('\0', "")));
    let env = proptest::collection::btree_map(
        "[A-Z]{1,4}",
        safe().prop_map(|Text(text)| EnvEntry::Plain(TextOrNumber::Text(text))),
        0..3,
    );
    let labels = proptest::collection::btree_map("[a-z]{1,4}", text().prop_map(TextOrNumber::Text), 0..3);
    (of(safe()), of(safe()), safe(), env, labels, 0.0..100.0f64, 0..86_400i64)
        .prop_map(|(stop_cmd, reload_cmd, Text(user), env, labels, cpu, seconds)| Document {
            kind: Some("Process".into()),
            meta: Some(Meta {
                namespace: Some("web".into()),
                name: Some("api".into()),
                labels: Some(Map(labels)),
            }),
            hosts: Some(vec![HostEntry {
                ip: Some("10.0.0.1".into()),
                bk_cloud_id: Some(0),
                ..HostEntry::default()
            }]),
            spec: Some(SpecEntry {
                identity: Some(IdentityEntry {
                    proc_name: Some("p".into()),
                    setup_path: Some("/p".into()),
                    pid_path: Some("/p.pid".into()),
                    user: Some(Text(user.replace("${", ""))),
                    ..IdentityEntry::default()
                }),
                control: Some(ControlEntry {
                    start_cmd: Some("x".into()),
                    stop_cmd,
                    reload_cmd,
                    ..ControlEntry::default()
                }),
                resource: Some(ResourceEntry { cpu: Some(Real(cpu)), ..ResourceEntry::default() }),
                monitor_policy: Some(MonitorEntry {
                    start_check_secs: Some(seconds),
                    ..MonitorEntry::default()
                }),
                env: Some(Map(env)),
                ..SpecEntry::default()
            }),
            ..Document::default()
        })
        .boxed()
}

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

    /// parse(print(m)) = m, whatever stands in the texts; and nobody else's YAML reader sees another type.
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
