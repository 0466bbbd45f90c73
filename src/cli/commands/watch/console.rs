//! Console output of the controller on stderr, one line per change. Unchanged states are not repeated.

use std::collections::BTreeSet;

use tracing::info;

use super::json_log;
use crate::cli::commands::plan::groups;
use crate::cli::commands::rollback;
use crate::cli::commands::watch::source::short_id;
use crate::cli::output::print::{self, BOLD, DIM, ERROR, HINT, Printer, WARNING, count, visible};
use crate::control::ControllerEvent;
use crate::execute::StepResult;
use crate::manifest::{Problem, Severity};
use crate::model::{HeldChange, HoldReason, InstanceKey, ManifestRevision, Plan, Step};
use crate::source::{SourceError, SourceState};

/// Last printed states.
#[derive(Default)]
pub struct ConsoleState {
    /// Held instances with their reasons. A changed detail alone is not printed again.
    pub(super) held: BTreeSet<(InstanceKey, HoldReason)>,
    /// Another controller led.
    pub(super) waited: bool,
    /// Something changed since the last converged state.
    pub(super) has_changes: bool,
    /// The current failure, so that retries do not print it again.
    pub(super) failure: String,
}

impl ConsoleState {
    /// Changes that are newly held, or for another reason. Instances in flight are printed when they finish.
    pub(super) fn newly_held<'p>(&mut self, plan: &'p Plan) -> Vec<&'p HeldChange> {
        let is_shown = |held: &&HeldChange| held.reason != HoldReason::UnderWay;
        let of = |held: &HeldChange| (held.instance.clone(), held.reason);
        let new = plan.held.iter().filter(is_shown).filter(|held| !self.held.contains(&of(held))).collect();
        self.held = plan.held.iter().filter(is_shown).map(of).collect();
        new
    }
}

pub fn print_event(event: &ControllerEvent<'_>, console: &mut ConsoleState, printer: &Printer) {
    if printer.is_quiet() && !is_shown_when_quiet(event) {
        return;
    }
    if printer.is_json() {
        return json_log::log(event, console, printer);
    }
    match event {
        ControllerEvent::Read { reading, revision } => print_read(reading, revision, console, printer),
        ControllerEvent::Problems { reading } => {
            print_problems(&reading.problems, printer);
            if reading.problems.is_empty() {
                printer.timed("manifest errors resolved\n");
            }
        }
        ControllerEvent::RevisionNotFollowed { revision: None } => {
            printer.timed("the manifests are at the active revision again\n")
        }
        ControllerEvent::RevisionNotFollowed { revision: Some(revision) } => {
            info!(%revision, "not followed");
            let revision = short_id(revision.as_str());
            printer.timed(&format!(
                "{BOLD}not followed{BOLD:#}: revision {revision} of the manifests is not applied (--follow no)\n"
            ));
        }
        ControllerEvent::Source { trouble } => print_source(*trouble, console, printer),
        ControllerEvent::Pinned { pin } => {
            console.has_changes = true;
            printer.timed(&format!("{WARNING}pinned{WARNING:#} to {}\n", rollback::describe_pin(pin)));
        }
        ControllerEvent::Unpinned { pin, newer } => {
            console.has_changes = true;
            let why = if *newer { ": the source has a newer revision" } else { "" };
            let revision = short_id(pin.revision.as_str());
            printer.timed(&format!("{BOLD}no longer pinned{BOLD:#} to {revision}{why}\n"));
        }
        ControllerEvent::Waiting { holder } => {
            console.waited = true;
            let (host, pid) = (visible(&holder.host), holder.pid);
            printer.timed(&format!("{WARNING}standby{WARNING:#}: {host} (pid {pid}) leads\n"));
        }
        ControllerEvent::Leading { generation } => {
            info!(generation, "leading");
            if std::mem::take(&mut console.waited) {
                printer.timed(&format!("{BOLD}leading{BOLD:#}: the previous leader is gone\n"));
            }
        }
        ControllerEvent::Planned { result } => print_held(&result.plan, console, printer),
        ControllerEvent::StepFinished { step, ended } => print_step(step, ended, printer),
        ControllerEvent::Soaking { process, secs } => {
            printer.timed(&format!("{DIM}{process}: soaking for {secs} s{DIM:#}\n"));
        }
        ControllerEvent::Relaunched { instance, pid } => {
            info!(%instance, pid, "relaunched");
            let instance = visible(&instance.to_string());
            printer.timed(&format!(
                "{DIM}relaunched{DIM:#} {instance}: the process exited, and runs again as process {pid}\n"
            ));
        }
        ControllerEvent::RolledBack { processes, why, .. } => {
            let why: String = why.lines().map(|line| format!("    {}\n", visible(line))).collect();
            printer.timed(&format!(
                "{ERROR}rolled back{ERROR:#} {}: too many instances failed; held until its manifest changes\n{why}",
                visible(processes)
            ));
        }
        ControllerEvent::ExecutionFinished { ended, took } => {
            console.has_changes = true;
            info!(steps = ended.len(), ?took, "plan executed");
        }
        ControllerEvent::Failure { why } => print_failure(why, console, printer),
        ControllerEvent::Idle { settled, held } => print_idle(*settled, *held, console, printer),
        ControllerEvent::ExecutionStarted { .. }
        | ControllerEvent::PassStarted
        | ControllerEvent::PassFinished { .. }
        | ControllerEvent::Tick => {}
    }
}

/// A failure is printed once, not at every retry.
fn print_failure(why: &str, console: &mut ConsoleState, printer: &Printer) {
    info!(%why, "reconcile failed");
    if console.failure != why {
        printer.timed(&format!("{ERROR}error{ERROR:#}: {}\n", visible(why)));
        why.clone_into(&mut console.failure);
    }
}

fn print_problems(problems: &[Problem], printer: &Printer) {
    problems.iter().for_each(|problem| printer.timed(&(print::problem(problem) + "\n")));
}

fn print_read(
    reading: &SourceState,
    revision: &ManifestRevision,
    console: &mut ConsoleState,
    printer: &Printer,
) {
    print_problems(&reading.problems, printer);
    let errors = reading.problems.iter().filter(|problem| problem.severity == Severity::Error).count();
    let short_revision = short_id(revision.as_str());
    let stale =
        if reading.is_incomplete { "; the last good version of invalid files stays active" } else { "" };
    let errors = if errors > 0 { format!(", {}{stale}", count(errors, "error")) } else { stale.to_owned() };
    let commit = reading.commit.as_deref().unwrap_or_default();
    info!(%revision, files = reading.files, commit, "read");
    let at = if commit.is_empty() { String::new() } else { format!(" at commit {}", short_id(commit)) };
    console.has_changes = true;
    printer.timed(&format!(
        "{BOLD}read{BOLD:#} {}, {DIM}revision {short_revision}{DIM:#}{at}{errors}\n",
        count(reading.desired.instances.len(), "instance")
    ));
}

fn print_source(error: Option<&SourceError>, console: &mut ConsoleState, printer: &Printer) {
    let Some(error) = error else {
        console.has_changes = true;
        printer.timed(&format!("{BOLD}source{BOLD:#}: recovered\n"));
        return;
    };
    let word = error.word();
    info!(%error, word, "source update rejected");
    let hint = error.hint().map(|hint| format!("{HINT}hint{HINT:#}: {hint}\n")).unwrap_or_default();
    printer.timed(&format!(
        "{ERROR}source{ERROR:#}: {word}: {}; the active revision, if any, stays active\n{hint}",
        visible(&error.to_string())
    ));
}

fn print_held(plan: &Plan, console: &mut ConsoleState, printer: &Printer) {
    console.failure.clear();
    let new = console.newly_held(plan);
    for held in new.into_iter().filter(|_| !printer.is_quiet()) {
        printer.timed(&format!(
            "{WARNING}{}{WARNING:#} {}: {}\n",
            held.reason.word(),
            visible(&held.instance.to_string()),
            visible(&held.detail)
        ));
    }
}

fn print_step(step: &Step, ended: &StepResult, printer: &Printer) {
    let why = step.why.first().map(groups::reason).unwrap_or_default();
    let at = step.why.first().and_then(|why| why.at.as_ref());
    let location = at.map(|at| format!("  {DIM}{at}{DIM:#}")).unwrap_or_default();
    let (style, word) = if ended.outcome.is_well() { (HINT, "") } else { (ERROR, ended.outcome.word()) };
    let (op, instance) = (step.op, visible(&step.instance.to_string()));
    let mut text = format!("{style}{op}{style:#} {instance}  {}{location}", visible(&why));
    if !word.is_empty() {
        text.push_str(&format!("  {ERROR}{word}{ERROR:#}: {}", visible(&ended.message)));
    }
    printer.timed(&format!("{text}\n"));
}

fn print_idle(in_sync: usize, held: usize, console: &mut ConsoleState, printer: &Printer) {
    info!(in_sync, held, "as wanted");
    if std::mem::take(&mut console.has_changes) {
        let rest = if held > 0 { format!(", {held} held") } else { String::new() };
        let word = if held > 0 { "idle" } else { "converged" };
        let many = count(in_sync, "instance");
        printer.timed(&format!("{BOLD}{word}{BOLD:#}: {many} as wanted{rest}\n"));
    }
}

/// Whether --quiet prints the event: errors only.
fn is_shown_when_quiet(event: &ControllerEvent<'_>) -> bool {
    match event {
        ControllerEvent::Read { reading, .. } | ControllerEvent::Problems { reading } => {
            reading.problems.iter().any(|problem| problem.severity == Severity::Error)
        }
        ControllerEvent::Source { trouble } => trouble.is_some(),
        ControllerEvent::StepFinished { ended, .. } => !ended.outcome.is_well(),
        // `print_held` also runs when quiet: it resets the failure.
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
