//! One instance's keeper: a task that owns it. Operations come to it one after the other, so they never overlap; between
//! them it waits for its process to end, or for the time to launch it again.
//!
//! What it is about to do is in the store before it is done, and what became of it is written before it is told.
//!
//! [`monitor`] is what is looked at while a process runs, [`restart`] what brings it back and keeps its schedule,
//! [`resumption`] what continues an operation after a restart of the agent.

mod monitor;
mod restart;
mod resumption;

use std::future::pending;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::sleep_until;
use tracing::{debug, info, warn};

use super::account::Account;
use super::cgroup::Cgroups;
use super::checks::{CheckResult, FileSums};
use super::exit_record::ExitRecords;
use super::meter::{HostShare, Meter};
use super::output::Output;
use super::ownership;
use super::permits::Permits;
use super::policy::HostPolicy;
use super::pools::Pools;
use super::process::{LaunchedProcess, ProcessHandle};
use super::recovery::Resumption;
use super::restart_policy::{Phase, RestartEvent, RestartSeries};
use super::schedule::{ClockReading, Schedule};
use super::state::{
    InstanceState, LaunchIntent, PendingOperation, ProcessRun, Retry, intent_key, pending_key, results_txn,
    state_key, state_txn,
};
use super::user_files::{FileWork, Rights, RootOpenPolicy, UserPermits};
use super::{fresh_id, now_ms};
use crate::failpoint;
use crate::gse::agent_protocol::{AgentMessage, AgentOp, ConfigState, OpRequest, OpResult, OwnedSpec};
use crate::gse::codes::RowCode;
use crate::model::{AutoType, InstanceKey, Spec};
use crate::store::{Embedded, Error, Store, Txn};

/// What all keepers share.
pub struct AgentContext {
    pub store: Embedded,
    /// What is to be told to the gateway.
    pub up: mpsc::UnboundedSender<AgentMessage>,
    /// Where commands, and runs that come to an end, leave their exit codes.
    pub exits: ExitRecords,
    /// Files and launches, per user.
    pub user_permits: Arc<UserPermits>,
    /// Where the host's policy lets root open files for other users.
    pub root_open_policy: RootOpenPolicy,
    /// Commands of specs that run at once, per user.
    pub commands: Permits,
    /// Checks of health and files at once, per user: those that hang must not hold operations up.
    pub check_permits: Permits,
    pub groups: Cgroups,
    pub pools: Pools,
    /// What may be launched and adopted here.
    pub policy: HostPolicy,
    /// Between two looks at health and files.
    pub check_interval: Duration,
}

impl AgentContext {
    /// The rights that a spec's files are opened with, and its commands run with.
    pub fn rights_of(&self, spec: &Spec) -> Result<Rights, String> {
        let account = Account::of(spec)?;
        Ok(Rights::new(account, Arc::clone(&self.user_permits), Arc::clone(&self.root_open_policy)))
    }

    /// [`HostPolicy::check`], away from the async threads where it resolves paths.
    pub async fn check_policy(&self, key: &InstanceKey, spec: &Arc<Spec>) -> Result<(), String> {
        if !self.policy.resolves_paths() {
            return self.policy.check(key, spec);
        }
        let rights = self.rights_of(spec)?;
        let (policy, key, spec) = (self.policy.clone(), key.clone(), Arc::clone(spec));
        rights.run(FileWork::Paths, "check the paths of the spec", move |_| policy.check(&key, &spec)).await
    }
}

/// What a keeper is asked.
pub enum InstanceCommand {
    Op(Box<OpRequest>),
    /// What is registered now.
    Give(Box<(Option<OwnedSpec>, u64)>),
    /// It is known by another name now; its old name is forgotten.
    Rename(Box<(InstanceKey, OpRequest)>),
    Report,
    /// Processes of an earlier agent whose folder is lost: one of them may be this instance's, under this name or, if
    /// it was renamed since, under another.
    Found {
        unclaimed: Arc<Vec<LaunchedProcess>>,
        renamed: bool,
    },
    /// Something that concerns it may have changed.
    Wake,
}

pub struct InstanceTask {
    pub(super) key: InstanceKey,
    pub(super) state: InstanceState,
    pub(super) hold: Option<ProcessHandle>,
    pub(super) series: RestartSeries,
    /// When its schedule runs it next.
    pub(super) next: Option<Schedule>,
    /// When it was launched, if we did that.
    pub(super) launched: Option<Instant>,
    /// What is looked at while it runs.
    pub(super) monitors: Box<Monitors>,
    /// Where a daemon writes that kept its starter's output.
    pub(super) output: Option<Output>,
    /// The operation in progress, and whether it is in the store.
    pub(super) operation: Option<Box<(PendingOperation, bool)>>,
    /// An operation that an earlier agent began.
    pub(super) resumption: Option<Box<Resumption>>,
    /// The launch of a daemon that an earlier agent began, and the operation in progress continues.
    pub(super) interrupted: Option<Box<LaunchIntent>>,
    /// The spec and pid of a foreground process that is gone and whose pid file is not removed yet.
    pub(super) old_pid_file: Option<(Arc<Spec>, u32)>,
    /// The row could not be written: it is tried again then.
    pub(super) write_at: Option<Instant>,
    /// A start or restart failed: what is supervised comes back once the result is written.
    pub(super) launch_failed: bool,
    /// Results that could not be written. They go with the next write.
    pub(super) unwritten: Vec<OpResult>,
    /// Exit records that are of no use once the instance is written next.
    pub(super) records: Vec<String>,
    /// The pid of a daemon that runs under this identity and is not the agent's, when it was last observed.
    pub(super) stranger_pid: Option<u32>,
    pub(super) shared: Arc<AgentContext>,
}

/// What was found of a running process, and what is looked at next.
#[derive(Default)]
pub(super) struct Monitors {
    pub(super) meter: Meter,
    pub(super) share: Option<HostShare>,
    /// Why it is not well, by its own command; `None`: not asked yet.
    pub(super) health: Option<Result<(), String>>,
    pub(super) version: String,
    pub(super) config: Vec<(String, ConfigState)>,
    files: FileSums,
    check_count: u32,
    check_task: Option<JoinHandle<CheckResult>>,
    sample_at: Option<Instant>,
    check_at: Option<Instant>,
    trim_at: Option<Instant>,
}

/// What is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TimerEvent {
    /// A try to bring it back.
    Try,
    Run,
    Sample,
    Check,
    TrimOutput,
    /// The row, which could not be written before.
    Write,
}

/// Between two tries to write a row that could not be written.
const WRITE_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// How an operation ended.
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
        mut row: InstanceState,
        hold: Option<ProcessHandle>,
        shared: Arc<AgentContext>,
    ) -> InstanceTask {
        // Read from a file, two specs that are one take twice the room.
        if let (Some(given), Some(run)) = (&row.given, &mut row.run)
            && given == &run.live
        {
            run.live = given.clone();
        }
        let recorded = row.run.as_ref().and_then(|run| run.output);
        let output = hold.as_ref().and_then(|hold| Output::of(hold, recorded));
        let tended = Box::default();
        let ClockReading { wall, passed } = read_clocks();
        let series = row.retry.as_ref().map(|retry| retry.series(wall, passed)).unwrap_or_default();
        InstanceTask {
            key,
            state: row,
            hold,
            series,
            next: None,
            launched: None,
            monitors: tended,
            output,
            operation: None,
            resumption: None,
            interrupted: None,
            old_pid_file: None,
            write_at: None,
            launch_failed: false,
            unwritten: Vec::new(),
            records: Vec::new(),
            stranger_pid: None,
            shared,
        }
    }

    /// Until nobody can ask any more.
    pub async fn run(mut self, mut asks: mpsc::UnboundedReceiver<InstanceCommand>) {
        // An operation that has begun comes before supervision; a process that ended while no agent ran has ended now.
        if let Some(resumption) = self.resumption.take() {
            // What runs is visible, however long the operation takes.
            self.report();
            Box::pin(self.resume(*resumption)).await;
        } else if self.hold.is_none() && self.state.run.is_some() {
            Box::pin(self.handle_exit(None)).await;
        }
        Box::pin(self.relaunch_if_due()).await;
        loop {
            enum Next {
                Ask(Option<InstanceCommand>),
                Ended(Option<i32>),
                Found(CheckResult),
                Due(TimerEvent),
            }
            self.plan_next_run();
            self.schedule_checks();
            let due = self.next_timer();
            let (hold, looking) = (self.hold.as_ref(), self.monitors.check_task.as_mut());
            let next = tokio::select! {
                biased;
                code = async { match hold { Some(hold) => hold.wait_exit().await, None => pending().await } } => Next::Ended(code),
                ask = asks.recv() => Next::Ask(ask),
                note = async { match looking { Some(looking) => looking.await, None => pending().await } } => {
                    Next::Found(note.unwrap_or_default())
                }
                due = async { match due { Some((at, due)) => { sleep_until(at.into()).await; due } None => pending().await } } => {
                    Next::Due(due)
                }
            };
            // Boxed: a keeper waits nearly always, and there are thousands of them.
            match next {
                Next::Ask(None) => return,
                Next::Ask(Some(ask)) => Box::pin(self.handle_command(ask)).await,
                Next::Ended(code) => Box::pin(self.handle_exit(code)).await,
                Next::Found(note) => self.apply_check_result(note),
                Next::Due(TimerEvent::Try) => {
                    Box::pin(self.apply_restart_policy(RestartEvent::TimerFired)).await
                }
                Next::Due(TimerEvent::Run) => Box::pin(self.run_scheduled()).await,
                Next::Due(TimerEvent::Sample) => Box::pin(self.sample()).await,
                Next::Due(TimerEvent::Write) => self.write(None).await,
                Next::Due(TimerEvent::Check) => self.start_checks(),
                Next::Due(TimerEvent::TrimOutput) => {
                    self.monitors.trim_at = None;
                    self.output.iter().for_each(Output::forget);
                }
            }
        }
    }

    /// What comes first, and when.
    fn next_timer(&self) -> Option<(Instant, TimerEvent)> {
        let (now, moment) = (Instant::now(), read_clocks());
        let after = |ms: i64| now + Duration::from_millis(u64::try_from(ms).unwrap_or(0));
        let again = match self.series.phase {
            Phase::Idle => self.next.map(|next| (after(next.wait_ms(moment)), TimerEvent::Run)),
            Phase::Waiting { until } | Phase::Failed { until } => {
                Some((after(until.saturating_sub(moment.passed)), TimerEvent::Try))
            }
        };
        let Monitors { sample_at, check_at: look_at, trim_at: forget_at, .. } = &*self.monitors;
        let others = [
            (sample_at, TimerEvent::Sample),
            (look_at, TimerEvent::Check),
            (forget_at, TimerEvent::TrimOutput),
            (&self.write_at, TimerEvent::Write),
        ];
        let others = others.into_iter().filter_map(|(at, due)| Some(((*at)?, due)));
        again.into_iter().chain(others).min_by_key(|(at, _)| *at)
    }

    async fn handle_command(&mut self, ask: InstanceCommand) {
        match ask {
            InstanceCommand::Report => {
                self.observe_foreign_process().await;
                self.report();
            }
            InstanceCommand::Found { unclaimed, renamed } => self.reclaim(&unclaimed, renamed).await,
            InstanceCommand::Wake => {}
            InstanceCommand::Give(given) => {
                let (given, changed) = *given;
                if changed > self.state.changed {
                    (self.state.given, self.state.changed) = (given, changed);
                    self.next = None;
                    self.write(None).await;
                }
            }
            InstanceCommand::Op(request) => {
                let (code, message, content) = self.operate(&request).await;
                self.finish(&request, code, message, content, Txn::default()).await;
                self.supervise_after_failure().await;
            }
            InstanceCommand::Rename(rename) => {
                let (to, request) = *rename;
                let from = std::mem::replace(&mut self.key, to);
                if let Some(held) = request.spec.clone() {
                    self.state.given = Some(held);
                }
                let (code, message) = done();
                // With the new row in one commit: an agent that is killed here loses neither.
                let entries = [state_key(&from), intent_key(&from), pending_key(&from)];
                let forget = entries.into_iter().fold(Txn::default(), |txn, key| txn.and(Txn::delete(key)));
                self.finish(&request, code, message, None, forget).await;
            }
        }
    }

    /// Holds the process of an earlier agent's launch again: it counts as running with what is registered, and is not
    /// supervised until an operation says so.
    async fn reclaim(&mut self, unclaimed: &[LaunchedProcess], renamed: bool) {
        let Some(live) = self.state.given.clone().filter(|_| self.hold.is_none()) else { return };
        let found = match self.shared.rights_of(&live.spec) {
            Ok(rights) => {
                ownership::find_unrecorded(&self.key, &live.spec, &rights, unclaimed, renamed).await
            }
            Err(why) => Err(why),
        };
        let (hold, incarnation) = match found {
            Ok(found) => found,
            Err(why) => {
                debug!(instance = %self.key, %why, renamed, "no process was found again");
                return;
            }
        };
        info!(instance = %self.key, pid = hold.identity.pid, renamed, "process found again by its launch");
        let group = self.shared.groups.of(&incarnation).map(|group| group.path());
        self.state.run = Some(ProcessRun {
            identity: hold.identity.clone(),
            live,
            by: None,
            incarnation,
            group,
            output: None,
        });
        (self.state.since, self.state.started, self.state.exit) = (now_ms(), now_ms(), None);
        self.state.message.clear();
        self.hold = Some(hold);
        self.write(None).await;
        if renamed {
            self.report();
        }
    }

    async fn operate(&mut self, request: &OpRequest) -> (RowCode, String, Option<Value>) {
        let held = request.spec.clone();
        let held = held
            .or_else(|| self.state.run.as_ref().map(|run| run.live.clone()))
            .or_else(|| self.state.given.clone());
        let Some(held) = held else {
            return (
                RowCode::COMMAND_FAILED,
                "nothing is known of it, and no spec was sent".to_owned(),
                None,
            );
        };
        let op_id = Some(request.op_id.clone());
        // Before anything is stopped: a restart that may not launch must leave the process as it is.
        if request.op.registers_spec()
            && let Err(refused) = self.shared.check_policy(&self.key, &held.spec).await
        {
            return (RowCode::COMMAND_FAILED, refused, None);
        }
        self.begin_operation(request);
        self.perform(request, held, op_id).await
    }

    /// Performs an operation, from the beginning or from where an earlier agent left it.
    pub(super) async fn perform(
        &mut self,
        request: &OpRequest,
        held: OwnedSpec,
        op_id: Option<String>,
    ) -> (RowCode, String, Option<Value>) {
        let (code, message) = match &request.op {
            AgentOp::Status => {
                return match self.live_status(&held).await {
                    Ok(content) => (RowCode::DONE, "success".to_owned(), Some(content)),
                    Err(why) => (RowCode::COMMAND_FAILED, why, None),
                };
            }
            AgentOp::Start => self.start(&held, op_id).await,
            AgentOp::Stop => self.stop(&held, &request.op_id).await,
            AgentOp::Kill => self.kill(&held, &request.op_id).await,
            AgentOp::Restart => self.restart(&held, op_id).await,
            AgentOp::Reload => self.reload(&held, request.takes.as_deref(), &request.op_id).await,
            AgentOp::Host => self.supervise(held).await,
            AgentOp::Unhost => {
                (self.state.hosted, self.state.dormant) = (false, false);
                self.series = RestartSeries::default();
                done()
            }
            AgentOp::Rename { .. } => {
                self.state.given = Some(held);
                done()
            }
        };
        (code, message, None)
    }

    /// Writes and reports the result. `with`: what is written in the same commit.
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
            info!(instance = %self.key, op = ?request.op, code = code.0, message = %result.message, "operation");
            self.state.ending = None;
            failpoint::point("done");
            self.operation = None;
            let _ = self.write_with(Some(&result), with).await;
            failpoint::point("result-written");
            self.observe_foreign_process().await;
            self.report();
        }
        let _ = self.shared.up.send(AgentMessage::Result(result));
    }

    /// Writes how it stands. What cannot be written is still so; the next write says it.
    pub(super) async fn write(&mut self, result: Option<&OpResult>) {
        let _ = self.write_with(result, Txn::default()).await;
    }

    /// The same, with more in the same commit.
    pub(super) async fn write_with(&mut self, result: Option<&OpResult>, with: Txn) -> Result<(), Error> {
        let resident = |held: &OwnedSpec| held.spec.monitor.auto_type == AutoType::Resident;
        match self.state.hosted && self.state.given.as_ref().is_some_and(resident) {
            true => drop(self.state.next.get_or_insert_with(fresh_id)),
            false => self.state.next = None,
        }
        let ClockReading { wall, passed } = read_clocks();
        self.state.retry = Retry::of(self.series, wall, passed);
        self.state.dormant &= self.hold.is_none();
        self.unwritten.extend(result.cloned());
        let mut txn = state_txn(&self.key, &self.state).and(results_txn(&self.unwritten));
        // The entry of an operation in progress stays until its own result is written.
        let in_progress = self.operation.as_ref().is_some_and(|operation| operation.1);
        if !self.unwritten.is_empty() && !in_progress {
            txn = txn.and(Txn::delete(pending_key(&self.key)));
        }
        let txn = txn.and(Txn::delete(intent_key(&self.key))).and(with);
        self.write_at = None;
        match self.shared.store.txn(txn).await {
            // A command of an operation in progress is remembered until its result is written.
            Ok(_) if self.operation.is_none() => {
                self.records.drain(..).for_each(|id| self.shared.exits.remove(&id));
                self.unwritten.clear();
                Ok(())
            }
            Ok(_) => {
                self.unwritten.clear();
                Ok(())
            }
            Err(error) => {
                self.state.next = None;
                self.write_at = Some(Instant::now() + WRITE_RETRY_INTERVAL);
                warn!(instance = %self.key, %error, "the agent's store cannot be written");
                Err(error)
            }
        }
    }
}

/// What both clocks say: tries and cycles go by what passes, whatever the other one shows.
pub(super) fn read_clocks() -> ClockReading {
    static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    ClockReading { wall: now_ms(), passed: i64::try_from(BEGIN.elapsed().as_millis()).unwrap_or(i64::MAX) }
}
