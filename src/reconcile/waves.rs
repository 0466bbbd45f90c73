//! Waves: the execution order of chains.
//!
//! A chain waits only for its dependencies, for the previous batch of its rollout, or for a process on its host that
//! gives up the identity that it claims. Each chain gets the first wave after everything that it waits for.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use super::assess::TargetSpec;
use super::batches::{Batch, batches};
use super::chain::{Chain, PlanDraft, StepDraft, has};
use super::dependencies::DependencyIndex;
use super::identities::{IdentityIndex, claims_identity};
use super::rules::Rules;
use crate::model::{
    AutoType, Desired, DesiredInstance, Gate, Health, HoldReason, Host, InstanceKey, LastRun, Observed, Op,
    Presence, ProcessKey, State, Step, Wave,
};

/// Assigns chains to waves. Chains whose dependencies will not become ready are held.
pub fn build_waves<'a>(
    found: &mut PlanDraft<'a>,
    desired: &'a Desired,
    observed: &'a Observed,
    rules: &'a Rules,
) -> Vec<Wave> {
    let chains = std::mem::take(&mut found.chains);
    let mut builder = WaveBuilder::new(desired, observed, rules, &chains, found);
    let mut waiting = builder.schedule_stops(&chains);
    builder.schedule_all_starts(&chains, &mut waiting);
    let WaveBuilder { levels, starts, gates, .. } = builder;
    let mut waves: BTreeMap<usize, Wave> = BTreeMap::new();
    for (at, chain) in chains.into_iter().enumerate() {
        if let Some(detail) = waiting.get(&at) {
            found.held.push(chain.held(HoldReason::WaitingForDependency, detail.clone()));
            continue;
        }
        let (own, starts) = (levels[at] + waves_of(&chain) - 1, starts[at]);
        let Chain { key, want, from, before, mut steps } = chain;
        let before = before.into_iter().map(|draft| step(from.unwrap_or(key), want, None, draft));
        waves.entry(levels[at]).or_default().steps.extend(before);
        // The steps from the claim of an identity on wait until that identity is free.
        let begins = steps.iter().position(|draft| claims_identity(want, draft.op)).unwrap_or(steps.len());
        let later = if starts > own { steps.split_off(begins) } else { Vec::new() };
        for (level, steps) in [(own, steps), (starts, later)] {
            let steps = steps.into_iter().map(|draft| step(key, want, from, draft));
            waves.entry(level).or_default().steps.extend(steps);
        }
    }
    for (level, gate) in gates {
        if let Some(wave) = waves.get_mut(&level) {
            wave.gates.push(gate);
        }
    }
    let mut waves: Vec<Wave> = waves.into_values().filter(|wave| !wave.steps.is_empty()).collect();
    let steps = waves.iter_mut().flat_map(|wave| &mut wave.steps);
    steps.enumerate().for_each(|(nth, step)| step.id = nth + 1);
    waves
}

fn step(
    key: &InstanceKey,
    want: Option<&DesiredInstance>,
    from: Option<&InstanceKey>,
    draft: StepDraft,
) -> Step {
    let host = match want {
        Some(want) => want.host.clone(),
        None => Host { key: key.host.clone(), supplier: None, agent_id: None },
    };
    let StepDraft { op, spec_side, spec, revision, reloaded_fields, needs_live_check, why } = draft;
    let (instance, from, pid_stays) = (key.clone(), from.cloned(), op.pid_stays());
    Step {
        id: 0,
        instance,
        host,
        op,
        spec_side,
        spec,
        revision,
        reloaded_fields,
        pid_stays,
        needs_live_check,
        from,
        why,
    }
}

/// Maximum rounds: more than the length of any realistic chain of identity hand-overs.
const ROUNDS: usize = 16;

/// Inputs of the waves: unchanged while they are assigned.
struct WaveInputs<'a> {
    desired: &'a Desired,
    observed: &'a Observed,
    rules: &'a Rules,
    names: DependencyIndex<'a>,
    /// Dependency depth of each declared name.
    ranks: HashMap<&'a ProcessKey, usize>,
}

/// The waves of all chains while they are assigned.
struct WaveBuilder<'a> {
    inputs: WaveInputs<'a>,
    chain_of: HashMap<&'a InstanceKey, usize>,
    held: BTreeSet<InstanceKey>,
    seen_as: HashMap<&'a InstanceKey, &'a InstanceKey>,
    levels: Vec<usize>,
    /// The wave of a chain's start where it waits for an identity to become free; 0: with the other steps.
    starts: Vec<usize>,
    /// Chains that free an identity which another chain claims.
    identity_blockers: BTreeSet<usize>,
    /// The chains of moved instances, by their earlier names.
    moved_to: HashMap<&'a InstanceKey, usize>,
    /// Instances that cannot stop yet, with the held dependent.
    needed: HashMap<&'a InstanceKey, InstanceKey>,
    /// The last wave of each rollout so far.
    ends: HashMap<&'a ProcessKey, usize>,
    gates: Vec<(usize, Gate)>,
}

impl<'a> WaveBuilder<'a> {
    fn new(
        desired: &'a Desired,
        observed: &'a Observed,
        rules: &'a Rules,
        chains: &[Chain<'a>],
        found: &PlanDraft<'a>,
    ) -> WaveBuilder<'a> {
        // Only names that some chain or held instance depends on are indexed.
        let held = found.held.iter().filter_map(|held| desired.instances.get(&held.instance));
        let moving = chains.iter().filter_map(|chain| chain.want).chain(held);
        let names: BTreeSet<&ProcessKey> = moving.flat_map(|want| &want.origin.depends_on).collect();
        let names = DependencyIndex::new(desired, &names);
        let ranks = names.ranks(desired);
        WaveBuilder {
            inputs: WaveInputs { desired, observed, rules, names, ranks },
            chain_of: chains.iter().enumerate().map(|(at, chain)| (chain.key, at)).collect(),
            held: found.held.iter().map(|held| held.instance.clone()).collect(),
            seen_as: found.seen_as.clone(),
            levels: vec![0; chains.len()],
            starts: vec![0; chains.len()],
            identity_blockers: BTreeSet::new(),
            moved_to: chains.iter().enumerate().filter_map(|(at, chain)| Some((chain.from?, at))).collect(),
            needed: HashMap::new(),
            ends: HashMap::new(),
            gates: Vec::new(),
        }
    }

    fn rank(&self, chain: &Chain<'_>) -> usize {
        chain.want.and_then(|want| self.inputs.ranks.get(&want.origin.declared)).copied().unwrap_or(0)
    }

    /// A held dependent that may still run prevents its dependencies from stopping.
    fn keep_needed(&mut self) {
        let held: Vec<InstanceKey> = self.held.iter().cloned().collect();
        for key in held {
            let Some(want) = self.inputs.desired.instances.get(&key) else { continue };
            let runs = match self.inputs.observed.get(&key) {
                Presence::Present(present) => present.running,
                Presence::Absent => false,
                Presence::Unknown(_) => true,
            };
            if !runs || want.origin.depends_on.is_empty() {
                continue;
            }
            for name in &want.origin.depends_on {
                let here = self.inputs.names.here(name, &key.host);
                let found = if here.is_empty() { self.inputs.names.all(name) } else { here };
                let found: Vec<&'a InstanceKey> = found.iter().map(|(found, _)| *found).collect();
                for dependency in found {
                    self.needed.insert(dependency, key.clone());
                }
            }
        }
    }

    /// Schedules stops: dependents before their dependencies. Returns the chains that cannot stop yet.
    fn schedule_stops(&mut self, chains: &[Chain<'a>]) -> BTreeMap<usize, String> {
        self.keep_needed();
        let mut waiting = BTreeMap::new();
        let mut down: Vec<usize> =
            (0..chains.len()).filter(|at| !chains[*at].state().needs_start()).collect();
        down.sort_by_key(|at| std::cmp::Reverse(self.rank(&chains[*at])));
        // Per instance: the wave after its last dependent.
        let mut after: HashMap<&InstanceKey, usize> = HashMap::new();
        // Per name: for dependents on hosts without an instance of that name.
        let mut after_all: HashMap<ProcessKey, usize> = HashMap::new();
        for batch in batches(self.inputs.desired, self.inputs.observed, chains, &down) {
            let begin = self.begin(&batch);
            let mut end = begin;
            for at in &batch.chains {
                let chain = &chains[*at];
                let declared = chain.want.map(|want| &want.origin.declared);
                let names = [declared, Some(&chain.key.process())]
                    .into_iter()
                    .flatten()
                    .filter_map(|name| after_all.get(name))
                    .max()
                    .copied();
                let own = after.get(chain.key).copied();
                let level = begin.max(own.unwrap_or(0)).max(names.unwrap_or(0));
                self.levels[*at] = level;
                end = end.max(level);
                if !has(chain, &[Op::Stop, Op::Kill]) {
                    continue;
                }
                if let Some(dependent) = self.needed.get(chain.key).cloned() {
                    waiting.insert(
                        *at,
                        format!("{dependent} depends on this process, is held and may still run"),
                    );
                    self.need_for(chain);
                    continue;
                }
                let depends_on = chain.want.iter().flat_map(|want| &want.origin.depends_on);
                for name in depends_on {
                    let here = self.inputs.names.here(name, &chain.key.host);
                    for (key, _) in here {
                        let wave = after.entry(key).or_default();
                        *wave = (*wave).max(level + 1);
                    }
                    if here.is_empty() {
                        let wave = after_all.entry(name.clone()).or_default();
                        *wave = (*wave).max(level + 1);
                    }
                }
            }
            self.close(batch, end, chains);
        }
        waiting
    }

    /// A chain that cannot stop keeps its dependencies running, too.
    fn need_for(&mut self, chain: &Chain<'a>) {
        for name in chain.want.iter().flat_map(|want| &want.origin.depends_on) {
            let here = self.inputs.names.here(name, &chain.key.host);
            let found = if here.is_empty() { self.inputs.names.all(name) } else { here };
            let found: Vec<&'a InstanceKey> = found.iter().map(|(found, _)| *found).collect();
            for dependency in found {
                self.needed.insert(dependency, chain.key.clone());
            }
        }
    }

    /// Schedules starts until the order is stable: dependencies before dependents. Adds the chains whose dependencies will not
    /// become ready.
    fn schedule_all_starts(&mut self, chains: &[Chain<'a>], waiting: &mut BTreeMap<usize, String>) {
        let identities = IdentityIndex::new(self.inputs.observed, self.inputs.rules.stale_after_secs, chains);
        self.identity_blockers = chains
            .iter()
            .flat_map(|chain| identities.identity_blockers(chain))
            .filter_map(|other| self.leaver(other, chains))
            .collect();
        let (ends, gates) = (self.ends.clone(), self.gates.clone());
        // A start that waits for an identity delays its dependents, which may delay another start: iterate to a fixpoint.
        for _ in 0..ROUNDS {
            (self.ends, self.gates) = (ends.clone(), gates.clone());
            let before = (self.starts.clone(), waiting.len());
            self.schedule_starts(chains, waiting);
            self.resolve_identity_conflicts(chains, &identities, waiting);
            if before == (self.starts.clone(), waiting.len()) {
                return;
            }
        }
        // No order satisfies all of them: all are held.
        for (at, _) in self.starts.iter().enumerate().filter(|(_, starts)| **starts > 0) {
            let why = "these processes swap identities in a cycle, which no step order can satisfy: split the change into two";
            waiting.entry(at).or_insert_with(|| why.to_owned());
        }
    }

    /// The chain that frees the identity of an instance, under its name or the name that it moves to.
    fn leaver(&self, key: &InstanceKey, chains: &[Chain<'_>]) -> Option<usize> {
        let at = self.chain_of.get(key).or_else(|| self.moved_to.get(key)).copied()?;
        let runs = match self.inputs.observed.get(key) {
            Presence::Present(present) => present.running,
            Presence::Absent => false,
            Presence::Unknown(_) => true,
        };
        // An unsupervised process that runs still has its identity.
        let leaves =
            has(&chains[at], &[Op::Stop, Op::Kill]) || (!runs && has(&chains[at], &[Op::Unsupervise]));
        leaves.then_some(at)
    }

    fn schedule_starts(&mut self, chains: &[Chain<'a>], waiting: &mut BTreeMap<usize, String>) {
        let mut up: Vec<usize> = (0..chains.len()).filter(|at| chains[*at].state().needs_start()).collect();
        up.sort_by_key(|at| self.rank(&chains[*at]));
        let mut everywhere: HashMap<&ProcessKey, Result<usize, NotReady>> = HashMap::new();
        for batch in batches(self.inputs.desired, self.inputs.observed, chains, &up) {
            let begin = self.begin(&batch);
            let mut end = begin;
            for at in &batch.chains {
                let chain = &chains[*at];
                let mut level = begin;
                if has(chain, &[Op::Start, Op::Restart]) {
                    let depends_on = chain.want.iter().flat_map(|want| &want.origin.depends_on);
                    for name in depends_on {
                        let here = self.inputs.names.here(name, &chain.key.host);
                        let ready = if here.is_empty() {
                            // All instances of the name are scheduled already: computed once.
                            let all = || self.wait_for_each(self.inputs.names.all(name), chains, waiting);
                            everywhere.entry(name).or_insert_with(all).clone()
                        } else {
                            self.wait_for_each(here, chains, waiting)
                        };
                        match ready {
                            // A chain that frees an identity stops at once; only its start waits.
                            Ok(after) if self.identity_blockers.contains(at) => {
                                self.starts[*at] = self.starts[*at].max(after);
                            }
                            Ok(after) => level = level.max(after),
                            Err(why) => {
                                waiting.entry(*at).or_insert_with(|| why.to_string());
                            }
                        }
                    }
                }
                self.levels[*at] = level;
                end = end.max(level);
            }
            self.close(batch, end, chains);
        }
    }

    /// No two processes of a host share an identity: a start waits until the other process has stopped.
    fn resolve_identity_conflicts(
        &mut self,
        chains: &[Chain<'a>],
        identities: &IdentityIndex<'a>,
        waiting: &mut BTreeMap<usize, String>,
    ) {
        for (at, chain) in chains.iter().enumerate() {
            for other in identities.identity_blockers(chain) {
                match self.leaver(other, chains).filter(|at| !waiting.contains_key(at)) {
                    Some(other) => self.starts[at] = self.starts[at].max(self.levels[other] + 1),
                    None => {
                        let why = match self.inputs.observed.get(other) {
                            Presence::Unknown(_) => {
                                format!("{other} has the same identity and may still run")
                            }
                            Presence::Present(_) | Presence::Absent => format!(
                                "{other} has the same identity on that host and is not stopped: add `moved_from: {}`, \
                                 or remove it first",
                                other.process()
                            ),
                        };
                        waiting.entry(at).or_insert(why);
                    }
                }
            }
        }
    }

    /// The wave after which all of these are ready, or why the first one will not be.
    fn wait_for_each(
        &self,
        all: &[(&'a InstanceKey, &'a DesiredInstance)],
        chains: &[Chain<'_>],
        waiting: &BTreeMap<usize, String>,
    ) -> Result<usize, NotReady> {
        all.iter().try_fold(0, |level, (key, want)| {
            let after = self.wait_for(key, want, chains, waiting);
            after.map(|after| level.max(after)).map_err(|why| NotReady { on: (*key).clone(), why })
        })
    }

    /// The wave after which a dependency is ready, or why it will not be.
    fn wait_for(
        &self,
        key: &InstanceKey,
        want: &DesiredInstance,
        chains: &[Chain<'_>],
        waiting: &BTreeMap<usize, String>,
    ) -> Result<usize, &'static str> {
        if !want.origin.state.needs_start() {
            return Err("whose wanted state is not running");
        }
        match self.chain_of.get(key) {
            Some(at) if waiting.contains_key(at) => Err("which is itself waiting"),
            Some(at) if has(&chains[*at], brings_up(want)) => {
                Ok((self.levels[*at] + waves_of(&chains[*at])).max(self.starts[*at] + 1))
            }
            Some(_) | None => self.is_ready(key, want).map(|()| 0),
        }
    }

    /// Whether a dependency is ready without any step.
    fn is_ready(&self, key: &InstanceKey, want: &DesiredInstance) -> Result<(), &'static str> {
        let present = match self.inputs.observed.get(self.seen_as.get(key).copied().unwrap_or(key)) {
            Presence::Present(present) => present,
            Presence::Absent
                if want.spec.monitor.auto_type == AutoType::Periodic
                    && want.origin.state == State::Unhosted =>
            {
                return Ok(());
            }
            Presence::Absent => return Err("which does not exist"),
            Presence::Unknown(_) => return Err("whose state is unknown"),
        };
        let seen = present.seen();
        if self.inputs.rules.stale_after_secs.is_some_and(|limit| self.inputs.observed.age(seen) > limit) {
            return Err("whose state is unknown: its host has not reported recently");
        }
        let ready = match want.spec.monitor.auto_type {
            // An unsupervised periodic process runs on request only: no state to wait for.
            AutoType::Periodic => present.hosted || want.origin.state == State::Unhosted,
            AutoType::Resident => present.running,
            AutoType::OneShot => {
                !present.running && self.has_run(seen.specs.ran, &seen.specs.registered, want)
            }
        };
        match seen.health {
            _ if !ready && self.held.contains(key) => Err("which is held"),
            _ if !ready && present.running => Err("whose run has not ended"),
            _ if !ready => Err("which is not running"),
            Health::Starting => Err("which is still starting"),
            Health::Degraded => Err("which is degraded"),
            Health::Failed => Err("which has failed"),
            Health::Healthy | Health::Unknown | Health::NotReported => Ok(()),
        }
    }

    fn has_run(&self, ran: LastRun, given: &crate::model::KnownSpec, want: &DesiredInstance) -> bool {
        let target =
            TargetSpec::new(&want.spec, want.origin.state, &want.origin.on_change, &self.inputs.rules.caps);
        match ran {
            LastRun::Unknown | LastRun::Never => false,
            LastRun::Digest(run) => run == target.revision().run,
            LastRun::Given => {
                target.delta(given).is_some_and(|delta| !(delta.reload || delta.restart || delta.replace))
            }
        }
    }

    /// The first wave of a batch: after the previous batch.
    fn begin(&self, batch: &Batch<'_>) -> usize {
        batch.rollout.and_then(|(process, _)| self.ends.get(process)).map_or(0, |end| end + 1)
    }

    /// Puts all chains of a batch into one wave, and adds the gate before the next batch.
    fn close(&mut self, batch: Batch<'a>, level: usize, chains: &[Chain<'_>]) {
        let Some((process, rollout)) = batch.rollout else { return };
        batch.chains.iter().for_each(|at| self.levels[*at] = level);
        let ends = batch.chains.iter().map(|at| (level + waves_of(&chains[*at]) - 1).max(self.starts[*at]));
        let end = ends.max().unwrap_or(level);
        let gate = Gate {
            process: process.clone(),
            soak_secs: rollout.soak_secs.unwrap_or(0),
            max_failures: rollout.max_failures.unwrap_or(0),
            auto_rollback: rollout.auto_rollback.unwrap_or(false),
        };
        self.gates.push((end, gate));
        self.ends.insert(process, end);
    }
}

/// Number of waves of a chain: steps under an earlier name have their own wave.
fn waves_of(chain: &Chain<'_>) -> usize {
    1 + usize::from(!chain.before.is_empty())
}

/// The operations after which a dependency is ready.
fn brings_up(want: &DesiredInstance) -> &'static [Op] {
    match want.spec.monitor.auto_type {
        AutoType::Periodic => &[Op::Supervise],
        AutoType::Resident | AutoType::OneShot => &[Op::Start, Op::Restart, Op::Reload],
    }
}

/// A dependency that will not be ready.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NotReady {
    on: InstanceKey,
    why: &'static str,
}

impl fmt::Display for NotReady {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "depends on {}, {}", self.on, self.why)
    }
}
