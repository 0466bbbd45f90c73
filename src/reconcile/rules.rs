//! What decides beside the manifests and the world: the target's abilities, whose set this is, what was allowed.

use std::collections::{BTreeMap, BTreeSet};

use super::caps::Caps;
use super::constraints::DisruptionSet;
use crate::model::{Amount, Hold, HoldReason, InstanceKey, Name, Pause, Selection};

#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    pub caps: Caps,
    /// The name of this set: what carries it is ours.
    pub owner: String,
    /// Remove what is ours and no longer wanted.
    pub prune: bool,
    /// Take over what nobody owns.
    pub adopt: bool,
    /// `None`: the default, the greater of 1 and 10 % of what is ours.
    pub max_delete: Option<Amount>,
    /// `None`: as many as it takes.
    pub max_restart: Option<Amount>,
    pub override_holds: bool,
    /// What was reported longer ago than this before the look is not acted on. `None`: age does not count.
    pub stale_after_secs: Option<u64>,
    pub holds: Vec<Hold>,
    pub pauses: Vec<Pause>,
    /// What whoever carries plans out leaves alone for now, and why.
    pub left_alone: BTreeMap<InstanceKey, (HoldReason, String)>,
    /// What he is still doing by an earlier plan: it counts for the budgets.
    pub under_way: BTreeMap<InstanceKey, DisruptionSet>,
    pub selection: Selection,
    /// Namespaces in which there may be orphans though no manifest speaks of them any more.
    pub known_namespaces: BTreeSet<Name>,
    /// Some source could not be read: what is missing may only be unread, so nothing is pruned.
    pub source_unreadable: bool,
}

impl Rules {
    /// As without any flag.
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
