//! The same process under another name: no restart, where the target can do without one.

use std::sync::Arc;

use super::caps::{Caps, Moves};
use super::chain::{Chain, Draft};
use super::choose::{Delta, Goal, Situation, choose};
use super::situate::{Wish, absent, situate, situate_adopted};
use super::story::{Story, down_rule};
use super::walk::{Walk, detail};
use crate::model::{InstanceKey, Op, Present, ProcessKey, Reason, Rule, Seen, Sighting, State, Want, Which};

/// What was seen under an earlier name, or why nothing can be said of it.
pub type Earlier<'a> = Result<Present<'a>, (Reason, String)>;

impl<'a> Walk<'a> {
    /// Where a process is under an earlier name of its own; or why that cannot be told.
    pub(super) fn earlier(&self, key: &InstanceKey, want: &Want) -> Option<(&'a InstanceKey, Earlier<'a>)> {
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
            let doubt = |reason, detail| {
                Some((from, Err((reason, format!("{from}, which it moved from: {detail}")))))
            };
            match self.observed.sighting(&from.host, Some(seen)) {
                Sighting::Present(present) => match self.stale(from, present) {
                    Some(detail) => doubt(Reason::Stale, detail),
                    None => self.is_there(present).then_some((from, Ok(present))),
                },
                Sighting::Unknown(why) => doubt(Reason::HostUnknown, why.to_owned()),
                Sighting::Absent => None,
            }
        })
    }

    /// What moves to a name that is not meant this time is no orphan meanwhile.
    pub(super) fn spare_earlier(&mut self, key: &'a InstanceKey, want: &'a Want, row: Option<&'a Seen>) {
        let there = match self.observed.sighting(&key.host, row) {
            Sighting::Present(present) => self.is_there(present),
            Sighting::Absent | Sighting::Unknown(_) => false,
        };
        if !there && let Some((from, _)) = self.earlier(key, want) {
            self.taken.insert(from);
        }
    }

    /// The same process under its new name.
    pub(super) fn moved(
        &mut self,
        key: &'a InstanceKey,
        want: &'a Want,
        from: &'a InstanceKey,
        present: Present<'a>,
    ) {
        let adopting = match self.may_touch(present, want) {
            Ok(adopting) => adopting,
            Err(detail) => {
                let detail = format!("{from}, which it moved from: {detail}");
                return self.hold(key, want, Reason::NotOwned, detail);
            }
        };
        let caps = self.rules.caps;
        if caps.moves == Moves::Nothing {
            return self.chain(key, want, Some(present), Some(from));
        }
        if self.is_ours(present) {
            self.found.owned.push((from, Some(want)));
        }
        let wish = self.wish(want);
        let situation =
            if adopting { situate_adopted(present, wish, &caps) } else { situate(present, wish, &caps) };
        let is = match situation {
            Ok(is) => is,
            Err(reason) => return self.hold(key, want, reason, detail(reason, Some(present), &caps)),
        };
        let keeps = wish.goal.state.needs_start() && is.live.is_some_and(|live| !live.replace);
        let drafted = match caps.moves {
            Moves::Rename => renamed(is, wish, present, want, &caps),
            Moves::Held if keeps => Err(Reason::MoveUnsupported),
            Moves::Rehost if keeps => rehosted(is, wish, present, want, &caps),
            Moves::Held | Moves::Rehost | Moves::Nothing => replaced(is, wish, present, want, &caps),
        };
        match drafted {
            Ok((before, steps)) if before.is_empty() && steps.is_empty() => self.found.settled += 1,
            Ok((mut before, mut steps)) => {
                let moved = before.iter_mut().chain(&mut steps).flat_map(|draft| &mut draft.why);
                for why in moved.filter(|why| why.rule == Rule::Moved) {
                    (why.old, why.new) = (Some(from.process().to_string()), Some(key.process().to_string()));
                }
                let (want, from) = (Some(want), Some(from));
                self.found.chains.push(Chain { key, want, from, before, steps });
            }
            Err(Reason::MoveUnsupported) => {
                let detail = format!(
                    "it runs as {from}, and {} cannot rename it without a restart: keep the old name, or stop it \
                     under the old name first",
                    caps.name()
                );
                self.hold(key, want, Reason::MoveUnsupported, detail);
            }
            Err(reason) => self.hold(key, want, reason, detail(reason, Some(present), &caps)),
        }
    }
}

type Drafts = (Vec<Draft>, Vec<Draft>);

/// The engine gives it the new name and, if it is the same process, the new spec.
fn renamed(
    is: Situation,
    wish: &Wish<'_>,
    present: Present<'_>,
    want: &Want,
    caps: &Caps,
) -> Result<Drafts, Reason> {
    let other = is.live.is_some_and(|live| live.replace)
        || (is.hosted && is.given.is_some_and(|given| given.replace));
    // Another process keeps what it has: it is renamed first, and replaced under its new name.
    let (which, spec, given) = match other {
        false => (Which::New, Arc::clone(wish.spec), Some(Delta::default())),
        true => {
            let seen = present.seen();
            let (version, given) =
                if is.live.is_some() { (&seen.live, is.live) } else { (&seen.given, is.given) };
            (Which::Old, Arc::clone(version.spec().ok_or(Reason::OldSpecUnknown)?), given)
        }
    };
    let after = Situation { given, ..is };
    let story = Story::of(after, wish, present, want);
    let why = vec![story.plain(Rule::Moved)];
    let revision = (!other).then(|| *wish.revision());
    let mut steps = vec![Draft {
        op: Op::Register,
        which,
        spec: Some(spec),
        revision,
        takes: Vec::new(),
        looks_first: true,
        why,
    }];
    let rest = choose(after, wish.goal, *caps)?;
    steps.extend(rest.into_iter().map(|(op, which)| story.draft(op, which)));
    Ok((Vec::new(), steps))
}

/// The guard goes under the old name and comes under the new one; the process stays.
fn rehosted(
    is: Situation,
    wish: &Wish<'_>,
    present: Present<'_>,
    want: &Want,
    caps: &Caps,
) -> Result<Drafts, Reason> {
    let story = Story { rule: Some(Rule::Moved), ..Story::of(is, wish, present, want) };
    let which = if is.given.is_none_or(Delta::is_none) || !is.old_known { Which::New } else { Which::Old };
    let before =
        is.hosted.then(|| Draft { why: vec![story.plain(Rule::Moved)], ..story.draft(Op::Unhost, which) });
    let after = Situation { given: None, hosted: false, ..is };
    let story = Story { rule: None, is: after, ..story };
    let steps = choose(after, wish.goal, *caps)?;
    let mut steps: Vec<Draft> = steps.into_iter().map(|(op, which)| story.draft(op, which)).collect();
    if let Some(host) = steps.iter_mut().find(|draft| draft.op == Op::Host) {
        host.why = vec![story.plain(Rule::Moved)];
    }
    Ok((before.into_iter().collect(), steps))
}

/// It is not the same process any more (or none runs): the old name goes, the new one comes.
fn replaced(
    is: Situation,
    wish: &Wish<'_>,
    present: Present<'_>,
    want: &Want,
    caps: &Caps,
) -> Result<Drafts, Reason> {
    let gone = Goal { state: State::Absent, ..wish.goal };
    let story = Story { rule: Some(Rule::Moved), ..Story::of(is, wish, present, want) };
    let before = choose(is, gone, *caps)?.into_iter().map(|(op, which)| story.draft(op, which)).collect();
    let fresh = absent(wish);
    let story = Story { present: None, is: fresh, rule: down_rule(want.origin.state), ..story };
    let steps =
        choose(fresh, wish.goal, *caps)?.into_iter().map(|(op, which)| story.draft(op, which)).collect();
    Ok((before, steps))
}
