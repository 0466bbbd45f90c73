//! Recovery: restores the state of an agent from its folder after a restart.
//!
//! A launch whose outcome was not written is resolved by a process with its launch id, or by its exit record. A pending
//! operation is resumed by its instance task before supervision continues. A one-shot run that began and whose end was not
//! recorded stays unknown, and is not repeated.

use std::collections::HashMap;
use std::time::Duration;

use tracing::{info, warn};

use super::cgroup::Cgroup;
use super::checks;
use super::context::AgentContext;
use super::exit_record::{ExitRecord, after_start_id, hook_id, kill_group, probe_id, start_id};
use super::instance::{OpReply, done, failed, runs_after_relaunch};
use super::interrupted_launch::{self, InterruptedLaunch};
use super::proc_scan;
use super::process::{self, ProcessHandle, ProcessIdentity, boot_id};
use super::state::{
    InstanceState, LIMIT_STOP, LaunchIntent, PendingOperation, ProcessRun, intent_key, load_readable,
    pending_key, result_key, state_key, state_txn,
};
use super::tree::{LaunchTraces, ProcessTree, end_commands};
use crate::agent_protocol::{ExitReason, OpResult, OwnedSpec, ProcessExit};
use crate::clock;
use crate::model::{AutoType, InstanceKey, StartMode};
use crate::store::{Error, Store, Txn, decode, keys};

/// Number of changes that are read from the log of the store, which keeps slightly more.
const LOGGED_CHANGES: u64 = 90_000;

/// Interval between two checks for children before `execve`, which normally takes much less.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Maximum wait for children of an earlier agent to reach `execve`.
const EXEC_TIMEOUT: Duration = Duration::from_secs(2);

/// Waits for children of an earlier agent that have not reached `execve`: only then does the environment of a process
/// contain its launch id.
async fn wait_for_exec() {
    let begun = tokio::time::Instant::now();
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        let has_child = proc_scan::run(process::has_unexecuted_child).await.unwrap_or(true);
        if begun.elapsed() > EXEC_TIMEOUT || !has_child {
            return;
        }
    }
}

/// The message of a run whose end was not recorded.
pub const UNKNOWN_OUTCOME: &str = "a run began and its outcome is unknown: its end was not recorded";

/// The recovered states and pending operations of all instances.
pub struct RecoveredState {
    pub states: HashMap<InstanceKey, InstanceState>,
    /// Operations to resume.
    pub pending: HashMap<InstanceKey, Resumption>,
}

/// An operation that an earlier agent began.
pub struct Resumption {
    pub pending: PendingOperation,
    /// Its daemon launch, which continues by the exit record of start_cmd.
    pub launch: Option<LaunchIntent>,
}

/// Reads the store, and resolves the launches whose outcome was not written.
pub async fn recover(shared: &AgentContext) -> Result<RecoveredState, Error> {
    let mut states: HashMap<InstanceKey, InstanceState> =
        by_instance(load_readable(&shared.store, keys::INSTANCE_STATE_PREFIX).await?);
    let mut pending: HashMap<InstanceKey, Resumption> =
        by_instance::<PendingOperation>(load_readable(&shared.store, keys::PENDING_OPERATION_PREFIX).await?)
            .into_iter()
            .map(|(instance, pending)| (instance, Resumption { pending, launch: None }))
            .collect();
    let marks = mark_dormant(shared, &mut states).await?;
    let intents: HashMap<InstanceKey, LaunchIntent> =
        by_instance(load_readable(&shared.store, keys::LAUNCH_INTENT_PREFIX).await?);
    let (daemons, intents): (HashMap<_, _>, HashMap<_, _>) = intents
        .into_iter()
        .partition(|(instance, intent)| continues_launch(intent, pending.contains_key(instance)));
    let txn = marks.and(resolve(shared, intents, &mut states, &mut pending).await);
    if !txn.writes.is_empty() {
        crate::failpoint::point("recovering");
        shared.store.txn(txn).await?;
    }
    for (instance, intent) in daemons {
        if let Some(resumption) = pending.get_mut(&instance) {
            resumption.launch = Some(intent);
        }
    }
    remove_stale_records(shared, &states, &pending);
    let shown = states.iter().filter(|(_, state)| state.is_shown()).map(|(instance, _)| instance);
    shared.logs.outputs().remove_others(shown.chain(pending.keys()));
    end_probes(shared, &states).await;
    Ok(RecoveredState { states, pending })
}

/// Marks stopped processes that must not be relaunched. States of an earlier version do not record this: a process is
/// relaunched only if it was supervised when it ended, which the change log of that version shows. Returns the writes of
/// the marks: the first commit deletes the log.
async fn mark_dormant(
    shared: &AgentContext,
    states: &mut HashMap<InstanceKey, InstanceState>,
) -> Result<Txn, Error> {
    let resident = |owned: &OwnedSpec| owned.spec.monitor.auto_type == AutoType::Resident;
    let is_open = |state: &InstanceState| {
        let is_down = state.hosted && state.run.is_none() && state.given.as_ref().is_some_and(resident);
        is_down && state.retry.is_none() && !state.dormant && !state.message.is_empty()
    };
    if !states.values().any(is_open) {
        return Ok(Txn::default());
    }
    let last = shared.store.range(keys::INSTANCE_STATE_PREFIX, None, 0).await?.as_of;
    // The read returns at once, unless the log has no such change.
    let changes = shared.store.changes(keys::INSTANCE_STATE_PREFIX, last.saturating_sub(LOGGED_CHANGES));
    let changes = match tokio::time::timeout(EXEC_TIMEOUT, changes).await {
        Ok(Ok(changes)) => changes,
        Ok(Err(Error::Compacted)) | Err(_) => return Ok(Txn::default()),
        Ok(Err(error)) => return Err(error),
    };
    let mut ended_supervised: HashMap<InstanceKey, (bool, bool)> = HashMap::new();
    for change in changes {
        let instance = keys::instance_state_of(&change.key);
        // A state that does not parse was logged when it was loaded.
        let state = change.value.and_then(|value| decode::<InstanceState>(&change.key, &value).ok());
        let (Some(instance), Some(state)) = (instance, state) else { continue };
        let (was_running, supervised) = ended_supervised.entry(instance).or_insert((false, true));
        // Counts only an end that is in the log: its first state may be any.
        if *was_running && state.run.is_none() {
            *supervised = state.hosted;
        }
        *was_running = state.run.is_some();
    }
    let mut marks = Txn::default();
    for (instance, state) in states.iter_mut().filter(|(_, state)| is_open(state)) {
        if ended_supervised.get(instance).is_some_and(|(_, supervised)| !supervised) {
            info!(%instance, "process not relaunched: it was not supervised when it ended");
            state.dormant = true;
            marks = marks.and(state_txn(instance, state));
        }
    }
    Ok(marks)
}

fn by_instance<T>(entries: Vec<(String, T)>) -> HashMap<InstanceKey, T> {
    entries.into_iter().filter_map(|(name, value)| Some((name.parse().ok()?, value))).collect()
}

/// Whether a pending operation continues this daemon launch by the exit record of its start_cmd. Not after a reboot, and
/// not for a launch of an earlier version, which has no record.
fn continues_launch(intent: &LaunchIntent, is_pending: bool) -> bool {
    let spec = &intent.held.spec;
    let is_daemon = spec.monitor.auto_type == AutoType::Resident
        && spec.control.start_mode.unwrap_or_default() == StartMode::Daemon;
    is_daemon && is_pending && intent.boot == boot_id()
}

/// Resolves interrupted launches of foreground processes, one-shots and scheduled runs, and relaunches by supervision.
async fn resolve(
    shared: &AgentContext,
    intents: HashMap<InstanceKey, LaunchIntent>,
    states: &mut HashMap<InstanceKey, InstanceState>,
    pending: &mut HashMap<InstanceKey, Resumption>,
) -> Txn {
    let reserved =
        |states: &HashMap<InstanceKey, InstanceState>| states.values().any(|state| state.next.is_some());
    if intents.is_empty() && !reserved(states) {
        return Txn::default();
    }
    let find = async || {
        let by_intent = intents.values().map(|intent| InterruptedLaunch {
            launch_id: &intent.incarnation,
            spec: &intent.held.spec,
            group: intent.group.as_deref().map(Cgroup::at),
        });
        let relaunches = states.values().filter_map(|state| {
            let (launch_id, given) = (state.next.as_ref()?, state.given.as_ref()?);
            Some(InterruptedLaunch { launch_id, spec: &given.spec, group: shared.groups.of(launch_id) })
        });
        interrupted_launch::find_interrupted(shared, &by_intent.chain(relaunches).collect::<Vec<_>>()).await
    };
    let mut found = find().await;
    let dead = |state: &InstanceState| {
        state.run.as_ref().is_none_or(|run| ProcessHandle::open(&run.identity).is_none())
    };
    let lost = |state: &InstanceState| {
        state.next.as_ref().is_some_and(|launch_id| !found.contains_key(launch_id)) && dead(state)
    };
    if intents.values().any(|intent| !found.contains_key(&intent.incarnation)) || states.values().any(lost) {
        wait_for_exec().await;
        found = find().await;
    }
    let mut txn = Txn::default();
    for (instance, state) in states.iter_mut() {
        if resolve_relaunch(shared, instance, state, &found) {
            txn = txn.and(Txn::put(state_key(instance), serde_json::to_vec(state).unwrap_or_default()));
        }
    }
    for (instance, intent) in intents {
        let state = states.entry(instance.clone()).or_default();
        let process = found.get(&intent.incarnation).cloned();
        if intent.op_id.is_none() {
            end_hook(shared, &intent).await;
        }
        info!(%instance, pid = process.as_ref().map(|one| one.pid), "resolving an interrupted launch");
        let reply = resolve_one(shared, intent, process, state).await;
        let value = serde_json::to_vec(state).unwrap_or_default();
        txn = txn.and(Txn::delete(intent_key(&instance))).and(Txn::put(state_key(&instance), value));
        if let Some((op_id, (code, message))) = reply {
            let seq = pending.remove(&instance).map_or(0, |resumption| resumption.pending.request.seq);
            let result = OpResult { op_id, seq, code: code.0, message, content: None };
            let value = serde_json::to_vec(&result).unwrap_or_default();
            txn =
                txn.and(Txn::put(result_key(&result.op_id), value)).and(Txn::delete(pending_key(&instance)));
        }
    }
    txn
}

/// Resolves an interrupted relaunch, which has no launch intent. True: the state changed.
fn resolve_relaunch(
    shared: &AgentContext,
    instance: &InstanceKey,
    state: &mut InstanceState,
    found: &HashMap<String, ProcessIdentity>,
) -> bool {
    let (Some(launch_id), Some(given)) = (&state.next, &state.given) else { return false };
    // A daemon launch continues by the exit record of its start_cmd.
    let is_daemon = given.spec.control.start_mode.unwrap_or_default() == StartMode::Daemon;
    if is_daemon && shared.exits.read(&start_id(launch_id)) != ExitRecord::Missing {
        return false;
    }
    let Some(identity) = found.get(launch_id).cloned() else { return false };
    info!(%instance, pid = identity.pid, "resolving an interrupted relaunch");
    let (incarnation, live) = (launch_id.clone(), given.clone());
    if let Some(ended) = &state.run {
        let (at, pid, reason) = (clock::now().0, ended.identity.pid, ExitReason::Unknown);
        let detail = "ended while the agent was restarted".to_owned();
        state.history.add_exit(ProcessExit { at, pid, code: None, signal: None, reason, detail });
    }
    state.history.restarts += 1;
    let (group, traces) = (shared.groups.of(&incarnation).map(|group| group.path()), LaunchTraces::default());
    let uid = shared.rights_of(&live.spec).ok().map(|rights| rights.account().uid());
    let hook_due = runs_after_relaunch(&live.spec);
    let run = ProcessRun::of_identity(identity, live);
    state.run = Some(ProcessRun { incarnation, group, uid, traces, hook_due, ..run });
    (state.next, state.started, state.since, state.exit) = (None, clock::now().0, clock::now().0, None);
    // A stop by a limit was for the ended process.
    state.ending.take_if(|ending| ending.starts_with(LIMIT_STOP));
    state.message.clear();
    true
}

/// Resolves one interrupted launch. Returns the result of its operation, if the operation is complete.
async fn resolve_one(
    shared: &AgentContext,
    intent: LaunchIntent,
    process: Option<ProcessIdentity>,
    state: &mut InstanceState,
) -> Option<(String, OpReply)> {
    let resident = intent.held.spec.monitor.auto_type == AutoType::Resident;
    let once = intent.held.spec.monitor.auto_type == AutoType::OneShot;
    let record = shared.exits.read(&intent.incarnation);
    let shell = || shared.exits.shell(&intent.incarnation).map(|handle| handle.identity.clone());
    let identity = match resident {
        true => process,
        false => shell().or(process),
    };
    let periodic = intent.held.spec.monitor.auto_type == AutoType::Periodic;
    if let Some(identity) = identity {
        (state.started, state.since, state.unknown_run, state.exit) = (intent.at, intent.at, None, None);
        if periodic {
            state.history.begin_run(intent.at);
        }
        state.message.clear();
        if once {
            state.ran = Some(intent.held.clone());
        }
        let LaunchIntent { incarnation, op_id: by, held: live, group, uid, .. } = intent;
        let traces = LaunchTraces::default();
        let run = ProcessRun::of_identity(identity, live);
        state.run = Some(ProcessRun { by, incarnation, group, uid, traces, ..run });
        return None;
    }
    if resident {
        return None;
    }
    // A child that has not executed its shell yet has the record open: the command may still begin.
    let not_begun = intent.boot == boot_id()
        && match record {
            ExitRecord::Missing => true,
            ExitRecord::Empty => !shared.exits.is_open(&intent.incarnation).await,
            ExitRecord::Begun(_) | ExitRecord::Ended(_) | ExitRecord::Unreadable => false,
        };
    if not_begun {
        return None;
    }
    (state.run, state.started, state.since) = (None, intent.at, clock::now().0);
    if periodic {
        state.history.begin_run(intent.at);
        state.history.end_run(None, shared.exits.code(&intent.incarnation), None);
    }
    if intent.op_id.is_some() {
        // As after any start: the spec is registered, so that the gateway keeps the state of the unknown run.
        (state.given, state.hosted) = (Some(intent.held.clone()), true);
    }
    let reply = match record {
        ExitRecord::Ended(code) => {
            (state.exit, state.unknown_run) = (Some(code), None);
            state.message = format!("ended with code {code}");
            if once {
                state.ran = Some(intent.held.clone());
            }
            done()
        }
        ExitRecord::Missing | ExitRecord::Empty | ExitRecord::Begun(_) | ExitRecord::Unreadable => {
            warn!(launch = intent.incarnation, "{UNKNOWN_OUTCOME}");
            state.message = UNKNOWN_OUTCOME.to_owned();
            if once {
                state.unknown_run = Some(intent.op_id.clone().unwrap_or_default());
            }
            failed(UNKNOWN_OUTCOME)
        }
    };
    intent.op_id.map(|op_id| (op_id, reply))
}

/// Ends the hook of an interrupted scheduled run, which is not resumed: the next run has its own.
async fn end_hook(shared: &AgentContext, intent: &LaunchIntent) {
    let (id, spec) = (hook_id(&intent.incarnation), &intent.held.spec);
    if spec.hooks.before_start.is_none() {
        return;
    }
    if let Some(shell) = shared.exits.shell(&id) {
        kill_group(&shell);
    }
    // The account may be gone: the uid of the launch is stored.
    let uid = intent.uid.or_else(|| Some(shared.rights_of(spec).ok()?.account().uid()));
    ProcessTree::of_command(&id, shared.groups.of(&id), uid).end(Duration::ZERO).await;
}

/// Ends the check commands that an earlier agent began: their results are lost, and this agent runs its own.
async fn end_probes(shared: &AgentContext, states: &HashMap<InstanceKey, InstanceState>) {
    let runs = states.values().filter_map(|state| state.run.as_ref());
    let checked = runs.filter(|run| run.identity.boot == boot_id() && checks::has_command(&run.live.spec));
    let trees = checked.map(|run| {
        let uid = run.uid.or_else(|| Some(shared.rights_of(&run.live.spec).ok()?.account().uid()));
        let id = probe_id(&run.identity);
        ProcessTree::of_command(&id, shared.groups.of(&id), uid)
    });
    end_commands(trees.collect()).await;
}

/// Removes exit records that a killed agent left behind after it wrote their result.
fn remove_stale_records(
    shared: &AgentContext,
    states: &HashMap<InstanceKey, InstanceState>,
    pending: &HashMap<InstanceKey, Resumption>,
) {
    // Record ids of the commands of an operation share a prefix.
    let ops: Vec<String> = pending
        .values()
        .map(|resumption| super::exit_record::command_id(&resumption.pending.request.op_id, ""))
        .collect();
    let launches = pending.values().filter_map(|resumption| resumption.launch.as_ref());
    let mut in_use: Vec<String> = launches.map(|intent| start_id(&intent.incarnation)).collect();
    for state in states.values() {
        in_use.extend(state.run.as_ref().map(|run| run.incarnation.clone()));
        in_use.extend(
            state.run.as_ref().filter(|run| run.hook_due).map(|run| after_start_id(&run.incarnation)),
        );
        in_use.extend(state.next.as_deref().map(start_id));
        in_use.extend(state.next.as_deref().map(hook_id));
    }
    let in_use: std::collections::HashSet<String> = in_use.into_iter().collect();
    shared.exits.remove_unused(|id| in_use.contains(id) || ops.iter().any(|op| id.starts_with(op.as_str())));
}
