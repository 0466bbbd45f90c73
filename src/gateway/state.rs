//! State API: store access over HTTP for controllers, for journals, ledgers, holds and leases.
//!
//! Only controller prefixes are accessible; registrations and agent reports are not.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{ApiError, Gateway};
use crate::store::lease::{MAX_RESET, MAX_TTL};
use crate::store::{
    Change, Compare, Entry, Holder, Lease, LeaseAttempt, Outcome, Reset, Seq, Store, Txn, Write, keys,
};

/// Maximum entries per response.
const MAX_ENTRIES: usize = 10_000;
/// Maximum wait for changes.
const MAX_WAIT: Duration = Duration::from_secs(30);
/// Maximum bytes in a lease's name.
const MAX_NAME_BYTES: usize = 1024;

/// A store request. Values are UTF-8 texts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum StoreRequest {
    Get {
        key: String,
    },
    Range {
        prefix: String,
        #[serde(default)]
        after: Option<String>,
        #[serde(default)]
        limit: Option<usize>,
    },
    /// Entries by offset instead of key, and the total count.
    Slice {
        prefix: String,
        #[serde(default)]
        skip: usize,
        limit: usize,
    },
    Txn {
        #[serde(default)]
        compares: Vec<CompareWire>,
        #[serde(default)]
        writes: Vec<WriteWire>,
    },
    /// Changes after a number; waits for the first one.
    Changes {
        prefix: String,
        after: Seq,
        #[serde(default)]
        wait_ms: u64,
    },
    TakeLease {
        name: String,
        holder: Holder,
        lives_ms: u64,
    },
    RenewLease {
        name: String,
        holder: String,
        generation: u64,
        lives_ms: u64,
    },
    ReleaseLease {
        name: String,
        holder: String,
        generation: u64,
    },
    ResetLease {
        name: String,
        #[serde(default)]
        above: u64,
        #[serde(default)]
        force: bool,
    },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompareWire {
    pub key: String,
    pub changed: Seq,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WriteWire {
    pub key: String,
    /// `null` deletes the key. The field is required.
    #[serde(deserialize_with = "Option::deserialize")]
    pub value: Option<String>,
}

impl StoreRequest {
    /// Short description of the change for the audit log; `None` for a read.
    pub fn changes(&self) -> Option<String> {
        match self {
            StoreRequest::Get { .. }
            | StoreRequest::Range { .. }
            | StoreRequest::Slice { .. }
            | StoreRequest::Changes { .. } => None,
            StoreRequest::Txn { writes, .. } => {
                let first = writes.first()?;
                Some(format!("{} of {} keys", first.key, writes.len()))
            }
            StoreRequest::TakeLease { name, .. } => Some(format!("acquire lease {name}")),
            StoreRequest::RenewLease { name, .. } => Some(format!("renew lease {name}")),
            StoreRequest::ReleaseLease { name, .. } => Some(format!("release lease {name}")),
            StoreRequest::ResetLease { name, above, force } => {
                Some(format!("reset lease {name} (above {above}, force {force})"))
            }
        }
    }
}

impl<S: Store> Gateway<S> {
    pub async fn state(&self, request: StoreRequest) -> Result<Value, ApiError> {
        match request {
            StoreRequest::Get { key } => {
                let key = check_key(key)?;
                Ok(self.store.get(&key).await?.map_or(Value::Null, |found| entry(&found)))
            }
            StoreRequest::Range { prefix, after, limit } => {
                let limit = limit.unwrap_or(MAX_ENTRIES).min(MAX_ENTRIES);
                let page = self.store.range(&check_key(prefix)?, after.as_deref(), limit).await?;
                let entries: Vec<Value> = page.entries.iter().map(entry).collect();
                Ok(json!({"entries": entries, "more": page.more.as_deref(), "as_of": page.as_of}))
            }
            StoreRequest::Slice { prefix, skip, limit } => {
                let (entries, count) =
                    self.store.slice(&check_key(prefix)?, skip, limit.min(MAX_ENTRIES)).await?;
                Ok(json!({"entries": entries.iter().map(entry).collect::<Vec<Value>>(), "count": count}))
            }
            StoreRequest::Txn { compares, writes } => self.state_txn(compares, writes).await,
            StoreRequest::Changes { prefix, after, wait_ms } => {
                let wait = Duration::from_millis(wait_ms).min(MAX_WAIT);
                let prefix = check_key(prefix)?;
                let changes = match tokio::time::timeout(wait, self.store.changes(&prefix, after)).await {
                    Ok(changes) => changes?,
                    Err(_) => Vec::new(),
                };
                let change = |Change { number, key, value }: &Change| json!({"number": number, "key": key, "value": value.as_deref().map(text)});
                Ok(json!({"changes": changes.iter().map(change).collect::<Vec<_>>()}))
            }
            StoreRequest::TakeLease { name, holder, lives_ms } => {
                let taken = self.store.take_lease(&check_lease_name(name)?, &holder, ttl(lives_ms)?).await?;
                Ok(match taken {
                    LeaseAttempt::Ours(lease) => json!({"ours": {"generation": lease.generation}}),
                    LeaseAttempt::Theirs { holder, generation, left_ms } => {
                        json!({"theirs": {"holder": holder, "generation": generation, "left_ms": left_ms}})
                    }
                })
            }
            StoreRequest::RenewLease { name, holder, generation, lives_ms } => {
                let lease = Lease { name, holder, generation };
                Ok(json!({"kept": self.store.renew_lease(&lease, ttl(lives_ms)?).await?}))
            }
            StoreRequest::ReleaseLease { name, holder, generation } => {
                self.store.release_lease(&Lease { name, holder, generation }).await?;
                Ok(json!({"released": true}))
            }
            StoreRequest::ResetLease { name, above, force } => {
                if above > MAX_RESET {
                    return Err(ApiError::BadRequest(format!(
                        "above is {above}: the maximum generation is {MAX_RESET}"
                    )));
                }
                Ok(match self.store.reset_lease(&check_lease_name(name)?, above, force).await? {
                    Reset::Free { generation } => json!({"free": {"generation": generation}}),
                    Reset::Renewed { holder, left_ms } => {
                        json!({"renewed": {"holder": holder, "left_ms": left_ms}})
                    }
                })
            }
        }
    }

    async fn state_txn(&self, compares: Vec<CompareWire>, writes: Vec<WriteWire>) -> Result<Value, ApiError> {
        let compare = |c: CompareWire| Ok(Compare { key: check_key(c.key)?, mod_seq: c.changed });
        let write = |WriteWire { key, value }: WriteWire| {
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
        let compares = compares.into_iter().map(compare).collect::<Result<_, ApiError>>()?;
        let writes = writes.into_iter().map(write).collect::<Result<_, ApiError>>()?;
        Ok(match self.store.txn(Txn { compares, writes }).await? {
            Outcome::Written(number) => json!({"written": number}),
            Outcome::Conflict(key) => json!({"conflict": key}),
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

fn entry(entry: &Entry) -> Value {
    json!({"key": entry.key, "value": text(&entry.value), "changed": entry.mod_seq})
}

fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value).into_owned()
}
