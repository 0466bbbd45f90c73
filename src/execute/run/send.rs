//! Submission of steps: journaled first, then sent in as few calls as the target allows.
//!
//! A call is repeated only if the first attempt cannot have had an effect.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use tokio::time::Instant;
use tracing::warn;

use super::{Chains, InFlightCall, Run};
use crate::backend::{Backend, BackendError, Operation, PriorOwnership, RowState, Task};
use crate::error_chain::chain;
use crate::execute::journal::{Call, Journal, JournaledStep};
use crate::execute::{ExecutionContext, ExecutionEvent, GRACE, StepOutcome, in_time};
use crate::model::{InstanceKey, ObservedInstance, Op, Spec, Step};
use crate::retry_delay::RetryDelay;
use crate::store::{Error, Store};

/// Maximum attempts for a call that had no effect, and the delays between them.
const MAX_ATTEMPTS: u32 = 5;
const RETRIES: RetryDelay =
    RetryDelay::doubling(Duration::from_millis(40), Duration::from_secs(10)).with_factor(4);

/// Reason why a call has no task.
#[derive(Debug, thiserror::Error)]
enum SendError {
    /// The journal could not be written: nothing was sent.
    #[error("not started")]
    Journal(#[source] Error),
    #[error("not started: the journal could not be written before the deadline")]
    JournalLate,
    #[error(transparent)]
    Fault(BackendError),
}

impl<B: Backend, S: Store> Run<'_, B, S> {
    /// Sends a batch, in as few calls as the target allows, concurrently.
    pub(super) async fn send<'s>(
        &mut self,
        batch: Vec<&'s Step>,
        chains: &mut Chains<'_, 's>,
        ready: &mut VecDeque<&'s Step>,
    ) -> Vec<InFlightCall<'s>> {
        let begun = Instant::now();
        let order = |step: &&Step| {
            let seen = self.seen.get(&step.instance);
            let registered = seen.is_some_and(|seen| seen.registered == Some(true));
            let owned = self.is_owned(step) || (step.op == Op::Register && self.is_registered_by_us(step));
            Operation {
                before: PriorOwnership { registered, owned },
                origin: self.terms.settings.origin.clone(),
                protections: self.terms.protections.get(&step.instance).cloned().unwrap_or_default(),
                ..Operation::of(step, step.id.to_string(), &self.terms.settings.owner)
            }
        };
        let calls = self.backend.batches(batch.iter().map(order).collect());
        let mut steps: HashMap<String, &Step> =
            batch.into_iter().map(|step| (step.id.to_string(), step)).collect();
        (self.on_event)(ExecutionEvent::Sent { steps: steps.len() });
        let (backend, journal, terms, seen) = (self.backend, &self.journal, self.terms, &self.seen);
        let one = |orders: Vec<Operation>| async move {
            let sent = submit(backend, journal, terms, seen, &orders).await;
            (orders, sent)
        };
        let sent: Vec<_> =
            stream::iter(calls).map(one).buffered(backend.max_concurrent_calls()).collect().await;
        let mut flights = Vec::new();
        for (orders, (call, result)) in sent {
            let steps: HashMap<String, &Step> =
                orders.iter().filter_map(|order| steps.remove_entry(&order.id)).collect();
            match result {
                Ok(task) => {
                    let mut flight = InFlightCall { task: Some(task), response: None, steps, begun, call };
                    // Some calls have their results in the reply.
                    if let Some(task) = flight.task.take() {
                        self.apply_statuses(&mut flight, task.answered.clone(), chains, ready);
                        flight.task = Some(Task { answered: Vec::new(), ..task });
                    }
                    flights.extend(self.finish_if_done(flight).await);
                }
                Err(error @ (SendError::Journal(_) | SendError::JournalLate)) => {
                    for step in steps.into_values() {
                        let message = chain(&error);
                        self.end(step, StepOutcome::Failed, RowState::Unreported, message, begun);
                        self.skip_rest(chains, step);
                    }
                }
                Err(SendError::Fault(fault))
                    if fault.may_have_run() && !self.backend.has_idempotency_keys() =>
                {
                    let response = Some(fault).filter(|fault| *fault != BackendError::NoAnswer);
                    let response = response.map(|fault| fault.to_string());
                    flights.push(InFlightCall { task: None, response, steps, begun, call });
                }
                Err(SendError::Fault(fault)) => {
                    let outcome =
                        if fault.may_have_run() { StepOutcome::Unknown } else { StepOutcome::Failed };
                    let state = if fault.is_forbidden() { RowState::Forbidden } else { RowState::Unreported };
                    for step in steps.into_values() {
                        self.end(step, outcome, state, fault.to_string(), begun);
                        self.skip_rest(chains, step);
                    }
                    if outcome == StepOutcome::Failed {
                        self.forget(&call).await;
                    }
                }
            }
        }
        flights
    }
}

/// Journals and sends one call. An attempt is repeated only if it cannot have had an effect.
async fn submit<B: Backend, S: Store>(
    backend: &B,
    journal: &Journal<'_, S>,
    terms: &ExecutionContext,
    seen: &BTreeMap<InstanceKey, ObservedInstance>,
    orders: &[Operation],
) -> (String, Result<Task, SendError>) {
    let steps = orders.iter().map(|order| began(order, terms, seen)).collect();
    let mut call = Call { steps, at: Some(backend.now()), task: None };
    let name = match tokio::time::timeout_at(terms.settings.deadline + GRACE, journal.begin(&call)).await {
        Ok(Ok(name)) => name,
        Ok(Err(error)) => return (String::new(), Err(SendError::Journal(error))),
        Err(_) => {
            return (String::new(), Err(SendError::JournalLate));
        }
    };
    let mut attempts = 0;
    // An attempt that may have taken effect.
    let mut in_doubt: Option<BackendError> = None;
    let sent = loop {
        attempts += 1;
        let is_retryable = |fault: &BackendError| match fault {
            BackendError::Unreachable(_) | BackendError::Busy(_) => true,
            // The idempotency key makes repeated calls take effect once.
            BackendError::NoAnswer | BackendError::Inconclusive(_) => backend.has_idempotency_keys(),
            BackendError::Refused(_) => false,
        };
        match in_time(terms.settings.deadline, backend.submit(&name, orders)).await {
            Err(fault)
                if is_retryable(&fault)
                    && attempts < MAX_ATTEMPTS
                    && Instant::now() < terms.settings.deadline =>
            {
                warn!(%fault, attempts, "call failed; retrying");
                in_doubt = Some(fault).filter(BackendError::may_have_run).or(in_doubt);
                tokio::time::sleep(RETRIES.after(attempts)).await;
            }
            Err(fault) => break Err(in_doubt.filter(|_| !fault.may_have_run()).unwrap_or(fault)),
            sent => break sent,
        }
    };
    if let Ok(task) = &sent
        && !backend.has_idempotency_keys()
        && !task.ids.is_empty()
    {
        call.task = Some(task.clone());
        journal.taken_on(&name, &call).await;
    }
    (name, sent.map_err(SendError::Fault))
}

/// The journal record of a step: where calls have idempotency keys, the key finds the rest.
fn began(
    order: &Operation,
    terms: &ExecutionContext,
    seen: &BTreeMap<InstanceKey, ObservedInstance>,
) -> JournaledStep {
    let lasting = !terms.settings.caps.reads_specs;
    let row = seen.get(&order.instance);
    JournaledStep {
        instance: order.instance.clone(),
        op: order.op,
        moves: order.moves(),
        revision: order.revision.filter(|_| lasting),
        spec: order.spec.as_ref().filter(|_| lasting).map(|spec| Arc::new(Spec::clone(spec))),
        supplier: order.host.supplier.filter(|_| lasting),
        agent_id: order.host.agent_id.clone().filter(|_| lasting),
        hosted: lasting && row.is_some_and(|row| row.hosted == Some(true)),
        pid: row.and_then(|row| row.process.pid).filter(|_| lasting),
        owned: order.before.owned,
    }
}
