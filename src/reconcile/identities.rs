//! Who is where: no two processes of a host may share what the agent tells them apart by.

use std::collections::{HashMap, HashSet};

use super::chain::Chain;
use crate::model::{AutoType, DesiredInstance, HostKey, InstanceKey, Observed, Op};

/// A host, and the value_key or program of a process on it.
type IdentitySlot<'a> = (&'a HostKey, String);

/// Those that are, or may be, where something is to start, known by the specs they have.
pub struct IdentityIndex<'a>(HashMap<IdentitySlot<'a>, Vec<&'a InstanceKey>>);

impl<'a> IdentityIndex<'a> {
    pub fn new(observed: &'a Observed, stale_after: Option<u64>, chains: &[Chain<'a>]) -> IdentityIndex<'a> {
        let starting = chains.iter().filter(|chain| arrives(chain));
        let hosts: HashSet<&HostKey> = starting.map(|chain| &chain.key.host).collect();
        let mut places: HashMap<IdentitySlot<'a>, Vec<&'a InstanceKey>> = HashMap::new();
        if hosts.is_empty() {
            return IdentityIndex(places);
        }
        for (key, seen) in observed.instances.iter().filter(|(key, _)| hosts.contains(&key.host)) {
            // Of what is not known, or not lately, the worst is believed.
            let doubt = seen.unknown || stale_after.is_some_and(|limit| observed.age(seen) > limit);
            let guarded = seen.registered_spec.spec().filter(|_| doubt || seen.hosted != Some(false));
            let running = seen.live.spec().filter(|_| doubt || seen.running != Some(false));
            let mut spots: Vec<String> =
                [guarded, running].into_iter().flatten().map(|spec| spec.identity.index_key()).collect();
            spots.dedup();
            for spot in spots {
                places.entry((&key.host, spot)).or_default().push(key);
            }
        }
        IdentityIndex(places)
    }

    /// Others that are where a chain starts something.
    pub fn in_the_way(&self, chain: &Chain<'a>) -> impl Iterator<Item = &'a InstanceKey> {
        let (key, from) = (chain.key, chain.from);
        let want = chain.want.filter(|_| !self.0.is_empty() && arrives(chain));
        let spot = want.map(|want| (&chain.key.host, want.spec.identity.index_key()));
        let there = spot.and_then(|spot| self.0.get(&spot)).into_iter().flatten().copied();
        there.filter(move |other| *other != key && Some(*other) != from)
    }
}

/// Does something come to be where it was not?
fn arrives(chain: &Chain<'_>) -> bool {
    chain.steps.iter().any(|draft| claims_identity(chain.want, draft.op))
}

/// A start does; for what runs by schedule, its guard.
pub fn claims_identity(want: Option<&DesiredInstance>, op: Op) -> bool {
    let periodic = want.is_some_and(|want| want.spec.monitor.auto_type == AutoType::Periodic);
    op == Op::Start || (periodic && op == Op::Supervise)
}
