//! Stable plan: planning and live checks alternate until no fact is missing.

use super::observation::Observation;
use super::old_specs::{SearchCache, SpecSearch};
use crate::backend::Backend;
use crate::model::{Desired, Now, Plan};
use crate::reconcile::spec_recovery::missing;
use crate::reconcile::{Rules, reconcile};

/// The inputs of a plan other than the observed state.
pub struct StablePlanInputs<'a> {
    pub desired: &'a Desired,
    pub rules: &'a Rules,
    pub now: &'a Now,
}

impl StablePlanInputs<'_> {
    fn plan(&self, observation: &Observation) -> Plan {
        reconcile(self.desired, &observation.observed, self.rules, self.now)
    }
}

impl Observation {
    /// The plan for this observation, after the old specs that it lacks are searched for and the instances that it
    /// would harm or create are checked live. `self` has the recovered specs and the checked facts afterwards.
    pub async fn plan_until_stable<B: Backend, S: SpecSearch>(
        &mut self,
        inputs: &StablePlanInputs<'_>,
        backend: &B,
        search: &S,
        known: &mut SearchCache,
    ) -> Plan {
        let caps = &inputs.rules.caps;
        let mut plan = inputs.plan(self);
        let missing = missing(&plan, inputs.desired, &self.observed, caps);
        if !missing.is_empty() {
            self.add_recovered_specs(known.lookup(search, missing, caps).await);
            plan = inputs.plan(self);
        }
        while self.check_live(backend, caps, &plan).await {
            plan = inputs.plan(self);
        }
        plan
    }
}
