//! Choice of operations for one instance: the fewest that lead from its situation to its goal.
//!
//! The input is the effects by which two specs differ ([`Delta`]) and the capabilities of the target ([`Caps`]), never a
//! spec. The state space is therefore small, and a test compares every case with a search for the shortest plan.
//!
//! Invariants: fewest operations, then least disturbance; after any executed prefix the next choice is the remainder;
//! an unknown identity is never acted on.

use super::caps::Caps;
use crate::model::{AutoType, Effect, HoldReason, Op, Spec, SpecSide, State};

/// The effects by which a spec differs from the wanted one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Delta {
    pub register: bool,
    pub reload: bool,
    pub restart: bool,
    /// The identity differs.
    pub replace: bool,
}

impl Delta {
    pub fn is_none(self) -> bool {
        self == Delta::default()
    }

    /// The strongest effect on a running process.
    fn strongest_effect(self) -> Effect {
        match self {
            Delta { replace: true, .. } => Effect::Replace,
            Delta { restart: true, .. } => Effect::Restart,
            Delta { reload: true, .. } => Effect::Reload,
            Delta { .. } => Effect::None,
        }
    }
}

/// State of an instance relative to the wanted spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Situation {
    /// The registered spec.
    pub given: Option<Delta>,
    pub hosted: bool,
    /// The spec in effect in the running process.
    pub live: Option<Delta>,
    pub ran: RanStatus,
    /// The old spec itself is known, not only its digests.
    pub old_known: bool,
    pub stops: Stops,
    /// The registered and the live spec have two identities, and neither is the wanted one.
    pub identities_differ: bool,
}

/// Whether a one-shot process ran with the wanted spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RanStatus {
    /// It never ran, or ran with another spec.
    NotThis,
    This,
    Unknown,
}

/// The part of the desired state that the choice depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Goal {
    pub state: State,
    pub auto_type: AutoType,
    pub has_restart: bool,
    pub has_reload: bool,
}

/// The command that stops a process on a target that cannot signal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StopBy {
    /// The stop_cmd; also assumed for an unknown spec.
    #[default]
    Stop,
    /// The spec has only a kill_cmd.
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

/// The stop commands of the wanted, the registered and the live spec.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stops {
    pub new: StopBy,
    pub given: StopBy,
    pub live: StopBy,
}

/// The operations that reach the goal, in order.
pub fn choose(is: Situation, goal: Goal, caps: Caps) -> Result<Vec<(Op, SpecSide)>, HoldReason> {
    // Scheduled runs and one-shots end; only a resident process can contradict its supervision.
    if goal.auto_type == AutoType::Resident && is.mixed() {
        return Err(HoldReason::IdentityMix);
    }
    let mut transition = Transition { is, goal, caps, steps: Vec::new() };
    match (goal.state, goal.auto_type) {
        (State::Stopped | State::Absent, _) => transition.down()?,
        (State::Running | State::Unhosted, AutoType::Resident) => transition.up_resident()?,
        (State::Running | State::Unhosted, AutoType::Periodic) => transition.up_periodic()?,
        (State::Running | State::Unhosted, AutoType::OneShot) => transition.up_once()?,
    }
    Ok(transition.steps)
}

impl Situation {
    /// Whether the supervision and the process have two identities.
    fn mixed(&self) -> bool {
        match (self.hosted, self.given, self.live) {
            (true, Some(given), Some(live)) => self.identities_differ || given.replace != live.replace,
            _ => false,
        }
    }
}

/// The steps so far, and the situation after them.
struct Transition {
    is: Situation,
    goal: Goal,
    caps: Caps,
    steps: Vec<(Op, SpecSide)>,
}

impl Transition {
    /// Stops and unsupervises, then registers or unregisters.
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

    /// Supervises by schedule. A run in progress is not touched.
    fn up_periodic(&mut self) -> Result<(), HoldReason> {
        if self.is.hosted && self.is.given.is_some_and(|given| given.replace) {
            self.unhost_old()?;
        }
        self.hosting();
        Ok(())
    }

    /// Runs once per run digest: no second run, and a run in progress is not stopped for another.
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

    /// Supervises with the wanted spec or unsupervises, and updates the registry.
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

    /// Reloads or restarts a running process.
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

    /// Whether the process must stop: another identity, or a restart on a target without one.
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

    /// Stops with the live spec, or with the registered one where the target uses that.
    fn stop(&mut self) -> Result<(), HoldReason> {
        let live = self.is.live.unwrap_or_default();
        let identities_differ = self.is.identities_differ;
        if self.caps.operates_on_registered_spec
            && self.is.given.is_none_or(|given| identities_differ || given.replace != live.replace)
        {
            // The registered spec does not identify the process: register its spec first.
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
        // The old spec has no stop command, but the new one of the same identity has.
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

    /// Unsupervises with the registered spec.
    fn unhost_old(&mut self) -> Result<(), HoldReason> {
        let has = self.is.given.unwrap_or_default();
        self.check_known(has)?;
        self.push(Op::Unsupervise, self.spec_side(has));
        Ok(())
    }

    /// The spec that identifies the process or its supervision. An unknown one that must be sent is replaced by the new
    /// spec; [`check_known`](Self::check_known) makes sure that the identity is the same.
    fn spec_side(&self, has: Delta) -> SpecSide {
        let lost = self.caps.stop_needs_old && !self.is.old_known;
        if has.is_none() || lost { SpecSide::New } else { SpecSide::Old }
    }

    /// Another identity needs the old spec; with weaker differences the new spec identifies the process as well.
    fn check_known(&self, has: Delta) -> Result<(), HoldReason> {
        match has.replace && self.caps.stop_needs_old && !self.is.old_known {
            true => Err(HoldReason::OldSpecUnknown),
            false => Ok(()),
        }
    }

    fn register(&mut self, which: SpecSide) {
        self.push(Op::Register, which);
    }

    /// Adds a step and applies it to the situation.
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
