//! Recovery: the state that an agent takes up from its folder after a restart.
//!
//! A launch whose outcome was not written is resolved by what it left behind: a process with its launch id, or its exit
//! record. An operation that had begun is resumed by its instance's keeper before supervision continues. A run of a
//! one-shot that began and whose end was not recorded stays unknown, and is not repeated.

use std::collections::HashMap;
use std::time::Duration;

use tracing::{info, warn};

use super::cgroup::Cgroup;
use super::exit_record::{ExitRecord, start_id};
use super::instance::{AgentContext, OpReply, done, failed};
use super::now_ms;
use super::ownership::{self, InterruptedLaunch};
use super::process::{self, ProcessHandle, ProcessIdentity, boot_id};
use super::state::{
    InstanceState, LaunchIntent, PendingOperation, ProcessRun, intent_key, load_all, pending_key, result_key,
    state_key,
};
use crate::gse::agent_protocol::{OpResult, OwnedSpec};
use crate::model::{AutoType, InstanceKey, StartMode};
use crate::store::{Error, Store, Txn};

/// Changes of the store that are read: its log has somewhat more.
const LOGGED: u64 = 90_000;

/// From the launch of a process to its program: much less than this.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Maximum wait for children of an earlier agent to become their programs.
const EXEC_TIMEOUT: Duration = Duration::from_secs(2);

/// Waits for children of an earlier agent that are between their launch and their program: a process carries its launch
/// id only from then on.
async fn wait_for_exec() {
    let begun = tokio::time::Instant::now();
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        if begun.elapsed() > EXEC_TIMEOUT || !process::has_unexecuted_child() {
            return;
        }
    }
}

/// The state of a one-shot whose end was not recorded.
pub const UNKNOWN_OUTCOME: &str = "a run began, and its outcome is unknown: its end was not recorded";

/// What is known of all instances.
pub struct RecoveredState {
    pub rows: HashMap<InstanceKey, InstanceState>,
    /// Operations to be resumed.
    pub pending: HashMap<InstanceKey, Resumption>,
}

/// An operation that an earlier agent began.
pub struct Resumption {
    pub pending: PendingOperation,
    /// The launch that it had begun, where that is continued by its start command's exit record.
    pub launch: Option<LaunchIntent>,
}

/// Reads everything, and resolves the launches whose outcome is not written.
pub async fn recover(shared: &AgentContext) -> Result<RecoveredState, Error> {
    let mut rows: HashMap<InstanceKey, InstanceState> = by_instance(load_all(&shared.store, "proc/").await?);
    let mut pending: HashMap<InstanceKey, Resumption> =
        by_instance::<PendingOperation>(load_all(&shared.store, "pending/").await?)
            .into_iter()
            .map(|(instance, pending)| (instance, Resumption { pending, launch: None }))
            .collect();
    mark_dormant(shared, &mut rows).await?;
    let intents: HashMap<InstanceKey, LaunchIntent> = by_instance(load_all(&shared.store, "intent/").await?);
    let (daemons, intents): (HashMap<_, _>, HashMap<_, _>) = intents
        .into_iter()
        .partition(|(instance, intent)| continues_launch(intent, pending.contains_key(instance)));
    let txn = resolve(shared, intents, &mut rows, &mut pending).await;
    if !txn.writes.is_empty() {
        crate::failpoint::point("recovering");
        shared.store.txn(txn).await?;
    }
    for (instance, intent) in daemons {
        if let Some(resumption) = pending.get_mut(&instance) {
            resumption.launch = Some(intent);
        }
    }
    remove_stale_records(shared, &rows, &pending);
    Ok(RecoveredState { rows, pending })
}

/// Rows of an earlier version do not record whether a process that is down is to be launched again: it is only if it was
/// supervised when it ended. The store's log of changes shows that.
async fn mark_dormant(
    shared: &AgentContext,
    rows: &mut HashMap<InstanceKey, InstanceState>,
) -> Result<(), Error> {
    let resident = |held: &OwnedSpec| held.spec.monitor.auto_type == AutoType::Resident;
    let is_open = |row: &InstanceState| {
        let is_down = row.hosted && row.run.is_none() && row.given.as_ref().is_some_and(resident);
        is_down && row.retry.is_none() && !row.dormant && !row.message.is_empty()
    };
    if !rows.values().any(is_open) {
        return Ok(());
    }
    let last = shared.store.range("proc/", None, 0).await?.as_of;
    // The log is read at once; it waits only where it has no such change.
    let changes = shared.store.changes("proc/", last.saturating_sub(LOGGED));
    let changes = match tokio::time::timeout(EXEC_TIMEOUT, changes).await {
        Ok(Ok(changes)) => changes,
        Ok(Err(Error::Compacted)) | Err(_) => return Ok(()),
        Ok(Err(error)) => return Err(error),
    };
    let mut ended_supervised: HashMap<InstanceKey, (bool, bool)> = HashMap::new();
    for change in changes {
        let instance = change.key.strip_prefix("proc/").and_then(|name| name.parse().ok());
        let row = change.value.and_then(|value| serde_json::from_slice::<InstanceState>(&value).ok());
        let (Some(instance), Some(row)) = (instance, row) else { continue };
        let (was_running, supervised) = ended_supervised.entry(instance).or_insert((false, true));
        // Seen from its end on only: the first row of the log may be any.
        if *was_running && row.run.is_none() {
            *supervised = row.hosted;
        }
        *was_running = row.run.is_some();
    }
    for (instance, row) in rows.iter_mut().filter(|(_, row)| is_open(row)) {
        if ended_supervised.get(instance).is_some_and(|(_, supervised)| !supervised) {
            info!(%instance, "not launched: it was not supervised when it ended");
            row.dormant = true;
        }
    }
    Ok(())
}

fn by_instance<T>(entries: Vec<(String, T)>) -> HashMap<InstanceKey, T> {
    entries.into_iter().filter_map(|(name, value)| Some((name.parse().ok()?, value))).collect()
}

/// Does a pending operation continue this launch by the record of its start command? Not after a boot, and not one of an
/// earlier version, which has neither.
fn continues_launch(intent: &LaunchIntent, is_pending: bool) -> bool {
    let spec = &intent.held.spec;
    let is_daemon = spec.monitor.auto_type == AutoType::Resident
        && spec.control.start_mode.unwrap_or_default() == StartMode::Daemon;
    is_daemon && is_pending && intent.boot == boot_id()
}

/// Resolves launches of foreground processes, of one-shots and of scheduled runs, and the supervisor's own.
async fn resolve(
    shared: &AgentContext,
    intents: HashMap<InstanceKey, LaunchIntent>,
    rows: &mut HashMap<InstanceKey, InstanceState>,
    pending: &mut HashMap<InstanceKey, Resumption>,
) -> Txn {
    let reserved = |rows: &HashMap<InstanceKey, InstanceState>| rows.values().any(|row| row.next.is_some());
    if intents.is_empty() && !reserved(rows) {
        return Txn::default();
    }
    let find = async || {
        let by_intent = intents.values().map(|intent| InterruptedLaunch {
            launch_id: &intent.incarnation,
            spec: &intent.held.spec,
            group: intent.group.as_deref().map(Cgroup::at),
        });
        let by_supervisor = rows.values().filter_map(|row| {
            let (launch_id, given) = (row.next.as_ref()?, row.given.as_ref()?);
            Some(InterruptedLaunch { launch_id, spec: &given.spec, group: shared.groups.of(launch_id) })
        });
        ownership::find_interrupted(shared, &by_intent.chain(by_supervisor).collect::<Vec<_>>()).await
    };
    let mut found = find().await;
    let dead =
        |row: &InstanceState| row.run.as_ref().is_none_or(|run| ProcessHandle::open(&run.identity).is_none());
    let lost =
        |row: &InstanceState| row.next.as_ref().is_some_and(|mark| !found.contains_key(mark)) && dead(row);
    if intents.values().any(|intent| !found.contains_key(&intent.incarnation)) || rows.values().any(lost) {
        wait_for_exec().await;
        found = find().await;
    }
    let mut txn = Txn::default();
    for (instance, row) in rows.iter_mut() {
        if resolve_relaunch(shared, instance, row, &found) {
            txn = txn.and(Txn::put(state_key(instance), serde_json::to_vec(row).unwrap_or_default()));
        }
    }
    for (instance, intent) in intents {
        let row = rows.entry(instance.clone()).or_default();
        let process = found.get(&intent.incarnation).cloned();
        info!(%instance, pid = process.as_ref().map(|one| one.pid), "a launch was interrupted");
        let said = resolve_one(shared, intent, process, row);
        let value = serde_json::to_vec(row).unwrap_or_default();
        txn = txn.and(Txn::delete(intent_key(&instance))).and(Txn::put(state_key(&instance), value));
        if let Some((op_id, (code, message))) = said {
            let seq = pending.remove(&instance).map_or(0, |resumption| resumption.pending.request.seq);
            let result = OpResult { op_id, seq, code: code.0, message, content: None };
            let value = serde_json::to_vec(&result).unwrap_or_default();
            txn =
                txn.and(Txn::put(result_key(&result.op_id), value)).and(Txn::delete(pending_key(&instance)));
        }
    }
    txn
}

/// A supervisor was bringing a foreground process back: that launch has no intent of its own.
fn resolve_relaunch(
    shared: &AgentContext,
    instance: &InstanceKey,
    row: &mut InstanceState,
    found: &HashMap<String, ProcessIdentity>,
) -> bool {
    let (Some(mark), Some(given)) = (&row.next, &row.given) else { return false };
    // A daemon's launch is continued by the record of its start command.
    let is_daemon = given.spec.control.start_mode.unwrap_or_default() == StartMode::Daemon;
    if is_daemon && shared.exits.read(&start_id(mark)) != ExitRecord::Missing {
        return false;
    }
    let Some(identity) = found.get(mark).cloned() else { return false };
    info!(%instance, pid = identity.pid, "a relaunch was interrupted");
    let (incarnation, live) = (mark.clone(), given.clone());
    let group = shared.groups.of(&incarnation).map(|group| group.path());
    row.run = Some(ProcessRun { identity, live, by: None, incarnation, group, output: None });
    (row.next, row.started, row.since, row.exit) = (None, now_ms(), now_ms(), None);
    row.message.clear();
    true
}

/// Resolves one launch. The result of the operation that asked for it, where nothing is left to be done.
fn resolve_one(
    shared: &AgentContext,
    intent: LaunchIntent,
    process: Option<ProcessIdentity>,
    row: &mut InstanceState,
) -> Option<(String, OpReply)> {
    let resident = intent.held.spec.monitor.auto_type == AutoType::Resident;
    let once = intent.held.spec.monitor.auto_type == AutoType::OneShot;
    let record = shared.exits.read(&intent.incarnation);
    let shell = || shared.exits.shell(&intent.incarnation).map(|hold| hold.identity.clone());
    let identity = match resident {
        true => process,
        false => shell().or(process),
    };
    if let Some(identity) = identity {
        (row.started, row.since, row.unknown_run, row.exit) = (intent.at, intent.at, None, None);
        row.message.clear();
        if once {
            row.ran = Some(intent.held.clone());
        }
        let LaunchIntent { incarnation, op_id: by, held: live, group, .. } = intent;
        row.run = Some(ProcessRun { identity, live, by, incarnation, group, output: None });
        return None;
    }
    if resident {
        return None;
    }
    // A child that has not become its shell yet has the record open: it may still begin.
    let not_begun = intent.boot == boot_id()
        && match record {
            ExitRecord::Missing => true,
            ExitRecord::Empty => !shared.exits.is_open(&intent.incarnation),
            ExitRecord::Begun(_) | ExitRecord::Ended(_) | ExitRecord::Unreadable => false,
        };
    if not_begun {
        return None;
    }
    (row.run, row.started, row.since) = (None, intent.at, now_ms());
    if intent.op_id.is_some() {
        // As after any start: the gateway keeps what is registered, and with it that the run is unknown.
        (row.given, row.hosted) = (Some(intent.held.clone()), true);
    }
    let said = match record {
        ExitRecord::Ended(code) => {
            (row.exit, row.unknown_run) = (Some(code), None);
            row.message = format!("ended with code {code}");
            if once {
                row.ran = Some(intent.held.clone());
            }
            done()
        }
        ExitRecord::Missing | ExitRecord::Empty | ExitRecord::Begun(_) | ExitRecord::Unreadable => {
            warn!(launch = intent.incarnation, "{UNKNOWN_OUTCOME}");
            row.message = UNKNOWN_OUTCOME.to_owned();
            if once {
                row.unknown_run = Some(intent.op_id.clone().unwrap_or_default());
            }
            failed(UNKNOWN_OUTCOME)
        }
    };
    intent.op_id.map(|op_id| (op_id, said))
}

/// Records that an agent left behind which was killed after it had written a result.
fn remove_stale_records(
    shared: &AgentContext,
    rows: &HashMap<InstanceKey, InstanceState>,
    pending: &HashMap<InstanceKey, Resumption>,
) {
    // Commands of an operation share a prefix.
    let ops: Vec<String> = pending
        .values()
        .map(|resumption| super::exit_record::command_id(&resumption.pending.request.op_id, ""))
        .collect();
    let launches = pending.values().filter_map(|resumption| resumption.launch.as_ref());
    let mut in_use: Vec<String> = launches.map(|intent| start_id(&intent.incarnation)).collect();
    for row in rows.values() {
        in_use.extend(row.run.as_ref().map(|run| run.incarnation.clone()));
        in_use.extend(row.next.as_deref().map(start_id));
    }
    let in_use: std::collections::HashSet<String> = in_use.into_iter().collect();
    shared.exits.remove_unused(|id| in_use.contains(id) || ops.iter().any(|op| id.starts_with(op.as_str())));
}
