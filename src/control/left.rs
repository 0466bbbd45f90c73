//! What the loop gave up on, for whoever asks, and for the loop that comes after it.
//!
//! `left/OWNER/INSTANCE` is there from the moment that it is given up until something changes. What was put back after a
//! failed rollout stays given up over a restart, for as long as it is asked for in the same way.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::{Desired, InstanceKey, Reason, Want};
use crate::store::{Error, Store, Txn};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// The word of it.
    pub reason: String,
    pub why: String,
    /// What was asked for, as a digest.
    pub asked: String,
}

const PLACE: &str = "left/";

fn place(owner: &str) -> String {
    format!("{PLACE}{owner}/")
}

impl Left {
    pub fn new(reason: Reason, why: &str, want: Option<&Want>) -> Left {
        Left { reason: reason.word().to_owned(), why: why.to_owned(), asked: asked(want) }
    }

    /// Is it still given up by somebody who begins anew?
    pub fn lasts(&self, key: &InstanceKey, desired: &Desired) -> bool {
        self.reason == Reason::RolledBack.word() && self.asked == asked(desired.instances.get(key))
    }

    pub fn reason(&self) -> Reason {
        match self.reason == Reason::RolledBack.word() {
            true => Reason::RolledBack,
            false => Reason::NotConverging,
        }
    }
}

fn asked(want: Option<&Want>) -> String {
    want.map(|want| format!("{} {}", want.origin.state.word(), want.spec.revision())).unwrap_or_default()
}

pub type All = BTreeMap<InstanceKey, Left>;

pub async fn read<S: Store>(state: &S, owner: &str) -> Result<All, Error> {
    let place = place(owner);
    let page = state.range(&place, None, usize::MAX).await?;
    let one = |entry: &crate::store::Entry| {
        let key = entry.key.strip_prefix(&place)?.parse().ok()?;
        Some((key, serde_json::from_slice(&entry.value).ok()?))
    };
    Ok(page.entries.iter().filter_map(one).collect())
}

/// Of all owners.
pub async fn everybodys<S: Store>(state: &S) -> Result<All, Error> {
    let page = state.range(PLACE, None, usize::MAX).await?;
    let one = |entry: &crate::store::Entry| {
        let (_, key) = entry.key.strip_prefix(PLACE)?.rsplit_once('/')?;
        Some((key.parse().ok()?, serde_json::from_slice(&entry.value).ok()?))
    };
    Ok(page.entries.iter().filter_map(one).collect())
}

/// What makes the one into the other; `None`: they are the same.
pub fn change(owner: &str, before: &All, now: &All) -> Option<Txn> {
    let place = place(owner);
    let gone =
        before.keys().filter(|key| !now.contains_key(*key)).map(|key| Txn::delete(format!("{place}{key}")));
    let new = now
        .iter()
        .filter(|(key, left)| before.get(*key) != Some(left))
        .map(|(key, left)| Txn::put(format!("{place}{key}"), serde_json::to_vec(left).unwrap_or_default()));
    gone.chain(new).reduce(Txn::and)
}
