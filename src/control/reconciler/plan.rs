//! Planning in a pass: the rules of this moment, the plan, and its result.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use super::active_revision::Disabled;
use super::context::PassError;
use super::{Decisions, Reconciler};
use crate::clock;
use crate::control::backoff::BackoffHold;
use crate::control::event::ControllerEvent;
use crate::control::spec_history::HistorySearch;
use crate::control::{HoldsAndPauses, PassResult, Target};
use crate::engine::other_sources::DeclaredElsewhere;
use crate::engine::protections::{self, Protections};
use crate::engine::rollout_records;
use crate::manifest::provenance;
use crate::model::{HoldReason, InstanceKey, Plan};
use crate::observe::{Observation, StablePlanInputs};
use crate::reconcile::Rules;
use crate::source::SourceState;
use crate::store::Error;

impl<T: Target> Reconciler<'_, T> {
    /// Plans an observation. `in_flight`: the instances that an earlier plan still changes.
    pub(super) async fn plan(
        &mut self,
        manifests: &SourceState,
        mut world: Observation,
        in_flight: BTreeSet<InstanceKey>,
        disabled: Disabled,
    ) -> Result<Arc<PassResult>, PassError> {
        let context = self.context;
        let holds = match context.target.active_holds().await {
            Ok(holds) => holds,
            Err(why) => {
                self.observed_cache.put_back(Arc::new(world.observed));
                return Err(why.into());
            }
        };
        let decided = async {
            let exceptions = self.prune_exceptions().await?;
            Ok::<_, Error>((exceptions, rollout_records::read(context.state(), context.owner()).await?))
        };
        let ((protections, elsewhere), decisions) = match decided.await {
            Ok((exceptions, records)) => (exceptions, rollout_records::progress(&records)),
            Err(why) => {
                self.observed_cache.put_back(Arc::new(world.observed));
                return Err(why.into());
            }
        };
        self.decisions = Some(Decisions { holds: holds.clone(), rollouts: decisions.clone() });
        let now = clock::at(context.target.now(), &manifests.desired);
        let backoff = &mut self.retries.backoff;
        backoff.record_observation(&manifests.desired, &world.observed, now.at, &mut fastrand::f64);
        let backing_off: Vec<_> = backoff.backing_off(now.at).into_iter().collect();
        let mut rules = self.rules(manifests, &world, holds, &backing_off, in_flight, disabled);
        (rules.holds.protections, rules.orphans.declared_elsewhere) = (protections, elsewhere.instances);
        rules.orphans.source_unreadable |= elsewhere.is_incomplete;
        let config = &context.config.manifests;
        let search = HistorySearch {
            past: config.history.clone(),
            commit: manifests.commit.clone(),
            limits: config.limits.clone(),
        };
        rules.rollouts = decisions;
        let inputs = StablePlanInputs { desired: &manifests.desired, rules: &rules, now: &now };
        let plan =
            world.plan_until_stable(&inputs, context.target.backend(), &search, &mut self.old_specs).await;
        // The next pass repeats a failed write.
        if let Err(error) =
            rollout_records::record_pauses(context.state(), context.owner(), &plan.pauses).await
        {
            tracing::warn!(%error, "cannot record the pause of a rollout");
        }
        Ok(self.finish_plan(manifests, world, rules, &backing_off, plan))
    }

    /// Protections of live instances, and instances that other sources declare. Without prune neither is needed.
    async fn prune_exceptions(&mut self) -> Result<(Protections, DeclaredElsewhere), Error> {
        let context = self.context;
        if !context.config.rules.prune {
            return Ok((Protections::new(), DeclaredElsewhere::default()));
        }
        let protections = protections::read(context.state()).await?;
        Ok((protections, self.resolver.declared_elsewhere(context).await?))
    }

    /// The rules of this pass: what the manifests, people, backoff and plans in flight forbid.
    fn rules(
        &self,
        manifests: &SourceState,
        world: &Observation,
        holds: HoldsAndPauses,
        backing_off: &[(InstanceKey, BackoffHold)],
        in_flight: BTreeSet<InstanceKey>,
        disabled: Disabled,
    ) -> Rules {
        let mut rules = self.context.config.rules.clone();
        (rules.holds.manual, rules.holds.pauses) = holds;
        rules.orphans.source_unreadable |= manifests.is_incomplete;
        // In a complete read, missing declarations are confirmed first; in an incomplete one, prune is held and
        // reported.
        rules.prune &= manifests.may_prune || manifests.is_incomplete;
        rules.orphans.known_namespaces = world.namespaces(&rules.owner);
        rules.holds.by_controller = self.drift.held(disabled, &manifests.desired, &world.observed);
        let backing_off = backing_off.iter().cloned();
        rules.holds.by_controller.extend(backing_off.map(|(key, hold)| (key, (hold.reason, hold.why))));
        let why = |what: &str| (HoldReason::UnderWay, what.to_owned());
        let open = self.recovery.open_instances().cloned();
        rules
            .holds
            .by_controller
            .extend(open.map(|key| (key, why("a step of an interrupted run is still in flight"))));
        let earlier = "an earlier plan for this instance is in flight";
        rules.holds.by_controller.extend(in_flight.into_iter().map(|key| (key, why(earlier))));
        rules.in_flight = self.in_flight.disruptions();
        rules
    }

    /// Records a plan, returns the observation to the cache, and emits the result.
    fn finish_plan(
        &mut self,
        manifests: &SourceState,
        world: Observation,
        rules: Rules,
        backing_off: &[(InstanceKey, BackoffHold)],
        mut plan: Plan,
    ) -> Arc<PassResult> {
        self.observed_cache.set_listed(world.listed());
        self.retries.backoff.record_held(&plan, &world.observed);
        provenance::locate_in(&mut plan, &manifests.texts, &self.context.config.manifests.limits);
        let observed = Arc::new(world.observed);
        self.observed_cache.put_back(Arc::clone(&observed));
        let result = Arc::new(PassResult {
            revision: self.current.revision.clone(),
            desired: Arc::clone(&manifests.desired),
            observed,
            rules,
            backing_off: backing_off.iter().map(|(key, hold)| hold.hold(key)).collect(),
            plan,
            rows: OnceLock::new(),
        });
        self.context.events.emit(ControllerEvent::Planned { result: &result });
        result
    }
}
