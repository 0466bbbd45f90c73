//! What an agent keeps of an instance, in a file of its own: enough to go on after any death.
//!
//! `proc/INSTANCE` is how it stands, `intent/INSTANCE` a launch whose outcome is not written yet, `up/OP` a result that the
//! gateway has not taken, `fence/OWNER` the newest generation seen.

use serde::{Deserialize, Serialize};

use super::cgroup::Group;
use super::kernel::{Hold, Identity};
use crate::gse::channel::{Held, OpResult};
use crate::model::InstanceKey;
use crate::store::{Embedded, Error, Store, Txn};

/// How an instance stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Row {
    /// What is registered: a relaunch uses it. As of that change of the gateway's store.
    pub given: Option<Held>,
    pub changed: u64,
    pub hosted: bool,
    pub run: Option<Run>,
    /// What the last run of a process that runs once began with.
    pub ran: Option<Held>,
    pub exit: Option<i32>,
    /// Milliseconds since 1970.
    pub since: i64,
    pub started: i64,
    pub message: String,
    /// The mark of the next launch by its guard: written down beforehand, so that a process that died is back without a
    /// wait for the disk, and is found all the same should we die in between.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
    /// The operation that is bringing it down: should we die on the way and it be asked for again, it goes on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ending: Option<String>,
}

/// A process that was started, and the spec in effect in it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    pub identity: Identity,
    pub live: Held,
    /// The operation that launched it: should that be asked for again, it is done.
    #[serde(default)]
    pub by: Option<String>,
    /// Its mark; empty, where it was not launched here.
    #[serde(default)]
    pub incarnation: String,
    /// Its control group, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

impl Run {
    /// One that was not launched here, or by its own command.
    pub fn found(hold: &Hold, held: &Held) -> Run {
        let (identity, live) = (hold.identity.clone(), held.clone());
        Run { identity, live, by: None, incarnation: String::new(), group: None }
    }

    pub fn group(&self) -> Option<Group> {
        self.group.as_deref().map(Group::at)
    }
}

/// A launch that was begun. What carries its mark was launched by it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Intent {
    pub incarnation: String,
    pub op_id: Option<String>,
    pub held: Held,
    pub at: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

pub fn row_key(instance: &InstanceKey) -> String {
    format!("proc/{instance}")
}

pub fn intent_key(instance: &InstanceKey) -> String {
    format!("intent/{instance}")
}

pub fn up_key(op_id: &str) -> String {
    format!("up/{op_id}")
}

/// Writes how an instance stands now; with it, what was told of an operation.
pub fn writing(instance: &InstanceKey, row: &Row, result: Option<&OpResult>) -> Txn {
    let is_nothing = row.given.is_none() && !row.hosted && row.run.is_none() && row.ran.is_none();
    let mut txn = match is_nothing {
        true => Txn::delete(row_key(instance)),
        false => Txn::put(row_key(instance), serde_json::to_vec(row).unwrap_or_default()),
    };
    if let Some(result) = result {
        txn = txn.and(Txn::put(up_key(&result.op_id), serde_json::to_vec(result).unwrap_or_default()));
    }
    txn
}

/// Everything of a kind.
pub async fn all<T: serde::de::DeserializeOwned>(
    store: &Embedded,
    kind: &str,
) -> Result<Vec<(String, T)>, Error> {
    let page = store.range(kind, None, usize::MAX).await?;
    let read = |entry: crate::store::Entry| {
        let name = entry.key[kind.len()..].to_owned();
        serde_json::from_slice(&entry.value).ok().map(|value| (name, value))
    };
    Ok(page.entries.into_iter().filter_map(read).collect())
}
