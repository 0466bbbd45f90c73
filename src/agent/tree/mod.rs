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

mod scan;
mod traces;

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::time::Instant;
use tracing::info;

use self::scan::{ProcessTable, ScannedProcess};
use self::traces::named;
pub use self::traces::{LaunchRecord, LaunchSession, LaunchTraces};
use super::cgroup::Cgroup;
use super::launch_mark::LaunchMark;
use super::process::{LaunchedProcess, ProcessHandle, ProcessIdentity, boot_id, uids};
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
/// Maximum processes that a message names.
const MAX_NAMED: usize = 10;

/// Processes that had to be killed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KilledProcesses {
    killed: Vec<(u32, String)>,
    /// Processes that are still alive after [`KILL_TIMEOUT`].
    survivors: Vec<(u32, String)>,
}

impl KilledProcesses {
    pub fn is_empty(&self) -> bool {
        self.killed.is_empty()
    }

    pub fn add(&mut self, pid: u32, name: String) {
        self.killed.insert(0, (pid, name));
    }

    /// The processes that are still alive after SIGKILL, for a message; `None`: none.
    pub fn survivors(&self) -> Option<String> {
        (!self.survivors.is_empty()).then(|| list(&self.survivors))
    }

    pub fn extend(&mut self, other: KilledProcesses) {
        self.killed.extend(other.killed);
        self.survivors = other.survivors;
    }
}

/// `killed 2 processes of its tree: 17 (nginx), 18 (nginx)`.
impl std::fmt::Display for KilledProcesses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let count = self.killed.len();
        let noun = if count == 1 { "process" } else { "processes" };
        write!(f, "killed {count} {noun} of its tree: {}", list(&self.killed))?;
        match self.survivors() {
            Some(survivors) => write!(f, "; still alive after SIGKILL: {survivors}"),
            None => Ok(()),
        }
    }
}

fn list(processes: &[(u32, String)]) -> String {
    let shown = processes.iter().take(MAX_NAMED).map(|(pid, name)| format!("{pid} ({name})"));
    let mut text = shown.collect::<Vec<_>>().join(", ");
    if processes.len() > MAX_NAMED {
        text.push_str(&format!(" and {} more", processes.len() - MAX_NAMED));
    }
    text
}

/// The process tree of a run, or of a launch without a known main process.
#[derive(Clone, Debug)]
pub struct ProcessTree {
    main: Option<ProcessIdentity>,
    launch: LaunchRecord,
    group: Option<Cgroup>,
}

/// The orphans of the agent that belong to a tree.
struct OrphanScan {
    own: Vec<ProcessIdentity>,
    /// No orphan ended during the scan.
    is_conclusive: bool,
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

    /// The tree of a command that is not part of a launch, such as a hook or a health probe.
    pub fn of_command(id: &str, group: Option<Cgroup>, uid: u32) -> ProcessTree {
        let launch = LaunchRecord {
            boot: boot_id().to_owned(),
            launch_id: id.to_owned(),
            group: group.as_ref().map(Cgroup::path),
            uid: Some(uid),
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

    /// The members, except the main process and ended ones.
    pub async fn members(&self) -> Vec<ProcessIdentity> {
        if self.launch.boot != boot_id() {
            return Vec::new();
        }
        let table = ProcessTable::current().await;
        let grouped: HashSet<u32> = self.group.iter().flat_map(Cgroup::processes).collect();
        let sessions = self.live_sessions(&table);
        let is_root = |pid: u32, process: &ScannedProcess| {
            grouped.contains(&pid)
                || sessions.contains(&process.stat.session) && self.is_user(pid)
                || self.is_root(pid, process)
        };
        let pids = table.find_members(is_root, |pid| self.is_foreign(pid));
        let identity = |pid: u32| {
            let started = table.started(pid)?;
            Some(ProcessIdentity { boot: boot_id().to_owned(), pid, started })
        };
        pids.into_iter().filter_map(identity).filter(|one| Some(one) != self.main.as_ref()).collect()
    }

    /// Whether an orphan of this agent may belong to the tree. Cheap: reads only the orphans.
    pub fn may_have_orphans(&self) -> bool {
        let scan = self.scan_orphans(&mut HashSet::new());
        !scan.own.is_empty() || !scan.is_conclusive
    }

    /// Scans the orphans of this agent. `ended`: those that had ended at the last scan.
    fn scan_orphans(&self, ended: &mut HashSet<u32>) -> OrphanScan {
        let mut scan = OrphanScan { own: Vec::new(), is_conclusive: true };
        for pid in reaper::orphans() {
            let process = ScannedProcess::of(pid).filter(|process| process.stat.is_alive());
            let in_session =
                |one: &LaunchSession, stat: &ProcStat| one.id == stat.session && stat.started <= one.until;
            let is_own = |process: &ScannedProcess| {
                let mut sessions = self.launch.traces.sessions.iter();
                let in_session = sessions.any(|one| in_session(one, &process.stat));
                (in_session && self.is_user(pid) || self.is_root(pid, process)) && !self.is_foreign(pid)
            };
            let identity = process.filter(is_own).map(|process| process.stat.started);
            let identity =
                identity.map(|started| ProcessIdentity { boot: boot_id().to_owned(), pid, started });
            scan.own.extend(identity);
            // One that ended during the scan may have left a child, which is not in the list.
            if !ProcStat::of(pid).is_some_and(|stat| stat.is_alive()) {
                scan.is_conclusive &= !ended.insert(pid);
            }
        }
        scan
    }

    /// The orphans that belong to the tree by themselves, searched until a scan is conclusive or the time is over.
    async fn own_orphans(&self, until: Instant) -> Vec<ProcessIdentity> {
        let mut ended = HashSet::new();
        loop {
            let scan = self.scan_orphans(&mut ended);
            if !scan.own.is_empty() || scan.is_conclusive || Instant::now() >= until {
                return scan.own;
            }
            tokio::task::yield_now().await;
        }
    }

    /// Kills the whole control group at once, unless another instance holds a process in it.
    fn kill_group(&self) -> bool {
        let Some(group) = &self.group else { return false };
        let is_held = |pid: u32| ProcessIdentity::of(pid).is_some_and(|one| one.is_claimed());
        let main = self.main.as_ref().map(|main| main.pid);
        let shared = group.processes().into_iter().any(|pid| Some(pid) != main && is_held(pid));
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
        !launch_id.is_empty() && process.launch_id.as_ref() == Some(launch_id) && self.is_user(pid)
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
    fn is_foreign(&self, pid: u32) -> bool {
        if self.main.as_ref().is_some_and(|main| main.pid == pid) {
            return false;
        }
        let claimed = ProcessIdentity::of(pid).is_some_and(|one| one.is_claimed());
        let id = LaunchedProcess::of(pid).map(|launched| launched.launch_id);
        claimed || id.is_some_and(|id| id != self.launch.launch_id)
    }

    /// Ends the members: SIGTERM and, after the grace, SIGKILL. A grace of zero: SIGKILL at once. Returns the processes
    /// that had to be killed.
    pub async fn end(&self, grace: Duration) -> KilledProcesses {
        if !grace.is_zero() {
            let members = self.members().await;
            members.iter().for_each(|one| signal(one, Signal::TERM));
            wait_for_end(&members, Instant::now() + grace).await;
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
            let own = self.own_orphans(until).await;
            if own.is_empty() {
                return;
            }
            own.iter().for_each(|one| signal(one, Signal::KILL));
            wait_for_end(&own, until).await;
        }
    }

    /// Kills the members, and with a control group the main process too. New members are searched until none is left or the
    /// time is over: a process may fork faster than one scan.
    pub async fn kill(&self) -> KilledProcesses {
        let until = Instant::now() + KILL_TIMEOUT;
        let mut seen = self.all_members(until).await;
        let mut killed = named(&seen);
        let by_group = self.kill_group();
        while !seen.is_empty() {
            if !by_group || !self.has_only_group_members(&seen) {
                self.stop_all(&mut seen, &mut killed, until).await;
                seen.iter().for_each(|one| signal(one, Signal::KILL));
            }
            wait_for_end(&seen, until).await;
            seen = self.all_members(until).await;
            if Instant::now() >= until {
                break;
            }
        }
        KilledProcesses { killed, survivors: named(&seen) }
    }

    /// The members, including orphans that a scan of all processes misses because they fork and exit meanwhile.
    async fn all_members(&self, until: Instant) -> Vec<ProcessIdentity> {
        let members = self.members().await;
        match members.is_empty() && self.launch.boot == boot_id() {
            true => self.own_orphans(until).await,
            false => members,
        }
    }

    fn has_only_group_members(&self, processes: &[ProcessIdentity]) -> bool {
        let grouped: Vec<u32> = self.group.iter().flat_map(Cgroup::processes).collect();
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
        while !new.is_empty() {
            new.iter().for_each(|one| signal(one, Signal::STOP));
            let unnamed = new.iter().filter(|one| !killed.iter().any(|(pid, _)| *pid == one.pid));
            let unnamed: Vec<ProcessIdentity> =
                unnamed.take(MAX_KILLED.saturating_sub(killed.len())).cloned().collect();
            killed.extend(named(&unnamed));
            stopped.extend(new);
            stopped.retain(ProcessIdentity::is_current);
            for _ in 0..ORPHAN_SCANS {
                let orphans = self.own_orphans(until).await;
                let new: Vec<_> = orphans.iter().filter(|one| !stopped.contains(one)).collect();
                if new.is_empty() || Instant::now() >= until {
                    break;
                }
                new.into_iter().for_each(|one| signal(one, Signal::KILL));
                tokio::task::yield_now().await;
            }
            new = self.members().await.into_iter().filter(|one| !stopped.contains(one)).collect();
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
    let table = ProcessTable::current().await;
    let mut ids: HashSet<&str> = HashSet::new();
    let marks: HashMap<LaunchMark, &str> = trees.iter().map(|tree| (tree.mark(), tree.id())).collect();
    for process in table.processes() {
        let marked = process.mark.and_then(|mark| marks.get(&mark).copied());
        ids.extend(marked.or(process.launch_id.as_deref()));
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

/// Sends a signal to a process, never to another one that reuses its pid.
fn signal(identity: &ProcessIdentity, signal: Signal) {
    let Some(pid) = i32::try_from(identity.pid).ok().and_then(Pid::from_raw) else { return };
    let Ok(fd) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    // Checked after the open: the pidfd pins the process whose start time is read.
    if identity.is_current() {
        let _ = pidfd_send_signal(&fd, signal);
    }
}
