//! Leases: `abide lease list` and `lease reset` as JSON.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LeaseRow {
    pub owner: String,
    /// `writer` or `leader`.
    pub kind: String,
    pub generation: u64,
    /// `null`: free.
    pub holder: Option<LeaseHolderRow>,
    /// `null`: free or expired.
    pub expires_in_ms: Option<i64>,
    /// The highest generation that an agent reported.
    pub reported_generation: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LeaseHolderRow {
    pub host: String,
    pub pid: u32,
    pub since: Option<String>,
    pub id: String,
    /// The holder is proven dead.
    pub dead: bool,
}

/// A freed lease; the next generation is above this one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LeaseReset {
    pub owner: String,
    pub kind: String,
    pub generation: u64,
}
