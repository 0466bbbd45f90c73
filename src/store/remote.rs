//! Remote store: the store of a gateway over HTTP, for controllers that keep their state with their target.

use std::sync::Arc;
use std::time::Duration;

use super::lease::{Holder, Lease, LeaseAttempt, Reset};
use super::{Change, Entry, Error, Page, Seq, Store, Txn, TxnOutcome, Write};
use crate::contract::{
    CompareItem, LeaseAnswer, ResetAnswer, StateChange, StateChanges, StateEntry, StateKept, StatePage,
    StateReleased, StateSlice, StoreRequest, TxnAnswer, WriteItem,
};
use crate::http::{ApiClient, CallError, UnreadableResponse};

#[derive(Clone)]
pub struct Remote {
    calls: ApiClient,
}

/// Timeout of one call.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// Maximum wait of the gateway for a change before it answers.
const WAIT: Duration = Duration::from_secs(10);
/// Maximum entries per response.
const PAGE: usize = 5_000;

impl From<StateEntry> for Entry {
    fn from(entry: StateEntry) -> Entry {
        Entry { key: entry.key.into(), value: entry.value.into_bytes().into(), mod_seq: entry.changed }
    }
}

impl Remote {
    pub fn new(calls: ApiClient) -> Remote {
        Remote { calls }
    }

    async fn ask<T: serde::de::DeserializeOwned>(&self, request: StoreRequest) -> Result<T, Error> {
        let path = "/api/abide/v1/state";
        let body = serde_json::to_vec(&request).unwrap_or_default();
        let url = || self.calls.url().to_owned();
        let answer = self.calls.call(reqwest::Method::POST, path, body, &[], CALL_TIMEOUT).await;
        let text = answer.map_err(|error| match error {
            CallError::Refused { status: 410, .. } => Error::Compacted,
            // 401: the store does not know the caller.
            CallError::Refused { status, .. } if status != 401 => {
                Error::Refused { url: url(), source: error }
            }
            error => Error::Unreachable { url: url(), source: error },
        })?;
        serde_json::from_str(&text).map_err(|error| {
            let source = UnreadableResponse::new(200, &error.to_string(), text.as_bytes());
            Error::InvalidResponse { url: url(), source }
        })
    }

    async fn page(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<StatePage, Error> {
        let (prefix, after) = (prefix.to_owned(), after.map(str::to_owned));
        self.ask(StoreRequest::Range { prefix, after, limit: Some(limit) }).await
    }
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Store for Remote {
    async fn get(&self, key: &str) -> Result<Option<Entry>, Error> {
        let found: Option<StateEntry> = self.ask(StoreRequest::Get { key: key.to_owned() }).await?;
        Ok(found.map(Entry::from))
    }

    async fn range(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Page, Error> {
        let mut all = Page { entries: Vec::new(), more: None, as_of: 0 };
        let mut from = after.map(str::to_owned);
        loop {
            let left = limit.saturating_sub(all.entries.len()).min(PAGE);
            if left == 0 {
                return Ok(all);
            }
            let page = self.page(prefix, from.as_deref(), left).await?;
            if all.entries.is_empty() {
                all.as_of = page.as_of;
            }
            all.entries.extend(page.entries.into_iter().map(Entry::from));
            all.more = page.more.clone().map(Arc::from);
            match page.more {
                Some(more) => from = Some(more),
                None => return Ok(all),
            }
        }
    }

    async fn slice(&self, prefix: &str, skip: usize, limit: usize) -> Result<(Vec<Entry>, usize), Error> {
        let request = StoreRequest::Slice { prefix: prefix.to_owned(), skip, limit: limit.min(PAGE) };
        let StateSlice { entries, count } = self.ask(request).await?;
        Ok((entries.into_iter().map(Entry::from).collect(), count))
    }

    async fn txn(&self, txn: Txn) -> Result<TxnOutcome, Error> {
        let compares = txn.compares.into_iter();
        let compares = compares.map(|c| CompareItem { key: c.key, changed: c.mod_seq }).collect();
        let writes = txn.writes.into_iter().map(|write| match write {
            Write::Put(key, value) => WriteItem { key, value: Some(text(value)) },
            Write::Delete(key) => WriteItem { key, value: None },
        });
        let request = StoreRequest::Txn { compares, writes: writes.collect() };
        Ok(match self.ask(request).await? {
            TxnAnswer::Written(number) => TxnOutcome::Written(number),
            TxnAnswer::Conflict(key) => TxnOutcome::Conflict(key),
        })
    }

    async fn changes(&self, prefix: &str, after: Seq) -> Result<Vec<Change>, Error> {
        let wait_ms = u64::try_from(WAIT.as_millis()).unwrap_or(0);
        loop {
            let request = StoreRequest::Changes { prefix: prefix.to_owned(), after, wait_ms };
            let StateChanges { changes } = self.ask(request).await?;
            if !changes.is_empty() {
                let change = |wire: StateChange| Change {
                    number: wire.number,
                    key: wire.key.into(),
                    value: wire.value.map(|value| value.into_bytes().into()),
                };
                return Ok(changes.into_iter().map(change).collect());
            }
        }
    }

    async fn take_lease(&self, name: &str, holder: &Holder, lives: Duration) -> Result<LeaseAttempt, Error> {
        let lives_ms = u64::try_from(lives.as_millis()).unwrap_or(0);
        let request = StoreRequest::TakeLease { name: name.to_owned(), holder: holder.clone(), lives_ms };
        Ok(match self.ask(request).await? {
            LeaseAnswer::Ours { generation } => {
                LeaseAttempt::Acquired(Lease { name: name.to_owned(), holder: holder.id.clone(), generation })
            }
            LeaseAnswer::Theirs { holder, generation, left_ms } => {
                LeaseAttempt::HeldByOther { holder, generation, left_ms }
            }
        })
    }

    async fn renew_lease(&self, lease: &Lease, lives: Duration) -> Result<bool, Error> {
        let lives_ms = u64::try_from(lives.as_millis()).unwrap_or(0);
        let Lease { name, holder, generation } = lease.clone();
        let request = StoreRequest::RenewLease { name, holder, generation, lives_ms };
        Ok(self.ask::<StateKept>(request).await?.kept)
    }

    async fn release_lease(&self, lease: &Lease) -> Result<(), Error> {
        let Lease { name, holder, generation } = lease.clone();
        let request = StoreRequest::ReleaseLease { name, holder, generation };
        self.ask::<StateReleased>(request).await.map(|_| ())
    }

    async fn reset_lease(&self, name: &str, above: u64, force: bool) -> Result<Reset, Error> {
        let request = StoreRequest::ResetLease { name: name.to_owned(), above, force };
        Ok(match self.ask(request).await? {
            ResetAnswer::Free { generation } => Reset::Free { generation },
            ResetAnswer::Renewed { holder, left_ms } => Reset::Renewed { holder, left_ms },
        })
    }
}
