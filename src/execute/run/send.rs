//! Steps on their way: into the journal first, then out, in as few calls as the target allows.
//!
//! Only what cannot have had an effect is sent again.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use tokio::time::Instant;
use tracing::warn;

use super::{Chains, Flight, Run};
use crate::backend::{Backend, BackendError, Operation, Task};
use crate::execute::journal::{Call, Journal, JournaledStep};
use crate::execute::{ExecutionContext, ExecutionEvent, GRACE, StepOutcome, in_time};
use crate::model::{InstanceKey, ObservedInstance, Op, Spec, Step};
use crate::store::Store;

/// How often a call that cannot have been carried out is made again.
const TRIES: u32 = 5;
const FIRST_TRY: Duration = Duration::from_millis(10);

/// What became of a call.
enum Lost {
    /// The journal could not be written: nothing was sent.
    NotBegun(String),
    Fault(BackendError),
}

impl<B: Backend, S: Store> Run<'_, B, S> {
    /// Sends a batch, in as few calls as the target allows, side by side.
    pub(super) async fn send<'s>(
        &mut self,
        batch: Vec<&'s Step>,
        chains: &mut Chains<'_, 's>,
        ready: &mut VecDeque<&'s Step>,
    ) -> Vec<Flight<'s>> {
        let begun = Instant::now();
        let order = |step: &&Step| {
            let seen = self.seen.get(&step.instance);
            let registered = seen.is_some_and(|seen| seen.registered == Some(true));
            let owned = self.is_owned(step) || (step.op == Op::Register && self.is_registered_by_us(step));
            Operation { registered, owned, ..Operation::of(step, step.id.to_string(), &self.terms.owner) }
        };
        let calls = self.backend.batches(batch.iter().map(order).collect());
        let mut steps: HashMap<String, &Step> =
            batch.into_iter().map(|step| (step.id.to_string(), step)).collect();
        (self.told)(ExecutionEvent::Sent { steps: steps.len() });
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
                    let mut flight = Flight { task: Some(task), steps, begun, call };
                    // Some calls answer at once.
                    if let Some(task) = flight.task.take() {
                        self.take_in(&mut flight, task.answered.clone(), chains, ready);
                        flight.task = Some(Task { answered: Vec::new(), ..task });
                    }
                    flights.extend(self.if_open(flight).await);
                }
                Err(Lost::NotBegun(why)) => {
                    for step in steps.into_values() {
                        self.end(step, StepOutcome::Failed, 0, format!("not begun: {why}"), begun);
                        self.skip_rest(chains, step);
                    }
                }
                Err(Lost::Fault(BackendError::NoAnswer)) if !self.backend.has_idempotency_keys() => {
                    flights.push(Flight { task: None, steps, begun, call });
                }
                Err(Lost::Fault(fault)) => {
                    let outcome = match fault {
                        BackendError::NoAnswer => StepOutcome::Unknown,
                        BackendError::Unreachable(_) | BackendError::Refused(_) | BackendError::Busy(_) => {
                            StepOutcome::Failed
                        }
                    };
                    for step in steps.into_values() {
                        self.end(step, outcome, 0, fault.to_string(), begun);
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

/// One call: into the journal, then out. Only what cannot have had an effect is sent again.
async fn submit<B: Backend, S: Store>(
    backend: &B,
    journal: &Journal<'_, S>,
    terms: &ExecutionContext,
    seen: &BTreeMap<InstanceKey, ObservedInstance>,
    orders: &[Operation],
) -> (String, Result<Task, Lost>) {
    let steps = orders.iter().map(|order| began(order, terms, seen)).collect();
    let mut call = Call { steps, at: Some(backend.now()), task: None };
    let name = match tokio::time::timeout_at(terms.deadline + GRACE, journal.begin(&call)).await {
        Ok(Ok(name)) => name,
        Ok(Err(error)) => return (String::new(), Err(Lost::NotBegun(error.to_string()))),
        Err(_) => {
            let why = "the journal could not be written in time".to_owned();
            return (String::new(), Err(Lost::NotBegun(why)));
        }
    };
    let mut tries = 0;
    // One of the tries may have been carried out.
    let mut in_doubt = false;
    let sent = loop {
        tries += 1;
        let may = |fault: &BackendError| match fault {
            BackendError::Unreachable(_) | BackendError::Busy(_) => true,
            // Under the same name it is carried out once, however often it is sent.
            BackendError::NoAnswer => backend.has_idempotency_keys(),
            BackendError::Refused(_) => false,
        };
        match in_time(terms.deadline, backend.submit(&name, orders)).await {
            Err(fault) if may(&fault) && tries < TRIES && Instant::now() < terms.deadline => {
                in_doubt |= fault == BackendError::NoAnswer;
                warn!(%fault, tries, "sent again");
                tokio::time::sleep(FIRST_TRY * 4u32.pow(tries)).await;
            }
            Err(_) if in_doubt => break Err(BackendError::NoAnswer),
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
    (name, sent.map_err(Lost::Fault))
}

/// A step as the journal keeps it: where calls have names, the name finds the rest.
fn began(
    order: &Operation,
    terms: &ExecutionContext,
    seen: &BTreeMap<InstanceKey, ObservedInstance>,
) -> JournaledStep {
    let lasting = !terms.caps.reads_specs;
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
        pid: row.and_then(|row| row.pid).filter(|_| lasting),
        owned: order.owned,
    }
}
