//! Identity index: which instance has which identity on a host. No two processes of a host may share an identity.

use std::collections::{HashMap, HashSet};

use super::chain::Chain;
use crate::model::{AutoType, DesiredInstance, HostKey, InstanceKey, Observed, Op};

/// A host, and the value_key or program of a process on it.
type IdentitySlot<'a> = (&'a HostKey, String);

/// The instances that have, or may have, an identity on a host where a chain starts a process.
pub struct IdentityIndex<'a>(HashMap<IdentitySlot<'a>, Vec<&'a InstanceKey>>);

impl<'a> IdentityIndex<'a> {
    pub fn new(observed: &'a Observed, stale_after: Option<u64>, chains: &[Chain<'a>]) -> IdentityIndex<'a> {
        let starting = chains.iter().filter(|chain| arrives(chain));
        let hosts: HashSet<&HostKey> = starting.map(|chain| &chain.key.host).collect();
        let mut slots: HashMap<IdentitySlot<'a>, Vec<&'a InstanceKey>> = HashMap::new();
        if hosts.is_empty() {
            return IdentityIndex(slots);
        }
        for (key, seen) in observed.instances.iter().filter(|(key, _)| hosts.contains(&key.host)) {
            // An unknown or stale instance is assumed to run and to be supervised.
            let doubt = seen.unknown || stale_after.is_some_and(|limit| observed.age(seen) > limit);
            let supervised = seen.specs.registered.spec().filter(|_| doubt || seen.hosted != Some(false));
            let running = seen.specs.live.spec().filter(|_| doubt || seen.running != Some(false));
            let mut identities: Vec<String> =
                [supervised, running].into_iter().flatten().map(|spec| spec.identity.index_key()).collect();
            identities.dedup();
            for identity in identities {
                slots.entry((&key.host, identity)).or_default().push(key);
            }
        }
        IdentityIndex(slots)
    }

    /// Other instances with the identity that a chain starts a process with.
    pub fn identity_blockers(&self, chain: &Chain<'a>) -> impl Iterator<Item = &'a InstanceKey> {
        let (key, from) = (chain.key, chain.from);
        let want = chain.want.filter(|_| !self.0.is_empty() && arrives(chain));
        let slot = want.map(|want| (&chain.key.host, want.spec.identity.index_key()));
        let found = slot.and_then(|slot| self.0.get(&slot)).into_iter().flatten().copied();
        found.filter(move |other| *other != key && Some(*other) != from)
    }
}

/// Whether a chain claims an identity.
fn arrives(chain: &Chain<'_>) -> bool {
    chain.steps.iter().any(|draft| claims_identity(chain.want, draft.op))
}

/// A start claims the identity; for a periodic process, supervision does.
pub fn claims_identity(want: Option<&DesiredInstance>, op: Op) -> bool {
    let periodic = want.is_some_and(|want| want.spec.monitor.auto_type == AutoType::Periodic);
    op == Op::Start || (periodic && op == Op::Supervise)
}
