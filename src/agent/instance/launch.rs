//! Launch of an instance: a foreground process as a child of the agent, a daemon by its start_cmd and pid file.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tracing::warn;

use super::adoption::not_owned;
use super::commands::AfterKill;
use super::handover::StartWait;
use super::operations::POLL_INTERVAL;
use super::{InstanceTask, OpReply, failed};
use crate::agent::cgroup::Cgroup;
use crate::agent::context::AgentContext;
use crate::agent::env_exec;
use crate::agent::environment::{LAUNCH_ID_VARIABLE, environment, ignored_variables};
use crate::agent::error::{AgentError, LaunchError};
use crate::agent::exit_record::{ExitRecord, start_id};
use crate::agent::interrupted_launch::{self, InterruptedLaunch};
use crate::agent::ownership::{self, LaunchEvidence};
use crate::agent::process::{ProcessHandle, ticks_since_boot};
use crate::agent::sandbox::LaunchSandbox;
use crate::agent::spawn::{CommandExit, Launch, SpecCommand};
use crate::agent::start_output::{StartAttempt, last_lines, with_output};
use crate::agent::user_files::{FileWork, Rights};
use crate::agent_protocol::OwnedSpec;
use crate::gse::codes::RowCode;
use crate::model::{AutoType, Monitor, Spec, StartMode};

/// The checks of a launch.
#[derive(Clone, Copy)]
pub(super) struct LaunchChecks {
    /// The start check follows. The output of a foreground process without a log is captured, for the message of a failed
    /// start.
    pub start: bool,
    /// A foreign process under the identity refuses the launch of a foreground process.
    pub foreign: bool,
}

impl LaunchChecks {
    pub(super) const NONE: LaunchChecks = LaunchChecks { start: false, foreign: false };
    pub(super) const START: LaunchChecks = LaunchChecks { start: true, foreign: false };
}

/// Whether the agent writes the pid file during the launch, before any command of the spec has run. It then notices a
/// foreign process by the existing file, and needs no check before the launch.
pub(super) fn has_pid_file_of_agent(spec: &Spec) -> bool {
    let is_foreground = spec.control.start_mode.unwrap_or_default() == StartMode::Foreground;
    is_foreground && spec.hooks.before_start.is_none()
}

impl InstanceTask {
    /// Launches the process of a spec, and opens a handle on it.
    pub(super) async fn begin(
        &mut self,
        owned: &OwnedSpec,
        launch_id: &str,
        op_id: Option<&str>,
        group: Option<Cgroup>,
        checks: LaunchChecks,
    ) -> Result<ProcessHandle, OpReply> {
        let spec = &owned.spec;
        let Some(command) = spec.control.start_cmd.clone() else {
            return Err(failed("the spec has no start_cmd"));
        };
        let rights = self.shared.rights_of(spec).map_err(|error| failed(AgentError::from(error)))?;
        let variables =
            [("ABIDE_INSTANCE", self.key.to_string()), (LAUNCH_ID_VARIABLE, launch_id.to_owned())];
        for variable in ignored_variables(spec) {
            warn!(instance = %self.key, ?variable, "spec variable ignored: the agent sets it");
        }
        let sandbox = Box::pin(LaunchSandbox::of_launch(spec, &rights)).await;
        let sandbox = sandbox.map_err(|error| failed(AgentError::from(LaunchError::from(error))))?;
        self.run_before_start(spec, &rights, launch_id, op_id, &sandbox).await?;
        // Read after the hook, which may write the files.
        let env = environment(spec, &rights, &variables).await;
        let mut env = env.map_err(|error| failed(AgentError::from(error)))?;
        if env_exec::has_any(spec) {
            let given = Box::pin(env_exec::values(&self.shared, spec, &rights, &env, &sandbox)).await;
            env.add_secrets(given.map_err(|error| failed(AgentError::from(error)))?);
        }
        let pid_file =
            Some(PathBuf::from(&spec.identity.pid_path)).filter(|path| !path.as_os_str().is_empty());
        let folder = Path::new(&spec.identity.setup_path);
        let time = Duration::from_secs(spec.monitor.op_timeout.unwrap_or(Monitor::OP_TIMEOUT).into());
        // One-shots and scheduled runs are always children of the agent, so that their exit code is known.
        let resident = spec.monitor.auto_type == AutoType::Resident;
        match if resident { spec.control.start_mode.unwrap_or_default() } else { StartMode::Foreground } {
            StartMode::Foreground => {
                // A start check of 0 s only waits for the program: it shows no output.
                let captures = checks.start && resident && spec.monitor.start_check_secs != Some(0);
                let output = self.foreground_output(spec, launch_id, &rights, env.secrets, captures);
                let output = Box::pin(output).await?;
                let launch = Launch {
                    command,
                    folder: folder.to_owned(),
                    rights,
                    env: env.variables,
                    output,
                    record: (!resident).then(|| (self.shared.exits.clone(), launch_id.to_owned())),
                    pid_file,
                    foreign: (checks.foreign && resident).then(|| Arc::clone(spec)),
                    group,
                    sandbox,
                };
                let launched = launch.spawn().await;
                if let Ok(handle) = &launched {
                    self.shared.logs.files().write_pid(&self.key, spec, handle.identity.pid);
                }
                launched.map_err(|error| {
                    (self.progress.attempt, self.output) = (None, None);
                    self.progress.is_refused =
                        matches!(error, LaunchError::Foreign(_) | LaunchError::MayBeForeign(_));
                    match error {
                        LaunchError::Foreign(pid) => (RowCode::ALREADY_RUNNING, not_owned(pid)),
                        LaunchError::MayBeForeign(why) => {
                            failed(format!("not started: {}", AgentError::from(*why)))
                        }
                        error => failed(AgentError::from(error)),
                    }
                })
            }
            StartMode::Daemon => {
                let pid_file = pid_file.unwrap_or_default();
                let make = move |rights: &Rights| rights.make_parents("pid_path", &pid_file);
                // Where the user cannot create the directory, the daemon fails with its own message.
                let _ = rights.run(FileWork::PidFile, "create the directory of pid_path", make).await;
                let program = SpecCommand { command: &command, folder, rights: &rights, env, time, sandbox };
                Box::pin(self.begin_daemon(spec, program, (launch_id, group))).await
            }
        }
    }

    /// Runs a daemon's start_cmd, and claims the process that its pid file names, with proof.
    async fn begin_daemon(
        &mut self,
        spec: &Spec,
        program: SpecCommand<'_>,
        (launch_id, group): (&str, Option<Cgroup>),
    ) -> Result<ProcessHandle, OpReply> {
        let shared = Arc::clone(&self.shared);
        let (rights, time) = (program.rights, program.time);
        let permit = shared.commands.acquire(rights.account().uid()).await;
        let of_launch = shared.groups.of(launch_id);
        let evidence = LaunchEvidence {
            launch_id,
            group: of_launch.as_ref(),
            since: ticks_since_boot(),
            replaces: None,
        };
        self.progress.attempt =
            Some(Box::new(StartAttempt { log: None, secrets: program.env.secrets.clone() }));
        let record = start_id(launch_id);
        if is_interrupted(&shared, spec, &evidence, &record).await {
            warn!(instance = %self.key, "start_cmd not repeated: it was killed with the agent, and processes of its launch still run");
            self.unwritten.exit_records.push(record);
        } else {
            let ran = self.run_recorded(&record, program, group, AfterKill::RunAgain).await;
            let (ended, output) = ran.map_err(failed)?;
            self.output = output;
            match ended {
                CommandExit::Success => {}
                CommandExit::Failure(code, output) => {
                    self.store_failed_output(launch_id, &output);
                    let failure = format!("start_cmd ended with {code}");
                    return Err(failed(with_output(&failure, &last_lines(&output))));
                }
                CommandExit::TimedOut(output) => {
                    self.store_failed_output(launch_id, &output);
                    let failure = format!("start_cmd timed out after {} s", time.as_secs());
                    return Err(failed(with_output(&failure, &last_lines(&output))));
                }
            }
        }
        drop(permit);
        let mut wait = StartWait::begin(spec);
        loop {
            let why = match ownership::claim_launched(spec, rights, &evidence).await {
                Ok((handle, _)) => return Ok(handle),
                Err(why) => why,
            };
            if !wait.goes_on(spec, rights, &evidence).await {
                let output = self.start_output().await;
                return Err((RowCode::CHECK_FAILED, format!("process did not start: {why}{output}")));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

/// Whether the shell of a start_cmd was killed and a process of that launch still runs. Repeating start_cmd would start a
/// second daemon.
async fn is_interrupted(
    shared: &AgentContext,
    spec: &Spec,
    evidence: &LaunchEvidence<'_>,
    record: &str,
) -> bool {
    let has_begun = matches!(shared.exits.read(record), ExitRecord::Begun(_));
    if !has_begun || shared.exits.shell(record).is_some() || shared.exits.code(record).is_some() {
        return false;
    }
    let launch = InterruptedLaunch { launch_id: evidence.launch_id, spec, group: evidence.group.cloned() };
    !interrupted_launch::find_interrupted(shared, &[launch]).await.is_empty()
}
