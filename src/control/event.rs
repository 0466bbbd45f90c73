//! Events of the control loop.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::PassResult;
use crate::engine::pin::Pin;
use crate::execute::StepResult;
use crate::model::{InstanceKey, ManifestRevision, ProcessKey, Step};
use crate::source::{SourceError, SourceState};
use crate::store::Holder;

/// An event, for console, logs and the status board.
#[derive(Debug)]
pub enum ControllerEvent<'a> {
    /// The manifests were read and differ from the last read: their problems, and whether a last good version
    /// replaces some.
    Read {
        reading: &'a SourceState,
        revision: &'a ManifestRevision,
    },
    /// Problems of the manifests while another revision is active.
    Problems {
        reading: &'a SourceState,
    },
    /// The source has another revision than the active one, and --follow is off; `None`: both are the same again.
    RevisionNotFollowed {
        revision: Option<&'a ManifestRevision>,
    },
    /// The source cannot be followed, and why; `None`: it recovered.
    Source {
        trouble: Option<&'a SourceError>,
    },
    /// A person pinned this revision: it overrides the source.
    Pinned {
        pin: &'a Pin,
    },
    /// The pin ended; `newer`: because the source has a newer revision.
    Unpinned {
        pin: &'a Pin,
        newer: bool,
    },
    /// Another controller leads.
    Waiting {
        holder: &'a Holder,
    },
    Leading {
        generation: u64,
    },
    Planned {
        result: &'a Arc<PassResult>,
    },
    /// A plan, or a component of one, starts executing.
    ExecutionStarted {
        steps: usize,
    },
    /// A step ended.
    StepFinished {
        step: &'a Step,
        ended: &'a StepResult,
    },
    /// A rollout soaks.
    Soaking {
        process: &'a ProcessKey,
        secs: u64,
    },
    /// The process ended and was relaunched, usually by its agent.
    Relaunched {
        instance: &'a InstanceKey,
        pid: u32,
    },
    /// A rollout failed, and its processes are rolled back.
    RolledBack {
        processes: &'a str,
        /// The first failure of each, with the output of its probe or command.
        why: &'a str,
        /// Number of steps of the rollback.
        steps: usize,
    },
    /// A plan, or a component of one, has ended.
    ExecutionFinished {
        ended: &'a [StepResult],
        took: Duration,
    },
    /// An observation or a write failed.
    Failure {
        why: &'a str,
    },
    /// There is nothing to do, and nothing is in flight.
    Idle {
        settled: usize,
        held: usize,
    },
    /// A pass starts.
    PassStarted,
    PassFinished {
        took: Duration,
    },
    /// The control loop iterates.
    Tick,
}

/// Receiver of events. Passes and executions emit concurrently, one event at a time.
pub struct EventSink<'a>(Mutex<&'a mut (dyn FnMut(ControllerEvent<'_>) + Send)>);

impl<'a> EventSink<'a> {
    pub fn new(handler: &'a mut (dyn FnMut(ControllerEvent<'_>) + Send)) -> EventSink<'a> {
        EventSink(Mutex::new(handler))
    }

    pub fn emit(&self, event: ControllerEvent<'_>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)(event);
    }
}
