//! Instance history: the exits and scheduled runs that an agent reports, as the rows of the API show them.

use crate::agent_protocol::{ProcessExit, Report, ReportedProbe, ScheduledRun};
use crate::clock;
use crate::contract::{ExitDetails, ProbeDetails, RunDetails};
use crate::model::Time;

/// The last exits of a report, newest first.
pub fn exits(report: Option<&Report>) -> Vec<ExitDetails> {
    let exits = report.map(|report| report.history.exits.as_slice()).unwrap_or_default();
    exits.iter().rev().map(exit_details).collect()
}

pub fn last_exit(report: Option<&Report>) -> Option<ExitDetails> {
    report.and_then(|report| report.history.exits.last()).map(exit_details)
}

/// The last health probe; `None`: the process has none, or does not run.
pub fn last_probe(report: Option<&Report>) -> Option<ProbeDetails> {
    let ReportedProbe { at, success, output } = report?.probe.as_ref()?;
    Some(ProbeDetails { time: Time(*at).to_string(), success: *success, output: output.clone() })
}

/// The last runs of a scheduled process, newest first; `None`: it has none.
pub fn runs(report: Option<&Report>) -> Option<Vec<RunDetails>> {
    let runs = &report?.history.runs;
    let details = |run: &ScheduledRun| RunDetails {
        start: Time(run.at).to_string(),
        duration: run.duration_ms.map(|ms| ms as f64 / 1000.0),
        code: run.code,
        signal: run.signal,
        running: !run.is_ended,
        skipped: run.skipped,
        message: run.message.clone(),
    };
    (!runs.is_empty()).then(|| runs.iter().rev().map(details).collect())
}

/// The next runs that are still ahead; `None`: the process has no schedule.
pub fn next_runs(report: Option<&Report>) -> Option<Vec<String>> {
    let next = report.map(|report| &report.next_runs).filter(|next| !next.is_empty())?;
    let now = clock::now().0;
    Some(next.iter().filter(|at| **at >= now).map(|at| Time(*at).to_string()).collect())
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
