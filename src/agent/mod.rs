//! Agent: starts, stops and supervises the processes of one or more hosts.
//!
//! # Theory of operation
//! An agent connects out to a gateway ([`channel`]), with a static token or a certificate ([`enrollment`]), and performs the
//! operations that the gateway sends. An idle agent returns memory ([`idle_memory`]). Each instance has a task that owns it ([`instance`]): operations on one instance run
//! one after the other, operations on different instances run concurrently. The task of an instance that is gone ends
//! ([`instance_tasks`]). The task holds its process by a pidfd ([`process`]): the kernel notifies it when the process ends,
//! and no signal can reach another process that reuses the pid. A pure function ([`restart_policy`]) decides whether and
//! when a process that ended is relaunched. The state of each instance is in the agent's own store ([`state`]): the intent
//! before a launch, the process after it.
//!
//! Processes outlive the agent. The next agent finds them in its store, proves their identity by boot, pid and start time,
//! and takes them over; a process that ended in between is handled as if it ended now. A pending operation is in the store
//! until its result is. The next agent resumes it before it supervises the instance ([`recovery`]). A launch whose outcome
//! was not written is resolved by searching for a process with its launch id (`ABIDE_INCARNATION`), so nothing is started
//! twice ([`interrupted_launch`]).
//!
//! One-shots, scheduled runs (auto_type 2 and 0) and all commands of operations run below a shell that writes their exit
//! code to a file ([`exit_record`]), so that the code is known even if no agent waited. A schedule is active while its
//! process is supervised.
//!
//! Files that a spec names are opened with the rights of its user ([`user_files`]), and programs give variables ([`env_exec`]). Each launch ([`spawn`]) runs on its own
//! thread ([`worker_threads`]) with a permit of its user ([`permits`]): a file or a process that one user blocks does not
//! delay other users. The sandbox of a spec restricts its process and all its commands alike ([`sandbox`]).
//!
//! Output of commands is captured in memory ([`captured_output`]), within a bound ([`output_bound`]). The message of a failed start has
//! the last lines of its output ([`start_output`]).
//!
//! The unit of supervision is the process tree of a launch ([`tree`]), found in a scan of all processes ([`process_table`]).
//! Scans run on worker threads ([`proc_scan`]): a process that cannot be read delays no other one. Each launch has its own control group where possible
//! ([`cgroup`]), so that its whole tree is counted and can be killed. Resource limits are enforced by sampling ([`meter`],
//! [`pools`]); health, version and configuration files are checked periodically ([`checks`]). One task samples the
//! [`figures`] of all instances; an instance without limits and checks causes no other periodic work. Orphaned descendants
//! are reaped ([`reaper`]).
//!
//! The output of a foreground process goes to its log, by a log writer if the log is rotated ([`log_writer`]). Output of runs
//! without a log is stored ([`run_output`]). Logs are read on request of the gateway ([`logs`]), by a task of their own: an operation that hangs does not delay them.
//!
//! Process [`ownership`] needs proof: a pid file or an environment is only a claim. The host [`policy`] bounds what a
//! gateway may launch or adopt; [`precheck`] lists the instances that it would refuse.

mod account;
mod account_cache;
mod captured_output;
mod cgroup;
mod channel;
mod checks;
mod clone_exec;
mod context;
mod enrollment;
mod env_exec;
mod environment;
mod error;
mod exit_record;
mod figures;
mod file_limit;
mod health;
mod idle_memory;
mod instance;
mod instance_tasks;
mod interrupted_launch;
mod launch_mark;
mod log_writer;
mod logs;
mod masking;
mod meter;
mod name;
mod name_lookup;
mod oplog;
mod output_bound;
mod ownership;
mod permits;
mod policy;
mod policy_check;
mod pools;
mod probe_targets;
mod proc_scan;
mod process;
mod process_files;
mod process_table;
mod reaper;
mod recovery;
mod restart_policy;
mod run_output;
mod sandbox;
mod schedule;
mod simple_command;
mod spawn;
mod start_output;
mod state;
mod stream_clock;
mod tree;
mod user_files;
mod worker_threads;

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tracing::{info, warn};

pub use channel::{JoinConfig, run};
pub use checks::first_mismatch;
pub use clone_exec::serve_if_launcher;
pub use context::AgentIntervals;
pub use figures::SAMPLE_INTERVAL;
pub use log_writer::run_if_named as run_log_writer_if_named;
pub use name::{AgentNameError, agent_name, this_host};
pub use policy::HostPolicy;
pub use policy_check::{RefusedInstance, left_running, refused_instances};

use self::cgroup::Cgroups;
use self::context::{AgentContext, ResourceTables};
use self::exit_record::ExitRecords;
use self::instance::InstanceCommand;
use self::instance_tasks::InstanceTasks;
use self::interrupted_launch::has_another_agent;
use self::logs::{LogReads, LogSources};
use self::oplog::{LogLookup, OpLog};
use self::permits::Permits;
use self::process::{LaunchedProcess, ProcessHandle};
use self::process_files::ProcessFiles;
use self::process_table::ProcessTable;
use self::recovery::{RecoveredState, Resumption};
use self::run_output::RunOutputs;
use self::state::{InstanceState, load_all, load_readable, result_key};
use crate::agent_protocol::{AgentMessage, AgentOp, FiguresAnswer, LogChunk, OpRequest, OpResult, ToAgent};
use crate::clock;
use crate::gse::codes::RowCode;
use crate::ids::fresh_id;
use crate::model::{HostKey, InstanceKey};
use crate::permissions::close_to_others;
use crate::store::lease::MAX_GENERATION;
use crate::store::{Embedded, Error, KeySource, Store, Txn, keys};

/// Maximum concurrent commands of one user's specs.
const MAX_COMMANDS_PER_USER: usize = 64;
/// Maximum concurrent checks of health, version and files of one user's processes.
const MAX_CHECKS_PER_USER: usize = 32;

/// The instance tasks of an agent, and the operations that it has received.
pub struct Supervisor {
    instances: InstanceTasks,
    /// Operations that are in flight or ran. The gateway may send them again.
    oplog: OpLog,
    /// Newest lease generation per owner.
    fences: HashMap<String, u64>,
    /// Processes with a launch id that ran when an empty folder was opened: an earlier agent launched them, and its folder
    /// was lost.
    unclaimed: Option<Arc<Vec<LaunchedProcess>>>,
    log_reads: LogReads,
    /// Instances that the gateway named since the session began, until it has named all of a host.
    listed: HashSet<InstanceKey>,
    /// Answers to figure queries that wait to be sent.
    figure_answers: Vec<FiguresAnswer>,
    sample_interval: Duration,
    shared: Arc<AgentContext>,
}

/// The largest lease generation of each owner. A generation that no lease can have is dropped.
async fn load_fences(store: &Embedded) -> Result<HashMap<String, u64>, Error> {
    let mut fences: HashMap<String, u64> =
        load_all::<u64>(store, keys::FENCE_PREFIX).await?.into_iter().collect();
    fences.retain(|owner, generation| {
        let is_valid = *generation <= MAX_GENERATION;
        if !is_valid {
            warn!(?owner, generation, "stored generation dropped: no lease can have it");
        }
        is_valid
    });
    Ok(fences)
}

impl Supervisor {
    /// Opens an agent's folder and takes over the processes that an earlier agent left running.
    pub async fn open(
        folder: &Path,
        keys: &KeySource,
        intervals: AgentIntervals,
        policy: HostPolicy,
        up: mpsc::UnboundedSender<AgentMessage>,
    ) -> Result<Supervisor, Error> {
        process::set_cloexec();
        file_limit::raise();
        crate::malloc::allocate_tightly();
        let store = Embedded::open_alone_unlogged(&folder.join("agent.db"), keys)?;
        close_to_others(folder, &["agent.db", "agent.db-wal", "agent.db-shm"])
            .map_err(|error| Error::Unsafe(Arc::new(error)))?;
        let exits = ExitRecords::in_folder(folder).map_err(|error| Error::io(folder.display(), error))?;
        let groups = Cgroups::under_own_cgroup(folder);
        let outputs = RunOutputs::in_folder(folder).map_err(|error| Error::io(folder.display(), error))?;
        let files = ProcessFiles::in_folder(folder).map_err(|error| Error::io(folder.display(), error))?;
        let shared = Arc::new(AgentContext {
            store,
            up,
            exits,
            user_permits: Arc::default(),
            root_open_policy: {
                let policy = policy.clone();
                Arc::new(move |path: &Path| policy.may_root_open(path))
            },
            commands: Permits::new(MAX_COMMANDS_PER_USER),
            check_permits: Permits::new(MAX_CHECKS_PER_USER),
            groups,
            resources: ResourceTables::default(),
            logs: LogSources::new(outputs, files),
            policy,
            check_interval: intervals.check,
        });
        reaper::start();
        shared.resources.figures.keep_in(folder);
        let fences = load_fences(&shared.store).await?;
        let RecoveredState { states, pending } = recovery::recover(&shared).await?;
        // The gateway may send operations of an earlier agent again. One that ran is reported and not repeated; one that
        // had begun is resumed here.
        let mut oplog = OpLog::open(&shared.store).await?;
        pending.values().for_each(|resumption| oplog.begin(&resumption.pending.request));
        let mut supervisor = Supervisor {
            instances: InstanceTasks::new(Arc::clone(&shared)),
            oplog,
            fences,
            unclaimed: None,
            log_reads: LogReads::new(Arc::clone(&shared)),
            listed: HashSet::new(),
            figure_answers: Vec::new(),
            sample_interval: intervals.sample,
            shared,
        };
        let count = states.len();
        if states.is_empty() && supervisor.fences.is_empty() {
            let table = ProcessTable::wait_for_current().await;
            let found: Vec<LaunchedProcess> =
                table.launched().filter(|process| !has_another_agent(process)).collect();
            if !found.is_empty() {
                info!(processes = found.len(), "found processes of an agent with another --data folder");
            }
            supervisor.unclaimed = Some(Arc::new(found));
        }
        supervisor.take_over(states, pending);
        // The first pass reads the samples of the instances back, so they exist by now.
        let figures = Arc::downgrade(&supervisor.shared.resources.figures);
        tokio::spawn(figures::run(figures, intervals.sample));
        info!(instances = count, "instances recovered");
        Ok(supervisor)
    }

    /// Starts the task of each stored instance, with its process if that still runs, and with its pending operation.
    fn take_over(
        &mut self,
        states: HashMap<InstanceKey, InstanceState>,
        mut pending: HashMap<InstanceKey, Resumption>,
    ) {
        // If two states name the same process, the instance that launched it gets it.
        let mut states: Vec<(InstanceKey, InstanceState)> = states.into_iter().collect();
        states.sort_by_key(|(_, state)| state.run.as_ref().is_none_or(|run| run.incarnation.is_empty()));
        for (instance, mut state) in states {
            let handle = state.run.as_ref().and_then(|run| ProcessHandle::open(&run.identity));
            if handle.is_none()
                && let Some(run) = state.run.take_if(|run| run.identity.is_claimed())
            {
                let pid = run.identity.pid;
                warn!(%instance, pid, "supervision stopped: another instance holds this process");
                state.message = format!("process {pid} is held by another instance of this agent");
                (state.hosted, state.next) = (false, None);
            }
            let resumption = pending.remove(&instance);
            self.instances.spawn(instance, state, handle, resumption);
        }
        for (instance, resumption) in pending {
            self.instances.spawn(instance, InstanceState::default(), None, Some(resumption));
        }
    }

    /// Reports all instances: the gateway may have missed reports while the agent was disconnected.
    pub fn report_all(&self) {
        self.instances.send_all(|| InstanceCommand::Report);
    }

    /// Results that no gateway has acknowledged.
    pub async fn unacknowledged_results(&self) -> Result<Vec<OpResult>, Error> {
        Ok(load_readable::<OpResult>(&self.shared.store, keys::RESULT_PREFIX)
            .await?
            .into_iter()
            .map(|(_, result)| result)
            .collect())
    }

    /// The gateway has acknowledged these results.
    pub async fn acknowledged(&mut self, results: Vec<OpResult>) -> Result<(), Error> {
        self.oplog.acknowledged(&self.shared.store, results, clock::now().0).await
    }

    /// The largest sequence number that this agent knows.
    pub fn last_seq(&self) -> u64 {
        self.oplog.last_seq()
    }

    /// Starts a session with a gateway whose store has this identity.
    pub async fn session_started(&mut self, gateway_store: &str) -> Result<(), Error> {
        // The gateway reads again in the new session.
        self.log_reads.cancel_all();
        self.listed.clear();
        self.oplog.session_started(&self.shared.store, gateway_store, clock::now().0).await
    }

    /// The next answer to a read of a log.
    pub async fn next_log_chunk(&mut self) -> LogChunk {
        self.log_reads.next().await
    }

    /// Handles a message of the gateway. `age_ms`: time since the gateway sent it.
    pub async fn handle_message(&mut self, message: ToAgent, age_ms: u64) {
        match message {
            ToAgent::SetSpec { instance, given, changed } => {
                if given.is_some() {
                    self.listed.insert(instance.clone());
                }
                self.instances.send(&instance, InstanceCommand::SetSpec(Box::new((given, changed))));
                // The gateway may have a state of the instance that is older than this folder.
                if let Some(unclaimed) = self.unclaimed.clone() {
                    self.instances.send(&instance, InstanceCommand::Reclaim { unclaimed, renamed: false });
                    self.instances.send(&instance, InstanceCommand::Report);
                }
            }
            // Each instance has claimed the processes that carry its name. The rest may have been renamed since the launch.
            ToAgent::Synced { as_of, host } => {
                if let Some(host) = host {
                    self.forget_unlisted(&host, as_of);
                }
                let Some(unclaimed) = &self.unclaimed else { return };
                self.instances.send_all(|| InstanceCommand::Reclaim {
                    unclaimed: Arc::clone(unclaimed),
                    renamed: true,
                });
            }
            ToAgent::Groups { host, namespace, groups } => match namespace.parse() {
                Ok(namespace) => {
                    self.shared.resources.pools.set(host, namespace, &groups);
                    // All instances recompute their timers.
                    self.instances.send_all(|| InstanceCommand::Wake);
                }
                Err(_) => warn!(%namespace, "pool ignored: invalid namespace"),
            },
            ToAgent::Heartbeat { floor, .. } => {
                // The gateway confirms the floor again later; the records stay until then.
                if let Err(error) = self.oplog.raise_floor(&self.shared.store, floor).await {
                    warn!(%error, floor, "cannot write the operation floor");
                }
            }
            ToAgent::Measure { id, instance } => {
                self.figure_answers.push(self.shared.resources.figures.answer(id, &instance).await);
            }
            ToAgent::Op(request) => self.operation(*request, age_ms).await,
            ToAgent::ReadLog(read) => self.log_reads.begin(*read),
            ToAgent::CancelLog { id } => self.log_reads.cancel(&id),
        }
    }

    /// The gateway has named all registered instances of a host. Others were unregistered while no agent was connected.
    fn forget_unlisted(&mut self, host: &HostKey, as_of: u64) {
        let is_unlisted = |instance: &InstanceKey| instance.host == *host && !self.listed.contains(instance);
        self.instances.send_to(is_unlisted, || InstanceCommand::Unlisted { as_of });
        self.listed.retain(|instance| instance.host != *host);
    }

    async fn operation(&mut self, request: OpRequest, age_ms: u64) {
        // A live status check changes nothing. A repeated request runs again: the earlier result may be lost.
        if !request.op.is_read_only() && !self.is_new(&request, age_ms).await {
            return;
        }
        if let (Some(owner), Some(generation)) = (&request.owner, request.generation) {
            if generation > MAX_GENERATION {
                let message = format!("no lease of owner {owner} has generation {generation}");
                let (op_id, seq, code) = (request.op_id, request.seq, RowCode::OLD_GENERATION.0);
                let result = OpResult { op_id, seq, code, message, content: None };
                let _ = self.shared.up.send(AgentMessage::Result(result));
                return;
            }
            let last = self.fences.get(owner).copied().unwrap_or(0);
            if generation < last {
                let message = RowCode::OLD_GENERATION.meaning().unwrap_or_default().to_owned();
                let result = OpResult {
                    op_id: request.op_id,
                    seq: request.seq,
                    code: RowCode::OLD_GENERATION.0,
                    message,
                    // A gateway that lost its store continues from this generation.
                    content: Some(serde_json::json!({"generation": last})),
                };
                let _ = self.shared.up.send(AgentMessage::Result(result));
                return;
            }
            if generation > last {
                let txn = Txn::put(keys::fence(owner), generation.to_string());
                if let Err(error) = self.shared.store.txn(txn).await {
                    warn!(%error, "cannot write the owner's generation");
                }
                self.fences.insert(owner.clone(), generation);
            }
        }
        if !request.op.is_read_only() {
            self.oplog.begin(&request);
        }
        let instance = request.instance.clone();
        let AgentOp::Rename { from } = request.op.clone() else {
            return self.instances.send(&instance, InstanceCommand::Op(Box::new(request)));
        };
        match self.instances.contains(&from) {
            true => {
                self.instances.send(&from, InstanceCommand::Rename(Box::new((instance.clone(), request))));
                self.instances.rename(&from, instance);
            }
            // Already renamed, or unknown to this agent: only the registered spec changes.
            false => self.instances.send(&instance, InstanceCommand::Op(Box::new(request))),
        }
    }

    /// Whether the operation is new. If not, its result is known to the gateway or sent again; a refusal is sent as its
    /// result.
    async fn is_new(&mut self, request: &OpRequest, age_ms: u64) -> bool {
        let (instance, op_id) = (&request.instance, &request.op_id);
        match self.oplog.lookup(request) {
            LogLookup::InFlight => return false,
            LogLookup::Ran => {
                match self.oplog.result(&self.shared.store, op_id).await {
                    Ok(Some(result)) => drop(self.shared.up.send(AgentMessage::Result(result))),
                    Ok(None) => {
                        warn!(%instance, op_id, "operation already ran, but its result cannot be read")
                    }
                    Err(error) => {
                        warn!(%instance, op_id, %error, "operation already ran, but its result cannot be read")
                    }
                }
                return false;
            }
            LogLookup::BelowFloor(floor) => {
                let message = format!(
                    "not begun: operation {} is final, which the gateway confirmed earlier (floor {floor}); the store of the \
                     gateway may be an older copy",
                    request.seq
                );
                warn!(%instance, op_id, seq = request.seq, floor, "operation refused: already final");
                let _ = self.shared.up.send(AgentMessage::Result(not_begun(request, message)));
                return false;
            }
            LogLookup::New => {}
        }
        let Some(ttl_ms) = request.ttl_ms.filter(|ttl_ms| age_ms > *ttl_ms) else { return true };
        let message = format!(
            "not begun: the operation reached the agent {age_ms} ms after the gateway sent it, and may begin within \
             {ttl_ms} ms"
        );
        warn!(%instance, op_id, age_ms, ttl_ms, "operation refused: it arrived too late");
        // Written, so that it stays refused: the gateway may send it again before it reads this result.
        let result = not_begun(request, message);
        let value = serde_json::to_vec(&result).unwrap_or_default();
        if let Err(error) = self.shared.store.txn(Txn::put(result_key(op_id), value)).await {
            warn!(%instance, op_id, %error, "cannot write the result of a refused operation");
        }
        self.oplog.begin(request);
        let _ = self.shared.up.send(AgentMessage::Result(result));
        false
    }
}

fn not_begun(request: &OpRequest, message: String) -> OpResult {
    let (op_id, seq) = (request.op_id.clone(), request.seq);
    OpResult { op_id, seq, code: RowCode::NOT_BEGUN.0, message, content: None }
}
