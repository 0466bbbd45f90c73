//! Rollout batches: the chains of a process, canaries first, then group by group.

use std::collections::{BTreeSet, HashMap};

use super::chain::{Chain, has};
use super::stages::AllowedDisruptions;
use crate::model::{Amount, Desired, DesiredInstance, Observed, Op, ProcessKey, Rollout};

/// A batch of a rollout, or one chain without a rollout.
pub struct Batch<'a> {
    pub chains: Vec<usize>,
    pub rollout: Option<(&'a ProcessKey, &'a Rollout)>,
}

/// Splits chains, in the given order, into the batches of their rollouts. A chain without a rollout is its own batch.
pub fn batches<'a>(
    desired: &'a Desired,
    observed: &Observed,
    chains: &[Chain<'a>],
    order: &[usize],
) -> Vec<Batch<'a>> {
    let mut batches: Vec<Batch<'a>> = Vec::new();
    let mut open: HashMap<&ProcessKey, Vec<usize>> = HashMap::new();
    let rolls = |at: usize| {
        let origin = &chains[at].want?.origin;
        let rollout = origin.rollout.as_ref().filter(|_| is_rolled_out(&chains[at]))?;
        Some((&origin.declared, rollout))
    };
    for at in order {
        if let Some((declared, _)) = rolls(*at) {
            open.entry(declared).or_default().push(*at);
        }
    }
    let mut sizes: HashMap<&ProcessKey, usize> = open.keys().map(|declared| (*declared, 0)).collect();
    if !sizes.is_empty() {
        for want in desired.instances.values() {
            sizes.entry(&want.origin.declared).and_modify(|size| *size += 1);
        }
    }
    let bounded = |want: &&DesiredInstance| {
        want.origin.rollout.as_ref().is_some_and(|rollout| rollout.max_unavailable.is_some())
    };
    let of_chains = order.iter().filter_map(|at| chains[*at].want).filter(bounded);
    let limited: BTreeSet<&ProcessKey> = of_chains.map(|want| &want.origin.declared).collect();
    let room = match limited.is_empty() {
        true => AllowedDisruptions::default(),
        false => AllowedDisruptions::new(desired, observed, chains, &limited),
    };
    let mut done: BTreeSet<&ProcessKey> = BTreeSet::new();
    for at in order {
        let Some((declared, rollout)) = rolls(*at) else {
            batches.push(Batch { chains: vec![*at], rollout: None });
            continue;
        };
        if !done.insert(declared) {
            continue;
        }
        let of = sizes.get(declared).copied().unwrap_or(0);
        let of_process = open.remove(declared).unwrap_or_default();
        let parts = match rollout.groups.is_empty() && rollout.max_unavailable.is_none() {
            true => cut(of_process, rollout, of),
            false => {
                let group = |at: usize| rollout.group_of(&chains[at].key.host);
                let sizes = group_sizes(desired, declared, rollout);
                cut_groups(of_process, rollout, of, &sizes, group, |group| room.of(declared, group))
            }
        };
        batches.extend(parts.into_iter().map(|chains| Batch { chains, rollout: Some((declared, rollout)) }));
    }
    batches
}

/// Whether a chain is part of a rollout: it disturbs the process.
pub fn is_rolled_out(chain: &Chain<'_>) -> bool {
    has(chain, &[Op::Start, Op::Stop, Op::Kill, Op::Restart, Op::Reload])
}

/// The number of instances that an amount means. A share other than 0 % is at least 1; `least`: the minimum.
pub fn amount(amount: Amount, of: usize, least: usize) -> usize {
    let count = match amount {
        Amount::Count(count) => usize::try_from(count).unwrap_or(usize::MAX),
        Amount::Share(share) if share.get() == 0.0 => 0,
        Amount::Share(share) => ((of as f64 * share.get() / 100.0).floor() as usize).max(1),
    };
    count.max(least)
}

/// The number of canaries. Those of a rollout that pauses are a stage, which has no other chains.
fn canaries(rollout: &Rollout, of: usize) -> usize {
    rollout.canary.filter(|_| !rollout.pauses).map_or(0, |canary| amount(canary, of, 0))
}

/// The number of instances of a process in each group.
fn group_sizes(desired: &Desired, declared: &ProcessKey, rollout: &Rollout) -> HashMap<usize, usize> {
    let mut sizes = HashMap::new();
    for (key, _) in desired.instances.iter().filter(|(_, want)| want.origin.declared == *declared) {
        *sizes.entry(rollout.group_of(&key.host)).or_default() += 1;
    }
    sizes
}

/// The canaries, then the batches of one group after another.
fn cut_groups(
    mut chains: Vec<usize>,
    rollout: &Rollout,
    of: usize,
    sizes: &HashMap<usize, usize>,
    group_of: impl Fn(usize) -> usize,
    room: impl Fn(usize) -> Option<usize>,
) -> Vec<Vec<usize>> {
    // Stable: within a group the given order stays.
    chains.sort_by_key(|at| group_of(*at));
    let (first, rest) = chains.split_at(canaries(rollout, of).min(chains.len()));
    let mut parts: Vec<Vec<usize>> = Vec::new();
    let chunk = |chains: &[usize], size: Option<usize>, parts: &mut Vec<Vec<usize>>| {
        for group in chains.chunk_by(|one, other| group_of(*one) == group_of(*other)) {
            let at = group_of(group[0]);
            let most = room(at).unwrap_or(usize::MAX);
            parts.extend(group.chunks(size.unwrap_or(usize::MAX).min(most).max(1)).map(<[usize]>::to_vec));
        }
    };
    chunk(first, None, &mut parts);
    for group in rest.chunk_by(|one, other| group_of(*one) == group_of(*other)) {
        let size = sizes.get(&group_of(group[0])).copied().unwrap_or(0);
        chunk(group, rollout.batch.map(|batch| amount(batch, size, 1)), &mut parts);
    }
    parts
}

/// The canaries, then the batches.
fn cut(chains: Vec<usize>, rollout: &Rollout, of: usize) -> Vec<Vec<usize>> {
    let (first, rest) = chains.split_at(canaries(rollout, of).min(chains.len()));
    let batch = rollout.batch.map_or(rest.len().max(1), |batch| amount(batch, of, 1));
    let first = (!first.is_empty()).then(|| first.to_vec());
    first.into_iter().chain(rest.chunks(batch).map(<[usize]>::to_vec)).collect()
}
