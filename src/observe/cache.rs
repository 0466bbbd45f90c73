//! Cache of the target's observed state between the passes of a controller, and between the plans of an apply.
//!
//! # Theory of operation
//!
//! A target that streams changes is observed once; from then on each streamed row is applied to that observation.
//! Before a pass, the target's watermark is read, and the stream is applied up to it: the result is as fresh as a
//! full observation, at the cost of the changes. After any inconsistency (a broken stream, missing numbers, compacted
//! changes), and every few minutes, everything is observed again. A target without a stream is observed in every
//! pass.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tracing::info;

use super::error::TargetError;
use super::observation::Observation;
use super::target::Target;
use crate::backend::{Backend, BackendError, ChangeEvent, ChangeStream};
use crate::model::{Desired, HostKey, InstanceKey, Observed, ObservedInstance, RunningProcess};
use crate::reconcile::Caps;

/// Interval between full observations, even without an inconsistency.
const RESYNC_INTERVAL: Duration = Duration::from_secs(300);
/// Time that the stream may take to reach the watermark.
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(2);

/// A stream that ends sooner does not cause a full observation.
const MIN_STREAM_LIFETIME: Duration = Duration::from_secs(10);

#[derive(Default)]
pub struct ObservedCache {
    known: Option<CachedObservation>,
    /// Instances that our own steps change, or have changed since the last pass: their changes need no pass.
    ours: BTreeSet<InstanceKey>,
    /// Processes that were relaunched without a step of ours.
    relaunched: BTreeMap<InstanceKey, u32>,
    /// Rows of the target that a live check replaced in the last pass.
    listed: BTreeMap<InstanceKey, Option<ObservedInstance>>,
}

struct CachedObservation {
    /// `None`: a pass uses it.
    observed: Option<Arc<Observed>>,
    changes: ChangeStream,
    number: u64,
    observed_at: Instant,
    /// See [`Desired::addresses_of_agents`]: `observed` has addresses, `changes` the target's own keys.
    addresses: BTreeMap<HostKey, HostKey>,
    /// Host key at the target of each instance that it lists under an agent id.
    under_agent_id: BTreeMap<InstanceKey, HostKey>,
}

/// Reason why the cache cannot be updated from the stream.
#[derive(Debug, thiserror::Error)]
enum Resync {
    #[error("a pass was cancelled")]
    PassCancelled,
    #[error("the change stream did not reach the watermark in time")]
    Late,
    #[error("the change stream ended")]
    StreamEnded,
    #[error("the target's state is older than at the last observation: it was restored")]
    Rewound,
    #[error(transparent)]
    Watermark(#[from] BackendError),
}

impl ObservedCache {
    /// The current observed state, while the instances in flight are changing.
    pub async fn observe<T: Target>(
        &mut self,
        target: &T,
        desired: &Desired,
        prune: bool,
        in_flight: &BTreeSet<InstanceKey>,
    ) -> Result<Observation, TargetError> {
        let hosts = || desired.instances.values().map(|want| want.host.key.clone()).collect();
        let addresses = desired.addresses_of_agents();
        let caught_up = self.catch_up(target, hosts, &addresses).await;
        self.ours.clone_from(in_flight);
        match caught_up {
            Ok(Some(observed)) => return self.with_live_check(observed, target, desired).await,
            Ok(None) => {}
            Err(cause) => info!(%cause, "full observation"),
        }
        (self.known, self.listed) = (None, BTreeMap::new());
        let (world, changes) = target.observe_and_watch(desired, prune).await?;
        let observed_at = Instant::now();
        let under_agent_id = under_agent_id(&world.observed, &addresses);
        self.known = changes.map(|changes| CachedObservation {
            observed: None,
            number: changes.from,
            changes,
            observed_at,
            addresses,
            under_agent_id,
        });
        match Caps::of(target.backend().dialect()).reads_specs {
            true => self.with_live_check(world.observed, target, desired).await,
            false => Ok(world),
        }
    }

    /// Adds a live check of instances that are not proven ours. The target's own rows are kept: streamed changes
    /// apply to those.
    async fn with_live_check<T: Target>(
        &mut self,
        observed: Observed,
        target: &T,
        desired: &Desired,
    ) -> Result<Observation, TargetError> {
        let (backend, state) = (target.backend(), target.state());
        let world = Observation::checked(observed, backend, state, target.name(), desired).await;
        let world = world.map_err(|cause| TargetError::observe(target.name(), cause))?;
        self.listed.clone_from(world.listed());
        Ok(world)
    }

    /// Rows of the target that this pass replaced: the next one starts from them.
    pub fn set_listed(&mut self, listed: &BTreeMap<InstanceKey, Option<ObservedInstance>>) {
        self.listed.extend(listed.iter().map(|(key, row)| (key.clone(), row.clone())));
    }

    /// Returns the observation that a pass or a plan used.
    pub fn put_back(&mut self, observed: Arc<Observed>) {
        if let Some(known) = &mut self.known {
            known.observed = Some(observed);
        }
    }

    /// These instances are about to change by our own steps.
    pub fn expect_changes(&mut self, instances: impl Iterator<Item = InstanceKey>) {
        self.ours.extend(instances);
    }

    /// Processes that were relaunched since the last call.
    pub fn take_relaunched(&mut self) -> BTreeMap<InstanceKey, u32> {
        std::mem::take(&mut self.relaunched)
    }

    /// Waits for a change of a row that `cares` selects. Cancel safe.
    pub async fn wait_for_change(&mut self, cares: impl Fn(&InstanceKey, Option<&ObservedInstance>) -> bool) {
        loop {
            let Some(known) = &mut self.known else { return std::future::pending().await };
            let event = known.changes.next().await;
            if self.apply_event(event, &cares) {
                return;
            }
        }
    }

    async fn catch_up<T: Target>(
        &mut self,
        target: &T,
        hosts: impl Fn() -> BTreeSet<HostKey>,
        addresses: &BTreeMap<HostKey, HostKey>,
    ) -> Result<Option<Observed>, Resync> {
        match &self.known {
            None => return Ok(None),
            Some(known) if known.observed_at.elapsed() >= RESYNC_INTERVAL => return Ok(None),
            Some(known) if known.addresses != *addresses => return Ok(None),
            Some(known) if known.observed.is_none() => return Err(Resync::PassCancelled),
            Some(_) => {}
        }
        let mut hosts = hosts();
        // Also hosts of instances that are no longer wanted: an unobservable host must not be pruned.
        let seen = self.known.as_ref().and_then(|known| known.observed.as_ref());
        hosts.extend(seen.into_iter().flat_map(|seen| seen.instances.keys()).map(|key| key.host.clone()));
        let agents = self.known.iter().flat_map(|known| known.under_agent_id.values());
        hosts.extend(agents.cloned());
        if let Some(known) = &mut self.known {
            known.changes.open();
        }
        let mark = target.backend().watermark(&hosts).await?;
        if self.known.as_ref().is_some_and(|known| known.number > mark.number) {
            return Err(Resync::Rewound);
        }
        let until = Instant::now() + CATCH_UP_TIMEOUT;
        while let Some(known) = &mut self.known
            && known.number < mark.number
        {
            match tokio::time::timeout_at(until, known.changes.next()).await {
                Ok(event) => self.apply_event(event, &|_, _| false),
                Err(_) => return Err(Resync::Late),
            };
        }
        let observed = self.known.as_mut().and_then(|known| known.observed.take());
        // A displayed result may still share it.
        let mut observed = Arc::unwrap_or_clone(observed.ok_or(Resync::StreamEnded)?);
        for (key, row) in std::mem::take(&mut self.listed) {
            match row {
                Some(row) => observed.instances.insert(key, row),
                None => observed.instances.remove(&key),
            };
        }
        let address = |host: HostKey| addresses.get(&host).cloned().unwrap_or(host);
        observed.gaps = mark.gaps.into_iter().map(|(host, why)| (address(host), why)).collect();
        observed.at = target.now();
        Ok(Some(observed))
    }

    /// Applies an event. Returns whether it needs a pass.
    fn apply_event(
        &mut self,
        event: ChangeEvent,
        cares: &impl Fn(&InstanceKey, Option<&ObservedInstance>) -> bool,
    ) -> bool {
        let Some(known) = &mut self.known else { return false };
        let Some(observed) = &mut known.observed else { return false };
        let (number, rows) = match event {
            ChangeEvent::Rows { number, rows } => (number, rows),
            ChangeEvent::Over(why) => {
                info!(why, "change stream ended");
                // A stream that ends at once must not cause one full observation after the other.
                let lasted = known.observed_at.elapsed() >= MIN_STREAM_LIFETIME;
                self.known = None;
                return lasted;
            }
        };
        known.number = number;
        if rows.is_empty() {
            return false;
        }
        let observed = Arc::make_mut(observed);
        let mut matters = false;
        for (key, row) in rows {
            let key = match resolve(key, row.is_some(), observed, &known.addresses, &mut known.under_agent_id)
            {
                Resolved::Key(key) => key,
                Resolved::NoRow => continue,
                // The next full observation reports it.
                Resolved::TwoRows => {
                    self.known = None;
                    return true;
                }
            };
            self.listed.remove(&key);
            let before = observed.instances.get(&key);
            let pids =
                (before.and_then(|seen| seen.process.pid), row.as_ref().and_then(|seen| seen.process.pid));
            if let (Some(seen), (then, Some(now))) = (before, pids)
                && then != Some(now)
                // Another spec means an intended restart.
                && row.as_ref().is_some_and(|row| row.specs.live == seen.specs.live)
                && !self.ours.contains(&key)
                && row.as_ref().is_some_and(is_long_running)
            {
                self.relaunched.insert(key.clone(), now);
            }
            // The executor reports the end of our own steps.
            let other =
                !self.ours.contains(&key) && before.map(stable_fields) != row.as_ref().map(stable_fields);
            matters |= other && (cares(&key, before) || cares(&key, row.as_ref()));
            match row {
                Some(row) => observed.instances.insert(key, row),
                None => observed.instances.remove(&key),
            };
        }
        matters
    }
}

/// Instances that an observation lists under an agent id of these, by the key that they have under the address.
fn under_agent_id(
    observed: &Observed,
    addresses: &BTreeMap<HostKey, HostKey>,
) -> BTreeMap<InstanceKey, HostKey> {
    let listed = observed.instances.keys().filter(|_| !addresses.is_empty());
    let moved = listed.filter_map(|key| {
        let address = addresses.get(&key.host)?.clone();
        Some((InstanceKey { host: address, ..key.clone() }, key.host.clone()))
    });
    moved.collect()
}

/// The key of a streamed row in the cached observation.
enum Resolved {
    Key(InstanceKey),
    /// The removal of a row that the cache does not hold under this key.
    NoRow,
    /// The instance has a row under its host's address, and one under its agent id.
    TwoRows,
}

fn resolve(
    key: InstanceKey,
    is_present: bool,
    observed: &Observed,
    addresses: &BTreeMap<HostKey, HostKey>,
    under_agent_id: &mut BTreeMap<InstanceKey, HostKey>,
) -> Resolved {
    if addresses.is_empty() {
        return Resolved::Key(key);
    }
    let Some(address) = addresses.get(&key.host) else {
        return match (under_agent_id.contains_key(&key), is_present) {
            (false, _) => Resolved::Key(key),
            (true, false) => Resolved::NoRow,
            (true, true) => Resolved::TwoRows,
        };
    };
    let agent = key.host.clone();
    let key = InstanceKey { host: address.clone(), ..key };
    match (under_agent_id.contains_key(&key), is_present) {
        (true, true) => Resolved::Key(key),
        (true, false) => {
            under_agent_id.remove(&key);
            Resolved::Key(key)
        }
        (false, false) => Resolved::NoRow,
        (false, true) if observed.instances.contains_key(&key) => Resolved::TwoRows,
        (false, true) => {
            under_agent_id.insert(key.clone(), agent);
            Resolved::Key(key)
        }
    }
}

/// A scheduled or one-shot process ends without having been lost.
fn is_long_running(seen: &ObservedInstance) -> bool {
    seen.specs.live.spec().is_none_or(|spec| spec.monitor.is_resident())
}

/// A row without volatile fields: the rest determines the plan.
pub fn stable_fields(seen: &ObservedInstance) -> ObservedInstance {
    let process = RunningProcess { pid: None, started: None, ..seen.process };
    ObservedInstance { process, since: None, report_time: None, ..seen.clone() }
}
