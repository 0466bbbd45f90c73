//! One pass: read the manifests, observe, plan, dispatch, and report held instances.
//!
//! A pass neither schedules itself nor waits for dispatched work: the control loop does. Time is the target's.

mod dispatch;
mod drift_policy;
mod persist;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};

use tokio::sync::mpsc;
use tokio::time::Instant;

use self::drift_policy::{AppliedRevision, Disabled};
use super::backoff::Backoff;
use super::event::{ControllerEvent, EventSink};
use super::executor::WorkItem;
use super::in_flight::InFlightPlans;
use super::observed_cache::ObservedCache;
use super::overrides::{LastApplied, PinOverride};
use super::revisions;
use super::spec_history::SearchCache;
use super::suspended;
use super::{ControllerConfig, PassResult, Target};
use crate::clock;
use crate::execute::world::Observation;
use crate::manifest::provenance;
use crate::model::{Desired, Hold, HoldReason, InstanceKey, ManifestRevision, Pause, Plan, Time};
use crate::reconcile::reconcile;
use crate::reconcile::spec_recovery::missing;
use crate::source::{Source, SourceState};
use crate::store::Lease;

pub struct Reconciler<'a, T> {
    config: &'a ControllerConfig,
    target: &'a T,
    events: &'a EventSink<'a>,
    /// Queue of the executor, the plans in flight, and the number of the last work item.
    work_items: mpsc::UnboundedSender<WorkItem>,
    pub(super) in_flight: InFlightPlans,
    last: u64,
    backoff: Backoff,
    /// When a failed instance may be retried.
    due: Option<Time>,
    pub(super) observed_cache: ObservedCache,
    /// Revision read last; and the one last applied: differences from it are drift.
    revision: ManifestRevision,
    /// Commit of the revision read last.
    commit: Option<String>,
    applied: Option<AppliedRevision>,
    /// What that revision declares.
    desired: Arc<Desired>,
    /// The stored active revision and its commit.
    stored: (ManifestRevision, Option<String>),
    /// The active revision, while the source is not followed.
    last_applied: LastApplied,
    /// The source's revision while it is not followed, and whether it has problems.
    unfollowed: Option<ManifestRevision>,
    has_problems: bool,
    has_recalled: bool,
    /// The leader lease, and the generation of our last write.
    pub(super) leader: Option<Lease>,
    last_generation: Option<u64>,
    /// The writer lease, while work is in flight.
    writer: Option<Lease>,
    /// A revision was activated: old ones may have expired.
    needs_gc: bool,
    pin_override: PinOverride,
    old: SearchCache,
    /// A run may have left calls in the journal.
    needs_recovery: bool,
    /// Calls of crashed runs that are still in flight, their instances, and when to poll again.
    open: BTreeMap<String, BTreeSet<InstanceKey>>,
    open_until: Option<Instant>,
    /// The stored suspended instances; `None`: not read yet.
    left: Option<suspended::SuspendedInstances>,
    /// Holds and pauses of the last pass.
    restraints: Option<(Vec<Hold>, Vec<Pause>)>,
}

impl<'a, T: Target> Reconciler<'a, T> {
    pub fn new(
        config: &'a ControllerConfig,
        target: &'a T,
        events: &'a EventSink<'a>,
        work_items: mpsc::UnboundedSender<WorkItem>,
    ) -> Reconciler<'a, T> {
        Reconciler {
            config,
            target,
            events,
            work_items,
            in_flight: InFlightPlans::default(),
            last: 0,
            backoff: Backoff::default(),
            due: None,
            observed_cache: ObservedCache::default(),
            revision: ManifestRevision::default(),
            commit: None,
            applied: None,
            desired: Arc::default(),
            stored: (ManifestRevision::default(), None),
            last_applied: LastApplied::default(),
            unfollowed: None,
            has_problems: false,
            has_recalled: false,
            leader: None,
            last_generation: None,
            writer: None,
            needs_gc: false,
            pin_override: PinOverride::default(),
            old: SearchCache::default(),
            needs_recovery: true,
            open: BTreeMap::new(),
            open_until: None,
            left: None,
            restraints: None,
        }
    }

    /// Whether a retry is due.
    pub fn is_due(&self) -> bool {
        self.due.is_some_and(|due| due <= self.target.now()) || self.is_recovery_due()
    }

    /// Whether holds, pauses or the pin changed since the last pass. An unreadable store counts as unchanged.
    pub async fn holds_or_pin_changed(&self) -> bool {
        let Some(known) = &self.restraints else { return false };
        let (state, owner) = (self.target.state(), &self.config.rules.owner);
        let restraints = self.target.active_holds().await;
        restraints.is_ok_and(|now| now != *known)
            || !self.pin_override.is_current(state, owner).await.unwrap_or(true)
    }

    pub fn emit_relaunched(&mut self) {
        for (instance, pid) in self.observed_cache.take_relaunched() {
            self.events.emit(ControllerEvent::Relaunched { instance: &instance, pid });
        }
    }

    /// Runs a pass. Returns whether the next one is due at once.
    pub async fn run(&mut self, source: &mut Source) -> bool {
        self.due = None;
        let Some(result) = self.reconcile_once(source).await else { return false };
        let again = match result.plan.steps().next().is_some() {
            true => self.dispatch(&result).await,
            false => false,
        };
        if std::mem::take(&mut self.needs_gc) {
            // A failed cleanup is repeated later.
            let _ = revisions::gc(self.target.state(), &self.config.rules.owner).await;
        }
        self.due = self.backoff.next_retry(self.target.now());
        self.persist_suspended().await;
        again
    }

    /// Reads, observes and plans. `None`: the desired or observed state is unknown, or nothing is declared.
    async fn reconcile_once(&mut self, source: &mut Source) -> Option<Arc<PassResult>> {
        if let Some(trouble) = source.take_error_change() {
            self.events.emit(ControllerEvent::Source { trouble });
        }
        let was_news = self.restore_last_good(source).await;
        let reading = match source.read(self.target.state()).await {
            Ok(reading) => reading,
            Err(error) => return self.report_and_abort(&error.to_string()),
        };
        // A pin applies even before the source was read.
        let (is_silent, nothing) =
            (reading.is_none(), SourceState { is_incomplete: true, ..SourceState::default() });
        let source_state = reading.unwrap_or(&nothing);
        let state = self.target.state();
        let pinned = match self.pin_override.resolve(source_state, state, self.config, self.events).await {
            Ok(pinned) => pinned,
            Err(error) => return self.report_and_abort(&error.to_string()),
        };
        let is_pinned = pinned.is_some();
        // Without --follow the active revision stays, whatever the source contains.
        let last_applied = match self.config.follow || is_pinned {
            true => None,
            false => match self.last_applied.reading(state, self.config).await {
                Ok(last_applied) => last_applied,
                Err(error) => return self.report_and_abort(&error.to_string()),
            },
        };
        let reading = match pinned.as_ref().or(last_applied.as_ref()) {
            Some(instead) => &**instead,
            None if is_silent => return None,
            None => source_state,
        };
        let is_left = !self.config.follow && !is_pinned && !is_silent;
        let unfollowed = is_left && (last_applied.is_none() || source_state.revision != reading.revision);
        let unfollowed = unfollowed.then(|| source_state.revision.clone());
        self.report_source(reading, source_state, was_news, unfollowed);
        self.set_revision(reading).await;
        // Nothing was ever read: the desired state is unknown.
        if reading.desired.instances.is_empty() && reading.is_incomplete {
            return None;
        }
        let (world, in_flight_instances) = self.recover_and_observe(&reading.desired).await?;
        // A pin is set by a person, and a last applied revision was active before: --follow does not apply to them.
        let disabled = match (is_left && last_applied.is_none(), self.config.heal) {
            (true, _) => Disabled::Follow,
            (false, false) => Disabled::Heal,
            (false, true) => Disabled::Nothing,
        };
        if disabled == Disabled::Heal && last_applied.is_some() {
            // With neither --follow nor --heal, every difference is drift.
            self.applied = Some(AppliedRevision::of(reading));
        }
        let result = self.plan(reading, world, in_flight_instances, disabled).await?;
        if !is_pinned
            && last_applied.is_none()
            && !reading.has_unknown_files
            && disabled != Disabled::Follow
            && let Err(error) = self.activate(reading).await
        {
            return self.report_and_abort(&error.to_string());
        }
        self.finish_pass(reading, &result.plan, disabled).await;
        Some(result)
    }

    /// Emits the events of a read. `unfollowed`: the source's revision, if it is not followed.
    fn report_source(
        &mut self,
        reading: &SourceState,
        source_state: &SourceState,
        was_news: bool,
        unfollowed: Option<ManifestRevision>,
    ) {
        if reading.revision != self.revision || reading.changed_since_last {
            self.events.emit(ControllerEvent::Read { reading, revision: &reading.revision });
        }
        // Problems of the source are reported even while another revision is active.
        let is_other = !std::ptr::eq(reading, source_state);
        let had_problems = std::mem::replace(&mut self.has_problems, !source_state.problems.is_empty());
        if is_other && (source_state.changed_since_last || was_news) && (self.has_problems || had_problems) {
            self.events.emit(ControllerEvent::Problems { reading: source_state });
        }
        if self.unfollowed != unfollowed {
            self.events.emit(ControllerEvent::RevisionNotFollowed { revision: unfollowed.as_ref() });
            self.unfollowed = unfollowed;
        }
    }

    /// Sets the revision of this pass, and resets state that another one left.
    async fn set_revision(&mut self, reading: &SourceState) {
        self.commit.clone_from(&reading.commit);
        if self.applied.is_none() && !self.config.heal {
            self.applied = self.load_applied(reading).await;
        }
        if reading.revision != self.revision {
            self.revision.clone_from(&reading.revision);
            // A failed instance may succeed with the new revision.
            self.backoff.reset_changed(&self.desired, &reading.desired);
            self.desired = Arc::clone(&reading.desired);
            self.in_flight.cancel_outdated(&reading.desired);
        }
        self.restore_suspended(&reading.desired).await;
    }

    /// Resolves calls of crashed runs, if due, and observes the target. Returns the instances in flight, too.
    async fn recover_and_observe(
        &mut self,
        desired: &Desired,
    ) -> Option<(Observation, BTreeSet<InstanceKey>)> {
        let needs_to_know = self.needs_recovery && !self.config.rules.caps.reads_specs;
        if (needs_to_know || self.is_recovery_due()) && !self.recover_first().await {
            return None;
        }
        let prune = self.config.rules.prune;
        let in_flight_instances = self.in_flight.instances(desired);
        let world = match self.observed_cache.observe(self.target, desired, prune, &in_flight_instances).await
        {
            Ok(world) => world,
            Err(why) => return self.report_and_abort(&why),
        };
        self.emit_relaunched();
        Some((world, in_flight_instances))
    }

    /// Reports a pass without steps.
    async fn finish_pass(&mut self, reading: &SourceState, plan: &Plan, disabled: Disabled) {
        // A missing declaration is confirmed by the next read.
        let is_unsure = self.config.rules.prune && !reading.may_prune && !reading.is_incomplete;
        if plan.steps().next().is_none() && self.in_flight.is_empty() && !is_unsure {
            // An instance that only waits is still part of the change.
            if !plan.held.iter().any(|held| held.reason.is_transient()) && disabled != Disabled::Follow {
                self.mark_applied(&reading.desired).await;
            }
            self.events.emit(ControllerEvent::Idle { settled: plan.in_sync, held: plan.held.len() });
        }
    }

    async fn plan(
        &mut self,
        reading: &SourceState,
        mut world: Observation,
        in_flight_instances: BTreeSet<InstanceKey>,
        disabled: Disabled,
    ) -> Option<Arc<PassResult>> {
        let desired = &reading.desired;
        let mut rules = self.config.rules.clone();
        match self.target.active_holds().await {
            Ok(restraints) => {
                (rules.holds, rules.pauses) = restraints.clone();
                self.restraints = Some(restraints);
            }
            Err(why) => {
                self.observed_cache.put_back(Arc::new(world.observed));
                return self.report_and_abort(&why);
            }
        }
        rules.source_unreadable |= reading.is_incomplete;
        // In a complete read, missing declarations are confirmed first; in an incomplete one, prune is held and
        // reported.
        rules.prune &= reading.may_prune || reading.is_incomplete;
        rules.known_namespaces = world.namespaces(&rules.owner);
        let now = clock::at(self.target.now(), desired);
        self.backoff.record_observation(desired, &world.observed, now.at, &mut fastrand::f64);
        let left = self.backoff.backing_off(now.at);
        let backing_off = left.iter().map(|(key, left)| left.hold(key)).collect();
        rules.left_alone = self.disabled_changes(disabled, desired, &world.observed);
        rules.left_alone.extend(left.into_iter().map(|(key, left)| (key, (left.reason, left.why))));
        let why = |what: &str| (HoldReason::UnderWay, what.to_owned());
        let open = self.open.values().flatten().cloned();
        rules
            .left_alone
            .extend(open.map(|key| (key, why("a step of an interrupted run is still in flight"))));
        let in_flight = "an earlier plan for it is in flight";
        rules.left_alone.extend(in_flight_instances.into_iter().map(|key| (key, why(in_flight))));
        rules.under_way = self.in_flight.disruptions();
        let mut plan = reconcile(desired, &world.observed, &rules, &now);
        let missing = missing(&plan, desired, &world.observed, &rules.caps);
        if !missing.is_empty() {
            let ControllerConfig { manifest_history: past, limits, .. } = self.config;
            world.add_recovered_specs(
                self.old.lookup(past, reading.commit.as_deref(), limits, missing, &rules.caps).await,
            );
            plan = reconcile(desired, &world.observed, &rules, &now);
        }
        // A list alone decides nothing destructive.
        while world.check_live(self.target.backend(), &rules.caps, &plan).await {
            plan = reconcile(desired, &world.observed, &rules, &now);
        }
        self.observed_cache.set_listed(world.listed());
        self.backoff.record_held(&plan, &world.observed);
        provenance::locate_in(&mut plan, &reading.texts, &self.config.limits);
        let observed = Arc::new(world.observed);
        self.observed_cache.put_back(Arc::clone(&observed));
        let result = Arc::new(PassResult {
            revision: self.revision.clone(),
            desired: Arc::clone(desired),
            observed,
            rules,
            backing_off,
            plan,
            rows: OnceLock::new(),
        });
        self.events.emit(ControllerEvent::Planned { result: &result });
        Some(result)
    }

    /// Discards state that another leader may have changed.
    pub fn reset(&mut self) {
        (self.applied, self.left) = (None, None);
        self.stored = (ManifestRevision::default(), None);
        self.needs_recovery = true;
    }
}
