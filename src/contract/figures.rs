//! Figures of a process: cpu, memory, descriptors and threads of its tree, now and over the last hour.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::InstanceKey;

/// Figures of a process tree.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FigureDetails {
    /// When the gateway received them; RFC 3339.
    pub time: String,
    /// CPU time per elapsed time, in cores.
    pub cores: f64,
    /// Resident memory in bytes.
    pub memory: u64,
    pub fds: u32,
    pub threads: u32,
    pub processes: u32,
}

/// `GET /api/abide/v1/processes/figures`: figures of one instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FigureSeries {
    pub instance: InstanceKey,
    /// Measured for this answer; `null`: the process does not run.
    pub now: Option<FigureDetails>,
    /// Samples of the last hour, oldest first.
    pub points: Vec<FigureSample>,
}

/// One sample.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FigureSample {
    pub time: String,
    pub cores: f64,
    pub memory: u64,
    pub fds: u32,
    pub threads: u32,
}
