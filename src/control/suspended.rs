//! Suspended instances: stored for readers and for the next controller.
//!
//! `left/OWNER/INSTANCE` exists while an instance is suspended. An instance that was rolled back stays suspended
//! after a restart while its declaration is unchanged.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::{Desired, DesiredInstance, HoldReason, InstanceKey};
use crate::store::{Error, Store, Txn, keys};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Suspended {
    /// The hold reason.
    pub reason: String,
    pub why: String,
    /// Digest of the declaration.
    pub asked: String,
}

impl Suspended {
    pub fn new(reason: HoldReason, why: &str, want: Option<&DesiredInstance>) -> Suspended {
        Suspended { reason: reason.word().to_owned(), why: why.to_owned(), asked: request_digest(want) }
    }

    /// Whether the suspension outlasts a restart.
    pub fn still_applies(&self, key: &InstanceKey, desired: &Desired) -> bool {
        self.reason == HoldReason::RolledBack.word()
            && self.asked == request_digest(desired.instances.get(key))
    }

    pub fn reason(&self) -> HoldReason {
        match self.reason == HoldReason::RolledBack.word() {
            true => HoldReason::RolledBack,
            false => HoldReason::NotConverging,
        }
    }
}

fn request_digest(want: Option<&DesiredInstance>) -> String {
    want.map(|want| format!("{} {}", want.origin.state.word(), want.spec.revision())).unwrap_or_default()
}

pub type SuspendedInstances = BTreeMap<InstanceKey, Suspended>;

pub async fn read<S: Store>(state: &S, owner: &str) -> Result<SuspendedInstances, Error> {
    let page = state.range(&keys::suspended_prefix(owner), None, usize::MAX).await?;
    let one = |entry: &crate::store::Entry| {
        let key = keys::suspended_instance_of(&entry.key, owner)?;
        Some((key, serde_json::from_slice(&entry.value).ok()?))
    };
    Ok(page.entries.iter().filter_map(one).collect())
}

/// Of all owners.
pub async fn read_all_owners<S: Store>(state: &S) -> Result<SuspendedInstances, Error> {
    let page = state.range(keys::SUSPENDED_PREFIX, None, usize::MAX).await?;
    let one = |entry: &crate::store::Entry| {
        Some((keys::suspended_instance(&entry.key)?, serde_json::from_slice(&entry.value).ok()?))
    };
    Ok(page.entries.iter().filter_map(one).collect())
}

/// The transaction from one state to the other; `None`: they are equal.
pub fn diff(owner: &str, before: &SuspendedInstances, now: &SuspendedInstances) -> Option<Txn> {
    let gone = before
        .keys()
        .filter(|key| !now.contains_key(*key))
        .map(|key| Txn::delete(keys::suspended(owner, key)));
    let new = now.iter().filter(|(key, left)| before.get(*key) != Some(left)).map(|(key, left)| {
        Txn::put(keys::suspended(owner, key), serde_json::to_vec(left).unwrap_or_default())
    });
    gone.chain(new).reduce(Txn::and)
}
