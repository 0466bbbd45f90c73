//! Processes of a tree that had to be killed, and those that may have survived it.

use super::UnknownMembers;
use crate::model::count;

/// Maximum processes that a message names.
const MAX_NAMED: usize = 10;

/// Processes that had to be killed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KilledProcesses {
    killed: Vec<(u32, String)>,
    /// Processes that are still alive after the kill timeout.
    survivors: Vec<(u32, String)>,
    /// Reason why more processes may be alive.
    unknown: Option<UnknownMembers>,
}

impl KilledProcesses {
    pub fn new(
        killed: Vec<(u32, String)>,
        survivors: Vec<(u32, String)>,
        unknown: Option<UnknownMembers>,
    ) -> KilledProcesses {
        KilledProcesses { killed, survivors, unknown }
    }

    pub fn is_empty(&self) -> bool {
        self.killed.is_empty()
    }

    pub fn add(&mut self, pid: u32, name: String) {
        self.killed.insert(0, (pid, name));
    }

    /// The processes that are or may be still alive after SIGKILL, for a message; `None`: none.
    pub fn survivors(&self) -> Option<String> {
        let known = (!self.survivors.is_empty()).then(|| list(&self.survivors));
        let unknown = self.unknown.as_ref().map(|why| format!("unknown ({why})"));
        match (known, unknown) {
            (Some(known), Some(unknown)) => Some(format!("{known}, {unknown}")),
            (known, unknown) => known.or(unknown),
        }
    }

    pub fn extend(&mut self, other: KilledProcesses) {
        self.killed.extend(other.killed);
        (self.survivors, self.unknown) = (other.survivors, other.unknown);
    }
}

/// `killed 2 processes of its tree: 17 (nginx), 18 (nginx)`.
impl std::fmt::Display for KilledProcesses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "killed {} of its tree: {}", count(self.killed.len(), "process"), list(&self.killed))?;
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
