//! Document form of the spec sections that only Abide has.

use crate::manifest::document::{
    HealthEntry, HealthValue, HookEntry, HookValue, HooksEntry, LimitsEntry, LogEntry, Map, ProtectValue,
    Real, RestartEntry, RestartValue, SandboxEntry, Text, TextOrNumber,
};
use crate::manifest::variables::escape;
use crate::model::{
    AbsoluteLimits, HealthCheck, Hook, Hooks, LogRotation, ProtectSystem, RestartPolicy, Sandbox,
    SpecSection, Ulimit,
};

fn template(text: &Option<String>) -> Option<Text> {
    text.as_deref().map(|text| Text(escape(text)))
}

fn number(n: Option<u32>) -> Option<i64> {
    n.map(i64::from)
}

fn seconds(n: Option<u32>) -> Option<TextOrNumber> {
    n.map(|seconds| TextOrNumber::Text(format!("{seconds}s")))
}

fn size(bytes: Option<u64>) -> Option<TextOrNumber> {
    bytes.and_then(|bytes| i64::try_from(bytes).ok()).map(TextOrNumber::Number)
}

pub fn health(health: &HealthCheck) -> Option<HealthValue> {
    let HealthCheck { cmd, http, tcp, start_period, interval, timeout, retries } = health;
    let entry = HealthEntry {
        cmd: template(cmd),
        http: template(http),
        tcp: template(tcp),
        start_period: seconds(*start_period),
        interval: seconds(*interval),
        timeout: seconds(*timeout),
        retries: number(*retries),
    };
    health.is_set().then_some(HealthValue::Check(entry))
}

pub fn restart(restart: &RestartPolicy) -> Option<RestartValue> {
    let RestartPolicy { policy, attempts, success_codes } = restart;
    let codes: Vec<i64> = success_codes.iter().copied().map(i64::from).collect();
    restart.is_set().then(|| match (attempts, codes.is_empty()) {
        (None, true) => RestartValue::Policy(policy.word().to_owned()),
        _ => RestartValue::Map(RestartEntry {
            policy: Some(policy.word().into()),
            attempts: number(*attempts),
            success_codes: (!codes.is_empty()).then_some(codes),
        }),
    })
}

pub fn log(log: &LogRotation) -> LogEntry {
    let LogRotation { max_size, keep } = log;
    LogEntry { max_size: size(*max_size), keep: number(*keep) }
}

pub fn limits(limits: &AbsoluteLimits) -> LimitsEntry {
    let AbsoluteLimits { memory, cpu } = limits;
    LimitsEntry { memory: size(*memory), cpu: cpu.map(|cores| Real(cores.get())) }
}

pub fn sandbox(sandbox: &Sandbox) -> SandboxEntry {
    let Sandbox {
        no_new_privs,
        capabilities,
        umask,
        nice,
        oom_score_adj,
        ulimits,
        private_tmp,
        read_only_paths,
        protect_system,
    } = sandbox;
    let limit = |limit: &Ulimit| {
        let text = || TextOrNumber::Text(limit.to_string());
        let number = i64::try_from(limit.soft).ok().filter(|_| limit.soft == limit.hard);
        number.map_or_else(text, TextOrNumber::Number)
    };
    let ulimits: std::collections::BTreeMap<String, TextOrNumber> =
        ulimits.iter().map(|(name, value)| (name.clone(), limit(value))).collect();
    let paths: Vec<Text> = read_only_paths.iter().map(|path| Text(escape(path))).collect();
    SandboxEntry {
        no_new_privs: *no_new_privs,
        capabilities: capabilities
            .as_ref()
            .map(|names| names.iter().map(|name| name.as_str().into()).collect()),
        umask: umask.map(|mask| Text(format!("{mask:04o}"))),
        nice: nice.map(i64::from),
        oom_score_adj: oom_score_adj.map(i64::from),
        ulimits: (!ulimits.is_empty()).then_some(Map(ulimits)),
        private_tmp: *private_tmp,
        read_only_paths: (!paths.is_empty()).then_some(paths),
        protect_system: protect_system.map(|level| match level {
            ProtectSystem::True => ProtectValue::Switch(true),
            ProtectSystem::Full | ProtectSystem::Strict => ProtectValue::Word(level.word().to_owned()),
        }),
    }
}

pub fn hooks(hooks: &Hooks) -> HooksEntry {
    let hook = |hook: &Option<Hook>| {
        let Hook { run, timeout, on_failure, drift } = hook.as_ref()?;
        let run = escape(run);
        Some(match timeout.is_none() && on_failure.is_none() && drift.is_none() {
            true => HookValue::Run(run),
            false => HookValue::Map(HookEntry {
                run: Some(Text(run)),
                timeout: seconds(*timeout),
                on_failure: on_failure.map(|one| one.word().into()),
                drift: *drift,
            }),
        })
    };
    let Hooks { before_start, before_stop, after_start } = hooks;
    HooksEntry {
        before_start: hook(before_start),
        before_stop: hook(before_stop),
        after_start: hook(after_start),
    }
}
