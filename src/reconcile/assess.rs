//! How one instance stands, seen from what is wanted of it.
//!
//! Here what is known of two specs (both, digests, nothing) becomes the classes by which they differ. What is not
//! known is never guessed: either it does not matter for the way to go, or the instance is held.

use std::cell::OnceCell;
use std::sync::Arc;

use super::caps::Caps;
use super::choose::{Delta, Goal, RanStatus, Situation, StopBy, Stops};
use super::diff::{changes, delta, delta_of_revisions};
use super::effect::EffectTable;
use crate::model::{
    AutoType, Effect, Field, HashedSpec, Health, HoldReason, KnownSpec, LastRun, Monitor, OnChange, Present,
    Spec, SpecRevision, State, Time,
};

/// What is wanted of an instance, with the classes of its fields on its target.
pub struct TargetSpec<'a> {
    pub spec: &'a Arc<HashedSpec>,
    pub goal: Goal,
    pub effects: EffectTable,
    /// The same before the process's own word.
    plain: EffectTable,
    revision: OnceCell<SpecRevision>,
}

impl<'a> TargetSpec<'a> {
    pub fn new(spec: &'a Arc<HashedSpec>, state: State, on_change: &OnChange, caps: &Caps) -> TargetSpec<'a> {
        let goal = Goal {
            state,
            auto_type: spec.monitor.auto_type,
            has_restart: spec.control.restart_cmd.is_some(),
            has_reload: spec.control.reload_cmd.is_some(),
        };
        let on_target =
            |on_change| EffectTable::of(spec, on_change).without(|field| !caps.supports_field(field));
        let (classes, plain) = (on_target(on_change), on_target(&OnChange::new()));
        TargetSpec { spec, goal, effects: classes, plain, revision: OnceCell::new() }
    }

    pub fn revision(&self) -> &SpecRevision {
        self.revision.get_or_init(|| self.effects.revision(self.spec))
    }

    /// The fields that a reload puts into effect.
    pub fn reloaded(&self) -> Vec<Field> {
        let fields = Field::ALL.iter().copied();
        fields.filter(|field| self.effects.effect(*field) == Effect::Reload).collect()
    }

    /// By which classes a spec differs from the wanted one; `None`: nothing is known of it.
    pub fn delta(&self, version: &KnownSpec) -> Option<Delta> {
        match version {
            KnownSpec::Unknown => None,
            KnownSpec::Digests(old) => Some(self.delta_of_digests(old)),
            KnownSpec::Full(old) if Arc::ptr_eq(old, self.spec) || old.is_equivalent(self.spec) => {
                Some(Delta::default())
            }
            KnownSpec::Full(old) => Some(delta(&changes(old, self.spec, &self.effects))),
        }
    }
}

impl TargetSpec<'_> {
    /// Digests are made with the classes of their time. If they were made of this very spec before the process had a
    /// word on its fields, only that word is new: the engine is told, so that the next comparison knows it.
    fn delta_of_digests(&self, old: &SpecRevision) -> Delta {
        let delta = delta_of_revisions(old, self.revision());
        if !delta.is_none() && *old == self.plain.revision(self.spec) {
            return Delta { register: true, ..Delta::default() };
        }
        delta
    }

    /// Are these known to be two identities?
    fn are_two(&self, one: &KnownSpec, other: &KnownSpec) -> bool {
        let replace = |version: &KnownSpec| match version {
            KnownSpec::Unknown => None,
            KnownSpec::Digests(revision) => Some(revision.replace),
            KnownSpec::Full(spec) => Some(self.effects.revision(spec).replace),
        };
        match (one, other) {
            (KnownSpec::Full(one), KnownSpec::Full(other)) if one == other => false,
            (one, other) => replace(one).zip(replace(other)).is_some_and(|(one, other)| one != other),
        }
    }
}

/// A field that changes what runs and that the target has no place for.
pub fn unsupported(spec: &Spec, caps: &Caps) -> Option<Field> {
    let foreground = spec.control.start_mode.unwrap_or_default() != Default::default();
    if !spec.env.is_empty() && !caps.supports_field(Field::Env) {
        return Some(Field::Env);
    }
    if foreground && !caps.supports_field(Field::StartMode) {
        return Some(Field::StartMode);
    }
    let schedules = [
        (Field::CrontabRule, spec.monitor.crontab_rule.is_some()),
        (Field::CycleTime, spec.job.cycle_time.is_some()),
    ];
    let periodic = spec.monitor.auto_type == AutoType::Periodic;
    let usable = |(field, set): &(Field, bool)| *set && caps.schedules.contains(field);
    if !periodic || schedules.iter().any(usable) {
        return None;
    }
    let unusable = schedules.into_iter().find(|(_, set)| *set);
    Some(unusable.map_or(Field::AutoType, |(field, _)| field))
}

/// Nothing is there.
pub fn absent(wish: &TargetSpec<'_>) -> Situation {
    Situation {
        given: None,
        hosted: false,
        live: None,
        ran: RanStatus::NotThis,
        old_known: true,
        stops: Stops { new: StopBy::of(wish.spec), ..Stops::default() },
        identities_differ: false,
    }
}

/// What is there.
pub fn assess(present: Present<'_>, wish: &TargetSpec<'_>, caps: &Caps) -> Result<Situation, HoldReason> {
    let (seen, goal) = (present.seen(), wish.goal);
    let (given, live) = (wish.delta(&seen.registered_spec), wish.delta(&seen.live));
    let held = present.hosted || (caps.registry && present.registered);
    if goal.state.needs_start() {
        let kept = present.running && goal.auto_type == AutoType::Resident;
        if (kept && live.is_none()) || (present.hosted && given.is_none()) {
            return Err(HoldReason::OldSpecUnknown);
        }
    }
    let known = |version: &KnownSpec, delta: Option<Delta>| {
        delta == Some(Delta::default()) || version.spec().is_some()
    };
    let stop_by = |version: &KnownSpec| version.spec().map_or(StopBy::Stop, |spec| StopBy::of(spec));
    // Of what nothing is known, everything may differ.
    let all = Delta { register: true, reload: true, restart: true, replace: true };
    Ok(Situation {
        given: held.then(|| given.unwrap_or(all)),
        hosted: present.hosted,
        live: present.running.then(|| live.unwrap_or(all)),
        ran: ran(present, given, live, wish),
        old_known: (!held || known(&seen.registered_spec, given))
            && (!present.running || known(&seen.live, live)),
        stops: Stops {
            new: StopBy::of(wish.spec),
            given: stop_by(&seen.registered_spec),
            live: stop_by(&seen.live),
        },
        identities_differ: held && present.running && wish.are_two(&seen.registered_spec, &seen.live),
    })
}

/// What is there and is to be ours from now on, without a restart: what runs is taken as it is, and the engine is told
/// in any case. A spec that is not known is taken to be of the wanted identity (a live look makes sure of that before
/// anything is done); one that is known to be of another is not adopted.
pub fn assess_adopted(
    present: Present<'_>,
    wish: &TargetSpec<'_>,
    caps: &Caps,
) -> Result<Situation, HoldReason> {
    if !wish.goal.state.needs_start() {
        // What is to go is not guessed at.
        let is = assess(present, wish, caps)?;
        let tell = caps.registry && wish.goal.state == State::Stopped;
        let given = is.given.map(|given| Delta { register: given.register || tell, ..given });
        return Ok(Situation { given, ..is });
    }
    let seen = present.seen();
    let (given, live) = (wish.delta(&seen.registered_spec), wish.delta(&seen.live));
    let other = |there: bool, delta: Option<Delta>| there && delta.is_some_and(|delta| delta.replace);
    if other(present.running, live) || other(present.hosted, given) {
        return Err(HoldReason::NotOwned);
    }
    let held = present.hosted || (caps.registry && present.registered);
    Ok(Situation {
        given: held.then_some(Delta { register: true, ..Delta::default() }),
        hosted: present.hosted,
        live: present.running.then(Delta::default),
        ran: ran(present, given, live.or(Some(Delta::default())), wish),
        old_known: true,
        stops: Stops { new: StopBy::of(wish.spec), ..Stops::default() },
        identities_differ: false,
    })
}

fn ran(present: Present<'_>, given: Option<Delta>, live: Option<Delta>, wish: &TargetSpec<'_>) -> RanStatus {
    let as_wanted = |delta: Option<Delta>| match delta {
        None => RanStatus::Unknown,
        Some(Delta { reload: false, restart: false, replace: false, .. }) => RanStatus::This,
        Some(_) => RanStatus::NotThis,
    };
    if wish.goal.auto_type != AutoType::OneShot {
        return RanStatus::NotThis;
    }
    match present.seen().ran {
        // The last run begun is the one in progress.
        _ if present.running => as_wanted(live),
        LastRun::Never => RanStatus::NotThis,
        LastRun::Given => as_wanted(given),
        LastRun::Digest(run) if run == wish.revision().run => RanStatus::This,
        LastRun::Digest(_) => RanStatus::NotThis,
        LastRun::Unknown => RanStatus::Unknown,
    }
}

/// How long the agent is still expected to bring it back by itself; `None`: it is not the agent's turn.
pub fn relaunching(present: Present<'_>, is: &Situation, wish: &TargetSpec<'_>, now: Time) -> Option<u64> {
    let seen = present.seen();
    let agents = wish.goal.state.needs_start()
        && wish.goal.auto_type == AutoType::Resident
        && is.hosted
        && is.live.is_none()
        && is.given == Some(Delta::default())
        && seen.health != Health::Failed;
    let since = seen.since.filter(|_| agents)?;
    relaunch_timeout(&wish.spec.monitor).checked_sub(now.secs_since(since)).filter(|left| *left > 0)
}

/// As long as its tries take, at least 10 s and at most 15 min.
fn relaunch_timeout(monitor: &Monitor) -> u64 {
    let interval = u64::from(monitor.start_interval.unwrap_or(Monitor::START_INTERVAL));
    let retries = u64::from(monitor.start_retries.unwrap_or(Monitor::START_RETRIES));
    let check = u64::from(monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS));
    (interval * retries + check).clamp(10, 15 * 60)
}
