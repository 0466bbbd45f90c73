//! From a plan to outcomes: everything that the plan says is done, once, and nothing else.
//!
//! # Theory of operation
//! What soaks does not hold up what has nothing to do with it: a plan falls into [`parts`] that run side by side. In each,
//! waves come one after the other ([`run`]). Within one, the steps of an instance run in order and instances do not wait
//! for each other: whatever is ready is sent in as few calls as the target allows, and every task is asked about until
//! each of its rows is final. A step that fails takes the rest of its instance with it, and whatever depends on it.
//! Between two waves, what was changed must be well ([`gates`]). A hold or a pause counts from the moment that it is made
//! ([`restraints`]).
//!
//! Before a call is made, the journal says so ([`journal`]); its entry goes when every row is final. Whoever comes after a
//! death finds it, and finds out what became of what was begun instead of doing it again ([`settle`]). A call whose answer
//! was lost is not made again either: it is looked at ([`doubt`]), unless the target knows calls by their names.
//!
//! What a target does not read back, the [`ledger`] keeps; [`world`] puts that and a look together.
//!
//! What a person asks for beside any plan goes the same way ([`by_hand`]).
//!
//! Nothing is decided here: what to do was the planner's business, and whether it worked is the next look's.

pub mod active_holds;
mod components;
mod gates;
pub mod journal;
pub mod ledger;
pub mod lost_reply;
pub mod manual;
mod recovery;
mod run;
pub mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::watch;
use tokio::time::Instant;

pub use self::active_holds::ActiveHolds;
pub use self::recovery::{RecoveryError, recover};
use crate::backend::{Backend, BackendError};
use crate::model::{HoldReason, InstanceKey, ObservedInstance, Op, Plan, ProcessKey, Step, Wave};
use crate::reconcile::Caps;
use crate::store::Store;

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StepOutcome {
    Done,
    /// Somebody had done it already.
    AlreadySo,
    Failed,
    /// It was still under way when the time was over.
    TimedOut,
    /// Nobody knows.
    Unknown,
    /// It was not begun.
    Skipped,
}

impl StepOutcome {
    pub const ALL: [StepOutcome; 6] = [
        StepOutcome::Done,
        StepOutcome::AlreadySo,
        StepOutcome::Failed,
        StepOutcome::TimedOut,
        StepOutcome::Unknown,
        StepOutcome::Skipped,
    ];

    pub fn word(self) -> &'static str {
        match self {
            StepOutcome::Done => "Done",
            StepOutcome::AlreadySo => "AlreadySo",
            StepOutcome::Failed => "Failed",
            StepOutcome::TimedOut => "TimedOut",
            StepOutcome::Unknown => "Unknown",
            StepOutcome::Skipped => "Skipped",
        }
    }

    pub fn is_well(self) -> bool {
        matches!(self, StepOutcome::Done | StepOutcome::AlreadySo)
    }
}

/// One step, ended.
#[derive(Clone, Debug, PartialEq)]
pub struct StepResult {
    pub step: usize,
    pub instance: InstanceKey,
    pub op: Op,
    pub outcome: StepOutcome,
    pub code: i64,
    pub message: String,
    pub took_ms: u64,
    /// The guard that refused it.
    pub reason: Option<HoldReason>,
}

/// What somebody who watches is told.
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
    /// What is to be remembered of all that ended so far, is.
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

/// Under which terms it is carried out.
pub struct ExecutionContext {
    /// Whose it is what is changed; empty: it stays nobody's.
    pub owner: String,
    /// The target's name, and what it can do.
    pub target: String,
    pub caps: Caps,
    /// Of this run: no two have the same.
    pub run: String,
    pub deadline: Instant,
    /// Most steps under way at once.
    pub max_parallel: usize,
    /// What each process depends on, by declared names, and the name that an instance is declared under.
    pub depends: BTreeMap<ProcessKey, Vec<ProcessKey>>,
    pub declared: BTreeMap<InstanceKey, ProcessKey>,
    /// How what the plan changes was seen.
    pub before: BTreeMap<InstanceKey, ObservedInstance>,
    /// Why a step that is ready would fail.
    pub check: Precheck,
    /// What is to be left alone, as it is known now.
    pub restraints: watch::Receiver<ActiveHolds>,
    /// Somebody wants it to end at the next safe point.
    pub stop: watch::Receiver<bool>,
}

/// What must be so before a step: `Some` says what is not.
pub type Precheck = fn(&Step) -> Option<String>;

/// How a plan ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExecutionResult {
    /// Every step of it, in order.
    pub ended: Vec<StepResult>,
    /// Processes whose rollout was ended because too many failed, and that are to be as they were.
    pub to_roll_back: BTreeSet<ProcessKey>,
}

/// How much longer than the deadline an answer, and a word that is written down, is waited for.
const GRACE: Duration = Duration::from_secs(1);
const LAST_WORDS: Duration = Duration::from_secs(5);

/// An answer that does not come in time does not come.
async fn in_time<T>(
    deadline: Instant,
    asked: impl Future<Output = Result<T, BackendError>>,
) -> Result<T, BackendError> {
    tokio::time::timeout_at(deadline + GRACE, asked).await.unwrap_or(Err(BackendError::NoAnswer))
}

/// Carries a plan out. Every step of it is in the report.
pub async fn execute<B: Backend, S: Store>(
    plan: &Plan,
    backend: &B,
    store: &S,
    terms: &ExecutionContext,
    told: &mut (dyn FnMut(ExecutionEvent<'_>) + Send),
) -> ExecutionResult {
    let (told, under_way) = (Mutex::new(told), AtomicUsize::new(0));
    let parts = components::components(plan, terms, components::SplitBy::Soaking);
    let each = parts.iter().enumerate().map(|(nth, waves)| {
        let common = run::Common { backend, store, terms, under_way: &under_way };
        execute_component(waves, nth, common, &told)
    });
    let mut all = ExecutionResult::default();
    for one in join_all(each).await {
        all.ended.extend(one.ended);
        all.to_roll_back.extend(one.to_roll_back);
    }
    all.ended.sort_by_key(|ended| ended.step);
    all
}

/// The parts of a plan that have nothing to do with each other, each as a plan of its own. The numbers of the steps stay.
pub fn split(plan: &Plan, terms: &ExecutionContext) -> Vec<Plan> {
    let alone = |waves: std::borrow::Cow<'_, [Wave]>| Plan { waves: waves.into_owned(), ..Plan::default() };
    components::components(plan, terms, components::SplitBy::Waiting).into_iter().map(alone).collect()
}

/// One part of it.
async fn execute_component<B: Backend, S: Store>(
    waves: &[Wave],
    nth: usize,
    common: run::Common<'_, B, S>,
    told: &Mutex<&mut (dyn FnMut(ExecutionEvent<'_>) + Send)>,
) -> ExecutionResult {
    let mut tell = |said: ExecutionEvent<'_>| {
        if let Ok(mut told) = told.lock() {
            told(said);
        }
    };
    let mut run = match run::Run::new(common, nth, &mut tell).await {
        Ok(run) => run,
        Err(error) => {
            let none = not_begun(waves, &format!("not begun: {error}"));
            none.ended.iter().for_each(|ended| tell(ExecutionEvent::Ended(ended)));
            return none;
        }
    };
    for (nth, wave) in waves.iter().enumerate() {
        (run.told)(ExecutionEvent::Wave { nth: nth + 1, of: waves.len() });
        run.resume_soak(waves, wave).await;
        run.wave(wave).await;
        if (nth + 1 < waves.len() || !wave.gates.is_empty()) && !run.is_over() {
            run.gates(wave).await;
        }
    }
    run.over().await
}

/// Nothing of it was begun.
fn not_begun(waves: &[Wave], why: &str) -> ExecutionResult {
    let ended = |step: &Step| StepResult {
        step: step.id,
        instance: step.instance.clone(),
        op: step.op,
        outcome: StepOutcome::Failed,
        code: 0,
        message: why.to_owned(),
        took_ms: 0,
        reason: None,
    };
    ExecutionResult {
        ended: waves.iter().flat_map(|wave| &wave.steps).map(ended).collect(),
        to_roll_back: BTreeSet::new(),
    }
}
