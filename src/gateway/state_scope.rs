//! Scope of the state API: an app reads and writes keys of its owners, and holds and pauses of its namespaces.
//!
//! A hold belongs to the owner of its instance as well: only an app with that owner writes it.
//!
//! Lists leave out other keys. A key or an owner that a request names is refused instead. A ledger entry or a protection
//! belongs to the namespace of its instance and to the owner in its value.

use serde::Deserialize;

use super::{ApiError, Gateway};
use crate::access::{AccessRequest, Grant, MissingGrant, authorize};
use crate::store::{Change, Compare, Entry, KeyScope, Page, Store, Write, keys};

/// Use of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyUse {
    Read,
    Write,
}

/// The owner in the value of a ledger entry or a protection; empty: none.
#[derive(Default, Deserialize)]
#[serde(default)]
struct StoredOwner {
    owner: String,
}

/// Checks one key. `value`: of a ledger entry or a protection.
pub(super) fn check_key_scope(
    grant: &Grant,
    key: &str,
    value: Option<&[u8]>,
    key_use: KeyUse,
) -> Result<(), MissingGrant> {
    let every_namespace = || grant.check_namespace("*");
    match KeyScope::of_key(key) {
        Some(KeyScope::Owner(owner)) => check_owner(grant, owner),
        Some(KeyScope::Hold(instance)) => grant.check_instance(&instance, None),
        Some(KeyScope::Owned(instance)) => {
            let owner = value.and_then(|value| serde_json::from_slice::<StoredOwner>(value).ok());
            let owner = owner.map(|value| value.owner).filter(|owner| !owner.is_empty());
            grant.check_instance(&instance, owner.as_deref())
        }
        Some(KeyScope::Namespace(namespace)) => grant.check_namespace(namespace),
        // Every controller has to honour it.
        Some(KeyScope::AllNamespaces) if key_use == KeyUse::Read => Ok(()),
        Some(KeyScope::AllNamespaces) => every_namespace(),
        None => match grant.sees_everything() {
            true => Ok(()),
            false => every_namespace().and_then(|()| check_owner(grant, "*")),
        },
    }
}

fn check_owner(grant: &Grant, owner: &str) -> Result<(), MissingGrant> {
    authorize(grant, &AccessRequest { state_owner: Some(owner), ..AccessRequest::default() })
}

/// Refuses a prefix of an owner that the app lacks. Other prefixes give filtered lists.
pub(super) fn check_prefix_scope(grant: &Grant, prefix: &str) -> Result<(), MissingGrant> {
    KeyScope::owner_of_prefix(prefix).map_or(Ok(()), |owner| check_owner(grant, owner))
}

pub(super) fn may_read_entry(grant: &Grant, entry: &Entry) -> bool {
    grant.sees_everything() || check_key_scope(grant, &entry.key, Some(&entry.value), KeyUse::Read).is_ok()
}

/// A deletion of a ledger entry shows its key only.
pub(super) fn may_read_change(grant: &Grant, change: &Change) -> bool {
    grant.sees_everything()
        || check_key_scope(grant, &change.key, change.value.as_deref(), KeyUse::Read).is_ok()
}

impl<S: Store> Gateway<S> {
    /// Checks the keys that a transaction writes, and the ledger entries that it replaces.
    pub(super) async fn check_writes(&self, grant: &Grant, writes: &[Write]) -> Result<(), ApiError> {
        if grant.sees_everything() {
            return Ok(());
        }
        for write in writes {
            let (key, value) = match write {
                Write::Put(key, value) => (key, Some(value.as_slice())),
                Write::Delete(key) => (key, None),
            };
            check_key_scope(grant, key, value, KeyUse::Write)?;
            self.check_hold_owner(grant, key).await?;
            self.check_stored_owner(grant, key).await?;
        }
        Ok(())
    }

    /// Checks the keys that a transaction compares: a conflict would show whether an entry exists.
    pub(super) async fn check_compares(&self, grant: &Grant, compares: &[Compare]) -> Result<(), ApiError> {
        for Compare { key, .. } in compares {
            check_key_scope(grant, key, None, KeyUse::Read)?;
            self.check_stored_owner(grant, key).await?;
        }
        Ok(())
    }

    /// Checks the owner of the instance that a hold would stop or keep.
    async fn check_hold_owner(&self, grant: &Grant, key: &str) -> Result<(), ApiError> {
        let Some(KeyScope::Hold(instance)) = KeyScope::of_key(key) else { return Ok(()) };
        if !grant.is_bound_to_owners() {
            return Ok(());
        }
        let owner = match keys::target_of(key) {
            None => self.record(&instance).await?.and_then(|record| record.given.owner),
            // Of a process elsewhere, only the ledger of the target knows the owner.
            Some(target) => {
                let ledger = format!("{target}ledger/");
                let name = format!("/{instance}");
                let entries = self.store.range(&ledger, None, usize::MAX).await?.entries;
                let entry = entries.iter().find(|entry| entry.key.ends_with(&name));
                entry.and_then(|entry| Some(entry.decode::<StoredOwner>().ok()?.owner))
            }
        };
        let owner = owner.filter(|owner| !owner.is_empty());
        Ok(grant.check_instance(&instance, owner.as_deref())?)
    }

    /// Checks the owner in the stored value of a ledger entry or a protection.
    async fn check_stored_owner(&self, grant: &Grant, key: &str) -> Result<(), ApiError> {
        if grant.is_bound_to_owners()
            && let Some(KeyScope::Owned(_)) = KeyScope::of_key(key)
            && let Some(old) = self.store.get(key).await?
        {
            check_key_scope(grant, key, Some(&old.value), KeyUse::Read)?;
        }
        Ok(())
    }

    /// A page of entries that the app may read. `more` is the key of such an entry, too: it shows no other key.
    pub(super) async fn scoped_range(
        &self,
        grant: &Grant,
        prefix: &str,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Page, ApiError> {
        if grant.sees_everything() {
            return Ok(self.store.range(prefix, after, limit).await?);
        }
        let mut page = self.store.range(prefix, after, usize::MAX).await?;
        page.entries.retain(|entry| may_read_entry(grant, entry));
        let has_more = page.entries.len() > limit;
        page.entries.truncate(limit);
        page.more = page.entries.last().filter(|_| has_more).map(|entry| entry.key.clone());
        Ok(page)
    }

    /// Entries by offset and their count, without those that the app may not read.
    pub(super) async fn scoped_slice(
        &self,
        grant: &Grant,
        prefix: &str,
        skip: usize,
        limit: usize,
    ) -> Result<(Vec<Entry>, usize), ApiError> {
        if grant.sees_everything() {
            return Ok(self.store.slice(prefix, skip, limit).await?);
        }
        self.filtered_slice(prefix, skip, limit, |entry| may_read_entry(grant, entry)).await
    }

    /// Entries by offset and their count, of those that `is_visible` selects.
    pub(super) async fn filtered_slice(
        &self,
        prefix: &str,
        skip: usize,
        limit: usize,
        is_visible: impl Fn(&Entry) -> bool,
    ) -> Result<(Vec<Entry>, usize), ApiError> {
        let mut entries = self.store.range(prefix, None, usize::MAX).await?.entries;
        entries.retain(is_visible);
        let count = entries.len();
        Ok((entries.into_iter().skip(skip).take(limit).collect(), count))
    }
}
