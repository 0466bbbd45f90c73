//! Scan of all processes of this host for the members of a tree.
//!
//! A scan of thousands of processes takes tens of milliseconds. It runs on a worker thread, and all callers that wait for
//! its begin share its result: a thousand stops at once need a few scans.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::oneshot;

use crate::agent::launch_mark::LaunchMark;
use crate::agent::process::launch_id;
use crate::agent::worker_threads;
use crate::proc::ProcStat;

/// All processes of this host.
#[derive(Default)]
pub struct ProcessTable {
    processes: BTreeMap<u32, ScannedProcess>,
    /// The children of each process.
    children: BTreeMap<u32, Vec<u32>>,
}

/// A process of the table.
pub struct ScannedProcess {
    pub stat: ProcStat,
    /// The launch id in its environment.
    pub launch_id: Option<String>,
    pub mark: Option<LaunchMark>,
}

impl ScannedProcess {
    pub fn of(pid: u32) -> Option<ScannedProcess> {
        let stat = ProcStat::of(pid)?;
        Some(ScannedProcess { stat, launch_id: launch_id(pid), mark: LaunchMark::on(pid) })
    }
}

/// The callers that wait for the next table.
struct TableQueue {
    callers: Vec<oneshot::Sender<Arc<ProcessTable>>>,
    is_reading: bool,
}

static QUEUE: Mutex<TableQueue> = Mutex::new(TableQueue { callers: Vec::new(), is_reading: false });

fn queue() -> MutexGuard<'static, TableQueue> {
    QUEUE.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Ends the reading of tables: the callers that still wait read their own.
struct ReadingGuard;

impl Drop for ReadingGuard {
    fn drop(&mut self) {
        let mut queue = queue();
        queue.is_reading = false;
        queue.callers.clear();
    }
}

/// Reads tables until no caller waits.
fn serve_callers() {
    let guard = ReadingGuard;
    loop {
        let callers = {
            let mut queue = queue();
            if queue.callers.is_empty() {
                // Under the same lock as the check: the next caller starts another reading.
                queue.is_reading = false;
                std::mem::forget(guard);
                return;
            }
            std::mem::take(&mut queue.callers)
        };
        let table = Arc::new(ProcessTable::read());
        callers.into_iter().for_each(|caller| drop(caller.send(Arc::clone(&table))));
    }
}

impl ProcessTable {
    /// A table whose reading begins after this call.
    pub async fn current() -> Arc<ProcessTable> {
        let (send, receive) = oneshot::channel();
        let is_first = {
            let mut queue = queue();
            queue.callers.push(send);
            !std::mem::replace(&mut queue.is_reading, true)
        };
        if is_first && worker_threads::run(serve_callers).is_err() {
            serve_callers();
        }
        match receive.await {
            Ok(table) => table,
            Err(_) => Arc::new(ProcessTable::read()),
        }
    }

    fn read() -> ProcessTable {
        let process = |pid: u32| Some((pid, ScannedProcess::of(pid)?));
        let processes: BTreeMap<u32, ScannedProcess> =
            crate::proc::pids().into_iter().filter_map(process).collect();
        let mut children: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for (pid, process) in &processes {
            children.entry(process.stat.parent).or_default().push(*pid);
        }
        ProcessTable { processes, children }
    }

    fn stat(&self, pid: u32) -> Option<&ProcStat> {
        self.processes.get(&pid).map(|process| &process.stat)
    }

    pub fn processes(&self) -> impl Iterator<Item = &ScannedProcess> {
        self.processes.values()
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
        is_foreign: impl Fn(u32) -> bool,
    ) -> HashSet<u32> {
        let own = std::process::id();
        let may_be_member = |pid: u32, stat: &ProcStat| pid > 1 && pid != own && stat.is_alive();
        let roots = self
            .processes
            .iter()
            .filter(|(pid, process)| may_be_member(**pid, &process.stat) && is_root(**pid, process));
        let mut open: Vec<u32> = roots.map(|(pid, _)| *pid).collect();
        let mut members = HashSet::new();
        while let Some(pid) = open.pop() {
            if members.contains(&pid) || is_foreign(pid) {
                continue;
            }
            members.insert(pid);
            let started = self.started(pid).unwrap_or(u64::MAX);
            let of_pid = self.children.get(&pid).into_iter().flatten();
            open.extend(of_pid.filter(|child| {
                self.stat(**child).is_some_and(|stat| may_be_member(**child, stat) && stat.started >= started)
            }));
        }
        members
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn callers_share_scans_that_begin_after_their_call() {
        let tables = futures_util::future::join_all((0..100).map(|_| ProcessTable::current())).await;
        let distinct: HashSet<*const ProcessTable> = tables.iter().map(Arc::as_ptr).collect();
        assert!(distinct.len() < 10, "{} scans for 100 callers", distinct.len());
        let mut child =
            std::process::Command::new("sleep").arg("100").env("ABIDE_INCARNATION", "scanned").spawn();
        let child = child.as_mut().expect("it starts");
        let table = ProcessTable::current().await;
        let found = table.processes.get(&child.id()).expect("a process that began before the call");
        assert_eq!(found.launch_id.as_deref(), Some("scanned"));
        assert!(table.children[&std::process::id()].contains(&child.id()));
        let _ = (child.kill(), child.wait());
    }
}
