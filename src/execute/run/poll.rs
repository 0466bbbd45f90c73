//! Results of sent calls: by polling the target, and without a result by observation.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use tokio::time::Instant;
use tracing::info;

use super::{Chains, InFlightCall, REGISTERED_ALREADY, RUNS_ALREADY, Run};
use crate::backend::{Backend, BackendError, InstanceQuery, OperationState, OperationStatus, RowState};
use crate::execute::lost_reply::{Inference, infer_outcome, operation_timeout};
use crate::execute::{StepOutcome, in_time};
use crate::model::{AutoType, Op, Step};
use crate::store::Store;

/// A target that does not reply for this long is unreachable: the outcome of sent steps is unknown.
const SILENCE_LIMIT: Duration = Duration::from_secs(15);
/// Minimum time for an observation close to the deadline.
const MIN_OBSERVE_TIME: Duration = Duration::from_secs(1);

impl<B: Backend, S: Store> Run<'_, B, S> {
    /// Polls all calls in flight concurrently.
    pub(super) async fn poll<'s>(
        &mut self,
        flights: Vec<InFlightCall<'s>>,
        chains: &mut Chains<'_, 's>,
        ready: &mut VecDeque<&'s Step>,
    ) -> Vec<InFlightCall<'s>> {
        let (backend, deadline) = (self.backend, self.terms.settings.deadline);
        let one = |flight: InFlightCall<'s>| async move {
            let answers = match &flight.task {
                Some(task) => Some(in_time(deadline, backend.poll(task)).await),
                None => None,
            };
            (flight, answers)
        };
        let polled: Vec<_> =
            stream::iter(flights).map(one).buffered(backend.max_concurrent_calls()).collect().await;
        let mut open = Vec::new();
        for (mut flight, answers) in polled {
            match answers {
                Some(Ok(answers)) => {
                    self.silent_since = None;
                    self.apply_statuses(&mut flight, answers, chains, ready);
                    self.resolve_overdue(&mut flight, chains, ready).await;
                }
                Some(Err(fault)) => {
                    info!(%fault, "poll failed; retrying");
                    let since = *self.silent_since.get_or_insert_with(Instant::now);
                    if since.elapsed() > SILENCE_LIMIT && self.backend.has_idempotency_keys() {
                        // The call stays in the journal, and the next run resolves it.
                        self.end_as_unknown(flight, &fault.to_string(), chains);
                        continue;
                    }
                    self.resolve_overdue(&mut flight, chains, ready).await;
                }
                None => self.infer_outcomes(&mut flight, None, chains, ready).await,
            }
            open.extend(self.finish_if_done(flight).await);
        }
        open
    }

    pub(super) fn apply_statuses<'s>(
        &mut self,
        flight: &mut InFlightCall<'s>,
        answers: Vec<OperationStatus>,
        chains: &mut Chains<'_, 's>,
        ready: &mut VecDeque<&'s Step>,
    ) {
        for OperationStatus { order, result, .. } in answers {
            let (state, message) = match result {
                OperationState::InProgress => continue,
                OperationState::Done { note } => (RowState::Done, note),
                OperationState::Failed { state, message } => (state, message),
            };
            let Some(step) = flight.steps.remove(&order) else { continue };
            let (outcome, message) = self.outcome_of(step, state, message);
            self.close(step, outcome, state, message, flight.begun, chains, ready);
        }
    }

    /// Maps a row's state to an outcome. Some states mean that there was nothing to do.
    fn outcome_of(&self, step: &Step, state: RowState, message: String) -> (StepOutcome, String) {
        match (step.op, state) {
            (_, RowState::Done) => (StepOutcome::Done, message),
            // Without our label or ledger entry these mean that another owner has it.
            (Op::Start, RowState::AlreadyRunning) if self.is_foreign(step) => {
                (StepOutcome::Failed, format!("{RUNS_ALREADY} ({message})"))
            }
            (Op::Register, RowState::AlreadyRegistered) => {
                (StepOutcome::Failed, format!("{REGISTERED_ALREADY} ({message})"))
            }
            (Op::Start, RowState::AlreadyRunning) if self.runs_as_wanted(step) => {
                (StepOutcome::AlreadySo, message)
            }
            (Op::Start, RowState::AlreadyRunning) => {
                let why = "process runs already, with another spec: a restart is needed";
                (StepOutcome::Failed, format!("{why} ({message})"))
            }
            (Op::Stop | Op::Kill, RowState::NotRunning) => (StepOutcome::AlreadySo, message),
            // A one-shot has ended by the time it is checked.
            (Op::Start, RowState::CheckFailed) if is_once(step) && !self.terms.settings.caps.reads_health => {
                (StepOutcome::Done, message)
            }
            // Our gateway ended the row without a result: the agent may have executed the operation, or may still.
            (_, RowState::NoResult) => (StepOutcome::Unknown, message),
            _ => (StepOutcome::Failed, message),
        }
    }

    /// Where specs are read back, the next observation shows it; elsewhere the ledger decides.
    fn runs_as_wanted(&self, step: &Step) -> bool {
        if self.terms.settings.caps.reads_specs {
            return true;
        }
        let entry = self.ledger.known.get(&step.instance);
        let live = entry.and_then(|entry| entry.live.as_ref().or(entry.given.as_ref()));
        match (live, &step.spec) {
            (Some(live), Some(wanted)) => live.spec == ***wanted || live.revision == step.revision,
            (None, _) | (_, None) => false,
        }
    }

    /// Resolves rows that stay in progress, or are missing, for longer than their operation can take.
    async fn resolve_overdue<'s>(
        &mut self,
        flight: &mut InFlightCall<'s>,
        chains: &mut Chains<'_, 's>,
        ready: &mut VecDeque<&'s Step>,
    ) {
        if self.backend.has_idempotency_keys() {
            return;
        }
        let (_, slow) = self.backend.poll_interval();
        let late: BTreeSet<String> = flight
            .steps
            .iter()
            .filter(|(_, step)| flight.begun.elapsed() > operation_timeout(step, slow))
            .map(|(id, _)| id.clone())
            .collect();
        if !late.is_empty() {
            self.infer_outcomes(flight, Some(&late), chains, ready).await;
        }
    }

    /// Infers outcomes from an observation. `only`: these steps, for the last time.
    async fn infer_outcomes<'s>(
        &mut self,
        flight: &mut InFlightCall<'s>,
        only: Option<&BTreeSet<String>>,
        chains: &mut Chains<'_, 's>,
        ready: &mut VecDeque<&'s Step>,
    ) {
        let meant = |id: &String| only.is_none_or(|only| only.contains(id));
        let steps: Vec<(String, &Step)> =
            flight.steps.iter().filter(|(id, _)| meant(id)).map(|(id, step)| (id.clone(), *step)).collect();
        let subjects: Vec<InstanceQuery> = steps.iter().map(|(_, step)| self.subject(step)).collect();
        let left =
            self.terms.settings.deadline.saturating_duration_since(Instant::now()).max(MIN_OBSERVE_TIME);
        let observed = tokio::time::timeout(left, self.backend.observe_live(&subjects)).await;
        let observed = observed.unwrap_or(Err(BackendError::NoAnswer));
        let (_, slow) = self.backend.poll_interval();
        for (id, step) in steps {
            let inferred = match &observed {
                Ok(observed) if observed.gaps.contains_key(&step.instance.host) => Inference::Unknown,
                Ok(observed) => {
                    let now = observed.instances.get(&step.instance);
                    let unproven = self.is_foreign(step).then(|| self.sent_at(flight.begun));
                    infer_outcome(step.op, self.seen.get(&step.instance), now, is_once(step), unproven)
                }
                Err(_) => Inference::Unknown,
            };
            let is_last = only.is_some() || flight.begun.elapsed() > operation_timeout(step, slow);
            let mut state = RowState::Unreported;
            let (outcome, message) = match inferred {
                Inference::Done => (StepOutcome::Done, String::new()),
                Inference::NotOurs => {
                    state = RowState::AlreadyRunning;
                    (StepOutcome::Failed, RUNS_ALREADY.to_owned())
                }
                Inference::Again => {
                    (StepOutcome::Unknown, format!("{}: the next observation decides", flight.lost_reply()))
                }
                Inference::NotYet | Inference::Unknown if !is_last => continue,
                Inference::NotYet if only.is_none() => {
                    let message = format!("{}, and the operation did not take effect", flight.lost_reply());
                    (StepOutcome::Failed, message)
                }
                Inference::NotYet | Inference::Unknown => {
                    let what = flight.response.as_deref().unwrap_or("no result was received");
                    let message = format!("{what}, and the observed state does not show whether it ran");
                    (StepOutcome::Unknown, message)
                }
            };
            flight.steps.remove(&id);
            self.close(step, outcome, state, message, flight.begun, chains, ready);
        }
    }

    fn end_as_unknown(&mut self, flight: InFlightCall<'_>, why: &str, chains: &mut Chains<'_, '_>) {
        for step in flight.steps.into_values() {
            self.end(step, StepOutcome::Unknown, RowState::Unreported, why.to_owned(), flight.begun);
            self.skip_rest(chains, step);
        }
    }
}

pub(super) fn is_once(step: &Step) -> bool {
    step.spec.as_ref().is_some_and(|spec| spec.monitor.auto_type == AutoType::OneShot)
}
