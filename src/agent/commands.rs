//! Commands of operations: run as the spec's user, each with a record of its end, so that none that finished is repeated.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::cgroup::Cgroup;
use super::exit_record::{self, ExitRecord, kill_group};
use super::instance::{InstanceTask, OpReply, failed};
use super::output::Output;
use super::spawn::{CommandExit, SpecCommand, environment, run};
use super::state::state_key;
use crate::failpoint;
use crate::model::{Monitor, Spec};
use crate::store::{Store, Txn};

/// A launch whose descendants carry its id, and its control group.
pub type CommandLaunch<'a> = Option<(&'a str, Option<Cgroup>)>;

impl InstanceTask {
    /// Puts the operation into the store before a command of it runs.
    pub(super) async fn write_pending(&mut self) -> Result<(), OpReply> {
        let pending = self.pending();
        let resumed = pending.writes.is_empty();
        if resumed {
            return Ok(());
        }
        let row = Txn::put(state_key(&self.key), serde_json::to_vec(&self.state).unwrap_or_default());
        match self.shared.store.txn(pending.and(row)).await {
            Ok(_) => Ok(()),
            Err(error) => {
                Err(failed(format!("no command was run: the agent's store cannot be written: {error}")))
            }
        }
    }

    /// Runs one of a spec's commands, as its user, in its folder. `record`: under this name its end is recorded.
    pub(super) async fn command(
        &mut self,
        spec: &Arc<Spec>,
        command: &str,
        record: Option<String>,
        launch: CommandLaunch<'_>,
    ) -> Result<CommandExit, String> {
        // The spec of a running process was allowed at its launch; one that comes with a request need not be.
        if self.state.run.as_ref().is_none_or(|run| run.live.spec != *spec) {
            self.shared.check_policy(&self.key, spec).await?;
        }
        let rights = self.shared.rights_of(spec)?;
        let mut marks = vec![("ABIDE_INSTANCE", self.key.to_string())];
        if let Some(run) = &self.state.run {
            marks.push(("ABIDE_PID", run.identity.pid.to_string()));
        }
        let mut group = None;
        if let Some((launch_id, of_launch)) = launch {
            marks.push(("ABIDE_INCARNATION", launch_id.to_owned()));
            group = of_launch;
        }
        let env = environment(spec, &rights, &marks).await?;
        let time = Duration::from_secs(spec.monitor.op_timeout.unwrap_or(Monitor::OP_TIMEOUT).into());
        let folder = Path::new(&spec.identity.setup_path);
        let shared = Arc::clone(&self.shared);
        let _permit = shared.commands.acquire(rights.account().uid()).await;
        let program = SpecCommand { command, folder, rights: &rights, env, time };
        match record {
            Some(record) => self.run_recorded(&record, program, group).await.map(|(ended, _)| ended),
            None => run(program, None, group).await.map(|(ended, _)| ended),
        }
    }

    /// Runs a command whose end is recorded, or continues with one that an earlier agent began.
    pub(super) async fn run_recorded(
        &mut self,
        id: &str,
        mut program: SpecCommand<'_>,
        group: Option<Cgroup>,
    ) -> Result<(CommandExit, Option<Output>), String> {
        let shared = Arc::clone(&self.shared);
        let records = &shared.exits;
        if !self.records.iter().any(|known| known == id) {
            self.records.push(id.to_owned());
        }
        let ended = |code: i32| match code {
            0 => CommandExit::Success,
            code => CommandExit::Failure(
                code,
                "its output is lost: the agent was restarted while it ran".to_owned(),
            ),
        };
        match exit_record::wait_for_record(records, id).await? {
            ExitRecord::Ended(code) => return Ok((ended(code), None)),
            ExitRecord::Begun(_) => {
                if let Some(shell) = records.shell(id) {
                    if tokio::time::timeout(program.time, shell.wait_exit()).await.is_err() {
                        kill_group(&shell);
                        return Ok((CommandExit::TimedOut("its output is lost".to_owned()), None));
                    }
                    return Ok((ended(records.code(id).unwrap_or(-1)), None));
                }
                // It may have ended since it was read; else it was killed, and is run again.
                if let Some(code) = records.code(id) {
                    return Ok((ended(code), None));
                }
            }
            ExitRecord::Missing | ExitRecord::Empty => {}
            ExitRecord::Unreadable => {
                return Err(format!("the exit record {id} of this command cannot be read"));
            }
        }
        program.env.variables.push((exit_record::RECORD_VARIABLE.to_owned(), id.to_owned()));
        let record = (records.clone(), id.to_owned());
        let (ended, output) = run(program, Some(record), group).await?;
        failpoint::point("command-ended");
        Ok((ended, Some(output)))
    }
}
