//! Event: the event stream and the status of the controller.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::required;
use crate::model::{InstanceKey, Op, StepOutcome};

/// One event of the controller.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct EventEntry {
    /// Increases by one with each event.
    pub id: u64,
    pub time: String,
    pub kind: EventKind,
    pub level: EventLevel,
    /// One line.
    pub title: String,
    /// Further lines.
    pub text: String,
    #[serde(flatten)]
    pub details: EventDetails,
    /// Command lines and environment values are hidden: the reader showed no token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redacted: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EventLevel {
    Info,
    Warning,
    Error,
}

impl EventLevel {
    pub fn word(self) -> &'static str {
        match self {
            EventLevel::Info => "info",
            EventLevel::Warning => "warning",
            EventLevel::Error => "error",
        }
    }
}

/// The words are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    Read,
    Source,
    Problems,
    #[serde(rename = "mended")]
    ProblemsFixed,
    Waiting,
    Leading,
    Changed,
    Held,
    NotConverging,
    #[serde(rename = "doing")]
    ExecutionStarted,
    Step,
    Soaking,
    Relaunched,
    RolledBack,
    #[serde(rename = "done")]
    ExecutionFinished,
    #[serde(rename = "trouble")]
    Failure,
    Recovered,
    Converged,
    /// A request through the listener.
    #[serde(rename = "asked")]
    Requested,
}

impl EventKind {
    pub fn word(self) -> &'static str {
        match self {
            EventKind::Read => "read",
            EventKind::Source => "source",
            EventKind::Problems => "problems",
            EventKind::ProblemsFixed => "mended",
            EventKind::Waiting => "waiting",
            EventKind::Leading => "leading",
            EventKind::Changed => "changed",
            EventKind::Held => "held",
            EventKind::NotConverging => "not_converging",
            EventKind::ExecutionStarted => "doing",
            EventKind::Step => "step",
            EventKind::Soaking => "soaking",
            EventKind::Relaunched => "relaunched",
            EventKind::RolledBack => "rolled_back",
            EventKind::ExecutionFinished => "done",
            EventKind::Failure => "trouble",
            EventKind::Recovered => "recovered",
            EventKind::Converged => "converged",
            EventKind::Requested => "asked",
        }
    }
}

/// The fields of an event beyond its text. A reader takes the first variant whose fields are all present.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum EventDetails {
    Step {
        instance: InstanceKey,
        op: Op,
        outcome: StepOutcome,
        code: i64,
        message: String,
        took_ms: u64,
        /// `file:line:column`
        #[serde(deserialize_with = "required")]
        at: Option<String>,
    },
    Read {
        revision: String,
        #[serde(deserialize_with = "required")]
        commit: Option<String>,
        instances: usize,
        files: usize,
        errors: usize,
    },
    ExecutionFinished {
        steps: usize,
        took_ms: u64,
        /// Successful steps per operation.
        summary: BTreeMap<String, usize>,
        failed: usize,
    },
    Pinned {
        pinned: String,
        by: String,
        #[serde(deserialize_with = "required")]
        reason: Option<String>,
    },
    Unpinned {
        /// Always `null`.
        #[serde(deserialize_with = "required")]
        pinned: Option<String>,
    },
    NotFollowed {
        #[serde(deserialize_with = "required")]
        unfollowed: Option<String>,
    },
    /// The word of the error; `null`: the source is followed again.
    SourceError {
        #[serde(deserialize_with = "required")]
        trouble: Option<String>,
    },
    Waiting {
        host: String,
        pid: u32,
    },
    Leading {
        generation: u64,
    },
    ExecutionStarted {
        steps: usize,
    },
    Soaking {
        process: String,
        secs: u64,
    },
    Relaunched {
        instance: InstanceKey,
        pid: u32,
    },
    RolledBack {
        processes: String,
        /// The first failed instance of each, with the output of its probe or command.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        why: String,
    },
    Converged {
        settled: usize,
        held: usize,
    },
    Held {
        held: usize,
    },
    Problems {
        errors: usize,
    },
    NotConverging {
        instances: Vec<String>,
    },
    Changed {
        instances: usize,
    },
    Nothing {},
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_flat_object_and_reads_back() {
        let all = [
            EventDetails::Unpinned { pinned: None },
            EventDetails::SourceError { trouble: None },
            EventDetails::NotFollowed { unfollowed: Some("1".to_owned()) },
            EventDetails::Converged { settled: 2, held: 1 },
            EventDetails::Held { held: 1 },
            EventDetails::Changed { instances: 3 },
            EventDetails::NotConverging { instances: vec!["x".to_owned()] },
            EventDetails::Nothing {},
        ];
        for details in all {
            let event = EventEntry {
                id: 7,
                time: "2026-11-16T08:00:00Z".to_owned(),
                kind: EventKind::ProblemsFixed,
                level: EventLevel::Info,
                title: "t".to_owned(),
                text: String::new(),
                details,
                redacted: Some(true),
            };
            let text = serde_json::to_string(&event).expect("JSON");
            assert!(text.starts_with(r#"{"id":7,"time":"2026-11-16T08:00:00Z","kind":"mended","level":"info","title":"t","text":"""#));
            assert!(text.ends_with(r#""redacted":true}"#), "{text}");
            assert_eq!(serde_json::from_str::<EventEntry>(&text).expect("an event"), event);
        }
    }
}
