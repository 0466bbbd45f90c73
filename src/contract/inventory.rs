//! JSON of `abide inventory`.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::HostKey;

/// One inventory of `abide inventory list -o json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct InventoryRow {
    pub name: String,
    /// The kind and the source, without secrets.
    pub source: String,
    /// The number of the last good hosts. Null: none are stored.
    pub hosts: Option<usize>,
    /// The time since which they are the last good hosts, as RFC 3339.
    pub since: Option<String>,
}

/// One host of `abide inventory show -o json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct InventoryHostRow {
    pub host: HostKey,
    pub labels: BTreeMap<String, String>,
    /// Names of the variables. Their values may be secrets.
    pub vars: Vec<String>,
}

/// The answer of `abide inventory accept -o json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct AcceptedInventory {
    pub name: String,
    pub hosts: usize,
    /// Hosts that the last good read lacked.
    pub added: usize,
    /// Hosts of the last good read that are gone.
    pub lost: usize,
}
