//! The request of an apply, and the events and questions for its caller.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::activate::Activation;
use super::input::{PlanDigests, PlanInput, PlanRequest};
use super::pin::Pin;
use crate::execute::{ExecutionEvent, Precheck};
use crate::model::Plan;
use crate::observe::{NoHistory, SpecSearch};

/// An apply.
pub struct ApplyRequest<S = NoHistory> {
    pub plan: PlanRequest<S>,
    pub activation: Activation,
    /// A plan that was approved earlier: a new plan must be equal.
    pub saved: Option<SavedPlan>,
    /// The plan under the lease may differ from the one that was confirmed.
    pub accept_changed_plan: bool,
    pub limits: ExecutionLimits,
    /// Check before a step is sent.
    pub check: Precheck,
    /// `Some`: stop at the next safe point. The number is the exit code that the history records.
    pub stop: watch::Receiver<Option<u8>>,
}

impl<S: SpecSearch> ApplyRequest<S> {
    /// An apply of new manifests with the default limits, without a saved plan.
    pub fn new(plan: PlanRequest<S>) -> ApplyRequest<S> {
        ApplyRequest {
            plan,
            activation: Activation::New,
            saved: None,
            accept_changed_plan: true,
            limits: ExecutionLimits::default(),
            check: |_| None,
            stop: watch::channel(None).1,
        }
    }
}

/// Time limits and concurrency of an apply.
#[derive(Clone, Copy, Debug)]
pub struct ExecutionLimits {
    pub deadline: Instant,
    /// Maximum wait for the writer lease.
    pub lock_timeout: Duration,
    /// Maximum steps in flight.
    pub max_parallel: usize,
    /// Observe until the instances converge.
    pub verify: bool,
}

impl Default for ExecutionLimits {
    /// The defaults of `abide apply`.
    fn default() -> ExecutionLimits {
        ExecutionLimits {
            deadline: Instant::now() + Duration::from_secs(600),
            lock_timeout: Duration::from_secs(10),
            max_parallel: 1000,
            verify: true,
        }
    }
}

/// Fingerprint and steps of a saved plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedPlan {
    pub fingerprint: String,
    /// Revision of its manifests; empty: not recorded.
    pub revision: String,
    /// See [`super::input::step_lines`].
    pub steps: Vec<String>,
    /// The persons whose signatures were required.
    pub signed_by: Vec<String>,
    /// Digest of what was signed, of a plan with signatures: it is applied once.
    pub signed_plan: Option<String>,
}

/// Progress of an apply.
pub enum ApplyEvent<'a> {
    /// An earlier run was interrupted: its steps are recovered.
    Recovering,
    /// The activated manifests end this pin.
    PinEnded(&'a Pin),
    /// The plan that is executed, before its first step; also a plan without steps.
    Planned {
        input: &'a PlanInput,
        plan: &'a Plan,
        digests: &'a PlanDigests,
    },
    /// Nothing else is left to do: the apply waits for a run or a start that held instances depend on.
    AwaitingDependency {
        held: usize,
    },
    /// Execution starts.
    Executing {
        steps: usize,
    },
    Execution(ExecutionEvent<'a>),
    /// Execution has ended.
    Executed,
    RollingBack {
        processes: &'a str,
        /// The first failure of each, with the output of its probe or command.
        why: &'a str,
    },
    RollbackFailed {
        processes: &'a str,
        why: &'a str,
    },
    RollbackIncomplete {
        processes: &'a str,
        steps: usize,
    },
}

/// The caller's side of an apply.
pub trait ApplyHandler: Send {
    /// Whether to execute this plan.
    fn confirm(&mut self, input: &PlanInput, plan: &Plan) -> bool;
    /// Whether the saved plan shows what this plan shows. It has the same fingerprint and steps.
    fn accept_saved(&mut self, _input: &PlanInput, _plan: &Plan) -> bool {
        true
    }
    fn on_event(&mut self, event: ApplyEvent<'_>);
}

/// A handler that confirms every plan and ignores events.
pub struct Unattended;

impl ApplyHandler for Unattended {
    fn confirm(&mut self, _input: &PlanInput, _plan: &Plan) -> bool {
        true
    }

    fn on_event(&mut self, _event: ApplyEvent<'_>) {}
}

/// The caller's request to stop. A caller without a sender never stops.
pub(super) async fn stop_request(requested: &mut watch::Receiver<Option<u8>>) -> u8 {
    match requested.wait_for(Option::is_some).await.ok().and_then(|code| *code) {
        Some(code) => code,
        None => std::future::pending().await,
    }
}
