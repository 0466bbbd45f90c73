//! Operations on an instance: start, stop, kill, restart and reload of a real process, with GSE's result codes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::adoption::not_owned;
use super::{InstanceTask, Monitors, OpReply, done, failed};
use crate::agent::cgroup::Cgroup;
use crate::agent::error::AgentError;
use crate::agent::exit_record::command_id;
use crate::agent::fresh_id;
use crate::agent::output::Output;
use crate::agent::ownership::{self, LaunchEvidence, OwnershipProof};
use crate::agent::process::boot_id;
use crate::agent::restart_policy::{RestartEvent, RestartSeries};
use crate::agent::spawn::CommandExit;
use crate::agent::state::{LaunchIntent, ProcessRun, intent_key};
use crate::agent::user_files::Rights;
use crate::agent_protocol::OwnedSpec;
use crate::clock;
use crate::failpoint;
use crate::gse::codes::RowCode;
use crate::model::{AutoType, Field, Monitor, Spec, StartMode};
use crate::store::{Store, Txn};

/// Default wait for a stop, in seconds.
const STOP_SECS: u32 = 10;
/// Maximum remaining start check of a resumed operation: a stop that arrived in the meantime waits for it.
const RESUMED_CHECK: Duration = Duration::from_secs(10);
/// Maximum wait for a process to end after SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between two reads of a pid file while a daemon starts.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(20);

impl InstanceTask {
    pub(super) fn is_running(&self) -> bool {
        self.handle.is_some()
    }

    /// Whether this operation already launched the running process, under an agent that was killed since.
    fn launched_by(&self, op_id: Option<&str>) -> bool {
        let by = self.state.run.as_ref().and_then(|run| run.by.as_deref());
        self.is_running() && by.is_some() && by == op_id
    }

    pub(super) async fn start(&mut self, owned: &OwnedSpec, op_id: Option<String>) -> OpReply {
        if self.launched_by(op_id.as_deref()) {
            let reply = self.check_after_launch(owned).await;
            if reply.0 == RowCode::DONE {
                (self.state.given, self.state.hosted) = (Some(owned.clone()), true);
            }
            return reply;
        }
        // A launch that an earlier agent began is continued: its process must not be taken for a foreign one.
        let is_continued = self.interrupted.as_ref().is_some_and(|intent| intent.op_id == op_id);
        if !is_continued && let Err(why) = self.reclaim_orphan(owned).await {
            return failed(format!("nothing was started: {why}"));
        }
        if self.is_running() {
            // A reclaimed daemon of an earlier launch: register and supervise it.
            if self.state.given.is_none() {
                (self.state.given, self.state.hosted) = (Some(owned.clone()), true);
            }
            return (RowCode::ALREADY_RUNNING, "process is already running".to_owned());
        }
        match if is_continued { Ok(None) } else { self.foreign_pid(owned).await } {
            Ok(None) => {}
            Ok(Some(pid)) => return (RowCode::ALREADY_RUNNING, not_owned(pid)),
            Err(why) => return failed(format!("nothing was started: {why}")),
        }
        self.series = RestartSeries::default();
        let (given, hosted) = (self.state.given.clone(), self.state.hosted);
        let reply = self.launch(owned, op_id, true).await;
        // A failed start restores the registered spec and the supervision.
        (self.state.given, self.state.hosted) = match reply.0 {
            RowCode::DONE => (Some(owned.clone()), true),
            _ => (given, hosted),
        };
        self.launch_failed = reply.0 != RowCode::DONE;
        reply
    }

    /// Relaunches a supervised process that a failed operation left stopped, with its former spec. Called after the result
    /// is written: the relaunch does not belong to the operation.
    pub(super) async fn supervise_after_failure(&mut self) {
        let failed = std::mem::take(&mut self.launch_failed);
        if failed && self.state.hosted && !self.state.dormant && !self.is_running() {
            self.apply_restart_policy(RestartEvent::Ended { up_ms: 0 }).await;
        }
    }

    /// Launches the process. `check`: waits for the start check.
    pub(super) async fn launch(&mut self, owned: &OwnedSpec, op_id: Option<String>, check: bool) -> OpReply {
        if let Err(refused) = self.shared.check_policy(&self.key, &owned.spec).await {
            return failed(refused);
        }
        // The launch id of a relaunch by supervision, or of a resumed launch, is in the store already. Any other launch id
        // is written before the spawn: the next agent must find the process if this one is killed in between.
        let resumed = self.interrupted.take().filter(|intent| intent.op_id == op_id);
        let reserved = if op_id.is_none() { self.state.next.take() } else { None };
        let launch_id = resumed.map(|intent| intent.incarnation).or(reserved);
        let written = launch_id.is_some();
        let incarnation = launch_id.unwrap_or_else(fresh_id);
        let groups = &self.shared.groups;
        let group = groups.make(&incarnation, &owned.spec.resource);
        let path = group.as_ref().map(Cgroup::path);
        let boot = boot_id().to_owned();
        let intent =
            LaunchIntent { incarnation, op_id, held: owned.clone(), at: clock::now().0, group: path, boot };
        if !written {
            let value = serde_json::to_vec(&intent).unwrap_or_default();
            let txn = Txn::put(intent_key(&self.key), value).and(self.pending());
            if let Err(error) = self.shared.store.txn(txn).await {
                return failed(format!("not started: cannot write the agent's store: {error}"));
            }
        }
        failpoint::point("intent-written");
        let process = match self.begin(owned, &intent.incarnation, group.clone()).await {
            Ok(handle) => handle,
            Err(reply) => {
                group.into_iter().for_each(Cgroup::clear);
                return reply;
            }
        };
        failpoint::point("born");
        let LaunchIntent { incarnation, op_id: by, group, .. } = intent;
        (self.state.dormant, self.state.unknown_run) = (false, None);
        let (identity, live) = (process.identity.clone(), owned.clone());
        let output = self.output.as_ref().and_then(Output::inode);
        self.state.run = Some(ProcessRun { identity, live, by, incarnation, group, output });
        (self.state.since, self.state.started, self.state.exit) = (clock::now().0, clock::now().0, None);
        (self.launched, *self.monitors) = (Some(Instant::now()), Monitors::default());
        self.state.message.clear();
        if owned.spec.monitor.auto_type == AutoType::OneShot {
            self.state.ran = Some(owned.clone());
        }
        self.handle = Some(process);
        self.write(None).await;
        failpoint::point("row-written");
        self.report();
        let secs = owned.spec.monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS);
        if !check || owned.spec.monitor.auto_type != AutoType::Resident {
            return done();
        }
        self.stays_running(Duration::from_secs(secs.into())).await
    }

    /// Finishes the start check of a process that this operation launched before the agent restarted.
    async fn check_after_launch(&mut self, owned: &OwnedSpec) -> OpReply {
        let secs = owned.spec.monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS);
        if owned.spec.monitor.auto_type != AutoType::Resident {
            return done();
        }
        let passed = u64::try_from(clock::now().0.saturating_sub(self.state.started)).unwrap_or(0);
        let rest = Duration::from_secs(secs.into()).saturating_sub(Duration::from_millis(passed));
        self.stays_running(rest.min(RESUMED_CHECK)).await
    }

    /// Waits for the start check: the process must not end within `time`.
    async fn stays_running(&mut self, time: Duration) -> OpReply {
        let Some(handle) = &self.handle else { return failed("process is gone") };
        let Ok(code) = tokio::time::timeout(time, handle.wait_exit()).await else { return done() };
        self.record_exit(code).await;
        let code = code.map_or("an unknown code".to_owned(), |code| format!("code {code}"));
        (RowCode::CHECK_FAILED, format!("process ended with {code} within {} s", time.as_secs()))
    }

    pub(super) async fn stop(&mut self, owned: &OwnedSpec, op_id: &str) -> OpReply {
        self.stop_by_operation(owned, owned.spec.control.stop_cmd.as_deref(), Signal::TERM, op_id).await
    }

    pub(super) async fn kill(&mut self, owned: &OwnedSpec, op_id: &str) -> OpReply {
        self.stop_by_operation(owned, owned.spec.control.kill_cmd.as_deref(), Signal::KILL, op_id).await
    }

    /// Whether this operation already stopped the process, under an agent that was killed since.
    fn ended_by(&self, op_id: Option<&str>) -> bool {
        !self.is_running() && op_id.is_some() && self.state.ending.as_deref() == op_id
    }

    /// Stops the process and its supervision. Supervision is restored if the stop fails.
    async fn stop_by_operation(
        &mut self,
        owned: &OwnedSpec,
        command: Option<&str>,
        signal: Signal,
        op_id: &str,
    ) -> OpReply {
        if self.ended_by(Some(op_id)) {
            return done();
        }
        if !self.is_running() {
            return self.not_running(owned).await;
        }
        // Written before the signal: if this agent is killed in between, the next one must not relaunch the process.
        let hosted = self.operation.as_ref().map_or(self.state.hosted, |operation| operation.0.hosted);
        self.state.hosted = false;
        self.series = RestartSeries::default();
        self.state.ending = Some(op_id.to_owned());
        // A failed write (full disk) does not prevent the stop: stopping twice is harmless.
        let pending = self.pending();
        let _ = self.write_with(None, pending).await;
        failpoint::point("unguarded");
        let reply = self.stop_process(owned, command, signal, Some(op_id)).await;
        if reply.0 != RowCode::DONE && self.is_running() {
            self.state.hosted = hosted;
        }
        reply
    }

    /// Stops the process by its command, or by a signal and, after the wait, by SIGKILL.
    pub(super) async fn stop_process(
        &mut self,
        owned: &OwnedSpec,
        command: Option<&str>,
        signal: Signal,
        op_id: Option<&str>,
    ) -> OpReply {
        let secs = owned.spec.monitor.stop_check_secs.unwrap_or(STOP_SECS);
        let wait = Duration::from_secs(secs.into());
        let Some(handle) = self.handle.take() else { return done() };
        if let Some(command) = command {
            let record = op_id.map(|op_id| command_id(op_id, "stop"));
            let output = match self.command(&owned.spec, command, record, None).await {
                Err(error) => Some(error.into()),
                Ok(CommandExit::Success) => None,
                Ok(CommandExit::Failure(code, output)) => {
                    Some(format!("stop: the command ended with {code}: {output}"))
                }
                Ok(CommandExit::TimedOut(output)) => Some(format!("stop: the command timed out: {output}")),
            };
            let ended = tokio::time::timeout(wait, handle.wait_exit()).await;
            return match (ended, output) {
                (Ok(code), _) => {
                    self.record_exit(code).await;
                    done()
                }
                (Err(_), output) => {
                    self.handle = Some(handle);
                    match output {
                        Some(output) => failed(output),
                        None => {
                            (RowCode::CHECK_FAILED, format!("stop: process is still alive after {secs} s"))
                        }
                    }
                }
            };
        }
        let group = self.state.run.as_ref().and_then(ProcessRun::group);
        // SIGKILL goes to the whole control group: no descendant survives.
        let kill_group = || group.as_ref().is_some_and(Cgroup::kill);
        if signal == Signal::KILL {
            kill_group();
        }
        let _ = handle.signal(signal);
        failpoint::point("signalled");
        let mut ended = tokio::time::timeout(wait, handle.wait_exit()).await;
        if ended.is_err() {
            kill_group();
            let _ = handle.signal(Signal::KILL);
            ended = tokio::time::timeout(KILL_TIMEOUT, handle.wait_exit()).await;
        }
        match ended {
            Ok(code) => {
                self.record_exit(code).await;
                done()
            }
            Err(_) => {
                self.handle = Some(handle);
                (RowCode::CHECK_FAILED, "stop: process is still alive after SIGKILL".to_owned())
            }
        }
    }

    pub(super) async fn restart(&mut self, owned: &OwnedSpec, op_id: Option<String>) -> OpReply {
        if self.launched_by(op_id.as_deref()) {
            let reply = self.check_after_launch(owned).await;
            match reply.0 {
                RowCode::DONE => self.state.given = Some(owned.clone()),
                _ => self.launch_failed = true,
            }
            return reply;
        }
        let is_stopped = self.ended_by(op_id.as_deref());
        if !self.is_running() && !is_stopped {
            return self.not_running(owned).await;
        }
        let daemon = owned.spec.control.start_mode.unwrap_or_default() == StartMode::Daemon;
        if let (true, Some(command)) = (daemon, &owned.spec.control.restart_cmd) {
            let reply = self.restart_with_command(owned, command, op_id.as_deref()).await;
            if reply.0 == RowCode::DONE {
                self.state.given = Some(owned.clone());
            }
            return reply;
        }
        let live = self.state.run.as_ref().map_or_else(|| owned.clone(), |run| run.live.clone());
        if !is_stopped {
            self.state.ending.clone_from(&op_id);
            let pending = self.pending();
            if let Err(error) = self.write_with(None, pending).await {
                self.state.ending = None;
                return failed(format!("not restarted: cannot write the agent's store: {error}"));
            }
            let stop = live.spec.control.stop_cmd.as_deref();
            let reply = self.stop_process(&live, stop, Signal::TERM, op_id.as_deref()).await;
            if reply.0 != RowCode::DONE {
                return reply;
            }
            failpoint::point("down");
        }
        let (given, reply) = (self.state.given.clone(), self.launch(owned, op_id, true).await);
        match reply.0 {
            RowCode::DONE => self.state.given = Some(owned.clone()),
            _ => {
                self.state.given = given;
                self.launch_failed = true;
            }
        }
        reply
    }

    /// Restarts a daemon by its restart_cmd, which replaces the process.
    async fn restart_with_command(
        &mut self,
        owned: &OwnedSpec,
        command: &str,
        op_id: Option<&str>,
    ) -> OpReply {
        let rights = match self.shared.rights_of(&owned.spec) {
            Ok(rights) => rights,
            Err(error) => return failed(AgentError::from(error)),
        };
        self.state.ending = op_id.map(str::to_owned);
        if let Err(reply) = self.write_pending().await {
            return reply;
        }
        let (launch_id, since) = self.launch_of_operation();
        let groups = &self.shared.groups;
        let group = groups.make(&launch_id, &owned.spec.resource);
        let replaced = self.state.run.clone();
        let evidence = LaunchEvidence {
            launch_id: &launch_id,
            group: group.as_ref(),
            since,
            replaces: replaced.as_ref(),
        };
        let record = op_id.map(|op_id| command_id(op_id, "restart"));
        let reply = self.replace_with_command(owned, command, record, &rights, &evidence).await;
        // Removes an unused group. A process that a failed command left in it does not belong to the instance.
        let is_used = self.state.run.as_ref().is_some_and(|run| run.incarnation == launch_id);
        group.into_iter().filter(|_| !is_used).for_each(Cgroup::clear);
        reply
    }

    async fn replace_with_command(
        &mut self,
        owned: &OwnedSpec,
        command: &str,
        record: Option<String>,
        rights: &Rights,
        evidence: &LaunchEvidence<'_>,
    ) -> OpReply {
        let launch = Some((evidence.launch_id, evidence.group.cloned()));
        match self.command(&owned.spec, command, record, launch).await {
            Err(why) => return failed(why),
            Ok(CommandExit::Success) => {}
            Ok(CommandExit::Failure(code, output)) => {
                return failed(format!("restart_cmd ended with {code}: {output}"));
            }
            Ok(CommandExit::TimedOut(output)) => {
                return failed(format!("restart_cmd timed out: {output}"));
            }
        }
        let secs = owned.spec.monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS);
        let until = tokio::time::Instant::now() + Duration::from_secs(secs.into());
        loop {
            let why = match ownership::claim_launched(&owned.spec, rights, evidence).await {
                Ok((handle, proof)) => {
                    let (incarnation, group) = match (proof, evidence.replaces) {
                        (OwnershipProof::Replaced, Some(run)) => (run.incarnation.clone(), run.group.clone()),
                        (OwnershipProof::Replaced, None) | (OwnershipProof::Launch, _) => {
                            (evidence.launch_id.to_owned(), evidence.group.map(Cgroup::path))
                        }
                    };
                    self.state.run =
                        Some(ProcessRun { incarnation, group, ..ProcessRun::adopted(&handle, owned) });
                    (self.state.since, self.state.started, self.state.exit) =
                        (clock::now().0, clock::now().0, None);
                    // The message is about the replaced process.
                    self.state.message.clear();
                    self.handle = Some(handle);
                    return done();
                }
                Err(why) => why,
            };
            if tokio::time::Instant::now() >= until {
                return (RowCode::CHECK_FAILED, format!("no new process started after restart_cmd: {why}"));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    pub(super) async fn reload(
        &mut self,
        owned: &OwnedSpec,
        takes: Option<&[String]>,
        op_id: &str,
    ) -> OpReply {
        if !self.is_running() {
            return self.not_running(owned).await;
        }
        let Some(command) = owned.spec.control.reload_cmd.clone() else {
            return failed("the spec has no reload_cmd");
        };
        if let Err(reply) = self.write_pending().await {
            return reply;
        }
        match self.command(&owned.spec, &command, Some(command_id(op_id, "reload")), None).await {
            Err(why) => return failed(why),
            Ok(CommandExit::Success) => {}
            Ok(CommandExit::Failure(code, output)) => {
                return failed(format!("reload_cmd ended with {code}: {output}"));
            }
            Ok(CommandExit::TimedOut(output)) => {
                return failed(format!("reload_cmd timed out: {output}"));
            }
        }
        if let Some(run) = &mut self.state.run {
            // Only the reloaded fields of the spec are in effect.
            let mut live = Spec::clone(&run.live.spec);
            let usual = [Field::Configmap, Field::ConfigPath];
            let named =
                |field: &&Field| takes.is_none_or(|takes| takes.iter().any(|name| name == field.path()));
            let all: &[Field] = if takes.is_some() { Field::ALL } else { &usual };
            all.iter().filter(named).for_each(|field| live.take(*field, &owned.spec));
            let whole = live == *owned.spec;
            let revision = owned.revision.filter(|_| whole);
            run.live = OwnedSpec { spec: Arc::new(live), owner: owned.owner.clone(), revision };
        }
        self.state.given = Some(owned.clone());
        done()
    }

    /// Records the end of the process, and removes its pid file.
    pub(super) async fn record_exit(&mut self, code: Option<i32>) {
        self.clear_process(code);
        self.remove_old_pid_file().await;
    }

    /// Removes the pid file of an ended foreground process, if the file still names that process.
    pub(super) async fn remove_old_pid_file(&mut self) {
        let Some((spec, pid)) = self.old_pid_file.take() else { return };
        if let Ok(rights) = self.shared.rights_of(&spec) {
            rights.remove_pid_file(&spec.identity.pid_path, pid).await;
        }
    }

    /// Records the end of the process. The caller removes the pid file: a relaunch replaces it without waiting for that.
    pub(super) fn clear_process(&mut self, code: Option<i32>) {
        let recorded = |run: &ProcessRun| self.shared.exits.code(&run.incarnation);
        let code = code.or_else(|| self.state.run.as_ref().and_then(recorded));
        if let Some(run) = self.state.run.take() {
            // Deleted only after the state is written: an agent that is killed before that reads the record again.
            self.records.extend(Some(run.incarnation.clone()).filter(|id| !id.is_empty()));
            let spec = &run.live.spec;
            let ends = spec.monitor.auto_type != AutoType::Resident;
            let foreground = ends || spec.control.start_mode == Some(StartMode::Foreground);
            self.old_pid_file = foreground.then(|| (Arc::clone(spec), run.identity.pid));
            // Leftovers of a foreground process would block its next launch. A daemon's workers may outlive it on purpose.
            if let Some(group) = run.group().filter(|group| foreground || group.processes().is_empty()) {
                group.clear();
            }
        }
        self.shared.pools.forget(&self.key);
        (self.handle, self.output, *self.monitors) = (None, None, Monitors::default());
        (self.state.exit, self.state.since) = (code, clock::now().0);
    }
}
