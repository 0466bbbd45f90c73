//! Instance history of an agent: restarts, last exits, scheduled runs and the last failed start.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::OwnedSpec;

/// Exits that an agent keeps per instance.
pub const MAX_EXITS: usize = 10;
/// Scheduled runs that an agent keeps per instance.
pub const MAX_RUNS: usize = 20;
/// Maximum bytes of the detail of an exit and of the message of a failed start.
const MAX_TEXT: usize = 2048;

/// Events of an instance since its registration. Bounded.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct InstanceHistory {
    /// Relaunches by supervision since the registration.
    #[serde(skip_serializing_if = "is_zero")]
    pub restarts: u64,
    /// The last exits, oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exits: Vec<ProcessExit>,
    /// The last scheduled runs, oldest first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub runs: Vec<ScheduledRun>,
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

    /// Adds a run, and drops the oldest one above [`MAX_RUNS`].
    pub fn begin_run(&mut self, at: i64) {
        let excess = (self.runs.len() + 1).saturating_sub(MAX_RUNS);
        self.runs.drain(..excess);
        self.runs.push(ScheduledRun { at, ..ScheduledRun::default() });
    }

    /// Adds a run that could not be launched.
    pub fn add_failed_run(&mut self, at: i64, message: &str) {
        self.begin_run(at);
        if let Some(run) = self.runs.last_mut() {
            (run.is_ended, run.message) = (true, message.to_owned());
            shorten(&mut run.message);
        }
    }

    /// Records the end of the run in progress. `at`: when it ended; `None`: unknown.
    pub fn end_run(&mut self, at: Option<i64>, code: Option<i32>, signal: Option<i32>) {
        if let Some(run) = self.runs.last_mut().filter(|run| !run.is_ended) {
            let duration = at.map(|at| u64::try_from(at.saturating_sub(run.at)).unwrap_or(0));
            (run.is_ended, run.duration_ms, run.code, run.signal) = (true, duration, code, signal);
        }
    }

    /// Counts a run that was due while the last one was in progress.
    pub fn skip_run(&mut self) {
        if let Some(run) = self.runs.last_mut() {
            run.skipped = run.skipped.saturating_add(1);
        }
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

/// Reason why a process ended.
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

/// A run of a scheduled process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ScheduledRun {
    /// Start of the run, in milliseconds since 1970.
    pub at: i64,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_ended: bool,
    /// `None`: in progress, or no agent saw its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// Runs that were due while this one was in progress, and did not start.
    #[serde(skip_serializing_if = "is_zero")]
    pub skipped: u64,
    /// Reason why the run could not be launched.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub message: String,
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
    fn the_last_runs_are_kept_with_their_ends() {
        let mut history = InstanceHistory::default();
        history.end_run(Some(1), Some(0), None);
        history.skip_run();
        assert!(history.is_empty(), "no run is in progress");
        for at in 0..30 {
            history.begin_run(at * 1000);
            history.skip_run();
            history.end_run(Some(at * 1000 + 250), Some(0), None);
            history.end_run(Some(at * 1000 + 999), Some(9), None);
        }
        assert_eq!((history.runs.len(), history.runs[0].at), (MAX_RUNS, 10_000));
        let last = history.runs.last().expect("a run");
        assert_eq!(
            (last.duration_ms, last.code, last.skipped),
            (Some(250), Some(0), 1),
            "the first end counts"
        );
        history.add_failed_run(40_000, "no such program");
        assert_eq!(history.runs.last().map(|run| run.message.as_str()), Some("no such program"));
    }

    #[test]
    fn a_reason_of_a_later_version_is_unknown() {
        let exit: ProcessExit =
            serde_json::from_str(r#"{"at":1,"pid":2,"reason":"eaten"}"#).expect("an exit");
        assert_eq!(exit.reason, ExitReason::Unknown);
    }
}
