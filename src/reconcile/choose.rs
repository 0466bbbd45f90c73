//! One instance: from how it is and how it should be to the fewest operations between the two.
//!
//! Nothing here looks at a spec. What counts is by which classes of fields two specs differ ([`Delta`]), and what
//! the target can do ([`Caps`]); so the whole decision fits on two screens, and a test can try every case of it
//! against a search for the shortest way.
//!
//! Invariants: fewest operations, then least disturbance; after any executed prefix the rest is what is chosen next;
//! an identity that is not known is never acted on.

use super::caps::Caps;
use crate::model::{AutoType, Effect, HoldReason, Op, Spec, SpecSide, State};

/// By which classes of fields a spec differs from the wanted one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Delta {
    pub register: bool,
    pub reload: bool,
    pub restart: bool,
    /// Another identity.
    pub replace: bool,
}

impl Delta {
    pub fn is_none(self) -> bool {
        self == Delta::default()
    }

    /// The strongest class that a running process feels.
    fn strongest_effect(self) -> Effect {
        match self {
            Delta { replace: true, .. } => Effect::Replace,
            Delta { restart: true, .. } => Effect::Restart,
            Delta { reload: true, .. } => Effect::Reload,
            Delta { .. } => Effect::None,
        }
    }
}

/// How an instance is, seen from the wanted spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Situation {
    /// The spec the engine holds.
    pub given: Option<Delta>,
    pub hosted: bool,
    /// The spec in effect in the running process.
    pub live: Option<Delta>,
    pub ran: RanStatus,
    /// The old spec itself is known, not only that it differs.
    pub old_known: bool,
    pub stops: Stops,
    /// What is held and what runs are two identities, though neither is the wanted one.
    pub identities_differ: bool,
}

/// What is known of the runs of a one-shot process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RanStatus {
    /// Never, or something else.
    NotThis,
    This,
    Unknown,
}

/// What is wanted of an instance, as far as it decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Goal {
    pub state: State,
    pub auto_type: AutoType,
    pub has_restart: bool,
    pub has_reload: bool,
}

/// By which command a spec lets its process be stopped, where the target cannot signal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StopBy {
    /// Its stop_cmd; also where the spec is not known.
    #[default]
    Stop,
    /// It has only a kill_cmd.
    Kill,
    Nothing,
}

impl StopBy {
    pub fn of(spec: &Spec) -> StopBy {
        match (&spec.control.stop_cmd, &spec.control.kill_cmd) {
            (Some(_), _) => StopBy::Stop,
            (None, Some(_)) => StopBy::Kill,
            (None, None) => StopBy::Nothing,
        }
    }
}

/// The same for the three specs there may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stops {
    pub new: StopBy,
    pub given: StopBy,
    pub live: StopBy,
}

/// The operations that make it so, in order.
pub fn choose(is: Situation, goal: Goal, caps: Caps) -> Result<Vec<(Op, SpecSide)>, HoldReason> {
    // The runs of a schedule come and go; only a process that is kept can contradict its guard.
    if goal.auto_type == AutoType::Resident && is.mixed() {
        return Err(HoldReason::IdentityMix);
    }
    let mut way = Transition { is, goal, caps, steps: Vec::new() };
    match (goal.state, goal.auto_type) {
        (State::Stopped | State::Absent, _) => way.down()?,
        (State::Running | State::Unhosted, AutoType::Resident) => way.up_resident()?,
        (State::Running | State::Unhosted, AutoType::Periodic) => way.up_periodic()?,
        (State::Running | State::Unhosted, AutoType::OneShot) => way.up_once()?,
    }
    Ok(way.steps)
}

impl Situation {
    /// A guard and a process under two identities.
    fn mixed(&self) -> bool {
        match (self.hosted, self.given, self.live) {
            (true, Some(given), Some(live)) => self.identities_differ || given.replace != live.replace,
            _ => false,
        }
    }
}

/// The situation as it will be after the steps so far.
struct Transition {
    is: Situation,
    goal: Goal,
    caps: Caps,
    steps: Vec<(Op, SpecSide)>,
}

impl Transition {
    /// Not running, not guarded; then registered or not, as wanted.
    fn down(&mut self) -> Result<(), HoldReason> {
        if self.is.live.is_some() {
            self.stop()?;
        }
        // Also after a stop: it ends only the supervision of the identity that it stops.
        if self.is.hosted {
            self.unhost_old()?;
        }
        let given = self.is.given;
        match self.goal.state {
            State::Absent if self.caps.registry => {
                if let Some(given) = given {
                    self.push(Op::Unregister, if given.is_none() { SpecSide::New } else { SpecSide::Old });
                }
            }
            State::Stopped if self.caps.registry && given != Some(Delta::default()) => {
                self.register(SpecSide::New)
            }
            State::Absent | State::Stopped | State::Running | State::Unhosted => {}
        }
        Ok(())
    }

    fn up_resident(&mut self) -> Result<(), HoldReason> {
        if self.is.live.is_some_and(|live| self.must_stop(live)) {
            self.stop()?;
        } else if self.is.live.is_none() && self.is.hosted && self.is.given.is_some_and(|given| given.replace)
        {
            self.unhost_old()?;
        }
        match self.is.live {
            None => self.start(),
            Some(live) => self.refresh(live),
        }
        self.hosting();
        Ok(())
    }

    /// A guard that runs it by schedule. A run in progress is not ours.
    fn up_periodic(&mut self) -> Result<(), HoldReason> {
        if self.is.hosted && self.is.given.is_some_and(|given| given.replace) {
            self.unhost_old()?;
        }
        self.hosting();
        Ok(())
    }

    /// Once for each run digest: what ran is not run again, and what runs is not stopped to begin another.
    fn up_once(&mut self) -> Result<(), HoldReason> {
        let registered = !self.caps.registry || self.is.given == Some(Delta::default());
        match self.is.ran {
            RanStatus::Unknown => return Err(HoldReason::RunUnknown),
            RanStatus::This if registered => return Ok(()),
            RanStatus::NotThis if self.is.live.is_some() => return Err(HoldReason::RunInProgress),
            RanStatus::This | RanStatus::NotThis => {}
        }
        if self.is.hosted && self.is.given.is_some_and(|given| given.replace) {
            self.unhost_old()?;
        }
        match self.is.ran {
            RanStatus::This => self.register(SpecSide::New),
            RanStatus::NotThis | RanStatus::Unknown => self.start(),
        }
        Ok(())
    }

    /// Guarded with the wanted spec, or not guarded; the registry knows the wanted one.
    fn hosting(&mut self) {
        let stale = self.is.given != Some(Delta::default());
        match (self.goal.state == State::Running, self.is.hosted) {
            (true, false) => {
                if self.caps.operates_on_registered_spec && stale {
                    self.register(SpecSide::New);
                }
                self.push(Op::Supervise, SpecSide::New);
            }
            (true, true) if stale && self.caps.registry => self.register(SpecSide::New),
            (true, true) if stale => self.push(Op::Supervise, SpecSide::New),
            (true, true) => {}
            (false, hosted) => {
                if self.caps.registry && stale {
                    self.register(SpecSide::New);
                }
                if hosted {
                    self.push(Op::Unsupervise, SpecSide::New);
                }
            }
        }
    }

    /// Brings a running process up to date under its pid, or restarts it.
    fn refresh(&mut self, live: Delta) {
        let op = match live.strongest_effect() {
            Effect::Reload if self.goal.has_reload => Op::Reload,
            Effect::Reload | Effect::Restart => Op::Restart,
            Effect::None | Effect::Register | Effect::Replace => return,
        };
        if self.caps.operates_on_registered_spec && self.is.given != Some(Delta::default()) {
            self.register(SpecSide::New);
        }
        self.push(op, SpecSide::New);
    }

    /// Another identity, or a restart where there is none.
    fn must_stop(&self, live: Delta) -> bool {
        let restarts = match live.strongest_effect() {
            Effect::Replace => return true,
            Effect::Restart => true,
            Effect::Reload => !self.goal.has_reload,
            Effect::None | Effect::Register => false,
        };
        restarts && self.caps.needs_commands && !self.goal.has_restart
    }

    fn start(&mut self) {
        if self.caps.operates_on_registered_spec && self.is.given != Some(Delta::default()) {
            self.register(SpecSide::New);
        }
        self.push(Op::Start, SpecSide::New);
    }

    /// With the spec that the process has; a registry uses the one it holds.
    fn stop(&mut self) -> Result<(), HoldReason> {
        let live = self.is.live.unwrap_or_default();
        let apart = self.is.identities_differ;
        if self.caps.operates_on_registered_spec
            && self.is.given.is_none_or(|given| apart || given.replace != live.replace)
        {
            // It cannot name this process: it is told first.
            if live.replace && !self.is.old_known {
                return Err(HoldReason::OldSpecUnknown);
            }
            if self.is.hosted {
                self.unhost_old()?;
            }
            self.register(if live.replace { SpecSide::Old } else { SpecSide::New });
        }
        let (has, by) = match self.caps.operates_on_registered_spec {
            true => (self.is.given.unwrap_or_default(), self.is.stops.given),
            false => (live, self.is.stops.live),
        };
        self.check_known(has)?;
        let (mut which, mut by) = (self.spec_side(has), by);
        if which == SpecSide::New {
            by = self.is.stops.new;
        }
        // The old spec says no way to stop it, the new one of the same identity does.
        if self.caps.needs_commands && by == StopBy::Nothing && !has.replace && which == SpecSide::Old {
            if self.caps.operates_on_registered_spec && self.is.stops.new != StopBy::Nothing {
                self.register(SpecSide::New);
            }
            (which, by) = (SpecSide::New, self.is.stops.new);
        }
        let op = match by {
            _ if !self.caps.needs_commands => Op::Stop,
            StopBy::Stop => Op::Stop,
            StopBy::Kill => Op::Kill,
            StopBy::Nothing => return Err(HoldReason::NoStopCommand),
        };
        self.push(op, which);
        Ok(())
    }

    /// With the spec that the guard has.
    fn unhost_old(&mut self) -> Result<(), HoldReason> {
        let has = self.is.given.unwrap_or_default();
        self.check_known(has)?;
        self.push(Op::Unsupervise, self.spec_side(has));
        Ok(())
    }

    /// The spec to name something by. One that must be sent and is not known is replaced by the new one, if that
    /// names the same.
    fn spec_side(&self, has: Delta) -> SpecSide {
        let lost = self.caps.stop_needs_old && !self.is.old_known;
        if has.is_none() || lost { SpecSide::New } else { SpecSide::Old }
    }

    /// Another identity has to be named as it was; anything weaker goes on with the new spec.
    fn check_known(&self, has: Delta) -> Result<(), HoldReason> {
        match has.replace && self.caps.stop_needs_old && !self.is.old_known {
            true => Err(HoldReason::OldSpecUnknown),
            false => Ok(()),
        }
    }

    fn register(&mut self, which: SpecSide) {
        self.push(Op::Register, which);
    }

    /// Takes a step, and the situation with it.
    fn push(&mut self, op: Op, which: SpecSide) {
        self.steps.push((op, which));
        let new = Some(Delta::default());
        let is = &mut self.is;
        match op {
            Op::Register => {
                is.given = if which == SpecSide::New { new } else { is.live };
                is.identities_differ = false;
                is.stops.given = if which == SpecSide::New { is.stops.new } else { is.stops.live };
            }
            Op::Unregister => is.given = None,
            Op::Start => (is.live, is.hosted, is.given, is.ran) = (new, true, new, RanStatus::This),
            Op::Stop | Op::Kill => {
                is.hosted = is.mixed();
                is.live = None;
                is.identities_differ = false;
            }
            Op::Supervise => (is.hosted, is.given) = (true, new),
            Op::Unsupervise => is.hosted = false,
            Op::Restart => is.live = new,
            Op::Reload => is.live = is.live.map(|live| Delta { reload: false, ..live }),
        }
        if matches!(op, Op::Restart | Op::Reload) && self.caps.restart_registers_spec {
            is.given = new;
        }
        if !is.hosted && !self.caps.registry {
            is.given = None;
        }
    }
}
