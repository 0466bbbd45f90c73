//! Budgets of known callers: requests in flight and memory of their bodies, shared fairly between credentials.
//!
//! A credential gets a permit, or memory, while it holds less than what is still free. One credential therefore gets at
//! most half of a budget, two get a third each, and a further credential always finds some. Many credentials with one
//! request each can use all of it. Tokens of all hosts share a part of the budget in the same way, one unit per peer.
//! Memory is charged as bytes arrive, never in advance. A credential may have limits of its own that are lower.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard};

use super::credential_key::CredentialKey;
use super::overload::LimitedResource;

/// Requests in flight and their received bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Usage {
    requests: usize,
    bytes: usize,
}

/// Configured limits of one credential. `None`: only its share limits it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CredentialLimits {
    /// Requests in flight.
    pub requests: Option<usize>,
    /// Bytes of their bodies.
    pub bytes: Option<usize>,
}

/// Maximum concurrent requests and received bytes of one class of authenticated callers.
pub struct Budget {
    resource: LimitedResource,
    most: Usage,
    usage: Mutex<BudgetUsage>,
}

#[derive(Default)]
struct BudgetUsage {
    total: Usage,
    /// Usage of all credentials whose scope has a part of the budget.
    group: Usage,
    credentials: HashMap<CredentialKey, Usage>,
}

/// Amount that a credential may still take: the rest of the budget, and of its group.
fn free_for(credential: Option<CredentialKey>, most: usize, total: usize, group: usize) -> usize {
    let of_group = credential.and_then(|credential| credential.group_share(most));
    let free = most.saturating_sub(total);
    of_group.map_or(free, |most| free.min(most.saturating_sub(group)))
}

impl Budget {
    /// `resource`: exhausted when all permits are in use.
    pub fn new(resource: LimitedResource, requests: usize, bytes: usize) -> Budget {
        Budget { resource, most: Usage { requests, bytes }, usage: Mutex::default() }
    }

    fn usage(&self) -> MutexGuard<'_, BudgetUsage> {
        self.usage.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Takes a permit. A request without a credential key has no share: its listener has a single credential.
    pub(super) fn charge(
        &self,
        credential: Option<CredentialKey>,
        limits: CredentialLimits,
    ) -> Result<Charge<'_>, LimitedResource> {
        let mut usage = self.usage();
        if usage.total.requests >= self.most.requests {
            return Err(self.resource);
        }
        if let Some(credential) = credential {
            let (total, group) = (usage.total.requests, usage.group.requests);
            let free = free_for(Some(credential), self.most.requests, total, group);
            let own = usage.credentials.get(&credential).copied().unwrap_or_default();
            if limits.requests.is_some_and(|most| own.requests >= most) {
                return Err(LimitedResource::CredentialRequests);
            }
            if own.requests >= free {
                return Err(LimitedResource::CredentialShare);
            }
            usage.credentials.entry(credential).or_default().requests += 1;
            usage.group.requests += usize::from(credential.is_of_all_hosts());
        }
        usage.total.requests += 1;
        Ok(Charge { budget: self, credential, limits, bytes: 0 })
    }
}

/// A request's part of a budget, released on drop.
pub struct Charge<'a> {
    budget: &'a Budget,
    credential: Option<CredentialKey>,
    limits: CredentialLimits,
    bytes: usize,
}

impl Charge<'_> {
    /// Charges received bytes.
    pub(super) fn add(&mut self, more: usize) -> Result<(), LimitedResource> {
        let mut usage = self.budget.usage();
        let most = self.budget.most.bytes;
        let (total, group) = (usage.total.bytes, usage.group.bytes);
        if more > most.saturating_sub(total) {
            return Err(LimitedResource::BodyMemory);
        }
        let left = free_for(self.credential, most, total, group).checked_sub(more);
        let is_of_all_hosts = self.credential.is_some_and(CredentialKey::is_of_all_hosts);
        if let Some(own) = self.credential.and_then(|credential| usage.credentials.get_mut(&credential)) {
            if self.limits.bytes.is_some_and(|most| own.bytes.saturating_add(more) > most) {
                return Err(LimitedResource::CredentialBytes);
            }
            if left.is_none_or(|left| own.bytes.saturating_add(more) > left) {
                return Err(LimitedResource::CredentialShare);
            }
            own.bytes += more;
        }
        if is_of_all_hosts {
            usage.group.bytes += more;
        }
        usage.total.bytes += more;
        self.bytes += more;
        Ok(())
    }
}

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        let mut usage = self.budget.usage();
        let release = |usage: &mut Usage| {
            usage.requests = usage.requests.saturating_sub(1);
            usage.bytes = usage.bytes.saturating_sub(self.bytes);
        };
        release(&mut usage.total);
        if self.credential.is_some_and(CredentialKey::is_of_all_hosts) {
            release(&mut usage.group);
        }
        if let Some(credential) = self.credential
            && let Some(own) = usage.credentials.get_mut(&credential)
        {
            release(own);
            if own.requests == 0 {
                usage.credentials.remove(&credential);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::credential_key::CredentialScope;
    use super::*;

    const NONE: CredentialLimits = CredentialLimits { requests: None, bytes: None };

    fn app(name: &str) -> Option<CredentialKey> {
        Some(CredentialKey::new(CredentialScope::Clients, name))
    }

    fn is_empty(budget: &Budget) -> bool {
        let usage = budget.usage();
        let nothing = Usage::default();
        usage.total == nothing && usage.group == nothing && usage.credentials.is_empty()
    }

    /// Charges of a credential until the first refusal.
    fn fill<'a>(
        budget: &'a Budget,
        credential: Option<CredentialKey>,
    ) -> (Vec<Charge<'a>>, Option<LimitedResource>) {
        let mut held = Vec::new();
        loop {
            match budget.charge(credential, NONE) {
                Ok(charge) => held.push(charge),
                Err(resource) => return (held, Some(resource)),
            }
        }
    }

    #[test]
    fn one_credential_gets_half_of_the_permits_and_another_half_of_the_rest() {
        let budget = Budget::new(LimitedResource::KnownCallers, 512, 100);
        let (greedy, why) = fill(&budget, app("greedy"));
        assert_eq!((greedy.len(), why), (256, Some(LimitedResource::CredentialShare)));
        let (second, why) = fill(&budget, app("second"));
        assert_eq!((second.len(), why), (128, Some(LimitedResource::CredentialShare)));
        // The first does not take back what the second released.
        drop(second);
        assert_eq!(budget.charge(app("greedy"), NONE).err(), Some(LimitedResource::CredentialShare));
        drop(greedy);
        assert!(is_empty(&budget));
    }

    #[test]
    fn many_credentials_with_one_request_each_use_all_permits() {
        let budget = Budget::new(LimitedResource::Agents, 512, 100);
        let name = |n: usize| Some(CredentialKey::new(CredentialScope::OneHost, &n.to_string()));
        let held: Vec<_> = (0..512).map(|n| budget.charge(name(n), NONE).expect("a permit")).collect();
        assert_eq!(budget.charge(name(512), NONE).err(), Some(LimitedResource::Agents));
        drop(held);
        assert!(is_empty(&budget));
    }

    #[test]
    fn one_peer_with_a_token_of_all_hosts_leaves_permits_for_its_other_holders_and_for_other_credentials() {
        let budget = Budget::new(LimitedResource::Agents, 512, 100);
        let at = |last: u8| Some(CredentialKey::of_all_hosts("token", [10, 0, 0, last].into()));
        let (greedy, why) = fill(&budget, at(1));
        assert_eq!((greedy.len(), why), (192, Some(LimitedResource::CredentialShare)));
        let (second, _) = fill(&budget, at(2));
        assert_eq!(second.len(), 96, "half of the rest");
        // All peers together leave a quarter.
        let others: Vec<_> = (3..=255).map_while(|last| budget.charge(at(last), NONE).ok()).collect();
        assert_eq!(greedy.len() + second.len() + others.len(), 384);
        let own = Some(CredentialKey::new(CredentialScope::OneHost, "own"));
        assert_eq!(fill(&budget, own).0.len(), 64);
        drop((greedy, second, others));
        let mut body = budget.charge(at(1), NONE).expect("a permit");
        assert_eq!((body.add(37), body.add(1)), (Ok(()), Err(LimitedResource::CredentialShare)));
        drop(body);
        assert!(is_empty(&budget));
    }

    #[test]
    fn a_listener_with_a_single_credential_gives_it_all_permits() {
        let single = Budget::new(LimitedResource::KnownCallers, 64, 100);
        let (held, why) = fill(&single, None);
        assert_eq!((held.len(), why), (64, Some(LimitedResource::KnownCallers)));
    }

    #[test]
    fn one_credential_gets_half_of_the_memory() {
        let budget = Budget::new(LimitedResource::KnownCallers, 16, 100);
        let mut one = budget.charge(app("greedy"), NONE).expect("a permit");
        let mut two = budget.charge(app("greedy"), NONE).expect("a permit");
        assert_eq!((one.add(30), two.add(20)), (Ok(()), Ok(())));
        assert_eq!(two.add(1), Err(LimitedResource::CredentialShare), "half of it");
        let mut other = budget.charge(app("other"), NONE).expect("a permit");
        assert_eq!(other.add(25), Ok(()));
        assert_eq!(other.add(51), Err(LimitedResource::BodyMemory));
        drop((one, two));
        assert_eq!(other.add(25), Ok(()));
        drop(other);
        assert!(is_empty(&budget));
    }

    #[test]
    fn a_configured_limit_is_lower_than_the_share_and_concerns_one_credential() {
        let budget = Budget::new(LimitedResource::KnownCallers, 512, 1000);
        let limits = CredentialLimits { requests: Some(2), bytes: Some(50) };
        let mut one = budget.charge(app("bound"), limits).expect("a permit");
        let two = budget.charge(app("bound"), limits).expect("a permit");
        let third = budget.charge(app("bound"), limits).err();
        assert_eq!(third, Some(LimitedResource::CredentialRequests));
        assert_eq!((one.add(50), one.add(1)), (Ok(()), Err(LimitedResource::CredentialBytes)));
        let mut other = budget.charge(app("other"), NONE).expect("a permit");
        assert_eq!(other.add(400), Ok(()));
        drop(two);
        assert!(budget.charge(app("bound"), limits).is_ok());
        let zero = CredentialLimits { requests: Some(0), bytes: None };
        assert!(budget.charge(app("none"), zero).is_err());
        drop((one, other));
        assert!(is_empty(&budget));
    }
}
