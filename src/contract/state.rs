//! Store over HTTP: `POST /api/abide/v1/state` of the gateway, for the state of controllers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::required;

/// A store request. Values are UTF-8 texts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
#[schemars(rename = "State")]
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
        compares: Vec<CompareItem>,
        #[serde(default)]
        writes: Vec<WriteItem>,
    },
    /// Changes after a number; waits for the first one.
    Changes {
        prefix: String,
        after: u64,
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

/// The key must have been changed last at this number; 0: it must not exist.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CompareItem {
    pub key: String,
    pub changed: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteItem {
    pub key: String,
    /// `null` deletes the key. The field is required.
    #[serde(deserialize_with = "required")]
    pub value: Option<String>,
}

/// The process that requests a lease, with the facts that prove that a holder on this host is dead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Holder {
    /// Unique per process.
    pub id: String,
    pub host: String,
    /// Boot id of the kernel: no process survives a reboot.
    pub boot_id: String,
    pub pid: u32,
    /// Start time of the process in kernel ticks: a pid alone may have been reused.
    pub started: u64,
    /// Digest of the machine id, where it exists: host names are not unique.
    #[serde(default)]
    pub machine: String,
    /// PID namespace of `pid`. 0: unknown.
    #[serde(default)]
    pub pids: u64,
    /// Time of the first request, in milliseconds since 1970; shown to those who wait for the lease.
    #[serde(default)]
    pub since: i64,
}

/// Answer of a store request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum StoreAnswer {
    Page(StatePage),
    Slice(StateSlice),
    Changes(StateChanges),
    Txn(TxnAnswer),
    Lease(LeaseAnswer),
    Reset(ResetAnswer),
    Kept(StateKept),
    Released(StateReleased),
    /// `null`: no such key.
    Entry(Option<StateEntry>),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StateEntry {
    pub key: String,
    pub value: String,
    /// Number of the last change.
    pub changed: u64,
}

/// Answer of `range`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StatePage {
    pub entries: Vec<StateEntry>,
    /// `after` of the next page; `null`: this is the last.
    pub more: Option<String>,
    /// Number of the newest change.
    pub as_of: u64,
}

/// Answer of `slice`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StateSlice {
    pub entries: Vec<StateEntry>,
    pub count: usize,
}

/// Answer of `changes`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StateChanges {
    pub changes: Vec<StateChange>,
}

/// A changed key; `null`: deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StateChange {
    pub number: u64,
    pub key: String,
    pub value: Option<String>,
}

/// Answer of `txn`: the number of the change, or the key that differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TxnAnswer {
    Written(u64),
    Conflict(String),
}

/// Answer of `take_lease`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LeaseAnswer {
    Ours { generation: u64 },
    Theirs { holder: Holder, generation: u64, left_ms: u64 },
}

/// Answer of `renew_lease`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StateKept {
    pub kept: bool,
}

/// Answer of `release_lease`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StateReleased {
    pub released: bool,
}

/// Answer of `reset_lease`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ResetAnswer {
    Free { generation: u64 },
    Renewed { holder: Holder, left_ms: u64 },
}
