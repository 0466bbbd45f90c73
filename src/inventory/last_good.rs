//! Last good snapshots in the state store, and the rule that protects them from a shrunken inventory.
//!
//! A large snapshot is stored in chunks, which are written before the entry that names them: a reader sees the old or
//! the new snapshot as a whole.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::InventorySnapshot;
use crate::manifest::inventory::host_keys;
use crate::model::{Amount, HostKey, Time};
use crate::store::{Error, Store, Txn, TxnOutcome, keys};

/// Maximum bytes of a chunk.
const CHUNK_BYTES: usize = 1 << 20;
/// Maximum attempts to read or write while others write.
const MAX_ATTEMPTS: usize = 5;

/// The last good hosts of an inventory.
#[derive(Clone, Debug)]
pub struct LastGoodSnapshot {
    pub at: Time,
    pub hosts: usize,
    pub text: Arc<str>,
}

/// The entry that names the chunks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct StoredSnapshot {
    at: Time,
    hosts: usize,
    bytes: usize,
    /// Digest of the text, which is also part of the chunks' keys.
    digest: String,
    chunks: usize,
}

/// Hosts of the last good snapshot that a new one lacks, if they are more than allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostHosts {
    pub lost: usize,
    pub of: usize,
    pub allowed: usize,
    /// Some of them.
    pub some: Vec<HostKey>,
}

impl std::fmt::Display for LostHosts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let LostHosts { lost, of, allowed, some } = self;
        let names: Vec<String> = some.iter().map(HostKey::to_string).collect();
        let more = if *lost > some.len() { ", …" } else { "" };
        write!(
            f,
            "the inventory lost {lost} of {of} hosts, and may lose {allowed} at once: {}{more}",
            names.join(", ")
        )
    }
}

/// The shrink rule: a read may lose one host, or the share or count of `max_shrink`, whichever is more. Lost hosts count
/// even where as many new ones appear.
pub fn lost_hosts(last: &str, new: &str, max_shrink: Amount) -> Option<LostHosts> {
    if last == new {
        return None;
    }
    let (last, new) = (host_keys(last).ok()?, host_keys(new).ok()?);
    let lost: Vec<&HostKey> = last.difference(&new).collect();
    let limit = match max_shrink {
        Amount::Count(count) => usize::try_from(count).unwrap_or(usize::MAX),
        Amount::Share(share) => (last.len() as f64 * share.get() / 100.0).floor() as usize,
    };
    let allowed = limit.max(1);
    (lost.len() > allowed).then(|| LostHosts {
        lost: lost.len(),
        of: last.len(),
        allowed,
        some: lost.into_iter().take(3).cloned().collect(),
    })
}

/// The last good snapshot of an owner's inventory.
pub async fn read_last_good<S: Store>(
    state: &S,
    owner: &str,
    inventory: &str,
) -> Result<Option<LastGoodSnapshot>, Error> {
    let key = keys::inventory(owner, inventory);
    let mut missing = String::new();
    for _ in 0..MAX_ATTEMPTS {
        let Some(entry) = state.get(&key).await? else { return Ok(None) };
        let stored: StoredSnapshot = entry.decode()?;
        let mut bytes = Vec::with_capacity(stored.bytes.min(super::MAX_BYTES * 4));
        missing.clear();
        for nth in 0..stored.chunks {
            let chunk = keys::inventory_chunk(owner, inventory, &stored.digest, nth);
            match state.get(&chunk).await? {
                Some(entry) => bytes.extend_from_slice(&entry.value),
                // Another controller replaced the snapshot meanwhile: read its entry again.
                None => {
                    missing = chunk;
                    break;
                }
            }
        }
        if !missing.is_empty() {
            continue;
        }
        let is_whole = digest(&bytes) == stored.digest;
        let text = String::from_utf8(bytes).ok().filter(|_| is_whole);
        let damaged = || Error::Corrupt { file: key.clone(), what: "the digest differs".to_owned() };
        let text = text.ok_or_else(damaged)?.into();
        return Ok(Some(LastGoodSnapshot { at: stored.at, hosts: stored.hosts, text }));
    }
    Err(Error::Corrupt { file: missing, what: "the entry is missing".to_owned() })
}

/// Replaces the last good snapshot. Equal hosts write nothing.
pub async fn store_last_good<S: Store>(
    state: &S,
    owner: &str,
    inventory: &str,
    new: &InventorySnapshot,
) -> Result<(), Error> {
    let key = keys::inventory(owner, inventory);
    let digest = digest(new.text.as_bytes());
    let chunks = split(&new.text);
    let value = StoredSnapshot {
        at: new.at,
        hosts: new.hosts,
        bytes: new.text.len(),
        digest: digest.clone(),
        chunks: chunks.len(),
    };
    for _ in 0..MAX_ATTEMPTS {
        let entry = state.get(&key).await?;
        let before: Option<StoredSnapshot> = entry.as_ref().and_then(|entry| entry.decode().ok());
        if before.as_ref().is_some_and(|before| before.digest == digest) {
            return Ok(());
        }
        for (nth, chunk) in chunks.iter().enumerate() {
            let chunk_key = keys::inventory_chunk(owner, inventory, &digest, nth);
            state.txn(Txn::put(chunk_key, *chunk)).await?;
        }
        let mut txn = Txn::put(&key, serde_json::to_vec(&value).unwrap_or_default())
            .only_if(&key, entry.map_or(0, |entry| entry.mod_seq));
        if let Some(before) = before {
            for nth in 0..before.chunks {
                txn = txn.and(Txn::delete(keys::inventory_chunk(owner, inventory, &before.digest, nth)));
            }
        }
        match state.txn(txn).await? {
            TxnOutcome::Written(_) => return Ok(()),
            TxnOutcome::Conflict(_) => {}
        }
    }
    Err(Error::Contended { key })
}

/// Chunks of a text: values of a remote store are text, so each ends at a character.
fn split(mut text: &str) -> Vec<&str> {
    let mut chunks = Vec::new();
    while !text.is_empty() {
        let (chunk, rest) = text.split_at(text.floor_char_boundary(CHUNK_BYTES));
        chunks.push(chunk);
        text = rest;
    }
    chunks
}

fn digest(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..32].to_owned()
}

/// The hosts of a snapshot that differ from another: added and lost.
pub fn changed_hosts(last: &str, new: &str) -> (usize, usize) {
    let keys = |text: &str| host_keys(text).unwrap_or_default();
    let (last, new): (BTreeSet<HostKey>, BTreeSet<HostKey>) = (keys(last), keys(new));
    (new.difference(&last).count(), last.difference(&new).count())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::inventory::{InventoryHost, snapshot as lines_to_snapshot, snapshot_line};
    use crate::model::Host;

    fn snapshot(hosts: impl Iterator<Item = u32>) -> String {
        let host = |n: u32| InventoryHost {
            host: Host {
                key: format!("0:10.0.{}.{}", n / 250, n % 250).parse().expect("a host"),
                supplier: None,
                agent_id: None,
            },
            labels: Default::default(),
            vars: Default::default(),
        };
        let lines: Vec<String> = hosts.map(|n| snapshot_line(host(n))).collect();
        lines_to_snapshot(lines.iter().map(String::as_str))
    }

    #[test]
    fn one_host_or_a_fifth_may_be_lost() {
        let share = Amount::Share(Amount::share("20%").expect("a share"));
        let lost = |before: u32, from: u32, share| {
            lost_hosts(&snapshot(0..before), &snapshot(from..before), share)
                .map(|lost| (lost.lost, lost.allowed))
        };
        assert_eq!(lost(3, 1, share), None);
        assert_eq!(lost(3, 2, share), Some((2, 1)));
        assert_eq!(lost(10, 2, share), None);
        assert_eq!(lost(10, 3, share), Some((3, 2)));
        assert_eq!(lost(10, 3, Amount::Count(3)), None);
        assert_eq!(lost(10, 10, share), Some((10, 2)));
        assert_eq!(lost(10, 2, Amount::Count(0)), Some((2, 1)));
    }

    #[test]
    fn replaced_hosts_are_lost_hosts() {
        let share = Amount::Share(Amount::share("20%").expect("a share"));
        let lost = lost_hosts(&snapshot(0..10), &snapshot(5..15), share).expect("lost");
        assert_eq!(
            lost.to_string(),
            "the inventory lost 5 of 10 hosts, and may lose 2 at once: 0:10.0.0.0, 0:10.0.0.1, 0:10.0.0.2, …"
        );
        assert_eq!(changed_hosts(&snapshot(0..10), &snapshot(5..15)), (5, 5));
        assert_eq!(lost_hosts(&snapshot(0..10), &snapshot(0..20), share), None);
    }
}
