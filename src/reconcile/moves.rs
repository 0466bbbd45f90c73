//! Moves: a process under a new name (`moved_from`), without a restart where the target supports that.

use std::sync::Arc;

use super::assess::{TargetSpec, absent, assess, assess_adopted};
use super::caps::{Caps, Moves};
use super::chain::{Chain, StepDraft};
use super::choose::{Delta, Goal, Situation, choose};
use super::planner::{Planner, explained};
use super::reasons::{StepReasons, down_rule};
use crate::model::{
    DesiredInstance, HoldReason, InstanceKey, ObservedInstance, Op, Presence, Present, ProcessKey, Rule,
    SpecSide, State,
};

/// The instance observed under an earlier name, or the reason why its state is unknown.
pub type FormerInstance<'a> = Result<Present<'a>, (HoldReason, String)>;

impl<'a> Planner<'a> {
    /// Finds the instance under one of its earlier names.
    pub(super) fn earlier(
        &self,
        key: &InstanceKey,
        want: &DesiredInstance,
    ) -> Option<(&'a InstanceKey, FormerInstance<'a>)> {
        if want.origin.moved_from.is_empty() || want.origin.state == State::Absent {
            return None;
        }
        want.origin.moved_from.iter().find_map(|ProcessKey { namespace, name }| {
            let earlier =
                InstanceKey { host: key.host.clone(), namespace: namespace.clone(), name: name.clone() };
            let (from, seen) = self.observed.instances.get_key_value(&earlier)?;
            if self.desired.instances.contains_key(from) || self.taken.contains(from) {
                return None;
            }
            let doubt =
                |reason, detail| Some((from, Err((reason, format!("{from}, the earlier name: {detail}")))));
            match self.observed.presence(&from.host, Some(seen)) {
                Presence::Present(present) => match self.stale(from, present) {
                    Some(detail) => doubt(HoldReason::Stale, detail),
                    None => self.is_there(present).then_some((from, Ok(present))),
                },
                Presence::Unknown(why) => doubt(HoldReason::HostUnknown, why.to_owned()),
                Presence::Absent => None,
            }
        })
    }

    /// An instance that moves to a name outside the selection is not an orphan.
    pub(super) fn spare_earlier(
        &mut self,
        key: &'a InstanceKey,
        want: &'a DesiredInstance,
        seen: Option<&'a ObservedInstance>,
    ) {
        let there = match self.observed.presence(&key.host, seen) {
            Presence::Present(present) => self.is_there(present),
            Presence::Absent | Presence::Unknown(_) => false,
        };
        if !there && let Some((from, _)) = self.earlier(key, want) {
            self.taken.insert(from);
        }
    }

    /// Plans a moved process under its new name.
    pub(super) fn moved(
        &mut self,
        key: &'a InstanceKey,
        want: &'a DesiredInstance,
        from: &'a InstanceKey,
        present: Present<'a>,
    ) {
        let adopting = match self.may_touch(present, want) {
            Ok(adopting) => adopting,
            Err(detail) => {
                let detail = format!("{from}, the earlier name: {detail}");
                return self.hold(key, want, HoldReason::NotOwned, detail);
            }
        };
        let caps = self.rules.caps;
        if caps.moves == Moves::Nothing {
            return self.chain(key, want, Some(present), Some(from));
        }
        if self.is_ours(present) {
            self.found.owned.push((from, Some(want)));
        }
        let target = self.target_spec(want);
        let situation =
            if adopting { assess_adopted(present, target, &caps) } else { assess(present, target, &caps) };
        let is = match situation {
            Ok(is) => is,
            Err(reason) => {
                let (reason, detail) = explained(reason, Some(present), &caps);
                return self.hold(key, want, reason, detail);
            }
        };
        let keeps = target.goal.state.needs_start() && is.live.is_some_and(|live| !live.replace);
        let drafted = match caps.moves {
            Moves::Rename => renamed(is, target, present, want, &caps),
            Moves::Held if keeps => Err(HoldReason::MoveUnsupported),
            Moves::Rehost if keeps => rehosted(is, target, present, want, &caps),
            Moves::Held | Moves::Rehost | Moves::Nothing => replaced(is, target, present, want, &caps),
        };
        match drafted {
            Ok((before, steps)) if before.is_empty() && steps.is_empty() => self.found.in_sync += 1,
            Ok((mut before, mut steps)) => {
                let moved = before.iter_mut().chain(&mut steps).flat_map(|draft| &mut draft.why);
                for why in moved.filter(|why| why.rule == Rule::Moved) {
                    (why.old, why.new) = (Some(from.process().to_string()), Some(key.process().to_string()));
                }
                if caps.moves == Moves::Rehost && keeps && !before.is_empty() {
                    *self.found.rehosted.entry(key.process()).or_default() += 1;
                }
                let (want, from) = (Some(want), Some(from));
                self.found.chains.push(Chain { key, want, from, before, steps });
            }
            Err(HoldReason::MoveUnsupported) => {
                let detail = format!(
                    "the process runs as {from}, and {} cannot rename it without a restart: keep the old name, or stop \
                     it under the old name first",
                    caps.name()
                );
                self.hold(key, want, HoldReason::MoveUnsupported, detail);
            }
            Err(reason) => {
                let (reason, detail) = explained(reason, Some(present), &caps);
                self.hold(key, want, reason, detail);
            }
        }
    }
}

type Drafts = (Vec<StepDraft>, Vec<StepDraft>);

/// The engine renames the instance and, if the identity is the same, registers the new spec.
fn renamed(
    is: Situation,
    target: &TargetSpec<'_>,
    present: Present<'_>,
    want: &DesiredInstance,
    caps: &Caps,
) -> Result<Drafts, HoldReason> {
    let other = is.live.is_some_and(|live| live.replace)
        || (is.hosted && is.given.is_some_and(|given| given.replace));
    // Another identity keeps its spec: the instance is renamed first, and replaced under its new name.
    let (which, spec, given) = match other {
        false => (SpecSide::New, Arc::clone(target.spec), Some(Delta::default())),
        true => {
            let seen = present.seen();
            let (version, given) = if is.live.is_some() {
                (&seen.specs.live, is.live)
            } else {
                (&seen.specs.registered, is.given)
            };
            (SpecSide::Old, Arc::clone(version.spec().ok_or(HoldReason::OldSpecUnknown)?), given)
        }
    };
    let after = Situation { given, ..is };
    let reasons = StepReasons::of(after, target, present, want);
    let why = vec![reasons.plain(Rule::Moved)];
    let revision = (!other).then(|| *target.revision());
    let mut steps = vec![StepDraft {
        op: Op::Register,
        spec_side: which,
        spec: Some(spec),
        revision,
        reloaded_fields: Vec::new(),
        needs_live_check: true,
        why,
    }];
    let rest = choose(after, target.goal, *caps)?;
    steps.extend(rest.into_iter().map(|(op, which)| reasons.draft(op, which)));
    reasons.add_other_changes(&mut steps);
    Ok((Vec::new(), steps))
}

/// Supervision ends under the old name and starts under the new one; the process stays.
fn rehosted(
    is: Situation,
    target: &TargetSpec<'_>,
    present: Present<'_>,
    want: &DesiredInstance,
    caps: &Caps,
) -> Result<Drafts, HoldReason> {
    let reasons = StepReasons { rule: Some(Rule::Moved), ..StepReasons::of(is, target, present, want) };
    let which =
        if is.given.is_none_or(Delta::is_none) || !is.old_known { SpecSide::New } else { SpecSide::Old };
    let before = is.hosted.then(|| StepDraft {
        why: vec![reasons.plain(Rule::Moved)],
        ..reasons.draft(Op::Unsupervise, which)
    });
    let after = Situation { given: None, hosted: false, ..is };
    let reasons = StepReasons { rule: None, is: after, ..reasons };
    let steps = choose(after, target.goal, *caps)?;
    let mut steps: Vec<StepDraft> = steps.into_iter().map(|(op, which)| reasons.draft(op, which)).collect();
    if let Some(host) = steps.iter_mut().find(|draft| draft.op == Op::Supervise) {
        host.why = vec![reasons.plain(Rule::Moved)];
    }
    reasons.add_other_changes(&mut steps);
    Ok((before.into_iter().collect(), steps))
}

/// The identity differs, or no process runs: remove the instance under the old name, create it under the new one.
fn replaced(
    is: Situation,
    target: &TargetSpec<'_>,
    present: Present<'_>,
    want: &DesiredInstance,
    caps: &Caps,
) -> Result<Drafts, HoldReason> {
    let gone = Goal { state: State::Absent, ..target.goal };
    let reasons = StepReasons { rule: Some(Rule::Moved), ..StepReasons::of(is, target, present, want) };
    let before = choose(is, gone, *caps)?.into_iter().map(|(op, which)| reasons.draft(op, which)).collect();
    let fresh = absent(target);
    let reasons = StepReasons { present: None, is: fresh, rule: down_rule(want.origin.state), ..reasons };
    let steps =
        choose(fresh, target.goal, *caps)?.into_iter().map(|(op, which)| reasons.draft(op, which)).collect();
    Ok((before, steps))
}
