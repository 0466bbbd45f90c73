//! Row digests: the digests that a reader of rows gets in place of secrets.
//!
//! With `digests=keyed` a reader gets digests under the key of the row's owner, and the key if its grant covers the
//! owner. A client of an earlier version compares plain digests, and gets them with the same grant only; other readers get
//! no digest. Keys are derived from one root key in the store. No stored value depends on it, so a lost or unreadable root
//! key is replaced.

use std::collections::BTreeMap;

use tracing::error;

use super::Gateway;
use crate::access::Grant;
use crate::contract::GatewayProcess;
use crate::error_chain::chain;
use crate::ids::fresh_key;
use crate::model::{DigestKey, SpecRevision};
use crate::store::{Store, Txn, keys};

/// Start of a keyed revision as text, which no client takes for a plain one.
const KEYED_FORM: &str = "v2";
/// Attempts to create the root key: another gateway may do the same.
const MAX_ATTEMPTS: usize = 3;

/// The digests of a row, for its reader.
pub(super) enum RowDigests {
    Plain,
    Keyed(DigestKey),
    /// None: the secrets cannot be compared.
    Hidden,
}

impl RowDigests {
    pub(super) fn key(&self) -> Option<&DigestKey> {
        match self {
            RowDigests::Keyed(key) => Some(key),
            RowDigests::Plain | RowDigests::Hidden => None,
        }
    }
}

/// A reader of rows.
pub(super) struct RowReader<'a> {
    pub(super) grant: &'a Grant,
    wants_keyed: bool,
    root: Option<[u8; 32]>,
}

impl RowReader<'_> {
    /// The digests in a row of a process of this owner.
    pub(super) fn digests(&self, owner: Option<&str>) -> RowDigests {
        let owner = owner.unwrap_or_default();
        match (self.wants_keyed, &self.root) {
            (true, Some(root)) => RowDigests::Keyed(DigestKey::of_owner(root, owner)),
            (false, _) if self.grant.check_secret_key(owner).is_ok() => RowDigests::Plain,
            (true, None) | (false, _) => RowDigests::Hidden,
        }
    }

    /// The keys of these rows that the reader may have, by id.
    pub(super) fn keys<'r>(
        &self,
        rows: impl IntoIterator<Item = &'r GatewayProcess>,
    ) -> BTreeMap<String, String> {
        let Some(root) = &self.root else { return BTreeMap::new() };
        let mut keys = BTreeMap::new();
        for row in rows {
            let owner = row.owner.as_deref().unwrap_or_default();
            let Some(id) = &row.secret_key else { continue };
            if !keys.contains_key(id) && self.grant.check_secret_key(owner).is_ok() {
                keys.insert(id.clone(), hex::encode(DigestKey::of_owner(root, owner).expose()));
            }
        }
        keys
    }
}

impl<S: Store> Gateway<S> {
    pub(super) async fn row_reader<'a>(&self, wants_keyed: bool, grant: &'a Grant) -> RowReader<'a> {
        let root = if wants_keyed { self.secret_root().await } else { None };
        RowReader { grant, wants_keyed, root }
    }

    /// The label `abide_rev` of a spec with secrets. Without a grant to the owner's key: keyed, with the key's id.
    pub(super) async fn revision_label(
        &self,
        revision: &SpecRevision,
        owner: Option<&str>,
        grant: &Grant,
    ) -> Option<String> {
        let owner = owner.unwrap_or_default();
        if grant.check_secret_key(owner).is_ok() {
            return Some(revision.to_string());
        }
        let key = DigestKey::of_owner(&self.secret_root().await?, owner);
        let keyed = key.keyed_revision(revision).to_string();
        Some(format!("{KEYED_FORM}.{}.{}", key.id(), keyed.split_once('.')?.1))
    }

    /// The root key, created on the first use. `None`: the store can neither provide nor keep one.
    pub(super) async fn secret_root(&self) -> Option<[u8; 32]> {
        for _ in 0..MAX_ATTEMPTS {
            let stored = match self.store.get(keys::SECRET_ROOT).await {
                Ok(stored) => stored,
                Err(error) => {
                    error!(error = %chain(&error), "cannot read the key of the digests of secrets");
                    return None;
                }
            };
            let number = stored.as_ref().map_or(0, |entry| entry.mod_seq);
            if let Some(entry) = stored {
                match hex::decode(&*entry.value).ok().and_then(|bytes| bytes.try_into().ok()) {
                    Some(root) => return Some(root),
                    None => error!("the key of the digests of secrets is not valid: a new key replaces it"),
                }
            }
            let new = Txn::put(keys::SECRET_ROOT, fresh_key()).only_if(keys::SECRET_ROOT, number);
            if let Err(error) = self.store.txn(new).await {
                error!(error = %chain(&error), "cannot store a key of the digests of secrets");
                return None;
            }
        }
        None
    }
}
