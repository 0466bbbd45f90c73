//! Instance history: restarts, the last exits and the last failed start, as an agent stores and reports them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::OwnedSpec;

/// Exits that an agent keeps per instance.
pub const MAX_EXITS: usize = 10;
/// Maximum bytes of the detail of an exit and of the message of a failed start.
const MAX_TEXT: usize = 2048;

/// What happened to an instance since its registration. Bounded.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct InstanceHistory {
    /// Relaunches by supervision since the registration.
    #[serde(skip_serializing_if = "is_zero")]
    pub restarts: u64,
    /// The last exits, oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exits: Vec<ProcessExit>,
    /// The last start or restart that failed, while no later one succeeded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed_start: Option<Box<FailedStart>>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl InstanceHistory {
    pub fn is_empty(&self) -> bool {
        *self == InstanceHistory::default()
    }

    /// Adds an exit, and drops the oldest one above [`MAX_EXITS`].
    pub fn add_exit(&mut self, mut exit: ProcessExit) {
        shorten(&mut exit.detail);
        let excess = (self.exits.len() + 1).saturating_sub(MAX_EXITS);
        self.exits.drain(..excess);
        self.exits.push(exit);
    }

    pub fn set_failed_start(&mut self, mut failed: FailedStart) {
        shorten(&mut failed.message);
        self.failed_start = Some(Box::new(failed));
    }
}

fn shorten(text: &mut String) {
    text.truncate(text.floor_char_boundary(MAX_TEXT));
}

/// The end of a process of the instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ProcessExit {
    /// Milliseconds since 1970.
    pub at: i64,
    pub pid: u32,
    /// `None`: killed by a signal, or unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    pub reason: ExitReason,
    /// Details of the reason, such as the operation and its owner, or the exceeded limit.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub detail: String,
}

/// Why a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExitReason {
    /// The process ended by itself, with a success code of its restart policy.
    Ended,
    /// The process ended by itself, with another code or by a signal.
    Crashed,
    /// The agent stopped the process: it exceeded a limit.
    Limit,
    /// An operation stopped the process.
    Stopped,
    /// The process ended while no agent observed it.
    #[serde(other)]
    Unknown,
}

impl ExitReason {
    pub fn word(self) -> &'static str {
        match self {
            ExitReason::Ended => "ended",
            ExitReason::Crashed => "crashed",
            ExitReason::Limit => "limit",
            ExitReason::Stopped => "stopped",
            ExitReason::Unknown => "unknown",
        }
    }
}

/// A start or restart that failed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FailedStart {
    /// Milliseconds since 1970.
    pub at: i64,
    /// The message of the result, with the last lines of the output.
    pub message: String,
    /// The spec of the attempt.
    pub spec: OwnedSpec,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_exits_are_kept_and_texts_are_bounded() {
        let mut history = InstanceHistory::default();
        assert!(history.is_empty());
        for pid in 0..25 {
            let (reason, detail) = (ExitReason::Crashed, "ä".repeat(2000));
            history.add_exit(ProcessExit { at: 1, pid, code: Some(1), signal: None, reason, detail });
        }
        let pids: Vec<u32> = history.exits.iter().map(|exit| exit.pid).collect();
        assert_eq!(pids, (15..25).collect::<Vec<_>>());
        assert!(history.exits.iter().all(|exit| exit.detail.len() <= MAX_TEXT));
    }

    #[test]
    fn a_reason_of_a_later_version_is_unknown() {
        let exit: ProcessExit =
            serde_json::from_str(r#"{"at":1,"pid":2,"reason":"eaten"}"#).expect("an exit");
        assert_eq!(exit.reason, ExitReason::Unknown);
    }
}
