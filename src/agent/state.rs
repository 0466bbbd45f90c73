//! Persistent state of instances: the entries of the agent's store, sufficient to continue after a kill at any point.
//!
//! - `proc/INSTANCE`: the state of an instance ([`InstanceState`]).
//! - `intent/INSTANCE`: a launch whose outcome is not written yet ([`LaunchIntent`]).
//! - `pending/INSTANCE`: an operation that has begun and has no result yet ([`PendingOperation`]).
//! - `up/OP`: a result that the gateway has not acknowledged.
//! - `ran/OP`, `floor`: acknowledged results ([`oplog`](super::oplog)).
//! - `fence/OWNER`: the newest lease generation of an owner.

use serde::{Deserialize, Serialize};

use super::cgroup::Cgroup;
use super::instance::PipeRecord;
use super::process::{ProcessHandle, ProcessIdentity};
use super::restart_policy::{Completion, Phase, RestartSeries};
use super::tree::{LaunchRecord, LaunchTraces};
use crate::agent_protocol::{InstanceHistory, OpRequest, OpResult, OwnedSpec};
use crate::model::InstanceKey;
use crate::store::{Embedded, Error, Store, Txn, keys};

/// Beginning of [`InstanceState::ending`] of a stop by a limit. No operation has such an id.
pub const LIMIT_STOP: &str = "limit: ";

/// The state of an instance.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct InstanceState {
    /// The registered spec, which a relaunch uses.
    pub given: Option<OwnedSpec>,
    /// Sequence number of the registration in the gateway's store.
    pub changed: u64,
    /// Whether the process is supervised.
    pub hosted: bool,
    pub run: Option<ProcessRun>,
    /// The spec of the last run of a one-shot.
    pub ran: Option<OwnedSpec>,
    pub exit: Option<i32>,
    /// Milliseconds since 1970.
    pub since: i64,
    pub started: i64,
    /// Time of the last scheduled run that was skipped; 0: none.
    #[serde(skip_serializing_if = "is_zero")]
    pub skipped: i64,
    pub message: String,
    /// The launch id of the next relaunch by supervision. It is written in advance: the relaunch need not wait for the disk,
    /// and the next agent finds the process if this one is killed in between.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
    /// The operation, or the limit, that is stopping the process: the next agent continues it if this one is killed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ending: Option<String>,
    /// The series of relaunches by supervision; `None`: no relaunch since the last start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry: Option<Retry>,
    /// Supervision was requested while the process was stopped: it begins with the next start.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dormant: bool,
    /// The process ended as its restart policy allows, and how. A start or another registered spec resets it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completed: Option<Completion>,
    /// The operation of a one-shot run that began and whose outcome was not recorded. Only an explicit start repeats it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unknown_run: Option<String>,
    /// A launch that has ended or failed, and some of whose processes could not be killed. Nothing is launched before they
    /// have ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unended: Option<Box<LaunchRecord>>,
    /// Restarts, exits and the last failed start.
    #[serde(skip_serializing_if = "InstanceHistory::is_empty")]
    pub history: InstanceHistory,
}

/// A series of relaunches that continues after a restart of the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retry {
    /// Relaunches so far.
    pub tries: u32,
    /// Time of the next launch, in milliseconds since 1970; `None`: the process runs, or is launched at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<i64>,
    /// All retries are used up.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub failed: bool,
}

impl Retry {
    /// `wall` and `passed`: one moment by the wall clock and by the monotonic clock, which the series uses.
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

    /// Restores the series. A wall clock that was set back must not make the wait longer than the maximum.
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

/// An operation that has begun: on disk from before its first effect until its result is written. After a kill of the agent
/// the next one resumes it before it supervises the instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PendingOperation {
    pub request: OpRequest,
    /// Boot id and ticks since boot when the operation began.
    pub boot: String,
    pub since: u64,
    /// Launch id for processes that its command starts.
    pub launch_id: String,
    /// Whether the process was supervised when the operation began. A failed stop restores that.
    pub hosted: bool,
}

/// A running process, and the spec in effect in it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessRun {
    pub identity: ProcessIdentity,
    pub live: OwnedSpec,
    /// The operation that launched the process: it is done if it is requested again.
    #[serde(default)]
    pub by: Option<String>,
    /// The launch id; empty: the agent did not launch the process.
    #[serde(default)]
    pub incarnation: String,
    /// The control group of the launch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Inode of the captured output that the process still has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<u64>,
    /// The output pipe of the process, and its log writer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<Box<PipeRecord>>,
    /// User id of the account when the process was launched or adopted: the account may be renamed, removed or unknown
    /// while the process runs. Absent in a state of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Evidence of the other processes of the launch. Absent in a state of an earlier version.
    #[serde(default)]
    pub traces: LaunchTraces,
    /// Whether the process was adopted and not restarted since: `live` is the spec of its adoption. `None`: an agent of an
    /// earlier version wrote the run, or the agent launched the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adopted: Option<bool>,
    /// A relaunch whose `after_start` has not ended yet.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hook_due: bool,
}

impl ProcessRun {
    /// A run of a process that this agent did not spawn.
    pub fn of_handle(handle: &ProcessHandle, owned: &OwnedSpec) -> ProcessRun {
        ProcessRun::of_identity(handle.identity.clone(), owned.clone())
    }

    /// The same, by the identity of the process.
    pub fn of_identity(identity: ProcessIdentity, live: OwnedSpec) -> ProcessRun {
        ProcessRun {
            identity,
            live,
            by: None,
            incarnation: String::new(),
            group: None,
            output: None,
            log: None,
            uid: None,
            traces: LaunchTraces::default(),
            adopted: None,
            hook_due: false,
        }
    }

    /// Whether the spec that the process runs with is unknown.
    pub fn is_spec_unknown(&self) -> bool {
        self.adopted.unwrap_or(self.incarnation.is_empty())
    }

    pub fn group(&self) -> Option<Cgroup> {
        self.group.as_deref().map(Cgroup::at)
    }
}

/// A launch that has begun. A process that carries its launch id belongs to it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LaunchIntent {
    pub incarnation: String,
    pub op_id: Option<String>,
    pub held: OwnedSpec,
    pub at: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Boot id when the launch began; empty: an agent of an earlier version began it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub boot: String,
    /// User id of the account. Absent in an intent of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
}

fn is_zero(time: &i64) -> bool {
    *time == 0
}

impl InstanceState {
    /// Whether the gateway shows the instance: it is registered, supervised or running, or its first start failed.
    pub fn is_shown(&self) -> bool {
        self.given.is_some() || self.hosted || self.run.is_some() || self.history.failed_start.is_some()
    }

    /// Whether the store keeps nothing of the instance.
    pub fn is_empty(&self) -> bool {
        !self.is_shown() && self.ran.is_none() && self.unknown_run.is_none() && self.unended.is_none()
    }
}

pub fn state_key(instance: &InstanceKey) -> String {
    keys::instance_state(instance)
}

pub fn intent_key(instance: &InstanceKey) -> String {
    keys::launch_intent(instance)
}

pub fn pending_key(instance: &InstanceKey) -> String {
    keys::pending_operation(instance)
}

pub fn result_key(op_id: &str) -> String {
    keys::result(op_id)
}

/// Writes the state of an instance, or deletes an empty one.
pub fn state_txn(instance: &InstanceKey, state: &InstanceState) -> Txn {
    match state.is_empty() {
        true => Txn::delete(state_key(instance)),
        false => Txn::put(state_key(instance), serde_json::to_vec(state).unwrap_or_default()),
    }
}

/// Writes results that the gateway has not acknowledged.
pub fn results_txn(results: &[OpResult]) -> Txn {
    results.iter().fold(Txn::default(), |txn, result| {
        txn.and(Txn::put(result_key(&result.op_id), serde_json::to_vec(result).unwrap_or_default()))
    })
}

/// All entries with a key prefix, by the rest of the key.
pub async fn load_all<T: serde::de::DeserializeOwned>(
    store: &Embedded,
    kind: &str,
) -> Result<Vec<(String, T)>, Error> {
    load_each(store, kind).await?.into_iter().map(|(name, value)| Ok((name, value?))).collect()
}

/// The same, without the entries that do not parse, which are logged: one of them must not stop the agent.
pub async fn load_readable<T: serde::de::DeserializeOwned>(
    store: &Embedded,
    kind: &str,
) -> Result<Vec<(String, T)>, Error> {
    let readable = |(name, value): (String, Result<T, Error>)| {
        let value = value.inspect_err(|error| tracing::error!(%error, "cannot read a stored value"));
        Some((name, value.ok()?))
    };
    Ok(load_each(store, kind).await?.into_iter().filter_map(readable).collect())
}

/// Every entry with a key prefix, parsed or not.
pub async fn load_each<T: serde::de::DeserializeOwned>(
    store: &Embedded,
    kind: &str,
) -> Result<Vec<(String, Result<T, Error>)>, Error> {
    let page = store.range(kind, None, usize::MAX).await?;
    let read = |entry: crate::store::Entry| (entry.key[kind.len()..].to_owned(), entry.decode());
    Ok(page.entries.into_iter().map(read).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A run as an agent of an earlier version wrote it: without `adopted`.
    fn stored(incarnation: &str) -> ProcessRun {
        let identity = ProcessIdentity::of(std::process::id()).expect("this process");
        let live = OwnedSpec { spec: Default::default(), owner: None, revision: None };
        let run = json!({"identity": identity, "live": live, "incarnation": incarnation});
        serde_json::from_value(run).expect("a run")
    }

    #[test]
    fn an_earlier_version_adopted_processes_without_a_launch_id() {
        assert!(stored("").is_spec_unknown());
        assert!(!stored("4711").is_spec_unknown());
        // A restart_cmd replaced an adopted process.
        assert!(!ProcessRun { adopted: Some(false), ..stored("") }.is_spec_unknown());
        // A reload_cmd did, which sets only some fields.
        assert!(ProcessRun { adopted: Some(true), ..stored("4711") }.is_spec_unknown());
    }
}
