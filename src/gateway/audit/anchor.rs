//! Anchor: the head of the chain in the store, so that removed and replaced entries are found.
//!
//! The file is synced first, then the anchor is written: all entries up to an anchor are on disk. Old files are deleted
//! after an anchor that no longer counts them.

use serde::{Deserialize, Serialize};

use super::chain::{ChainHash, ChainHead};

/// Stored head of a chain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuditAnchor {
    pub chain: String,
    /// The last entry.
    pub seq: u64,
    /// Its hash.
    pub hash: String,
    /// The oldest entry that is kept.
    pub first: u64,
}

impl AuditAnchor {
    pub fn of(head: &ChainHead, first: u64) -> AuditAnchor {
        AuditAnchor { chain: head.chain.clone(), seq: head.seq, hash: head.hash.to_hex(), first }
    }

    /// The position in the chain. `None`: the hash is not valid.
    pub fn head(&self) -> Option<ChainHead> {
        let hash = ChainHash::parse(&self.hash)?;
        Some(ChainHead { chain: self.chain.clone(), seq: self.seq, hash })
    }
}
