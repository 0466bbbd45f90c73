//! Process tree of a launch: which processes belong to it, and how they are ended.
//!
//! With or without a control group, a process belongs to the tree if it is
//!
//! - in the control group of the launch, which the kernel passes on to every descendant,
//! - a descendant of the main process or of another member,
//! - in a session that the launch created,
//! - a process of the account with the launch id in its environment,
//! - a process of the account with the mark of the launch ([`LaunchMark`]), or
//! - a process that was observed to descend from the main process ([`LaunchTraces`]).
//!
//! A process may leave each of these, so all of them count. Each is a proof: a process without any is never a member,
//! although it may be an orphan of the agent, run the same program or have the same user.
//!
//! A process of another launch, and one that an instance holds, is never a member.
//!
//! The kernel can block reads of an environment. A process of the account that cannot be read is not ended. The tree is
//! not gone while it lives ([`UnknownMembers`]). This does not apply to a launch with a control group: the group lists its
//! processes without reading them.

mod killed;
#[cfg(test)]
mod property;
mod traces;

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::time::Instant;
use tracing::info;

pub use self::killed::KilledProcesses;
use self::traces::named;
pub use self::traces::{LaunchRecord, LaunchTraces};
use super::cgroup::Cgroup;
use super::launch_mark::LaunchMark;
use super::proc_scan::{self, ScanError};
use super::process::{ProcessHandle, ProcessIdentity, boot_id, uids};
use super::process_table::{ProcessTable, ScannedProcess};
use super::reaper;
use super::state::ProcessRun;
use crate::proc::ProcStat;

/// Maximum wait for processes to end after SIGKILL.
pub const KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// First and longest interval between two checks whether the tree has ended.
const POLL_INTERVALS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));
/// Maximum scans of the orphans between two scans of all processes.
const ORPHAN_SCANS: usize = 200;
/// Maximum killed processes that are recorded.
const MAX_KILLED: usize = 1000;
/// Processes that are signalled or checked before other tasks of the agent run.
const CHUNK: usize = 256;

/// The process tree of a run, or of a launch without a known main process.
#[derive(Clone, Debug)]
pub struct ProcessTree {
    main: Option<ProcessIdentity>,
    launch: LaunchRecord,
    group: Option<Cgroup>,
}

/// The orphans of the agent that belong to a tree.
#[derive(Default)]
struct OrphanScan {
    own: Vec<ProcessIdentity>,
    /// Orphans that had ended at this scan.
    ended: HashSet<u32>,
    unknown: Option<UnknownMembers>,
}

/// The members of a tree, except the main process and ended ones.
#[derive(Default)]
pub struct TreeMembers {
    pub known: Vec<ProcessIdentity>,
    /// Reason why there may be more members.
    pub unknown: Option<UnknownMembers>,
}

/// Reason why not all members of a tree are known: the tree may have more processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnknownMembers {
    #[error(transparent)]
    Scan(#[from] ScanError),
    #[error("the kernel blocks reads of process {0}, which may belong to the tree")]
    Unreadable(u32),
}

impl ProcessTree {
    /// The tree of a run. `held`: the handle on the main process, which runs or has ended just now.
    pub fn of(run: &ProcessRun, held: Option<&ProcessHandle>, uid: Option<u32>) -> ProcessTree {
        let mut traces = run.traces.clone();
        if let Some(held) = held.filter(|held| held.identity == run.identity) {
            traces.observe(held);
            if !run.incarnation.is_empty() {
                traces.add_session(held, &run.incarnation, run.group().as_ref());
            }
        }
        let launch = LaunchRecord {
            boot: run.identity.boot.clone(),
            launch_id: run.incarnation.clone(),
            group: run.group.clone(),
            uid,
            traces,
        };
        ProcessTree { main: Some(run.identity.clone()), group: run.group(), launch }
    }

    /// The tree of a launch whose main process is unknown or has ended.
    pub fn of_launch(launch: LaunchRecord) -> ProcessTree {
        ProcessTree { main: None, group: launch.group.as_deref().map(Cgroup::at), launch }
    }

    /// The tree of a command that is not part of a launch, such as a hook or a health probe. Without a uid, its control
    /// group is the only proof.
    pub fn of_command(id: &str, group: Option<Cgroup>, uid: impl Into<Option<u32>>) -> ProcessTree {
        let launch = LaunchRecord {
            boot: boot_id().to_owned(),
            launch_id: id.to_owned(),
            group: group.as_ref().map(Cgroup::path),
            uid: uid.into(),
            traces: LaunchTraces::default(),
        };
        ProcessTree { main: None, group, launch }
    }

    pub fn launch(&self) -> &LaunchRecord {
        &self.launch
    }

    fn id(&self) -> &str {
        &self.launch.launch_id
    }

    fn mark(&self) -> LaunchMark {
        LaunchMark::of(self.id())
    }

    /// The members. Scans all processes of this host.
    pub async fn members(&self) -> Result<TreeMembers, ScanError> {
        if self.launch.boot != boot_id() {
            return Ok(TreeMembers::default());
        }
        let (table, tree) = (ProcessTable::current().await?, self.clone());
        proc_scan::run(move || tree.find_members(&table)).await
    }

    fn find_members(&self, table: &ProcessTable) -> TreeMembers {
        let grouped: HashSet<u32> = self.group.iter().flat_map(Cgroup::processes).collect();
        let sessions = self.live_sessions(table);
        let is_root = |pid: u32, process: &ScannedProcess| {
            grouped.contains(&pid)
                || sessions.contains(&process.stat.session) && self.is_user(pid)
                || self.is_root(pid, process)
        };
        let pids = table.find_members(is_root, |pid, process| self.is_foreign(pid, process));
        let identity = |pid: u32| {
            let started = table.started(pid)?;
            Some(ProcessIdentity { boot: boot_id().to_owned(), pid, started })
        };
        let mut unreadable = table.iter().filter(|(pid, process)| self.is_unknown(*pid, process));
        let unknown = unreadable.find(|(pid, _)| !pids.contains(pid));
        let unknown = unknown.map(|(pid, _)| UnknownMembers::Unreadable(pid));
        let known = pids.into_iter().filter_map(identity);
        TreeMembers { known: known.filter(|one| Some(one) != self.main.as_ref()).collect(), unknown }
    }

    /// Whether an orphan of this agent may belong to the tree. Cheap: reads only the orphans.
    pub async fn may_have_orphans(&self) -> bool {
        let may_have =
            |scan: OrphanScan| !scan.own.is_empty() || !scan.ended.is_empty() || scan.unknown.is_some();
        let tree = self.clone();
        !reaper::orphans().is_empty()
            && proc_scan::run(move || may_have(tree.find_orphans())).await.unwrap_or(true)
    }

    /// Scans the orphans of this agent. Can block.
    fn find_orphans(&self) -> OrphanScan {
        let mut scan = OrphanScan::default();
        let in_session = |stat: &ProcStat| {
            let mut sessions = self.launch.traces.sessions.iter();
            sessions.any(|one| one.id == stat.session && stat.started <= one.until)
        };
        for pid in reaper::orphans() {
            if let Some(process) = ScannedProcess::of(pid).filter(|process| process.stat.is_alive()) {
                let is_member = in_session(&process.stat) && self.is_user(pid) || self.is_root(pid, &process);
                if is_member && !self.is_foreign(pid, &process) {
                    let started = process.stat.started;
                    scan.own.push(ProcessIdentity { boot: boot_id().to_owned(), pid, started });
                } else if self.is_unknown(pid, &process) {
                    scan.unknown = Some(UnknownMembers::Unreadable(pid));
                }
            }
            // One that ended during the scan may have left a child, which is not in the list.
            if !ProcStat::of(pid).is_some_and(|stat| stat.is_alive()) {
                scan.ended.insert(pid);
            }
        }
        scan
    }

    /// The orphans that belong to the tree by themselves, on a worker thread if there are any orphans.
    async fn own_orphans(&self, until: Instant) -> TreeMembers {
        if reaper::orphans().is_empty() {
            return TreeMembers::default();
        }
        let tree = self.clone();
        let found = proc_scan::run(move || tree.search_orphans(until)).await;
        found.unwrap_or_else(|error| TreeMembers { known: Vec::new(), unknown: Some(error.into()) })
    }

    /// Searches orphans until a scan is conclusive or the time is over: no orphan has ended since the last one. Can block.
    fn search_orphans(&self, until: Instant) -> TreeMembers {
        let mut ended = HashSet::new();
        loop {
            let OrphanScan { own, ended: new, unknown } = self.find_orphans();
            let before = ended.len();
            ended.extend(new);
            if !own.is_empty() || unknown.is_some() || ended.len() == before || Instant::now() >= until {
                return TreeMembers { known: own, unknown };
            }
            std::thread::yield_now();
        }
    }

    /// Kills the orphans that are not in `known`, as soon as they are found. Can block.
    fn kill_orphans(&self, known: &HashSet<(u32, u64)>, until: Instant) {
        for _ in 0..ORPHAN_SCANS {
            let mut orphans = self.search_orphans(until).known;
            orphans.retain(|one| !known.contains(&(one.pid, one.started)));
            if orphans.is_empty() || Instant::now() >= until {
                return;
            }
            orphans.iter().for_each(|one| signal(one, Signal::KILL));
        }
    }

    /// Kills the whole control group at once, unless another instance holds a process in it.
    fn kill_group(&self) -> bool {
        let Some(group) = &self.group else { return false };
        let main = self.main.as_ref().map(|main| main.pid);
        let shared =
            group.processes().into_iter().any(|pid| Some(pid) != main && reaper::is_pid_claimed(pid));
        !shared && group.kill()
    }

    /// The sessions of the launch that still exist. A number is proof only if its session has existed since the agent last
    /// knew a member: while it does, the kernel does not reuse the number.
    fn live_sessions(&self, table: &ProcessTable) -> HashSet<u32> {
        let of_launch = self.launch.traces.sessions.iter();
        of_launch.filter(|one| table.has_member_since(one.id, one.until)).map(|one| one.id).collect()
    }

    /// Whether a process belongs to the tree by itself; its descendants do, too.
    fn is_root(&self, pid: u32, process: &ScannedProcess) -> bool {
        let same = |one: &ProcessIdentity| one.pid == pid && one.started == process.stat.started;
        if self.main.as_ref().is_some_and(same) || self.launch.traces.observed.iter().any(same) {
            return true;
        }
        self.bears_mark(pid, process) || self.carries_id(pid, process)
    }

    /// Whether the user of a process matches the account. A process of a root account may have dropped privileges.
    fn is_user(&self, pid: u32) -> bool {
        let Some(uid) = self.launch.uid else { return false };
        uid == 0 || uids(pid).is_some_and(|ids| ids[0] == uid)
    }

    /// Whether the environment of a process has the launch id, and its user matches. Only root and the account's own
    /// processes know the id.
    fn carries_id(&self, pid: u32, process: &ScannedProcess) -> bool {
        let launch_id = &self.launch.launch_id;
        !launch_id.is_empty() && process.launch_id() == Some(launch_id) && self.is_user(pid)
    }

    /// Whether a process may carry the launch id: it has the user of the account, and its environment cannot be read.
    fn is_unknown(&self, pid: u32, process: &ScannedProcess) -> bool {
        process.is_unreadable()
            && self.group.is_none()
            && !self.launch.launch_id.is_empty()
            && process.stat.is_alive()
            && !reaper::is_claimed(pid, process.stat.started)
            && self.launch.uid.is_some()
            && self.launch.uid == uids(pid).map(|ids| ids[0])
    }

    /// Whether a process has inherited the mark of the launch, and its user matches. Every user can set the mark for own
    /// processes: one of another user than the account, as after a drop of privileges, must also be an orphan of this
    /// agent's launches.
    fn bears_mark(&self, pid: u32, process: &ScannedProcess) -> bool {
        let LaunchRecord { launch_id, uid, .. } = &self.launch;
        let is_account = || *uid == uids(pid).map(|ids| ids[0]);
        !launch_id.is_empty()
            && uid.is_some()
            && process.mark == Some(self.mark())
            && (is_account() || self.is_user(pid) && process.stat.parent == std::process::id())
    }

    /// Whether another instance holds the process, or another launch started it.
    fn is_foreign(&self, pid: u32, process: &ScannedProcess) -> bool {
        if self.main.as_ref().is_some_and(|main| main.pid == pid) {
            return false;
        }
        reaper::is_claimed(pid, process.stat.started)
            || process.launch_id().is_some_and(|id| id != self.launch.launch_id)
    }

    /// Ends the members: SIGTERM and, after the grace, SIGKILL. A grace of zero: SIGKILL at once. Returns the processes
    /// that had to be killed.
    pub async fn end(&self, grace: Duration) -> KilledProcesses {
        if !grace.is_zero() {
            let until = Instant::now() + grace;
            // Unknown members get no SIGTERM. The search before SIGKILL is repeated.
            let members = self.members().await.unwrap_or_default().known;
            signal_all(&members, Signal::TERM).await;
            wait_for_end(&members, until).await;
        }
        let killed = self.kill().await;
        if let Some(group) = &self.group {
            group.remove_if_empty();
        }
        killed
    }

    /// Kills what an ended command of this agent left behind. Cheap: its processes are orphans of this agent, or become
    /// orphans when their parents are killed. No scan of all processes is needed.
    pub async fn end_leftovers(&self) {
        let until = Instant::now() + KILL_TIMEOUT;
        if let Some(group) = &self.group {
            let mut interval = POLL_INTERVALS.0;
            while !group.remove_if_empty() && Instant::now() < until {
                group.kill();
                tokio::time::sleep(interval).await;
                interval = (interval * 2).min(POLL_INTERVALS.1);
            }
        }
        while !reaper::orphans().is_empty() && Instant::now() < until {
            let TreeMembers { known: own, unknown } = self.own_orphans(until).await;
            match (own.is_empty(), unknown) {
                (true, None) => return,
                (true, Some(_)) => tokio::time::sleep(POLL_INTERVALS.1).await,
                (false, _) => {
                    signal_all(&own, Signal::KILL).await;
                    wait_for_end(&own, until).await;
                }
            }
        }
    }

    /// Kills the members, and with a control group the main process too. New members are searched until none is left or the
    /// time is over: a process may fork faster than one scan.
    pub async fn kill(&self) -> KilledProcesses {
        let until = Instant::now() + KILL_TIMEOUT;
        let mut found = self.all_members(until).await;
        let mut killed = named(&found.known, MAX_KILLED);
        let by_group = self.kill_group();
        while !found.known.is_empty() || found.unknown.is_some() {
            match found.known.is_empty() {
                true => tokio::time::sleep(POLL_INTERVALS.1).await,
                false if by_group && self.has_only_group_members(&found.known) => {}
                false => {
                    self.stop_all(&mut found.known, &mut killed, until).await;
                    signal_all(&found.known, Signal::KILL).await;
                }
            }
            wait_for_end(&found.known, until).await;
            found = self.all_members(until).await;
            if Instant::now() >= until {
                break;
            }
        }
        KilledProcesses::new(killed, named(&found.known, MAX_KILLED), found.unknown)
    }

    /// The members, including orphans that a scan of all processes misses because they fork and exit meanwhile.
    async fn all_members(&self, until: Instant) -> TreeMembers {
        let unknown = |error: ScanError| TreeMembers { known: Vec::new(), unknown: Some(error.into()) };
        let members = self.members().await.unwrap_or_else(unknown);
        if !members.known.is_empty() || self.launch.boot != boot_id() {
            return members;
        }
        let orphans = self.own_orphans(until).await;
        TreeMembers { known: orphans.known, unknown: members.unknown.or(orphans.unknown) }
    }

    fn has_only_group_members(&self, processes: &[ProcessIdentity]) -> bool {
        let grouped: HashSet<u32> = self.group.iter().flat_map(Cgroup::processes).collect();
        processes.iter().all(|one| grouped.contains(&one.pid) || !one.is_current())
    }

    /// Stops all members (SIGSTOP), so that none of them forks a process that descends from no member afterwards. Orphans
    /// are killed as soon as they are found: one that forks and exits at once is gone when a scan of all processes ends.
    async fn stop_all(
        &self,
        stopped: &mut Vec<ProcessIdentity>,
        killed: &mut Vec<(u32, String)>,
        until: Instant,
    ) {
        let mut new = std::mem::take(stopped);
        let mut names: HashSet<u32> = killed.iter().map(|(pid, _)| *pid).collect();
        let mut known: HashSet<(u32, u64)> = HashSet::new();
        while !new.is_empty() {
            signal_all(&new, Signal::STOP).await;
            let most = MAX_KILLED.saturating_sub(killed.len());
            killed.extend(named(new.iter().filter(|one| names.insert(one.pid)), most));
            known.extend(new.iter().map(|one| (one.pid, one.started)));
            stopped.extend(new);
            if !reaper::orphans().is_empty() {
                let (tree, known) = (self.clone(), known.clone());
                // An error: the orphans are searched again before the tree counts as ended.
                let _ = proc_scan::run(move || tree.kill_orphans(&known, until)).await;
            }
            new = self.members().await.unwrap_or_default().known;
            new.retain(|one| !known.contains(&(one.pid, one.started)));
            if Instant::now() >= until {
                break;
            }
            tokio::task::yield_now().await;
        }
    }
}

/// Ends the commands that an earlier agent left behind. One scan finds the commands that have a process.
pub async fn end_commands(trees: Vec<ProcessTree>) {
    if trees.is_empty() {
        return;
    }
    let table = ProcessTable::wait_for_current().await;
    let mut ids: HashSet<&str> = HashSet::new();
    let marks: HashMap<LaunchMark, &str> = trees.iter().map(|tree| (tree.mark(), tree.id())).collect();
    for (_, process) in table.iter() {
        let marked = process.mark.and_then(|mark| marks.get(&mark).copied());
        ids.extend(marked.or(process.launch_id()));
    }
    for tree in &trees {
        let is_empty = tree.group.as_ref().is_none_or(Cgroup::remove_if_empty);
        if !is_empty || ids.contains(tree.id()) {
            let killed = tree.end(Duration::ZERO).await;
            info!(command = tree.id(), "ended a command of an earlier agent: {killed}");
        }
    }
}

/// Waits until these processes have ended.
async fn wait_for_end(processes: &[ProcessIdentity], until: Instant) {
    let mut interval = POLL_INTERVALS.0;
    while processes.iter().any(ProcessIdentity::is_current) && Instant::now() < until {
        tokio::time::sleep(interval).await;
        interval = (interval * 2).min(POLL_INTERVALS.1);
    }
}

/// Sends a signal to processes. Other tasks run in between.
async fn signal_all(processes: &[ProcessIdentity], to_send: Signal) {
    for chunk in processes.chunks(CHUNK) {
        chunk.iter().for_each(|one| signal(one, to_send));
        if processes.len() > CHUNK {
            tokio::task::yield_now().await;
        }
    }
}

/// Sends a signal to a process, never to another one that reuses its pid.
fn signal(identity: &ProcessIdentity, signal: Signal) {
    let Some(pid) = i32::try_from(identity.pid).ok().and_then(Pid::from_raw) else { return };
    let Ok(fd) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    // Checked after the open: the pidfd pins the process whose start time is read.
    if identity.is_current() {
        let _ = pidfd_send_signal(&fd, signal);
    }
}
