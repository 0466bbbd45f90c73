//! What GSE's calls answer: an envelope, and rows by key.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::codes::{EnvelopeCode, RowCode};

/// Around every answer, also around a failure: HTTP says 200 either way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Envelope<T> {
    pub result: bool,
    pub code: i64,
    #[serde(default)]
    pub message: String,
    /// `null` when the platform could not ask.
    pub data: Option<T>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// JOB adds it, and says nothing with it.
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

    /// As JOB answers: no word for success, and what it adds.
    pub fn of_job(data: T) -> Envelope<T> {
        Envelope { message: String::new(), ..Envelope::ok(data) }.as_job()
    }

    /// JOB adds a number for the request, and permissions about which nothing is said.
    pub fn as_job(self) -> Envelope<T> {
        use std::hash::{BuildHasher, RandomState};
        let request_id = format!("{:016x}", RandomState::new().hash_one(EnvelopeCode::OK));
        Envelope { request_id: Some(request_id), permission: Some(Value::Null), ..self }
    }

    pub fn failed(code: EnvelopeCode, message: impl Into<String>) -> Envelope<T> {
        let message = message.into();
        Envelope { result: false, code: code.0, message, data: None, request_id: None, permission: None }
    }
}

/// The result for one instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub error_code: i64,
    #[serde(default)]
    pub error_msg: String,
    /// Of a status query: JSON, in GSE as a text, in JOB as it is. Else an empty text.
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

/// Rows by the key that the call uses.
pub type Rows = BTreeMap<String, Row>;

/// What operate_proc answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskData {
    pub task_id: String,
}

/// What JOB's calls answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobTaskData {
    pub bk_gse_taskid: String,
}

/// What JOB's get_proc_result answers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct JobResult {
    /// 0: something is still running; 1: all rows are final.
    pub status: i64,
    pub result: Rows,
}

/// One process as a status query tells of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StatusRow {
    pub meta: StatusMeta,
    pub host: StatusHost,
    /// Expected: 0 not registered, 1 running, 2 stopped.
    pub flag: i64,
    /// Actual, in the same numbers.
    pub status: i64,
    /// Guarded. The first version has no such field.
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

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StatusMeta {
    pub namespace: String,
    pub name: String,
    pub labels: BTreeMap<String, Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StatusHost {
    pub ip: String,
    pub bk_cloud_id: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bk_supplier_id: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StatusData {
    /// Of all pages; only where there are pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    #[serde(default)]
    pub proc_infos: Vec<StatusRow>,
}

/// What a live look (operation 2) finds, inside a row's content.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LiveStatus {
    pub ip: String,
    pub utctime: String,
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
    /// -1: it does not run.
    pub pid: i64,
    pub is_auto: bool,
    pub process_name: String,
    pub cmdline: String,
    pub start_time: String,
    /// Seconds since the process started; platforms differ in its form.
    #[serde(skip_serializing_if = "Value::is_null")]
    pub elapsed_time: Value,
    pub cpu_usage: f64,
    pub phy_mem_usage: f64,
    /// Beyond GSE: it runs under this identity, and the agent neither launched nor adopted it.
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
            not_owned: false,
        }
    }
}

impl LiveStatus {
    /// From a row's content, as GSE (a text) or JOB (an object) writes it. `None`: it is neither.
    pub fn read(content: &Value) -> Option<LiveStatus> {
        match content {
            Value::String(text) => serde_json::from_str(text).ok(),
            Value::Object(_) => serde_json::from_value(content.clone()).ok(),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) => None,
        }
    }
}
