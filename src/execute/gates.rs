//! Health gates between waves: changed instances must be healthy, and stay healthy for the soak of their rollout.
//!
//! On a target without health reports, an instance is healthy if it runs as the same process in two observations.
//! These are as far apart as the start check or the soak, whichever is longer. An instance that cannot be observed is
//! not healthy. A rollout that was interrupted during its soak finishes the soak before it continues.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;
use tracing::info;

use super::run::Run;
use super::{ExecutionEvent, StepOutcome, in_time};
use crate::backend::{Backend, InstanceQuery, Scope};
use crate::clock;
use crate::model::{Gate, Health, Host, InstanceKey, Monitor, Observed, Op, Wave};
use crate::store::Store;

/// How long a changed instance may take to become healthy before the next wave starts.
const HEALTHY_TIMEOUT: Duration = Duration::from_secs(30);
/// Delay before a failed observation is repeated.
const OBSERVE_RETRY_INTERVAL: Duration = Duration::from_millis(500);

type Changed = BTreeMap<InstanceKey, InstanceQuery>;

impl<B: Backend, S: Store> Run<'_, B, S> {
    /// Before a wave: rollouts that start in it wait for the rest of the soak of an earlier run.
    pub(super) async fn resume_soak(&mut self, waves: &[Wave], wave: &Wave) {
        let in_wave: BTreeSet<_> = wave
            .steps
            .iter()
            .filter_map(|step| self.terms.dependencies.declared.get(&step.instance))
            .collect();
        let gates = waves.iter().flat_map(|wave| &wave.gates);
        for gate in gates.filter(|gate| gate.soak_secs > 0 && in_wave.contains(&gate.process)) {
            if !self.rollouts.soaked.insert(gate.process.clone()) {
                continue;
            }
            let (recent, left) = self.recently_changed(gate, waves);
            if !recent.is_empty() && !self.is_over() {
                self.soak(gate, &recent, left).await;
                self.count_failures(gate);
            }
        }
    }

    /// Instances of a process that run for less than its soak and that this plan does not change; and the rest of the
    /// soak.
    fn recently_changed(&self, gate: &Gate, waves: &[Wave]) -> (Changed, Duration) {
        let steps = waves.iter().flat_map(|wave| &wave.steps);
        let touched: BTreeSet<&InstanceKey> = steps.map(|step| &step.instance).collect();
        let (now, soak) = (clock::now(), Duration::from_secs(gate.soak_secs));
        let (mut recent, mut longest) = (Changed::new(), Duration::ZERO);
        for (key, seen) in &self.terms.before {
            let is_of_it = self.terms.dependencies.declared.get(key) == Some(&gate.process);
            let (true, false, Some(true), Some(since)) =
                (is_of_it, touched.contains(key), seen.running, seen.since)
            else {
                continue;
            };
            let age = Duration::from_millis(u64::try_from(now.0.saturating_sub(since.0)).unwrap_or(0));
            let left = soak.saturating_sub(age);
            if left.is_zero() {
                continue;
            }
            longest = longest.max(left);
            let host = Host { key: key.host.clone(), supplier: None, agent_id: None };
            let spec = seen.registered_spec.spec().cloned();
            recent.insert(key.clone(), InstanceQuery { instance: key.clone(), host, spec });
        }
        (recent, longest)
    }

    pub(super) async fn gates(&mut self, wave: &Wave) {
        let changed: Changed = wave
            .steps
            .iter()
            .filter(|step| {
                matches!(step.op, Op::Start | Op::Restart | Op::Reload)
                    && !self.outcomes.failed.contains(&step.instance)
            })
            .map(|step| (step.instance.clone(), self.subject(step)))
            .collect();
        if !changed.is_empty() {
            self.wait_until_healthy(&changed).await;
        }
        for gate in &wave.gates {
            let is_of_it =
                |key: &InstanceKey| self.terms.dependencies.declared.get(key) == Some(&gate.process);
            let of_it = changed.iter().filter(|(key, _)| is_of_it(key));
            let of_it: Changed = of_it.map(|(key, subject)| (key.clone(), subject.clone())).collect();
            if gate.soak_secs > 0 && !of_it.is_empty() && !self.is_over() {
                self.soak(gate, &of_it, Duration::from_secs(gate.soak_secs)).await;
            }
            self.count_failures(gate);
        }
    }

    fn count_failures(&mut self, gate: &Gate) {
        if self.outcomes.failures.get(&gate.process).is_some_and(|failures| *failures > gate.max_failures) {
            self.rollouts.given_up.insert(gate.process.clone());
            if gate.auto_rollback {
                self.rollouts.to_roll_back.insert(gate.process.clone());
            }
        }
    }

    async fn soak(&mut self, gate: &Gate, of_it: &Changed, how_long: Duration) {
        let secs = u64::try_from(how_long.as_millis().div_ceil(1000)).unwrap_or(gate.soak_secs);
        (self.on_event)(ExecutionEvent::Soaking { process: &gate.process, secs });
        let first = self.observe_changed(of_it).await;
        self.wait(how_long).await;
        self.count_unhealthy(of_it, first.as_ref()).await;
    }

    /// Waits, until execution is stopped at the latest.
    async fn wait(&self, how_long: Duration) {
        let mut stop = self.terms.settings.stop.clone();
        let left = self.terms.settings.deadline.saturating_duration_since(Instant::now());
        tokio::select! {
            () = tokio::time::sleep(how_long.min(left)) => {}
            _ = async { let _ = stop.wait_for(|stop| *stop).await; } => {}
        }
    }

    /// Observes until it succeeds; `None`: no observation succeeded before the deadline.
    async fn observe_changed(&self, changed: &Changed) -> Option<Observed> {
        let subjects: Vec<InstanceQuery> = changed.values().cloned().collect();
        let deadline = self.terms.settings.deadline;
        loop {
            let observed = match self.terms.settings.caps.reads_health {
                true => in_time(deadline, self.backend.observe(&Scope::of(subjects.clone()))).await,
                false => in_time(deadline, self.backend.observe_live(&subjects)).await,
            };
            match observed {
                Ok(observed) => return Some(observed),
                Err(fault) => info!(%fault, "observation failed; retrying"),
            }
            if self.is_over() {
                return None;
            }
            self.wait(OBSERVE_RETRY_INTERVAL).await;
        }
    }

    async fn wait_until_healthy(&mut self, changed: &Changed) {
        if !self.terms.settings.caps.reads_health {
            let first = self.observe_changed(changed).await;
            let secs = changed.values().map(|subject| {
                let monitor = subject.spec.as_ref().map(|spec| spec.monitor.start_check_secs);
                monitor.flatten().unwrap_or(Monitor::START_CHECK_SECS)
            });
            self.wait(Duration::from_secs(secs.max().unwrap_or(0).into())).await;
            return self.count_unhealthy(changed, first.as_ref()).await;
        }
        let until = Instant::now() + HEALTHY_TIMEOUT;
        while Instant::now() < until && !self.is_over() {
            let Some(observed) = self.observe_changed(changed).await else { break };
            // A disconnected agent may reconnect.
            let is_open = |key: &InstanceKey| {
                let seen = observed.instances.get(key);
                observed.gaps.contains_key(&key.host)
                    || seen.is_some_and(|seen| seen.health == Health::Starting)
            };
            if !changed.keys().any(is_open) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        self.count_unhealthy(changed, None).await;
    }

    /// Marks instances as failed whose steps succeeded and that are unhealthy now.
    async fn count_unhealthy(&mut self, changed: &Changed, first: Option<&Observed>) {
        let Some(observed) = self.observe_changed(changed).await else {
            // An interruption is not a failure.
            if !*self.terms.settings.stop.borrow() {
                changed.keys().for_each(|key| {
                    self.record_unhealthy(key, "health could not be observed after the change")
                });
            }
            return;
        };
        for (key, subject) in changed {
            let seen = observed.instances.get(key);
            let resident = subject.spec.as_ref().is_some_and(|spec| spec.monitor.is_resident());
            let is_unhealthy = match self.terms.settings.caps.reads_health {
                true => seen.is_some_and(|seen| matches!(seen.health, Health::Degraded | Health::Failed)),
                false => {
                    let then = first.and_then(|first| first.instances.get(key)).and_then(|seen| seen.pid);
                    let now = seen.and_then(|seen| seen.pid);
                    resident && (now.is_none() || (then.is_some() && then != now))
                }
            };
            if observed.gaps.contains_key(&key.host) {
                self.record_unhealthy(key, "host could not be observed after the change");
            } else if is_unhealthy {
                self.record_unhealthy(key, "instance is unhealthy after the change");
            }
        }
    }

    fn record_unhealthy(&mut self, key: &InstanceKey, why: &str) {
        if !self.outcomes.failed.insert(key.clone()) {
            return;
        }
        let declared = self.terms.dependencies.declared.get(key).cloned();
        *self.outcomes.failures.entry(declared.unwrap_or_else(|| key.process())).or_default() += 1;
        if let Some(ended) = self.outcomes.ended.iter_mut().rev().find(|ended| ended.instance == *key) {
            (ended.outcome, ended.message) = (StepOutcome::Failed, why.to_owned());
        }
    }
}
