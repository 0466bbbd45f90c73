//! Errors of an observation, and of a target that is read.

use crate::backend::BackendError;
use crate::model::InstanceKey;
use crate::store;

/// Reason why an observation failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ObserveError {
    #[error(transparent)]
    Target(BackendError),
    #[error("state store: {0}")]
    State(#[source] store::Error),
    /// One instance has two rows.
    #[error("{0} has two rows: one under its host's address, one under its agent id")]
    Ambiguous(InstanceKey),
}

/// An error of a target or of its state store, with the target's name.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TargetError {
    #[error("target {target}: {cause}")]
    Backend {
        target: String,
        #[source]
        cause: BackendError,
    },
    #[error("target {target}: {cause}")]
    State {
        target: String,
        #[source]
        cause: store::Error,
    },
    /// The ledger could not be read.
    #[error("target {target}: state store: {cause}")]
    Ledger {
        target: String,
        #[source]
        cause: store::Error,
    },
    /// The target did answer: an instance has a row under its host's address and one under its agent id.
    #[error(transparent)]
    Ambiguous(ObserveError),
}

impl TargetError {
    pub fn backend(target: &str, cause: BackendError) -> TargetError {
        TargetError::Backend { target: target.to_owned(), cause }
    }

    pub fn state(target: &str, cause: store::Error) -> TargetError {
        TargetError::State { target: target.to_owned(), cause }
    }

    pub fn observe(target: &str, cause: ObserveError) -> TargetError {
        match cause {
            ObserveError::Target(cause) => TargetError::backend(target, cause),
            ObserveError::State(cause) => TargetError::Ledger { target: target.to_owned(), cause },
            ObserveError::Ambiguous(_) => TargetError::Ambiguous(cause),
        }
    }
}
