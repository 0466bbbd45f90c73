//! What the controller does, line by line on stderr, for whoever watches: things are told when they change, not at every look.

use std::collections::BTreeSet;

use tracing::info;

use super::json_log;
use crate::cli::commands::plan::groups;
use crate::cli::commands::rollback;
use crate::cli::commands::watch::source::short_id;
use crate::cli::output::print::{self, BOLD, DIM, ERROR, HINT, Printer, WARNING, count, visible};
use crate::control::ControllerEvent;
use crate::manifest::Severity;
use crate::model::{HeldChange, HoldReason, InstanceKey, Plan};

/// What was said last.
#[derive(Default)]
pub struct ConsoleState {
    /// What is left alone, and why: when the words for it change, that is no news.
    pub(super) held: BTreeSet<(InstanceKey, HoldReason)>,
    /// Somebody else led.
    pub(super) waited: bool,
    /// Something happened since everything was as wanted.
    pub(super) news: bool,
    /// Why nothing could be done, as long as that is so.
    pub(super) trouble: String,
}

impl ConsoleState {
    /// What is left alone and was not, or for another reason. What is under way is told as it ends.
    pub(super) fn newly_held<'p>(&mut self, plan: &'p Plan) -> Vec<&'p HeldChange> {
        let is_told = |held: &&HeldChange| held.reason != HoldReason::UnderWay;
        let of = |held: &HeldChange| (held.instance.clone(), held.reason);
        let new = plan.held.iter().filter(is_told).filter(|held| !self.held.contains(&of(held))).collect();
        self.held = plan.held.iter().filter(is_told).map(of).collect();
        new
    }
}

pub fn print_event(event: &ControllerEvent<'_>, said: &mut ConsoleState, printer: &Printer) {
    if printer.is_quiet() && !is_shown_when_quiet(event) {
        return;
    }
    if printer.is_json() {
        return json_log::log(event, said, printer);
    }
    match event {
        ControllerEvent::Read { reading, revision } => {
            let errors =
                reading.problems.iter().filter(|problem| problem.severity == Severity::Error).count();
            printer.to_stderr(
                &reading.problems.iter().map(|problem| print::problem(problem) + "\n").collect::<String>(),
            );
            let short_revision = short_id(revision);
            let kept = if reading.is_incomplete { "; what is broken stays as it last was" } else { "" };
            let errors =
                if errors > 0 { format!(", {}{kept}", count(errors, "error")) } else { kept.to_owned() };
            let commit = reading.commit.as_deref().unwrap_or_default();
            info!(%revision, files = reading.files, commit, "read");
            let at =
                if commit.is_empty() { String::new() } else { format!(" at commit {}", short_id(commit)) };
            said.news = true;
            printer.to_stderr(&format!(
                "{BOLD}read{BOLD:#} {} wanted {DIM}{short_revision}{DIM:#}{at}{errors}\n",
                count(reading.desired.instances.len(), "instance")
            ));
        }
        ControllerEvent::Problems { reading } => {
            printer.to_stderr(
                &reading.problems.iter().map(|problem| print::problem(problem) + "\n").collect::<String>(),
            );
            if reading.problems.is_empty() {
                printer.to_stderr("the manifests have no errors any more\n");
            }
        }
        ControllerEvent::RevisionNotFollowed { revision: None } => {
            printer.to_stderr("the manifests are what is in force\n")
        }
        ControllerEvent::RevisionNotFollowed { revision: Some(revision) } => {
            info!(%revision, "not followed");
            let revision = short_id(revision);
            printer.to_stderr(&format!(
                "{BOLD}not followed{BOLD:#}: the manifests are revision {revision} by now, and --follow is no\n"
            ));
        }
        ControllerEvent::Source { trouble: None } => {
            said.news = true;
            printer.to_stderr(&format!("{BOLD}source{BOLD:#}: it is followed again\n"));
        }
        ControllerEvent::Source { trouble: Some(trouble) } => {
            let word = trouble.word();
            info!(%trouble, word, "the source is not followed");
            let hint = trouble.hint().map(|hint| format!("{HINT}hint{HINT:#}: {hint}\n")).unwrap_or_default();
            printer.to_stderr(&format!(
                "{ERROR}source{ERROR:#}: {word}: {}; what was last taken, if anything, stays\n{hint}",
                visible(&trouble.to_string())
            ));
        }
        ControllerEvent::Pinned { pin } => {
            said.news = true;
            printer.to_stderr(&format!("{WARNING}pinned{WARNING:#} to {}\n", rollback::describe_pin(pin)));
        }
        ControllerEvent::Unpinned { pin, newer } => {
            said.news = true;
            let why = if *newer { ": the source has something newer" } else { "" };
            printer
                .to_stderr(&format!("{BOLD}no longer pinned{BOLD:#} to {}{why}\n", short_id(&pin.revision)));
        }
        ControllerEvent::Waiting { holder } => {
            said.waited = true;
            printer.to_stderr(&format!(
                "{WARNING}waiting{WARNING:#}: {} (process {}) leads\n",
                visible(&holder.host),
                holder.pid
            ));
        }
        ControllerEvent::Leading { generation } => {
            info!(generation, "leading");
            if std::mem::take(&mut said.waited) {
                printer.to_stderr(&format!("{BOLD}leading{BOLD:#}: the one before is gone\n"));
            }
        }
        ControllerEvent::Planned { result: look, .. } => {
            said.trouble.clear();
            let new = said.newly_held(&look.plan);
            for held in new.into_iter().filter(|_| !printer.is_quiet()) {
                printer.to_stderr(&format!(
                    "{WARNING}{}{WARNING:#} {}: {}\n",
                    held.reason.word(),
                    visible(&held.instance.to_string()),
                    visible(&held.detail)
                ));
            }
        }
        ControllerEvent::ExecutionStarted { .. }
        | ControllerEvent::PassStarted
        | ControllerEvent::PassFinished { .. }
        | ControllerEvent::Tick => {}
        ControllerEvent::StepFinished { step, ended } => {
            let why = step.why.first().map(groups::reason).unwrap_or_default();
            let at = step.why.first().and_then(|why| why.at.as_ref());
            let place = at.map(|at| format!("  {DIM}{at}{DIM:#}")).unwrap_or_default();
            let (style, word) =
                if ended.outcome.is_well() { (HINT, "") } else { (ERROR, ended.outcome.word()) };
            let (op, instance) = (step.op, visible(&step.instance.to_string()));
            let mut text = format!("{style}{op}{style:#} {instance}  {}{place}", visible(&why));
            if !word.is_empty() {
                text.push_str(&format!("  {ERROR}{word}{ERROR:#}: {}", visible(&ended.message)));
            }
            printer.to_stderr(&format!("{text}\n"));
        }
        ControllerEvent::Soaking { process, secs } => {
            printer
                .to_stderr(&format!("{DIM}{process}: watching for {secs} s whether it stays well{DIM:#}\n"));
        }
        ControllerEvent::Relaunched { instance, pid } => {
            info!(%instance, pid, "relaunched");
            printer.to_stderr(&format!(
                "{DIM}relaunched{DIM:#} {}: it ended, and is back as process {pid}\n",
                visible(&instance.to_string())
            ));
        }
        ControllerEvent::RolledBack { processes, .. } => {
            printer.to_stderr(&format!(
                "{ERROR}rolled back{ERROR:#} {}: too many of it failed; left alone until its manifest changes\n",
                visible(processes)
            ));
        }
        ControllerEvent::ExecutionFinished { ended, took } => {
            said.news = true;
            info!(steps = ended.len(), ?took, "did");
        }
        // Told once, not as often as it is tried.
        ControllerEvent::Failure { why } if said.trouble != *why => {
            info!(%why, "trouble");
            printer.to_stderr(&format!("{ERROR}trouble{ERROR:#}: {}\n", visible(why)));
            (*why).clone_into(&mut said.trouble);
        }
        ControllerEvent::Failure { why } => info!(%why, "trouble"),
        ControllerEvent::Idle { settled, held } => {
            info!(settled, held, "as wanted");
            if std::mem::take(&mut said.news) {
                let rest = if *held > 0 { format!(", {held} held") } else { String::new() };
                let word = if *held > 0 { "at rest" } else { "converged" };
                let many = count(*settled, "instance");
                printer.to_stderr(&format!("{BOLD}{word}{BOLD:#}: {many} as wanted{rest}\n"));
            }
        }
    }
}

/// It is told also to whoever wants to hear of errors alone.
fn is_shown_when_quiet(event: &ControllerEvent<'_>) -> bool {
    match event {
        ControllerEvent::Read { reading, .. } | ControllerEvent::Problems { reading } => {
            reading.problems.iter().any(|problem| problem.severity == Severity::Error)
        }
        ControllerEvent::Source { trouble } => trouble.is_some(),
        ControllerEvent::StepFinished { ended, .. } => !ended.outcome.is_well(),
        // That it is over is known from it.
        ControllerEvent::Planned { .. }
        | ControllerEvent::RolledBack { .. }
        | ControllerEvent::Failure { .. } => true,
        ControllerEvent::RevisionNotFollowed { .. }
        | ControllerEvent::Pinned { .. }
        | ControllerEvent::Unpinned { .. }
        | ControllerEvent::Waiting { .. }
        | ControllerEvent::Leading { .. }
        | ControllerEvent::ExecutionStarted { .. }
        | ControllerEvent::Soaking { .. }
        | ControllerEvent::Relaunched { .. }
        | ControllerEvent::ExecutionFinished { .. }
        | ControllerEvent::Idle { .. }
        | ControllerEvent::PassStarted
        | ControllerEvent::PassFinished { .. }
        | ControllerEvent::Tick => false,
    }
}
