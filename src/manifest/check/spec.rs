//! Checks of a spec: single values, then fields that depend on each other.

use std::collections::BTreeMap;

use super::{ProcessForm, ValueChecker, supervision};
use crate::manifest::document::{
    ConfigEntry, ControlEntry, EnvEntry, IdentityEntry, JobEntry, MonitorEntry, Real, ResourceEntry,
    SpecEntry, Text, TextOrNumber,
};
use crate::manifest::grammar::{self, ANY_COUNT, CYCLE_SECONDS, RETRIES, SECONDS, SMALL_COUNT};
use crate::manifest::problem::{Code, FieldPath, PathProblem};
use crate::model::{
    AutoType, ConfigFile, Control, EnvValue, Identity, Job, Monitor, Resource, Secret, Spec, StartMode, State,
};

/// Checks all values of a spec except labels. `numbered` is true if `${instance}` is defined.
pub fn spec(entry: &SpecEntry, path: &FieldPath, numbered: bool, values: &mut ValueChecker) -> Spec {
    let SpecEntry {
        identity,
        control,
        resource,
        monitor_policy,
        warn_report_policy,
        configmap,
        env,
        job,
        health,
        restart,
        log,
        limits,
        env_file,
        sandbox,
        hooks,
    } = entry;
    let section = |name| path.key(name);
    Spec {
        labels: BTreeMap::new(),
        identity: identity
            .as_ref()
            .map(|e| self::identity(e, &section("identity"), numbered, values))
            .unwrap_or_default(),
        control: control
            .as_ref()
            .map(|e| self::control(e, &section("control"), numbered, values))
            .unwrap_or_default(),
        resource: resource
            .as_ref()
            .map(|e| self::resource(e, &section("resource"), values))
            .unwrap_or_default(),
        monitor: monitor_policy
            .as_ref()
            .map(|e| monitor(e, &section("monitor_policy"), values))
            .unwrap_or_default(),
        report_id: warn_report_policy.as_ref().and_then(|e| e.report_id),
        configmap: configmap
            .iter()
            .flatten()
            .enumerate()
            .filter_map(|(at, e)| config(e, &section("configmap").index(at), numbered, values))
            .collect(),
        env: env
            .iter()
            .flat_map(|map| &map.0)
            .filter_map(|(name, e)| {
                Some((name.clone(), env_value(name, e, &section("env").entry(name), numbered, values)?))
            })
            .collect(),
        job: job.as_ref().map(|e| self::job(e, &section("job"), values)).unwrap_or_default(),
        health: health
            .as_ref()
            .map(|e| supervision::health(e, &section("health"), numbered, values))
            .unwrap_or_default(),
        restart: restart
            .as_ref()
            .map(|e| supervision::restart(e, &section("restart"), values))
            .unwrap_or_default(),
        log: log.as_ref().map(|e| supervision::log(e, &section("log"), values)).unwrap_or_default(),
        limits: limits
            .as_ref()
            .map(|e| supervision::limits(e, &section("limits"), values))
            .unwrap_or_default(),
        env_file: values.path(&section("env_file"), env_file.as_ref(), numbered),
        sandbox: sandbox
            .as_ref()
            .map(|e| supervision::sandbox(e, &section("sandbox"), numbered, values))
            .unwrap_or_default(),
        hooks: hooks
            .as_ref()
            .map(|e| supervision::hooks(e, &section("hooks"), numbered, values))
            .unwrap_or_default(),
    }
}

fn identity(entry: &IdentityEntry, path: &FieldPath, numbered: bool, values: &mut ValueChecker) -> Identity {
    let IdentityEntry { proc_name, setup_path, pid_path, config_path, log_path, user, value_key } = entry;
    Identity {
        proc_name: literal(&path.key("proc_name"), proc_name.as_ref(), values).unwrap_or_default(),
        setup_path: values.path(&path.key("setup_path"), setup_path.as_ref(), numbered).unwrap_or_default(),
        pid_path: values.path(&path.key("pid_path"), pid_path.as_ref(), numbered).unwrap_or_default(),
        config_path: values.path(&path.key("config_path"), config_path.as_ref(), numbered),
        log_path: values.path(&path.key("log_path"), log_path.as_ref(), numbered),
        user: literal(&path.key("user"), user.as_ref(), values),
        value_key: values.template(&path.key("value_key"), value_key.as_ref(), numbered),
    }
}

/// Text without variable replacement. A `${` in it is an error, since its author expects a replacement.
fn literal(path: &FieldPath, value: Option<&Text>, values: &mut ValueChecker) -> Option<String> {
    let text = values.text(path, value)?;
    if text.contains("${") {
        let message = format!("variables are not replaced in {path}");
        values.report(
            PathProblem::new(Code::BadVariable, path.clone(), message)
                .hint("variables are replaced in paths, commands, env, health and value_key"),
        );
        return None;
    }
    Some(text)
}

fn control(entry: &ControlEntry, path: &FieldPath, numbered: bool, values: &mut ValueChecker) -> Control {
    let ControlEntry {
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
    } = entry;
    let mut command = |name, value: &Option<Text>| values.template(&path.key(name), value.as_ref(), numbered);
    Control {
        start_cmd: command("start_cmd", start_cmd),
        stop_cmd: command("stop_cmd", stop_cmd),
        restart_cmd: command("restart_cmd", restart_cmd),
        reload_cmd: command("reload_cmd", reload_cmd),
        kill_cmd: command("kill_cmd", kill_cmd),
        version_cmd: command("version_cmd", version_cmd),
        health_cmd: command("health_cmd", health_cmd),
        start_mode: values
            .word(
                &path.key("start_mode"),
                start_mode.as_ref().filter(|word| !word.is_empty()),
                grammar::START_MODES,
            )
            .map(|word| {
                if word == StartMode::Foreground.word() { StartMode::Foreground } else { StartMode::Daemon }
            }),
        stop_signal: signal(&path.key("stop_signal"), stop_signal.as_ref(), values),
        stop_timeout: supervision::seconds(&path.key("stop_timeout"), stop_timeout.as_ref(), values),
        reload_signal: signal(&path.key("reload_signal"), reload_signal.as_ref(), values),
    }
}

/// The name of a signal; the prefix SIG is accepted.
fn signal(path: &FieldPath, value: Option<&Text>, values: &mut ValueChecker) -> Option<String> {
    let name = value.filter(|name| !name.is_empty())?;
    let name = Text(name.strip_prefix("SIG").unwrap_or(name).to_owned());
    values.word(path, Some(&name), grammar::SIGNAL_NAMES).map(str::to_owned)
}

fn resource(entry: &ResourceEntry, path: &FieldPath, values: &mut ValueChecker) -> Resource {
    let ResourceEntry { cpu, mem, fd, disk, net } = entry;
    Resource {
        cpu: values.percent(&path.key("cpu"), cpu.map(|Real(share)| share)),
        mem: values.percent(&path.key("mem"), mem.map(|Real(share)| share)),
        fd: values.int(&path.key("fd"), *fd, ANY_COUNT, Code::OutOfRange),
        disk: values.int(&path.key("disk"), *disk, ANY_COUNT, Code::OutOfRange),
        net: values.int(&path.key("net"), *net, ANY_COUNT, Code::OutOfRange),
    }
}

fn monitor(entry: &MonitorEntry, path: &FieldPath, values: &mut ValueChecker) -> Monitor {
    let MonitorEntry {
        auto_type,
        start_check_secs,
        stop_check_secs,
        start_retries,
        start_interval,
        crontab_rule,
        crontab_zone,
        op_timeout,
    } = entry;
    let auto_type =
        values.int::<AutoType>(&path.key("auto_type"), *auto_type, grammar::AUTO_TYPE, Code::OutOfRange);
    let mut seconds =
        |name, value: &Option<i64>| values.int(&path.key(name), *value, SECONDS, Code::BadDuration);
    Monitor {
        auto_type: auto_type.unwrap_or_default(),
        start_check_secs: seconds("start_check_secs", start_check_secs),
        stop_check_secs: seconds("stop_check_secs", stop_check_secs),
        start_interval: seconds("start_interval", start_interval),
        op_timeout: seconds("op_timeout", op_timeout),
        start_retries: values.int(&path.key("start_retries"), *start_retries, RETRIES, Code::OutOfRange),
        crontab_rule: crontab(&path.key("crontab_rule"), crontab_rule.as_ref(), values),
        crontab_zone: zone(&path.key("crontab_zone"), crontab_zone.as_ref(), values),
    }
}

fn zone(path: &FieldPath, value: Option<&Text>, values: &mut ValueChecker) -> Option<String> {
    let zone = values.text(path, value)?;
    if crate::clock::is_zone(&zone) {
        return Some(zone);
    }
    let message = format!("{path} {:?} is not a time zone", crate::manifest::node::shorten(&zone));
    values.report(
        PathProblem::new(Code::BadCrontab, path.clone(), message)
            .hint("use a name of the time zone database, such as Asia/Shanghai"),
    );
    None
}

fn crontab(path: &FieldPath, value: Option<&Text>, values: &mut ValueChecker) -> Option<String> {
    use croner::parser::{CronParser, Seconds, Year};
    let rule = values.text(path, value)?;
    let parser = CronParser::builder().seconds(Seconds::Disallowed).year(Year::Disallowed).build();
    // A longer text is not a rule, and would cost parser time.
    let parsed = if rule.len() > 1_000 {
        Err("the rule is too long".to_owned())
    } else {
        parser.parse(&rule).map_err(|e| e.to_string())
    };
    match parsed {
        Ok(_) => Some(rule),
        Err(error) => {
            let shown = crate::manifest::node::shorten(&rule);
            let message = format!("crontab rule {shown:?} is invalid: {}", sentence(&error));
            values.report(
                PathProblem::new(Code::BadCrontab, path.clone(), message)
                    .hint("use minute hour day-of-month month day-of-week, such as \"*/5 * * * *\""),
            );
            None
        }
    }
}

/// The croner crate's message, without its prefix and in lower case.
fn sentence(message: &str) -> String {
    let message = message.rsplit(": ").next().unwrap_or(message).trim_end_matches('.');
    let mut chars = message.chars();
    chars.next().map(|first| first.to_lowercase().chain(chars).collect()).unwrap_or_default()
}

/// GSE's examples have entries without path and md5; they are ignored.
fn config(
    entry: &ConfigEntry,
    path: &FieldPath,
    numbered: bool,
    values: &mut ValueChecker,
) -> Option<ConfigFile> {
    let file = values.path(&path.key("path"), entry.path.as_ref(), numbered);
    let md5 = values.text(&path.key("md5"), entry.md5.as_ref());
    if let Some(md5) =
        md5.as_ref().filter(|md5| md5.len() != 32 || !md5.bytes().all(|b| b.is_ascii_hexdigit()))
    {
        let message = format!("{path}.md5 {:?} is not an md5 digest", crate::manifest::node::shorten(md5));
        values.report(
            PathProblem::new(Code::BadDigest, path.key("md5"), message)
                .hint("use 32 hex digits, as `md5sum FILE` prints them"),
        );
    }
    (file.is_some() || md5.is_some()).then_some(ConfigFile { path: file, md5 })
}

fn env_value(
    name: &str,
    entry: &EnvEntry,
    path: &FieldPath,
    numbered: bool,
    values: &mut ValueChecker,
) -> Option<EnvValue> {
    if name.is_empty() || name.contains(['=', '\0']) {
        let message =
            format!("environment variable {:?} has an invalid name", crate::manifest::node::shorten(name));
        values.report(
            PathProblem::new(Code::BadEnv, path.clone(), message)
                .hint("the name must not be empty or contain `=`")
                .at_key(),
        );
        return None;
    }
    let mut plain = |path: &FieldPath, value: &TextOrNumber| {
        values.loose(path, value);
        match value {
            // An empty value is valid: it sets the variable to the empty string.
            TextOrNumber::Text(text) if text.is_empty() => Some(String::new()),
            value => values.template(path, Some(&Text(value.to_string())), numbered),
        }
    };
    let source = match entry {
        EnvEntry::Plain(value) => return plain(path, value).map(EnvValue::Text),
        EnvEntry::Source(source) => source,
    };
    match (&source.file, &source.value, &source.exec) {
        (None, Some(value), None) => {
            let text = plain(&path.key("value"), value)?;
            Some(if source.secret == Some(true) {
                EnvValue::Secret(Secret::new(text))
            } else {
                EnvValue::Text(text)
            })
        }
        (Some(file), None, None) if !file.is_empty() => {
            values.path(&path.key("file"), Some(file), numbered).map(EnvValue::File)
        }
        (None, None, Some(argv)) if argv.first().is_some_and(|program| !program.is_empty()) => {
            exec(argv, &path.key("exec"), numbered, values)
        }
        _ => {
            let message = format!("{path} must have one of file, exec and value");
            values.report(
                PathProblem::new(Code::BadEnv, path.clone(), message)
                    .hint("{file: /run/secrets/x}, {exec: [/usr/bin/get-secret, x]}, or {value: x, secret: true}")
                    .at_key(),
            );
            None
        }
    }
}

/// Program and arguments of a variable.
fn exec(argv: &[Text], path: &FieldPath, numbered: bool, values: &mut ValueChecker) -> Option<EnvValue> {
    let word = |(nth, word): (usize, &Text)| match word.is_empty() {
        true => Some(String::new()),
        false => values.template(&path.index(nth), Some(word), numbered),
    };
    argv.iter().enumerate().map(word).collect::<Option<_>>().map(EnvValue::Exec)
}

fn job(entry: &JobEntry, path: &FieldPath, values: &mut ValueChecker) -> Job {
    let JobEntry {
        proc_owner,
        func_id,
        instance_id,
        instance_num,
        cycle_time,
        start_check_begin_time,
        start_check_end_time,
    } = entry;
    Job {
        proc_owner: values.text(&path.key("proc_owner"), proc_owner.as_ref()),
        func_id: values.text(&path.key("func_id"), func_id.as_ref()),
        instance_id: values.text(&path.key("instance_id"), instance_id.as_ref()),
        instance_num: values.int(&path.key("instance_num"), *instance_num, SMALL_COUNT, Code::OutOfRange),
        cycle_time: values.int(&path.key("cycle_time"), *cycle_time, CYCLE_SECONDS, Code::BadDuration),
        start_check_begin_time: values.int(
            &path.key("start_check_begin_time"),
            *start_check_begin_time,
            SECONDS,
            Code::BadDuration,
        ),
        start_check_end_time: values.int(
            &path.key("start_check_end_time"),
            *start_check_end_time,
            SECONDS,
            Code::BadDuration,
        ),
    }
}

/// Checks required fields after Defaults are merged. `entry` is the merged spec as written.
pub fn require(entry: &SpecEntry, state: State, form: ProcessForm, values: &mut ValueChecker) {
    let in_body = form == ProcessForm::Body;
    if *entry == SpecEntry::default() {
        return values.report_missing(FieldPath::of("spec"));
    }
    let control = entry.control.clone().unwrap_or_default();
    let monitor = entry.monitor_policy.clone().unwrap_or_default();
    let set = |value: &Option<Text>| value.as_ref().is_some_and(|text| !text.is_empty());
    let is_short = form == ProcessForm::Short;
    // The agent keeps the pid file of a process that it starts itself.
    let is_foreground = control.start_mode.as_deref() == Some(StartMode::Foreground.word());
    let mode = control.start_mode.as_deref().filter(|mode| !mode.is_empty());
    // A word that is neither mode is a problem of its own.
    let has_own_pid = !in_body && mode.is_some_and(|mode| mode != StartMode::Daemon.word());
    let required = match &entry.identity {
        None if is_short && has_own_pid => Vec::new(),
        None if is_short => vec![("spec.identity.pid_path", false)],
        None => vec![("spec.identity", false)],
        Some(identity) => vec![
            ("spec.identity.proc_name", set(&identity.proc_name) || is_short),
            ("spec.identity.setup_path", set(&identity.setup_path) || is_short),
            ("spec.identity.pid_path", set(&identity.pid_path) || has_own_pid),
            ("spec.identity.user", set(&identity.user) || !in_body),
        ],
    };
    let auto_type = ("spec.monitor_policy.auto_type", monitor.auto_type.is_some() || !in_body);
    let required = required.into_iter().chain([auto_type]);
    for (path, _) in required.filter(|(_, there)| !there) {
        values.report_missing(FieldPath::of(path));
    }
    let auto_type = monitor.auto_type.and_then(|code| AutoType::try_from(code).ok()).unwrap_or_default();
    let cycle_time = entry.job.as_ref().and_then(|job| job.cycle_time);
    if auto_type == AutoType::Periodic
        && !set(&monitor.crontab_rule)
        && cycle_time.is_none_or(|seconds| seconds <= 0)
    {
        let message = "a periodic process (auto_type 0) needs crontab_rule or job.cycle_time";
        let path = FieldPath::of("spec.monitor_policy.auto_type");
        values.report(
            PathProblem::new(Code::NoSchedule, path, message).hint("such as crontab_rule: \"*/5 * * * *\""),
        );
    }
    if auto_type == AutoType::OneShot && state == State::Unhosted {
        let message =
            "a one-shot process (auto_type 2) cannot have state unhosted: a one-shot is never supervised";
        values.report(
            PathProblem::new(Code::StateImpossible, FieldPath::of("state"), message)
                .hint("use running, stopped or absent"),
        );
    }
    if state.needs_start() && !set(&control.start_cmd) {
        let message = format!("state {} needs control.start_cmd, which is not set", state.word());
        values.report(
            PathProblem::new(Code::NoStartCommand, FieldPath::of("spec.control.start_cmd"), message)
                .hint("set start_cmd to the command that starts the process")
                .at_key(),
        );
    }
    require_supervision(entry, &control, auto_type, values);
    if is_foreground && set(&control.restart_cmd) {
        let message = "restart_cmd is not used in foreground mode, where a restart is a stop and a start";
        let path = FieldPath::of("spec.control.restart_cmd");
        values.report(PathProblem::new(Code::UselessField, path, message).hint("remove it").at_key());
    }
}

/// Checks the fields that only Abide has against the others.
fn require_supervision(
    entry: &SpecEntry,
    control: &ControlEntry,
    auto_type: AutoType,
    values: &mut ValueChecker,
) {
    let set = |value: &Option<Text>| value.as_ref().is_some_and(|text| !text.is_empty());
    let mut useless = |path: &'static str, message: String| {
        values.report(
            PathProblem::new(Code::UselessField, FieldPath::of(path), message).hint("remove it").at_key(),
        );
    };
    let pairs = [
        ("spec.control.stop_signal", set(&control.stop_signal), "stop_cmd", set(&control.stop_cmd)),
        ("spec.control.reload_signal", set(&control.reload_signal), "reload_cmd", set(&control.reload_cmd)),
    ];
    for (path, _, command, _) in pairs.into_iter().filter(|(_, signal, _, command)| *signal && *command) {
        useless(path, format!("{path} is not used: the process has a {command}"));
    }
    let zone = entry.monitor_policy.as_ref().is_some_and(|monitor| set(&monitor.crontab_zone));
    if zone && auto_type != AutoType::Periodic {
        useless(
            "spec.monitor_policy.crontab_zone",
            "crontab_zone is used by periodic processes only".to_owned(),
        );
    }
    if entry.restart.is_some() && auto_type != AutoType::Resident {
        useless("spec.restart", "a restart policy is used by resident processes only".to_owned());
    }
    if let (Some(hooks), true) = (&entry.hooks, auto_type != AutoType::Resident) {
        for (path, hook) in
            [("spec.hooks.before_stop", &hooks.before_stop), ("spec.hooks.after_start", &hooks.after_start)]
        {
            if hook.is_some() {
                useless(path, format!("{path} is used by resident processes only"));
            }
        }
    }
    if entry.health.is_some() && set(&control.health_cmd) {
        let message = "spec.health and spec.control.health_cmd are two health checks";
        values.report(
            PathProblem::new(Code::BadProbe, FieldPath::of("spec.health"), message)
                .hint("remove health_cmd; a command can be written as health: {cmd: …}")
                .at_key(),
        );
    }
}
