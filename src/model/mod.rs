//! Domain types: keys, specs, desired and observed state, plans. Plain, ordered, comparable data.
//!
//! No I/O, no clock, and no dependency on any other module.

mod control_host_policy;
mod count;
mod desired;
mod dialect;
mod digest_key;
mod effect;
mod effects;
mod field;
mod hashed_spec;
mod hold;
mod key;
mod live_spec;
mod manifest_revision;
mod observed;
mod outcome;
mod plan;
mod rollout;
mod sandbox;
mod selection;
mod selector;
mod spec;
mod spec_revision;
mod supervision;
mod text_digest;
mod time;
mod value;

pub use control_host_policy::{ControlHostPolicy, SignatureRule};
pub use count::{count, noun_for};
pub use desired::{
    Allow, Amount, Budgets, DEFAULT_OWNER, Days, DeclaredProcess, Desired, DesiredInstance, Disruption,
    Policy, Protection, SourceLocation, State, TimeOfDay, Window,
};
pub use dialect::Dialect;
pub use digest_key::{DigestKey, DigestKeyRef};
pub use effect::{Effect, OnChange};
pub use effects::{EffectTable, base_effect, effect_of};
pub use field::Field;
pub use hashed_spec::HashedSpec;
pub use hold::{Hold, Pause};
pub use key::{AgentId, Host, HostKey, InstanceKey, KeyError, Name, ProcessKey};
pub use live_spec::{SpecAndRevision, difference, live_after_registration};
pub use manifest_revision::ManifestRevision;
pub use observed::{
    Health, KnownSpec, LastRun, Observed, ObservedInstance, ObservedSpecs, Presence, Present, RunningProcess,
};
pub use outcome::{StepOutcome, SyncStatus};
pub use plan::{Gate, HeldChange, HoldReason, Op, Plan, Reason, Rule, SpecSide, Step, Wave};
pub use rollout::{Rollout, RolloutGroup, RolloutPause, RolloutProgress};
pub use sandbox::{
    ProtectSystem, Sandbox, SandboxProblem, ULIMITS, Ulimit, capability_names, capability_number, octal_mask,
    ulimit_number,
};
pub use selection::{Selection, glob};
pub use selector::{Selector, SelectorError};
pub use spec::{
    AutoType, ConfigFile, Control, EnvValue, Identity, Job, Monitor, Percent, Resource, Secret, Spec,
    StartMode, secret_digest,
};
pub use spec_revision::{ParseSpecRevisionError, SpecRevision};
pub use supervision::{
    AbsoluteLimits, Cores, HealthCheck, HealthProblem, Hook, HookProblem, Hooks, LogRotation, OnHookFailure,
    RestartPolicy, RestartWhen, SIGNALS, SectionParts, SpecSection, bytes, signal_number,
};
pub use text_digest::TextDigest;
pub use time::{Now, Time, seconds, span};
pub use value::{Env, Value};
