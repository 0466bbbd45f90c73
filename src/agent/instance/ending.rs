//! End of a process and of its tree: the operations stop and kill, and what is left of a process that ended by itself.
//!
//! The tree of a launch is the unit: a stop is complete when no process of it is left, and a relaunch begins only then.

use std::sync::Arc;
use std::time::Duration;

use rustix::process::Signal;
use tokio::time::{Instant, timeout};
use tracing::warn;

use super::history::ExitCause;
use super::{InstanceTask, Monitors, OpReply, done, failed};
use crate::agent::cgroup::Cgroup;
use crate::agent::exit_record::{command_id, kill_group};
use crate::agent::process::{ProcessHandle, boot_id, name};
use crate::agent::reaper;
use crate::agent::restart_policy::RestartSeries;
use crate::agent::spawn::CommandExit;
use crate::agent::start_output::with_output;
use crate::agent::state::ProcessRun;
use crate::agent::tree::{KILL_TIMEOUT, KilledProcesses, LaunchRecord, LaunchTraces, ProcessTree};
use crate::agent_protocol::OwnedSpec;
use crate::clock;
use crate::failpoint;
use crate::gse::codes::RowCode;
use crate::model::{AutoType, Effect, Monitor, Spec, StartMode, difference, signal_number};

/// Method by which an operation stops a process.
struct StopForm<'a> {
    command: Option<&'a str>,
    /// Without a command.
    signal: Signal,
    /// `before_stop` runs first.
    has_hook: bool,
}

/// Default wait for a stop, in seconds.
const STOP_SECS: u32 = 10;

impl InstanceTask {
    pub(super) async fn stop(&mut self, owned: &OwnedSpec, op_id: &str) -> OpReply {
        let owned = self.spec_for_stop(owned);
        let how = StopForm {
            command: owned.spec.control.stop_cmd.as_deref(),
            signal: stop_signal(&owned.spec),
            has_hook: true,
        };
        self.stop_by_operation(&owned, how, op_id).await
    }

    pub(super) async fn kill(&mut self, owned: &OwnedSpec, op_id: &str) -> OpReply {
        let owned = self.spec_for_stop(owned);
        let command = owned.spec.control.kill_cmd.as_deref();
        self.stop_by_operation(&owned, StopForm { command, signal: Signal::KILL, has_hook: false }, op_id)
            .await
    }

    /// The spec whose commands stop the process: while a restart is pending, the one of the program that runs.
    fn spec_for_stop(&self, sent: &OwnedSpec) -> OwnedSpec {
        let Some(run) = &self.state.run else { return sent.clone() };
        let live = (&*run.live.spec, run.live.revision);
        match difference(live, (&sent.spec, sent.revision)) >= Effect::Restart {
            true => run.live.clone(),
            false => sent.clone(),
        }
    }

    /// Whether this operation already stopped the process, under an agent that was killed since.
    pub(super) fn ended_by(&self, op_id: Option<&str>) -> bool {
        !self.is_running() && op_id.is_some() && self.state.ending.as_deref() == op_id
    }

    /// Stops the process and its supervision. Supervision is restored if the stop fails.
    async fn stop_by_operation(&mut self, owned: &OwnedSpec, how: StopForm<'_>, op_id: &str) -> OpReply {
        if self.ended_by(Some(op_id)) {
            return stopped(&self.finish_interrupted_stop(op_id).await);
        }
        if !self.is_running() {
            return match self.state.unended.is_some() {
                true => self.end_earlier_launch().await.map_or_else(|reply| reply, |killed| stopped(&killed)),
                false => self.not_running(owned).await,
            };
        }
        // Written before the signal: if this agent is killed in between, the next one must not relaunch the process.
        let hosted =
            self.progress.operation.as_ref().map_or(self.state.hosted, |operation| operation.0.hosted);
        self.state.hosted = false;
        self.launches.series = RestartSeries::default();
        self.state.ending = Some(op_id.to_owned());
        // A failed write (full disk) does not prevent the stop: stopping twice is harmless.
        let pending = self.pending();
        let _ = self.write_with(None, pending).await;
        failpoint::point("unguarded");
        let StopForm { command, signal, has_hook } = how;
        let ready = if has_hook { self.run_before_stop(&owned.spec, op_id).await } else { Ok(()) };
        let reply = match ready {
            Ok(()) => self.stop_process(owned, command, signal, Ok(op_id)).await,
            Err(reply) => reply,
        };
        if reply.0 != RowCode::DONE && self.is_running() {
            self.state.hosted = hosted;
        }
        reply
    }

    /// Stops the process by its command, or by a signal and, after the wait, by SIGKILL; then ends the rest of its tree.
    /// `by`: the operation, or the exceeded limit.
    pub(super) async fn stop_process(
        &mut self,
        owned: &OwnedSpec,
        command: Option<&str>,
        signal: Signal,
        by: Result<&str, &str>,
    ) -> OpReply {
        let limit = owned.spec.control.stop_timeout;
        let secs = limit.or(owned.spec.monitor.stop_check_secs).unwrap_or(STOP_SECS);
        let wait = Duration::from_secs(secs.into());
        let Some(handle) = self.handle.take() else { return done() };
        let tree = self.tree(Some(&handle));
        let mut begun = Instant::now();
        let mut killed = KilledProcesses::default();
        let ended = match command {
            Some(command) => {
                let failure = handle.reaping(Box::pin(self.run_stop_command(owned, command, by.ok()))).await;
                begun = Instant::now();
                match timeout(wait, handle.wait_exit()).await {
                    Ok(code) => Ok(code),
                    // Without stop_timeout, a stop that fails leaves the process as it is.
                    Err(_) if limit.is_some() => kill_all(&handle, tree.as_ref(), &mut killed).await,
                    Err(_) => Err(failure.map_or_else(
                        || (RowCode::CHECK_FAILED, format!("stop: process is still alive after {secs} s")),
                        failed,
                    )),
                }
            }
            None => end_by_signal(&handle, tree.as_ref(), signal, wait, &mut killed).await,
        };
        let code = match ended {
            Ok(code) => code,
            Err(reply) => {
                self.handle = Some(handle);
                return reply;
            }
        };
        failpoint::point("main-ended");
        if let Some(tree) = tree {
            // A killed process had its time already.
            let grace = if killed.is_empty() && signal != Signal::KILL { wait } else { Duration::ZERO };
            // The descendants of a process that this agent did not launch are not its children.
            let is_own_launch = self.launches.last.is_some() && self.own_launch().is_some();
            killed.extend(match is_own_launch && self.is_tree_gone(|| Some(tree.clone())).await {
                true => KilledProcesses::default(),
                false => tree.end(grace.saturating_sub(begun.elapsed())).await,
            });
            self.record_survivors(&tree, &killed);
        }
        self.handle = Some(handle);
        let cause = by.map_or_else(|limit| ExitCause::Limit(limit.to_owned()), |_| ExitCause::Operation);
        self.clear_process(code, cause);
        self.remove_old_pid_file().await;
        stopped(&killed)
    }

    /// Runs a stop or kill command in the launch of the process. Returns the reason of a failure.
    async fn run_stop_command(
        &mut self,
        owned: &OwnedSpec,
        command: &str,
        op_id: Option<&str>,
    ) -> Option<String> {
        let record = op_id.map(|op_id| command_id(op_id, "stop"));
        let launch = self.own_launch();
        let launch = launch.as_ref().map(|(launch_id, group)| (launch_id.as_str(), group.clone()));
        match self.command(&owned.spec, command, record, launch).await {
            Err(why) => Some(why.into()),
            Ok(CommandExit::Success) => None,
            Ok(CommandExit::Failure(code, output)) => {
                Some(with_output(&format!("stop: the command ended with {code}"), &output))
            }
            Ok(CommandExit::TimedOut(output)) => Some(with_output("stop: the command timed out", &output)),
        }
    }

    /// Completes a stop whose process ended while no agent ran: waits for its command, and ends the rest of the tree.
    pub(super) async fn finish_interrupted_stop(&mut self, op_id: &str) -> KilledProcesses {
        let Some(spec) = self.state.run.as_ref().map(|run| Arc::clone(&run.live.spec)) else {
            return KilledProcesses::default();
        };
        self.finish_interrupted_hook(&spec, op_id).await;
        let secs = spec.monitor.op_timeout.unwrap_or(Monitor::OP_TIMEOUT);
        if let Some(shell) = self.shared.exits.shell(&command_id(op_id, "stop"))
            && timeout(Duration::from_secs(secs.into()), shell.wait_exit()).await.is_err()
        {
            kill_group(&shell);
        }
        let killed = self.end_tree().await;
        self.record_exit(None, ExitCause::Operation).await;
        killed
    }

    /// Launch id and control group of the process, in which its commands run: their descendants belong to its tree.
    /// `None`: the agent did not launch the process.
    pub(super) fn own_launch(&self) -> Option<(String, Option<Cgroup>)> {
        let run = self.state.run.as_ref().filter(|run| !run.incarnation.is_empty())?;
        Some((run.incarnation.clone(), run.group()))
    }

    /// The tree of the process.
    pub(super) fn tree(&self, held: Option<&ProcessHandle>) -> Option<ProcessTree> {
        let run = self.state.run.as_ref()?;
        Some(ProcessTree::of(run, held, run.uid.or_else(|| self.uid_of(&run.live.spec))))
    }

    /// The user id of a spec's account, as it is resolved now.
    pub(super) fn uid_of(&self, spec: &Spec) -> Option<u32> {
        self.shared.rights_of(spec).ok().map(|rights| rights.account().uid())
    }

    /// Whether nothing of the tree is left after the end of its main process. Cheap if no process of this agent's launches
    /// is an orphan.
    pub(super) async fn has_ended_with_tree(&self) -> bool {
        self.is_tree_gone(|| self.tree(self.handle.as_ref())).await
    }

    async fn is_tree_gone(&self, tree: impl FnOnce() -> Option<ProcessTree>) -> bool {
        let Some(run) = &self.state.run else { return true };
        if run.group().is_some_and(|group| !group.remove_if_empty()) {
            return false;
        }
        // Orphans of a launch of this agent are its children; those of an earlier agent may be children of pid 1.
        match self.launches.last.is_some() && !run.incarnation.is_empty() {
            true if reaper::orphans().is_empty() => true,
            true => match tree() {
                Some(tree) => !tree.may_have_orphans().await,
                None => true,
            },
            false => run.incarnation.is_empty() && run.traces.observed.is_empty(),
        }
    }

    /// Kills what is left of the tree after the end of its main process.
    pub(super) async fn end_tree(&mut self) -> KilledProcesses {
        if self.has_ended_with_tree().await {
            return KilledProcesses::default();
        }
        let Some(tree) = self.tree(self.handle.as_ref()) else { return KilledProcesses::default() };
        let killed = tree.end(Duration::ZERO).await;
        if !killed.is_empty() {
            warn!(instance = %self.key, "process ended, and {killed}");
        }
        self.record_survivors(&tree, &killed);
        killed
    }

    /// Records a launch some of whose processes are still alive, so that nothing is launched before they have ended.
    fn record_survivors(&mut self, tree: &ProcessTree, killed: &KilledProcesses) {
        let has_survivors = killed.survivors().is_some();
        self.state.unended = has_survivors.then(|| Box::new(tree.launch().clone()));
    }

    /// Ends the processes that an earlier launch left behind. An error: they are still alive, and nothing may be launched.
    pub(super) async fn end_earlier_launch(&mut self) -> Result<KilledProcesses, OpReply> {
        let Some(launch) = self.state.unended.clone() else { return Ok(KilledProcesses::default()) };
        let tree = ProcessTree::of_launch(*launch);
        let killed = tree.end(Duration::ZERO).await;
        self.record_survivors(&tree, &killed);
        match killed.survivors() {
            None => Ok(killed),
            Some(survivors) => {
                let message =
                    format!("processes of an earlier launch are still alive after SIGKILL: {survivors}");
                Err((RowCode::CHECK_FAILED, message))
            }
        }
    }

    /// Ends the processes of a launch that failed, before the failure is reported.
    pub(super) async fn end_failed_launch(
        &mut self,
        uid: Option<u32>,
        (launch_id, group): (String, Option<String>),
        traces: LaunchTraces,
        (code, message): OpReply,
    ) -> OpReply {
        let tree = ProcessTree::of_launch(LaunchRecord {
            boot: boot_id().to_owned(),
            launch_id,
            group,
            uid,
            traces,
        });
        let killed = tree.end(Duration::ZERO).await;
        if !killed.is_empty() {
            warn!(instance = %self.key, "launch failed, and {killed}");
        }
        self.record_survivors(&tree, &killed);
        match killed.survivors() {
            None => (code, message),
            Some(survivors) => (code, format!("{message}; still alive after SIGKILL: {survivors}")),
        }
    }

    /// Records the end of the process, after what is left of its tree was killed, and removes its pid file.
    pub(super) async fn record_exit(&mut self, code: Option<i32>, cause: ExitCause) {
        self.end_tree().await;
        self.clear_process(code, cause);
        self.remove_old_pid_file().await;
    }

    /// Removes the pid file of an ended foreground process, if the file still names that process.
    pub(super) async fn remove_old_pid_file(&mut self) {
        let Some((spec, pid)) = self.pid_file.old.take() else { return };
        self.shared.logs.files().remove_pid(&self.key, &spec, pid);
        if let Ok(rights) = self.shared.rights_of(&spec)
            && !spec.identity.pid_path.is_empty()
        {
            rights.remove_pid_file(&spec.identity.pid_path, pid).await;
        }
    }

    /// Records the end of the process. The caller removes the pid file: a relaunch replaces it without waiting for that.
    pub(super) fn clear_process(&mut self, code: Option<i32>, cause: ExitCause) {
        let recorded = |run: &ProcessRun| self.shared.exits.code(&run.incarnation);
        let code = code.or_else(|| self.state.run.as_ref().and_then(recorded));
        if let Some(pid) = self.state.run.as_ref().map(|run| run.identity.pid) {
            self.add_exit(pid, code, cause);
        }
        if let Some(run) = self.state.run.take() {
            // Deleted only after the state is written: an agent that is killed before that reads the record again.
            self.unwritten.exit_records.extend(Some(run.incarnation.clone()).filter(|id| !id.is_empty()));
            let spec = &run.live.spec;
            let ends = spec.monitor.auto_type != AutoType::Resident;
            let foreground = ends || spec.control.start_mode == Some(StartMode::Foreground);
            self.pid_file.old = foreground.then(|| (Arc::clone(spec), run.identity.pid));
        }
        self.shared.resources.pools.forget(&self.key);
        self.process_output.end();
        (self.handle, self.output, *self.monitors) = (None, None, Monitors::default());
        (self.state.exit, self.state.since) = (code, clock::now().0);
    }
}

/// The signal that stops the process of a spec without stop_cmd.
pub(super) fn stop_signal(spec: &Spec) -> Signal {
    spec.control.stop_signal.as_deref().and_then(named_signal).unwrap_or(Signal::TERM)
}

/// A signal by its name in a spec.
pub(super) fn named_signal(name: &str) -> Option<Signal> {
    signal_number(name).and_then(Signal::from_named_raw)
}

/// The reply of a stop: names the processes that had to be killed. A stop has failed while a process of the tree is alive.
fn stopped(killed: &KilledProcesses) -> OpReply {
    if killed.survivors().is_some() {
        return (RowCode::CHECK_FAILED, format!("stop: {killed}"));
    }
    let (code, message) = done();
    match killed.is_empty() {
        true => (code, message),
        false => (code, format!("{message}; {killed}")),
    }
}

/// Signals the main process and waits for its end. If it does not end in time, the whole tree is killed.
async fn end_by_signal(
    handle: &ProcessHandle,
    tree: Option<&ProcessTree>,
    signal: Signal,
    wait: Duration,
    killed: &mut KilledProcesses,
) -> Result<Option<i32>, OpReply> {
    if signal == Signal::KILL {
        killed.extend(kill_tree(handle, tree).await);
    }
    let _ = handle.signal(signal);
    failpoint::point("signalled");
    if let Ok(code) = timeout(wait, handle.wait_exit()).await {
        return Ok(code);
    }
    kill_all(handle, tree, killed).await
}

/// Kills the whole tree of a process that did not end in time.
async fn kill_all(
    handle: &ProcessHandle,
    tree: Option<&ProcessTree>,
    killed: &mut KilledProcesses,
) -> Result<Option<i32>, OpReply> {
    let (pid, of_main) = (handle.identity.pid, name(handle.identity.pid));
    killed.extend(kill_tree(handle, tree).await);
    killed.add(pid, of_main);
    let _ = handle.signal(Signal::KILL);
    let still_alive = (RowCode::CHECK_FAILED, "stop: process is still alive after SIGKILL".to_owned());
    timeout(KILL_TIMEOUT, handle.wait_exit()).await.map_err(|_| still_alive)
}

/// Kills the members of a tree. The main process is stopped first, so that it does not replace them.
async fn kill_tree(handle: &ProcessHandle, tree: Option<&ProcessTree>) -> KilledProcesses {
    let _ = handle.signal(Signal::STOP);
    failpoint::point("main-stopped");
    match tree {
        Some(tree) => tree.kill().await,
        None => KilledProcesses::default(),
    }
}
