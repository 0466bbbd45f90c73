//! The window on the world: what there is, and operations on it.
//!
//! A backend looks and does, and decides nothing. It speaks for one target; what that target can do follows from its
//! dialect. There are [`Abide`], our own gateway, and [`sim`], a fleet in memory.

mod abide;
pub mod sim;

pub use abide::{Abide, HostRow};

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::model::{Dialect, Field, Host, InstanceKey, Observed, Op, Revision, Stamped, Step};

pub trait Backend: Send + Sync {
    fn dialect(&self) -> Dialect;

    /// Looks at everything. A host that cannot be seen is a gap, not an error.
    fn observe(&self) -> impl Future<Output = Result<Observed, Fault>> + Send;

    /// Sends operations, each complete in itself, and returns what to ask for their results by.
    /// Under the same name a call is carried out once, where the target knows names.
    fn submit(&self, call: &str, orders: &[Order]) -> impl Future<Output = Result<Task, Fault>> + Send;

    /// What is known of them now. A row may be missing, or stay in progress for ever; each stands for itself.
    fn poll(&self, task: &Task) -> impl Future<Output = Result<Vec<Answer>, Fault>> + Send;
}

/// One operation on its way out.
#[derive(Clone, Debug, PartialEq)]
pub struct Order {
    /// The same for the same operation, however often it is sent.
    pub id: String,
    pub owner: String,
    pub instance: InstanceKey,
    pub host: Host,
    pub op: Op,
    pub spec: Option<Arc<Stamped>>,
    pub revision: Option<Revision>,
    /// Of a reload: the fields that take effect by it.
    pub takes: Vec<Field>,
    /// The name that it was known by.
    pub from: Option<InstanceKey>,
}

impl Order {
    pub fn of(step: &Step, id: String, owner: &str) -> Order {
        Order {
            id,
            owner: owner.to_owned(),
            instance: step.instance.clone(),
            host: step.host.clone(),
            op: step.op,
            spec: step.spec.clone(),
            revision: step.revision,
            takes: step.takes.clone(),
            from: step.from.clone(),
        }
    }
}

/// What to ask for results by.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Task {
    pub ids: Vec<String>,
    /// What was answered at once.
    pub answered: Vec<Answer>,
    /// Which order each of the others stands for.
    pub rows: BTreeMap<InstanceKey, String>,
}

/// How one operation stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    pub order: String,
    pub instance: InstanceKey,
    pub result: Outcome,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    InProgress,
    Done,
    Failed { code: i64, message: String },
}

/// Why a call as a whole came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It never left: nobody was there.
    Unreachable(String),
    /// No answer came: it may have been done, or not.
    NoAnswer,
    /// The target answered, and refuses.
    Refused(String),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Unreachable(why) => write!(f, "the target cannot be reached: {why}"),
            Fault::NoAnswer => f.write_str("the target did not answer"),
            Fault::Refused(why) => write!(f, "the target refuses: {why}"),
        }
    }
}

impl std::error::Error for Fault {}
