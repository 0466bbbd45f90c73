//! Protections of live instances: `protect` outlasts its manifest.
//!
//! `protect/INSTANCE` is written when a revision with `protect` becomes active. A manifest that declares the instance
//! without it deletes the entry, and so does `abide unprotect`. Deleting the file changes nothing: prune holds the instance.
//! GSE also keeps the protections as a label of the process, which other control hosts read. There `abide unprotect` writes
//! an entry without protections, which ends those of the label.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::model::{Desired, InstanceKey, Protection, Selection};
use crate::store::{Error, Store, Txn, keys};

/// Maximum number of entries per transaction.
const MAX_WRITES: usize = 500;

pub type Protections = BTreeMap<InstanceKey, Vec<Protection>>;

#[derive(Serialize, Deserialize)]
struct StoredProtection {
    /// Words of [`Protection`].
    protect: Vec<String>,
    owner: String,
}

/// All stored protections. An entry that cannot be read forbids everything: a person asked for something there.
pub async fn read<S: Store>(state: &S) -> Result<Protections, Error> {
    let stored = read_with_owners(state).await?;
    Ok(stored.into_iter().map(|(key, (protections, _))| (key, protections)).collect())
}

/// All stored protections with the owners that declared them; `None`: the entry cannot be read.
async fn read_with_owners<S: Store>(
    state: &S,
) -> Result<BTreeMap<InstanceKey, (Vec<Protection>, Option<String>)>, Error> {
    let page = state.range(keys::PROTECTION_PREFIX, None, usize::MAX).await?;
    let one = |entry: &crate::store::Entry| {
        let key = keys::protected_instance(&entry.key)?;
        let Ok(stored) = serde_json::from_slice::<StoredProtection>(&entry.value) else {
            return Some((key, (Protection::ALL.to_vec(), None)));
        };
        let is_named = |one: &Protection| stored.protect.iter().any(|word| word == one.word());
        Some((key, (Protection::ALL.into_iter().filter(is_named).collect(), Some(stored.owner))))
    };
    Ok(page.entries.iter().filter_map(one).collect())
}

/// Records the protections of a revision that becomes active. Those of another owner stay as they are.
pub async fn record<S: Store>(
    state: &S,
    owner: &str,
    desired: &Desired,
    selection: &Selection,
) -> Result<(), Error> {
    let stored = read_with_owners(state).await?;
    let mut txn = Txn::default();
    for (key, want) in &desired.instances {
        let protect = &want.origin.protect;
        let stored = stored.get(key);
        let is_foreign = stored.is_some_and(|(_, by)| by.as_deref().is_some_and(|by| by != owner));
        // An entry without protections ends those of a label, until a manifest declares the process again.
        let is_same =
            stored.map_or(protect.is_empty(), |(stored, _)| !stored.is_empty() && is_equal(stored, protect));
        if is_same || is_foreign || !selection.selects(key, Some(&want.origin.declared), &want.spec.labels) {
            continue;
        }
        txn = txn.and(match protect.is_empty() {
            true => Txn::delete(keys::protection(key)),
            false => put(key, owner, protect),
        });
        if txn.writes.len() >= MAX_WRITES {
            state.txn(std::mem::take(&mut txn)).await?;
        }
    }
    if !txn.writes.is_empty() {
        state.txn(txn).await?;
    }
    Ok(())
}

fn put(key: &InstanceKey, owner: &str, protect: &[Protection]) -> Txn {
    let protect = protect.iter().map(|one| one.word().to_owned()).collect();
    let value = StoredProtection { protect, owner: owner.to_owned() };
    Txn::put(keys::protection(key), serde_json::to_vec(&value).unwrap_or_default())
}

fn is_equal(one: &[Protection], other: &[Protection]) -> bool {
    one.iter().all(|protection| other.contains(protection))
        && other.iter().all(|protection| one.contains(protection))
}

/// Ends the protections of these instances. An instance that has them as a label has its owner here.
pub async fn end<S: Store>(state: &S, instances: &[(InstanceKey, Option<String>)]) -> Result<(), Error> {
    for part in instances.chunks(MAX_WRITES) {
        let txn = part.iter().fold(Txn::default(), |txn, (key, owner)| {
            txn.and(match owner {
                Some(owner) => put(key, owner, &[]),
                None => Txn::delete(keys::protection(key)),
            })
        });
        state.txn(txn).await?;
    }
    Ok(())
}
