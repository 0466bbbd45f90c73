//! Resolver of the revision that a pass plans: reads its inputs, applies [`choose_revision`], and activates the result.

use std::ops::Deref;
use std::sync::Arc;

use super::active_revision::{
    Choice, ChosenRevision, LastAppliedManifests, Manifests, RevisionInputs, RevisionOrigin, choose_revision,
};
use super::context::PassContext;
use super::overrides::{LastApplied, PinOverride};
use crate::control::Target;
use crate::control::event::ControllerEvent;
use crate::engine::other_sources::{DeclaredElsewhere, declared_elsewhere};
use crate::engine::protections;
use crate::engine::stored_revisions::{self, NewRevision};
use crate::model::ManifestRevision;
use crate::source::{Source, SourceState};
use crate::store::Error;

#[derive(Default)]
pub struct RevisionResolver {
    pin: PinOverride,
    /// The active revision, while the source is not followed.
    last_applied: LastApplied,
    /// The source's revision while it is not followed.
    unfollowed: Option<ManifestRevision>,
    /// The source has problems.
    has_problems: bool,
    has_recalled: bool,
    /// The stored active revision and its commit.
    stored: Option<(ManifestRevision, Option<String>)>,
    /// The stored revisions, and the instances that other sources declare in them.
    elsewhere: Option<(Vec<ManifestRevision>, DeclaredElsewhere)>,
    /// A revision was activated: old ones may have expired.
    needs_gc: bool,
}

/// Manifests of the source, or of a stored revision.
pub enum ResolvedManifests<'s> {
    Source(&'s SourceState),
    Stored(Arc<SourceState>),
}

impl Deref for ResolvedManifests<'_> {
    type Target = SourceState;

    fn deref(&self) -> &SourceState {
        match self {
            ResolvedManifests::Source(state) => state,
            ResolvedManifests::Stored(state) => state,
        }
    }
}

/// The manifests of a pass, and what it may do with them.
pub struct ResolvedRevision<'s> {
    pub manifests: ResolvedManifests<'s>,
    pub chosen: ChosenRevision,
}

impl RevisionResolver {
    /// Loads the texts of the active revision as last good versions of broken files. Returns whether something new
    /// was read.
    pub async fn restore_last_good<T: Target>(
        &mut self,
        context: PassContext<'_, T>,
        source: &mut Source,
    ) -> bool {
        if std::mem::replace(&mut self.has_recalled, true) {
            return false;
        }
        let state = context.state();
        let (lacks, has_changed) = match source.read(state).await {
            Ok(Some(reading)) => (reading.has_unknown_files, reading.changed_since_last),
            Ok(None) | Err(_) => (false, false),
        };
        if lacks {
            // After a failed read, the next pass tries again.
            match stored_revisions::active_texts(state, context.owner(), &context.config.manifests.source)
                .await
            {
                Ok(texts) => drop(source.restore_last_good(texts)),
                Err(_) => self.has_recalled = false,
            }
        }
        has_changed
    }

    /// The revision of a pass; `None`: no manifests are known yet. A pin applies even before the source was read.
    pub async fn resolve<'s, T: Target>(
        &mut self,
        context: PassContext<'_, T>,
        source: Option<&'s SourceState>,
    ) -> Result<Option<ResolvedRevision<'s>>, Error> {
        let config = context.config;
        let pinned = self.pin.resolve(context, source).await?;
        let last_applied = match config.follow || pinned.is_some() {
            true => None,
            false => self.last_applied.manifests(context.state(), context.owner(), &config.manifests).await?,
        };
        let is_of_source =
            |stored: &SourceState| source.is_some_and(|source| source.revision == stored.revision);
        let inputs = RevisionInputs {
            source: source.map_or(Manifests::NotRead, Manifests::of),
            pinned: pinned.as_deref().map(Manifests::of),
            last_applied: last_applied.as_deref().map(|stored| LastAppliedManifests {
                manifests: Manifests::of(stored),
                is_of_source: is_of_source(stored),
            }),
            follow: config.follow,
            heal: config.heal,
        };
        let Choice::Revision(chosen) = choose_revision(&inputs) else { return Ok(None) };
        let manifests = match chosen.from {
            RevisionOrigin::Pin => pinned.map(ResolvedManifests::Stored),
            RevisionOrigin::LastApplied => last_applied.map(ResolvedManifests::Stored),
            RevisionOrigin::Source => source.map(ResolvedManifests::Source),
        };
        Ok(manifests.map(|manifests| ResolvedRevision { manifests, chosen }))
    }

    /// Emits the events of a read. `last`: the revision of the last pass.
    pub fn report_source<T: Target>(
        &mut self,
        context: PassContext<'_, T>,
        resolved: &ResolvedRevision<'_>,
        source: Option<&SourceState>,
        last: &ManifestRevision,
        has_changed: bool,
    ) {
        let (manifests, chosen) = (&*resolved.manifests, &resolved.chosen);
        if manifests.revision != *last || manifests.changed_since_last {
            let revision = &manifests.revision;
            context.events.emit(ControllerEvent::Read { reading: manifests, revision });
        }
        let has_problems = source.is_some_and(|source| !source.problems.is_empty());
        let had_problems = std::mem::replace(&mut self.has_problems, has_problems);
        // Problems of the source are reported even while another revision is active.
        if let Some(reading) = source.filter(|_| chosen.from != RevisionOrigin::Source)
            && (reading.changed_since_last || has_changed)
            && (has_problems || had_problems)
        {
            context.events.emit(ControllerEvent::Problems { reading });
        }
        let unfollowed = source.filter(|_| chosen.leaves_source).map(|source| source.revision.clone());
        if self.unfollowed != unfollowed {
            context.events.emit(ControllerEvent::RevisionNotFollowed { revision: unfollowed.as_ref() });
            self.unfollowed = unfollowed;
        }
    }

    /// Stores the revision as the active one, if it becomes that and differs from the stored one.
    pub async fn activate<T: Target>(
        &mut self,
        context: PassContext<'_, T>,
        resolved: &ResolvedRevision<'_>,
    ) -> Result<(), Error> {
        let (owner, source) = (context.owner(), &context.config.manifests.source);
        let SourceState { revision, commit, texts, .. } = &*resolved.manifests;
        let is_stored =
            |(stored, at): &(ManifestRevision, Option<String>)| (stored, at) == (revision, commit);
        if !resolved.chosen.activates || self.stored.as_ref().is_some_and(is_stored) {
            return Ok(());
        }
        let state = context.state();
        let known = stored_revisions::active(state, owner).await?.0;
        let is_known = known.is_some_and(|known| {
            (&known.revision, &known.commit, &known.source) == (revision, commit, source)
        });
        let desired = &resolved.manifests.desired;
        protections::record(state, owner, desired, &context.config.rules.selection).await?;
        if !is_known {
            let new = NewRevision { owner, source, revision, commit: commit.as_deref(), texts };
            stored_revisions::activate(state, &new).await?;
            self.needs_gc = true;
        }
        self.stored = Some((revision.clone(), commit.clone()));
        Ok(())
    }

    /// The instances that other sources of the owner declare, read again when the stored revisions changed.
    pub async fn declared_elsewhere<T: Target>(
        &mut self,
        context: PassContext<'_, T>,
    ) -> Result<DeclaredElsewhere, Error> {
        let (state, owner) = (context.state(), context.owner());
        let (stored, are_all_read) = stored_revisions::list_readable(state, owner).await?;
        let revisions: Vec<ManifestRevision> = stored.iter().map(|one| one.revision.clone()).collect();
        if let Some((known, elsewhere)) = &self.elsewhere
            && *known == revisions
            && are_all_read
        {
            return Ok(elsewhere.clone());
        }
        let config = &context.config.manifests;
        let stored = (stored.as_slice(), are_all_read);
        let elsewhere = declared_elsewhere(state, owner, &config.source, stored, &config.limits).await?;
        self.elsewhere = Some((revisions, elsewhere.clone()));
        Ok(elsewhere)
    }

    /// Deletes expired revisions after an activation. A failed cleanup is repeated by the next activation.
    pub async fn collect_expired<T: Target>(&mut self, context: PassContext<'_, T>) {
        if std::mem::take(&mut self.needs_gc) {
            let _ = stored_revisions::gc(context.state(), context.owner()).await;
        }
    }

    /// Whether the pin is unchanged since the last pass.
    pub async fn is_pin_current<T: Target>(&self, context: PassContext<'_, T>) -> Result<bool, Error> {
        self.pin.is_current(context.state(), context.owner()).await
    }

    /// Discards state that another leader may have changed.
    pub fn reset(&mut self) {
        self.stored = None;
    }
}
