//! Planning rules: capabilities of the target, owner, flags, holds and pauses.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::caps::Caps;
use super::constraints::DisruptionSet;
use crate::model::{
    Budgets, ControlHostPolicy, DEFAULT_OWNER, Hold, HoldReason, InstanceKey, Name, Pause, ProcessKey,
    Protection, RolloutProgress, Selection,
};

#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    pub caps: Caps,
    /// Owner name of this manifest set; instances with this owner label are owned.
    pub owner: String,
    /// Remove orphans.
    pub prune: bool,
    /// Adopt instances without an owner.
    pub adopt: bool,
    /// Limits of the whole plan. No delete limit: the greater of 1 and 10 % of the owned instances. No restart limit:
    /// unlimited.
    pub budgets: Budgets,
    /// Hold instances whose last report is older than this. `None`: no limit.
    pub stale_after_secs: Option<u64>,
    pub holds: HoldRules,
    /// Disruptions in flight by an earlier plan: they count towards the budgets.
    pub in_flight: BTreeMap<InstanceKey, DisruptionSet>,
    pub selection: Selection,
    pub orphans: OrphanRules,
    /// The policy of the control host.
    pub policy: Option<Arc<ControlHostPolicy>>,
    /// Decisions of persons on rollouts.
    pub rollouts: BTreeMap<ProcessKey, RolloutProgress>,
}

/// Instances that a plan leaves unchanged.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HoldRules {
    /// Holds of persons.
    pub manual: Vec<Hold>,
    /// Plan instances with a manual hold as if they had none.
    pub override_manual: bool,
    pub pauses: Vec<Pause>,
    /// Protections of live instances: they hold for an instance that no manifest declares any more.
    pub protections: BTreeMap<InstanceKey, Vec<Protection>>,
    /// Instances that the controller holds (backoff, suspension, in flight), with reason and detail.
    pub by_controller: BTreeMap<InstanceKey, (HoldReason, String)>,
    /// The reason of a person to plan past maintenance windows.
    pub break_glass: Option<String>,
}

/// Owned instances that count as orphans.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OrphanRules {
    /// Namespaces of earlier revisions: they may contain orphans although no manifest names them any more.
    pub known_namespaces: BTreeSet<Name>,
    /// Instances that another source of the owner declares: they are not orphans of this one.
    pub declared_elsewhere: BTreeSet<InstanceKey>,
    /// A manifest source could not be read: nothing is pruned, because a missing process may still be declared there.
    pub source_unreadable: bool,
}

impl Rules {
    /// The rules without any flag.
    pub fn new(caps: Caps) -> Rules {
        Rules {
            caps,
            owner: DEFAULT_OWNER.to_owned(),
            prune: false,
            adopt: false,
            budgets: Budgets::default(),
            stale_after_secs: None,
            holds: HoldRules::default(),
            in_flight: BTreeMap::new(),
            selection: Selection::default(),
            orphans: OrphanRules::default(),
            policy: None,
            rollouts: BTreeMap::new(),
        }
    }
}
