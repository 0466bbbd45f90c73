//! Orphans: owned instances that are no longer in any manifest.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::assess::{TargetSpec, assess};
use super::caps::Caps;
use super::chain::{Chain, StepDraft};
use super::choose::{Delta, choose};
use super::planner::{Planner, explained};
use crate::model::{
    HashedSpec, HeldChange, HoldReason, InstanceKey, KnownSpec, Name, ObservedInstance, OnChange, Op,
    Presence, Present, Reason, Rule, SpecSide, State, glob,
};

impl<'a> Planner<'a> {
    /// Plans their removal with `--prune`, and counts them without.
    pub(super) fn orphans(&mut self, rows: Vec<(&'a InstanceKey, &'a ObservedInstance)>) {
        // Checked once per namespace.
        let mut in_scope: BTreeMap<&Name, bool> =
            self.desired.instances.keys().map(|key| (&key.namespace, true)).collect();
        for (key, seen) in rows {
            let ours = self.owner_of(seen) == Some(self.rules.owner.as_str());
            if !ours
                || self.taken.contains(key)
                || self.rules.orphans.declared_elsewhere.contains(key)
                || !self.rules.selection.selects(key, None, &seen.labels)
            {
                continue;
            }
            if !*in_scope.entry(&key.namespace).or_insert_with(|| self.is_namespace_in_scope(&key.namespace))
            {
                continue;
            }
            match self.observed.presence(&key.host, Some(seen)) {
                Presence::Present(present) if !self.is_there(present) => {}
                Presence::Present(present) => match self.stale(key, present) {
                    Some(detail) => self.unseen(key, HoldReason::Stale, detail),
                    None => self.orphan(key, present),
                },
                Presence::Unknown(why) => {
                    self.unseen(key, HoldReason::HostUnknown, format!("host {}: {why}", key.host));
                }
                Presence::Absent => {}
            }
        }
    }

    /// Holds the removal of an orphan whose state is unknown.
    fn unseen(&mut self, key: &InstanceKey, reason: HoldReason, detail: String) {
        if self.rules.prune {
            let instance = key.clone();
            self.found.held.push(HeldChange {
                instance,
                reason,
                detail,
                steps: Vec::new(),
                why: Vec::new(),
                at: None,
            });
        }
    }

    /// Whether a namespace without any manifest is in scope: an earlier revision had it, or a policy allows it. Where the
    /// target reports whole specs, the owner label is enough.
    fn is_namespace_in_scope(&self, namespace: &Name) -> bool {
        if self.rules.caps.reads_specs {
            return true;
        }
        let allowed = self.desired.policies.iter().filter_map(|policy| policy.allow.namespaces.as_ref());
        self.rules.orphans.known_namespaces.contains(namespace)
            || allowed.flatten().any(|pattern| glob(pattern, namespace.as_str()))
    }

    fn orphan(&mut self, key: &'a InstanceKey, present: Present<'a>) {
        self.found.owned.push((key, None));
        if !self.rules.prune {
            *self.found.spared.entry(key.process()).or_default() += 1;
            return;
        }
        let drafted = removal(present, &self.rules.caps);
        let chain = |steps| Chain { key, want: None, from: None, before: Vec::new(), steps };
        match drafted {
            _ if self.rules.orphans.source_unreadable => {
                let detail = "a manifest source could not be read: the process may still be declared there";
                let chain = chain(drafted.unwrap_or_default());
                self.found.held.push(chain.held(HoldReason::SourceUnreadable, detail.to_owned()));
            }
            Ok(steps) if steps.is_empty() => {}
            Ok(steps) => self.found.chains.push(chain(steps)),
            Err(reason) => {
                let (reason, detail) = explained(reason, Some(present), &self.rules.caps);
                self.found.held.push(chain(Vec::new()).held(reason, detail));
            }
        }
    }
}

/// The steps that remove an instance, with the specs that it has.
fn removal(present: Present<'_>, caps: &Caps) -> Result<Vec<StepDraft>, HoldReason> {
    let seen = present.seen();
    let is_one = if present.running { &seen.specs.live } else { &seen.specs.registered };
    let other = if present.running { &seen.specs.registered } else { &seen.specs.live };
    let fallback = Arc::new(HashedSpec::default());
    let spec = is_one.spec().or(other.spec());
    let target = TargetSpec::new(spec.unwrap_or(&fallback), State::Absent, &OnChange::new(), caps);
    let mut is = assess(present, &target, caps)?;
    if spec.is_none() {
        // No spec to identify it by; digests still show whether supervision and process have one identity.
        let one = match (&seen.specs.registered, &seen.specs.live) {
            (KnownSpec::Digests(given), KnownSpec::Digests(live)) => given.replace == live.replace,
            _ => true,
        };
        let named = |replace| Delta { replace, ..Delta::default() };
        is.live = is.live.map(|_| named(true));
        is.given = is.given.map(|_| named(one));
        is.old_known = false;
    }
    let ops = choose(is, target.goal, *caps)?;
    let draft = |(op, which): (Op, SpecSide)| {
        let old = match which {
            SpecSide::New => spec.cloned(),
            SpecSide::Old if op == Op::Unsupervise => seen.specs.registered.spec().cloned(),
            SpecSide::Old => is_one.spec().cloned(),
        };
        let why = vec![Reason::plain(Rule::Orphan, None)];
        let spec = old.filter(|_| op != Op::Unregister);
        StepDraft {
            op,
            spec_side: SpecSide::Old,
            spec,
            revision: None,
            reloaded_fields: Vec::new(),
            needs_live_check: true,
            why,
        }
    };
    Ok(ops.into_iter().map(draft).collect())
}
