//! Adoption: daemons that this agent did not launch, or whose launch it lost sight of.
//!
//! Only an explicit operation 3 adopts a stranger's process, and only with proof ([`ownership`]). Every other operation
//! reports it and leaves it alone.

use tracing::info;

use super::instance::{InstanceTask, OpReply, done, failed};
use super::now_ms;
use super::ownership;
use super::state::ProcessRun;
use crate::gse::agent_protocol::OwnedSpec;
use crate::gse::codes::RowCode;
use crate::model::{AutoType, Spec, StartMode};

impl InstanceTask {
    /// Supervises it from now on. A daemon that runs already and that this agent did not launch is adopted, with proof:
    /// this operation names it explicitly.
    pub(super) async fn supervise(&mut self, held: OwnedSpec) -> OpReply {
        if is_daemon(&held.spec) && !self.is_running() {
            let adopted = match self.shared.rights_of(&held.spec) {
                Ok(rights) => ownership::adopt(&held.spec, &rights).await,
                Err(why) => Err(why),
            };
            match adopted {
                Err(why) => return failed(why),
                Ok(None) => {}
                Ok(Some(hold)) => {
                    info!(instance = %self.key, pid = hold.identity.pid, "process adopted");
                    self.state.run = Some(ProcessRun::adopted(&hold, &held));
                    (self.state.since, self.state.started, self.state.exit) = (now_ms(), now_ms(), None);
                    self.state.message.clear();
                    self.hold = Some(hold);
                }
            }
        }
        // Supervision of a process that does not run begins with its next start.
        self.state.dormant |= !self.is_running() && !self.state.hosted;
        (self.state.given, self.state.hosted, self.next) = (Some(held), true, None);
        done()
    }

    /// The pid of a daemon that runs under this identity without being ours. An error: it is not known whether one runs.
    pub(super) async fn foreign_pid(&self, held: &OwnedSpec) -> Result<Option<u32>, String> {
        if self.is_running() || !is_daemon(&held.spec) {
            return Ok(None);
        }
        ownership::foreign_pid(&held.spec, &self.shared.rights_of(&held.spec)?).await
    }

    /// Not running, as far as this agent is concerned: a process that it did not start is not its to stop.
    pub(super) async fn not_running(&self, held: &OwnedSpec) -> OpReply {
        let message = match self.foreign_pid(held).await {
            Ok(None) => "it is not running".to_owned(),
            Ok(Some(pid)) => format!("process is not running under this agent: {}", not_owned(pid)),
            Err(why) => format!("process is not running under this agent: {why}"),
        };
        (RowCode::NOT_RUNNING, message)
    }

    /// A daemon of an earlier launch of this agent, whose pid file came too late for that launch.
    pub(super) async fn reclaim_orphan(&mut self, held: &OwnedSpec) -> Result<(), String> {
        if self.is_running() || !is_daemon(&held.spec) {
            return Ok(());
        }
        let rights = self.shared.rights_of(&held.spec)?;
        let left = ownership::find_orphan(&self.key, &held.spec, &rights).await?;
        if let Some((hold, incarnation)) = left {
            let group = self.shared.groups.of(&incarnation).map(|group| group.path());
            self.state.run = Some(ProcessRun { incarnation, group, ..ProcessRun::adopted(&hold, held) });
            (self.state.since, self.state.started, self.state.exit) = (now_ms(), now_ms(), None);
            self.state.message.clear();
            self.hold = Some(hold);
        }
        Ok(())
    }
}

/// Does a start leave a process behind that is known by its pid file?
fn is_daemon(spec: &Spec) -> bool {
    let resident = spec.monitor.auto_type == AutoType::Resident;
    resident && spec.control.start_mode.unwrap_or_default() == StartMode::Daemon
}

/// Why a process that runs is not acted on.
pub(super) fn not_owned(pid: u32) -> String {
    format!(
        "process {pid} runs under this identity, and this agent did not start it: adopt it (`--adopt`, operation 3) or \
         stop it first"
    )
}
