//! What will be done, and what not: complete, ordered, each with its reason. Carrying it out decides nothing.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Field, HashedSpec, Host, InstanceKey, ProcessKey, SourceLocation, SpecRevision};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// One after the other. Within one, the steps of an instance run in order and instances do not wait.
    pub waves: Vec<Wave>,
    /// Sorted by instance.
    pub held: Vec<HeldChange>,
    /// What people should know beside.
    pub notes: Vec<String>,
    /// Instances that are as they are wanted.
    pub in_sync: usize,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wave {
    pub steps: Vec<Step>,
    /// What must hold before the next wave begins, beside every chain having come to its end.
    pub gates: Vec<Gate>,
}

/// One operation on one instance.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Counts from 1 through the plan.
    pub id: usize,
    pub instance: InstanceKey,
    pub host: Host,
    pub op: Op,
    /// Which spec it works with.
    pub spec_side: SpecSide,
    /// That spec. `None`: the engine has it, or needs none.
    pub spec: Option<Arc<HashedSpec>>,
    /// The revision of the new spec, for the label that is read back later.
    pub revision: Option<SpecRevision>,
    /// Of a reload: the fields that take effect by it.
    pub reloaded_fields: Vec<Field>,
    pub pid_stays: bool,
    /// It may cost something that is there, or rests on a guess: the instance is looked at once more right before.
    pub needs_live_check: bool,
    /// The name that it was known by so far: the first such step takes over what is there. Where that name has steps
    /// of its own, they come first, and if one of them fails, these are skipped.
    pub from: Option<InstanceKey>,
    pub why: Vec<Why>,
}

/// Between two batches of a rollout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gate {
    pub process: ProcessKey,
    /// How long what was changed must stay healthy.
    pub soak_secs: u64,
    /// More failures than this end the rollout.
    pub max_failures: u64,
    pub auto_rollback: bool,
}

/// In the order that decides between ways of equal length and disturbance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    Stop,
    Register,
    Reload,
    Restart,
    Start,
    #[serde(rename = "host")]
    Supervise,
    #[serde(rename = "unhost")]
    Unsupervise,
    Unregister,
    /// In place of a stop that has no other command.
    Kill,
}

impl Op {
    pub const ALL: [Op; 9] = [
        Op::Start,
        Op::Stop,
        Op::Restart,
        Op::Reload,
        Op::Supervise,
        Op::Unsupervise,
        Op::Register,
        Op::Unregister,
        Op::Kill,
    ];

    pub fn word(self) -> &'static str {
        match self {
            Op::Stop => "stop",
            Op::Register => "register",
            Op::Reload => "reload",
            Op::Restart => "restart",
            Op::Start => "start",
            Op::Supervise => "host",
            Op::Unsupervise => "unhost",
            Op::Unregister => "unregister",
            Op::Kill => "kill",
        }
    }

    /// Does a running process keep its pid?
    pub fn pid_stays(self) -> bool {
        match self {
            Op::Register | Op::Reload | Op::Supervise | Op::Unsupervise => true,
            Op::Stop | Op::Restart | Op::Start | Op::Unregister | Op::Kill => false,
        }
    }

    /// Something that is there may be lost: it is looked at once more before.
    pub fn is_destructive(self) -> bool {
        match self {
            Op::Stop | Op::Kill | Op::Restart | Op::Unregister => true,
            Op::Register | Op::Reload | Op::Start | Op::Supervise | Op::Unsupervise => false,
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// Which spec an operation works with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SpecSide {
    New,
    Old,
}

impl SpecSide {
    pub fn word(self) -> &'static str {
        match self {
            SpecSide::New => "new",
            SpecSide::Old => "old",
        }
    }
}

/// The difference that asks for a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Why {
    pub rule: Rule,
    /// What differs, down to the key of a map or the entry of a list.
    pub field: Option<String>,
    /// As it may be shown: a secret is a digest here. `None`: it was not there, or is not known.
    pub old: Option<String>,
    pub new: Option<String>,
    pub at: Option<SourceLocation>,
}

/// In a word what differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// Wanted, and the engine does not know it.
    NotRegistered,
    /// Wanted running, and it does not run.
    NotRunning,
    /// Wanted guarded, and nobody guards it.
    NotHosted,
    /// Wanted unguarded, and it is guarded.
    Hosted,
    /// A field differs from what the engine holds.
    GivenDiffers,
    /// A field differs from what is in effect in the process.
    LiveDiffers,
    /// It is not known how what runs or is held differs: only digests tell, or nothing.
    SpecUnknown,
    /// A one-shot that has not run as it is wanted.
    NotRun,
    /// Wanted stopped, and it runs or is guarded.
    StateStopped,
    /// Wanted absent, and it is there.
    StateAbsent,
    /// Ours, and no manifest wants it any more.
    Orphan,
    /// Not ours yet.
    Adopted,
    /// Known under another name so far.
    Moved,
}

impl Rule {
    pub fn word(self) -> &'static str {
        match self {
            Rule::NotRegistered => "NotRegistered",
            Rule::NotRunning => "NotRunning",
            Rule::NotHosted => "NotHosted",
            Rule::Hosted => "Hosted",
            Rule::GivenDiffers => "GivenDiffers",
            Rule::LiveDiffers => "LiveDiffers",
            Rule::SpecUnknown => "SpecUnknown",
            Rule::NotRun => "NotRun",
            Rule::StateStopped => "StateStopped",
            Rule::StateAbsent => "StateAbsent",
            Rule::Orphan => "Orphan",
            Rule::Adopted => "Adopted",
            Rule::Moved => "Moved",
        }
    }
}

/// A difference left alone.
#[derive(Clone, Debug, PartialEq)]
pub struct HeldChange {
    pub instance: InstanceKey,
    pub reason: HoldReason,
    /// A sentence for the person who asks why.
    pub detail: String,
    /// What would be done otherwise, where that is known.
    pub steps: Vec<Op>,
    pub why: Vec<Why>,
    pub at: Option<SourceLocation>,
}

/// Why a difference is left alone. The words are a contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HoldReason {
    HostUnknown,
    Stale,
    Hold,
    Paused,
    Protected,
    NotOwned,
    OutsideWindow,
    DeleteBudget,
    RestartBudget,
    WaitingForDependency,
    IdentityMix,
    Unsupported,
    NoStopCommand,
    RunInProgress,
    RunUnknown,
    AgentRelaunching,
    OldSpecUnknown,
    MoveUnsupported,
    BackingOff,
    NotConverging,
    RolledBack,
    /// An earlier plan for it is being carried out.
    UnderWay,
    /// Drift is not repaired.
    HealOff,
    /// The manifests are not followed.
    FollowOff,
    SourceUnreadable,
}

impl HoldReason {
    /// It may pass by itself, without anybody deciding anything.
    pub fn is_transient(self) -> bool {
        match self {
            HoldReason::HostUnknown
            | HoldReason::Stale
            | HoldReason::OutsideWindow
            | HoldReason::DeleteBudget
            | HoldReason::RestartBudget
            | HoldReason::WaitingForDependency
            | HoldReason::RunInProgress
            | HoldReason::AgentRelaunching
            | HoldReason::BackingOff
            | HoldReason::UnderWay
            | HoldReason::SourceUnreadable => true,
            HoldReason::Hold
            | HoldReason::Paused
            | HoldReason::Protected
            | HoldReason::NotOwned
            | HoldReason::IdentityMix
            | HoldReason::Unsupported
            | HoldReason::NoStopCommand
            | HoldReason::RunUnknown
            | HoldReason::OldSpecUnknown
            | HoldReason::MoveUnsupported
            | HoldReason::NotConverging
            | HoldReason::RolledBack
            | HoldReason::HealOff
            | HoldReason::FollowOff => false,
        }
    }

    /// How it is could not be seen, or not lately.
    pub fn is_unknown(self) -> bool {
        matches!(self, HoldReason::HostUnknown | HoldReason::Stale)
    }

    pub fn word(self) -> &'static str {
        match self {
            HoldReason::HostUnknown => "HostUnknown",
            HoldReason::Stale => "Stale",
            HoldReason::Hold => "Hold",
            HoldReason::Paused => "Paused",
            HoldReason::Protected => "Protected",
            HoldReason::NotOwned => "NotOwned",
            HoldReason::OutsideWindow => "OutsideWindow",
            HoldReason::DeleteBudget => "DeleteBudget",
            HoldReason::RestartBudget => "RestartBudget",
            HoldReason::WaitingForDependency => "WaitingForDependency",
            HoldReason::IdentityMix => "IdentityMix",
            HoldReason::Unsupported => "Unsupported",
            HoldReason::NoStopCommand => "NoStopCommand",
            HoldReason::RunInProgress => "RunInProgress",
            HoldReason::RunUnknown => "RunUnknown",
            HoldReason::AgentRelaunching => "AgentRelaunching",
            HoldReason::OldSpecUnknown => "OldSpecUnknown",
            HoldReason::MoveUnsupported => "MoveUnsupported",
            HoldReason::BackingOff => "BackingOff",
            HoldReason::NotConverging => "NotConverging",
            HoldReason::RolledBack => "RolledBack",
            HoldReason::UnderWay => "UnderWay",
            HoldReason::HealOff => "HealOff",
            HoldReason::FollowOff => "FollowOff",
            HoldReason::SourceUnreadable => "SourceUnreadable",
        }
    }
}

impl Plan {
    pub fn steps(&self) -> impl Iterator<Item = &Step> {
        self.waves.iter().flat_map(|wave| &wave.steps)
    }

    /// Neither something to do nor something left alone.
    pub fn is_empty(&self) -> bool {
        self.waves.is_empty() && self.held.is_empty()
    }
}
