//! Manifests that a program hands over, instead of files: whole, without problems, whenever it likes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::watch;

use super::{Reading, Seen};
use crate::model::Desired;
use crate::reconcile::of_desired;

pub struct Handed {
    wanted: watch::Receiver<Desired>,
    reading: Option<Reading>,
    seen: Arc<Seen>,
}

impl Handed {
    pub fn new(wanted: watch::Receiver<Desired>) -> Handed {
        Handed { wanted, reading: None, seen: Arc::new(Seen::default()) }
    }

    pub(super) fn seen(&self) -> &Arc<Seen> {
        &self.seen
    }

    pub(super) fn last(&self) -> Option<&Reading> {
        self.reading.as_ref()
    }

    pub fn changed(&mut self) -> bool {
        self.seen.asked.swap(false, Ordering::SeqCst) || self.wanted.has_changed().unwrap_or(false)
    }

    /// It is asked again at every look.
    pub fn wait(&self) -> Duration {
        Duration::MAX
    }

    pub fn read(&mut self) -> Option<&Reading> {
        if self.reading.is_none() || self.wanted.has_changed().unwrap_or(false) {
            let desired = Arc::new(self.wanted.borrow_and_update().clone());
            let revision = of_desired(&desired);
            self.reading = Some(Reading { desired, revision, may_prune: true, ..Reading::default() });
        }
        self.reading.as_ref()
    }
}
