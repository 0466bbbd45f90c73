//! What a pass keeps in the store, and what it finds there from before it began.

use super::super::Target;
use super::super::left::{self, Left};
use super::super::snapshot::{self, Word};
use super::super::source::{Reading, Source};
use super::Pass;
use crate::model::Desired;
use crate::store::{Error, Store};

impl<T: Target> Pass<'_, T> {
    /// What was in force before this began stands in for what is broken now. Was something new read on the way?
    pub(super) async fn recall(&mut self, source: &mut Source) -> bool {
        let (state, owner) = (self.target.state(), &self.setting.rules.owner);
        if std::mem::replace(&mut self.recalled, true) {
            return false;
        }
        let (lacks, is_news) = match source.read(state).await {
            Ok(Some(reading)) => (reading.lacks, reading.is_news),
            Ok(None) | Err(_) => (false, false),
        };
        if lacks {
            // What cannot be asked for now is asked for by the next pass.
            match snapshot::in_force(state, owner, &self.setting.source).await {
                Ok(texts) => drop(source.recall(texts)),
                Err(_) => self.recalled = false,
            }
        }
        is_news
    }

    /// What is about to be made true is kept, if it is not what was kept last.
    pub(super) async fn take(&mut self, reading: &Reading) -> Result<(), Error> {
        let (owner, source) = (&self.setting.rules.owner, &self.setting.source);
        let (revision, commit) = (reading.revision.as_str(), reading.commit.as_deref());
        if (self.taken.0.as_str(), self.taken.1.as_deref()) == (revision, commit) {
            return Ok(());
        }
        let state = self.target.state();
        let known = snapshot::taken(state, owner).await?.0;
        let is_known = known.is_some_and(|known| {
            (known.revision.as_str(), known.commit.as_deref(), &known.source) == (revision, commit, source)
        });
        if !is_known {
            snapshot::take(state, &Word { owner, source, revision, commit, texts: &reading.texts }).await?;
            self.untidy = true;
        }
        self.taken = (revision.to_owned(), reading.commit.clone());
        Ok(())
    }

    /// What was given up is known to others. What cannot be written now is written after the next pass.
    pub async fn keep_left(&mut self) {
        let Some(kept) = &self.left else { return };
        let all = self
            .patience
            .given_up()
            .map(|(key, reason, why)| (key.clone(), Left::new(reason, why, self.desired.instances.get(key))));
        let now: left::All = all.collect();
        if let Some(change) = left::change(&self.setting.rules.owner, kept, &now)
            && self.target.state().txn(change).await.is_ok()
        {
            self.left = Some(now);
        }
    }

    /// What was given up before this began, and still is.
    pub(super) async fn recall_left(&mut self, desired: &Desired) {
        if self.left.is_some() {
            return;
        }
        let Ok(kept) = left::read(self.target.state(), &self.setting.rules.owner).await else { return };
        for (key, left) in kept.iter().filter(|(key, left)| left.lasts(key, desired)) {
            self.patience.give_up(key, left.reason(), &left.why);
        }
        self.left = Some(kept);
    }
}
