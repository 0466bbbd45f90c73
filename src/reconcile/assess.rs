//! Assessment of one instance: its observed state relative to its target spec.
//!
//! Compares specs at every level of knowledge (full, digests, unknown) and returns the effects by which they differ. An
//! unknown fact is never guessed: either it does not affect the plan, or the instance is held.

use std::cell::OnceCell;
use std::sync::Arc;

use super::caps::Caps;
use super::choose::{Delta, Goal, RanStatus, Situation, StopBy, Stops};
use super::diff::{changes, delta, delta_of_revisions};
use super::spec_effects::EffectTable;
use crate::model::{
    AutoType, Field, HashedSpec, Health, HoldReason, KnownSpec, LastRun, Monitor, OnChange, Present,
    RestartWhen, Spec, SpecRevision, SpecSection, State, Time,
};

/// The wanted spec of an instance, with the effects of its fields on its target.
pub struct TargetSpec<'a> {
    pub spec: &'a Arc<HashedSpec>,
    pub goal: Goal,
    pub effects: EffectTable,
    /// The effects without `on_change`.
    pub plain: EffectTable,
    revision: OnceCell<SpecRevision>,
}

impl<'a> TargetSpec<'a> {
    pub fn new(spec: &'a Arc<HashedSpec>, state: State, on_change: &OnChange, caps: &Caps) -> TargetSpec<'a> {
        let goal = Goal {
            state,
            auto_type: spec.monitor.auto_type,
            has_restart: spec.control.restart_cmd.is_some(),
            has_reload: spec.control.reload_cmd.is_some()
                || (spec.control.reload_signal.is_some() && caps.supports_field(Field::ReloadSignal)),
        };
        let on_target =
            |on_change| EffectTable::of(spec, on_change).without(|field| !caps.supports_field(field));
        let effects = on_target(on_change);
        let plain = if on_change.is_empty() { effects.clone() } else { on_target(&OnChange::new()) };
        TargetSpec { spec, goal, effects, plain, revision: OnceCell::new() }
    }

    pub fn revision(&self) -> &SpecRevision {
        self.revision.get_or_init(|| self.effects.revision(self.spec))
    }

    /// The fields that a reload puts into effect.
    pub fn reloaded(&self) -> Vec<Field> {
        let fields = Field::ALL.iter().copied();
        fields.filter(|field| self.effects.is_reloaded(*field)).collect()
    }

    /// The effects by which a spec differs from the wanted one; `None`: the spec is unknown.
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
    /// Digests depend on the `on_change` of their time. If they are digests of this spec without `on_change`, only
    /// `on_change` is new: the spec is registered again, so that the next comparison uses the new digests.
    fn delta_of_digests(&self, old: &SpecRevision) -> Delta {
        let delta = delta_of_revisions(old, self.revision());
        if !delta.is_none() && *old == self.plain.revision(self.spec) {
            return Delta { register: true, ..Delta::default() };
        }
        delta
    }

    /// Whether two specs are known to have two identities.
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

/// A field that the target does not support although it changes the running process.
pub fn unsupported(spec: &Spec, caps: &Caps) -> Option<Field> {
    let foreground = spec.control.start_mode.unwrap_or_default() != Default::default();
    if !spec.env.is_empty() && !caps.supports_field(Field::Env) {
        return Some(Field::Env);
    }
    if foreground && !caps.supports_field(Field::StartMode) {
        return Some(Field::StartMode);
    }
    let changes_process = [
        (Field::EnvFile, spec.env_file.is_some()),
        (Field::Sandbox, spec.sandbox.is_set()),
        (Field::Hooks, spec.hooks.is_set()),
        (Field::Restart, spec.restart.policy != RestartWhen::default()),
        (Field::StopSignal, spec.control.stop_signal.is_some() && spec.control.stop_cmd.is_none()),
        (Field::CrontabZone, spec.monitor.crontab_zone.is_some()),
    ];
    if let Some((field, _)) =
        changes_process.into_iter().find(|(field, is_set)| *is_set && !caps.supports_field(*field))
    {
        return Some(field);
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

/// The situation of an absent instance.
pub fn absent(target: &TargetSpec<'_>) -> Situation {
    Situation {
        given: None,
        hosted: false,
        live: None,
        ran: RanStatus::NotThis,
        old_known: true,
        stops: Stops { new: StopBy::of(target.spec), ..Stops::default() },
        identities_differ: false,
    }
}

/// The situation of a present instance.
pub fn assess(present: Present<'_>, target: &TargetSpec<'_>, caps: &Caps) -> Result<Situation, HoldReason> {
    let (seen, goal) = (present.seen(), target.goal);
    let (given, live) = (target.delta(&seen.specs.registered), target.delta(&seen.specs.live));
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
    // Every field of an unknown spec may differ.
    let all = Delta { register: true, reload: true, restart: true, replace: true };
    Ok(Situation {
        given: held.then(|| given.unwrap_or(all)),
        hosted: present.hosted,
        live: match is_completed(present, given, goal) {
            true => Some(Delta::default()),
            false => present.running.then(|| live.unwrap_or(all)),
        },
        ran: ran(present, given, live, target),
        old_known: (!held || known(&seen.specs.registered, given))
            && (!present.running || known(&seen.specs.live, live)),
        stops: Stops {
            new: StopBy::of(target.spec),
            given: stop_by(&seen.specs.registered),
            live: stop_by(&seen.specs.live),
        },
        identities_differ: held
            && present.running
            && target.are_two(&seen.specs.registered, &seen.specs.live),
    })
}

/// The situation of an instance that is adopted without a restart: the running process counts as wanted, and the spec is
/// registered in any case. An unknown spec is assumed to have the wanted identity (a live check verifies that before
/// the first step); a spec with another identity is not adopted.
pub fn assess_adopted(
    present: Present<'_>,
    target: &TargetSpec<'_>,
    caps: &Caps,
) -> Result<Situation, HoldReason> {
    if !target.goal.state.needs_start() {
        // A removal assumes nothing.
        let is = assess(present, target, caps)?;
        let registers = caps.registry && target.goal.state == State::Stopped;
        let given = is.given.map(|given| Delta { register: given.register || registers, ..given });
        return Ok(Situation { given, ..is });
    }
    let seen = present.seen();
    let (given, live) = (target.delta(&seen.specs.registered), target.delta(&seen.specs.live));
    let other = |there: bool, delta: Option<Delta>| there && delta.is_some_and(|delta| delta.replace);
    if other(present.running, live) || other(present.hosted, given) {
        return Err(HoldReason::NotOwned);
    }
    let held = present.hosted || (caps.registry && present.registered);
    Ok(Situation {
        given: held.then_some(Delta { register: true, ..Delta::default() }),
        hosted: present.hosted,
        live: (present.running || is_completed(present, given, target.goal)).then(Delta::default),
        ran: ran(present, given, live.or(Some(Delta::default())), target),
        old_known: true,
        stops: Stops { new: StopBy::of(target.spec), ..Stops::default() },
        identities_differ: false,
    })
}

/// Whether the process completed with the wanted spec. It then counts as running as wanted: a start would repeat its work.
fn is_completed(present: Present<'_>, given: Option<Delta>, goal: Goal) -> bool {
    present.seen().completed
        && !present.running
        && given == Some(Delta::default())
        && goal.state.needs_start()
        && goal.auto_type == AutoType::Resident
}

fn ran(
    present: Present<'_>,
    given: Option<Delta>,
    live: Option<Delta>,
    target: &TargetSpec<'_>,
) -> RanStatus {
    let as_wanted = |delta: Option<Delta>| match delta {
        None => RanStatus::Unknown,
        Some(Delta { reload: false, restart: false, replace: false, .. }) => RanStatus::This,
        Some(_) => RanStatus::NotThis,
    };
    if target.goal.auto_type != AutoType::OneShot {
        return RanStatus::NotThis;
    }
    match present.seen().specs.ran {
        // The last run is the one in progress.
        _ if present.running => as_wanted(live),
        LastRun::Never => RanStatus::NotThis,
        LastRun::Given => as_wanted(given),
        LastRun::Digest(run) if run == target.revision().run => RanStatus::This,
        LastRun::Digest(_) => RanStatus::NotThis,
        LastRun::Unknown => RanStatus::Unknown,
    }
}

/// Seconds left for the agent to relaunch the process; `None`: no relaunch is pending.
pub fn relaunching(present: Present<'_>, is: &Situation, target: &TargetSpec<'_>, now: Time) -> Option<u64> {
    let seen = present.seen();
    let agents = target.goal.state.needs_start()
        && target.goal.auto_type == AutoType::Resident
        && is.hosted
        && is.live.is_none()
        && is.given == Some(Delta::default())
        && seen.health != Health::Failed;
    let since = seen.since.filter(|_| agents)?;
    relaunch_timeout(target.spec).checked_sub(now.secs_since(since)).filter(|left| *left > 0)
}

/// Duration of all start attempts, at least 10 s and at most 15 min.
fn relaunch_timeout(spec: &Spec) -> u64 {
    let monitor = &spec.monitor;
    let interval = u64::from(monitor.start_interval.unwrap_or(Monitor::START_INTERVAL));
    let retries =
        u64::from(spec.restart.attempts.or(monitor.start_retries).unwrap_or(Monitor::START_RETRIES));
    let check = u64::from(monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS));
    (interval * retries + check).clamp(10, 15 * 60)
}
