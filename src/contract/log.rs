//! Log: lines of `GET /api/abide/v1/logs` of the gateway.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One line of a log stream. Each field is absent where it does not apply.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct LogLine {
    /// Whole lines of the log. Bytes that are not UTF-8 are replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Continues the stream after this line, as the parameter `cursor`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
    /// The run whose stored output begins with this text: its start time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run: Option<String>,
    /// The log is complete; no line follows.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub end: bool,
    /// The stream waits, for example for an agent that is not connected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub notice: Option<String>,
    /// Reason why the log cannot be read; no line follows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The error in one word: `unknown_process`, `no_log`, `unreadable`, `busy`, `no_agent`, `old_agent`, `revoked`, `other`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}
