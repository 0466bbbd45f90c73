//! The nouns. Plain data: ordered, comparable, no I/O, no clock, and nothing here knows any other room.

mod desired;
mod effect;
mod field;
mod key;
mod revision;
mod selector;
mod spec;
mod value;

pub use desired::{
    Allow, Amount, Budgets, Days, Desired, Guard, Operation, Origin, Place, Policy, Rollout, State,
    TimeOfDay, Want, Window,
};
pub use effect::{Effect, OnChange};
pub use field::Field;
pub use key::{AgentId, Host, HostKey, InstanceKey, KeyError, Name, ProcessKey};
pub use revision::{ParseRevisionError, Revision};
pub use selector::{Selector, SelectorError};
pub use spec::{
    AutoType, ConfigFile, Control, EnvValue, Identity, Job, Monitor, Percent, Resource, Secret, Spec,
    StartMode,
};
pub use value::{Env, Value};
