//! What happens in the loop, as it is told.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::PassResult;
use super::pin::Pin;
use super::source::{SourceError, SourceState};
use crate::execute::StepResult;
use crate::model::{InstanceKey, ProcessKey, Step};
use crate::store::Holder;

/// What happened, for whoever tells people.
#[derive(Debug)]
pub enum ControllerEvent<'a> {
    /// The manifests were read, and are not what they were: problems, and whether something else was taken in place of
    /// what is broken.
    Read {
        reading: &'a SourceState,
        revision: &'a str,
    },
    /// What is wrong with the manifests, while something else is in force.
    Problems {
        reading: &'a SourceState,
    },
    /// The manifests are others than those in force, and are not to be followed; `None`: they are the same again.
    RevisionNotFollowed {
        revision: Option<&'a str>,
    },
    /// The source is not followed, and why; `None`: it is again.
    Source {
        trouble: Option<&'a SourceError>,
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
        result: &'a Arc<PassResult>,
    },
    /// A plan, or a part of one, is carried out from here on.
    ExecutionStarted {
        steps: usize,
    },
    /// One step came to its end.
    StepFinished {
        step: &'a Step,
        ended: &'a StepResult,
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
    ExecutionFinished {
        ended: &'a [StepResult],
        took: Duration,
    },
    /// It could not be looked at, or written down.
    Failure {
        why: &'a str,
    },
    /// There is nothing to do, and nothing is under way.
    Idle {
        settled: usize,
        held: usize,
    },
    /// A pass begins.
    PassStarted,
    PassFinished {
        took: Duration,
    },
    /// The loop goes round.
    Tick,
}

/// Whom it is told to. Passes and what they began tell side by side, one word at a time.
pub struct EventSink<'a>(Mutex<&'a mut (dyn FnMut(ControllerEvent<'_>) + Send)>);

impl<'a> EventSink<'a> {
    pub fn new(told: &'a mut (dyn FnMut(ControllerEvent<'_>) + Send)) -> EventSink<'a> {
        EventSink(Mutex::new(told))
    }

    pub fn emit(&self, event: ControllerEvent<'_>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)(event);
    }
}
