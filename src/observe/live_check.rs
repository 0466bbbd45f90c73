//! Live status checks of the instances that a plan would harm or create.

use tracing::warn;

use super::observation::Observation;
use crate::backend::{Backend, InstanceQuery};
use crate::execute::ledger;
use crate::model::{Observed, ObservedInstance, Op, Plan};
use crate::reconcile::Caps;
use crate::reconcile::spec_recovery::fill_in;

impl Observation {
    /// Runs a live status check of every instance that a step of the plan may harm or create. Returns whether there
    /// are new facts: then the caller plans again.
    ///
    /// A failed check before the first start of an absent instance changes nothing: the target refuses the start
    /// (828) if a process runs. Any other instance whose check failed is unknown, and held by the next plan.
    pub async fn check_live<B: Backend>(&mut self, backend: &B, caps: &Caps, plan: &Plan) -> bool {
        let (mut guarded, mut created): (Vec<InstanceQuery>, Vec<InstanceQuery>) = (Vec::new(), Vec::new());
        for step in plan.steps().filter(|step| step.needs_live_check) {
            // Where a list is live, only instances that it does not show need a check.
            let is_listed = self.observed.instances.contains_key(&step.instance);
            if (caps.lag_secs == 0 && is_listed) || !self.checked_live.insert(step.instance.clone()) {
                continue;
            }
            let row = self.observed.instances.get(&step.instance);
            let known = row.and_then(|row| row.specs.live.spec().or(row.specs.registered.spec())).cloned();
            let recorded = self.ledger.entries.get(&step.instance).and_then(ledger::Entry::spec);
            let subject = InstanceQuery {
                instance: step.instance.clone(),
                host: step.host.clone(),
                spec: known.or(recorded).or_else(|| step.spec.clone()),
            };
            // Of the operations that create, only a first start is refused if a process runs: operation 3 adopts it.
            match !is_listed && step.op == Op::Start && step.from.is_none() {
                true => created.push(subject),
                false => guarded.push(subject),
            }
        }
        if guarded.is_empty() && created.is_empty() {
            return false;
        }
        let check = async |subjects: &[InstanceQuery]| match subjects.is_empty() {
            true => Ok(Observed::default()),
            false => backend.check_live(subjects).await,
        };
        let (of_guarded, of_created) = tokio::join!(check(&guarded), check(&created));
        let mut has_new_facts = !guarded.is_empty();
        match of_created {
            Ok(mut closer) => {
                has_new_facts |= !created.is_empty();
                // A process of the agent that a live list does not show was started since: the plan under the lease sees it.
                let is_newer = |seen: &ObservedInstance| {
                    caps.lag_secs == 0 && seen.running == Some(true) && !seen.process.not_owned
                };
                closer.instances.retain(|_, seen| !seen.unknown && !is_newer(seen));
                self.merge_checked(closer);
            }
            Err(fault) => {
                warn!(%fault, instances = created.len(), "live status check before a first start failed");
            }
        }
        match of_guarded {
            Ok(mut closer) => {
                closer
                    .instances
                    .retain(|key, seen| !seen.unknown || self.observed.instances.contains_key(key));
                self.merge_checked(closer);
            }
            Err(fault) => {
                warn!(%fault, instances = guarded.len(), "live status check failed; these instances are held");
                for InstanceQuery { instance, .. } in guarded {
                    let row = self.observed.instances.get(&instance).cloned();
                    self.observed.instances.entry(instance.clone()).or_default().unknown = true;
                    self.listed.entry(instance).or_insert(row);
                }
            }
        }
        if !caps.reads_specs {
            self.ledger.fill_unknown(&mut self.observed, caps, &self.others);
        }
        fill_in(&mut self.observed, &self.old);
        has_new_facts
    }

    /// Merges the facts of a live check. The next plan starts from the rows of the target, and checks again.
    fn merge_checked(&mut self, checked: Observed) {
        for key in checked.instances.keys() {
            let row = self.observed.instances.get(key).cloned();
            self.listed.entry(key.clone()).or_insert(row);
        }
        self.observed.merge_live_check(checked);
    }
}
