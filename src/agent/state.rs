//! What an agent keeps of an instance, in a file of its own: enough to go on after any death.
//!
//! `proc/INSTANCE` is how it stands, `intent/INSTANCE` a launch whose outcome is not written yet, `pending/INSTANCE` an
//! operation that has begun and has no result yet, `up/OP` a result that the gateway has not taken, `ran/OP` one that it
//! has taken and `floor` ([`oplog`](super::oplog)), `fence/OWNER` the newest generation seen.

use serde::{Deserialize, Serialize};

use super::cgroup::Cgroup;
use super::process::{ProcessHandle, ProcessIdentity};
use super::restart_policy::{Phase, RestartSeries};
use crate::gse::agent_protocol::{OpRequest, OpResult, OwnedSpec};
use crate::model::InstanceKey;
use crate::store::{Embedded, Error, Store, Txn};

/// How an instance stands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct InstanceState {
    /// What is registered: a relaunch uses it. As of that change of the gateway's store.
    pub given: Option<OwnedSpec>,
    pub changed: u64,
    pub hosted: bool,
    pub run: Option<ProcessRun>,
    /// What the last run of a process that runs once began with.
    pub ran: Option<OwnedSpec>,
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
    /// Where its supervision stands in a series of launches; `None`: at the beginning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry: Option<Retry>,
    /// Supervised since it was last down: its supervision begins with its next start.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dormant: bool,
    /// The operation whose run of a one-shot began, and whose outcome was not recorded. Only an explicit start runs it again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unknown_run: Option<String>,
}

/// A series of launches, as it continues after a restart of the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retry {
    /// Launches so far.
    pub tries: u32,
    /// The time of the next launch, in milliseconds since 1970; `None`: it is running, or is launched at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<i64>,
    /// All of its retries were used up.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
}

impl Retry {
    /// `wall` and `passed` are one moment by two clocks; the wait itself goes by the second.
    pub fn of(series: RestartSeries, wall: i64, passed: i64) -> Option<Retry> {
        let at = |until: i64| Some(wall.saturating_add(until.saturating_sub(passed)));
        let (at, failed) = match series.phase {
            Phase::Idle if series.tries == 0 => return None,
            Phase::Idle => (None, false),
            Phase::Waiting { until } => (at(until), false),
            Phase::Failed { until } => (at(until), true),
        };
        Some(Retry { tries: series.tries, at, failed })
    }

    /// A clock that was set back must not make the wait longer than any wait is.
    pub fn series(&self, wall: i64, passed: i64) -> RestartSeries {
        let until = |at: i64| {
            passed.saturating_add(at.saturating_sub(wall).clamp(0, super::restart_policy::MAX_BACKOFF_MS))
        };
        let phase = match (self.at, self.failed) {
            (None, _) => Phase::Idle,
            (Some(at), false) => Phase::Waiting { until: until(at) },
            (Some(at), true) => Phase::Failed { until: until(at) },
        };
        RestartSeries { tries: self.tries, phase }
    }
}

/// An operation that has begun: on disk before its first effect, gone with its result. After a kill of the agent the
/// next one resumes it before it supervises the instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PendingOperation {
    pub request: OpRequest,
    /// The boot in which it began, and the ticks of that boot then.
    pub boot: String,
    pub since: u64,
    /// The launch id of what its own command brings up.
    pub launch_id: String,
    /// Was the process supervised when it began? A stop that fails restores that.
    pub hosted: bool,
}

/// A process that was started, and the spec in effect in it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessRun {
    pub identity: ProcessIdentity,
    pub live: OwnedSpec,
    /// The operation that launched it: should that be asked for again, it is done.
    #[serde(default)]
    pub by: Option<String>,
    /// Its mark; empty, where it was not launched here.
    #[serde(default)]
    pub incarnation: String,
    /// Its control group, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The inode of its captured output, if it kept that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<u64>,
}

impl ProcessRun {
    /// One that was not launched here, or by its own command.
    pub fn adopted(hold: &ProcessHandle, held: &OwnedSpec) -> ProcessRun {
        let (identity, live) = (hold.identity.clone(), held.clone());
        ProcessRun { identity, live, by: None, incarnation: String::new(), group: None, output: None }
    }

    pub fn group(&self) -> Option<Cgroup> {
        self.group.as_deref().map(Cgroup::at)
    }
}

/// A launch that was begun. What carries its mark was launched by it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LaunchIntent {
    pub incarnation: String,
    pub op_id: Option<String>,
    pub held: OwnedSpec,
    pub at: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The boot in which it began; empty: an agent of an earlier version began it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub boot: String,
}

pub fn state_key(instance: &InstanceKey) -> String {
    format!("proc/{instance}")
}

pub fn intent_key(instance: &InstanceKey) -> String {
    format!("intent/{instance}")
}

pub fn pending_key(instance: &InstanceKey) -> String {
    format!("pending/{instance}")
}

pub fn result_key(op_id: &str) -> String {
    format!("up/{op_id}")
}

/// Writes how an instance stands now.
pub fn state_txn(instance: &InstanceKey, row: &InstanceState) -> Txn {
    let is_nothing = row.given.is_none()
        && !row.hosted
        && row.run.is_none()
        && row.ran.is_none()
        && row.unknown_run.is_none();
    match is_nothing {
        true => Txn::delete(state_key(instance)),
        false => Txn::put(state_key(instance), serde_json::to_vec(row).unwrap_or_default()),
    }
}

/// Writes results that the gateway has not acknowledged.
pub fn results_txn(results: &[OpResult]) -> Txn {
    results.iter().fold(Txn::default(), |txn, result| {
        txn.and(Txn::put(result_key(&result.op_id), serde_json::to_vec(result).unwrap_or_default()))
    })
}

/// Everything of a kind.
pub async fn load_all<T: serde::de::DeserializeOwned>(
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
