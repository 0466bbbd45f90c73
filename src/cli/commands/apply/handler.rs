//! The console side of an apply: approval, progress, messages and signals.

use serde_json::Value;
use tokio::sync::watch;

use super::ApplyArgs;
use super::approve::approve;
use super::progress::Progress;
use crate::cli::Failure;
use crate::cli::commands::plan::args::PlanForm;
use crate::cli::commands::plan::json as plan_json;
use crate::cli::commands::rollback::describe_pin;
use crate::cli::commands::serve::Signals;
use crate::cli::output::print::{Printer, count};
use crate::engine::{ApplyEvent, ApplyHandler, PlanInput};
use crate::model::Plan;

pub struct ConsoleHandler<'a> {
    args: &'a ApplyArgs,
    /// The plan was approved when it was saved.
    saved: bool,
    /// Stops the apply with the exit code of a signal.
    stop: watch::Sender<Option<u8>>,
    printer: &'a Printer,
    progress: Option<Progress<'a>>,
    /// Why the plan was not approved.
    declined: Option<Failure>,
    /// The plan before the first step as JSON, for `-o json`.
    original: Result<Value, Failure>,
}

impl<'a> ConsoleHandler<'a> {
    pub fn new(
        args: &'a ApplyArgs,
        saved: bool,
        stop: watch::Sender<Option<u8>>,
        printer: &'a Printer,
    ) -> ConsoleHandler<'a> {
        let (progress, declined, original) = (None, None, Ok(Value::Null));
        ConsoleHandler { args, saved, stop, printer, progress, declined, original }
    }

    pub fn declined(self) -> Option<Failure> {
        self.declined
    }

    pub fn original_plan(self) -> Result<Value, Failure> {
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
        self.declined = approve(self.args, self.saved, input, plan, self.printer).err();
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
                let json = plan_json::plan(input, plan, digests);
                self.original = json.map(|json| serde_json::from_str(&json).unwrap_or_default());
            }
            ApplyEvent::Planned { .. } => {}
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
            ApplyEvent::RollingBack { processes } => {
                self.printer.info(&format!("rolling back {processes}: too many instances failed"));
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
