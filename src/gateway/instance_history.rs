//! Instance history: the exits that an agent reports, as the rows of the API show them.

use crate::agent_protocol::{ProcessExit, Report};
use crate::contract::ExitDetails;
use crate::model::Time;

/// The last exits of a report, newest first.
pub fn exits(report: Option<&Report>) -> Vec<ExitDetails> {
    let exits = report.map(|report| report.history.exits.as_slice()).unwrap_or_default();
    exits.iter().rev().map(exit_details).collect()
}

pub fn last_exit(report: Option<&Report>) -> Option<ExitDetails> {
    report.and_then(|report| report.history.exits.last()).map(exit_details)
}

fn exit_details(exit: &ProcessExit) -> ExitDetails {
    ExitDetails {
        time: Time(exit.at).to_string(),
        pid: exit.pid,
        code: exit.code,
        signal: exit.signal,
        reason: exit.reason.word().to_owned(),
        detail: exit.detail.clone(),
    }
}
