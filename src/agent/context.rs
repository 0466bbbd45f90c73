//! Agent context: the store, limits and policy that all instance tasks share.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;

use super::account::{Account, AccountError};
use super::cgroup::Cgroups;
use super::error::AgentError;
use super::exit_record::ExitRecords;
use super::figures::{FigureTable, SAMPLE_INTERVAL};
use super::logs::LogSources;
use super::permits::Permits;
use super::policy::HostPolicy;
use super::pools::Pools;
use super::user_files::{FileWork, Rights, RootOpenPolicy, UserPermits};
use crate::agent_protocol::AgentMessage;
use crate::model::{InstanceKey, Spec};
use crate::store::Embedded;

/// The state that all instance tasks of an agent share.
pub struct AgentContext {
    pub store: Embedded,
    /// Outgoing messages to the gateway.
    pub up: mpsc::UnboundedSender<AgentMessage>,
    /// Exit records of commands, one-shots and scheduled runs.
    pub exits: ExitRecords,
    /// Permits for file work and launches, per user.
    pub user_permits: Arc<UserPermits>,
    /// Paths that the host policy lets root open for other users.
    pub root_open_policy: RootOpenPolicy,
    /// Permits for commands of specs, per user.
    pub commands: Permits,
    /// Permits for health and file checks, per user. Separate from `commands`: a check that hangs must not delay operations.
    pub check_permits: Permits,
    pub groups: Cgroups,
    pub resources: ResourceTables,
    /// Location of the log of each instance.
    pub logs: LogSources,
    /// Bounds every launch and adoption on this host.
    pub policy: HostPolicy,
    /// Interval between two checks of health and files.
    pub check_interval: Duration,
}

/// Location of a log, and the rights with which it is opened.
#[derive(Clone)]
pub struct LogLocation {
    pub path: PathBuf,
    pub rights: Rights,
    /// The log is in the agent's folder.
    pub is_agents: bool,
}

/// Usage of the host's resources by all instances.
#[derive(Default)]
pub struct ResourceTables {
    pub pools: Pools,
    pub figures: Arc<FigureTable>,
}

/// Intervals of an agent's periodic work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AgentIntervals {
    /// Checks of health and files.
    pub check: Duration,
    /// Samples of cpu, memory, descriptors and threads of an instance.
    pub sample: Duration,
}

impl AgentIntervals {
    /// With the default interval of samples.
    pub fn with_checks(check: Duration) -> AgentIntervals {
        AgentIntervals { check, sample: SAMPLE_INTERVAL }
    }
}

impl AgentContext {
    /// The rights for opening a spec's files and running its commands.
    pub fn rights_of(&self, spec: &Spec) -> Result<Rights, AccountError> {
        let account = Account::of(spec)?;
        Ok(Rights::new(account, Arc::clone(&self.user_permits), Arc::clone(&self.root_open_policy)))
    }

    /// The log of a process: the file of its spec, or one of the agent.
    pub fn log_of(&self, key: &InstanceKey, spec: &Spec) -> Result<Option<LogLocation>, AccountError> {
        if let Some(path) = &spec.identity.log_path {
            let (path, rights) = (PathBuf::from(path), self.rights_of(spec)?);
            return Ok(Some(LogLocation { path, rights, is_agents: false }));
        }
        let Some(path) = self.logs.files().log(key, spec) else { return Ok(None) };
        // A spec without a user has the rights of the agent.
        let rights = self.rights_of(&Spec::default())?;
        Ok(Some(LogLocation { path, rights, is_agents: true }))
    }

    /// Runs [`HostPolicy::check`], on a worker thread if the policy resolves paths: a path lookup can block.
    pub async fn check_policy(&self, key: &InstanceKey, spec: &Arc<Spec>) -> Result<(), AgentError> {
        if !self.policy.resolves_paths() {
            return Ok(self.policy.check(key, spec)?);
        }
        let rights = self.rights_of(spec)?;
        let (policy, key, spec) = (self.policy.clone(), key.clone(), Arc::clone(spec));
        let check = move |_: &Rights| Ok(policy.check(&key, &spec)?);
        rights.run(FileWork::Paths, "check the paths of the spec", check).await
    }
}

#[cfg(test)]
impl AgentContext {
    /// The context of an agent in a folder, and its messages to the gateway.
    pub fn for_test(folder: &std::path::Path) -> (Arc<AgentContext>, mpsc::UnboundedReceiver<AgentMessage>) {
        let (up, sent) = mpsc::unbounded_channel();
        let shared = AgentContext {
            store: Embedded::open(&folder.join("agent.db")).expect("a store"),
            up,
            exits: ExitRecords::in_folder(folder).expect("a folder"),
            user_permits: Arc::default(),
            root_open_policy: Arc::new(|_| false),
            commands: Permits::new(1),
            check_permits: Permits::new(1),
            groups: Cgroups::under_own_cgroup(folder),
            resources: ResourceTables::default(),
            logs: LogSources::default(),
            policy: HostPolicy::default(),
            check_interval: Duration::from_secs(10),
        };
        (Arc::new(shared), sent)
    }
}
