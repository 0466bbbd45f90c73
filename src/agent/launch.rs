//! Launches of an instance: a foreground process as the agent's child, a daemon by its start_cmd and its pid file.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tracing::warn;

use super::cgroup::Cgroup;
use super::exit_record::{ExitRecord, start_id};
use super::instance::{AgentContext, InstanceTask, OpReply, failed};
use super::operations::POLL_INTERVAL;
use super::ownership::{self, InterruptedLaunch, LaunchEvidence};
use super::process::{ProcessHandle, ticks_since_boot};
use super::spawn::{CommandExit, Environment, Launch, Sink, SpecCommand, environment, ignored_variables};
use super::user_files::{FileWork, Rights};
use crate::gse::agent_protocol::OwnedSpec;
use crate::gse::codes::RowCode;
use crate::model::{AutoType, Monitor, Spec, StartMode};

impl InstanceTask {
    /// Launches the process of a spec, and holds it.
    pub(super) async fn begin(
        &mut self,
        held: &OwnedSpec,
        incarnation: &str,
        group: Option<Cgroup>,
    ) -> Result<ProcessHandle, OpReply> {
        let spec = &held.spec;
        let Some(command) = spec.control.start_cmd.clone() else {
            return Err(failed("its spec has no start_cmd"));
        };
        let rights = self.shared.rights_of(spec).map_err(failed)?;
        let marks = [("ABIDE_INSTANCE", self.key.to_string()), ("ABIDE_INCARNATION", incarnation.to_owned())];
        for variable in ignored_variables(spec) {
            warn!(instance = %self.key, ?variable, "spec variable ignored: the agent sets it");
        }
        let env = environment(spec, &rights, &marks).await.map_err(failed)?;
        let pid_file = PathBuf::from(&spec.identity.pid_path);
        // A process that ends is the agent's child in any case, so that its end and its code are known.
        let resident = spec.monitor.auto_type == AutoType::Resident;
        match if resident { spec.control.start_mode.unwrap_or_default() } else { StartMode::Foreground } {
            StartMode::Foreground => {
                let log = spec.identity.log_path.as_ref();
                let launch = Launch {
                    command,
                    folder: PathBuf::from(&spec.identity.setup_path),
                    rights,
                    env: env.variables,
                    output: log
                        .map_or(Sink::Nowhere, |path| Sink::Log(path.into(), self.key.name.to_string())),
                    record: (!resident).then(|| (self.shared.exits.clone(), incarnation.to_owned())),
                    pid_file: Some(pid_file),
                    group,
                };
                launch.spawn().await.map_err(failed)
            }
            StartMode::Daemon => {
                let make = move |rights: &Rights| rights.make_parents("pid_path", &pid_file);
                // Where the user cannot create the directory, the daemon fails with its own message.
                let _ = rights.run(FileWork::PidFile, "create the directory of pid_path", make).await;
                self.begin_daemon(spec, &rights, &command, env, (incarnation, group)).await
            }
        }
    }

    /// Runs a daemon's start_cmd, and holds the process that its pid file names, with proof.
    async fn begin_daemon(
        &mut self,
        spec: &Spec,
        rights: &Rights,
        command: &str,
        env: Environment,
        (incarnation, group): (&str, Option<Cgroup>),
    ) -> Result<ProcessHandle, OpReply> {
        let shared = Arc::clone(&self.shared);
        let time = Duration::from_secs(spec.monitor.op_timeout.unwrap_or(Monitor::OP_TIMEOUT).into());
        let permit = shared.commands.acquire(rights.account().uid()).await;
        let of_launch = shared.groups.of(incarnation);
        let evidence = LaunchEvidence {
            launch_id: incarnation,
            group: of_launch.as_ref(),
            since: ticks_since_boot(),
            replaces: None,
        };
        let folder = Path::new(&spec.identity.setup_path);
        let program = SpecCommand { command, folder, rights, env, time };
        let record = start_id(incarnation);
        if is_cut_off(&shared, spec, &evidence, &record).await {
            warn!(instance = %self.key, "start_cmd was killed with the agent, and its processes run: not run again");
            self.records.push(record);
        } else {
            let (ended, output) = self.run_recorded(&record, program, group).await.map_err(failed)?;
            self.output = output;
            match ended {
                CommandExit::Success => {}
                CommandExit::Failure(code, output) => {
                    return Err(failed(format!("start_cmd ended with {code}: {output}")));
                }
                CommandExit::TimedOut(output) => {
                    return Err(failed(format!("start_cmd took longer than {} s: {output}", time.as_secs())));
                }
            }
        }
        drop(permit);
        let secs = spec.monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS);
        let until = tokio::time::Instant::now() + Duration::from_secs(secs.into());
        loop {
            let why = match ownership::claim_launched(spec, rights, &evidence).await {
                Ok((hold, _)) => return Ok(hold),
                Err(why) => why,
            };
            if tokio::time::Instant::now() >= until {
                return Err((RowCode::CHECK_FAILED, format!("process did not come up: {why}")));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

/// Was the shell of a start command killed, and does a process of that launch still run? Another run would bring up a
/// second daemon.
async fn is_cut_off(shared: &AgentContext, spec: &Spec, evidence: &LaunchEvidence<'_>, record: &str) -> bool {
    let has_begun = matches!(shared.exits.read(record), ExitRecord::Begun(_));
    if !has_begun || shared.exits.shell(record).is_some() || shared.exits.code(record).is_some() {
        return false;
    }
    let launch = InterruptedLaunch { launch_id: evidence.launch_id, spec, group: evidence.group.cloned() };
    !ownership::find_interrupted(shared, &[launch]).await.is_empty()
}
