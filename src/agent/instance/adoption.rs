//! Adoption: processes that this agent did not launch, or whose launch is not in its store.
//!
//! Only an explicit operation 3 adopts a foreign process, and only with proof ([`ownership`]). Every other operation
//! reports a foreign process and does not act on it. The pid file names a foreign process in both start modes.

use tracing::{debug, info};

use super::{InstanceTask, OpReply, done, failed};
use crate::agent::error::AgentError;
use crate::agent::interrupted_launch;
use crate::agent::ownership;
use crate::agent::process::LaunchedProcess;
use crate::agent::state::ProcessRun;
use crate::agent::tree::LaunchTraces;
use crate::agent_protocol::OwnedSpec;
use crate::clock;
use crate::error_chain::chain;
use crate::gse::codes::RowCode;
use crate::model::{AutoType, Spec, StartMode};

impl InstanceTask {
    /// Starts supervision. A running process that this agent did not launch is adopted, with proof: this operation names
    /// it explicitly.
    pub(super) async fn supervise(&mut self, owned: OwnedSpec) -> OpReply {
        if is_resident(&owned.spec) && !self.is_running() {
            let adopted = match self.shared.rights_of(&owned.spec) {
                Ok(rights) => ownership::adopt(&owned.spec, &rights).await.map_err(AgentError::from),
                Err(error) => Err(error.into()),
            };
            match adopted {
                Err(why) => return failed(why),
                Ok(None) => {}
                Ok(Some(handle)) => {
                    info!(instance = %self.key, pid = handle.identity.pid, "process adopted");
                    self.state.run =
                        Some(ProcessRun { adopted: Some(true), ..ProcessRun::of_handle(&handle, &owned) });
                    (self.state.since, self.state.started, self.state.exit) =
                        (clock::now().0, clock::now().0, None);
                    self.state.message.clear();
                    self.handle = Some(handle);
                }
            }
        }
        // Supervision of a stopped process begins with its next start.
        self.state.dormant |= !self.is_running() && !self.state.hosted;
        self.register_given(Some(owned));
        (self.state.hosted, self.launches.next) = (true, None);
        self.register_live();
        done()
    }

    /// Reclaims the process of an earlier agent whose folder was lost. It counts as running with the registered spec, and
    /// is not supervised until an operation supervises it.
    pub(super) async fn reclaim(&mut self, unclaimed: &[LaunchedProcess], renamed: bool) {
        let Some(live) = self.state.given.clone().filter(|_| self.handle.is_none()) else { return };
        let found = match self.shared.rights_of(&live.spec) {
            Ok(rights) => {
                let spec = &live.spec;
                let found =
                    interrupted_launch::find_unrecorded(&self.key, spec, &rights, unclaimed, renamed).await;
                found.map_err(AgentError::from)
            }
            Err(error) => Err(error.into()),
        };
        let (handle, incarnation) = match found {
            Ok(found) => found,
            Err(why) => {
                debug!(instance = %self.key, why = %chain(&why), renamed, "no process reclaimed");
                return;
            }
        };
        info!(instance = %self.key, pid = handle.identity.pid, renamed, "process reclaimed by its launch id");
        let group = self.shared.groups.of(&incarnation).map(|group| group.path());
        self.state.run = Some(ProcessRun {
            identity: handle.identity.clone(),
            uid: self.uid_of(&live.spec),
            live,
            by: None,
            incarnation,
            group,
            output: None,
            log: None,
            traces: LaunchTraces::default(),
            adopted: None,
            hook_due: false,
        });
        (self.state.since, self.state.started, self.state.exit) = (clock::now().0, clock::now().0, None);
        self.state.message.clear();
        self.handle = Some(handle);
        self.write(None).await;
        if renamed {
            self.report();
        }
    }

    /// The pid of a foreign process that runs under this identity. An error: it is unknown whether one runs.
    pub(super) async fn foreign_pid(&self, owned: &OwnedSpec) -> Result<Option<u32>, AgentError> {
        if self.is_running() || !is_resident(&owned.spec) {
            return Ok(None);
        }
        Ok(ownership::foreign_pid(&owned.spec, &self.shared.rights_of(&owned.spec)?).await?)
    }

    /// The pid of a foreign process that was started in place of an ended foreground process. A daemon's start_cmd detects
    /// such a process itself. A pid file that names the ended process is stale, even if its pid was reused. An error: it is
    /// unknown whether one runs.
    pub(super) async fn foreign_successor(&self, owned: &OwnedSpec) -> Result<Option<u32>, AgentError> {
        if is_daemon(&owned.spec) {
            return Ok(None);
        }
        let ended = self.pid_file.old.as_ref().map(|(_, pid)| *pid);
        Ok(self.foreign_pid(owned).await?.filter(|pid| Some(*pid) != ended))
    }

    /// The reply for a process that does not run under this agent. The agent does not stop a process that it did not start.
    pub(super) async fn not_running(&self, owned: &OwnedSpec) -> OpReply {
        let message = match self.foreign_pid(owned).await {
            Ok(None) => "process is not running".to_owned(),
            Ok(Some(pid)) => format!("process is not running under this agent: {}", not_owned(pid)),
            Err(error) => format!("process is not running under this agent: {}", chain(&error)),
        };
        (RowCode::NOT_RUNNING, message)
    }

    /// Reclaims a daemon of an earlier launch of this agent, whose pid file appeared after that launch timed out.
    pub(super) async fn reclaim_orphan(&mut self, owned: &OwnedSpec) -> Result<(), AgentError> {
        if self.is_running() || !is_daemon(&owned.spec) {
            return Ok(());
        }
        let rights = self.shared.rights_of(&owned.spec)?;
        let orphan = ownership::find_orphan(&self.key, &owned.spec, &rights).await?;
        if let Some((handle, incarnation)) = orphan {
            let group = self.shared.groups.of(&incarnation).map(|group| group.path());
            self.state.run = Some(ProcessRun {
                incarnation,
                group,
                uid: Some(rights.account().uid()),
                ..ProcessRun::of_handle(&handle, owned)
            });
            (self.state.since, self.state.started, self.state.exit) = (clock::now().0, clock::now().0, None);
            self.state.message.clear();
            self.handle = Some(handle);
        }
        Ok(())
    }
}

/// Whether a process with this spec keeps running, so that its pid file names it.
fn is_resident(spec: &Spec) -> bool {
    spec.monitor.auto_type == AutoType::Resident
}

/// Whether a start leaves a daemon behind that is found by its pid file.
fn is_daemon(spec: &Spec) -> bool {
    is_resident(spec) && spec.control.start_mode.unwrap_or_default() == StartMode::Daemon
}

/// The reason why the agent does not act on a running foreign process.
pub(super) fn not_owned(pid: u32) -> String {
    format!(
        "process {pid} runs under this identity, and this agent did not start it: adopt it (`--adopt`, operation 3) or \
         stop it first"
    )
}
