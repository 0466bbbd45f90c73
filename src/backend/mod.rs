//! The window on the world: what there is, and operations on it.
//!
//! A backend looks and does, and decides nothing. It speaks for one target; what that target can do follows from its
//! dialect. There are [`Abide`], our own gateway, [`Platform`], BlueKing's GSE and JOB, and [`sim`], a fleet in memory;
//! [`AnyBackend`] is one of the first two.

mod abide;
mod any;
mod change_stream;
mod live_check;
mod platform;
pub mod sim;

pub use abide::{Abide, HostRow};
pub use any::AnyBackend;
pub use change_stream::{ChangeEvent, ChangeStream};
pub use platform::{Business, Pace, Platform};

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock;
use crate::model::{
    Dialect, Field, HashedSpec, Host, HostKey, InstanceKey, Name, Observed, Op, SpecRevision, Step, Time,
};

pub trait Backend: Send + Sync {
    fn dialect(&self) -> Dialect;

    /// This moment.
    fn now(&self) -> Time {
        clock::now()
    }

    /// Looks, at least at what is in scope. A host that cannot be seen is a gap, not an error.
    fn observe(&self, scope: &Scope) -> impl Future<Output = Result<Observed, BackendError>> + Send;

    /// Looks, and tells of every change from there on, where the target can.
    fn follow(
        &self,
        scope: &Scope,
    ) -> impl Future<Output = Result<(Observed, Option<ChangeStream>), BackendError>> + Send {
        async { Ok((self.observe(scope).await?, None)) }
    }

    /// What changes do not tell: the number that they have reached at the target, and of these hosts those that cannot be
    /// looked at.
    fn watermark(
        &self,
        _hosts: &BTreeSet<HostKey>,
    ) -> impl Future<Output = Result<Watermark, BackendError>> + Send {
        async { Ok(Watermark::default()) }
    }

    /// Looks at a few as they are this very moment. The facts count; specs may be missing.
    fn observe_live(
        &self,
        subjects: &[InstanceQuery],
    ) -> impl Future<Output = Result<Observed, BackendError>> + Send {
        async move { self.observe(&Scope::of(subjects.to_vec())).await }
    }

    /// The same by operation 2, which finds a process by its identity, also one that no list shows.
    fn check_live(
        &self,
        subjects: &[InstanceQuery],
    ) -> impl Future<Output = Result<Observed, BackendError>> + Send {
        self.observe_live(subjects)
    }

    /// What goes into one call each. An order that is sent is in exactly one of them.
    fn batches(&self, orders: Vec<Operation>) -> Vec<Vec<Operation>> {
        if orders.is_empty() { Vec::new() } else { vec![orders] }
    }

    /// From the first question about a task to the slowest pace of asking.
    fn poll_interval(&self) -> (Duration, Duration) {
        (Duration::from_millis(10), Duration::from_secs(1))
    }

    /// How many calls may be under way at once.
    fn max_concurrent_calls(&self) -> usize {
        8
    }

    /// Is a call that comes twice under one name carried out once?
    fn has_idempotency_keys(&self) -> bool {
        false
    }

    /// What became of a call that somebody made before, by its name; `None`: it was never taken on.
    fn find_task(
        &self,
        _call: &str,
        _instances: &[InstanceKey],
    ) -> impl Future<Output = Result<Option<Task>, BackendError>> + Send {
        async { Ok(None) }
    }

    /// Sends operations, each complete in itself, and returns what to ask for their results by.
    /// Under the same name a call is carried out once, where the target knows names.
    fn submit(
        &self,
        call: &str,
        orders: &[Operation],
    ) -> impl Future<Output = Result<Task, BackendError>> + Send;

    /// What is known of them now. A row may be missing, or stay in progress for ever; each stands for itself.
    fn poll(&self, task: &Task) -> impl Future<Output = Result<Vec<OperationStatus>, BackendError>> + Send;
}

/// How far a target has come; see [`Backend::mark`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Watermark {
    pub number: u64,
    pub gaps: BTreeMap<HostKey, String>,
}

/// One operation on its way out.
#[derive(Clone, Debug, PartialEq)]
pub struct Operation {
    /// The same for the same operation, however often it is sent.
    pub id: String,
    /// `None`: it is nobody's, and stays so.
    pub owner: Option<String>,
    pub instance: InstanceKey,
    pub host: Host,
    pub op: Op,
    pub spec: Option<Arc<HashedSpec>>,
    pub revision: Option<SpecRevision>,
    /// Of a reload: the fields that take effect by it.
    pub reloaded_fields: Vec<Field>,
    /// The name that it was known by.
    pub from: Option<InstanceKey>,
    /// Is it registered, as far as was seen?
    pub registered: bool,
    /// Is it the owner's already, by its label or the ledger?
    pub owned: bool,
}

/// Under which name the nth rename of a call goes out: each is a task of its own.
pub fn name_of_move(call: &str, nth: usize) -> String {
    format!("{call}.m{nth}")
}

impl Operation {
    /// Is it known by another name from now on?
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
            registered: false,
            owned: false,
        }
    }
}

/// An instance that somebody wants to know about.
#[derive(Clone, Debug, PartialEq)]
pub struct InstanceQuery {
    pub instance: InstanceKey,
    pub host: Host,
    /// What it is likely to be, where the target knows processes by what they are.
    pub spec: Option<Arc<HashedSpec>>,
}

/// What is looked at.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scope {
    pub subjects: Vec<InstanceQuery>,
    /// Everything in these counts, not only what is named above.
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

/// What to ask for results by.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Task {
    pub ids: Vec<String>,
    /// What was answered at once.
    #[serde(skip)]
    pub answered: Vec<OperationStatus>,
    /// Which order each of the others stands for.
    pub rows: BTreeMap<InstanceKey, String>,
    /// Under which key a result is found, where that does not follow from the instance.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub keys: BTreeMap<InstanceKey, String>,
}

/// How one operation stands.
#[derive(Clone, Debug, PartialEq)]
pub struct OperationStatus {
    pub order: String,
    pub instance: InstanceKey,
    pub result: OperationState,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OperationState {
    InProgress,
    Done,
    Failed { code: i64, message: String },
}

/// Why a call as a whole came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackendError {
    /// It never left: nobody was there.
    Unreachable(String),
    /// No answer came: it may have been done, or not.
    NoAnswer,
    /// The target answered, and refuses.
    Refused(String),
    /// The target cannot just now, and did nothing.
    Busy(String),
}

impl fmt::Display for BackendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BackendError::Unreachable(why) => write!(f, "the target cannot be reached: {why}"),
            BackendError::NoAnswer => f.write_str("the target did not answer"),
            BackendError::Refused(why) => write!(f, "the target refuses: {why}"),
            BackendError::Busy(why) => write!(f, "the target is busy: {why}"),
        }
    }
}

impl std::error::Error for BackendError {}
