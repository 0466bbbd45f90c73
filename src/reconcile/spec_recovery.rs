//! Old specs of which only digests came back: which ones a plan would be better with, and whether a spec is one of them.
//!
//! Who holds older manifests (a git history, say) can be asked for exactly these. Nothing is guessed: a spec is taken for
//! what was given only if its digests on this target are those that the target tells.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::assess::TargetSpec;
use super::caps::Caps;
use crate::model::{
    Desired, DesiredInstance, HashedSpec, InstanceKey, KnownSpec, Observed, ObservedInstance, OnChange, Plan,
    SpecRevision,
};

/// Specs by the instances that they were given to and the digests that they were given under.
pub type OldSpecs = BTreeMap<(InstanceKey, SpecRevision), Arc<HashedSpec>>;

/// What a plan works on, or holds, without knowing more than digests of it. What is as wanted is known.
pub fn missing(
    plan: &Plan,
    desired: &Desired,
    observed: &Observed,
    caps: &Caps,
) -> BTreeSet<(InstanceKey, SpecRevision)> {
    let steps = plan.steps().flat_map(|step| [Some(&step.instance), step.from.as_ref()]).flatten();
    let touched = steps.chain(plan.held.iter().map(|held| &held.instance));
    let rows = touched.filter_map(|key| Some((key, observed.instances.get(key)?)));
    let digests = |seen: &ObservedInstance| [&seen.registered_spec, &seen.live].map(digests_alone);
    let all = rows.flat_map(|(key, seen)| digests(seen).into_iter().flatten().map(move |old| (key, old)));
    let as_wanted = |key: &InstanceKey, old: &SpecRevision| {
        desired.instances.get(key).is_some_and(|want| matches(want, old, caps))
    };
    all.filter(|(key, old)| !as_wanted(key, old)).map(|(key, old)| (key.clone(), old)).collect()
}

/// Is it this that was given under these digests? With or without the process's own word on its fields.
pub fn matches(want: &DesiredInstance, revision: &SpecRevision, caps: &Caps) -> bool {
    let under = |on_change: &OnChange| {
        *TargetSpec::new(&want.spec, want.origin.state, on_change, caps).revision() == *revision
    };
    under(&want.origin.on_change) || under(&OnChange::new())
}

/// Puts what was found in the place of digests.
pub fn fill_in(observed: &mut Observed, found: &OldSpecs) {
    if found.is_empty() {
        return;
    }
    for (key, seen) in &mut observed.instances {
        for version in [&mut seen.registered_spec, &mut seen.live] {
            if let Some(old) = digests_alone(version)
                && let Some(spec) = found.get(&(key.clone(), old))
            {
                *version = KnownSpec::Full(Arc::clone(spec));
            }
        }
    }
}

fn digests_alone(version: &KnownSpec) -> Option<SpecRevision> {
    match version {
        KnownSpec::Digests(revision) => Some(*revision),
        KnownSpec::Unknown | KnownSpec::Full(_) => None,
    }
}
