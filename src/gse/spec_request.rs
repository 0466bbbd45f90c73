//! Spec of a GSE request: its sections as sent, and their conversion to the model.
//!
//! Only fields that were sent are set. An error names the field.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::request::{Loose, RequestError, loose_text};
use crate::model::{
    AbsoluteLimits, AutoType, ConfigFile, Control, EnvValue, HealthCheck, Hooks, Identity, Job, LogRotation,
    Monitor, Percent, Resource, RestartPolicy, Sandbox, Secret, Spec, StartMode, signal_number,
};

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
        #[schemars(with = "Option<Map<String, Value>>")] restart: RestartPolicy,
        #[schemars(with = "Option<Map<String, Value>>")] log: LogRotation,
        #[schemars(with = "Option<Map<String, Value>>")] limits: AbsoluteLimits,
        #[serde(deserialize_with = "loose_text")] env_file: String,
        sandbox: Map<String, Value>,
        hooks: Map<String, Value>,
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
    /// Program and arguments, run by the agent at each start.
    Exec {
        exec: Vec<String>,
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

impl SpecWire {
    pub(super) fn required_identity(&self) -> Result<Identity, RequestError> {
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
        let proc_name = required("proc_name", &identity.proc_name)?;
        let setup_path = required("setup_path", &identity.setup_path)?;
        // Without a pid file a process is known to Abide's agent alone, which starts it as its child.
        let mode = self.control.as_ref().and_then(|control| control.start_mode.as_deref());
        let pid_path = match mode == Some(StartMode::Foreground.word()) {
            true => identity.pid_path.clone().unwrap_or_default(),
            false => required("pid_path", &identity.pid_path)?,
        };
        Ok(Identity {
            proc_name,
            setup_path,
            pid_path,
            config_path: identity.config_path.clone(),
            log_path: identity.log_path.clone(),
            user: Some(required("user", &identity.user)?),
            value_key,
        })
    }

    /// The spec with only the fields that were sent. The identity is required in full.
    pub fn spec(&self) -> Result<Spec, RequestError> {
        let files = self.configmap.iter().flatten().filter(|file| file.path.is_some() || file.md5.is_some());
        Ok(Spec {
            labels: BTreeMap::new(),
            identity: self.required_identity()?,
            control: self.control.clone().unwrap_or_default().control()?,
            resource: self.resource.clone().unwrap_or_default().resource()?,
            monitor: self.monitor()?,
            report_id: self.warn_report_policy.as_ref().and_then(|warn| warn.report_id),
            configmap: files
                .map(|file| ConfigFile { path: file.path.clone(), md5: file.md5.clone() })
                .collect(),
            env: self.env.iter().flatten().map(|(name, value)| (name.clone(), value.value())).collect(),
            job: self.job.clone().unwrap_or_default().job(),
            health: self.health()?,
            restart: self.restart.clone().unwrap_or_default(),
            log: self.log()?,
            limits: self.limits.clone().unwrap_or_default(),
            env_file: self.env_file()?,
            sandbox: self.sandbox()?,
            hooks: self.hooks()?,
        })
    }

    /// The monitor policy, which has two names.
    fn monitor(&self) -> Result<Monitor, RequestError> {
        let monitor = one(
            "spec.monitor_policy",
            "spec.alive_monitor_policy",
            self.monitor_policy.clone(),
            self.alive_monitor_policy.clone(),
        )?
        .unwrap_or_default();
        let auto_type = match monitor.auto_type {
            None => AutoType::default(),
            Some(code) => AutoType::try_from(code).map_err(|why| {
                RequestError::new("spec.monitor_policy.auto_type", format!("is {code}: {why}"))
            })?,
        };
        Ok(Monitor {
            auto_type,
            start_check_secs: monitor.start_check_secs,
            stop_check_secs: monitor.stop_check_secs,
            start_retries: monitor.start_retries,
            start_interval: monitor.start_interval,
            // Misspelled in the documents' examples.
            crontab_rule: monitor.crontab_rule.or(monitor.crotab_rule),
            crontab_zone: monitor.crontab_zone,
            op_timeout: monitor.op_timeout,
        })
    }

    fn env_file(&self) -> Result<Option<String>, RequestError> {
        match self.env_file.clone() {
            Some(path) if !path.starts_with('/') => {
                Err(RequestError::new("spec.env_file", "is not an absolute path"))
            }
            path => Ok(path),
        }
    }

    fn health(&self) -> Result<HealthCheck, RequestError> {
        let health = self.health.clone().unwrap_or_default();
        let checked = health.check();
        checked.map_err(|problem| RequestError::new(format!("spec.{}", problem.field), problem.why))?;
        Ok(health)
    }

    fn log(&self) -> Result<LogRotation, RequestError> {
        match self.log.clone().unwrap_or_default() {
            log if log.keep.is_some_and(|keep| keep > LogRotation::MAX_KEPT) => {
                Err(RequestError::new("spec.log.keep", "is more than 1000"))
            }
            log => Ok(log),
        }
    }

    fn sandbox(&self) -> Result<Sandbox, RequestError> {
        let sandbox: Sandbox = known_section("spec.sandbox", self.sandbox.as_ref(), &Sandbox::FIELDS)?;
        let checked = sandbox.check();
        checked.map_err(|problem| RequestError::new(format!("spec.{}", problem.field), problem.why))?;
        Ok(sandbox)
    }

    fn hooks(&self) -> Result<Hooks, RequestError> {
        let hooks: Hooks = known_section("spec.hooks", self.hooks.as_ref(), &Hooks::FIELDS)?;
        let checked = hooks.check();
        checked.map_err(|problem| RequestError::new(format!("spec.{}", problem.field), problem.why))?;
        Ok(hooks)
    }
}

impl ControlWire {
    fn control(self) -> Result<Control, RequestError> {
        Ok(Control {
            start_cmd: self.start_cmd,
            stop_cmd: self.stop_cmd,
            restart_cmd: self.restart_cmd,
            reload_cmd: self.reload_cmd,
            kill_cmd: self.kill_cmd,
            version_cmd: self.version_cmd,
            health_cmd: self.health_cmd,
            start_mode: start_mode(self.start_mode.as_deref())?,
            stop_signal: signal("spec.control.stop_signal", self.stop_signal)?,
            stop_timeout: self.stop_timeout,
            reload_signal: signal("spec.control.reload_signal", self.reload_signal)?,
        })
    }
}

impl ResourceWire {
    fn resource(self) -> Result<Resource, RequestError> {
        let share = |field: &str, value: Option<f64>| match value.map(Percent::new) {
            Some(None) => Err(RequestError::new(
                format!("spec.resource.{field}"),
                "is not a percentage between 0 and 100",
            )),
            Some(percent) => Ok(percent),
            None => Ok(None),
        };
        Ok(Resource {
            cpu: share("cpu", self.cpu)?,
            mem: share("mem", self.mem)?,
            fd: self.fd,
            disk: self.disk,
            net: self.net,
        })
    }
}

impl JobWire {
    fn job(self) -> Job {
        Job {
            proc_owner: self.proc_owner,
            func_id: self.func_id,
            instance_id: self.instance_id,
            instance_num: self.instance_num,
            cycle_time: self.cycle_time,
            start_check_begin_time: self.start_check_begin_time,
            start_check_end_time: self.start_check_end_time,
        }
    }
}

/// A section whose every field has to be known: a restriction must not be ignored silently.
fn known_section<T: Default + DeserializeOwned>(
    field: &str,
    section: Option<&Map<String, Value>>,
    known: &[&str],
) -> Result<T, RequestError> {
    let Some(section) = section else { return Ok(T::default()) };
    if let Some(unknown) = section.keys().find(|name| !known.contains(&name.as_str())) {
        let name: String = unknown.chars().take(40).collect();
        return Err(RequestError::new(format!("{field}.{name}"), "is not supported by this version"));
    }
    T::deserialize(section).map_err(|error| RequestError::new(field, error.to_string()))
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
            EnvWire::Exec { exec } => EnvValue::Exec(exec.clone()),
            EnvWire::Digest { digest } => EnvValue::Digest(digest.clone()),
            EnvWire::Value { value, secret: true } => EnvValue::Secret(Secret::new(value.to_string())),
            EnvWire::Value { value, secret: false } | EnvWire::Plain(value) => {
                EnvValue::Text(value.to_string())
            }
        }
    }
}
