//! Instance by instance: what differs, and the chain of steps that would end the difference.
//!
//! Desired and Observed are walked side by side, once. What is as wanted costs a comparison; a chain, its specs and
//! its reasons are made only for what is not.

use std::cmp::Ordering;
use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use super::caps::Caps;
use super::chain::{Chain, Draft, Found};
use super::choose::choose;
use super::rules::Rules;
use super::situate::{Wish, absent, relaunching, situate, situate_adopted, unsupported};
use super::story::{Story, down_rule};
use crate::model::{
    AutoType, Desired, Field, Held, InstanceKey, Now, Observed, Op, Present, Reason, Seen, Sighting, Stamped,
    State, Version, Want, Which, span,
};

pub fn find<'a>(desired: &'a Desired, observed: &'a Observed, rules: &'a Rules, now: &'a Now) -> Found<'a> {
    let silent: Vec<Field> = Field::ALL.iter().copied().filter(|field| !rules.caps.says(*field)).collect();
    let mut walk = Walk {
        desired,
        observed,
        rules,
        now,
        unsaid: Stamped::mask(silent.iter().copied()),
        silent,
        wishes: HashMap::default(),
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
        match rules.selection.means(key, Some(&want.origin.declared), &want.spec.labels) {
            true => walk.wanted(key, want, row),
            false => walk.spare_earlier(key, want, row),
        }
    }
    strangers.extend(rows);
    walk.orphans(strangers);
    walk.found
}

pub struct Walk<'a> {
    pub(super) desired: &'a Desired,
    pub(super) observed: &'a Observed,
    pub(super) rules: &'a Rules,
    now: &'a Now,
    /// What the target has no place for.
    silent: Vec<Field>,
    /// The same as bits.
    unsaid: u64,
    /// By the addresses of spec and origin, which instances of one process share.
    wishes: ByAddress<Wish<'a>>,
    /// Known by another name now.
    pub(super) taken: BTreeSet<&'a InstanceKey>,
    pub(super) found: Found<'a>,
}

impl<'a> Walk<'a> {
    fn wanted(&mut self, key: &'a InstanceKey, want: &'a Want, row: Option<&'a Seen>) {
        let present = match self.observed.sighting(&key.host, row) {
            Sighting::Present(present) => match self.stale(key, present) {
                Some(detail) => return self.hold(key, want, Reason::Stale, detail),
                None => Some(present),
            },
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
            && let Some((from, earlier)) = self.earlier(key, want)
        {
            self.taken.insert(from);
            self.found.seen_as.insert(key, from);
            return match earlier {
                Ok(present) => self.moved(key, want, from, present),
                Err((reason, detail)) => self.hold(key, want, reason, detail),
            };
        }
        self.chain(key, want, present, None);
    }

    /// What was told too long ago may be otherwise by now, in sync or not.
    pub(super) fn stale(&self, key: &InstanceKey, present: Present<'_>) -> Option<String> {
        let age = self.observed.age(present.seen());
        let limit = self.rules.stale_after_secs?;
        (age > limit).then(|| format!("host {} has not reported for {}", key.host, span(age)))
    }

    /// Does a row tell of more than a name that was once there?
    pub(super) fn is_there(&self, present: Present<'_>) -> bool {
        present.running || present.hosted || (self.rules.caps.registry && present.registered)
    }

    pub(super) fn is_ours(&self, present: Present<'_>) -> bool {
        self.owner_of(present.seen()) == Some(self.rules.owner.as_str())
    }

    /// The owner of what runs: our label on a process that its agent did not start proves nothing.
    pub(super) fn owner_of<'s>(&self, seen: &'s Seen) -> Option<&'s str> {
        let owner = seen.owner.as_deref();
        owner.filter(|owner| !(seen.not_owned && seen.running == Some(true) && *owner == self.rules.owner))
    }

    /// The quick answer for what is plainly as wanted; `false` only means that it takes a closer look.
    fn is_settled(&mut self, present: Present<'_>, want: &'a Want) -> bool {
        let (given, live) = (&present.seen().given, &present.seen().live);
        let kept = match want.spec.monitor.auto_type {
            AutoType::Resident if present.running => true,
            AutoType::Periodic => false,
            AutoType::Resident | AutoType::OneShot => return false,
        };
        let one = match (given, live) {
            (Version::Spec(given), Version::Spec(live)) => Arc::ptr_eq(given, live),
            (Version::Digests(given), Version::Digests(live)) => given == live,
            (Version::Unknown | Version::Digests(_) | Version::Spec(_), _) => false,
        };
        want.origin.state == State::Running
            && present.hosted
            && self.is_ours(present)
            && self.is_wanted(given, want)
            && (!kept || one || self.is_wanted(live, want))
    }

    /// Is this plainly the wanted spec?
    fn is_wanted(&mut self, version: &Version, want: &'a Want) -> bool {
        match version {
            Version::Spec(spec) => Arc::ptr_eq(spec, &want.spec) || spec.means(&want.spec),
            Version::Digests(revision) => {
                let plain = want.origin.on_change.is_empty() && !want.spec.sets_any(self.unsaid);
                plain && want.spec.revision() == revision || self.wish(want).revision() == revision
            }
            Version::Unknown => false,
        }
    }

    /// May this be touched? `Ok(true)`: it will be ours by that.
    pub(super) fn may_touch(&self, present: Present<'_>, want: &Want) -> Result<bool, String> {
        let adopt = self.rules.adopt || want.origin.adopt;
        match self.owner_of(present.seen()) {
            // What is ours and of which nothing is known is looked at anew if that was asked for.
            Some(owner) if owner == self.rules.owner => {
                let lost = |there: bool, version: &Version| there && *version == Version::Unknown;
                let seen = present.seen();
                Ok(adopt && (lost(present.hosted, &seen.given) || lost(present.running, &seen.live)))
            }
            Some(owner) => Err(format!(
                "it belongs to {owner:?}, and this is {:?}: remove it from these manifests, or plan them as \
                 --owner {owner}",
                self.rules.owner
            )),
            None if adopt => Ok(true),
            None => Err("it is there already and nobody owns it: --adopt (or `adopt: true`) takes it over \
                 without a restart"
                .to_owned()),
        }
    }

    /// `from`: the name that what was seen stands under, if it is another.
    pub(super) fn chain(
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
            Some(present) if adopting => situate_adopted(present, wish, &rules.caps),
            Some(present) => situate(present, wish, &rules.caps),
        };
        let chosen = situation.and_then(|is| Ok((is, choose(is, wish.goal, rules.caps)?)));
        let (is, ops) = match chosen {
            Ok(chosen) => chosen,
            Err(reason) => return self.hold(key, want, reason, detail(reason, present, &rules.caps)),
        };
        // Without a registry only a guard carries an owner's name.
        if adopting && !rules.caps.registry && want.origin.state == State::Unhosted {
            let detail = format!(
                "nobody owns it, and {} has no place to note an owner of what it does not guard: let it be guarded \
                 (`state: running`) to adopt it",
                rules.caps.name()
            );
            return self.hold(key, want, Reason::NotOwned, detail);
        }
        if ops.is_empty() {
            self.found.settled += 1;
            return;
        }
        let story = Story {
            wish,
            present,
            is,
            adopting,
            // Where operations use the registered spec, what is not registered cannot be checked.
            unlisted: there.is_none()
                && !rules.caps.uses_given
                && (rules.caps.lag_secs > 0 || rules.adopt || want.origin.adopt),
            rule: down_rule(want.origin.state),
            place: &want.origin.place,
        };
        let steps: Vec<Draft> = ops.into_iter().map(|(op, which)| story.draft(op, which)).collect();
        // Adopting does not restart: what runs with another spec stays as it is until the next plan.
        let deferred = adopting
            && wish.goal.state.needs_start()
            && present.filter(|present| present.running).is_some_and(|present| {
                wish.delta(&present.seen().live).is_some_and(|delta| delta.reload || delta.restart)
            });
        let waits = present.and_then(|present| relaunching(present, &is, wish, now.at));
        let lost = !is.old_known && names_by_the_new_spec(&steps, &rules.caps);
        let chain = Chain { key, want: Some(want), from, before: Vec::new(), steps };
        if let Some(left) = waits {
            let detail =
                format!("it died, and the agent is bringing it back: it has {} left to do so", span(left));
            self.found.held.push(chain.held(Reason::AgentRelaunching, detail));
            return;
        }
        self.found.lost += usize::from(lost);
        self.found.deferred += usize::from(deferred);
        self.found.chains.push(chain);
    }

    pub(super) fn wish(&mut self, want: &'a Want) -> &Wish<'a> {
        let origin = &want.origin;
        self.wishes
            .entry(addresses(&want.spec, origin))
            .or_insert_with(|| Wish::new(&want.spec, origin.state, &origin.on_change, &self.rules.caps))
    }

    pub(super) fn hold(&mut self, key: &InstanceKey, want: &Want, reason: Reason, detail: String) {
        let (instance, at) = (key.clone(), Some(want.origin.place.clone()));
        self.found.held.push(Held { instance, reason, detail, steps: Vec::new(), why: Vec::new(), at });
    }
}

/// Does a chain send the new spec where the old one belongs?
fn names_by_the_new_spec(steps: &[Draft], caps: &Caps) -> bool {
    let names =
        |draft: &Draft| matches!(draft.op, Op::Stop | Op::Kill | Op::Unhost) && draft.which == Which::New;
    caps.stop_needs_old && steps.iter().any(names)
}

/// A sentence for what the choice itself could not go on with.
pub fn detail(reason: Reason, present: Option<Present<'_>>, caps: &Caps) -> String {
    let digests = |seen: &Seen| [&seen.given, &seen.live].iter().any(|v| matches!(v, Version::Digests(_)));
    match reason {
        Reason::IdentityMix => {
            "what runs and what is guarded are two different processes: stop one of them by hand".to_owned()
        }
        Reason::NotOwned => {
            "nobody owns it, and it is another process than the wanted one: its identity differs, so \
             it cannot be adopted"
                .to_owned()
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
