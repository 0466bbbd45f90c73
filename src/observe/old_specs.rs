//! Recovery of old specs that a target reports as digests only.

use std::collections::BTreeSet;

use crate::model::{InstanceKey, SpecRevision};
use crate::reconcile::Caps;
use crate::reconcile::spec_recovery::OldSpecs;

/// A search for specs of earlier manifests. It may block.
pub trait SpecSearch: Clone + Send + Sync + 'static {
    fn search(&self, missing: BTreeSet<(InstanceKey, SpecRevision)>, caps: &Caps) -> OldSpecs;
}

/// No earlier manifests: unknown specs stay unknown.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoHistory;

impl SpecSearch for NoHistory {
    fn search(&self, _missing: BTreeSet<(InstanceKey, SpecRevision)>, _caps: &Caps) -> OldSpecs {
        OldSpecs::new()
    }
}

/// Earlier queries and their results, for repeated lookups.
#[derive(Default)]
pub struct SearchCache {
    sought: BTreeSet<(InstanceKey, SpecRevision)>,
    found: OldSpecs,
}

impl SearchCache {
    /// Known specs for the missing ones. Only new queries start a search, on a blocking thread.
    pub async fn lookup<S: SpecSearch>(
        &mut self,
        search: &S,
        missing: BTreeSet<(InstanceKey, SpecRevision)>,
        caps: &Caps,
    ) -> OldSpecs {
        let new: BTreeSet<_> = missing.difference(&self.sought).cloned().collect();
        if !new.is_empty() {
            let (search, caps) = (search.clone(), *caps);
            let searching = tokio::task::spawn_blocking(move || search.search(new, &caps));
            self.found.extend(searching.await.unwrap_or_default());
        }
        self.found.retain(|key, _| missing.contains(key));
        self.sought = missing;
        self.found.clone()
    }
}
