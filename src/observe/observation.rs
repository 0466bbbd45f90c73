//! One observation: the target's rows, combined with the ledger and with recent steps that no list shows yet.

use std::collections::{BTreeMap, BTreeSet};

use tracing::{info, warn};

use super::error::ObserveError;
use crate::backend::{Backend, InstanceQuery, Scope};
use crate::execute::ledger::{self, Ledger};
use crate::model::{Desired, Host, InstanceKey, KnownSpec, Name, Observed, ObservedInstance};
use crate::reconcile::spec_recovery::{OldSpecs, fill_in};
use crate::reconcile::{Caps, overlay};
use crate::store::Store;

/// Scope of an observation.
pub struct ObserveRequest<'a> {
    /// The target's name.
    pub target: &'a str,
    pub caps: &'a Caps,
    pub desired: &'a Desired,
    /// Also observe everything in these namespaces and in those of the ledger, wanted or not.
    pub whole: Option<BTreeSet<Name>>,
}

#[derive(Clone, Debug, Default)]
pub struct Observation {
    pub observed: Observed,
    pub(super) ledger: Ledger,
    pub(super) checked_live: BTreeSet<InstanceKey>,
    /// Listed without an owner, though the ledger has an entry that proves nothing.
    pub(super) others: BTreeSet<InstanceKey>,
    /// See [`Observation::listed`].
    pub(super) listed: BTreeMap<InstanceKey, Option<ObservedInstance>>,
    /// Recovered specs, where the target reads back digests only.
    pub(super) old: OldSpecs,
}

impl Observation {
    /// An observation of a target that reads everything back.
    pub fn of(observed: Observed) -> Observation {
        Observation { observed, ..Observation::default() }
    }

    pub async fn observe<B: Backend, S: Store>(
        backend: &B,
        store: &S,
        request: &ObserveRequest<'_>,
    ) -> Result<Observation, ObserveError> {
        let wants = request.desired.instances.iter().map(|(key, want)| InstanceQuery {
            instance: key.clone(),
            host: want.host.clone(),
            spec: Some(want.spec.clone()),
        });
        if request.caps.reads_specs {
            let namespaces = request.whole.clone().unwrap_or_default();
            let scope = Scope { subjects: wants.collect(), namespaces };
            let observed = backend.observe(&scope).await.map_err(ObserveError::Target)?;
            return Observation::checked(observed, backend, store, request.target, request.desired).await;
        }
        let ledger = ledger::read(store, request.target).await.map_err(ObserveError::State)?;
        let mut subjects: Vec<InstanceQuery> = wants.collect();
        for subject in &mut subjects {
            // The registered spec may still be the one that we sent last.
            if let Some(spec) = ledger.entries.get(&subject.instance).and_then(ledger::Entry::spec) {
                subject.spec = Some(spec);
            }
        }
        let wanted = &request.desired.instances;
        let others = ledger.entries.iter().filter(|(key, entry)| !entry.gone && !wanted.contains_key(*key));
        subjects.extend(others.map(|(key, entry)| InstanceQuery {
            instance: key.clone(),
            host: entry.host(key),
            spec: entry.spec(),
        }));
        let mut namespaces = request.whole.clone().unwrap_or_default();
        if request.whole.is_some() {
            namespaces.extend(ledger.entries.keys().map(|key| key.namespace.clone()));
        }
        let scope = Scope { subjects, namespaces };
        let listed = backend.observe(&scope).await.map_err(ObserveError::Target)?;
        let listed = listed.normalize_host_keys(request.desired).map_err(ObserveError::Ambiguous)?;
        let mut world = Observation::default();
        // A list may be older than our last steps: sent specs are assumed, facts are checked live.
        let known: BTreeSet<InstanceKey> = listed.instances.keys().cloned().collect();
        world.others = ledger.foreign_instances(&listed, request.caps);
        let (mut observed, open) =
            overlay(listed, ledger.expectations(request.caps), request.caps.lag_secs, backend.now());
        let open: BTreeSet<InstanceKey> = open.into_iter().map(|one| one.instance).collect();
        ledger.forget_labels(&mut observed, &open);
        let unproven: BTreeSet<&InstanceKey> = ledger.unproven().map(|(key, _)| key).collect();
        let to_check = scope
            .subjects
            .iter()
            .filter(|subject| open.contains(&subject.instance) || unproven.contains(&subject.instance));
        let to_check: Vec<InstanceQuery> = to_check.cloned().collect();
        if !to_check.is_empty() && request.caps.lag_secs > 0 {
            match backend.observe_live(&to_check).await {
                Ok(closer) => {
                    // Only the live check shows instances that no list has.
                    observed.instances.retain(|key, row| !row.unknown || known.contains(key));
                    world.checked_live.extend(to_check.into_iter().map(|subject| subject.instance));
                    observed.merge_live_check(closer);
                }
                Err(fault) => info!(%fault, "live status check of recent steps failed"),
            }
        }
        ledger.fill_unknown(&mut observed, request.caps, &world.others);
        world.observed = observed;
        world.ledger = ledger;
        Ok(world)
    }

    /// An observation of a target that reads specs back, with a live check of instances that the ledger does not
    /// prove ours: the target itself may not know of such a process.
    pub async fn checked<B: Backend, S: Store>(
        observed: Observed,
        backend: &B,
        store: &S,
        target: &str,
        desired: &Desired,
    ) -> Result<Observation, ObserveError> {
        let observed = observed.normalize_host_keys(desired).map_err(ObserveError::Ambiguous)?;
        let ledger = ledger::read(store, target).await.map_err(ObserveError::State)?;
        let mut world = Observation { observed, ..Observation::default() };
        let subject = |(key, entry): (&InstanceKey, &ledger::Entry)| {
            let want = desired.instances.get(key);
            let row = world.observed.instances.get(key);
            // Neither wanted nor listed: no step can affect it.
            want.is_some().then_some(()).or(row.map(|_| ()))?;
            let spec = entry.spec().or_else(|| want.map(|want| want.spec.clone()));
            Some(InstanceQuery { instance: key.clone(), host: entry.host(key), spec })
        };
        // A host without an agent gives no result: the check would only wait for its deadline.
        let is_gap = |key: &InstanceKey| world.observed.gaps.contains_key(&key.host);
        let unproven = ledger.unproven().filter(|(key, _)| !is_gap(key));
        let subjects: Vec<InstanceQuery> = unproven.filter_map(subject).collect();
        if !subjects.is_empty() {
            let live = backend.check_live(&subjects).await.unwrap_or_else(|fault| {
                warn!(%fault, "live status check failed; listed instances without proof of ownership are held");
                unknown(&subjects)
            });
            for (key, now) in live.instances {
                let Some(entry) = ledger.entries.get(&key) else { continue };
                let row = world.observed.instances.get(&key).cloned();
                if row.as_ref().and_then(|row| row.owner.as_deref()).is_some_and(|owner| owner != entry.owner)
                {
                    continue;
                }
                let seen = match (&row, now.unknown) {
                    // Only a start can follow, and the target refuses it if a process runs.
                    (None, true) => continue,
                    (Some(row), true) => ObservedInstance { unknown: true, ..row.clone() },
                    (_, false) if !entry.is_foreign(&now) => continue,
                    (row, false) => {
                        let registered = row.as_ref().map_or(Some(false), |row| row.registered);
                        ObservedInstance { registered, ..now }
                    }
                };
                world.listed.insert(key.clone(), row);
                world.observed.instances.insert(key, seen);
            }
        }
        world.ledger = ledger;
        Ok(world)
    }

    /// Rows of the target that a live check replaced.
    pub fn listed(&self) -> &BTreeMap<InstanceKey, Option<ObservedInstance>> {
        &self.listed
    }

    /// Whether a process runs under our identity that we did not start.
    pub fn is_foreign(&self, instance: &InstanceKey) -> bool {
        let entry = self.ledger.entries.get(instance);
        let row = self.observed.instances.get(instance).filter(|row| row.owner.is_none());
        entry.zip(row).is_some_and(|(entry, row)| entry.is_foreign(row))
    }

    /// Namespaces with instances of this owner, by the ledger.
    pub fn namespaces(&self, owner: &str) -> BTreeSet<Name> {
        let ours = self.ledger.entries.iter().filter(|(_, entry)| entry.owner == owner && !entry.gone);
        ours.map(|(key, _)| key.namespace.clone()).collect()
    }

    pub fn entry(&self, instance: &InstanceKey) -> Option<&ledger::Entry> {
        self.ledger.entries.get(instance).filter(|entry| !entry.gone)
    }

    /// The host, with the supplier and agent id of the ledger: observations do not include them.
    pub fn host(&self, instance: &InstanceKey) -> Host {
        let bare = || Host { key: instance.host.clone(), supplier: None, agent_id: None };
        self.entry(instance).map_or_else(bare, |entry| entry.host(instance))
    }

    /// The observation, and ledger entries that no list shows, such as stopped and unsupervised instances.
    pub fn remembered(&self) -> Observed {
        let mut all = self.observed.clone();
        // Neither started nor registered by us: the entry of a refused start.
        let is_ours = |entry: &ledger::Entry| entry.ours_after.is_none() || entry.registered;
        let ours = self.ledger.entries.iter().filter(|(_, entry)| !entry.gone && is_ours(entry));
        for (key, entry) in ours {
            let down = || {
                let mut seen = entry.seen();
                (seen.hosted, seen.running) = (Some(false), Some(false));
                (seen.process.pid, seen.specs.live) = (None, KnownSpec::Unknown);
                seen
            };
            all.instances.entry(key.clone()).or_insert_with(down);
        }
        all
    }

    /// Adds specs that were recovered elsewhere.
    pub fn add_recovered_specs(&mut self, old: OldSpecs) {
        self.old.extend(old);
        fill_in(&mut self.observed, &self.old);
    }
}

fn unknown(subjects: &[InstanceQuery]) -> Observed {
    let row = |subject: &InstanceQuery| {
        (subject.instance.clone(), ObservedInstance { unknown: true, ..ObservedInstance::default() })
    };
    Observed { instances: subjects.iter().map(row).collect(), ..Observed::default() }
}
