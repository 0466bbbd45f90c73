//! Decisions on rollouts: promotions, aborts and undos of persons, and the pauses that rollouts have reached.
//!
//! `rollout/OWNER/NAMESPACE:NAME` is written when a rollout reaches a pause, and by `abide rollout`. It belongs to one
//! version of the process: the next version starts with its first stage.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::clock;
use crate::execute::ActiveHolds;
use crate::model::{Desired, Plan, ProcessKey, RolloutPause, RolloutProgress, Time};
use crate::observe::{Target, TargetError};
use crate::reconcile::{Rules, rollout_id};
use crate::store::{Entry, Error, Store, Txn, TxnOutcome, keys};

/// Attempts after conflicts with other clients.
const MAX_ATTEMPTS: usize = 10;

/// The last decision on a rollout, or that it waits for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RolloutDecision {
    /// A stage is done, and the next one waits.
    Paused,
    Promoted,
    Aborted,
    /// Aborted, and the instances were returned to the previous version.
    Undone,
}

impl RolloutDecision {
    pub fn word(self) -> &'static str {
        match self {
            RolloutDecision::Paused => "paused",
            RolloutDecision::Promoted => "promoted",
            RolloutDecision::Aborted => "aborted",
            RolloutDecision::Undone => "undone",
        }
    }

    /// Whether the version is not applied any further.
    pub fn is_aborted(self) -> bool {
        matches!(self, RolloutDecision::Aborted | RolloutDecision::Undone)
    }
}

/// The stored decision on a rollout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutRecord {
    /// Id of the version.
    pub id: String,
    pub state: RolloutDecision,
    /// Number of promoted stages.
    pub promoted: usize,
    /// Names of all stages.
    #[serde(default)]
    pub stages: Vec<String>,
    pub at: Time,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

pub type RolloutRecords = BTreeMap<ProcessKey, RolloutRecord>;

/// All records of an owner. One that cannot be read is an error: a promotion must not be assumed.
pub async fn read<S: Store>(state: &S, owner: &str) -> Result<RolloutRecords, Error> {
    let page = state.range(&keys::rollouts_prefix(owner), None, usize::MAX).await?;
    let mut records = RolloutRecords::new();
    for entry in &page.entries {
        if let Some(process) = keys::rollout_process(&entry.key, owner) {
            records.insert(process, entry.decode()?);
        }
    }
    Ok(records)
}

/// The id of a process's version; `None`: it is not declared.
pub fn version_of(desired: &Desired, process: &ProcessKey) -> Option<String> {
    let mut wants = desired.instances.values().filter(|want| want.origin.declared == *process).peekable();
    wants.peek()?;
    Some(rollout_id(wants))
}

/// Decisions of persons as of now: holds, pauses, and aborts since a plan was made.
pub async fn active_holds<T: Target>(
    target: &T,
    rules: &Rules,
    desired: &Desired,
    plan: &Plan,
) -> Result<ActiveHolds, TargetError> {
    let holds = target.active_holds().await?;
    let records = read(target.state(), &rules.owner).await;
    let records = records.map_err(|error| TargetError::state(target.name(), error))?;
    let is_stopped = |(process, record): &(&ProcessKey, &RolloutRecord)| {
        record.state.is_aborted()
            && plan.aborted.get(process) != Some(&record.id)
            && version_of(desired, process).as_ref() == Some(&record.id)
    };
    let aborted: BTreeSet<ProcessKey> =
        records.iter().filter(is_stopped).map(|(process, _)| process.clone()).collect();
    Ok(ActiveHolds::of(holds, rules).with_aborted(aborted))
}

/// The decisions as the planner reads them.
pub fn progress(records: &RolloutRecords) -> BTreeMap<ProcessKey, RolloutProgress> {
    let of = |record: &RolloutRecord| RolloutProgress {
        id: record.id.clone(),
        promoted: record.promoted,
        is_aborted: record.state.is_aborted(),
    };
    records.iter().map(|(process, record)| (process.clone(), of(record))).collect()
}

/// Records the pauses that a plan has reached, each once.
pub async fn record_pauses<S: Store>(state: &S, owner: &str, pauses: &[RolloutPause]) -> Result<(), Error> {
    for pause in pauses.iter().filter(|pause| pause.is_reached) {
        change(state, owner, &pause.process, |record| {
            let is_known = record
                .is_some_and(|record| record.id == pause.id && record.state != RolloutDecision::Promoted);
            let is_past =
                record.is_some_and(|record| record.id == pause.id && record.promoted != pause.stage);
            (!is_known && !is_past).then(|| RolloutRecord {
                id: pause.id.clone(),
                state: RolloutDecision::Paused,
                promoted: pause.stage,
                stages: pause.stages.clone(),
                at: clock::now(),
                by: None,
                reason: None,
            })
        })
        .await?;
    }
    Ok(())
}

/// Changes the record of a process; `None` leaves it as it is. Returns the record afterwards.
pub async fn change<S: Store>(
    state: &S,
    owner: &str,
    process: &ProcessKey,
    decide: impl Fn(Option<&RolloutRecord>) -> Option<RolloutRecord>,
) -> Result<Option<RolloutRecord>, Error> {
    let key = keys::rollout(owner, process);
    for _ in 0..MAX_ATTEMPTS {
        let entry = state.get(&key).await?;
        let record: Option<RolloutRecord> = entry.as_ref().map(Entry::decode).transpose()?;
        let Some(new) = decide(record.as_ref()) else { return Ok(record) };
        let changed = entry.map_or(0, |entry| entry.mod_seq);
        let value = serde_json::to_vec(&new).unwrap_or_default();
        if let TxnOutcome::Written(_) = state.txn(Txn::put(&key, value).only_if(&key, changed)).await? {
            return Ok(Some(new));
        }
    }
    Err(Error::Contended { key })
}
