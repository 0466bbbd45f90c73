//! Commands of operations: run as the spec's user, each with a record of its end, so that none that finished is repeated.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::cgroup::Group;
use super::exit_record::{self, ExitRecord, kill_group};
use super::keeper::{Keeper, Said, failed};
use super::output::Output;
use super::row::row_key;
use super::spawn::{Ended, Program, environment, run};
use crate::fail;
use crate::model::{Monitor, Spec};
use crate::store::{Store, Txn};

/// A launch whose descendants carry its id, and its control group.
pub type LaunchOf<'a> = Option<(&'a str, Option<Group>)>;

impl Keeper {
    /// Puts the operation into the store before a command of it runs.
    pub(super) async fn write_pending(&mut self) -> Result<(), Said> {
        let pending = self.pending();
        let resumed = pending.writes.is_empty();
        if resumed {
            return Ok(());
        }
        let row = Txn::put(row_key(&self.key), serde_json::to_vec(&self.row).unwrap_or_default());
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
        launch: LaunchOf<'_>,
    ) -> Result<Ended, String> {
        // The spec of a running process was allowed at its launch; one that comes with a request need not be.
        if self.row.run.as_ref().is_none_or(|run| run.live.spec != *spec) {
            self.shared.check_policy(&self.key, spec).await?;
        }
        let rights = self.shared.rights_of(spec)?;
        let mut marks = vec![("ABIDE_INSTANCE", self.key.to_string())];
        if let Some(run) = &self.row.run {
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
        let program = Program { command, folder, rights: &rights, env, time };
        match record {
            Some(record) => self.recorded(&record, program, group).await.map(|(ended, _)| ended),
            None => run(program, None, group).await.map(|(ended, _)| ended),
        }
    }

    /// Runs a command whose end is recorded, or continues with one that an earlier agent began.
    pub(super) async fn recorded(
        &mut self,
        id: &str,
        mut program: Program<'_>,
        group: Option<Group>,
    ) -> Result<(Ended, Option<Output>), String> {
        let shared = Arc::clone(&self.shared);
        let records = &shared.exits;
        if !self.records.iter().any(|known| known == id) {
            self.records.push(id.to_owned());
        }
        let ended = |code: i32| match code {
            0 => Ended::Well,
            code => Ended::Badly(code, "its output is lost: the agent was restarted while it ran".to_owned()),
        };
        match exit_record::resolved(records, id).await? {
            ExitRecord::Ended(code) => return Ok((ended(code), None)),
            ExitRecord::Begun(_) => {
                if let Some(shell) = records.shell(id) {
                    if tokio::time::timeout(program.time, shell.ended()).await.is_err() {
                        kill_group(&shell);
                        return Ok((Ended::TooLong("its output is lost".to_owned()), None));
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
        program.env.variables.push((exit_record::VARIABLE.to_owned(), id.to_owned()));
        let record = (records.clone(), id.to_owned());
        let (ended, output) = run(program, Some(record), group).await?;
        fail::point("command-ended");
        Ok((ended, Some(output)))
    }
}
