//! Canonical field values: the form in which specs are compared.
//!
//! Canonical means: a documented default counts as written, the order of keys and of configmap entries does
//! not count, hex digits have one case. Two specs with equal values request the same.

use std::borrow::Cow;
use std::collections::BTreeMap;

use super::{
    ConfigFile, Control, EnvValue, Field, Identity, Job, Monitor, Percent, Resource, SectionParts, Spec,
    SpecSection, StartMode, secret_digest,
};

/// A field's value in canonical form.
#[derive(Clone, Debug, PartialEq)]
pub enum Value<'a> {
    Unset,
    Text(&'a str),
    Number(i64),
    Share(Percent),
    /// Without the `abide_*` labels, which are not part of the desired state.
    Labels(Vec<(&'a str, &'a str)>),
    Files(Vec<(&'a str, String)>),
    Env(Env<'a>),
    /// The set fields of a section that Abide adds.
    Section(SectionParts),
}

/// Origin of the value of a variable. The number is part of digests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EnvOrigin {
    Spec = 0,
    File = 1,
    Exec = 2,
}

/// An environment as the process sees it: making a value secret does not change it.
#[derive(Clone, Copy, Debug)]
pub struct Env<'a>(pub &'a BTreeMap<String, EnvValue>);

impl<'a> Env<'a> {
    /// Key, origin of the value, and the text, the file's path, the command, or a secret's digest.
    pub fn seen(self) -> impl Iterator<Item = (&'a str, EnvOrigin, Cow<'a, str>)> {
        self.0.iter().map(|(key, value)| match value {
            EnvValue::Text(text) => (key.as_str(), EnvOrigin::Spec, text.into()),
            EnvValue::File(path) => (key.as_str(), EnvOrigin::File, path.into()),
            // An argument has no NUL byte, so no two commands have the same text.
            EnvValue::Exec(argv) => (key.as_str(), EnvOrigin::Exec, argv.join("\0").into()),
            EnvValue::Secret(secret) => (key.as_str(), EnvOrigin::Spec, secret.expose().into()),
            EnvValue::Digest(digest) => (key.as_str(), EnvOrigin::Spec, digest.into()),
        })
    }
}

impl PartialEq for Env<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.0.len() == other.0.len()
            && self.seen().zip(self.0.values()).zip(other.seen().zip(other.0.values())).all(
                |((seen, value), (other_seen, other_value))| match (value, other_value) {
                    (EnvValue::Digest(digest), EnvValue::Digest(other)) => {
                        seen.0 == other_seen.0 && digest == other
                    }
                    // Only the digest of one side is known.
                    (EnvValue::Digest(digest), _) => {
                        seen.0 == other_seen.0
                            && other_seen.1 == EnvOrigin::Spec
                            && *digest == secret_digest(&other_seen.2)
                    }
                    (_, EnvValue::Digest(digest)) => {
                        seen.0 == other_seen.0
                            && seen.1 == EnvOrigin::Spec
                            && *digest == secret_digest(&seen.2)
                    }
                    (EnvValue::Text(_) | EnvValue::File(_) | EnvValue::Exec(_) | EnvValue::Secret(_), _) => {
                        seen == other_seen
                    }
                },
            )
    }
}

impl Spec {
    /// Every field's canonical value, in the order of [`Field::ALL`]. No `..` in here, ever.
    #[rustfmt::skip]
    pub fn values(&self) -> [(Field, Value<'_>); Field::COUNT] {
        let Spec { labels, identity, control, resource, monitor, report_id, configmap, env, job, health, restart, log, limits, env_file, sandbox, hooks } = self;
        let Identity { proc_name, setup_path, pid_path, config_path, log_path, user, value_key } = identity;
        let Control { start_cmd, stop_cmd, restart_cmd, reload_cmd, kill_cmd, version_cmd, health_cmd, start_mode, stop_signal, stop_timeout, reload_signal } = control;
        let Resource { cpu, mem, fd, disk, net } = resource;
        let Monitor { auto_type, start_check_secs, stop_check_secs, start_retries, start_interval, crontab_rule, crontab_zone, op_timeout } = monitor;
        let Job { proc_owner, func_id, instance_id, instance_num, cycle_time, start_check_begin_time, start_check_end_time } = job;
        [
            (Field::Labels, users(labels)),
            (Field::ProcName, Value::Text(proc_name)),
            (Field::SetupPath, Value::Text(setup_path)),
            (Field::PidPath, Value::Text(pid_path)),
            (Field::ConfigPath, text(config_path)),
            (Field::LogPath, text(log_path)),
            (Field::User, text(user)),
            (Field::ValueKey, text(value_key)),
            (Field::StartCmd, text(start_cmd)),
            (Field::StopCmd, text(stop_cmd)),
            (Field::RestartCmd, text(restart_cmd)),
            (Field::ReloadCmd, text(reload_cmd)),
            (Field::KillCmd, text(kill_cmd)),
            (Field::VersionCmd, text(version_cmd)),
            (Field::HealthCmd, text(health_cmd)),
            (Field::StartMode, Value::Text(start_mode.unwrap_or_default().word())),
            (Field::Cpu, share(cpu)),
            (Field::Mem, share(mem)),
            (Field::Fd, number(fd)),
            (Field::Disk, number(disk)),
            (Field::Net, number(net)),
            (Field::AutoType, Value::Number((*auto_type).into())),
            (Field::StartCheckSecs, Value::Number(start_check_secs.unwrap_or(Monitor::START_CHECK_SECS).into())),
            (Field::StopCheckSecs, number(stop_check_secs)),
            (Field::StartRetries, Value::Number(start_retries.unwrap_or(Monitor::START_RETRIES).into())),
            (Field::StartInterval, Value::Number(start_interval.unwrap_or(Monitor::START_INTERVAL).into())),
            (Field::CrontabRule, text(crontab_rule)),
            (Field::OpTimeout, Value::Number(op_timeout.unwrap_or(Monitor::OP_TIMEOUT).into())),
            (Field::ReportId, number(report_id)),
            (Field::Configmap, files(configmap)),
            (Field::Env, if env.is_empty() { Value::Unset } else { Value::Env(Env(env)) }),
            (Field::ProcOwner, text(proc_owner)),
            (Field::FuncId, text(func_id)),
            (Field::InstanceId, text(instance_id)),
            (Field::InstanceNum, number(instance_num)),
            (Field::CycleTime, number(cycle_time)),
            (Field::StartCheckBeginTime, number(start_check_begin_time)),
            (Field::StartCheckEndTime, number(start_check_end_time)),
            (Field::StopSignal, text(stop_signal)),
            (Field::StopTimeout, number(stop_timeout)),
            (Field::ReloadSignal, text(reload_signal)),
            (Field::CrontabZone, text(crontab_zone)),
            (Field::Health, section(health)),
            (Field::Restart, section(restart)),
            (Field::Log, section(log)),
            (Field::Limits, section(limits)),
            (Field::EnvFile, text(env_file)),
            (Field::Sandbox, section(sandbox)),
            (Field::Hooks, section(hooks)),
        ]
    }
}

impl Spec {
    /// Whether a field has a value other than its default. Equivalent to a comparison with an empty spec, but cheaper.
    pub fn is_set(&self, field: Field) -> bool {
        let Spec { labels, identity, control, resource, monitor, report_id, configmap, env, job, .. } = self;
        match field {
            Field::Labels => !labels.is_empty(),
            Field::ProcName => !identity.proc_name.is_empty(),
            Field::SetupPath => !identity.setup_path.is_empty(),
            Field::PidPath => !identity.pid_path.is_empty(),
            Field::ConfigPath => identity.config_path.is_some(),
            Field::LogPath => identity.log_path.is_some(),
            Field::User => identity.user.is_some(),
            Field::ValueKey => identity.value_key.is_some(),
            Field::StartCmd => control.start_cmd.is_some(),
            Field::StopCmd => control.stop_cmd.is_some(),
            Field::RestartCmd => control.restart_cmd.is_some(),
            Field::ReloadCmd => control.reload_cmd.is_some(),
            Field::KillCmd => control.kill_cmd.is_some(),
            Field::VersionCmd => control.version_cmd.is_some(),
            Field::HealthCmd => control.health_cmd.is_some(),
            Field::StartMode => control.start_mode.is_some_and(|mode| mode != StartMode::default()),
            Field::Cpu => resource.cpu.is_some(),
            Field::Mem => resource.mem.is_some(),
            Field::Fd => resource.fd.is_some(),
            Field::Disk => resource.disk.is_some(),
            Field::Net => resource.net.is_some(),
            Field::AutoType => true,
            Field::StartCheckSecs => is_other(monitor.start_check_secs, Monitor::START_CHECK_SECS),
            Field::StopCheckSecs => monitor.stop_check_secs.is_some(),
            Field::StartRetries => is_other(monitor.start_retries, Monitor::START_RETRIES),
            Field::StartInterval => is_other(monitor.start_interval, Monitor::START_INTERVAL),
            Field::CrontabRule => monitor.crontab_rule.is_some(),
            Field::OpTimeout => is_other(monitor.op_timeout, Monitor::OP_TIMEOUT),
            Field::ReportId => report_id.is_some(),
            Field::Configmap => !configmap.is_empty(),
            Field::Env => !env.is_empty(),
            Field::ProcOwner => job.proc_owner.is_some(),
            Field::FuncId => job.func_id.is_some(),
            Field::InstanceId => job.instance_id.is_some(),
            Field::InstanceNum => job.instance_num.is_some(),
            Field::CycleTime => job.cycle_time.is_some(),
            Field::StartCheckBeginTime => job.start_check_begin_time.is_some(),
            Field::StartCheckEndTime => job.start_check_end_time.is_some(),
            Field::StopSignal => control.stop_signal.is_some(),
            Field::StopTimeout => control.stop_timeout.is_some(),
            Field::ReloadSignal => control.reload_signal.is_some(),
            Field::CrontabZone => monitor.crontab_zone.is_some(),
            Field::Health => self.health.is_set(),
            Field::Restart => self.restart.is_set(),
            Field::Log => self.log.is_set(),
            Field::Limits => self.limits.is_set(),
            Field::EnvFile => self.env_file.is_some(),
            Field::Sandbox => self.sandbox.is_set(),
            Field::Hooks => self.hooks.is_set(),
        }
    }
}

impl Spec {
    /// Copies one field from another spec.
    pub fn take(&mut self, field: Field, from: &Spec) {
        match field {
            Field::Labels => self.labels.clone_from(&from.labels),
            Field::ProcName => self.identity.proc_name.clone_from(&from.identity.proc_name),
            Field::SetupPath => self.identity.setup_path.clone_from(&from.identity.setup_path),
            Field::PidPath => self.identity.pid_path.clone_from(&from.identity.pid_path),
            Field::ConfigPath => self.identity.config_path.clone_from(&from.identity.config_path),
            Field::LogPath => self.identity.log_path.clone_from(&from.identity.log_path),
            Field::User => self.identity.user.clone_from(&from.identity.user),
            Field::ValueKey => self.identity.value_key.clone_from(&from.identity.value_key),
            Field::StartCmd => self.control.start_cmd.clone_from(&from.control.start_cmd),
            Field::StopCmd => self.control.stop_cmd.clone_from(&from.control.stop_cmd),
            Field::RestartCmd => self.control.restart_cmd.clone_from(&from.control.restart_cmd),
            Field::ReloadCmd => self.control.reload_cmd.clone_from(&from.control.reload_cmd),
            Field::KillCmd => self.control.kill_cmd.clone_from(&from.control.kill_cmd),
            Field::VersionCmd => self.control.version_cmd.clone_from(&from.control.version_cmd),
            Field::HealthCmd => self.control.health_cmd.clone_from(&from.control.health_cmd),
            Field::StartMode => self.control.start_mode = from.control.start_mode,
            Field::Cpu => self.resource.cpu = from.resource.cpu,
            Field::Mem => self.resource.mem = from.resource.mem,
            Field::Fd => self.resource.fd = from.resource.fd,
            Field::Disk => self.resource.disk = from.resource.disk,
            Field::Net => self.resource.net = from.resource.net,
            Field::AutoType => self.monitor.auto_type = from.monitor.auto_type,
            Field::StartCheckSecs => self.monitor.start_check_secs = from.monitor.start_check_secs,
            Field::StopCheckSecs => self.monitor.stop_check_secs = from.monitor.stop_check_secs,
            Field::StartRetries => self.monitor.start_retries = from.monitor.start_retries,
            Field::StartInterval => self.monitor.start_interval = from.monitor.start_interval,
            Field::CrontabRule => self.monitor.crontab_rule.clone_from(&from.monitor.crontab_rule),
            Field::OpTimeout => self.monitor.op_timeout = from.monitor.op_timeout,
            Field::ReportId => self.report_id = from.report_id,
            Field::Configmap => self.configmap.clone_from(&from.configmap),
            Field::Env => self.env.clone_from(&from.env),
            Field::ProcOwner => self.job.proc_owner.clone_from(&from.job.proc_owner),
            Field::FuncId => self.job.func_id.clone_from(&from.job.func_id),
            Field::InstanceId => self.job.instance_id.clone_from(&from.job.instance_id),
            Field::InstanceNum => self.job.instance_num = from.job.instance_num,
            Field::CycleTime => self.job.cycle_time = from.job.cycle_time,
            Field::StartCheckBeginTime => self.job.start_check_begin_time = from.job.start_check_begin_time,
            Field::StartCheckEndTime => self.job.start_check_end_time = from.job.start_check_end_time,
            Field::StopSignal => self.control.stop_signal.clone_from(&from.control.stop_signal),
            Field::StopTimeout => self.control.stop_timeout = from.control.stop_timeout,
            Field::ReloadSignal => self.control.reload_signal.clone_from(&from.control.reload_signal),
            Field::CrontabZone => self.monitor.crontab_zone.clone_from(&from.monitor.crontab_zone),
            Field::Health => self.health.clone_from(&from.health),
            Field::Restart => self.restart.clone_from(&from.restart),
            Field::Log => self.log.clone_from(&from.log),
            Field::Limits => self.limits.clone_from(&from.limits),
            Field::EnvFile => self.env_file.clone_from(&from.env_file),
            Field::Sandbox => self.sandbox.clone_from(&from.sandbox),
            Field::Hooks => self.hooks.clone_from(&from.hooks),
        }
    }
}

fn is_other(value: Option<u32>, default: u32) -> bool {
    value.is_some_and(|value| value != default)
}

fn users(labels: &BTreeMap<String, String>) -> Value<'_> {
    let users = labels.iter().filter(|(name, _)| !name.starts_with("abide_"));
    let users: Vec<_> = users.map(|(name, value)| (name.as_str(), value.as_str())).collect();
    if users.is_empty() { Value::Unset } else { Value::Labels(users) }
}

fn text(value: &Option<String>) -> Value<'_> {
    value.as_deref().map_or(Value::Unset, Value::Text)
}

fn number<'a, N: Copy + TryInto<i64>>(value: &Option<N>) -> Value<'a> {
    // Manifests and bodies accept whole numbers up to i64::MAX only.
    value.map_or(Value::Unset, |n| Value::Number(n.try_into().unwrap_or(i64::MAX)))
}

fn share<'a>(value: &Option<Percent>) -> Value<'a> {
    value.map_or(Value::Unset, Value::Share)
}

fn section<'a>(section: &impl SpecSection) -> Value<'a> {
    if section.is_set() { Value::Section(section.parts()) } else { Value::Unset }
}

fn files(entries: &[ConfigFile]) -> Value<'_> {
    if entries.is_empty() {
        return Value::Unset;
    }
    let mut files: Vec<_> = entries
        .iter()
        .map(|file| {
            let md5 = file.md5.as_deref().unwrap_or_default().to_ascii_lowercase();
            (file.path.as_deref().unwrap_or_default(), md5)
        })
        .collect();
    files.sort();
    Value::Files(files)
}
