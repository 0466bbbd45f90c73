//! What the controller does, an object a line: the same that people are told, for programs.

use serde_json::{Value, json};

use super::tell::Said;
use crate::cli::plan::groups;
use crate::cli::print::Printer;
use crate::control::Event;
use crate::control::source::Reading;
use crate::execute::Ended;
use crate::manifest::{Problem, Severity};
use crate::model::Step;

const INFO: &str = "info";
const WARNING: &str = "warning";
const ERROR: &str = "error";

pub fn log(event: &Event<'_>, said: &mut Said, printer: &Printer) {
    let log = |level, word, more| printer.log(level, word, more);
    match event {
        Event::Read { reading, revision } => read(reading, revision, said, printer),
        Event::Problems { reading } => {
            problems(&reading.problems, printer);
            if reading.problems.is_empty() {
                log(INFO, "mended", json!({"message": "the manifests have no errors any more"}));
            }
        }
        Event::Unfollowed { revision } => log(INFO, "unfollowed", json!({"revision": revision})),
        Event::Source { trouble: None } => {
            said.news = true;
            log(INFO, "source", json!({"message": "the source is followed again"}));
        }
        Event::Source { trouble: Some(trouble) } => {
            let (word, message) = (trouble.word(), trouble.to_string());
            log(ERROR, "source", json!({"reason": word, "message": message, "hint": trouble.hint()}));
        }
        Event::Pinned { pin } => {
            said.news = true;
            log(WARNING, "pinned", json!({"revision": pin.revision, "by": pin.by, "reason": pin.reason}));
        }
        Event::Unpinned { pin, newer } => {
            said.news = true;
            log(INFO, "unpinned", json!({"revision": pin.revision, "newer": newer}));
        }
        Event::Waiting { holder } => {
            log(INFO, "waiting", json!({"host": holder.host, "pid": holder.pid}));
        }
        Event::Leading { generation } => log(INFO, "leading", json!({"generation": generation})),
        Event::Planned { look } => {
            said.trouble.clear();
            let new = said.newly_held(&look.plan);
            for held in new.into_iter().filter(|_| !printer.is_quiet()) {
                let (reason, message) = (held.reason.word(), &held.detail);
                log(
                    WARNING,
                    "held",
                    json!({"instance": held.instance, "reason": reason, "message": message}),
                );
            }
        }
        Event::Doing { steps } => log(INFO, "doing", json!({"steps": steps})),
        Event::Ended { step, ended } => {
            log(if ended.outcome.is_well() { INFO } else { ERROR }, "step", of_step(step, ended));
        }
        Event::Soaking { process, secs } => {
            log(INFO, "soaking", json!({"process": process.to_string(), "secs": secs}));
        }
        Event::Relaunched { instance, pid } => {
            log(INFO, "relaunched", json!({"instance": instance, "pid": pid}));
        }
        Event::RolledBack { processes, .. } => log(ERROR, "rolled_back", json!({"processes": processes})),
        Event::Did { ended, took } => {
            said.news = true;
            let took = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
            log(INFO, "done", json!({"steps": ended.len(), "took_ms": took}));
        }
        // Told once, not as often as it is tried.
        Event::Trouble { why } if said.trouble != *why => {
            log(ERROR, "trouble", json!({"message": why}));
            (*why).clone_into(&mut said.trouble);
        }
        Event::Rested { settled, held } => {
            if std::mem::take(&mut said.news) {
                log(INFO, "converged", json!({"instances": settled, "held": held}));
            }
        }
        Event::Trouble { .. } | Event::Passing | Event::Passed { .. } | Event::Turned => {}
    }
}

fn read(reading: &Reading, revision: &str, said: &mut Said, printer: &Printer) {
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

fn of_step(step: &Step, ended: &Ended) -> Value {
    let why = step.why.first();
    json!({"instance": step.instance, "op": step.op.word(), "outcome": ended.outcome.word(), "code": ended.code,
           "message": ended.message, "took_ms": ended.took_ms, "why": why.map(groups::reason),
           "at": why.and_then(|why| why.at.as_ref()).map(ToString::to_string)})
}
