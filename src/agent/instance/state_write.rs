//! Writes of an instance's state: with its results, in one commit.

use std::time::Instant;

use tracing::warn;

use super::{InstanceTask, WRITE_RETRY_INTERVAL, read_clocks};
use crate::agent::fresh_id;
use crate::agent::schedule::ClockReading;
use crate::agent::state::{Retry, intent_key, pending_key, results_txn, state_txn};
use crate::agent_protocol::{OpResult, OwnedSpec};
use crate::model::AutoType;
use crate::store::{Error, Store, Txn};

impl InstanceTask {
    /// Writes the state. A failed write is retried by a timer, with the state of that time.
    pub(super) async fn write(&mut self, result: Option<&OpResult>) {
        let _ = self.write_with(result, Txn::default()).await;
    }

    /// Writes the state and a result, with further writes in the same commit.
    pub(super) async fn write_with(&mut self, result: Option<&OpResult>, with: Txn) -> Result<(), Error> {
        let resident = |owned: &OwnedSpec| owned.spec.monitor.auto_type == AutoType::Resident;
        match self.state.hosted && self.state.given.as_ref().is_some_and(resident) {
            true => drop(self.state.next.get_or_insert_with(fresh_id)),
            false => self.state.next = None,
        }
        if let (Some(handle), Some(run)) = (&self.handle, &mut self.state.run)
            && !run.incarnation.is_empty()
        {
            let group = run.group();
            run.traces.add_session(handle, &run.incarnation, group.as_ref());
        }
        let ClockReading { wall, passed } = read_clocks();
        self.state.retry = Retry::of(self.launches.series, wall, passed);
        self.state.dormant &= self.handle.is_none();
        self.unwritten.results.extend(result.cloned());
        let mut txn = state_txn(&self.key, &self.state).and(results_txn(&self.unwritten.results));
        if let Some(owned) = self.state.run.as_ref().map(|run| &run.live).or(self.state.given.as_ref()) {
            self.shared.logs.set(&self.key, &owned.spec);
        }
        // The entry of an operation in progress stays until its own result is written.
        let in_progress = self.progress.operation.as_ref().is_some_and(|operation| operation.1);
        if !self.unwritten.results.is_empty() && !in_progress {
            txn = txn.and(Txn::delete(pending_key(&self.key)));
        }
        let txn = txn.and(Txn::delete(intent_key(&self.key))).and(with);
        self.unwritten.retry_at = None;
        match self.shared.store.txn(txn).await {
            // Exit records of an operation in progress stay until its result is written: a resumed operation needs them.
            Ok(_) if self.progress.operation.is_none() => {
                std::mem::take(&mut self.unwritten.exit_records)
                    .iter()
                    .for_each(|id| self.shared.exits.remove(id));
                // An emptied vector would keep its memory.
                self.unwritten.results = Vec::new();
                Ok(())
            }
            Ok(_) => {
                self.unwritten.results = Vec::new();
                Ok(())
            }
            Err(error) => {
                self.state.next = None;
                self.unwritten.retry_at = Some(Instant::now() + WRITE_RETRY_INTERVAL);
                warn!(instance = %self.key, %error, "cannot write the agent's store");
                Err(error)
            }
        }
    }
}
