//! Plan: all steps in order and all held changes, each with its reasons. Execution makes no further decision.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{Field, HashedSpec, Host, InstanceKey, ProcessKey, RolloutPause, SourceLocation, SpecRevision};

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Executed one after another. Within a wave, the steps of one instance run in order; instances are independent.
    pub waves: Vec<Wave>,
    /// Sorted by instance.
    pub held: Vec<HeldChange>,
    /// Notes for the operator.
    pub notes: Vec<String>,
    /// Number of instances that are in sync.
    pub in_sync: usize,
    /// Rollouts that wait for a promotion.
    pub pauses: Vec<RolloutPause>,
    /// Versions whose rollout was aborted before this plan: its steps are no part of them.
    pub aborted: BTreeMap<ProcessKey, String>,
    /// Number of owned instances in no manifest that stay because pruning is off.
    pub orphans: usize,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wave {
    pub steps: Vec<Step>,
    /// Conditions for the next wave, in addition to the end of every chain.
    pub gates: Vec<Gate>,
}

/// One operation on one instance.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Numbered from 1 in plan order.
    pub id: usize,
    pub instance: InstanceKey,
    pub host: Host,
    pub op: Op,
    /// The spec that the step works with.
    pub spec_side: SpecSide,
    /// That spec. `None`: the engine knows it, or needs none.
    pub spec: Option<Arc<HashedSpec>>,
    /// Revision of the new spec, for the `abide_rev` label.
    pub revision: Option<SpecRevision>,
    /// The fields that take effect with a reload.
    pub reloaded_fields: Vec<Field>,
    pub pid_stays: bool,
    /// A live check precedes the step: it is destructive, or rests on an assumption.
    pub needs_live_check: bool,
    /// The earlier name of a moved instance: the first such step takes it over. Steps of the earlier name itself run
    /// first; if one of them fails, these are skipped.
    pub from: Option<InstanceKey>,
    pub why: Vec<Reason>,
}

/// Condition between two batches of a rollout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gate {
    pub process: ProcessKey,
    /// Time for which the changed instances must stay healthy.
    pub soak_secs: u64,
    /// More failures than this end the rollout.
    pub max_failures: u64,
    pub auto_rollback: bool,
}

/// In the order that decides between plans of equal length and disturbance.
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
    /// Replaces a stop where the spec has only a kill_cmd.
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

    /// Whether a running process keeps its pid.
    pub fn pid_stays(self) -> bool {
        match self {
            Op::Register | Op::Reload | Op::Supervise | Op::Unsupervise => true,
            Op::Stop | Op::Restart | Op::Start | Op::Unregister | Op::Kill => false,
        }
    }

    /// Whether the operation ends a process or a registration; a live check precedes it.
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

/// The spec that an operation uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SpecSide {
    New,
    Old,
}

impl SpecSide {
    pub const ALL: [SpecSide; 2] = [SpecSide::New, SpecSide::Old];

    pub fn word(self) -> &'static str {
        match self {
            SpecSide::New => "new",
            SpecSide::Old => "old",
        }
    }
}

/// The reason of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason {
    pub rule: Rule,
    /// The field that differs, down to the key of a map or the entry of a list.
    pub field: Option<String>,
    /// Redacted: a secret is a digest here. `None`: unset, or unknown.
    pub old: Option<String>,
    pub new: Option<String>,
    pub at: Option<SourceLocation>,
}

/// Kind of difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rule {
    /// Wanted, and not registered.
    NotRegistered,
    /// Wanted running, and not running.
    NotRunning,
    /// Wanted supervised, and not supervised.
    NotHosted,
    /// Wanted unsupervised, and supervised.
    Hosted,
    /// A field differs from the registered spec.
    GivenDiffers,
    /// A field differs from the spec in effect in the process.
    LiveDiffers,
    /// The fields that differ are unknown: the target reports digests only, or nothing.
    SpecUnknown,
    /// A one-shot that has not run with the wanted spec.
    NotRun,
    /// Wanted stopped, and running or supervised.
    StateStopped,
    /// Wanted absent, and present.
    StateAbsent,
    /// Owned, and no longer in any manifest.
    Orphan,
    /// Not owned yet; adopted by this step.
    Adopted,
    /// Moved from an earlier name.
    Moved,
}

impl Rule {
    pub const ALL: [Rule; 13] = [
        Rule::NotRegistered,
        Rule::NotRunning,
        Rule::NotHosted,
        Rule::Hosted,
        Rule::GivenDiffers,
        Rule::LiveDiffers,
        Rule::SpecUnknown,
        Rule::NotRun,
        Rule::StateStopped,
        Rule::StateAbsent,
        Rule::Orphan,
        Rule::Adopted,
        Rule::Moved,
    ];

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

/// A difference that the plan does not act on.
#[derive(Clone, Debug, PartialEq)]
pub struct HeldChange {
    pub instance: InstanceKey,
    pub reason: HoldReason,
    /// Explanation for the operator.
    pub detail: String,
    /// The steps that are held, where known.
    pub steps: Vec<Op>,
    pub why: Vec<Reason>,
    pub at: Option<SourceLocation>,
}

/// Reason why a difference is held. The words are stable.
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
    /// The key of the digests of its secrets is unknown, so that they cannot be compared.
    SecretKeyUnknown,
    MoveUnsupported,
    BackingOff,
    NotConverging,
    RolledBack,
    /// An earlier plan for the instance is in flight.
    UnderWay,
    /// `--heal no`: drift is not repaired.
    HealOff,
    /// `--follow no`: manifest changes are not applied.
    FollowOff,
    SourceUnreadable,
    /// The policy of the control host does not allow it.
    PolicyViolated,
    /// The rollout waits for `abide rollout promote`.
    AwaitingPromotion,
    /// A person aborted the rollout of this version.
    RolloutAborted,
    /// Too many instances of the group are unavailable already.
    MaxUnavailable,
}

impl HoldReason {
    pub const ALL: [HoldReason; 30] = [
        HoldReason::HostUnknown,
        HoldReason::Stale,
        HoldReason::Hold,
        HoldReason::Paused,
        HoldReason::Protected,
        HoldReason::NotOwned,
        HoldReason::OutsideWindow,
        HoldReason::DeleteBudget,
        HoldReason::RestartBudget,
        HoldReason::WaitingForDependency,
        HoldReason::IdentityMix,
        HoldReason::Unsupported,
        HoldReason::NoStopCommand,
        HoldReason::RunInProgress,
        HoldReason::RunUnknown,
        HoldReason::AgentRelaunching,
        HoldReason::OldSpecUnknown,
        HoldReason::SecretKeyUnknown,
        HoldReason::MoveUnsupported,
        HoldReason::BackingOff,
        HoldReason::NotConverging,
        HoldReason::RolledBack,
        HoldReason::UnderWay,
        HoldReason::HealOff,
        HoldReason::FollowOff,
        HoldReason::SourceUnreadable,
        HoldReason::PolicyViolated,
        HoldReason::AwaitingPromotion,
        HoldReason::RolloutAborted,
        HoldReason::MaxUnavailable,
    ];

    /// Whether the reason can end without a decision of a person.
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
            | HoldReason::SourceUnreadable
            | HoldReason::MaxUnavailable => true,
            HoldReason::Hold
            | HoldReason::Paused
            | HoldReason::Protected
            | HoldReason::NotOwned
            | HoldReason::IdentityMix
            | HoldReason::Unsupported
            | HoldReason::NoStopCommand
            | HoldReason::RunUnknown
            | HoldReason::OldSpecUnknown
            | HoldReason::SecretKeyUnknown
            | HoldReason::MoveUnsupported
            | HoldReason::NotConverging
            | HoldReason::RolledBack
            | HoldReason::HealOff
            | HoldReason::FollowOff
            | HoldReason::PolicyViolated
            | HoldReason::AwaitingPromotion
            | HoldReason::RolloutAborted => false,
        }
    }

    /// Whether the state is unknown or stale.
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
            HoldReason::SecretKeyUnknown => "SecretKeyUnknown",
            HoldReason::MoveUnsupported => "MoveUnsupported",
            HoldReason::BackingOff => "BackingOff",
            HoldReason::NotConverging => "NotConverging",
            HoldReason::RolledBack => "RolledBack",
            HoldReason::UnderWay => "UnderWay",
            HoldReason::HealOff => "HealOff",
            HoldReason::FollowOff => "FollowOff",
            HoldReason::SourceUnreadable => "SourceUnreadable",
            HoldReason::PolicyViolated => "PolicyViolated",
            HoldReason::AwaitingPromotion => "AwaitingPromotion",
            HoldReason::RolloutAborted => "RolloutAborted",
            HoldReason::MaxUnavailable => "MaxUnavailable",
        }
    }
}

impl Plan {
    pub fn steps(&self) -> impl Iterator<Item = &Step> {
        self.waves.iter().flat_map(|wave| &wave.steps)
    }

    /// Whether there are neither steps nor held changes.
    pub fn is_empty(&self) -> bool {
        self.waves.is_empty() && self.held.is_empty()
    }
}
