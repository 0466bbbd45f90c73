//! Stored revisions that override the source: a pinned one, or the last applied one without --follow.

use std::sync::Arc;

use super::active_revision::{is_superseded, left_behind};
use super::context::PassContext;
use crate::control::event::ControllerEvent;
use crate::control::{ManifestConfig, Target};
use crate::engine::pin::{self, Pin};
use crate::engine::stored_revisions;
use crate::manifest;
use crate::model::ManifestRevision;
use crate::source::{SourceState, set_default_user};
use crate::store::{Error, Seq, Store, Txn, TxnOutcome, keys};

/// The last known pin, and its manifests.
#[derive(Default)]
pub struct PinOverride {
    /// Sequence number of the pin; 0: there is none.
    changed: Seq,
    pin: Option<Pin>,
    /// The pinned revision's stored manifests.
    manifests: Option<Arc<SourceState>>,
}

impl PinOverride {
    /// The manifests that override the source; `None`: nothing is pinned, or the source is newer.
    pub async fn resolve<T: Target>(
        &mut self,
        context: PassContext<'_, T>,
        source: Option<&SourceState>,
    ) -> Result<Option<Arc<SourceState>>, Error> {
        let Some((pin, changed)) = self.read_or_end(context, source).await? else { return Ok(None) };
        if changed != self.changed {
            self.load(context, source, pin, changed).await?;
        }
        Ok(self.manifests.clone())
    }

    /// The pin, unless there is none or the source ends it.
    async fn read_or_end<T: Target>(
        &mut self,
        context: PassContext<'_, T>,
        source: Option<&SourceState>,
    ) -> Result<Option<(Pin, Seq)>, Error> {
        let (state, events) = (context.state(), context.events);
        loop {
            let Some((pin, changed)) = pin::read(state, context.owner()).await? else {
                if let Some(pin) = std::mem::take(self).pin {
                    events.emit(ControllerEvent::Unpinned { pin: &pin, newer: false });
                }
                return Ok(None);
            };
            if !is_superseded(&pin, source, context.config.follow) {
                return Ok(Some((pin, changed)));
            }
            let key = keys::pin(context.owner());
            // A concurrent new pin takes precedence.
            if let TxnOutcome::Written(_) = state.txn(Txn::delete(&key).only_if(&key, changed)).await? {
                *self = PinOverride::default();
                events.emit(ControllerEvent::Unpinned { pin: &pin, newer: true });
                return Ok(None);
            }
        }
    }

    /// Reads the stored manifests of a new pin, once; until that succeeds, no pass runs.
    async fn load<T: Target>(
        &mut self,
        context: PassContext<'_, T>,
        source: Option<&SourceState>,
        mut pin: Pin,
        mut changed: Seq,
    ) -> Result<(), Error> {
        let (state, owner) = (context.state(), context.owner());
        if let Some(revision) = left_behind(&pin, source) {
            pin.also.push(revision);
            let put = pin::put(owner, &pin).only_if(keys::pin(owner), changed);
            if let TxnOutcome::Written(now) = state.txn(put).await? {
                changed = now;
            }
        }
        let manifests = read(state, owner, &pin.revision, &context.config.manifests).await?;
        context.events.emit(ControllerEvent::Pinned { pin: &pin });
        *self = PinOverride { changed, pin: Some(pin), manifests: Some(Arc::new(manifests)) };
        Ok(())
    }

    /// Whether the pin is unchanged since it was last read.
    pub async fn is_current<S: Store>(&self, state: &S, owner: &str) -> Result<bool, Error> {
        let changed = state.get(&keys::pin(owner)).await?.map_or(0, |entry| entry.mod_seq);
        Ok(changed == self.changed)
    }
}

/// The last applied revision, read once.
#[derive(Default)]
pub struct LastApplied(Option<Arc<SourceState>>);

impl LastApplied {
    /// `None`: no revision was ever active.
    pub async fn manifests<S: Store>(
        &mut self,
        state: &S,
        owner: &str,
        config: &ManifestConfig,
    ) -> Result<Option<Arc<SourceState>>, Error> {
        let Some(active) = stored_revisions::active(state, owner).await?.0 else { return Ok(None) };
        if self.0.as_ref().is_none_or(|known| known.revision != active.revision) {
            self.0 = Some(Arc::new(read(state, owner, &active.revision, config).await?));
        }
        Ok(self.0.clone())
    }
}

/// A stored revision: complete, and therefore sufficient for prune.
async fn read<S: Store>(
    state: &S,
    owner: &str,
    revision: &ManifestRevision,
    config: &ManifestConfig,
) -> Result<SourceState, Error> {
    let file = format!("revision {revision}");
    let broken = |what: &str| Error::Corrupt { file: file.clone(), what: what.to_owned() };
    let all = stored_revisions::list(state, owner).await?;
    let found = all.into_iter().find(|snapshot| snapshot.revision == *revision);
    let found = found.ok_or_else(|| broken("the revision is no longer stored"))?;
    let texts = stored_revisions::texts(state, owner, &found).await?;
    let none = std::collections::BTreeMap::new();
    let mut loaded = manifest::load_files(texts.clone(), Vec::new(), &config.limits, &none);
    if let Some(user) = &config.default_user {
        set_default_user(&mut loaded.desired, user);
    }
    if ManifestRevision::of(&loaded.desired) != *revision {
        return Err(broken("the stored manifests do not have the revision's digest"));
    }
    let is_incomplete = loaded.errors() > 0;
    Ok(SourceState {
        revision: revision.clone(),
        problems: Vec::new(),
        is_incomplete,
        has_unknown_files: is_incomplete,
        may_prune: !is_incomplete,
        changed_since_last: false,
        files: loaded.files,
        commit: found.commit,
        texts: Arc::new(texts),
        desired: Arc::new(loaded.desired),
    })
}
