//! Simulated fleet: instances, and the precondition and effect of each operation.
//!
//! Implements the operation table independently: tests check the planner against it, so they share no code.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::backend::{Operation, RowState};
use crate::model::{
    AutoType, Dialect, Field, HashedSpec, InstanceKey, KnownSpec, LastRun, ObservedInstance, ObservedSpecs,
    Op, RunningProcess, Spec, SpecRevision, live_after_registration,
};

/// Reason why an operation changed nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PreconditionError {
    #[error("{op} {instance}: {why}")]
    Operation { op: Op, instance: InstanceKey, why: &'static str },
    #[error("{0} is still supervised")]
    StillSupervised(InstanceKey),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Fleet {
    dialect: Dialect,
    /// Whether observations contain whole specs, or only their digests.
    shows_specs: bool,
    procs: BTreeMap<InstanceKey, Proc>,
    next_pid: u32,
    /// Number of starts and restarts per instance.
    launches: BTreeMap<InstanceKey, usize>,
    /// Pids of foreign processes with the identities of these instances.
    strangers: BTreeMap<InstanceKey, u32>,
}

/// Actual state of one instance.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Proc {
    pub owner: Option<String>,
    pub given: Option<SimulatedSpec>,
    pub hosted: bool,
    pub live: Option<SimulatedSpec>,
    pub pid: Option<u32>,
    /// Spec of the last run.
    pub ran: Option<SimulatedSpec>,
}

/// A spec and its revision.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulatedSpec {
    pub spec: Arc<HashedSpec>,
    pub revision: Option<SpecRevision>,
}

impl SimulatedSpec {
    fn same_identity(&self, other: &Spec) -> bool {
        let identity = |spec: &Spec| {
            let i = spec.identity.clone();
            (i.proc_name, i.setup_path, i.pid_path, i.user, i.value_key, spec.monitor.auto_type)
        };
        identity(&self.spec) == identity(other)
    }

    fn version(&self, shows_specs: bool) -> KnownSpec {
        match (shows_specs, self.revision) {
            (true, _) => KnownSpec::Full(Arc::clone(&self.spec)),
            (false, Some(revision)) => KnownSpec::Digests(revision),
            (false, None) => KnownSpec::Unknown,
        }
    }
}

/// Differences between the engines.
struct EngineTraits {
    registry: bool,
    uses_given: bool,
    restart_gives: bool,
    needs_old: bool,
    needs_commands: bool,
}

fn habits(dialect: Dialect) -> EngineTraits {
    let (registry, uses_given, restart_gives, needs_old, needs_commands) = match dialect {
        Dialect::GseV1 => (true, true, false, false, true),
        Dialect::GseV2 | Dialect::GseApigw | Dialect::Job => (false, false, false, true, true),
        Dialect::Abide => (true, false, true, false, false),
    };
    EngineTraits { registry, uses_given, restart_gives, needs_old, needs_commands }
}

impl Fleet {
    pub fn new(dialect: Dialect) -> Fleet {
        Fleet {
            dialect,
            shows_specs: true,
            procs: BTreeMap::new(),
            next_pid: 100,
            launches: BTreeMap::new(),
            strangers: BTreeMap::new(),
        }
    }

    /// Observations contain digests only from now on.
    pub fn hide_specs(mut self) -> Fleet {
        self.shows_specs = false;
        self
    }

    pub fn dialect(&self) -> Dialect {
        self.dialect
    }

    pub fn procs(&self) -> &BTreeMap<InstanceKey, Proc> {
        &self.procs
    }

    pub fn launches(&self) -> &BTreeMap<InstanceKey, usize> {
        &self.launches
    }

    /// Adds an instance in the given state.
    pub fn place(&mut self, key: InstanceKey, mut proc: Proc) {
        if proc.live.is_some() && proc.pid.is_none() {
            proc.pid = Some(self.fresh_pid());
        }
        if !habits(self.dialect).registry && !proc.hosted {
            proc.given = None;
        }
        self.procs.insert(key, proc);
    }

    /// Starts a foreign process with an instance's identity, and returns its pid.
    pub fn place_stranger(&mut self, key: InstanceKey) -> u32 {
        let pid = self.fresh_pid();
        self.strangers.insert(key, pid);
        pid
    }

    pub fn strangers(&self) -> &BTreeMap<InstanceKey, u32> {
        &self.strangers
    }

    /// The pid that a live check finds for an instance's identity, and whether the process is foreign.
    pub fn pid_of(&self, key: &InstanceKey) -> Option<(u32, bool)> {
        let own = self.procs.get(key).and_then(|proc| proc.pid).map(|pid| (pid, false));
        own.or_else(|| self.strangers.get(key).map(|pid| (*pid, true)))
    }

    /// The result of an operation that meets a foreign process or registration; `None`: there is none.
    pub fn answer_of_others(&mut self, order: &Operation) -> Option<(RowState, &'static str)> {
        let proc = self.procs.get(&order.instance);
        let other = proc.filter(|proc| proc.given.is_some() && proc.owner != order.owner);
        if order.op == Op::Register && !order.before.registered && other.is_some() {
            return Some((RowState::AlreadyRegistered, "the process is already registered"));
        }
        let pid = *self.strangers.get(&order.instance)?;
        match order.op {
            Op::Start => return Some((RowState::AlreadyRunning, "the process is already running")),
            Op::Supervise => {
                // Supervision adopts the existing process.
                let used = if habits(self.dialect).uses_given {
                    proc.and_then(|proc| proc.given.clone())
                } else {
                    order.spec.clone().map(|spec| SimulatedSpec { spec, revision: order.revision })
                };
                let proc = self.procs.entry(order.instance.clone()).or_default();
                (proc.live, proc.pid) = (used, Some(pid));
                self.strangers.remove(&order.instance);
            }
            // Commands identify the process by its identity, also one that another program started.
            Op::Stop | Op::Kill | Op::Restart | Op::Reload => drop(self.strangers.remove(&order.instance)),
            Op::Register | Op::Unregister | Op::Unsupervise => {}
        }
        None
    }

    pub fn running(&self) -> impl Iterator<Item = &InstanceKey> {
        self.procs.iter().filter(|(_, proc)| proc.live.is_some()).map(|(key, _)| key)
    }

    /// The process exits; supervision has not noticed yet.
    pub fn dies(&mut self, key: &InstanceKey) {
        if let Some(proc) = self.procs.get_mut(key) {
            (proc.live, proc.pid) = (None, None);
        }
    }

    /// Ends all runs of non-resident processes. Returns whether there were any.
    pub fn runs_end(&mut self) -> bool {
        let mut ended = false;
        let kept = |live: &SimulatedSpec| live.spec.monitor.auto_type == AutoType::Resident;
        for proc in self.procs.values_mut().filter(|proc| proc.live.as_ref().is_some_and(|live| !kept(live)))
        {
            (proc.live, proc.pid) = (None, None);
            ended = true;
        }
        ended
    }

    /// The observation. An instance without any state is absent.
    pub fn rows(&self) -> BTreeMap<InstanceKey, ObservedInstance> {
        let mut rows = BTreeMap::new();
        for (key, proc) in &self.procs {
            let there = proc.given.is_some() || proc.hosted || proc.live.is_some() || proc.ran.is_some();
            if there {
                let mut row = self.row(proc);
                // A platform reports any process with a registered identity; the Abide agent does not.
                let known = proc.given.is_some() && self.dialect != Dialect::Abide;
                if let (true, None, Some(pid)) = (known, proc.pid, self.strangers.get(key)) {
                    (row.running, row.process.pid, row.specs.live) =
                        (Some(true), Some(*pid), row.specs.registered.clone());
                }
                rows.insert(key.clone(), row);
            }
        }
        rows
    }

    fn row(&self, proc: &Proc) -> ObservedInstance {
        let version = |held: &Option<SimulatedSpec>| {
            held.as_ref().map_or(KnownSpec::Unknown, |held| held.version(self.shows_specs))
        };
        let ran = match &proc.ran {
            None => LastRun::Never,
            Some(ran) => match ran.revision {
                Some(revision) => LastRun::Digest(revision.run),
                None => LastRun::Unknown,
            },
        };
        let labels = proc.given.as_ref().map(|given| given.spec.labels.clone()).unwrap_or_default();
        ObservedInstance {
            registered: Some(proc.given.is_some() && habits(self.dialect).registry),
            hosted: Some(proc.hosted),
            running: Some(proc.live.is_some()),
            labels,
            owner: proc.owner.as_deref().map(Arc::from),
            specs: ObservedSpecs {
                registered: version(&proc.given),
                live: version(&proc.live),
                ran,
                ..ObservedSpecs::default()
            },
            process: RunningProcess { pid: proc.pid, ..RunningProcess::default() },
            ..ObservedInstance::default()
        }
    }

    fn fresh_pid(&mut self) -> u32 {
        self.next_pid += 1;
        self.next_pid
    }

    /// Executes one operation. `Err`: its precondition does not hold, and nothing changed.
    pub fn carry_out(&mut self, order: &Operation) -> Result<(), PreconditionError> {
        let habits = habits(self.dialect);
        let mut proc = self.taken_over(order)?;
        let given = proc.given.clone();
        // Operations of an engine with a registry use the registered spec.
        let sent = order.spec.clone().map(|spec| SimulatedSpec { spec, revision: order.revision });
        let uses_given = habits.uses_given && order.op != Op::Register;
        let used = if uses_given { given.clone() } else { sent };
        if let Some(why) = self.refusal(order, &proc, &used, uses_given) {
            return Err(PreconditionError::Operation { op: order.op, instance: order.instance.clone(), why });
        }
        match order.op {
            Op::Register => {
                proc.given = used;
                self.register_live(&mut proc);
            }
            Op::Unregister => proc.given = None,
            Op::Start => {
                (proc.live, proc.given, proc.ran, proc.hosted) = (used.clone(), used.clone(), used, true);
                proc.pid = Some(self.fresh_pid());
            }
            Op::Stop | Op::Kill => {
                // The supervision of another identity stays.
                let other = |live: &SimulatedSpec| {
                    given.as_ref().is_some_and(|given| !given.same_identity(&live.spec))
                };
                proc.hosted &= proc.live.as_ref().is_some_and(other);
                (proc.live, proc.pid) = (None, None);
            }
            Op::Supervise => {
                (proc.hosted, proc.given) = (true, used);
                self.register_live(&mut proc);
            }
            Op::Unsupervise => proc.hosted = false,
            Op::Restart => {
                proc.live = used.clone();
                proc.pid = Some(self.fresh_pid());
                proc.given = if habits.restart_gives { used } else { given };
            }
            Op::Reload => {
                proc.live = reloaded(proc.live, &used, &order.reloaded_fields);
                proc.given = if habits.restart_gives { used } else { given };
                self.register_live(&mut proc);
            }
        }
        if !habits.registry && !proc.hosted {
            proc.given = None;
        }
        if matches!(order.op, Op::Start | Op::Restart) {
            *self.launches.entry(order.instance.clone()).or_default() += 1;
        }
        // An operation that registers a spec sets the owner.
        let gives = match order.op {
            Op::Register | Op::Start | Op::Supervise => true,
            Op::Restart | Op::Reload => habits.restart_gives,
            Op::Stop | Op::Kill | Op::Unsupervise | Op::Unregister => false,
        };
        if gives {
            proc.owner = order.owner.clone();
        }
        if let Some(from) = &order.from {
            self.procs.remove(from);
        }
        self.procs.insert(order.instance.clone(), proc);
        Ok(())
    }

    /// At Abide's own engine the registered fields with effect Register take effect in the running process at once.
    fn register_live(&self, proc: &mut Proc) {
        let (Some(given), Some(live)) = (&proc.given, &mut proc.live) else { return };
        if self.dialect != Dialect::Abide {
            return;
        }
        let after = live_after_registration((&live.spec, live.revision), (&given.spec, given.revision));
        if let Some((spec, revision)) = after {
            *live = SimulatedSpec { spec: Arc::new(HashedSpec::new(spec)), revision };
        }
    }

    /// Reason why the target refuses an operation in this state; `None`: it carries it out.
    fn refusal(
        &self,
        order: &Operation,
        proc: &Proc,
        used: &Option<SimulatedSpec>,
        uses_given: bool,
    ) -> Option<&'static str> {
        let (habits, given) = (habits(self.dialect), &proc.given);
        let kind = used.as_ref().or(given.as_ref()).map(|held| held.spec.monitor.auto_type);
        let one = |held: &Option<SimulatedSpec>| match (held, used) {
            (Some(held), Some(used)) => held.same_identity(&used.spec),
            _ => false,
        };
        let ours = proc.owner == order.owner;
        let other_supervision = proc.hosted && given.is_some() && !one(given);
        let other_process = proc.live.is_some() && !one(&proc.live) && kind != Some(AutoType::Periodic);
        let needs_same = habits.needs_old || uses_given;
        let lacks_command = !has_command(order.op, used);
        let why = match order.op {
            Op::Register if !habits.registry => "there is no registry",
            Op::Register if used.is_none() => "no spec was sent",
            Op::Register if other_supervision || other_process => "another identity is in use",
            Op::Unregister if !habits.registry || given.is_none() => "not registered",
            Op::Unregister if proc.hosted || proc.live.is_some() => "in use",
            Op::Start if used.is_none() => "no spec is known",
            Op::Start if proc.live.is_some() => "already running",
            Op::Start if self.is_taken(order, used) => "another process has this identity",
            Op::Start if kind == Some(AutoType::Periodic) => "runs by schedule",
            Op::Start if other_supervision => "another identity is supervised",
            Op::Stop | Op::Kill if proc.live.is_none() => "not running",
            Op::Stop | Op::Kill if needs_same && !one(&proc.live) => "another process runs",
            Op::Stop | Op::Kill if habits.needs_commands && lacks_command => "no command for it",
            Op::Supervise if used.is_none() => "no spec is known",
            Op::Supervise if other_supervision || other_process => "another identity is in use",
            Op::Supervise if proc.hosted && ours && (uses_given || given == used) => "already supervised",
            Op::Unsupervise if !proc.hosted => "not supervised",
            Op::Unsupervise if needs_same && !one(given) => "another identity is supervised",
            Op::Restart | Op::Reload if proc.live.is_none() => "not running",
            Op::Restart | Op::Reload if kind != Some(AutoType::Resident) => "not a resident process",
            Op::Restart | Op::Reload if !one(&proc.live) => "another process runs",
            Op::Restart if lacks_command && habits.needs_commands => "no command for it",
            Op::Reload if lacks_command => "no command for it",
            Op::Register
            | Op::Unregister
            | Op::Start
            | Op::Stop
            | Op::Kill
            | Op::Supervise
            | Op::Unsupervise
            | Op::Restart
            | Op::Reload => return None,
        };
        Some(why)
    }

    /// Whether another instance of the host has the identity.
    fn is_taken(&self, order: &Operation, used: &Option<SimulatedSpec>) -> bool {
        let place = |held: &Option<SimulatedSpec>| held.as_ref().map(|held| held.spec.identity.index_key());
        let (host, own) = (&order.instance.host, place(used));
        self.procs.iter().any(|(key, proc)| {
            let other = *key != order.instance && Some(key) != order.from.as_ref() && key.host == *host;
            other && proc.live.is_some() && place(&proc.live) == own
        })
    }

    /// The instance of an operation: by its name, or by its earlier name.
    fn taken_over(&self, order: &Operation) -> Result<Proc, PreconditionError> {
        let own = self.procs.get(&order.instance).cloned();
        let there =
            own.as_ref().is_some_and(|proc| proc.given.is_some() || proc.hosted || proc.live.is_some());
        match &order.from {
            Some(from) if !there => {
                let old = self.procs.get(from).cloned().unwrap_or_default();
                let keyed = matches!(self.dialect, Dialect::GseV1 | Dialect::GseV2 | Dialect::GseApigw);
                if old.hosted && keyed {
                    return Err(PreconditionError::StillSupervised(from.clone()));
                }
                Ok(old)
            }
            Some(_) | None => Ok(own.unwrap_or_default()),
        }
    }
}

fn has_command(op: Op, used: &Option<SimulatedSpec>) -> bool {
    let Some(SimulatedSpec { spec, .. }) = used else { return false };
    let control = &spec.control;
    match op {
        Op::Stop => control.stop_cmd.is_some(),
        Op::Kill => control.kill_cmd.is_some(),
        Op::Restart => control.restart_cmd.is_some(),
        Op::Reload => control.reload_cmd.is_some(),
        Op::Start | Op::Register | Op::Unregister | Op::Supervise | Op::Unsupervise => true,
    }
}

/// The live spec after a reload: only the reloaded fields change.
fn reloaded(
    live: Option<SimulatedSpec>,
    used: &Option<SimulatedSpec>,
    takes: &[Field],
) -> Option<SimulatedSpec> {
    let (mut live, used) = (live?, used.as_ref()?);
    let mut spec = (**live.spec).clone();
    for field in takes {
        spec.take(*field, &used.spec);
    }
    let revision = match (live.revision, used.revision) {
        (Some(live), Some(used)) => Some(SpecRevision { reload: used.reload, ..live }),
        (live, used) => used.or(live),
    };
    live = SimulatedSpec { spec: Arc::new(HashedSpec::new(spec)), revision };
    Some(live)
}
