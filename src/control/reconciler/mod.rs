//! One pass: read, look, plan, hand over what is to be done, and tell what was left alone.
//!
//! Nothing here waits for a reason, nor for what was handed over; whoever runs it does. Time is the target's.

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
use super::source::{Source, SourceState};
use super::spec_history::SearchCache;
use super::suspended;
use super::{ControllerConfig, PassResult, Target};
use crate::clock;
use crate::execute::world::Observation;
use crate::manifest::provenance;
use crate::model::{Desired, Hold, HoldReason, InstanceKey, Pause, Time};
use crate::reconcile::reconcile;
use crate::reconcile::spec_recovery::missing;
use crate::store::Lease;

pub struct Reconciler<'a, T> {
    config: &'a ControllerConfig,
    target: &'a T,
    events: &'a EventSink<'a>,
    /// Who carries out what is to be done, what he has at hand, and the number of the last order.
    orders: mpsc::UnboundedSender<WorkItem>,
    pub(super) in_flight: InFlightPlans,
    last: u64,
    backoff: Backoff,
    /// When something that failed may be tried again.
    due: Option<Time>,
    pub(super) observed_cache: ObservedCache,
    /// Of what was read last, and of what was last begun to be made true: what differs from that is drift.
    revision: String,
    /// What was read last is this commit.
    commit: Option<String>,
    applied: Option<AppliedRevision>,
    /// What it asks for.
    desired: Arc<Desired>,
    /// The revision and the commit that are known to be kept.
    taken: (String, Option<String>),
    /// What was taken, where the source is not followed.
    last_applied: LastApplied,
    /// What the source says instead, and whether something is wrong with it.
    unfollowed: Option<String>,
    has_problems: bool,
    recalled: bool,
    /// The lease that lets us act at all, and the number of the last one under which we wrote.
    pub(super) leader: Option<Lease>,
    wrote: Option<u64>,
    /// The one under which we write, as long as something is under way.
    writer: Option<Lease>,
    /// Something was taken, and older things may be too old now.
    untidy: bool,
    pin_override: PinOverride,
    old: SearchCache,
    /// A run may have left something in the journal.
    unsettled: bool,
    /// Calls of runs that died which are still under way, whom they concern, and when to ask again.
    open: BTreeMap<String, BTreeSet<InstanceKey>>,
    open_until: Option<Instant>,
    /// What is known to be kept of what was given up; `None`: nobody asked yet.
    left: Option<suspended::SuspendedInstances>,
    /// What was held and paused at the last look.
    restraints: Option<(Vec<Hold>, Vec<Pause>)>,
}

impl<'a, T: Target> Reconciler<'a, T> {
    pub fn new(
        config: &'a ControllerConfig,
        target: &'a T,
        events: &'a EventSink<'a>,
        orders: mpsc::UnboundedSender<WorkItem>,
    ) -> Reconciler<'a, T> {
        Reconciler {
            config,
            target,
            events,
            orders,
            in_flight: InFlightPlans::default(),
            last: 0,
            backoff: Backoff::default(),
            due: None,
            observed_cache: ObservedCache::default(),
            revision: String::new(),
            commit: None,
            applied: None,
            desired: Arc::default(),
            taken: (String::new(), None),
            last_applied: LastApplied::default(),
            unfollowed: None,
            has_problems: false,
            recalled: false,
            leader: None,
            wrote: None,
            writer: None,
            untidy: false,
            pin_override: PinOverride::default(),
            old: SearchCache::default(),
            unsettled: true,
            open: BTreeMap::new(),
            open_until: None,
            left: None,
            restraints: None,
        }
    }

    /// Is it time to try something again?
    pub fn is_due(&self) -> bool {
        self.due.is_some_and(|due| due <= self.target.now()) || self.is_recovery_due()
    }

    /// Did somebody hold, release, pause, resume or pin something since the last look? What cannot be asked has not changed.
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

    /// Is it to be looked at again at once?
    pub async fn run(&mut self, source: &mut Source) -> bool {
        self.due = None;
        let Some(look) = self.reconcile_once(source).await else { return false };
        let again = match look.plan.steps().next().is_some() {
            true => self.dispatch(&look).await,
            false => false,
        };
        if std::mem::take(&mut self.untidy) {
            // What is left lying is picked up another time.
            let _ = revisions::gc(self.target.state(), &self.config.rules.owner).await;
        }
        self.due = self.backoff.next_retry(self.target.now());
        self.persist_suspended().await;
        again
    }

    /// What is wanted, what is there, and what follows. `None`: that is not known, or nothing is wanted.
    async fn reconcile_once(&mut self, source: &mut Source) -> Option<Arc<PassResult>> {
        if let Some(trouble) = source.take_error_change() {
            self.events.emit(ControllerEvent::Source { trouble });
        }
        let was_news = self.restore_last_good(source).await;
        let reading = match source.read(self.target.state()).await {
            Ok(reading) => reading,
            Err(error) => return self.report_and_abort(&error.to_string()),
        };
        // A pin is kept true also before the source has said anything.
        let (is_silent, nothing) =
            (reading.is_none(), SourceState { is_incomplete: true, ..SourceState::default() });
        let said = reading.unwrap_or(&nothing);
        let state = self.target.state();
        let pinned = match self.pin_override.resolve(said, state, self.config, self.events).await {
            Ok(pinned) => pinned,
            Err(error) => return self.report_and_abort(&error.to_string()),
        };
        let is_pinned = pinned.is_some();
        // Who does not follow keeps true what was last taken, whatever the source says by now.
        let standing = match self.config.follow || is_pinned {
            true => None,
            false => match self.last_applied.reading(state, self.config).await {
                Ok(standing) => standing,
                Err(error) => return self.report_and_abort(&error.to_string()),
            },
        };
        let reading = match pinned.as_ref().or(standing.as_ref()) {
            Some(instead) => &**instead,
            None if is_silent => return None,
            None => said,
        };
        if reading.revision != self.revision || reading.changed_since_last {
            self.events.emit(ControllerEvent::Read { reading, revision: &reading.revision });
        }
        // What is wrong in the source meanwhile is worth knowing all the same.
        let is_other = !std::ptr::eq(reading, said);
        let had_problems = std::mem::replace(&mut self.has_problems, !said.problems.is_empty());
        if is_other && (said.changed_since_last || was_news) && (self.has_problems || had_problems) {
            self.events.emit(ControllerEvent::Problems { reading: said });
        }
        let is_left = !self.config.follow && !is_pinned && !is_silent;
        let unfollowed = is_left && (standing.is_none() || said.revision != reading.revision);
        let unfollowed = unfollowed.then(|| said.revision.clone());
        if self.unfollowed != unfollowed {
            self.events.emit(ControllerEvent::RevisionNotFollowed { revision: unfollowed.as_deref() });
            self.unfollowed = unfollowed;
        }
        self.commit.clone_from(&reading.commit);
        if self.applied.is_none() && !self.config.heal {
            self.applied = self.load_applied(reading).await;
        }
        if reading.revision != self.revision {
            self.revision.clone_from(&reading.revision);
            // What failed before may work now.
            self.backoff.reset_changed(&self.desired, &reading.desired);
            self.desired = Arc::clone(&reading.desired);
            self.in_flight.cancel_outdated(&reading.desired);
        }
        self.restore_suspended(&reading.desired).await;
        // Nothing was ever read: nothing is wanted, and nothing is known.
        if reading.desired.instances.is_empty() && reading.is_incomplete {
            return None;
        }
        let needs_to_know = self.unsettled && !self.config.rules.caps.reads_specs;
        if (needs_to_know || self.is_recovery_due()) && !self.recover_first().await {
            return None;
        }
        let prune = self.config.rules.prune;
        let under_way = self.in_flight.instances(&reading.desired);
        let world = match self.observed_cache.observe(self.target, &reading.desired, prune, &under_way).await
        {
            Ok(observe) => observe,
            Err(why) => return self.report_and_abort(&why),
        };
        self.emit_relaunched();
        // What is pinned is a person's word, not the source's; what stands was taken before.
        let off = match (is_left && standing.is_none(), self.config.heal) {
            (true, _) => Disabled::Follow,
            (false, false) => Disabled::Heal,
            (false, true) => Disabled::Nothing,
        };
        if off == Disabled::Heal && standing.is_some() {
            // Nobody follows, nobody repairs: whatever is otherwise is drift.
            self.applied = Some(AppliedRevision::of(reading));
        }
        let look = self.plan(reading, world, under_way, off).await?;
        let plan = &look.plan;
        if !is_pinned
            && standing.is_none()
            && !reading.has_unknown_files
            && off != Disabled::Follow
            && let Err(error) = self.activate(reading).await
        {
            return self.report_and_abort(&error.to_string());
        }
        // What is missing is made sure of in a moment.
        let is_unsure = self.config.rules.prune && !reading.may_prune && !reading.is_incomplete;
        if plan.steps().next().is_none() && self.in_flight.is_empty() && !is_unsure {
            // What only waits for its time is still to be followed.
            if !plan.held.iter().any(|held| held.reason.is_transient()) && off != Disabled::Follow {
                self.mark_applied(&reading.desired).await;
            }
            self.events.emit(ControllerEvent::Idle { settled: plan.in_sync, held: plan.held.len() });
        }
        Some(look)
    }

    async fn plan(
        &mut self,
        reading: &SourceState,
        mut world: Observation,
        under_way: BTreeSet<InstanceKey>,
        off: Disabled,
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
        // What is missing in a whole reading is made sure of first; in one that is not whole, it is told of.
        rules.prune &= reading.may_prune || reading.is_incomplete;
        rules.known_namespaces = world.namespaces(&rules.owner);
        let now = clock::at(self.target.now(), desired);
        self.backoff.record_observation(desired, &world.observed, now.at, &mut fastrand::f64);
        let left = self.backoff.backing_off(now.at);
        let backing_off = left.iter().map(|(key, left)| left.hold(key)).collect();
        rules.left_alone = self.disabled_changes(off, desired, &world.observed);
        rules.left_alone.extend(left.into_iter().map(|(key, left)| (key, (left.reason, left.why))));
        let why = |what: &str| (HoldReason::UnderWay, what.to_owned());
        let open = self.open.values().flatten().cloned();
        rules
            .left_alone
            .extend(open.map(|key| (key, why("what an interrupted run had begun is still under way"))));
        let at_work = "an earlier plan for it is being carried out";
        rules.left_alone.extend(under_way.into_iter().map(|key| (key, why(at_work))));
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
        // Nothing is lost on the word of a list.
        while world.check_live(self.target.backend(), &rules.caps, &plan).await {
            plan = reconcile(desired, &world.observed, &rules, &now);
        }
        self.observed_cache.set_listed(world.listed());
        self.backoff.record_held(&plan, &world.observed);
        provenance::locate_in(&mut plan, &reading.texts, &self.config.limits);
        let observed = Arc::new(world.observed);
        self.observed_cache.put_back(Arc::clone(&observed));
        let look = Arc::new(PassResult {
            revision: self.revision.clone(),
            desired: Arc::clone(desired),
            observed,
            rules,
            backing_off,
            plan,
            rows: OnceLock::new(),
        });
        self.events.emit(ControllerEvent::Planned { result: &look });
        Some(look)
    }

    /// Somebody else may have led meanwhile.
    pub fn reset(&mut self) {
        (self.applied, self.left) = (None, None);
        self.taken = (String::new(), None);
        self.unsettled = true;
    }
}
