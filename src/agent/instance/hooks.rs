//! Hooks of an instance: `before_start` before every launch, `before_stop` and `after_start` around an operation.
//!
//! A hook runs as the spec's user, in the sandbox and with the environment of the process, below a recording shell. After
//! a kill of the agent the next one waits for the same hook and does not continue in between; a hook that was killed, or
//! whose private directories are gone, runs again. So a hook runs at least once per operation, and one that has finished is
//! not repeated. It is not part of the launch's process tree: processes that it leaves behind are killed when it ends.
//!
//! `before_stop` and `after_start` run for the repair of drift only if they ask for that. A relaunch by supervision is such
//! a repair; [`ProcessRun::hook_due`](crate::agent::state::ProcessRun::hook_due) marks its `after_start` until it has ended.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;
use tracing::warn;

use super::commands::{AfterKill, CommandForm};
use super::ending::stop_signal;
use super::{InstanceTask, OpReply, done, failed};
use crate::agent::cgroup::Cgroup;
use crate::agent::environment::{LAUNCH_ID_VARIABLE, environment};
use crate::agent::error::{AgentError, LaunchError};
use crate::agent::exit_record::{ExitRecord, after_start_id, command_id, hook_id, kill_group, start_id};
use crate::agent::restart_policy::RestartEvent;
use crate::agent::sandbox::LaunchSandbox;
use crate::agent::spawn::{CommandExit, SpecCommand};
use crate::agent::start_output::with_output;
use crate::agent::tree::ProcessTree;
use crate::agent::user_files::Rights;
use crate::agent_protocol::OwnedSpec;
use crate::failpoint;
use crate::gse::codes::RowCode;
use crate::model::{AutoType, Hook, Spec};

/// The records of hooks within an operation.
const BEFORE_START: &str = "before_start";
const BEFORE_STOP: &str = "before_stop";
const AFTER_START: &str = "after_start";

/// The `after_start` of a spec, if it runs for an operation or relaunch. Runs that end by themselves have none.
pub(super) fn after_start(spec: &Spec, repairs: bool) -> Option<&Hook> {
    let hook = spec.hooks.after_start.as_ref()?;
    (spec.monitor.auto_type == AutoType::Resident && hook.applies(repairs)).then_some(hook)
}

impl InstanceTask {
    /// Whether drift is repaired: by the operation in progress, or by a relaunch.
    pub(super) fn repairs_drift(&self) -> bool {
        self.progress.operation.as_ref().is_none_or(|operation| operation.0.request.repairs)
    }

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
        let mut ended =
            Box::pin(self.run_launch_hook(spec, hook, rights, &record, sandbox, group.clone())).await;
        if earlier && spec.sandbox.private_tmp == Some(true) {
            // The earlier hook had other private directories, which no process has any more.
            self.shared.exits.remove(&record);
            ended = Box::pin(self.run_launch_hook(spec, hook, rights, &record, sandbox, group.clone())).await;
        }
        ProcessTree::of_command(&record, group, rights.account().uid()).end_leftovers().await;
        failpoint::point("hook-ended");
        self.failure_of(BEFORE_START, hook, spec, ended).map_or(Ok(()), |why| Err(failed(why)))
    }

    async fn run_launch_hook(
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

    /// Runs `before_stop` of the running process, if the operation has one. A failure is the reply of the operation.
    pub(super) async fn run_before_stop(&mut self, spec: &Arc<Spec>, op_id: &str) -> Result<(), OpReply> {
        let repairs = self.repairs_drift();
        let resident = spec.monitor.auto_type == AutoType::Resident;
        let hook = spec.hooks.before_stop.as_ref().filter(|hook| resident && hook.applies(repairs));
        let Some(hook) = hook.filter(|_| self.is_running()) else { return Ok(()) };
        let ended = Box::pin(self.run_process_hook(spec, hook, command_id(op_id, BEFORE_STOP))).await;
        match self.failure_of(BEFORE_STOP, hook, spec, ended) {
            Some(why) => Err(failed(format!("{why}; the process was not stopped"))),
            None => Ok(()),
        }
    }

    /// Ends the `before_stop` of a stop whose process ended while no agent ran.
    pub(super) async fn finish_interrupted_hook(&mut self, spec: &Spec, op_id: &str) {
        let Some(hook) = &spec.hooks.before_stop else { return };
        let record = command_id(op_id, BEFORE_STOP);
        if self.shared.exits.read(&record) == ExitRecord::Missing {
            return;
        }
        if let Some(shell) = self.shared.exits.shell(&record)
            && timeout(hook_time(spec, hook), shell.wait_exit()).await.is_err()
        {
            kill_group(&shell);
        }
        self.unwritten.exit_records.push(record.clone());
        let group = self.shared.groups.of(&record);
        ProcessTree::of_command(&record, group, self.uid_of(spec)).end(Duration::ZERO).await;
    }

    /// Runs `after_start` of a process that an operation started. A failure stops the process, and fails the start.
    pub(super) async fn finish_start(
        &mut self,
        owned: &OwnedSpec,
        op_id: Option<&str>,
        reply: OpReply,
    ) -> OpReply {
        let hook = after_start(&owned.spec, self.repairs_drift()).cloned();
        let (Some(hook), Some(op_id)) = (hook.filter(|_| reply.0 == RowCode::DONE), op_id) else {
            return reply;
        };
        // The restart policy may count the end of the process as success.
        if !self.is_running() {
            return reply;
        }
        match Box::pin(self.run_after_start(&owned.spec, &hook, command_id(op_id, AFTER_START))).await {
            Ok(()) => reply,
            Err(failure) => failure,
        }
    }

    /// Runs the `after_start` of a relaunch. A failure stops the process, and counts as a failed relaunch.
    pub(super) async fn finish_relaunch(&mut self) -> OpReply {
        let due = self.state.run.as_ref().filter(|run| run.hook_due && self.handle.is_some());
        let Some((live, launch_id)) = due.map(|run| (run.live.clone(), run.incarnation.clone())) else {
            return done();
        };
        let Some(hook) = after_start(&live.spec, true).cloned() else { return done() };
        let record = after_start_id(&launch_id);
        if let Err(failure) = Box::pin(self.run_after_start(&live.spec, &hook, record)).await {
            return failure;
        }
        if let Some(run) = &mut self.state.run {
            run.hook_due = false;
        }
        // A relaunch has no operation, and its message no reader.
        self.progress.ignored_failures.clear();
        self.write(None).await;
        done()
    }

    /// Continues the `after_start` of a relaunch that an earlier agent began.
    pub(super) async fn resume_relaunch(&mut self) {
        if self.handle.is_none() || !self.state.run.as_ref().is_some_and(|run| run.hook_due) {
            return;
        }
        // Report first: the hook may take long.
        self.report();
        let (code, message) = self.finish_relaunch().await;
        if code != RowCode::DONE {
            self.state.message = message;
            self.apply_restart_policy(RestartEvent::Ended { up_ms: 0 }).await;
        }
    }

    async fn run_after_start(
        &mut self,
        spec: &Arc<Spec>,
        hook: &Hook,
        record: String,
    ) -> Result<(), OpReply> {
        let ended = self.run_process_hook(spec, hook, record).await;
        let Some(why) = self.failure_of(AFTER_START, hook, spec, ended) else {
            // The process may have ended while the hook ran.
            let reply = self.stays_running(Duration::ZERO).await;
            return if reply.0 == RowCode::DONE { Ok(()) } else { Err(reply) };
        };
        warn!(instance = %self.key, %why, "start failed: stopping the process");
        let Some(live) = self.state.run.as_ref().map(|run| run.live.clone()) else {
            return Err((RowCode::CHECK_FAILED, why));
        };
        // Not by stop_cmd: its record may be that of the stop of the same restart.
        let (code, message) = self.stop_process(&live, None, stop_signal(&live.spec), Ok("")).await;
        Err((
            RowCode::CHECK_FAILED,
            match code {
                RowCode::DONE => format!("{why}; the process was stopped"),
                _ => format!("{why}; {message}"),
            },
        ))
    }

    /// Runs a hook next to the running process, which is reaped if it ends.
    async fn run_process_hook(
        &mut self,
        spec: &Arc<Spec>,
        hook: &Hook,
        record: String,
    ) -> Result<CommandExit, AgentError> {
        let group = self.shared.groups.make(&record, spec);
        let uid = self.uid_of(spec);
        let form = CommandForm { time: hook_time(spec, hook), after_kill: AfterKill::RunAgain };
        // The id of the hook, not of the launch: its processes do not belong to the tree of the process.
        let launch = Some((record.as_str(), group.clone()));
        let running = self.handle.take();
        let ending = self.command_in(spec, &hook.run, Some(record.clone()), launch, form);
        let ended = match &running {
            Some(handle) => handle.reaping(ending).await,
            None => ending.await,
        };
        self.handle = running;
        ProcessTree::of_command(&record, group, uid).end_leftovers().await;
        failpoint::point("hook-ended");
        ended
    }

    /// The failure of a hook, unless its spec ignores it. An ignored failure is noted for the reply.
    fn failure_of(
        &mut self,
        name: &str,
        hook: &Hook,
        spec: &Spec,
        ended: Result<CommandExit, AgentError>,
    ) -> Option<String> {
        let why = match ended {
            Ok(CommandExit::Success) => return None,
            Ok(CommandExit::Failure(code, output)) => {
                with_output(&format!("{name} ended with {code}"), &output)
            }
            Ok(CommandExit::TimedOut(output)) => {
                let secs = hook_time(spec, hook).as_secs();
                with_output(&format!("{name} timed out after {secs} s"), &output)
            }
            Err(why) => format!("{name}: {}", String::from(why)),
        };
        if hook.aborts() {
            return Some(why);
        }
        warn!(instance = %self.key, %why, "failed hook ignored");
        self.progress.ignored_failures.push(why);
        None
    }
}

fn hook_time(spec: &Spec, hook: &Hook) -> Duration {
    Duration::from_secs(hook.seconds(&spec.monitor).into())
}
