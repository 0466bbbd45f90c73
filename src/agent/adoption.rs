//! Adoption: daemons that this agent did not launch, or whose launch it lost sight of.
//!
//! Only an explicit operation 3 adopts a stranger's process, and only with proof ([`ownership`]). Every other operation
//! reports it and leaves it alone.

use tracing::info;

use super::keeper::{Keeper, Said, done, failed};
use super::now_ms;
use super::ownership;
use super::row::Run;
use crate::gse::channel::Held;
use crate::gse::codes::RowCode;
use crate::model::{AutoType, Spec, StartMode};

impl Keeper {
    /// Supervises it from now on. A daemon that runs already and that this agent did not launch is adopted, with proof:
    /// this operation names it explicitly.
    pub(super) async fn host(&mut self, held: Held) -> Said {
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
                    self.row.run = Some(Run::found(&hold, &held));
                    (self.row.since, self.row.started, self.row.exit) = (now_ms(), now_ms(), None);
                    self.row.message.clear();
                    self.hold = Some(hold);
                }
            }
        }
        // Supervision of a process that does not run begins with its next start.
        self.row.dormant |= !self.is_running() && !self.row.hosted;
        (self.row.given, self.row.hosted, self.next) = (Some(held), true, None);
        done()
    }

    /// The pid of a daemon that runs under this identity without being ours. An error: it is not known whether one runs.
    pub(super) async fn stranger(&self, held: &Held) -> Result<Option<u32>, String> {
        if self.is_running() || !is_daemon(&held.spec) {
            return Ok(None);
        }
        ownership::stranger(&held.spec, &self.shared.rights_of(&held.spec)?).await
    }

    /// Not running, as far as this agent is concerned: a process that it did not start is not its to stop.
    pub(super) async fn not_running(&self, held: &Held) -> Said {
        let message = match self.stranger(held).await {
            Ok(None) => "it is not running".to_owned(),
            Ok(Some(pid)) => format!("process is not running under this agent: {}", not_owned(pid)),
            Err(why) => format!("process is not running under this agent: {why}"),
        };
        (RowCode::NOT_RUNNING, message)
    }

    /// A daemon of an earlier launch of this agent, whose pid file came too late for that launch.
    pub(super) async fn take_left_behind(&mut self, held: &Held) -> Result<(), String> {
        if self.is_running() || !is_daemon(&held.spec) {
            return Ok(());
        }
        let rights = self.shared.rights_of(&held.spec)?;
        let left = ownership::left_behind(&self.key, &held.spec, &rights).await?;
        if let Some((hold, incarnation)) = left {
            let group = self.shared.groups.of(&incarnation).map(|group| group.path());
            self.row.run = Some(Run { incarnation, group, ..Run::found(&hold, held) });
            (self.row.since, self.row.started, self.row.exit) = (now_ms(), now_ms(), None);
            self.row.message.clear();
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
