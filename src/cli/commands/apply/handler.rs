//! The console side of an apply: approval, progress, messages and signals.

use serde_json::Value;
use tokio::sync::watch;

use super::ApplyArgs;
use super::approve::approve;
use super::progress::Progress;
use super::signed_plan;
use crate::cli::Failure;
use crate::cli::commands::plan::args::PlanForm;
use crate::cli::commands::plan::json as plan_json;
use crate::cli::commands::rollback::describe_pin;
use crate::cli::commands::serve::Signals;
use crate::cli::output::print::{Printer, count, visible};
use crate::contract::PlanDocument;
use crate::engine::{ApplyEvent, ApplyHandler, PlanInput};
use crate::model::Plan;

pub struct ConsoleHandler<'a> {
    args: &'a ApplyArgs,
    /// The plan was approved when it was saved.
    saved: Option<&'a Value>,
    /// Stops the apply with the exit code of a signal.
    stop: watch::Sender<Option<u8>>,
    printer: &'a Printer,
    progress: Option<Progress<'a>>,
    /// Reason why the plan was not approved.
    declined: Option<Failure>,
    /// The plan before the first step, for `-o json`.
    original: Option<PlanDocument>,
}

impl<'a> ConsoleHandler<'a> {
    pub fn new(
        args: &'a ApplyArgs,
        saved: Option<&'a Value>,
        stop: watch::Sender<Option<u8>>,
        printer: &'a Printer,
    ) -> ConsoleHandler<'a> {
        let (progress, declined, original) = (None, None, None);
        ConsoleHandler { args, saved, stop, printer, progress, declined, original }
    }

    pub fn declined(self) -> Option<Failure> {
        self.declined
    }

    pub fn original_plan(self) -> Option<PlanDocument> {
        self.original
    }

    /// Listens for signals from the first step on: before it, a signal ends the process.
    fn listen_for_signals(&self) {
        let (Ok(mut signals), stop) = (Signals::listen(), self.stop.clone()) else { return };
        tokio::spawn(async move {
            let exit = signals.stop_signal().await;
            stop.send_replace(Some(exit as u8));
        });
    }
}

impl ApplyHandler for ConsoleHandler<'_> {
    fn confirm(&mut self, input: &PlanInput, plan: &Plan) -> bool {
        self.declined = approve(self.args, self.saved.is_some(), input, plan, self.printer).err();
        self.declined.is_none()
    }

    fn accept_saved(&mut self, input: &PlanInput, plan: &Plan) -> bool {
        let Some(saved) = self.saved else { return true };
        let now = plan_json::document(input, plan, &input.digests(plan));
        self.declined = signed_plan::check_content(saved, &now).err();
        self.declined.is_none()
    }

    fn on_event(&mut self, event: ApplyEvent<'_>) {
        match event {
            ApplyEvent::Recovering => {
                self.printer.info("an earlier run was interrupted: recovering its steps");
            }
            ApplyEvent::PinEnded(pin) => {
                self.printer.info(&format!("these manifests end the pin to {}", describe_pin(pin)));
            }
            ApplyEvent::Planned { input, plan, digests } if self.args.output == PlanForm::Json => {
                self.original = Some(plan_json::document(input, plan, digests));
            }
            ApplyEvent::Planned { .. } => {}
            ApplyEvent::AwaitingDependency { held } => {
                let depend = if held == 1 { "depends" } else { "depend" };
                let held = count(held, "instance");
                self.printer
                    .info(&format!("waiting for a run or a start in progress: {held} {depend} on it"));
            }
            ApplyEvent::Executing { steps } => {
                self.listen_for_signals();
                self.progress = Some(Progress::new(steps, self.args.output, self.printer));
            }
            ApplyEvent::Execution(event) => {
                if let Some(progress) = &mut self.progress {
                    progress.on_event(&event);
                }
            }
            ApplyEvent::Executed => {
                if let Some(mut progress) = self.progress.take() {
                    progress.clear();
                }
            }
            ApplyEvent::RollingBack { processes, why } => {
                let why = visible_lines(why);
                self.printer.info(&format!("rolling back {processes}: too many instances failed{why}"));
            }
            ApplyEvent::RollbackFailed { processes, why } => {
                self.printer.warning(&format!("cannot roll back {processes}: {why}"));
            }
            ApplyEvent::RollbackIncomplete { processes, steps } => {
                let remaining = count(steps, "step");
                self.printer.warning(&format!("rollback of {processes} is incomplete: {remaining} not done"));
            }
        }
    }
}

/// Lines of untrusted text, each indented on a line of its own.
fn visible_lines(text: &str) -> String {
    text.lines().map(|line| format!("\n    {}", visible(line))).collect()
}
