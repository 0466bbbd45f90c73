//! Resolution of the inventories that a run needs: reads each once, and falls back to the last good snapshot.
//!
//! Fails closed: an inventory without new and without last good hosts is unresolved, and nothing is planned.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::last_good::{LastGoodSnapshot, lost_hosts, read_last_good, store_last_good};
use super::{InventoryFault, InventorySnapshot, InventorySource};
use crate::manifest::ReplacementText;
use crate::manifest::inventory::stand_ins;
use crate::model::{Amount, Time};
use crate::store::{Error, Store};

/// The hosts of an inventory for one run.
#[derive(Debug)]
pub struct ResolvedInventory {
    pub text: Arc<str>,
    pub hosts: usize,
    pub at: Time,
    /// Reason why the last good hosts are used.
    pub fault: Option<InventoryFault>,
    pub notes: Vec<String>,
    /// A new snapshot, to be stored after the run.
    new: Option<InventorySnapshot>,
}

/// The inventories of a run by name.
#[derive(Debug, Default)]
pub struct ResolvedInventories(pub BTreeMap<String, ResolvedInventory>);

/// An inventory whose hosts are not known.
#[derive(Debug)]
pub struct UnresolvedInventory {
    pub name: String,
    pub why: InventoryFault,
}

impl ResolvedInventories {
    /// The snapshots as files of the manifest set.
    pub fn stand_ins(&self) -> BTreeMap<String, ReplacementText> {
        stand_ins(self.0.iter().map(|(name, one)| (name.as_str(), &one.text)))
    }

    /// Makes the new snapshots the last good ones.
    pub async fn store_new<S: Store>(&self, state: &S, owner: &str) -> Result<(), Error> {
        for (name, resolved) in &self.0 {
            if let Some(new) = &resolved.new {
                store_last_good(state, owner, name, new).await?;
            }
        }
        Ok(())
    }
}

/// Reads the inventories. `state`: has the last good snapshots of the owner; `None`: the target has no state yet.
/// `accepted`: inventories that may lose any number of hosts.
pub async fn resolve<S: Store>(
    names: &BTreeSet<String>,
    sources: &BTreeMap<String, InventorySource>,
    state: Option<(&S, &str)>,
    accepted: &BTreeSet<String>,
) -> Result<Result<ResolvedInventories, Vec<UnresolvedInventory>>, Error> {
    let read = names.iter().map(|name| async move {
        let last = match state {
            Some((state, owner)) => read_last_good(state, owner, name).await?,
            None => None,
        };
        let new = match sources.get(name) {
            Some(source) => source.read().await.map_err(InventoryFault::from),
            None => Err(InventoryFault::NotDefined),
        };
        let max_shrink = sources.get(name).map(|source| source.max_shrink);
        let limit = max_shrink.filter(|_| !accepted.contains(name));
        Ok::<_, Error>((name, judge(new, last, limit)))
    });
    let (mut resolved, mut unresolved) = (ResolvedInventories::default(), Vec::new());
    for done in futures_util::future::join_all(read).await {
        match done? {
            (name, Ok(one)) => drop(resolved.0.insert(name.clone(), one)),
            (name, Err(why)) => {
                unresolved.push(UnresolvedInventory { name: name.clone(), why });
            }
        }
    }
    Ok(if unresolved.is_empty() { Ok(resolved) } else { Err(unresolved) })
}

/// The hosts to use. `max_shrink`: `None` accepts any loss.
fn judge(
    new: Result<InventorySnapshot, InventoryFault>,
    last: Option<LastGoodSnapshot>,
    max_shrink: Option<Amount>,
) -> Result<ResolvedInventory, InventoryFault> {
    let fault = match (new, &last) {
        (Ok(new), last) => {
            let lost = last
                .as_ref()
                .zip(max_shrink)
                .and_then(|(last, max_shrink)| lost_hosts(&last.text, &new.text, max_shrink));
            match lost {
                Some(lost) => InventoryFault::Lost(lost),
                None => {
                    return Ok(ResolvedInventory {
                        text: Arc::clone(&new.text),
                        hosts: new.hosts,
                        at: new.at,
                        fault: None,
                        notes: new.notes.clone(),
                        new: Some(new),
                    });
                }
            }
        }
        (Err(why), _) => why,
    };
    match last {
        Some(LastGoodSnapshot { at, hosts, text }) => {
            Ok(ResolvedInventory { text, hosts, at, fault: Some(fault), notes: Vec::new(), new: None })
        }
        None => Err(fault),
    }
}
