//! Ledger: the last known spec and expected state of each instance, for targets that do not read specs back.
//!
//! `ledger/TARGET/INSTANCE` is written when a step has ended, before its call leaves the journal. It has two
//! purposes. It holds old specs: the one that a process runs with, and the one that the engine would relaunch it
//! with. And it is an expectation: the instance is as the step left it until a newer observation contradicts that, or
//! the target's lag has passed. A spec that the target reads back takes precedence.
//!
//! The ledger also records processes that are not ours. A start that was refused because a process runs, or
//! whose result was lost, leaves an entry with [`Entry::ours_after`]: a process that started before that time is not
//! owned, whatever its labels say. On a target that reads specs back these are the only entries.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::model::{
    AgentId, AutoType, HashedSpec, Host, InstanceKey, KnownSpec, LastRun, Observed, ObservedInstance,
    ObservedSpecs, Op, RunningProcess, Spec, SpecRevision, Step, Time,
};
use crate::reconcile::{Caps, Expectation, Expected};
use crate::store::{Error, Store, Txn, keys};

/// A spec, and the digests that were sent with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecordedSpec {
    pub revision: Option<SpecRevision>,
    pub spec: Spec,
}

/// Ledger entry of one instance.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Entry {
    /// Empty: no owner.
    pub owner: String,
    /// End of the last step.
    pub at: Time,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub supplier: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent_id: Option<AgentId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub given: Option<RecordedSpec>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub live: Option<RecordedSpec>,
    /// The run part of the last run's revision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ran: Option<u32>,
    pub registered: bool,
    pub hosted: bool,
    pub running: bool,
    /// Pid of the process that runs with `live`, where it was observed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The instance was removed.
    pub gone: bool,
    /// A step was sent, and its outcome is unknown.
    pub unsure: bool,
    /// With `unsure`: the spec that the step sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sent: Option<RecordedSpec>,
    /// With `unsure`: the step may have started a one-shot run, which must not run again.
    pub once: bool,
    /// Ownership is not proven: a running process is ours only if it started at this time or later (see [`NEVER`] and
    /// [`ALWAYS`]). Set by a start without a successful result, and by a first registration; cleared by a successful
    /// start or host. For a start it is [`super::lost_reply::earliest`]: start times are rounded down.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ours_after: Option<Time>,
    /// The process was adopted with an unknown spec and not restarted since: `live` is the spec of its adoption.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub adopted: bool,
}

#[derive(Clone, Debug, Default)]
pub struct Ledger {
    pub entries: BTreeMap<InstanceKey, Entry>,
}

pub async fn read<S: Store>(store: &S, target: &str) -> Result<Ledger, Error> {
    let page = store.range(&keys::ledger_prefix(target), None, usize::MAX).await?;
    let entry = |entry: crate::store::Entry| {
        let key = keys::ledger_instance(&entry.key, target)?;
        Some(entry.decode().map(|value| (key, value)))
    };
    let entries = page.entries.into_iter().filter_map(entry).collect::<Result<_, Error>>()?;
    Ok(Ledger { entries })
}

/// Transaction that writes these entries.
pub fn noted(target: &str, entries: &BTreeMap<InstanceKey, Entry>) -> Txn {
    entries.iter().fold(Txn::default(), |txn, (key, entry)| {
        let value = serde_json::to_vec(entry).unwrap_or_default();
        txn.and(Txn::put(keys::ledger(target, key), value))
    })
}

/// No process is ours: the only start that was sent was refused.
pub const NEVER: Time = Time(i64::MAX);
/// Every process is ours, unless its agent reports otherwise.
pub const ALWAYS: Time = Time(i64::MIN);

/// Retention of entries of removed instances, in milliseconds: lists that old are not used.
const GONE_RETENTION_MS: i64 = 24 * 3600 * 1000;

/// Deletes expired entries of removed instances, unless they changed since they were read.
pub async fn forget<S: Store>(store: &S, target: &str, known: &BTreeMap<InstanceKey, Entry>, now: Time) {
    let then = now.0.saturating_sub(GONE_RETENTION_MS);
    let is_old = |entry: &Entry| entry.gone && entry.at.0 < then;
    for (key, _) in known.iter().filter(|(_, entry)| is_old(entry)) {
        let key = keys::ledger(target, key);
        let Ok(Some(found)) = store.get(&key).await else { continue };
        if found.decode().is_ok_and(|entry| is_old(&entry)) {
            // The next run tries again.
            let _ = store.txn(Txn::delete(&key).only_if(&key, found.mod_seq)).await;
        }
    }
}

impl RecordedSpec {
    fn version(&self) -> KnownSpec {
        KnownSpec::Full(Arc::new(HashedSpec::new(self.spec.clone())))
    }
}

impl Entry {
    /// The entry after a step, from the one before it.
    pub fn after(step: &Step, expected: &Expected, owner: &str, before: Option<&Entry>, at: Time) -> Entry {
        let base = Entry {
            owner: owner.to_owned(),
            at,
            supplier: step.host.supplier,
            agent_id: step.host.agent_id.clone(),
            ..Entry::default()
        };
        let once = step.spec.as_ref().is_some_and(|spec| spec.monitor.auto_type == AutoType::OneShot);
        let seen = match expected {
            Expected::Gone => return Entry { gone: true, ..base },
            Expected::Unknown => {
                let once = once && step.op == Op::Start;
                let gives = matches!(step.op, Op::Start | Op::Restart | Op::Supervise | Op::Register);
                let sent = step.spec.as_ref().filter(|_| gives);
                let sent = sent.map(|spec| RecordedSpec { revision: step.revision, spec: Spec::clone(spec) });
                let before = before.cloned().unwrap_or(base);
                let sent = sent.or(before.sent.clone());
                return Entry { at, unsure: true, once, sent, gone: false, ..before };
            }
            Expected::State(seen) => seen,
        };
        // The target's label has the digests that were sent with the spec.
        let under = |version: &KnownSpec, known: Option<&RecordedSpec>| {
            let spec = match version {
                KnownSpec::Full(spec) => spec,
                // A label with the digests of the wanted spec identifies that spec.
                KnownSpec::Digests(label) if Some(*label) == step.revision => step.spec.as_ref()?,
                KnownSpec::Digests(_) | KnownSpec::Unknown => return None,
            };
            let just_sent = step.spec.as_ref().is_some_and(|sent| Arc::ptr_eq(sent, spec));
            let known = known.filter(|known| known.spec == ***spec).and_then(|known| known.revision);
            let revision = if just_sent { step.revision } else { known };
            Some(RecordedSpec { revision: revision.or(Some(*spec.revision())), spec: Spec::clone(spec) })
        };
        Entry {
            given: under(&seen.specs.registered, before.and_then(|entry| entry.given.as_ref())),
            live: under(&seen.specs.live, None).filter(|_| seen.running == Some(true)),
            ran: match seen.specs.ran {
                LastRun::Digest(run) => Some(run),
                LastRun::Given | LastRun::Never | LastRun::Unknown => None,
            },
            registered: seen.registered == Some(true),
            hosted: seen.hosted == Some(true),
            running: seen.running == Some(true),
            pid: seen.process.pid.filter(|_| step.op.pid_stays()),
            adopted: seen.specs.is_live_assumed,
            ..base
        }
    }

    /// The entry after a repeatable step with an unknown outcome. The spec that it sent is recorded, so that its
    /// label is recognised, and so that it is known not to be in effect yet.
    pub fn perhaps(&self, step: &Step) -> Entry {
        let gives = matches!(step.op, Op::Register | Op::Supervise);
        let sent = step.spec.as_ref().filter(|_| gives);
        let sent = sent.map(|spec| RecordedSpec { revision: step.revision, spec: Spec::clone(spec) });
        Entry { sent: sent.or(self.sent.clone()), ..self.clone() }
    }

    /// Whether this entry proves that the owner owns the instance.
    pub fn proves(&self, owner: &str) -> bool {
        !self.gone && self.ours_after.is_none() && !owner.is_empty() && self.owner == owner
    }

    /// Whether an observed process has our identity and was not started by us. True without a start time.
    pub fn is_foreign(&self, seen: &ObservedInstance) -> bool {
        let Some(after) = self.ours_after.filter(|_| !self.gone) else { return false };
        let is_older = || after > ALWAYS && seen.process.started.is_none_or(|started| started < after);
        seen.running == Some(true) && (seen.process.not_owned || is_older())
    }

    pub fn host(&self, instance: &InstanceKey) -> Host {
        Host { key: instance.host.clone(), supplier: self.supplier, agent_id: self.agent_id.clone() }
    }

    /// The most likely spec.
    pub fn spec(&self) -> Option<Arc<HashedSpec>> {
        let recorded = self.live.as_ref().or(self.given.as_ref()).or(self.sent.as_ref())?;
        Some(Arc::new(HashedSpec::new(recorded.spec.clone())))
    }

    /// The digests that were sent with a known spec.
    pub fn revision_of(&self, spec: &Spec) -> Option<SpecRevision> {
        let recorded = [&self.given, &self.live, &self.sent].into_iter().flatten();
        recorded.filter(|recorded| recorded.spec == *spec).find_map(|recorded| recorded.revision)
    }

    fn owner(&self) -> Option<Arc<str>> {
        Some(self.owner.as_str()).filter(|owner| !owner.is_empty()).map(Arc::from)
    }

    pub fn seen(&self) -> ObservedInstance {
        let version = |recorded: &Option<RecordedSpec>| {
            recorded.as_ref().map_or(KnownSpec::Unknown, RecordedSpec::version)
        };
        ObservedInstance {
            registered: Some(self.registered),
            hosted: Some(self.hosted),
            running: Some(self.running),
            labels: self.given.as_ref().map(|recorded| recorded.spec.labels.clone()).unwrap_or_default(),
            owner: self.owner(),
            specs: ObservedSpecs {
                registered: version(&self.given),
                live: version(&self.live),
                is_live_assumed: self.adopted && self.running,
                ran: self.ran.map_or(LastRun::Unknown, LastRun::Digest),
                ..ObservedSpecs::default()
            },
            process: RunningProcess { pid: self.pid, ..RunningProcess::default() },
            ..ObservedInstance::default()
        }
    }
}

impl Ledger {
    /// Instances whose process is not yet proven ours.
    pub fn unproven(&self) -> impl Iterator<Item = (&InstanceKey, &Entry)> {
        self.entries.iter().filter(|(_, entry)| !entry.gone && entry.ours_after.is_some())
    }

    /// Instances that a list shows without an owner label, though our call would have set one: they are not ours. An
    /// entry that proves nothing does not change that.
    pub fn foreign_instances(&self, listed: &Observed, caps: &Caps) -> BTreeSet<InstanceKey> {
        let is_there =
            |seen: &ObservedInstance| [seen.registered, seen.hosted, seen.running].contains(&Some(true));
        let row =
            |key: &InstanceKey| listed.instances.get(key).filter(|seen| !seen.unknown && is_there(seen));
        let unproven = self.unproven().filter(|_| caps.reads_labels).map(|(key, _)| key);
        unproven.filter(|key| row(key).is_some_and(|seen| seen.owner.is_none())).cloned().collect()
    }

    /// Expected state after our steps, until a newer observation.
    pub fn expectations(&self, caps: &Caps) -> Vec<Expectation> {
        let expectation = |(key, entry): (&InstanceKey, &Entry)| {
            let expected = match (entry.gone, entry.unsure) {
                (true, _) => Expected::Gone,
                (false, true) => Expected::Unknown,
                (false, false) => Expected::State(Box::new(entry.seen())),
            };
            Expectation::new(key.clone(), expected, entry.at, caps.lag_secs)
        };
        self.entries.iter().map(expectation).collect()
    }

    /// Removes labels from before the last step: they do not show the spec that the step sent, whether or not it took
    /// effect.
    pub fn forget_labels(&self, observed: &mut Observed, older: &BTreeSet<InstanceKey>) {
        for key in older {
            let is_unsure = self.entries.get(key).is_some_and(|entry| entry.unsure);
            if let Some(seen) = observed.instances.get_mut(key).filter(|_| is_unsure) {
                (seen.specs.registered, seen.specs.live) = (KnownSpec::Unknown, KnownSpec::Unknown);
            }
        }
    }

    /// Adds known specs and runs to an observation.
    pub fn fill_unknown(&self, observed: &mut Observed, caps: &Caps, others: &BTreeSet<InstanceKey>) {
        for (key, seen) in &mut observed.instances {
            let Some(entry) = self.entries.get(key).filter(|entry| !entry.gone) else { continue };
            if others.contains(key) || entry.is_foreign(seen) {
                // A label with our owner was set by our own call: it proves nothing about the process.
                if seen.owner.as_deref().is_none_or(|owner| owner == entry.owner) {
                    clear_owner(seen);
                }
                continue;
            }
            if seen.owner.is_none() {
                seen.owner = entry.owner();
            }
            fill_unknown(seen, entry, caps);
        }
        // A run that took place, or may have, gets a row, so that it is not started again.
        let ran = |entry: &Entry| entry.ran.is_some() && !entry.gone && !caps.registry;
        let may_have = |entry: &Entry| entry.unsure && entry.once;
        for (key, entry) in self.entries.iter().filter(|(_, entry)| ran(entry) || may_have(entry)) {
            let row = observed.instances.entry(key.clone()).or_insert_with(|| {
                let no = Some(false);
                ObservedInstance {
                    registered: no,
                    hosted: no,
                    running: no,
                    owner: entry.owner(),
                    ..ObservedInstance::default()
                }
            });
            row.specs.ran = match (may_have(entry), entry.ran) {
                (false, Some(run)) => LastRun::Digest(run),
                (true, _) | (false, None) => LastRun::Unknown,
            };
        }
    }
}

/// A process without an owner, with its facts only.
fn clear_owner(seen: &mut ObservedInstance) {
    (seen.owner, seen.specs) = (None, ObservedSpecs::default());
}

fn fill_unknown(seen: &mut ObservedInstance, entry: &Entry, caps: &Caps) {
    let label = match &seen.specs.registered {
        KnownSpec::Digests(revision) => Some(*revision),
        KnownSpec::Unknown | KnownSpec::Full(_) => None,
    };
    // The label decides which of the two specs is registered. Without a label: a process that did not run before has
    // the spec that was sent.
    let came_up = entry.unsure && !entry.running && seen.running == Some(true);
    let is = |recorded: &&RecordedSpec| label.is_some() && label == recorded.revision;
    let recorded = match label {
        Some(_) => [&entry.given, &entry.sent].into_iter().flatten().find(is),
        None if came_up => entry.sent.as_ref().or(entry.given.as_ref()),
        None => entry.given.as_ref(),
    };
    let is_strange = label.is_some() && recorded.is_none();
    if let Some(recorded) = recorded {
        seen.specs.registered = recorded.version();
    }
    if seen.running == Some(true) {
        // The pid changed: the engine relaunched the process with its registered spec.
        let another = entry.pid.zip(seen.process.pid).is_some_and(|(then, now)| then != now);
        seen.specs.live = match (&entry.live, &entry.sent) {
            // A label of neither spec was set by a client that knows the current one.
            (Some(recorded), _) if !another && entry.running && !is_strange => recorded.version(),
            // A restart with a lost result shows by its pid.
            (_, Some(sent)) if another && entry.unsure => sent.version(),
            (Some(_) | None, _) => seen.specs.registered.clone(),
        };
        seen.specs.is_live_assumed |= entry.adopted && entry.running && !another;
    }
    if let Some(run) = entry.ran {
        seen.specs.ran = LastRun::Digest(run);
    }
    if !caps.reads_labels {
        seen.labels = entry.given.as_ref().map(|recorded| recorded.spec.labels.clone()).unwrap_or_default();
    }
}
