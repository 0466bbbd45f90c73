//! Plan execution: every step of a plan is executed once, and nothing else.
//!
//! # Theory of operation
//!
//! A plan is split into [`components`] that run in parallel, so that a soak delays only its own component. In each
//! component, waves run one after the other ([`run`]). Within a wave, the steps of one instance run in order;
//! instances are independent. Ready steps are sent in as few calls as the target allows, and every task is polled
//! until each of its rows is final. After a failed step, the other steps of its instance and of everything that
//! depends on it are skipped. Between two waves, the changed instances that later steps depend on become ready, and
//! those of a rollout healthy ([`gates`], [`readiness`]). A hold or a pause
//! applies as soon as it is created ([`active_holds`]).
//!
//! Each call is journaled before it is sent ([`journal`]); the entry is deleted when every row is final. After a
//! crash, the next run infers the outcome of journaled calls and does not repeat them ([`recovery`]). A call with a
//! lost reply is not sent again: its outcome is observed ([`lost_reply`]), unless the target has idempotency keys.
//!
//! The [`ledger`] records what a target does not read back; [`observe`](crate::observe) combines it with rows.
//!
//! Execution makes no decisions: the planner chooses the steps, and the next observation shows whether they worked.

pub mod active_holds;
mod components;
mod context;
mod gates;
pub mod journal;
pub mod ledger;
pub mod lost_reply;
mod readiness;
mod recovery;
mod run;

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::Instant;

pub use self::active_holds::ActiveHolds;
pub use self::context::{Dependencies, ExecutionContext, ExecutionSettings, Precheck, new_run_id};
pub use self::recovery::{RecoveryError, recover};
use crate::backend::{Backend, BackendError, RowState};
pub use crate::model::StepOutcome;
use crate::model::{HoldReason, InstanceKey, Op, Plan, ProcessKey, Step, Wave};
use crate::store::Store;

/// Result of one step.
#[derive(Clone, Debug, PartialEq)]
pub struct StepResult {
    pub step: usize,
    pub instance: InstanceKey,
    pub op: Op,
    pub outcome: StepOutcome,
    /// Report of the target.
    pub state: RowState,
    /// The code of `state`, for display.
    pub code: i64,
    pub message: String,
    pub took_ms: u64,
    /// The guard that refused it.
    pub reason: Option<HoldReason>,
}

/// Progress of an execution.
#[derive(Clone, Debug)]
pub enum ExecutionEvent<'a> {
    Wave {
        nth: usize,
        of: usize,
    },
    Sent {
        steps: usize,
    },
    Ended(&'a StepResult),
    /// The ledger has everything that ended so far.
    Noted,
    Soaking {
        process: &'a ProcessKey,
        secs: u64,
    },
    Waiting {
        left: usize,
        longest: Option<&'a InstanceKey>,
    },
}

/// Result of a plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExecutionResult {
    /// Every step, in order.
    pub ended: Vec<StepResult>,
    /// Processes to roll back, each with the reason: their rollout ended because too many instances failed.
    pub to_roll_back: BTreeMap<ProcessKey, String>,
}

/// Time beyond the deadline for a reply, and for the last store write.
const GRACE: Duration = Duration::from_secs(1);
const FINAL_WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// A reply that misses the deadline counts as lost.
async fn in_time<T>(
    deadline: Instant,
    asked: impl Future<Output = Result<T, BackendError>>,
) -> Result<T, BackendError> {
    tokio::time::timeout_at(deadline + GRACE, asked).await.unwrap_or(Err(BackendError::NoAnswer))
}

/// Executes a plan. The result has every step.
pub async fn execute<B: Backend, S: Store>(
    plan: &Plan,
    backend: &B,
    store: &S,
    terms: &ExecutionContext,
    on_event: &mut (dyn FnMut(ExecutionEvent<'_>) + Send),
) -> ExecutionResult {
    let (on_event, in_flight) = (Mutex::new(on_event), AtomicUsize::new(0));
    let components = components::components(plan, &terms.dependencies, components::SplitBy::Soaking);
    let each = components.iter().enumerate().map(|(nth, waves)| {
        let common = run::SharedRunState { backend, store, terms, in_flight: &in_flight };
        execute_component(waves, nth, common, &on_event)
    });
    let mut all = ExecutionResult::default();
    for one in join_all(each).await {
        all.ended.extend(one.ended);
        all.to_roll_back.extend(one.to_roll_back);
    }
    all.ended.sort_by_key(|ended| ended.step);
    all
}

/// The components of a plan, each as a plan of its own. Step ids stay the same.
pub fn split(plan: &Plan, dependencies: &Dependencies) -> Vec<Plan> {
    let component = |waves: std::borrow::Cow<'_, [Wave]>| Plan {
        waves: waves.into_owned(),
        aborted: plan.aborted.clone(),
        ..Plan::default()
    };
    let components = components::components(plan, dependencies, components::SplitBy::Waiting);
    components.into_iter().map(component).collect()
}

/// Executes one component.
async fn execute_component<B: Backend, S: Store>(
    waves: &[Wave],
    nth: usize,
    common: run::SharedRunState<'_, B, S>,
    on_event: &Mutex<&mut (dyn FnMut(ExecutionEvent<'_>) + Send)>,
) -> ExecutionResult {
    let mut emit = |event: ExecutionEvent<'_>| {
        if let Ok(mut on_event) = on_event.lock() {
            on_event(event);
        }
    };
    let mut run = match run::Run::new(common, nth, &mut emit).await {
        Ok(run) => run,
        Err(error) => {
            let none = not_started(waves, &format!("not started: {error}"));
            none.ended.iter().for_each(|ended| emit(ExecutionEvent::Ended(ended)));
            return none;
        }
    };
    for (nth, wave) in waves.iter().enumerate() {
        (run.on_event)(ExecutionEvent::Wave { nth: nth + 1, of: waves.len() });
        run.resume_soak(waves, wave).await;
        run.wave(wave).await;
        let later = &waves[nth + 1..];
        if (!later.is_empty() || !wave.gates.is_empty()) && !run.is_over() {
            run.gates(wave, later).await;
        }
    }
    run.finish().await
}

/// Result of a component that could not start.
fn not_started(waves: &[Wave], why: &str) -> ExecutionResult {
    let ended = |step: &Step| StepResult {
        step: step.id,
        instance: step.instance.clone(),
        op: step.op,
        outcome: StepOutcome::Failed,
        state: RowState::Unreported,
        code: 0,
        message: why.to_owned(),
        took_ms: 0,
        reason: None,
    };
    ExecutionResult {
        ended: waves.iter().flat_map(|wave| &wave.steps).map(ended).collect(),
        to_roll_back: BTreeMap::new(),
    }
}
