//! Whose word it is that is carried out, and how it is remembered.

use serde_json::{Value, json};

use super::ApplyArgs;
use super::report::{OriginalPlan, Report};
use crate::cli::Failure;
use crate::cli::commands::plan::input::PlanInput;
use crate::cli::commands::rollback;
use crate::cli::output::print::Printer;
use crate::cli::target::ConnectedTarget;
use crate::control::history;
use crate::control::pin::{self, Pin};
use crate::control::revisions::{self, NewRevision};
use crate::control::source::git::work_tree;
use crate::model::Plan;
use crate::reconcile::of_desired;
use crate::store::Store;

pub enum Activation {
    /// Manifests: what they say is kept, and ends a pin.
    New,
    /// An earlier revision: it is pinned.
    Pinned(Pin),
}

impl Activation {
    /// The commit that it is known to be.
    pub fn commit(&self) -> Option<&str> {
        match self {
            Activation::New => None,
            Activation::Pinned(pin) => pin.commit.as_deref(),
        }
    }

    /// From here on this is what is wanted. It is written before anything is done, so that nobody undoes it.
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
                let word =
                    NewRevision { owner, source: &source, revision: &revision, commit: None, texts: &texts };
                let ended = revisions::activate(&live.state, &word).await;
                // What is left lying is picked up another time.
                let _ = revisions::gc(&live.state, owner).await;
                ended
            }
        };
        if let Some(pin) = ended.map_err(|error| live.failure(&error))? {
            printer.info(&format!("these manifests end the pin to {}", rollback::describe_pin(&pin)));
        }
        Ok(())
    }

    /// Nothing has to be written for it to be what is wanted.
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
                let taken =
                    revisions::active(&live.state, owner).await.map_err(|error| live.failure(&error))?.0;
                let same = |source: &str| {
                    !args.input.claims.accept_source || source == work_tree::of_paths(&args.input.paths)
                };
                Ok(pinned.is_none() && taken.is_none_or(|taken| same(&taken.source)))
            }
        }
    }

    /// What the history of this owner says of it from its beginning.
    pub fn history_entry(&self, input: &PlanInput, planned: &Plan, before: &OriginalPlan) -> Value {
        let digests = &before.digests;
        let mut entry = json!({
            "revision": digests.wanted, "source": input.paths, "plan": digests.id,
            "summary": history::summary(planned, &planned.held), "steps": history::planned_steps(planned),
        });
        if let Some(commit) = self.commit() {
            entry["commit"] = commit.into();
        }
        entry
    }
}

/// And at its end.
pub fn history_result(report: &Report) -> Value {
    let failed = report.ended.iter().filter(|ended| !ended.outcome.is_well()).count();
    json!({"exit": report.exit as u8, "converged": report.converged, "failed": failed,
           "steps": history::steps(&report.ended)})
}
