//! The agent: one host's processes, or several hosts', started, stopped and guarded as they were told.
//!
//! # Theory of operation
//! An agent connects out to a gateway ([`channel`]) and is asked for operations. Each instance has a [`instance`], a task that
//! owns it: [`operations`] on one instance come one after the other, those on different ones run side by side. A keeper holds
//! its process by a pidfd ([`process`]): it is told at once when the process ends, and no signal can reach another process
//! that was given the same pid. Whether and when a process that ended is launched again is decided by a pure function
//! ([`restart_policy`]). How it stands is written to the agent's own store ([`state`]): before a launch the intent, then the process.
//!
//! When the agent dies, its processes live on. The next agent finds them in its store, proves by boot, pid and start time
//! that they are the ones, and holds them again; what ended meanwhile has ended now. An operation that has begun is in the
//! store until its result is: the next agent resumes it, before it supervises the instance, from what it finds
//! ([`recovery`]). A launch whose outcome was not written is settled by looking for a process with its mark
//! (`ABIDE_INCARNATION`): nothing is started a second time.
//!
//! Processes that end (auto_type 0 and 2) and every command of an operation run below a shell that records
//! their end in a file ([`exit_record`]), so that it is known even if no agent waited. A schedule is kept while a process is
//! hosted.
//!
//! Files that a spec names are opened with the rights of its user ([`user_files`]). A launch ([`spawn`]) has a thread to
//! itself ([`worker_threads`]) and a permit of its user ([`permits`]): neither a file nor a process that a user stopped holds
//! up anyone else.
//!
//! Output of commands is captured in memory ([`output`]), within a bound ([`output_bound`]).
//!
//! Each launch has a control group of its own where that is possible ([`cgroup`]), so that its whole tree is counted and
//! can be ended. Limits are looked after by samples ([`meter`], [`pools`]), health, version and configuration files by
//! looks now and then ([`checks`]); who sets none of these costs nothing while nothing happens. Orphans of our processes
//! are waited for ([`reaper`]).
//!
//! Process [`ownership`] needs proof: a pid file or an environment is only a claim. The host's own [`policy`] bounds what a
//! gateway may launch or adopt; [`precheck`] lists what it would refuse.

mod account;
mod adoption;
mod cgroup;
mod channel;
mod checks;
mod clone_exec;
mod commands;
mod exit_record;
mod instance;
mod launch;
mod masking;
mod meter;
mod operations;
mod oplog;
mod output;
mod output_bound;
mod ownership;
mod permits;
mod policy;
mod pools;
mod precheck;
mod process;
mod reaper;
mod recovery;
mod report;
mod restart_policy;
mod schedule;
mod spawn;
mod state;
mod stream_clock;
mod user_files;
mod worker_threads;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tracing::{info, warn};

pub use channel::{JoinConfig, run};
pub use checks::first_mismatch;
pub use policy::HostPolicy;
pub use precheck::{RefusedInstance, refused_instances};

use self::cgroup::Cgroups;
use self::exit_record::ExitRecords;
use self::instance::{AgentContext, InstanceCommand, InstanceTask};
use self::oplog::{LogLookup, OpLog};
use self::permits::Permits;
use self::pools::Pools;
use self::process::{LaunchedProcess, ProcessHandle, launched_processes};
use self::recovery::{RecoveredState, Resumption};
use self::state::{InstanceState, load_all, result_key};
use crate::gse::agent_protocol::{AgentMessage, AgentOp, OpRequest, OpResult, ToAgent};
use crate::gse::codes::RowCode;
use crate::model::{HostKey, InstanceKey};
use crate::permissions::close_to_others;
use crate::store::lease::MAX_GENERATION;
use crate::store::{Embedded, Error, Store, Txn};

/// Commands of one user's specs that run at once: they may wait for something.
const MAX_COMMANDS_PER_USER: usize = 64;
/// Checks of health, version and files of one user's processes at once.
const MAX_CHECKS_PER_USER: usize = 32;

/// All keepers of this agent.
pub struct Supervisor {
    instances: HashMap<InstanceKey, mpsc::UnboundedSender<InstanceCommand>>,
    /// Operations that are in flight or ran: the gateway may send them again.
    oplog: OpLog,
    fences: HashMap<String, u64>,
    /// Processes that named a launch when an empty folder was opened: an earlier agent's, whose folder is lost.
    unclaimed: Option<Arc<Vec<LaunchedProcess>>>,
    shared: Arc<AgentContext>,
}

impl Supervisor {
    /// Opens an agent's folder and takes hold again of everything that was left running.
    pub async fn open(
        folder: &Path,
        look_every: Duration,
        policy: HostPolicy,
        up: mpsc::UnboundedSender<AgentMessage>,
    ) -> Result<Supervisor, Error> {
        process::set_cloexec();
        crate::malloc::allocate_tightly();
        let store = Embedded::open_alone(&folder.join("agent.db"))?;
        close_to_others(folder, &["agent.db", "agent.db-wal", "agent.db-shm"]).map_err(Error::Disk)?;
        let exits = ExitRecords::in_folder(folder)
            .map_err(|error| Error::Disk(format!("{}: {error}", folder.display())))?;
        let groups = Cgroups::under_own_cgroup(folder);
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
            pools: Pools::default(),
            policy,
            check_interval: look_every,
        });
        tokio::spawn(reaper::reap());
        let mut fences: HashMap<String, u64> =
            load_all::<u64>(&shared.store, "fence/").await?.into_iter().collect();
        fences.retain(|owner, generation| {
            let given = *generation <= MAX_GENERATION;
            if !given {
                warn!(?owner, generation, "forgotten: no lease has this generation");
            }
            given
        });
        let RecoveredState { rows, mut pending } = recovery::recover(&shared).await?;
        // An operation that ran before we died is reported, and not run again. One that was begun is resumed here, though
        // the gateway sends it again.
        let mut oplog = OpLog::open(&shared.store).await?;
        pending.values().for_each(|resumption| oplog.begin(&resumption.pending.request));
        let mut table = Supervisor { instances: HashMap::new(), oplog, fences, unclaimed: None, shared };
        let held = rows.len();
        if rows.is_empty() && table.fences.is_empty() {
            let found = launched_processes();
            if !found.is_empty() {
                info!(processes = found.len(), "running with marks, and not in this folder");
            }
            table.unclaimed = Some(Arc::new(found));
        }
        // Where two rows name one process, the one that launched it holds it.
        let mut rows: Vec<(InstanceKey, InstanceState)> = rows.into_iter().collect();
        rows.sort_by_key(|(_, row)| row.run.as_ref().is_none_or(|run| run.incarnation.is_empty()));
        for (instance, mut row) in rows {
            let hold = row.run.as_ref().and_then(|run| ProcessHandle::open(&run.identity));
            if hold.is_none()
                && let Some(run) = row.run.take_if(|run| run.identity.is_claimed())
            {
                let pid = run.identity.pid;
                warn!(%instance, pid, "another instance holds this process: this one is not supervised any more");
                row.message = format!("process {pid} is held by another instance of this agent");
                (row.hosted, row.next) = (false, None);
            }
            let resumption = pending.remove(&instance);
            table.spawn_instance(instance, row, hold, resumption);
        }
        for (instance, resumption) in pending {
            table.spawn_instance(instance, InstanceState::default(), None, Some(resumption));
        }
        info!(instances = held, "taken up");
        Ok(table)
    }

    fn spawn_instance(
        &mut self,
        instance: InstanceKey,
        row: InstanceState,
        hold: Option<ProcessHandle>,
        resumption: Option<Resumption>,
    ) -> &mpsc::UnboundedSender<InstanceCommand> {
        let (send, asks) = mpsc::unbounded_channel();
        let mut keeper = InstanceTask::new(instance.clone(), row, hold, Arc::clone(&self.shared));
        keeper.resumption = resumption.map(Box::new);
        tokio::spawn(keeper.run(asks));
        self.instances.entry(instance).insert_entry(send).into_mut()
    }

    fn send_command(&mut self, instance: &InstanceKey, ask: InstanceCommand) {
        let keeper = match self.instances.get(instance) {
            Some(keeper) => keeper,
            None => self.spawn_instance(instance.clone(), InstanceState::default(), None, None),
        };
        let _ = keeper.send(ask);
    }

    /// Everything is told of anew: a gateway that we were away from may have missed something.
    pub fn report_all(&self) {
        for keeper in self.instances.values() {
            let _ = keeper.send(InstanceCommand::Report);
        }
    }

    /// Something changed that concerns whoever it concerns.
    fn wake_all(&self) {
        for keeper in self.instances.values() {
            let _ = keeper.send(InstanceCommand::Wake);
        }
    }

    /// Results that no gateway has taken yet.
    pub async fn unacknowledged_results(&self) -> Result<Vec<OpResult>, Error> {
        Ok(load_all::<OpResult>(&self.shared.store, "up/")
            .await?
            .into_iter()
            .map(|(_, result)| result)
            .collect())
    }

    /// The gateway has acknowledged these results.
    pub async fn acknowledged(&mut self, results: Vec<OpResult>) -> Result<(), Error> {
        self.oplog.acknowledged(&self.shared.store, results, now_ms()).await
    }

    /// The largest sequence number that this agent knows.
    pub fn last_seq(&self) -> u64 {
        self.oplog.last_seq()
    }

    /// A session with a gateway begins, whose store has this identity.
    pub async fn session_started(&mut self, gateway_store: &str) -> Result<(), Error> {
        self.oplog.session_started(&self.shared.store, gateway_store, now_ms()).await
    }

    /// What the gateway says. `age_ms`: how long it was on its way.
    pub async fn handle_message(&mut self, down: ToAgent, age_ms: u64) {
        match down {
            ToAgent::SetSpec { instance, given, changed } => {
                self.send_command(&instance, InstanceCommand::Give(Box::new((given, changed))));
                // The gateway may know a state of it from before this folder.
                if let Some(unclaimed) = self.unclaimed.clone() {
                    self.send_command(&instance, InstanceCommand::Found { unclaimed, renamed: false });
                    self.send_command(&instance, InstanceCommand::Report);
                }
            }
            // Each instance has claimed what carries its name: what is left may have been renamed since its launch.
            ToAgent::Synced { .. } => {
                let Some(unclaimed) = &self.unclaimed else { return };
                for keeper in self.instances.values() {
                    let _ = keeper
                        .send(InstanceCommand::Found { unclaimed: Arc::clone(unclaimed), renamed: true });
                }
            }
            ToAgent::Groups { host, namespace, groups } => match namespace.parse() {
                Ok(namespace) => {
                    self.shared.pools.set(host, namespace, &groups);
                    self.wake_all();
                }
                Err(_) => warn!(%namespace, "a pool of no namespace"),
            },
            ToAgent::Heartbeat { floor, .. } => {
                // A floor that cannot be written is confirmed again later; the records stay until then.
                if let Err(error) = self.oplog.raise_floor(&self.shared.store, floor).await {
                    warn!(%error, floor, "the floor of operations cannot be written");
                }
            }
            ToAgent::Op(request) => self.operation(*request, age_ms).await,
        }
    }

    async fn operation(&mut self, request: OpRequest, age_ms: u64) {
        // A live status check changes nothing. It runs again whenever the gateway asks again: its result may be lost.
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
                    // A gateway that lost its store counts on from here.
                    content: Some(serde_json::json!({"generation": last})),
                };
                let _ = self.shared.up.send(AgentMessage::Result(result));
                return;
            }
            if generation > last {
                let txn = Txn::put(format!("fence/{owner}"), generation.to_string());
                if let Err(error) = self.shared.store.txn(txn).await {
                    warn!(%error, "a generation cannot be written down");
                }
                self.fences.insert(owner.clone(), generation);
            }
        }
        if !request.op.is_read_only() {
            self.oplog.begin(&request);
        }
        let instance = request.instance.clone();
        let AgentOp::Rename { from } = &request.op else {
            return self.send_command(&instance, InstanceCommand::Op(Box::new(request)));
        };
        match self.instances.remove(from) {
            Some(keeper) => {
                let _ = keeper.send(InstanceCommand::Rename(Box::new((instance.clone(), request))));
                self.instances.insert(instance, keeper);
            }
            // Renamed already, or never known here: then only its name changes.
            None => self.send_command(&instance, InstanceCommand::Op(Box::new(request))),
        }
    }
    /// Is this operation to be run now? If not, the gateway has its result, gets it again, or gets the reason.
    async fn is_new(&mut self, request: &OpRequest, age_ms: u64) -> bool {
        let (instance, op_id) = (&request.instance, &request.op_id);
        match self.oplog.lookup(request) {
            LogLookup::InFlight => return false,
            LogLookup::Ran => {
                match self.oplog.result(&self.shared.store, op_id).await {
                    Ok(Some(result)) => drop(self.shared.up.send(AgentMessage::Result(result))),
                    Ok(None) => warn!(%instance, op_id, "operation ran before, and its result is unreadable"),
                    Err(error) => {
                        warn!(%instance, op_id, %error, "operation ran before, and its result is unreadable")
                    }
                }
                return false;
            }
            LogLookup::BelowFloor(floor) => {
                let message = format!(
                    "not begun: the gateway confirmed before that operation {} is final (floor {floor}); its store may be \
                     an older copy",
                    request.seq
                );
                warn!(%instance, op_id, seq = request.seq, floor, "operation refused: it is final already");
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
        // It stays refused: the gateway may send it again before it reads this result.
        let result = not_begun(request, message);
        let value = serde_json::to_vec(&result).unwrap_or_default();
        if let Err(error) = self.shared.store.txn(Txn::put(result_key(op_id), value)).await {
            warn!(%instance, op_id, %error, "a refused operation cannot be written");
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

/// Which host an agent answers for unless it is told.
pub fn this_host() -> HostKey {
    HostKey::Address { cloud: 0, ip: std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST) }
}

/// The agent's name: made once, kept in its folder.
pub fn agent_name(folder: &Path) -> Result<String, String> {
    let file = folder.join("agent-id");
    let shown = file.display();
    match std::fs::read_to_string(&file) {
        Ok(name) if !name.trim().is_empty() => Ok(name.trim().to_owned()),
        _ => {
            let random = std::fs::read_to_string("/proc/sys/kernel/random/uuid");
            let name = random.map_err(|error| format!("cannot make a name: {error}"))?.trim().to_owned();
            std::fs::write(&file, &name).map_err(|error| format!("cannot write {shown}: {error}"))?;
            Ok(name)
        }
    }
}

/// Milliseconds since 1970.
fn now_ms() -> i64 {
    crate::clock::now().0
}

/// A random name that no other user can guess: 128 bits from the kernel.
fn fresh_id() -> String {
    use ring::rand::SecureRandom;
    let mut bytes = [0; 16];
    if ring::rand::SystemRandom::new().fill(&mut bytes).is_err() {
        // A launch id that can be guessed would prove nothing.
        tracing::error!("the kernel has no random numbers: the agent cannot continue");
        std::process::abort();
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
