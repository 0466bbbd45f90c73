//! Activation of a revision by an apply (new manifests, or a pinned earlier revision), recorded before the first step.

use super::ApplyArgs;
use super::report::{OriginalPlan, Report};
use crate::cli::Failure;
use crate::cli::commands::plan::input::PlanInput;
use crate::cli::commands::rollback;
use crate::cli::output::print::Printer;
use crate::cli::target::ConnectedTarget;
use crate::contract::HistoryEntry;
use crate::control::history::{self, RunEnd};
use crate::control::pin::{self, Pin};
use crate::control::revisions::{self, NewRevision};
use crate::model::Plan;
use crate::reconcile::of_desired;
use crate::source::git::work_tree;
use crate::store::Store;

pub enum Activation {
    /// New manifests: stored as the active revision; ends a pin.
    New,
    /// An earlier revision: pinned.
    Pinned(Pin),
}

impl Activation {
    /// The commit of a pinned revision, if known.
    pub fn commit(&self) -> Option<&str> {
        match self {
            Activation::New => None,
            Activation::Pinned(pin) => pin.commit.as_deref(),
        }
    }

    /// Makes the revision active. Written before the first step, so that a `watch` does not undo the apply.
    pub async fn activate(
        &self,
        args: &ApplyArgs,
        live: &ConnectedTarget,
        input: &PlanInput,
        printer: &Printer,
    ) -> Result<(), Failure> {
        let owner = &input.rules.owner;
        let ended = match self {
            Activation::Pinned(pin) => live.state.txn(pin::put(owner, pin)).await.map(|_| None),
            Activation::New => {
                let (source, desired) = (work_tree::of_paths(&args.input.paths), &input.loaded.desired);
                let (revision, texts) = (of_desired(desired), input.loaded.file_contents());
                let new =
                    NewRevision { owner, source: &source, revision: &revision, commit: None, texts: &texts };
                let ended = revisions::activate(&live.state, &new).await;
                // A failed collection is repeated by the next apply.
                let _ = revisions::gc(&live.state, owner).await;
                ended
            }
        };
        if let Some(pin) = ended.map_err(|error| live.failure(&error))? {
            printer.info(&format!("these manifests end the pin to {}", rollback::describe_pin(&pin)));
        }
        Ok(())
    }

    /// Whether the revision is active already, so that nothing has to be written.
    pub async fn is_active(
        &self,
        args: &ApplyArgs,
        live: &ConnectedTarget,
        input: &PlanInput,
    ) -> Result<bool, Failure> {
        let owner = &input.rules.owner;
        match self {
            Activation::Pinned(_) => Ok(false),
            Activation::New => {
                let pinned = pin::read(&live.state, owner).await.map_err(|error| live.failure(&error))?;
                let active =
                    revisions::active(&live.state, owner).await.map_err(|error| live.failure(&error))?.0;
                let same = |source: &str| {
                    !args.input.claims.accept_source || source == work_tree::of_paths(&args.input.paths)
                };
                Ok(pinned.is_none() && active.is_none_or(|active| same(&active.source)))
            }
        }
    }

    /// The history entry at the start of the run.
    pub fn history_entry(&self, input: &PlanInput, planned: &Plan, before: &OriginalPlan) -> HistoryEntry {
        let digests = &before.digests;
        HistoryEntry {
            revision: digests.wanted.clone(),
            source: input.paths.clone(),
            plan: Some(digests.id.clone()),
            summary: history::summary(planned, &planned.held),
            steps: history::planned_steps(planned),
            commit: self.commit().map(str::to_owned),
            ..HistoryEntry::default()
        }
    }
}

/// The end of the run, for its history entry.
pub fn history_result(report: &Report) -> RunEnd {
    RunEnd {
        exit: report.exit as u8,
        converged: Some(report.converged),
        failed: report.ended.iter().filter(|ended| !ended.outcome.is_well()).count(),
        steps: history::steps(&report.ended),
    }
}
