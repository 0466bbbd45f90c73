//! Gates between waves: changed instances become ready, and those of a rollout stay healthy for its soak.
//!
//! A one-shot process is ready when its run has ended with success, a resident process when it is healthy
//! ([`readiness`]). A soak begins when its instances are healthy. An instance that cannot be observed is not ready. A
//! rollout that was interrupted during its soak finishes the soak before it continues.
//!
//! On a target without health reports, a resident process is healthy if it runs as the same process in two
//! observations. These are as far apart as the start check or the soak, whichever is longer.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;
use tracing::info;

use super::readiness::{Readiness, ReadinessWait, readiness};
use super::run::Run;
use super::{Dependencies, ExecutionEvent, StepOutcome, StepResult, in_time};
use crate::backend::{Backend, InstanceQuery, Scope};
use crate::clock;
use crate::model::{Gate, Host, InstanceKey, Observed, Op, ProcessKey, Wave};
use crate::store::Store;

/// Delay before a failed observation is repeated.
const OBSERVE_RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Interval between two observations of instances that are not ready yet.
const READY_INTERVAL: Duration = Duration::from_millis(200);

type ChangedInstances = BTreeMap<InstanceKey, InstanceQuery>;

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
    fn recently_changed(&self, gate: &Gate, waves: &[Wave]) -> (ChangedInstances, Duration) {
        let steps = waves.iter().flat_map(|wave| &wave.steps);
        let touched: BTreeSet<&InstanceKey> = steps.map(|step| &step.instance).collect();
        let (now, soak) = (clock::now(), Duration::from_secs(gate.soak_secs));
        let (mut recent, mut longest) = (ChangedInstances::new(), Duration::ZERO);
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
            let spec = seen.specs.registered.spec().cloned();
            recent.insert(key.clone(), InstanceQuery { instance: key.clone(), host, spec });
        }
        (recent, longest)
    }

    /// After a wave: waits for the changed instances that a later wave or a gate needs.
    pub(super) async fn gates(&mut self, wave: &Wave, later: &[Wave]) {
        let needed = self.needed_later(later);
        let gated = |process: &ProcessKey| wave.gates.iter().any(|gate| gate.process == *process);
        let changed: ChangedInstances = wave
            .steps
            .iter()
            .filter(|step| {
                let declared = self.terms.dependencies.declared.get(&step.instance);
                let is_needed = needed.contains(&step.instance.process())
                    || declared.is_some_and(|name| needed.contains(name) || gated(name));
                matches!(step.op, Op::Start | Op::Restart | Op::Reload)
                    && is_needed
                    && !self.outcomes.failed.contains(&step.instance)
            })
            .map(|step| (step.instance.clone(), self.subject(step)))
            .collect();
        if !changed.is_empty() {
            self.wait_until_ready(changed.clone()).await;
        }
        for gate in &wave.gates {
            let is_of_it = |key: &InstanceKey| {
                self.terms.dependencies.declared.get(key) == Some(&gate.process)
                    && !self.outcomes.failed.contains(key)
            };
            let of_it = changed.iter().filter(|(key, _)| is_of_it(key));
            let of_it: ChangedInstances =
                of_it.map(|(key, subject)| (key.clone(), subject.clone())).collect();
            let is_aborted = of_it.keys().any(|key| self.terms.aborted(key).is_some());
            if gate.soak_secs > 0 && !of_it.is_empty() && !is_aborted && !self.is_over() {
                self.soak(gate, &of_it, Duration::from_secs(gate.soak_secs)).await;
            }
            self.count_failures(gate);
        }
    }

    /// The names that the starts of later waves depend on.
    fn needed_later(&self, later: &[Wave]) -> BTreeSet<ProcessKey> {
        let Dependencies { declared, depends, .. } = &self.terms.dependencies;
        let steps = later.iter().flat_map(|wave| &wave.steps);
        let names = steps.filter_map(|step| declared.get(&step.instance));
        let names: BTreeSet<&ProcessKey> = names.collect();
        names.into_iter().filter_map(|name| depends.get(name)).flatten().cloned().collect()
    }

    fn count_failures(&mut self, gate: &Gate) {
        if self.outcomes.failures.get(&gate.process).is_some_and(|failures| *failures > gate.max_failures) {
            self.rollouts.given_up.insert(gate.process.clone());
            if gate.auto_rollback && !self.rollouts.to_roll_back.contains_key(&gate.process) {
                let why = self.first_failure(&gate.process);
                self.rollouts.to_roll_back.insert(gate.process.clone(), why);
            }
        }
    }

    /// The first failed instance of a process, with its message.
    fn first_failure(&self, process: &ProcessKey) -> String {
        let is_failure = |one: &&StepResult| {
            !one.outcome.is_well()
                && one.outcome != StepOutcome::Skipped
                && self.terms.dependencies.declared.get(&one.instance) == Some(process)
        };
        let first = self.outcomes.ended.iter().find(is_failure);
        first.map_or_else(String::new, |one| format!("{}: {}", one.instance, one.message))
    }

    async fn soak(&mut self, gate: &Gate, of_it: &ChangedInstances, how_long: Duration) {
        let secs = u64::try_from(how_long.as_millis().div_ceil(1000)).unwrap_or(gate.soak_secs);
        (self.on_event)(ExecutionEvent::Soaking { process: &gate.process, secs });
        let first = self.observe_changed(of_it).await;
        tokio::select! {
            () = self.wait(how_long) => {}
            () = self.aborted(&gate.process) => {}
        }
        self.count_unhealthy(of_it, first.as_ref()).await;
    }

    /// Waits until the rollout of a process is aborted.
    async fn aborted(&self, process: &ProcessKey) {
        let mut active_holds = self.terms.settings.active_holds.clone();
        let aborted = active_holds.wait_for(|held| held.is_aborted(process)).await.is_ok();
        if !aborted || self.terms.is_rollback {
            std::future::pending().await
        }
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
    async fn observe_changed(&self, changed: &ChangedInstances) -> Option<Observed> {
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

    /// Removes instances whose rollout was aborted. Processes that depend on them are skipped.
    fn remove_aborted(&mut self, open: &mut ChangedInstances) {
        open.retain(|key, _| {
            let is_aborted = self.terms.aborted(key).is_some();
            if is_aborted {
                self.terms.dependencies.name_instance(key, &mut self.outcomes.not_started);
            }
            !is_aborted
        });
    }

    /// Waits until each of these is ready, has failed, or has used up its time, or its rollout is aborted. After an
    /// interruption or the deadline, later steps are skipped anyway.
    async fn wait_until_ready(&mut self, mut open: ChangedInstances) {
        let reads_health = self.terms.settings.caps.reads_health;
        let begun = Instant::now();
        let mut first: Option<Observed> = None;
        while !self.is_over() {
            self.remove_aborted(&mut open);
            if open.is_empty() {
                return;
            }
            let Some(observed) = self.observe_changed(&open).await else { break };
            let first = first.get_or_insert_with(|| observed.clone());
            let longest = open.keys().next().cloned();
            let mut failed = Vec::new();
            open.retain(|key, subject| {
                let waited = ReadinessWait { time: begun.elapsed(), first: first.instances.get(key) };
                match readiness(
                    subject.spec.as_deref().map(|spec| &**spec),
                    key,
                    &observed,
                    waited,
                    reads_health,
                ) {
                    Readiness::Ready => false,
                    Readiness::Pending => true,
                    Readiness::Failed(why) => {
                        failed.push((key.clone(), why));
                        false
                    }
                }
            });
            self.record_unhealthy(failed).await;
            if open.is_empty() {
                return;
            }
            (self.on_event)(ExecutionEvent::Waiting { left: open.len(), longest: longest.as_ref() });
            self.wait(if reads_health { READY_INTERVAL } else { self.backend.poll_interval().1 }).await;
        }
    }

    /// Marks instances as failed that did not stay healthy during the soak.
    async fn count_unhealthy(&mut self, changed: &ChangedInstances, first: Option<&Observed>) {
        let Some(observed) = self.observe_changed(changed).await else {
            // An interruption is not a failure.
            if !*self.terms.settings.stop.borrow() {
                let why = "health could not be observed after the change";
                self.record_unhealthy(changed.keys().map(|key| (key.clone(), why.to_owned())).collect())
                    .await;
            }
            return;
        };
        let reads_health = self.terms.settings.caps.reads_health;
        let mut failed = Vec::new();
        for (key, subject) in changed {
            let first = first.and_then(|first| first.instances.get(key));
            let waited = ReadinessWait { time: Duration::MAX, first };
            match readiness(subject.spec.as_deref().map(|spec| &**spec), key, &observed, waited, reads_health)
            {
                Readiness::Ready | Readiness::Pending => {}
                Readiness::Failed(why) => failed.push((key.clone(), why)),
            }
        }
        self.record_unhealthy(failed).await;
    }

    /// Marks instances as failed, each with a reason and the output of its probe or command.
    async fn record_unhealthy(&mut self, mut failed: Vec<(InstanceKey, String)>) {
        failed.retain(|(key, _)| self.count_failed(key));
        if failed.is_empty() {
            return;
        }
        let keys: Vec<InstanceKey> = failed.iter().map(|(key, _)| key.clone()).collect();
        let deadline = self.terms.settings.deadline;
        let messages = in_time(deadline, self.backend.messages(&keys)).await.unwrap_or_default();
        for (key, why) in failed {
            let message = match messages.get(&key) {
                Some(message) => format!("{why}: {message}"),
                None => why,
            };
            if let Some(ended) = self.outcomes.ended.iter_mut().rev().find(|ended| ended.instance == key) {
                (ended.outcome, ended.message) = (StepOutcome::Failed, message);
            }
        }
    }
}
