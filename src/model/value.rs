//! A spec field by field, in the one form in which specs are compared.
//!
//! Canonical means: a documented default counts as written, the order of keys and of configmap entries does
//! not count, hex digits have one case. Two specs with equal values are the same wish.

use std::collections::BTreeMap;

use super::{ConfigFile, Control, EnvValue, Field, Identity, Job, Monitor, Percent, Resource, Spec};

/// A field's value in canonical form.
#[derive(Clone, Debug, PartialEq)]
pub enum Value<'a> {
    Unset,
    Text(&'a str),
    Number(i64),
    Share(Percent),
    /// Without `abide_*`, which are ours and no wish of anybody's.
    Labels(Vec<(&'a str, &'a str)>),
    Files(Vec<(&'a str, String)>),
    Env(Env<'a>),
}

/// An environment as the process sees it: hiding a value is not changing it.
#[derive(Clone, Copy, Debug)]
pub struct Env<'a>(pub &'a BTreeMap<String, EnvValue>);

impl<'a> Env<'a> {
    /// Key, whether the value is read from a file, and the text or the file's path.
    pub fn seen(self) -> impl Iterator<Item = (&'a str, bool, &'a str)> {
        self.0.iter().map(|(key, value)| match value {
            EnvValue::Text(text) => (key.as_str(), false, text.as_str()),
            EnvValue::File(path) => (key.as_str(), true, path.as_str()),
            EnvValue::Secret(secret) => (key.as_str(), false, secret.expose()),
        })
    }
}

impl PartialEq for Env<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.seen().eq(other.seen())
    }
}

impl Spec {
    /// Every field's canonical value, in the order of [`Field::ALL`]. No `..` in here, ever.
    #[rustfmt::skip]
    pub fn values(&self) -> Vec<(Field, Value<'_>)> {
        let Spec { labels, identity, control, resource, monitor, report_id, configmap, env, job } = self;
        let Identity { proc_name, setup_path, pid_path, config_path, log_path, user, value_key } = identity;
        let Control { start_cmd, stop_cmd, restart_cmd, reload_cmd, kill_cmd, version_cmd, health_cmd, start_mode } = control;
        let Resource { cpu, mem, fd, disk, net } = resource;
        let Monitor { auto_type, start_check_secs, stop_check_secs, start_retries, start_interval, crontab_rule, op_timeout } = monitor;
        let Job { proc_owner, func_id, instance_id, instance_num, cycle_time, start_check_begin_time, start_check_end_time } = job;
        vec![
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
        ]
    }
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
    // Manifests and bodies take whole numbers up to i64::MAX; nothing larger can come in.
    value.map_or(Value::Unset, |n| Value::Number(n.try_into().unwrap_or(i64::MAX)))
}

fn share<'a>(value: &Option<Percent>) -> Value<'a> {
    value.map_or(Value::Unset, Value::Share)
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
