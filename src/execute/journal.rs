//! Execution journal: each call is on disk before it is sent.
//!
//! `journal/OWNER/RUN/N` holds one call and its steps. It is deleted when every row of the call is final. The next
//! run resolves the calls that a crashed run left, and queries them by name.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::backend::Task;
use crate::failpoint;
use crate::model::{AgentId, InstanceKey, Op, Spec, SpecRevision, Time};
use crate::store::{Error, Store, Txn, keys};

/// A journaled call.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Call {
    pub steps: Vec<JournaledStep>,
    /// Time just before the call was sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Time>,
    /// The task to poll for results, once it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<Task>,
}

/// One step of a call, with the data that recovery needs to infer its outcome.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JournaledStep {
    pub instance: InstanceKey,
    pub op: Op,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revision: Option<SpecRevision>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub spec: Option<Arc<Spec>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub supplier: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent_id: Option<AgentId>,
    /// A registration that renames the instance, which is a task of its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub moves: bool,
    /// State before the step: whether it was supervised, and its pid.
    #[serde(default)]
    pub hosted: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The instance was ours before: by its label, or by the ledger.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub owned: bool,
}

pub struct Journal<'a, S> {
    store: &'a S,
    run: String,
    next: AtomicU64,
    /// A manual operation on a process without an owner has no entries: no run would resolve them.
    is_kept: bool,
}

impl<'a, S: Store> Journal<'a, S> {
    pub fn new(store: &'a S, owner: &str, run: &str) -> Journal<'a, S> {
        let run = keys::journal_run_prefix(owner, run);
        Journal { store, run, next: AtomicU64::new(1), is_kept: !owner.is_empty() }
    }

    /// Writes a call; returns the name to send it under.
    pub async fn begin(&self, call: &Call) -> Result<String, Error> {
        let name = keys::journal(&self.run, self.next.fetch_add(1, Ordering::Relaxed));
        failpoint::step("journal: about to begin");
        if self.is_kept {
            self.store.txn(Txn::put(&name, serde_json::to_vec(call).unwrap_or_default())).await?;
        }
        failpoint::step("journal: begun");
        // The name is sent as a header, where `/` is not allowed.
        Ok(name.replace('/', "."))
    }

    /// Adds the task to an accepted call.
    pub async fn taken_on(&self, name: &str, call: &Call) {
        if self.is_kept
            && let Err(error) =
                self.store.txn(Txn::put(self.key(name), serde_json::to_vec(call).unwrap_or_default())).await
        {
            warn!(%error, "cannot add the task to a journaled call");
        }
        failpoint::step("journal: taken on");
    }

    fn key(&self, call: &str) -> String {
        format!("{}{}", self.run, call.rsplit('.').next().unwrap_or_default())
    }

    /// Deletes a call whose rows are all final, and writes `known` in the same transaction. Returns whether that
    /// succeeded.
    pub async fn ended(&self, call: &str, known: Txn) -> bool {
        let txn = if self.is_kept { Txn::delete(self.key(call)).and(known) } else { known };
        if txn.writes.is_empty() {
            return true;
        }
        let written = self.store.txn(txn).await;
        if let Err(error) = &written {
            warn!(%error, "cannot delete a finished call from the journal");
        }
        failpoint::step("journal: ended");
        written.is_ok()
    }
}

/// Calls that earlier runs left, by key.
pub async fn unfinished<S: Store>(store: &S, owner: &str) -> Result<Vec<(String, Call)>, Error> {
    let page = store.range(&keys::journal_prefix(owner), None, usize::MAX).await?;
    let read = |entry: crate::store::Entry| Ok((entry.key.to_string(), entry.decode()?));
    page.entries.into_iter().map(read).collect()
}

/// Whether a key is a call of this run. The runs of its components and its rollback have names that start with its
/// own.
pub fn belongs_to_run(key: &str, owner: &str, run: &str) -> bool {
    let rest = keys::journal_call(key, owner).and_then(|call| call.strip_prefix(run));
    rest.is_some_and(|rest| rest.starts_with(['/', '-']))
}

/// Deletes the resolved call of an earlier run, and writes `known` in the same transaction.
pub async fn settle<S: Store>(store: &S, key: &str, known: Txn) -> Result<(), Error> {
    let written = store.txn(Txn::delete(key).and(known)).await.map(|_| ());
    failpoint::step("journal: settled");
    written
}

/// The name that a call was sent under.
pub fn name_of(key: &str) -> String {
    key.replace('/', ".")
}
