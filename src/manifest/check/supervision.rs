//! Checks of the spec sections that only Abide has: health, restart, log, limits, sandbox, hooks.

use std::collections::BTreeMap;

use super::ValueChecker;
use crate::manifest::document::{
    HealthEntry, HealthValue, HookEntry, HookValue, HooksEntry, LimitsEntry, LogEntry, ProtectValue,
    RestartEntry, RestartValue, SandboxEntry, Text, TextOrNumber,
};
use crate::manifest::grammar::{self, EXIT_CODES, HEALTH_RETRIES, LOGS_KEPT, NICE, OOM_SCORE_ADJ, RETRIES};
use crate::manifest::node::shorten;
use crate::manifest::problem::{Code, FieldPath, PathProblem};
use crate::manifest::variables;
use crate::model::{
    AbsoluteLimits, Cores, HealthCheck, Hook, Hooks, LogRotation, OnHookFailure, ProtectSystem,
    RestartPolicy, RestartWhen, Sandbox, ULIMITS, Ulimit, bytes, capability_names, capability_number,
    octal_mask,
};

pub fn health(
    value: &HealthValue,
    path: &FieldPath,
    numbered: bool,
    values: &mut ValueChecker,
) -> HealthCheck {
    let short;
    let entry = match value {
        HealthValue::Check(entry) => entry,
        HealthValue::Probe(text) => {
            if begins_with_variable(text) {
                let message = format!("{path} begins with a variable, so its kind of probe is unknown");
                values.report(
                    PathProblem::new(Code::BadProbe, path.clone(), message)
                        .hint("write {http: …}, {tcp: …} or {cmd: …}"),
                );
            }
            short = from_probe(text);
            &short
        }
    };
    let HealthEntry { cmd, http, tcp, start_period, interval, timeout, retries } = entry;
    let check = HealthCheck {
        cmd: values.template(&path.key("cmd"), cmd.as_ref(), numbered),
        http: values.template(&path.key("http"), http.as_ref(), numbered),
        tcp: values.template(&path.key("tcp"), tcp.as_ref(), numbered),
        start_period: seconds(&path.key("start_period"), start_period.as_ref(), values),
        interval: at_least_one(&path.key("interval"), interval.as_ref(), values),
        timeout: at_least_one(&path.key("timeout"), timeout.as_ref(), values),
        retries: values.int(&path.key("retries"), *retries, HEALTH_RETRIES, Code::OutOfRange),
    };
    let is_set = |text: &Option<Text>| text.as_ref().is_some_and(|text| !text.is_empty());
    if [cmd, http, tcp].into_iter().filter(|text| is_set(text)).count() != 1 {
        let message = format!("{path} needs exactly one of cmd, http and tcp");
        values.report(
            PathProblem::new(Code::BadProbe, path.clone(), message)
                .hint("such as http: http://127.0.0.1:8080/healthz"),
        );
    }
    if let Some(url) = &check.http
        && !has_variable(url)
        && let Err(why) = probe_url(url)
    {
        let message = format!("{path}.http {:?} {why}", shorten(url));
        values.report(
            PathProblem::new(Code::BadProbe, path.key("http"), message)
                .hint("such as http://127.0.0.1:8080/healthz"),
        );
    }
    if let Some(address) = &check.tcp
        && !has_variable(address)
        && host_and_port(address).is_none()
    {
        let message = format!("{path}.tcp {:?} is not HOST:PORT", shorten(address));
        values.report(
            PathProblem::new(Code::BadProbe, path.key("tcp"), message).hint("such as 127.0.0.1:6379"),
        );
    }
    check
}

/// Whether a probe begins with a variable of a user, whose value decides whether it is a URL.
fn begins_with_variable(text: &str) -> bool {
    let inner = text.strip_prefix("${").unwrap_or_default();
    let name = inner.split(['}', ':']).next().unwrap_or_default();
    variables::is_identifier(name) && !variables::NAMES.contains(&name)
}

/// The long form of a probe that is written as text: by its scheme, else a command.
fn from_probe(text: &str) -> HealthEntry {
    if text.starts_with("http://") || text.starts_with("https://") {
        return HealthEntry { http: Some(text.into()), ..HealthEntry::default() };
    }
    match text.strip_prefix("tcp://") {
        Some(address) => {
            HealthEntry { tcp: Some(address.trim_end_matches('/').into()), ..HealthEntry::default() }
        }
        None => HealthEntry { cmd: Some(text.into()), ..HealthEntry::default() },
    }
}

/// Probed by the agent on its own host, so plain http only.
fn probe_url(url: &str) -> Result<(), &'static str> {
    let Some(rest) = url.strip_prefix("http://") else {
        return Err("is not an http:// URL");
    };
    if HealthCheck::has_forbidden(rest) {
        return Err("contains a space or a control character");
    }
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let with_port = match authority.rsplit_once(':') {
        Some((_, port)) if !port.ends_with(']') => authority.to_owned(),
        _ => format!("{authority}:80"),
    };
    host_and_port(&with_port).map(drop).ok_or("has no valid host and port")
}

/// Splits `HOST:PORT`; an IPv6 address is in brackets.
fn host_and_port(text: &str) -> Option<(&str, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let is_bracketed = host.starts_with('[') && host.ends_with(']');
    let is_host =
        !host.is_empty() && !host.contains(['/', '@', ' ']) && (is_bracketed || !host.contains(':'));
    port.parse().ok().filter(|port| is_host && *port > 0).map(|port| (host, port))
}

fn has_variable(text: &str) -> bool {
    text.contains("${")
}

pub fn restart(value: &RestartValue, path: &FieldPath, values: &mut ValueChecker) -> RestartPolicy {
    let (word, at, attempts, codes) = match value {
        RestartValue::Policy(word) => (Some(Text(word.clone())), path.clone(), None, [].as_slice()),
        RestartValue::Map(RestartEntry { policy, attempts, success_codes }) => {
            (policy.clone(), path.key("policy"), *attempts, success_codes.as_deref().unwrap_or_default())
        }
    };
    let word = values.word(&at, word.as_ref(), grammar::RESTART_POLICIES);
    let codes = codes.iter().enumerate().filter_map(|(nth, code)| {
        values.int(&path.key("success_codes").index(nth), Some(*code), EXIT_CODES, Code::OutOfRange)
    });
    let mut success_codes: Vec<u8> = codes.filter(|code| *code != 0).collect();
    success_codes.sort_unstable();
    success_codes.dedup();
    RestartPolicy {
        policy: word
            .and_then(|word| RestartWhen::ALL.into_iter().find(|policy| policy.word() == word))
            .unwrap_or_default(),
        attempts: values.int(&path.key("attempts"), attempts, RETRIES, Code::OutOfRange),
        success_codes,
    }
}

pub fn log(entry: &LogEntry, path: &FieldPath, values: &mut ValueChecker) -> LogRotation {
    let LogEntry { max_size, keep } = entry;
    LogRotation {
        max_size: size(&path.key("max_size"), max_size.as_ref(), MIN_LOG_SIZE, values),
        keep: values.int(&path.key("keep"), *keep, LOGS_KEPT, Code::OutOfRange),
    }
}

/// A smaller log would rotate at almost every line.
const MIN_LOG_SIZE: u64 = 4_096;

pub fn limits(entry: &LimitsEntry, path: &FieldPath, values: &mut ValueChecker) -> AbsoluteLimits {
    let LimitsEntry { memory, cpu } = entry;
    let cores = cpu.and_then(|cpu| {
        let cores = Cores::new(cpu.0);
        if cores.is_none() {
            let message =
                format!("{path}.cpu is {}; it must be a number of cores above 0, at most 10000", cpu.0);
            values.report(PathProblem::new(Code::OutOfRange, path.key("cpu"), message).hint("such as 1.5"));
        }
        cores
    });
    AbsoluteLimits { memory: size(&path.key("memory"), memory.as_ref(), 1, values), cpu: cores }
}

pub fn sandbox(entry: &SandboxEntry, path: &FieldPath, numbered: bool, values: &mut ValueChecker) -> Sandbox {
    let SandboxEntry {
        no_new_privs,
        capabilities,
        umask,
        nice,
        oom_score_adj,
        ulimits,
        private_tmp,
        read_only_paths,
        protect_system,
    } = entry;
    let paths = read_only_paths.iter().flatten().enumerate();
    Sandbox {
        no_new_privs: *no_new_privs,
        capabilities: capabilities
            .as_ref()
            .map(|names| self::capabilities(names, &path.key("capabilities"), values)),
        umask: umask.as_ref().and_then(|text| self::umask(text, &path.key("umask"), values)),
        nice: values.int(&path.key("nice"), *nice, NICE, Code::OutOfRange),
        oom_score_adj: values.int(
            &path.key("oom_score_adj"),
            *oom_score_adj,
            OOM_SCORE_ADJ,
            Code::OutOfRange,
        ),
        ulimits: ulimits
            .iter()
            .flat_map(|map| &map.0)
            .filter_map(|(name, value)| {
                Some((name.clone(), ulimit(name, value, &path.key("ulimits").entry(name), values)?))
            })
            .collect::<BTreeMap<_, _>>(),
        private_tmp: *private_tmp,
        read_only_paths: paths
            .filter_map(|(at, text)| {
                values.path(&path.key("read_only_paths").index(at), Some(text), numbered)
            })
            .collect(),
        protect_system: protect_system
            .as_ref()
            .and_then(|value| self::protect_system(value, &path.key("protect_system"), values)),
    }
}

/// Sorted names with the prefix `CAP_`.
fn capabilities(names: &[Text], path: &FieldPath, values: &mut ValueChecker) -> Vec<String> {
    let mut all: Vec<String> = Vec::with_capacity(names.len());
    for (at, name) in names.iter().enumerate() {
        let upper = name.to_ascii_uppercase();
        let upper = if upper.starts_with("CAP_") { upper } else { format!("CAP_{upper}") };
        if capability_number(&upper).is_some() {
            all.push(upper);
            continue;
        }
        let near = capability_names().find(|known| strsim::damerau_levenshtein(known, &upper) <= 2);
        let hint =
            near.map_or("such as CAP_NET_BIND_SERVICE".to_owned(), |near| format!("did you mean {near}?"));
        let message = format!("{path}[{at}] {:?} is not the name of a capability", shorten(name));
        values.report(PathProblem::new(Code::UnknownWord, path.index(at), message).hint(hint));
    }
    all.sort();
    all.dedup();
    all
}

fn umask(text: &Text, path: &FieldPath, values: &mut ValueChecker) -> Option<u32> {
    let mask = octal_mask(text);
    if mask.is_none() {
        let message = format!("{path} {:?} is not an octal mask", shorten(text));
        values.report(PathProblem::new(Code::OutOfRange, path.clone(), message).hint("such as \"0027\""));
    }
    mask
}

fn ulimit(name: &str, value: &TextOrNumber, path: &FieldPath, values: &mut ValueChecker) -> Option<Ulimit> {
    if !ULIMITS.contains(&name) {
        let message = format!("ulimit {:?} is unknown", shorten(name));
        values.report(
            PathProblem::new(Code::UnknownWord, path.clone(), message)
                .hint(format!("one of {}", ULIMITS.join(", ")))
                .at_key(),
        );
        return None;
    }
    let limit = match value {
        TextOrNumber::Number(n) => u64::try_from(*n).ok().map(Ulimit::both),
        TextOrNumber::Text(text) => Ulimit::parse(text),
    };
    if limit.is_none() {
        let message = format!("{path} {:?} is not a limit", shorten(&value.to_string()));
        let hint = "a number, infinity, or SOFT:HARD such as \"1024:65536\"";
        values.report(PathProblem::new(Code::OutOfRange, path.clone(), message).hint(hint));
    }
    limit
}

fn protect_system(
    value: &ProtectValue,
    path: &FieldPath,
    values: &mut ValueChecker,
) -> Option<ProtectSystem> {
    match value {
        ProtectValue::Switch(true) => Some(ProtectSystem::True),
        ProtectValue::Switch(false) => None,
        ProtectValue::Word(word) => {
            let word = values.word(path, Some(&Text(word.clone())), grammar::PROTECT_SYSTEM)?;
            ProtectSystem::ALL.into_iter().find(|level| level.word() == word)
        }
    }
}

pub fn hooks(entry: &HooksEntry, path: &FieldPath, numbered: bool, values: &mut ValueChecker) -> Hooks {
    let HooksEntry { before_start, before_stop, after_start } = entry;
    let [of_launch, of_stop, of_start] = Hooks::FIELDS;
    let mut hook = |name, value: &Option<HookValue>| {
        let (path, short) = (path.key(name), HookEntry::default());
        let HookEntry { run, timeout, on_failure, drift } = match value.as_ref()? {
            HookValue::Run(run) => &HookEntry { run: Some(Text(run.clone())), ..short },
            HookValue::Map(entry) => entry,
        };
        let command = values.template(&path.key("run"), run.as_ref(), numbered);
        if run.as_ref().is_none_or(|run| run.is_empty()) {
            values.report_missing(path.key("run"));
        }
        let timeout = at_least_one(&path.key("timeout"), timeout.as_ref(), values);
        match name == of_launch {
            true if drift.is_some() => report_drift(&path.key("drift"), values),
            false if timeout.is_some_and(|seconds| seconds > Hook::MAX_SECONDS) => {
                let path = path.key("timeout");
                let message = format!("{path} is longer than 1h");
                let hint = "run long work as a process with `type: job`, and depend on it";
                values.report(PathProblem::new(Code::OutOfRange, path, message).hint(hint));
            }
            true | false => {}
        }
        let on_failure = values.word(&path.key("on_failure"), on_failure.as_ref(), grammar::ON_HOOK_FAILURE);
        let on_failure = OnHookFailure::ALL.into_iter().find(|one| Some(one.word()) == on_failure);
        Some(Hook { run: command?, timeout, on_failure, drift: *drift })
    };
    Hooks {
        before_start: hook(of_launch, before_start),
        before_stop: hook(of_stop, before_stop),
        after_start: hook(of_start, after_start),
    }
}

fn report_drift(path: &FieldPath, values: &mut ValueChecker) {
    let message = format!("{path} is not supported: before_start runs before every launch");
    let hint = "remove it; drift is a field of before_stop and after_start";
    values.report(PathProblem::new(Code::UnknownField, path.clone(), message).hint(hint));
}

/// A duration in whole seconds.
pub fn seconds(path: &FieldPath, value: Option<&TextOrNumber>, values: &mut ValueChecker) -> Option<u32> {
    values.duration(path, value).and_then(|seconds| u32::try_from(seconds).ok())
}

fn at_least_one(path: &FieldPath, value: Option<&TextOrNumber>, values: &mut ValueChecker) -> Option<u32> {
    let seconds = seconds(path, value, values)?;
    if seconds == 0 {
        let message = format!("{path} is 0; it must be at least 1s");
        values.report(PathProblem::new(Code::BadDuration, path.clone(), message).hint("such as 5s"));
        return None;
    }
    Some(seconds)
}

fn size(
    path: &FieldPath,
    value: Option<&TextOrNumber>,
    least: u64,
    values: &mut ValueChecker,
) -> Option<u64> {
    let value = value?;
    let size = match value {
        TextOrNumber::Number(n) => u64::try_from(*n).ok(),
        TextOrNumber::Text(text) => bytes(text),
    };
    let size = size.filter(|size| *size >= least);
    if size.is_none() {
        let message =
            format!("{path} {:?} is not a size of at least {least} bytes", shorten(&value.to_string()));
        values.report(PathProblem::new(Code::OutOfRange, path.clone(), message).hint("such as 10MB or 1GiB"));
    }
    size
}
