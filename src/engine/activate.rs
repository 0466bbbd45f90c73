//! Activation of a revision by an apply (new manifests, or a pinned earlier revision), recorded before the first step.

use super::history::{self, RunEnd};
use super::input::{PlanDigests, PlanInput};
use super::other_sources;
use super::pin::{self, Pin};
use super::protections;
use super::report::Report;
use super::stored_revisions::{self, ActiveRevision, NewRevision};
use crate::contract::HistoryEntry;
use crate::model::Plan;
use crate::store::{Error, Store};

/// The revision that an apply activates.
pub enum Activation {
    /// New manifests: stored as the active revision; ends a pin.
    New,
    /// An earlier revision: pinned.
    Pinned(Pin),
    /// The active revision stays, and so do recorded protections.
    Nothing,
}

/// The source of the manifests, as it is recorded, and whether it may differ from the last one.
#[derive(Clone, Copy)]
pub(super) struct ManifestSource<'a> {
    pub name: &'a str,
    pub accepted: bool,
}

/// Record of the revision of an apply without steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RevisionRecord {
    /// Nothing is written.
    Keep,
    Store,
    Activate,
}

impl Activation {
    /// Makes the revision active. Written before the first step, so that a `watch` does not undo the apply. Returns the
    /// pin that it ended.
    pub(super) async fn activate<S: Store>(
        &self,
        state: &S,
        input: &PlanInput,
        source: ManifestSource<'_>,
    ) -> Result<Option<Pin>, Error> {
        let owner = &input.rules.owner;
        if let Activation::Nothing = self {
            return Ok(None);
        }
        // Before the revision: a crash in between leaves a protection too many, not one too few.
        protections::record(state, owner, &input.loaded.desired, &input.rules.selection).await?;
        match self {
            Activation::Nothing => Ok(None),
            Activation::Pinned(pin) => state.txn(pin::put(owner, pin)).await.map(|_| None),
            Activation::New => {
                let revision = input.revision();
                let texts = input.loaded.file_contents();
                let new = NewRevision { owner, source: source.name, revision, commit: None, texts: &texts };
                let ended = stored_revisions::activate(state, &new).await;
                // A failed collection is repeated by the next apply.
                let _ = stored_revisions::gc(state, owner).await;
                ended
            }
        }
    }

    /// Record of the revision of an apply without steps. A source other than the active one becomes active with its
    /// first step, or if the caller accepted it; until then it is stored.
    pub(super) async fn record_without_steps<S: Store>(
        &self,
        state: &S,
        input: &PlanInput,
        source: ManifestSource<'_>,
    ) -> Result<RevisionRecord, Error> {
        let owner = &input.rules.owner;
        match self {
            Activation::Pinned(_) => return Ok(RevisionRecord::Activate),
            Activation::Nothing => return Ok(RevisionRecord::Keep),
            Activation::New => {}
        }
        let is_pinned = pin::read(state, owner).await?.is_some();
        let active = stored_revisions::active(state, owner).await?.0;
        let is_current = |active: &ActiveRevision| active.revision == *input.revision();
        Ok(match active {
            _ if is_pinned => RevisionRecord::Activate,
            Some(active) if active.source != source.name && !source.accepted => RevisionRecord::Store,
            Some(active) if active.source == source.name && is_current(&active) => RevisionRecord::Keep,
            Some(_) | None => RevisionRecord::Activate,
        })
    }

    /// Stores the revision of a source that is not active.
    pub(super) async fn store<S: Store>(
        state: &S,
        input: &PlanInput,
        source: ManifestSource<'_>,
    ) -> Result<(), Error> {
        let revision = input.revision();
        let (owner, texts) = (&input.rules.owner, input.loaded.file_contents());
        let new = NewRevision { owner, source: source.name, revision, commit: None, texts: &texts };
        stored_revisions::store_inactive(state, &new).await?;
        let _ = stored_revisions::gc(state, owner).await;
        Ok(())
    }

    /// The history entry at the start of the run.
    pub(super) fn history_entry(
        &self,
        input: &PlanInput,
        plan: &Plan,
        digests: &PlanDigests,
    ) -> HistoryEntry {
        let commit = match self {
            Activation::New | Activation::Nothing => None,
            Activation::Pinned(pin) => pin.commit.clone(),
        };
        HistoryEntry {
            revision: digests.wanted.to_string(),
            source: input.paths.clone(),
            plan: Some(digests.id.clone()),
            summary: history::summary(plan, &plan.held),
            steps: history::planned_steps(plan),
            commit,
            break_glass: input.rules.holds.break_glass.clone(),
            ..HistoryEntry::default()
        }
    }
}

/// The end of the run, for its history entry.
pub(super) fn history_result(report: &Report) -> RunEnd {
    RunEnd {
        exit: report.conclusion.exit_code(),
        converged: Some(report.converged),
        failed: report.ended.iter().filter(|ended| !ended.outcome.is_well()).count(),
        steps: history::steps(&report.ended),
    }
}

/// The source of the owner's active revision, if it is neither this one nor a directory in it.
pub async fn changed_source<S: Store>(state: &S, owner: &str, source: &str) -> Result<Option<String>, Error> {
    let last = stored_revisions::active(state, owner).await?.0;
    Ok(last.map(|last| last.source).filter(|last| !other_sources::contains(source, last)))
}
