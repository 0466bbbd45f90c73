//! Hooks of a launch: `before_start`, which runs before every launch, also one by supervision.
//!
//! The hook runs as the spec's user, in the sandbox and with the environment of the process, below a recording shell. After
//! a kill of the agent the next one waits for the same hook and does not launch in between; a hook that was killed, or whose
//! private directories are gone, runs again. So a hook runs at least once per launch. It is not part of the launch's
//! process tree: processes that it leaves behind are killed before the launch.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::commands::AfterKill;
use super::{InstanceTask, OpReply, failed};
use crate::agent::cgroup::Cgroup;
use crate::agent::environment::{LAUNCH_ID_VARIABLE, environment};
use crate::agent::error::{AgentError, LaunchError};
use crate::agent::exit_record::{ExitRecord, command_id, hook_id, start_id};
use crate::agent::sandbox::LaunchSandbox;
use crate::agent::spawn::{CommandExit, SpecCommand};
use crate::agent::tree::ProcessTree;
use crate::agent::user_files::Rights;
use crate::failpoint;
use crate::model::{Hook, Spec};

/// The record of a hook within an operation.
const BEFORE_START: &str = "before_start";

impl InstanceTask {
    /// Runs `before_start`, if the spec has it. A failure is the reply of the launch.
    pub(super) async fn run_before_start(
        &mut self,
        spec: &Spec,
        rights: &Rights,
        launch_id: &str,
        op_id: Option<&str>,
        sandbox: &LaunchSandbox,
    ) -> Result<(), OpReply> {
        let Some(hook) = &spec.hooks.before_start else { return Ok(()) };
        // A resumed daemon launch whose start_cmd has begun is past its hook.
        if self.shared.exits.read(&start_id(launch_id)) != ExitRecord::Missing {
            return Ok(());
        }
        let record = match op_id {
            Some(op_id) => command_id(op_id, BEFORE_START),
            None => hook_id(launch_id),
        };
        let shared = Arc::clone(&self.shared);
        let _permit = shared.commands.acquire(rights.account().uid()).await;
        let group = shared.groups.make(&record, spec);
        let earlier = self.shared.exits.read(&record) != ExitRecord::Missing;
        let mut ended = self.run_hook(spec, hook, rights, &record, sandbox, group.clone()).await;
        if earlier && spec.sandbox.private_tmp == Some(true) {
            // The earlier hook had other private directories, which no process has any more.
            self.shared.exits.remove(&record);
            ended = self.run_hook(spec, hook, rights, &record, sandbox, group.clone()).await;
        }
        ProcessTree::of_command(&record, group, rights.account().uid()).end_leftovers().await;
        failpoint::point("hook-ended");
        let time = hook_time(spec, hook);
        match ended {
            Ok(CommandExit::Success) => Ok(()),
            Ok(CommandExit::Failure(code, output)) => {
                Err(failed(format!("before_start ended with {code}: {output}")))
            }
            Ok(CommandExit::TimedOut(output)) => {
                Err(failed(format!("before_start timed out after {} s: {output}", time.as_secs())))
            }
            Err(why) => Err(failed(format!("before_start: {}", String::from(why)))),
        }
    }

    async fn run_hook(
        &mut self,
        spec: &Spec,
        hook: &Hook,
        rights: &Rights,
        record: &str,
        sandbox: &LaunchSandbox,
        group: Option<Cgroup>,
    ) -> Result<CommandExit, AgentError> {
        // The id of the hook, not of the launch: a process of the hook is never taken for the launched one.
        let variables = [("ABIDE_INSTANCE", self.key.to_string()), (LAUNCH_ID_VARIABLE, record.to_owned())];
        let env = match environment(spec, rights, &variables).await {
            // The hook may create env_file. The launch reads it after the hook, and fails if it is still missing.
            Err(LaunchError::Files(error)) if spec.env_file.is_some() && error.is_missing() => {
                let spec = Spec { env_file: None, ..spec.clone() };
                environment(&spec, rights, &variables).await?
            }
            env => env?,
        };
        let program = SpecCommand {
            command: &hook.run,
            folder: Path::new(&spec.identity.setup_path),
            rights,
            env,
            time: hook_time(spec, hook),
            sandbox: sandbox.clone(),
        };
        self.run_recorded(record, program, group, AfterKill::RunAgain).await.map(|(ended, _)| ended)
    }
}

fn hook_time(spec: &Spec, hook: &Hook) -> Duration {
    Duration::from_secs(hook.seconds(&spec.monitor).into())
}
