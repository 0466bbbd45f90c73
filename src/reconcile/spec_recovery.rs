//! Spec recovery: old specs of which the target reports digests only.
//!
//! [`missing`] lists the digests that a plan needs; a caller with older manifests (a git history, say) searches for them.
//! A recovered spec is accepted only if its digests on this target equal the reported ones.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::assess::TargetSpec;
use super::caps::Caps;
use crate::model::{
    Desired, DesiredInstance, HashedSpec, InstanceKey, KnownSpec, Observed, ObservedInstance, OnChange, Plan,
    SpecRevision,
};

/// Recovered specs by instance and reported digests.
pub type OldSpecs = BTreeMap<(InstanceKey, SpecRevision), Arc<HashedSpec>>;

/// The digests of instances with steps or held changes whose spec is unknown. The wanted spec is known.
pub fn missing(
    plan: &Plan,
    desired: &Desired,
    observed: &Observed,
    caps: &Caps,
) -> BTreeSet<(InstanceKey, SpecRevision)> {
    let steps = plan.steps().flat_map(|step| [Some(&step.instance), step.from.as_ref()]).flatten();
    let touched = steps.chain(plan.held.iter().map(|held| &held.instance));
    let rows = touched.filter_map(|key| Some((key, observed.instances.get(key)?)));
    let digests = |seen: &ObservedInstance| [&seen.specs.registered, &seen.specs.live].map(digests_alone);
    let all = rows.flat_map(|(key, seen)| digests(seen).into_iter().flatten().map(move |old| (key, old)));
    let as_wanted = |key: &InstanceKey, old: &SpecRevision| {
        desired.instances.get(key).is_some_and(|want| matches(want, old, caps))
    };
    all.filter(|(key, old)| !as_wanted(key, old)).map(|(key, old)| (key.clone(), old)).collect()
}

/// Whether a desired instance has these digests, with or without its `on_change`.
pub fn matches(want: &DesiredInstance, revision: &SpecRevision, caps: &Caps) -> bool {
    let under = |on_change: &OnChange| {
        *TargetSpec::new(&want.spec, want.origin.state, on_change, caps).revision() == *revision
    };
    under(&want.origin.on_change) || under(&OnChange::new())
}

/// Replaces digests by recovered specs.
pub fn fill_in(observed: &mut Observed, found: &OldSpecs) {
    if found.is_empty() {
        return;
    }
    for (key, seen) in &mut observed.instances {
        for version in [&mut seen.specs.registered, &mut seen.specs.live] {
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
