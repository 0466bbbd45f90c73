//! Whose word it is that is carried out, and how it is remembered.

use serde_json::{Value, json};

use super::Apply;
use super::report::{Before, Report};
use crate::cli::Failure;
use crate::cli::plan::input::Input;
use crate::cli::plan::json as plan_json;
use crate::cli::print::Printer;
use crate::cli::rollback;
use crate::cli::target::Live;
use crate::control::history;
use crate::control::pin::{self, Pin};
use crate::control::snapshot::{self, Word};
use crate::control::source::git::work_tree;
use crate::model::Plan;
use crate::reconcile::of_desired;
use crate::store::Store;

pub enum Said {
    /// Manifests: what they say is kept, and ends a pin.
    New,
    /// An earlier revision: it is pinned.
    Before(Pin),
}

impl Said {
    /// The commit that it is known to be.
    pub fn commit(&self) -> Option<&str> {
        match self {
            Said::New => None,
            Said::Before(pin) => pin.commit.as_deref(),
        }
    }

    /// From here on this is what is wanted. It is written before anything is done, so that nobody undoes it.
    pub async fn put_in_force(
        &self,
        args: &Apply,
        live: &Live,
        input: &Input,
        printer: &Printer,
    ) -> Result<(), Failure> {
        let owner = &input.rules.owner;
        let ended = match self {
            Said::Before(pin) => live.state.txn(pin::put(owner, pin)).await.map(|_| None),
            Said::New => {
                let (source, desired) = (work_tree::of_paths(&args.input.paths), &input.loaded.desired);
                let (revision, texts) = (of_desired(desired), input.loaded.given());
                let word = Word { owner, source: &source, revision: &revision, commit: None, texts: &texts };
                let ended = snapshot::take(&live.state, &word).await;
                // What is left lying is picked up another time.
                let _ = snapshot::tidy(&live.state, owner).await;
                ended
            }
        };
        if let Some(pin) = ended.map_err(|error| live.failure(&error))? {
            printer.remark(&format!("these manifests end the pin to {}", rollback::words(&pin)));
        }
        Ok(())
    }

    /// Nothing has to be written for it to be what is wanted.
    pub async fn is_in_force(&self, args: &Apply, live: &Live, input: &Input) -> Result<bool, Failure> {
        let owner = &input.rules.owner;
        match self {
            Said::Before(_) => Ok(false),
            Said::New => {
                let pinned = pin::read(&live.state, owner).await.map_err(|error| live.failure(&error))?;
                let taken =
                    snapshot::taken(&live.state, owner).await.map_err(|error| live.failure(&error))?.0;
                let same = |source: &str| {
                    !args.input.claims.accept_source || source == work_tree::of_paths(&args.input.paths)
                };
                Ok(pinned.is_none() && taken.is_none_or(|taken| same(&taken.source)))
            }
        }
    }

    /// What the history of this owner says of it from its beginning.
    pub fn begun(&self, input: &Input, planned: &Plan, before: &Before) -> Value {
        let digests = &before.digests;
        let mut entry = json!({
            "revision": digests.wanted, "source": input.paths, "plan": digests.id,
            "summary": plan_json::summary(planned), "steps": history::steps_of(planned),
        });
        if let Some(commit) = self.commit() {
            entry["commit"] = commit.into();
        }
        entry
    }
}

/// And at its end.
pub fn ended(report: &Report) -> Value {
    let failed = report.ended.iter().filter(|ended| !ended.outcome.is_well()).count();
    json!({"exit": report.exit as u8, "converged": report.converged, "failed": failed,
           "steps": history::steps(&report.ended)})
}
