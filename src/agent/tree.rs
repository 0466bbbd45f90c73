//! Process tree of a launch: which processes belong to it, and how they are ended.
//!
//! With a control group, its members are the tree: the kernel keeps every descendant in the group, also one that
//! daemonizes, drops privileges or clears its environment. Without one, a process belongs to the tree if it is
//!
//! - a descendant of the main process or of another member,
//! - in the session of the main process, which the launch created, or
//! - a process of the account with the launch id in its environment.
//!
//! A process of another launch, and one that an instance holds, is never a member. Of a process that the agent did not
//! launch, only descendants that were observed while it ran are members.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::time::Instant;

use super::cgroup::Cgroup;
use super::process::{LaunchedProcess, ProcessHandle, ProcessIdentity, boot_id, name, uids};
use super::state::ProcessRun;
use crate::proc::ProcStat;

/// Maximum wait for processes to end after SIGKILL.
pub const KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// First and longest interval between two checks whether the tree has ended.
const POLL_INTERVALS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));
/// Maximum scans for new members while the known ones are stopped.
const MAX_SCANS: usize = 20;
/// Maximum processes that a message names.
const MAX_NAMED: usize = 10;

/// Processes that had to be killed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KilledProcesses {
    killed: Vec<(u32, String)>,
    /// Processes that are still alive after [`KILL_TIMEOUT`].
    survivors: Vec<u32>,
}

impl KilledProcesses {
    pub fn is_empty(&self) -> bool {
        self.killed.is_empty()
    }

    pub fn add(&mut self, pid: u32, name: String) {
        self.killed.insert(0, (pid, name));
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
        let named: Vec<String> =
            self.killed.iter().take(MAX_NAMED).map(|(pid, name)| format!("{pid} ({name})")).collect();
        write!(f, "killed {count} {noun} of its tree: {}", named.join(", "))?;
        if count > MAX_NAMED {
            write!(f, " and {} more", count - MAX_NAMED)?;
        }
        if !self.survivors.is_empty() {
            let pids: Vec<String> = self.survivors.iter().map(u32::to_string).collect();
            write!(f, "; still alive after SIGKILL: {}", pids.join(", "))?;
        }
        Ok(())
    }
}

/// The process tree of a run.
#[derive(Clone, Debug)]
pub struct ProcessTree {
    main: ProcessIdentity,
    /// Empty: the agent did not launch the process.
    launch_id: String,
    group: Option<Cgroup>,
    session: Option<LaunchSession>,
    /// The account of the launch; `None`: unknown, and no environment counts.
    uid: Option<u32>,
    /// Members that were observed while the main process ran.
    known: Vec<ProcessIdentity>,
}

/// The session of a main process that the agent holds or held until now. Its number is not reused while the session has a
/// member, so a process of the kernel session that is older than the end of the main process belongs to the launch.
#[derive(Clone, Copy, Debug)]
struct LaunchSession {
    id: u32,
    /// Ticks since boot when the main process was last known to be unreaped.
    until: u64,
}

impl ProcessTree {
    /// `held`: the handle on the main process, which runs or has ended just now.
    pub fn of(run: &ProcessRun, held: Option<&ProcessHandle>, uid: Option<u32>) -> ProcessTree {
        let launched = !run.incarnation.is_empty();
        let session = held
            .filter(|held| launched && held.identity == run.identity)
            .map(|held| LaunchSession { id: held.session, until: super::process::ticks_since_boot() });
        let (main, launch_id) = (run.identity.clone(), run.incarnation.clone());
        let mut tree = ProcessTree { main, launch_id, group: run.group(), session, uid, known: Vec::new() };
        if tree.group.is_none() && held.is_some() {
            tree.known = tree.members();
        }
        tree
    }

    /// The members, except the main process and ended ones.
    pub fn members(&self) -> Vec<ProcessIdentity> {
        if self.main.boot != boot_id() {
            return Vec::new();
        }
        match &self.group {
            Some(group) => {
                let others = group.processes().into_iter().filter(|pid| *pid != self.main.pid);
                let is_member = |one: &ProcessIdentity| one.is_current() && !one.is_claimed();
                others.filter_map(ProcessIdentity::of).filter(is_member).collect()
            }
            None => self.scan(),
        }
    }

    /// Kills the whole control group at once, unless another instance holds a process in it.
    fn kill_group(&self) -> bool {
        let Some(group) = &self.group else { return false };
        let is_held = |pid: u32| ProcessIdentity::of(pid).is_some_and(|one| one.is_claimed());
        let shared = group.processes().into_iter().any(|pid| pid != self.main.pid && is_held(pid));
        !shared && group.kill()
    }

    /// The members by descent, session and environment.
    fn scan(&self) -> Vec<ProcessIdentity> {
        let table = process_table();
        let pids = find_members(&table, |pid, stat| self.is_root(pid, stat), |pid| self.is_foreign(pid));
        let identity = |pid: u32| {
            let started = table.get(&pid)?.started;
            Some(ProcessIdentity { boot: boot_id().to_owned(), pid, started })
        };
        pids.into_iter().filter_map(identity).filter(|one| *one != self.main).collect()
    }

    /// Whether a process belongs to the tree by itself; its descendants do, too.
    fn is_root(&self, pid: u32, stat: &ProcStat) -> bool {
        let same = |one: &ProcessIdentity| one.pid == pid && one.started == stat.started;
        if same(&self.main) || self.known.iter().any(same) {
            return true;
        }
        let in_session = self.session.is_some_and(|one| one.id == stat.session && stat.started <= one.until);
        in_session || self.carries_id(pid)
    }

    /// Whether the environment of a process has the launch id, and its user matches. Only root and the account's own
    /// processes know the id; a process of a root account may have dropped privileges.
    fn carries_id(&self, pid: u32) -> bool {
        let Some(uid) = self.uid.filter(|_| !self.launch_id.is_empty()) else { return false };
        let has_id = LaunchedProcess::of(pid).is_some_and(|launched| launched.launch_id == self.launch_id);
        has_id && uids(pid).is_some_and(|ids| uid == 0 || ids[0] == uid)
    }

    /// Whether another instance holds the process, or another launch started it.
    fn is_foreign(&self, pid: u32) -> bool {
        if pid == self.main.pid {
            return false;
        }
        let claimed = ProcessIdentity::of(pid).is_some_and(|one| one.is_claimed());
        let id = LaunchedProcess::of(pid).map(|launched| launched.launch_id);
        claimed || id.is_some_and(|id| id != self.launch_id)
    }

    /// Ends the members: SIGTERM and, after the grace, SIGKILL. A grace of zero: SIGKILL at once. Returns the processes
    /// that had to be killed.
    pub async fn end(&self, grace: Duration) -> KilledProcesses {
        if !grace.is_zero() {
            self.members().iter().for_each(|one| signal(one, Signal::TERM));
            self.wait_for_end(grace).await;
        }
        let killed = self.kill().await;
        if let Some(group) = &self.group {
            group.remove_if_empty();
        }
        killed
    }

    /// Kills the members, and with a control group the main process too.
    pub async fn kill(&self) -> KilledProcesses {
        let mut members = self.members();
        let mut killed = named(&members);
        if !self.kill_group() {
            members = self.stop_all();
            killed = named(&members);
            members.iter().for_each(|one| signal(one, Signal::KILL));
        }
        if members.is_empty() {
            return KilledProcesses::default();
        }
        self.wait_for_end(KILL_TIMEOUT).await;
        let survivors = self.members().into_iter().map(|one| one.pid).collect();
        KilledProcesses { killed, survivors }
    }

    /// Stops all members (SIGSTOP), so that none of them forks a process that descends from no member afterwards.
    fn stop_all(&self) -> Vec<ProcessIdentity> {
        let mut stopped: Vec<ProcessIdentity> = Vec::new();
        for _ in 0..MAX_SCANS {
            let new: Vec<ProcessIdentity> =
                self.members().into_iter().filter(|one| !stopped.contains(one)).collect();
            if new.is_empty() {
                break;
            }
            new.iter().for_each(|one| signal(one, Signal::STOP));
            stopped.extend(new);
        }
        stopped
    }

    async fn wait_for_end(&self, time: Duration) {
        let (until, mut interval) = (Instant::now() + time, POLL_INTERVALS.0);
        while !self.members().is_empty() && Instant::now() < until {
            tokio::time::sleep(interval).await;
            interval = (interval * 2).min(POLL_INTERVALS.1);
        }
    }
}

fn named(processes: &[ProcessIdentity]) -> Vec<(u32, String)> {
    processes.iter().map(|one| (one.pid, name(one.pid))).collect()
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

/// All processes of this host.
fn process_table() -> BTreeMap<u32, ProcStat> {
    let Ok(folder) = std::fs::read_dir("/proc") else { return BTreeMap::new() };
    let pids = folder.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.filter_map(|pid| Some((pid, ProcStat::of(pid)?))).collect()
}

/// The roots of a tree and their descendants. The descent ends at foreign and ended processes. A child is never older than
/// its parent; if it is, the pid of the parent was reused while the table was read.
fn find_members(
    table: &BTreeMap<u32, ProcStat>,
    is_root: impl Fn(u32, &ProcStat) -> bool,
    is_foreign: impl Fn(u32) -> bool,
) -> HashSet<u32> {
    let own = std::process::id();
    let may_be_member = |pid: u32, stat: &ProcStat| pid > 1 && pid != own && stat.is_alive();
    let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (pid, stat) in table {
        children.entry(stat.parent).or_default().push(*pid);
    }
    let roots = table.iter().filter(|(pid, stat)| may_be_member(**pid, stat) && is_root(**pid, stat));
    let mut open: Vec<u32> = roots.map(|(pid, _)| *pid).collect();
    let mut members = HashSet::new();
    while let Some(pid) = open.pop() {
        if members.contains(&pid) || is_foreign(pid) {
            continue;
        }
        members.insert(pid);
        let started = table.get(&pid).map_or(u64::MAX, |stat| stat.started);
        let of_pid = children.get(&pid).into_iter().flatten();
        open.extend(of_pid.filter(|child| {
            table.get(child).is_some_and(|stat| may_be_member(**child, stat) && stat.started >= started)
        }));
    }
    members
}
