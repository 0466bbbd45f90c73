//! GSE requests: tolerant parsing, with errors that name the field.
//!
//! Real callers send unknown fields, numeric labels, `hosts` or `agent_id_list`, `monitor_policy` or
//! `alive_monitor_policy`, and empty texts for unset fields. All of these are accepted. A missing or out-of-range field is
//! an error that names it.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

use crate::model::{
    AbsoluteLimits, AutoType, ConfigFile, Control, EnvValue, HealthCheck, Hooks, Host, HostKey, Identity,
    Job, LogRotation, Monitor, Percent, ProcessKey, Resource, RestartRule, Sandbox, Secret, Spec,
    SpecSection, StartMode, signal_number,
};

/// An invalid request: the field, and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestError {
    pub field: String,
    pub why: String,
}

impl RequestError {
    pub(super) fn missing(field: &str) -> RequestError {
        RequestError { field: field.to_owned(), why: "is missing".to_owned() }
    }

    pub(super) fn new(field: impl Into<String>, why: impl Into<String>) -> RequestError {
        RequestError { field: field.into(), why: why.into() }
    }
}

impl fmt::Display for RequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.field, self.why)
    }
}

impl std::error::Error for RequestError {}

/// The body of every call about processes. Each call checks the parts that it requires.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ProcRequest {
    pub meta: MetaWire,
    pub hosts: Vec<HostWire>,
    pub agent_id_list: Vec<String>,
    pub op_type: Option<i64>,
    pub spec: Option<SpecWire>,
    pub page: Option<PageWire>,
    pub task_id: Option<String>,
    /// Sent by Abide clients with a reload: the fields that take effect.
    pub takes: Option<Vec<String>>,
}

/// get_proc_operate_result.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TaskQuery {
    #[schemars(required)]
    pub task_id: Option<String>,
}

/// JOB's get_proc_result.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct JobTaskQuery {
    #[schemars(required)]
    pub bk_gse_taskid: Option<String>,
}

/// operate_proc_multi: several processes, with different operations.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
pub struct MultiRequest {
    pub proc_operate_req: Vec<ProcRequest>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "Meta")]
pub struct MetaWire {
    #[serde(deserialize_with = "loose_text")]
    pub namespace: Option<String>,
    #[serde(deserialize_with = "loose_text")]
    pub name: Option<String>,
    pub labels: Option<BTreeMap<String, Loose>>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "Host")]
pub struct HostWire {
    #[serde(deserialize_with = "loose_text")]
    pub ip: Option<String>,
    #[serde(deserialize_with = "loose_number")]
    pub bk_cloud_id: Option<u64>,
    #[serde(deserialize_with = "loose_number")]
    pub bk_supplier_id: Option<u64>,
    #[serde(deserialize_with = "loose_text")]
    pub bk_agent_id: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(default)]
#[schemars(rename = "Page")]
pub struct PageWire {
    pub start: Option<u64>,
    pub limit: Option<u64>,
}

/// Value of a label or environment variable: a text, number or boolean.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "TextOrNumber")]
pub enum Loose {
    Text(String),
    Number(serde_json::Number),
    Bool(bool),
    Nothing(()),
}

impl fmt::Display for Loose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Loose::Text(text) => f.write_str(text),
            Loose::Number(number) => write!(f, "{number}"),
            Loose::Bool(yes) => write!(f, "{yes}"),
            Loose::Nothing(()) => Ok(()),
        }
    }
}

macro_rules! wire {
    ($($(#[$meta:meta])* $name:ident { $($(#[$attr:meta])* $field:ident: $type:ty),* $(,)? })*) => {$(
        #[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
        $(#[$meta])*
        #[serde(default)]
        pub struct $name { $($(#[$attr])* pub $field: Option<$type>),* }
    )*};
}

wire! {
    #[schemars(rename = "Spec")]
    SpecWire {
        identity: IdentityWire,
        control: ControlWire,
        resource: ResourceWire,
        monitor_policy: MonitorWire,
        alive_monitor_policy: MonitorWire,
        warn_report_policy: WarnWire,
        configmap: Vec<ConfigWire>,
        env: BTreeMap<String, EnvWire>,
        job: JobWire,
        // Sections that only Abide has.
        #[schemars(with = "Option<Map<String, Value>>")] health: HealthCheck,
        #[schemars(with = "Option<Map<String, Value>>")] restart: RestartRule,
        #[schemars(with = "Option<Map<String, Value>>")] log: LogRotation,
        #[schemars(with = "Option<Map<String, Value>>")] limits: AbsoluteLimits,
        #[serde(deserialize_with = "loose_text")] env_file: String,
        #[schemars(with = "Option<Map<String, Value>>")] sandbox: Sandbox,
        #[schemars(with = "Option<Map<String, Value>>")] hooks: Hooks,
    }
    #[schemars(rename = "Identity")]
    IdentityWire {
        #[serde(deserialize_with = "loose_text")] proc_name: String,
        #[serde(deserialize_with = "loose_text")] setup_path: String,
        #[serde(deserialize_with = "loose_text")] pid_path: String,
        #[serde(deserialize_with = "loose_text")] config_path: String,
        #[serde(deserialize_with = "loose_text")] log_path: String,
        #[serde(deserialize_with = "loose_text")] user: String,
        #[serde(deserialize_with = "loose_text")] value_key: String,
        #[serde(deserialize_with = "loose_text")] index_key: String,
    }
    #[schemars(rename = "Control")]
    ControlWire {
        #[serde(deserialize_with = "loose_text")] start_cmd: String,
        #[serde(deserialize_with = "loose_text")] stop_cmd: String,
        #[serde(deserialize_with = "loose_text")] restart_cmd: String,
        #[serde(deserialize_with = "loose_text")] reload_cmd: String,
        #[serde(deserialize_with = "loose_text")] kill_cmd: String,
        #[serde(deserialize_with = "loose_text")] version_cmd: String,
        #[serde(deserialize_with = "loose_text")] health_cmd: String,
        #[serde(deserialize_with = "loose_text")] start_mode: String,
        #[serde(deserialize_with = "loose_text")] stop_signal: String,
        stop_timeout: u32,
        #[serde(deserialize_with = "loose_text")] reload_signal: String,
    }
    #[schemars(rename = "Resource")]
    ResourceWire { cpu: f64, mem: f64, fd: u64, disk: u64, net: u64 }
    #[schemars(rename = "Monitor")]
    MonitorWire {
        auto_type: i64,
        start_check_secs: u32,
        stop_check_secs: u32,
        start_retries: u32,
        start_interval: u32,
        #[serde(deserialize_with = "loose_text")] crontab_rule: String,
        #[serde(deserialize_with = "loose_text")] crotab_rule: String,
        #[serde(deserialize_with = "loose_text")] crontab_zone: String,
        op_timeout: u32,
    }
    #[schemars(rename = "WarnReport")]
    WarnWire { report_id: i64 }
    #[schemars(rename = "ConfigFile")]
    ConfigWire {
        #[serde(deserialize_with = "loose_text")] path: String,
        #[serde(deserialize_with = "loose_text")] md5: String,
    }
    #[schemars(rename = "JobFields")]
    JobWire {
        #[serde(deserialize_with = "loose_text")] proc_owner: String,
        #[serde(deserialize_with = "loose_text")] func_id: String,
        #[serde(deserialize_with = "loose_text")] instance_id: String,
        instance_num: u32,
        cycle_time: u32,
        start_check_begin_time: u32,
        start_check_end_time: u32,
    }
}

#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(untagged)]
#[schemars(rename = "EnvValue")]
pub enum EnvWire {
    File {
        file: String,
    },
    Value {
        value: Loose,
        #[serde(default)]
        secret: bool,
    },
    /// A secret that the gateway knows: only its digest is sent.
    Digest {
        digest: String,
    },
    Plain(Loose),
}

/// An empty text is unset; a number in place of a text is its digits.
fn loose_text<'de, D: Deserializer<'de>>(from: D) -> Result<Option<String>, D::Error> {
    Ok(match Value::deserialize(from)? {
        Value::String(text) if !text.is_empty() => Some(text),
        Value::Number(number) => Some(number.to_string()),
        Value::Null | Value::String(_) => None,
        other => {
            return Err(serde::de::Error::custom(format!("expected a text, found {}", kind(&other))));
        }
    })
}

/// A whole number, or a text of its digits. An empty text is unset.
pub(super) fn loose_number<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    let wrong = || serde::de::Error::custom("invalid value, expected u64");
    match Value::deserialize(from)? {
        Value::Null => Ok(None),
        Value::String(text) if text.is_empty() => Ok(None),
        Value::String(text) => text.parse().map(Some).map_err(|_| wrong()),
        Value::Number(number) => number.as_u64().map(Some).ok_or_else(wrong),
        Value::Bool(_) | Value::Array(_) | Value::Object(_) => Err(wrong()),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

impl ProcRequest {
    pub fn process(&self) -> Result<ProcessKey, RequestError> {
        let name = |field: &str, text: &Option<String>| match text {
            None => Err(RequestError::missing(field)),
            Some(text) => {
                text.parse().map_err(|error| RequestError::new(field, format!("cannot be used: {error}")))
            }
        };
        Ok(ProcessKey {
            namespace: name("meta.namespace", &self.meta.namespace)?,
            name: name("meta.name", &self.meta.name)?,
        })
    }

    /// Each host once, in request order, from `hosts` and `agent_id_list`.
    pub fn targets(&self) -> Result<Vec<Host>, RequestError> {
        let mut all: Vec<Host> = Vec::with_capacity(self.hosts.len() + self.agent_id_list.len());
        let mut seen = std::collections::HashSet::new();
        for (at, host) in self.hosts.iter().enumerate() {
            let host = host.host(&format!("hosts[{at}]"))?;
            if seen.insert(host.key.clone()) {
                all.push(host);
            }
        }
        for (at, id) in self.agent_id_list.iter().enumerate() {
            let wrong =
                |error| RequestError::new(format!("agent_id_list[{at}]"), format!("cannot be used: {error}"));
            let key = match id.parse() {
                // Callers without an agent id send the address in its place.
                Ok(key @ HostKey::Address { .. }) => key,
                Ok(HostKey::Agent(_)) | Err(_) => HostKey::Agent(id.parse().map_err(wrong)?),
            };
            let host = Host { key, supplier: None, agent_id: None };
            if seen.insert(host.key.clone()) {
                all.push(host);
            }
        }
        if all.is_empty() { Err(RequestError::missing("hosts")) } else { Ok(all) }
    }

    /// The spelling of addresses that are not in canonical form.
    pub fn written(&self) -> HashMap<HostKey, String> {
        let spelled = self.hosts.iter().filter_map(|wire| {
            let text = wire.ip.as_deref().filter(|text| text.contains(':'))?;
            let host = wire.host("").ok()?;
            match &host.key {
                HostKey::Address { ip, .. } if ip.to_string() != text => Some((host.key, text.to_owned())),
                HostKey::Address { .. } | HostKey::Agent(_) => None,
            }
        });
        spelled.collect()
    }

    /// The spec, with the labels of `meta`.
    pub fn spec(&self) -> Result<Option<Spec>, RequestError> {
        let Some(wire) = &self.spec else { return Ok(None) };
        let mut spec = wire.spec()?;
        let labels = self.meta.labels.iter().flatten();
        spec.labels = labels.map(|(name, value)| (name.clone(), value.to_string())).collect();
        Ok(Some(spec))
    }
}

impl HostWire {
    fn host(&self, field: &str) -> Result<Host, RequestError> {
        let agent_id = match &self.bk_agent_id {
            None => None,
            Some(id) => Some(id.parse().map_err(|error| {
                RequestError::new(format!("{field}.bk_agent_id"), format!("cannot be used: {error}"))
            })?),
        };
        let Some(ip) = &self.ip else {
            let id = agent_id.ok_or_else(|| RequestError::missing(&format!("{field}.ip")))?;
            return Ok(Host { key: HostKey::Agent(id), supplier: self.bk_supplier_id, agent_id: None });
        };
        let ip = ip.parse().map_err(|_| RequestError::new(format!("{field}.ip"), "is not an IP address"))?;
        let cloud = self.bk_cloud_id.ok_or_else(|| RequestError::missing(&format!("{field}.bk_cloud_id")))?;
        Ok(Host { key: HostKey::Address { cloud, ip }, supplier: self.bk_supplier_id, agent_id })
    }
}

impl SpecWire {
    fn required_identity(&self) -> Result<Identity, RequestError> {
        let identity = self.identity.as_ref().ok_or_else(|| RequestError::missing("spec.identity"))?;
        let required = |field: &str, text: &Option<String>| {
            text.clone().ok_or_else(|| RequestError::missing(&format!("spec.identity.{field}")))
        };
        let value_key = one(
            "spec.identity.value_key",
            "spec.identity.index_key",
            identity.value_key.clone(),
            identity.index_key.clone(),
        )?;
        Ok(Identity {
            proc_name: required("proc_name", &identity.proc_name)?,
            setup_path: required("setup_path", &identity.setup_path)?,
            pid_path: required("pid_path", &identity.pid_path)?,
            config_path: identity.config_path.clone(),
            log_path: identity.log_path.clone(),
            user: Some(required("user", &identity.user)?),
            value_key,
        })
    }

    /// The spec with only the fields that were sent. The identity is required in full.
    pub fn spec(&self) -> Result<Spec, RequestError> {
        let share = |field: &str, value: Option<f64>| match value.map(Percent::new) {
            Some(None) => Err(RequestError::new(
                format!("spec.resource.{field}"),
                "is not a percentage between 0 and 100",
            )),
            Some(percent) => Ok(percent),
            None => Ok(None),
        };
        let control = self.control.clone().unwrap_or_default();
        let resource = self.resource.clone().unwrap_or_default();
        let monitor = one(
            "spec.monitor_policy",
            "spec.alive_monitor_policy",
            self.monitor_policy.clone(),
            self.alive_monitor_policy.clone(),
        )?
        .unwrap_or_default();
        // Misspelled in the documents' examples.
        let crontab_rule = monitor.crontab_rule.or(monitor.crotab_rule);
        let job = self.job.clone().unwrap_or_default();
        let auto_type = match monitor.auto_type {
            None => AutoType::default(),
            Some(code) => AutoType::try_from(code).map_err(|why| {
                RequestError::new("spec.monitor_policy.auto_type", format!("is {code}: {why}"))
            })?,
        };
        let start_mode = start_mode(control.start_mode.as_deref())?;
        let files = self.configmap.iter().flatten().filter(|file| file.path.is_some() || file.md5.is_some());
        self.refuse_reserved()?;
        Ok(Spec {
            labels: BTreeMap::new(),
            identity: self.required_identity()?,
            control: Control {
                start_cmd: control.start_cmd,
                stop_cmd: control.stop_cmd,
                restart_cmd: control.restart_cmd,
                reload_cmd: control.reload_cmd,
                kill_cmd: control.kill_cmd,
                version_cmd: control.version_cmd,
                health_cmd: control.health_cmd,
                start_mode,
                stop_signal: signal("spec.control.stop_signal", control.stop_signal)?,
                stop_timeout: control.stop_timeout,
                reload_signal: signal("spec.control.reload_signal", control.reload_signal)?,
            },
            resource: Resource {
                cpu: share("cpu", resource.cpu)?,
                mem: share("mem", resource.mem)?,
                fd: resource.fd,
                disk: resource.disk,
                net: resource.net,
            },
            monitor: Monitor {
                auto_type,
                start_check_secs: monitor.start_check_secs,
                stop_check_secs: monitor.stop_check_secs,
                start_retries: monitor.start_retries,
                start_interval: monitor.start_interval,
                crontab_rule,
                crontab_zone: monitor.crontab_zone,
                op_timeout: monitor.op_timeout,
            },
            report_id: self.warn_report_policy.as_ref().and_then(|warn| warn.report_id),
            configmap: files
                .map(|file| ConfigFile { path: file.path.clone(), md5: file.md5.clone() })
                .collect(),
            env: self.env.iter().flatten().map(|(name, value)| (name.clone(), value.value())).collect(),
            job: Job {
                proc_owner: job.proc_owner,
                func_id: job.func_id,
                instance_id: job.instance_id,
                instance_num: job.instance_num,
                cycle_time: job.cycle_time,
                start_check_begin_time: job.start_check_begin_time,
                start_check_end_time: job.start_check_end_time,
            },
            health: self.health.clone().unwrap_or_default(),
            restart: self.restart.clone().unwrap_or_default(),
            log: self.log.clone().unwrap_or_default(),
            limits: self.limits.clone().unwrap_or_default(),
            env_file: self.env_file.clone(),
            sandbox: self.sandbox.clone().unwrap_or_default(),
            hooks: self.hooks.clone().unwrap_or_default(),
        })
    }
}

impl SpecWire {
    /// Refuses fields that the agent does not act on: a restriction must not be ignored silently.
    fn refuse_reserved(&self) -> Result<(), RequestError> {
        let reserved = [
            ("spec.log", self.log.as_ref().is_some_and(SpecSection::is_set)),
            ("spec.limits", self.limits.as_ref().is_some_and(SpecSection::is_set)),
            ("spec.env_file", self.env_file.is_some()),
            ("spec.sandbox", self.sandbox.as_ref().is_some_and(SpecSection::is_set)),
            ("spec.hooks", self.hooks.as_ref().is_some_and(SpecSection::is_set)),
        ];
        match reserved.into_iter().find(|(_, is_set)| *is_set) {
            Some((field, _)) => Err(RequestError::new(field, "is not supported by this version")),
            None => Ok(()),
        }
    }
}

/// A signal that a spec may name.
fn signal(field: &str, name: Option<String>) -> Result<Option<String>, RequestError> {
    match name {
        Some(name) if signal_number(&name).is_none() => {
            Err(RequestError::new(field, "is not the name of a signal, such as TERM"))
        }
        name => Ok(name),
    }
}

fn start_mode(word: Option<&str>) -> Result<Option<StartMode>, RequestError> {
    match word {
        None => Ok(None),
        Some("daemon") => Ok(Some(StartMode::Daemon)),
        Some("foreground") => Ok(Some(StartMode::Foreground)),
        Some(_) => Err(RequestError::new("spec.control.start_mode", "is neither daemon nor foreground")),
    }
}

/// A field with two names: set under one of them, or equal under both.
fn one<T: PartialEq>(
    field: &str,
    other: &str,
    first: Option<T>,
    second: Option<T>,
) -> Result<Option<T>, RequestError> {
    match (first, second) {
        (Some(first), Some(second)) if first != second => {
            Err(RequestError::new(field, format!("and {other} have different values")))
        }
        (first, second) => Ok(first.or(second)),
    }
}

impl EnvWire {
    fn value(&self) -> EnvValue {
        match self {
            EnvWire::File { file } => EnvValue::File(file.clone()),
            EnvWire::Digest { digest } => EnvValue::Digest(digest.clone()),
            EnvWire::Value { value, secret: true } => EnvValue::Secret(Secret::new(value.to_string())),
            EnvWire::Value { value, secret: false } | EnvWire::Plain(value) => {
                EnvValue::Text(value.to_string())
            }
        }
    }
}
