//! Context of a pass: the configuration, the target and the event sink, used by each of its parts.

use crate::control::event::{ControllerEvent, EventSink};
use crate::control::{ControllerConfig, Target};
use crate::observe::TargetError;

pub struct PassContext<'a, T> {
    pub config: &'a ControllerConfig,
    pub target: &'a T,
    pub events: &'a EventSink<'a>,
}

impl<T> Clone for PassContext<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for PassContext<'_, T> {}

impl<'a, T: Target> PassContext<'a, T> {
    pub fn state(&self) -> &'a T::State {
        self.target.state()
    }

    pub fn owner(&self) -> &'a str {
        &self.config.rules.owner
    }

    pub fn report_failure(&self, error: &PassError) {
        self.events.emit(ControllerEvent::Failure { why: &error.to_string() });
    }
}

/// Reason why a pass, or the dispatch of its plan, cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum PassError {
    #[error(transparent)]
    Store(#[from] crate::store::Error),
    #[error(transparent)]
    Recovery(#[from] crate::execute::RecoveryError),
    /// The target cannot be observed, or its holds cannot be read.
    #[error(transparent)]
    Target(#[from] TargetError),
}
