//! Short form: spec fields that a Process may have at its top level.

use super::ValueChecker;
use crate::manifest::document::{
    Document, HealthValue, HooksEntry, LimitsEntry, LogEntry, RestartValue, SandboxEntry, SpecEntry, Text,
    TextOrNumber,
};
use crate::manifest::problem::{Code, FieldPath, PathProblem};

/// Field at the top level, and its path in the long form.
pub const SHORT_FIELDS: [(&str, &str); 11] = [
    ("stop_signal", "spec.control.stop_signal"),
    ("stop_timeout", "spec.control.stop_timeout"),
    ("reload_signal", "spec.control.reload_signal"),
    ("zone", "spec.monitor_policy.crontab_zone"),
    ("health", "spec.health"),
    ("restart", "spec.restart"),
    ("log", "spec.log"),
    ("limits", "spec.limits"),
    ("env_file", "spec.env_file"),
    ("sandbox", "spec.sandbox"),
    ("hooks", "spec.hooks"),
];

/// The top-level spec fields of a document.
#[derive(Default)]
pub struct ShortForm {
    stop_signal: Option<Text>,
    stop_timeout: Option<TextOrNumber>,
    reload_signal: Option<Text>,
    zone: Option<Text>,
    health: Option<Box<HealthValue>>,
    restart: Option<Box<RestartValue>>,
    log: Option<Box<LogEntry>>,
    limits: Option<Box<LimitsEntry>>,
    env_file: Option<Text>,
    sandbox: Option<Box<SandboxEntry>>,
    hooks: Option<Box<HooksEntry>>,
}

impl ShortForm {
    pub fn take(document: &mut Document) -> ShortForm {
        ShortForm {
            stop_signal: document.stop_signal.take(),
            stop_timeout: document.stop_timeout.take(),
            reload_signal: document.reload_signal.take(),
            zone: document.zone.take(),
            health: document.health.take(),
            restart: document.restart.take(),
            log: document.log.take(),
            limits: document.limits.take(),
            env_file: document.env_file.take(),
            sandbox: document.sandbox.take(),
            hooks: document.hooks.take(),
        }
    }
}

/// Moves the short form into the spec. A field that is set in both is reported.
pub fn fold(mut spec: SpecEntry, short: ShortForm, values: &mut ValueChecker) -> SpecEntry {
    let control = spec.control.get_or_insert_default();
    put("stop_signal", short.stop_signal, &mut control.stop_signal, values);
    put("stop_timeout", short.stop_timeout, &mut control.stop_timeout, values);
    put("reload_signal", short.reload_signal, &mut control.reload_signal, values);
    if *control == Default::default() {
        spec.control = None;
    }
    let monitor = spec.monitor_policy.get_or_insert_default();
    put("zone", short.zone, &mut monitor.crontab_zone, values);
    if *monitor == Default::default() {
        spec.monitor_policy = None;
    }
    put("health", short.health, &mut spec.health, values);
    put("restart", short.restart, &mut spec.restart, values);
    put("log", short.log, &mut spec.log, values);
    put("limits", short.limits, &mut spec.limits, values);
    put("env_file", short.env_file, &mut spec.env_file, values);
    put("sandbox", short.sandbox, &mut spec.sandbox, values);
    put("hooks", short.hooks, &mut spec.hooks, values);
    spec
}

fn put<T>(name: &'static str, short: Option<T>, long: &mut Option<T>, values: &mut ValueChecker) {
    if short.is_some() && long.is_some() {
        let path = SHORT_FIELDS.iter().find(|(short, _)| *short == name).map_or("spec", |(_, long)| long);
        let message = format!("{name} and {path} are the same field, and both are set");
        let problem = PathProblem::new(Code::DuplicateKey, FieldPath::of(name), message);
        return values.report(problem.hint("remove one of them").at_key());
    }
    if short.is_some() {
        *long = short;
    }
}
