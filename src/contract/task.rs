//! Task: `get tasks -o json`, and `GET /api/abide/v1/tasks` of the gateway.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::model::InstanceKey;

/// One task in the list of the latest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TaskEntry {
    pub id: String,
    /// Milliseconds since 1970.
    pub begun: i64,
    pub rows: usize,
    /// Final rows.
    pub done: usize,
    pub failed: usize,
}

/// Answer of `GET /api/abide/v1/tasks`: the list, or with `?op=KEY` one task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum TaskAnswer {
    List(Vec<TaskEntry>),
    Found(FoundTask),
}

/// Body of `POST /api/abide/v1/rename`: an instance gets another name without a restart, with a new spec if one is sent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Rename")]
pub struct RenameRequest {
    pub from: InstanceKey,
    pub to: InstanceKey,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Map<String, Value>>")]
    pub spec: Option<Value>,
    /// Its labels are those of the spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<Map<String, Value>>")]
    pub meta: Option<Value>,
}

/// The task of an idempotency key (`?op=KEY`); `null`: none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FoundTask {
    pub task: Option<String>,
}
