//! What became of what was sent: by asking the target, and where no word comes, by looking.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use futures_util::{StreamExt, stream};
use tokio::time::Instant;
use tracing::info;

use super::{Chains, Flight, REGISTERED_ALREADY, RUNS_ALREADY, Run};
use crate::backend::{Backend, BackendError, InstanceQuery, OperationState as Said, OperationStatus};
use crate::execute::lost_reply::{Inference, infer_outcome, operation_timeout};
use crate::execute::{StepOutcome, in_time};
use crate::model::{AutoType, Op, Step};
use crate::store::Store;

/// A target that does not answer for this long is gone: what was sent is unknown.
const SILENCE: Duration = Duration::from_secs(15);
/// Row code of a start that found a process running.
const ALREADY_RUNNING: i64 = 828;
/// Even when the time is nearly over, a look has this much.
const LEAST_LOOK: Duration = Duration::from_secs(1);

impl<B: Backend, S: Store> Run<'_, B, S> {
    /// Asks about all that is under way, side by side.
    pub(super) async fn ask<'s>(
        &mut self,
        flights: Vec<Flight<'s>>,
        chains: &mut Chains<'_, 's>,
        ready: &mut VecDeque<&'s Step>,
    ) -> Vec<Flight<'s>> {
        let (backend, deadline) = (self.backend, self.terms.deadline);
        let one = |flight: Flight<'s>| async move {
            let answers = match &flight.task {
                Some(task) => Some(in_time(deadline, backend.poll(task)).await),
                None => None,
            };
            (flight, answers)
        };
        let told: Vec<_> =
            stream::iter(flights).map(one).buffered(backend.max_concurrent_calls()).collect().await;
        let mut open = Vec::new();
        for (mut flight, answers) in told {
            match answers {
                Some(Ok(answers)) => {
                    self.silent = None;
                    self.take_in(&mut flight, answers, chains, ready);
                    self.overdue(&mut flight, chains, ready).await;
                }
                Some(Err(fault)) => {
                    info!(%fault, "asked again");
                    let since = *self.silent.get_or_insert_with(Instant::now);
                    if since.elapsed() > SILENCE && self.backend.has_idempotency_keys() {
                        // The journal keeps it: whoever comes next finds out what became of it.
                        self.lose(flight, &fault.to_string(), chains);
                        continue;
                    }
                    self.overdue(&mut flight, chains, ready).await;
                }
                None => self.look_into(&mut flight, None, chains, ready).await,
            }
            open.extend(self.if_open(flight).await);
        }
        open
    }

    pub(super) fn take_in<'s>(
        &mut self,
        flight: &mut Flight<'s>,
        answers: Vec<OperationStatus>,
        chains: &mut Chains<'_, 's>,
        ready: &mut VecDeque<&'s Step>,
    ) {
        for OperationStatus { order, result, .. } in answers {
            let (code, message) = match result {
                Said::InProgress => continue,
                Said::Done => (0, String::new()),
                Said::Failed { code, message } => (code, message),
            };
            let Some(step) = flight.steps.remove(&order) else { continue };
            let (outcome, message) = self.understood(step, code, message);
            self.close(step, outcome, code, message, flight.begun, chains, ready);
        }
    }

    /// Some codes say that there was nothing to do.
    fn understood(&self, step: &Step, code: i64, message: String) -> (StepOutcome, String) {
        match (step.op, code) {
            (_, 0) => (StepOutcome::Done, String::new()),
            // Without our label or ledger entry these mean that another owner has it.
            (Op::Start, 828) if self.is_foreign(step) => {
                (StepOutcome::Failed, format!("{RUNS_ALREADY} ({message})"))
            }
            (Op::Register, 850) => (StepOutcome::Failed, format!("{REGISTERED_ALREADY} ({message})")),
            (Op::Start, 828) if self.runs_as_wanted(step) => (StepOutcome::AlreadySo, message),
            (Op::Start, 828) => {
                let why = "it runs already, and not as it is wanted: a restart is needed";
                (StepOutcome::Failed, format!("{why} ({message})"))
            }
            (Op::Stop | Op::Kill, 829) => (StepOutcome::AlreadySo, message),
            // A one-shot has ended by the time it is checked.
            (Op::Start, 836) if is_once(step) && !self.terms.caps.reads_health => {
                (StepOutcome::Done, message)
            }
            // Our gateway ended the row without a result: the agent may have carried it out, or may still.
            (_, 1_900_504) => (StepOutcome::Unknown, message),
            _ => (StepOutcome::Failed, message),
        }
    }

    /// Where specs are read back, the next look tells; elsewhere only what we know of it counts.
    fn runs_as_wanted(&self, step: &Step) -> bool {
        if self.terms.caps.reads_specs {
            return true;
        }
        let entry = self.known.get(&step.instance);
        let live = entry.and_then(|entry| entry.live.as_ref().or(entry.given.as_ref()));
        match (live, &step.spec) {
            (Some(live), Some(wanted)) => live.spec == ***wanted || live.revision == step.revision,
            (None, _) | (_, None) => false,
        }
    }

    /// Rows that stay in progress, or never come, for longer than their operation can take.
    async fn overdue<'s>(
        &mut self,
        flight: &mut Flight<'s>,
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
            self.look_into(flight, Some(&late), chains, ready).await;
        }
    }

    /// Finds out by looking what became of steps; `only`: of these, for the last time.
    async fn look_into<'s>(
        &mut self,
        flight: &mut Flight<'s>,
        only: Option<&BTreeSet<String>>,
        chains: &mut Chains<'_, 's>,
        ready: &mut VecDeque<&'s Step>,
    ) {
        let meant = |id: &String| only.is_none_or(|only| only.contains(id));
        let steps: Vec<(String, &Step)> =
            flight.steps.iter().filter(|(id, _)| meant(id)).map(|(id, step)| (id.clone(), *step)).collect();
        let subjects: Vec<InstanceQuery> = steps.iter().map(|(_, step)| self.subject(step)).collect();
        let left = self.terms.deadline.saturating_duration_since(Instant::now()).max(LEAST_LOOK);
        let look = tokio::time::timeout(left, self.backend.observe_live(&subjects)).await;
        let look = look.unwrap_or(Err(BackendError::NoAnswer));
        let (_, slow) = self.backend.poll_interval();
        for (id, step) in steps {
            let verdict = match &look {
                Ok(look) if look.gaps.contains_key(&step.instance.host) => Inference::Unknown,
                Ok(look) => {
                    let now = look.instances.get(&step.instance);
                    let unproven = self.is_foreign(step).then(|| self.sent_at(flight.begun));
                    infer_outcome(step.op, self.seen.get(&step.instance), now, is_once(step), unproven)
                }
                Err(_) => Inference::Unknown,
            };
            let is_last = only.is_some() || flight.begun.elapsed() > operation_timeout(step, slow);
            let mut code = 0;
            let (outcome, message) = match verdict {
                Inference::Done => (StepOutcome::Done, String::new()),
                Inference::NotOurs => {
                    code = ALREADY_RUNNING;
                    (StepOutcome::Failed, RUNS_ALREADY.to_owned())
                }
                Inference::Again => {
                    (StepOutcome::Unknown, "its answer was lost: the next look decides".to_owned())
                }
                Inference::NotYet | Inference::Unknown if !is_last => continue,
                Inference::NotYet if only.is_none() => {
                    (StepOutcome::Failed, "its answer was lost, and it was not carried out".to_owned())
                }
                Inference::NotYet | Inference::Unknown => {
                    (StepOutcome::Unknown, "no word of it came, and looking does not tell".to_owned())
                }
            };
            flight.steps.remove(&id);
            self.close(step, outcome, code, message, flight.begun, chains, ready);
        }
    }

    fn lose(&mut self, flight: Flight<'_>, why: &str, chains: &mut Chains<'_, '_>) {
        for step in flight.steps.into_values() {
            self.end(step, StepOutcome::Unknown, 0, why.to_owned(), flight.begun);
            self.skip_rest(chains, step);
        }
    }
}

pub(super) fn is_once(step: &Step) -> bool {
    step.spec.as_ref().is_some_and(|spec| spec.monitor.auto_type == AutoType::OneShot)
}
