//! What a pass keeps in the store, and what it finds there from before it began.

use super::super::Target;
use super::super::revisions::{self, NewRevision};
use super::super::source::{Source, SourceState};
use super::super::suspended::{self, Suspended};
use super::Reconciler;
use crate::model::Desired;
use crate::store::{Error, Store};

impl<T: Target> Reconciler<'_, T> {
    /// What was in force before this began stands in for what is broken now. Was something new read on the way?
    pub(super) async fn restore_last_good(&mut self, source: &mut Source) -> bool {
        let (state, owner) = (self.target.state(), &self.config.rules.owner);
        if std::mem::replace(&mut self.recalled, true) {
            return false;
        }
        let (lacks, is_news) = match source.read(state).await {
            Ok(Some(reading)) => (reading.has_unknown_files, reading.changed_since_last),
            Ok(None) | Err(_) => (false, false),
        };
        if lacks {
            // What cannot be asked for now is asked for by the next pass.
            match revisions::active_texts(state, owner, &self.config.source).await {
                Ok(texts) => drop(source.restore_last_good(texts)),
                Err(_) => self.recalled = false,
            }
        }
        is_news
    }

    /// What is about to be made true is kept, if it is not what was kept last.
    pub(super) async fn activate(&mut self, reading: &SourceState) -> Result<(), Error> {
        let (owner, source) = (&self.config.rules.owner, &self.config.source);
        let (revision, commit) = (reading.revision.as_str(), reading.commit.as_deref());
        if (self.taken.0.as_str(), self.taken.1.as_deref()) == (revision, commit) {
            return Ok(());
        }
        let state = self.target.state();
        let known = revisions::active(state, owner).await?.0;
        let is_known = known.is_some_and(|known| {
            (known.revision.as_str(), known.commit.as_deref(), &known.source) == (revision, commit, source)
        });
        if !is_known {
            revisions::activate(
                state,
                &NewRevision { owner, source, revision, commit, texts: &reading.texts },
            )
            .await?;
            self.untidy = true;
        }
        self.taken = (revision.to_owned(), reading.commit.clone());
        Ok(())
    }

    /// What was given up is known to others. What cannot be written now is written after the next pass.
    pub async fn persist_suspended(&mut self) {
        let Some(kept) = &self.left else { return };
        let all = self.backoff.suspended().map(|(key, reason, why)| {
            (key.clone(), Suspended::new(reason, why, self.desired.instances.get(key)))
        });
        let now: suspended::SuspendedInstances = all.collect();
        if let Some(change) = suspended::diff(&self.config.rules.owner, kept, &now)
            && self.target.state().txn(change).await.is_ok()
        {
            self.left = Some(now);
        }
    }

    /// What was given up before this began, and still is.
    pub(super) async fn restore_suspended(&mut self, desired: &Desired) {
        if self.left.is_some() {
            return;
        }
        let Ok(kept) = suspended::read(self.target.state(), &self.config.rules.owner).await else { return };
        for (key, left) in kept.iter().filter(|(key, left)| left.still_applies(key, desired)) {
            self.backoff.suspend(key, left.reason(), &left.why);
        }
        self.left = Some(kept);
    }
}
