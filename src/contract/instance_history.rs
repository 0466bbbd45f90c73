//! Instance history: the exits and scheduled runs of a process, as rows and `describe` show them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The end of a process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ExitDetails {
    /// RFC 3339.
    pub time: String,
    pub pid: u32,
    /// `null`: killed by a signal, or unknown.
    pub code: Option<i32>,
    pub signal: Option<i32>,
    /// `ended`, `crashed`, `limit`, `stopped` or `unknown`.
    pub reason: String,
    /// The operation and its owner, the exceeded limit, or empty.
    #[serde(default)]
    pub detail: String,
}

/// A health probe.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ProbeDetails {
    /// RFC 3339.
    pub time: String,
    pub success: bool,
    /// Its output, or the reason of its failure.
    pub output: String,
}

/// A run of a scheduled process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RunDetails {
    /// RFC 3339.
    pub start: String,
    /// Seconds; `null`: in progress, or no agent saw its end.
    pub duration: Option<f64>,
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub running: bool,
    /// Runs that were due while this one was in progress, and did not start.
    pub skipped: u64,
    /// Reason why the run could not be launched, or empty.
    #[serde(default)]
    pub message: String,
}

/// `crashed: signal 9 at 2026-11-18T10:00:00Z`.
impl std::fmt::Display for ExitDetails {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.reason)?;
        match (self.signal, self.code) {
            (Some(signal), _) => write!(f, ": signal {signal}")?,
            (None, Some(code)) => write!(f, ": code {code}")?,
            (None, None) => {}
        }
        write!(f, " at {}", self.time)
    }
}
