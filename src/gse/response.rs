//! GSE and JOB responses: an envelope, and result rows by key.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::codes::{EnvelopeCode, RowCode};

/// Envelope of every response, also of a failure: the HTTP status is 200 either way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Envelope", bound = "")]
pub struct Envelope<T> {
    pub result: bool,
    pub code: i64,
    #[serde(default)]
    pub message: String,
    /// `null` on failure.
    #[schemars(with = "Value")]
    pub data: Option<T>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// Added by JOB; always empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permission: Option<Value>,
}

impl<T> Envelope<T> {
    pub fn ok(data: T) -> Envelope<T> {
        let message = "success".to_owned();
        Envelope {
            result: true,
            code: EnvelopeCode::OK.0,
            message,
            data: Some(data),
            request_id: None,
            permission: None,
        }
    }

    /// A JOB response: an empty message for success, and JOB's additional fields.
    pub fn of_job(data: T) -> Envelope<T> {
        Envelope { message: String::new(), ..Envelope::ok(data) }.as_job()
    }

    /// JOB adds a request id, and permissions that are always null.
    pub fn as_job(self) -> Envelope<T> {
        Envelope { request_id: Some(crate::ids::request_id()), permission: Some(Value::Null), ..self }
    }

    pub fn failed(code: EnvelopeCode, message: impl Into<String>) -> Envelope<T> {
        let message = message.into();
        Envelope { result: false, code: code.0, message, data: None, request_id: None, permission: None }
    }
}

/// Result of one instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Row {
    pub error_code: i64,
    #[serde(default)]
    pub error_msg: String,
    /// Result of a status query as JSON: a text in GSE, an object in JOB. Otherwise an empty text.
    #[serde(default)]
    pub content: Value,
}

impl Row {
    pub fn new(code: RowCode, message: impl Into<String>) -> Row {
        Row { error_code: code.0, error_msg: message.into(), content: Value::String(String::new()) }
    }

    pub fn done() -> Row {
        Row::new(RowCode::DONE, "success")
    }

    pub fn code(&self) -> RowCode {
        RowCode(self.error_code)
    }
}

/// Rows by result key.
pub type Rows = BTreeMap<String, Row>;

/// Response of operate_proc.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TaskData {
    pub task_id: String,
}

/// Response of JOB's calls.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct JobTaskData {
    pub bk_gse_taskid: String,
}

/// Response of JOB's get_proc_result.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct JobResult {
    /// 0: some rows are in progress; 1: all rows are final.
    pub status: i64,
    pub result: Rows,
}

/// One process in the response of a status query.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct StatusRow {
    pub meta: StatusMeta,
    pub host: StatusHost,
    /// Expected state: 0 not registered, 1 running, 2 stopped.
    pub flag: i64,
    /// Actual state, with the same numbers.
    pub status: i64,
    /// Supervised. GSE 1.0 does not have this field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isauto: Option<bool>,
    pub message: String,
    pub pid: i64,
    pub version: String,
    /// Seconds since 1970; 0: never.
    pub register_time: i64,
    pub last_start_time: i64,
    pub report_time: i64,
    pub cpu_usage: f64,
    pub mem_usage: f64,
    pub fd: i64,
    pub disk: i64,
    pub net: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bk_agent_id: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct StatusMeta {
    pub namespace: String,
    pub name: String,
    pub labels: BTreeMap<String, Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct StatusHost {
    pub ip: String,
    pub bk_cloud_id: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bk_supplier_id: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StatusData {
    /// Total of all pages; only in paged responses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    #[serde(default)]
    pub proc_infos: Vec<StatusRow>,
}

/// A host in a response: its address or, without a known address, its agent id.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HostAddress {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ip: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bk_cloud_id: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bk_agent_id: Option<String>,
}

/// Response of get_process_group_info.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct GroupData {
    pub process_group_infos: Vec<GroupInfo>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct GroupInfo {
    pub meta: GroupMeta,
    pub host: GroupHost,
    /// As it was set.
    pub id: Value,
    pub resource: Value,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GroupHost {
    #[serde(flatten)]
    pub address: HostAddress,
    pub bk_supplier_id: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GroupMeta {
    pub namespace: String,
    pub name: String,
    pub labels: BTreeMap<String, String>,
}

/// One host in the response of list_agent_state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AgentState {
    pub bk_agent_id: String,
    /// 2: running; -1: unknown.
    pub status_code: i64,
    pub version: String,
}

/// One host in the response of get_agent_status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AgentStatus {
    #[serde(flatten)]
    pub host: HostAddress,
    /// 1: connected; 0: not connected.
    pub bk_agent_alive: u8,
    pub version: String,
}

/// Result of a live status check (operation 2), in a row's content.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LiveStatus {
    pub ip: String,
    pub utctime: String,
    /// The same in UTC, as `2026-11-18 10:00:00`.
    #[serde(skip_deserializing)]
    pub utctime2: String,
    pub timezone: i64,
    pub process: Vec<LiveProcess>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LiveProcess {
    pub procname: String,
    pub instance: Vec<LiveInstance>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct LiveInstance {
    /// -1: not running.
    pub pid: i64,
    pub is_auto: bool,
    pub process_name: String,
    pub cmdline: String,
    pub start_time: String,
    /// Seconds since the process started; the format differs between platforms.
    #[serde(skip_serializing_if = "Value::is_null")]
    pub elapsed_time: Value,
    /// Percent of the host.
    pub cpu_usage: f64,
    pub phy_mem_usage: f64,
    /// Further figures, which only people and other clients read.
    #[serde(flatten, skip_deserializing)]
    pub figures: Box<LiveFigures>,
    /// Abide extension: the process has this identity, and the agent neither launched nor adopted it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub not_owned: bool,
}

impl Default for LiveInstance {
    fn default() -> Self {
        let text = String::new;
        LiveInstance {
            pid: -1,
            is_auto: false,
            process_name: text(),
            cmdline: text(),
            start_time: text(),
            elapsed_time: Value::Null,
            cpu_usage: 0.0,
            phy_mem_usage: 0.0,
            figures: Box::default(),
            not_owned: false,
        }
    }
}

/// Figures of a live process. Platforms write some numbers as text.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LiveFigures {
    pub version: String,
    pub health: String,
    /// Percent of the host since the start.
    pub cpu_usage_ave: f64,
    /// Resident memory in KiB.
    pub use_phy_mem: u64,
    /// Virtual memory that is not resident, in KiB.
    pub free_v_mem: String,
    pub thread_count: u64,
    /// -1: unknown.
    pub disk_size: i64,
    /// State in /proc, such as `S`.
    pub stat: String,
    /// CPU time in ticks.
    pub utime: String,
    pub stime: String,
}

impl Default for LiveFigures {
    fn default() -> LiveFigures {
        let (text, zero) = (String::new, || "0".to_owned());
        LiveFigures {
            version: text(),
            health: text(),
            cpu_usage_ave: 0.0,
            use_phy_mem: 0,
            free_v_mem: zero(),
            thread_count: 0,
            disk_size: -1,
            stat: text(),
            utime: zero(),
            stime: zero(),
        }
    }
}

impl LiveStatus {
    /// Parses a row's content of GSE (a text) or JOB (an object). `None`: neither.
    pub fn read(content: &Value) -> Option<LiveStatus> {
        match content {
            Value::String(text) => serde_json::from_str(text).ok(),
            Value::Object(_) => serde_json::from_value(content.clone()).ok(),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) => None,
        }
    }
}
