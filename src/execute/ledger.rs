//! What we last gave each instance of a target that does not read specs back, and how it should be since.
//!
//! `ledger/TARGET/INSTANCE` is written when a step has ended, before the journal forgets it. It serves two purposes. It
//! holds the old specs: what a process runs with and what the engine would relaunch it with, where a list shows digests at
//! best. And it is an expectation: until a newer look tells otherwise, or the target's lag is over, the instance is as the
//! step left it. What a target does read back wins.
//!
//! It also says what is not ours. A start that was refused because a process runs already (828), or whose result was lost,
//! leaves an entry with [`Entry::ours_after`]: whatever started before that time is not owned, whatever its labels say. On
//! a target that reads specs back these are the only entries.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::model::{
    AgentId, AutoType, HashedSpec, Host, InstanceKey, KnownSpec, LastRun, Observed, ObservedInstance, Op,
    Spec, SpecRevision, Step, Time,
};
use crate::reconcile::{Caps, Expectation, Expected};
use crate::store::{Error, Store, Txn};

/// A spec, and the digests that it was given under.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecordedSpec {
    pub revision: Option<SpecRevision>,
    pub spec: Spec,
}

/// What the ledger says of one instance.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Entry {
    /// Empty: nobody's.
    pub owner: String,
    /// When the last step ended.
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
    /// Of the process that `live` is in effect in, where it was seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// It is gone.
    pub gone: bool,
    /// Something was sent, and nobody knows what came of it.
    pub unsure: bool,
    /// Of that: what it may be since.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sent: Option<RecordedSpec>,
    /// Of that: it may have been a run, and another one would be one too many.
    pub once: bool,
    /// Ownership is not proven: a running process is ours only if it started at this time or later (see [`NEVER`] and
    /// [`ALWAYS`]).
    /// Set by a start without a successful result, and by a first registration; cleared by a successful start or host. Of a
    /// start it is [`super::doubt::earliest`]: start times are rounded down.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ours_after: Option<Time>,
}

#[derive(Clone, Debug, Default)]
pub struct Ledger {
    pub entries: BTreeMap<InstanceKey, Entry>,
}

fn place(target: &str) -> String {
    format!("ledger/{target}/")
}

pub async fn read<S: Store>(store: &S, target: &str) -> Result<Ledger, Error> {
    let place = place(target);
    let page = store.range(&place, None, usize::MAX).await?;
    let entry = |entry: crate::store::Entry| {
        let key = entry.key.strip_prefix(&place)?.parse().ok()?;
        Some((key, serde_json::from_slice(&entry.value).ok()?))
    };
    Ok(Ledger { entries: page.entries.into_iter().filter_map(entry).collect() })
}

/// What is to be written, all at once.
pub fn noted(target: &str, entries: &BTreeMap<InstanceKey, Entry>) -> Txn {
    let place = place(target);
    entries.iter().fold(Txn::default(), |txn, (key, entry)| {
        let value = serde_json::to_vec(entry).unwrap_or_default();
        txn.and(Txn::put(format!("{place}{key}"), value))
    })
}

/// No process is ours: the only start that was sent was refused.
pub const NEVER: Time = Time(i64::MAX);
/// Every process is ours, unless its agent reports otherwise.
pub const ALWAYS: Time = Time(i64::MIN);

/// After this long, what is gone is no news for any list.
const NEWS: i64 = 24 * 3600 * 1000;

/// Forgets what has long been gone, unless somebody has written of it since.
pub async fn forget<S: Store>(store: &S, target: &str, known: &BTreeMap<InstanceKey, Entry>, now: Time) {
    let then = now.0.saturating_sub(NEWS);
    let is_old = |entry: &Entry| entry.gone && entry.at.0 < then;
    for (key, _) in known.iter().filter(|(_, entry)| is_old(entry)) {
        let key = format!("{}{key}", place(target));
        let Ok(Some(found)) = store.get(&key).await else { continue };
        if serde_json::from_slice(&found.value).is_ok_and(|entry| is_old(&entry)) {
            // What cannot be forgotten now is forgotten by the next run.
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
    /// How an instance is after a step, from what was known of it before.
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
        // The digests that come back as a label are those that it was given under.
        let under = |version: &KnownSpec, known: Option<&RecordedSpec>| {
            let spec = match version {
                KnownSpec::Full(spec) => spec,
                // A label that tells of what is wanted tells which spec it is.
                KnownSpec::Digests(told) if Some(*told) == step.revision => step.spec.as_ref()?,
                KnownSpec::Digests(_) | KnownSpec::Unknown => return None,
            };
            let just_sent = step.spec.as_ref().is_some_and(|sent| Arc::ptr_eq(sent, spec));
            let known = known.filter(|known| known.spec == ***spec).and_then(|known| known.revision);
            let revision = if just_sent { step.revision } else { known };
            Some(RecordedSpec { revision: revision.or(Some(*spec.revision())), spec: Spec::clone(spec) })
        };
        Entry {
            given: under(&seen.registered_spec, before.and_then(|entry| entry.given.as_ref())),
            live: under(&seen.live, None).filter(|_| seen.running == Some(true)),
            ran: match seen.ran {
                LastRun::Digest(run) => Some(run),
                LastRun::Given | LastRun::Never | LastRun::Unknown => None,
            },
            registered: seen.registered == Some(true),
            hosted: seen.hosted == Some(true),
            running: seen.running == Some(true),
            pid: seen.pid.filter(|_| step.op.pid_stays()),
            ..base
        }
    }

    /// The same after something was sent that does no harm, and of which nobody knows whether it was carried out: should
    /// its label tell of what was given by it, that is known, and known not to be what runs.
    pub fn perhaps(&self, step: &Step) -> Entry {
        let gives = matches!(step.op, Op::Register | Op::Supervise);
        let sent = step.spec.as_ref().filter(|_| gives);
        let sent = sent.map(|spec| RecordedSpec { revision: step.revision, spec: Spec::clone(spec) });
        Entry { sent: sent.or(self.sent.clone()), ..self.clone() }
    }

    /// Does this entry prove that an instance is this owner's?
    pub fn proves(&self, owner: &str) -> bool {
        !self.gone && self.ours_after.is_none() && !owner.is_empty() && self.owner == owner
    }

    /// Is what was seen a process that runs under our identity and that we did not start? Without a start time, yes.
    pub fn is_foreign(&self, seen: &ObservedInstance) -> bool {
        let Some(after) = self.ours_after.filter(|_| !self.gone) else { return false };
        let is_older = || after > ALWAYS && seen.started.is_none_or(|started| started < after);
        seen.running == Some(true) && (seen.not_owned || is_older())
    }

    pub fn host(&self, instance: &InstanceKey) -> Host {
        Host { key: instance.host.clone(), supplier: self.supplier, agent_id: self.agent_id.clone() }
    }

    /// What it is likely to be.
    pub fn spec(&self) -> Option<Arc<HashedSpec>> {
        let kept = self.live.as_ref().or(self.given.as_ref()).or(self.sent.as_ref())?;
        Some(Arc::new(HashedSpec::new(kept.spec.clone())))
    }

    /// Under which digests a spec that we know was given.
    pub fn revision_of(&self, spec: &Spec) -> Option<SpecRevision> {
        let kept = [&self.given, &self.live, &self.sent].into_iter().flatten();
        kept.filter(|kept| kept.spec == *spec).find_map(|kept| kept.revision)
    }

    fn owner(&self) -> Option<Arc<str>> {
        Some(self.owner.as_str()).filter(|owner| !owner.is_empty()).map(Arc::from)
    }

    pub fn seen(&self) -> ObservedInstance {
        let version =
            |kept: &Option<RecordedSpec>| kept.as_ref().map_or(KnownSpec::Unknown, RecordedSpec::version);
        ObservedInstance {
            registered: Some(self.registered),
            hosted: Some(self.hosted),
            running: Some(self.running),
            labels: self.given.as_ref().map(|kept| kept.spec.labels.clone()).unwrap_or_default(),
            owner: self.owner(),
            registered_spec: version(&self.given),
            live: version(&self.live),
            ran: self.ran.map_or(LastRun::Unknown, LastRun::Digest),
            pid: self.pid,
            ..ObservedInstance::default()
        }
    }
}

impl Ledger {
    /// Instances whose process has yet to be proven ours.
    pub fn unproven(&self) -> impl Iterator<Item = (&InstanceKey, &Entry)> {
        self.entries.iter().filter(|(_, entry)| !entry.gone && entry.ours_after.is_some())
    }

    /// What a list shows without an owner's label though a call of ours would have brought one: others made it. An entry that
    /// proves nothing does not make it ours.
    pub fn of_others(&self, listed: &Observed, caps: &Caps) -> BTreeSet<InstanceKey> {
        let is_there =
            |seen: &ObservedInstance| [seen.registered, seen.hosted, seen.running].contains(&Some(true));
        let row =
            |key: &InstanceKey| listed.instances.get(key).filter(|seen| !seen.unknown && is_there(seen));
        let unproven = self.unproven().filter(|_| caps.reads_labels).map(|(key, _)| key);
        unproven.filter(|key| row(key).is_some_and(|seen| seen.owner.is_none())).cloned().collect()
    }

    /// How things should be by what we did, until something newer tells.
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

    /// A label from before the last step says nothing of what was given by it, whether that was carried out or not.
    pub fn forget_labels(&self, observed: &mut Observed, older: &BTreeSet<InstanceKey>) {
        for key in older {
            let is_unsure = self.entries.get(key).is_some_and(|entry| entry.unsure);
            if let Some(seen) = observed.instances.get_mut(key).filter(|_| is_unsure) {
                (seen.registered_spec, seen.live) = (KnownSpec::Unknown, KnownSpec::Unknown);
            }
        }
    }

    /// Puts what we know of specs and runs under what was seen.
    pub fn lay_under(&self, observed: &mut Observed, caps: &Caps, others: &BTreeSet<InstanceKey>) {
        for (key, seen) in &mut observed.instances {
            let Some(entry) = self.entries.get(key).filter(|entry| !entry.gone) else { continue };
            if others.contains(key) || entry.is_foreign(seen) {
                // A label that names us came with our own call: it proves nothing about the process.
                if seen.owner.as_deref().is_none_or(|owner| owner == entry.owner) {
                    disown(seen);
                }
                continue;
            }
            if seen.owner.is_none() {
                seen.owner = entry.owner();
            }
            lay_under(seen, entry, caps);
        }
        // A run that was or may have been: there is a row, so that nobody takes it for one that never was.
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
            row.ran = match (may_have(entry), entry.ran) {
                (false, Some(run)) => LastRun::Digest(run),
                (true, _) | (false, None) => LastRun::Unknown,
            };
        }
    }
}

/// A process without an owner, of which nothing but the facts is known.
fn disown(seen: &mut ObservedInstance) {
    (seen.owner, seen.registered_spec, seen.live, seen.ran) =
        (None, KnownSpec::Unknown, KnownSpec::Unknown, LastRun::Unknown);
}

fn lay_under(seen: &mut ObservedInstance, entry: &Entry, caps: &Caps) {
    let told = match &seen.registered_spec {
        KnownSpec::Digests(revision) => Some(*revision),
        KnownSpec::Unknown | KnownSpec::Full(_) => None,
    };
    // Where a label tells, it says which of the two it is; else what runs though it did not run is what was sent.
    let came_up = entry.unsure && !entry.running && seen.running == Some(true);
    let is = |kept: &&RecordedSpec| told.is_some() && told == kept.revision;
    let kept = match told {
        Some(_) => [&entry.given, &entry.sent].into_iter().flatten().find(is),
        None if came_up => entry.sent.as_ref().or(entry.given.as_ref()),
        None => entry.given.as_ref(),
    };
    let is_strange = told.is_some() && kept.is_none();
    if let Some(kept) = kept {
        seen.registered_spec = kept.version();
    }
    if seen.running == Some(true) {
        // Another process than the one we knew: the engine relaunched it, with what it was given.
        let another = entry.pid.zip(seen.pid).is_some_and(|(then, now)| then != now);
        seen.live = match (&entry.live, &entry.sent) {
            // A label that tells of neither was written by somebody who knows better.
            (Some(kept), _) if !another && entry.running && !is_strange => kept.version(),
            // A restart of which nobody heard, that shows by its pid.
            (_, Some(sent)) if another && entry.unsure => sent.version(),
            (Some(_) | None, _) => seen.registered_spec.clone(),
        };
    }
    if let Some(run) = entry.ran {
        seen.ran = LastRun::Digest(run);
    }
    if !caps.reads_labels {
        seen.labels = entry.given.as_ref().map(|kept| kept.spec.labels.clone()).unwrap_or_default();
    }
}
