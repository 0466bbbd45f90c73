//! Spec of a process: the union of the fields of the GSE and JOB documents, and the fields that Abide adds.
//!
//! Unset stays unset: a field the user did not write is `None` (or empty) here and is not sent anywhere.
//! `model::value` compares specs, with the documented defaults.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::sandbox::Sandbox;
use super::supervision::{AbsoluteLimits, HealthCheck, Hooks, LogRotation, RestartPolicy};

/// Omits unset fields: most fields of a spec are unset.
pub(super) fn is_unset<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Spec {
    /// User labels; the `abide_*` labels are not included.
    #[serde(skip_serializing_if = "is_unset")]
    pub labels: BTreeMap<String, String>,
    pub identity: Identity,
    #[serde(skip_serializing_if = "is_unset")]
    pub control: Control,
    #[serde(skip_serializing_if = "is_unset")]
    pub resource: Resource,
    #[serde(skip_serializing_if = "is_unset")]
    pub monitor: Monitor,
    #[serde(skip_serializing_if = "is_unset")]
    pub report_id: Option<i64>,
    #[serde(skip_serializing_if = "is_unset")]
    pub configmap: Vec<ConfigFile>,
    #[serde(skip_serializing_if = "is_unset")]
    pub env: BTreeMap<String, EnvValue>,
    #[serde(skip_serializing_if = "is_unset")]
    pub job: Job,
    #[serde(skip_serializing_if = "is_unset")]
    pub health: HealthCheck,
    #[serde(skip_serializing_if = "is_unset")]
    pub restart: RestartPolicy,
    #[serde(skip_serializing_if = "is_unset")]
    pub log: LogRotation,
    #[serde(skip_serializing_if = "is_unset")]
    pub limits: AbsoluteLimits,
    /// File of `KEY=VALUE` lines, read by the agent at each start with the rights of `user`.
    #[serde(skip_serializing_if = "is_unset")]
    pub env_file: Option<String>,
    #[serde(skip_serializing_if = "is_unset")]
    pub sandbox: Sandbox,
    #[serde(skip_serializing_if = "is_unset")]
    pub hooks: Hooks,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Identity {
    /// The executable's real name, not the user's alias (that is `meta.name`).
    pub proc_name: String,
    pub setup_path: String,
    pub pid_path: String,
    #[serde(skip_serializing_if = "is_unset")]
    pub config_path: Option<String>,
    #[serde(skip_serializing_if = "is_unset")]
    pub log_path: Option<String>,
    #[serde(skip_serializing_if = "is_unset")]
    pub user: Option<String>,
    #[serde(skip_serializing_if = "is_unset")]
    pub value_key: Option<String>,
}

impl Identity {
    /// Key by which the agent distinguishes the processes of a host: `value_key`, else setup path and program.
    /// `/opt/api` and `/opt/api/` are equal.
    pub fn index_key(&self) -> String {
        match &self.value_key {
            Some(key) => key.clone(),
            None => format!("{}/{}", self.setup_path.trim_end_matches('/'), self.proc_name),
        }
    }

    /// Whether `proc_name` is the name of an executable. A manifest that leaves it out has the name of the process there,
    /// and `NAMESPACE/NAME` of the instance as value_key.
    pub fn names_program(&self) -> bool {
        let instance = self.value_key.as_deref().and_then(|key| key.split_once('/')).map(|(_, name)| name);
        let Some(rest) = instance.and_then(|name| name.strip_prefix(&self.proc_name)) else { return true };
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        !(rest.is_empty() || rest.strip_prefix('_').is_some_and(is_number))
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Control {
    #[serde(skip_serializing_if = "is_unset")]
    pub start_cmd: Option<String>,
    #[serde(skip_serializing_if = "is_unset")]
    pub stop_cmd: Option<String>,
    #[serde(skip_serializing_if = "is_unset")]
    pub restart_cmd: Option<String>,
    #[serde(skip_serializing_if = "is_unset")]
    pub reload_cmd: Option<String>,
    #[serde(skip_serializing_if = "is_unset")]
    pub kill_cmd: Option<String>,
    #[serde(skip_serializing_if = "is_unset")]
    pub version_cmd: Option<String>,
    #[serde(skip_serializing_if = "is_unset")]
    pub health_cmd: Option<String>,
    #[serde(skip_serializing_if = "is_unset")]
    pub start_mode: Option<StartMode>,
    /// Name of the signal that stops the process, without `SIG`; used if there is no stop_cmd.
    #[serde(skip_serializing_if = "is_unset")]
    pub stop_signal: Option<String>,
    /// Seconds until a stop ends with KILL; unset: `stop_check_secs`.
    #[serde(skip_serializing_if = "is_unset")]
    pub stop_timeout: Option<u32>,
    /// Name of the signal that reloads the process; used if there is no reload_cmd.
    #[serde(skip_serializing_if = "is_unset")]
    pub reload_signal: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StartMode {
    /// start_cmd forks a process into the background and writes its pid file.
    #[default]
    Daemon,
    /// start_cmd *is* the process; the agent is its parent and writes the pid file.
    Foreground,
}

impl StartMode {
    pub fn word(self) -> &'static str {
        match self {
            StartMode::Daemon => "daemon",
            StartMode::Foreground => "foreground",
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Resource {
    #[serde(skip_serializing_if = "is_unset")]
    pub cpu: Option<Percent>,
    #[serde(skip_serializing_if = "is_unset")]
    pub mem: Option<Percent>,
    #[serde(skip_serializing_if = "is_unset")]
    pub fd: Option<u64>,
    #[serde(skip_serializing_if = "is_unset")]
    pub disk: Option<u64>,
    #[serde(skip_serializing_if = "is_unset")]
    pub net: Option<u64>,
}

/// A share of the whole host, 0 to 100. Finite, so it has an order.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Percent(f64);

impl Percent {
    pub fn new(value: f64) -> Option<Self> {
        // Adding zero turns -0.0 into 0.0, so that both are equal.
        (0.0..=100.0).contains(&value).then_some(Percent(value + 0.0))
    }

    pub fn get(self) -> f64 {
        self.0
    }
}

impl TryFrom<f64> for Percent {
    type Error = &'static str;

    fn try_from(value: f64) -> Result<Self, Self::Error> {
        Percent::new(value).ok_or("a percentage must be between 0 and 100")
    }
}

impl From<Percent> for f64 {
    fn from(value: Percent) -> f64 {
        value.0
    }
}

impl PartialEq for Percent {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Percent {}

impl PartialOrd for Percent {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Percent {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Monitor {
    pub auto_type: AutoType,
    #[serde(skip_serializing_if = "is_unset")]
    pub start_check_secs: Option<u32>,
    #[serde(skip_serializing_if = "is_unset")]
    pub stop_check_secs: Option<u32>,
    #[serde(skip_serializing_if = "is_unset")]
    pub start_retries: Option<u32>,
    #[serde(skip_serializing_if = "is_unset")]
    pub start_interval: Option<u32>,
    #[serde(skip_serializing_if = "is_unset")]
    pub crontab_rule: Option<String>,
    /// Time zone of `crontab_rule`; unset: the host's.
    #[serde(skip_serializing_if = "is_unset")]
    pub crontab_zone: Option<String>,
    #[serde(skip_serializing_if = "is_unset")]
    pub op_timeout: Option<u32>,
}

impl Monitor {
    /// Defaults of the GSE documents. An explicit default equals an unset field.
    pub const START_CHECK_SECS: u32 = 5;
    pub const START_RETRIES: u32 = 4;
    pub const START_INTERVAL: u32 = 10;
    pub const OP_TIMEOUT: u32 = 60;
    /// Default timeout of a stop. Chosen by Abide: the documents state none.
    pub const STOP_CHECK_SECS: u32 = 10;

    pub fn is_resident(&self) -> bool {
        self.auto_type == AutoType::Resident
    }
}

/// Process type: 0, 1, 2 on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "i64", into = "i64")]
pub enum AutoType {
    /// Runs by schedule.
    Periodic,
    /// Runs continuously.
    #[default]
    Resident,
    /// Runs once.
    OneShot,
}

impl TryFrom<i64> for AutoType {
    type Error = &'static str;

    fn try_from(code: i64) -> Result<Self, Self::Error> {
        match code {
            0 => Ok(AutoType::Periodic),
            1 => Ok(AutoType::Resident),
            2 => Ok(AutoType::OneShot),
            _ => Err("auto_type must be 0 (periodic), 1 (resident) or 2 (one-shot)"),
        }
    }
}

impl From<AutoType> for i64 {
    fn from(auto_type: AutoType) -> i64 {
        match auto_type {
            AutoType::Periodic => 0,
            AutoType::Resident => 1,
            AutoType::OneShot => 2,
        }
    }
}

/// A configuration file of the process, and the digest of its content. Abide does not deliver it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ConfigFile {
    #[serde(skip_serializing_if = "is_unset")]
    pub path: Option<String>,
    #[serde(skip_serializing_if = "is_unset")]
    pub md5: Option<String>,
}

/// Value of an environment variable.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EnvValue {
    Text(String),
    /// Read by the agent at each start; the content is never in a plan, a store or a log.
    File(String),
    /// Program and arguments, run by the agent as the process's user at each start; its output is the value.
    Exec(Vec<String>),
    Secret(Secret),
    /// A secret of which only the digest is known here; the gateway that reported it has the value.
    Digest(String),
}

impl PartialEq for EnvValue {
    fn eq(&self, other: &EnvValue) -> bool {
        match (self, other) {
            (EnvValue::Text(one), EnvValue::Text(other)) | (EnvValue::File(one), EnvValue::File(other)) => {
                one == other
            }
            (EnvValue::Exec(one), EnvValue::Exec(other)) => one == other,
            (EnvValue::Secret(one), EnvValue::Secret(other)) => one == other,
            (EnvValue::Digest(one), EnvValue::Digest(other)) => one == other,
            (EnvValue::Secret(secret), EnvValue::Digest(digest))
            | (EnvValue::Digest(digest), EnvValue::Secret(secret)) => secret.digest() == *digest,
            (
                EnvValue::Text(_)
                | EnvValue::File(_)
                | EnvValue::Exec(_)
                | EnvValue::Secret(_)
                | EnvValue::Digest(_),
                _,
            ) => false,
        }
    }
}

impl Eq for EnvValue {}

/// Digest of a secret, for comparisons: 32 hex digits.
pub fn secret_digest(text: &str) -> String {
    blake3::hash(text.as_bytes()).to_hex()[..32].to_owned()
}

/// Secret text: `Debug` prints a placeholder, and there is no `Display`.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    pub fn new(value: String) -> Self {
        Secret(value)
    }

    pub fn digest(&self) -> String {
        secret_digest(&self.0)
    }

    /// The plain text, for the wire, the agent and digests; never for a message.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Fields that only JOB's documents have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Job {
    /// `proc_owner` of manage_proc, `contact` of operate_process: the same person.
    #[serde(skip_serializing_if = "is_unset")]
    pub proc_owner: Option<String>,
    #[serde(skip_serializing_if = "is_unset")]
    pub func_id: Option<String>,
    #[serde(skip_serializing_if = "is_unset")]
    pub instance_id: Option<String>,
    #[serde(skip_serializing_if = "is_unset")]
    pub instance_num: Option<u32>,
    #[serde(skip_serializing_if = "is_unset")]
    pub cycle_time: Option<u32>,
    #[serde(skip_serializing_if = "is_unset")]
    pub start_check_begin_time: Option<u32>,
    #[serde(skip_serializing_if = "is_unset")]
    pub start_check_end_time: Option<u32>,
}
