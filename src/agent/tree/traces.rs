//! Traces of a launch: the evidence of its processes, which the agent's store keeps for the next agent.

use serde::{Deserialize, Serialize};

use crate::agent::cgroup::Cgroup;
use crate::agent::launch_mark::LaunchMark;
use crate::agent::process::{ProcessHandle, ProcessIdentity, name};
use crate::agent::reaper;
use crate::proc::ProcStat;

/// Maximum observed processes per launch.
const MAX_OBSERVED: usize = 256;

/// The sessions of a launch, and processes that were observed to descend from it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LaunchTraces {
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
    /// Records the session of a process of the launch, if the launch created it. A session of others proves nothing:
    /// ending its members would end their processes.
    pub fn add_session(&mut self, member: &ProcessHandle, launch_id: &str, group: Option<&Cgroup>) {
        let Some(until) = member.last_in_session() else { return };
        let id = member.session;
        match self.sessions.iter_mut().find(|session| session.id == id) {
            Some(session) => session.until = session.until.max(until),
            None if is_created(id, member.identity.pid, launch_id, group) => {
                self.sessions.push(LaunchSession { id, until });
            }
            None => {}
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
    #[serde(default)]
    pub traces: LaunchTraces,
}

/// Whether the launch created the session of its process. A process that leads its session has created it. The first process
/// of a launch leads a session of its own, and every process inherits its session, its control group and its mark: one
/// with the group or the mark is in a session of the launch. The launch id proves less: a process can pass on its
/// environment to a server, which starts others in its own session.
fn is_created(id: u32, member: u32, launch_id: &str, group: Option<&Cgroup>) -> bool {
    let is_grouped = || group.is_some_and(|group| group.processes().contains(&member));
    id != 0
        && (id == member
            || !launch_id.is_empty() && (is_grouped() || LaunchMark::of(launch_id).is_on(member)))
}

/// The live descendants of a process, each with its session. Reads only the processes of that tree.
fn descendants(pid: u32) -> Vec<(ProcessIdentity, u32)> {
    let mut found: Vec<(ProcessIdentity, u32)> = Vec::new();
    let children = |pid: u32| reaper::children_of(pid).into_iter().map(move |child| (pid, child));
    let mut open: Vec<(u32, u32)> = children(pid).collect();
    while found.len() < MAX_OBSERVED
        && let Some((parent, pid)) = open.pop()
    {
        // A pid of the list that was reused since has another parent.
        let is_child = |stat: &ProcStat| stat.is_alive() && stat.parent == parent;
        let Some(stat) = ProcStat::of(pid).filter(is_child) else { continue };
        if found.iter().any(|(one, _)| one.pid == pid) {
            continue;
        }
        let boot = crate::proc::boot_id().to_owned();
        found.push((ProcessIdentity { boot, pid, started: stat.started }, stat.session));
        open.extend(children(pid));
    }
    found
}

/// Pids and names of at most `most` processes, for a message.
pub fn named<'a>(
    processes: impl IntoIterator<Item = &'a ProcessIdentity>,
    most: usize,
) -> Vec<(u32, String)> {
    processes.into_iter().take(most).map(|one| (one.pid, name(one.pid))).collect()
}
