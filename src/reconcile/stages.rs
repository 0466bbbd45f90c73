//! Stages of a rollout: which changes wait for a promotion, an abort, or for available instances.
//!
//! The stages are the canaries, the host groups of `rollout.order`, and the other hosts. The stage of an instance follows
//! from the manifests alone, so that every plan finds the same stages. A repair of an instance that has the wanted version
//! is not part of a rollout.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::assess::TargetSpec;
use super::batches::{amount, is_rolled_out};
use super::chain::{Chain, PlanDraft};
use super::rules::Rules;
use super::spec_effects::EffectTable;
use crate::model::{
    AutoType, Desired, DesiredInstance, Health, HoldReason, InstanceKey, Observed, Presence, ProcessKey,
    Rollout, RolloutPause,
};

/// The id of a version of a process: promotions of another version do not count. Fields that change no running process, and
/// the number of instances, do not matter.
pub fn rollout_id<'a>(wants: impl Iterator<Item = &'a DesiredInstance>) -> String {
    let version = |want: &DesiredInstance| {
        let run = EffectTable::of(&want.spec, &want.origin.on_change).revision(&want.spec).run;
        format!("{run:08x}{}", want.origin.state.word())
    };
    let versions: BTreeSet<String> = wants.map(version).collect();
    let text: Vec<String> = versions.into_iter().collect();
    blake3::hash(text.join(",").as_bytes()).to_hex()[..16].to_owned()
}

/// The instances of one declared process, by group and then by key.
struct RolloutInstances<'a> {
    rollout: Option<&'a Rollout>,
    all: Vec<(&'a InstanceKey, &'a DesiredInstance)>,
}

impl<'a> RolloutInstances<'a> {
    fn by_process(
        desired: &'a Desired,
        named: &BTreeSet<&'a ProcessKey>,
    ) -> BTreeMap<&'a ProcessKey, RolloutInstances<'a>> {
        let mut found: BTreeMap<&ProcessKey, RolloutInstances<'a>> = BTreeMap::new();
        for (key, want) in desired.instances.iter().filter(|_| !named.is_empty()) {
            let (declared, rollout) = (&want.origin.declared, want.origin.rollout.as_ref());
            if named.contains(declared) {
                let of_it =
                    found.entry(declared).or_insert_with(|| RolloutInstances { rollout, all: Vec::new() });
                of_it.all.push((key, want));
            }
        }
        found.values_mut().for_each(|of_it| {
            let rollout = of_it.rollout;
            let group = |key: &InstanceKey| rollout.map_or(0, |rollout| rollout.group_of(&key.host));
            of_it.all.sort_by_key(|(key, _)| (group(key), *key));
        });
        found
    }

    /// The names of the stages, and the stage of each instance. Empty stages are left out.
    fn stages(&self, rollout: &Rollout) -> (Vec<String>, HashMap<&'a InstanceKey, usize>) {
        let canaries = rollout.canary.map_or(0, |canary| amount(canary, self.all.len(), 0));
        let (mut names, mut of) = (Vec::new(), HashMap::new());
        let mut last: Option<usize> = None;
        for (nth, (key, _)) in self.all.iter().enumerate() {
            let group = rollout.group_of(&key.host);
            // The canaries are a stage of their own, before the first group.
            let stage = if nth < canaries { 0 } else { group + 1 };
            if last != Some(stage) {
                last = Some(stage);
                names.push(match rollout.groups.get(group) {
                    _ if stage == 0 => "canaries".to_owned(),
                    Some(group) => group.name.clone(),
                    None => "others".to_owned(),
                });
            }
            of.insert(*key, names.len() - 1);
        }
        (names, of)
    }
}

/// Why an instance of an aborted rollout does not change.
pub fn aborted_rollout(process: &ProcessKey) -> String {
    format!("the rollout of this version was aborted: `abide rollout promote {process}` resumes it")
}

/// Holds the changes that wait for a promotion, or whose rollout was aborted. Returns the rollouts that wait.
pub fn hold_stages<'a>(
    found: &mut PlanDraft<'a>,
    desired: &'a Desired,
    observed: &Observed,
    rules: &Rules,
) -> Vec<RolloutPause> {
    let declared_of = |chain: &Chain<'a>| {
        let origin = &chain.want?.origin;
        let pauses = origin.rollout.as_ref().is_some_and(|rollout| rollout.pauses);
        // A person may also abort a change without batches.
        let is_decided = pauses || rules.rollouts.contains_key(&origin.declared);
        (is_decided && is_rolled_out(chain) && !is_repair(chain, observed, rules)).then_some(&origin.declared)
    };
    let named: BTreeSet<&ProcessKey> = found.chains.iter().filter_map(declared_of).collect();
    let mut pauses = Vec::new();
    for (process, instances) in RolloutInstances::by_process(desired, &named) {
        let id = rollout_id(instances.all.iter().map(|(_, want)| *want));
        let progress = rules.rollouts.get(process).filter(|progress| progress.id == id);
        let is_aborted = progress.is_some_and(|progress| progress.is_aborted);
        if is_aborted {
            let is_of_it = |chain: &Chain<'a>| declared_of(chain) == Some(process);
            hold(found, is_of_it, HoldReason::RolloutAborted, &aborted_rollout(process));
        }
        let Some(rollout) = instances.rollout.filter(|rollout| rollout.pauses && !is_aborted) else {
            continue;
        };
        let (stages, stage_of) = instances.stages(rollout);
        let promoted = progress.map_or(0, |progress| progress.promoted);
        let stage = |chain: &Chain<'a>| stage_of.get(chain.key).copied().unwrap_or(usize::MAX);
        let waits = |chain: &Chain<'a>| declared_of(chain) == Some(process) && stage(chain) > promoted;
        if !found.chains.iter().any(waits) {
            continue;
        }
        let is_changing =
            found.chains.iter().any(|chain| declared_of(chain) == Some(process) && !waits(chain));
        let is_held = |key: &InstanceKey| found.held.iter().any(|held| held.instance == *key);
        let mut done =
            instances.all.iter().filter(|(key, _)| stage_of.get(key).is_some_and(|at| *at <= promoted));
        let is_reached =
            !is_changing && done.all(|(key, want)| !is_held(key) && is_available(key, want, observed));
        let (nth, of) = (promoted + 1, stages.len());
        let name = stages.get(promoted).map_or("", String::as_str);
        let detail = match is_reached {
            true => {
                format!("stage {nth} of {of} ({name}) is done: `abide rollout promote {process}` continues")
            }
            false => format!("waits until stage {nth} of {of} ({name}) is done and promoted"),
        };
        hold(found, waits, HoldReason::AwaitingPromotion, &detail);
        pauses.push(RolloutPause { process: process.clone(), id, stage: promoted, stages, is_reached });
    }
    pauses
}

/// Holds changes of available instances in groups where as many are unavailable as the rollout allows.
pub fn hold_unavailable<'a>(found: &mut PlanDraft<'a>, desired: &'a Desired, observed: &Observed) {
    let bounded = |chain: &Chain<'a>| {
        let origin = &chain.want?.origin;
        let rollout = origin.rollout.as_ref().filter(|rollout| rollout.max_unavailable.is_some())?;
        is_rolled_out(chain).then_some((&origin.declared, rollout.group_of(&chain.key.host)))
    };
    let named: BTreeSet<&ProcessKey> =
        found.chains.iter().filter_map(bounded).map(|(declared, _)| declared).collect();
    if named.is_empty() {
        return;
    }
    let room = AllowedDisruptions::new(desired, observed, &found.chains, &named);
    let full = |chain: &Chain<'a>| {
        let is_up = chain.want.is_some_and(|want| is_available(chain.key, want, observed));
        is_up && bounded(chain).is_some_and(|(declared, group)| room.of(declared, group) == Some(0))
    };
    let detail = "`rollout.max_unavailable` of its group is reached";
    hold(found, full, HoldReason::MaxUnavailable, detail);
}

/// Number of instances that may change at a time, per process and group.
#[derive(Default)]
pub struct AllowedDisruptions<'a>(HashMap<(&'a ProcessKey, usize), usize>);

impl<'a> AllowedDisruptions<'a> {
    /// Instances that no chain changes and that are unavailable use up room.
    pub fn new(
        desired: &'a Desired,
        observed: &Observed,
        chains: &[Chain<'a>],
        named: &BTreeSet<&'a ProcessKey>,
    ) -> AllowedDisruptions<'a> {
        let changing: BTreeSet<&InstanceKey> = chains.iter().map(|chain| chain.key).collect();
        let mut room = HashMap::new();
        for (process, instances) in RolloutInstances::by_process(desired, named) {
            let Some(rollout) = instances.rollout else { continue };
            let Some(limit) = rollout.max_unavailable else { continue };
            let mut groups: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
            for (key, want) in &instances.all {
                let (all, down) = groups.entry(rollout.group_of(&key.host)).or_default();
                *all += 1;
                *down += usize::from(!changing.contains(key) && !is_available(key, want, observed));
            }
            for (group, (all, down)) in groups {
                room.insert((process, group), amount(limit, all, 1).saturating_sub(down));
            }
        }
        AllowedDisruptions(room)
    }

    /// `None`: not limited.
    pub fn of(&self, process: &'a ProcessKey, group: usize) -> Option<usize> {
        self.0.get(&(process, group)).copied()
    }
}

fn hold<'a>(
    found: &mut PlanDraft<'a>,
    is_held: impl Fn(&Chain<'a>) -> bool,
    reason: HoldReason,
    detail: &str,
) {
    let held = &mut found.held;
    found.chains.retain(|chain| {
        let holds = is_held(chain);
        if holds {
            held.push(chain.held(reason, detail.to_owned()));
        }
        !holds
    });
}

/// Whether an instance has the wanted version already, and the chain only brings it up.
fn is_repair(chain: &Chain<'_>, observed: &Observed, rules: &Rules) -> bool {
    let (Some(want), Presence::Present(present)) =
        (chain.want, observed.get(chain.from.unwrap_or(chain.key)))
    else {
        return false;
    };
    let seen = present.seen();
    let target = TargetSpec::new(&want.spec, want.origin.state, &want.origin.on_change, &rules.caps);
    let is_wanted =
        |spec| target.delta(spec).is_some_and(|delta| !(delta.reload || delta.restart || delta.replace));
    // A one-shot that has not run this version is part of the rollout.
    want.spec.monitor.auto_type != AutoType::OneShot
        && want.origin.state.needs_start()
        && is_wanted(&seen.specs.registered)
        && (!present.running || is_wanted(&seen.specs.live))
}

/// Whether an instance is as its manifest wants it: running and not unhealthy.
fn is_available(key: &InstanceKey, want: &DesiredInstance, observed: &Observed) -> bool {
    if !want.origin.state.needs_start() {
        return true;
    }
    match observed.get(key) {
        Presence::Present(present) => {
            let seen = present.seen();
            let is_well = matches!(seen.health, Health::Healthy | Health::NotReported | Health::Unknown);
            (present.running || seen.completed || !is_resident(want)) && is_well
        }
        Presence::Absent | Presence::Unknown(_) => false,
    }
}

fn is_resident(want: &DesiredInstance) -> bool {
    want.spec.monitor.auto_type == AutoType::Resident
}
