//! Plan: `plan -o json`, saved plans, the plan of an apply report, and `GET /api/v1/plan` of the controller.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::history::OperationCounts;
use crate::model::{HoldReason, InstanceKey, Name, Op, ProcessKey, Rule, SpecSide};

/// A plan, version 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PlanDocument {
    pub version: u32,
    /// Digest of the steps.
    pub id: String,
    pub target: String,
    pub owner: String,
    pub source: PlanSource,
    pub observed_at: String,
    /// Digest of everything that the plan depends on.
    pub fingerprint: String,
    pub summary: OperationCounts,
    /// Steps in the order of execution.
    pub waves: Vec<Vec<PlanStep>>,
    pub held: Vec<HeldStep>,
    pub notes: Vec<String>,
    /// Gates between waves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gates: Vec<PlanGate>,
    /// Only in a saved plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inputs: Option<PlanInputs>,
    /// Only in a signed plan: the time until which it may be applied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires: Option<String>,
    /// Signatures of ssh-keygen over everything else.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub signatures: Vec<String>,
    /// Command lines and environment values are hidden: the reader showed no token.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redacted: Option<bool>,
}

/// The manifests of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PlanSource {
    pub path: String,
    pub revision: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PlanStep {
    pub id: String,
    pub instance: InstanceKey,
    pub op: Op,
    /// The spec that the operation uses.
    pub spec: SpecSide,
    pub pid_stays: bool,
    /// The previous name of a moved process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<InstanceKey>,
    pub why: Vec<StepReason>,
}

/// The reason of a step: a rule, and the field that differs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StepReason {
    pub rule: Rule,
    pub field: Option<String>,
    pub old: Option<String>,
    pub new: Option<String>,
    /// `file:line:column`
    pub at: Option<String>,
}

/// A change that the plan does not make.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HeldStep {
    pub instance: InstanceKey,
    pub reason: HoldReason,
    pub detail: String,
    pub steps: Vec<Op>,
    pub why: Vec<StepReason>,
    /// `file:line:column`
    pub at: Option<String>,
}

/// A held change in brief.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HeldRow {
    pub instance: InstanceKey,
    pub reason: HoldReason,
    pub detail: String,
}

/// Condition of a rollout between two waves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PlanGate {
    pub after_wave: usize,
    pub process: ProcessKey,
    pub soak_secs: u64,
    pub max_failures: u64,
    pub auto_rollback: bool,
}

/// The inputs of a saved plan, so that `apply` can repeat it. They contain no spec and no secret.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PlanInputs {
    pub paths: Vec<String>,
    pub flags: PlanFlags,
    /// Only for a plan on a saved observation.
    pub offline: Option<OfflineInputs>,
}

/// The flags of `plan`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PlanFlags {
    pub target: String,
    pub owner: Option<String>,
    pub prune: bool,
    pub adopt: bool,
    pub accept_source: bool,
    /// Inventories that may lose any number of hosts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub accept_shrink: Vec<String>,
    pub max_delete: Option<String>,
    pub max_restart: Option<String>,
    pub override_holds: bool,
    pub stale_after_secs: u64,
    /// The reason to plan past maintenance windows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub break_glass: Option<String>,
    pub namespace: Vec<Name>,
    pub selector: Option<String>,
    pub host: Vec<String>,
    pub include: Vec<ProcessKey>,
    pub exclude: Vec<ProcessKey>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct OfflineInputs {
    /// File of observed rows.
    pub observed: String,
    /// Capabilities of the target.
    pub caps: String,
    pub now: Option<String>,
}
