//! Compact list of processes: `GET /api/abide/v1/processes/digests`, with digests in place of specs.
//!
//! A reader that expects certain specs compares digests, and requests only the specs of processes that differ. A field
//! that is absent has its usual value.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::gateway_process::RunReport;
use crate::model::{Health, HostKey, InstanceKey};

/// The facts of one process that determine a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProcessDigest {
    pub instance: InstanceKey,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Whether it runs is not known: its report cannot be read.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unknown: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hosted: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub running: bool,
    /// The process ended, and its restart policy leaves it stopped.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub completed: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    #[schemars(with = "Health")]
    pub health: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// Time of its last report or of its registration. Its host may have been in contact since: see the page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report_time: Option<String>,
    /// Files of the configmap that differ on the host, or are missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drifted_files: Vec<String>,
    /// Digest of the registered spec: 32 hex digits. Absent if a spec of the process has secrets: the whole row has
    /// their digests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sum: Option<String>,
    /// Digest of the spec in effect; absent with `sum`, and if the process does not run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live_sum: Option<String>,
    /// The process was adopted and not restarted since: the spec in effect is not known to be that of `live_sum`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub live_spec_unknown: bool,
    /// The last run of a one-shot process; `unknown` without `sum`.
    pub ran: RunReport,
}

/// A page of the compact list. `R` is the form of a row: a server does not copy its rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "ProcessDigestPage", bound = "")]
pub struct ProcessDigestPage<R = ProcessDigest> {
    #[schemars(with = "Vec<ProcessDigest>")]
    pub items: Vec<R>,
    /// Time of the last contact with the agent of each host in `items`.
    pub contacts: BTreeMap<HostKey, String>,
    /// `after` of the next page; `null`: this is the last.
    pub more: Option<String>,
    /// Change number of the page: a watch after that of the first page misses no change.
    pub as_of: u64,
}
