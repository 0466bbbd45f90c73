//! Errors of an apply that did nothing.

use crate::execute::RecoveryError;
use crate::model::{HoldReason, Time, count};
use crate::observe::TargetError;
use crate::store::Holder;

/// Reason why an apply ended before its first step.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error("{} (process {}) holds the writer lease of owner {owner:?} since {}", .holder.host, .holder.pid, Time(.holder.since))]
    Locked { owner: String, holder: Box<Holder> },
    /// Steps of an interrupted run are still in flight at the deadline.
    #[error(transparent)]
    Unfinished(RecoveryError),
    #[error("the target did not answer before the timeout: nothing was done")]
    TimedOut,
    /// Pruning with manifests from another source would delete processes that they never declared.
    #[error("owner {owner:?} was last applied from {last}, and these manifests are from {source_now}")]
    SourceChanged { owner: String, last: String, source_now: String },
    #[error("{} over a budget: {detail}; nothing was done", count(*.instances, "instance"))]
    OverBudget { reason: HoldReason, instances: usize, detail: String },
    /// The first plan differs from the saved one.
    #[error("the plan is stale: {what} changed since it was made")]
    SavedPlanStale { what: &'static str },
    /// The history has a finished run of this signed plan.
    #[error("the signed plan was already applied at {at}; nothing was done")]
    AlreadyApplied { at: String },
    /// The plan under the lease differs from the one that was shown.
    #[error("the observed state changed after the plan was shown: nothing was done")]
    PlanChanged,
    #[error("not approved: nothing was done")]
    NotApproved,
    /// A name of the selection, or the whole selection, means no instance that is declared, observed or recorded.
    #[error("{what}; nothing was done")]
    NothingSelected { what: String, meant: Option<String> },
}
