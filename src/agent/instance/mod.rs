//! Instance task: the task that owns one instance and its process.
//!
//! Operations on an instance run one after the other and never overlap. Between them the task waits for the process to
//! end, or for a timer. An intent is in the store before its effect; a result is in the store before it is reported.
//!
//! - [`operations`]: start and restart. [`launch`] starts processes, [`commands`] runs the commands of a spec, [`hooks`] those
//!   around them.
//! - [`log_output`]: logs, log writers and stored output of foreground processes.
//! - [`ending`]: stop and kill, and the end of a process tree. [`handover`]: reload, and processes that replace another.
//! - [`adoption`]: daemons that the agent did not launch or has to reclaim.
//! - [`monitor`]: resource usage, health checks, version and files of a running process. [`health`]: the reported health.
//! - [`history`]: exits, restarts and failed starts.
//! - [`restart`]: relaunches and scheduled runs. [`completion`]: processes that the restart policy leaves stopped.
//! - [`resumption`]: operations that an earlier agent began.
//! - [`report`]: reports to the gateway. [`live_status`]: the live status check.
//! - [`command_queue`]: commands to the task. [`idle`]: the end of the task.

mod adoption;
mod command_queue;
mod commands;
mod completion;
mod ending;
mod handover;
mod health;
mod history;
mod hooks;
mod idle;
mod launch;
mod live_status;
mod log_output;
mod monitor;
mod operations;
mod report;
mod restart;
mod resumption;
mod state_write;

use std::future::pending;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::time::sleep_until;
use tracing::info;

pub use self::command_queue::{CommandReceiver, CommandSender, QueueState, command_queue};
pub use self::log_output::PipeRecord;
use self::log_output::ProcessOutput;
use self::monitor::Monitors;
use super::captured_output::CapturedOutput;
use super::checks::CheckResult;
use super::context::AgentContext;
use super::figures::FigureSlot;
use super::process::{LaunchedProcess, ProcessHandle};
use super::recovery::Resumption;
use super::restart_policy::{Phase, RestartEvent, RestartSeries};
use super::schedule::{ClockReading, Schedule};
use super::start_output::StartAttempt;
use super::state::{InstanceState, LaunchIntent, PendingOperation, intent_key, pending_key, state_key};
use crate::agent_protocol::{AgentMessage, AgentOp, OpRequest, OpResult, OwnedSpec};
use crate::clock;
use crate::failpoint;
use crate::gse::codes::RowCode;
use crate::model::{InstanceKey, Spec};
use crate::store::Txn;

/// A command for an instance task.
pub enum InstanceCommand {
    Op(Box<OpRequest>),
    /// The registered spec, and the sequence number of that change in the gateway's store.
    SetSpec(Box<(Option<OwnedSpec>, u64)>),
    /// Renames the instance, and deletes the entries of the old name.
    Rename(Box<(InstanceKey, OpRequest)>),
    Report,
    /// Reclaims a process of an earlier agent whose folder was lost. `renamed`: the process may carry another name of this
    /// instance.
    Reclaim {
        unclaimed: Arc<Vec<LaunchedProcess>>,
        renamed: bool,
    },
    /// The gateway's registry as of this number lacks the instance.
    Unlisted {
        as_of: u64,
    },
    /// Recomputes the timers: shared state such as a pool has changed.
    Wake,
}

/// The owner of one instance.
pub struct InstanceTask {
    key: InstanceKey,
    state: InstanceState,
    handle: Option<ProcessHandle>,
    launches: LaunchSchedule,
    monitors: Box<Monitors>,
    /// Captured output of start_cmd, which a daemon may still write to, or of a foreground process without a log.
    output: Option<CapturedOutput>,
    process_output: ProcessOutput,
    pub(super) progress: OperationProgress,
    pid_file: PidFileState,
    unwritten: UnwrittenState,
    figures: Arc<FigureSlot>,
    shared: Arc<AgentContext>,
}

/// The last launch of an instance and the times of the next one.
#[derive(Default)]
struct LaunchSchedule {
    series: RestartSeries,
    /// The next scheduled run.
    next: Option<Schedule>,
    /// Time of the last launch by this agent.
    last: Option<Instant>,
    /// Time of the last scheduled run that this agent skipped.
    skipped: Option<Instant>,
    /// A start or restart failed: a supervised process is relaunched once the result is written.
    failed: bool,
    /// The process ended while no agent ran.
    is_unobserved: bool,
}

/// The operation in progress, and the remains of an operation that an earlier agent began.
#[derive(Default)]
pub(super) struct OperationProgress {
    /// The operation in progress, and whether it is in the store.
    operation: Option<Box<(PendingOperation, bool)>>,
    /// An operation that an earlier agent began.
    pub(super) resumption: Option<Box<Resumption>>,
    /// A daemon launch that an earlier agent began and the operation in progress continues.
    interrupted: Option<Box<LaunchIntent>>,
    /// The launch was refused because of a foreign process: supervision does not repeat it.
    is_refused: bool,
    /// The output of the start that is being checked.
    attempt: Option<Box<StartAttempt>>,
    /// Failed hooks of the operation that their spec ignores.
    ignored_failures: Vec<String>,
    /// The task has to read its state from the store first.
    pub(super) is_stored: bool,
}

/// The pid file of an instance, apart from the process that the task holds.
#[derive(Default)]
struct PidFileState {
    /// Spec and pid of an ended foreground process whose pid file still has to be removed.
    old: Option<(Arc<Spec>, u32)>,
    /// Pid of a foreign process under this identity, when last observed.
    foreign_pid: Option<u32>,
}

/// Changes that the next write of the state includes or completes.
#[derive(Default)]
struct UnwrittenState {
    /// Results that could not be written.
    results: Vec<OpResult>,
    /// Exit records that are deleted after the write.
    exit_records: Vec<String>,
    /// Time of the next attempt, after a failed write.
    retry_at: Option<Instant>,
}

/// The work of a timer that fires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TimerEvent {
    Relaunch,
    ScheduledRun,
    Sample,
    Check,
    TrimOutput,
    ObserveDescendants,
    /// Retries a failed write of the state.
    Write,
    /// Starts a log writer.
    LogWriter,
    /// Reports without a failed start that is old.
    ForgetStart,
}

/// An event that the task waits for.
enum TaskEvent {
    /// `None`: all senders are gone.
    Command(Option<InstanceCommand>),
    Exited(Option<i32>),
    WriterExited,
    Checked(CheckResult),
    Timer(TimerEvent),
}

/// Interval between two attempts to write the state.
const WRITE_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Whether `after_start` of a spec runs after a relaunch by supervision.
pub(super) fn runs_after_relaunch(spec: &Spec) -> bool {
    hooks::after_start(spec, true).is_some()
}

/// The code and message of an operation that ended.
pub(super) type OpReply = (RowCode, String);

pub(super) fn done() -> OpReply {
    (RowCode::DONE, "success".to_owned())
}

pub(super) fn failed(message: impl Into<String>) -> OpReply {
    (RowCode::COMMAND_FAILED, message.into())
}

impl InstanceTask {
    pub fn new(
        key: InstanceKey,
        mut state: InstanceState,
        handle: Option<ProcessHandle>,
        shared: Arc<AgentContext>,
    ) -> InstanceTask {
        // Deserialized, two equal specs are two allocations: share one.
        if let (Some(given), Some(run)) = (&state.given, &mut state.run)
            && given == &run.live
        {
            run.live = given.clone();
        }
        let in_effect = state.run.as_ref().map(|run| &run.live).or(state.given.as_ref());
        in_effect.iter().for_each(|owned| shared.logs.set(&key, &owned.spec));
        // A process that the agent did not launch has no output of the agent.
        let launched = state.run.as_ref().filter(|run| !run.incarnation.is_empty() || run.output.is_some());
        let output =
            launched.zip(handle.as_ref()).and_then(|(run, handle)| CapturedOutput::of(handle, run.output));
        let monitors = Box::default();
        let figures = shared.resources.figures.add(&key);
        let ClockReading { wall, passed } = read_clocks();
        let series = state.retry.as_ref().map(|retry| retry.series(wall, passed)).unwrap_or_default();
        InstanceTask {
            key,
            state,
            handle,
            launches: LaunchSchedule { series, ..LaunchSchedule::default() },
            monitors,
            output,
            process_output: ProcessOutput::default(),
            progress: OperationProgress::default(),
            pid_file: PidFileState::default(),
            unwritten: UnwrittenState::default(),
            figures,
            shared,
        }
    }

    /// Runs until its command sender is dropped, or nothing of the instance is left.
    ///
    /// Boxed: a future stores its arguments twice, and thousands of tasks are idle nearly all the time.
    pub async fn run(mut self: Box<Self>, mut commands: CommandReceiver) {
        Box::pin(self.load_state()).await;
        Box::pin(self.continue_after_restart()).await;
        self.adopt_output();
        loop {
            self.plan_next_run();
            self.schedule_checks();
            self.register_figures();
            if self.uses_log_writer() {
                Box::pin(self.maintain_log_writer()).await;
            }
            let due = self.next_timer();
            let writer = self.process_output.writer.as_ref();
            let (handle, check_task) = (self.handle.as_ref(), self.monitors.check_task.as_mut());
            let next = tokio::select! {
                biased;
                code = async { match handle { Some(handle) => handle.wait_exit().await, None => pending().await } } => TaskEvent::Exited(code),
                command = commands.recv() => TaskEvent::Command(command),
                _ = async { match writer { Some(writer) => Box::pin(writer.handle.wait_exit()).await, None => pending().await } } => TaskEvent::WriterExited,
                result = async { match check_task { Some(check_task) => check_task.result().await, None => pending().await } } => {
                    TaskEvent::Checked(result)
                }
                due = async { match due { Some((at, due)) => { sleep_until(at.into()).await; due } None => pending().await } } => {
                    TaskEvent::Timer(due)
                }
            };
            // Boxed: thousands of tasks are idle nearly all the time, and their futures should be small.
            match next {
                TaskEvent::Command(None) => return,
                TaskEvent::Command(Some(command)) => Box::pin(self.handle_command(command)).await,
                TaskEvent::Exited(code) => Box::pin(self.handle_exit(code)).await,
                TaskEvent::WriterExited => self.handle_writer_exit(),
                TaskEvent::Checked(result) => self.apply_check_result(result),
                TaskEvent::Timer(TimerEvent::Relaunch) => {
                    Box::pin(self.apply_restart_policy(RestartEvent::TimerFired)).await
                }
                TaskEvent::Timer(TimerEvent::ScheduledRun) => Box::pin(self.run_scheduled()).await,
                TaskEvent::Timer(TimerEvent::Sample) => Box::pin(self.sample()).await,
                TaskEvent::Timer(TimerEvent::Write) => self.write(None).await,
                TaskEvent::Timer(TimerEvent::LogWriter) => self.process_output.retry_at = None,
                TaskEvent::Timer(TimerEvent::Check) => self.start_checks(),
                TaskEvent::Timer(TimerEvent::ObserveDescendants) => {
                    Box::pin(self.observe_descendants()).await
                }
                TaskEvent::Timer(TimerEvent::TrimOutput) => {
                    self.monitors.due.trim = None;
                    self.output.iter().for_each(CapturedOutput::forget);
                }
                TaskEvent::Timer(TimerEvent::ForgetStart) => self.report(),
            }
            if self.is_idle() && commands.end_if_empty(self.stored_state()) {
                return;
            }
        }
    }

    /// The timer that fires first, and its time.
    fn next_timer(&self) -> Option<(Instant, TimerEvent)> {
        let (now, clocks) = (Instant::now(), read_clocks());
        let after = |ms: i64| now + Duration::from_millis(u64::try_from(ms).unwrap_or(0));
        let launch = match self.launches.series.phase {
            Phase::Idle => {
                self.launches.next.map(|next| (after(next.wait_ms(clocks)), TimerEvent::ScheduledRun))
            }
            Phase::Waiting { until } | Phase::Failed { until } => {
                Some((after(until.saturating_sub(clocks.passed)), TimerEvent::Relaunch))
            }
        };
        let Monitors { due, descent, .. } = &*self.monitors;
        let forget_at = self.failed_start_left_ms(clocks.wall).map(after);
        let others = [
            (&due.sample, TimerEvent::Sample),
            (&due.check, TimerEvent::Check),
            (&due.trim, TimerEvent::TrimOutput),
            (&descent.at, TimerEvent::ObserveDescendants),
            (&self.unwritten.retry_at, TimerEvent::Write),
            (&self.process_output.retry_at, TimerEvent::LogWriter),
            (&forget_at, TimerEvent::ForgetStart),
        ];
        let others = others.into_iter().filter_map(|(at, due)| Some(((*at)?, due)));
        launch.into_iter().chain(others).min_by_key(|(at, _)| *at)
    }

    async fn handle_command(&mut self, command: InstanceCommand) {
        match command {
            InstanceCommand::Report => {
                self.observe_foreign_process().await;
                self.report();
            }
            InstanceCommand::Reclaim { unclaimed, renamed } => self.reclaim(&unclaimed, renamed).await,
            InstanceCommand::Unlisted { as_of } => self.unregister_unlisted(as_of).await,
            InstanceCommand::Wake => {}
            InstanceCommand::SetSpec(spec) => {
                let (given, changed) = *spec;
                if changed > self.state.changed {
                    self.register_given(given);
                    self.state.changed = changed;
                    self.launches.next = None;
                    let is_live = self.register_live();
                    self.write(None).await;
                    if is_live {
                        self.report();
                    }
                    self.forget_unregistered();
                }
            }
            InstanceCommand::Op(request) => {
                let (code, message, content) = self.operate(&request).await;
                self.record_failed_start(&request, code, &message);
                self.finish(&request, code, message, content, Txn::default()).await;
                self.supervise_after_failure().await;
            }
            InstanceCommand::Rename(rename) => {
                let (to, request) = *rename;
                let from = std::mem::replace(&mut self.key, to);
                self.shared.logs.rename(&from, &self.key);
                let (code, message) = match request.spec.clone() {
                    Some(owned) if request.supervises => self.supervise(owned).await,
                    given => {
                        self.state.given = given.or(self.state.given.take());
                        done()
                    }
                };
                // Deletes the old entries in the commit that writes the new state: a killed agent loses neither.
                let entries = [state_key(&from), intent_key(&from), pending_key(&from)];
                let forget = entries.into_iter().fold(Txn::default(), |txn, key| txn.and(Txn::delete(key)));
                self.finish(&request, code, message, None, forget).await;
            }
        }
    }

    async fn operate(&mut self, request: &OpRequest) -> (RowCode, String, Option<Value>) {
        // A request repeats the registered spec nearly always: memory has it once.
        let known = |sent: OwnedSpec| self.state.given.clone().filter(|given| *given == sent).unwrap_or(sent);
        let owned = request.spec.clone().map(known);
        let owned = owned
            .or_else(|| self.state.run.as_ref().map(|run| run.live.clone()))
            .or_else(|| self.state.given.clone());
        let Some(owned) = owned else {
            return (
                RowCode::COMMAND_FAILED,
                "the instance has no registered spec, and the request has none".to_owned(),
                None,
            );
        };
        let op_id = Some(request.op_id.clone());
        // Checked before the stop: a restart whose launch is refused must not stop the process.
        if request.op.registers_spec()
            && let Err(refused) = self.shared.check_policy(&self.key, &owned.spec).await
        {
            return (RowCode::COMMAND_FAILED, refused.into(), None);
        }
        self.begin_operation(request);
        self.perform(request, owned, op_id).await
    }

    /// Performs an operation. A resumed operation continues after its finished effects.
    pub(super) async fn perform(
        &mut self,
        request: &OpRequest,
        owned: OwnedSpec,
        op_id: Option<String>,
    ) -> (RowCode, String, Option<Value>) {
        self.progress.ignored_failures.clear();
        let (code, mut message) = match &request.op {
            AgentOp::Status => {
                return match self.live_status(&owned).await {
                    Ok(content) => (RowCode::DONE, "success".to_owned(), Some(content)),
                    Err(error) => (RowCode::COMMAND_FAILED, error.into(), None),
                };
            }
            AgentOp::Start => self.start(&owned, op_id).await,
            AgentOp::Stop => self.stop(&owned, &request.op_id).await,
            AgentOp::Kill => self.kill(&owned, &request.op_id).await,
            AgentOp::Restart => Box::pin(self.restart(&owned, op_id, request.supervises)).await,
            AgentOp::Reload => Box::pin(self.reload(&owned, request.takes.as_deref(), &request.op_id)).await,
            AgentOp::Host => self.supervise(owned).await,
            AgentOp::Unhost => {
                (self.state.hosted, self.state.dormant) = (false, false);
                self.launches.series = RestartSeries::default();
                done()
            }
            AgentOp::Rename { .. } if request.supervises => self.supervise(owned).await,
            AgentOp::Rename { .. } => {
                self.state.given = Some(owned);
                done()
            }
        };
        for failure in std::mem::take(&mut self.progress.ignored_failures) {
            message.push_str(&format!("; ignored: {failure}"));
        }
        (code, message, None)
    }

    /// Writes and reports the result. `with`: further writes of the same commit.
    pub(super) async fn finish(
        &mut self,
        request: &OpRequest,
        code: RowCode,
        message: String,
        content: Option<Value>,
        with: Txn,
    ) {
        let (op_id, seq) = (request.op_id.clone(), request.seq);
        let result = OpResult { op_id, seq, code: code.0, message, content };
        if !request.op.is_read_only() {
            info!(instance = %self.key, op = ?request.op, code = code.0, message = %result.message, "operation finished");
            self.state.ending = None;
            failpoint::point("done");
            self.progress.operation = None;
            let _ = self.write_with(Some(&result), with).await;
            failpoint::point("result-written");
            self.observe_foreign_process().await;
            self.report();
        }
        let _ = self.shared.up.send(AgentMessage::Result(result));
    }
}

/// Reads both clocks. Retries and cycles use the monotonic one, so that a wall-clock jump does not move them.
pub(super) fn read_clocks() -> ClockReading {
    static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    ClockReading {
        wall: clock::now().0,
        passed: i64::try_from(BEGIN.elapsed().as_millis()).unwrap_or(i64::MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A gateway may request a thousand operations at once, and each of them waits for its permit.
    #[tokio::test]
    async fn an_operation_that_waits_needs_little_memory() {
        let folder = tempfile::tempdir().expect("a folder");
        let (shared, _sent) = AgentContext::for_test(folder.path());
        let key = "0:127.0.0.1:web:p".parse().expect("a key");
        let mut task = InstanceTask::new(key, InstanceState::default(), None, shared);
        let operation = size_of_val(&task.handle_command(InstanceCommand::Wake));
        assert!(operation < 6 << 10, "{operation} bytes");
    }
}
