//! What happens in the loop, as it is told.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::Look;
use super::pin::Pin;
use super::source::{Reading, Trouble};
use crate::execute::Ended;
use crate::model::{InstanceKey, ProcessKey, Step};
use crate::store::Holder;

/// What happened, for whoever tells people.
#[derive(Debug)]
pub enum Event<'a> {
    /// The manifests were read, and are not what they were: problems, and whether something else was taken in place of
    /// what is broken.
    Read {
        reading: &'a Reading,
        revision: &'a str,
    },
    /// What is wrong with the manifests, while something else is in force.
    Problems {
        reading: &'a Reading,
    },
    /// The manifests are others than those in force, and are not to be followed; `None`: they are the same again.
    Unfollowed {
        revision: Option<&'a str>,
    },
    /// The source is not followed, and why; `None`: it is again.
    Source {
        trouble: Option<&'a Trouble>,
    },
    /// A person pinned this revision: it is kept true, whatever the source says.
    Pinned {
        pin: &'a Pin,
    },
    /// The pin is over; `newer`: because the source has something newer.
    Unpinned {
        pin: &'a Pin,
        newer: bool,
    },
    /// Somebody else leads.
    Waiting {
        holder: &'a Holder,
    },
    Leading {
        generation: u64,
    },
    Planned {
        look: &'a Arc<Look>,
    },
    /// A plan, or a part of one, is carried out from here on.
    Doing {
        steps: usize,
    },
    /// One step came to its end.
    Ended {
        step: &'a Step,
        ended: &'a Ended,
    },
    /// A rollout waits to see whether what was changed stays well.
    Soaking {
        process: &'a ProcessKey,
        secs: u64,
    },
    /// It ended, and is back as another process, without our doing: its agent's, most often.
    Relaunched {
        instance: &'a InstanceKey,
        pid: u32,
    },
    /// A rollout failed, and its processes are put back as they were.
    RolledBack {
        processes: &'a str,
        /// So many it takes.
        steps: usize,
    },
    /// A plan, or a part of one, came to its end.
    Did {
        ended: &'a [Ended],
        took: Duration,
    },
    /// It could not be looked at, or written down.
    Trouble {
        why: &'a str,
    },
    /// There is nothing to do, and nothing is under way.
    Rested {
        settled: usize,
        held: usize,
    },
    /// A pass begins.
    Passing,
    Passed {
        took: Duration,
    },
    /// The loop goes round.
    Turned,
}

/// Whom it is told to. Passes and what they began tell side by side, one word at a time.
pub struct Teller<'a>(Mutex<&'a mut (dyn FnMut(Event<'_>) + Send)>);

impl<'a> Teller<'a> {
    pub fn new(told: &'a mut (dyn FnMut(Event<'_>) + Send)) -> Teller<'a> {
        Teller(Mutex::new(told))
    }

    pub fn tell(&self, event: Event<'_>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)(event);
    }
}
