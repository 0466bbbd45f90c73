//! Run history: `abide history -o json`, `GET /api/v1/history`, stored entries, and the changes of one instance.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::present;
use crate::model::{InstanceKey, Op, StepOutcome};

/// One run that executed steps.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct HistoryEntry {
    pub revision: String,
    /// The paths of an apply, or `watch`.
    pub source: String,
    /// Digest of the plan of an apply.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<String>,
    pub summary: OperationCounts,
    pub steps: Vec<HistoryStep>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    pub at: String,
    /// `USER@HOST`
    pub by: String,
    /// `null`: in flight, or interrupted.
    pub exit: Option<u8>,
    /// Only of an apply; `null`: not verified.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub converged: Option<Option<bool>>,
    /// Number of failed steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed: Option<usize>,
    /// The reason of a person for a run outside of maintenance windows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub break_glass: Option<String>,
    /// The persons who signed the plan, where a policy requires signatures.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub signed_by: Vec<String>,
    /// Digest of what they signed: a plan is applied once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signed_plan: Option<String>,
    /// This revision is pinned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pinned: Option<bool>,
    /// Fields of other versions.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// Number of steps per operation, of instances that they change, and of instances that are held.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct OperationCounts {
    pub start: usize,
    pub stop: usize,
    pub restart: usize,
    pub reload: usize,
    pub host: usize,
    pub unhost: usize,
    pub register: usize,
    pub unregister: usize,
    pub kill: usize,
    pub instances: usize,
    pub held: usize,
    /// Held instances whose state is unknown or stale.
    pub unknown: usize,
}

impl OperationCounts {
    /// The count of an operation.
    pub fn of(&mut self, op: Op) -> &mut usize {
        match op {
            Op::Start => &mut self.start,
            Op::Stop => &mut self.stop,
            Op::Restart => &mut self.restart,
            Op::Reload => &mut self.reload,
            Op::Supervise => &mut self.host,
            Op::Unsupervise => &mut self.unhost,
            Op::Register => &mut self.register,
            Op::Unregister => &mut self.unregister,
            Op::Kill => &mut self.kill,
        }
    }

    /// The operations of a run, in the order of the fields.
    pub fn operations(&self) -> impl Iterator<Item = (Op, usize)> {
        let mut counts = self.clone();
        Op::ALL.into_iter().map(move |op| (op, *counts.of(op))).filter(|(_, count)| *count > 0)
    }
}

/// One step of a run. Before its end the outcome is `Unknown`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct HistoryStep {
    pub instance: InstanceKey,
    pub op: Op,
    pub outcome: StepOutcome,
    /// Reason why the step failed, shortened.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub message: String,
}

/// One run that changed an instance, in `describe`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct InstanceChange {
    pub at: String,
    pub by: String,
    pub source: String,
    pub revision: String,
    pub commit: Option<String>,
    pub did: Vec<StepSummary>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StepSummary {
    pub op: Op,
    pub outcome: StepOutcome,
}
