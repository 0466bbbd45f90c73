//! One pass: read the manifests, observe, plan, dispatch, and report held instances.
//!
//! # Theory of operation
//!
//! [`Reconciler::reconcile_once`] is the list of steps. Each part of its state has one owner: the [`resolver`] decides
//! with the pure [`active_revision`] which revision is planned, [`drift`] what `--heal no` holds, [`repairs`] which operations repair drift,
//! [`retries`] what backs off,
//! [`recovery`] what crashed runs left, and the [`writer`] holds the lease and the queue. [`plan`] and [`dispatch`] put
//! them together.
//!
//! A pass neither schedules itself nor waits for dispatched work: the control loop does. Time is the target's.

mod active_revision;
mod context;
mod dispatch;
mod drift;
mod overrides;
mod plan;
mod recovery;
mod repairs;
mod resolver;
mod retries;
mod writer;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::sync::mpsc;

use self::active_revision::Disabled;
use self::context::{PassContext, PassError};
use self::drift::DriftPolicy;
use self::recovery::Recovery;
use self::repairs::RepairTracker;
use self::resolver::{ResolvedRevision, RevisionResolver};
use self::retries::Retries;
use self::writer::LeasedQueue;
use super::event::{ControllerEvent, EventSink};
use super::executor::WorkItem;
use super::in_flight::InFlightPlans;
use super::{ControllerConfig, HoldsAndPauses, PassResult, Target};
use crate::engine::rollout_records;
use crate::model::{Desired, InstanceKey, ManifestRevision, Plan, ProcessKey, RolloutProgress, Time};
use crate::observe::{Observation, ObservedCache, SearchCache};
use crate::source::{Source, SourceState};
use crate::store::Lease;

pub struct Reconciler<'a, T> {
    context: PassContext<'a, T>,
    resolver: RevisionResolver,
    current: CurrentRevision,
    drift: DriftPolicy,
    repairs: RepairTracker,
    retries: Retries,
    recovery: Recovery,
    writer: LeasedQueue,
    pub(super) in_flight: InFlightPlans,
    pub(super) observed_cache: ObservedCache,
    /// Old specs that were found in the git history.
    old_specs: SearchCache,
    /// Decisions of persons as of the last pass.
    decisions: Option<Decisions>,
}

/// Decisions of persons: holds, pauses, and progress of rollouts.
struct Decisions {
    holds: HoldsAndPauses,
    rollouts: BTreeMap<ProcessKey, RolloutProgress>,
}

/// The revision of the last pass.
#[derive(Default)]
struct CurrentRevision {
    revision: ManifestRevision,
    commit: Option<String>,
    /// Its declarations.
    desired: Arc<Desired>,
}

impl<'a, T: Target> Reconciler<'a, T> {
    pub fn new(
        config: &'a ControllerConfig,
        target: &'a T,
        events: &'a EventSink<'a>,
        work_items: mpsc::UnboundedSender<WorkItem>,
    ) -> Reconciler<'a, T> {
        Reconciler {
            context: PassContext { config, target, events },
            resolver: RevisionResolver::default(),
            current: CurrentRevision::default(),
            drift: DriftPolicy::default(),
            repairs: RepairTracker::default(),
            retries: Retries::default(),
            recovery: Recovery::default(),
            writer: LeasedQueue::new(work_items),
            in_flight: InFlightPlans::default(),
            observed_cache: ObservedCache::default(),
            old_specs: SearchCache::default(),
            decisions: None,
        }
    }

    fn now(&self) -> Time {
        self.context.target.now()
    }

    /// Whether a retry is due.
    pub fn is_due(&self) -> bool {
        self.retries.is_due(self.now()) || self.recovery.is_due()
    }

    /// Whether a decision of a person changed since the last pass: a hold, a pause, a pin, or a promotion, abort or undo of a
    /// rollout. An unreadable store counts as unchanged.
    pub async fn decisions_changed(&self) -> bool {
        let Some(known) = &self.decisions else { return false };
        let context = self.context;
        let decided = rollout_records::read(context.state(), context.owner()).await;
        context.target.active_holds().await.is_ok_and(|now| now != known.holds)
            || decided.is_ok_and(|now| rollout_records::progress(&now) != known.rollouts)
            || !self.resolver.is_pin_current(context).await.unwrap_or(true)
    }

    pub fn emit_relaunched(&mut self) {
        for (instance, pid) in self.observed_cache.take_relaunched() {
            self.context.events.emit(ControllerEvent::Relaunched { instance: &instance, pid });
        }
    }

    /// Runs a pass as the leader. Returns whether the next one is due at once.
    pub async fn run(&mut self, source: &mut Source, leader: Lease) -> bool {
        self.writer.set_leader(leader);
        self.retries.begin_pass();
        let result = match self.reconcile_once(source).await {
            Ok(Some(result)) => result,
            Ok(None) => return false,
            Err(error) => {
                self.context.report_failure(&error);
                return false;
            }
        };
        let is_again_due = has_steps(&result.plan) && self.dispatch(&result).await;
        self.resolver.collect_expired(self.context).await;
        self.retries.schedule(self.now());
        self.store_suspended().await;
        is_again_due
    }

    /// Reads, observes and plans. `None`: no manifests are known, or nothing is declared.
    async fn reconcile_once(&mut self, source: &mut Source) -> Result<Option<Arc<PassResult>>, PassError> {
        let context = self.context;
        self.report_source_error(source);
        let has_changed = self.resolver.restore_last_good(context, source).await;
        let read = source.read(context.state()).await?;
        let Some(resolved) = self.resolver.resolve(context, read).await? else { return Ok(None) };
        self.resolver.report_source(context, &resolved, read, &self.current.revision, has_changed);
        self.set_revision(&resolved.manifests).await;
        if !resolved.chosen.is_known {
            return Ok(None);
        }
        self.recover_first().await?;
        let (world, in_flight) = self.observe(&resolved.manifests.desired).await?;
        self.begin_drift_policy(&resolved);
        let result = self.plan(&resolved.manifests, world, in_flight, resolved.chosen.disabled).await?;
        self.repairs.record(&resolved.manifests.desired, &result.plan);
        self.resolver.activate(context, &resolved).await?;
        self.finish_pass(&resolved, &result.plan).await;
        Ok(Some(result))
    }

    fn report_source_error(&self, source: &mut Source) {
        if let Some(trouble) = source.take_error_change() {
            self.context.events.emit(ControllerEvent::Source { trouble });
        }
    }

    /// Sets the revision of this pass, and resets state that another one left.
    async fn set_revision(&mut self, manifests: &SourceState) {
        self.current.commit.clone_from(&manifests.commit);
        self.drift.load(self.context, manifests).await;
        if manifests.revision != self.current.revision {
            self.current.revision.clone_from(&manifests.revision);
            // A failed instance may succeed with the new revision.
            self.retries.backoff.reset_changed(&self.current.desired, &manifests.desired);
            self.current.desired = Arc::clone(&manifests.desired);
            self.in_flight.cancel_outdated(&manifests.desired);
        }
        self.retries.restore_suspended(self.context, &manifests.desired).await;
    }

    /// Observes the target. Returns the instances in flight, too.
    async fn observe(
        &mut self,
        desired: &Desired,
    ) -> Result<(Observation, BTreeSet<InstanceKey>), PassError> {
        let (target, prune) = (self.context.target, self.context.config.rules.prune);
        let in_flight = self.in_flight.instances(desired);
        let world = self.observed_cache.observe(target, desired, prune, &in_flight).await;
        let world = world.map_err(PassError::Target)?;
        self.emit_relaunched();
        Ok((world, in_flight))
    }

    /// With neither --follow nor --heal, every difference from the last applied revision is drift.
    fn begin_drift_policy(&mut self, resolved: &ResolvedRevision<'_>) {
        if resolved.chosen.all_is_drift {
            self.drift.set_applied(&resolved.manifests.revision, &resolved.manifests.desired);
        }
    }

    /// Reports a pass without steps.
    async fn finish_pass(&mut self, resolved: &ResolvedRevision<'_>, plan: &Plan) {
        let ResolvedRevision { manifests, chosen } = resolved;
        // A missing declaration is confirmed by the next read.
        let is_unsure = self.context.config.rules.prune && !manifests.may_prune && !manifests.is_incomplete;
        if has_steps(plan) || !self.in_flight.is_empty() || is_unsure {
            return;
        }
        // An instance that only waits is still part of the change.
        let is_waiting = plan.held.iter().any(|held| held.reason.is_transient());
        if !is_waiting && chosen.disabled != Disabled::Follow {
            let revision = &self.current.revision;
            self.drift.mark_converged(self.context, revision, &manifests.desired).await;
        }
        self.context.events.emit(ControllerEvent::Idle { settled: plan.in_sync, held: plan.held.len() });
    }

    /// Publishes suspended instances.
    pub async fn store_suspended(&mut self) {
        self.retries.store_suspended(self.context, &self.current.desired).await;
    }

    /// Discards state that another leader may have changed.
    pub fn reset(&mut self) {
        self.drift = DriftPolicy::default();
        self.repairs = RepairTracker::default();
        self.resolver.reset();
        self.retries.reset();
        self.recovery.expect();
    }
}

fn has_steps(plan: &Plan) -> bool {
    plan.steps().next().is_some()
}
