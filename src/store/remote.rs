//! Remote store: the store of a gateway over HTTP, for controllers that keep their state with their target.

use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use super::lease::{Holder, Lease, LeaseAttempt, Reset};
use super::{Change, Entry, Error, Outcome, Page, Seq, Store, Txn, Write};
use crate::http::{ApiClient, CallError};

#[derive(Clone)]
pub struct Remote {
    calls: ApiClient,
}

/// Timeout of one call.
const CALL_TIMEOUT: Duration = Duration::from_secs(20);
/// How long the gateway waits for a change before it answers.
const WAIT: Duration = Duration::from_secs(10);
/// Maximum entries per response.
const PAGE: usize = 5_000;

#[derive(Deserialize)]
struct EntryWire {
    key: String,
    value: String,
    changed: Seq,
}

impl From<EntryWire> for Entry {
    fn from(wire: EntryWire) -> Entry {
        Entry { key: wire.key.into(), value: wire.value.into_bytes().into(), mod_seq: wire.changed }
    }
}

#[derive(Deserialize)]
struct PageWire {
    entries: Vec<EntryWire>,
    more: Option<String>,
    as_of: Seq,
}

impl Remote {
    pub fn new(calls: ApiClient) -> Remote {
        Remote { calls }
    }

    async fn ask<T: serde::de::DeserializeOwned>(&self, request: Value) -> Result<T, Error> {
        let path = "/api/abide/v1/state";
        let body = request.to_string().into_bytes();
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
        serde_json::from_str(&text)
            .map_err(|error| Error::InvalidResponse { url: url(), source: Arc::new(error) })
    }

    async fn page(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<PageWire, Error> {
        self.ask(json!({"range": {"prefix": prefix, "after": after, "limit": limit}})).await
    }
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Store for Remote {
    async fn get(&self, key: &str) -> Result<Option<Entry>, Error> {
        let found: Option<EntryWire> = self.ask(json!({"get": {"key": key}})).await?;
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
        #[derive(Deserialize)]
        struct Slice {
            entries: Vec<EntryWire>,
            count: usize,
        }
        let request = json!({"slice": {"prefix": prefix, "skip": skip, "limit": limit.min(PAGE)}});
        let Slice { entries, count } = self.ask(request).await?;
        Ok((entries.into_iter().map(Entry::from).collect(), count))
    }

    async fn txn(&self, txn: Txn) -> Result<Outcome, Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "snake_case")]
        enum Answer {
            Written(Seq),
            Conflict(String),
        }
        let compares: Vec<Value> =
            txn.compares.iter().map(|c| json!({"key": c.key, "changed": c.mod_seq})).collect();
        let writes = txn.writes.into_iter().map(|write| match write {
            Write::Put(key, value) => json!({"key": key, "value": text(value)}),
            Write::Delete(key) => json!({"key": key, "value": null}),
        });
        let request = json!({"txn": {"compares": compares, "writes": writes.collect::<Vec<_>>()}});
        Ok(match self.ask(request).await? {
            Answer::Written(number) => Outcome::Written(number),
            Answer::Conflict(key) => Outcome::Conflict(key),
        })
    }

    async fn changes(&self, prefix: &str, after: Seq) -> Result<Vec<Change>, Error> {
        #[derive(Deserialize)]
        struct ChangeWire {
            number: Seq,
            key: String,
            value: Option<String>,
        }
        #[derive(Deserialize)]
        struct Changes {
            changes: Vec<ChangeWire>,
        }
        let wait_ms = u64::try_from(WAIT.as_millis()).unwrap_or(0);
        loop {
            let request = json!({"changes": {"prefix": prefix, "after": after, "wait_ms": wait_ms}});
            let Changes { changes } = self.ask(request).await?;
            if !changes.is_empty() {
                let change = |wire: ChangeWire| Change {
                    number: wire.number,
                    key: wire.key.into(),
                    value: wire.value.map(|value| value.into_bytes().into()),
                };
                return Ok(changes.into_iter().map(change).collect());
            }
        }
    }

    async fn take_lease(&self, name: &str, holder: &Holder, lives: Duration) -> Result<LeaseAttempt, Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "snake_case")]
        enum Answer {
            Ours { generation: u64 },
            Theirs { holder: Holder, generation: u64, left_ms: u64 },
        }
        let lives_ms = u64::try_from(lives.as_millis()).unwrap_or(0);
        let request = json!({"take_lease": {"name": name, "holder": holder, "lives_ms": lives_ms}});
        Ok(match self.ask(request).await? {
            Answer::Ours { generation } => {
                LeaseAttempt::Ours(Lease { name: name.to_owned(), holder: holder.id.clone(), generation })
            }
            Answer::Theirs { holder, generation, left_ms } => {
                LeaseAttempt::Theirs { holder, generation, left_ms }
            }
        })
    }

    async fn renew_lease(&self, lease: &Lease, lives: Duration) -> Result<bool, Error> {
        #[derive(Deserialize)]
        struct Kept {
            kept: bool,
        }
        let lives_ms = u64::try_from(lives.as_millis()).unwrap_or(0);
        let Lease { name, holder, generation } = lease;
        let request = json!({"renew_lease": {"name": name, "holder": holder, "generation": generation, "lives_ms": lives_ms}});
        Ok(self.ask::<Kept>(request).await?.kept)
    }

    async fn release_lease(&self, lease: &Lease) -> Result<(), Error> {
        let Lease { name, holder, generation } = lease;
        let request = json!({"release_lease": {"name": name, "holder": holder, "generation": generation}});
        self.ask::<Value>(request).await.map(|_| ())
    }

    async fn reset_lease(&self, name: &str, above: u64, force: bool) -> Result<Reset, Error> {
        #[derive(Deserialize)]
        #[serde(rename_all = "snake_case")]
        enum Answer {
            Free { generation: u64 },
            Renewed { holder: Holder, left_ms: u64 },
        }
        let request = json!({"reset_lease": {"name": name, "above": above, "force": force}});
        Ok(match self.ask(request).await? {
            Answer::Free { generation } => Reset::Free { generation },
            Answer::Renewed { holder, left_ms } => Reset::Renewed { holder, left_ms },
        })
    }
}
