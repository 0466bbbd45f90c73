//! In-memory source: manifests that a program supplies instead of files, complete and without problems.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::watch;

use super::{ChangeSignal, SourceState};
use crate::model::{Desired, ManifestRevision};

pub struct InMemory {
    wanted: watch::Receiver<Desired>,
    reading: Option<SourceState>,
    seen: Arc<ChangeSignal>,
}

impl InMemory {
    pub fn new(wanted: watch::Receiver<Desired>) -> InMemory {
        InMemory { wanted, reading: None, seen: Arc::new(ChangeSignal::default()) }
    }

    pub(super) fn change_signal(&self) -> &Arc<ChangeSignal> {
        &self.seen
    }

    pub(super) fn last(&self) -> Option<&SourceState> {
        self.reading.as_ref()
    }

    pub fn changed(&mut self) -> bool {
        self.seen.asked.swap(false, Ordering::SeqCst) || self.wanted.has_changed().unwrap_or(false)
    }

    /// It is read in every pass.
    pub fn wait(&self) -> Duration {
        Duration::MAX
    }

    pub fn read(&mut self) -> Option<&SourceState> {
        if self.reading.is_none() || self.wanted.has_changed().unwrap_or(false) {
            let desired = Arc::new(self.wanted.borrow_and_update().clone());
            let revision = ManifestRevision::of(&desired);
            self.reading = Some(SourceState { desired, revision, may_prune: true, ..SourceState::default() });
        }
        self.reading.as_ref()
    }
}
