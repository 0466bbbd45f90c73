//! The instances of a simulated fleet, and what each operation needs and changes.
//!
//! Written from the description of the operations alone: the core is judged by it, so it shares no code with it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::backend::Operation;
use crate::model::{
    AutoType, Dialect, Field, HashedSpec, InstanceKey, KnownSpec, LastRun, ObservedInstance, Op, Spec,
    SpecRevision,
};

#[derive(Clone, Debug, PartialEq)]
pub struct Fleet {
    dialect: Dialect,
    /// Whether a look shows whole specs, or only their digests.
    shows_specs: bool,
    procs: BTreeMap<InstanceKey, Proc>,
    next_pid: u32,
    /// How often each was started or restarted.
    launches: BTreeMap<InstanceKey, usize>,
    /// Processes that others started under the identities of these instances, by pid.
    strangers: BTreeMap<InstanceKey, u32>,
}

/// One instance as it really is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Proc {
    pub owner: Option<String>,
    pub given: Option<Held>,
    pub hosted: bool,
    pub live: Option<Held>,
    pub pid: Option<u32>,
    /// What the last run began with.
    pub ran: Option<Held>,
}

/// A spec and the revision that came with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Held {
    pub spec: Arc<HashedSpec>,
    pub revision: Option<SpecRevision>,
}

impl Held {
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

/// How the engines differ.
struct Habits {
    registry: bool,
    uses_given: bool,
    restart_gives: bool,
    needs_old: bool,
    needs_commands: bool,
}

fn habits(dialect: Dialect) -> Habits {
    let (registry, uses_given, restart_gives, needs_old, needs_commands) = match dialect {
        Dialect::GseV1 => (true, true, false, false, true),
        Dialect::GseV2 | Dialect::GseApigw | Dialect::Job => (false, false, false, true, true),
        Dialect::Abide => (true, false, true, false, false),
    };
    Habits { registry, uses_given, restart_gives, needs_old, needs_commands }
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

    /// Only digests are shown from now on.
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

    /// Puts an instance there as it is said to be.
    pub fn place(&mut self, key: InstanceKey, mut proc: Proc) {
        if proc.live.is_some() && proc.pid.is_none() {
            proc.pid = Some(self.fresh_pid());
        }
        if !habits(self.dialect).registry && !proc.hosted {
            proc.given = None;
        }
        self.procs.insert(key, proc);
    }

    /// Starts a process under an instance's identity without the engine's knowledge; its pid.
    pub fn place_stranger(&mut self, key: InstanceKey) -> u32 {
        let pid = self.fresh_pid();
        self.strangers.insert(key, pid);
        pid
    }

    pub fn strangers(&self) -> &BTreeMap<InstanceKey, u32> {
        &self.strangers
    }

    /// The pid that a live check finds under an instance's identity, and whether a stranger has it.
    pub fn pid_of(&self, key: &InstanceKey) -> Option<(u32, bool)> {
        let own = self.procs.get(key).and_then(|proc| proc.pid).map(|pid| (pid, false));
        own.or_else(|| self.strangers.get(key).map(|pid| (*pid, true)))
    }

    /// What a stranger, or a registration that others made, answers to an operation; `None`: neither is in its way.
    pub fn answer_of_others(&mut self, order: &Operation) -> Option<(i64, &'static str)> {
        let proc = self.procs.get(&order.instance);
        let other = proc.filter(|proc| proc.given.is_some() && proc.owner != order.owner);
        if order.op == Op::Register && !order.registered && other.is_some() {
            return Some((850, "it is registered already"));
        }
        let pid = *self.strangers.get(&order.instance)?;
        match order.op {
            Op::Start => return Some((828, "it is running already")),
            Op::Supervise => {
                // Hosting takes the process that is there.
                let used = if habits(self.dialect).uses_given {
                    proc.and_then(|proc| proc.given.clone())
                } else {
                    order.spec.clone().map(|spec| Held { spec, revision: order.revision })
                };
                let proc = self.procs.entry(order.instance.clone()).or_default();
                (proc.live, proc.pid) = (used, Some(pid));
                self.strangers.remove(&order.instance);
            }
            // Their commands name the process by its identity, not by who started it.
            Op::Stop | Op::Kill | Op::Restart | Op::Reload => drop(self.strangers.remove(&order.instance)),
            Op::Register | Op::Unregister | Op::Unsupervise => {}
        }
        None
    }

    pub fn running(&self) -> impl Iterator<Item = &InstanceKey> {
        self.procs.iter().filter(|(_, proc)| proc.live.is_some()).map(|(key, _)| key)
    }

    /// The process ends by itself; whoever guards it has not noticed yet.
    pub fn dies(&mut self, key: &InstanceKey) {
        if let Some(proc) = self.procs.get_mut(key) {
            (proc.live, proc.pid) = (None, None);
        }
    }

    /// What is not kept running comes to its end. Was there something?
    pub fn runs_end(&mut self) -> bool {
        let mut ended = false;
        let kept = |live: &Held| live.spec.monitor.auto_type == AutoType::Resident;
        for proc in self.procs.values_mut().filter(|proc| proc.live.as_ref().is_some_and(|live| !kept(live)))
        {
            (proc.live, proc.pid) = (None, None);
            ended = true;
        }
        ended
    }

    /// What a look shows. An instance of which nothing is left is not there.
    pub fn rows(&self) -> BTreeMap<InstanceKey, ObservedInstance> {
        let mut rows = BTreeMap::new();
        for (key, proc) in &self.procs {
            let there = proc.given.is_some() || proc.hosted || proc.live.is_some() || proc.ran.is_some();
            if there {
                let mut row = self.row(proc);
                // Of what a platform knows by name it reports whatever runs under the identity; our agent does not.
                let known = proc.given.is_some() && self.dialect != Dialect::Abide;
                if let (true, None, Some(pid)) = (known, proc.pid, self.strangers.get(key)) {
                    (row.running, row.pid, row.live) = (Some(true), Some(*pid), row.registered_spec.clone());
                }
                rows.insert(key.clone(), row);
            }
        }
        rows
    }

    fn row(&self, proc: &Proc) -> ObservedInstance {
        let version = |held: &Option<Held>| {
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
            registered_spec: version(&proc.given),
            live: version(&proc.live),
            ran,
            pid: proc.pid,
            ..ObservedInstance::default()
        }
    }

    fn fresh_pid(&mut self) -> u32 {
        self.next_pid += 1;
        self.next_pid
    }

    /// One operation. `Err`: it is not possible as things are, and nothing changed.
    pub fn carry_out(&mut self, order: &Operation) -> Result<(), String> {
        let habits = habits(self.dialect);
        let mut proc = self.taken_over(order)?;
        let given = proc.given.clone();
        // Operations of an engine that keeps a registry know no spec but the one it holds.
        let sent = order.spec.clone().map(|spec| Held { spec, revision: order.revision });
        let uses_given = habits.uses_given && order.op != Op::Register;
        let used = if uses_given { given.clone() } else { sent };
        let kind = used.as_ref().or(given.as_ref()).map(|held| held.spec.monitor.auto_type);
        let one = |held: &Option<Held>| match (held, &used) {
            (Some(held), Some(used)) => held.same_identity(&used.spec),
            _ => false,
        };
        let ours = proc.owner == order.owner;
        let no = |why: &str| Err(format!("{} {}: {why}", order.op, order.instance));
        let other_guard = proc.hosted && given.is_some() && !one(&given);
        let other_process = proc.live.is_some() && !one(&proc.live) && kind != Some(AutoType::Periodic);
        match order.op {
            Op::Register if !habits.registry => return no("there is no registry"),
            Op::Register if used.is_none() => return no("no spec was sent"),
            Op::Register if other_guard || other_process => return no("another identity is in use"),
            Op::Register => proc.given = used,

            Op::Unregister if !habits.registry || given.is_none() => return no("it is not registered"),
            Op::Unregister if proc.hosted || proc.live.is_some() => return no("it is in use"),
            Op::Unregister => proc.given = None,

            Op::Start if used.is_none() => return no("nothing is known of it"),
            Op::Start if proc.live.is_some() => return no("it runs already"),
            Op::Start if self.is_taken(order, &used) => return no("another process has this identity"),
            Op::Start if kind == Some(AutoType::Periodic) => return no("it runs by schedule"),
            Op::Start if other_guard => return no("another identity is guarded"),
            Op::Start => {
                (proc.live, proc.given, proc.ran, proc.hosted) = (used.clone(), used.clone(), used, true);
                proc.pid = Some(self.fresh_pid());
            }

            Op::Stop | Op::Kill if proc.live.is_none() => return no("it does not run"),
            Op::Stop | Op::Kill if (habits.needs_old || uses_given) && !one(&proc.live) => {
                return no("another process runs");
            }
            Op::Stop | Op::Kill if habits.needs_commands && !has_command(order.op, &used) => {
                return no("there is no command for it");
            }
            Op::Stop | Op::Kill => {
                // The supervision of another identity stays.
                let other =
                    |live: &Held| given.as_ref().is_some_and(|given| !given.same_identity(&live.spec));
                proc.hosted &= proc.live.as_ref().is_some_and(other);
                (proc.live, proc.pid) = (None, None);
            }

            Op::Supervise if used.is_none() => return no("nothing is known of it"),
            Op::Supervise if other_guard || other_process => return no("another identity is in use"),
            Op::Supervise if proc.hosted && ours && (uses_given || given == used) => {
                return no("it is guarded already");
            }
            Op::Supervise => (proc.hosted, proc.given) = (true, used),

            Op::Unsupervise if !proc.hosted => return no("nobody guards it"),
            Op::Unsupervise if (habits.needs_old || uses_given) && !one(&given) => {
                return no("another identity is guarded");
            }
            Op::Unsupervise => proc.hosted = false,

            Op::Restart | Op::Reload if proc.live.is_none() => return no("it does not run"),
            Op::Restart | Op::Reload if kind != Some(AutoType::Resident) => {
                return no("it is not kept running");
            }
            Op::Restart | Op::Reload if !one(&proc.live) => return no("another process runs"),
            Op::Restart | Op::Reload
                if !has_command(order.op, &used) && (order.op == Op::Reload || habits.needs_commands) =>
            {
                return no("there is no command for it");
            }
            Op::Restart => {
                proc.live = used.clone();
                proc.pid = Some(self.fresh_pid());
                proc.given = if habits.restart_gives { used } else { given };
            }
            Op::Reload => {
                proc.live = reloaded(proc.live, &used, &order.reloaded_fields);
                proc.given = if habits.restart_gives { used } else { given };
            }
        }
        if !habits.registry && !proc.hosted {
            proc.given = None;
        }
        if matches!(order.op, Op::Start | Op::Restart) {
            *self.launches.entry(order.instance.clone()).or_default() += 1;
        }
        // Whoever gives it a spec puts a name on it.
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

    /// Is another instance of the host where this one would be?
    fn is_taken(&self, order: &Operation, used: &Option<Held>) -> bool {
        let place = |held: &Option<Held>| held.as_ref().map(|held| held.spec.identity.index_key());
        let (host, own) = (&order.instance.host, place(used));
        self.procs.iter().any(|(key, proc)| {
            let other = *key != order.instance && Some(key) != order.from.as_ref() && key.host == *host;
            other && proc.live.is_some() && place(&proc.live) == own
        })
    }

    /// What an operation works on: the instance of that name, or what it is told it was called before.
    fn taken_over(&self, order: &Operation) -> Result<Proc, String> {
        let own = self.procs.get(&order.instance).cloned();
        let there =
            own.as_ref().is_some_and(|proc| proc.given.is_some() || proc.hosted || proc.live.is_some());
        match &order.from {
            Some(from) if !there => {
                let old = self.procs.get(from).cloned().unwrap_or_default();
                let keyed = matches!(self.dialect, Dialect::GseV1 | Dialect::GseV2 | Dialect::GseApigw);
                if old.hosted && keyed {
                    return Err(format!("{from} is still guarded"));
                }
                Ok(old)
            }
            Some(_) | None => Ok(own.unwrap_or_default()),
        }
    }
}

fn has_command(op: Op, used: &Option<Held>) -> bool {
    let Some(Held { spec, .. }) = used else { return false };
    let control = &spec.control;
    match op {
        Op::Stop => control.stop_cmd.is_some(),
        Op::Kill => control.kill_cmd.is_some(),
        Op::Restart => control.restart_cmd.is_some(),
        Op::Reload => control.reload_cmd.is_some(),
        Op::Start | Op::Register | Op::Unregister | Op::Supervise | Op::Unsupervise => true,
    }
}

/// Only what a reload puts into effect is in effect after it.
fn reloaded(live: Option<Held>, used: &Option<Held>, takes: &[Field]) -> Option<Held> {
    let (mut live, used) = (live?, used.as_ref()?);
    let mut spec = (**live.spec).clone();
    for field in takes {
        spec.take(*field, &used.spec);
    }
    let revision = match (live.revision, used.revision) {
        (Some(live), Some(used)) => Some(SpecRevision { reload: used.reload, ..live }),
        (live, used) => used.or(live),
    };
    live = Held { spec: Arc::new(HashedSpec::new(spec)), revision };
    Some(live)
}
