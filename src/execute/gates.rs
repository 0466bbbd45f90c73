//! Between two waves: what was changed must be well, and stay so for as long as its rollout says.
//!
//! Where a target does not report health, well is what runs, and runs as the same process at two looks as far apart as the
//! check after a start or the soak, whichever is longer.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use super::run::Run;
use super::{Outcome, Told, in_time};
use crate::backend::{Backend, Scope, Subject};
use crate::model::{Gate, Health, InstanceKey, Monitor, Observed, Op, Step, Wave};
use crate::store::Store;

/// How long what was started may take to be well, before what depends on it begins.
const WELL: Duration = Duration::from_secs(30);

type Changed<'w> = BTreeMap<&'w InstanceKey, &'w Step>;

impl<B: Backend, S: Store> Run<'_, B, S> {
    pub(super) async fn gates(&mut self, wave: &Wave) {
        let changed: Changed<'_> = wave
            .steps
            .iter()
            .filter(|step| {
                matches!(step.op, Op::Start | Op::Restart | Op::Reload)
                    && !self.failed.contains(&step.instance)
            })
            .map(|step| (&step.instance, step))
            .collect();
        if !changed.is_empty() {
            self.wait_until_well(&changed).await;
        }
        for gate in &wave.gates {
            let is_of_it = |key: &InstanceKey| self.terms.declared.get(key) == Some(&gate.process);
            let of_it: Changed<'_> =
                changed.iter().filter(|(key, _)| is_of_it(key)).map(|(key, step)| (*key, *step)).collect();
            if gate.soak_secs > 0 && !of_it.is_empty() && !self.is_over() {
                self.soak(gate, &of_it).await;
            }
            if self.failures.get(&gate.process).is_some_and(|failures| *failures > gate.max_failures) {
                self.given_up.insert(gate.process.clone());
                if gate.auto_rollback {
                    self.to_roll_back.insert(gate.process.clone());
                }
            }
        }
    }

    async fn soak(&mut self, gate: &Gate, of_it: &Changed<'_>) {
        (self.told)(Told::Soaking { process: &gate.process, secs: gate.soak_secs });
        let first = self.look_at(of_it).await;
        self.rest(Duration::from_secs(gate.soak_secs)).await;
        self.count_ill(of_it, first.as_ref()).await;
    }

    /// Waits, unless somebody wants it to end.
    async fn rest(&self, how_long: Duration) {
        let mut stop = self.terms.stop.clone();
        let left = self.terms.deadline.saturating_duration_since(Instant::now());
        tokio::select! {
            () = tokio::time::sleep(how_long.min(left)) => {}
            _ = async { let _ = stop.wait_for(|stop| *stop).await; } => {}
        }
    }

    async fn look_at(&self, changed: &Changed<'_>) -> Option<Observed> {
        let subjects: Vec<Subject> = changed.values().map(|step| self.subject(step)).collect();
        let deadline = self.terms.deadline;
        match self.terms.caps.reads_health {
            true => in_time(deadline, self.backend.observe(&Scope::of(subjects))).await.ok(),
            false => in_time(deadline, self.backend.look_closely(&subjects)).await.ok(),
        }
    }

    async fn wait_until_well(&mut self, changed: &Changed<'_>) {
        if !self.terms.caps.reads_health {
            let first = self.look_at(changed).await;
            let secs = changed.values().map(|step| {
                let monitor = step.spec.as_ref().map(|spec| spec.monitor.start_check_secs);
                monitor.flatten().unwrap_or(Monitor::START_CHECK_SECS)
            });
            self.rest(Duration::from_secs(secs.max().unwrap_or(0).into())).await;
            return self.count_ill(changed, first.as_ref()).await;
        }
        let until = Instant::now() + WELL;
        while Instant::now() < until && !self.is_over() {
            let Some(observed) = self.look_at(changed).await else { return };
            let starting = |key: &&InstanceKey| {
                observed.instances.get(*key).is_some_and(|seen| seen.health == Health::Starting)
            };
            if !changed.keys().any(starting) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        self.count_ill(changed, None).await;
    }

    /// What ended well, and is not well any more, has failed after all.
    async fn count_ill(&mut self, changed: &Changed<'_>, first: Option<&Observed>) {
        let Some(observed) = self.look_at(changed).await else { return };
        let mut ill: BTreeSet<&InstanceKey> = BTreeSet::new();
        for (key, step) in changed {
            let seen = observed.instances.get(*key);
            let resident = step.spec.as_ref().is_some_and(|spec| spec.monitor.is_resident());
            let is_ill = match self.terms.caps.reads_health {
                true => seen.is_some_and(|seen| matches!(seen.health, Health::Degraded | Health::Failed)),
                false => {
                    let then = first.and_then(|first| first.instances.get(*key)).and_then(|seen| seen.pid);
                    let now = seen.and_then(|seen| seen.pid);
                    resident && (now.is_none() || (then.is_some() && then != now))
                }
            };
            if is_ill {
                ill.insert(key);
            }
        }
        for key in ill {
            if !self.failed.insert(key.clone()) {
                continue;
            }
            let declared = self.terms.declared.get(key).cloned();
            *self.failures.entry(declared.unwrap_or_else(|| key.process())).or_default() += 1;
            if let Some(ended) = self.ended.iter_mut().rev().find(|ended| ended.instance == *key) {
                (ended.outcome, ended.message) = (Outcome::Failed, "it is not well afterwards".to_owned());
            }
        }
    }
}
