//! Operations on an instance that launch a process: start and restart, with GSE's result codes.

use std::time::{Duration, Instant};

use super::adoption::not_owned;
use super::ending::stop_signal;
use super::history::ExitCause;
use super::hooks::after_start;
use super::launch::{LaunchChecks, has_pid_file_of_agent};
use super::{InstanceTask, Monitors, OpReply, done, failed, runs_after_relaunch};
use crate::agent::captured_output::CapturedOutput;
use crate::agent::cgroup::Cgroup;
use crate::agent::fresh_id;
use crate::agent::process::{ProcessHandle, boot_id};
use crate::agent::restart_policy::{RestartEvent, RestartSeries};
use crate::agent::state::{LaunchIntent, ProcessRun, intent_key};
use crate::agent::tree::LaunchTraces;
use crate::agent_protocol::OwnedSpec;
use crate::clock;
use crate::failpoint;
use crate::gse::codes::RowCode;
use crate::model::{AutoType, Monitor, StartMode};
use crate::store::{Store, Txn};

/// Maximum remaining start check of a resumed operation: a stop that arrived in the meantime waits for it.
const RESUMED_CHECK: Duration = Duration::from_secs(10);
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
            let reply = Box::pin(self.check_after_launch(owned, op_id.as_deref())).await;
            if reply.0 == RowCode::DONE {
                (self.state.given, self.state.hosted) = (Some(owned.clone()), true);
            }
            return reply;
        }
        // A launch that an earlier agent began is continued: its process must not be taken for a foreign one.
        let is_continued = self.progress.interrupted.as_ref().is_some_and(|intent| intent.op_id == op_id);
        if !is_continued && let Err(why) = self.reclaim_orphan(owned).await {
            return failed(format!("not started: {why}"));
        }
        if self.is_running() {
            // A reclaimed daemon of an earlier launch: register and supervise it.
            if self.state.given.is_none() {
                (self.state.given, self.state.hosted) = (Some(owned.clone()), true);
            }
            return (RowCode::ALREADY_RUNNING, "process is already running".to_owned());
        }
        let is_checked_at_launch = has_pid_file_of_agent(&owned.spec);
        match if is_continued || is_checked_at_launch { Ok(None) } else { self.foreign_pid(owned).await } {
            Ok(None) => {}
            Ok(Some(pid)) => return (RowCode::ALREADY_RUNNING, not_owned(pid)),
            Err(why) => return failed(format!("not started: {why}")),
        }
        self.launches.series = RestartSeries::default();
        let (given, hosted) = (self.state.given.clone(), self.state.hosted);
        let checks = LaunchChecks { start: true, foreign: is_checked_at_launch && !is_continued };
        let reply = self.launch(owned, op_id, checks).await;
        // A failed start restores the registered spec and the supervision.
        (self.state.given, self.state.hosted) = match reply.0 {
            RowCode::DONE => (Some(owned.clone()), true),
            _ => (given, hosted),
        };
        self.launches.failed = reply.0 != RowCode::DONE && !std::mem::take(&mut self.progress.is_refused);
        reply
    }

    /// Relaunches a supervised process that a failed operation left stopped, with its former spec. Called after the result
    /// is written: the relaunch does not belong to the operation.
    pub(super) async fn supervise_after_failure(&mut self) {
        let failed = std::mem::take(&mut self.launches.failed);
        if failed
            && self.state.hosted
            && !self.state.dormant
            && self.state.completed.is_none()
            && !self.is_running()
        {
            self.apply_restart_policy(RestartEvent::Ended { up_ms: 0 }).await;
        }
    }

    /// Launches the process, and waits for its start check.
    pub(super) async fn launch(
        &mut self,
        owned: &OwnedSpec,
        op_id: Option<String>,
        checks: LaunchChecks,
    ) -> OpReply {
        if let Err(refused) = self.shared.check_policy(&self.key, &owned.spec).await {
            return failed(refused);
        }
        if let Err(reply) = self.end_earlier_launch().await {
            return reply;
        }
        self.shared.logs.set(&self.key, &owned.spec);
        // The launch id of a relaunch by supervision, or of a resumed launch, is in the store already. Any other launch id
        // is written before the spawn: the next agent must find the process if this one is killed in between.
        let resumed = self.progress.interrupted.take().filter(|intent| intent.op_id == op_id);
        let reserved = if op_id.is_none() { self.state.next.take() } else { None };
        let launch_id = resumed.map(|intent| intent.incarnation).or(reserved);
        let written = launch_id.is_some();
        let incarnation = launch_id.unwrap_or_else(fresh_id);
        let groups = &self.shared.groups;
        let group = groups.make(&incarnation, &owned.spec);
        let path = group.as_ref().map(Cgroup::path);
        let (boot, uid) = (boot_id().to_owned(), self.uid_of(&owned.spec));
        let (held, at) = (owned.clone(), clock::now().0);
        let intent = LaunchIntent { incarnation, op_id, held, at, group: path, boot, uid };
        if !written {
            let value = serde_json::to_vec(&intent).unwrap_or_default();
            let txn = Txn::put(intent_key(&self.key), value).and(self.pending());
            if let Err(error) = self.shared.store.txn(txn).await {
                return failed(format!("not started: cannot write the agent's store: {error}"));
            }
        }
        failpoint::point("intent-written");
        let mut traces = LaunchTraces::default();
        let begun =
            self.begin(owned, &intent.incarnation, intent.op_id.as_deref(), group.clone(), checks).await;
        let process = match begun {
            Ok(handle) => handle,
            Err(reply) => {
                let launch = (intent.incarnation, intent.group);
                return self.end_failed_launch(uid, launch, traces, reply).await;
            }
        };
        traces.add_session(&process, &intent.incarnation, group.as_ref());
        failpoint::point("born");
        // A group without a process refused the launch: it proves nothing about the tree.
        let is_grouped = process.is_grouped;
        let group =
            group.filter(|group| is_grouped || !group.processes().is_empty() || !group.remove_if_empty());
        let intent = LaunchIntent { group: group.as_ref().map(Cgroup::path), ..intent };
        let (is_operation, op_id) = (intent.op_id.is_some(), intent.op_id.clone());
        self.record_launch(process, owned, intent, traces);
        let secs = owned.spec.monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS);
        // Without a start check, the result of the operation is written next, with the state. Until then the intent is in
        // the store, by which the next agent finds the process.
        let is_resident = owned.spec.monitor.auto_type == AutoType::Resident;
        let has_hook = after_start(&owned.spec, self.repairs_drift()).is_some();
        let is_merged = is_operation && is_resident && secs == 0 && !has_hook;
        if !is_merged {
            self.write(None).await;
        }
        failpoint::point("row-written");
        if !is_merged {
            self.report();
        }
        if !is_operation {
            return Box::pin(self.finish_relaunch()).await;
        }
        if !checks.start || !is_resident {
            return done();
        }
        let reply = Box::pin(self.stays_running(Duration::from_secs(secs.into()))).await;
        self.progress.attempt = None;
        self.finish_start(owned, op_id.as_deref(), reply).await
    }

    /// Makes a launched process the run of this instance.
    fn record_launch(
        &mut self,
        process: ProcessHandle,
        owned: &OwnedSpec,
        intent: LaunchIntent,
        traces: LaunchTraces,
    ) {
        let LaunchIntent { incarnation, op_id: by, at, group, uid, .. } = intent;
        (self.state.dormant, self.state.unknown_run, self.state.completed) = (false, None, None);
        self.state.history.failed_start = None;
        let is_resident = owned.spec.monitor.auto_type == AutoType::Resident;
        self.state.history.restarts += u64::from(by.is_none() && is_resident);
        if owned.spec.monitor.auto_type == AutoType::Periodic {
            self.state.history.begin_run(at);
        }
        let hook_due = by.is_none() && runs_after_relaunch(&owned.spec);
        let (identity, live) = (process.identity.clone(), owned.clone());
        let output = self.output.as_ref().and_then(CapturedOutput::inode);
        let log = self.process_output.record();
        self.state.run = Some(ProcessRun {
            identity,
            live,
            by,
            incarnation,
            group,
            output,
            log,
            uid,
            traces,
            adopted: None,
            hook_due,
        });
        (self.state.since, self.state.started, self.state.exit) = (clock::now().0, clock::now().0, None);
        (self.launches.last, *self.monitors) = (Some(Instant::now()), Monitors::default());
        self.state.message.clear();
        if owned.spec.monitor.auto_type == AutoType::OneShot {
            self.state.ran = Some(owned.clone());
        }
        self.handle = Some(process);
    }

    /// Finishes the start check of a process that this operation launched before the agent restarted.
    async fn check_after_launch(&mut self, owned: &OwnedSpec, op_id: Option<&str>) -> OpReply {
        let secs = owned.spec.monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS);
        if owned.spec.monitor.auto_type != AutoType::Resident {
            return done();
        }
        let passed = u64::try_from(clock::now().0.saturating_sub(self.state.started)).unwrap_or(0);
        let rest = Duration::from_secs(secs.into()).saturating_sub(Duration::from_millis(passed));
        let reply = self.stays_running(rest.min(RESUMED_CHECK)).await;
        self.finish_start(owned, op_id, reply).await
    }

    /// Waits for the start check: the process must not end within `time`.
    pub(super) async fn stays_running(&mut self, time: Duration) -> OpReply {
        let Some(handle) = &self.handle else { return failed("process is gone") };
        let Ok(code) = tokio::time::timeout(time, handle.wait_exit()).await else { return done() };
        let (end, live) = (self.process_end(code), self.state.run.as_ref().map(|run| run.live.clone()));
        let output = self.start_output().await;
        self.record_exit(code, ExitCause::StartCheck).await;
        if live.is_some_and(|live| self.completes_start(&live, end)) {
            return (RowCode::DONE, format!("success; {}", self.state.message));
        }
        let code = code.map_or("an unknown code".to_owned(), |code| format!("code {code}"));
        // A start check of 0 s only waits for the program.
        let when = match time.as_secs() {
            0 => "right after its start".to_owned(),
            secs => format!("within {secs} s"),
        };
        (RowCode::CHECK_FAILED, format!("process ended with {code} {when}{output}"))
    }

    /// The last lines of the output of a start that fails, for its message. Captured output is stored.
    pub(super) async fn start_output(&mut self) -> String {
        let Some(attempt) = self.progress.attempt.take() else { return String::new() };
        // The log writer has yet to write the last lines.
        self.process_output.drain().await;
        if let (None, Some(output)) = (&attempt.log, &self.output) {
            let launch_id = self.state.run.as_ref().map_or_else(fresh_id, |run| run.incarnation.clone());
            self.store_failed_output(&launch_id, &output.tail(&attempt.secrets));
        }
        attempt.last_lines(self.output.as_ref()).await
    }

    /// Restarts the process. `supervises`: a stopped process is started as well, and the process is supervised afterwards.
    pub(super) async fn restart(
        &mut self,
        owned: &OwnedSpec,
        op_id: Option<String>,
        supervises: bool,
    ) -> OpReply {
        let reply = self.restart_or_start(owned, op_id, supervises).await;
        if reply.0 == RowCode::DONE {
            self.state.given = Some(owned.clone());
            self.state.hosted |= supervises;
        }
        reply
    }

    async fn restart_or_start(
        &mut self,
        owned: &OwnedSpec,
        op_id: Option<String>,
        supervises: bool,
    ) -> OpReply {
        if self.launched_by(op_id.as_deref()) {
            let reply = Box::pin(self.check_after_launch(owned, op_id.as_deref())).await;
            self.launches.failed = reply.0 != RowCode::DONE;
            return reply;
        }
        let is_stopped = self.ended_by(op_id.as_deref());
        let is_continued = self.progress.interrupted.as_ref().is_some_and(|intent| intent.op_id == op_id);
        if supervises
            && !is_stopped
            && !is_continued
            && let Err(why) = self.reclaim_orphan(owned).await
        {
            return failed(format!("not restarted: {why}"));
        }
        let is_down = !self.is_running() && !is_stopped;
        if is_down && !supervises {
            return self.not_running(owned).await;
        }
        let spec = &owned.spec;
        let daemon = spec.control.start_mode.unwrap_or_default() == StartMode::Daemon;
        // A one-shot or scheduled run that is down has no pid file to wait for.
        let by_command = daemon && (!is_down || spec.monitor.auto_type == AutoType::Resident);
        if let (true, Some(command)) = (by_command, &spec.control.restart_cmd) {
            if is_down {
                match self.foreign_pid(owned).await {
                    Ok(None) => self.launches.series = RestartSeries::default(),
                    Ok(Some(pid)) => return (RowCode::ALREADY_RUNNING, not_owned(pid)),
                    Err(why) => return failed(format!("not restarted: {why}")),
                }
            }
            let reply = Box::pin(self.restart_with_command(owned, command, op_id.as_deref())).await;
            let reply = self.finish_start(owned, op_id.as_deref(), reply).await;
            self.launches.failed = (is_down || !self.is_running()) && reply.0 != RowCode::DONE;
            return reply;
        }
        if is_down {
            return self.start(owned, op_id).await;
        }
        let live = self.state.run.as_ref().map_or_else(|| owned.clone(), |run| run.live.clone());
        if is_stopped {
            self.finish_interrupted_stop(op_id.as_deref().unwrap_or_default()).await;
        } else {
            self.state.ending.clone_from(&op_id);
            let pending = self.pending();
            if let Err(error) = self.write_with(None, pending).await {
                self.state.ending = None;
                return failed(format!("not restarted: cannot write the agent's store: {error}"));
            }
            if let Err(reply) = self.run_before_stop(&live.spec, op_id.as_deref().unwrap_or_default()).await {
                self.state.ending = None;
                return reply;
            }
            let stop = live.spec.control.stop_cmd.as_deref();
            let signal = stop_signal(&live.spec);
            let reply =
                self.stop_process(&live, stop, signal, Ok(op_id.as_deref().unwrap_or_default())).await;
            if reply.0 != RowCode::DONE {
                return reply;
            }
            failpoint::point("down");
        }
        let (given, reply) = (self.state.given.clone(), self.launch(owned, op_id, LaunchChecks::START).await);
        if reply.0 != RowCode::DONE {
            self.state.given = given;
            self.launches.failed = true;
        }
        reply
    }
}
