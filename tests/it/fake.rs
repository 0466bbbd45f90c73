//! A simulated fleet as a target of the standing loop: in virtual time, with a store in memory.
//!
//! Our own gateway tells everything, most of them also of changes, and knows calls by their names. Of the others a list tells
//! what theirs tell (labels at best, as old as theirs may be), and a close look only the facts.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;

use tokio::time::Instant;

use abide::backend::sim::{Faults, Fleet, Sim};
use abide::backend::{
    Backend, BackendError, ChangeStream, InstanceQuery, Operation, OperationState as Said, OperationStatus,
    Scope, Task, Watermark,
};
use abide::model::{
    Desired, Dialect, Hold, HostKey, InstanceKey, KnownSpec, LastRun, Now, Observed, ObservedInstance, Pause,
    Plan, Time,
};
use abide::observe::{Observation, ObserveRequest, Target, TargetError};
use abide::reconcile::{Caps, Rules, reconcile};
use abide::store::{
    Change, Entry, Error, Holder, Lease, LeaseAttempt, Outcome, Page, Reset, Seq, Store, Txn, Write,
};

pub struct Fake {
    pub far: FakeBackend,
    store: MemoryStore,
    pub restraints: Mutex<(Vec<Hold>, Vec<Pause>)>,
}

impl Fake {
    /// Of our own, every other one tells of its changes.
    pub fn new(dialect: Dialect, tells: bool, seed: u64) -> Fake {
        let fleet = Fleet::new(dialect);
        let fleet = if dialect == Dialect::Abide { fleet } else { fleet.hide_specs() };
        let sim = Sim::over(fleet, no_faults(dialect), seed);
        let sim = if tells && dialect == Dialect::Abide { sim.tell_changes() } else { sim };
        Fake {
            far: FakeBackend { sim, names: Mutex::default() },
            store: MemoryStore::default(),
            restraints: Mutex::default(),
        }
    }

    pub fn sim(&self) -> &Sim {
        &self.far.sim
    }

    /// Its controller died: its leases are free at once, as on one machine.
    pub fn expire_leases(&self) {
        self.store.expire_leases();
    }

    pub fn caps(&self) -> Caps {
        Caps::of(self.far.dialect())
    }

    /// Lets time pass.
    pub async fn pass(&self, secs: u64) {
        for _ in 0..secs {
            tokio::time::sleep(Duration::from_secs(1)).await;
            self.sim().advance(1);
        }
    }

    pub fn is_paused(&self) -> bool {
        !self.restraints.lock().expect("a lock").1.is_empty()
    }

    /// What there would be to do for somebody who sees everything as it is.
    pub fn plan(&self, desired: &Desired) -> Plan {
        let (at, fleet) = (self.sim().now(), self.sim().fleet());
        let spec = |held: &Option<abide::backend::sim::Held>| {
            held.as_ref().map_or(KnownSpec::Unknown, |held| KnownSpec::Full(held.spec.clone()))
        };
        let seen = |(key, seen): (InstanceKey, ObservedInstance)| {
            let proc = &fleet.procs()[&key];
            let seen = ObservedInstance {
                registered_spec: spec(&proc.given),
                live: spec(&proc.live),
                report_time: Some(at),
                ..seen
            };
            (key, seen)
        };
        let instances = fleet.rows().into_iter().map(seen).collect();
        let observed = Observed { instances, at, ..Observed::default() };
        let (holds, pauses) = self.restraints.lock().expect("a lock").clone();
        let rules = Rules { holds, pauses, ..Rules::new(self.caps()) };
        reconcile(desired, &observed, &rules, &Now { at, ..Now::default() })
    }
}

/// Nothing goes wrong; a list is as old as it may be.
pub fn no_faults(dialect: Dialect) -> Faults {
    Faults { lag_secs: Caps::of(dialect).lag_secs, ..Faults::default() }
}

impl Target for Fake {
    type Backend = FakeBackend;
    type State = MemoryStore;

    fn backend(&self) -> &FakeBackend {
        &self.far
    }

    fn state(&self) -> &MemoryStore {
        &self.store
    }

    fn set_generation(&self, _generation: u64) {}

    fn name(&self) -> &str {
        "sim"
    }

    async fn observe(&self, desired: &Desired, _prune: bool) -> Result<Observation, TargetError> {
        let sight = ObserveRequest { target: self.name(), caps: &self.caps(), desired, whole: None };
        Observation::observe(&self.far, &self.store, &sight)
            .await
            .map_err(|cause| TargetError::observe(self.name(), cause))
    }

    async fn observe_and_watch(
        &self,
        desired: &Desired,
        prune: bool,
    ) -> Result<(Observation, Option<ChangeStream>), TargetError> {
        if !self.caps().reads_specs {
            return Ok((self.observe(desired, prune).await?, None));
        }
        let followed = self.sim().follow(&Scope::default()).await;
        let (observed, changes) = followed.map_err(|fault| TargetError::backend(self.name(), fault))?;
        Ok((Observation::of(observed), changes))
    }

    fn now(&self) -> Time {
        self.sim().now()
    }

    async fn active_holds(&self) -> Result<(Vec<Hold>, Vec<Pause>), TargetError> {
        Ok(self.restraints.lock().expect("a lock").clone())
    }
}

/// The fleet as a platform of its dialect shows it.
pub struct FakeBackend {
    sim: Sim,
    /// Calls that were taken on, where they have names.
    names: Mutex<BTreeMap<String, Task>>,
}

impl FakeBackend {
    fn is_ours(&self) -> bool {
        self.dialect() == Dialect::Abide
    }

    /// A row of a list: specs are told by their label, which is that of what was given.
    fn reported(&self, seen: ObservedInstance) -> ObservedInstance {
        let running = seen.running == Some(true);
        let ran = if seen.ran == LastRun::Never { LastRun::Never } else { LastRun::Unknown };
        let live = if running { seen.registered_spec.clone() } else { KnownSpec::Unknown };
        match self.dialect() {
            Dialect::Abide => seen,
            Dialect::GseV1 | Dialect::GseV2 | Dialect::GseApigw => ObservedInstance { live, ran, ..seen },
            Dialect::Job => facts(&seen, self.now()),
        }
    }
}

/// What a close look tells.
fn facts(seen: &ObservedInstance, at: Time) -> ObservedInstance {
    let ObservedInstance { registered, hosted, running, pid, .. } = *seen;
    ObservedInstance {
        registered,
        hosted,
        running,
        pid,
        report_time: Some(at),
        ..ObservedInstance::default()
    }
}

impl Backend for FakeBackend {
    fn dialect(&self) -> Dialect {
        self.sim.dialect()
    }

    fn now(&self) -> Time {
        self.sim.now()
    }

    async fn observe(&self, scope: &Scope) -> Result<Observed, BackendError> {
        if self.dialect() == Dialect::Job {
            // It has no lists: what is asked about is checked.
            let mut observed = self.check_live(&scope.subjects).await?;
            let is_there = |seen: &ObservedInstance| seen.running == Some(true) || seen.hosted == Some(true);
            observed.instances.retain(|_, seen| is_there(seen));
            return Ok(observed);
        }
        let Observed { instances, gaps, at } = self.sim.observe(scope).await?;
        let instances = instances.into_iter().map(|(key, seen)| (key, self.reported(seen))).collect();
        Ok(Observed { instances, gaps, at })
    }

    async fn watermark(&self, hosts: &BTreeSet<HostKey>) -> Result<Watermark, BackendError> {
        self.sim.watermark(hosts).await
    }

    async fn observe_live(&self, subjects: &[InstanceQuery]) -> Result<Observed, BackendError> {
        if self.is_ours() {
            return self.observe(&Scope::of(subjects.to_vec())).await;
        }
        self.check_live(subjects).await
    }

    async fn check_live(&self, subjects: &[InstanceQuery]) -> Result<Observed, BackendError> {
        let gaps = self.sim.watermark(&BTreeSet::new()).await?.gaps;
        let look = |subject: &InstanceQuery| {
            let seen = self.sim.check(&subject.instance);
            // By its name alone, what is not registered cannot be found.
            let unheard = self.dialect() == Dialect::GseV1 && seen.registered != Some(true);
            let unknown =
                ObservedInstance { unknown: true, registered: Some(false), ..ObservedInstance::default() };
            (subject.instance.clone(), if unheard { unknown } else { seen })
        };
        let there = subjects.iter().filter(|subject| !gaps.contains_key(&subject.host.key));
        Ok(Observed { instances: there.map(look).collect(), gaps, at: self.now() })
    }

    fn has_idempotency_keys(&self) -> bool {
        self.is_ours()
    }

    async fn find_task(&self, call: &str, _instances: &[InstanceKey]) -> Result<Option<Task>, BackendError> {
        Ok(self.names.lock().expect("a lock").get(call).cloned())
    }

    async fn submit(&self, call: &str, orders: &[Operation]) -> Result<Task, BackendError> {
        if !self.is_ours() {
            return self.sim.submit(call, orders).await;
        }
        if let Some(task) = self.names.lock().expect("a lock").get(call) {
            return Ok(task.clone());
        }
        let sent = self.sim.submit(call, orders).await;
        // Its answer may be lost; the call is not.
        let task = Task { ids: vec![self.sim.calls().to_string()], ..Task::default() };
        self.names.lock().expect("a lock").insert(call.to_owned(), task);
        sent
    }

    async fn poll(&self, task: &Task) -> Result<Vec<OperationStatus>, BackendError> {
        let mut answers = self.sim.poll(task).await?;
        // What is guarded with the same spec already is guarded; the fleet is stricter, to judge plans by.
        let again = |answer: &&mut OperationStatus| match &answer.result {
            Said::Failed { message, .. } => message.ends_with("it is guarded already"),
            Said::InProgress | Said::Done => false,
        };
        answers.iter_mut().filter(again).for_each(|answer| answer.result = Said::Done);
        Ok(answers)
    }
}

/// A store for one process, in memory.
#[derive(Default)]
pub struct MemoryStore(Mutex<(Seq, Values)>, Mutex<BTreeMap<String, Held>>);

/// The last lease of a name: its number, and whose it is until when.
#[derive(Default)]
struct Held(u64, Option<(Holder, Instant)>);

/// Each with the change that it is from.
type Values = BTreeMap<String, (Seq, Vec<u8>)>;

impl Store for MemoryStore {
    async fn get(&self, key: &str) -> Result<Option<Entry>, Error> {
        let kept = self.0.lock().expect("a lock");
        Ok(kept.1.get(key).map(|(changed, value)| entry(key, *changed, value)))
    }

    async fn range(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Page, Error> {
        let kept = self.0.lock().expect("a lock");
        let means = |key: &str| key.starts_with(prefix) && after.is_none_or(|after| key > after);
        let all = kept.1.iter().filter(|(key, _)| means(key)).take(limit);
        let entries = all.map(|(key, (changed, value))| entry(key, *changed, value)).collect();
        Ok(Page { entries, more: None, as_of: kept.0 })
    }

    async fn slice(&self, prefix: &str, skip: usize, limit: usize) -> Result<(Vec<Entry>, usize), Error> {
        let all = self.range(prefix, None, usize::MAX).await?.entries;
        let many = all.len();
        Ok((all.into_iter().skip(skip).take(limit).collect(), many))
    }

    async fn txn(&self, txn: Txn) -> Result<Outcome, Error> {
        let mut kept = self.0.lock().expect("a lock");
        for compare in &txn.compares {
            if kept.1.get(&compare.key).map_or(0, |(changed, _)| *changed) != compare.mod_seq {
                return Ok(Outcome::Conflict(compare.key.clone()));
            }
        }
        kept.0 += 1;
        let number = kept.0;
        for write in txn.writes {
            match write {
                Write::Put(key, value) => drop(kept.1.insert(key, (number, value))),
                Write::Delete(key) => drop(kept.1.remove(&key)),
            }
        }
        Ok(Outcome::Written(number))
    }

    async fn changes(&self, _prefix: &str, _after: Seq) -> Result<Vec<Change>, Error> {
        std::future::pending().await
    }

    async fn take_lease(&self, name: &str, holder: &Holder, lives: Duration) -> Result<LeaseAttempt, Error> {
        let mut leases = self.1.lock().expect("a lock");
        let Held(generation, held) = leases.entry(name.to_owned()).or_default();
        if let Some((holder, until)) = held.clone()
            && until > Instant::now()
        {
            return Ok(LeaseAttempt::Theirs { holder, generation: *generation, left_ms: 1 });
        }
        *held = Some((holder.clone(), Instant::now() + lives));
        *generation += 1;
        Ok(LeaseAttempt::Ours(Lease {
            name: name.to_owned(),
            holder: holder.id.clone(),
            generation: *generation,
        }))
    }

    async fn renew_lease(&self, lease: &Lease, lives: Duration) -> Result<bool, Error> {
        Ok(self.is_mine(lease, |held| held.1 = Instant::now() + lives))
    }

    async fn release_lease(&self, lease: &Lease) -> Result<(), Error> {
        self.is_mine(lease, |held| held.1 = Instant::now());
        Ok(())
    }

    async fn reset_lease(&self, name: &str, above: u64, _force: bool) -> Result<Reset, Error> {
        let mut leases = self.1.lock().expect("a lock");
        let Held(generation, held) = leases.entry(name.to_owned()).or_default();
        *held = None;
        *generation = (*generation).max(above) + 1;
        Ok(Reset::Free { generation: *generation })
    }
}

impl MemoryStore {
    fn is_mine(&self, lease: &Lease, so: impl FnOnce(&mut (Holder, Instant))) -> bool {
        let mut leases = self.1.lock().expect("a lock");
        let held = leases.get_mut(&lease.name).filter(|held| held.0 == lease.generation);
        let held = held.and_then(|held| held.1.as_mut()).filter(|held| held.1 > Instant::now());
        held.map(so).is_some()
    }

    /// Whoever held something is dead, and that is known.
    fn expire_leases(&self) {
        self.1.lock().expect("a lock").values_mut().for_each(|held| held.1 = None);
    }
}

fn entry(key: &str, changed: Seq, value: &[u8]) -> Entry {
    Entry { key: key.into(), value: value.into(), mod_seq: changed }
}
