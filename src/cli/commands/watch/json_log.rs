//! Controller events as JSON, one object per line: the same events as on the console.

use serde_json::{Value, json};

use super::console::ConsoleState;
use crate::cli::commands::plan::groups;
use crate::cli::output::print::Printer;
use crate::contract::ManifestProblem;
use crate::control::ControllerEvent;
use crate::execute::StepResult;
use crate::manifest::{Problem, Severity};
use crate::model::{ManifestRevision, Step};
use crate::source::SourceState;

const INFO: &str = "info";
const WARNING: &str = "warning";
const ERROR: &str = "error";

pub fn log(event: &ControllerEvent<'_>, console: &mut ConsoleState, printer: &Printer) {
    let log = |level, word, more| printer.log(level, word, more);
    match event {
        ControllerEvent::Read { reading, revision } => read(reading, revision, console, printer),
        ControllerEvent::Problems { reading } => {
            problems(&reading.problems, printer);
            if reading.problems.is_empty() {
                log(INFO, "mended", json!({"message": "manifest errors resolved"}));
            }
        }
        ControllerEvent::RevisionNotFollowed { revision } => {
            log(INFO, "unfollowed", json!({"revision": revision}))
        }
        ControllerEvent::Source { trouble: None } => {
            console.has_changes = true;
            log(INFO, "source", json!({"message": "the source is followed again"}));
        }
        ControllerEvent::Source { trouble: Some(trouble) } => {
            let (word, message) = (trouble.word(), trouble.to_string());
            log(ERROR, "source", json!({"reason": word, "message": message, "hint": trouble.hint()}));
        }
        ControllerEvent::Pinned { pin } => {
            console.has_changes = true;
            log(WARNING, "pinned", json!({"revision": pin.revision, "by": pin.by, "reason": pin.reason}));
        }
        ControllerEvent::Unpinned { pin, newer } => {
            console.has_changes = true;
            log(INFO, "unpinned", json!({"revision": pin.revision, "newer": newer}));
        }
        ControllerEvent::Waiting { holder } => {
            log(INFO, "waiting", json!({"host": holder.host, "pid": holder.pid}));
        }
        ControllerEvent::Leading { generation } => log(INFO, "leading", json!({"generation": generation})),
        ControllerEvent::Planned { result } => {
            console.failure.clear();
            let new = console.newly_held(&result.plan);
            for held in new.into_iter().filter(|_| !printer.is_quiet()) {
                let (reason, message) = (held.reason.word(), &held.detail);
                log(
                    WARNING,
                    "held",
                    json!({"instance": held.instance, "reason": reason, "message": message}),
                );
            }
        }
        ControllerEvent::ExecutionStarted { steps } => log(INFO, "doing", json!({"steps": steps})),
        ControllerEvent::StepFinished { step, ended } => {
            log(if ended.outcome.is_well() { INFO } else { ERROR }, "step", step_fields(step, ended));
        }
        ControllerEvent::Soaking { process, secs } => {
            log(INFO, "soaking", json!({"process": process.to_string(), "secs": secs}));
        }
        ControllerEvent::Relaunched { instance, pid } => {
            log(INFO, "relaunched", json!({"instance": instance, "pid": pid}));
        }
        ControllerEvent::RolledBack { processes, why, .. } => {
            log(ERROR, "rolled_back", json!({"processes": processes, "why": why}))
        }
        ControllerEvent::ExecutionFinished { ended, took } => {
            console.has_changes = true;
            let took = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
            log(INFO, "done", json!({"steps": ended.len(), "took_ms": took}));
        }
        // Logged once, not at every retry.
        ControllerEvent::Failure { why } if console.failure != *why => {
            log(ERROR, "trouble", json!({"message": why}));
            (*why).clone_into(&mut console.failure);
        }
        ControllerEvent::Idle { settled, held } => {
            if std::mem::take(&mut console.has_changes) {
                log(INFO, "converged", json!({"instances": settled, "held": held}));
            }
        }
        ControllerEvent::Failure { .. }
        | ControllerEvent::PassStarted
        | ControllerEvent::PassFinished { .. }
        | ControllerEvent::Tick => {}
    }
}

fn read(reading: &SourceState, revision: &ManifestRevision, console: &mut ConsoleState, printer: &Printer) {
    console.has_changes = true;
    problems(&reading.problems, printer);
    let more = json!({"revision": revision, "commit": reading.commit, "instances": reading.desired.instances.len(),
                      "files": reading.files, "incomplete": reading.is_incomplete});
    printer.log(INFO, "read", more);
}

/// One object per problem, with the fields of `validate -o json`.
fn problems(problems: &[Problem], printer: &Printer) {
    for problem in problems {
        let level = match problem.severity {
            Severity::Error => ERROR,
            Severity::Warning => WARNING,
        };
        printer.log(
            level,
            "problem",
            serde_json::to_value(ManifestProblem::from(problem)).unwrap_or_default(),
        );
    }
}

fn step_fields(step: &Step, ended: &StepResult) -> Value {
    let why = step.why.first();
    json!({"instance": step.instance, "op": step.op.word(), "outcome": ended.outcome.word(), "code": ended.code,
           "message": ended.message, "took_ms": ended.took_ms, "why": why.map(groups::reason),
           "at": why.and_then(|why| why.at.as_ref()).map(ToString::to_string)})
}
