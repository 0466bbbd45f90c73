//! Plan fingerprint: a digest of all inputs of a plan, so that a saved plan is executed only if they have not changed.
//!
//! Pids and times are excluded: they differ between two observations of the same state.

use std::collections::BTreeSet;

use super::rules::Rules;
use crate::model::{
    InstanceKey, KnownSpec, LastRun, ManifestRevision, Observed, ObservedInstance, ObservedSpecs, Plan,
    SpecRevision, TextDigest,
};

/// Covers Desired and policies (by the manifest revision), rules and, for every instance with a step or
/// held, its facts, specs and owner.
pub fn fingerprint(
    revision: &ManifestRevision,
    observed: &Observed,
    rules: &Rules,
    target: &str,
    plan: &Plan,
) -> String {
    let mut digest = TextDigest::default();
    let mut put = |text: &str| digest.put(text);
    put(revision.as_str());
    put(target);
    // The policy of a control host is not an input of the plan: what it forbids has no steps.
    let mut inputs = Rules { policy: None, ..rules.clone() };
    if !rules.prune {
        // They appear in a note only.
        inputs.orphans.declared_elsewhere.clear();
    }
    put(&format!("{inputs:?}"));
    let touched: BTreeSet<&InstanceKey> = plan
        .steps()
        .flat_map(|step| [Some(&step.instance), step.from.as_ref()])
        .flatten()
        .chain(plan.held.iter().map(|held| &held.instance))
        .collect();
    for key in touched {
        put(&key.to_string());
        put(&match observed.instances.get(key) {
            Some(seen) => facts(seen),
            None => format!("{:?}", observed.gaps.contains_key(&key.host)),
        });
    }
    digest.hex()
}

fn facts(seen: &ObservedInstance) -> String {
    let ObservedInstance { unknown, registered, hosted, running, owner, specs, .. } = seen;
    // Whether the live spec is assumed, and files that others deliver, change no step.
    let ObservedSpecs {
        registered: given,
        live,
        is_live_assumed: _,
        ran,
        drifted_files: _,
        protections: _,
        digest_key: _,
    } = specs;
    let ran = match ran {
        LastRun::Unknown => "unknown".to_owned(),
        LastRun::Never => "never".to_owned(),
        LastRun::Given => "given".to_owned(),
        LastRun::Digest(run) => format!("{run:08x}"),
    };
    let facts = (unknown, registered, hosted, running, owner, digests(given), digests(live), ran);
    format!("{facts:?}")
}

fn digests(version: &KnownSpec) -> Option<SpecRevision> {
    match version {
        KnownSpec::Unknown => None,
        KnownSpec::Digests(revision) => Some(*revision),
        KnownSpec::Full(spec) => Some(*spec.revision()),
    }
}
