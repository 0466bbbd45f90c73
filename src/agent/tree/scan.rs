//! Scan of all processes of this host for the members of a tree.

use std::collections::{BTreeMap, HashSet};

use crate::proc::ProcStat;

/// All processes of this host.
pub struct ProcessTable(BTreeMap<u32, ProcStat>);

impl ProcessTable {
    pub fn read() -> ProcessTable {
        let Ok(folder) = std::fs::read_dir("/proc") else { return ProcessTable(BTreeMap::new()) };
        let pids = folder.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        ProcessTable(pids.filter_map(|pid| Some((pid, ProcStat::of(pid)?))).collect())
    }

    pub fn pids(&self) -> impl Iterator<Item = u32> {
        self.0.keys().copied()
    }

    pub fn started(&self, pid: u32) -> Option<u64> {
        self.0.get(&pid).map(|stat| stat.started)
    }

    /// Whether the session has existed since a time: it has a member that is at least as old, and no younger leader.
    pub fn has_member_since(&self, session: u32, ticks: u64) -> bool {
        let is_reused = self.0.get(&session).is_some_and(|leader| leader.started > ticks);
        !is_reused && self.0.values().any(|stat| stat.session == session && stat.started <= ticks)
    }

    /// The roots of a tree and their descendants. The descent ends at foreign and ended processes. A child is never older
    /// than its parent; if it is, the pid of the parent was reused while the table was read.
    pub fn find_members(
        &self,
        is_root: impl Fn(u32, &ProcStat) -> bool,
        is_foreign: impl Fn(u32) -> bool,
    ) -> HashSet<u32> {
        let (table, own) = (&self.0, std::process::id());
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
}
