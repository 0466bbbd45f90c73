//! The nouns. Plain data: ordered, comparable, no I/O, no clock, and nothing here knows any other room.

mod classes;
mod desired;
mod dialect;
mod effect;
mod field;
mod hold;
mod key;
mod observed;
mod plan;
mod revision;
mod selection;
mod selector;
mod spec;
mod stamped;
mod time;
mod value;

pub use classes::{Classes, base_effect, effect_of};
pub use desired::{
    Allow, Amount, Budgets, Days, Desired, Guard, Operation, Origin, Place, Policy, Rollout, State,
    TimeOfDay, Want, Window,
};
pub use dialect::Dialect;
pub use effect::{Effect, OnChange};
pub use field::Field;
pub use hold::{Hold, Pause};
pub use key::{AgentId, Host, HostKey, InstanceKey, KeyError, Name, ProcessKey};
pub use observed::{Health, Observed, Present, Runs, Seen, Sighting, Version};
pub use plan::{Gate, Held, Op, Plan, Reason, Rule, Step, Wave, Which, Why};
pub use revision::{ParseRevisionError, Revision};
pub use selection::{Selection, glob};
pub use selector::{Selector, SelectorError};
pub use spec::{
    AutoType, ConfigFile, Control, EnvValue, Identity, Job, Monitor, Percent, Resource, Secret, Spec,
    StartMode, secret_digest,
};
pub use stamped::Stamped;
pub use time::{Now, Time, seconds, span};
pub use value::{Env, Value};
