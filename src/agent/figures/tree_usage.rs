//! Usage of a process tree: CPU time, memory, descriptors and threads of its members, from /proc.
//!
//! The members are those of the launch's control group. Without one they are the main process, its descendants and the
//! processes of its session; all trees of a pass then share one table of the host's processes.

use std::collections::{HashMap, HashSet};

use crate::agent::cgroup::Cgroup;
use crate::agent::proc_scan::{self, ScanError, SharedScan};
use crate::agent::process::{ProcessHandle, ticks_since_boot};
use crate::agent::reaper;
use crate::agent::state::ProcessRun;
use crate::proc::ProcStat;

/// A process tree that is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeasuredTree {
    pub pid: u32,
    /// Start time of the main process, in ticks since boot.
    pub started: u64,
    /// The session that the launch created; `None`: the agent did not launch the process.
    session: Option<u32>,
    group: Option<Cgroup>,
}

/// Usage of all members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeUsage {
    /// CPU time of the members and of their reaped children, in ticks.
    pub cpu_ticks: u64,
    pub bytes: u64,
    pub fds: u32,
    pub threads: u32,
    pub processes: u32,
}

impl MeasuredTree {
    pub fn of(handle: &ProcessHandle, run: &ProcessRun) -> MeasuredTree {
        let is_launched = !run.incarnation.is_empty();
        MeasuredTree {
            pid: handle.identity.pid,
            started: handle.identity.started,
            session: is_launched.then_some(handle.session),
            group: run.group(),
        }
    }

    /// The tree of a process without a launch.
    pub fn of_pid(pid: u32) -> Option<MeasuredTree> {
        let started = ProcStat::of(pid)?.started;
        Some(MeasuredTree { pid, started, session: None, group: None })
    }

    pub fn has_group(&self) -> bool {
        self.group.is_some()
    }

    pub fn group(&self) -> Option<&Cgroup> {
        self.group.as_ref()
    }

    /// Age of the main process in seconds.
    pub fn age_secs(&self) -> f64 {
        ticks_since_boot().saturating_sub(self.started) as f64 / ticks_per_second()
    }

    /// Measures the tree on a worker thread. `None`: the main process is gone.
    pub async fn current_usage(&self) -> Result<Option<TreeUsage>, ScanError> {
        static TABLE: SharedScan<HostProcesses> = SharedScan::new(HostProcesses::read);
        let table = match self.has_group() {
            true => None,
            false => Some(TABLE.current().await?),
        };
        let tree = self.clone();
        proc_scan::run(move || tree.usage(table.as_deref())).await
    }

    /// Measures the tree. `None`: the main process is gone. `table`: a recent one, for a tree without a group.
    pub fn usage(&self, table: Option<&HostProcesses>) -> Option<TreeUsage> {
        let main = ProcStat::of(self.pid).filter(|stat| stat.started == self.started && stat.is_alive())?;
        let mut usage = TreeUsage::default();
        usage.add(self.pid, &main);
        let mut members = self.group.as_ref().map(Cgroup::processes).unwrap_or_default();
        if members.is_empty() {
            members = match table {
                Some(table) => table.members(self),
                None => HostProcesses::read().members(self),
            };
        }
        for pid in members.into_iter().filter(|pid| *pid != self.pid) {
            if let Some(stat) = ProcStat::of(pid).filter(ProcStat::is_alive) {
                usage.add(pid, &stat);
            }
        }
        Some(usage)
    }
}

impl TreeUsage {
    fn add(&mut self, pid: u32, stat: &ProcStat) {
        let bytes = stat.resident_pages.saturating_mul(rustix::param::page_size() as u64);
        self.cpu_ticks = self.cpu_ticks.saturating_add(stat.cpu_ticks).saturating_add(stat.child_ticks);
        self.bytes = self.bytes.saturating_add(bytes);
        self.fds = self.fds.saturating_add(descriptors(pid));
        self.threads = self.threads.saturating_add(stat.threads);
        self.processes = self.processes.saturating_add(1);
    }

    pub fn cpu_secs(&self) -> f64 {
        self.cpu_ticks as f64 / ticks_per_second()
    }
}

/// Open descriptors of a process.
fn descriptors(pid: u32) -> u32 {
    let folder = format!("/proc/{pid}/fd");
    // Since Linux 6.2 the size of the directory is the number of descriptors.
    match std::fs::metadata(&folder).map_or(0, |meta| meta.len()) {
        0 => std::fs::read_dir(folder).map_or(0, |entries| entries.count() as u32),
        count => u32::try_from(count).unwrap_or(u32::MAX),
    }
}

pub fn ticks_per_second() -> f64 {
    rustix::param::clock_ticks_per_second().max(1) as f64
}

/// The processes of this host, by parent and by session.
#[derive(Default)]
pub struct HostProcesses {
    children: HashMap<u32, Vec<u32>>,
    sessions: HashMap<u32, Vec<u32>>,
}

impl HostProcesses {
    pub fn read() -> HostProcesses {
        let mut table = HostProcesses::default();
        for pid in crate::proc::pids() {
            if let Some(stat) = ProcStat::of(pid) {
                table.children.entry(stat.parent).or_default().push(pid);
                table.sessions.entry(stat.session).or_default().push(pid);
            }
        }
        table
    }

    /// The descendants and session members of a tree, except processes that another instance holds.
    fn members(&self, tree: &MeasuredTree) -> Vec<u32> {
        let of_session = tree.session.and_then(|id| self.sessions.get(&id)).into_iter().flatten();
        let mut open: Vec<u32> = of_session.copied().chain([tree.pid]).collect();
        let mut members = HashSet::new();
        while let Some(pid) = open.pop() {
            let is_foreign = pid != tree.pid && reaper::is_pid_claimed(pid);
            if !is_foreign && members.insert(pid) {
                open.extend(self.children.get(&pid).into_iter().flatten());
            }
        }
        members.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_the_sum_of_its_processes() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().expect("it starts");
        let tree = MeasuredTree::of_pid(std::process::id()).expect("this process");
        let usage = tree.usage(None).expect("it runs");
        let alone = |pid: u32| {
            let mut usage = TreeUsage::default();
            usage.add(pid, &ProcStat::of(pid).expect("it runs"));
            usage
        };
        let (own, of_child) = (alone(std::process::id()), alone(child.id()));
        assert!(
            usage.processes >= 2 && usage.threads >= own.threads.min(2) && of_child.threads == 1,
            "{usage:?}"
        );
        assert!(
            usage.bytes >= of_child.bytes && of_child.fds >= 3 && own.fds > 3,
            "{usage:?} {own:?} {of_child:?}"
        );
        let _ = (child.kill(), child.wait());
        let gone = MeasuredTree { started: tree.started + 1, ..tree };
        assert_eq!(gone.usage(None), None, "another process with this pid");
    }
}
