//! What is about to be done, on disk before it is done.
//!
//! `journal/OWNER/RUN/N` is a call that was or will be made: its name, and what it asks for. The entry goes when every row of
//! it is final. What a run left behind when it died is settled by the next one, which asks for those calls by name.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::backend::Task;
use crate::failpoint;
use crate::model::{AgentId, InstanceKey, Op, Spec, SpecRevision, Time};
use crate::store::{Error, Store, Txn};

/// A call, as it stands in the journal.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Call {
    pub steps: Vec<JournaledStep>,
    /// When it was about to be made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Time>,
    /// What to ask for results by, once that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<Task>,
}

/// One step of it, with what it takes to find out later whether it was carried out.
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
    /// Of a register: it is known by another name from now on, which is a task of its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub moves: bool,
    /// How it was: guarded, and which process ran.
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
}

fn place(owner: &str) -> String {
    format!("journal/{owner}/")
}

impl<'a, S: Store> Journal<'a, S> {
    pub fn new(store: &'a S, owner: &str, run: &str) -> Journal<'a, S> {
        Journal { store, run: format!("{}{run}/", place(owner)), next: AtomicU64::new(1) }
    }

    /// The name of a call that may be made now.
    pub async fn begin(&self, call: &Call) -> Result<String, Error> {
        let name = format!("{}{:06}", self.run, self.next.fetch_add(1, Ordering::Relaxed));
        failpoint::step("journal: about to begin");
        self.store.txn(Txn::put(&name, serde_json::to_vec(call).unwrap_or_default())).await?;
        failpoint::step("journal: begun");
        // A header cannot hold everything that a key can.
        Ok(name.replace('/', "."))
    }

    /// It was taken on: this is what to ask for results by.
    pub async fn taken_on(&self, name: &str, call: &Call) {
        if let Err(error) =
            self.store.txn(Txn::put(self.key(name), serde_json::to_vec(call).unwrap_or_default())).await
        {
            warn!(%error, "the journal does not know the task of a call");
        }
        failpoint::step("journal: taken on");
    }

    fn key(&self, call: &str) -> String {
        format!("{}{}", self.run, call.rsplit('.').next().unwrap_or_default())
    }

    /// Every row of it is final. What is to be known of that is written with it. Was it?
    pub async fn ended(&self, call: &str, known: Txn) -> bool {
        let written = self.store.txn(Txn::delete(self.key(call)).and(known)).await;
        if let Err(error) = &written {
            warn!(%error, "the journal keeps a call that is over");
        }
        failpoint::step("journal: ended");
        written.is_ok()
    }
}

/// What runs left: the names of their calls.
pub async fn unfinished<S: Store>(store: &S, owner: &str) -> Result<Vec<(String, Call)>, Error> {
    let page = store.range(&place(owner), None, usize::MAX).await?;
    let read = |entry: crate::store::Entry| {
        let call = serde_json::from_slice(&entry.value).ok()?;
        Some((entry.key.to_string(), call))
    };
    Ok(page.entries.into_iter().filter_map(read).collect())
}

/// Is it a call of this run? A run has parts, and may be followed by what puts it back: their names begin with its own.
pub fn is_of(key: &str, owner: &str, run: &str) -> bool {
    let rest = key.strip_prefix(&place(owner)).and_then(|rest| rest.strip_prefix(run));
    rest.is_some_and(|rest| rest.starts_with(['/', '-']))
}

/// A former run's call is settled; what is known by that is written with it.
pub async fn settle<S: Store>(store: &S, key: &str, known: Txn) -> Result<(), Error> {
    let written = store.txn(Txn::delete(key).and(known)).await.map(|_| ());
    failpoint::step("journal: settled");
    written
}

/// The name that a call was made under.
pub fn name_of(key: &str) -> String {
    key.replace('/', ".")
}
