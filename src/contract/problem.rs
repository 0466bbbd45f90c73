//! Problems and differences: `validate`, `diff` and `agent --check-policy` as JSON.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::{HoldReason, InstanceKey};

/// A problem of a manifest, with its location.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ManifestProblem {
    pub file: String,
    pub line: u32,
    pub column: u32,
    pub severity: Severity,
    /// Stable, such as `E0101`.
    pub code: String,
    pub message: String,
    pub hint: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    Error,
    Warning,
}

/// One instance that differs from its manifest, in `diff -o json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Difference {
    pub instance: InstanceKey,
    /// The previous name of a moved process.
    pub moved_from: Option<InstanceKey>,
    pub state: Sides,
    pub owner: Sides,
    /// Against the registered spec; `null`: unknown.
    pub given: Option<Vec<FieldDifference>>,
    /// Against the spec in effect; `null`: unknown, or not running.
    pub live: Option<Vec<FieldDifference>>,
    /// Reason why the state is unknown.
    pub unknown: Option<String>,
    /// Files of the configmap that differ on the host, or are missing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<String>,
    /// Reason why the plan holds it.
    pub held: Option<HoldReason>,
    /// `file:line:column`
    pub at: Option<String>,
}

/// A value before and after.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Sides {
    pub old: Option<String>,
    pub new: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FieldDifference {
    pub field: String,
    pub old: Option<String>,
    pub new: Option<String>,
}

/// Instances that the next launch would refuse, in `agent --check-policy -o json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RefusedLaunches {
    pub refused: Vec<RefusedLaunch>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RefusedLaunch {
    pub instance: InstanceKey,
    pub reasons: Vec<String>,
}
