//! Rollout batches: the chains of a process, canaries first.

use std::collections::{BTreeSet, HashMap};

use super::chain::{Chain, has};
use crate::model::{Amount, Desired, Op, ProcessKey, Rollout};

/// A batch of a rollout, or one chain without a rollout.
pub struct Batch<'a> {
    pub chains: Vec<usize>,
    pub rollout: Option<(&'a ProcessKey, &'a Rollout)>,
}

/// Splits chains, in the given order, into the batches of their rollouts. A chain without a rollout is its own batch.
pub fn batches<'a>(desired: &'a Desired, chains: &[Chain<'a>], order: &[usize]) -> Vec<Batch<'a>> {
    let mut batches: Vec<Batch<'a>> = Vec::new();
    let mut open: HashMap<&ProcessKey, Vec<usize>> = HashMap::new();
    let rolls = |at: usize| {
        let origin = &chains[at].want?.origin;
        let disruptive = [Op::Start, Op::Stop, Op::Kill, Op::Restart, Op::Reload];
        let rollout = origin.rollout.as_ref().filter(|_| has(&chains[at], &disruptive))?;
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
        let parts = cut(open.remove(declared).unwrap_or_default(), rollout, of);
        batches.extend(parts.into_iter().map(|chains| Batch { chains, rollout: Some((declared, rollout)) }));
    }
    batches
}

/// The canaries, then the batches.
fn cut(chains: Vec<usize>, rollout: &Rollout, of: usize) -> Vec<Vec<usize>> {
    let size = |amount: Amount| match amount {
        Amount::Count(count) => usize::try_from(count).unwrap_or(usize::MAX).max(1),
        Amount::Share(share) => ((of as f64 * share.get() / 100.0).floor() as usize).max(1),
    };
    let none = |amount: &Amount| match amount {
        Amount::Count(count) => *count == 0,
        Amount::Share(share) => share.get() == 0.0,
    };
    let canaries = rollout.canary.filter(|amount| !none(amount)).map_or(0, size).min(chains.len());
    let (first, rest) = chains.split_at(canaries);
    let batch = rollout.batch.map_or(rest.len().max(1), size);
    let first = (!first.is_empty()).then(|| first.to_vec());
    first.into_iter().chain(rest.chunks(batch).map(<[usize]>::to_vec)).collect()
}
