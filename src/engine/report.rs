//! The result of an apply.

use std::collections::BTreeMap;

use super::input::PlanDigests;
use crate::execute::StepResult;
use crate::model::{Health, HoldReason, InstanceKey, Plan, ProcessKey, RolloutPause};

/// The result of an apply.
#[derive(Debug)]
pub struct Report {
    /// The executed plan, and the digests of its inputs.
    pub plan: Plan,
    pub digests: PlanDigests,
    pub ended: Vec<StepResult>,
    /// A new plan is empty and all instances are healthy; `None`: not verified.
    pub converged: Option<bool>,
    pub conclusion: Conclusion,
    /// The one reason of an incomplete apply.
    pub reason: Option<HoldReason>,
    /// Instances that are in sync but unhealthy.
    pub unhealthy: Vec<Unhealthy>,
    /// Processes whose rollout failed and was rolled back, each with the reason.
    pub rolled_back: BTreeMap<ProcessKey, String>,
    /// Pauses of rollouts in the last plan.
    pub pauses: Vec<RolloutPause>,
}

/// End of an apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conclusion {
    Done,
    /// Not converged: an instance failed, is unknown, held or unhealthy.
    Incomplete,
    /// The deadline passed while operations were in flight.
    TimedOut,
    /// Another process took the lease.
    LeaseLost,
    /// A rollout failed and was rolled back.
    RolledBack,
    /// Everything is done up to the pause of a rollout, which waits for a promotion.
    AwaitingPromotion,
    /// Stopped at a safe point by the caller, with the caller's exit code.
    Stopped(u8),
}

impl Conclusion {
    /// The exit code, as the history records it.
    pub fn exit_code(self) -> u8 {
        match self {
            Conclusion::Done => 0,
            Conclusion::Incomplete => 3,
            Conclusion::TimedOut | Conclusion::AwaitingPromotion => 5,
            Conclusion::LeaseLost => 6,
            Conclusion::RolledBack => 7,
            Conclusion::Stopped(code) => code,
        }
    }
}

/// A declared instance that is degraded or failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unhealthy {
    pub instance: InstanceKey,
    pub health: Health,
}

/// Results of the execution and its verification, before the plan is added.
pub(super) struct Results {
    pub ended: Vec<StepResult>,
    pub converged: Option<bool>,
    pub conclusion: Conclusion,
    pub reason: Option<HoldReason>,
    pub unhealthy: Vec<Unhealthy>,
    pub rolled_back: BTreeMap<ProcessKey, String>,
    /// Pauses of rollouts in the last plan.
    pub pauses: Vec<RolloutPause>,
}

impl Results {
    /// The report. An apply converged if and only if it is done, and only an incomplete one has a reason.
    pub fn report(self, plan: Plan, digests: PlanDigests) -> Report {
        let Results { ended, converged, conclusion, reason, unhealthy, rolled_back, pauses } = self;
        let converged = converged.map(|converged| converged && conclusion == Conclusion::Done);
        let reason = match conclusion {
            Conclusion::AwaitingPromotion => Some(HoldReason::AwaitingPromotion),
            Conclusion::Incomplete => reason,
            _ => None,
        };
        Report { plan, digests, ended, converged, conclusion, reason, unhealthy, rolled_back, pauses }
    }
}

/// The reason of an incomplete apply if it is ownership alone. Other held reasons are in the plan.
pub(super) fn sole_reason(reasons: impl Iterator<Item = Option<HoldReason>>) -> Option<HoldReason> {
    let mut all: Vec<Option<HoldReason>> = reasons.collect();
    all.dedup();
    match all[..] {
        [Some(reason @ HoldReason::NotOwned)] => Some(reason),
        _ => None,
    }
}
