//! Recovery of calls in the journal of a crashed run: their outcome is inferred, and no call is sent again.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::journal::{self, Call, JournaledStep};
use super::lost_reply::{Inference, earliest, has_run, infer_outcome, operation_timeout};
use super::{GRACE, ledger};
use crate::backend::{
    Backend, BackendError, InstanceQuery, OperationState, OperationStatus, RowState, Task, name_of_move,
};
use crate::model::{
    AutoType, HashedSpec, Host, InstanceKey, Observed, ObservedInstance, Op, RunningProcess, SpecSide, Step,
    Time, count,
};
use crate::reconcile::{Caps, Expected, after};
use crate::retry_delay::RetryDelay;
use crate::store::{Error, Store};

/// Reason why recovery is not finished.
#[derive(Clone, Debug, thiserror::Error)]
pub enum RecoveryError {
    #[error(transparent)]
    Target(BackendError),
    #[error(transparent)]
    State(Error),
    /// Number of steps that are still in flight.
    #[error("an interrupted run has {} in flight", count(*.0, "step"))]
    UnderWay(usize),
}

/// Poll interval: first and slowest.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(2);

/// Resolves the calls that earlier runs of this owner left ([`journal::unfinished`]). The caller holds the writer
/// lease.
pub async fn recover<B: Backend, S: Store>(
    backend: &B,
    store: &S,
    target_caps: (&str, &Caps),
    owner: &str,
    left: Vec<(String, Call)>,
    deadline: Instant,
) -> Result<(), RecoveryError> {
    let recovered = recover_each(backend, store, target_caps, owner, left, deadline);
    let recovered = tokio::time::timeout_at(deadline + GRACE, recovered).await;
    recovered.unwrap_or(Err(RecoveryError::Target(BackendError::NoAnswer)))
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
            // A call that was never accepted cannot be any more: the target refuses its lower generation.
            let foreign = refused(&call, &answers, owner, backend.now());
            let known = ledger::noted(target, &foreign);
            journal::settle(store, &key, known).await.map_err(RecoveryError::State)?;
            continue;
        }
        await_restarts(backend, &call, &answers, deadline).await?;
        let known = ledger::read(store, target).await.map_err(RecoveryError::State)?;
        let notes = infer_entries(backend, &call, &answers, &known, caps, owner).await;
        journal::settle(store, &key, ledger::noted(target, &notes)).await.map_err(RecoveryError::State)?;
    }
    Ok(())
}

/// The task of a call that still has to be polled. Registrations were answered at once, and no task has a row of
/// them.
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

/// Polls until every row is final, or until no result can come any more.
async fn wait_for<B: Backend>(
    backend: &B,
    task: &Task,
    call: &Call,
    deadline: Instant,
) -> Result<Vec<OperationStatus>, RecoveryError> {
    // A running execution would wait as long, counted from when the call was sent.
    let longest = call
        .steps
        .iter()
        .map(|began| operation_timeout(&step_of(began), POLL_INTERVAL))
        .max()
        .unwrap_or_default();
    let until = Instant::now() + longest.saturating_sub(time_since_sent(backend, call));
    loop {
        let asked = backend.poll(task).await;
        let answers = match asked {
            Ok(answers) => answers,
            // The target may have dropped the task: then the outcome is observed.
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
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Time since a call was sent.
fn time_since_sent<B: Backend>(backend: &B, call: &Call) -> Duration {
    Duration::from_secs(call.at.map_or(0, |at| backend.now().secs_since(at)))
}

/// Waits for restarts without a result: such a restart may still take effect, and a second one must not follow.
/// Observes until its effect is visible, or until it can no longer take effect.
async fn await_restarts<B: Backend>(
    backend: &B,
    call: &Call,
    answers: &[OperationStatus],
    deadline: Instant,
) -> Result<(), RecoveryError> {
    let has_result = |instance: &InstanceKey| {
        let row = answers.iter().find(|answer| answer.instance == *instance);
        row.is_some_and(|row| row.result != OperationState::InProgress)
    };
    let mut open: Vec<(&JournaledStep, Step)> = call
        .steps
        .iter()
        .filter(|began| began.op == Op::Restart && !has_result(&began.instance))
        .map(|began| (began, step_of(began)))
        .collect();
    let longest =
        open.iter().map(|(_, step)| operation_timeout(step, POLL_INTERVAL)).max().unwrap_or_default();
    let until = Instant::now() + longest.saturating_sub(time_since_sent(backend, call));
    let mut interval = POLL_INTERVAL;
    while !open.is_empty() && Instant::now() < until {
        let subjects: Vec<InstanceQuery> = open.iter().map(|(_, step)| subject(step)).collect();
        if let Ok(observed) = backend.observe_live(&subjects).await {
            open.retain(|(began, step)| {
                let now = observed.instances.get(&step.instance);
                let is_seen = !observed.gaps.contains_key(&step.instance.host);
                !is_seen
                    || infer_outcome(step.op, Some(&before(began)), now, false, None) == Inference::NotYet
            });
        }
        if Instant::now() >= deadline {
            return Err(RecoveryError::UnderWay(open.len()));
        }
        if !open.is_empty() {
            tokio::time::sleep(interval).await;
            interval = RetryDelay::doubling(POLL_INTERVAL, MAX_POLL_INTERVAL).next(interval);
        }
    }
    Ok(())
}

fn subject(step: &Step) -> InstanceQuery {
    InstanceQuery { instance: step.instance.clone(), host: step.host.clone(), spec: step.spec.clone() }
}

/// State before the step.
fn before(began: &JournaledStep) -> ObservedInstance {
    ObservedInstance {
        hosted: Some(began.hosted),
        running: Some(began.pid.is_some()),
        process: RunningProcess { pid: began.pid, ..RunningProcess::default() },
        ..ObservedInstance::default()
    }
}

/// Ledger entries of the call's instances: by their rows, otherwise by a live status check.
async fn infer_entries<B: Backend>(
    backend: &B,
    call: &Call,
    answers: &[OperationStatus],
    known: &ledger::Ledger,
    caps: &Caps,
    owner: &str,
) -> std::collections::BTreeMap<InstanceKey, ledger::Entry> {
    let steps: Vec<(&JournaledStep, Step)> = call.steps.iter().map(|began| (began, step_of(began))).collect();
    let subjects: Vec<InstanceQuery> = steps.iter().map(|(_, step)| subject(step)).collect();
    let observed: Option<Observed> = backend.observe_live(&subjects).await.ok();
    let mut notes = std::collections::BTreeMap::new();
    for (began, step) in &steps {
        let entry = known.entries.get(&step.instance);
        let before = before(began);
        let status =
            answers.iter().find(|answer| answer.instance == step.instance).map(|answer| &answer.result);
        let once = step.spec.as_ref().is_some_and(|spec| spec.monitor.auto_type == AutoType::OneShot);
        let is_ours = began.owned || entry.is_some_and(|entry| entry.proves(owner));
        let unproven = call.at.filter(|_| !is_ours);
        let mut is_refused = !is_ours && status.is_some_and(is_already_running);
        let is_done = match (status, &observed) {
            (Some(OperationState::Done { .. }), _) => Some(true),
            // The same states as in a running execution.
            (Some(OperationState::Failed { state, .. }), _) if has_run(step.op, *state, once) => Some(true),
            (Some(OperationState::Failed { state: RowState::NotRunning, .. }), _)
                if matches!(step.op, Op::Stop | Op::Kill) =>
            {
                None
            }
            (Some(OperationState::Failed { .. }), _) if is_refused => None,
            (Some(OperationState::Failed { .. }), _) => Some(false),
            (Some(OperationState::InProgress) | None, None) => None,
            (Some(OperationState::InProgress) | None, Some(observed)) => {
                match observed.gaps.contains_key(&step.instance.host) {
                    true => None,
                    false => match infer_outcome(
                        step.op,
                        Some(&before),
                        observed.instances.get(&step.instance),
                        once,
                        unproven,
                    ) {
                        Inference::Done => Some(true),
                        Inference::NotOurs => {
                            is_refused = true;
                            None
                        }
                        // A repeatable step counts as not executed.
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
            // Once the instance can be observed again, a restart shows by its pid.
            noted.pid = began.pid.or(noted.pid);
        }
        notes.insert(step.instance.clone(), noted);
    }
    notes
}

fn is_already_running(status: &OperationState) -> bool {
    matches!(status, OperationState::Failed { state: RowState::AlreadyRunning, .. })
}

/// Starts that were refused because a process runs that is not proven ours, where specs are read back.
fn refused(
    call: &Call,
    answers: &[OperationStatus],
    owner: &str,
    now: Time,
) -> std::collections::BTreeMap<InstanceKey, ledger::Entry> {
    let is_refused = |began: &&JournaledStep| {
        let row = answers.iter().find(|answer| answer.instance == began.instance);
        began.op == Op::Start && !began.owned && row.is_some_and(|row| is_already_running(&row.result))
    };
    let entry = |began: &JournaledStep| {
        let noted = ledger::Entry::after(&step_of(began), &Expected::Unknown, owner, None, now);
        (began.instance.clone(), ledger::Entry { once: false, ours_after: Some(ledger::NEVER), ..noted })
    };
    call.steps.iter().filter(is_refused).map(entry).collect()
}

/// State before the step, from the ledger and the journal.
fn as_known(entry: Option<&ledger::Entry>, before: &ObservedInstance) -> ObservedInstance {
    match entry {
        Some(entry) => {
            let mut seen = entry.seen();
            seen.process.pid = before.process.pid;
            seen
        }
        None => before.clone(),
    }
}

/// The step, as far as the journal records it.
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
