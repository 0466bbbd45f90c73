//! Process table: all processes of this host, with the evidence of the launch that each belongs to.
//!
//! A scan of thousands of processes takes tens of milliseconds. It runs on a worker thread, and all callers that wait for
//! its begin share its result ([`SharedScan`]): a thousand stops at once need a few scans.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use tracing::warn;

use super::launch_mark::LaunchMark;
use super::proc_scan::{ScanError, SharedScan};
use super::process::{LaunchVariables, LaunchedProcess, ProcessIdentity, boot_id};
use crate::proc::{ProcStat, UnreadableProcess};

/// All processes of this host.
pub struct ProcessTable {
    processes: BTreeMap<u32, ScannedProcess>,
    /// The children of each process.
    children: BTreeMap<u32, Vec<u32>>,
}

/// A process of the table.
pub struct ScannedProcess {
    pub stat: ProcStat,
    /// The variables of its launch in its environment.
    variables: Result<LaunchVariables, UnreadableProcess>,
    pub mark: Option<LaunchMark>,
}

impl ScannedProcess {
    /// Reads one process. Can block.
    pub fn of(pid: u32) -> Option<ScannedProcess> {
        let stat = ProcStat::of(pid)?;
        Some(ScannedProcess { stat, variables: LaunchVariables::of(pid), mark: LaunchMark::on(pid) })
    }

    #[cfg(test)]
    pub fn for_test(stat: ProcStat, launch_id: Option<&str>, mark: Option<LaunchMark>) -> ScannedProcess {
        let mut variables = LaunchVariables::default();
        variables.launch_id = launch_id.map(str::to_owned);
        ScannedProcess { stat, variables: Ok(variables), mark }
    }

    pub fn launch_id(&self) -> Option<&str> {
        self.variables.as_ref().ok()?.launch_id.as_deref()
    }

    /// The record id of a recorded command.
    pub fn record(&self) -> Option<&str> {
        self.variables.as_ref().ok()?.record.as_deref()
    }

    /// Whether its environment is unknown.
    pub fn is_unreadable(&self) -> bool {
        self.variables.is_err()
    }
}

static TABLE: SharedScan<ProcessTable> = SharedScan::new(ProcessTable::read);

impl ProcessTable {
    /// A table whose reading begins after this call.
    pub async fn current() -> Result<Arc<ProcessTable>, ScanError> {
        TABLE.current().await
    }

    /// Like [`current`](Self::current), repeated until a scan succeeds.
    pub async fn wait_for_current() -> Arc<ProcessTable> {
        loop {
            match ProcessTable::current().await {
                Ok(table) => return table,
                Err(error) => {
                    warn!(%error, "processes of this host are unknown: scanning again");
                    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
                }
            }
        }
    }

    fn read() -> ProcessTable {
        let process = |pid: u32| Some((pid, ScannedProcess::of(pid)?));
        ProcessTable::of(crate::proc::pids().into_iter().filter_map(process).collect())
    }

    pub fn of(processes: BTreeMap<u32, ScannedProcess>) -> ProcessTable {
        let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (pid, process) in &processes {
            children.entry(process.stat.parent).or_default().push(*pid);
        }
        ProcessTable { processes, children }
    }

    fn stat(&self, pid: u32) -> Option<&ProcStat> {
        self.processes.get(&pid).map(|process| &process.stat)
    }

    pub fn iter(&self) -> impl Iterator<Item = (u32, &ScannedProcess)> {
        self.processes.iter().map(|(pid, process)| (*pid, process))
    }

    /// The live processes whose environment names a launch.
    pub fn launched(&self) -> impl Iterator<Item = LaunchedProcess> {
        let alive = self.iter().filter(|(_, process)| process.stat.is_alive());
        alive.filter_map(|(pid, process)| {
            let variables = process.variables.as_ref().ok()?;
            let identity = ProcessIdentity { boot: boot_id().to_owned(), pid, started: process.stat.started };
            LaunchedProcess::new(identity, process.stat.parent, variables.clone())
        })
    }

    pub fn started(&self, pid: u32) -> Option<u64> {
        self.stat(pid).map(|stat| stat.started)
    }

    /// Whether the session has existed since a time: it has a member that is at least as old, and no younger leader.
    pub fn has_member_since(&self, session: u32, ticks: u64) -> bool {
        let is_reused = self.stat(session).is_some_and(|leader| leader.started > ticks);
        let is_member = |stat: &ProcStat| stat.session == session && stat.started <= ticks;
        !is_reused && self.processes.values().any(|process| is_member(&process.stat))
    }

    /// The roots of a tree and their descendants. The descent ends at foreign and ended processes. A child is never older
    /// than its parent; if it is, the pid of the parent was reused while the table was read.
    pub fn find_members(
        &self,
        is_root: impl Fn(u32, &ScannedProcess) -> bool,
        is_foreign: impl Fn(u32, &ScannedProcess) -> bool,
    ) -> HashSet<u32> {
        let own = std::process::id();
        let may_be_member = |pid: u32, stat: &ProcStat| pid > 1 && pid != own && stat.is_alive();
        let roots =
            self.iter().filter(|(pid, process)| may_be_member(*pid, &process.stat) && is_root(*pid, process));
        let mut open: Vec<u32> = roots.map(|(pid, _)| pid).collect();
        let mut members = HashSet::new();
        while let Some(pid) = open.pop() {
            let Some(process) = self.processes.get(&pid) else { continue };
            if members.contains(&pid) || is_foreign(pid, process) {
                continue;
            }
            members.insert(pid);
            let of_pid = self.children.get(&pid).into_iter().flatten();
            open.extend(of_pid.filter(|child| {
                let is_child =
                    |stat: &ProcStat| may_be_member(**child, stat) && stat.started >= process.stat.started;
                self.stat(**child).is_some_and(is_child)
            }));
        }
        members
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_table_has_the_processes_that_began_before_the_call() {
        let mut child =
            std::process::Command::new("sleep").arg("100").env("ABIDE_INCARNATION", "scanned").spawn();
        let child = child.as_mut().expect("it starts");
        let table = ProcessTable::current().await.expect("a scan");
        let found = table.processes.get(&child.id()).expect("it runs");
        assert_eq!(found.launch_id(), Some("scanned"));
        assert!(table.children[&std::process::id()].contains(&child.id()));
        assert!(table.launched().any(|one| one.identity.pid == child.id() && one.launch_id == "scanned"));
        assert!(found.record().is_none() && !found.is_unreadable());
        let _ = (child.kill(), child.wait());
    }
}
