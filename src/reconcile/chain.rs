//! Instance by instance: what differs, and the chain of steps that would end the difference.
//!
//! Desired and Observed are walked side by side, once. What is as wanted costs a comparison; a chain, its specs and
//! its reasons are made only for what is not.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use super::caps::{Caps, Moves};
use super::choose::{Delta, Situation, choose};
use super::rules::Rules;
use super::situate::{Wish, absent, relaunching, situate, unsupported};
use super::why::differences;
use crate::model::{
    AutoType, Desired, Effect, Field, Held, InstanceKey, Now, Observed, OnChange, Op, Place, Present,
    ProcessKey, Reason, Revision, Rule, Seen, Sighting, Spec, State, Version, Want, Which, Why, span,
};

/// The steps of one instance, from how it is to how it should be.
#[derive(Clone, Debug)]
pub struct Chain<'a> {
    pub key: &'a InstanceKey,
    /// `None`: an orphan.
    pub want: Option<&'a Want>,
    /// What was seen of it, under this name or the one it moved from.
    pub present: Option<Present<'a>>,
    /// The name that it moved from, and what has to be done under that name first.
    pub from: Option<&'a InstanceKey>,
    pub before: Vec<Draft>,
    pub steps: Vec<Draft>,
}

/// A step that has no place in an order yet.
#[derive(Clone, Debug)]
pub struct Draft {
    pub op: Op,
    pub which: Which,
    pub spec: Option<Arc<Spec>>,
    pub revision: Option<Revision>,
    /// Of a reload: what takes effect by it.
    pub takes: Vec<Field>,
    pub why: Vec<Why>,
}

impl Chain<'_> {
    pub fn ops(&self) -> impl Iterator<Item = Op> + '_ {
        self.before.iter().chain(&self.steps).map(|draft| draft.op)
    }

    pub fn state(&self) -> State {
        self.want.map_or(State::Absent, |want| want.origin.state)
    }

    pub fn place(&self) -> Option<&Place> {
        self.want.map(|want| &want.origin.place)
    }

    pub fn held(&self, reason: Reason, detail: String) -> Held {
        let mut why: Vec<Why> = Vec::new();
        for one in self.before.iter().chain(&self.steps).flat_map(|draft| &draft.why) {
            if !why.contains(one) {
                why.push(one.clone());
            }
        }
        let (instance, at) = (self.key.clone(), self.place().cloned());
        Held { instance, reason, detail, steps: self.ops().collect(), why, at }
    }
}

/// Everything that was found on the way.
#[derive(Debug, Default)]
pub struct Found<'a> {
    /// Sorted by instance, orphans last.
    pub chains: Vec<Chain<'a>>,
    pub held: Vec<Held>,
    pub settled: usize,
    /// What is ours, in scope: budgets are shares of it.
    pub owned: Vec<(&'a InstanceKey, Option<&'a Want>)>,
    /// Ours, wanted by no manifest, and left alone because nobody asked for its removal.
    pub spared: usize,
    /// What was seen of some instances stands under the name that they had before.
    pub seen_as: HashMap<&'a InstanceKey, &'a InstanceKey>,
    /// Fields that were left out because the target has no place for them.
    pub unsaid: BTreeSet<Field>,
    /// Instances that are named by the new spec because the old one is lost.
    pub lost: usize,
}

pub fn find<'a>(desired: &'a Desired, observed: &'a Observed, rules: &'a Rules, now: &'a Now) -> Found<'a> {
    let silent = Field::ALL.iter().copied().filter(|field| !rules.caps.says(*field)).collect();
    let mut walk = Walk {
        desired,
        observed,
        rules,
        now,
        silent,
        wishes: HashMap::default(),
        same: HashMap::default(),
        taken: BTreeSet::new(),
        found: Found::default(),
    };
    let mut rows = observed.instances.iter().peekable();
    let mut strangers = Vec::new();
    for (key, want) in &desired.instances {
        let row = loop {
            match rows.peek().map(|(seen, _)| (*seen).cmp(key)) {
                Some(Ordering::Less) => strangers.extend(rows.next()),
                Some(Ordering::Equal) => break rows.next().map(|(_, row)| row),
                Some(Ordering::Greater) | None => break None,
            }
        };
        if rules.selection.means(key, Some(&want.origin.declared), &want.spec.labels) {
            walk.wanted(key, want, row);
        }
    }
    strangers.extend(rows);
    walk.orphans(strangers);
    walk.found
}

struct Walk<'a> {
    desired: &'a Desired,
    observed: &'a Observed,
    rules: &'a Rules,
    now: &'a Now,
    /// What the target has no place for.
    silent: Vec<Field>,
    /// By the addresses of spec and origin, which instances of one process share.
    wishes: ByAddress<Wish<'a>>,
    /// By the addresses of two specs: whether they are equal.
    same: ByAddress<bool>,
    /// Known by another name now.
    taken: BTreeSet<&'a InstanceKey>,
    found: Found<'a>,
}

impl<'a> Walk<'a> {
    fn wanted(&mut self, key: &'a InstanceKey, want: &'a Want, row: Option<&'a Seen>) {
        let present = match self.observed.sighting(&key.host, row) {
            Sighting::Present(present) => Some(present),
            Sighting::Absent => None,
            Sighting::Unknown(why) => {
                let detail = format!("host {}: {why}", key.host);
                return self.hold(key, want, Reason::HostUnknown, detail);
            }
        };
        let there = present.filter(|present| self.is_there(*present));
        if there.is_some_and(|present| self.is_ours(present)) {
            self.found.owned.push((key, Some(want)));
        }
        if !self.silent.is_empty() {
            let holds = || unsupported(&want.spec, &self.rules.caps);
            if let Some(field) = want.origin.state.needs_start().then(holds).flatten() {
                let detail =
                    format!("{field} changes what runs, and {} has no place for it", self.rules.caps.name());
                return self.hold(key, want, Reason::Unsupported, detail);
            }
            self.found.unsaid.extend(self.silent.iter().filter(|field| want.spec.is_set(**field)));
        }
        if there.is_some_and(|present| self.is_settled(present, want)) {
            self.found.settled += 1;
            return;
        }
        if there.is_none()
            && let Some((from, present)) = self.earlier(key, want)
        {
            self.taken.insert(from);
            self.found.seen_as.insert(key, from);
            return self.moved(key, want, from, present);
        }
        self.chain(key, want, present, None);
    }

    /// Does a row tell of more than a name that was once there?
    fn is_there(&self, present: Present<'_>) -> bool {
        present.running || present.hosted || (self.rules.caps.registry && present.registered)
    }

    fn is_ours(&self, present: Present<'_>) -> bool {
        present.seen().owner.as_deref() == Some(self.rules.owner.as_str())
    }

    /// The quick answer for what is plainly as wanted; `false` only means that it takes a closer look.
    fn is_settled(&mut self, present: Present<'_>, want: &Want) -> bool {
        let (Version::Spec(given), live) = (&present.seen().given, &present.seen().live) else {
            return false;
        };
        let runs = match want.spec.monitor.auto_type {
            AutoType::Resident => present.running,
            AutoType::Periodic => true,
            AutoType::OneShot => false,
        };
        let one = match live {
            Version::Spec(live) => Arc::ptr_eq(given, live),
            Version::Digests(_) | Version::Unknown => false,
        };
        let resident = want.spec.monitor.auto_type == AutoType::Resident;
        want.origin.state == State::Running
            && present.hosted
            && runs
            && self.is_ours(present)
            && self.are_same(given, &want.spec)
            && (one || !resident || live.spec().is_some_and(|live| self.are_same(live, &want.spec)))
    }

    /// What many instances share is compared once.
    fn are_same(&mut self, old: &Arc<Spec>, new: &Arc<Spec>) -> bool {
        if Arc::ptr_eq(old, new) {
            return true;
        }
        if Arc::strong_count(new) <= 2 {
            return old == new;
        }
        *self.same.entry(addresses(old, new)).or_insert_with(|| old == new)
    }

    /// May this be touched? `Ok(true)`: it will be ours by that.
    fn may_touch(&self, present: Present<'_>, want: &Want) -> Result<bool, String> {
        let adopt = self.rules.adopt || want.origin.adopt;
        match present.seen().owner.as_deref() {
            // What is ours and of which nothing is known is looked at anew if that was asked for.
            Some(owner) if owner == self.rules.owner => {
                let lost = |there: bool, version: &Version| there && *version == Version::Unknown;
                let seen = present.seen();
                Ok(adopt && (lost(present.hosted, &seen.given) || lost(present.running, &seen.live)))
            }
            Some(owner) => Err(format!(
                "it belongs to {owner:?}, and this is {:?}: two owners would undo each other's work",
                self.rules.owner
            )),
            None if adopt => Ok(true),
            None => Err("it is there already and nobody owns it: --adopt (or `adopt: true`) takes it over \
                 without a restart"
                .to_owned()),
        }
    }

    /// `from`: the name that what was seen stands under, if it is another.
    fn chain(
        &mut self,
        key: &'a InstanceKey,
        want: &'a Want,
        present: Option<Present<'a>>,
        from: Option<&'a InstanceKey>,
    ) {
        let there = present.filter(|present| self.is_there(*present));
        let adopting = match there.map(|present| self.may_touch(present, want)) {
            None => false,
            Some(Ok(adopting)) => adopting,
            Some(Err(detail)) => return self.hold(key, want, Reason::NotOwned, detail),
        };
        let (rules, now) = (self.rules, self.now);
        let wish = self.wish(want);
        let situation = match present {
            None => Ok(absent(wish)),
            Some(present) => situate(present, wish, &rules.caps, adopting),
        };
        let chosen = situation.and_then(|is| Ok((is, choose(is, wish.goal, rules.caps)?)));
        let (is, ops) = match chosen {
            Ok(chosen) => chosen,
            Err(reason) => return self.hold(key, want, reason, detail(reason, present, &rules.caps)),
        };
        if ops.is_empty() {
            self.found.settled += 1;
            return;
        }
        let story = Story {
            wish,
            present,
            is,
            adopting,
            rule: down_rule(want.origin.state),
            place: &want.origin.place,
        };
        let steps: Vec<Draft> = ops.into_iter().map(|(op, which)| story.draft(op, which)).collect();
        let waits = present.and_then(|present| relaunching(present, &is, wish, now.at));
        let lost = !is.old_known && names_by_the_new_spec(&steps, &rules.caps);
        let chain = Chain { key, want: Some(want), present, from, before: Vec::new(), steps };
        if let Some(left) = waits {
            let detail =
                format!("it died, and the agent is bringing it back: it has {} left to do so", span(left));
            self.found.held.push(chain.held(Reason::AgentRelaunching, detail));
            return;
        }
        self.found.lost += usize::from(lost);
        self.found.chains.push(chain);
    }

    fn wish(&mut self, want: &'a Want) -> &Wish<'a> {
        let origin = &want.origin;
        self.wishes
            .entry(addresses(&want.spec, origin))
            .or_insert_with(|| Wish::new(&want.spec, origin.state, &origin.on_change, &self.rules.caps))
    }

    /// Where a process is under an earlier name of its own.
    fn earlier(&self, key: &InstanceKey, want: &Want) -> Option<(&'a InstanceKey, Present<'a>)> {
        if want.origin.moved_from.is_empty() || want.origin.state == State::Absent {
            return None;
        }
        want.origin.moved_from.iter().find_map(|ProcessKey { namespace, name }| {
            let earlier =
                InstanceKey { host: key.host.clone(), namespace: namespace.clone(), name: name.clone() };
            let (from, seen) = self.observed.instances.get_key_value(&earlier)?;
            let wanted = self.desired.instances.contains_key(from) || self.taken.contains(from);
            match self.observed.sighting(&from.host, Some(seen)) {
                Sighting::Present(present) if !wanted && self.is_there(present) => Some((from, present)),
                Sighting::Present(_) | Sighting::Absent | Sighting::Unknown(_) => None,
            }
        })
    }

    /// The same process under its new name.
    fn moved(&mut self, key: &'a InstanceKey, want: &'a Want, from: &'a InstanceKey, present: Present<'a>) {
        if let Err(detail) = self.may_touch(present, want) {
            return self.hold(key, want, Reason::NotOwned, format!("{from}, which it moved from: {detail}"));
        }
        let caps = self.rules.caps;
        if caps.moves == Moves::Nothing {
            return self.chain(key, want, Some(present), Some(from));
        }
        if self.is_ours(present) {
            self.found.owned.push((from, Some(want)));
        }
        let wish = self.wish(want);
        let situation = situate(present, wish, &caps, true);
        let is = match situation {
            Ok(is) => Situation { given: is.given.map(|given| honest(given, present, wish)), ..is },
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
                let (want, present, from) = (Some(want), Some(present), Some(from));
                self.found.chains.push(Chain { key, want, present, from, before, steps });
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

    /// What is ours and wanted by nobody.
    fn orphans(&mut self, rows: Vec<(&'a InstanceKey, &'a Seen)>) {
        let namespaces: BTreeSet<_> = self.desired.instances.keys().map(|key| &key.namespace).collect();
        let in_scope = |key: &InstanceKey, seen: &Seen| {
            let known =
                namespaces.contains(&key.namespace) || self.rules.known_namespaces.contains(&key.namespace);
            let named = self.desired.policies.iter().any(|policy| {
                let named = policy.allow.namespaces.as_deref().unwrap_or_default();
                named.iter().any(|pattern| crate::model::glob(pattern, key.namespace.as_str()))
            });
            (known || named) && self.rules.selection.means(key, None, &seen.labels)
        };
        let ours: Vec<_> = rows
            .into_iter()
            .filter(|(key, seen)| {
                seen.owner.as_deref() == Some(self.rules.owner.as_str())
                    && !self.taken.contains(key)
                    && in_scope(key, seen)
            })
            .collect();
        for (key, seen) in ours {
            let Sighting::Present(present) = self.observed.sighting(&key.host, Some(seen)) else { continue };
            if !self.is_there(present) {
                continue;
            }
            self.found.owned.push((key, None));
            if !self.rules.prune {
                self.found.spared += 1;
                continue;
            }
            let drafted = removal(present, &self.rules.caps);
            let chain = |steps| Chain {
                key,
                want: None,
                present: Some(present),
                from: None,
                before: Vec::new(),
                steps,
            };
            match drafted {
                _ if self.rules.source_unreadable => {
                    let detail = "some source could not be read: what is missing there may only be unread";
                    let held =
                        chain(drafted.unwrap_or_default()).held(Reason::SourceUnreadable, detail.into());
                    self.found.held.push(held);
                }
                Ok(steps) if steps.is_empty() => {}
                Ok(steps) => self.found.chains.push(chain(steps)),
                Err(reason) => {
                    let detail = detail(reason, Some(present), &self.rules.caps);
                    self.found.held.push(chain(Vec::new()).held(reason, detail));
                }
            }
        }
    }

    fn hold(&mut self, key: &InstanceKey, want: &Want, reason: Reason, detail: String) {
        let (instance, at) = (key.clone(), Some(want.origin.place.clone()));
        self.found.held.push(Held { instance, reason, detail, steps: Vec::new(), why: Vec::new(), at });
    }
}

/// What is known by where two things stand in memory. Addresses need no hash that withstands an adversary.
type ByAddress<V> = HashMap<(usize, usize), V, BuildHasherDefault<Mix>>;

fn addresses<A, B>(a: &Arc<A>, b: &Arc<B>) -> (usize, usize) {
    (Arc::as_ptr(a) as usize, Arc::as_ptr(b) as usize)
}

#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_usize((*byte).into()));
    }

    fn write_usize(&mut self, n: usize) {
        self.0 = (self.0.rotate_left(23) ^ n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}

/// Moving needs no adoption's "tell it in any case": the delta as it is, where it is known.
fn honest(given: Delta, present: Present<'_>, wish: &Wish<'_>) -> Delta {
    wish.delta(&present.seen().given).unwrap_or(given)
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
    let mut steps =
        vec![Draft { op: Op::Register, which, spec: Some(spec), revision, takes: Vec::new(), why }];
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
    let gone = super::choose::Goal { state: State::Absent, ..wish.goal };
    let story = Story { rule: Some(Rule::Moved), ..Story::of(is, wish, present, want) };
    let before = choose(is, gone, *caps)?.into_iter().map(|(op, which)| story.draft(op, which)).collect();
    let fresh = absent(wish);
    let story = Story { present: None, is: fresh, rule: down_rule(want.origin.state), ..story };
    let steps =
        choose(fresh, wish.goal, *caps)?.into_iter().map(|(op, which)| story.draft(op, which)).collect();
    Ok((before, steps))
}

/// Everything that a step's reason is made of.
struct Story<'w, 'a> {
    wish: &'w Wish<'a>,
    present: Option<Present<'w>>,
    /// How it was before the first step.
    is: Situation,
    adopting: bool,
    /// Why something is taken down.
    rule: Option<Rule>,
    place: &'w Place,
}

const FELT: [Effect; 3] = [Effect::Reload, Effect::Restart, Effect::Replace];

impl<'w, 'a> Story<'w, 'a> {
    fn of(is: Situation, wish: &'w Wish<'a>, present: Present<'w>, want: &'w Want) -> Story<'w, 'a> {
        let (rule, place) = (down_rule(want.origin.state), &want.origin.place);
        Story { wish, present: Some(present), is, adopting: false, rule, place }
    }

    fn draft(&self, op: Op, which: Which) -> Draft {
        let seen = self.present.map(|present| present.seen());
        let spec = match (op, which) {
            (Op::Unregister, _) => None,
            (_, Which::New) => Some(Arc::clone(self.wish.spec)),
            (Op::Unhost, Which::Old) => seen.and_then(|seen| seen.given.spec().cloned()),
            (_, Which::Old) => {
                let live = seen.filter(|_| self.is.live.is_some()).map(|seen| &seen.live);
                live.or(seen.map(|seen| &seen.given)).and_then(|version| version.spec().cloned())
            }
        };
        let mut why = self.why(op, which);
        if why.is_empty() {
            // What the strongest difference asks for is also the reason of what has to go before it.
            why = self.differs(Rule::LiveDiffers, &FELT);
        }
        let revision = (which == Which::New && op != Op::Unregister).then(|| *self.wish.revision());
        let takes = if op == Op::Reload { self.wish.reloaded() } else { Vec::new() };
        Draft { op, which, spec, revision, takes, why }
    }

    fn plain(&self, rule: Rule) -> Why {
        Why::plain(rule, Some(self.place))
    }

    fn why(&self, op: Op, which: Which) -> Vec<Why> {
        let down = self.rule.map(|rule| vec![self.plain(rule)]);
        match op {
            Op::Start if self.is.live.is_some() => self.differs(Rule::LiveDiffers, &FELT),
            Op::Start if self.wish.goal.auto_type == AutoType::OneShot => {
                let changed = self.differs(Rule::GivenDiffers, &FELT);
                let changed = changed.into_iter().filter(|why| why.field.is_some());
                std::iter::once(self.plain(Rule::NotRun)).chain(changed).collect()
            }
            Op::Start => vec![self.plain(Rule::NotRunning)],
            Op::Stop | Op::Kill => down.unwrap_or_else(|| self.differs(Rule::LiveDiffers, &FELT)),
            Op::Reload | Op::Restart => self.differs(Rule::LiveDiffers, &FELT),
            Op::Register if which == Which::Old => {
                down.unwrap_or_else(|| self.differs(Rule::LiveDiffers, &[Effect::Replace]))
            }
            Op::Register if self.is.given.is_none() => vec![self.plain(Rule::NotRegistered)],
            Op::Register => self.told(),
            Op::Host if !self.is.hosted => vec![self.plain(Rule::NotHosted)],
            Op::Host => self.told(),
            Op::Unhost
                if which == Which::Old && self.rule.is_none() && self.wish.goal.state == State::Running =>
            {
                self.differs(Rule::GivenDiffers, &[Effect::Replace])
            }
            Op::Unhost => down.unwrap_or_else(|| vec![self.plain(Rule::Hosted)]),
            Op::Unregister => down.unwrap_or_default(),
        }
    }

    /// Why the engine is told anew.
    fn told(&self) -> Vec<Why> {
        let all = [Effect::Register, Effect::Reload, Effect::Restart, Effect::Replace];
        let adopted = self.adopting.then(|| self.plain(Rule::Adopted));
        let known = self.present.is_none_or(|present| present.seen().given != Version::Unknown);
        let differs =
            if known || !self.adopting { self.differs(Rule::GivenDiffers, &all) } else { Vec::new() };
        adopted.into_iter().chain(differs).collect()
    }

    fn differs(&self, rule: Rule, classes: &[Effect]) -> Vec<Why> {
        let Some(seen) = self.present.map(|present| present.seen()) else { return Vec::new() };
        let version = if rule == Rule::LiveDiffers { &seen.live } else { &seen.given };
        differences(rule, version, self.wish, classes, Some(self.place))
    }
}

/// Why something goes that is wanted otherwise.
fn down_rule(state: State) -> Option<Rule> {
    match state {
        State::Running | State::Unhosted => None,
        State::Stopped => Some(Rule::StateStopped),
        State::Absent => Some(Rule::StateAbsent),
    }
}

/// The way out for what no manifest wants: everything works with what it was.
fn removal(present: Present<'_>, caps: &Caps) -> Result<Vec<Draft>, Reason> {
    let seen = present.seen();
    let is_one = if present.running { &seen.live } else { &seen.given };
    let other = if present.running { &seen.given } else { &seen.live };
    let fallback = Arc::new(Spec::default());
    let spec = is_one.spec().or(other.spec());
    let wish = Wish::new(spec.unwrap_or(&fallback), State::Absent, &OnChange::new(), caps);
    let mut is = situate(present, &wish, caps, false)?;
    if spec.is_none() {
        // Nothing to name it by; whether guard and process are one can still be told.
        let one = match (&seen.given, &seen.live) {
            (Version::Digests(given), Version::Digests(live)) => given.replace == live.replace,
            _ => true,
        };
        let named = |replace| Delta { replace, ..Delta::default() };
        is.live = is.live.map(|_| named(true));
        is.given = is.given.map(|_| named(one));
        is.old_known = false;
    }
    let ops = choose(is, wish.goal, *caps)?;
    let draft = |(op, which): (Op, Which)| {
        let old = match which {
            Which::New => spec.cloned(),
            Which::Old if op == Op::Unhost => seen.given.spec().cloned(),
            Which::Old => is_one.spec().cloned(),
        };
        let why = vec![Why::plain(Rule::Orphan, None)];
        let spec = old.filter(|_| op != Op::Unregister);
        Draft { op, which: Which::Old, spec, revision: None, takes: Vec::new(), why }
    };
    Ok(ops.into_iter().map(draft).collect())
}

/// Does a chain send the new spec where the old one belongs?
fn names_by_the_new_spec(steps: &[Draft], caps: &Caps) -> bool {
    let names =
        |draft: &Draft| matches!(draft.op, Op::Stop | Op::Kill | Op::Unhost) && draft.which == Which::New;
    caps.stop_needs_old && steps.iter().any(names)
}

/// A sentence for what the choice itself could not go on with.
fn detail(reason: Reason, present: Option<Present<'_>>, caps: &Caps) -> String {
    let digests = |seen: &Seen| [&seen.given, &seen.live].iter().any(|v| matches!(v, Version::Digests(_)));
    match reason {
        Reason::IdentityMix => {
            "what runs and what is guarded are two different processes: stop one of them by hand".to_owned()
        }
        Reason::OldSpecUnknown if present.is_some_and(|present| digests(present.seen())) => format!(
            "it is another process than the wanted one, and only digests of its spec are known: {} has to be told \
             the whole spec to stop it. Stop it by hand",
            caps.name()
        ),
        Reason::OldSpecUnknown => {
            "nothing is known of what it was started with, so it cannot be told whether it is \
             the wanted process: --adopt takes it as it is, after a look at its identity"
                .to_owned()
        }
        Reason::RunInProgress => {
            "an earlier run is still in progress, and no run is stopped to begin another".to_owned()
        }
        Reason::RunUnknown => "it is not known whether it ran already: `abide start` decides".to_owned(),
        Reason::NoStopCommand => format!(
            "{} needs a command to stop it, and what runs has neither stop_cmd nor kill_cmd",
            caps.name()
        ),
        other => other.word().to_owned(),
    }
}

/// The spec of each instance that stands under a name, by name. For who waits for whom.
pub fn by_name<'a>(
    desired: &'a Desired,
    names: &BTreeSet<&'a ProcessKey>,
) -> BTreeMap<&'a ProcessKey, Vec<(&'a InstanceKey, &'a Want)>> {
    let mut all: BTreeMap<&ProcessKey, Vec<(&InstanceKey, &Want)>> = BTreeMap::new();
    if names.is_empty() {
        return all;
    }
    for (key, want) in &desired.instances {
        if let Some(name) = names.get(&want.origin.declared) {
            all.entry(name).or_default().push((key, want));
        } else if let Some(name) = names.get(&key.process()) {
            all.entry(name).or_default().push((key, want));
        }
    }
    all
}
