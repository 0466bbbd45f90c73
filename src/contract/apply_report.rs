//! Apply report: `apply -o json`, and the exit code with its reason in every refusal.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::plan::PlanDocument;
use crate::model::{Health, HoldReason, InstanceKey, Op, StepOutcome};

/// The report of an apply, version 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ApplyReport {
    pub version: u32,
    /// The plan before the first step.
    pub plan: PlanDocument,
    pub outcomes: Vec<StepReport>,
    /// Instances that are in sync but unhealthy.
    pub not_well: Vec<UnhealthyInstance>,
    /// Processes whose rollout failed and was rolled back.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rolled_back: Vec<RolledBackProcess>,
    pub converged: bool,
    pub exit: ExitReport,
}

/// The result of one step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StepReport {
    pub step: String,
    pub instance: InstanceKey,
    pub op: Op,
    pub outcome: StepOutcome,
    pub code: i64,
    pub message: String,
    pub took_ms: u64,
    /// The guard that refused the step.
    pub reason: Option<HoldReason>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct UnhealthyInstance {
    pub instance: String,
    pub health: Health,
    pub why: String,
}

/// A process whose rollout failed and was rolled back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RolledBackProcess {
    /// `NAMESPACE/NAME`
    pub process: String,
    /// The first failed instance, with the output of its probe or command.
    pub why: String,
}

/// An exit code and its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ExitReport {
    pub code: u8,
    pub reason: Option<String>,
}

/// The output of a command that a safety check refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct RefusalReport {
    pub exit: ExitReport,
}
