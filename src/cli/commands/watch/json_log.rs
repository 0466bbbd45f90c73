//! What the controller does, an object a line: the same that people are told, for programs.

use serde_json::{Value, json};

use super::console::ConsoleState;
use crate::cli::commands::plan::groups;
use crate::cli::output::print::Printer;
use crate::control::ControllerEvent;
use crate::control::source::SourceState;
use crate::execute::StepResult;
use crate::manifest::{Problem, Severity};
use crate::model::Step;

const INFO: &str = "info";
const WARNING: &str = "warning";
const ERROR: &str = "error";

pub fn log(event: &ControllerEvent<'_>, said: &mut ConsoleState, printer: &Printer) {
    let log = |level, word, more| printer.log(level, word, more);
    match event {
        ControllerEvent::Read { reading, revision } => read(reading, revision, said, printer),
        ControllerEvent::Problems { reading } => {
            problems(&reading.problems, printer);
            if reading.problems.is_empty() {
                log(INFO, "mended", json!({"message": "the manifests have no errors any more"}));
            }
        }
        ControllerEvent::RevisionNotFollowed { revision } => {
            log(INFO, "unfollowed", json!({"revision": revision}))
        }
        ControllerEvent::Source { trouble: None } => {
            said.news = true;
            log(INFO, "source", json!({"message": "the source is followed again"}));
        }
        ControllerEvent::Source { trouble: Some(trouble) } => {
            let (word, message) = (trouble.word(), trouble.to_string());
            log(ERROR, "source", json!({"reason": word, "message": message, "hint": trouble.hint()}));
        }
        ControllerEvent::Pinned { pin } => {
            said.news = true;
            log(WARNING, "pinned", json!({"revision": pin.revision, "by": pin.by, "reason": pin.reason}));
        }
        ControllerEvent::Unpinned { pin, newer } => {
            said.news = true;
            log(INFO, "unpinned", json!({"revision": pin.revision, "newer": newer}));
        }
        ControllerEvent::Waiting { holder } => {
            log(INFO, "waiting", json!({"host": holder.host, "pid": holder.pid}));
        }
        ControllerEvent::Leading { generation } => log(INFO, "leading", json!({"generation": generation})),
        ControllerEvent::Planned { result } => {
            said.trouble.clear();
            let new = said.newly_held(&result.plan);
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
        ControllerEvent::RolledBack { processes, .. } => {
            log(ERROR, "rolled_back", json!({"processes": processes}))
        }
        ControllerEvent::ExecutionFinished { ended, took } => {
            said.news = true;
            let took = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
            log(INFO, "done", json!({"steps": ended.len(), "took_ms": took}));
        }
        // Told once, not as often as it is tried.
        ControllerEvent::Failure { why } if said.trouble != *why => {
            log(ERROR, "trouble", json!({"message": why}));
            (*why).clone_into(&mut said.trouble);
        }
        ControllerEvent::Idle { settled, held } => {
            if std::mem::take(&mut said.news) {
                log(INFO, "converged", json!({"instances": settled, "held": held}));
            }
        }
        ControllerEvent::Failure { .. }
        | ControllerEvent::PassStarted
        | ControllerEvent::PassFinished { .. }
        | ControllerEvent::Tick => {}
    }
}

fn read(reading: &SourceState, revision: &str, said: &mut ConsoleState, printer: &Printer) {
    said.news = true;
    problems(&reading.problems, printer);
    let more = json!({"revision": revision, "commit": reading.commit, "instances": reading.desired.instances.len(),
                      "files": reading.files, "incomplete": reading.is_incomplete});
    printer.log(INFO, "read", more);
}

/// One each, as `validate -o json` has them.
fn problems(problems: &[Problem], printer: &Printer) {
    for problem in problems {
        let level = match problem.severity {
            Severity::Error => ERROR,
            Severity::Warning => WARNING,
        };
        printer.log(level, "problem", serde_json::to_value(problem).unwrap_or_default());
    }
}

fn step_fields(step: &Step, ended: &StepResult) -> Value {
    let why = step.why.first();
    json!({"instance": step.instance, "op": step.op.word(), "outcome": ended.outcome.word(), "code": ended.code,
           "message": ended.message, "took_ms": ended.took_ms, "why": why.map(groups::reason),
           "at": why.and_then(|why| why.at.as_ref()).map(ToString::to_string)})
}
