//! What a run that died had begun is found out, not done again.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::journal::{self, Call, JournaledStep};
use super::lost_reply::{Inference, earliest, has_run, infer_outcome, operation_timeout};
use super::{GRACE, ledger};
use crate::backend::{
    Backend, BackendError, InstanceQuery, OperationState, OperationStatus, Task, name_of_move,
};
use crate::model::{
    AutoType, HashedSpec, Host, InstanceKey, Observed, ObservedInstance, Op, SpecSide, Step, Time,
};
use crate::reconcile::{Caps, Expected, after};
use crate::store::{Error, Store};

/// Why it is not settled.
#[derive(Clone, Debug)]
pub enum RecoveryError {
    Target(BackendError),
    State(Error),
    /// So many steps are still under way.
    UnderWay(usize),
}

impl fmt::Display for RecoveryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RecoveryError::Target(fault) => write!(f, "{fault}"),
            RecoveryError::State(error) => write!(f, "{error}"),
            RecoveryError::UnderWay(many) => {
                write!(f, "{many} steps of an interrupted run are still under way")
            }
        }
    }
}

/// How often it is asked.
const PACE: Duration = Duration::from_millis(100);
const SLOWEST: Duration = Duration::from_secs(2);

/// Settles what former runs of this owner left ([`journal::left`]). Whoever calls this holds the writer's lease.
pub async fn recover<B: Backend, S: Store>(
    backend: &B,
    store: &S,
    whom: (&str, &Caps),
    owner: &str,
    left: Vec<(String, Call)>,
    deadline: Instant,
) -> Result<(), RecoveryError> {
    let settled = recover_each(backend, store, whom, owner, left, deadline);
    let settled = tokio::time::timeout_at(deadline + GRACE, settled).await;
    settled.unwrap_or(Err(RecoveryError::Target(BackendError::NoAnswer)))
}

async fn recover_each<B: Backend, S: Store>(
    backend: &B,
    store: &S,
    (target, caps): (&str, &Caps),
    owner: &str,
    left: Vec<(String, Call)>,
    deadline: Instant,
) -> Result<(), RecoveryError> {
    for (key, call) in left {
        let task = match backend.has_idempotency_keys() {
            true => find(backend, &journal::name_of(&key), &call).await.map_err(RecoveryError::Target)?,
            false => call.task.clone(),
        };
        let answers = match &task {
            Some(task) => wait_for(backend, task, &call, deadline).await?,
            None => Vec::new(),
        };
        if caps.reads_specs {
            // Never taken on: with our generation it never will be.
            let foreign = refused(&call, &answers, owner, backend.now());
            let known = ledger::noted(target, &foreign);
            journal::settle(store, &key, known).await.map_err(RecoveryError::State)?;
            continue;
        }
        see_restarts(backend, &call, &answers, deadline).await?;
        let known = ledger::read(store, target).await.map_err(RecoveryError::State)?;
        let notes = find_out(backend, &call, &answers, &known, caps, owner).await;
        journal::settle(store, &key, ledger::noted(target, &notes)).await.map_err(RecoveryError::State)?;
    }
    Ok(())
}

/// What is still to be waited for. What was registered was answered at once, and no task has a row of it.
async fn find<B: Backend>(backend: &B, name: &str, call: &Call) -> Result<Option<Task>, BackendError> {
    let is_registry = |op: Op| matches!(op, Op::Register | Op::Unregister);
    let operations: Vec<InstanceKey> =
        call.steps.iter().filter(|step| !is_registry(step.op)).map(|step| step.instance.clone()).collect();
    let moves = call.steps.iter().filter(|step| step.moves);
    let mut asked = vec![(name.to_owned(), operations)];
    asked.extend(moves.enumerate().map(|(nth, step)| (name_of_move(name, nth), vec![step.instance.clone()])));
    let mut all = Task::default();
    for (name, instances) in asked.iter().filter(|(_, instances)| !instances.is_empty()) {
        if let Some(task) = backend.find_task(name, instances).await? {
            all.ids.extend(task.ids);
            all.rows.extend(task.rows);
        }
    }
    Ok(Some(all).filter(|all| !all.ids.is_empty()))
}

/// Until every row is final, or cannot be any more.
async fn wait_for<B: Backend>(
    backend: &B,
    task: &Task,
    call: &Call,
    deadline: Instant,
) -> Result<Vec<OperationStatus>, RecoveryError> {
    // As long as a run that lives would wait, since it was sent.
    let longest =
        call.steps.iter().map(|began| operation_timeout(&step_of(began), PACE)).max().unwrap_or_default();
    let until = Instant::now() + longest.saturating_sub(gone(backend, call));
    loop {
        let asked = backend.poll(task).await;
        let answers = match asked {
            Ok(answers) => answers,
            // It may have forgotten the task: then looking tells.
            Err(BackendError::Refused(_)) if !backend.has_idempotency_keys() => return Ok(Vec::new()),
            Err(fault) if backend.has_idempotency_keys() => return Err(RecoveryError::Target(fault)),
            Err(_) => Vec::new(),
        };
        let open = answers.iter().filter(|answer| answer.result == OperationState::InProgress).count();
        if open == 0 && !answers.is_empty() {
            return Ok(answers);
        }
        if !backend.has_idempotency_keys() && Instant::now() >= until {
            return Ok(answers);
        }
        if Instant::now() >= deadline {
            return Err(RecoveryError::UnderWay(open.max(1)));
        }
        tokio::time::sleep(PACE).await;
    }
}

/// How long ago a call was made.
fn gone<B: Backend>(backend: &B, call: &Call) -> Duration {
    Duration::from_secs(call.at.map_or(0, |at| backend.now().secs_since(at)))
}

/// A restart that may have been sent, and of which nothing was told, may still come, and a second one would be one too many:
/// it is looked for until it has come, or cannot come any more.
async fn see_restarts<B: Backend>(
    backend: &B,
    call: &Call,
    answers: &[OperationStatus],
    deadline: Instant,
) -> Result<(), RecoveryError> {
    let is_told = |instance: &InstanceKey| {
        let row = answers.iter().find(|answer| answer.instance == *instance);
        row.is_some_and(|row| row.result != OperationState::InProgress)
    };
    let mut open: Vec<(&JournaledStep, Step)> = call
        .steps
        .iter()
        .filter(|began| began.op == Op::Restart && !is_told(&began.instance))
        .map(|began| (began, step_of(began)))
        .collect();
    let longest = open.iter().map(|(_, step)| operation_timeout(step, PACE)).max().unwrap_or_default();
    let until = Instant::now() + longest.saturating_sub(gone(backend, call));
    let mut pace = PACE;
    while !open.is_empty() && Instant::now() < until {
        let subjects: Vec<InstanceQuery> = open.iter().map(|(_, step)| subject(step)).collect();
        if let Ok(look) = backend.observe_live(&subjects).await {
            open.retain(|(began, step)| {
                let now = look.instances.get(&step.instance);
                let is_seen = !look.gaps.contains_key(&step.instance.host);
                !is_seen
                    || infer_outcome(step.op, Some(&before(began)), now, false, None) == Inference::NotYet
            });
        }
        if Instant::now() >= deadline {
            return Err(RecoveryError::UnderWay(open.len()));
        }
        if !open.is_empty() {
            tokio::time::sleep(pace).await;
            pace = (pace * 2).min(SLOWEST);
        }
    }
    Ok(())
}

fn subject(step: &Step) -> InstanceQuery {
    InstanceQuery { instance: step.instance.clone(), host: step.host.clone(), spec: step.spec.clone() }
}

/// How it was when the step was begun.
fn before(began: &JournaledStep) -> ObservedInstance {
    ObservedInstance {
        hosted: Some(began.hosted),
        pid: began.pid,
        running: Some(began.pid.is_some()),
        ..ObservedInstance::default()
    }
}

/// What is known of each instance now: by its row, else by a close look.
async fn find_out<B: Backend>(
    backend: &B,
    call: &Call,
    answers: &[OperationStatus],
    known: &ledger::Ledger,
    caps: &Caps,
    owner: &str,
) -> std::collections::BTreeMap<InstanceKey, ledger::Entry> {
    let steps: Vec<(&JournaledStep, Step)> = call.steps.iter().map(|began| (began, step_of(began))).collect();
    let subjects: Vec<InstanceQuery> = steps.iter().map(|(_, step)| subject(step)).collect();
    let look: Option<Observed> = backend.observe_live(&subjects).await.ok();
    let mut notes = std::collections::BTreeMap::new();
    for (began, step) in &steps {
        let entry = known.entries.get(&step.instance);
        let before = before(began);
        let told =
            answers.iter().find(|answer| answer.instance == step.instance).map(|answer| &answer.result);
        let once = step.spec.as_ref().is_some_and(|spec| spec.monitor.auto_type == AutoType::OneShot);
        let is_ours = began.owned || entry.is_some_and(|entry| entry.proves(owner));
        let unproven = call.at.filter(|_| !is_ours);
        let mut is_refused = !is_ours && matches!(told, Some(OperationState::Failed { code: 828, .. }));
        let is_done = match (told, &look) {
            (Some(OperationState::Done), _) => Some(true),
            // The same codes as in a run that lives.
            (Some(OperationState::Failed { code, .. }), _) if has_run(step.op, *code, once) => Some(true),
            (Some(OperationState::Failed { code: 829, .. }), _) if matches!(step.op, Op::Stop | Op::Kill) => {
                None
            }
            (Some(OperationState::Failed { .. }), _) if is_refused => None,
            (Some(OperationState::Failed { .. }), _) => Some(false),
            (Some(OperationState::InProgress) | None, None) => None,
            (Some(OperationState::InProgress) | None, Some(look)) => {
                match look.gaps.contains_key(&step.instance.host) {
                    true => None,
                    false => match infer_outcome(
                        step.op,
                        Some(&before),
                        look.instances.get(&step.instance),
                        once,
                        unproven,
                    ) {
                        Inference::Done => Some(true),
                        Inference::NotOurs => {
                            is_refused = true;
                            None
                        }
                        // What can be done again without harm is taken as not done.
                        Inference::NotYet | Inference::Again => Some(false),
                        Inference::Unknown => None,
                    },
                }
            }
        };
        let expected = match is_done {
            Some(true) => after(step, Some(&as_known(entry, &before)), owner, caps),
            Some(false) if let Some(entry) = entry => {
                notes.insert(step.instance.clone(), entry.perhaps(step));
                continue;
            }
            Some(false) | None => Expected::Unknown,
        };
        let mut noted = ledger::Entry::after(step, &expected, owner, entry, backend.now());
        noted.once &= is_done.is_none() && !is_refused;
        noted.ours_after = match step.op {
            Op::Start if is_refused => Some(ledger::NEVER),
            Op::Start if noted.unsure => unproven.map(earliest),
            Op::Register if noted.unsure => unproven,
            Op::Register if caps.operates_on_registered_spec => unproven,
            _ => noted.ours_after,
        };
        if noted.unsure {
            // Once it can be seen again, a restart shows by its pid.
            noted.pid = began.pid.or(noted.pid);
        }
        notes.insert(step.instance.clone(), noted);
    }
    notes
}

/// Starts that were refused because a process runs that nothing proves ours, where specs are read back.
fn refused(
    call: &Call,
    answers: &[OperationStatus],
    owner: &str,
    now: Time,
) -> std::collections::BTreeMap<InstanceKey, ledger::Entry> {
    let is_refused = |began: &&JournaledStep| {
        let row = answers.iter().find(|answer| answer.instance == began.instance);
        began.op == Op::Start
            && !began.owned
            && row.is_some_and(|row| matches!(row.result, OperationState::Failed { code: 828, .. }))
    };
    let entry = |began: &JournaledStep| {
        let noted = ledger::Entry::after(&step_of(began), &Expected::Unknown, owner, None, now);
        (began.instance.clone(), ledger::Entry { once: false, ours_after: Some(ledger::NEVER), ..noted })
    };
    call.steps.iter().filter(is_refused).map(entry).collect()
}

/// How it was before the step, as far as the ledger and the journal know.
fn as_known(entry: Option<&ledger::Entry>, before: &ObservedInstance) -> ObservedInstance {
    match entry {
        Some(entry) => ObservedInstance { pid: before.pid, ..entry.seen() },
        None => before.clone(),
    }
}

/// A step as far as the journal tells of it.
fn step_of(began: &JournaledStep) -> Step {
    let host =
        Host { key: began.instance.host.clone(), supplier: began.supplier, agent_id: began.agent_id.clone() };
    Step {
        id: 0,
        instance: began.instance.clone(),
        host,
        op: began.op,
        spec_side: SpecSide::New,
        spec: began.spec.as_ref().map(|spec| Arc::new(HashedSpec::new((**spec).clone()))),
        revision: began.revision,
        reloaded_fields: Vec::new(),
        pid_stays: began.op.pid_stays(),
        needs_live_check: false,
        from: None,
        why: Vec::new(),
    }
}
