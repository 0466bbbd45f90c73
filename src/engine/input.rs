//! Inputs of a plan: manifests, observed state, rules and time; and their digests.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use tracing::info;

use super::activate::changed_source;
use super::error::ApplyError;
use super::other_sources::{DeclaredElsewhere, declared_elsewhere};
use super::pin::{self, Pin};
use super::{protections, rollout_records, stored_revisions};
use crate::clock;
use crate::manifest::{Limits, Loaded, provenance};
use crate::model::{ManifestRevision, Now, Observed, Plan};
use crate::observe::{
    NoHistory, ObservedCache, SearchCache, SpecSearch, StablePlanInputs, Target, TargetError,
};
use crate::reconcile::{Rules, fingerprint, reconcile};

/// A plan to make for a target.
pub struct PlanRequest<S = NoHistory> {
    pub loaded: Loaded,
    /// Limits of the manifests, to locate reasons in them.
    pub limits: Limits,
    pub rules: Rules,
    pub now: Now,
    /// The source of the manifests, as it is recorded. `None`: an earlier revision, without a source check.
    pub source: Option<String>,
    /// With `prune`: accept another source than that of the active revision.
    pub accept_source: bool,
    /// The manifests would become the active revision; false: an earlier revision is pinned.
    pub activates: bool,
    /// The source for display and history.
    pub shown_source: String,
    /// Sources of old specs.
    pub search: S,
}

impl PlanRequest {
    /// A plan for these manifests with default rules.
    pub fn new(loaded: Loaded, rules: Rules, source: String) -> PlanRequest {
        let now = clock::with_zones(&loaded.desired);
        PlanRequest {
            loaded,
            limits: Limits::default(),
            rules,
            now,
            source: Some(source.clone()),
            accept_source: false,
            activates: true,
            shown_source: source,
            search: NoHistory,
        }
    }
}

impl<S: SpecSearch> PlanRequest<S> {
    /// Checks the source, reads holds, observes and plans.
    pub async fn plan<T: Target>(self, target: &T) -> Result<(PlanInput, Plan, FactSources<S>), ApplyError> {
        let begin = Instant::now();
        let PlanRequest {
            loaded,
            limits,
            mut rules,
            now,
            source,
            accept_source,
            activates,
            shown_source,
            search,
        } = self;
        let state_error = |error| TargetError::state(target.name(), error);
        if let Some(source) = source.as_ref().filter(|_| rules.prune && !accept_source) {
            let last = changed_source(target.state(), &rules.owner, source).await.map_err(state_error)?;
            if let Some(last) = last {
                return Err(ApplyError::SourceChanged {
                    owner: rules.owner,
                    last,
                    source_now: source.clone(),
                });
            }
        }
        let source = source.filter(|_| !accept_source);
        if let Some(source) = source.as_ref().filter(|_| rules.prune) {
            let elsewhere = read_elsewhere(target, &rules.owner, source, &limits).await?;
            rules.orphans.declared_elsewhere = elsewhere.instances;
            rules.orphans.source_unreadable |= elsewhere.is_incomplete;
        }
        let pin = match activates {
            true => pin::read(target.state(), &rules.owner).await.map_err(state_error)?.map(|(pin, _)| pin),
            false => None,
        };
        (rules.holds.manual, rules.holds.pauses) = target.active_holds().await?;
        let decided = rollout_records::read(target.state(), &rules.owner).await.map_err(state_error)?;
        rules.rollouts = rollout_records::progress(&decided);
        if rules.prune {
            rules.holds.protections = protections::read(target.state()).await.map_err(state_error)?;
        }
        let (target_name, offline) = (target.name().to_owned(), false);
        let observed = Observed::default();
        let mut input = PlanInput {
            loaded,
            observed,
            rules,
            now,
            target: target_name,
            paths: shown_source,
            offline,
            pin,
            computed_revision: OnceLock::new(),
        };
        let (observed_cache, known) = (ObservedCache::default(), SearchCache::default());
        let mut facts = FactSources { observed_cache, search, known, limits };
        let mut plan = input.observe_and_plan(target, &mut facts).await?;
        if let Some(source) = source.filter(|_| plan.orphans > 0) {
            // Processes of another source are no orphans: the note does not name them.
            let elsewhere = read_elsewhere(target, &input.rules.owner, &source, &facts.limits).await?;
            input.rules.orphans.declared_elsewhere = elsewhere.instances;
            if !input.rules.orphans.declared_elsewhere.is_empty() {
                plan = input.plan();
                plan.notes.extend(input.pin.as_ref().map(pin_note));
            }
        }
        info!(rows = input.observed.instances.len(), took = ?begin.elapsed(), "observed");
        Ok((input, plan, facts))
    }
}

/// The instances that other sources of the owner declare.
async fn read_elsewhere<T: Target>(
    target: &T,
    owner: &str,
    source: &str,
    limits: &Limits,
) -> Result<DeclaredElsewhere, TargetError> {
    let reading = async {
        let (stored, are_all_read) = stored_revisions::list_readable(target.state(), owner).await?;
        declared_elsewhere(target.state(), owner, source, (&stored, are_all_read), limits).await
    };
    reading.await.map_err(|error| TargetError::state(target.name(), error))
}

/// The inputs of a plan.
pub struct PlanInput {
    pub loaded: Loaded,
    pub observed: Observed,
    pub rules: Rules,
    pub now: Now,
    pub target: String,
    /// As written on the command line.
    pub paths: String,
    /// The observed state comes from a file, not from a target.
    pub offline: bool,
    /// The pin in force, unless the plan is for a pinned revision.
    pub pin: Option<Pin>,
    /// The revision of the manifests, once it was computed.
    pub computed_revision: OnceLock<ManifestRevision>,
}

/// Sources of a plan's facts: the last observation with its later changes, the search of old specs with its results, and
/// the limits of the manifests.
pub struct FactSources<S> {
    observed_cache: ObservedCache,
    search: S,
    known: SearchCache,
    pub(super) limits: Limits,
}

impl PlanInput {
    /// Plans with the observed state as it is.
    pub fn plan(&self) -> Plan {
        let begin = Instant::now();
        let plan = reconcile(&self.loaded.desired, &self.observed, &self.rules, &self.now);
        log_planned(&plan, begin);
        plan
    }

    /// Observes the target, and plans until no plan needs more facts. Where the target streams its changes, a later
    /// observation fetches only those. After an error the observed state is empty.
    async fn observe_and_plan<T: Target, S: SpecSearch>(
        &mut self,
        target: &T,
        facts: &mut FactSources<S>,
    ) -> Result<Plan, ApplyError> {
        let desired = &self.loaded.desired;
        let FactSources { observed_cache, search, known, .. } = facts;
        observed_cache.put_back(Arc::new(std::mem::take(&mut self.observed)));
        let (prune, in_flight) = (self.rules.prune, BTreeSet::new());
        let mut observation = observed_cache.observe(target, desired, prune, &in_flight).await?;
        let begin = Instant::now();
        self.rules.orphans.known_namespaces = observation.namespaces(&self.rules.owner);
        let inputs = StablePlanInputs { desired, rules: &self.rules, now: &self.now };
        let mut plan = observation.plan_until_stable(&inputs, target.backend(), search, known).await;
        plan.notes.extend(self.pin.as_ref().map(pin_note));
        observed_cache.set_listed(observation.listed());
        self.observed = observation.observed;
        log_planned(&plan, begin);
        Ok(plan)
    }

    /// Like the first plan, with the current time and observed state.
    pub(super) async fn plan_again<T: Target, S: SpecSearch>(
        &mut self,
        target: &T,
        facts: &mut FactSources<S>,
    ) -> Result<Plan, ApplyError> {
        self.now = clock::with_zones(&self.loaded.desired);
        self.observe_and_plan(target, facts).await
    }

    /// Reads the current holds and pauses.
    pub(super) async fn refresh_holds<T: Target>(&mut self, target: &T) -> Result<(), ApplyError> {
        (self.rules.holds.manual, self.rules.holds.pauses) = target.active_holds().await?;
        let decided = rollout_records::read(target.state(), &self.rules.owner).await;
        let decided = decided.map_err(|error| TargetError::state(target.name(), error))?;
        self.rules.rollouts = rollout_records::progress(&decided);
        if self.rules.prune {
            let read = protections::read(target.state()).await;
            self.rules.holds.protections = read.map_err(|error| TargetError::state(target.name(), error))?;
        }
        Ok(())
    }

    /// Sets the location of each reason to that of its field, not of its process.
    pub fn locate(&self, plan: &mut Plan, limits: &Limits) {
        provenance::locate(plan, &self.loaded, limits);
    }

    /// The target of the plan as text.
    pub fn heading(&self) -> String {
        match self.offline {
            true => format!("offline plan for {}", self.rules.caps.name()),
            false => format!("target {}", self.target),
        }
    }

    /// The revision of the manifests.
    pub fn revision(&self) -> &ManifestRevision {
        self.computed_revision.get_or_init(|| ManifestRevision::of(&self.loaded.desired))
    }

    pub fn digests(&self, plan: &Plan) -> PlanDigests {
        PlanDigests::of(self.revision().clone(), &self.observed, &self.rules, &self.target, plan)
    }
}

/// A plan of manifests does not show what a pinned revision asks for.
fn pin_note(pin: &Pin) -> String {
    let Pin { revision, since, by, .. } = pin;
    let why = pin.reason.as_deref().map(|why| format!(" ({why})")).unwrap_or_default();
    format!(
        "revision {} is pinned since {since} by {by}{why}: `watch` keeps it, and an apply of these manifests ends the pin",
        revision.short()
    )
}

fn log_planned(plan: &Plan, begin: Instant) {
    info!(steps = plan.steps().count(), held = plan.held.len(), took = ?begin.elapsed(), "planned");
}

/// Digests of a plan's inputs.
#[derive(Clone, Debug, Default)]
pub struct PlanDigests {
    /// Revision of the manifests.
    pub wanted: ManifestRevision,
    /// Fingerprint: all inputs.
    pub all: String,
    /// Plan id: fingerprint and steps.
    pub id: String,
}

impl PlanDigests {
    pub fn of(
        wanted: ManifestRevision,
        observed: &Observed,
        rules: &Rules,
        target: &str,
        plan: &Plan,
    ) -> PlanDigests {
        let all = fingerprint(&wanted, observed, rules, target, plan);
        let id = blake3::hash(format!("{all}\n{}", step_lines(plan).join("\n")).as_bytes());
        PlanDigests { wanted, all, id: id.to_hex()[..16].to_owned() }
    }
}

/// The steps of a plan as `INSTANCE OPERATION SPEC`, to compare two plans.
pub fn step_lines(plan: &Plan) -> Vec<String> {
    plan.steps().map(|step| format!("{} {} {}", step.instance, step.op, step.spec_side.word())).collect()
}
