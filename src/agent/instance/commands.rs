//! Commands of operations: run as the spec's user, with an exit record each, so that a finished command is not repeated.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::{InstanceTask, OpReply, failed};
use crate::agent::captured_output::CapturedOutput;
use crate::agent::cgroup::Cgroup;
use crate::agent::environment::{LAUNCH_ID_VARIABLE, environment};
use crate::agent::error::{AgentError, LaunchError};
use crate::agent::exit_record::{self, ExitRecord, ExitRecordError, kill_group};
use crate::agent::sandbox::{LaunchSandbox, MainProcess};
use crate::agent::spawn::{CommandExit, SpecCommand, run};
use crate::agent::state::state_key;
use crate::failpoint;
use crate::model::{Monitor, Spec};
use crate::store::{Store, Txn};

/// Launch id and control group for the processes that a command starts.
pub type CommandLaunch<'a> = Option<(&'a str, Option<Cgroup>)>;

/// Whether a command whose recording shell was killed before it wrote the exit code runs again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterKill {
    /// Each launch needs the command: it runs again when no process of it is left.
    RunAgain,
    /// The command may have finished: it is not repeated, and its outcome is unknown.
    OutcomeUnknown,
}

/// The time limit of a command, and what follows a kill of its recording shell.
#[derive(Clone, Copy)]
pub struct CommandForm {
    pub time: Duration,
    pub after_kill: AfterKill,
}

impl InstanceTask {
    /// Writes the pending operation to the store before its first command runs.
    pub(super) async fn write_pending(&mut self) -> Result<(), OpReply> {
        let pending = self.pending();
        let resumed = pending.writes.is_empty();
        if resumed {
            return Ok(());
        }
        let state = Txn::put(state_key(&self.key), serde_json::to_vec(&self.state).unwrap_or_default());
        match self.shared.store.txn(pending.and(state)).await {
            Ok(_) => Ok(()),
            Err(error) => Err(failed(format!("no command was run: cannot write the agent's store: {error}"))),
        }
    }

    /// Runs a command of a spec, as its user, in its folder. `record`: name of its exit record.
    pub(super) async fn command(
        &mut self,
        spec: &Arc<Spec>,
        command: &str,
        record: Option<String>,
        launch: CommandLaunch<'_>,
    ) -> Result<CommandExit, AgentError> {
        let time = Duration::from_secs(spec.monitor.op_timeout.unwrap_or(Monitor::OP_TIMEOUT).into());
        let form = CommandForm { time, after_kill: AfterKill::OutcomeUnknown };
        self.command_in(spec, command, record, launch, form).await
    }

    /// The same with another time limit.
    pub(super) async fn command_in(
        &mut self,
        spec: &Arc<Spec>,
        command: &str,
        record: Option<String>,
        launch: CommandLaunch<'_>,
        form: CommandForm,
    ) -> Result<CommandExit, AgentError> {
        // The spec of the running process passed the policy at its launch. Any other spec is checked here.
        if self.state.run.as_ref().is_none_or(|run| run.live.spec != *spec) {
            self.shared.check_policy(&self.key, spec).await?;
        }
        let rights = self.shared.rights_of(spec)?;
        let mut variables = vec![("ABIDE_INSTANCE", self.key.to_string())];
        if let Some(run) = &self.state.run {
            variables.push(("ABIDE_PID", run.identity.pid.to_string()));
        }
        let mut group = None;
        if let Some((launch_id, of_launch)) = launch {
            variables.push((LAUNCH_ID_VARIABLE, launch_id.to_owned()));
            group = of_launch;
        }
        let env = environment(spec, &rights, &variables).await?;
        let main = self.state.run.as_ref();
        let main = main.map(|run| MainProcess { identity: &run.identity, live: &run.live.spec });
        let sandbox = LaunchSandbox::of_command(spec, &rights, main).await.map_err(LaunchError::from)?;
        let CommandForm { time, after_kill } = form;
        let folder = Path::new(&spec.identity.setup_path);
        let shared = Arc::clone(&self.shared);
        let _permit = shared.commands.acquire(rights.account().uid()).await;
        let program = SpecCommand { command, folder, rights: &rights, env, time, sandbox };
        match record {
            Some(record) => {
                self.run_recorded(&record, program, group, after_kill).await.map(|(ended, _)| ended)
            }
            None => Ok(run(program, None, group).await.map(|(ended, _)| ended)?),
        }
    }

    /// Runs a command with an exit record, or waits for the one that an earlier agent began.
    pub(super) async fn run_recorded(
        &mut self,
        id: &str,
        mut program: SpecCommand<'_>,
        group: Option<Cgroup>,
        after_kill: AfterKill,
    ) -> Result<(CommandExit, Option<CapturedOutput>), AgentError> {
        let shared = Arc::clone(&self.shared);
        let records = &shared.exits;
        if !self.unwritten.exit_records.iter().any(|known| known == id) {
            self.unwritten.exit_records.push(id.to_owned());
        }
        let ended = |code: i32| match code {
            0 => CommandExit::Success,
            code => CommandExit::Failure(
                code,
                "output lost: the agent was restarted while the command ran".to_owned(),
            ),
        };
        match exit_record::wait_for_record(records, id).await? {
            ExitRecord::Ended(code) => return Ok((ended(code), None)),
            ExitRecord::Begun(pid) => {
                if let Some(shell) = records.shell(id) {
                    if tokio::time::timeout(program.time, shell.wait_exit()).await.is_err() {
                        kill_group(&shell);
                        return Ok((
                            CommandExit::TimedOut(
                                "output lost: the agent was restarted while the command ran".to_owned(),
                            ),
                            None,
                        ));
                    }
                    return Ok((ended(records.code(id).unwrap_or(-1)), None));
                }
                // The command may have ended since the first read. Without a code its shell was killed.
                if let Some(code) = records.code(id) {
                    return Ok((ended(code), None));
                }
                let are_gone = exit_record::wait_for_orphans(id, pid, program.time).await;
                if after_kill == AfterKill::OutcomeUnknown || !are_gone {
                    return Err(ExitRecordError::OutcomeUnknown.into());
                }
            }
            ExitRecord::Missing | ExitRecord::Empty => {}
            ExitRecord::Unreadable => {
                return Err(ExitRecordError::Unreadable { id: id.to_owned() }.into());
            }
        }
        program.env.variables.push((exit_record::RECORD_VARIABLE.to_owned(), id.to_owned()));
        let record = (records.clone(), id.to_owned());
        let (ended, output) = run(program, Some(record), group).await?;
        failpoint::point("command-ended");
        Ok((ended, Some(output)))
    }
}
