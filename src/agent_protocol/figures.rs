//! Resource figures of process trees: sampled by an agent, sent to the gateway in batches, kept in memory only.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::InstanceKey;

/// Usage of a process tree. On the wire an array, in this order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(from = "FigureNumbers", into = "FigureNumbers")]
#[schemars(with = "FigureNumbers")]
pub struct TreeFigures {
    /// CPU time per elapsed time, in thousandths of a core.
    pub cpu_milli: u32,
    /// Resident memory in KiB.
    pub mem_kb: u64,
    pub fds: u32,
    pub threads: u32,
    pub processes: u32,
}

type FigureNumbers = (u32, u64, u32, u32, u32);

/// A share of the host in percent, with three decimals.
pub fn rounded_percent(share: f64) -> f64 {
    (share * 1000.0).round() / 1000.0
}

impl From<FigureNumbers> for TreeFigures {
    fn from((cpu_milli, mem_kb, fds, threads, processes): FigureNumbers) -> TreeFigures {
        TreeFigures { cpu_milli, mem_kb, fds, threads, processes }
    }
}

impl From<TreeFigures> for FigureNumbers {
    fn from(figures: TreeFigures) -> FigureNumbers {
        let TreeFigures { cpu_milli, mem_kb, fds, threads, processes } = figures;
        (cpu_milli, mem_kb, fds, threads, processes)
    }
}

/// Figures of an agent's instances. Not numbered: a lost update is replaced by the next one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct FiguresUpdate {
    /// Cores and memory (KiB) of the host.
    pub cores: u32,
    pub mem_kb: u64,
    /// The rows are those of all instances; otherwise those that changed since the last update.
    pub complete: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<FigureRow>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub answers: Vec<FiguresAnswer>,
}

/// The figures of one instance; `None`: it does not run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FigureRow(pub InstanceKey, pub Option<TreeFigures>);

/// The answer to a query ([`ToAgent::Measure`](super::ToAgent::Measure)).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct FiguresAnswer {
    pub id: String,
    /// Measured now; `None`: the process does not run.
    pub now: Option<TreeFigures>,
    /// Samples of the last hour, oldest first.
    pub points: Vec<FigurePoint>,
}

/// One sample: milliseconds since 1970, and its figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FigurePoint(pub i64, pub TreeFigures);
