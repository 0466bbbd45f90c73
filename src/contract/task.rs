//! Task: `get tasks -o json`, and `GET /api/abide/v1/tasks` of the gateway.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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

/// The task of an idempotency key (`?op=KEY`); `null`: none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FoundTask {
    pub task: Option<String>,
}
