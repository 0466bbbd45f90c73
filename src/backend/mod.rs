//! Backends: observation of a target, and operations on it.
//!
//! A backend makes no decisions. It represents one target, whose capabilities follow from its dialect. Implementations:
//! [`Abide`], the Abide gateway; [`Platform`], BlueKing's GSE and JOB; [`sim`], a fleet in memory. [`AnyBackend`] is one
//! of the first two.

mod abide;
mod any;
mod change_stream;
mod live_check;
mod platform;
mod row_state;
pub mod sim;

pub use abide::{Abide, AuditFilter, LogRequest};
pub use any::AnyBackend;
pub use change_stream::{ChangeEvent, ChangeStream};
pub use platform::{Business, Pace, Platform};
pub use row_state::RowState;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock;
use crate::gse::codes::EnvelopeCode;
use crate::http::{CallError, TransportError, UnreadableResponse};
use crate::model::{
    Dialect, Field, HashedSpec, Host, HostKey, InstanceKey, Name, Observed, Op, Protection, SpecRevision,
    Step, Time,
};

pub trait Backend: Send + Sync {
    fn dialect(&self) -> Dialect;

    /// The current time.
    fn now(&self) -> Time {
        clock::now()
    }

    /// Observes at least the scope. A host that cannot be observed is a gap, not an error.
    fn observe(&self, scope: &Scope) -> impl Future<Output = Result<Observed, BackendError>> + Send;

    /// Observes, and streams all later changes where the target supports that.
    fn follow(
        &self,
        scope: &Scope,
    ) -> impl Future<Output = Result<(Observed, Option<ChangeStream>), BackendError>> + Send {
        async { Ok((self.observe(scope).await?, None)) }
    }

    /// The facts that the change stream does not contain: the number of the target's last change, and which of these hosts
    /// cannot be observed.
    fn watermark(
        &self,
        _hosts: &BTreeSet<HostKey>,
    ) -> impl Future<Output = Result<Watermark, BackendError>> + Send {
        async { Ok(Watermark::default()) }
    }

    /// Observes some instances live. The facts are current; specs may be missing.
    fn observe_live(
        &self,
        subjects: &[InstanceQuery],
    ) -> impl Future<Output = Result<Observed, BackendError>> + Send {
        async move { self.observe(&Scope::of(subjects.to_vec())).await }
    }

    /// Live status check (operation 2): finds a process by its identity, also one that no list contains.
    fn check_live(
        &self,
        subjects: &[InstanceQuery],
    ) -> impl Future<Output = Result<Observed, BackendError>> + Send {
        self.observe_live(subjects)
    }

    /// The last message of each of these instances: the output of a failed probe, start or run. Instances without one are
    /// left out.
    fn messages(
        &self,
        _instances: &[InstanceKey],
    ) -> impl Future<Output = Result<BTreeMap<InstanceKey, String>, BackendError>> + Send {
        async { Ok(BTreeMap::new()) }
    }

    /// Splits operations into calls. Each operation is in exactly one of them.
    fn batches(&self, orders: Vec<Operation>) -> Vec<Vec<Operation>> {
        if orders.is_empty() { Vec::new() } else { vec![orders] }
    }

    /// First and maximum interval between two polls of a task.
    fn poll_interval(&self) -> (Duration, Duration) {
        (Duration::from_millis(10), Duration::from_secs(1))
    }

    /// Maximum number of calls in flight.
    fn max_concurrent_calls(&self) -> usize {
        8
    }

    /// Whether a call that is sent twice with one idempotency key is executed once.
    fn has_idempotency_keys(&self) -> bool {
        false
    }

    /// The task of an earlier call, by its idempotency key; `None`: the target never accepted it.
    fn find_task(
        &self,
        _call: &str,
        _instances: &[InstanceKey],
    ) -> impl Future<Output = Result<Option<Task>, BackendError>> + Send {
        async { Ok(None) }
    }

    /// Sends independent operations, and returns the task to poll for their results. `call`: the idempotency key, on
    /// targets that support one.
    fn submit(
        &self,
        call: &str,
        orders: &[Operation],
    ) -> impl Future<Output = Result<Task, BackendError>> + Send;

    /// The current results of a task. A row may be missing, or stay in progress indefinitely; rows are independent.
    fn poll(&self, task: &Task) -> impl Future<Output = Result<Vec<OperationStatus>, BackendError>> + Send;
}

/// Position of a target's change stream; see [`Backend::watermark`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Watermark {
    pub number: u64,
    pub gaps: BTreeMap<HostKey, String>,
}

/// Reason why operations are sent: the plan, and the revision and commit of its manifests. Gateways record it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChangeOrigin {
    pub plan: Option<String>,
    pub revision: Option<String>,
    pub commit: Option<String>,
    /// The reason of a person for operations outside of a maintenance window.
    pub break_glass: Option<String>,
    /// Instances whose operations repair drift: their declaration has not changed since they were in sync.
    pub repairs: BTreeSet<InstanceKey>,
}

/// Known facts of an instance before an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PriorOwnership {
    /// The instance was observed as registered.
    pub registered: bool,
    /// The label or the ledger shows that the owner already has the instance.
    pub owned: bool,
}

/// One operation to send.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// The same for every repetition of an operation.
    pub id: String,
    /// `None`: no owner is set.
    pub owner: Option<String>,
    pub instance: InstanceKey,
    pub host: Host,
    pub op: Op,
    pub spec: Option<Arc<HashedSpec>>,
    pub revision: Option<SpecRevision>,
    /// The fields that take effect with a reload.
    pub reloaded_fields: Vec<Field>,
    /// The earlier name of a moved instance.
    pub from: Option<InstanceKey>,
    pub before: PriorOwnership,
    pub origin: Option<Arc<ChangeOrigin>>,
    /// Protections of the instance, for targets that keep them as a label.
    pub protections: Vec<Protection>,
}

/// Idempotency key of the nth rename of a call: each rename is a separate task.
pub fn name_of_move(call: &str, nth: usize) -> String {
    format!("{call}.m{nth}")
}

impl Operation {
    /// Whether the operation repairs drift.
    pub fn repairs_drift(&self) -> bool {
        self.origin.as_ref().is_some_and(|origin| origin.repairs.contains(&self.instance))
    }

    /// Whether the operation renames the instance.
    pub fn moves(&self) -> bool {
        self.from.is_some() && self.op == Op::Register
    }

    pub fn of(step: &Step, id: String, owner: &str) -> Operation {
        Operation {
            id,
            owner: Some(owner.to_owned()).filter(|owner| !owner.is_empty()),
            instance: step.instance.clone(),
            host: step.host.clone(),
            op: step.op,
            spec: step.spec.clone(),
            revision: step.revision,
            reloaded_fields: step.reloaded_fields.clone(),
            from: step.from.clone(),
            before: PriorOwnership::default(),
            origin: None,
            protections: Vec::new(),
        }
    }
}

/// An instance to observe.
#[derive(Clone, Debug, PartialEq)]
pub struct InstanceQuery {
    pub instance: InstanceKey,
    pub host: Host,
    /// The expected spec, for targets that identify processes by their spec.
    pub spec: Option<Arc<HashedSpec>>,
}

/// The instances to observe.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scope {
    pub subjects: Vec<InstanceQuery>,
    /// All instances of these namespaces, in addition to `subjects`.
    pub namespaces: BTreeSet<Name>,
}

impl Scope {
    pub fn of(subjects: Vec<InstanceQuery>) -> Scope {
        Scope { subjects, namespaces: BTreeSet::new() }
    }

    pub fn hosts(&self) -> BTreeSet<HostKey> {
        self.subjects.iter().map(|subject| subject.host.key.clone()).collect()
    }
}

/// Handle of a submitted call.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Task {
    pub ids: Vec<String>,
    /// Results that the call itself returned.
    #[serde(skip)]
    pub answered: Vec<OperationStatus>,
    /// Operation id of each pending row.
    pub rows: BTreeMap<InstanceKey, String>,
    /// Result keys, where they do not follow from the instance.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub keys: BTreeMap<InstanceKey, String>,
}

/// Status of one operation.
#[derive(Clone, Debug, PartialEq)]
pub struct OperationStatus {
    pub order: String,
    pub instance: InstanceKey,
    pub result: OperationState,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OperationState {
    InProgress,
    /// `note`: message of the target about a success, such as an ignored failure of a hook.
    Done {
        note: String,
    },
    Failed {
        state: RowState,
        message: String,
    },
}

/// Failure of a whole call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// The request was not sent: the target cannot be reached.
    #[error("the target cannot be reached: {0}")]
    Unreachable(#[source] TransportError),
    /// No response was received: the call may have been executed.
    #[error("the target did not respond")]
    NoAnswer,
    /// A response was received that does not show whether the call was executed.
    #[error("{0}")]
    Inconclusive(String),
    /// The target refused the call.
    #[error("the target refused the call: {0}")]
    Refused(#[source] Refusal),
    /// The target is overloaded and did nothing.
    #[error("the target is busy: {0}")]
    Busy(String),
}

/// A call that the target refused, or answered with a response that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    pub reason: RefusalReason,
    message: String,
}

impl Refusal {
    pub fn new(reason: RefusalReason, message: impl Into<String>) -> Refusal {
        Refusal { reason, message: message.into() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalReason {
    /// The target does not know the credentials.
    WrongCredentials,
    /// The credentials do not permit the call: the app lacks a grant.
    NotPermitted,
    /// The response is not of the expected form.
    InvalidResponse,
    Other,
}

impl RefusalReason {
    pub fn of(error: &CallError) -> RefusalReason {
        match error {
            CallError::Refused { status: 401, .. } => RefusalReason::WrongCredentials,
            CallError::Refused { code, .. } if *code == EnvelopeCode::NOT_ALLOWED.0 => {
                RefusalReason::NotPermitted
            }
            CallError::Refused { .. }
            | CallError::Unreachable(_)
            | CallError::Redirected { .. }
            | CallError::Unreadable(_)
            | CallError::NoAnswer(_) => RefusalReason::Other,
        }
    }
}

impl BackendError {
    /// Whether the call may have been executed.
    pub fn may_have_run(&self) -> bool {
        match self {
            BackendError::NoAnswer | BackendError::Inconclusive(_) => true,
            BackendError::Unreachable(_) | BackendError::Refused(_) | BackendError::Busy(_) => false,
        }
    }

    /// Whether the credentials do not permit the call.
    pub fn is_forbidden(&self) -> bool {
        matches!(self, BackendError::Refused(refusal) if refusal.reason == RefusalReason::NotPermitted)
    }

    /// A response that cannot be read.
    pub(crate) fn unreadable(response: &UnreadableResponse) -> BackendError {
        BackendError::Inconclusive(format!("cannot read the answer of the target: {response}"))
    }

    pub(crate) fn invalid_response(message: impl Into<String>) -> BackendError {
        BackendError::Refused(Refusal::new(RefusalReason::InvalidResponse, message))
    }
}
