//! Traces of a launch: the evidence of its processes, which the agent's store keeps for the next agent.

use serde::{Deserialize, Serialize};

use crate::agent::process::{LaunchedProcess, ProcessHandle, ProcessIdentity, name, ticks_since_boot};
use crate::agent::reaper;
use crate::proc::ProcStat;

/// Maximum observed processes per launch.
const MAX_OBSERVED: usize = 256;

/// The sessions of a launch, and processes that were observed to descend from it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LaunchTraces {
    /// Ticks since boot when the launch began; 0: unknown.
    pub since: u64,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sessions: Vec<LaunchSession>,
    /// Descendants of the main process that have left its session. Their launch id may be gone.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub observed: Vec<ProcessIdentity>,
}

/// A session that the launch created. The kernel does not reuse its number while the session has a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchSession {
    pub id: u32,
    /// Ticks since boot when the session was last known to have a member.
    pub until: u64,
}

impl LaunchTraces {
    pub fn since_now() -> LaunchTraces {
        LaunchTraces { since: ticks_since_boot(), ..LaunchTraces::default() }
    }

    /// Records the session of a process of the launch, unless the launch did not create it: a session of others is no
    /// evidence, and ending its members would end their processes.
    pub fn add_session(&mut self, id: u32, member: u32) {
        if is_foreign_session(id, member) {
            return;
        }
        let until = ticks_since_boot();
        match self.sessions.iter_mut().find(|session| session.id == id) {
            Some(session) => session.until = until,
            None => self.sessions.push(LaunchSession { id, until }),
        }
    }

    /// Records the descendants of the main process outside its session. True: there is a new one.
    pub fn observe(&mut self, main: &ProcessHandle) -> bool {
        self.observed.retain(ProcessIdentity::is_current);
        let before = self.observed.len();
        for one in descendants(main.identity.pid) {
            let is_new = !self.observed.contains(&one.0) && self.observed.len() < MAX_OBSERVED;
            if one.1 != main.session && is_new && !one.0.is_claimed() {
                self.observed.push(one.0);
            }
        }
        self.observed.len() > before
    }
}

/// A launch whose processes could not all be ended, or whose main process is not known.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LaunchRecord {
    /// Boot id at the launch.
    pub boot: String,
    /// The launch id; empty: the agent did not launch the process.
    pub launch_id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The account of the launch; `None`: unknown, and no environment counts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// The program of the spec.
    pub program: String,
    #[serde(default)]
    pub traces: LaunchTraces,
}

/// Whether a session is the agent's own, or has a live leader that no launch started. A process that leads its session
/// has created it.
fn is_foreign_session(id: u32, member: u32) -> bool {
    let own = std::process::id();
    let is_own = |pid: u32| ProcStat::of(pid).is_some_and(|stat| stat.session == id);
    let is_launched = |stat: ProcStat| stat.parent == own || LaunchedProcess::of(id).is_some();
    id == 0 || id != member && (is_own(own) || ProcStat::of(id).is_some_and(|leader| !is_launched(leader)))
}

/// The live descendants of a process, each with its session. Reads only the processes of that tree.
fn descendants(pid: u32) -> Vec<(ProcessIdentity, u32)> {
    let mut found: Vec<(ProcessIdentity, u32)> = Vec::new();
    let mut open = reaper::children_of(pid);
    while let Some(pid) = open.pop() {
        let Some(stat) = ProcStat::of(pid).filter(ProcStat::is_alive) else { continue };
        let is_known = found.iter().any(|(one, _)| one.pid == pid);
        if is_known || found.len() >= MAX_OBSERVED {
            continue;
        }
        let boot = crate::proc::boot_id().to_owned();
        found.push((ProcessIdentity { boot, pid, started: stat.started }, stat.session));
        open.extend(reaper::children_of(pid));
    }
    found
}

/// Pids and names of processes, for a message.
pub fn named(processes: &[ProcessIdentity]) -> Vec<(u32, String)> {
    processes.iter().map(|one| (one.pid, name(one.pid))).collect()
}
