//! Short form: spec fields that a Process may have at its top level, and the values that it may leave out.

use super::ValueChecker;
use crate::manifest::document::{
    ControlEntry, Document, EnvEntry, HealthValue, HooksEntry, IdentityEntry, LimitsEntry, LogEntry, Map,
    MonitorEntry, RestartValue, SandboxEntry, SpecEntry, Text, TextOrNumber,
};
use crate::manifest::grammar::PROCESS_TYPES;
use crate::manifest::problem::{Code, FieldPath, PathProblem, SAME_DOCUMENT};
use crate::manifest::variables::{VariableUse, escape};
use crate::model::{AutoType, ProcessKey, Spec, StartMode};

/// Field at the top level, and its path in the long form.
pub const SHORT_FIELDS: [(&str, &str); 18] = [
    ("run", "spec.control.start_cmd"),
    ("dir", "spec.identity.setup_path"),
    ("user", "spec.identity.user"),
    ("mode", "spec.control.start_mode"),
    ("type", "spec.monitor_policy.auto_type"),
    ("schedule", "spec.monitor_policy.crontab_rule"),
    ("zone", "spec.monitor_policy.crontab_zone"),
    ("env", "spec.env"),
    ("stop_signal", "spec.control.stop_signal"),
    ("stop_timeout", "spec.control.stop_timeout"),
    ("reload_signal", "spec.control.reload_signal"),
    ("health", "spec.health"),
    ("restart", "spec.restart"),
    ("log", "spec.log"),
    ("limits", "spec.limits"),
    ("env_file", "spec.env_file"),
    ("sandbox", "spec.sandbox"),
    ("hooks", "spec.hooks"),
];

/// The working directory of a process that names none.
pub const DEFAULT_DIR: &str = "/";

/// The top-level spec fields of a document.
#[derive(Default)]
pub struct ShortForm {
    command: CommandFields,
    process_type: Option<Text>,
    schedule: Option<Text>,
    zone: Option<Text>,
    env: Option<Map<EnvEntry>>,
    sections: SectionFields,
}

/// Command, working directory and account.
#[derive(Default)]
struct CommandFields {
    run: Option<Text>,
    dir: Option<Text>,
    user: Option<Text>,
    mode: Option<Text>,
    stop_signal: Option<Text>,
    stop_timeout: Option<TextOrNumber>,
    reload_signal: Option<Text>,
}

/// Sections with the same name in the spec.
#[derive(Default)]
struct SectionFields {
    health: Option<Box<HealthValue>>,
    restart: Option<Box<RestartValue>>,
    log: Option<Box<LogEntry>>,
    limits: Option<Box<LimitsEntry>>,
    env_file: Option<Text>,
    sandbox: Option<Box<SandboxEntry>>,
    hooks: Option<Box<HooksEntry>>,
}

impl ShortForm {
    /// Whether a document has a spec field at its top level.
    pub fn is_used(document: &Document) -> bool {
        let d = document;
        let commands = [&d.run, &d.dir, &d.user, &d.mode, &d.stop_signal, &d.reload_signal];
        let others = [&d.process_type, &d.schedule, &d.zone, &d.env_file];
        commands.into_iter().chain(others).any(Option::is_some)
            || d.stop_timeout.is_some()
            || d.env.is_some()
            || d.health.is_some()
            || d.restart.is_some()
            || d.log.is_some()
            || d.limits.is_some()
            || d.sandbox.is_some()
            || d.hooks.is_some()
    }

    pub fn take(document: &mut Document) -> ShortForm {
        ShortForm {
            command: CommandFields {
                run: document.run.take(),
                dir: document.dir.take(),
                user: document.user.take(),
                mode: document.mode.take(),
                stop_signal: document.stop_signal.take(),
                stop_timeout: document.stop_timeout.take(),
                reload_signal: document.reload_signal.take(),
            },
            process_type: document.process_type.take(),
            schedule: document.schedule.take(),
            zone: document.zone.take(),
            env: document.env.take(),
            sections: SectionFields {
                health: document.health.take(),
                restart: document.restart.take(),
                log: document.log.take(),
                limits: document.limits.take(),
                env_file: document.env_file.take(),
                sandbox: document.sandbox.take(),
                hooks: document.hooks.take(),
            },
        }
    }
}

/// Moves the short form into the spec. A field that is set in both is reported.
pub fn fold(mut spec: SpecEntry, short: ShortForm, values: &mut ValueChecker) -> SpecEntry {
    let ShortForm { command, process_type, schedule, zone, env, sections } = short;
    let CommandFields { run, dir, user, mode, stop_signal, stop_timeout, reload_signal } = command;
    let identity = spec.identity.get_or_insert_default();
    put("dir", dir, &mut identity.setup_path, values);
    put("user", user, &mut identity.user, values);
    let control = spec.control.get_or_insert_default();
    if run.is_some() && mode.is_none() && control.start_mode.is_none() {
        control.start_mode = Some(StartMode::Foreground.word().into());
    } else {
        put("mode", mode, &mut control.start_mode, values);
    }
    put("run", run, &mut control.start_cmd, values);
    put("stop_signal", stop_signal, &mut control.stop_signal, values);
    put("stop_timeout", stop_timeout, &mut control.stop_timeout, values);
    put("reload_signal", reload_signal, &mut control.reload_signal, values);
    let monitor = spec.monitor_policy.get_or_insert_default();
    fold_type(process_type, schedule, monitor, values);
    put("zone", zone, &mut monitor.crontab_zone, values);
    put("env", env, &mut spec.env, values);
    let SectionFields { health, restart, log, limits, env_file, sandbox, hooks } = sections;
    put("health", health, &mut spec.health, values);
    put("restart", restart, &mut spec.restart, values);
    put("log", log, &mut spec.log, values);
    put("limits", limits, &mut spec.limits, values);
    put("env_file", env_file, &mut spec.env_file, values);
    put("sandbox", sandbox, &mut spec.sandbox, values);
    put("hooks", hooks, &mut spec.hooks, values);
    drop_empty(&mut spec);
    spec
}

/// Removes the sections that [`fold`] created and that nothing sets.
fn drop_empty(spec: &mut SpecEntry) {
    spec.identity.take_if(|identity| *identity == IdentityEntry::default());
    spec.control.take_if(|control| *control == ControlEntry::default());
    spec.monitor_policy.take_if(|monitor| *monitor == MonitorEntry::default());
}

/// `type` as a code of auto_type. A schedule implies the type.
fn fold_type(
    process_type: Option<Text>,
    schedule: Option<Text>,
    monitor: &mut MonitorEntry,
    values: &mut ValueChecker,
) {
    let word = values.word(&FieldPath::of("type"), process_type.as_ref(), PROCESS_TYPES);
    let code = word.and_then(|word| PROCESS_TYPES.iter().position(|known| *known == word));
    let is_scheduled = schedule.as_ref().is_some_and(|rule| !rule.is_empty());
    let periodic = i64::from(AutoType::Periodic);
    if is_scheduled && word.is_some_and(|word| word != PROCESS_TYPES[0]) {
        let message = format!("a process of type {} cannot have a schedule", word.unwrap_or_default());
        values.report(
            PathProblem::new(Code::ScheduleOfType, FieldPath::of("schedule"), message)
                .hint("remove `type`, or `schedule`")
                .at_key(),
        );
    }
    put("type", code.and_then(|code| i64::try_from(code).ok()), &mut monitor.auto_type, values);
    if is_scheduled && process_type.is_none() {
        monitor.auto_type.get_or_insert(periodic);
    }
    put("schedule", schedule, &mut monitor.crontab_rule, values);
}

fn put<T>(name: &'static str, short: Option<T>, long: &mut Option<T>, values: &mut ValueChecker) {
    if short.is_some() && long.is_some() {
        let path = SHORT_FIELDS.iter().find(|(short, _)| *short == name).map_or("spec", |(_, long)| long);
        let message = format!(
            "{name} and {path} are the same field, and both are set; the other is at {}",
            crate::manifest::problem::OTHER_LOCATION
        );
        let problem = PathProblem::new(Code::DuplicateKey, FieldPath::of(name), message);
        let problem = problem.hint("remove one of them").at_key();
        return values.report(problem.other(SAME_DOCUMENT, FieldPath::of(path)));
    }
    if short.is_some() {
        *long = short;
    }
}

/// Fills in what a process with `run` may leave out, after Defaults are merged: its name as proc_name, `/` as directory,
/// and a value_key of its own. pid_path and log_path stay unset: the agent chooses them.
pub fn complete(spec: &mut Spec, key: &ProcessKey, numbered: bool, uses: &mut VariableUse) {
    let identity = &mut spec.identity;
    let is_partial = identity.proc_name.is_empty() || identity.setup_path.is_empty();
    if identity.proc_name.is_empty() {
        identity.proc_name = key.name.to_string();
    }
    if identity.setup_path.is_empty() {
        DEFAULT_DIR.clone_into(&mut identity.setup_path);
    }
    if (is_partial || numbered) && identity.value_key.is_none() {
        identity.value_key = Some(match numbered {
            true => {
                uses.any = true;
                NUMBERED_KEY.to_owned()
            }
            false if uses.any => escape(&key.to_string()),
            false => key.to_string(),
        });
    }
}

/// The value_key of numbered instances.
pub const NUMBERED_KEY: &str = "${namespace}/${name}";
