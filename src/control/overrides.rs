//! Overrides of the source: a pinned revision, or the last applied one without --follow.

use std::sync::Arc;

use super::event::{ControllerEvent, EventSink};
use super::pin::{self, Pin};
use super::{ControllerConfig, revisions};
use crate::manifest;
use crate::model::ManifestRevision;
use crate::source::{SourceState, set_default_user};
use crate::store::{Error, Outcome, Seq, Store, Txn};

/// The last known pin, and its manifests.
#[derive(Default)]
pub struct PinOverride {
    /// Sequence number of the pin; 0: there is none.
    changed: Seq,
    pin: Option<Pin>,
    /// The pinned revision's stored manifests.
    reading: Option<Arc<SourceState>>,
}

impl PinOverride {
    /// The desired state that overrides the source; `None`: nothing is pinned, or the source is newer.
    pub async fn resolve<S: Store>(
        &mut self,
        source: &SourceState,
        state: &S,
        config: &ControllerConfig,
        events: &EventSink<'_>,
    ) -> Result<Option<Arc<SourceState>>, Error> {
        let owner = &config.rules.owner;
        let (mut pin, mut changed) = loop {
            let Some((pin, changed)) = pin::read(state, owner).await? else {
                if let Some(pin) = std::mem::take(self).pin {
                    events.emit(ControllerEvent::Unpinned { pin: &pin, newer: false });
                }
                return Ok(None);
            };
            if source.is_incomplete || !config.follow || !pin.is_older_than(&source.revision) {
                break (pin, changed);
            }
            let place = pin::store_key(owner);
            // A concurrent new pin takes precedence.
            if let Outcome::Written(_) = state.txn(Txn::delete(&place).only_if(&place, changed)).await? {
                *self = PinOverride::default();
                events.emit(ControllerEvent::Unpinned { pin: &pin, newer: true });
                return Ok(None);
            }
        };
        if changed != self.changed {
            // A partly broken source is left behind as well, though it was never active.
            if source.is_incomplete && !source.revision.is_none() && pin.is_older_than(&source.revision) {
                pin.also.push(source.revision.clone());
                let put = pin::put(owner, &pin).only_if(pin::store_key(owner), changed);
                if let Outcome::Written(now) = state.txn(put).await? {
                    changed = now;
                }
            }
            // The stored manifests are read once; until that succeeds, no pass runs.
            let reading = read(state, owner, &pin.revision, config).await?;
            *self = PinOverride { changed, pin: Some(pin.clone()), reading: Some(Arc::new(reading)) };
            events.emit(ControllerEvent::Pinned { pin: &pin });
        }
        Ok(self.reading.clone())
    }

    /// Whether the pin is unchanged since it was last read.
    pub async fn is_current<S: Store>(&self, state: &S, owner: &str) -> Result<bool, Error> {
        let changed = state.get(&pin::store_key(owner)).await?.map_or(0, |entry| entry.mod_seq);
        Ok(changed == self.changed)
    }
}

/// The last applied revision, read once.
#[derive(Default)]
pub struct LastApplied(Option<Arc<SourceState>>);

impl LastApplied {
    /// `None`: no revision was ever active.
    pub async fn reading<S: Store>(
        &mut self,
        state: &S,
        config: &ControllerConfig,
    ) -> Result<Option<Arc<SourceState>>, Error> {
        let owner = &config.rules.owner;
        let Some(taken) = revisions::active(state, owner).await?.0 else { return Ok(None) };
        if self.0.as_ref().is_none_or(|known| known.revision != taken.revision) {
            self.0 = Some(Arc::new(read(state, owner, &taken.revision, config).await?));
        }
        Ok(self.0.clone())
    }
}

/// A stored revision: complete, and therefore sufficient for prune.
async fn read<S: Store>(
    state: &S,
    owner: &str,
    revision: &ManifestRevision,
    config: &ControllerConfig,
) -> Result<SourceState, Error> {
    let file = format!("revision {revision}");
    let broken = |what: &str| Error::Corrupt { file: file.clone(), what: what.to_owned() };
    let all = revisions::list(state, owner).await?;
    let found = all.into_iter().find(|snapshot| snapshot.revision == *revision);
    let found = found.ok_or_else(|| broken("the revision is no longer stored"))?;
    let texts = revisions::texts(state, owner, &found).await?;
    let mut loaded =
        manifest::load_files(texts.clone(), Vec::new(), &config.limits, &std::collections::BTreeMap::new());
    if let Some(user) = &config.user {
        set_default_user(&mut loaded.desired, user);
    }
    if ManifestRevision::of(&loaded.desired) != *revision {
        return Err(broken("the stored manifests do not have the revision's digest"));
    }
    let is_incomplete = loaded.errors() > 0;
    let (files, desired) = (loaded.files, Arc::new(loaded.desired));
    let (commit, problems) = (found.commit, Vec::new());
    let (may_prune, is_news) = (!is_incomplete, false);
    let revision = revision.clone();
    let lacks = is_incomplete;
    Ok(SourceState {
        desired,
        revision,
        problems,
        is_incomplete,
        has_unknown_files: lacks,
        may_prune,
        changed_since_last: is_news,
        files,
        commit,
        texts: Arc::new(texts),
    })
}
