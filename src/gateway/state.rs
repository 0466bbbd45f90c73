//! State API: store access over HTTP for controllers, for journals, ledgers, holds and leases.
//!
//! Only controller prefixes are accessible; registrations and agent reports are not. [`super::state_scope`] limits an app
//! to the keys of its owners and namespaces, and [`super::state_secrets`] hides secrets from role `read`.

use std::time::Duration;

use super::state_scope::{KeyUse, check_key_scope, check_prefix_scope, may_read_change};
use super::state_secrets::StateReader;
use super::{ApiError, Gateway};
use crate::access::{AccessRole, Grant};
pub use crate::contract::StoreRequest;
use crate::contract::{
    CompareItem, LeaseAnswer, ResetAnswer, StateChange, StateChanges, StateEntry, StateKept, StatePage,
    StateReleased, StateSlice, StoreAnswer, TxnAnswer, WriteItem,
};
use crate::store::lease::{MAX_RESET, MAX_TTL};
use crate::store::{
    Change, Compare, Entry, Lease, LeaseAttempt, Reset, Seq, Store, Txn, TxnOutcome, Write, keys,
};

/// Maximum entries per response.
const MAX_ENTRIES: usize = 10_000;
/// Maximum wait for changes.
const MAX_WAIT: Duration = Duration::from_secs(30);
/// Maximum bytes in a lease's name.
const MAX_NAME_BYTES: usize = 1024;

impl StoreRequest {
    /// The role that the request needs.
    pub fn role(&self) -> AccessRole {
        match self {
            StoreRequest::Get { .. }
            | StoreRequest::Range { .. }
            | StoreRequest::Slice { .. }
            | StoreRequest::Changes { .. } => AccessRole::Read,
            StoreRequest::Txn { .. }
            | StoreRequest::TakeLease { .. }
            | StoreRequest::RenewLease { .. }
            | StoreRequest::ReleaseLease { .. } => AccessRole::Operate,
            StoreRequest::ResetLease { .. } => AccessRole::Admin,
        }
    }

    /// Whether the audit log has the request as a change. Renewed leases and published status have no entry:
    /// controllers write them continuously.
    pub fn is_recorded(&self) -> bool {
        match self {
            StoreRequest::Get { .. }
            | StoreRequest::Range { .. }
            | StoreRequest::Slice { .. }
            | StoreRequest::Changes { .. }
            | StoreRequest::RenewLease { .. } => false,
            StoreRequest::Txn { writes, .. } => {
                let is_status = |key: &str| without_target(key).starts_with(keys::CONTROLLER_STATUS_PREFIX);
                writes.iter().any(|write| !is_status(&write.key))
            }
            StoreRequest::TakeLease { .. }
            | StoreRequest::ReleaseLease { .. }
            | StoreRequest::ResetLease { .. } => true,
        }
    }

    /// The prefix of stored specs and manifests that the request reads: they may contain secrets.
    pub fn read_of_specs(&self) -> Option<String> {
        const PREFIXES: [&str; 3] = ["journal/", "ledger/", "snap/"];
        let (StoreRequest::Get { key: prefix }
        | StoreRequest::Range { prefix, .. }
        | StoreRequest::Slice { prefix, .. }
        | StoreRequest::Changes { prefix, .. }) = self
        else {
            return None;
        };
        let rest = without_target(prefix);
        let family = PREFIXES.into_iter().find(|family| rest.starts_with(family) || family.starts_with(rest));
        family.map(str::to_owned)
    }
}

/// A key or prefix without `at/TARGET/`. A prefix that ends within that part contains every key of the target.
pub(super) fn without_target(key: &str) -> &str {
    match key.strip_prefix("at/") {
        Some(rest) => rest.split_once('/').map_or("", |(_, rest)| rest),
        None => key,
    }
}

impl<S: Store> Gateway<S> {
    pub async fn state(&self, request: StoreRequest, grant: &Grant) -> Result<StoreAnswer, ApiError> {
        grant.check_role(request.role())?;
        let check_lease_name = |name: String| {
            let name = check_lease_name(name)?;
            check_key_scope(grant, &keys::lease(&name), None, KeyUse::Write)?;
            Ok::<_, ApiError>(name)
        };
        let check_prefix = |prefix: String| {
            let prefix = check_key(prefix)?;
            check_prefix_scope(grant, &prefix)?;
            Ok::<_, ApiError>(prefix)
        };
        let mut reader = StateReader::new(self, grant);
        Ok(match request {
            StoreRequest::Get { key } => {
                let found = self.store.get(&check_key(key.clone())?).await?;
                let value = found.as_ref().map(|entry| &*entry.value);
                check_key_scope(grant, &key, value, KeyUse::Read)?;
                StoreAnswer::Entry(reader.entry(grant, found).await?.as_ref().map(entry))
            }
            StoreRequest::Range { prefix, after, limit } => {
                let limit = limit.unwrap_or(MAX_ENTRIES).min(MAX_ENTRIES);
                let prefix = check_prefix(prefix)?;
                reader.check_prefix(grant, &prefix).await?;
                let page = self.scoped_range(grant, &prefix, after.as_deref(), limit).await?;
                let entries = reader.entries(page.entries).await?.iter().map(entry).collect();
                let more = page.more.as_deref().map(str::to_owned);
                StoreAnswer::Page(StatePage { entries, more, as_of: page.as_of })
            }
            StoreRequest::Slice { prefix, skip, limit } => {
                let prefix = check_prefix(prefix)?;
                reader.check_prefix(grant, &prefix).await?;
                let (entries, count) =
                    self.scoped_slice(grant, &prefix, skip, limit.min(MAX_ENTRIES)).await?;
                let entries = reader.entries(entries).await?;
                StoreAnswer::Slice(StateSlice { entries: entries.iter().map(entry).collect(), count })
            }
            StoreRequest::Txn { compares, writes } => {
                StoreAnswer::Txn(self.state_txn(compares, writes, grant).await?)
            }
            StoreRequest::Changes { prefix, after, wait_ms } => {
                let wait = Duration::from_millis(wait_ms).min(MAX_WAIT);
                let prefix = check_prefix(prefix)?;
                let changes = self.state_changes(&prefix, after, grant, &mut reader);
                let changes = match tokio::time::timeout(wait, changes).await {
                    Ok(changes) => changes?,
                    Err(_) => Vec::new(),
                };
                StoreAnswer::Changes(StateChanges { changes: changes.iter().map(change).collect() })
            }
            StoreRequest::TakeLease { name, holder, lives_ms } => {
                let taken = self.store.take_lease(&check_lease_name(name)?, &holder, ttl(lives_ms)?).await?;
                StoreAnswer::Lease(match taken {
                    LeaseAttempt::Acquired(lease) => LeaseAnswer::Ours { generation: lease.generation },
                    LeaseAttempt::HeldByOther { holder, generation, left_ms } => {
                        LeaseAnswer::Theirs { holder, generation, left_ms }
                    }
                })
            }
            StoreRequest::RenewLease { name, holder, generation, lives_ms } => {
                let lease = Lease { name: check_lease_name(name)?, holder, generation };
                let kept = self.store.renew_lease(&lease, ttl(lives_ms)?).await?;
                StoreAnswer::Kept(StateKept { kept })
            }
            StoreRequest::ReleaseLease { name, holder, generation } => {
                let lease = Lease { name: check_lease_name(name)?, holder, generation };
                self.store.release_lease(&lease).await?;
                StoreAnswer::Released(StateReleased { released: true })
            }
            StoreRequest::ResetLease { name, above, force } => {
                StoreAnswer::Reset(self.state_reset(check_lease_name(name)?, above, force).await?)
            }
        })
    }

    /// Waits for changes that the app may read.
    async fn state_changes(
        &self,
        prefix: &str,
        mut after: Seq,
        grant: &Grant,
        reader: &mut StateReader<'_, S>,
    ) -> Result<Vec<Change>, ApiError> {
        loop {
            let mut changes = self.store.changes(prefix, after).await?;
            after = changes.last().map_or(after, |change| change.number);
            changes.retain(|change| may_read_change(grant, change));
            let changes = reader.changes(changes).await?;
            if !changes.is_empty() {
                return Ok(changes);
            }
        }
    }

    async fn state_reset(&self, name: String, above: u64, force: bool) -> Result<ResetAnswer, ApiError> {
        if above > MAX_RESET {
            return Err(ApiError::BadRequest(format!(
                "above is {above}: the maximum generation is {MAX_RESET}"
            )));
        }
        Ok(match self.store.reset_lease(&name, above, force).await? {
            Reset::Free { generation } => ResetAnswer::Free { generation },
            Reset::Renewed { holder, left_ms } => ResetAnswer::Renewed { holder, left_ms },
        })
    }

    async fn state_txn(
        &self,
        compares: Vec<CompareItem>,
        writes: Vec<WriteItem>,
        grant: &Grant,
    ) -> Result<TxnAnswer, ApiError> {
        let compare = |c: CompareItem| Ok(Compare { key: check_key(c.key)?, mod_seq: c.changed });
        let write = |WriteItem { key, value }: WriteItem| {
            let key = check_key(key)?;
            // A direct write could issue a lease generation twice.
            if key.starts_with(keys::LEASE_PREFIX) {
                return Err(ApiError::BadRequest(format!(
                    "cannot write {key}: leases are only changed by lease requests"
                )));
            }
            Ok(match value {
                Some(value) => Write::Put(key, value.into_bytes()),
                None => Write::Delete(key),
            })
        };
        let compares = compares.into_iter().map(compare).collect::<Result<Vec<Compare>, ApiError>>()?;
        let writes = writes.into_iter().map(write).collect::<Result<Vec<Write>, ApiError>>()?;
        self.check_compares(grant, &compares).await?;
        self.check_writes(grant, &writes).await?;
        Ok(match self.store.txn(Txn { compares, writes }).await? {
            TxnOutcome::Written(number) => TxnAnswer::Written(number),
            TxnOutcome::Conflict(key) => TxnAnswer::Conflict(key),
        })
    }
}

fn check_key(key: String) -> Result<String, ApiError> {
    match keys::CONTROLLER_PREFIXES.iter().any(|prefix| key.starts_with(prefix)) {
        true => Ok(key),
        false => Err(ApiError::BadRequest(format!(
            "key {key:?} is outside the controller prefixes: {}",
            keys::CONTROLLER_PREFIXES.join(" ")
        ))),
    }
}

/// A lease name is part of a key.
fn check_lease_name(name: String) -> Result<String, ApiError> {
    match name.is_empty() || name.len() > MAX_NAME_BYTES {
        true => Err(ApiError::BadRequest(format!("a lease name must have 1 to {MAX_NAME_BYTES} bytes"))),
        false => Ok(name),
    }
}

/// Bounds the lease TTL: a dead holder must not block others for long.
fn ttl(lives_ms: u64) -> Result<Duration, ApiError> {
    let ttl = Duration::from_millis(lives_ms);
    match ttl > MAX_TTL {
        true => {
            let most = MAX_TTL.as_millis();
            Err(ApiError::BadRequest(format!("lives_ms is {lives_ms}: a lease TTL is at most {most} ms")))
        }
        false => Ok(ttl),
    }
}

fn entry(entry: &Entry) -> StateEntry {
    StateEntry { key: entry.key.to_string(), value: text(&entry.value), changed: entry.mod_seq }
}

fn change(change: &Change) -> StateChange {
    let Change { number, key, value } = change;
    StateChange { number: *number, key: key.to_string(), value: value.as_deref().map(text) }
}

fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value).into_owned()
}
