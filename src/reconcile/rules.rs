//! Planning rules: capabilities of the target, owner, flags, holds and pauses.

use std::collections::{BTreeMap, BTreeSet};

use super::caps::Caps;
use super::constraints::DisruptionSet;
use crate::model::{Amount, Hold, HoldReason, InstanceKey, Name, Pause, Selection};

#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    pub caps: Caps,
    /// Owner name of this manifest set; instances with this owner label are owned.
    pub owner: String,
    /// Remove orphans.
    pub prune: bool,
    /// Adopt instances without an owner.
    pub adopt: bool,
    /// `None`: the default, the greater of 1 and 10 % of the owned instances.
    pub max_delete: Option<Amount>,
    /// `None`: unlimited.
    pub max_restart: Option<Amount>,
    pub override_holds: bool,
    /// Hold instances whose last report is older than this. `None`: no limit.
    pub stale_after_secs: Option<u64>,
    pub holds: Vec<Hold>,
    pub pauses: Vec<Pause>,
    /// Instances that the controller holds (backoff, suspension, in flight), with reason and detail.
    pub left_alone: BTreeMap<InstanceKey, (HoldReason, String)>,
    /// Disruptions in flight by an earlier plan: they count towards the budgets.
    pub under_way: BTreeMap<InstanceKey, DisruptionSet>,
    pub selection: Selection,
    /// Namespaces of earlier revisions: they may contain orphans although no manifest names them any more.
    pub known_namespaces: BTreeSet<Name>,
    /// A manifest source could not be read: nothing is pruned, because a missing process may still be declared there.
    pub source_unreadable: bool,
}

impl Rules {
    /// The rules without any flag.
    pub fn new(caps: Caps) -> Rules {
        Rules {
            caps,
            owner: "default".to_owned(),
            prune: false,
            adopt: false,
            max_delete: None,
            max_restart: None,
            override_holds: false,
            stale_after_secs: None,
            holds: Vec::new(),
            pauses: Vec::new(),
            left_alone: BTreeMap::new(),
            under_way: BTreeMap::new(),
            selection: Selection::default(),
            known_namespaces: BTreeSet::new(),
            source_unreadable: false,
        }
    }
}
