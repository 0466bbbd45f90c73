//! Controller state in the store: active revision and suspended instances.

use super::super::Target;
use super::super::revisions::{self, NewRevision};
use super::super::suspended::{self, Suspended};
use super::Reconciler;
use crate::model::Desired;
use crate::source::{Source, SourceState};
use crate::store::{Error, Store};

impl<T: Target> Reconciler<'_, T> {
    /// Loads the texts of the active revision as last good versions of broken files. Returns whether something new
    /// was read.
    pub(super) async fn restore_last_good(&mut self, source: &mut Source) -> bool {
        let (state, owner) = (self.target.state(), &self.config.rules.owner);
        if std::mem::replace(&mut self.has_recalled, true) {
            return false;
        }
        let (lacks, is_news) = match source.read(state).await {
            Ok(Some(reading)) => (reading.has_unknown_files, reading.changed_since_last),
            Ok(None) | Err(_) => (false, false),
        };
        if lacks {
            // After a failed read, the next pass tries again.
            match revisions::active_texts(state, owner, &self.config.source).await {
                Ok(texts) => drop(source.restore_last_good(texts)),
                Err(_) => self.has_recalled = false,
            }
        }
        is_news
    }

    /// Stores the revision as the active one, if it differs from the stored one.
    pub(super) async fn activate(&mut self, reading: &SourceState) -> Result<(), Error> {
        let (owner, source) = (&self.config.rules.owner, &self.config.source);
        let (revision, commit) = (&reading.revision, reading.commit.as_deref());
        if (&self.stored.0, self.stored.1.as_deref()) == (revision, commit) {
            return Ok(());
        }
        let state = self.target.state();
        let known = revisions::active(state, owner).await?.0;
        let is_known = known.is_some_and(|known| {
            (&known.revision, known.commit.as_deref(), &known.source) == (revision, commit, source)
        });
        if !is_known {
            revisions::activate(
                state,
                &NewRevision { owner, source, revision, commit, texts: &reading.texts },
            )
            .await?;
            self.needs_gc = true;
        }
        self.stored = (revision.clone(), reading.commit.clone());
        Ok(())
    }

    /// Publishes suspended instances. After a failed write, the next pass tries again.
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

    /// Loads the instances that were suspended before a restart, and still are.
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
